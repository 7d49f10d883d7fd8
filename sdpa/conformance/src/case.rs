//! Test cases, as written in `cases/*.toml`.

mod backward;
mod sweep;

use crate::library::{Library, own};
use crate::packing::Packing;
use crate::paging::Paging;
use crate::random::Random;
pub use backward::{Backward, Place};
use sdpa::library::{MASKS, SCORE_MODS};
use sdpa::{AttentionSpec, DType, Dropout, ExecutorName, Layout, Mask, ScoreMod, Shape, Side, StatsBase};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The reason why a case does not run on an executor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip(pub String);

/// A test case: one problem. The seed of its random inputs is derived from its name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The unique name of the case, which says what the case tests.
    pub name: String,
    /// The extents of the problem.
    pub shape: Shape,
    /// Element type of the operands.
    pub dtype: DType,
    /// Element type of the output; by default that of the operands.
    #[serde(default)]
    pub o_dtype: Option<DType>,
    /// Whether each block of 32 elements has a scale (MXFP8), instead of each tensor.
    #[serde(default)]
    pub block_scaled: bool,
    /// Memory order of the axes.
    #[serde(default = "bhsd")]
    pub layout: Layout,
    /// The masks, in the syntax of the command line. If the case has score_mods, these are names of predefined masks (the library).
    #[serde(default)]
    pub mask: Vec<String>,
    /// Names of predefined score_mods (the library).
    #[serde(default)]
    pub score_mod: Vec<String>,
    /// Whether each query head has an attention sink.
    #[serde(default)]
    pub sink: bool,
    /// Dropout probability of P.
    #[serde(default)]
    pub dropout: Option<f32>,
    /// Whether the forward pass returns stats.
    #[serde(default)]
    pub stats: bool,
    /// The base of the logarithm in stats.
    #[serde(default)]
    pub stats_base: StatsBase,
    /// Whether the forward pass returns the largest score of each row.
    #[serde(default)]
    pub row_max: bool,
    /// Whether the forward pass returns the sum of exponentials of each row.
    #[serde(default)]
    pub sum_exp: bool,
    /// Whether the bits of a sequence's results must depend on this sequence alone.
    #[serde(default)]
    pub batch_invariant: bool,
    /// The attention scale; by default `1 / √dim_qk`.
    #[serde(default)]
    pub attn_scale: Option<f32>,
    /// Gap in elements between rows of `q`.
    #[serde(default)]
    pub q_gap: i64,
    /// Gap in elements between rows of `k` and of `v`.
    #[serde(default)]
    pub kv_gap: i64,
    /// Gap in elements between rows of `o`.
    #[serde(default)]
    pub o_gap: i64,
    /// Whether `q`, `k` and `v` are views of one (batch, seq, 3, head, dim) tensor.
    #[serde(default)]
    pub packed_qkv: bool,
    /// The packed sequences (varlen), if batch entries are packed. `layout` is then the layout of `(total, heads, dim)`; `bhsd` means
    /// head-major.
    #[serde(default)]
    pub packed: Option<Packing>,
    /// The paging of keys and values, if they are in a paged KV cache. `layout` is then the layout of `q` and `o`.
    #[serde(default)]
    pub paged: Option<Paging>,
    /// Standard deviation of the random inputs.
    #[serde(default = "one")]
    pub spread: f64,
    /// Reasons why the case does not run on an executor, by the executor's name.
    #[serde(default)]
    pub skip: BTreeMap<String, String>,
    /// Options of the backward pass, if the case tests one.
    #[serde(default)]
    pub backward: Option<Backward>,
}

fn bhsd() -> Layout {
    Layout::Bhsd
}

fn one() -> f64 {
    1.0
}

fn listed(numbers: &[f64]) -> String {
    numbers.iter().map(f64::to_string).collect::<Vec<_>>().join(",")
}

/// Returns a name of the library as it is, and the quoted text of a score_mod that only the harness has.
fn quoted(name: &str) -> String {
    let text = own(name);
    if text == name { name.to_owned() } else { format!("'{text}'") }
}

const COMBINED: &str = include_str!("../cases/score_mod.toml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    case: Vec<Case>,
}

impl Case {
    /// Parses the cases of one file.
    ///
    /// # Errors
    /// Fails if the file does not parse, if a skip has no reason, or if a name is used twice.
    pub fn parse(text: &str) -> Result<Vec<Case>, String> {
        let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
        for (n, case) in file.case.iter().enumerate() {
            if case.skip.values().any(|reason| reason.trim().is_empty()) {
                return Err(format!("{}: a skip needs a reason", case.name));
            }
            if file.case[..n].iter().any(|c| c.name == case.name) {
                return Err(format!("{}: there are two of them", case.name));
            }
        }
        Ok(file.case)
    }

