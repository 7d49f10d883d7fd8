//! Graphs with score_mods and masks, computed op by op in f64, against textbook attention and its gradients in f64: what is
//! sent to cuDNN means what it should, which needs no device to be seen.

mod block_scale;
mod expressions;
mod fp8;
mod packed;
mod paged;
mod pieces;
mod unsupported;

use conformance::library::{Bound, Here, Library};
use conformance::oracle::{self, Along, Closures, Dropout, Gradients};
use conformance::packing::{Laid, Packing};
use conformance::paging::Cache;
use conformance::random::Random;
use cudnn_graph::Version;
use cudnn_graph::ir::TensorId;
use cudnn_graph::ir::interp::{self, Precision, Value};
use cudnn_graph::ir::op::Op;
use sdpa::cudnn::lower::{self, Form, Guarded, Lowered, Operand, Pages, QueryGradient, Spelling, Supply, Table, Told, Vectors};
use sdpa::expr::{self, Declared, Place, Trace};
use sdpa::{
    AttentionSpec, BackwardProblem, DROPOUT_OFFSET, DROPOUT_SEED, DType, Layout, SINK, ScoreMod, Shape, Side, StatsBase, TensorSpec,
};
use std::collections::BTreeMap;

const OLD: Version = Version::new(9, 19, 0);
const NEW: Version = Version::new(9, 27, 0);

/// The numbers of dropout.
const SEED: i64 = 77;
const OFFSET: i64 = 9;

/// Of sums of magnitudes; roundings of f64 are ten thousand times smaller.
const EXACT: f64 = 1e-10;
/// Where constants of f32 are inside: published slopes, frequencies.
const CONSTANTS: f64 = 2e-6;

/// Operands in row-major order, and `d_o`.
struct Numbers {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
    scale: f64,
    dropout: Option<Dropout>,
}

impl Numbers {
    fn draw(spec: &AttentionSpec, random: &mut Random) -> Numbers {
        let mut all = [spec.q.dims, spec.k.dims, spec.v.dims, spec.o.dims]
            .map(|dims| (0..dims.iter().product::<i64>()).map(|_| random.normal()).collect::<Vec<f64>>())
            .into_iter();
        let mut next = || all.next().unwrap_or_default();
        let dropout = spec.dropout.map(|dropout| Dropout { p: dropout.p().into(), seed: SEED, offset: OFFSET });
        Numbers { q: next(), k: next(), v: next(), d_o: next(), scale: 0.5, dropout }
    }

    fn textbook<'a>(&'a self, spec: &AttentionSpec) -> oracle::Problem<'a> {
        let [batch, heads_q, seq_q, dim_qk] = spec.q.dims.map(|d| d as usize);
        let [_, heads_kv, seq_kv, dim_v] = spec.v.dims.map(|d| d as usize);
        let shape = [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v];
        oracle::Problem {
            shape,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            dtype: DType::F32,
            scale: self.scale,
            masks: &[],
            lengths: &[],
            sink: None,
            dropout: self.dropout,
            narrow: None,
            fixed_point: None,
        }
    }
}

/// (batch, head, seq, dim) as (batch, head, dim, seq).
fn transposed(data: &[f64], [b, h, s, d]: [i64; 4]) -> Vec<f64> {
    let at = |n: i64| data[((n / (d * s) * s + n % s) * d + n / s % d) as usize];
    (0..b * h * s * d).map(at).collect()
}

struct Graph<'l> {
    lowered: &'l Lowered,
    inputs: BTreeMap<TensorId, Value>,
}

/// The elements of a tensor repeated along the axes that it does not span.
fn spread(data: &[f64], from: [i64; 4], to: &[i64]) -> Vec<f64> {
    let mut all = Vec::new();
    for n in 0..to.iter().product::<i64>() {
        let index = |axis: usize| n / to[axis + 1..].iter().product::<i64>() % to[axis];
        let at = (0..4).fold(0, |at, axis| at * from[axis] + if from[axis] == 1 { 0 } else { index(axis) });
        all.push(data[at as usize]);
    }
    all
}

