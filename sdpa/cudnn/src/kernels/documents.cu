// Computes the lengths and offsets of packed documents (sequences) for cuDNN engines. Boundaries are unchecked device data, so the results are clamped:
// every document lies within the `total` allocated tokens and has at most `longest` tokens, the most that the plan supports.

typedef long long number;

struct Side {
    const void *boundaries;
    number total;
    number longest;
    number wide;
    number counted;
};

static __device__ number clamp(number x, number most) { return x < 0 ? 0 : x > most ? most : x; }

static __device__ number begin(Side side, number n) {
    number token = side.wide ? ((const number *)side.boundaries)[n] : ((const int *)side.boundaries)[n];
    return clamp(token, side.total);
}

// Returns the length of document `n`. If the side is not packed (`counted`), `boundaries` holds lengths instead of offsets.
static __device__ number length(Side side, number n) {
    if (side.counted) return clamp(((const int *)side.boundaries)[n], side.longest);
    return clamp(begin(side, n + 1) - begin(side, n), side.longest);
}

// Writes the length of each document of one side, and its offset in elements in each of up to nine tensors. A document with no tokens on the other side
// gets length 0, because engines handle it incorrectly.
extern "C" __global__ void documents(number wide, const void *boundaries, number total, number longest, const void *others,
                                     number other_total, number other_longest, number counted, number count, int *lengths, number *to_0, number per_0, number *to_1,
                                     number per_1, number *to_2, number per_2, number *to_3, number per_3, number *to_4, number per_4,
                                     number *to_5, number per_5, number *to_6, number per_6, number *to_7, number per_7, number *to_8,
                                     number per_8) {
    number n = (number)blockIdx.x * blockDim.x + threadIdx.x;
    if (n > count) return;
    Side side = {boundaries, total, longest, wide, 0}, other = {others, other_total, other_longest, wide, counted};
    if (n < count) lengths[n] = length(other, n) == 0 ? 0 : (int)length(side, n);
    number first = begin(side, n);
    if (to_0) to_0[n] = first * per_0;
    if (to_1) to_1[n] = first * per_1;
    if (to_2) to_2[n] = first * per_2;
    if (to_3) to_3[n] = first * per_3;
    if (to_4) to_4[n] = first * per_4;
    if (to_5) to_5[n] = first * per_5;
    if (to_6) to_6[n] = first * per_6;
    if (to_7) to_7[n] = first * per_7;
    if (to_8) to_8[n] = first * per_8;
}

// Fills the result rows of documents with no tokens on the other side, which engines leave unwritten. One thread block per document.
extern "C" __global__ void unpaired(number wide, const void *boundaries, number total, number longest, const void *others,
                                    number other_total, number other_longest, number counted, char *to, number bytes, number bits, number heads, number head, number token,
                                    number width) {
    number n = blockIdx.x;
    Side side = {boundaries, total, longest, wide, 0}, other = {others, other_total, other_longest, wide, counted};
    if (length(other, n) != 0) return;
    number first = begin(side, n), all = length(side, n) * heads * width;
    for (number i = threadIdx.x; i < all; i += blockDim.x) {
        number at = (first + i / width / heads) * token + i / width % heads * head + i % width;
        if (bytes == 2) ((unsigned short *)to)[at] = (unsigned short)bits;
        else ((unsigned int *)to)[at] = (unsigned int)bits;
    }
}
