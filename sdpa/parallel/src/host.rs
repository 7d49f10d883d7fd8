//! Runs the schedules of one rank over host memory.

use crate::digest::{FIELDS, digest};
use crate::error::ParallelError;
use crate::exchange::{Exchange, Incoming, Outgoing};
use crate::memory::{Memory, set, view};
use crate::problem::ParallelProblem;
use crate::run::Run;
use crate::schedule::{Attend, Pass, Role, Schedule, Tensor};
use sdpa_core::expr::Declared;
use sdpa_core::packed::CU_SEQLENS;
use sdpa_core::unpacked::PACKED_TENSORS;
use sdpa_core::{
    BackwardProblem, DType, Elements, ElementsMut, Error, Executor, HostBackward, HostForward, HostGradient, Layout, Param, Placed,
    Placement, Prepared, PreparedBackward, Problem, SINK, Side, SpecError, SpecErrors, TensorSpec, params,
};
use std::collections::HashMap;
use std::sync::Arc;

/// One rank of a problem: its plans and its connection with the other ranks.
///
/// Every plan is made before the first exchange, so that a rank that cannot run its part fails before others wait for it. Operands of a call are the rank's
/// shards ([`ParallelProblem::local`]); declared parameters are those of the whole problem, on every rank.
#[derive(Debug)]
pub struct ContextParallel<E: Exchange> {
    problem: Arc<ParallelProblem>,
    exchange: E,
    forward: Program,
    backward: Option<Program>,
    /// Whether the ranks have compared their problems.
    agreed: bool,
    broken: Option<String>,
}

/// A schedule with the plan of each of its parts.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) schedule: Schedule,
    pub(crate) parts: Vec<Part>,
}

/// One part of the problem, prepared.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) at: Placement,
    /// The placed specification and its plan; `None` if no pair is attended.
    pub(crate) ready: Option<(Placed, Plan)>,
}

#[derive(Debug)]
pub(crate) enum Plan {
    Forward(Arc<dyn Prepared>, Box<Problem>),
    Backward(Arc<dyn PreparedBackward>, Box<BackwardProblem>),
}

/// Plans by problem: chunks at equal distances share one.
#[derive(Default)]
struct Plans {
    forward: HashMap<Problem, Arc<dyn Prepared>>,
    backward: HashMap<BackwardProblem, Arc<dyn PreparedBackward>>,
}

pub(crate) fn bug(what: &str) -> ParallelError {
    ParallelError::Attention(Error::Bug(format!("a schedule: {what}")))
}

impl Program {
    fn new(executor: &dyn Executor, problem: &ParallelProblem, rank: usize, pass: Pass) -> Result<Program, ParallelError> {
        let schedule = problem.schedule(rank, pass);
        let mut plans = Plans::default();
        let parts =
            schedule.attends().map(|attend| Part::new(executor, problem, &schedule, attend, &mut plans)).collect::<Result<_, _>>()?;
        Ok(Program { schedule, parts })
    }
}

