//! Tensors past 2³¹ and 2³² elements and bytes: every operand stretched along every axis, many slices behind one another, many rows, a large
//! workspace. Each slice holds the same numbers as the one of a small problem, so that its results have to be those.
#![allow(unsafe_code)]

use crate::cuda;
use crate::memory::slice;
use crate::setup::{Result, executor};
use conformance::random::Random;
use cudnn_graph::{Buffer, DeviceSlice, Stream};
use half::bf16;
use sdpa::cudnn::lower::Operand;
use sdpa::cudnn::{DeviceBackward, DeviceForward, PlanOptions};
use sdpa::{AttentionSpec, BackwardSpec, DType, DeviceExecutor, Error, Layout, Mask, Shape, TensorSpec};

const INPUTS: [Operand; 3] = [Operand::Q, Operand::K, Operand::V];
const GRADIENTS: [Operand; 3] = [Operand::DQ, Operand::DK, Operand::DV];
/// How far a result may be from that of the small problem, as a part of its largest element: sums of gradients come in any order.
const TOLERANCE: f32 = 0.02;

type On = dyn DeviceExecutor<Memory = DeviceSlice, Stream = Stream>;

/// One tensor in device memory, of which only what the tensor reaches is ever touched.
struct Place {
    operand: Operand,
    spec: TensorSpec,
    buffer: Buffer,
}

impl Place {
    fn new(stream: &Stream, operand: Operand, spec: TensorSpec) -> Result<Place> {
        let elements = usize::try_from(spec.extent().unwrap_or(0))?;
        let mut buffer = Buffer::new(stream.device(), elements * 2)?;
        buffer.fill(stream, 0xff)?;
        Ok(Place { operand, spec, buffer })
    }

    fn starts(&self) -> Vec<usize> {
        let TensorSpec { dims, strides, .. } = self.spec;
        let mut all = Vec::new();
        for b in 0..dims[0] {
            for h in 0..dims[1] {
                for s in 0..dims[2] {
                    all.push((b * strides[0] + h * strides[1] + s * strides[2]) as usize * 2);
                }
            }
        }
        all
    }

    /// The same rows in every slice of batch entry and head.
    fn put(&mut self, stream: &Stream, rows: &[bf16]) -> Result<()> {
        let [_, heads, seq, dim] = self.spec.dims;
        let strides = self.spec.strides;
        if strides[2] == dim && strides[1] == seq * dim && strides[0] == heads * seq * dim {
            // Slices behind one another go in large pieces.
            let all = usize::try_from(self.spec.dims[0] * heads)?;
            let many = (64 << 20) / (rows.len() * 2) + 1;
            let piece: Vec<bf16> = rows.iter().copied().cycle().take(rows.len() * many.min(all)).collect();
            let mut at = 0;
            while at < all {
                let count = many.min(all - at);
                self.buffer.upload(stream, at * rows.len() * 2, &piece[..count * rows.len()])?;
                at += count;
            }
            return Ok(());
        }
        let dim = usize::try_from(dim)?;
        let seq = usize::try_from(seq)?;
        if self.spec.dims[0] * heads > 1000 {
            // As many slices behind one another as make a large piece, gaps and all.
            let slice = usize::try_from(strides[1])?;
            let mut one = vec![bf16::NAN; slice];
            for s in 0..seq {
                let at = s * usize::try_from(strides[2])?;
                one[at..at + dim].copy_from_slice(&rows[s * dim..][..dim]);
            }
            let all = usize::try_from(self.spec.dims[0] * heads)?;
            let many = (64 << 20) / (slice * 2) + 1;
            let piece: Vec<bf16> = one.iter().copied().cycle().take(slice * many).collect();
            let mut at = 0;
            while at < all {
                let count = many.min(all - at);
                let bytes = (at * slice * 2, (count * slice * 2).min(self.buffer.bytes() - at * slice * 2));
                self.buffer.upload(stream, bytes.0, &piece[..bytes.1 / 2])?;
                at += count;
            }
            return Ok(());
        }
        for (n, start) in self.starts().into_iter().enumerate() {
            self.buffer.upload(stream, start, &rows[n % seq * dim..][..dim])?;
        }
        Ok(())
    }

