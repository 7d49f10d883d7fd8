//! Lowers traces to pointwise ops.
//!
//! A value that depends on no score, index or tensor is a scalar, computed on the host at each call. A value that depends only on batch entry and
//! head, and on no parameter, is a table in device memory. Engines generate only the query and key indices. Booleans never leave a comparison: `and`,
//! `or` and `not` become nested selects, because no engine supports a logical *or*.

use super::lowered::{Supply, Table};
use super::{dtype, mode};
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Mode, Scalar, Storage, Tensor, TensorId};
use cudnn_graph::{DType, Graph};
use sdpa_core::expr::{
    Axes, Axis, Binary, Builder, Const, Depends, Kind, Node, NodeId, ParamId, ParamKind, Place, Precision, Trace, Type, Unary,
};
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::problem::Problem;
use serde::{Deserialize, Serialize};

/// Emits the values of one trace as ops of a graph, each value once.
pub(super) struct Emitter<'a> {
    trace: &'a Trace,
    depends: Vec<Depends>,
    reading: Reading,
    made: Vec<Option<TensorId>>,
    score: TensorId,
    upstream: Option<TensorId>,
    /// Zero tensors in i32 and f32.
    zeros: [Option<TensorId>; 2],
}

/// The two values of a select.
#[derive(Clone, Copy)]
struct Choice {
    x: TensorId,
    y: TensorId,
    dtype: DType,
}

/// Whether a comparison holds for equal numbers.
#[derive(Clone, Copy, PartialEq)]
enum Strictness {
    Strict,
    Weak,
}

/// The element type of booleans in memory: 0 and 1. No engine reads bytes.
pub(super) const TRUTH: DType = DType::BF16;

/// The graph under construction, and what is bound to its tensors.
pub(super) struct Draft<'g> {
    pub(super) graph: &'g mut Graph,
    pub(super) supplies: &'g mut Vec<(TensorId, Supply)>,
}

