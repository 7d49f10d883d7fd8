//! Tests that a masked-out (query, key) has no effect, whatever the two contain, in blocks that the kernel visits too. A mask removes the pair, or a score_mod
//! returns −∞ for it.

use crate::random::Random;
use sdpa::{AttentionSpec, BackwardProblem, DType, Elements, Executor, HostBackward, HostForward, Layout, Mask, ScoreMod, Shape};

/// A row whose stats are set to −∞, as if it attended to no key.
const EMPTY: usize = 2;

/// Dense heads of rows, one after another.
struct Rows {
    seq: usize,
    dim: usize,
    drops: Drops,
    values: Vec<f32>,
}

impl Rows {
    fn random(random: &mut Random, drops: Drops, [heads, seq, dim]: [i64; 3]) -> Rows {
        let values = (0..heads * seq * dim).map(|_| random.normal() as f32).collect();
        Rows { seq: seq as usize, dim: dim as usize, drops, values }
    }

    fn is_odd(&self, at: usize) -> bool {
        self.drops.is_odd(at / self.dim % self.seq)
    }

    fn spoil(&mut self, with: f32) {
        (0..self.values.len()).filter(|&at| self.is_odd(at)).collect::<Vec<_>>().into_iter().for_each(|at| self.values[at] = with);
    }

    fn elements(&self) -> Elements<'_> {
        Elements::F32(&self.values)
    }

    fn zeros(&self) -> Rows {
        Rows { values: vec![0.0; self.values.len()], ..*self }
    }
}

/// The way in which a test masks out a pair of a query and a key.
#[derive(Clone, Copy, Debug)]
pub enum Drops {
    /// A mask by which even queries attend to even keys, and odd queries to odd keys.
    Mask,
    /// A mask that keeps or removes each block of 32 queries by 32 keys as a whole.
    Blocks,
    /// A mask by which query 8 attends to key 8 only, and no other query attends to key 8. In a kernel one simdgroup, not the last,
    /// copies this row, and all simdgroups must respect it.
    One,
    /// The mask of [`Drops::Mask`], with head dims so large that the last slice of columns is partial.
    Wide,
    /// A score_mod that returns −∞. The CPU is not tested, because there such a pair has P = 0 but takes part in the products.
    ScoreMod,
}

impl Drops {
    /// Every way in which a test masks out pairs.
    pub const ALL: [Drops; 5] = [Drops::Mask, Drops::Blocks, Drops::One, Drops::Wide, Drops::ScoreMod];

    /// Off every tile, or exact multiples of a tile, so that a block holds nothing except rows.
    fn shape(self) -> Shape {
        let [seq_q, seq_kv, dim_qk, dim_v] = match self {
            Drops::Mask | Drops::One | Drops::ScoreMod => [40, 70, 20, 44],
            Drops::Blocks => [64, 96, 24, 40],
            Drops::Wide => [16, 24, 248, 248],
        };
        Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q, seq_kv, dim_qk, dim_v }
    }

    fn is_odd(self, row: usize) -> bool {
        match self {
            Drops::Mask | Drops::Wide | Drops::ScoreMod => row % 2 == 1,
            Drops::Blocks => row / 32 % 2 == 1,
            Drops::One => row == 8,
        }
    }
}

fn problem(drops: Drops) -> BackwardProblem {
    let spec = AttentionSpec::dense(DType::F32, drops.shape(), Layout::Bhsd);
    let mask = |text: &str| text.parse::<Mask>().unwrap_or_else(|e| panic!("{e}"));
    let spec = match drops {
        Drops::Mask | Drops::Wide => spec.mask(mask("(q + k) % 2 == 0")),
        Drops::Blocks => spec.mask(mask("(q / 32 + k / 32) % 2 == 0")),
        Drops::One => spec.mask(mask("q != 8 & k != 8 | q == 8 & k == 8")),
        Drops::ScoreMod => {
            spec.score_mod("select((q + k) % 2 == 0, score * 1.5, -inf)".parse::<ScoreMod>().unwrap_or_else(|e| panic!("{e}")))
        }
    };
    spec.with_stats().backward().validate().unwrap_or_else(|e| panic!("{e}"))
}

