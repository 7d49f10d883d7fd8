//! Metal kernels, emulated, against the oracle.

mod boundaries;
mod dropped;
mod faults;
mod functions;
mod generated;
mod large;
mod nvidia;
mod pages;
mod sink;
mod sources;
mod statistics;

use conformance::case::Case;
use conformance::covering::{Problem, Strength};
use conformance::msl::table;
use conformance::msl::{Check, Emulated, Row, Toolchain};
use conformance::random::Random;
use conformance::runner::{
    Draw, Outcome, Source, Tally, edges, random_backward, random_ends, random_packed, random_padded, random_paged, random_spec, rounding,
    run, run_backward, run_backward_case, run_case, run_covered, side_by_side,
};
use conformance::say::{say, skip};
use conformance::share::{DAYS, Share, features, new_seeds, of_today, on_request, one_of_today, seeds_of_today};
use metal_fallback::Kernels;
use sdpa::metal::MetalExecutor;
use sdpa::{AttentionSpec, BackwardSpec, DType, Executor, Layout, SINK, StatsBase, TensorSpec};
use std::sync::Mutex;

const NAME: &str = "metal-emulated";

/// Days until every problem of the covering has been run.
const COVERING_DAYS: u64 = 3;

fn emulation(what: &str) -> Option<Toolchain> {
    Toolchain::find().map_err(|why| skip("msl", &format!("{what}: {why}"))).ok()
}

/// A case, and the kernels that it is given to where those are not the planner's choice.
type Forced = (Case, Option<Kernels>);

fn all_wanted() -> bool {
    std::env::var("SDPA_MSL").is_ok_and(|what| what == "all")
}

/// The share of the product that is wanted instead of the covering table.
fn share() -> Option<Share> {
    let what = std::env::var("SDPA_MSL").ok()?;
    Some(Share::parse(&what).unwrap_or_else(|why| panic!("SDPA_MSL={why}")))
}

/// Cases on the kernels that the planner takes; with few queries, which all kernels are for, on all of them, and so every case where
/// everything is wanted.
fn planned_and_forced(cases: Vec<Case>, kernels: &[Kernels]) -> Vec<Forced> {
    let few = |case: &Case| all_wanted() || case.shape.seq_q <= 8;
    let forced = |case: &Case| kernels.iter().filter(|_| few(case)).map(|k| (case.clone(), Some(*k))).collect::<Vec<_>>();
    cases.iter().flat_map(|case| if few(case) { forced(case) } else { vec![(case.clone(), None)] }).collect()
}

/// The same with one kernel for each case of few queries, in turn: a table has all that two of them have in common.
fn planned_and_in_turn(cases: Vec<Case>, kernels: &[Kernels]) -> Vec<Forced> {
    if all_wanted() {
        return planned_and_forced(cases, kernels);
    }
    let kernel = |n: usize, case: &Case| (case.shape.seq_q <= 8).then(|| kernels[n % kernels.len()]);
    cases.into_iter().enumerate().map(|(n, case)| (case.clone(), kernel(n, &case))).collect()
}

fn emulated(toolchain: &Toolchain, (case, kernels): &Forced) -> MetalExecutor {
    let executor = Emulated::new(toolchain.clone(), case.seed()).executor();
    kernels.map_or(executor.clone(), |kernels| executor.with_kernels(kernels))
}

fn name((case, kernels): &Forced) -> String {
    kernels.map_or(case.name.clone(), |kernels| format!("{}, {kernels:?}", case.name))
}

/// Hand-written cases that `SDPA_SHARE` or `SDPA_MSL` asks for: the covering replaces them in a daily run.
fn requested(what: &str, cases: Vec<Forced>) -> Vec<Forced> {
    if share().is_some() { cases } else { on_request(&format!("{what} {NAME}"), cases) }
}

/// The share of a sweep for today: each kernel, type, mask and option every day. All of it where a share of the product is wanted.
fn swept(what: &str, cases: Vec<Forced>) -> Vec<Forced> {
    if share().is_some() {
        return cases;
    }
    let has = |(case, kernels): &Forced| [features(case), vec![format!("{kernels:?}")]].concat();
    of_today(&format!("{what} {NAME}"), 2 * DAYS, cases, has)
}

