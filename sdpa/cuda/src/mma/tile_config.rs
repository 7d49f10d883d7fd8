//! Tile configurations: own rows of a thread block, rows of a step, pipeline stages.

use sdpa_core::{DType, Direction};

/// The tile configuration of a pass. A thread block owns 16 rows per warp, and iterates over the rows of the other side in steps. It owns
/// queries in the forward and the dQ kernel, and keys in the dK and dV kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileConfig {
    /// The direction of the pass.
    pub direction: Direction,
    /// Size of an element in bytes.
    pub element_bytes: u32,
    /// Number of columns of queries and keys in shared memory: a multiple of 32.
    pub dim_qk: u32,
    /// Number of columns of values and outputs in shared memory: a multiple of 32.
    pub dim_v: u32,
    /// Number of rows that a thread block owns.
    pub own: u32,
    /// Number of rows in a step: a multiple of 16.
    pub step: u32,
    /// Number of pipeline stages, which is the number of steps in shared memory at once: 1 or 2.
    pub stages: u32,
    /// Number of parts into which the columns of dK and dV are divided, each for another thread block: 1 or 2.
    pub parts: u32,
}

/// The largest shared memory of a thread block in bytes, on the device that has the least from compute capability 8.0 on.
pub const SHARED_BYTES: u32 = 99 << 10;

/// Own rows, rows of a step, stages, in order of preference.
const FORWARD: &[[u32; 3]] = &[[128, 64, 2], [128, 64, 1], [64, 64, 1], [64, 32, 1], [64, 16, 1]];
const BACKWARD: &[[u32; 3]] = &[[64, 64, 2], [64, 32, 2], [64, 16, 2], [64, 16, 1], [32, 16, 2], [32, 16, 1]];

/// The most accumulators and scores per thread, for two-byte and four-byte elements. With four bytes each MMA operand is two numbers.
const NUMBERS: [u32; 2] = [176, 88];

impl TileConfig {
    /// Returns the tile configuration of a pass over elements of type `dtype`; `None` for head dims above 256.
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
        // If all configurations have too many accumulators and scores, use the last one, which has the fewest scores.
        fits.clone().find(|config| config.numbers() <= NUMBERS[usize::from(bytes == 4)]).or(fits.next_back())
    }

    /// Returns the number of threads per thread block.
    pub fn threads(&self) -> u32 {
        2 * self.own
    }

    /// Returns the number of warps per thread block.
    pub fn warps(&self) -> u32 {
        self.own / 16
    }

    /// Returns the accumulators and scores of a thread.
    fn numbers(&self) -> u32 {
        match self.direction {
            Direction::Forward => self.dim_v / 2 + self.step / 2,
            // Gradient accumulators, and three values per score: P, the score before the score_mod, and dP.
            Direction::Backward => (self.dim_qk + self.dim_v) / self.parts / 2 + 3 * self.step / 2,
        }
    }

    /// Returns the shared memory of a thread block in bytes, for the rows that it owns and for all pipeline stages. Rows are padded by 16
    /// bytes.
    pub fn shared_bytes(&self) -> u32 {
        let [qk, v] = [self.dim_qk, self.dim_v].map(|dim| dim * self.element_bytes + 16);
        match self.direction {
            Direction::Forward => self.own * qk + self.stages * self.step * (qk + v),
            // Each row of a step also has a log-sum-exp and a delta, 4 bytes each.
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