/// The value in the odd rows of some operands out of `q`, `k`, `v`, `d_o`.
#[derive(Clone, Copy, Debug)]
struct Spoil {
    with: f32,
    operands: [bool; 4],
}

const SPOILS: [Spoil; 6] = [
    Spoil { with: f32::NAN, operands: [true; 4] },
    Spoil { with: f32::INFINITY, operands: [true; 4] },
    Spoil { with: f32::NAN, operands: [true, false, false, false] },
    Spoil { with: f32::NAN, operands: [false, true, false, false] },
    Spoil { with: f32::NAN, operands: [false, false, true, false] },
    Spoil { with: f32::NAN, operands: [false, false, false, true] },
];

/// Returns `o`, `dq`, `dk` and `dv`, with the selected operands spoiled.
fn results(executor: &dyn Executor, drops: Drops, problem: &BackwardProblem, spoil: Spoil) -> Result<[Rows; 4], String> {
    let Shape { heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v, .. } = drops.shape();
    let mut random = Random::new(7);
    let mut draw = |heads, seq, dim| Rows::random(&mut random, drops, [heads, seq, dim]);
    let (mut q, mut k) = (draw(heads_q, seq_q, dim_qk), draw(heads_kv, seq_kv, dim_qk));
    let (mut v, mut d_o) = (draw(heads_kv, seq_kv, dim_v), draw(heads_q, seq_q, dim_v));
    let drawn = [&mut q, &mut k, &mut v, &mut d_o].into_iter().zip(spoil.operands);
    drawn.filter(|(_, spoiled)| *spoiled).for_each(|(rows, _)| rows.spoil(spoil.with));
    if spoil.operands[3] {
        d_o.values[EMPTY * d_o.dim..][..d_o.dim].fill(spoil.with);
    }
    let mut o = d_o.zeros();
    let mut stats = vec![0.0; (heads_q * seq_q) as usize];
    let prepared = executor.prepare(problem.forward()).map_err(|e| e.to_string())?;
    let call = HostForward::new(q.elements(), k.elements(), v.elements(), &mut o.values).stats(&mut stats);
    prepared.forward(call).map_err(|e| e.to_string())?;
    stats[EMPTY] = f32::NEG_INFINITY;
    let prepared = executor.prepare_backward(problem).map_err(|e| e.to_string())?;
    let [mut dq, mut dk, mut dv] = [q.zeros(), k.zeros(), v.zeros()];
    let call = HostBackward::new(
        (q.elements(), k.elements(), v.elements()),
        (o.elements(), &stats),
        d_o.elements(),
        (&mut dq.values, &mut dk.values, &mut dv.values),
    );
    prepared.backward(call).map_err(|e| e.to_string())?;
    Ok([o, dq, dk, dv])
}

/// Tests that masked-out pairs have no effect on an executor's results.
///
/// # Errors
/// Returns a message about the first element that depends on a masked-out pair.
pub fn dropped(drops: Drops, executor: &dyn Executor) -> Result<(), String> {
    let problem = problem(drops);
    let clean = results(executor, drops, &problem, Spoil { with: 0.0, operands: [false; 4] })?;
    for spoil in SPOILS {
        let spoiled = results(executor, drops, &problem, spoil)?;
        for (name, (clean, spoiled)) in ["o", "dq", "dk", "dv"].iter().zip(clean.iter().zip(&spoiled)) {
            for (at, (&x, &y)) in clean.values.iter().zip(&spoiled.values).enumerate() {
                let (odd, all) = (spoiled.is_odd(at), spoil.operands == [true; 4]);
                let near = (x - y).abs() <= 1e-5 * (1.0 + x.abs());
                if (!odd && !near) || (odd && all && y.is_finite()) {
                    return Err(format!("{name}[{at}] is {y}, and {x} where nothing is spoiled: {drops:?}, {spoil:?}"));
                }
            }
        }
    }
    Ok(())
}
