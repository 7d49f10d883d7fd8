//! Rules of GEMMs, reductions, moves, random numbers, softmax, masks, pages and scales.

use crate::*;

fn matmul_of([a, b, c]: [TensorId; 3]) -> Matmul {
    Matmul { a, b, c, m_override: None, n_override: None, k_override: None, padding: None, compute: F32 }
}

fn matmul(a: &[i64], b: &[i64], c: &[i64]) -> impl FnOnce(&mut Graph) + use<> {
    over_inputs([("a", F16, a), ("b", F16, b), ("c", F32, c)], |ids| Op::Matmul(matmul_of(ids)))
}

#[test]
fn matmul_rules() {
    good(matmul(&[2, 8, 5, 4], &[2, 2, 4, 7], &[2, 8, 5, 7]));
    good(matmul(&[1, 1, 5, 4], &[2, 2, 4, 7], &[2, 2, 5, 7]));
    good(matmul(&[5, 4], &[4, 7], &[5, 7]));
    let with_override = |field: &'static str, rank3: bool, dims: &'static [i64], dtype| {
        move |g: &mut Graph| {
            let (a, b, c): (&[i64], &[i64], &[i64]) =
                if rank3 { (&[2, 5, 4], &[2, 4, 7], &[2, 5, 7]) } else { (&[5, 4], &[4, 7], &[5, 7]) };
            let ids = [("a", a), ("b", b), ("c", c)].map(|(name, dims)| g.input(name, F32, dims));
            let length = Some(g.input("length", dtype, dims));
            let plain = matmul_of(ids);
            g.push(Op::Matmul(match field {
                "m" => Matmul { m_override: length, ..plain },
                "n" => Matmul { n_override: length, ..plain },
                _ => Matmul { k_override: length, ..plain },
            }));
        }
    };
    good(with_override("m", true, &[2, 1, 1], I32));
    check(vec![
        case("= matmul(", "a, b and c have ranks 1, 1 and 1, expected one rank of at least 2", matmul(&[4], &[4], &[4])),
        case("= matmul(", "ranks 2, 3 and 2", matmul(&[5, 4], &[1, 4, 7], &[5, 7])),
        case("= matmul(", "a has 4 inner elements, b 3", matmul(&[5, 4], &[3, 7], &[5, 7])),
        case("= matmul(", "c has 6 rows, a 5", matmul(&[5, 4], &[4, 7], &[6, 7])),
        case("= matmul(", "c has 6 columns, b 7", matmul(&[5, 4], &[4, 7], &[5, 6])),
        case("= matmul(", "axis 0 of b (3) does not divide that of a (8)", matmul(&[8, 5, 4], &[3, 4, 7], &[8, 5, 7])),
        case("= matmul(", "axis 0 of b (8) does not divide that of a (2)", matmul(&[2, 5, 4], &[8, 4, 7], &[8, 5, 7])),
        case("= matmul(", "axis 0 of c is 4, not 8", matmul(&[8, 5, 4], &[4, 4, 7], &[4, 5, 7])),
        case(
            "= matmul(",
            "a t0 is bool, not a number",
            over_inputs([("a", Bool, &[5, 4]), ("b", F16, &[4, 7]), ("c", F32, &[5, 7])], |ids| Op::Matmul(matmul_of(ids))),
        ),
        case(
            "= matmul(",
            "computes in f8e4m3",
            over_inputs([("a", F16, &[5, 4]), ("b", F16, &[4, 7]), ("c", F32, &[5, 7])], |ids| {
                Op::Matmul(Matmul { compute: F8E4M3, ..matmul_of(ids) })
            }),
        ),
        case(
            "= matmul(",
            "padding is not a number",
            over_inputs([("a", F16, &[5, 4]), ("b", F16, &[4, 7]), ("c", F32, &[5, 7])], |ids| {
                Op::Matmul(Matmul { padding: Some(f64::NAN), ..matmul_of(ids) })
            }),
        ),
        case("= matmul(", "m_override t3 is [2,1], not [2,1,1]", with_override("m", true, &[2, 1], I32)),
        case("= matmul(", "n_override t3 is [1,1,1], not [2,1,1]", with_override("n", true, &[1, 1, 1], I32)),
        case("= matmul(", "k_override t3 is f32, not an integer", with_override("k", true, &[2, 1, 1], F32)),
        case("= matmul(", "k_override t3 needs a batch axis", with_override("k", false, &[1, 1], I32)),
    ]);
}

