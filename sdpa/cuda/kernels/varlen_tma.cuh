// TMA boxes that end where a packed sequence ends. The load and store code of the sm_90 kernels uses them.

#if WITH_PACKED_Q || WITH_PACKED_KV
// A box must end where its sequence ends, because the next row belongs to another sequence. The tensor map has two token axes of equal stride, whose
// indices add up. The first axis is one box long: of a box at index `rows - left`, only `left` rows are in bounds. TMA loads zeros for the others and does
// not store them. The second index compensates; it is never negative, since the map begins one box before the tensor.
struct VarlenBox {
    int row_offset;  // index along the first token axis, which is one box long
    int end;         // index along the second token axis: one past the last row of the box that is in the sequence
};

template <int rows>
inline VarlenBox varlen_box(int begin, int length, int first) {
    const int left = min(rows, length - first);
    return VarlenBox{rows - left, begin + first + left};
}

// Loads one panel; copies zeros if `there` is false, since the tensor then has none of the panel's columns. TMA is not used for them: for a box outside
// of the tensor along the column axis, an H200 reads the base address of the map, which may not be mapped memory.
template <bool evict_first = false>
inline void tma_load_panel(uint to, uint bytes, const TensorMap& map, uint barrier, int column, bool there, const VarlenBox& rows, int head) {
    if (there) tma_load<evict_first>(to, map, barrier, column, rows.row_offset, head, rows.end);
    else cp_async_bulk_load_zeros(to, bytes, barrier);
}
#endif
