//! Compares the interpreter's attention in three forms: composed of small ops, in the unified op, and as a plain loop over f64.

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::interp::{BindingError, InterpError, Precision, Value, run, run_all};
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Graph, Mode, Op, Scalar, Tensor, TensorId};
use std::collections::BTreeMap;

const B: usize = 2;
const HQ: usize = 4;
const HK: usize = 2;
const HV: usize = 1;
const SQ: usize = 5;
const SKV: usize = 7;
const DQK: usize = 3;
const DV: usize = 2;
const SCALE: f64 = 0.625;
const CAP: f64 = 3.0;

fn dims(n: [usize; 4]) -> [i64; 4] {
    n.map(|n| n as i64)
}

fn numbers(n: [usize; 4], seed: usize) -> Value {
    let data: Vec<f64> = (0..n.iter().product()).map(|i: usize| ((i * 31 + seed * 17) % 53) as f64 / 16.0 - 1.5).collect();
    Value::new(dims(n), data)
}

fn q() -> Value {
    numbers([B, HQ, SQ, DQK], 1)
}

fn k() -> Value {
    numbers([B, HK, SKV, DQK], 2)
}

fn v() -> Value {
    numbers([B, HV, SKV, DV], 3)
}

fn at(value: &Value, index: [usize; 4]) -> f64 {
    value.data[index.iter().zip(&value.dims).fold(0, |at, (i, d)| at * *d as usize + i)]
}

/// Options of plain attention.
#[derive(Clone, Default)]
struct Plain {
    /// Returns whether (batch, row, column) is unmasked.
    keep: Option<fn(usize, usize, usize) -> bool>,
    softcap: bool,
    sink: Option<[f64; HQ]>,
    /// Lengths of queries and keys.
    lengths: Option<[[usize; B]; 2]>,
    /// Factors of the probabilities, (b, h, s_q, s_kv).
    dropout: Option<Vec<f64>>,
}

/// Output, statistics (log-sum-exp, maximum, sum) and probabilities.
struct Out {
    o: Vec<f64>,
    stats: Vec<f64>,
    max: Vec<f64>,
    sum: Vec<f64>,
    p: Vec<f64>,
}

impl Plain {
    fn run(&self, q: &Value, k: &Value, v: &Value) -> Out {
        let mut out = Out { o: vec![], stats: vec![], max: vec![], sum: vec![], p: vec![] };
        for b in 0..B {
            for h in 0..HQ {
                for i in 0..SQ {
                    let score = |j: usize| {
                        let [rows, columns] = self.lengths.map_or([SQ, SKV], |[q, kv]| [q[b], kv[b]]);
                        if i >= rows || j >= columns || self.keep.is_some_and(|keep| !keep(b, i, j)) {
                            return f64::NEG_INFINITY;
                        }
                        let s: f64 = (0..DQK).map(|d| at(q, [b, h, i, d]) * at(k, [b, h / (HQ / HK), j, d])).sum::<f64>() * SCALE;
                        if self.softcap { CAP * (s / CAP).tanh() } else { s }
                    };
                    let s: Vec<f64> = (0..SKV).map(score).collect();
                    let sink = self.sink.map_or(f64::NEG_INFINITY, |sink| sink[h]);
                    let m = s.iter().copied().fold(sink, f64::max);
                    let e: Vec<f64> = s.iter().map(|s| if m == f64::NEG_INFINITY { 0.0 } else { (s - m).exp() }).collect();
                    let z = e.iter().sum::<f64>() + if m == f64::NEG_INFINITY { 0.0 } else { (sink - m).exp() };
                    out.max.push(m);
                    out.sum.push(z);
                    out.stats.push(if z == 0.0 { f64::NEG_INFINITY } else { m + z.ln() });
                    let mut p: Vec<f64> = e.iter().map(|e| if z == 0.0 { 0.0 } else { e / z }).collect();
                    if let Some(dropout) = &self.dropout {
                        p.iter_mut().enumerate().for_each(|(j, p)| *p *= dropout[((b * HQ + h) * SQ + i) * SKV + j]);
                    }
                    out.o.extend((0..DV).map(|d| (0..SKV).map(|j| p[j] * at(v, [b, h / (HQ / HV), j, d])).sum::<f64>()));
                    out.p.extend(p);
                }
            }
        }
        out
    }
}

