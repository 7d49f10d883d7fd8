// Groups of products of the matrix units. The products themselves have as many operands as results: `src/matrix.rs` writes them.

inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

inline void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// At most this many groups are under way.
template <int groups>
inline void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Registers that products wrote, or will read: the compiler moves nothing of them across.
template <int count>
inline void wgmma_fence_operand(float (&x)[count]) {
#pragma unroll
    for (int n = 0; n < count; n++) asm volatile("" : "+f"(x[n])::"memory");
}
