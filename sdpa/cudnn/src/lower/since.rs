//! Features of each form, and the first runtime that supports them.

use super::{Form, Job};
use crate::quirks::Passes;
use cudnn_graph::Version;
use sdpa_core::{Side, StatsBase};

/// A feature that some problems need from a form.
struct Row {
    form: Form,
    passes: Passes,
    /// Returns whether a problem needs the feature.
    needs: fn(&Job) -> bool,
    /// The first runtime that supports it; `None`: the form never does.
    since: Option<Version>,
}

const fn v(minor: u32, patch: u32) -> Option<Version> {
    Some(Version::new(9, minor, patch))
}

/// The first cuDNN version whose unified op supports masks, and whose composite form has softmax and band masks as ops.
pub const UNIFIED_SINCE: Version = Version::new(9, 21, 0);

/// The first cuDNN version with a unified attention op, still without masks.
pub const UNIFIED_PLAIN_SINCE: Version = Version::new(9, 13, 1);

/// The first cuDNN version whose heuristics offer the unified backward op, for plain attention only.
pub const UNIFIED_BACKWARD_SINCE: Version = Version::new(9, 27, 0);

/// The first cuDNN version whose softmax supports a sink.
pub const SINK_SINCE: Version = Version::new(9, 13, 0);

/// The first cuDNN version whose softmax supports stats in base 2.
pub const BASE_TWO_SINCE: Version = Version::new(9, 27, 0);

/// The first cuDNN version whose composite form supports paged keys and values.
pub const PAGED_SINCE: Version = Version::new(9, 5, 0);

/// The first cuDNN version whose attention supports 8-bit floats.
pub const FP8_SINCE: Version = Version::new(9, 1, 0);

/// The first cuDNN version whose attention supports block scales.
pub const BLOCK_SCALES_SINCE: Version = Version::new(9, 21, 0);

const ROWS: [Row; 17] = [
    Row { form: Form::Unified, passes: Passes::Forward, needs: |_| true, since: Some(UNIFIED_PLAIN_SINCE) },
    Row { form: Form::Unified, passes: Passes::Forward, needs: is_modified, since: Some(UNIFIED_SINCE) },
    Row { form: Form::Unified, passes: Passes::Forward, needs: |j| j.problem().paged().is_some(), since: v(15, 0) },
    // `row_max` and `sum_exp` are results of the op's inner softmax, which earlier runtimes lack.
    Row { form: Form::Unified, passes: Passes::Forward, needs: splits_stats, since: Some(UNIFIED_SINCE) },
    Row { form: Form::Unified, passes: Passes::Forward, needs: |j| j.problem().stats_base() == StatsBase::Two, since: None },
    Row {
        form: Form::Composite,
        passes: Passes::Forward,
        needs: |j| j.problem().stats_base() == StatsBase::Two,
        since: Some(BASE_TWO_SINCE),
    },
    // With one query, a kernel adds the sinks after the attention, so either form works.
    Row { form: Form::Unified, passes: Passes::Forward, needs: |j| j.problem().sink() && j.problem().seq_q() > 1, since: None },
    // Works around `Quirk::ScoreModsOfPagedDecode`.
    Row { form: Form::Unified, passes: Passes::Forward, needs: |j| is_paged_decode(j) && j.problem().score_mod().is_some(), since: None },
    // From 9.22 on the unified op supports dropout, but only for inference (without stats).
    Row { form: Form::Unified, passes: Passes::Both, needs: |j| j.problem().dropout().is_some(), since: None },
    // This tests the keys instead of `packed()`, which is also set for packed queries over a paged KV cache.
    Row { form: Form::Unified, passes: Passes::Both, needs: |j| j.problem().packs(Side::Keys), since: None },
    // The unified op supports FP8 from 9.25 on. The composite form is used instead, because older runtimes support it too.
    Row { form: Form::Unified, passes: Passes::Both, needs: |j| j.problem().dtype().is_fp8(), since: None },
    Row { form: Form::Unified, passes: Passes::Backward, needs: |_| true, since: Some(UNIFIED_BACKWARD_SINCE) },
    Row { form: Form::Unified, passes: Passes::Backward, needs: |j| is_modified(j) || asks_for_more(j), since: None },
    Row { form: Form::Composite, passes: Passes::Both, needs: |_| true, since: v(0, 0) },
    Row { form: Form::Composite, passes: Passes::Both, needs: |j| j.problem().dtype().is_fp8(), since: Some(FP8_SINCE) },
    Row { form: Form::Composite, passes: Passes::Forward, needs: |j| j.problem().block_scaled(), since: Some(BLOCK_SCALES_SINCE) },
    Row { form: Form::Composite, passes: Passes::Forward, needs: |j| j.problem().paged().is_some(), since: Some(PAGED_SINCE) },
];

