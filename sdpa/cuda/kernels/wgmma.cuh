// WGMMA synchronisation. `src/wgmma_wrappers.rs` generates the wgmma.mma_async wrappers, because their number of register operands depends on the tile.
// The CPU emulation replaces both.

inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

inline void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `groups` WGMMA groups are in flight.
template <int groups>
inline void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Keeps the compiler from moving accesses of accumulator registers across this point, as CUTLASS's warpgroup_fence_operand does.
template <int count>
inline void wgmma_fence_operand(float (&x)[count]) {
#pragma unroll
    for (int n = 0; n < count; n++) asm volatile("" : "+f"(x[n])::"memory");
}
