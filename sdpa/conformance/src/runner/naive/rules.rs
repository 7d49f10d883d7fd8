//! Score_mods and masks of a call, one score at a time, rounded to f32 after every function.

use super::Fault;
use sdpa::expr::{Declared, ParamId, ParamKind, Place, Precision, Trace};
use sdpa::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa::params::bind;
use sdpa::{Param, ParamValue, Problem};

pub(super) struct Rules<'a> {
    problem: &'a Problem,
    declared: &'a [Declared],
    values: Vec<ParamValue<'a>>,
    fault: Fault,
}

impl<'a> Rules<'a> {
    /// The rules of a call whose parameters were validated.
    pub(super) fn new(problem: &'a Problem, declared: &'a [Declared], params: &[Param<'a>], fault: Fault) -> Rules<'a> {
        Rules { problem, declared, values: bind(declared, problem.extents(), params).unwrap(), fault }
    }

    /// Returns the offset of the parameter element that a position reads.
    pub(super) fn element(&self, kind: ParamKind, index: [i64; 4]) -> usize {
        let dims = match kind {
            ParamKind::Scalar => [1; 4],
            ParamKind::Tensor { axes, dtype: _ } => axes.dims(self.problem.extents()),
        };
        dims.iter().zip(index).fold(0, |n, (&extent, at)| n * extent + at.min(extent - 1)) as usize
    }

    pub(super) fn param(&self, name: &str, index: [i64; 4]) -> f64 {
        let at = self.declared.iter().position(|d| d.name == name).unwrap();
        let declared = &self.declared[at];
        match (self.fault, declared.default) {
            (Fault::OnlyDefaults, Some(default)) => f64::from(default),
            (Fault::OneElementForAll, None) => self.values[at].get(0),
            _ => self.values[at].get(self.element(declared.kind, index)),
        }
    }

    /// Evaluates the roots of a trace.
    pub(super) fn eval(&self, trace: &Trace, score: f32, upstream: f32, index: [i64; 4]) -> Vec<f32> {
        let params: Vec<f64> = trace.params().iter().map(|p| self.param(&p.name, index)).collect();
        let (score, upstream) = (f64::from(score), f64::from(upstream));
        let place = Place { score, upstream, index, extents: self.problem.extents(), params: &params };
        let read = |p: ParamId, at: usize| {
            let name = &trace.params()[p.index()].name;
            let table = self.declared.iter().position(|d| d.name == *name).unwrap();
            self.values[table].get(if self.fault == Fault::OneElementForAll { 0 } else { at })
        };
        trace.eval_reading(&place, Precision::F32, read).into_iter().map(|x| x as f32).collect()
    }

    /// Applies the score_mods to a scaled score.
    pub(super) fn modified(&self, score: f32, index: [i64; 4]) -> f32 {
        self.problem.score_mod().map_or(score, |trace| self.eval(trace, score, 0.0, index)[0])
    }

    pub(super) fn keeps(&self, index: [i64; 4]) -> bool {
        let kept = self.problem.kept();
        let [_, _, q, k] = index;
        let length = |used: bool, name: &str, at: i64| {
            let counts = used && self.fault != Fault::NoLengths;
            !counts || (at as f64) < self.param(name, index)
        };
        // Returns the length of the batch entry, or the extent where lengths are not used (packed problems have none).
        let entry = |used: bool, name: &str, extent: i64| if used { (self.param(name, index) as i64).clamp(0, extent) } else { extent };
        let ends = || {
            let lengths = [(kept.seq_len_q, SEQ_LEN_Q, self.problem.seq_q()), (kept.seq_len_kv, SEQ_LEN_KV, self.problem.seq_kv())];
            kept.ends.keeps(q, k, lengths.map(|(used, name, extent)| entry(used, name, extent)))
        };
        let rest = || kept.rest.as_ref().is_none_or(|rest| self.eval(rest, 0.0, 0.0, index)[0] != 0.0);
        (kept.region.keeps(q, k) || self.fault == Fault::NoMask)
            && length(kept.seq_len_q, SEQ_LEN_Q, q)
            && length(kept.seq_len_kv, SEQ_LEN_KV, k)
            && (self.fault == Fault::NoMask || kept.ends.is_full() || ends())
            && (self.fault == Fault::NoRest || rest())
    }
}