/// Runs the hand-written cases that are asked for, except for limits that the kernels document.
fn run_all(what: &str, cases: Vec<Forced>) {
    let Some(toolchain) = emulation(&format!("{} {what} cases", cases.len())) else { return };
    let cases = requested(what, cases);
    if !cases.is_empty() {
        run_all_with(what, &cases, &toolchain);
    }
}

fn run_all_with(what: &str, cases: &[Forced], toolchain: &Toolchain) {
    let tally = Mutex::new(Tally::default());
    side_by_side(cases, |forced| {
        let (case, emulated) = (&forced.0, emulated(toolchain, forced));
        let unsupported = || case.spec().unwrap().validate().is_ok_and(|problem| emulated.supports(&problem).is_err());
        let outcome: Outcome = run_case(case, &emulated).skip_only_if(unsupported, || case.repro(emulated.name()));
        tally.lock().unwrap().add(NAME, &name(forced), &outcome);
    });
    judge(what, tally);
}

/// The same of backward passes, alone and chained to the kernels' own forward pass.
fn run_all_backward(what: &str, cases: Vec<Forced>, sources: &[Source]) {
    let Some(toolchain) = emulation(&format!("{} {what} cases", cases.len())) else { return };
    let cases = requested(what, cases);
    if !cases.is_empty() {
        run_all_backward_with(what, &cases, sources, &toolchain);
    }
}

fn run_all_backward_with(what: &str, cases: &[Forced], sources: &[Source], toolchain: &Toolchain) {
    let tally = Mutex::new(Tally::default());
    let runs: Vec<(&Forced, Source)> = cases.iter().flat_map(|case| sources.iter().map(move |source| (case, *source))).collect();
    side_by_side(&runs, |&(forced, source)| {
        let (case, emulated) = (&forced.0, emulated(toolchain, forced));
        let unsupported = || {
            let problem = case.backward_spec().unwrap().validate();
            problem.is_ok_and(|problem| emulated.supports_backward(&problem).is_err())
        };
        let outcome = run_backward_case(case, source, &emulated).skip_only_if(unsupported, || case.backward_repro(emulated.name()));
        tally.lock().unwrap().add(NAME, &format!("{}{}", name(forced), source.suffix()), &outcome);
    });
    judge(what, tally);
}

fn judge(what: &str, tally: Mutex<Tally>) {
    let tally = tally.into_inner().unwrap();
    say(&format!("{what} {}", tally.summary(NAME)));
    assert_eq!(tally.failed, 0, "cases failed");
    assert!(tally.passed > 0, "no case ran");
}

/// Kernels of a backward pass.
const BACKWARD_KERNELS: [Kernels; 2] = [Kernels::Tiled, Kernels::Vector];

fn sinks() -> Vec<Case> {
    Case::all_sinks().unwrap()
}

fn ends() -> Vec<Case> {
    Case::all_ends().unwrap()
}

fn packed() -> Vec<Case> {
    Case::all_packed().unwrap()
}

/// The kernels have no packed queries beside pages.
fn paged() -> Vec<Case> {
    Case::all_paged().unwrap().into_iter().filter(|case| case.packed.is_none()).collect()
}

fn of_rows() -> Vec<Case> {
    let natural = |case: &Case| case.stats_base == StatsBase::Natural;
    Case::all_statistics().unwrap().into_iter().filter(natural).collect()
}

fn dropout() -> Vec<Case> {
    Case::all_dropout().unwrap()
}

/// Sinks, windows about the ends, packed documents, dropout and row statistics on every kernel.
fn option_rows() -> Vec<Row> {
    let forced = |case: Case| Kernels::ALL.map(|kernels| Row { case: case.clone(), kernels });
    [sinks(), ends(), packed(), dropout(), of_rows(), paged()].concat().into_iter().flat_map(forced).collect()
}

