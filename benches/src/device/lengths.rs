//! Lengths, boundaries and indices that nobody has checked: whatever they hold, nothing is written outside of the results, and what comes of
//! them is what comes of the nearest ones that mean something. And what it costs that lengths are clamped.
#![allow(unsafe_code)]

use crate::arena::Arena;
use crate::memory::random;
use crate::setup::{Result, executor, median};
use cudnn_graph::{Buffer, Stream};
use sdpa::cudnn::Error;
use sdpa::cudnn::lower::{Job, Operand};
use sdpa::cudnn::{CudnnExecutor, DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue, PlanOptions, Planned};
use sdpa::expr::ParamKind;
use sdpa::{AttentionSpec, DType, DType as D, Layout, Shape};
use std::time::Instant;

/// A pass with its memory.
struct Case<'a> {
    executor: &'a CudnnExecutor,
    stream: &'a Stream,
    planned: std::sync::Arc<Planned>,
    arena: Arena,
    stats: bool,
    gradients: Vec<String>,
}

impl<'a> Case<'a> {
    fn new(executor: &'a CudnnExecutor, stream: &'a Stream, spec: &AttentionSpec, backward: bool) -> Result<Option<Case<'a>>> {
        let planned =
            if backward { executor.attention_backward(&spec.backward().validate()?) } else { executor.attention(&spec.validate()?) };
        let planned = match planned {
            Ok((planned, _)) => planned,
            Err(Error::Unsupported(_)) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let problem = planned.job.problem();
        let mut sizes = Vec::new();
        for (operand, tensor) in planned.job.tensors() {
            sizes.push((operand.name().to_owned(), tensor.extent().unwrap_or(0).unsigned_abs() * 2));
        }
        let stats = planned.lowered.stats.is_some();
        if stats {
            sizes.push(("stats".to_owned(), problem.stats_elements().unsigned_abs() * 4));
        }
        for p in planned.job.params() {
            if let ParamKind::Tensor { axes, dtype } = p.kind {
                sizes.push((p.name.clone(), dtype.bytes(axes.dims(problem.extents()).iter().product::<i64>().unsigned_abs())));
            }
        }
        let mut gradients = Vec::new();
        if let Job::Backward(b) = &planned.job {
            for g in b.wrt() {
                sizes.push((format!("d {}", g.name), g.dtype.bytes(b.gradient_elements(&g.name) as u64)));
                gradients.push(g.name.clone());
            }
        }
        sizes.push(("workspace".to_owned(), planned.workspace_bytes()));
        let arena = Arena::new(stream, &sizes)?;
        let mut case = Case { executor, stream, planned, arena, stats, gradients };
        for (n, operand) in ["q", "k", "v", "o", "d_o"].iter().enumerate() {
            if let Ok(slice) = case.arena.at(operand) {
                let numbers = random(stream, DType::BF16, i64::try_from(slice.bytes / 2)?, n as u64 + 3)?;
                let mut host = vec![0u8; numbers.bytes()];
                numbers.download(stream, 0, &mut host)?;
                let at = case.arena.offset(operand)?;
                case.arena.buffer.upload(stream, at, &host)?;
            }
        }
        if backward {
            case.forward_first(spec)?;
        }
        Ok(Some(case))
    }

    /// Output and stats of the forward pass over everything, so that gradients are numbers.
    fn forward_first(&mut self, spec: &AttentionSpec) -> Result<()> {
        for p in self.planned.job.params().to_vec() {
            if p.name.starts_with("seq_len") {
                let extent = if p.name == "seq_len_q" { spec.q.dims[2] } else { spec.k.dims[2] };
                self.put(&p.name, &[i32::try_from(extent)?])?;
            } else if self.arena.at(&p.name).is_ok() {
                let (at, bytes) = (self.arena.offset(&p.name)?, usize::try_from(self.arena.at(&p.name)?.bytes)?);
                self.arena.buffer.upload(self.stream, at, &vec![0u8; bytes])?;
            }
        }
        let first = self.executor.attention(&spec.validate()?)?.0;
        let room = Buffer::new(self.stream.device(), usize::try_from(first.workspace_bytes())?)?;
        let backward = std::mem::replace(&mut self.planned, first);
        let own = self.arena.at("workspace")?;
        let at = self.arena.parts.iter().position(|(name, _)| name == "workspace").ok_or("no workspace")?;
        self.arena.parts[at].1 = crate::memory::slice(&room);
        let submitted = self.submit(false);
        self.stream.synchronize()?;
        self.arena.parts[at].1 = own;
        self.planned = backward;
        submitted
    }

