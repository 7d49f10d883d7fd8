//! Every predefined score_mod and mask (the library) as plain closures, with random values for their parameters.
//!
//! The closures are written by name from the publications; they do not evaluate traces.

mod masks;
mod mods;
mod parameter;
mod trees;

pub use mods::own;

use crate::oracle::{Along, Closures};
use crate::packing::{Laid, Packing};
use crate::paging::{Cache, Paging};
use crate::random::Random;
use half::{bf16, f16};
use sdpa::{Mask, Param, ParamValue, Side, TensorSpec};
use std::sync::Arc;

/// A position: (batch, query head, query, key).
pub type Here = [i64; 4];

type Real = Box<dyn Fn(f64, Here) -> f64 + Send + Sync>;

/// Returns the offset of the table element that a position reads.
type Reading = Box<dyn Fn(Here) -> usize + Send + Sync>;

/// The value of a declared parameter: a scalar, or the elements of a tensor in row-major order.
#[derive(Clone, Debug)]
pub enum Values {
    /// A scalar.
    Scalar(f32),
    /// A tensor of f32.
    F32(Vec<f32>),
    /// A tensor of f16.
    F16(Vec<f16>),
    /// A tensor of bf16.
    BF16(Vec<bf16>),
    /// A tensor of i32.
    I32(Vec<i32>),
    /// A tensor of i64, such as `cu_seqlens` offsets.
    I64(Vec<i64>),
    /// A tensor of booleans.
    Bool(Vec<bool>),
}

/// A declared parameter and its value.
#[derive(Clone, Debug)]
pub struct Bound {
    /// The name of the parameter.
    pub name: &'static str,
    /// The extents of the parameter's tensor, 1 along axes that it does not span.
    pub dims: [i64; 4],
    /// The value of the parameter.
    pub values: Values,
    /// The value of the parameter, widened to f64.
    pub widened: Arc<[f64]>,
}

impl Bound {
    /// Returns the value in the form in which a call receives it.
    pub fn param(&self) -> Param<'_> {
        let value = match &self.values {
            Values::Scalar(x) => ParamValue::Scalar(*x),
            Values::F32(x) => ParamValue::F32(x),
            Values::F16(x) => ParamValue::F16(x),
            Values::BF16(x) => ParamValue::BF16(x),
            Values::I32(x) => ParamValue::I32(x),
            Values::I64(x) => ParamValue::I64(x),
            Values::Bool(x) => ParamValue::Bool(x),
        };
        Param::new(self.name, value)
    }
}

/// A tensor that closures read.
#[derive(Clone)]
struct Tensor {
    dims: [i64; 4],
    data: Arc<[f64]>,
}

/// Returns the offset of the element of a tensor that a position reads.
fn element(dims: [i64; 4], here: Here) -> usize {
    dims.iter().zip(here).fold(0, |n, (&extent, at)| n * extent + if extent == 1 { 0 } else { at }) as usize
}

impl Tensor {
    fn at(&self, here: Here) -> f64 {
        self.data[element(self.dims, here)]
    }

    /// Returns the offset of the element at these indices; indices out of range are clamped.
    fn place(&self, indices: [i64; 4]) -> usize {
        let within = std::array::from_fn(|axis| indices[axis].clamp(0, self.dims[axis] - 1));
        element(self.dims, within)
    }

    /// Returns that element.
    fn nearest(&self, indices: [i64; 4]) -> f64 {
        self.data[self.place(indices)]
    }
}

/// Parses axes as letters of `bhqk`.
fn axes(letters: &str) -> Result<Vec<usize>, String> {
    letters.chars().map(|c| "bhqk".find(c).ok_or_else(|| format!("{letters:?}: axes are b, h, q, k"))).collect()
}

/// Draws parameters. Two functions that declare the same name share one parameter.
struct Drawing<'r> {
    extents: [i64; 4],
    random: &'r mut Random,
    bound: Vec<Bound>,
}

