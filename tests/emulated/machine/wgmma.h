// In place of wgmma.cuh and of what is generated behind it.
#pragma once

inline void wgmma_fence() { machine::multiply_begin(); }
inline void wgmma_commit_group() { machine::multiply_ends(); }
template <int groups>
inline void wgmma_wait_group(HERE) { machine::multiplied(groups, {"wgmma_wait_group", file, line}); }
template <int count>
inline void wgmma_fence_operand(float (&)[count]) {}

inline float widen_element(uint16_t bits) { return float(Element{bits}); }

template <int count>
inline void wgmma_k_major(float (&d)[count], ulong64 a, ulong64 b, bool add) {
    machine::multiply({d, 2 * count, add, false, {}, a, false, b, false, widen_element});
}
template <int count>
inline void wgmma_k_major(float (&d)[count], uint a0, uint a1, uint a2, uint a3, ulong64 b, bool add) {
    machine::multiply({d, 2 * count, add, true, {a0, a1, a2, a3}, 0, false, b, false, widen_element});
}
template <int count>
inline void wgmma_b_mn_major(float (&d)[count], uint a0, uint a1, uint a2, uint a3, ulong64 b, bool add) {
    machine::multiply({d, 2 * count, add, true, {a0, a1, a2, a3}, 0, false, b, true, widen_element});
}
template <int count>
inline void wgmma_mn_major(float (&d)[count], ulong64 a, ulong64 b, bool add) {
    machine::multiply({d, 2 * count, add, false, {}, a, true, b, true, widen_element});
}
