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
        "have read the keys.\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    mutation(
        "values are read before they are there",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n        if (any_odd",
        "if (any_odd",
    ),
    mutation(
        "a barrier that orders nothing",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n        float2 scores",
        "threadgroup_barrier(mem_flags::mem_none);\n\n        float2 scores",
    ),
    mutation(
        "a barrier that one simdgroup does not come to",
        "have read the keys.\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "have read the keys.\n        if (simdgroup != 0) {\n            threadgroup_barrier(mem_flags::mem_threadgroup);\n        }",
    ),
    mutation("an accumulator that is not cleared", "sums[d] = float2(0.0f);", ""),
    mutation("scores that are not cleared", "scores[j] = float2(0.0f);", ""),
    mutation("a band that is one key too narrow", "distance <= bounds.upper", "distance < bounds.upper"),
    mutation("columns past the dim are written", "if (d + column + e < DIM_V)", "if (true)"),
    mutation("rows past the end are written", "if (query >= span_q.rows) {\n        return;\n    }", ""),
    mutation("rows past the end are read", "row < present && column < DIM", "column < DIM"),
    mutation("columns past the dim are read", "row < present && column < DIM", "row < present"),
    mutation("a row is reduced with another's lanes", "x + simd_shuffle_xor(x, ushort(8))", "x + simd_shuffle_xor(x, ushort(4))"),
    mutation(
        "an operation of the simdgroup that some lanes do not come to",
        "return x + simd_shuffle_xor(x, ushort(8));",
        "if (x > 1.0f) {\n        x += simd_shuffle_xor(x, ushort(8));\n    }\n    return x;",
    ),
    mutation("the output is not rescaled", "sums[d] *= shrink;", ""),
    mutation("the sum is not rescaled", "row_sum * shrink + row_total", "row_sum + row_total"),
    mutation("the last keys are not visited", "end_q + bounds.upper)", "end_q + bounds.upper - PASSING)"),
    mutation("the wrong key head", "head / params.group", "head % (params.heads_q / params.group)"),
    mutation("stats in two bases", "row_max + log2(row_sum) * LN_2", "row_max + log2(row_sum)"),
    mutation("a block past the end counts as whole", " && end_k <= bounds.keys", ""),
    mutation("a tensor is read past its end", "min(at.w, params.seq_kv - 1)", "at.w"),
    mutation("an array that is too short", "float2 scores[PASSING / 8];", "float2 scores[PASSING / 8 - 1];"),
    mutation("every lane of a row writes its stats", "if (column == 0) {", "{"),
    mutation("the softmax of a row without keys", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum"),
    mutation("an index that is too narrow", "const long place = stats_place(", "const signed char place = stats_place("),
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
        "and the keys are in threadgroup memory.\n            threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    mutation("no delta", "gradient - row.delta", "gradient"),
    mutation("dk without the scale", "dk_sums[d / 8][e] * params.scale", "dk_sums[d / 8][e]"),
    mutation("the first queries are not visited", "max(first_k - bounds.upper,", "max(first_k - bounds.upper + 32,"),
    mutation("one head of a group", "member < params.group", "member < 1"),
    mutation(
        "threadgroups write the same dk",
        "dk + span_k.begin * params.dk_strides[0] + head_kv * params.dk_strides[1]",
        "dk + span_k.begin * params.dk_strides[0]",
    ),
    mutation("keys past the end are written", "if (key >= span_k.rows) {\n        return;\n    }", ""),
    mutation("stats are read past their end", "if (!there)", "if (false)"),
    mutation(
        "the gradient of the score_mod is left out",
        "slope = score_mod_gradient(raw, slope, place_of(at, params), captured);",
        "slope += raw * 0.0f;",
    ),
];

