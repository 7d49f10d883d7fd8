// Attention forward on compute capability 9.0: one group of threads brings operands, the others each have 64 queries.

constexpr int WARPS = 4 * GROUPS;
constexpr int PANEL = 64;
constexpr int QK_PANELS = DIM_QK / PANEL;
constexpr int V_PANELS = DIM_V / PANEL;
constexpr int ROW_BYTES = 128;
constexpr uint Q_PANEL_BYTES = ROWS * ROW_BYTES;
constexpr uint Q_BOX_BYTES = TILE_ROWS * ROW_BYTES;
constexpr uint KV_PANEL_BYTES = TILE_N * ROW_BYTES;
// Results of few queries go past shared memory.
constexpr uint O_BYTES = FEW ? 0 : Q_PANEL_BYTES * V_PANELS;
constexpr uint Q_BYTES = Q_PANEL_BYTES * (O_APART || QK_PANELS > V_PANELS ? QK_PANELS : V_PANELS);
constexpr uint K_BYTES = KV_PANEL_BYTES * QK_PANELS;
constexpr uint V_BYTES = KV_PANEL_BYTES * V_PANELS;
constexpr int SCORES = TILE_N / 2;
constexpr int OUTPUTS = DIM_V / 2;
// How much larger than what weights are next to, in units of the exponent, a score is before sums are scaled: weights are at most 2 to this.
constexpr float GROWTH = 8.0f;

// Zeroes values past the last key of a batch entry: in a block that has such keys.
inline void zero_values(const Params& p, const Tile& tile, int block, uint v) {
#if WITH_SEQ_LEN_KV || WITH_PAGES
    const int keys = span_of_tile(p, tile).len_kv - block * TILE_N;
    if (keys >= TILE_N) return;
    zero_rows<V_PANELS>(v, KV_PANEL_BYTES, keys, TILE_N);
    rows_are_zero();
#endif
}

// The state of the online softmax of a row: its largest score, the sum of exponentials, and the score that these are relative to. Scores before scaling.
struct Rows {
    float most[2];
    float sum[2];
    float from[2];
};

// Scores of a group of threads: 64 queries beside a block of keys. Nothing waits.
inline void score(float (&s)[SCORES], uint q, const uint (&held)[HELD], uint k) {
    const ulong64 a = descriptor_k_major(q), b = descriptor_k_major(k);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < QK_STEPS; step++) {
        const uint panel = step / 4, column = step % 4 * 32;
        const ulong64 keys = descriptor_advance(b, panel * KV_PANEL_BYTES + column);
        if (4 * step + 3 < HELD) wgmma_k_major(s, held[4 * step], held[4 * step + 1], held[4 * step + 2], held[4 * step + 3], keys, step > 0);
        else wgmma_k_major(s, descriptor_advance(a, panel * Q_PANEL_BYTES + column), keys, step > 0);
    }
    wgmma_commit_group();
}

// Adds weights times values. Nothing waits: weights are untouchable until then.
inline void weigh(float (&o)[OUTPUTS], const uint (&w)[SCORES / 2], uint v, bool add) {
    const ulong64 b = descriptor_mn_major(v, KV_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_N / 16; step++) {
        const ulong64 rows = descriptor_advance(b, step * 16 * ROW_BYTES);
        wgmma_b_mn_major(o, w[4 * step], w[4 * step + 1], w[4 * step + 2], w[4 * step + 3], rows, add || step > 0);
    }
    wgmma_commit_group();
}

