//! An NVIDIA GPU as what runs passes of Metal kernels.
#![allow(unsafe_code)]

use conformance::msl::nvidia;
use cudarc::driver::sys::CUfunction_attribute_enum::{CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, CU_FUNC_ATTRIBUTE_NUM_REGS};
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use metal_fallback::{
    Call, Contents, Error, Facts, Kernel, KernelCache, KernelKey, Math, Operand, Plan, Ran, Ready, Runner, SIMD, THREADGROUP_BYTES, Task,
};
use sdpa::cache::Limits;
use sdpa_driver::Nvrtc;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const KERNELS: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// What the compiler made of the sources of one kernel, at most.
#[derive(Clone, Copy, Debug, Default)]
struct Most {
    sources: usize,
    registers: i32,
    spilled: i32,
}

/// The device, and the kernels that were built for it.
#[derive(Debug)]
pub(super) struct Gpu {
    context: Arc<CudaContext>,
    architecture: String,
    nvrtc: Nvrtc,
    kernels: KernelCache<CudaFunction>,
    most: Mutex<BTreeMap<&'static str, Most>>,
    facts: Facts,
}

fn exhausted(what: &str) -> impl Fn(cudarc::driver::DriverError) -> Error {
    move |e| Error::Exhausted { what: format!("{what} ({e})") }
}

fn failed(entry: &str, text: impl Display) -> Error {
    Error::Execution { entry: entry.to_owned(), text: text.to_string() }
}

impl Gpu {
    pub(super) fn new() -> crate::setup::Result<Gpu> {
        let context = CudaContext::new(0)?;
        // SAFETY: each run has a stream of its own, and its buffers are on no other.
        unsafe { context.disable_event_tracking() };
        let (major, minor) = context.compute_capability()?;
        let facts = Facts {
            name: context.name()?,
            system: format!("NVIDIA, SM {major}.{minor}"),
            threads: 1024,
            threadgroup_bytes: THREADGROUP_BYTES as u64,
            ..Facts::default()
        };
        let most = Mutex::default();
        Ok(Gpu {
            context,
            architecture: format!("sm_{major}{minor}"),
            nvrtc: conformance::nvrtc::find()?,
            kernels: KernelCache::new("kernels of Metal, for CUDA", Limits::entries(KERNELS)),
            most,
            facts,
        })
    }

    fn build(&self, plan: &Plan) -> Result<CudaFunction, Error> {
        let code = nvidia::compile(&self.nvrtc, plan, &self.architecture).map_err(|text| Error::Compile { entry: plan.entry, text })?;
        let module = self.context.load_module(Ptx::from_binary(code)).map_err(exhausted("a module"))?;
        let function = module.load_function(nvidia::ENTRY).map_err(exhausted("a kernel"))?;
        let of = |attribute| function.get_attribute(attribute).unwrap_or(0);
        let (registers, spilled) = (of(CU_FUNC_ATTRIBUTE_NUM_REGS), of(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES));
        let mut all = self.most.lock().unwrap_or_else(PoisonError::into_inner);
        let most = all.entry(plan.entry).or_default();
        *most = Most { sources: most.sources + 1, registers: most.registers.max(registers), spilled: most.spilled.max(spilled) };
        Ok(function)
    }

    /// What the compiler made of the sources.
    pub(super) fn report(&self) {
        for (entry, Most { sources, registers, spilled }) in self.most.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            println!("{entry:<22} {sources} sources, at most {registers} registers and {spilled} bytes of local memory a thread");
        }
    }
}

impl Runner for Gpu {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&self, task: Task) -> Result<Arc<dyn Ready>, Error> {
        let kernel = |plan| Kernel::of(&self.kernels, &KernelKey::new(plan, Math::Safe), || self.build(plan));
        let built = task.plans().iter().map(kernel);
        let functions = built.collect::<Result<_, _>>()?;
        Ok(Arc::new(GpuTask { context: self.context.clone(), task, functions }))
    }
}

/// A pass whose kernels are loaded.
#[derive(Debug)]
struct GpuTask {
    context: Arc<CudaContext>,
    task: Task,
    functions: Vec<Arc<Kernel<CudaFunction>>>,
}

/// Buffers of a run, each an allocation of the bytes that the pass says it reaches.
type Buffers = Vec<(Operand, CudaSlice<u8>)>;

impl GpuTask {
    fn launch(&self, at: usize, call: &Call<'_>, stream: &Arc<CudaStream>, buffers: &Buffers) -> Result<CudaSlice<u8>, Error> {
        let plan = &self.task.plans()[at];
        let params = stream.clone_htod(&plan.params(call.attn_scale, call.tokens).bytes()).map_err(exhausted("parameters"))?;
        let mut launch = stream.launch_builder(&self.functions[at]);
        for binding in &plan.buffers {
            let own = buffers.iter().find(|(operand, _)| *operand == binding.operand).map(|(_, buffer)| buffer);
            let bound = if binding.operand == Operand::Params { Some(&params) } else { own };
            launch.arg(bound.ok_or_else(|| failed(plan.entry, format!("nothing is bound to {}", binding.operand.name())))?);
        }
        let [x, y, z] = plan.grid;
        let shared_mem_bytes = nvidia::threadgroup(plan).1 as u32;
        let config = LaunchConfig { grid_dim: (x, y, z), block_dim: (plan.threads, 1, 1), shared_mem_bytes };
        // SAFETY: the kernel takes a pointer for each binding, in this order; whether it stays within is what is being tested.
        unsafe { launch.launch(config) }.map_err(|e| failed(plan.entry, e))?;
        Ok(params)
    }
}

impl Ready for GpuTask {
    fn task(&self) -> &Task {
        &self.task
    }

    fn run(&self, mut call: Call<'_>) -> Result<Ran, Error> {
        call.check(&self.task)?;
        let stream = self.context.new_stream().map_err(exhausted("a stream"))?;
        let mut buffers = Buffers::new();
        for (operand, _) in self.task.operands() {
            let reach = self.task.reach(operand, call.tokens) as usize;
            // What no kernel has written is NaN.
            let bytes = call.get(operand).map_or_else(|| vec![0xff; reach], |contents| contents.bytes()[..reach].to_vec());
            buffers.push((operand.clone(), stream.clone_htod(&bytes).map_err(exhausted("a buffer"))?));
        }
        let end = |e: cudarc::driver::DriverError| failed("the pass", e);
        let timing = Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT);
        let begun = stream.record_event(timing).map_err(end)?;
        let mut params = Vec::new();
        for at in 0..self.functions.len() {
            params.push(self.launch(at, &call, &stream, &buffers)?);
        }
        let ended = stream.record_event(timing).map_err(end)?;
        stream.synchronize().map_err(end)?;
        for (operand, contents) in &mut call.operands {
            let Contents::Written(to) = contents else { continue };
            if let Some((_, buffer)) = buffers.iter().find(|(o, _)| o == operand) {
                stream.memcpy_dtoh(buffer, &mut to[..buffer.len()]).map_err(end)?;
            }
        }
        stream.synchronize().map_err(end)?;
        let kernels = Duration::from_secs_f32(begun.elapsed_ms(&ended).map_err(end)? / 1e3);
        Ok(Ran { kernels, copied: Vec::new() })
    }
}

const _: () = assert!(SIMD == 32, "a warp is a simdgroup");