/// Faults of the forward kernel for few queries.
pub const VECTOR: &[Mutation] = &[
    mutation(
        "outputs of simdgroups are read before they are there",
        "exp_from(row_max[r], total_max), simdgroup, lane);\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "exp_from(row_max[r], total_max), simdgroup, lane);",
    ),
    mutation(
        "outputs replace some that are still read",
        "the outputs of the row before have been read.\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "the outputs of the row before have been read.",
    ),
    mutation("sums that are not cleared", "clear_row<LANE_V>(sums[r]);", ""),
    mutation("the output is not rescaled", "sums[r][i] *= shrink;", ""),
    mutation("outputs of simdgroups have maxima of their own", "exp_from(row_max[r], total_max), simdgroup", "1.0f, simdgroup"),
    mutation("simdgroups take one another's keys", "start < end; start += THREADS", "start < end; start += 32"),
    mutation("a score goes to the wrong lane", "int(lane) == j ? product", "int(lane) == j + 1 ? product"),
    mutation("heads of another key head", "head_kv * group + there / seq_q", "head_kv + there / seq_q"),
    mutation("rows past the last are read", "min(row, seq_q * group - 1)", "row"),
    mutation("elements past the dim are read", "at < DIM ? float(from[at * step]) : 0.0f", "float(from[at * step])"),
    mutation("elements past the dim are told", "if (at < DIM) {\n            rows[", "{\n            rows["),
    mutation("the mark of what is dropped counts as its weight", "if (!(weight < 0.0f)) {", "{"),
    mutation("every thread writes stats", "if (thread_index == 0) {\n#if WITH_STATS", "{\n#if WITH_STATS"),
    mutation("every lane tells its maximum", "if (lane == 0) {\n        UNROLL", "{\n        UNROLL"),
];

/// Faults of kernels that share the keys, and of the one that merges.
pub const PARTS: &[Mutation] = &[
    mutation(
        "outputs of parts have maxima of their own",
        "own_outputs[part * DIM_V + d] * exp_from(own_sums[part * 2], row_max)",
        "own_outputs[part * DIM_V + d]",
    ),
    mutation("the last part is left out", "part < PARTS; part++) {\n            sum", "part < PARTS - 1; part++) {\n            sum"),
    mutation("a part begins at the first key", "max(visited.x, part * part_keys)", "visited.x"),
    mutation("parts write the same place", "(place * PARTS + part) * DIM_V + d", "place * PARTS * DIM_V + d"),
    mutation("lanes past the last key of a part", "int(lane) < present && in_bounds", "in_bounds"),
    mutation("rows past the end are merged", "if (query >= span_q.rows) {\n        return;\n    }", ""),
];

/// Faults of the kernels of the backward pass for few queries.
pub const VECTOR_BACKWARD: &[Mutation] = &[
    mutation("delta is not written", "delta[place] = sum;", ""),
    mutation("every lane writes delta", "if (lane == 0) {\n        delta", "{\n        delta"),
    mutation("log-sum-exps are not written", "lse[place * 2] = known.x;", ""),
    mutation("the log-sum-exp of the first row", "row_most[r] = lse[place * 2];", "row_most[r] = lse[0];"),
    mutation(
        "sums of simdgroups are read before they are there",
        "params.scale, simdgroup, lane);\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "params.scale, simdgroup, lane);",
    ),
    mutation(
        "sums replace some that are still read",
        "have read the previous row.\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    mutation("dq without the scale", "sums[r], params.scale, simdgroup", "sums[r], 1.0f, simdgroup"),
    mutation("a slope goes to the wrong lane", "int(lane) == j ? slope", "int(lane) == j + 1 ? slope"),
    mutation("an accumulator that is not cleared", "clear_row<LANE_QK>(dk_sum);", ""),
    mutation("one batch of queries", "start < rows; start += 32", "start < min(rows, 32); start += 32"),
    mutation("keys past the end are written", "if (key_at >= span_k.rows) {\n        return;\n    }", ""),
    mutation("a query of the wrong lane", "int(lane) == j ? gradient", "int(lane) == j + 1 ? gradient"),
    mutation(
        "threadgroups write the same dk",
        "dk + span_k.begin * params.dk_strides[0] + head_kv * params.dk_strides[1]",
        "dk + span_k.begin * params.dk_strides[0]",
    ),
    mutation("elements past the dim are written", "if (at < DIM_QK) {\n            dk_row", "{\n            dk_row"),
];

