//! Registers, and their inputs.

use super::apply::Apply;
use super::compile::{Code, Level, Op, Program, Step};
use super::load::{Gather, Tensor};
use crate::isa::Isa;
use sdpa_core::expr::{self, Axis, Declared, Node, ParamKind, Precision, Type};
use sdpa_core::tensor::ParamValue;
use std::ops::Range;

/// Number of (row, key) pairs that are computed at a time: enough to amortise the overhead of a step, and few enough for the L1 cache.
pub(crate) const CHUNK: usize = 512;

/// A compiled score_mod or mask, bound to the parameters of a call.
#[derive(Clone, Debug)]
pub(crate) struct Bound<'a> {
    program: &'a Program,
    isa: Isa,
    extents: [i64; 4],
    /// In the order of the trace's parameters.
    tensors: Vec<Tensor<'a>>,
}

impl<'a> Bound<'a> {
    /// Binds a program to the parameters of a call. `values` are the values of the parameters `declared`, in the same order.
    pub(crate) fn new(program: &'a Program, isa: Isa, extents: [i64; 4], declared: &[Declared], values: &[ParamValue<'a>]) -> Bound<'a> {
        let tensor = |p: &Declared| {
            let value = declared.iter().position(|d| d.name == p.name).map_or(ParamValue::Scalar(f32::NAN), |n| values[n]);
            Tensor { value, strides: strides(p.kind, extents) }
        };
        Bound { program, isa, extents, tensors: program.trace.params().iter().map(tensor).collect() }
    }
}

/// Returns the strides of a parameter's elements along (batch, head, q, k); 0 along axes that it does not span.
pub(crate) fn strides(kind: ParamKind, extents: [i64; 4]) -> [usize; 4] {
    match kind {
        ParamKind::Scalar => [0; 4],
        ParamKind::Tensor { axes, dtype: _ } => {
            let mut next = 1;
            let mut strides = [0; 4];
            for axis in [Axis::K, Axis::Q, Axis::Head, Axis::Batch].into_iter().filter(|&axis| axes.has(axis)) {
                strides[axis.place()] = next;
                next *= extents[axis.place()] as usize;
            }
            strides
        }
    }
}

/// The position of a row within a batch entry: its query head and its query.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) head: usize,
    pub(crate) query: usize,
}

/// The rows of a tile, and the values that depend on them alone.
#[derive(Debug, Default)]
struct Tile {
    rows: Vec<Row>,
    registers: Vec<Vec<u32>>,
}

/// Runs a compiled and bound score_mod or mask, for one worker.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    bound: &'a Bound<'a>,
    batch: usize,
    /// Bits of the values on the entry's level, by their index in the trace.
    entry: Vec<u32>,
    first_key: usize,
    keys: Vec<Vec<u32>>,
    tiles: Vec<Tile>,
    pairs: Vec<Vec<u32>>,
    /// Offset of the first element of each row.
    places: Vec<usize>,
}

fn registers(code: &Code, len: usize, to: &mut Vec<Vec<u32>>) {
    to.resize_with(code.n_registers, Vec::new);
    to.iter_mut().filter(|register| register.len() < len).for_each(|register| register.resize(len, 0));
}

/// Runs steps; `input` fills the registers that are not computed from others.
fn run(bound: &Bound<'_>, steps: &[Step], registers: &mut [Vec<u32>], len: usize, mut input: impl FnMut(Op, &mut [u32])) {
    let isa = bound.isa;
    for step in steps {
        let mut to = std::mem::take(&mut registers[step.to]);
        match step.op {
            Op::Unary(..) | Op::Binary(..) | Op::Select(..) | Op::TanhSlope(..) => {
                isa.run(Apply { op: step.op, from: registers, to: &mut to[..len] });
            }
            Op::Read(p, x) => bound.tensors[p].read(&registers[x][..len], &mut to[..len]),
            Op::Import(_) | Op::Score | Op::Upstream | Op::Index(_) | Op::Load(_) => input(step.op, &mut to[..len]),
        }
        registers[step.to] = to;
    }
}

