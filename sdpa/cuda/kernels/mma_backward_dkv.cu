// Gradients of keys and values from compute capability 8.0 on: a warp has 16 keys, and walks over tiles of queries of all heads that share them with the others of its
// block. Nothing is added to in memory, but gradients of parameters.

constexpr int DK = DIM_QK / PARTS / 2;
constexpr int DV = DIM_V / PARTS / 2;

// Queries of a step, gradients of their outputs, and what is known of each.
inline void bring_step(uint to, const Params& p, int batch, int head, int tile) {
    const uint known_at = to + STEP * (QK_ROW + V_ROW);
    const Span span = span_of(p, batch);
    // Zeros past the length: rows there may be NaN, which P and dS of 0 would pass on.
    const Extent queries = {span.begin_q, tile * STEP, span.len_q};
    bring<STEP, DIM_QK, Q_WIDE>(to, QK_ROW, p.q, batch, head, queries, p.dim_qk);
    bring<STEP, DIM_V, D_O_WIDE>(to + STEP * QK_ROW, V_ROW, p.d_o, batch, head, queries, p.dim_v);
    for (int n = threadIdx.x; n < STEP; n += THREADS) {
        const int row = tile * STEP + n;
        const long at = stats_place(p, span, batch, head, row);
        st_shared(known_at + 4 * n, __float_as_uint(row < queries.rows ? p.lse[at] : INFINITE));
        st_shared(known_at + 4 * STEP + 4 * n, __float_as_uint(row < queries.rows ? p.delta[at] : 0.0f));
    }
    cp_async_commit_group();
}

// The tiles of the heads that share a key head, one head after the other.
struct Heads {
    int of, head;
    Walk walk;
};

inline bool heads_on(Heads& heads, const Params& p, const Reach& reach, int batch, int kv_head, int block, int& tile, bool& partly) {
    while (!walk_on(heads.walk, p, reach, tile, partly)) {
        if (++heads.of == p.group) return false;
        heads.head = kv_head * p.group + heads.of;
        heads.walk = walk_of(p, reach, batch, heads.head, block);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    attention_keys(const __grid_constant__ Params p, const __grid_constant__ Captured captured, const __grid_constant__ Gradients gradients) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint k_at = shared_address(memory), v_at = k_at + OWN * QK_ROW, steps_at = k_at + OWN_BYTES;
    const int lane = threadIdx.x & 31, warp = alike(int(threadIdx.x >> 5));
    // The first blocks first: causal masks leave them the most.
    const int part = blockIdx.x % PARTS, number = blockIdx.x / PARTS, heads_kv = p.heads_q / p.group, all = p.batch * heads_kv;
    const int block = number / all, batch = number % all / heads_kv, kv_head = number % heads_kv;
    const Span span = span_of(p, batch);
    const Extent own = {span.begin_kv, block * OWN, rows_kv(p, span)};
    const Reach reach = reach_of(p, span, block);
    const int k = block * OWN + warp * 16 + lane / 4;
    float dk[DK], dv[DV];
#pragma unroll
    for (int n = 0; n < DK; n++) dk[n] = 0.0f;
#pragma unroll
    for (int n = 0; n < DV; n++) dv[n] = 0.0f;
    Heads heads = {0, kv_head * p.group, walk_of(p, reach, batch, kv_head * p.group, block)};
    int tile;
    bool partly, any = heads_on(heads, p, reach, batch, kv_head, block, tile, partly);
    if (any) {
        bring<OWN, DIM_QK, K_WIDE>(k_at, QK_ROW, p.k, batch, kv_head, own, p.dim_qk);
        bring<OWN, DIM_V, V_WIDE>(v_at, V_ROW, p.v, batch, kv_head, own, p.dim_v);
        bring_step(steps_at, p, batch, heads.head, tile);
    }
    int stage = 0;
    while (any) {
        const Corner corner = {batch, heads.head, tile * STEP + 2 * (lane & 3), k};
        const bool masked = partly;
        any = heads_on(heads, p, reach, batch, kv_head, block, tile, partly);
        const int next = STAGES == 1 ? 0 : stage ^ 1;
        if (STAGES == 2 && any) {
            bring_step(steps_at + next * STEP_BYTES, p, batch, heads.head, tile);
            cp_async_wait_group<1>();
        } else {
            cp_async_wait_group<0>();
        }
        __syncthreads();
        const uint q_at = steps_at + stage * STEP_BYTES, d_o_at = q_at + STEP * QK_ROW, known_at = d_o_at + STEP * V_ROW + 8 * (lane & 3);
        const Known known = {known_at, known_at + 4 * STEP};
        float s[SCORES], d_p[SCORES], raw[RAW];
        beside<DIM_QK>(s, k_at + warp * 16 * QK_ROW, q_at, QK_ROW);
        bool large = false;
#pragma unroll
        for (int n = 0; n < STEP; n += 32) large |= n + lane < STEP && is_large(__uint_as_float(ld_shared(d_o_at + STEP * V_ROW + 4 * (n + lane))));
        weights_either(masked, __any_sync(~0u, large), s, raw, p, captured, corner, known);
        const uint d_o_part = d_o_at + part * (DIM_V / PARTS) * ELEMENT_BYTES;
#if WITH_DROPOUT
        const uint stay = stay_of(p, corner);
        float left[SCORES];
#pragma unroll
        for (int n = 0; n < SCORES; n++) left[n] = stay >> n & 1 ? s[n] : 0.0f;
        weigh(dv, left, d_o_part, V_ROW);
#else
        weigh(dv, s, d_o_part, V_ROW);
#endif
        beside<DIM_V>(d_p, v_at + warp * 16 * V_ROW, d_o_at, V_ROW);
#if WITH_DROPOUT
        through_dropout(d_p, p, stay);
#endif
        slopes(s, d_p, known);
#if WITH_ALONG
        // Parts compute the same scores.
        if (part == 0) along_parameters(raw, s, p, captured, gradients, corner);
#endif
        through_score_mod(s, raw, p, captured, corner);
        weigh(dk, s, q_at + part * (DIM_QK / PARTS) * ELEMENT_BYTES, QK_ROW);
        // Its queries are done with.
        __syncthreads();
        if (STAGES == 1 && any) bring_step(steps_at, p, batch, heads.head, tile);
        stage = next;
    }
    const float of_values = WITH_DROPOUT ? p.dropout_scale : 1.0f;
    const float times[2] = {p.scale, p.scale}, values_times[2] = {of_values, of_values};
    put_rows<DK_PAIRS>(p.dk, dk, times, batch, kv_head, own, k, part * (DIM_QK / PARTS), p.dim_qk);
    put_rows<DV_PAIRS>(p.dv, dv, values_times, batch, kv_head, own, k, part * (DIM_V / PARTS), p.dim_v);
}