/// Faults of the kernels for gradients of parameters.
pub const PARAMETER: &[Mutation] = &[
    mutation("sums that are not cleared", "sums[j] = float2(0.0f);", ""),
    mutation("one batch entry", "int(group.z) + 1 : params.batch", "int(group.z) + 1 : 1"),
    mutation(
        "queries replace some that are still read",
        "have read the previous queries.\n                threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    mutation(
        "keys replace some that are still read",
        "block and the queries are in threadgroup memory.\n                    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    mutation(
        "keys are read before they are there",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n                    float2 weights",
        "float2 weights",
    ),
    mutation("a column is summed with another's lanes", "x + simd_shuffle_xor(x, ushort(16))", "x + simd_shuffle_xor(x, ushort(8))"),
    mutation("keys past the end are written", "at < params.seq_kv && at_row < rows", "at_row < rows"),
    mutation("simdgroups leave their parts in the same place", "first_q / 8 + int(simdgroup)", "first_q / 8"),
    mutation("a block that is visited is left out", "start + PASSING <= visited.x", "start <= visited.x"),
    mutation("parts are left out", "part < n; part += 32", "part < n; part += 64"),
    mutation("parts of another element", "rest % params.spanned[axis] * params.strides[axis]", "rest % params.spanned[axis]"),
    mutation("every lane writes the sum", "if (lane == 0) {\n        gradient", "{\n        gradient"),
    mutation("elements past the last are written", "if (element >= params.elements) {\n        return;\n    }", ""),
];

/// Faults that show only where operands that are dropped are infinite or not numbers: of the kernels with tiles.
pub const ODD: &[Mutation] = &[
    mutation("odd numbers are multiplied by weights of 0", "if (any_odd(ODD_TOLD, own_odd)) {", "if (false) {"),
    mutation("infinities alone are odd", "(as_type<uint>(x) & 0x7f800000u)", "(as_type<uint>(x) & 0x7fffffffu)"),
    mutation("a weight of another column", "((column & 4) << 1) + ((column >> 1) & 1)", "((column & 4) << 1)"),
    mutation("what is dropped has a gradient", "gradient = kept ? slope : 0.0f;", "gradient = slope;"),
    mutation("a row that attends to nothing has weights", " && !(row.rest >= WITHOUT_KEYS)", ""),
];

/// The same of vector kernels.
pub const ODD_VECTOR: &[Mutation] = &[
    mutation("what is dropped is kept", "kept = kept && !(score < LOWEST);", "kept = !(score < LOWEST);"),
    mutation("what is dropped adds to dq", "if ((keeps >> r & 1u) != 0) {", "if (keeps != 0 || true) {"),
    mutation("what is dropped adds to dk and dv", "if (simd_shuffle(kept, ushort(j)) != 0) {", "if (simd_shuffle(kept, ushort(j)) != 2) {"),
];

/// A pair that a score_mod drops counts.
pub const ODD_SCORES: &[Mutation] = &[mutation("a score of minus infinity is kept", "kept = kept && !(score < LOWEST);", "")];

/// Scales other than the usual one.
pub const SCALES: &[Mutation] = &[mutation("dk has the usual scale", "dk_sum[i] * params.scale", "dk_sum[i] * 0.2236068f")];

/// Bands that end where blocks do.
pub const EDGES: &[Mutation] = &[
    mutation("a block counts as whole one key too early", "end_k - 1 - first_q <= bounds.upper", "end_k - 1 - first_q <= bounds.upper + 1"),
    mutation("a block counts as whole one key too late", "first_k - (end_q - 1) > bounds.lower", "first_k - (end_q - 1) >= bounds.lower"),
    mutation("a prefix counts as whole one key too early", "end_k <= bounds.prefix)", "end_k <= bounds.prefix + 1)"),
];

/// Windows about the ends of batch entries, of any kernel.
pub const ENDS: &[Mutation] = &[
    mutation("a band about the ends that no length moves", "further = bounds.keys - bounds.queries", "further = 0"),
    mutation("lengths of the other side", "further = bounds.keys - bounds.queries", "further = bounds.queries - bounds.keys"),
    mutation("a left side that is one key too far", "lower + further);", "lower + further - 1);"),
    mutation("a right side that is one key too far", "upper + further);", "upper + further + 1);"),
    mutation("the left side about the first ones is lost", "max(bounds.lower, lower + further)", "lower + further"),
    mutation("the right side about the first ones is lost", "min(bounds.upper, upper + further)", "upper + further"),
    mutation(
        "sides are swapped",
        "about_ends(LEFT, params.ends_lower, params.ends_upper)",
        "about_ends(LEFT, params.ends_upper, params.ends_lower)",
    ),
];