impl Part {
    fn new(
        executor: &dyn Executor,
        problem: &ParallelProblem,
        schedule: &Schedule,
        attend: &Attend,
        plans: &mut Plans,
    ) -> Result<Part, ParallelError> {
        let at = problem.placement(attend);
        let Some(mut placed) = problem.placed(schedule.pass, attend)? else { return Ok(Part { at, ready: None }) };
        let spec = &mut placed.spec;
        // Operands are copied into vectors of the type in which the part is computed.
        let alignment = if attend.partial { DType::F32 } else { spec.dtype }.bits() / 8;
        let tensor = |n: usize, of_keys: bool| {
            let (heads, chunk) = if of_keys { (&attend.heads_kv, &attend.k) } else { (&attend.heads_q, &attend.q) };
            let found = view(&schedule.slots[attend.reads[n]], &schedule.extents, heads, chunk);
            found.map(|(tensor, _)| TensorSpec { alignment, ..tensor }).ok_or_else(|| bug("tokens that are not neighbours"))
        };
        (spec.q, spec.k, spec.v) = (tensor(0, false)?, tensor(1, true)?, tensor(2, true)?);
        spec.o = TensorSpec::dense(spec.o.dims, Layout::Bhsd);
        let plan = match schedule.pass {
            Pass::Forward => {
                let problem = spec.validate()?;
                let prepared = match plans.forward.get(&problem) {
                    Some(prepared) => prepared.clone(),
                    None => executor.prepare(&problem)?,
                };
                plans.forward.insert(problem.clone(), prepared.clone());
                Plan::Forward(prepared, Box::new(problem))
            }
            Pass::Backward => {
                spec.o = tensor(3, false)?;
                let (d_o, [q, k, v]) = (tensor(4, false)?, [spec.q, spec.k, spec.v].map(|t| TensorSpec::dense(t.dims, Layout::Bhsd)));
                let mut backward = spec.backward().with_d_o(d_o).with_dq(q).with_dk(k).with_dv(v).deterministic();
                let read = backward.validate()?;
                // The gradient of the sink needs no part.
                let asked = problem.spec().wrt.iter().filter(|g| g.name != SINK && read.params().iter().any(|p| p.name == g.name));
                for gradient in asked {
                    backward = backward.wrt(&gradient.name, DType::F32);
                }
                let problem = backward.validate()?;
                let prepared = match plans.backward.get(&problem) {
                    Some(prepared) => prepared.clone(),
                    None => executor.prepare_backward(&problem)?,
                };
                plans.backward.insert(problem.clone(), prepared.clone());
                Plan::Backward(prepared, Box::new(problem))
            }
        };
        Ok(Part { at, ready: Some((placed, plan)) })
    }
}

impl<E: Exchange> ContextParallel<E> {
    /// Makes every plan of this rank. It exchanges nothing.
    ///
    /// # Errors
    /// Fails if the exchange has another number of ranks than the problem, or if the executor does not run a part of the problem.
    pub fn new(executor: &dyn Executor, problem: Arc<ParallelProblem>, mut exchange: E) -> Result<ContextParallel<E>, ParallelError> {
        if exchange.size() != problem.ranks() || exchange.rank() >= exchange.size() {
            let error = ParallelError::Ranks { got: exchange.size(), expected: problem.ranks() };
            exchange.abort(&error.to_string());
            return Err(error);
        }
        let rank = exchange.rank();
        let make = |pass: Pass| Program::new(executor, &problem, rank, pass);
        let made =
            make(Pass::Forward).and_then(|forward| Ok((forward, problem.spec().backward.then(|| make(Pass::Backward)).transpose()?)));
        match made {
            Ok((forward, backward)) => Ok(ContextParallel { problem, exchange, forward, backward, agreed: false, broken: None }),
            Err(error) => {
                exchange.abort(&error.to_string());
                Err(error)
            }
        }
    }

    /// Returns the problem.
    pub fn problem(&self) -> &ParallelProblem {
        &self.problem
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.exchange.rank()
    }

    /// Makes the next call compare the problems of all ranks, as the first call does. A rank with several problems over one group calls it before each of its
    /// calls, so that ranks which run different ones of their problems notice it.
    pub fn compare_again(&mut self) {
        self.agreed = false;
    }

    /// Computes the forward pass of this rank's queries. `q`, `k`, `v`, `o` and the statistics are shards; parameters are whole. All ranks must call it.
    ///
    /// # Errors
    /// Returns every mistake in the call before anything is exchanged. Fails if another rank fails, stops answering or runs another problem. After a failure
    /// every later call fails too.
    pub fn forward(&mut self, call: HostForward<'_>) -> Result<(), ParallelError> {
        let HostForward { q, k, v, o, stats, row_max, sum_exp, attn_scale, params, .. } = call;
        let statistics = [(Tensor::Stats, stats), (Tensor::RowMax, row_max), (Tensor::SumExp, sum_exp)];
        let mut outputs = vec![(Tensor::O, o)];
        outputs.extend(statistics.into_iter().filter_map(|(tensor, memory)| Some((tensor, ElementsMut::F32(memory?)))));
        self.run(Pass::Forward, &[(Tensor::Q, q), (Tensor::K, k), (Tensor::V, v)], (outputs, Vec::new()), attn_scale, params, Vec::new())
    }

