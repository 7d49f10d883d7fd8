//! Runs cases on executors and counts the outcomes.

mod backward;
mod blocks;
mod covered;
mod dropped;
mod edges;
mod few;
mod fixed;
mod large;
mod library;
#[cfg(test)]
mod naive;
mod narrow;
mod own;
mod parallel;
mod replaced;
mod rounding;
mod stays;

use crate::case::Case;
use crate::compare::{Distance, Measured, Outputs, compare};
use crate::inputs;
use crate::library::Library;
use crate::oracle::{self, Closures};
use crate::packing::{Laid, Packing};
use crate::paging::Paging;
use crate::random::Random;
use crate::say::say;
pub use backward::{
    Draw, Source, gradients_elsewhere, random_backward, random_padded_backward, run_backward, run_backward_case, run_backward_with,
};
pub use covered::{covered, run_covered};
pub use dropped::{Drops, dropped};
pub use edges::{Edges, Looked, edges};
pub use few::random_few;
pub use fixed::{fixed_point_problems, fixed_split_problems};
pub use large::{ADDED, LargeScores, Where, large_scores};
pub use library::{Tree, library_suite, run_tree};
use narrow::Narrowed;
pub use narrow::{random_fp8, random_fp8_gradients};
use own::Own;
pub use parallel::side_by_side;
pub use replaced::{Replaced, Replacement, replaced, replaced_backward, replaced_backward_case, replaced_case};
pub use rounding::rounding;
use sdpa::{
    Align, Amax, AttentionSpec, DType, Direction, Dropout, Error, Executor, ExecutorName, HostForward, Layout, Mask, Operand as Name,
    Packed, Paged, Report, Shape, Side, Statistic, StatsBase, TensorSpec, Unsupported,
};
use sdpa_oracle::F32_ROUNDOFF;
pub use stays::{Stays, stays};
use std::f64::consts::LN_2;

/// The outcome of a case on an executor.
#[derive(Clone, Debug)]
pub enum Outcome<D = Distance> {
    /// All results are within their tolerances. The fields are the distance from the oracle and the report of the call.
    Pass(D, Report),
    /// The case did not run, for this reason.
    Skip(String),
    /// A result is wrong. The field describes it.
    Fail(String),
}

/// Counts of passed, skipped and failed cases, for a summary.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Number of passed cases.
    pub passed: usize,
    /// Number of cases that did not run.
    pub skipped: usize,
    /// Number of failed cases.
    pub failed: usize,
    /// The largest ratio of error and tolerance among the passed cases.
    pub worst: f64,
}

impl Tally {
    /// Adds one outcome to the counts.
    pub fn count<D: Measured>(&mut self, outcome: &Outcome<D>) {
        match outcome {
            Outcome::Pass(distance, _) => {
                self.passed += 1;
                self.worst = self.worst.max(distance.worst());
            }
            Outcome::Skip(_) => self.skipped += 1,
            Outcome::Fail(_) => self.failed += 1,
        }
    }

    /// Adds one outcome to the counts, and prints it.
    pub fn add<D: Measured>(&mut self, executor: &str, name: &str, outcome: &Outcome<D>) {
        self.count(outcome);
        match outcome {
            Outcome::Pass(distance, report) => {
                let copied = if report.copied.is_empty() { String::new() } else { format!(", copied {}", report.copied.join(" ")) };
                println!("pass {executor} {name}: {}, {}{copied}", distance.told(), report.engine);
            }
            Outcome::Skip(why) => say(&format!("SKIP {executor} {name}: {}", why.replace('\n', "; "))),
            Outcome::Fail(how) => say(&format!("FAIL {executor} {name}: {how}")),
        }
    }

    /// Returns the counts as one line of text.
    pub fn summary(&self, executor: &str) -> String {
        format!(
            "{executor}: {} passed, {} skipped, {} failed; worst error {:.2} of its tolerance",
            self.passed, self.skipped, self.failed, self.worst
        )
    }
}