/// Dropout, of any kernel.
pub const DROPOUT: &[Mutation] = &[
    mutation("a round too few", "round < 7", "round < 6"),
    mutation("the key stays as it is", "key_low += 0x9e3779b9u;", ""),
    mutation("the upper half of the key stays as it is", "key_high += 0xbb67ae85u;", ""),
    mutation("multipliers are swapped", "ulong(0xd2511f53u) * counter.word[0]", "ulong(0xd2511f53u) * counter.word[2]"),
    mutation("the offset is left out", "ulong(DROPOUT_OFFSET) + 4", "4"),
    mutation("the upper half of the seed is left out", "uint(seed >> 32)", "0u"),
    mutation("every batch entry drops the same", "ulong(place.x) * ulong(heads) + ", ""),
    mutation("every head drops the same", "+ ulong(place.y);", ";"),
    mutation("keys of eight drop the same", "row * 8 + key % 8", "row * 8"),
    mutation("pairs of queries drop the same", "+ query % 8 / 2;", ";"),
    mutation(
        "squares count keys first",
        "key / 16 * ((uint(seq_q) + 15) / 16) + query / 16",
        "query / 16 * ((uint(seq_q) + 15) / 16) + key / 16",
    ),
    mutation("squares are not rounded up", "(uint(seq_q) + 15) / 16", "uint(seq_q) / 16"),
    mutation("the halves of a square are swapped", "key / 8 % 2 + query / 8 % 2 * 2", "query / 8 % 2 + key / 8 % 2 * 2"),
    mutation("the upper half of a word comes first", "query % 2 == 0 ? word & 0xffffu", "query % 2 == 1 ? word & 0xffffu"),
    mutation("the counter is cut off", "uint(n >> 34)", "0u"),
    mutation("nothing makes up for what is dropped", "as_type<float>(DROPOUT_SCALE)", "1.0f"),
];

/// The same of those of a backward pass.
pub const DROPOUT_BACKWARD: &[Mutation] = &[
    mutation("gradients of weights that were dropped", "gradient * left - row.delta", "gradient - row.delta"),
    mutation("values of weights that were dropped", "product = weight * left;", "product = weight;"),
    mutation("nothing of a row whose weight was dropped", "gradient * left - row.delta", "(gradient - row.delta) * left"),
];

/// Documents, of any kernel.
pub const PACKED: &[Mutation] = &[
    mutation("every document begins at the first token", "return Span{begin, int(", "return Span{0, int("),
    mutation("a document begins a token late", "return Span{begin, int(", "return Span{begin + 1, int("),
    mutation("the boundary behind the document is its first", "first = boundaries[document]", "first = boundaries[document + 1]"),
    mutation("the first token of the next document", "int(min(end - begin,", "int(min(end - begin + 1,"),
    mutation("all but the last token", "int(min(end - begin,", "int(min(max(end - begin - 1, 0L),"),
    mutation("boundaries of the other side", "span_of(cu_seqlens_kv, batch", "span_of(cu_seqlens_q, batch"),
    mutation("tokens of the other side", "params.tokens_kv, params.seq_kv)", "params.tokens_q, params.seq_kv)"),
    mutation("keys of the longest document", "#define KEYS_LEFT span_k.rows", "#define KEYS_LEFT max(span_k.rows, params.seq_kv)"),
    mutation("stats of the first document", "span_q.begin * params.stats_strides[0] + ", ""),
    mutation("stats in the place of a batch entry", "+ query * params.stats_strides[2]", "+ query"),
    mutation("queries where keys begin", "q + span_q.begin * params.q_strides[0]", "q + span_k.begin * params.q_strides[0]"),
];

/// The same of those of a forward pass.
pub const PACKED_FORWARD: &[Mutation] = &[
    mutation("outputs at the document's number", "o + span_q.begin * params.o_strides[0]", "o + batch * params.o_strides[0]"),
    mutation("keys and values where queries begin", "operand + span_k.begin * strides[0]", "operand + span_q.begin * strides[0]"),
];

