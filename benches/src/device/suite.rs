//! Every case, and random specifications, against the oracle.

use crate::setup::{Result, executor};
use conformance::runner::{self, Draw, Outcome, Source, Tally};
use conformance::{Case, random::Random};
use sdpa::cudnn::lower::Form;
use sdpa::cudnn::{CudnnExecutor, Pieces, PlanOptions};
use sdpa::{AttentionSpec, DType};

pub(crate) fn run(random: u64) -> Result<()> {
    let first = executor(PlanOptions::default())?;
    let mut failed = 0;
    let mut forms = vec![None];
    if first.library().version() >= sdpa::cudnn::lower::UNIFIED_PLAIN_SINCE {
        forms.push(Some(Form::Unified));
    }
    for form in forms {
        let executor = executor(PlanOptions { form, ..PlanOptions::default() })?;
        let label = form.map_or("cudnn", Form::name);
        let mut cases = Tally::default();
        for case in Case::all()? {
            cases.add(label, &case.name, &runner::run_case(&case, &executor));
        }
        let mut others = Tally::default();
        for seed in 0..random {
            let mut stream = Random::new(seed * 7919 + 13);
            let spec = runner::random_spec(&mut stream, &[DType::BF16, DType::F16]);
            let outcome = runner::run(&spec, None, 1.0, seed, &executor);
            if matches!(outcome, Outcome::Fail(_)) {
                println!("{spec:?}");
            }
            others.add(label, &format!("random {seed}"), &outcome);
        }
        println!("{}", cases.summary(&format!("{label}, cases")));
        println!("{}", others.summary(&format!("{label}, random")));
        failed += cases.failed + others.failed;
        let [cases, others] = runner::backward_suite(label, random, &executor)?;
        println!("{}", cases.summary(&format!("{label}, backward cases")));
        println!("{}", others.summary(&format!("{label}, backward random")));
        failed += cases.failed + others.failed;
        if form.is_none() {
            for part in Part::ALL {
                failed += part.run(label, random, form)?;
            }
        }
        failed += score_mods(label, random, &executor)?;
        println!("{label}, cache: {:?}", executor.cache_stats());
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// Cases of their own, and random problems.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    /// Packed documents.
    Packed,
    /// Paged caches: there is no backward pass.
    Paged,
    /// Sinks.
    Sinks,
    /// Windows about the ends of entries.
    Ends,
    /// Dropout.
    Dropout,
    /// Masks that are unions of bands, band by band.
    Pieces,
    /// 8-bit floats.
    Fp8,
}

impl Part {
    pub(crate) const ALL: [Part; 7] = [Part::Packed, Part::Paged, Part::Sinks, Part::Ends, Part::Dropout, Part::Pieces, Part::Fp8];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Part::Packed => "packed",
            Part::Paged => "paged",
            Part::Sinks => "sinks",
            Part::Ends => "ends",
            Part::Dropout => "dropout",
            Part::Pieces => "pieces",
            Part::Fp8 => "fp8",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Part> {
        Part::ALL.into_iter().find(|part| part.name() == name)
    }

    fn cases(self) -> std::result::Result<Vec<Case>, String> {
        match self {
            Part::Packed => Case::all_packed(),
            Part::Paged => Case::all_paged(),
            Part::Sinks => Case::all_sinks(),
            Part::Ends => Case::all_ends(),
            Part::Dropout => Case::all_dropout(),
            Part::Pieces => {
                let several = |case: &Case| {
                    let problem = case.spec().ok()?.validate().ok()?;
                    problem.kept().pieces(problem.extents()).filter(|pieces| pieces.len() > 1)
                };
                Ok(Case::all_library()?.into_iter().filter(|case| several(case).is_some()).collect())
            }
            Part::Fp8 => Case::all_fp8(),
        }
    }

    fn draw(self, random: &mut Random) -> AttentionSpec {
        let narrow = [DType::BF16, DType::F16];
        match self {
            Part::Packed => runner::random_packed(random, &narrow),
            Part::Paged => runner::random_paged(random, &narrow),
            Part::Sinks => runner::random_padded(random, &narrow).with_sink(),
            Part::Ends => runner::random_ends(random, &narrow),
            Part::Pieces => runner::random_pieces(random, &narrow),
            Part::Fp8 => runner::random_fp8(random),
            Part::Dropout => runner::random_spec(random, &narrow).with_dropout(random.pick(&[0.003, 0.1, 0.5, 0.9])),
        }
    }

    /// What plans of it look like.
    fn options(self, form: Option<Form>) -> PlanOptions {
        let pieces = match self {
            Part::Pieces => Pieces::Always,
            Part::Packed | Part::Paged | Part::Sinks | Part::Ends | Part::Dropout | Part::Fp8 => Pieces::Auto,
        };
        PlanOptions { form, pieces, ..PlanOptions::default() }
    }

    /// Both passes of every case and of random problems; how many failed.
    fn run(self, label: &str, random: u64, form: Option<Form>) -> Result<usize> {
        let executor = &executor(self.options(form))?;
        let (mut cases, mut others) = (Tally::default(), Tally::default());
        let trains = !matches!(self, Part::Paged);
        let name = self.name();
        for case in self.cases()? {
            cases.add(label, &case.name, &runner::run_case(&case, executor));
            for source in Source::ALL.into_iter().filter(|_| trains) {
                let outcome = runner::run_backward_case(&case, source, executor);
                cases.add(label, &format!("{}{}, backward", case.name, source.suffix()), &outcome);
            }
        }
        for seed in 0..random {
            let mut stream = Random::new(seed * 7919 + 29);
            let spec = self.draw(&mut stream);
            let outcome = runner::run(&spec, None, 1.0, seed, executor);
            if matches!(outcome, Outcome::Fail(_)) {
                println!("{spec:?}");
            }
            others.add(label, &format!("{name} {seed}"), &outcome);
            if trains {
                let source = if seed % 2 == 0 { Source::Oracle } else { Source::Executor };
                let backward = match self {
                    Part::Fp8 => runner::random_fp8_gradients(spec, &mut stream),
                    Part::Pieces => spec.backward(),
                    Part::Packed | Part::Paged | Part::Sinks | Part::Ends | Part::Dropout => runner::gradients_elsewhere(spec, &mut stream),
                };
                let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
                let outcome = runner::run_backward(&backward, &draw, source, executor);
                others.add(label, &format!("{name} backward {seed}{}", source.suffix()), &outcome);
            }
        }
        if matches!(self, Part::Dropout) {
            match runner::stays(executor) {
                Ok(bits) => println!("{label}, {bits:?}: each as the generator says"),
                Err(e) => {
                    println!("FAIL {label} bits of dropout: {e}");
                    cases.failed += 1;
                }
            }
        }
        println!("{}", cases.summary(&format!("{label}, {name} cases")));
        println!("{}", others.summary(&format!("{label}, {name} random")));
        Ok(cases.failed + others.failed)
    }
}

/// One part alone, in every form that a runtime may be asked for.
pub(crate) fn part(part: Part, random: u64) -> Result<()> {
    let mut failed = 0;
    // The other form drops no weights, and is not asked for 8-bit floats.
    let forms: &[Option<Form>] = if matches!(part, Part::Dropout | Part::Fp8) { &[None] } else { &[None, Some(Form::Unified)] };
    for &form in forms {
        let label = form.map_or("cudnn", Form::name);
        failed += part.run(label, random, form)?;
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// Score_mods and masks of the library, and random ones; how many failed.
fn score_mods(label: &str, random: u64, executor: &CudnnExecutor) -> Result<usize> {
    let [forward, backward] = runner::library_suite(label, executor)?;
    println!("{}", forward.summary(&format!("{label}, score_mods")));
    println!("{}", backward.summary(&format!("{label}, score_mods backward")));
    let (mut first, mut second) = (Tally::default(), Tally::default());
    for seed in 0..random {
        let tree = runner::run_tree(seed, &[DType::BF16, DType::F16], executor)?;
        if matches!(tree.forward, Outcome::Fail(_)) || matches!(tree.backward, Outcome::Fail(_)) {
            println!("{}", tree.text);
        }
        first.add(label, &format!("tree {seed}"), &tree.forward);
        second.add(label, &format!("tree backward {seed}"), &tree.backward);
    }
    println!("{}", first.summary(&format!("{label}, random score_mods")));
    println!("{}", second.summary(&format!("{label}, random score_mods backward")));
    Ok(forward.failed + backward.failed + first.failed + second.failed)
}
