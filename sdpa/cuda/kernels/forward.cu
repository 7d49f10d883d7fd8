// attention_forward for sm_90, after FlashAttention-3: warp-specialised and persistent. Warpgroup 0 is the producer (TMA); each other warpgroup is a
// consumer with 64 query rows.

constexpr int WARPS = 4 * CONSUMER_WARPGROUPS;
constexpr int PANEL = 64;
constexpr int QK_PANELS = DIM_QK / PANEL;
constexpr int V_PANELS = DIM_V / PANEL;
constexpr int ROW_BYTES = 128;
constexpr uint Q_PANEL_BYTES = CTA_ROWS * ROW_BYTES;
constexpr uint Q_BOX_BYTES = TILE_ROWS * ROW_BYTES;
constexpr uint KV_PANEL_BYTES = TILE_N * ROW_BYTES;
// Packed GQA stores O directly from registers, so O needs no shared memory. Merging splits needs O in f32.
constexpr uint O_BYTES = MERGES_SPLITS ? 2 * Q_PANEL_BYTES * V_PANELS : PACK_GQA ? 0 : Q_PANEL_BYTES * V_PANELS;
constexpr uint Q_BYTES = Q_PANEL_BYTES * (O_HAS_SMEM || QK_PANELS > V_PANELS ? QK_PANELS : V_PANELS);
constexpr uint K_BYTES = KV_PANEL_BYTES * QK_PANELS;
constexpr uint V_BYTES = KV_PANEL_BYTES * V_PANELS;
constexpr int OUTPUTS = DIM_V / 2;

// Zeroes rows of V past the sequence's last key, if this block contains such rows.
inline void zero_v_padding(const Params& p, const Tile& tile, int block, uint v) {
#if WITH_SEQ_LEN_KV || WITH_PAGES
    const int keys = seq_info_of_tile(p, tile).len_kv - block * TILE_N;
    if (keys >= TILE_N) return;
    zero_rows<V_PANELS>(v, KV_PANEL_BYTES, keys, TILE_N);
    sync_zeroed_rows();
#endif
}

// S = Q K^T of a warpgroup, 64 queries by one KV block. Asynchronous; the first k16 steps of Q may be in registers.
inline void gemm_qk(float (&s)[SCORES], uint q, const uint (&q_registers)[Q_REGISTERS], uint k) {
    const ulong64 a = descriptor_k_major(q), b = descriptor_k_major(k);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < QK_STEPS; step++) {
        const uint panel = step / 4, column = step % 4 * 32;
        const ulong64 keys = descriptor_advance(b, panel * KV_PANEL_BYTES + column);
        if (4 * step + 3 < Q_REGISTERS) wgmma_k_major(s, q_registers[4 * step], q_registers[4 * step + 1], q_registers[4 * step + 2],
                                                      q_registers[4 * step + 3], keys, step > 0);
        else wgmma_k_major(s, descriptor_advance(a, panel * Q_PANEL_BYTES + column), keys, step > 0);
    }
    wgmma_commit_group();
}

// O += P V. Asynchronous: P's registers must not be written until the GEMM is done.
inline void gemm_pv(float (&o)[OUTPUTS], const uint (&p_packed)[SCORES / 2], uint v, bool add) {
    const ulong64 b = descriptor_mn_major(v, KV_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_N / 16; step++) {
        const ulong64 rows = descriptor_advance(b, step * 16 * ROW_BYTES);
        wgmma_b_mn_major(o, p_packed[4 * step], p_packed[4 * step + 1], p_packed[4 * step + 2], p_packed[4 * step + 3], rows, add || step > 0);
    }
    wgmma_commit_group();
}

