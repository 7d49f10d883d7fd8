//! Rows that are compiled on every run.

use crate::offline::PROFILES;
use crate::share::{Share, VARIABLE, is_whole};

/// Rows that are compiled on every run, each for one or two of four devices, so that three days have all, in whichever form is taken: every kind
/// of mask, lengths, heads, dims, strides and score_mods that is lowered differently.
pub const SAMPLE: [&str; 37] = [
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
    "backward case plain",
    "backward case mqa_causal",
    "backward case sliding_window_bottom_right",
    "backward case dims_differ",
    "backward case dims_256",
    "backward case deterministic",
    "backward case d_o_is_one_number",
    "packed, boundaries of both sides; causal; equal, whole tiles; GQA; dims 64; with stats; f16",
    "packed, boundaries of each side; window; more keys than queries; MHA; dims 128; with stats; bf16",
    "backward: packed, boundaries of both sides; causal; equal, whole tiles; GQA; dims 64; any order; f16",
    "paged, of 16; score_mod none; causal, bottom right, beside lengths; more keys than queries; MQA; dims 128; without a sink; with stats; f16",
    "paged, of 48; score_mod none; padding; more keys than queries; GQA; dims 128; without a sink; with stats; f16",
    "paged, of 48; score_mod none; causal, bottom right, beside lengths; decode; GQA; dims 128; without a sink; with stats; bf16",
    "paged, of 128, packed queries; score_mod none; window, at the ends; more keys than queries; GQA; dims 128; without a sink; with stats; f16",
    "softcap:30; causal; forward",
    "softcap:30; causal; backward",
    "alibi; causal; backward",
    "bias16:hqk, softcap:30, alibi; causal; backward, d_bias",
    "no score_mod; padding; forward",
    "no score_mod; padding; backward",
    "no score_mod; document, causal; backward",
    "no score_mod; array:bhqk; forward",
    "no score_mod; array:bhqk; backward",
];

/// Rows that are compiled in the unified form too.
pub const UNIFIED_SAMPLE: [&str; 9] = [
    "case plain",
    "case gqa_causal",
    "case sliding_window_bottom_right",
    "case prefix_and_open_window_bottom_right",
    "case dims_differ",
    "case one_query_many_keys",
    "paged, of 16; score_mod none; causal, bottom right, beside lengths; more keys than queries; MQA; dims 128; without a sink; with stats; f16",
    "paged, of 48; score_mod none; causal, bottom right, beside lengths; decode; GQA; dims 128; without a sink; with stats; bf16",
    "softcap:30; causal; forward",
];

/// The rows of [`SAMPLE`] whose plans copy an operand or convert a declared tensor. They are compiled on every run, so that every run checks both.
const EVERY_RUN: [&str; 3] = ["case gaps_everywhere_bshd", "backward case d_o_is_one_number", "no score_mod; array:bhqk; forward"];

/// Whether a row is compiled for a device today. Rows of [`SAMPLE`] take turns, a device after the other.
///
/// # Panics
/// Where [`VARIABLE`] is no share.
pub fn is_compiled_today(row: &str, profile: &str) -> bool {
    if EVERY_RUN.contains(&row) {
        return true;
    }
    let Some(nth) = SAMPLE.iter().position(|name| *name == row) else { return true };
    let device = PROFILES.iter().position(|(name, _)| *name == profile).unwrap_or_default();
    let wanted = if is_whole() { "all".to_owned() } else { Share::wanted(VARIABLE, DEVICE_DAYS) };
    let share = Share::parse(&wanted).unwrap_or_else(|why| panic!("{VARIABLE}={why}"));
    share.has(nth + device)
}

/// Days until a row has been compiled for every device.
const DEVICE_DAYS: u64 = 6;

/// Rows of 8-bit floats that are compiled on every run, for devices that take such.
pub const FP8_SAMPLE: [&str; 6] = [
    "8 bits; score_mod none; no mask; equal, off every tile; MHA; dims 128; batch, seq, head, dim; with stats; f8e4m3",
    "8 bits; score_mod softcap:30; window; equal, off every tile; MHA; dims 128; batch, seq, head, dim; with stats; f8e4m3, o in f8e5m2",
    "8 bits; score_mod none; padding; more keys than queries; MHA; dims 128; batch, head, seq, dim; without stats; f8e4m3",
    "backward: 8 bits; score_mod none; causal, bottom right; more keys than queries; MHA; dims 128; batch, head, seq, dim; any order; f8e4m3, d_o in f8e5m2, gradients in f8e5m2",
    "backward: 8 bits; score_mod none; padding; more keys than queries; MHA; dims 128; batch, head, seq, dim; any order; f8e4m3",
    "backward: 8 bits; score_mod none; several masks; equal, off every tile; MHA; dims 128; batch, seq, head, dim; any order; f8e5m2",
];