impl<'a> Emitter<'a> {
    /// Creates an emitter of `trace` as a function of the tensor `score`, which also gives the extents of indices.
    pub(super) fn new(trace: &'a Trace, reading: Reading, score: TensorId) -> Emitter<'a> {
        let made = vec![None; trace.nodes().len()];
        Emitter { trace, depends: trace.depends(), reading, made, score, upstream: None, zeros: [None; 2] }
    }

    /// Sets the upstream gradient.
    pub(super) fn set_upstream(&mut self, upstream: TensorId) {
        self.upstream = Some(upstream);
    }

    /// Emits a value as a tensor.
    pub(super) fn emit(&mut self, to: &mut Draft<'_>, id: NodeId) -> TensorId {
        if let Some(made) = self.made[id.index()] {
            return made;
        }
        // Visit nodes in topological order: those that are needed and not supplied from outside.
        let mut needed = vec![false; self.trace.nodes().len()];
        needed[id.index()] = true;
        let ids: Vec<NodeId> = self.trace.ids().take(id.index() + 1).collect();
        for &here in ids.iter().rev() {
            if needed[here.index()] && self.made[here.index()].is_none() && !self.is_supplied(here.index()) {
                match self.trace.small_power(here) {
                    Some((_, 0)) => {}
                    Some((x, _)) => needed[x.index()] = true,
                    None => self.trace.node(here).operands().for_each(|x| needed[x.index()] = true),
                }
            }
        }
        for n in ids.into_iter().filter(|n| needed[n.index()]) {
            if self.made[n.index()].is_none() && !self.is_choice(n) {
                let tensor = self.value(to, n);
                self.made[n.index()] = Some(tensor);
            }
        }
        self.operand(id)
    }

    /// Returns whether a value is a boolean computed in the kernel: it becomes nested selects, not a tensor.
    fn is_choice(&self, id: NodeId) -> bool {
        let made = self.trace.node(id).operands().next().is_some();
        made && self.trace.ty(id) == Type::Bool && !self.is_supplied(id.index())
    }

    /// Returns whether a value is supplied from outside the kernel.
    fn is_supplied(&self, index: usize) -> bool {
        let d = self.depends[index];
        d.is_uniform() || d.is_of_heads()
    }

    fn value(&mut self, to: &mut Draft<'_>, id: NodeId) -> TensorId {
        let d = self.depends[id.index()];
        if d.is_uniform() {
            return self.number(to, id);
        }
        if d.is_of_heads() {
            return self.table(to, id, d.axes);
        }
        let ty = self.trace.ty(id);
        match self.trace.node(id) {
            Node::Score => self.score,
            Node::Upstream => self.upstream.unwrap_or(self.score),
            // Engines for one query split the keys and count indices from the start of each part, so the key indices are read from a
            // tensor instead.
            Node::Index(Axis::K) if self.reading.extents[2] == 1 => self.keys(to),
            Node::Index(axis) => to.graph.gen_index(self.score, axis.place() as i64),
            Node::Param(p) => self.param(to, p),
            Node::Unary(f, x) => self.unary(to, f, self.operand(x), ty),
            Node::Binary(f, x, y) => match self.trace.small_power(id) {
                Some((_, 0)) => {
                    let one = to.graph.scalar(Scalar::F32(1.0));
                    self.lift(to, one, ty)
                }
                Some((x, times)) => self.small_power(to, self.operand(x), times),
                None => self.binary(to, f, [self.operand(x), self.operand(y)], ty),
            },
            Node::Select(c, x, y) => {
                let (x, y) = (self.operand(x), self.operand(y));
                self.select(to, c, x, y, dtype(ty.dtype()))
            }
            // Extents and constants are passed as scalars. A trace that reads tables is unsupported.
            Node::Extent(_) | Node::Const(_) | Node::Read(..) => self.number(to, id),
        }
    }

    /// Returns a value that was emitted before: operands come first.
    fn operand(&self, id: NodeId) -> TensorId {
        self.made[id.index()].unwrap_or_else(|| unreachable!("value {} is not there yet", id.index()))
    }

    /// Emits zeros of the extents of the scores.
    fn zero(&mut self, to: &mut Draft<'_>, ty: Type) -> TensorId {
        let whole = *self.zeros[0].get_or_insert_with(|| {
            let row = to.graph.gen_index(self.score, Axis::Q.place() as i64);
            op(to, Mode::Sub, &[row, row], Type::I32)
        });
        match ty {
            Type::I32 | Type::Bool => whole,
            Type::F32 => *self.zeros[1].get_or_insert_with(|| op(to, Mode::Identity, &[whole], Type::F32)),
        }
    }

    /// Turns a scalar or a tensor in memory into a value inside the kernel.
    fn lift(&mut self, to: &mut Draft<'_>, x: TensorId, ty: Type) -> TensorId {
        if is_inside(to, x) {
            return x;
        }
        let zero = self.zero(to, ty);
        op(to, Mode::Add, &[zero, x], ty)
    }

    fn unary(&mut self, to: &mut Draft<'_>, f: Unary, x: TensorId, ty: Type) -> TensorId {
        let from = match (f, ty) {
            (Unary::ToF32, _) => Type::I32,
            (Unary::ToI32, _) => Type::F32,
            (_, ty) => ty,
        };
        let x = self.lift(to, x, from);
        op(to, mode::unary(f), &[x], ty)
    }

    /// Emits a small integer power as products. Engines compute powers by logarithms, which fail for negative numbers.
    fn small_power(&mut self, to: &mut Draft<'_>, x: TensorId, times: usize) -> TensorId {
        let x = self.lift(to, x, Type::F32);
        (1..times).fold(x, |product, _| op(to, Mode::Mul, &[product, x], Type::F32))
    }

    /// Emits a binary function. Engines require the first operand to be inside the kernel.
    fn binary(&mut self, to: &mut Draft<'_>, f: Binary, [x, y]: [TensorId; 2], ty: Type) -> TensorId {
        let inside = |x| is_inside(to, x);
        match f {
            Binary::Add | Binary::Mul | Binary::Min | Binary::Max if !inside(x) && inside(y) => op(to, mode::binary(f), &[y, x], ty),
            Binary::Add | Binary::Mul | Binary::Min | Binary::Max | Binary::Sub | Binary::Div | Binary::Mod | Binary::Pow => {
                let x = self.lift(to, x, ty);
                op(to, mode::binary(f), &[x, y], ty)
            }
            // Comparisons and boolean operators are lowered as nested selects; see `select`.
            Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::And | Binary::Or => x,
        }
    }

    /// Emits `x` where the condition holds, else `y`.
    pub(super) fn select(&mut self, to: &mut Draft<'_>, condition: NodeId, x: TensorId, y: TensorId, dtype: DType) -> TensorId {
        let choice = Choice { x, y, dtype };
        if self.is_supplied(condition.index()) {
            let holds = self.emit(to, condition);
            let zero = to.graph.scalar(Scalar::I32(0));
            return self.compare(to, Binary::Ne, [holds, zero], choice);
        }
        match self.trace.node(condition) {
            Node::Binary(Binary::And, a, b) => {
                let inner = self.select(to, b, x, y, dtype);
                self.select(to, a, inner, y, dtype)
            }
            Node::Binary(Binary::Or, a, b) => {
                let inner = self.select(to, b, x, y, dtype);
                self.select(to, a, x, inner, dtype)
            }
            Node::Unary(Unary::Not, a) => self.select(to, a, y, x, dtype),
            Node::Binary(f, a, b) => {
                let ty = self.trace.ty(a);
                let (a, b) = (self.emit(to, a), self.emit(to, b));
                match ty {
                    Type::F32 => self.compare_floats(to, f, [a, b], choice),
                    Type::I32 | Type::Bool => self.compare(to, f, [a, b], choice),
                }
            }
            Node::Select(c, a, b) => {
                let (a, b) = (self.select(to, a, x, y, dtype), self.select(to, b, x, y, dtype));
                self.select(to, c, a, b, dtype)
            }
            Node::Score
            | Node::Upstream
            | Node::Index(_)
            | Node::Extent(_)
            | Node::Const(_)
            | Node::Param(_)
            | Node::Read(..)
            | Node::Unary(..) => {
                let holds = self.emit(to, condition);
                let zero = to.graph.scalar(Scalar::I32(0));
                self.compare(to, Binary::Ne, [holds, zero], choice)
            }
        }
    }

    /// Emits a select by an integer comparison.
    fn compare(&mut self, to: &mut Draft<'_>, f: Binary, [a, b]: [TensorId; 2], choice: Choice) -> TensorId {
        let (mut f, mut a, mut b) = (f, a, b);
        if !is_inside(to, a) && is_inside(to, b) {
            (f, a, b) = (mirrored(f), b, a);
        }
        a = self.lift(to, a, Type::I32);
        let Choice { mut x, mut y, dtype } = choice;
        if !is_inside(to, x) && is_inside(to, y) {
            (f, x, y) = (opposite(f), y, x);
        }
        let ty = if dtype == DType::I32 { Type::I32 } else { Type::F32 };
        x = self.lift(to, x, ty);
        // Engines accept a scalar in this position, but no tensor.
        if to.graph.get(y).is_some_and(Tensor::is_device) {
            y = self.lift(to, y, ty);
        }
        let holds = to.graph.pointwise(mode::binary(f), &[a, b]);
        to.graph.pointwise_as(Mode::BinarySelect, &[x, y, holds], dtype, dtype, Params::default())
    }

    /// Emits a select by a float comparison. Engines compare integers only: `a > b` is `⌈min(max(a − b, 0), 1)⌉ > 0`, and `a ≥ b` is `⌊min(max(a − b,
    /// −1), 0)⌋ > −1`. Min and max return the operand that is not NaN, so neither comparison holds for NaN. The difference of two infinities of one
    /// sign is NaN.
    fn compare_floats(&mut self, to: &mut Draft<'_>, f: Binary, [a, b]: [TensorId; 2], choice: Choice) -> TensorId {
        let Choice { x, y, dtype } = choice;
        match f {
            Binary::Gt => self.above(to, [a, b], Strictness::Strict, choice),
            Binary::Lt => self.above(to, [b, a], Strictness::Strict, choice),
            Binary::Ge => self.above(to, [a, b], Strictness::Weak, choice),
            Binary::Le => self.above(to, [b, a], Strictness::Weak, choice),
            Binary::Eq | Binary::Ne => {
                let (x, y) = if f == Binary::Eq { (x, y) } else { (y, x) };
                let not_below = self.above(to, [a, b], Strictness::Weak, Choice { x, y, dtype });
                self.above(to, [b, a], Strictness::Weak, Choice { x: not_below, y, dtype })
            }
            // Not comparisons, so these do not occur here.
            Binary::Add | Binary::Sub | Binary::Mul | Binary::Div | Binary::Mod | Binary::Pow | Binary::Min | Binary::Max => x,
            Binary::And | Binary::Or => x,
        }
    }

    fn above(&mut self, to: &mut Draft<'_>, [a, b]: [TensorId; 2], bound: Strictness, choice: Choice) -> TensorId {
        let (low, high, round) = match bound {
            Strictness::Strict => (0, 1, Mode::Ceil),
            Strictness::Weak => (-1, 0, Mode::Floor),
        };
        let more = self.binary(to, Binary::Sub, [a, b], Type::F32);
        let least = to.graph.scalar(Scalar::F32(low as f32));
        let most = to.graph.scalar(Scalar::F32(high as f32));
        let more = op(to, Mode::Max, &[more, least], Type::F32);
        let more = op(to, Mode::Min, &[more, most], Type::F32);
        let more = op(to, round, &[more], Type::F32);
        let more = op(to, Mode::Identity, &[more], Type::I32);
        let low = to.graph.scalar(Scalar::I32(low));
        self.compare(to, Binary::Gt, [more, low], choice)
    }

    /// Emits a root as a value inside the kernel that depends on the upstream gradient. Engines have no kernel for a root that does not.
    pub(super) fn emit_gradient(&mut self, to: &mut Draft<'_>, id: NodeId) -> TensorId {
        let Some(upstream) = self.upstream.filter(|_| !self.depends[id.index()].score) else { return self.emit_inside(to, id) };
        let zero = to.graph.scalar(Scalar::F32(0.0));
        let zero = op(to, Mode::Mul, &[upstream, zero], Type::F32);
        let value = self.emit(to, id);
        op(to, Mode::Add, &[zero, value], Type::F32)
    }

    /// Emits a root as a value inside the kernel.
    pub(super) fn emit_inside(&mut self, to: &mut Draft<'_>, id: NodeId) -> TensorId {
        let value = self.emit(to, id);
        self.lift(to, value, self.trace.ty(id))
    }

    /// Declares a tensor of key indices in device memory.
    fn keys(&self, to: &mut Draft<'_>) -> TensorId {
        let keys = self.reading.extents[3];
        let name = format!("table{}", to.graph.tensors().len());
        let tensor = to.graph.input(&name, DType::I32, [1, 1, 1, keys]);
        to.supplies.push((tensor, Supply::Table(Table::I32((0..keys as i32).collect()))));
        tensor
    }

    /// Declares a scalar from host memory.
    fn number(&self, to: &mut Draft<'_>, id: NodeId) -> TensorId {
        if let Node::Const(c) = self.trace.node(id) {
            return to.graph.scalar(match c {
                Const::F32(bits) => Scalar::F32(f32::from_bits(bits)),
                Const::I32(x) => Scalar::I32(x),
                Const::Bool(x) => Scalar::I32(i32::from(x)),
            });
        }
        let name = format!("number{}", to.graph.tensors().len());
        let dtype = match self.trace.ty(id) {
            Type::F32 => DType::F32,
            Type::I32 | Type::Bool => DType::I32,
        };
        let tensor = to.graph.parameter(&name, dtype);
        to.supplies.push((tensor, Supply::Number(part(self.trace, id))));
        tensor
    }

    /// Emits a declared tensor. Booleans are converted to integers inside the kernel once, however often they are read.
    fn param(&mut self, to: &mut Draft<'_>, p: ParamId) -> TensorId {
        let tensor = param(to, self.trace, p, self.reading);
        if to.graph.get(tensor).is_none_or(|t| t.dtype != TRUTH) || self.trace.params()[p.index()].kind.ty() != Type::Bool {
            return tensor;
        }
        let inside = self.lift(to, tensor, Type::F32);
        op(to, Mode::Identity, &[inside], Type::I32)
    }

    /// Declares a table for a function of batch entry and head.
    fn table(&self, to: &mut Draft<'_>, id: NodeId, axes: Axes) -> TensorId {
        let trace = part(self.trace, id);
        let extents = self.reading.extents;
        let [batches, heads, ..] = axes.dims(extents);
        let dims = self.reading.axes(axes).dims(extents);
        let copies = (dims[2] * dims[3]) as usize;
        let mut values = Vec::with_capacity((batches * heads) as usize * copies);
        for batch in 0..batches {
            for head in 0..heads {
                let at = Place { score: 0.0, upstream: 0.0, index: [batch, head, 0, 0], extents, params: &[] };
                let value = trace.eval(&at, Precision::F32)[0];
                values.extend(std::iter::repeat_n(value, copies));
            }
        }
        let table = match self.trace.ty(id) {
            Type::F32 => Table::F32(values.into_iter().map(|x| x as f32).collect()),
            Type::I32 | Type::Bool => Table::I32(values.into_iter().map(|x| x as i32).collect()),
        };
        let name = format!("table{}", to.graph.tensors().len());
        let tensor = to.graph.input(&name, table.dtype(), dims);
        to.supplies.push((tensor, Supply::Table(table)));
        tensor
    }
}

/// Returns whether a value exists only inside the kernel.
fn is_inside(to: &Draft<'_>, x: TensorId) -> bool {
    to.graph.get(x).is_some_and(|t| t.storage == Storage::Virtual)
}

fn op(to: &mut Draft<'_>, mode: Mode, inputs: &[TensorId], ty: Type) -> TensorId {
    to.graph.pointwise_as(mode, inputs, dtype(ty.dtype()), dtype(ty.dtype()), Params::default())
}

/// Returns `g` such that `y g x` is `x f y`.
fn mirrored(f: Binary) -> Binary {
    match f {
        Binary::Lt => Binary::Gt,
        Binary::Gt => Binary::Lt,
        Binary::Le => Binary::Ge,
        Binary::Ge => Binary::Le,
        other @ (Binary::Eq
        | Binary::Ne
        | Binary::Add
        | Binary::Sub
        | Binary::Mul
        | Binary::Div
        | Binary::Mod
        | Binary::Pow
        | Binary::Min
        | Binary::Max
        | Binary::And
        | Binary::Or) => other,
    }
}

/// Returns the negated comparison, for integers.
fn opposite(f: Binary) -> Binary {
    match f {
        Binary::Lt => Binary::Ge,
        Binary::Ge => Binary::Lt,
        Binary::Gt => Binary::Le,
        Binary::Le => Binary::Gt,
        Binary::Eq => Binary::Ne,
        Binary::Ne => Binary::Eq,
        other @ (Binary::Add
        | Binary::Sub
        | Binary::Mul
        | Binary::Div
        | Binary::Mod
        | Binary::Pow
        | Binary::Min
        | Binary::Max
        | Binary::And
        | Binary::Or) => other,
    }
}

/// Returns one value of a trace as a trace of its own.
fn part(trace: &Trace, id: NodeId) -> Trace {
    let mut b = Builder::new();
    let here = b.copy(trace);
    // These declarations were accepted before, so this cannot fail.
    b.finish(&[here[id.index()]]).unwrap_or_else(|_| trace.clone())
}

/// The pass of a graph, as far as engines read tensors differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Backward(Vectors),
}

