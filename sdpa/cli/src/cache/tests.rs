//! Traces made by hand, and their findings.

use super::advice::Kind;
use super::attempt::{Phase, Took, micros};
use super::findings::{CacheFindings, Findings, analyse};
use super::keys::Count;
use super::page;
use sdpa::cache::{BuildTime, CacheEvent, CacheSnapshot, CacheStats, CacheTrace, EntryFacts, Limits, Weight, What, Why};
use std::num::NonZeroUsize;
use std::time::Duration;

const MS: u64 = 1000;
const S: u64 = 1000 * MS;

fn told(took: Took) -> BuildTime {
    let Took { total, lower, heuristics, compile, tune, load } = took;
    let [total, lower, heuristics, compile, tune, load] = [total, lower, heuristics, compile, tune, load].map(Duration::from_micros);
    BuildTime { total, lower, heuristics, compile, tune, load }
}

/// A cache snapshot to which tests add events.
struct Hand(CacheSnapshot);

impl Hand {
    fn new() -> Hand {
        let (stats, limits) = (CacheStats::default(), Limits::entries(NonZeroUsize::new(4).unwrap()));
        let name = "forward".to_owned();
        Hand(CacheSnapshot { version: 1, name, at: Duration::ZERO, limits, stats, entries: Vec::new(), events: Vec::new(), forgotten: 0 })
    }

    fn event(&mut self, label: &str, what: What) {
        let (at, hits_so_far) = (self.0.at, self.0.stats.hits);
        self.0.events.push(CacheEvent { at, label: label.to_owned(), hits_so_far, what });
    }

    /// Adds `hits` hits, spread over `us` microseconds.
    fn hits(&mut self, hits: u64, us: u64) {
        self.0.stats.hits += hits;
        self.0.at += Duration::from_micros(us);
    }

    fn miss(&mut self, label: &str, nearest: &[&str], evicted: Option<Why>) {
        self.0.stats.misses += 1;
        self.0.stats.rebuilt += u64::from(evicted.is_some());
        self.event(label, What::Missed { nearest: nearest.iter().map(|&text| text.to_owned()).collect(), evicted });
    }

    /// Adds a build and returns the number of its entry.
    fn build(&mut self, label: &str, nearest: &[&str], evicted: Option<Why>, time: Took) -> u64 {
        self.miss(label, nearest, evicted);
        self.0.at += Duration::from_micros(time.total);
        let id = self.0.entries.len() as u64 + 1;
        let weight = Weight { host: 1 << 10, device: 2 << 10, workspace: 1 << 20 };
        self.event(label, What::Built { id, engine: "eng1".to_owned(), time: told(time), weight });
        let (label, engine) = (label.to_owned(), "eng1".to_owned());
        self.0.entries.push(EntryFacts { id, label, made: self.0.at, built: told(time), hits: 0, weight, engine, pinned: false });
        id
    }

    fn evict(&mut self, label: &str, id: u64, hits: u64, why: Why) {
        self.0.stats.evictions += 1;
        self.event(label, What::Evicted { id, hits, why });
    }

    fn findings(self) -> Findings {
        analyse(&CacheTrace { cudnn: "9.27.0".to_owned(), device: "NVIDIA H200".to_owned(), caches: vec![self.0] })
    }

    fn found(self) -> CacheFindings {
        self.findings().caches.remove(0)
    }
}

/// Returns the times of a build: lowering, heuristics and other work.
fn quick(ms: u64) -> Took {
    Took { total: ms * MS, lower: ms * MS / 10, heuristics: ms * MS / 2, ..Took::default() }
}

/// Three keys that are built once and looked up all the time.
fn calm() -> Hand {
    let mut hand = Hand::new();
    for label in ["a", "b", "c"] {
        hand.build(label, if label == "a" { &[] } else { &["seq_q 1 ≠ 2"] }, None, quick(50));
        hand.hits(1000, S);
    }
    hand.hits(100_000, 57 * S);
    hand
}

/// A steady sequence of builds that differ in a field.
fn differing(nearest: impl Fn(usize) -> Vec<String>) -> Hand {
    let mut hand = Hand::new();
    for n in 0..40 {
        let nearest = nearest(n);
        let nearest: Vec<&str> = nearest.iter().map(String::as_str).collect();
        hand.build(&format!("key {n}"), &nearest, None, quick(20));
        hand.hits(3, 30 * MS);
    }
    hand
}

