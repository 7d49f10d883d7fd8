//! The raw tier, plan files and the cache over the library `recording`, which is this process's cuDNN and driver: whoever reads its record
//! waits for the others (`conformance::recorder`).

mod calls;
mod captures;
mod cuda;
mod decode;
mod key;
mod packed;
mod paged;
mod plans;
mod sinks;
mod submissions;

use conformance::say::say;

/// The variable that the recording library takes its version from.
const VERSION: &str = "RECORDING_CUDNN";

/// Whether the library of this process says that it is 9.27.0, which tests of what older ones do not do need; else the test, by its name, has
/// been run in a process where it does.
fn is_newer(test: &str) -> bool {
    if std::env::var(VERSION).is_ok() {
        return true;
    }
    let program = std::env::current_exe().unwrap();
    let done = std::process::Command::new(program).args([test, "--exact"]).env(VERSION, "92700").output().unwrap();
    let said = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
    said.lines().filter(|line| line.contains("submissions of") || line.contains("SKIP")).for_each(say);
    false
}
