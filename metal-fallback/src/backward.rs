//! Backward problems and their plans.

use crate::forward::Forward;
use crate::kernels::Kernels;
use crate::packed::Tokens;
use crate::parameter;
use crate::params::{BackwardParams, Numbers};
use crate::plan::{Binding, Cut, Operand, Pass, Plan, Scratch};
use crate::rows::{Rows, THREADS};
use crate::sink;
use crate::source::{DELTA, DKV, DQ, Kernel, STATS_SLOT, Source, VECTOR_DKV, VECTOR_DQ};
use crate::tile_config::{SIMD, Tiles};
use crate::unsupported::Check;
use sdpa_core::expr::{Axes, Trace};
use sdpa_core::{DType, Reason, TensorSpec};
use sdpa_emit::Captured;
use std::sync::Arc;

/// The buffer slot of delta: one kernel of a backward pass writes the sum of `o · d_o` of each row, and the others read it.
pub(crate) const DELTA_SLOT: u32 = 9;

/// Index of the root (output) of a score_mod's gradient trace that holds the gradient of the score. Root 0 is the modified score;
/// gradients of parameters follow.
pub(crate) const ALONG_SCORE: usize = 1;
pub(crate) const ALONG_PARAMS: usize = 2;

/// The most elements of a parameter's gradient. The number of threadgroups depends on it.
const GRADIENT_LIMIT: i64 = 1 << 34;

/// A declared parameter of a score_mod whose gradient is computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Along {
    /// The name of the parameter.
    pub name: String,
    /// Element type of the gradient: f32, f16 or bf16.
    pub dtype: DType,
    /// The axes of the parameter, over which its gradient is dense. A scalar has no axes.
    pub axes: Axes,
}

/// A backward problem in the form that the kernels use: the gradient of a forward problem, from its operands, `o`, `stats` and `d_o`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backward {
    /// The forward attention. Its choice of row statistics has no effect here.
    pub forward: Forward,
    /// Gradient of the output, (batch, heads_q, seq_q, dim_v). Any stride may be 0.
    pub d_o: TensorSpec,
    /// Gradient of the queries, (batch, heads_q, seq_q, dim_qk).
    pub dq: TensorSpec,
    /// Gradient of the keys, (batch, heads_kv, seq_kv, dim_qk).
    pub dk: TensorSpec,
    /// Gradient of the values, (batch, heads_kv, seq_kv, dim_v).
    pub dv: TensorSpec,
    /// The derivative of the score_mod, a function of the scaled score and the upstream gradient; `None` if the attention has no
    /// score_mod. Its second root (output) is the gradient of the score; the roots after it belong to [`Backward::along`].
    pub gradient: Option<Arc<Trace>>,
    /// Parameters whose gradients are computed, in the order of their roots in [`Backward::gradient`].
    pub along: Vec<Along>,
    /// Element type of the gradient of the sinks, if it is computed: f32, f16 or bf16.
    pub sink_gradient: Option<DType>,
}

impl Backward {
    /// Checks that the kernels support the problem.
    ///
    /// # Errors
    /// Returns every limit that the problem breaks.
    pub fn supports(&self) -> Result<(), Vec<Reason>> {
        let mut check = Check(self.forward.supports().err().unwrap_or_default());
        let Forward { q, k, v, o, .. } = &self.forward;
        for (field, tensor, like) in [("d_o", &self.d_o, o), ("dq", &self.dq, q), ("dk", &self.dk, k), ("dv", &self.dv, v)] {
            check.that(tensor.dims == like.dims, &format!("{field}.dims"), format!("{:?}", tensor.dims), format!("{:?}", like.dims));
            let dense = field == "d_o" || tensor.strides[3] == 1 || tensor.dims[3] == 1;
            check.that(dense, &format!("{field}.strides[3]"), tensor.strides[3], "1 (a dense last axis)");
        }
        let roots = self.gradient.as_deref().map_or(0, |trace| trace.roots().len());
        let needed = if self.along.is_empty() && self.forward.score_mod.is_none() { 0 } else { ALONG_PARAMS + self.along.len() };
        check.that(
            roots >= needed,
            "gradient",
            format!("{roots} roots"),
            format!("at least {needed}: the modified score, its gradient and the gradient of each requested parameter"),
        );
        for along in &self.along {
            let float = matches!(along.dtype, DType::F32 | DType::F16 | DType::BF16);
            check.that(float, &format!("gradient of {}", along.name), along.dtype, "one of f32, f16, bf16");
            let elements = along.axes.dims(self.forward.extents()).into_iter().fold(1, i64::saturating_mul);
            let few = elements <= GRADIENT_LIMIT;
            check.that(few, &format!("elements of the gradient of {}", along.name), elements, format!("at most {GRADIENT_LIMIT}"));
        }
        if let Some(dtype) = self.sink_gradient {
            let float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
            check.that(float, "gradient of sink", dtype, "one of f32, f16, bf16");
            check.that(self.forward.sink, "gradient of sink", "a request", "none: the attention has no sink");
        }
        self.forward.check_captured(&mut check, self.gradient.as_deref());
        check.0.dedup();
        if check.0.is_empty() { Ok(()) } else { Err(check.0) }
    }

