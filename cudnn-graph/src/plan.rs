//! Plans: compiled graphs.

use crate::bind::{Bindings, Bound, Ports};
use crate::encode::{encode, encode_dynamic};
use crate::engine::{Candidate, EngineReport, Offers, Outcome, Policy, offers};
use crate::error::Error;
use crate::ffi::codes::Attribute;
use crate::ffi::descriptor::{Descriptor, replay};
use crate::ffi::pack::Pack;
use crate::ffi::submission::Submission;
use crate::ffi::{Handle, Library};
use crate::ir::{Scalar, Verified};
use crate::kernels::KernelCache;
use crate::known_faults::KnownFault;
use crate::profile::{DeviceProfile, Target};
use crate::program::Program;
use parking_lot::{Mutex, MutexGuard};
use sdpa_driver::{Device, DeviceSlice};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The most packs that a shelf keeps for recurring addresses.
const PACKS: usize = 32;
/// Number of shelves. A thread tries its own first, so that threads which share a plan do not wait for one another.
const SHELVES: usize = 8;

/// A graph with the engines that cuDNN offers for it; nothing is compiled yet.
#[derive(Debug)]
pub struct Planner {
    library: &'static Library,
    ports: Ports,
    program: Program,
    descriptors: Arc<Vec<Descriptor>>,
    profile: Option<Arc<Descriptor>>,
    report: EngineReport,
    configs: Vec<Descriptor>,
    policy: Policy,
    kernels: Option<Arc<KernelCache>>,
}

impl Planner {
    /// Encodes a graph for the cuDNN runtime and queries cuDNN for engines, without compiling or submitting anything.
    ///
    /// # Errors
    /// Returns [`Error::TooNew`] if the runtime is too old for the graph, a cuDNN error if cuDNN rejects the graph, and
    /// [`Error::NoEngine`], with every reason, if cuDNN offers no engine that the policy accepts. Engines with [known faults](crate::known_faults) are
    /// not accepted, unless the policy allows them.
    pub fn new(library: &'static Library, graph: Arc<Verified>, target: &Target<'_>, policy: &Policy) -> Result<Planner, Error> {
        let faults = KnownFault::of(&graph, library.version(), policy.dynamic_shapes);
        let encode = if policy.dynamic_shapes { encode_dynamic } else { encode };
        target.within(|| Planner::asked(library, encode(&graph, library.version())?, Ports::of(&graph), target, policy, &faults))
    }

    /// Sets the kernels that the plans share, for a graph whose shapes are dynamic.
    pub(crate) fn with_kernels(mut self, kernels: Option<Arc<KernelCache>>) -> Planner {
        self.kernels = kernels;
        self
    }

    /// Queries cuDNN for engines for a program that the caller wrote or read, such as one with attributes that are newer than this crate. A
    /// program has no rules other than those of [`Program::check`], no meaning in the interpreter, and no values of scalars: each execution
    /// must bind them. Engines with [known faults](crate::known_faults) are not passed over. Plans of it need [`launch_addressed`](crate::launch_addressed) or [`Plan::execute`].
    ///
    /// # Errors
    /// Returns [`Error::Program`] for an invalid program, and fails as [`Planner::new`] does otherwise.
    pub fn for_program(library: &'static Library, program: Program, target: &Target<'_>, policy: &Policy) -> Result<Planner, Error> {
        program.check()?;
        let ports = Ports::of_program(&program)?;
        target.within(|| Planner::asked(library, program, ports, target, policy, &[]))
    }

    fn asked(
        library: &'static Library,
        program: Program,
        ports: Ports,
        target: &Target<'_>,
        policy: &Policy,
        faults: &[&KnownFault],
    ) -> Result<Planner, Error> {
        let descriptors = replay(library, &program, target.handle())?;
        let profile = match target {
            Target::Handle(_) => None,
            Target::Profile(profile) => Some(Arc::new(profile.descriptor(library)?)),
        };
        let operation_graph = descriptors.last().ok_or_else(|| Error::PlanJson("the program is empty".to_owned()))?;
        let Offers { report, configs, failed } = offers(library, operation_graph, profile.as_deref(), policy, faults)?;
        if !report.candidates.iter().any(|c| c.outcome == Outcome::NotTried) {
            return Err(failed.unwrap_or_else(|| Error::NoEngine(Box::new(report))));
        }
        Ok(Planner {
            library,
            ports,
            program,
            descriptors: Arc::new(descriptors),
            profile,
            report,
            configs,
            policy: policy.clone(),
            kernels: None,
        })
    }

