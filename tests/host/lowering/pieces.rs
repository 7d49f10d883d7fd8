//! Passes in pieces, step by step: every graph by the interpreter, over the rows that its ports name, and what brings results together.

use super::{EXACT, NEW, Numbers, OLD, near, values};
use conformance::library::{Here, Library};
use conformance::oracle::{self, Closures, Gradients};
use conformance::random::Random;
use cudnn_graph::ir::TensorId;
use cudnn_graph::ir::interp::{self, Precision, Value};
use cudnn_graph::{DType as Element, Version};
use sdpa::cudnn::lower::{Form, Job, Operand, Table};
use sdpa::cudnn::schedule::{Argument, Contents, Launch, Number, Role, Run, Schedule, Source, Step};
use sdpa::cudnn::{Pieces, kernels::Own, plan};
use sdpa::expr::{self, Place};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape, Statistic, TensorSpec};
use std::collections::BTreeMap;

/// Memory of a call, element by element: a buffer for each operand and for each piece of the workspace.
struct Memory<'a> {
    schedule: &'a Schedule<()>,
    buffers: Vec<Vec<f64>>,
    /// The buffer of each slot, and the element of it that the slot begins at.
    slots: Vec<(usize, usize)>,
    scale: f64,
    params: &'a [(String, Vec<f64>)],
}

impl<'a> Memory<'a> {
    fn new(
        schedule: &'a Schedule<()>,
        job: &Job,
        given: &BTreeMap<Operand, Vec<f64>>,
        stats: &[f64],
        numbers: (f64, &'a [(String, Vec<f64>)]),
    ) -> Memory<'a> {
        let (scale, params) = numbers;
        let mut memory = Memory { schedule, buffers: Vec::new(), slots: Vec::new(), scale, params };
        let operands: Vec<Operand> = job.tensors().map(|(operand, _)| operand).collect();
        for (operand, tensor) in job.tensors() {
            let mut buffer = vec![f64::NAN; tensor.extent().unwrap() as usize];
            if let Some(numbers) = given.get(&operand) {
                places(&tensor).zip(numbers).for_each(|(place, number)| buffer[place] = *number);
            }
            memory.buffers.push(buffer);
        }
        let mut caller_stats = None;
        for slot in schedule.slots() {
            let at = |operand: Operand| operands.iter().position(|o| *o == operand).unwrap();
            let place = match slot.source {
                Source::Operand(operand) => (at(operand), 0),
                Source::Rows(operand, offset) => (at(operand), offset as usize / 2),
                Source::Statistic(Statistic::Stats) => (*caller_stats.get_or_insert_with(|| memory.push(stats.to_vec())), 0),
                Source::Param(n) => (memory.push(params[n].1.clone()), 0),
                Source::Scratch(_) => (memory.push(vec![f64::NAN; slot.bytes as usize / 2]), 0),
                Source::Table(n) => match &schedule.tables()[n] {
                    Contents::Numbers(Table::F32(x)) => (memory.push(x.iter().map(|x| f64::from(*x)).collect()), 0),
                    Contents::Numbers(Table::I32(x)) => (memory.push(x.iter().map(|x| f64::from(*x)).collect()), 0),
                    Contents::Ones(..) => panic!("pieces sum nothing"),
                },
                Source::Statistic(_) | Source::Gradient(_) | Source::Amax(_) | Source::Lengths { .. } => {
                    panic!("pieces have no {}", slot.name)
                }
            };
            memory.slots.push(place);
        }
        memory
    }

    fn push(&mut self, buffer: Vec<f64>) -> usize {
        self.buffers.push(buffer);
        self.buffers.len() - 1
    }

    fn number(&self, number: &Number) -> f64 {
        match number {
            Number::Scale => self.scale,
            Number::Fixed(value) => value.to_f64(),
            Number::Param(at) => self.params[*at].1[0],
            Number::Of(trace, params) => {
                let scalars: Vec<f64> = params.iter().map(|&at| self.params[at].1[0]).collect();
                let at = Place { score: f64::NAN, upstream: f64::NAN, index: [0; 4], extents: [0; 4], params: &scalars };
                trace.eval_first(&at, expr::Precision::F64)
            }
        }
    }

