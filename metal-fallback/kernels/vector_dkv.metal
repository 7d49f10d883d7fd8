// dK and dV for few queries. A simdgroup owns one key and iterates over the queries of its GQA group in batches of 32; to compute P and
// dS, each lane has one query of a batch.

kernel void attention_vector_dkv(
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
    device Element* dk [[buffer(10)]],
    device Element* dv [[buffer(11)]],
    CAPTURED_TENSORS
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head_kv = int(group.y);
    const int batch = int(group.z);
    const int key_at = int(group.x) * (THREADS / 32) + int(simdgroup);
    const Span span_q = QUERY_SPAN;
    const Span span_k = KEY_SPAN;
    if (key_at >= span_k.rows) {
        return;
    }
    const Bounds bounds = BOUNDS;
    const device Element* q_rows = q + span_q.begin * params.q_strides[0];
    const device Element* d_o_rows = d_o + span_q.begin * params.d_o_strides[0];
    float key[LANE_QK];
    float value[LANE_V];
    float dk_sum[LANE_QK];
    float dv_sum[LANE_V];
    load_row<DIM_QK, LANE_QK>(
        key, k + span_k.begin * params.k_strides[0] + head_kv * params.k_strides[1] + key_at * params.k_strides[2], 1, lane);
    load_row<DIM_V, LANE_V>(
        value, v + span_k.begin * params.v_strides[0] + head_kv * params.v_strides[1] + key_at * params.v_strides[2], 1, lane);
    clear_row<LANE_QK>(dk_sum);
    clear_row<LANE_V>(dv_sum);

    const int rows = span_q.rows * params.group;
    for (int start = 0; start < rows; start += 32) {
        const int present = min(32, rows - start);
        float weight = 0.0f;
        float slope = 0.0f;
        for (int j = 0; j < present; j++) {
            const Query its = query_at(start + j, head_kv, span_q.rows, params.group);
            if (in_bounds(bounds, its.query, key_at)) {
                float query[LANE_QK];
                float d_output[LANE_V];
                load_row<DIM_QK, LANE_QK>(query, q_rows + its.head * params.q_strides[1] + its.query * params.q_strides[2], 1, lane);
                load_row<DIM_V, LANE_V>(
                    d_output, d_o_rows + its.head * params.d_o_strides[1] + its.query * params.d_o_strides[2], params.d_o_strides[3],
                    lane);
                const float product = product_of<LANE_QK>(query, key);
                const float gradient = product_of<LANE_V>(d_output, value);
                weight = int(lane) == j ? product : weight;
                slope = int(lane) == j ? gradient : slope;
            }
        }
        const Query own = query_at(start + int(lane), head_kv, span_q.rows, params.group);
        const bool there = int(lane) < present && in_bounds(bounds, own.query, key_at);
        const Row known = row_of(lse, delta, stats_place(params, span_q, own.head, own.query), there);
        const uint kept =
            uint(to_weight(weight, slope, known, there, int4(batch, own.head, own.query, key_at), params, CAPTURED));
        for (int j = 0; j < present; j++) {
            const Query its = query_at(start + j, head_kv, span_q.rows, params.group);
            const float its_weight = simd_shuffle(weight, ushort(j));
            const float its_slope = simd_shuffle(slope, ushort(j));
            // A masked-out pair adds nothing, even if its operands are NaN.
            if (simd_shuffle(kept, ushort(j)) != 0) {
                float query[LANE_QK];
                float d_output[LANE_V];
                load_row<DIM_QK, LANE_QK>(query, q_rows + its.head * params.q_strides[1] + its.query * params.q_strides[2], 1, lane);
                load_row<DIM_V, LANE_V>(
                    d_output, d_o_rows + its.head * params.d_o_strides[1] + its.query * params.d_o_strides[2], params.d_o_strides[3],
                    lane);
                add_row<LANE_QK>(dk_sum, its_slope, query);
                add_row<LANE_V>(dv_sum, its_weight, d_output);
            }
        }
    }

    device Element* dk_row = dk + span_k.begin * params.dk_strides[0] + head_kv * params.dk_strides[1] + key_at * params.dk_strides[2];
    device Element* dv_row = dv + span_k.begin * params.dv_strides[0] + head_kv * params.dv_strides[1] + key_at * params.dv_strides[2];
    UNROLL for (int i = 0; i < LANE_QK; i++) {
        const int at = i * 32 + int(lane);
        if (at < DIM_QK) {
            dk_row[at] = Element(dk_sum[i] * params.scale);
        }
    }
    UNROLL for (int i = 0; i < LANE_V; i++) {
        const int at = i * 32 + int(lane);
        if (at < DIM_V) {
            dv_row[at] = Element(dv_sum[i]);
        }
    }
}
