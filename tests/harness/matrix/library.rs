//! Score_mods and masks of the library at one size, and pairs of them.

use super::{Kind, Row, Spec};
use sdpa::library::{self, Named};
use sdpa::{AttentionSpec, DType, Layout, Mask, ScoreMod, Shape};

/// No score_mod of the library: a comparison of floats.
const COMPARISON: &str = "select(score > 0.0, score, score * 0.5)";

/// None either: a scale in device memory.
const SCALE: &str = "tensor scale[]: f32; score * scale";

/// What each score_mod meets.
const FEW_MASKS: [&[&str]; 3] = [&[], &["causal"], &["padding"]];

/// Several at once: score_mods, masks.
const TOGETHER: [(&[&str], &[&str]); 9] = [
    (&["bias16:hqk", "softcap:30", "alibi"], &["causal"]),
    (&["softcap:30", "bias16:hqk"], &["causal"]),
    (&["softcap:30"], &["document", "sliding-window:128"]),
    (&["alibi"], &["array:bhqk"]),
    (&["softcap:30"], &["padding", "causal"]),
    (&["bias16:hqk"], &["document"]),
    (&[], &["document", "causal"]),
    (&[], &["padding", "document"]),
    (&["alibi"], &["prefix-lm:77"]),
];

fn add(rows: &mut Vec<Row>, score_mods: &[&str], masks: &[&str]) -> Result<(), String> {
    let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q: 512, seq_kv: 512, dim_qk: 64, dim_v: 64 };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    for score_mod in score_mods {
        spec.score_mods.push(score_mod.parse::<ScoreMod>().map_err(|e| e.to_string())?);
    }
    for mask in masks {
        spec.masks.push(mask.parse::<Mask>().map_err(|e| e.to_string())?);
    }
    spec.stats = true;
    let named = |names: &[&str], none: &str| if names.is_empty() { none.to_owned() } else { names.join(", ") };
    let (score_mods, masks) = (named(score_mods, "no score_mod"), named(masks, "no mask"));
    if rows.iter().any(|row| matches!(&row.kind, Kind::Library { score_mods: s, masks: m } if *s == score_mods && *m == masks)) {
        return Ok(());
    }
    let kind = Kind::Library { score_mods: score_mods.clone(), masks: masks.clone() };
    let mut push = |pass: &str, spec: Spec| rows.push(Row::new(format!("{score_mods}; {masks}; {pass}"), kind.clone(), spec));
    push("forward", spec.clone().into());
    push("backward", spec.backward().into());
    if spec.validate().is_ok_and(|problem| problem.params().iter().any(|declared| declared.name == "bias")) {
        push("backward, d_bias", spec.backward().wrt("bias", spec.dtype).into());
    }
    Ok(())
}

fn cases<T>(names: &'static [Named<T>]) -> impl Iterator<Item = &'static str> {
    names.iter().flat_map(|named| named.cases.iter().copied())
}

/// Every row, always in the same order.
pub(super) fn rows() -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for score_mod in cases(library::SCORE_MODS).chain([COMPARISON, SCALE]) {
        for masks in FEW_MASKS {
            add(&mut rows, &[score_mod], masks)?;
        }
    }
    // Without lengths `causal-ends` is `causal-bottom-right`, in the problem too.
    for mask in cases(library::MASKS).filter(|mask| *mask != "causal-ends") {
        add(&mut rows, &[], &[mask])?;
        add(&mut rows, &["softcap:30"], &[mask])?;
    }
    for (score_mods, masks) in TOGETHER {
        add(&mut rows, score_mods, masks)?;
    }
    Ok(rows)
}
