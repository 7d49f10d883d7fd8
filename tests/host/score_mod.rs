//! What makes score_mods the same, what binds to their parameters, and how they are written.
//!
//! Identity is what a cache of plans is keyed by. Review of another library (TransformerEngine, #2984) found caches keyed by
//! addresses and by names; each of those findings has a test here that such a cache fails.

use sdpa::cache::{CacheValue, Limits, PlanCache, Weight};
use sdpa::cudnn::lower::Job;
use sdpa::expr::{At, Axis, BF16, Expr, F16, F32, Params, Place, Precision, Trace};
use sdpa::library::{SCORE_MODS, alibi_with, bias, softcap};
use sdpa::{AttentionSpec, BackwardSpec, DType, Layout, Mask, Problem, ScoreMod, Shape};
use std::num::NonZeroUsize;

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };

fn spec() -> AttentionSpec {
    AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd)
}

fn problem(score_mod: ScoreMod) -> Problem {
    spec().score_mod(score_mod).validate().unwrap()
}

/// The number of an entry.
#[derive(Clone, Debug)]
struct Number(u32);

impl CacheValue for Number {
    fn weight(&self) -> Weight {
        Weight::default()
    }
}

/// A cache that tells which problems share an entry.
struct Entries {
    cache: PlanCache<Job, Number, sdpa::Unsupported>,
    made: u32,
}

impl Entries {
    fn new(capacity: usize) -> Entries {
        Entries { cache: PlanCache::new("test", Limits::entries(NonZeroUsize::new(capacity).unwrap())), made: 0 }
    }

    fn of(&mut self, score_mod: ScoreMod) -> u32 {
        self.at(&problem(score_mod))
    }

    fn at(&mut self, problem: &Problem) -> u32 {
        let next = self.made + 1;
        let (entry, there) = self.cache.get_or_build::<sdpa::cudnn::Error>(&Job::from(problem.clone()), || Ok(Number(next))).unwrap();
        self.made += u32::from(!there);
        entry.0
    }
}

fn scaled(by: f32) -> impl for<'t> Fn(Expr<'t, F32>, At<'t>, Params<'t>) -> Expr<'t, F32> {
    move |score, _, _| score * by
}

#[test]
fn a_closure_at_the_address_of_one_that_is_gone_has_an_entry_of_its_own() {
    let mut entries = Entries::new(8);
    let mut closure = scaled(2.0);
    let place = std::ptr::from_ref(&closure).addr();
    let first = entries.of(ScoreMod::new("scaled", &closure).unwrap());
    closure = scaled(3.0);
    assert_eq!(std::ptr::from_ref(&closure).addr(), place);
    let second = entries.of(ScoreMod::new("scaled", &closure).unwrap());
    assert_ne!(first, second);
    // And one that lies elsewhere and does the same has the same.
    let elsewhere = Box::new(scaled(2.0));
    assert_eq!(entries.of(ScoreMod::new("scaled", &*elsewhere).unwrap()), first);
}

#[test]
fn closures_of_one_name_and_one_module_are_told_apart() {
    let mut entries = Entries::new(8);
    let plus = entries.of(ScoreMod::new("f", |score, _, _| score + 1.0).unwrap());
    let minus = entries.of(ScoreMod::new("f", |score, _, _| score - 1.0).unwrap());
    let with_index = entries.of(ScoreMod::new("f", |score, at, _| score - at.q.to_f32()).unwrap());
    assert_eq!([plus, minus, with_index], [1, 2, 3]);
    let looped: Vec<u32> = (0..4).map(|n| entries.of(ScoreMod::new("loop", |s, _, _| s * (n % 2 + 7) as f32).unwrap())).collect();
    assert_eq!(looped, [4, 5, 4, 5]);
}

struct Cap(f32);

impl Cap {
    fn score_mod(&self) -> ScoreMod {
        ScoreMod::new("Cap", |score, _, _| (score / self.0).tanh() * self.0).unwrap()
    }
}

