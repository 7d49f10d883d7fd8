// dQ for few queries. Queries and keys are divided among threadgroups and simdgroups as in vector.metal.

kernel void attention_vector_dq(
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
    threadgroup float* simd_outputs [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head_kv = int(group.y);
    const int batch = int(group.z);
    const int first = int(group.x) * ROWS;
    const Span span_q = QUERY_SPAN;
    const Span span_k = KEY_SPAN;
    // These rows are past the end of a packed sequence, which is shorter than the longest: nothing is read or written for them.
    if (first >= span_q.rows * params.group) {
        return;
    }
    const Bounds bounds = BOUNDS;
    const int2 visited = keys_of(bounds, 0, span_q.rows);

    const device Element* k_rows = k + span_k.begin * params.k_strides[0] + head_kv * params.k_strides[1];
    const device Element* v_rows = v + span_k.begin * params.v_strides[0] + head_kv * params.v_strides[1];
    float queries[ROWS][LANE_QK];
    float d_outputs[ROWS][LANE_V];
    float sums[ROWS][LANE_QK];
    float row_most[ROWS];
    float row_rest[ROWS];
    float row_delta[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        const Query own = query_at(first + r, head_kv, span_q.rows, params.group);
        const long place = stats_place(params, span_q, own.head, own.query);
        load_row<DIM_QK, LANE_QK>(
            queries[r], q + span_q.begin * params.q_strides[0] + own.head * params.q_strides[1] + own.query * params.q_strides[2], 1,
            lane);
        load_row<DIM_V, LANE_V>(
            d_outputs[r],
            d_o + span_q.begin * params.d_o_strides[0] + own.head * params.d_o_strides[1] + own.query * params.d_o_strides[2],
            params.d_o_strides[3], lane);
        clear_row<LANE_QK>(sums[r]);
        row_most[r] = lse[place * 2];
        row_rest[r] = lse[place * 2 + 1];
        row_delta[r] = delta[place];
    }

    for (int start = visited.x + int(simdgroup) * 32; start < visited.y; start += THREADS) {
        const int present = min(32, visited.y - start);
        float slopes[ROWS];
        float products[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) {
            products[r] = 0.0f;
            slopes[r] = 0.0f;
        }
        for (int j = 0; j < present; j++) {
            float key[LANE_QK];
            float value[LANE_V];
            load_row<DIM_QK, LANE_QK>(key, k_rows + (start + j) * params.k_strides[2], 1, lane);
            load_row<DIM_V, LANE_V>(value, v_rows + (start + j) * params.v_strides[2], 1, lane);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const float product = product_of<LANE_QK>(queries[r], key);
                const float slope = product_of<LANE_V>(d_outputs[r], value);
                products[r] = int(lane) == j ? product : products[r];
                slopes[r] = int(lane) == j ? slope : slopes[r];
            }
        }
        const int key_at = start + int(lane);
        uint kept = 0;
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Query own = query_at(first + r, head_kv, span_q.rows, params.group);
            const bool there = int(lane) < present && in_bounds(bounds, own.query, key_at);
            const Row known = {row_most[r], row_rest[r], row_delta[r]};
            const bool counts =
                to_weight(products[r], slopes[r], known, there, int4(batch, own.head, own.query, key_at), params, CAPTURED);
            kept |= uint(counts) << r;
        }
        for (int j = 0; j < present; j++) {
            float key[LANE_QK];
            load_row<DIM_QK, LANE_QK>(key, k_rows + (start + j) * params.k_strides[2], 1, lane);
            const uint keeps = simd_shuffle(kept, ushort(j));
            UNROLL for (int r = 0; r < ROWS; r++) {
                const float slope = simd_shuffle(slopes[r], ushort(j));
                if ((keeps >> r & 1u) != 0) {
                    add_row<LANE_QK>(sums[r], slope, key);
                }
            }
        }
    }

    UNROLL for (int r = 0; r < ROWS; r++) {
        // Before the next row is stored in simd_outputs, wait until all threads have read the previous row.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tell_row<DIM_QK, LANE_QK>(simd_outputs, sums[r], params.scale, simdgroup, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (first + r < span_q.rows * params.group) {
            const Query own = query_at(first + r, head_kv, span_q.rows, params.group);
            device Element* out =
                dq + span_q.begin * params.dq_strides[0] + own.head * params.dq_strides[1] + own.query * params.dq_strides[2];
            for (int d = int(thread_index); d < DIM_QK; d += THREADS) {
                out[d] = Element(total_at<DIM_QK>(simd_outputs, d));
            }
        }
    }
}
