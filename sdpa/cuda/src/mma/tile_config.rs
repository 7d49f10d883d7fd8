//! Tile configurations: rows of a thread block, rows of a step, stages.

use sdpa_core::{DType, Direction};

/// The tile configuration of a pass: a thread block has rows of its own side, 16 to a warp, and iterates over steps of the other side. Forward and for gradients of queries
/// its own rows are queries, for gradients of keys and values they are keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileConfig {
    /// The pass.
    pub direction: Direction,
    /// Bytes of an element.
    pub element_bytes: u32,
    /// Columns of queries and keys in shared memory: a multiple of 32.
    pub dim_qk: u32,
    /// Columns of values and outputs in shared memory: a multiple of 32.
    pub dim_v: u32,
    /// Rows of a block's own side.
    pub own: u32,
    /// Rows of a step: a multiple of 16.
    pub step: u32,
    /// Steps that are in shared memory at once: 1 or 2.
    pub stages: u32,
    /// Parts of the columns that gradients of keys and values are computed in, by different thread blocks: 1 or 2.
    pub parts: u32,
}

/// Bytes of shared memory that a block of threads has at most, on the devices that have the least of those from 8.0 on.
pub const SHARED_BYTES: u32 = 99 << 10;

/// Own rows, rows of a step, stages: the first that fits is used.
const FORWARD: &[[u32; 3]] = &[[128, 64, 2], [128, 64, 1], [64, 64, 1], [64, 32, 1], [64, 16, 1]];
const BACKWARD: &[[u32; 3]] = &[[64, 64, 2], [64, 32, 2], [64, 16, 2], [64, 16, 1], [32, 16, 2], [32, 16, 1]];

/// Sums and scores that a thread has registers for, of elements of two bytes and of four: there each operand of a product is two numbers.
const NUMBERS: [u32; 2] = [176, 88];

impl TileConfig {
    /// The tile configuration of a pass over elements of this type; `None` above 256 columns.
    pub fn of(direction: Direction, dtype: DType, dim_qk: i64, dim_v: i64) -> Option<TileConfig> {
        let [dim_qk, dim_v] =
            [dim_qk, dim_v].map(|dim| u32::try_from(dim).ok().filter(|dim| *dim <= 256).map(|dim| dim.next_multiple_of(32)));
        let (dim_qk, dim_v, bytes) = (dim_qk?, dim_v?, dtype.bits() / 8);
        let (parts, all) = match direction {
            Direction::Forward => (1, FORWARD),
            Direction::Backward => (if dim_qk.max(dim_v) * bytes > 256 { 2 } else { 1 }, BACKWARD),
        };
        let config =
            |[own, step, stages]: [u32; 3]| TileConfig { direction, element_bytes: bytes, dim_qk, dim_v, own, step, stages, parts };
        let mut fits = all.iter().copied().map(config).filter(|config| config.shared_bytes() <= SHARED_BYTES);
        // The last has the fewest scores.
        fits.clone().find(|config| config.numbers() <= NUMBERS[usize::from(bytes == 4)]).or(fits.next_back())
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        2 * self.own
    }

    /// Warps of a block.
    pub fn warps(&self) -> u32 {
        self.own / 16
    }

    /// Sums and scores of a thread.
    fn numbers(&self) -> u32 {
        match self.direction {
            Direction::Forward => self.dim_v / 2 + self.step / 2,
            // Of scores, weights before the score_mod and gradients of weights too.
            Direction::Backward => (self.dim_qk + self.dim_v) / self.parts / 2 + 3 * self.step / 2,
        }
    }

    /// Bytes of shared memory of a block: its own rows, and stages of steps. Rows are 16 bytes longer than their columns.
    pub fn shared_bytes(&self) -> u32 {
        let [qk, v] = [self.dim_qk, self.dim_v].map(|dim| dim * self.element_bytes + 16);
        match self.direction {
            Direction::Forward => self.own * qk + self.stages * self.step * (qk + v),
            // Of each row of a step two numbers more.
            Direction::Backward => self.own * (qk + v) + self.stages * self.step * (qk + v + 8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_dim_has_a_tile_configuration_that_fits() {
        for direction in [Direction::Forward, Direction::Backward] {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                for dims in (1..=256).flat_map(|dim| [[dim, dim], [dim, 256], [256, dim]]) {
                    let config =
                        TileConfig::of(direction, dtype, dims[0], dims[1]).unwrap_or_else(|| panic!("{direction:?} {dtype} {dims:?}"));
                    assert!(config.shared_bytes() <= SHARED_BYTES && config.threads() >= 64, "{config:?}");
                    assert!(i64::from(config.dim_qk) >= dims[0] && i64::from(config.dim_v) >= dims[1], "{config:?}");
                    assert!(
                        (config.dim_qk / config.parts).is_multiple_of(16) && (config.dim_v / config.parts).is_multiple_of(16),
                        "{config:?}"
                    );
                }
            }
        }
        assert_eq!(TileConfig::of(Direction::Forward, DType::BF16, 257, 8), None);
    }

    #[test]
    fn narrow_heads_have_large_tiles() {
        let of = |direction, dtype, dim| {
            TileConfig::of(direction, dtype, dim, dim).map(|config| [config.own, config.step, config.stages, config.parts])
        };
        assert_eq!(of(Direction::Forward, DType::BF16, 64), Some([128, 64, 2, 1]));
        assert_eq!(of(Direction::Forward, DType::BF16, 128), Some([128, 64, 1, 1]));
        assert_eq!(of(Direction::Forward, DType::F16, 256), Some([64, 64, 1, 1]));
        assert_eq!(of(Direction::Forward, DType::F32, 256), Some([64, 16, 1, 1]));
        assert_eq!(of(Direction::Backward, DType::BF16, 64), Some([64, 64, 2, 1]));
        assert_eq!(of(Direction::Backward, DType::BF16, 128), Some([64, 32, 2, 1]));
        assert_eq!(of(Direction::Backward, DType::BF16, 256), Some([64, 16, 1, 2]));
        assert_eq!(of(Direction::Backward, DType::F32, 256), Some([32, 16, 1, 2]));
    }
}
