//! Packed sequences of a request: their `cu_seqlens` and numbers of tokens.

use crate::args::ProblemArgs;
use crate::exit::Mistakes;
use crate::header::Header;
use sdpa::packed::CU_SEQLENS;
use sdpa::{AttentionSpec, DType, Layout, Packed, Param, Shape, Side, SpecError, packed};

/// The packed sequences of a request: their `cu_seqlens` and numbers of tokens.
#[derive(Clone, Debug)]
pub(crate) struct Packing {
    pub(super) packed: Packed,
    /// Offsets of queries and of keys; `None` if a plan needs no values, or if they could not be read.
    boundaries: [Option<Vec<i32>>; 2],
    /// The options that set them.
    options: [&'static str; 2],
    /// Whether keys are paged, so that only queries are packed.
    paged: bool,
}

/// The value that selects the tensor of the input.
const OF_INPUT: &str = "input";

fn numbers(text: &str) -> Result<Vec<i32>, String> {
    let all: Vec<Result<i32, &str>> = text.split(',').map(|part| part.trim().parse().map_err(|_| part.trim())).collect();
    let wrong: Vec<String> = all.iter().filter_map(|part| part.as_ref().err().map(|part| format!("{part:?}"))).collect();
    if !wrong.is_empty() {
        return Err(format!("got {}, expected offsets of tokens as i32, such as 0,5,12, or {OF_INPUT}", crate::table::list(&wrong)));
    }
    let all: Vec<i32> = all.into_iter().filter_map(Result::ok).collect();
    if all.len() < 2 { Err("got fewer than 2 offsets, expected at least 2, such as 0,5 for one sequence".to_owned()) } else { Ok(all) }
}

/// Returns the number of tokens of the longest sequence, at least 1.
fn longest(boundaries: &[i32]) -> i64 {
    boundaries.windows(2).map(|pair| i64::from(pair[1]) - i64::from(pair[0])).fold(1, i64::max)
}

fn end(boundaries: &[i32]) -> i64 {
    boundaries.last().map_or(0, |end| i64::from(*end))
}

impl Packing {
    /// Reads the options; returns `None` if batch entries are not packed.
    pub(super) fn read(args: &ProblemArgs, header: Option<&Header>, mistakes: &mut Mistakes) -> Option<Packing> {
        let given = [("--cu-seqlens", &args.cu_seqlens), ("--cu-seqlens-q", &args.cu_seqlens_q), ("--cu-seqlens-kv", &args.cu_seqlens_kv)];
        let [both, queries, keys] = given.map(|(_, text)| text.as_deref());
        let paged = args.paged.is_some();
        if both.is_none() && queries.is_none() && keys.is_none() {
            return args.packed.map(|packed| Packing { packed, boundaries: [None, None], options: [given[0].0; 2], paged });
        }
        let cross = both.is_none() || paged;
        if paged {
            for (option, _) in given.iter().filter(|(option, text)| *option != given[1].0 && text.is_some()) {
                mistakes.add(
                    option,
                    "cannot be combined with --paged; use --cu-seqlens-q for the queries, and the tensor seq_len_kv of --input for the key lengths",
                );
            }
        } else if both.is_some() && (queries.is_some() || keys.is_some()) {
            mistakes.add("--cu-seqlens", "sets queries and keys, and cannot be combined with --cu-seqlens-q or --cu-seqlens-kv");
        } else if cross && (queries.is_none() || keys.is_none()) {
            let (have, lacks) = if queries.is_some() { (given[1].0, given[2].0) } else { (given[2].0, given[1].0) };
            mistakes.add(have, format!("requires {lacks}"));
        }
        if args.input.is_none() && args.shape.is_none() {
            let option = given.iter().find(|(_, text)| text.is_some()).map_or(given[0].0, |(option, _)| option);
            mistakes.add(option, "requires --shape, whose batch is the number of sequences, or --input");
        }
        let packed = Packed::new().with_cross(cross);
        let options = if cross { [given[1].0, given[2].0] } else { [given[0].0; 2] };
        let mut read = |text: Option<&str>, option: &str, side: Side| match text? {
            OF_INPUT => of_input(packed.boundaries(side), option, header, args.input.is_some(), mistakes),
            text => mistakes.take(option, numbers(text)),
        };
        let queries = read(both.filter(|_| !paged).or(queries), options[0], Side::Queries);
        let keys = match (paged, cross) {
            (true, _) => None,
            (false, true) => read(keys, options[1], Side::Keys),
            (false, false) => queries.clone(),
        };
        Some(Packing { packed, boundaries: [queries, keys], options, paged })
    }

    /// Returns whether the tokens of a side are packed.
    pub(super) fn packs(&self, side: Side) -> bool {
        side == Side::Queries || !self.paged
    }

    pub(crate) fn of(&self, side: Side) -> Option<&[i32]> {
        self.boundaries[side as usize].as_deref()
    }