#[test]
fn forward_cases() {
    run_all("forward", planned_and_forced(Case::all().unwrap(), &Kernels::ALL));
    run_all("sinks", planned_and_forced(sinks(), &Kernels::ALL));
    run_all("ends", sweep(Ok(ends()), &Kernels::ALL));
}

/// Runs problems in which any two features meet: with few queries on each kernel in turn, else on those that the planner chooses.
#[test]
fn any_two_features_meet() {
    let Some(toolchain) = emulation("the covering") else { return };
    let problems = Strength::Two.problems_for(&Emulated::new(toolchain.clone(), 0).executor()).unwrap();
    let in_turn = |(n, problem): (usize, Problem)| {
        let kernels: &[Kernels] = if problem.source.is_none() { &Kernels::ALL } else { &BACKWARD_KERNELS };
        // Neighbours run on different days: those of one day must not all have the same kernel.
        let kernels = kernels[n / COVERING_DAYS as usize % kernels.len()];
        let forced = (problem.case.clone(), (problem.case.shape.seq_q <= 8).then_some(kernels));
        let forced = if problem.is_supported(&emulated(&toolchain, &forced)) { forced } else { (forced.0, None) };
        (problem, forced)
    };
    let problems = problems.into_iter().enumerate().map(in_turn).collect();
    let problems: Vec<(Problem, Forced)> = of_today(&format!("covering {NAME}"), COVERING_DAYS, problems, |_| Vec::new());
    let tally = Mutex::new(Tally::default());
    side_by_side(&problems, |(problem, forced)| run_covered(problem, NAME, &emulated(&toolchain, forced), &tally));
    judge("covering", tally);
}

#[test]
fn table_cases() {
    run_all("tables", sweep(Case::all_tables(), &Kernels::ALL));
    run_all_backward("tables backward", sweep(Case::all_tables(), &BACKWARD_KERNELS), &[Source::Oracle]);
}

#[test]
fn packed_cases() {
    run_all("packed", sweep(Ok(packed()), &Kernels::ALL));
    run_all_backward("packed backward", planned_and_forced(packed(), &BACKWARD_KERNELS), &Source::ALL);
    run_all_backward("packed backward", sweep(Ok(packed()), &[Kernels::Vector]), &[Source::Oracle]);
}

#[test]
fn paged_cases() {
    run_all("paged", planned_and_forced(paged(), &Kernels::ALL));
}

#[test]
fn statistics_cases() {
    run_all("statistics", planned_and_forced(of_rows(), &Kernels::ALL));
}

#[test]
fn dropout_cases() {
    run_all("dropout", sweep(Ok(dropout()), &Kernels::ALL));
    run_all_backward("dropout backward", planned_and_forced(dropout(), &BACKWARD_KERNELS), &Source::ALL);
}

#[test]
fn score_mod_cases() {
    let all: Vec<Case> = [Case::all_library(), Case::all_functions()].into_iter().flat_map(Result::unwrap).collect();
    run_all("score_mod", planned_and_in_turn(all, &Kernels::ALL));
}

#[test]
fn backward_cases() {
    run_all_backward("backward", planned_and_forced(Case::all_backward().unwrap(), &BACKWARD_KERNELS), &Source::ALL);
    run_all_backward("sinks backward", planned_and_forced(sinks(), &BACKWARD_KERNELS), &Source::ALL);
    run_all_backward("ends backward", planned_and_forced(ends(), &BACKWARD_KERNELS), &Source::ALL);
}

#[test]
fn backward_score_mod_cases() {
    // What a forward pass leaves is the same kind of numbers with and without score_mods.
    let sources: &[Source] = if all_wanted() { &Source::ALL } else { &[Source::Oracle] };
    run_all_backward("backward score_mod", planned_and_in_turn(Case::all_library().unwrap(), &BACKWARD_KERNELS), sources);
}

/// Every kernel on problems that are a step from one another.
fn sweep(cases: Result<Vec<Case>, String>, kernels: &[Kernels]) -> Vec<Forced> {
    cases.unwrap().iter().flat_map(|case| kernels.iter().map(move |k| (case.clone(), Some(*k)))).collect()
}