    /// Returns every forward case of the project.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does, and if a case has options of the backward pass.
    pub fn all() -> Result<Vec<Case>, String> {
        let cases = Case::parse(include_str!("../cases/forward.toml"))?;
        match cases.iter().find(|case| case.backward.is_some()) {
            Some(case) => Err(format!("{}: a forward case has nothing to say of a backward pass", case.name)),
            None => Ok(cases),
        }
    }

    /// Returns every backward case of the project.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_backward() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/backward.toml"))
    }

    /// Returns every case with sinks. Each runs as a forward and as a backward pass.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_sinks() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/sink.toml"))
    }

    /// Returns every case with dropout. Each runs as a forward and as a backward pass.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_dropout() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/dropout.toml"))
    }

    /// Returns every case with 8-bit floats. Each runs as a forward and as a backward pass.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_fp8() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/fp8.toml"))
    }

    /// Returns every case with block-scaled 8-bit floats. Each runs as a forward pass only.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_block_scaled() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/block_scale.toml"))
    }

    /// Returns every case with row statistics other than `stats`. Each runs as a forward pass only.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_statistics() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/statistics.toml"))
    }

    /// Returns every case with packed sequences. Each runs as a forward and as a backward pass.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_packed() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/packed.toml"))
    }

    /// Returns every case with windows that are bottom-right aligned per sequence. Each runs as a forward and as a backward pass.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_ends() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/ends.toml"))
    }

    /// Returns every case with a paged KV cache. Each runs as a forward pass only.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_paged() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/paged.toml"))
    }

    /// Returns every case with tables that are read at computed indices. Each runs as a forward and as a backward pass.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_tables() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/table.toml"))
    }

    /// Returns every case of `few.toml`: few queries or few tiles with many keys.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_few() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/few.toml"))
    }

    /// Returns every case of `invariant.toml`: problems that ask for `batch_invariant`. Each runs as a forward and as a backward pass, those without
    /// a page table.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_invariant() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/invariant.toml"))
    }

    /// Returns every case of `functions.toml`: functions of the expression language over their complete domains.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_functions() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/functions.toml"))
    }

    /// Returns the cases of `score_mod.toml`, which combine predefined score_mods and masks (the library).
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn combined() -> Result<Vec<Case>, String> {
        Case::parse(COMBINED)
    }

    /// Returns every case with predefined score_mods and masks (the library): those of `score_mod.toml`, and one for each predefined
    /// name. Each runs as a forward and as a backward pass.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn all_library() -> Result<Vec<Case>, String> {
        let mut text = COMBINED.to_owned();
        let score_mods = SCORE_MODS.iter().map(|named| ("score_mod", named.cases));
        for (n, (field, cases)) in score_mods.chain(MASKS.iter().map(|named| ("mask", named.cases))).enumerate() {
            let (of, dtype) = (cases.first().ok_or("a name of the library without a case")?, ["bf16", "f16", "f32"][n % 3]);
            let shape = "{ batch = 2, heads_q = 4, heads_kv = 2, seq_q = 65, seq_kv = 67, dim_qk = 40, dim_v = 24 }";
            text.push_str(&format!(
                "\n[[case]]\nname = \"library {of}\"\nshape = {shape}\ndtype = \"{dtype}\"\n{field} = [\"{of}\"]\nstats = true\n"
            ));
        }
        Case::parse(&text)
    }

    /// Returns closures and parameter values for the case's score_mods and masks. Returns `None` if there are no score_mods and the
    /// oracle evaluates all masks itself.
    ///
    /// # Errors
    /// Fails if the library does not have one of the names.
    pub fn library(&self) -> Result<Option<Library>, String> {
        let Shape { batch, heads_q, seq_q, seq_kv, .. } = self.shape;
        if let (Some(packing), None) = (&self.packed, &self.paged) {
            let mut random = Random::new(self.seed() ^ 0x5eed);
            return Library::draw_packed(&self.score_mod, &self.mask, [batch, heads_q, seq_q, seq_kv], Some(packing), &mut random)
                .map(Some);
        }
        if let Some(paging) = &self.paged {
            let mut random = Random::new(self.seed() ^ 0x5eed);
            let (extents, packing) = ([batch, heads_q, seq_q, seq_kv], self.packed.as_ref());
            return Library::draw_paged(&self.score_mod, &self.mask, extents, paging, packing, &mut random).map(Some);
        }
        let plain = |name: &String| ["causal", "window", "prefix-lm"].iter().any(|known| name.starts_with(known));
        if self.score_mod.is_empty() && self.mask.iter().all(plain) {
            return Ok(None);
        }
        let mut random = Random::new(self.seed() ^ 0x5eed);
        Library::draw(&self.score_mod, &self.mask, [batch, heads_q, seq_q, seq_kv], &mut random).map(Some)
    }

    /// Returns the seed of the case's random inputs.
    pub fn seed(&self) -> u64 {
        self.name.bytes().fold(7u64, |n, b| n.wrapping_mul(31).wrapping_add(u64::from(b)))
    }

    /// Returns the specification of the forward pass.
    ///
    /// # Errors
    /// Fails if a mask or score_mod does not parse.
    pub fn spec(&self) -> Result<AttentionSpec, String> {
        let mut spec = AttentionSpec::dense(self.dtype, self.shape, self.layout);
        (spec.o_dtype, spec.block_scaled) = (self.o_dtype, self.block_scaled);
        for mask in &self.mask {
            spec.masks.push(own(mask).parse::<Mask>().map_err(|e| e.to_string())?);
        }
        for score_mod in &self.score_mod {
            spec.score_mods.push(own(score_mod).parse::<ScoreMod>().map_err(|e| e.to_string())?);
        }
        (spec.stats, spec.sink, spec.dropout) = (self.stats, self.sink, self.dropout.map(Dropout::new));
        (spec.row_max, spec.sum_exp, spec.stats_base) = (self.row_max, self.sum_exp, self.stats_base);
        spec.batch_invariant = self.batch_invariant;
        for (tensor, gap) in [(&mut spec.q, self.q_gap), (&mut spec.k, self.kv_gap), (&mut spec.v, self.kv_gap), (&mut spec.o, self.o_gap)]
        {
            if gap > 0 {
                // Make each row longer by the gap, and derive the strides from that.
                let [b, h, s, d] = tensor.dims;
                tensor.strides = self.layout.strides([b, h, s, d + gap]);
            }
        }
        if let Some(packing) = &self.packed {
            spec.packed = Some(packing.packed());
            let sides = [(&mut spec.q, Side::Queries, self.q_gap), (&mut spec.o, Side::Queries, self.o_gap)];
            let keys = [(&mut spec.k, Side::Keys, self.kv_gap), (&mut spec.v, Side::Keys, self.kv_gap)];
            for (tensor, side, gap) in sides.into_iter().chain(keys) {
                let [_, h, _, d] = tensor.dims;
                tensor.strides = self.layout.strides([1, h, packing.tokens(side), d + gap]);
            }
        }
        if let Some(paging) = &self.paged {
            spec.paged = Some(paging.paged(self.shape.batch, self.shape.seq_kv));
            for tensor in [&mut spec.k, &mut spec.v] {
                tensor.strides = paging.strides(tensor.dims, self.kv_gap);
            }
            spec.packed = spec.packed.map(|packed| packed.with_totals(packed.total_q, None));
        }
        if self.packed_qkv {
            for tensor in [&mut spec.q, &mut spec.k, &mut spec.v] {
                let [_, h, s, d] = tensor.dims;
                tensor.strides = [s * 3 * h * d, d, 3 * h * d, 1];
            }
        }
        Ok(spec)
    }

    /// Returns a command line that runs this case on an executor.
    pub fn repro(&self, executor: ExecutorName) -> String {
        let Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = self.shape;
        let mods: String = self.score_mod.iter().map(|m| format!(" --score-mod {}", quoted(m))).collect();
        let masks: String = self.mask.iter().map(|m| format!(" --mask {}", quoted(m))).collect();
        let scale = self.attn_scale.map_or_else(String::new, |s| format!(" --scale {s}"));
        let sides = if self.paged.is_some() { &Side::ALL[..1] } else { &Side::ALL[..] };
        let bound = self.packed.as_ref().map_or_else(Vec::new, |packing| packing.bound(sides));
        let packed: String = bound.iter().map(|b| format!(" --{} {}", b.name.replace('_', "-"), listed(&b.widened))).collect();
        let paged = self.paged.as_ref().map(|paging| paging.paged(batch, seq_kv));
        let paged = paged.map_or_else(String::new, |paged| format!(" --paged {} --pages {}", paged.page_size, paged.pages));
        let flags = [
            (self.block_scaled, " --block-scaled"),
            (self.sink, " --sink"),
            (self.row_max, " --row-max"),
            (self.sum_exp, " --sum-exp"),
            (self.batch_invariant, " --batch-invariant"),
            (self.stats_base == StatsBase::Two, " --stats-base-2"),
        ];
        let flags: String = flags.into_iter().filter(|(there, _)| *there).map(|(_, flag)| flag).collect();
        let dropout = self.dropout.map_or_else(String::new, |p| format!(" --dropout {p}"));
        let o_dtype = self.o_dtype.map_or_else(String::new, |dtype| format!(" --o-dtype {dtype}"));
        format!(
            "cargo sdpa run --shape {batch},{heads_q},{heads_kv},{seq_q},{seq_kv},{dim_qk},{dim_v} --dtype {}{o_dtype} --layout {}{packed}{paged}{mods}{masks}{flags}{dropout}{scale} --executor {executor} --check",
            self.dtype,
            self.layout.name()
        )
    }
}
