// A pipeline of mbarriers between a producer and its consumers, as in CUTLASS: both count stages, and the phase of the barriers flips with each round.

// Stage and phase bit.
template <int stages>
struct PipelineState {
    int stage = 0, phase = 0;
    inline void advance() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        phase ^= stage == 0;
    }
};
