//! A schedule with the places of its slots in device memory and the plan of each of its parts.

use crate::device::kernels::Mode;
use crate::device::view::{Places, Scratch, View, alignment, bytes, row_major};
use crate::device::{Partials, Planner};
use crate::error::ParallelError;
use crate::host::bug;
use crate::params::chunks;
use crate::problem::ParallelProblem;
use crate::schedule::{Attend, Pass, Role, Schedule, Step, Tensor, Transfer, places};
use sdpa_core::device::OnDevice;
use sdpa_core::expr::{Axis, Declared, ParamKind};
use sdpa_core::{
    BackwardProblem, Chunk, DROPOUT_OFFSET, DType, Layout, Placed, Placement, Problem, SINK, SpecError, SpecErrors, TensorSpec,
};
use sdpa_driver::{DeviceSlice, Stream};
use std::collections::HashMap;
use std::ops::Range;

/// The place of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotMemory {
    /// The caller's tensor, which has the layout of the slot.
    Caller,
    /// Memory of this rank, from this byte on.
    At(u64),
    /// None: no step names the slot.
    Unused,
}

/// A part of a slot. The address of the view counts from the first byte of the slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    pub(crate) slot: usize,
    pub(crate) view: View,
}

/// A transfer: some bytes of a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) peer: usize,
    pub(crate) slot: usize,
    pub(crate) first: u64,
    pub(crate) bytes: u64,
}

/// A step whose tokens have been looked up, so that calls only add addresses.
#[derive(Debug)]
pub(crate) enum Action {
    /// Copies or adds elements.
    Move { mode: Mode, pairs: Vec<[Local; 2]> },
    /// Sends and receives.
    Exchange { sends: Vec<Piece>, receives: Vec<Piece> },
    /// Computes a part.
    Attend(Box<Part>),
    /// Finishes a merged output: its accumulators, the results, and the first head.
    Finish { reads: Box<[Local; 3]>, writes: Vec<(Tensor, Local)>, first_head: i64 },
}

/// One step with the slots that it uses.
#[derive(Debug)]
pub(crate) struct ResolvedStep {
    pub(crate) action: Action,
    /// Slots that it reads, and slots that it writes.
    pub(crate) uses: [Vec<usize>; 2],
    /// Accumulators that it is the first to name.
    pub(crate) begins: Vec<usize>,
}

/// A schedule that runs on a device.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) schedule: Schedule,
    pub(crate) slot_memory: Vec<SlotMemory>,
    pub(crate) steps: Vec<ResolvedStep>,
    /// Bytes of the slots.
    pub(crate) slot_bytes: u64,
    /// Bytes that one step needs for operands and results in other layouts.
    pub(crate) scratch_bytes: u64,
}

/// A tensor that a part reads.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) from: Local,
    /// The place in the scratch memory of a dense copy in the type of the part; `None` if the part reads the slot.
    pub(crate) copy: Option<u64>,
}

/// A part of a whole tensor, dense in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) dims: [i64; 4],
    pub(crate) strides: [i64; 4],
    /// The index of its first element.
    pub(crate) first: i64,
}

/// A parameter of a part.
#[derive(Debug)]
pub(crate) enum PartParam {
    /// A number that depends on the part.
    Number(String, f32),
    /// The caller's value.
    Whole(String),
    /// A part of the caller's tensor, and the place of its copy.
    Cut { name: String, dtype: DType, cut: Cut, copy: u64 },
    /// The caller's number, to which the part adds its own.
    Shifted { name: String, more: i64, copy: u64 },
}

/// The gradient of a parameter: the part's own place, and its places in the whole gradient.
#[derive(Debug)]
pub(crate) struct PartGradient {
    pub(crate) name: String,
    pub(crate) own: u64,
    pub(crate) cut: Cut,
}

