//! Passes as keys of plan caches: their equality, labels, fields and advice.

use crate::job::Job;
use sdpa_cache::{CacheKey, Difference, Fields, Query};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::expr::{Declared, ParamKind};
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::problem::Problem;
use sdpa_core::spec::{Layout, TensorSpec};
use sdpa_core::{BlockScale, DROPOUT_OFFSET, DROPOUT_SEED, DType, Direction, Fact, Fp8Scale, Operand, SINK};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Returns the name of a dense layout, or the strides. A name keeps the field equal when only an extent differs. Tensors are as in memory.
fn strides(tensor: &TensorSpec) -> String {
    let dense = Layout::ALL.into_iter().find(|layout| {
        let strides = layout.strides(tensor.dims);
        (0..4).all(|axis| tensor.dims[axis] == 1 || strides[axis] == tensor.strides[axis])
    });
    dense.map_or_else(|| format!("{:?}", tensor.strides), |layout| layout.name().to_owned())
}

/// A borrowed pass (problem and direction), which finds a [`Job`] in a cache without copying the problem.
#[derive(Clone, Copy, Debug, Hash)]
pub enum JobQuery<'a> {
    /// A forward pass over this problem.
    Forward(&'a Problem),
    /// A backward pass over this problem.
    Backward(&'a BackwardProblem),
}

impl<'a> JobQuery<'a> {
    /// Returns the direction of the pass.
    pub fn direction(self) -> Direction {
        match self {
            JobQuery::Forward(_) => Direction::Forward,
            JobQuery::Backward(_) => Direction::Backward,
        }
    }

    /// Returns the attention problem of either pass.
    pub fn problem(self) -> &'a Problem {
        match self {
            JobQuery::Forward(problem) => problem,
            JobQuery::Backward(backward) => backward.forward(),
        }
    }

    /// Iterates over the properties of the pass that an executor must support: see [`Problem::facts`].
    pub fn facts(self) -> impl Iterator<Item = Fact<'a>> {
        let (forward, backward) = match self {
            JobQuery::Forward(problem) => (Some(problem.facts()), None),
            JobQuery::Backward(backward) => (None, Some(backward.facts())),
        };
        forward.into_iter().flatten().chain(backward.into_iter().flatten())
    }

    /// Returns extents and strides of an operand as it is stored, in pages or packed: see [`Problem::in_memory`]. `None` if the pass does
    /// not have the operand.
    pub fn in_memory(self, operand: Operand) -> Option<TensorSpec> {
        match self {
            JobQuery::Forward(problem) => problem.in_memory(operand),
            JobQuery::Backward(backward) => Some(*backward.tensor(operand)),
        }
    }
}

impl<'a> From<&'a Job> for JobQuery<'a> {
    fn from(job: &'a Job) -> JobQuery<'a> {
        match job {
            Job::Forward(problem) => JobQuery::Forward(problem),
            Job::Backward(backward) => JobQuery::Backward(backward),
        }
    }
}

impl Query<Job> for JobQuery<'_> {
    fn hash_in(&self, state: &ahash::RandomState) -> u64 {
        state.hash_one(self)
    }

    fn is(&self, key: &Job) -> bool {
        match (self, key) {
            (JobQuery::Forward(one), Job::Forward(other)) => *one == &**other,
            (JobQuery::Backward(one), Job::Backward(other)) => *one == &**other,
            (JobQuery::Forward(_), Job::Backward(_)) | (JobQuery::Backward(_), Job::Forward(_)) => false,
        }
    }

    fn to_key(&self) -> Job {
        match self {
            JobQuery::Forward(problem) => Job::from((*problem).clone()),
            JobQuery::Backward(problem) => Job::from((*problem).clone()),
        }
    }
}

/// Returns the text of a score_mod or mask with `scalar NAME` for each scalar. Its default is not part of a key, because a call may pass
/// another value.
fn without_values(expression: &impl std::fmt::Display) -> String {
    let text = expression.to_string();
    let declaration = |part: &str| match (part.starts_with("scalar "), part.split_once(" = ")) {
        (true, Some((declared, _))) => declared.to_owned(),
        (true, None) | (false, _) => part.to_owned(),
    };
    text.split("; ").map(declaration).collect::<Vec<_>>().join("; ")
}

