// In place of units.cuh.
#pragma once

#include "../../metal/emulator/numbers.h"

inline float of_half(unsigned short bits) { return metal::widen<5, 10>(bits); }
inline uint pair_of_halves(float low, float high) { return uint(metal::narrow<5, 10>(high)) << 16 | metal::narrow<5, 10>(low); }
inline uint pair_of_bfloats(float low, float high) { return uint(metal::narrow<8, 7>(high)) << 16 | metal::narrow<8, 7>(low); }

inline float exp2_of(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float tanh_near(float x) { return tanhf(x); }

// The block has nothing else in shared memory.
inline uint shared_address(const void*) { return 0; }
inline void store_shared(uint at, uint x) { machine::store(at, &x, 4); }
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
inline void meet(uint barrier, uint threads, HERE) { machine::come(barrier, threads, true, {"meet", file, line}); }
inline void arrive(uint barrier, uint threads, HERE) { machine::come(barrier, threads, false, {"arrive", file, line}); }

template <int count>
inline void fewer_registers() { machine::registers(count, false); }
template <int count>
inline void more_registers() { machine::registers(count, true); }
inline void add_four(float* to, float x, float y, float z, float w) {
    to[0] += x, to[1] += y, to[2] += z, to[3] += w;
}
