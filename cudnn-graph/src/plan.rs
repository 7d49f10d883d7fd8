//! Plans: a graph made ready to run.

use crate::bind::{Bindings, Bound, Ports};
use crate::encode::encode;
use crate::engine::{Candidate, EngineReport, Offers, Outcome, Policy, offers};
use crate::error::Error;
use crate::ffi::codes::Attribute;
use crate::ffi::descriptor::{Descriptor, replay};
use crate::ffi::pack::Pack;
use crate::ffi::submission::Submission;
use crate::ffi::{Handle, Library};
use crate::ir::{Scalar, Verified};
use crate::profile::{DeviceProfile, Target};
use crate::program::Program;
use parking_lot::{Mutex, MutexGuard};
use sdpa_driver::{Device, DeviceSlice};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Packs that a shelf keeps for addresses that come back.
const PACKS: usize = 32;
/// Shelves: a thread goes to its own first, so that threads which share a plan do not wait for one another.
const SHELVES: usize = 8;

/// A graph that cuDNN has been asked about: its engines are known, nothing is compiled.
#[derive(Debug)]
pub struct Planner {
    library: &'static Library,
    graph: Arc<Verified>,
    program: Program,
    descriptors: Arc<Vec<Descriptor>>,
    profile: Option<Arc<Descriptor>>,
    report: EngineReport,
    configs: Vec<Descriptor>,
    policy: Policy,
}

impl Planner {
    /// Encodes a graph for the runtime and asks cuDNN which engines it has for it. Nothing is compiled or submitted.
    ///
    /// # Errors
    /// [`Error::TooNew`] for a graph that the runtime is too old for; cuDNN's own when it rejects the graph as such;
    /// [`Error::NoEngine`] when it offers nothing that the policy lets pass, with every reason.
    pub fn new(library: &'static Library, graph: Arc<Verified>, target: &Target<'_>, policy: &Policy) -> Result<Planner, Error> {
        target.within(|| Planner::asked(library, graph, target, policy))
    }

    fn asked(library: &'static Library, graph: Arc<Verified>, target: &Target<'_>, policy: &Policy) -> Result<Planner, Error> {
        let program = encode(&graph, library.version())?;
        let descriptors = replay(library, &program, target.handle())?;
        let profile = match target {
            Target::Handle(_) => None,
            Target::Profile(profile) => Some(Arc::new(profile.descriptor(library)?)),
        };
        let operation_graph = descriptors.last().ok_or_else(|| Error::PlanJson("an empty program".to_owned()))?;
        let Offers { report, configs, failed } = offers(library, operation_graph, profile.as_deref(), policy)?;
        if !report.candidates.iter().any(|c| c.outcome == Outcome::NotTried) {
            return Err(failed.unwrap_or_else(|| Error::NoEngine(Box::new(report))));
        }
        Ok(Planner { library, graph, program, descriptors: Arc::new(descriptors), profile, report, configs, policy: policy.clone() })
    }

    /// Every configuration that the library offered, and what became of it.
    pub fn report(&self) -> &EngineReport {
        &self.report
    }

    /// The descriptors that were sent.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Makes a plan of the first offer that holds.
    ///
    /// # Errors
    /// [`Error::NoEngine`] with cuDNN's words on each offer, where it supports none. Where one of them failed otherwise, in compilation for
    /// one, that failure: it says nothing about what is supported. Out of memory ends the search at once.
    pub fn first(&self, target: &Target<'_>) -> Result<Plan, Error> {
        let (mut report, mut failed) = (self.report.clone(), None);
        for n in 0..report.candidates.len() {
            if report.candidates[n].outcome != Outcome::NotTried {
                continue;
            }
            match self.finalize(n, target) {
                Ok(descriptor) => {
                    // Only now is it certain, and before 9.2 known at all.
                    if let Some(over) = self.policy.over_workspace(workspace_of(&descriptor)?) {
                        report.candidates[n].outcome = over;
                        continue;
                    }
                    report.candidates[n].outcome = Outcome::Chosen;
                    return self.plan(descriptor, report, target);
                }
                Err(error) if error.is_fatal() => return Err(error),
                Err(Error::Cudnn { status, text, call, subject }) => {
                    tracing::debug!(engine = report.candidates[n].tag(), %status, text, "not taken");
                    report.candidates[n].outcome = if status.is_unsupported() {
                        Outcome::Refused { status, text }
                    } else {
                        failed.get_or_insert(Error::Cudnn { status, text: text.clone(), call, subject });
                        Outcome::Failed { status, text }
                    };
                }
                Err(other) => return Err(other),
            }
        }
        Err(failed.unwrap_or_else(|| Error::NoEngine(Box::new(report))))
    }

