//! What is asked of cuDNN in which form, what is spelled otherwise, and what is not asked at all.

use super::{NEW, SHAPES, spec};
use cudnn_graph::Version;
use sdpa::cudnn::lower::{self, Form, Job};
use sdpa::{AttentionSpec, DType, Layout, ScoreMod, Shape};

#[test]
fn bands_of_one_query_are_rules_beside_whatever_else_there_is() {
    let graph = |mods: &[&str], masks: &[&str], seq_q: i64| {
        let shape = Shape { seq_q, seq_kv: 300, ..SHAPES[0] };
        let [mods, masks] = [mods, masks].map(|all| all.iter().map(|&text| text.to_owned()).collect::<Vec<_>>());
        let job = spec(shape, Layout::Bhsd, &mods, &masks).validate().unwrap().into();
        lower::lower(&job, Form::Composite, NEW).unwrap().graph.to_string()
    };
    let window = "window:9,0:bottom-right";
    for (mods, masks) in [(&[][..], &[window, "dilated:2"][..]), (&["softcap:30"], &[window])] {
        assert!(!graph(mods, masks, 1).contains("band_mask"), "{mods:?} {masks:?}");
        assert!(graph(mods, masks, 40).contains("band_mask"), "{mods:?} {masks:?}");
    }
    assert!(graph(&[], &[window], 1).contains("band_mask"));
    // Whatever side of a comparison is the score's comes first: engines take no other.
    for text in ["select(4 < q % 5, score, 0.0)", "select(q % 5 > 4, score, 0.0)"] {
        let graph = graph(&[text], &[], 40);
        assert!(graph.contains("cmp_gt") && !graph.contains("cmp_lt"), "{graph}");
    }
}

#[test]
fn forms_are_asked_where_a_version_has_them() {
    let spec = spec(SHAPES[0], Layout::Bhsd, &[], &[]);
    let capped = spec.clone().score_mod("softcap:30".parse().unwrap());
    let bias = spec.clone().score_mod("bias:qk".parse().unwrap());
    let both = |job: Job, minor, patch| lower::forms(&job, Version::new(9, minor, patch)) == [Form::Composite, Form::Unified];
    let forward = |spec: &AttentionSpec| Job::from(spec.validate().unwrap());
    assert!(both(forward(&spec), 13, 1) && !both(forward(&spec), 13, 0));
    let rules = ["causal", "dilated:2", "padding", "prefix-lm:5", "document"].map(|mask| spec.clone().mask(mask.parse().unwrap()));
    for more in rules.iter().chain([&capped]) {
        assert!(both(forward(more), 21, 0) && !both(forward(more), 20, 9));
    }
    for more in [spec.clone().with_row_max(), spec.clone().with_sum_exp()] {
        assert!(both(forward(&more), 21, 0) && !both(forward(&more), 20, 9));
    }
    let two = forward(&spec.clone().with_stats_in(sdpa::StatsBase::Two));
    let asked = |minor| lower::forms(&two, Version::new(9, minor, 0));
    assert!(asked(26).is_empty() && asked(27) == [Form::Composite]);
    let backward = |spec: &sdpa::BackwardSpec| Job::from(spec.validate().unwrap());
    let mut deterministic = spec.backward();
    deterministic.deterministic = true;
    assert!(both(backward(&spec.backward()), 27, 0) && !both(backward(&spec.backward()), 26, 9));
    for less in [deterministic, capped.backward(), rules[0].backward(), bias.backward().wrt("bias", DType::BF16)] {
        assert!(!both(backward(&less), 28, 0));
    }
}

