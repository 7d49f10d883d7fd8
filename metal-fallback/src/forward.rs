//! Forward problems and their plans.

use crate::declined::{Check, Declined};
use crate::emit::{Captured, element};
use crate::params::ForwardParams;
use crate::tiles::Tiles;
use cudnn_graph::DType;
use cudnn_graph::expr::Trace;
use std::fmt::Write;
use std::sync::Arc;

const FRAGMENT_TEXT: &str = include_str!("../kernels/fragment.metal");
const EXPRESSION_TEXT: &str = include_str!("../kernels/expression.metal");
const FORWARD_TEXT: &str = include_str!("../kernels/forward.metal");

/// Elements of a query, key or value at most.
const DIM_LIMIT: i64 = 256;
/// Extents at most: sums of two are 32-bit numbers in the kernels.
const EXTENT_LIMIT: i64 = 1 << 30;
/// Buffers that Metal binds to a kernel.
const SLOTS: u32 = 31;

/// Extents (batch, head, seq, dim) and strides of an operand, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// Extents.
    pub dims: [i64; 4],
    /// Strides; the last is 1.
    pub strides: [i64; 4],
}

impl Tensor {
    fn outer(&self) -> [i64; 3] {
        [self.strides[0], self.strides[1], self.strides[2]]
    }
}

/// The keys that a query keeps, by their distance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Band {
    /// Keys at `k − q ≤ lower` are dropped.
    pub lower: Option<i64>,
    /// Keys at `k − q > upper` are dropped.
    pub upper: Option<i64>,
    /// Keys at `k > q` and `k ≥ prefix` are dropped.
    pub prefix: Option<i64>,
}

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

/// What a buffer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Output; written.
    O,
    /// [`Plan::params`].
    Params,
    /// The natural logarithm of each row's sum of exponentials; written.
    Stats,
    /// i32, a length of each batch entry.
    SeqLenQ,
    /// The same of keys.
    SeqLenKv,
    /// f32, the scalars of these names in this order.
    Scalars(Vec<String>),
    /// A declared tensor, dense.
    Declared {
        /// Its name.
        name: String,
        /// Element type; truth values are bytes.
        dtype: DType,
        /// How many elements.
        elements: i64,
    },
}

impl Operand {
    /// Whether the kernel writes it.
    pub fn written(&self) -> bool {
        match self {
            Operand::O | Operand::Stats => true,
            Operand::Q
            | Operand::K
            | Operand::V
            | Operand::Params
            | Operand::SeqLenQ
            | Operand::SeqLenKv
            | Operand::Scalars(_)
            | Operand::Declared { .. } => false,
        }
    }
}

/// A buffer of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The index that it is bound at.
    pub slot: u32,
    /// The MSL type of the argument.
    pub ty: String,
    /// What it holds.
    pub operand: Operand,
}

/// Everything that a dispatch needs besides the buffers.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The MSL text.
    pub source: String,
    /// The kernel in it.
    pub entry: &'static str,
    /// How the problem is cut.
    pub tiles: Tiles,
    /// Threadgroups.
    pub grid: [u32; 3],
    /// Threads of a threadgroup.
    pub threads: u32,
    /// Buffers, by their slots.
    pub buffers: Vec<Binding>,
    /// Threadgroup memory: elements' type and bytes, by their slots.
    pub threadgroup: Vec<(&'static str, usize)>,
    params: ForwardParams,
    modified: bool,
}

impl Plan {
    /// The parameters of a call with this scale.
    pub fn params(&self, attn_scale: f32) -> ForwardParams {
        let log2 = if self.modified { 1.0 } else { std::f64::consts::LOG2_E };
        let scale = (f64::from(attn_scale) * log2).clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
        ForwardParams { scale, ..self.params }
    }
}

/// Slots of the buffers that are not always there; those that are come before.
const STATS_SLOT: u32 = 5;
const SEQ_LEN_Q_SLOT: u32 = 6;
const SEQ_LEN_KV_SLOT: u32 = 7;
const SCALARS_SLOT: u32 = 8;
const TENSORS_SLOT: u32 = 9;

impl Forward {
    fn extents(&self) -> [i64; 4] {
        [self.q.dims[0], self.q.dims[1], self.q.dims[2], self.k.dims[2]]
    }

    fn captured(&self) -> Captured {
        Captured::of(self.score_mod.as_deref().into_iter().chain(self.keep.as_deref()), self.extents())
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
        let captured = self.captured();
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
        if check.0.is_empty() { Ok(()) } else { Err(check.0) }
    }

