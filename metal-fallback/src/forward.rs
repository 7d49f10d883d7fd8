//! Forward problems and their plans.

use crate::kernels::Kernels;
use crate::packed::Tokens;
use crate::params::{ForwardParams, Numbers};
use crate::plan::{Binding, Cut, Operand, Pass, Plan, Scratch};
use crate::rows::{Rows, THREADS};
use crate::sink;
use crate::source::{
    FORWARD, Kernel, MERGE, PAGES_SLOT, ROW_MAX_SLOT, SCALARS_SLOT, SEQ_LEN_KV_SLOT, SEQ_LEN_Q_SLOT, SLOTS, STATS_SLOT, SUM_EXP_SLOT,
    Source, TENSORS_SLOT, VECTOR,
};
use crate::tile_config::{SIMD, Tiles};
use crate::unsupported::{Check, limit};
use sdpa_core::expr::Trace;
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::{DROPOUT_OFFSET, DROPOUT_SEED, DType, Dropout, Ends, Packed, Paged, Reason, Region, Side, TensorSpec};
use sdpa_emit::{Captured, Dialect};
use std::sync::Arc;

/// The most elements of a query, key or value.
const DIM_LIMIT: i64 = 256;
/// The largest extent: kernels add two extents in 32 bits.
const EXTENT_LIMIT: i64 = 1 << 30;
/// The most queries and keys if a band depends on lengths: a bound may then be two extents away from an index.
const ENDS_LIMIT: i64 = 1 << 29;

/// The most queries of a GQA group in vector kernels. The number of threadgroups depends on it and on the split-KV parts.
const ROWS_LIMIT: u64 = 1 << 20;

/// A forward problem in the form that the kernels use: `o = softmax(mask(score_mod(q·kᵀ · attn_scale))) · v`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Forward {
    /// Element type of `q`, `k`, `v` and `o`: f32, f16 or bf16.
    pub dtype: DType,
    /// Queries, (batch, heads_q, seq_q, dim_qk).
    pub q: TensorSpec,
    /// Keys, (batch, heads_kv, seq_kv, dim_qk).
    pub k: TensorSpec,
    /// Values, (batch, heads_kv, seq_kv, dim_v).
    pub v: TensorSpec,
    /// Output, (batch, heads_q, seq_q, dim_v).
    pub o: TensorSpec,
    /// The mask's diagonal band, with its bounds and its prefix.
    pub band: Region,
    /// A second diagonal band, which is bottom-right aligned per sequence.
    pub ends: Ends,
    /// Whether each batch entry has a query length. Queries at and past this length attend to no key.
    pub seq_len_q: bool,
    /// Whether each batch entry has a key length. Keys at and past this length are masked out.
    pub seq_len_kv: bool,
    /// The layout of packed sequences, if batch entries are packed. Extents are then those of the longest sequence, and the stride of the
    /// batch axis has no effect.
    pub packed: Option<Packed>,
    /// The paging of keys and values, if they are paged. The strides of `k` and `v` are then those of page pools, and [`PAGE_TABLE`]
    /// lists the pages of each batch entry.
    pub paged: Option<Paged>,
    /// The function that modifies the scaled score. If it returns −∞, the key is masked out as by [`Forward::keep`].
    pub score_mod: Option<Arc<Trace>>,
    /// The part of the mask that is neither a band nor a length: keys are masked out where it is false.
    pub keep: Option<Arc<Trace>>,
    /// Whether each query head has an attention sink: the parameter [`SINK`](sdpa_core::SINK).
    pub sink: bool,
    /// Dropout of P; the parameters [`DROPOUT_SEED`] and [`DROPOUT_OFFSET`] select the elements.
    pub dropout: Option<Dropout>,
    /// If true, the pass computes `stats`, the log-sum-exp of each row: f32, (batch, heads_q, seq_q), dense; −∞ if a row has no key.
    pub stats: bool,
    /// If true, the pass computes the largest score of each row, in the layout of `stats`: in natural units, with the sink as a score; −∞
    /// if a row has no key.
    pub row_max: bool,
    /// If true, the pass computes the sum of exponentials of each row relative to its largest score, in the layout of `stats`; 0 if a row
    /// has no key.
    pub sum_exp: bool,
}