// One step of the online softmax: exponentials in place of scores, and the factor by which earlier sums of each row shrink.
template <bool masked>
inline void soften(float (&s)[SCORES], Rows& rows, float (&less)[2], const Params& p, const Captured& captured, const Tile& tile,
                   int first_k) {
    const int lane = threadIdx.x & 31;
    const int row = (int(threadIdx.x >> 7) - 1) * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;
    const int q[2] = {query_of(tile, row), query_of(tile, row + 8)};
    const int column = first_k + 2 * (lane & 3);
#if WITH_SCORE_MOD
    constexpr bool natural = true;
#else
    const bool natural = p.natural != 0;
#endif
    if (natural) {
#pragma unroll
        for (int n = 0; n < SCORES; n++) s[n] *= p.scale;
    }
#if WITH_SCORE_MOD || WITH_KEEP
    const int heads[2] = {min(head_of(tile, row), p.heads_q - 1), min(head_of(tile, row + 8), p.heads_q - 1)};
UNROLL_TRACES
    for (int n = 0; n < SCORES; n++) {
        const int half = n >> 1 & 1;
        const Place at = place_behind<!masked>(p, tile.batch, heads[half], FEW ? q[half] : q[0], column, FEW ? 0 : 8 * half, 8 * (n / 4) + (n & 1));
#if WITH_SCORE_MOD
        s[n] = score_mod(s[n], at, captured);
#endif
#if WITH_KEEP
        if (masked && !keep(at, captured)) s[n] = -INFINITE;
#endif
    }
#endif
    if (masked) {
        // Made again, so that it is not kept from block to block.
        const Span span = span_of_tile(p, tile);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Range kept = kept_of(p, span, q[half]);
#pragma unroll
            for (int n = 2 * half; n < SCORES; n += n & 1 ? 3 : 1) {
                if (!kept.holds(column + 8 * (n / 4) + (n & 1))) s[n] = -INFINITE;
            }
        }
    }
    const float unit = p.unit;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -INFINITE;
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) most = fmaxf(most, fmaxf(s[n + 2 * half], s[n + 2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        rows.most[half] = fmaxf(rows.most[half], most);
        // Conditional rescale: sums shrink only where the maximum has grown much. NaN, of two maxima of -infinity, is not larger.
        const float before = rows.from[half], growth = (most - before) * unit;
        const bool larger = growth > GROWTH;
        const float from = larger ? most : before;
        less[half] = larger ? ex2_approx(-growth) : 1.0f;
        rows.from[half] = from;
        // A row without keys so far has no maximum, and its exponentials are 0.
        float base = from == -INFINITE ? 0.0f : from * unit;
        // Rare, and the same for the whole warp: exponents are relative to 0 then.
        if (__builtin_expect(__any_sync(~0u, is_large(base)), 0)) {
            const float large = is_large(base) ? from : 0.0f;
            if (large != 0.0f) base = 0.0f;
#pragma unroll
            for (int n = 2 * half; n < SCORES; n += n & 1 ? 3 : 1) s[n] -= large;
        }
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) {
#pragma unroll
            for (int other = 0; other < 2; other++) {
                float& x = s[n + 2 * half + other];
                x = ex2_approx(x * unit - base);
                sum += x;
            }
        }
        rows.sum[half] = rows.sum[half] * less[half] + sum;
    }
}

// Weights that dropout leaves; the sums of rows have them all.
inline void drop(float (&s)[SCORES], const Params& p, const Tile& tile, int first_k) {
#if WITH_DROPOUT
    const int lane = threadIdx.x & 31, k = first_k + 2 * (lane & 3);
    const int row = (int(threadIdx.x >> 7) - 1) * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;
    const auto leave = [&](int n, bool stays) { s[n] = stays ? s[n] : 0.0f; };
    // Where a tile has at most 8 queries, these are all that there are.
    if (!FEW || TILE_M > 8) {
        each_of_queries<SCORES>(p, tile.batch, head_of(tile, row), query_of(tile, row), k, leave);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++)
            each_of_query<SCORES>(p, tile.batch, head_of(tile, row + 8 * half), query_of(tile, row + 8 * half), k, half, leave);
    }
#endif
}

inline void pack(uint (&w)[SCORES / 2], const float (&s)[SCORES]) {
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) w[n] = pack_pair(Element{}, s[2 * n], s[2 * n + 1]);
}