    /// Returns every engine configuration that cuDNN offered for the graph, with its outcome.
    pub fn report(&self) -> &EngineReport {
        &self.report
    }

    /// Returns the backend descriptors that were passed to cuDNN, as plain data.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Builds a plan from the first of the offered engine configurations that works.
    ///
    /// # Errors
    /// Returns [`Error::NoEngine`], with cuDNN's message on each offer, if cuDNN supports none of them. If an offer failed for another
    /// reason, for example in compilation, that error is returned instead, because the graph may still be supported. If memory runs out,
    /// the search ends at once.
    pub fn first(&self, target: &Target<'_>) -> Result<Plan, Error> {
        let (mut report, mut failed) = (self.report.clone(), None);
        for n in 0..report.candidates.len() {
            if report.candidates[n].outcome != Outcome::NotTried {
                continue;
            }
            match self.attempt(n, target, &mut failed)? {
                Ok(plan) => {
                    report.candidates[n].outcome = Outcome::Chosen;
                    return Ok(plan.with_report(report));
                }
                Err(outcome) => report.candidates[n].outcome = outcome,
            }
        }
        Err(failed.unwrap_or_else(|| Error::NoEngine(Box::new(report))))
    }

    /// Builds a plan from the `n`th of the offered engine configurations, or returns why it is not used. `failed` receives the first failure for
    /// another reason than a lack of support.
    ///
    /// # Errors
    /// Fails if no other configuration would help.
    pub(crate) fn attempt(&self, n: usize, target: &Target<'_>, failed: &mut Option<Error>) -> Result<Result<Plan, Outcome>, Error> {
        match self.finalize(n, target) {
            Ok((descriptor, reused)) => {
                // Check the workspace again: only the compiled plan reports the final size, and before cuDNN 9.2 nothing else reports a size.
                match self.policy.over_workspace(workspace_of(&descriptor)?) {
                    Some(over) => Ok(Err(over)),
                    None => {
                        let mut report = self.report.clone();
                        report.candidates[n].outcome = Outcome::Chosen;
                        self.plan((descriptor, reused), report, target).map(Ok)
                    }
                }
            }
            Err(error) if error.is_fatal() => Err(error),
            Err(Error::Cudnn { status, text, call, subject }) => {
                tracing::debug!(engine = self.report.candidates[n].tag(), %status, text, "not taken");
                if status.is_unsupported() {
                    return Ok(Err(Outcome::Refused { status, text }));
                }
                failed.get_or_insert(Error::Cudnn { status, text: text.clone(), call, subject });
                Ok(Err(Outcome::Failed { status, text }))
            }
            Err(other) => Err(other),
        }
    }

    /// Builds a plan from the `n`th of the offered engine configurations, regardless of the policy, for comparisons.
    ///
    /// # Errors
    /// Returns a cuDNN error, or [`Error::NoEngine`] if there is no `n`th offer.
    pub fn nth(&self, n: usize, target: &Target<'_>) -> Result<Plan, Error> {
        let mut report = self.report.clone();
        let Some(candidate) = report.candidates.get_mut(n) else { return Err(Error::NoEngine(Box::new(report))) };
        candidate.outcome = Outcome::Chosen;
        self.plan(self.finalize(n, target)?, report, target)
    }

    /// Returns the plan of an engine configuration, and whether its kernels were in the kernel cache, if there is one.
    fn finalize(&self, n: usize, target: &Target<'_>) -> Result<(Descriptor, Option<bool>), Error> {
        target.within(|| {
            let mut plan = Descriptor::plan(self.library, target.device())?;
            bind_target(&mut plan, target, self.profile.as_deref())?;
            let (config, tag) = (&self.configs[n], self.report.candidates[n].tag());
            plan.set_descriptor(Attribute::EXECUTION_PLAN_ENGINE_CONFIG, config)?;
            let reused = match &self.kernels {
                Some(kernels) => Some(kernels.finalize(self.library, target.device(), &self.descriptors, config, (&mut plan, &tag))?),
                None => plan.finalize(&tag).map(|()| None)?,
            };
            Ok((plan, reused))
        })
    }

    fn plan(&self, (descriptor, reused): (Descriptor, Option<bool>), report: EngineReport, target: &Target<'_>) -> Result<Plan, Error> {
        let needs = Needs { _descriptors: Some(self.descriptors.clone()), _profile: self.profile.clone(), _kernels: self.kernels.clone() };
        let plan = Plan::new(self.library, target, descriptor, needs, self.ports.clone(), report)?;
        Ok(Plan { reused, ..plan })
    }
}

