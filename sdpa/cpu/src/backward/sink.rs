//! The gradient of sinks: `−Σ exp(sink − stats) · Σ d_o·o`, over the rows of a head in all batch entries.

use super::Call;
use super::params::store;
use crate::element::Element;
use rayon::prelude::*;
use sdpa_core::ElementsMut;

/// Writes the gradient. A row that attends to no key adds nothing, whatever its memory contains: its output is zero.
pub(super) fn gradient<T: Element>(call: &Call<'_, T>, sinks: &[f32], mut to: ElementsMut<'_>) {
    let sums: Vec<f64> = sinks.par_iter().enumerate().map(|(head, &sink)| of_head(call, head, sink)).collect();
    store(&mut to, &sums);
}

fn of_head<T: Element>(call: &Call<'_, T>, head: usize, sink: f32) -> f64 {
    let group = call.cut.extents.group;
    let (mut o, mut d_o) = (vec![0.0f32; call.o.dim], vec![0.0f32; call.o.dim]);
    let mut sum = 0.0;
    for batch in 0..call.cut.extents.batch {
        let extents = call.cut.extents_of(batch);
        for query in 0..extents.seq_q {
            let index = [batch, head, query];
            let [max, rest] = call.norms.get(&call.stats, call.stats.place(index)).map(f64::from);
            if extents.keys_of_row(query * group).is_empty() || max == f64::NEG_INFINITY {
                continue;
            }
            call.o.widen_row(index, &mut o);
            if o.iter().all(|&x| x == 0.0) {
                continue;
            }
            call.d_o.widen_row(index, &mut d_o);
            let delta: f64 = o.iter().zip(&d_o).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
            sum -= (f64::from(sink) - max - rest).exp() * delta;
        }
    }
    sum
}
