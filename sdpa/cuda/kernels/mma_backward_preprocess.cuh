// Small kernels around the sm_80 backward pass: preprocess (log-sum-exp and delta), sink gradients, parameter gradients.

constexpr int ROWS_OF_WARP = 4;

// For each row, writes the log-sum-exp in base 2 (infinity for a row without keys) and delta = sum of o * d_o. A CTA has 32 rows of a head, four per
// warp.
extern "C" __global__ void __launch_bounds__(256, 1) attention_backward_preprocess(const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = (p.seq_q + 8 * ROWS_OF_WARP - 1) / (8 * ROWS_OF_WARP);
    const int block = blockIdx.x % blocks, head = blockIdx.x / blocks % p.heads_q, batch = blockIdx.x / blocks / p.heads_q;
    const SeqInfo seq_info = seq_info_of(p, batch);
    const int first = (block * 8 + warp) * ROWS_OF_WARP, rows = rows_q(p, seq_info);
    // The grid covers the longest sequence; this one may be shorter.
    if (first >= rows) return;
    const Element *o[ROWS_OF_WARP], *d_o[ROWS_OF_WARP];
    float stats[ROWS_OF_WARP], sums[ROWS_OF_WARP];
#pragma unroll
    for (int n = 0; n < ROWS_OF_WARP; n++) {
        // Rows past the end read the last row instead. Their results are not stored.
        const int row = min(first + n, rows - 1);
        stats[n] = p.stats[stats_index(p, seq_info, batch, head, row)];
        o[n] = row_of(p.o, batch, head, seq_info.begin_q + row);
        d_o[n] = row_of(p.d_o, batch, head, seq_info.begin_q + row);
        sums[n] = 0.0f;
    }
    for (int dim = lane; dim < p.dim_v; dim += 32) {
#pragma unroll
        for (int n = 0; n < ROWS_OF_WARP; n++) sums[n] += float(o[n][dim]) * float(d_o[n][dim * p.d_o.dim]);
    }
#pragma unroll
    for (int n = 0; n < ROWS_OF_WARP; n++) {
        for (int apart = 16; apart > 0; apart /= 2) sums[n] += __shfl_xor_sync(~0u, sums[n], apart);
        const int row = first + n;
        const float stat = stats[n];
        // `o` of a row without keys may hold anything, so delta is set to 0.
        const bool any = stat != -INFINITE && row < seq_info.len_q;
        if (lane == 0 && row < rows) {
            const long at = stats_index(p, seq_info, batch, head, row);
            p.lse[at] = any ? lse_of_stat(stat) : INFINITE;
            p.delta[at] = any ? sums[n] : 0.0f;
        }
    }
    const auto score_at = [&](int q, int k, float& x) {
        x = 0.0f;
        const Element* const key = row_of(p.k, batch, head / p.group, seq_info.begin_kv + k);
        const Element* const query = row_of(p.q, batch, head, seq_info.begin_q + q);
        for (int dim = 0; dim < p.dim_qk; dim++) x += float(query[dim * p.q.dim]) * float(key[dim * p.k.dim]);
        if (WITH_SCORE_MOD || p.natural) x *= p.scale;
        return traced_score(p, captured, batch, head, q, k, x);
    };
    const long row_apart = WITH_PACKED_Q ? p.heads_q : 1;
    recompute_large_lse(p, seq_info, batch, head, first, min(ROWS_OF_WARP, rows - first), p.softmax_scale_log2, p.exact_lse + stats_index(p, seq_info, batch, head, first),
                        row_apart, nullptr, score_at);
}

// One CTA per head adds the rows in a fixed order, so the result is deterministic.
extern "C" __global__ void __launch_bounds__(256, 1) attention_sink_gradient(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint sums = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x;
    const float sink = p.sink[head];
    float sum = 0.0f;
    for (long n = threadIdx.x; n < long(p.batch) * p.seq_q; n += 256) {
        const int batch = int(n / p.seq_q), row = int(n % p.seq_q);
        const SeqInfo seq_info = seq_info_of(p, batch);
        // Rows past the end of a packed sequence have no statistics.
        if (row >= rows_q(p, seq_info)) continue;
        const long at = stats_index(p, seq_info, batch, head, row);
        const float2 exact = p.exact_lse[at];
        if (p.lse[at] != INFINITE) sum -= sink_probability(ExactLse{exact.x, exact.y}, natural_of(p.softmax_scale_log2), p.stats[at], sink) * p.delta[at];
    }
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (lane == 0) st_shared(sums + 4 * warp, __float_as_uint(sum));
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0.0f;
        for (int n = 0; n < 8; n++) all += __uint_as_float(ld_shared(sums + 4 * n));
        p.sink_gradient[head] = all;
    }
}