/// One part of the problem, prepared.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) plan: OnDevice<DeviceSlice, Stream>,
    pub(crate) dtype: DType,
    /// Whether the result is merged into, or added to, accumulators.
    pub(crate) partial: bool,
    pub(crate) reads: Vec<Read>,
    pub(crate) writes: Vec<(Tensor, Local)>,
    /// Places in the scratch memory of the dense results: `o` unless a slot is written, then `stats`, `row_max` and `sum_exp`; or `dq`, `dk` and `dv`.
    pub(crate) results: [Option<u64>; 4],
    pub(crate) params: Vec<PartParam>,
    pub(crate) gradients: Vec<PartGradient>,
}

/// Plans by problem: chunks at equal distances share one.
#[derive(Default)]
struct Plans {
    forward: HashMap<Problem, OnDevice<DeviceSlice, Stream>>,
    backward: HashMap<BackwardProblem, OnDevice<DeviceSlice, Stream>>,
}

impl Program {
    pub(crate) fn new(
        planner: &dyn Planner,
        problem: &ParallelProblem,
        rank: usize,
        pass: Pass,
        partials: Partials,
    ) -> Result<Program, ParallelError> {
        let schedule = problem.schedule(rank, pass);
        let (slot_memory, slot_bytes) = slot_memory(problem, &schedule);
        let mut begins = begins(&schedule).into_iter();
        let (mut plans, mut scratch_bytes, mut steps) = (Plans::default(), 0, Vec::new());
        for step in &schedule.steps {
            let action = match step {
                Step::Copy { from, to, heads, chunk } => moved(&schedule, [*from, *to], heads, chunk, Mode::Copy)?,
                Step::Add { from, to, heads, chunk } => moved(&schedule, [*from, *to], heads, chunk, Mode::Add)?,
                Step::Exchange { sends, receives } => {
                    let pieces = |all: &[Transfer]| all.iter().map(|t| piece(&schedule, t)).collect::<Result<Vec<_>, _>>();
                    Action::Exchange { sends: pieces(sends)?, receives: pieces(receives)? }
                }
                Step::Attend(attend) => {
                    let mut scratch = Scratch::default();
                    let making = Making { problem, schedule: &schedule, slot_memory: &slot_memory, attend, partials };
                    let part = making.part(planner, &mut plans, &mut scratch)?;
                    scratch_bytes = scratch_bytes.max(scratch.bytes());
                    Action::Attend(Box::new(part))
                }
                Step::Finish { q, heads, reads, writes } => {
                    let [o, row_max, sum_exp] = reads.map(|slot| local(&schedule, slot, heads, q));
                    let writes = writes.iter().map(|&slot| Ok((schedule.slots[slot].tensor, local(&schedule, slot, heads, q)?)));
                    let writes = writes.collect::<Result<_, ParallelError>>()?;
                    Action::Finish { reads: Box::new([o?, row_max?, sum_exp?]), writes, first_head: heads.start }
                }
            };
            let ([reads, mut writes], begins) = (step.uses(), begins.next().unwrap_or_default());
            // An accumulator is filled when it begins, also for a step that only reads it.
            writes.extend(&begins);
            steps.push(ResolvedStep { action, uses: [reads, writes], begins });
        }
        Ok(Program { schedule, slot_memory, steps, slot_bytes, scratch_bytes })
    }
}

/// Returns the part of a slot with these heads and tokens.
fn local(schedule: &Schedule, slot: usize, heads: &Range<i64>, chunk: &Chunk) -> Result<Local, ParallelError> {
    let view = View::of(0, &schedule.slots[slot], &schedule.extents, heads, chunk);
    Ok(Local { slot, view: view.ok_or_else(|| bug("tokens that are not neighbours"))? })
}

fn piece(schedule: &Schedule, t: &Transfer) -> Result<Piece, ParallelError> {
    let slot = &schedule.slots[t.slot];
    let first = local(schedule, t.slot, &slot.heads, &t.chunk)?.view.address;
    Ok(Piece { peer: t.peer, slot: t.slot, first, bytes: schedule.extents.bytes(slot, t.chunk.len) })
}

