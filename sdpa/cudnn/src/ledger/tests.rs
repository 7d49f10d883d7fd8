use super::*;
use sdpa_core::{AttentionSpec, DType, Layout, Packed, Paged, Shape};

fn shape(seq: i64) -> Shape {
    Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: seq, seq_kv: seq + 13, dim_qk: 64, dim_v: 64 }
}

fn dense(seq: i64) -> AttentionSpec {
    AttentionSpec::dense(DType::BF16, shape(seq), Layout::Bshd)
}

fn forward(spec: &AttentionSpec) -> Job {
    spec.validate().unwrap().into()
}

fn masked(seq: i64, mask: &str) -> Job {
    forward(&dense(seq).mask(mask.parse().unwrap()))
}

fn about() -> About {
    let (device, release) = ("a device".to_owned(), RELEASE.to_owned());
    About { cudnn: Version::new(9, 19, 0), sm: 90, device, release, right: 0, wrong: 0 }
}

fn names(job: &Job) -> Vec<String> {
    features(job).iter().map(|feature| feature.to_string()).collect()
}

#[test]
fn features_are_those_of_the_problem() {
    let job = forward(&dense(70));
    let of_dense = [
        "forward pass",
        "2, 4, 8 or another power of two query heads per KV head",
        "seq_q no multiple of 64",
        "seq_kv no multiple of 64",
        "dense",
        "no mask",
        "bf16",
        "dim_qk up to 64",
        "dim_v up to 64",
        "seq_q 64 or more",
        "seq_kv 64 to 1,024",
        "operands in order bshd",
    ];
    assert_eq!(names(&job), of_dense);
    // Asserts that an option adds the features `more`, removes the features `less`, and changes no others.
    let differs = |job: Job, more: &[&str], less: &[&str]| {
        let own = names(&job);
        let new: Vec<&str> = own.iter().map(String::as_str).filter(|name| !of_dense.contains(name)).collect();
        let gone: Vec<&str> = of_dense.into_iter().filter(|name| !own.iter().any(|own| own == name)).collect();
        assert_eq!((&new[..], &gone[..]), (more, less));
    };
    // With one KV head, K fits every order of dimensions, so all operands still share one order.
    let one_kv_head = AttentionSpec::dense(DType::BF16, Shape { heads_kv: 1, ..shape(70) }, Layout::Bshd);
    differs(forward(&one_kv_head), &["one KV head for several query heads"], &[]);
    differs(forward(&dense(70).with_sink()), &["sink"], &[]);
    differs(forward(&dense(70).with_dropout(0.5)), &["dropout"], &[]);
    differs(forward(&dense(70).with_stats()), &["stats"], &[]);
    differs(masked(70, "causal"), &["a causal mask"], &["no mask"]);
    differs(masked(70, "window:8,0"), &["a causal mask", "a band with a lower bound"], &["no mask"]);
    differs(masked(70, "prefix-lm:7"), &["a prefix"], &["no mask"]);
    let in_mask = ["a mask that is evaluated element by element", "bool tensor in a mask", "tensor over batch in a mask"];
    differs(masked(70, "tensor t[batch]: bool; t"), &in_mask, &["no mask"]);
    let added = ["a score_mod", "bf16 tensor in a score_mod", "tensor over head, k in a score_mod", "`+` in a score_mod"];
    differs(forward(&dense(70).score_mod("tensor t[head, k]: bf16; score + t".parse().unwrap())), &added, &[]);
    differs(forward(&dense(128)), &["seq_q a multiple of 64"], &["seq_q no multiple of 64"]);
    let mut gap = dense(70);
    gap.k.strides[0] += 64;
    differs(forward(&gap), &["an operand with gaps"], &[]);
    let mut other = dense(70);
    other.v = AttentionSpec::dense(DType::BF16, shape(70), Layout::Bhsd).v;
    differs(forward(&other), &["operands in different orders"], &[]);
    let mut aligned = dense(70);
    aligned.q.alignment = 8;
    differs(forward(&aligned), &["an operand aligned to less than 16 bytes"], &[]);
    let packed = dense(70).with_packed(Packed::new().with_cross(true));
    differs(forward(&packed), &["packed sequences", "cu_seqlens of queries and of keys"], &["dense"]);
    let own = Shape { seq_q: 70, ..shape(70) };
    let paged = AttentionSpec::paged(DType::BF16, own, Paged::new(16, 30));
    assert!(names(&forward(&paged)).contains(&"pages of fewer than 64 tokens".to_owned()), "{:?}", names(&forward(&paged)));
    let biased = || dense(70).score_mod("bias:hqk".parse().unwrap()).with_sink();
    let gradients: Job = biased().backward().wrt("bias", DType::F32).wrt("sink", DType::BF16).deterministic().validate().unwrap().into();
    let own = names(&gradients);
    for name in
        ["backward pass", "gradient of a tensor over head, q, k", "gradient of the sink", "gradient of a parameter in f32", "deterministic"]
    {
        assert!(own.contains(&name.to_owned()), "{name}: {own:?}");
    }
    assert!(!own.contains(&"forward pass".to_owned()) && !own.contains(&Feature::Unlisted.to_string()));
}

