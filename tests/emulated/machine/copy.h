// In place of copy.cuh.
#pragma once

inline void barrier_init(uint barrier, uint arrivals) { machine::barrier_init(barrier, arrivals); }
inline void barrier_made() {}
inline void barrier_arrive(uint barrier) { machine::barrier_arrive(barrier, 0); }
inline void barrier_expect(uint barrier, uint bytes) { machine::barrier_arrive(barrier, bytes); }
inline void barrier_wait(uint barrier, uint parity, HERE) { machine::barrier_wait(barrier, parity, {"barrier_wait", file, line}); }
template <bool once = false>
inline void copy_in(uint to, const TensorMap& map, uint barrier, int dim, int row, int head, int batch) {
    machine::copy_in(to, reinterpret_cast<const uint64_t*>(map.words), barrier, {dim, row, head, batch});
}
inline void copy_row_in(uint to, const void* from, uint bytes, uint barrier) { machine::copy_row_in(to, from, bytes, barrier); }
inline void nothing_in(uint to, uint bytes, uint barrier) { machine::nothing_in(to, bytes, barrier); }
template <bool once = false>
inline void copy_out(uint from, const TensorMap& map, int dim, int row, int head, int batch) {
    machine::copy_out(from, reinterpret_cast<const uint64_t*>(map.words), {dim, row, head, batch});
}
inline void copy_row_out(void* to, uint from, uint bytes) { machine::row_out(to, from, bytes, false); }
inline void add_out(float* to, uint from, uint bytes) { machine::row_out(to, from, bytes, true); }
inline void copy_out_ends() { machine::copy_out_ends(); }
template <int left = 0>
inline void copied_out(HERE) { machine::copied_out(left, {"copied_out", file, line}); }
inline void arrived_out(HERE) { machine::arrived_out({"arrived_out", file, line}); }
inline void written_for_engines() { machine::publish(); }
