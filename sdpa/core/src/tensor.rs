//! Host tensors, and what a call takes and tells.

use crate::backward::BackwardProblem;
use crate::dtype::DType;
use crate::error::{SpecError, SpecErrors};
use crate::problem::{OPERANDS, Problem};
use crate::spec::TensorSpec;
use half::{bf16, f16};

/// Elements of an operand in host memory, read only. Strides come from the problem.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// binary32.
    F32(&'a [f32]),
    /// binary16.
    F16(&'a [f16]),
    /// bfloat16.
    BF16(&'a [bf16]),
}

/// Elements of the output in host memory.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// binary32.
    F32(&'a mut [f32]),
    /// binary16.
    F16(&'a mut [f16]),
    /// bfloat16.
    BF16(&'a mut [bf16]),
}

macro_rules! facts {
    ($t:ident) => {
        impl $t<'_> {
            /// Element type.
            pub fn dtype(&self) -> DType {
                match self {
                    $t::F32(_) => DType::F32,
                    $t::F16(_) => DType::F16,
                    $t::BF16(_) => DType::BF16,
                }
            }

            /// Number of elements, gaps between rows included.
            pub fn len(&self) -> usize {
                match self {
                    $t::F32(x) => x.len(),
                    $t::F16(x) => x.len(),
                    $t::BF16(x) => x.len(),
                }
            }

            /// True when there is no element.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
        }
    };
}
facts!(Elements);
facts!(ElementsMut);

/// What is bound to a declared parameter of a score_mod or mask.
#[derive(Clone, Copy, Debug)]
pub enum ParamValue<'a> {
    /// For a scalar.
    Scalar(f32),
    /// For a tensor of f32.
    F32(&'a [f32]),
    /// For a tensor of f16.
    F16(&'a [f16]),
    /// For a tensor of bf16.
    BF16(&'a [bf16]),
    /// For a tensor of i32.
    I32(&'a [i32]),
    /// For a tensor of truth values.
    Bool(&'a [bool]),
}

/// A declared parameter and what it is in one call.
#[derive(Clone, Copy, Debug)]
pub struct Param<'a> {
    /// The name that it was declared by.
    pub name: &'a str,
    /// Its value.
    pub value: ParamValue<'a>,
}

/// One forward call over host memory.
#[derive(Debug)]
pub struct HostForward<'a> {
    /// Queries, strided as the problem says.
    pub q: Elements<'a>,
    /// Keys.
    pub k: Elements<'a>,
    /// Values.
    pub v: Elements<'a>,
    /// Output; only elements that belong to the tensor are written.
    pub o: ElementsMut<'a>,
    /// f32, (batch, heads_q, seq_q), dense; there exactly when the problem asks for stats.
    pub stats: Option<&'a mut [f32]>,
    /// Multiplies the scores; finite. `None`: `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters; a scalar that is not named here has its default.
    pub params: &'a [Param<'a>],
}

/// One backward call over host memory.
#[derive(Debug)]
pub struct HostBackward<'a> {
    /// Queries, strided as the problem says.
    pub q: Elements<'a>,
    /// Keys.
    pub k: Elements<'a>,
    /// Values.
    pub v: Elements<'a>,
    /// Output of the forward pass.
    pub o: Elements<'a>,
    /// Gradient of the output.
    pub d_o: Elements<'a>,
    /// f32, (batch, heads_q, seq_q), dense: the forward pass's.
    pub stats: &'a [f32],
    /// Gradient of the queries; only elements that belong to the tensor are written.
    pub dq: ElementsMut<'a>,
    /// Gradient of the keys.
    pub dk: ElementsMut<'a>,
    /// Gradient of the values.
    pub dv: ElementsMut<'a>,
    /// The scale of the forward pass.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters, those of the forward pass.
    pub params: &'a [Param<'a>],
    /// Gradients of declared parameters: each that the problem asks for, once.
    pub gradients: Vec<HostGradient<'a>>,
}

/// Where the gradient of a declared parameter goes.
#[derive(Debug)]
pub struct HostGradient<'a> {
    /// The name of the parameter.
    pub name: &'a str,
    /// Dense, over the axes of the parameter; one element for a scalar.
    pub data: ElementsMut<'a>,
}

/// Collects what is wrong with a call.
struct Check<'p> {
    problem: &'p Problem,
    errors: Vec<SpecError>,
}

