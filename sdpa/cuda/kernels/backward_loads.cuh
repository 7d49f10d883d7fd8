// TMA loads of Q, dO, K and V. Called by the producers of the sm_90 backward kernels.

// Loads `panels` panels from panel `first` on.
template <bool evict_first>
inline void tma_load_panels(uint to, uint panel_bytes, int first, int panels, const TensorMap& map, uint barrier, int row, int head, int batch) {
    for (int panel = 0; panel < panels; panel++) tma_load<evict_first>(to + panel * panel_bytes, map, barrier, (first + panel) * PANEL, row, head, batch);
}

#if WITH_PACKED_Q || WITH_PACKED_KV
template <bool evict_first>
inline void tma_load_panels_varlen(uint to, uint panel_bytes, int first, int panels, int tensor_panels, const TensorMap& map, uint barrier,
                                   const VarlenBox& rows, int head) {
    for (int panel = first; panel < first + panels; panel++)
        tma_load_panel<evict_first>(to + (panel - first) * panel_bytes, panel_bytes, map, barrier, panel * PANEL, panel < tensor_panels, rows, head);
}
#endif

// Loads a tile's rows of Q or dO. Panels from `tensor_panels` on have no columns of the tensor and become zeros.
template <int rows, int panels, int tensor_panels>
inline void load_q_rows(uint to, const TensorMap& map, uint barrier, const SeqInfo& seq_info, int tile, int head, int batch) {
#if WITH_PACKED_Q
    const VarlenBox box = varlen_box<rows>(seq_info.begin_q, seq_info.len_q, tile * rows);
    tma_load_panels_varlen<false>(to, rows * ROW_BYTES, 0, panels, tensor_panels, map, barrier, box, head);
#else
    tma_load_panels<false>(to, rows * ROW_BYTES, 0, panels, map, barrier, tile * rows, head, batch);
#endif
}

template <int rows, int panels, int tensor_panels>
inline void load_kv_rows(uint to, const TensorMap& map, uint barrier, const SeqInfo& seq_info, int block, int head, int batch, int first = 0) {
#if WITH_PACKED_KV
    const VarlenBox box = varlen_box<rows>(seq_info.begin_kv, seq_info.len_kv, block * rows);
    // If the sequence ends before the second CTA's keys begin, all panels are zeros.
    const int there = TWO_CTA && block * rows >= seq_info.len_kv ? 0 : tensor_panels;
    tma_load_panels_varlen<KV_EVICT_FIRST>(to, rows * ROW_BYTES, first, panels, there, map, barrier, box, head);
#else
    tma_load_panels<KV_EVICT_FIRST>(to, rows * ROW_BYTES, first, panels, map, barrier, block * rows, head, batch);
#endif
}