/// Lengths as engines are given them.
fn guarded(Guarded { of, most, keyless }: Guarded, value: impl Fn(&str) -> Vec<f64>) -> Vec<f64> {
    let most = most as f64;
    match of {
        Side::Keys => value("seq_len_kv").into_iter().map(|x| x.clamp(if keyless { 1.0 } else { 0.0 }, most)).collect(),
        Side::Queries => {
            let both = value("seq_len_q").into_iter().zip(value("seq_len_kv"));
            both.map(|(q, kv)| if keyless && kv <= 0.0 { 0.0 } else { q.clamp(0.0, most) }).collect()
        }
    }
}

/// Those of keys, where this is them.
fn key_lengths(supply: &Supply, value: impl Fn(&str) -> Vec<f64>) -> Option<Vec<f64>> {
    match supply {
        Supply::Guarded(which) => (which.of == Side::Keys).then(|| guarded(*which, value)),
        Supply::Number(_)
        | Supply::Param(_)
        | Supply::Spread { .. }
        | Supply::Documents(_)
        | Supply::Pages(_)
        | Supply::Table(_)
        | Supply::Scratch
        | Supply::Gradient(_)
        | Supply::Amax(_)
        | Supply::Terms { .. } => None,
    }
}

impl Graph<'_> {
    fn dims(&self, id: TensorId) -> Vec<i64> {
        self.lowered.graph.get(id).unwrap().dims.0.to_vec()
    }

    fn set(&mut self, id: TensorId, data: Vec<f64>) {
        self.inputs.insert(id, Value::new(self.dims(id), data));
    }

    /// An operand of these extents; engines read keys and values turned.
    fn operand(&mut self, operand: Operand, dims: [i64; 4], data: &[f64]) {
        let id = self.lowered.operand(operand).unwrap();
        let turned = self.dims(id) != dims;
        assert!(!turned || self.dims(id) == [dims[0], dims[1], dims[3], dims[2]], "{operand}");
        self.set(id, if turned { transposed(data, dims) } else { data.to_vec() });
    }

    /// Keys or values in a container: laid as the caller's strides say, read as the graph's do. What is no key is far from every number.
    fn paged(&mut self, operand: Operand, tensor: &TensorSpec, cache: &Cache, data: &[f64]) {
        let laid = Laid::paged(tensor, cache);
        let mut memory: Vec<f64> = (0..laid.elements()).map(|n| 1e4 + n as f64).collect();
        for (place, value) in laid.places().into_iter().zip(data) {
            place.into_iter().for_each(|place| memory[place] = *value);
        }
        let id = self.lowered.operand(operand).unwrap();
        let container = self.lowered.graph.get(id).unwrap();
        let (dims, strides) = (&container.dims.0, &container.strides.0);
        let place = |n: i64| (0..4).map(|axis| n / dims[axis + 1..].iter().product::<i64>() % dims[axis] * strides[axis]).sum::<i64>();
        let read = (0..dims.iter().product::<i64>()).map(|n| memory[place(n) as usize]).collect();
        self.set(id, read);
    }

    /// What no operand is: parameters, numbers, tables.
    fn supply(&mut self, params: &[(String, Vec<f64>)]) {
        let value =
            |name: &str| params.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()).unwrap_or_else(|| panic!("{name} is not declared"));
        for (id, supply) in &self.lowered.supplies {
            match supply {
                Supply::Number(trace) => {
                    let scalars: Vec<f64> = trace.params().iter().map(|p| value(&p.name)[0]).collect();
                    let at = Place { score: f64::NAN, upstream: f64::NAN, index: [i64::MIN; 4], extents: [i64::MIN; 4], params: &scalars };
                    self.set(*id, trace.eval(&at, expr::Precision::F64));
                }
                Supply::Param(name) => {
                    let mut all = value(name);
                    // Of boundaries, expressions read where documents begin.
                    if name.starts_with("cu_seqlens") {
                        all.pop();
                    }
                    self.set(*id, all);
                }
                Supply::Spread { name, dtype: _, dims } => {
                    let spread = spread(&value(name), *dims, &self.dims(*id));
                    self.set(*id, spread);
                }
                Supply::Guarded(which) => self.set(*id, guarded(*which, value)),
                Supply::Pages(pages) => {
                    let lengths = self.lowered.supplies.iter().find_map(|(_, supply)| key_lengths(supply, value));
                    let table = self.page_table(*id, *pages, &value("page_table"), lengths.as_deref());
                    self.set(*id, table);
                }
                Supply::Documents(Told::Lengths(side)) => {
                    let lengths = |side: Side| {
                        if side == Side::Keys && self.lowered.supplies.iter().any(|(_, supply)| matches!(supply, Supply::Pages(_))) {
                            return value("seq_len_kv");
                        }
                        let boundaries = ["cu_seqlens", ["cu_seqlens_q", "cu_seqlens_kv"][side as usize]];
                        let given = params.iter().find(|(name, _)| boundaries.contains(&name.as_str())).map(|(_, v)| v);
                        let given = given.unwrap_or_else(|| panic!("no boundaries are declared"));
                        given.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<f64>>()
                    };
                    // As the kernel has it: none where the other side has none.
                    let both = lengths(Side::Queries).into_iter().zip(lengths(Side::Keys));
                    let own = both.map(|(q, kv)| if q == 0.0 || kv == 0.0 { 0.0 } else { [q, kv][*side as usize] });
                    self.set(*id, own.collect());
                }
                // The interpreter reads packed tensors as if each document were of the longest.
                Supply::Documents(Told::Offsets(..)) => {}
                Supply::Table(Table::F32(x)) => self.set(*id, x.iter().map(|x| f64::from(*x)).collect()),
                Supply::Table(Table::I32(x)) => self.set(*id, x.iter().map(|x| f64::from(*x)).collect()),
                Supply::Scratch | Supply::Gradient(_) | Supply::Amax(_) | Supply::Terms { .. } => {}
            }
        }
    }

    /// The random numbers of an op that has such: where weights stay.
    fn stay(&mut self, dropout: Option<Dropout>, extents: [i64; 4]) {
        let written = self.lowered.graph.graph().ops().iter().find_map(|op| if let Op::Rng(rng) = op { Some(rng.y) } else { None });
        assert_eq!(written.is_some(), dropout.is_some(), "weights are dropped where that is asked for");
        if let Some((id, dropout)) = written.zip(dropout) {
            self.set(id, oracle::stays(&dropout, extents));
        }
    }

    /// A page table as the kernel has it for engines: of no page outside of the containers, whatever it holds, and of the first behind the keys.
    fn page_table(&self, id: TensorId, pages: Pages, table: &[f64], lengths: Option<&[f64]>) -> Vec<f64> {
        let [batch, _, each, _] = self.dims(id)[..] else { panic!("a page table has four axes") };
        let (given, all) = (table.len() as i64 / batch, self.dims(self.lowered.operand(Operand::K).unwrap())[0] / pages.parts);
        let entry = |b: i64, n: i64| {
            let there = lengths.is_none_or(|lengths| ((n * pages.tokens) as f64) < lengths[b as usize]);
            let page = if there { table[(b * given + n / pages.parts) as usize].clamp(0.0, (all - 1) as f64) } else { 0.0 };
            page * pages.parts as f64 + (n % pages.parts) as f64
        };
        (0..batch).flat_map(|b| (0..each).map(move |n| (b, n))).map(|(b, n)| entry(b, n)).collect()
    }

    fn run(&self) -> Result<BTreeMap<TensorId, Value>, String> {
        interp::run(&self.lowered.graph, &self.inputs, Precision::F64).map_err(|e| e.to_string())
    }
}

