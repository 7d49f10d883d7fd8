// The steps of a block of threads of the backward kernel: tiles of queries of one head after the other, of those that share its keys.

// The query heads that a block of threads has of those that share its key head, first <= of < past.
struct HeadRange {
    int begin, end;
};

inline HeadRange head_range_of(const Params& p, const Tile& tile) {
#if WITH_HEAD_SPLITS
    return HeadRange{p.group * tile.head_split / p.shares, p.group * (tile.head_split + 1) / p.shares};
#else
    return HeadRange{0, p.group};
#endif
}

// A tile of queries of a head, and whether the mask is needed.
struct Step {
    int head, queries;
    bool partial;
};

struct StepIterator {
    int head_in_group, end;
    BlockIterator iterator;
};

inline StepIterator step_iterator(const Params& p, const BlockRange& range, const Tile& tile) {
    const HeadRange heads = head_range_of(p, tile);
    return StepIterator{heads.begin, heads.end, block_iterator(p, range, tile.batch, tile.head * p.group + heads.begin, tile.block)};
}

// The next step; false where there is none.
inline bool next_step(StepIterator& steps, const Params& p, const BlockRange& range, const Tile& tile, Step& step) {
    while (true) {
        if (next_block(steps.iterator, p, range, step.queries, step.partial)) {
            step.head = tile.head * p.group + steps.head_in_group;
            return true;
        }
        if (++steps.head_in_group >= steps.end) return false;
        steps.iterator = block_iterator(p, range, tile.batch, tile.head * p.group + steps.head_in_group, tile.block);
    }
}