// Groups take turns at the matrix units, so that one computes weights while another's products run.
inline void turn_begins(int group) {
#if TURNS
    named_barrier_sync(1 + group, 256);
#endif
}

inline void turn_ends(int group) {
#if TURNS
    named_barrier_arrive(1 + (group + 1) % GROUPS, 256);
#endif
}

struct Shared {
    uint q, k, v, o;
    uint q_full, q_free, k_full, v_full, k_free, v_free, tile_full, tiles;
};

inline Shared layout(uint base) {
    Shared at;
    at.q = base;
    at.k = at.q + Q_BYTES;
    at.v = at.k + STAGES * K_BYTES;
    at.o = O_APART ? at.v + STAGES * V_BYTES : at.q;
    at.q_full = at.v + STAGES * V_BYTES + (O_APART ? O_BYTES : 0);
    at.q_free = at.q_full + 8;
    at.k_full = at.q_free + 8;
    at.v_full = at.k_full + 8 * STAGES;
    at.k_free = at.v_full + 8 * STAGES;
    at.v_free = at.k_free + 8 * STAGES;
    at.tile_full = at.v_free + 8 * STAGES;
    at.tiles = at.tile_full + 16;
    return at;
}

// Where a ring of barriers stands: which of them, and which of its phases.
template <int stages>
struct Ring {
    int stage = 0, phase = 0;
    inline void on() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        phase ^= stage == 0;
    }
};

// Brings the queries of a tile, of all its heads.
inline void bring_queries(const TensorMap& map, const Shared& at, const Span& span, const Tile& tile) {
    for (int panel = 0; panel < QK_PANELS; panel++) {
        const uint to = at.q + panel * Q_PANEL_BYTES;
#if WITH_PACKED_Q
        const Clipped rows = clipped<TILE_M>(span.begin_q, span.len_q, tile.tile * TILE_M);
        panel_in(to, Q_BOX_BYTES, map, at.q_full, panel * PANEL, panel < QK_THERE, rows, tile.head);
#else
        tma_load(to, map, at.q_full, panel * PANEL, tile.tile * TILE_M, tile.head, tile.batch);
#endif
    }
}

// Keys that a thread brings of a block, where they lie in pages: a page, and a token of it. Rows that both axes of a page and a block are whole
// multiples of come at once, a thread for each.
struct Piece {
    int page, token;
};

// Behind the last key of an entry the table is not looked at: there is no such page, and what is brought of it is zero. Before it, what is no page stands
// for one that is.
inline Piece piece_of(const Params& p, const Span& span, int batch, int block) {
#if WITH_PAGES
    const int key = block * TILE_N + int(threadIdx.x) * PIECE;
    if (int(threadIdx.x) >= TILE_N / PIECE || key >= span.len_kv) return Piece{-1, 0};
    const int page = p.page_table[long(batch) * p.table_row + key / p.page_size];
    return Piece{min(max(page, 0), p.pages - 1), key % p.page_size};
#else
    return Piece{0, 0};
#endif
}

// Brings a block of keys or values, so many panels of which are the tensor's.
template <int panels, int of_tensor>
inline void bring_block(uint to, const TensorMap& map, uint barrier, const Span& span, int block, const Piece& piece, int kv_head, const Tile& tile) {
#if WITH_PAGES
    if (int(threadIdx.x) >= TILE_N / PIECE) return;
#endif
    for (int panel = 0; panel < panels; panel++) {
        const uint there = to + panel * KV_PANEL_BYTES;
#if WITH_PAGES
        tma_load(there + int(threadIdx.x) * PIECE * ROW_BYTES, map, barrier, panel * PANEL, piece.token, kv_head, piece.page);
#elif WITH_PACKED_KV
        const Clipped rows = clipped<TILE_N>(span.begin_kv, span.len_kv, block * TILE_N);
        panel_in(there, KV_PANEL_BYTES, map, barrier, panel * PANEL, panel < of_tensor, rows, kv_head);
#else
        tma_load(there, map, barrier, panel * PANEL, block * TILE_N, kv_head, tile.batch);
#endif
    }
}

