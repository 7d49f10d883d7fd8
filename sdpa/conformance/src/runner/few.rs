//! Decode shapes: few queries with many keys.

use super::{random_mask, random_padded};
use crate::random::Random;
use sdpa::{Align, AttentionSpec, DType, Layout, Mask, TensorSpec};

/// Draws a specification of few queries and many keys: with or without lengths, windows and sinks, and any GQA group.
pub fn random_few(random: &mut Random, dtypes: &[DType]) -> AttentionSpec {
    let mut spec = random_padded(random, dtypes);
    let heads_kv = random.between(1, 3);
    let heads_q = heads_kv * random.pick(&[1, 2, 3, 4, 5, 8, 20]);
    let seq_q = random.pick(&[1, 1, 1, 2, 3, 4, 7, 16, 33, 64, 70]);
    let seq_kv = if random.between(0, 1) == 0 { random.between(1, 500) } else { random.between(500, 2500) };
    for (tensor, heads, seq) in
        [(&mut spec.q, heads_q, seq_q), (&mut spec.o, heads_q, seq_q), (&mut spec.k, heads_kv, seq_kv), (&mut spec.v, heads_kv, seq_kv)]
    {
        let [batch, _, _, dim] = tensor.dims;
        *tensor = TensorSpec::dense([batch, heads, seq, dim], random.pick(&[Layout::Bhsd, Layout::Bshd]));
    }
    spec.masks.clear();
    match random.between(0, 3) {
        0 => {}
        1 => spec.masks.push(random_mask(random, seq_kv)),
        ends => {
            spec.masks.push(Mask::padding());
            if ends == 3 {
                spec.masks.push(Mask::window(Some(random.between(1, seq_kv)), Some(0), Align::Ends));
            }
        }
    }
    spec
}
