//! Random smooth score_mods: a text for the library, and the function in plain f64 with its derivative and a bound on its f32 roundings.

use super::{Drawing, Here, Library, Stage, masks};
use crate::random::Random;
use std::sync::Arc;

/// A function of a score and its position.
enum Tree {
    Score,
    Constant(f32),
    /// `f32(index) · factor` for an axis.
    Index(usize, f32),
    /// `f32(k − q) · factor`.
    Distance(f32),
    Add(Box<[Tree; 2]>),
    Sub(Box<[Tree; 2]>),
    Mul(Box<[Tree; 2]>),
    /// `x / (1 + y²)`.
    Div(Box<[Tree; 2]>),
    Tanh(Box<Tree>),
    Sin(Box<Tree>),
    Cos(Box<Tree>),
    Erf(Box<Tree>),
    /// `exp(tanh(x))`.
    Exp(Box<Tree>),
    /// `√(1 + x²)`.
    Root(Box<Tree>),
    /// `log(1 + x²)`.
    Log(Box<Tree>),
    /// The first if the key is not after the query, else the second.
    Choice(Box<[Tree; 2]>),
}

/// A value, its derivative with respect to the score, and a bound on the roundings of f32 arithmetic, in units of roundoff.
#[derive(Clone, Copy)]
struct Dual {
    value: f64,
    slope: f64,
    rounding: f64,
}

impl Dual {
    fn plain(value: f64) -> Dual {
        Dual { value, slope: 0.0, rounding: value.abs() }
    }

    /// Returns `f(self)` for an `f` with this value and derivative. GPUs approximate functions: an error of 32 roundings is accepted.
    fn map(self, value: f64, slope: f64) -> Dual {
        Dual { value, slope: slope * self.slope, rounding: slope.abs() * self.rounding + 32.0 * value.abs().max(1e-3) }
    }

    fn with(self, other: Dual, value: f64, [dx, dy]: [f64; 2]) -> Dual {
        Dual {
            value,
            slope: dx * self.slope + dy * other.slope,
            rounding: dx.abs() * self.rounding + dy.abs() * other.rounding + 4.0 * value.abs(),
        }
    }
}