fn two<F: FnOnce(TensorId, TensorId) -> Op>(x: (DType, &[i64]), y: (DType, &[i64]), op: F) -> impl FnOnce(&mut Graph) + use<F> {
    over_inputs([("x", x.0, x.1), ("y", y.0, y.1)], |[x, y]| op(x, y))
}

#[test]
fn reduction_and_move_rules() {
    let reduce = |compute| move |x, y| Op::Reduction(Reduction { mode: ReductionMode::Add, x, y, compute, deterministic: false });
    let reshape = |mode| move |x, y| Op::Reshape(Reshape { x, y, mode });
    let transpose = |axes: &[i64]| {
        let permutation = axes.to_vec();
        move |x, y| Op::Transpose(Transpose { x, y, permutation })
    };
    let slice = |start: &[i64], limit: &[i64], step: &[i64]| {
        let (start, limit, step) = (start.to_vec(), limit.to_vec(), step.to_vec());
        move |x, y| Op::Slice(Slice { x, y, start, limit, step })
    };
    good(two((F32, &[2, 8, 5]), (F32, &[2, 2, 1]), reduce(F32)));
    // The extent is 1 already, so there is nothing to reduce.
    good(two((F32, &[2, 1]), (F32, &[2, 1]), reduce(F32)));
    good(two((F32, &[2, 3, 4]), (F16, &[2, 4, 3]), reshape(None)));
    good(two((F32, &[2, 3, 4]), (F32, &[4, 2, 3]), transpose(&[2, 0, 1])));
    good(two((F32, &[9, 4]), (F32, &[3, 2]), slice(&[1, 2], &[8, 4], &[3, 1])));
    check(vec![
        case("= reduction(", "x has 2 axes, y 1", two((F32, &[2, 3]), (F32, &[2]), reduce(F32))),
        case("= reduction(", "axis 1 of y (2) does not divide that of x (3)", two((F32, &[2, 3]), (F32, &[1, 2]), reduce(F32))),
        case("= reduction(", "x t0 is bool", two((Bool, &[2, 3]), (F32, &[2, 1]), reduce(F32))),
        case("= reduction(", "y t1 is bool", two((F32, &[2, 3]), (Bool, &[2, 1]), reduce(F32))),
        case("= reduction(", "computes in bool", two((F32, &[2, 3]), (F32, &[2, 1]), reduce(Bool))),
        case("= reshape(", "x [2,3] and y [5] do not have the same number of elements", two((F32, &[2, 3]), (F32, &[5]), reshape(None))),
        case(
            "= reshape(",
            "do not have the same number of elements",
            two((F32, &[2, 3]), (F32, &[5]), reshape(Some(ReshapeMode::ViewOnly))),
        ),
        case(
            "= reshape(",
            "do not have the same number of elements",
            two((F32, &[2, 3]), (F32, &[5]), reshape(Some(ReshapeMode::Logical))),
        ),
        case("= reshape(", "x t0 is bool, but y t1 is f32", two((Bool, &[2, 3]), (F32, &[6]), reshape(None))),
        case("= transpose(", "[0,0] is not a permutation of the 2 axes of x", two((F32, &[2, 3]), (F32, &[2, 2]), transpose(&[0, 0]))),
        case("= transpose(", "[0] is not a permutation of the 2 axes of x", two((F32, &[2, 3]), (F32, &[2]), transpose(&[0]))),
        case("= transpose(", "[2,0] is not a permutation", two((F32, &[2, 3]), (F32, &[2, 3]), transpose(&[2, 0]))),
        case("= transpose(", "y t1 is [2,3], not [3,2]", two((F32, &[2, 3]), (F32, &[2, 3]), transpose(&[1, 0]))),
        case("= transpose(", "y t1 is f16, expected f32 as x t0", two((F32, &[2, 3]), (F16, &[3, 2]), transpose(&[1, 0]))),
        case(
            "= slice(",
            "got [1, 1, 2] starts, limits and steps, expected 1 of each",
            two((F32, &[9]), (F32, &[3]), slice(&[0], &[9], &[3, 1])),
        ),
        case(
            "= slice(",
            "the range -1..9 is outside of axis 0, which has 9 elements",
            two((F32, &[9]), (F32, &[9]), slice(&[-1], &[9], &[1])),
        ),
        case("= slice(", "the range 3..3 is outside of axis", two((F32, &[9]), (F32, &[1]), slice(&[3], &[3], &[1]))),
        case("= slice(", "the range 0..10 is outside of axis", two((F32, &[9]), (F32, &[9]), slice(&[0], &[10], &[1]))),
        case("= slice(", "step 0 of axis 0 is below 1", two((F32, &[9]), (F32, &[9]), slice(&[0], &[9], &[0]))),
        case("= slice(", "y t1 is [3], not [4]", two((F32, &[9]), (F32, &[3]), slice(&[1], &[8], &[2]))),
        case("= slice(", "y t1 is f16, expected f32 as x t0", two((F32, &[9]), (F16, &[9]), slice(&[0], &[9], &[1]))),
    ]);
}

