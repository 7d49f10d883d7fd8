// Pipeline of mbarriers between a producer and its consumers, as in CUTLASS. Producer and consumers each count stages; the phase bit flips after each
// round of all stages.

// Index of the current stage, and phase bit (parity) of its mbarriers.
template <int stages>
struct PipelineState {
    int stage = 0, phase = 0;
    inline void advance() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        phase ^= stage == 0;
    }
};