#[track_caller]
fn close(name: &str, got: &[f64], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got == want || (want.is_finite() && (got - want).abs() <= bound * want.abs().max(1.0)), "{name}[{i}] is {got}, not {want}");
    }
}

/// Inputs of an attention in this type, and its results.
struct Io {
    g: Graph,
    inputs: BTreeMap<TensorId, Value>,
    q: TensorId,
    k: TensorId,
    v: TensorId,
}

impl Io {
    fn new(dtype: DType) -> Io {
        let mut io = Io { g: Graph::new(), inputs: BTreeMap::new(), q: id(), k: id(), v: id() };
        io.q = io.bind("q", dtype, q());
        io.k = io.bind("k", dtype, k());
        io.v = io.bind("v", dtype, v());
        io
    }

    fn bind(&mut self, name: &str, dtype: DType, value: Value) -> TensorId {
        let id = self.g.input(name, dtype, value.dims.clone());
        self.inputs.insert(id, value);
        id
    }

    fn lengths(&mut self, name: &str, n: [usize; B]) -> TensorId {
        self.bind(name, I32, Value::new([B as i64, 1, 1, 1], n.map(|n| n as f64)))
    }

    fn output(&mut self, name: &str, dtype: DType, n: [usize; 4]) -> TensorId {
        self.g.input(name, dtype, dims(n))
    }

    fn run(&self, precision: Precision) -> BTreeMap<TensorId, Value> {
        let g = self.g.clone().verify().unwrap_or_else(|e| panic!("{e}"));
        run(&g, &self.inputs, precision).unwrap_or_else(|e| panic!("{e}"))
    }
}

fn id() -> TensorId {
    Graph::new().input("", F32, [1])
}

/// Options of a composite graph between the GEMMs.
#[derive(Clone, Copy)]
struct Mods {
    softcap: bool,
    causal: bool,
    /// Columns up to the diagonal.
    window: Option<i32>,
    lengths: Option<[[usize; B]; 2]>,
    /// Aligns the masks to the bottom right, by the lengths.
    bottom_right: bool,
}

/// The band masks, right before left.
fn bands(g: &mut Graph, mut s: TensorId, mods: Mods, lengths: Option<(TensorId, TensorId)>) -> TensorId {
    let align = lengths.filter(|_| mods.bottom_right);
    if mods.causal {
        let infinity = g.scalar(Scalar::F32(f32::NEG_INFINITY));
        s = g.band_mask_right(s, infinity, None, align);
    }
    if let Some(window) = mods.window {
        let infinity = g.scalar(Scalar::F32(f32::NEG_INFINITY));
        let left = g.scalar(Scalar::I32(window));
        s = g.band_mask_left(s, infinity, left, align);
    }
    s
}

/// Builds the frontend's composite forward graph, with the transposed view of the keys as a reshape.
fn composite(dtype: DType, mods: Mods) -> (Io, [TensorId; 2]) {
    let mut io = Io::new(dtype);
    let lengths = mods.lengths.map(|[q, kv]| (io.lengths("seq_q", q), io.lengths("seq_kv", kv)));
    let g = &mut io.g;
    let kt = {
        let n = dims([B, HK, DQK, SKV]);
        let (head, row) = ((SKV * DQK) as i64, DQK as i64);
        g.reshape(io.k, n, [HK as i64 * head, head, 1, row], None)
    };
    let scale = g.scalar(Scalar::F32(SCALE as f32));
    let product = g.matmul(io.q, kt);
    let mut s = g.pointwise(Mode::Mul, &[product, scale]);
    if mods.softcap {
        let cap = g.scalar(Scalar::F32(CAP as f32));
        s = g.pointwise(Mode::Div, &[s, cap]);
        s = g.pointwise(Mode::TanhFwd, &[s]);
        s = g.pointwise(Mode::Mul, &[s, cap]);
    }
    if let Some((seq_q, seq_kv)) = lengths {
        let infinity = g.scalar(Scalar::F32(f32::NEG_INFINITY));
        let (row, col) = (g.gen_index(s, 2), g.gen_index(s, 3));
        let (row, col) = (g.pointwise(Mode::CmpLt, &[row, seq_q]), g.pointwise(Mode::CmpLt, &[col, seq_kv]));
        let both = g.pointwise(Mode::LogicalAnd, &[row, col]);
        s = g.pointwise(Mode::BinarySelect, &[s, infinity, both]);
    }
    s = bands(g, s, mods, lengths);
    let stats = g.input("stats", F32, dims([B, HQ, SQ, 1]));
    let p = g.softmax(s, Some(stats), None);
    g.set_dtype(p, dtype);
    let o = g.matmul(p, io.v);
    g.output(o, "o", dtype);
    (io, [o, stats])
}

