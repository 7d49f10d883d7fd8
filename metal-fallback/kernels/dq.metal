// Computes dQ. A threadgroup has OWN queries of one head, eight per simdgroup. It iterates over blocks of PASSING keys and values.

kernel void attention_dq(
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
    device Element* dq [[buffer(10)]],
    CAPTURED_TENSORS
    threadgroup Element* q_tile [[threadgroup(0)]],
    threadgroup Element* d_o_tile [[threadgroup(1)]],
    threadgroup Element* k_tile [[threadgroup(2)]],
    threadgroup Element* v_tile [[threadgroup(3)]],
    ODD_ARGUMENT(4)
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head = int(group.y);
    const int batch = int(group.z);
    const int head_kv = head / params.group;
    const int first = int(group.x) * OWN;
    const Span span_q = QUERY_SPAN;
    const Span span_k = KEY_SPAN;
    const Bounds bounds = BOUNDS;
    const int2 visited = keys_of(bounds, first, min(first + OWN, span_q.rows));

    const int row = fragment_row(lane);
    const int column = fragment_column(lane);
    const int own = int(simdgroup) * 8 + row;
    const int query = first + own;
    const Row known = row_of(lse, delta, stats_place(params, span_q, head, query), query < bounds.queries);

    const device Element* q_rows = q + span_q.begin * params.q_strides[0] + head * params.q_strides[1] + first * params.q_strides[2];
    const device Element* d_o_rows =
        d_o + span_q.begin * params.d_o_strides[0] + head * params.d_o_strides[1] + first * params.d_o_strides[2];
    const device Element* k_rows = k + span_k.begin * params.k_strides[0] + head_kv * params.k_strides[1];
    const device Element* v_rows = v + span_k.begin * params.v_strides[0] + head_kv * params.v_strides[1];
    const int left = bounds.queries - first;
    load_tile<OWN, DIM_QK, PADDED_QK, PITCH_QK>(q_tile, q_rows, params.q_strides[2], 1, left, int(thread_index));
    load_tile<OWN, DIM_V, PADDED_V, PITCH_V>(
        d_o_tile, d_o_rows, params.d_o_strides[2], params.d_o_strides[3], left, int(thread_index));

    float2 sums[PADDED_QK / 8];
    for (int d = 0; d < PADDED_QK / 8; d++) {
        sums[d] = float2(0.0f);
    }
    for (int start = visited.x - visited.x % PASSING; start < visited.y; start += PASSING) {
        const int present = bounds.keys - start;
        // Before the next block of K and V is loaded into the tiles, wait until all threads have read the previous block and the queries are in threadgroup memory.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bool own_odd = load_tile<PASSING, DIM_QK, PADDED_QK, PITCH_QK>(
            k_tile, k_rows + start * params.k_strides[2], params.k_strides[2], 1, present, int(thread_index));
        load_tile<PASSING, DIM_V, PADDED_V, PITCH_V>(
            v_tile, v_rows + start * params.v_strides[2], params.v_strides[2], 1, present, int(thread_index));
        tell_odd(ODD_TOLD, own_odd, simdgroup, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        float2 weights[PASSING / 8];
        float2 slopes[PASSING / 8];
        for (int j = 0; j < PASSING / 8; j++) {
            weights[j] = float2(0.0f);
            slopes[j] = float2(0.0f);
        }
        multiply_transposed<PADDED_QK, PASSING, PITCH_QK>(
            weights, q_tile + own * PITCH_QK + column, k_tile + column * PITCH_QK + row);
        multiply_transposed<PADDED_V, PASSING, PITCH_V>(slopes, d_o_tile + own * PITCH_V + column, v_tile + column * PITCH_V + row);
        const bool whole = all_in_bounds(bounds, first, first + OWN, start, start + PASSING);
        uint kept = 0;
        UNROLL for (int j = 0; j < PASSING / 8; j++) {
            UNROLL for (int e = 0; e < 2; e++) {
                const int key = start + j * 8 + column + e;
                float weight = weights[j][e];
                float slope = slopes[j][e];
                const bool counts = to_weight(
                    weight, slope, known, whole || in_bounds(bounds, query, key), int4(batch, head, query, key), params,
                    CAPTURED);
                slopes[j][e] = slope;
                kept |= uint(counts) << (j * 2 + e);
            }
        }
        if (any_odd(ODD_TOLD, own_odd)) {
            add_kept_products<PADDED_QK, PADDED_QK, PITCH_QK>(sums, slopes, kept, k_tile, 0, row, column);
        } else {
            add_products<PADDED_QK, PADDED_QK, PITCH_QK>(sums, slopes, k_tile, 0, row, column);
        }
    }

    if (query >= span_q.rows) {
        return;
    }
    device Element* out = dq + span_q.begin * params.dq_strides[0] + head * params.dq_strides[1] + query * params.dq_strides[2];
    for (int d = 0; d < PADDED_QK; d += 8) {
        for (int e = 0; e < 2; e++) {
            if (d + column + e < DIM_QK) {
                out[d + column + e] = Element(sums[d / 8][e] * params.scale);
            }
        }
    }
}
