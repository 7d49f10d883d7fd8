//! Restricts a problem to one piece of its mask: one of the bands into which the mask was decomposed.

use crate::backward::BackwardProblem;
use crate::expr::{Axis, Builder, ExprErrors, Inputs, ParamKind, Trace};
use crate::mask::{Kept, Piece};
use crate::operand::{Operand, Side};
use crate::problem::{Problem, normalise};
use crate::score_mod::Gradient;
use crate::spec::TensorSpec;
use crate::statistic::StatsBase;
use std::ops::Range;
use std::sync::Arc;

/// Returns the rows of an operand in a piece.
fn rows(piece: &Piece, operand: Operand) -> &Range<i64> {
    match operand.side() {
        Side::Queries => &piece.queries,
        Side::Keys => &piece.keys,
    }
}

impl Piece {
    /// Returns the offset, in elements, of the piece's first row (query or key) from the first row of each head of an operand.
    pub fn offset(&self, operand: Operand, tensor: &TensorSpec) -> i64 {
        rows(self, operand).start * tensor.strides[2]
    }

    fn cut(&self, operand: Operand, tensor: &TensorSpec) -> TensorSpec {
        let rows = rows(self, operand);
        let [batch, heads, _, dim] = tensor.dims;
        normalise(TensorSpec { dims: [batch, heads, rows.end - rows.start, dim], ..*tensor }, None)
    }

    /// Returns the same function of the score with indices of the whole problem. `None` if it reads a tensor over queries or keys.
    fn shifted(&self, trace: &Trace, extents: [i64; 4]) -> Option<Trace> {
        let reads_rows = trace.params().iter().any(|p| match p.kind {
            ParamKind::Scalar => false,
            ParamKind::Tensor { axes, dtype: _ } => axes.iter().any(|axis| ![Axis::Batch, Axis::Head].contains(&axis)),
        });
        if reads_rows {
            return None;
        }
        let mut b = Builder::new();
        let origin = [0, 0, self.queries.start, self.keys.start];
        let roots = b.inline(trace, Inputs { extents: Some(extents), origin, ..Inputs::default() });
        let made: Result<Trace, ExprErrors> = b.finish(&roots).map_err(ExprErrors);
        made.ok()
    }
}

impl Problem {
    /// Returns the problem that computes one piece of a decomposed mask, over the piece's queries and keys only, with `stats`. Returns
    /// `None` for a problem that cannot be computed in pieces: one that is packed or paged, or has sinks, dropout, 8-bit floats, base-2
    /// stats, other row statistics, or score_mods that read tensors over queries or keys.
    pub fn piece(&self, piece: &Piece) -> Option<Problem> {
        // Deliberately without `..`: for a new field, decide here whether a problem that has it can be computed in pieces.
        let Problem {
            dtype,
            o_dtype: _,
            block_scaled: _,
            batch: _,
            heads_q: _,
            heads_kv: _,
            seq_q: _,
            seq_kv: _,
            dim_qk: _,
            dim_v: _,
            tensors: _,
            packed,
            paged,
            score_mod: _,
            kept: _,
            sink,
            dropout,
            params: _,
            stats: _,
            stats_base,
            row_max,
            sum_exp,
            batch_invariant,
        } = self;
        // The pieces of a mask, and so the roundings of their sums, depend on the lengths of the longest sequence.
        let beyond = packed.is_some() || paged.is_some() || *sink || dropout.is_some() || dtype.is_fp8() || *batch_invariant;
        if beyond || *row_max || *sum_exp || *stats_base != StatsBase::Natural {
            return None;
        }
        let (seq_q, seq_kv) = (piece.queries.end - piece.queries.start, piece.keys.end - piece.keys.start);
        let extents = [self.batch(), self.heads_q(), seq_q, seq_kv];
        let score_mod = match &self.score_mod {
            Some(trace) => Some(Arc::new(piece.shifted(trace, extents)?)),
            None => None,
        };
        let tensors = Operand::FORWARD.map(|operand| piece.cut(operand, &self.tensors[operand as usize]));
        let kept = Kept { region: piece.region, ..Kept::default() };
        let mut part = self.clone();
        (part.seq_q, part.seq_kv, part.tensors, part.score_mod, part.kept) = (seq_q, seq_kv, tensors, score_mod, kept);
        part.stats = true;
        Some(part)
    }
}

impl BackwardProblem {
    /// Returns the backward problem that computes one piece of a decomposed mask: see [`Problem::piece`]. Also returns `None` if the
    /// problem computes gradients of declared parameters.
    pub fn piece(&self, piece: &Piece) -> Option<BackwardProblem> {
        // Deliberately without `..`: see `Problem::piece`.
        let BackwardProblem {
            forward,
            d_o: _,
            dq: _,
            dk: _,
            dv: _,
            gradient,
            wrt,
            params: _,
            deterministic: _,
            d_o_dtype: _,
            gradient_dtype: _,
        } = self;
        if !wrt.is_empty() {
            return None;
        }
        let forward = forward.piece(piece)?;
        let gradient = match gradient {
            Some(gradient) => Some(Arc::new(Gradient {
                trace: piece.shifted(&gradient.trace, forward.extents())?,
                wrt: gradient.wrt.clone(),
                reads: gradient.reads.clone(),
            })),
            None => None,
        };
        let [d_o, dq, dk, dv] =
            [Operand::DO, Operand::DQ, Operand::DK, Operand::DV].map(|operand| piece.cut(operand, self.tensor(operand)));
        let mut part = self.clone();
        (part.forward, part.gradient) = (forward, gradient);
        (part.d_o, part.dq, part.dk, part.dv) = (d_o, dq, dk, dv);
        Some(part)
    }
}
