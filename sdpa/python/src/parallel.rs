//! One problem over several ranks: the schedule of each rank as JSON, whose steps Python runs over tensors.

use crate::error::{environment, of, one, spec};
use crate::program::{Program, named};
use pyo3::prelude::*;
use sdpa::distributed::{Attend, ParallelProblem, ParallelSpec, Pass, Schedule, Sharding, Slot, Step, Strategy, Transfer, places};
use sdpa::expr::{Declared, ParamKind};
use sdpa::{Chunk, Error, Shape};
use serde_json::{Value, json};
use std::ops::Range;

/// A run of positions, as Python receives it: start, distance, length.
type Run = (i64, i64, i64);

fn run(chunk: &Chunk) -> Run {
    (chunk.start, chunk.stride, chunk.len)
}

fn bug(what: impl std::fmt::Display) -> PyErr {
    of(Error::Bug(format!("a schedule: {what}")))
}

fn sharding_of(text: &str) -> PyResult<Sharding> {
    serde_json::from_str(text).map_err(|e| {
        one("sharding", format!("{text} ({e})"), "contiguous, zigzag, striped, or a list of (start, stride, length) for each rank")
    })
}

/// Returns the positions of each rank's tokens in a sequence of `seq` tokens.
#[pyfunction]
#[pyo3(signature = (sharding, ranks, seq))]
pub(crate) fn shards(sharding: &str, ranks: usize, seq: i64) -> PyResult<Vec<Vec<Run>>> {
    let sharding = sharding_of(sharding)?;
    if seq < 0 {
        return Err(one("seq", seq, "at least 0 tokens"));
    }
    sharding.check(ranks, seq).map_err(spec)?;
    Ok(sharding.chunks(ranks, seq).iter().map(|chunks| chunks.iter().map(run).collect()).collect())
}

/// One validated problem over several ranks.
#[pyclass(frozen, module = "sdpa._native")]
#[derive(Debug)]
pub struct Parallel {
    problem: ParallelProblem,
    program: Py<Program>,
}

fn pass_of(name: &str) -> PyResult<Pass> {
    match name {
        "forward" => Ok(Pass::Forward),
        "backward" => Ok(Pass::Backward),
        _ => Err(one("pass", name, "forward or backward")),
    }
}

#[pymethods]
impl Parallel {
    /// Validates a problem. `extents` are batch, query heads, KV heads, queries, keys, and the elements of a key and of a value; `sharding` and `strategy` are
    /// JSON.
    #[new]
    #[pyo3(signature = (program, dtype, extents, ranks, sharding, strategy, backward))]
    #[allow(clippy::too_many_arguments, reason = "what Python passes by position")]
    fn new(
        py: Python<'_>,
        program: Py<Program>,
        dtype: &str,
        extents: [i64; 7],
        ranks: usize,
        sharding: &str,
        strategy: &str,
        backward: bool,
    ) -> PyResult<Parallel> {
        let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = extents;
        let attention = program.get().attention(named(dtype)?, Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v });
        let strategy: Strategy = serde_json::from_str(strategy)
            .map_err(|e| one("strategy", format!("{strategy} ({e})"), "auto, all_gather, head_exchange, ring, halo or grid"))?;
        let mut parallel = ParallelSpec::new(attention, ranks).sharding(sharding_of(sharding)?).strategy(strategy);
        parallel.backward = backward;
        // Schedules of many ranks and tokens take a while.
        let problem = py.detach(|| parallel.validate()).map_err(of)?;
        Ok(Parallel { problem, program })
    }

    /// The strategy, which is never `auto`.
    #[getter]
    fn strategy(&self) -> String {
        self.problem.strategy().to_string()
    }

    /// The reasons for the strategy, if it was chosen.
    #[getter]
    fn choice(&self) -> Option<String> {
        self.problem.choice().map(ToString::to_string)
    }

    /// Returns the tokens of a rank's shard of queries and of keys.
    fn lengths(&self, rank: usize) -> PyResult<(i64, i64)> {
        if rank >= self.problem.ranks() {
            return Err(one("rank", rank, format!("below {}", self.problem.ranks())));
        }
        let of = |of_keys| self.problem.shard(rank, of_keys).iter().map(|chunk| chunk.len).sum();
        Ok((of(false), of(true)))
    }

    /// Returns a number for each field that ranks must have in common, with its name.
    fn digest(&self, pass: &str, scale: f32) -> PyResult<Vec<(&'static str, u64)>> {
        Ok(self.problem.digest(pass_of(pass)?, scale))
    }

    /// Returns the schedule of a rank as JSON, with places in slots instead of positions, and with the program of each part.
    fn schedule(&self, py: Python<'_>, rank: usize, pass: &str) -> PyResult<String> {
        self.lengths(rank)?;
        let pass = pass_of(pass)?;
        let program = self.program.get();
        py.detach(|| Writer { problem: &self.problem, program, schedule: self.problem.schedule(rank, pass) }.write())
    }
}

/// Writes one schedule.
struct Writer<'a> {
    problem: &'a ParallelProblem,
    program: &'a Program,
    schedule: Schedule,
}

