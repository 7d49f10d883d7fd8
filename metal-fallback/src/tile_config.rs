//! Tile configurations, limited by threadgroup memory.

/// Size of the threadgroup memory that every Apple GPU has, in bytes.
pub const THREADGROUP_BYTES: usize = 32 * 1024;

/// Number of lanes per simdgroup.
pub const SIMD: u32 = 32;

/// Number of rows of a fragment, an 8 × 8 matrix that a simdgroup multiplies. A simdgroup computes this many rows.
pub const FRAGMENT: u32 = 8;

/// The largest number of 32-bit registers per lane for the arrays of a kernel. Addresses, parameters and a pair of operands need further
/// registers. The number was chosen, not measured.
pub const REGISTER_LIMIT: u32 = 80;

/// Columns of two accumulators that fit into the registers of a simdgroup.
const SLICE_LIMIT: u32 = 128;

/// The tile configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Number of rows that a threadgroup computes, eight per simdgroup. They are queries, or keys in the kernel for the gradients of keys
    /// and values.
    pub own: u32,
    /// Number of rows in each block over which a threadgroup iterates. They are keys, or queries in the kernel for the gradients of keys
    /// and values.
    pub passing: u32,
    /// Number of elements of a query and of a key, padded to whole fragments.
    pub padded_qk: u32,
    /// Head dim of V, rounded up to a multiple of the fragment width.
    pub padded_v: u32,
    /// Distance between rows of queries and of keys in threadgroup memory, in elements.
    pub pitch_qk: u32,
    /// Distance between rows of values in threadgroup memory, in elements.
    pub pitch_v: u32,
    /// Size of an element in bytes.
    pub element: u32,
}

/// Own and passing rows, in order of preference. Wide heads use later entries: their accumulators fill the registers.
const SIZES: [(u32, u32); 5] = [(32, 32), (32, 16), (16, 16), (16, 8), (8, 8)];

impl Tiles {
    /// Returns the first tiles that fit into threadgroup memory; `None` if none do. Unpadded rows are the last resort.
    fn choose(dims: [u32; 2], element: u32, bytes: impl Fn(&Tiles) -> Vec<usize>) -> Option<Tiles> {
        let sizes = &SIZES[usize::from(dims[0].max(dims[1]) >= 128)..];
        let padding = [16 / element, 0];
        let all = padding.into_iter().flat_map(|padding| sizes.iter().map(move |&size| Tiles::new(size, dims, element, padding)));
        all.into_iter().find(|tiles| bytes(tiles).into_iter().chain(tiles.odd_bytes()).sum::<usize>() <= THREADGROUP_BYTES)
    }

    /// Returns the tile configuration of a forward kernel, or `None` if no tile fits.
    pub fn forward(dim_qk: u32, dim_v: u32, element: u32) -> Option<Tiles> {
        Tiles::choose([dim_qk, dim_v], element, Tiles::forward_bytes)
    }

    /// Returns the tile configuration of a kernel of the backward pass, or `None` if no tile fits.
    pub fn backward(dim_qk: u32, dim_v: u32, element: u32) -> Option<Tiles> {
        Tiles::choose([dim_qk, dim_v], element, |tiles| tiles.backward_bytes(true))
    }

    // Rows are padded by 16 bytes, so that the rows of a fragment are in different banks of threadgroup memory.
    fn new((own, passing): (u32, u32), dims: [u32; 2], element: u32, padding: u32) -> Tiles {
        let [padded_qk, padded_v] = dims.map(|dim| dim.next_multiple_of(FRAGMENT));
        Tiles { own, passing, padded_qk, padded_v, pitch_qk: padded_qk + padding, pitch_v: padded_v + padding, element }
    }

    fn bytes(&self, rows: u32, pitch: u32) -> usize {
        (rows * pitch * self.element).next_multiple_of(16) as usize
    }

    /// Returns the size in bytes of the threadgroup memory with which simdgroups tell each other that they saw infinities or NaN. Returns
    /// `None` if a threadgroup has only one simdgroup.
    pub fn odd_bytes(&self) -> Option<usize> {
        let simdgroups = self.threads() / SIMD;
        (simdgroups > 1).then(|| ((simdgroups * 4) as usize).next_multiple_of(16))
    }

    /// Returns the sizes in bytes of two buffers in threadgroup memory: one for queries, and one for keys, which values overwrite.
    pub fn forward_bytes(&self) -> Vec<usize> {
        vec![self.bytes(self.own, self.pitch_qk), self.bytes(self.passing, self.pitch_qk.max(self.pitch_v))]
    }

    /// Returns the sizes in bytes of the buffers for `q`, `d_o`, `k` and `v` in threadgroup memory. With `own_queries`, a threadgroup
    /// computes rows of queries; otherwise, of keys.
    pub fn backward_bytes(&self, own_queries: bool) -> Vec<usize> {
        let (q, k) = if own_queries { (self.own, self.passing) } else { (self.passing, self.own) };
        vec![self.bytes(q, self.pitch_qk), self.bytes(q, self.pitch_v), self.bytes(k, self.pitch_qk), self.bytes(k, self.pitch_v)]
    }

