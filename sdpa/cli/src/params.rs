//! Declared parameters of score_mods and masks: their sources and values.

use crate::blocks;
use crate::convert::FileType;
use crate::data::{Data, Element};
use crate::exit::Mistakes;
use crate::expression::T5_NAME;
use crate::header::{Found, Header};
use crate::random;
use crate::request::{Dropping, Packing, Paging, TableSource};
use crate::scales;
use safetensors::Dtype;
use sdpa::expr::{Axes, Axis, Declared, ParamKind};
use sdpa::library::T5;
use sdpa::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa::paged::PAGE_TABLE;
use sdpa::{DType, F8E8M0, Param, ParamValue, library};

/// The values of a declared parameter, by element type.
#[derive(Debug)]
pub(crate) enum Values {
    Scalar(f32),
    Float(Data),
    I32(Vec<i32>),
    /// The single value of an i64 parameter, such as the seed of dropout.
    I64([i64; 1]),
    Bool(Vec<bool>),
    /// The block scales of an operand of 8-bit floats.
    F8E8M0(Vec<F8E8M0>),
}

/// A declared parameter and its value.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) name: String,
    /// Extents along (batch, head, q, k), 1 along axes that the parameter does not span.
    pub(crate) dims: [i64; 4],
    pub(crate) values: Values,
}

impl Bound {
    /// Returns the value in the form in which a call receives it.
    pub(crate) fn param(&self) -> Param<'_> {
        let value = match &self.values {
            Values::Scalar(x) => ParamValue::Scalar(*x),
            Values::Float(Data::F32(x)) => ParamValue::F32(x),
            Values::Float(Data::F16(x)) => ParamValue::F16(x),
            Values::Float(Data::BF16(x)) => ParamValue::BF16(x),
            // No problem declares parameters of 8-bit floats, so this does not occur.
            Values::Float(Data::F8E4M3(..) | Data::F8E5M2(..)) => ParamValue::F32(&[]),
            Values::I32(x) => ParamValue::I32(x),
            Values::I64(x) => ParamValue::I64(x),
            Values::Bool(x) => ParamValue::Bool(x),
            Values::F8E8M0(x) => ParamValue::F8E8M0(x),
        };
        Param::new(&self.name, value)
    }

    /// Returns the i64 value if the parameter has this name; `None` otherwise.
    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        match &self.values {
            Values::I64([number]) if self.name == name => Some(*number),
            Values::Scalar(_) | Values::Float(_) | Values::I32(_) | Values::I64(_) | Values::Bool(_) | Values::F8E8M0(_) => None,
        }
    }

    /// Returns the offset of the element that a position (batch, head, q, k) reads.
    pub(crate) fn element(&self, place: [i64; 4]) -> usize {
        let at = self.dims.iter().zip(place).fold(0, |n, (&extent, at)| n * extent + if extent == 1 { 0 } else { at });
        usize::try_from(at).unwrap_or(0)
    }

    /// Returns the element that a position (batch, head, q, k) reads, widened to f64.
    pub(crate) fn at(&self, place: [i64; 4]) -> f64 {
        self.nth(self.element(place))
    }

    /// Returns the element with this index, widened to f64.
    pub(crate) fn nth(&self, element: usize) -> f64 {
        match &self.values {
            Values::Scalar(x) => f64::from(*x),
            Values::Float(x) => x.get(element),
            Values::I32(x) => f64::from(x[element]),
            Values::I64([x]) => *x as f64,
            Values::Bool(x) => f64::from(u8::from(x[element])),
            Values::F8E8M0(x) => x[element].to_f32().into(),
        }
    }
}

/// How elements of a file are converted to those of a parameter.
#[derive(Clone, Copy, Debug)]
enum Reading {
    Float(FileType, Element),
    I32,
    I64,
    Bool,
    F8E8M0,
}

/// The source of a value.
#[derive(Clone, Debug)]
enum From {
    Scalar(f32),
    File(Reading, u64),
    Number(i64),
    Random,
    /// The `cu_seqlens` offsets that the user passed.
    Given(Vec<i32>),
    /// The rows of a page table that the user passed, as far as they are known.
    Rows(Vec<Vec<i32>>),
    /// A page table with this number of pages in pseudorandom order.
    Pages(i64),
    /// A scale of 8-bit floats, or their block scales, computed from the operands.
    Scale,
    /// A table of relative positions, from the file or random.
    T5(T5, Option<(FileType, u64)>),
}

