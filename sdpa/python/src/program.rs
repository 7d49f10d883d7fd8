//! A problem without extents: score_mods and masks as text, and the order of the parameters of a call.

use crate::error::{of, one};
use crate::plan::{Asked, Plan};
use pyo3::prelude::*;
use sdpa::expr::{Axes, Declared, ParamKind};
use sdpa::{AttentionSpec, DType, Dropout, ExecutorName, Layout, Mask, ScoreMod, Shape, TensorSpec};
use serde::Deserialize;

/// The JSON text of a program.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    /// In the order in which they are applied.
    #[serde(default)]
    score_mods: Vec<String>,
    /// A query attends to a key where every one allows it.
    #[serde(default)]
    masks: Vec<String>,
    /// Whether each query head has an attention sink.
    #[serde(default)]
    sink: bool,
    /// Names of the tensors of a call, in their order.
    #[serde(default)]
    tensors: Vec<String>,
    /// Names of the scalars.
    #[serde(default)]
    scalars: Vec<String>,
    /// Whether every run returns identical bits.
    #[serde(default)]
    deterministic: bool,
    /// The name of the executor; absent: automatic selection.
    #[serde(default)]
    executor: Option<String>,
    /// The probability of dropout, whose seed and offset are the last two tensors.
    #[serde(default)]
    dropout: Option<f32>,
    /// Whether a forward pass also writes each row's maximum, after its stats.
    #[serde(default)]
    max_scores: bool,
}

/// Extents, strides and alignment of a tensor, as Python passes them.
pub(crate) type Tensor = ([i64; 4], [i64; 4], u32);

/// A parameter as Python receives it: name, axes (`None` for a scalar, extents as digits for a table), element type, default.
type Parameter = (String, Option<Vec<String>>, &'static str, Option<f32>);

/// Parsed score_mods and masks, with the order of the parameters of a call. Tensors have no extents yet.
#[pyclass(frozen, module = "sdpa._native")]
#[derive(Debug)]
pub struct Program {
    score_mods: Vec<ScoreMod>,
    masks: Vec<Mask>,
    executor: Option<ExecutorName>,
    written: Written,
}

/// Executors that a program may name.
const EXECUTORS: [ExecutorName; 3] = [ExecutorName::CPU, ExecutorName::CUDNN, ExecutorName::CUDA];

/// Returns the executor of this name.
fn executor(name: &str) -> PyResult<ExecutorName> {
    let names = || EXECUTORS.map(ExecutorName::name).join(", ");
    EXECUTORS.into_iter().find(|known| known.name() == name).ok_or_else(|| one("executor", name, format!("one of {}", names())))
}

#[pymethods]
impl Program {
    #[new]
    fn new(text: &str) -> PyResult<Program> {
        let written: Written = serde_json::from_str(text)
            .map_err(|e| one("program", format!("invalid JSON ({e})"), "an object with score_mods, masks and parameters"))?;
        let read = |what: &str, text: &str, error: String| one(what, text, error);
        let score_mods = written.score_mods.iter().map(|text| text.parse::<ScoreMod>().map_err(|e| read("score_mod", text, e.rule)));
        let score_mods = score_mods.collect::<PyResult<Vec<_>>>()?;
        let masks = written.masks.iter().map(|text| text.parse::<Mask>().map_err(|e| read("mask", text, e.rule)));
        let masks = masks.collect::<PyResult<Vec<_>>>()?;
        let executor = written.executor.as_deref().map(executor).transpose()?;
        Ok(Program { score_mods, masks, executor, written })
    }

    /// Returns the texts of the score_mods and the masks, as the library prints them.
    fn texts(&self) -> (Vec<String>, Vec<String>) {
        (self.score_mods.iter().map(ToString::to_string).collect(), self.masks.iter().map(ToString::to_string).collect())
    }

    /// Returns every declared parameter, including those that only a backward pass reads.
    fn params(&self) -> PyResult<Vec<Parameter>> {
        let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 1, seq_kv: 1, dim_qk: 8, dim_v: 8 };
        let of_any = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd);
        let mut spec = of_any.with_score_mods(self.score_mods.clone()).with_masks(self.masks.clone());
        (spec.sink, spec.dropout) = (self.written.sink, self.dropout());
        let problem = spec.backward().validate().map_err(|e| of(e.into()))?;
        Ok(problem.params().iter().map(parameter).collect())
    }

    /// Prepares a pass: forward over `q k v o`, backward over `q k v o d_o dq dk dv`. `device` is a CUDA ordinal, or `None` for the host.
    #[pyo3(signature = (device, dtype, tensors, stats, wrt))]
    fn plan(
        &self,
        py: Python<'_>,
        device: Option<u32>,
        dtype: &str,
        tensors: Vec<Tensor>,
        stats: bool,
        wrt: Vec<(String, String)>,
    ) -> PyResult<Plan> {
        let tensors: Vec<TensorSpec> =
            tensors.into_iter().map(|(dims, strides, alignment)| TensorSpec { dims, strides, alignment }).collect();
        let &[q, k, v, o, ref rest @ ..] = tensors.as_slice() else {
            return Err(one("tensors", tensors.len(), "4 (q, k, v, o), or 8 in a backward pass (and d_o, dq, dk, dv)"));
        };
        let mut spec =
            AttentionSpec::strided(named(dtype)?, [q, k, v], o).with_score_mods(self.score_mods.clone()).with_masks(self.masks.clone());
        (spec.sink, spec.stats, spec.dropout) = (self.written.sink, stats, self.dropout());
        spec.row_max = self.written.max_scores && rest.is_empty();
        let asked = match *rest {
            [] => Asked::Forward(Box::new(spec.validate().map_err(|e| of(e.into()))?)),
            [d_o, dq, dk, dv] => {
                let mut backward = spec.backward().with_d_o(d_o).with_dq(dq).with_dk(dk).with_dv(dv);
                backward.deterministic = self.written.deterministic;
                for (name, dtype) in wrt {
                    backward = backward.wrt(&name, named(&dtype)?);
                }
                Asked::Backward(Box::new(backward.validate().map_err(|e| of(e.into()))?))
            }
            _ => return Err(one("tensors", tensors.len(), "4 in a forward pass, 8 in a backward pass")),
        };
        Plan::new(py, asked, device, self.executor, (self.written.tensors.clone(), self.written.scalars.clone()))
    }
}

impl Program {
    fn dropout(&self) -> Option<Dropout> {
        self.written.dropout.map(Dropout::new)
    }
}

/// Parses the name of an element type.
pub(crate) fn named(name: &str) -> PyResult<DType> {
    let all = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::I64, DType::Bool];
    let found = all.into_iter().find(|dtype| dtype.name() == name);
    found.ok_or_else(|| one("dtype", name, "one of f32, f16, bf16, i32, i64, bool"))
}

fn parameter(declared: &Declared) -> Parameter {
    let names = |axes: Axes| -> Vec<String> {
        if axes.is_table() {
            axes.extents().map(|extent| extent.to_string()).collect()
        } else {
            axes.iter().map(|axis| axis.name().to_owned()).collect()
        }
    };
    match declared.kind {
        ParamKind::Scalar => (declared.name.clone(), None, DType::F32.name(), declared.default),
        ParamKind::Tensor { axes, dtype } => (declared.name.clone(), Some(names(axes)), dtype.name(), None),
    }
}
