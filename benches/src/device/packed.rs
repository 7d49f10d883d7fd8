//! Packed documents: each is what it is by itself, nothing outside of documents is touched, and whatever boundaries hold, nothing is written
//! outside of tensors.
#![allow(unsafe_code)]

use crate::arena::Arena;
use crate::memory::random;
use crate::setup::{Result, executor};
use conformance::random::Random;
use cudnn_graph::{DeviceSlice, Stream};
use sdpa::cudnn::{CudnnExecutor, DeviceBackward, DeviceForward, DeviceParam, DeviceValue, Error, PlanOptions, Planned};
use sdpa::packed::{CU_SEQLENS, CU_SEQLENS_KV, CU_SEQLENS_Q};
use sdpa::{AttentionSpec, DType, Packed, Shape, Side};
use std::sync::Arc;

/// Few, so that the plans of documents by themselves are met again.
const LENGTHS: [i64; 8] = [0, 1, 5, 64, 100, 129, 200, 257];

/// A packed problem, its memory, and where its documents are.
struct Case {
    spec: AttentionSpec,
    arena: Arena,
    /// Of queries, and of keys.
    boundaries: [Vec<i32>; 2],
    what: String,
}

fn boundaries(before: i64, lengths: &[i64]) -> Vec<i32> {
    let mut at = before as i32;
    std::iter::once(at)
        .chain(lengths.iter().map(|&length| {
            at += length as i32;
            at
        }))
        .collect()
}

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.between(0, from.len() as i64 - 1) as usize]
}

