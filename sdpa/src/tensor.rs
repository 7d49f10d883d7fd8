//! Host tensors, and what a call takes and tells.

use crate::error::{SpecError, SpecErrors};
use crate::problem::{OPERANDS, Problem};
use cudnn_graph::DType;
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
}

impl HostForward<'_> {
    /// Checks the call against the problem; the scale to use.
    ///
    /// # Errors
    /// Every wrong dtype, every buffer that is too short, stats missing or too many, a scale that is not finite.
    pub fn check(&self, problem: &Problem) -> Result<f32, SpecErrors> {
        let mut errors = Vec::new();
        let given = [
            (self.q.dtype(), self.q.len()),
            (self.k.dtype(), self.k.len()),
            (self.v.dtype(), self.v.len()),
            (self.o.dtype(), self.o.len()),
        ];
        for ((name, tensor), (dtype, len)) in OPERANDS.into_iter().zip(problem.tensors()).zip(given) {
            if dtype != problem.dtype() {
                errors.push(SpecError::new(format!("{name} dtype"), dtype, format!("the problem's, {}", problem.dtype())));
            }
            let need = tensor.extent().unwrap_or(i64::MAX);
            if i64::try_from(len).is_ok_and(|len| len < need) {
                errors.push(SpecError::new(format!("{name} length"), len, format!("at least {need} elements, by its strides")));
            }
        }
        match (&self.stats, problem.stats()) {
            (Some(stats), true) => {
                if stats.len() as i64 != problem.stats_elements() {
                    errors.push(SpecError::new(
                        "stats length",
                        stats.len(),
                        format!("batch x heads_q x seq_q = {}", problem.stats_elements()),
                    ));
                }
            }
            (None, true) => errors.push(SpecError::new("stats", "absent", "the problem asks for stats")),
            (Some(_), false) => errors.push(SpecError::new("stats", "given", "the problem does not ask for stats")),
            (None, false) => {}
        }
        let scale = self.attn_scale.unwrap_or(problem.default_scale());
        if !scale.is_finite() {
            errors.push(SpecError::new("attn_scale", scale, "a finite number"));
        }
        if errors.is_empty() { Ok(scale) } else { Err(SpecErrors(errors)) }
    }
}
