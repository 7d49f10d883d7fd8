//! Covering arrays: short lists of problems in which any two features, or any three, occur together.
//!
//! A *factor* is a feature with values, such as the element type. A *row* chooses a value of each. An array *covers* with strength *t* if for any *t* factors
//! every combination of their values is in some row, unless a rule forbids it. The construction is greedy, as in AETG (Cohen, Dalal, Fredman and Patton, 1997).
//! It draws several random rows that begin with a missing combination, and keeps the one with the most missing combinations.

mod asked;
mod problem;

use crate::random::Random;
use asked::Asked;
pub use asked::Supports;
pub use problem::{FACTORS, Problem, RULES, Strength, THREE_WAY, features};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A feature of a problem.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    /// The name of the factor.
    pub name: &'static str,
    /// The values that the factor can have.
    pub values: &'static [&'static str],
}

/// A rule that excludes rows: no row has one of certain values of one factor together with one of certain values of another.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The name of one factor, and those of its values that the rule is about.
    pub one: (&'static str, &'static [&'static str]),
    /// The name of another factor, and those of its values that no row has together with values of `one`.
    pub other: (&'static str, &'static [&'static str]),
    /// The reason for the rule.
    pub why: &'static str,
}

/// A row of a covering array: the index of the chosen value of each factor.
pub type Row = Vec<usize>;

/// (factor, value), in the order of factors.
type Combination = Vec<(usize, usize)>;

/// The specification of a covering array, as the input of [`cover`].
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Every factor of a row.
    pub factors: &'a [Factor],
    /// The rules that every row obeys.
    pub rules: &'a [Rule],
    /// The names of the factors whose combinations are covered.
    pub of: &'a [&'a str],
    /// The number of factors in a combination.
    pub strength: usize,
    /// The number of rows that must contain each combination of values.
    pub times: usize,
    /// A factor, and those of its values for which a problem computes nothing. A row with such a value covers only combinations that
    /// contain it.
    pub hollow: (&'a str, &'a [&'a str]),
}

/// The rows of a covering array, and the combinations of values that they do not cover.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Covering {
    /// The rows of the covering array.
    pub rows: Vec<Row>,
    /// The combinations of values that no rule forbids, but for which the generator found fewer rows than requested. Either the rules for
    /// other factors forbid every further row that contains the combination, or no such row is supported.
    pub impossible: Vec<Combination>,
    /// The number of combinations of values that are in as many rows as requested.
    pub covered: usize,
}

/// How many missing combinations a value of a factor adds to an incomplete row.
type Worth<'a> = dyn Fn(&[Option<usize>], usize, usize) -> usize + 'a;

/// Number of rows tried for each row that is kept.
const ATTEMPTS: usize = 12;
/// Number of supported rows that are modified to contain a combination when none of the constructed rows is supported.
const BASES: usize = 48;
/// Number of random rows tried per value to find the first supported rows.
const FIRST: usize = 24;

struct Builder<'a> {
    factors: &'a [Factor],
    /// Whether two values may occur in one row, by factor and value of both.
    allowed: Vec<Vec<Vec<Vec<bool>>>>,
    /// Each (factor, value) for which nothing is computed.
    hollow: Vec<(usize, usize)>,
    random: Random,
}

impl Builder<'_> {
    fn new<'a>(Wanted { factors, rules, hollow, .. }: &Wanted<'a>) -> Builder<'a> {
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
        let is_hollow = |factor: &Factor, value: usize| factor.name == hollow.0 && hollow.1.contains(&factor.values[value]);
        let all = factors.iter().enumerate().flat_map(|(n, factor)| values(factor).map(move |value| (n, factor, value)));
        let hollow = all.filter(|(_, factor, value)| is_hollow(factor, *value)).map(|(n, _, value)| (n, value)).collect();
        Builder { factors, allowed, hollow, random: Random::new(0xc0e5) }
    }

    fn fits(&self, row: &[Option<usize>], factor: usize, value: usize) -> bool {
        row.iter().enumerate().all(|(other, chosen)| chosen.is_none_or(|chosen| self.allowed[factor][value][other][chosen]))
    }

    fn is_hollow(&self, combination: &[(usize, usize)]) -> bool {
        combination.iter().any(|chosen| self.hollow.contains(chosen))
    }

    /// Returns true if a row tests a combination.
    fn covers(&self, row: &Row, combination: &Combination) -> bool {
        let computes_nothing = self.hollow.iter().any(|(factor, value)| row[*factor] == *value);
        combination.iter().all(|(factor, value)| row[*factor] == *value) && (!computes_nothing || self.is_hollow(combination))
    }

    /// Returns the combinations of `strength` factors that rules allow.
    fn combinations(&self, strength: usize, of: &[usize]) -> Vec<Combination> {
        let mut all = vec![Combination::new()];
        let mut found = Vec::new();
        while let Some(part) = all.pop() {
            if part.len() == strength {
                found.push(part);
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

    /// Returns the values of a factor that rules allow in an incomplete row.
    fn choices(&self, row: &[Option<usize>], factor: usize, may_be_hollow: bool) -> Vec<usize> {
        let may_be = |value: &usize| self.fits(row, factor, *value) && (may_be_hollow || !self.hollow.contains(&(factor, *value)));
        (0..self.factors[factor].values.len()).filter(may_be).collect()
    }

    /// Completes a row that begins with a combination. Each further factor, in random order, gets the value that adds the most to `worth`, ties at random.
    fn complete(&mut self, begin: &Combination, worth: &Worth<'_>) -> Option<Row> {
        let mut row: Vec<Option<usize>> = vec![None; self.factors.len()];
        begin.iter().for_each(|(factor, value)| row[*factor] = Some(*value));
        let may_be_hollow = self.is_hollow(begin);
        let mut left: Vec<usize> = (0..row.len()).filter(|factor| row[*factor].is_none()).collect();
        while !left.is_empty() {
            // Choose factors with at most one allowed value first, so that few rows get stuck at a factor with no allowed value left.
            let narrow = left.iter().position(|factor| self.choices(&row, *factor, may_be_hollow).len() <= 1);
            let n = narrow.unwrap_or_else(|| self.random.between(0, left.len() as i64 - 1) as usize);
            let factor = left.swap_remove(n);
            let fitting = self.choices(&row, factor, may_be_hollow);
            let best = fitting.iter().map(|value| worth(&row, factor, *value)).max()?;
            let ties: Vec<usize> = fitting.into_iter().filter(|value| worth(&row, factor, *value) == best).collect();
            row[factor] = Some(self.random.pick(&ties));
        }
        row.into_iter().collect()
    }
}

impl Builder<'_> {
    /// Builds a row that contains a combination and takes every other value from one of two rows, at random, where the rules allow it.
    fn crossed(&mut self, bases: [&Row; 2], combination: &Combination) -> Option<Row> {
        let mut row: Vec<Option<usize>> = vec![None; self.factors.len()];
        combination.iter().for_each(|(factor, value)| row[*factor] = Some(*value));
        let may_be_hollow = self.is_hollow(combination);
        let mut left: Vec<usize> = (0..row.len()).filter(|factor| row[*factor].is_none()).collect();
        left.retain(|&factor| {
            let value = self.random.pick(&bases)[factor];
            let keep = self.fits(&row, factor, value) && (may_be_hollow || !self.hollow.contains(&(factor, value)));
            row[factor] = keep.then_some(value);
            !keep
        });
        // Choose the factor with the fewest allowed values first.
        while !left.is_empty() {
            let n = (0..left.len()).min_by_key(|n| self.choices(&row, left[*n], may_be_hollow).len())?;
            let factor = left.swap_remove(n);
            let fitting = self.choices(&row, factor, may_be_hollow);
            if fitting.is_empty() {
                return None;
            }
            row[factor] = Some(self.random.pick(&fitting));
        }
        row.into_iter().collect()
    }

    /// Looks for a supported row that contains a combination and is not in `taken`. It modifies known rows that share the most values with the combination,
    /// alone and crossed with others.
    fn supported_with(&mut self, combination: &Combination, known: &[Row], taken: &HashSet<Row>, asked: &mut Asked<'_>) -> Option<Row> {
        if known.is_empty() {
            return None;
        }
        let shared = |row: &Row| combination.iter().filter(|(factor, value)| row[*factor] == *value).count();
        let first = self.random.between(0, known.len() as i64 - 1) as usize;
        let mut bases: Vec<&Row> = known.iter().cycle().skip(first).take(known.len()).collect();
        bases.sort_by_key(|row| std::cmp::Reverse(shared(row)));
        (0..BASES).find_map(|n| {
            let base = bases[n / 2 % bases.len()];
            let other = if n % 2 == 0 { base } else { self.random.pick(&bases) };
            self.crossed([base, other], combination).filter(|row| !taken.contains(row) && asked.is_supported(row))
        })
    }

    /// Returns the best two rows that differ from `row` in one factor and gain missing combinations.
    fn better(&self, row: &Row, factor: usize, begin: &Combination, worth: &dyn Fn(&Row) -> usize, taken: &HashSet<Row>) -> Vec<Row> {
        if begin.iter().any(|(other, _)| *other == factor) {
            return Vec::new();
        }
        let others: Vec<Option<usize>> = row.iter().enumerate().map(|(n, value)| (n != factor).then_some(*value)).collect();
        let mut better: Vec<(usize, Row)> = self
            .choices(&others, factor, self.is_hollow(begin))
            .into_iter()
            .map(|value| row.iter().enumerate().map(|(n, there)| if n == factor { value } else { *there }).collect::<Row>())
            .map(|changed| (worth(&changed), changed))
            .collect();
        let there = worth(row);
        better.retain(|(worth, _)| *worth > there);
        better.sort_by_key(|(worth, _)| std::cmp::Reverse(*worth));
        better.into_iter().take(2).map(|(_, changed)| changed).filter(|changed| !taken.contains(changed)).collect()
    }

    /// Changes a supported row value by value while it gains missing combinations, keeps `begin` and stays supported.
    fn improved(
        &self,
        mut row: Row,
        begin: &Combination,
        worth: &dyn Fn(&Row) -> usize,
        taken: &HashSet<Row>,
        asked: &mut Asked<'_>,
    ) -> Row {
        for factor in 0..row.len() {
            let better = self.better(&row, factor, begin, worth, taken);
            if let Some(changed) = better.into_iter().find(|changed| asked.is_supported(changed)) {
                row = changed;
            }
        }
        row
    }

    /// Returns supported rows to start from, and the values for which no supported row was found: their combinations are skipped.
    fn first_rows(&mut self, asked: &mut Asked<'_>) -> (Vec<Row>, Vec<(usize, usize)>) {
        let values = |(n, factor): (usize, &Factor)| (0..factor.values.len()).map(move |value| (n, value)).collect::<Vec<_>>();
        let all: Vec<(usize, usize)> = self.factors.iter().enumerate().flat_map(values).collect();
        // Restore the generator afterwards, so that an executor that supports everything gets the same rows.
        let random = self.random.clone();
        let (mut known, mut missing) = (Vec::new(), Vec::new());
        for chosen in all {
            let alone = vec![chosen];
            let found = (0..FIRST).find_map(|_| self.complete(&alone, &|_, _, _| 0).filter(|row| asked.is_supported(row)));
            match found {
                Some(row) => known.push(row),
                None => missing.push(chosen),
            }
        }
        // A value may need several other values at once, which random rows seldom have. A supported row may have all but one of them, so
        // try single changes to supported rows too.
        loop {
            let before = missing.len();
            missing.retain(|chosen| {
                let found = self.supported_with(&vec![*chosen], &known, &HashSet::new(), asked);
                let keep = found.is_none();
                known.extend(found);
                keep
            });
            if missing.len() == before {
                break;
            }
        }
        self.random = random;
        (known, missing)
    }
}

/// Generates a covering array: supported rows that contain each combination of values as often as requested. The values of the other
/// factors vary too. Calls with equal arguments return identical rows.
pub fn cover(wanted: &Wanted<'_>, supports: &Supports<'_>) -> Covering {
    let asked = &mut Asked::new(supports);
    let factors = wanted.factors;
    let of: Vec<usize> = (0..factors.len()).filter(|n| wanted.of.contains(&factors[*n].name)).collect();
    let mut builder = Builder::new(wanted);
    // For each combination: the number of rows that it still lacks.
    let mut missing: BTreeMap<Combination, usize> =
        builder.combinations(wanted.strength, &of).into_iter().map(|combination| (combination, wanted.times)).collect();
    let all = missing.len();
    let (mut rows, mut impossible): (Vec<Row>, Vec<Combination>) = (Vec::new(), Vec::new());
    let mut taken: HashSet<Row> = HashSet::new();
    let (mut known, unsupported) = builder.first_rows(asked);
    let is_unsupported = |combination: &Combination| combination.iter().any(|chosen| unsupported.contains(chosen));
    missing.retain(|combination, _| {
        let keep = !is_unsupported(combination);
        impossible.extend((!keep).then(|| combination.clone()));
        keep
    });
    while let Some(begin) = missing.first_key_value().map(|(combination, _)| combination.clone()) {
        // Count the missing combinations that contain each value of each factor. Counting those that each value completes would be
        // slower.
        let mut open = vec![Vec::new(); factors.len()];
        factors.iter().enumerate().for_each(|(n, factor)| open[n] = vec![0usize; factor.values.len()]);
        missing.keys().flatten().for_each(|(factor, value)| open[*factor][*value] += 1);
        let pairs = |row: &[Option<usize>], factor: usize, value: usize| {
            if wanted.strength > 2 {
                return open[factor][value];
            }
            let there = row.iter().enumerate().filter_map(|(other, chosen)| Some((other, (*chosen)?)));
            let in_order = |pair: (usize, usize)| if pair.0 < factor { vec![pair, (factor, value)] } else { vec![(factor, value), pair] };
            there.filter(|pair| missing.contains_key(&in_order(*pair))).count()
        };
        let completed = |builder: &Builder<'_>, row: &Row| missing.keys().filter(|combination| builder.covers(row, combination)).count();
        let tried: Vec<Row> = (0..ATTEMPTS).filter_map(|_| builder.complete(&begin, &pairs)).filter(|row| !taken.contains(row)).collect();
        // Sort rows by the number of completed combinations. Among equals the last row comes first, as `max_by_key` would return it.
        let mut best: Vec<(usize, Row)> = tried.into_iter().map(|row| (completed(&builder, &row), row)).rev().collect();
        best.sort_by_key(|(completed, _)| std::cmp::Reverse(*completed));
        let made = best.into_iter().map(|(_, row)| row).find(|row| asked.is_supported(row));
        let found = made.or_else(|| {
            let base = builder.supported_with(&begin, &known, &taken, asked)?;
            let worth: HashMap<(usize, usize), usize> = missing.keys().flatten().fold(HashMap::new(), |mut worth, chosen| {
                *worth.entry(*chosen).or_default() += 1;
                worth
            });
            let worth = |row: &Row| row.iter().enumerate().filter_map(|(factor, value)| worth.get(&(factor, *value))).sum();
            Some(builder.improved(base, &begin, &worth, &taken, asked))
        });
        let Some(row) = found else {
            missing.remove(&begin);
            impossible.push(begin);
            continue;
        };
        missing.retain(|combination, times| {
            *times -= usize::from(builder.covers(&row, combination));
            *times > 0
        });
        known.push(row.clone());
        taken.insert(row.clone());
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

    fn wanted<'a>(rules: &'a [Rule], strength: usize) -> Wanted<'a> {
        Wanted { factors: &SMALL, rules, of: &NAMES, strength, times: 1, hollow: ("", &[]) }
    }

    fn has(rows: &[Row], combination: &[(usize, usize)]) -> bool {
        rows.iter().any(|row| combination.iter().all(|(factor, value)| row[*factor] == *value))
    }

    #[test]
    fn any_two_and_any_three_values_meet() {
        let two = cover(&wanted(&[], 2), &|_| true);
        assert!(two.impossible.is_empty() && two.rows.len() < 24, "{} rows", two.rows.len());
        let three = cover(&wanted(&[], 3), &|_| true);
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
        // a = 0 excludes b = 0, b = 1 and c = 0, so it needs b = 2 and c = 1. These exclude each other, so no row has a = 0.
        let covering = cover(&wanted(&rules, 2), &|_| true);
        assert!(covering.rows.iter().all(|row| row[0] != 0 && !(row[1] == 2 && row[2] == 1)));
        assert_eq!(covering.impossible.len(), 1 + 1 + 4, "{:?}", covering.impossible);
    }

    #[test]
    fn combinations_are_in_so_many_rows_that_are_supported() {
        // No row with c = 1 is supported, and none with a = 0 and b = 0.
        let covering = cover(&Wanted { times: 3, ..wanted(&[], 2) }, &|row| row[2] != 1 && (row[0], row[1]) != (0, 0));
        for (n, row) in covering.rows.iter().enumerate() {
            assert!(row[2] == 0 && (row[0], row[1]) != (0, 0) && !covering.rows[..n].contains(row), "{row:?}");
        }
        let in_rows = |x: (usize, usize), y: (usize, usize)| covering.rows.iter().filter(|row| row[x.0] == x.1 && row[y.0] == y.1).count();
        assert!((0..3).all(|b| (0..4).all(|d| in_rows((1, b), (3, d)) >= 2)), "{:?}", covering.rows);
        assert!(covering.impossible.contains(&vec![(0, 0), (1, 0)]) && covering.impossible.contains(&vec![(2, 1), (3, 0)]));
        // No supported row has c = 1, so its combinations with 3 values of a, 3 of b and 4 of d are impossible: these 10, and others.
        assert!(covering.impossible.len() > 10, "{:?}", covering.impossible);
    }

    #[test]
    fn values_that_few_random_rows_are_supported_with_are_found() {
        const FEW: [Factor; 9] = [Factor { name: "", values: &["0", "1", "2", "3"] }; 9];
        let names = ["0", "1", "2", "3", "4", "5", "6", "7", "8"];
        let factors: Vec<Factor> = FEW.iter().zip(names).map(|(factor, name)| Factor { name, ..*factor }).collect();
        let wanted = Wanted { factors: &factors, rules: &[], of: &names, strength: 2, times: 1, hollow: ("", &[]) };
        // A row is supported if at most three of its values are not 0. Few random rows are supported.
        let covering = cover(&wanted, &|row| row.iter().filter(|value| **value > 0).count() <= 3);
        assert!(covering.impossible.is_empty(), "{} of {} combinations", covering.impossible.len(), covering.covered);
        for (a, b) in (0..9).flat_map(|a| (a + 1..9).map(move |b| (a, b))) {
            for (x, y) in (0..4).flat_map(|x| (0..4).map(move |y| (x, y))) {
                assert!(has(&covering.rows, &[(a, x), (b, y)]), "{a} {x} and {b} {y} do not meet");
            }
        }
    }

    /// Rejects about one in 60 pairs of values that are not the first of their factors.
    fn refuses_pairs(row: &Row) -> bool {
        let pairs = (0..row.len()).flat_map(|a| (a + 1..row.len()).map(move |b| (a, b))).filter(|(a, b)| row[*a] > 0 && row[*b] > 0);
        pairs.map(|(a, b)| Random::new(((a * 20 + row[a]) * 1000 + b * 20 + row[b]) as u64).bits()).any(|bits| bits % 60 == 0)
    }

    #[test]
    fn rows_that_compute_nothing_cover_nothing_else() {
        let covering = cover(&Wanted { hollow: ("a", &["0"]), ..wanted(&[], 2) }, &|_| true);
        assert!(covering.impossible.is_empty());
        let whole: Vec<Row> = covering.rows.iter().filter(|row| row[0] != 0).cloned().collect();
        assert!((0..3).all(|b| (0..4).all(|d| has(&whole, &[(1, b), (3, d)]))), "{:?}", covering.rows);
        assert!((0..4).all(|d| has(&covering.rows, &[(0, 0), (3, d)])));
        // Rows with the hollow value a = 0 do not cover combinations of other factors.
        let others = cover(&Wanted { hollow: ("a", &["0"]), of: &["b", "c", "d"], ..wanted(&[], 2) }, &|_| true);
        assert!(others.rows.iter().all(|row| row[0] != 0));
    }

    #[test]
    fn each_row_is_asked_once() {
        let questions = std::cell::RefCell::new(Vec::new());
        let covering = Strength::Two.rows(&|row| {
            questions.borrow_mut().push(row.clone());
            !refuses_pairs(row)
        });
        assert!(
            covering.rows.len() > 250 && covering.impossible.len() > 50,
            "{} rows, {} impossible",
            covering.rows.len(),
            covering.impossible.len()
        );
        assert!(covering.rows.iter().all(|row| !refuses_pairs(row)));
        let mut questions = questions.into_inner();
        let all = questions.len();
        questions.sort();
        questions.dedup();
        assert_eq!(questions.len(), all);
    }
}
