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

fn image_ops() -> Vec<Op> {
    let [x, w, y, index, other] = ids();
    let geometry = || ConvGeometry::new(2);
    let geometries = [
        geometry(),
        geometry().stride([1, 2]),
        geometry().dilation([1, 2]),
        geometry().padding([0, 1]).post_padding([0, 0]),
        geometry().post_padding([0, 1]),
    ];
    let conv = |geometry, compute| ConvForward { x, w, y, geometry, compute };
    let mut all: Vec<Op> = geometries.iter().map(|g| Op::ConvForward(conv(g.clone(), F32))).collect();
    all.extend([
        Op::ConvForward(conv(geometry(), F16)),
        Op::ConvForward(ConvForward { x: other, ..conv(geometry(), F32) }),
        Op::ConvForward(ConvForward { w: other, ..conv(geometry(), F32) }),
        Op::ConvBackwardData(ConvBackwardData { dy: x, w, dx: y, geometry: geometry(), compute: F32 }),
        Op::ConvBackwardData(ConvBackwardData { dy: x, w: other, dx: y, geometry: geometry(), compute: F32 }),
        Op::ConvBackwardFilter(ConvBackwardFilter { dy: x, x: w, dw: y, geometry: geometry(), compute: F32 }),
        Op::ConvBackwardFilter(ConvBackwardFilter { dy: x, x: other, dw: y, geometry: geometry(), compute: F32 }),
    ]);
    let window = || Window::new([2, 2]);
    let windows = [
        window(),
        Window { extent: vec![2, 3], ..window() },
        window().stride([1, 2]),
        window().padding([0, 1]).post_padding([0, 0]),
        window().post_padding([0, 1]),
    ];
    let pool = |mode, window| ResampleForward { mode, x, y, index: None, window, compute: F32 };
    all.extend(windows.map(|window| Op::ResampleForward(pool(ResampleMode::Max, window))));
    all.extend([
        Op::ResampleForward(pool(ResampleMode::AverageIncludePadding, window())),
        Op::ResampleForward(pool(ResampleMode::AverageExcludePadding, window())),
        Op::ResampleForward(ResampleForward { index: Some(index), ..pool(ResampleMode::Max, window()) }),
        Op::ResampleForward(ResampleForward { compute: F16, ..pool(ResampleMode::Max, window()) }),
    ]);
    let back = |index, x, y| ResampleBackward { mode: ResampleMode::Max, dy: w, dx: other, index, x, y, window: window(), compute: F32 };
    all.extend(
        [back(None, None, None), back(Some(index), None, None), back(None, Some(x), None), back(None, None, Some(y))]
            .map(Op::ResampleBackward),
    );
    let up = |x, y, compute| Op::Upsample(Upsample { x, y, compute });
    all.extend([up(x, y, F32), up(w, y, F32), up(x, other, F32), up(x, y, F16)]);
    all
}