#[test]
fn a_pair_is_proven_by_three_shapes() {
    let mut evidence = Evidence::default();
    for _ in 0..5 {
        evidence.add(&masked(70, "causal"), true);
    }
    let job = masked(200, "causal");
    assert!(evidence.ledger(about()).unproven(&job).is_some());
    evidence.add(&masked(71, "causal"), true);
    assert!(evidence.ledger(about()).unproven(&job).is_some());
    evidence.add(&masked(72, "causal"), true);
    let ledger = evidence.ledger(about());
    assert_eq!(ledger.unproven(&job), None);
    let unproven = ledger.unproven(&forward(&dense(70).with_sink())).unwrap();
    assert_eq!(unproven.to_string(), "unproven on cuDNN 9.19.0, sm 90: no mask; sink");
    // Add evidence for each feature alone, so that only the pair stays unproven.
    for seq in [70, 71, 72] {
        evidence.add(&forward(&dense(seq).with_sink()), true);
    }
    let both = forward(&dense(70).with_sink().mask("causal".parse().unwrap()));
    let unproven = evidence.ledger(about()).unproven(&both).unwrap();
    assert_eq!(unproven.to_string(), "unproven on cuDNN 9.19.0, sm 90: sink with a causal mask");
    assert_eq!(evidence.ledger(about()).about().right, 10);
}

#[test]
fn the_cause_of_a_wrong_result_is_refused() {
    let mut evidence = Evidence::default();
    for seq in [70, 71, 72] {
        evidence.add(&masked(seq, "causal"), true);
        evidence.add(&forward(&dense(seq).with_sink()), true);
        evidence.add(&forward(&dense(seq).with_stats()), true);
    }
    let both = |seq| forward(&dense(seq).with_sink().with_stats());
    evidence.add(&both(70), false);
    let ledger = evidence.ledger(about());
    let refused = ledger.refuses(&both(128)).map(|reason| reason.to_string());
    let wanted = "cuDNN 9.19.0 on sm 90 is known to be wrong here: results with sink, stats (a ledger of a device)";
    assert_eq!(refused.as_deref(), Some(wanted));
    assert_eq!((ledger.refuses(&masked(70, "causal")), ledger.refuses(&forward(&dense(70).with_sink()))), (None, None));
    assert!(ledger.unproven(&both(70)).is_some() && ledger.unproven(&forward(&dense(70).with_sink())).is_none());
    // Right results now cover every combination of up to three features, so none of these is the cause: the whole set of features is
    // refused.
    evidence.add(&both(70), true);
    evidence.add(&both(128), true);
    let ledger = evidence.ledger(about());
    assert!(ledger.refuses(&both(70)).is_some() && ledger.refuses(&forward(&dense(70).with_sink())).is_none());
}

#[test]
fn files_are_read_as_they_were_written() {
    let mut evidence = Evidence::default();
    for seq in [70, 71, 72, 128] {
        evidence.add(&masked(seq, "causal"), true);
        evidence.add(&forward(&dense(seq).with_stats()), true);
    }
    evidence.add(&forward(&dense(70).with_sink()), false);
    let ledger = evidence.ledger(about());
    assert_eq!(Ledger::parse(&ledger.text()).unwrap(), ledger);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.json");
    ledger.save(&path).unwrap();
    assert_eq!(Ledger::load(&path).unwrap(), ledger);
    let told = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Ledger::load(&path).unwrap_err().to_string().replace(&path.display().to_string(), "FILE")
    };
    let text = ledger.text();
    assert_eq!(told(&text.replace("\"format\": 1", "\"format\": 2")), "FILE is not a ledger: its format is 2, expected 1");
    assert_eq!(told(&text.replace("forward pass", "forth")), "FILE is not a ledger: got \"forth\", expected the name of a feature");
    assert!(told(&text[..text.len() / 2]).starts_with("FILE is not a ledger: "));
    assert_eq!(numbers("0-2 5", 6).unwrap(), [0, 1, 2, 5]);
    assert!(numbers("0-2 5", 5).is_err() && numbers("3-1", 9).is_err() && numbers("x", 9).is_err());
    assert!(Ledger::load(&folder.path().join("none")).is_err());
}

#[test]
fn released_ledgers_can_be_read() {
    for (version, sm, text) in RELEASED {
        let ledger = Ledger::parse(text).unwrap();
        assert_eq!((ledger.about().cudnn, ledger.about().sm), (version, sm));
        assert!(ledger.about().wrong == 0 && ledger.about().release == RELEASE && ledger.pairs() > 1000, "{:?}", ledger.about());
    }
}