/// The way in which a backward pass reads declared tensors that have a query axis; cuDNN calls them vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vectors {
    /// The tensors are read as they are. The stats and the row sums count as two of them. Engines for compute capability 8.0 support no
    /// more than these two; those for 9.0 support two more.
    AlongQueries,
    /// The tensors are first broadcast over keys. This allows any number of them, but takes memory that grows with the product of the
    /// lengths.
    Spread,
}

/// How the engines of a pass read tensors. It depends on the problem alone and is the same for every element type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    extents: [i64; 4],
    pass: Pass,
    /// Keys and values are in pages.
    paged: bool,
    /// The engines for one query read a pair of lengths at the right batch entry.
    lengths_in_place: bool,
}

impl Reading {
    pub(super) fn new(problem: &Problem, pass: Pass) -> Reading {
        let lengths_in_place = problem.seq_q() == 1 && !super::has_lengths_of_one_side(problem);
        Reading { extents: problem.extents(), pass, paged: problem.paged().is_some(), lengths_in_place }
    }

    /// Returns whether a backward trace compares tensors with a result of one element (`Quirk::ComparisonsOfOneElement`).
    fn compares_one_element(self, trace: &Trace) -> bool {
        let is_one = |on: &Depends| on.tensor && !on.score && on.axes.iter().all(|axis| self.extents[axis.place()] == 1);
        let compares = |node: &Node| matches!(node, Node::Binary(function, ..) if function.kind() == Kind::Compare);
        self.pass != Pass::Forward && trace.nodes().iter().zip(&trace.depends()).any(|(node, on)| compares(node) && is_one(on))
    }

