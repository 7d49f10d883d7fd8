//! Packed documents over device memory, where nobody looks at boundaries: what one holds is no other's, and whatever they say, nothing beside the memory of the
//! call is touched: forward, then backward over what that has left.

use super::{executor, mma};
use conformance::emulated::submit;
use conformance::random::Random;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::{DeviceBackward, DeviceForward, DeviceParam, DeviceSlice, DeviceValue};
use sdpa::packed::CU_SEQLENS;
use sdpa::{AttentionSpec, DType, DeviceExecutor, Mask, Packed, Shape};
use sdpa_driver::{Buffer, Element, Stream};

const HEADS: [usize; 2] = [4, 2];
const DIM: usize = 64;
/// Tokens of the memory of every call.
const TOTAL: usize = 420;
const BATCH: usize = 4;
const LONGEST: i64 = 200;

/// Operands and results of a call, in host memory.
#[derive(Clone)]
struct Numbers {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    d_o: Vec<bf16>,
    o: Vec<bf16>,
    dq: Vec<bf16>,
    dk: Vec<bf16>,
    dv: Vec<bf16>,
    stats: Vec<f32>,
}

impl Numbers {
    fn drawn() -> Numbers {
        let mut random = Random::new(31);
        let mut drawn = |heads: usize| (0..TOTAL * heads * DIM).map(|_| bf16::from_f64(random.normal())).collect::<Vec<_>>();
        let [q, k, v, d_o] = [HEADS[0], HEADS[1], HEADS[1], HEADS[0]].map(&mut drawn);
        let [o, dq, dk, dv] = [HEADS[0], HEADS[0], HEADS[1], HEADS[1]].map(|heads| vec![bf16::NAN; TOTAL * heads * DIM]);
        Numbers { stats: vec![f32::NAN; TOTAL * HEADS[0]], q, k, v, d_o, o, dq, dk, dv }
    }