    /// How far slices are from `want` at most, as a part of its largest element; infinite where something is no number.
    fn off(&self, stream: &Stream, want: &[f32], slices: &[usize]) -> Result<f32> {
        let [_, heads, seq, dim] = self.spec.dims;
        let strides = self.spec.strides;
        let largest = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let mut worst = 0.0f32;
        for &n in slices {
            let (b, h) = (n as i64 / heads, n as i64 % heads);
            let mut got = vec![bf16::ZERO; want.len()];
            let start = b * strides[0] + h * strides[1];
            if strides[2] == dim {
                self.buffer.download(stream, usize::try_from(start * 2)?, &mut got)?;
            } else {
                for s in 0..seq {
                    let row = &mut got[usize::try_from(s * dim)?..][..usize::try_from(dim)?];
                    self.buffer.download(stream, usize::try_from((start + s * strides[2]) * 2)?, row)?;
                }
            }
            for (x, y) in got.iter().zip(want) {
                let off = (x.to_f32() - y).abs() / largest;
                worst = if off.is_nan() { f32::INFINITY } else { worst.max(off) };
            }
        }
        Ok(worst)
    }
}

/// Inputs of one slice, and what comes of them.
struct Slices {
    inputs: Vec<(Operand, Vec<bf16>)>,
    results: Vec<(Operand, Vec<f32>)>,
}

fn numbers(count: i64, seed: u64) -> Vec<bf16> {
    let mut random = Random::new(seed);
    (0..count).map(|_| bf16::from_f32(random.normal() as f32)).collect()
}

/// What a pass over places came to.
enum Came {
    Ran(Vec<Place>),
    Unsupported(String),
}

fn tensors(spec: &BackwardSpec, backward: bool) -> Vec<(Operand, TensorSpec)> {
    let f = &spec.forward;
    let mut all = vec![(Operand::Q, f.q), (Operand::K, f.k), (Operand::V, f.v), (Operand::O, f.o)];
    if backward {
        all.extend([(Operand::DO, spec.d_o), (Operand::DQ, spec.dq), (Operand::DK, spec.dk), (Operand::DV, spec.dv)]);
    }
    all
}

/// Runs one pass; for a backward one, `o` and `stats` come of a forward pass over the same memory, or of the small problem.
fn pass(executor: &On, stream: &Stream, spec: &BackwardSpec, backward: bool, from: &Slices) -> Result<Came> {
    let f = &spec.forward;
    let ready = if backward { executor.prepare_device_backward(&spec.validate()?) } else { executor.prepare_device(&f.validate()?) };
    let ready = match ready {
        Ok(ready) => ready,
        Err(Error::Unsupported(why)) => return Ok(Came::Unsupported(why.to_string().replace('\n', "; "))),
        Err(other) => return Err(other.into()),
    };
    let mut places = Vec::new();
    for (operand, tensor) in tensors(spec, backward) {
        let mut place = Place::new(stream, operand, tensor)?;
        if let Some((_, rows)) = from.inputs.iter().find(|(o, _)| *o == operand) {
            place.put(stream, rows)?;
        }
        places.push(place);
    }
    let rows = usize::try_from(f.q.dims[0] * f.q.dims[1] * f.q.dims[2])?;
    let mut stats = Buffer::new(stream.device(), rows * 4)?;
    stats.fill(stream, 0xff)?;
    let workspace = Buffer::new(stream.device(), usize::try_from(ready.workspace_bytes())?)?;
    let at = |places: &[Place], operand| places.iter().find(|p| p.operand == operand).map_or(slice(&workspace), |p| slice(&p.buffer));
    if backward {
        // The forward pass over dense tensors of the same slices, so that only the backward pass is judged.
        let (first, statistics) =
            (from.results.iter().find(|(o, _)| *o == Operand::O), from.results.iter().find(|(o, _)| *o == Operand::DO));
        let (Some((_, o)), Some((_, statistics))) = (first, statistics) else { return Err("no forward results".into()) };
        let o: Vec<bf16> = o.iter().map(|&x| bf16::from_f32(x)).collect();
        places.iter_mut().filter(|p| p.operand == Operand::O).try_for_each(|p| p.put(stream, &o))?;
        let all: Vec<f32> = statistics.iter().copied().cycle().take(rows).collect();
        stats.upload(stream, 0, &all)?;
        let [q, k, v, o, d_o] = [Operand::Q, Operand::K, Operand::V, Operand::O, Operand::DO].map(|operand| at(&places, operand));
        let [dq, dk, dv] = GRADIENTS.map(|operand| at(&places, operand));
        let (stats, workspace) = (slice(&stats), Some(slice(&workspace)));
        let call = DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).workspace(workspace);
        // SAFETY: whole buffers of this device, which outlive the synchronisation.
        unsafe { ready.submit(stream, &(&call).into()) }?;
    } else {
        let [q, k, v, o] = [Operand::Q, Operand::K, Operand::V, Operand::O].map(|operand| at(&places, operand));
        let (stats, workspace) = (Some(slice(&stats)), Some(slice(&workspace)));
        let call = DeviceForward::new(q, k, v, o).stats(stats).workspace(workspace);
        // SAFETY: as above.
        unsafe { ready.submit(stream, &(&call).into()) }?;
    }
    stream.synchronize()?;
    Ok(Came::Ran(places))
}