/// Builds the unified op. It pads by its lengths; the alignment inside reads the same tensors.
fn unified(dtype: DType, mods: Mods) -> (Io, [TensorId; 2]) {
    if !mods.softcap && !mods.causal && mods.window.is_none() {
        return unified_plain(dtype, mods.lengths);
    }
    let mut io = Io::new(dtype);
    let lengths = mods.lengths.map(|[q, kv]| (io.lengths("seq_q", q), io.lengths("seq_kv", kv)));
    let o = io.output("o", dtype, [B, HQ, SQ, DV]);
    let stats = io.output("stats", F32, [B, HQ, SQ, 1]);
    let g = &mut io.g;
    let scale = g.scalar(Scalar::F32(SCALE as f32));
    let input = g.tensor(Tensor::virtual_("score", F32, dims([B, HQ, SQ, SKV])));
    let before = g.ops().len();
    let mut s = input;
    if mods.softcap {
        let cap = g.scalar(Scalar::F32(CAP as f32));
        s = g.pointwise(Mode::Div, &[s, cap]);
        s = g.pointwise(Mode::TanhFwd, &[s]);
        s = g.pointwise(Mode::Mul, &[s, cap]);
    }
    s = bands(g, s, mods, lengths);
    let ops = g.take_ops(before);
    let score = Some(ScoreGraph { input, output: s, ops });
    let (seq_len_q, seq_len_kv) = (lengths.map(|l| l.0), lengths.map(|l| l.1));
    let plain = SdpaForward::plain(io.q, io.k, io.v, o);
    let op = SdpaForward { attn_scale: Some(scale), score, stats: Some(stats), seq_len_q, seq_len_kv, ..plain };
    io.g.push(Op::SdpaForward(Box::new(op)));
    (io, [o, stats])
}

fn unified_plain(dtype: DType, lengths: Option<[[usize; B]; 2]>) -> (Io, [TensorId; 2]) {
    let mut stats = None;
    let (io, o) = forward(dtype, |io, op| {
        let lengths = lengths.map(|[q, kv]| (io.lengths("seq_q", q), io.lengths("seq_kv", kv)));
        stats = Some(io.output("stats", F32, [B, HQ, SQ, 1]));
        SdpaForward { stats, seq_len_q: lengths.map(|l| l.0), seq_len_kv: lengths.map(|l| l.1), ..op }
    });
    (io, [o, stats.unwrap()])
}

/// Builds a unified op with a scale and the additions of `finish`.
fn forward(dtype: DType, finish: impl FnOnce(&mut Io, SdpaForward) -> SdpaForward) -> (Io, TensorId) {
    let mut io = Io::new(dtype);
    let o = io.output("o", dtype, [B, HQ, SQ, DV]);
    let attn_scale = Some(io.g.scalar(Scalar::F32(SCALE as f32)));
    let op = SdpaForward { attn_scale, ..SdpaForward::plain(io.q, io.k, io.v, o) };
    let op = finish(&mut io, op);
    io.g.push(Op::SdpaForward(Box::new(op)));
    (io, o)
}

const NONE: Mods = Mods { softcap: false, causal: false, window: None, lengths: None, bottom_right: false };
const LENGTHS: [[usize; B]; 2] = [[5, 3], [6, 2]];

