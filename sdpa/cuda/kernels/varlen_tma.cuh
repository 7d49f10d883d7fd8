// TMA boxes of packed sequences that end with the sequence. Called by the load and store code of the sm_90 kernels.

#if WITH_PACKED_Q || WITH_PACKED_KV
// Rows past a sequence's end belong to the next one. The tensor map of a packed operand has two token axes of the same stride, whose indices add up. The
// first is as long as a box: a box that begins `rows - left` before its end has `left` rows inside, and the second index makes up for it. Rows past them
// arrive as zeros and are not stored. The map begins one box before the tensor.
struct VarlenBox {
    int row_offset;  // index along the axis that ends after one box
    int end;         // index along the other axis: past the last row of the box within the sequence
};

template <int rows>
inline VarlenBox varlen_box(int begin, int length, int first) {
    const int left = min(rows, length - first);
    return VarlenBox{rows - left, begin + first + left};
}

// Loads one panel, or zeros if the tensor has none of its columns. A box outside of the tensor along the column axis makes an H200 read the base of the
// map, where no memory need be.
template <bool evict_first = false>
inline void tma_load_panel(uint to, uint bytes, const TensorMap& map, uint barrier, int column, bool there, const VarlenBox& rows, int head) {
    if (there) tma_load<evict_first>(to, map, barrier, column, rows.row_offset, head, rows.end);
    else cp_async_bulk_load_zeros(to, bytes, barrier);
}
#endif
