//! A bounded cache of plans for any graph, in memory and in files. It explains its misses by the lines of graphs that differ.

mod file;
mod header;

pub use crate::kernels::KernelStats;
pub use file::AttachError;
pub use header::{Header, Mismatch};

use crate::encode::TooNew;
use crate::engine::{EngineReport, Policy};
use crate::error::Error;
use crate::ffi::Library;
use crate::ffi::codes::Status;
use crate::ir::Verified;
use crate::kernels::Kernels;
use crate::plan::{Plan, Planner};
use crate::profile::Target;
use crate::tune::Trial;
use file::Files;
use sdpa_cache::planfile::{Digest, Folder};
use sdpa_cache::{
    BuildError, CacheKey, CacheSnapshot, CacheStats, CacheValue, Difference, Explanation, Fields, Limits, PlanCache, State, Weight,
};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The key of a plan. The printed graph has everything that distinguishes it from another: structure, types, extents, strides, alignments and
/// constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PlanKey {
    graph: Arc<str>,
    device: Arc<str>,
    policy: Policy,
    tuned: bool,
}

impl CacheKey for PlanKey {
    fn label(&self) -> String {
        let [_, ops] = lines(&self.graph);
        let last = ops.last().map_or("nothing", |line| line.trim());
        format!("a graph of {} ops that ends with {last}", ops.len())
    }

    fn fields(&self) -> Fields {
        vec![
            ("graph", self.graph.to_string()),
            ("device", self.device.to_string()),
            ("policy", format!("{:?}", self.policy)),
            ("tuned", self.tuned.to_string()),
        ]
    }
}

/// Returns the lines of tensors and the lines of ops of a printed graph. Those of tensors begin with their number, such as `t12`.
fn lines(graph: &str) -> [Vec<&str>; 2] {
    let is_tensor = |line: &&str| line.strip_prefix('t').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let (tensors, ops) = graph.lines().partition(is_tensor);
    [tensors, ops]
}

/// A plan in the cache, with its key in files.
#[derive(Clone, Debug)]
struct Cached {
    plan: Arc<Plan>,
    key: Option<Digest>,
}

impl CacheValue for Cached {
    fn weight(&self) -> Weight {
        let code = self.plan.code_bytes();
        Weight { host: code, device: code, workspace: self.plan.workspace_bytes() }
    }
}

/// Why a graph has no plan, as the cache remembers it.
#[derive(Clone, Debug)]
enum Refusal {
    NoEngine(Box<EngineReport>),
    TooNew(TooNew),
    Cudnn { call: &'static str, subject: String, status: Status, text: String },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Failed::again(self.clone()).0, f)
    }
}

/// An error of planning a graph.
#[derive(Debug)]
struct Failed(Error);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl BuildError for Failed {
    type Refusal = Refusal;

    fn refusal(&self) -> Option<Refusal> {
        match &self.0 {
            Error::NoEngine(report) => Some(Refusal::NoEngine(report.clone())),
            Error::TooNew(why) => Some(Refusal::TooNew(why.clone())),
            Error::Cudnn { call, subject, status, text } if status.is_unsupported() => {
                Some(Refusal::Cudnn { call, subject: subject.clone(), status: *status, text: text.clone() })
            }
            Error::Driver(_)
            | Error::TooOld { .. }
            | Error::OtherLibrary { .. }
            | Error::Cudnn { .. }
            | Error::Verify(_)
            | Error::Program(_)
            | Error::Bindings(_)
            | Error::PlanJson(_)
            | Error::Profile { .. }
            | Error::OtherDevice { .. } => None,
        }
    }

    fn again(refusal: Refusal) -> Failed {
        Failed(match refusal {
            Refusal::NoEngine(report) => Error::NoEngine(report),
            Refusal::TooNew(why) => Error::TooNew(why),
            Refusal::Cudnn { call, subject, status, text } => Error::Cudnn { call, subject, status, text },
        })
    }
}

