// attention_forward for sm_80 and later: one CTA per query tile, one warp per 16 queries. K and V go through cp.async with one or two stages.

constexpr int OUTPUTS = DIM_V / 2;

// A tile of queries of one head.
struct Tile {
    int tile, batch, head;
};

// Applies scale, score_mod and mask to the scores of a KV block, then one step of the online softmax. The thread's first score is of query `q` and key
// `column`.
template <bool masked>
inline void softmax_of_block(float (&s)[SCORES], SoftmaxState& state, float (&rescale)[2], const Params& p, const Captured& captured, const Tile& tile, int q,
                             int column) {
    if (WITH_SCORE_MOD || p.natural != 0) {
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
    const int rows[2] = {q, q + 8};
    if (masked) mask_scores(s, p, seq_info_of(p, tile.batch), rows, column);
    online_softmax(s, state, rescale, p);
}

// After the last block: computes the factor that normalises each row of O, and writes the statistics.
inline void finish_softmax(float (&inverse_sum)[2], SoftmaxState& state, const Params& p, const Tile& tile, int q) {
    const SeqInfo seq_info = seq_info_of(p, tile.batch);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        RowTotal total = row_total(state, half, p);
#if WITH_SINK
        add_sink(total, p.sink[tile.head]);
#endif
        inverse_sum[half] = total.inverse_sum;
        const int there = q + 8 * half;
        if (there >= seq_info.len_q) inverse_sum[half] = 0.0f;
#if WITH_DROPOUT
        inverse_sum[half] *= p.dropout_scale;
#endif
        if ((threadIdx.x & 3) == 0 && there < rows_q(p, seq_info)) {
            store_statistics(p, stats_index(p, seq_info, tile.batch, tile.head, there), there < seq_info.len_q, lse_of(total), total.natural_max,
                             sum_from_max(total));
        }
    }
}

inline int head_count(const Params& p) { return p.batch * p.heads_q; }

inline Tile tile_at(const Params& p, int tile_index) {
    const ScheduledTile scheduled = scheduled_tile(p, p.tiles, tile_index);
    return Tile{p.tiles - 1 - scheduled.position, scheduled.head_index / p.heads_q, scheduled.head_index % p.heads_q};
}

constexpr uint K_BYTES = TILE_N * QK_ROW;
constexpr uint V_BYTES = TILE_N * V_ROW;

// Loads a block of K or V. Keys past the sequence's end have no page and become zeros; invalid page numbers are clamped to the pool.
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
    // Keys past the length are loaded as zeros: they may hold NaN, and P of 0 times NaN would be NaN.
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
    SoftmaxState state = empty_softmax();
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
        // Wait until this block's K has arrived and all warps are done with the stage that is loaded next.
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
        if (ALWAYS_MASKED || masked) softmax_of_block<true>(s, state, rescale, p, captured, tile, q, column);
        else softmax_of_block<false>(s, state, rescale, p, captured, tile, q, column);
#if WITH_DROPOUT
        // The row sums already include the dropped entries of P.
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