/// Shortens an expression for a label: if it is long, to its value without declarations, and a hash of the text.
fn short(text: &str) -> String {
    const MOST: usize = 60;
    if text.chars().count() <= MOST {
        return text.to_owned();
    }
    let value = text.rsplit("; ").next().unwrap_or(text);
    let cut: String = match value.chars().count() > MOST {
        true => value.chars().take(MOST - 3).chain("...".chars()).collect(),
        false => value.to_owned(),
    };
    let mut state = DefaultHasher::new();
    text.hash(&mut state);
    format!("{cut} #{:08x}", state.finish() as u32)
}

/// Returns the declarations of expressions that normal forms do not show. A mask may declare a tensor that its normal form no longer reads, and masks
/// of one normal form may declare in different orders.
fn declared(p: &Problem) -> Option<String> {
    let kept = p.kept();
    let scores = p.score_mod().into_iter().flat_map(|trace| trace.params()).map(|p| p.name.as_str());
    let lengths =
        [(kept.seq_len_q, SEQ_LEN_Q), (kept.seq_len_kv, SEQ_LEN_KV)].into_iter().filter_map(|(is_read, name)| is_read.then_some(name));
    let rest = kept.rest.iter().flat_map(|rest| rest.params()).map(|p| p.name.as_str());
    let mut read: Vec<&str> = Vec::new();
    for name in scores.chain(lengths).chain(rest) {
        if !read.contains(&name) {
            read.push(name);
        }
    }
    let mut own: Vec<String> = p.boundaries().into_iter().map(|boundary| boundary.name).collect();
    own.extend(p.paged().map(|_| PAGE_TABLE.to_owned()));
    own.extend(p.sink().then(|| SINK.to_owned()));
    own.extend(p.dropout().into_iter().flat_map(|_| [DROPOUT_SEED, DROPOUT_OFFSET]).map(str::to_owned));
    if p.block_scaled() {
        own.extend(BlockScale::ALL.map(|scale| scale.name().to_owned()));
    } else if p.dtype().is_fp8() {
        own.extend(Fp8Scale::of(Direction::Forward).iter().map(|scale| scale.name().to_owned()));
    }
    let all: Vec<&Declared> = p.params().iter().filter(|p| read.contains(&p.name.as_str()) || !own.contains(&p.name)).collect();
    let text = |p: &&Declared| match p.kind {
        ParamKind::Scalar => p.name.clone(),
        ParamKind::Tensor { axes, dtype } => format!("{}[{axes}]: {dtype}", p.name),
    };
    let is_known = all.iter().map(|p| p.name.as_str()).eq(read);
    (!is_known).then(|| all.iter().map(text).collect::<Vec<_>>().join(", "))
}

