//! The real cuDNN without a GPU: which operations and fusions two runtimes offer engines for, on three devices. A process holds one cuDNN, so
//! this one starts itself once per runtime.

mod dynamic;
mod faults;
mod files;
#[path = "../generator/mod.rs"]
mod generator;
mod page;
mod patterns;
mod random;

use cudnn_graph::ir::Mode;
use cudnn_graph::ir::op::ReductionMode;
use cudnn_graph::{DType, DeviceProfile, Error, Graph, Library, Limits, Planner, Plans, Policy, Program, Search, Target, Version, encode};
use page::{Answer, Outcome, RUNTIMES};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

const LINE: &str = "ANSWER ";

/// Devices: the name of the profile, and that of the page.
const DEVICES: [(&str, &str); 3] = [("a100", "A100"), ("h200", "H200"), ("b200", "B200")];

/// Asks the runtime of this process about every pattern, and writes a line per answer. Runs only if it is named: [`answers`] starts it.
#[test]
fn worker() {
    if !std::env::args().any(|argument| argument == "--exact") {
        return;
    }
    let library = Library::load(&Search::default()).unwrap_or_else(|e| panic!("{e}"));
    for pattern in patterns::patterns() {
        for &dtype in pattern.types {
            let mut g = Graph::new();
            (pattern.build)(&mut g, dtype);
            let text = g.to_string();
            let graph = Arc::new(g.verify().unwrap_or_else(|e| panic!("{}: {e}\n{text}", pattern.name)));
            for (name, device) in DEVICES {
                let profile = DeviceProfile::named(name).unwrap();
                let target = Target::Profile(&profile);
                // The page has what cuDNN answers, right or wrong.
                let outcome = match Planner::new(library, graph.clone(), &target, &Policy::default().with_known_faults(true)) {
                    // Compiling takes most of the time, so only the first type of a pattern is compiled.
                    Ok(planner) if pattern.types[0] == dtype => match planner.first(&target) {
                        Ok(_) => Outcome::Planned,
                        // Some engines load their kernel when a plan is finalized, and the stand-in driver has no device.
                        Err(Error::Cudnn { status, .. }) if status.is_execution() => Outcome::Offered,
                        Err(e) => Outcome::Refused(e.to_string()),
                    },
                    Ok(_) => Outcome::Offered,
                    Err(Error::TooNew(e)) => Outcome::Needs(e.needs.iter().map(|(_, since)| *since).max().unwrap_or(Version::OLDEST)),
                    Err(e) => Outcome::Refused(e.to_string()),
                };
                let answer = Answer { pattern: pattern.name.to_owned(), dtype, device: device.to_owned(), outcome };
                println!("{LINE}{}", serde_json::to_string(&answer).unwrap());
            }
        }
    }
}

/// Checks planning, caches and files with the runtime of this process. Runs only if it is named.
#[test]
fn checks() {
    if !std::env::args().any(|argument| argument == "--exact") {
        return;
    }
    let library = Library::load(&Search::default()).unwrap_or_else(|e| panic!("{e}"));
    errors_do_not_show_older_messages(library);
    a_program_from_json_is_planned_like_its_graph(library);
    a_graph_is_planned_once(library);
    dynamic::further_extents_compile_no_kernel(library);
    files::plans_are_kept_in_files(library);
    files::the_fastest_plan_is_found(library);
}

#[test]
fn both_runtimes_pass_the_checks() {
    said_by_all("checks");
}

