// In place of units.cuh.
#pragma once

#include "../../metal/emulator/numbers.h"

inline float of_half(unsigned short bits) { return metal::widen<5, 10>(bits); }
inline uint pair_of_halves(float low, float high) { return uint(metal::narrow<5, 10>(high)) << 16 | metal::narrow<5, 10>(low); }
inline uint pair_of_bfloats(float low, float high) { return uint(metal::narrow<8, 7>(high)) << 16 | metal::narrow<8, 7>(low); }

inline float exp2_of(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float log2_near(float x) { return log2f(x); }
inline float sqrt_near(float x) { return sqrtf(x); }
inline float quotient_near(float x, float y) { return x / y; }
// The unit is asked within half a turn, or a little more.
inline float within_half_a_turn(float x) {
    if (fabsf(x) > 4.0f) machine::fail("a wave at %g", double(x));
    return x;
}
inline float sine_near(float x) { return sinf(within_half_a_turn(x)); }
inline float cosine_near(float x) { return cosf(within_half_a_turn(x)); }
inline float tanh_near(float x) { return tanhf(x); }

// The block has nothing else in shared memory.
inline uint shared_address(const void*) { return 0; }
inline void store_shared(uint at, uint x) { machine::store(at, &x, 4); }
inline void store_shared_numbers(uint at, float x, float y, float z, float w) {
    if (at % 16 != 0) machine::fail("16 bytes at %u", at);
    const float numbers[] = {x, y, z, w};
    machine::store(at, numbers, 16);
}
// Rows of four matrices at the addresses that each eighth of the warp tells.
inline void matrices(uint (&x)[4], uint at, bool across, const machine::Site& site) {
    if (at % 16 != 0) machine::fail("a row of a matrix at %u", at);
    const uint32_t* all = machine::tell(at, site);
    const unsigned lane = threadIdx.x & 31, outer = lane / 4, inner = 2 * (lane & 3);
    for (unsigned n = 0; n < 4; n++) {
        if (!across) {
            machine::load(all[8 * n + outer] + 2 * inner, &x[n], 4);
        } else {
            uint16_t pair[2];
            for (unsigned other = 0; other < 2; other++) machine::load(all[8 * n + inner + other] + 2 * outer, &pair[other], 2);
            x[n] = uint(pair[1]) << 16 | pair[0];
        }
    }
}
inline void load_matrices(uint (&x)[4], uint at, HERE) { matrices(x, at, false, {"load_matrices", file, line}); }
// Each lane stores what it has, at the row that another tells of.
inline void store_matrices(uint at, uint a, uint b, uint c, uint d, HERE) {
    if (at % 16 != 0) machine::fail("a row of a matrix at %u", at);
    const uint32_t* all = machine::tell(at, {"store_matrices", file, line});
    const uint words[] = {a, b, c, d};
    const unsigned lane = threadIdx.x & 31;
    for (unsigned n = 0; n < 4; n++) machine::store(all[8 * n + lane / 4] + 4 * (lane & 3), &words[n], 4);
}
inline uint load_shared(uint at) {
    uint x;
    machine::load(at, &x, 4);
    return x;
}
inline float2 load_shared_pair(uint at) {
    float2 x;
    machine::load(at, &x, 8);
    return x;
}
inline float4 load_shared_four(uint at) {
    if (at % 16 != 0) machine::fail("16 bytes at %u", at);
    float4 x;
    machine::load(at, &x, 16);
    return x;
}
inline void meet(uint barrier, uint threads, HERE) { machine::come(barrier, threads, true, {"meet", file, line}); }
inline void arrive(uint barrier, uint threads, HERE) { machine::come(barrier, threads, false, {"arrive", file, line}); }

inline void count_up(int* at, int count) {
    *at += count;
    machine::progress();
}
inline void wait_for(const int* at, int count, HERE) {
    machine::until({"wait_for", file, line}, [&] { return *at >= count; });
    machine::linger();
}

inline int forgotten(int x) { return x; }
inline float* kept(float* at) { return at; }

template <int count>
inline void fewer_registers() { machine::registers(count, false); }
template <int count>
inline void more_registers() { machine::registers(count, true); }
inline void add_four(float* to, float x, float y, float z, float w) {
    to[0] += x, to[1] += y, to[2] += z, to[3] += w;
}