impl Forward {
    /// Returns the numbers of batch entries, query heads, queries and keys.
    pub(crate) fn extents(&self) -> [i64; 4] {
        [self.q.dims[0], self.q.dims[1], self.q.dims[2], self.k.dims[2]]
    }

    /// Returns the declared parameters that the score_mod, the mask and `gradient`, the trace of the score_mod's derivative, read.
    pub(crate) fn captured(&self, gradient: Option<&Trace>) -> Captured {
        let captured = Captured::of([self.score_mod.as_deref(), self.keep.as_deref(), gradient].into_iter().flatten(), self.extents());
        let numbers = self.dropout.map(|_| [DROPOUT_SEED, DROPOUT_OFFSET]);
        captured.with_numbers(numbers.into_iter().flatten())
    }

    /// Checks that the kernels support the problem.
    ///
    /// # Errors
    /// Returns every limit that the problem breaks.
    pub fn supports(&self) -> Result<(), Vec<Reason>> {
        let mut check = Check::default();
        check.that(matches!(self.dtype, DType::F32 | DType::F16 | DType::BF16), "dtype", self.dtype, "one of f32, f16, bf16");
        let [batch, heads_q, seq_q, dim_qk] = self.q.dims;
        let [_, heads_kv, seq_kv, dim_v] = self.v.dims;
        for (field, dim) in [("dim_qk", dim_qk), ("dim_v", dim_v)] {
            check.that((1..=DIM_LIMIT).contains(&dim), field, dim, format!("between 1 and {DIM_LIMIT}"));
        }
        for (field, extent) in [("batch", batch), ("heads_q", heads_q), ("heads_kv", heads_kv), ("seq_q", seq_q), ("seq_kv", seq_kv)] {
            check.that((1..=EXTENT_LIMIT).contains(&extent), field, extent, format!("between 1 and {EXTENT_LIMIT}"));
        }
        for (field, extent) in [("seq_q", seq_q), ("seq_kv", seq_kv)] {
            let few = self.ends.is_full() || !(ENDS_LIMIT + 1..=EXTENT_LIMIT).contains(&extent);
            check.that(few, field, extent, format!("at most {ENDS_LIMIT} with a window aligned to the sequence ends"));
        }
        let whole = heads_kv >= 1 && heads_q % heads_kv == 0;
        check.that(whole, "heads_q", heads_q, format!("a multiple of heads_kv, which is {heads_kv}"));
        let agree =
            self.k.dims == [batch, heads_kv, seq_kv, dim_qk] && self.v.dims[0] == batch && self.o.dims == [batch, heads_q, seq_q, dim_v];
        let [q, k, v, o] = [self.q, self.k, self.v, self.o].map(|t| t.dims);
        let rule = "q (b, h_q, s_q, d_qk), k (b, h_kv, s_kv, d_qk), v (b, h_kv, s_kv, d_v), o (b, h_q, s_q, d_v)";
        check.that(agree, "dims", format!("q {q:?}, k {k:?}, v {v:?}, o {o:?}"), rule);
        for (field, tensor) in [("q", &self.q), ("k", &self.k), ("v", &self.v), ("o", &self.o)] {
            let dense = tensor.strides[3] == 1 || tensor.dims[3] == 1;
            check.that(dense, &format!("{field}.strides[3]"), tensor.strides[3], "1 (a dense last axis)");
        }
        self.check_packed(&mut check);
        let apart = self.paged.is_none() || self.packed.is_none();
        check.that(
            apart,
            "packed",
            "packed queries",
            "none with a paged KV cache: the Metal kernels support packed queries only with packed keys",
        );
        self.check_captured(&mut check, None);
        if check.0.is_empty() { Ok(()) } else { Err(check.0) }
    }

