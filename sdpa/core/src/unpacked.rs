//! Packed problems as dense ones: one batch entry with all tokens, in which queries attend to keys of their own sequence.
//!
//! Context parallelism shards the tokens of all sequences together. [`AttentionSpec::unpacked`] rewrites masks and score_mods for that: the batch entry becomes
//! the number of the token's sequence, and `q` and `k` the positions within it. Calls pass these numbers as tensors ([`PACKED_TENSORS`]).

use crate::DType;
use crate::error::{Error, Reason, SpecError, SpecErrors, Unsupported};
use crate::expr::{Axes, Axis, Binary, Builder, Const, Declared, ExprErrors, Inputs, NodeId, ParamKind, Trace};
use crate::mask::{Kept, Mask, Region, Rule};
use crate::operand::Side;
use crate::packed::Documents;
use crate::placed::PLACEMENT;
use crate::spec::{AttentionSpec, TensorSpec};

/// Names of the declared tensors of an unpacked problem: for each query and for each key, the number of its sequence and its position in it, i32.
pub const PACKED_TENSORS: [&str; 4] = ["packed_sequence_q", "packed_sequence_k", "packed_position_q", "packed_position_k"];

impl AttentionSpec {
    /// Returns the dense specification with the results of this packed one: `batch` 1, and as many queries and keys as the packing's total.
    ///
    /// A call passes [`PACKED_TENSORS`], which [`Documents::tokens`] returns, in place of `cu_seqlens`. Tokens of no sequence attend to no key, so their rows of
    /// the output are 0.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Mask, Packed, Shape};
    /// let shape = Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 9, dim_qk: 8, dim_v: 8 };
    /// let packed = AttentionSpec::packed(DType::BF16, shape, Packed::of(20)).mask(Mask::causal());
    /// let dense = packed.unpacked()?.validate()?;
    /// assert_eq!((dense.batch(), dense.seq_q(), dense.seq_kv()), (1, 20, 20));
    /// // Causal masks stay bands.
    /// assert_eq!(dense.region().upper, Some(0));
    /// # Ok::<(), sdpa_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns every mistake in the specification, and [`Error::Unsupported`] for separate `cu_seqlens` of keys, packings without a total, dropout, 8-bit
    /// floats, and parameters with a batch, query or key axis.
    pub fn unpacked(&self) -> Result<AttentionSpec, Error> {
        let problem = self.validate()?;
        let Some(packed) = self.packed else {
            return Err(SpecErrors(vec![SpecError::new("packed", "nothing", "a packing")]).into());
        };
        let limit = |field: &str, value: &str, limit: &str| Reason::Limit { field: field.into(), value: value.into(), limit: limit.into() };
        let mut reasons = Vec::new();
        if packed.cross || self.paged.is_some() {
            reasons.push(limit("packed.cross", "true", "false: keys with cu_seqlens of their own are not supported here"));
        }
        if packed.total_q.is_none() {
            reasons.push(limit("packed.total_q", "none", "the number of tokens of all sequences"));
        }
        if self.dropout.is_some() {
            reasons.push(limit("dropout", "dropout", "none with packed sequences here: executors count random numbers by sequences"));
        }
        if self.batch_invariant {
            reasons.push(limit("batch_invariant", "true", "false: sums begin where sequences begin in the call"));
        }
        if self.dtype.is_fp8() {
            reasons.push(limit("dtype", self.dtype.name(), "f32, f16 or bf16"));
        }
        let own = |p: &&Declared| p.name != packed.boundaries(Side::Queries) && p.name != packed.boundaries(Side::Keys);
        for p in problem.params().iter().filter(own) {
            let ParamKind::Tensor { axes, dtype: _ } = p.kind else { continue };
            if axes.iter().any(|axis| axis != Axis::Head) {
                let rule = "a scalar, a table or a tensor over heads: tensors over positions of a sequence are not supported here";
                reasons.push(limit(&format!("parameter {}", p.name), &format!("a tensor [{axes}]"), rule));
            }
        }
        if !reasons.is_empty() {
            return Err(Unsupported::new(PLACEMENT, reasons).into());
        }
        let reserved = problem.params().iter().filter(|p| PACKED_TENSORS.contains(&p.name.as_str()));
        let reserved = reserved.map(|p| SpecError::new(format!("parameter {}", p.name), "a reserved name", "another name"));
        let errors: Vec<SpecError> = reserved.collect();
        if !errors.is_empty() {
            return Err(SpecErrors(errors).into());
        }
        let tokens = packed.total_q.unwrap_or(0);
        let failed = |errors: ExprErrors| Error::Bug(format!("an unpacked trace: {errors}"));
        let extents = problem.extents();
        let mut spec = AttentionSpec { packed: None, ..self.clone() };
        for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
            let [_, head, token, _] = tensor.strides;
            let all = TensorSpec { dims: [1, tensor.dims[1], tokens, tensor.dims[3]], ..*tensor };
            *tensor = TensorSpec { strides: [head.max(token).saturating_mul(tokens), head, token, 1], ..all }.densely();
        }
        let place = |trace: &Trace| {
            let mut b = Builder::new();
            let roots = inline(&mut b, trace, extents);
            b.finish(&roots).map_err(ExprErrors)
        };
        spec.score_mods = self.score_mods.iter().map(|score_mod| score_mod.map_stages(place)).collect::<Result<_, _>>().map_err(failed)?;
        spec.masks = vec![Mask::Traced(Rule::new("packed", masks(problem.kept(), extents).map_err(failed)?))];
        Ok(spec)
    }
}