    /// Returns the `cu_seqlens` offsets if `name` is the name of their parameter. The inner `None` stands for offsets that are not known.
    pub(crate) fn named(&self, name: &str) -> Option<Option<&[i32]>> {
        Side::ALL.into_iter().find(|side| self.packed.boundaries(*side) == name).map(|side| self.of(side))
    }

    /// Returns the extents of a packed operand, from those of its memory: one batch entry of all tokens.
    pub(super) fn dims(&self, [_, heads, _, dim]: [i64; 4], side: Side) -> Option<[i64; 4]> {
        let boundaries = self.of(side)?;
        Some([boundaries.len() as i64 - 1, heads, longest(boundaries), dim])
    }

    /// Validates offsets separately from other options. `batch` and `longest` are those of the problem, `tokens` those in memory.
    pub(super) fn judge(&self, extents: Option<[i64; 4]>, tokens: [Option<i64>; 2], mistakes: &mut Mistakes) -> bool {
        let mut right = true;
        let sides = if self.packed.cross { &Side::ALL[..] } else { &Side::ALL[..1] };
        for &side in sides.iter().filter(|side| self.packs(**side)) {
            let Some(boundaries) = self.of(side) else { continue };
            let (batch, most) = match (extents, side) {
                (Some([batch, _, seq_q, _]), Side::Queries) => (batch, seq_q),
                (Some([batch, _, _, seq_kv]), Side::Keys) => (batch, seq_kv),
                (None, _) => (boundaries.len() as i64 - 1, i64::from(i32::MAX)),
            };
            let mut errors = wrong(boundaries, batch, most);
            let (end, name) = (end(boundaries), self.packed.boundaries(side));
            if let Some(have) = tokens[side as usize].filter(|have| end > *have) {
                let rule = format!("at most {have}, the number of tokens in the input");
                errors.push(SpecError::new(format!("parameter {name}[{}]", boundaries.len() - 1), end, rule));
            }
            right &= errors.is_empty();
            for mut e in errors {
                e.field = e.field.replace(CU_SEQLENS, name);
                mistakes.add(self.options[side as usize], e);
            }
        }
        right
    }

    /// Makes a specification packed. `tokens` are the numbers of tokens in memory.
    pub(super) fn place(&self, spec: &mut AttentionSpec, layout: Layout, tokens: [Option<i64>; 2]) {
        let [queries, keys] = Side::ALL.map(|side| {
            let longest = if side == Side::Queries { spec.q.dims[2] } else { spec.k.dims[2] };
            // In the head-major layout, each head needs memory for at least the longest sequence.
            let least = if layout == Layout::Bhsd { longest } else { 1 };
            let there = tokens[side as usize].or(self.of(side).map(end)).map(|tokens| tokens.max(least));
            there.or(self.packed.total(side))
        });
        spec.packed = Some(self.packed.with_totals(queries, keys.filter(|_| !self.paged)));
        let of_keys = [(&mut spec.k, keys), (&mut spec.v, keys)].into_iter().filter(|_| !self.paged);
        for (tensor, tokens) in [(&mut spec.q, queries), (&mut spec.o, queries)].into_iter().chain(of_keys) {
            let [batch, heads, longest, dim] = tensor.dims;
            tensor.strides = layout.strides([1, heads, tokens.unwrap_or(batch.saturating_mul(longest)), dim]);
        }
    }
}

/// Reads the `cu_seqlens` tensor of an input.
fn of_input(name: &str, option: &str, header: Option<&Header>, input: bool, mistakes: &mut Mistakes) -> Option<Vec<i32>> {
    let Some(header) = header else {
        if !input {
            mistakes.add(option, format!("{OF_INPUT} requires --input, with a tensor {name} in the file"));
        }
        return None;
    };
    mistakes.take(header.path.display(), header.boundaries(name, option))
}

/// Returns the errors of offsets for `batch` sequences.
fn wrong(boundaries: &[i32], batch: i64, most: i64) -> Vec<SpecError> {
    let [batch, most] = [batch, most].map(|n| n.clamp(1, i64::from(i32::MAX)));
    let shape = Shape { batch, heads_q: 1, heads_kv: 1, seq_q: most, seq_kv: most, dim_qk: 1, dim_v: 1 };
    let problem = AttentionSpec::packed(DType::F32, shape, Packed::new()).validate();
    let documents = problem.and_then(|p| p.documents(&[Param::new(CU_SEQLENS, boundaries)]));
    documents.err().map_or_else(Vec::new, |errors| errors.0)
}

/// Returns the number of elements in the memory of an operand, whose rows are queries or keys (`side`).
pub(crate) fn elements(spec: &AttentionSpec, tensor: &sdpa::TensorSpec, side: Side) -> usize {
    let [batch, _, longest, _] = tensor.dims;
    let packs = side == Side::Queries || spec.paged.is_none();
    let documents = spec.packed.filter(|_| packs).map(|p| packed::memory(tensor, p.total(side).unwrap_or(batch.saturating_mul(longest))));
    let whole = documents.or_else(|| spec.paged.filter(|_| side == Side::Keys).map(|paged| paged.container(tensor)));
    whole.unwrap_or(*tensor).extent().and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX)
}
