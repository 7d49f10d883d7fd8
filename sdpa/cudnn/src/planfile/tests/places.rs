//! Paths that cannot be plan files.

use super::*;

#[test]
fn a_folder_that_is_not_there() {
    let (folder, _) = place();
    let path = folder.path().join("none").join("plans");
    for result in [write(&path, &header(), records(1)), add(&path, &header(), records(1)), PlanFile::open(&path).map(drop)] {
        assert!(matches!(result, Err(PlanFileError::Io { .. })), "{result:?}");
    }
    assert!(names(folder.path()).is_empty());
    assert!(matches!(PlanFile::open(folder.path().join("plans")), Err(PlanFileError::Io { .. })));
}

/// Checks that a path can be neither read nor replaced, and that no other file is left next to it.
fn is_no_file(path: &Path) {
    let folder = path.parent().unwrap();
    let (before, kind) = (names(folder), std::fs::symlink_metadata(path).unwrap().file_type());
    for result in [write(path, &header(), records(1)), add(path, &header(), records(1)), PlanFile::open(path).map(drop)] {
        assert!(matches!(&result, Err(PlanFileError::NotAFile { path: named }) if named == path), "{result:?}");
    }
    assert_eq!(names(folder), before);
    assert_eq!(std::fs::symlink_metadata(path).unwrap().file_type(), kind);
    assert!(!folder.join("plans.lock").exists());
}

#[test]
fn a_folder() {
    let (folder, path) = place();
    std::fs::create_dir(&path).unwrap();
    is_no_file(&path);
    for path in ["", ".", "..", "/"] {
        assert!(write(path, &header(), records(1)).is_err());
        assert!(PlanFile::open(path).is_err());
    }
    assert_eq!(names(folder.path()), ["plans"]);
}

#[cfg(unix)]
mod unix {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_pipe_a_link_to_one_and_a_link_to_a_folder() {
        let (folder, path) = place();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        is_no_file(&pipe);
        symlink(&pipe, &path).unwrap();
        is_no_file(&path);
        std::fs::remove_file(&path).unwrap();
        symlink(folder.path(), &path).unwrap();
        is_no_file(&path);
    }

    #[test]
    fn a_link_to_nothing() {
        let (folder, path) = place();
        symlink(folder.path().join("none"), &path).unwrap();
        for result in [write(&path, &header(), records(1)), add(&path, &header(), records(1))] {
            assert!(matches!(result, Err(PlanFileError::NotAFile { .. })), "{result:?}");
        }
        assert!(matches!(PlanFile::open(&path), Err(PlanFileError::Io { .. })));
        assert_eq!(names(folder.path()), ["plans"]);
    }

    #[test]
    fn a_link_to_a_file_stays_one() {
        let (folder, path) = place();
        let real = folder.path().join("real");
        write(&real, &header(), records(1)).unwrap();
        symlink("real", &path).unwrap();
        add(&path, &header(), records(3)).unwrap();
        assert!(std::fs::symlink_metadata(&path).unwrap().is_symlink());
        assert_eq!(all(&real), sorted(records(3)));
        assert_eq!(all(&path), all(&real));
    }

    #[test]
    fn files_are_never_for_everybody_to_write() {
        let (folder, path) = place();
        write(&path, &header(), records(1)).unwrap();
        assert_eq!(mode(&path) & !0o644, 0);
        add(&path, &header(), records(2)).unwrap();
        assert_eq!(mode(&path) & !0o644, 0);
        assert_eq!(mode(&folder.path().join("plans.lock")) & !0o644, 0);
    }

    #[test]
    fn a_file_that_everybody_may_write_is_not_read() {
        let (_folder, path) = place();
        write(&path, &header(), records(1)).unwrap();
        for bad in [0o666, 0o602] {
            set_mode(&path, bad);
            for result in [PlanFile::open(&path).map(drop), add(&path, &header(), records(2))] {
                assert!(matches!(&result, Err(PlanFileError::Permissions { path: named, mode }) if *named == path && *mode == bad));
            }
        }
        set_mode(&path, 0o664);
        assert_eq!(all(&path), records(1));
    }

    #[test]
    fn a_folder_where_everybody_may_replace_files_is_not_used() {
        let (folder, path) = place();
        write(&path, &header(), records(1)).unwrap();
        let (elsewhere, link) = place();
        symlink(&path, &link).unwrap();
        for open in [folder.path(), elsewhere.path()] {
            set_mode(open, 0o777);
            for result in [PlanFile::open(&link).map(drop), write(&link, &header(), []), add(&link, &header(), [])] {
                assert!(matches!(result, Err(PlanFileError::Permissions { mode: 0o777, .. })), "{result:?}");
            }
            // The sticky bit protects files from users other than their owners.
            set_mode(open, 0o1777);
            assert_eq!(all(&link), records(1));
            set_mode(open, 0o700);
        }
    }
}
