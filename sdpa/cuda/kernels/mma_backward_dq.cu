// Gradients of queries from compute capability 8.0 on: a warp has 16 queries, and walks over blocks of keys with the others of its block. Nothing is added to in memory.

constexpr int DQ = DIM_QK / 2;

inline void bring_step(uint to, const Params& p, int batch, int kv_head, int block) {
    const Span span = span_of(p, batch);
    // Zeros past the length: rows there may be NaN, which dS of 0 would pass on.
    const Extent keys = {span.begin_kv, block * STEP, span.len_kv};
    bring<STEP, DIM_QK, K_WIDE>(to, QK_ROW, p.k, batch, kv_head, keys, p.dim_qk);
    bring<STEP, DIM_V, V_WIDE>(to + STEP * QK_ROW, V_ROW, p.v, batch, kv_head, keys, p.dim_v);
    cp_async_commit_group();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    attention_queries(const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint q_at = shared_address(memory), d_o_at = q_at + OWN * QK_ROW, steps_at = q_at + OWN_BYTES;
    const int lane = threadIdx.x & 31, warp = alike(int(threadIdx.x >> 5));
    // The last tiles first: causal masks leave them the most.
    const int number = blockIdx.x, heads = p.batch * p.heads_q;
    const int tile = p.tiles - 1 - number / heads, batch = number % heads / p.heads_q, head = number % p.heads_q, kv_head = head / p.group;
    const Span span = span_of(p, batch);
    const Extent own = {span.begin_q, tile * OWN, rows_q(p, span)};
    const Reach reach = reach_of(p, span, tile);
    const int q = tile * OWN + warp * 16 + lane / 4;
    Known known;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool there = q + 8 * half < own.rows;
        const long row = stats_place(p, span, batch, head, q + 8 * half);
        known.lse[half] = there ? p.lse[row] : INFINITE;
        known.delta[half] = there ? p.delta[row] : 0.0f;
    }
    float dq[DQ];
#pragma unroll
    for (int n = 0; n < DQ; n++) dq[n] = 0.0f;
    const bool large = __any_sync(~0u, is_large(known.lse[0]) || is_large(known.lse[1]));
    Walk walk = walk_of(p, reach, batch, head, tile);
    int block;
    bool partly, any = walk_on(walk, p, reach, block, partly);
    if (any) {
        // Zeros past the length: NaN scores would be NaN times an exponential of 0.
        const Extent known_rows = {span.begin_q, own.first, span.len_q};
        bring<OWN, DIM_QK, Q_WIDE>(q_at, QK_ROW, p.q, batch, head, known_rows, p.dim_qk);
        bring<OWN, DIM_V, D_O_WIDE>(d_o_at, V_ROW, p.d_o, batch, head, known_rows, p.dim_v);
        bring_step(steps_at, p, batch, kv_head, block);
    }
    int stage = 0;
    while (any) {
        const Corner corner = {batch, head, q, block * STEP + 2 * (lane & 3)};
        const bool masked = partly;
        any = walk_on(walk, p, reach, block, partly);
        const int next = STAGES == 1 ? 0 : stage ^ 1;
        if (STAGES == 2 && any) {
            bring_step(steps_at + next * STEP_BYTES, p, batch, kv_head, block);
            cp_async_wait_group<1>();
        } else {
            cp_async_wait_group<0>();
        }
        __syncthreads();
        const uint k_at = steps_at + stage * STEP_BYTES, v_at = k_at + STEP * QK_ROW;
        float s[SCORES], d_p[SCORES], raw[RAW];
        beside<DIM_QK>(s, q_at + warp * 16 * QK_ROW, k_at, QK_ROW);
        weights_either(masked, large, s, raw, p, captured, corner, known);
        beside<DIM_V>(d_p, d_o_at + warp * 16 * V_ROW, v_at, V_ROW);
#if WITH_DROPOUT
        through_dropout(d_p, p, stay_of(p, corner));
#endif
        slopes(s, d_p, known);
        through_score_mod(s, raw, p, captured, corner);
        weigh(dq, s, k_at, QK_ROW);
        // Its keys are done with.
        __syncthreads();
        if (STAGES == 1 && any) bring_step(steps_at, p, batch, kv_head, block);
        stage = next;
    }
    const float times[2] = {p.scale, p.scale};
    put_rows<DQ_PAIRS>(p.dq, dq, times, batch, head, own, q, 0, p.dim_qk);
}
