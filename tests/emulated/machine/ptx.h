// In place of ptx.cuh.
#pragma once

#include "../../metal/emulator/numbers.h"

inline float cvt_f32_f16(unsigned short bits) { return metal::widen<5, 10>(bits); }
inline uint cvt_rn_f16x2(float low, float high) { return uint(metal::narrow<5, 10>(high)) << 16 | metal::narrow<5, 10>(low); }
inline uint cvt_rn_bf16x2(float low, float high) { return uint(metal::narrow<8, 7>(high)) << 16 | metal::narrow<8, 7>(low); }

inline float ex2_approx(float x) { return exp2f(x); }
inline float rcp_approx(float x) { return 1.0f / x; }
inline float lg2_approx(float x) { return log2f(x); }
inline float sqrt_approx(float x) { return sqrtf(x); }
inline float div_full(float x, float y) { return x / y; }
// The unit is asked within half a turn, or a little more.
inline float within_half_a_turn(float x) {
    if (fabsf(x) > 4.0f) machine::fail("a wave at %g", double(x));
    return x;
}
inline float sin_approx(float x) { return sinf(within_half_a_turn(x)); }
inline float cos_approx(float x) { return cosf(within_half_a_turn(x)); }
inline float tanh_approx(float x) { return tanhf(x); }

// The block has nothing else in shared memory.
inline uint shared_address(const void*) { return 0; }
inline void st_shared(uint at, uint x) { machine::store(at, &x, 4); }
inline void st_shared_v4_f32(uint at, float x, float y, float z, float w) {
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
inline void ldmatrix_x4(uint (&x)[4], uint at, HERE) { matrices(x, at, false, {"ldmatrix_x4", file, line}); }
// Each lane stores what it has, at the row that another tells of.
inline void stmatrix_x4(uint at, uint a, uint b, uint c, uint d, HERE) {
    if (at % 16 != 0) machine::fail("a row of a matrix at %u", at);
    const uint32_t* all = machine::tell(at, {"stmatrix_x4", file, line});
    const uint words[] = {a, b, c, d};
    const unsigned lane = threadIdx.x & 31;
    for (unsigned n = 0; n < 4; n++) machine::store(all[8 * n + lane / 4] + 4 * (lane & 3), &words[n], 4);
}
inline uint ld_shared(uint at) {
    uint x;
    machine::load(at, &x, 4);
    return x;
}
inline float2 ld_shared_v2_f32(uint at) {
    float2 x;
    machine::load(at, &x, 8);
    return x;
}
inline float4 ld_shared_v4_f32(uint at) {
    if (at % 16 != 0) machine::fail("16 bytes at %u", at);
    float4 x;
    machine::load(at, &x, 16);
    return x;
}
inline void named_barrier_sync(uint barrier, uint threads, HERE) { machine::come(barrier, threads, true, {"named_barrier_sync", file, line}); }
inline void named_barrier_arrive(uint barrier, uint threads, HERE) { machine::come(barrier, threads, false, {"named_barrier_arrive", file, line}); }

inline void counter_release_add(int* at, int count) {
    *at += count;
    machine::progress();
}
inline void counter_acquire_wait(const int* at, int count, HERE) {
    machine::until({"counter_acquire_wait", file, line}, [&] { return *at >= count; });
    machine::linger();
}

inline int opaque_int(int x) { return x; }
inline float* opaque_address(float* at) { return at; }

template <int count>
inline void setmaxnreg_dec() { machine::registers(count, false); }
template <int count>
inline void setmaxnreg_inc() { machine::registers(count, true); }
inline void red_add_v4_f32(float* to, float x, float y, float z, float w) {
    to[0] += x, to[1] += y, to[2] += z, to[3] += w;
}
inline void red_add_u64(ulong64* to, ulong64 x) { *to += x; }
