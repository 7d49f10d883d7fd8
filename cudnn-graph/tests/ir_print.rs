//! The text and JSON forms of graphs.

use cudnn_graph::DType::*;
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Graph, Mode, Op, Ragged, Reordering, Scalar, Storage, Tensor, TensorId};

/// Returns a forward op with a score graph, after a mask: tensors of every storage.
fn graph() -> Graph {
    let mut g = Graph::new();
    let q = g.input("q", F16, [1, 2, 4, 8]);
    let k = g.input("k", F16, [1, 1, 4, 8]);
    let scale = g.tensor(Tensor::by_value("scale", F32, Some(Scalar::F32(0.125)), 1));
    let cap = g.parameter("cap", F32);
    let score = g.tensor(Tensor::virtual_("score", F32, [1, 2, 4, 4]));
    let capped = g.tensor(Tensor::virtual_("capped", F32, [1, 2, 4, 4]));
    let o = g.input("o", BF16, [1, 2, 4, 8]);
    let add = Pointwise { mode: Mode::Div, x: score, b: Some(cap), t: None, dy: None, y: capped, compute: F32, params: Params::default() };
    let inner = ScoreGraph { input: score, output: capped, ops: vec![Op::Pointwise(add)] };
    g.push(Op::SdpaForward(Box::new(SdpaForward { attn_scale: Some(scale), score: Some(inner), ..SdpaForward::plain(q, k, k, o) })));
    let index = g.gen_index(o, 3);
    g.output(index, "index", I32);
    g
}

const TEXT: &str = "\
t0 \"q\" f16 [1,2,4,8] strides [64,32,8,1] device
t1 \"k\" f16 [1,1,4,8] strides [32,32,8,1] device
t2 \"scale\" f32 [1] strides [1] by_value(0.125)
t3 \"cap\" f32 [1,1,1,1] strides [1,1,1,1] by_value
t4 \"score\" f32 [1,2,4,4] strides [32,16,4,1] virtual
t5 \"capped\" f32 [1,2,4,4] strides [32,16,4,1] virtual
t6 \"o\" bf16 [1,2,4,8] strides [64,32,8,1] device
t7 \"index\" i32 [1,2,4,8] strides [64,32,8,1] device
o t6 = sdpa_forward(q t0, k t1, v t1, attn_scale t2) score t4 -> t5 {
    y t5 = div(x t4, b t3) compute f32
}
y t7 = gen_index(x t6) compute i32 axis 3
";

#[test]
fn a_graph_prints_as_this() {
    let g = graph();
    assert_eq!(g.to_string(), TEXT);
    assert_eq!(g.verify().unwrap().to_string(), TEXT);
    assert_eq!(Graph::new().to_string(), "");
}

/// Returns a graph of one tensor, which may be invalid.
fn alone(tensor: Tensor) -> Graph {
    let mut g = Graph::new();
    g.tensor(tensor);
    g
}

/// Returns a graph of one op, over tensors that may not exist.
fn only(op: Op) -> Graph {
    let mut g = Graph::new();
    g.push(op);
    g
}

fn ids<const N: usize>() -> [TensorId; N] {
    let mut g = Graph::new();
    std::array::from_fn(|_| g.input("", F32, [1]))
}

fn tensors() -> Vec<Graph> {
    let plain = || Tensor::device("x", F32, [2, 3]);
    let [t0, t1] = ids();
    let ragged = |offsets, multiplier| Some(Ragged { offsets, multiplier });
    let values = [Scalar::F32(1.0), Scalar::F32(0.0), Scalar::F32(-0.0), Scalar::F32(f32::NEG_INFINITY), Scalar::I32(1), Scalar::I64(1)];
    let mut all = vec![
        plain(),
        Tensor { name: "y".to_owned(), ..plain() },
        Tensor { name: "x\" f16".to_owned(), ..plain() },
        Tensor { name: "x\nx".to_owned(), ..plain() },
        Tensor { dims: [3, 2].into(), ..plain() },
        Tensor { strides: [1, 2].into(), ..plain() },
        Tensor { storage: Storage::Virtual, ..plain() },
        Tensor { storage: Storage::ByValue(None), ..plain() },
        Tensor { alignment: 8, ..plain() },
        Tensor { reordering: Reordering::F8x128x4, ..plain() },
        Tensor { ragged: ragged(t0, None), ..plain() },
        Tensor { ragged: ragged(t1, None), ..plain() },
        Tensor { ragged: ragged(t0, Some(64)), ..plain() },
        Tensor { ragged: ragged(t0, Some(128)), ..plain() },
    ];
    all.extend(cudnn_graph::DType::ALL.into_iter().filter(|&d| d != F32).map(|dtype| Tensor { dtype, ..plain() }));
    all.extend(values.map(|value| Tensor { storage: Storage::ByValue(Some(value)), ..plain() }));
    all.extend(values.map(|value| Tensor { storage: Storage::Constant(value), ..plain() }));
    all.into_iter().map(alone).collect()
}

