//! The backward pass of an attention problem: its specification, and the validated problem.

use crate::check::Check;
use crate::dtype::DType;
use crate::error::SpecErrors;
use crate::expr::{Declared, ParamKind, Type};
use crate::fp8::Fp8Scale;
use crate::operand::{Direction, Operand, Side};
use crate::problem::{Problem, normalise, unplaced};
use crate::score_mod::{self, Gradient, NoGradient};
use crate::sink::SINK;
use crate::spec::{AttentionSpec, Layout, TensorSpec};
use crate::statistic::StatsBase;
use serde::{Deserialize, Serialize};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// One backward problem: computes `dq`, `dk`, `dv` and gradients of declared parameters from `q`, `k`, `v`, `o`, `stats` and `d_o`.
///
/// `o` and `stats` come from a forward pass of the same specification. A recomputed pass (activation checkpointing) serves as well as the first one.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
/// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 129, seq_kv: 257, dim_qk: 64, dim_v: 64 };
/// let forward = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
/// let problem = forward.backward().validate()?;
/// assert_eq!(problem.dq().dims, [1, 8, 129, 64]);
/// # Ok::<(), sdpa_core::SpecErrors>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BackwardSpec {
    /// The forward attention. Its choice of row statistics has no effect: the backward pass always reads `stats` and no other statistic.
    pub forward: AttentionSpec,
    /// Gradient of the output, (batch, heads_q, seq_q, dim_v). Any stride may be 0, even the last one: the gradient of a sum is one number.
    pub d_o: TensorSpec,
    /// Gradient of the queries, (batch, heads_q, seq_q, dim_qk).
    pub dq: TensorSpec,
    /// Gradient of the keys, (batch, heads_kv, seq_kv, dim_qk).
    pub dk: TensorSpec,
    /// Gradient of the values, (batch, heads_kv, seq_kv, dim_v).
    pub dv: TensorSpec,
    /// The declared parameters whose gradients are computed in addition. They may be parameters of score_mods, and the sink.
    #[serde(default)]
    pub wrt: Vec<GradientSpec>,
    /// True if results must be bitwise equal on every run.
    pub deterministic: bool,
    /// Element type of `d_o` if it differs from that of `q`. Only passes of 8-bit floats may set it, to the other 8-bit float. They round
    /// dS to
    /// this type too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_o_dtype: Option<DType>,
    /// Element type of `dq`, `dk` and `dv` if it differs from that of `q`. Only passes of 8-bit floats may set it, to the other 8-bit float, f16 or
    /// bf16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_dtype: Option<DType>,
}

/// A declared parameter whose gradient is computed: a dense tensor over the axes of the parameter, or one element for a scalar.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GradientSpec {
    /// The parameter: a scalar, or a tensor of floats.
    pub name: String,
    /// Element type of the gradient: f32, f16 or bf16.
    pub dtype: DType,
}

impl AttentionSpec {
    /// Returns the backward specification of this attention. Each gradient has the layout of its operand, and `d_o` that of `o`.
    pub fn backward(&self) -> BackwardSpec {
        BackwardSpec {
            forward: self.clone(),
            d_o: self.o,
            dq: self.own_elements(self.q),
            dk: self.own_elements(self.of_entries(self.k)),
            dv: self.own_elements(self.of_entries(self.v)),
            wrt: Vec::new(),
            deterministic: false,
            d_o_dtype: None,
            gradient_dtype: None,
        }
    }

    /// Returns a tensor of K or V unchanged, or a dense one if the cache is paged.
    fn of_entries(&self, tensor: TensorSpec) -> TensorSpec {
        self.paged.map_or(tensor, |_| TensorSpec::dense(tensor.dims, Layout::Bshd))
    }

    /// Returns the tensor unchanged, or a dense one if elements share memory: a gradient needs memory for each element.
    fn own_elements(&self, tensor: TensorSpec) -> TensorSpec {
        let packed = self.packed.is_some();
        let several = [!packed && tensor.dims[0] > 1, tensor.dims[1] > 1, packed || tensor.dims[2] > 1];
        let shares = several.iter().zip(tensor.strides).any(|(several, stride)| *several && stride == 0);
        let layout = if packed { Layout::Bshd } else { Layout::Bhsd };
        if shares { TensorSpec::dense(tensor.dims, layout) } else { tensor }
    }
}

impl BackwardSpec {
    /// Requires bitwise equal results on every run.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    /// assert!(spec.backward().deterministic().validate()?.deterministic());
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn deterministic(mut self) -> Self {
        self.deterministic = true;
        self
    }

    /// Sets the extents and strides of the gradient of the output.
    #[must_use]
    pub fn with_d_o(mut self, d_o: TensorSpec) -> Self {
        self.d_o = d_o;
        self
    }