#[test]
fn builds_are_grouped_by_label_and_earn_the_hits_of_their_entries() {
    let mut hand = Hand::new();
    let first = hand.build("a", &[], None, quick(10));
    hand.build("b", &["seq_q 1 ≠ 2"], None, quick(25));
    hand.evict("a", first, 7, Why::Entries);
    hand.build("a", &[], Some(Why::Entries), quick(20));
    hand.0.entries.remove(0);
    hand.0.entries[1].hits = 5;
    hand.miss("a", &[], None);
    hand.0.at += Duration::from_micros(40 * MS);
    hand.event("a", What::Failed { error: "no memory".to_owned() });
    let found = hand.found();
    let [a, b] = &found.keys[..] else { panic!("{:?}", found.keys) };
    assert_eq!((a.label.as_str(), a.builds, a.failed, a.total_us, a.mean_us, a.hits), ("a", 2, 1, 70 * MS, 70 * MS / 3, 12));
    assert_eq!(
        (&a.evictions[..], a.engine.as_str(), a.bytes),
        (&[Count { why: Why::Entries, count: 1 }][..], "eng1", (1 << 20) + (3 << 10))
    );
    assert_eq!((b.label.as_str(), b.builds, b.hits, found.figures.builds, found.figures.keys), ("b", 1, 0, 4, 2));
}

#[test]
fn misses_are_grouped_by_the_set_of_fields_that_differ() {
    let mut hand = Hand::new();
    hand.build("a", &[], None, quick(1));
    hand.build("b", &["seq_q 1 ≠ 2", "seq_kv 1 ≠ 2"], None, quick(10));
    hand.build("c", &["seq_kv 3 ≠ 2", "seq_q 3 ≠ 2"], None, quick(30));
    hand.build("d", &["layout of q [1, 2, 3, 4] ≠ bhsd"], None, quick(20));
    hand.build("b", &["seq_q 1 ≠ 2", "seq_kv 1 ≠ 2"], Some(Why::Bytes), quick(5));
    hand.0.entries[2].hits = 9;
    let found = hand.found();
    let rows: Vec<_> = found.reasons.iter().map(|r| (r.text(), r.misses, r.total_us / MS, r.hits, r.example.label.as_str())).collect();
    let wanted = [
        ("differs in seq_q, seq_kv", 2, 40, 9, "c"),
        ("differs in layout of q", 1, 20, 0, "d"),
        ("evicted earlier: the bound on bytes; the nearest differs in seq_q, seq_kv", 1, 5, 0, "b"),
        ("the first of its kind", 1, 1, 0, "a"),
    ];
    assert_eq!(rows, wanted.map(|(text, misses, ms, hits, label)| (text.to_owned(), misses, ms, hits, label)));
    assert_eq!(found.reasons[1].example.differences[0].asked, "[1, 2, 3, 4]");
}

#[test]
fn the_hit_rate_comes_from_hits_between_events() {
    let mut hand = Hand::new();
    // There is no lookup for 30 s, then one hit per miss for 30 s, then only hits for 60 s.
    hand.0.at = Duration::from_micros(30 * S);
    for n in 0..30 {
        hand.build(&format!("key {n}"), &[], None, Took { total: 250 * MS, ..Took::default() });
        hand.hits(1, 750 * MS);
    }
    hand.event("", What::Resized { limits: Limits::default() });
    hand.hits(600, 60 * S);
    let found = hand.found();
    let bins = &found.timeline.bins;
    assert_eq!(bins.len(), 120);
    assert!(bins[..30].iter().all(|bin| bin.hit_rate.is_none()));
    let rates = |part: &[super::timeline::Bin]| part.iter().filter_map(|bin| bin.hit_rate).sum::<f64>() / part.len() as f64;
    assert!((rates(&bins[30..60]) - 0.5).abs() < 0.05, "{}", rates(&bins[30..60]));
    assert!(bins[61..].iter().all(|bin| bin.hit_rate == Some(1.0) && (bin.hits - 10.0).abs() < 1e-6));
    assert_eq!(bins.iter().map(|bin| bin.misses).sum::<u64>(), 30);
    assert!((bins.iter().map(|bin| bin.hits).sum::<f64>() - 630.0).abs() < 1e-6);
    assert!(bins[30..60].iter().all(|bin| bin.building_us.total.abs_diff(250 * MS) <= 1));
    assert_eq!(found.figures.building_us.total, 7500 * MS);
}