/// Of the kernel with tiles.
pub const PACKED_TILED: &[Mutation] = &[
    mutation("rows past the document are written", "if (query >= span_q.rows) {", "if (query >= params.seq_q) {"),
    mutation("rows past the document are read", "min(first + OWN, span_q.rows) - 1", "min(first + OWN, params.seq_q) - 1"),
];

/// Of vector kernels of either pass.
pub const PACKED_VECTOR: &[Mutation] =
    &[mutation("a document of no queries", "if (first >= span_q.rows * params.group) {\n        return;\n    }", "")];

/// Of the kernel that merges.
pub const PACKED_PARTS: &[Mutation] = &[
    mutation("rows past the document are merged", "if (query >= span_q.rows) {", "if (query >= params.seq_q) {"),
    mutation("parts of the longest document", "(span_k.rows - 1) / PARTS + 1", "(span_k.rows - 2) / PARTS"),
];

/// Of a backward pass.
pub const PACKED_BACKWARD: &[Mutation] = &[
    mutation("keys where queries begin", "k + span_k.begin * params.k_strides[0]", "k + span_q.begin * params.k_strides[0]"),
    mutation("values where queries begin", "v + span_k.begin * params.v_strides[0]", "v + span_q.begin * params.v_strides[0]"),
    mutation("dq at the document's number", "dq + span_q.begin * params.dq_strides[0]", "dq + batch * params.dq_strides[0]"),
    mutation("dk where queries begin", "dk + span_k.begin * params.dk_strides[0]", "dk + span_q.begin * params.dk_strides[0]"),
    mutation("dv where queries begin", "dv + span_k.begin * params.dv_strides[0]", "dv + span_q.begin * params.dv_strides[0]"),
    mutation(
        "gradients of outputs at the document's number",
        "d_o + span_q.begin * params.d_o_strides[0]",
        "d_o + batch * params.d_o_strides[0]",
    ),
    mutation("outputs at the document's number", "o + span_q.begin * params.o_strides[0]", "o + batch * params.o_strides[0]"),
    mutation("queries of the longest document", "#define QUERIES_LEFT span_q.rows", "#define QUERIES_LEFT params.seq_q"),
];

/// Of a backward pass with tiles.
pub const PACKED_TILED_BACKWARD: &[Mutation] = &[
    mutation("keys past the document are written", "if (key >= span_k.rows) {", "if (key >= params.seq_kv) {"),
    mutation("rows past the document are written", "if (query >= span_q.rows) {", "if (query >= params.seq_q) {"),
];

/// Of one with vector kernels.
pub const PACKED_VECTOR_BACKWARD: &[Mutation] = &[
    mutation("keys past the document are written", "if (key_at >= span_k.rows) {", "if (key_at >= params.seq_kv) {"),
    mutation("queries past the document", "const int rows = span_q.rows * params.group;", "const int rows = params.seq_q * params.group;"),
];

/// What boundaries may hold that nobody has looked at.
pub const BOUNDARIES: &[Mutation] = &[
    mutation("a document before the first token", "clamp(first, 0L, tokens)", "min(first, tokens)"),
    mutation("a document that begins behind the last token", "clamp(first, 0L, tokens)", "max(first, 0L)"),
    mutation("a document that ends behind the last token", "clamp(last, begin, tokens)", "max(last, begin)"),
    mutation("a document that ends before it begins", "clamp(last, begin, tokens)", "min(last, tokens)"),
    mutation("a document that is longer than the longest", "min(end - begin, long(longest))", "end - begin"),
];

/// Lengths that are more than there is.
pub const PAST: &[Mutation] = &[
    mutation("more keys than there are", "clamp(seq_len_kv[batch], 0, span_k.rows)", "max(seq_len_kv[batch], 0)"),
    mutation("more queries than there are", "clamp(seq_len_q[batch], 0, span_q.rows)", "max(seq_len_q[batch], 0)"),
];

/// More keys than parts of a usual length.
pub const LONG: &[Mutation] = &[mutation("parts of 512 keys", "(span_k.rows - 1) / PARTS + 1", "512")];

