//! Tile configurations: queries per CTA, keys per step, pipeline stages, registers.

/// The tile configuration of the forward kernel, for head dims up to `dim_qk` and `dim_v`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Number of columns of queries and keys in shared memory: a multiple of 64.
    pub dim_qk: u32,
    /// Number of columns of values and outputs in shared memory: a multiple of 64.
    pub dim_v: u32,
    /// Number of consumer warpgroups, each with 64 queries.
    pub groups: u32,
    /// Number of keys in a KV block: a multiple of 16.
    pub keys: u32,
    /// Number of pipeline stages, which is the number of KV blocks in shared memory at once.
    pub stages: u32,
    /// Whether consumer warpgroups use ping-pong scheduling: the softmax of one overlaps with the GEMMs of another.
    pub turns: bool,
    /// Whether the output has its own shared memory, so that the next queries can be loaded while the output is stored.
    pub output_apart: bool,
    /// Number of columns of Q that a consumer warpgroup keeps in registers for all keys of a tile, in units of 16 columns. WGMMA reads
    /// these columns from shared memory only once.
    pub held: u32,
    /// Number of registers per consumer thread.
    pub group_registers: u32,
    /// Number of registers per producer thread.
    pub bring_registers: u32,
    /// The packed GQA tile (several query heads in one tile), for few queries; `None` for tiles of one head.
    pub few: Option<Few>,
    /// Whether split-KV is possible: several thread blocks may process the keys of a tile, and a combine kernel merges their results.
    pub split: bool,
    /// Number of KV blocks in a split of fixed size; 0 if splits have no fixed size. With fixed sizes, a thread block that processes several
    /// splits of a tile merges their results as the combine kernel does.
    pub fixed_split: u32,
}

/// A packed GQA tile (PackGQA): few queries of several heads of a GQA group. The number of rows, queries times heads, is at most that of
/// a warpgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Few {
    /// Number of queries per head: a power of two.
    pub queries: u32,
    /// Number of query heads in the tile, which share a KV head.
    pub heads: u32,
}

/// Number of query rows that a consumer warpgroup processes.
pub(crate) const GROUP_QUERIES: u32 = 64;
/// Bytes of mbarriers and tile indices.
const BARRIERS: u32 = 256;
/// Bytes of the items of a tile list that a thread block reads ahead.
const TILE_ITEMS: u32 = 256;
/// Bytes of a row of a panel in shared memory.
const ROW_BYTES: u32 = 128;
/// Number of columns of a panel, the part of an operand that a row of 128 bytes in shared memory holds.
pub(crate) const PANEL: u32 = 64;
/// The largest shared memory of a thread block in bytes, on compute capability 9.0.
pub const SHARED_BYTES: u32 = 232_448;

/// The tiles, ordered by head dims: the first that fits both is used.
const TILES: [Tile; 6] = [
    Tile { turns: false, ..usual_tile(64, 64, 3) },
    usual_tile(128, 64, 2),
    usual_tile(128, 128, 2),
    Tile { output_apart: false, ..usual_tile(192, 128, 2) },
    Tile { keys: 96, output_apart: false, ..usual_tile(192, 192, 2) },
    Tile { keys: 80, output_apart: false, turns: false, group_registers: 240, bring_registers: 24, ..usual_tile(256, 256, 2) },
];

/// The tile for rows that attend to many keys, if neither registers nor mask edges are a concern.
const LONG_TILE: Tile = Tile { keys: 160, held: 4, group_registers: 240, bring_registers: 24, ..usual_tile(128, 128, 2) };

/// The tiles for few queries: one warpgroup, and enough stages to keep memory busy.
const FEW_TILES: [Tile; 6] = [
    few_tile(64, 64, 128, 5),
    few_tile(128, 64, 128, 4),
    few_tile(128, 128, 128, 3),
    few_tile(192, 128, 128, 2),
    few_tile(192, 192, 128, 2),
    few_tile(256, 256, 64, 3),
];

