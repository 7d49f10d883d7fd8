//! The problems that support is asked for: every case, and a product of masks, lengths and dims with everything else in turn.

use crate::case::Case;
use cudnn_graph::DType;
use sdpa::{AttentionSpec, Layout, Mask, Shape};

/// One problem and what is special about it.
#[derive(Clone, Debug)]
pub struct Row {
    /// Unique; of a case its name, else its features.
    pub name: String,
    /// The problem.
    pub spec: AttentionSpec,
    /// One value for each of [`AXES`].
    pub features: [String; AXES.len()],
}

/// What problems differ in.
pub const AXES: [&str; 8] = ["mask", "lengths", "heads", "dims", "layout", "stats", "type", "strides"];

const MASKS: [(&str, &[&str]); 12] = [
    ("no mask", &[]),
    ("causal", &["causal"]),
    ("causal, bottom right", &["causal-bottom-right"]),
    ("window", &["window:33,0"]),
    ("window, bottom right", &["window:33,0:bottom-right"]),
    ("window on both sides", &["window:17,9"]),
    ("window on both sides, bottom right", &["window:17,9:bottom-right"]),
    ("window open on the left", &["window:inf,5"]),
    ("window open on the right", &["window:33,inf"]),
    ("prefix", &["prefix-lm:20"]),
    ("prefix and window", &["prefix-lm:20", "window:33,inf"]),
    ("prefix and window, bottom right", &["prefix-lm:20", "window:33,9:bottom-right"]),
];
const LENGTHS: [(i64, i64); 7] = [(2048, 2048), (333, 333), (129, 1025), (257, 129), (1, 500), (1, 1), (8, 8)];
const DIMS: [(i64, i64); 5] = [(64, 64), (128, 128), (192, 128), (256, 256), (72, 72)];
const HEADS: [(i64, i64); 3] = [(4, 4), (8, 2), (4, 1)];
const LAYOUTS: [Layout; 3] = [Layout::Bshd, Layout::Bhsd, Layout::Sbhd];

fn mask_feature(masks: &[Mask]) -> String {
    use sdpa::Align::{BottomRight, TopLeft};
    let at = |align| if align == BottomRight { ", bottom right" } else { "" };
    match *masks {
        [] => "no mask".to_owned(),
        [Mask::PrefixLm { .. }] => "prefix".to_owned(),
        [Mask::Window { left: None, right: Some(0), align }] => format!("causal{}", at(align)),
        [Mask::Window { left: Some(_), right: Some(0), align }] => format!("window{}", at(align)),
        [Mask::Window { left: Some(_), right: Some(_), align }] => format!("window on both sides{}", at(align)),
        [Mask::Window { left: None, align, .. }] => format!("window open on the left{}", at(align)),
        [Mask::Window { right: None, align, .. }] => format!("window open on the right{}", at(align)),
        [Mask::PrefixLm { .. }, Mask::Window { align, .. }] => format!("prefix and window{}", at(align)),
        [ref mask @ (Mask::Traced(_) | Mask::All(_) | Mask::Any(_) | Mask::Not(_))] => mask.to_string(),
        [
            Mask::Window { align: TopLeft | BottomRight, .. }
            | Mask::PrefixLm { .. }
            | Mask::Traced(_)
            | Mask::All(_)
            | Mask::Any(_)
            | Mask::Not(_),
            ..,
        ] => "several masks".to_owned(),
    }
}

fn length_feature(seq_q: i64, seq_kv: i64) -> &'static str {
    match (seq_q, seq_kv) {
        (1, 1) => "length 1",
        (1, _) => "decode",
        (_, 1) => "one key",
        (q, kv) if q > kv => "more queries than keys",
        (q, kv) if q < kv => "more keys than queries",
        (n, _) if n <= 64 => "equal, up to 64",
        (n, _) if n % 128 == 0 => "equal, whole tiles",
        _ => "equal, off every tile",
    }
}

fn order(spec: &AttentionSpec) -> &'static str {
    let [batch, head, seq, _] = spec.q.strides;
    if head >= seq {
        "batch, head, seq, dim"
    } else if seq > batch {
        "seq, batch, head, dim"
    } else {
        "batch, seq, head, dim"
    }
}

/// Whether every row begins at a multiple of 16 bytes: what the engines read and write in place.
fn aligned(spec: &AttentionSpec) -> bool {
    let element = i64::from(spec.dtype.bits() / 8);
    [spec.q, spec.k, spec.v, spec.o].iter().all(|t| {
        t.alignment >= 16 && t.dims.iter().zip(t.strides).take(3).all(|(&extent, stride)| extent == 1 || stride * element % 16 == 0)
    })
}

fn dense(spec: &AttentionSpec) -> bool {
    [spec.q, spec.k, spec.v, spec.o].iter().all(|t| t.extent() == Some(t.dims.iter().product()))
}

