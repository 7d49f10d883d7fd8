//! The features of a pass, from its facts.

use super::feature::{Class, Feature, Features, Order, Part, Use};
use crate::lower::Job;
use sdpa_core::expr::{Axes, Declared, Node, ParamKind, Trace};
use sdpa_core::{Fact, Operand, SINK, Side, Statistic, StatsBase};

/// Thread blocks along the second and third dimension of a CUDA grid, at most.
const GRID: i64 = 65_535;

/// Orders of dimensions that have names.
const ORDERS: [(Order, [usize; 4]); 3] = [(Order::Bhsd, [0, 1, 2, 3]), (Order::Bshd, [0, 2, 1, 3]), (Order::Sbhd, [2, 0, 1, 3])];

/// Facts that together decide a feature, gathered from a pass.
#[derive(Default)]
struct Seen {
    features: Features,
    /// For each operand, which of [`ORDERS`] describe it. A dimension of one element fits any order.
    orders: Vec<[bool; 3]>,
    heads: [i64; 2],
    is_packed: bool,
    in_pages: bool,
    is_masked: bool,
}

impl Seen {
    fn add(&mut self, when: bool, feature: Feature) {
        if when {
            self.features.insert(feature);
        }
    }

    fn masks(&mut self, when: bool, feature: Feature) {
        self.is_masked |= when;
        self.add(when, feature);
    }

    /// Records the order and the gaps of an operand with these extents.
    fn strides(&mut self, extents: [i64; 4], strides: [i64; 4]) {
        // A dimension of extent 1 fits every order of dimensions, so leave it out.
        let mut real: Vec<usize> = (0..4).filter(|&d| extents[d] > 1).collect();
        real.sort_by_key(|&d| std::cmp::Reverse(strides[d]));
        let is_in = |order: [usize; 4]| order.into_iter().filter(|d| real.contains(d)).eq(real.iter().copied());
        self.orders.push(ORDERS.map(|(_, order)| is_in(order)));
        let elements: i64 = extents.iter().product();
        let reach: i64 = 1 + real.iter().map(|&d| (extents[d] - 1) * strides[d]).sum::<i64>();
        self.add(reach > elements, Feature::Gaps);
        self.add(real.iter().any(|&d| strides[d] == 0), Feature::Repeats);
        self.add(extents[3] > 1 && strides[3] != 1, Feature::StridedRows);
    }

    fn trace(&mut self, used: Use, trace: &Trace) {
        let mut has = |part| self.features.insert(Feature::Has(used, part));
        let mut tensors = 0;
        for declared in trace.params() {
            match declared.kind {
                ParamKind::Scalar => has(Part::Scalar),
                ParamKind::Tensor { axes, dtype } => {
                    tensors += 1;
                    has(Part::TensorOf(dtype));
                    has(Part::TensorOver(axes.into()));
                }
            }
        }
        if tensors > 1 {
            has(Part::Tensors);
        }
        for node in trace.nodes() {
            match *node {
                Node::Index(axis) => has(Part::Index(axis.place() as u8)),
                Node::Unary(function, _) => has(Part::Unary(function)),
                Node::Binary(function, ..) => has(Part::Binary(function)),
                Node::Select(..) => has(Part::Select),
                // A table is a declared tensor over no axis. Ledgers list none: cuDNN's engines read no tables.
                Node::Score | Node::Upstream | Node::Extent(_) | Node::Const(_) | Node::Param(_) | Node::Read(..) => {}
            }
        }
    }

    fn gradient(&mut self, name: &str, declared: &[Declared]) {
        let axes = declared.iter().find(|declared| declared.name == name).map(|declared| match declared.kind {
            ParamKind::Scalar => Axes::NONE,
            ParamKind::Tensor { axes, dtype: _ } => axes,
        });
        match axes {
            Some(_) if name == SINK => self.features.insert(Feature::SinkGradient),
            Some(axes) => self.features.insert(Feature::GradientOver(axes.into())),
            None => self.features.insert(Feature::Unlisted),
        }
    }

