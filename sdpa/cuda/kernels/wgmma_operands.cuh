// WGMMA shared-memory descriptors, and A operands loaded into registers. The sm_90 kernels build their GEMMs from these.

// Operands are stored in panels of 64 columns: rows of 128 bytes with the 128-byte swizzle, 8-row groups 1,024 bytes apart.
constexpr ulong64 SWIZZLE_128B = 1ull << 62;

// K-major operand: the GEMM sums over columns (Q and K in S = Q K^T).
inline ulong64 descriptor_k_major(uint at) {
    return SWIZZLE_128B | ulong64(1024 >> 4) << 32 | 1ull << 16 | ulong64((at & 0x3ffff) >> 4);
}

// MN-major operand: the GEMM sums over rows; panels of columns are `panel_bytes` apart (V in O = P V).
inline ulong64 descriptor_mn_major(uint at, uint panel_bytes) {
    return SWIZZLE_128B | ulong64(1024 >> 4) << 32 | ulong64(panel_bytes >> 4) << 16 | ulong64((at & 0x3ffff) >> 4);
}

// Advances the descriptor's start address. The sum cannot overflow the address field, which covers 256 KiB: shared memory is smaller.
inline ulong64 descriptor_advance(ulong64 operand, uint bytes) {
    return (operand & ~0xffffffffull) | (uint(operand) + (bytes >> 4));
}

// Loads the first `count / 4` k16 steps of a warpgroup's 64 rows as A fragments. They stay in registers for a whole tile, so that WGMMA reads only B
// from shared memory in these steps.
template <int count>
inline void load_a_fragments(uint (&a_registers)[count], uint rows, uint panel_bytes) {
    const int lane = threadIdx.x & 31;
    const uint at = swizzled_matrix_row(rows, (threadIdx.x >> 5 & 3) * 16 + (lane & 15), lane);
#pragma unroll
    for (int step = 0; step < count / 4; step++) {
        uint of_step[4];
        ldmatrix_x4(of_step, (at ^ (step & 3) << 5) + step / 4 * panel_bytes);
#pragma unroll
        for (int n = 0; n < 4; n++) a_registers[4 * step + n] = of_step[n];
    }
}

// Rounds a thread's scores to the element type and packs them as the A registers of the next WGMMA.
template <int count>
inline void convert_fragment(uint (&packed)[count / 2], const float (&s)[count]) {
#pragma unroll
    for (int n = 0; n < count / 2; n++) packed[n] = pack_pair(Element{}, s[2 * n], s[2 * n + 1]);
}
