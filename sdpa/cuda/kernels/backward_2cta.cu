// attention_backward for sm_90 and head dims above 128: a 2-CTA cluster per KV block, 64 keys per CTA. A CTA computes S, P and all columns of dK and dV
// for its keys, and half of the columns of dQ over the keys of both CTAs, so the CTAs exchange dS through DSMEM.
// Consumer warpgroup 0 computes S, P and dV and passes P to consumer warpgroup 1, which computes dP, dS and dK. Both compute a panel of dQ. The CTA's
// first warpgroup is the producer.

// Reads the next tile index. Called by a producer thread, which is the only active thread of its warp.
inline int tile_consume_thread_2cta(TilePipeline& tile_pipeline, const SharedStorage& smem) {
    mbarrier_wait_parity_acquire_cluster(tile_pipeline.full(smem), tile_pipeline.phase());
    const int tile_index = int(ld_shared(tile_pipeline.slot(smem)));
    mbarrier_arrive_peer(tile_pipeline.empty(smem), 0);
    tile_pipeline.count++;
    return tile_index;
}

// Returns this CTA's next tile index. CTA 0's producer pulls one number per cluster from the counter, computes both CTAs' tile indices and passes them on.
inline int tile_produce_2cta(TilePipeline& tile_pipeline, const Params& p, const SharedStorage& smem, uint rank) {
    if (rank == 0) {
        mbarrier_wait_parity(tile_pipeline.empty(smem), tile_pipeline.phase() ^ 1);
        const int taken = atomicAdd(p.tile_counter, 1), shares = head_splits_of(p), first = taken / shares * COLUMN_PARTS * shares + taken % shares;
        for (uint other = 0; other < 2; other++) st_mbarrier_arrive_release_cluster(tile_pipeline.slot(smem), uint(first + int(other) * shares),
                                                                                    tile_pipeline.full(smem), other);
        tile_pipeline.count++;
        return first;
    }
    return tile_consume_thread_2cta(tile_pipeline, smem);
}

// Reads the next tile index. Called by whole consumer warps.
inline int tile_consume_2cta(TilePipeline& tile_pipeline, const SharedStorage& smem) {
    mbarrier_wait_parity_acquire_cluster(tile_pipeline.full(smem), tile_pipeline.phase());
    const int tile_index = warp_uniform(int(ld_shared(tile_pipeline.slot(smem))));
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive_peer(tile_pipeline.empty(smem), 0);
    tile_pipeline.count++;
    return tile_index;
}

// Loads K and V of this CTA's keys, and those columns of the peer's K that this CTA's half of dQ needs.
inline void load_kv_2cta(const TensorMap& k_map, const TensorMap& v_map, const SharedStorage& smem, const SeqInfo& seq_info, const Tile& tile) {
    const int own = tile.block * 2 + tile.part, other = own ^ 1;
    mbarrier_arrive_expect_tx(smem.kv_full, K_BYTES + V_BYTES + K_OTHER_BYTES);
    load_kv_rows<KEYS, QK_PANELS, QK_TENSOR_PANELS>(smem.k, k_map, smem.kv_full, seq_info, own, tile.head, tile.batch);
    load_kv_rows<KEYS, V_PANELS, V_TENSOR_PANELS>(smem.v, v_map, smem.kv_full, seq_info, own, tile.head, tile.batch);
    load_kv_rows<KEYS, QK_PANELS / 2, QK_TENSOR_PANELS>(smem.k_other, k_map, smem.kv_full, seq_info, other, tile.head, tile.batch, tile.part * QK_PANELS / 2);
}

// Loads rows of Q or dO: each CTA multicasts half of the panels to both. With packed sequences each CTA loads all panels for itself, since bulk copies of
// zeros replace some of them.
template <int panels, int tensor_panels>
inline void load_q_rows_2cta(uint to, const TensorMap& map, uint barrier, const SeqInfo& seq_info, const Step& step, const Tile& tile) {
#if WITH_PACKED_Q
    load_q_rows<TILE_M, panels, tensor_panels>(to, map, barrier, seq_info, step.queries, step.head, tile.batch);
#else
    for (int panel = tile.part * panels / 2; panel < (tile.part + 1) * panels / 2; panel++) {
        tma_load_multicast(to + panel * Q_PANEL_BYTES, map, barrier, panel * PANEL, step.queries * TILE_M, step.head, tile.batch);
    }
#endif
}