impl Case {
    fn draw(stream: &Stream, random_numbers: &mut Random) -> Result<Case> {
        let draw = random_numbers;
        let documents = draw.between(1, 9);
        let (heads_kv, group) = pick(draw, &[(2, 1), (2, 3), (1, 4)]);
        let (dim_qk, dim_v) = pick(draw, &[(64, 64), (128, 128), (72, 40), (128, 64)]);
        let dtype = pick(draw, &[DType::BF16, DType::F16]);
        let cross = draw.between(0, 2) == 0;
        let lengths_q: Vec<i64> = (0..documents).map(|_| pick(draw, &LENGTHS)).collect();
        let lengths_kv: Vec<i64> = if cross { (0..documents).map(|_| pick(draw, &LENGTHS)).collect() } else { lengths_q.clone() };
        let longest = |lengths: &[i64]| lengths.iter().copied().max().unwrap_or(0).max(2) + draw_slack(documents);
        let (seq_q, seq_kv) = (longest(&lengths_q), longest(&lengths_kv));
        let (before, after) = (draw.between(0, 3), draw.between(0, 40));
        let boundaries = [boundaries(before, &lengths_q), boundaries(if cross { 0 } else { before }, &lengths_kv)];
        let totals = [&boundaries[0], &boundaries[1]].map(|b| i64::from(b.last().copied().unwrap_or(0)) + after);
        let bounded = draw.between(0, 1) == 0;
        let total = |n: usize| bounded.then(|| totals[n].max(1));
        let wide = draw.between(0, 2) == 0;
        let packed = Packed::new().with_cross(cross).with_wide(wide).with_totals(total(0), total(if cross { 1 } else { 0 }));
        let shape = Shape { batch: documents, heads_q: heads_kv * group, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
        let mut spec = AttentionSpec::packed(dtype, shape, packed).with_stats();
        let mask = pick(draw, &["", "causal", "window:33,0", "window:17,9", "prefix-lm:20", "k % 3 != 1"]);
        if !mask.is_empty() {
            spec = spec.mask(mask.parse::<sdpa::Mask>()?);
        }
        let score_mod = pick(draw, &["", "", "softcap:30", "alibi"]);
        if !score_mod.is_empty() {
            spec = spec.score_mod(score_mod.parse()?);
        }
        let rows = [totals[0].max(1), totals[1].max(1)];
        let mut sizes = Vec::new();
        for (name, tensor, side) in [
            ("q", &spec.q, 0),
            ("k", &spec.k, 1),
            ("v", &spec.v, 1),
            ("o", &spec.o, 0),
            ("d_o", &spec.o, 0),
            ("dq", &spec.q, 0),
            ("dk", &spec.k, 1),
            ("dv", &spec.v, 1),
        ] {
            sizes.push((name.to_owned(), (rows[side] * tensor.dims[1] * tensor.dims[3] * 2).unsigned_abs()));
        }
        sizes.push(("stats".to_owned(), (rows[0] * shape.heads_q * 4).unsigned_abs()));
        // By itself, a document's stats are (heads, queries).
        sizes.push(("stats by itself".to_owned(), (rows[0] * shape.heads_q * 4).unsigned_abs()));
        for name in ["queries", "keys"] {
            sizes.push((name.to_owned(), if wide { 8 } else { 4 } * (documents.unsigned_abs() + 1)));
        }
        let mut arena = Arena::new(stream, &sizes)?;
        for (n, name) in ["q", "k", "v", "d_o"].into_iter().enumerate() {
            let numbers = random(stream, dtype, i64::try_from(arena.at(name)?.bytes / 2)?, n as u64 + 3)?;
            let mut host = vec![0u8; numbers.bytes()];
            numbers.download(stream, 0, &mut host)?;
            let at = arena.offset(name)?;
            arena.buffer.upload(stream, at, &host)?;
        }
        let what = format!(
            "{documents} documents {lengths_q:?} {lengths_kv:?} heads {}/{heads_kv} dims {dim_qk},{dim_v} {dtype} [{mask}] [{score_mod}] {packed:?} from {before}",
            heads_kv * group
        );
        Ok(Case { spec, arena, boundaries, what })
    }

    fn poison(&mut self, stream: &Stream, names: &[&str]) -> Result<()> {
        for name in names {
            let (at, bytes) = (self.arena.offset(name)?, usize::try_from(self.arena.at(name)?.bytes)?);
            self.arena.buffer.upload(stream, at, &vec![0xffu8; bytes])?;
        }
        Ok(())
    }

    fn put(&mut self, stream: &Stream, boundaries: [&[i32]; 2]) -> Result<()> {
        for (name, values) in ["queries", "keys"].into_iter().zip(boundaries) {
            let at = self.arena.offset(name)?;
            if self.wide() {
                self.arena.buffer.upload(stream, at, &values.iter().map(|&x| i64::from(x)).collect::<Vec<_>>())?;
            } else {
                self.arena.buffer.upload(stream, at, values)?;
            }
        }
        Ok(())
    }

    fn wide(&self) -> bool {
        self.spec.packed.is_some_and(|packed| packed.wide)
    }

    /// Tokens of a document.
    fn document(&self, side: Side, n: usize) -> std::ops::Range<usize> {
        let of = &self.boundaries[side as usize];
        of[n] as usize..of[n + 1] as usize
    }

    /// A part of an operand that begins with a token.
    fn from(&self, name: &str, token: usize, bytes: usize) -> Result<DeviceSlice> {
        let all = self.arena.at(name)?;
        let off = (token * bytes) as u64;
        Ok(DeviceSlice { address: all.address + off, bytes: all.bytes - off })
    }

    fn calls(
        &self,
        executor: &CudnnExecutor,
        stream: &Stream,
        planned: [Option<&Planned>; 2],
        spec: &AttentionSpec,
        tokens: Option<[usize; 2]>,
    ) -> Result<()> {
        let [q, kv] = tokens.unwrap_or([0; 2]);
        let row = |t: &sdpa::TensorSpec| (t.dims[1] * t.dims[3] * 2) as usize;
        let at = |name: &str, tensor: &sdpa::TensorSpec, token: usize| self.from(name, token, row(tensor));
        let mut params = Vec::new();
        let problem = spec.validate()?;
        for p in problem.params() {
            let name = match p.name.as_str() {
                CU_SEQLENS | CU_SEQLENS_Q => Some("queries"),
                CU_SEQLENS_KV => Some("keys"),
                _ => None,
            };
            let value = match name {
                Some(name) => DeviceValue::Tensor(if self.wide() { DType::I64 } else { DType::I32 }, self.arena.at(name)?),
                None => DeviceValue::Scalar(p.default.unwrap_or(1.0)),
            };
            params.push(DeviceParam::new(&p.name, value));
        }
        let handle = executor.library().handle(stream)?;
        let (q_slice, k, v, o) = (at("q", &spec.q, q)?, at("k", &spec.k, kv)?, at("v", &spec.v, kv)?, at("o", &spec.o, q)?);
        let stats = self.arena.at(if tokens.is_some() { "stats by itself" } else { "stats" })?;
        if let Some(forward) = planned[0] {
            let call = DeviceForward::new(q_slice, k, v, o).stats(stats).params(&params);
            // SAFETY: every slice is a part of a buffer of this device, which outlives the synchronisation.
            unsafe { forward.forward(&handle, &call) }?;
        }
        if let Some(backward) = planned[1] {
            let call = DeviceBackward::new(
                (q_slice, k, v),
                (o, stats),
                at("d_o", &spec.o, q)?,
                (at("dq", &spec.q, q)?, at("dk", &spec.k, kv)?, at("dv", &spec.v, kv)?),
            )
            .params(&params);
            // SAFETY: as above.
            unsafe { backward.backward(&handle, &call) }?;
        }
        Ok(stream.synchronize()?)
    }
}

fn draw_slack(n: i64) -> i64 {
    n % 3 * 7
}

fn plans(executor: &CudnnExecutor, spec: &AttentionSpec) -> Result<[Option<Arc<Planned>>; 2]> {
    let known = |made: std::result::Result<Arc<Planned>, Error>| match made {
        Ok(planned) => Ok(Some(planned)),
        Err(Error::Unsupported(_)) => Ok(None),
        Err(e) => Err(e),
    };
    let forward = executor.attention(&spec.validate()?).map(|(planned, _)| planned);
    let backward = executor.attention_backward(&spec.backward().validate()?).map(|(planned, _)| planned);
    Ok([known(forward)?, known(backward)?])
}

fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let halves = bytes.chunks_exact(2).map(|x| [x[0], x[1]]);
    if dtype == DType::BF16 {
        halves.map(|x| half::bf16::from_ne_bytes(x).to_f32()).collect()
    } else {
        halves.map(|x| half::f16::from_ne_bytes(x).to_f32()).collect()
    }
}