    fn params(&self) -> BackwardParams {
        let Forward { q, k, v, o, .. } = &self.forward;
        let [lower, upper, prefix] = self.forward.bounds();
        let [ends_lower, ends_upper] = self.forward.ends_bounds();
        let tokens = self.forward.tokens().unwrap_or(Tokens { queries: 0, keys: 0 });
        let outer = |tensor: &TensorSpec| self.forward.outer(tensor);
        let [entry, head, row] = outer(&self.d_o);
        BackwardParams {
            q_strides: outer(q),
            k_strides: outer(k),
            v_strides: outer(v),
            o_strides: outer(o),
            d_o_strides: [entry, head, row, self.d_o.strides[3]],
            dq_strides: outer(&self.dq),
            dk_strides: outer(&self.dk),
            dv_strides: outer(&self.dv),
            stats_strides: self.forward.row_memory().1,
            tokens_q: tokens.queries,
            tokens_kv: tokens.keys,
            batch: q.dims[0] as i32,
            heads_q: q.dims[1] as i32,
            group: (q.dims[1] / k.dims[1]) as i32,
            seq_q: q.dims[2] as i32,
            seq_kv: k.dims[2] as i32,
            lower,
            upper,
            prefix,
            ends_lower,
            ends_upper,
            scale: 1.0,
        }
    }

    /// Plans the backward pass: selects kernels that suit the lengths of the problem, and generates their sources.
    ///
    /// # Errors
    /// Fails as [`Backward::supports`] does.
    pub fn plan(&self) -> Result<Pass, Vec<Reason>> {
        let forward = &self.forward;
        let chosen = Kernels::backward(forward.q.dims[2], forward.k.dims[2]);
        self.plan_with(if forward.takes(chosen).is_ok() { chosen } else { Kernels::Tiled })
    }

    /// Plans the backward pass with the given kernels instead of those that [`Backward::plan`] chooses. Gradients of parameters always
    /// use tiles.
    ///
    /// # Errors
    /// Fails as [`Backward::supports`] does, and with every limit of these kernels that the problem breaks.
    pub fn plan_with(&self, kernels: Kernels) -> Result<Pass, Vec<Reason>> {
        self.supports()?;
        self.forward.takes(kernels)?;
        let mut plans = match kernels {
            Kernels::Tiled => self.tiled()?,
            Kernels::Vector | Kernels::Parts => self.vector(),
        };
        for n in 0..self.along.len() {
            plans.extend(parameter::plans(self, n)?);
        }
        plans.extend(self.sink_gradient.map(|dtype| sink::plan(self, dtype)));
        Ok(Pass { plans })
    }

    fn tiled(&self) -> Result<Vec<Plan>, Vec<Reason>> {
        let tiles = self.forward.tiles(Tiles::backward)?;
        let [batch, heads_q, seq_q, _] = self.forward.q.dims.map(|n| n as u32);
        let [_, heads_kv, seq_kv, _] = self.forward.k.dims.map(|n| n as u32);
        let constants = tiles.constants(self.forward.dims());
        let tiled = |grid, registers, own_queries, buffers| Cut {
            grid,
            threads: tiles.threads(),
            registers,
            buffers,
            threadgroup: self.memory(&tiles, own_queries).into_iter().chain(tiles.odd_bytes().map(|bytes| ("uint", bytes))).collect(),
        };
        let blocks = seq_kv.div_ceil(tiles.own) * tiles.splits();
        let dq = tiled([seq_q.div_ceil(tiles.own), heads_q, batch], tiles.dq_registers(), true, self.operands(&[self.dq()]));
        let dkv = tiled([blocks, heads_kv, batch], tiles.dkv_registers(), false, self.operands(&self.dkv()));
        Ok(vec![self.delta(), self.one(&DQ, &constants, dq), self.one(&DKV, &constants, dkv)])
    }

    /// Returns the threadgroup memory for `q`, `d_o`, `k` and `v`: the MSL element type and the size in bytes of each.
    pub(crate) fn memory(&self, tiles: &Tiles, own_queries: bool) -> Vec<(&'static str, usize)> {
        tiles.backward_bytes(own_queries).into_iter().map(|bytes| (self.forward.element(), bytes)).collect()
    }