// Producer thread of Q: loads Q for each query tile of the GQA group, and K and V after the first Q.
inline void load_q_steps(PipelineState<STAGES>& pipeline, uint& kv_phase, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Params& p,
                         const SharedStorage& smem, const Tile& tile) {
    const SeqInfo seq_info = seq_info_of(p, tile.batch);
    const BlockRange range = block_range_of(p, seq_info, tile.block);
    StepIterator steps = step_iterator(p, range, tile);
    Step step;
    bool first = true;
    while (next_step(steps, p, range, tile, step)) {
        const uint full = smem.q_full + 8 * pipeline.stage;
        mbarrier_wait_parity(smem.q_empty + 8 * pipeline.stage, pipeline.phase ^ 1);
        mbarrier_arrive_expect_tx(full, Q_BYTES + ROWS_BYTES);
        load_q_rows_2cta<QK_PANELS, QK_TENSOR_PANELS>(smem.q + pipeline.stage * Q_BYTES, q_map, full, seq_info, step, tile);
        cp_async_bulk_load(smem.lse + pipeline.stage * ROWS_BYTES, p.lse + q_tile_index(p, seq_info, tile.batch, step.head, step.queries) * TILE_M, ROWS_BYTES, full);
        pipeline.advance();
        if (first) {
            mbarrier_wait_parity(smem.kv_empty, kv_phase ^ 1);
            load_kv_2cta(k_map, v_map, smem, seq_info, tile);
            kv_phase ^= 1;
            first = false;
        }
    }
    // No query attends to this block, so its dK and dV are zeros. Consumers still stage them in the memory of K and V: pass it to them through kv_empty
    // and kv_full without a load, so that the next K and V are not loaded too early.
    if (first) {
        mbarrier_wait_parity(smem.kv_empty, kv_phase ^ 1);
        mbarrier_arrive(smem.kv_full);
        kv_phase ^= 1;
    }
}

// Producer thread of dO: loads dO for each query tile. It runs in another warp than the producer thread of Q.
inline void load_do_steps(PipelineState<D_O_STAGES>& pipeline, const TensorMap& d_o_map, const Params& p, const SharedStorage& smem, const Tile& tile) {
    const SeqInfo seq_info = seq_info_of(p, tile.batch);
    const BlockRange range = block_range_of(p, seq_info, tile.block);
    StepIterator steps = step_iterator(p, range, tile);
    Step step;
    while (next_step(steps, p, range, tile, step)) {
        const uint full = smem.d_o_full + 8 * pipeline.stage;
        mbarrier_wait_parity(smem.d_o_empty + 8 * pipeline.stage, pipeline.phase ^ 1);
        mbarrier_arrive_expect_tx(full, D_O_BYTES + ROWS_BYTES);
        load_q_rows_2cta<V_PANELS, V_TENSOR_PANELS>(smem.d_o + pipeline.stage * D_O_BYTES, d_o_map, full, seq_info, step, tile);
        cp_async_bulk_load(smem.delta + pipeline.stage * ROWS_BYTES, p.delta + q_tile_index(p, seq_info, tile.batch, step.head, step.queries) * TILE_M,
                           ROWS_BYTES, full);
        pipeline.advance();
    }
}

// The loops of the two producer threads over KV blocks: producer_loop loads Q, K and V, producer_loop_do loads dO.
inline void producer_loop(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Params& p, const SharedStorage& smem, uint rank) {
    PipelineState<STAGES> pipeline;
    TilePipeline tile_pipeline;
    uint kv_phase = 0;
    while (true) {
        const int tile_index = tile_produce_2cta(tile_pipeline, p, smem, rank);
        if (tile_index >= p.all_items) return;
        const Tile tile = tile_at(p, tile_index);
        if (!is_empty(p, tile)) load_q_steps(pipeline, kv_phase, q_map, k_map, v_map, p, smem, tile);
    }
}