    fn run(&mut self, run: &Run<()>) {
        let graph = &run.graph;
        let strided = |id: TensorId| {
            let tensor = graph.get(id).unwrap();
            (tensor.dims.0.clone(), tensor.strides.0.clone())
        };
        let written: Vec<TensorId> =
            graph.graph().ops().iter().flat_map(|op| op.operands().outputs).map(|written| written.tensor).collect();
        let mut inputs = BTreeMap::new();
        for port in run.ports.iter().filter(|port| !written.contains(&port.tensor)) {
            let (dims, strides) = strided(port.tensor);
            let (buffer, from) = self.slots[port.slot.index()];
            let data: Vec<f64> = spots(&dims, &strides).map(|at| self.buffers[buffer][from + at]).collect();
            inputs.insert(port.tensor, Value::new(dims, data));
        }
        // The graph has its own numbers.
        for (id, number) in run.numbers.iter().filter(|(_, number)| !matches!(number, Number::Fixed(_))) {
            inputs.insert(*id, Value::new(strided(*id).0, vec![self.number(number)]));
        }
        let got = interp::run(graph, &inputs, Precision::F64).unwrap();
        for port in run.ports.iter().filter(|port| written.contains(&port.tensor)) {
            let (dims, strides) = strided(port.tensor);
            let (buffer, from) = self.slots[port.slot.index()];
            for (at, number) in spots(&dims, &strides).zip(&got[&port.tensor].data) {
                self.buffers[buffer][from + at] = *number;
            }
        }
    }

    /// What the kernels of pieces do, by what their source says of their arguments.
    fn launch(&mut self, launch: &Launch) {
        let fixed = |n: usize| match launch.arguments[n] {
            Argument::Fixed(x) => x as usize,
            Argument::Slot(_) | Argument::Tokens(_) => panic!("argument {n} is no number"),
        };
        let slot = |n: usize| match launch.arguments[n] {
            Argument::Slot(slot) => self.slots[slot.index()],
            Argument::Fixed(_) | Argument::Tokens(_) => panic!("argument {n} is no slot"),
        };
        let row = |n: usize, at: usize| {
            let (buffer, from) = slot(at);
            let [heads, rows] = [fixed(1), fixed(2)];
            (buffer, from + n / rows / heads * fixed(at + 1) + n / rows % heads * fixed(at + 2) + n % rows * fixed(at + 3))
        };
        let count = fixed(0);
        let threads = launch.grid[0] as usize * launch.grid[1] as usize;
        let lanes = if launch.kernel == Own::StatsRows { 1 } else { fixed(launch.arguments.len() - 1) };
        assert!(threads >= count * lanes && lanes.is_power_of_two() && lanes <= 32);
        let mut write = Vec::new();
        for n in 0..count {
            match launch.kernel {
                Own::StatsRows => {
                    let [rows, longest, from] = [1, 2, 3].map(fixed);
                    let (whole, own) = (slot(4), slot(5));
                    let (there, here) = ((whole.0, n / rows * longest + from + n % rows), (own.0, own.1 + n));
                    let (from, to) = if fixed(6) == 1 { (there, here) } else { (here, there) };
                    write.push((to, self.buffers[from.0][from.1]));
                }
                Own::MergeRows => {
                    let [rows, longest, from] = [2, 3, 4].map(fixed);
                    let (whole, own) = (slot(5), slot(6));
                    let there = (whole.0, n / rows * longest + from + n % rows);
                    let (old, here) = (self.buffers[there.0][there.1], self.buffers[own.0][own.1 + n]);
                    let all = (old.exp() + here.exp()).ln();
                    let (to, part) = (row(n, 7), row(n, 11));
                    for i in 0..fixed(15) {
                        let weighed = |at: (usize, usize), s: f64| {
                            if s == f64::NEG_INFINITY { 0.0 } else { self.buffers[at.0][at.1 + i] * (s - all).exp() }
                        };
                        let sum = weighed(to, old) + weighed(part, here);
                        if here != f64::NEG_INFINITY {
                            write.push(((to.0, to.1 + i), sum));
                        }
                    }
                    write.push((there, all));
                }
                Own::AddRows => {
                    let (to, part) = (row(n, 3), row(n, 7));
                    for i in 0..fixed(11) {
                        write.push(((to.0, to.1 + i), self.buffers[to.0][to.1 + i] + self.buffers[part.0][part.1 + i]));
                    }
                }
                Own::Documents | Own::Unpaired | Own::SinkRows | Own::SinkParts | Own::SinkGradient | Own::Entries | Own::RowSums => {
                    panic!("pieces launch no {:?}", launch.kernel)
                }
            }
        }
        for ((buffer, at), number) in write {
            self.buffers[buffer][at] = number;
        }
    }

    fn all(&mut self) {
        for step in self.schedule.steps() {
            match step {
                Step::Run(run) => self.run(run),
                Step::Launch(launch) => self.launch(launch),
                Step::Zero(_) | Step::Move(..) => panic!("pieces neither fill nor copy"),
            }
        }
    }

