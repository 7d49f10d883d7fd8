//! The backward pass. The composite form repeats NVIDIA's frontend op by op, because engines match the pattern. That includes the multiplication by
//! one, masks and the subtraction of stats in this order, transpositions as reshapes, and the f32 accumulator.

use super::composite::{product, product_into, scores_like};
use super::dropout::Dropout;
use super::expr::{Draft, Emitter, Pass, Reading, Vectors};
use super::lowered::{Lowered, Supply};
use super::mask::{self, Lengths};
use super::{Form, LowerError, Statistic, dtype, statistic, tensor, transposed};
use crate::quirks::Quirk;
use cudnn_graph::ir::op::{Op, Reduction, ReductionMode, SdpaBackward};
use cudnn_graph::ir::ty::Dims;
use cudnn_graph::ir::{Mode, Ragged, Scalar, Tensor, TensorId};
use cudnn_graph::{DType, Graph, Version};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::expr::{Binary, Node, ParamKind, Place, Precision, Trace, Unary};
use sdpa_core::problem::Problem;
use sdpa_core::{Operand, Side};
use serde::{Deserialize, Serialize};

/// Operand tensors, in the same order in both forms.
pub(super) struct Ports {
    pub(super) operands: Vec<(Operand, TensorId)>,
    pub(super) stats: TensorId,
    pub(super) attn_scale: TensorId,
}

impl Ports {
    pub(super) fn new(to: &mut Draft<'_>, b: &BackwardProblem, view: impl Fn(Tensor) -> Tensor) -> Ports {
        let p = b.forward();
        let mut operands = Vec::new();
        let strided = [
            (Operand::Q, p.q()),
            (Operand::K, p.k()),
            (Operand::V, p.v()),
            (Operand::O, p.o()),
            (Operand::DO, b.d_o()),
            (Operand::DQ, b.dq()),
            (Operand::DK, b.dk()),
            (Operand::DV, b.dv()),
        ];
        for (operand, spec) in strided {
            let plain = tensor(operand, dtype(b.dtype_of(operand)), spec);
            let tensor = if matches!(operand, Operand::K | Operand::V) { view(plain) } else { plain };
            operands.push((operand, super::operand(to, p, tensor, operand)));
        }
        Ports { operands, stats: statistic(to, p, Statistic::Stats), attn_scale: to.graph.parameter("attn_scale", DType::F32) }
    }

    pub(super) fn at(&self, operand: Operand) -> TensorId {
        self.operands.iter().find(|(o, _)| *o == operand).map_or(self.stats, |(_, id)| *id)
    }
}

/// The way in which a backward pass in the composite form computes dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryGradient {
    /// The kernel sums dQ in an f32 accumulator, block by block.
    Summed,
    /// One GEMM computes dQ from dS in the workspace. The workspace grows with the product of the lengths.
    AtOnce,
}

/// The graph pattern of a backward pass in the composite form. A pass can have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spelling {
    /// The way in which dQ is computed.
    pub query_gradient: QueryGradient,
    /// The way in which declared tensors that span queries are read.
    pub vectors: Vectors,
}

impl Spelling {
    /// Returns the graph pattern to try first for a backward pass in the composite form. Engines that sum parameter gradients keep dS in
    /// the workspace. So do the deterministic engines, except one that must be requested by number.
    pub fn usual(b: &BackwardProblem) -> Spelling {
        let at_once = b.deterministic() || b.wrt_scores().next().is_some();
        let query_gradient = if at_once { QueryGradient::AtOnce } else { QueryGradient::Summed };
        Spelling { query_gradient, vectors: Vectors::AlongQueries }
    }
}