inline void producer_loop_do(const TensorMap& d_o_map, const Params& p, const SharedStorage& smem) {
    PipelineState<D_O_STAGES> pipeline;
    TilePipeline tile_pipeline;
    while (true) {
        const int tile_index = tile_consume_thread_2cta(tile_pipeline, smem);
        if (tile_index >= p.all_items) return;
        const Tile tile = tile_at(p, tile_index);
        if (!is_empty(p, tile)) load_do_steps(pipeline, d_o_map, p, smem, tile);
    }
}

// A consumer's position in the pipelines: Q and dS have two stages, dO has D_O_STAGES.
struct StepState : PipelineState<2> {
    inline int d_o_stage() const { return D_O_STAGES == 1 ? 0 : stage; }
    inline int d_o_phase() const { return D_O_STAGES == 1 ? stage : phase; }
};

// State that the consumer functions share: the KV block, the call, and the thread's position in its warpgroup.
struct WarpgroupContext {
    const Params& p;
    const Captured& captured;
    const SharedStorage& smem;
    const Tile& tile;
    const SeqInfo& seq_info;
    const BlockRange& range;
    int warpgroup, warp, lane;

    inline FragmentOrigin origin(const Step& step) const {
        return FragmentOrigin{tile.batch, step.head, step.queries * TILE_M + thread_column(lane),
                              tile.block * TILE_N + tile.part * KEYS + warp * 16 + thread_row(lane)};
    }
    // Place of a step's dQ. Each consumer has a panel of its columns.
    inline DqPlace place(const Step& step) const {
#if FIXED_POINT_DQ
        return dq_place(p, seq_info, tile, step, 0);
#else
        return dq_slice(p, seq_info, tile, step.head, step.queries, tile.part * 2 + warpgroup);
#endif
    }
    // Address of this warp's rows of a step's dS.
    inline uint own_ds(const StepState& step_state) const {
        return smem.d_s + step_state.stage * D_S_BYTES + tile.part * KV_PANEL_BYTES + warp * 16 * ROW_BYTES;
    }
    // Address through which this thread passes or receives P.
    inline uint p_slot() const { return smem.p + (threadIdx.x & 127) * 16; }
    // `release` frees a buffer that only this CTA fills. `release_both_ctas` also arrives on the peer's mbarrier, for buffers that each CTA fills in the
    // peer too.
    inline void release(uint barrier) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barrier);
    }
    inline void release_both_ctas(uint barrier) const {
        __syncwarp();
        if (lane != 0) return;
        mbarrier_arrive(barrier);
        mbarrier_arrive_peer(barrier, tile.part ^ 1);
    }
};

// Zeroes rows of K, and of the peer's K, past the sequence's length. dS is 0 there, but dQ = dS K would be NaN if K were NaN.
inline void zero_k_padding(const WarpgroupContext& ctx) {
#if WITH_SEQ_LEN_KV
    if ((ctx.tile.block + 1) * TILE_N <= ctx.seq_info.len_kv) return;
    const int own = ctx.tile.block * 2 + ctx.tile.part;
    zero_rows<QK_PANELS>(ctx.smem.k, KV_PANEL_BYTES, ctx.seq_info.len_kv - own * KEYS, KEYS);
    zero_rows<QK_PANELS / 2>(ctx.smem.k_other, KV_PANEL_BYTES, ctx.seq_info.len_kv - (own ^ 1) * KEYS, KEYS);
    sync_zeroed_rows();
#endif
}

// Zeroes rows of Q or dO past the sequence's length: dK = dS^T Q and dV = P^T dO read them, and 0 * NaN is NaN.
template <int panels>
inline void zero_q_padding(const WarpgroupContext& ctx, const Step& step, uint smem_address) {
#if WITH_SEQ_LEN_Q
    const int queries = ctx.seq_info.len_q - step.queries * TILE_M;
    if (queries >= TILE_M) return;
    zero_rows<panels>(smem_address, Q_PANEL_BYTES, queries, TILE_M);
    sync_zeroed_rows();
#endif
}

