// Fixed-point sums of dQ, for deterministic passes. Each CTA's part of dQ is rounded to an integer, and integers are added in any order with the same sum. The
// scale is one power of two for each query, from a bound of the complete sum: |dQ| <= (max |dO| max |V|_1 / (1 - dropout) + |delta|) max |K| gain,
// because the sum of P is 1. The gain bounds the derivative of the score_mod.

// Bits of the bound. The sum needs one more bit for the sign. Another bit is left for roundings of P, dS and the bound.
constexpr int FIXED_POINT_BITS = 30;

#define NOT_A_NUMBER __int_as_float(0x7fc00000)

// Returns the scale of a query; NaN if the bound is no finite number. The converted dQ is then NaN too.
inline float dq_scale_of(float bound) {
    if (!(bound < INFINITE)) return NOT_A_NUMBER;
    // The bound is less than 2^exponent.
    const int exponent = int(__float_as_uint(bound) >> 23) - 126;
    return __int_as_float((min(FIXED_POINT_BITS - exponent, 126) + 127) << 23);
}

// Eight elements of a row as four pairs; zeros beyond the row.
struct Elements {
    uint pairs[4];
};

inline Elements load_elements(const Element* row, int first, int dim) {
    Elements e = {{0, 0, 0, 0}};
    if (first + 8 <= dim) {
        const float4 words = *reinterpret_cast<const float4*>(row + first);
        e = Elements{{__float_as_uint(words.x), __float_as_uint(words.y), __float_as_uint(words.z), __float_as_uint(words.w)}};
    } else {
#pragma unroll
        for (int n = 0; n < 8; n++)
            if (first + n < dim) e.pairs[n / 2] |= uint(row[first + n].bits) << (n & 1) * 16;
    }
    return e;
}

// The bits of the exponent, which are all 1 in an infinity or NaN.
inline uint exponent_bits(Half) { return 0x7c00u; }
inline uint exponent_bits(BFloat) { return 0x7f80u; }

// Adds the largest magnitude among elements, as bits, whose order is that of the numbers. `largest` has one for each half of the pairs.
inline void add_largest(uint& largest, const Elements& e) {
#pragma unroll
    for (int n = 0; n < 4; n++) largest = __vmaxu2(largest, e.pairs[n] & 0x7fff7fffu);
}

inline uint larger_half(uint pair) { return max(pair & 0xffffu, pair >> 16); }

// Returns the bits of an element's magnitude.
inline uint magnitude_bits(const Elements& e, int n) { return e.pairs[n / 2] >> (n & 1) * 16 & 0x7fffu; }

// Returns the largest magnitude of the finite elements, as bits.
inline uint largest_finite(const Elements& e) {
    uint largest = 0;
    for (int n = 0; n < 8; n++)
        if (magnitude_bits(e, n) < exponent_bits(Element{})) largest = max(largest, magnitude_bits(e, n));
    return largest;
}

// Returns the sum of the magnitudes of the finite elements.
inline float finite_magnitudes(const Elements& e) {
    float sum = 0.0f;
    for (int n = 0; n < 8; n++)
        if (magnitude_bits(e, n) < exponent_bits(Element{})) sum += float(Element{(unsigned short)magnitude_bits(e, n)});
    return sum;
}

inline float magnitudes(const Elements& e) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; n++) sum += float(Element{(unsigned short)magnitude_bits(e, n)});
    // Few elements are infinite or NaN.
    return __builtin_expect(sum < INFINITE, 1) ? sum : finite_magnitudes(e);
}

// Number of lanes that share a key, of which each reads eight elements, and of keys whose loads are under way at once.
constexpr int KEY_LANES = DIM_QK > 128 || DIM_V > 128 ? 32 : 16;
constexpr int KEYS_AT_ONCE = 256 / KEY_LANES, KEY_ROUNDS = 4;

// Returns whether some query of the KV head's group may attend to a key of the KV block.
inline bool is_read(const Params& p, const SeqInfo& seq_info, int batch, int kv_head, int block) {
    const BlockRange range = block_range_of(p, seq_info, block);
    bool any = false;
    for (int n = 0; n < p.group && !any; n++) {
        const BlockIterator iterator = block_iterator(p, range, batch, kv_head * p.group + n, block);
        any = iterator.at < iterator.end;
    }
    return any;
}