/// The small problem of one slice.
fn small(executor: &On, stream: &Stream, shape: Shape, causal: bool) -> Result<Slices> {
    let one = Shape { batch: 1, heads_q: 1, heads_kv: 1, ..shape };
    let spec = problem(one, causal);
    let (query, key) = (shape.seq_q * shape.dim_qk, shape.seq_kv * shape.dim_qk);
    let mut slices = Slices {
        inputs: vec![
            (Operand::Q, numbers(query, 1)),
            (Operand::K, numbers(key, 2)),
            (Operand::V, numbers(key, 3)),
            (Operand::DO, numbers(query, 4)),
        ],
        results: Vec::new(),
    };
    let read = |places: &[Place], operand: Operand| -> Result<Vec<f32>> {
        let place = places.iter().find(|p| p.operand == operand).ok_or("no such operand")?;
        let mut got = vec![bf16::ZERO; place.buffer.bytes() / 2];
        place.buffer.download(stream, 0, &mut got)?;
        Ok(got.iter().map(|x| x.to_f32()).collect())
    };
    let ready = executor.prepare_device(&spec.forward.validate()?)?;
    let mut places = Vec::new();
    for (operand, tensor) in tensors(&spec, false) {
        let mut place = Place::new(stream, operand, tensor)?;
        if let Some((_, rows)) = slices.inputs.iter().find(|(o, _)| *o == operand) {
            place.put(stream, rows)?;
        }
        places.push(place);
    }
    let stats = Buffer::new(stream.device(), usize::try_from(shape.seq_q * 4)?)?;
    let workspace = Buffer::new(stream.device(), usize::try_from(ready.workspace_bytes())?)?;
    let [q, k, v, o] = [0, 1, 2, 3].map(|n: usize| slice(&places[n].buffer));
    let call = DeviceForward::new(q, k, v, o).stats(slice(&stats)).workspace(slice(&workspace));
    // SAFETY: whole buffers of this device, which outlive the synchronisation.
    unsafe { ready.submit(stream, &(&call).into()) }?;
    stream.synchronize()?;
    slices.results.push((Operand::O, read(&places, Operand::O)?));
    let mut statistics = vec![0f32; usize::try_from(shape.seq_q)?];
    stats.download(stream, 0, &mut statistics)?;
    // Under the name of an operand that has no result of its own.
    slices.results.push((Operand::DO, statistics));
    if let Came::Ran(places) = pass(executor, stream, &spec, true, &slices)? {
        for operand in GRADIENTS {
            slices.results.push((operand, read(&places, operand)?));
        }
    }
    Ok(slices)
}

fn problem(shape: Shape, causal: bool) -> BackwardSpec {
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).with_stats();
    if causal {
        spec = spec.mask(Mask::causal());
    }
    spec.backward()
}

fn of(spec: &mut BackwardSpec, operand: Operand) -> &mut TensorSpec {
    match operand {
        Operand::Q => &mut spec.forward.q,
        Operand::K => &mut spec.forward.k,
        Operand::V => &mut spec.forward.v,
        Operand::O => &mut spec.forward.o,
        Operand::DO => &mut spec.d_o,
        Operand::DQ => &mut spec.dq,
        Operand::DK => &mut spec.dk,
        Operand::DV => &mut spec.dv,
    }
}

/// Runs a pass and prints how far it is off; 1 where that is too far.
fn judge(executor: &On, stream: &Stream, what: &str, spec: &BackwardSpec, backward: bool, from: &Slices) -> Result<usize> {
    let came = match pass(executor, stream, spec, backward, from) {
        Ok(came) => came,
        Err(error) => {
            println!("{what}: not run, {error}");
            return Ok(1);
        }
    };
    match came {
        Came::Unsupported(why) => {
            println!("{what}: unsupported, {why}");
            Ok(0)
        }
        Came::Ran(places) => {
            let results: &[Operand] = if backward { &GRADIENTS } else { &[Operand::O] };
            let (mut words, mut wrong) = (Vec::new(), 0);
            for operand in results {
                let place = places.iter().find(|p| p.operand == *operand).ok_or("no such result")?;
                let want = &from.results.iter().find(|(o, _)| o == operand).ok_or("no such small result")?.1;
                let all = usize::try_from(place.spec.dims[0] * place.spec.dims[1])?;
                let mut slices: Vec<usize> = if all <= 8 { (0..all).collect() } else { vec![0, 1, all - 2, all - 1] };
                if all > 8 {
                    let each = want.len();
                    for edge in [1usize << 30, 1 << 31, 1 << 32] {
                        slices.extend((edge / each).saturating_sub(2)..(edge / each + 3).min(all));
                    }
                    let mut random = Random::new(5);
                    slices.extend((0..100).map(|_| (random.bits() % all as u64) as usize));
                    slices.retain(|&n| n < all);
                }
                let bad: Vec<usize> = {
                    let mut bad = Vec::new();
                    slices.sort_unstable();
                    slices.dedup();
                    for &n in &slices {
                        if place.off(stream, want, &[n])? > TOLERANCE {
                            bad.push(n);
                        }
                    }
                    bad
                };
                if let (Some(first), Some(last)) = (bad.first(), bad.last()) {
                    wrong = 1;
                    let off = place.off(stream, want, &[*first])?;
                    words.push(format!("{operand} WRONG in {} of {} slices, {first} to {last}, {off:.2} off", bad.len(), slices.len()));
                } else {
                    words.push(format!("{operand} right"));
                }
            }
            println!("{what}: {}", words.join(", "));
            Ok(wrong)
        }
    }
}

