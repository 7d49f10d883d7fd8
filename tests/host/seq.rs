//! Buckets of lengths: the same numbers as at the exact length, and as many plans as buckets.

use conformance::random::Random;
use sdpa::cache::{CacheValue, Limits, PlanCache, Weight};
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::lower::Job;
use sdpa::seq::{Buckets, SeqPolicy};
use sdpa::{AttentionSpec, DType, Elements, Executor, HostBackward, HostForward, Layout, Mask, Param, ScoreMod, Shape, TensorSpec};
use std::num::NonZeroUsize;

/// Rows that every buffer has room for.
const CAPACITY: i64 = 96;

/// Tensors of (batch, head, seq, dim) in buffers of fixed capacity, which lie in memory as batch-seq-head-dim or batch-head-seq-dim.
fn spec(shape: Shape, layout: Layout) -> AttentionSpec {
    let mut spec = AttentionSpec::dense(DType::F32, shape, layout).with_stats();
    for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
        let [batch, heads, _, dim] = tensor.dims;
        tensor.strides = layout.strides([batch, heads, CAPACITY, dim]);
    }
    spec
}

fn room(tensor: &TensorSpec) -> usize {
    let [batch, heads, _, dim] = tensor.dims;
    (batch * heads * CAPACITY * dim) as usize
}

/// `o`, stats; `dq`, `dk`, `dv`.
struct Results {
    o: Vec<f32>,
    stats: Vec<f32>,
    gradients: [Vec<f32>; 3],
}

fn compute(spec: &AttentionSpec, [q, k, v, d_o]: [&[f32]; 4], params: &[Param<'_>]) -> Results {
    let cpu = CpuExecutor::default();
    let problem = spec.validate().unwrap();
    let (mut o, mut stats) = (vec![f32::NAN; room(&spec.o)], vec![f32::NAN; problem.stats_elements() as usize]);
    let [q, k, v] = [q, k, v].map(Elements::F32);
    let call = HostForward::new(q, k, v, &mut o).stats(&mut stats).params(params);
    cpu.prepare(&problem).unwrap().forward(call).unwrap();
    let mut gradients = [&spec.q, &spec.k, &spec.v].map(|tensor| vec![f32::NAN; room(tensor)]);
    let [dq, dk, dv] = &mut gradients;
    let backward = cpu.prepare_backward(&spec.backward().validate().unwrap()).unwrap();
    let call = HostBackward::new((q, k, v), (&o, &stats), d_o, (dq, dk, dv)).params(params);
    backward.backward(call).unwrap();
    Results { o, stats, gradients }
}

/// Rows of the exact tensor are equal, and those past it 0.
fn same(what: &str, exact: &TensorSpec, longer: &TensorSpec, want: &[f32], got: &[f32]) {
    let [batch, heads, rows, dim] = longer.dims;
    for n in 0..batch * heads * rows * dim {
        let place = [n / (heads * rows * dim), n / (rows * dim) % heads, n / dim % rows, n % dim];
        let at = place.iter().zip(longer.strides).map(|(i, stride)| i * stride).sum::<i64>() as usize;
        let want = if place[2] < exact.dims[2] { want[at] } else { 0.0 };
        assert!((got[at] - want).abs() <= 2e-5 * (1.0 + want.abs()), "{what} at {place:?}: {} and not {want}", got[at]);
    }
}

const MASKS: [&[&str]; 11] = [
    &[],
    &["causal"],
    &["causal-bottom-right"],
    &["causal-ends"],
    &["window:9,2:ends", "window:30,inf:bottom-right"],
    &["window:9,2"],
    &["window:20,inf:bottom-right"],
    &["window:7,3:bottom-right", "dilated:2"],
    &["prefix-lm:5"],
    &["(k <= q) | k < 4"],
    &["global-local:6,3"],
];

#[test]
fn a_bucket_computes_what_the_exact_length_does() {
    let mut random = Random::new(11);
    let policy = SeqPolicy::new(Buckets::new([1, 8, 40, 96]).unwrap(), Buckets::multiples(24, 96).unwrap());
    for round in 0..66 {
        let seq_q = if round % 6 == 0 { 1 } else { random.between(1, 90) };
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q, seq_kv: random.between(1, 90), dim_qk: 16, dim_v: 8 };
        let mut exact = spec(shape, if round % 2 == 0 { Layout::Bshd } else { Layout::Bhsd });
        exact.masks = MASKS[round % MASKS.len()].iter().map(|text| text.parse::<Mask>().unwrap()).collect();
        if round % 3 == 0 {
            exact = exact.score_mod("softcap:2".parse::<ScoreMod>().unwrap()).score_mod("alibi".parse().unwrap());
        }
        let mut draw = |tensor: &TensorSpec| (0..room(tensor)).map(|_| random.normal() as f32).collect::<Vec<f32>>();
        let [q, k, v, d_o] = [draw(&exact.q), draw(&exact.k), draw(&exact.v), draw(&exact.o)];
        let bucketed = policy.bucket(&exact).unwrap();
        assert!(bucketed.spec.q.dims[2] >= shape.seq_q && bucketed.spec.k.dims[2] >= shape.seq_kv && bucketed.cost >= 1.0);
        let want = compute(&exact, [&q, &k, &v, &d_o], &[]);
        let got = compute(&bucketed.spec, [&q, &k, &v, &d_o], &bucketed.params());
        let what = format!("{shape:?} {:?}", MASKS[round % MASKS.len()]);
        same(&format!("o, {what}"), &exact.o, &bucketed.spec.o, &want.o, &got.o);
        let tensors = [("dq", exact.q, bucketed.spec.q), ("dk", exact.k, bucketed.spec.k), ("dv", exact.v, bucketed.spec.v)];
        for ((name, exact, longer), (want, got)) in tensors.iter().zip(want.gradients.iter().zip(&got.gradients)) {
            same(&format!("{name}, {what}"), exact, longer, want, got);
        }
        for (n, got) in got.stats.iter().enumerate() {
            let (row, rows) = (n as i64 % bucketed.spec.q.dims[2], n as i64 / bucketed.spec.q.dims[2]);
            let want = if row < shape.seq_q { want.stats[(rows * shape.seq_q + row) as usize] } else { f32::NEG_INFINITY };
            assert!(*got == want || (got - want).abs() <= 1e-5 * (1.0 + want.abs()), "stats, {what}, row {row}: {got} and not {want}");
        }
    }
}

