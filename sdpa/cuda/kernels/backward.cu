// attention_backward for sm_90: persistent and warp-specialised. Warpgroup 0 has the TMA producer and the warps that reduce and convert dQ; two consumer
// warpgroups have 64 keys of a KV block each and iterate over query tiles.
// S and P are transposed, keys by queries, so that P and dS are A operands in registers for dV and dK.

// Zeroes rows of K past the sequence's length. dS is 0 there, but dQ = dS K would be NaN if K were NaN.
inline void zero_k_padding(const SeqInfo& seq_info, const Tile& tile, const SharedStorage& smem) {
#if WITH_SEQ_LEN_KV
    const int rows = seq_info.len_kv - tile.block * TILE_N;
    if (rows >= TILE_N) return;
    zero_rows<QK_PANELS>(smem.k, KV_PANEL_BYTES, rows, TILE_N);
    fence_proxy_async();
    named_barrier_sync(BARRIER_ZEROED, 256);
#endif
}

// Zeroes rows of Q and dO past the sequence's length: dK = dS^T Q and dV = P^T dO read them, and 0 * NaN is NaN.
inline void zero_q_padding(const SeqInfo& seq_info, int tile, uint q, uint d_o) {
#if WITH_SEQ_LEN_Q
    const int queries = seq_info.len_q - tile * TILE_M;
    if (queries >= TILE_M) return;
    // Wait until both consumers have read these rows for S and dP. The barrier after the stores lets both see the zeros.
    named_barrier_sync(BARRIER_ZEROED, 256);
    zero_rows<QK_PANELS>(q, Q_PANEL_BYTES, queries, TILE_M);
    zero_rows<V_PANELS>(d_o, Q_PANEL_BYTES, queries, TILE_M);
    fence_proxy_async();
    named_barrier_sync(BARRIER_ZEROED, 256);
#endif
}

// Waits for the GEMM of dV, leaving `under_way` later WGMMA groups in flight, and releases the stage of dO.
template <int under_way>
inline void wait_dv(float (&dv)[DV], uint d_o_empty) {
    wgmma_wait_group<under_way>();
    wgmma_fence_operand(dv);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(d_o_empty);
}

// The consumers' position in the pipelines: dS has two stages, Q and dO have STAGES.
struct StepState : PipelineState<2> {
    static_assert(STAGES <= 2, "places of operands follow from those of gradients of scores");
    inline int operand_stage() const { return STAGES == 1 ? 0 : stage; }
    inline int operand_phase() const { return STAGES == 1 ? stage : phase; }
};

// Returns the number of a step, modulo 4.
inline int scale_stage(const PipelineState<2>& pipeline) { return 2 * pipeline.phase + pipeline.stage; }

// Whether the fixed-point scales of a step are loaded at its end. dQ of the step is complete in the next one, long after the loads.
constexpr bool SCALES_AHEAD = FIXED_POINT_DQ && DQ_BY_TMA && !STAGED_SCALES;

// Loads the fixed-point scales of a thread's queries of the previous step, whose dQ has this place.
inline float2 previous_scales(const Params& p, const StepState& step_state, const SharedStorage& smem, DqPlace place) {
#if STAGED_SCALES
    const uint at = smem.dq_scales + ((scale_stage(step_state) + 3) & 3) * ROWS_BYTES + 4 * (place % TILE_M);
    return float2{__uint_as_float(ld_shared(at)), __uint_as_float(ld_shared(at + 32))};
#else
    return dq_scales(p, place);
#endif
}

