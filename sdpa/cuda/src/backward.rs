//! The kernels' view of a backward problem, and what they do not support.

use crate::places::captured;
use crate::problem::Forward;
use crate::tile::{BackwardTile, MOST_DIM};
use crate::unsupported::{checked, copies, unsupported};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::error::{Reason, Unsupported};
use sdpa_core::expr::{Axes, ParamKind, Trace};
use sdpa_core::spec::TensorSpec;
use sdpa_core::{DType, SINK, Side, packed};
use sdpa_nvidia::JobQuery;
use std::sync::Arc;

/// Roots of a gradient: the score, its gradient, and one for each parameter.
pub(crate) const ALONG_SCORE: usize = 1;
pub(crate) const ALONG_PARAMS: usize = 2;

/// A declared parameter whose gradient is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Along {
    /// The name of the parameter.
    pub name: String,
    /// Element type of the gradient: f32, f16 or bf16.
    pub dtype: DType,
    /// The axes of the parameter, over which its gradient lies dense; none of a scalar. The extents of a table.
    pub axes: Axes,
    /// Roots of a table: pairs of a gradient and the index at which it is added.
    pub reads: Vec<[usize; 2]>,
}

/// The kernels' view of a backward problem.
#[derive(Clone, Debug)]
pub struct Backward {
    /// The attention. What its traces read is of both passes.
    pub forward: Forward,
    /// Gradient of the output. Any stride may be 0: what TMA does not take is copied.
    pub d_o: TensorSpec,
    /// Gradients of queries, keys and values.
    pub gradients: [TensorSpec; 3],
    /// The derivative of the score_mod: its second root is the gradient of the score, further ones are those of [`Backward::along`].
    pub gradient: Option<Arc<Trace>>,
    /// Parameters of score_mods whose gradients are asked for, in the order of the roots.
    pub along: Vec<Along>,
    /// Whether gradients of parameters are added up in one order.
    pub deterministic: bool,
    /// Element type of the gradient of the sinks, where that is asked for.
    pub sink_gradient: Option<DType>,
}

impl Backward {
    /// As [`Forward::weight`], of a pass that computes scores again and their slopes.
    pub(crate) fn weight(&self) -> u32 {
        let slopes = self.gradient.as_deref().map_or(0, |trace| self.forward.weight_of(trace));
        slopes.max(self.forward.weight())
    }

    /// Makes it of a problem.
    ///
    /// # Errors
    /// Every limit of the kernels that the problem breaks.
    pub fn of(problem: &BackwardProblem) -> Result<Backward, Unsupported> {
        let mut check = checked(JobQuery::Backward(problem));
        let d_o = if problem.forward().packs(Side::Queries) { packed::memory(problem.d_o(), 2) } else { *problem.d_o() };
        if problem.forward().packed().is_some() && !copies(&d_o) {
            check.that(
                false,
                "d_o strides",
                format!("{:?}", d_o.strides),
                "of packed documents TMA reads it as it lies: dense rows of whole 16 bytes",
            );
        }
        if !check.0.is_empty() {
            return Err(unsupported(check.0));
        }
        Ok(Backward::of_supported(problem, Forward::of_supported(problem.forward())))
    }

    /// The view of a problem that is supported.
    pub(crate) fn of_supported(problem: &BackwardProblem, mut forward: Forward) -> Backward {
        let gradient = problem.gradient().map(|gradient| Arc::new(gradient.trace.clone()));
        let traces = [forward.score_mod.as_deref(), gradient.as_deref(), forward.keep.as_deref()];
        forward.captured = captured(traces.into_iter().flatten(), forward.extents);
        let axes = |name: &str| match problem.params().iter().find(|p| p.name == name).map(|p| p.kind) {
            Some(ParamKind::Tensor { axes, .. }) => axes,
            Some(ParamKind::Scalar) | None => Axes::NONE,
        };
        let reads = |name: &str| {
            let all =
                problem.gradient().into_iter().flat_map(|gradient| gradient.reads.iter().map(move |read| (&gradient.wrt[read.wrt], read)));
            all.filter(|(of, _)| *of == name).map(|(_, read)| [read.value, read.place]).collect()
        };
        let along = problem.wrt_scores();
        let along = along.map(|g| Along { name: g.name.clone(), dtype: g.dtype, axes: axes(&g.name), reads: reads(&g.name) }).collect();
        let of_sink = problem.wrt().iter().find(|g| problem.forward().sink() && g.name == SINK);
        Backward {
            d_o: *problem.d_o(),
            gradients: [*problem.dq(), *problem.dk(), *problem.dv()],
            gradient,
            along,
            deterministic: problem.deterministic(),
            sink_gradient: of_sink.map(|g| g.dtype),
            forward,
        }
    }

    /// The tile of the kernel, on a device of so many multiprocessors.
    ///
    /// # Errors
    /// Head dims that there is no tile for.
    pub fn tile(&self, multiprocessors: u32) -> Result<BackwardTile, Unsupported> {
        let [q, _, v, _] = self.forward.tensors;
        let tile = BackwardTile::of(q.dims[3], v.dims[3]).ok_or_else(|| {
            let (value, limit) = (q.dims[3].max(v.dims[3]).to_string(), format!("at most {MOST_DIM}"));
            unsupported(vec![Reason::Limit { field: "dim".to_owned(), value, limit }])
        })?;
        let tile = BackwardTile::of_two_cta(q.dims[3], v.dims[3]).filter(|_| self.may_use_clusters()).unwrap_or(tile);
        Ok(BackwardTile { shares: self.shares(&tile, multiprocessors), ..tile })
    }

    /// Whether wide heads may use 2-CTA clusters: a warpgroup then has either scores or dP in registers, and few registers for anything else.
    fn may_use_clusters(&self) -> bool {
        self.along.is_empty() && !self.forward.is_tight()
    }

    /// Whether `d_o` is copied first, to where TMA takes it.
    pub fn copies_d_o(&self) -> bool {
        self.forward.packed.is_none() && !copies(&self.d_o)
    }
}