    /// Checks that the kernels support the declared parameters of the score_mod, the mask and `gradient`, the trace of the score_mod's
    /// derivative.
    pub(crate) fn check_captured(&self, check: &mut Check, gradient: Option<&Trace>) {
        let captured = self.captured(gradient);
        let tensors = captured.tensors();
        let room = SLOTS - TENSORS_SLOT;
        check.that(
            tensors.len() <= room as usize,
            "declared tensors",
            tensors.len(),
            format!("at most {room}: Metal binds {SLOTS} buffers, and the kernels need the remaining ones"),
        );
    }

    /// Returns the band as 32-bit numbers: lower, upper and prefix. A bound outside this range is satisfied by every pair of indices or by none,
    /// before and after clamping.
    pub(crate) fn bounds(&self) -> [i32; 3] {
        let (seq_q, seq_kv) = (self.q.dims[2], self.k.dims[2]);
        let bound = |x: Option<i64>, vacuous: i64| x.unwrap_or(vacuous).clamp(-seq_q, seq_kv) as i32;
        let prefix = self.band.prefix.unwrap_or(seq_kv).clamp(0, seq_kv) as i32;
        [bound(self.band.lower, -seq_q), bound(self.band.upper, seq_kv), prefix]
    }

    /// Returns the bounds of the bottom-right aligned band as 32-bit numbers: lower and upper. Every pair within the lengths satisfies an
    /// absent bound.
    pub(crate) fn ends_bounds(&self) -> [i32; 2] {
        let (seq_q, seq_kv) = (self.q.dims[2], self.k.dims[2]);
        let bound = |x: Option<i64>, vacuous: i64| x.unwrap_or(vacuous).clamp(-seq_kv, seq_q) as i32;
        [bound(self.ends.lower, -seq_kv), bound(self.ends.upper, seq_q)]
    }