fn norm_ops() -> Vec<Op> {
    let [x, scale, epsilon, y, bias, mean, inverse, other] = ids();
    let forward = |mode| NormForward { mode, x, scale, bias: None, epsilon, y, mean: None, inv_variance: None, running: None };
    let stats = RunningStats { factor: x, mean: scale, variance: epsilon, next_mean: y, next_variance: bias };
    let changed = [
        RunningStats { factor: other, ..stats },
        RunningStats { mean: other, ..stats },
        RunningStats { variance: other, ..stats },
        RunningStats { next_mean: other, ..stats },
        RunningStats { next_variance: other, ..stats },
    ];
    let plain = || forward(NormMode::Layer);
    let mut all: Vec<Op> = NormMode::ALL.map(|mode| Op::NormForward(forward(mode))).into();
    all.extend([stats].into_iter().chain(changed).map(|s| Op::NormForward(NormForward { running: Some(s), ..plain() })));
    all.extend(
        [
            NormForward { bias: Some(bias), ..plain() },
            NormForward { mean: Some(mean), ..plain() },
            NormForward { inv_variance: Some(inverse), ..plain() },
            NormForward { epsilon: other, ..plain() },
            NormForward { scale: other, ..plain() },
        ]
        .map(Op::NormForward),
    );
    let backward = |mode, mean, dbias| NormBackward { mode, x, dy: y, scale, mean, inv_variance: inverse, dx: bias, dscale: other, dbias };
    all.extend(
        [
            backward(NormMode::Layer, None, None),
            backward(NormMode::Rms, None, None),
            backward(NormMode::Layer, Some(mean), None),
            backward(NormMode::Layer, None, Some(epsilon)),
        ]
        .map(Op::NormBackward),
    );
    let finalize = |count, running, compute| {
        Op::BnFinalize(BnFinalize {
            sum: x,
            square_sum: scale,
            scale: bias,
            bias: mean,
            epsilon,
            count,
            running,
            mean: inverse,
            inv_variance: other,
            eq_scale: y,
            eq_bias: x,
            compute,
        })
    };
    let weights = BnBackwardWeights {
        x,
        dy: y,
        scale,
        mean,
        inv_variance: inverse,
        dscale: bias,
        dbias: epsilon,
        eq_scale_dy: other,
        eq_scale_x: x,
        eq_bias: y,
        compute: F32,
    };
    all.extend(
        [
            weights.clone(),
            BnBackwardWeights { dy: x, ..weights.clone() },
            BnBackwardWeights { scale: x, ..weights.clone() },
            BnBackwardWeights { mean: x, ..weights.clone() },
            BnBackwardWeights { inv_variance: x, ..weights.clone() },
            BnBackwardWeights { dscale: x, ..weights.clone() },
            BnBackwardWeights { dbias: x, ..weights.clone() },
            BnBackwardWeights { eq_scale_dy: x, ..weights.clone() },
            BnBackwardWeights { eq_scale_x: y, ..weights.clone() },
            BnBackwardWeights { eq_bias: x, ..weights.clone() },
            BnBackwardWeights { compute: F64, ..weights },
        ]
        .map(Op::BnBackwardWeights),
    );
    all.extend([
        Op::GenStats(GenStats { x, sum: y, square_sum: other, compute: F32 }),
        Op::GenStats(GenStats { x, sum: other, square_sum: y, compute: F32 }),
        Op::GenStats(GenStats { x, sum: y, square_sum: other, compute: F64 }),
        finalize(other, stats, F32),
        finalize(x, stats, F32),
        finalize(other, RunningStats { mean: other, ..stats }, F32),
        finalize(other, stats, F64),
    ]);
    all
}

fn expert_ops() -> Vec<Op> {
    let [a, b, c, y, index, slot] = ids();
    let moe = |routing, compute| Op::MoeMatmul(MoeMatmul { tokens: a, weights: b, first_token: c, routing, y, compute });
    let rope = |scale, width| Op::Rope(Rope { x: a, angles: b, y, scale, width });
    vec![
        Op::Concat(Concat { inputs: vec![a, b], y, axis: 0 }),
        Op::Concat(Concat { inputs: vec![b, a], y, axis: 0 }),
        Op::Concat(Concat { inputs: vec![a, b, c], y, axis: 0 }),
        Op::Concat(Concat { inputs: vec![a, b], y, axis: 1 }),
        moe(Routing::None, F32),
        moe(Routing::None, F16),
        moe(Routing::Gather(index), F32),
        moe(Routing::Gather(slot), F32),
        moe(Routing::Scatter { index, slot, top_k: 2 }, F32),
        moe(Routing::Scatter { index, slot, top_k: 3 }, F32),
        moe(Routing::Scatter { index: slot, slot: index, top_k: 2 }, F32),
        Op::MoeMatmulBackward(MoeMatmulBackward { tokens: a, dy: b, first_token: c, dweights: y, compute: F32 }),
        Op::MoeMatmulBackward(MoeMatmulBackward { tokens: b, dy: a, first_token: c, dweights: y, compute: F32 }),
        rope(1.0, None),
        rope(0.5, None),
        rope(f32::INFINITY, None),
        rope(1.0, Some(4)),
        Op::RopeBackward(RopeBackward { dy: a, angles: b, dx: y, scale: 1.0, width: None }),
        Op::RopeBackward(RopeBackward { dy: a, angles: b, dx: y, scale: 1.0, width: Some(4) }),
    ]
}

/// Returns graphs that each differ from some other in one field.
fn variants() -> Vec<Graph> {
    let mut all = tensors();
    let others = linear_ops().into_iter().chain(attention_ops()).chain(image_ops()).chain(norm_ops()).chain(expert_ops());
    all.extend(pointwise_ops().into_iter().chain(others).map(only));
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
