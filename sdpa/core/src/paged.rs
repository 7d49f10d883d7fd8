//! Paged KV cache: keys and values in pages, which a page table locates.

use crate::dtype::DType;
use crate::error::{SpecError, SpecErrors};
use crate::expr::{Axes, Axis, Declared, ParamKind};
use crate::mask::SEQ_LEN_KV;
use crate::operand::{Operand, Side};
use crate::packed::Packed;
use crate::params;
use crate::problem::Problem;
use crate::spec::{AttentionSpec, Layout, Shape, TensorSpec};
use crate::tensor::{Param, ParamValue};
use serde::{Deserialize, Serialize};

/// The name of the declared parameter with the page numbers of each batch entry: i32 `[batch, ceil(seq_kv / page_size)]`.
pub const PAGE_TABLE: &str = "page_table";

/// Keys and values are in pages of `page_size` tokens. Each of `k` and `v` has one page pool for all batch entries: (pages, page_size, heads_kv,
/// dim).
///
/// In a paged specification `k` and `v` have the same extents as without pages; `seq_kv` is the most keys of a batch entry. Their strides are those
/// of the pools: between pages, heads, and tokens within a page. Any strides are legal, so pages may be head-major. The declared parameter
/// [`PAGE_TABLE`] lists the pages of each entry, for both `k` and `v`: key `n` of entry `b` is token `n % page_size` of page `page_table[b][n /
/// page_size]`. Entries may share pages, and pages may be unused.
///
/// The mask [`padding`](crate::Mask::padding) gives the number of keys of an entry; without it, an entry has all `seq_kv`. Table entries after the
/// last key are ignored. Earlier ones are checked in host memory; in device memory, an invalid page number is replaced by a valid one. On cuDNN,
/// tokens after the last key in an entry's last page must be finite numbers, as padding must be: engines multiply them by 0. A pool that is
/// initialised with zeros is enough. Unused pages may hold anything.
///
/// Queries may be packed ([`AttentionSpec::with_packed_queries`]): some sequences decode and others process chunks of their prompts.
///
/// Masks and score_mods see positions in the sequence, not in the pool. [`Mask::causal_ends`](crate::Mask::causal_ends) with lengths is the causal
/// mask of decoding and chunked prefill. There is no backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Paged {
    /// Tokens per page, at least 1.
    pub page_size: i64,
    /// Pages of each pool, at least 1.
    pub pages: i64,
}

impl Paged {
    /// Creates a cache of `pages` pages of `page_size` tokens.
    ///
    /// ```
    /// use sdpa_core::Paged;
    /// let cache = Paged::new(16, 2500);
    /// assert_eq!(cache.pages_of(17), 2);
    /// ```
    pub const fn new(page_size: i64, pages: i64) -> Paged {
        Paged { page_size, pages }
    }

