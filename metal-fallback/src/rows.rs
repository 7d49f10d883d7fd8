//! Query rows of vector kernels, which simdgroups hold in registers.

use crate::tile_config::{REGISTER_LIMIT, SIMD};

/// Threads of every kernel without tiles: eight simdgroups, which leaves each lane registers for several rows.
pub(crate) const THREADS: u32 = 256;

/// The number of query rows that a threadgroup of a vector kernel processes, and the registers that they take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Number of query rows per threadgroup. Every simdgroup holds all of them.
    pub(crate) rows: u32,
    dims: [u32; 2],
    /// Number of 32-bit registers per lane for the arrays of the kernel.
    pub(crate) registers: u32,
}

/// Rows of a threadgroup, in order of preference.
const SIZES: [u32; 4] = [8, 4, 2, 1];

fn lanes(dim: u32) -> u32 {
    dim.div_ceil(SIMD)
}

impl Rows {
    /// Returns as many rows as fit into registers, but fewer than twice the present ones.
    fn choose(dims: [u32; 2], present: u64, registers: impl Fn(u32, [u32; 2]) -> u32) -> Rows {
        let per_lane = dims.map(lanes);
        let fits = |&&rows: &&u32| registers(rows, per_lane) <= REGISTER_LIMIT && u64::from(rows) < 2 * present;
        let rows = SIZES.iter().find(fits).copied().unwrap_or(1);
        Rows { rows, dims, registers: registers(rows, per_lane) }
    }

    /// Returns the rows of a threadgroup of the forward kernel, for `present` query rows. The kernel holds query, output, maximum, sum
    /// and score of each row, and a key or a value.
    pub(crate) fn forward(dims: [u32; 2], present: u64) -> Rows {
        Rows::choose(dims, present, |rows, [qk, v]| rows * (qk + v + 3) + qk.max(v))
    }

    /// Returns the rows of a threadgroup of the `dq` kernel, for `present` query rows. The kernel holds query, gradients, log-sum-exp,
    /// delta, score and derivative of each row, and a key and a value.
    pub(crate) fn dq(dims: [u32; 2], present: u64) -> Rows {
        Rows::choose(dims, present, |rows, [qk, v]| rows * (2 * qk + v + 5) + qk + v)
    }

    /// Returns the rows of a threadgroup of the kernel for `dk` and `dv`. The kernel holds a key, a value and their gradients, a query
    /// and its gradient.
    pub(crate) fn dkv(dims: [u32; 2]) -> Rows {
        let [qk, v] = dims.map(lanes);
        Rows { rows: 1, dims, registers: 3 * (qk + v) }
    }

    /// Returns the constants of the kernel source, as names and values.
    pub(crate) fn constants(&self) -> Vec<(&'static str, u32)> {
        let [dim_qk, dim_v] = self.dims;
        vec![
            ("DIM_QK", dim_qk),
            ("DIM_V", dim_v),
            ("LANE_QK", lanes(dim_qk)),
            ("LANE_V", lanes(dim_v)),
            ("ROWS", self.rows),
            ("THREADS", THREADS),
        ]
    }

    fn simdgroups() -> usize {
        (THREADS / SIMD) as usize
    }

    /// Returns the sizes in bytes of two threadgroup buffers: the maxima and sums of all simdgroups, and their outputs for one row.
    pub(crate) fn forward_bytes(&self) -> Vec<usize> {
        vec![Rows::simdgroups() * self.rows as usize * 8, Rows::simdgroups() * self.dims[1] as usize * 4]
    }

    /// Returns the size in bytes of the threadgroup buffer for the simdgroups' sums of `dq` for one row.
    pub(crate) fn dq_bytes(&self) -> Vec<usize> {
        vec![Rows::simdgroups() * self.dims[0] as usize * 4]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile_config::THREADGROUP_BYTES;

    #[test]
    fn rows_fit_registers_and_memory() {
        for dim_qk in 1..=256 {
            for dim_v in [1, 40, 64, 128, 192, 256, dim_qk] {
                for present in [1, 2, 3, 5, 8, 64] {
                    let dims = [dim_qk, dim_v];
                    let (forward, dq) = (Rows::forward(dims, present), Rows::dq(dims, present));
                    for rows in [forward, dq, Rows::dkv(dims)] {
                        assert!(rows.registers <= REGISTER_LIMIT, "{rows:?}");
                        assert!(u64::from(rows.rows) < 2 * present, "{rows:?}");
                    }
                    assert!(forward.forward_bytes().iter().chain(&dq.dq_bytes()).sum::<usize>() <= THREADGROUP_BYTES);
                }
            }
        }
        let rows = |dim: u32, present| [Rows::forward([dim; 2], present).rows, Rows::dq([dim; 2], present).rows];
        assert_eq!([64, 128, 256].map(|dim| rows(dim, 64)), [[8, 4], [4, 4], [2, 2]]);
        assert_eq!([1, 2, 3, 5].map(|present| rows(64, present)[0]), [1, 2, 4, 8]);
    }
}
