// In place of cluster.cuh.
#pragma once

inline uint cluster_cta_rank() { return machine::rank(); }
inline void st_mbarrier_arrive_release_cluster(uint at, uint x, uint barrier, uint rank) {
    machine::store_in_pair(at, rank, x);
    machine::barrier_arrive_in_pair(barrier, rank);
}
inline void mbarrier_arrive_peer(uint barrier, uint rank) { machine::barrier_arrive_in_pair(barrier, rank); }
inline void mbarrier_wait_parity_acquire_cluster(uint barrier, uint parity, HERE) { machine::barrier_wait(barrier, parity, {"mbarrier_wait_parity_acquire_cluster", file, line}); }
inline void tma_load_multicast(uint to, const TensorMap& map, uint barrier, int dim, int row, int head, int batch) {
    machine::copy_in_pair(to, reinterpret_cast<const uint64_t*>(map.words), barrier, {dim, row, head, batch});
}
inline void cp_async_bulk_to_peer(uint at, uint bytes, uint barrier, uint rank) { machine::copy_to_peer(at, bytes, barrier, rank); }
inline void cluster_sync(HERE) { machine::meet_in_pair({"cluster_sync", file, line}); }