    /// Returns the number of threadgroups that compute the same rows of a kernel with two accumulators. Each of them computes some of the
    /// columns.
    pub fn splits(&self) -> u32 {
        self.padded_qk.max(self.padded_v).div_ceil(SLICE_LIMIT)
    }

    /// Returns the width of one part, if `padded` columns are split into [`Tiles::splits`] parts: a multiple of `FRAGMENT` columns.
    pub fn slice(&self, padded: u32) -> u32 {
        padded.div_ceil(self.splits()).next_multiple_of(FRAGMENT)
    }

    /// Returns the 32-bit registers of a lane for fragments that live throughout a block: estimated, not measured. A fragment takes two numbers per
    /// lane.
    fn fragments(&self, accumulated: u32, scores: u32) -> u32 {
        2 * (accumulated / FRAGMENT + scores * self.passing / FRAGMENT)
    }

    /// Returns the number of 32-bit registers per lane for the arrays of the forward kernel.
    pub fn forward_registers(&self) -> u32 {
        self.fragments(self.padded_v, 1)
    }

    /// Returns the number of 32-bit registers per lane for the arrays of the `dq` kernel.
    pub fn dq_registers(&self) -> u32 {
        self.fragments(self.padded_qk, 2)
    }

    /// Returns the number of 32-bit registers per lane for the arrays of the kernel for a parameter's gradient.
    pub fn parameter_registers(&self) -> u32 {
        self.fragments(0, 3)
    }

    /// Returns the number of 32-bit registers per lane for the arrays of the kernel for `dk` and `dv`.
    pub fn dkv_registers(&self) -> u32 {
        self.fragments(self.slice(self.padded_qk) + self.slice(self.padded_v), 2)
    }

    /// Returns the constants of the kernel source, as names and values. `dims` are the head dims of queries and of values.
    pub(crate) fn constants(&self, [dim_qk, dim_v]: [u32; 2]) -> Vec<(&'static str, u32)> {
        vec![
            ("DIM_QK", dim_qk),
            ("DIM_V", dim_v),
            ("PADDED_QK", self.padded_qk),
            ("PADDED_V", self.padded_v),
            ("PITCH_QK", self.pitch_qk),
            ("PITCH_V", self.pitch_v),
            ("OWN", self.own),
            ("PASSING", self.passing),
            ("THREADS", self.threads()),
            ("SPLITS", self.splits()),
            ("SLICE_QK", self.slice(self.padded_qk)),
            ("SLICE_V", self.slice(self.padded_v)),
        ]
    }

    /// Returns the number of threads per threadgroup.
    pub fn threads(&self) -> u32 {
        self.own / FRAGMENT * SIMD
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
                    let (forward, backward) =
                        (Tiles::forward(dim_qk, dim_v, element).unwrap(), Tiles::backward(dim_qk, dim_v, element).unwrap());
                    assert!(forward.forward_bytes().into_iter().chain(forward.odd_bytes()).sum::<usize>() <= THREADGROUP_BYTES);
                    for own_queries in [true, false] {
                        let bytes = backward.backward_bytes(own_queries).into_iter().chain(backward.odd_bytes());
                        assert!(bytes.sum::<usize>() <= THREADGROUP_BYTES);
                    }
                    for (padded, dim) in [(backward.padded_qk, dim_qk), (backward.padded_v, dim_v)] {
                        assert!(padded >= dim && padded.is_multiple_of(FRAGMENT));
                        assert!(backward.slice(padded) <= SLICE_LIMIT && backward.slice(padded) * backward.splits() >= padded);
                    }
                    assert_eq!(forward.threads(), forward.own * 4);
                    let registers =
                        [forward.forward_registers(), backward.dq_registers(), backward.dkv_registers(), backward.parameter_registers()];
                    for registers in registers {
                        assert!(registers <= REGISTER_LIMIT, "{registers} for {dim_qk} and {dim_v}");
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_shrink_with_the_dim() {
        let forward = |dim, element| Tiles::forward(dim, dim, element).map(|t| (t.own, t.passing));
        assert_eq!(forward(64, 2), Some((32, 32)));
        assert_eq!(forward(128, 2), Some((32, 16)));
        assert_eq!(forward(128, 4), Some((32, 16)));
        assert_eq!(forward(256, 2), Some((32, 16)));
        assert_eq!(forward(256, 4), Some((16, 8)));
        let backward = |dim, element| Tiles::backward(dim, dim, element).map(|t| (t.own, t.passing, t.pitch_qk));
        assert_eq!(backward(64, 2), Some((32, 32, 72)));
        assert_eq!(backward(128, 2), Some((32, 16, 136)));
        assert_eq!(backward(256, 2), Some((16, 8, 264)));
        assert_eq!(backward(256, 4), Some((8, 8, 256)));
    }
}