/// A declared parameter, and the source of its value.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) declared: Declared,
    /// The extents, in the file's order of axes.
    pub(crate) shape: Vec<i64>,
    dims: [i64; 4],
    /// Maximum lengths of queries and of keys.
    longest: [i64; 2],
    from: From,
}

fn reading(declared: DType, file: Dtype) -> Result<Reading, &'static str> {
    if let Some(element) = Element::of(declared) {
        return FileType::of(file).map(|ty| Reading::Float(ty, element)).ok_or("files store it as F16, BF16, F32 or F64");
    }
    let known = [
        (DType::I32, Dtype::I32, Reading::I32),
        (DType::I32, Dtype::I64, Reading::I64),
        (DType::Bool, Dtype::BOOL, Reading::Bool),
        (DType::F8E8M0, Dtype::F8_E8M0, Reading::F8E8M0),
    ];
    let found = known.into_iter().find(|(d, f, _)| (*d, *f) == (declared, file)).map(|(.., reading)| reading);
    found.ok_or(match declared {
        DType::Bool => "files store it as BOOL",
        DType::F8E8M0 => "files store it as F8_E8M0",
        DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::I64 | DType::F8E4M3 | DType::F8E5M2 => "files store it as I32 or I64",
    })
}

/// Returns the extents of a tensor along the axes that it spans.
fn spanned(axes: Axes, extents: [i64; 4]) -> Vec<i64> {
    if axes.has_end() {
        return vec![axes.elements(extents)];
    }
    if axes.is_table() {
        return axes.extents().collect();
    }
    axes.iter().map(|a| axes.dims(extents)[a.place()]).collect()
}

/// Returns true if a shape matches: the axes that the tensor spans, or all four, leading ones optional.
fn fits(shape: &[i64], axes: Axes, extents: [i64; 4]) -> bool {
    let without_ones = |shape: &[i64]| shape.iter().copied().skip_while(|&n| n == 1).collect::<Vec<_>>();
    shape == spanned(axes, extents) || (!axes.has_end() && shape.len() <= 4 && without_ones(shape) == without_ones(&axes.dims(extents)))
}

impl Planned {
    /// Returns a description of the parameter's kind: a scalar, a tensor or a table, with axes and element type.
    pub(crate) fn kind(&self) -> String {
        match self.declared.kind {
            ParamKind::Scalar => "a scalar".to_owned(),
            ParamKind::Tensor { axes, dtype } if axes.is_table() => format!("a table [{axes}] of {dtype}"),
            ParamKind::Tensor { axes, dtype } => format!("a tensor [{axes}] of {dtype}"),
        }
    }

    /// Returns the value of the parameter if it is a scalar, and otherwise `None`.
    pub(crate) fn scalar(&self) -> Option<f32> {
        match self.from {
            From::Scalar(x) => Some(x),
            From::File(..)
            | From::Number(_)
            | From::Random
            | From::Given(_)
            | From::Rows(_)
            | From::Pages(_)
            | From::Scale
            | From::T5(..) => None,
        }
    }

    /// Returns whether the parameter is a scale of 8-bit floats.
    pub(crate) fn is_scale(&self) -> bool {
        scales::named(&self.declared.name).is_some() && self.declared.kind == ParamKind::Tensor { axes: Axes::NONE, dtype: DType::F32 }
    }

    /// Returns whether the parameter holds the block scales of an operand.
    pub(crate) fn is_block_scale(&self) -> bool {
        let of_blocks = matches!(self.declared.kind, ParamKind::Tensor { axes: _, dtype: DType::F8E8M0 });
        of_blocks && blocks::named(&self.declared.name).is_some()
    }

    /// Returns whether the input file has the parameter's value.
    pub(crate) fn is_read(&self) -> bool {
        matches!(self.from, From::File(..))
    }

