//! Reports of caches, from outside: of a cache that was really used, and of files that are no traces.

use super::show::elements;
use super::tool::{Folder, code, errors, json, sdpa, stdout, words};
use sdpa::cache::{BuildError, BuildTime, CacheKey, CacheTrace, CacheValue, Fields, Limits, PlanCache, Weight};
use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

/// A length, and a mask with letters that a page must escape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key(u64, &'static str);

impl CacheKey for Key {
    fn label(&self) -> String {
        format!("forward bf16 ({}) {}", self.0, self.1)
    }

    fn fields(&self) -> Fields {
        vec![("seq_q", self.0.to_string()), ("seq_kv", self.0.to_string()), ("mask", self.1.to_owned())]
    }
}

#[derive(Clone, Debug)]
struct Value;

impl CacheValue for Value {
    fn weight(&self) -> Weight {
        Weight { host: 1 << 10, device: 2 << 10, workspace: 4 << 10 }
    }

    fn engine(&self) -> String {
        "eng2".to_owned()
    }

    fn build_time(&self) -> BuildTime {
        BuildTime { lower: Duration::from_micros(100), compile: Duration::from_micros(700), ..BuildTime::default() }
    }
}

#[derive(Debug)]
enum Failure {
    Never(String),
    Now,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Never(why) => f.write_str(why),
            Failure::Now => f.write_str("out of memory"),
        }
    }
}

impl BuildError for Failure {
    type Refusal = String;

    fn refusal(&self) -> Option<String> {
        match self {
            Failure::Never(why) => Some(why.clone()),
            Failure::Now => None,
        }
    }

    fn again(refusal: String) -> Failure {
        Failure::Never(refusal)
    }
}

type Cache = PlanCache<Key, Value, String>;

fn cache(name: &str, entries: usize) -> Cache {
    Cache::new(name, Limits::entries(NonZeroUsize::new(entries).unwrap()))
}

fn look_up(cache: &Cache, key: &Key) {
    let build = || {
        std::thread::sleep(Duration::from_millis(1));
        Ok::<Value, Failure>(Value)
    };
    cache.get_or_build(key, build).unwrap();
}

/// A cache that is too small for its lengths, and one that is not.
fn used() -> CacheTrace {
    let (forward, backward) = (cache("forward", 8), cache("backward", 8));
    for n in 0..40 {
        (0..3).for_each(|_| look_up(&forward, &Key(64 + 10 * n, "k <= q && \"a\" > b")));
    }
    (0..2).for_each(|_| (0..12).for_each(|n| look_up(&forward, &Key(7 * n, "none"))));
    for _ in 0..4 {
        forward.get_or_build::<Failure>(&Key(1, "<none>"), || Err(Failure::Never("dim & seq".to_owned()))).unwrap_err();
    }
    forward.get_or_build::<Failure>(&Key(2, "none"), || Err(Failure::Now)).unwrap_err();
    (0..500).for_each(|n| look_up(&backward, &Key(n % 4, "none")));
    CacheTrace { cudnn: "9.27.0".to_owned(), device: "a <device>".to_owned(), caches: vec![forward.snapshot(), backward.snapshot()] }
}

fn write(folder: &Folder, trace: &CacheTrace) -> String {
    let path = folder.path("trace.json");
    std::fs::write(&path, serde_json::to_string(trace).unwrap()).unwrap();
    path
}