#[test]
fn rng_rules() {
    let rng = |distribution, y: DType| {
        over_inputs([("y", y, &[2])], move |[y]| Op::Rng(Rng { y, distribution, seed: Seed::Value(1), offset: None }))
    };
    let seeded = |seed: (DType, &'static [i64]), offset: (DType, &'static [i64])| {
        over_inputs([("y", F32, &[2]), ("seed", seed.0, seed.1), ("offset", offset.0, offset.1)], |[y, seed, offset]| {
            Op::Rng(Rng { y, distribution: Distribution::Bernoulli(0.5), seed: Seed::Tensor(seed), offset: Some(offset) })
        })
    };
    good(rng(Distribution::Bernoulli(1.0), F32));
    good(seeded((I64, &[1, 1, 1, 1]), (I64, &[1])));
    check(vec![
        case("= rng(", "y t0 is bool", rng(Distribution::Bernoulli(0.5), Bool)),
        case("= rng(", "probability 1.5 is not in [0, 1]", rng(Distribution::Bernoulli(1.5), F32)),
        case("= rng(", "probability NaN is not", rng(Distribution::Bernoulli(f64::NAN), F32)),
        case("= rng(", "the interval 2 to 1 is empty", rng(Distribution::Uniform(2.0, 1.0), F32)),
        case("= rng(", "the interval 0 to inf is empty", rng(Distribution::Uniform(0.0, f64::INFINITY), F32)),
        case("= rng(", "deviation -1 describe no distribution", rng(Distribution::Normal(0.0, -1.0), F32)),
        case("= rng(", "seed t1 is f32, not an integer", seeded((F32, &[1]), (I64, &[1]))),
        case("= rng(", "offset t2 is [2], not one element", seeded((I64, &[1]), (I64, &[2]))),
        case("= rng(", "seed t1 has strides [4,1], expected 1 along every axis", |g| {
            let y = g.input("y", F32, [2]);
            let seed = g.tensor(Tensor::device("seed", I64, [1, 1]).strides([4, 1]));
            let distribution = Distribution::Bernoulli(0.5);
            g.push(Op::Rng(Rng { y, distribution, seed: Seed::Tensor(seed), offset: None }));
        }),
    ]);
}

