//! A problem without extents: score_mods and masks as text, and the order of the parameters of a call.

use crate::call::ORDER;
use crate::error::{of, one};
use crate::plan::{Asked, Plan};
use pyo3::prelude::*;
use sdpa::expr::{Axes, Axis, Declared, ParamKind};
use sdpa::operand::Side;
use sdpa::{AttentionSpec, DType, Dropout, ExecutorName, Layout, Mask, Operand, Packed, Paged, SINK, ScoreMod, Shape, TensorSpec};
use serde::Deserialize;
use std::sync::Arc;

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
    /// Whether the bits of a sequence's results depend on this sequence alone.
    #[serde(default)]
    batch_invariant: bool,
    /// The name of the executor; absent: automatic selection.
    #[serde(default)]
    executor: Option<String>,
    /// The probability of dropout, whose seed and offset are the last two tensors.
    #[serde(default)]
    dropout: Option<f32>,
    /// Whether a forward pass also writes each row's maximum, after its stats.
    #[serde(default)]
    max_scores: bool,
    /// Whether a forward pass also writes each row's sum of exponentials, after its maximum.
    #[serde(default)]
    sum_exp: bool,
    /// Packed sequences; the operands are then (1, heads, tokens, dim).
    #[serde(default)]
    packed: Option<Sequences>,
    /// A paged KV cache; keys and values are then pools (pages, heads, page size, dim), and queries are packed.
    #[serde(default)]
    paged: Option<Paged>,
}

/// The sequences of a packed problem: their number, the most tokens of a sequence and of a call, whether keys have offsets of their own, and
/// whether offsets are i64.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sequences {
    batch: i64,
    seq_q: i64,
    seq_kv: i64,
    total_q: i64,
    /// Absent for paged keys, which have lengths instead of offsets.
    #[serde(default)]
    total_kv: Option<i64>,
    cross: bool,
    wide: bool,
}

impl Sequences {
    fn packed(self) -> Packed {
        Packed::new().with_cross(self.cross).with_wide(self.wide).with_totals(Some(self.total_q), self.total_kv)
    }

    /// Returns the operand of a problem that has this memory: one tensor of all tokens, or a pool of pages.
    fn operand(self, operand: Operand, memory: TensorSpec, paged: Option<Paged>) -> PyResult<TensorSpec> {
        let [one_batch, heads, tokens, dim] = memory.dims;
        if let Some(Paged { page_size, pages, .. }) = paged.filter(|_| operand.side() == Side::Keys) {
            if (one_batch, tokens) != (pages, page_size) {
                let rule = format!("({pages}, heads, {page_size}, dim), the pages and the page size of the program");
                return Err(one(&format!("{operand} shape"), format!("{:?}", memory.dims), rule));
            }
            return Ok(TensorSpec { dims: [self.batch, heads, self.seq_kv, dim], ..memory });
        }
        if one_batch != 1 {
            return Err(one(
                &format!("{operand} shape"),
                format!("{:?}", memory.dims),
                "(1, heads, tokens, dim), as the sequences are packed",
            ));
        }
        let seq = if operand.side() == Side::Queries { self.seq_q } else { self.seq_kv };
        Ok(TensorSpec { dims: [self.batch, heads, seq, dim], ..memory })
    }
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
        if written.sum_exp && !written.max_scores {
            return Err(one("program", "sum_exp without max_scores", "max_scores too: its memory is before that of sum_exp"));
        }
        if written.paged.is_some() && written.packed.is_none() {
            return Err(one("program", "paged without packed", "the packed queries of a paged KV cache"));
        }
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
        spec.packed = self.written.packed.map(Sequences::packed);
        let problem = spec.backward().validate().map_err(|e| of(e.into()))?;
        Ok(problem.params().iter().map(parameter).collect())
    }

    /// Returns whether a part of the batch entries or of the query heads (`axis`: batch or head), computed alone, has the results that it has in the
    /// complete call, if the tensors along this axis are cut in the same way. It has not if a function computes with the index or the extent of
    /// the axis, or if there is dropout, whose mask depends on both indices.
    fn shardable(&self, axis: &str) -> PyResult<bool> {
        let found = [Axis::Batch, Axis::Head].into_iter().find(|known| known.name() == axis);
        let axis = found.ok_or_else(|| one("axis", axis, "batch or head"))?;
        let masks = self
            .masks
            .iter()
            .map(|mask| mask.trace().map(Arc::new).map_err(|e| one("masks", mask, format!("valid declarations of parameters ({e})"))));
        let masks = masks.collect::<PyResult<Vec<_>>>()?;
        let mut traces = self.score_mods.iter().flat_map(ScoreMod::stages).chain(&masks);
        Ok(self.written.dropout.is_none() && !traces.any(|trace| trace.uses_index(axis) || trace.uses_extent(axis)))
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
        let memory: Vec<TensorSpec> =
            tensors.into_iter().map(|(dims, strides, alignment)| TensorSpec { dims, strides, alignment }).collect();
        let tensors = match self.written.packed {
            None => memory.clone(),
            Some(sequences) => {
                ORDER.into_iter().zip(&memory).map(|(x, &t)| sequences.operand(x, t, self.written.paged)).collect::<PyResult<_>>()?
            }
        };
        let &[q, k, v, o, ref rest @ ..] = tensors.as_slice() else {
            return Err(one("tensors", tensors.len(), "4 (q, k, v, o), or 8 in a backward pass (and d_o, dq, dk, dv)"));
        };
        let mut spec =
            AttentionSpec::strided(named(dtype)?, [q, k, v], o).with_score_mods(self.score_mods.clone()).with_masks(self.masks.clone());
        (spec.sink, spec.stats, spec.dropout) = (self.written.sink, stats, self.dropout());
        spec.batch_invariant = self.written.batch_invariant;
        (spec.packed, spec.paged) = (self.written.packed.map(Sequences::packed), self.written.paged);
        spec.row_max = self.written.max_scores && rest.is_empty();
        spec.sum_exp = self.written.sum_exp && rest.is_empty();
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
        Plan::new(py, asked, &memory, device, self.executor, (self.written.tensors.clone(), self.written.scalars.clone()))
    }
}