    /// Computes the gradients of this rank's queries, keys and values. Operands are shards, as in the forward pass; `stats` are natural logarithms. A
    /// gradient of a declared parameter or of the sink is this rank's contribution, in the extents of the whole parameter: sum it over the ranks.
    ///
    /// # Errors
    /// Fails as [`ContextParallel::forward`] does, also for a problem that was made without [`with_backward`](crate::ParallelSpec::with_backward).
    pub fn backward(&mut self, call: HostBackward<'_>) -> Result<(), ParallelError> {
        let HostBackward { q, k, v, o, d_o, stats, dq, dk, dv, attn_scale, params, gradients, .. } = call;
        let mut errors: Vec<SpecError> = Vec::new();
        if self.backward.is_none() {
            errors.push(SpecError::new("backward", "a call", "none: make the problem with ParallelSpec::with_backward"));
        }
        errors.extend(self.problem.backward().into_iter().flat_map(|backward| HostGradient::mistakes(backward, &gradients)));
        let inputs =
            [(Tensor::Q, q), (Tensor::K, k), (Tensor::V, v), (Tensor::O, o), (Tensor::DO, d_o), (Tensor::Stats, Elements::F32(stats))];
        self.run(
            Pass::Backward,
            &inputs,
            (vec![(Tensor::DQ, dq), (Tensor::DK, dk), (Tensor::DV, dv)], gradients),
            attn_scale,
            params,
            errors,
        )
    }