const fn few_tile(dim_qk: u32, dim_v: u32, keys: u32, stages: u32) -> Tile {
    Tile { keys, stages, turns: false, few: Some(Few { queries: GROUP_QUERIES, heads: 1 }), ..usual_tile(dim_qk, dim_v, 1) }
}

/// Returns the usual tile of this many warpgroups.
const fn usual_tile(dim_qk: u32, dim_v: u32, groups: u32) -> Tile {
    let (group_registers, bring_registers) = if groups == 3 { (160, 32) } else { (232, 40) };
    Tile {
        dim_qk,
        dim_v,
        groups,
        keys: 128,
        stages: 2,
        turns: true,
        output_apart: true,
        held: 0,
        group_registers,
        bring_registers,
        few: None,
        split: false,
        fixed_split: 0,
    }
}

/// The largest head dim for which the kernels have a tile.
pub const MOST_DIM: i64 = 256;

impl Tile {
    /// Returns the default tile for these head dims; `None` above [`MOST_DIM`].
    pub fn of(dim_qk: i64, dim_v: i64) -> Option<Tile> {
        TILES.into_iter().find(|tile| tile.holds(dim_qk, dim_v))
    }

    /// Returns the tile for rows that attend to many keys, with these head dims; `None` if there is none.
    pub fn of_long(dim_qk: i64, dim_v: i64) -> Option<Tile> {
        Tile::of(dim_qk, dim_v).filter(|usual| (usual.dim_qk, usual.dim_v) == (LONG_TILE.dim_qk, LONG_TILE.dim_v)).map(|_| LONG_TILE)
    }

    /// Returns the packed GQA tile for these head dims; `None` above [`MOST_DIM`].
    pub fn of_few(dim_qk: i64, dim_v: i64, few: Few) -> Option<Tile> {
        let tile = FEW_TILES.into_iter().find(|tile| tile.holds(dim_qk, dim_v))?;
        Some(Tile { few: Some(few), ..tile })
    }

    /// Returns whether these head dims fit the tile.
    pub fn holds(&self, dim_qk: i64, dim_v: i64) -> bool {
        dim_qk <= i64::from(self.dim_qk) && dim_v <= i64::from(self.dim_v)
    }

    /// Iterates over every tile of the forward kernel.
    pub fn all() -> impl Iterator<Item = Tile> {
        TILES.into_iter().chain([LONG_TILE]).chain(FEW_TILES)
    }

    /// Returns the number of query rows per thread block.
    pub fn rows(&self) -> u32 {
        self.groups * GROUP_QUERIES
    }

    /// Returns the number of queries per head in a tile.
    pub fn queries(&self) -> u32 {
        self.few.map_or(self.rows(), |few| few.queries)
    }

    /// Returns the number of query heads in a tile.
    pub fn heads(&self) -> u32 {
        self.few.map_or(1, |few| few.heads)
    }

    /// Returns the number of threads per thread block: the consumer warpgroups and one producer warpgroup.
    pub fn threads(&self) -> u32 {
        128 * (self.groups + 1)
    }

    /// Returns whether a thread block merges the results of several splits of a tile.
    pub fn merges_splits(&self) -> bool {
        self.fixed_split > 0 && !self.split
    }

    /// Returns the tile with splits of `keys` keys. A thread block that merges splits needs shared memory for their results, so it may have
    /// fewer stages.
    pub(crate) fn with_fixed_splits(self, keys: u32) -> Tile {
        let tile = Tile { fixed_split: keys / self.keys, ..self };
        let fits = |stages: &u32| Tile { stages: *stages, ..tile }.shared_bytes() <= SHARED_BYTES;
        Tile { stages: (2..=tile.stages).rev().find(fits).unwrap_or(2), ..tile }
    }