/// The gradient of a parameter: what the graph writes, or the sums of that.
fn gradient(lowered: &Lowered, got: &BTreeMap<TensorId, Value>, wanted: &str) -> Result<Vec<f64>, String> {
    let sums = lowered.sums().map_err(|e| e.to_string())?;
    let Some(sums) = sums.iter().find(|s| s.name == wanted) else {
        let found = lowered.supplies.iter().find(|(_, s)| matches!(s, Supply::Gradient(name) if *name == wanted));
        let (id, _) = found.ok_or_else(|| format!("there is no gradient of {wanted}"))?;
        return Ok(got[id].data.clone());
    };
    sums.steps.iter().try_fold(got[&sums.tensor].data.clone(), |terms, step| {
        let dims = |id: TensorId| step.graph.get(id).unwrap().dims.0.to_vec();
        let ones = vec![1.0; step.terms as usize];
        let inputs = BTreeMap::from([(step.from, Value::new(dims(step.from), terms)), (step.ones, Value::new(dims(step.ones), ones))]);
        let mut got = interp::run(&step.graph, &inputs, Precision::F64).map_err(|e| e.to_string())?;
        Ok(got.remove(&step.to).unwrap().data)
    })
}

/// Everything about one problem.
struct Case<'a> {
    spec: &'a AttentionSpec,
    numbers: &'a Numbers,
    params: &'a [(String, Vec<f64>)],
    packing: Option<&'a Packing>,
    cache: Option<&'a Cache>,
    tolerance: f64,
}