#[test]
fn softmax_rules() {
    struct S {
        x: DType,
        y: (DType, Vec<i64>),
        stats: (DType, Vec<i64>),
        sink: (DType, Vec<i64>),
    }
    let softmax = |spoil: fn(&mut S)| {
        let mut s = S { x: F32, y: (F16, vec![2, 4, 5, 7]), stats: (F32, vec![2, 4, 5, 1]), sink: (F32, vec![1, 4, 1, 1]) };
        spoil(&mut s);
        let n = [("x", s.x, &[2, 4, 5, 7][..]), ("y", s.y.0, &s.y.1), ("stats", s.stats.0, &s.stats.1), ("sink", s.sink.0, &s.sink.1)];
        over_inputs(n, |[x, y, stats, sink]| {
            Op::Softmax(Softmax { x, y, stats: Some(stats), max: None, sum_exp: None, sink: Some(sink), stats_log2: true })
        })
    };
    good(softmax(|_| {}));
    check(vec![
        case("= softmax(", "x t0 is i32, not a float", softmax(|s| s.x = I32)),
        case("= softmax(", "y t1 is bool, not a float", softmax(|s| s.y.0 = Bool)),
        case("= softmax(", "y t1 is [2,4,5,1], not [2,4,5,7]", softmax(|s| s.y.1 = vec![2, 4, 5, 1])),
        case("= softmax(", "stats t2 is [2,4,5,7], not [2,4,5,1]", softmax(|s| s.stats.1 = vec![2, 4, 5, 7])),
        case("= softmax(", "stats t2 is f16, not f32", softmax(|s| s.stats.0 = F16)),
        case("= softmax(", "sink t3 is f16, not f32", softmax(|s| s.sink.0 = F16)),
        case("= softmax(", "sink t3 is [1,2,1,1], not [1,4,1,1]", softmax(|s| s.sink.1 = vec![1, 2, 1, 1])),
        case(
            "= softmax(",
            "max t2 is [3,1], not [2,1]",
            over_inputs([("x", F32, &[2, 3]), ("y", F32, &[2, 3]), ("max", F32, &[3, 1])], |[x, y, max]| {
                Op::Softmax(Softmax { x, y, stats: None, max: Some(max), sum_exp: None, sink: None, stats_log2: false })
            }),
        ),
        case(
            "= softmax(",
            "sum_exp t2 is f64, not f32",
            over_inputs([("x", F32, &[2, 3]), ("y", F32, &[2, 3]), ("sum", F64, &[2, 1])], |[x, y, sum]| {
                Op::Softmax(Softmax { x, y, stats: None, max: None, sum_exp: Some(sum), sink: None, stats_log2: false })
            }),
        ),
        case(
            "= softmax(",
            "sink t2 needs scores (b, h, s_q, s_kv)",
            over_inputs([("x", F32, &[2, 3]), ("y", F32, &[2, 3]), ("sink", F32, &[1, 1])], |[x, y, sink]| {
                Op::Softmax(Softmax { x, y, stats: None, max: None, sum_exp: None, sink: Some(sink), stats_log2: false })
            }),
        ),
        case(
            "= softmax(",
            "stats_log2 is set, but there is no stats",
            over_inputs([("x", F32, &[2, 3]), ("y", F32, &[2, 3])], |[x, y]| {
                Op::Softmax(Softmax { x, y, stats: None, max: None, sum_exp: None, sink: None, stats_log2: true })
            }),
        ),
    ]);
}

