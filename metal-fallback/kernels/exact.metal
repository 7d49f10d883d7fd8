// The log-sum-exp of a row as two floats: a score, plus a number in base 2. One float cannot represent the logarithm of the number of
// keys next to a maximum of -1e9, which an additive mask can give to a whole row.

// The base-2 part of the log-sum-exp of a row without keys. It makes P 0.
#define WITHOUT_KEYS -(LOWEST)

// Statistics of at least this size are recomputed. Below it, rounding them to float changes P by a relative 2^-16 at most, and by 2^-13 for 16-bit types.
#define LARGE_STAT (sizeof(Element) == 4 ? 512.0f : 4096.0f)

// Converts the caller's statistic to a log-sum-exp as two floats.
inline float2 lse_of_stat(float stat) {
    return stat < LOWEST ? float2(0.0f, WITHOUT_KEYS) : float2(stat, 0.0f);
}

inline bool is_large(float stat) {
    return !is_odd(stat) && abs(stat) >= LARGE_STAT;
}

// Returns the recomputed log-sum-exp if it rounds to the caller's statistic, within one unit in the last place; else that
// statistic. The statistic may differ because the caller merged results over several parts of the keys, which makes the statistic larger.
inline float2 nearest_to(float stat, float row_max, float row_sum) {
    const float off = row_max - stat + log2(row_sum) * LN_2;
    return row_sum != 0.0f && abs(off) <= abs(stat) * 1.1920928955078125e-7f ? float2(row_max, log2(row_sum)) : lse_of_stat(stat);
}
