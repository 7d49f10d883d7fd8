//! The kernels' view of a backward problem, and its limits.

use crate::index_range::captured;
use crate::params::FAR;
use crate::problem::Forward;
use crate::tile_config::{BackwardTile, MOST_DIM};
use crate::unsupported::{Check, STRIDES, checked, copies, unsupported};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::error::{Reason, Unsupported};
use sdpa_core::expr::{Axes, ParamKind, Trace};
use sdpa_core::spec::TensorSpec;
use sdpa_core::{DType, Operand, SINK, Side, packed};
use sdpa_nvidia::JobQuery;
use std::sync::Arc;

/// Index of the root (output) of a score_mod's gradient trace that holds the gradient of the score. Root 0 is the modified score;
/// gradients of parameters follow.
pub(crate) const ALONG_SCORE: usize = 1;
pub(crate) const ALONG_PARAMS: usize = 2;

/// A declared parameter of a score_mod whose gradient is computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Along {
    /// The name of the parameter.
    pub name: String,
    /// Element type of the gradient: f32, f16 or bf16.
    pub dtype: DType,
    /// The axes of the parameter, over which its gradient is dense. A scalar has no axes. For a table, this field contains the table's
    /// extents.
    pub axes: Axes,
    /// For each read of a table (a tensor read at a computed index), two root indices of [`Backward::gradient`]: the gradient of the
    /// value that was read, and the index of the table element to which it is added.
    pub reads: Vec<[usize; 2]>,
}

/// The backward problem in the form that the kernels use.
#[derive(Clone, Debug)]
pub struct Backward {
    /// The forward attention. Its captured parameters include those of the backward traces.
    pub forward: Forward,
    /// Extents and strides of `d_o`. Any stride may be 0, because a layout that TMA does not support is copied first.
    pub d_o: TensorSpec,
    /// Extents and strides of `dq`, `dk` and `dv`, in this order.
    pub gradients: [TensorSpec; 3],
    /// The expression graph of the score_mod and its derivatives; `None` without a score_mod. Its roots (outputs) are the modified score,
    /// the gradient of the score, and then those of the parameters in [`Backward::along`].
    pub gradient: Option<Arc<Trace>>,
    /// Parameters of score_mods whose gradients are computed, in the order of their roots in [`Backward::gradient`].
    pub along: Vec<Along>,
    /// Whether sums do not depend on the order in which thread blocks run.
    pub deterministic: bool,
    /// Element type of the gradient of the sinks, if it is computed.
    pub sink_gradient: Option<DType>,
}

impl Backward {
    /// Returns the cost of the score_mod and the mask for one score, in units of an addition (as [`Forward::weight`] does), for a pass
    /// that recomputes scores and computes their derivatives.
    pub(crate) fn weight(&self) -> u32 {
        let slopes = self.gradient.as_deref().map_or(0, |trace| self.forward.weight_of(trace));
        slopes.max(self.forward.weight())
    }

    /// Creates the kernels' form of a backward problem.
    ///
    /// # Errors
    /// Returns every limit of the kernels that the problem breaks.
    pub fn of(problem: &BackwardProblem) -> Result<Backward, Unsupported> {
        let mut check = checked(JobQuery::Backward(problem));
        let d_o = if problem.forward().packs(Side::Queries) { packed::memory(problem.d_o(), 2) } else { *problem.d_o() };
        if problem.forward().packed().is_some() && !copies(&d_o) {
            check.that(
                false,
                &format!("{}{STRIDES}", Operand::DO),
                format!("{:?}", d_o.strides),
                "a dense last axis, 16-byte alignment, and other strides that are nonzero multiples of 16 bytes, for TMA",
            );
        }
        if !check.0.is_empty() {
            return Err(unsupported(check.0));
        }
        let backward = Backward::of_supported(problem, Forward::of_supported(problem.forward()));
        if backward.deterministic {
            backward.check_fixed_point(&mut check);
        }
        if check.0.is_empty() { Ok(backward) } else { Err(unsupported(check.0)) }
    }

    /// Adds the limits of passes that sum dQ in fixed point, and gradients of parameters in a fixed order.
    fn check_fixed_point(&self, check: &mut Check) {
        self.check_partials(check, BackwardTile::KEYS);
        check.that(self.gain().is_some(), "deterministic, score_mod", "a derivative without a bound", "one whose bound is known");
        // The kernels count rows of whole query tiles, of which the last of a sequence may be partial, in i32.
        let ([batch, heads, seq_q, _], tile) = (self.forward.extents, 128);
        let rows =
            heads * self.forward.packed.map_or(batch * (seq_q + tile), |packs| packs.totals[Side::Queries as usize] + tile * (batch + 1));
        check.that(rows < i64::from(i32::MAX), "deterministic, rows", rows, "below 2^31 over query heads and batch");
        if self.forward.batch_invariant {
            // The scale of dQ, and so its rounding, would depend on the lengths of other sequences.
            let [_, heads, ..] = self.forward.extents;
            let [least, most] = [1, i64::from(FAR)].map(|n| self.gain_at([n, heads, n, n]));
            check.that(least == most, "batch_invariant, score_mod", "a derivative whose bound depends on the extents", "one that does not");
        }
    }

    /// Returns whether gradients of parameters or sinks are computed.
    pub(crate) fn has_other_gradients(&self) -> bool {
        !self.along.is_empty() || self.sink_gradient.is_some()
    }

    /// Returns a bound of the derivative of the score_mod; `None` if none is known.
    pub(crate) fn gain(&self) -> Option<f64> {
        self.gain_at(self.forward.extents)
    }

    /// Returns the bound for other extents.
    fn gain_at(&self, extents: [i64; 4]) -> Option<f64> {
        match &self.gradient {
            Some(gradient) if self.forward.score_mod.is_some() => gradient.gain(ALONG_SCORE, extents),
            Some(_) | None => Some(1.0),
        }
    }

    /// Creates the kernels' form of a backward problem without support checks. `forward` is the form of its attention problem.
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
            deterministic: problem.deterministic() || problem.forward().batch_invariant(),
            sink_gradient: of_sink.map(|g| g.dtype),
            forward,
        }
    }

    /// Returns the tile configuration of the kernel on a device with this many SMs.
    ///
    /// # Errors
    /// Fails if there is no tile for the head dims.
    pub fn tile(&self, multiprocessors: u32) -> Result<BackwardTile, Unsupported> {
        let [q, _, v, _] = self.forward.tensors;
        let tile = BackwardTile::of(q.dims[3], v.dims[3]).ok_or_else(|| {
            let (value, limit) = (q.dims[3].max(v.dims[3]).to_string(), format!("at most {MOST_DIM}"));
            unsupported(vec![Reason::Limit { field: "dim".to_owned(), value, limit }])
        })?;
        let tile = BackwardTile::of_two_cta(q.dims[3], v.dims[3]).filter(|_| self.may_use_clusters()).unwrap_or(tile);
        // The number of shares depends on the batch, and with it the order in which their gradients are added.
        let shares = if self.forward.batch_invariant { 1 } else { self.shares(&tile, multiprocessors) };
        Ok(BackwardTile { shares, fixed_point: self.deterministic, ..tile })
    }

    /// Returns whether wide heads may use 2-CTA clusters. A warpgroup then has either scores or dP in registers, and few registers for anything else.
    fn may_use_clusters(&self) -> bool {
        self.along.is_empty() && !self.forward.is_tight()
    }

    /// Returns whether `d_o` is copied first, to a layout that TMA supports.
    pub fn copies_d_o(&self) -> bool {
        self.forward.packed.is_none() && !copies(&self.d_o)
    }
}
