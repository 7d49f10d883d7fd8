//! Covering arrays: few problems in which any two features, or any three, meet.
//!
//! A *factor* is a feature with values, such as the element type. A *row* chooses a value of each. An array *covers* with strength *t* if for any *t*
//! factors every combination of their values is in some row, unless a rule forbids it. The construction is greedy, as in AETG (Cohen, Dalal, Fredman
//! and Patton, 1997): of several random rows that begin with a missing combination it takes the one with the most missing combinations.

mod problem;

use crate::random::Random;
pub use problem::{FACTORS, Problem, RULES, THREE_WAY, three_way, two_way};
use std::collections::BTreeSet;

/// A feature of a problem.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    /// Its name.
    pub name: &'static str,
    /// What it may be.
    pub values: &'static [&'static str],
}

/// Two values that no problem has together.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// A factor, and values of it.
    pub one: (&'static str, &'static [&'static str]),
    /// Another, and values of it.
    pub other: (&'static str, &'static [&'static str]),
    /// The reason.
    pub why: &'static str,
}

/// The index of the chosen value of each factor.
pub type Row = Vec<usize>;

/// (factor, value), in the order of factors.
type Combination = Vec<(usize, usize)>;

/// Rows that cover, and what cannot be covered.
#[derive(Clone, Debug)]
pub struct Covering {
    /// The rows.
    pub rows: Vec<Row>,
    /// Combinations that no rule forbids by itself and that still have no row: rules of other factors leave none.
    pub impossible: Vec<Combination>,
    /// How many combinations the rows cover.
    pub covered: usize,
}

/// How much a value of a factor adds to a row that is begun.
type Worth<'a> = dyn Fn(&[Option<usize>], usize, usize) -> usize + 'a;

/// Rows tried for each that is taken.
const ATTEMPTS: usize = 12;

struct Builder<'a> {
    factors: &'a [Factor],
    /// By factor and value, then by factor and value: whether both may be in one row.
    allowed: Vec<Vec<Vec<Vec<bool>>>>,
    random: Random,
}

impl Builder<'_> {
    fn new<'a>(factors: &'a [Factor], rules: &[Rule]) -> Builder<'a> {
        let forbids = |rule: &Rule, (a, x): (&Factor, usize), (b, y): (&Factor, usize)| {
            let is = |(name, values): (&str, &[&str]), factor: &Factor, value: usize| {
                name == factor.name && values.contains(&factor.values[value])
            };
            is(rule.one, a, x) && is(rule.other, b, y) || is(rule.one, b, y) && is(rule.other, a, x)
        };
        let pair = |a: &Factor, x: usize, b: &Factor, y: usize| !rules.iter().any(|rule| forbids(rule, (a, x), (b, y)));
        let values = |factor: &Factor| 0..factor.values.len();
        let row = |a: &Factor, x: usize| factors.iter().map(|b| values(b).map(|y| pair(a, x, b, y)).collect()).collect();
        let allowed = factors.iter().map(|a| values(a).map(|x| row(a, x)).collect()).collect();
        Builder { factors, allowed, random: Random::new(0xc0e5) }
    }

    fn fits(&self, row: &[Option<usize>], factor: usize, value: usize) -> bool {
        row.iter().enumerate().all(|(other, chosen)| chosen.is_none_or(|chosen| self.allowed[factor][value][other][chosen]))
    }

    /// Combinations of so many factors that rules do not forbid.
    fn combinations(&self, strength: usize, of: &[usize]) -> BTreeSet<Combination> {
        let mut all = vec![Combination::new()];
        let mut found = BTreeSet::new();
        while let Some(part) = all.pop() {
            if part.len() == strength {
                found.insert(part);
                continue;
            }
            let first = part.last().map_or(0, |(factor, _)| factor + 1);
            for &factor in of.iter().filter(|factor| **factor >= first) {
                for value in 0..self.factors[factor].values.len() {
                    if part.iter().all(|(other, chosen)| self.allowed[factor][value][*other][*chosen]) {
                        all.push(part.iter().copied().chain([(factor, value)]).collect());
                    }
                }
            }
        }
        found
    }

    /// A row that begins with a combination: each further factor in random order has the value that adds the most missing pairs of `worth`, ties at random.
    fn complete(&mut self, begin: &Combination, worth: &Worth<'_>) -> Option<Row> {
        let mut row: Vec<Option<usize>> = vec![None; self.factors.len()];
        begin.iter().for_each(|(factor, value)| row[*factor] = Some(*value));
        let mut left: Vec<usize> = (0..row.len()).filter(|factor| row[*factor].is_none()).collect();
        while !left.is_empty() {
            // The factor with the fewest values that fit comes first, so that few rows end in nothing.
            let choices =
                |factor: usize| (0..self.factors[factor].values.len()).filter(|value| self.fits(&row, factor, *value)).collect::<Vec<_>>();
            let narrow = left.iter().position(|factor| choices(*factor).len() <= 1);
            let n = narrow.unwrap_or_else(|| self.random.between(0, left.len() as i64 - 1) as usize);
            let factor = left.swap_remove(n);
            let fitting: Vec<usize> = (0..self.factors[factor].values.len()).filter(|value| self.fits(&row, factor, *value)).collect();
            let best = fitting.iter().map(|value| worth(&row, factor, *value)).max()?;
            let ties: Vec<usize> = fitting.into_iter().filter(|value| worth(&row, factor, *value) == best).collect();
            row[factor] = Some(self.random.pick(&ties));
        }
        row.into_iter().collect()
    }
}