/// Returns the words that a fact adds to a label after the extents. Other facts are in the head of the label, or only in the fields of the key.
fn words(problem: &Problem, fact: &Fact<'_>) -> Option<String> {
    match fact {
        Fact::BlockScaled(is_scaled) => is_scaled.then(|| "block-scaled".to_owned()),
        Fact::BatchInvariant(is_invariant) => is_invariant.then(|| "batch-invariant".to_owned()),
        Fact::Packed(is_packed) => is_packed.then(|| "packed".to_owned()),
        Fact::Sink(has_sink) => has_sink.then(|| "sink".to_owned()),
        Fact::Dropout(dropout) => dropout.map(|dropout| format!("dropout {}", dropout.p())),
        Fact::PageSize(page_size) => page_size.map(|page_size| format!("paged by {page_size}")),
        Fact::ScoreMod(score_mod) => score_mod.map(|score_mod| short(&without_values(score_mod))),
        // One expression covers all parts of the masks.
        Fact::Band(..) => {
            let kept = problem.kept();
            (!kept.is_full()).then(|| short(&without_values(kept)))
        }
        Fact::Prefix(_) | Fact::Ends(..) | Fact::Lengths(..) | Fact::Keep(_) => None,
        // The first part of the label already states these.
        Fact::Dtype(_)
        | Fact::Batch(_)
        | Fact::HeadsQ(_)
        | Fact::HeadsKv(_)
        | Fact::SeqQ(_)
        | Fact::SeqKv(_)
        | Fact::DimQk(_)
        | Fact::DimV(_) => None,
        // The label omits these. Only the key's fields state them.
        Fact::OutputDtype(_)
        | Fact::Strides(..)
        | Fact::Alignment(..)
        | Fact::CrossPacked(_)
        | Fact::WideBoundaries(_)
        | Fact::MostTokens(..)
        | Fact::Pages(_)
        | Fact::Parameters(_)
        | Fact::Statistic(..)
        | Fact::StatsBase(_)
        | Fact::UpstreamDtype(_)
        | Fact::GradientDtype(_)
        | Fact::Gradient(_)
        | Fact::GradientsOf(_)
        | Fact::BackwardParameters(_)
        | Fact::Deterministic(_) => None,
    }
}

/// Returns the name and value of a fact's key field. `None` if the field of another fact covers it, or if it follows from others.
fn field(job: &Job, fact: &Fact<'_>) -> Option<(&'static str, String)> {
    let p = job.problem();
    let of_fp8 = |name: &'static str, value: String| p.dtype().is_fp8().then_some((name, value));
    let or = |text: Option<String>, absent: &str| text.unwrap_or_else(|| absent.to_owned());
    match fact {
        Fact::Dtype(dtype) => Some(("dtype", dtype.to_string())),
        Fact::OutputDtype(dtype) => (*dtype != p.dtype()).then(|| ("dtype of o", dtype.to_string())),
        Fact::BlockScaled(is_scaled) => of_fp8("block_scaled", is_scaled.to_string()),
        Fact::Batch(batch) => Some(("batch", batch.to_string())),
        Fact::HeadsQ(heads_q) => Some(("heads_q", heads_q.to_string())),
        Fact::HeadsKv(heads_kv) => Some(("heads_kv", heads_kv.to_string())),
        Fact::SeqQ(seq_q) => Some(("seq_q", seq_q.to_string())),
        Fact::SeqKv(seq_kv) => Some(("seq_kv", seq_kv.to_string())),
        Fact::DimQk(dim_qk) => Some(("dim_qk", dim_qk.to_string())),
        Fact::DimV(dim_v) => Some(("dim_v", dim_v.to_string())),
        Fact::Strides(operand, of_problem) => {
            let [layout, _] = operand.fields();
            Some((layout, job.in_memory(*operand).map_or_else(|| format!("{of_problem:?}"), |tensor| strides(&tensor))))
        }
        Fact::Alignment(operand, alignment) => {
            let [_, name] = operand.fields();
            Some((name, alignment.to_string()))
        }
        // One field covers the whole packing.
        Fact::Packed(_) => {
            let total = |total: Option<i64>| total.map_or_else(|| "any".to_owned(), |n| n.to_string());
            let packed = p.packed().map(|packed| {
                let names = p.boundaries().into_iter().map(|p| p.name).collect::<Vec<_>>();
                let ty = if packed.wide { DType::I64 } else { DType::I32 };
                format!("by {} in {ty}, {} and {} tokens", names.join(" and "), total(packed.total_q), total(packed.total_kv))
            });
            Some(("packed", or(packed, "no")))
        }
        Fact::CrossPacked(_) | Fact::WideBoundaries(_) | Fact::MostTokens(..) => None,
        Fact::Sink(has_sink) => Some(("sink", has_sink.to_string())),
        Fact::Dropout(dropout) => Some(("dropout", or(dropout.map(|dropout| dropout.p().to_string()), "none"))),
        // One field covers both facts of paging.
        Fact::Pages(_) => {
            let paged = p.paged().map(|paged| format!("{} pages of {} tokens", paged.pages, paged.page_size));
            Some(("paged", or(paged, "no")))
        }
        Fact::PageSize(_) => None,
        Fact::ScoreMod(score_mod) => Some(("score_mod", or(score_mod.map(without_values), "none"))),
        // One field covers all parts of the masks.
        Fact::Band(..) => Some(("mask", without_values(p.kept()))),
        Fact::Prefix(_) | Fact::Ends(..) | Fact::Lengths(..) | Fact::Keep(_) => None,
        Fact::Parameters(_) => declared(p).map(|declared| ("parameters", declared)),
        Fact::Statistic(statistic, is_computed) => Some((statistic.name(), is_computed.to_string())),
        Fact::StatsBase(base) => Some(("stats_base", base.to_string())),
        Fact::BatchInvariant(is_invariant) => Some(("batch_invariant", is_invariant.to_string())),
        Fact::UpstreamDtype(dtype) => of_fp8("dtype of d_o", dtype.to_string()),
        Fact::GradientDtype(dtype) => of_fp8("dtype of gradients", dtype.to_string()),
        Fact::Gradient(gradient) => Some(("gradient", or(gradient.map(|gradient| without_values(&gradient.trace)), "none"))),
        Fact::GradientsOf(wrt) => Some(("wrt", wrt.iter().map(|g| format!("{} {}", g.name, g.dtype)).collect::<Vec<_>>().join(", "))),
        // No field is needed: these follow from the traces of the score_mod and its derivative, and from the element types.
        Fact::BackwardParameters(_) => None,
        Fact::Deterministic(is_deterministic) => Some(("deterministic", is_deterministic.to_string())),
    }
}