#[test]
fn band_mask_rules() {
    /// The operands of a band mask, with their types and extents.
    struct B {
        side: BandSide,
        x: Vec<i64>,
        y: Vec<i64>,
        dtype: DType,
        fill: Tensor,
        shift: Option<Tensor>,
        left: Option<Tensor>,
        q: Option<Tensor>,
        kv: Option<Tensor>,
    }
    let number = |name: &str, dtype| Tensor::by_value(name, dtype, None, 1);
    let band = |side, spoil: fn(&mut B)| {
        let x = vec![2, 4, 5, 7];
        let lengths = |name| Some(Tensor::device(name, I32, [2, 1, 1, 1]));
        let (shift, left) = match side {
            BandSide::Right => (Some(number("shift", I32)), None),
            BandSide::Left => (None, Some(number("left", F32))),
        };
        let mut b =
            B { side, y: x.clone(), x, dtype: F32, fill: number("fill", F32), shift, left, q: lengths("seq_q"), kv: lengths("seq_kv") };
        spoil(&mut b);
        move |g: &mut Graph| {
            let (x, y) = (g.input("x", b.dtype, b.x), g.input("y", b.dtype, b.y));
            let fill = g.tensor(b.fill);
            let [shift_right, left, seq_q, seq_kv] = [b.shift, b.left, b.q, b.kv].map(|t| t.map(|t| g.tensor(t)));
            g.push(Op::BandMask(BandMask { x, y, fill, side: b.side, shift_right, left, seq_q, seq_kv }));
        }
    };
    use BandSide::{Left, Right};
    good(band(Right, |_| {}));
    good(band(Left, |_| {}));
    good(band(Right, |b| (b.shift, b.q, b.kv) = (None, None, None)));
    check(vec![
        case(
            "= band_mask(",
            "x t0 is not (b, h, s_q, s_kv)",
            band(Right, |b| (b.x, b.y, b.q, b.kv) = (vec![5, 7], vec![5, 7], None, None)),
        ),
        case("= band_mask(", "y t1 is [2,4,5,6], not [2,4,5,7]", band(Right, |b| b.y = vec![2, 4, 5, 6])),
        case("= band_mask(", "fill t2 is f16, not f32", band(Right, |b| b.fill = Tensor::by_value("fill", F16, None, 1))),
        case("= band_mask(", "fill t2 is not a value from the host", band(Right, |b| b.fill = Tensor::device("fill", F32, [1]))),
        case(
            "= band_mask(",
            "shift_right is t3, expected none: only a mask of the right side has shift_right",
            band(Left, |b| b.shift = Some(Tensor::by_value("s", I32, None, 1))),
        ),
        case("= band_mask(", "shift_right t3 is f32, not an integer", band(Right, |b| b.shift = Some(Tensor::by_value("s", F32, None, 1)))),
        case("= band_mask(", "shift_right t3 is not a value from the host", band(Right, |b| b.shift = Some(Tensor::device("s", I32, [1])))),
        case(
            "= band_mask(",
            "left is t4, expected none: only a mask of the left side has left",
            band(Right, |b| b.left = Some(Tensor::by_value("l", I32, None, 1))),
        ),
        case("= band_mask(", "the attribute `left` is missing: a band mask of the side Left needs it", band(Left, |b| b.left = None)),
        case("= band_mask(", "left t3 is bool, not a number", band(Left, |b| b.left = Some(Tensor::by_value("l", Bool, None, 1)))),
        case("= band_mask(", "left t3 is not a value from the host", band(Left, |b| b.left = Some(Tensor::device("l", I32, [1])))),
        case("= band_mask(", "seq_q and seq_kv are given together or not at all", band(Right, |b| b.kv = None)),
        case("= band_mask(", "seq_q t4 is f32, not i32 or i64", band(Right, |b| b.q = Some(Tensor::device("seq_q", F32, [2, 1, 1, 1])))),
        case(
            "= band_mask(",
            "seq_kv t5 is [3,1,1,1], expected one length by value, or one per batch entry",
            band(Right, |b| b.kv = Some(Tensor::device("seq_kv", I32, [3, 1, 1, 1]))),
        ),
    ]);
    check(vec![case(
        "= band_mask(",
        "seq_q t4 is [1,1,1,1], expected one length by value, or one per batch entry",
        band(Right, |b| b.q = Some(Tensor::device("seq_q", I32, [1, 1, 1, 1]))),
    )]);
    good(band(Right, |b| b.q = Some(Tensor::by_value("seq_q", I32, None, 1))));
    let mut ints = Graph::new();
    band(Right, |b| b.dtype = I32)(&mut ints);
    assert_eq!(ints.verify().unwrap_err().0.len(), 2, "x and y are both no floats");
}