    /// Returns the axes of a tensor, plus queries (keys, with one query) if it has one element.
    fn of_one_element(self, axes: Axes) -> Axes {
        let has_one = axes.iter().all(|axis| self.extents[axis.place()] == 1);
        let along = if self.extents[Axis::Q.place()] > 1 { Axis::Q } else { Axis::K };
        if has_one { axes.with(along) } else { axes }
    }

    /// Returns the axes that a tensor over `axes` must span in device memory for engines to read the right element. Measured on an H200 and an H100
    /// with 9.19 and 9.27; no engine reports that it reads a wrong element.
    ///
    /// - A tensor over the batch and neither queries nor keys is read at the index of the head (`Quirk::VectorsOverTheBatch`).
    /// - In the backward pass, a tensor over keys and not queries is read at the index of the query (`Quirk::VectorsOverTheKeys`).
    /// - With one query over pages, a tensor over heads and not keys is read at another head (`Quirk::HeadsOverPages`).
    ///
    /// [`Vectors::Spread`] adds the keys to every vector along queries.
    fn axes(self, axes: Axes) -> Axes {
        let Reading { extents, pass, paged, lengths_in_place: _ } = self;
        let spans = |axes: Axes, axis: Axis| axes.has(axis) && extents[axis.place()] > 1;
        let one_query = extents[Axis::Q.place()] == 1;
        let axes = if paged && one_query && spans(axes, Axis::Head) { axes.with(Axis::K) } else { axes };
        let (q, k) = (spans(axes, Axis::Q), spans(axes, Axis::K));
        let per_batch = spans(axes, Axis::Batch) && !q && !k;
        let along_keys = pass != Pass::Forward && k && !q;
        let right = match (per_batch || along_keys, one_query) {
            (true, false) => axes.with(Axis::Q),
            (true, true) if per_batch => axes.with(Axis::K),
            (true, true) | (false, _) => axes,
        };
        let vector = spans(right, Axis::Q) && !k;
        if vector && pass == Pass::Backward(Vectors::Spread) { right.with(Axis::K) } else { right }
    }
}

