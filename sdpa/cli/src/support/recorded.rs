//! Recorded answers of cuDNN versions that are not installed: counts by kind of problem. The pages of `docs/support.md` are made from this table too.

use cudnn_graph::Version;
use sdpa::cudnn::lower::Job;
use serde::Serialize;

/// Tab-separated: runtime, kind, pass, device, problems, supported, rejected by engines, and the engines' messages.
const TABLE: &str = include_str!("recorded.tsv");

/// Maximum number of messages.
const MOST: usize = 3;

/// Answers of a version about problems of a kind on one device.
#[derive(Debug, Serialize)]
pub(super) struct Recorded {
    runtime: &'static str,
    kind: &'static str,
    pass: &'static str,
    problems: u32,
    supported: u32,
    /// Problems that rules accept and engines reject.
    unsupported_by_engines: u32,
    words: Vec<&'static str>,
}

impl Recorded {
    /// Returns the row for a job; `None` if there are no recorded answers for the version or the device.
    pub(super) fn of(job: &Job, version: Version, device: &str) -> Option<Recorded> {
        let (wanted, pass) = (kind(job), if matches!(job, Job::Forward(_)) { "forward" } else { "backward" });
        TABLE.lines().filter_map(row).find_map(|[runtime, kind, of_pass, on, problems, supported, engines, words]| {
            let here = format!("{version}.").starts_with(&format!("{runtime}.")) && (kind, of_pass, on) == (wanted, pass, device);
            here.then(|| Recorded {
                runtime,
                kind,
                pass: of_pass,
                problems: problems.parse().unwrap_or(0),
                supported: supported.parse().unwrap_or(0),
                unsupported_by_engines: engines.parse().unwrap_or(0),
                words: words.split(" / ").filter(|words| !words.is_empty()).collect(),
            })
        })
    }

    pub(super) fn text(&self) -> String {
        let Recorded { runtime, kind, pass, problems, supported, unsupported_by_engines, words } = self;
        let kind = if kind.is_empty() { "without optional features" } else { kind };
        let mut text = format!("{runtime} itself was tested with {problems} problems ({kind}, {pass}) and supports {supported}");
        if *unsupported_by_engines > 0 {
            let more = if words.len() > MOST { "; and others" } else { "" };
            let told = words[..words.len().min(MOST)].join("; ");
            text.push_str(&format!("; its engines reject {unsupported_by_engines} that the known rules accept: {told}{more}"));
        }
        text
    }
}

fn row(line: &'static str) -> Option<[&'static str; 8]> {
    line.split('\t').collect::<Vec<_>>().try_into().ok()
}

/// Returns the kind of a job: the feature with the largest effect on support.
fn kind(job: &Job) -> &'static str {
    let p = job.problem();
    let kinds = [
        (p.dtype().is_fp8(), "FP8"),
        (p.paged().is_some(), "paged KV caches"),
        (p.dropout().is_some(), "dropout"),
        (p.sink(), "sinks"),
        (p.packed().is_some(), "packed sequences"),
        (p.score_mod().is_some() || p.kept().rest.is_some(), "score_mods and masks other than bands"),
    ];
    kinds.into_iter().find(|(has, _)| *has).map_or("", |(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa::{AttentionSpec, DType, Layout, Paged, Shape};

    #[test]
    fn every_kind_of_every_version_that_is_kept_has_counts() {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 4, seq_q: 64, seq_kv: 64, dim_qk: 64, dim_v: 64 };
        let spec = |dtype| AttentionSpec::dense(dtype, shape, Layout::Bshd);
        let paged = AttentionSpec::paged(DType::BF16, shape, Paged::new(16, 9));
        let capped = spec(DType::BF16).score_mod("softcap:30".parse().unwrap());
        let specs =
            [spec(DType::BF16), paged, capped, spec(DType::F8E4M3), spec(DType::BF16).with_sink(), spec(DType::BF16).with_dropout(0.5)];
        for minor in [13, 19, 27, 28] {
            for spec in &specs {
                let job = spec.validate().unwrap().into();
                let told = Recorded::of(&job, Version::new(9, minor, 0), "a100").unwrap();
                let Recorded { problems, supported, unsupported_by_engines, .. } = told;
                assert!(
                    problems > 10 && supported + unsupported_by_engines <= problems && told.text().contains(told.kind),
                    "{}",
                    told.text()
                );
            }
        }
        let job = specs[0].validate().unwrap().into();
        assert!(
            Recorded::of(&job, Version::new(9, 1, 0), "a100").is_none() && Recorded::of(&job, Version::new(9, 13, 0), "mine").is_none()
        );
    }

    #[test]
    fn every_line_of_the_table_is_read() {
        assert!(TABLE.lines().count() > 100 && TABLE.lines().all(|line| row(line).is_some()));
    }
}
