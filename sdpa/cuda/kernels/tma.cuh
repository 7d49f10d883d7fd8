// The copy engine, and barriers in shared memory that it arrives at.

inline void mbarrier_init(uint barrier, uint arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Barriers that were made are there for the copy engine.
inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

inline void mbarrier_arrive(uint barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and waits for so many bytes beside.
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

// Tells the second cache that what is copied once need not stay there.
inline ulong64 createpolicy_evict_first() {
    ulong64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Brings a box to shared memory. Rows are 128 bytes, swizzled: what lies outside of the tensor is zero.
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

// Brings bytes in a row to shared memory: multiples of 16, from and to multiples of 16.
inline void cp_async_bulk_load(uint to, const void* from, uint bytes, uint barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}

// Zeros, as many as the largest panel has: 192 rows.
__device__ uint4 ZEROS[192 * 128 / 16];

// Brings so many zeros to shared memory.
inline void cp_async_bulk_load_zeros(uint to, uint bytes, uint barrier) {
    cp_async_bulk_load(to, ZEROS, bytes, barrier);
}

// Takes a box out of shared memory. What lies outside of the tensor is not written.
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

// Takes bytes in a row out of shared memory: multiples of 16, from and to multiples of 16.
inline void cp_async_bulk_store(void* to, uint from, uint bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// Adds f32 numbers in a row, so many bytes, to those in memory: each by itself, in any order.
inline void cp_reduce_async_bulk_add(float* to, uint from, uint bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// The boxes and rows that this thread took out so far are a group.
inline void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// What this thread took out has been read, but for so many groups, the last ones.
template <int left = 0>
inline void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}

// All that this thread took out is where it goes.
inline void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Shared memory that this thread wrote is there for the copy engine and the matrix units, once a barrier has passed.
inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
