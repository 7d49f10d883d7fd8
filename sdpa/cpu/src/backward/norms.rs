//! Recomputes the softmax denominator of rows whose stats cannot hold it.
//!
//! For scores of a million, one f32 per row cannot hold the logarithm of the number of keys: every P would be 1. The scores of such rows are computed again, as
//! in the forward pass, and the log-sum-exp is stored in two parts.

use crate::element::Element;
use crate::forward::Call;
use crate::isa::Isa;
use crate::output;
use crate::pack::{Head, View};
use crate::program::{Lengths, RulesOf};
use crate::schedule::Schedule;
use sdpa_core::packed::Documents;
use sdpa_core::problem::Problem;

/// Rows with stats from here on are recomputed. Below it, rounding of stats changes P by at most `2^-16`.
const LARGE: f32 = 512.0;

/// Maximum distance, in f32 steps, between stats and the log-sum-exp of these keys. A larger distance means that the stats cover other keys too: a caller that
/// splits the keys passes stats of all of them.
const NEAR: f64 = 4.0;

/// Log-sum-exps in two parts, in the order of the stats; `None` if no statistic is large.
#[derive(Debug)]
pub(super) struct Norms(Option<Vec<[f32; 2]>>);

fn is_large(stat: f32) -> bool {
    stat.is_finite() && stat.abs() >= LARGE
}

/// Returns the distance to the next f32.
fn ulp(x: f32) -> f64 {
    f64::from(x.abs().next_up()) - f64::from(x.abs())
}

impl Norms {
    pub(super) fn new<T: Element>(
        problem: &Problem,
        isa: Isa,
        [q, k, v]: [View<'_, T>; 3],
        stats: &View<'_, f32>,
        scale: f32,
        (lengths, documents, rules, sinks): (&Lengths, Option<&Documents>, &RulesOf<'_>, Option<&[f32]>),
    ) -> Norms {
        if !stats.data.iter().any(|stat| is_large(*stat)) {
            return Norms(None);
        }
        // `true` keeps the schedule from using the few-row kernel, because scores need the same bits as in the backward pass. The
        // schedule is that of one thread, so that gradients have identical bits for any number of threads.
        let mut schedule = Schedule::new(problem, isa, 1, lengths.clone(), true);
        schedule.threads = rayon::current_num_threads();
        let group = schedule.extents.group;
        schedule.leave_out(|strip| {
            let head = Head { batch: strip.batch, head_kv: strip.head_kv, group };
            !strip.rows.clone().any(|row| is_large(stats.data[stats.place(head.index(row))]))
        });
        let mut norms = vec![[f32::NEG_INFINITY, 0.0]; stats.data.len()];
        let call = Call { schedule: &schedule, isa, q, k, v, scale, rules, known: None };
        call.run(output::norms(&schedule, (problem, documents), sinks, &mut norms));
        for (norm, stat) in norms.iter_mut().zip(stats.data) {
            let [max, rest] = norm.map(f64::from);
            let same = is_large(*stat) && (max + rest - f64::from(*stat)).abs() <= NEAR * ulp(*stat);
            if !same {
                *norm = [*stat, 0.0];
            }
        }
        Norms(Some(norms))
    }

    /// Returns the two parts of the log-sum-exp of a row.
    pub(super) fn get(&self, stats: &View<'_, f32>, place: usize) -> [f32; 2] {
        self.0.as_ref().map_or([stats.data[place], 0.0], |norms| norms[place])
    }

    /// Returns the bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |norms| 8 * norms.len())
    }
}
