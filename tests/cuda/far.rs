//! Tensors whose elements are further apart than 32 bits count, in elements and bytes: what lies there is read and written as what is near is.

use super::documents::{up, whole};
use super::{executor, mma};
use conformance::emulated::submit;
use conformance::random::Random;
use conformance::runner::side_by_side;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::{DeviceBackward, DeviceForward, DeviceParam, DeviceValue};
use sdpa::packed::{CU_SEQLENS_KV, CU_SEQLENS_Q};
use sdpa::{Align, AttentionSpec, BackwardSpec, DType, DeviceExecutor, Layout, Mask, Packed, Shape, TensorSpec};
use sdpa_driver::{Buffer, Stream};

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 70, seq_kv: 90, dim_qk: 64, dim_v: 64 };
/// Further than any 32 bits reach.
const FAR: i64 = 1 << 32;

/// A tensor whose first and last elements along an axis are so far apart. `odd`: rows that copies of 16 bytes do not take.
fn stretched(tensor: &TensorSpec, axis: usize, odd: bool) -> TensorSpec {
    let [_, heads, _, dim] = tensor.dims;
    let step = FAR / (tensor.dims[axis] - 1) / 64 * 64 + 64 + i64::from(odd);
    let mut strides = match axis {
        0 | 1 => tensor.strides,
        // Heads of a token lie beside one another.
        _ => [heads * dim, dim, 0, 1],
    };
    strides[axis] = step;
    TensorSpec { strides, alignment: if odd { 2 } else { tensor.alignment }, ..*tensor }
}

/// Where each row begins, in elements.
fn rows(tensor: &TensorSpec) -> impl Iterator<Item = i64> {
    let TensorSpec { dims: [batch, heads, seq, _], strides, .. } = *tensor;
    (0..batch * heads * seq).map(move |n| n / (heads * seq) * strides[0] + n / seq % heads * strides[1] + n % seq * strides[2])
}

/// Device memory of a tensor, and its rows.
struct Rows {
    tensor: TensorSpec,
    buffer: Buffer,
}

impl Rows {
    /// Of drawn numbers, or of none.
    fn new(stream: &Stream, tensor: TensorSpec, seed: Option<u64>) -> Rows {
        let dim = tensor.dims[3];
        let mut buffer = Buffer::new(stream.device(), 2 * tensor.extent().unwrap() as usize).unwrap();
        let mut random = Random::new(seed.unwrap_or(0));
        for at in rows(&tensor) {
            let row: Vec<bf16> = (0..dim).map(|_| if seed.is_some() { bf16::from_f64(random.normal()) } else { bf16::NAN }).collect();
            buffer.upload(stream, 2 * at as usize, &row).unwrap();
        }
        Rows { tensor, buffer }
    }

    fn read(&self, stream: &Stream) -> Vec<f32> {
        let mut row = vec![bf16::NAN; self.tensor.dims[3] as usize];
        let mut all = Vec::new();
        for at in rows(&self.tensor) {
            self.buffer.download(stream, 2 * at as usize, &mut row).unwrap();
            all.extend(row.iter().map(|x| x.to_f32()));
        }
        all
    }
}

fn spec() -> AttentionSpec {
    AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).mask(Mask::causal_bottom_right()).with_stats()
}

/// Both passes: o, dq, dk and dv.
fn results(executor: &CudaExecutor, spec: &BackwardSpec) -> [Vec<f32>; 4] {
    let stream = &executor.device().stream().unwrap();
    let forward = &spec.forward;
    let [q, k, v, d_o] = [(forward.q, 1), (forward.k, 2), (forward.v, 3), (spec.d_o, 4)].map(|(t, seed)| Rows::new(stream, t, Some(seed)));
    let [o, dq, dk, dv] = [forward.o, spec.dq, spec.dk, spec.dv].map(|t| Rows::new(stream, t, None));
    let stats = Buffer::new(stream.device(), 4 * (SHAPE.batch * SHAPE.heads_q * SHAPE.seq_q) as usize).unwrap();
    let call = DeviceForward::new(whole(&q.buffer), whole(&k.buffer), whole(&v.buffer), whole(&o.buffer)).stats(whole(&stats));
    submit(&*executor.prepare_device(&forward.validate().unwrap()).unwrap(), stream, &(&call).into()).unwrap();
    let call = DeviceBackward::new(
        (call.q, call.k, call.v),
        (call.o, whole(&stats)),
        whole(&d_o.buffer),
        (whole(&dq.buffer), whole(&dk.buffer), whole(&dv.buffer)),
    );
    submit(&*executor.prepare_device_backward(&spec.validate().unwrap()).unwrap(), stream, &(&call).into()).unwrap();
    [o, dq, dk, dv].map(|rows| rows.read(stream))
}

