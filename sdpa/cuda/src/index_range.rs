//! The range of indices for which traces are compiled. Sources depend on this range instead of the extents, so problems that differ only in lengths
//! share them.

use sdpa_core::expr::Trace;
use sdpa_emit::{Captured, Dialect};

/// An upper bound of indices, including those of a tile past the extents. Differences of two indices, and sums of these, convert to float without
/// conversion instructions.
const PLACES: i64 = 1 << 21;

/// The most rows of a tile or a block. Indices exceed the extents by fewer.
const MOST_ROWS: i64 = 256;

/// Returns the declared parameters that these traces read, for a problem of extents (batch, heads_q, seq_q, seq_kv), in the form of these
/// kernels.
pub(crate) fn captured<'t>(traces: impl IntoIterator<Item = &'t Trace>, extents: [i64; 4]) -> Captured {
    let captured = Captured::of(traces, extents).in_dialect(Dialect::Cuda);
    if extents.iter().all(|extent| extent + MOST_ROWS <= PLACES) { captured.with_places_below(PLACES) } else { captured }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mma::TileConfig;
    use crate::tile_config::{BackwardTile, Tile};
    use sdpa_core::{DType, Direction};

    /// Matches the function in `prelude.cuh`.
    fn float_of_small(x: i32) -> f32 {
        f32::from_bits(0x4b40_0000_u32.wrapping_add_signed(x)) - 12_582_912.0
    }

    fn float_from(x: i32, more: i32) -> f32 {
        if more == 0 { float_of_small(x) } else { float_of_small(x - more) + more as f32 }
    }

    #[test]
    fn small_whole_numbers_are_floats_to_the_bit() {
        let prelude = include_str!("../kernels/prelude.cuh");
        assert!(prelude.contains("return __int_as_float(0x4b400000 + x) - 12582912.0f;"));
        assert!(prelude.contains("return more == 0 ? float_of_small(x) : float_of_small(x - more) + float(more);"));
        let small = -(1 << 22)..1 << 22;
        for x in small.clone() {
            assert_eq!(float_of_small(x).to_bits(), (x as f32).to_bits(), "{x}");
        }
        assert_ne!([small.start - 1, small.end].map(float_of_small), [small.start - 1, small.end].map(|x| x as f32), "and no others");
        let ends = small.clone().take(1000).chain(-1000..1000).chain(small.end - 1000..small.end);
        for x in ends.chain(small.clone().step_by(997)) {
            for more in (-2 * MOST_ROWS as i32..=2 * MOST_ROWS as i32).filter(|more| small.contains(&(x - more))) {
                assert_eq!(float_from(x, more).to_bits(), (x as f32).to_bits(), "{x} and {more}");
            }
        }
    }

    #[test]
    fn no_tile_reaches_farther_behind_an_extent() {
        let tiles = Tile::all().flat_map(|tile| [tile.rows(), tile.keys]);
        let backward = BackwardTile::all().flat_map(|tile| [tile.queries, BackwardTile::KEYS]);
        let types = [DType::F16, DType::BF16, DType::F32]
            .into_iter()
            .flat_map(|dtype| [Direction::Forward, Direction::Backward].map(|d| (d, dtype)));
        let configs = types.flat_map(|(direction, dtype)| (1..=256).filter_map(move |dim| TileConfig::of(direction, dtype, dim, dim)));
        assert!(tiles.chain(backward).chain(configs.flat_map(|config| [config.own, config.step])).all(|rows| i64::from(rows) <= MOST_ROWS));
    }

    #[test]
    fn texts_tell_no_lengths_but_that_places_are_few() {
        let alibi: Trace = "score + 0.5 * f32(k - q)".parse().unwrap();
        let text = |seq_q, seq_kv| captured([&alibi], [2, 4, seq_q, seq_kv]).score_mod(&alibi);
        assert_eq!(text(100, 4096), text(1 << 20, 7));
        assert!(text(100, 4096).contains("= float_from("));
        for (seq_q, seq_kv) in [(1 << 21, 100), (1, PLACES - MOST_ROWS + 1)] {
            assert!(text(seq_q, seq_kv).contains("= float(v"), "{seq_q}, {seq_kv}");
        }
    }
}
