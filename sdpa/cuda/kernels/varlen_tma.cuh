// Boxes of packed tokens, cut off where a document ends.

#if WITH_PACKED_Q || WITH_PACKED_KV
// Rows of a document behind its end are the next one's. The map of a packed tensor has two axes of tokens, which add up: one ends behind as many tokens
// as a box has, so that of a box which begins there before its first row only rows of the document are inside. Such a map begins a box before the tensor.
struct Clipped {
    int skipped;  // along the axis that ends
    int end;      // along the other: behind the last row of the box that is of the document
};

template <int rows>
inline Clipped clipped(int begin, int length, int first) {
    const int left = min(rows, length - first);
    return Clipped{rows - left, begin + first + left};
}

// Brings the rows of a panel, or zeros where the tensor has none of its columns: for a box that lies behind the last column the copy engine of an H200
// looks at the begin of the map, which need not be memory.
template <bool once = false>
inline void panel_in(uint to, uint bytes, const TensorMap& map, uint barrier, int column, bool there, const Clipped& rows, int head) {
    if (there) tma_load<once>(to, map, barrier, column, rows.skipped, head, rows.end);
    else cp_async_bulk_load_zeros(to, bytes, barrier);
}
#endif
