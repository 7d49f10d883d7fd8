//! Graphs of paged caches: containers lie in memory as the caller's strides say and are read as the graph's do, by a table that holds anything
//! behind the keys of an entry. What the kernel makes of such a table is for `tests/offline/pages.rs`.

use super::{CONSTANTS, Case, EXACT, NEW, Numbers, OLD, values_of};
use conformance::library::{Bound, Library};
use conformance::oracle::Closures;
use conformance::packing::{Laid, Packing};
use conformance::paging::{Cache, Paging};
use conformance::random::Random;
use cudnn_graph::encode::encode;
use sdpa::cudnn::lower::{self, Form};
use sdpa::{AttentionSpec, DType, Layout, SINK, ScoreMod, Shape, TensorSpec};
use std::collections::BTreeMap;

const MODS: [&[&str]; 6] = [&[], &["softcap:2"], &["alibi"], &["bias:hqk"], &["bias16:bk"], &["bias:bq", "softcap:2"]];

const MASKS: [&[&str]; 11] = [
    &[],
    &["causal"],
    &["causal-bottom-right"],
    &["window:3,1"],
    &["window:5,0:bottom-right"],
    &["prefix-lm:3"],
    &["dilated:2"],
    &["padding"],
    &["padding", "causal"],
    &["padding", "window:4,0:bottom-right"],
    &["padding", "dilated:2"],
];

/// Tokens of a page and the order of a container. One holds more tokens than any entry has.
const PAGES: [(i64, Layout); 8] = [
    (1, Layout::Bshd),
    (2, Layout::Bhsd),
    (7, Layout::Bshd),
    (16, Layout::Bhsd),
    (48, Layout::Bshd),
    (16, Layout::Bshd),
    (64, Layout::Bhsd),
    (2, Layout::Sbhd),
];

const SHAPES: [Shape; 4] = [
    Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 23, dim_qk: 8, dim_v: 16 },
    Shape { batch: 2, heads_q: 6, heads_kv: 1, seq_q: 1, seq_kv: 37, dim_qk: 16, dim_v: 8 },
    Shape { batch: 4, heads_q: 3, heads_kv: 3, seq_q: 4, seq_kv: 50, dim_qk: 8, dim_v: 8 },
    Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 6, dim_qk: 8, dim_v: 8 },
];

const LENGTHS_WITH_TRACES: &str = "lengths with a score_mod or a traced mask";
const UNEVEN: &str = "a power of two, or pages stored without gaps";

/// A problem in a cache.
struct Drawn {
    spec: AttentionSpec,
    library: Library,
    numbers: Numbers,
    params: Vec<(String, Vec<f64>)>,
    packing: Option<Packing>,
}

impl Drawn {
    fn new(shape: Shape, (page_size, layout): (i64, Layout), names: [&[&str]; 2], seed: u64) -> Drawn {
        let mut random = Random::new(seed);
        let [shared, spare] = [random.between(0, 1), random.between(0, 3)];
        let paging = Paging { page_size, layout, lengths_q: None, lengths_kv: None, in_order: false, shared, spare };
        Drawn::of(shape, &paging, None, names, seed.is_multiple_of(3), &mut random)
    }

    fn of(shape: Shape, paging: &Paging, packing: Option<Packing>, [mods, masks]: [&[&str]; 2], sink: bool, random: &mut Random) -> Drawn {
        let gap = random.pick(&[0, 0, 8]);
        let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats().with_row_max().with_sum_exp();
        spec.paged = Some(paging.paged(shape.batch, shape.seq_kv));
        spec.packed = packing.as_ref().map(|packing| packing.packed()).map(|packed| packed.with_totals(packed.total_q, None));
        for tensor in [&mut spec.k, &mut spec.v] {
            tensor.strides = paging.strides(tensor.dims, gap);
        }
        let [mods, masks] = [mods, masks].map(|names| names.iter().map(|&name| name.to_owned()).collect::<Vec<String>>());
        spec.score_mods = mods.iter().map(|text| text.parse::<ScoreMod>().unwrap()).collect();
        spec.masks = masks.iter().map(|text| text.parse().unwrap()).collect();
        spec.sink = sink;
        let extents = [shape.batch, shape.heads_q, shape.seq_q, shape.seq_kv];
        let mut library = Library::draw_paged(&mods, &masks, extents, paging, packing.as_ref(), random).unwrap();
        let sinks: Vec<f32> = (0..shape.heads_q).map(|_| random.normal() as f32).collect();
        let widened = sinks.iter().map(|&x| f64::from(x)).collect();
        let sinks = Bound { name: SINK, dims: [1, shape.heads_q, 1, 1], values: conformance::library::Values::F32(sinks), widened };
        library.bound.extend(spec.sink.then_some(sinks));
        let params = values_of(spec.validate().unwrap().params(), &library.bound);
        let mut numbers = Numbers::draw(&spec, random);
        let cache = library.cache().unwrap();
        share(&spec.k, cache, &mut numbers.k);
        share(&spec.v, cache, &mut numbers.v);
        Drawn { numbers, spec, library, params, packing }
    }

