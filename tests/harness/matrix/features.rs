//! What is special about a problem, read off it.

use super::Spec;
use sdpa::{AttentionSpec, Mask, Packed, TensorSpec};

/// What problems differ in.
pub const AXES: [&str; 14] = [
    "pass",
    "score_mod",
    "mask",
    "boundaries",
    "lengths",
    "heads",
    "dims",
    "layout",
    "stats",
    "type",
    "strides",
    "pages",
    "sink",
    "dropout",
];

/// One value for each of [`AXES`].
pub(super) fn features(spec: &Spec) -> [String; AXES.len()] {
    let forward = spec.forward();
    let [_, heads_q, seq_q, dim_qk] = forward.q.dims;
    let [_, heads_kv, seq_kv, dim_v] = forward.v.dims;
    let heads = if heads_q == heads_kv {
        "MHA"
    } else if heads_kv == 1 {
        "MQA"
    } else {
        "GQA"
    };
    let strides = if !takes_in_place(spec) {
        "rows off 16 bytes"
    } else if tensors(spec).iter().all(dense) {
        "dense"
    } else {
        "gaps of whole 16 bytes"
    };
    let stats = match spec {
        Spec::Forward(forward) if !forward.stats => "without stats",
        Spec::Forward(_) | Spec::Backward(_) => "with stats",
    };
    [
        pass_feature(spec),
        score_mod_feature(forward),
        masks_feature(forward),
        boundary_feature(forward).to_owned(),
        length_feature(seq_q, seq_kv).to_owned(),
        heads.to_owned(),
        if dim_qk == dim_v { dim_qk.to_string() } else { format!("{dim_qk} and {dim_v}") },
        order(forward).to_owned(),
        stats.to_owned(),
        type_feature(spec),
        strides.to_owned(),
        page_feature(forward),
        if forward.sink { "with a sink" } else { "without a sink" }.to_owned(),
        if forward.dropout.is_some() { "with dropout" } else { "without dropout" }.to_owned(),
    ]
}

fn page_feature(spec: &AttentionSpec) -> String {
    let Some(paged) = spec.paged else { return "none".to_owned() };
    let [_, head, token, _] = spec.k.strides;
    let packs = if spec.packed.is_some() { ", packed queries" } else { "" };
    format!("of {}{}{packs}", paged.page_size, if head > token { ", head-major" } else { "" })
}

/// Of a paged cache, what there is beside lengths of entries, and whether there are such.
fn masks_feature(spec: &AttentionSpec) -> String {
    let padding = Mask::padding();
    if spec.paged.is_none() || spec.masks.len() < 2 || !spec.masks.contains(&padding) {
        return mask_feature(&spec.masks);
    }
    let others: Vec<Mask> = spec.masks.iter().filter(|mask| **mask != padding).cloned().collect();
    format!("{}, beside lengths", mask_feature(&others))
}

fn pass_feature(spec: &Spec) -> String {
    match spec {
        Spec::Forward(_) => "forward".to_owned(),
        Spec::Backward(b) => {
            let same = if b.deterministic { ", deterministic" } else { "" };
            let wrt: String = b.wrt.iter().map(|g| format!(", d_{} in {}", g.name, g.dtype)).collect();
            format!("backward{same}{wrt}")
        }
    }
}

/// Of 8-bit floats with those of results and gradients, where they are others.
fn type_feature(spec: &Spec) -> String {
    let forward = spec.forward();
    let (own, other) = match spec {
        Spec::Forward(_) => (forward.dtype, [("o", forward.o_dtype), ("", None)]),
        Spec::Backward(b) => (forward.dtype, [("d_o", b.d_o_dtype), ("gradients", b.gradient_dtype)]),
    };
    let others = other.into_iter().filter_map(|(name, dtype)| Some((name, dtype.filter(|dtype| *dtype != own)?)));
    others.fold(own.to_string(), |text, (name, dtype)| format!("{text}, {name} in {dtype}"))
}

fn score_mod_feature(spec: &AttentionSpec) -> String {
    let names: Vec<String> = spec.score_mods.iter().map(|m| m.to_string().replace('\n', " ")).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(" + ") }
}

pub(super) fn mask_feature(masks: &[Mask]) -> String {
    use sdpa::Align::{BottomRight, Ends, TopLeft};
    let at = |align| match align {
        TopLeft => "",
        BottomRight => ", bottom right",
        Ends => ", at the ends",
    };
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
            Mask::Window { align: TopLeft | BottomRight | Ends, .. }
            | Mask::PrefixLm { .. }
            | Mask::Traced(_)
            | Mask::All(_)
            | Mask::Any(_)
            | Mask::Not(_),
            ..,
        ] => "several masks".to_owned(),
    }
}

fn boundary_feature(spec: &AttentionSpec) -> &'static str {
    match spec.packed.filter(|_| spec.paged.is_none()) {
        None => "none",
        Some(Packed { cross: false, .. }) => "of both sides",
        Some(Packed { cross: true, .. }) => "of each side",
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

/// The order of the axes in memory.
pub(super) fn order(spec: &AttentionSpec) -> &'static str {
    let [batch, head, seq, _] = spec.q.strides;
    if head >= seq {
        "batch, head, seq, dim"
    } else if seq > batch {
        "seq, batch, head, dim"
    } else {
        "batch, seq, head, dim"
    }
}

/// Every strided operand of a pass.
fn tensors(spec: &Spec) -> Vec<TensorSpec> {
    let of = |f: &AttentionSpec| {
        let in_memory = |tensor: TensorSpec| f.paged.map_or(tensor, |paged| paged.container(&tensor));
        vec![f.q, in_memory(f.k), in_memory(f.v), f.o]
    };
    match spec {
        Spec::Forward(forward) => of(forward),
        Spec::Backward(b) => {
            let mut all = of(&b.forward);
            all.extend([b.d_o, b.dq, b.dk, b.dv]);
            all
        }
    }
}

/// Whether every row begins at a multiple of 16 bytes and has elements of its own: what the engines read and write in place.
fn in_place(t: &TensorSpec, spec: &AttentionSpec) -> bool {
    // Results that are wider lie as well.
    let element = i64::from(spec.dtype.bits() / 8);
    let rows = t.dims.iter().zip(t.strides).take(3).all(|(&extent, stride)| extent == 1 || (stride > 0 && stride * element % 16 == 0));
    rows && t.alignment >= 16 && (t.strides[3] == 1 || t.dims[3] == 1)
}

/// Whether the engines take every operand of a pass where it is.
pub(super) fn takes_in_place(spec: &Spec) -> bool {
    tensors(spec).iter().all(|t| in_place(t, spec.forward()))
}

fn dense(t: &TensorSpec) -> bool {
    t.extent() == Some(t.dims.iter().product())
}
