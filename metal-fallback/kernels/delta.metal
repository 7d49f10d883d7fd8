// Preprocess of the backward pass: computes for each row delta = sum of o * dO, which dS = P * (dP - delta) needs, and the exact
// log-sum-exp. One simdgroup per row.

kernel void attention_delta(
    const device Element* q [[buffer(0)]],
    const device Element* k [[buffer(1)]],
    const device Element* d_o [[buffer(3)]],
    constant BackwardParams& params [[buffer(4)]],
    const device float* stats [[buffer(5)]],
    QUERY_SPAN_ARGUMENT
    KEY_SPAN_ARGUMENT
    SEQ_LEN_Q_ARGUMENT
    SEQ_LEN_KV_ARGUMENT
    CAPTURED_SCALARS
    device float* delta [[buffer(9)]],
    device float* lse [[buffer(10)]],
#if WITH_SINK
    const device float* sinks [[buffer(11)]],
#endif
    const device Element* o [[buffer(12)]],
    CAPTURED_TENSORS
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head = int(group.y);
    const int batch = int(group.z);
    const int query = int(group.x) * (THREADS / 32) + int(simdgroup);
    const Span span_q = QUERY_SPAN;
    if (query >= span_q.rows) {
        return;
    }
    const device Element* row = o + span_q.begin * params.o_strides[0] + head * params.o_strides[1] + query * params.o_strides[2];
    const device Element* d_row =
        d_o + span_q.begin * params.d_o_strides[0] + head * params.d_o_strides[1] + query * params.d_o_strides[2];
    float sum = 0.0f;
    for (int d = int(lane); d < DIM_V; d += 32) {
        sum += float(row[d]) * float(d_row[d * params.d_o_strides[3]]);
    }
    sum = simd_sum(sum);

    const long place = stats_place(params, span_q, head, query);
    const float stat = stats[place];
    float2 known = lse_of_stat(stat);
    if (is_large(stat)) {
        const Span span_k = KEY_SPAN;
        const Bounds bounds = BOUNDS;
        const int2 visited = keys_of(bounds, query, query + 1);
        const int head_kv = head / params.group;
        const device Element* q_row = q + span_q.begin * params.q_strides[0] + head * params.q_strides[1] + query * params.q_strides[2];
        const device Element* k_rows = k + span_k.begin * params.k_strides[0] + head_kv * params.k_strides[1];
        float row_max = LOWEST;
        float row_sum = 0.0f;
        for (int key = visited.x + int(lane); key < visited.y; key += 32) {
            const device Element* k_row = k_rows + key * params.k_strides[2];
            float score = 0.0f;
            for (int d = 0; d < DIM_QK; d++) {
                score += float(q_row[d]) * float(k_row[d]);
            }
            // For a single query, keys_of returns exactly the keys within bounds. Only score_mod and mask are still evaluated.
            const bool kept = to_score(score, true, int4(batch, head, query, key), params, CAPTURED);
            const float largest = max(row_max, score);
            row_sum = row_sum * exp_from(row_max, largest) + (kept ? exp_from(score, largest) : 0.0f);
            row_max = largest;
        }
        const float largest = simd_max(row_max);
        row_sum = simd_sum(row_sum * exp_from(row_max, largest));
        row_max = largest;
#if WITH_SINK
        add_sink(row_max, row_sum, sinks[head]);
#endif
        known = nearest_to(stat, row_max, row_sum);
    }
    if (lane == 0) {
        delta[place] = sum;
        lse[place * 2] = known.x;
        lse[place * 2 + 1] = known.y;
    }
}
