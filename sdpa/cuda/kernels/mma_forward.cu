// Attention forward from compute capability 8.0 on: a warp has 16 queries, and walks over blocks of keys with the others of its block.

constexpr int SCORES = TILE_N / 2;
constexpr int OUTPUTS = DIM_V / 2;

// A tile of queries of one head.
struct Tile {
    int tile, batch, head;
};

// The state of the online softmax of a row: its largest score before scaling, and the sum of exponentials relative to that.
struct Rows {
    float most[2];
    float sum[2];
};

// Scores in units of the exponent, the largest of each row, and how much less what came before weighs now.
template <bool masked>
inline void soften(float (&s)[SCORES], Rows& rows, float (&less)[2], const Params& p, const Captured& captured, const Tile& tile, int q, int column) {
    if (WITH_SCORE_MOD || p.natural) {
#pragma unroll
        for (int n = 0; n < SCORES; n++) s[n] *= p.scale;
    }
#if WITH_SCORE_MOD || WITH_KEEP
UNROLL_TRACES
    for (int n = 0; n < SCORES; n++) {
        const Place at = place_behind(p, tile.batch, tile.head, q, column, n & 2 ? 8 : 0, 8 * (n / 4) + (n & 1));
#if WITH_SCORE_MOD
        s[n] = score_mod(s[n], at, captured);
#endif
#if WITH_KEEP
        if (masked && !keep(at, captured)) s[n] = -INFINITE;
#endif
    }
#endif
    if (masked) {
        const Span span = span_of(p, tile.batch);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Range kept = kept_of(p, span, q + 8 * half);
#pragma unroll
            for (int n = 2 * half; n < SCORES; n += n & 1 ? 3 : 1) {
                if (!kept.holds(column + 8 * (n / 4) + (n & 1))) s[n] = -INFINITE;
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = rows.most[half];
#pragma unroll
        for (int n = 2 * half; n < SCORES; n += 4) most = fmaxf(most, fmaxf(s[n], s[n + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        // A row without keys so far has no maximum, and its exponentials are 0.
        float from = most == -INFINITE ? 0.0f : most * p.unit;
        less[half] = most == -INFINITE ? 1.0f : ex2_approx((rows.most[half] - most) * p.unit);
        rows.most[half] = most;
        if (__any_sync(~0u, is_large(from))) {
            const float large = is_large(from) ? most : 0.0f;
            if (large != 0.0f) from = 0.0f;
#pragma unroll
            for (int n = 2 * half; n < SCORES; n += n & 1 ? 3 : 1) s[n] -= large;
        }
        float sum = 0.0f;
#pragma unroll
        for (int n = 2 * half; n < SCORES; n += n & 1 ? 3 : 1) {
            s[n] = ex2_approx(s[n] * p.unit - from);
            sum += s[n];
        }
        rows.sum[half] = rows.sum[half] * less[half] + sum;
    }
}

// What each row's sums are to be multiplied by, once it has met all of its keys; its statistics.
inline void finish(float (&share)[2], const Rows& rows, const Params& p, const Tile& tile, int q) {
    const Span span = span_of(p, tile.batch);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = rows.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        LogSum most = log_of_most(p, rows.most[half]);
        float largest = score_of(p, rows.most[half]);
        share[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
#if WITH_SINK
        const Sunk row = with_sink(most, p.sink[tile.head]);
        sum = sum * row.part + row.own;
        share[half] = sum == 0.0f ? 0.0f : row.part / sum;
        most = row.most;
        largest = fmaxf(largest, p.sink[tile.head]);
#endif
        const int there = q + 8 * half;
        if (there >= span.len_q) share[half] = 0.0f;
#if WITH_DROPOUT
        share[half] *= p.dropout_scale;
#endif
        if ((threadIdx.x & 3) == 0 && there < rows_q(p, span)) {
            const LogSum total = {most.origin, sum == 0.0f ? -INFINITE : most.log + log2f(sum)};
            store_statistics(p, stats_place(p, span, tile.batch, tile.head, there), there < span.len_q, total, largest, sum);
        }
    }
}

// Heads whose keys and values fit the cache together follow one another; of these, tiles with the most keys of causal masks come first.
inline Tile tile_of(const Params& p, int number) {
    const int heads = p.batch * p.heads_q;
    const int first = number / (p.section * p.tiles) * p.section, together = min(p.section, heads - first);
    const int in_section = number - first * p.tiles;
    const int both = first + in_section % together;
    return Tile{p.tiles - 1 - in_section / together, both / p.heads_q, both % p.heads_q};
}

constexpr uint K_BYTES = TILE_N * QK_ROW;
constexpr uint V_BYTES = TILE_N * V_ROW;

// A block of keys or values. In pages behind the last key of an entry the table is not looked at; before it, what is no page stands for one that is.
template <int columns, bool wide>
inline void bring_block(uint to, uint row_bytes, const Params& p, const Strided& from, const Tile& tile, int block, int dim) {
    const int head = tile.head / p.group;
#if WITH_PAGES
    const auto in_page = [&](int key) {
        const int page = p.page_table[long(tile.batch) * p.table_row + key / p.page_size];
        return row_of(from, min(max(page, 0), p.pages - 1), head, key % p.page_size);
    };
    bring_found<TILE_N, columns, wide>(to, row_bytes, from, block * TILE_N, span_of(p, tile.batch).len_kv, dim, in_page);
#else
    const Span span = span_of(p, tile.batch);
    // Zeros past the length: what is there may be NaN, which P of 0 would pass on.
    bring<TILE_N, columns, wide>(to, row_bytes, from, tile.batch, head, {span.begin_kv, block * TILE_N, span.len_kv}, dim);
#endif
}

inline void bring_keys(uint to, const Params& p, const Tile& tile, int block) {
    bring_block<DIM_QK, K_WIDE>(to, QK_ROW, p, p.k, tile, block, p.dim_qk);
}

inline void bring_values(uint to, const Params& p, const Tile& tile, int block) {
    bring_block<DIM_V, V_WIDE>(to, V_ROW, p, p.v, tile, block, p.dim_v);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    attention_forward(const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint q_at = shared_address(memory), k_at = q_at + TILE_M * QK_ROW, v_at = k_at + STAGES * K_BYTES;
    const int lane = threadIdx.x & 31, warp = alike(int(threadIdx.x >> 5));
    const Tile tile = tile_of(p, blockIdx.x);
    const Span span = span_of(p, tile.batch);
    const Extent own = {span.begin_q, tile.tile * TILE_M, rows_q(p, span)};
    const Reach reach = reach_of(p, span, tile.tile);
    const int q = tile.tile * TILE_M + warp * 16 + lane / 4;
    Rows rows = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
    float o[OUTPUTS];
#pragma unroll
    for (int n = 0; n < OUTPUTS; n++) o[n] = 0.0f;
    Walk walk = walk_of(p, reach, tile.batch, tile.head, tile.tile);
    int block;
    bool partly, any = walk_on(walk, p, reach, block, partly);
    if (any) {
        bring<TILE_M, DIM_QK, Q_WIDE>(q_at, QK_ROW, p.q, tile.batch, tile.head, own, p.dim_qk);
        bring_keys(k_at, p, tile, block);
        cp_async_commit_group();
        bring_values(v_at, p, tile, block);
        cp_async_commit_group();
    }
    int stage = 0;
    while (any) {
        const int first_k = block * TILE_N;
        const bool masked = partly;
        any = walk_on(walk, p, reach, block, partly);
        const int next = STAGES == 1 ? 0 : stage ^ 1;
        // Its keys are there, and nobody reads those that the next take the place of.
        cp_async_wait_group<1>();
        __syncthreads();
        if (STAGES == 2) {
            if (any) bring_keys(k_at + next * K_BYTES, p, tile, block);
            cp_async_commit_group();
        }
        float s[SCORES], less[2];
        beside<DIM_QK>(s, q_at + warp * 16 * QK_ROW, k_at + stage * K_BYTES, QK_ROW);
        if (STAGES == 1) {
            __syncthreads();
            if (any) bring_keys(k_at, p, tile, block);
            cp_async_commit_group();
        }
        const int column = first_k + 2 * (lane & 3);
        if (MASKED_ANYWHERE || masked) soften<true>(s, rows, less, p, captured, tile, q, column);
        else soften<false>(s, rows, less, p, captured, tile, q, column);
#if WITH_DROPOUT
        // The sums of rows have all weights.
        each_of_queries<SCORES>(p, tile.batch, tile.head, q, column, [&](int n, bool stays) { s[n] = stays ? s[n] : 0.0f; });
#endif
#pragma unroll
        for (int n = 0; n < OUTPUTS; n++) o[n] *= less[n >> 1 & 1];
        cp_async_wait_group<1>();
        __syncthreads();
        if (STAGES == 2) {
            if (any) bring_values(v_at + next * V_BYTES, p, tile, block);
            cp_async_commit_group();
        }
        weigh(o, s, v_at + stage * V_BYTES, V_ROW);
        if (STAGES == 1) {
            __syncthreads();
            if (any) bring_values(v_at, p, tile, block);
            cp_async_commit_group();
        }
        stage = next;
    }
    float share[2];
    finish(share, rows, p, tile, q);
    put_rows<O_PAIRS>(p.o, o, share, tile.batch, tile.head, own, q, 0, p.dim_v);
}