    /// Returns the fields with their names.
    fn fields(&self) -> [(&'static str, i64); 2] {
        [("page_size", self.page_size), ("pages", self.pages)]
    }

    /// Returns a mistake for each field that is out of range.
    pub(crate) fn mistakes(&self) -> Vec<SpecError> {
        let most = i64::from(i32::MAX);
        let wrong = self.fields().into_iter().filter(|(_, n)| !(1..=most).contains(n));
        wrong.map(|(field, n)| SpecError::new(format!("paged.{field}"), n, format!("between 1 and {most}"))).collect()
    }

    /// Returns the paging with each field clamped to the valid range.
    pub(crate) fn clamped(&self) -> Paged {
        let [page_size, pages] = [self.page_size, self.pages].map(|n| n.clamp(1, i64::from(i32::MAX)));
        Paged { page_size, pages }
    }

    /// Returns the number of pages for this many keys of one batch entry.
    pub fn pages_of(&self, keys: i64) -> i64 {
        keys.max(0).unsigned_abs().div_ceil(self.page_size.max(1).unsigned_abs()) as i64
    }

    /// Returns the pool of a paged `k` or `v` as a tensor: (pages, heads_kv, page_size, dim), with its strides.
    pub fn container(&self, tensor: &TensorSpec) -> TensorSpec {
        let [_, heads, _, dim] = tensor.dims;
        TensorSpec { dims: [self.pages, heads, self.page_size, dim], ..*tensor }
    }

    /// Returns a paged `k` or `v` of logical extents (batch, heads_kv, seq_kv, dim) in a dense pool: `bshd` is (pages, page_size, heads_kv, dim), and
    /// `bhsd` has head-major pages.
    pub fn dense(&self, dims: [i64; 4], layout: Layout) -> TensorSpec {
        let [_, heads, _, dim] = dims;
        TensorSpec { dims, ..TensorSpec::dense([self.pages, heads, self.page_size, dim], layout) }
    }

    /// Returns the parameter that a paged problem declares: its page table.
    pub fn declared(&self) -> Declared {
        let kind = ParamKind::Tensor { axes: Axes::pages(self.page_size), dtype: DType::I32 };
        Declared { name: PAGE_TABLE.to_owned(), kind, default: None }
    }

    /// Returns the declared parameter with the number of keys of each batch entry. Packed queries over pages need it, whatever the masks
    /// are.
    pub(crate) fn lengths() -> Declared {
        let kind = ParamKind::Tensor { axes: Axes::from([Axis::Batch]), dtype: DType::I32 };
        Declared { name: SEQ_LEN_KV.to_owned(), kind, default: None }
    }
}

impl AttentionSpec {
    /// Creates a specification over a paged KV cache. `q` and `o` are dense (batch, seq_q, heads_q, dim), and `k` and `v` are dense pools (pages,
    /// page_size, heads_kv, dim). A batch entry has at most `shape.seq_kv` keys.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Mask, Paged, Shape};
    /// // One query each for 32 sequences of at most 4,096 tokens, whose cache has room for 40,000 tokens in all.
    /// let shape = Shape { batch: 32, heads_q: 32, heads_kv: 8, seq_q: 1, seq_kv: 4096, dim_qk: 128, dim_v: 128 };
    /// let cache = Paged::new(16, 2500);
    /// let problem = AttentionSpec::paged(DType::BF16, shape, cache).mask(Mask::padding()).validate()?;
    /// assert_eq!(problem.params().last().map(|p| p.name.as_str()), Some("page_table"));
    /// assert_eq!(problem.k().strides, [16 * 8 * 128, 128, 8 * 128, 1]);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn paged(dtype: DType, shape: Shape, paged: Paged) -> AttentionSpec {
        let spec = AttentionSpec::dense(dtype, shape, Layout::Bshd);
        let [k, v] = [spec.k, spec.v].map(|tensor| paged.dense(tensor.dims, Layout::Bshd));
        spec.with_k(k).with_v(v).with_paged(paged)
    }

    /// Packs the queries of a paged specification: `q` and `o` become (total, heads_q, dim). The declared parameters `cu_seqlens_q` and `seq_len_kv`,
    /// i32 `[batch]`, hold the query offsets and the number of keys of each sequence. `total_q` bounds the queries of a call over all sequences;
    /// `seq_q` bounds those of one sequence.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Mask, Paged, Shape};
    /// // 32 sequences, of which each decodes one token or reads up to 256 of its prompt, 2,048 queries at most in one call.
    /// let shape = Shape { batch: 32, heads_q: 32, heads_kv: 8, seq_q: 256, seq_kv: 4096, dim_qk: 128, dim_v: 128 };
    /// let cache = Paged::new(16, 2500);
    /// let spec = AttentionSpec::paged(DType::BF16, shape, cache).with_packed_queries(2048).mask(Mask::causal_ends());
    /// let problem = spec.validate()?;
    /// let names: Vec<&str> = problem.params().iter().map(|p| p.name.as_str()).collect();
    /// assert_eq!(names, ["cu_seqlens_q", "seq_len_kv", "page_table"]);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn with_packed_queries(mut self, total_q: i64) -> Self {
        self.packed = Some(Packed::new().with_cross(true).with_totals(Some(total_q), None));
        self
    }
}