/// The error function: its series, and for large `x`, where the series cancels, the continued fraction of `1 − erf(x)`.
fn erf(x: f64) -> f64 {
    let root = std::f64::consts::PI.sqrt();
    if x.abs() > 2.5 {
        let rest = (1..=80).rev().fold(0.0, |rest, n| f64::from(n) / 2.0 / (x.abs() + rest));
        return x.signum() * (1.0 - (-x * x).exp() / root / (x.abs() + rest));
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..80 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / root
}

impl Tree {
    fn draw(random: &mut Random, ops: &mut i64, depth: usize) -> Tree {
        if *ops <= 0 || depth > 8 {
            let constant = (random.normal() * 0.5) as f32;
            return match random.between(0, 5) {
                0 => Tree::Constant(constant),
                1 => Tree::Index(random.between(0, 3) as usize, constant * 0.05),
                2 => Tree::Distance(constant * 0.02),
                _ => Tree::Score,
            };
        }
        *ops -= 1;
        let kind = random.between(0, 11);
        let one = |random: &mut Random, ops: &mut i64| Box::new(Tree::draw(random, ops, depth + 1));
        let two = |random: &mut Random, ops: &mut i64| Box::new([Tree::draw(random, ops, depth + 1), Tree::draw(random, ops, depth + 1)]);
        match kind {
            0 | 1 => Tree::Add(two(random, ops)),
            2 => Tree::Sub(two(random, ops)),
            3 => Tree::Mul(two(random, ops)),
            4 => Tree::Div(two(random, ops)),
            5 => Tree::Tanh(one(random, ops)),
            6 => Tree::Sin(one(random, ops)),
            7 => Tree::Cos(one(random, ops)),
            8 => Tree::Erf(one(random, ops)),
            9 => Tree::Exp(one(random, ops)),
            10 => {
                if random.between(0, 1) == 0 {
                    Tree::Root(one(random, ops))
                } else {
                    Tree::Log(one(random, ops))
                }
            }
            _ => Tree::Choice(two(random, ops)),
        }
    }

    fn text(&self) -> String {
        let names = ["batch", "head", "q", "k"];
        match self {
            Tree::Score => "score".to_owned(),
            Tree::Constant(c) => format!("({c:?})"),
            Tree::Index(axis, c) => format!("f32({}) * ({c:?})", names[*axis]),
            Tree::Distance(c) => format!("f32(k - q) * ({c:?})"),
            Tree::Add(xy) => format!("({} + {})", xy[0].text(), xy[1].text()),
            Tree::Sub(xy) => format!("({} - ({}))", xy[0].text(), xy[1].text()),
            Tree::Mul(xy) => format!("({}) * ({})", xy[0].text(), xy[1].text()),
            Tree::Div(xy) => format!("({}) / (1.0 + ({}) * ({}))", xy[0].text(), xy[1].text(), xy[1].text()),
            Tree::Tanh(x) => format!("tanh({})", x.text()),
            Tree::Sin(x) => format!("sin({})", x.text()),
            Tree::Cos(x) => format!("cos({})", x.text()),
            Tree::Erf(x) => format!("erf({})", x.text()),
            Tree::Exp(x) => format!("exp(tanh({}))", x.text()),
            Tree::Root(x) => format!("sqrt(1.0 + ({}) * ({}))", x.text(), x.text()),
            Tree::Log(x) => format!("log(1.0 + ({}) * ({}))", x.text(), x.text()),
            Tree::Choice(xy) => format!("select(k <= q, {}, {})", xy[0].text(), xy[1].text()),
        }
    }

    fn dual(&self, score: f64, here: Here) -> Dual {
        let of = |xy: &[Tree; 2]| (xy[0].dual(score, here), xy[1].dual(score, here));
        match self {
            Tree::Score => Dual { value: score, slope: 1.0, rounding: 0.0 },
            Tree::Constant(c) => Dual::plain(f64::from(*c)),
            Tree::Index(axis, c) => Dual::plain(here[*axis] as f64 * f64::from(*c)),
            Tree::Distance(c) => Dual::plain((here[3] - here[2]) as f64 * f64::from(*c)),
            Tree::Add(xy) => {
                let (x, y) = of(xy);
                x.with(y, x.value + y.value, [1.0, 1.0])
            }
            Tree::Sub(xy) => {
                let (x, y) = of(xy);
                x.with(y, x.value - y.value, [1.0, -1.0])
            }
            Tree::Mul(xy) => {
                let (x, y) = of(xy);
                x.with(y, x.value * y.value, [y.value, x.value])
            }
            Tree::Div(xy) => {
                let (x, y) = of(xy);
                let below = 1.0 + y.value * y.value;
                x.with(y, x.value / below, [1.0 / below, -2.0 * x.value * y.value / (below * below)])
            }
            Tree::Tanh(x) => {
                let x = x.dual(score, here);
                x.map(x.value.tanh(), 1.0 - x.value.tanh().powi(2))
            }
            Tree::Sin(x) => {
                let x = x.dual(score, here);
                x.map(x.value.sin(), x.value.cos())
            }
            Tree::Cos(x) => {
                let x = x.dual(score, here);
                x.map(x.value.cos(), -x.value.sin())
            }
            Tree::Erf(x) => {
                let x = x.dual(score, here);
                x.map(erf(x.value), 2.0 / std::f64::consts::PI.sqrt() * (-x.value * x.value).exp())
            }
            Tree::Exp(x) => {
                let x = x.dual(score, here);
                let e = x.value.tanh().exp();
                x.map(e, e * (1.0 - x.value.tanh().powi(2)))
            }
            Tree::Root(x) => {
                let x = x.dual(score, here);
                let root = (1.0 + x.value * x.value).sqrt();
                x.map(root, x.value / root)
            }
            Tree::Log(x) => {
                let x = x.dual(score, here);
                let inner = 1.0 + x.value * x.value;
                x.map(inner.ln(), 2.0 * x.value / inner)
            }
            Tree::Choice(xy) => xy[usize::from(here[3] > here[2])].dual(score, here),
        }
    }
}

impl Library {
    /// Draws a random score_mod of up to `ops` functions, as text and as closures, together with the named predefined masks.
    ///
    /// # Errors
    /// The library does not have a mask.
    pub fn tree(ops: i64, masks: &[String], extents: [i64; 4], random: &mut Random) -> Result<(String, Library), String> {
        // Bound the random part with `tanh`, so that scores stay small.
        let mut left = ops;
        let tree = Arc::new(Tree::draw(random, &mut left, 0));
        let text = format!("score + tanh({}) * 3.0", tree.text());
        let whole = move |score: f64, here| {
            let t = tree.dual(score, here);
            let bounded = t.map(t.value.tanh() * 3.0, 3.0 * (1.0 - t.value.tanh().powi(2)));
            Dual { value: score, slope: 1.0, rounding: 0.0 }.with(bounded, score + bounded.value, [1.0, 1.0])
        };
        let (value, slope, rounding) = (whole.clone(), whole.clone(), whole);
        let stage = Stage {
            value: Box::new(move |score, here| value(score, here).value),
            slope: Box::new(move |score, here| slope(score, here).slope),
            rounding: Box::new(move |score, here| rounding(score, here).rounding),
            tanh: None,
            partials: Vec::new(),
            reads: Vec::new(),
        };
        let mut drawing = Drawing { extents, random, bound: Vec::new() };
        let keeps = masks.iter().map(|text| masks::keep(text, &mut drawing)).collect::<Result<_, _>>()?;
        let pads = masks.iter().any(|m| m == "padding");
        Ok((text, Library { stages: vec![stage], keeps, bound: drawing.bound, pads, beside_masks: false, packing: None, cache: None }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derivatives_are_those_of_the_values() {
        let mut random = Random::new(3);
        for _ in 0..300 {
            let mut ops = 12;
            let tree = Tree::draw(&mut random, &mut ops, 0);
            let (x, here) = (random.normal(), [1, 2, random.between(0, 9), random.between(0, 9)]);
            let step = 1e-6;
            let difference = (tree.dual(x + step, here).value - tree.dual(x - step, here).value) / (2.0 * step);
            let slope = tree.dual(x, here).slope;
            assert!((difference - slope).abs() <= 1e-6 * (1.0 + slope.abs() + tree.dual(x, here).value.abs()), "{}", tree.text());
        }
        assert!((erf(0.5) - 0.520_499_877_813_046_5).abs() < 1e-15 && (erf(-2.0) + 0.995_322_265_018_952_7).abs() < 1e-13);
        assert!((erf(3.0) - 0.999_977_909_503_001_4).abs() < 1e-15);
    }
}