    fn run(
        &mut self,
        pass: Pass,
        inputs: &[(Tensor, Elements<'_>)],
        (outputs, gradients): (Vec<(Tensor, ElementsMut<'_>)>, Vec<HostGradient<'_>>),
        attn_scale: Option<f32>,
        params: &[Param<'_>],
        errors: Vec<SpecError>,
    ) -> Result<(), ParallelError> {
        if let Some(why) = &self.broken {
            return Err(ParallelError::Broken(why.clone()));
        }
        let result = self.run_checked(pass, inputs, (outputs, gradients), attn_scale, params, errors);
        if let Err(error) = &result {
            self.exchange.abort(&error.to_string());
            self.broken = Some(error.to_string());
        }
        result
    }

    fn run_checked(
        &mut self,
        pass: Pass,
        inputs: &[(Tensor, Elements<'_>)],
        (outputs, gradients): (Vec<(Tensor, ElementsMut<'_>)>, Vec<HostGradient<'_>>),
        attn_scale: Option<f32>,
        params: &[Param<'_>],
        mut errors: Vec<SpecError>,
    ) -> Result<(), ParallelError> {
        let (problem, rank) = (self.problem.clone(), self.exchange.rank());
        let whole = problem.problem();
        for (tensor, dtype, len) in
            inputs.iter().map(|(t, x)| (*t, x.dtype(), x.len())).chain(outputs.iter().map(|(t, x)| (*t, x.dtype(), x.len())))
        {
            errors.extend(mistakes(&problem, rank, tensor, dtype, len));
        }
        let program = if pass == Pass::Forward { Some(&self.forward) } else { self.backward.as_ref() };
        let expected = program.map_or(&[][..], |program| &program.schedule.slots[..]).iter().filter(|slot| slot.role == Role::Output);
        for slot in expected.clone().filter(|slot| !outputs.iter().any(|(t, _)| *t == slot.tensor)) {
            errors.push(SpecError::new(slot.tensor.name(), "nothing", "a buffer: the problem computes it"));
        }
        for (tensor, _) in outputs.iter().filter(|(t, _)| !expected.clone().any(|slot| slot.tensor == *t)) {
            errors.push(SpecError::new(tensor.name(), "a buffer", "none: the problem does not compute it"));
        }
        let scale = attn_scale.unwrap_or_else(|| whole.default_scale());
        if !scale.is_finite() {
            errors.push(SpecError::new("attn_scale", scale, "a finite number"));
        }
        let unpacked = match problem.packed().map(|packed| tokens(packed, whole, params)).transpose() {
            Ok(unpacked) => unpacked,
            Err(more) => return Err(SpecErrors(errors.into_iter().chain(more.0).collect()).into()),
        };
        let dense: Vec<Param<'_>> = unpacked.iter().flat_map(|tensors| with_tokens(params, tensors, problem.declared(pass))).collect();
        let params = if unpacked.is_some() { &dense[..] } else { params };
        let values = match params::bind(problem.declared(pass), whole.extents(), params) {
            Ok(values) => values,
            Err(more) => {
                errors.extend(more.0);
                Vec::new()
            }
        };
        let Some(program) = program.filter(|_| errors.is_empty()) else { return Err(SpecErrors(errors).into()) };
        if !self.agreed {
            agree(&mut self.exchange, &digest(&problem, pass, scale))?;
            self.agreed = true;
        }
        let sums = gradients.iter().map(|g| (g.name.to_owned(), vec![0.0; g.data.len()])).collect();
        let mut run =
            Run { problem: &problem, program, memory: Vec::new(), sums, scale, declared: problem.declared(pass), values: &values };
        run.memory = program.schedule.slots.iter().map(|slot| Memory::new(slot, &program.schedule.extents)).collect();
        run.load(inputs);
        run.steps(&mut self.exchange)?;
        run.sink_gradient(inputs);
        run.store(outputs);
        for mut gradient in gradients {
            let sums = run.sums.get(gradient.name).map_or(&[][..], |sums| &sums[..]);
            sums.iter().enumerate().for_each(|(n, sum)| set(&mut gradient.data, n, *sum));
        }
        Ok(())
    }
}

/// Returns the tensors of an unpacked problem for the `cu_seqlens` of a call.
fn tokens(packed: &Problem, dense: &Problem, params: &[Param<'_>]) -> Result<[Vec<i32>; 4], SpecErrors> {
    let documents = packed.documents(params)?.unwrap_or_default();
    let tokens = usize::try_from(dense.seq_q()).unwrap_or(0);
    if documents.end(Side::Queries) > tokens {
        let rule = format!("at most {tokens}, the tokens of the problem");
        return Err(SpecErrors(vec![SpecError::new("the last offset of cu_seqlens", documents.end(Side::Queries), rule)]));
    }
    Ok(documents.tokens(tokens))
}

/// Replaces `cu_seqlens` among the parameters of a call.
fn with_tokens<'a>(params: &[Param<'a>], tensors: &'a [Vec<i32>; 4], declared: &[Declared]) -> Vec<Param<'a>> {
    let others = params.iter().filter(|p| p.name != CU_SEQLENS).copied();
    // A problem declares only those tensors that its masks and score_mods read.
    let read = PACKED_TENSORS.into_iter().zip(tensors).filter(|(name, _)| declared.iter().any(|d| d.name == *name));
    others.chain(read.map(|(name, tensor)| Param::new(name, tensor))).collect()
}

fn mistakes(problem: &ParallelProblem, rank: usize, tensor: Tensor, dtype: DType, len: usize) -> Vec<SpecError> {
    let own = if tensor.is_statistic() { DType::F32 } else { problem.problem().dtype() };
    let need = problem.local(rank, tensor).extent().unwrap_or(i64::MAX);
    let mut errors = Vec::new();
    if dtype != own {
        errors.push(SpecError::new(format!("{} dtype", tensor.name()), dtype, format!("{own}, the type of the problem")));
    }
    if i64::try_from(len) != Ok(need) {
        let rule = format!("{need} elements, the shard of rank {rank}");
        errors.push(SpecError::new(format!("{} length", tensor.name()), len, rule));
    }
    errors
}

/// Compares the digests of all ranks.
fn agree(exchange: &mut impl Exchange, own: &[u64; FIELDS.len()]) -> Result<(), ParallelError> {
    let (rank, size) = (exchange.rank(), exchange.size());
    let bytes: Vec<u8> = own.iter().flat_map(|n| n.to_le_bytes()).collect();
    let peers: Vec<usize> = (0..size).filter(|peer| *peer != rank).collect();
    let mut received = vec![vec![0u8; bytes.len()]; peers.len()];
    let sends: Vec<Outgoing<'_>> = peers.iter().map(|&peer| Outgoing { peer, bytes: &bytes }).collect();
    let mut receives: Vec<Incoming<'_>> = peers.iter().zip(&mut received).map(|(&peer, bytes)| Incoming { peer, bytes }).collect();
    exchange.exchange(&sends, &mut receives)?;
    for (n, field) in FIELDS.iter().enumerate() {
        let unlike = peers.iter().zip(&received).filter(|(_, other)| other[8 * n..8 * n + 8] != bytes[8 * n..8 * n + 8]);
        let ranks: Vec<usize> = unlike.map(|(peer, _)| *peer).collect();
        if !ranks.is_empty() {
            return Err(ParallelError::Mismatch { field, rank, ranks });
        }
    }
    Ok(())
}
