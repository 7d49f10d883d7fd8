// For an attention that is computed in pieces: adds the results of a piece to those of earlier pieces. Elements have 16 bits; rows begin at multiples of
// 16 bytes and have a multiple of eight elements. A row is shared by `lanes` lanes, a power of two up to the warp size.

#include "elements.cuh"

struct alignas(16) Eight {
    unsigned pairs[4];
};

static __device__ float scaled(unsigned bits, float factor, number type) {
    // A value with factor 0 may be NaN, so do not multiply it.
    if (factor == 0.0f) return 0.0f;
    return factor * (type == 1 ? from_f16((unsigned short)bits) : of_bits(bits << 16));
}

static __device__ unsigned rounded(float value, number type) { return type == 1 ? to_f16(value) : to_bf16(value); }

// Returns x · a + y · b, rounded once.
static __device__ Eight sum(float x, const Eight &a, float y, const Eight &b, number type) {
    Eight all;
    for (int n = 0; n < 4; n++) {
        unsigned p = a.pairs[n], q = b.pairs[n];
        unsigned low = rounded(scaled(p & 0xffffu, x, type) + scaled(q & 0xffffu, y, type), type);
        unsigned high = rounded(scaled(p >> 16, x, type) + scaled(q >> 16, y, type), type);
        all.pairs[n] = low | high << 16;
    }
    return all;
}

static __device__ void add(char *to, float x, const char *from, float y, number width, number type, number lane, number lanes) {
    for (number i = lane; i < width / 8; i += lanes) ((Eight *)to)[i] = sum(x, ((Eight *)to)[i], y, ((const Eight *)from)[i], type);
}

// Returns the offset in bytes of row `n`, counted over (batch, heads, rows).
static __device__ number place(number n, number heads, number rows, number entry, number head, number row) {
    return (n / rows / heads * entry + n / rows % heads * head + n % rows * row) * 2;
}

// Merges the softmax over a part of the keys into the result so far. `stats` has `longest` rows per head; the rows of this part begin at row `from`.
extern "C" __global__ void merge_rows(number count, number heads, number rows, number longest, number from, float *stats, const float *own, char *o,
                                      number entry, number head, number row, const char *part, number part_entry, number part_head,
                                      number part_row, number width, number type, number lanes) {
    number t = (number)blockIdx.x * blockDim.x + threadIdx.x, n = t / lanes, lane = t % lanes;
    if (n >= count) return;
    float *before = stats + n / rows * longest + from + n % rows;
    float old = *before, here = own[n];
    if (here == none()) return;
    float top = old > here ? old : here, x = expf(old - top), y = expf(here - top), all = x + y;
    add(o + place(n, heads, rows, entry, head, row), x / all, part + place(n, heads, rows, part_entry, part_head, part_row), y / all, width, type,
        lane, lanes);
    // Wait until every lane has read `*before`, because the last lane of the row overwrites it below.
    __syncwarp();
    if (lane == lanes - 1) *before = top + logf(all);
}

// Adds rows of a gradient to the gradient so far.
extern "C" __global__ void add_rows(number count, number heads, number rows, char *to, number entry, number head, number row, const char *part,
                                    number part_entry, number part_head, number part_row, number width, number type, number lanes) {
    number t = (number)blockIdx.x * blockDim.x + threadIdx.x, n = t / lanes;
    if (n >= count) return;
    add(to + place(n, heads, rows, entry, head, row), 1.0f, part + place(n, heads, rows, part_entry, part_head, part_row), 1.0f, width, type,
        t % lanes, lanes);
}

// Copies the statistics of some rows from `own` to their place in `stats`, which has all rows, or from there to `own` if `back` is set.
extern "C" __global__ void stats_rows(number count, number rows, number longest, number from, float *stats, float *own, number back) {
    number n = (number)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    float *there = stats + n / rows * longest + from + n % rows;
    if (back) own[n] = *there;
    else *there = own[n];
}
