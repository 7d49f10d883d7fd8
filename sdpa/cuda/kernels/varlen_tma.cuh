// Boxes of packed tokens, cut off where a document ends.

#if WITH_PACKED_Q || WITH_PACKED_KV
// Rows of a document behind its end are the next one's. The map of a packed tensor has two axes of tokens, which add up: one ends behind as many tokens
// as a box has, so that of a box which begins there before its first row only rows of the document are inside. Such a map begins a box before the tensor.
struct VarlenBox {
    int row_offset;  // along the axis that ends
    int end;      // along the other: behind the last row of the box that is of the document
};

template <int rows>
inline VarlenBox varlen_box(int begin, int length, int first) {
    const int left = min(rows, length - first);
    return VarlenBox{rows - left, begin + first + left};
}

// Brings the rows of a panel, or zeros where the tensor has none of its columns: for a box that lies behind the last column the copy engine of an H200
// looks at the begin of the map, which need not be memory.
template <bool evict_first = false>
inline void tma_load_panel(uint to, uint bytes, const TensorMap& map, uint barrier, int column, bool there, const VarlenBox& rows, int head) {
    if (there) tma_load<evict_first>(to, map, barrier, column, rows.row_offset, head, rows.end);
    else cp_async_bulk_load_zeros(to, bytes, barrier);
}
#endif