// Applies scale, score_mod and mask to the scores of a KV block, then one step of the online softmax.
template <bool masked>
inline void softmax_of_block(float (&s)[SCORES], SoftmaxState& state, float (&rescale)[2], const Params& p, const Captured& captured, const Tile& tile,
                           int first_k) {
    const int lane = threadIdx.x & 31;
    const int row = (int(threadIdx.x >> 7) - 1) * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;
    const int q[2] = {query_of_row(tile, row), query_of_row(tile, row + 8)};
    const int column = first_k + thread_column(lane);
    if (WITH_SCORE_MOD || p.natural != 0) {
#pragma unroll
        for (int n = 0; n < SCORES; n++) s[n] *= p.scale;
    }
#if WITH_SCORE_MOD || WITH_KEEP
    const int heads[2] = {min(head_of_row(tile, row), p.heads_q - 1), min(head_of_row(tile, row + 8), p.heads_q - 1)};
UNROLL_TRACES
    for (int n = 0; n < SCORES; n++) {
        const int half = fragment_half(n);
        // The column is written out: with fragment_column(n), the loop over a long trace compiles to different machine code.
        const Place at = place_at<!masked>(p, tile.batch, heads[half], PACK_GQA ? q[half] : q[0], column, PACK_GQA ? 0 : 8 * half, 8 * (n / 4) + (n & 1));
#if WITH_SCORE_MOD
        s[n] = score_mod(s[n], at, captured);
#endif
#if WITH_KEEP
        if (masked && !keep(at, captured)) s[n] = -INFINITE;
#endif
    }
#endif
    // Recompute the sequence's band and lengths: keeping them live across the KV loop costs registers.
    if (masked) mask_scores(s, p, seq_info_of_tile(p, tile), q, column);
    online_softmax(s, state, rescale, p);
}

// Zeroes dropped entries of P. The row sums already include them.
inline void apply_dropout(float (&s)[SCORES], const Params& p, const Tile& tile, int first_k) {
#if WITH_DROPOUT
    // The indices are written out as in softmax_of_block: computed by a shared function, they compile to different machine code.
    const int lane = threadIdx.x & 31, k = first_k + 2 * (lane & 3);
    const int row = (int(threadIdx.x >> 7) - 1) * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;
    const auto leave = [&](int n, bool survives) { s[n] = survives ? s[n] : 0.0f; };
    // In a tile of at most 8 queries, `row` and `row + 8` belong to different heads.
    if (!PACK_GQA || TILE_M > 8) {
        dropout_of_queries<SCORES>(p, tile.batch, head_of_row(tile, row), query_of_row(tile, row), k, leave);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++)
            dropout_of_query<SCORES>(p, tile.batch, head_of_row(tile, row + 8 * half), query_of_row(tile, row + 8 * half), k, half, leave);
    }
#endif
}

// Ping-pong scheduling on named barriers: one consumer computes its softmax while another's WGMMAs run.
inline void ping_pong_wait(int warpgroup) {
#if PING_PONG
    named_barrier_sync(1 + warpgroup, 256);
#endif
}

inline void ping_pong_arrive(int warpgroup) {
#if PING_PONG
    named_barrier_arrive(1 + (warpgroup + 1) % CONSUMER_WARPGROUPS, 256);
#endif
}

struct SharedStorage {
    uint q, k, v, o, split_rows;
    uint q_full, q_empty, k_full, v_full, k_empty, v_empty, tile_full, tiles;
};

inline SharedStorage shared_layout(uint base) {
    SharedStorage smem;
    smem.q = base;
    smem.k = smem.q + Q_BYTES;
    smem.v = smem.k + STAGES * K_BYTES;
    smem.o = O_HAS_SMEM ? smem.v + STAGES * V_BYTES : smem.q;
    smem.q_full = smem.v + STAGES * V_BYTES + (O_HAS_SMEM ? O_BYTES : 0);
    smem.q_empty = smem.q_full + 8;
    smem.k_full = smem.q_empty + 8;
    smem.v_full = smem.k_full + 8 * STAGES;
    smem.k_empty = smem.v_full + 8 * STAGES;
    smem.v_empty = smem.k_empty + 8 * STAGES;
    smem.tile_full = smem.v_empty + 8 * STAGES;
    smem.tiles = smem.tile_full + 16;
    smem.split_rows = smem.tiles + TILE_SLOTS * TILE_SLOT_BYTES;
    return smem;
}

// TMA load of Q: the tile's queries, for all heads of the tile.
inline void load_q(const TensorMap& map, const SharedStorage& smem, const SeqInfo& seq_info, const Tile& tile) {
    for (int panel = 0; panel < QK_PANELS; panel++) {
        const uint to = smem.q + panel * Q_PANEL_BYTES;
#if WITH_PACKED_Q
        const VarlenBox rows = varlen_box<TILE_M>(seq_info.begin_q, seq_info.len_q, tile.tile * TILE_M);
        tma_load_panel(to, Q_BOX_BYTES, map, smem.q_full, panel * PANEL, panel < QK_TENSOR_PANELS, rows, tile.head);
#else
        tma_load(to, map, smem.q_full, panel * PANEL, tile.tile * TILE_M, tile.head, tile.batch);
#endif
    }
}

