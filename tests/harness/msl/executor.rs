//! The emulation as what runs passes, so that the executor of Apple GPUs answers to the cases with everything but the GPU.

use super::build::{Job, Program, Toolchain};
use metal_fallback::{
    Call, Contents, Error, Facts, Kernel, KernelCache, KernelKey, Kernels, Math, Operand, Ran, Ready, Runner, SIMD, THREADGROUP_BYTES,
    Task, waits,
};
use sdpa::cache::Limits;
use sdpa::metal::MetalExecutor;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

/// Metal kernels, emulated.
#[derive(Debug)]
pub struct Emulated {
    toolchain: Toolchain,
    seed: u64,
    /// A text, and what stands in its place.
    mutation: Option<[Arc<str>; 2]>,
    kernels: Option<Kernels>,
    programs: KernelCache<Program>,
    facts: Facts,
}

const PROGRAMS: NonZeroUsize = NonZeroUsize::new(16).unwrap();

impl Emulated {
    /// With a seed of the order in which threadgroups and simdgroups run.
    pub fn new(toolchain: Toolchain, seed: u64) -> Emulated {
        let facts = Facts {
            name: "emulated".to_owned(),
            threads: 32 * u64::from(SIMD),
            threadgroup_bytes: THREADGROUP_BYTES as u64,
            unified_memory: true,
            ..Facts::default()
        };
        Emulated {
            toolchain,
            seed,
            mutation: None,
            kernels: None,
            programs: KernelCache::new("emulated kernels", Limits::entries(PROGRAMS)),
            facts,
        }
    }

    /// The same with these kernels, whatever the planner would take.
    #[must_use]
    pub fn forced(self, kernels: Kernels) -> Emulated {
        Emulated { kernels: Some(kernels), ..self }
    }

    /// The same with a fault in the kernels that it fits.
    #[must_use]
    pub fn mutated(self, from: &str, to: &str) -> Emulated {
        Emulated { mutation: Some([from.into(), to.into()]), ..self }
    }

    /// The executor of Apple GPUs over it.
    pub fn executor(self) -> MetalExecutor {
        let kernels = self.kernels;
        let executor = MetalExecutor::over(Arc::new(self));
        kernels.map_or(executor.clone(), |kernels| executor.with_kernels(kernels))
    }
}

impl Runner for Emulated {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&self, task: Task) -> Result<Arc<dyn Ready>, Error> {
        let task = task.map_plans(|mut plan| {
            if let Some([from, to]) = &self.mutation {
                plan.source = plan.source.replacen(&**from, to, 1);
            }
            plan
        });
        let programs = task.plans().iter().map(|plan| {
            let build = || self.toolchain.program(plan).map_err(|text| Error::Compile { entry: plan.entry, text });
            Kernel::of(&self.programs, &KernelKey::new(plan, Math::Safe), build)
        });
        let programs = programs.collect::<Result<_, _>>()?;
        Ok(Arc::new(EmulatedTask { task, programs, seed: self.seed }))
    }
}

/// A pass whose kernels are programs.
#[derive(Debug)]
struct EmulatedTask {
    task: Task,
    programs: Vec<Arc<Kernel<Program>>>,
    seed: u64,
}

/// Memory between kernels.
type Scratch = Vec<(Operand, Vec<u8>)>;

impl EmulatedTask {
    /// Runs a plan. Buffers have the bytes that the pass says it reaches, and no more: the emulation ends them at a page that cannot be
    /// touched.
    fn dispatch(&self, at: usize, call: &mut Call<'_>, scratch: &mut Scratch) -> Result<(), Error> {
        let plan = &self.task.plans()[at];
        let buffers = plan.buffers.iter().map(|binding| {
            let operand = &binding.operand;
            if *operand == Operand::Params {
                return plan.params(call.attn_scale, call.tokens).bytes();
            }
            let reach = self.task.reach(operand, call.tokens) as usize;
            let own = scratch.iter().find(|(o, _)| o == operand).map(|(_, bytes)| bytes.as_slice());
            let bytes = own.or_else(|| call.get(operand).map(Contents::bytes)).unwrap_or_default();
            bytes[..reach].to_vec()
        });
        let buffers: Vec<Vec<u8>> = buffers.collect();
        let job = Job { plan, buffers: &buffers, seed: self.seed };
        let failed = |text| Error::Execution { entry: plan.entry.to_owned(), text };
        for (operand, bytes) in self.programs[at].run(&job).map_err(failed)? {
            if let Some((_, own)) = scratch.iter_mut().find(|(o, _)| *o == operand) {
                *own = bytes;
            } else if let Some((_, Contents::Written(to))) = call.operands.iter_mut().find(|(o, _)| *o == operand) {
                to[..bytes.len()].copy_from_slice(&bytes);
            }
        }
        Ok(())
    }
}

impl Ready for EmulatedTask {
    fn task(&self) -> &Task {
        &self.task
    }

    fn run(&self, mut call: Call<'_>) -> Result<Ran, Error> {
        call.check(&self.task)?;
        let started = Instant::now();
        // What no kernel has written is NaN.
        let scratch = self.task.operands().iter().filter(|(operand, _)| operand.is_scratch());
        let mut scratch: Scratch = scratch.map(|(operand, bytes)| (operand.clone(), vec![0xff; *bytes as usize])).collect();
        // The last first, as far as nothing says that it waits: what depends on an order that nobody asks for is wrong.
        let waits = waits(self.task.plans());
        let mut end = 0;
        while end < waits.len() {
            let start = end;
            end = (start + 1..waits.len()).find(|&at| waits[at]).unwrap_or(waits.len());
            for at in (start..end).rev() {
                self.dispatch(at, &mut call, &mut scratch)?;
            }
        }
        Ok(Ran { kernels: started.elapsed(), copied: Vec::new() })
    }
}
