//! Configurations of the models.

/// A model of candle-transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Llama,
    Gemma3,
    Qwen3,
}

impl Family {
    pub(crate) const ALL: [Family; 3] = [Family::Llama, Family::Gemma3, Family::Qwen3];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Gemma3 => "gemma3",
            Family::Qwen3 => "qwen3",
        }
    }
}

/// The extents of a model, as in its `config.json`.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) family: Family,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) vocabulary: usize,
    pub(crate) heads: usize,
    pub(crate) heads_kv: usize,
    pub(crate) dim: usize,
    pub(crate) eps: f32,
    pub(crate) theta: f64,
    /// The largest number of tokens of a sequence.
    pub(crate) positions: usize,
    /// Gemma 3: keys in the sliding window, the query's own included, and the RoPE base of layers that have a window.
    pub(crate) window: usize,
    pub(crate) local_theta: f64,
    /// Gemma 3: one of so many layers attends to all keys.
    pub(crate) pattern: usize,
    /// Gemma 3: the softcaps of scores and of logits.
    pub(crate) softcaps: [f32; 2],
}

impl Config {
    /// Returns a model that is small enough to be trained by a test.
    pub(crate) fn small(family: Family) -> Config {
        Config {
            family,
            layers: 4,
            hidden: 64,
            intermediate: 96,
            vocabulary: 96,
            heads: 4,
            // candle-transformers 0.11.1 runs Gemma 3 with one head of keys only: its cache refuses the transposed values of more.
            heads_kv: if family == Family::Gemma3 { 1 } else { 2 },
            // Llama's is hidden / heads, always.
            dim: if family == Family::Llama { 16 } else { 24 },
            eps: 1e-5,
            theta: 10_000.,
            positions: 128,
            window: 8,
            local_theta: 1_000.,
            pattern: 2,
            softcaps: [5., 10.],
        }
    }

    pub(crate) fn has_window(&self, layer: usize) -> bool {
        self.family == Family::Gemma3 && !(layer + 1).is_multiple_of(self.pattern)
    }

    /// Gemma 3 and Qwen 3 normalise queries and keys.
    pub(crate) fn normalises_heads(&self) -> bool {
        self.family != Family::Llama
    }

    /// Gemma 3 has no matrix for logits of its own.
    pub(crate) fn is_tied(&self) -> bool {
        self.family == Family::Gemma3
    }
}