// Paged KV: each producer lane loads PAGE_SLICE rows, which do not cross a page.
struct PageSlice {
    int page, token;
};

// Keys past the sequence's end have no page. They get row 0 of page -1, which is outside of the tensor, so that TMA fills in zeros. Invalid page numbers
// are clamped to the pool.
inline PageSlice page_slice_of(const Params& p, const SeqInfo& seq_info, int batch, int block) {
#if WITH_PAGES
    const int key = block * TILE_N + int(threadIdx.x) * PAGE_SLICE;
    if (int(threadIdx.x) >= TILE_N / PAGE_SLICE || key >= seq_info.len_kv) return PageSlice{-1, 0};
    const int page = p.page_table[long(batch) * p.table_row + key / p.page_size];
    return PageSlice{min(max(page, 0), p.pages - 1), key % p.page_size};
#else
    return PageSlice{0, 0};
#endif
}

// Loads a block of K or V. Panels from `tensor_panels` on have no columns of the tensor and become zeros.
template <int panels, int tensor_panels>
inline void load_kv_block(uint to, const TensorMap& map, uint barrier, const SeqInfo& seq_info, int block, const PageSlice& page_slice, int kv_head, const Tile& tile) {
#if WITH_PAGES
    if (int(threadIdx.x) >= TILE_N / PAGE_SLICE) return;
#endif
    for (int panel = 0; panel < panels; panel++) {
        const uint there = to + panel * KV_PANEL_BYTES;
#if WITH_PAGES
        tma_load(there + int(threadIdx.x) * PAGE_SLICE * ROW_BYTES, map, barrier, panel * PANEL, page_slice.token, kv_head, page_slice.page);
#elif WITH_PACKED_KV
        const VarlenBox rows = varlen_box<TILE_N>(seq_info.begin_kv, seq_info.len_kv, block * TILE_N);
        tma_load_panel(there, KV_PANEL_BYTES, map, barrier, panel * PANEL, panel < tensor_panels, rows, kv_head);
#else
        tma_load(there, map, barrier, panel * PANEL, block * TILE_N, kv_head, tile.batch);
#endif
    }
}

// The consumers' or the producer's position in the ring of tile slots; two mbarriers alternate.
struct TilePipeline {
    int tiles = 0;
    inline uint barrier(const SharedStorage& smem) const { return smem.tile_full + 8 * (tiles & 1); }
    inline uint phase() const { return tiles >> 1 & 1; }
    inline uint slot(const SharedStorage& smem) const { return smem.tiles + TILE_SLOT_BYTES * (tiles % TILE_SLOTS); }
};

// The producer is one thread. For paged KV it is one warp, whose lane 0 does the steps that are needed only once.
constexpr int PRODUCER_THREADS = WITH_PAGES ? 32 : 1;

inline bool is_elected_producer() {
    return PRODUCER_THREADS == 1 || threadIdx.x == 0;
}

// Lane 0 arrives with the byte count before any lane issues a load.
inline void producer_expect_tx(uint barrier, uint bytes) {
    if (is_elected_producer()) mbarrier_arrive_expect_tx(barrier, bytes);
    if (PRODUCER_THREADS > 1) __syncwarp();
}