/// Runs one case on one executor.
pub fn run_case(case: &Case, executor: &dyn Executor) -> Outcome {
    if let Some(reason) = case.skip.get(executor.name().name()) {
        return Outcome::Skip(reason.clone());
    }
    let spec = match case.spec() {
        Ok(spec) => spec,
        Err(e) => return Outcome::Fail(e),
    };
    let library = match case.library() {
        Ok(library) => library,
        Err(e) => return Outcome::Fail(e),
    };
    let draw = Draw { attn_scale: case.attn_scale, spread: case.spread, shift: 0.0, seed: case.seed() };
    run_with(&spec, &draw, library.as_ref(), executor).with_repro(|| case.repro(executor.name()))
}

impl<D: Measured + 'static> Outcome<D> {
    /// Moves the distance to a box, so that outcomes of forward and backward passes have one type.
    pub fn boxed(self) -> Outcome<Box<dyn Measured>> {
        match self {
            Outcome::Pass(distance, report) => Outcome::Pass(Box::new(distance), report),
            Outcome::Skip(why) => Outcome::Skip(why),
            Outcome::Fail(how) => Outcome::Fail(how),
        }
    }
}

impl<D> Outcome<D> {
    /// Adds a command line that reproduces the failure to a failed outcome.
    #[must_use]
    pub fn with_repro(self, line: impl FnOnce() -> String) -> Outcome<D> {
        match self {
            Outcome::Fail(how) => Outcome::Fail(format!("{how}\n  {}", line())),
            Outcome::Pass(..) | Outcome::Skip(_) => self,
        }
    }

    /// Turns a skipped outcome into a failure unless `excused` returns true. `line` returns a command line that reproduces it.
    #[must_use]
    pub fn skip_only_if(self, excused: impl FnOnce() -> bool, line: impl FnOnce() -> String) -> Outcome<D> {
        match self {
            Outcome::Skip(why) if !excused() => Outcome::Fail(format!("skipped, and nothing excuses it: {why}")).with_repro(line),
            Outcome::Pass(..) | Outcome::Skip(_) | Outcome::Fail(_) => self,
        }
    }
}

/// Returns the prepared pass. An executor whose `supports` and `prepare` disagree has failed.
fn ready<T, D>(said: Result<(), Unsupported>, made: Result<T, Error>) -> Result<T, Outcome<D>> {
    Err(match (made, said) {
        (Ok(made), Ok(())) => return Ok(made),
        (Ok(_), Err(e)) => Outcome::Fail(format!("supports() refuses a problem that prepare() accepts: {e}")),
        (Err(Error::Unsupported(e)), Err(_)) => Outcome::Skip(e.to_string()),
        (Err(e), Ok(())) => Outcome::Fail(format!("supports() accepts a problem that prepare() refuses: {e}")),
        (Err(e), Err(_)) => Outcome::Fail(e.to_string()),
    })
}

/// Runs a specification over random inputs on one executor and compares it with the oracle.
pub fn run(spec: &AttentionSpec, attn_scale: Option<f32>, spread: f64, seed: u64, executor: &dyn Executor) -> Outcome {
    run_with(spec, &Draw { attn_scale, spread, shift: 0.0, seed }, None, executor)
}

/// Returns the masks that the oracle evaluates itself: those without a closure.
fn read_by_oracle(masks: &[Mask], library: Option<&Library>) -> Vec<Mask> {
    library.map_or_else(|| masks.to_vec(), |library| library.word_for_word(masks))
}

/// Returns the number of queries and keys of each batch entry; empty if all are complete.
fn entries(library: Option<&Library>, spec: &AttentionSpec) -> Vec<[i64; 2]> {
    let [batch, heads_q, seq_q, _] = spec.q.dims;
    library.map_or_else(Vec::new, |library| library.lengths([batch, heads_q, seq_q, spec.k.dims[2]]))
}