/// Longer than a block of a kernel.
const BLOCK: i64 = 33;

/// Bands, prefixes and lengths that end at every offset in a block: the covering has each mask with one size.
#[test]
fn edges_of_blocks() {
    let Some(toolchain) = emulation("edges") else { return };
    run_all_with("edges", &swept("edges", sweep(Case::edges(BLOCK), &Kernels::ALL)), &toolchain);
    let backward = swept("edges backward", sweep(Case::edges(BLOCK), &BACKWARD_KERNELS));
    run_all_backward_with("edges backward", &backward, &[Source::Oracle], &toolchain);
}

#[test]
fn scales_and_axes() {
    run_all("scales", sweep(Case::scales(), &Kernels::ALL));
    run_all_backward("scales backward", sweep(Case::scales(), &BACKWARD_KERNELS), &[Source::Oracle]);
    run_all_backward("axes", sweep(Case::axes(), &[Kernels::Tiled]), &[Source::Oracle]);
}

#[test]
fn results_are_rounded_to_the_nearest() {
    let Some(toolchain) = emulation("rounding") else { return };
    for kernels in Kernels::ALL {
        let emulated = Emulated::new(toolchain.clone(), 1).forced(kernels).executor();
        rounding(&emulated).unwrap_or_else(|e| panic!("{kernels:?}: {e}"));
    }
}

#[test]
fn rules_of_floats_end_where_they_are_written_to() {
    let Some(toolchain) = emulation("rules of floats") else { return };
    edges(&Emulated::new(toolchain, 1).executor(), NAME, &seeds_of_today(&format!("edges {NAME}"), 36));
}

fn table_rows(all: bool) -> Vec<Row> {
    table::rows(all).unwrap()
}

fn forced(rows: impl IntoIterator<Item = Row>) -> Vec<Forced> {
    rows.into_iter().map(|row| (row.case, Some(row.kernels))).collect()
}

/// The covering table, or the share of the product that is wanted. A backward pass has no parts: in the product those rows are those of
/// the vector kernels.
fn wanted_rows(backward: bool) -> Vec<Forced> {
    match share() {
        None => forced(table_rows(false)),
        Some(share) => {
            let rows = table_rows(true).into_iter().filter(|row| !backward || row.kernels != Kernels::Parts);
            forced(share.take(rows))
        }
    }
}

/// Every type, dim, mask, score_mod and kernel; any two meet, or with `SDPA_MSL=all` all of them, or with `SDPA_MSL=3/40` the
/// third of forty shares.
#[test]
fn table_of_types_dims_masks_and_score_mods() {
    run_all("table", wanted_rows(false));
}

#[test]
fn backward_table_of_types_dims_masks_and_score_mods() {
    run_all_backward("backward table", wanted_rows(true), &[Source::Oracle]);
}

/// Days until one sanitizer has seen every row of the covering table, and every option on every kernel. Not a multiple of the number of sanitizers, so
/// that each of them sees every share. A share of the product that is wanted is checked whole, by all of them.
const SLOW_DAYS: u64 = 25;

/// A row with few KV heads where it has many scores: threads of different heads run the same code in other threadgroups, and one problem of
/// 42 heads took 55 s with the check for races.
fn of_few_heads(mut row: Row) -> Row {
    let shape = &mut row.case.shape;
    if shape.batch * shape.heads_q * shape.seq_q * shape.seq_kv > 12_000 {
        let group = shape.heads_q / shape.heads_kv;
        shape.heads_kv = if group > 1 { 1 } else { shape.heads_kv.min(2) };
        shape.heads_q = group * shape.heads_kv;
    }
    row
}

