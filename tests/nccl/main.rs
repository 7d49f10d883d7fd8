//! NCCL: the loader over the real library where there is one, communicators over the emulation. It needs no GPU. NCCL may load the CUDA driver, so this is a process of its own.

mod backend;
#[path = "../../sdpa/parallel/tests/ranks/case.rs"]
mod case;
mod communicators;
mod device_failures;
#[path = "../../sdpa/parallel/tests/ranks/harness.rs"]
mod harness;
mod kernels;
#[path = "../../sdpa/parallel/tests/ranks/parameters.rs"]
mod parameters;
mod planner;
#[path = "../../sdpa/parallel/tests/ranks/results.rs"]
mod results;
mod shared;

use conformance::golden::repository;
use conformance::say::skip;
use sdpa_driver::{Communicator, Error, Nccl, Rank};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_missing_or_wrong_library_is_a_typed_error() {
    let missing = Nccl::load(Some(Path::new("/nowhere/libnccl.so.2"))).unwrap_err();
    assert!(missing.is_absence() && missing.to_string().contains("/nowhere/libnccl.so.2"), "{missing}");
    let text = Nccl::load(Some(&repository("Cargo.toml"))).unwrap_err();
    assert!(matches!(&text, Error::Library { library: "NCCL (libnccl.so.2)", .. }), "{text}");
    // A folder is searched for the library's file name.
    let folder = Nccl::load(Some(&repository("docs"))).unwrap_err();
    assert!(folder.to_string().contains("docs/libnccl.so.2"), "{folder}");
    if cfg!(target_os = "linux") {
        let other = Nccl::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(other.is_absence(), "{other}");
    }
}

#[test]
fn the_real_library_answers_without_a_gpu() {
    let nccl = match Nccl::load(None) {
        Ok(nccl) => nccl,
        Err(error) if error.is_absence() => return skip("nccl", &error.to_string()),
        Err(error) => panic!("{error}"),
    };
    assert!(nccl.version() >= [2, 18, 0] && nccl.path().is_absolute(), "{nccl:?}");
    let ids = [nccl.unique_id().unwrap(), nccl.unique_id().unwrap()];
    let is_fixed = std::env::var_os("NCCL_COMM_ID").is_some();
    assert!(ids.iter().all(|id| id.bytes.iter().any(|byte| *byte != 0)) && (ids[0] == ids[1]) == is_fixed);
    assert_eq!(format!("{:?}", ids[0]), "UniqueId");
    let texts = [0, 1, 4, 12_345].map(|code| nccl.error_text(code));
    assert_eq!(texts[0], "no error");
    assert!(texts[1].contains("cuda") && texts[2].contains("argument") && !texts[3].is_empty(), "{texts:?}");
    // NCCL finds no device that it could use.
    if let Some((_, device)) = communicators::open() {
        let alone = Rank { rank: 0, size: 1, local: 0 };
        let error = Communicator::new(&Arc::new(Nccl::load(None).unwrap()), device, &ids[0], alone, Duration::from_secs(30)).unwrap_err();
        assert!(matches!(error, Error::Nccl { call: "ncclCommInitRankConfig", .. }), "{error}");
    }
    // Another search finds the library that is loaded by now.
    let again = Nccl::load(None).unwrap();
    assert_eq!((again.path(), again.version()), (nccl.path(), nccl.version()));
}
