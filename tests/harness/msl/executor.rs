//! The emulation as an executor, so that it answers to the cases of all of them.

use super::build::{Job, Program, Toolchain};
use super::mutations::Mutation;
use metal_fallback::{Kernels, Operand, Pass, Plan};
use sdpa::exec::metal::{backward, forward, unsupported};
use sdpa::exec::{Executor, Prepared, PreparedBackward};
use sdpa::expr::Declared;
use sdpa::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa::params::bind;
use sdpa::{
    BackwardProblem, Elements, ElementsMut, Error, ExecutorName, HostBackward, HostForward, HostGradient, ParamValue, Problem, Report,
    SpecError, SpecErrors, Unsupported,
};
use std::sync::Arc;
use std::time::Instant;

/// Metal kernels, emulated.
#[derive(Clone, Debug)]
pub struct Emulated {
    toolchain: Toolchain,
    seed: u64,
    mutation: Option<Mutation>,
    kernels: Option<Kernels>,
}

impl Emulated {
    /// With a seed of the order in which threadgroups and simdgroups run.
    pub fn new(toolchain: Toolchain, seed: u64) -> Emulated {
        Emulated { toolchain, seed, mutation: None, kernels: None }
    }

    /// The same with these kernels, whatever the planner would take.
    #[must_use]
    pub fn forced(self, kernels: Kernels) -> Emulated {
        Emulated { kernels: Some(kernels), ..self }
    }

    /// The same with a fault in the kernels that it fits.
    #[must_use]
    pub fn mutated(self, mutation: Mutation) -> Emulated {
        Emulated { mutation: Some(mutation), ..self }
    }
}

/// A kernel, made ready.
#[derive(Debug)]
struct Kernel {
    plan: Plan,
    program: Program,
    seed: u64,
}

#[derive(Debug)]
struct EmulatedForward {
    problem: Problem,
    kernels: Vec<Kernel>,
}

#[derive(Debug)]
struct EmulatedBackward {
    problem: BackwardProblem,
    kernels: Vec<Kernel>,
}

/// A fault of the emulation or of a kernel, as the environment's.
fn fault(what: &str, how: String) -> Error {
    Error::Spec(SpecErrors(vec![SpecError::new(what, how, "runs on the emulation")]))
}

impl Emulated {
    fn kernel(&self, mut plan: Plan) -> Result<Kernel, Error> {
        if let Some(Mutation { from, to, name: _ }) = self.mutation {
            plan.source = plan.source.replacen(from, to, 1);
        }
        let program = self.toolchain.program(&plan).map_err(|e| fault(plan.entry, e))?;
        Ok(Kernel { plan, program, seed: self.seed })
    }

    fn kernels(&self, pass: Pass) -> Result<Vec<Kernel>, Error> {
        pass.plans.into_iter().map(|plan| self.kernel(plan)).collect()
    }
}

impl Executor for Emulated {
    fn name(&self) -> ExecutorName {
        ExecutorName::Metal
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        forward(problem).supports().map_err(unsupported)
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        let described = forward(problem);
        let pass = self.kernels.map_or_else(|| described.plan(), |kernels| described.plan_with(kernels));
        Ok(Arc::new(EmulatedForward { problem: problem.clone(), kernels: self.kernels(pass.map_err(unsupported)?)? }))
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        backward(problem).supports().map_err(unsupported)
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        let described = backward(problem);
        let pass = self.kernels.map_or_else(|| described.plan(), |kernels| described.plan_with(kernels));
        Ok(Arc::new(EmulatedBackward { problem: problem.clone(), kernels: self.kernels(pass.map_err(unsupported)?)? }))
    }
}

fn bytes<T: Copy, const N: usize>(elements: &[T], of: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    elements.iter().flat_map(|&x| of(x)).collect()
}