impl Drawing<'_> {
    fn bind(&mut self, name: &'static str, axes: &[usize], make: impl FnOnce(&mut Random, usize) -> Values) -> Tensor {
        if let Some(bound) = self.bound.iter().find(|b| b.name == name) {
            return Tensor { dims: bound.dims, data: bound.widened.clone() };
        }
        let dims = std::array::from_fn(|axis| if axes.contains(&axis) { self.extents[axis] } else { 1 });
        self.bind_of(name, dims, make)
    }

    /// Draws a parameter whose extents do not depend on the problem.
    fn bind_of(&mut self, name: &'static str, dims: [i64; 4], make: impl FnOnce(&mut Random, usize) -> Values) -> Tensor {
        let values = make(self.random, dims.iter().product::<i64>() as usize);
        let data: Arc<[f64]> = match &values {
            Values::Scalar(x) => Arc::new([f64::from(*x)]),
            Values::F32(x) => x.iter().map(|x| f64::from(*x)).collect(),
            Values::F16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Values::BF16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Values::I32(x) => x.iter().map(|x| f64::from(*x)).collect(),
            Values::I64(x) => x.iter().map(|x| *x as f64).collect(),
            Values::Bool(x) => x.iter().map(|x| f64::from(u8::from(*x))).collect(),
        };
        self.bound.push(Bound { name, dims, values, widened: data.clone() });
        Tensor { dims, data }
    }
}

