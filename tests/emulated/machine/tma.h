// In place of tma.cuh.
#pragma once

inline void mbarrier_init(uint barrier, uint arrivals) { machine::barrier_init(barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint barrier) { machine::barrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx(uint barrier, uint bytes) { machine::barrier_arrive(barrier, bytes); }
inline void mbarrier_wait_parity(uint barrier, uint parity, HERE) { machine::barrier_wait(barrier, parity, {"mbarrier_wait_parity", file, line}); }
template <bool once = false>
inline void tma_load(uint to, const TensorMap& map, uint barrier, int dim, int row, int head, int batch) {
    machine::copy_in(to, reinterpret_cast<const uint64_t*>(map.words), barrier, {dim, row, head, batch});
}
inline void cp_async_bulk_load(uint to, const void* from, uint bytes, uint barrier) { machine::copy_row_in(to, from, bytes, barrier); }
inline void cp_async_bulk_load_zeros(uint to, uint bytes, uint barrier) { machine::nothing_in(to, bytes, barrier); }
template <bool once = false>
inline void tma_store(uint from, const TensorMap& map, int dim, int row, int head, int batch) {
    machine::copy_out(from, reinterpret_cast<const uint64_t*>(map.words), {dim, row, head, batch});
}
inline void cp_async_bulk_store(void* to, uint from, uint bytes) { machine::row_out(to, from, bytes, machine::Adds::Nothing); }
inline void cp_reduce_async_bulk_add(float* to, uint from, uint bytes) { machine::row_out(to, from, bytes, machine::Adds::Floats); }
inline void cp_reduce_async_bulk_add(uint* to, uint from, uint bytes) { machine::row_out(to, from, bytes, machine::Adds::Integers); }
inline void cp_async_bulk_commit_group() { machine::copy_out_ends(); }
template <int left = 0>
inline void cp_async_bulk_wait_group_read(HERE) { machine::copied_out(left, {"cp_async_bulk_wait_group_read", file, line}); }
inline void cp_async_bulk_wait_group(HERE) { machine::arrived_out({"cp_async_bulk_wait_group", file, line}); }
inline void fence_proxy_async() { machine::publish(); }
