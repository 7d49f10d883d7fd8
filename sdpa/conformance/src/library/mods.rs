//! Score_mods.

use super::{Drawing, Here, Reading, Stage, Tensor, Values, axes, parameter};
use crate::random::Random;
use half::{bf16, f16};
use std::borrow::Cow;

/// `k − q`.
fn distance([_, _, q, k]: Here) -> f64 {
    (k - q) as f64
}

/// The published ALiBi slopes. A power of two of heads has a row of powers. Other numbers take those of the next lower power, and then every other one of twice
/// as many heads (Press et al., 2022, and its code).
fn published_slope(head: i64, heads: i64) -> f64 {
    let of_power = |head: i64, heads: i64| 2f64.powf(-8.0 / heads as f64).powi(head as i32 + 1);
    let power = (1..).map(|n| 1i64 << n).find(|p| *p > heads).map_or(1, |p| p / 2);
    if head < power { of_power(head, power) } else { of_power(2 * (head - power), 2 * power) }
}

/// A score_mod that adds a term that does not depend on the score.
fn adds(what: impl Fn(Here) -> f64 + Clone + Send + Sync + 'static, rounding: impl Fn(Here) -> f64 + Send + Sync + 'static) -> Stage {
    let value = what.clone();
    Stage {
        value: Box::new(move |score, here| score + value(here)),
        slope: Box::new(|_, _| 1.0),
        rounding: Box::new(move |score, here| (score + what(here)).abs() + rounding(here)),
        tanh: None,
        partials: Vec::new(),
        reads: Vec::new(),
    }
}

/// Draws a number of any magnitude from 2^-20 up to the largest f32.
fn of_any_size(random: &mut Random) -> f32 {
    let size = (1.0 + random.unit()) * 2f64.powi(random.between(-20, 126) as i32);
    if random.between(0, 1) == 0 { size as f32 } else { -size as f32 }
}

/// The rounding error of the power of two, whose argument is at most 8.
const SLOPE: f64 = 16.0;

fn softcap(text: &str, drawing: &mut Drawing<'_>) -> Result<Stage, String> {
    let default: f32 = text.parse().map_err(|e| format!("softcap:{text}: {e}"))?;
    // Half of the draws bind the parameter; the others use the default from the name.
    let cap = if drawing.random.between(0, 1) == 0 {
        let other = default * (0.5 + drawing.random.unit() as f32);
        drawing.bind("cap", &[], |_, _| Values::Scalar(other)).data[0]
    } else {
        drawing.bound.iter().find(|b| b.name == "cap").map_or(f64::from(default), |b| b.widened[0])
    };
    let part = move |score: f64| (score / cap).tanh();
    let by_cap = move |score: f64, _: Here| part(score) - score / cap * (1.0 - part(score).powi(2));
    Ok(Stage {
        value: Box::new(move |score, _| cap * part(score)),
        slope: Box::new(move |score, _| 1.0 - part(score).powi(2)),
        rounding: Box::new(move |score, _| 8.0 * (cap * part(score)).abs() + 2.0 * score.abs()),
        tanh: Some(Box::new(move |score, _| cap * part(score))),
        partials: vec![("cap", Box::new(by_cap))],
        reads: Vec::new(),
    })
}

/// Score_mods of the harness that the library does not have. They read `cu_seqlens`, per-sequence tensors, and tables, some of them out of range. Some are
/// finite only within the extents.
const OWN: [(&str, &str); 14] = [
    ("row-place", "tensor cu_seqlens[batch + 1]: i32; score + f32((cu_seqlens + k) % 3) * 0.25"),
    ("row-place-of-keys", "tensor cu_seqlens_kv[batch + 1]: i32; score + f32((cu_seqlens_kv + k) % 3) * 0.25"),
    ("temperature", "tensor temperature[batch]: f32; score * temperature"),
    ("within", "tensor within[head]: f32; score * sqrt(f32(seq_q - q)) * 0.1 + within * log(f32(seq_kv - k))"),
    ("buckets", "table bucket[12]: i32; table gain[3, 5]: f16; score * gain[head, bucket[abs(q - k) / 3]]"),
    ("waves", "tensor far[k]: f32; tensor turn[q]: f32; score + sin(far) + 2.0 * cos(turn) + sin(f32(k - q) * 0.75) - cos(f32(q * k))"),
    (
        "powers",
        "tensor any[k]: f32; tensor whole[q]: f32; tensor near[k]: f32; tensor great[q]: f32; score * pow(1.25, f32(q % 4)) + pow(any, whole) + pow(near, great) - pow(great, 0.25)",
    ),
    (
        "smooth",
        "score + 0.1 * pow(score, 3.0) - pow(score, 2.0) * pow(f32(q - k), 0.0) + exp(score * 0.25) / (1.0 + abs(score)) + log(sqrt(score * score + 0.5))",
    ),
    ("slanted", "score + f32(k - q) * pow(0.5, f32(head + 6))"),
    ("ripples", "score + sin(score) + cos(f32(k - q) * 0.0625)"),
    ("clamped", "max(min(score, 1.5), f32(k - q) * 0.125 - 1.0)"),
    ("very-low-rows", "select(q % 3 == 1, -1000000000.0, score)"),
    ("very-high-rows", "select(q % 3 == 1, 1000000000.0, score)"),
    ("blocks", "table of_blocks[2, 3, 4, 2]: bf16; score + of_blocks[batch, head - 1, q / 16, (k - 5) / 32]"),
];