// Loads K, V and, for each query tile of all heads of the GQA group, dO and Q. The first query tile is loaded before K and V, whose buffers the previous
// KV block may still use.
inline void load_tile(PipelineState<STAGES>& pipeline, uint& kv_phase, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& d_o_map,
                      const Params& p, const SharedStorage& smem, const Tile& tile) {
    const SeqInfo seq_info = seq_info_of(p, tile.batch);
    const BlockRange range = block_range_of(p, seq_info, tile.block);
    const HeadRange heads = head_range_of(p, tile);
    bool first = true;
    for (int head_in_group = heads.begin; head_in_group < heads.end; head_in_group++) {
        const int head = tile.head * p.group + head_in_group;
        BlockIterator iterator = block_iterator(p, range, tile.batch, head, tile.block);
        int queries;
        bool partial;
        while (next_block(iterator, p, range, queries, partial)) {
            const long rows = q_tile_index(p, seq_info, tile.batch, head, queries) * TILE_M;
            // dO is loaded before Q, because consumers release it first.
            mbarrier_wait_parity(smem.d_o_empty + 8 * pipeline.stage, pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(smem.d_o_full + 8 * pipeline.stage, D_O_BYTES + ROWS_BYTES);
            cp_async_bulk_load(smem.delta + pipeline.stage * ROWS_BYTES, p.delta + rows, ROWS_BYTES, smem.d_o_full + 8 * pipeline.stage);
            load_q_rows<TILE_M, V_PANELS, V_TENSOR_PANELS>(smem.d_o + pipeline.stage * D_O_BYTES, d_o_map, smem.d_o_full + 8 * pipeline.stage, seq_info, queries, head,
                                                           tile.batch);
            mbarrier_wait_parity(smem.q_empty + 8 * pipeline.stage, pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(smem.q_full + 8 * pipeline.stage, Q_BYTES + ROWS_BYTES + (SCALE_STAGES > 0 ? ROWS_BYTES : 0));
#if STAGED_SCALES
            cp_async_bulk_load(smem.dq_scales + scale_stage(pipeline) * ROWS_BYTES, p.dq_scale + rows, ROWS_BYTES, smem.q_full + 8 * pipeline.stage);
#endif
            cp_async_bulk_load(smem.lse + pipeline.stage * ROWS_BYTES, p.lse + rows, ROWS_BYTES, smem.q_full + 8 * pipeline.stage);
            load_q_rows<TILE_M, QK_PANELS, QK_TENSOR_PANELS>(smem.q + pipeline.stage * Q_BYTES, q_map, smem.q_full + 8 * pipeline.stage, seq_info, queries, head,
                                                             tile.batch);
            pipeline.advance();
            if (first) {
                mbarrier_wait_parity(smem.kv_empty, kv_phase ^ 1);
                mbarrier_arrive_expect_tx(smem.kv_full, K_BYTES + V_BYTES);
                load_kv_rows<TILE_N, QK_PANELS, QK_TENSOR_PANELS>(smem.k, k_map, smem.kv_full, seq_info, tile.block, tile.head, tile.batch);
                load_kv_rows<TILE_N, V_PANELS, V_TENSOR_PANELS>(smem.v, v_map, smem.kv_full, seq_info, tile.block, tile.head, tile.batch);
                kv_phase ^= 1;
                first = false;
            }
        }
    }
    // No query attends to this block, so its dK and dV are zeros. Consumers still stage dV in the memory of K: pass that memory to them through kv_empty
    // and kv_full without a load, so that the next K is not loaded too early.
    if (!DQ_BY_TMA && first) {
        mbarrier_wait_parity(smem.kv_empty, kv_phase ^ 1);
        mbarrier_arrive(smem.kv_full);
        kv_phase ^= 1;
    }
}

// Producer: pulls KV blocks from the counter and loads their operands.
inline void producer_loop(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& d_o_map, const Params& p,
                          const SharedStorage& smem) {
    PipelineState<STAGES> pipeline;
    TilePipeline tile_pipeline;
    uint kv_phase = 0;
    while (true) {
        const int tile_index = tile_produce(tile_pipeline, p, smem);
        if (tile_index >= p.all_items) return;
        if (tile_index >= p.block_items) continue;
        const Tile tile = tile_at(p, tile_index);
        if (!is_empty(p, tile)) load_tile(pipeline, kv_phase, q_map, k_map, v_map, d_o_map, p, smem, tile);
    }
}

#if DQ_BY_TMA
// Adds each step's dQ slices to the f32 accumulator by bulk reductions. The consumers store the slices in shared memory and go on while the slices are
// reduced.
inline void reduce_dq_of_tile(const Params& p, const SharedStorage& smem, const Tile& tile) {
    const SeqInfo seq_info = seq_info_of(p, tile.batch);
    const BlockRange range = block_range_of(p, seq_info, tile.block);
    StepIterator steps = step_iterator(p, range, tile);
    Step step;
    const bool first = threadIdx.x == 32;
    // Wait until the L2 section that used these slices of the ring before has been converted.
    if (first && p.ring_sections > 0 && tile.section >= p.ring_sections) counter_acquire_wait(p.slices_converted + tile.section - p.ring_sections, section_slices(p, tile.section - p.ring_sections));
    while (true) {
        const bool has_next = next_step(steps, p, range, tile, step);
        // For each consumer warpgroup, wait until the reduction has read its slice from shared memory, then report the slice as empty.
        if (first) cp_async_bulk_wait_group_read<1>();
        __syncwarp();
        named_barrier_arrive(BARRIER_DQ_EMPTY, 160);
        if (first) cp_async_bulk_wait_group_read();
        __syncwarp();
        named_barrier_arrive(BARRIER_DQ_EMPTY + 1, 160);
        if (!has_next) return;
        for (int warpgroup = 0; warpgroup < 2; warpgroup++) {
            named_barrier_sync(BARRIER_DQ_FULL + warpgroup, 160);
            if (first) {
                float* const to = dq_slice(p, seq_info, tile, step.head, step.queries, warpgroup);
#if FIXED_POINT_DQ
                if (warpgroup == 0) atomicAdd(p.dq_parts + q_tile_index(p, seq_info, tile.batch, step.head, step.queries), 1);
                cp_reduce_async_bulk_add((uint*)to, smem.dq_slices + warpgroup * DQ_SLICE_BYTES, DQ_SLICE_BYTES);
#else
                cp_reduce_async_bulk_add(to, smem.dq_slices + warpgroup * DQ_SLICE_BYTES, DQ_SLICE_BYTES);
#endif
                cp_async_bulk_commit_group();
            }
        }
    }
}

// The dQ reduce warp: reduces dQ of each KV block, and counts the finished blocks of each L2 section.
inline void dq_reduce_warp(const Params& p, const SharedStorage& smem) {
    TilePipeline tile_pipeline;
    while (true) {
        const int tile_index = tile_consume(tile_pipeline, smem);
        if (tile_index >= p.all_items) return;
        if (tile_index >= p.block_items) continue;
        const Tile tile = tile_at(p, tile_index);
        const bool none = is_empty(p, tile);
        if (!none) reduce_dq_of_tile(p, smem, tile);
        if (threadIdx.x == 32) {
            cp_async_bulk_wait_group();
            counter_release_add(p.blocks_done + tile.section, 1);
        }
        // Consumers also stage dV in the memory of the dQ slices. Wait until they have issued its stores before going on to the next block.
        for (int warpgroup = 0; warpgroup < 2 && !none; warpgroup++) named_barrier_sync(BARRIER_DQ_FULL + warpgroup, 160);
    }
}

// Stores a consumer's dQ slice in shared memory for the dQ reduce warp. Each warp's piece is in register order, not row-major, because the accumulator is
// in register order too. The warpgroup index is recomputed: keeping it live costs a register that WGMMA operands need.
// With fixed-point sums, `scales` has the scales of the thread's queries.
inline void store_dq(const float (&sums)[DQ], const Params& p, DqPlace place, const float2& scales, int, uint at) {
    const int warpgroup = warp_uniform(int(threadIdx.x >> 7)) - 1;
    named_barrier_sync(BARRIER_DQ_EMPTY + warpgroup, 160);
    at += warpgroup * DQ_SLICE_BYTES + (threadIdx.x >> 5 & 3) * DQ_PIECE_BYTES + (threadIdx.x & 31) * 16;
    const auto store = [&](const auto& part) {
#pragma unroll
        for (int n = 0; n < DQ; n += 4) st_shared_v4_f32(at + n * 128, part(n), part(n + 1), part(n + 2), part(n + 3));
    };
#if FIXED_POINT_DQ
    store([&](int n) { return __uint_as_float(rounded_dq(sums, n, scales)); });
    fence_proxy_async();
    // The check comes last, so that neither the stores nor the fence wait for it.
    if (__builtin_expect(!rounds_right(sums, scales), 0)) {
        uint parts[DQ];
        round_any_dq(parts, sums, scales, p.dq_scale + place);
        store([&](int n) { return __uint_as_float(parts[n]); });
        fence_proxy_async();
    }
#else
    store([&](int n) { return sums[n]; });
    fence_proxy_async();
#endif
    named_barrier_arrive(BARRIER_DQ_FULL + warpgroup, 160);
}
#else
inline void store_dq(const float (&sums)[DQ], const Params& p, DqPlace place, const float2& scales, int slice, uint) {
#if FIXED_POINT_DQ
    red_add_fixed_dq(sums, p, place, scales, slice);
#else
    red_add_dq(sums, place);
#endif
}
#endif

// Issues the GEMM of the previous step's dQ, over dS of both consumers. It runs one step late, so that no consumer waits for the other's dS of the current
// step.
inline void gemm_dq_previous(float (&dq)[DQ], const StepState& step_state, const SharedStorage& smem, uint own_d_s, uint own_k) {
    const int before = step_state.stage ^ 1;
    mbarrier_wait_parity(smem.d_s_full + 8 * before, step_state.phase ^ before);
    gemm_dq(dq, smem.d_s + before * D_S_BYTES + own_d_s, smem.k + own_k);
}

// Finishes dQ of the previous step: releases the dS stage and stores dQ. The caller must already have waited for the WGMMAs that compute dQ.
inline void finish_dq_previous(float (&dq)[DQ], const Params& p, DqPlace place, const float2& scales, int slice, const StepState& step_state,
                               const SharedStorage& smem) {
    wgmma_fence_operand(dq);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(smem.d_s_empty + 8 * (step_state.stage ^ 1));
    store_dq(dq, p, place, scales, slice, smem.dq_slices);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                       const __grid_constant__ TensorMap d_o_map, const __grid_constant__ TensorMap dq_map, const __grid_constant__ TensorMap dk_map,
                       const __grid_constant__ TensorMap dv_map, const __grid_constant__ Params p, const __grid_constant__ Captured captured,
                       const __grid_constant__ Gradients gradients) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const SharedStorage smem = shared_layout(shared_address(memory));
    if (threadIdx.x == 0) {
        mbarrier_init(smem.kv_full, 1);
        mbarrier_init(smem.kv_empty, WARPS);
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(smem.q_full + 8 * stage, 1);
            mbarrier_init(smem.d_o_full + 8 * stage, 1);
            mbarrier_init(smem.q_empty + 8 * stage, WARPS);
            mbarrier_init(smem.d_o_empty + 8 * stage, WARPS);
        }
        for (int n = 0; n < 2; n++) {
            mbarrier_init(smem.tile_full + 8 * n, 1);
            mbarrier_init(smem.tile_empty + 8 * n, TILE_CONSUMER_WARPS);
        }
        for (int n = 0; n < 2; n++) {
            mbarrier_init(smem.d_s_full + 8 * n, WARPS);
            mbarrier_init(smem.d_s_empty + 8 * n, WARPS);
        }
        for (int n = 0; n < 4; n++) mbarrier_init(smem.dq_pieces_full + 8 * n, 1);
        fence_mbarrier_init();
    }
    if (DQ_BY_TMA && threadIdx.x * 16 < DQ_PIECE_BYTES) {
        st_shared_v4_f32(smem.zeros + threadIdx.x * 16, 0.0f, 0.0f, 0.0f, 0.0f);
        fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) producer_loop(q_map, k_map, v_map, d_o_map, p, smem);
#if DQ_BY_TMA
        const int job = warp_uniform(int(threadIdx.x >> 5));
        if (job == 1) dq_reduce_warp(p, smem);
        else if (job > 1) dq_convert_warp(dq_map, p, smem);
#endif
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int warpgroup = warp_uniform(int(threadIdx.x >> 7)) - 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const uint own_rows = warpgroup * 64 * ROW_BYTES;
    StepState step_state;
    TilePipeline tile_pipeline;
    uint kv_phase = 0;
    while (true) {
        const int tile_index = tile_consume(tile_pipeline, smem);
        if (tile_index >= p.all_items) break;
        if (tile_index >= p.block_items) continue;
        const Tile tile = tile_at(p, tile_index);
        if (is_empty(p, tile)) continue;
        // Wait until TMA has read the previous block's gradients from shared memory.
        if (lane == 0) cp_async_bulk_wait_group_read();
        __syncwarp();
        // Each consumer computes 64 query rows of dQ (TILE_M = 128), or one panel of its columns (TILE_M = 64).
        const uint own_d_s = TILE_M == 128 ? warpgroup * KV_PANEL_BYTES : 0, own_k = TILE_M == 128 ? 0 : (tile.part * 2 + warpgroup) * KV_PANEL_BYTES;
        // With COLUMN_PARTS = 2, two CTAs recompute the same scores, each for its own columns of dK and dV. Only one may add parameter gradients.
        const bool owns_scores = COLUMN_PARTS == 1 || tile.part == 0;
        const SeqInfo seq_info = seq_info_of(p, tile.batch);
        const BlockRange range = without_full_blocks(p, block_range_of(p, seq_info, tile.block));
        float dk[DK], dv[DV];
#pragma unroll
        for (int n = 0; n < DK; n++) dk[n] = 0.0f;
#pragma unroll
        for (int n = 0; n < DV; n++) dv[n] = 0.0f;
        StepIterator steps = step_iterator(p, range, tile);
        Step step, next;
        float s[SCORES];
        bool has_next = next_step(steps, p, range, tile, step), has_previous = false;
        const bool any = has_next;
        if (any) {
            mbarrier_wait_parity(smem.kv_full, kv_phase);
            kv_phase ^= 1;
            zero_k_padding(seq_info, tile, smem);
            uint k_registers[K_REGISTERS], v_registers[V_REGISTERS];
            load_a_fragments(k_registers, smem.k + own_rows, KV_PANEL_BYTES);
            load_a_fragments(v_registers, smem.v + own_rows, KV_PANEL_BYTES);
            // Place of the previous step's dQ. Without TMA, the slice is this consumer's panel of columns.
            DqPlace place = 0;
            float2 scales = {0.0f, 0.0f};
            const int slice = DQ_BY_TMA ? 0 : tile.part * 2 + warpgroup;
            if (PREFETCH_S) {
                mbarrier_wait_parity(smem.q_full + 8 * step_state.operand_stage(), step_state.operand_phase());
                gemm_s_dp<QK_STEPS>(s, smem.k + own_rows, k_registers, smem.q + step_state.operand_stage() * Q_BYTES);
            }
            do {
                const uint q = smem.q + step_state.operand_stage() * Q_BYTES, d_o = smem.d_o + step_state.operand_stage() * D_O_BYTES;
                const uint d_s = smem.d_s + step_state.stage * D_S_BYTES;
                if (!NEXT_STEP_LAST) has_next = next_step(steps, p, range, tile, next);
                if (!PREFETCH_S) mbarrier_wait_parity(smem.q_full + 8 * step_state.operand_stage(), step_state.operand_phase());
#pragma unroll
                for (int sub = 0; sub < Q_SUBTILES; sub++) {
                    const FragmentOrigin origin = {tile.batch, step.head, step.queries * TILE_M + sub * 64 + thread_column(lane),
                                           tile.block * TILE_N + warpgroup * 64 + warp * 16 + thread_row(lane)};
                    const uint sub_rows = sub * 64 * ROW_BYTES, row_bytes_at = step_state.operand_stage() * ROWS_BYTES + sub * 64 * 4 + 8 * (lane & 3);
                    const uint q_columns = q + sub_rows + tile.part * DK_PANELS * Q_PANEL_BYTES, d_o_columns = d_o + sub_rows + tile.part * DV_PANELS * Q_PANEL_BYTES;
                    float d_p[SCORES], raw[RAW_SCORES];
                    float2 lse[QUERY_PAIRS], delta[QUERY_PAIRS];
                    uint p_packed[SCORES / 2], ds_packed[SCORES / 2];
                    // Compute the dropout mask early, while few other values occupy registers.
                    const uint dropout_mask = dropout_bits(p, origin);
                    if (LSE_FIRST) load_query_pairs(lse, smem.lse + row_bytes_at);
                    if (!PREFETCH_S || sub > 0) gemm_s_dp<QK_STEPS>(s, smem.k + own_rows, k_registers, q + sub_rows);
                    if (sub == 0) mbarrier_wait_parity(smem.d_o_full + 8 * step_state.operand_stage(), step_state.operand_phase());
                    gemm_s_dp<V_STEPS>(d_p, smem.v + own_rows, v_registers, d_o + sub_rows);
                    if (!LSE_FIRST) load_query_pairs(lse, smem.lse + row_bytes_at);
                    wgmma_wait_group<1>();
                    wgmma_fence_operand(s);
                    recompute_p_step(step.partial, s, raw, p_packed, p, captured, origin, lse, dropout_mask);
                    // Load delta before waiting for dP, unless registers are short.
                    if (!LOW_REGISTERS) load_query_pairs(delta, smem.delta + row_bytes_at);
                    wgmma_wait_group<0>();
                    wgmma_fence_operand(d_p);
                    if (sub == 0) zero_q_padding(seq_info, step.queries, q, d_o);
                    if (LOW_REGISTERS) load_query_pairs(delta, smem.delta + row_bytes_at);
                    if (ALWAYS_MASKED || WITH_SCORE_MOD || step.partial) compute_ds<true>(s, raw, d_p, p, captured, gradients, origin, delta, dropout_mask,
                                                                                          owns_scores);
                    else compute_ds<false>(s, raw, d_p, p, captured, gradients, origin, delta, dropout_mask, owns_scores);
                    convert_fragment(ds_packed, d_p);
                    // Wait until both consumers have read the dS of two steps ago, which is in the same buffer.
                    if (sub == 0) mbarrier_wait_parity(smem.d_s_empty + 8 * step_state.stage, step_state.phase ^ 1);
                    // dS is stored transposed: rows are keys, and a panel has 64 queries.
                    const uint d_s_at = swizzled_matrix_row(d_s + sub * KV_PANEL_BYTES + own_rows, warp * 16 + (lane & 15), lane);
#pragma unroll
                    for (int n = 0; n < SCORES / 2; n += 4) stmatrix_x4(d_s_at ^ n << 3, ds_packed[n], ds_packed[n + 1], ds_packed[n + 2], ds_packed[n + 3]);
                    // Issue the WGMMAs of dV first, since they do not read dS: fence.proxy.async waits for this thread's stores of dS.
                    const auto values = [&] {
                        gemm_dk_dv(dv, p_packed, d_o_columns);
                        if (sub + 1 < Q_SUBTILES) return;
                        fence_proxy_async();
                        __syncwarp();
                        if (lane == 0) mbarrier_arrive(smem.d_s_full + 8 * step_state.stage);
                    };
                    if (sub + 1 < Q_SUBTILES) {
                        values();
                        gemm_dk_dv(dk, ds_packed, q_columns);
                    } else if (has_previous) {
                        float dq[DQ];
                        values();
                        gemm_dq_previous(dq, step_state, smem, own_d_s, own_k);
                        if (!SCALES_AHEAD) scales = previous_scales(p, step_state, smem, place);
                        wait_dv<1>(dv, smem.d_o_empty + 8 * step_state.operand_stage());
                        gemm_dk_dv(dk, ds_packed, q_columns);
                        wgmma_wait_group<1>();
                        finish_dq_previous(dq, p, place, scales, slice, step_state, smem);
                        wgmma_wait_group<0>();
                        wgmma_fence_operand(dk);
                    } else {
                        values();
                        gemm_dk_dv(dk, ds_packed, q_columns);
                        wait_dv<1>(dv, smem.d_o_empty + 8 * step_state.operand_stage());
                        wgmma_wait_group<0>();
                        wgmma_fence_operand(dk);
                    }
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(smem.q_empty + 8 * step_state.operand_stage());
#if FIXED_POINT_DQ
                place = dq_place(p, seq_info, tile, step, TILE_M == 128 ? warpgroup * 64 : 0);
#else
                if (!DQ_BY_TMA) place = dq_slice(p, seq_info, tile, step.head, step.queries, slice);
#endif
                step_state.advance();
                if (SCALES_AHEAD) scales = previous_scales(p, step_state, smem, place);
                if (NEXT_STEP_LAST) has_next = next_step(steps, p, range, tile, next);
                has_previous = true;
                // Prefetch: issue the GEMM of the next S at the end of this step. It comes last, so that nothing touches its accumulator `s` until the
                // wait for it.
                if (PREFETCH_S && has_next) {
                    mbarrier_wait_parity(smem.q_full + 8 * step_state.operand_stage(), step_state.operand_phase());
                    gemm_s_dp<QK_STEPS>(s, smem.k + own_rows, k_registers, smem.q + step_state.operand_stage() * Q_BYTES);
                }
                step = next;
            } while (has_next);
            float dq[DQ];
            gemm_dq_previous(dq, step_state, smem, own_d_s, own_k);
            if (!SCALES_AHEAD) scales = previous_scales(p, step_state, smem, place);
            wgmma_wait_group<0>();
            finish_dq_previous(dq, p, place, scales, slice, step_state, smem);
            // Release K and V: dK and dV are staged in the memory of dS and of the dQ slices, so the next K and V can be loaded at the same time.
            if (DQ_BY_TMA && lane == 0) mbarrier_arrive(smem.kv_empty);
        } else if (!DQ_BY_TMA) {
            mbarrier_wait_parity(smem.kv_full, kv_phase);
            kv_phase ^= 1;
        }
#if LOW_REGISTERS || WITH_PACKED_KV
        // Recompute the tile: keeping it live across the loop costs registers.
        const Tile done = tile_at(p, opaque_int(tile_index));
#else
        const Tile& done = tile;
#endif
        bool complete = true;
#if WITH_HEAD_SPLITS
        const SplitSum split_sum = split_sum_of(p, done, warpgroup * 128 * (DK + DV), 2 * 128 * (DK + DV));
        add_split(split_sum, dk);
        add_split(split_sum.beyond(128 * DK), dv);
        complete = is_last_split(p, smem, done, [](int) { named_barrier_sync(BARRIER_CONSUMERS, 256); });
        if (complete) {
            load_split_sum(dk, split_sum);
            load_split_sum(dv, split_sum.beyond(128 * DK));
        }
#else
        // Wait until both consumers are done with K, V and dS.
        named_barrier_sync(BARRIER_CONSUMERS, 256);
#endif
        const uint in_group = warp * 16 * ROW_BYTES;
        const int first_row = done.block * TILE_N + warpgroup * 64 + warp * 16;
        const float dv_scale = WITH_DROPOUT ? p.dropout_scale : 1.0f;
        if (complete) store_gradient<KV_PANEL_BYTES>(dk, p.scale, smem.d_s + own_rows + in_group, dk_map, QK_TENSOR_PANELS, done.part * DK_PANELS, first_row,
                                                     seq_info, done);
#if DQ_BY_TMA
        named_barrier_sync(BARRIER_DQ_EMPTY + warpgroup, 160);
        if (complete) store_gradient<64 * ROW_BYTES>(dv, dv_scale, smem.dq_slices + warpgroup * DQ_SLICE_BYTES + in_group, dv_map, V_TENSOR_PANELS, 0,
                                                     first_row, seq_info, done);
        named_barrier_arrive(BARRIER_DQ_FULL + warpgroup, 160);
#else
        if (complete) store_gradient<KV_PANEL_BYTES>(dv, dv_scale, smem.k + own_rows + in_group, dv_map, V_TENSOR_PANELS, done.part * DV_PANELS, first_row,
                                                     seq_info, done);
        if (lane == 0) {
            cp_async_bulk_wait_group_read();
            mbarrier_arrive(smem.kv_empty);
        }
#endif
    }
    if (lane == 0) cp_async_bulk_wait_group_read();
}