fn bind_target(plan: &mut Descriptor, target: &Target<'_>, profile: Option<&Descriptor>) -> Result<(), Error> {
    match (target, profile) {
        (Target::Handle(handle), _) => plan.set_handle(Attribute::EXECUTION_PLAN_HANDLE, handle),
        (Target::Profile(_), Some(profile)) => plan.set_descriptor(Attribute::EXECUTION_PLAN_DEVICEPROP, profile),
        (Target::Profile(_), None) => Err(Error::PlanJson("the plan has no device".to_owned())),
    }
}

/// Returns the workspace bytes of a finalized plan.
fn workspace_of(plan: &Descriptor) -> Result<u64, Error> {
    Ok(u64::try_from(plan.get_i64(Attribute::EXECUTION_PLAN_WORKSPACE_SIZE)?).unwrap_or(0))
}

/// Descriptors to which a finalized plan may still refer.
#[derive(Debug, Default)]
struct Needs {
    _descriptors: Option<Arc<Vec<Descriptor>>>,
    _profile: Option<Arc<Descriptor>>,
    _kernels: Option<Arc<KernelCache>>,
}

/// A compiled graph. Several threads can execute it concurrently, each with its own handle and its own variant pack of addresses and
/// scalars.
#[derive(Debug)]
pub struct Plan {
    library: &'static Library,
    device: Option<&'static Device>,
    descriptor: Descriptor,
    _needs: Needs,
    ports: Ports,
    report: EngineReport,
    reused: Option<bool>,
    workspace: u64,
    code: OnceLock<u64>,
    packs: [Mutex<VecDeque<Box<Ready>>>; SHELVES],
}

/// Number of threads that have executed a plan.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static SHELF: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHELVES;
}