/// Draws packed sequences, pages or lengths for a specification without a case.
fn drawn_entries(spec: &AttentionSpec, seed: u64) -> Option<Library> {
    let mut random = Random::new(seed ^ 0xd0c5);
    let [batch, heads_q, seq_q, _] = spec.q.dims;
    let extents = [batch, heads_q, seq_q, spec.k.dims[2]];
    let packing = spec.packed.map(|packed| Packing::draw(spec, &packed, &mut random));
    match (packing, spec.paged) {
        (packing, Some(paged)) => {
            let paging = Paging::draw(spec, &paged, &mut random);
            return Some(Library::of_cache(&paging, packing, extents, &mut random));
        }
        (Some(packing), None) => return Some(Library::of_documents(packing)),
        (None, None) => {}
    }
    let padded = spec.masks.iter().any(|mask| matches!(mask, Mask::Traced(_)));
    Library::of_lengths(extents, &mut random).ok().filter(|_| padded)
}

/// Returns the memory positions of a tensor's elements.
fn laid(tensor: &TensorSpec, side: Side, library: Option<&Library>) -> Laid {
    library.map_or_else(|| tensor.into(), |library| library.laid(tensor, side))
}

/// The name of the executor that uses the automatic selection, including cuDNN.
pub const AUTO: ExecutorName = ExecutorName::new("auto");

/// Sets padding rows to NaN, because no result may depend on them. cuDNN's engines multiply them by 0, so they stay finite there.
fn spoil_padding(executor: ExecutorName, library: Option<&Library>, side: Side, tensors: &mut [(&TensorSpec, &mut inputs::Operand)]) {
    let Some(library) = library else { return };
    let multiplies = [ExecutorName::CUDNN, AUTO].contains(&executor);
    let (cache, lengths) = match side {
        Side::Keys => (library.cache(), library.key_lengths()),
        Side::Queries => (None, library.query_lengths()),
    };
    for (tensor, operand) in tensors {
        match (cache, lengths) {
            // Pool memory that no key uses is already NaN. If the executor multiplies it by 0, replace the NaN by numbers.
            (Some(cache), _) if multiplies => inputs::number_gaps(&cache.container(tensor), operand),
            (None, Some(lengths)) if !multiplies => inputs::spoil_rows(tensor, operand, lengths),
            (Some(_) | None, _) => {}
        }
    }
}

/// Runs a specification on one executor and compares it with the oracle. The oracle evaluates the closures of `library` in place of
/// score_mods and of masks that it cannot evaluate itself.
pub fn run_with(spec: &AttentionSpec, draw: &Draw, library: Option<&Library>, executor: &dyn Executor) -> Outcome {
    let (compared, report) = match computed(spec, draw, library, executor, compare) {
        Ok(done) => done,
        Err(outcome) => return *outcome,
    };
    match compared {
        Ok(distance) if distance.holds() => Outcome::Pass(distance, report),
        Ok(distance) => Outcome::Fail(format!("{}, {}", distance.told(), report.engine)),
        Err(how) => Outcome::Fail(format!("{how}, {}", report.engine)),
    }
}