    /// Cuts the problem and writes its kernel.
    ///
    /// # Errors
    /// As [`Forward::supports`].
    pub fn plan(&self) -> Result<Plan, Vec<Declined>> {
        self.supports()?;
        let limit =
            |field: &str, value: String, limit: &str| vec![Declined::Limit { field: field.to_owned(), value, limit: limit.to_owned() }];
        let Some(name) = element(self.dtype) else {
            return Err(limit("dtype", self.dtype.to_string(), "one of f32, f16, bf16"));
        };
        let [batch, heads_q, seq_q, dim_qk] = self.q.dims;
        let [_, heads_kv, seq_kv, dim_v] = self.v.dims;
        let Some(tiles) = Tiles::choose(dim_qk as u32, dim_v as u32, self.dtype.bytes(1) as u32) else {
            return Err(limit("dims", format!("{dim_qk} and {dim_v}"), "tiles that fit the threadgroup memory"));
        };
        let captured = self.captured();
        // A bound outside of these is met by every pair of indices, or by none, as they are.
        let bound = |x: Option<i64>, vacuous: i64| x.unwrap_or(vacuous).clamp(-seq_q, seq_kv) as i32;
        let params = ForwardParams {
            q_strides: self.q.outer(),
            k_strides: self.k.outer(),
            v_strides: self.v.outer(),
            o_strides: self.o.outer(),
            heads_q: heads_q as i32,
            group: (heads_q / heads_kv) as i32,
            seq_q: seq_q as i32,
            seq_kv: seq_kv as i32,
            lower: bound(self.band.lower, -seq_q),
            upper: bound(self.band.upper, seq_kv),
            prefix: self.band.prefix.unwrap_or(seq_kv).clamp(0, seq_kv) as i32,
            scale: 1.0,
        };
        Ok(Plan {
            source: self.source(name, &tiles, &captured),
            entry: "attention_forward",
            tiles,
            grid: [(seq_q as u32).div_ceil(tiles.block_q), heads_q as u32, batch as u32],
            threads: tiles.threads(),
            buffers: self.buffers(name, &captured),
            threadgroup: tiles.bytes().into_iter().map(|bytes| (name, bytes)).collect(),
            params,
            modified: self.score_mod.is_some(),
        })
    }

    fn buffers(&self, name: &str, captured: &Captured) -> Vec<Binding> {
        let read = |element: &str| format!("const device {element}*");
        let written = |element: &str| format!("device {element}*");
        let mut buffers = vec![
            Binding { slot: 0, ty: read(name), operand: Operand::Q },
            Binding { slot: 1, ty: read(name), operand: Operand::K },
            Binding { slot: 2, ty: read(name), operand: Operand::V },
            Binding { slot: 3, ty: written(name), operand: Operand::O },
            Binding { slot: 4, ty: "constant ForwardParams&".to_owned(), operand: Operand::Params },
        ];
        let optional = [
            (self.stats, STATS_SLOT, written("float"), Operand::Stats),
            (self.seq_len_q, SEQ_LEN_Q_SLOT, read("int"), Operand::SeqLenQ),
            (self.seq_len_kv, SEQ_LEN_KV_SLOT, read("int"), Operand::SeqLenKv),
        ];
        buffers.extend(optional.into_iter().filter(|o| o.0).map(|(_, slot, ty, operand)| Binding { slot, ty, operand }));
        let scalars: Vec<String> = captured.scalars().into_iter().map(str::to_owned).collect();
        if !scalars.is_empty() {
            buffers.push(Binding { slot: SCALARS_SLOT, ty: "constant float*".to_owned(), operand: Operand::Scalars(scalars) });
        }
        for (n, (name, dtype, elements)) in captured.tensors().into_iter().enumerate() {
            let operand = Operand::Declared { name: name.to_owned(), dtype, elements };
            buffers.push(Binding { slot: TENSORS_SLOT + n as u32, ty: read(element(dtype).unwrap_or("float")), operand });
        }
        buffers
    }

    fn source(&self, name: &str, tiles: &Tiles, captured: &Captured) -> String {
        let mut text = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n\n".to_owned();
        // Full: accumulators are arrays that must be registers.
        text.push_str("#ifndef UNROLL\n#define UNROLL _Pragma(\"clang loop unroll(full)\")\n#endif\n\n");
        let _ = writeln!(text, "typedef {name} Element;");
        let constants = [
            ("DIM_QK", self.q.dims[3]),
            ("DIM_V", self.v.dims[3]),
            ("PADDED_QK", tiles.padded_qk.into()),
            ("PADDED_V", tiles.padded_v.into()),
            ("PITCH_QK", tiles.pitch_qk.into()),
            ("PITCH_V", tiles.pitch_v.into()),
            ("BLOCK_Q", tiles.block_q.into()),
            ("BLOCK_K", tiles.block_k.into()),
            ("THREADS", tiles.threads().into()),
            ("WITH_STATS", self.stats.into()),
            ("WITH_SEQ_LEN_Q", self.seq_len_q.into()),
            ("WITH_SEQ_LEN_KV", self.seq_len_kv.into()),
            ("WITH_SCORE_MOD", self.score_mod.is_some().into()),
            ("WITH_KEEP", self.keep.is_some().into()),
        ];
        for (constant, value) in constants {
            let _ = writeln!(text, "#define {constant} {value}");
        }
        let _ = write!(text, "\n{}\n", ForwardParams::msl());
        text.push_str(&captured.declaration(SCALARS_SLOT, TENSORS_SLOT));
        if self.score_mod.is_some() || self.keep.is_some() {
            text.push_str("\n// Where a score stands.\nstruct Place {\n    int batch;\n    int head;\n    int query;\n    int key;\n};\n");
            let _ = write!(text, "\n#line 1 \"expression.metal\"\n{EXPRESSION_TEXT}\n#line 1 \"traced\"\n");
        }
        text.extend(self.score_mod.as_deref().map(|trace| captured.score_mod(trace)));
        text.extend(self.keep.as_deref().map(|trace| captured.keep(trace)));
        let _ = write!(text, "\n#line 1 \"fragment.metal\"\n{FRAGMENT_TEXT}\n#line 1 \"forward.metal\"\n{FORWARD_TEXT}");
        text
    }
}