#[test]
fn a_report_is_one_file_that_is_well_formed() {
    let folder = Folder::new();
    let (from, to) = (write(&folder, &used()), folder.path("report.html"));
    let out = sdpa(words(&format!("cache report {from} --output {to}")));
    assert_eq!(code(&out), 0, "{}", String::from_utf8_lossy(&out.stderr));
    assert!(stdout(&out).starts_with(&format!("output    {to}\n")) && out.stderr.is_empty(), "{}", stdout(&out));
    let page = std::fs::read_to_string(&to).unwrap();
    let names = elements(page.strip_prefix("<!doctype html>").unwrap());
    let count = |name: &str| names.iter().filter(|n| *n == name).count();
    assert_eq!((count("html"), count("section"), count("svg"), count("script"), count("link")), (1, 2, 2, 0, 0));
    for text in [
        "k &lt;= q &amp;&amp; &quot;a&quot; &gt; b",
        "a &lt;device&gt;",
        "&lt;none&gt;: dim &amp; seq",
        "out of memory",
        "Nothing is wrong.",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert!(["http", "src=", "url(", "@import"].iter().all(|what| !page.contains(what)));
    assert_eq!(folder.names(), ["report.html", "trace.json"]);
}

#[test]
fn findings_are_told_as_json() {
    let folder = Folder::new();
    let trace = used();
    let (from, to) = (write(&folder, &trace), folder.path("report.html"));
    let told = json(&sdpa(words(&format!("cache report {from} --output {to} --json"))));
    assert_eq!((&told["output"], &told["cudnn"], &told["device"]), (&to.into(), &"9.27.0".into(), &"a <device>".into()));
    let kinds = |cache: usize| -> Vec<String> {
        let advice = told["caches"][cache]["advice"].as_array().unwrap();
        advice.iter().map(|advice| advice["kind"].as_str().unwrap().to_owned()).collect()
    };
    let forward = kinds(0);
    assert!(["keys", "entries", "unsupported", "failures"].iter().all(|kind| forward.contains(&(*kind).to_owned())), "{forward:?}");
    assert_eq!((&kinds(1)[..], &told["caches"][1]["healthy"]), (&["calm".to_owned()][..], &true.into()));
    let figures = &told["caches"][0]["figures"];
    let stats = &trace.caches[0].stats;
    assert_eq!(figures["misses"].as_u64(), Some(stats.misses));
    // Every miss was a build: 40 lengths, two rounds of 12, and two that failed.
    assert_eq!((figures["builds"].as_u64(), figures["rebuilt"].as_u64(), figures["refusals"].as_u64()), (Some(66), Some(12), Some(3)));
    let reasons = told["caches"][0]["reasons"].as_array().unwrap();
    let lengths = reasons.iter().find(|r| r["fields"] == serde_json::json!(["seq_q", "seq_kv"]) && r["evicted"].is_null()).unwrap();
    assert!(lengths["misses"].as_u64().unwrap() >= 39, "{lengths}");
    let keys = told["caches"][0]["keys"].as_array().unwrap();
    let times: Vec<u64> = keys.iter().map(|key| key["total_us"].as_u64().unwrap()).collect();
    assert!(keys.len() == 25 && times.is_sorted_by(|a, b| a >= b) && times[0] >= 2000, "{times:?}");
}

#[test]
fn files_that_are_no_traces_are_told_with_their_rule_and_nothing_is_written() {
    let folder = Folder::new();
    let (from, to) = (folder.path("trace.json"), folder.path("report.html"));
    let good = serde_json::to_string(&used()).unwrap();
    let newer = good.replace("\"version\":1", "\"version\":2");
    let no_entries = good.replace("\"limits\":{\"entries\":8", "\"limits\":{\"entries\":0");
    let cases: Vec<(Vec<u8>, &[&str])> = vec![
        (Vec::new(), &["is empty"]),
        (b"\xff\xfe{}".to_vec(), &["is not the JSON of a CacheTrace"]),
        (b"[]".to_vec(), &["is not the JSON of a CacheTrace"]),
        (b"{}".to_vec(), &["missing field `caches`"]),
        (br#"{"cudnn":"9","device":"x","caches":[]}"#.to_vec(), &["has no caches"]),
        (br#"{"cudnn":"9","device":"x","caches":[{"version":1}]}"#.to_vec(), &["missing field `name`"]),
        (br#"{"caches":[{"version":-1}]}"#.to_vec(), &["is not the JSON of a CacheTrace"]),
        // Whatever else a newer version has.
        (br#"{"tiers":[],"caches":[{"version":7,"new":[]}]}"#.to_vec(), &["caches[0].version: got 7, expected 1"]),
        (newer.into_bytes(), &["caches[0].version: got 2", "caches[1].version: got 2"]),
        (no_entries.into_bytes(), &["nonzero"]),
        (good.as_bytes()[..good.len() / 2].to_vec(), &["EOF"]),
        ("[".repeat(100_000).into_bytes(), &["is not the JSON of a CacheTrace"]),
    ];
    for (bytes, rules) in cases {
        std::fs::write(&from, &bytes).unwrap();
        let out = sdpa(words(&format!("cache report {from} --output {to}")));
        assert_eq!(code(&out), 2, "{rules:?}");
        let told = errors(&out);
        assert_eq!(told.len(), rules.len(), "{told:?}");
        assert!(told.iter().zip(rules).all(|(line, rule)| line.starts_with(&format!("{from}: ")) && line.contains(rule)), "{told:?}");
        assert_eq!(folder.names(), ["trace.json"]);
    }
    // A file with a hole: it takes no place.
    std::fs::File::create(&from).unwrap().set_len((256 << 20) + 1).unwrap();
    let told = errors(&sdpa(words(&format!("cache report {from} --output {to}"))));
    assert!(matches!(&told[..], [line] if line.contains("is larger than 256 MiB")), "{told:?}");
}

#[test]
fn every_mistake_of_the_arguments_is_told_at_once() {
    let folder = Folder::new();
    let from = write(&folder, &used());
    for (line, rules) in [
        (format!("cache report {from} --output {from}"), &["is the input file; name another file"][..]),
        (format!("cache report {} --output /nowhere/a.html", folder.path("none")), &["cannot be read", "there is no folder /nowhere"]),
        (format!("cache report {} --output {}", folder.path(""), folder.path("a")), &["is not a file"]),
    ] {
        let out = sdpa(words(&line));
        assert_eq!(code(&out), 2, "{line}");
        let told = errors(&out);
        assert!(told.len() == rules.len() && told.iter().zip(rules).all(|(line, rule)| line.contains(rule)), "{told:?}");
        let as_json = json(&sdpa(words(&format!("{line} --json"))));
        assert_eq!((&as_json["error"]["exit_code"], &as_json["error"]["kind"]), (&2.into(), &"mistakes".into()));
    }
    assert_eq!(code(&sdpa(["cache", "report"])), 2);
    assert_eq!(folder.names(), ["trace.json"]);
}
