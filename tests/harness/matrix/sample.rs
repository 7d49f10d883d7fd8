//! Rows that are compiled on every run.

use crate::offline::PROFILES;

/// Rows that are compiled on every run, in whichever form is taken: every kind of mask, lengths, heads, dims, strides and score_mods
/// that is lowered differently.
pub const SAMPLE: [&str; 30] = [
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

/// The device that every row is compiled for; each is compiled for one of the others besides, which take turns.
const ALWAYS: &str = "h200";

/// Whether a row, by its place in the sample, is compiled for a device by the runtime 9.`minor`: another takes another.
pub fn is_compiled(place: usize, profile: &str, minor: u32) -> bool {
    let others: Vec<&str> = PROFILES.iter().map(|(name, _)| *name).filter(|name| *name != ALWAYS).collect();
    profile == ALWAYS || others[(place + minor as usize) % others.len()] == profile
}

/// Rows that are compiled in the unified form too.
pub const UNIFIED_SAMPLE: [&str; 7] = [
    "case plain",
    "case gqa_causal",
    "case sliding_window_bottom_right",
    "case prefix_and_open_window_bottom_right",
    "case dims_differ",
    "case one_query_many_keys",
    "softcap:30; causal; forward",
];
