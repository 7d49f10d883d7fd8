//! What a day runs of a long list: a core that has everything that any entry has, every day, and a share of the others, another each day.

use crate::case::Case;
use crate::golden::blessing;
use crate::say::say;
use std::collections::BTreeSet;
use std::time::SystemTime;

/// The variable that says which share of the lists a run takes: `all` of them, or as `3/6` one of so many.
pub const VARIABLE: &str = "SDPA_SHARE";

/// Days until every case of a suite has been run, where nothing is said.
pub const DAYS: u64 = 6;

/// A part of a list: the first entry, and how many there are to each that is taken.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    first: usize,
    of: usize,
}

impl Share {
    /// `all`, or `3/40`: the third of forty shares.
    ///
    /// # Errors
    /// What else it is.
    pub fn parse(text: &str) -> Result<Share, String> {
        let share = match text.split_once('/') {
            None => (text == "all").then_some(Share { first: 0, of: 1 }),
            Some((nth, of)) => nth.parse().ok().zip(of.parse().ok()).and_then(|(nth, of)| {
                let nth: usize = nth;
                (1..=of).contains(&nth).then(|| Share { first: nth - 1, of })
            }),
        };
        share.ok_or_else(|| format!("{text:?}: expected all, or a share such as 3/40"))
    }

    /// What a variable says, or else one of so many shares, another each day.
    pub fn wanted(variable: &str, shares: u64) -> String {
        std::env::var(variable).unwrap_or_else(|_| format!("{}/{shares}", days() % shares + 1))
    }

    /// Whether an entry, by its place, is of this share.
    pub fn has(self, nth: usize) -> bool {
        nth % self.of == self.first
    }

    /// The entries of this share.
    pub fn take<T>(self, list: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
        list.into_iter().skip(self.first).step_by(self.of)
    }
}

/// Days since 1970-01-01.
fn days() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400)
}

/// Whether lists are run as a whole: where that is asked for, and where golden files are rewritten.
pub fn is_whole() -> bool {
    std::env::var(VARIABLE).is_ok_and(|share| share == "all") || blessing()
}

/// What a run takes of a list, in its order, so that all of it has been run after so many days: entries that have between them whatever any `has`, and a share of the
/// others. Says how much that is.
///
/// # Panics
/// Where [`VARIABLE`] is no share.
pub fn of_today<T>(what: &str, days: u64, list: Vec<T>, has: impl Fn(&T) -> Vec<String>) -> Vec<T> {
    let (list, told) = pick(days, list, has);
    say(&format!("{what}: {told}"));
    list
}

/// The entry of a short list whose turn it is today; all of them where lists run as a whole. Says which.
pub fn one_of_today<T: Copy + std::fmt::Debug>(what: &str, list: &[T]) -> Vec<T> {
    let turn = days() as usize % list.len().max(1);
    let taken = if is_whole() { list.to_vec() } else { list.iter().copied().skip(turn).take(1).collect() };
    say(&format!("{what}: runs {taken:?} today; the list has {} entries", list.len()));
    taken
}

/// As [`of_today`], with what it says in place of saying it.
///
/// # Panics
/// Where [`VARIABLE`] is no share.
pub fn pick<T>(days: u64, list: Vec<T>, has: impl Fn(&T) -> Vec<String>) -> (Vec<T>, String) {
    let wanted = if is_whole() { "all".to_owned() } else { Share::wanted(VARIABLE, days) };
    let share = Share::parse(&wanted).unwrap_or_else(|why| panic!("{VARIABLE}={why}"));
    let core = core(&list.iter().map(has).collect::<Vec<_>>());
    let others: Vec<usize> = (0..list.len()).filter(|n| !core.contains(n)).collect();
    let others: BTreeSet<usize> = share.take(others).collect();
    let (all, always) = (list.len(), core.len());
    let (today, rest) = (others.len(), all - always);
    let told = format!("{always} core entries (run every day) and {today} of {rest} other entries, {VARIABLE}={wanted}");
    let list = list.into_iter().enumerate().filter(|(n, _)| core.contains(n) || others.contains(n));
    (list.map(|(_, entry)| entry).collect(), told)
}

/// Entries of a hand-written list that the daily covering replaces: none without [`VARIABLE`], else the share that it asks for. Reports how many.
///
/// # Panics
/// Where [`VARIABLE`] is no share.
pub fn on_request<T>(what: &str, list: Vec<T>) -> Vec<T> {
    if !is_whole() && std::env::var(VARIABLE).is_err() {
        say(&format!("{what}: {} cases do not run, because covering arrays replace them; {VARIABLE}=all runs them", list.len()));
        return Vec::new();
    }
    of_today(what, 1, list, |_| Vec::new())
}

/// Seeds that no earlier day had: those that `SDPA_SEED` and `SDPA_CASES` ask for, else `most` of the day. Where lists run as a whole, `1..=most`.
pub fn new_seeds(what: &str, most: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, n) = (number("SDPA_SEED"), number("SDPA_CASES"));
    let of_day = if is_whole() { 1 } else { days() * most + 1 };
    let first_seed = first.unwrap_or(of_day);
    let seeds: Vec<u64> = (first_seed..).take(n.unwrap_or(most) as usize).collect();
    say(&format!("random problems {what}: SDPA_SEED={first_seed} SDPA_CASES={}", seeds.len()));
    seeds
}

