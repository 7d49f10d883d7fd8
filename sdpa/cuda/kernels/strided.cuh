// Loads to shared memory and stores from registers for tensors of any strides and alignment. Called by the sm_80 kernels.

inline uint bits_of(Half x) { return x.bits; }
inline uint bits_of(BFloat x) { return x.bits; }
inline uint bits_of(float x) { return __float_as_uint(x); }

inline const Element* row_of(const Strided& extent, int batch, int head, int row) {
    return extent.at + batch * extent.batch + head * extent.head + row * extent.row;
}

// Rows of a sequence: the token at which the sequence begins (0 if not packed), the first row to access, and the number of rows of the sequence.
struct Extent {
    int begin;
    int first;
    int rows;
};

// Loads rows from `first` on to shared memory; rows from `seq` on and columns from `dim` on become zeros. `row_at` gives the address of a row. `wide`:
// rows are 16-byte aligned and copied by cp.async, which the caller waits for.
template <int rows, int columns, bool wide, class At>
inline void load_rows_at(uint to, uint row_bytes, const Strided& from, int first, int seq, int dim, At row_at) {
    constexpr int PER = 16 / ELEMENT_BYTES, CHUNKS = columns / PER;
    // Not unrolled: keeping several addresses live would use registers that the accumulators need.
#pragma unroll 1
    for (int n = threadIdx.x; n < rows * CHUNKS; n += THREADS) {
        const int row = n / CHUNKS, column = n % CHUNKS * PER;
        const int left = first + row < seq ? max(0, min(PER, dim - column)) : 0;
        const uint at = to + row * row_bytes + column * ELEMENT_BYTES;
        const Element* element = left > 0 ? row_at(first + row) + column * from.dim : from.at;
        if (wide) {
            cp_async_16(at, element, left * ELEMENT_BYTES);
        } else {
            uint words[4] = {0, 0, 0, 0};
#pragma unroll
            for (int m = 0; m < PER; m++) {
                if (m < left) words[m * ELEMENT_BYTES / 4] |= bits_of(element[m * from.dim]) << (m * ELEMENT_BYTES % 4 * 8);
            }
            st_shared_v4_b32(at, words[0], words[1], words[2], words[3]);
        }
    }
}

// Like load_rows_at, for rows at a constant stride.
template <int rows, int columns, bool wide>
inline void load_rows(uint to, uint row_bytes, const Strided& from, int batch, int head, const Extent& extent, int dim) {
    const auto at = [&](int row) { return row_of(from, batch, head, extent.begin + row); };
    load_rows_at<rows, columns, wide>(to, row_bytes, from, extent.first, extent.rows, dim, at);
}

inline void store_two(Half* to, float x, float y) { *reinterpret_cast<uint*>(to) = cvt_rn_f16x2(x, y); }
inline void store_two(BFloat* to, float x, float y) { *reinterpret_cast<uint*>(to) = cvt_rn_bf16x2(x, y); }
inline void store_two(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = float2{x, y}; }
inline void store_one(Half* to, float x) { to->bits = (unsigned short)(cvt_rn_f16x2(x, 0.0f) & 0xffffu); }
inline void store_one(BFloat* to, float x) { to->bits = (unsigned short)(cvt_rn_bf16x2(x, 0.0f) & 0xffffu); }
inline void store_one(float* to, float x) { *to = x; }

// Stores a warp's 16 rows of accumulators, multiplied by a factor per row. `pairs`: rows are aligned to two elements.
template <bool pairs, int count>
inline void store_rows(const Strided& to, const float (&x)[count], const float (&times)[2], int batch, int head, const Extent& extent, int row,
                       int first_column, int dim) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= extent.rows) continue;
        Element* at = const_cast<Element*>(row_of(to, batch, head, extent.begin + row + 8 * half));
        const float by = times[half];
#pragma unroll
        for (int n = 2 * half; n < count; n += 4) {
            const int column = first_column + n / 4 * 8 + thread_column(lane);
            // A factor of 0 gives 0 even if the sum is NaN.
            const float first = by == 0.0f ? 0.0f : x[n] * by, second = by == 0.0f ? 0.0f : x[n + 1] * by;
            if (pairs) {
                if (column < dim) store_two(at + column, first, second);
            } else {
                if (column < dim) store_one(at + column, first);
                if (column + 1 < dim) store_one(at + column + 1, second);
            }
        }
    }
}