// How many tiles were told of: which of two barriers and of the places is the next one's.
struct Count {
    int tiles = 0;
    inline uint barrier(const Shared& at) const { return at.tile_full + 8 * (tiles & 1); }
    inline uint phase() const { return tiles >> 1 & 1; }
    inline uint place(const Shared& at) const { return at.tiles + TOLD_BYTES * (tiles % TOLD); }
};

// Threads that bring operands: one, or of pages a warp, whose first thread does what is not for each.
constexpr int BRINGERS = WITH_PAGES ? 32 : 1;

inline bool first_bringer() {
    return BRINGERS == 1 || threadIdx.x == 0;
}

// Tells a barrier how many bytes come, before any of the threads brings some.
inline void expect(uint barrier, uint bytes) {
    if (first_bringer()) mbarrier_arrive_expect_tx(barrier, bytes);
    if (BRINGERS > 1) __syncwarp();
}

// Takes tile after tile from all that there are, tells the others which, and brings its queries, and block after block of keys and values.
inline void bring(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Params& p, const Shared& at) {
    Ring<STAGES> ring;
    Count told;
    Ring<1> queries;
    const int tiles = tiles_of_head(p), all = all_heads(p) * tiles;
    int number = blockIdx.x;
    while (true) {
        // Of two places that of the tile before the last, whose queries were waited for; of four one whose results have left.
        const uint to = told.place(at);
#if WITH_LIST
        const Tile tile = number < all ? tile_of(p, tiles, number) : Tile{-1};
        const Span span = number < all ? span_of(p, tile.batch) : Span{};
        if (first_bringer()) tell(to, tile, span);
#else
        if (first_bringer()) st_shared(to, uint(number));
#endif
        if (first_bringer()) mbarrier_arrive(told.barrier(at));
        told.tiles++;
        if (number >= all) return;
        // Asked for early: the answer takes as long as a step.
        int next = all;
        if (int(gridDim.x) < all && first_bringer()) next = int(gridDim.x) + atomicAdd(p.taken, 1);
#if !WITH_LIST
        const Tile tile = tile_of(p, tiles, number);
        const Span span = span_of(p, tile.batch);
#endif
        const Reach reach = reach_of_tile(p, span, tile);
        const int kv_head = tile.head / p.group;
        Walk walk = walk_of(p, reach, tile.batch, tile.head, tile.tile);
        int block;
        bool partly, any = walk_on(walk, p, reach, block, partly);
        bool first = true;
        do {
            // Asked for before the place is free, too.
            const Piece piece = any ? piece_of(p, span, tile.batch, block) : Piece{0, 0};
            if (any) {
                mbarrier_wait_parity(at.k_free + 8 * ring.stage, ring.phase ^ 1);
                expect(at.k_full + 8 * ring.stage, K_BYTES);
                bring_block<QK_PANELS, QK_THERE>(at.k + ring.stage * K_BYTES, k_map, at.k_full + 8 * ring.stage, span, block, piece, kv_head, tile);
            }
            if (first) {
                mbarrier_wait_parity(at.q_free, queries.phase ^ 1);
                queries.on();
                if (first_bringer()) {
                    if (any) {
                        mbarrier_arrive_expect_tx(at.q_full, Q_BOX_BYTES * QK_PANELS);
                        bring_queries(q_map, at, span, tile);
                    } else {
                        mbarrier_arrive(at.q_full);
                    }
                }
                first = false;
            }
            if (any) {
                mbarrier_wait_parity(at.v_free + 8 * ring.stage, ring.phase ^ 1);
                expect(at.v_full + 8 * ring.stage, V_BYTES);
                bring_block<V_PANELS, V_THERE>(at.v + ring.stage * V_BYTES, v_map, at.v_full + 8 * ring.stage, span, block, piece, kv_head, tile);
                ring.on();
            }
        } while (any && walk_on(walk, p, reach, block, partly));
        number = BRINGERS > 1 ? alike(next) : next;
    }
}