    fn stats(&self) -> &[f64] {
        let slot = self.schedule.slots().iter().position(|slot| slot.source == Source::Statistic(Statistic::Stats)).unwrap();
        &self.buffers[self.slots[slot].0]
    }
}

/// Where the elements of a tensor are, row by row.
fn spots(dims: &[i64], strides: &[i64]) -> impl Iterator<Item = usize> {
    let (dims, strides) = (dims.to_vec(), strides.to_vec());
    (0..dims.iter().product::<i64>()).map(move |n| {
        let index = |axis: usize| n / dims[axis + 1..].iter().product::<i64>() % dims[axis];
        (0..dims.len()).map(|axis| index(axis) * strides[axis]).sum::<i64>() as usize
    })
}

fn places(tensor: &TensorSpec) -> impl Iterator<Item = usize> {
    spots(&tensor.dims, &tensor.strides)
}

fn read(memory: &Memory<'_>, job: &Job, operand: Operand) -> Vec<f64> {
    let at = job.tensors().position(|(o, _)| o == operand).unwrap();
    places(job.tensor(operand).unwrap()).map(|place| memory.buffers[at][place]).collect()
}

/// Masks, and what they keep of a query and a key, of so many keys.
type Rule = (&'static [&'static str], fn(i64, i64, i64) -> bool);

const MASKS: [Rule; 9] = [
    (&["prefix-lm:5"], |q, k, _| k <= q || k < 5),
    (&["prefix-lm:9", "window:6,inf"], |q, k, _| (k <= q || k < 9) && k > q - 6),
    (&["global-local:3,2"], |q, k, _| q < 2 || k < 2 || (q - k).abs() <= 2),
    (&["k < 4 & k <= q | k - q <= 0 & k - q > -3"], |q, k, _| k <= q && (k < 4 || k > q - 3)),
    (&["k < 2 | q < 3 | k <= q"], |q, k, _| k < 2 || q < 3 || k <= q),
    (&["q < 8 & k < 8 | q >= 8 & k >= 8"], |q, k, _| (q < 8) == (k < 8)),
    (&["prefix-lm:16"], |q, k, _| k <= q || k < 16),
    (&["natten:5"], |q, k, all| {
        let first = (q - 2).min(all - 5).max(0);
        (first..first + 5).contains(&k)
    }),
    (&["abs(q - k) >= 14 | k < 3"], |q, k, _| (q - k).abs() >= 14 || k < 3),
];
const MODS: [&[&str]; 4] = [&[], &["softcap:2"], &["alibi-slopes"], &["bias:h", "softcap:3"]];

fn shapes() -> [Shape; 3] {
    let shape = |batch, heads_q, heads_kv, seq_q, seq_kv| Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: 16, dim_v: 8 };
    [shape(2, 4, 2, 19, 19), shape(1, 3, 3, 23, 17), shape(3, 2, 1, 17, 24)]
}

/// Strides with gaps between rows and between heads, in multiples of what engines read at once.
fn gaps(tensor: &mut TensorSpec) {
    let [_, heads, rows, dim] = tensor.dims;
    let row = dim + 8;
    let head = row * rows + 16;
    tensor.strides = [head * heads + 24, head, row, 1];
}

