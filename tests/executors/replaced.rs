//! No wrong result passes: each result of each case, replaced in turn by what is wrong, as `runner/replaced.rs` does it.

use conformance::case::Case;
use conformance::random::Random;
use conformance::runner::{
    Draw, Replaced, Source, random_backward, random_fp8, random_fp8_gradients, random_spec, replaced, replaced_backward,
    replaced_backward_case, replaced_case,
};
use conformance::share::{DAYS, features, of_today, seeds_of_today};
use sdpa::cpu::CpuExecutor;
use sdpa::{DType, ExecutorName};

/// Passes whose right results are undecided, and why no other input of the same kind is decided.
const UNDECIDED: [(&str, &str); 10] = [
    ("forward::block_scale_decode", "weights without a scale are below the smallest number of E4M3, and each head has one row"),
    ("forward::fp8_e5m2", "two bits behind the point: a row alone may be off by its norm"),
    ("backward::fp8_e5m2, chained", "two bits behind the point"),
    ("backward::fp8_alibi, chained", "two bits behind the point, and few keys that have weight"),
    ("backward::fp8_long_rows", "tensor cores cut sums over 5000 keys off in one direction"),
    ("backward::large_scores_f32", "one key has all of the weight of most rows: dP − δ cancels"),
    ("backward::one_query_scores_of_minus_200_128_keys, chained", "an error of δ is multiplied by the mean of the keys, which is large"),
    ("backward::alibi-slopes_dilated3", "one key has most of the weight: dP − δ nearly cancels"),
    ("backward::alibi-slopes, dims 256 and 256, chained", "distances weigh the errors of δ, and the sum nearly cancels"),
    ("backward::alibi-slopes, dims 256 and 64", "distances weigh the errors of δ, and the sum nearly cancels"),
];

type Run = Box<dyn FnOnce(&CpuExecutor) -> Result<Replaced, String> + Send>;

/// A pass whose results are replaced.
pub(crate) struct Entry {
    /// Of its test.
    pub(crate) name: String,
    /// Its operands were not chosen, so that a tile of a gradient may be small by chance.
    random: bool,
    run: Run,
}

impl Entry {
    /// What the check says. Replacements that pass are errors, and so is a right result that is undecided and not listed.
    pub(crate) fn look(self) -> Result<Replaced, String> {
        let replaced = (self.run)(&CpuExecutor::default())?;
        let listed = UNDECIDED.iter().any(|(name, _)| *name == self.name);
        match &replaced.undecided {
            _ if !replaced.wrong.is_empty() => Err(replaced.wrong.join("; ")),
            Some(told) if !listed && !self.random => Err(format!("the right result is undecided: {told}")),
            None if listed => Err("it is decided, and listed as undecided".to_owned()),
            Some(_) | None => Ok(replaced),
        }
    }
}

fn forward(case: Case) -> Entry {
    Entry { name: format!("forward::{}", case.name), random: false, run: Box::new(move |cpu| replaced_case(&case, cpu)) }
}

fn backward(case: Case) -> Entry {
    // Which of the two hangs on the name, so that both kinds are there.
    let source = Source::ALL[case.seed() as usize % 2];
    let name = format!("backward::{}{}", case.name, source.suffix());
    Entry { name, random: false, run: Box::new(move |cpu| replaced_backward_case(&case, source, cpu)) }
}

/// A random problem, and its gradient.
fn random(seed: u64) -> [Entry; 2] {
    let mut random = Random::new(seed * 7919 + 5);
    let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
    let narrow = seed.is_multiple_of(8);
    let dtypes = [DType::F16, DType::BF16, DType::F32];
    let spec = if narrow { random_fp8(&mut random) } else { random_spec(&mut random, &dtypes).with_stats() };
    let of_gradient = if narrow { random_fp8_gradients(spec.clone(), &mut random) } else { random_backward(&mut random, &dtypes) };
    let source = Source::ALL[(seed % 2) as usize];
    [
        Entry { name: format!("forward::seed {seed}"), random: true, run: Box::new(move |cpu| replaced(&spec, &draw, None, cpu)) },
        Entry {
            name: format!("backward::seed {seed}"),
            random: true,
            run: Box::new(move |cpu| replaced_backward(&of_gradient, &draw, None, source, cpu)),
        },
    ]
}

/// A share of all cases that the CPU executor computes, of the sweeps and of random problems.
pub(crate) fn entries() -> Vec<Entry> {
    let both = [
        Case::all_library(),
        Case::all_packed(),
        Case::all_ends(),
        Case::all_sinks(),
        Case::all_dropout(),
        Case::all_fp8(),
        Case::all_tables(),
        Case::all_functions(),
        Case::axes(),
        Case::scales(),
        Case::wide_parameters(),
        Case::edges(33),
    ];
    let both: Vec<Case> = both.into_iter().flat_map(Result::unwrap).collect();
    let alone = [Case::all(), Case::all_paged(), Case::all_statistics(), Case::all_block_scaled(), Case::all_few()];
    let alone = alone.into_iter().flat_map(Result::unwrap);
    let computes = |case: &Case| !case.skip.contains_key(ExecutorName::CPU.name());
    let of_forward: Vec<Case> = alone.chain(both.clone()).filter(computes).collect();
    let of_backward: Vec<Case> = Case::all_backward().unwrap().into_iter().chain(both).filter(computes).collect();
    let forward = of_today("replaced results, forward", DAYS, of_forward, features).into_iter().map(forward);
    let backward = of_today("replaced results, backward", DAYS, of_backward, features).into_iter().map(backward);
    let random = seeds_of_today("of replaced results", 60).into_iter().flat_map(random);
    forward.chain(backward).chain(random).collect()
}