impl<'a> Machine<'a> {
    pub(crate) fn new(bound: &'a Bound<'a>) -> Machine<'a> {
        let mut pairs = Vec::new();
        registers(&bound.program.pairs, CHUNK, &mut pairs);
        let (entry, keys, tiles, places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Machine { bound, batch: 0, entry, first_key: 0, keys, tiles, pairs, places }
    }

    /// Returns the number of keys that are computed at a time, for tiles of `width` rows.
    pub(crate) fn keys_at_a_time(width: usize) -> usize {
        (CHUNK / width).max(1)
    }

    /// Selects a batch entry, and computes the values that depend on it alone.
    pub(crate) fn entry(&mut self, batch: usize) {
        let Bound { program, extents, tensors, .. } = self.bound;
        self.batch = batch;
        let (types, f32) = (&program.types, Precision::F32);
        let mut values: Vec<f64> = Vec::with_capacity(types.len());
        for (at, node) in program.trace.nodes().iter().enumerate() {
            let value = match *node {
                _ if program.level[at] != Level::Entry => f64::NAN,
                Node::Index(_) => batch as f64,
                Node::Extent(axis) => extents[axis.place()] as f64,
                Node::Const(c) => c.to_f64(),
                Node::Param(p) => tensors[p.index()].value.get(batch * tensors[p.index()].strides[0]),
                Node::Read(p, x) => tensors[p.index()].value.get(program.trace.params()[p.index()].kind.within(values[x.index()] as i64)),
                Node::Unary(f, x) => expr::unary(f, types[x.index()], types[at], values[x.index()], f32),
                Node::Binary(f, x, y) => expr::binary(f, types[x.index()], values[x.index()], values[y.index()], f32),
                Node::Select(c, x, y) => values[if values[c.index()] != 0.0 { x.index() } else { y.index() }],
                Node::Score | Node::Upstream => f64::NAN,
            };
            values.push(value);
        }
        self.entry.clear();
        self.entry.extend(values.into_iter().zip(types).map(|(x, ty)| match ty {
            Type::F32 => (x as f32).to_bits(),
            Type::I32 => x as i32 as u32,
            Type::Bool => u32::from(x != 0.0),
        }));
    }

    /// Selects a block of keys, and computes the values that depend on these keys alone.
    pub(crate) fn keys(&mut self, keys: &Range<usize>) {
        let Machine { bound, batch, entry, keys: to, .. } = self;
        let Bound { program, isa, tensors, .. } = *bound;
        let code = &program.keys;
        registers(code, keys.len(), to);
        self.first_key = keys.start;
        let input = |op, to: &mut [u32]| match op {
            Op::Import(value) => to.fill(entry[value]),
            Op::Load(p) => {
                let Tensor { value, strides } = tensors[p];
                let place = *batch * strides[0] + keys.start * strides[3];
                isa.run(Gather { value, rows: &[place], n_keys: keys.len(), step: strides[3], to });
            }
            Op::Index(_) => to.iter_mut().zip(keys.clone()).for_each(|(to, key)| *to = key as u32),
            Op::Score | Op::Upstream | Op::Read(..) | Op::Unary(..) | Op::Binary(..) | Op::Select(..) | Op::TanhSlope(..) => {}
        };
        run(bound, &code.lasting, to, keys.len(), input);
        run(bound, &code.steps, to, keys.len(), input);
    }

    /// Computes the values that depend on the rows of a tile alone, and stores them under `tile`.
    pub(crate) fn rows(&mut self, tile: usize, rows: impl Iterator<Item = Row>) {
        if self.tiles.len() <= tile {
            self.tiles.resize_with(tile + 1, Tile::default);
        }
        let Machine { bound, batch, entry, tiles, places, .. } = self;
        let Bound { program, isa, tensors, .. } = *bound;
        let Tile { rows: of_tile, registers: to } = &mut tiles[tile];
        of_tile.clear();
        of_tile.extend(rows);
        let (of_tile, len, code) = (&*of_tile, of_tile.len(), &program.rows);
        registers(code, len, to);
        let mut input = |op, to: &mut [u32]| match op {
            Op::Import(value) => to.fill(entry[value]),
            Op::Load(p) => {
                let Tensor { value, strides } = tensors[p];
                places_of(of_tile, *batch, strides, places);
                isa.run(Gather { value, rows: places, n_keys: 1, step: 0, to });
            }
            Op::Index(Axis::Head) => to.iter_mut().zip(of_tile).for_each(|(to, row)| *to = row.head as u32),
            Op::Index(_) => to.iter_mut().zip(of_tile).for_each(|(to, row)| *to = row.query as u32),
            Op::Score | Op::Upstream | Op::Read(..) | Op::Unary(..) | Op::Binary(..) | Op::Select(..) | Op::TanhSlope(..) => {}
        };
        run(bound, &code.lasting, to, len, &mut input);
        run(bound, &code.steps, to, len, &mut input);
    }

