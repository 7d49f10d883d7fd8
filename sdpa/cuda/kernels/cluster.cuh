// What two blocks of threads that run as a pair have of one another: addresses in the other's shared memory, barriers there, and the copy engine to it.

// Which of the pair this block is.
inline uint cluster_cta_rank() {
    uint rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address of a place in shared memory as it is in a block of the pair, for functions of this file alone.
inline uint mapa(uint at, uint rank) {
    uint there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// Stores a number in a block of the pair, and arrives at a barrier there.
inline void st_mbarrier_arrive_release_cluster(uint at, uint x, uint barrier, uint rank) {
    asm volatile(
        "st.shared::cluster.b32 [%0], %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%2];" ::"r"(mapa(at, rank)),
        "r"(x), "r"(mapa(barrier, rank))
        : "memory");
}

// Arrives at a barrier of a block of the pair: what engines have read may be written anew. Not for what this thread has written, which would wait for all that it has added to memory.
inline void mbarrier_arrive_peer(uint barrier, uint rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(barrier, rank)) : "memory");
}

// Waits until this block is told something.
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

// Brings a box of a tensor to the same place of both blocks, which barriers of both expect.
inline void tma_load_multicast(uint to, const TensorMap& map, uint barrier, int dim, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch), "h"((unsigned short)3)
        : "memory");
}

// Copies bytes in a row to the same place of the other block, whose barrier expects them.
inline void cp_async_bulk_to_peer(uint at, uint bytes, uint barrier, uint rank) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(mapa(at, rank)), "r"(at),
                 "r"(bytes), "r"(mapa(barrier, rank))
                 : "memory");
}

// All threads of both blocks that have not ended come here, and wait for one another.
inline void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
}