/// Declares a tensor parameter with the axes that engines need. Reuses a tensor of the graph with the same axes.
fn param(to: &mut Draft<'_>, trace: &Trace, p: ParamId, reading: Reading) -> TensorId {
    let declared = &trace.params()[p.index()];
    let ParamKind::Tensor { axes, dtype } = declared.kind else { return to.graph.parameter(&declared.name, DType::F32) };
    let in_place = reading.lengths_in_place && [SEQ_LEN_Q, SEQ_LEN_KV].contains(&declared.name.as_str());
    let axes_read = match () {
        () if in_place => axes,
        () if dtype == sdpa_core::DType::F32 && reading.compares_one_element(trace) => reading.axes(reading.of_one_element(axes)),
        () => reading.axes(axes),
    };
    let (dims, read) = (axes.dims(reading.extents), axes_read.dims(reading.extents));
    let name = &declared.name;
    let is_declared = |supply: &Supply| match supply {
        Supply::Param(of) | Supply::Spread { name: of, .. } => of == name,
        Supply::Number(_)
        | Supply::Guarded(_)
        | Supply::Documents(_)
        | Supply::Pages(_)
        | Supply::Table(_)
        | Supply::Scratch
        | Supply::Gradient(_)
        | Supply::Amax(_)
        | Supply::Terms { .. } => false,
    };
    let graph = &mut *to.graph;
    let spans_the_same = |tensor: TensorId| graph.get(tensor).is_some_and(|t| t.dims.0[..] == read[..]);
    if let Some((tensor, _)) = to.supplies.iter().find(|(tensor, supply)| is_declared(supply) && spans_the_same(*tensor)) {
        return *tensor;
    }
    let name = name.clone();
    let (stored, used) = match dtype {
        sdpa_core::DType::Bool => (DType::I8, TRUTH),
        sdpa_core::DType::F32
        | sdpa_core::DType::F16
        | sdpa_core::DType::BF16
        | sdpa_core::DType::I32
        | sdpa_core::DType::I64
        | sdpa_core::DType::F8E4M3
        | sdpa_core::DType::F8E5M2
        | sdpa_core::DType::F8E8M0 => (self::dtype(dtype), self::dtype(dtype)),
    };
    // The graph may already contain a lengths tensor of this name, which engines recognise by its name.
    let taken = graph.tensors().iter().any(|t| t.name == name);
    let label = if taken { format!("{name}_spread") } else { name.clone() };
    let tensor = graph.tensor(Tensor::device(label, used, read.to_vec()));
    let supply = if stored == used && read == dims { Supply::Param(name) } else { Supply::Spread { name, dtype: stored, dims } };
    to.supplies.push((tensor, supply));
    tensor
}
