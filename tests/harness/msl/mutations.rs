//! Faults to put into kernels, each of which some check has to find.

/// A change of a kernel's text.
#[derive(Clone, Copy, Debug)]
pub struct Mutation {
    /// What is wrong then.
    pub name: &'static str,
    /// What stands there; once in the text of some kernel.
    pub from: &'static str,
    /// What stands there instead.
    pub to: &'static str,
}

const fn mutation(name: &'static str, from: &'static str, to: &'static str) -> Mutation {
    Mutation { name, from, to }
}

/// Faults of the forward kernel.
pub const FORWARD: &[Mutation] = &[
    mutation(
        "keys replace values that are still read",
        "and the queries are there.\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    mutation(
        "keys are read before they are there",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n        float2 scores",
        "float2 scores",
    ),
    mutation(
        "values replace keys that are still read",
        "// The keys have been read.\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    mutation(
        "values are read before they are there",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n        UNROLL for (int j = 0; j < PASSING / 8; j++) {\n            UNROLL for (int d = 0; d < PADDED_V",
        "UNROLL for (int j = 0; j < PASSING / 8; j++) {\n            UNROLL for (int d = 0; d < PADDED_V",
    ),
    mutation(
        "a barrier that orders nothing",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n        float2 scores",
        "threadgroup_barrier(mem_flags::mem_none);\n\n        float2 scores",
    ),
    mutation(
        "a barrier that one simdgroup does not come to",
        "// The keys have been read.\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (simdgroup != 0) {\n            threadgroup_barrier(mem_flags::mem_threadgroup);\n        }",
    ),
    mutation("an accumulator that is not cleared", "sums[d] = float2(0.0f);", ""),
    mutation("scores that are not cleared", "scores[j] = float2(0.0f);", ""),
    mutation("a band that is one key too narrow", "distance <= bounds.upper", "distance < bounds.upper"),
    mutation("columns past the dim are written", "if (d + column + e < DIM_V)", "if (true)"),
    mutation("rows past the end are written", "if (query >= params.seq_q) {\n        return;\n    }", ""),
    mutation("rows past the end are read", "row < present && column < DIM", "column < DIM"),
    mutation("columns past the dim are read", "row < present && column < DIM", "row < present"),
    mutation("a row is reduced with another's lanes", "x + simd_shuffle_xor(x, ushort(8))", "x + simd_shuffle_xor(x, ushort(4))"),
    mutation(
        "an operation of the simdgroup that some lanes do not come to",
        "return x + simd_shuffle_xor(x, ushort(8));",
        "if (x > 1.0f) {\n        x += simd_shuffle_xor(x, ushort(8));\n    }\n    return x;",
    ),
    mutation("the output is not rescaled", "sums[d] *= shrink;", ""),
    mutation("the sum is not rescaled", "row_sum * shrink", "row_sum"),
    mutation("the last keys are not visited", "end_q + bounds.upper)", "end_q + bounds.upper - PASSING)"),
    mutation("the wrong key head", "head / params.group", "head % (params.heads_q / params.group)"),
    mutation("stats in powers of two", "(row_max + log2(row_sum)) * LN_2", "(row_max + log2(row_sum))"),
    mutation("a block past the end counts as whole", " && end_k <= bounds.keys", ""),
    mutation("a tensor is read past its end", "min(key, params.seq_kv - 1)", "key"),
    mutation("an array that is too short", "float2 scores[PASSING / 8];", "float2 scores[PASSING / 8 - 1];"),
    mutation("every lane of a row writes its stats", "if (column == 0) {", "{"),
    mutation("the softmax of a row without keys", "row_sum == 0.0f ? 0.0f : 1.0f / row_sum", "1.0f / row_sum"),
    mutation("an index that is too narrow", "const long place = (long(batch)", "const signed char place = (long(batch)"),
    mutation("an input is written", "device Element* out = o +", "device Element* out = (device Element*)q +"),
];

/// Faults of the kernels of the backward pass.
pub const BACKWARD: &[Mutation] = &[
    mutation("an accumulator that is not cleared", "dk_sums[d] = float2(0.0f);", ""),
    mutation(
        "keys are read before they are there",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n        float2 weights",
        "float2 weights",
    ),
    mutation(
        "queries replace some that are still read",
        "// The block before has been read, and the keys are there.\n            threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    mutation("no delta", "gradient - row.delta", "gradient"),
    mutation("dk without the scale", "dk_sums[d / 8][e] * params.scale", "dk_sums[d / 8][e]"),
    mutation("the first queries are not visited", "max(first_k - bounds.upper,", "max(first_k - bounds.upper + PASSING,"),
    mutation("one head of a group", "member < params.group", "member < 1"),
    mutation(
        "threadgroups write the same dk",
        "dk + batch * params.dk_strides[0] + head_kv * params.dk_strides[1]",
        "dk + batch * params.dk_strides[0]",
    ),
    mutation("keys past the end are written", "if (key >= params.seq_kv) {\n        return;\n    }", ""),
    mutation("stats are read past their end", "if (!there)", "if (false)"),
    mutation("the gradient of the score_mod is left out", "slope = score_mod_gradient(raw, slope, at, captured);", ""),
];