fn tensor(b: &mut Builder, n: usize) -> NodeId {
    let axis = if n.is_multiple_of(2) { Axis::Q } else { Axis::K };
    let kind = ParamKind::Tensor { axes: Axes::from([axis]), dtype: DType::I32 };
    b.param(Declared { name: PACKED_TENSORS[n].to_owned(), kind, default: None })
}

/// Copies a trace of a packed problem: the batch entry is the sequence of the query.
fn inline(b: &mut Builder, trace: &Trace, extents: [i64; 4]) -> Vec<NodeId> {
    let [sequence, q, k] = [0, 2, 3].map(|n| tensor(b, n));
    let indices = [Some(sequence), None, Some(q), Some(k)];
    b.inline(trace, Inputs { extents: Some(extents), indices, ..Inputs::default() })
}

/// Returns the masks as one trace. Distances between tokens of one sequence are those of their positions, so bands need no tensors.
fn masks(kept: &Kept, extents: [i64; 4]) -> Result<Trace, ExprErrors> {
    // Lengths and bands aligned to sequence ends do not occur with one `cu_seqlens` for both sides.
    let Kept { region: Region { lower, upper, prefix }, ends: _, seq_len_q: _, seq_len_kv: _, rest } = kept;
    let mut b = Builder::new();
    let integer = |b: &mut Builder, n: i64| b.konst(Const::I32(n.clamp(-i64::from(i32::MAX), i64::from(i32::MAX)) as i32));
    let (q, k) = (b.index(Axis::Q), b.index(Axis::K));
    let apart = b.binary(Binary::Sub, k, q);
    let mut terms = Vec::new();
    for (bound, f) in [(lower, Binary::Gt), (upper, Binary::Le)] {
        if let Some(bound) = bound {
            let bound = integer(&mut b, *bound);
            terms.push(b.binary(f, apart, bound));
        }
    }
    if let Some(prefix) = prefix {
        let (len, position) = (integer(&mut b, *prefix), tensor(&mut b, 3));
        let (causal, early) = (b.binary(Binary::Le, k, q), b.binary(Binary::Lt, position, len));
        terms.push(b.binary(Binary::Or, causal, early));
    }
    let (of_q, of_k) = (tensor(&mut b, 0), tensor(&mut b, 1));
    terms.push(b.binary(Binary::Eq, of_q, of_k));
    terms.extend(rest.iter().flat_map(|rest| inline(&mut b, rest, extents)));
    let root = terms.into_iter().reduce(|x, y| b.binary(Binary::And, x, y)).unwrap_or_else(|| b.konst(Const::Bool(true)));
    b.finish(&[root]).map_err(ExprErrors)
}

impl Documents {
    /// Returns the tensors of an unpacked problem ([`PACKED_TENSORS`]) for `tokens` tokens. Tokens of no sequence have the numbers −1 as queries and −2 as
    /// keys.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Packed, Param, Shape};
    /// let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 3, seq_kv: 3, dim_qk: 8, dim_v: 8 };
    /// let packed = AttentionSpec::packed(DType::BF16, shape, Packed::of(6)).validate()?;
    /// let documents = packed.documents(&[Param::new("cu_seqlens", &[0, 2, 5])])?.unwrap_or_default();
    /// let [sequence_q, sequence_k, position_q, _] = documents.tokens(6);
    /// assert_eq!((sequence_q, sequence_k), (vec![0, 0, 1, 1, 1, -1], vec![0, 0, 1, 1, 1, -2]));
    /// assert_eq!(position_q, [0, 1, 0, 1, 2, 0]);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn tokens(&self, tokens: usize) -> [Vec<i32>; 4] {
        let of = |side: Side, none: i32| {
            let (mut sequences, mut positions) = (vec![none; tokens], vec![0; tokens]);
            for (n, range) in self.of(side).iter().enumerate() {
                for (position, token) in range.clone().enumerate().filter(|(_, token)| *token < tokens) {
                    (sequences[token], positions[token]) = (n as i32, position as i32);
                }
            }
            (sequences, positions)
        };
        let ((of_q, at_q), (of_k, at_k)) = (of(Side::Queries, -1), of(Side::Keys, -2));
        [of_q, of_k, at_q, at_k]
    }
}