/// The largest of `|got − want|` over its size is small.
fn near(what: &str, got: &[f64], want: &[f64], sizes: &[f64], tolerance: f64, skip: impl Fn(usize) -> bool) -> Result<(), String> {
    if got.len() != want.len() {
        return Err(format!("{what} has {} elements, not {}", got.len(), want.len()));
    }
    for (n, (&got, &want)) in got.iter().zip(want).enumerate() {
        let close = got == want || (got - want).abs() <= tolerance * (sizes[n] + want.abs());
        if !close && !skip(n) {
            return Err(format!("element {n} of {what} is {got:e}, not {want:e}"));
        }
    }
    Ok(())
}

impl Case<'_> {
    /// Whether a row of a tensor belongs to no document that has both sides.
    fn behind(&self, side: Side, dims: [i64; 4], row: usize) -> bool {
        let [_, heads, seq, _] = dims.map(|n| n as usize);
        self.packing.is_some_and(|packing| {
            let [q, kv] = Side::ALL.map(|side| packing.lengths(side)[row / seq / heads] as usize);
            q == 0 || kv == 0 || row % seq >= [q, kv][side as usize]
        })
    }

    fn forward(&self, closures: &Closures<'_>, form: Form, runtime: Version) -> Result<(), String> {
        let problem = self.spec.validate().map_err(|e| e.to_string())?;
        let lowered = lower::lower(&problem.into(), form, runtime).map_err(|e| e.to_string())?;
        let mut graph = Graph { lowered: &lowered, inputs: BTreeMap::new() };
        let (spec, n) = (self.spec, self.numbers);
        for (operand, tensor, data) in [(Operand::Q, &spec.q, &n.q), (Operand::K, &spec.k, &n.k), (Operand::V, &spec.v, &n.v)] {
            match (self.cache, operand.side()) {
                (Some(cache), Side::Keys) => graph.paged(operand, tensor, cache, data),
                (Some(_), Side::Queries) | (None, _) => graph.operand(operand, tensor.dims, data),
            }
        }
        graph.set(lowered.attn_scale, vec![n.scale]);
        graph.supply(self.params);
        graph.stay(n.dropout, [spec.q.dims[0], spec.q.dims[1], spec.q.dims[2], spec.k.dims[2]]);
        let got = graph.run()?;
        // Where the graph knows of no sinks, rows get theirs behind it.
        let reads_sink = |(_, supply): &(TensorId, Supply)| *supply == Supply::Param(SINK.to_owned());
        let sink = lowered.supplies.iter().any(reads_sink).then(|| self.params.iter().find(|(name, _)| name == SINK)).flatten();
        let want = oracle::attention(&oracle::Problem { sink: sink.map(|(_, sink)| &sink[..]), ..n.textbook(spec) }, closures);
        // In the mathematics of the primitive ops a row without a key is not a number; engines give zeros, which only they show.
        let undefined = |row: usize| {
            let keyless = want.stats[row] == f64::NEG_INFINITY && form == Form::Composite && runtime < lower::UNIFIED_SINCE;
            keyless || self.behind(Side::Queries, spec.o.dims, row)
        };
        let dim_v = spec.o.dims[3] as usize;
        let o = &got[&lowered.operand(Operand::O).unwrap()].data;
        near("o", o, &want.o, &want.o_magnitude, self.tolerance, |n| undefined(n / dim_v))?;
        let stats = &got[&lowered.stats.unwrap()].data;
        let natural: Vec<f64> = match self.spec.stats_base {
            StatsBase::Natural => stats.clone(),
            StatsBase::Two => stats.iter().map(|x| x * std::f64::consts::LN_2).collect(),
        };
        near("stats", &natural, &want.stats, &want.score_magnitude, self.tolerance, undefined)?;
        if let Some(row_max) = lowered.row_max {
            near("row_max", &got[&row_max].data, &want.row_max, &want.score_magnitude, self.tolerance, undefined)?;
        }
        let Some(sum_exp) = lowered.sum_exp else { return Ok(()) };
        let sizes: Vec<f64> = want.sum_exp.iter().zip(&want.score_magnitude).map(|(sum, score)| sum * score).collect();
        near("sum_exp", &got[&sum_exp].data, &want.sum_exp, &sizes, self.tolerance, undefined)
    }

    /// In every spelling.
    fn backward(&self, closures: &Closures<'_>, asked: &BackwardProblem, runtime: Version) -> Result<(), String> {
        for query_gradient in [QueryGradient::Summed, QueryGradient::AtOnce] {
            for vectors in [Vectors::AlongQueries, Vectors::Spread] {
                let lowered = lower::lower_backward(asked, runtime, Spelling { query_gradient, vectors }).map_err(|e| e.to_string())?;
                self.backward_as(closures, asked, &lowered).map_err(|e| format!("{query_gradient:?}, {vectors:?}: {e}"))?;
            }
        }
        Ok(())
    }

    fn backward_as(&self, closures: &Closures<'_>, asked: &BackwardProblem, lowered: &Lowered) -> Result<(), String> {
        let mut graph = Graph { lowered, inputs: BTreeMap::new() };
        let (spec, n) = (self.spec, self.numbers);
        let answer = oracle::attention(&n.textbook(spec), closures);
        for (operand, dims, data) in [
            (Operand::Q, spec.q.dims, &n.q),
            (Operand::K, spec.k.dims, &n.k),
            (Operand::V, spec.v.dims, &n.v),
            (Operand::O, spec.o.dims, &answer.o),
            (Operand::DO, spec.o.dims, &n.d_o),
        ] {
            graph.operand(operand, dims, data);
        }
        graph.set(lowered.stats.unwrap(), answer.stats.clone());
        graph.set(lowered.attn_scale, vec![n.scale]);
        graph.supply(self.params);
        graph.stay(n.dropout, [spec.q.dims[0], spec.q.dims[1], spec.q.dims[2], spec.k.dims[2]]);
        let got = graph.run()?;
        let Gradients { dq, dk, dv, along } = oracle::gradients(&n.textbook(spec), closures, &n.d_o);
        for (operand, dims, want) in [(Operand::DQ, spec.q.dims, &dq), (Operand::DK, spec.k.dims, &dk), (Operand::DV, spec.v.dims, &dv)] {
            let got = &got[&lowered.operand(operand).unwrap()].data;
            let behind = |n: usize| self.behind(operand.side(), dims, n / dims[3] as usize);
            near(operand.name(), got, &want.value, &want.magnitude, self.tolerance, behind)?;
        }
        for (wanted, want) in asked.wrt().iter().zip(&along) {
            let got = gradient(lowered, &got, &wanted.name)?;
            near(&wanted.name, &got, &want.value, &want.magnitude, self.tolerance, |_| false)?;
        }
        Ok(())
    }
}