inline void soften_either(bool masked, float (&s)[SCORES], Rows& rows, float (&less)[2], const Params& p, const Captured& captured,
                          const Tile& tile, int first_k) {
    if (MASKED_ANYWHERE || masked) soften<true>(s, rows, less, p, captured, tile, first_k);
    else soften<false>(s, rows, less, p, captured, tile, first_k);
    drop(s, p, tile, first_k);
}

#if WITH_PARTS
// Stores the result of one split of the keys for the combine kernel: outputs in f32, log-sum-exps, the largest scores.
inline void leave_part(const float (&o)[OUTPUTS], const float (&share)[2], const LogSum (&logs)[2], const float (&largest)[2], const Params& p,
                       const Tile& tile, int row) {
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= TILE_ROWS) continue;
        const long at = long(tile.slot) * TILE_ROWS + row + 8 * half;
        if (lane == 0) p.part_logs[at] = float2{logs[half].origin, logs[half].log};
#if WITH_LARGEST
        if (lane == 0) p.part_largest[at] = largest[half];
#endif
        float* const to = p.part_sums + at * DIM_V + 2 * lane;
#pragma unroll
        for (int n = 2 * half; n < OUTPUTS; n += 4) {
            const float of = share[half];
            *(float2*)(to + 2 * (n - 2 * half)) = of == 0.0f ? float2{0.0f, 0.0f} : float2{o[n] * of, o[n + 1] * of};
        }
    }
}
#endif

#if FEW
// Rows of few queries leave by themselves: next to what is read for them they are nothing.
inline void leave_rows(const float (&o)[OUTPUTS], const float (&share)[2], const Params& p, const Span& span, const Tile& tile, int row) {
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (!has_row(p, span, tile, row + 8 * half)) continue;
        unsigned short* const to = output_of(p, span, tile.batch, head_of(tile, row + 8 * half), query_of(tile, row + 8 * half));
        const float of = share[half];
#pragma unroll
        for (int n = 2 * half; n < OUTPUTS; n += 4)
            store_pair(p, to, 2 * (n - 2 * half) + 2 * lane, of == 0.0f ? 0u : pack_pair(Element{}, o[n] * of, o[n + 1] * of));
    }
}
#endif

