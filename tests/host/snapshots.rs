//! What the lowering makes of a problem, and what cuDNN is sent for it: text of both in `snapshots/`, for each form and runtime.

use conformance::case::Case;
use conformance::golden;
use cudnn_graph::encode::encode;
use cudnn_graph::program::{Descriptor, Values};
use cudnn_graph::{Verified, Version};
use sdpa::cudnn::lower::{self, Form, Job};
use sdpa::{AttentionSpec, DType, Layout, Shape, TensorSpec};
use std::collections::{BTreeMap, BTreeSet};

const OLD: Version = Version::new(9, 19, 0);
const NEW: Version = Version::new(9, 27, 0);
const FORWARD: [(Form, Version); 3] = [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)];
const BACKWARD: [(Form, Version); 2] = [(Form::Composite, OLD), (Form::Composite, NEW)];

/// Name, masks, stats, lengths.
type Golden = (&'static str, &'static [&'static str], bool, (i64, i64));

const PROBLEMS: [Golden; 12] = [
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
    ("padding", &["padding"], true, (128, 128)),
];

/// Name, masks, lengths, key heads, whether every run must give the same bits.
type Gradient = (&'static str, &'static [&'static str], (i64, i64), i64, bool);

const GRADIENTS: [Gradient; 7] = [
    ("plain", &[], (128, 128), 4, false),
    ("causal", &["causal"], (128, 128), 4, false),
    ("gqa", &[], (128, 128), 2, false),
    ("padding", &["padding"], (128, 128), 2, false),
    ("window_bottom_right", &["window:33,0:bottom-right"], (65, 130), 2, false),
    ("deterministic", &["causal"], (128, 128), 2, true),
    ("no_whole_tiles", &[], (65, 130), 2, false),
];

/// Name, score_mods, masks, lengths, the parameter whose gradient the backward pass is asked for. Both passes of each.
type Modified = (&'static str, &'static [&'static str], &'static [&'static str], (i64, i64), Option<&'static str>);

const MODIFIED: [Modified; 8] = [
    ("softcap", &["softcap:30"], &[], (128, 128), None),
    ("softcap_causal", &["softcap:30"], &["causal"], (128, 128), None),
    // A table with a number for each head.
    ("alibi_causal", &["alibi"], &["causal"], (128, 128), None),
    // A table of the keys.
    ("alibi_decode", &["alibi"], &[], (1, 500), None),
    ("bias_softcap", &["bias16:hqk", "softcap:30"], &[], (128, 128), Some("bias")),
    ("document", &[], &["document"], (128, 128), None),
    // What few names of the library need.
    ("functions", &["select(min(q, k) % 3 == abs(q - k), cos(score), score)"], &["array:bhqk"], (128, 128), None),
    ("compare_floats", &["select(score > 0.0, score, score * 0.5)"], &[], (128, 128), None),
];

fn attention(score_mods: &[&str], masks: &[&str], (seq_q, seq_kv): (i64, i64), heads_kv: i64) -> AttentionSpec {
    let shape = Shape { batch: 2, heads_q: 4, heads_kv, seq_q, seq_kv, dim_qk: 64, dim_v: 64 };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    spec.score_mods = score_mods.iter().map(|m| m.parse().unwrap()).collect();
    spec.masks = masks.iter().map(|m| m.parse().unwrap()).collect();
    spec
}

/// Its name, what is lowered, and how.
type Lowering = (String, Job, &'static [(Form, Version)]);

/// Every pass.
fn jobs() -> Vec<Lowering> {
    let mut jobs: Vec<Lowering> = Vec::new();
    for (name, masks, stats, lengths) in PROBLEMS {
        let mut spec = attention(&[], masks, lengths, 2);
        spec.stats = stats;
        jobs.push((name.to_owned(), spec.validate().unwrap().into(), &FORWARD));
    }
    let mut spec = attention(&[], &["padding"], (128, 128), 2);
    spec.dtype = DType::F16;
    jobs.push(("padding_f16".to_owned(), spec.validate().unwrap().into(), &FORWARD));
    for (name, masks, lengths, heads_kv, deterministic) in GRADIENTS {
        let mut spec = attention(&[], masks, lengths, heads_kv).backward();
        spec.deterministic = deterministic;
        jobs.push((format!("backward_{name}"), spec.validate().unwrap().into(), &BACKWARD));
    }
    let of_rows = attention(&[], &["causal"], (128, 128), 2).with_row_max().with_sum_exp();
    jobs.push(("row_statistics".to_owned(), of_rows.clone().with_stats().validate().unwrap().into(), &FORWARD));
    jobs.push(("row_statistics_sink".to_owned(), of_rows.with_sink().validate().unwrap().into(), &FORWARD[..2]));
    let mut in_blocks = attention(&[], &["causal"], (130, 200), 2).with_stats().with_output_in(DType::BF16).with_block_scales();
    in_blocks.dtype = DType::F8E4M3;
    jobs.push(("block_scale".to_owned(), in_blocks.validate().unwrap().into(), &FORWARD[1..2]));
    let plain = attention(&[], &[], (128, 128), 4).backward().validate().unwrap();
    jobs.push(("backward_plain".to_owned(), plain.into(), &[(Form::Unified, NEW)]));
    for (name, score_mods, masks, lengths, wrt) in MODIFIED {
        let spec = attention(score_mods, masks, lengths, 2).with_stats();
        let backward = wrt.iter().fold(spec.backward(), |spec, name| spec.wrt(name, DType::BF16));
        jobs.push((name.to_owned(), spec.validate().unwrap().into(), &FORWARD));
        jobs.push((format!("backward_{name}"), backward.validate().unwrap().into(), &BACKWARD));
    }
    jobs
}

/// Name of the file, graph, runtime.
type Lowered = (String, Verified, Version);

fn graphs() -> Vec<Lowered> {
    let mut graphs = Vec::new();
    for (name, job, variants) in jobs() {
        for &(form, runtime) in variants {
            let graph = lower::lower(&job, form, runtime).unwrap_or_else(|e| panic!("{name}: {e}")).graph;
            graphs.push((format!("{name}.{form}-{}.{}.txt", runtime.major, runtime.minor), graph, runtime));
        }
    }
    let dims = [2, 4, 65, 64];
    let gaps = TensorSpec { dims, strides: Layout::Bshd.strides([2, 4, 65, 67]), alignment: 2 };
    let copy = lower::copy(cudnn_graph::DType::BF16, &gaps, &TensorSpec::dense(dims, Layout::Bshd)).unwrap();
    graphs.push(("copy.txt".to_owned(), copy.graph, Version::OLDEST));
    let mut one_number = gaps;
    one_number.strides = [0; 4];
    let copy = lower::copy(cudnn_graph::DType::BF16, &one_number, &TensorSpec::dense(dims, Layout::Bshd)).unwrap();
    graphs.push(("copy_of_one_number.txt".to_owned(), copy.graph, Version::OLDEST));
    graphs
}

/// Compares a text of each with its file; no other file is there.
fn check_all<'a>(folder: &str, graphs: impl Iterator<Item = &'a Lowered>, text: impl Fn(&Verified, Version) -> String) {
    let mut names = BTreeSet::new();
    let mut problems = Vec::new();
    for (name, graph, runtime) in graphs {
        assert!(names.insert(name.clone()), "{name} is there twice");
        problems.extend(golden::check(&format!("{folder}/{name}"), &text(graph, *runtime)).err());
    }
    problems.extend(golden::no_others(folder, &names).err());
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn graphs_are_what_they_were() {
    check_all("tests/snapshots/graph", graphs().iter(), |graph, _| graph.to_string());
}

/// Graphs whose programs are kept word for word. Encoding is op by op, so that these stand for all: between them they have every form of a
/// descriptor, which the next test asks for.
const PROGRAMS: [&str; 18] = [
    "backward_compare_floats.composite-9.19.txt",
    "backward_functions.composite-9.27.txt",
    "backward_plain.composite-9.19.txt",
    "backward_plain.unified-9.27.txt",
    "block_scale.composite-9.27.txt",
    "copy.txt",
    "decode.unified-9.27.txt",
    "document.composite-9.27.txt",
    "padding_f16.composite-9.19.txt",
    "padding.unified-9.27.txt",
    "padding_f16.unified-9.27.txt",
    "plain.composite-9.27.txt",
    "plain.unified-9.27.txt",
    "prefix.unified-9.27.txt",
    "row_statistics.composite-9.27.txt",
    "row_statistics_sink.composite-9.27.txt",
    "softcap_causal.unified-9.27.txt",
    "window_bottom_right.unified-9.27.txt",
];

#[test]
fn programs_are_what_they_were() {
    let graphs = graphs();
    for name in PROGRAMS {
        assert!(graphs.iter().any(|(made, ..)| made == name), "nothing makes {name}");
    }
    let kept = graphs.iter().filter(|(name, ..)| PROGRAMS.contains(&name.as_str()));
    check_all("tests/snapshots/program", kept, |graph, runtime| encode(graph, runtime).unwrap().to_string());
}

/// What a descriptor is, which attributes it has in which order, and the ones among them that are a choice of few.
fn forms(graph: &Verified, runtime: Version) -> BTreeSet<String> {
    let form = |descriptor: &Descriptor| {
        let settings = descriptor.settings.iter().map(|s| match &s.values {
            Values::Code(..) | Values::Bool(_) => format!("{} {}", s.attribute, s.values),
            Values::I64(_)
            | Values::I32(_)
            | Values::F32(_)
            | Values::F64(_)
            | Values::Fractions(_)
            | Values::Descriptors(_)
            | Values::Bytes(_) => format!("{} {}", s.attribute, s.ty),
        });
        std::iter::once(descriptor.kind.to_string()).chain(settings).collect::<Vec<_>>().join(", ")
    };
    encode(graph, runtime).unwrap().descriptors.iter().map(form).collect()
}

/// A program is kept for every form of descriptor that these graphs or those of any case have.
#[test]
fn kept_programs_have_every_form_of_a_descriptor() {
    let mut graphs = graphs();
    let kept: BTreeSet<String> = graphs
        .iter()
        .filter(|(name, ..)| PROGRAMS.contains(&name.as_str()))
        .flat_map(|(_, graph, runtime)| forms(graph, *runtime))
        .collect();
    let library = Case::all_library().unwrap();
    let forward =
        Case::all().unwrap().into_iter().chain(library.clone()).map(|c| (c.name.clone(), Job::from(c.spec().unwrap().validate().unwrap())));
    let backward = Case::all_backward().unwrap().into_iter().chain(library);
    let backward = backward.map(|c| (c.name.clone(), Job::from(c.backward_spec().unwrap().validate().unwrap())));
    for (name, job) in forward.chain(backward) {
        let lowered = FORWARD.iter().filter_map(|&(form, runtime)| Some((lower::lower(&job, form, runtime).ok()?.graph, runtime)));
        graphs.extend(lowered.map(|(graph, runtime)| (name.clone(), graph, runtime)));
    }
    let mut missing = BTreeMap::new();
    for (name, graph, runtime) in &graphs {
        missing.extend(forms(graph, *runtime).into_iter().filter(|form| !kept.contains(form)).map(|form| (form, name)));
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
