//! Backward problems and their plans.

use crate::declined::{Check, Declined};
use crate::forward::Forward;
use crate::params::{BackwardParams, Params};
use crate::plan::{Binding, Operand, Plan, Tensor};
use crate::source::{DELTA, DELTA_SLOT, DKV, DQ, Piece, STATS_SLOT, Source, WEIGHTS};
use crate::tiles::{SIMD, Tiles};
use cudnn_graph::expr::Trace;
use std::sync::Arc;

/// The gradient of a forward problem, from its operands, `o`, stats and `d_o`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backward {
    /// The attention; whether it asks for stats does not matter here.
    pub forward: Forward,
    /// Gradient of the output. Any stride may be 0.
    pub d_o: Tensor,
    /// Gradient of the queries.
    pub dq: Tensor,
    /// Gradient of the keys.
    pub dk: Tensor,
    /// Gradient of the values.
    pub dv: Tensor,
    /// Of the score and of the gradient that comes in from behind: its second root is the gradient of the score. There exactly when
    /// the attention has a score_mod.
    pub gradient: Option<Arc<Trace>>,
}

impl Backward {
    /// Whether the kernels take the problem.
    ///
    /// # Errors
    /// Every limit that it breaks.
    pub fn supports(&self) -> Result<(), Vec<Declined>> {
        let mut check = Check(self.forward.supports().err().unwrap_or_default());
        let Forward { q, k, v, o, .. } = &self.forward;
        for (field, tensor, like) in [("d_o", &self.d_o, o), ("dq", &self.dq, q), ("dk", &self.dk, k), ("dv", &self.dv, v)] {
            check.that(tensor.dims == like.dims, &format!("{field}.dims"), format!("{:?}", tensor.dims), format!("{:?}", like.dims));
            let dense = field == "d_o" || tensor.strides[3] == 1 || tensor.dims[3] == 1;
            check.that(dense, &format!("{field}.strides[3]"), tensor.strides[3], "1: the last axis is dense");
        }
        let roots = self.gradient.as_deref().map_or(0, |trace| trace.roots().len());
        let derivative = self.forward.score_mod.is_some() == (roots >= 2);
        check.that(derivative, "gradient", format!("{roots} roots"), "a score_mod has a gradient, and nothing else has");
        self.forward.check_captured(&mut check, self.gradient.as_deref());
        check.0.dedup();
        if check.0.is_empty() { Ok(()) } else { Err(check.0) }
    }

    fn params(&self) -> BackwardParams {
        let Forward { q, k, v, o, .. } = &self.forward;
        let [lower, upper, prefix] = self.forward.bounds();
        BackwardParams {
            q_strides: q.outer(),
            k_strides: k.outer(),
            v_strides: v.outer(),
            o_strides: o.outer(),
            d_o_strides: self.d_o.strides,
            dq_strides: self.dq.outer(),
            dk_strides: self.dk.outer(),
            dv_strides: self.dv.outer(),
            heads_q: q.dims[1] as i32,
            group: (q.dims[1] / k.dims[1]) as i32,
            seq_q: q.dims[2] as i32,
            seq_kv: k.dims[2] as i32,
            lower,
            upper,
            prefix,
            scale: 1.0,
        }
    }

    /// Elements of [`Operand::Delta`].
    pub fn delta_elements(&self) -> i64 {
        self.forward.q.dims[..3].iter().product()
    }

    /// Cuts the problem and writes its kernels: one that makes [`Operand::Delta`], and two that read it, for `dq` and for `dk` and `dv`.
    ///
    /// # Errors
    /// As [`Backward::supports`].
    pub fn plan(&self) -> Result<[Plan; 3], Vec<Declined>> {
        self.supports()?;
        let forward = &self.forward;
        let (name, tiles) = forward.cut(Tiles::backward)?;
        let captured = forward.captured(self.gradient.as_deref());
        let (params, layout) = (self.params(), BackwardParams::msl());
        let source = Source {
            problem: forward,
            element: name,
            tiles: &tiles,
            captured: &captured,
            gradient: self.gradient.as_deref(),
            params: &layout,
        };
        let [batch, heads_q, seq_q, _] = forward.q.dims.map(|n| n as u32);
        let (heads_kv, seq_kv) = (forward.k.dims[1] as u32, forward.k.dims[2] as u32);
        let plan = |entry, pieces: &[Piece], grid, mut buffers: Vec<Binding>, threadgroup: Vec<usize>, registers| {
            buffers.sort_by_key(|b| b.slot);
            Plan {
                source: source.text(pieces),
                entry,
                tiles,
                grid,
                registers,
                threads: tiles.threads(),
                buffers,
                threadgroup: threadgroup.into_iter().map(|bytes| (name, bytes)).collect(),
                params: Params::Backward(params),
                unit: 1.0,
            }
        };
        let delta = vec![
            Binding::read(3, name, Operand::DO),
            Binding::constant(4, &format!("{}&", BackwardParams::NAME), Operand::Params),
            Binding::written(DELTA_SLOT, "float", Operand::Delta),
            Binding::read(12, name, Operand::O),
        ];
        let mut shared = forward.operands(name, &captured, BackwardParams::NAME);
        shared.extend([
            Binding::read(3, name, Operand::DO),
            Binding::read(STATS_SLOT, "float", Operand::Stats),
            Binding::read(DELTA_SLOT, "float", Operand::Delta),
        ]);
        let with = |more: &[Binding]| shared.iter().chain(more).cloned().collect::<Vec<Binding>>();
        let dq = with(&[Binding::written(10, name, Operand::DQ)]);
        let dkv = with(&[Binding::written(10, name, Operand::DK), Binding::written(11, name, Operand::DV)]);
        let rows = tiles.threads() / SIMD;
        Ok([
            plan("attention_delta", &[DELTA], [seq_q.div_ceil(rows), heads_q, batch], delta, Vec::new(), 0),
            plan(
                "attention_dq",
                &[WEIGHTS, DQ],
                [seq_q.div_ceil(tiles.own), heads_q, batch],
                dq,
                tiles.backward_bytes(true),
                tiles.dq_registers(),
            ),
            plan(
                "attention_dkv",
                &[WEIGHTS, DKV],
                [seq_kv.div_ceil(tiles.own) * tiles.splits(), heads_kv, batch],
                dkv,
                tiles.backward_bytes(false),
                tiles.dkv_registers(),
            ),
        ])
    }
}