    /// Returns the shared memory of a thread block in bytes. It holds queries, keys and values, mbarriers, items of the tile list, and
    /// the output unless it reuses the memory of the queries. Merging splits needs the output in f32 and three numbers for each row.
    pub fn shared_bytes(&self) -> u32 {
        let panels = |dim: u32| dim / PANEL * ROW_BYTES;
        let [queries, output] = [self.dim_qk, self.dim_v].map(|dim| self.rows() * panels(dim));
        let step = self.keys * (panels(self.dim_qk) + panels(self.dim_v));
        let rows = match (self.few, self.output_apart) {
            _ if self.merges_splits() => queries + 2 * output + 12 * self.rows(),
            // Packed GQA tiles store O from registers, without shared memory.
            (Some(_), _) => queries,
            (None, true) => queries + output,
            (None, false) => queries.max(output),
        };
        rows + self.stages * step + BARRIERS + TILE_ITEMS
    }
}

/// The tile configuration of a backward pass, for head dims up to `dim_qk` and `dim_v`. It has two consumer warpgroups, each with 64
/// keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardTile {
    /// Number of columns of queries and keys in shared memory: a multiple of 64.
    pub dim_qk: u32,
    /// Number of columns of values and outputs in shared memory: a multiple of 64.
    pub dim_v: u32,
    /// Number of queries in a step: 64 or 128.
    pub queries: u32,
    /// Number of parts into which the columns of the gradients are divided, each for another thread block: 1 or 2.
    pub parts: u32,
    /// Whether two CTAs form a cluster. Each then computes the scores of half the keys, and only dQ is divided into column parts.
    pub two_cta: bool,
    /// Number of thread blocks that share the query heads of a KV head: 1, or more if there are too few KV blocks.
    pub shares: u32,
    /// Number of pipeline stages of Q.
    pub stages: u32,
    /// Number of pipeline stages of dO.
    pub output_stages: u32,
    /// Number of columns of K and of V that a consumer warpgroup keeps in registers for all queries, in units of 16 columns. WGMMA reads
    /// these columns from shared memory only once.
    pub held: [u32; 2],
    /// Number of registers per consumer thread.
    pub group_registers: u32,
    /// Number of registers per producer thread.
    pub bring_registers: u32,
    /// Whether dQ is summed in fixed point, so that its bits do not depend on the order of the sums.
    pub fixed_point: bool,
}

/// The tiles of backward passes, ordered by head dims: the first that fits both is used.
const BACKWARD_TILES: [BackwardTile; 4] = [
    BackwardTile { queries: 128, held: [4, 4], ..usual_backward_tile(64, 64, 1) },
    BackwardTile { held: [0, 1], ..usual_backward_tile(128, 128, 1) },
    usual_backward_tile(256, 128, 2),
    BackwardTile { stages: 1, output_stages: 1, ..usual_backward_tile(256, 256, 2) },
];

/// The tiles of 2-CTA clusters.
const TWO_CTA_TILES: [BackwardTile; 2] = [two_cta_tile(256, 128), BackwardTile { output_stages: 1, ..two_cta_tile(256, 256) }];

const fn two_cta_tile(dim_qk: u32, dim_v: u32) -> BackwardTile {
    BackwardTile { two_cta: true, ..usual_backward_tile(dim_qk, dim_v, 2) }
}

/// Returns the usual tile with this many column parts.
const fn usual_backward_tile(dim_qk: u32, dim_v: u32, parts: u32) -> BackwardTile {
    BackwardTile {
        dim_qk,
        dim_v,
        queries: 64,
        parts,
        two_cta: false,
        shares: 1,
        stages: 2,
        output_stages: 2,
        held: [0, 0],
        group_registers: 240,
        bring_registers: 24,
        fixed_point: false,
    }
}

impl BackwardTile {
    /// Number of keys of a thread block, or of both CTAs of a cluster together.
    pub const KEYS: u32 = 128;
    /// Number of threads per thread block: two consumer warpgroups and one producer warpgroup.
    pub const THREADS: u32 = 384;