pub(super) fn composite(b: &BackwardProblem, runtime: Version, spelling: Spelling) -> Result<Lowered, LowerError> {
    if b.forward().dtype().is_fp8() {
        return super::fp8::backward(b, runtime, spelling);
    }
    let pass = Pass::Backward(spelling.vectors);
    let padded = Side::ALL.iter().any(|&side| b.forward().has_lengths(side));
    if padded && b.gradient().is_some_and(|gradient| !survives_padding(&gradient.trace, b.forward().extents())) {
        return Err(LowerError::Unsupported(NO_NUMBER.to_owned()));
    }
    let (mut g, mut supplies) = (Graph::new(), Vec::new());
    let p = b.forward();
    let to = &mut Draft { graph: &mut g, supplies: &mut supplies };
    let ports = Ports::new(to, b, transposed);
    let lengths = Lengths::of(p);
    let [rows, keys] = lengths.overrides(to, p, runtime);
    let scale = ports.attn_scale;

    let dropout = Dropout::of(to, p);
    let row_sum = row_sum(to, b, &ports, dropout.map_or(1.0, Dropout::unscaled));
    let scores = product(to.graph, [ports.at(Operand::Q), ports.at(Operand::K)], scores_like(p), [rows, keys, None], None);
    let scaled = to.graph.pointwise(Mode::Mul, &[scores, scale]);
    let mut emitter = b.gradient().map(|gradient| (gradient, Emitter::new(&gradient.trace, Reading::new(p, pass), scaled)));
    let modified = match &mut emitter {
        Some((gradient, emitter)) => emitter.emit_inside(to, gradient.trace.roots()[0]),
        None => scaled,
    };
    // Subtract before the masks: stats of −∞ would turn masked-out scores into NaN.
    let shifted = to.graph.pointwise(Mode::Sub, &[modified, ports.stats]);
    let inside = if emitter.is_some() || p.seq_q() == 1 {
        // Works around `Quirk::TilesPastTheEnd` and `Quirk::QueriesPastTheOnly`.
        mask::fill_outside(to, shifted, p, mask::dropped(runtime))
    } else if Quirk::KeysPastTheLast.holds(runtime) {
        mask::fill_past_keys(to, shifted, p, runtime)
    } else {
        shifted
    };
    let masked = mask::apply(to, inside, p, lengths, runtime, pass);
    let weights = to.graph.pointwise(Mode::Exp, &[masked]);
    let left = dropout.map_or(weights, |dropout| {
        let left = dropout.drop(to.graph, weights);
        dropout.scale(to.graph, left)
    });
    let turned = turn(to.graph, p, left);
    fold_heads(to, b, [turned, ports.at(Operand::DO)], ports.at(Operand::DV), [keys, None, rows]);

    let d_weights = product(to.graph, [ports.at(Operand::DO), ports.at(Operand::V)], scores_like(p), [rows, keys, None], None);
    let d_weights = dropout.map_or(d_weights, |dropout| dropout.drop(to.graph, d_weights));
    let centred = to.graph.pointwise(Mode::Sub, &[d_weights, row_sum]);
    let d_modified = to.graph.pointwise(Mode::Mul, &[centred, weights]);
    let d_modified = dropout.map_or(d_modified, |dropout| dropout.scale(to.graph, d_modified));
    let d_scaled = match &mut emitter {
        Some((gradient, emitter)) => {
            emitter.set_upstream(d_modified);
            let d_scaled = emitter.emit_gradient(to, gradient.trace.roots()[1]);
            let mut d_scaled = mask::fill_outside(to, d_scaled, p, 0.0);
            if may_be_infinite(&gradient.trace) || padded {
                d_scaled = mask::fill_dropped(to, d_scaled, p, lengths, (runtime, 0.0), pass);
            }
            parameters(to, b, d_scaled)?;
            d_scaled
        }
        None => d_modified,
    };
    let d_scores = to.graph.pointwise(Mode::Mul, &[d_scaled, scale]);
    let turned = turn(to.graph, p, d_scores);
    fold_heads(to, b, [turned, ports.at(Operand::Q)], ports.at(Operand::DK), [keys, None, rows]);

    let key = p.k();
    let packed = g.get(ports.at(Operand::K)).and_then(|k| k.ragged);
    let key = g.reshape(ports.at(Operand::K), key.dims, key.strides, None);
    g.set_ragged(key, packed);
    g.set_dtype(key, dtype(p.dtype()));
    let dq = ports.at(Operand::DQ);
    if spelling.query_gradient == QueryGradient::AtOnce {
        product_into(&mut g, [d_scores, key], dq, [rows, None, keys], None);
    } else {
        let mut sum = Tensor::device("dq_sum", DType::F32, [p.batch(), p.heads_q(), p.seq_q(), p.dim_qk()]);
        if sums_are_packed(b)
            && let Some(dq) = g.get(dq)
        {
            (sum.strides, sum.ragged) = (dq.strides.clone(), dq.ragged);
        }
        let sum = g.tensor(sum);
        supplies.push((sum, Supply::Scratch));
        product_into(&mut g, [d_scores, key], sum, [rows, None, keys], None);
        g.pointwise_into(Mode::Identity, &[sum], dq);
    }
    let Ports { operands, stats, attn_scale } = ports;
    let (stats, row_sum, totals) = (Some(stats), Some(row_sum), Side::ALL.map(|side| p.total(side)));
    Ok(Lowered {
        graph: g.verify()?,
        form: Form::Composite,
        spelling: Some(spelling),
        operands,
        attn_scale,
        stats,
        row_max: None,
        sum_exp: None,
        row_sum,
        totals,
        supplies,
    })
}