#[test]
fn a_field_that_changes_between_calls_changes_the_entry() {
    let mut entries = Entries::new(8);
    let mut cap = Cap(30.0);
    let made_before = cap.score_mod();
    let first = entries.of(cap.score_mod());
    cap.0 = 50.0;
    let second = entries.of(cap.score_mod());
    assert_ne!(first, second);
    // What was made keeps what it was made with.
    assert_eq!(entries.of(made_before), first);
    cap.0 = 30.0;
    assert_eq!(entries.of(cap.score_mod()), first);
}

#[test]
fn one_function_under_two_names_is_one_entry() {
    let mut entries = Entries::new(8);
    let first = entries.of(ScoreMod::new("first", |s, _, p| s + p.tensor("bias", [Axis::Q], F32)).unwrap());
    let second = entries.of(ScoreMod::new("second", |score, _, p| score + p.tensor("bias", [Axis::Q], F32)).unwrap());
    let read = entries.of("tensor bias[q]: f32; score + bias".parse().unwrap());
    let library = entries.of(bias([Axis::Q], F32));
    assert_eq!([first, second, read, library], [1; 4]);
    // Two one after the other, and the same in one.
    let two = entries.of(softcap(30.0).then(alibi_with()));
    let apart = entries.at(&spec().score_mod(softcap(30.0)).score_mod(alibi_with()).validate().unwrap());
    assert_eq!(two, apart);
    assert_ne!(two, entries.of(alibi_with().then(softcap(30.0))));
    // What does nothing is no score_mod.
    assert_eq!(entries.of(ScoreMod::new("nothing", |s, _, _| s).unwrap()), entries.at(&spec().validate().unwrap()));
}

#[test]
fn a_tensor_over_other_axes_or_of_another_type_is_another_entry() {
    let mut entries = Entries::new(16);
    let all = [
        bias([Axis::Head], F32),
        bias([Axis::Batch], F32),
        bias([Axis::Head, Axis::Batch], F32),
        bias([Axis::Head], F16),
        bias([Axis::Head], BF16),
        bias([Axis::Head], F32).rename("bias", "other").unwrap(),
    ];
    let made: Vec<u32> = all.into_iter().map(|m| entries.of(m)).collect();
    assert_eq!(made, [1, 2, 3, 4, 5, 6]);
    assert_eq!(entries.of(bias([Axis::Batch, Axis::Head], F32)), 3, "the order in which axes are named does not matter");
    let mask =
        |axes: &[Axis]| Mask::new("m", |_, p| p.tensor("m", axes.iter().copied().collect::<sdpa::expr::Axes>(), F32).gt(0.0)).unwrap();
    let [one, two] = [&[Axis::K][..], &[Axis::Q, Axis::K]].map(|axes| spec().mask(mask(axes)).validate().unwrap());
    assert_ne!(entries.at(&one), entries.at(&two));
}

#[test]
fn the_value_of_a_scalar_is_no_part_of_an_entry() {
    let mut entries = Entries::new(8);
    assert_eq!([30.0, 50.0, 30.0].map(|cap| entries.of(softcap(cap))), [1; 3]);
    assert_ne!(entries.of(softcap(30.0).rename("cap", "limit").unwrap()), 1);
    let backward = |cap: f32| spec().score_mod(softcap(cap)).backward().validate().unwrap();
    assert_eq!(backward(30.0), backward(50.0));
    // Yet each problem keeps the value that it was made with.
    let default = |cap: f32| problem(softcap(cap)).params()[0].default;
    assert_eq!([default(30.0), default(50.0)], [Some(30.0), Some(50.0)]);
    // A captured number is a constant, and a constant is part of it.
    let captured = |cap: f32| ScoreMod::new("cap", move |s, _, _| (s / cap).tanh() * cap).unwrap();
    assert_ne!(entries.of(captured(30.0)), entries.of(captured(50.0)));
}

#[test]
fn closures_without_end_do_not_fill_memory() {
    let mut entries = Entries::new(4);
    for n in 0..100 {
        entries.of(ScoreMod::new("n", |s, _, _| s * n as f32).unwrap());
        assert!(entries.cache.stats().entries <= 4);
    }
    let stats = entries.cache.stats();
    assert_eq!((stats.entries, stats.misses, stats.evictions), (4, 100, 96));
}