/// Returns the expression text for a score_mod or mask that only this crate names, and any other text unchanged.
pub fn own(text: &str) -> Cow<'_, str> {
    match (text.strip_prefix("parameter:"), OWN.iter().find(|(name, _)| *name == text)) {
        (Some(rest), _) => parameter::text(rest).map_or(Cow::Borrowed(text), Cow::Owned),
        (None, Some((_, own))) => Cow::Borrowed(own),
        (None, None) => Cow::Borrowed(text),
    }
}

fn row_place(boundaries: &str, drawing: &Drawing<'_>) -> Result<Stage, String> {
    let bound = drawing.bound.iter().find(|b| b.name == boundaries).ok_or_else(|| format!("there is no {boundaries}"))?;
    let start = Tensor { dims: bound.dims, data: bound.widened.clone() };
    Ok(adds(move |here| (start.at(here) + here[3] as f64) % 3.0 * 0.25, |_| 0.0))
}

/// Returns the score_mod with this name.
pub(super) fn stage(text: &str, drawing: &mut Drawing<'_>) -> Result<Stage, String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let heads = drawing.extents[1];
    let slope = move |here: Here| published_slope(here[1], heads);
    match name {
        "softcap" => softcap(rest, drawing),
        "alibi" => Ok(adds(move |here| slope(here) * distance(here), move |here| SLOPE * (slope(here) * distance(here)).abs())),
        "alibi-slopes" => {
            let slopes = drawing.bind("slopes", &[1], |random, n| Values::F32((0..n).map(|_| random.unit() as f32).collect()));
            let own = slopes.clone();
            let stage = adds(move |here| slopes.at(here) * distance(here), move |here| (own.at(here) * distance(here)).abs());
            Ok(Stage { partials: vec![("slopes", Box::new(|_, here| distance(here)))], ..stage })
        }
        "bias" | "bias16" => {
            let axes = axes(rest)?;
            let bias = if name == "bias" {
                drawing.bind("bias", &axes, |random, n| Values::F32((0..n).map(|_| random.normal() as f32).collect()))
            } else {
                drawing.bind("bias", &axes, |random, n| Values::BF16((0..n).map(|_| bf16::from_f64(random.normal())).collect()))
            };
            Ok(Stage { partials: vec![("bias", Box::new(|_, _| 1.0))], ..adds(move |here| bias.at(here), |_| 0.0) })
        }
        "sandwich" => {
            let terms: i32 = rest.parse().map_err(|e| format!("{text}: {e}"))?;
            let angle = move |here, i| distance(here) / 10_000f64.powf(f64::from(i) / f64::from(terms));
            let sum = move |here| (0..terms).map(|i| f64::cos(angle(here, i))).sum::<f64>();
            // The angle is rounded twice, and the cosine is off by as much as its angle.
            let own = move |here| (0..terms).map(|i| 4.0 + 2.0 * angle(here, i).abs()).sum::<f64>() + SLOPE * sum(here).abs();
            Ok(adds(move |here| slope(here) * sum(here), move |here| slope(here) * own(here)))
        }
        "relative-bias" => {
            let (heads, reach) = rest.split_once(',').ok_or("HEADS,REACH")?;
            let [heads, reach]: [i64; 2] = [heads, reach].map(|n| n.parse().unwrap_or(0));
            let normal = |random: &mut Random, n| Values::F32((0..n).map(|_| random.normal() as f32).collect());
            let rel = drawing.bind_of("rel", [1, 1, heads, 2 * reach + 1], normal);
            let at = move |[_, head, q, k]: Here| [0, 0, head, k - q + reach];
            let table = rel.clone();
            let stage = adds(move |here| rel.nearest(at(here)), |_| 0.0);
            let read: Reading = Box::new(move |here| table.place(at(here)));
            Ok(Stage { partials: vec![("rel", Box::new(|_, _| 1.0))], reads: vec![("rel", read)], ..stage })
        }
        "buckets" => {
            let bucket =
                drawing.bind_of("bucket", [1, 1, 1, 12], |random, n| Values::I32((0..n).map(|_| random.between(-2, 7) as i32).collect()));
            let gain = drawing
                .bind_of("gain", [1, 1, 3, 5], |random, n| Values::F16((0..n).map(|_| f16::from_f64(0.5 + random.unit())).collect()));
            let at = move |[_, head, q, k]: Here| [0, 0, head, bucket.nearest([0, 0, 0, (q - k).abs() / 3]) as i64];
            let (table, at_read) = (gain.clone(), at.clone());
            let of = move |here: Here| gain.nearest(at(here));
            let (slope, rounding) = (of.clone(), of.clone());
            let read: Reading = Box::new(move |here| table.place(at_read(here)));
            Ok(Stage {
                value: Box::new(move |score, here| score * of(here)),
                slope: Box::new(move |_, here| slope(here)),
                rounding: Box::new(move |score, here| (score * rounding(here)).abs()),
                tanh: None,
                partials: vec![("gain", Box::new(|score, _| score))],
                reads: vec![("gain", read)],
            })
        }
        "blocks" => {
            let of = drawing
                .bind_of("of_blocks", [2, 3, 4, 2], |random, n| Values::BF16((0..n).map(|_| bf16::from_f64(random.normal())).collect()));
            // Integer division truncates toward zero.
            let at = |[batch, head, q, k]: Here| [batch, head - 1, q / 16, (k - 5) / 32];
            let table = of.clone();
            let read: Reading = Box::new(move |here| table.place(at(here)));
            let stage = adds(move |here| of.nearest(at(here)), |_| 0.0);
            Ok(Stage { partials: vec![("of_blocks", Box::new(|_, _| 1.0))], reads: vec![("of_blocks", read)], ..stage })
        }
        "parameter" => parameter::stage(rest, drawing),
        "row-place" => row_place("cu_seqlens", drawing),
        "row-place-of-keys" => row_place("cu_seqlens_kv", drawing),
        "temperature" => {
            let temperature =
                drawing.bind("temperature", &[0], |random, n| Values::F32((0..n).map(|_| 0.5 + random.unit() as f32).collect()));
            let (slope, rounding) = (temperature.clone(), temperature.clone());
            Ok(Stage {
                value: Box::new(move |score, here| score * temperature.at(here)),
                slope: Box::new(move |_, here| slope.at(here)),
                rounding: Box::new(move |score, here| (score * rounding.at(here)).abs()),
                tanh: None,
                partials: vec![("temperature", Box::new(|score, _| score))],
                reads: Vec::new(),
            })
        }
        "waves" => {
            let [far, turn] = [("far", 3), ("turn", 2)]
                .map(|(name, axis)| drawing.bind(name, &[axis], |r, n| Values::F32((0..n).map(|_| of_any_size(r)).collect())));
            let [near, grid] = [|[_, _, q, k]: Here| (k - q) as f64 * 0.75, |[_, _, q, k]: Here| (q * k) as f64];
            // Sine and cosine on GPUs are off by at most 8e-7 in absolute terms: 14 times the f32 rounding error of 1.
            Ok(adds(move |here| far.at(here).sin() + 2.0 * turn.at(here).cos() + near(here).sin() - grid(here).cos(), |_| 5.0 * 14.0))
        }
        "powers" => {
            let whole = |n: i64| n as f32;
            let any = drawing.bind("any", &[3], |r, n| {
                let drawn =
                    |r: &mut Random| [0.0, -0.0, 1.0, -1.0, 0.5 + r.unit() as f32, -0.5 - r.unit() as f32][r.between(0, 5) as usize];
                Values::F32((0..n).map(|_| drawn(r)).collect())
            });
            let powers = drawing.bind("whole", &[2], |r, n| Values::F32((0..n).map(|_| whole(r.between(0, 5))).collect()));
            let near = drawing.bind("near", &[3], |r, n| Values::F32((0..n).map(|_| 1.0 + 1e-3 * r.normal() as f32).collect()));
            let great = drawing.bind("great", &[2], |r, n| Values::F32((0..n).map(|_| whole(r.between(0, 400))).collect()));
            let slope = |[_, _, q, _]: Here| 1.25f64.powi((q % 4) as i32);
            let own = move |here| {
                let [any, near] = [any.at(here).powf(powers.at(here)), near.at(here).powf(great.at(here))];
                (any + near - great.at(here).powf(0.25), any.abs() + near.abs() + great.at(here).powf(0.25))
            };
            let rounding = own.clone();
            Ok(Stage {
                value: Box::new(move |score, here| score * slope(here) + own(here).0),
                slope: Box::new(move |_, here| slope(here)),
                // A power is computed by a logarithm, whose error of 1e-6 on GPUs is multiplied by the exponent.
                rounding: Box::new(move |score, here| 8.0 * (score * slope(here)).abs() + 64.0 * rounding(here).1),
                tanh: None,
                partials: Vec::new(),
                reads: Vec::new(),
            })
        }
        "smooth" => {
            let cubes = |score: f64| score + f64::from(0.1_f32) * score.powi(3) - score.powi(2);
            let quotient = |score: f64| (score * 0.25).exp() / (1.0 + score.abs());
            let slope = move |score: f64| {
                let of_quotient = quotient(score) * (0.25 - score.signum() / (1.0 + score.abs()));
                1.0 + 3.0 * f64::from(0.1_f32) * score.powi(2) - 2.0 * score + of_quotient + score / (score * score + 0.5)
            };
            Ok(Stage {
                value: Box::new(move |score, _| cubes(score) + quotient(score) + (score * score + 0.5).ln() / 2.0),
                slope: Box::new(move |score, _| slope(score)),
                rounding: Box::new(|score, _| 8.0 * (1.0 + 3.0 * score.abs() + 0.1 * score.abs().powi(3) + score.powi(2))),
                tanh: None,
                partials: Vec::new(),
                reads: Vec::new(),
            })
        }
        "slanted" => {
            let slant = |here: Here| distance(here) * 0.5f64.powi(here[1] as i32 + 6);
            Ok(adds(slant, move |here| SLOPE * slant(here).abs()))
        }
        "ripples" => Ok(Stage {
            value: Box::new(|score, here| score + score.sin() + (distance(here) * 0.0625).cos()),
            slope: Box::new(|score, _| 1.0 + score.cos()),
            // On a GPU, sine and cosine are off by 8e-7, which is 14 times the f32 rounding error of 1, and by two rounding errors of the
            // angle (docs/numerics.md).
            rounding: Box::new(|score, here| 6.0 * score.abs() + 2.0 * 14.0 + 2.0 * (distance(here) * 0.0625).abs()),
            tanh: None,
            partials: Vec::new(),
            reads: Vec::new(),
        }),
        "clamped" => {
            let least = |here: Here| distance(here) * 0.125 - 1.0;
            Ok(Stage {
                value: Box::new(move |score, here| score.min(1.5).max(least(here))),
                slope: Box::new(move |score, here| f64::from(score < 1.5 && score > least(here))),
                rounding: Box::new(|_, _| 0.0),
                tanh: None,
                partials: Vec::new(),
                reads: Vec::new(),
            })
        }
        // The value ±1e9 is exact in f32 and the same for all keys, so every key of such a row has the same P.
        "very-low-rows" | "very-high-rows" => {
            let all = if text == "very-low-rows" { -1e9 } else { 1e9 };
            let is_one = |[_, _, q, _]: Here| q % 3 == 1;
            Ok(Stage {
                value: Box::new(move |score, here| if is_one(here) { all } else { score }),
                slope: Box::new(move |_, here| if is_one(here) { 0.0 } else { 1.0 }),
                rounding: Box::new(|_, _| 0.0),
                tanh: None,
                partials: Vec::new(),
                reads: Vec::new(),
            })
        }
        "within" => {
            let [.., seq_q, seq_kv] = drawing.extents;
            let within = drawing.bind("within", &[1], |random, n| Values::F32((0..n).map(|_| random.unit() as f32).collect()));
            let factor = move |[_, _, q, _]: Here| ((seq_q - q) as f64).sqrt() * f64::from(0.1_f32);
            let log = move |[_, _, _, k]: Here| ((seq_kv - k) as f64).ln();
            let (value, rounding) = (within.clone(), within);
            Ok(Stage {
                value: Box::new(move |score, here| score * factor(here) + value.at(here) * log(here)),
                slope: Box::new(move |_, here| factor(here)),
                rounding: Box::new(move |score, here| 4.0 * (score * factor(here)).abs() + 4.0 * (rounding.at(here) * log(here)).abs()),
                tanh: None,
                partials: vec![("within", Box::new(move |_, here| log(here)))],
                reads: Vec::new(),
            })
        }
        _ => Err(format!("{text:?}: there is no closure for it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_the_published_ones() {
        assert_eq!((0..8).map(|h| published_slope(h, 8)).collect::<Vec<_>>(), (1..9).map(|n| 0.5f64.powi(n)).collect::<Vec<_>>());
        // With 12 heads, the first 8 have the slopes of 8 heads. The other 4 have 2^-0.5, 2^-1.5, 2^-2.5 and 2^-3.5.
        for (n, want) in [0.5, 1.5, 2.5, 3.5].into_iter().enumerate() {
            assert!((published_slope(8 + n as i64, 12) - 2f64.powf(-want)).abs() < 1e-15);
        }
        assert_eq!((published_slope(0, 1), published_slope(1, 2)), (2f64.powi(-8), 2f64.powi(-8)));
    }
}
