// Scores as the softmax sees them.

// A product of a query and a key becomes its score in powers of two; DROPPED where the query does not keep the key, whatever the
// product is.
inline float score_of(float product, bool kept, int4 place, constant ForwardParams& params, Captured captured) {
    float score = product * params.scale;
#if WITH_SCORE_MOD || WITH_KEEP
    // Tensors have no elements past the ends.
    const Place at = {place.x, place.y, min(place.z, params.seq_q - 1), min(place.w, params.seq_kv - 1)};
#endif
#if WITH_SCORE_MOD
    score = score_mod(score, at, captured) * LOG2_E;
#endif
#if WITH_KEEP
    kept = kept && keep(at, captured);
#endif
    return kept ? score : DROPPED;
}
