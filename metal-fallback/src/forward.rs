//! Forward problems and their plans.

use crate::declined::{Check, Declined};
use crate::emit::{Captured, element};
use crate::params::{ForwardParams, Params};
use crate::plan::{Band, Binding, Operand, Plan, Tensor};
use crate::source::{FORWARD, SCALARS_SLOT, SEQ_LEN_KV_SLOT, SEQ_LEN_Q_SLOT, SLOTS, STATS_SLOT, Source, TENSORS_SLOT};
use crate::tiles::Tiles;
use cudnn_graph::DType;
use cudnn_graph::expr::Trace;
use std::sync::Arc;

/// Elements of a query, key or value at most.
const DIM_LIMIT: i64 = 256;
/// Extents at most: sums of two are 32-bit numbers in the kernels.
const EXTENT_LIMIT: i64 = 1 << 30;

/// A forward problem: `o = softmax(mask(score_mod(q·kᵀ · attn_scale))) · v`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Forward {
    /// Element type of `q`, `k`, `v` and `o`: f32, f16 or bf16.
    pub dtype: DType,
    /// Queries, (batch, heads_q, seq_q, dim_qk).
    pub q: Tensor,
    /// Keys, (batch, heads_kv, seq_kv, dim_qk).
    pub k: Tensor,
    /// Values, (batch, heads_kv, seq_kv, dim_v).
    pub v: Tensor,
    /// Output, (batch, heads_q, seq_q, dim_v).
    pub o: Tensor,
    /// The band of keys that is kept.
    pub band: Band,
    /// Whether queries at and past a length of their batch entry keep no key.
    pub seq_len_q: bool,
    /// Whether keys at and past a length of their batch entry are dropped.
    pub seq_len_kv: bool,
    /// A function of the scaled score.
    pub score_mod: Option<Arc<Trace>>,
    /// Keys are dropped where it does not hold.
    pub keep: Option<Arc<Trace>>,
    /// Whether stats are written: f32, (batch, heads_q, seq_q), dense; −∞ where a row has no key.
    pub stats: bool,
}

impl Forward {
    fn extents(&self) -> [i64; 4] {
        [self.q.dims[0], self.q.dims[1], self.q.dims[2], self.k.dims[2]]
    }

    /// What traces read, that of a derivative too.
    pub(crate) fn captured(&self, gradient: Option<&Trace>) -> Captured {
        Captured::of([self.score_mod.as_deref(), self.keep.as_deref(), gradient].into_iter().flatten(), self.extents())
    }

    /// Whether the kernels take the problem.
    ///
    /// # Errors
    /// Every limit that it breaks.
    pub fn supports(&self) -> Result<(), Vec<Declined>> {
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
        let whole = heads_kv >= 1 && heads_q % heads_kv == 0;
        check.that(whole, "heads_q", heads_q, format!("a multiple of heads_kv, which is {heads_kv}"));
        let agree =
            self.k.dims == [batch, heads_kv, seq_kv, dim_qk] && self.v.dims[0] == batch && self.o.dims == [batch, heads_q, seq_q, dim_v];
        check.that(agree, "dims", format!("{:?}", [self.q, self.k, self.v, self.o].map(|t| t.dims)), "those of one problem");
        for (field, tensor) in [("q", &self.q), ("k", &self.k), ("v", &self.v), ("o", &self.o)] {
            let dense = tensor.strides[3] == 1 || tensor.dims[3] == 1;
            check.that(dense, &format!("{field}.strides[3]"), tensor.strides[3], "1: the last axis is dense");
        }
        self.check_captured(&mut check, None);
        if check.0.is_empty() { Ok(()) } else { Err(check.0) }
    }

    /// The rules of declared parameters.
    pub(crate) fn check_captured(&self, check: &mut Check, gradient: Option<&Trace>) {
        let captured = self.captured(gradient);
        let tensors = captured.tensors();
        let room = SLOTS - TENSORS_SLOT;
        check.that(
            tensors.len() <= room as usize,
            "declared tensors",
            tensors.len(),
            format!("at most {room}: Metal binds {SLOTS} buffers"),
        );
        for (name, dtype, _) in tensors {
            check.that(element(dtype).is_some(), name, dtype, "one of f32, f16, bf16, i32, bool");
        }
    }

