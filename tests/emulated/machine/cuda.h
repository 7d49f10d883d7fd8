// What CUDA C++ takes for granted, for clang on a CPU. Not NVIDIA's: written from the programming guide.
#pragma once

#include "machine.h"

#include <math.h>
#include <utility>

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__
#define __constant__
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline

#define threadIdx (machine::thread_index())
#define blockIdx (machine::block_index())
#define gridDim (machine::block_count())

inline float __uint_as_float(unsigned x) {
    float y;
    __builtin_memcpy(&y, &x, 4);
    return y;
}
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }
inline unsigned __float_as_uint(float x) {
    unsigned y;
    __builtin_memcpy(&y, &x, 4);
    return y;
}

// Rounded: elsewhere products go into sums as they are, as on a GPU.
inline float rounded(float x) {
    asm("" : "+x"(x));
    return x;
}
inline float __fadd_rn(float x, float y) { return rounded(x + y); }
inline float __fsub_rn(float x, float y) { return rounded(x - y); }
inline float __fmul_rn(float x, float y) { return rounded(x * y); }
inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int2float_rn(int x) { return float(x); }
// Both saturate, and NaN becomes 0.
inline int __float2int_rz(float x) {
    if (x != x) return 0;
    return x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? -2147483647 - 1 : int(x);
}
inline int __float2int_rn(float x) { return __float2int_rz(rintf(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned(uint64_t(x) * y >> 32); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return unsigned(((uint64_t(high) << 32 | low) << (by & 31)) >> 32); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

inline int min(int x, int y) { return y < x ? y : x; }
inline int max(int x, int y) { return x < y ? y : x; }
inline unsigned min(unsigned x, unsigned y) { return y < x ? y : x; }
inline unsigned max(unsigned x, unsigned y) { return x < y ? y : x; }
inline long min(long x, long y) { return y < x ? y : x; }
inline long max(long x, long y) { return x < y ? y : x; }

struct float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline float __shfl_xor_sync(unsigned, float x, int mask, HERE) {
    const uint32_t* all = machine::tell(__float_as_uint(x), {"__shfl_xor_sync", file, line});
    return __uint_as_float(all[(threadIdx.x & 31) ^ unsigned(mask)]);
}
inline int __shfl_xor_sync(unsigned, int x, int mask, HERE) {
    const uint32_t* all = machine::tell(unsigned(x), {"__shfl_xor_sync", file, line});
    return int(all[(threadIdx.x & 31) ^ unsigned(mask)]);
}
inline int __shfl_sync(unsigned, int x, int from, HERE) {
    return int(machine::tell(unsigned(x), {"__shfl_sync", file, line})[from]);
}
inline float __shfl_sync(unsigned, float x, int from, HERE) {
    return __uint_as_float(machine::tell(__float_as_uint(x), {"__shfl_sync", file, line})[from]);
}
inline void __syncwarp(HERE) { machine::meet_lanes({"__syncwarp", file, line}); }
inline bool __any_sync(unsigned, bool x, HERE) {
    const uint32_t* all = machine::tell(x, {"__any_sync", file, line});
    bool any = false;
    for (int lane = 0; lane < 32; lane++) any |= all[lane] != 0;
    return any;
}
inline unsigned __ballot_sync(unsigned, bool x, HERE) {
    const uint32_t* all = machine::tell(x, {"__ballot_sync", file, line});
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= unsigned(all[lane] != 0) << lane;
    return bits;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}
#define __syncthreads() machine::come(0, machine::block_threads(), true, {"__syncthreads", __FILE__, __LINE__})

// Every thread sees at once what another wrote.
inline void __threadfence() {}
template <class T>
inline T __ldcg(const T* at) {
    return *at;
}

// Nothing runs between the two halves: turns change where a thread waits.
template <class T>
inline T atomicAdd(T* at, T x) {
    const T before = *at;
    *at = before + x;
    return before;
}

inline int atomicMax(int* at, int x) {
    const int before = *at;
    *at = max(before, x);
    return before;
}

namespace machine {

template <class... Types, size_t... at>
inline void call_with(void (*kernel)(Types...), void** arguments, std::index_sequence<at...>) {
    kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Types>>*>(arguments[at])...);
}

template <class... Types>
inline void call(void (*kernel)(Types...), void** arguments) {
    call_with(kernel, arguments, std::index_sequence_for<Types...>{});
}

}  // namespace machine
