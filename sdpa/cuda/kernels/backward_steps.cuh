// Steps of a backward CTA: the query tiles of a KV block, for each head of the GQA group in turn. Producers and consumers iterate over the same steps.

// The CTA's heads of the GQA group: all, or one head split.
struct HeadRange {
    int begin, end;
};

inline HeadRange head_range_of(const Params& p, const Tile& tile) {
#if WITH_HEAD_SPLITS
    return HeadRange{p.group * tile.head_split / p.head_splits, p.group * (tile.head_split + 1) / p.head_splits};
#else
    return HeadRange{0, p.group};
#endif
}

// A query tile of a head; `partial` if it needs the mask.
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

// Advances to the next step; returns false after the last.
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