// Issues the GEMM of one panel of the previous step's dQ, over dS of this CTA and then of its peer. Asynchronous.
inline void gemm_dq_previous(float (&dq)[DQ], const StepState& step_state, const WarpgroupContext& ctx) {
    const int before = step_state.stage ^ 1;
    mbarrier_wait_parity(ctx.smem.d_s_full + 8 * before, step_state.phase ^ before);
    const uint d_s = ctx.smem.d_s + before * D_S_BYTES;
    const ulong64 own = descriptor_mn_major(d_s + ctx.tile.part * KV_PANEL_BYTES, KV_PANEL_BYTES);
    const ulong64 other = descriptor_mn_major(d_s + (ctx.tile.part ^ 1) * KV_PANEL_BYTES, KV_PANEL_BYTES);
    const ulong64 k_own = descriptor_mn_major(ctx.smem.k + (ctx.tile.part * 2 + ctx.warpgroup) * KV_PANEL_BYTES, KV_PANEL_BYTES);
    const ulong64 k_other = descriptor_mn_major(ctx.smem.k_other + ctx.warpgroup * KV_PANEL_BYTES, KV_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        wgmma_mn_major(dq, descriptor_advance(own, step * 16 * ROW_BYTES), descriptor_advance(k_own, step * 16 * ROW_BYTES), step > 0);
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        wgmma_mn_major(dq, descriptor_advance(other, step * 16 * ROW_BYTES), descriptor_advance(k_other, step * 16 * ROW_BYTES), true);
    wgmma_commit_group();
}

// Releases the previous step's dS in both CTAs. The caller must already have waited for the WGMMAs that compute dQ.
inline void release_ds(float (&dq)[DQ], const StepState& step_state, const WarpgroupContext& ctx) {
    wgmma_fence_operand(dq);
    ctx.release_both_ctas(ctx.smem.d_s_empty + 8 * (step_state.stage ^ 1));
}

// Adds this consumer's panel of a step's dQ to the accumulator.
inline void add_dq(const float (&dq)[DQ], DqPlace place, const float2& scales, const WarpgroupContext& ctx) {
#if FIXED_POINT_DQ
    red_add_fixed_dq(dq, ctx.p, place, scales, ctx.tile.part * 2 + ctx.warpgroup);
#else
    red_add_dq(dq, place);
#endif
}

// Computes dQ of the last step and adds it to the accumulator.
inline void gemm_dq_last(const StepState& step_state, const WarpgroupContext& ctx, DqPlace place) {
    float dq[DQ];
    gemm_dq_previous(dq, step_state, ctx);
    const float2 scales = dq_scales(ctx.p, place);
    wgmma_wait_group<0>();
    release_ds(dq, step_state, ctx);
    add_dq(dq, place, scales, ctx);
}

inline void gemm_s_next(float (&s)[SCORES], const StepState& step_state, const WarpgroupContext& ctx) {
    const uint none[1] = {0};
    mbarrier_wait_parity(ctx.smem.q_full + 8 * step_state.stage, step_state.phase);
    gemm_s_dp<QK_STEPS>(s, ctx.smem.k, none, ctx.smem.q + step_state.stage * Q_BYTES);
}

// Consumer warpgroup 0: S, P, dV. The next S is issued at the end of a step.
inline void consumer_dv(float (&dv)[DV], StepState& step_state, const WarpgroupContext& ctx) {
    const SharedStorage& smem = ctx.smem;
    StepIterator steps = step_iterator(ctx.p, ctx.range, ctx.tile);
    Step step, next;
    bool has_next = next_step(steps, ctx.p, ctx.range, ctx.tile, step), has_previous = false;
    if (!has_next) return;
    float s[SCORES];
    gemm_s_next(s, step_state, ctx);
    // Place of the previous step's dQ.
    DqPlace place = 0;
    do {
        has_next = next_step(steps, ctx.p, ctx.range, ctx.tile, next);
        const FragmentOrigin origin = ctx.origin(step);
        float raw[RAW_SCORES];
        float2 lse[QUERY_PAIRS];
        uint p_packed[SCORES / 2];
        load_query_pairs(lse, smem.lse + step_state.stage * ROWS_BYTES + 8 * (ctx.lane & 3));
        wgmma_wait_group<0>();
        wgmma_fence_operand(s);
        ctx.release_both_ctas(smem.q_empty + 8 * step_state.stage);
        recompute_p_step(step.partial, s, raw, p_packed, ctx.p, ctx.captured, origin, lse, 0);
        // Wait until the warp of consumer 1 with the same keys has read the previous P.
        mbarrier_wait_parity(smem.p_empty + 8 * ctx.warp, step_state.stage ^ 1);
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) st_shared_v4_f32(ctx.p_slot() + n * 512, s[n], s[n + 1], s[n + 2], s[n + 3]);
        ctx.release(smem.p_full + 8 * ctx.warp);
        const uint d_o = smem.d_o + step_state.d_o_stage() * D_O_BYTES, d_o_empty = smem.d_o_empty + 8 * step_state.d_o_stage();
        mbarrier_wait_parity(smem.d_o_full + 8 * step_state.d_o_stage(), step_state.d_o_phase());
        zero_q_padding<V_PANELS>(ctx, step, d_o);
        if (has_previous) {
            float dq[DQ];
            gemm_dk_dv(dv, p_packed, d_o);
            gemm_dq_previous(dq, step_state, ctx);
            const float2 scales = dq_scales(ctx.p, place);
            wgmma_wait_group<1>();
            wgmma_fence_operand(dv);
            ctx.release_both_ctas(d_o_empty);
            wgmma_wait_group<0>();
            release_ds(dq, step_state, ctx);
            add_dq(dq, place, scales, ctx);
        } else {
            gemm_dk_dv(dv, p_packed, d_o);
            wgmma_wait_group<0>();
            wgmma_fence_operand(dv);
            ctx.release_both_ctas(d_o_empty);
        }
        place = ctx.place(step);
        has_previous = true;
        step_state.advance();
        // Issue the GEMM of the next S last, so that nothing touches its accumulator `s` until the wait for it.
        if (has_next) gemm_s_next(s, step_state, ctx);
        step = next;
    } while (has_next);
    gemm_dq_last(step_state, ctx, place);
}

