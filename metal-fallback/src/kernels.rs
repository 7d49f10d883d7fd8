//! Chooses the kernels of a problem.

/// The kind of kernels of a pass. Every kind supports every problem; they differ in speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// Kernels with tiles in threadgroup memory, multiplied as 8 × 8 matrices. They are for many queries.
    Tiled,
    /// Kernels with rows in registers, which process one key at a time. They are for few queries, which would leave most of a tile empty.
    Vector,
    /// Split-KV: kernels as in [`Kernels::Vector`], but with the keys divided among threadgroups, and a kernel that merges their outputs.
    /// Backward passes have no such kernels, and use [`Kernels::Vector`].
    Parts,
}

/// A row of the selection table: the most queries, the fewest keys, and the kernels.
type Choice = (i64, i64, Kernels);

/// Eight queries are one fragment; most threadgroups' tiles have four. From 1024 keys on, one threadgroup per KV head is assumed to take longer than
/// a second kernel. Neither limit is measured.
const FORWARD: [Choice; 3] = [(8, 1024, Kernels::Parts), (8, 0, Kernels::Vector), (i64::MAX, 0, Kernels::Tiled)];
const BACKWARD: [Choice; 2] = [(8, 0, Kernels::Vector), (i64::MAX, 0, Kernels::Tiled)];

/// The approximate number of keys in a part.
const PART_KEYS: i64 = 512;
/// The most parts: every lane of the merging kernel iterates over them.
const PARTS_LIMIT: i64 = 64;

impl Kernels {
    /// Every kind of kernels.
    pub const ALL: [Kernels; 3] = [Kernels::Tiled, Kernels::Vector, Kernels::Parts];

    fn choose(table: &[Choice], seq_q: i64, seq_kv: i64) -> Kernels {
        let fits = |&&(queries, keys, _): &&Choice| seq_q <= queries && seq_kv >= keys;
        table.iter().find(fits).map_or(Kernels::Tiled, |&(_, _, kernels)| kernels)
    }

    /// Returns the default kind of kernels for a forward pass with these numbers of queries and keys.
    pub fn forward(seq_q: i64, seq_kv: i64) -> Kernels {
        Kernels::choose(&FORWARD, seq_q, seq_kv)
    }

    /// Returns the default kind of kernels for a backward pass with these numbers of queries and keys.
    pub fn backward(seq_q: i64, seq_kv: i64) -> Kernels {
        Kernels::choose(&BACKWARD, seq_q, seq_kv)
    }

    /// Returns the number of threadgroups among which the keys of a KV head are divided; 1 for kernels without split-KV.
    pub(crate) fn parts(self, seq_kv: i64) -> u32 {
        match self {
            Kernels::Tiled | Kernels::Vector => 1,
            Kernels::Parts => ((seq_kv - 1) / PART_KEYS + 1).clamp(2, PARTS_LIMIT) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_queries_go_to_vector_kernels_and_many_keys_are_shared() {
        let forward = [(1, 1), (8, 1023), (8, 1024), (1, 1 << 20), (9, 1), (9, 1 << 20)].map(|(q, k)| Kernels::forward(q, k));
        assert_eq!(forward, [Kernels::Vector, Kernels::Vector, Kernels::Parts, Kernels::Parts, Kernels::Tiled, Kernels::Tiled]);
        assert_eq!([(8, 5000), (9, 5)].map(|(q, k)| Kernels::backward(q, k)), [Kernels::Vector, Kernels::Tiled]);
        let parts = [1, 512, 1024, 1025, 1 << 20].map(|keys| Kernels::Parts.parts(keys));
        assert_eq!(parts, [2, 2, 2, 3, 64]);
        assert_eq!(Kernels::Vector.parts(1 << 20), 1);
    }
}