// What becomes of the rows of a group, once they have met all of their keys.
inline void finish(float (&o)[OUTPUTS], const Rows& rows, bool any, const TensorMap& o_map, const Params& p, const Shared& at,
                   const Tile& before, int group) {
#if WITH_LIST
    // Read again, so that it is not kept from block to block.
    const Tile tile = told_of(before.told);
#else
    const Tile tile = before;
#endif
    const Span span = span_of_tile(p, tile);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, in_warp = lane / 4;
    float share[2], largest[2];
#if WITH_PARTS
    LogSum logs[2];
#endif
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = rows.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        LogSum most = log_of_most(p, rows.from[half]);
        // From what exponentials are relative to up to the largest score.
        float above = (rows.most[half] - rows.from[half]) * p.unit;
        largest[half] = score_of(p, rows.most[half]);
        share[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = group * 64 + warp * 16 + in_warp + 8 * half;
#if WITH_PARTS
        // Without the sink, which parts have together.
        logs[half] = LogSum{most.origin, sum == 0.0f ? -INFINITE : most.log + log2f(sum)};
#endif
#if WITH_SINK
        const float sink = p.sink[min(head_of(tile, row), p.heads_q - 1)];
        const Sunk sunk = with_sink(most, sink);
        if (tile.parts == 1) {
            sum = sum * sunk.part + sunk.own;
            share[half] = sum == 0.0f ? 0.0f : sunk.part / sum;
            // Next to a sink that is above what exponentials were relative to, the largest score may still be above the sink.
            if (sunk.part < 1.0f) above = fmaxf(0.0f, above + log2f(sunk.part));
            most = sunk.most;
            largest[half] = fmaxf(largest[half], sink);
        }
#endif
        const int there = query_of(tile, row);
        if ((lane & 3) == 0 && tile.parts == 1 && has_row(p, span, tile, row)) {
            const LogSum total = {most.origin, sum == 0.0f ? -INFINITE : most.log + log2f(sum)};
            store_statistics(p, stats_place(p, span, tile.batch, head_of(tile, row), there), there < span.len_q, total, largest[half],
                             sum == 0.0f ? 0.0f : sum * ex2_approx(-above));
        }
        if (!any || there >= span.len_q) share[half] = 0.0f;
#if WITH_DROPOUT
        share[half] *= p.dropout_scale;
#endif
    }
#if WITH_PARTS
    if (tile.parts > 1) return leave_part(o, share, logs, largest, p, tile, group * 64 + warp * 16 + in_warp);
#endif
#if FEW
    leave_rows(o, share, p, span, tile, group * 64 + warp * 16 + in_warp);
#else
    // The rows of a warp leave by themselves, once those of the tile before have left.
    const uint rows_at = at.o + (group * 64 + warp * 16) * ROW_BYTES;
    if (lane == 0) cp_async_bulk_wait_group_read();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < OUTPUTS; n += 2) {
        const int half = n >> 1 & 1, chunk = n / 4;
        const float of = share[half];
        const uint both = of == 0.0f ? 0u : pack_pair(Element{}, o[n] * of, o[n + 1] * of);
        const uint to = rows_at + chunk / 8 * Q_PANEL_BYTES + (in_warp + 8 * half) * ROW_BYTES + ((chunk % 8 ^ in_warp) << 4) + (lane & 3) * 4;
        st_shared(to, both);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        const int first = tile.tile * TILE_M + group * 64 + warp * 16;
        for (int panel = 0; panel < V_PANELS; panel++) {
#if WITH_PACKED_Q
            const Clipped rows = clipped<16>(span.begin_q, span.len_q, first);
            const bool there = first < span.len_q && panel < V_THERE;
            if (there) tma_store(rows_at + panel * Q_PANEL_BYTES, o_map, panel * PANEL, rows.skipped, tile.head, rows.end);
#else
            tma_store(rows_at + panel * Q_PANEL_BYTES, o_map, panel * PANEL, first, tile.head, tile.batch);
#endif
        }
        cp_async_bulk_commit_group();
    }