    fn vector(&self) -> Vec<Plan> {
        let (dims, shared) = (self.forward.dims(), self.forward.shared_queries());
        let [batch, heads_kv, seq_kv, _] = self.forward.k.dims.map(|n| n as u32);
        let (rows, own) = (Rows::dq(dims, shared), Rows::dkv(dims));
        let dq = Cut {
            grid: [shared.div_ceil(rows.rows.into()) as u32, heads_kv, batch],
            threads: THREADS,
            registers: rows.registers,
            buffers: self.operands(&[self.dq()]),
            threadgroup: rows.dq_bytes().into_iter().map(|bytes| ("float", bytes)).collect(),
        };
        let dkv = Cut {
            grid: [seq_kv.div_ceil(THREADS / SIMD), heads_kv, batch],
            threads: THREADS,
            registers: own.registers,
            buffers: self.operands(&self.dkv()),
            threadgroup: Vec::new(),
        };
        vec![self.delta(), self.one(&VECTOR_DQ, &rows.constants(), dq), self.one(&VECTOR_DKV, &own.constants(), dkv)]
    }

    fn delta(&self) -> Plan {
        let [batch, heads_q, seq_q, _] = self.forward.q.dims.map(|n| n as u32);
        let name = self.forward.element();
        let mut buffers = self.forward.operands_with(&self.captured(), BackwardParams::NAME);
        buffers.retain(|b| b.operand != Operand::V);
        buffers.extend([
            Binding::read(3, name, Operand::DO),
            Binding::read(STATS_SLOT, "float", Operand::Stats),
            Binding::written(DELTA_SLOT, "float", self.delta_memory()),
            Binding::written(10, "float", self.lse_memory()),
            Binding::read(12, name, Operand::O),
        ]);
        buffers.extend(self.forward.sink.then(|| sink::binding(&self.forward)));
        let [dim_qk, dim_v] = self.forward.dims();
        let constants = [("DIM_QK", dim_qk), ("DIM_V", dim_v), ("THREADS", THREADS), ("WITH_SINK", self.forward.sink.into())];
        let cut = Cut {
            grid: [seq_q.div_ceil(THREADS / SIMD), heads_q, batch],
            threads: THREADS,
            registers: 0,
            buffers,
            threadgroup: Vec::new(),
        };
        self.one(&DELTA, &constants, cut)
    }

    /// Memory for the sum of `o · d_o` of each row, with the layout of stats.
    fn delta_memory(&self) -> Operand {
        Operand::Scratch(Scratch::new("delta", &self.forward.row_memory().0))
    }

    /// Memory for the log-sum-exp of each row as two floats, with the layout of stats.
    fn lse_memory(&self) -> Operand {
        let (rows, _) = self.forward.row_memory();
        Operand::Scratch(Scratch::new("log-sum-exps", &[&rows[..], &[2]].concat()))
    }

    /// Returns the binding of the log-sum-exp of each row as two floats, which kernels read instead of the caller's stats.
    pub(crate) fn lse_read(&self) -> Binding {
        Binding::read(STATS_SLOT, "float", self.lse_memory())
    }

    /// Returns the binding of the sum of `o · d_o` of each row, for kernels that read it.
    pub(crate) fn delta_read(&self) -> Binding {
        Binding::read(DELTA_SLOT, "float", self.delta_memory())
    }

    fn dq(&self) -> Binding {
        Binding::written(10, self.forward.element(), Operand::DQ)
    }

    fn dkv(&self) -> [Binding; 2] {
        let name = self.forward.element();
        [Binding::written(10, name, Operand::DK), Binding::written(11, name, Operand::DV)]
    }

    pub(crate) fn captured(&self) -> Captured {
        self.forward.captured(self.gradient.as_deref())
    }

    /// Returns the bindings that all kernels computing P share, followed by `more`.
    pub(crate) fn operands(&self, more: &[Binding]) -> Vec<Binding> {
        let mut buffers = self.forward.operands_with(&self.captured(), BackwardParams::NAME);
        buffers.extend([Binding::read(3, self.forward.element(), Operand::DO), self.lse_read(), self.delta_read()]);
        buffers.extend_from_slice(more);
        buffers
    }

    /// Makes the plan of a kernel that uses the gradient along the score.
    fn one(&self, kernel: &Kernel, constants: &[(&str, u32)], cut: Cut) -> Plan {
        self.kernel(kernel, constants, cut, (ALONG_SCORE, None))
    }

    /// Makes the plan of a kernel that uses root (output) number `root` of the score_mod's gradient trace. `along` is MSL's type of a
    /// parameter's gradient, if the kernel writes one.
    pub(crate) fn kernel(&self, kernel: &Kernel, constants: &[(&str, u32)], cut: Cut, (root, along): (usize, Option<&str>)) -> Plan {
        let source = Source {
            problem: &self.forward,
            element: self.forward.element(),
            captured: &self.captured(),
            gradient: self.gradient.as_deref().map(|trace| (trace, root)),
            along,
            params: &BackwardParams::msl(),
        };
        cut.plan(source.text(kernel, constants), kernel.entry, Numbers::Backward(self.params()))
    }
}