// Producer: pulls tile indices from the counter, passes them to the consumers, and loads Q and then K and V block by block.
inline void producer_loop(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Params& p, const SharedStorage& smem) {
    PipelineState<STAGES> kv_pipeline;
    TilePipeline tile_pipeline;
    PipelineState<1> q_pipeline;
    const int tiles = tiles_per_head(p), all = head_count(p) * tiles;
    int tile_index = blockIdx.x;
    while (true) {
        // Overwriting this slot needs no wait. With two slots, the slot has the tile before the previous one. Consumers have released that tile's Q, so
        // they have read the slot. With four slots, which the epilogue reads again, consumers have finished the tile in this slot.
        const uint to = tile_pipeline.slot(smem);
#if WITH_TILE_LIST
        const Tile tile = tile_index < all ? tile_at(p, tiles, tile_index) : Tile{-1};
        const SeqInfo seq_info = tile_index < all ? seq_info_of(p, tile.batch) : SeqInfo{};
        if (is_elected_producer()) store_tile(to, tile, seq_info);
#else
        if (is_elected_producer()) st_shared(to, uint(tile_index));
#endif
        if (is_elected_producer()) mbarrier_arrive(tile_pipeline.barrier(smem));
        tile_pipeline.tiles++;
        if (tile_index >= all) return;
        // Pull the next index early: the latency of the atomic is about the time of one KV block.
        int next = all;
        if (int(gridDim.x) < all && is_elected_producer()) next = int(gridDim.x) + atomicAdd(p.tile_counter, 1);
#if !WITH_TILE_LIST
        const Tile tile = tile_at(p, tiles, tile_index);
        const SeqInfo seq_info = seq_info_of(p, tile.batch);
#endif
        const BlockRange range = block_range_of_tile(p, seq_info, tile);
        const int kv_head = tile.head / p.group;
        BlockIterator iterator = block_iterator(p, range, tile.batch, tile.head, tile.tile);
        int block;
        bool partial, any = next_block(iterator, p, range, block, partial);
        bool first = true;
        do {
            // Read the page table before the wait for an empty stage, so that the two latencies overlap.
            const PageSlice page_slice = any ? page_slice_of(p, seq_info, tile.batch, block) : PageSlice{0, 0};
            if (any) {
                mbarrier_wait_parity(smem.k_empty + 8 * kv_pipeline.stage, kv_pipeline.phase ^ 1);
                producer_expect_tx(smem.k_full + 8 * kv_pipeline.stage, K_BYTES);
                load_kv_block<QK_PANELS, QK_TENSOR_PANELS>(smem.k + kv_pipeline.stage * K_BYTES, k_map, smem.k_full + 8 * kv_pipeline.stage, seq_info, block,
                                                           page_slice, kv_head, tile);
            }
            if (first) {
                mbarrier_wait_parity(smem.q_empty, q_pipeline.phase ^ 1);
                q_pipeline.advance();
                if (is_elected_producer()) {
                    if (any) {
                        mbarrier_arrive_expect_tx(smem.q_full, Q_BOX_BYTES * QK_PANELS);
                        load_q(q_map, smem, seq_info, tile);
                    } else {
                        mbarrier_arrive(smem.q_full);
                    }
                }
                first = false;
            }
            if (any) {
                mbarrier_wait_parity(smem.v_empty + 8 * kv_pipeline.stage, kv_pipeline.phase ^ 1);
                producer_expect_tx(smem.v_full + 8 * kv_pipeline.stage, V_BYTES);
                load_kv_block<V_PANELS, V_TENSOR_PANELS>(smem.v + kv_pipeline.stage * V_BYTES, v_map, smem.v_full + 8 * kv_pipeline.stage, seq_info, block,
                                                         page_slice, kv_head, tile);
                kv_pipeline.advance();
            }
        } while (any && next_block(iterator, p, range, block, partial));
        tile_index = PRODUCER_THREADS > 1 ? warp_uniform(next) : next;
    }
}

inline void softmax_step(bool masked, float (&s)[SCORES], SoftmaxState& state, float (&rescale)[2], const Params& p, const Captured& captured,
                         const Tile& tile, int first_k) {
    if (ALWAYS_MASKED || masked) softmax_of_block<true>(s, state, rescale, p, captured, tile, first_k);
    else softmax_of_block<false>(s, state, rescale, p, captured, tile, first_k);
    apply_dropout(s, p, tile, first_k);
}

#if WITH_SPLIT_KV
// Stores the result of one split for attention_combine: O in f32, row sums, row maxima.
inline void store_split(const float (&o)[OUTPUTS], const float (&factor)[2], const float2 (&split_sum)[2], const float (&split_max)[2], const Params& p,
                        const Tile& tile, int row) {
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= TILE_ROWS) continue;
        const long at = long(tile.slot) * TILE_ROWS + row + 8 * half;
        if (lane == 0) p.split_lse[at] = split_sum[half];
