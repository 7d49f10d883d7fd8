//! The key of a plan changes exactly when what cuDNN is sent changes, and with no value of a call.

use crate::is_newer;
use conformance::recorder::Recorder;
use conformance::say::skip;
use cudnn_graph::encode::encode;
use cudnn_graph::{Plan, Target, Version};
use sdpa::cache::CacheKey;
use sdpa::cudnn::PlanOptions;
use sdpa::cudnn::lower::{self, Form, Job, Supply};
use sdpa::cudnn::plan::build;
use sdpa::cudnn::schedule::Step;
use sdpa::{AttentionSpec, BackwardSpec, DType, Layout, Mask, Packed, Paged, ScoreMod, Shape, StatsBase};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 40, seq_kv: 56, dim_qk: 64, dim_v: 32 };

fn spec() -> AttentionSpec {
    let softcap: ScoreMod = "softcap:30".parse().unwrap();
    let mask: Mask = "window:9,3".parse().unwrap();
    AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).score_mod(softcap).mask(mask).with_stats()
}

/// What a library is sent for a pass, as the library that records has understood it: the attention, and what is copied, converted and
/// summed around it; which engine is asked for. Nothing of it is read from the key.
fn understood(recorder: &Recorder, job: &Job) -> String {
    let (library, stream) = (recorder.executor().library(), recorder.stream());
    let handle = library.handle(&stream).unwrap();
    let planned = build(library, &Target::Handle(&handle), job, &PlanOptions::default()).unwrap_or_else(|e| panic!("{}: {e}", job.label()));
    let told = |plan: &Plan| format!("{} by {}\n", plan.to_json().unwrap(), plan.engine().map(|engine| engine.tag()).unwrap_or_default());
    let runs: String = planned.schedule.runs().map(|run| format!("{} {}", run.role, told(&run.plan))).collect();
    // Tokens are sent as no more than there are at most.
    let launch = |step: &Step<Arc<Plan>>| match step {
        Step::Launch(launch) => Some(format!("{launch:?} of {:?}", planned.lowered.totals)),
        Step::Run(_) | Step::Zero(_) | Step::Move(..) => None,
    };
    runs + &planned.schedule.steps().iter().filter_map(launch).collect::<String>()
}

/// Everything that is sent for a pass, in both forms and on two runtimes, and what is bound around it; and what a library makes of it.
fn sent(recorder: &Recorder, job: &Job) -> String {
    let mut all = understood(recorder, job);
    for runtime in [Version::new(9, 19, 0), Version::new(9, 27, 0)] {
        for form in [Form::Composite, Form::Unified] {
            match lower::lower(job, form, runtime) {
                Ok(lowered) => {
                    let program = encode(&lowered.graph, runtime).map(|p| serde_json::to_string(&p).unwrap()).map_err(|e| e.to_string());
                    let supplies: Vec<String> = lowered.supplies.iter().map(|(_, supply)| bound(supply)).collect();
                    // Bounds of masks and constants of score_mods are no part of the program: they are sent at each call.
                    let graph = serde_json::to_string(lowered.graph.graph()).unwrap();
                    all.push_str(&format!("{program:?} {supplies:?} {graph}"));
                }
                Err(e) => all.push_str(&e.to_string()),
            }
        }
    }
    all
}

/// Without the values of a call.
fn bound(supply: &Supply) -> String {
    match supply {
        Supply::Number(trace) => trace.without_defaults().to_string(),
        Supply::Param(_)
        | Supply::Spread { .. }
        | Supply::Guarded(_)
        | Supply::Documents(_)
        | Supply::Pages(_)
        | Supply::Table(_)
        | Supply::Scratch
        | Supply::Gradient(_)
        | Supply::Amax(_)
        | Supply::Terms { .. } => {
            format!("{supply:?}")
        }
    }
}

fn hash(job: &Job) -> u64 {
    let mut hasher = DefaultHasher::new();
    job.hash(&mut hasher);
    hasher.finish()
}

/// The recorder, or a word about it.
fn recorder() -> Option<Recorder> {
    Recorder::load().map_err(|why| skip("recording", &format!("keys of plans: {why}"))).ok()
}

/// The jobs of both passes are equal exactly when what is sent is, and say by which field they differ.
fn compare(recorder: &Recorder, what: &str, changes: bool, one: [Job; 2], two: [Job; 2]) {
    for (one, two) in one.iter().zip(&two) {
        let pass = one.name();
        assert_eq!(one != two, changes, "the {pass} key, {what}");
        assert_eq!(sent(recorder, one) != sent(recorder, two), changes, "what is sent {pass}, {what}");
        assert_eq!(one.fields() != two.fields(), changes, "the fields {pass}, {what}: {:?}", one.fields());
        assert!(changes || hash(one) == hash(two), "the hash {pass}, {what}");
    }
}