/// Computes a specification on an executor and calls `judge` with the problem of the oracle.
fn computed<T>(
    spec: &AttentionSpec,
    draw: &Draw,
    library: Option<&Library>,
    executor: &dyn Executor,
    judge: impl FnOnce(&oracle::Problem<'_>, &Closures<'_>, &Outputs) -> T,
) -> Result<(T, Report), Box<Outcome>> {
    let problem = spec.validate().map_err(|e| Box::new(Outcome::Fail(format!("does not validate: {e}"))))?;
    let prepared = ready(executor.supports(&problem), executor.prepare(&problem)).map_err(Box::new)?;
    let drawn = drawn_entries(spec, draw.seed);
    let library = library.or(drawn.as_ref());
    let [of_q, of_o, of_stats] = [&spec.q, &spec.o, &problem.stats_tensor()].map(|tensor| laid(tensor, Side::Queries, library));
    let [of_k, of_v] = [&spec.k, &spec.v].map(|tensor| laid(tensor, Side::Keys, library));
    let mut random = Random::new(draw.seed);
    let mut narrowed = Narrowed::draw(spec.dtype, draw.seed).in_blocks(spec, draw.seed);
    let real = |name: Name| narrowed.descale(name);
    let mut q = inputs::random_about(draw.shift / real(Name::Q), of_q.clone(), spec.dtype, draw.spread / real(Name::Q), &mut random);
    let mut k = inputs::random_about(-draw.shift / real(Name::K), of_k.clone(), spec.dtype, draw.spread / real(Name::K), &mut random);
    let mut v = inputs::random(of_v.clone(), spec.dtype, draw.spread / real(Name::V), &mut random);
    let values = inputs::gather(of_v.clone(), &v);
    narrowed.forward(&problem, &values);
    spoil_padding(executor.name(), library, Side::Keys, &mut [(&spec.k, &mut k), (&spec.v, &mut v)]);
    spoil_padding(executor.name(), library, Side::Queries, &mut [(&spec.q, &mut q)]);
    let own = Own::draw(spec, draw.seed);
    let mut o = inputs::poisoned(of_o.clone(), problem.dtype_of(Name::O));
    let mut amax = narrowed.amax(Direction::Forward);
    let mut of_rows = Statistic::ALL.map(|_| inputs::poisoned(of_stats.clone(), DType::F32));
    let [stats, row_max, sum_exp] = of_rows.each_mut();
    let params = narrowed.params(Direction::Forward, own.params(library.map_or_else(Vec::new, Library::params)));
    let call = HostForward::new(q.elements(), k.elements(), v.elements(), o.elements_mut())
        .statistics([
            stats.numbers_mut().filter(|_| spec.stats),
            row_max.numbers_mut().filter(|_| spec.row_max),
            sum_exp.numbers_mut().filter(|_| spec.sum_exp),
        ])
        .attn_scale(draw.attn_scale)
        .params(&params)
        .amax(narrow::room(&mut amax));
    let report = prepared.forward(call).map_err(|e| Box::new(Outcome::Fail(format!("forward: {e}"))))?;
    let written = Statistic::ALL.into_iter().zip(&of_rows).map(|(statistic, written)| (statistic.name(), &of_stats, written));
    for (name, of, written) in written.chain([("the output", &of_o, &o)]) {
        if let Some(at) = inputs::written_gap(of.clone(), written) {
            return Err(Box::new(Outcome::Fail(format!("element {at} between the rows of {name} was written"))));
        }
    }
    let [batch, heads_q, seq_q, dim_qk] = spec.q.dims.map(|d| d as usize);
    let [_, heads_kv, seq_kv, dim_v] = spec.v.dims.map(|d| d as usize);
    let masks = read_by_oracle(&spec.masks, library);
    let textbook = oracle::Problem {
        shape: [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v],
        q: &narrowed.real(Name::Q, inputs::gather(of_q, &q)),
        k: &narrowed.real(Name::K, inputs::gather(of_k, &k)),
        v: &narrowed.real(Name::V, inputs::gather(of_v, &v)),
        scale: f64::from(draw.attn_scale.unwrap_or(problem.default_scale())),
        dtype: spec.dtype,
        masks: &masks,
        lengths: &entries(library, spec),
        sink: own.sink(),
        dropout: own.dropout(),
        narrow: narrowed.told(&problem),
        fixed_point: None,
    };
    let got = inputs::gather(of_o, &o);
    let judged = narrowed.judge(&amax, problem.dtype_of(Name::O), [(Amax::O, &got)]);
    judged.map_err(|how| Box::new(Outcome::Fail(format!("{how}, {}", report.engine))))?;
    let o = narrowed.stands_for(Name::O, got);
    let of_rows: Vec<Option<Vec<f64>>> = Statistic::ALL
        .into_iter()
        .zip(&of_rows)
        .map(|(statistic, written)| problem.computes(statistic).then(|| inputs::gather_or(of_no_key(statistic), of_stats.clone(), written)))
        .collect();
    let [stats, row_max, sum_exp] = std::array::from_fn(|n| of_rows[n].clone());
    let stats = match problem.stats_base() {
        StatsBase::Natural => stats,
        StatsBase::Two => stats.map(|stats| stats.into_iter().map(|x| x * LN_2).collect()),
    };
    let got = Outputs { o, of_rows: [stats, row_max, sum_exp], amax_s: narrow::reported(&amax, Amax::S) };
    let tanh = tanh_error(executor.name(), spec.dtype);
    Ok((with(library, &[], tanh, |closures| judge(&textbook, closures, &got)), report))
}