// Stores dS, after waiting until both CTAs have read the dS of two steps ago, which is in the same buffer.
inline void store_ds(const uint (&ds_packed)[SCORES / 2], const StepState& step_state, const WarpgroupContext& ctx) {
    mbarrier_wait_parity(ctx.smem.d_s_empty + 8 * step_state.stage, step_state.phase ^ 1);
    const uint rows = swizzled_matrix_row(ctx.own_ds(step_state), ctx.lane & 15, ctx.lane);
#pragma unroll
    for (int n = 0; n < SCORES / 2; n += 4) stmatrix_x4(rows ^ n << 3, ds_packed[n], ds_packed[n + 1], ds_packed[n + 2], ds_packed[n + 3]);
}

// Copies this warp's rows of dS to the peer. They are contiguous, so that one bulk copy suffices.
inline void send_ds_to_peer(const StepState& step_state, const WarpgroupContext& ctx) {
    fence_proxy_async();
    __syncwarp();
    if (ctx.lane != 0) return;
    const uint full = ctx.smem.d_s_full + 8 * step_state.stage;
    mbarrier_arrive_expect_tx(full, 16 * ROW_BYTES);
    cp_async_bulk_to_peer(ctx.own_ds(step_state), 16 * ROW_BYTES, full, ctx.tile.part ^ 1);
}