    /// Makes a plan of the `n`th offer, whatever the policy says, for comparing them.
    ///
    /// # Errors
    /// cuDNN's own; [`Error::NoEngine`] past the last offer.
    pub fn nth(&self, n: usize, target: &Target<'_>) -> Result<Plan, Error> {
        let mut report = self.report.clone();
        let Some(candidate) = report.candidates.get_mut(n) else { return Err(Error::NoEngine(Box::new(report))) };
        candidate.outcome = Outcome::Chosen;
        self.plan(self.finalize(n, target)?, report, target)
    }

    fn finalize(&self, n: usize, target: &Target<'_>) -> Result<Descriptor, Error> {
        target.within(|| {
            let mut plan = Descriptor::plan(self.library, target.device())?;
            bind_target(&mut plan, target, self.profile.as_deref())?;
            plan.set_descriptor(Attribute::EXECUTION_PLAN_ENGINE_CONFIG, &self.configs[n])?;
            plan.finalize(&self.report.candidates[n].tag())?;
            Ok(plan)
        })
    }

    fn plan(&self, descriptor: Descriptor, report: EngineReport, target: &Target<'_>) -> Result<Plan, Error> {
        let needs = (Some(self.descriptors.clone()), self.profile.clone());
        Plan::new(self.library, target, descriptor, needs, &self.graph, report)
    }
}

fn bind_target(plan: &mut Descriptor, target: &Target<'_>, profile: Option<&Descriptor>) -> Result<(), Error> {
    match (target, profile) {
        (Target::Handle(handle), _) => plan.set_handle(Attribute::EXECUTION_PLAN_HANDLE, handle),
        (Target::Profile(_), Some(profile)) => plan.set_descriptor(Attribute::EXECUTION_PLAN_DEVICEPROP, profile),
        (Target::Profile(_), None) => Err(Error::PlanJson("a plan without a device".to_owned())),
    }
}

/// Bytes of workspace of a finalized plan.
fn workspace_of(plan: &Descriptor) -> Result<u64, Error> {
    Ok(u64::try_from(plan.get_i64(Attribute::EXECUTION_PLAN_WORKSPACE_SIZE)?).unwrap_or(0))
}

/// What a finalized plan may still refer to.
type Needs = (Option<Arc<Vec<Descriptor>>>, Option<Arc<Descriptor>>);

/// A compiled graph. Executions from several threads do not disturb one another: each has a handle and a pack of its own.
#[derive(Debug)]
pub struct Plan {
    library: &'static Library,
    device: Option<&'static Device>,
    descriptor: Descriptor,
    _needs: Needs,
    ports: Ports,
    report: EngineReport,
    workspace: u64,
    code: OnceLock<u64>,
    packs: [Mutex<VecDeque<Box<Ready>>>; SHELVES],
}

/// Threads that have executed a plan.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static SHELF: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHELVES;
}