impl Writer<'_> {
    fn write(&self) -> PyResult<String> {
        let slots: Vec<Value> = self.schedule.slots.iter().map(slot).collect();
        let steps = self.schedule.steps.iter().map(|step| self.step(step)).collect::<PyResult<Vec<_>>>()?;
        let written = json!({ "text": self.schedule.to_string(), "slots": slots, "steps": steps });
        serde_json::to_string(&written).map_err(|e| environment(e.to_string()))
    }

    fn step(&self, step: &Step) -> PyResult<Value> {
        let moved = |kind: &str, from: usize, to: usize, heads: &Range<i64>, chunk: &Chunk| {
            let [source, target] = [from, to].map(|n| &self.schedule.slots[n]);
            let runs = places(source, target, chunk).ok_or_else(|| bug("a copy of tokens that a slot does not have"))?;
            let runs: Vec<(Run, Run)> = runs.iter().map(|(a, b)| (run(a), run(b))).collect();
            Ok(json!({ "kind": kind, "from": [from, local(source, heads)], "to": [to, local(target, heads)], "runs": runs }))
        };
        match step {
            Step::Copy { from, to, heads, chunk } => moved("copy", *from, *to, heads, chunk),
            Step::Add { from, to, heads, chunk } => moved("add", *from, *to, heads, chunk),
            Step::Exchange { sends, receives } => {
                let parts = |all: &[Transfer]| -> PyResult<Vec<Value>> {
                    all.iter().map(|t| Ok(json!([t.peer, t.slot, self.first(t.slot, &t.chunk)?, t.chunk.len]))).collect()
                };
                Ok(json!({ "kind": "exchange", "sends": parts(sends)?, "receives": parts(receives)? }))
            }
            Step::Attend(attend) => self.attend(attend),
            Step::Finish { q, heads, reads, writes } => {
                let views = |all: &[usize]| all.iter().map(|n| self.view(*n, heads, q)).collect::<PyResult<Vec<_>>>();
                Ok(json!({ "kind": "finish", "heads": [heads.start, heads.end], "reads": views(reads)?, "writes": views(writes)? }))
            }
        }
    }

    fn attend(&self, attend: &Attend) -> PyResult<Value> {
        let placed = self.problem.placed(self.schedule.pass, attend).map_err(of)?.ok_or_else(|| bug("a part without a pair"))?;
        let declared: Vec<Declared> = match self.schedule.pass {
            Pass::Forward => placed.spec.validate().map_err(|e| of(e.into()))?.params().to_vec(),
            Pass::Backward => placed.spec.backward().validate().map_err(|e| of(e.into()))?.params().to_vec(),
        };
        let numbers = placed.numbers(&declared);
        let names: Vec<&str> = numbers.iter().map(|(name, _)| *name).collect();
        let text = self.program.part(&placed.spec, &names).map_err(|text| bug(format!("{text} is not read as it was written")))?;
        let views = |all: &[usize]| -> PyResult<Vec<Value>> {
            let of = |n: &usize| {
                let keys = self.schedule.slots[*n].tensor.is_of_keys();
                let (heads, chunk) = if keys { (&attend.heads_kv, &attend.k) } else { (&attend.heads_q, &attend.q) };
                self.view(*n, heads, chunk)
            };
            all.iter().map(of).collect()
        };
        let tensors = self.program.tensors().iter().map(|name| self.tensor(name, attend)).collect::<PyResult<Vec<_>>>()?;
        let read: Vec<bool> = self.program.tensors().iter().map(|name| declared.iter().any(|p| p.name == *name)).collect();
        Ok(json!({
            "kind": "attend", "partial": attend.partial, "dtype": placed.spec.dtype.name(), "program": text, "sink": placed.spec.sink,
            "numbers": numbers.iter().map(|(_, x)| *x).collect::<Vec<f32>>(), "tensors": tensors, "read": read,
            "reads": views(&attend.reads)?, "writes": views(&attend.writes)?,
        }))
    }

    /// Returns the part of a tensor of the call that a step reads: a run along each axis, or null for all of it.
    fn tensor(&self, name: &str, attend: &Attend) -> PyResult<Value> {
        let Some(declared) = self.problem.declared(self.schedule.pass).iter().find(|declared| declared.name == name) else {
            // The problem reads no such tensor.
            return Ok(Value::Null);
        };
        match declared.kind {
            ParamKind::Scalar => Err(bug(format!("{name} is a scalar among tensors"))),
            ParamKind::Tensor { .. } => {
                let runs = self.problem.parameter(declared, attend);
                Ok(json!(runs.map(|runs| runs.iter().map(run).collect::<Vec<_>>())))
            }
        }
    }

    fn first(&self, n: usize, chunk: &Chunk) -> PyResult<i64> {
        self.schedule.slots[n].contiguous(chunk).ok_or_else(|| bug("tokens that are not neighbours"))
    }

    /// Returns a part of a slot: its number, its first head and the head after the last, its first token and the number of tokens.
    fn view(&self, n: usize, heads: &Range<i64>, chunk: &Chunk) -> PyResult<Value> {
        let [first_head, end] = local(&self.schedule.slots[n], heads);
        Ok(json!([n, first_head, end, self.first(n, chunk)?, chunk.len]))
    }
}

fn slot(slot: &Slot) -> Value {
    let heads = slot.heads.end - slot.heads.start;
    json!({ "tensor": slot.tensor.name(), "role": slot.role, "dtype": slot.dtype.name(), "heads": heads, "tokens": slot.len() })
}

/// Returns heads of the problem as heads of a slot.
fn local(slot: &Slot, heads: &Range<i64>) -> [i64; 2] {
    [heads.start - slot.heads.start, heads.end - slot.heads.start]
}
