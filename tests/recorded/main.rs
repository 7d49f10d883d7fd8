//! The raw tier, plan files and the cache over the library `recording`, which is this process's cuDNN and driver: whoever reads its record
//! waits for the others (`conformance::recorder`).

mod calls;
mod captures;
mod choice;
mod cuda;
#[cfg(not(target_vendor = "apple"))]
mod cudarc;
mod decode;
mod empty;
mod key;
mod packed;
mod paged;
mod plans;
mod sinks;
#[cfg(not(target_vendor = "apple"))]
mod slices;
mod submissions;
mod timed;

use conformance::say::say;

/// The variable that the recording library takes its version from.
const VERSION: &str = "RECORDING_CUDNN";

/// Whether the library of this process says that it is 9.27.0, which tests of what older ones do not do need; else the test, by its name, has
/// been run in a process where it does.
fn is_newer(test: &str) -> bool {
    std::env::var(VERSION).is_ok() || elsewhere(test, &[(VERSION, "92700")])
}

/// The variable that says so of a process.
const ALONE: &str = "RECORDED_ALONE";

/// Whether no other test runs in this process; else the test, by its name, has been run in one of its own.
fn alone(test: &str) -> bool {
    std::env::var(ALONE).is_ok() || elsewhere(test, &[(ALONE, "1")])
}

/// Runs a test in another process, where variables are set. It is not run here: false.
fn elsewhere(test: &str, variables: &[(&str, &str)]) -> bool {
    let program = std::env::current_exe().unwrap();
    let done = std::process::Command::new(program).args([test, "--exact"]).envs(variables.iter().copied()).output().unwrap();
    let said = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
    said.lines().filter(|line| line.contains("submissions of") || line.contains("SKIP")).for_each(say);
    false
}