/// A bounded cache of plans: each graph is planned once for a device and a policy, however many threads request it.
///
/// ```no_run
/// use cudnn_graph::{DType, DeviceProfile, Graph, Library, Limits, Plans, Policy, Search, Target};
/// use std::sync::Arc;
///
/// let plans = Plans::new(Library::load(&Search::default())?, Policy::default(), Limits::default());
/// let profile = DeviceProfile::named("h200")?;
/// let target = Target::Profile(&profile);
/// let product = |rows: i64| {
///     let mut g = Graph::new();
///     let (a, b) = (g.input("a", DType::BF16, [1, rows, 128]), g.input("b", DType::BF16, [1, 128, 512]));
///     let y = g.matmul(a, b);
///     g.output(y, "y", DType::BF16);
///     g.verify().map(Arc::new)
/// };
/// let plan = plans.get(&product(256)?, &target)?;
/// assert!(Arc::ptr_eq(&plan, &plans.get(&product(256)?, &target)?));
/// // The lines of tensors whose extents differ.
/// let wider = product(300)?;
/// println!("{}", plans.explain(&wider, &target));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Plans {
    library: &'static Library,
    policy: Policy,
    cache: PlanCache<PlanKey, Cached, Refusal>,
    kernels: Kernels,
    files: Files,
}

impl Plans {
    /// Creates an empty cache for plans of this library under this policy.
    pub fn new(library: &'static Library, policy: Policy, limits: Limits) -> Plans {
        Plans { library, policy, cache: PlanCache::new("cudnn-graph", limits), kernels: Kernels::default(), files: Files::default() }
    }

    /// Looks for plans in a folder before it builds them, and writes built plans there. Processes of one user may share it.
    ///
    /// [`Folder`] bounds the size of its files, replaces them as a whole, and refuses files that other users may write. A plan of another version of
    /// cuDNN or another kind of device is not used. A damaged one is built anew, with a warning through `tracing`. **A plan contains machine code:
    /// name only folders that you trust.**
    #[must_use]
    pub fn with_folder(mut self, folder: Folder) -> Plans {
        self.files.folder = Some(folder);
        self
    }

    /// Attaches a file of [`Plans::save`]: from now on the cache looks for plans there before it builds them. Only the index is read now. Returns
    /// the number of plans in the file. **A plan contains machine code: attach only files that you trust.**
    ///
    /// # Errors
    /// Fails if the file is not a valid plan file, or if it was made for another version of cuDNN or another kind of device than the target's.
    pub fn attach(&self, path: impl AsRef<Path>, target: &Target<'_>) -> Result<usize, AttachError> {
        self.files.attach(self.library, target, path.as_ref())
    }

    /// Adds the cached plans for this target to a file, and creates the file if needed. Plans that are already there stay, and plans of engines
    /// that were not compiled at run time have no JSON and are skipped. Returns the number of plans that were written.
    ///
    /// # Errors
    /// Fails if the file or its folder cannot be used, or if it has plans for another version of cuDNN or another kind of device.
    pub fn save(&self, path: impl AsRef<Path>, target: &Target<'_>) -> Result<usize, AttachError> {
        let device = device_name(target);
        let plans = self.cache.values().into_iter().filter(|(key, _)| *key.device == *device);
        let records = plans.filter_map(|(key, cached)| Some((cached.key?, key.label(), cached.plan)));
        file::save(self.library, target, path.as_ref(), records)
    }

    fn key(&self, graph: &Verified, target: &Target<'_>, tuned: bool) -> PlanKey {
        PlanKey { graph: graph.to_string().into(), device: device_name(target).into(), policy: self.policy.clone(), tuned }
    }

    fn lookup(
        &self,
        graph: &Arc<Verified>,
        target: &Target<'_>,
        tuned: bool,
        build: impl FnOnce() -> Result<Plan, Error>,
    ) -> Result<Arc<Plan>, Error> {
        let key = self.key(graph, target, tuned);
        let make = || {
            let digest = file::digest(self.library, graph, &self.policy, tuned);
            if let Some(plan) = digest.and_then(|digest| self.files.load(self.library, graph, target, &digest)) {
                return Ok(Cached { plan: Arc::new(plan), key: digest });
            }
            let plan = build().map_err(Failed)?;
            if let Some(digest) = digest {
                self.files.keep(self.library, target, digest, &key.label(), &plan);
            }
            Ok(Cached { plan: Arc::new(plan), key: digest })
        };
        let found = self.cache.get_or_build(&key, make);
        found.map(|(cached, _)| cached.plan).map_err(|failed: Failed| failed.0)
    }

