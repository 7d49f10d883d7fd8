//! Plans in files, and the choice of the fastest, with the real cuDNN and without a GPU: plans are made for a profile.

use cudnn_graph::engine::Outcome;
use cudnn_graph::ir::Mode;
use cudnn_graph::{
    AttachError, DType, DeviceProfile, Error, Folder, Graph, Library, Limits, Plan, Planner, Plans, Policy, Target, Trial, Verified,
};
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A matrix product and an activation.
pub(crate) fn product(rows: i64, mode: Mode) -> Arc<Verified> {
    let mut g = Graph::new();
    let (a, b) = (g.input("a", DType::BF16, [1, rows, 128]), g.input("b", DType::BF16, [1, 128, 512]));
    let y = g.matmul(a, b);
    let y = g.pointwise(mode, &[y]);
    g.output(y, "y", DType::BF16);
    Arc::new(g.verify().unwrap())
}

/// Whether a plan was loaded from its JSON: the report of such a plan is empty.
fn is_loaded(plan: &Plan) -> bool {
    plan.report().candidates.is_empty()
}

fn records(folder: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.extension().is_some_and(|extension| extension == "record")).collect()
}

pub(crate) fn plans_are_kept_in_files(library: &'static Library) {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("plans");
    let (h200, a100) = (DeviceProfile::named("h200").unwrap(), DeviceProfile::named("a100").unwrap());
    let (target, other) = (Target::Profile(&h200), Target::Profile(&a100));
    let folder = || Folder::new(&path, 1 << 30);
    let with = |policy: Policy| Plans::new(library, policy, Limits::default()).with_folder(folder());
    let relu = product(256, Mode::ReluFwd);
    let fresh = || with(Policy::default()).get(&relu, &target).unwrap();

    let built = fresh();
    assert!(!is_loaded(&built));
    assert_eq!(records(&path).len(), 1);
    let loaded = fresh();
    assert!(is_loaded(&loaded));
    assert_eq!((loaded.workspace_bytes(), loaded.ports().device.len()), (built.workspace_bytes(), built.ports().device.len()));

    // Another graph, policy or device has no plan there.
    assert!(!is_loaded(&with(Policy::default()).get(&product(256, Mode::GeluFwd), &target).unwrap()));
    assert!(!is_loaded(&with(Policy::default()).get(&product(320, Mode::ReluFwd), &target).unwrap()));
    assert!(!is_loaded(&with(Policy::default().with_deterministic(true)).get(&relu, &target).unwrap()));
    assert_eq!(records(&path).len(), 4);
    assert!(!is_loaded(&with(Policy::default()).get(&relu, &other).unwrap()));
    // The key is equal for both devices, so the last one that was written stays.
    assert_eq!(records(&path).len(), 4);
    assert!(!is_loaded(&fresh()));

    // A file that is damaged anywhere, or cut off, is refused; the plan is built and written again.
    folder().clear().unwrap();
    fresh();
    let [file] = &records(&path)[..] else { panic!("{:?}", records(&path)) };
    let whole = std::fs::read(file).unwrap();
    for at in [0, 9, 20, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        std::fs::write(file, &damaged).unwrap();
        assert!(!is_loaded(&fresh()), "byte {at}");
        assert!(is_loaded(&fresh()), "byte {at}");
    }
    for length in [0, 11, whole.len() - 1] {
        std::fs::write(file, &whole[..length]).unwrap();
        assert!(!is_loaded(&fresh()), "{length} bytes");
        assert!(is_loaded(&fresh()), "{length} bytes");
    }

    // The folder is bounded, and nothing but records is left in it.
    let small = Plans::new(library, Policy::default(), Limits::default()).with_folder(Folder::new(parent.path().join("small"), 1000));
    small.get(&relu, &target).unwrap();
    assert!(!parent.path().join("small").exists());
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);

    // A file that one cache saves and another attaches.
    let saved = parent.path().join("saved");
    let plans = Plans::new(library, Policy::default(), Limits::default());
    plans.get(&relu, &target).unwrap();
    plans.get(&relu, &other).unwrap();
    assert_eq!(plans.save(&saved, &target).unwrap(), 1);
    let plans = Plans::new(library, Policy::default(), Limits::default());
    assert!(matches!(plans.attach(&saved, &other), Err(AttachError::Mismatch(_))));
    assert_eq!(plans.attach(&saved, &target).unwrap(), 1);
    assert!(is_loaded(&plans.get(&relu, &target).unwrap()));
    assert!(!is_loaded(&plans.get(&relu, &other).unwrap()));
    std::fs::write(&saved, &whole[..100]).unwrap();
    assert!(matches!(Plans::new(library, Policy::default(), Limits::default()).attach(&saved, &target), Err(AttachError::File(_))));
}

pub(crate) fn the_fastest_plan_is_found(library: &'static Library) {
    let profile = DeviceProfile::named("h200").unwrap();
    let target = Target::Profile(&profile);
    let graph = product(256, Mode::ReluFwd);
    let planner = Planner::new(library, graph.clone(), &target, &Policy::default()).unwrap();
    // The third plan is the fastest with the results of the first. The second one has others, and the rest fail.
    let calls = Cell::new(0u64);
    let seen = RefCell::new(Vec::new());
    let trial = |plan: &Plan| {
        calls.set(calls.get() + 1);
        seen.borrow_mut().push(plan.engine().unwrap().tag());
        match calls.get() {
            1 => Ok(Trial { time: Duration::from_micros(9), results: vec![1.0, 2.0] }),
            2 => Ok(Trial { time: Duration::from_micros(1), results: vec![0.0, 0.0] }),
            3 => Ok(Trial { time: Duration::from_micros(3), results: vec![1.0, 2.001] }),
            _ => Err(Error::PlanJson("not run".to_owned())),
        }
    };
    let fastest = planner.fastest(&target, 0.01, trial).unwrap();
    assert!(calls.get() >= 3, "{} engines", calls.get());
    let report = fastest.report();
    let ran = |outcome: &Outcome| !matches!(outcome, Outcome::Refused { .. } | Outcome::Failed { .. });
    let outcomes: Vec<String> = report.candidates.iter().filter(|c| ran(&c.outcome)).map(|c| format!("{:?}", c.outcome)).collect();
    assert!(outcomes[0].contains("it took 9µs, the chosen one 3µs"), "{report}");
    assert!(outcomes[1].contains("results differ from those of") && outcomes[1].contains("result 0 is 0, expected 1"), "{report}");
    assert_eq!(outcomes[2], "Chosen", "{report}");
    assert_eq!(fastest.engine().map(|engine| engine.tag()), seen.borrow().get(2).cloned());
    assert!(report.candidates.iter().all(|c| c.outcome != Outcome::NotTried), "{report}");

    // The cache keeps it apart from the untimed plan, and times it once.
    let plans = Plans::new(library, Policy::default(), Limits::default());
    let untimed = plans.get(&graph, &target).unwrap();
    calls.set(0);
    let tuned = plans.get_tuned(&graph, &target, 0.01, trial).unwrap();
    assert!(calls.get() >= 3 && !Arc::ptr_eq(&tuned, &untimed));
    calls.set(0);
    assert!(Arc::ptr_eq(&tuned, &plans.get_tuned(&graph, &target, 0.01, trial).unwrap()));
    assert_eq!(calls.get(), 0);
    assert!(Arc::ptr_eq(&untimed, &plans.get(&graph, &target).unwrap()));
}
