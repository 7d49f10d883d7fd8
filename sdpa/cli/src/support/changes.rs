//! Supported problems that differ from an unsupported one in one option or in two.

use crate::request::Request;
use cudnn_graph::Version;
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::unsupported;
use sdpa::{AttentionSpec, DType, GradientSpec, Layout, Mask, Paged, SINK, StatsBase, TensorSpec};

/// The requested problem.
#[derive(Clone)]
struct Wanted {
    forward: AttentionSpec,
    /// The gradients of the backward pass, and whether it is deterministic.
    backward: Option<(Vec<GradientSpec>, bool)>,
}

impl Wanted {
    fn job(&self) -> Option<Job> {
        let problem = self.forward.validate().ok()?;
        let Some((wrt, deterministic)) = &self.backward else { return Some(problem.into()) };
        let mut backward = self.forward.backward();
        backward.wrt = wrt.iter().filter(|g| problem.params().iter().any(|p| p.name == g.name)).cloned().collect();
        backward.deterministic = *deterministic;
        backward.validate().ok().map(Job::from)
    }
}

/// A change, and its description after "supported".
struct Change {
    what: String,
    make: Box<dyn Fn(&mut Wanted)>,
}

impl Change {
    fn new(what: impl Into<String>, make: impl Fn(&mut Wanted) + 'static) -> Change {
        Change { what: what.into(), make: Box::new(make) }
    }
}

/// Returns the supported alternatives: after one change, else after two.
pub(super) fn supported(request: &Request, form: impl Fn(&Job) -> Option<&'static str>) -> Vec<String> {
    let backward = request.backward.as_ref().map(|b| (b.spec.wrt.clone(), b.spec.deterministic));
    let wanted = Wanted { forward: request.spec.clone(), backward };
    let changes = of(&wanted);
    let after = |some: &[&Change]| {
        let mut changed = wanted.clone();
        some.iter().for_each(|change| (change.make)(&mut changed));
        let form = form(&changed.job()?)?;
        Some(format!("{}: {form}", some.iter().map(|change| change.what.as_str()).collect::<Vec<_>>().join(" and ")))
    };
    let one: Vec<String> = changes.iter().filter_map(|change| after(&[change])).collect();
    if !one.is_empty() {
        return one;
    }
    let pairs = changes.iter().enumerate().flat_map(|(n, first)| changes[n + 1..].iter().map(move |second| [first, second]));
    pairs.filter_map(|pair| after(&pair)).collect()
}

fn dense(spec: &mut AttentionSpec) {
    for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
        *tensor = TensorSpec::dense(tensor.dims, Layout::Bshd);
    }
}

fn of(wanted: &Wanted) -> Vec<Change> {
    let spec = &wanted.forward;
    let mut all = Vec::new();
    for mask in spec.masks.clone() {
        all.push(Change::new(format!("without --mask {mask}"), move |w| w.forward.masks.retain(|other| *other != mask)));
    }
    for score_mod in spec.score_mods.clone() {
        let what = format!("without --score-mod {}", score_mod.name());
        all.push(Change::new(what, move |w| w.forward.score_mods.retain(|other| *other != score_mod)));
    }
    if spec.block_scaled {
        all.push(Change::new("without --block-scaled", |w| w.forward.block_scaled = false));
    }
    if spec.sink {
        all.push(Change::new("without --sink", |w| w.forward.sink = false));
    }
    if spec.dropout.is_some() {
        all.push(Change::new("without --dropout", |w| w.forward.dropout = None));
    }
    if spec.stats_base != StatsBase::Natural {
        all.push(Change::new("without --stats-base-2", |w| w.forward.stats_base = StatsBase::Natural));
    }
    if spec.row_max {
        all.push(Change::new("without --row-max", |w| w.forward.row_max = false));
    }
    if spec.sum_exp {
        all.push(Change::new("without --sum-exp", |w| w.forward.sum_exp = false));
    }
    if spec.batch_invariant {
        all.push(Change::new("without --batch-invariant", |w| w.forward.batch_invariant = false));
    }
    all.extend(spec.paged.map_or_else(Vec::new, |paged| of_pages(&paged)));
    if spec.packed.is_some() {
        all.push(Change::new("with batch entries that are padded", |w| {
            w.forward.packed = None;
            w.forward.masks.push(Mask::padding());
            dense(&mut w.forward);
            if let Some(paged) = w.forward.paged {
                [w.forward.k, w.forward.v] = [w.forward.k, w.forward.v].map(|tensor| paged.dense(tensor.dims, Layout::Bshd));
            }
        }));
    } else if spec.paged.is_none() {
        all.extend(of_dims(spec));
    }
    if spec.dtype == DType::F32 {
        all.extend([DType::BF16, DType::F16].map(|dtype| Change::new(format!("in {dtype}"), move |w| w.forward.dtype = dtype)));
    }
    if let Some((wrt, deterministic)) = &wanted.backward {
        all.extend(of_backward(wrt, *deterministic, spec.dtype));
    }
    all
}

