//! Concurrent readers and writers of one file.

use super::*;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_reader_goes_on_after_its_file_was_replaced() {
    let (_folder, path) = place();
    write(&path, &header(), records(5)).unwrap();
    let old = PlanFile::open(&path).unwrap();
    let new = Record { payload: b"other bytes".to_vec(), ..record(4) };
    write(&path, &header(), [new.clone()]).unwrap();
    std::fs::remove_file(&path).unwrap();
    for record in records(5) {
        assert_eq!(old.read(&record.key).unwrap(), Some(record.payload));
    }
    write(&path, &header(), [new.clone()]).unwrap();
    assert_eq!(all(&path), [new]);
}

#[test]
fn threads_that_add_at_once_lose_nothing_and_readers_see_whole_files() {
    let (folder, path) = place();
    add(&path, &header(), []).unwrap();
    let done = AtomicBool::new(false);
    let (path, done) = (&path, &done);
    let seen = std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut seen = vec![0];
            while !done.load(Ordering::Relaxed) {
                seen.push(all(path).len());
            }
            seen
        });
        let writers: Vec<_> = (0..8_u8)
            .map(|thread| scope.spawn(move || (0..5).for_each(|i| add(path, &header(), [record(thread * 5 + i)]).unwrap())))
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(seen.is_sorted(), "{seen:?}");
    assert_eq!(all(path), sorted(records(40)));
    assert_eq!(names(folder.path()), ["plans"]);
}

/// The path to which a child process of the tests below adds records, and the child's number.
const PATH: &str = "SDPA_TEST_PLANFILE";
const NUMBER: &str = "SDPA_TEST_PLANFILE_NUMBER";

#[test]
#[ignore = "one process of the next tests"]
fn one_process() {
    let (Some(path), Ok(number)) = (std::env::var_os(PATH), std::env::var(NUMBER)) else { return };
    let number: u8 = number.parse().unwrap();
    for i in 0..10 {
        add(Path::new(&path), &header(), [record(number * 10 + i)]).unwrap();
    }
}

/// Starts the test above in a child process.
fn start(path: &Path, number: u8) -> Child {
    let test = format!("{}::one_process", module_path!().split_once("::").unwrap().1);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &test, "--ignored", "--quiet"]).env(PATH, path).env(NUMBER, number.to_string());
    command.stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn processes_that_add_at_once_lose_nothing() {
    let (_folder, path) = place();
    let processes: Vec<_> = (0..3).map(|number| start(&path, number)).collect();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stdout));
    }
    assert_eq!(all(&path), sorted(records(30)));
}

#[test]
fn a_process_that_is_killed_leaves_a_whole_file_and_no_lock() {
    for round in 0..5 {
        let (_folder, path) = place();
        add(&path, &header(), []).unwrap();
        let mut process = start(&path, 0);
        while all(&path).len() <= round && process.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        process.kill().unwrap();
        process.wait().unwrap();
        let left = all(&path);
        assert!(left.len() > round && left.iter().all(|r| records(10).contains(r)));
        add(&path, &header(), records(20)).unwrap();
        assert_eq!(all(&path), sorted(records(20)));
    }
}