/// A tensor of both passes.
type Which = fn(&mut BackwardSpec) -> &mut TensorSpec;

const TENSORS: [(&str, Which); 8] = [
    ("q", |s| &mut s.forward.q),
    ("k", |s| &mut s.forward.k),
    ("v", |s| &mut s.forward.v),
    ("o", |s| &mut s.forward.o),
    ("d_o", |s| &mut s.d_o),
    ("dq", |s| &mut s.dq),
    ("dk", |s| &mut s.dk),
    ("dv", |s| &mut s.dv),
];

fn stretch(executor: &CudaExecutor) {
    let right = results(executor, &spec().backward());
    assert!(right.iter().flatten().all(|x| x.is_finite()));
    let mut stretches = Vec::new();
    for (name, which) in TENSORS {
        stretches.extend([(0, false), (1, false), (2, false), (0, true)].map(|(axis, odd)| (name, which, axis, odd)));
    }
    side_by_side(&stretches, |&(name, which, axis, odd)| {
        let mut spec = spec().backward();
        *which(&mut spec) = stretched(which(&mut spec), axis, odd);
        let found = results(executor, &spec);
        for (n, (found, right)) in found.iter().zip(&right).enumerate() {
            // Rows of any places are of other kernels, and gradients of queries sums in any order; other rows would be other numbers altogether.
            let off = found.iter().zip(right).filter(|(x, y)| (*x - *y).abs() > 0.02 * y.abs().max(0.1) || x.is_nan()).count();
            assert!(off == 0, "{name} along axis {axis}, odd {odd}: {off} of {} of {}", found.len(), ["o", "dq", "dk", "dv"][n]);
        }
    });
}

#[test]
fn what_is_far_is_as_what_is_near() {
    executor().iter().for_each(stretch);
}

#[test]
fn it_is_to_the_family_for_every_device() {
    mma::executor().iter().for_each(stretch);
}

/// Keys, values and a bias that are too many for 32 bits, of which a window keeps the last: what comes of those alone.
fn many_keys(executor: &CudaExecutor, seq_q: i64) {
    let (stream, some) = (&executor.device().stream().unwrap(), 300);
    let of = |seq_kv: i64| {
        // Heads whose keys and values do not fit the cache together, so that the scheduler takes them in several sections.
        let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q, seq_kv, ..SHAPE };
        let window = Mask::window(Some(150), Some(0), Align::BottomRight);
        let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(window).score_mod("bias16:qk".parse().unwrap());
        let [q, o] = [(spec.q, Some(1)), (spec.o, None)].map(|(t, seed)| Rows::new(stream, t, seed));
        let last = |rows: i64, row: i64, count: i64, seed: u64| {
            // The last of each row.
            let mut buffer = Buffer::new(stream.device(), 2 * (rows * row) as usize).unwrap();
            let mut random = Random::new(seed);
            for n in 1..=rows {
                let numbers: Vec<bf16> = (0..count).map(|_| bf16::from_f64(random.normal())).collect();
                buffer.upload(stream, 2 * (n * row - count) as usize, &numbers).unwrap();
            }
            buffer
        };
        let [k, v] = [(SHAPE.dim_qk, 2), (SHAPE.dim_v, 3)].map(|(dim, seed)| last(shape.heads_kv, seq_kv * dim, some * dim, seed));
        let bias = last(seq_q, seq_kv, some, 4);
        let params = [DeviceParam::new("bias", DeviceValue::Tensor(DType::BF16, whole(&bias)))];
        let call = DeviceForward::new(whole(&q.buffer), whole(&k), whole(&v), whole(&o.buffer)).params(&params);
        submit(&*executor.prepare_device(&spec.validate().unwrap()).unwrap(), stream, &(&call).into()).unwrap();
        o.read(stream)
    };
    let (few, many) = (of(some), of((1 << 25) + some));
    let off = few.iter().zip(&many).filter(|(x, y)| (*x - *y).abs() > 0.02 * x.abs().max(0.1) || y.is_nan()).count();
    assert!(off == 0, "{seq_q} queries: {off} of {}", few.len());
}

