// The sum of o d_o along each row, of which every element of the gradient of the scores is reduced. A simdgroup to a row.

kernel void attention_delta(
    const device Element* d_o [[buffer(3)]],
    constant BackwardParams& params [[buffer(4)]],
    QUERY_SPAN_ARGUMENT
    device float* delta [[buffer(9)]],
    const device Element* o [[buffer(12)]],
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
    if (lane == 0) {
        delta[stats_place(params, span_q, head, query)] = sum;
    }
}
