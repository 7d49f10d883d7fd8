//! The problems of `compile`: a TOML file whose keys match the options of the other commands.

use crate::args::{BackwardArgs, ProblemArgs};
use crate::exit::Mistakes;
use crate::file;
use crate::request::{Request, Wanted};
use sdpa::Packed;
use sdpa::cudnn::lower::Job;
use serde::Deserialize;
use std::path::Path;

/// A pass with the name of its problem.
pub(super) struct Named {
    pub(super) problem: String,
    pub(super) job: Job,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    problem: Vec<Problem>,
}

/// A table of the file, with the names of the command line.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Problem {
    name: Option<String>,
    shape: Vec<i64>,
    dtype: Option<String>,
    o_dtype: Option<String>,
    #[serde(default)]
    block_scaled: bool,
    layout: Option<String>,
    #[serde(default)]
    score_mod: Vec<String>,
    #[serde(default)]
    mask: Vec<String>,
    #[serde(default)]
    bias: bool,
    #[serde(default)]
    sink: bool,
    /// The dropout probability of P.
    dropout: Option<f32>,
    #[serde(default)]
    stats: bool,
    #[serde(default)]
    stats_base_2: bool,
    #[serde(default)]
    row_max: bool,
    #[serde(default)]
    sum_exp: bool,
    #[serde(default)]
    batch_invariant: bool,
    /// Compiles the forward pass with stats, and the backward pass.
    #[serde(default)]
    backward: bool,
    #[serde(default)]
    wrt: Vec<String>,
    #[serde(default)]
    deterministic: bool,
    d_o_dtype: Option<String>,
    gradient_dtype: Option<String>,
    /// Batch entries are packed sequences.
    packed: Option<Documents>,
    /// Keys and values are in pages of this many tokens.
    paged: Option<i64>,
    /// Number of pages.
    pages: Option<i64>,
}

/// The properties of packed sequences that a plan depends on.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Documents {
    #[serde(default)]
    cross: bool,
    /// `cu_seqlens` is i64.
    #[serde(default)]
    wide: bool,
    total_q: Option<i64>,
    total_kv: Option<i64>,
}

impl Documents {
    fn packed(&self) -> Packed {
        let Documents { cross, wide, total_q, total_kv } = *self;
        Packed::new().with_cross(cross).with_wide(wide).with_totals(total_q, if cross { total_kv } else { total_kv.or(total_q) })
    }
}

/// A larger file does not hold problems.
const LARGEST: u64 = 16 << 20;

/// Returns every pass of every problem in a file; adds mistakes.
pub(super) fn read(path: &Path, mistakes: &mut Mistakes) -> Option<Vec<Named>> {
    let about = path.display();
    let text = mistakes.take(about, file::text(path, LARGEST))?;
    let file: File = match toml::from_str(&text) {
        Ok(file) => file,
        Err(e) => {
            let (line, column) = place(&text, e.span().map_or(0, |span| span.start));
            mistakes.add(format!("{}:{line}:{column}", path.display()), shown(&text, line, column, e.message()));
            return None;
        }
    };
    if file.problem.is_empty() {
        mistakes.add(path.display(), "has no [[problem]]");
    }
    let mut all = Vec::new();
    for (n, problem) in file.problem.into_iter().enumerate() {
        let name = problem.name.clone().unwrap_or_else(|| format!("problem {}", n + 1));
        let mut own = Mistakes::default();
        let request = problem.request(&mut own);
        match own.finish(request) {
            Ok(request) => {
                all.push(Named { problem: name.clone(), job: request.problem.clone().into() });
                all.extend(request.backward.map(|b| Named { problem: name, job: b.problem.into() }));
            }
            Err(failure) => failure.lines().iter().for_each(|line| mistakes.add(format!("{name}: {}", line.about), &line.message)),
        }
    }
    Some(all)
}

/// Returns line and column of a byte, counted from 1.
fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.rsplit('\n').next().unwrap_or_default();
    (before.matches('\n').count() + 1, line.chars().count() + 1)
}

/// Returns a rule, and the line that violates it with a mark before the position.
fn shown(text: &str, line: usize, column: usize, rule: &str) -> String {
    let line: Vec<char> = text.lines().nth(line - 1).unwrap_or_default().chars().collect();
    let (before, after) = line.split_at((column - 1).min(line.len()));
    let part = |letters: &[char]| letters.iter().collect::<String>();
    format!("{rule}: {}>>>{}", part(&before[before.len().saturating_sub(40)..]), part(&after[..after.len().min(40)]))
}

impl Problem {
    fn request(self, mistakes: &mut Mistakes) -> Option<Request> {
        let shape = self.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let args = ProblemArgs {
            input: None,
            shape: Some(shape),
            cu_seqlens: None,
            cu_seqlens_q: None,
            cu_seqlens_kv: None,
            packed: self.packed.as_ref().map(Documents::packed),
            paged: self.paged.map(|n| n.to_string()),
            pages: self.pages.map(|n| n.to_string()),
            page_table: None,
            dtype: self.dtype,
            o_dtype: self.o_dtype,
            block_scaled: self.block_scaled,
            layout: self.layout,
            score_mod: self.score_mod,
            mask: self.mask,
            bias: self.bias,
            sink: self.sink,
            dropout: self.dropout.map(|p| p.to_string()),
            dropout_seed: None,
            dropout_offset: None,
            param: Vec::new(),
            scale: None,
            stats: self.stats || self.backward,
            stats_base_2: self.stats_base_2,
            row_max: self.row_max,
            sum_exp: self.sum_exp,
            batch_invariant: self.batch_invariant,
        };
        let gradient = BackwardArgs {
            backward: self.backward,
            wrt: self.wrt,
            deterministic: self.deterministic,
            d_o_dtype: self.d_o_dtype,
            gradient_dtype: self.gradient_dtype,
        };
        Request::read(&args, &Wanted { gradient: Some(&gradient), stats: self.backward, ..Wanted::default() }, mistakes)
    }
}