const SHAPES: [Shape; 3] = [
    Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 16 },
    Shape { batch: 3, heads_q: 3, heads_kv: 3, seq_q: 9, seq_kv: 6, dim_qk: 8, dim_v: 8 },
    Shape { batch: 1, heads_q: 6, heads_kv: 1, seq_q: 1, seq_kv: 9, dim_qk: 16, dim_v: 8 },
];

const MODS: [&[&str]; 16] = [
    &[],
    &["softcap:2"],
    &["alibi"],
    &["alibi-slopes"],
    &["bias:"],
    &["bias:h"],
    &["bias:k"],
    &["bias:bq"],
    &["bias:qk"],
    &["bias:bhqk"],
    &["bias16:hqk"],
    &["bias16:bk"],
    &["sandwich:4"],
    &["softcap:3", "alibi-slopes"],
    &["bias:hqk", "softcap:2"],
    &["alibi", "bias:bhqk", "softcap:4"],
];

const MASKS: [&[&str]; 25] = [
    &[],
    &["causal"],
    &["causal-bottom-right"],
    &["window:3,1"],
    &["window:2,inf:bottom-right"],
    &["sliding-window:2"],
    &["prefix-lm:3"],
    &["dilated:2"],
    &["document"],
    &["shared-prefix:2"],
    &["padding"],
    &["global-local:2,1"],
    &["natten:3"],
    &["array:"],
    &["array:k"],
    &["array:bh"],
    &["array:bhqk"],
    &["padding", "causal"],
    &["padding", "document"],
    &["document", "sliding-window:3"],
    &["array:hqk", "prefix-lm:2", "dilated:3"],
    &["padding", "window:2,1", "array:qk"],
    &["padding", "causal-ends"],
    &["padding", "window:2,1:ends"],
    &["padding", "window:3,inf:ends", "causal-bottom-right"],
];