    /// Returns the default backward tile for these head dims; `None` above [`MOST_DIM`].
    pub fn of(dim_qk: i64, dim_v: i64) -> Option<BackwardTile> {
        BACKWARD_TILES.into_iter().find(|tile| tile.holds(dim_qk, dim_v))
    }

    /// Returns the 2-CTA tile for these head dims; `None` if there is none.
    pub fn of_two_cta(dim_qk: i64, dim_v: i64) -> Option<BackwardTile> {
        let usual = BackwardTile::of(dim_qk, dim_v)?;
        TWO_CTA_TILES.into_iter().find(|pair| (pair.dim_qk, pair.dim_v) == (usual.dim_qk, usual.dim_v))
    }

    /// Returns whether these head dims fit the tile.
    pub fn holds(&self, dim_qk: i64, dim_v: i64) -> bool {
        dim_qk <= i64::from(self.dim_qk) && dim_v <= i64::from(self.dim_v)
    }

    /// Returns the number of keys whose scores one CTA computes.
    pub fn own_keys(&self) -> u32 {
        if self.two_cta { BackwardTile::KEYS / 2 } else { BackwardTile::KEYS }
    }

    /// Returns the number of CTAs per cluster.
    pub fn cluster_size(&self) -> u32 {
        if self.two_cta { 2 } else { 1 }
    }

    /// Iterates over every tile of the backward kernel.
    pub fn all() -> impl Iterator<Item = BackwardTile> {
        BACKWARD_TILES.into_iter().chain(TWO_CTA_TILES)
    }

    /// Returns the number of elements of dK and dV that one CTA accumulates.
    pub fn key_sums(&self) -> u32 {
        BackwardTile::KEYS * (self.dim_qk + self.dim_v) / self.parts
    }

    /// Returns the number of dQ slices in a step, one for each consumer warpgroup and column part. A slice has 64 rows by 64 columns.
    pub fn slices(&self) -> u32 {
        2 * self.parts
    }

    /// Returns the size of the f32 dQ accumulator of a query tile, in bytes.
    pub fn sums_of_queries(&self) -> u32 {
        self.slices() * PANEL * PANEL * 4
    }

    /// Returns the size of the buffer for the dQ slices of a step, in bytes. It has one f32 slice per consumer warpgroup, which TMA adds
    /// to the accumulator. It is 0 if head dims are so large that columns are divided into parts: shared memory is then full, and each
    /// thread adds its own elements.
    pub fn sums_bytes(&self) -> u32 {
        if self.parts == 1 { 2 * PANEL * PANEL * 4 } else { 0 }
    }

    /// Returns the bytes with which two warps convert dQ: each two pieces of 16 rows by 64 columns at once, and a piece of zeros.
    fn convert_bytes(&self) -> u32 {
        let piece = self.sums_bytes() / 8;
        2 * 3 * piece + piece
    }

    /// Returns the bytes for the fixed-point scales of dQ of four steps. With 64 queries in a step, threads load them from global memory.
    fn scale_bytes(&self) -> u32 {
        if self.fixed_point && self.queries == 128 { 4 * self.queries * 4 } else { 0 }
    }

