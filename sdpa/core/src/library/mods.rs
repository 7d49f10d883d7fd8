//! Score_mods.

use crate::dtype::DType;
use crate::expr::{At, Axes, Axis, Expr, F32, Params, Stored, Trace};
use crate::score_mod::ScoreMod;
use std::f32::consts::LN_2;

/// Makes a score_mod of a library closure. A test runs each closure, so its declarations are valid.
fn of<F>(name: &str, f: F) -> ScoreMod
where
    F: for<'t> FnOnce(Expr<'t, F32>, At<'t>, Params<'t>) -> Expr<'t, F32>,
{
    ScoreMod::of(name, Trace::of_score(f).unwrap_or_else(|e| unreachable!("{e}")))
}

/// `tanh(score / cap) · cap`: scores stay between −cap and cap (Gemma 2). The cap is the scalar `cap`.
///
/// ```
/// use sdpa_core::ScoreMod;
/// use sdpa_core::library::softcap;
/// assert_eq!("softcap:30".parse::<ScoreMod>()?, softcap(30.0));
/// # Ok::<(), sdpa_core::ParseError>(())
/// ```
pub fn softcap(cap: f32) -> ScoreMod {
    of(&format!("softcap:{cap}"), |score, _, p| {
        let cap = p.scalar("cap", cap);
        (score / cap).tanh() * cap
    })
}

/// Returns two to the power of `x`.
fn exp2(x: Expr<'_, F32>) -> Expr<'_, F32> {
    (x * LN_2).exp()
}

/// Returns the published slope of a head: `2^(−8(h + 1)/p)` for the first `p` heads, where `p` is the greatest power of two up to the number of
/// heads. The other heads have every other slope of `2p` heads (Press et al., 2022).
fn slope<'t>(at: At<'t>) -> Expr<'t, F32> {
    let (head, heads) = (at.head.to_f32(), at.heads_q.to_f32());
    let power = exp2(((heads + 0.5).log() / LN_2).floor());
    // `exp2` may be off by a rounding error, so round to the nearest integer to get the exact power of two.
    let power = (power + 0.5).floor();
    let first = exp2((head + 1.0) * -8.0 / power);
    let rest = exp2(((head - power) * 2.0 + 1.0) * -4.0 / power);
    head.lt(power).select(first, rest)
}

/// Adds `slope(head) · (k − q)` (ALiBi) with the published slopes, for any number of heads. [`alibi_slopes`] returns them.
///
/// ```
/// use sdpa_core::ScoreMod;
/// use sdpa_core::library::alibi;
/// assert_eq!("alibi".parse::<ScoreMod>()?, alibi());
/// # Ok::<(), sdpa_core::ParseError>(())
/// ```
pub fn alibi() -> ScoreMod {
    of("alibi", |score, at, _| score + slope(at) * (at.k - at.q).to_f32())
}

/// Adds `slopes[head] · (k − q)`: ALiBi with the caller's slopes, the declared parameter `slopes`, f32 `[heads_q]`.
pub fn alibi_with() -> ScoreMod {
    of("alibi-slopes", |score, at, p| score + p.tensor("slopes", [Axis::Head], F32) * (at.k - at.q).to_f32())
}

/// Returns the slopes of [`alibi`], one per head, for [`alibi_with`].
///
/// ```
/// use sdpa_core::library::alibi_slopes;
/// assert_eq!(alibi_slopes(8)[..2], [0.5, 0.25]);
/// ```
pub fn alibi_slopes(heads_q: usize) -> Vec<f32> {
    let power = if heads_q == 0 { 1 } else { 1usize << heads_q.ilog2() };
    let slope = |head: usize| {
        if head < power { -8.0 * (head + 1) as f64 / power as f64 } else { -4.0 * (2 * (head - power) + 1) as f64 / power as f64 }
    };
    (0..heads_q).map(|head| slope(head).exp2() as f32).collect()
}

/// Adds `rel[head, clamp(k − q, −reach, reach) + reach]`: a bias per head and distance up to `reach`. Farther keys share the last bias of their side.
/// The caller passes the table `rel`, f32 `[heads, 2·reach + 1]`; further heads use its last row.
///
/// ```
/// use sdpa_core::library::relative_bias;
/// // Eight heads, distances up to 128: the table has 8 × 257 elements.
/// let declared = relative_bias(8, 128);
/// assert!(declared.stages()[0].find("rel").is_some());
/// ```
pub fn relative_bias(heads: i32, reach: i32) -> ScoreMod {
    of(&format!("relative-bias:{heads},{reach}"), |score, at, p| {
        let rel = p.table("rel", [i64::from(heads), 2 * i64::from(reach) + 1], F32);
        score + rel.at([at.head, (at.k - at.q).clamp(-reach, reach) + reach])
    })
}

/// Adds the declared tensor `bias` to the scores. The tensor spans `axes`; all positions along any other axis share one element.
///
/// ```
/// use sdpa_core::expr::{Axis, F32};
/// use sdpa_core::library::bias;
/// let by_head = bias([Axis::Head, Axis::Q, Axis::K], F32);
/// assert!(by_head.stages()[0].find("bias").is_some());
/// ```
pub fn bias<S>(axes: impl Into<Axes>, dtype: S) -> ScoreMod
where
    S: Stored<Value = F32>,
{
    let axes = axes.into();
    let letters: String = axes.iter().filter_map(|a| a.name().chars().next()).collect();
    let name = if S::DTYPE == DType::BF16 { format!("bias16:{letters}") } else { format!("bias:{letters}") };
    of(&name, |score, _, p| score + p.tensor("bias", axes, dtype))
}

/// Adds `slope(head) · Σ cos((k − q) / 10000^(i/terms))`, summed over `i` from 0 to `terms − 1`. It decays with distance like sinusoidal
/// positions (Chi et al., 2023).
pub fn sandwich(terms: i32) -> ScoreMod {
    of(&format!("sandwich:{terms}"), |score, at, p| {
        let distance = (at.k - at.q).to_f32();
        let sum = (0..terms).fold(p.constant(0.0), |sum, i| {
            let frequency = 10_000f64.powf(-f64::from(i) / f64::from(terms)) as f32;
            sum + (distance * frequency).cos()
        });
        score + slope(at) * sum
    })
}
