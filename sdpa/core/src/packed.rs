//! Packed sequences (varlen): contiguous in memory, without padding.

use crate::error::{SpecError, SpecErrors};
use crate::expr::{Axes, Declared, ParamKind};
use crate::operand::{Operand, Side};
use crate::problem::Problem;
use crate::spec::TensorSpec;
use crate::statistic::Statistic;
use crate::tensor::ParamValue;
use crate::{DType, params};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The name of the declared parameter with the sequence offsets, if queries and keys share them: i32 or i64 `[batch + 1]`, in tokens.
pub const CU_SEQLENS: &str = "cu_seqlens";
/// The name of the declared parameter with the offsets of queries, if keys have others: i32 or i64 `[batch + 1]`.
pub const CU_SEQLENS_Q: &str = "cu_seqlens_q";
/// The name of the declared parameter with the offsets of keys, if queries have others: i32 or i64 `[batch + 1]`.
pub const CU_SEQLENS_KV: &str = "cu_seqlens_kv";

/// Packed batch entries: sequences of individual lengths, contiguous in `(total, heads, dim)`.
///
/// In a packed specification the extents are `batch`, the number of sequences, and `seq_q` and `seq_kv`, the most tokens of a sequence. The stride of
/// the batch axis has no effect. The offsets of sequences are the declared parameter [`CU_SEQLENS`], or [`CU_SEQLENS_Q`] and [`CU_SEQLENS_KV`] with
/// [`Packed::cross`]: `batch + 1` non-decreasing i32 or i64 numbers of tokens, as in FlashAttention's varlen functions. Sequence `n` has the tokens
/// from the `n`th offset up to the next. A sequence may be empty. Tokens before the first offset and after the last one belong to no sequence and are
/// not written. Offsets in device memory are not checked. Whatever they are, only memory of the call and its first `total` tokens are read and
/// written.
///
/// Masks and score_mods see positions within the sequence, and its number as the batch entry. If keys have `cu_seqlens` of their own, windows are
/// aligned to the first query and key of a sequence, or to its last ones ([`Align::Ends`](crate::Align::Ends)). `stats` is `(total, heads_q)`.
///
/// With a [paged cache](crate::Paged) only the queries are packed. Keys then have lengths, the declared parameter `seq_len_kv`, instead of
/// [`CU_SEQLENS_KV`]: see [`AttentionSpec::with_packed_queries`](crate::AttentionSpec::with_packed_queries).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Packed {
    /// True if keys have different `cu_seqlens` than queries.
    #[serde(default)]
    pub cross: bool,
    /// True if `cu_seqlens` are i64 instead of i32. Expressions can read only i32 ones.
    #[serde(default)]
    pub wide: bool,
    /// The largest number of query tokens in a call, including those before the first sequence. `None` means `batch · seq_q`. Memory of
    /// backward passes grows with it.
    #[serde(default)]
    pub total_q: Option<i64>,
    /// The largest number of key tokens in a call. `None` means `batch · seq_kv`.
    #[serde(default)]
    pub total_kv: Option<i64>,
}

impl Packed {
    /// Creates a packing in which queries and keys share i32 `cu_seqlens`, with at most `batch · seq_q` and `batch · seq_kv` tokens.
    pub const fn new() -> Packed {
        Packed { cross: false, wide: false, total_q: None, total_kv: None }
    }

    /// Creates a packing in which queries and keys share i32 `cu_seqlens`, with at most `total` tokens in a call.
    pub const fn of(total: i64) -> Packed {
        Packed::new().with_totals(Some(total), Some(total))
    }

    /// Sets whether keys have different `cu_seqlens` than queries.
    #[must_use]
    pub const fn with_cross(mut self, cross: bool) -> Self {
        self.cross = cross;
        self
    }

    /// Sets whether `cu_seqlens` are i64, not i32.
    #[must_use]
    pub const fn with_wide(mut self, wide: bool) -> Self {
        self.wide = wide;
        self
    }

    /// Sets the largest numbers of query and key tokens in a call. `None` means `batch · seq_q` or `batch · seq_kv`.
    ///
    /// ```
    /// use sdpa_core::{Packed, packed::CU_SEQLENS_KV};
    /// use sdpa_core::operand::Side;
    ///
    /// // Cross attention: queries and keys have boundaries of their own.
    /// let packed = Packed::new().with_cross(true).with_totals(Some(9000), Some(12000));
    /// assert_eq!(packed.boundaries(Side::Keys), CU_SEQLENS_KV);
    /// ```
    #[must_use]
    pub const fn with_totals(mut self, total_q: Option<i64>, total_kv: Option<i64>) -> Self {
        (self.total_q, self.total_kv) = (total_q, total_kv);
        self
    }