#if WITH_SPLIT_MAX
        if (lane == 0) p.split_row_max[at] = split_max[half];
#endif
        float* const to = p.split_o + at * DIM_V + 2 * lane;
#pragma unroll
        for (int n = 2 * half; n < OUTPUTS; n += 4) {
            const float scale = factor[half];
            *(float2*)(to + 2 * (n - 2 * half)) = scale == 0.0f ? float2{0.0f, 0.0f} : float2{o[n] * scale, o[n + 1] * scale};
        }
    }
}
#endif

#if PACK_GQA
// Packed GQA: stores rows of O directly from registers. O is small compared with the K and V that are read for it.
inline void store_packed_gqa(const float (&o)[OUTPUTS], const float (&inverse_sum)[2], const Params& p, const SeqInfo& seq_info, const Tile& tile, int row) {
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (!has_row(p, seq_info, tile, row + 8 * half)) continue;
        unsigned short* const to = output_row(p, seq_info, tile.batch, head_of_row(tile, row + 8 * half), query_of_row(tile, row + 8 * half));
        const float scale = inverse_sum[half];
#pragma unroll
        for (int n = 2 * half; n < OUTPUTS; n += 4)
            store_pair(p, to, 2 * (n - 2 * half) + 2 * lane, scale == 0.0f ? 0u : pack_pair(Element{}, o[n] * scale, o[n + 1] * scale));
    }
}
#endif

// Epilogue of a consumer warpgroup: normalises O, writes statistics, stores O.
inline void epilogue(float (&o)[OUTPUTS], SoftmaxState& state, bool any, const TensorMap& o_map, const Params& p, const SharedStorage& smem,
                     const Tile& before, int warpgroup) {
#if WITH_TILE_LIST
    // Reload the tile: keeping it live across the KV loop costs registers.
    const Tile tile = load_tile(before.smem_address);
#else
    const Tile tile = before;
#endif
    const SeqInfo seq_info = seq_info_of_tile(p, tile);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, in_warp = thread_row(lane);
    float inverse_sum[2], natural_max[2];
#if WITH_SPLIT_KV
    float2 split_sum[2];
#endif
#pragma unroll
    for (int half = 0; half < 2; half++) {
        RowTotal total = row_total(state, half, p);
        const int row = warpgroup * 64 + warp * 16 + in_warp + 8 * half;
#if WITH_SPLIT_KV
        // The sum of a split excludes the sink, which attention_combine adds once.
        const LogSumExp lse = lse_of(total);
        split_sum[half] = FIXED_SPLIT ? float2{reference_of(state, half), total.sum} : float2{lse.origin, lse.log};
#endif
#if WITH_SINK
        const float sink = p.sink[min(head_of_row(tile, row), p.heads_q - 1)];
        if (tile.splits == 1) add_sink(total, sink);
#endif
        inverse_sum[half] = total.inverse_sum;
        natural_max[half] = total.natural_max;
        const int there = query_of_row(tile, row);
        if ((lane & 3) == 0 && tile.splits == 1 && has_row(p, seq_info, tile, row)) {
            store_statistics(p, stats_index(p, seq_info, tile.batch, head_of_row(tile, row), there), there < seq_info.len_q, lse_of(total), total.natural_max,
                             sum_from_max(total));
        }
        if (!any || there >= seq_info.len_q) inverse_sum[half] = 0.0f;
#if WITH_DROPOUT
        inverse_sum[half] *= p.dropout_scale;
#endif
#if FIXED_SPLIT && WITH_SPLIT_KV
        // A split of fixed size is stored as it is: attention_combine merges splits as a CTA with several of them does.
        if (tile.splits > 1) {
            inverse_sum[half] = total.sum == 0.0f ? 0.0f : 1.0f;
            natural_max[half] = state.row_max[half];
        }
#endif
    }
#if WITH_SPLIT_KV
    if (tile.splits > 1) return store_split(o, inverse_sum, split_sum, natural_max, p, tile, warpgroup * 64 + warp * 16 + in_warp);
#endif
#if PACK_GQA
    store_packed_gqa(o, inverse_sum, p, seq_info, tile, warpgroup * 64 + warp * 16 + in_warp);
#else
    // Each warp stores its 16 rows. First it waits until TMA has read the warp's previous rows from shared memory.
    const uint rows_at = smem.o + (warpgroup * 64 + warp * 16) * ROW_BYTES;
    if (lane == 0) cp_async_bulk_wait_group_read();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < OUTPUTS; n += 2) {
        const int half = fragment_half(n), chunk = n / 4;
        const float scale = inverse_sum[half];
        const uint both = scale == 0.0f ? 0u : pack_pair(Element{}, o[n] * scale, o[n + 1] * scale);
        const uint to = rows_at + chunk / 8 * Q_PANEL_BYTES + (in_warp + 8 * half) * ROW_BYTES + ((chunk % 8 ^ in_warp) << 4) + (lane & 3) * 4;
        st_shared(to, both);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        const int first = tile.tile * TILE_M + warpgroup * 64 + warp * 16;
        for (int panel = 0; panel < V_PANELS; panel++) {
#if WITH_PACKED_Q
            const VarlenBox rows = varlen_box<16>(seq_info.begin_q, seq_info.len_q, first);
            const bool there = first < seq_info.len_q && panel < V_TENSOR_PANELS;
            if (there) tma_store(rows_at + panel * Q_PANEL_BYTES, o_map, panel * PANEL, rows.row_offset, tile.head, rows.end);
#else
            tma_store(rows_at + panel * Q_PANEL_BYTES, o_map, panel * PANEL, first, tile.head, tile.batch);
#endif
        }
        cp_async_bulk_commit_group();
    }
