// PTX wrappers for a cluster of two CTAs: DSMEM addresses, remote mbarrier arrivals, multicast. backward_2cta.cu calls them; the CPU emulation replaces
// this file.

// This CTA's rank in the cluster.
inline uint cluster_cta_rank() {
    uint rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Maps a shared-memory address to the same offset in CTA `rank` of the cluster. Only functions of this file use such addresses.
inline uint mapa(uint at, uint rank) {
    uint there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// Stores to CTA `rank` through DSMEM, then arrives on its mbarrier with release at cluster scope.
inline void st_mbarrier_arrive_release_cluster(uint at, uint x, uint barrier, uint rank) {
    asm volatile(
        "st.shared::cluster.b32 [%0], %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%2];" ::"r"(mapa(at, rank)),
        "r"(x), "r"(mapa(barrier, rank))
        : "memory");
}

// Arrives on an mbarrier in CTA `rank`, to report that TMA and WGMMA of this CTA are done reading a buffer, which may then be refilled.
//
// Deliberately without `.release.cluster`: a release at cluster scope compiles to MEMBAR.GPU, which waits for this thread's outstanding dQ reductions
// (red.global) and cost a third of the kernel's time. So the arrival does not publish this thread's own stores.
inline void mbarrier_arrive_peer(uint barrier, uint rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(barrier, rank)) : "memory");
}

// Waits for an mbarrier phase with acquire at cluster scope, so that the peer's DSMEM stores are visible afterwards.
inline void mbarrier_wait_parity_acquire_cluster(uint barrier, uint parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra there;\n"
        "bra again;\n"
        "there:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// TMA load of a box to the same shared-memory offset of both CTAs. In each CTA, the mbarrier at offset `barrier` counts the bytes.
inline void tma_load_multicast(uint to, const TensorMap& map, uint barrier, int dim, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch), "h"((unsigned short)3)
        : "memory");
}

// Bulk copy to the same shared-memory offset of CTA `rank`, whose mbarrier counts the bytes.
inline void cp_async_bulk_to_peer(uint at, uint bytes, uint barrier, uint rank) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(mapa(at, rank)), "r"(at),
                 "r"(bytes), "r"(mapa(barrier, rank))
                 : "memory");
}

// Synchronises all threads of both CTAs that have not exited (barrier.cluster arrive, then wait).
inline void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
}