/// Two requests for equal graphs share a plan. A miss names what differs, and a refusal is remembered.
fn a_graph_is_planned_once(library: &'static Library) {
    let profile = DeviceProfile::named("h200").unwrap();
    let (target, plans) = (Target::Profile(&profile), Plans::new(library, Policy::default(), Limits::default()));
    let product = |rows: i64| {
        let mut g = Graph::new();
        let (a, b) = (g.input("a", DType::BF16, [1, rows, 128]), g.input("b", DType::BF16, [1, 128, 512]));
        let y = g.matmul(a, b);
        g.output(y, "y", DType::BF16);
        Arc::new(g.verify().unwrap())
    };
    let plan = plans.get(&product(256), &target).unwrap();
    assert!(Arc::ptr_eq(&plan, &plans.get(&product(256), &target).unwrap()));
    let told = plans.explain(&product(320), &target).to_string();
    assert!(
        told.contains("not there") && told.contains("tensor 0") && told.contains("[1,320,128]") && !told.contains("tensor 1 "),
        "{told}"
    );
    assert!(!Arc::ptr_eq(&plan, &plans.get(&product(320), &target).unwrap()));
    let mut g = Graph::new();
    let x = g.input("x", DType::BF16, [8, 64, 32, 32]);
    let y = g.reduce(ReductionMode::Mul, x, [8, 64, 1, 1]);
    g.output(y, "y", DType::F32);
    let graph = Arc::new(g.verify().unwrap());
    let [first, again] = [(); 2].map(|()| plans.get(&graph, &target).unwrap_err().to_string());
    assert_eq!(first, again);
    assert!(plans.explain(&graph, &target).to_string().contains("unsupported"));
    let stats = plans.stats();
    assert_eq!((stats.hits, stats.misses, stats.failures, stats.refusals), (1, 3, 1, 1), "{stats:?}");
}

/// A reduction for which no engine exists leaves messages. The error of a later graph is the same as without it.
fn errors_do_not_show_older_messages(library: &'static Library) {
    let profile = DeviceProfile::named("b200").unwrap();
    let ask =
        |program: Program| Planner::for_program(library, program, &Target::Profile(&profile), &Policy::default()).unwrap_err().to_string();
    let encoded = |g: Graph| encode(&g.verify().unwrap(), library.version()).unwrap();
    let wrong = || {
        let mut g = Graph::new();
        let (x, b) = (g.input("x", DType::F32, [4, 8, 8]), g.input("b", DType::F32, [1, 8, 8]));
        let y = g.pointwise(Mode::Add, &[x, b]);
        g.output(y, "y", DType::F32);
        // An operand of fewer axes, which verify refuses too.
        let json = serde_json::to_string(&encoded(g)).unwrap().replace("[1,8,8]", "[8,8]").replace(
            "[64,8,1]}},{\"attribute\":\"TENSOR_UNIQUE_ID\",\"ty\":\"INT64\",\"values\":{\"i64\":[2]",
            "[8,1]}},{\"attribute\":\"TENSOR_UNIQUE_ID\",\"ty\":\"INT64\",\"values\":{\"i64\":[2]",
        );
        serde_json::from_str(&json).unwrap()
    };
    let alone = ask(wrong());
    assert!(alone.contains("BAD_PARAM"), "{alone}");
    let mut g = Graph::new();
    let x = g.input_channels_last("x", DType::F16, [8, 64, 16, 16]);
    let y = g.reduce(ReductionMode::Mul, x, [1, 64, 1, 1]);
    g.output(y, "y", DType::F32);
    ask(encoded(g));
    assert_eq!(ask(wrong()), alone);
}

