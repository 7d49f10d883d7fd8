// Computes the gradient of a declared parameter: for each element, the sum over all (query, key) pairs that read it. A threadgroup
// processes OWN queries at a time, eight per simdgroup, and PASSING keys.
//
// Threadgroups divide the axes that the parameter spans (SPANS_...) and sum over the others. A threadgroup iterates over keys that are
// not spanned; if keys are spanned, over queries that are not. With queries and keys spanned (WHOLE), it iterates over heads and batch
// entries that are not, so that its sums are final. Otherwise they are partial sums, which sum.metal adds up.

#define BLOCKS_Q ((params.seq_q - 1) / OWN + 1)

#if WHOLE
typedef Gradient Part;
#else
typedef float Part;
#endif

kernel void attention_parameter(
    const device Element* q [[buffer(0)]],
    const device Element* k [[buffer(1)]],
    const device Element* v [[buffer(2)]],
    const device Element* d_o [[buffer(3)]],
    constant BackwardParams& params [[buffer(4)]],
    const device float* lse [[buffer(5)]],
    QUERY_SPAN_ARGUMENT
    KEY_SPAN_ARGUMENT
    SEQ_LEN_Q_ARGUMENT
    SEQ_LEN_KV_ARGUMENT
    CAPTURED_SCALARS
    const device float* delta [[buffer(9)]],
    device Part* parts [[buffer(10)]],
    CAPTURED_TENSORS
    threadgroup Element* q_tile [[threadgroup(0)]],
    threadgroup Element* d_o_tile [[threadgroup(1)]],
    threadgroup Element* k_tile [[threadgroup(2)]],
    threadgroup Element* v_tile [[threadgroup(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int row = fragment_row(lane);
    const int column = fragment_column(lane);
    const int own = int(simdgroup) * 8 + row;
#if WHOLE
    const int first_head = SPANS_HEAD ? int(group.y) : 0;
    const int end_head = SPANS_HEAD ? int(group.y) + 1 : params.heads_q;
    const int first_batch = SPANS_BATCH ? int(group.z) : 0;
    const int end_batch = SPANS_BATCH ? int(group.z) + 1 : params.batch;
#else
    const int first_head = int(group.y);
    const int end_head = first_head + 1;
    const int first_batch = int(group.z);
    const int end_batch = first_batch + 1;
#endif
    // If keys are spanned, group.x counts blocks of keys. If queries are spanned too, it counts pairs of a block of keys and a block of queries.
#if SPANS_KEY
    const int first_k = (SPANS_QUERY ? int(group.x) / BLOCKS_Q : int(group.x)) * PASSING;
    const int end_k = first_k + 1;
    const int first_q = SPANS_QUERY ? int(group.x) % BLOCKS_Q * OWN : 0;
    const int end_q = SPANS_QUERY ? first_q + 1 : params.seq_q;
#else
    const int first_k = 0;
    const int end_k = params.seq_kv;
    const int first_q = int(group.x) * OWN;
    const int end_q = first_q + 1;
#endif

    float2 sums[PASSING / 8];
    for (int j = 0; j < PASSING / 8; j++) {
        sums[j] = float2(0.0f);
    }
    for (int batch = first_batch; batch < end_batch; batch++) {
        const Span span_q = QUERY_SPAN;
        const Span span_k = KEY_SPAN;
        const Bounds bounds = BOUNDS;
        for (int head = first_head; head < end_head; head++) {
            const int head_kv = head / params.group;
            const device Element* k_rows = k + span_k.begin * params.k_strides[0] + head_kv * params.k_strides[1];
            const device Element* v_rows = v + span_k.begin * params.v_strides[0] + head_kv * params.v_strides[1];
            for (int from = first_q; from < end_q; from += OWN) {
                const int2 visited = keys_of(bounds, from, min(from + OWN, span_q.rows));
                const int query = from + own;
                const Row known =
                    row_of(lse, delta, stats_place(params, span_q, head, query), query < bounds.queries);
                const device Element* q_rows =
                    q + span_q.begin * params.q_strides[0] + head * params.q_strides[1] + from * params.q_strides[2];
                const device Element* d_o_rows =
                    d_o + span_q.begin * params.d_o_strides[0] + head * params.d_o_strides[1] + from * params.d_o_strides[2];
                // Before the next Q and dO are loaded into the tiles, wait until all threads have read the previous queries.
                threadgroup_barrier(mem_flags::mem_threadgroup);
                load_tile<OWN, DIM_QK, PADDED_QK, PITCH_QK>(
                    q_tile, q_rows, params.q_strides[2], 1, bounds.queries - from, int(thread_index));
                load_tile<OWN, DIM_V, PADDED_V, PITCH_V>(
                    d_o_tile, d_o_rows, params.d_o_strides[2], params.d_o_strides[3], bounds.queries - from, int(thread_index));
                for (int start = first_k; start < end_k; start += PASSING) {
                    if (start >= visited.y || start + PASSING <= visited.x) {
                        continue;
                    }
                    const int present = bounds.keys - start;
                    // Before the next block of K and V is loaded into the tiles, wait until all threads have read the previous block and the queries are in threadgroup memory.
                    threadgroup_barrier(mem_flags::mem_threadgroup);
                    load_tile<PASSING, DIM_QK, PADDED_QK, PITCH_QK>(
                        k_tile, k_rows + start * params.k_strides[2], params.k_strides[2], 1, present, int(thread_index));
                    load_tile<PASSING, DIM_V, PADDED_V, PITCH_V>(
                        v_tile, v_rows + start * params.v_strides[2], params.v_strides[2], 1, present, int(thread_index));
                    threadgroup_barrier(mem_flags::mem_threadgroup);

                    float2 weights[PASSING / 8];
                    float2 slopes[PASSING / 8];
                    for (int j = 0; j < PASSING / 8; j++) {
                        weights[j] = float2(0.0f);
                        slopes[j] = float2(0.0f);
                    }
                    multiply_transposed<PADDED_QK, PASSING, PITCH_QK>(
                        weights, q_tile + own * PITCH_QK + column, k_tile + column * PITCH_QK + row);
                    multiply_transposed<PADDED_V, PASSING, PITCH_V>(
                        slopes, d_o_tile + own * PITCH_V + column, v_tile + column * PITCH_V + row);
                    UNROLL for (int j = 0; j < PASSING / 8; j++) {
                        UNROLL for (int e = 0; e < 2; e++) {
                            const int key = start + j * 8 + column + e;
                            float weight = weights[j][e];
                            float slope = slopes[j][e];
                            to_weight(
                                weight, slope, known, in_bounds(bounds, query, key), int4(batch, head, query, key), params,
                                CAPTURED);
                            sums[j][e] += slope;
                        }
                    }
                }
            }
        }
    }

#if WHOLE
    const int n_heads = SPANS_HEAD ? params.heads_q : 1;
    const long table = long(SPANS_BATCH ? first_batch : 0) * n_heads + (SPANS_HEAD ? first_head : 0);
#else
    const long table = long(first_batch) * params.heads_q + first_head;
#endif
#if SPANS_QUERY
    const int rows = params.seq_q;
    const int at_row = first_q + own;
#else
    // Queries are not spanned: each simdgroup sums over its eight rows and stores one row of partial sums.
    const int rows = SPANS_KEY ? OWN / 8 : BLOCKS_Q * (OWN / 8);
    const int at_row = first_q / 8 + int(simdgroup);
#endif
#if SPANS_KEY
    UNROLL for (int j = 0; j < PASSING / 8; j++) {
        UNROLL for (int e = 0; e < 2; e++) {
            const int at = first_k + j * 8 + column + e;
            const float sum = SPANS_QUERY ? sums[j][e] : column_total(sums[j][e]);
            if (at < params.seq_kv && at_row < rows && (SPANS_QUERY || row == 0)) {
                parts[(table * rows + at_row) * params.seq_kv + at] = Part(sum);
            }
        }
    }
#else
    float sum = 0.0f;
    UNROLL for (int j = 0; j < PASSING / 8; j++) {
        sum += sums[j][0] + sums[j][1];
    }
    sum = row_total(sum);
    sum = SPANS_QUERY ? sum : column_total(sum);
    if (at_row < rows && column == 0 && (SPANS_QUERY || row == 0)) {
        parts[table * rows + at_row] = Part(sum);
    }
#endif
}