    /// Returns the number of elements of the parameter's value.
    pub(crate) fn elements(&self) -> usize {
        let ends = match self.declared.kind {
            ParamKind::Scalar => 0,
            ParamKind::Tensor { axes, dtype: _ } => usize::from(axes.has_end()),
        };
        self.dims.iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX)).fold(1, usize::saturating_mul).saturating_add(ends)
    }

    /// Returns the size of the parameter's value in bytes.
    pub(crate) fn bytes(&self) -> u128 {
        let each = match self.declared.kind {
            ParamKind::Scalar => 4,
            ParamKind::Tensor { dtype, axes: _ } => u128::from(dtype.bits() / 8).max(1),
        };
        self.elements() as u128 * each
    }

    /// Reads or creates the value of the parameter. Also returns the number of finite numbers that became infinite.
    pub(crate) fn load(&self, header: Option<&Header>, seed: u64) -> Result<(Bound, u64), String> {
        let len = self.elements();
        let name = &self.declared.name;
        let mut overflows = 0;
        let values = match (&self.from, header) {
            (From::Scalar(x), _) => Values::Scalar(*x),
            (From::Number(number), _) => Values::I64([*number]),
            (From::Scale, _) if self.is_block_scale() => Values::F8E8M0(Vec::new()),
            (From::Scale, _) => Values::Float(Data::F32(vec![1.0])),
            (From::Given(boundaries), _) => Values::I32(boundaries.clone()),
            (From::Rows(rows), _) => {
                let columns = usize::try_from(self.dims[3]).unwrap_or(0);
                let whole = |row: &Vec<i32>| row.clone().into_iter().chain(std::iter::repeat(NO_PAGE)).take(columns);
                Values::I32(rows.iter().flat_map(whole).collect())
            }
            (From::Pages(pages), _) => Values::I32(shuffled(*pages, len, seed)?),
            (From::File(Reading::Float(ty, element), offset), Some(header)) => {
                let (data, too_large) = header.load_at(*offset, *ty, *element, len, |_| ())?;
                overflows = too_large;
                Values::Float(data)
            }
            (From::T5(t5, place), header) => {
                let [_, heads, seq_q, seq_kv] = [self.dims[0], self.dims[1], self.longest[0], self.longest[1]].map(|n| n as usize);
                let mut table = Data::zeros(Element::F32, heads * t5.buckets)?;
                match (place, header) {
                    (Some((ty, offset)), Some(header)) => {
                        (table, overflows) = header.load_at(*offset, *ty, Element::F32, heads * t5.buckets, |_| ())?;
                    }
                    _ => random::fill(&mut table, seed, stream(name)),
                }
                let Data::F32(table) = table else { return Err(format!("{name} is not a table of f32")) };
                Values::Float(Data::F32(library::t5_bias(&table, *t5, seq_q, seq_kv)))
            }
            (From::File(Reading::I32, offset), Some(header)) => {
                Values::I32(header.load_whole::<4>(*offset, len)?.into_iter().map(i32::from_le_bytes).collect())
            }
            (From::File(Reading::I64, offset), Some(header)) => {
                let wide = header.load_whole::<8>(*offset, len)?.into_iter().map(i64::from_le_bytes);
                let narrow = |n: i64| i32::try_from(n).map_err(|_| format!("{name}: got the element {n}, expected 32-bit integers"));
                Values::I32(wide.map(narrow).collect::<Result<_, _>>()?)
            }
            (From::File(Reading::Bool, offset), Some(header)) => {
                Values::Bool(header.load_whole::<1>(*offset, len)?.into_iter().map(|[b]| b != 0).collect())
            }
            (From::File(Reading::F8E8M0, offset), Some(header)) => {
                Values::F8E8M0(header.load_whole::<1>(*offset, len)?.into_iter().map(|[b]| F8E8M0::from_bits(b)).collect())
            }
            (From::Random | From::File(..), _) => self.random(len, seed)?,
        };
        Ok((Bound { name: name.clone(), dims: self.dims, values }, overflows))
    }

    fn random(&self, len: usize, seed: u64) -> Result<Values, String> {
        let ParamKind::Tensor { axes, dtype } = self.declared.kind else { return Ok(Values::Scalar(0.0)) };
        let name = self.declared.name.as_str();
        let stream = stream(name);
        let draw = |n: usize, below: u64| random::draw(seed, stream, n as u64) % below.max(1);
        if let Some(element) = Element::of(dtype) {
            if (name, axes, dtype) == ("slopes", Axes::from([Axis::Head]), DType::F32) {
                return Ok(Values::Float(Data::F32(library::alibi_slopes(len))));
            }
            let mut data = Data::zeros(element, len)?;
            random::fill(&mut data, seed, stream);
            return Ok(Values::Float(data));
        }
        if dtype == DType::Bool {
            return Ok(Values::Bool((0..len).map(|n| draw(n, 3) > 0).collect()));
        }
        let longest = if name == SEQ_LEN_Q { Some(self.longest[0]) } else { (name == SEQ_LEN_KV).then_some(self.longest[1]) };
        if let Some(longest) = longest {
            // One in four lengths is the maximum; the others are random.
            let length = |n: usize| if draw(n, 4) == 0 { longest } else { 1 + (draw(n, 4 * longest as u64) / 4) as i64 };
            return Ok(Values::I32((0..len).map(|n| i32::try_from(length(n)).unwrap_or(i32::MAX)).collect()));
        }
        let row = axes.iter().last().map_or(1, |a| self.dims[a.place()]);
        let row = usize::try_from(row).unwrap_or(1);
        let documents = runs(len, row, seed);
        Ok(Values::I32(match name {
            "doc_start" => bounds(&documents, row, self.longest[1]).map(|(start, _)| start).collect(),
            "doc_end" => bounds(&documents, row, self.longest[1]).map(|(_, end)| end).collect(),
            _ => documents,
        }))
    }
}