impl Check<'_> {
    fn operand(&mut self, name: &str, tensor: &TensorSpec, dtype: DType, len: usize) {
        if dtype != self.problem.dtype() {
            self.errors.push(SpecError::new(format!("{name} dtype"), dtype, format!("the problem's, {}", self.problem.dtype())));
        }
        let need = tensor.extent().unwrap_or(i64::MAX);
        if i64::try_from(len).is_ok_and(|len| len < need) {
            self.errors.push(SpecError::new(format!("{name} length"), len, format!("at least {need} elements, by its strides")));
        }
    }

    fn stats(&mut self, len: usize) {
        let need = self.problem.stats_elements();
        if len as i64 != need {
            self.errors.push(SpecError::new("stats length", len, format!("batch x heads_q x seq_q = {need}")));
        }
    }

    fn scale(mut self, scale: Option<f32>) -> Result<f32, SpecErrors> {
        let scale = scale.unwrap_or(self.problem.default_scale());
        if !scale.is_finite() {
            self.errors.push(SpecError::new("attn_scale", scale, "a finite number"));
        }
        if self.errors.is_empty() { Ok(scale) } else { Err(SpecErrors(self.errors)) }
    }
}

impl HostForward<'_> {
    /// Checks the call against the problem; the scale to use.
    ///
    /// # Errors
    /// Every wrong dtype, every buffer that is too short, stats missing or too many, a scale that is not finite.
    pub fn check(&self, problem: &Problem) -> Result<f32, SpecErrors> {
        let mut check = Check { problem, errors: Vec::new() };
        let given = [
            (self.q.dtype(), self.q.len()),
            (self.k.dtype(), self.k.len()),
            (self.v.dtype(), self.v.len()),
            (self.o.dtype(), self.o.len()),
        ];
        for ((name, tensor), (dtype, len)) in OPERANDS.into_iter().zip(problem.tensors()).zip(given) {
            check.operand(name, tensor, dtype, len);
        }
        match (&self.stats, problem.stats()) {
            (Some(stats), true) => check.stats(stats.len()),
            (None, true) => check.errors.push(SpecError::new("stats", "absent", "the problem asks for stats")),
            (Some(_), false) => check.errors.push(SpecError::new("stats", "given", "the problem does not ask for stats")),
            (None, false) => {}
        }
        check.errors.extend(problem.bind(self.params).err().map_or_else(Vec::new, |e| e.0));
        check.scale(self.attn_scale)
    }
}

impl HostBackward<'_> {
    /// Checks the call against the problem; the scale to use.
    ///
    /// # Errors
    /// Every wrong dtype, every buffer that is too short, a scale that is not finite, parameters and gradients that are missing,
    /// unknown, doubled or of another type or length.
    pub fn check(&self, problem: &BackwardProblem) -> Result<f32, SpecErrors> {
        let mut check = Check { problem: problem.forward(), errors: Vec::new() };
        let forward = problem.forward();
        let read = [
            ("q", forward.q(), &self.q),
            ("k", forward.k(), &self.k),
            ("v", forward.v(), &self.v),
            ("o", forward.o(), &self.o),
            ("d_o", problem.d_o(), &self.d_o),
        ];
        for (name, tensor, data) in read {
            check.operand(name, tensor, data.dtype(), data.len());
        }
        let written = [("dq", problem.dq(), &self.dq), ("dk", problem.dk(), &self.dk), ("dv", problem.dv(), &self.dv)];
        for (name, tensor, data) in written {
            check.operand(name, tensor, data.dtype(), data.len());
        }
        check.stats(self.stats.len());
        let values = crate::params::bind(problem.params(), forward.extents(), self.params);
        check.errors.extend(values.err().map_or_else(Vec::new, |e| e.0));
        self.check_gradients(problem, &mut check.errors);
        check.scale(self.attn_scale)
    }

    fn check_gradients(&self, problem: &BackwardProblem, errors: &mut Vec<SpecError>) {
        let field = |name: &str| format!("gradient of {name}");
        for (n, given) in self.gradients.iter().enumerate() {
            if !problem.wrt().iter().any(|g| g.name == given.name) {
                errors.push(SpecError::new(field(given.name), "given", "the problem does not ask for it"));
            } else if self.gradients[..n].iter().any(|before| before.name == given.name) {
                errors.push(SpecError::new(field(given.name), "given twice", "once"));
            }
        }
        for wanted in problem.wrt() {
            let Some(given) = self.gradients.iter().find(|g| g.name == wanted.name) else {
                errors.push(SpecError::new(field(&wanted.name), "absent", "the problem asks for it"));
                continue;
            };
            if given.data.dtype() != wanted.dtype {
                errors.push(SpecError::new(field(&wanted.name), given.data.dtype(), format!("the problem's, {}", wanted.dtype)));
            }
            let need = problem.gradient_elements(&wanted.name);
            if given.data.len() as i64 != need {
                errors.push(SpecError::new(format!("{} length", field(&wanted.name)), given.data.len(), format!("{need} elements, dense")));
            }
        }
    }
}