/// The values of all declared parameters: those that are bound, defaults for the others.
fn values(spec: &AttentionSpec, bound: &[Bound]) -> Vec<(String, Vec<f64>)> {
    values_of(spec.clone().backward().validate().unwrap().params(), bound)
}

fn values_of(declared: &[Declared], bound: &[Bound]) -> Vec<(String, Vec<f64>)> {
    let value = |name: &str, default: Option<f32>| match bound.iter().find(|b| b.name == name) {
        Some(bound) => bound.widened.to_vec(),
        None if name == DROPOUT_SEED => vec![SEED as f64],
        None if name == DROPOUT_OFFSET => vec![OFFSET as f64],
        None => vec![f64::from(default.unwrap_or_else(|| panic!("{name} is not drawn")))],
    };
    declared.iter().map(|p| (p.name.clone(), value(&p.name, p.default))).collect()
}

fn spec(shape: Shape, layout: Layout, mods: &[String], masks: &[String]) -> AttentionSpec {
    let mut spec = AttentionSpec::dense(DType::BF16, shape, layout).with_stats();
    spec.score_mods = mods.iter().map(|text| text.parse().unwrap()).collect();
    spec.masks = masks.iter().map(|text| text.parse().unwrap()).collect();
    spec
}

/// Every score_mod with every mask, in one of the shapes and layouts; all of them meet.
#[test]
fn graphs_of_the_library_mean_what_is_published() {
    let mut failures = Vec::new();
    let mut runs = 0;
    for (n, mods) in MODS.iter().enumerate() {
        for (m, masks) in MASKS.iter().enumerate() {
            let shape = SHAPES[(n + m) % SHAPES.len()];
            let layout = [Layout::Bhsd, Layout::Bshd, Layout::Sbhd][(n + m / 3) % 3];
            let [mods, masks] = [*mods, *masks].map(|names| names.iter().map(|&name| name.to_owned()).collect::<Vec<String>>());
            let mut spec = spec(shape, layout, &mods, &masks).with_row_max().with_sum_exp();
            if (n + 2 * m) % 3 == 0 {
                spec = spec.with_dropout(0.75);
            }
            let mut random = Random::new((n * 100 + m) as u64);
            let library = Library::draw(&mods, &masks, [shape.batch, shape.heads_q, shape.seq_q, shape.seq_kv], &mut random).unwrap();
            let numbers = Numbers::draw(&spec, &mut random);
            let params = values(&spec, &library.bound);
            let inexact = mods.iter().any(|m| m == "alibi" || m.starts_with("sandwich"));
            let case = Case {
                spec: &spec,
                numbers: &numbers,
                params: &params,
                packing: None,
                cache: None,
                tolerance: if inexact { CONSTANTS } else { EXACT },
            };
            let mut backward = spec.backward();
            backward.deterministic = m % 2 == 0;
            // The one gradient that engines sum.
            let biased = mods.first().is_some_and(|first| first.starts_with("bias"));
            let wrt: &[&str] = if biased { &["bias"] } else { &[] };
            let asked = wrt.iter().fold(backward, |b, name| b.wrt(name, DType::BF16)).validate().unwrap();
            library.with(wrt, |closures| {
                let mut told = |what: String, result: Result<(), String>| {
                    runs += 1;
                    failures.extend(result.err().map(|e| format!("{what} of {mods:?} with {masks:?}: {e}")));
                };
                for (form, runtime) in [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)] {
                    let result = case.forward(closures, form, runtime);
                    let told_why = result.as_ref().err().is_some_and(|e| e.contains("lengths with a score_mod or a traced mask"));
                    if form == Form::Unified && told_why && masks.iter().any(|m| m == "padding") {
                        continue;
                    }
                    if form == Form::Unified && spec.dropout.is_some() {
                        let refused = result.as_ref().err().is_some_and(|e| e.contains("has no dropout"));
                        told(format!("{form} {runtime}"), if refused { Ok(()) } else { Err(format!("not refused: {result:?}")) });
                        continue;
                    }
                    told(format!("{form} {runtime}"), result);
                }
                for runtime in [OLD, NEW] {
                    told(format!("backward {runtime}"), case.backward(closures, &asked, runtime));
                }
            });
        }
    }
    assert!(failures.is_empty(), "{} of {runs}\n{}", failures.len(), failures[..failures.len().min(12)].join("\n"));
}

