// The GEMMs of the sm_90 backward kernels, P recomputed from S, and dS. Called by the consumers.

// S^T = K Q^T or dP^T = V dO^T of a warpgroup, 64 rows by 64 queries. Asynchronous; the first k16 steps of A may be in registers.
template <int steps, int count>
inline void gemm_s_dp(float (&s)[SCORES], uint rows, const uint (&a_registers)[count], uint tile) {
    const ulong64 a = descriptor_k_major(rows), b = descriptor_k_major(tile);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; step++) {
        const ulong64 of_tile = descriptor_advance(b, step / 4 * Q_PANEL_BYTES + step % 4 * 32);
        if (4 * step + 3 < count) wgmma_k_major(s, a_registers[4 * step], a_registers[4 * step + 1], a_registers[4 * step + 2], a_registers[4 * step + 3],
                                                of_tile, step > 0);
        else wgmma_k_major(s, descriptor_advance(a, step / 4 * KV_PANEL_BYTES + step % 4 * 32), of_tile, step > 0);
    }
    wgmma_commit_group();
}

// dV += P^T dO or dK += dS^T Q over 64 queries. Asynchronous: the A registers must not be written until the GEMM is done.
template <int count>
inline void gemm_dk_dv(float (&sums)[count], const uint (&p_packed)[SCORES / 2], uint tile) {
    const ulong64 b = descriptor_mn_major(tile, Q_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) {
        wgmma_b_mn_major(sums, p_packed[4 * step], p_packed[4 * step + 1], p_packed[4 * step + 2], p_packed[4 * step + 3],
                         descriptor_advance(b, step * 16 * ROW_BYTES), true);
    }
    wgmma_commit_group();
}

// dQ of 64 queries along one panel of columns, from dS of the KV block. Asynchronous.
inline void gemm_dq(float (&sums)[DQ], uint d_s, uint k) {
    const ulong64 a = descriptor_mn_major(d_s, KV_PANEL_BYTES), b = descriptor_mn_major(k, KV_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_N / 16; step++) {
        wgmma_mn_major(sums, descriptor_advance(a, step * 16 * ROW_BYTES), descriptor_advance(b, step * 16 * ROW_BYTES), step > 0);
    }
    wgmma_commit_group();
}

// Loads the log-sum-exps or deltas of the thread's queries.
inline void load_query_pairs(float2 (&x)[QUERY_PAIRS], uint at) {
#pragma unroll
    for (int n = 0; n < QUERY_PAIRS; n++) x[n] = ld_shared_v2_f32(at + n * 32);
}

// The exact log-sum-exps of the thread's queries, two queries per float4. The row maximum of a query is 0 unless its log-sum-exp is large.
inline const float4* exact_lse_of(const Params& p, const FragmentOrigin& origin) {
    // Recompute the address for each score: keeping it live would cost registers even in launches without large log-sum-exps.
    const int q = opaque_int(origin.q);
    return (const float4*)(p.exact_lse + q_tile_index(p, seq_info_of(p, origin.batch), origin.batch, origin.head, q / TILE_M) * TILE_M + q % TILE_M);
}

