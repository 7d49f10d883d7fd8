//! Whether the bits of a sequence's results depend on this sequence alone, as `batch_invariant` promises.
//!
//! The results of each sequence alone are compared bit by bit with its results among copies of itself, in a padded batch, packed, with paged keys, and
//! in calls with parts of its queries.

use crate::inputs::Operand;
use crate::random::Random;
use sdpa::packed::{CU_SEQLENS_KV, CU_SEQLENS_Q};
use sdpa::paged::PAGE_TABLE;
use sdpa::{
    AttentionSpec, BackwardSpec, DType, Executor, HostBackward, HostForward, Layout, Mask, Packed, Paged, Param, SINK, ScoreMod, Shape,
    TensorSpec,
};
use std::ops::Range;

/// The features of the problems that are compared.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    /// Element type of the operands.
    pub dtype: DType,
    /// Number of query heads and of KV heads.
    pub heads: [i64; 2],
    /// `dim_qk` and `dim_v`.
    pub dims: [i64; 2],
    /// Score_mods of the library that declare no tensor.
    pub score_mods: &'static [&'static str],
    /// Masks of the library that declare no tensor.
    pub masks: &'static [&'static str],
    /// Whether there is a sink.
    pub sink: bool,
    /// Number of queries and keys of each sequence.
    pub lengths: &'static [[i64; 2]],
    /// Whether the functions count positions from the last query and key, so that calls with parts of the queries compute the same.
    pub from_the_end: bool,
    /// Whether backward passes are compared too.
    pub gradients: bool,
    /// Whether specifications ask for the option. Without it, an executor may differ.
    pub batch_invariant: bool,
}

/// A sequence: random operands, each (head, row, dim) without gaps.
struct Sequence {
    queries: i64,
    keys: i64,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
}

/// A sequence in a call, with some of its queries and its first keys.
#[derive(Clone)]
struct Entry<'a> {
    of: &'a Sequence,
    queries: Range<i64>,
    keys: i64,
}