fn cases() -> Vec<(Mods, Plain)> {
    let capped = Plain { softcap: true, ..Plain::default() };
    let padded = Plain { lengths: Some(LENGTHS), ..Plain::default() };
    let keep = |keep, plain: &Plain| Plain { keep: Some(keep), ..plain.clone() };
    vec![
        (NONE, Plain::default()),
        (Mods { softcap: true, ..NONE }, capped.clone()),
        (Mods { causal: true, ..NONE }, keep(|_, i, j| j <= i, &Plain::default())),
        (Mods { causal: true, window: Some(2), softcap: true, ..NONE }, keep(|_, i, j| j <= i && j + 2 > i, &capped)),
        // A window of 0 masks out every row.
        (Mods { causal: true, window: Some(0), ..NONE }, keep(|_, _, _| false, &Plain::default())),
        (Mods { lengths: Some(LENGTHS), ..NONE }, padded.clone()),
        // The cap turns −∞ into a number, so padding must come after the score ops.
        (Mods { softcap: true, lengths: Some(LENGTHS), ..NONE }, Plain { softcap: true, ..padded.clone() }),
        // With fewer keys than queries, the first rows of the second entry attend to nothing.
        (
            Mods { causal: true, lengths: Some(LENGTHS), bottom_right: true, ..NONE },
            keep(|b, i, j| (i + LENGTHS[1][b]) as i64 - LENGTHS[0][b] as i64 >= j as i64, &padded),
        ),
        (
            Mods { window: Some(3), lengths: Some(LENGTHS), bottom_right: true, ..NONE },
            keep(|b, i, j| (j + 3 + LENGTHS[0][b]) as i64 - LENGTHS[1][b] as i64 > i as i64, &padded),
        ),
    ]
}

#[test]
fn composite_and_unified_attention_are_a_plain_loop() {
    for (n, (mods, plain)) in cases().into_iter().enumerate() {
        let want = plain.run(&q(), &k(), &v());
        for (form, (io, [o, stats])) in [("composite", composite(F32, mods)), ("unified", unified(F32, mods))] {
            let exact = io.run(Precision::F64);
            close(&format!("{form} {n} o"), &exact[&o].data, &want.o, 1e-14);
            close(&format!("{form} {n} stats"), &exact[&stats].data, &want.stats, 1e-14);
            let rounded = io.run(Precision::F32);
            close(&format!("{form} {n} o in f32"), &rounded[&o].data, &want.o, 1e-5);
            assert_ne!((n, &rounded[&o].data), (0, &exact[&o].data), "f32 rounds");
        }
    }
}

/// The two forms share only the softmax of a row, and yet agree in every bit.
#[test]
fn forms_agree_to_the_last_bit_in_f32_precision() {
    for dtype in [F32, F16, BF16] {
        for (n, (mods, _)) in cases().into_iter().enumerate() {
            let [composite, unified] = [composite(dtype, mods), unified(dtype, mods)].map(|(io, ids)| {
                let out = io.run(Precision::F32);
                ids.map(|id| out[&id].data.clone())
            });
            assert_eq!(composite, unified, "{dtype} {n}");
        }
    }
}

#[test]
fn sink_statistics_and_dropout() {
    let sink = [0.5, -2.0, 4.0, f64::NEG_INFINITY];
    let bits: Vec<f64> = (0..B * HQ * SQ * SKV).map(|i| f64::from(u8::from(i % 3 != 1))).collect();
    let mut ids = None;
    let (io, o) = forward(F32, |io, op| {
        let sink = io.bind("sink", F32, Value::new([1, HQ as i64, 1, 1], sink));
        let [stats, max, sum] = ["stats", "max", "sum"].map(|name| io.output(name, F32, [B, HQ, SQ, 1]));
        let [seed, offset] = ["seed", "offset"].map(|name| io.bind(name, I64, Value::scalar(7.0)));
        let dump = io.bind("dump", F32, Value::new(dims([B, HQ, SQ, SKV]), bits.clone()));
        ids = Some([stats, max, sum, dump]);
        let dropout = Some(Dropout { probability: 0.25, seed, offset, rng_dump: Some(dump) });
        SdpaForward { sink: Some(sink), stats: Some(stats), max: Some(max), sum_exp: Some(sum), dropout, ..op }
    });
    let [stats, max, sum, dump] = ids.unwrap();
    let dropout = Some(bits.iter().map(|bit| bit / 0.75).collect());
    let want = Plain { sink: Some(sink), dropout, ..Plain::default() }.run(&q(), &k(), &v());
    let out = io.run(Precision::F64);
    close("o", &out[&o].data, &want.o, 1e-14);
    close("stats", &out[&stats].data, &want.stats, 1e-14);
    close("max", &out[&max].data, &want.max, 1e-14);
    close("sum", &out[&sum].data, &want.sum, 1e-14);
    assert_eq!(out[&dump].data, bits, "the dump is a result too");
}

