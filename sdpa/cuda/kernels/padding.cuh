// Zeroes rows past a sequence's length in shared memory. P and dS are 0 there, but such rows may hold anything, and 0 * NaN is NaN. The consumers of
// the sm_90 kernels call this.

constexpr uint SWIZZLED_ROW_BYTES = 128;

// A warpgroup zeroes rows first <= row < rows of `panels` panels. Other warpgroups that read the rows write the same zeros.
template <int panels>
inline void zero_rows(uint at, uint panel_bytes, int first, int rows) {
    const int chunks = max(0, rows - max(first, 0)) * int(SWIZZLED_ROW_BYTES / 16);
    for (int n = threadIdx.x & 127; n < chunks; n += 128) {
        const uint chunk = at + max(first, 0) * SWIZZLED_ROW_BYTES + n * 16;
#pragma unroll
        for (int panel = 0; panel < panels; panel++) st_shared_v4_f32(chunk + panel * panel_bytes, 0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Makes the zeros that a warpgroup wrote visible to that warpgroup's WGMMAs. Each warpgroup has its own named barrier.
constexpr uint BARRIER_ZEROED = 12;
inline void sync_zeroed_rows() {
    fence_proxy_async();
    named_barrier_sync(BARRIER_ZEROED + warp_uniform(int(threadIdx.x >> 7)), 128);
}