    fn case(&self, tolerance: f64) -> Case<'_> {
        let (spec, numbers, params) = (&self.spec, &self.numbers, &self.params);
        Case { spec, numbers, params, packing: self.packing.as_ref(), cache: self.library.cache(), tolerance }
    }
}

/// Keys of pages that several entries have are the same.
fn share(tensor: &TensorSpec, cache: &Cache, data: &mut [f64]) {
    let places = Laid::paged(tensor, cache).places();
    let memory: BTreeMap<usize, f64> = places.iter().zip(&*data).filter_map(|(place, x)| Some(((*place)?, *x))).collect();
    for (place, x) in places.iter().zip(data) {
        place.iter().for_each(|place| *x = memory[place]);
    }
}

#[test]
fn graphs_of_paged_caches_mean_keys_in_their_order() {
    let (mut failures, mut runs, mut unsupported) = (Vec::new(), 0, 0);
    for (n, mods) in MODS.iter().enumerate() {
        for (m, masks) in MASKS.iter().enumerate() {
            for (p, pages) in PAGES.into_iter().enumerate() {
                let shape = SHAPES[(n + m + p) % SHAPES.len()];
                let drawn = Drawn::new(shape, pages, [mods, masks], (n * 1000 + m * 10 + p) as u64);
                let case = drawn.case(if mods.contains(&"alibi") { CONSTANTS } else { EXACT });
                // The unified op counts lengths by itself, but beside nothing else than a band.
                let padded = masks.contains(&"padding");
                let refused = padded && (!mods.is_empty() || masks.contains(&"dilated:2"));
                drawn.library.with(&[], |closures| {
                    for (form, runtime) in [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)] {
                        let result = case.forward(closures, form, runtime);
                        if form == Form::Unified && refused {
                            unsupported += 1;
                            assert!(result.as_ref().is_err_and(|e| e.contains(LENGTHS_WITH_TRACES)), "{mods:?} {masks:?}: {result:?}");
                            continue;
                        }
                        runs += 1;
                        failures.extend(
                            result.err().map(|e| format!("{form} {runtime} of {mods:?} with {masks:?}, {pages:?}, {shape:?}: {e}")),
                        );
                    }
                });
            }
        }
    }
    assert!(failures.is_empty(), "{} of {runs}\n{}", failures.len(), failures[..failures.len().min(12)].join("\n"));
    assert!(runs > 1000 && unsupported > 100, "{runs} {unsupported}");
}

/// Runs one problem in both forms with other values of a parameter.
fn with_changed(drawn: &Drawn, name: &str, change: impl Fn(&mut Vec<f64>)) -> [Result<(), String>; 3] {
    let mut params = drawn.params.clone();
    change(&mut params.iter_mut().find(|(n, _)| n == name).unwrap().1);
    let case = Case { params: &params, ..drawn.case(EXACT) };
    let run = |closures: &Closures<'_>| {
        [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)].map(|(form, runtime)| case.forward(closures, form, runtime))
    };
    drawn.library.with(&[], run)
}

/// What a page holds is of the answer, and what is behind the keys is not; a length that is off by a key is found.
#[test]
fn a_page_that_is_another_is_found() {
    for (page_size, layout) in [(1, Layout::Bshd), (6, Layout::Bshd), (4, Layout::Bhsd)] {
        let (lengths_q, lengths_kv) = (Some(vec![5, 4, 5]), Some(vec![23, 9, 12]));
        let paging = Paging { page_size, layout, lengths_q, lengths_kv, in_order: false, shared: 0, spare: 1 };
        let drawn = Drawn::of(SHAPES[0], &paging, None, [&[], &["padding"]], false, &mut Random::new(2));
        let each = (23 + page_size - 1) / page_size;
        let holds = |results: [Result<(), String>; 3]| results.map(|result| result.is_ok());
        assert_eq!(holds(with_changed(&drawn, "page_table", |_| ())), [true; 3]);
        let second = |table: &mut Vec<f64>, key: i64, page: f64| table[(each + key / page_size) as usize] = page;
        // Behind the nine keys of the second entry.
        for page in [-1.0, 1e9, -2e9, 0.0] {
            assert_eq!(holds(with_changed(&drawn, "page_table", |table| second(table, 22, page))), [true; 3], "{page_size}");
        }
        for key in [0, 8] {
            let other = |table: &mut Vec<f64>| {
                let first = table[0];
                second(table, key, first);
            };
            assert_eq!(holds(with_changed(&drawn, "page_table", other)), [false; 3], "{page_size}, key {key}");
        }
        for by in [1.0, -1.0] {
            assert_eq!(holds(with_changed(&drawn, "seq_len_kv", |lengths| lengths[1] += by)), [false; 3], "{page_size}, {by}");
        }
    }
}