#[test]
fn page_and_block_scale_rules() {
    let load = |container: &'static [i64], lengths: (DType, &'static [i64]), table: (DType, &'static [i64]), y: (DType, &'static [i64])| {
        over_inputs(
            [("c", F16, container), ("n", lengths.0, lengths.1), ("t", table.0, table.1), ("y", y.0, y.1)],
            |[container, seq_len, page_table, y]| Op::PagedLoad(PagedLoad { container, seq_len, page_table, y }),
        )
    };
    let (c, n, t, y): (&[i64], _, _, _) = (&[9, 2, 4, 8], (I32, &[3, 1, 1, 1][..]), (I32, &[3, 1, 3, 1][..]), (F16, &[3, 2, 10, 8][..]));
    good(load(c, n, t, y));
    good(|g: &mut Graph| {
        let [container, seq_len, page_table] =
            [("c", F16, c), ("n", n.0, n.1), ("t", t.0, t.1)].map(|(name, dtype, dims)| g.input(name, dtype, dims));
        let y = g.tensor(Tensor::device("y", F16, [3, 2, 8, 10]).strides([160, 80, 1, 8]));
        g.push(Op::PagedLoad(PagedLoad { container, seq_len, page_table, y }));
    });
    let scales = |x: (DType, &'static [i64]), y: &'static [i64], scale: Tensor, block: &'static [i32]| {
        move |g: &mut Graph| {
            let (x, y, scale) = (g.input("x", x.0, x.1), g.input("y", F32, y), g.tensor(scale));
            g.push(Op::BlockScaleDequantize(BlockScaleDequantize { x, scale, y, block: block.to_vec(), compute: F32 }));
        }
    };
    fn quantize<const N: usize>(x: [i64; N], scale: Tensor) -> impl FnOnce(&mut Graph) {
        move |g| {
            let (x, y, scale) = (g.input("x", F32, x), g.input("y", F8E4M3, x), g.tensor(scale));
            g.push(Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale, block: vec![32], compute: F32 }));
        }
    }
    let reordered =
        |dims: &[i64]| Tensor { reordering: cudnn_graph::ir::Reordering::F8x128x4, ..Tensor::device("scale", F8E8M0, dims.to_vec()) };
    good(quantize([2, 64], Tensor::device("scale", F8E8M0, [2, 2])));
    good(quantize([1, 2, 64], reordered(&[1, 128, 4])));
    let scale = |dims: &[i64]| Tensor::device("scale", F8E8M0, dims.to_vec());
    let x: (DType, &[i64]) = (F8E4M3, &[2, 64]);
    good(scales(x, &[2, 64], scale(&[2, 2]), &[1, 32]));
    good(scales((I4, &[2, 64]), &[2, 64], scale(&[2, 2]), &[1, 32]));
    good(scales((F8E4M3, &[64, 2]), &[64, 2], scale(&[2, 2]), &[1, 32]));
    good(scales(x, &[2, 64], Tensor { reordering: cudnn_graph::ir::Reordering::F8x128x4, ..scale(&[128, 4]) }, &[32]));
    check(vec![
        case("= paged_load(", "are not (blocks, h, block, d)", load(&[9, 4, 8], n, t, y)),
        case("= paged_load(", "y has 3 heads, the container 2", load(c, n, t, (F16, &[3, 3, 10, 8]))),
        case("= paged_load(", "y has heads of 7 elements, the container of 8", load(c, n, t, (F16, &[3, 2, 10, 7]))),
        case("= paged_load(", "seq_len t1 is [2,1,1,1], not [3,1,1,1]", load(c, (I32, &[2, 1, 1, 1]), t, y)),
        case("= paged_load(", "seq_len t1 is f32", load(c, (F32, &[3, 1, 1, 1]), t, y)),
        case("= paged_load(", "page_table t2 is [3,1,2,1], not [3,1,3,1]", load(c, n, (I32, &[3, 1, 2, 1]), y)),
        case("= paged_load(", "page_table t2 is i64, not i32", load(c, n, (I64, &[3, 1, 3, 1]), y)),
        case("= paged_load(", "y t3 is bf16, expected f16 as container t0", load(c, n, t, (BF16, &[3, 2, 10, 8]))),
        case(
            "= paged_load(",
            "y t3 has strides [2,1,1,1], expected 1 along exactly one of the last two axes",
            load(&[9, 2, 4, 1], n, (I32, &[3, 1, 1, 1]), (F16, &[3, 2, 1, 1])),
        ),
        case("= paged_load(", "pages have 3 tokens, expected a power of two", load(&[9, 2, 3, 8], n, (I32, &[3, 1, 4, 1]), y)),
        case("= paged_load(", "seq_len t1 is u8, not i32 or i64", load(c, (U8, &[3, 1, 1, 1]), t, y)),
        case("= block_scale_dequantize(", "x t0 is bool, not a number", scales((Bool, &[2, 64]), &[2, 64], scale(&[2, 2]), &[32])),
        case("= block_scale_dequantize(", "y t1 is [2,32], not [2,64]", scales(x, &[2, 32], scale(&[2, 2]), &[32])),
        case("= block_scale_dequantize(", "the scale has 1 axes, expected 2, as the tensor has", scales(x, &[2, 64], scale(&[2]), &[32])),
        case("= block_scale_dequantize(", "the scale has extent 3 along axis 1, expected 2", scales(x, &[2, 64], scale(&[2, 3]), &[32])),
        case(
            "= block_scale_dequantize(",
            "axis 0 has blocks, but the block sizes [1, 1] have no entry for it",
            scales(x, &[2, 64], scale(&[1, 64]), &[1, 1]),
        ),
        case(
            "= block_scale_dequantize(",
            "the block sizes [32, 16] have more entries above 1 than there are axes with blocks",
            scales(x, &[2, 64], scale(&[2, 2]), &[32, 16]),
        ),
        case("= block_scale_dequantize(", "block size 0 is below 1", scales(x, &[2, 64], scale(&[2, 2]), &[0])),
        case("= block_scale_dequantize(", "got 3 block sizes, expected at most 2", scales(x, &[2, 64], scale(&[2, 2]), &[1, 1, 32])),
        case(
            "= block_scale_quantize(",
            "got 2 block sizes, expected one, for the last axis",
            over_inputs([("x", F32, &[2, 64]), ("y", F8E4M3, &[2, 64]), ("scale", F32, &[2, 2])], |[x, y, scale]| {
                Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale, block: vec![1, 32], compute: F32 })
            }),
        ),
        case(
            "= block_scale_quantize(",
            "computes in i32",
            over_inputs([("x", F32, &[2, 64]), ("y", F8E4M3, &[2, 64]), ("scale", F32, &[2, 2])], |[x, y, scale]| {
                Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale, block: vec![32], compute: I32 })
            }),
        ),
        case(
            "= block_scale_quantize(",
            "y t1 is f16, expected f8e4m3, f8e5m2 or f4e2m1",
            over_inputs([("x", F32, &[2, 64]), ("y", F16, &[2, 64]), ("scale", F32, &[2, 2])], |[x, y, scale]| {
                Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale, block: vec![32], compute: F32 })
            }),
        ),
        case(
            "= block_scale_quantize(",
            "the scale has no reordering f8x128x4",
            quantize([1, 2, 64], Tensor::device("scale", F8E8M0, [1, 2, 2])),
        ),
        case("= block_scale_quantize(", "the scale has the reordering f8x128x4", quantize([2, 64], reordered(&[128, 4]))),
        case("= block_scale_quantize(", "the scale is [1,128,8] with", quantize([1, 2, 64], reordered(&[1, 128, 8]))),
        case(
            "= block_scale_quantize(",
            "expected [1,128,4] with [512,4,1]",
            quantize([1, 2, 64], reordered(&[1, 128, 4]).strides([512, 8, 1])),
        ),
    ]);
}