/// Hashes several numbers into one, to preselect sets of addresses before they are compared.
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
    /// Encodes the graph, queries cuDNN for engines, and builds a plan from the first engine configuration that works.
    ///
    /// # Errors
    /// Fails as [`Planner::new`] and [`Planner::first`] do.
    pub fn build(library: &'static Library, graph: Arc<Verified>, target: &Target<'_>, policy: &Policy) -> Result<Plan, Error> {
        Planner::new(library, graph, target, policy)?.first(target)
    }

    fn new(
        library: &'static Library,
        target: &Target<'_>,
        descriptor: Descriptor,
        needs: Needs,
        ports: Ports,
        report: EngineReport,
    ) -> Result<Plan, Error> {
        let workspace = workspace_of(&descriptor)?;
        Ok(Plan {
            library,
            device: target.device(),
            descriptor,
            _needs: needs,
            ports,
            report,
            reused: None,
            workspace,
            code: OnceLock::new(),
            packs: std::array::from_fn(|_| Mutex::new(VecDeque::new())),
        })
    }

    /// Sets the report of the engines that were offered.
    pub(crate) fn with_report(mut self, report: EngineReport) -> Plan {
        self.report = report;
        self
    }

    /// Loads a plan from its JSON, including compiled kernels, for the graph from which it was made.
    ///
    /// # Safety
    /// The text is the unchanged output of [`Plan::to_json`] for a plan of this graph. It contains machine code, which the device runs with every
    /// bound address.
    ///
    /// # Errors
    /// Returns [`Error::PlanJson`] if the text is for another version of cuDNN, or a cuDNN error if cuDNN refuses the text.
    #[allow(unsafe_code, reason = "machine code from text: where it comes from is the caller's to know")]
    pub unsafe fn from_json(library: &'static Library, json: &str, graph: &Verified, target: &Target<'_>) -> Result<Plan, Error> {
        let head: PlanHead = serde_json::from_str(json).map_err(|e| Error::PlanJson(e.to_string()))?;
        let runtime = library.version();
        let made_by = crate::version::Version::from_number(head.cudnn_version);
        if made_by != runtime {
            return Err(Error::PlanJson(format!("made by cuDNN {made_by}, this process loaded {runtime}; build the plan again")));
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
            let needs = Needs { _profile: profile, ..Needs::default() };
            Plan::new(library, target, plan, needs, Ports::of(graph), EngineReport::default())
        })
    }

    /// Returns the plan as JSON: the operation graph, the device, the engine with its knobs, and the compiled kernels.
    ///
    /// # Errors
    /// Returns a cuDNN error. Plans of engines that were not compiled at run time have no JSON.
    pub fn to_json(&self) -> Result<String, Error> {
        self.descriptor.get_text(Attribute::EXECUTION_PLAN_JSON_REPRESENTATION)
    }

    /// Returns the approximate size of the compiled code in bytes: the size of the plan's JSON, which is mostly code, or 1 MiB if the
    /// plan has no JSON.
    pub fn code_bytes(&self) -> u64 {
        *self.code.get_or_init(|| self.to_json().map_or(1 << 20, |json| json.len() as u64))
    }

    /// Returns whether the plan took the kernels that cuDNN compiled for an earlier plan of a graph with other extents. `None` for a plan whose shapes are not
    /// [dynamic](Policy::dynamic_shapes), or that was loaded or built without [`Plans`](crate::Plans).
    pub fn kernels_reused(&self) -> Option<bool> {
        self.reused
    }

    /// Returns the library that compiled the plan.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// Returns the device for which the plan was made; `None` for a plan made from a device profile.
    pub fn device(&self) -> Option<&'static Device> {
        self.device
    }

    /// Checks that handles of `device` can execute the plan, whose code is loaded on one device only.
    ///
    /// # Errors
    /// Returns [`Error::OtherDevice`] if the plan was made for another device.
    pub fn check_device(&self, device: &Device) -> Result<(), Error> {
        let plan = self.device.map(Device::ordinal);
        if plan == Some(device.ordinal()) { Ok(()) } else { Err(Error::OtherDevice { plan, handle: device.ordinal() }) }
    }

    /// Returns the size of the workspace that an execution needs, in bytes.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace
    }

    /// Returns the finalized plan descriptor, for callers that create their own variant packs of addresses and scalars.
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Returns the inputs and outputs of an execution: tensors in device memory, and scalars from host memory.
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Returns every engine that cuDNN offered for the graph, with its outcome. The report of a plan from JSON is empty.
    pub fn report(&self) -> &EngineReport {
        &self.report
    }

    /// Returns the engine that the plan uses; `None` for a plan from JSON.
    pub fn engine(&self) -> Option<&Candidate> {
        self.report.chosen()
    }

    /// Checks bindings and workspace without running anything.
    ///
    /// # Errors
    /// Returns every mistake in the bindings, or an error if the workspace is too small.
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
            let limit = format!("got {} bytes", workspace.bytes);
            return Err(sdpa_driver::Error::Memory { what: "the plan's workspace".to_owned(), bytes: self.workspace, limit }.into());
        }
        Ok(())
    }

    /// Submits the plan to the handle's stream. Returns without waiting.
    ///
    /// # Safety
    /// Until the stream has passed this call:
    /// - Every bound slice and the workspace are device memory of the handle's device and as large as stated.
    /// - Nothing else uses outputs and workspace, and nothing writes the inputs.
    /// - This plan is not dropped.
    ///
    /// # Errors
    /// Returns [`Error::OtherDevice`] if the handle has another device, or every mistake in the bindings, before anything runs. Any other
    /// error is from cuDNN.
    #[allow(unsafe_code, reason = "the raw tier: its contract is the caller's")]
    pub unsafe fn execute(&self, handle: &Handle<'_>, bindings: &Bindings, workspace: DeviceSlice) -> Result<(), Error> {
        let bound = self.bound(bindings, workspace)?;
        let _entered = handle.device().enter()?;
        // SAFETY: the caller upholds the contract.
        unsafe { self.submit(handle, &bound.addresses, &bound.values, workspace.address) }
    }

    /// Executes the plan within a call, for callers that know the order of [`Plan::ports`]: one address per entry of `device`, one scalar per entry
    /// of `values`.
    ///
    /// # Safety
    /// The caller fulfils the contract of [`Plan::execute`]. Every address and the workspace have as much memory as the port and the plan
    /// require.
    ///
    /// # Errors
    /// Before anything runs, returns [`Error::OtherDevice`] if the handle has another device, or a mistake in the arguments: a wrong
    /// number of addresses or scalars, a null or misaligned address, or a scalar of the wrong type. Any other error is from cuDNN.
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
    /// As for [`Plan::execute_in_order`]; addresses and scalars fit the ports, and the thread is in the context of the handle's device.
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

    /// Takes the pack for these addresses from a shelf, or creates it. It is taken out, because its scalars are set for one execution at a time.
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

    /// Locks a free shelf, preferably this thread's.
    fn shelf(&self) -> Option<MutexGuard<'_, VecDeque<Box<Ready>>>> {
        let own = SHELF.try_with(|own| *own).unwrap_or(0);
        (0..SHELVES).find_map(|n| self.packs[(own + n) % SHELVES].try_lock())
    }
}

/// The part of a plan's JSON that is checked before cuDNN reads it.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct PlanHead {
    cudnn_version: usize,
}
