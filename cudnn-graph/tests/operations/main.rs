//! The random problems of `device operations`, without a device: the interpreter in the types of the graph takes the place of the device, and results with
//! mistakes are refused.

mod compare;
mod draw;
mod values;

use compare::expected;
use cudnn_graph::DType;
use cudnn_graph::ir::interp::{Precision, Value, run};
use std::collections::BTreeSet;

/// The elements of a result with neighbours along the second axis swapped, or along the last one if it has no neighbours there.
fn swapped(value: &Value) -> Vec<f64> {
    let axis = if value.dims.get(1).is_some_and(|&n| n > 1) { 1 } else { value.dims.len() - 1 };
    let (n, inner) = (value.dims[axis] as usize, value.dims[axis + 1..].iter().product::<i64>() as usize);
    let other = |at: usize| {
        let channel = at / inner % n;
        let next = if channel ^ 1 < n { channel ^ 1 } else { channel };
        at - channel * inner + next * inner
    };
    (0..value.data.len()).map(|at| value.data[other(at)]).collect()
}

#[test]
fn results_in_the_types_of_the_graph_are_right_and_mistakes_are_refused() {
    let (mut seen, mut compared) = (BTreeSet::new(), 0);
    for seed in 0..2 * draw::round() {
        let problem = draw::problem(seed);
        let text = problem.graph.to_string();
        let graph = problem.graph.clone().verify().unwrap_or_else(|e| panic!("seed {seed}, {}: {e}\n{text}", problem.operation));
        let inputs = values::inputs(&problem, &graph, seed);
        let at = format!("seed {seed}, {} of {}\n{text}", problem.operation, problem.dtype);
        let emulated = run(&graph, &inputs, Precision::F32).unwrap_or_else(|e| panic!("{at}: {e}"));
        seen.insert(problem.operation);
        for (id, want) in expected(&graph, &inputs).unwrap_or_else(|e| panic!("{at}: {e}")) {
            // These scales are in an order that `values` does not know.
            let tensor = graph.get(id).unwrap();
            if tensor.dtype == DType::F8E8M0 {
                continue;
            }
            let got = if let Ok(bytes) = values::to_bytes(tensor, &emulated[&id]) {
                values::from_bytes(tensor, &bytes).unwrap()
            } else {
                panic!("{at}: no bytes of {}", want.name)
            };
            assert_eq!(got, emulated[&id].data, "{at}: bytes of {}", want.name);
            want.check(&got).unwrap_or_else(|e| panic!("{at}: {e}"));
            compared += 1;
            let poisoned = vec![f64::NAN; got.len()];
            let unwritten: Vec<f64> = got.iter().enumerate().map(|(n, &x)| if n + 1 == got.len() { f64::NAN } else { x }).collect();
            let mut mistakes = vec![("a result that was not written", poisoned), ("a last element that was not written", unwritten)];
            mistakes.push(("zeros", vec![0.0; got.len()]));
            if tensor.dtype != DType::I8 {
                mistakes.push(("twice the result", got.iter().map(|x| 2.0 * x).collect()));
            }
            let other = swapped(&Value::new(want.want.dims.clone(), got.clone()));
            if other != got && got.len() > 8 {
                mistakes.push(("swapped channels", other));
            }
            for (mistake, wrong) in mistakes {
                assert!(want.check(&wrong).is_err(), "{at}: {} with {mistake} was accepted", want.name);
            }
        }
    }
    assert_eq!(seen, draw::names().collect(), "operations without a problem");
    assert!(compared > 300, "only {compared} results were compared");
}