    /// Returns the MSL type of elements; `supports` refuses other types.
    pub(crate) fn element(&self) -> &'static str {
        Dialect::Msl.element(self.dtype)
    }

    /// Returns the number of elements of a query, and that of a value.
    pub(crate) fn dims(&self) -> [u32; 2] {
        [self.q.dims[3] as u32, self.v.dims[3] as u32]
    }

    /// Returns the number of query rows that share a KV head: queries times the query heads of a GQA group.
    pub(crate) fn shared_queries(&self) -> u64 {
        (self.q.dims[1] / self.k.dims[1] * self.q.dims[2]).unsigned_abs()
    }

    /// Returns the tile configuration that `choose` selects for the head dims and the element size, or the reason why no tile fits.
    pub(crate) fn tiles(&self, choose: impl Fn(u32, u32, u32) -> Option<Tiles>) -> Result<Tiles, Vec<Reason>> {
        let [dim_qk, dim_v] = self.dims();
        let tiles = choose(dim_qk, dim_v, self.dtype.bytes(1) as u32);
        tiles.ok_or_else(|| {
            vec![limit(
                "dims",
                format!("{dim_qk} and {dim_v}"),
                "smaller head dims: no tile configuration for these fits in the threadgroup memory",
            )]
        })
    }

    /// Checks that the problem is within the limits of kernels that a caller selected.
    pub(crate) fn takes(&self, kernels: Kernels) -> Result<(), Vec<Reason>> {
        match kernels {
            Kernels::Tiled => Ok(()),
            Kernels::Vector | Kernels::Parts if self.shared_queries() <= ROWS_LIMIT => Ok(()),
            Kernels::Vector | Kernels::Parts => {
                let most = format!("at most {ROWS_LIMIT} in vector kernels");
                Err(vec![limit("queries per KV head", self.shared_queries(), most)])
            }
        }
    }

    fn params(&self) -> ForwardParams {
        let [lower, upper, prefix] = self.bounds();
        let [ends_lower, ends_upper] = self.ends_bounds();
        let tokens = self.tokens().unwrap_or(Tokens { queries: 0, keys: 0 });
        ForwardParams {
            q_strides: self.outer(&self.q),
            k_strides: self.outer(&self.k),
            v_strides: self.outer(&self.v),
            o_strides: self.outer(&self.o),
            stats_strides: self.row_memory().1,
            tokens_q: tokens.queries,
            tokens_kv: tokens.keys,
            heads_q: self.q.dims[1] as i32,
            group: (self.q.dims[1] / self.k.dims[1]) as i32,
            seq_q: self.q.dims[2] as i32,
            seq_kv: self.k.dims[2] as i32,
            lower,
            upper,
            prefix,
            ends_lower,
            ends_upper,
            scale: 1.0,
        }
    }

    /// Plans the forward pass: selects kernels that suit the lengths of the problem, and generates their sources.
    ///
    /// # Errors
    /// Fails as [`Forward::supports`] does.
    pub fn plan(&self) -> Result<Pass, Vec<Reason>> {
        let chosen = Kernels::forward(self.q.dims[2], self.k.dims[2]);
        self.plan_with(if self.takes(chosen).is_ok() { chosen } else { Kernels::Tiled })
    }

    /// Plans the forward pass with the given kernels instead of those that [`Forward::plan`] chooses.
    ///
    /// # Errors
    /// Fails as [`Forward::supports`] does, and with every limit of these kernels that the problem breaks.
    pub fn plan_with(&self, kernels: Kernels) -> Result<Pass, Vec<Reason>> {
        self.supports()?;
        self.takes(kernels)?;
        let plans = match kernels {
            Kernels::Tiled => vec![self.tiled()?],
            Kernels::Vector => vec![self.vector(1)],
            Kernels::Parts => {
                let parts = kernels.parts(self.k.dims[2]);
                vec![self.vector(parts), self.merge(parts)]
            }
        };
        Ok(Pass { plans })
    }

    fn tiled(&self) -> Result<Plan, Vec<Reason>> {
        let tiles = self.tiles(Tiles::forward)?;
        let name = self.element();
        let [batch, heads_q, seq_q, _] = self.q.dims.map(|n| n as u32);
        let mut buffers = self.operands();
        buffers.push(Binding::written(3, name, Operand::O));
        buffers.extend(self.of_rows());
        let mut threadgroup: Vec<_> = tiles.forward_bytes().into_iter().map(|bytes| (name, bytes)).collect();
        threadgroup.extend(tiles.odd_bytes().map(|bytes| ("uint", bytes)));
        Ok(self.one(
            &FORWARD,
            &tiles.constants(self.dims()),
            Cut {
                grid: [seq_q.div_ceil(tiles.own), heads_q, batch],
                threads: tiles.threads(),
                registers: tiles.forward_registers(),
                buffers,
                threadgroup,
            },
        ))
    }

    fn vector(&self, parts: u32) -> Plan {
        let rows = Rows::forward(self.dims(), self.shared_queries());
        let mut buffers = self.operands();
        if parts == 1 {
            buffers.push(Binding::written(3, self.element(), Operand::O));
            buffers.extend(self.of_rows());
        } else {
            buffers.extend(self.parts(parts).map(|(slot, scratch)| Binding::written(slot, "float", Operand::Scratch(scratch))));
        }
        let blocks = self.shared_queries().div_ceil(rows.rows.into()) as u32;
        let mut constants = rows.constants();
        constants.push(("PARTS", parts));
        self.one(
            &VECTOR,
            &constants,
            Cut {
                grid: [blocks * parts, self.k.dims[1] as u32, self.q.dims[0] as u32],
                threads: THREADS,
                registers: rows.registers,
                buffers,
                threadgroup: rows.forward_bytes().into_iter().map(|bytes| ("float", bytes)).collect(),
            },
        )
    }

    fn merge(&self, parts: u32) -> Plan {
        let [batch, heads_q, seq_q, _] = self.q.dims.map(|n| n as u32);
        let mut buffers = vec![Binding::written(3, self.element(), Operand::O), Binding::params(ForwardParams::NAME)];
        buffers.extend(self.boundaries(&[Side::Queries]));
        buffers.extend(self.of_rows());
        buffers.extend(self.parts(parts).map(|(slot, scratch)| Binding::read(slot, "float", Operand::Scratch(scratch))));
        self.one(
            &MERGE,
            &[("DIM_V", self.dims()[1]), ("PARTS", parts), ("THREADS", THREADS)],
            Cut {
                grid: [seq_q.div_ceil(THREADS / SIMD), heads_q, batch],
                threads: THREADS,
                registers: 0,
                buffers,
                threadgroup: Vec::new(),
            },
        )
    }

    /// Returns the buffers, besides the output, of the kernel that completes rows.
    fn of_rows(&self) -> impl Iterator<Item = Binding> {
        let told = [
            (self.stats, STATS_SLOT, Operand::Stats),
            (self.row_max, ROW_MAX_SLOT, Operand::RowMax),
            (self.sum_exp, SUM_EXP_SLOT, Operand::SumExp),
        ];
        let told = told.into_iter().filter(|(asked, ..)| *asked);
        told.map(|(_, slot, operand)| Binding::written(slot, "float", operand)).chain(self.sink.then(|| sink::binding(self)))
    }

    /// Returns the scratch memory of split-KV parts: maximum and sum of each query, and its output.
    fn parts(&self, parts: u32) -> [(u32, Scratch); 2] {
        let (rows, _) = self.row_memory();
        let scratch = |name, each| Scratch::new(name, &[&rows[..], &[parts.into(), each]].concat());
        [(9, scratch("sums of parts", 2)), (10, scratch("outputs of parts", self.v.dims[3]))]
    }

    fn one(&self, kernel: &Kernel, constants: &[(&str, u32)], cut: Cut) -> Plan {
        let captured = self.captured(None);
        let constants = [constants, &[("WITH_SINK", self.sink.into())]].concat();
        let source = Source {
            problem: self,
            element: self.element(),
            captured: &captured,
            gradient: None,
            along: None,
            params: &ForwardParams::msl(),
        };
        cut.plan(source.text(kernel, &constants), kernel.entry, Numbers::Forward(self.params()))
    }

    /// Returns the bindings of the per-sequence lengths, for each side (queries or keys) that has them.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = Binding> {
        let queries = self.seq_len_q.then(|| Binding::read(SEQ_LEN_Q_SLOT, "int", Operand::SeqLenQ));
        queries.into_iter().chain(self.seq_len_kv.then(|| Binding::read(SEQ_LEN_KV_SLOT, "int", Operand::SeqLenKv)))
    }

    /// Binds the page table.
    fn page_table(&self) -> Option<Binding> {
        let elements = self.q.dims[0].saturating_mul(self.paged?.pages_of(self.k.dims[2]));
        Some(Binding::read(PAGES_SLOT, "int", Operand::Declared { name: PAGE_TABLE.to_owned(), dtype: DType::I32, elements }))
    }

    /// Binds the inputs of every kernel that computes scores.
    fn operands(&self) -> Vec<Binding> {
        self.operands_with(&self.captured(None), ForwardParams::NAME)
    }

    /// Returns the bindings of the inputs of every kernel that computes scores, including the parameters in `captured`. `params` is the
    /// MSL structure's name.
    pub(crate) fn operands_with(&self, captured: &Captured, params: &str) -> Vec<Binding> {
        let name = self.element();
        let mut buffers = vec![
            Binding::read(0, name, Operand::Q),
            Binding::read(1, name, Operand::K),
            Binding::read(2, name, Operand::V),
            Binding::params(params),
        ];
        buffers.extend(self.lengths());
        buffers.extend(self.boundaries(&Side::ALL));
        buffers.extend(self.page_table());
        let scalars: Vec<String> = captured.scalars().into_iter().map(str::to_owned).collect();
        if !scalars.is_empty() {
            buffers.push(Binding::constant(SCALARS_SLOT, "float*", Operand::Scalars(scalars)));
        }
        for (n, (name, dtype, elements)) in captured.tensors().into_iter().enumerate() {
            let operand = Operand::Declared { name: name.to_owned(), dtype, elements };
            buffers.push(Binding::read(TENSORS_SLOT + n as u32, Dialect::Msl.element(dtype), operand));
        }
        buffers
    }
}
