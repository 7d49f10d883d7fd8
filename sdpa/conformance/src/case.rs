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

/// One problem, from whose name the seed of its inputs is derived.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// A unique name that says what the case tests.
    pub name: String,
    /// Extents.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
    /// Element type of the output; absent: that of the operands.
    #[serde(default)]
    pub o_dtype: Option<DType>,
    /// Whether blocks of 32 elements have scales (MXFP8) in place of tensors.
    #[serde(default)]
    pub block_scaled: bool,
    /// Memory order of the axes.
    #[serde(default = "bhsd")]
    pub layout: Layout,
    /// Masks, in the syntax of the command line. Together with score_mods: by their names in the library.
    #[serde(default)]
    pub mask: Vec<String>,
    /// Score_mods, by their names in the library.
    #[serde(default)]
    pub score_mod: Vec<String>,
    /// Whether query heads have attention sinks.
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
    /// The attention scale; absent: the default.
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
    /// `q`, `k` and `v` are views of one (batch, seq, 3, head, dim) tensor.
    #[serde(default)]
    pub packed_qkv: bool,
    /// Packed sequences (varlen) as batch entries. `layout` is that of `(total, heads, dim)`; `bhsd` means head-major.
    #[serde(default)]
    pub packed: Option<Packing>,
    /// Paged keys and values; `layout` is that of `q` and `o`.
    #[serde(default)]
    pub paged: Option<Paging>,
    /// Standard deviation of the inputs.
    #[serde(default = "one")]
    pub spread: f64,
    /// Executors on which the case does not run, each with the reason.
    #[serde(default)]
    pub skip: BTreeMap<String, String>,
    /// Options of the backward pass.
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
    /// The file does not parse, a skip has no reason, or a name is used twice.
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
    /// See [`Case::parse`]; also a case with options of the backward pass.
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
    /// See [`Case::parse`].
    pub fn all_backward() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/backward.toml"))
    }

    /// Returns every case with sinks; each is for both passes.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_sinks() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/sink.toml"))
    }

    /// Returns every case with dropout; each is for both passes.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_dropout() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/dropout.toml"))
    }

    /// Returns every case with 8-bit floats; each is for both passes.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_fp8() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/fp8.toml"))
    }

    /// Returns every case with block-scaled 8-bit floats; each is for the forward pass only.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_block_scaled() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/block_scale.toml"))
    }

    /// Returns every case with row statistics other than stats; each is for the forward pass only.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_statistics() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/statistics.toml"))
    }

    /// Returns every case with packed sequences; each is for both passes.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_packed() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/packed.toml"))
    }

    /// Returns every case with windows that are bottom-right aligned per sequence; each is for both passes.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_ends() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/ends.toml"))
    }

    /// Returns every case with a paged KV cache; each is for the forward pass only.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_paged() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/paged.toml"))
    }

    /// Returns every case with tables that are read at computed indices; each is for both passes.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_tables() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/table.toml"))
    }

    /// Returns every case of `few.toml`: few queries or few tiles with many keys.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_few() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/few.toml"))
    }

    /// Returns every case of `functions.toml`: functions of the expression language over their complete domains.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn all_functions() -> Result<Vec<Case>, String> {
        Case::parse(include_str!("../cases/functions.toml"))
    }

    /// Returns the cases of `score_mod.toml`: score_mods and masks of the library.
    ///
    /// # Errors
    /// See [`Case::parse`].
    pub fn combined() -> Result<Vec<Case>, String> {
        Case::parse(COMBINED)
    }

    /// Returns every case with score_mods and masks of the library: those of the file, and one for each name. Each is for both passes.
    ///
    /// # Errors
    /// See [`Case::parse`].
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

    /// Returns the closures and parameters of its score_mods and masks; `None` if the oracle evaluates all its masks itself.
    ///
    /// # Errors
    /// The library does not have a name.
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

    /// The seed of its inputs.
    pub fn seed(&self) -> u64 {
        self.name.bytes().fold(7u64, |n, b| n.wrapping_mul(31).wrapping_add(u64::from(b)))
    }

    /// Returns the specification of the forward pass.
    ///
    /// # Errors
    /// A mask or score_mod does not parse.
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

    /// Returns a command line that runs this problem.
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
