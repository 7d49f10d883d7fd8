// attention_forward for sm_80 and later: one CTA per query tile, one warp per 16 queries. K and V go through cp.async with one or two stages.

constexpr int SCORES = TILE_N / 2;
constexpr int OUTPUTS = DIM_V / 2;

// A tile of queries of one head.
struct Tile {
    int tile, batch, head;
};

// Online softmax state of a thread's two rows, in unscaled scores: the maximum, and the sum of exponentials relative to it.
struct SoftmaxState {
    float row_max[2];
    float row_sum[2];
};

// One online softmax step: exponentials in place of scores, and the factor by which O and the sums of each row are rescaled.
template <bool masked>
inline void online_softmax(float (&s)[SCORES], SoftmaxState& state, float (&rescale)[2], const Params& p, const Captured& captured, const Tile& tile, int q,
                           int column) {
    if (WITH_SCORE_MOD || p.natural) {
#pragma unroll
        for (int n = 0; n < SCORES; n++) s[n] *= p.scale;
    }
#if WITH_SCORE_MOD || WITH_KEEP
UNROLL_TRACES
    for (int n = 0; n < SCORES; n++) {
        const Place at = place_at(p, tile.batch, tile.head, q, column, fragment_row(n), fragment_column(n));
#if WITH_SCORE_MOD
        s[n] = score_mod(s[n], at, captured);
#endif
#if WITH_KEEP
        if (masked && !keep(at, captured)) s[n] = -INFINITE;
#endif
    }
#endif
    if (masked) {
        const SeqInfo seq_info = seq_info_of(p, tile.batch);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Range bounds = attended_keys(p, seq_info, q + 8 * half);
#pragma unroll
            for (int n = 2 * half; n < SCORES; n = next_in_row(n)) {
                if (!bounds.contains(fragment_column(column, n))) s[n] = -INFINITE;
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float row_max = state.row_max[half];
#pragma unroll
        for (int n = 2 * half; n < SCORES; n += 4) row_max = fmaxf(row_max, fmaxf(s[n], s[n + 1]));
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
        // A row without keys so far has no maximum, and its exponentials are 0.
        float from = row_max == -INFINITE ? 0.0f : row_max * p.unit;
        rescale[half] = row_max == -INFINITE ? 1.0f : ex2_approx((state.row_max[half] - row_max) * p.unit);
        state.row_max[half] = row_max;
        if (__any_sync(~0u, is_large(from))) {
            const float large = is_large(from) ? row_max : 0.0f;
            if (large != 0.0f) from = 0.0f;
#pragma unroll
            for (int n = 2 * half; n < SCORES; n = next_in_row(n)) s[n] -= large;
        }
        float sum = 0.0f;
#pragma unroll
        for (int n = 2 * half; n < SCORES; n = next_in_row(n)) {
            s[n] = ex2_approx(s[n] * p.unit - from);
            sum += s[n];
        }
        state.row_sum[half] = state.row_sum[half] * rescale[half] + sum;
    }
}

// The factor that normalises each row of O, after the last block; writes the statistics.
inline void finish_softmax(float (&inverse_sum)[2], const SoftmaxState& state, const Params& p, const Tile& tile, int q) {
    const SeqInfo seq_info = seq_info_of(p, tile.batch);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = state.row_sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        LogSumExp row_max = lse_of_max(p, state.row_max[half]);
        float natural_max = natural_score(p, state.row_max[half]);
        inverse_sum[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
#if WITH_SINK
        const SinkUpdate row = with_sink(row_max, p.sink[tile.head]);
        sum = sum * row.scale + row.sink;
        inverse_sum[half] = sum == 0.0f ? 0.0f : row.scale / sum;
        row_max = row.row_max;
        natural_max = fmaxf(natural_max, p.sink[tile.head]);
#endif
        const int there = q + 8 * half;
        if (there >= seq_info.len_q) inverse_sum[half] = 0.0f;
#if WITH_DROPOUT
        inverse_sum[half] *= p.dropout_scale;
#endif
        if ((threadIdx.x & 3) == 0 && there < rows_q(p, seq_info)) {
            const LogSumExp total = {row_max.origin, sum == 0.0f ? -INFINITE : row_max.log + log2f(sum)};
            store_statistics(p, stats_index(p, seq_info, tile.batch, tile.head, there), there < seq_info.len_q, total, natural_max, sum);
        }
    }
}

// Heads whose K and V fit L2 together are interleaved (p.section of them); within, the last tiles first, which have the most keys under a causal mask.
inline Tile tile_at(const Params& p, int tile_index) {
    const int heads = p.batch * p.heads_q;
    const int first = tile_index / (p.section * p.tiles) * p.section, together = min(p.section, heads - first);
    const int in_section = tile_index - first * p.tiles;
    const int head_index = first + in_section % together;
    return Tile{p.tiles - 1 - in_section / together, head_index / p.heads_q, head_index % p.heads_q};
}

constexpr uint K_BYTES = TILE_N * QK_ROW;
constexpr uint V_BYTES = TILE_N * V_ROW;

// Loads a block of K or V. Keys past the sequence's end have no page; invalid page numbers are clamped to the pool.
template <int columns, bool wide>
inline void load_kv_block(uint to, uint row_bytes, const Params& p, const Strided& from, const Tile& tile, int block, int dim) {
    const int head = tile.head / p.group;
#if WITH_PAGES
    const auto in_page = [&](int key) {
        const int page = p.page_table[long(tile.batch) * p.table_row + key / p.page_size];
        return row_of(from, min(max(page, 0), p.pages - 1), head, key % p.page_size);
    };
    load_rows_at<TILE_N, columns, wide>(to, row_bytes, from, block * TILE_N, seq_info_of(p, tile.batch).len_kv, dim, in_page);
#else
    const SeqInfo seq_info = seq_info_of(p, tile.batch);
    // Zeros past the length: what is there may be NaN, which P of 0 would pass on.
    load_rows<TILE_N, columns, wide>(to, row_bytes, from, tile.batch, head, {seq_info.begin_kv, block * TILE_N, seq_info.len_kv}, dim);
#endif
}

inline void load_k(uint to, const Params& p, const Tile& tile, int block) {
    load_kv_block<DIM_QK, K_WIDE>(to, QK_ROW, p, p.k, tile, block, p.dim_qk);
}

inline void load_v(uint to, const Params& p, const Tile& tile, int block) {
    load_kv_block<DIM_V, V_WIDE>(to, V_ROW, p, p.v, tile, block, p.dim_v);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    attention_forward(const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint q_at = shared_address(memory), k_at = q_at + TILE_M * QK_ROW, v_at = k_at + STAGES * K_BYTES;
    const int lane = threadIdx.x & 31, warp = warp_uniform(int(threadIdx.x >> 5));
    const Tile tile = tile_at(p, blockIdx.x);
    const SeqInfo seq_info = seq_info_of(p, tile.batch);
    const Extent own = {seq_info.begin_q, tile.tile * TILE_M, rows_q(p, seq_info)};
    const BlockRange range = block_range_of(p, seq_info, tile.tile);
    const int q = tile.tile * TILE_M + warp * 16 + thread_row(lane);
    SoftmaxState state = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
    float o[OUTPUTS];
#pragma unroll
    for (int n = 0; n < OUTPUTS; n++) o[n] = 0.0f;
    BlockIterator iterator = block_iterator(p, range, tile.batch, tile.head, tile.tile);
    int block;
    bool partial, any = next_block(iterator, p, range, block, partial);
    if (any) {
        load_rows<TILE_M, DIM_QK, Q_WIDE>(q_at, QK_ROW, p.q, tile.batch, tile.head, own, p.dim_qk);
        load_k(k_at, p, tile, block);
        cp_async_commit_group();
        load_v(v_at, p, tile, block);
        cp_async_commit_group();
    }
    int stage = 0;
    while (any) {
        const int first_k = block * TILE_N;
        const bool masked = partial;
        any = next_block(iterator, p, range, block, partial);
        const int next = STAGES == 1 ? 0 : stage ^ 1;
        // This block's K has arrived, and all warps are done with the stage that is loaded next.
        cp_async_wait_group<1>();
        __syncthreads();
        if (STAGES == 2) {
            if (any) load_k(k_at + next * K_BYTES, p, tile, block);
            cp_async_commit_group();
        }
        float s[SCORES], rescale[2];
        warp_gemm_abt<DIM_QK>(s, q_at + warp * 16 * QK_ROW, k_at + stage * K_BYTES, QK_ROW);
        if (STAGES == 1) {
            __syncthreads();
            if (any) load_k(k_at, p, tile, block);
            cp_async_commit_group();
        }
        const int column = first_k + thread_column(lane);
        if (ALWAYS_MASKED || masked) online_softmax<true>(s, state, rescale, p, captured, tile, q, column);
        else online_softmax<false>(s, state, rescale, p, captured, tile, q, column);
#if WITH_DROPOUT
        // The row sums have all entries of P.
        dropout_of_queries<SCORES>(p, tile.batch, tile.head, q, column, [&](int n, bool survives) { s[n] = survives ? s[n] : 0.0f; });
#endif
#pragma unroll
        for (int n = 0; n < OUTPUTS; n++) o[n] *= rescale[fragment_half(n)];
        cp_async_wait_group<1>();
        __syncthreads();
        if (STAGES == 2) {
            if (any) load_v(v_at + next * V_BYTES, p, tile, block);
            cp_async_commit_group();
        }
        warp_gemm_ab(o, s, v_at + stage * V_BYTES, V_ROW);
        if (STAGES == 1) {
            __syncthreads();
            if (any) load_v(v_at, p, tile, block);
            cp_async_commit_group();
        }
        stage = next;
    }
    float inverse_sum[2];
    finish_softmax(inverse_sum, state, p, tile, q);
    store_rows<O_PAIRS>(p.o, o, inverse_sum, tile.batch, tile.head, own, q, 0, p.dim_v);
}