impl Program {
    fn dropout(&self) -> Option<Dropout> {
        self.written.dropout.map(Dropout::new)
    }

    /// Returns the specification of a problem over dense tensors (batch, heads, seq, dim), with stats.
    pub(crate) fn attention(&self, dtype: DType, shape: Shape) -> AttentionSpec {
        let spec = AttentionSpec::dense(dtype, shape, Layout::Bhsd).with_score_mods(self.score_mods.clone()).with_masks(self.masks.clone());
        let mut spec = spec.with_stats();
        (spec.sink, spec.dropout, spec.row_max) = (self.written.sink, self.dropout(), self.written.max_scores);
        spec.batch_invariant = self.written.batch_invariant;
        (spec.packed, spec.paged) = (self.written.packed.map(Sequences::packed), self.written.paged);
        spec
    }

    /// Returns the names of the tensors of a call, in their order.
    pub(crate) fn tensors(&self) -> &[String] {
        &self.written.tensors
    }

    /// Returns the text of a program that computes a part of this one's problem. A call passes the scalars `numbers` after this program's.
    pub(crate) fn part(&self, spec: &AttentionSpec, numbers: &[&str]) -> Result<String, String> {
        let (score_mods, masks): (Vec<String>, Vec<String>) =
            (spec.score_mods.iter().map(ToString::to_string).collect(), spec.masks.iter().map(ToString::to_string).collect());
        let scalars = self.written.scalars.iter().map(String::as_str).chain(numbers.iter().copied());
        let mut text = serde_json::json!({
            "score_mods": score_mods, "masks": masks, "scalars": scalars.collect::<Vec<_>>(),
            // A call passes no sink to a part without one.
            "tensors": self.written.tensors.iter().filter(|name| spec.sink || *name != SINK).collect::<Vec<_>>(),
        });
        // The text has the key of a switch only if it is on.
        for (key, on) in [
            ("sink", spec.sink),
            ("deterministic", self.written.deterministic),
            ("batch_invariant", spec.batch_invariant),
            ("max_scores", spec.row_max),
            ("sum_exp", spec.sum_exp),
        ] {
            if on {
                text[key] = true.into();
            }
        }
        if let Some(executor) = &self.written.executor {
            text["executor"] = executor.as_str().into();
        }
        let mut same = score_mods.iter().zip(&spec.score_mods).map(|(text, own)| text.parse::<ScoreMod>().is_ok_and(|read| read == *own));
        let mut alike = masks.iter().zip(&spec.masks).map(|(text, own)| text.parse::<Mask>().is_ok_and(|read| read == *own));
        if same.all(|same| same) && alike.all(|alike| alike) { Ok(text.to_string()) } else { Err(text.to_string()) }
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