/// How far apart two results are, as a part of the largest number; infinite where one is no number and the other is.
fn apart(one: &[f32], other: &[f32]) -> f32 {
    let largest = one.iter().chain(other).fold(1e-3f32, |m, x| if x.is_finite() { m.max(x.abs()) } else { m });
    one.iter().zip(other).fold(0.0, |worst: f32, (x, y)| {
        let same = x.to_bits() == y.to_bits() || x == y;
        worst.max(if same {
            0.0
        } else if (x - y).is_nan() {
            f32::INFINITY
        } else {
            (x - y).abs() / largest
        })
    })
}

struct Tally {
    compared: usize,
    alone: usize,
    wrong: usize,
    worst: f32,
}

fn check(executor: &CudnnExecutor, stream: &Stream, case: &mut Case, tally: &mut Tally) -> Result<()> {
    let [forward, backward] = plans(executor, &case.spec)?;
    let Some(forward) = forward else {
        println!("UNSUPPORTED {}", case.what);
        return Ok(());
    };
    let results = ["o", "stats", "dq", "dk", "dv"];
    case.poison(stream, &results)?;
    let [queries, keys] = case.boundaries.clone();
    case.put(stream, [&queries, &keys])?;
    case.calls(executor, stream, [Some(&forward), backward.as_deref()], &case.spec.clone(), None)?;
    let packed = case.arena.bytes(stream)?;
    if let Some((count, first)) = case.arena.strayed(&packed) {
        return Err(format!("{count} bytes are written outside of every tensor, the first {first}").into());
    }
    let spec = case.spec.clone();
    let heads = spec.q.dims[1] as usize;
    let rows = |name: &str| -> (Side, usize) {
        let (tensor, side) = match name {
            "dk" => (&spec.k, Side::Keys),
            "dv" => (&spec.v, Side::Keys),
            "dq" => (&spec.q, Side::Queries),
            "stats" => return (Side::Queries, 4 * heads),
            _ => (&spec.o, Side::Queries),
        };
        (side, (tensor.dims[1] * tensor.dims[3] * 2) as usize)
    };
    let written = &results[..if backward.is_some() { 5 } else { 2 }];
    for name in written {
        let (side, row) = rows(name);
        let of = case.arena.part(&packed, name)?;
        let boundaries = &case.boundaries[side as usize];
        let inside = boundaries[0] as usize..boundaries.last().copied().unwrap_or(0) as usize;
        if let Some(token) = (0..of.len() / row).find(|t| !inside.contains(t) && of[t * row..][..row].iter().any(|b| *b != 0xff)) {
            return Err(format!("{name} is written at token {token}, which is of no document").into());
        }
    }
    // Each document by itself, over the same memory.
    case.poison(stream, &["dq", "dk", "dv"])?;
    let kept = case.arena.part(&packed, "o")?.to_vec();
    for n in 0..case.spec.q.dims[0] as usize {
        let (of_q, of_kv) = (case.document(Side::Queries, n), case.document(Side::Keys, n));
        let (len_q, len_kv) = (of_q.len() as i64, of_kv.len() as i64);
        let mut single = case.spec.clone();
        single.packed = None;
        for (tensor, len) in [(&mut single.q, len_q), (&mut single.k, len_kv), (&mut single.v, len_kv), (&mut single.o, len_q)] {
            (tensor.dims[0], tensor.dims[2]) = (1, len);
        }
        let alone = if len_q > 0 && len_kv > 0 { plans(executor, &single)? } else { [None, None] };
        if len_q > 0 && len_kv > 0 && alone[0].is_none() {
            continue;
        }
        if alone[0].is_some() {
            case.calls(executor, stream, [alone[0].as_deref(), None], &single, Some([of_q.start, of_kv.start]))?;
        }
        let of_forward = case.arena.bytes(stream)?;
        let at_o = case.arena.offset("o")?;
        if alone[1].is_some() && backward.is_some() {
            case.calls(executor, stream, [None, alone[1].as_deref()], &single, Some([of_q.start, of_kv.start]))?;
        }
        let of_backward = case.arena.bytes(stream)?;
        for name in written {
            let (side, row) = rows(name);
            let document = case.document(side, n);
            if document.is_empty() || (alone[1].is_none() && len_q > 0 && len_kv > 0 && name.starts_with('d')) {
                continue;
            }
            let mine = &case.arena.part(&packed, name)?[document.start * row..document.end * row];
            let all = if name.starts_with('d') { &of_backward } else { &of_forward };
            let theirs = if *name == "stats" {
                &case.arena.part(all, "stats by itself")?[..document.len() * row]
            } else {
                &case.arena.part(all, name)?[document.start * row..document.end * row]
            };
            let words =
                |bytes: &[u8]| -> Vec<f32> { bytes.chunks_exact(4).map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]])).collect() };
            let (got, want) = if *name == "stats" {
                let (mine, theirs) = (words(mine), words(theirs));
                let turned = (0..mine.len()).map(|at| theirs[at % heads * (mine.len() / heads) + at / heads]).collect();
                (mine, turned)
            } else {
                (numbers(case.spec.dtype, mine), numbers(case.spec.dtype, theirs))
            };
            let want = match (alone[0].is_some(), *name) {
                (true, _) => want,
                (false, "stats") => vec![f32::NEG_INFINITY; got.len()],
                (false, _) => vec![0.0; got.len()],
            };
            let far = apart(&got, &want);
            (tally.compared, tally.worst) = (tally.compared + 1, tally.worst.max(far));
            if far > 0.02 || far.is_nan() {
                return Err(format!("{name} of document {n} ({len_q} x {len_kv}) is off by {far} of the largest").into());
            }
        }
        tally.alone += 1;
        case.arena.buffer.upload(stream, at_o, &kept)?;
    }
    hostile(executor, stream, case, [Some(&forward), backward.as_deref()])
}