impl<'a> Entry<'a> {
    fn whole(of: &'a Sequence) -> Entry<'a> {
        Entry { of, queries: 0..of.queries, keys: of.keys }
    }

    fn rows(&self) -> i64 {
        self.queries.end - self.queries.start
    }

    /// Returns the number of rows of an operand of queries or of keys.
    fn rows_of(&self, of_keys: bool) -> i64 {
        if of_keys { self.keys } else { self.rows() }
    }
}

/// The memory of the sequences of a call.
#[derive(Clone, Copy, Debug)]
enum Container {
    /// Sequences of equal lengths.
    Dense,
    /// Lengths of queries and keys, with this many rows of padding more than the longest sequence needs.
    Padded(i64),
    /// Packed sequences of queries and of keys.
    Packed,
    /// Padded queries, and keys in pages of this many tokens.
    Paged(i64),
}

/// The results of one entry: `o`, `stats`, and with gradients `dq`, `dk`, `dv`, each (head, row, dim).
type Results = Vec<(&'static str, Vec<f64>)>;

impl Features {
    fn sequences(&self) -> Vec<Sequence> {
        let mut random = Random::new(42);
        let [heads_q, heads_kv] = self.heads;
        let [dim_qk, dim_v] = self.dims;
        let mut draw = |n: i64| -> Vec<f64> {
            let mut rounded = Operand::filled(self.dtype, n as usize, 0.0);
            (0..n as usize).for_each(|at| rounded.set(at, random.normal()));
            (0..n as usize).map(|at| rounded.get(at)).collect()
        };
        let mut sequence = |&[queries, keys]: &[i64; 2]| Sequence {
            queries,
            keys,
            q: draw(heads_q * queries * dim_qk),
            k: draw(heads_kv * keys * dim_qk),
            v: draw(heads_kv * keys * dim_v),
            d_o: draw(heads_q * queries * dim_v),
        };
        self.lengths.iter().map(&mut sequence).collect()
    }

    fn sinks(&self) -> Vec<f32> {
        (0..self.heads[0]).map(|head| 0.5 - head as f32).collect()
    }

    fn spec(&self, entries: &[Entry<'_>], container: Container) -> Result<AttentionSpec, String> {
        let longest = |of_keys: bool| entries.iter().map(|entry| entry.rows_of(of_keys)).max().unwrap_or(0);
        let padding = if let Container::Padded(more) = container { more } else { 0 };
        let shape = Shape {
            batch: entries.len() as i64,
            heads_q: self.heads[0],
            heads_kv: self.heads[1],
            seq_q: longest(false) + padding,
            seq_kv: longest(true) + padding,
            dim_qk: self.dims[0],
            dim_v: self.dims[1],
        };
        let mut spec = match container {
            Container::Dense | Container::Padded(_) => AttentionSpec::dense(self.dtype, shape, Layout::Bshd),
            Container::Packed => {
                let [queries, keys] = totals(entries);
                AttentionSpec::packed(self.dtype, shape, Packed::new().with_cross(true).with_totals(Some(queries), Some(keys)))
            }
            Container::Paged(page_size) => AttentionSpec::paged(self.dtype, shape, Paged::new(page_size, pages(entries, page_size) + 1)),
        };
        if matches!(container, Container::Padded(_) | Container::Paged(_)) {
            spec = spec.mask(Mask::padding());
        }
        for mask in self.masks {
            spec = spec.mask(mask.parse::<Mask>().map_err(|e| e.to_string())?);
        }
        for score_mod in self.score_mods {
            spec = spec.score_mod(score_mod.parse::<ScoreMod>().map_err(|e| e.to_string())?);
        }
        (spec.sink, spec.batch_invariant) = (self.sink, self.batch_invariant);
        Ok(spec.with_stats())
    }
}

/// Returns the number of query and of key tokens of packed entries.
fn totals(entries: &[Entry<'_>]) -> [i64; 2] {
    [false, true].map(|of_keys| entries.iter().map(|entry| entry.rows_of(of_keys)).sum())
}

fn pages(entries: &[Entry<'_>], page_size: i64) -> i64 {
    entries.iter().map(|entry| (entry.keys + page_size - 1) / page_size).sum()
}

/// The entries of a call in memory: where each row of each is.
struct Placed<'a> {
    entries: &'a [Entry<'a>],
    container: Container,
    /// The index in the page pool of each page of each entry.
    table: Vec<Vec<i64>>,
}

impl<'a> Placed<'a> {
    fn new(entries: &'a [Entry<'a>], container: Container) -> Placed<'a> {
        let mut table = Vec::new();
        if let Container::Paged(page_size) = container {
            // The last page of the pool is unused. Pages are in descending order, so that no entry has consecutive pages.
            let mut next = pages(entries, page_size);
            for entry in entries {
                let own = (entry.keys + page_size - 1) / page_size;
                table.push((0..own).map(|n| next - 1 - n).collect());
                next -= own;
            }
        }
        Placed { entries, container, table }
    }

    /// Returns the index of an element of an operand: of an entry, head, row of the entry and column.
    fn at(&self, tensor: &TensorSpec, of_keys: bool, entry: usize, [head, row, column]: [i64; 3]) -> usize {
        let [batch_stride, head_stride, row_stride, _] = tensor.strides;
        let before = || self.entries[..entry].iter().map(|entry| entry.rows_of(of_keys)).sum::<i64>();
        let first = match (self.container, of_keys) {
            (Container::Packed, _) => (before() + row) * row_stride,
            (Container::Paged(size), true) => self.table[entry][(row / size) as usize] * batch_stride + row % size * row_stride,
            (Container::Dense | Container::Padded(_) | Container::Paged(_), _) => entry as i64 * batch_stride + row * row_stride,
        };
        (first + head * head_stride + column) as usize
    }

    /// Returns the number of elements of an operand in memory.
    fn len(&self, tensor: &TensorSpec, of_keys: bool) -> usize {
        let [batch, heads, rows, dim] = tensor.dims;
        let all = match (self.container, of_keys) {
            (Container::Packed, _) => totals(self.entries)[usize::from(of_keys)] * heads * dim,
            (Container::Paged(size), true) => (pages(self.entries, size) + 1) * size * heads * dim,
            (Container::Dense | Container::Padded(_) | Container::Paged(_), _) => batch * heads * rows * dim,
        };
        all as usize
    }

    /// Iterates over the places of an entry's elements in memory, in the order (head, row, dim), each with its index in the sequence's own tensor.
    fn places(&self, tensor: &TensorSpec, of_keys: bool, entry: usize) -> Vec<[usize; 2]> {
        let Entry { of, queries, keys } = &self.entries[entry];
        let [_, heads, _, dim] = tensor.dims;
        let (first, rows, own_rows) = if of_keys { (0, *keys, of.keys) } else { (queries.start, queries.end - queries.start, of.queries) };
        let elements = (0..heads).flat_map(|head| (0..rows).flat_map(move |row| (0..dim).map(move |column| [head, row, column])));
        let place = |[head, row, column]: [i64; 3]| {
            [self.at(tensor, of_keys, entry, [head, row, column]), ((head * own_rows + first + row) * dim + column) as usize]
        };
        elements.map(place).collect()
    }

    /// Fills an operand from the sequences, with NaN everywhere else.
    fn fill(&self, dtype: DType, tensor: &TensorSpec, of_keys: bool, from: impl Fn(usize) -> &'a [f64]) -> Operand {
        let mut operand = Operand::filled(dtype, self.len(tensor, of_keys), f32::NAN);
        for entry in 0..self.entries.len() {
            self.places(tensor, of_keys, entry).into_iter().for_each(|[to, at]| operand.set(to, from(entry)[at]));
        }
        operand
    }

    fn read(&self, operand: &Operand, tensor: &TensorSpec, of_keys: bool, entry: usize) -> Vec<f64> {
        self.places(tensor, of_keys, entry).into_iter().map(|[at, _]| operand.get(at)).collect()
    }
}

/// Runs the forward pass of a call, and with `gradients` its backward pass. Returns the results of each entry.
fn results(
    executor: &dyn Executor,
    features: &Features,
    entries: &[Entry<'_>],
    container: Container,
    gradients: bool,
) -> Result<Vec<Results>, String> {
    let told = |what: &str, why: &dyn std::fmt::Display| format!("{what} of {container:?}: {why}");
    let spec = features.spec(entries, container)?;
    let problem = spec.validate().map_err(|e| e.to_string())?;
    let placed = Placed::new(entries, container);
    let [q, k, v] = [
        placed.fill(features.dtype, &spec.q, false, |n| &entries[n].of.q),
        placed.fill(features.dtype, &spec.k, true, |n| &entries[n].of.k),
        placed.fill(features.dtype, &spec.v, true, |n| &entries[n].of.v),
    ];
    let lengths = |of_keys: bool| -> Vec<i32> { entries.iter().map(|entry| entry.rows_of(of_keys) as i32).collect() };
    let (len_q, len_kv) = (lengths(false), lengths(true));
    let offsets = |lengths: &[i32]| -> Vec<i32> {
        let sums = lengths.iter().scan(0, |sum, n| {
            *sum += n;
            Some(*sum)
        });
        std::iter::once(0).chain(sums).collect()
    };
    let (begin_q, begin_kv, sinks) = (offsets(&len_q), offsets(&len_kv), features.sinks());
    let columns = placed.table.iter().map(Vec::len).max().unwrap_or(0);
    let table: Vec<i32> = placed.table.iter().flat_map(|row| (0..columns).map(|n| row.get(n).map_or(-1, |page| *page as i32))).collect();
    let mut params = match container {
        Container::Dense => Vec::new(),
        Container::Packed => vec![Param::new(CU_SEQLENS_Q, &begin_q), Param::new(CU_SEQLENS_KV, &begin_kv)],
        Container::Padded(_) => vec![Param::new("seq_len_q", &len_q), Param::new("seq_len_kv", &len_kv)],
        Container::Paged(_) => {
            vec![Param::new("seq_len_q", &len_q), Param::new("seq_len_kv", &len_kv), Param::new(PAGE_TABLE, &table)]
        }
    };
    params.extend(features.sink.then(|| Param::new(SINK, &sinks)));

    let mut o = Operand::filled(features.dtype, placed.len(&spec.o, false), f32::NAN);
    let mut stats = vec![f32::NAN; problem.stats_elements() as usize];
    let call = HostForward::new(q.elements(), k.elements(), v.elements(), o.elements_mut()).stats(&mut stats).params(&params);
    let prepared = executor.prepare(&problem).map_err(|e| told("forward pass", &e))?;
    prepared.forward(call).map_err(|e| told("forward pass", &e))?;
    let of_stats = problem.stats_tensor();
    let stats = Operand::F32(stats);
    let read = |entry| vec![("o", placed.read(&o, &spec.o, false, entry)), ("stats", placed.read(&stats, &of_stats, false, entry))];
    let mut all: Vec<Results> = (0..entries.len()).map(read).collect();
    if !gradients {
        return Ok(all);
    }

    let BackwardSpec { d_o, dq, dk, dv, .. } = spec.clone().backward();
    let problem = spec.backward().validate().map_err(|e| e.to_string())?;
    let d_o = placed.fill(features.dtype, &d_o, false, |n| &entries[n].of.d_o);
    let empty = |tensor: &TensorSpec, of_keys| Operand::filled(features.dtype, placed.len(tensor, of_keys), f32::NAN);
    let (mut to_q, mut to_k, mut to_v) = (empty(&dq, false), empty(&dk, true), empty(&dv, true));
    let inputs = (q.elements(), k.elements(), v.elements());
    let call = HostBackward::new(
        inputs,
        (o.elements(), stats.numbers()),
        d_o.elements(),
        (to_q.elements_mut(), to_k.elements_mut(), to_v.elements_mut()),
    );
    let prepared = executor.prepare_backward(&problem).map_err(|e| told("backward pass", &e))?;
    prepared.backward(call.params(&params)).map_err(|e| told("backward pass", &e))?;
    for (entry, results) in all.iter_mut().enumerate() {
        let gradients = [("dq", &to_q, &dq, false), ("dk", &to_k, &dk, true), ("dv", &to_v, &dv, true)];
        results.extend(gradients.map(|(name, operand, tensor, of_keys)| (name, placed.read(operand, tensor, of_keys, entry))));
    }
    Ok(all)
}

/// Returns an error that names the first element of which two results have different bits, or a result that is not a finite number.
fn same(what: &str, one: &Results, other: &Results) -> Result<(), String> {
    for ((name, one), (_, other)) in one.iter().zip(other) {
        if one.len() != other.len() || one.iter().all(|x| *x == 0.0) {
            return Err(format!("{what}, {name}: {} and {} elements, or zeros only", one.len(), other.len()));
        }
        if let Some(n) = (0..one.len()).find(|n| one[*n].to_bits() != other[*n].to_bits() || !one[*n].is_finite()) {
            return Err(format!("{what}, {name}, element {n}: {:e} alone, {:e} here", one[n], other[n]));
        }
    }
    Ok(())
}

/// Selects the rows of some queries from results of all queries.
fn rows(all: &Results, features: &Features, queries: i64, of: &Range<i64>) -> Results {
    let [heads, dim_v] = [features.heads[0], features.dims[1]];
    let cut = |values: &[f64], dim: i64| -> Vec<f64> {
        let of_head = |head: i64| &values[((head * queries + of.start) * dim) as usize..((head * queries + of.end) * dim) as usize];
        (0..heads).flat_map(of_head).copied().collect()
    };
    all.iter().take(2).map(|(name, values)| (*name, cut(values, if *name == "o" { dim_v } else { 1 }))).collect()
}

/// Returns the bits of each sequence's results alone, to compare other devices or numbers of threads.
///
/// # Errors
/// Returns the reason why an executor does not run a call.
pub fn bits_alone(executor: &dyn Executor, features: &Features) -> Result<Vec<u64>, String> {
    let mut bits = Vec::new();
    for sequence in features.sequences() {
        let entry = [Entry::whole(&sequence)];
        let all = results(executor, features, &entry, Container::Dense, features.gradients)?;
        bits.extend(all.iter().flatten().flat_map(|(_, values)| values).map(|x| x.to_bits()));
    }
    Ok(bits)
}

/// Compares each sequence alone with the same sequence in other calls. Returns the number of comparisons.
///
/// # Errors
/// Returns the first result with other bits, or the reason why an executor does not run a call.
pub fn compare(executor: &dyn Executor, features: &Features) -> Result<usize, String> {
    let sequences = features.sequences();
    let all: Vec<Entry<'_>> = sequences.iter().map(Entry::whole).collect();
    let gradients = features.gradients;
    let mut alone = Vec::new();
    for entry in &all {
        alone.extend(results(executor, features, std::slice::from_ref(entry), Container::Dense, gradients)?);
    }
    let mut compared = 0;
    for container in [Container::Padded(0), Container::Padded(37), Container::Packed, Container::Paged(16), Container::Paged(48)] {
        let gradients = gradients && !matches!(container, Container::Paged(_));
        for (n, here) in results(executor, features, &all, container, gradients)?.iter().enumerate() {
            let there = &alone[n][..here.len()].to_vec();
            same(&format!("sequence {n} in {container:?}"), there, here)?;
            compared += 1;
        }
    }
    for (n, entry) in all.iter().enumerate() {
        let copies = vec![entry.clone(); 9];
        for here in results(executor, features, &copies, Container::Dense, gradients)? {
            same(&format!("sequence {n} among copies"), &alone[n], &here)?;
            compared += 1;
        }
        if !features.from_the_end {
            continue;
        }
        // Chunks of a prefill, and single tokens.
        let behind = entry.keys - entry.queries.end;
        let ends = [1, 2, entry.queries.end / 3, entry.queries.end / 2, entry.queries.end - 1, entry.queries.end];
        let mut begin = 0;
        for end in ends.into_iter().filter(|end| *end <= entry.queries.end) {
            if end <= begin {
                continue;
            }
            let chunk = Entry { of: entry.of, queries: begin..end, keys: behind + end };
            let there = rows(&alone[n], features, entry.queries.end, &chunk.queries);
            for container in [Container::Dense, Container::Packed, Container::Paged(16)] {
                let beside = [chunk.clone(), all[0].clone()];
                let entries = if matches!(container, Container::Dense) { &beside[..1] } else { &beside[..] };
                let here = results(executor, features, entries, container, false)?;
                same(&format!("queries {begin} to {end} of sequence {n} in {container:?}"), &there, &here[0])?;
                compared += 1;
            }
            begin = end;
        }
    }
    Ok(compared)
}