// Consumer warpgroup 1: dP, dS, dK.
inline void consumer_dk(float (&dk)[DK], const Gradients& gradients, StepState& step_state, const WarpgroupContext& ctx) {
    const SharedStorage& smem = ctx.smem;
    StepIterator steps = step_iterator(ctx.p, ctx.range, ctx.tile);
    Step step;
    bool has_previous = false;
    DqPlace place = 0;
    while (next_step(steps, ctx.p, ctx.range, ctx.tile, step)) {
        const FragmentOrigin origin = ctx.origin(step);
        const uint none[1] = {0};
        float s[SCORES], d_p[SCORES], raw[RAW_SCORES];
        float2 delta[QUERY_PAIRS];
        uint ds_packed[SCORES / 2];
        mbarrier_wait_parity(smem.d_o_full + 8 * step_state.d_o_stage(), step_state.d_o_phase());
        gemm_s_dp<V_STEPS>(d_p, smem.v, none, smem.d_o + step_state.d_o_stage() * D_O_BYTES);
        load_query_pairs(delta, smem.delta + step_state.d_o_stage() * ROWS_BYTES + 8 * (ctx.lane & 3));
        wgmma_wait_group<0>();
        wgmma_fence_operand(d_p);
        ctx.release_both_ctas(smem.d_o_empty + 8 * step_state.d_o_stage());
        mbarrier_wait_parity(smem.p_full + 8 * ctx.warp, step_state.stage);
#pragma unroll
        for (int n = 0; n < SCORES; n += 4) {
            const float4 four = ld_shared_v4_f32(ctx.p_slot() + n * 512);
            s[n] = four.x, s[n + 1] = four.y, s[n + 2] = four.z, s[n + 3] = four.w;
        }
        ctx.release(smem.p_empty + 8 * ctx.warp);
        if (ALWAYS_MASKED || WITH_SCORE_MOD || step.partial) compute_ds<true>(s, raw, d_p, ctx.p, ctx.captured, gradients, origin, delta, 0, true);
        else compute_ds<false>(s, raw, d_p, ctx.p, ctx.captured, gradients, origin, delta, 0, true);
        convert_fragment(ds_packed, d_p);
        store_ds(ds_packed, step_state, ctx);
        mbarrier_wait_parity(smem.q_full + 8 * step_state.stage, step_state.phase);
        const uint q = smem.q + step_state.stage * Q_BYTES;
        zero_q_padding<QK_PANELS>(ctx, step, q);
        if (has_previous) {
            float dq[DQ];
            gemm_dk_dv(dk, ds_packed, q);
            send_ds_to_peer(step_state, ctx);
            gemm_dq_previous(dq, step_state, ctx);
            const float2 scales = dq_scales(ctx.p, place);
            wgmma_wait_group<1>();
            wgmma_fence_operand(dk);
            ctx.release_both_ctas(smem.q_empty + 8 * step_state.stage);
            wgmma_wait_group<0>();
            release_ds(dq, step_state, ctx);
            add_dq(dq, place, scales, ctx);
        } else {
            gemm_dk_dv(dk, ds_packed, q);
            send_ds_to_peer(step_state, ctx);
            wgmma_wait_group<0>();
            wgmma_fence_operand(dk);
            ctx.release_both_ctas(smem.q_empty + 8 * step_state.stage);
        }
        place = ctx.place(step);
        has_previous = true;
        step_state.advance();
    }
    if (has_previous) gemm_dq_last(step_state, ctx, place);
}

// Synchronises the two consumer warpgroups, which call this from different places in the code: each waits on a named barrier of its own, on which the
// other arrives. `time` is the number of the call within a KV block. The second call has its own barriers, because threads may not have left the first
// yet. All threads have left both before the next KV block, which uses the same barriers again.
template <int warpgroup>
inline void warpgroups_sync(int time) {
    named_barrier_arrive(BARRIER_WARPGROUPS + 2 * time + (warpgroup ^ 1), 256);
    named_barrier_sync(BARRIER_WARPGROUPS + 2 * time + warpgroup, 256);
}