#[derive(Clone, Debug)]
struct Nothing;

impl CacheValue for Nothing {
    fn weight(&self) -> Weight {
        Weight::default()
    }
}

/// Builds of both passes for a list of (seq_q, seq_kv).
fn builds(policy: &SeqPolicy, lengths: impl Iterator<Item = (i64, i64)>, capacity: i64, mask: &str) -> [u64; 2] {
    let caches = ["forward", "backward"]
        .map(|name| PlanCache::<Job, Nothing, sdpa::Unsupported>::new(name, Limits::entries(NonZeroUsize::new(64).unwrap())));
    for (seq_q, seq_kv) in lengths {
        let shape = Shape { batch: 4, heads_q: 8, heads_kv: 2, seq_q, seq_kv, dim_qk: 64, dim_v: 64 };
        let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats().mask(mask.parse().unwrap());
        for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
            tensor.strides[0] = capacity * tensor.dims[1] * tensor.dims[3];
        }
        let bucketed = policy.bucket(&spec).unwrap().spec;
        let jobs: [Job; 2] = [bucketed.validate().unwrap().into(), bucketed.backward().validate().unwrap().into()];
        for (cache, job) in caches.iter().zip(&jobs) {
            cache.get_or_build::<sdpa::cudnn::Error>(job, || Ok(Nothing)).unwrap();
        }
    }
    caches.map(|cache| cache.stats().misses)
}

#[test]
fn a_decode_loop_and_a_training_run_make_as_many_plans_as_buckets() {
    let decode = SeqPolicy::new(None, Buckets::doubling(128, 4096).unwrap());
    assert_eq!(builds(&decode, (1..=4096).map(|n| (1, n)), 4096, "causal-bottom-right"), [6, 6]);
    let mut random = Random::new(3);
    let lengths: Vec<i64> = (0..500).map(|_| random.between(64, 2048)).collect();
    let buckets = Buckets::multiples(256, 2048).unwrap();
    let training = SeqPolicy::new(buckets.clone(), buckets);
    let run = |policy: &SeqPolicy| builds(policy, lengths.iter().map(|&n| (n, n)), 2048, "causal");
    assert_eq!(run(&training), [8, 8]);
    let exact = run(&SeqPolicy::default());
    assert!(exact[0] > 400 && exact[1] > 400, "{exact:?}");
    // Growing prompts aligned to the corner: a scalar moves the mask.
    let prompts = builds(&training, lengths.iter().map(|&n| (n.min(100), n)), 2048, "causal-bottom-right");
    assert_eq!(prompts, [8, 8]);
}

#[test]
fn what_a_bucket_cannot_be_is_told_at_once() {
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 10, seq_kv: 30, dim_qk: 16, dim_v: 16 };
    let policy = SeqPolicy::new(Buckets::new([16]).unwrap(), Buckets::new([16, 20]).unwrap());
    let mut wrong = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    wrong.masks = vec!["natten:3".parse().unwrap(), "causal".parse().unwrap()];
    wrong.score_mods = vec!["score * f32(seq_kv - k)".parse().unwrap()];
    let errors = policy.bucket(&wrong).unwrap_err().0;
    let fields: Vec<&str> = errors.iter().map(|e| e.field.as_str()).collect();
    assert_eq!(fields, ["seq_kv", "q.strides", "o.strides", "masks[0]", "score_mods[0]"]);
    assert!(errors[0].to_string().contains("at most 20") && errors[1].to_string().contains("fixed capacity"), "{errors:?}");
    let mut padded = spec(shape, Layout::Bshd);
    padded.masks = vec![Mask::padding(), Mask::causal_bottom_right()];
    let wide = SeqPolicy::new(None, Buckets::new([64]).unwrap());
    assert_eq!(wide.bucket(&padded).unwrap_err().0[0].field, "masks");
    // The ends are by one's own lengths, if these are of both sides.
    padded.masks[1] = Mask::causal_ends();
    assert_eq!(wide.bucket(&padded).unwrap().spec.masks, padded.masks);
    let one_side = "tensor seq_len_q[batch]: i32; q < seq_len_q".parse().unwrap();
    let both = std::mem::replace(&mut padded.masks[0], one_side);
    assert!(wide.bucket(&padded).unwrap_err().to_string().contains("aligned to the sequence ends"));
    padded.masks[0] = both;
    padded.masks.pop();
    let own = wide.bucket(&padded).unwrap();
    assert!(own.params().is_empty() && own.spec.masks.len() == 1);
    for wrong in [Buckets::new([]), Buckets::new([0, 4]), Buckets::new([4, 4]), Buckets::doubling(0, 9), Buckets::multiples(0, 9)] {
        assert!(wrong.is_err());
    }
    assert_eq!(Buckets::doubling(100, 500).unwrap().lengths(), [100, 200, 400, 500]);
}