    /// The band as 32-bit numbers: lower, upper and prefix. A bound outside of these is met by every pair of indices, or by none, as
    /// they are.
    pub(crate) fn bounds(&self) -> [i32; 3] {
        let (seq_q, seq_kv) = (self.q.dims[2], self.k.dims[2]);
        let bound = |x: Option<i64>, vacuous: i64| x.unwrap_or(vacuous).clamp(-seq_q, seq_kv) as i32;
        let prefix = self.band.prefix.unwrap_or(seq_kv).clamp(0, seq_kv) as i32;
        [bound(self.band.lower, -seq_q), bound(self.band.upper, seq_kv), prefix]
    }

    /// The MSL type of elements, and tiles.
    pub(crate) fn cut(&self, choose: impl Fn(u32, u32, u32) -> Option<Tiles>) -> Result<(&'static str, Tiles), Vec<Declined>> {
        let (dim_qk, dim_v) = (self.q.dims[3], self.v.dims[3]);
        let tiles = choose(dim_qk as u32, dim_v as u32, self.dtype.bytes(1) as u32);
        let mut check = Check::default();
        check.that(tiles.is_some(), "dims", format!("{dim_qk} and {dim_v}"), "tiles that fit the threadgroup memory");
        match (element(self.dtype), tiles) {
            (Some(name), Some(tiles)) => Ok((name, tiles)),
            (_, _) => Err(check.0),
        }
    }

    /// Cuts the problem and writes its kernel.
    ///
    /// # Errors
    /// As [`Forward::supports`].
    pub fn plan(&self) -> Result<Plan, Vec<Declined>> {
        self.supports()?;
        let (name, tiles) = self.cut(Tiles::forward)?;
        let [batch, heads_q, seq_q, _] = self.q.dims;
        let captured = self.captured(None);
        let [lower, upper, prefix] = self.bounds();
        let params = ForwardParams {
            q_strides: self.q.outer(),
            k_strides: self.k.outer(),
            v_strides: self.v.outer(),
            o_strides: self.o.outer(),
            heads_q: heads_q as i32,
            group: (heads_q / self.k.dims[1]) as i32,
            seq_q: seq_q as i32,
            seq_kv: self.k.dims[2] as i32,
            lower,
            upper,
            prefix,
            scale: 1.0,
        };
        let source =
            Source { problem: self, element: name, tiles: &tiles, captured: &captured, gradient: None, params: &ForwardParams::msl() };
        let mut buffers = self.operands(name, &captured, ForwardParams::NAME);
        buffers.push(Binding::written(3, name, Operand::O));
        buffers.extend(self.stats.then(|| Binding::written(STATS_SLOT, "float", Operand::Stats)));
        buffers.sort_by_key(|b| b.slot);
        Ok(Plan {
            source: source.text(&[FORWARD]),
            entry: "attention_forward",
            tiles,
            grid: [(seq_q as u32).div_ceil(tiles.own), heads_q as u32, batch as u32],
            registers: tiles.forward_registers(),
            threads: tiles.threads(),
            buffers,
            threadgroup: tiles.forward_bytes().into_iter().map(|bytes| (name, bytes)).collect(),
            params: Params::Forward(params),
            // Scores that nothing modifies are wanted in powers of two at once.
            unit: if self.score_mod.is_some() { 1.0 } else { std::f64::consts::LOG2_E },
        })
    }

    /// What every kernel that computes scores reads.
    pub(crate) fn operands(&self, name: &str, captured: &Captured, params: &str) -> Vec<Binding> {
        let mut buffers = vec![
            Binding::read(0, name, Operand::Q),
            Binding::read(1, name, Operand::K),
            Binding::read(2, name, Operand::V),
            Binding::constant(4, &format!("{params}&"), Operand::Params),
        ];
        buffers.extend(self.seq_len_q.then(|| Binding::read(SEQ_LEN_Q_SLOT, "int", Operand::SeqLenQ)));
        buffers.extend(self.seq_len_kv.then(|| Binding::read(SEQ_LEN_KV_SLOT, "int", Operand::SeqLenKv)));
        let scalars: Vec<String> = captured.scalars().into_iter().map(str::to_owned).collect();
        if !scalars.is_empty() {
            buffers.push(Binding::constant(SCALARS_SLOT, "float*", Operand::Scalars(scalars)));
        }
        for (n, (name, dtype, elements)) in captured.tensors().into_iter().enumerate() {
            let operand = Operand::Declared { name: name.to_owned(), dtype, elements };
            buffers.push(Binding::read(TENSORS_SLOT + n as u32, element(dtype).unwrap_or("float"), operand));
        }
        buffers
    }
}