/// The pages of each batch entry in a call over host memory. Every page that holds keys is known to be in the pool.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    table: &'a [i32],
    /// Table entries per batch entry.
    per_entry: usize,
    page_size: usize,
}

impl<'a> Pages<'a> {
    /// Returns the pages of a call, from the page table among the `values` of the parameters `declared`. `None` for a problem that is not paged.
    ///
    /// # Errors
    /// Fails if a page that holds keys is not in the pool. The error names the first such page of each batch entry.
    pub fn new(problem: &Problem, declared: &[Declared], values: &[ParamValue<'a>]) -> Result<Option<Pages<'a>>, SpecErrors> {
        let Some((paged, table)) = problem.paged().zip(table(declared, values)) else { return Ok(None) };
        let per_entry = paged.pages_of(problem.seq_kv()) as usize;
        let mut errors = Vec::new();
        for (batch, row) in table.chunks(per_entry.max(1)).enumerate() {
            let keys = keys(problem, declared, values, batch);
            let used = row.iter().take(paged.pages_of(keys) as usize);
            if let Some((n, page)) = used.enumerate().find(|(_, page)| !(0..paged.pages).contains(&i64::from(**page))) {
                let rule =
                    format!("between 0 and {}: the page pool has {} pages, and this entry has {keys} keys", paged.pages - 1, paged.pages);
                errors.push(SpecError::new(format!("parameter {PAGE_TABLE}[{batch}][{n}]"), page, rule));
            }
        }
        if errors.is_empty() { Ok(Some(Pages { table, per_entry, page_size: paged.page_size as usize })) } else { Err(SpecErrors(errors)) }
    }

    /// Returns the page numbers of a batch entry, in the order of its keys. Page numbers after the last key are unchecked.
    pub fn of(&self, batch: usize) -> &'a [i32] {
        self.table.get(batch * self.per_entry..(batch + 1) * self.per_entry).unwrap_or_default()
    }

    /// Returns the tokens per page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the page of a key, and the token within it; `None` if the table has no page for it.
    pub fn place(&self, batch: usize, key: usize) -> Option<[usize; 2]> {
        let page = usize::try_from(*self.of(batch).get(key / self.page_size)?).ok()?;
        Some([page, key % self.page_size])
    }
}

/// Returns the page table among the values of the declared parameters.
fn table<'a>(declared: &[Declared], values: &[ParamValue<'a>]) -> Option<&'a [i32]> {
    match values.get(declared.iter().position(|p| p.name == PAGE_TABLE)?)? {
        ParamValue::I32(table) => Some(table),
        ParamValue::Scalar(_)
        | ParamValue::F32(_)
        | ParamValue::F16(_)
        | ParamValue::BF16(_)
        | ParamValue::I64(_)
        | ParamValue::Bool(_)
        | ParamValue::F8E8M0(_) => None,
    }
}