    /// What calls write of some tokens, as bits, but for gradients of queries.
    fn of(&self, tokens: std::ops::Range<usize>) -> (Vec<u16>, Vec<u32>) {
        let bits = |x: &[bf16], heads: usize| {
            let of = &x[tokens.start * heads * DIM..tokens.end * heads * DIM];
            of.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let exact = [bits(&self.o, HEADS[0]), bits(&self.dk, HEADS[1]), bits(&self.dv, HEADS[1])].concat();
        (exact, self.stats[tokens.start * HEADS[0]..tokens.end * HEADS[0]].iter().map(|x| x.to_bits()).collect())
    }

    /// Gradients of queries of some tokens: sums in any order.
    fn dq_of(&self, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let row = HEADS[0] * DIM;
        self.dq[tokens.start * row..tokens.end * row].iter().map(|x| x.to_f32()).collect()
    }
}

/// Whether gradients are the same but for the order of their sums.
fn are_near(some: &[f32], others: &[f32]) -> bool {
    some.iter().zip(others).all(|(x, y)| (x - y).abs() <= 0.02 * x.abs().max(0.1) || (x.is_nan() && y.is_nan()))
}

pub(super) fn up<T: Element>(executor: &CudaExecutor, stream: &Stream, numbers: &[T]) -> Buffer {
    let mut buffer = Buffer::new(executor.device(), size_of_val(numbers)).unwrap();
    buffer.upload(stream, 0, numbers).unwrap();
    buffer
}

pub(super) fn whole(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

/// Of either family of kernels.
fn executors() -> impl Iterator<Item = CudaExecutor> {
    [executor(), mma::executor()].into_iter().flatten()
}

/// Runs a call with these boundaries; whether the machine found nothing wrong, with what it wrote.
fn run(executor: &CudaExecutor, numbers: &mut Numbers, boundaries: &[i64]) -> Result<(), sdpa::Error> {
    let [heads_q, heads_kv] = HEADS.map(|n| n as i64);
    let shape = Shape { batch: BATCH as i64, heads_q, heads_kv, seq_q: LONGEST, seq_kv: LONGEST, dim_qk: DIM as i64, dim_v: DIM as i64 };
    let packed = Packed::of(TOTAL as i64).with_wide(true);
    let spec = AttentionSpec::packed(DType::BF16, shape, packed).mask(Mask::causal()).with_stats();
    let stream = executor.device().stream().unwrap();
    let [q, k, v, o] = [&numbers.q, &numbers.k, &numbers.v, &numbers.o].map(|x| up(executor, &stream, x));
    let (stats, cu) = (up(executor, &stream, &numbers.stats), up(executor, &stream, boundaries));
    let params = [DeviceParam::new(CU_SEQLENS, DeviceValue::Tensor(DType::I64, whole(&cu)))];
    let call = DeviceForward::new(whole(&q), whole(&k), whole(&v), whole(&o)).stats(whole(&stats)).params(&params);
    let ready = executor.prepare_device(&spec.validate().unwrap()).unwrap();
    submit(&*ready, &stream, &(&call).into())?;
    let [d_o, dq, dk, dv] = [&numbers.d_o, &numbers.dq, &numbers.dk, &numbers.dv].map(|x| up(executor, &stream, x));
    let gradients = DeviceBackward::new(
        (whole(&q), whole(&k), whole(&v)),
        (whole(&o), whole(&stats)),
        whole(&d_o),
        (whole(&dq), whole(&dk), whole(&dv)),
    )
    .params(&params);
    let ready = executor.prepare_device_backward(&spec.backward().validate().unwrap()).unwrap();
    submit(&*ready, &stream, &(&gradients).into())?;
    let results = [(&o, &mut numbers.o), (&dq, &mut numbers.dq), (&dk, &mut numbers.dk), (&dv, &mut numbers.dv)];
    results.into_iter().for_each(|(from, to)| from.download(&stream, 0, to).unwrap());
    stats.download(&stream, 0, &mut numbers.stats).unwrap();
    Ok(())
}

#[test]
fn what_is_in_a_document_reaches_no_other() {
    executors().for_each(|executor| spoiled_alone(&executor));
}

fn spoiled_alone(executor: &CudaExecutor) {
    let boundaries = [3, 3 + 70, 3 + 70 + 133, 3 + 70 + 133 + 1, 3 + 70 + 133 + 1 + 200];
    let tokens = |n: usize| boundaries[n] as usize..boundaries[n + 1] as usize;
    let mut right = Numbers::drawn();
    run(executor, &mut right, &boundaries).unwrap_or_else(|e| panic!("{e}"));
    let outside = [0..3, boundaries[4] as usize..TOTAL];
    for spoiled in 0..BATCH {
        let mut numbers = Numbers::drawn();
        for tokens in [tokens(spoiled)].into_iter().chain(outside.clone()) {
            let Numbers { q, k, v, d_o, .. } = &mut numbers;
            let rows = [(q, HEADS[0]), (k, HEADS[1]), (v, HEADS[1]), (d_o, HEADS[0])];
            rows.into_iter().for_each(|(x, heads)| x[tokens.start * heads * DIM..tokens.end * heads * DIM].fill(bf16::NAN));
        }
        run(executor, &mut numbers, &boundaries).unwrap_or_else(|e| panic!("{e}"));
        for n in (0..BATCH).filter(|n| *n != spoiled) {
            let dq = are_near(&numbers.dq_of(tokens(n)), &right.dq_of(tokens(n)));
            assert!(dq && numbers.of(tokens(n)) == right.of(tokens(n)), "document {n} beside document {spoiled}, which holds no numbers");
        }
        assert!(numbers.of(tokens(spoiled)) != right.of(tokens(spoiled)));
        for tokens in outside.clone() {
            let dq = numbers.dq_of(tokens.clone()).iter().all(|x| x.is_nan());
            assert!(dq && numbers.of(tokens.clone()) == Numbers::drawn().of(tokens), "what is outside of documents was written");
        }
    }
}

#[test]
fn whatever_boundaries_say_nothing_beside_the_memory_is_touched() {
    executors().for_each(|executor| within_memory(&executor));
}

fn within_memory(executor: &CudaExecutor) {
    let (drawn, most) = (Numbers::drawn(), i64::MAX);
    for boundaries in [
        [-40, 30, 20, 60, 90],
        [0, 419, 421, 900, 901],
        [most, most, 0, most, i64::MIN],
        [i64::MIN, most, i64::MIN, most, i64::MIN],
        [0, most, 0, most, 0],
        [419, 420, 419, 420, 419],
        [5, 5, 5, 5, 5],
    ] {
        let mut numbers = Numbers::drawn();
        run(executor, &mut numbers, &boundaries).unwrap_or_else(|e| panic!("{boundaries:?}: {e}"));
        let clamped = boundaries.map(|n| n.clamp(0, TOTAL as i64) as usize);
        let any = clamped.windows(2).map(|pair| pair[0]..pair[1].min(pair[0] + LONGEST as usize));
        let inside: Vec<_> = any.collect();
        for token in (0..TOTAL).filter(|token| inside.iter().all(|tokens| !tokens.contains(token))) {
            let dq = numbers.dq_of(token..token + 1).iter().all(|x| x.is_nan());
            let others = numbers.of(token..token + 1) == drawn.of(token..token + 1);
            assert!(dq && others, "{boundaries:?}: token {token} was written");
        }
    }
}