/// Random streams of parameters begin after those of operands.
const FIRST_STREAM: u64 = 1 << 32;

/// Returns the random stream of a parameter.
fn stream(name: &str) -> u64 {
    name.bytes().fold(FIRST_STREAM, |n, b| n.wrapping_mul(31).wrapping_add(u64::from(b)))
}

/// The entry of a page table for keys that do not exist.
const NO_PAGE: i32 = -1;

/// Returns a page table of `len` entries: each page once in pseudorandom order, then again.
fn shuffled(pages: i64, len: usize, seed: u64) -> Result<Vec<i32>, String> {
    let pages = usize::try_from(pages).unwrap_or(usize::MAX).max(1);
    let mut order: Vec<i32> = Vec::new();
    order.try_reserve_exact(pages).map_err(|e| format!("no memory for the numbers of {pages} pages: {e}"))?;
    order.extend((0..pages).map(|page| i32::try_from(page).unwrap_or(i32::MAX)));
    for n in (1..pages).rev() {
        order.swap(n, (random::draw(seed, stream(PAGE_TABLE), n as u64) % (n as u64 + 1)) as usize);
    }
    Ok((0..len).map(|n| order[n % pages]).collect())
}

/// Draws document indices: about four runs of equal numbers in each row. Rows of one length have equal runs, whatever they are for.
fn runs(len: usize, row: usize, seed: u64) -> Vec<i32> {
    let mut all = Vec::with_capacity(len);
    let mut document = 0;
    for n in 0..len {
        let ends = n % row > 0 && random::draw(seed, FIRST_STREAM, n as u64).is_multiple_of((row as u64 / 4).max(2));
        document = if n % row == 0 { 0 } else { document + i32::from(ends) };
        all.push(document);
    }
    all
}

/// Returns the first key and the end of the document at each position of a row; the last document ends with the last key.
fn bounds(documents: &[i32], row: usize, seq_kv: i64) -> impl Iterator<Item = (i32, i32)> {
    let key = move |n: usize| i32::try_from((n as i64).min(seq_kv)).unwrap_or(i32::MAX);
    documents.chunks(row.max(1)).flat_map(move |row| {
        let last = row.last().copied().unwrap_or(0);
        row.iter().map(move |document| {
            let (start, end) = (row.partition_point(|d| d < document), row.partition_point(|d| d <= document));
            (key(start), if *document == last { key(usize::MAX >> 1) } else { key(end) })
        })
    })
}