fn is_modified(job: &Job) -> bool {
    !job.problem().kept().is_full() || job.problem().score_mod().is_some()
}

/// Returns whether the pass has one query per batch entry over pages.
fn is_paged_decode(job: &Job) -> bool {
    job.problem().paged().is_some() && job.problem().seq_q() == 1
}

/// Returns whether the pass returns row maxima or sums of exponentials.
fn splits_stats(job: &Job) -> bool {
    job.problem().row_max() || job.problem().sum_exp()
}

/// Returns whether the pass needs parameter gradients or determinism.
fn asks_for_more(job: &Job) -> bool {
    match job {
        Job::Forward(_) => false,
        Job::Backward(b) => !b.wrt().is_empty() || b.deterministic(),
    }
}

fn takes(job: &Job, form: Form, runtime: Version) -> bool {
    let of_pass = |row: &&Row| match (row.passes, job) {
        (Passes::Both, _) | (Passes::Forward, Job::Forward(_)) | (Passes::Backward, Job::Backward(_)) => true,
        (Passes::Forward, Job::Backward(_)) | (Passes::Backward, Job::Forward(_)) => false,
    };
    let needed = ROWS.iter().filter(|row| row.form == form).filter(of_pass).filter(|row| (row.needs)(job));
    needed.map(|row| row.since).all(|since| since.is_some_and(|since| runtime >= since))
}

/// Returns the forms of graphs to try for a pass on a version of cuDNN, the better one first.
///
/// Usually composite comes first. Measured on an H200 under 9.27, both are equally fast for plain bands, and the unified form skips no blocks of a
/// mask lowered to ops. For one query over pages, unified comes first: it handles lengths itself. The composite form masks scores instead.
pub fn forms(job: &Job, runtime: Version) -> &'static [Form] {
    match [Form::Composite, Form::Unified].map(|form| takes(job, form, runtime)) {
        [true, true] if is_paged_decode(job) => &[Form::Unified, Form::Composite],
        [true, true] => &[Form::Composite, Form::Unified],
        [true, false] => &[Form::Composite],
        [false, true] => &[Form::Unified],
        [false, false] => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Paged, Shape};

    #[test]
    fn score_mods_of_one_query_over_pages_are_composite() {
        let asked = |seq_q: i64, texts: [&str; 2]| {
            let shape = Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q, seq_kv: 75, dim_qk: 64, dim_v: 64 };
            let mut spec = AttentionSpec::paged(DType::BF16, shape, Paged::new(16, 15));
            let [score_mod, mask] = texts;
            spec.score_mods.extend((!score_mod.is_empty()).then(|| score_mod.parse().unwrap()));
            spec.masks.extend((!mask.is_empty()).then(|| mask.parse().unwrap()));
            forms(&spec.validate().unwrap().into(), Version::new(9, 27, 0)).to_vec()
        };
        assert_eq!(asked(1, ["softcap:5", ""]), [Form::Composite]);
        assert_eq!(asked(1, ["tensor t[batch, head]: f32; score * t", "causal"]), [Form::Composite]);
        assert_eq!(asked(1, ["", ""]), [Form::Unified, Form::Composite]);
        assert_eq!(asked(1, ["", "dilated:3"]), [Form::Unified, Form::Composite]);
        assert_eq!(asked(2, ["softcap:5", ""]), [Form::Composite, Form::Unified]);
    }
}