/// Returns the number of keys of a batch entry; 0 if the masks attend to no key at all, because no page is read then.
fn keys(problem: &Problem, declared: &[Declared], values: &[ParamValue<'_>], batch: usize) -> i64 {
    if problem.region().is_empty(problem.seq_q(), problem.seq_kv()) {
        return 0;
    }
    let lengths = declared.iter().position(|p| problem.kept().seq_len_kv && p.name == SEQ_LEN_KV).and_then(|n| values.get(n));
    let length = lengths.filter(|lengths| batch < lengths.elements()).map(|lengths| lengths.get(batch) as i64);
    length.map_or(problem.seq_kv(), |length| length.clamp(0, problem.seq_kv()))
}

impl Problem {
    /// Returns an operand as it is in memory: for a paged problem, `k` and `v` are their [pools](Paged::container); otherwise as [`Problem::tensor`].
    pub fn in_memory(&self, operand: Operand) -> Option<TensorSpec> {
        let tensor = self.tensor(operand)?;
        let paged = self.paged().filter(|_| operand.side() == Side::Keys);
        Some(paged.map_or(*tensor, |paged| paged.container(tensor)))
    }

    /// Returns the pages of a call over host memory; `None` for a problem that is not paged.
    ///
    /// # Errors
    /// Fails as [`Pages::new`] and [`params::bind`] do.
    pub fn pages<'a>(&self, given: &[Param<'a>]) -> Result<Option<Pages<'a>>, SpecErrors> {
        if self.paged().is_none() {
            return Ok(None);
        }
        let read = |name: &str| name == PAGE_TABLE || name == SEQ_LEN_KV;
        let declared: Vec<Declared> = self.params().iter().filter(|p| read(&p.name)).cloned().collect();
        let given: Vec<Param<'a>> = given.iter().filter(|p| read(p.name)).copied().collect();
        let values = params::bind(&declared, self.extents(), &given)?;
        Pages::new(self, &declared, &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mask, ScoreMod};

    const CACHE: Paged = Paged { page_size: 4, pages: 7 };

    fn shape() -> Shape {
        Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 2, seq_kv: 9, dim_qk: 8, dim_v: 16 }
    }

    fn spec() -> AttentionSpec {
        AttentionSpec::paged(DType::F16, shape(), CACHE)
    }

    fn fields(spec: &AttentionSpec) -> Vec<String> {
        spec.validate().map_or_else(|errors| errors.0.into_iter().map(|e| e.field).collect(), |_| Vec::new())
    }

    #[test]
    fn the_table_is_declared_and_what_it_says_is_part_of_the_problem() {
        let problem = spec().validate().unwrap();
        assert_eq!(problem.params(), [CACHE.declared()]);
        assert_eq!(crate::check::kind(problem.params()[0].kind), "a tensor [batch, ceil(k / 4)] of i32");
        assert_eq!(params::elements(&problem.params()[0], problem.extents()), 9);
        for other in [Paged { page_size: 5, ..CACHE }, Paged { pages: 8, ..CACHE }] {
            let mut changed = spec();
            changed.paged = Some(other);
            assert_ne!(changed.validate().unwrap(), problem, "{other:?}");
        }
        let whole = AttentionSpec::paged(DType::F16, shape(), Paged { page_size: 64, pages: 3 }).validate().unwrap();
        assert_eq!(params::elements(&whole.params()[0], whole.extents()), 3);
    }

    #[test]
    fn keys_have_their_extents_and_the_strides_of_containers() {
        let problem = spec().validate().unwrap();
        assert_eq!((problem.k().dims, problem.v().dims), ([3, 2, 9, 8], [3, 2, 9, 16]));
        assert_eq!(problem.v().strides, [4 * 2 * 16, 16, 2 * 16, 1]);
        assert_eq!(problem.in_memory(Operand::V).unwrap().extent(), Some(7 * 4 * 2 * 16));
        assert_eq!(problem.in_memory(Operand::Q), Some(*problem.q()));
        let mut other = spec();
        other.k = CACHE.dense(other.k.dims, Layout::Bhsd);
        let other = other.validate().unwrap();
        assert_eq!(other.k().strides, [2 * 4 * 8, 4 * 8, 8, 1]);
        assert_ne!(other, problem);
        assert_eq!(other.densely(Operand::K).k().strides, [64, 32, 8, 1]);
        let text = serde_json::to_string(&spec()).unwrap();
        assert_eq!(serde_json::from_str::<AttentionSpec>(&text).unwrap(), spec());
    }

    #[test]
    fn strides_that_nothing_steps_along_tell_no_problems_apart() {
        let one = |strides: [i64; 4]| {
            let mut spec = AttentionSpec::paged(DType::F16, Shape { batch: 1, ..shape() }, Paged { page_size: 1, pages: 7 });
            spec.k.strides = strides;
            spec.validate().unwrap()
        };
        assert_eq!(one([16, 8, 1000, 1]), one([16, 8, 0, 1]));
        // Even a single batch entry has several pages, so the stride between pages counts.
        assert_ne!(one([16, 8, 16, 1]), one([32, 8, 16, 1]));
    }

    #[test]
    fn what_a_paged_problem_cannot_be_is_told_at_once() {
        let mut wrong = spec();
        wrong.paged = Some(Paged { page_size: 0, pages: i64::from(i32::MAX) + 1 });
        wrong.k.strides[3] = 2;
        assert_eq!(fields(&wrong), ["k.strides[3]", "paged.page_size", "paged.pages"]);
        let mut far = spec();
        far.paged = Some(Paged { pages: i64::from(i32::MAX), ..CACHE });
        far.v.strides[0] = 1 << 32;
        assert_eq!(fields(&far), ["v.strides"]);
        // Memory holds pages, not batch entries: in a pool of one page, no stride between pages is used.
        far.paged = Some(Paged { pages: 1, ..CACHE });
        far.v.strides[0] = 1 << 62;
        assert_eq!(fields(&far), Vec::<String>::new());
        let own: ScoreMod = "tensor page_table[batch]: i32;\nscore + f32(page_table)".parse().unwrap();
        let told = spec().score_mod(own).validate().unwrap_err().to_string();
        assert!(told.contains("parameter page_table") && told.contains("a reserved name"), "{told}");
    }

    #[test]
    fn queries_are_packed_beside_pages_and_keys_are_not() {
        let of = |masks: &[&str], change: fn(&mut AttentionSpec)| {
            let mut spec = spec().with_packed_queries(5);
            spec.masks = masks.iter().map(|mask| mask.parse().unwrap()).collect();
            change(&mut spec);
            spec
        };
        let problem = of(&[], |_| ()).validate().unwrap();
        let names: Vec<&str> = problem.params().iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["cu_seqlens_q", "seq_len_kv", "page_table"]);
        assert_eq!(Side::ALL.map(|side| (problem.packs(side), problem.has_lengths(side))), [(true, true), (false, true)]);
        assert_eq!((problem.kept().seq_len_q, problem.kept().seq_len_kv, problem.stats_elements()), (false, true, 5 * 4));
        assert_eq!(problem.k(), spec().validate().unwrap().k());
        assert_eq!(problem.in_memory(Operand::V).unwrap().extent(), Some(7 * 4 * 2 * 16));
        // A mask `k < seq_len_kv` changes nothing, because a paged cache of packed queries implies these lengths anyway.
        assert_eq!(of(&["tensor seq_len_kv[batch]: i32; k < seq_len_kv"], |_| ()).validate().unwrap().kept(), problem.kept());
        assert_eq!(of(&["causal-ends"], |_| ()).validate().unwrap().ends(), Some(&crate::Ends { lower: None, upper: Some(0) }));
        assert_ne!(of(&[], |spec| spec.packed = None).validate().unwrap(), problem);
        // Expressions may read the offsets of queries. `seq_len_kv` must be declared over the batch.
        assert!(of(&["tensor cu_seqlens_q[batch + 1]: i32; cu_seqlens_q + q > k"], |_| ()).validate().is_ok());
        assert_eq!(fields(&of(&["tensor seq_len_kv[head]: i32; k < seq_len_kv"], |_| ())), ["packed, parameter seq_len_kv"]);
        assert_eq!(fields(&of(&["padding"], |_| ())), ["masks"]);
        assert_eq!(fields(&of(&["causal-bottom-right"], |_| ())), ["masks[0].align"]);
        assert_eq!(fields(&of(&[], |spec| spec.packed = Some(Packed::of(5)))), ["packed.cross", "packed.total_kv"]);
    }

    #[test]
    fn lengths_and_boundaries_of_a_call_are_those_of_their_sides() {
        let problem = spec().with_packed_queries(5).validate().unwrap();
        let of = |cu: &[i32], lengths: &[i32]| {
            let table: &[i32] = &[6, 0, -1, -1, -1, -1, 3, 3, 1];
            let given = [("cu_seqlens_q", cu), (PAGE_TABLE, table), (SEQ_LEN_KV, lengths)];
            let given = given.map(|(name, x)| Param::new(name, x));
            problem.documents(&given).and_then(|documents| {
                let pages = problem.pages(&given)?;
                let documents = documents.unwrap();
                Ok((Side::ALL.map(|side| documents.of(side).to_vec()), pages.unwrap().place(2, 8)))
            })
        };
        let (documents, place) = of(&[1, 3, 3, 5], &[8, 0, 9]).unwrap();
        assert_eq!((documents, place), ([vec![1..3, 3..3, 3..5], Vec::new()], Some([1, 0])));
        assert!(
            of(&[1, 4, 4, 5], &[8, 0, 9])
                .unwrap_err()
                .to_string()
                .contains("at most 2, the longest sequence of the problem (this is sequence 0)")
        );
        assert!(of(&[1, 3, 3, 5], &[9, 0, 9]).unwrap_err().to_string().contains("page_table[0][2]"));
    }

    #[test]
    fn there_is_no_backward_pass() {
        let told = spec().backward().validate().unwrap_err();
        assert_eq!(told.0.iter().map(|e| e.field.as_str()).collect::<Vec<_>>(), ["forward.paged"], "{told}");
        assert!(told.to_string().contains("gradients of a paged KV cache are not supported"), "{told}");
    }

    #[test]
    fn pages_that_hold_keys_lie_within_the_containers() {
        let problem = spec().mask(Mask::padding()).validate().unwrap();
        let pages = |problem: &Problem, table: &[i32], lengths: &[i32]| {
            let given = [(PAGE_TABLE, table), (SEQ_LEN_KV, lengths)].map(|(name, x)| Param::new(name, x));
            problem.pages(&given).map(|pages| {
                let pages = pages.unwrap();
                [[0, 0], [0, 5], [2, 8]].map(|[batch, key]| pages.place(batch, key))
            })
        };
        // Page-table entries past the length may hold any number. In a batch entry without keys, all of them may.
        let found = pages(&problem, &[6, 0, -1, i32::MAX, -1, -1, 3, 3, 1], &[8, 0, 100]).unwrap();
        assert_eq!(found, [Some([6, 0]), Some([0, 1]), Some([1, 0])]);
        let told = pages(&problem, &[6, -1, -1, 7, 0, 0, 3, 3, 7], &[5, 1, 8]).unwrap_err();
        let told: Vec<String> = told.0.iter().map(ToString::to_string).collect();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(
            told[0].starts_with("parameter page_table[0][1]: got -1, expected between 0 and 6") && told[0].contains("5 keys"),
            "{told:?}"
        );
        assert!(told[1].starts_with("parameter page_table[1][0]: got 7"), "{told:?}");
        // If the mask attends to no key, no page is read, so any page table is valid.
        for masks in
            [&["padding", "1 > 2"][..], &["1 > 2"], &["causal & k > q"], &["tensor seq_len_kv[batch]: i32; k < seq_len_kv & q < q"]]
        {
            let mut empty = spec();
            empty.masks = masks.iter().map(|mask| mask.parse().unwrap()).collect();
            let empty = empty.validate().unwrap();
            let given = [Param::new(PAGE_TABLE, &[-1; 9]), Param::new(SEQ_LEN_KV, &[8, 0, 9])];
            let given = &given[..1 + usize::from(empty.params().iter().any(|p| p.name == SEQ_LEN_KV))];
            assert!(empty.pages(given).unwrap().is_some(), "{masks:?}");
        }
        // Without lengths, every batch entry has all keys, so all of its page-table entries are checked.
        let whole = spec().validate().unwrap();
        let table = [0, 1, 2, 3, 4, 5, 6, 6, 9];
        let told = whole.pages(&[Param::new(PAGE_TABLE, &table)]).unwrap_err().to_string();
        assert!(told.starts_with("parameter page_table[2][2]: got 9") && told.contains("9 keys"), "{told}");
        let short = whole.pages(&[Param::new(PAGE_TABLE, &table[1..])]).unwrap_err().to_string();
        assert!(short.contains("page_table length: got 8, expected 9 elements"), "{short}");
        assert!(spec().mask(Mask::causal()).validate().unwrap().pages(&[]).is_err());
    }
}