    /// Sets the extents and strides of the gradient of the queries.
    #[must_use]
    pub fn with_dq(mut self, dq: TensorSpec) -> Self {
        self.dq = dq;
        self
    }

    /// Sets the extents and strides of the gradient of the keys.
    #[must_use]
    pub fn with_dk(mut self, dk: TensorSpec) -> Self {
        self.dk = dk;
        self
    }

    /// Sets the extents and strides of the gradient of the values.
    #[must_use]
    pub fn with_dv(mut self, dv: TensorSpec) -> Self {
        self.dv = dv;
        self
    }

    /// Sets the element type of `d_o` to one of the two 8-bit floats. Passes of 8-bit floats often need the range of `f8e5m2` here.
    #[must_use]
    pub fn with_upstream_in(mut self, dtype: DType) -> Self {
        self.d_o_dtype = Some(dtype);
        self
    }

    /// Sets the element type of `dq`, `dk` and `dv` to an 8-bit float, f16 or bf16, for a pass of 8-bit floats.
    #[must_use]
    pub fn with_gradients_in(mut self, dtype: DType) -> Self {
        self.gradient_dtype = Some(dtype);
        self
    }

    /// Adds the gradient of the declared parameter `name`, in this element type.
    ///
    /// ```
    /// use sdpa_core::expr::{Axis, F32};
    /// use sdpa_core::library::bias;
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).score_mod(bias([Axis::Head, Axis::K], F32));
    /// let problem = spec.backward().wrt("bias", DType::F32).validate()?;
    /// assert_eq!(problem.gradient_elements("bias"), 8 * 16);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn wrt(mut self, name: &str, dtype: DType) -> Self {
        self.wrt.push(GradientSpec { name: name.to_owned(), dtype });
        self
    }

    /// Normalises the specification, or returns every mistake in it.
    ///
    /// # Errors
    /// Returns every rule that a field breaks, each with the field, its value and the rule.
    pub fn validate(&self) -> Result<BackwardProblem, SpecErrors> {
        // Deliberately without `..`: a new field of the specification must be read here.
        let BackwardSpec { forward: asked, d_o, dq, dk, dv, wrt, deterministic, d_o_dtype, gradient_dtype } = self;
        let mut forward = asked.clone();
        // A backward pass reads `stats` and no other statistic.
        (forward.stats, forward.row_max, forward.sum_exp) = (true, false, false);
        let mut check = Check::default();
        let problem = match Problem::new(&forward) {
            Ok(problem) => Some(problem),
            Err(errors) => {
                check.errors = errors.0;
                None
            }
        };
        let pairs = [("d_o", d_o, "o", &asked.o), ("dq", dq, "q", &asked.q), ("dk", dk, "k", &asked.k), ("dv", dv, "v", &asked.v)];
        if forward.stats_base != StatsBase::Natural {
            check.fail("forward.stats_base", forward.stats_base, "natural: backward passes read natural logarithms");
        }
        if forward.paged.is_some() {
            check.fail("forward.paged", "a paged KV cache", "none in a backward pass: gradients of a paged KV cache are not supported");
        }
        if forward.block_scaled {
            let rule = "false in a backward pass: its GEMMs sum over other axes, so q, k and d_o would need block scales along those axes";
            check.fail("forward.block_scaled", true, rule);
        }
        let dtype = asked.dtype;
        let d_o_dtype = check.narrow("d_o_dtype", *d_o_dtype, dtype, &[]);
        let gradient_dtype = check.narrow("gradient_dtype", *gradient_dtype, dtype, &[DType::F16, DType::BF16]);
        let packed = forward.packed.is_some();
        let place = |tensor: TensorSpec| if packed { unplaced(tensor) } else { tensor };
        let most = |side: Side| forward.packed.map(|packed| forward.most(&packed, side));
        for (name, tensor, like, operand) in pairs {
            let tensor = &place(*tensor);
            check.extents(name, tensor, forward.never_empty());
            check.memory(name, tensor, if name == "d_o" { d_o_dtype } else { gradient_dtype }.unwrap_or(dtype), name == "d_o");
            for (axis, (&extent, &want)) in tensor.dims.iter().zip(&operand.dims).enumerate() {
                check.equal(&format!("{name}.dims[{axis}]"), extent, &format!("{like}.dims[{axis}]"), want);
            }
            if name != "d_o" {
                check.output(name, tensor, most(if like == "q" { Side::Queries } else { Side::Keys }));
            }
        }
        let [batch, heads_q, seq_q, _] = asked.q.dims;
        let extents = [batch, heads_q, seq_q, asked.k.dims[2]].map(|n| n.clamp(1, i64::from(i32::MAX)));
        let names: Vec<String> = of_scores(wrt, asked.sink).map(|g| g.name.clone()).collect();
        let gradient = match score_mod::gradient(&asked.score_mods, extents, &names) {
            Ok(gradient) => Some(gradient),
            // `Problem::new` has already reported this error.
            Err(NoGradient::Expr(_)) if problem.is_none() => None,
            Err(e) => {
                check.fail("forward.score_mods", "score_mods without a gradient", format!("differentiable ones: {e}"));
                None
            }
        };
        let mut params = problem.as_ref().map_or_else(Vec::new, |p| p.params().to_vec());
        if let Some(gradient) = &gradient {
            check.params("forward.score_mods", gradient.trace.params(), &mut params);
        }
        if dtype.is_fp8() && !forward.block_scaled {
            // The backward pass reads the rounded output and does not round it again, so it needs no `scale_o`.
            params.retain(|p| p.name != Fp8Scale::ScaleO.name());
            let more = Fp8Scale::of(Direction::Backward).iter().filter(|scale| !Fp8Scale::of(Direction::Forward).contains(scale));
            more.for_each(|scale| check.own(scale.declared(), &mut params));
        }
        check_wrt(wrt, &mut check, &params);
        match (problem, gradient) {
            (Some(forward), Some(gradient)) if check.errors.is_empty() => Ok(BackwardProblem {
                gradient: (forward.score_mod().is_some() || !names.is_empty()).then(|| Arc::new(gradient)),
                wrt: of_scores(wrt, asked.sink).chain(wrt.iter().filter(|g| asked.sink && g.name == SINK)).cloned().collect(),
                params,
                forward,
                d_o: normalise(place(*d_o), most(Side::Queries)),
                dq: normalise(place(*dq), most(Side::Queries)),
                dk: normalise(place(*dk), most(Side::Keys)),
                dv: normalise(place(*dv), most(Side::Keys)),
                deterministic: *deterministic,
                d_o_dtype,
                gradient_dtype,
            }),
            _ => Err(SpecErrors(check.errors)),
        }
    }
}