fn moved(schedule: &Schedule, [from, to]: [usize; 2], heads: &Range<i64>, chunk: &Chunk, mode: Mode) -> Result<Action, ParallelError> {
    let runs = places(&schedule.slots[from], &schedule.slots[to], chunk);
    let runs = runs.ok_or_else(|| bug("a copy of tokens that a slot does not have"))?;
    let [source, target] = [from, to].map(|slot| View::tokens_of(0, &schedule.slots[slot], &schedule.extents, heads));
    let pair = |(a, b): &(Chunk, Chunk)| [Local { slot: from, view: source.tokens(a) }, Local { slot: to, view: target.tokens(b) }];
    Ok(Action::Move { mode, pairs: runs.iter().map(pair).collect() })
}

/// Returns whether a rank's shard has the layout of its slot: (token, head, dim) of one batch entry.
fn is_slot(local: &TensorSpec, tensor: Tensor) -> bool {
    let [batch, heads, _, dim] = local.dims;
    let [_, head, token, element] = local.strides;
    let rows = (heads == 1 || head == dim) && token == heads * dim && (element == 1 || dim == 1);
    batch == 1 && rows && !tensor.is_statistic()
}

fn slot_memory(problem: &ParallelProblem, schedule: &Schedule) -> (Vec<SlotMemory>, u64) {
    let end = schedule.steps.len();
    let mut lives: Vec<Option<[usize; 2]>> = vec![None; schedule.slots.len()];
    for (n, step) in schedule.steps.iter().enumerate() {
        for slot in step.slots() {
            lives[slot] = Some([lives[slot].map_or(n, |[first, _]| first), n]);
        }
    }
    let mut slot_memory = vec![SlotMemory::Unused; schedule.slots.len()];
    let mut placed: Vec<(usize, [usize; 2])> = Vec::new();
    for (n, slot) in schedule.slots.iter().enumerate() {
        let Some([first, last]) = lives[n] else { continue };
        let of_caller = matches!(slot.role, Role::Input | Role::Output);
        if of_caller && is_slot(&problem.local(schedule.rank, slot.tensor), slot.tensor) {
            slot_memory[n] = SlotMemory::Caller;
            continue;
        }
        // Inputs are copied before the first step, and outputs after the last one.
        placed.push(match slot.role {
            Role::Input => (n, [0, last]),
            Role::Output => (n, [first, end]),
            Role::Buffer | Role::Accumulator => (n, [first, last]),
        });
    }
    placed.sort_by_key(|(n, [first, _])| (*first, *n));
    let mut places = Places::default();
    for (n, life) in placed {
        let slot = &schedule.slots[n];
        slot_memory[n] = SlotMemory::At(places.place(schedule.extents.bytes(slot, slot.len()), life));
    }
    (slot_memory, places.bytes())
}

fn begins(schedule: &Schedule) -> Vec<Vec<usize>> {
    let mut seen = vec![false; schedule.slots.len()];
    let first = |step: &Step| {
        let slots = step.slots().into_iter();
        let new = slots.filter(|&slot| !std::mem::replace(&mut seen[slot], true));
        new.filter(|&slot| schedule.slots[slot].role == Role::Accumulator).collect()
    };
    schedule.steps.iter().map(first).collect()
}

/// A part that is being made.
struct Making<'a> {
    problem: &'a ParallelProblem,
    schedule: &'a Schedule,
    slot_memory: &'a [SlotMemory],
    attend: &'a Attend,
    partials: Partials,
}

