// In place of mma.cuh.
#pragma once

inline void ldmatrix_x4_trans(uint (&x)[4], uint at, HERE) { matrices(x, at, true, {"ldmatrix_x4_trans", file, line}); }

// A product of operands as the lanes have them.
template <class T>
inline void multiplied(const uint32_t (*all)[machine::WORDS], float* results) {
    float a[16][16], b[16][8];
    for (unsigned row = 0; row < 16; row++) {
        for (unsigned k = 0; k < 16; k++) {
            const uint32_t word = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            a[row][k] = float(T{(unsigned short)(word >> 16 * (k & 1))});
        }
    }
    for (unsigned k = 0; k < 16; k++) {
        for (unsigned column = 0; column < 8; column++) {
            const uint32_t word = all[column * 4 + k % 8 / 2][4 + k / 8];
            b[k][column] = float(T{(unsigned short)(word >> 16 * (k & 1))});
        }
    }
    for (unsigned row = 0; row < 16; row++) {
        float sums[8] = {};
        for (unsigned k = 0; k < 16; k++) {
            for (unsigned column = 0; column < 8; column++) sums[column] += a[row][k] * b[k][column];
        }
        for (unsigned column = 0; column < 8; column++) results[row * 8 + column] = sums[column];
    }
}

// The same of 8 terms, each number in two words.
inline void multiplied_in_parts(const uint32_t (*all)[machine::WORDS], float* results) {
    for (unsigned row = 0; row < 16; row++) {
        for (unsigned column = 0; column < 8; column++) {
            float sum = 0;
            for (unsigned k = 0; k < 8; k++) {
                const uint32_t* of_a = all[row % 8 * 4 + k % 4] + row / 8 + k / 4 * 2;
                const uint32_t* of_b = all[column * 4 + k % 4] + 8 + k / 4;
                const float x = __uint_as_float(of_a[0]), x_low = __uint_as_float(of_a[4]), y = __uint_as_float(of_b[0]), y_low = __uint_as_float(of_b[2]);
                sum += x_low * y + x * y_low + x * y;
            }
            results[row * 8 + column] = sum;
        }
    }
}

// The four of a product's results that a thread has, added to what it has.
inline void add_own(float (&d)[4], const float* results) {
    const unsigned lane = threadIdx.x & 31;
    for (unsigned n = 0; n < 4; n++) d[n] += results[(lane / 4 + n / 2 * 8) * 8 + 2 * (lane & 3) + n % 2];
}

inline void mma_m16n8k16(Half, float (&d)[4], const uint (&a)[4], uint b0, uint b1, HERE) {
    const uint32_t words[] = {a[0], a[1], a[2], a[3], b0, b1};
    add_own(d, machine::tell_all(words, 6, multiplied<Half>, {"mma_m16n8k16", file, line}));
}
inline void mma_m16n8k16(BFloat, float (&d)[4], const uint (&a)[4], uint b0, uint b1, HERE) {
    const uint32_t words[] = {a[0], a[1], a[2], a[3], b0, b1};
    add_own(d, machine::tell_all(words, 6, multiplied<BFloat>, {"mma_m16n8k16", file, line}));
}
inline uint cvt_rna_tf32(float x) {
    const uint bits = __float_as_uint(x);
    // What is no number stays none.
    if ((bits & 0x7f800000u) == 0x7f800000u) return (bits & 0x7fffffu) != 0 ? 0x7fffe000u : bits;
    return (bits + 0x1000u) & ~0x1fffu;
}
inline void mma_m16n8k8_3xtf32(float (&d)[4], const uint (&a)[4], const uint (&a_low)[4], const uint (&b)[2], const uint (&b_low)[2], HERE) {
    const uint32_t words[] = {a[0], a[1], a[2], a[3], a_low[0], a_low[1], a_low[2], a_low[3], b[0], b[1], b_low[0], b_low[1]};
    for (uint32_t word : words) {
        if (word & 0x1fff) machine::fail("an operand of more than 11 digits: %08x", word);
    }
    add_own(d, machine::tell_all(words, 12, multiplied_in_parts, {"mma_m16n8k8_3xtf32", file, line}));
}

inline void st_shared_v4_b32(uint at, uint x, uint y, uint z, uint w) {
    if (at % 16 != 0) machine::fail("16 bytes at %u", at);
    const uint words[] = {x, y, z, w};
    machine::store(at, words, 16);
}
inline void cp_async_16(uint to, const void* from, uint bytes) { machine::copy_16(to, from, bytes); }
inline void cp_async_commit_group() { machine::copies_commit(); }
template <int groups>
inline void cp_async_wait_group() { machine::copies_wait(groups); }
