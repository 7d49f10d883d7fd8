// What the matrix units are told of operands in shared memory, and operands that are taken from there.

// Operands lie in panels of 64 columns, rows of 128 bytes each, swizzled. Eight rows are 1,024 bytes.
constexpr ulong64 SWIZZLE_128B = 1ull << 62;

// Rows of the operand are its outer axis, columns are summed over: queries, and keys beside them.
inline ulong64 descriptor_k_major(uint at) {
    return SWIZZLE_128B | ulong64(1024 >> 4) << 32 | 1ull << 16 | ulong64((at & 0x3ffff) >> 4);
}

// Rows are summed over, columns are the outer axis, in panels so many bytes apart: values.
inline ulong64 descriptor_mn_major(uint at, uint panel_bytes) {
    return SWIZZLE_128B | ulong64(1024 >> 4) << 32 | ulong64(panel_bytes >> 4) << 16 | ulong64((at & 0x3ffff) >> 4);
}

// The operand so many bytes further on: shared memory ends before its number does.
inline ulong64 descriptor_advance(ulong64 operand, uint bytes) {
    return (operand & ~0xffffffffull) | (uint(operand) + (bytes >> 4));
}

// Of 64 rows of a group, the first so many times 16 columns, in panels so many bytes apart: operands in registers for a whole walk, which products then do not read from shared memory.
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