/// Results that are cut off and not rounded; of kernels with tiles.
pub const CUT: &[Mutation] = &[
    mutation(
        "o is cut off",
        "Element(sums[d / 8][e] * inverse)",
        "Element(as_type<float>(as_type<uint>(sums[d / 8][e] * inverse) & 0xffff0000u))",
    ),
    mutation("dv is cut off", "Element(dv_sums[d / 8][e])", "Element(as_type<float>(as_type<uint>(dv_sums[d / 8][e]) & 0xffff0000u))"),
    mutation(
        "dq is cut off",
        "Element(sums[d / 8][e] * params.scale)",
        "Element(as_type<float>(as_type<uint>(sums[d / 8][e] * params.scale) & 0xffff0000u))",
    ),
];

/// The same of vector kernels.
pub const CUT_VECTOR: &[Mutation] = &[
    mutation(
        "o is cut off",
        "Element(total_at<DIM_V>(simd_outputs, d) * inverse)",
        "Element(as_type<float>(as_type<uint>(total_at<DIM_V>(simd_outputs, d) * inverse) & 0xffff0000u))",
    ),
    mutation("dv is cut off", "Element(dv_sum[i])", "Element(as_type<float>(as_type<uint>(dv_sum[i]) & 0xffff0000u))"),
    mutation(
        "dq is cut off",
        "Element(total_at<DIM_QK>(simd_outputs, d))",
        "Element(as_type<float>(as_type<uint>(total_at<DIM_QK>(simd_outputs, d)) & 0xffff0000u))",
    ),
];

/// The same of the kernel that merges.
pub const CUT_PARTS: &[Mutation] =
    &[mutation("o is cut off", "Element(sum * inverse)", "Element(as_type<float>(as_type<uint>(sum * inverse) & 0xffff0000u))")];

/// Sinks in the wrong place: of the kernel with tiles.
pub const SINK: &[Mutation] = &[
    mutation("the sink of another head", "sinks[head]", "sinks[head_kv]"),
    mutation("a sink in another unit than scores", "exp_from(sink, largest);", "exp2(sink - largest);"),
    mutation("outputs keep the maximum without the sink", "shrink * inverse_of(row_sum)", "max(shrink, 1.0f) * inverse_of(row_sum)"),
    mutation("a maximum without the sink", "const float largest = max(row_max, sink);", "const float largest = row_max;"),
    mutation(
        "a sink for each block of keys",
        "row_sum = row_sum * shrink + row_total(block_sum);",
        "row_sum = row_sum * shrink + row_total(block_sum) + exp_from(sinks[head], row_max);",
    ),
];

/// The same of the vector kernel.
pub const SINK_VECTOR: &[Mutation] = &[
    mutation("the sink of another head", "sinks[query_at(first + r, head_kv, span_q.rows, params.group).head]", "sinks[head_kv]"),
    mutation("no sink", "add_sink(total_max, total, ", "max(total, "),
    mutation(
        "a sink for each simdgroup",
        "total += simd_sums[",
        "total += exp_from(sinks[query_at(first + r, head_kv, span_q.rows, params.group).head], total_max) + simd_sums[",
    ),
];

/// The same of the kernel that merges.
pub const SINK_PARTS: &[Mutation] = &[
    mutation("the sink of another head", "sinks[head]", "sinks[head / params.group]"),
    mutation(
        "a sink for each part",
        "    add_sink(row_max, row_sum, sinks[head]);",
        "    for (int part = 0; part < PARTS; part++) {\n        add_sink(row_max, row_sum, sinks[head]);\n    }",
    ),
    mutation(
        "outputs keep the maximum without the sink",
        "    add_sink(row_max, row_sum, sinks[head]);",
        "    float other_max = row_max;\n    add_sink(other_max, row_sum, sinks[head]);",
    ),
];

