// In place of products.cuh and of what is generated behind it.
#pragma once

inline void products_begin() { machine::multiply_begin(); }
inline void products_commit() { machine::multiply_ends(); }
template <int groups>
inline void products_wait(HERE) { machine::multiplied(groups, {"products_wait", file, line}); }
template <int count>
inline void hold(float (&)[count]) {}

inline float widen_element(uint16_t bits) { return float(Element{bits}); }

template <int count>
inline void product_by_rows(float (&d)[count], ulong64 a, ulong64 b, bool add) {
    machine::multiply({d, 2 * count, add, false, {}, a, false, b, false, widen_element});
}
template <int count>
inline void product_by_rows(float (&d)[count], uint a0, uint a1, uint a2, uint a3, ulong64 b, bool add) {
    machine::multiply({d, 2 * count, add, true, {a0, a1, a2, a3}, 0, false, b, false, widen_element});
}
template <int count>
inline void product_by_columns(float (&d)[count], uint a0, uint a1, uint a2, uint a3, ulong64 b, bool add) {
    machine::multiply({d, 2 * count, add, true, {a0, a1, a2, a3}, 0, false, b, true, widen_element});
}
template <int count>
inline void product_of_columns(float (&d)[count], ulong64 a, ulong64 b, bool add) {
    machine::multiply({d, 2 * count, add, false, {}, a, true, b, true, widen_element});
}