impl CacheKey for Job {
    fn label(&self) -> String {
        let p = self.problem();
        let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] =
            [p.batch(), p.heads_q(), p.heads_kv(), p.seq_q(), p.seq_kv(), p.dim_qk(), p.dim_v()];
        let mut text = format!("{} {} ({batch},{heads_q},{heads_kv},{seq_q},{seq_kv},{dim_qk}", self.name(), p.dtype());
        if dim_v != dim_qk {
            text.push_str(&format!(",{dim_v}"));
        }
        text.push(')');
        for words in self.facts().filter_map(|fact| words(p, &fact)) {
            text.push(' ');
            text.push_str(&words);
        }
        text
    }

    fn fields(&self) -> Fields {
        std::iter::once(("pass", self.name().to_owned())).chain(self.facts().filter_map(|fact| field(self, &fact))).collect()
    }

    fn advice(differences: &[Difference]) -> Option<&'static str> {
        let only = |names: &[&str]| !differences.is_empty() && differences.iter().all(|d| names.contains(&d.field.as_str()));
        if only(&["mask"]) && differences.iter().all(|d| pattern(&d.asked) == pattern(&d.there)) {
            return Some(BOUNDS);
        }
        ADVICE.iter().find(|(names, _)| only(names)).map(|(_, advice)| *advice)
    }
}

/// Advice for keys that differ only in these fields. The first row that contains all differing fields applies.
const ADVICE: [(&[&str], &str); 9] = [
    (&["batch"], "only the batch differs: pad the batch to a few sizes, or split it"),
    (
        &["packed"],
        "only how documents are packed differs: set the largest number of tokens of a step (Packed::total_q), and always use the same \
         integer type for offsets",
    ),
    (&["paged"], "only the pages differ: use one page pool with one page size, with as many pages as it will ever need"),
    (
        &["dropout"],
        "only the probability of dropout differs: keep it constant, because it is compiled into plans; only the seed and the offset may \
         change from call to call",
    ),
    (&["mask"], "only the mask differs: pass lengths and documents as tensors (padding, document), not as constants"),
    (&["seq_q", "seq_kv", "mask"], "only lengths differ: with length buckets, one plan serves many lengths"),
    (&["score_mod", "gradient"], "only the score_mod differs: declare numbers that change between calls as p.scalar(name, default)"),
    (
        &["layout of k", "layout of v"],
        "only the strides of keys and values differ: allocate a KV cache once with its full capacity and pass slices of it, so that the strides \
         stay the same",
    ),
    (&LAYOUTS_AND_ALIGNMENTS, "only strides or alignments differ: pass the tensors of all calls in one layout, with the same alignment"),
];