#[test]
fn dropout_without_its_random_numbers_is_a_typed_error() {
    for (dump, probability) in [(true, 0.5), (false, 0.5), (false, 0.0), (true, 0.0)] {
        let (io, o) = forward(F32, |io, op| {
            let [seed, offset] = ["seed", "offset"].map(|name| io.bind(name, I64, Value::scalar(7.0)));
            let rng_dump = dump.then(|| io.output("dump", F32, [B, HQ, SQ, SKV]));
            SdpaForward { dropout: Some(Dropout { probability, seed, offset, rng_dump }), ..op }
        });
        let result = run(&io.g.verify().unwrap(), &io.inputs, Precision::F64);
        if probability == 0.0 {
            close("o", &result.unwrap()[&o].data, &Plain::default().run(&q(), &k(), &v()).o, 1e-14);
            continue;
        }
        let Err(InterpError::Bindings(errors)) = result else { panic!() };
        match (&errors[..], dump) {
            ([BindingError::RandomBits { .. }], true) | ([BindingError::HiddenRandomBits { .. }], false) => {}
            (other, _) => panic!("{other:?}"),
        }
    }
}

#[test]
fn lengths_may_be_prefix_sums_and_padding_is_never_read() {
    let (mut io, o) = forward(F32, |io, op| {
        let [cu_q, cu_kv] = LENGTHS.map(|n| Value::new([B as i64 + 1, 1, 1, 1], [3.0, (3 + n[0]) as f64, (3 + n[0] + n[1]) as f64]));
        let (cu_q, cu_kv) = (io.bind("cu_q", I32, cu_q), io.bind("cu_kv", I64, cu_kv));
        SdpaForward { cu_seq_len_q: Some(cu_q), cu_seq_len_kv: Some(cu_kv), ..op }
    });
    for (id, heads, dim) in [(io.k, HK, DQK), (io.v, HV, DV)] {
        let value = io.inputs.get_mut(&id).unwrap();
        for (b, &length) in LENGTHS[1].iter().enumerate() {
            for h in 0..heads {
                for j in length..SKV {
                    value.data[((b * heads + h) * SKV + j) * dim..][..dim].fill(f64::NAN);
                }
            }
        }
    }
    let want = Plain { lengths: Some(LENGTHS), ..Plain::default() }.run(&q(), &k(), &v());
    close("o", &io.run(Precision::F64)[&o].data, &want.o, 1e-14);
}

#[test]
fn pages_hold_what_keys_and_values_hold() {
    let lengths = [SKV, 4];
    // A page of keys has 4 rows, a page of values has 2. The last page comes first in memory.
    let paged = |value: &Value, heads: usize, block: usize, dim: usize| {
        let pages = SKV.div_ceil(block);
        let mut container = Value::new(dims([B * pages, heads, block, dim]), vec![f64::NAN; B * pages * heads * block * dim]);
        let mut table = vec![0.0; B * pages];
        for b in 0..B {
            for page in 0..pages {
                let to = B * pages - 1 - (b * pages + page);
                table[b * pages + page] = to as f64;
                for h in 0..heads {
                    for j in 0..block.min(SKV - page * block) {
                        for d in 0..dim {
                            container.data[((to * heads + h) * block + j) * dim + d] = at(value, [b, h, page * block + j, d]);
                        }
                    }
                }
            }
        }
        (container, Value::new([B as i64, 1, pages as i64, 1], table))
    };
    let mut io = Io { g: Graph::new(), inputs: BTreeMap::new(), q: id(), k: id(), v: id() };
    let ((k_pages, k_table), (v_pages, v_table)) = (paged(&k(), HK, 4, DQK), paged(&v(), HV, 2, DV));
    let (q_id, k_id, v_id) = (io.bind("q", F32, q()), io.bind("k", F32, k_pages), io.bind("v", F32, v_pages));
    let o = io.output("o", F32, [B, HQ, SQ, DV]);
    let (table_k, table_v) = (io.bind("table_k", I32, k_table), io.bind("table_v", I32, v_table));
    let n = io.lengths("n", lengths);
    let scale = io.g.scalar(Scalar::F32(SCALE as f32));
    let op = SdpaForward {
        attn_scale: Some(scale),
        page_table_k: Some(table_k),
        page_table_v: Some(table_v),
        seq_len_kv: Some(n),
        ..SdpaForward::plain(q_id, k_id, v_id, o)
    };
    io.g.push(Op::SdpaForward(Box::new(op)));
    let want = Plain { lengths: Some([[SQ; B], lengths]), ..Plain::default() }.run(&q(), &k(), &v());
    close("o", &io.run(Precision::F64)[&o].data, &want.o, 1e-14);
}