// Recomputes P from S. `p_packed` gets P after dropout. `s` becomes P times the derivative of the score_mod, a factor of dS. With parameter gradients,
// `s` becomes P instead, and `raw` gets the scores before the score_mod.
template <bool masked, bool looks_for_large>
inline void recompute_p(float (&s)[SCORES], float (&raw)[RAW_SCORES], uint (&p_packed)[SCORES / 2], const Params& p, const Captured& captured,
                        const FragmentOrigin& origin, const float2 (&lse)[QUERY_PAIRS], uint dropout_mask) {
    const bool large = looks_for_large && *p.any_large_lse != 0;
#if !WITH_SCORE_MOD
    // Use volatile loads, one score at a time: keeping more values live would cost registers even if no log-sum-exp is large.
    if (__builtin_expect(large, 0)) {
        const float4* const row_max = exact_lse_of(p, origin);
#pragma unroll
        for (int n = 0; n < SCORES; n++) s[n] -= n & 1 ? ((const volatile float*)(row_max + 4 * (n / 4)))[2] : ((const volatile float*)(row_max + 4 * (n / 4)))[0];
    }
#endif
    // Without a score_mod, `factor` includes the scale.
    const float factor = WITH_SCORE_MOD || p.natural == 0 ? p.softmax_scale_log2 : p.softmax_scale_log2 * p.scale;
UNROLL_TRACES
    for (int n = 0; n < SCORES; n += 2) {
        float before[2], prob[2];
        const float2 pair = lse[n / 4];
UNROLL_TRACES
        for (int other = 0; other < 2; other++) {
            before[other] = WITH_SCORE_MOD || (WITH_PARAMETER_GRADIENTS && p.natural != 0) ? s[n + other] * p.scale : s[n + other];
            float x = WITH_SCORE_MOD ? before[other] : s[n + other];
#if WITH_SCORE_MOD
            x = score_mod(x, place_of_score(p, origin, n + other), captured);
#endif
#if WITH_SCORE_MOD
            if (__builtin_expect(large, 0)) x -= ((const volatile float*)(exact_lse_of(p, origin) + 4 * (n / 4)))[2 * other];
#endif
            x = x * factor - (other ? pair.y : pair.x);
#if WITH_KEEP
            if (masked && !keep(place_of_score(p, origin, n + other), captured)) x = -INFINITE;
#endif
            // Recompute the bounds for each score: keeping them live costs registers.
            if (masked && !attending_queries(p, seq_info_of(p, origin.batch), origin.k + fragment_row(n)).contains(fragment_column(origin.q, n) + other)) x = -INFINITE;
            prob[other] = ex2_approx(x);
        }
        p_packed[n / 2] = pack_pair(Element{}, dropout_p(prob[0], dropout_mask, n), dropout_p(prob[1], dropout_mask, n + 1));
UNROLL_TRACES
        for (int other = 0; other < 2; other++) {
#if WITH_PARAMETER_GRADIENTS
            raw[n + other] = before[other];
#elif WITH_SCORE_MOD
            // If P is 0 the gradient is 0, however steep the score_mod. The derivative is computed for all scores anyway, because diverging lanes would
            // serialise.
            const float derivative = score_mod_gradient(before[other], prob[other], place_of_score(p, origin, n + other), captured);
            prob[other] = prob[other] == 0.0f ? 0.0f : derivative;
#endif
            s[n + other] = prob[other];
        }
    }
}

// If any log-sum-exp of the launch is large, marks all blocks as partial, because only the masked path checks for large log-sum-exps.
inline BlockRange without_full_blocks(const Params& p, BlockRange range) {
    if (*p.any_large_lse != 0) range.full_end = 0;
    return range;
}

inline void recompute_p_step(bool masked, float (&s)[SCORES], float (&raw)[RAW_SCORES], uint (&p_packed)[SCORES / 2], const Params& p,
                             const Captured& captured, const FragmentOrigin& origin, const float2 (&lse)[QUERY_PAIRS], uint dropout_mask) {
    // With a score_mod, large log-sum-exps take a separate path: a branch per score would use more registers on the usual path.
    if (ALWAYS_MASKED) recompute_p<true, true>(s, raw, p_packed, p, captured, origin, lse, dropout_mask);
    else if (!masked) recompute_p<false, false>(s, raw, p_packed, p, captured, origin, lse, dropout_mask);
    else if (!WITH_SCORE_MOD || __builtin_expect(*p.any_large_lse != 0, 0)) recompute_p<true, true>(s, raw, p_packed, p, captured, origin, lse, dropout_mask);
    else recompute_p<true, false>(s, raw, p_packed, p, captured, origin, lse, dropout_mask);
}

// Computes dS in place of dP. Adds to parameter gradients if `owns_scores`: exactly one CTA may do so for each score.
template <bool masked>
inline void compute_ds(float (&s)[SCORES], const float (&raw)[RAW_SCORES], float (&d_p)[SCORES], const Params& p, const Captured& captured,
                       const Gradients& gradients, const FragmentOrigin& origin, const float2 (&delta)[QUERY_PAIRS], uint dropout_mask, bool owns_scores) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 2) {
        const float2 pair = delta[n / 4];
        d_p[n] = softmax_backward<masked>(p, s[n], d_p[n], pair.x, dropout_mask, n);
        d_p[n + 1] = softmax_backward<masked>(p, s[n + 1], d_p[n + 1], pair.y, dropout_mask, n + 1);
    }
#if WITH_PARAMETER_GRADIENTS
    if (owns_scores) parameter_gradients(raw, d_p, p, captured, gradients, origin);
    score_mod_backward(d_p, raw, p, captured, origin);
#endif
}
