// attention_backward_dq for sm_80 and later: one CTA per query tile, one warp per 16 queries; iterates over KV blocks. No atomics, so the result is
// deterministic.

constexpr int DQ = DIM_QK / 2;

inline void load_step(uint to, const Params& p, int batch, int kv_head, int block) {
    const SeqInfo seq_info = seq_info_of(p, batch);
    // Rows past the length are loaded as zeros: they may hold NaN, and dS of 0 times NaN would be NaN.
    const Extent keys = {seq_info.begin_kv, block * STEP, seq_info.len_kv};
    load_rows<STEP, DIM_QK, K_WIDE>(to, QK_ROW, p.k, batch, kv_head, keys, p.dim_qk);
    load_rows<STEP, DIM_V, V_WIDE>(to + STEP * QK_ROW, V_ROW, p.v, batch, kv_head, keys, p.dim_v);
    cp_async_commit_group();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    attention_backward_dq(const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint q_at = shared_address(memory), d_o_at = q_at + OWN * QK_ROW, steps_at = q_at + OWN_BYTES;
    const int lane = threadIdx.x & 31, warp = warp_uniform(int(threadIdx.x >> 5));
    // The last tiles run first, since they have the most keys under a causal mask.
    const int index = blockIdx.x, heads = p.batch * p.heads_q;
    const int tile = p.tiles - 1 - index / heads, batch = index % heads / p.heads_q, head = index % p.heads_q, kv_head = head / p.group;
    const SeqInfo seq_info = seq_info_of(p, batch);
    const Extent own = {seq_info.begin_q, tile * OWN, rows_q(p, seq_info)};
    const BlockRange range = block_range_of(p, seq_info, tile);
    const int q = tile * OWN + warp * 16 + thread_row(lane);
    RowStatistics row_statistics;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool there = q + 8 * half < own.rows;
        const long row = stats_index(p, seq_info, batch, head, q + 8 * half);
        row_statistics.lse[half] = there ? p.lse[row] : INFINITE;
        row_statistics.delta[half] = there ? p.delta[row] : 0.0f;
    }
    float dq[DQ];
#pragma unroll
    for (int n = 0; n < DQ; n++) dq[n] = 0.0f;
    const bool large = __any_sync(~0u, is_large(row_statistics.lse[0]) || is_large(row_statistics.lse[1]));
    BlockIterator iterator = block_iterator(p, range, batch, head, tile);
    int block;
    bool partial, any = next_block(iterator, p, range, block, partial);
    if (any) {
        // Rows past the length are loaded as zeros: if they held NaN, their P would be NaN instead of 0.
        const Extent known_rows = {seq_info.begin_q, own.first, seq_info.len_q};
        load_rows<OWN, DIM_QK, Q_WIDE>(q_at, QK_ROW, p.q, batch, head, known_rows, p.dim_qk);
        load_rows<OWN, DIM_V, D_O_WIDE>(d_o_at, V_ROW, p.d_o, batch, head, known_rows, p.dim_v);
        load_step(steps_at, p, batch, kv_head, block);
    }
    int stage = 0;
    while (any) {
        const FragmentOrigin origin = {batch, head, q, block * STEP + thread_column(lane)};
        const bool masked = partial;
        any = next_block(iterator, p, range, block, partial);
        const int next = STAGES == 1 ? 0 : stage ^ 1;
        if (STAGES == 2 && any) {
            load_step(steps_at + next * STEP_BYTES, p, batch, kv_head, block);
            cp_async_wait_group<1>();
        } else {
            cp_async_wait_group<0>();
        }
        __syncthreads();
        const uint k_at = steps_at + stage * STEP_BYTES, v_at = k_at + STEP * QK_ROW;
        float s[SCORES], d_p[SCORES], raw[RAW_SCORES];
        warp_gemm_abt<DIM_QK>(s, q_at + warp * 16 * QK_ROW, k_at, QK_ROW);
        recompute_p_step(masked, large, s, raw, p, captured, origin, row_statistics);
        warp_gemm_abt<DIM_V>(d_p, d_o_at + warp * 16 * V_ROW, v_at, V_ROW);
        compute_ds(s, d_p, p, row_statistics, dropout_bits(p, origin));
        score_mod_backward(s, raw, p, captured, origin);
        warp_gemm_ab(dq, s, k_at, QK_ROW);
        // Wait until all warps are done with this stage.
        __syncthreads();
        if (STAGES == 1 && any) load_step(steps_at, p, batch, kv_head, block);
        stage = next;
    }
    const float times[2] = {p.scale, p.scale};
    store_rows<DQ_PAIRS>(p.dq, dq, times, batch, head, own, q, 0, p.dim_qk);
}