impl Row {
    /// A problem with its features read off it.
    pub fn new(name: Option<String>, spec: AttentionSpec) -> Row {
        let [_, heads_q, seq_q, dim_qk] = spec.q.dims;
        let [_, heads_kv, seq_kv, dim_v] = spec.v.dims;
        let heads = if heads_q == heads_kv {
            "MHA"
        } else if heads_kv == 1 {
            "MQA"
        } else {
            "GQA"
        };
        let strides = if !aligned(&spec) {
            "rows off 16 bytes"
        } else if dense(&spec) {
            "dense"
        } else {
            "gaps of whole 16 bytes"
        };
        let dims = if dim_qk == dim_v { dim_qk.to_string() } else { format!("{dim_qk} and {dim_v}") };
        let stats = if spec.stats { "with stats" } else { "without stats" };
        let features = [
            mask_feature(&spec.masks),
            length_feature(seq_q, seq_kv).to_owned(),
            heads.to_owned(),
            dims.clone(),
            order(&spec).to_owned(),
            stats.to_owned(),
            spec.dtype.to_string(),
            strides.to_owned(),
        ];
        let name = name.unwrap_or_else(|| {
            let layout: String = order(&spec).split(", ").filter_map(|word| word.chars().next()).collect();
            format!("{}; {seq_q}x{seq_kv}; {heads}; dims {dims}; {layout}; {stats}; {}", features[0], spec.dtype)
        });
        Row { name, spec, features }
    }

    /// Whether the engines take every operand where it is.
    pub fn in_place(&self) -> bool {
        aligned(&self.spec)
    }
}

/// Every row, always in the same order.
///
/// # Errors
/// What [`Case::all`] says.
pub fn rows() -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    let mut n = 0;
    for (_, masks) in MASKS {
        for (seq_q, seq_kv) in LENGTHS {
            for (dim_qk, dim_v) in DIMS {
                let (heads_q, heads_kv) = HEADS[n % HEADS.len()];
                let shape = Shape { batch: 2, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
                let dtype = if n / 7 % 2 == 0 { DType::BF16 } else { DType::F16 };
                let mut spec = AttentionSpec::dense(dtype, shape, LAYOUTS[n / 3 % LAYOUTS.len()]);
                for mask in masks {
                    spec.masks.push(mask.parse().map_err(|e| format!("{e}"))?);
                }
                spec.stats = n / 2 % 2 == 0;
                rows.push(Row::new(None, spec));
                n += 1;
            }
        }
    }
    for case in Case::all()? {
        if matches!(case.dtype, DType::F16 | DType::BF16) {
            let name = format!("case {}", case.name);
            rows.push(Row::new(Some(name), case.spec()?));
        }
    }
    Ok(rows)
}

/// Rows that are compiled on every run, in whichever form is taken: every kind of mask, lengths, heads, dims and strides that is
/// lowered differently.
pub const SAMPLE: [&str; 14] = [
    "case plain",
    "case gqa_causal",
    "case gqa_chunked_prefill",
    "case causal_bottom_right_rows_without_keys_f16",
    "case sliding_window",
    "case sliding_window_bottom_right",
    "case window_both_sides",
    "case window_open_right",
    "case prefix_and_open_window_bottom_right",
    "case dims_differ",
    "case dims_256",
    "case one_query_many_keys",
    "case packed_qkv",
    "case gaps_everywhere_bshd",
];

/// Rows that are compiled in the unified form too.
pub const UNIFIED_SAMPLE: [&str; 6] = [
    "case plain",
    "case gqa_causal",
    "case sliding_window_bottom_right",
    "case prefix_and_open_window_bottom_right",
    "case dims_differ",
    "case one_query_many_keys",
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_masks_are_what_they_are_called() {
        let rows = rows().unwrap();
        assert_eq!(rows.iter().map(|r| &r.name).collect::<BTreeSet<_>>().len(), rows.len());
        for (name, masks) in MASKS {
            let masks: Vec<Mask> = masks.iter().map(|m| m.parse().unwrap()).collect();
            assert_eq!(mask_feature(&masks), name);
        }
        for name in SAMPLE.iter().chain(&UNIFIED_SAMPLE) {
            assert!(rows.iter().any(|r| r.name == *name), "{name}");
        }
    }

    /// Whatever two values of different axes are picked, some problem has both.
    #[test]
    fn every_pair_of_features_meets() {
        let rows: Vec<Row> = rows().unwrap().into_iter().filter(|r| !r.name.starts_with("case ")).collect();
        for (a, first) in AXES.iter().enumerate() {
            for (b, second) in AXES.iter().enumerate().take(a) {
                let values = |axis: usize| rows.iter().map(|r| &r.features[axis]).collect::<BTreeSet<_>>();
                let pairs: BTreeSet<_> = rows.iter().map(|r| (&r.features[a], &r.features[b])).collect();
                let missing: Vec<_> =
                    values(a).into_iter().flat_map(|x| values(b).into_iter().map(move |y| (x, y))).filter(|p| !pairs.contains(p)).collect();
                assert!(missing.is_empty(), "{first} and {second}: {missing:?}");
            }
        }
    }
}