/// Returns the statistic of a row that attends to no key.
fn of_no_key(statistic: Statistic) -> f64 {
    match statistic {
        Statistic::Stats | Statistic::RowMax => f64::NEG_INFINITY,
        Statistic::SumExp => 0.0,
    }
}

/// Returns the relative error of the `tanh` that NVIDIA kernels use for operands of a type, in units of the f32 roundoff (docs/numerics.md).
fn tanh_error(executor: ExecutorName, dtype: DType) -> f64 {
    let relative = match dtype {
        DType::BF16 => 1.0 / 2048.0,
        DType::F16 => 2e-5,
        DType::F32 | DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => 0.0,
    };
    // All cuDNN engines that were examined (9.27, on an H100) were off by at most 1.1e-5, with bf16 and with f16.
    match executor {
        ExecutorName::CUDA | AUTO => relative / F32_ROUNDOFF,
        ExecutorName::CUDNN => 2e-5 / F32_ROUNDOFF,
        _ => 0.0,
    }
}

/// Calls `call` with the closures of the library, or without closures.
fn with<T>(library: Option<&Library>, along: &[&str], tanh: f64, call: impl FnOnce(&Closures<'_>) -> T) -> T {
    match library {
        Some(library) => library.with_tanh_off(along, tanh, call),
        None => call(&Closures::default()),
    }
}

/// Draws a random specification, small enough for the oracle. Lengths are not multiples of a tile; GQA, unusual strides and every kind of
/// mask occur; a fifth have packed sequences.
pub fn random_spec(random: &mut Random, dtypes: &[DType]) -> AttentionSpec {
    let mut spec = random_padded(random, dtypes);
    if random.between(0, 4) == 0 {
        pack(&mut spec, random);
    }
    spec
}

/// Changes a specification to a layout that TMA supports: dense rows of a multiple of 16 bytes, and pages of a multiple of 8 tokens.
pub fn in_rows_of_16_bytes(mut spec: AttentionSpec) -> AttentionSpec {
    if let Some(paged) = spec.paged.as_mut().filter(|paged| paged.page_size % 8 != 0) {
        paged.page_size *= 8;
    }
    let totals = spec.packed.map(|packed| [packed.total_q, packed.total_kv]);
    for (n, tensor) in [&mut spec.q, &mut spec.o, &mut spec.k, &mut spec.v].into_iter().enumerate() {
        let [batch, heads, seq, dim] = tensor.dims;
        let dims = [batch, heads, seq, (dim + 7) / 8 * 8];
        let layout = if tensor.strides[1] < tensor.strides[2] { Layout::Bshd } else { Layout::Bhsd };
        *tensor = TensorSpec::dense(dims, layout);
        match (spec.paged.filter(|_| n > 1), totals) {
            (Some(paged), _) => tensor.strides = layout.strides([paged.pages, heads, paged.page_size, dims[3]]),
            (None, Some(totals)) => tensor.strides = layout.strides([1, heads, totals[n / 2].unwrap_or(batch * seq).max(2), dims[3]]),
            (None, None) => {}
        }
    }
    spec
}

/// Draws a random specification of packed sequences.
pub fn random_packed(random: &mut Random, dtypes: &[DType]) -> AttentionSpec {
    let mut spec = random_padded(random, dtypes);
    pack(&mut spec, random);
    spec
}

/// Turns batch entries into packed sequences of about the previous total length.
fn pack(spec: &mut AttentionSpec, random: &mut Random) {
    let batch = random.between(1, 7);
    let longest = |n: i64| n.min(700 / batch);
    let (longest_q, longest_kv) = (longest(spec.q.dims[2]), longest(spec.k.dims[2]));
    let cross = random.between(0, 1) == 0;
    let longest_q = if cross { longest_q } else { longest_kv };
    let (said, wide) = (random.between(0, 3) > 0, random.between(0, 3) == 0);
    // Use at least two tokens, so that the stride between heads is larger than the stride between tokens.
    let total = |longest: i64, random: &mut Random| random.between(if said { longest } else { batch * longest }, batch * longest).max(2);
    let total_q = total(longest_q, random);
    let total_kv = if cross { total(longest_kv, random) } else { total_q };
    let sides = [(&mut spec.q, longest_q, total_q), (&mut spec.o, longest_q, total_q)];
    let keys = [(&mut spec.k, longest_kv, total_kv), (&mut spec.v, longest_kv, total_kv)];
    for (tensor, longest, total) in sides.into_iter().chain(keys) {
        let [_, heads, _, dim] = tensor.dims;
        tensor.dims = [batch, heads, longest, dim];
        place_packed(tensor, total, random);
    }
    for mask in &mut spec.masks {
        if let Mask::Window { align, .. } = mask
            && cross
        {
            *align = if *align == Align::BottomRight { Align::Ends } else { Align::TopLeft };
        }
    }
    spec.packed = Some(Packed::new().with_cross(cross).with_wide(wide).with_totals(said.then_some(total_q), said.then_some(total_kv)));
}

/// Draws a random specification of a forward pass with a paged KV cache. Pages have any size and memory order; there are lengths, packed
/// queries or neither.
pub fn random_paged(random: &mut Random, dtypes: &[DType]) -> AttentionSpec {
    let mut spec = random_padded(random, dtypes);
    let [batch, _, seq_kv, _] = spec.k.dims;
    let page_size = random.pick(&[1, 7, 16, 16, 64, 128, 400]);
    let pages = batch * ((seq_kv + page_size - 1) / page_size) + random.between(0, 4);
    for tensor in [&mut spec.k, &mut spec.v] {
        let [_, heads, _, dim] = tensor.dims;
        let gap = random.pick(&[0, 0, 0, 8, 3]);
        tensor.strides = random.pick(&Layout::ALL).strides([pages, heads, page_size, dim + gap]);
    }
    let packs = random.between(0, 2) == 0;
    if packs {
        let (longest, said) = (spec.q.dims[2], random.between(0, 3) > 0);
        let total = random.between(if said { longest } else { batch * longest }, batch * longest).max(2);
        place_packed(&mut spec.q, total, random);
        place_packed(&mut spec.o, total, random);
        spec.packed = Some(Packed::new().with_cross(true).with_wide(random.between(0, 3) == 0).with_totals(said.then_some(total), None));
    } else if random.between(0, 2) > 0 {
        spec.masks.push(Mask::padding());
    }
    if packs || random.between(0, 1) == 0 {
        for mask in &mut spec.masks {
            if let Mask::Window { align: align @ Align::BottomRight, .. } = mask {
                *align = Align::Ends;
            }
        }
    }
    spec.paged = Some(Paged::new(page_size, pages));
    spec
}

/// Draws a random specification with windows that are bottom-right aligned per sequence, and with lengths.
pub fn random_ends(random: &mut Random, dtypes: &[DType]) -> AttentionSpec {
    let mut spec = random_padded(random, dtypes);
    let [seq_q, seq_kv] = [spec.q.dims[2], spec.k.dims[2]];
    let side = |most: i64, random: &mut Random| (random.between(0, 3) > 0).then(|| random.between(0, most));
    let (left, right) = (side(seq_kv, random).map(|left| left.max(1)), side(seq_q, random));
    spec.masks.push(Mask::window(left, right, Align::Ends));
    spec.masks.push(Mask::padding());
    spec
}

/// Draws a random specification whose mask is a union of diagonal bands.
pub fn random_pieces(random: &mut Random, dtypes: &[DType]) -> AttentionSpec {
    let mut spec = random_padded(random, dtypes);
    // Choose strides that engines read without copies, and no statistic except stats: passes over other problems are not split into
    // bands.
    for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
        let [_, heads, rows, dim] = tensor.dims;
        let row = (dim + 7) / 8 * 8 + random.pick(&[0, 0, 8, 64]);
        let head = if random.between(0, 1) == 0 { [row * rows, row] } else { [row, row * heads] };
        *tensor = TensorSpec { strides: [row * rows * heads, head[0], head[1], 1], alignment: 16, ..*tensor };
    }
    (spec.row_max, spec.sum_exp) = (false, false);
    let seq_kv = spec.k.dims[2];
    let prefix = Mask::prefix_lm(random.between(1, seq_kv.max(2)));
    let left = random.between(1, seq_kv);
    spec.masks = vec![match random.between(0, 3) {
        0 => prefix & Mask::window(Some(left), None, Align::TopLeft),
        1 => !prefix | Mask::window(Some(left), Some(0), Align::TopLeft),
        _ => prefix,
    }];
    spec
}