/// Why padding is refused with some score_mods.
const NO_NUMBER: &str = "padding with a score_mod that is NaN at −∞: cuDNN's engines pass −∞ to score_mods past the lengths; \
                                    use the cpu executor, or pass the lengths as a mask tensor";

/// Returns whether a score_mod, and its derivative if the trace has it, are not NaN for a score of −∞ at the ends of the indices.
fn survives_padding(trace: &Trace, extents: [i64; 4]) -> bool {
    let params = vec![1.0; trace.params().len()];
    (0..16).all(|corner| {
        let index = [0, 1, 2, 3].map(|axis| if corner >> axis & 1 == 0 { 0 } else { extents[axis] - 1 });
        let place = Place { score: f64::NEG_INFINITY, upstream: 0.0, index, extents, params: &params };
        trace.eval(&place, Precision::F32).iter().take(2).all(|x| !x.is_nan())
    })
}

/// Returns whether a masked-out score may have a derivative that is not finite, which a factor of 0 would turn into NaN. Past the lengths of a batch
/// entry any score_mod may: engines put NaN there.
fn may_be_infinite(trace: &Trace) -> bool {
    trace.nodes().iter().any(|node| match node {
        Node::Unary(f, _) => matches!(f, Unary::Log | Unary::Sqrt | Unary::Rsqrt | Unary::Exp),
        Node::Binary(f, _, _) => matches!(f, Binary::Div | Binary::Mod | Binary::Pow),
        Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => false,
        Node::Read(..) | Node::Select(..) => false,
    })
}

/// Returns whether row sums in the workspace are packed, if that takes less memory than a slot for each query of the longest sequence. With 72
/// elements per query, dQ is wrong then (H200, 9.19), as NVIDIA's frontend knows; so it is if the head stride exceeds the token stride.
fn sums_are_packed(b: &BackwardProblem) -> bool {
    let (p, [_, head, token, _]) = (b.forward(), b.dq().strides);
    p.packed().is_some() && p.dim_qk() % 16 == 0 && head < token && p.total(Side::Queries) < p.batch() * p.seq_q()
}

/// Emits Σ o·d_o of each row, times a factor, in device memory. Engines recognise it by the multiplication, even if the factor is one.
fn row_sum(to: &mut Draft<'_>, b: &BackwardProblem, ports: &Ports, factor: f32) -> TensorId {
    let p = b.forward();
    let row = [p.batch(), p.heads_q(), p.seq_q(), 1];
    let g = &mut *to.graph;
    let products = g.pointwise(Mode::Mul, &[ports.at(Operand::DO), ports.at(Operand::O)]);
    let sums = g.reduce(ReductionMode::Add, products, row);
    let factor = g.scalar(Scalar::F32(factor));
    let sums = g.pointwise(Mode::Mul, &[sums, factor]);
    g.output(sums, "row_sum", DType::F32);
    if sums_are_packed(b)
        && let Some((strides, packed)) = g.get(ports.stats).map(|stats| (stats.strides.clone(), stats.ragged))
    {
        g.set_strides(sums, strides);
        g.set_ragged(sums, packed);
    }
    to.supplies.push((sums, Supply::Scratch));
    sums
}