fn of_pages(paged: &Paged) -> Vec<Change> {
    let (tokens, pages) = (paged.page_size.unsigned_abs().next_power_of_two() as i64, paged.pages);
    let mut all = vec![Change::new("with keys that lie in no pages", |w| {
        w.forward.paged = None;
        dense(&mut w.forward);
    })];
    if tokens != paged.page_size {
        all.push(Change::new(format!("with pages of {tokens} tokens"), move |w| {
            let paged = Paged::new(tokens, pages);
            w.forward.paged = Some(paged);
            [w.forward.k, w.forward.v] = [w.forward.k, w.forward.v].map(|tensor| paged.dense(tensor.dims, Layout::Bshd));
        }));
    }
    all
}

fn of_dims(spec: &AttentionSpec) -> Vec<Change> {
    let [dim_qk, dim_v] = [spec.q.dims[3], spec.v.dims[3]];
    let fits = |dim: i64| dim.unsigned_abs().next_multiple_of(8).min(256) as i64;
    let mut dims = vec![[fits(dim_qk), fits(dim_v)], [fits(dim_qk).min(128), fits(dim_v).min(128)]];
    dims.dedup();
    dims.retain(|dims| *dims != [dim_qk, dim_v]);
    let change = |[qk, v]: [i64; 2]| {
        Change::new(format!("with dims of {qk} and {v}"), move |w| {
            let spec = &mut w.forward;
            for (tensor, dim) in [(&mut spec.q, qk), (&mut spec.k, qk), (&mut spec.v, v), (&mut spec.o, v)] {
                tensor.dims[3] = dim;
            }
            dense(spec);
        })
    };
    dims.into_iter().map(change).collect()
}

fn of_backward(wrt: &[GradientSpec], deterministic: bool, dtype: DType) -> Vec<Change> {
    let mut all = vec![Change::new("forward alone", |w| w.backward = None)];
    if deterministic {
        all.push(Change::new("without --deterministic", |w| {
            if let Some((_, deterministic)) = &mut w.backward {
                *deterministic = false;
            }
        }));
    }
    for wanted in wrt.iter().cloned() {
        let name = wanted.name.clone();
        all.push(Change::new(format!("without the gradient of {name}"), move |w| {
            if let Some((wrt, _)) = &mut w.backward {
                wrt.retain(|g| g.name != name);
            }
        }));
        if wanted.dtype == DType::F32 && dtype != DType::F32 && wanted.name != SINK {
            all.push(Change::new(format!("with the gradient of {} in {dtype}", wanted.name), move |w| {
                if let Some((wrt, _)) = &mut w.backward {
                    wrt.iter_mut().filter(|g| g.name == wanted.name).for_each(|g| g.dtype = dtype);
                }
            }));
        }
    }
    all
}

/// Returns the first newer runtime whose rules support the job, if those of this one do not.
pub(super) fn newer(job: &Job, runtime: Version, sm: u32) -> Option<Version> {
    let free = |version: Version| unsupported::reasons(job, version, sm, job.deterministic()).is_empty();
    if free(runtime) {
        return None;
    }
    let all = (0..=30).flat_map(|minor| (0..=2).map(move |patch| Version::new(9, minor, patch)));
    all.filter(|version| *version > runtime).find(|version| free(*version))
}
