//! Every case, and random problems, against the oracle.

use crate::setup::{Result, executor};
use conformance::runner::{self, Draw, Outcome, Source, Tally};
use conformance::{Case, random::Random};
use sdpa::cudnn::lower::Form;
use sdpa::cudnn::{CudnnExecutor, Pieces, PlanOptions};
use sdpa::{AttentionSpec, BackwardSpec, DType};
use std::fmt::Debug;
use std::ops::Range;

const NARROW: [DType; 2] = [DType::BF16, DType::F16];

/// Everything: the options in the form that is chosen, the rest in every form that a runtime may be asked for.
pub(crate) fn run(random: u64) -> Result<()> {
    let mut forms = vec![None];
    if executor(PlanOptions::default())?.library().version() >= sdpa::cudnn::lower::UNIFIED_PLAIN_SINCE {
        forms.push(Some(Form::Unified));
    }
    let mut failed = 0;
    for form in forms {
        for part in Part::ALL.into_iter().filter(|part| form.is_none() || part.is_plain()) {
            let executor = executor(part.options(form))?;
            failed += part.run(&executor, form, 0..random)?;
            println!("{}, {} cache: {:?}", label(form), part.name(), executor.cache_stats());
        }
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// One part alone, in every form that a runtime may be asked for.
pub(crate) fn part(part: Part, random: u64) -> Result<()> {
    let mut failed = 0;
    // The other form drops no weights, and is not asked for 8-bit floats.
    let forms: &[Option<Form>] = if matches!(part, Part::Dropout | Part::Fp8) { &[None] } else { &[None, Some(Form::Unified)] };
    for &form in forms {
        failed += part.run(&executor(part.options(form))?, form, 0..random)?;
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// Random problems of one part alone, in the form that is chosen if none is named: work that processes divide, and one problem again.
pub(crate) fn drawn(part: Part, seeds: Range<u64>, form: Option<&str>) -> Result<()> {
    let form = match form {
        None => None,
        Some("composite") => Some(Form::Composite),
        Some("unified") => Some(Form::Unified),
        Some(other) => return Err(format!("a form is composite or unified, not {other}").into()),
    };
    let failed = part.drawn(&executor(part.options(form))?, form, seeds)?;
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

fn label(form: Option<Form>) -> &'static str {
    form.map_or("cudnn", Form::name)
}

/// Cases of their own, and random problems.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    /// Whatever there is of options but pages.
    Random,
    /// Score_mods.
    Trees,
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
    const ALL: [Part; 9] =
        [Part::Random, Part::Trees, Part::Packed, Part::Paged, Part::Sinks, Part::Ends, Part::Dropout, Part::Pieces, Part::Fp8];

    fn name(self) -> &'static str {
        match self {
            Part::Random => "random",
            Part::Trees => "trees",
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

    fn is_plain(self) -> bool {
        matches!(self, Part::Random | Part::Trees)
    }

    /// Of the forward pass, and of the backward pass.
    fn cases(self) -> std::result::Result<[Vec<Case>; 2], String> {
        let both = |cases: Vec<Case>| [cases.clone(), cases];
        Ok(match self {
            Part::Random => [Case::all()?, Case::all_backward()?],
            Part::Trees => both([Case::all_functions()?, Case::all_library()?].concat()),
            Part::Packed => both(Case::all_packed()?),
            Part::Paged => [Case::all_paged()?, Vec::new()],
            Part::Sinks => both(Case::all_sinks()?),
            Part::Ends => both(Case::all_ends()?),
            Part::Dropout => both(Case::all_dropout()?),
            Part::Pieces => {
                let several = |case: &Case| {
                    let problem = case.spec().ok()?.validate().ok()?;
                    problem.kept().pieces(problem.extents()).filter(|pieces| pieces.len() > 1)
                };
                both(Case::all_library()?.into_iter().filter(|case| several(case).is_some()).collect())
            }
            Part::Fp8 => both(Case::all_fp8()?),
        })
    }

    /// A problem, and its gradient where there is a backward pass; nothing where it is made along with its closures.
    fn draw(self, random: &mut Random) -> Option<(AttentionSpec, Option<BackwardSpec>)> {
        let spec = match self {
            Part::Trees => return None,
            Part::Random => runner::random_spec(random, &NARROW),
            Part::Packed => runner::random_packed(random, &NARROW),
            Part::Paged => return Some((runner::random_paged(random, &NARROW), None)),
            Part::Sinks => runner::random_padded(random, &NARROW).with_sink(),
            Part::Ends => runner::random_ends(random, &NARROW),
            Part::Pieces => runner::random_pieces(random, &NARROW),
            Part::Fp8 => runner::random_fp8(random),
            Part::Dropout => runner::random_spec(random, &NARROW).with_dropout(random.pick(&[0.003, 0.1, 0.5, 0.9])),
        };
        let backward = match self {
            Part::Fp8 => runner::random_fp8_gradients(spec.clone(), random),
            Part::Pieces => spec.clone().backward(),
            Part::Random | Part::Trees | Part::Packed | Part::Paged | Part::Sinks | Part::Ends | Part::Dropout => {
                runner::gradients_elsewhere(spec.clone(), random)
            }
        };
        Some((spec, Some(backward)))
    }

    /// What plans of it look like.
    fn options(self, form: Option<Form>) -> PlanOptions {
        let pieces = if matches!(self, Part::Pieces) { Pieces::Always } else { Pieces::Auto };
        PlanOptions::default().with_form(form).with_pieces(pieces)
    }

    /// Both passes of every case and of random problems; how many failed.
    fn run(self, executor: &CudnnExecutor, form: Option<Form>, seeds: Range<u64>) -> Result<usize> {
        let (label, name) = (label(form), self.name());
        let [mut forward, mut backward] = [(); 2].map(|()| Tally::default());
        let [first, second] = self.cases()?;
        for case in first {
            forward.add(label, &case.name, &runner::run_case(&case, executor));
        }
        for (case, source) in second.iter().flat_map(|case| Source::ALL.map(|source| (case, source))) {
            let outcome = runner::run_backward_case(case, source, executor);
            backward.add(label, &format!("{}{}, backward", case.name, source.suffix()), &outcome);
        }
        if matches!(self, Part::Dropout) {
            match runner::stays(executor) {
                Ok(bits) => println!("{label}, {bits:?}: each as the generator says"),
                Err(e) => {
                    println!("FAIL {label} bits of dropout: {e}");
                    forward.failed += 1;
                }
            }
        }
        println!("{}", forward.summary(&format!("{label}, {name} cases")));
        println!("{}", backward.summary(&format!("{label}, {name} backward cases")));
        Ok(forward.failed + backward.failed + self.drawn(executor, form, seeds)?)
    }

    /// Both passes of random problems; how many failed.
    fn drawn(self, executor: &CudnnExecutor, form: Option<Form>, seeds: Range<u64>) -> Result<usize> {
        let (label, name) = (label(form), self.name());
        let [mut forward, mut backward] = [(); 2].map(|()| Tally::default());
        let alone = seeds.end - seeds.start == 1;
        for seed in seeds {
            let again = || format!("device suite 1 {name} {seed}{}", form.map_or_else(String::new, |form| format!(" {form}")));
            let source = Source::ALL[(seed % 2) as usize];
            let (first, second, told) = if let Some((spec, gradient)) = self.draw(&mut Random::new(seed * 7919 + 29)) {
                let first = runner::run(&spec, None, 1.0, seed, executor);
                let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
                let second = gradient.as_ref().map(|gradient| runner::run_backward(gradient, &draw, source, executor));
                (first, second, gradient.map_or_else(|| format!("{spec:?}"), |gradient| format!("{gradient:?}")))
            } else {
                let tree = runner::run_tree(seed, &NARROW, executor)?;
                (tree.forward, Some(tree.backward), tree.text)
            };
            let failed = is_failure(&first) || second.as_ref().is_some_and(is_failure);
            if alone || failed {
                println!("{told}");
            }
            forward.add(label, &format!("{name} {seed}"), &first.with_repro(again));
            if let Some(second) = second {
                backward.add(label, &format!("{name} backward {seed}{}", source.suffix()), &second.with_repro(again));
            }
            if failed {
                // Whatever comes after a fault of the device fails, and says nothing of its problem.
                executor.device().stream()?.synchronize()?;
            }
        }
        println!("{}", forward.summary(&format!("{label}, {name} drawn")));
        println!("{}", backward.summary(&format!("{label}, {name} backward drawn")));
        Ok(forward.failed + backward.failed)
    }
}

fn is_failure<D: Debug>(outcome: &Outcome<D>) -> bool {
    matches!(outcome, Outcome::Fail(_))
}