const PACKED_MASKS: [&[&str]; 6] =
    [&[], &["causal-ends"], &["causal"], &["window:4,0:ends"], &["window:6,2:ends", "dilated:2"], &["dilated:2"]];

/// Queries of sequences that decode beside chunks of prompts, and one query each.
#[test]
fn graphs_of_packed_queries_mean_those_of_their_sequences() {
    let (mut failures, mut runs) = (Vec::new(), 0);
    for (n, mods) in MODS.iter().enumerate() {
        for (m, masks) in PACKED_MASKS.iter().enumerate() {
            for (p, (page_size, layout)) in PAGES.into_iter().enumerate() {
                let shape = SHAPES[(n + m + p) % SHAPES.len()];
                let mut random = Random::new((n * 1000 + m * 10 + p) as u64);
                let mut lengths =
                    |most: i64| (0..shape.batch).map(|_| [0, 1, most, random.between(0, most)][random.between(0, 3) as usize]).collect();
                let (lengths_q, lengths_kv) = (lengths(shape.seq_q), Some(lengths(shape.seq_kv)));
                let packing =
                    Packing { lengths_q, lengths_kv, before: (1 + n % 3) as i64, slack: 0, unbounded: p % 2 == 0, wide: m % 2 == 0 };
                let paging = Paging { page_size, layout, lengths_q: None, lengths_kv: None, in_order: false, shared: 0, spare: 1 };
                let sink = n % 3 == 1 && shape.seq_q > 1;
                let drawn = Drawn::of(shape, &paging, Some(packing), [mods, masks], sink, &mut random);
                let case = drawn.case(if mods.contains(&"alibi") { CONSTANTS } else { EXACT });
                drawn.library.with(&[], |closures| {
                    for (form, runtime) in [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)] {
                        let result = case.forward(closures, form, runtime);
                        if result.as_ref().is_err_and(|e| form == Form::Unified && e.contains(LENGTHS_WITH_TRACES)) {
                            continue;
                        }
                        runs += 1;
                        failures.extend(
                            result
                                .err()
                                .map(|e| format!("{form} {runtime} of {mods:?} with {masks:?}, {page_size} {layout:?}, {shape:?}: {e}")),
                        );
                    }
                });
            }
        }
    }
    assert!(failures.is_empty(), "{} of {runs}\n{}", failures.len(), failures[..failures.len().min(12)].join("\n"));
    assert!(runs > 600, "{runs}");
}

/// Where a page of several parts is no more than one behind the other, neither form has it.
#[test]
fn odd_pages_in_pieces_are_unsupported() {
    for layout in [Layout::Bhsd, Layout::Sbhd] {
        for (page_size, taken) in [(7, false), (48, false), (1, true), (16, true)] {
            let drawn = Drawn::new(SHAPES[0], (page_size, layout), [&[], &["causal"]], 5);
            let results = with_changed(&drawn, "page_table", |_| ());
            for result in results {
                assert_eq!(result.is_ok(), taken, "{page_size} {layout:?}: {result:?}");
                assert!(result.err().is_none_or(|e| e.contains(UNEVEN)), "{page_size} {layout:?}");
            }
        }
    }
    // Even one page that is by itself.
    let alone = Drawn::new(Shape { heads_q: 1, heads_kv: 1, ..SHAPES[3] }, (7, Layout::Bhsd), [&[], &[]], 4);
    assert!(with_changed(&alone, "page_table", |_| ()).iter().all(Result::is_ok));
}

/// The softmax inside of the unified op is of all keys: as many as the score has, else as the table reaches; a container says nothing of it.
#[test]
fn the_softmax_that_stats_come_from_is_of_all_keys() {
    for (masks, keys) in [(&[][..], 38), (&["causal"][..], 37)] {
        let drawn = Drawn::new(SHAPES[1], (2, Layout::Bshd), [&[], masks], 1);
        let lowered = lower::lower(&drawn.spec.validate().unwrap().into(), Form::Unified, NEW).unwrap();
        let program = serde_json::to_string(&encode(&lowered.graph, NEW).unwrap()).unwrap();
        let has = |keys: i64| program.contains(&format!("[2,6,1,{keys}]"));
        assert!(has(keys) && !has(2), "{masks:?}: {program}");
    }
}
