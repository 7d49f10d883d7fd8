//! Compiles a trace to steps over registers.

use super::machine::CHUNK;
use sdpa_core::expr::{Axis, Binary, Depends, Node, TanhSlope, Trace, Type, Unary, tanh_slope};

/// The frequency with which a value is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Once per batch entry.
    Entry,
    /// Once per row of a tile.
    Rows,
    /// Once per key of a block.
    Keys,
    /// Once per pair of a row and a key.
    Pairs,
}

impl Level {
    fn of(depends: Depends) -> Level {
        let rows = depends.axes.has(Axis::Head) || depends.axes.has(Axis::Q);
        match (depends.score, rows, depends.axes.has(Axis::K)) {
            (true, _, _) | (false, true, true) => Level::Pairs,
            (false, true, false) => Level::Rows,
            (false, false, true) => Level::Keys,
            (false, false, false) => Level::Entry,
        }
    }
}

/// The operation of a step. Its operands are register numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Reads a value of another level, by its index in the trace.
    Import(usize),
    Score,
    Upstream,
    Index(Axis),
    /// Reads the element of a tensor, by its index among the parameters.
    Load(usize),
    /// Reads the element of a table. The fields are its index among the parameters, and the register of the computed index.
    Read(usize, usize),
    Unary(Unary, Type, usize),
    Binary(Binary, Type, usize, usize),
    Select(usize, usize, usize),
    /// `g·sech²(x)`, which a trace contains as a difference.
    TanhSlope(usize, usize),
}

/// One operation and the register of its result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) op: Op,
    /// The register of the result, which is none of the operands.
    pub(super) to: usize,
}

/// The steps of one level.
#[derive(Clone, Debug)]
pub(super) struct Code {
    /// Steps that run once, before any number of runs of the other steps. The other steps do not overwrite their registers.
    pub(super) lasting: Vec<Step>,
    pub(super) steps: Vec<Step>,
    /// Number of steps that the first root needs.
    pub(super) split: usize,
    /// The register of each value while it is live.
    pub(super) place: Vec<usize>,
    pub(super) n_registers: usize,
}

/// A trace (an expression graph) that was compiled to steps over registers.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(super) trace: Trace,
    pub(super) types: Vec<Type>,
    pub(super) level: Vec<Level>,
    pub(super) rows: Code,
    pub(super) keys: Code,
    pub(super) pairs: Code,
}

impl Program {
    pub(crate) fn new(trace: &Trace) -> Program {
        let level: Vec<Level> = trace.depends().into_iter().map(Level::of).collect();
        let types: Vec<Type> = trace.ids().map(|id| trace.ty(id)).collect();
        let slopes: Vec<Option<TanhSlope>> = trace.ids().map(|id| tanh_slope(trace, id)).collect();
        let mut needed = vec![false; types.len()];
        trace.roots().iter().for_each(|root| needed[root.index()] = true);
        let mut compiler = Compiler { trace, types: &types, level: &level, slopes: &slopes, needed: &[] };
        // Mark needed values from the last to the first. Operands that `TanhSlope` replaces are then not needed.
        for value in (0..needed.len()).rev() {
            if needed[value] {
                compiler.operands(value).for_each(|x| needed[x] = true);
            }
        }
        compiler.needed = &needed;
        let (rows, keys, pairs) = (compiler.inner(Level::Rows), compiler.inner(Level::Keys), compiler.pairs());
        Program { trace: trace.clone(), types, level, rows, keys, pairs }
    }

    /// Returns the bytes of the registers of one worker, without the small ones of rows and keys.
    pub(super) fn bytes(&self) -> usize {
        4 * CHUNK * self.pairs.n_registers
    }
}

struct Compiler<'t> {
    trace: &'t Trace,
    types: &'t [Type],
    level: &'t [Level],
    /// Values that are computed by another operation than in the trace.
    slopes: &'t [Option<TanhSlope>],
    /// Values that roots depend on.
    needed: &'t [bool],
}

/// Last use of a value that stays live to the end.
const END: usize = usize::MAX;