#[test]
fn a_block_mask_has_a_bit_per_tile() {
    let (rows, columns) = (130usize, 260usize);
    let mut g = Graph::new();
    let [q, k, v] = [("q", rows), ("k", columns), ("v", columns)].map(|(name, n)| g.input(name, F32, [1, 1, n as i64, 1]));
    let o = g.input("o", F32, [1, 1, rows as i64, 1]);
    let mask = g.input("mask", U8, [1, 1, 2, 1]);
    g.push(Op::SdpaForward(Box::new(SdpaForward { block_mask: Some(mask), ..SdpaForward::plain(q, k, v, o) })));
    let column = |n: usize, x: f64| Value::new([1, 1, n as i64, 1], vec![x; n]);
    let values: Vec<f64> = (0..columns).map(|j| j as f64).collect();
    // The first row of tiles keeps the second tile, the second row keeps none.
    let inputs = BTreeMap::from([
        (q, column(rows, 1.0)),
        (k, column(columns, 1.0)),
        (v, Value::new([1, 1, columns as i64, 1], values)),
        (mask, Value::new([1, 1, 2, 1], [2.0, 8.0])),
    ]);
    let out = &run(&g.verify().unwrap(), &inputs, Precision::F64).unwrap()[&o].data;
    assert!(out[..128].iter().all(|o| (o - 191.5).abs() < 1e-10), "{}", out[0]);
    assert_eq!(out[128..], [0.0; 2]);
}

#[test]
fn eight_bit_scales_multiply_and_divide_where_they_should() {
    let mut ids = None;
    let (io, o) = forward(F8E4M3, |io, op| {
        let mut scale = |name: &str, x: f64| io.bind(name, F32, Value::scalar(x));
        let fp8 = [("dq", 0.5), ("dk", 2.0), ("dv", 4.0), ("ds", 1.0 / 256.0), ("ss", 256.0), ("so", 8.0)].map(|(name, x)| scale(name, x));
        let [amax_s, amax_o] = ["amax_s", "amax_o"].map(|name| io.output(name, F32, [1, 1, 1, 1]));
        ids = Some([amax_s, amax_o]);
        let [descale_q, descale_k, descale_v, descale_s, scale_s, scale_o] = fp8;
        SdpaForward { fp8: Some(Fp8Scales { descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, amax_s, amax_o }), ..op }
    });
    let [amax_s, amax_o] = ids.unwrap();
    let want = Plain::default().run(&q(), &k(), &v());
    let largest = |x: &[f64]| x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let out = io.run(Precision::F64);
    close("o", &out[&o].data, &want.o.iter().map(|o| o * 4.0 * 8.0).collect::<Vec<_>>(), 1e-13);
    close("amax_s", &out[&amax_s].data, &[largest(&want.p)], 1e-13);
    close("amax_o", &out[&amax_o].data, &[largest(&want.o) * 4.0], 1e-13);
}