#[test]
fn sanitizers_find_nothing() {
    let rows = |backward| {
        let all = wanted_rows(backward);
        if share().is_some() {
            return all;
        }
        // Of few and of many queries; the long ones take minutes.
        let short = |row: &Row| row.case.shape.seq_q * row.case.shape.seq_kv < 8_000;
        let with_options = forced(option_rows().into_iter().filter(short).map(of_few_heads));
        let with_options = with_options.into_iter().filter(|(case, _)| !backward || case.paged.is_none());
        let what = format!("{} under sanitizers {NAME}", if backward { "backward" } else { "forward" });
        of_today(&what, SLOW_DAYS, all.into_iter().chain(with_options).collect(), |(_, kernels)| vec![format!("{kernels:?}")])
    };
    let [forward, backward] = [rows(false), rows(true)];
    let Some(toolchain) = emulation(&format!("{} cases with sanitizers", forward.len())) else { return };
    let checks = if share().is_some() { Check::SANITIZERS.to_vec() } else { one_of_today("sanitizer", &Check::SANITIZERS) };
    for check in checks {
        run_all_with(&format!("{check:?}"), &forward, &toolchain.with(check));
        run_all_backward_with(&format!("{check:?} backward"), &backward, &[Source::Oracle], &toolchain.with(check));
    }
}

/// The same attention of few queries to many keys: enough for parts in most.
fn few_queries(mut spec: AttentionSpec, random: &mut Random) -> AttentionSpec {
    let (seq_q, seq_kv) = (random.between(1, 8), random.between(600, 1800));
    let resize = |tensor: &mut TensorSpec, seq: i64| {
        let [batch, heads, _, dim] = tensor.dims;
        *tensor = TensorSpec::dense([batch, heads, seq, dim], Layout::Bshd);
    };
    [&mut spec.q, &mut spec.o].into_iter().for_each(|tensor| resize(tensor, seq_q));
    [&mut spec.k, &mut spec.v].into_iter().for_each(|tensor| resize(tensor, seq_kv));
    spec
}

/// The gradient of an attention, that of its sink too if it has one.
fn backward_of(spec: &AttentionSpec) -> BackwardSpec {
    if spec.sink { spec.backward().wrt(SINK, DType::F32) } else { spec.backward() }
}

/// Random strides, lengths, heads, masks, windows about the ends, sinks, dropout, pages and packed documents.
#[test]
fn random_problems() {
    let Some(toolchain) = emulation("random problems") else { return };
    let tally = Mutex::new(Tally::default());
    let seeds = new_seeds(NAME, 6);
    side_by_side(&seeds, |&seed| {
        let mut random = Random::new(seed);
        let emulated = Emulated::new(toolchain.clone(), seed).executor();
        let dtypes = [DType::F32, DType::F16, DType::BF16];
        let name = format!("SDPA_SEED={seed}");
        let outcome = run(&random_spec(&mut random, &dtypes), None, 1.0, seed, &emulated);
        tally.lock().unwrap().add(NAME, &name, &outcome);
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        let outcome = run_backward(&random_backward(&mut random, &dtypes), &draw, Source::Oracle, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, backward"), &outcome);
        let few = few_queries(random_padded(&mut random, &dtypes), &mut random);
        let outcome = run(&few, None, 1.0, seed, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, few queries"), &outcome);
        let outcome = run_backward(&backward_of(&few), &draw, Source::Oracle, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, few queries, backward"), &outcome);
        let mut ends = random_ends(&mut random, &dtypes);
        if seed % 2 == 0 {
            ends = few_queries(ends, &mut random);
        }
        let outcome = run(&ends, None, 1.0, seed, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, ends"), &outcome);
        let outcome = run_backward(&backward_of(&ends), &draw, Source::Oracle, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, ends, backward"), &outcome);
        let emulated = emulated.with_kernels(Kernels::ALL[seed as usize % Kernels::ALL.len()]);
        let mut pages = random_paged(&mut random, &dtypes);
        if pages.packed.take().is_some() {
            [pages.q, pages.o] = [pages.q, pages.o].map(|tensor| TensorSpec::dense(tensor.dims, Layout::Bshd));
        }
        let outcome = run(&pages, None, 1.0, seed, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, paged"), &outcome);
        let documents = random_packed(&mut random, &dtypes);
        let outcome = run(&documents, None, 1.0, seed, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, packed"), &outcome);
        let outcome = run_backward(&backward_of(&documents), &draw, Source::Oracle, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, packed, backward"), &outcome);
    });
    judge("random", tally);
}
