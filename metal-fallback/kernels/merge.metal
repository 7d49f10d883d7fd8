// Split-KV: merges the results of the PARTS threadgroups that shared the keys of each query. One simdgroup per row.

kernel void attention_merge(
    device Element* o [[buffer(3)]],
    constant ForwardParams& params [[buffer(4)]],
#if WITH_STATS
    device float* stats [[buffer(5)]],
#endif
    QUERY_SPAN_ARGUMENT
    const device float* part_sums [[buffer(9)]],
    const device float* part_outputs [[buffer(10)]],
#if WITH_SINK
    const device float* sinks [[buffer(11)]],
#endif
#if WITH_ROW_MAX
    device float* row_maxima [[buffer(12)]],
#endif
#if WITH_SUM_EXP
    device float* row_sums [[buffer(13)]],
#endif
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
    const long place = stats_place(params, span_q, head, query);
    const device float* own_sums = part_sums + place * PARTS * 2;
    const device float* own_outputs = part_outputs + place * PARTS * DIM_V;
    float row_max = LOWEST;
    for (int part = 0; part < PARTS; part++) {
        row_max = max(row_max, own_sums[part * 2]);
    }
    float row_sum = 0.0f;
    for (int part = 0; part < PARTS; part++) {
        row_sum += own_sums[part * 2 + 1] * exp_from(own_sums[part * 2], row_max);
    }
#if WITH_SINK
    // From here on, outputs are relative to the maximum that includes the sink.
    add_sink(row_max, row_sum, sinks[head]);
#endif
    const float inverse = inverse_of(row_sum);
    device Element* out = o + span_q.begin * params.o_strides[0] + head * params.o_strides[1] + query * params.o_strides[2];
    for (int d = int(lane); d < DIM_V; d += 32) {
        float sum = 0.0f;
        for (int part = 0; part < PARTS; part++) {
            sum += own_outputs[part * DIM_V + d] * exp_from(own_sums[part * 2], row_max);
        }
        out[d] = Element(sum * inverse);
    }
#if WITH_STATS || WITH_ROW_MAX || WITH_SUM_EXP
    if (lane == 0) {
#if WITH_STATS
        stats[place] = stats_of(row_max, row_sum);
#endif
#if WITH_ROW_MAX
        row_maxima[place] = row_max_of(row_max, row_sum);
#endif
#if WITH_SUM_EXP
        row_sums[place] = row_sum;
#endif
    }
#endif
}
