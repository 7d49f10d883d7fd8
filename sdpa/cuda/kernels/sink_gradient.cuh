// attention_sink_gradient: gradient of the sinks in a deterministic pass. One CTA per head adds the rows in a fixed order.

extern "C" __global__ void __launch_bounds__(256, 1) attention_sink_gradient(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint sums = shared_address(memory);
    const int head = blockIdx.x;
    const float factor = WITH_SCORE_MOD || p.natural == 0 ? p.softmax_scale_log2 : p.softmax_scale_log2 * p.scale, sink = p.sink[head];
    float sum = 0.0f;
    for (long n = threadIdx.x; n < long(p.batch) * p.seq_q; n += 256) {
        const int batch = int(n / p.seq_q), row = int(n % p.seq_q);
        const SeqInfo seq_info = seq_info_of(p, batch);
        if (row >= min(rows_q(p, seq_info), seq_info.len_q)) continue;
        const float stat = p.stats[stats_index(p, seq_info, batch, head, row)];
        const long at = q_tile_index(p, seq_info, batch, head, row / TILE_M) * TILE_M + row % TILE_M;
        const float2 exact = p.exact_lse[at];
        if (stat != -INFINITE) sum -= sink_probability(ExactLse{exact.x, exact.y}, natural_of(factor), stat, sink) * p.delta[at];
    }
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if ((threadIdx.x & 31) == 0) st_shared(sums + threadIdx.x / 32 * 4, __float_as_uint(sum));
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0.0f;
        for (int n = 0; n < 8; n++) all += __uint_as_float(ld_shared(sums + 4 * n));
        p.sink_gradient[head] = all;
    }
}
