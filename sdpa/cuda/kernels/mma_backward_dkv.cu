// attention_backward_dkv for sm_80 and later: dK and dV, and parameter gradients. One CTA per KV block, one warp per 16 keys; iterates over the query
// tiles of all heads of the GQA group. No atomics, except for parameter gradients.

constexpr int DK = DIM_QK / COLUMN_PARTS / 2;
constexpr int DV = DIM_V / COLUMN_PARTS / 2;

// Loads a query tile: Q, dO, log-sum-exps and deltas.
inline void load_step(uint to, const Params& p, int batch, int head, int tile) {
    const uint known_at = to + STEP * (QK_ROW + V_ROW);
    const SeqInfo seq_info = seq_info_of(p, batch);
    // Rows past the length are loaded as zeros: they may hold NaN, and P or dS of 0 times NaN would be NaN.
    const Extent queries = {seq_info.begin_q, tile * STEP, seq_info.len_q};
    load_rows<STEP, DIM_QK, Q_WIDE>(to, QK_ROW, p.q, batch, head, queries, p.dim_qk);
    load_rows<STEP, DIM_V, D_O_WIDE>(to + STEP * QK_ROW, V_ROW, p.d_o, batch, head, queries, p.dim_v);
    for (int n = threadIdx.x; n < STEP; n += THREADS) {
        const int row = tile * STEP + n;
        const long at = stats_index(p, seq_info, batch, head, row);
        st_shared(known_at + 4 * n, __float_as_uint(row < queries.rows ? p.lse[at] : INFINITE));
        st_shared(known_at + 4 * STEP + 4 * n, __float_as_uint(row < queries.rows ? p.delta[at] : 0.0f));
    }
    cp_async_commit_group();
}

// Iterates over the query tiles of all heads of the GQA group, one head after the other.
struct HeadRange {
    int head_in_group, head;
    BlockIterator iterator;
};

inline bool next_head_block(HeadRange& heads, const Params& p, const BlockRange& range, int batch, int kv_head, int block, int& tile, bool& partial) {
    while (!next_block(heads.iterator, p, range, tile, partial)) {
        if (++heads.head_in_group == p.group) return false;
        heads.head = kv_head * p.group + heads.head_in_group;
        heads.iterator = block_iterator(p, range, batch, heads.head, block);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    attention_backward_dkv(const __grid_constant__ Params p, const __grid_constant__ Captured captured, const __grid_constant__ Gradients gradients) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint k_at = shared_address(memory), v_at = k_at + OWN * QK_ROW, steps_at = k_at + OWN_BYTES;
    const int lane = threadIdx.x & 31, warp = warp_uniform(int(threadIdx.x >> 5));
    // The first blocks run first, since they have the most queries under a causal mask.
    const int part = blockIdx.x % COLUMN_PARTS, index = blockIdx.x / COLUMN_PARTS, heads_kv = p.heads_q / p.group, all = p.batch * heads_kv;
    const int block = index / all, batch = index % all / heads_kv, kv_head = index % heads_kv;
    const SeqInfo seq_info = seq_info_of(p, batch);
    const Extent own = {seq_info.begin_kv, block * OWN, rows_kv(p, seq_info)};
    const BlockRange range = block_range_of(p, seq_info, block);
    const int k = block * OWN + warp * 16 + thread_row(lane);
    float dk[DK], dv[DV];
#pragma unroll
    for (int n = 0; n < DK; n++) dk[n] = 0.0f;
#pragma unroll
    for (int n = 0; n < DV; n++) dv[n] = 0.0f;
    HeadRange heads = {0, kv_head * p.group, block_iterator(p, range, batch, kv_head * p.group, block)};
    int tile;
    bool partial, any = next_head_block(heads, p, range, batch, kv_head, block, tile, partial);
    if (any) {
        load_rows<OWN, DIM_QK, K_WIDE>(k_at, QK_ROW, p.k, batch, kv_head, own, p.dim_qk);
        load_rows<OWN, DIM_V, V_WIDE>(v_at, V_ROW, p.v, batch, kv_head, own, p.dim_v);
        load_step(steps_at, p, batch, heads.head, tile);
    }
    int stage = 0;
    while (any) {
        const FragmentOrigin origin = {batch, heads.head, tile * STEP + thread_column(lane), k};
        const bool masked = partial;
        any = next_head_block(heads, p, range, batch, kv_head, block, tile, partial);
        const int next = STAGES == 1 ? 0 : stage ^ 1;
        if (STAGES == 2 && any) {
            load_step(steps_at + next * STEP_BYTES, p, batch, heads.head, tile);
            cp_async_wait_group<1>();
        } else {
            cp_async_wait_group<0>();
        }
        __syncthreads();
        const uint q_at = steps_at + stage * STEP_BYTES, d_o_at = q_at + STEP * QK_ROW, known_at = d_o_at + STEP * V_ROW + 8 * (lane & 3);
        const RowStatistics row_statistics = {known_at, known_at + 4 * STEP};
        float s[SCORES], d_p[SCORES], raw[RAW_SCORES];
        warp_gemm_abt<DIM_QK>(s, k_at + warp * 16 * QK_ROW, q_at, QK_ROW);
        bool large = false;
#pragma unroll
        for (int n = 0; n < STEP; n += 32) large |= n + lane < STEP && is_large(__uint_as_float(ld_shared(d_o_at + STEP * V_ROW + 4 * (n + lane))));
        recompute_p_step(masked, __any_sync(~0u, large), s, raw, p, captured, origin, row_statistics);
        const uint d_o_part = d_o_at + part * (DIM_V / COLUMN_PARTS) * ELEMENT_BYTES;
        const uint dropout_mask = dropout_bits(p, origin);
#if WITH_DROPOUT
        float left[SCORES];
#pragma unroll
        for (int n = 0; n < SCORES; n++) left[n] = dropout_p(s[n], dropout_mask, n);
        warp_gemm_ab(dv, left, d_o_part, V_ROW);
#else
        warp_gemm_ab(dv, s, d_o_part, V_ROW);
#endif
        warp_gemm_abt<DIM_V>(d_p, v_at + warp * 16 * V_ROW, d_o_at, V_ROW);
        compute_ds(s, d_p, p, row_statistics, dropout_mask);
#if WITH_PARAMETER_GRADIENTS
        // Column parts recompute the same scores, so only one part adds the parameter gradients.
        if (part == 0) parameter_gradients(raw, s, p, captured, gradients, origin);
#endif
        score_mod_backward(s, raw, p, captured, origin);
        warp_gemm_ab(dk, s, q_at + part * (DIM_QK / COLUMN_PARTS) * ELEMENT_BYTES, QK_ROW);
        // Wait until all warps are done with this stage.
        __syncthreads();
        if (STAGES == 1 && any) load_step(steps_at, p, batch, heads.head, tile);
        stage = next;
    }
    const float dv_scale = WITH_DROPOUT ? p.dropout_scale : 1.0f;
    const float times[2] = {p.scale, p.scale}, values_times[2] = {dv_scale, dv_scale};
    store_rows<DK_PAIRS>(p.dk, dk, times, batch, kv_head, own, k, part * (DIM_QK / COLUMN_PARTS), p.dim_qk);
    store_rows<DV_PAIRS>(p.dv, dv, values_times, batch, kv_head, own, k, part * (DIM_V / COLUMN_PARTS), p.dim_v);
}
