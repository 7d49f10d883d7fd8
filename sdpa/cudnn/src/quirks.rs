//! Quirks: known wrong results of cuDNN's engines, and the workaround for each. Each has a row in the table and a name.
//!
//! NVIDIA's frontend refuses some of the same cases: its refusals mark wrong answers, not only missing kernels. A row is added once a source or a
//! test shows the error, and names both. `docs/lowering.md` has the generated table.

use cudnn_graph::Version;
use std::ops::RangeInclusive;

/// The passes that a quirk affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// Forward passes only.
    Forward,
    /// Backward passes only.
    Backward,
    /// Forward and backward passes.
    Both,
}

/// One row of the table: a known error of some cuDNN versions.
#[derive(Clone, Debug)]
pub struct Row {
    /// First and last affected version of cuDNN.
    pub versions: (Version, Version),
    /// Affected compute capabilities, times ten: 90 is 9.0.
    pub sm: RangeInclusive<u32>,
    /// Affected passes.
    pub passes: Passes,
    /// The error.
    pub what: &'static str,
    /// The workaround.
    pub so: &'static str,
    /// The source that describes the error, or the run that showed it.
    pub source: &'static str,
    /// A test, a case of `sdpa/conformance/cases`, or a part of the benchmark `device` that detects the error.
    pub test: &'static str,
}

const fn v(minor: u32, patch: u32) -> Version {
    Version::new(9, minor, patch)
}

const EVERY: (Version, Version) = (Version::new(0, 0, 0), Version::new(u32::MAX, 0, 0));
const ANY: RangeInclusive<u32> = 0..=u32::MAX;

const fn to(minor: u32, patch: u32) -> (Version, Version) {
    (EVERY.0, v(minor, patch))
}

macro_rules! quirks {
    ($($name:ident { what: $what:literal, so: $so:literal, versions: $versions:expr, sm: $sm:expr, passes: $passes:ident, source: $source:literal, test: $test:literal, })*) => {
        /// Known errors of cuDNN's engines.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Quirk { $(#[doc = $what] $name,)* }

        impl Quirk {
            /// Every row of the table.
            pub const ALL: &'static [Quirk] = &[$(Quirk::$name),*];

            /// Returns the quirk's row of the table.
            pub const fn row(self) -> Row {
                match self {
                    $(Quirk::$name => Row {
                        versions: $versions, sm: $sm, passes: Passes::$passes, what: $what, so: $so, source: $source, test: $test,
                    },)*
                }
            }
        }
    };
}

