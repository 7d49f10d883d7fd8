// The matrix units: groups of products, and what they are told of operands in shared memory. The products themselves are generated.

inline void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

inline void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// At most this many groups are under way.
template <int groups>
inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Registers that products wrote, or will read: the compiler moves nothing of them across.
template <int count>
inline void hold(float (&x)[count]) {
#pragma unroll
    for (int n = 0; n < count; n++) asm volatile("" : "+f"(x[n])::"memory");
}

// Operands lie in panels of 64 columns, rows of 128 bytes each, swizzled. Eight rows are 1,024 bytes.
constexpr ulong64 SWIZZLED = 1ull << 62;

// Rows of the operand are its outer axis, columns are summed over: queries, and keys beside them.
inline ulong64 operand_by_rows(uint at) {
    return SWIZZLED | ulong64(1024 >> 4) << 32 | 1ull << 16 | ulong64((at & 0x3ffff) >> 4);
}

// Rows are summed over, columns are the outer axis, in panels so many bytes apart: values.
inline ulong64 operand_by_columns(uint at, uint panel_bytes) {
    return SWIZZLED | ulong64(1024 >> 4) << 32 | ulong64(panel_bytes >> 4) << 16 | ulong64((at & 0x3ffff) >> 4);
}
