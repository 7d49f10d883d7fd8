// In place of peers.cuh.
#pragma once

inline uint rank_in_pair() { return machine::rank(); }
inline void tell_in_pair(uint at, uint x, uint barrier, uint rank) {
    machine::store_in_pair(at, rank, x);
    machine::barrier_arrive_in_pair(barrier, rank);
}
inline void barrier_arrive_in_pair(uint barrier, uint rank) { machine::barrier_arrive_in_pair(barrier, rank); }
inline void barrier_wait_told(uint barrier, uint parity, HERE) { machine::barrier_wait(barrier, parity, {"barrier_wait_told", file, line}); }
inline void copy_in_pair(uint to, const TensorMap& map, uint barrier, int dim, int row, int head, int batch) {
    machine::copy_in_pair(to, reinterpret_cast<const uint64_t*>(map.words), barrier, {dim, row, head, batch});
}
inline void copy_to_peer(uint at, uint bytes, uint barrier, uint rank) { machine::copy_to_peer(at, bytes, barrier, rank); }
inline void meet_in_pair(HERE) { machine::meet_in_pair({"meet_in_pair", file, line}); }
