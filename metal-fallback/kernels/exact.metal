// The log-sum-exp of a row as two floats: a score, and in base 2 what is added to it. One float has no room for the logarithm of the number
// of keys next to a maximum of -1e9, which an additive mask gives to whole rows.

// In base 2, of a row without keys: P is 0.
#define WITHOUT_KEYS -(LOWEST)

// Statistics from this size on are computed again. Below, their rounding to float changes P by at most 2^-16 of itself, 2^-13 for 16-bit types.
#define LARGE_STAT (sizeof(Element) == 4 ? 512.0f : 4096.0f)

// The log-sum-exp as the caller's statistic has it.
inline float2 lse_of_stat(float stat) {
    return stat < LOWEST ? float2(0.0f, WITHOUT_KEYS) : float2(stat, 0.0f);
}

inline bool is_large(float stat) {
    return !is_odd(stat) && abs(stat) >= LARGE_STAT;
}

// The maximum and sum of this pass, if they round to the caller's statistic, give or take one unit in the last place; else that statistic: one
// that was merged over several parts of the keys is larger than the sum of this part.
inline float2 nearest_to(float stat, float row_max, float row_sum) {
    const float off = row_max - stat + log2(row_sum) * LN_2;
    return row_sum != 0.0f && abs(off) <= abs(stat) * 1.1920928955078125e-7f ? float2(row_max, log2(row_sum)) : lse_of_stat(stat);
}
