//! `prove`, from outside: a few problems at a time on the CPU executor.

use super::tool::{Folder, binary, code, errors, json, sdpa, sdpa_with, stdout, words};
use conformance::covering::Strength;
use conformance::prove::{Answer, Verdict};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs `prove cpu` with its answers in a folder.
fn prove(folder: &Folder, line: &str) -> std::process::Output {
    sdpa(["prove", "cpu", "--state", &folder.path("")].into_iter().chain(words(line)))
}

/// The lines of the state: what it is about, and answers. Those of rows are left out.
fn lines(folder: &Folder) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.path("cpu.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["covering"].is_null()).collect()
}

/// Problems of strength two.
fn all() -> u64 {
    Strength::Two.problems().unwrap().len() as u64
}

fn counts(told: &Value) -> [u64; 6] {
    ["problems", "right", "unsupported", "wrong", "exits", "open"].map(|name| told[name].as_u64().unwrap())
}

#[test]
fn a_second_start_goes_on_and_answers_have_their_rows() {
    let folder = Folder::new();
    let out = prove(&folder, "--problems 3 --json");
    let told = json(&out);
    assert_eq!((code(&out), counts(&told)), (0, [all(), 3, 0, 0, 0, all() - 3]), "{told}");
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!((&told["executor"], &told["strength"]), (&"cpu".into(), &"two".into()));
    assert_eq!(told["runs_on"], format!("a processor of {}, sdpa {version}", std::env::consts::ARCH));
    assert_eq!(told["unproven"].as_array().unwrap().len(), 30);
    assert_eq!(counts(&json(&prove(&folder, "--problems 2 --json"))), [all(), 5, 0, 0, 0, all() - 5]);
    let lines = lines(&folder);
    assert_eq!((lines.len(), &lines[0]["executor"]), (6, &"cpu".into()));
    let problems = Strength::Two.problems().unwrap();
    for line in &lines[1..] {
        let answer: Answer = serde_json::from_value(line.clone()).unwrap();
        let problem = problems.iter().find(|problem| problem.case.name == answer.name).unwrap();
        assert_eq!((answer.problem().unwrap().row, answer.verdict), (problem.row.clone(), Verdict::Right));
    }
    // Problems of another strength are in the same file.
    assert_eq!(counts(&json(&prove(&folder, "--strength ledger --problems 1 --json")))[1], 1);
    assert_eq!(self::lines(&folder).len(), 7);
    let text = prove(&folder, "--problems 1");
    let answers = format!("answers   6 right, 0 unsupported, 0 wrong, 0 exits, {} open", all() - 6);
    assert!(stdout(&text).contains(&answers), "{}", stdout(&text));
}

#[test]
fn one_problem_is_computed_again() {
    let folder = Folder::new();
    assert_eq!(code(&prove(&folder, "--only two-way 5")), 2, "two words are two arguments");
    let only = |name: &str| sdpa(["prove", "cpu", "--state", &folder.path(""), "--json", "--only", name]);
    for times in 1..=2 {
        let told = json(&only("two-way 5"));
        assert_eq!(
            (counts(&told), &told["only"]["name"], &told["only"]["verdict"]),
            ([1, 1, 0, 0, 0, 0], &"two-way 5".into(), &"right".into())
        );
        assert_eq!(lines(&folder).len(), 1 + times, "it is asked each time");
    }
    let out = only(&format!("two-way {}", all()));
    let lines = &json(&out)["error"]["lines"];
    assert_eq!(code(&out), 2);
    let names = format!("a problem of this executor: \"two-way 0\" to \"two-way {}\"", all() - 1);
    assert!(lines[0]["message"].as_str().unwrap().contains(&names), "{lines}");
}

#[test]
fn wrong_answers_are_counted_and_can_be_repeated() {
    let folder = Folder::new();
    assert_eq!(code(&prove(&folder, "--problems 1")), 0);
    // An answer as a faulty executor would have left it.
    let problem = Strength::Two.problems().unwrap().pop().unwrap();
    let wrong = Answer::without(&problem, Verdict::Wrong, "an element is off".to_owned());
    let path = folder.path("cpu.jsonl");
    let text = std::fs::read_to_string(&path).unwrap() + &serde_json::to_string(&wrong).unwrap() + "\n";
    std::fs::write(&path, text).unwrap();
    let out = prove(&folder, "--problems 1 --json");
    let told = json(&out);
    assert_eq!((code(&out), counts(&told)), (1, [all(), 2, 0, 1, 0, all() - 3]));
    let repeat = format!("cargo sdpa prove cpu --state {} --only '{}'", folder.path(""), problem.case.name);
    assert_eq!((&told["bad"][0]["repeat"], &told["bad"][0]["told"]), (&repeat.clone().into(), &"an element is off".into()));
    let out = prove(&folder, "--problems 1");
    assert_eq!(code(&out), 1);
    assert!(stdout(&out).contains(&repeat) && stdout(&out).contains(&problem.features.join("; ")), "{}", stdout(&out));
    // It is asked again, and right.
    let again = sdpa(["prove", "cpu", "--state", &folder.path(""), "--only", &problem.case.name]);
    assert_eq!(code(&again), 0);
    assert_eq!(code(&prove(&folder, "--problems 1")), 0);
}

