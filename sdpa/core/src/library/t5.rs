//! Bucketed relative positions of T5 (Raffel et al., 2020): a table per head, expanded to a bias.

/// The rule by which T5 assigns query-key distances to buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct T5 {
    /// Number of buckets, both directions together.
    pub buckets: usize,
    /// The distance from which on all keys share the last bucket.
    pub max_distance: usize,
    /// True if keys after the query, `k > q`, have separate buckets (encoders). Otherwise all of them are in the first bucket.
    pub bidirectional: bool,
}

/// Returns the bucket of a distance `k − q`. Half of the buckets of a direction hold one distance each; the others grow logarithmically.
pub fn t5_bucket(distance: i64, t5: T5) -> usize {
    let directions = if t5.bidirectional { 2 } else { 1 };
    let buckets = (t5.buckets / directions).max(1);
    let behind = if t5.bidirectional && distance > 0 { buckets } else { 0 };
    let steps = if t5.bidirectional { distance.unsigned_abs() } else { distance.min(0).unsigned_abs() };
    let exact = (buckets / 2) as u64;
    if steps < exact.max(1) {
        return behind + (steps as usize).min(buckets - 1);
    }
    let exact = exact.max(1) as f64;
    let range = (t5.max_distance as f64 / exact).ln();
    let more = ((steps as f64 / exact).ln() / range * (buckets as f64 - exact)) as usize;
    behind + (exact as usize + more).min(buckets - 1)
}

/// Returns the bias of a table (heads, buckets), row-major: (heads, seq_q, seq_kv), for [`super::bias`] over `[Head, Q, K]`.
pub fn t5_bias(table: &[f32], t5: T5, seq_q: usize, seq_kv: usize) -> Vec<f32> {
    let mut bias = Vec::with_capacity(table.len() / t5.buckets.max(1) * seq_q * seq_kv);
    for row in table.chunks_exact(t5.buckets.max(1)) {
        for q in 0..seq_q {
            bias.extend((0..seq_kv).map(|k| row[t5_bucket(k as i64 - q as i64, t5)]));
        }
    }
    bias
}

/// Returns the gradient of the table (heads, buckets), row-major, from that of the bias (heads, seq_q, seq_kv).
pub fn t5_bias_gradient(d_bias: &[f32], t5: T5, seq_q: usize, seq_kv: usize) -> Vec<f32> {
    let heads = d_bias.len() / (seq_q * seq_kv).max(1);
    let mut table = vec![0f64; heads * t5.buckets];
    for (n, &g) in d_bias.iter().enumerate() {
        let (head, q, k) = (n / (seq_q * seq_kv), n / seq_kv % seq_q, n % seq_kv);
        table[head * t5.buckets + t5_bucket(k as i64 - q as i64, t5)] += f64::from(g);
    }
    table.into_iter().map(|x| x as f32).collect()
}