fn pointwise_ops() -> Vec<Op> {
    let [x, b, t, dy, y, other] = ids();
    let plain = || Pointwise { mode: Mode::Add, x, b: Some(b), t: None, dy: None, y, compute: F32, params: Params::default() };
    let none = Params::default();
    let mut all = vec![
        Pointwise { x: other, ..plain() },
        Pointwise { b: None, ..plain() },
        Pointwise { b: Some(other), ..plain() },
        Pointwise { t: Some(t), ..plain() },
        Pointwise { dy: Some(dy), ..plain() },
        Pointwise { y: other, ..plain() },
        Pointwise { compute: I32, ..plain() },
    ];
    all.extend(Mode::ALL.iter().map(|&mode| Pointwise { mode, ..plain() }));
    for value in [0.0, -0.0, 0.5, f64::INFINITY, 0.1 + 0.2] {
        let some = Some(value);
        all.extend(
            [
                Params { relu_lower_clip: some, ..none },
                Params { relu_upper_clip: some, ..none },
                Params { relu_lower_slope: some, ..none },
                Params { elu_alpha: some, ..none },
                Params { softplus_beta: some, ..none },
                Params { swish_beta: some, ..none },
            ]
            .map(|params| Pointwise { params, ..plain() }),
        );
    }
    all.extend([0, 1].map(|axis| Pointwise { params: Params { axis: Some(axis), ..none }, ..plain() }));
    all.into_iter().map(Op::Pointwise).collect()
}

fn linear_ops() -> Vec<Op> {
    let [a, b, c, other] = ids();
    let matmul = || Matmul { a, b, c, m_override: None, n_override: None, k_override: None, padding: None, compute: F32 };
    let reduction = |mode| Reduction { mode, x: a, y: c, compute: F32, deterministic: false };
    let slice = |start, limit, step| Op::Slice(Slice { x: a, y: c, start, limit, step });
    let mut all: Vec<Op> = [
        matmul(),
        Matmul { a: b, b: a, ..matmul() },
        Matmul { c: other, ..matmul() },
        Matmul { m_override: Some(other), ..matmul() },
        Matmul { n_override: Some(other), ..matmul() },
        Matmul { k_override: Some(other), ..matmul() },
        Matmul { padding: Some(0.0), ..matmul() },
        Matmul { padding: Some(-0.0), ..matmul() },
        Matmul { padding: Some(f64::NEG_INFINITY), ..matmul() },
        Matmul { compute: F16, ..matmul() },
    ]
    .map(Op::Matmul)
    .into();
    all.extend(ReductionMode::ALL.map(|mode| Op::Reduction(reduction(mode))));
    all.extend([
        Op::Reduction(Reduction { deterministic: true, ..reduction(ReductionMode::Add) }),
        Op::Reduction(Reduction { compute: F64, ..reduction(ReductionMode::Add) }),
        Op::Reshape(Reshape { x: a, y: c, mode: None }),
        Op::Reshape(Reshape { x: a, y: c, mode: Some(ReshapeMode::ViewOnly) }),
        Op::Reshape(Reshape { x: a, y: c, mode: Some(ReshapeMode::Logical) }),
        Op::Transpose(Transpose { x: a, y: c, permutation: vec![0, 1] }),
        Op::Transpose(Transpose { x: a, y: c, permutation: vec![1, 0] }),
        slice(vec![0], vec![4], vec![1]),
        slice(vec![1], vec![4], vec![1]),
        slice(vec![0], vec![5], vec![1]),
        slice(vec![0], vec![4], vec![2]),
    ]);
    all
}

