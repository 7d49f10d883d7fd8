//! Masks.

use super::{Bound, Drawing, Here, Tensor, Values, axes, parameter};
use crate::random::Random;

pub(super) type Keep = Box<dyn Fn(Here) -> bool + Send + Sync>;

/// Draws a document index for each position: a few runs in each batch entry.
fn runs(random: &mut Random, elements: usize, batches: i64) -> Values {
    let length = elements / batches.max(1) as usize;
    let mut all = Vec::with_capacity(elements);
    for _ in 0..batches {
        let mut document = random.between(0, 1) as i32;
        for n in 0..length {
            if n > 0 && random.between(0, length as i64 / 3) == 0 {
                document += 1;
            }
            all.push(document);
        }
    }
    Values::I32(all)
}

/// Draws a length for each batch entry: 0, the extent, more than the extent, near the end of a block, or between. A length beyond the extent means the extent.
fn lengths(random: &mut Random, entries: usize, extent: i64) -> Values {
    let mut one = || match random.between(0, 6) {
        0 => 0,
        1 => extent,
        2 => extent + random.between(1, 40),
        3 => (random.between(0, extent / 8) * 8 + random.between(-1, 1)).clamp(0, extent),
        _ => random.between(extent.min(1), extent),
    };
    Values::I32((0..entries).map(|_| one() as i32).collect())
}

/// Sets the length of the last of several entries to 0: cuDNN engines get an empty sequence wrong first.
fn with_an_empty_one(lengths: Values) -> Values {
    let Values::I32(mut all) = lengths else { return lengths };
    if let [_, .., last] = &mut all[..] {
        *last = 0;
    }
    Values::I32(all)
}

fn documents(drawing: &mut Drawing<'_>) -> [Tensor; 2] {
    let batches = drawing.extents[0];
    [("doc_q", 2), ("doc_k", 3)].map(|(name, axis)| drawing.bind(name, &[0, axis], |random, n| runs(random, n, batches)))
}

fn window(left: Option<i64>, right: Option<i64>, shift: i64) -> Keep {
    Box::new(move |[_, _, q, k]| left.is_none_or(|left| k > q + shift - left) && right.is_none_or(|right| k <= q + shift + right))
}

/// Binds the lengths of queries and keys that the mask `padding` reads.
pub(super) fn lengths_of_entries(drawing: &mut Drawing<'_>) -> [Tensor; 2] {
    let [_, _, seq_q, seq_kv] = drawing.extents;
    let rows = drawing.bind("seq_len_q", &[0], |random, n| lengths(random, n, seq_q));
    [rows, drawing.bind("seq_len_kv", &[0], |random, n| with_an_empty_one(lengths(random, n, seq_kv)))]
}

/// Returns the number of queries and keys of each batch entry, from the bound `cu_seqlens` or lengths.
pub(super) fn entries(bound: &[Bound], [batch, _, seq_q, seq_kv]: [i64; 4]) -> Vec<[i64; 2]> {
    let of = |name: &str| bound.iter().find(|b| b.name == name).map(|b| &*b.widened);
    let side = |b: usize, boundaries: &str, length: &str, extent: i64| match (of("cu_seqlens").or_else(|| of(boundaries)), of(length)) {
        (Some(at), _) => (at[b + 1] - at[b]) as i64,
        (None, Some(lengths)) => (lengths[b] as i64).clamp(0, extent),
        (None, None) => extent,
    };
    let entry = |b| [side(b, "cu_seqlens_q", "seq_len_q", seq_q), side(b, "cu_seqlens_kv", "seq_len_kv", seq_kv)];
    (0..batch as usize).map(entry).collect()
}

/// A window that is bottom-right aligned per sequence.
fn at_ends(left: Option<i64>, right: Option<i64>, drawing: &Drawing<'_>) -> Keep {
    let entries = entries(&drawing.bound, drawing.extents);
    Box::new(move |here| {
        let [queries, keys] = entries[here[0] as usize];
        window(left, right, keys - queries)(here)
    })
}

/// Returns the mask with this name. The caller binds the lengths for `padding` before.
pub(super) fn keep(text: &str, drawing: &mut Drawing<'_>) -> Result<Keep, String> {
    let wrong = || format!("{text:?}: there is no closure for it");
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let number = |n: &str| n.parse::<i64>().map_err(|_| wrong());
    let [_, _, seq_q, seq_kv] = drawing.extents;
    let bottom_right = seq_kv - seq_q;
    Ok(match name {
        "causal" => window(None, Some(0), 0),
        "causal-bottom-right" => window(None, Some(0), bottom_right),
        "causal-ends" => at_ends(None, Some(0), drawing),
        "sliding-window" => window(Some(number(rest)?), Some(0), 0),
        "window" => {
            let (sides, corner) = rest.split_once(':').unwrap_or((rest, ""));
            let (left, right) = sides.split_once(',').ok_or_else(wrong)?;
            let side = |n: &str| if n == "inf" { Ok(None) } else { number(n).map(Some) };
            let (left, right) = (side(left)?, side(right)?);
            match corner {
                "" => window(left, right, 0),
                "bottom-right" => window(left, right, bottom_right),
                "ends" => at_ends(left, right, drawing),
                _ => return Err(wrong()),
            }
        }
        "prefix-lm" => {
            let len = number(rest)?;
            Box::new(move |[_, _, q, k]| k <= q || k < len)
        }
        "dilated" => {
            let n = number(rest)?;
            Box::new(move |[_, _, q, k]| (q - k) % n == 0)
        }
        "document" => {
            let [of_q, of_k] = documents(drawing);
            Box::new(move |here| of_q.at(here) == of_k.at(here))
        }
        "document-runs" => {
            let starts = |random: &mut Random, n| Values::I32((0..n).map(|_| random.between(-2, seq_kv) as i32).collect());
            let start = drawing.bind("doc_start", &[0, 2], starts);
            let end = drawing.bind("doc_end", &[0, 2], starts);
            Box::new(move |here| start.at(here) <= here[3] as f64 && (here[3] as f64) < end.at(here))
        }
        "shared-prefix" => {
            let (len, [of_q, of_k]) = (number(rest)?, documents(drawing));
            Box::new(move |here| here[3] < len || of_q.at(here) == of_k.at(here))
        }
        "padding" => {
            let [rows, keys] = lengths_of_entries(drawing);
            Box::new(move |here| (here[2] as f64) < rows.at(here) && (here[3] as f64) < keys.at(here))
        }
        "global-local" => {
            let (near, globals) = rest.split_once(',').ok_or_else(wrong)?;
            let (near, globals) = (number(near)?, number(globals)?);
            Box::new(move |[_, _, q, k]| (q - k).abs() < near || k < globals || q < globals)
        }
        "natten" => {
            let size = number(rest)?;
            Box::new(move |[_, _, q, k]| {
                let last_start = (seq_kv - size).max(0);
                let start = (q - size / 2).clamp(0, last_start);
                (start..start + size).contains(&k)
            })
        }
        "parameter" => return parameter::keep(rest, drawing),
        "array" => {
            let axes = axes(rest)?;
            let mask = drawing.bind("mask", &axes, |random, n| Values::Bool((0..n).map(|_| random.unit() < 0.7).collect()));
            Box::new(move |here| mask.at(here) != 0.0)
        }
        _ => return Err(wrong()),
    })
}
