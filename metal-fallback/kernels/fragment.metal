// Fragments of 8 x 8 matrices, distributed over the lanes of a simdgroup: each lane holds two adjacent elements of one row.

// The row of a lane in a fragment. The four lanes of a row differ in bits 0 and 3 of their numbers.
inline int fragment_row(uint lane) {
    return int(((lane >> 2) & 4u) + ((lane >> 1) & 3u));
}

// The first of a lane's two columns.
inline int fragment_column(uint lane) {
    return int(((lane >> 1) & 4u) + ((lane & 1u) << 1));
}

// The lane that holds a column of a row.
inline ushort fragment_lane(int row, int column) {
    return ushort(((row & 4) << 2) + ((row & 3) << 1) + ((column & 4) << 1) + ((column >> 1) & 1));
}

// d += a b.
inline void multiply_add(thread float2& d, float2 a, float2 b) {
    simdgroup_float8x8 left, right, sum;
    reinterpret_cast<thread float2&>(left.thread_elements()) = a;
    reinterpret_cast<thread float2&>(right.thread_elements()) = b;
    reinterpret_cast<thread float2&>(sum.thread_elements()) = d;
    simdgroup_multiply_accumulate(sum, left, right, sum);
    d = reinterpret_cast<thread float2&>(sum.thread_elements());
}

// The largest number in a row of fragments; all lanes of the row receive it.
inline float row_maximum(float x) {
    x = max(x, simd_shuffle_xor(x, ushort(1)));
    return max(x, simd_shuffle_xor(x, ushort(8)));
}

// The sum of a row of fragments.
inline float row_total(float x) {
    x += simd_shuffle_xor(x, ushort(1));
    return x + simd_shuffle_xor(x, ushort(8));
}

// The sum of a column of fragments.
inline float column_total(float x) {
    x += simd_shuffle_xor(x, ushort(2));
    x += simd_shuffle_xor(x, ushort(4));
    return x + simd_shuffle_xor(x, ushort(16));
}

// Copies rows to threadgroup memory, with all threads; `stride` is between
// rows, `step` between elements. Rows from `present` on and
// columns from DIM on become 0, since device memory may hold anything there. Returns whether this thread copied an infinity or NaN.
template <int ROWS, int DIM, int PADDED, int PITCH>
inline bool load_tile(
    threadgroup Element* tile, const device Element* from, long stride, long step, int present, int thread_index) {
    bool odd = false;
    for (int at = thread_index; at < ROWS * PADDED; at += THREADS) {
        const int row = at / PADDED;
        const int column = at % PADDED;
        const bool there = row < present && column < DIM;
        const Element value = there ? from[row * stride + column * step] : Element(0.0f);
        tile[row * PITCH + column] = value;
        odd = odd || is_odd(float(value));
    }
    return odd;
}

// Threadgroup memory through which simdgroups report infinities and NaN to each other. A single simdgroup does not need it.
#if THREADS > 32
#define ODD_ARGUMENT(slot) threadgroup uint* odd_told [[threadgroup(slot)]],
#define ODD_TOLD odd_told
#else
#define ODD_ARGUMENT(slot)
#define ODD_TOLD nullptr
#endif

// Reports to the threadgroup whether a thread of this simdgroup has copied an infinity or NaN. A barrier must follow.
inline void tell_odd(threadgroup uint* told, bool odd, uint simdgroup, uint lane) {
    const bool any = simd_any(odd);
    if (THREADS > 32 && lane == 0) {
        told[simdgroup] = any ? 1u : 0u;
    }
}

// After that barrier, returns whether any thread of the threadgroup has copied an infinity or NaN.
inline bool any_odd(const threadgroup uint* told, bool odd) {
    if (THREADS == 32) {
        return simd_any(odd);
    }
    uint any = 0;
    for (int s = 0; s < THREADS / 32; s++) {
        any |= told[s];
    }
    return any != 0;
}

// d += a b^T over WIDTH columns, for eight rows of `a` and ROWS rows of `b`. Both point to this lane's first element: `a` to its (row,
// column), `b` to its (column, row).
template <int WIDTH, int ROWS, int PITCH>
inline void multiply_transposed(thread float2* d, const threadgroup Element* a, const threadgroup Element* b) {
    UNROLL for (int at = 0; at < WIDTH; at += 8) {
        const float2 left = float2(float(a[at]), float(a[at + 1]));
        UNROLL for (int j = 0; j < ROWS / 8; j++) {
            const threadgroup Element* right = b + j * 8 * PITCH + at;
            multiply_add(d[j], left, float2(float(right[0]), float(right[PITCH])));
        }
    }
}

// sums += weights * tile, for WIDTH columns of the tile from `slice` on.
template <int WIDTH, int PADDED, int PITCH>
inline void add_products(
    thread float2* sums, const thread float2* weights, const threadgroup Element* tile, int slice, int row, int column) {
    UNROLL for (int j = 0; j < PASSING / 8; j++) {
        UNROLL for (int d = 0; d < WIDTH; d += 8) {
            if (slice + d < PADDED) {
                const threadgroup Element* from = tile + (j * 8 + row) * PITCH + slice + d + column;
                multiply_add(sums[d / 8], weights[j], float2(float(from[0]), float(from[1])));
            }
        }
    }
}

// Like add_products, for a tile that has an infinity or NaN, whose product with a weight of 0 would be NaN. A pair whose bit in `kept` is 0 adds nothing.
template <int WIDTH, int PADDED, int PITCH>
inline void add_kept_products(
    thread float2* sums, const thread float2* weights, uint kept, const threadgroup Element* tile, int slice, int row, int column) {
    UNROLL for (int j = 0; j < PASSING / 8; j++) {
        for (int c = 0; c < 8; c++) {
            const ushort holder = fragment_lane(row, c);
            const float weight = simd_shuffle((c & 1) == 0 ? weights[j][0] : weights[j][1], holder);
            const bool there = (simd_shuffle(kept, holder) >> (j * 2 + (c & 1)) & 1u) != 0;
            const threadgroup Element* from = tile + (j * 8 + c) * PITCH + slice + column;
            UNROLL for (int d = 0; d < WIDTH; d += 8) {
                if (there && slice + d < PADDED) {
                    sums[d / 8] = sums[d / 8] + float2(float(from[d]), float(from[d + 1])) * weight;
                }
            }
        }
    }
}
