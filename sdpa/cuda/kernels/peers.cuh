// What two blocks of threads that run as a pair have of one another: addresses in the other's shared memory, barriers there, and the copy engine to it.

// Which of the pair this block is.
inline uint rank_in_pair() {
    uint rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address of a place in shared memory as it is in a block of the pair, for functions of this file alone.
inline uint place_of_peer(uint at, uint rank) {
    uint there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

inline void store_in_pair(uint at, uint rank, uint x) {
    asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(place_of_peer(at, rank)), "r"(x) : "memory");
}

// Arrives at a barrier of a block of the pair, behind everything that this thread has done or seen.
inline void barrier_arrive_in_pair(uint barrier, uint rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(place_of_peer(barrier, rank)) : "memory");
}

// Waits at a barrier of this block at which both arrive.
inline void barrier_wait_for_pair(uint barrier, uint parity) {
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

// Copies bytes in a row to the same place of the other block, whose barrier expects them.
inline void copy_to_peer(uint at, uint bytes, uint barrier, uint rank) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(place_of_peer(at, rank)), "r"(at),
                 "r"(bytes), "r"(place_of_peer(barrier, rank))
                 : "memory");
}

// All threads of both blocks that have not ended come here, and wait for one another.
inline void meet_in_pair() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
}
