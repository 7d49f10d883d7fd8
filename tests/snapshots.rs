//! What the lowering makes of a problem, and what cuDNN is sent for it: text of both in `snapshots/`, for each form and runtime.

use conformance::golden;
use cudnn_graph::encode::encode;
use cudnn_graph::{DType, Verified, Version};
use sdpa::lower::{self, Form};
use sdpa::{AttentionSpec, Layout, Shape, TensorSpec};
use std::collections::BTreeSet;

const VARIANTS: [(Form, Version); 3] =
    [(Form::Composite, Version::new(9, 19, 0)), (Form::Composite, Version::new(9, 27, 0)), (Form::Unified, Version::new(9, 27, 0))];

/// Name, masks, stats, lengths.
type Golden = (&'static str, &'static [&'static str], bool, (i64, i64));

const PROBLEMS: [Golden; 11] = [
    ("plain", &[], false, (128, 128)),
    ("plain_stats", &[], true, (128, 128)),
    ("causal", &["causal"], true, (128, 128)),
    ("causal_bottom_right", &["causal-bottom-right"], true, (65, 130)),
    ("window", &["window:33,0"], true, (128, 128)),
    ("window_bottom_right", &["window:33,0:bottom-right"], false, (65, 130)),
    ("window_both_sides", &["window:17,9"], true, (128, 128)),
    ("window_open_right", &["window:33,inf"], true, (130, 65)),
    ("prefix", &["prefix-lm:20"], true, (128, 128)),
    ("prefix_and_window", &["prefix-lm:20", "window:33,9:bottom-right"], true, (65, 130)),
    ("decode", &["causal-bottom-right"], true, (1, 500)),
];

fn spec(golden: &Golden) -> AttentionSpec {
    let &(_, masks, stats, (seq_q, seq_kv)) = golden;
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q, seq_kv, dim_qk: 64, dim_v: 64 };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    spec.masks = masks.iter().map(|m| m.parse().unwrap()).collect();
    spec.stats = stats;
    spec
}

/// Name of the file, graph, runtime.
fn graphs() -> Vec<(String, Verified, Version)> {
    let mut graphs = Vec::new();
    for golden in &PROBLEMS {
        let problem = spec(golden).validate().unwrap();
        for (form, runtime) in VARIANTS {
            let graph = lower::lower(&problem.clone().into(), form, runtime).unwrap().graph;
            graphs.push((format!("{}.{form}-{}.{}.txt", golden.0, runtime.major, runtime.minor), graph, runtime));
        }
    }
    let dims = [2, 4, 65, 64];
    let gaps = TensorSpec { dims, strides: Layout::Bshd.strides([2, 4, 65, 67]), alignment: 2 };
    let copy = lower::copy(DType::BF16, &gaps, &TensorSpec::dense(dims, Layout::Bshd)).unwrap();
    graphs.push(("copy.txt".to_owned(), copy.graph, Version::OLDEST));
    graphs
}

fn check_all(folder: &str, text: impl Fn(&Verified, Version) -> String) {
    let graphs = graphs();
    let names: BTreeSet<String> = graphs.iter().map(|(name, ..)| name.clone()).collect();
    assert_eq!(names.len(), graphs.len());
    let mut problems: Vec<String> = graphs
        .iter()
        .filter_map(|(name, graph, runtime)| golden::check(&format!("{folder}/{name}"), &text(graph, *runtime)).err())
        .collect();
    problems.extend(golden::no_others(folder, &names).err());
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn graphs_are_what_they_were() {
    check_all("tests/snapshots/graph", |graph, _| graph.to_string());
}

#[test]
fn programs_are_what_they_were() {
    check_all("tests/snapshots/program", |graph, runtime| encode(graph, runtime).unwrap().to_string());
}