impl Making<'_> {
    /// Returns this part of a slot.
    fn local(&self, slot: usize) -> Result<Local, ParallelError> {
        let attend = self.attend;
        let of_keys = self.schedule.slots[slot].tensor.is_of_keys();
        let (heads, chunk) = if of_keys { (&attend.heads_kv, &attend.k) } else { (&attend.heads_q, &attend.q) };
        local(self.schedule, slot, heads, chunk)
    }

    /// Returns the extents and strides of a part of a slot, with the alignment of its first element.
    fn tensor(&self, local: &Local) -> TensorSpec {
        let base = match self.slot_memory[local.slot] {
            SlotMemory::Caller => self.problem.local(self.schedule.rank, self.schedule.slots[local.slot].tensor).alignment,
            SlotMemory::At(_) | SlotMemory::Unused => 16,
        };
        let View { address, dims, strides, .. } = local.view;
        TensorSpec { dims, strides, alignment: alignment(address).min(base) }
    }

    /// Returns the layout in which the part reads slot `n`, and notes the read.
    fn read(&self, n: usize, dtype: DType, scratch: &mut Scratch, reads: &mut Vec<Read>) -> Result<TensorSpec, ParallelError> {
        let from = self.local(self.attend.reads[n])?;
        let tensor = self.tensor(&from);
        if from.view.dtype == dtype {
            reads.push(Read { from, copy: None });
            return Ok(tensor);
        }
        let dense = TensorSpec::dense(tensor.dims, Layout::Bhsd);
        reads.push(Read { from, copy: Some(scratch.piece(bytes(dtype, dense.dims.iter().product()))) });
        Ok(dense)
    }

    fn part(&self, planner: &dyn Planner, plans: &mut Plans, scratch: &mut Scratch) -> Result<Part, ParallelError> {
        let at = self.problem.placement(self.attend);
        let pass = self.schedule.pass;
        let placed = self.problem.placed(pass, self.attend)?;
        let mut placed = placed.ok_or_else(|| bug("a part without a pair"))?;
        let whole = self.problem.problem();
        let dtype = match self.partials {
            Partials::F32 if self.attend.partial => DType::F32,
            Partials::Operands | Partials::F32 => whole.dtype(),
        };
        placed.spec.dtype = dtype;
        let mut reads = Vec::new();
        placed.spec.q = self.read(0, dtype, scratch, &mut reads)?;
        placed.spec.k = self.read(1, dtype, scratch, &mut reads)?;
        placed.spec.v = self.read(2, dtype, scratch, &mut reads)?;
        let partial = self.attend.partial;
        let name = |slot: &usize| Ok((self.schedule.slots[*slot].tensor, self.local(*slot)?));
        let writes: Vec<(Tensor, Local)> = self.attend.writes.iter().map(name).collect::<Result<_, ParallelError>>()?;
        let spec = &mut placed.spec;
        let rows = |scratch: &mut Scratch, q: &TensorSpec| Some(scratch.piece(bytes(DType::F32, q.dims[..3].iter().product())));
        match pass {
            Pass::Forward => {
                let to = writes.iter().find(|(tensor, _)| *tensor == Tensor::O);
                let to = self.tensor(&to.ok_or_else(|| bug("a part without an output"))?.1);
                spec.o = if partial { TensorSpec::dense(to.dims, Layout::Bhsd) } else { to };
                let problem = spec.validate()?;
                let copy = partial.then(|| scratch.piece(bytes(dtype, to.dims.iter().product())));
                let asked = [problem.stats(), problem.row_max(), problem.sum_exp()];
                let [stats, row_max, sum_exp] = asked.map(|asked| asked.then(|| rows(scratch, &spec.q)).flatten());
                let plan = match plans.forward.get(&problem) {
                    Some(plan) => plan.clone(),
                    None => planner.plan(&problem)?,
                };
                plans.forward.insert(problem.clone(), plan.clone());
                let params = self.params(&placed, &at, problem.params(), scratch)?;
                let results = [copy, stats, row_max, sum_exp];
                Ok(Part { plan, dtype, partial, reads, writes, results, params, gradients: Vec::new() })
            }
            Pass::Backward => {
                spec.o = self.read(3, dtype, scratch, &mut reads)?;
                let d_o = self.read(4, dtype, scratch, &mut reads)?;
                reads.push(Read { from: self.local(self.attend.reads[5])?, copy: rows(scratch, &spec.q) });
                let gradients = [spec.q, spec.k, spec.v].map(|t| TensorSpec::dense(t.dims, Layout::Bhsd));
                let results = gradients.map(|t| Some(scratch.piece(bytes(dtype, t.dims.iter().product()))));
                let [dq, dk, dv] = gradients;
                let mut backward = spec.backward().with_d_o(d_o).with_dq(dq).with_dk(dk).with_dv(dv).deterministic();
                let read = backward.validate()?;
                // The gradient of the sink needs no part.
                let is_asked = |name: &str| name != SINK && read.params().iter().any(|p| p.name == name);
                let asked: Vec<&str> = self.problem.spec().wrt.iter().map(|g| &g.name[..]).filter(|name| is_asked(name)).collect();
                for name in &asked {
                    backward = backward.wrt(name, DType::F32);
                }
                let problem = backward.validate()?;
                let plan = match plans.backward.get(&problem) {
                    Some(plan) => plan.clone(),
                    None => planner.plan_backward(&problem)?,
                };
                plans.backward.insert(problem.clone(), plan.clone());
                let params = self.params(&placed, &at, problem.params(), scratch)?;
                let gradient = |name: &&str| self.gradient(name, &problem, &at, scratch);
                let gradients = asked.iter().map(gradient).collect::<Result<_, _>>()?;
                let [dq, dk, dv] = results;
                Ok(Part { plan, dtype, partial, reads, writes, results: [dq, dk, dv, None], params, gradients })
            }
        }
    }

    fn params(
        &self,
        placed: &Placed,
        at: &Placement,
        declared: &[Declared],
        scratch: &mut Scratch,
    ) -> Result<Vec<PartParam>, ParallelError> {
        let numbers = placed.numbers(declared);
        let one = |p: &Declared| {
            if let Some((_, number)) = numbers.iter().find(|(name, _)| *name == p.name) {
                return Ok(PartParam::Number(p.name.clone(), *number));
            }
            if !self.problem.declared(self.schedule.pass).iter().any(|whole| whole.name == p.name) {
                let field = format!("parameter {}", p.name);
                return Err(SpecErrors(vec![SpecError::new(field, "a gradient's own parameter", "none over several ranks")]).into());
            }
            if p.name == DROPOUT_OFFSET {
                return Ok(PartParam::Shifted { name: p.name.clone(), more: placed.dropout_offset, copy: scratch.piece(8) });
            }
            Ok(match (p.kind, self.cut(p.kind, at)) {
                (ParamKind::Tensor { axes: _, dtype }, Some(cut)) => {
                    let copy = scratch.piece(bytes(dtype, cut.dims.iter().product()));
                    PartParam::Cut { name: p.name.clone(), dtype, cut, copy }
                }
                (ParamKind::Tensor { .. }, None) | (ParamKind::Scalar, _) => PartParam::Whole(p.name.clone()),
            })
        };
        declared.iter().map(one).collect()
    }

    /// Returns the part of a whole tensor that this part reads; `None` if it reads all of it.
    fn cut(&self, kind: ParamKind, at: &Placement) -> Option<Cut> {
        let ParamKind::Tensor { axes, dtype: _ } = kind else { return None };
        let extents = self.problem.problem().extents();
        let found = chunks(kind, at, extents)?;
        let whole = row_major(axes.dims(extents));
        let mut cut = Cut { dims: [1; 4], strides: [0; 4], first: 0 };
        for (n, axis) in Axis::ALL.into_iter().enumerate() {
            if let Some((_, chunk)) = found.iter().find(|(own, _)| *own == axis) {
                (cut.dims[n], cut.strides[n]) = (chunk.len, whole[n] * chunk.stride);
                cut.first += whole[n] * chunk.start;
            }
        }
        Some(cut)
    }

    fn gradient(
        &self,
        name: &str,
        problem: &BackwardProblem,
        at: &Placement,
        scratch: &mut Scratch,
    ) -> Result<PartGradient, ParallelError> {
        let elements = problem.gradient_elements(name);
        let declared = self.problem.declared(Pass::Backward).iter().find(|p| p.name == name);
        let declared = declared.ok_or_else(|| bug("a gradient of an unknown parameter"))?;
        let dims = [1, 1, 1, elements];
        let cut = self.cut(declared.kind, at).unwrap_or(Cut { dims, strides: row_major(dims), first: 0 });
        Ok(PartGradient { name: name.to_owned(), own: scratch.piece(bytes(DType::F32, elements)), cut })
    }
}