/// Transposes scores, in the element type of the operands: a view with swapped extents and strides.
fn turn(g: &mut Graph, p: &Problem, scores: TensorId) -> TensorId {
    turned(g, p, scores, dtype(p.dtype()))
}

/// Emits the transposition of scores, in element type `dtype`.
pub(super) fn turned(g: &mut Graph, p: &Problem, scores: TensorId, dtype: DType) -> TensorId {
    let [batch, heads, seq_q, seq_kv] = p.extents();
    let strides = [heads * seq_q * seq_kv, seq_q * seq_kv, 1, seq_kv];
    let turned = g.reshape(scores, [batch, heads, seq_kv, seq_q], strides, None);
    g.set_dtype(turned, dtype)
}

/// Emits a GEMM in f32 with a head for each KV head: the sum over the query heads of a GQA group.
pub(super) fn fold(to: &mut Draft<'_>, b: &BackwardProblem, factors: [TensorId; 2], overrides: [Option<TensorId>; 3]) -> TensorId {
    let p = b.forward();
    let dim = to.graph.get(factors[1]).and_then(|t| t.dims.0.last().copied()).unwrap_or(1);
    let full = product(to.graph, factors, Dims::from([p.batch(), p.heads_q(), p.seq_kv(), dim]), overrides, None);
    if p.group() == 1 { full } else { to.graph.reduce(ReductionMode::Add, full, [p.batch(), p.heads_kv(), p.seq_kv(), dim]) }
}

/// Emits a GEMM with a head for each query head, and sums it over GQA groups into `into`.
fn fold_heads(to: &mut Draft<'_>, b: &BackwardProblem, factors: [TensorId; 2], into: TensorId, overrides: [Option<TensorId>; 3]) {
    let p = b.forward();
    let g = &mut *to.graph;
    if p.group() == 1 {
        product_into(g, factors, into, overrides, None);
        return;
    }
    let dim = g.get(factors[1]).and_then(|t| t.dims.0.last().copied()).unwrap_or(1);
    let full = product(g, factors, Dims::from([p.batch(), p.heads_q(), p.seq_kv(), dim]), overrides, None);
    g.set_dtype(full, dtype(p.dtype()));
    if let Some((strides, packed)) = heads_in_workspace(g, p, into) {
        let name = format!("{}_of_heads_q", g.get(into).map_or("gradient", |t| &t.name));
        g.output(full, &name, dtype(p.dtype()));
        g.set_strides(full, strides);
        g.set_ragged(full, packed);
        to.supplies.push((full, Supply::Scratch));
    }
    g.push(Op::Reduction(Reduction { mode: ReductionMode::Add, x: full, y: into, compute: DType::F32, deterministic: false }));
}

/// Returns strides for a per-query-head gradient, and its offsets in units that are larger by the group size, if it can be packed like the sequences.
/// Engines then reserve that much workspace; otherwise they reserve a slot for each key of the longest sequence.
fn heads_in_workspace(g: &Graph, p: &Problem, gradient: TensorId) -> Option<([i64; 4], Option<Ragged>)> {
    let tensor = g.get(gradient)?;
    let [batch, head, token, dim] = tensor.strides.0[..] else { return None };
    let dense = tensor.dims.0.last() == Some(&head) && token == p.heads_kv() * head;
    let saves = 2 * p.total(Side::Keys) < p.batch() * p.seq_kv();
    (p.packed().is_some() && p.dim_qk() % 16 == 0 && p.dim_v() % 16 == 0 && dense && saves)
        .then_some(([batch * p.group(), head, token * p.group(), dim], tensor.ragged))
}