/// Rows in which any `strength` values of the factors `of` meet that rules allow to; the other factors vary too. The same rows every time.
pub fn cover(factors: &[Factor], rules: &[Rule], of: &[&str], strength: usize) -> Covering {
    let of: Vec<usize> = (0..factors.len()).filter(|n| of.contains(&factors[*n].name)).collect();
    let mut builder = Builder::new(factors, rules);
    let mut missing = builder.combinations(strength, &of);
    let all = missing.len();
    let (mut rows, mut impossible) = (Vec::new(), Vec::new());
    while let Some(begin) = missing.first().cloned() {
        // By factor and value: missing combinations in which it is. Cheaper than to ask of every value how many it would complete.
        let mut open = vec![Vec::new(); factors.len()];
        factors.iter().enumerate().for_each(|(n, factor)| open[n] = vec![0usize; factor.values.len()]);
        missing.iter().flatten().for_each(|(factor, value)| open[*factor][*value] += 1);
        let completes =
            |row: &Row| missing.iter().filter(|combination| combination.iter().all(|(factor, value)| row[*factor] == *value)).count();
        let pairs = |row: &[Option<usize>], factor: usize, value: usize| {
            if strength > 2 {
                return open[factor][value];
            }
            let there = row.iter().enumerate().filter_map(|(other, chosen)| Some((other, (*chosen)?)));
            let in_order = |pair: (usize, usize)| if pair.0 < factor { vec![pair, (factor, value)] } else { vec![(factor, value), pair] };
            there.filter(|pair| missing.contains(&in_order(*pair))).count()
        };
        let tried: Vec<Row> = (0..ATTEMPTS).filter_map(|_| builder.complete(&begin, &pairs)).collect();
        let Some(row) = tried.into_iter().max_by_key(completes) else {
            missing.remove(&begin);
            impossible.push(begin);
            continue;
        };
        missing.retain(|combination| !combination.iter().all(|(factor, value)| row[*factor] == *value));
        rows.push(row);
    }
    Covering { covered: all - impossible.len(), rows, impossible }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: [Factor; 4] = [
        Factor { name: "a", values: &["0", "1", "2"] },
        Factor { name: "b", values: &["0", "1", "2"] },
        Factor { name: "c", values: &["0", "1"] },
        Factor { name: "d", values: &["0", "1", "2", "3"] },
    ];
    const NAMES: [&str; 4] = ["a", "b", "c", "d"];

    fn has(rows: &[Row], combination: &[(usize, usize)]) -> bool {
        rows.iter().any(|row| combination.iter().all(|(factor, value)| row[*factor] == *value))
    }

    #[test]
    fn any_two_and_any_three_values_meet() {
        let two = cover(&SMALL, &[], &NAMES, 2);
        assert!(two.impossible.is_empty() && two.rows.len() < 24, "{} rows", two.rows.len());
        let three = cover(&SMALL, &[], &NAMES, 3);
        assert!(three.rows.len() < 72, "{} of 72 rows", three.rows.len());
        for (a, b) in (0..4).flat_map(|a| (a + 1..4).map(move |b| (a, b))) {
            for (x, y) in (0..SMALL[a].values.len()).flat_map(|x| (0..SMALL[b].values.len()).map(move |y| (x, y))) {
                assert!(has(&two.rows, &[(a, x), (b, y)]), "{} {x} and {} {y} do not meet", SMALL[a].name, SMALL[b].name);
                for (c, z) in (b + 1..4).flat_map(|c| (0..SMALL[c].values.len()).map(move |z| (c, z))) {
                    assert!(has(&three.rows, &[(a, x), (b, y), (c, z)]));
                }
            }
        }
    }

    #[test]
    fn rules_hold_and_what_they_leave_no_row_is_told() {
        let rules = [
            Rule { one: ("a", &["0"]), other: ("b", &["0", "1"]), why: "" },
            Rule { one: ("a", &["0"]), other: ("c", &["0"]), why: "" },
            Rule { one: ("b", &["2"]), other: ("c", &["1"]), why: "" },
        ];
        // a = 0 wants b = 2 and c = 1, which exclude one another: it has no row at all.
        let covering = cover(&SMALL, &rules, &NAMES, 2);
        assert!(covering.rows.iter().all(|row| row[0] != 0 && !(row[1] == 2 && row[2] == 1)));
        assert_eq!(covering.impossible.len(), 1 + 1 + 4, "{:?}", covering.impossible);
    }
}