impl Compiler<'_> {
    fn operands(&self, value: usize) -> impl Iterator<Item = usize> + use<> {
        let slope = self.slopes[value].map(|slope| [slope.upstream, slope.of]);
        let spelled = self.trace.nodes()[value].operands().filter(move |_| slope.is_none());
        slope.into_iter().flatten().chain(spelled).map(|id| id.index())
    }

    fn of(&self, level: Level) -> impl Iterator<Item = usize> {
        (0..self.level.len()).filter(move |&value| self.level[value] == level && self.needed[value])
    }

    /// Compiles the level of rows or keys. Values that another level or a root reads stay live to the end.
    fn inner(&mut self, own: Level) -> Code {
        let order: Vec<usize> = self.of(own).collect();
        let mut last = vec![0; self.level.len()];
        for pair in self.of(Level::Pairs) {
            self.operands(pair).for_each(|x| last[x] = END);
        }
        self.trace.roots().iter().for_each(|root| last[root.index()] = END);
        let lasting = self.met(&order, |level| level == Level::Entry);
        let split = order.len();
        self.code(own, &lasting, &order, split, last)
    }

    /// Compiles the level of pairs. The steps that the first root needs come first.
    fn pairs(&mut self) -> Code {
        let roots: Vec<usize> = self.trace.roots().iter().map(|root| root.index()).collect();
        let mut early = vec![false; self.level.len()];
        early[roots[0]] = true;
        // The scores are needed in the first part: the caller overwrites them between the two parts.
        self.trace.nodes().iter().zip(&mut early).for_each(|(node, early)| *early |= *node == Node::Score);
        for value in (0..early.len()).rev().filter(|&value| self.level[value] == Level::Pairs) {
            if early[value] {
                self.operands(value).for_each(|x| early[x] = true);
            }
        }
        let mut sequence: Vec<usize> = Vec::new();
        let mut there = vec![false; self.level.len()];
        let mut split = 0;
        for phase in [true, false] {
            // Push each value at most once. A value of the level of keys comes before the first value of pairs that reads it.
            let mut push = |value: usize| {
                if !std::mem::replace(&mut there[value], true) {
                    sequence.push(value);
                }
            };
            let keys = |value: &usize| self.level[*value] == Level::Keys;
            roots.iter().copied().enumerate().filter(|(n, root)| (*n == 0) == phase && keys(root)).for_each(|(_, root)| push(root));
            for value in self.of(Level::Pairs).filter(|&value| early[value] == phase) {
                self.operands(value).filter(keys).for_each(&mut push);
                push(value);
            }
            if phase {
                split = sequence.len();
            }
        }
        let outer = |level| matches!(level, Level::Entry | Level::Rows);
        let mut lasting = self.met(&sequence, outer);
        for &root in roots.iter().filter(|root| outer(self.level[**root])) {
            if !lasting.contains(&root) {
                lasting.push(root);
            }
        }
        let mut last = vec![0; self.level.len()];
        roots.iter().for_each(|&root| last[root] = END);
        self.code(Level::Pairs, &lasting, &sequence, split, last)
    }

    /// Returns operands of some levels.
    fn met(&self, values: &[usize], wanted: impl Fn(Level) -> bool) -> Vec<usize> {
        let mut there = vec![false; self.level.len()];
        let all = values.iter().flat_map(|&value| self.operands(value));
        all.filter(|&x| wanted(self.level[x]) && !std::mem::replace(&mut there[x], true)).collect()
    }

    /// Allocates registers. `last` marks values that stay live to the end.
    fn code(&self, own: Level, lasting: &[usize], sequence: &[usize], split: usize, mut last: Vec<usize>) -> Code {
        let mut place = vec![END; self.level.len()];
        let mut code = Code { lasting: Vec::new(), steps: Vec::new(), split, place: Vec::new(), n_registers: lasting.len() };
        for (to, &value) in lasting.iter().enumerate() {
            (place[value], last[value]) = (to, END);
            code.lasting.push(Step { op: Op::Import(value), to });
        }
        let own = |value: usize| self.level[value] == own;
        for (at, &value) in sequence.iter().enumerate().filter(|(_, value)| own(**value)) {
            self.operands(value).for_each(|x| last[x] = last[x].max(at));
        }
        let mut free: Vec<usize> = Vec::new();
        for (at, &value) in sequence.iter().enumerate() {
            let to = free.pop().unwrap_or_else(|| {
                code.n_registers += 1;
                code.n_registers - 1
            });
            code.steps.push(Step { op: if own(value) { self.op(value, &place) } else { Op::Import(value) }, to });
            place[value] = to;
            if own(value) {
                let mut done: Vec<usize> = self.operands(value).filter(|&x| last[x] == at).map(|x| place[x]).collect();
                done.sort_unstable();
                done.dedup();
                free.extend(done);
            }
        }
        code.place = place;
        code
    }

    fn op(&self, value: usize, place: &[usize]) -> Op {
        if let Some(TanhSlope { upstream, of }) = self.slopes[value] {
            return Op::TanhSlope(place[upstream.index()], place[of.index()]);
        }
        match self.trace.nodes()[value] {
            Node::Score => Op::Score,
            Node::Upstream => Op::Upstream,
            Node::Index(axis) => Op::Index(axis),
            Node::Param(p) => Op::Load(p.index()),
            Node::Read(p, x) => Op::Read(p.index(), place[x.index()]),
            Node::Unary(f, x) => Op::Unary(f, self.types[x.index()], place[x.index()]),
            Node::Binary(f, x, y) => Op::Binary(f, self.types[x.index()], place[x.index()], place[y.index()]),
            Node::Select(c, x, y) => Op::Select(place[c.index()], place[x.index()], place[y.index()]),
            // Extents and constants are values of the entry level and are imported from there.
            Node::Extent(_) | Node::Const(_) => Op::Import(value),
        }
    }
}
