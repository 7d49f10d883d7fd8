// Order of the tiles of the forward kernels: heads whose K and V fit L2 together, p.section_heads of them, are interleaved; within a head the last tiles come
// first, which have the most keys under a causal mask (LPT order).

// A head, and the position of a tile among those of its head.
struct ScheduledTile {
    int head_index, position;
};

// Of the batch; each forward kernel defines it.
inline int head_count(const Params& p);

inline ScheduledTile scheduled_tile(const Params& p, int tiles, int tile_index) {
    const int first = tile_index / (p.section_heads * tiles) * p.section_heads, together = min(p.section_heads, head_count(p) - first);
    const int in_section = tile_index - first * tiles;
    return ScheduledTile{first + in_section % together, in_section / together};
}