fn attention_ops() -> Vec<Op> {
    let [x, y, fill, stats, other, more] = ids();
    let softmax = || Softmax { x, y, stats: None, max: None, sum_exp: None, sink: None, stats_log2: false };
    let band = || BandMask { x, y, fill, side: BandSide::Right, shift_right: None, left: None, seq_q: None, seq_kv: None };
    let rng = |distribution| Rng { y, distribution, seed: Seed::Value(1), offset: None };
    let sdpa = || SdpaForward::plain(x, y, fill, stats);
    let dropout =
        |probability, rng_dump| SdpaForward { dropout: Some(Dropout { probability, seed: other, offset: more, rng_dump }), ..sdpa() };
    let score = |input, output, ops| SdpaForward { score: Some(ScoreGraph { input, output, ops }), ..sdpa() };
    let mut all: Vec<Op> = [
        softmax(),
        Softmax { stats: Some(stats), ..softmax() },
        Softmax { max: Some(stats), ..softmax() },
        Softmax { sum_exp: Some(stats), ..softmax() },
        Softmax { sink: Some(stats), ..softmax() },
        Softmax { stats_log2: true, ..softmax() },
    ]
    .map(Op::Softmax)
    .into();
    all.extend(
        [
            band(),
            BandMask { side: BandSide::Left, ..band() },
            BandMask { fill: other, ..band() },
            BandMask { shift_right: Some(other), ..band() },
            BandMask { left: Some(other), ..band() },
            BandMask { seq_q: Some(other), ..band() },
            BandMask { seq_kv: Some(other), ..band() },
        ]
        .map(Op::BandMask),
    );
    all.extend(
        [
            rng(Distribution::Bernoulli(0.5)),
            rng(Distribution::Bernoulli(0.25)),
            rng(Distribution::Uniform(0.0, 1.0)),
            rng(Distribution::Uniform(0.0, 2.0)),
            rng(Distribution::Normal(0.0, 1.0)),
            Rng { seed: Seed::Value(2), ..rng(Distribution::Bernoulli(0.5)) },
            Rng { seed: Seed::Tensor(other), ..rng(Distribution::Bernoulli(0.5)) },
            Rng { offset: Some(other), ..rng(Distribution::Bernoulli(0.5)) },
        ]
        .map(Op::Rng),
    );
    all.extend([
        Op::PagedLoad(PagedLoad { container: x, seq_len: fill, page_table: stats, y }),
        Op::PagedLoad(PagedLoad { container: x, seq_len: stats, page_table: fill, y }),
        Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale: stats, block: vec![32], compute: F32 }),
        Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale: stats, block: vec![16], compute: F32 }),
        Op::BlockScaleDequantize(BlockScaleDequantize { x, y, scale: stats, block: vec![1, 32], compute: F32 }),
        Op::BlockScaleDequantize(BlockScaleDequantize { x, y, scale: stats, block: vec![1, 32], compute: F16 }),
    ]);
    let inner = vec![Op::Softmax(softmax())];
    let forward = [
        sdpa(),
        dropout(0.5, None),
        dropout(0.25, None),
        dropout(0.5, Some(more)),
        score(x, y, vec![]),
        score(y, x, vec![]),
        score(x, y, inner.clone()),
        SdpaForward { attn_scale: Some(other), ..sdpa() },
        SdpaForward { stats: Some(other), ..sdpa() },
        SdpaForward { max: Some(other), ..sdpa() },
        SdpaForward { sum_exp: Some(other), ..sdpa() },
        SdpaForward { sink: Some(other), ..sdpa() },
        SdpaForward { block_mask: Some(other), ..sdpa() },
        SdpaForward { page_table_k: Some(other), ..sdpa() },
        SdpaForward { page_table_v: Some(other), ..sdpa() },
        SdpaForward { seq_len_q: Some(other), ..sdpa() },
        SdpaForward { seq_len_kv: Some(other), ..sdpa() },
        SdpaForward { cu_seq_len_q: Some(other), ..sdpa() },
        SdpaForward { cu_seq_len_kv: Some(other), ..sdpa() },
        SdpaForward {
            fp8: Some(Fp8Scales {
                descale_q: other,
                descale_k: other,
                descale_v: other,
                descale_s: other,
                scale_s: other,
                scale_o: other,
                amax_s: more,
                amax_o: more,
            }),
            ..sdpa()
        },
    ];
    all.extend(forward.map(|op| Op::SdpaForward(Box::new(op))));
    let backward = |attn_scale, seq_len_q, seq_len_kv, score| SdpaBackward {
        q: x,
        k: y,
        v: fill,
        o: stats,
        d_o: other,
        stats: more,
        attn_scale,
        dq: x,
        dk: y,
        dv: fill,
        seq_len_q,
        seq_len_kv,
        score,
    };
    let score = Some(ScoreGraph { input: x, output: y, ops: inner });
    let backward = [
        backward(None, None, None, None),
        backward(Some(x), None, None, None),
        backward(None, Some(x), None, None),
        backward(None, None, Some(x), None),
        backward(None, None, None, score),
    ];
    all.extend(backward.map(|op| Op::SdpaBackward(Box::new(op))));
    all
}

/// Returns graphs that each differ from some other in one field.
fn variants() -> Vec<Graph> {
    let mut all = tensors();
    all.extend(pointwise_ops().into_iter().chain(linear_ops()).chain(attention_ops()).map(only));
    all.push(Graph::new());
    all.push(graph());
    all
}

#[test]
fn different_graphs_print_differently() {
    let mut texts: Vec<String> = variants().iter().map(ToString::to_string).collect();
    let n = texts.len();
    texts.sort();
    for pair in texts.windows(2) {
        assert_ne!(pair[0], pair[1]);
    }
    assert!(n > 150, "{n} graphs");
}

/// JSON has no infinities and no negative zero; both survive the round trip.
#[test]
fn json_gives_the_same_graph_back() {
    for g in variants() {
        let json = serde_json::to_string(&g).unwrap();
        let back: Graph = serde_json::from_str(&json).unwrap_or_else(|e| panic!("{e}: {json}"));
        assert_eq!(back, g, "{json}");
        assert_eq!(back.to_string(), g.to_string(), "{json}");
    }
}
