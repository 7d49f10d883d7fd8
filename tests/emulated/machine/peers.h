// In place of peers.cuh.
#pragma once

inline uint rank_in_pair() { return machine::rank(); }
inline void store_in_pair(uint at, uint rank, uint x) { machine::store_in_pair(at, rank, x); }
inline void barrier_arrive_in_pair(uint barrier, uint rank) { machine::barrier_arrive_in_pair(barrier, rank); }
inline void barrier_wait_for_pair(uint barrier, uint parity, HERE) { machine::barrier_wait(barrier, parity, {"barrier_wait_for_pair", file, line}); }
inline void copy_to_peer(uint at, uint bytes, uint barrier, uint rank) { machine::copy_to_peer(at, bytes, barrier, rank); }
inline void meet_in_pair(HERE) { machine::meet_in_pair({"meet_in_pair", file, line}); }