// Stores dK or dV through the memory of K or V. With head splits, the last CTA to finish the block stores the sum of all.
template <int warpgroup, int count>
inline void store_gradient_2cta(float (&sums)[count], float scale, uint from, const TensorMap& map, int panels, const WarpgroupContext& ctx) {
    bool complete = true;
#if WITH_HEAD_SPLITS
    const SplitSum split_sum = split_sum_of(ctx.p, ctx.tile, warpgroup * 128 * DV, 128 * (DK + DV));
    add_split(split_sum, sums);
    complete = is_last_split(ctx.p, ctx.smem, ctx.tile, warpgroups_sync<warpgroup>);
    if (complete) load_split_sum(sums, split_sum);
#else
    // Wait until both consumers are done with K and V.
    warpgroups_sync<warpgroup>(0);
#endif
    const int first_row = ctx.tile.block * TILE_N + ctx.tile.part * KEYS + ctx.warp * 16;
    if (complete) store_gradient<KV_PANEL_BYTES>(sums, scale, from + ctx.warp * 16 * ROW_BYTES, map, panels, 0, first_row, ctx.seq_info, ctx.tile);
    if (ctx.lane == 0) {
        cp_async_bulk_wait_group_read();
        mbarrier_arrive(ctx.smem.kv_empty);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                       const __grid_constant__ TensorMap d_o_map, const __grid_constant__ TensorMap dq_map, const __grid_constant__ TensorMap dk_map,
                       const __grid_constant__ TensorMap dv_map, const __grid_constant__ Params p, const __grid_constant__ Captured captured,
                       const __grid_constant__ Gradients gradients) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const SharedStorage smem = shared_layout(shared_address(memory));
    const uint rank = cluster_cta_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(smem.kv_full, 1);
        mbarrier_init(smem.kv_empty, WARPS);
        for (int n = 0; n < D_O_STAGES; n++) {
            mbarrier_init(smem.d_o_full + 8 * n, 1);
            mbarrier_init(smem.d_o_empty + 8 * n, 2 * WARPS);
        }
        for (int n = 0; n < STAGES; n++) {
            mbarrier_init(smem.q_full + 8 * n, 1);
            mbarrier_init(smem.q_empty + 8 * n, 2 * WARPS);
        }
        for (int n = 0; n < 2; n++) {
            mbarrier_init(smem.tile_full + 8 * n, 1);
            mbarrier_init(smem.tile_empty + 8 * n, TILE_CONSUMERS_2CTA);
            mbarrier_init(smem.d_s_full + 8 * n, WARPS / 2);
            mbarrier_init(smem.d_s_empty + 8 * n, 2 * WARPS);
        }
        for (int n = 0; n < WARPS / 2; n++) {
            mbarrier_init(smem.p_full + 8 * n, 1);
            mbarrier_init(smem.p_empty + 8 * n, 1);
        }
        fence_mbarrier_init();
    }
    cluster_sync();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) producer_loop(q_map, k_map, v_map, p, smem, rank);
        if (threadIdx.x == 32) producer_loop_do(d_o_map, p, smem);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        const int warpgroup = warp_uniform(int(threadIdx.x >> 7)) - 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
        StepState step_state;
        TilePipeline tile_pipeline;
        uint kv_phase = 0;
        while (true) {
            const int tile_index = tile_consume_2cta(tile_pipeline, smem);
            if (tile_index >= p.all_items) break;
            const Tile tile = tile_at(p, tile_index);
            if (is_empty(p, tile)) continue;
            const SeqInfo seq_info = seq_info_of(p, tile.batch);
            const BlockRange range = without_full_blocks(p, block_range_of(p, seq_info, tile.block));
            const WarpgroupContext ctx = {p, captured, smem, tile, seq_info, range, warpgroup, warp, lane};
            mbarrier_wait_parity(smem.kv_full, kv_phase);
            kv_phase ^= 1;
            zero_k_padding(ctx);
            if (warpgroup == 0) {
                float dv[DV];
#pragma unroll
                for (int n = 0; n < DV; n++) dv[n] = 0.0f;
                consumer_dv(dv, step_state, ctx);
                store_gradient_2cta<0>(dv, 1.0f, smem.v, dv_map, V_TENSOR_PANELS, ctx);
            } else {
                float dk[DK];
#pragma unroll
                for (int n = 0; n < DK; n++) dk[n] = 0.0f;
                consumer_dk(dk, gradients, step_state, ctx);
                store_gradient_2cta<1>(dk, p.scale, smem.k, dk_map, QK_TENSOR_PANELS, ctx);
            }
        }
        if (lane == 0) cp_async_bulk_wait_group_read();
    }
    // A CTA must not exit before the peer's copies and arrivals to it are done.
    cluster_sync();
}