    /// Returns the plan of a graph, which is loaded from a file or built if the cache does not have it. The lookup prints the graph, so keep the plan for repeated
    /// executions.
    ///
    /// # Errors
    /// Fails as [`Plan::build`] does. The cache remembers for a while that a graph is unsupported ([`Limits`]), and no other error.
    pub fn get(&self, graph: &Arc<Verified>, target: &Target<'_>) -> Result<Arc<Plan>, Error> {
        self.lookup(graph, target, false, || self.planner(graph, target)?.first(target))
    }

    fn planner(&self, graph: &Arc<Verified>, target: &Target<'_>) -> Result<Planner, Error> {
        let planner = Planner::new(self.library, graph.clone(), target, &self.policy)?;
        let kernels = self.policy.dynamic_shapes.then(|| self.kernels.of(graph, &device_name(target)));
        Ok(planner.with_kernels(kernels))
    }

    /// Returns the fastest plan of a graph, as [`Planner::fastest`] finds it on the first request, with its arguments `tolerance` and `run`. The cache
    /// and files keep it apart from the plan that [`Plans::get`] returns.
    ///
    /// # Errors
    /// Fails as [`Planner::fastest`] does.
    pub fn get_tuned(
        &self,
        graph: &Arc<Verified>,
        target: &Target<'_>,
        tolerance: f64,
        run: impl FnMut(&Plan) -> Result<Trial, Error>,
    ) -> Result<Arc<Plan>, Error> {
        self.lookup(graph, target, true, || self.planner(graph, target)?.fastest(target, tolerance, run))
    }

    /// Explains whether the cache has the plan of a graph. On a miss, it names the nearest graphs and the lines of tensors and ops that differ. If shapes are
    /// dynamic, a note says where the kernels of the plan come from. It does not change the cache.
    pub fn explain(&self, graph: &Verified, target: &Target<'_>) -> Explanation {
        let key = self.key(graph, target, false);
        let mut explanation = self.cache.explain(&key);
        if self.policy.dynamic_shapes {
            explanation.notes.push(self.kernels_note(&key, graph, target, &explanation.state));
        }
        for nearest in &mut explanation.nearest {
            nearest.differences = std::mem::take(&mut nearest.differences).into_iter().flat_map(by_lines).collect();
        }
        explanation
    }

    fn kernels_note(&self, key: &PlanKey, graph: &Verified, target: &Target<'_>, state: &State) -> String {
        if let State::Hit(_) = state {
            let plan = self.cache.values().into_iter().find(|(other, _)| other == key).map(|(_, cached)| cached.plan);
            return match plan.and_then(|plan| plan.kernels_reused()) {
                Some(true) => "its kernels were compiled for a plan with other extents".to_owned(),
                Some(false) => "its kernels were compiled for it".to_owned(),
                None => "its kernels were loaded from a file".to_owned(),
            };
        }
        match self.kernels.find(graph, &device_name(target)).map_or((0, 0), |kernels| kernels.counts()) {
            (0, _) => "no kernels were compiled for graphs that differ in extents alone".to_owned(),
            (compiled, reused) => format!(
                "graphs that differ in extents alone have {compiled} plans with kernels of their own and {reused} that reused them: \
                 a plan of the same engine compiles none"
            ),
        }
    }

    /// Returns counts of compiled and of reused kernels; all are 0 unless shapes are [dynamic](Policy::dynamic_shapes).
    pub fn kernel_stats(&self) -> KernelStats {
        self.kernels.stats()
    }

    /// Returns counts of hits, misses, builds and evictions.
    pub fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// Returns the entries and recent events of the cache, for reports.
    pub fn snapshot(&self) -> CacheSnapshot {
        self.cache.snapshot()
    }

