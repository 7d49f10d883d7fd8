//! The worker of the offline tests: one cuDNN, over a stand-in driver, answering in JSON lines.
//!
//! `offline ask`: support of every row of today on every profile. `offline ask-statistics`, `ask-block-scales`: of cases of row statistics, and
//! of blocks that have scales. `offline compile NAME...|all`: plans of rows. `offline load WHAT`:
//! how loading goes. `offline twins`: which problems are one program.

use conformance::code;
use conformance::matrix::{self, Row, Spec};
use conformance::offline::{Answer, Asked, Compiled, PROFILES, Wanted};
use conformance::sent;
use cudnn_graph::{DeviceProfile, Library, Outcome, Search, Target, Version};
use sdpa::cudnn::Error;
use sdpa::cudnn::lower::{self, Form, Job, UNIFIED_BACKWARD_SINCE, UNIFIED_SINCE};
use sdpa::cudnn::plan::{self, PlanOptions, Planned};
use sdpa::cudnn::portable::{self, PayloadError};
use sdpa::cudnn::schedule::Role;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::{AttentionSpec, DType, Layout, Shape};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.first().map(String::as_str) {
        Some("ask") => matrix::rows().and_then(|rows| ask(&matrix::of_today(rows).0)),
        Some("ask-statistics") => matrix::statistics().and_then(|rows| ask(&rows)),
        Some("ask-block-scales") => matrix::block_scales().and_then(|rows| ask(&rows)),
        Some("compile") => compile(&arguments[1..]),
        Some("load") => load(arguments.get(1).map(String::as_str)),
        Some("twins") => twins(),
        _ => Err("offline ask | ask-statistics | ask-block-scales | compile NAME...|all | load WHAT | twins".to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

fn print(value: &impl serde::Serialize) -> Result<(), String> {
    println!("{}", serde_json::to_string(value).map_err(|e| e.to_string())?);
    Ok(())
}

/// Calls `each` for every row on every profile in every form that the runtime has.
fn everywhere(
    rows: &[Row],
    mut each: impl FnMut(&'static Library, &str, &Target<'_>, &Row, Wanted) -> Result<(), String>,
) -> Result<(), String> {
    let library = Library::load(&Search::default()).map_err(|e| e.to_string())?;
    for (name, json) in PROFILES {
        let profile = DeviceProfile::from_json(json).map_err(|e| e.to_string())?;
        for row in rows {
            for wanted in Wanted::ALL {
                if wanted == Wanted::Any || has_unified(row, library.version()) {
                    each(library, name, &Target::Profile(&profile), row, wanted)?;
                }
            }
        }
    }
    Ok(())
}

/// Whether it is worth asking for the unified form by itself.
fn has_unified(row: &Row, runtime: Version) -> bool {
    match &row.spec {
        Spec::Forward(_) => runtime >= UNIFIED_SINCE,
        Spec::Backward(_) => runtime >= UNIFIED_BACKWARD_SINCE && row.spec.is_plain(),
    }
}

fn options(wanted: Wanted) -> PlanOptions {
    let form = match wanted {
        Wanted::Any => None,
        Wanted::Unified => Some(Form::Unified),
    };
    PlanOptions::default().with_form(form)
}

fn ask(rows: &[Row]) -> Result<(), String> {
    everywhere(rows, |library, profile, target, row, wanted| {
        let answer = answer(library, target, row, wanted);
        print(&Asked { profile: profile.to_owned(), row: row.name.clone(), wanted, answer })
    })
}

fn supports(library: &'static Library, target: &Target<'_>, row: &Row, wanted: Wanted) -> Result<(Job, Form), Answer> {
    let job = row.spec.job().map_err(|e| Answer::Fails(e.to_string()))?;
    match plan::supports(library, target, &job, &options(wanted)) {
        Ok(form) => Ok((job, form)),
        Err(Error::Unsupported(e)) => Err(Answer::Unsupported(e.reasons)),
        Err(e) => Err(Answer::Fails(e.to_string())),
    }
}

fn answer(library: &'static Library, target: &Target<'_>, row: &Row, wanted: Wanted) -> Answer {
    let (job, form) = match supports(library, target, row, wanted) {
        Ok(taken) => taken,
        Err(other) => return other,
    };
    if !row.in_place() {
        return Answer::Supported { form, engine: None };
    }
    match plan::ask(library, target, &job, form, &options(wanted).policy) {
        Ok((_, planner)) => {
            let first = planner.report().candidates.iter().find(|c| c.outcome == Outcome::NotTried);
            Answer::Supported { form, engine: first.map(|c| c.tag()) }
        }
        Err(e) => Answer::Fails(e.to_string()),
    }
}

fn compile(names: &[String]) -> Result<(), String> {
    let mut rows = matrix::rows()?;
    rows.extend(matrix::statistics()?);
    rows.extend(matrix::block_scales()?);
    rows.retain(|row| names.iter().any(|name| name == "all" || *name == row.name));
    let all = names.iter().any(|name| name == "all");
    everywhere(&rows, |library, profile, target, row, wanted| {
        if !all && wanted == Wanted::Unified && !matrix::UNIFIED_SAMPLE.contains(&row.name.as_str()) {
            return Ok(());
        }
        if !all && !matrix::is_compiled_today(&row.name, profile) {
            return Ok(());
        }
        let mut compiled = Compiled {
            profile: profile.to_owned(),
            row: row.name.clone(),
            wanted,
            unsupported: false,
            copies: 0,
            conversions: 0,
            wrong: Vec::new(),
        };
        match supports(library, target, row, wanted) {
            Ok((job, _)) => match plan::build(library, target, &job, &options(wanted)) {
                Ok(planned) => {
                    check(&planned, &mut compiled);
                    let moved = check_portable(library, target, &job, &options(wanted), &planned);
                    compiled.wrong.extend(moved.err());
                }
                Err(e) => compiled.wrong.push(e.to_string()),
            },
            Err(Answer::Fails(text)) => compiled.wrong.push(text),
            Err(Answer::Unsupported(_) | Answer::Supported { .. }) => compiled.unsupported = true,
        }
        print(&compiled)
    })
}

/// The first offers must have held, and each plan must record what was sent.
fn check(planned: &Planned, compiled: &mut Compiled) {
    compiled.copies = planned.copied().len();
    compiled.conversions = planned.schedule.runs().filter(|run| matches!(run.role, Role::Conversion(_))).count();
    for run in planned.schedule.runs() {
        let (graph, plan) = (&run.graph, &run.plan);
        let first = plan.report().candidates.iter().find(|c| !matches!(c.outcome, Outcome::PassedOver(_)));
        if first.is_none_or(|c| c.outcome != Outcome::Chosen) {
            compiled.wrong.push(format!("the first offer fell through:\n{}", plan.report()));
        }
        match plan.to_json() {
            Ok(json) => compiled.wrong.extend(sent::differences(graph, &json)),
            Err(e) => compiled.wrong.push(e.to_string()),
        }
    }
}

/// Plans come back from their bytes as they were, and for no other pass.
fn check_portable(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    options: &PlanOptions,
    planned: &Planned,
) -> Result<(), String> {
    let key = |job: &Job| portable::key(library, target, job, options).map_err(|e| e.to_string());
    let bytes = planned.to_bytes().map_err(|e| e.to_string())?;
    let again = code::planned(library, target, job, &bytes).map_err(|e| e.to_string())?;
    let same = again.lowered.graph == planned.lowered.graph
        && again.lowered.supplies == planned.lowered.supplies
        && again.job == planned.job
        && again.engine == planned.engine
        && again.recheck(job, library.version()).is_ok()
        && again.workspace_bytes() == planned.workspace_bytes()
        && again.to_bytes().is_ok_and(|again| again == bytes)
        && key(job)? == key(job)?;
    if !same {
        return Err("a plan from its bytes is another".to_owned());
    }
    let other = AttentionSpec::dense(DType::F16, ANY, Layout::Bshd).with_stats();
    let other: Job = match job {
        Job::Forward(_) => other.validate().map_err(|e| e.to_string())?.into(),
        Job::Backward(_) => other.backward().validate().map_err(|e| e.to_string())?.into(),
    };
    match code::planned(library, target, &other, &bytes) {
        Err(PayloadError::Graph { .. }) if key(&other)? != key(job)? && planned.recheck(&other, library.version()).is_err() => {}
        Err(e) => return Err(format!("bytes of another pass: {e}")),
        Ok(_) => return Err("bytes of another pass were taken".to_owned()),
    }
    for cut in [0, 10, bytes.len() / 2, bytes.len() - 1] {
        if code::planned(library, target, job, &bytes[..cut]).is_ok() {
            return Err(format!("{cut} of {} bytes were taken", bytes.len()));
        }
    }
    let longer = [&bytes[..], b" "].concat();
    if code::planned(library, target, job, &longer).is_ok() {
        return Err("a byte too many was taken".to_owned());
    }
    Ok(())
}

/// Problems that differ from the first in one thing: whether they are its program with other numbers, and take its bytes.
fn twins() -> Result<(), String> {
    let library = Library::load(&Search::default()).map_err(|e| e.to_string())?;
    let profile = DeviceProfile::named("h200").map_err(|e| e.to_string())?;
    let (target, options) = (Target::Profile(&profile), PlanOptions::default());
    let job = |score_mod: &str, mask: &str| -> Result<Job, String> {
        let spec = AttentionSpec::dense(DType::BF16, ANY, Layout::Bshd).with_stats();
        let spec = spec.score_mod(score_mod.parse().map_err(|e: sdpa::ParseError| e.to_string())?);
        Ok(spec.mask(mask.parse().map_err(|e: sdpa::ParseError| e.to_string())?).validate().map_err(|e| e.to_string())?.into())
    };
    let first = job("score * 2.5", "window:9,0")?;
    let key = |job: &Job| portable::key(library, &target, job, &options).map_err(|e| e.to_string());
    let bytes = plan::build(library, &target, &first, &options).and_then(|p| p.to_bytes()).map_err(|e| e.to_string())?;
    for (score_mod, mask) in [
        ("score * 2.5", "window:9,0"),
        ("score * 3.5", "window:9,0"),
        ("score * 2.5", "window:30,0"),
        ("score + 2.5", "window:9,0"),
        ("score * 2.5", "window:9,1"),
    ] {
        let other = job(score_mod, mask)?;
        let taken = code::planned(library, &target, &other, &bytes).is_ok_and(|planned| {
            // Its own numbers, over the other's kernel.
            lower::lower(&other, planned.lowered.form, library.version()).is_ok_and(|own| own.graph == planned.lowered.graph)
        });
        print(&(score_mod, mask, key(&other)? == key(&first)?, taken))?;
    }
    Ok(())
}

/// A shape that no row has.
const ANY: Shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 67, seq_kv: 131, dim_qk: 64, dim_v: 64 };

/// How loading goes: one line, an error's kind and text.
fn load(what: Option<&str>) -> Result<(), String> {
    let name = |e: &dyn std::fmt::Debug| format!("{e:?}").split([' ', '(', '{']).next().unwrap_or_default().to_owned();
    let kind = |e: &cudnn_graph::Error| if let cudnn_graph::Error::Driver(of_driver) = e { name(of_driver) } else { name(e) };
    let line = match what {
        Some("executor") => CudnnExecutor::new(CudnnOptions::default()).err(),
        Some("library") => Library::load(&Search::default()).err(),
        Some(other) => {
            Library::load(&Search::default()).map_err(|e| e.to_string())?;
            Library::load(&Search::default().with_library(std::path::PathBuf::from(other))).err()
        }
        None => return Err("load executor | library | PATH of another library".to_owned()),
    };
    print(&line.map_or(("Ok".to_owned(), String::new()), |e| (kind(&e), e.to_string())))
}
