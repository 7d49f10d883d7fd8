//! Kernels that are kept in files: the next executor compiles none of them, and computes the same.

use super::executor;
use conformance::case::Case;
use conformance::runner::{Outcome, run_case};
use sdpa::cache::What;
use sdpa::cuda::kernel::MachineCode;
use sdpa::cuda::{CudaExecutor, Family, KernelFileError, KernelHead, Target, files};
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::planfile::{self, Digest, Header, PlanFileError, Record};
use sdpa::{AttentionSpec, DType, Layout, Shape};

const SHAPE: Shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 70, seq_kv: 90, dim_qk: 64, dim_v: 64 };

/// Of each kernel that was made, whether it came out of a file.
fn from_files(executor: &CudaExecutor) -> Vec<bool> {
    let [_, kernels] = executor.snapshots();
    let made = kernels.events.iter().filter_map(|event| if let What::Built { time, .. } = &event.what { Some(time) } else { None });
    made.map(|time| !time.load.is_zero() && time.compile.is_zero()).collect()
}

#[test]
fn kernels_of_a_file_are_not_compiled() {
    let Some(first) = executor() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernels");
    let cases = Case::all_few().unwrap();
    let case = cases.first().unwrap();
    let run = |executor: &CudaExecutor| assert!(matches!(run_case(case, executor), Outcome::Pass(..)), "{}", case.name);
    run(&first);
    assert_eq!(from_files(&first), [false]);
    assert_eq!(first.save(&path).unwrap(), 1);
    let second = executor().unwrap();
    assert_eq!((second.attach(&path).unwrap(), second.attached()), (1, 1));
    run(&second);
    assert_eq!(from_files(&second), [true]);
    // What is there stays as it is.
    assert_eq!(second.save(&path).unwrap(), 1);
    assert!(KernelHead::is_of(&path).unwrap());
    assert_eq!(second.without_kernels(), [None]);

    // A kernel that is damaged is compiled, and so is what is no machine code.
    let whole = std::fs::read(&path).unwrap();
    let mut bytes = whole.clone();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let third = executor().unwrap();
    third.attach(&path).unwrap();
    run(&third);
    assert_eq!(from_files(&third), [false]);
    let empty = folder.path().join("empty");
    planfile::add(&empty, &KernelHead { kernels: 1 }, []).unwrap();
    third.attach(&empty).unwrap();
    let [Some(damaged), Some(absent)] = &third.without_kernels()[..] else { panic!("{:?}", third.without_kernels()) };
    assert!(damaged.contains("the checksum of its payload") && absent == "has no kernel for this problem", "{damaged}; {absent}");
    // In front of its kernels nothing says what the file is of.
    for at in [0, 9, 20, 70, 100] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let told = KernelHead::is_of(&path).unwrap_err().to_string();
        assert!(!told.contains("cudnn") && executor().unwrap().attach(&path).unwrap_err().to_string() == told, "{at}: {told}");
    }
}

#[test]
fn kernels_compiled_without_a_device_are_those_that_it_asks_for() {
    let Some(executor) = executor() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernels");
    let target = Target::of(executor.device());
    let case = &Case::all_few().unwrap()[0];
    let problem = case.spec().unwrap().validate().unwrap();
    let gradient = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd).backward().validate().unwrap();
    for (job, texts) in [(Job::from(problem), 1), (gradient.clone().into(), 1)] {
        let kernels = target.kernels(&job).unwrap();
        assert_eq!(kernels.len(), texts);
        files::add(&path, kernels.into_iter().map(|key| MachineCode::compile(executor.nvrtc(), key).unwrap())).unwrap();
    }
    files::takes(&path).unwrap();
    assert_eq!(executor.attach(&path).unwrap(), 2);
    assert!(matches!(run_case(case, &executor), Outcome::Pass(..)), "{}", case.name);
    executor.gradient(&gradient).unwrap();
    assert_eq!(from_files(&executor), [true; 2]);
    // Keys are split where multiprocessors are many: the text is another.
    let long = Shape { seq_q: 300, seq_kv: 1 << 16, ..SHAPE };
    let job = Job::from(AttentionSpec::dense(DType::BF16, long, Layout::Bhsd).validate().unwrap());
    assert!(Target::new(90, 1).kernels(&job).unwrap() != Target::new(90, 132).kernels(&job).unwrap());
    // A family that the device does not run is refused, and one that it runs is another text.
    let other = Target { family: Some(Family::Mma), ..target };
    assert_eq!(other.kernels(&gradient.clone().into()).unwrap().len(), 2);
    let none = Target { family: Some(Family::Wgmma), ..Target::new(80, 108) };
    assert!(none.kernels(&gradient.into()).unwrap_err().to_string().contains("compute capability: got 8.0"));
}

#[test]
fn files_that_are_none_of_kernels_are_told() {
    let Some(executor) = executor() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [plans, newer, none] = ["plans", "newer", "none"].map(|name| folder.path().join(name));
    let profile = r#"{"deviceName": "X", "deviceVer": 900, "multiProcessorCount": 132}"#.to_owned();
    let record = || [Record { key: Digest::of(b"x"), label: "x".to_owned(), payload: b"x".to_vec() }];
    planfile::add(&plans, &Header { cudnn: "9.19.0".to_owned(), profile, lowering: 1 }, record()).unwrap();
    planfile::add(&newer, &KernelHead { kernels: 9 }, record()).unwrap();
    let Err(KernelFileError::File(PlanFileError::Corrupt { what, .. })) = executor.attach(&plans) else { panic!() };
    assert_eq!(what, "header");
    let other = executor.attach(&newer).unwrap_err();
    assert_eq!(other.to_string(), "kernels: the file has version 9 of the key format, expected 1; compile it again with this release");
    assert!(matches!(executor.attach(&none), Err(KernelFileError::File(PlanFileError::Io { .. }))));
    assert!(!KernelHead::is_of(&plans).unwrap() && executor.attached() == 0);
    assert!(matches!(KernelHead::is_of(&none), Err(PlanFileError::Io { .. })));
}
