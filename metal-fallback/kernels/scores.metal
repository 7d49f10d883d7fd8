// Scores as the softmax sees them.

#if WITH_SCORE_MOD || WITH_KEEP || WITH_GRADIENT
// Clamped to the extents, because tensors have no elements past them.
template <typename P>
inline Place place_of(int4 at, constant P& params) {
    return Place{at.x, at.y, min(at.z, params.seq_q - 1), min(at.w, params.seq_kv - 1)};
}
#endif

// Turns the product of a query and a key into a score, or into LOWEST if the query does not attend to the key, whatever the product is.
// Returns whether the query attends to the key.
template <typename P>
inline bool to_score(thread float& product, bool kept, int4 at, constant P& params, Captured captured) {
    float score = product * params.scale;
#if WITH_SCORE_MOD
    score = score_mod(score, place_of(at, params), captured);
#endif
#if WITH_KEEP
    kept = kept && keep(place_of(at, params), captured);
#endif
    // A score_mod may mask a key out by returning minus infinity.
    kept = kept && !(score < LOWEST);
    product = kept ? score : LOWEST;
    return kept;
}