/// The engines of a program that was read from JSON are those of its graph, and a wrong number in it is cuDNN's to refuse.
fn a_program_from_json_is_planned_like_its_graph(library: &'static Library) {
    let profile = DeviceProfile::named("h200").unwrap();
    let target = Target::Profile(&profile);
    let mut g = Graph::new();
    let pattern = patterns::patterns().into_iter().find(|pattern| pattern.name == "conv + bias + relu").unwrap();
    (pattern.build)(&mut g, DType::F16);
    let from_graph = Planner::new(library, Arc::new(g.verify().unwrap()), &target, &Policy::default()).unwrap();
    let json = serde_json::to_string(from_graph.program()).unwrap();
    let ask = |json: &str| Planner::for_program(library, serde_json::from_str(json).unwrap(), &target, &Policy::default());
    let from_json = ask(&json).unwrap();
    assert_eq!(from_json.report(), from_graph.report());
    let plan = from_json.first(&target).unwrap();
    assert_eq!(plan.ports().device.len(), 4);
    // A filter stride of 0.
    let broken = json.replace(
        "\"CONVOLUTION_FILTER_STRIDES\",\"ty\":\"INT64\",\"values\":{\"i64\":[1,1]}",
        "\"CONVOLUTION_FILTER_STRIDES\",\"ty\":\"INT64\",\"values\":{\"i64\":[0,1]}",
    );
    assert_ne!(broken, json);
    let error = ask(&broken).unwrap_err().to_string();
    assert!(error.contains("CONVOLUTION"), "{error}");
}

/// The folder of `libcudnn.so.9` of a runtime, and the stand-in driver; or what is missing.
fn runtime(name: &str) -> Result<(PathBuf, PathBuf), String> {
    let this = std::env::current_exe().map_err(|e| e.to_string())?;
    let library = Path::new("cudnn").join(name).join("nvidia/cudnn_jit/lib");
    let library = this.ancestors().map(|folder| folder.join(&library)).find(|folder| folder.join("libcudnn.so.9").exists());
    let library = library.ok_or_else(|| format!("there is no cuDNN {name} in the target folder; scripts/setup-tests.sh installs it"))?;
    let driver = this.ancestors().map(|folder| folder.join("libnull_driver.so")).find(|file| file.exists());
    Ok((library, driver.ok_or("the stand-in driver is not built; cargo build --package null-driver builds it")?))
}

/// Runs a test of this file in a process with this runtime, and returns its output.
fn said_by(worker: &str, name: &str) -> Result<String, String> {
    let (library, driver) = runtime(name)?;
    let output = Command::new(std::env::current_exe().map_err(|e| e.to_string())?)
        .args([worker, "--exact", "--nocapture"])
        .env("CUDNN_GRAPH_LIBRARY", library)
        .env("CUDNN_GRAPH_DRIVER", driver)
        .output()
        .map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "cuDNN {name}: {}\n{said}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(said)
}

/// Returns the output of a test with every runtime; `None` if one is missing and not required.
fn said_by_all(worker: &str) -> Option<Vec<String>> {
    let found: Vec<Result<String, String>> = std::thread::scope(|scope| {
        let running: Vec<_> = RUNTIMES.iter().map(|name| scope.spawn(|| said_by(worker, name))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    match found.into_iter().collect::<Result<Vec<_>, String>>() {
        Ok(all) => Some(all),
        Err(why) => {
            let required = std::env::var("SDPA_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name.trim() == "offline"));
            assert!(!required, "SDPA_REQUIRE asks for offline: {why}");
            // The macros that print would be captured.
            use std::io::Write;
            let _ = writeln!(std::io::stdout().lock(), "SKIP offline: {why}");
            None
        }
    }
}

/// The answers of a runtime to every pattern.
fn answers(said: &str) -> Vec<Answer> {
    said.lines()
        .filter_map(|line| Some(&line[line.find(LINE)? + LINE.len()..]))
        .map(|json| serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {json}")))
        .collect()
}

/// `SDPA_BLESS=1` rewrites the page.
#[test]
fn the_support_page_is_what_cudnn_answers() {
    let Some(all) = said_by_all("worker") else { return };
    let all: Vec<Vec<Answer>> = all.iter().map(|said| answers(said)).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/graph-support.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let new = page::with_table(&page, &all);
    if std::env::var_os("SDPA_BLESS").is_some() {
        std::fs::write(&path, &new).unwrap();
    } else {
        assert!(page == new, "docs/graph-support.md differs from what cuDNN answers; SDPA_BLESS=1 rewrites it:\n{new}");
    }
}