fn check_wrt(wrt: &[GradientSpec], check: &mut Check, params: &[Declared]) {
    for (n, g) in wrt.iter().enumerate() {
        let field = format!("wrt[{n}]");
        if wrt[..n].iter().any(|before| before.name == g.name) {
            check.fail(field.clone(), &g.name, "each name once");
        }
        if !g.dtype.is_float() || g.dtype.is_fp8() {
            check.fail(format!("{field}.dtype"), g.dtype, "one of f32, f16, bf16");
        }
        match params.iter().find(|p| p.name == g.name).map(|p| p.kind) {
            None => check.fail(field, &g.name, "a declared parameter"),
            Some(ParamKind::Tensor { axes, dtype: _ }) if axes.has_end() => {
                check.fail(field, &g.name, "a parameter other than cu_seqlens, which have no gradient");
            }
            Some(kind) if kind.ty() != Type::F32 => {
                check.fail(field, &g.name, format!("a floating-point parameter; it is {}", crate::check::kind(kind)));
            }
            Some(_) => {}
        }
    }
}

/// Iterates over the gradients of parameters that score_mods declare.
fn of_scores(wrt: &[GradientSpec], sink: bool) -> impl Iterator<Item = &GradientSpec> + Clone {
    wrt.iter().filter(move |g| !(sink && g.name == SINK))
}

/// A valid backward problem. Only [`BackwardSpec::validate`] makes one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BackwardProblem {
    pub(crate) forward: Problem,
    pub(crate) d_o: TensorSpec,
    pub(crate) dq: TensorSpec,
    pub(crate) dk: TensorSpec,
    pub(crate) dv: TensorSpec,
    pub(crate) gradient: Option<Arc<Gradient>>,
    pub(crate) wrt: Vec<GradientSpec>,
    #[serde(skip)]
    pub(crate) params: Vec<Declared>,
    pub(crate) deterministic: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) d_o_dtype: Option<DType>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gradient_dtype: Option<DType>,
}

impl Hash for BackwardProblem {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Deliberately without `..`: a new field must be hashed. `params` follow from the traces and options that declare them.
        let BackwardProblem { forward, d_o, dq, dk, dv, gradient, wrt, params: _, deterministic, d_o_dtype, gradient_dtype } = self;
        (forward, [d_o, dq, dk, dv], gradient, wrt, deterministic).hash(state);
        (d_o_dtype, gradient_dtype).hash(state);
    }
}

