//! Digests of specifications, by which ranks find out that they do not run the same problem.

use crate::problem::ParallelProblem;
use crate::schedule::Pass;
use sdpa_core::TensorSpec;
use serde::Serialize;

/// Names of the fields of a digest, in its order.
pub(crate) const FIELDS: [&str; 20] = [
    "ranks",
    "pass",
    "attn_scale",
    "sharding",
    "strategy",
    "batch",
    "heads_q",
    "heads_kv",
    "seq_q",
    "seq_kv",
    "dim_qk",
    "dim_v",
    "dtype",
    "score_mods",
    "masks",
    "sink",
    "dropout",
    "statistics",
    "axis order of operands",
    "backward",
];

/// Returns the 64-bit FNV-1a hash of a value's JSON text. It is the same in every process and version of the compiler.
fn hash(value: &impl Serialize) -> u64 {
    let text = serde_json::to_vec(value).unwrap_or_default();
    text.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns the digest of a call, one number per field.
pub(crate) fn digest(problem: &ParallelProblem, pass: Pass, attn_scale: f32) -> [u64; FIELDS.len()] {
    let (spec, whole) = (problem.spec(), problem.problem());
    let attention = &spec.attention;
    let order = |t: &TensorSpec| t.densely().strides;
    [
        hash(&spec.ranks),
        hash(&pass),
        hash(&attn_scale.to_bits()),
        hash(&spec.sharding),
        hash(&problem.strategy()),
        hash(&whole.batch()),
        hash(&whole.heads_q()),
        hash(&whole.heads_kv()),
        hash(&whole.seq_q()),
        hash(&whole.seq_kv()),
        hash(&whole.dim_qk()),
        hash(&whole.dim_v()),
        hash(&whole.dtype()),
        hash(&attention.score_mods),
        hash(&attention.masks),
        hash(&attention.sink),
        hash(&attention.dropout),
        hash(&(whole.stats(), whole.stats_base(), whole.row_max(), whole.sum_exp())),
        hash(&[order(&attention.q), order(&attention.k), order(&attention.v), order(&attention.o)]),
        hash(&(spec.backward, &spec.wrt)),
    ]
}

impl ParallelProblem {
    /// Returns a number for each field that all ranks must have in common, with the field's name. The numbers are equal in every process, so that ranks which
    /// run schedules themselves can compare their problems.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// use sdpa_parallel::{ParallelSpec, Pass, Strategy};
    ///
    /// let shape = Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q: 8, seq_kv: 8, dim_qk: 8, dim_v: 8 };
    /// let of = |mask: Mask| {
    ///     let attention = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(mask);
    ///     ParallelSpec::new(attention, 2).strategy(Strategy::Ring).validate()
    /// };
    /// let (causal, prefix) = (of(Mask::causal())?, of(Mask::prefix_lm(4))?);
    /// let both = causal.digest(Pass::Forward, 1.0).into_iter().zip(prefix.digest(Pass::Forward, 1.0));
    /// let unlike: Vec<&str> = both.filter(|(a, b)| a != b).map(|((field, _), _)| field).collect();
    /// assert_eq!(unlike, ["masks"]);
    /// # Ok::<(), sdpa_core::Error>(())
    /// ```
    pub fn digest(&self, pass: Pass, attn_scale: f32) -> Vec<(&'static str, u64)> {
        FIELDS.into_iter().zip(digest(self, pass, attn_scale)).collect()
    }
}