/// The last of many keys are as those of few.
pub(super) fn last_keys(executor: &CudaExecutor) {
    [7, 70, 140].iter().for_each(|seq_q| many_keys(executor, *seq_q));
}

#[test]
fn the_last_of_many_keys_are_as_those_of_few() {
    [executor(), mma::executor()].iter().flatten().for_each(last_keys);
}

/// The output and the statistics of documents of so many queries with so many tokens before the first: 32 heads of 128, of which 2^31 elements are 524,288 tokens.
fn packed_queries(executor: &CudaExecutor, [seq_q, seq_kv]: [i64; 2], before: i64) -> [Vec<f32>; 2] {
    let (stream, batch) = (&executor.device().stream().unwrap(), 2);
    let shape = Shape { batch, heads_q: 32, heads_kv: 4, seq_q, seq_kv, dim_qk: 128, dim_v: 128 };
    let (row, tokens) = (shape.heads_q * shape.dim_qk, before + batch * seq_q);
    let packed = Packed::new().with_cross(true).with_wide(true).with_totals(Some(tokens), Some(batch * shape.seq_kv));
    let spec = AttentionSpec::packed(DType::BF16, shape, packed).with_stats();
    let mut random = Random::new(7);
    let mut drawn = |elements: i64| (0..elements).map(|_| bf16::from_f64(random.normal())).collect::<Vec<_>>();
    let mut rows = |before: i64, tokens: i64, row: i64| {
        let mut buffer = Buffer::new(stream.device(), (2 * (before + tokens) * row) as usize).unwrap();
        buffer.upload(stream, (2 * before * row) as usize, &drawn(tokens * row)).unwrap();
        buffer
    };
    let [q, o] = [(); 2].map(|()| rows(before, batch * seq_q, row));
    let [k, v] = [(); 2].map(|()| rows(0, batch * shape.seq_kv, shape.heads_kv * shape.dim_qk));
    let stats = Buffer::new(stream.device(), (4 * tokens * shape.heads_q) as usize).unwrap();
    let boundaries = |first: i64, length: i64| up(executor, stream, &(0..=batch).map(|n| first + n * length).collect::<Vec<i64>>());
    let (of_q, of_kv) = (boundaries(before, seq_q), boundaries(0, shape.seq_kv));
    let params = [(CU_SEQLENS_Q, &of_q), (CU_SEQLENS_KV, &of_kv)]
        .map(|(name, of)| DeviceParam::new(name, DeviceValue::Tensor(DType::I64, whole(of))));
    let call = DeviceForward::new(whole(&q), whole(&k), whole(&v), whole(&o)).stats(whole(&stats)).params(&params);
    submit(&*executor.prepare_device(&spec.validate().unwrap()).unwrap(), stream, &(&call).into()).unwrap();
    let mut outputs = vec![bf16::NAN; (batch * seq_q * row) as usize];
    o.download(stream, (2 * before * row) as usize, &mut outputs).unwrap();
    let mut told = vec![f32::NAN; (batch * seq_q * shape.heads_q) as usize];
    stats.download(stream, (4 * before * shape.heads_q) as usize, &mut told).unwrap();
    [outputs.iter().map(|x| x.to_f32()).collect(), told]
}

/// Packed queries past 2^31 elements are as the first.
pub(super) fn last_tokens(executor: &CudaExecutor) {
    // Packed decode, and tiles of one head.
    for extents in [[3, 600], [70, 40]] {
        let [first, far] = [0, 530_000].map(|before| packed_queries(executor, extents, before));
        for (what, first, far) in [("o", &first[0], &far[0]), ("stats", &first[1], &far[1])] {
            let off = first.iter().zip(far).filter(|(x, y)| (*x - *y).abs() > 0.02 * x.abs().max(0.1) || y.is_nan()).count();
            assert!(off == 0, "{extents:?}: {off} of {} of {what}", first.len());
        }
    }
}

#[test]
fn packed_queries_past_32_bits_are_as_the_first() {
    [executor(), mma::executor()].iter().flatten().for_each(last_tokens);
}
