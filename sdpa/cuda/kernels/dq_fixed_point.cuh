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

// The largest magnitude and the sum of magnitudes of some elements. `finite` is false if there is an infinity or NaN, which do not count.
struct Magnitudes {
    float largest, sum;
    bool finite;
};

inline void add_magnitude(Magnitudes& to, float x) {
    const float magnitude = fabsf(x);
    if (magnitude < INFINITE) {
        to.largest = fmaxf(to.largest, magnitude);
        to.sum += magnitude;
    } else {
        to.finite = false;
    }
}

// Adds a lane's eight elements of a row, as far as the row has them.
inline void add_magnitudes(Magnitudes& to, const Element* row, int first, int dim) {
    if (first + 8 <= dim) {
        const float4 words = *reinterpret_cast<const float4*>(row + first);
        const float pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            add_magnitude(to, float(Element{(unsigned short)(__float_as_uint(pairs[n]) & 0xffffu)}));
            add_magnitude(to, float(Element{(unsigned short)(__float_as_uint(pairs[n]) >> 16)}));
        }
    } else {
        for (int at = first; at < dim; at++) add_magnitude(to, float(row[at]));
    }
}

// Finds max |K| and max |V|_1 of each KV head, over the sequence's own keys, and KV blocks whose K has an infinity or NaN. One CTA per KV block; 16 lanes per
// key. Both maxima are stored as the bits of f32, whose order as integers is that of the numbers.
extern "C" __global__ void __launch_bounds__(256, 1) attention_backward_bounds(const __grid_constant__ Params p) {
    const int heads_kv = p.heads_q / p.group, block = blockIdx.x % p.blocks, unit = blockIdx.x / p.blocks, batch = unit / heads_kv, head = unit % heads_kv;
    const SeqInfo seq_info = seq_info_of(p, batch);
    const int first = 8 * (threadIdx.x & 15);
    float largest_k = 0.0f, largest_v = 0.0f;
    bool finite = true;
    for (int n = threadIdx.x / 16; n < TILE_N; n += 16) {
        const int key = block * TILE_N + n;
        Magnitudes v = {0.0f, 0.0f, true};
        if (key < seq_info.len_kv) {
            const auto row_at = [&](const void* at, long batch_stride, long head_stride, long row_stride) {
                const long of_batch = WITH_PACKED_KV ? seq_info.begin_kv * row_stride : batch * batch_stride;
                return static_cast<const Element*>(at) + of_batch + head * head_stride + key * row_stride;
            };
            Magnitudes k = {0.0f, 0.0f, true};
            add_magnitudes(k, row_at(p.k, p.k_batch, p.k_head, p.k_row), first, p.dim_qk);
            add_magnitudes(v, row_at(p.v, p.v_batch, p.v_head, p.v_row), first, p.dim_v);
            largest_k = fmaxf(largest_k, k.largest);
            finite = finite && k.finite;
        }
        for (int apart = 8; apart > 0; apart /= 2) v.sum += __shfl_xor_sync(~0u, v.sum, apart);
        largest_v = fmaxf(largest_v, v.sum);
    }
    for (int apart = 16; apart > 0; apart /= 2) {
        largest_k = fmaxf(largest_k, __shfl_xor_sync(~0u, largest_k, apart));
        largest_v = fmaxf(largest_v, __shfl_xor_sync(~0u, largest_v, apart));
    }
    const bool any = __any_sync(~0u, !finite);
    if ((threadIdx.x & 31) != 0) return;
    atomicMax(p.kv_bounds + 2 * unit, __float_as_int(largest_k));
    atomicMax(p.kv_bounds + 2 * unit + 1, __float_as_int(largest_v));
    if (any) p.k_not_finite[blockIdx.x] = 1;
}

// Returns the scale of a query from its own bounds and those of its KV head.
inline float dq_scale_of_row(const Params& p, int batch, int head, float largest_d_o, float delta) {
    const int unit = batch * (p.heads_q / p.group) + head / p.group;
    const float largest_k = __int_as_float(p.kv_bounds[2 * unit]), largest_v = __int_as_float(p.kv_bounds[2 * unit + 1]);
    const float d_p = largest_d_o * largest_v * (WITH_DROPOUT ? p.dropout_scale : 1.0f);
    return dq_scale_of((d_p + fabsf(delta)) * largest_k * __int_as_float(SCORE_MOD_GAIN_BITS));
}

inline uint max_abs_nan(Half, uint x, uint y) { return max_abs_nan_f16x2(x, y); }
inline uint max_abs_nan(BFloat, uint x, uint y) { return max_abs_nan_bf16x2(x, y); }

// Returns whether either 16-bit float of a pair is an infinity or NaN: all bits of the exponent are 1.
inline bool has_infinity_or_nan(uint pair, uint exponent) {
    return (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
}
inline bool has_infinity_or_nan(Half, uint pair) { return has_infinity_or_nan(pair, 0x7c00u); }
inline bool has_infinity_or_nan(BFloat, uint pair) { return has_infinity_or_nan(pair, 0x7f80u); }

// Marks the queries of a thread's scores whose dS is no finite number. Integers have no NaN, so the scale becomes NaN.
inline void mark_not_finite(const Params& p, const FragmentOrigin& origin, const uint (&ds_packed)[SCORES / 2]) {
    uint largest = 0;
#pragma unroll
    for (int n = 0; n < SCORES / 2; n++) largest = max_abs_nan(Element{}, largest, ds_packed[n]);
    if (__builtin_expect(!has_infinity_or_nan(Element{}, largest), 1)) return;
    float* const scales = p.dq_scale + q_tile_index(p, seq_info_of(p, origin.batch), origin.batch, origin.head, origin.q / TILE_M) * TILE_M;
    for (int n = 0; n < SCORES / 2; n++) {
        const int q = fragment_column(origin.q, 2 * n) % TILE_M;
        if (has_infinity_or_nan(Element{}, ds_packed[n] & 0xffffu)) scales[q] = NOT_A_NUMBER;
        if (has_infinity_or_nan(Element{}, ds_packed[n] >> 16)) scales[q + 1] = NOT_A_NUMBER;
    }
    __threadfence();
}
