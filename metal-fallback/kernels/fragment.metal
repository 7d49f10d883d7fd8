// Pieces of 8 x 8 matrices, as the lanes of a simdgroup hold them: each lane two neighbours of one row.

// The row that a lane holds of a fragment; the lanes of one row differ in bits 0 and 3.
inline int fragment_row(uint lane) {
    return int(((lane >> 2) & 4u) + ((lane >> 1) & 3u));
}

// The first of a lane's two columns.
inline int fragment_column(uint lane) {
    return int(((lane >> 1) & 4u) + ((lane & 1u) << 1));
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

// The largest of a row of fragments; every lane of the row learns it.
inline float row_maximum(float x) {
    x = max(x, simd_shuffle_xor(x, ushort(1)));
    return max(x, simd_shuffle_xor(x, ushort(8)));
}

// The sum of a row of fragments.
inline float row_total(float x) {
    x += simd_shuffle_xor(x, ushort(1));
    return x + simd_shuffle_xor(x, ushort(8));
}

// Copies rows into threadgroup memory, all threads together; `stride` is between rows, `step` between elements. Rows from `present` on, and columns from DIM to PADDED, are 0:
// what lies there in device memory may be anything.
template <int ROWS, int DIM, int PADDED, int PITCH>
inline void load_tile(
    threadgroup Element* tile, const device Element* from, long stride, long step, int present, int thread_index) {
    for (int at = thread_index; at < ROWS * PADDED; at += THREADS) {
        const int row = at / PADDED;
        const int column = at % PADDED;
        const bool there = row < present && column < DIM;
        tile[row * PITCH + column] = there ? from[row * stride + column * step] : Element(0.0f);
    }
}

// Eight rows of one matrix times eight rows of another, transposed: d += a b^T over WIDTH columns. `a` and `b` are where this lane's
// elements begin: of `a` at its row and first column, of `b` at the row of its first column, and at the column of its row.
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
