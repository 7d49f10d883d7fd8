//! Truncated and changed files: reading returns errors, never wrong bytes.

use super::*;

/// Reads every record of a file that may be damaged, and checks that only right bytes are returned. Returns the errors.
fn never_wrong(path: &Path, good: &[Record]) -> Vec<PlanFileError> {
    let file = match PlanFile::open(path) {
        Ok(file) => file,
        Err(e) => return vec![e],
    };
    assert_eq!(file.header(), &header());
    let mut errors = Vec::new();
    for record in good {
        match file.read(&record.key) {
            Ok(payload) => assert_eq!(payload.as_ref(), Some(&record.payload)),
            Err(e) => errors.push(e),
        }
    }
    errors
}

#[test]
fn every_truncation_is_seen_when_a_file_is_opened() {
    let good = records(3);
    let bytes = image(good.clone());
    let (_folder, path) = place();
    for length in 0..bytes.len() {
        put(&path, &bytes[..length]);
        let errors = never_wrong(&path, &good);
        assert!(matches!(errors[..], [PlanFileError::Truncated { has, needs, .. }] if has == length as u64 && needs > has), "{errors:?}");
    }
    put(&path, &bytes);
    assert!(never_wrong(&path, &good).is_empty());
}

#[test]
fn every_truncation_of_a_file_in_use_is_seen() {
    let bytes = image(records(3));
    let (_folder, path) = place();
    for length in 0..bytes.len() {
        put(&path, &bytes);
        let file = PlanFile::open(&path).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length as u64).unwrap();
        let mut cut = 0;
        for record in records(3) {
            match file.read(&record.key) {
                Ok(payload) => assert_eq!(payload, Some(record.payload)),
                Err(PlanFileError::Truncated { has, needs, .. }) if has == length as u64 && needs > has => cut += 1,
                Err(e) => panic!("{length}: {e}"),
            }
        }
        assert!(cut >= 1 || bytes.len() == length);
    }
}

#[test]
fn every_changed_byte_is_seen_or_does_not_matter() {
    let good = records(3);
    let bytes = image(good.clone());
    let payloads = bytes.len() - good.iter().map(|r| r.payload.len()).sum::<usize>();
    let (_folder, path) = place();
    for at in 0..bytes.len() {
        for flip in [1, 2, 4, 8, 16, 32, 64, 128, 255] {
            let mut changed = bytes.clone();
            changed[at] ^= flip;
            put(&path, &changed);
            let errors = never_wrong(&path, &good);
            assert_eq!(errors.len(), 1, "byte {at} xor {flip}: {errors:?}");
            if at >= payloads {
                assert!(matches!(errors[..], [PlanFileError::Damaged { .. }]), "byte {at} xor {flip}: {errors:?}");
                assert_eq!(PlanFile::open(&path).unwrap().entries().len(), good.len());
            }
        }
    }
}

#[test]
fn bytes_behind_the_end_are_seen() {
    let mut bytes = image(records(2));
    bytes.push(0);
    let (_folder, path) = place();
    put(&path, &bytes);
    let error = PlanFile::open(&path).unwrap_err();
    assert!(matches!(&error, PlanFileError::Corrupt { what, .. } if what == "length"), "{error}");
}

#[test]
fn damaged_files_are_written_anew() {
    let bytes = image(records(3));
    let (_folder, path) = place();
    let in_header = {
        let mut changed = bytes.clone();
        changed[30] ^= 1;
        changed
    };
    for damaged in [&bytes[..0], &bytes[..7], &bytes[..100], &bytes[..bytes.len() - 1], &in_header] {
        put(&path, damaged);
        add(&path, &header(), [record(9)]).unwrap();
        assert_eq!(all(&path), [record(9)]);
    }
}

#[test]
fn of_a_file_with_a_damaged_payload_the_others_stay() {
    let mut bytes = image(records(5));
    *bytes.last_mut().unwrap() ^= 1;
    let last = sorted(records(5)).last().unwrap().clone();
    let (_folder, path) = place();
    put(&path, &bytes);
    let intact: Vec<Record> = sorted(records(5)).into_iter().filter(|r| *r != last).collect();
    add(&path, &header(), []).unwrap();
    assert_eq!(all(&path), intact);
    // Writing the record again repairs it.
    put(&path, &bytes);
    add(&path, &header(), [last]).unwrap();
    assert_eq!(all(&path), sorted(records(5)));
}

#[test]
fn what_is_no_file_of_plans_is_not_written_over_by_adding() {
    let (folder, path) = place();
    let newer = {
        let mut bytes = image(records(2));
        bytes[8] = 2;
        bytes
    };
    for (bytes, is_newer) in [(&newer[..], true), (&newer[..12], true), (b"GIF", false), (b"a letter to somebody", false)] {
        put(&path, bytes);
        for error in [PlanFile::open(&path).unwrap_err(), add(&path, &header(), records(1)).unwrap_err()] {
            let expected = match is_newer {
                true => matches!(error, PlanFileError::Newer { found: 2, known: 1, .. }),
                false => matches!(error, PlanFileError::NotAPlanFile { .. }),
            };
            assert!(expected, "{error}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        assert_eq!(names(folder.path()), ["plans"]);
    }
}
