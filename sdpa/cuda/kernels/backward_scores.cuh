// What the backward kernel makes of scores: products of a group, weights, and gradients of scores.

// Products of 64 rows and 64 rows of a tile of queries, over so many times 16 columns of both, the first of which are held. Nothing waits.
template <int steps, int count>
inline void score(float (&s)[SCORES], uint rows, const uint (&held)[count], uint tile) {
    const ulong64 a = descriptor_k_major(rows), b = descriptor_k_major(tile);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; step++) {
        const ulong64 of_tile = descriptor_advance(b, step / 4 * Q_PANEL_BYTES + step % 4 * 32);
        if (4 * step + 3 < count) wgmma_k_major(s, held[4 * step], held[4 * step + 1], held[4 * step + 2], held[4 * step + 3], of_tile, step > 0);
        else wgmma_k_major(s, descriptor_advance(a, step / 4 * KV_PANEL_BYTES + step % 4 * 32), of_tile, step > 0);
    }
    wgmma_commit_group();
}

// Adds weights times 64 rows of a tile of queries. Nothing waits: weights are untouchable until then.
template <int count>
inline void weigh(float (&sums)[count], const uint (&w)[SCORES / 2], uint tile) {
    const ulong64 b = descriptor_mn_major(tile, Q_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) {
        wgmma_b_mn_major(sums, w[4 * step], w[4 * step + 1], w[4 * step + 2], w[4 * step + 3], descriptor_advance(b, step * 16 * ROW_BYTES), true);
    }
    wgmma_commit_group();
}

// Gradients of 64 queries along a panel of columns, from gradients of the block's scores. Nothing waits.
inline void along_queries(float (&sums)[DQ], uint d_s, uint k) {
    const ulong64 a = descriptor_mn_major(d_s, KV_PANEL_BYTES), b = descriptor_mn_major(k, KV_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_N / 16; step++) {
        wgmma_mn_major(sums, descriptor_advance(a, step * 16 * ROW_BYTES), descriptor_advance(b, step * 16 * ROW_BYTES), step > 0);
    }
    wgmma_commit_group();
}

inline void pack(uint (&w)[SCORES / 2], const float (&s)[SCORES]) {
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) w[n] = pack_pair(Element{}, s[2 * n], s[2 * n + 1]);
}

// The two numbers of each pair of queries that a thread has scores of.
inline void pairs_of(float2 (&x)[PAIRS], uint at) {
#pragma unroll
    for (int n = 0; n < PAIRS; n++) x[n] = ld_shared_v2_f32(at + n * 32);
}

// Which weights of a thread stay, a bit for each.
inline uint stay_of(const Params& p, const Corner& corner) {
    uint bits = 0;
#if WITH_DROPOUT
    each_of_keys<SCORES>(p, corner.batch, corner.head, corner.q, corner.k, [&](int n, bool stays) { bits |= uint(stays) << n; });
#endif
    return bits;
}

// A weight as dropout leaves it, without its scale, and its gradient before dropout.
inline float left_of(float weight, uint stay, int n) {
    return !WITH_DROPOUT || (stay >> n & 1) ? weight : 0.0f;
}

inline float through_dropout(const Params& p, float d_p, uint stay, int n) {
#if WITH_DROPOUT
    return stay >> n & 1 ? d_p * p.dropout_scale : 0.0f;
#else
    return d_p;
#endif
}

// The exact log-sum-exps of a thread's queries, those of two neighbours in each four numbers: their first is a row maximum that scores are relative to, 0 but of rows
// whose log-sum-exp is large.
inline const float4* most_of(const Params& p, const Corner& corner) {
    // Made anew for each score: an address that is kept would take registers from launches without such rows.
    const int q = opaque_int(corner.q);
    return (const float4*)(p.exact + tile_place(p, span_of(p, corner.batch), corner.batch, corner.head, q / TILE_M) * TILE_M + q % TILE_M);
}

