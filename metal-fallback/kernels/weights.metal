// Weights and the gradient of scores, computed again from what the forward pass left.

// What a row of scores came to: stats in powers of two, and the sum of o d_o.
struct Row {
    float stats;
    float delta;
};

// A row whose stats are minus infinity keeps no key: the largest number stands for them. NaN stays NaN.
inline Row row_from(float natural, float delta) {
    return Row{natural < LOWEST ? -(DROPPED) : natural * LOG2_E, delta};
}

inline Row row_of(const device float* stats, const device float* delta, long at, bool there) {
    if (!there) {
        return Row{-(DROPPED), 0.0f};
    }
    return row_from(stats[at], delta[at]);
}

// A product of a query and a key becomes its weight, as dropout leaves it; the gradient of the weight that of the product, but for the scale, or that of a
// declared parameter. What is dropped weighs 0 and has no gradient, whatever its operands are. Whether the pair is kept.
inline bool to_weight(
    thread float& product, thread float& gradient, float scale, Row row, bool kept, int4 place, constant BackwardParams& params,
    Captured captured) {
    const float raw = product * scale;
    float score = raw;
#if WITH_SCORE_MOD || WITH_GRADIENT || WITH_KEEP
    // Tensors have no elements past the ends.
    const Place at = {place.x, place.y, min(place.z, params.seq_q - 1), min(place.w, params.seq_kv - 1)};
#endif
#if WITH_SCORE_MOD
    score = score_mod(raw, at, captured);
#endif
#if WITH_KEEP
    kept = kept && keep(at, captured);
#endif
    kept = kept && !(score < LOWEST) && !(row.stats >= -(DROPPED));
    const float weight = kept ? exp2(score * LOG2_E - row.stats) : 0.0f;
#if WITH_DROPOUT
    const float left = left_of(place, params.heads_q, params.seq_q, captured);
    float slope = weight * (gradient * left - row.delta);
    product = weight * left;
#else
    float slope = weight * (gradient - row.delta);
    product = weight;
#endif
#if WITH_GRADIENT
    slope = score_mod_gradient(raw, slope, at, captured);
#endif
    gradient = kept ? slope : 0.0f;
    return kept;
}