/// Boundaries that are anything.
fn hostile(executor: &CudnnExecutor, stream: &Stream, case: &mut Case, planned: [Option<&Planned>; 2]) -> Result<()> {
    let (far, low) = (i32::MAX, i32::MIN);
    for pattern in [&[far, low, 3, -1][..], &[5, 4, 3, 2, 1, 0], &[-7, far], &[0, 1 << 20, 2, 1 << 30], &[low]] {
        let all: Vec<i32> = pattern.iter().copied().cycle().take(case.boundaries[0].len()).collect();
        let turned: Vec<i32> = all.iter().rev().copied().collect();
        case.put(stream, [&all, &turned])?;
        case.calls(executor, stream, planned, &case.spec.clone(), None)?;
        if let Some((count, first)) = case.arena.strayed(&case.arena.bytes(stream)?) {
            return Err(format!("boundaries {all:?}: {count} bytes are written outside of every tensor, the first {first}").into());
        }
    }
    Ok(())
}

pub(crate) fn run(problems: u64) -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let stream = executor.device().stream()?;
    let mut tally = Tally { compared: 0, alone: 0, wrong: 0, worst: 0.0 };
    for seed in 0..problems {
        let mut case = Case::draw(&stream, &mut Random::new(seed))?;
        if let Err(e) = check(&executor, &stream, &mut case, &mut tally) {
            tally.wrong += 1;
            println!("WRONG seed {seed}, {}: {e}", case.what);
        }
    }
    let Tally { compared, alone, wrong, worst } = tally;
    println!("packed: {problems} problems, {alone} documents by themselves, {compared} results compared, worst {worst}, {wrong} wrong");
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} wrong").into()) }
}