fn check(
    spec: &AttentionSpec,
    mods: &[String],
    rule: fn(i64, i64, i64) -> bool,
    runtime: Version,
    random: &mut Random,
) -> Result<usize, String> {
    let [batch, heads, seq_q, _] = spec.q.dims;
    let library = Library::draw(mods, &[], [batch, heads, seq_q, spec.k.dims[2]], random).unwrap();
    let numbers = Numbers::draw(spec, random);
    let params = values(spec, &library.bound);
    let keep = |[.., q, k]: Here| rule(q, k, spec.k.dims[2]);
    let mut ran = 0;
    library
        .with(&[], |closures| {
            let closures = &Closures { keep: Some(&keep), ..*closures };
            let answer = oracle::attention(&numbers.textbook(spec), closures);
            let mut given =
                BTreeMap::from([(Operand::Q, numbers.q.clone()), (Operand::K, numbers.k.clone()), (Operand::V, numbers.v.clone())]);
            let job: Job = spec.validate().map_err(|e| e.to_string())?.into();
            let schedule = plan::schedule(&job, Form::Composite, runtime, Pieces::Always).map_err(|e| e.to_string())?;
            if schedule.runs().any(|run| matches!(run.role, Role::Piece(_))) {
                ran += 1;
                let poison = vec![f64::NAN; answer.stats.len()];
                let mut memory = Memory::new(&schedule, &job, &given, &poison, (numbers.scale, &params));
                memory.all();
                near("o", &read(&memory, &job, Operand::O), &answer.o, &answer.o_magnitude, EXACT, |_| false)?;
                if spec.stats {
                    near("stats", memory.stats(), &answer.stats, &answer.score_magnitude, EXACT, |_| false)?;
                }
            }
            let backward = spec.backward().validate().map_err(|e| e.to_string())?;
            let job: Job = backward.into();
            let schedule = plan::schedule(&job, Form::Composite, runtime, Pieces::Always).map_err(|e| e.to_string())?;
            if !schedule.runs().any(|run| matches!(run.role, Role::Piece(_))) {
                return Ok(());
            }
            ran += 1;
            given.extend([(Operand::O, answer.o.clone()), (Operand::DO, numbers.d_o.clone())]);
            let mut memory = Memory::new(&schedule, &job, &given, &answer.stats, (numbers.scale, &params));
            memory.all();
            let Gradients { dq, dk, dv, along: _ } = oracle::gradients(&numbers.textbook(spec), closures, &numbers.d_o);
            for (operand, want) in [(Operand::DQ, &dq), (Operand::DK, &dk), (Operand::DV, &dv)] {
                near(operand.name(), &read(&memory, &job, operand), &want.value, &want.magnitude, EXACT, |_| false)?;
            }
            Ok(())
        })
        .map(|()| ran)
}

/// Pieces of every kind of mask, with score_mods that know where they are, in any strides, with stats and without.
#[test]
fn pieces_together_are_the_whole() {
    let (mut failures, mut ran) = (Vec::new(), 0);
    for (n, (masks, rule)) in MASKS.into_iter().enumerate() {
        for (m, mods) in MODS.iter().enumerate() {
            for (s, shape) in shapes().into_iter().enumerate() {
                let mut random = Random::new((n * 100 + m * 10 + s) as u64);
                let mods: Vec<String> = mods.iter().map(|&name| name.to_owned()).collect();
                let mut spec = AttentionSpec::dense(DType::BF16, shape, [Layout::Bhsd, Layout::Bshd][(n + s) % 2]);
                spec.score_mods = mods.iter().map(|text| text.parse().unwrap()).collect();
                spec.masks = masks.iter().map(|text| text.parse::<Mask>().unwrap()).collect();
                spec.stats = (n + m + s) % 3 > 0;
                if (m + s) % 2 == 0 {
                    [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o].into_iter().for_each(gaps);
                }
                match check(&spec, &mods, rule, [OLD, NEW][(m + s) % 2], &mut random) {
                    Ok(passes) => ran += passes,
                    Err(why) => failures.push(format!("{masks:?} with {mods:?} over {shape:?}: {why}")),
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failed\n{}", failures.len(), failures[..failures.len().min(8)].join("\n"));
    assert!(ran > 140, "{ran} passes in pieces");
}

/// Elements are of 16 bits wherever pieces are offset.
#[test]
fn offsets_are_rows() {
    let spec = AttentionSpec::dense(DType::BF16, shapes()[0], Layout::Bshd).mask("prefix-lm:5".parse().unwrap());
    let job: Job = spec.backward().validate().unwrap().into();
    let schedule = plan::schedule(&job, Form::Composite, NEW, Pieces::Always).unwrap();
    let offsets: Vec<(Operand, u64)> = schedule
        .slots()
        .iter()
        .filter_map(|slot| match slot.source {
            Source::Rows(operand, offset) => Some((operand, offset)),
            Source::Operand(_)
            | Source::Statistic(_)
            | Source::Param(_)
            | Source::Gradient(_)
            | Source::Amax(_)
            | Source::Table(_)
            | Source::Scratch(_)
            | Source::Lengths { .. } => None,
        })
        .collect();
    let bytes = |heads: u64, dim: u64| 5 * heads * dim * u64::from(Element::BF16.bits() / 8);
    let want = [
        (Operand::Q, bytes(4, 16)),
        (Operand::K, bytes(2, 16)),
        (Operand::V, bytes(2, 8)),
        (Operand::O, bytes(4, 8)),
        (Operand::DO, bytes(4, 8)),
        (Operand::DQ, bytes(4, 16)),
        (Operand::DK, bytes(2, 16)),
        (Operand::DV, bytes(2, 8)),
    ];
    for expected in want {
        assert!(offsets.contains(&expected), "{expected:?} is not among {offsets:?}");
    }
}
