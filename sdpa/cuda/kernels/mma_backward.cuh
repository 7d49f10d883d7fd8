// P and dS of one warp, for mma_backward_dq.cu and mma_backward_dkv.cu. Rows are queries in the dQ kernel, and keys in the dK/dV kernel (BY_KEYS).

constexpr int RAW_SCORES = WITH_PARAMETER_GRADIENTS || WITH_SCORE_MOD ? SCORES : 1;

// Log-sum-exp in base 2, and delta = sum of o * d_o, for each query. With BY_KEYS queries are columns, and the values are read from shared memory.
// Otherwise queries are rows, and a thread keeps the values of its two rows in registers.
#if BY_KEYS
struct RowStatistics {
    uint lse, delta;
};
inline float2 lse_of(const RowStatistics& row_statistics, int n) { return ld_shared_v2_f32(row_statistics.lse + n / 4 * 32); }
inline float2 delta_of(const RowStatistics& row_statistics, int n) { return ld_shared_v2_f32(row_statistics.delta + n / 4 * 32); }
#else
struct RowStatistics {
    float lse[2], delta[2];
};
inline float2 lse_of(const RowStatistics& row_statistics, int n) { return float2{row_statistics.lse[fragment_half(n)], row_statistics.lse[fragment_half(n)]}; }
inline float2 delta_of(const RowStatistics& row_statistics, int n) { return float2{row_statistics.delta[fragment_half(n)], row_statistics.delta[fragment_half(n)]}; }
#endif

// The exact log-sum-exp of query `q`.
inline ExactLse exact_at(const Params& p, const FragmentOrigin& origin, int q) {
    const float2 both = p.exact_lse[stats_index(p, seq_info_of(p, origin.batch), origin.batch, origin.head, q)];
    return ExactLse{both.x, both.y};
}

// Replaces scores by P, and stores the scores before the score_mod in `raw`. `large`: some query needs the exact log-sum-exp.
template <bool masked>
inline void recompute_p(float (&s)[SCORES], float (&raw)[RAW_SCORES], const Params& p, const Captured& captured, const FragmentOrigin& origin,
                        const RowStatistics& row_statistics, bool large) {
    const bool natural = WITH_SCORE_MOD || p.natural != 0;
    Range bounds[2];
    if (masked) {
        const SeqInfo seq_info = seq_info_of(p, origin.batch);
#pragma unroll
        for (int half = 0; half < 2; half++)
            bounds[half] = BY_KEYS ? attending_queries(p, seq_info, origin.k + 8 * half) : attended_keys(p, seq_info, origin.q + 8 * half);
    }
UNROLL_TRACES
    for (int n = 0; n < SCORES; n += 2) {
        const float2 lse = lse_of(row_statistics, n);
UNROLL_TRACES
        for (int other = 0; other < 2; other++) {
            float x = natural ? s[n + other] * p.scale : s[n + other];
            if (RAW_SCORES > 1) raw[RAW_SCORES > 1 ? n + other : 0] = x;
#if WITH_SCORE_MOD
            x = score_mod(x, place_of_score(p, origin, n + other), captured);
#endif
#if WITH_KEEP
            if (masked && !keep(place_of_score(p, origin, n + other), captured)) x = -INFINITE;
#endif
            if (masked && !bounds[fragment_half(n)].contains(fragment_column(BY_KEYS ? origin.q : origin.k, n) + other)) x = -INFINITE;
            float exponent = x * p.softmax_scale_log2 - (other ? lse.y : lse.x);
            if (large) {
                const int q = origin.q + (BY_KEYS ? fragment_column(n) + other : fragment_row(n));
                if (q < rows_q(p, seq_info_of(p, origin.batch))) exponent = x == -INFINITE ? x : exponent_of(x, p.softmax_scale_log2, exact_at(p, origin, q));
            }
            s[n + other] = ex2_approx(exponent);
        }
    }
}

inline void recompute_p_step(bool masked, bool large, float (&s)[SCORES], float (&raw)[RAW_SCORES], const Params& p, const Captured& captured,
                             const FragmentOrigin& origin, const RowStatistics& row_statistics) {
    if (ALWAYS_MASKED || masked || large) recompute_p<true>(s, raw, p, captured, origin, row_statistics, large);
    else recompute_p<false>(s, raw, p, captured, origin, row_statistics, false);
}

// Replaces P by dS, the gradient of the scores after the score_mod.
inline void compute_ds(float (&s)[SCORES], const float (&d_p)[SCORES], const Params& p, const RowStatistics& row_statistics, uint dropout_mask) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 2) {
        const float2 delta = delta_of(row_statistics, n);
        s[n] = softmax_backward<true>(p, s[n], d_p[n], delta.x, dropout_mask, n);
        s[n + 1] = softmax_backward<true>(p, s[n + 1], d_p[n + 1], delta.y, dropout_mask, n + 1);
    }
}

// Shared memory: the CTA's own rows, then one or two stages of the rows that it iterates over.
constexpr uint OWN_BYTES = OWN * (QK_ROW + V_ROW);
constexpr uint STEP_BYTES = STEP * (QK_ROW + V_ROW + 8);