    fn put(&mut self, name: &str, values: &[i32]) -> Result<()> {
        let at = self.arena.offset(name)?;
        let count = usize::try_from(self.arena.at(name)?.bytes / 4)?;
        let all: Vec<i32> = values.iter().copied().cycle().take(count).collect();
        Ok(self.arena.buffer.upload(self.stream, at, &all)?)
    }

    fn submit(&self, within: bool) -> Result<()> {
        let at = |name: &str| self.arena.at(name);
        let mut params = Vec::new();
        for p in self.planned.job.params() {
            let value = match p.kind {
                ParamKind::Tensor { axes: _, dtype } if within && p.name.starts_with("seq_len") => {
                    DeviceValue::WithinExtent(dtype, at(&p.name)?)
                }
                ParamKind::Tensor { axes: _, dtype } => DeviceValue::Tensor(dtype, at(&p.name)?),
                ParamKind::Scalar => DeviceValue::Scalar(p.default.unwrap_or(1.0)),
            };
            params.push(DeviceParam::new(&p.name, value));
        }
        let [q, k, v, o] = [at("q")?, at("k")?, at("v")?, at("o")?];
        let workspace = Some(at("workspace")?);
        let handle = self.executor.library().handle(self.stream)?;
        if let Job::Forward(_) = self.planned.job {
            let stats = if self.stats { Some(at("stats")?) } else { None };
            let call = DeviceForward::new(q, k, v, o).stats(stats).params(&params).workspace(workspace);
            // SAFETY: every slice is a part of a buffer of this device, which outlives the synchronisation; the promise is kept where made.
            unsafe { self.planned.forward(&handle, &call) }?;
        } else {
            let mut gradients = Vec::new();
            for name in &self.gradients {
                gradients.push(DeviceGradient::new(name, at(&format!("d {name}"))?));
            }
            let [d_o, dq, dk, dv] = [Operand::DO, Operand::DQ, Operand::DK, Operand::DV].map(|operand| at(operand.name()));
            let (d_o, dq, dk, dv, stats) = (d_o?, dq?, dk?, dv?, at("stats")?);
            let gradients = &gradients;
            let call =
                DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(&params).gradients(gradients).workspace(workspace);
            // SAFETY: as above.
            unsafe { self.planned.backward(&handle, &call) }?;
        }
        Ok(())
    }

    /// Runs it over poisoned results; the bytes of the forward results, which are the same on every run.
    fn run(&mut self, within: bool) -> Result<Vec<u8>> {
        let forward = matches!(self.planned.job, Job::Forward(_));
        let results: &[&str] = if forward { &["o", "stats"] } else { &["dq", "dk", "dv"] };
        for name in results {
            if let Ok(slice) = self.arena.at(name) {
                let at = self.arena.offset(name)?;
                self.arena.buffer.upload(self.stream, at, &vec![0xffu8; usize::try_from(slice.bytes)?])?;
            }
        }
        self.submit(within)?;
        self.stream.synchronize()?;
        let all = self.arena.bytes(self.stream)?;
        if let Some((count, first)) = self.arena.strayed(&all) {
            return Err(format!("{count} bytes are written outside of every tensor, the first {first}").into());
        }
        let mut bytes = Vec::new();
        for name in results {
            if let Ok(slice) = self.arena.at(name) {
                let at = self.arena.offset(name)?;
                bytes.extend_from_slice(&all[at..at + usize::try_from(slice.bytes)?]);
            }
        }
        Ok(bytes)
    }
}

fn spec(seq_q: i64, seq_kv: i64, masks: &[&str], mods: &[&str]) -> Result<AttentionSpec> {
    let shape = Shape { batch: 4, heads_q: 6, heads_kv: 2, seq_q, seq_kv, dim_qk: 64, dim_v: 64 };
    let mut spec = AttentionSpec::dense(D::BF16, shape, Layout::Bhsd).with_stats();
    for mask in masks {
        spec = spec.mask(mask.parse::<sdpa::Mask>()?);
    }
    for score_mod in mods {
        spec = spec.score_mod(score_mod.parse()?);
    }
    Ok(spec)
}

/// Numbers that look like bf16, as far from each other at most as a part of the largest.
fn close(a: &[u8], b: &[u8]) -> bool {
    let numbers = |bytes: &[u8]| -> Vec<f32> { bytes.chunks_exact(2).map(|x| half::bf16::from_ne_bytes([x[0], x[1]]).to_f32()).collect() };
    let (a, b) = (numbers(a), numbers(b));
    let largest = a.iter().fold(0.0f32, |m, x| if x.is_finite() { m.max(x.abs()) } else { m });
    a.iter().zip(&b).all(|(x, y)| x == y || (x - y).abs() <= largest * 0.01)
}

