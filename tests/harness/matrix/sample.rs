//! Rows that are compiled on every run.

/// Rows that are compiled on every run, in whichever form is taken: every kind of mask, lengths, heads, dims, strides and score_mods
/// that is lowered differently.
pub const SAMPLE: [&str; 33] = [
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
pub const UNIFIED_SAMPLE: [&str; 7] = [
    "case plain",
    "case gqa_causal",
    "case sliding_window_bottom_right",
    "case prefix_and_open_window_bottom_right",
    "case dims_differ",
    "case one_query_many_keys",
    "softcap:30; causal; forward",
];
