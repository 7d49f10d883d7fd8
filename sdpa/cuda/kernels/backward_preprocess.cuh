// The kernel before the sm_90 backward pass: log-sum-exp and delta of each row, sink gradient.

// Returns the address of a row of a tensor indexed by queries, such as Q, O or dO.
inline const Element* row_of(const void* at, long batch_stride, long head_stride, long row_stride, const SeqInfo& s, int batch, int head, int row) {
    const long of_batch = WITH_PACKED_Q ? s.begin_q * row_stride : batch * batch_stride;
    return static_cast<const Element*>(at) + of_batch + head * head_stride + row * row_stride;
}

// Number of lanes that share a row. Each lane reads eight elements.
constexpr int ROW_LANES = 8 * V_PANELS;
constexpr int ROWS_AT_ONCE = 256 / ROW_LANES, ROUNDS = TILE_M / ROWS_AT_ONCE;

// Dot product of two packed pairs of 16-bit elements.
inline float dot_pairs(float a, float b) {
    const uint x = __float_as_uint(a), y = __float_as_uint(b);
    const auto low = [](uint pair) { return float(Element{(unsigned short)(pair & 0xffffu)}); };
    return low(x) * low(y) + low(x >> 16) * low(y >> 16);
}

// For each row, writes the log-sum-exp in base 2 (infinity for a row without keys) and delta = sum of o * d_o, both in the order of query tiles. Each CTA
// has one tile and issues all loads before the first use.
extern "C" __global__ void __launch_bounds__(256, 4) attention_backward_preprocess(const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    const int lane = threadIdx.x % ROW_LANES, tile = blockIdx.x % p.tiles, head = blockIdx.x / p.tiles % p.heads_q, batch = blockIdx.x / p.tiles / p.heads_q;
    const SeqInfo seq_info = seq_info_of(p, batch);
    const int first = tile * TILE_M + threadIdx.x / ROW_LANES, extent = rows_q(p, seq_info);
    // The grid covers the longest sequence; this one may be shorter.
    if (tile * TILE_M >= extent) return;
    float stats[ROUNDS], sums[ROUNDS];
#if FIXED_POINT_DQ
    // The bits of the largest magnitudes of dO, in the halves of a pair.
    uint upstream[ROUNDS];
#pragma unroll
    for (int n = 0; n < ROUNDS; n++) upstream[n] = 0;
#endif
#pragma unroll
    for (int n = 0; n < ROUNDS; n++) {
        const int row = first + n * ROWS_AT_ONCE;
        stats[n] = row < extent ? p.stats[stats_index(p, seq_info, batch, head, row)] : -INFINITE;
        sums[n] = 0.0f;
    }
    const auto o_of = [&](int row) { return row_of(p.o, p.o_batch, p.o_head, p.o_row, seq_info, batch, head, row); };
    const auto d_o_of = [&](int row) { return row_of(p.d_o, p.d_o_batch, p.d_o_head, p.d_o_row, seq_info, batch, head, row); };
    if (p.d_o_copy) {
        for (int n = 0; n < ROUNDS; n++) {
            const int row = first + n * ROWS_AT_ONCE;
            Element* const copy = p.d_o_copy + ((long(batch) * p.heads_q + head) * p.seq_q + row) * p.copy_row;
            for (int dim = lane; row < extent && dim < p.dim_v; dim += ROW_LANES) {
                const Element element = d_o_of(row)[dim * p.d_o_dim];
                sums[n] += float(o_of(row)[dim]) * float(element);
                copy[dim] = element;
#if FIXED_POINT_DQ
                upstream[n] = max(upstream[n], element.bits & 0x7fffu);
#endif
            }
        }
    } else {
        // Rows are 16-byte aligned, so eight elements are loaded as one vector.
        const bool full_vector = 8 * lane + 8 <= p.dim_v;
        float4 o[ROUNDS], d_o[ROUNDS];
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            const int row = first + n * ROWS_AT_ONCE;
            const bool there = full_vector && row < extent;
            o[n] = there ? *reinterpret_cast<const float4*>(o_of(row) + 8 * lane) : float4{0.0f, 0.0f, 0.0f, 0.0f};
            d_o[n] = there ? *reinterpret_cast<const float4*>(d_o_of(row) + 8 * lane) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            sums[n] = dot_pairs(o[n].x, d_o[n].x) + dot_pairs(o[n].y, d_o[n].y) + dot_pairs(o[n].z, d_o[n].z) +
                      dot_pairs(o[n].w, d_o[n].w);
#if FIXED_POINT_DQ
            add_largest(upstream[n], Elements{{__float_as_uint(d_o[n].x), __float_as_uint(d_o[n].y), __float_as_uint(d_o[n].z), __float_as_uint(d_o[n].w)}});
#endif
        }
        if (p.dim_v % 8 != 0 && !full_vector) {
#pragma unroll 1
            for (int n = 0; n < ROUNDS; n++) {
                const int row = first + n * ROWS_AT_ONCE;
                for (int dim = 8 * lane; row < extent && dim < p.dim_v; dim++) {
                    sums[n] += float(o_of(row)[dim]) * float(d_o_of(row)[dim]);
#if FIXED_POINT_DQ
                    upstream[n] = max(upstream[n], d_o_of(row)[dim].bits & 0x7fffu);
#endif
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < ROUNDS; n++) {
        const int row = first + n * ROWS_AT_ONCE;
        for (int apart = ROW_LANES / 2; apart > 0; apart /= 2) sums[n] += __shfl_xor_sync(~0u, sums[n], apart);
#if FIXED_POINT_DQ
        upstream[n] = larger_half(upstream[n]);
        for (int half = ROW_LANES / 2; half > 0; half /= 2) upstream[n] = max(upstream[n], uint(__shfl_xor_sync(~0u, int(upstream[n]), half)));
        const float largest = upstream[n] < exponent_bits(Element{}) ? float(Element{(unsigned short)upstream[n]}) : INFINITE;
#endif
        // `o` of a row without keys may hold anything, so delta is set to 0.
        const float stat = stats[n];
        const bool any = stat != -INFINITE && row < seq_info.len_q;
        const float sum = any ? sums[n] : 0.0f;
        if (lane == 0) {
            const long to = q_tile_index(p, seq_info, batch, head, tile) * TILE_M + row % TILE_M;
            const float lse = any ? lse_of_stat(stat) : INFINITE;
            // Large log-sum-exps are written by recompute_large_lse instead.
            if (!is_large(lse)) p.lse[to] = lse;
            p.delta[to] = sum;
#if FIXED_POINT_DQ
            // A log-sum-exp of NaN or infinity makes P and dQ NaN.
            p.dq_scale[to] = !any ? 1.0f : fabsf(stat) < INFINITE ? dq_scale_of_row(p, batch, head, largest, sum) : NOT_A_NUMBER;
#endif
        }
    }
    const auto score_at = [&](int q, int k, float& x) {
        x = 0.0f;
        const long of_keys = WITH_PACKED_KV ? seq_info.begin_kv * p.k_row : batch * p.k_batch;
        const Element* const key = static_cast<const Element*>(p.k) + of_keys + head / p.group * p.k_head + k * p.k_row;
        const Element* const query = row_of(p.q, p.q_batch, p.q_head, p.q_row, seq_info, batch, head, q);
        for (int dim = 0; dim < p.dim_qk; dim++) x += float(query[dim]) * float(key[dim]);
        if (WITH_SCORE_MOD) x *= p.scale;
        return traced_score(p, captured, batch, head, q, k, x);
    };
    constexpr int OF_WARP = TILE_M / 8;
    const int own = threadIdx.x / 32 * OF_WARP;
    const long to = q_tile_index(p, seq_info, batch, head, tile) * TILE_M + own;
    // The factor by which recompute_p multiplies scores.
    const float factor = WITH_SCORE_MOD || p.natural == 0 ? p.softmax_scale_log2 : p.softmax_scale_log2 * p.scale;
    const bool large = recompute_large_lse(p, seq_info, batch, head, tile * TILE_M + own, OF_WARP, factor, p.exact_lse + to, 1, p.lse + to, score_at);
    if (large && (threadIdx.x & 31) == 0) *p.any_large_lse = 1;
#if WITH_SINK_GRADIENT && !FIXED_POINT_DQ
    // Wait until all deltas of the tile are written.
    __syncthreads();
    float of_sink = 0.0f;
    const int lane_of_warp = threadIdx.x & 31, row = tile * TILE_M + own + lane_of_warp;
    if (lane_of_warp < OF_WARP && row < min(extent, seq_info.len_q)) {
        const float2 exact = p.exact_lse[to + lane_of_warp];
        const float stat = p.stats[stats_index(p, seq_info, batch, head, row)];
        if (stat != -INFINITE) of_sink = -sink_probability(ExactLse{exact.x, exact.y}, natural_of(factor), stat, p.sink[head]) * p.delta[to + lane_of_warp];
    }
    for (int apart = 16; apart > 0; apart /= 2) of_sink += __shfl_xor_sync(~0u, of_sink, apart);
    if ((threadIdx.x & 31) == 0) atomicAdd(p.sink_gradient + head, of_sink);
#endif
}