fn element_bytes(elements: &Elements<'_>) -> Vec<u8> {
    match elements {
        Elements::F32(x) => bytes(x, f32::to_le_bytes),
        Elements::F16(x) => bytes(x, half::f16::to_le_bytes),
        Elements::BF16(x) => bytes(x, half::bf16::to_le_bytes),
    }
}

fn param_bytes(value: &ParamValue<'_>) -> Vec<u8> {
    match value {
        ParamValue::Scalar(x) => x.to_le_bytes().to_vec(),
        ParamValue::F32(x) => bytes(x, f32::to_le_bytes),
        ParamValue::F16(x) => bytes(x, half::f16::to_le_bytes),
        ParamValue::BF16(x) => bytes(x, half::bf16::to_le_bytes),
        ParamValue::I32(x) => bytes(x, i32::to_le_bytes),
        ParamValue::Bool(x) => x.iter().map(|&x| u8::from(x)).collect(),
    }
}

fn contents(o: &ElementsMut<'_>) -> Vec<u8> {
    element_bytes(&match o {
        ElementsMut::F32(x) => Elements::F32(x),
        ElementsMut::F16(x) => Elements::F16(x),
        ElementsMut::BF16(x) => Elements::BF16(x),
    })
}

/// Takes back what a kernel wrote.
fn read_back(o: &mut ElementsMut<'_>, written: &[u8]) {
    fn all<T, const N: usize>(to: &mut [T], written: &[u8], of: impl Fn([u8; N]) -> T) {
        let (chunks, _) = written.as_chunks::<N>();
        to.iter_mut().zip(chunks).for_each(|(x, chunk)| *x = of(*chunk));
    }
    match o {
        ElementsMut::F32(x) => all(x, written, f32::from_le_bytes),
        ElementsMut::F16(x) => all(x, written, half::f16::from_le_bytes),
        ElementsMut::BF16(x) => all(x, written, half::bf16::from_le_bytes),
    }
}

/// What the buffers of a call hold.
#[derive(Debug, Default)]
struct Contents {
    operands: Vec<(Operand, Vec<u8>)>,
    /// Declared parameters, by name.
    params: Vec<(String, Vec<u8>)>,
}