#[test]
fn builds_at_the_same_time_have_lanes_of_their_own() {
    let mut hand = Hand::new();
    for (label, at, ms) in [("a", 100, 100), ("b", 150, 100), ("c", 200, 90), ("d", 300, 40)] {
        hand.0.at = Duration::from_micros((at - ms) * MS);
        hand.build(label, &[], None, quick(ms));
    }
    let found = hand.found();
    let lanes: Vec<usize> = found.timeline.bars.iter().map(|bar| bar.lane).collect();
    assert_eq!((lanes, found.timeline.at_once), (vec![0, 1, 0, 0], 2));
}

#[test]
fn every_phase_is_drawn_over_time_and_in_the_bars() {
    let ms = |n| n * MS;
    let time = Took { total: ms(210), lower: ms(10), heuristics: ms(20), compile: ms(30), tune: ms(40), load: ms(50) };
    let mut hand = Hand::new();
    hand.build("a", &[], None, time);
    let page = page::render(&hand.findings());
    for phase in Phase::ALL {
        let drawn = page.matches(&format!("<path class=\"{}\"", phase.name())).count();
        assert_eq!(drawn, 2, "{}", phase.name());
    }
}

#[test]
fn advice_is_given_where_it_is_deserved() {
    let scalar = "score_mod tanh(score / 2.0) * 2.0 ≠ tanh(score / 3.0) * 3.0".to_owned();
    let again = |why: Why| {
        let mut hand = calm();
        hand.evict("a", 1, 9, why);
        hand.build("a", &[], Some(why), quick(10));
        hand
    };
    let refused = |builds: u64, refusals: u64| {
        let mut hand = calm();
        for _ in 0..builds {
            hand.miss("no engine", &[], None);
            hand.event("no engine", What::Unsupported { error: "dim is 7".to_owned() });
        }
        hand.0.stats.refusals = refusals;
        hand
    };
    let changed = |change: fn(&mut Hand)| {
        let mut hand = calm();
        change(&mut hand);
        hand
    };
    let slow = |hand: &mut Hand| {
        hand.build("slow", &[], None, Took { total: 2 * S, compile: 1900 * MS, ..Took::default() });
    };
    let lengths = |n: usize| vec![format!("seq_q {} ≠ 64", 100 + 20 * n), format!("seq_kv {} ≠ 64", 100 + 20 * n)];
    let rows: Vec<(&str, Hand, Vec<Kind>, &str)> = vec![
        ("calm", calm(), vec![Kind::Calm], "Nothing is wrong."),
        ("nothing", Hand::new(), vec![Kind::Calm], "no lookups"),
        ("learned once", refused(1, 0), vec![Kind::Calm], "of lookups found an entry"),
        ("lengths", differing(lengths), vec![Kind::Keys], "40 lengths from 100 to 880, rounded up to multiples of 64, become 13 lengths"),
        ("lengths", differing(lengths), vec![Kind::Keys], "with length buckets"),
        ("constants", differing(|_| vec![scalar.clone()]), vec![Kind::Keys], "p.scalar"),
        ("layouts", differing(|_| vec!["layout of q bhsd ≠ bshd".to_owned()]), vec![Kind::Keys], "in one layout"),
        ("unlike", differing(|_| vec!["dtype f16 ≠ bf16".to_owned()]), vec![Kind::Calm], "Nothing is wrong."),
        ("entries", again(Why::Entries), vec![Kind::Entries], "Raise the bound on entries"),
        ("bytes", again(Why::Bytes), vec![Kind::Bytes], "Raise the bound on bytes"),
        ("cleared", again(Why::Cleared), vec![Kind::Cleared], "Do not clear"),
        ("resized", again(Why::Resized), vec![Kind::Resized], "3 keys"),
        ("asked twice", refused(2, 0), vec![Kind::Unsupported], "The last, no engine: dim is 7"),
        ("refused", refused(1, 5), vec![Kind::Unsupported], "5 lookups answered from memory"),
        ("not kept", changed(|hand| hand.0.stats.not_kept = 2), vec![Kind::NotKept], "2 values were not kept"),
        ("thrashing", changed(|hand| hand.event("", What::Thrashing { rebuilt: 9, of: 16 })), vec![Kind::Thrashing], "9 of the last 16"),
        (
            "failures",
            changed(|hand| hand.event("x", What::Failed { error: "no memory".to_owned() })),
            vec![Kind::Failures],
            "1 build failed. The last, x: no memory",
        ),
        ("compile", changed(slow), vec![Kind::Calm, Kind::Compile], "Compilation took 1.9 s of 2.15 s"),
    ];
    for (name, hand, kinds, text) in rows {
        let found = hand.found();
        assert_eq!(found.advice.iter().map(|advice| advice.kind).collect::<Vec<_>>(), kinds, "{name}: {:#?}", found.advice);
        let told = found.advice.iter().any(|advice| format!("{} {}", advice.text, advice.because).contains(text));
        assert!(told, "{name}: {:#?}", found.advice);
        assert_eq!(found.healthy, kinds[0] == Kind::Calm, "{name}");
    }
}