// Weights of scores, rounded in `w`, as dropout leaves them. In `s`, times the slope of the score_mod: what gradients of scores are multiples of. Where gradients of parameters
// are asked for, weights as they are, and scores before the score_mod in `raw`.
template <bool masked, bool looks_for_large>
inline void weights(float (&s)[SCORES], float (&raw)[RAW], uint (&w)[SCORES / 2], const Params& p, const Captured& captured, const Corner& corner,
                    const float2 (&lse)[PAIRS], uint stay) {
    const bool large = looks_for_large && *p.large != 0;
#if !WITH_SCORE_MOD
    // One score at a time, so that the rare case takes no registers from the other.
    if (__builtin_expect(large, 0)) {
        const float4* const most = most_of(p, corner);
#pragma unroll
        for (int n = 0; n < SCORES; n++) s[n] -= n & 1 ? ((const volatile float*)(most + 4 * (n / 4)))[2] : ((const volatile float*)(most + 4 * (n / 4)))[0];
    }
#endif
    // Without a score_mod the scale is a part of the unit.
    const float factor = WITH_SCORE_MOD || p.natural == 0 ? p.unit : p.unit * p.scale;
UNROLL_TRACES
    for (int n = 0; n < SCORES; n += 2) {
        float before[2], weight[2];
        const float2 of = lse[n / 4];
UNROLL_TRACES
        for (int other = 0; other < 2; other++) {
            before[other] = WITH_SCORE_MOD || (WITH_ALONG && p.natural != 0) ? s[n + other] * p.scale : s[n + other];
            float x = WITH_SCORE_MOD ? before[other] : s[n + other];
#if WITH_SCORE_MOD
            x = score_mod(x, place_of(p, corner, n + other), captured);
#endif
#if WITH_SCORE_MOD
            if (__builtin_expect(large, 0)) x -= ((const volatile float*)(most_of(p, corner) + 4 * (n / 4)))[2 * other];
#endif
            x = x * factor - (other ? of.y : of.x);
#if WITH_KEEP
            if (masked && !keep(place_of(p, corner, n + other), captured)) x = -INFINITE;
#endif
            // Made again for each, so that registers are not held.
            if (masked && !kept_by(p, span_of(p, corner.batch), corner.k + (n & 2 ? 8 : 0)).holds(corner.q + 8 * (n / 4) + other)) x = -INFINITE;
            weight[other] = ex2_approx(x);
        }
        w[n / 2] = pack_pair(Element{}, left_of(weight[0], stay, n), left_of(weight[1], stay, n + 1));
UNROLL_TRACES
        for (int other = 0; other < 2; other++) {
#if WITH_ALONG
            raw[n + other] = before[other];
#elif WITH_SCORE_MOD
            // What has no weight has no gradient, however steep the score_mod is. Computed all the same: scores that branch apart wait for one another.
            const float slope = score_mod_gradient(before[other], weight[other], place_of(p, corner, n + other), captured);
            weight[other] = weight[other] == 0.0f ? 0.0f : slope;
#endif
            s[n + other] = weight[other];
        }
    }
}

// The tiles of a launch in which some log-sum-exps are large: all of them are partial ones, whose code looks for these.
inline Reach with_large(const Params& p, Reach reach) {
    if (*p.large != 0) reach.whole_past = 0;
    return reach;
}

inline void weights_either(bool masked, float (&s)[SCORES], float (&raw)[RAW], uint (&w)[SCORES / 2], const Params& p,
                           const Captured& captured, const Corner& corner, const float2 (&lse)[PAIRS], uint stay) {
    // A text of its own where a score_mod is between scores and maxima: a branch for each score would take registers from ordinary ones.
    if (MASKED_ANYWHERE) weights<true, true>(s, raw, w, p, captured, corner, lse, stay);
    else if (!masked) weights<false, false>(s, raw, w, p, captured, corner, lse, stay);
    else if (!WITH_SCORE_MOD || __builtin_expect(*p.large != 0, 0)) weights<true, true>(s, raw, w, p, captured, corner, lse, stay);
    else weights<true, false>(s, raw, w, p, captured, corner, lse, stay);
}

// Computes dS in place of dP: 0 where P is 0, even if dP is NaN there. Adds to parameter gradients if `owns_scores`: exactly one CTA may do so for each score.
template <bool masked>
inline void slopes(float (&s)[SCORES], const float (&raw)[RAW], float (&d_p)[SCORES], const Params& p, const Captured& captured,
                   const Gradients& gradients, const Corner& corner, const float2 (&delta)[PAIRS], uint stay, bool owns_scores) {
#pragma unroll
    for (int n = 0; n < SCORES; n += 2) {
        const float2 of = delta[n / 4];
        d_p[n] = masked && s[n] == 0.0f ? 0.0f : s[n] * (through_dropout(p, d_p[n], stay, n) - of.x);
        d_p[n + 1] = masked && s[n + 1] == 0.0f ? 0.0f : s[n + 1] * (through_dropout(p, d_p[n + 1], stay, n + 1) - of.y);
    }
#if WITH_ALONG
    if (owns_scores) along_parameters(raw, d_p, p, captured, gradients, corner);
#if WITH_SCORE_MOD
UNROLL_TRACES
    for (int n = 0; n < SCORES; n++) {
        if (d_p[n] != 0.0f) d_p[n] = score_mod_gradient(raw[n], d_p[n], place_of(p, corner, n), captured);
    }
#endif
#endif
}