    /// Records a fact.
    ///
    /// There is deliberately no wildcard arm: a new fact needs a feature here, or the reason why results do not depend on it.
    fn fact(&mut self, job: &Job, fact: &Fact<'_>) {
        let dtype = job.problem().dtype();
        match *fact {
            Fact::Dtype(dtype) => self.features.insert(Feature::Dtype(dtype)),
            Fact::OutputDtype(other) => self.add(other != dtype, Feature::OutputDtype),
            Fact::UpstreamDtype(other) => self.add(other != dtype, Feature::UpstreamDtype),
            Fact::GradientDtype(other) => self.add(other != dtype, Feature::GradientDtype),
            Fact::BlockScaled(is_scaled) => self.add(is_scaled, Feature::BlockScales),
            Fact::Batch(batch) => self.add(batch > GRID, Feature::BeyondGrid),
            Fact::HeadsQ(heads) => {
                self.heads[0] = heads;
                self.add(heads > GRID, Feature::BeyondGrid);
            }
            Fact::HeadsKv(heads) => self.heads[1] = heads,
            Fact::SeqQ(seq) => {
                self.features.insert(Feature::SeqQ(Class::of_queries(seq)));
                self.add(seq > 1, if seq % 64 == 0 { Feature::WholeSeqQ } else { Feature::RaggedSeqQ });
            }
            Fact::SeqKv(seq) => {
                self.features.insert(Feature::SeqKv(Class::of_keys(seq)));
                self.add(seq > 1, if seq % 64 == 0 { Feature::WholeSeqKv } else { Feature::RaggedSeqKv });
            }
            Fact::DimQk(dim) => {
                self.features.insert(Feature::DimQk(Class::of_dim(dim)));
                self.add(dim % 16 != 0, Feature::OddDim);
            }
            Fact::DimV(dim) => {
                self.features.insert(Feature::DimV(Class::of_dim(dim)));
                self.add(dim % 16 != 0, Feature::OddDim);
            }
            Fact::Strides(operand, strides) => self.strides(extents(job, operand), strides),
            Fact::Alignment(_, bytes) => self.add(bytes < 16, Feature::Misaligned),
            Fact::Packed(is_packed) => {
                self.is_packed = is_packed;
                self.add(is_packed, Feature::Packed);
            }
            Fact::CrossPacked(is_cross) => self.add(is_cross, Feature::CrossPacked),
            Fact::WideBoundaries(are_wide) => self.add(are_wide, Feature::WideBoundaries),
            Fact::MostTokens(_, bound) => self.add(bound.is_some(), Feature::TokenBound),
            Fact::Sink(has_sink) => self.add(has_sink, Feature::Sink),
            Fact::Dropout(dropout) => self.add(dropout.is_some(), Feature::Dropout),
            // The number of pages decides the size of the pool, not what is computed.
            Fact::Pages(_) | Fact::PageSize(None) => {}
            Fact::PageSize(Some(size)) => {
                self.in_pages = true;
                self.features.insert(if size < 64 { Feature::SmallPages } else { Feature::LargePages });
            }
            // A derivative follows from its score_mod. A parameter belongs to the trace or the option that declares it, whose features
            // are recorded.
            Fact::ScoreMod(None) | Fact::Keep(None) | Fact::Gradient(_) | Fact::Parameters(_) | Fact::BackwardParameters(_) => {}
            Fact::ScoreMod(Some(trace)) => {
                self.features.insert(Feature::ScoreMod);
                self.trace(Use::ScoreMod, trace);
            }
            Fact::Band(lower, upper) => {
                self.masks(upper == Some(0), Feature::Causal);
                self.masks(upper.is_some_and(|upper| upper != 0), Feature::UpperBound);
                self.masks(lower.is_some(), Feature::LowerBound);
            }
            Fact::Prefix(prefix) => self.masks(prefix.is_some(), Feature::Prefix),
            Fact::Ends(lower, upper) => {
                self.masks(upper.is_some(), Feature::UpperBoundOfEnds);
                self.masks(lower.is_some(), Feature::LowerBoundOfEnds);
            }
            Fact::Lengths(Side::Queries, has) => self.masks(has, Feature::SeqLenQ),
            Fact::Lengths(Side::Keys, has) => self.masks(has, Feature::SeqLenKv),
            Fact::Keep(Some(trace)) => {
                self.masks(true, Feature::Rule);
                self.trace(Use::Mask, trace);
            }
            Fact::Statistic(Statistic::Stats, is_computed) => self.add(is_computed, Feature::Stats),
            Fact::Statistic(Statistic::RowMax, is_computed) => self.add(is_computed, Feature::RowMax),
            Fact::Statistic(Statistic::SumExp, is_computed) => self.add(is_computed, Feature::SumExp),
            // Refused: see `fact`.
            Fact::BatchInvariant(_) => {}
            Fact::StatsBase(base) => self.add(base == StatsBase::Two, Feature::StatsBaseTwo),
            Fact::GradientsOf(gradients) => {
                for gradient in gradients {
                    self.gradient(&gradient.name, job.problem().params());
                    self.features.insert(Feature::GradientIn(gradient.dtype));
                }
            }
            Fact::Deterministic(is_deterministic) => self.add(is_deterministic, Feature::Deterministic),
        }
    }

    fn finish(mut self) -> Features {
        let [heads_q, heads_kv] = self.heads;
        let group = heads_q / heads_kv.max(1);
        self.features.insert(match group {
            ..=1 => Feature::GroupOfOne,
            _ if group & (group - 1) == 0 => Feature::GroupOfPowerOfTwo,
            _ => Feature::GroupOfOther,
        });
        self.add(group > 1 && heads_kv == 1, Feature::OneKvHead);
        let of_first = self.orders.first().copied().unwrap_or_default();
        let common = (0..ORDERS.len()).find(|&n| self.orders.iter().all(|orders| orders[n]));
        let is_mixed = common.is_none() && self.orders.iter().any(|orders| *orders != of_first);
        let order = common.or_else(|| of_first.iter().position(|fits| *fits)).map_or(Order::Other, |n| ORDERS[n].0);
        self.features.insert(Feature::Layout(order));
        self.add(is_mixed, Feature::MixedLayouts);
        self.add(!self.is_packed && !self.in_pages, Feature::Dense);
        self.add(!self.is_masked, Feature::NoMask);
        self.features
    }
}

/// Returns the extents of an operand; for paged keys, those of the pool.
fn extents(job: &Job, operand: Operand) -> [i64; 4] {
    job.tensor(operand).map_or([1; 4], |tensor| tensor.dims)
}

/// Returns the features of a pass, for which a ledger counts right and wrong results.
pub fn features(job: &Job) -> Features {
    let mut seen = Seen::default();
    seen.add(true, if job.name() == "forward" { Feature::Forward } else { Feature::Backward });
    job.facts().for_each(|fact| seen.fact(job, &fact));
    seen.finish()
}
