//! The order of kernels of our own and cuDNN, held against the times of problems on an H100.

use conformance::golden;
use conformance::timed::Timed;
use sdpa::cuda::{EXCEPTIONS, Exception, Family, cudnn_first, cudnn_first_backward};

/// The problem, the exception that it is of, and how many times as fast kernels of our own were.
type Row = (Timed, Option<&'static Exception>, f64);

fn timed(file: &str) -> Vec<Row> {
    let path = format!("{}/../benches/results/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let of = |line: &str| {
        let timed: Timed = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        let exception = if timed.backward {
            cudnn_first_backward(Family::Wgmma, &timed.gradient().unwrap())
        } else {
            cudnn_first(Family::Wgmma, &timed.forward().unwrap())
        };
        let speed = timed.cudnn_ms.unwrap() / timed.cuda_ms.unwrap();
        (timed, exception, speed)
    };
    text.lines().map(of).collect()
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    let half = all.len() / 2;
    if all.len() % 2 == 1 { all[half] } else { f64::midpoint(all[half - 1], all[half]) }
}

/// How many times as long as the better one the one that is asked first takes.
fn lost((_, exception, speed): &Row) -> f64 {
    let first = if exception.is_some() { *speed } else { 1.0 / speed };
    first.max(1.0)
}

const FILES: [&str; 3] = ["2026-11-26-choice.jsonl", "2026-11-26-choice-others.jsonl", "2026-11-26-choice-functions.jsonl"];

/// Where docs/cuda.md has what is made of the times.
const BEGINS: &str = "<!-- made by tests/host/choice.rs -->\n";
const ENDS: &str = "<!-- end -->\n";

#[test]
fn the_page_has_each_exception_and_what_the_order_loses() {
    let all: Vec<Row> = FILES.into_iter().flat_map(timed).collect();
    let mut made = "| cuDNN first | pass | problems | speed | why |\n|---|---|---|---|---|\n".to_owned();
    for exception in &EXCEPTIONS {
        let of = || all.iter().filter(|(_, other, _)| other.is_some_and(|other| other.what == exception.what));
        let pass = if of().any(|(timed, ..)| timed.backward) { "backward" } else { "forward" };
        let (count, median) = (of().count(), median(of().map(|(_, _, speed)| *speed).collect()));
        assert!((median - exception.speed).abs() <= 0.0051 && median < 0.95, "{}: {median:.3} of {count}", exception.what);
        made.push_str(&format!("| {} | {pass} | {count} | {median:.2} | {} |\n", exception.what, exception.cause));
    }
    made.push_str("\n| times in `benches/results` | problems | within 5 % of the faster one | within 10 % | geometric mean lost |\n|---|---|---|---|---|\n");
    for file in FILES {
        let all = timed(file);
        let within = |bound: f64| 100.0 * all.iter().filter(|row| lost(row) <= bound).count() as f64 / all.len() as f64;
        let mean = (all.iter().map(|row| lost(row).ln()).sum::<f64>() / all.len() as f64).exp();
        assert!(mean <= 1.018, "{file}: {mean}");
        let [five, ten] = [1.05, 1.1].map(within);
        made.push_str(&format!("| `{file}` | {} | {five:.1} % | {ten:.1} % | {:.2} % |\n", all.len(), 100.0 * (mean - 1.0)));
    }
    let page = std::fs::read_to_string(golden::repository("docs/cuda.md")).unwrap();
    let (before, rest) = page.split_once(BEGINS).unwrap();
    let (_, after) = rest.split_once(ENDS).unwrap();
    golden::check("docs/cuda.md", &format!("{before}{BEGINS}{made}{ENDS}{after}")).unwrap_or_else(|e| panic!("{e}"));
}