// Returns whether some query may attend to the key. Masks that differ by query are evaluated for whole KV blocks only. In a batch-invariant pass, the
// result does not depend on which queries the call has.
inline bool is_attended(const Params& p, const Captured& captured, const SeqInfo& seq_info, int batch, int kv_head, int key) {
    const Range queries = attending_queries(p, seq_info, key);
    if (!BATCH_INVARIANT && queries.begin >= queries.end) return false;
#if KEEPS_BY_KEY
    return keep(place_at(p, batch, kv_head * p.group, 0, key, 0, 0), captured);
#else
    return true;
#endif
}

// Finds max |K| and max |V|_1 of each KV head, over the keys that queries attend to: masked-out keys must not change the scale, and may be of any size.
// Infinities and NaNs do not count. One CTA per KV block. Both maxima are stored as the bits of f32, whose order as integers is that of the numbers.
extern "C" __global__ void __launch_bounds__(256, 4) attention_backward_bounds(const __grid_constant__ Params p, const __grid_constant__ Captured captured) {
    const int heads_kv = p.heads_q / p.group, block = blockIdx.x % p.blocks, unit = blockIdx.x / p.blocks, batch = unit / heads_kv, head = unit % heads_kv;
    const SeqInfo seq_info = seq_info_of(p, batch);
    if (!BATCH_INVARIANT && !is_read(p, seq_info, batch, head, block)) return;
    const int first = 8 * (threadIdx.x % KEY_LANES);
    const auto row_at = [&](const void* at, long batch_stride, long head_stride, long row_stride, int key) {
        const long of_batch = WITH_PACKED_KV ? seq_info.begin_kv * row_stride : batch * batch_stride;
        return static_cast<const Element*>(at) + of_batch + head * head_stride + key * row_stride;
    };
    uint largest_bits = 0;
    float largest_v = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < TILE_N; begin += KEY_ROUNDS * KEYS_AT_ONCE) {
        // All loads of a round are issued before the first use.
        Elements k[KEY_ROUNDS], v[KEY_ROUNDS];
        uint largest_pair = 0;
        float sums[KEY_ROUNDS];
#pragma unroll
        for (int n = 0; n < KEY_ROUNDS; n++) {
            const int key = block * TILE_N + begin + threadIdx.x / KEY_LANES + n * KEYS_AT_ONCE;
            const bool any = key < seq_info.len_kv && is_attended(p, captured, seq_info, batch, head, key);
            k[n] = load_elements(row_at(p.k, p.k_batch, p.k_head, p.k_row, key), first, any ? p.dim_qk : 0);
            v[n] = load_elements(row_at(p.v, p.v_batch, p.v_head, p.v_row, key), first, any ? p.dim_v : 0);
        }
#pragma unroll
        for (int n = 0; n < KEY_ROUNDS; n++) add_largest(largest_pair, k[n]), sums[n] = magnitudes(v[n]);
        if (__builtin_expect(larger_half(largest_pair) >= exponent_bits(Element{}), 0)) {
            largest_pair = 0;
#pragma unroll
            for (int n = 0; n < KEY_ROUNDS; n++) largest_pair = max(largest_pair, largest_finite(k[n]));
        }
        largest_bits = max(largest_bits, larger_half(largest_pair));
        // Half of the lanes add half of the keys, then a quarter of them, so that there are fewer shuffles.
        int apart = KEY_LANES / 2;
#pragma unroll
        for (int count = KEY_ROUNDS / 2; count > 0; count /= 2, apart /= 2) {
            const bool upper = threadIdx.x & apart;
#pragma unroll
            for (int n = 0; n < count; n++) {
                const float given = upper ? sums[n] : sums[n + count], kept = upper ? sums[n + count] : sums[n];
                sums[n] = kept + __shfl_xor_sync(~0u, given, apart);
            }
        }
        for (; apart > 0; apart /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], apart);
        largest_v = fmaxf(largest_v, sums[0]);
    }
    float largest_k = float(Element{(unsigned short)largest_bits});
    for (int apart = 16; apart > 0; apart /= 2) {
        largest_k = fmaxf(largest_k, __shfl_xor_sync(~0u, largest_k, apart));
        largest_v = fmaxf(largest_v, __shfl_xor_sync(~0u, largest_v, apart));
    }
    if ((threadIdx.x & 31) != 0) return;
    atomicMax(p.kv_bounds + 2 * unit, __float_as_int(largest_k));
    atomicMax(p.kv_bounds + 2 * unit + 1, __float_as_int(largest_v));
}

