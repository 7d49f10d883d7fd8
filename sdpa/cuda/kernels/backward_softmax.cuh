// dP and dS of the scores that a thread holds, for the backward kernels of both families. The rows of a fragment are keys if `BY_KEYS`, else queries.

// Position of the thread's first score.
struct FragmentOrigin {
    int batch, head, q, k;
};

inline Place place_of_score(const Params& p, const FragmentOrigin& origin, int n) {
    const int row = fragment_row(n), column = fragment_column(n);
    return place_at(p, origin.batch, origin.head, origin.q, origin.k, BY_KEYS ? column : row, BY_KEYS ? row : column);
}

// Returns the dropout mask of the thread's scores: bit n is 1 if dropout keeps score n.
inline uint dropout_bits(const Params& p, const FragmentOrigin& origin) {
    uint bits = 0;
#if WITH_DROPOUT
#if BY_KEYS
    dropout_of_keys<SCORES>(p, origin.batch, origin.head, origin.q, origin.k, [&](int n, bool survives) { bits |= uint(survives) << n; });
#else
    dropout_of_queries<SCORES>(p, origin.batch, origin.head, origin.q, origin.k, [&](int n, bool survives) { bits |= uint(survives) << n; });
#endif
#endif
    return bits;
}

// P after dropout, without the factor 1 / (1 - probability): the epilogue scales dV instead.
inline float dropout_p(float prob, uint dropout_mask, int n) {
    return !WITH_DROPOUT || (dropout_mask >> n & 1) ? prob : 0.0f;
}

// Returns dP before dropout, given dP after dropout.
inline float dropout_backward(const Params& p, float d_p, uint dropout_mask, int n) {
#if WITH_DROPOUT
    return dropout_mask >> n & 1 ? d_p * p.dropout_scale : 0.0f;
#else
    return d_p;
#endif
}

// dS = P * (dP - delta), the gradient of the score after the score_mod; `d_p` is dP after dropout. A masked score has dS = 0, even if dP is NaN there.
template <bool masked>
inline float softmax_backward(const Params& p, float prob, float d_p, float delta, uint dropout_mask, int n) {
    return masked && prob == 0.0f ? 0.0f : prob * (dropout_backward(p, d_p, dropout_mask, n) - delta);
}

// Multiplies dS by the derivative of the score_mod at the scores in `raw`.
template <int count>
inline void score_mod_backward(float (&d_s)[SCORES], const float (&raw)[count], const Params& p, const Captured& captured, const FragmentOrigin& origin) {
#if WITH_SCORE_MOD
UNROLL_TRACES
    for (int n = 0; n < SCORES; n++) {
        if (d_s[n] != 0.0f) d_s[n] = score_mod_gradient(raw[n], d_s[n], place_of_score(p, origin, n), captured);
    }
#endif
}
