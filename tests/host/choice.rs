//! The choice between kernels of our own and cuDNN, held against the times that it is made of.

use conformance::timed::Timed;
use sdpa::cuda::{Measured, measured, measured_backward};
use std::collections::BTreeMap;

/// Problems of which each has a score_mod that computes functions; what is known of sines is made of them too.
const FUNCTIONS: &str = "2026-11-26-choice-functions.jsonl";

/// The problem, what is known of its kind, and how many times as fast kernels of our own were.
fn timed(file: &str) -> Vec<(Timed, Measured, f64)> {
    let path = format!("{}/../benches/results/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let of = |line: &str| {
        let timed: Timed = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        let kind = if timed.backward { measured_backward(&timed.gradient().unwrap()) } else { measured(&timed.forward().unwrap()) };
        let speed = timed.cudnn_ms.unwrap() / timed.cuda_ms.unwrap();
        (timed, kind.unwrap(), speed)
    };
    text.lines().map(of).collect()
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    let half = all.len() / 2;
    if all.len() % 2 == 1 { all[half] } else { f64::midpoint(all[half - 1], all[half]) }
}

/// The share of problems for which the choice takes at most so many times as long as the better one.
fn share(all: &[(Timed, Measured, f64)], within: f64) -> f64 {
    let lost = |(_, kind, speed): &(Timed, Measured, f64)| if kind.is_faster() { 1.0 / speed } else { *speed };
    all.iter().filter(|of| lost(of) <= within).count() as f64 / all.len() as f64
}

#[test]
fn every_row_is_the_median_of_its_problems() {
    let mut kinds: BTreeMap<(bool, &str), (Measured, Vec<f64>)> = BTreeMap::new();
    let of_functions = timed(FUNCTIONS).into_iter().filter(|(_, kind, _)| kind.what.contains("sines"));
    for (timed, kind, speed) in timed("2026-11-26-choice.jsonl").into_iter().chain(of_functions) {
        let few = !timed.backward && timed.shape.seq_q <= 128;
        let what = if few { format!("few: {}", kind.what).leak() } else { kind.what };
        kinds.entry((timed.backward, what)).or_insert((kind, Vec::new())).1.push(speed);
    }
    for ((backward, what), (kind, speeds)) in kinds {
        let (count, median) = (speeds.len(), median(speeds));
        assert!((median - kind.speed).abs() <= 0.011, "backward {backward}, {what}: {median:.3} of {count}");
    }
}

/// Of the problems that it is made of, and of others, which were drawn and timed afterwards.
#[test]
fn the_choice_is_near_the_better_one() {
    for (file, least) in
        [("2026-11-26-choice.jsonl", [0.952, 0.974]), ("2026-11-26-choice-others.jsonl", [0.941, 0.958]), (FUNCTIONS, [0.902, 0.939])]
    {
        let all = timed(file);
        let [five, ten] = [1.05, 1.1].map(|within| share(&all, within));
        println!("within 5 % of the better one: {:.1} % of {} problems, within 10 %: {:.1} %", 100.0 * five, all.len(), 100.0 * ten);
        assert!(five >= least[0] && ten >= least[1], "{file}: {five} {ten}");
    }
}
