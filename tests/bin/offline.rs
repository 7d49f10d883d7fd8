//! The worker of the offline tests: one cuDNN, over a stand-in driver, answering in JSON lines.
//!
//! `offline ask`: support of every row on every profile. `offline compile NAME...|all`: plans of rows. `offline load WHAT`:
//! how loading goes.

use conformance::matrix::{self, Row};
use conformance::offline::{Answer, Asked, Compiled, PROFILES, Wanted};
use conformance::sent;
use cudnn_graph::{DeviceProfile, Library, Outcome, Search, Target};
use sdpa::Error;
use sdpa::exec::cudnn::plan::{self, PlanOptions};
use sdpa::exec::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::lower::{Form, UNIFIED_SINCE};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.first().map(String::as_str) {
        Some("ask") => ask(),
        Some("compile") => compile(&arguments[1..]),
        Some("load") => load(arguments.get(1).map(String::as_str)),
        _ => Err("offline ask | compile NAME...|all | load WHAT".to_owned()),
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
                if wanted == Wanted::Any || library.version() >= UNIFIED_SINCE {
                    each(library, name, &Target::Profile(&profile), row, wanted)?;
                }
            }
        }
    }
    Ok(())
}

fn options(wanted: Wanted) -> PlanOptions {
    let form = match wanted {
        Wanted::Any => None,
        Wanted::Unified => Some(Form::Unified),
    };
    PlanOptions { form, ..PlanOptions::default() }
}

fn ask() -> Result<(), String> {
    everywhere(&matrix::rows()?, |library, profile, target, row, wanted| {
        let answer = answer(library, target, row, wanted);
        print(&Asked { profile: profile.to_owned(), row: row.name.clone(), wanted, answer })
    })
}

fn answer(library: &'static Library, target: &Target<'_>, row: &Row, wanted: Wanted) -> Answer {
    let job = match row.spec.validate() {
        Ok(problem) => problem.into(),
        Err(e) => return Answer::Fails(e.to_string()),
    };
    let options = options(wanted);
    let form = match plan::supports(library, target, &job, &options) {
        Ok(form) => form,
        Err(Error::Unsupported(e)) => return Answer::Declines(e.reasons),
        Err(e) => return Answer::Fails(e.to_string()),
    };
    if !row.in_place() {
        return Answer::Takes { form, engine: None };
    }
    match plan::ask(library, target, &job, form, &options.policy) {
        Ok((_, planner)) => {
            let first = planner.report().candidates.iter().find(|c| c.outcome == Outcome::NotTried);
            Answer::Takes { form, engine: first.map(|c| c.tag()) }
        }
        Err(e) => Answer::Fails(e.to_string()),
    }
}

fn compile(names: &[String]) -> Result<(), String> {
    let mut rows = matrix::rows()?;
    rows.retain(|row| names.iter().any(|name| name == "all" || *name == row.name));
    let all = names.iter().any(|name| name == "all");
    everywhere(&rows, |library, profile, target, row, wanted| {
        if !all && wanted == Wanted::Unified && !matrix::UNIFIED_SAMPLE.contains(&row.name.as_str()) {
            return Ok(());
        }
        let mut compiled =
            Compiled { profile: profile.to_owned(), row: row.name.clone(), wanted, declined: false, copies: 0, wrong: Vec::new() };
        let first = match answer(library, target, row, wanted) {
            Answer::Takes { engine, .. } => engine,
            Answer::Declines(_) => {
                compiled.declined = true;
                return print(&compiled);
            }
            Answer::Fails(text) => {
                compiled.wrong.push(text);
                return print(&compiled);
            }
        };
        let planned = row.spec.validate().map_err(Error::from).and_then(|p| plan::build(library, target, &p.into(), &options(wanted)));
        match planned {
            Ok(planned) => {
                let engine = planned.plan.engine().map(|c| c.tag());
                if first.is_some() && first != engine {
                    compiled.wrong.push(format!("the first offer fell through:\n{}", planned.plan.report()));
                }
                compiled.copies = planned.copies.len();
                let plans = std::iter::once((&planned.lowered.graph, &planned.plan));
                for (graph, plan) in plans.chain(planned.copies.iter().map(|c| (&c.copy.graph, &c.plan))) {
                    match plan.to_json() {
                        Ok(json) => compiled.wrong.extend(sent::differences(graph, &json)),
                        Err(e) => compiled.wrong.push(e.to_string()),
                    }
                }
            }
            Err(e) => compiled.wrong.push(e.to_string()),
        }
        print(&compiled)
    })
}

/// How loading goes: one line, an error's kind and text.
fn load(what: Option<&str>) -> Result<(), String> {
    let kind = |e: &cudnn_graph::Error| {
        let all = format!("{e:?}");
        all.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
    };
    let line = match what {
        Some("executor") => CudnnExecutor::new(CudnnOptions::default()).err(),
        Some("library") => Library::load(&Search::default()).err(),
        Some(other) => {
            Library::load(&Search::default()).map_err(|e| e.to_string())?;
            Library::load(&Search { library: Some(other.into()), driver: None }).err()
        }
        None => return Err("load executor | library | PATH of another library".to_owned()),
    };
    print(&line.map_or(("Ok".to_owned(), String::new()), |e| (kind(&e), e.to_string())))
}
