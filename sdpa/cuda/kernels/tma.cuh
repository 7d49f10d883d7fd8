// mbarrier, TMA and bulk-copy PTX wrappers. The sm_90 kernels call them; the CPU emulation replaces this file.

inline void mbarrier_init(uint barrier, uint arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to the async proxy.
inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

inline void mbarrier_arrive(uint barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to the transaction count of the current phase.
inline void mbarrier_arrive_expect_tx(uint barrier, uint bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

inline void mbarrier_wait_parity(uint barrier, uint parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra there;\n"
        "bra again;\n"
        "there:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// L2 policy for data that is read or written once.
inline ulong64 createpolicy_evict_first() {
    ulong64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// TMA load of a 4D box into panels of 128-byte rows with the 128-byte swizzle. Elements outside of the tensor are zero.
template <bool evict_first = false>
inline void tma_load(uint to, const TensorMap& map, uint barrier, int dim, int row, int head, int batch) {
    if constexpr (evict_first) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
            "l"(&map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch), "l"(createpolicy_evict_first())
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
            "l"(&map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch)
            : "memory");
    }
}

// Bulk copy global to shared. Addresses and size are multiples of 16 bytes.
inline void cp_async_bulk_load(uint to, const void* from, uint bytes, uint barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}

// Zeros from which panels are filled, as many as the largest panel has: 192 rows of 128 bytes.
__device__ uint4 ZEROS[192 * 128 / 16];

// Fills shared memory with zeros by a bulk copy, which completes on the mbarrier like a TMA load.
inline void cp_async_bulk_load_zeros(uint to, uint bytes, uint barrier) {
    cp_async_bulk_load(to, ZEROS, bytes, barrier);
}

// TMA store of a 4D box. Elements outside of the tensor are not written.
template <bool evict_first = false>
inline void tma_store(uint from, const TensorMap& map, int dim, int row, int head, int batch) {
    if constexpr (evict_first) {
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%1, {%2, %3, %4, %5}], [%0], %6;" ::"r"(from),
                     "l"(&map), "r"(dim), "r"(row), "r"(head), "r"(batch), "l"(createpolicy_evict_first())
                     : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(from), "l"(&map), "r"(dim),
                     "r"(row), "r"(head), "r"(batch)
                     : "memory");
    }
}

// Bulk copy shared to global. Addresses and size are multiples of 16 bytes.
inline void cp_async_bulk_store(void* to, uint from, uint bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// Bulk f32 reduction into global memory: one addition per element, in any order.
inline void cp_reduce_async_bulk_add(float* to, uint from, uint bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// Bulk integer reduction into global memory. Integer addition is associative, so the sums do not depend on the order.
inline void cp_reduce_async_bulk_add(uint* to, uint from, uint bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// Closes the bulk group of this thread's stores and reductions so far.
inline void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last `left` bulk groups have read their shared memory, so that it may be overwritten.
template <int left = 0>
inline void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}

// Waits until this thread's bulk groups have written global memory.
inline void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes this thread's shared-memory stores visible to the async proxy (TMA, WGMMA), once a barrier has ordered them.
inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
