// The gradient of sinks: for each query head, minus the sum of P of the sink times delta, over its rows in all batch entries. One
// threadgroup per head; threads and simdgroups add in the same order in every run.

// Returns whether all elements of an output row are 0.
inline bool is_zeros(const device Element* row) {
    for (int d = 0; d < DIM_V; d++) {
        if (float(row[d]) != 0.0f) {
            return false;
        }
    }
    return true;
}

kernel void attention_sink(
    constant BackwardParams& params [[buffer(4)]],
    const device float* lse [[buffer(5)]],
    QUERY_SPAN_ARGUMENT
    KEY_SPAN_ARGUMENT
    SEQ_LEN_Q_ARGUMENT
    SEQ_LEN_KV_ARGUMENT
    const device float* delta [[buffer(9)]],
    device Gradient* gradient [[buffer(10)]],
    const device float* sinks [[buffer(11)]],
    const device Element* o [[buffer(12)]],
    threadgroup float* simd_sums [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int head = int(group.x);
    const float sink = sinks[head];
    const long rows = long(params.batch) * params.seq_q;
    float sum = 0.0f;
    for (long at = long(thread_index); at < rows; at += THREADS) {
        const int batch = int(at / params.seq_q);
        const int query = int(at % params.seq_q);
        const Span span_q = QUERY_SPAN;
        const Span span_k = KEY_SPAN;
        const Bounds bounds = BOUNDS;
        const int2 visited = keys_of(bounds, query, query + 1);
        const long place = stats_place(params, span_q, head, query);
        // Skip rows that attend to nothing, whatever memory holds for them, and rows past the end of a packed sequence.
        if (visited.x >= visited.y || lse[place * 2 + 1] >= WITHOUT_KEYS) {
            continue;
        }
        // If the log-sum-exp does not reveal a row without keys, its output does: it is all zeros, so that delta is NaN only if dO has an infinity or NaN. Skip such rows too.
        const float its_delta = delta[place];
        const device Element* row = o + span_q.begin * params.o_strides[0] + head * params.o_strides[1] + query * params.o_strides[2];
        if (is_odd(its_delta) && is_zeros(row)) {
            continue;
        }
        sum += (sink < LOWEST ? 0.0f : exp2((sink - lse[place * 2]) * LOG2_E - lse[place * 2 + 1])) * its_delta;
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        simd_sums[simdgroup] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index == 0) {
        float total = 0.0f;
        for (int s = 0; s < THREADS / 32; s++) {
            total += simd_sums[s];
        }
        gradient[head] = Gradient(-total);
    }
}
