//! The library and random score_mods on one executor.

use super::backward::{Draw, Source, run_backward_case, run_backward_with};
use super::{Outcome, Tally, run_case, run_with};
use crate::case::Case;
use crate::compare::GradientDistance;
use crate::library::Library;
use crate::random::Random;
use sdpa::{AttentionSpec, DType, Executor, Layout, Mask, ScoreMod, Shape};

/// Runs every case with predefined score_mods and masks, and every case with packed sequences: forward, and backward alone and chained to
/// the executor's own forward pass. Returns the counts of forward and of backward passes.
///
/// # Errors
/// Fails if a case does not parse.
pub fn library_suite(label: &str, executor: &dyn Executor) -> Result<[Tally; 2], String> {
    let (mut forward, mut backward) = (Tally::default(), Tally::default());
    for case in Case::all_library()?.into_iter().chain(Case::all_packed()?) {
        forward.add(label, &case.name, &run_case(&case, executor));
        for source in Source::ALL {
            backward.add(label, &format!("backward {}{}", case.name, source.suffix()), &run_backward_case(&case, source, executor));
        }
    }
    Ok([forward, backward])
}

/// The outcomes of the forward and the backward pass with one random score_mod.
#[derive(Debug)]
pub struct Tree {
    /// The text of the score_mod, its masks, and the extents of the problem.
    pub text: String,
    /// Outcome of the forward pass.
    pub forward: Outcome,
    /// Outcome of the backward pass.
    pub backward: Outcome<GradientDistance>,
}

/// Runs the `seed`th random score_mod of up to 20 functions with random masks, forward and backward.
///
/// # Errors
/// Fails if a text or a mask does not parse, which is a bug of this crate.
pub fn run_tree(seed: u64, dtypes: &[DType], executor: &dyn Executor) -> Result<Tree, String> {
    let random = &mut Random::new(seed * 6151 + 17);
    let heads_kv = random.pick(&[1, 2]);
    let dim = random.pick(&[64, 128, 32]);
    let shape = Shape {
        batch: random.between(1, 2),
        heads_q: heads_kv * random.pick(&[1, 3]),
        heads_kv,
        seq_q: random.between(2, 200),
        seq_kv: random.between(2, 200),
        dim_qk: dim,
        dim_v: dim,
    };
    let masks: Vec<String> = match random.between(0, 5) {
        0 => vec![],
        1 | 2 => vec!["causal".to_owned()],
        3 => vec!["dilated:3".to_owned()],
        4 => vec!["document".to_owned(), "causal".to_owned()],
        _ => vec!["padding".to_owned()],
    };
    let extents = [shape.batch, shape.heads_q, shape.seq_q, shape.seq_kv];
    let ops = random.between(1, 20);
    let (text, library) = Library::tree(ops, &masks, extents, random)?;
    let mut spec = AttentionSpec::dense(random.pick(dtypes), shape, random.pick(&[Layout::Bhsd, Layout::Bshd])).with_stats();
    spec = spec.score_mod(text.parse::<ScoreMod>().map_err(|e| e.to_string())?);
    for mask in &masks {
        spec = spec.mask(mask.parse::<Mask>().map_err(|e| e.to_string())?);
    }
    let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
    let forward = run_with(&spec, &draw, Some(&library), executor);
    let backward = run_backward_with(&spec.backward(), &draw, Some(&library), Source::ALL[(seed % 2) as usize], executor);
    Ok(Tree { text: format!("{text}, masks {masks:?}, {shape:?}"), forward, backward })
}
