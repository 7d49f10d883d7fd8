//! Lists of blocks: those that are made at a call leave out no less than those that are made with a plan.

use super::{executor, mma};
use conformance::emulated::boxes;
use conformance::random::Random;
use conformance::share::of_today;
use half::bf16;
use sdpa::cuda::CudaExecutor;
use sdpa::{AttentionSpec, DType, Elements, Executor, HostBackward, HostForward, Layout, Shape};

const SHAPE: Shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 800, seq_kv: 900, dim_qk: 64, dim_v: 64 };

/// Each rule by places alone, and by a number of the call.
const RULES: [[&str; 2]; 3] = [
    ["q / 200 == k / 200", "scalar width = 200.0; q / i32(width) == k / i32(width)"],
    ["q % 400 < k & k < 300", "scalar first = 300.0; q % 400 < k & k < i32(first)"],
    ["select(head == 1, k < 100, k > 600)", "scalar first = 100.0; select(head == 1, k < i32(first), k > 600)"],
];

/// What a pass of either kind gives: its numbers, and how many boxes were brought in.
struct Told {
    numbers: Vec<Vec<bf16>>,
    boxes: [u64; 2],
}

fn told(executor: &dyn Executor, mask: Option<&str>) -> Told {
    let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).with_stats();
    let spec = mask.map_or(spec.clone(), |mask| spec.mask(mask.parse().unwrap_or_else(|e| panic!("{mask}: {e}"))));
    let mut random = Random::new(9);
    let mut drawn = |n: i64| (0..n).map(|_| bf16::from_f64(random.normal())).collect::<Vec<_>>();
    let Shape { heads_q, heads_kv, seq_q, seq_kv, dim_qk, .. } = SHAPE;
    let [of_q, of_kv] = [heads_q * seq_q * dim_qk, heads_kv * seq_kv * dim_qk];
    let [q, d_o] = [(); 2].map(|()| drawn(of_q));
    let [k, v] = [(); 2].map(|()| drawn(of_kv));
    let mut numbers = [of_q, of_q, of_kv, of_kv].map(|n| vec![bf16::NAN; n as usize]);
    let mut stats = vec![f32::NAN; (heads_q * seq_q) as usize];
    let before = boxes();
    let [o, dq, dk, dv] = &mut numbers;
    let [q, k, v, d_o] = [&q, &k, &v, &d_o].map(|of| Elements::BF16(of));
    let call = HostForward::new(q, k, v, &mut *o).stats(&mut stats);
    executor.prepare(&spec.validate().unwrap()).unwrap().forward(call).unwrap();
    let between = boxes();
    let call = HostBackward::new((q, k, v), (&*o, &stats), d_o, (dq, dk, dv));
    executor.prepare_backward(&spec.backward().validate().unwrap()).unwrap().backward(call).unwrap();
    Told { numbers: numbers.into(), boxes: [between - before, boxes() - between] }
}

/// Of the results that are compared, those that come out alike however threads take turns.
fn lists_are_alike(executor: &CudaExecutor, alike: &[(usize, &str)]) {
    let every = told(executor, None).boxes;
    // One a day.
    let what = format!("rules of lists {}", executor.device().name());
    for rules in of_today(&what, RULES.len() as u64, RULES.to_vec(), |_| Vec::new()) {
        let [plan, call] = rules.map(|rule| told(executor, Some(rule)));
        for ((all, before), now) in every.into_iter().zip(plan.boxes).zip(call.boxes) {
            assert!(now > 0 && now <= before && before < all, "{}: {now} boxes, {before} by the plan, {all} without a rule", rules[0]);
        }
        for &(n, what) in alike {
            assert_eq!(plan.numbers[n], call.numbers[n], "{what} of {}", rules[0]);
        }
    }
}

#[test]
fn lists_of_a_call_are_those_of_a_plan_or_shorter() {
    let (Some(executor), Some(mma)) = (executor(), mma::executor()) else { return };
    // The one adds gradients of queries in any order.
    lists_are_alike(&executor, &[(0, "o"), (2, "dk"), (3, "dv")]);
    lists_are_alike(&mma, &[(0, "o"), (1, "dq"), (2, "dk"), (3, "dv")]);
}
