//! NaN and infinities in operands: which rows of the results they reach, next to the CPU executor.

use super::{executor, mma};
use half::bf16;
use sdpa::cpu::CpuExecutor;
use sdpa::{AttentionSpec, DType, Executor, HostBackward, HostForward, Layout, Mask, Param, Shape};

const ROWS: usize = 150;
const DIM: usize = 64;
const SHAPE: Shape =
    Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: ROWS as i64, seq_kv: ROWS as i64, dim_qk: DIM as i64, dim_v: DIM as i64 };
/// The query and the key that hold it.
const AT: [usize; 2] = [70, 61];

fn wave(seed: f32) -> Vec<bf16> {
    (0..ROWS * DIM).map(|n| bf16::from_f32((n as f32 * 0.37 + seed).sin())).collect()
}

/// `o`, `dq`, `dk`, `dv`, and `stats`, of `q`, `k`, `v` and `d_o`.
fn passes(executor: &dyn Executor, spec: AttentionSpec, [q, k, v, d_o]: &[Vec<bf16>; 4]) -> ([Vec<bf16>; 4], Vec<f32>) {
    let problem = spec.backward().validate().unwrap();
    let [mut o, mut dq, mut dk, mut dv] = [(); 4].map(|()| vec![bf16::ZERO; ROWS * DIM]);
    let mut stats = vec![0f32; ROWS];
    let call = HostForward::new(q, k, v, &mut o).stats(&mut stats);
    executor.prepare(problem.forward()).unwrap().forward(call).unwrap();
    let call = HostBackward::new((q, k, v), (&o, &stats), d_o, (&mut dq, &mut dk, &mut dv));
    executor.prepare_backward(&problem).unwrap().backward(call).unwrap();
    ([o, dq, dk, dv], stats)
}

/// Which rows of `o`, `dq`, `dk` and `dv` have an element that is no finite number, and of which rows `stats` is NaN.
fn reached(executor: &dyn Executor, mask: Option<Mask>, operand: usize, bad: f32) -> [Vec<usize>; 5] {
    let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).with_stats();
    let spec = if let Some(mask) = mask { spec.mask(mask) } else { spec };
    let mut given = [1.0, 2.0, 3.0, 4.0].map(wave);
    given[operand][AT[usize::from(operand == 1 || operand == 2)] * DIM + 3] = bf16::from_f32(bad);
    let ([o, dq, dk, dv], stats) = passes(executor, spec, &given);
    let rows = |of: &[bf16]| (0..ROWS).filter(|row| of[row * DIM..(row + 1) * DIM].iter().any(|x| !x.is_finite())).collect::<Vec<_>>();
    let [o, dq, dk, dv] = [&o, &dq, &dk, &dv].map(|of| rows(of));
    [o, dq, dk, dv, (0..ROWS).filter(|row| stats[*row].is_nan()).collect()]
}

/// What is not finite is never hidden. Without a mask it reaches the rows that it reaches on the CPU. With one, NaN of a query or a key reaches no other row of `o` or
/// `stats`; that of a value reaches rows of its tile that mask its key out, as P is 0 there and 0 · NaN is NaN.
#[test]
fn what_is_not_finite_is_not_hidden_and_stays_in_its_rows_of_o() {
    let (Some(tiles), Some(strided)) = (executor(), mma::executor()) else { return };
    let cpu = CpuExecutor::default();
    for causal in [false, true] {
        let mask = || causal.then(Mask::causal);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (operand, name) in ["q", "k", "v", "d_o"].into_iter().enumerate() {
                let right = reached(&cpu, mask(), operand, bad);
                for (family, executor) in [("wgmma", &tiles), ("mma", &strided)] {
                    let got = reached(executor, mask(), operand, bad);
                    let about = format!("{family}, causal {causal}, {bad} in {name}: {got:?}, on the CPU {right:?}");
                    let hides = (0..4).any(|n| right[n].iter().any(|row| !got[n].contains(row)));
                    assert!(!hides, "{about}");
                    assert!(causal || got[..2] == right[..2], "{about}");
                    assert!(name == "v" || got[0] == right[0], "{about}");
                    assert!(!bad.is_nan() || got[4] == right[4], "{about}");
                }
                // On the CPU, masks hold what is not finite back everywhere.
                if causal && bad.is_nan() {
                    let attends: Vec<usize> = match name {
                        "q" => vec![AT[0]],
                        "k" | "v" => (AT[1]..ROWS).collect(),
                        _ => Vec::new(),
                    };
                    assert_eq!(right[0], attends, "{name}");
                }
            }
        }
    }
}

/// A score of −∞ that a score_mod makes of every second key weighs 0, as if a mask dropped it.
#[test]
fn keys_that_a_score_mod_drops_weigh_nothing() {
    let (Some(tiles), Some(strided)) = (executor(), mma::executor()) else { return };
    let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).with_stats();
    let dropped = spec.clone().score_mod("select((q + k) % 2 == 0, score, -inf)".parse().unwrap());
    let masked = spec.mask("(q + k) % 2 == 0".parse().unwrap());
    let given = [1.0, 2.0, 3.0, 4.0].map(wave);
    for executor in [&tiles, &strided] {
        let (got, stats) = passes(executor, dropped.clone(), &given);
        let (want, of_mask) = passes(executor, masked.clone(), &given);
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((got.to_f32() - want.to_f32()).abs() <= 0.02 * want.to_f32().abs() + 2e-3, "{got}, not {want}");
        }
        assert!(stats.iter().zip(&of_mask).all(|(got, want)| (got - want).abs() < 1e-3));
    }
}

/// Numbers become integers as Rust's `as` makes them: toward zero, the nearest integer for those that are too large, and 0 for NaN.
#[test]
fn conversions_to_integers_round_saturate_and_drop_nan() {
    let (Some(tiles), Some(strided)) = (executor(), mma::executor()) else { return };
    let edges = [0.0f32, 0.99, -0.99, 1.5, -2.5, 3e9, -3e9, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, 1e-40];
    let numbers: Vec<f32> = edges.into_iter().cycle().take(ROWS).collect();
    let integers: Vec<f32> = numbers.iter().map(|x| (*x as i32).clamp(-3, 3) as f32).collect();
    let given = [1.0, 2.0, 3.0].map(wave);
    let run = |executor: &dyn Executor, score_mod: &str, values: &[f32]| {
        let spec = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).with_stats().score_mod(score_mod.parse().unwrap());
        let [q, k, v] = &given;
        let (mut o, mut stats) = (vec![bf16::ZERO; ROWS * DIM], vec![0f32; ROWS]);
        let params = [Param::new("x", values)];
        let call = HostForward::new(q, k, v, &mut o).stats(&mut stats).params(&params);
        executor.prepare(&spec.validate().unwrap()).unwrap().forward(call).unwrap();
        (o, stats)
    };
    for (family, executor) in [("cpu", &CpuExecutor::default() as &dyn Executor), ("wgmma", &tiles), ("mma", &strided)] {
        let (o, stats) = run(executor, "tensor x[k]: f32; score + f32(min(max(i32(x), -3), 3))", &numbers);
        let (right, right_stats) = run(executor, "tensor x[k]: f32; score + x", &integers);
        let apart = o.iter().zip(&right).map(|(x, y)| (x.to_f32() - y.to_f32()).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-2, "{family}: {apart} between outputs");
        assert!(stats.iter().zip(&right_stats).all(|(x, y)| (x - y).abs() < 1e-3), "{family}");
        assert!(right.iter().any(|x| x.to_f32().abs() > 0.1), "{family}: outputs are not zeros");
    }
}
