//! The gradient of an attention problem: what is asked for, and what has passed every rule.

use crate::error::SpecErrors;
use crate::problem::{Check, Problem, normalise};
use crate::spec::{AttentionSpec, TensorSpec};
use serde::{Deserialize, Serialize};

/// One backward problem: from `q`, `k`, `v`, `o`, `stats` and `d_o`, the gradients `dq`, `dk` and `dv`.
///
/// `o` and `stats` are those of the forward pass of the same specification. A pass that is recomputed (activation checkpointing)
/// serves as well as the first one.
///
/// ```
/// use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
/// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 129, seq_kv: 257, dim_qk: 64, dim_v: 64 };
/// let forward = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
/// let problem = forward.backward().validate()?;
/// assert_eq!(problem.dq().dims, [1, 8, 129, 64]);
/// # Ok::<(), sdpa::SpecErrors>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BackwardSpec {
    /// The attention whose gradient is asked for. Whether it asks for stats does not matter here: they are always read.
    pub forward: AttentionSpec,
    /// Gradient of the output, (batch, heads_q, seq_q, dim_v). Any stride may be 0, the last one too: the gradient of a sum is
    /// one number.
    pub d_o: TensorSpec,
    /// Gradient of the queries.
    pub dq: TensorSpec,
    /// Gradient of the keys.
    pub dk: TensorSpec,
    /// Gradient of the values.
    pub dv: TensorSpec,
    /// Whether every run must give the same bits.
    pub deterministic: bool,
}

impl AttentionSpec {
    /// The gradient of this attention, each gradient laid out as its operand and `d_o` as `o`.
    pub fn backward(&self) -> BackwardSpec {
        BackwardSpec {
            forward: self.clone(),
            d_o: self.o,
            dq: own_elements(self.q),
            dk: own_elements(self.k),
            dv: own_elements(self.v),
            deterministic: false,
        }
    }
}

/// The same tensor, or a dense one where elements share memory: a gradient has an element for each.
fn own_elements(tensor: TensorSpec) -> TensorSpec {
    let shares = (0..3).any(|axis| tensor.dims[axis] > 1 && tensor.strides[axis] == 0);
    if shares { TensorSpec::dense(tensor.dims, crate::Layout::Bhsd) } else { tensor }
}

impl BackwardSpec {
    /// Asks for the same bits on every run.
    #[must_use]
    pub fn deterministic(mut self) -> Self {
        self.deterministic = true;
        self
    }

    /// Normalises the specification, or says everything that is wrong with it.
    ///
    /// # Errors
    /// Every rule that a field breaks, each with the field, its value and the rule.
    pub fn validate(&self) -> Result<BackwardProblem, SpecErrors> {
        let mut forward = self.forward.clone();
        forward.stats = true;
        let mut check = Check::default();
        let problem = match Problem::new(&forward) {
            Ok(problem) => Some(problem),
            Err(errors) => {
                check.errors = errors.0;
                None
            }
        };
        let pairs = [
            ("d_o", &self.d_o, "o", &self.forward.o),
            ("dq", &self.dq, "q", &self.forward.q),
            ("dk", &self.dk, "k", &self.forward.k),
            ("dv", &self.dv, "v", &self.forward.v),
        ];
        for (name, tensor, like, operand) in pairs {
            check.tensor_with(name, tensor, self.forward.dtype, name == "d_o");
            for (axis, (&extent, &want)) in tensor.dims.iter().zip(&operand.dims).enumerate() {
                check.equal(&format!("{name}.dims[{axis}]"), extent, &format!("{like}.dims[{axis}]"), want);
            }
            if name != "d_o" {
                check.output(name, tensor);
            }
        }
        match problem {
            Some(forward) if check.errors.is_empty() => Ok(BackwardProblem {
                forward,
                d_o: normalise(self.d_o),
                dq: normalise(self.dq),
                dk: normalise(self.dk),
                dv: normalise(self.dv),
                deterministic: self.deterministic,
            }),
            Some(_) | None => Err(SpecErrors(check.errors)),
        }
    }
}

/// A backward problem that has passed every rule; only [`BackwardSpec::validate`] makes one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct BackwardProblem {
    forward: Problem,
    d_o: TensorSpec,
    dq: TensorSpec,
    dk: TensorSpec,
    dv: TensorSpec,
    deterministic: bool,
}

impl BackwardProblem {
    /// The attention, with stats.
    pub fn forward(&self) -> &Problem {
        &self.forward
    }
    /// Gradient of the output; any stride may be 0.
    pub fn d_o(&self) -> &TensorSpec {
        &self.d_o
    }
    /// Gradient of the queries.
    pub fn dq(&self) -> &TensorSpec {
        &self.dq
    }
    /// Gradient of the keys.
    pub fn dk(&self) -> &TensorSpec {
        &self.dk
    }
    /// Gradient of the values.
    pub fn dv(&self) -> &TensorSpec {
        &self.dv
    }
    /// Whether every run must give the same bits.
    pub fn deterministic(&self) -> bool {
        self.deterministic
    }
    /// Multiplications and additions of the five matrix products over the pairs that the masks keep, for rates.
    pub fn flops(&self) -> f64 {
        let p = &self.forward;
        let (qk, v) = (p.dim_qk() as f64, p.dim_v() as f64);
        p.flops() / (qk + v) * (3.0 * qk + 2.0 * v)
    }
}