/// The possible sources of the values of declared parameters: the input file, and options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sources<'a> {
    /// Extents (batch, heads_q, seq_q, seq_kv); `None` if another mistake prevents knowing them.
    pub(crate) extents: Option<[i64; 4]>,
    pub(crate) header: Option<&'a Header>,
    /// True if the user named an input file, even if it could not be read.
    pub(crate) input: bool,
    /// The scalars that the user passed, by name.
    pub(crate) given: &'a [(String, f32)],
    /// Whether all score_mods and masks could be parsed, so that all declared parameters are known.
    pub(crate) complete: bool,
    /// The buckets of the T5 bias, whose parameter is computed from a table; `None` without this bias.
    pub(crate) t5: Option<T5>,
    /// The packed sequences; `None` if batch entries are not packed.
    pub(crate) packing: Option<&'a Packing>,
    /// The paged KV cache; `None` if keys are not paged.
    pub(crate) paging: Option<&'a Paging>,
    /// The options of dropout.
    pub(crate) dropping: Dropping,
}

impl Sources<'_> {
    /// Finds the source of each declared parameter, and adds mistakes for scalars of `--param` that cannot be set.
    pub(crate) fn plan(&self, declared: &[Declared], mistakes: &mut Mistakes) -> Option<Vec<Planned>> {
        let names = || crate::table::list(&declared.iter().map(|d| d.name.as_str()).collect::<Vec<_>>());
        for (n, (name, _)) in self.given.iter().enumerate() {
            match declared.iter().find(|d| d.name == *name) {
                None if self.complete => mistakes.add("--param", format!("{name} is not declared; declared: {}", names())),
                None => {}
                Some(d) if d.kind != ParamKind::Scalar => {
                    mistakes.add("--param", format!("{name} is a tensor, not a scalar; add it to the --input under its name"));
                }
                Some(_) if self.given[..n].iter().any(|(before, _)| before == name) => {
                    mistakes.add("--param", format!("{name} is given twice; remove one value"));
                }
                Some(_) => {}
            }
        }
        self.found(declared, mistakes)
    }

    /// Finds the source of each declared parameter, without checking the scalars of `--param`.
    pub(crate) fn found(&self, declared: &[Declared], mistakes: &mut Mistakes) -> Option<Vec<Planned>> {
        let planned: Vec<Option<Planned>> = declared.iter().map(|d| self.one(d, mistakes)).collect();
        planned.into_iter().collect()
    }

    fn one(&self, declared: &Declared, mistakes: &mut Mistakes) -> Option<Planned> {
        let name = &declared.name;
        let extents = self.extents.unwrap_or([1; 4]);
        let ParamKind::Tensor { axes, dtype } = declared.kind else {
            let given = self.given.iter().find(|(n, _)| n == name).map(|(_, value)| *value);
            let value = given.or(declared.default).unwrap_or(f32::NAN);
            return Some(Planned::new(declared, Vec::new(), extents, From::Scalar(value)));
        };
        if let Some(number) = self.dropping.named(name) {
            return Some(Planned::new(declared, Vec::new(), extents, From::Number(number)));
        }
        let planned = Planned::new(declared, spanned(axes, extents), extents, From::Scale);
        if (planned.is_scale() || planned.is_block_scale()) && self.header.is_none_or(|header| header.find(name).is_none()) {
            return Some(planned);
        }
        if let Some(boundaries) = self.packing.and_then(|packing| packing.named(name)) {
            let from = boundaries.map_or(From::Random, |boundaries| From::Given(boundaries.to_vec()));
            return Some(Planned::new(declared, spanned(axes, extents), extents, from));
        }
        if let Some(paging) = self.paging.filter(|_| name == PAGE_TABLE) {
            let from = match paging.source(extents) {
                TableSource::Random(pages) => Some(From::Pages(pages)),
                TableSource::Given(rows) => Some(rows.map_or(From::Random, From::Rows)),
                TableSource::Input => None,
            };
            if let Some(from) = from {
                return Some(Planned::new(declared, spanned(axes, extents), extents, from));
            }
        }
        let t5 = self.t5.filter(|_| name == T5_NAME && dtype == DType::F32 && axes == Axes::from([Axis::Head, Axis::Q, Axis::K]));
        let bias = spanned(axes, extents);
        let Some(header) = self.header else {
            if let Some(t5) = t5 {
                return (!self.input).then(|| Planned::new(declared, bias, extents, From::T5(t5, None)));
            }
            // An input that could not be read was reported already.
            return (!self.input).then(|| Planned::new(declared, spanned(axes, extents), extents, From::Random));
        };
        let Some(Found { dtype: stored, shape, offset }) = header.find(name) else {
            mistakes.add(header.path.display(), header.lacks(name, ", which is declared"));
            return None;
        };
        if let Some(t5) = t5 {
            let want = [extents[1], i64::try_from(t5.buckets).unwrap_or(i64::MAX)];
            if self.extents.is_some() && shape != want {
                mistakes.add(header.path.display(), format!("{name}: got shape {shape:?}, expected {want:?} (query heads, buckets)"));
                return None;
            }
            let Some(ty) = FileType::of(stored) else {
                mistakes.add(header.path.display(), format!("{name}: got type {stored}, expected F16, BF16, F32 or F64"));
                return None;
            };
            return Some(Planned::new(declared, bias, extents, From::T5(t5, Some((ty, offset)))));
        }
        let right = self.extents.is_none() || fits(&shape, axes, extents);
        if !right {
            let (own, all) = (spanned(axes, extents), axes.dims(extents));
            let rule = if axes.is_table() { format!("{own:?}") } else { format!("{own:?} ({axes}), or {all:?}") };
            mistakes.add(header.path.display(), format!("{name}: got shape {shape:?}, expected {rule}"));
        }
        let reading = reading(dtype, stored).map_err(|rule| {
            mistakes.add(header.path.display(), format!("{name}: got type {stored}, expected {dtype} as declared: {rule}"))
        });
        right.then_some(Planned::new(declared, shape, extents, From::File(reading.ok()?, offset)))
    }
}