pub(crate) fn run(timed: bool) -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let stream = executor.device().stream()?;
    let (mut runs, mut wrong, mut unsupported) = (0, 0, 0);
    let (far, low) = (i32::MAX, i32::MIN);
    for (seq_q, seq_kv) in [(100, 100), (129, 70), (1, 200), (257, 300)] {
        let (q, kv) = (i32::try_from(seq_q)?, i32::try_from(seq_kv)?);
        for (masks, mods) in [
            (&["padding"][..], &[][..]),
            (&["padding", "causal"], &[]),
            (&["padding"], &["alibi"]),
            (&["padding", "document"], &["bias16:hqk"]),
        ] {
            for backward in [false, true] {
                let spec = spec(seq_q, seq_kv, masks, mods)?;
                let Some(mut case) = Case::new(&executor, &stream, &spec, backward)? else {
                    unsupported += 1;
                    continue;
                };
                for (lengths_q, lengths_kv) in [
                    ([q + 30, 5.min(q), q, 0], [kv, 7, kv + 30, kv]),
                    ([far, -5, low, q], [far, low, kv, -1]),
                    ([2 * q, q + 1, 3.min(q), q], [2 * kv, kv + 1, 0, 5]),
                ] {
                    let clamp = |all: [i32; 4], most: i32| all.map(|x| x.clamp(0, most));
                    // Numbers of the params that are no lengths: documents with bounds that are anything.
                    for name in ["doc_start", "doc_end", "document"] {
                        if case.arena.at(name).is_ok() {
                            case.put(name, &[low, 3, far, -7, 50, 0])?;
                        }
                    }
                    let mut outcome = || -> Result<bool> {
                        case.put("seq_len_q", &clamp(lengths_q, q))?;
                        case.put("seq_len_kv", &clamp(lengths_kv, kv))?;
                        let want = case.run(false)?;
                        let promised = case.run(true)?;
                        case.put("seq_len_q", &lengths_q)?;
                        case.put("seq_len_kv", &lengths_kv)?;
                        let got = case.run(false)?;
                        Ok(if backward { close(&want, &got) && close(&want, &promised) } else { want == got && want == promised })
                    };
                    runs += 1;
                    let said = match outcome() {
                        Ok(true) => continue,
                        Ok(false) => "other numbers than for lengths within the extents".to_owned(),
                        Err(e) => e.to_string(),
                    };
                    wrong += 1;
                    println!("WRONG {seq_q}x{seq_kv} {masks:?} {mods:?} backward {backward}, {lengths_q:?} {lengths_kv:?}: {said}");
                }
            }
        }
    }
    println!("lengths: {runs} sets of lengths, {wrong} wrong, {unsupported} passes unsupported");
    if timed {
        costs(&executor, &stream)?;
    }
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} wrong").into()) }
}

/// A call whose lengths are clamped beside one whose lengths are promised, in turns.
fn costs(executor: &CudnnExecutor, stream: &Stream) -> Result<()> {
    for seq in [128, 1000, 4096] {
        for backward in [false, true] {
            let Some(mut case) = Case::new(executor, stream, &spec(seq, seq, &["padding", "causal"], &[])?, backward)? else { continue };
            case.put("seq_len_q", &[i32::try_from(seq)?])?;
            case.put("seq_len_kv", &[i32::try_from(seq)?])?;
            let (mut host, mut device) = ([f64::INFINITY; 2], [Vec::new(), Vec::new()]);
            for _ in 0..60 {
                for (n, within) in [false, true].into_iter().enumerate() {
                    let start = stream.record(true)?;
                    let begun = Instant::now();
                    for _ in 0..20 {
                        case.submit(within)?;
                    }
                    host[n] = host[n].min(begun.elapsed().as_secs_f64() * 1e6 / 20.0);
                    let end = stream.record(true)?;
                    stream.synchronize()?;
                    device[n].push(f64::from(end.since(&start)?) * 1e3 / 20.0);
                }
            }
            let [clamped, promised] = device.map(median);
            let pass = if backward { "backward" } else { "forward" };
            println!(
                "{pass} (4,6,2,{seq},{seq},64): clamped {clamped:.1} us on the device, {:.1} on the host; promised {promised:.1} and {:.1}",
                host[0], host[1]
            );
        }
    }
    Ok(())
}