/// Hashes several numbers into one, well enough to tell sets of addresses apart before they are compared.
fn mixed(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, |hash, n| (hash ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

/// A pack for one set of addresses.
#[derive(Debug)]
struct Ready {
    hash: u64,
    addresses: SmallVec<[u64; 8]>,
    workspace: u64,
    pack: Pack,
}

impl Plan {
    /// Encodes the graph, asks cuDNN for engines, and makes a plan of the first offer that holds.
    ///
    /// # Errors
    /// As [`Planner::new`] and [`Planner::first`].
    pub fn build(library: &'static Library, graph: Arc<Verified>, target: &Target<'_>, policy: &Policy) -> Result<Plan, Error> {
        Planner::new(library, graph, target, policy)?.first(target)
    }

    fn new(
        library: &'static Library,
        target: &Target<'_>,
        descriptor: Descriptor,
        needs: Needs,
        graph: &Verified,
        report: EngineReport,
    ) -> Result<Plan, Error> {
        let workspace = workspace_of(&descriptor)?;
        Ok(Plan {
            library,
            device: target.device(),
            descriptor,
            _needs: needs,
            ports: Ports::of(graph),
            report,
            workspace,
            code: OnceLock::new(),
            packs: std::array::from_fn(|_| Mutex::new(VecDeque::new())),
        })
    }

    /// A plan from its JSON, compiled kernels included, for the graph that it was made from.
    ///
    /// # Safety
    /// The text is what [`Plan::to_json`] gave for a plan of this very graph, unchanged. It contains machine code, which the device runs
    /// with every address that is bound.
    ///
    /// # Errors
    /// [`Error::PlanJson`] when the text is of another runtime; cuDNN's own when it does not take it.
    #[allow(unsafe_code, reason = "machine code from text: where it comes from is the caller's to know")]
    pub unsafe fn from_json(library: &'static Library, json: &str, graph: &Verified, target: &Target<'_>) -> Result<Plan, Error> {
        let head: PlanHead = serde_json::from_str(json).map_err(|e| Error::PlanJson(e.to_string()))?;
        let runtime = library.version();
        let made_by = crate::version::Version::from_number(head.cudnn_version);
        if made_by != runtime {
            return Err(Error::PlanJson(format!("made by cuDNN {made_by}, this is {runtime}")));
        }
        target.within(|| {
            let profile = match target {
                Target::Handle(_) => None,
                Target::Profile(profile) => Some(Arc::new(DeviceProfile::descriptor(profile, library)?)),
            };
            let mut plan = Descriptor::plan(library, target.device())?;
            bind_target(&mut plan, target, profile.as_deref())?;
            plan.set_text(Attribute::EXECUTION_PLAN_JSON_REPRESENTATION, json)?;
            plan.finalize("from JSON")?;
            Plan::new(library, target, plan, (None, profile), graph, EngineReport::default())
        })
    }

    /// The plan as JSON: the operation graph, the device, the engine with its knobs, and the compiled kernels.
    ///
    /// # Errors
    /// cuDNN's own: engines that were not compiled at run time have none.
    pub fn to_json(&self) -> Result<String, Error> {
        self.descriptor.get_text(Attribute::EXECUTION_PLAN_JSON_REPRESENTATION)
    }

    /// Bytes of compiled code, as far as the plan tells: those of its JSON, which is little else. A mebibyte where it has none.
    pub fn code_bytes(&self) -> u64 {
        *self.code.get_or_init(|| self.to_json().map_or(1 << 20, |json| json.len() as u64))
    }

    /// The library that runs it.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// The device that it was made for; none if that was a profile.
    pub fn device(&self) -> Option<&'static Device> {
        self.device
    }

    /// Whether it can be executed through handles of a device: it holds code that was loaded into one.
    ///
    /// # Errors
    /// [`Error::OtherDevice`].
    pub fn check_device(&self, device: &Device) -> Result<(), Error> {
        let plan = self.device.map(Device::ordinal);
        if plan == Some(device.ordinal()) { Ok(()) } else { Err(Error::OtherDevice { plan, handle: device.ordinal() }) }
    }

    /// Bytes of device memory that an execution uses besides its tensors.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace
    }

    /// The finalized plan itself, for callers with packs of their own.
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Returns the inputs and outputs of an execution: tensors in device memory, and numbers.
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Every offer that cuDNN made for the graph and what became of it. Empty for a plan from JSON.
    pub fn report(&self) -> &EngineReport {
        &self.report
    }

    /// The engine; `None` for a plan from JSON.
    pub fn engine(&self) -> Option<&Candidate> {
        self.report.chosen()
    }

    /// Checks bindings without running anything.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn check(&self, bindings: &Bindings, workspace: DeviceSlice) -> Result<(), Error> {
        self.bound(bindings, workspace).map(|_| ())
    }

    fn bound(&self, bindings: &Bindings, workspace: DeviceSlice) -> Result<Bound, Error> {
        let bound = self.ports.bind(bindings)?;
        self.holds(workspace)?;
        Ok(bound)
    }

    fn holds(&self, workspace: DeviceSlice) -> Result<(), Error> {
        if workspace.bytes < self.workspace {
            let limit = format!("{} bytes were given", workspace.bytes);
            return Err(sdpa_driver::Error::Memory { what: "the plan's workspace".to_owned(), bytes: self.workspace, limit }.into());
        }
        Ok(())
    }

    /// Submits the plan to the handle's stream. Returns without waiting.
    ///
    /// # Safety
    /// Until the stream has passed this call: every slice bound and the workspace are device memory of the handle's device,
    /// really as large as said; outputs and workspace are not used by anything else; inputs are not written; this plan is
    /// not dropped.
    ///
    /// # Errors
    /// [`Error::OtherDevice`]; everything that is wrong with the bindings, before anything runs; cuDNN's own.
    #[allow(unsafe_code, reason = "the raw tier: its contract is the caller's")]
    pub unsafe fn execute(&self, handle: &Handle<'_>, bindings: &Bindings, workspace: DeviceSlice) -> Result<(), Error> {
        let bound = self.bound(bindings, workspace)?;
        let _entered = handle.device().enter()?;
        // SAFETY: the caller upholds the contract.
        unsafe { self.submit(handle, &bound.addresses, &bound.values, workspace.address) }
    }

    /// [`Plan::execute`] as a part of a call, for callers that know the order of [`Plan::ports`]: an address for each of `device`, a number for each of
    /// `values`.
    ///
    /// # Safety
    /// As [`Plan::execute`], and every address and the workspace have as much memory behind them as the port and the plan say.
    ///
    /// # Errors
    /// [`Error::OtherDevice`]; another number of addresses or numbers than ports, an address that is 0 or not aligned, a number of
    /// another type, before anything runs; cuDNN's own.
    #[allow(unsafe_code, reason = "the raw tier: its contract is the caller's")]
    pub unsafe fn execute_in_order(
        &self,
        submission: &Submission<'_>,
        addresses: &[u64],
        values: &[Scalar],
        workspace: DeviceSlice,
    ) -> Result<(), Error> {
        self.ports.fit(addresses, values)?;
        self.holds(workspace)?;
        // SAFETY: the caller upholds the contract.
        unsafe { self.submit(submission.handle(), addresses, values, workspace.address) }
    }

    /// # Safety
    /// As [`Plan::execute_in_order`], addresses and numbers fit the ports, and the thread is in the context of the handle's device.
    #[allow(unsafe_code, reason = "the raw tier: its contract is the caller's")]
    unsafe fn submit(&self, handle: &Handle<'_>, addresses: &[u64], values: &[Scalar], workspace: u64) -> Result<(), Error> {
        self.check_device(handle.device())?;
        let mut ready = self.ready(addresses, workspace)?;
        for (n, value) in values.iter().enumerate() {
            match *value {
                Scalar::F32(x) => ready.pack.set_value(n, &x.to_ne_bytes()),
                Scalar::I32(x) => ready.pack.set_value(n, &x.to_ne_bytes()),
                Scalar::I64(x) => ready.pack.set_value(n, &x.to_ne_bytes()),
            }
        }
        // SAFETY: the caller upholds the contract.
        let result = unsafe { ready.pack.execute(handle, &self.descriptor) };
        if let Some(mut packs) = self.shelf() {
            let gone = if packs.len() == PACKS { packs.pop_front() } else { None };
            packs.push_back(ready);
            drop(packs);
            drop(gone);
        }
        result
    }

    /// The pack for these addresses, kept from an earlier execution or made now. It is taken out: numbers in it are set
    /// for one execution at a time.
    fn ready(&self, addresses: &[u64], workspace: u64) -> Result<Box<Ready>, Error> {
        let hash = mixed(addresses.iter().copied().chain([workspace]));
        if let Some(mut packs) = self.shelf()
            && let Some(at) = packs.iter().rposition(|r| r.hash == hash && r.workspace == workspace && r.addresses[..] == *addresses)
            && let Some(ready) = packs.remove(at)
        {
            return Ok(ready);
        }
        let device: Vec<i64> = self.ports.device.iter().map(|p| p.id.uid()).collect();
        let values: Vec<i64> = self.ports.values.iter().map(|p| p.id.uid()).collect();
        let pack = Pack::new(self.library, &device, addresses, &values, workspace)?;
        Ok(Box::new(Ready { hash, addresses: SmallVec::from_slice(addresses), workspace, pack }))
    }

    /// A shelf that nobody is at, this thread's if possible.
    fn shelf(&self) -> Option<MutexGuard<'_, VecDeque<Box<Ready>>>> {
        let own = SHELF.try_with(|own| *own).unwrap_or(0);
        (0..SHELVES).find_map(|n| self.packs[(own + n) % SHELVES].try_lock())
    }
}

/// The part of a plan's JSON that is checked before cuDNN sees it.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct PlanHead {
    cudnn_version: usize,
}