    /// Removes all plans and shared kernels. Plans that callers hold stay valid.
    pub fn clear(&self) {
        self.cache.clear();
        self.kernels.clear();
    }
}

/// Returns the name of a device in keys.
fn device_name(target: &Target<'_>) -> String {
    match target {
        Target::Handle(handle) => format!("device {}", handle.device().ordinal()),
        Target::Profile(profile) => profile.to_string(),
    }
}

/// Divides the difference of two graphs into one for each line that only one of them has at its place.
fn by_lines(difference: Difference) -> Vec<Difference> {
    if difference.field != "graph" {
        return vec![difference];
    }
    let (asked, there) = (lines(&difference.asked), lines(&difference.there));
    let mut all = Vec::new();
    for (what, (asked, there)) in ["tensor", "op"].into_iter().zip(asked.iter().zip(&there)) {
        for n in 0..asked.len().max(there.len()) {
            let of = |lines: &[&str]| lines.get(n).map_or_else(|| "none".to_owned(), |line| (*line).to_owned());
            let (asked, there) = (of(asked), of(there));
            if asked != there {
                all.push(Difference { field: format!("{what} {n}"), asked, there });
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::ir::{Graph, Mode};

    fn key(rows: i64, mode: Mode) -> PlanKey {
        let mut g = Graph::new();
        let (a, b) = (g.input("a", DType::BF16, [1, rows, 128]), g.input("b", DType::BF16, [1, 128, 512]));
        let product = g.matmul(a, b);
        let y = g.pointwise(mode, &[product]);
        g.output(y, "y", DType::BF16);
        PlanKey { graph: g.verify().unwrap().to_string().into(), device: "X".into(), policy: Policy::default(), tuned: false }
    }

    fn differences(asked: &PlanKey, there: &PlanKey) -> Vec<Difference> {
        let all = asked.fields().into_iter().zip(there.fields()).filter(|(a, b)| a != b);
        all.map(|((field, asked), (_, there))| Difference { field: field.to_owned(), asked, there }).flat_map(by_lines).collect()
    }

    #[test]
    fn a_miss_is_told_by_the_lines_that_differ() {
        let fields = |asked: &PlanKey, there: &PlanKey| differences(asked, there).into_iter().map(|d| d.field).collect::<Vec<_>>();
        let relu = key(256, Mode::ReluFwd);
        assert_eq!(fields(&relu, &key(256, Mode::ReluFwd)), [""; 0]);
        let gelu = differences(&relu, &key(256, Mode::GeluFwd));
        let op = gelu.iter().find(|difference| difference.field == "op 1").unwrap();
        assert!(op.asked.contains("= relu(") && op.there.contains("= gelu("), "{op}");
        assert_eq!(fields(&relu, &key(300, Mode::ReluFwd)), ["tensor 0", "tensor 2", "tensor 3"]);
        assert!(relu.label().contains("2 ops"), "{}", relu.label());
        let other = PlanKey { device: "Y".into(), ..relu.clone() };
        assert_eq!(fields(&relu, &other), ["device"]);
        let ordered = PlanKey { policy: Policy { deterministic: true, ..Policy::default() }, ..relu.clone() };
        assert!(relu != ordered && fields(&relu, &ordered) == ["policy"]);
        let any_engine = PlanKey { policy: Policy::default().with_known_faults(true), ..relu.clone() };
        assert!(relu != any_engine && fields(&relu, &any_engine) == ["policy"]);
        assert_eq!(fields(&relu, &PlanKey { tuned: true, ..relu.clone() }), ["tuned"]);
    }

    #[test]
    fn what_is_unsupported_is_remembered_and_failures_are_not() {
        let report = Box::new(EngineReport::default());
        let told = Error::NoEngine(report.clone()).to_string();
        let refusal = Failed(Error::NoEngine(report)).refusal().unwrap();
        assert_eq!((refusal.to_string(), Failed::again(refusal).to_string()), (told.clone(), told));
        for error in [Error::PlanJson("half".to_owned()), Error::OtherDevice { plan: None, handle: 0 }] {
            assert!(Failed(error).refusal().is_none());
        }
    }
}
