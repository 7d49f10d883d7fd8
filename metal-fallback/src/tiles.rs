//! How a problem is cut: tables of sizes, held against the limit of threadgroup memory.

/// Bytes of threadgroup memory that every Apple GPU has.
pub const THREADGROUP_BYTES: usize = 32 * 1024;

/// Lanes of a simdgroup.
pub const SIMD: u32 = 32;

/// Rows of a fragment: the queries of a simdgroup.
pub const FRAGMENT: u32 = 8;

/// The tiles of a forward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Queries of a threadgroup: eight for each simdgroup.
    pub block_q: u32,
    /// Keys of a block.
    pub block_k: u32,
    /// Elements of a query and of a key, rounded up to whole fragments.
    pub padded_qk: u32,
    /// The same of a value.
    pub padded_v: u32,
    /// Elements between rows of queries and keys in threadgroup memory.
    pub pitch_qk: u32,
    /// The same of values.
    pub pitch_v: u32,
    /// Bytes of an element.
    pub element: u32,
}

/// Queries and keys of a tile, the best first. Wide heads begin further down: their accumulators fill the registers.
const SIZES: [(u32, u32); 5] = [(32, 32), (32, 16), (16, 16), (16, 8), (8, 8)];

impl Tiles {
    /// The best tiles that fit; `None` where none do.
    pub fn choose(dim_qk: u32, dim_v: u32, element: u32) -> Option<Tiles> {
        let wide = dim_qk.max(dim_v) >= 128;
        SIZES[usize::from(wide)..]
            .iter()
            .map(|&size| Tiles::new(size, dim_qk, dim_v, element))
            .find(|tiles| tiles.bytes().iter().sum::<usize>() <= THREADGROUP_BYTES)
    }

    fn new((block_q, block_k): (u32, u32), dim_qk: u32, dim_v: u32, element: u32) -> Tiles {
        let padded = |dim: u32| dim.next_multiple_of(FRAGMENT);
        // A row more than whole banks, so that the rows of a fragment lie in different ones.
        let pitch = |dim: u32| padded(dim) + 16 / element;
        Tiles {
            block_q,
            block_k,
            padded_qk: padded(dim_qk),
            padded_v: padded(dim_v),
            pitch_qk: pitch(dim_qk),
            pitch_v: pitch(dim_v),
            element,
        }
    }

    /// Threads of a threadgroup.
    pub fn threads(&self) -> u32 {
        self.block_q / FRAGMENT * SIMD
    }

    /// Bytes of the queries, and of the keys which make place for the values.
    pub fn bytes(&self) -> [usize; 2] {
        let bytes = |rows: u32, pitch: u32| (rows * pitch * self.element).next_multiple_of(16) as usize;
        [bytes(self.block_q, self.pitch_qk), bytes(self.block_k, self.pitch_qk.max(self.pitch_v))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dim_fits_and_is_whole_fragments() {
        for element in [2, 4] {
            for dim_qk in 1..=256 {
                for dim_v in [1, 40, 64, 128, 192, 256, dim_qk] {
                    let tiles = Tiles::choose(dim_qk, dim_v, element).unwrap();
                    assert!(tiles.bytes().iter().sum::<usize>() <= THREADGROUP_BYTES);
                    for (padded, dim) in [(tiles.padded_qk, dim_qk), (tiles.padded_v, dim_v)] {
                        assert!(padded >= dim && padded.is_multiple_of(FRAGMENT));
                    }
                    assert_eq!(tiles.threads(), tiles.block_q * 4);
                }
            }
        }
    }

    #[test]
    fn tiles_shrink_with_the_dim() {
        let sizes = |dim, element| Tiles::choose(dim, dim, element).map(|t| (t.block_q, t.block_k));
        assert_eq!(sizes(64, 2), Some((32, 32)));
        assert_eq!(sizes(128, 2), Some((32, 16)));
        assert_eq!(sizes(128, 4), Some((32, 16)));
        assert_eq!(sizes(256, 2), Some((32, 16)));
        assert_eq!(sizes(256, 4), Some((16, 8)));
    }
}