impl Planned {
    fn new(declared: &Declared, shape: Vec<i64>, extents: [i64; 4], from: From) -> Planned {
        let dims = match declared.kind {
            ParamKind::Scalar => [1; 4],
            ParamKind::Tensor { axes, dtype: _ } => axes.dims(extents),
        };
        Planned { declared: declared.clone(), shape, dims, longest: [extents[2], extents[3]], from }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_come_with_all_axes_or_those_that_they_span() {
        let extents = [2, 4, 5, 1];
        for (shape, axes, want) in [
            (&[4][..], &[Axis::Head][..], true),
            (&[1, 4, 1, 1], &[Axis::Head], true),
            (&[4, 1, 1], &[Axis::Head], true),
            (&[4, 1], &[Axis::Head], false),
            (&[3], &[Axis::Head], false),
            (&[2, 5], &[Axis::Batch, Axis::Q], true),
            (&[2, 1, 5, 1], &[Axis::Batch, Axis::Q], true),
            (&[5, 2], &[Axis::Batch, Axis::Q], false),
            (&[], &[], true),
            (&[1], &[], true),
            (&[5, 1], &[Axis::Q, Axis::K], true),
            (&[5], &[Axis::Q, Axis::K], false),
        ] {
            assert_eq!(fits(shape, axes.iter().copied().collect(), extents), want, "{shape:?} {axes:?}");
        }
    }

    #[test]
    fn documents_are_runs_that_begin_anew_in_each_row() {
        let all = runs(300, 100, 7);
        for row in all.chunks(100) {
            assert_eq!(row[0], 0);
            assert!(row.windows(2).all(|w| w[1] == w[0] || w[1] == w[0] + 1) && row[99] > 0, "{row:?}");
        }
        assert!(all == runs(300, 100, 7) && all != runs(300, 100, 8));
        let of: Vec<(i32, i32)> = bounds(&all, 100, 120).collect();
        for (n, (start, end)) in of.into_iter().enumerate() {
            let (row, q) = (&all[n / 100 * 100..][..100], n % 100);
            for k in 0..120 {
                let own = row[q] == row[k.min(99)];
                assert_eq!((start..end).contains(&(k as i32)), own, "query {q}, key {k}");
            }
        }
    }
}
