//! The kernel cache on disk: another executor, and another process, compiles none of what is in it; whatever is wrong with it, kernels are compiled and right.

use super::executor;
use conformance::case::Case;
use conformance::runner::{Outcome, run_case};
use sdpa::cuda::kernel::Origin;
use sdpa::cuda::{CudaExecutor, KernelCache};
use sdpa::nvidia::Job;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn case() -> Case {
    Case::all_few().unwrap().swap_remove(0)
}

fn executor_with(cache: &KernelCache) -> Option<CudaExecutor> {
    let executor = executor()?;
    executor.set_kernel_cache(Some(cache.clone()));
    Some(executor)
}

/// Computes the case in a new executor, and says where its kernel came from.
fn computed(cache: &KernelCache) -> Option<Origin> {
    let executor = executor_with(cache)?;
    assert!(matches!(run_case(&case(), &executor), Outcome::Pass(..)));
    let origins = executor.origins();
    let [origin] = origins[..] else { panic!("{origins:?}") };
    Some(origin)
}

#[test]
fn a_miss_tells_whether_its_call_compiles_or_only_binds() {
    let parent = tempfile::tempdir().unwrap();
    let cache = KernelCache::new(parent.path().join("kernels"));
    let Some(executor) = executor_with(&cache) else { return };
    let mut spec = case().spec().unwrap();
    let problem = spec.clone().validate().unwrap();
    (spec.k.dims[2], spec.v.dims[2]) = (spec.k.dims[2] - 1, spec.v.dims[2] - 1);
    let shorter = Job::from(spec.validate().unwrap());
    let notes = |executor: &CudaExecutor, job: &Job| executor.explain(job).notes;
    let job = Job::from(problem);
    assert_eq!(notes(&executor, &job), ["the first call compiles 1 of 1 kernels with NVRTC"]);
    assert!(matches!(run_case(&case(), &executor), Outcome::Pass(..)));
    assert_eq!(notes(&executor, &job), Vec::<String>::new());
    assert_eq!(notes(&executor, &shorter), ["the first call compiles nothing: it binds new numbers to kernels in memory"]);
    let other = executor_with(&cache).unwrap();
    assert_eq!(notes(&other, &job), ["the first call compiles nothing: it loads 1 of 1 kernels from a file or the kernel cache on disk"]);
}

fn entry(cache: &KernelCache) -> PathBuf {
    let mut files: Vec<PathBuf> = std::fs::read_dir(cache.folder()).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files.swap_remove(0)
}

#[test]
fn a_kernel_is_compiled_once_and_what_is_damaged_is_compiled_again() {
    let parent = tempfile::tempdir().unwrap();
    let cache = KernelCache::new(parent.path().join("kernels"));
    let Some(first) = computed(&cache) else { return };
    assert_eq!((first, computed(&cache)), (Origin::Compiled, Some(Origin::Cache)));
    assert_eq!(cache.usage().unwrap().records, 1);
    let file = entry(&cache);
    let whole = std::fs::read(&file).unwrap();
    // Before the version, in the index, in the machine code.
    for at in [3, 120, whole.len() - 9] {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(computed(&cache), Some(Origin::Compiled), "byte {at}");
        assert_eq!(std::fs::read(&file).unwrap().len(), whole.len());
        assert_eq!(computed(&cache), Some(Origin::Cache), "byte {at}");
    }
    assert_eq!(cache.clear().unwrap().records, 1);
    // Off: nothing is written.
    let executor = executor_with(&cache).unwrap();
    executor.set_kernel_cache(None);
    assert!(matches!(run_case(&case(), &executor), Outcome::Pass(..)));
    assert_eq!((cache.usage().unwrap().records, executor.origins()), (0, vec![Origin::Compiled]));
    assert_eq!(executor.kernel_cache(), None);
}

#[test]
fn a_folder_that_cannot_be_used_fails_no_call() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let folder = |name: &str| {
        let path = parent.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let mut folders = vec![file.join("kernels"), file];
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let set = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        let (read_only, shared) = (folder("read-only"), folder("shared"));
        set(&read_only, 0o500);
        set(&shared, 0o770);
        // Root writes anywhere.
        let is_root = std::fs::write(read_only.join("x"), "x").is_ok();
        folders.extend((!is_root).then_some(read_only));
        folders.push(shared);
    }
    for path in folders {
        let cache = KernelCache::new(&path);
        let Some(origin) = computed(&cache) else { return };
        assert_eq!(origin, Origin::Compiled, "{}", path.display());
        assert!(!path.is_dir() || std::fs::read_dir(&path).unwrap().next().is_none(), "{}", path.display());
    }
}

/// The folder of a process that is started by the test below.
const FOLDER: &str = "SDPA_TEST_KERNELS";

#[test]
#[ignore = "one process of the next test"]
fn one_process() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    if let Some(origin) = computed(&KernelCache::new(folder)) {
        println!("origin: {origin:?}");
    }
}

fn start(folder: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "disk::one_process", "--ignored", "--nocapture"]).env(FOLDER, folder);
    command.stdout(Stdio::piped()).spawn().unwrap()
}

fn end(process: Child) -> Option<String> {
    let output = process.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {said}", output.status);
    said.split("origin: ").nth(1).map(|rest| rest.split_whitespace().next().unwrap().to_owned())
}

#[test]
fn processes_share_kernels() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("kernels");
    // At once: each has its kernel, and there is one file.
    let both = [(); 2].map(|()| start(&folder)).map(end);
    let [Some(_), Some(_)] = both else { return };
    let cache = KernelCache::new(&folder);
    entry(&cache);
    assert_eq!(end(start(&folder)).as_deref(), Some("Cache"));
}