/// Faults of keys and values in pages.
pub const PAGES: &[Mutation] = &[
    mutation("the page of another key", "rows.pages[key / PAGE_TOKENS]", "rows.pages[key / PAGE_TOKENS * 0]"),
    mutation("another token of the page", "key % PAGE_TOKENS * rows.stride", "key % (PAGE_TOKENS - 1) * rows.stride"),
    mutation("pages one row apart", "page * rows.page", "page * rows.stride"),
    mutation("the pages of the first entry", "long(batch) * PAGES_OF_ENTRY", "0L"),
    mutation(
        "heads of another key head",
        "KeyRows{operand + head_kv * strides[1], strides[2], page_table",
        "KeyRows{operand + head_kv / 2 * strides[1], strides[2], page_table",
    ),
];

/// Faults of page tables that hold anything.
pub const TABLES: &[Mutation] = &[
    mutation("a page before the first", "rows.pages[key / PAGE_TOKENS], 0, PAGES - 1)", "rows.pages[key / PAGE_TOKENS], -1, PAGES - 1)"),
    mutation("a page behind the last", "rows.pages[key / PAGE_TOKENS], 0, PAGES - 1)", "rows.pages[key / PAGE_TOKENS], 0, PAGES)"),
];

/// Faults of row maxima and sums of exponentials.
pub const STATISTICS: &[Mutation] = &[
    mutation("a maximum in powers of two", "row_sum : row_max;", "row_sum : row_max * LOG2_E;"),
    mutation(
        "the maximum of a row without keys is a number",
        "as_type<float>(0xff800000u);\n    }\n    return is_odd",
        "LOWEST;\n    }\n    return is_odd",
    ),
];

/// The same of the kernels that finish rows, each by itself.
pub const STATISTICS_TILED: &[Mutation] = &[
    mutation("the sum in place of the maximum", "row_maxima[place] = row_max_of(row_max, row_sum);", "row_maxima[place] = row_sum;"),
    mutation("the logarithm of the sum", "row_sums[place] = row_sum;", "row_sums[place] = log2(row_sum);"),
];

/// The same of the vector kernel.
pub const STATISTICS_VECTOR: &[Mutation] = &[
    mutation("the maximum of one simdgroup", "row_max_of(total_max, total)", "row_max_of(row_max[r], total)"),
    mutation("the sum of one simdgroup", "row_sums[place] = total;", "row_sums[place] = row_sum[r];"),
];

/// The same of the kernel that merges.
pub const STATISTICS_PARTS: &[Mutation] = &[
    mutation("the maximum of the first part", "row_max_of(row_max, row_sum)", "row_max_of(own_sums[0], row_sum)"),
    mutation("the sum of the first part", "row_sums[place] = row_sum;", "row_sums[place] = own_sums[1];"),
];

/// Faults of rows with scores that are no numbers.
pub const STATISTICS_ODD: &[Mutation] = &[mutation("a maximum passes NaN over", "is_odd(row_sum) ? row_sum : row_max", "row_max")];

/// Faults of the kernel for the gradient of sinks.
pub const SINK_GRADIENT: &[Mutation] = &[
    mutation("one batch entry", "const long rows = long(params.batch) * params.seq_q;", "const long rows = params.seq_q;"),
    mutation("rows of the first simdgroup", "total += simd_sums[s];", "total += simd_sums[0];"),
    mutation("the wrong sign", "Gradient(-total)", "Gradient(total)"),
    mutation(
        "a weight in another unit than stats",
        "exp2((sink - lse[place * 2]) * LOG2_E - lse[place * 2 + 1])",
        "exp2(sink - lse[place * 2] - lse[place * 2 + 1])",
    ),
    mutation("the sink of another head", "sinks[head]", "sinks[head / params.group]"),
    mutation("rows that the band leaves no key", "visited.x >= visited.y ||", "visited.x > visited.y ||"),
    mutation("rows that stats leave no key", "visited.y || lse[place * 2 + 1] >= WITHOUT_KEYS) {", "visited.y) {"),
    mutation("rows without an output", "is_odd(its_delta) && is_zeros(", "is_odd(its_delta) && !is_zeros("),
    mutation("every odd row is left out", "is_odd(its_delta) && is_zeros(", "is_odd(its_delta) || is_zeros("),
    mutation(
        "sums are read before they are there",
        "simd_sums[simdgroup] = sum;\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "simd_sums[simdgroup] = sum;\n    }",
    ),
    mutation("every lane tells its sum", "if (lane == 0) {\n        simd_sums", "{\n        simd_sums"),
    mutation("every thread writes the gradient", "if (thread_index == 0) {\n        float total", "{\n        float total"),
];