/// Sinks are in the maxima and in the sums, and each statistic comes whatever others are asked for.
#[test]
fn row_statistics_come_alone_and_with_sinks() {
    for n in 0..8 {
        let mut spec = AttentionSpec::dense(DType::BF16, SHAPES[0], Layout::Bhsd).with_stats().mask(sdpa::Mask::causal());
        [spec.row_max, spec.sum_exp, spec.sink] = [1, 2, 4].map(|bit| n & bit != 0);
        let numbers = Numbers::draw(&spec, &mut Random::new(5));
        // Above all scores of some rows, and below all of others.
        let sinks = [0.5, 3.0, -4.0, f64::NEG_INFINITY];
        let params: Vec<(String, Vec<f64>)> = spec.sink.then(|| (SINK.to_owned(), sinks.to_vec())).into_iter().collect();
        let keep = |[.., q, k]: [i64; 4]| k <= q;
        let closures = Closures { keep: Some(&keep), ..Closures::default() };
        let case = Case { spec: &spec, numbers: &numbers, params: &params, packing: None, cache: None, tolerance: EXACT };
        for (form, runtime) in [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)] {
            let lowered = lower::lower(&spec.validate().unwrap().into(), form, runtime).unwrap();
            assert_eq!([lowered.row_max, lowered.sum_exp].map(|tensor| tensor.is_some()), [spec.row_max, spec.sum_exp]);
            case.forward(&closures, form, runtime).unwrap_or_else(|e| panic!("{n}, {form} {runtime}: {e}"));
        }
        let mut two = spec.clone();
        two.stats_base = StatsBase::Two;
        let case = Case { spec: &two, ..case };
        case.forward(&closures, Form::Composite, NEW).unwrap_or_else(|e| panic!("{n}, base two: {e}"));
        assert!(case.forward(&closures, Form::Unified, NEW).unwrap_err().contains("base two"));
    }
}