    /// Returns the name of the `cu_seqlens` parameter for one side, queries or keys.
    pub fn boundaries(&self, side: Side) -> &'static str {
        match (self.cross, side) {
            (false, _) => CU_SEQLENS,
            (true, Side::Queries) => CU_SEQLENS_Q,
            (true, Side::Keys) => CU_SEQLENS_KV,
        }
    }

    /// Returns the parameters that a packed problem declares: the `cu_seqlens` of the packed `sides`, queries or keys.
    pub(crate) fn declared(&self, sides: &[Side]) -> Vec<Declared> {
        let mut names: Vec<&str> = sides.iter().map(|side| self.boundaries(*side)).collect();
        names.dedup();
        let dtype = if self.wide { DType::I64 } else { DType::I32 };
        let kind = ParamKind::Tensor { axes: Axes::BOUNDARIES, dtype };
        names.into_iter().map(|name| Declared { name: name.to_owned(), kind, default: None }).collect()
    }

    /// Returns the largest number of query or key tokens in a call of `documents` sequences with at most `seq` tokens each; at least 1.
    pub(crate) fn most(&self, side: Side, documents: i64, seq: i64) -> i64 {
        self.total(side).unwrap_or_else(|| documents.saturating_mul(seq)).max(1)
    }

    /// Returns the largest number of query or key tokens in a call; `None` if it is not set.
    pub fn total(&self, side: Side) -> Option<i64> {
        match side {
            Side::Queries => self.total_q,
            Side::Keys => self.total_kv,
        }
    }
}

/// Returns the number of tokens of a packed operand that fit into a buffer of `elements` elements.
pub fn tokens(tensor: &TensorSpec, elements: u64) -> i64 {
    let elements = i64::try_from(elements).unwrap_or(i64::MAX);
    let [_, heads, _, dim] = tensor.dims;
    let [_, head, token, element] = tensor.strides;
    let last_row = head.saturating_mul(heads - 1).saturating_add(element.saturating_mul(dim - 1)).saturating_add(1);
    if elements < last_row {
        return 0;
    }
    // If heads are farther apart than tokens, the tokens of one head end where the next head begins, which limits their number.
    let most = if head > token && token > 0 && heads > 1 { head / token } else { i64::MAX };
    (elements - last_row).checked_div(token).map_or(most, |n| (n + 1).min(most))
}

/// Returns a packed operand as one tensor (1, heads, tokens, dim) that spans all sequences.
pub fn memory(tensor: &TensorSpec, tokens: i64) -> TensorSpec {
    let [_, heads, _, dim] = tensor.dims;
    let mut all = TensorSpec { dims: [1, heads, tokens, dim], ..*tensor };
    all.strides[0] = 0;
    all
}

/// The token ranges of each sequence of a call, for queries and keys; none for paged keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Documents {
    of: [Vec<Range<usize>>; 2],
}