/// cuDNN's, or of native CUDA kernels.
pub(crate) fn run(which: &str, own: bool) -> Result<()> {
    if own {
        let executor = cuda::executor(None)?;
        return all(which, &executor, &executor.device().stream()?);
    }
    let executor = executor(PlanOptions::default())?;
    all(which, &executor, &executor.device().stream()?)
}

fn all(which: &str, executor: &On, stream: &Stream) -> Result<()> {
    let mut wrong = 0;
    if which != "large" {
        let shape = Shape { batch: 2, heads_q: 2, heads_kv: 2, seq_q: 130, seq_kv: 130, dim_qk: 64, dim_v: 64 };
        let from = small(executor, stream, shape, true)?;
        for backward in [false, true] {
            for operand in tensors(&problem(shape, true), backward).into_iter().map(|(operand, _)| operand) {
                for axis in 0..3 {
                    // The last index of the axis begins here.
                    for far in [(1i64 << 31) - (1 << 16), 1 << 31, (1 << 32) + 64] {
                        let mut spec = problem(shape, true);
                        let tensor = of(&mut spec, operand);
                        tensor.strides[axis] = (far / (tensor.dims[axis] - 1) + 7) / 8 * 8;
                        // Axes inside of a stretched one lie as they did; those outside come behind one another within it.
                        let pass = if backward { "backward" } else { "forward" };
                        let what = format!("{pass}, {operand}, axis {axis}, last at {:#x}", tensor.strides[axis] * (tensor.dims[axis] - 1));
                        if axis == 2 {
                            // Slices lie between the rows.
                            tensor.strides[1] = 64;
                            tensor.strides[0] = 128;
                        } else if axis == 1 {
                            tensor.strides[0] = 130 * 64;
                        }
                        wrong += judge(executor, stream, &what, &spec, backward, &from)?;
                    }
                }
            }
        }
    }
    if which != "strides" {
        for (batch, heads_q, heads_kv, seq_q, seq_kv, dim, causal, backward, deterministic) in [
            (1030, 128, 128, 130, 130, 128, true, false, false),
            (1030, 128, 128, 130, 130, 128, true, true, false),
            (2060, 128, 128, 130, 130, 128, false, false, false),
            // Rows past 2³¹.
            (32_800, 128, 1, 512, 16, 8, false, false, false),
            // The gradient of scores in the workspace: 2³² elements.
            (2, 16, 16, 11_600, 11_600, 64, false, true, true),
            (3, 16, 16, 11_600, 11_600, 64, false, true, true),
        ] {
            let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: dim, dim_v: dim };
            let from = small(executor, stream, shape, causal)?;
            let mut spec = problem(shape, causal);
            spec.deterministic = deterministic;
            let pass = if backward { "backward" } else { "forward" };
            let what =
                format!("{pass} ({batch},{heads_q},{heads_kv},{seq_q},{seq_kv},{dim}), causal {causal}, deterministic {deterministic}");
            wrong += judge(executor, stream, &what, &spec, backward, &from)?;
        }
    }
    if which != "strides" {
        // Rows with gaps that engines do not read in place: copied first, and 2³¹ elements are copied.
        let shape = Shape { batch: 1030, heads_q: 128, heads_kv: 128, seq_q: 130, seq_kv: 130, dim_qk: 128, dim_v: 128 };
        let from = small(executor, stream, shape, true)?;
        for operand in INPUTS {
            let mut spec = problem(shape, true);
            let tensor = of(&mut spec, operand);
            tensor.strides = [128 * 130 * 130, 130 * 130, 130, 1];
            wrong += judge(executor, stream, &format!("forward of 1030 x 128 slices, {operand} copied"), &spec, false, &from)?;
        }
    }
    println!("limits: {wrong} wrong");
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} wrong").into()) }
}