/// Faults that show only where scores are very low or very high, in any kernel.
pub const LARGE: &[Mutation] = &[
    mutation("scores are scaled before they are subtracted", "exp2((score - from) * LOG2_E)", "exp2(score * LOG2_E - from * LOG2_E)"),
    mutation(
        "a sink is scaled before it is subtracted",
        "const float shrink = exp_from(row_max, largest);",
        "const float shrink = exp2(row_max * LOG2_E - largest * LOG2_E);",
    ),
    mutation("scores below -1e38 are masked out", "!(score < LOWEST)", "!(score < -1e38f)"),
    mutation("one float for the log-sum-exp", "known = nearest_to(stat, row_max, row_sum);", "known = lse_of_stat(stat);"),
    mutation("the caller's statistic is never read", "abs(stat) * 1.1920928955078125e-7f", "3e38f"),
    mutation("a statistic eight units off is taken for rounding", "1.1920928955078125e-7f", "9.5367431640625e-7f"),
    mutation("high statistics alone are computed again", "abs(stat) >= LARGE_STAT", "stat >= LARGE_STAT"),
    mutation(
        "the exponent in one rounding",
        "(product - row.most) * LOG2_E - row.rest",
        "product * LOG2_E - (row.most * LOG2_E + row.rest)",
    ),
    mutation("a sum without the sink", "add_sink(row_max, row_sum, sinks[head]);\n#endif\n        known", "\n#endif\n        known"),
    mutation(
        "a sum over keys that are masked out",
        "(kept ? exp_from(score, largest) : 0.0f);\n            row_max",
        "(kept || true ? exp_from(score, largest) : 0.0f);\n            row_max",
    ),
    mutation(
        "a sum over the key after the last",
        "key < visited.y; key += 32) {\n            const device Element* k_row",
        "key <= visited.y; key += 32) {\n            const device Element* k_row",
    ),
    mutation(
        "a sum over the first key head",
        "head_kv * params.k_strides[1];\n        float row_max",
        "head_kv * 0 * params.k_strides[1];\n        float row_max",
    ),
    mutation(
        "a sum over the keys of the first entry",
        "k + span_k.begin * params.k_strides[0] + head_kv * params.k_strides[1];\n        float row_max",
        "k + head_kv * params.k_strides[1];\n        float row_max",
    ),
    mutation("a masked key raises the maximum", "product = kept ? score : LOWEST;", "product = score;"),
    mutation("lanes keep maxima of their own", "simd_sum(row_sum * exp_from(row_max, largest))", "simd_sum(row_sum)"),
];

/// The same of the kernels with tiles.
pub const LARGE_TILED: &[Mutation] = &[mutation(
    "keys that are masked out count in rows of the lowest scores",
    "(kept >> (j * 2 + e) & 1u) != 0 ? exp_from(scores[j][e], row_max) : 0.0f",
    "exp_from(scores[j][e], row_max)",
)];

/// The same of vector kernels.
pub const LARGE_VECTOR: &[Mutation] = &[
    mutation(
        "keys that are masked out count in rows of the lowest scores",
        "kept ? exp_from(score, batch_max) : 0.0f",
        "exp_from(score, batch_max)",
    ),
    mutation(
        "maxima of simdgroups are scaled",
        "exp_from(row_max[r], total_max), simdgroup",
        "exp2(row_max[r] * LOG2_E - total_max * LOG2_E), simdgroup",
    ),
];

/// The same of the kernel that merges.
pub const LARGE_PARTS: &[Mutation] = &[mutation(
    "maxima of parts are scaled",
    "own_sums[part * 2 + 1] * exp_from(own_sums[part * 2], row_max)",
    "own_sums[part * 2 + 1] * exp2(own_sums[part * 2] * LOG2_E - row_max * LOG2_E)",
)];

/// The same of the kernel for the gradient of sinks.
pub const LARGE_SINK: &[Mutation] =
    &[mutation("a sink next to a maximum without the sum", "* LOG2_E - lse[place * 2 + 1])) * its_delta", "* LOG2_E)) * its_delta")];
