//! Packed documents over device memory, where nobody looks at boundaries: what one holds is no other's, and whatever they say, nothing beside the memory of the
//! call is touched.

use super::executor;
use conformance::emulated::submit;
use conformance::random::Random;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::cudnn::{DeviceForward, DeviceParam, DeviceSlice, DeviceValue};
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
    o: Vec<bf16>,
    stats: Vec<f32>,
}

impl Numbers {
    fn drawn() -> Numbers {
        let mut random = Random::new(31);
        let mut drawn = |heads: usize| (0..TOTAL * heads * DIM).map(|_| bf16::from_f64(random.normal())).collect::<Vec<_>>();
        let [q, k, v] = [HEADS[0], HEADS[1], HEADS[1]].map(&mut drawn);
        Numbers { o: vec![bf16::NAN; q.len()], stats: vec![f32::NAN; TOTAL * HEADS[0]], q, k, v }
    }

    /// The output and the statistics of some tokens, as bits.
    fn of(&self, tokens: std::ops::Range<usize>) -> (Vec<u16>, Vec<u32>) {
        let row = HEADS[0] * DIM;
        let o = self.o[tokens.start * row..tokens.end * row].iter().map(|x| x.to_bits()).collect();
        (o, self.stats[tokens.start * HEADS[0]..tokens.end * HEADS[0]].iter().map(|x| x.to_bits()).collect())
    }
}

pub(super) fn up<T: Element>(executor: &CudaExecutor, stream: &Stream, numbers: &[T]) -> Buffer {
    let mut buffer = Buffer::new(executor.device(), size_of_val(numbers)).unwrap();
    buffer.upload(stream, 0, numbers).unwrap();
    buffer
}

pub(super) fn whole(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

/// Runs a call with these boundaries; whether the machine found nothing wrong, with what it wrote.
fn run(executor: &CudaExecutor, numbers: &mut Numbers, boundaries: &[i64]) -> Result<(), sdpa::Error> {
    let [heads_q, heads_kv] = HEADS.map(|n| n as i64);
    let shape = Shape { batch: BATCH as i64, heads_q, heads_kv, seq_q: LONGEST, seq_kv: LONGEST, dim_qk: DIM as i64, dim_v: DIM as i64 };
    let packed = Packed { wide: true, ..Packed::of(TOTAL as i64) };
    let spec = AttentionSpec::packed(DType::BF16, shape, packed).mask(Mask::causal()).with_stats();
    let stream = executor.device().stream().unwrap();
    let [q, k, v, o] = [&numbers.q, &numbers.k, &numbers.v, &numbers.o].map(|x| up(executor, &stream, x));
    let (stats, cu) = (up(executor, &stream, &numbers.stats), up(executor, &stream, boundaries));
    let params = [DeviceParam { name: CU_SEQLENS, value: DeviceValue::Tensor(DType::I64, whole(&cu)) }];
    let call = DeviceForward {
        q: whole(&q),
        k: whole(&k),
        v: whole(&v),
        o: whole(&o),
        stats: Some(whole(&stats)),
        row_max: None,
        sum_exp: None,
        amax: &[],
        attn_scale: None,
        params: &params,
        workspace: None,
    };
    let ready = executor.prepare_device(&spec.validate().unwrap()).unwrap();
    submit(&*ready, &stream, &(&call).into())?;
    o.download(&stream, 0, &mut numbers.o).unwrap();
    stats.download(&stream, 0, &mut numbers.stats).unwrap();
    Ok(())
}

#[test]
fn what_is_in_a_document_reaches_no_other() {
    let Some(executor) = executor() else { return };
    let boundaries = [3, 3 + 70, 3 + 70 + 133, 3 + 70 + 133 + 1, 3 + 70 + 133 + 1 + 200];
    let tokens = |n: usize| boundaries[n] as usize..boundaries[n + 1] as usize;
    let mut right = Numbers::drawn();
    run(&executor, &mut right, &boundaries).unwrap_or_else(|e| panic!("{e}"));
    let outside = [0..3, boundaries[4] as usize..TOTAL];
    for spoiled in 0..BATCH {
        let mut numbers = Numbers::drawn();
        for tokens in [tokens(spoiled)].into_iter().chain(outside.clone()) {
            let rows = [(&mut numbers.q, HEADS[0]), (&mut numbers.k, HEADS[1]), (&mut numbers.v, HEADS[1])];
            rows.into_iter().for_each(|(x, heads)| x[tokens.start * heads * DIM..tokens.end * heads * DIM].fill(bf16::NAN));
        }
        run(&executor, &mut numbers, &boundaries).unwrap_or_else(|e| panic!("{e}"));
        for n in (0..BATCH).filter(|n| *n != spoiled) {
            assert!(numbers.of(tokens(n)) == right.of(tokens(n)), "document {n} beside document {spoiled}, which holds no numbers");
        }
        assert!(numbers.of(tokens(spoiled)) != right.of(tokens(spoiled)));
        for tokens in outside.clone() {
            assert!(numbers.of(tokens.clone()) == Numbers::drawn().of(tokens), "what is outside of documents was written");
        }
    }
}

#[test]
fn whatever_boundaries_say_nothing_beside_the_memory_is_touched() {
    let Some(executor) = executor() else { return };
    let most = i64::MAX;
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
        run(&executor, &mut numbers, &boundaries).unwrap_or_else(|e| panic!("{boundaries:?}: {e}"));
        let clamped = boundaries.map(|n| n.clamp(0, TOTAL as i64) as usize);
        let any = clamped.windows(2).map(|pair| pair[0]..pair[1].min(pair[0] + LONGEST as usize));
        let inside: Vec<_> = any.collect();
        for token in (0..TOTAL).filter(|token| inside.iter().all(|tokens| !tokens.contains(token))) {
            assert!(numbers.of(token..token + 1) == Numbers::drawn().of(token..token + 1), "{boundaries:?}: token {token} was written");
        }
    }
}
