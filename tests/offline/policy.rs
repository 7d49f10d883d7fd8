//! What a policy does to the real cuDNN's offers, and plans as JSON: 9.19 for an H200's profile, in this process.

use conformance::code;
use conformance::golden::repository;
use conformance::offline::Runtime;
use conformance::say::skip;
use cudnn_graph::{DeviceProfile, Library, Outcome, Policy, Search, Target};
use sdpa::cudnn::PlanOptions;
use sdpa::cudnn::lower::{Form, Job};
use sdpa::cudnn::plan::{ask, build};
use sdpa::{AttentionSpec, DType, Layout, Shape};
use std::path::Path;

/// The library and the profile, if the runtime is there.
fn h200() -> Option<(&'static Library, DeviceProfile)> {
    let runtime = match Runtime::find("9.19", Path::new(env!("CARGO_BIN_EXE_offline"))) {
        Ok(runtime) => runtime,
        Err(why) => {
            skip("offline", &why);
            return None;
        }
    };
    let library = Library::load(&Search::default().with_library(runtime.library).with_driver(runtime.driver)).unwrap();
    let profile = std::fs::read_to_string(repository("cudnn-graph/devprops/h200.json")).unwrap();
    Some((library, DeviceProfile::from_json(&profile).unwrap()))
}

fn problem(seq_q: i64, seq_kv: i64) -> Job {
    let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q, seq_kv, dim_qk: 128, dim_v: 128 };
    AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).with_stats().validate().unwrap().into()
}

fn options(policy: Policy) -> PlanOptions {
    PlanOptions::default().with_form(Form::Composite).with_policy(policy)
}

#[test]
fn a_workspace_limit_takes_another_configuration_or_says_why_not() {
    let Some((library, profile)) = h200() else { return };
    let target = Target::Profile(&profile);
    let free = build(library, &target, &problem(1, 4000), &options(Policy::default())).unwrap();
    let bytes = free.plan.workspace_bytes();
    assert!(bytes > 0, "decode splits the keys, which takes memory");
    let limited = Policy::default().with_max_workspace(bytes - 1);
    let small = build(library, &target, &problem(1, 4000), &options(limited.clone())).unwrap();
    assert!(small.plan.workspace_bytes() < bytes);
    let over: Vec<_> = small.plan.report().candidates.iter().filter(|c| matches!(c.outcome, Outcome::PassedOver(_))).collect();
    assert!(!over.is_empty() && over.iter().all(|c| c.workspace == Some(bytes)), "{}", small.plan.report());
}

#[test]
fn an_engine_that_is_avoided_is_not_taken_and_one_that_is_preferred_is() {
    let Some((library, profile)) = h200() else { return };
    let target = Target::Profile(&profile);
    let chosen = |policy: Policy| {
        let planned = build(library, &target, &problem(2048, 2048), &options(policy)).unwrap();
        planned.plan.engine().map(|c| c.tag()).unwrap()
    };
    let first = chosen(Policy::default());
    let engine = |tag: &str| tag.split('_').next().unwrap_or(tag).to_owned();
    let other = chosen(Policy::default().with_avoid(vec![engine(&first)]));
    assert_ne!(engine(&first), engine(&other));
    assert_eq!(chosen(Policy::default().with_prefer(vec![other.clone()])), other);
    let none = Policy::default().with_avoid(vec![engine(&first), engine(&other)]);
    let refusal = build(library, &target, &problem(2048, 2048), &options(none)).unwrap_err().to_string();
    assert!(refusal.contains("passed over: the policy avoids"), "{refusal}");
}

#[test]
fn a_plan_comes_back_from_its_json_and_no_other_text_does() {
    let Some((library, profile)) = h200() else { return };
    let target = Target::Profile(&profile);
    let (forward, planner) = ask(library, &target, &problem(300, 400), Form::Composite, &Policy::default()).unwrap();
    let plan = planner.first(&target).unwrap();
    let json = plan.to_json().unwrap();
    let back = code::plan(library, &json, &forward.graph, &target).unwrap();
    assert_eq!((back.workspace_bytes(), back.ports()), (plan.workspace_bytes(), plan.ports()));
    assert_eq!(back.to_json().unwrap(), json);
    let other = json.replacen("\"cudnnVersion\":91900", "\"cudnnVersion\":91800", 1);
    assert_ne!(other, json);
    for bad in [other.as_str(), "", "{}", &json[..json.len() / 2]] {
        assert!(code::plan(library, bad, &forward.graph, &target).is_err(), "{} characters were taken", bad.len());
    }
}
