//! Quirks: known wrong results of cuDNN's engines, and the workaround for each. Each has a row in the table and a name.
//!
//! NVIDIA's frontend refuses some of the same cases: its refusals mark wrong answers, not only missing kernels. A row is added once a source or a
//! test shows the error, and names both. `docs/lowering.md` has the generated table.

use cudnn_graph::Version;
use std::ops::RangeInclusive;

/// The directions, forward or backward, of the passes that a quirk affects. A quirk is a known error of some cuDNN versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// Forward passes only.
    Forward,
    /// Backward passes only.
    Backward,
    /// Forward and backward passes.
    Both,
}

/// One row of the table of quirks: a known error of some cuDNN versions.
#[derive(Clone, Debug)]
pub struct Row {
    /// The first and the last affected version of cuDNN.
    pub versions: (Version, Version),
    /// The affected compute capabilities, times ten: 90 is 9.0.
    pub sm: RangeInclusive<u32>,
    /// The affected passes, forward or backward.
    pub passes: Passes,
    /// The error, in a phrase.
    pub what: &'static str,
    /// The workaround for the error, in a phrase.
    pub handling: &'static str,
    /// The source that describes the error, or the run that showed it.
    pub source: &'static str,
    /// The test that detects the error: a test function, a case of `sdpa/conformance/cases`, or a part of the benchmark `device`.
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
    ($($name:ident { what: $what:literal, handling: $handling:literal, versions: $versions:expr, sm: $sm:expr, passes: $passes:ident, source: $source:literal, test: $test:literal, })*) => {
        /// Known wrong results of cuDNN's engines.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Quirk { $(#[doc = $what] $name,)* }

        impl Quirk {
            /// Every known wrong result of cuDNN's engines, in the order of the table.
            pub const ALL: &'static [Quirk] = &[$(Quirk::$name),*];

            /// Returns the row that describes this error of cuDNN: affected versions, devices and passes, and the workaround.
            pub const fn row(self) -> Row {
                match self {
                    $(Quirk::$name => Row {
                        versions: $versions, sm: $sm, passes: Passes::$passes, what: $what, handling: $handling, source: $source, test: $test,
                    },)*
                }
            }
        }
    };
}