#endif
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attention_forward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                      const __grid_constant__ TensorMap o_map, const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared at = layout(shared_address(memory));
    if (threadIdx.x == 0) {
        mbarrier_init(at.q_full, 1);
        mbarrier_init(at.q_free, WARPS);
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(at.k_full + 8 * stage, 1);
            mbarrier_init(at.v_full + 8 * stage, 1);
            mbarrier_init(at.k_free + 8 * stage, WARPS);
            mbarrier_init(at.v_free + 8 * stage, WARPS);
        }
        for (int stage = 0; stage < 2; stage++) {
            mbarrier_init(at.tile_full + 8 * stage, 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        if (GROUPS > 1) setmaxnreg_dec<BRING_REGISTERS>();
        if (threadIdx.x < BRINGERS) bring(q_map, k_map, v_map, p, at);
        return;
    }
    // One group beside the one that brings has what a thread may have at most.
    if (GROUPS > 1) setmaxnreg_inc<GROUP_REGISTERS>();
    const int group = alike(int(threadIdx.x >> 7)) - 1, lane = threadIdx.x & 31;
    const uint q = at.q + group * 64 * ROW_BYTES;
    Ring<STAGES> ring;
    Count told;
    Ring<1> queries;
    float o[OUTPUTS];
    if (group == GROUPS - 1) turn_ends(group);
    while (true) {
        mbarrier_wait_parity(told.barrier(at), told.phase());
        const uint from = told.place(at);
        told.tiles++;
#if WITH_LIST
        const Tile tile = told_of(from);
        if (tile.tile < 0) break;
#else
        const int number = alike(int(ld_shared(from)));
        if (number >= all_heads(p) * p.tiles) break;
        const Tile tile = tile_of(p, p.tiles, number);
#endif
        const Reach reach = reach_of_tile(p, span_of_tile(p, tile), tile);
        Rows rows = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}, {-INFINITE, -INFINITE}};
        Walk walk = walk_of(p, reach, tile.batch, tile.head, tile.tile);
        int block;
        bool partly;
        const bool any = walk_on(walk, p, reach, block, partly);
        mbarrier_wait_parity(at.q_full, queries.phase);
        queries.on();
        if (any) {
            float s[SCORES];
            uint w[SCORES / 2];
            float less[2];
            uint held[HELD];
            hold_rows(held, q, Q_PANEL_BYTES);
            mbarrier_wait_parity(at.k_full + 8 * ring.stage, ring.phase);
            score(s, q, held, at.k + ring.stage * K_BYTES);
            wgmma_wait_group<0>();
            wgmma_fence_operand(s);
            if (lane == 0) mbarrier_arrive(at.k_free + 8 * ring.stage);
            // The first block is at the edge of most masks: one text less to compile.
            soften<true>(s, rows, less, p, captured, tile, block * TILE_N);
            drop(s, p, tile, block * TILE_N);
            pack(w, s);
            bool add = false;
            int of_values = block;
            while (walk_on(walk, p, reach, block, partly)) {
                const Ring<STAGES> before = ring;
                ring.on();
                mbarrier_wait_parity(at.k_full + 8 * ring.stage, ring.phase);
                turn_begins(group);
                score(s, q, held, at.k + ring.stage * K_BYTES);
                mbarrier_wait_parity(at.v_full + 8 * before.stage, before.phase);
                zero_values(p, tile, of_values, at.v + before.stage * V_BYTES);
                of_values = block;
                weigh(o, w, at.v + before.stage * V_BYTES, add);
                turn_ends(group);
                add = true;
                wgmma_wait_group<1>();
                wgmma_fence_operand(s);
                if (lane == 0) mbarrier_arrive(at.k_free + 8 * ring.stage);
                soften_either(partly, s, rows, less, p, captured, tile, block * TILE_N);
                wgmma_wait_group<0>();
                wgmma_fence_operand(o);
                if (lane == 0) mbarrier_arrive(at.v_free + 8 * before.stage);
                pack(w, s);
                if (__any_sync(~0u, less[0] != 1.0f || less[1] != 1.0f)) {
#pragma unroll
                    for (int m = 0; m < OUTPUTS; m++) o[m] *= less[m >> 1 & 1];
                }
            }
            if (O_APART && lane == 0) mbarrier_arrive(at.q_free);
            mbarrier_wait_parity(at.v_full + 8 * ring.stage, ring.phase);
            zero_values(p, tile, of_values, at.v + ring.stage * V_BYTES);
            weigh(o, w, at.v + ring.stage * V_BYTES, add);
            wgmma_wait_group<0>();
            wgmma_fence_operand(o);
            if (lane == 0) mbarrier_arrive(at.v_free + 8 * ring.stage);
            ring.on();
        }
        finish(o, rows, any, o_map, p, at, tile, group);
        if (lane == 0) {
            // Where results take the place of queries, these come when those have left.
            if (!O_APART) cp_async_bulk_wait_group_read();
            if (!O_APART || !any) mbarrier_arrive(at.q_free);
        }
    }
    if (lane == 0) cp_async_bulk_wait_group_read();
}
