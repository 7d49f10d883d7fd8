// GEMMs of one warp with mma.sync: 16 rows of A by rows (A B^T) or columns (A B) of B in shared memory. f32 operands are computed in 3xTF32. Called by
// the sm_80 kernels.

constexpr int ELEMENT_BYTES = sizeof(Element);
constexpr int THREADS = 32 * WARPS;
// Rows are padded by 16 bytes, so that the eight rows of an ldmatrix matrix are in different banks.
constexpr uint QK_ROW = DIM_QK * ELEMENT_BYTES + 16;
constexpr uint V_ROW = DIM_V * ELEMENT_BYTES + 16;
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;
#define INFINITE __int_as_float(0x7f800000)

#if SINGLE

// x as the sum of two TF32 numbers.
inline void split_tf32(float x, uint& high, uint& low) {
    high = cvt_rna_tf32(x);
    low = cvt_rna_tf32(x - __uint_as_float(high));
}

// A thread reads adjacent columns, which permutes the k index of the MMA. B is read in the same way, so the sum is unchanged.
inline void load_a_3xtf32(uint (&x)[4], uint (&low)[4], uint at, uint row_bytes) {
    const int lane = threadIdx.x & 31;
    const uint from = at + (lane >> 2) * row_bytes + (lane & 3) * 8;
    const float2 first = ld_shared_v2_f32(from), second = ld_shared_v2_f32(from + 8 * row_bytes);
    split_tf32(first.x, x[0], low[0]);
    split_tf32(second.x, x[1], low[1]);
    split_tf32(first.y, x[2], low[2]);
    split_tf32(second.y, x[3], low[3]);
}

// S = A B^T: 16 rows at `a`, `count / 2` rows at `b`, summed over `columns`.
template <int columns, int count>
inline void warp_gemm_abt(float (&s)[count], uint a, uint b, uint row_bytes) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < count; n++) s[n] = 0.0f;
#pragma unroll 2
    for (int step = 0; step < columns / 8; step++) {
        uint x[4], x_low[4];
        load_a_3xtf32(x, x_low, a + step * 32, row_bytes);
#pragma unroll
        for (int n = 0; n < count; n += 4) {
            const float2 pair = ld_shared_v2_f32(b + (2 * n + (lane >> 2)) * row_bytes + step * 32 + (lane & 3) * 8);
            uint y[2], y_low[2];
            split_tf32(pair.x, y[0], y_low[0]);
            split_tf32(pair.y, y[1], y_low[1]);
            float d[4] = {s[n], s[n + 1], s[n + 2], s[n + 3]};
            mma_m16n8k8_3xtf32(d, x, x_low, y, y_low);
#pragma unroll
            for (int m = 0; m < 4; m++) s[n + m] = d[m];
        }
    }
}

// sums += A B: A from the accumulators of another GEMM, B at `b`, with a row for each column of A.
template <int a_values, int count>
inline void warp_gemm_ab(float (&sums)[count], const float (&a_fragments)[a_values], uint b, uint row_bytes) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 0; step < a_values; step += 4) {
        uint x[4], x_low[4];
        split_tf32(a_fragments[step], x[0], x_low[0]);
        split_tf32(a_fragments[step + 2], x[1], x_low[1]);
        split_tf32(a_fragments[step + 1], x[2], x_low[2]);
        split_tf32(a_fragments[step + 3], x[3], x_low[3]);
        const uint from = b + (2 * step + 2 * (lane & 3)) * row_bytes + (lane >> 2) * 4;
#pragma unroll
        for (int n = 0; n < count; n += 4) {
            uint y[2], y_low[2];
            split_tf32(__uint_as_float(ld_shared(from + n * 8)), y[0], y_low[0]);
            split_tf32(__uint_as_float(ld_shared(from + row_bytes + n * 8)), y[1], y_low[1]);
            // Tensor cores truncate when they add to an accumulator. So each MMA starts from 0, and `sums` is accumulated here, with rounding.
            float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_m16n8k8_3xtf32(d, x, x_low, y, y_low);
#pragma unroll
            for (int m = 0; m < 4; m++) sums[n + m] += d[m];
        }
    }
}

#else

template <int columns, int count>
inline void warp_gemm_abt(float (&s)[count], uint a, uint b, uint row_bytes) {
    const int lane = threadIdx.x & 31;
    const uint from_a = a + (lane & 15) * row_bytes + (lane >> 4) * 16;
    const uint from_b = b + ((lane & 7) + (lane >> 4) * 8) * row_bytes + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int n = 0; n < count; n++) s[n] = 0.0f;
#pragma unroll
    for (int step = 0; step < columns / 16; step++) {
        uint x[4];
        ldmatrix_x4(x, from_a + step * 32);
#pragma unroll
        for (int n = 0; n < count; n += 8) {
            uint y[4];
            ldmatrix_x4(y, from_b + 2 * n * row_bytes + step * 32);
#pragma unroll
            for (int half = 0; half < 8; half += 4) {
                float d[4] = {s[n + half], s[n + half + 1], s[n + half + 2], s[n + half + 3]};
                mma_m16n8k16(Element{}, d, x, y[half / 2], y[half / 2 + 1]);
#pragma unroll
                for (int m = 0; m < 4; m++) s[n + half + m] = d[m];
            }
        }
    }
}

template <int a_values, int count>
inline void warp_gemm_ab(float (&sums)[count], const float (&a_fragments)[a_values], uint b, uint row_bytes) {
    const int lane = threadIdx.x & 31;
    const uint from = b + (lane & 15) * row_bytes + (lane >> 4) * 16;
#pragma unroll
    for (int step = 0; step < a_values; step += 8) {
        uint x[4];
#pragma unroll
        for (int m = 0; m < 4; m++) x[m] = pack_pair(Element{}, a_fragments[step + 2 * m], a_fragments[step + 2 * m + 1]);
#pragma unroll
        for (int n = 0; n < count; n += 8) {
            uint y[4];
            ldmatrix_x4_trans(y, from + 2 * step * row_bytes + n * 4);
#pragma unroll
            for (int half = 0; half < 8; half += 4) {
                float d[4] = {sums[n + half], sums[n + half + 1], sums[n + half + 2], sums[n + half + 3]};
                mma_m16n8k16(Element{}, d, x, y[half / 2], y[half / 2 + 1]);
#pragma unroll
                for (int m = 0; m < 4; m++) sums[n + half + m] = d[m];
            }
        }
    }
}

#endif