fn jobs(spec: &AttentionSpec) -> [Job; 2] {
    [spec.validate().unwrap().into(), spec.backward().validate().unwrap().into()]
}

type Change = (&'static str, bool, fn(&mut AttentionSpec));

fn shape(spec: &mut AttentionSpec, change: impl Fn(&mut Shape)) {
    let mut shape = SHAPE;
    change(&mut shape);
    let other = AttentionSpec::dense(spec.dtype, shape, Layout::Bhsd);
    (spec.q, spec.k, spec.v, spec.o) = (other.q, other.k, other.v, other.o);
}

fn masks(spec: &mut AttentionSpec, masks: &[&str]) {
    spec.masks = masks.iter().map(|text| text.parse().unwrap()).collect();
}

fn mods(spec: &mut AttentionSpec, mods: &[&str]) {
    spec.score_mods = mods.iter().map(|text| text.parse().unwrap()).collect();
}

const CHANGES: [Change; 38] = [
    ("nothing", false, |_| ()),
    ("dtype", true, |s| s.dtype = DType::F16),
    ("batch", true, |s| shape(s, |x| x.batch = 3)),
    ("heads_q", true, |s| shape(s, |x| x.heads_q = 6)),
    ("heads_kv", true, |s| shape(s, |x| x.heads_kv = 4)),
    ("seq_q", true, |s| shape(s, |x| x.seq_q = 41)),
    ("seq_kv", true, |s| shape(s, |x| x.seq_kv = 57)),
    ("dim_qk", true, |s| shape(s, |x| x.dim_qk = 72)),
    ("dim_v", true, |s| shape(s, |x| x.dim_v = 40)),
    ("layout of q", true, |s| s.q.strides = Layout::Bshd.strides(s.q.dims)),
    ("layout of k", true, |s| s.k.strides = Layout::Bshd.strides(s.k.dims)),
    ("layout of v", true, |s| s.v.strides = Layout::Sbhd.strides(s.v.dims)),
    ("layout of o", true, |s| s.o.strides = Layout::Sbhd.strides(s.o.dims)),
    ("a gap in q", true, |s| s.q.strides[0] += 64),
    ("alignment of q", true, |s| s.q.alignment = 2),
    ("alignment of o", true, |s| s.o.alignment = 2),
    ("another score_mod", true, |s| mods(s, &["alibi"])),
    ("none", true, |s| mods(s, &[])),
    ("one more", true, |s| mods(s, &["softcap:30", "alibi"])),
    ("another order", true, |s| mods(s, &["alibi", "softcap:30"])),
    ("a constant in a score_mod", true, |s| mods(s, &["tanh(score / 30.0) * 30.0"])),
    ("a declared tensor", true, |s| mods(s, &["softcap:30", "bias:hq"])),
    ("the default of a scalar", false, |s| mods(s, &["softcap:20"])),
    ("the same, written out", false, |s| mods(s, &["scalar cap = 7.0; tanh(score / cap) * cap"])),
    ("the name of a parameter", true, |s| mods(s, &["scalar top = 30.0; tanh(score / top) * top"])),
    ("no mask", true, |s| masks(s, &[])),
    ("a longer window", true, |s| masks(s, &["window:10,3"])),
    ("the same window, written out", false, |s| masks(s, &["k - q > -9 & k <= q + 3"])),
    ("in two masks", false, |s| masks(s, &["k - q > -9", "window:inf,3"])),
    ("a mask that keeps everything besides", false, |s| masks(s, &["window:9,3", "window:500,inf"])),
    ("lengths", true, |s| masks(s, &["window:9,3", "padding"])),
    ("documents", true, |s| masks(s, &["window:9,3", "document"])),
    ("an array", true, |s| masks(s, &["window:9,3", "array:hk"])),
    ("another array", true, |s| masks(s, &["window:9,3", "array:qk"])),
    ("causal, aligned to the corner", true, |s| masks(s, &["causal-bottom-right"])),
    ("causal, by the ends", true, |s| masks(s, &["causal-ends"])),
    ("dropout", true, |s| s.dropout = Some(sdpa::Dropout::new(0.5))),
    ("a prefix", true, |s| masks(s, &["prefix-lm:7"])),
];

#[test]
fn the_key_changes_exactly_with_what_is_sent() {
    let Some(recorder) = recorder() else { return };
    for (what, changes, change) in CHANGES {
        let mut other = spec();
        change(&mut other);
        compare(&recorder, what, changes, jobs(&spec()), jobs(&other));
    }
}

#[test]
fn windows_about_the_ends_are_of_the_key() {
    let fields = |text: &[&str]| {
        let mut one = spec();
        masks(&mut one, text);
        Job::from(one.validate().unwrap()).fields()
    };
    let ends = fields(&["padding", "window:9,3:ends"]);
    for other in [
        &["padding", "window:9,3"][..],
        &["padding", "window:9,3:bottom-right"],
        &["padding", "window:10,3:ends"],
        &["padding", "window:9,2:ends"],
        &["padding"],
    ] {
        assert_ne!(ends, fields(other), "{other:?}");
    }
    // Without lengths they are at the corner.
    assert_eq!(fields(&["window:9,3:ends"]), fields(&["window:9,3:bottom-right"]));
}

#[test]
fn row_statistics_are_of_the_forward_key_alone() {
    if !is_newer("key::row_statistics_are_of_the_forward_key_alone") {
        return;
    }
    let Some(recorder) = recorder() else { return };
    let changes: [Change; 3] =
        [("stats", true, |s| s.stats = false), ("row_max", true, |s| s.row_max = true), ("sum_exp", true, |s| s.sum_exp = true)];
    let two = Job::from(spec().with_stats_in(StatsBase::Two).validate().unwrap());
    let natural = Job::from(spec().validate().unwrap());
    let differ = two.fields().into_iter().zip(natural.fields()).filter(|(a, b)| a != b).map(|(a, _)| a.0);
    assert!(two != natural && differ.eq(["stats_base"]));
    for (what, _, change) in changes {
        let mut other = spec();
        change(&mut other);
        let [one, two] = [&spec(), &other].map(|spec| Job::from(spec.validate().unwrap()));
        assert!(one != two && sent(&recorder, &one) != sent(&recorder, &two), "{what}");
        let differ: Vec<&str> = one.fields().into_iter().zip(two.fields()).filter(|(a, b)| a != b).map(|(a, _)| a.0).collect();
        assert_eq!(differ, [what]);
        let [one, two] = [spec(), other].map(|spec| Job::from(spec.backward().validate().unwrap()));
        assert!(one == two && one.fields() == two.fields(), "{what}");
    }
}

#[test]
fn strides_of_an_axis_of_one_element_do_not_matter() {
    let Some(recorder) = recorder() else { return };
    let one = Shape { seq_q: 1, batch: 1, ..SHAPE };
    let spec = AttentionSpec::dense(DType::BF16, one, Layout::Bhsd).with_stats();
    let mut other = spec.clone();
    other.q.strides[0] = 4096;
    other.q.strides[2] = 8;
    compare(&recorder, "strides of axes of one element", false, jobs(&spec), jobs(&other));
}

type BackwardChange = (&'static str, bool, fn(&mut BackwardSpec));

const BACKWARD_CHANGES: [BackwardChange; 9] = [
    ("layout of d_o", true, |b| b.d_o.strides = Layout::Bshd.strides(b.d_o.dims)),
    ("layout of dq", true, |b| b.dq.strides = Layout::Bshd.strides(b.dq.dims)),
    ("layout of dk", true, |b| b.dk.strides = Layout::Sbhd.strides(b.dk.dims)),
    ("layout of dv", true, |b| b.dv.strides = Layout::Sbhd.strides(b.dv.dims)),
    ("alignment of dv", true, |b| b.dv.alignment = 2),
    ("deterministic", true, |b| b.deterministic = true),
    ("a gradient of a parameter", true, |b| *b = b.clone().wrt("bias", DType::BF16)),
    ("whether the forward pass asks for stats", false, |b| b.forward.stats = true),
    ("the default of a scalar", false, |b| mods(&mut b.forward, &["bias:hqk", "softcap:4"])),
];

#[test]
fn so_does_the_key_of_a_backward_pass() {
    let Some(recorder) = recorder() else { return };
    let mut forward = spec();
    mods(&mut forward, &["bias:hqk", "softcap:30"]);
    let job = |b: &BackwardSpec| Job::from(b.validate().unwrap());
    for (what, changes, change) in BACKWARD_CHANGES {
        let mut other = forward.backward();
        change(&mut other);
        let [one, two] = [job(&forward.backward()), job(&other)];
        assert_eq!(one != two, changes, "the key, {what}");
        assert_eq!(sent(&recorder, &one) != sent(&recorder, &two), changes, "what is sent, {what}");
        assert_eq!(one.fields() != two.fields(), changes, "the fields, {what}");
    }
}

const PACKED_CHANGES: [Change; 10] = [
    ("nothing", false, |_| ()),
    ("whether it is packed", true, |s| s.packed = None),
    ("boundaries of i64", true, |s| packed(s, |p| p.wide = true)),
    ("boundaries of each side", true, |s| packed(s, |p| p.cross = true)),
    ("more tokens", true, |s| packed(s, |p| (p.total_q, p.total_kv) = (Some(71), Some(71)))),
    ("as many tokens as there may be", true, |s| packed(s, |p| (p.total_q, p.total_kv) = (None, None))),
    ("the stride of the batch axis", false, |s| s.q.strides[0] += 64),
    ("tokens farther apart in k", true, |s| s.k.strides[2] += 64),
    ("the longest document", true, |s| {
        let other = AttentionSpec::packed(s.dtype, Shape { seq_q: 41, seq_kv: 41, ..PACKED }, Packed::of(70));
        (s.q, s.k, s.v, s.o) = (other.q, other.k, other.v, other.o);
    }),
    ("a window", true, |s| masks(s, &["window:9,3"])),
];

const PACKED: Shape = Shape { seq_kv: SHAPE.seq_q, ..SHAPE };

fn packed(spec: &mut AttentionSpec, change: impl Fn(&mut Packed)) {
    change(spec.packed.as_mut().unwrap());
}

#[test]
fn so_it_does_with_how_documents_are_packed() {
    let Some(recorder) = recorder() else { return };
    let spec = AttentionSpec::packed(DType::BF16, PACKED, Packed::of(70)).mask(Mask::causal()).with_stats();
    for (what, changes, change) in PACKED_CHANGES {
        let mut other = spec.clone();
        change(&mut other);
        compare(&recorder, what, changes, jobs(&spec), jobs(&other));
    }
}

const PAGED_CHANGES: [Change; 9] = [
    ("nothing", false, |_| ()),
    ("whether it is paged", true, |s| s.paged = None),
    ("longer pages", true, |s| paged(s, Paged::new(32, CACHE.pages))),
    ("more pages", true, |s| paged(s, Paged::new(CACHE.page_size, 11))),
    ("head-major pages of keys", true, |s| s.k = CACHE.dense(s.k.dims, Layout::Bhsd)),
    ("pages of values farther apart", true, |s| s.v.strides[0] += 64),
    ("the most keys of an entry", true, |s| {
        let other = AttentionSpec::paged(s.dtype, Shape { seq_kv: 57, ..SHAPE }, CACHE);
        (s.k, s.v) = (other.k, other.v);
    }),
    ("lengths", true, |s| masks(s, &["causal", "padding"])),
    ("packed queries", true, |s| s.packed = s.clone().with_packed_queries(9).packed),
];

const CACHE: Paged = Paged::new(16, 9);

/// Pages in place of those that are there.
fn paged(spec: &mut AttentionSpec, paged: Paged) {
    spec.paged = Some(paged);
    (spec.k, spec.v) = (paged.dense(spec.k.dims, Layout::Bshd), paged.dense(spec.v.dims, Layout::Bshd));
}

/// There is no backward pass.
#[test]
fn so_it_does_with_pages_which_are_a_field_of_their_own() {
    let Some(recorder) = recorder() else { return };
    let spec = AttentionSpec::paged(DType::BF16, SHAPE, CACHE).mask(Mask::causal()).with_stats();
    let one = Job::from(spec.validate().unwrap());
    for (what, changes, change) in PAGED_CHANGES {
        let mut other = spec.clone();
        change(&mut other);
        let two = Job::from(other.validate().unwrap());
        assert_eq!(one != two, changes, "the key, {what}");
        assert_eq!(sent(&recorder, &one) != sent(&recorder, &two), changes, "what is sent, {what}");
        let differ: Vec<&str> = one.fields().into_iter().zip(two.fields()).filter(|(a, b)| a != b).map(|(field, _)| field.0).collect();
        assert_eq!(!differ.is_empty(), changes, "the fields, {what}");
        assert!(changes || hash(&one) == hash(&two), "the hash, {what}");
        if other.paged != spec.paged && other.paged.is_some() {
            assert_eq!(differ, ["paged"], "{what}");
        }
    }
}
