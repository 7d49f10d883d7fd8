// P and dS, recomputed from the log-sum-exps that the preprocess kernel has stored.

// Values of a row: its log-sum-exp, which is the score `most` plus `rest` in base 2, and delta = sum of o * dO.
struct Row {
    float most;
    float rest;
    float delta;
};

inline Row row_of(const device float* lse, const device float* delta, long at, bool there) {
    if (!there) {
        return Row{0.0f, WITHOUT_KEYS, 0.0f};
    }
    return Row{lse[at * 2], lse[at * 2 + 1], delta[at]};
}

// Replaces the product of a query and a key by P after dropout, and dP by the gradient of the product, without `scale`, or of a declared
// parameter. A masked-out pair has P and gradient 0, whatever its operands are. Returns whether the query attends to the key.
inline bool to_weight(
    thread float& product, thread float& gradient, Row row, bool kept, int4 at, constant BackwardParams& params, Captured captured) {
#if WITH_GRADIENT
    const float raw = product * params.scale;
#endif
    kept = to_score(product, kept, at, params, captured) && !(row.rest >= WITHOUT_KEYS);
    const float weight = kept ? exp2((product - row.most) * LOG2_E - row.rest) : 0.0f;
#if WITH_DROPOUT
    const float left = left_of(at, params.heads_q, params.seq_q, captured);
    float slope = weight * (gradient * left - row.delta);
    product = weight * left;
#else
    float slope = weight * (gradient - row.delta);
    product = weight;
#endif
#if WITH_GRADIENT
    slope = score_mod_gradient(raw, slope, place_of(at, params), captured);
#endif
    gradient = kept ? slope : 0.0f;
    return kept;
}