impl Contents {
    fn new(operands: Vec<(Operand, Vec<u8>)>, params: &[Declared], values: &[ParamValue<'_>]) -> Contents {
        let params = params.iter().zip(values).map(|(p, value)| (p.name.clone(), param_bytes(value))).collect();
        Contents { operands, params }
    }

    fn operand(&self, operand: &Operand) -> Option<Vec<u8>> {
        self.operands.iter().find(|(o, _)| o == operand).map(|(_, bytes)| bytes.clone())
    }

    fn get(&self, operand: &Operand) -> Option<Vec<u8>> {
        let param = |name: &str| self.params.iter().find(|(n, _)| n == name).map(|(_, bytes)| bytes.clone());
        match operand {
            Operand::SeqLenQ => param(SEQ_LEN_Q),
            Operand::SeqLenKv => param(SEQ_LEN_KV),
            Operand::Scalars(names) => names.iter().map(|name| param(name)).collect::<Option<Vec<_>>>().map(|all| all.concat()),
            Operand::Declared { name, dtype: _, elements: _ } => param(name),
            Operand::Q
            | Operand::K
            | Operand::V
            | Operand::O
            | Operand::DO
            | Operand::DQ
            | Operand::DK
            | Operand::DV
            | Operand::Gradient { .. }
            | Operand::Params
            | Operand::Stats => self.operand(operand),
            // What no kernel has written is NaN.
            Operand::Scratch(scratch) => self.operand(operand).or_else(|| Some(vec![0xff; scratch.elements as usize * 4])),
        }
    }

    /// Runs a kernel; what it wrote takes the place of what was there.
    fn run(&mut self, kernel: &Kernel, attn_scale: f32) -> Result<(), Error> {
        let plan = &kernel.plan;
        self.operands.retain(|(operand, _)| *operand != Operand::Params);
        self.operands.push((Operand::Params, plan.params(attn_scale).bytes()));
        let buffers: Option<Vec<Vec<u8>>> = plan.buffers.iter().map(|binding| self.get(&binding.operand)).collect();
        let buffers = buffers.ok_or_else(|| fault(plan.entry, "a buffer that the call has not".to_owned()))?;
        let job = Job { plan, buffers: &buffers, seed: kernel.seed };
        for (operand, bytes) in kernel.program.run(&job).map_err(|e| fault(plan.entry, e))? {
            self.operands.retain(|(o, _)| *o != operand);
            self.operands.push((operand, bytes));
        }
        Ok(())
    }

    fn take(&self, operand: &Operand, to: &mut ElementsMut<'_>) {
        self.operand(operand).into_iter().for_each(|bytes| read_back(to, &bytes));
    }
}

fn report(started: Instant, kernels: &[Kernel]) -> Report {
    let told = kernels.iter().map(|Kernel { plan: Plan { entry, threads, .. }, .. }| format!("{entry} of {threads} threads"));
    let compute_ms = started.elapsed().as_secs_f64() * 1e3;
    let engine = format!("emulated {}", told.collect::<Vec<_>>().join(", "));
    Report { compute_ms, copied: Vec::new(), engine, workspace_bytes: 0 }
}

impl Prepared for EmulatedForward {
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error> {
        let started = Instant::now();
        let scale = call.check(&self.problem)?;
        let values = self.problem.bind(call.params)?;
        let HostForward { q, k, v, mut o, stats, .. } = call;
        let mut operands = vec![
            (Operand::Q, element_bytes(&q)),
            (Operand::K, element_bytes(&k)),
            (Operand::V, element_bytes(&v)),
            (Operand::O, contents(&o)),
        ];
        operands.extend(stats.as_deref().map(|stats| (Operand::Stats, bytes(stats, f32::to_le_bytes))));
        let mut contents = Contents::new(operands, self.problem.params(), &values);
        for kernel in &self.kernels {
            contents.run(kernel, scale)?;
        }
        contents.take(&Operand::O, &mut o);
        stats.into_iter().for_each(|stats| contents.take(&Operand::Stats, &mut ElementsMut::F32(stats)));
        Ok(report(started, &self.kernels))
    }
}

impl PreparedBackward for EmulatedBackward {
    fn backward(&self, call: HostBackward<'_>) -> Result<Report, Error> {
        let started = Instant::now();
        let scale = call.check(&self.problem)?;
        let values = bind(self.problem.params(), self.problem.forward().extents(), call.params)?;
        let HostBackward { q, k, v, o, d_o, stats, mut dq, mut dk, mut dv, gradients, .. } = call;
        let mut operands = vec![
            (Operand::Q, element_bytes(&q)),
            (Operand::K, element_bytes(&k)),
            (Operand::V, element_bytes(&v)),
            (Operand::O, element_bytes(&o)),
            (Operand::DO, element_bytes(&d_o)),
            (Operand::Stats, bytes(stats, f32::to_le_bytes)),
            (Operand::DQ, contents(&dq)),
            (Operand::DK, contents(&dk)),
            (Operand::DV, contents(&dv)),
        ];
        let along = |given: &HostGradient<'_>| Operand::Gradient {
            name: given.name.to_owned(),
            dtype: given.data.dtype(),
            elements: given.data.len() as i64,
        };
        operands.extend(gradients.iter().map(|given| (along(given), contents(&given.data))));
        let mut contents = Contents::new(operands, self.problem.params(), &values);
        for kernel in &self.kernels {
            contents.run(kernel, scale)?;
        }
        for mut given in gradients {
            contents.take(&along(&given), &mut given.data);
        }
        contents.take(&Operand::DQ, &mut dq);
        contents.take(&Operand::DK, &mut dk);
        contents.take(&Operand::DV, &mut dv);
        Ok(report(started, &self.kernels))
    }
}