quirks! {
    RowSumOffsets {
        what: "sums of rows of o and d_o are taken at 32-bit offsets: dq and dk are wrong where o or d_o reaches past 2³¹ elements",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.28.0", test: "device limits",
    }
    QueryGradientOffsets {
        what: "dq is written at 32-bit offsets: wrong where it reaches past 2³² elements",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.28.0", test: "device limits",
    }
    BackwardGrid {
        what: "more than 65,535 batch entries or query heads exceed a dimension of the grid: the launch fails (`EXECUTION_FAILED_CUDA_DRIVER`)",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H100 under 9.19.0 with 70,000 batch entries", test: "a_backward_pass_over_more_batch_entries_than_a_grid_has_is_refused",
    }
    PaddingWithoutNumbers {
        what: "entries of a batch without queries or keys get no numbers, also where their lengths are guarded, before 9.19",
        so: "unsupported", versions: to(18, 99), sm: ANY, passes: Both,
        source: "seen on an H200 under 9.13.1 and 9.16.0; cudnn-frontend #943", test: "each_row_refuses_its_versions_and_no_others",
    }
    AttentionDisabled {
        what: "attention is disabled by NVIDIA's frontend on these releases",
        so: "unsupported", versions: (v(10, 0), v(10, 1)), sm: ANY, passes: Both,
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention", test: "each_row_refuses_its_versions_and_no_others",
    }
    OpenWindowLong {
        what: "a window that is not causal gives wrong results past 1024 keys; fixed in 9.14.1",
        so: "unsupported", versions: (v(14, 0), v(14, 0)), sm: ANY, passes: Both,
        source: "cudnn-frontend 1.32; TransformerEngine #2344", test: "each_row_refuses_its_versions_and_no_others",
    }
    OpenWindow {
        what: "a window must be causal before 9.10.2",
        so: "unsupported", versions: to(10, 1), sm: ANY, passes: Both,
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention", test: "each_row_refuses_its_versions_and_no_others",
    }
    DecodeOnBlackwell {
        what: "decode corrupts silently with few key heads on Blackwell; fixed in 9.25.1",
        so: "unsupported", versions: (v(19, 0), v(25, 0)), sm: 100..=129, passes: Forward,
        source: "pytorch #193893, #194927", test: "each_row_refuses_its_versions_and_no_others",
    }
    MasksOffTheDiagonal {
        what: "masks off the main diagonal need lengths that are multiples of 64 before 9.6",
        so: "unsupported", versions: to(5, 99), sm: ANY, passes: Both,
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention", test: "each_row_refuses_its_versions_and_no_others",
    }
    AccumulatorOfQueryGradient {
        what: "the library does not zero the accumulator of dq before 9.6",
        so: "unsupported", versions: to(5, 99), sm: ANY, passes: Backward,
        source: "cudnn-frontend 1.32, backward node", test: "each_row_refuses_its_versions_and_no_others",
    }
    PastTheKeys {
        what: "the backward pass reads past the keys where their number is no multiple of 128; fixed after 9.15.0",
        so: "unsupported", versions: to(15, 0), sm: ANY, passes: Backward,
        source: "cudnn-frontend 1.16 release notes", test: "each_row_refuses_its_versions_and_no_others",
    }
    PlannerOfOnePair {
        what: "the planner crashes where batch, heads and lengths are all 1",
        so: "unsupported", versions: (v(26, 0), v(26, 0)), sm: ANY, passes: Backward,
        source: "cudnn-frontend #1071", test: "each_row_refuses_its_versions_and_no_others",
    }
    SharedKeysIn8Bits {
        what: "gradients of 8-bit floats are not accurate where query heads share a key head",
        so: "unsupported", versions: EVERY, sm: 90..=99, passes: Backward,
        source: "left out by cudnn-frontend's own tests, 14 configurations for compute capability 9", test: "each_row_refuses_its_versions_and_no_others",
    }
    ScoreModsOf8Bits {
        what: "a score_mod of 8-bit floats is given scores before they are descaled: o and stats are wrong (softcap, ALiBi)",
        so: "unsupported", versions: EVERY, sm: 90..=99, passes: Forward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    DropoutOf8Bits {
        what: "dropout beside 8-bit floats ends in an illegal memory access",
        so: "unsupported", versions: EVERY, sm: 90..=99, passes: Both,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    RowMaximaOf8Bits {
        what: "row maxima of 8-bit floats are those of scores before they are descaled",
        so: "unsupported", versions: EVERY, sm: 90..=99, passes: Forward,
        source: "seen on an H200 under 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    LengthsOf8Bits {
        what: "lengths beside 8-bit floats: rows of a batch entry without keys, or past its queries, are not 0 (7 of 120 random problems)",
        so: "unsupported", versions: EVERY, sm: 90..=99, passes: Both,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    RowsWithoutKeysOf8Bits {
        what: "8-bit floats beside a rule that may leave a row without a key: o, stats and amax_o are not-a-number there",
        so: "unsupported", versions: EVERY, sm: 90..=99, passes: Forward,
        source: "seen on an H100 under 9.19.0 and 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    SmallGradientsOf8Bits {
        what: "gradients of 8-bit floats: dq loses small gradients of scores, up to 1.64 times what rounding them to the nearest allows",
        so: "unsupported", versions: to(26, 99), sm: 90..=99, passes: Backward,
        source: "seen on an H200 under 9.19.0, not under 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    PackedWideKeys {
        what: "packed documents whose dim_qk is above 192 beside a dim_v of at most 128: dq and dk are wrong (216 and 112, three heads, documents without tokens)",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    OffsetsOfQueryGradient {
        what: "packed documents: dq is wrong where its heads lie behind one another within a token, dim_qk is a multiple of 16 and its strides are not those of q (q within a tensor of q, k and v)",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H100 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    OrderOfWideKeys {
        what: "deterministic: dq has other bits on every run where 128 < dim_qk ≤ 192 and 64 < dim_v ≤ 128, other than 192 and 128",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    BandsOfTwoCorners {
        what: "a band about the ends of entries beside one about the first query and key: both are taken to be about the same corner",
        so: "the one about the ends is a band, the other a rule", versions: EVERY, sm: ANY, passes: Both,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "a_band_about_the_ends_is_the_only_band",
    }
    OrderOfEnds {
        what: "a left bound about the ends of entries, the length of queries added to the key before that of keys is subtracted, is taken to be about the first query and key",
        so: "spelled in the order of NVIDIA's frontend", versions: to(20, 99), sm: ANY, passes: Both,
        source: "seen on an H200 under 9.19.0", test: "bounds_about_the_ends_are_moved_as_the_frontend_moves_them",
    }
    HeadsOverPages {
        what: "one query over pages: values by head are another head's where heads share keys",
        so: "spread over keys", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "paged_decode_score_mod",
    }
    EntriesWithoutKeys {
        what: "entries of a batch without keys (`seq_len_kv` 0) get not-a-number forward and nothing backward; 9.25.1 still not-a-number in dk and dv",
        so: "products are told of one key and no query there: the lengths that they take come from a kernel that runs before; lengths in the unified form are refused",
        versions: to(25, 99), sm: ANY, passes: Both,
        source: "cudnn-frontend #943; seen on an H200 under 9.19.0 and 9.25.1",
        test: "engines_are_told_of_lengths_within_extents_and_of_pages_that_are_there",
    }
    HeadsOfOneQuery {
        what: "unified form, one query: values by head are another head's, with 8 heads on one head of keys",
        so: "refused before 9.25.1, where they are right", versions: to(25, 0), sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.22.0", test: "faults_of_engines_are_unsupported",
    }
    KeysPastTheLast {
        what: "a score of 0 is counted for keys past the last one in half a tile: dq is not-a-number for stats below −88.7 and seq_kv % 128 = 64",
        so: "keys past the last one are dropped by a select", versions: to(25, 99), sm: ANY, passes: Backward,
        source: "pytorch #196678; seen on an H200 under 9.19.0", test: "scores_of_minus_200_masked_64",
    }
    QueriesPastTheOnly {
        what: "one query: a score of 0 is counted for the rest of its tile, and dk and dv are not-a-number for stats below −88.7",
        so: "queries past the last one are dropped by a select", versions: EVERY, sm: ANY, passes: Backward,
        source: "cudnn-frontend #1072; seen on an H200 under 9.13.1 to 9.20.0", test: "one_query_scores_of_minus_200_128_keys",
    }
    LengthsPastTheExtent {
        what: "lengths above the extents have rows written past the end of `stats`; negative ones are not defined",
        so: "a kernel clamps them, unless the caller promises that they need it not", versions: EVERY, sm: ANY, passes: Both,
        source: "seen on an H200 under 9.19.0", test: "device lengths",
    }
    RowsUntold {
        what: "row maxima and sums of exponentials beside a softmax that is spelled in ops are not written",
        so: "unsupported", versions: to(20, 99), sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    SumsOfNoKeys {
        what: "rows past the lengths of their batch entries get −∞ for a sum of exponentials, as if it were stats",
        so: "a kernel makes 0 of it", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.27.0", test: "sums_of_nothing_are_nothing",
    }
    PaddingInTheUnifiedForm {
        what: "unified form: lengths beside a score_mod or a rule give wrong numbers for some of them",
        so: "refused; the composite form takes them", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.27.0", test: "faults_of_engines_are_unsupported",
    }
    VectorsOverTheBatch {
        what: "tensors over the batch, not over queries or keys, are read at the index of the head, whatever their type",
        so: "spread over queries", versions: EVERY, sm: ANY, passes: Both,
        source: "floats: seen on an H200 under 9.19.0 and 9.27.0; integers and booleans: on an H100 under 9.19.0", test: "no_op_reads_a_tensor_over_the_batch_alone",
    }
    LengthsOfOneSide {
        what: "lengths of queries alone or of keys alone are read at the index of the head",
        so: "a rule over a tensor that is spread; with a band about the ends of entries unsupported", versions: EVERY, sm: ANY, passes: Both,
        source: "seen on an H100 under 9.19.0", test: "no_op_reads_a_tensor_over_the_batch_alone",
    }
    VectorsOfMasksAndScoreMods {
        what: "dq, dk and dv are wrong with a score_mod where it or the mask reads a tensor over the batch that spans neither queries nor keys, and either reads a second one or a tensor over queries",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H100 under 9.19.0, beside softcap on an H200 under 9.19.0 and 9.27.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    BooleansReadTwice {
        what: "a boolean tensor along queries that two ops read: dq, dk and dv are wrong",
        so: "made whole numbers by one op", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H100 under 9.19.0", test: "booleans_are_read_once",
    }
    StatsOfPackedDecode {
        what: "packed queries of one token at most over pages: nothing writes the statistics",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H100 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    HeadsOfOnePairInPages {
        what: "one query and one key in pages: a tensor over heads and not over the batch is read at another head, and so is a function of the head index",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H100 under 9.19.0 and 9.27.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    ScoreModsOfPagedDecode {
        what: "unified form, one query over pages: score_mods see keys past the last one, tensors over the batch and the head are another head's",
        so: "refused; the composite form takes them", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H100 under 9.27.0", test: "score_mods_of_one_query_over_pages_are_composite",
    }
    VectorsOverTheKeys {
        what: "tensors over keys and not queries are read at the place of the query",
        so: "spread over queries", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "biask_arrayhqk",
    }
    DropoutOfOneQuery {
        what: "one query and more than 256 keys: dropout drops others than it says, or ends in an illegal memory access, by the engine that divides keys among blocks",
        so: "unsupported", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H100 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    IndicesOfOneQuery {
        what: "one query: the key index counts within the part of the keys that a block takes; bands and lengths are ignored beside rules",
        so: "a table of indices, masks as rules", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "bands_of_one_query_are_rules_beside_whatever_else_there_is",
    }
    TilesPastTheEnd {
        what: "tiles past the last query or key give score_mods −∞",
        so: "selects after stats and after the derivative; beside lengths, score_mods that make no number of it are refused",
        versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "faults_of_engines_are_unsupported",
    }
    LengthsAsRules {
        what: "lengths as rules beside score_mods are wrong, crash (9.19) or find no engine (9.27)",
        so: "lengths as operands of the products", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "biasbk_padding-arrayqk",
    }
    SumsOfGradients {
        what: "reductions of dS over queries or keys are wrong or rounded on the way",
        so: "written whole, summed by a graph of its own", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "the_gradient_of_a_bias_is_summed_after_the_attention",
    }
    NumbersOfTwoBytes {
        what: "a product of f32 whose result is one number of two bytes writes the four of an f32",
        so: "sums of gradients are f32 in the workspace, and rounded by a graph of their own", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0, memcheck", test: "the_gradient_of_a_bias_is_summed_after_the_attention",
    }
    ScoresReadAgain {
        what: "unified form: the score as another operand than the first of an op of the inner graph (`score + score * score`) is read from an address outside the kernel's memory",
        so: "a copy of it, by `identity`, there", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.27.0, memcheck", test: "graphs_of_expressions_mean_the_expressions",
    }
    ChoicesOfOneElement {
        what: "a select whose other value is a one-element device tensor crashes 9.27 and fails on 9.19",
        so: "lifted out of the select", versions: EVERY, sm: ANY, passes: Both,
        source: "asked of 9.19.0 and 9.27.0", test: "what_is_taken_compiles_and_is_what_was_sent",
    }
    ComparisonsOfOneElement {
        what: "the planner crashes where a one-element device tensor of f32 is compared, beside a score_mod such as a softcap or ALiBi",
        so: "spread over queries", versions: (v(27, 0), v(27, 0)), sm: ANY, passes: Backward,
        source: "asked of 9.27.0, not of 9.19.0", test: "tensors_of_one_element_are_spread_where_they_are_compared",
    }
    VectorsOverTheQueries {
        what: "more than 2 (engines for 8.0) or 4 (for 9.0) vectors along queries are refused",
        so: "spread over keys, as a second spelling", versions: EVERY, sm: ANY, passes: Backward,
        source: "asked of 9.19.0 and 9.27.0", test: "what_is_taken_compiles_and_is_what_was_sent",
    }
}

impl Quirk {
    /// Returns whether a version of cuDNN has the quirk.
    pub fn holds(self, runtime: Version) -> bool {
        let (first, last) = self.row().versions;
        (first..=last).contains(&runtime)
    }

    /// Returns whether a runtime and an architecture have it: compute capability 9.0 is 90.
    pub fn holds_on(self, runtime: Version, sm: u32) -> bool {
        self.holds(runtime) && self.row().sm.contains(&sm)
    }

    /// Returns the affected versions as text.
    pub fn versions(self) -> String {
        let (first, last) = self.row().versions;
        match (first == EVERY.0, last == EVERY.1) {
            (true, true) => "every".to_owned(),
            (true, false) => format!("up to {last}"),
            (false, true) => format!("from {first} on"),
            (false, false) if first == last => first.to_string(),
            (false, false) => format!("{first} to {last}"),
        }
    }

    /// Returns all rows as a table in Markdown.
    pub fn table() -> String {
        let mut text = "| quirk | cuDNN | compute capability | passes | engines do this without a word | so | source | test |\n|---|---|---|---|---|---|---|---|\n".to_owned();
        for quirk in Quirk::ALL {
            let Row { versions: _, sm, passes, what, so, source, test } = quirk.row();
            let sm = if sm == ANY {
                "every".to_owned()
            } else {
                format!("{}.{} to {}.{}", sm.start() / 10, sm.start() % 10, sm.end() / 10, sm.end() % 10)
            };
            let passes = match passes {
                Passes::Forward => "forward",
                Passes::Backward => "backward",
                Passes::Both => "both",
            };
            text.push_str(&format!("| `{quirk:?}` | {} | {sm} | {passes} | {what} | {so} | {source} | `{test}` |\n", quirk.versions()));
        }
        text
    }
}