#[test]
fn extents_that_are_read_are_part_of_an_entry_and_others_are_constants_too() {
    let last = |spec: AttentionSpec| spec.score_mod(ScoreMod::new("last", |s, at, _| s + (at.seq_kv - at.k).to_f32()).unwrap());
    let traces = [7, 9].map(|seq_kv| {
        let spec = AttentionSpec::dense(DType::BF16, Shape { seq_kv, ..SHAPE }, Layout::Bhsd);
        last(spec).validate().unwrap().score_mod().unwrap().to_string()
    });
    assert_eq!(traces, ["score + f32(7 - k)", "score + f32(9 - k)"]);
}

#[test]
fn texts_are_read_back() {
    for text in SCORE_MODS.iter().flat_map(|named| named.cases).copied().chain(["softcap:0.5", "bias:", "sandwich:64"]) {
        let read: ScoreMod = text.parse().unwrap();
        assert_eq!((read.to_string().as_str(), read.name()), (text, text));
    }
    for text in ["score * 2.0", "scalar a = 1.5; tensor b[batch, k]: i32; score * a + f32(b)", "tanh(score), upstream * 2.0"] {
        let read: ScoreMod = text.parse().unwrap();
        assert_eq!(read.to_string(), text);
        assert_eq!(read.to_string().parse::<ScoreMod>().unwrap(), read);
    }
    // A name that is only borrowed is not printed.
    for made in [
        ScoreMod::new("softcap:30", |s, _, _| s * 2.0).unwrap(),
        softcap(30.0).rename("cap", "limit").unwrap(),
        softcap(30.0).with_bprop(|g, _, _, _| g * 2.0).unwrap(),
        ScoreMod::new("alibi", |s, _, p| s / p.scalar("cap", 3.0)).unwrap(),
    ] {
        let text = made.to_string();
        let back = text.parse::<ScoreMod>().unwrap();
        assert_eq!(back, made, "{text}");
        assert_eq!(back.to_string(), text);
    }
    // Another default is another text.
    assert_eq!(softcap(20.0).to_string(), "softcap:20");
    // Several stages have a line between them.
    let two = softcap(30.0).then("score * 2.0".parse().unwrap());
    assert_eq!(two.to_string().parse::<ScoreMod>().unwrap(), two);
    assert_eq!("softcap:30\n then\nscore * 2.0\n".parse::<ScoreMod>().unwrap(), two);
    for made in [two, softcap(30.0).with_bprop(|g, _, _, _| g).unwrap(), "alibi".parse().unwrap()] {
        let json = serde_json::to_string(&spec().score_mod(made.clone())).unwrap();
        assert_eq!(serde_json::from_str::<AttentionSpec>(&json).unwrap().score_mods, [made]);
    }
}

#[test]
fn texts_that_are_none_say_what_would_be() {
    for (text, said) in [
        ("", "one of softcap:CAP"),
        ("softcap", "one of softcap:CAP"),
        ("aliby", "one of softcap:CAP"),
        ("softcap:0", "a positive number"),
        ("softcap:-1", "a positive number"),
        ("softcap:inf", "a positive number"),
        ("softcap:x", "a positive number"),
        ("alibi:3", "one of softcap:CAP"),
        ("bias:x", "of b, h, q, k"),
        ("sandwich:0", "an integer from 1"),
        ("sandwich:65", "sandwich takes at most 64 terms"),
        ("score +", "at 1:8"),
        ("q < k", "it yields bool"),
        ("q", "it yields i32"),
        ("score, upstream, score", "at most 2"),
        ("score, q", "it yields i32"),
        ("upstream * score", "only the second value"),
        ("tensor a[q]: f64; score + a", "expected an element type"),
    ] {
        let error = text.parse::<ScoreMod>().unwrap_err();
        assert!(error.to_string().contains(said), "{text:?}: {error}");
        assert!(error.to_string().starts_with("score_mod"), "{error}");
    }
}