/// A gradient by hand is used in place of the derived one, with parameters of its own.
#[test]
fn gradients_by_hand_are_lowered() {
    let by_hand = ScoreMod::new("x", |s, _, p| s * p.scalar("a", 3.0)).unwrap();
    let by_hand = by_hand.with_bprop(|g, s, at, p| g * p.scalar("a", 3.0) + g * s * p.scalar("own", 0.5) * at.k.to_f32()).unwrap();
    let spec = AttentionSpec::dense(DType::BF16, SHAPES[0], Layout::Bhsd).with_stats().score_mod(by_hand).mask(sdpa::Mask::causal());
    let numbers = Numbers::draw(&spec, &mut Random::new(5));
    let params = [("a".to_owned(), vec![2.0]), ("own".to_owned(), vec![0.25])];
    let modify = |s: f64, _: Here| 2.0 * s;
    let slope = |s: f64, [.., k]: Here| 2.0 + 0.25 * s * k as f64;
    let keep = |[.., q, k]: Here| k <= q;
    let closures = Closures { modify: Some(&modify), slope: Some(&slope), keep: Some(&keep), ..Closures::default() };
    let case = Case { spec: &spec, numbers: &numbers, params: &params, packing: None, cache: None, tolerance: EXACT };
    case.backward(&closures, &spec.backward().validate().unwrap(), NEW).unwrap();
    let wrong = Closures { slope: Some(&|_, _| 2.0), ..closures };
    assert!(case.backward(&wrong, &spec.backward().validate().unwrap(), NEW).is_err());
}

/// The comparison notices what is a little wrong.
#[test]
fn what_is_a_little_wrong_is_found() {
    let names = ["bias:hqk".to_owned()];
    let masks = ["causal".to_owned()];
    let spec = spec(SHAPES[0], Layout::Bhsd, &names, &masks);
    let mut random = Random::new(3);
    let library = Library::draw(&names, &masks, [2, 4, 5, 7], &mut random).unwrap();
    let numbers = Numbers::draw(&spec, &mut random);
    let params = values(&spec, &library.bound);
    let asked = spec.backward().wrt("bias", DType::F16).validate().unwrap();
    library.with(&["bias"], |closures| {
        let case = Case { spec: &spec, numbers: &numbers, params: &params, packing: None, cache: None, tolerance: EXACT };
        assert!(case.forward(closures, Form::Composite, NEW).is_ok() && case.backward(closures, &asked, NEW).is_ok());
        let mut off = params.clone();
        off[0].1[0] += 1e-6;
        let wrong = Case { params: &off, ..case };
        assert!(wrong.forward(closures, Form::Unified, NEW).is_err() && wrong.backward(closures, &asked, NEW).is_err());
        let one = |_: f64, _: Here| 1.0;
        let elsewhere = [Along { slope: &one, dims: [1, 1, 1, 4 * 5 * 7], read: None }];
        let right = Case { params: &params, ..wrong };
        assert!(right.backward(&Closures { along: &elsewhere, ..*closures }, &asked, NEW).unwrap_err().contains("bias"));
    });
}