quirks! {
    RowSumOffsets {
        what: "the row sums of o · d_o use 32-bit offsets: dq and dk are wrong if o or d_o spans more than 2³¹ elements",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.28.0", test: "device limits",
    }
    QueryGradientOffsets {
        what: "dq is written at 32-bit offsets: it is wrong if it spans more than 2³² elements",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.28.0", test: "device limits",
    }
    BackwardGrid {
        what: "more than 65,535 batch entries or query heads exceed a grid dimension: the launch fails (`EXECUTION_FAILED_CUDA_DRIVER`)",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H100 under 9.19.0 with 70,000 batch entries", test: "a_backward_pass_over_more_batch_entries_than_a_grid_has_is_refused",
    }
    PaddingWithoutNumbers {
        what: "batch entries without queries or keys get NaN before 9.19, even if their lengths are guarded",
        handling: "unsupported", versions: to(18, 99), sm: ANY, passes: Both,
        source: "seen on an H200 under 9.13.1 and 9.16.0; cudnn-frontend #943", test: "each_row_refuses_its_versions_and_no_others",
    }
    AttentionDisabled {
        what: "NVIDIA's frontend disables attention on these releases",
        handling: "unsupported", versions: (v(10, 0), v(10, 1)), sm: ANY, passes: Both,
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention", test: "each_row_refuses_its_versions_and_no_others",
    }
    OpenWindowLong {
        what: "a window that is not causal returns wrong results for more than 1,024 keys; fixed in 9.14.1",
        handling: "unsupported", versions: (v(14, 0), v(14, 0)), sm: ANY, passes: Both,
        source: "cudnn-frontend 1.32; TransformerEngine #2344", test: "each_row_refuses_its_versions_and_no_others",
    }
    OpenWindow {
        what: "before 9.10.2, NVIDIA's frontend accepts only causal windows",
        handling: "unsupported", versions: to(10, 1), sm: ANY, passes: Both,
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention", test: "each_row_refuses_its_versions_and_no_others",
    }
    DecodeOnBlackwell {
        what: "decode with few KV heads returns wrong results on Blackwell; fixed in 9.25.1",
        handling: "unsupported", versions: (v(19, 0), v(25, 0)), sm: 100..=129, passes: Forward,
        source: "pytorch #193893, #194927", test: "each_row_refuses_its_versions_and_no_others",
    }
    MasksOffTheDiagonal {
        what: "before 9.6, masks off the main diagonal need seq_q and seq_kv in multiples of 64",
        handling: "unsupported", versions: to(5, 99), sm: ANY, passes: Both,
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention", test: "each_row_refuses_its_versions_and_no_others",
    }
    AccumulatorOfQueryGradient {
        what: "before 9.6, cuDNN does not zero the dq accumulator",
        handling: "unsupported", versions: to(5, 99), sm: ANY, passes: Backward,
        source: "cudnn-frontend 1.32, backward node", test: "each_row_refuses_its_versions_and_no_others",
    }
    PastTheKeys {
        what: "the backward pass reads past the end of the keys if seq_kv is no multiple of 128; fixed after 9.15.0",
        handling: "unsupported", versions: to(15, 0), sm: ANY, passes: Backward,
        source: "cudnn-frontend 1.16 release notes", test: "each_row_refuses_its_versions_and_no_others",
    }
    PlannerOfOnePair {
        what: "the planner crashes if batch, heads, seq_q and seq_kv are all 1",
        handling: "unsupported", versions: (v(26, 0), v(26, 0)), sm: ANY, passes: Backward,
        source: "cudnn-frontend #1071", test: "each_row_refuses_its_versions_and_no_others",
    }
    SharedKeysIn8Bits {
        what: "FP8 gradients are inaccurate with GQA",
        handling: "unsupported", versions: EVERY, sm: 90..=99, passes: Backward,
        source: "cudnn-frontend's own tests skip 14 such configurations on compute capability 9", test: "each_row_refuses_its_versions_and_no_others",
    }
    ScoreModsOf8Bits {
        what: "with FP8, a score_mod receives scores before they are descaled: o and stats are wrong (softcap, ALiBi)",
        handling: "unsupported", versions: EVERY, sm: 90..=99, passes: Forward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    DropoutOf8Bits {
        what: "dropout with FP8 ends in an illegal memory access",
        handling: "unsupported", versions: EVERY, sm: 90..=99, passes: Both,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    RowMaximaOf8Bits {
        what: "with FP8, row_max is the maximum of the scores before they are descaled",
        handling: "unsupported", versions: EVERY, sm: 90..=99, passes: Forward,
        source: "seen on an H200 under 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    LengthsOf8Bits {
        what: "lengths with FP8: rows past the query length, and rows of a batch entry without keys, are not 0 (7 of 120 random problems)",
        handling: "unsupported", versions: EVERY, sm: 90..=99, passes: Both,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    RowsWithoutKeysOf8Bits {
        what: "FP8 with a traced mask that may leave a row without keys: o, stats and amax_o are NaN there",
        handling: "unsupported", versions: EVERY, sm: 90..=99, passes: Forward,
        source: "seen on an H100 under 9.19.0 and 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    SmallGradientsOf8Bits {
        what: "FP8 gradients: dq loses small entries of dS; its error is up to 1.64 times that of rounding dS to nearest",
        handling: "unsupported", versions: to(26, 99), sm: 90..=99, passes: Backward,
        source: "seen on an H200 under 9.19.0, not under 9.27.0", test: "what_is_composed_with_8_bit_floats",
    }
    PackedWideKeys {
        what: "packed sequences with dim_qk above 192 and dim_v of at most 128: dq and dk are wrong (seen with head dims 216 and 112, three heads, and sequences without tokens)",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    OffsetsOfQueryGradient {
        what: "packed sequences: dq is wrong if the heads of a token are contiguous in dq, dim_qk is a multiple of 16, and dq's strides differ from q's (q inside a tensor of q, k and v)",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H100 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    OrderOfWideKeys {
        what: "deterministic: dq has different bits on every run for 128 < dim_qk ≤ 192 and 64 < dim_v ≤ 128, except dim_qk 192 with dim_v 128",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    BandsOfTwoCorners {
        what: "a band aligned to the sequence ends together with one aligned to the start: the engine aligns both to the same corner",
        handling: "the band aligned to the ends stays a band; the other becomes a traced mask", versions: EVERY, sm: ANY, passes: Both,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "a_band_about_the_ends_is_the_only_band",
    }
    OrderOfEnds {
        what: "a left bound aligned to the sequence ends, written as k + len_q − len_kv: the engine aligns it to the start",
        handling: "written in the order of NVIDIA's frontend", versions: to(20, 99), sm: ANY, passes: Both,
        source: "seen on an H200 under 9.19.0", test: "bounds_about_the_ends_are_moved_as_the_frontend_moves_them",
    }
    HeadsOverPages {
        what: "one query over a paged KV cache with GQA: tensors over heads are read at another head",
        handling: "expanded over keys", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "paged_decode_score_mod",
    }
    EntriesWithoutKeys {
        what: "for batch entries without keys (`seq_len_kv` 0), the forward pass writes NaN and the backward pass writes nothing; in 9.25.1 dk and dv are still NaN",
        handling: "a kernel that runs before the attention sets their lengths to one key and no query; lengths in the unified form are unsupported",
        versions: to(25, 99), sm: ANY, passes: Both,
        source: "cudnn-frontend #943; seen on an H200 under 9.19.0 and 9.25.1",
        test: "engines_are_told_of_lengths_within_extents_and_of_pages_that_are_there",
    }
    HeadsOfOneQuery {
        what: "unified form, one query, 8 query heads per KV head: tensors over heads are read at another head",
        handling: "unsupported before 9.25.1; 9.25.1 is correct", versions: to(25, 0), sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.22.0", test: "faults_of_engines_are_unsupported",
    }
    KeysPastTheLast {
        what: "if seq_kv % 128 = 64, the 64 missing keys of the last tile count with score 0: dq is NaN for stats below −88.7",
        handling: "a select masks keys past the last one", versions: to(25, 99), sm: ANY, passes: Backward,
        source: "pytorch #196678; seen on an H200 under 9.19.0", test: "scores_of_minus_200_masked_64",
    }
    QueriesPastTheOnly {
        what: "one query: the other rows of its tile count as queries with score 0, so dk and dv are NaN for stats below −88.7",
        handling: "a select masks queries past the last one", versions: EVERY, sm: ANY, passes: Backward,
        source: "cudnn-frontend #1072; seen on an H200 under 9.13.1 to 9.20.0", test: "one_query_scores_of_minus_200_128_keys",
    }
    LengthsPastTheExtent {
        what: "with lengths above seq_q or seq_kv, rows are written past the end of `stats`; negative lengths are undefined",
        handling: "a kernel clamps them, unless the caller promises valid lengths", versions: EVERY, sm: ANY, passes: Both,
        source: "seen on an H200 under 9.19.0", test: "device lengths",
    }
    RowsUntold {
        what: "row_max and sum_exp are not written if the softmax is lowered to primitive ops",
        handling: "unsupported", versions: to(20, 99), sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    SumsOfNoKeys {
        what: "in rows past the query length of their batch entry, cuDNN writes −∞ to sum_exp, as it does to stats, instead of 0",
        handling: "a kernel replaces −∞ by 0", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.27.0", test: "sums_of_nothing_are_nothing",
    }
    PaddingInTheUnifiedForm {
        what: "unified form: lengths together with some score_mods and traced masks return wrong results",
        handling: "unsupported; the composite form supports them", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.27.0", test: "faults_of_engines_are_unsupported",
    }
    VectorsOverTheBatch {
        what: "tensors over the batch, but not over queries or keys, are read at the head index, whatever their type",
        handling: "expanded over queries", versions: EVERY, sm: ANY, passes: Both,
        source: "floats: seen on an H200 under 9.19.0 and 9.27.0; integers and booleans: on an H100 under 9.19.0", test: "no_op_reads_a_tensor_over_the_batch_alone",
    }
    LengthsOfOneSide {
        what: "lengths of queries alone or of keys alone are read at the head index",
        handling: "a traced mask over an expanded tensor; unsupported with a band aligned to the sequence ends", versions: EVERY, sm: ANY, passes: Both,
        source: "seen on an H100 under 9.19.0", test: "no_op_reads_a_tensor_over_the_batch_alone",
    }
    VectorsOfMasksAndScoreMods {
        what: "dq, dk and dv are wrong if a score_mod or the mask reads a tensor over the batch but not over queries or keys, and either of them also reads a second such tensor or a tensor over queries",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H100 under 9.19.0; with a softcap on an H200 under 9.19.0 and 9.27.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    BooleansReadTwice {
        what: "a boolean tensor over queries that two ops read: dq, dk and dv are wrong",
        handling: "one op converts it to integers", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H100 under 9.19.0", test: "booleans_are_read_once",
    }
    StatsOfPackedDecode {
        what: "packed queries of at most one token over a paged KV cache: nothing writes the statistics",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H100 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    HeadsOfOnePairInPages {
        what: "one query and one key in a paged KV cache: a tensor over heads but not over the batch is read at another head, and so is a function of the head index",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H100 under 9.19.0 and 9.27.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    ScoreModsOfPagedDecode {
        what: "unified form, one query over a paged KV cache: score_mods see keys past the last one, and tensors over the batch and the head are read at another head",
        handling: "unsupported; the composite form supports them", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H100 under 9.27.0", test: "score_mods_of_one_query_over_pages_are_composite",
    }
    VectorsOverTheKeys {
        what: "tensors over keys but not over queries are read at the query index",
        handling: "expanded over queries", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "biask_arrayhqk",
    }
    DropoutOfOneQuery {
        what: "one query and more than 256 keys: in the split-KV engine, dropout drops entries that do not match its random numbers, or ends in an illegal memory access",
        handling: "unsupported", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H100 under 9.19.0", test: "each_row_refuses_its_versions_and_no_others",
    }
    IndicesOfOneQuery {
        what: "one query: the key index counts from the start of a thread block's split of the keys; bands and lengths are ignored with traced masks",
        handling: "key indices from a table, masks as traced masks", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "bands_of_one_query_are_rules_beside_whatever_else_there_is",
    }
    TilesPastTheEnd {
        what: "score_mods receive −∞ at positions of a tile that are past the last query or key",
        handling: "selects after stats and after the derivative; with lengths, score_mods that are NaN at −∞ are unsupported",
        versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "faults_of_engines_are_unsupported",
    }
    LengthsAsRules {
        what: "lengths as traced masks, together with score_mods, return wrong results, crash (9.19) or have no engine (9.27)",
        handling: "lengths as operands of the matmuls", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "biasbk_padding-arrayqk",
    }
    SumsOfGradients {
        what: "reductions of dS over queries or keys are wrong, or round partial sums",
        handling: "dS is written to memory, and a separate graph sums it", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0 and 9.27.0", test: "the_gradient_of_a_bias_is_summed_after_the_attention",
    }
    NumbersOfTwoBytes {
        what: "an f32 matmul whose result is one 16-bit element writes the four bytes of an f32",
        handling: "sums of gradients are f32 in the workspace; a separate graph rounds them", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen on an H200 under 9.19.0, memcheck", test: "the_gradient_of_a_bias_is_summed_after_the_attention",
    }
    ScoresReadAgain {
        what: "unified form: if the score is not the first operand of an op of the inner graph (`score + score * score`), it is read from an invalid address",
        handling: "an `identity` op copies the score for that operand", versions: EVERY, sm: ANY, passes: Forward,
        source: "seen on an H200 under 9.27.0, memcheck", test: "graphs_of_expressions_mean_the_expressions",
    }
    ChoicesOfOneElement {
        what: "a select between a value and a one-element device tensor crashes 9.27 and fails on 9.19",
        handling: "moved out of the select", versions: EVERY, sm: ANY, passes: Both,
        source: "seen when plans are made with 9.19.0 and 9.27.0", test: "what_is_taken_compiles_and_is_what_was_sent",
    }
    ComparisonsOfOneElement {
        what: "the planner crashes if an f32 device tensor of one element is compared, together with a score_mod such as a softcap or ALiBi",
        handling: "expanded over queries", versions: (v(27, 0), v(27, 0)), sm: ANY, passes: Backward,
        source: "seen when plans are made with 9.27.0, not with 9.19.0", test: "tensors_of_one_element_are_spread_where_they_are_compared",
    }
    VectorsOverTheQueries {
        what: "engines for compute capability 8.0 support at most 2 tensors over queries alone, those for 9.0 at most 4",
        handling: "a second graph expands them over keys", versions: EVERY, sm: ANY, passes: Backward,
        source: "seen when plans are made with 9.19.0 and 9.27.0", test: "what_is_taken_compiles_and_is_what_was_sent",
    }
}

impl Quirk {
    /// Returns whether a version of cuDNN has this error on some device.
    pub fn holds(self, runtime: Version) -> bool {
        let (first, last) = self.row().versions;
        (first..=last).contains(&runtime)
    }

    /// Returns whether a version of cuDNN has this error on a compute capability (`sm` 90 is 9.0).
    pub fn holds_on(self, runtime: Version, sm: u32) -> bool {
        self.holds(runtime) && self.row().sm.contains(&sm)
    }

    /// Returns the versions of cuDNN that have this error, as text.
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

    /// Returns the table of all known errors of cuDNN's engines, in Markdown.
    pub fn table() -> String {
        let mut text = "| quirk | cuDNN | compute capability | passes | error, reported as success | handling | source | test |\n|---|---|---|---|---|---|---|---|\n".to_owned();
        for quirk in Quirk::ALL {
            let Row { versions: _, sm, passes, what, handling, source, test } = quirk.row();
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
            text.push_str(&format!(
                "| `{quirk:?}` | {} | {sm} | {passes} | {what} | {handling} | {source} | `{test}` |\n",
                quirk.versions()
            ));
        }
        text
    }
}