#[test]
fn mistakes_are_told_at_once_and_nothing_is_written() {
    let folder = Folder::new();
    let line = "prove cpux --strength four --only seven --problems 0 --remove";
    let out = sdpa(words(line));
    let wrong = errors(&out);
    assert_eq!((code(&out), wrong.len()), (2, 8), "{wrong:?}");
    for begins in [
        "EXECUTOR: got \"cpux\", expected one of auto, cpu, cuda, cudnn, metal",
        "--only: got \"seven\", expected the name of a problem",
        "--strength: got \"four\", expected one of two, three, ledger",
        "--problems: got \"0\", expected an integer of at least 1",
        "--remove: cannot be combined with --only: --remove computes nothing",
        "--problems: cannot be combined with --only",
    ] {
        assert!(wrong.iter().any(|line| line.starts_with(begins)), "{begins}: {wrong:?}");
    }
    let out = sdpa(["prove", "cpu", "--only", "ledger 5", "--strength", "two"]);
    assert_eq!(errors(&out), ["--only: \"ledger 5\" is a problem of --strength ledger, not of two"]);
    assert_eq!(code(&sdpa(words("prove"))), 2);
    std::fs::write(folder.path("file"), "").unwrap();
    let out = sdpa(["prove", "cpu", "--state", &folder.path("file")]);
    assert_eq!((code(&out), errors(&out)), (2, vec![format!("--state {}: got a file, expected a folder", folder.path("file"))]));
    let out = sdpa_with(words("prove cpu --problems 1"), [("SDPA_CACHE_DIR", "here".to_owned())]);
    assert_eq!((code(&out), errors(&out)), (2, vec!["SDPA_CACHE_DIR: got \"here\", expected an absolute path".to_owned()]));
    assert_eq!(folder.names(), ["file"]);
}

#[test]
fn states_of_something_else_and_folders_that_cannot_be_written_are_refused() {
    let folder = Folder::new();
    let path = folder.path("cpu.jsonl");
    for (text, says) in [
        (
            r#"{"executor":"cpu","runs_on":"another machine"}"#,
            "has answers of cpu on another machine, expected answers of cpu on a processor",
        ),
        (r#"{"executor":"cuda","runs_on":"x"}"#, "has answers of cuda on x, expected"),
        ("a letter", "is not the state of a proof"),
    ] {
        std::fs::write(&path, text).unwrap();
        let out = prove(&folder, "--problems 1");
        let wrong = errors(&out);
        assert_eq!((code(&out), wrong.len()), (2, 1), "{wrong:?}");
        assert!(wrong[0].starts_with("--state: ") && wrong[0].contains(says) && wrong[0].contains("--remove"), "{wrong:?}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "it stays as it is");
    }
    let out = prove(&folder, "--remove --json");
    assert_eq!((code(&out), &json(&out)["removed"]), (0, &true.into()));
    assert!(folder.names().is_empty());
    assert_eq!(json(&prove(&folder, "--remove --json"))["removed"], false);
    assert_eq!(code(&prove(&folder, "--problems 1")), 0);
    // Root may write everywhere, but not below a file.
    let out = sdpa(["prove", "cpu", "--problems", "1", "--state", &folder.path("cpu.jsonl/below")]);
    assert_eq!(code(&out), 4);
    assert!(errors(&out)[0].contains("name another folder"), "{:?}", errors(&out));
    std::fs::create_dir(folder.path("other")).unwrap();
    std::fs::create_dir(folder.path("other/cpu.jsonl")).unwrap();
    let out = sdpa(["prove", "cpu", "--problems", "1", "--state", &folder.path("other")]);
    assert_eq!(code(&out), 4);
    assert!(errors(&out)[0].starts_with("--state: opening "), "{:?}", errors(&out));
}

#[test]
fn the_folder_is_next_to_the_users_kernels() {
    let folder = Folder::new();
    let out = sdpa_with(words("prove cpu --problems 1 --json"), [("SDPA_CACHE_DIR", folder.path("base"))]);
    assert_eq!((code(&out), &json(&out)["state"]), (0, &folder.path("base/proofs/cpu.jsonl").into()));
    assert!(std::path::Path::new(&folder.path("base/proofs/cpu.jsonl")).exists());
}

#[test]
fn a_run_that_was_ended_goes_on() {
    let folder = Folder::new();
    let mut command = Command::new(binary());
    command.args(["prove", "cpu", "--state", &folder.path("")]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    let answers = || std::fs::read_to_string(folder.path("cpu.jsonl")).unwrap_or_default().lines().count();
    while answers() < 8 && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // But for the line of what the answers are of, and that of the rows.
    let before = answers() as u64 - 2;
    let second = json(&prove(&folder, "--problems 1 --json"));
    assert_eq!(counts(&second)[1], before + 1, "{second}");
    // The lock of a process that adds answers.
    let running = std::fs::File::open(folder.path("cpu.jsonl")).unwrap();
    running.lock().unwrap();
    let out = prove(&folder, "--problems 1");
    assert_eq!(code(&out), 2);
    assert!(errors(&out)[0].contains("another process adds answers"), "{:?}", errors(&out));
    drop(running);
}

#[test]
fn executors_that_are_not_here_are_told() {
    let out = sdpa(words("prove metal --problems 1"));
    if cfg!(not(target_vendor = "apple")) {
        assert_eq!(code(&out), 3);
        assert!(errors(&out)[0].starts_with("metal: ") && errors(&out)[0].contains("cargo sdpa doctor"), "{:?}", errors(&out));
    }
    // A worker says so on stdout, which its parent reads.
    let out = sdpa(words("prove-worker none"));
    assert!(code(&out) != 0 && stdout(&out).contains("expected one of"), "{}", stdout(&out));
}