impl BackwardProblem {
    /// Returns the forward attention, with `stats`.
    #[inline]
    pub fn forward(&self) -> &Problem {
        &self.forward
    }
    /// Returns the gradient of the output, (batch, heads_q, seq_q, dim_v): extents, strides, alignment. Any stride may be 0.
    #[inline]
    pub fn d_o(&self) -> &TensorSpec {
        &self.d_o
    }
    /// Returns the gradient of the queries, (batch, heads_q, seq_q, dim_qk): extents, strides, alignment.
    #[inline]
    pub fn dq(&self) -> &TensorSpec {
        &self.dq
    }
    /// Returns the gradient of the keys, (batch, heads_kv, seq_kv, dim_qk): extents, strides, alignment.
    #[inline]
    pub fn dk(&self) -> &TensorSpec {
        &self.dk
    }
    /// Returns the gradient of the values, (batch, heads_kv, seq_kv, dim_v): extents, strides, alignment.
    #[inline]
    pub fn dv(&self) -> &TensorSpec {
        &self.dv
    }
    /// Returns an operand of the pass: extents, strides, alignment.
    pub fn tensor(&self, operand: Operand) -> &TensorSpec {
        match operand {
            Operand::Q => self.forward.q(),
            Operand::K => self.forward.k(),
            Operand::V => self.forward.v(),
            Operand::O => self.forward.o(),
            Operand::DO => &self.d_o,
            Operand::DQ => &self.dq,
            Operand::DK => &self.dk,
            Operand::DV => &self.dv,
        }
    }
    /// Returns the element type of an operand of the pass.
    pub fn dtype_of(&self, operand: Operand) -> DType {
        let own = match operand {
            Operand::Q | Operand::K | Operand::V | Operand::O => None,
            Operand::DO => self.d_o_dtype,
            Operand::DQ | Operand::DK | Operand::DV => self.gradient_dtype,
        };
        own.unwrap_or_else(|| self.forward.dtype_of(operand))
    }
    /// Returns the trace of the score_mods and their gradients; `None` for a problem without score_mods.
    #[inline]
    pub fn gradient(&self) -> Option<&Arc<Gradient>> {
        self.gradient.as_ref()
    }
    /// Returns the parameters whose gradients are computed. If the gradient of the sink is computed, it is the last one.
    #[inline]
    pub fn wrt(&self) -> &[GradientSpec] {
        &self.wrt
    }
    /// Iterates over the score_mods' parameters whose gradients are computed, in the order of [`Gradient::wrt`]: all of [`BackwardProblem::wrt`] but
    /// the sink.
    pub fn wrt_scores(&self) -> impl Iterator<Item = &GradientSpec> + Clone {
        of_scores(&self.wrt, self.forward.sink())
    }
    /// Returns the element type of the sink's gradient; `None` if the problem does not compute it.
    pub fn sink_gradient(&self) -> Option<DType> {
        self.wrt.iter().find(|g| self.forward.sink() && g.name == SINK).map(|g| g.dtype)
    }
    /// Returns every declared parameter: those of the forward pass, those of gradients written by hand, and the scales of a backward pass of 8-bit
    /// floats.
    #[inline]
    pub fn params(&self) -> &[Declared] {
        &self.params
    }
    /// Returns the number of elements of the dense gradient of a declared parameter: 1 for a scalar, 0 for a name that is not declared.
    pub fn gradient_elements(&self, name: &str) -> i64 {
        let declared = self.params.iter().find(|p| p.name == name);
        declared.map_or(0, |p| crate::params::elements(p, self.forward.extents()))
    }
    /// Returns whether results must be bitwise equal on every run.
    #[inline]
    pub fn deterministic(&self) -> bool {
        self.deterministic
    }

    /// Returns the problem with one operand made [dense](TensorSpec::densely), for executors that copy this operand first.
    #[must_use]
    pub fn densely(mut self, operand: Operand) -> BackwardProblem {
        let most = self.forward.most(operand.side());
        match operand {
            Operand::Q | Operand::K | Operand::V | Operand::O => self.forward = self.forward.densely(operand),
            Operand::DO => self.d_o = normalise(self.d_o.densely(), most),
            Operand::DQ => self.dq = normalise(self.dq.densely(), most),
            Operand::DK => self.dk = normalise(self.dk.densely(), most),
            Operand::DV => self.dv = normalise(self.dv.densely(), most),
        }
        self
    }

    /// Returns the number of floating-point operations of the backward pass, for throughput. It counts a multiplication and an addition
    /// for each product of the five GEMMs, over the query-key pairs that [`Problem::flops`] counts.
    pub fn flops(&self) -> f64 {
        let p = &self.forward;
        let (qk, v) = (p.dim_qk() as f64, p.dim_v() as f64);
        p.flops() / (qk + v) * (3.0 * qk + 2.0 * v)
    }
}