impl Documents {
    /// Returns the sequences of a call, from the `cu_seqlens` among the `values` of the parameters `declared`. `None` for a problem that is not
    /// packed.
    ///
    /// # Errors
    /// Fails if offsets are negative or decrease, or if a sequence is longer than the problem states. The error names the first of each
    /// kind.
    pub fn new(problem: &Problem, declared: &[Declared], values: &[ParamValue<'_>]) -> Result<Option<Documents>, SpecErrors> {
        let Some(packed) = problem.packed() else { return Ok(None) };
        let mut errors = Vec::new();
        let of = Side::ALL.map(|side| {
            if !problem.packs(side) {
                return Vec::new();
            }
            let name = packed.boundaries(side);
            let given = declared.iter().position(|p| p.name == name).and_then(|n| values.get(n));
            let most = problem.seq(side);
            let at = |n: i64| given.map_or(0, |value| value.get(n as usize) as i64);
            let mut documents = Vec::new();
            for n in 0..problem.batch() {
                let (start, end) = (at(n), at(n + 1));
                let field = |n: i64| format!("parameter {name}[{n}]");
                if n == 0 && start < 0 {
                    errors.push(SpecError::new(field(0), start, "at least 0"));
                } else if end < start {
                    errors.push(SpecError::new(field(n + 1), end, format!("at least {start}, the offset before it")));
                    break;
                } else if end.saturating_sub(start) > most {
                    let rule = format!("at most {most}, the longest sequence of the problem (this is sequence {n})");
                    errors.push(SpecError::new(field(n + 1), format!("a sequence of {} tokens", end.saturating_sub(start)), rule));
                    break;
                }
                documents.push(start.max(0) as usize..end.max(0) as usize);
            }
            documents
        });
        errors.dedup();
        if errors.is_empty() { Ok(Some(Documents { of })) } else { Err(SpecErrors(errors)) }
    }

    /// Returns the query or key tokens of each sequence, as ranges over all tokens of the call.
    pub fn of(&self, side: Side) -> &[Range<usize>] {
        &self.of[side as usize]
    }

    /// Returns the end of the last sequence of queries or keys, in tokens.
    pub fn end(&self, side: Side) -> usize {
        self.of(side).last().map_or(0, |document| document.end)
    }
}

/// Returns a mistake for each buffer of a packed call that is too small for its sequences, and for each invalid `cu_seqlens`. The last
/// number of each entry of `operands` and `statistics` is the length of the buffer.
pub(crate) fn check_memory(
    problem: &Problem,
    values: (&[Declared], &[ParamValue<'_>]),
    operands: &[(Operand, TensorSpec, usize)],
    statistics: &[(Statistic, usize)],
) -> Vec<SpecError> {
    let (Some(packed), (declared, values)) = (problem.packed(), values) else { return Vec::new() };
    let documents = match Documents::new(problem, declared, values) {
        Ok(Some(documents)) => documents,
        Ok(None) => return Vec::new(),
        Err(errors) => return errors.0,
    };
    let mut errors = Vec::new();
    for side in Side::ALL.into_iter().filter(|side| problem.packs(*side)) {
        let (end, total) = (documents.end(side) as i64, problem.total(side));
        if end > total {
            let field = format!("parameter {}[{}]", packed.boundaries(side), problem.batch());
            errors.push(SpecError::new(field, end, format!("at most {total}, the problem's {}", side.total())));
        }
        for (operand, tensor, len) in operands.iter().filter(|(operand, ..)| operand.side() == side) {
            let have = tokens(tensor, *len as u64);
            if have < end {
                let rule = format!("memory for {end} tokens, the last offset of {}", packed.boundaries(side));
                errors.push(SpecError::new(format!("{operand} length"), format!("{len} elements ({have} tokens)"), rule));
            }
        }
    }
    let need = documents.end(Side::Queries) as i64 * problem.heads_q();
    for (statistic, len) in statistics.iter().filter(|(_, len)| (*len as i64) < need) {
        errors.push(SpecError::new(format!("{statistic} length"), len, format!("at least total x heads_q = {need}")));
    }
    errors.dedup();
    errors
}

impl Problem {
    /// Returns whether the queries or the keys are packed, for the given side.
    pub fn packs(&self, side: Side) -> bool {
        self.packed().is_some() && (side == Side::Queries || self.paged().is_none())
    }

    /// Returns the `cu_seqlens` parameters that a packed problem declares; none for any other problem.
    pub fn boundaries(&self) -> Vec<Declared> {
        let sides: Vec<Side> = Side::ALL.into_iter().filter(|side| self.packs(*side)).collect();
        self.packed().map_or_else(Vec::new, |packed| packed.declared(&sides))
    }

    /// Returns the sequences of a call over host memory; `None` for a problem that is not packed.
    ///
    /// # Errors
    /// Fails as [`Documents::new`] and [`params::bind`] do.
    pub fn documents(&self, given: &[crate::Param<'_>]) -> Result<Option<Documents>, SpecErrors> {
        if self.packed().is_none() {
            return Ok(None);
        }
        let boundaries = self.boundaries();
        let given: Vec<crate::Param<'_>> = given.iter().filter(|p| boundaries.iter().any(|d| d.name == p.name)).copied().collect();
        let values = params::bind(&boundaries, self.extents(), &given)?;
        Documents::new(self, &boundaries, &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Align, AttentionSpec, Layout, Mask, Param, Shape};

    fn shape() -> Shape {
        Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 9, dim_qk: 8, dim_v: 16 }
    }

    fn problem(packed: Packed) -> Problem {
        AttentionSpec::packed(DType::F16, shape(), packed).validate().unwrap()
    }

    #[test]
    fn memory_holds_the_tokens_that_it_was_made_for_and_not_one_more() {
        for layout in Layout::ALL {
            let dense = TensorSpec::dense([1, 4, 23, 8], layout);
            let spec = TensorSpec { dims: [3, 4, 9, 8], ..dense };
            let elements = dense.extent().unwrap();
            assert_eq!(tokens(&spec, elements as u64), 23, "{layout:?}");
            assert_eq!(memory(&spec, 23).extent(), Some(elements));
            if layout != Layout::Bhsd {
                assert_eq!(tokens(&spec, elements as u64 - 1), 22, "{layout:?}");
                assert_eq!(tokens(&spec, elements as u64 + 31), 23, "{layout:?}");
                assert_eq!(tokens(&spec, elements as u64 + 32), 24, "{layout:?}");
            }
            assert_eq!(tokens(&spec, 7), 0);
        }
        let one_number = TensorSpec { strides: [0; 4], ..TensorSpec::dense([3, 4, 9, 8], Layout::Bshd) };
        assert_eq!([tokens(&one_number, 0), tokens(&one_number, 1)], [0, i64::MAX]);
    }

    #[test]
    fn one_token_in_all_overlaps_nothing() {
        let shape = Shape { batch: 1, seq_q: 1, seq_kv: 1, ..shape() };
        for total in [None, Some(1)] {
            let packed = Packed { total_q: total, total_kv: total, ..Packed::new() };
            let spec = |layout: Layout| {
                let mut spec = AttentionSpec::packed(DType::F16, shape, packed);
                for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
                    *tensor = TensorSpec { dims: tensor.dims, ..TensorSpec::dense([1, tensor.dims[1], 1, tensor.dims[3]], layout) };
                }
                spec.with_stats()
            };
            let [outermost, innermost] = [Layout::Bhsd, Layout::Bshd].map(|layout| spec(layout).validate().unwrap());
            assert_eq!(outermost, innermost);
            let tokens = Operand::FORWARD.map(|operand| {
                let tensor = outermost.tensor(operand).unwrap();
                tokens(tensor, (tensor.dims[1] * tensor.dims[3]) as u64)
            });
            assert_eq!(tokens, [1; 4]);
            let backward = spec(Layout::Bhsd).backward().validate().unwrap();
            assert_eq!(backward, spec(Layout::Bshd).backward().validate().unwrap());
            // With two tokens the heads of o would overlap, which is refused.
            let mut two = spec(Layout::Bhsd);
            two.packed = Some(Packed::of(2));
            let fields: Vec<String> = two.validate().unwrap_err().0.into_iter().map(|e| e.field).collect();
            assert_eq!(fields, ["o.strides[1]"]);
        }
    }

    #[test]
    fn tokens_have_their_own_places_where_every_document_is_of_one() {
        let shape = Shape { seq_q: 1, seq_kv: 1, ..shape() };
        let spec = AttentionSpec::packed(DType::F16, shape, Packed::of(3));
        let problem = spec.validate().unwrap();
        assert_eq!(problem.tensors().map(|t| t.strides[2]), [32, 16, 32, 64]);
        let backward = spec.backward().validate().unwrap().densely(Operand::DQ);
        assert_eq!([backward.dq(), backward.dk()].map(|t| t.strides[2]), [32, 16]);
        let mut overlapping = spec.backward();
        overlapping.forward.o.strides[2] = 63;
        overlapping.dk.strides[2] = 0;
        let fields: Vec<String> = overlapping.validate().unwrap_err().0.into_iter().map(|e| e.field).collect();
        assert_eq!(fields, ["o.strides[2]", "dk.strides[2]"]);
    }

    #[test]
    fn boundaries_are_declared_once_where_they_are_the_same() {
        let names = |packed: Packed| packed.declared(&Side::ALL).into_iter().map(|p| p.name).collect::<Vec<_>>();
        assert_eq!(names(Packed::new()), [CU_SEQLENS]);
        assert_eq!(names(Packed { cross: true, ..Packed::new() }), [CU_SEQLENS_Q, CU_SEQLENS_KV]);
        let declared = problem(Packed::new()).params().to_vec();
        assert_eq!(params::elements(&declared[0], [3, 4, 9, 9]), 4);
    }

    #[test]
    fn boundaries_that_contradict_the_problem_are_told() {
        let problem = problem(Packed::of(23));
        let documents = |cu: &[i32]| problem.documents(&[Param::new(CU_SEQLENS, cu)]);
        let found = documents(&[0, 9, 9, 14]).unwrap().unwrap();
        assert_eq!(found.of(Side::Keys), [0..9, 9..9, 9..14]);
        let told = |cu: &[i32]| documents(cu).unwrap_err().0.into_iter().map(|e| e.to_string()).collect::<Vec<_>>().join("; ");
        for (cu, what) in [
            ([-1, 0, 2, 4], "parameter cu_seqlens[0]: got -1, expected at least 0"),
            ([0, 5, 4, 4], "parameter cu_seqlens[2]: got 4, expected at least 5, the offset before it"),
            ([0, 10, 14, 15], "at most 9, the longest sequence of the problem (this is sequence 0)"),
        ] {
            assert!(told(&cu).contains(what), "{}", told(&cu));
        }
        assert!(told(&[0, 1, 2]).contains("4 elements"), "{}", told(&[0, 1, 2]));
        let wide = self::problem(Packed { wide: true, ..Packed::of(23) });
        let cu: &[i64] = &[-1, i64::MIN, i64::MAX, i64::MAX];
        let told = wide.documents(&[Param::new(CU_SEQLENS, cu)]).unwrap_err().to_string();
        assert!(
            told.contains("at least 0") && told.contains("at most 9, the longest sequence of the problem (this is sequence 1)"),
            "{told}"
        );
    }

    #[test]
    fn ends_of_documents_are_corners_of_their_own_where_keys_have_boundaries() {
        let of = |cross: bool, masks: &[&str]| {
            let packed = if cross { Packed { cross, ..Packed::new() } } else { Packed::of(30) };
            let mut spec = AttentionSpec::packed(DType::F16, shape(), packed);
            spec.masks = masks.iter().map(|mask| mask.parse().unwrap()).collect();
            spec.validate()
        };
        // With one cu_seqlens, queries and keys have the same lengths, so a mask aligned to the ends equals one aligned to the top left.
        for (ends, corner) in [("causal-ends", "causal"), ("window:3,1:ends", "window:3,1"), ("!causal-ends | k < 3", "!causal | k < 3")] {
            assert_eq!(of(false, &[ends]).unwrap(), of(false, &[corner]).unwrap());
        }
        let problem = of(true, &["causal-ends & k % 2 == 0", "window:3,inf:ends"]).unwrap();
        assert_eq!(problem.ends(), Some(&crate::Ends { lower: Some(-3), upper: Some(0) }));
        assert!(problem.region().is_full() && problem.kept().rest.is_some() && problem.flops() > 0.0);
        assert_ne!(problem, of(true, &["causal & k % 2 == 0", "window:3,inf"]).unwrap());
        assert_eq!(of(true, &["window:inf,8:ends"]).unwrap(), of(true, &[]).unwrap());
        for mask in ["causal-ends | k < 2", "!causal-ends", "document & !(causal & causal-ends)"] {
            let told = of(true, &["causal", mask]).unwrap_err().0;
            assert_eq!(told.iter().map(|e| &*e.field).collect::<Vec<_>>(), ["masks[1]"], "{mask}");
            assert!(told[0].rule.contains("join it to the other masks by &") && told[0].value.contains("causal-ends"), "{}", told[0]);
        }
    }

    #[test]
    fn what_a_packed_problem_cannot_be_is_told_at_once() {
        let packed = Packed { cross: true, total_q: Some(0), ..Packed::new() };
        let spec = AttentionSpec::packed(DType::F16, Shape { seq_kv: 11, ..shape() }, packed).mask(Mask::padding()).mask(Mask::window(
            Some(2),
            Some(0),
            Align::BottomRight,
        ));
        let fields: Vec<String> = spec.validate().unwrap_err().0.into_iter().map(|e| e.field).collect();
        assert_eq!(fields, ["packed.total_q", "masks[1].align", "masks"]);
        let spec = AttentionSpec::packed(DType::F16, Shape { seq_kv: 11, ..shape() }, Packed { total_kv: Some(40), ..Packed::of(30) });
        let fields: Vec<String> = spec.validate().unwrap_err().0.into_iter().map(|e| e.field).collect();
        assert_eq!(fields, ["k.dims[2] (seq_kv)", "packed.total_kv"]);
    }
}