#endif
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMER_WARPGROUPS + 1), 1)
    attention_forward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                      const __grid_constant__ TensorMap o_map, const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const SharedStorage smem = shared_layout(shared_address(memory));
    if (threadIdx.x == 0) {
        mbarrier_init(smem.q_full, 1);
        mbarrier_init(smem.q_empty, WARPS);
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(smem.k_full + 8 * stage, 1);
            mbarrier_init(smem.v_full + 8 * stage, 1);
            mbarrier_init(smem.k_empty + 8 * stage, WARPS);
            mbarrier_init(smem.v_empty + 8 * stage, WARPS);
        }
        for (int stage = 0; stage < 2; stage++) {
            mbarrier_init(smem.tile_full + 8 * stage, 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        if (CONSUMER_WARPGROUPS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x < PRODUCER_THREADS) producer_loop(q_map, k_map, v_map, p, smem);
        return;
    }
    // With one consumer warpgroup, threads are launched with the maximum number of registers, so setmaxnreg is not needed.
    if (CONSUMER_WARPGROUPS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int warpgroup = warp_uniform(int(threadIdx.x >> 7)) - 1, lane = threadIdx.x & 31;
    const uint q = smem.q + warpgroup * 64 * ROW_BYTES;
    PipelineState<STAGES> kv_pipeline;
    TilePipeline tile_pipeline;
    PipelineState<1> q_pipeline;
    float o[OUTPUTS];
#if MERGES_SPLITS
    const int first_row = warpgroup * 64 + (threadIdx.x >> 5 & 3) * 16;
    const SplitBuffer buffer = {smem.o + first_row * ROW_BYTES, smem.split_rows + first_row * 12};
#endif
    if (warpgroup == CONSUMER_WARPGROUPS - 1) ping_pong_arrive(warpgroup);
    while (true) {
        mbarrier_wait_parity(tile_pipeline.barrier(smem), tile_pipeline.phase());
        const uint from = tile_pipeline.slot(smem);
        tile_pipeline.tiles++;
#if WITH_TILE_LIST
        const Tile tile = load_tile(from);
        if (tile.tile < 0) break;
#else
        const int tile_index = warp_uniform(int(ld_shared(from)));
        if (tile_index >= head_count(p) * p.tiles) break;
        const Tile tile = tile_at(p, p.tiles, tile_index);
#endif
        const BlockRange range = block_range_of_tile(p, seq_info_of_tile(p, tile), tile);
        SoftmaxState state = empty_softmax();
        BlockIterator iterator = block_iterator(p, range, tile.batch, tile.head, tile.tile);
        int block;
        bool partial;
        const bool any = next_block(iterator, p, range, block, partial);
        mbarrier_wait_parity(smem.q_full, q_pipeline.phase);
        q_pipeline.advance();
        if (any) {
            float s[SCORES];
            uint p_packed[SCORES / 2];
            float rescale[2];
            uint q_registers[Q_REGISTERS];
            load_a_fragments(q_registers, q, Q_PANEL_BYTES);
            mbarrier_wait_parity(smem.k_full + 8 * kv_pipeline.stage, kv_pipeline.phase);
            gemm_qk(s, q, q_registers, smem.k + kv_pipeline.stage * K_BYTES);
            wgmma_wait_group<0>();
            wgmma_fence_operand(s);
            if (lane == 0) mbarrier_arrive(smem.k_empty + 8 * kv_pipeline.stage);
            // The first block always runs the masked path: it is partial under most masks, and this saves one compiled copy of the softmax.
            softmax_of_block<true>(s, state, rescale, p, captured, tile, block * TILE_N);
            apply_dropout(s, p, tile, block * TILE_N);
            convert_fragment(p_packed, s);
            bool add = false;
            int previous_block = block;
#if MERGES_SPLITS
            bool merges = false;
            int split = block / FIXED_SPLIT;
#endif
            while (next_block(iterator, p, range, block, partial)) {
                const PipelineState<STAGES> before = kv_pipeline;
                kv_pipeline.advance();
                mbarrier_wait_parity(smem.k_full + 8 * kv_pipeline.stage, kv_pipeline.phase);
                ping_pong_wait(warpgroup);
                gemm_qk(s, q, q_registers, smem.k + kv_pipeline.stage * K_BYTES);
                mbarrier_wait_parity(smem.v_full + 8 * before.stage, before.phase);
                zero_v_padding(p, tile, previous_block, smem.v + before.stage * V_BYTES);
                previous_block = block;
                gemm_pv(o, p_packed, smem.v + before.stage * V_BYTES, add);
                ping_pong_arrive(warpgroup);
                add = true;
                wgmma_wait_group<1>();
                wgmma_fence_operand(s);
                if (lane == 0) mbarrier_arrive(smem.k_empty + 8 * kv_pipeline.stage);
#if MERGES_SPLITS
                if (block / FIXED_SPLIT != split) {
                    split = block / FIXED_SPLIT;
                    wgmma_wait_group<0>();
                    wgmma_fence_operand(o);
                    // O is in the memory that TMA may still be reading for the previous tile.
                    if (lane == 0) cp_async_bulk_wait_group_read();
                    __syncwarp();
                    finish_split(state);
                    merge_buffer<true>(o, state, buffer, merges, p);
                    state = empty_softmax();
                    merges = true;
                    add = false;
                }
#endif
                softmax_step(partial, s, state, rescale, p, captured, tile, block * TILE_N);
                wgmma_wait_group<0>();
                wgmma_fence_operand(o);
                if (lane == 0) mbarrier_arrive(smem.v_empty + 8 * before.stage);
                convert_fragment(p_packed, s);
                if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
                    for (int m = 0; m < OUTPUTS; m++) o[m] *= rescale[fragment_half(m)];
                }
            }
            if (O_HAS_SMEM && lane == 0) mbarrier_arrive(smem.q_empty);
            mbarrier_wait_parity(smem.v_full + 8 * kv_pipeline.stage, kv_pipeline.phase);
            zero_v_padding(p, tile, previous_block, smem.v + kv_pipeline.stage * V_BYTES);
            gemm_pv(o, p_packed, smem.v + kv_pipeline.stage * V_BYTES, add);
            wgmma_wait_group<0>();
            wgmma_fence_operand(o);
            if (lane == 0) mbarrier_arrive(smem.v_empty + 8 * kv_pipeline.stage);
            kv_pipeline.advance();
#if FIXED_SPLIT
            finish_split(state);
#endif
#if MERGES_SPLITS
            if (merges) merge_buffer<false>(o, state, buffer, true, p);
#endif
        }
        epilogue(o, state, any, o_map, p, smem, tile, warpgroup);
        if (lane == 0) {
            // O shares Q's shared memory, so the next Q may be loaded only after TMA has read O.
            if (!O_HAS_SMEM) cp_async_bulk_wait_group_read();
            if (!O_HAS_SMEM || !any) mbarrier_arrive(smem.q_empty);
        }
    }
    if (lane == 0) cp_async_bulk_wait_group_read();
}