/// Advice for masks that differ only in their numbers.
const BOUNDS: &str = "only numbers of the mask differ, such as the bounds of a window: use few different bounds, or write the mask with \
                      Mask::new and declare the numbers that change between calls as p.scalar(name, default)";

/// Returns a text without its numbers, a sign before a number included.
fn pattern(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    let mut is_name = false;
    for c in text.chars() {
        if is_name || !c.is_ascii_digit() && c != '-' {
            pattern.push(c);
        }
        is_name = c == '_' || c.is_ascii_alphabetic() || is_name && c.is_ascii_digit();
    }
    pattern
}

/// Fields of strides and alignments.
const LAYOUTS_AND_ALIGNMENTS: [&str; 16] = [
    "layout of q",
    "layout of k",
    "layout of v",
    "layout of o",
    "layout of d_o",
    "layout of dq",
    "layout of dk",
    "layout of dv",
    "alignment of q",
    "alignment of k",
    "alignment of v",
    "alignment of o",
    "alignment of d_o",
    "alignment of dq",
    "alignment of dk",
    "alignment of dv",
];

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, Shape};

    #[test]
    fn labels_tell_passes_apart_in_a_line() {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).with_stats();
        let label = |job: Job| job.label();
        assert_eq!(label(spec.validate().unwrap().into()), "forward bf16 (1,2,1,5,7,8)");
        assert_eq!(label(spec.backward().validate().unwrap().into()), "backward bf16 (1,2,1,5,7,8)");
        let wide = AttentionSpec::dense(DType::F16, Shape { dim_v: 16, ..shape }, Layout::Bhsd).mask(sdpa_core::Mask::causal());
        assert_eq!(label(wide.validate().unwrap().into()), "forward f16 (1,2,1,5,7,8,16) causal");
        let capped = spec.score_mod("softcap:30".parse().unwrap());
        assert_eq!(label(capped.validate().unwrap().into()), "forward bf16 (1,2,1,5,7,8) scalar cap; tanh(score / cap) * cap");
    }

    #[test]
    fn advice_fits_the_numbers_of_a_mask_and_the_strides_of_a_cache() {
        let shape = Shape { batch: 2, heads_q: 2, heads_kv: 2, seq_q: 64, seq_kv: 64, dim_qk: 8, dim_v: 8 };
        let job = |mask: &str, capacity: i64| -> Job {
            let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask.parse().unwrap());
            (spec.k.strides, spec.v.strides) = ([2 * capacity * 8, capacity * 8, 8, 1], [2 * capacity * 8, capacity * 8, 8, 1]);
            spec.validate().unwrap().into()
        };
        let advice = |asked: Job, there: Job| {
            let all = asked.fields().into_iter().zip(there.fields()).filter(|(asked, there)| asked != there);
            let difference =
                |((field, asked), (_, there)): ((&str, String), (_, String))| Difference { field: field.to_owned(), asked, there };
            Job::advice(&all.map(difference).collect::<Vec<_>>()).unwrap_or_default()
        };
        assert!(advice(job("window:16,0", 64), job("window:32,0", 64)).starts_with("only numbers of the mask differ"));
        assert!(advice(job("window:16,0", 64), job("window:16,3", 64)).starts_with("only the mask differs"));
        assert!(advice(job("window:16,0", 64), job("causal & document", 64)).starts_with("only the mask differs"));
        assert!(advice(job("(q + k) % 2 == 0", 64), job("(q + k) % 3 == 0", 64)).starts_with("only numbers"));
        assert!(
            advice(job("causal", 64), job("causal", 128)).starts_with("only the strides of keys and values differ: allocate a KV cache")
        );
        assert_eq!([pattern("t1 < 10 - 3"), pattern("x_2y & -64")], ["t1 <   ", "x_2y & "]);
    }

    #[test]
    fn defaults_of_scalars_are_not_printed_as_values() {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).score_mod("softcap:30".parse().unwrap());
        let job: Job =
            spec.mask("scalar slope = 0.5; f32(q) * slope < f32(k)".parse().unwrap()).with_stats().backward().validate().unwrap().into();
        let texts = job.fields().into_iter().map(|(_, value)| value).chain([job.label()]).collect::<Vec<_>>().join("\n");
        assert!(
            texts.contains("scalar cap; tanh(score / cap) * cap") && texts.contains("scalar slope; f32(q) * slope < f32(k)"),
            "{texts}"
        );
        assert!(!texts.contains("scalar cap =") && !texts.contains("slope ="), "{texts}");
    }

    /// Labels must differ, because reports identify keys by them.
    #[test]
    fn long_expressions_that_begin_alike_have_labels_of_their_own() {
        let shape = Shape { batch: 2, heads_q: 2, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
        let label = |mask: &str| {
            let job: Job = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask.parse().unwrap()).validate().unwrap().into();
            job.label()
        };
        let padded = label("padding & causal");
        assert!(padded.contains(" causal & q < seq_len_q & k < seq_len_kv #"), "{padded}");
        let long = "q % 2 == 0 | k % 3 == 0 | (q + k) % 5 == 0 | (q + k) % 7 == 1 | (q - k) % 11 == ";
        let labels = [padded, label("padding & window:inf,2"), label(&format!("{long}1")), label(&format!("{long}2"))];
        for (n, one) in labels.iter().enumerate() {
            assert!(labels[..n].iter().all(|other| other != one) && one.len() < 120, "{labels:?}");
        }
        let reach = |default: &str| {
            label(&format!(
                "scalar reach_of_every_query_in_its_own_tokens = {default}; f32(k - q) < reach_of_every_query_in_its_own_tokens"
            ))
        };
        assert_eq!(reach("3.0"), reach("4.0"));
    }

    /// Passes with different fields are different keys, or `explain` would find no difference between them.
    #[test]
    fn passes_that_differ_differ_in_a_field() {
        let shape = Shape { batch: 2, heads_q: 2, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
        let job = |mask: &str| -> Job {
            AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask.parse().unwrap()).validate().unwrap().into()
        };
        let masks = [
            "window:inf,3 & (q % 2 == 0 | k % 3 == 0)",
            "(k - q <= 3 & q % 2 == 0) | k % 3 == 0",
            "causal",
            "tensor causal[k]: bool; causal",
            "tensor seq_len_q[batch]: i32; q < seq_len_q",
            "padding",
            "tensor seq_len_q[batch]: i32; tensor seq_len_kv[batch]: i32; k < seq_len_kv & q < seq_len_q",
            "tensor open[k]: bool; open | seq_q == 5",
            "tensor open[q]: bool; open | seq_q == 5",
            "true",
        ];
        for (n, one) in masks.iter().enumerate() {
            for other in &masks[..n] {
                assert_ne!(job(one), job(other), "{one} and {other}");
                assert_ne!(job(one).fields(), job(other).fields(), "{one} and {other}");
            }
        }
        let reach = |default: &str| job(&format!("scalar reach = {default}; f32(k) < reach"));
        assert_eq!((reach("3.0"), reach("3.0").fields()), (reach("4.0"), reach("4.0").fields()));
    }

    #[test]
    fn a_borrowed_pass_is_found_as_its_job() {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).with_stats();
        let (forward, backward) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
        let queries = [JobQuery::Forward(&forward), JobQuery::Backward(&backward)];
        let jobs = [Job::from(forward.clone()), Job::from(backward.clone())];
        let state = ahash::RandomState::new();
        for (n, query) in queries.iter().enumerate() {
            assert_eq!(query.hash_in(&state), jobs[n].hash_in(&state));
            assert_eq!(query.to_key(), jobs[n]);
            for (m, job) in jobs.iter().enumerate() {
                assert_eq!(query.is(job), n == m);
            }
        }
    }
}