#[test]
fn gradients_by_hand_are_the_second_root() {
    let by_hand = softcap(30.0).with_bprop(|g, s, _, p| g * p.scalar("cap", 30.0) * s).unwrap();
    assert_eq!(by_hand.stages().len(), 1);
    assert_eq!(by_hand.stages()[0].roots().len(), 2);
    assert_ne!(by_hand, softcap(30.0));
    assert_eq!(by_hand.to_string(), "scalar cap = 30.0; tanh(score / cap) * cap, upstream * cap * score");
    // The forward pass does not know of it.
    assert_eq!(problem(by_hand.clone()).score_mod(), problem(softcap(30.0)).score_mod());
    let backward = |m: &ScoreMod| spec().score_mod(m.clone()).backward().validate().unwrap();
    assert_ne!(backward(&by_hand), backward(&softcap(30.0)));
    assert_eq!(backward(&by_hand).gradient().unwrap().trace.roots().len(), 2);
    // Two that are applied one after the other become one, with one gradient.
    let both = softcap(30.0).then(alibi_with()).with_bprop(|g, _, _, _| g).unwrap();
    assert_eq!(both.stages().len(), 1);
    // Parameters that are declared in both must be declared alike; those of the gradient alone are known to the backward pass.
    assert!(softcap(30.0).with_bprop(|g, _, _, p| g * p.scalar("cap", 20.0)).is_err());
    assert!(softcap(30.0).with_bprop(|g, _, _, p| g * p.tensor("cap", [Axis::Q], F32)).is_err());
    let own = softcap(30.0).with_bprop(|g, _, _, p| g * p.tensor("own", [Axis::Q], F32)).unwrap();
    let names = |b: &sdpa::BackwardProblem| b.params().iter().map(|p| p.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&backward(&own)), ["cap", "own"]);
    assert_eq!(problem(own.clone()).params().len(), 1);
    // What is by hand says nothing about parameters.
    let asked: BackwardSpec = spec().score_mod(own).backward().wrt("cap", DType::F32);
    let errors = asked.validate().unwrap_err().to_string();
    assert!(errors.contains("does not cover parameters"), "{errors}");
}

/// Chains, whose stages share parameters, take no notice of the score, or are what goes into the next one.
#[test]
fn gradients_of_chains_are_limits_of_differences() {
    let t = |name: &'static str| ScoreMod::new(name, move |_, _, p| p.tensor(name, [Axis::Q], F32)).unwrap();
    let of = |text: &str| text.parse::<ScoreMod>().unwrap();
    let chains: Vec<Vec<ScoreMod>> = vec![
        vec![softcap(2.0)],
        vec![of("tensor a[q]: f32; score * a + a * a")],
        vec![of("tensor a[q]: f32; score * a"), of("tensor a[q]: f32; tensor b[q]: f32; tanh(score * b) * a")],
        vec![t("a"), of("score * 2.0")],
        vec![t("a"), of("tensor a[q]: f32; score * score + a * 3.0"), of("score * 0.5")],
        vec![of("tensor a[q]: f32; a * 2.0"), of("tensor a[q]: f32; score + a * 2.0")],
        vec![of("score * score"), t("b"), of("tensor a[q]: f32; score * a")],
        vec![softcap(2.0).then(of("tensor a[q]: f32; select(score > a, score * a, exp(score))")), of("scalar cap = 2.0; score / cap")],
        vec![of("0.5"), of("tensor a[q]: f32; score * a")],
    ];
    for mods in chains {
        let mut forward = spec();
        forward.score_mods = mods;
        let problem = forward.validate().unwrap();
        let names: Vec<String> = problem.params().iter().map(|p| p.name.clone()).collect();
        let backward = names.iter().fold(forward.backward(), |b, name| b.wrt(name, DType::F32)).validate().unwrap();
        let gradient = backward.gradient().unwrap();
        assert_eq!(gradient.wrt, names);
        // By name: the traces have their own orders.
        let at = |trace: &Trace, score: f64, values: &[f64]| {
            let value = |name: &str| values[names.iter().position(|n| n == name).unwrap()];
            let params: Vec<f64> = trace.params().iter().map(|p| value(&p.name)).collect();
            trace.eval(&Place { score, upstream: 1.5, index: [0; 4], extents: problem.extents(), params: &params }, Precision::F64)
        };
        for (score, values) in [(0.7, [0.9, 1.3]), (-1.1, [1.7, -0.4])] {
            let values = &values[..names.len()];
            let got = at(&gradient.trace, score, values);
            let value = |score, values: &[f64]| problem.score_mod().map_or(score, |trace| at(trace, score, values)[0]);
            assert_eq!(got[0], value(score, values));
            const STEP: f64 = 1e-6;
            let along = |d: f64, n: Option<usize>| {
                let moved: Vec<f64> = values.iter().enumerate().map(|(m, v)| if Some(m) == n { v + d } else { *v }).collect();
                value(if n.is_none() { score + d } else { score }, &moved)
            };
            for (root, n) in std::iter::once(None).chain((0..names.len()).map(Some)).enumerate() {
                let want = 1.5 * (along(STEP, n) - along(-STEP, n)) / (2.0 * STEP);
                let near = (got[1 + root] - want).abs() < 1e-7 * (1.0 + want.abs());
                assert!(near, "{:?} along {n:?}: {}, not {want}", forward.score_mods, got[1 + root]);
            }
        }
    }
}