// Returns the inverse of a scale, which is a power of two or NaN.
inline float inverse_of_scale(float scale) { return __fmaf_rn(scale, 0.0f, __uint_as_float(0x7f000000u - __float_as_uint(scale))); }

// Returns the scale of a query from its own bounds and those of its KV head.
inline float dq_scale_of_row(const Params& p, int batch, int head, float largest_d_o, float delta) {
    const int unit = batch * (p.heads_q / p.group) + head / p.group;
    const float largest_k = __int_as_float(p.kv_bounds[2 * unit]), largest_v = __int_as_float(p.kv_bounds[2 * unit + 1]);
    const float d_p = largest_d_o * largest_v * (WITH_DROPOUT ? p.dropout_scale : 1.0f);
    return dq_scale_of((d_p + fabsf(delta)) * largest_k * __int_as_float(SCORE_MOD_GAIN_BITS));
}

// The sum of a number below 2^22 and this one has the number's nearest integer in its low bits: a unit in its last place is 1.
constexpr float INTEGER_OFFSET = 12582912.0f;
constexpr uint INTEGER_OFFSET_BITS = 0x4b400000u;
constexpr float INTEGER_LIMIT = 4194304.0f;

// Rounds element `n` of a thread's dQ to an integer. `scales` has the scales of its first query and of the one eight queries later.
inline uint rounded_dq(const float (&sums)[DQ], int n, const float2& scales) {
    return __float_as_uint(__fmaf_rn(sums[n], fragment_half(n) ? scales.y : scales.x, INTEGER_OFFSET));
}

// Returns false unless `rounded_dq` rounds these elements right. No element is larger than the root of the sum of squares, which takes one FMA for each, and
// is NaN or infinite if an element is. Where squares may underflow, the square of the scale is infinite, and the comparison is false.
inline bool rounds_right(const float (&sums)[DQ], const float2& scales) {
    float squares[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < DQ; n++) squares[n % 8] = __fmaf_rn(sums[n], sums[n], squares[n % 8]);
    const float first = (squares[0] + squares[1]) + (squares[4] + squares[5]), second = (squares[2] + squares[3]) + (squares[6] + squares[7]);
    return first * (scales.x * scales.x) < INTEGER_LIMIT * INTEGER_LIMIT && second * (scales.y * scales.y) < INTEGER_LIMIT * INTEGER_LIMIT;
}

// Rounds elements of any size. Conversions have an eighth of the throughput of FMAs. Integers have no infinity or NaN, so a query with such an element has the
// scale NaN from then on; `stored` points to the scale of the first query.
inline void round_any_dq(uint (&parts)[DQ], const float (&sums)[DQ], const float2& scales, float* stored) {
    bool marked = false;
#pragma unroll
    for (int n = 0; n < DQ; n++) {
        parts[n] = uint(__float2int_rn(sums[n] * (fragment_half(n) ? scales.y : scales.x))) + INTEGER_OFFSET_BITS;
        if (!(fabsf(sums[n]) < INFINITE)) stored[fragment_row(n)] = NOT_A_NUMBER, marked = true;
    }
    if (marked) __threadfence();
}

#if !DQ_BY_TMA
// Adds a slice of dQ to the accumulator, two neighbouring elements by one 64-bit addition: the sum of the lower ones carries into the upper ones, and the
// conversion to dQ takes the carry back. `place` is the index of the thread's first query among the rows of all query tiles.
inline void red_add_fixed_dq(const float (&sums)[DQ], const Params& p, int place, const float2& scales, int slice) {
    const int query_tile = place / TILE_M;
    ulong64* const to = reinterpret_cast<ulong64*>(p.dq_accum + (long(query_tile) * SLICES + slice) * DQ_SLICE) + (threadIdx.x & 127);
    if (slice == 0 && (threadIdx.x & 127) == 0) atomicAdd(p.dq_parts + query_tile, 1);
    if (__builtin_expect(rounds_right(sums, scales), 1)) {
#pragma unroll
        for (int n = 0; n < DQ; n += 2) red_add_u64(to + n * 64, ulong64(rounded_dq(sums, n + 1, scales)) << 32 | rounded_dq(sums, n, scales));
    } else {
        uint parts[DQ];
        round_any_dq(parts, sums, scales, p.dq_scale + place);
#pragma unroll
        for (int n = 0; n < DQ; n += 2) red_add_u64(to + n * 64, ulong64(parts[n + 1]) << 32 | parts[n]);
    }
}
#endif
