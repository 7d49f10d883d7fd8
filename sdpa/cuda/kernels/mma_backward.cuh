// Gradients of scores, where a warp has 16 rows of its own side: queries beside keys, or keys beside queries (`BY_KEYS`).

constexpr int SCORES = STEP / 2;
constexpr int RAW = WITH_ALONG || WITH_SCORE_MOD ? SCORES : 1;

// Where a thread's scores stand: its first query and its first key.
struct Corner {
    int batch, head, q, k;
};

inline Place place_of(const Params& p, const Corner& corner, int n) {
    const int row = n & 2 ? 8 : 0, column = n / 4 * 8 + (n & 1);
    return place_behind(p, corner.batch, corner.head, corner.q, corner.k, BY_KEYS ? column : row, BY_KEYS ? row : column);
}

// Of queries, the log-sum-exp in units of the exponent of 2, and the sum of `o` times `d_o`: of the thread's two rows, or where those of its columns are.
#if BY_KEYS
struct Known {
    uint lse, delta;
};
inline float2 lse_of(const Known& known, int n) { return ld_shared_v2_f32(known.lse + n / 4 * 32); }
inline float2 delta_of(const Known& known, int n) { return ld_shared_v2_f32(known.delta + n / 4 * 32); }
#else
struct Known {
    float lse[2], delta[2];
};
inline float2 lse_of(const Known& known, int n) { return float2{known.lse[n >> 1 & 1], known.lse[n >> 1 & 1]}; }
inline float2 delta_of(const Known& known, int n) { return float2{known.delta[n >> 1 & 1], known.delta[n >> 1 & 1]}; }
#endif

// The exact log-sum-exp of the query of a score.
inline Exact exact_at(const Params& p, const Corner& corner, int q) {
    const float2 both = p.exact[stats_place(p, span_of(p, corner.batch), corner.batch, corner.head, q)];
    return Exact{both.x, both.y};
}

// P in place of scores, and in `raw` the scores before the score_mod. `large`: some log-sum-exps are.
template <bool masked>
inline void weights(float (&s)[SCORES], float (&raw)[RAW], const Params& p, const Captured& captured, const Corner& corner, const Known& known, bool large) {
    const bool natural = WITH_SCORE_MOD || p.natural != 0;
    Range kept[2];
    if (masked) {
        const Span span = span_of(p, corner.batch);
#pragma unroll
        for (int half = 0; half < 2; half++) kept[half] = BY_KEYS ? kept_by(p, span, corner.k + 8 * half) : kept_of(p, span, corner.q + 8 * half);
    }
UNROLL_TRACES
    for (int n = 0; n < SCORES; n += 2) {
        const float2 lse = lse_of(known, n);
UNROLL_TRACES
        for (int other = 0; other < 2; other++) {
            float x = natural ? s[n + other] * p.scale : s[n + other];
            if (RAW > 1) raw[RAW > 1 ? n + other : 0] = x;
#if WITH_SCORE_MOD
            x = score_mod(x, place_of(p, corner, n + other), captured);
#endif
#if WITH_KEEP
            if (masked && !keep(place_of(p, corner, n + other), captured)) x = -INFINITE;
#endif
            if (masked && !kept[n >> 1 & 1].holds((BY_KEYS ? corner.q : corner.k) + n / 4 * 8 + other)) x = -INFINITE;
            float exponent = x * p.unit - (other ? lse.y : lse.x);
            if (large) {
                const int q = corner.q + (BY_KEYS ? n / 4 * 8 + other : n & 2 ? 8 : 0);
                if (q < rows_q(p, span_of(p, corner.batch))) exponent = x == -INFINITE ? x : exponent_of(x, p.unit, exact_at(p, corner, q));
            }
            s[n + other] = ex2_approx(exponent);
        }
    }
}

inline void weights_either(bool masked, bool large, float (&s)[SCORES], float (&raw)[RAW], const Params& p, const Captured& captured,
                           const Corner& corner, const Known& known) {
    if (MASKED_ANYWHERE || masked || large) weights<true>(s, raw, p, captured, corner, known, large);
    else weights<false>(s, raw, p, captured, corner, known, false);
}

#if WITH_DROPOUT
// Which weights of a thread stay, a bit for each.
inline uint stay_of(const Params& p, const Corner& corner) {
    uint bits = 0;
    const auto note = [&](int n, bool stays) { bits |= uint(stays) << n; };
    if (BY_KEYS) each_of_keys<SCORES>(p, corner.batch, corner.head, corner.q, corner.k, note);
    else each_of_queries<SCORES>(p, corner.batch, corner.head, corner.q, corner.k, note);
    return bits;
}

// Gradients of weights before dropout.
inline void through_dropout(float (&d_p)[SCORES], const Params& p, uint stay) {
#pragma unroll
    for (int n = 0; n < SCORES; n++) d_p[n] = stay >> n & 1 ? d_p[n] * p.dropout_scale : 0.0f;
}
#endif

// Gradients of scores, after the score_mod, in place of weights; what has no weight has none.
inline void slopes(float (&s)[SCORES], const float (&d_p)[SCORES], const Known& known) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 2) {
        const float2 delta = delta_of(known, n);
        s[n] = s[n] == 0.0f ? 0.0f : s[n] * (d_p[n] - delta.x);
        s[n + 1] = s[n + 1] == 0.0f ? 0.0f : s[n + 1] * (d_p[n + 1] - delta.y);
    }
}

// The same before the score_mod.
inline void through_score_mod(float (&s)[SCORES], const float (&raw)[RAW], const Params& p, const Captured& captured, const Corner& corner) {
#if WITH_SCORE_MOD
UNROLL_TRACES
    for (int n = 0; n < SCORES; n++) {
        if (s[n] != 0.0f) s[n] = score_mod_gradient(raw[n], s[n], place_of(p, corner, n), captured);
    }
#endif
}

// The rows of a block's own side, and those of a step of the other side, each stage behind the one before.
constexpr uint OWN_BYTES = OWN * (QK_ROW + V_ROW);
constexpr uint STEP_BYTES = STEP * (QK_ROW + V_ROW + 8);
