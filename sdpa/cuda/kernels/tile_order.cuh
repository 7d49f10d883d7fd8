// Order of tiles in the forward kernels. The tiles of p.section_heads heads, whose K and V fit L2 together, are interleaved. Within a head the last
// tiles come first, since they have the most keys under a causal mask (LPT order).

// Index of a head, and position of a tile in the order of that head's tiles.
struct ScheduledTile {
    int head_index, position;
};

// Returns the number of heads to schedule. Each forward kernel defines this function.
inline int head_count(const Params& p);

inline ScheduledTile scheduled_tile(const Params& p, int tiles, int tile_index) {
    const int first = tile_index / (p.section_heads * tiles) * p.section_heads, together = min(p.section_heads, head_count(p) - first);
    const int in_section = tile_index - first * tiles;
    return ScheduledTile{first + in_section % together, in_section / together};
}