/// Sets the strides of `total` packed tokens, token-major or head-major, with or without gaps.
fn place_packed(tensor: &mut TensorSpec, total: i64, random: &mut Random) {
    let [_, heads, _, dim] = tensor.dims;
    let row = dim + random.pick(&[0, 0, 0, 8, 3]);
    tensor.strides = random.pick(&[Layout::Bhsd, Layout::Bshd]).strides([1, heads, total.max(2), row]);
}

/// Draws a random specification without packed sequences.
pub fn random_padded(random: &mut Random, dtypes: &[DType]) -> AttentionSpec {
    let heads_kv = random.pick(&[1, 1, 2, 3]);
    let lengths = |random: &mut Random| match random.between(0, 5) {
        0 => 1,
        1 => random.pick(&[63, 64, 65, 127, 128, 129, 255, 257]),
        _ => random.between(1, 300),
    };
    let dims = |random: &mut Random| if random.between(0, 3) == 0 { random.pick(&[64, 128]) } else { 8 * random.between(1, 32) };
    let dim_qk = dims(random);
    let dim_v = if random.between(0, 2) > 0 { dim_qk } else { dims(random) };
    let shape = Shape {
        batch: random.between(1, 3),
        heads_q: heads_kv * random.pick(&[1, 1, 2, 4, 5]),
        heads_kv,
        seq_q: lengths(random),
        seq_kv: lengths(random),
        dim_qk,
        dim_v,
    };
    let layout = random.pick(&[Layout::Bhsd, Layout::Bshd, Layout::Sbhd]);
    let mut spec = AttentionSpec::dense(random.pick(dtypes), shape, layout);
    for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
        if random.between(0, 3) == 0 {
            let [b, h, s, d] = tensor.dims;
            let gap = random.pick(&[8, 64, 1, 3]);
            tensor.strides = random.pick(&[Layout::Bhsd, Layout::Bshd, Layout::Sbhd]).strides([b, h, s, d + gap]);
        }
    }
    for _ in 0..random.pick(&[0, 1, 1, 2]) {
        spec.masks.push(random_mask(random, shape.seq_kv));
    }
    spec.stats = random.between(0, 1) == 0;
    spec.sink = random.between(0, 4) == 0;
    spec.dropout = (random.between(0, 5) == 0).then(|| Dropout::new(random.pick(&[0.003, 0.1, 0.5, 0.9])));
    [spec.row_max, spec.sum_exp] = [(); 2].map(|()| random.between(0, 4) == 0);
    spec
}

fn random_mask(random: &mut Random, seq_kv: i64) -> Mask {
    let align = random.pick(&[Align::TopLeft, Align::BottomRight]);
    match random.between(0, 5) {
        0 => Mask::causal(),
        1 => Mask::causal_bottom_right(),
        2 => Mask::prefix_lm(random.between(0, seq_kv + 1)),
        3 => Mask::window(Some(random.between(1, seq_kv + 3)), Some(0), align),
        4 => Mask::window(Some(random.between(1, seq_kv)), Some(random.between(0, seq_kv)), align),
        _ => Mask::window(None, Some(random.between(0, seq_kv)), align),
    }
}