/// Seeds of a sweep: those that `SDPA_SEED` and `SDPA_CASES` ask for, else a third of the first so many, others each day.
pub fn seeds_of_today(what: &str, most: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match (number("SDPA_SEED"), number("SDPA_CASES")) {
        (None, None) => of_today(&format!("random seeds {what}"), DAYS / 2, (1..=most).collect(), |_| Vec::new()),
        (first, n) => (first.unwrap_or(1)..).take(n.unwrap_or(most) as usize).collect(),
    }
}

/// Entries that have between them what any has: always the one that adds the most, the first of such.
fn core(has: &[Vec<String>]) -> BTreeSet<usize> {
    let mut missing: BTreeSet<&String> = has.iter().flatten().collect();
    let mut core = BTreeSet::new();
    while !missing.is_empty() {
        let adds = |n: &usize| has[*n].iter().filter(|feature| missing.contains(feature)).count();
        let Some(most) = (0..has.len()).rev().max_by_key(adds) else { break };
        has[most].iter().for_each(|feature| {
            missing.remove(feature);
        });
        core.insert(most);
    }
    core
}

/// What a case has that others may have not: types, masks and score_mods by their names, options, and what heads, lengths and dims are like.
pub fn features(case: &Case) -> Vec<String> {
    let shape = &case.shape;
    let of_library = |kind: &str, text: &String| format!("{kind} {}", text.split([':', ' ', '(']).next().unwrap_or_default());
    let mut features = vec![
        format!("{}", case.dtype),
        format!("{}", case.layout.name()),
        format!("{} query heads to a key head", if shape.heads_kv == 1 { 0 } else { (shape.heads_q / shape.heads_kv).min(2) }),
        format!("dims up to {}", [32, 64, 128, 192, 256].into_iter().find(|most| shape.dim_qk.max(shape.dim_v) <= *most).unwrap_or(0)),
        format!("rows of whole {}", [16, 8, 1].into_iter().find(|n| shape.dim_qk % n == 0 && shape.dim_v % n == 0).unwrap_or(1)),
    ];
    features.extend(case.mask.iter().map(|mask| of_library("mask", mask)));
    features.extend(case.score_mod.iter().map(|score_mod| of_library("score_mod", score_mod)));
    let backward = case.backward.as_ref();
    let flags = [
        (case.mask.is_empty(), "no mask"),
        (case.mask.len() > 1, "several masks"),
        (shape.seq_q == 1, "one query"),
        ((2..=8).contains(&shape.seq_q), "few queries"),
        (shape.seq_q > shape.seq_kv, "fewer keys than queries"),
        (shape.dim_qk != shape.dim_v, "dims differ"),
        (case.o_dtype.is_some(), "another type of output"),
        (case.block_scaled, "block scales"),
        (case.sink, "sink"),
        (case.dropout.is_some(), "dropout"),
        (case.stats, "stats"),
        (case.row_max || case.sum_exp, "row statistics"),
        (case.batch_invariant, "batch-invariant"),
        (case.attn_scale.is_some(), "scale"),
        (case.q_gap + case.kv_gap + case.o_gap > 0, "gaps"),
        (case.packed_qkv, "packed qkv"),
        (case.packed.is_some(), "packed"),
        (case.packed.as_ref().is_some_and(|packing| packing.packed().cross), "packed apart"),
        (case.packed.as_ref().is_some_and(|packing| packing.packed().wide), "packed wide"),
        (case.paged.is_some(), "paged"),
        (backward.is_some_and(|backward| backward.deterministic), "deterministic"),
        (backward.is_some_and(|backward| !backward.wrt.is_empty()), "gradients of parameters"),
    ];
    features.extend(flags.into_iter().filter(|(has, _)| *has).map(|(_, name)| name.to_owned()));
    features
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_all_or_one_of_so_many() {
        let taken = |text: &str| Share::parse(text).map(|share| share.take(0..7).collect::<Vec<_>>());
        assert_eq!(taken("all").unwrap(), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(taken("2/3").unwrap(), [1, 4]);
        assert!(taken("0/3").is_err() && taken("4/3").is_err() && taken("most").is_err());
    }

    #[test]
    fn the_core_has_everything_and_nothing_for_nothing() {
        let has = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let list = [has(&["a"]), has(&["a", "b"]), has(&["c"]), has(&["b", "c"]), has(&["a"])];
        assert_eq!(core(&list).into_iter().collect::<Vec<_>>(), [1, 2]);
        let all: Vec<Vec<String>> = Case::all().unwrap().iter().map(features).collect();
        let few = core(&all);
        assert!(few.len() < all.len() / 2, "{} of {}", few.len(), all.len());
        let all_of = |lists: &mut dyn Iterator<Item = &Vec<String>>| lists.flatten().cloned().collect::<BTreeSet<_>>();
        assert_eq!(all_of(&mut few.iter().map(|n| &all[*n])), all_of(&mut all.iter()));
    }
}
