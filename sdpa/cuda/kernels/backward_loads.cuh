// Operands of the backward kernels, brought to rings of places in shared memory.

// Where a ring of barriers stands: which of them, and which of its phases.
template <int stages>
struct Ring {
    int stage = 0, phase = 0;
    inline void on() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        phase ^= stage == 0;
    }
};

// So many panels of columns, from one on.
template <bool once>
inline void panels_in(uint to, uint panel_bytes, int first, int panels, const TensorMap& map, uint barrier, int row, int head, int batch) {
    for (int panel = 0; panel < panels; panel++) tma_load<once>(to + panel * panel_bytes, map, barrier, (first + panel) * PANEL, row, head, batch);
}

#if WITH_PACKED_Q || WITH_PACKED_KV
template <bool once>
inline void packed_panels_in(uint to, uint panel_bytes, int first, int panels, int of_tensor, const TensorMap& map, uint barrier,
                             const Clipped& rows, int head) {
    for (int panel = first; panel < first + panels; panel++)
        panel_in<once>(to + (panel - first) * panel_bytes, panel_bytes, map, barrier, panel * PANEL, panel < of_tensor, rows, head);
}
#endif

// Brings rows of queries, of keys too, as many as a tile or block has; so many of the panels are the tensor's.
template <int rows, int panels, int of_tensor>
inline void queries_in(uint to, const TensorMap& map, uint barrier, const Span& span, int tile, int head, int batch) {
#if WITH_PACKED_Q
    const Clipped cut = clipped<rows>(span.begin_q, span.len_q, tile * rows);
    packed_panels_in<false>(to, rows * ROW_BYTES, 0, panels, of_tensor, map, barrier, cut, head);
#else
    panels_in<false>(to, rows * ROW_BYTES, 0, panels, map, barrier, tile * rows, head, batch);
#endif
}

template <int rows, int panels, int of_tensor>
inline void keys_in(uint to, const TensorMap& map, uint barrier, const Span& span, int block, int head, int batch, int first = 0) {
#if WITH_PACKED_KV
    const Clipped cut = clipped<rows>(span.begin_kv, span.len_kv, block * rows);
    // A document may end within the keys of the other of a pair.
    const int there = PAIR && block * rows >= span.len_kv ? 0 : of_tensor;
    packed_panels_in<ONCE>(to, rows * ROW_BYTES, first, panels, there, map, barrier, cut, head);
#else
    panels_in<ONCE>(to, rows * ROW_BYTES, first, panels, map, barrier, block * rows, head, batch);
#endif
}