#[test]
fn a_bound_is_raised_to_what_holds_every_key() {
    let mut hand = Hand::new();
    for n in 0..10 {
        hand.build(&format!("key {}", n % 6), &[], (n >= 6).then_some(Why::Entries), quick(10));
    }
    let told = hand.found().advice.remove(0);
    assert_eq!(told.text, "Raise the bound on entries from 4 to 6 or more, to hold every key of this trace.");
    assert_eq!(told.because, "4 builds were of keys that the bound on entries had evicted; they took 40 ms.");
}

#[test]
fn a_verdict_is_a_sentence() {
    let verdict = |hand: Hand| hand.found().verdict;
    assert_eq!(verdict(Hand::new()), "This cache had no lookups.");
    let lengths = verdict(differing(|_| vec!["seq_q 1 ≠ 2".to_owned(), "seq_kv 1 ≠ 2".to_owned()]));
    let wanted = "40 builds took 800 ms of 2 s; all of them differ from an entry only in seq_q, seq_kv; 75 % of 160 lookups hit.";
    assert_eq!(lengths, wanted);
    let mut hand = Hand::new();
    for label in ["a", "b", "c"] {
        hand.build(label, if label == "a" { &[] } else { &["batch 1 ≠ 2"] }, None, quick(100));
        hand.0.at = Duration::from_micros(50 * MS);
    }
    hand.0.at = Duration::from_micros(150 * MS);
    let wanted = "3 builds took 300 ms of threads' time in 150 ms; 2 of them differ from an entry only in batch; 0 % of 3 lookups hit.";
    assert_eq!(verdict(hand), wanted);
}

#[test]
fn whatever_a_trace_says_is_escaped_and_cut() {
    let mut hand = calm();
    let bad = format!("k <= q && <script>alert(\"1\")</script>\0 {}", "x".repeat(100_000));
    hand.0.name = bad.clone();
    hand.build(&bad, &[&format!("{bad} {bad} ≠ {bad}"), &bad, "≠", ""], Some(Why::Entries), quick(900));
    hand.miss(&bad, &[], None);
    hand.event(&bad, What::Unsupported { error: bad.clone() });
    hand.0.stats.refusals = 1;
    let mut findings = hand.findings();
    (findings.device, findings.cudnn) = (bad.clone(), bad);
    findings.caches.push(calm().found());
    let page = page::render(&findings);
    assert!(!page.contains("<script") && !page.contains('\0') && page.contains("k &lt;= q &amp;&amp; &lt;script&gt;"));
    assert!(page.len() < 100_000, "{}", page.len());
    // The page loads no other resource.
    assert!(["http", "src=", "url(", "@import", "<link"].iter().all(|what| !page.contains(what)));
}

#[test]
fn numbers_without_sense_do_no_harm() {
    let huge = Took { total: u64::MAX, lower: u64::MAX, heuristics: u64::MAX, compile: 1, tune: u64::MAX, load: u64::MAX };
    let weight = Weight { host: u64::MAX, device: u64::MAX, workspace: u64::MAX };
    for (at, forgotten) in [(0, 0), (u64::MAX, 0), (u64::MAX, u64::MAX), (5, 1)] {
        let mut hand = Hand::new();
        for time in [huge, Took::default(), Took { compile: 9, ..Took::default() }] {
            hand.miss("a", &["seq_q 18446744073709551615 ≠ 0"], Some(Why::Bytes));
            hand.event("a", What::Built { id: 0, engine: String::new(), time: told(time), weight });
            // Let time and hits decrease, which a valid file never does.
            hand.0.at = if hand.0.at.is_zero() { Duration::from_micros(u64::MAX) } else { Duration::ZERO };
            hand.0.stats.hits = micros(hand.0.at);
        }
        hand.evict("b", u64::MAX, u64::MAX, Why::Resized);
        (hand.0.at, hand.0.forgotten) = (Duration::from_micros(at), forgotten);
        hand.0.stats = CacheStats { hits: u64::MAX, misses: u64::MAX, weight, ..CacheStats::default() };
        let findings = hand.findings();
        let page = page::render(&findings);
        assert!(!page.contains("NaN") && !page.contains("inf"), "{at} {forgotten}");
        serde_json::to_string(&findings).unwrap();
    }
}