/// Computes gradients of `Σ dO ∘ o` by differences of the plain loop.
#[test]
fn backward_is_the_slope_of_the_plain_loop() {
    let d_o = numbers([B, HQ, SQ, DV], 9);
    for lengths in [None, Some(LENGTHS), Some([[0, 2], [3, 7]])] {
        let plain = Plain { lengths, ..Plain::default() };
        let forward = plain.run(&q(), &k(), &v());
        let mut io = Io::new(F32);
        let o = io.bind("o", F32, Value::new(dims([B, HQ, SQ, DV]), forward.o));
        let stats = io.bind("stats", F32, Value::new(dims([B, HQ, SQ, 1]), forward.stats));
        let d_out = io.bind("d_o", F32, d_o.clone());
        let scale = io.g.scalar(Scalar::F32(SCALE as f32));
        let [dq, dk, dv] =
            [("dq", [B, HQ, SQ, DQK]), ("dk", [B, HK, SKV, DQK]), ("dv", [B, HV, SKV, DV])].map(|(name, n)| io.output(name, F32, n));
        let seq = lengths.map(|[q, kv]| (io.lengths("seq_q", q), io.lengths("seq_kv", kv)));
        io.g.push(Op::SdpaBackward(Box::new(SdpaBackward {
            q: io.q,
            k: io.k,
            v: io.v,
            o,
            d_o: d_out,
            stats,
            attn_scale: Some(scale),
            dq,
            dk,
            dv,
            seq_len_q: seq.map(|s| s.0),
            seq_len_kv: seq.map(|s| s.1),
            score: None,
        })));
        let got = io.run(Precision::F64);
        let loss = |[q, k, v]: &[Value; 3]| plain.run(q, k, v).o.iter().zip(&d_o.data).map(|(o, d)| o * d).sum::<f64>();
        for (which, id) in [dq, dk, dv].into_iter().enumerate() {
            let slopes: Vec<f64> = (0..got[&id].data.len())
                .map(|i| {
                    let h = 1e-5;
                    let moved = |by: f64| {
                        let mut all = [q(), k(), v()];
                        all[which].data[i] += by;
                        loss(&all)
                    };
                    (moved(h) - moved(-h)) / (2.0 * h)
                })
                .collect();
            close(&format!("gradient {which}"), &got[&id].data, &slopes, 1e-8);
        }
        let rounded = io.run(Precision::F32);
        close("dq in f32", &rounded[&dq].data, &got[&dq].data, 1e-5);
    }
}

#[test]
fn rows_without_keys_have_no_gradient() {
    let mut io = Io::new(F32);
    let nothing = |n: [usize; 4], x: f64| Value::new(dims(n), vec![x; n.iter().product()]);
    let o = io.bind("o", F32, nothing([B, HQ, SQ, DV], 0.0));
    let stats = io.bind("stats", F32, nothing([B, HQ, SQ, 1], f64::NEG_INFINITY));
    let d_o = io.bind("d_o", F32, nothing([B, HQ, SQ, DV], 1.0));
    let [dq, dk, dv] =
        [("dq", [B, HQ, SQ, DQK]), ("dk", [B, HK, SKV, DQK]), ("dv", [B, HV, SKV, DV])].map(|(name, n)| io.output(name, F32, n));
    let backward = |score| SdpaBackward {
        q: io.q,
        k: io.k,
        v: io.v,
        o,
        d_o,
        stats,
        attn_scale: None,
        dq,
        dk,
        dv,
        seq_len_q: None,
        seq_len_kv: None,
        score,
    };
    let mut plain = io.g.clone();
    plain.push(Op::SdpaBackward(Box::new(backward(None))));
    let out = run(&plain.verify().unwrap(), &io.inputs, Precision::F64).unwrap();
    assert!([dq, dk, dv].iter().all(|id| out[id].data.iter().all(|x| *x == 0.0)));

    // The interpreter does not differentiate a score graph; the code that builds graphs has to provide the derivative.
    let mut scored = io.g.clone();
    let [input, output] = ["score", "capped"].map(|name| scored.tensor(Tensor::virtual_(name, F32, dims([B, HQ, SQ, SKV]))));
    let tanh = Pointwise { mode: Mode::TanhFwd, x: input, b: None, t: None, dy: None, y: output, compute: F32, params: Params::default() };
    scored.push(Op::SdpaBackward(Box::new(backward(Some(ScoreGraph { input, output, ops: vec![Op::Pointwise(tanh)] })))));
    let error = run(&scored.verify().unwrap(), &io.inputs, Precision::F64).unwrap_err();
    assert!(matches!(&error, InterpError::NotDefined { at, .. } if at.contains("sdpa_backward(")), "{error}");
}

#[test]
fn score_tensors_are_among_all_results() {
    let (io, _) = unified(F32, Mods { softcap: true, ..NONE });
    let score = io.g.ids().find(|id| io.g.get(*id).is_some_and(|t| t.name == "score")).unwrap();
    let all = run_all(&io.g.verify().unwrap(), &io.inputs, Precision::F64).unwrap();
    let first: f64 = (0..DQK).map(|d| at(&q(), [0, 0, 0, d]) * at(&k(), [0, 0, 0, d])).sum::<f64>() * SCALE;
    assert!((at(&all[&score], [0, 0, 0, 0]) - first).abs() < 1e-14);
}
