//! Properties of every plan file. Submodules test damaged, shared and crafted files, and paths that cannot be plan files.

mod crafted;
mod damage;
mod places;
mod sharing;

use super::*;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Returns a folder that only its owner can access, whatever the umask, and a path in it.
fn place() -> (TempDir, PathBuf) {
    let mut builder = tempfile::Builder::new();
    builder.prefix("sdpa-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
    let folder = builder.tempdir().unwrap();
    let path = folder.path().join("plans");
    (folder, path)
}

fn header() -> Header {
    let profile = r#"{"deviceName":"X","deviceVer":900,"multiProcessorCount":132,"smClockRateKHz":5}"#;
    Header { cudnn: "9.19.0".to_owned(), profile: profile.to_owned(), lowering: 1 }
}

/// Returns a record that differs in everything for each `n`. The first payload is empty.
fn record(n: u8) -> Record {
    let payload = (0..usize::from(n) * 7).map(|i| (i * 31 + usize::from(n)) as u8).collect();
    Record { key: Digest::of(&[n]), label: format!("record {n} – \"x\"\n"), payload }
}

fn records(n: u8) -> Vec<Record> {
    (0..n).map(record).collect()
}

/// Returns the bytes of a file with these records.
fn image(records: Vec<Record>) -> Vec<u8> {
    let (_folder, path) = place();
    write(&path, &header(), records).unwrap();
    std::fs::read(path).unwrap()
}

/// Writes a file in place with these bytes and with a readable mode, whatever the umask.
fn put(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
    #[cfg(unix)]
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
}

/// Reads every record of a valid file.
fn all(path: &Path) -> Vec<Record> {
    let file = PlanFile::open(path).unwrap();
    file.entries()
        .map(|e| Record { key: e.key, label: e.label.clone(), payload: file.read(&e.key).unwrap().unwrap() })
        .inspect(|record| assert!(file.entries().any(|e| (e.key, e.bytes) == (record.key, record.payload.len() as u64))))
        .collect()
}

fn sorted(mut records: Vec<Record>) -> Vec<Record> {
    records.sort_by_key(|record| record.key);
    records
}

/// Returns the file names in a folder, except locks.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.ends_with(".lock"));
    names.sort();
    names
}

#[test]
fn what_was_written_is_read() {
    for n in [0, 1, 50] {
        let (folder, path) = place();
        write(&path, &header(), records(n)).unwrap();
        let file = PlanFile::open(&path).unwrap();
        assert_eq!(file.header(), &header());
        assert_eq!(file.entries().len(), usize::from(n));
        assert_eq!(file.read(&Digest::of(b"not there")).unwrap(), None);
        assert_eq!(all(&path), sorted(records(n)));
        assert_eq!(names(folder.path()), ["plans"]);
    }
}

#[test]
fn equal_records_make_equal_files_in_any_order_and_the_last_of_a_key_counts() {
    let old = Record { payload: b"old".to_vec(), ..record(3) };
    let turned: Vec<Record> = std::iter::once(old).chain(records(9).into_iter().rev()).collect();
    assert_eq!(image(turned), image(records(9)));
}

#[test]
fn records_are_added_and_replaced() {
    let (folder, path) = place();
    add(&path, &header(), records(2)).unwrap();
    let newer = Record { payload: b"newer".to_vec(), ..record(1) };
    add(&path, &header(), [newer.clone(), record(2)]).unwrap();
    let expected = sorted(vec![record(0), newer, record(2)]);
    assert_eq!(all(&path), expected);
    add(&path, &header(), []).unwrap();
    assert_eq!(all(&path), expected);
    assert_eq!(names(folder.path()), ["plans"]);
}

#[cfg(unix)]
#[test]
fn a_file_is_left_alone_when_nothing_is_new() {
    use std::os::unix::fs::MetadataExt;
    let (_folder, path) = place();
    add(&path, &header(), records(3)).unwrap();
    let inode = || std::fs::metadata(&path).unwrap().ino();
    let before = inode();
    add(&path, &header(), [record(1)]).unwrap();
    assert_eq!(inode(), before);
    add(&path, &header(), [record(3)]).unwrap();
    assert_ne!(inode(), before);
}

#[test]
fn a_file_for_something_else_is_replaced() {
    let others = [
        Header { cudnn: "9.21.0".to_owned(), ..header() },
        Header { lowering: 2, ..header() },
        Header { profile: header().profile.replace("900", "1000"), ..header() },
    ];
    for other in others {
        let (_folder, path) = place();
        write(&path, &other, records(3)).unwrap();
        add(&path, &header(), [record(5)]).unwrap();
        assert_eq!(PlanFile::open(&path).unwrap().header(), &header());
        assert_eq!(all(&path), [record(5)]);
    }
}

#[test]
fn another_card_of_the_same_kind_adds_to_the_file() {
    let (_folder, path) = place();
    let with = |more: &str| Header { profile: header().profile.replace('}', more), ..header() };
    let other = with(r#","warpSize":32}"#);
    write(&path, &header(), records(2)).unwrap();
    add(&path, &other, [record(5)]).unwrap();
    add(&path, &header(), [record(6)]).unwrap();
    assert_eq!(all(&path).len(), 4);
    let file = PlanFile::open(&path).unwrap();
    assert_eq!((file.header().mismatch(&other), file.header().mismatch(&header())), (None, None));
    // One record was made for another warp size, so the file does not match.
    assert!(file.header().mismatch(&with(r#","warpSize":64}"#)).is_some());
}

#[test]
fn what_breaks_a_limit_is_not_written() {
    let (folder, path) = place();
    let cases = [
        ("device profile", Header { profile: "{}".to_owned(), ..header() }, record(1)),
        ("length of the header", Header { cudnn: "9".repeat(1 << 20), ..header() }, record(1)),
        ("length of a label", header(), Record { label: "x".repeat(1025), ..record(1) }),
        ("length of a payload", header(), Record { payload: vec![0; (1 << 26) + 1], ..record(1) }),
    ];
    for (field, header, record) in cases {
        for result in [write(&path, &header, [record.clone()]), add(&path, &header, [record.clone()])] {
            let Err(PlanFileError::Refused { what, .. }) = result else { panic!("{field}: {result:?}") };
            assert_eq!(what, field);
        }
    }
    let many = (0..(1_u32 << 16) + 1).map(|n| Record { key: Digest::of(&n.to_le_bytes()), label: String::new(), payload: Vec::new() });
    let error = write(&path, &header(), many).unwrap_err();
    assert!(error.to_string().ends_with("the number of records is 65537, expected at most 65536"), "{error}");
    assert!(names(folder.path()).is_empty());
    let most = Record { label: "x".repeat(1024), ..record(1) };
    write(&path, &header(), [most.clone()]).unwrap();
    assert_eq!(all(&path), [most]);
}

#[test]
fn threads_share_a_file() {
    fn shared<T: Send + Sync>(_: &T) {}
    let (_folder, path) = place();
    write(&path, &header(), records(9)).unwrap();
    let file = PlanFile::open(&path).unwrap();
    shared(&file);
    std::thread::scope(|scope| {
        for first in 0..4 {
            let file = &file;
            scope.spawn(move || {
                for n in (0..200).map(|i| (first + i) as u8 % 9) {
                    assert_eq!(file.read(&record(n).key).unwrap(), Some(record(n).payload));
                }
            });
        }
    });
}