/// Emits gradients of declared parameters. Engines sum only the gradient that is then multiplied by the scale: that of a tensor that is added to the
/// score first.
fn parameters(to: &mut Draft<'_>, b: &BackwardProblem, d_scaled: TensorId) -> Result<(), LowerError> {
    let Some(gradient) = b.gradient() else { return Ok(()) };
    let roots = gradient.trace.roots();
    for (n, wanted) in b.wrt_scores().enumerate() {
        let name = &wanted.name;
        if roots[2 + n] != roots[1] {
            let rule = format!(
                "the gradient of parameter {name} is not supported: cuDNN's engines sum only the gradient of a tensor that is added to \
                 the score before other score_mods; the cpu executor computes every gradient"
            );
            return Err(LowerError::Unsupported(rule));
        }
        if dtype(wanted.dtype) == DType::F32 {
            let rule = format!(
                "the gradient of parameter {name} in f32 is not supported: cuDNN's engines sum it in f16 and bf16 only; request one of \
                 these types"
            );
            return Err(LowerError::Unsupported(rule));
        }
        let kind = b.params().iter().find(|p| p.name == *name).map(|p| p.kind);
        let Some(ParamKind::Tensor { axes, dtype: _ }) = kind else {
            return Err(LowerError::Unsupported(format!(
                "the gradient of the scalar {name} is not supported: cuDNN's engines compute no gradient of a scalar"
            )));
        };
        let extents = b.forward().extents();
        let dims = axes.dims(extents);
        // Engines sum correctly over batch entries and heads. Sums over queries or keys are wrong or rounded on the way (H200, 9.19 and 9.27, every
        // set of axes).
        let written = [dims[0], dims[1], extents[2], extents[3]];
        let tensor = to.graph.tensor(Tensor::device(format!("d_{name}"), dtype(wanted.dtype), written.to_vec()));
        to.graph.push(Op::Reduction(Reduction {
            mode: ReductionMode::Add,
            x: d_scaled,
            y: tensor,
            compute: DType::F32,
            deterministic: false,
        }));
        let name = name.clone();
        to.supplies.push((tensor, if written == dims { Supply::Gradient(name) } else { Supply::Terms { name, dims } }));
    }
    Ok(())
}

pub(super) fn unified(b: &BackwardProblem) -> Result<Lowered, LowerError> {
    let p = b.forward();
    if !p.kept().is_full() || b.gradient().is_some() {
        return Err(LowerError::Unsupported("the unified backward op supports plain attention only; use the composite form".to_owned()));
    }
    if p.dropout().is_some() {
        return Err(LowerError::Unsupported(super::unified::DROPS_NOTHING.to_owned()));
    }
    if b.sink_gradient().is_some() {
        return Err(LowerError::Unsupported(
            "the unified backward op returns no row sums, which the gradient of the sink needs; use the composite form".to_owned(),
        ));
    }
    let mut g = Graph::new();
    let mut supplies = Vec::new();
    let ports = Ports::new(&mut Draft { graph: &mut g, supplies: &mut supplies }, b, |tensor| tensor);
    let at = |operand| ports.at(operand);
    g.push(Op::SdpaBackward(Box::new(SdpaBackward {
        q: at(Operand::Q),
        k: at(Operand::K),
        v: at(Operand::V),
        o: at(Operand::O),
        d_o: at(Operand::DO),
        stats: ports.stats,
        attn_scale: Some(ports.attn_scale),
        dq: at(Operand::DQ),
        dk: at(Operand::DK),
        dv: at(Operand::DV),
        seq_len_q: None,
        seq_len_kv: None,
        score: None,
    })));
    let Ports { operands, stats, attn_scale } = ports;
    let (stats, totals) = (Some(stats), Side::ALL.map(|side| p.total(side)));
    Ok(Lowered {
        graph: g.verify()?,
        form: Form::Unified,
        spelling: None,
        operands,
        attn_scale,
        stats,
        row_max: None,
        sum_exp: None,
        row_sum: None,
        totals,
        supplies,
    })
}