#[test]
fn a_parameter_gets_another_name_in_every_stage() {
    let twice = softcap(30.0).then(alibi_with()).then(softcap(30.0));
    assert_eq!(problem(twice.clone()).params().len(), 2, "one cap for both");
    let renamed = twice.clone().rename("cap", "limit").unwrap();
    let names: Vec<String> = problem(renamed).params().iter().map(|p| p.name.clone()).collect();
    assert_eq!(names, ["limit", "slopes"]);
    let two = softcap(30.0).then(softcap(20.0).rename("cap", "last").unwrap());
    let defaults: Vec<Option<f32>> = problem(two.clone()).params().iter().map(|p| p.default).collect();
    assert_eq!(defaults, [Some(30.0), Some(20.0)]);
    // A name that is taken, in this stage or in another.
    for (made, from, to) in [(twice.clone(), "cap", "slopes"), (two.clone(), "cap", "last"), (two, "last", "cap"), (twice, "cap", "q")] {
        assert!(made.clone().rename(from, to).is_err(), "{made}: {from} to {to}");
    }
    // Two functions that declare one name otherwise do not go together.
    let clash = spec().score_mod(softcap(30.0)).score_mod(softcap(20.0)).validate().unwrap_err();
    assert!(clash.to_string().contains("parameter cap is declared twice, with different axes"), "{clash}");
}

/// A scalar that a score_mod and a mask share has one value.
#[test]
fn masks_and_score_mods_declare_one_name_alike() {
    let near = |reach: f32| Mask::new("near", move |at, p| (at.q - at.k).abs().to_f32().lt(p.scalar("cap", reach))).unwrap();
    let with = |m: ScoreMod, reach: f32| spec().score_mod(m).mask(near(reach)).validate();
    assert_eq!(with(softcap(3.0), 3.0).unwrap().params().len(), 1);
    for (made, what) in [(softcap(3.0), 2.0), (bias([Axis::Q], F32).rename("bias", "cap").unwrap(), 3.0)] {
        let errors = with(made, what).unwrap_err();
        assert!(errors.0.iter().any(|e| e.field == "masks, parameter cap"), "{errors}");
    }
}

#[test]
fn names_of_operands_are_taken() {
    for name in ["v", "o", "d_o", "do", "dq", "dk", "dv", "stats", "attn_scale"] {
        let made = bias([Axis::Q], F32).rename("bias", name).unwrap();
        let errors = spec().score_mod(made).validate().unwrap_err();
        assert_eq!(errors.0.iter().map(|e| e.field.as_str()).collect::<Vec<_>>(), [format!("score_mods, parameter {name}")]);
        let mask = Mask::new("m", |_, p| p.tensor(name, [Axis::Q], F32).gt(0.0)).unwrap();
        assert!(spec().mask(mask).validate().unwrap_err().0.iter().all(|e| e.field == format!("masks, parameter {name}")));
    }
}