/// Gradients that engines do not sum are refused by name.
#[test]
fn gradients_that_engines_do_not_sum_are_refused() {
    let asked = |mods: &[&str], name: &str, dtype| {
        let mods: Vec<String> = mods.iter().map(|&m| m.to_owned()).collect();
        let problem = spec(SHAPES[0], Layout::Bhsd, &mods, &[]).backward().wrt(name, dtype).validate().unwrap();
        lower::lower(&problem.into(), Form::Composite, NEW).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(asked(&["bias:hqk"], "bias", DType::F16), Ok(()));
    assert_eq!(asked(&["bias:hqk", "softcap:2"], "bias", DType::BF16), Ok(()));
    for (mods, name, dtype) in [
        (&["bias:hqk"][..], "bias", DType::F32),
        (&["softcap:2", "bias:hqk"], "bias", DType::BF16),
        (&["softcap:2"], "cap", DType::BF16),
        (&["alibi-slopes"], "slopes", DType::BF16),
    ] {
        assert!(
            asked(mods, name, dtype).is_err_and(|e| e.contains(&format!("the gradient of parameter {name}")) || e.contains(name)),
            "{mods:?}"
        );
    }
}

/// What engines get wrong without saying so is unsupported in words.
#[test]
fn faults_of_engines_are_unsupported() {
    let lowered = |text: &str, masks: &[&str], form, backward: bool| {
        let masks: Vec<String> = masks.iter().map(|&m| m.to_owned()).collect();
        let mut spec = spec(SHAPES[0], Layout::Bhsd, &[], &masks);
        spec.score_mods.extend((!text.is_empty()).then(|| text.parse::<ScoreMod>().unwrap()));
        let job = if backward { spec.backward().validate().unwrap().into() } else { spec.validate().unwrap().into() };
        lower::lower(&job, form, NEW).map(|_| ()).map_err(|e| e.to_string())
    };
    // Past the lengths, tiles of the backward pass hold scores of −∞: 0 times that is no number.
    let is_nan = "that is NaN at −∞";
    for (text, survives) in [
        ("score * 0.5", true),
        ("tanh(score) * 3.0", true),
        ("tanh(score) * score", false),
        ("score % 2.0", false),
        ("sin(score)", false),
        // At the first and the last query alone, where the factor is 0.
        ("score * f32(q + 1)", true),
        ("score * f32(q)", false),
        ("score * f32(seq_q - 1 - q)", false),
    ] {
        let said = lowered(text, &["padding"], Form::Composite, true);
        assert_eq!(said.is_ok(), survives, "{text}: {said:?}");
        assert!(said.err().is_none_or(|e| e.contains(is_nan)), "{text}");
        for (masks, backward) in [(&["causal"][..], true), (&["padding"], false)] {
            assert_eq!(lowered(text, masks, Form::Composite, backward), Ok(()), "{text} with {masks:?}");
        }
    }
    // The unified op counts other lengths beside rules.
    let lengths = "lengths with a score_mod or a traced mask";
    for (text, masks) in [("score * 0.5", &["padding"][..]), ("", &["padding", "dilated:2"])] {
        assert!(lowered(text, masks, Form::Unified, false).is_err_and(|e| e.contains(lengths)), "{text} {masks:?}");
    }
    for (text, masks) in [("score * 0.5", &["causal"][..]), ("", &["padding", "causal"])] {
        assert_eq!(lowered(text, masks, Form::Unified, false), Ok(()), "{text} {masks:?}");
    }
    // One query's engine took values by head from another head.
    let decode = |text: &str, masks: &[&str], form: Form, runtime: Version| {
        let shape = Shape { batch: 1, heads_q: 8, heads_kv: 1, seq_q: 1, seq_kv: 257, dim_qk: 64, dim_v: 64 };
        let masks: Vec<String> = masks.iter().map(|&m| m.to_owned()).collect();
        let mut spec = spec(shape, Layout::Bhsd, &[], &masks);
        spec.score_mods.extend((!text.is_empty()).then(|| text.parse::<ScoreMod>().unwrap()));
        lower::lower(&spec.validate().unwrap().into(), form, runtime).map(|_| ()).map_err(|e| e.to_string())
    };
    let (wrong, right) = (Version::new(9, 25, 0), Version::new(9, 25, 1));
    for (text, masks) in [("score + f32(head)", &[][..]), ("", &["dilated:3"])] {
        assert!(
            decode(text, masks, Form::Unified, wrong).is_err_and(|e| e.contains("with one query is not supported before cuDNN 9.25.1")),
            "{text} {masks:?}"
        );
        assert_eq!(decode(text, masks, Form::Unified, right), Ok(()));
        assert_eq!(decode(text, masks, Form::Composite, wrong), Ok(()));
    }
    assert_eq!(decode("", &["causal-bottom-right"], Form::Unified, wrong), Ok(()));
}