    /// Selects a tile whose rows were stored by [`Machine::rows`]. It must precede [`Machine::first`].
    pub(crate) fn tile(&mut self, tile: usize) {
        let Machine { bound, entry, tiles, pairs, .. } = self;
        let Program { level, rows, pairs: code, .. } = bound.program;
        let Tile { rows: of_tile, registers } = &tiles[tile];
        let width = of_tile.len();
        run(bound, &code.lasting, pairs, CHUNK, |op, to| {
            let Op::Import(value) = op else { return };
            if level[value] == Level::Rows {
                let from = &registers[rows.place[value]][..width];
                to.chunks_exact_mut(width).for_each(|to| to.copy_from_slice(from));
            } else {
                to.fill(entry[value]);
            }
        });
    }

    /// Computes the first root (output) of the program for some keys and the rows of `tile`, in the layout `[key][row]`. `given` are
    /// their scores.
    pub(crate) fn first(&mut self, tile: usize, keys: &Range<usize>, given: &[f32]) -> &[u32] {
        let steps = &self.bound.program.pairs.steps[..self.bound.program.pairs.split];
        self.run(steps, tile, keys, given, &[]);
        self.root(0, keys.len() * self.tiles[tile].rows.len())
    }

    /// Computes the other roots (outputs) of the program for the pairs of the last call of [`Machine::first`]. `upstream` is the gradient
    /// of the modified score.
    pub(crate) fn others(&mut self, tile: usize, keys: &Range<usize>, given: &[f32], upstream: &[f32]) {
        let steps = &self.bound.program.pairs.steps[self.bound.program.pairs.split..];
        self.run(steps, tile, keys, given, upstream);
    }

    /// Returns the first `len` values of root (output) number `n`, as the bits of f32 or i32.
    pub(crate) fn root(&self, n: usize, len: usize) -> &[u32] {
        let program = self.bound.program;
        &self.pairs[program.pairs.place[program.trace.roots()[n].index()]][..len]
    }

    fn run(&mut self, steps: &[Step], tile: usize, keys: &Range<usize>, given: &[f32], upstream: &[f32]) {
        let Machine { bound, batch, first_key, keys: of_keys, tiles, pairs, places, .. } = self;
        let Bound { program, isa, tensors, .. } = *bound;
        let rows = &tiles[tile].rows;
        let width = rows.len();
        let copy = |from: &[f32], to: &mut [u32]| to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_bits());
        run(bound, steps, pairs, keys.len() * width, |op, to| match op {
            Op::Score => copy(given, to),
            Op::Upstream => copy(upstream, to),
            Op::Import(value) => {
                let from = &of_keys[program.keys.place[value]][keys.start - *first_key..][..keys.len()];
                to.chunks_exact_mut(width).zip(from).for_each(|(to, x)| to.fill(*x));
            }
            Op::Load(p) => {
                let Tensor { value, strides } = tensors[p];
                places_of(rows, *batch, strides, places);
                places.iter_mut().for_each(|place| *place += keys.start * strides[3]);
                isa.run(Gather { value, rows: places, n_keys: keys.len(), step: strides[3], to });
            }
            Op::Index(_) | Op::Read(..) | Op::Unary(..) | Op::Binary(..) | Op::Select(..) | Op::TanhSlope(..) => {}
        });
    }
}

/// Computes the offset of each row's first element.
fn places_of(rows: &[Row], batch: usize, strides: [usize; 4], places: &mut Vec<usize>) {
    places.clear();
    places.extend(rows.iter().map(|row| batch * strides[0] + row.head * strides[1] + row.query * strides[2]));
}