    /// Returns the shared memory of a thread block in bytes. It holds K and V, the stages of Q and dO, two numbers per query, dS of two
    /// steps, the dQ slices of a step, dQ pieces under conversion, scales of dQ, and mbarriers. In a cluster it also holds half of the
    /// columns of the peer's keys, and P in f32.
    pub fn shared_bytes(&self) -> u32 {
        let [row_qk, row_v] = [self.dim_qk, self.dim_v].map(|dim| dim / PANEL * ROW_BYTES);
        let of_two_cta = if self.two_cta { self.own_keys() * row_qk / 2 + self.own_keys() * self.queries * 4 } else { 0 };
        self.own_keys() * (row_qk + row_v)
            + self.queries * (self.stages * row_qk + self.output_stages * row_v)
            + of_two_cta
            + self.stages * self.queries * 8
            + self.scale_bytes()
            + 2 * BackwardTile::KEYS * self.queries * 2
            + self.sums_bytes()
            + self.convert_bytes()
            + BARRIERS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the registers with which a thread block of this size is launched: all of an SM, in units of eight per thread. `setmaxnreg` takes
    /// registers only from these, and waits forever for more.
    fn given(threads: u32) -> u32 {
        (65_536 / threads).min(255) / 8 * 8 * threads
    }

    #[test]
    fn every_tile_fits_a_multiprocessor() {
        for tile in Tile::all() {
            assert!(tile.shared_bytes() <= SHARED_BYTES, "{tile:?}: {} bytes", tile.shared_bytes());
            let registers = 128 * (tile.groups * tile.group_registers + tile.bring_registers);
            assert!(registers <= given(tile.threads()), "{tile:?}: {registers} registers");
            assert!(tile.dim_qk % PANEL == 0 && tile.dim_v % PANEL == 0 && tile.keys % 16 == 0 && tile.keys <= 256);
            // Each panel must begin at a multiple of 1,024 bytes, where the pattern of the 128-byte swizzle begins.
            assert_eq!((tile.keys * ROW_BYTES) % 1024, 0, "{tile:?}");
        }
    }

    #[test]
    fn every_backward_tile_fits_a_multiprocessor() {
        for tile in BackwardTile::all() {
            assert!(tile.shared_bytes() <= SHARED_BYTES, "{tile:?}: {} bytes", tile.shared_bytes());
            assert!(128 * (2 * tile.group_registers + tile.bring_registers) <= given(BackwardTile::THREADS), "{tile:?}");
            // Each column part has whole panels, and each warpgroup has one dQ slice per step.
            let panels = [tile.dim_qk, tile.dim_v].map(|dim| dim / PANEL);
            assert!(panels.iter().all(|n| n % tile.parts == 0), "{tile:?}");
            assert_eq!(tile.slices() * PANEL * PANEL, tile.queries * tile.dim_qk, "{tile:?}");
        }
        assert_eq!(BackwardTile::of(96, 96).map(|t| t.dim_qk), Some(128));
        assert_eq!(BackwardTile::of(192, 128).map(|t| (t.dim_qk, t.dim_v, t.stages)), Some((256, 128, 2)));
        assert_eq!(BackwardTile::of(8, 257), None);
        assert_eq!(
            [(192, 128), (129, 9), (128, 129)].map(|(qk, v)| BackwardTile::of_two_cta(qk, v).map(|t| t.dim_v)),
            [Some(128), Some(128), Some(256)]
        );
        assert_eq!([(128, 128), (8, 257)].map(|(qk, v)| BackwardTile::of_two_cta(qk, v)), [None; 2]);
    }

    #[test]
    fn head_dims_have_the_smallest_tile_that_holds_them() {
        assert_eq!(Tile::of(64, 64).map(|t| (t.dim_qk, t.dim_v)), Some((64, 64)));
        assert_eq!(Tile::of(65, 1).map(|t| (t.dim_qk, t.dim_v)), Some((128, 64)));
        assert_eq!(Tile::of(40, 72).map(|t| (t.dim_qk, t.dim_v)), Some((128, 128)));
        assert_eq!(Tile::of(192, 128).map(|t| t.keys), Some(128));
        assert_eq!(Tile::of(256, 8).map(|t| t.keys), Some(80));
        assert_eq!(Tile::of(257, 8), None);
        assert_eq!(
            [(128, 72), (65, 128), (128, 64), (64, 64), (192, 128)].map(|(qk, v)| Tile::of_long(qk, v).map(|t| t.keys)),
            [Some(160), Some(160), None, None, None]
        );
        let few = Few { queries: 2, heads: 5 };
        assert_eq!(Tile::of_few(40, 72, few).map(|t| (t.dim_qk, t.dim_v, t.queries(), t.heads(), t.rows())), Some((128, 128, 2, 5, 64)));
        assert_eq!(Tile::of_few(8, 257, few), None);
    }
}