/// One score_mod.
struct Stage {
    value: Real,
    slope: Real,
    /// A bound on its own roundings, in units of the f32 roundoff.
    rounding: Real,
    /// The magnitude that the relative error of a hardware `tanh` applies to; `None` without `tanh`.
    tanh: Option<Real>,
    /// Derivatives with respect to parameters.
    partials: Vec<(&'static str, Real)>,
    /// For tables among the parameters, the offset of the element that a position reads.
    reads: Vec<(&'static str, Reading)>,
}

/// Predefined score_mods and masks as closures for the oracle, with randomly drawn parameters.
pub struct Library {
    stages: Vec<Stage>,
    keeps: Vec<Box<dyn Fn(Here) -> bool + Send + Sync>>,
    /// The parameters of the score_mods and masks, with their values. A scalar that is not in the list keeps its default.
    pub bound: Vec<Bound>,
    pads: bool,
    /// Whether the oracle evaluates windows, prefixes and their combinations itself.
    beside_masks: bool,
    packing: Option<Packing>,
    cache: Option<Cache>,
}

impl Library {
    /// Creates the closures of the named score_mods and masks, and draws their parameters, for a problem of extents (batch, heads_q,
    /// seq_q, seq_kv).
    ///
    /// # Errors
    /// Fails if the library does not have one of the names.
    pub fn draw(mods: &[String], masks: &[String], extents: [i64; 4], random: &mut Random) -> Result<Library, String> {
        Library::draw_packed(mods, masks, extents, None, random)
    }

    /// Creates the closures of the named score_mods and masks, and draws their parameters, for packed sequences.
    ///
    /// # Errors
    /// Fails if the library does not have one of the names.
    pub fn draw_packed(
        mods: &[String],
        masks: &[String],
        extents: [i64; 4],
        packing: Option<&Packing>,
        random: &mut Random,
    ) -> Result<Library, String> {
        let bound = packing.map_or_else(Vec::new, |packing| packing.bound(&Side::ALL));
        let library = Library::over(mods, masks, extents, bound, random)?;
        Ok(Library { packing: packing.cloned(), ..library })
    }

    /// Creates the closures of the named score_mods and masks, and draws their parameters, for a paged KV cache, with or without packed
    /// queries.
    ///
    /// # Errors
    /// Fails if the library does not have one of the names.
    pub fn draw_paged(
        mods: &[String],
        masks: &[String],
        extents: [i64; 4],
        paging: &Paging,
        packing: Option<&Packing>,
        random: &mut Random,
    ) -> Result<Library, String> {
        let paging = paging.beside(packing);
        let mut bound = packing.map_or_else(Vec::new, |packing| packing.bound(&[Side::Queries]));
        bound.extend(paging.lengths());
        let library = Library::over(mods, masks, extents, bound, random)?;
        let mut library = Library { packing: packing.cloned(), ..library };
        let cache = paging.cache(extents, library.key_lengths(), random);
        library.bound.push(cache.bound());
        Ok(Library { cache: Some(cache), ..library })
    }

    /// Draws them in addition to parameters that are already bound.
    fn over(mods: &[String], masks: &[String], extents: [i64; 4], bound: Vec<Bound>, random: &mut Random) -> Result<Library, String> {
        let mut drawing = Drawing { extents, random, bound };
        let stages = mods.iter().map(|text| mods::stage(text, &mut drawing)).collect::<Result<_, _>>()?;
        let pads = masks.iter().any(|m| m == "padding");
        if pads {
            masks::lengths_of_entries(&mut drawing);
        }
        let keeps = masks.iter().map(|text| masks::keep(text, &mut drawing)).collect::<Result<_, _>>()?;
        Ok(Library { stages, keeps, bound: drawing.bound, pads, beside_masks: false, packing: None, cache: None })
    }

    /// Creates a library without score_mods, for packed sequences. The oracle evaluates the masks itself.
    pub fn of_documents(packing: Packing) -> Library {
        let bound = packing.bound(&Side::ALL);
        Library { stages: Vec::new(), keeps: Vec::new(), bound, pads: false, beside_masks: true, packing: Some(packing), cache: None }
    }

    /// Creates a library without score_mods, for a paged KV cache, with or without packed queries, in a problem of extents (batch,
    /// heads_q, seq_q, seq_kv). The oracle evaluates the masks itself.
    pub fn of_cache(paging: &Paging, packing: Option<Packing>, extents: [i64; 4], random: &mut Random) -> Library {
        let paging = paging.beside(packing.as_ref());
        let mut bound = packing.as_ref().map_or_else(Vec::new, |packing| packing.bound(&[Side::Queries]));
        bound.extend(paging.lengths());
        let queries = paging.lengths_q.clone();
        let there = move |[b, _, q, _]: Here| queries.as_ref().is_none_or(|queries| q < queries[b as usize]);
        let keys: Option<Vec<f64>> = paging.lengths_kv.as_ref().map(|keys| keys.iter().map(|n| *n as f64).collect());
        let cache = paging.cache(extents, keys.as_deref(), random);
        bound.push(cache.bound());
        Library { stages: Vec::new(), keeps: vec![Box::new(there)], bound, pads: false, beside_masks: true, packing, cache: Some(cache) }
    }

    /// Creates a library with only the mask `padding`, and draws per-sequence lengths for a problem of extents (batch, heads_q, seq_q,
    /// seq_kv). The oracle evaluates other masks itself.
    ///
    /// # Errors
    /// Never fails, because the library has the mask `padding`.
    pub fn of_lengths(extents: [i64; 4], random: &mut Random) -> Result<Library, String> {
        let library = Library::over(&[], &["padding".to_owned()], extents, Vec::new(), random)?;
        Ok(Library { beside_masks: true, ..library })
    }

    /// Returns those of `masks` that the oracle evaluates itself: the masks for which this library has no closure.
    pub fn word_for_word(&self, masks: &[Mask]) -> Vec<Mask> {
        let read = |mask: &&Mask| match mask {
            Mask::Window { .. } | Mask::PrefixLm { .. } | Mask::All(_) | Mask::Any(_) | Mask::Not(_) => self.beside_masks,
            Mask::Traced(_) => false,
        };
        masks.iter().filter(read).cloned().collect()
    }

    /// Returns the memory position of each element of an operand. `side` tells whether its rows are queries or keys.
    pub fn laid(&self, tensor: &TensorSpec, side: Side) -> Laid {
        match (&self.cache, side) {
            (Some(cache), Side::Keys) => Laid::paged(tensor, cache),
            (Some(_), Side::Queries) | (None, _) => Laid::of(tensor, side, self.packing.as_ref()),
        }
    }

    /// Returns the paged KV cache, if there is one.
    pub fn cache(&self) -> Option<&Cache> {
        self.cache.as_ref()
    }

    /// Returns the bound parameters in the form in which a call receives them.
    pub fn params(&self) -> Vec<Param<'_>> {
        self.bound.iter().map(Bound::param).collect()
    }

    /// Returns the number of keys of each batch entry if later keys are padding; `None` without padding.
    pub fn key_lengths(&self) -> Option<&[f64]> {
        let pads = self.pads || self.packing.is_some();
        self.bound.iter().find(|b| b.name == "seq_len_kv" && pads).map(|b| &*b.widened)
    }

    /// Returns the number of queries of each batch entry if later queries are padding; `None` without padding.
    pub fn query_lengths(&self) -> Option<&[f64]> {
        let pads = self.pads && self.packing.is_none();
        self.bound.iter().find(|b| b.name == "seq_len_q" && pads).map(|b| &*b.widened)
    }

    /// Returns the number of queries and keys of each batch entry, for a problem of extents (batch, heads_q, seq_q, seq_kv).
    pub fn lengths(&self, extents: [i64; 4]) -> Vec<[i64; 2]> {
        masks::entries(&self.bound, extents)
    }

    /// Returns the input of each stage, and the output of the last.
    fn values(&self, score: f64, here: Here) -> Vec<f64> {
        let mut values = vec![score];
        for stage in &self.stages {
            values.push((stage.value)(values[values.len() - 1], here));
        }
        values
    }

    fn slopes(&self, values: &[f64], here: Here) -> Vec<f64> {
        self.stages.iter().zip(values).map(|(stage, &x)| (stage.slope)(x, here)).collect()
    }

    /// Propagates `of` of each stage through the derivatives of the stages after it.
    fn carried(&self, score: f64, here: Here, of: impl Fn(&Stage, f64) -> f64, through: impl Fn(f64) -> f64) -> f64 {
        let values = self.values(score, here);
        let slopes = self.slopes(&values, here);
        self.stages.iter().zip(&values).zip(&slopes).fold(0.0, |sum, ((stage, &x), &slope)| sum * through(slope) + of(stage, x))
    }

    /// Passes the closures of all score_mods and masks to `call`. `along` names the parameters whose derivatives are requested.
    pub fn with<T>(&self, along: &[&str], call: impl FnOnce(&Closures<'_>) -> T) -> T {
        self.with_tanh_off(along, 0.0, call)
    }

    /// Passes the closures of all score_mods and masks to `call`, for an executor whose `tanh` has a relative error of `tanh` times the
    /// f32 roundoff.
    pub fn with_tanh_off<T>(&self, along: &[&str], tanh: f64, call: impl FnOnce(&Closures<'_>) -> T) -> T {
        let modify = |score, here| *self.values(score, here).last().unwrap_or(&score);
        let slope = |score, here| self.slopes(&self.values(score, here), here).iter().product();
        let of_stage =
            |stage: &Stage, x, here| (stage.rounding)(x, here) + stage.tanh.as_ref().map_or(0.0, |size| tanh * size(x, here).abs());
        let rounding = |score, here| self.carried(score, here, |stage, x| of_stage(stage, x, here), f64::abs);
        let there =
            |here| self.packing.as_ref().is_none_or(|packing| packing.has(here)) && self.cache.as_ref().is_none_or(|cache| cache.has(here));
        let keep = |here| there(here) && self.keeps.iter().all(|keep| keep(here));
        let partial = |name: &str, score, here| {
            let of = |stage: &Stage, x| stage.partials.iter().filter(|(n, _)| *n == name).map(|(_, d)| d(x, here)).sum();
            self.carried(score, here, of, |slope| slope)
        };
        type Partial<'c> = (Box<dyn Fn(f64, Here) -> f64 + Sync + 'c>, [usize; 4]);
        let partials: Vec<Partial<'_>> = along
            .iter()
            .map(|&name| {
                let dims = self.bound.iter().find(|b| b.name == name).map_or([1; 4], |b| b.dims);
                let slope: Box<dyn Fn(f64, Here) -> f64 + Sync> = Box::new(move |score, here| partial(name, score, here));
                (slope, dims.map(|n| n as usize))
            })
            .collect();
        let read = |name: &str| {
            let reading = self.stages.iter().flat_map(|stage| &stage.reads).find(|(table, _)| *table == name);
            reading.map(|(_, reading)| &**reading as &(dyn Fn(Here) -> usize + Sync))
        };
        let along: Vec<Along<'_>> =
            partials.iter().zip(along).map(|((slope, dims), name)| Along { slope: &**slope, dims: *dims, read: read(name) }).collect();
        let closures = Closures { keep: Some(&keep), along: &along, ..Closures::default() };
        if self.stages.is_empty() {
            return call(&closures);
        }
        call(&Closures { modify: Some(&modify), slope: Some(&slope), rounding: Some(&rounding), ..closures })
    }
}
