//! Row maxima and sums of exponentials.

use super::{forward, recorder, spec, what};
use crate::is_newer;
use conformance::recorder::entry::{DOWNLOAD, EXECUTION, FILL, UPLOAD};
use conformance::recorder::whole;
use cudnn_graph::DeviceSlice;
use half::bf16;
use sdpa::cudnn::schedule::{Role, Step};
use sdpa::{Executor, HostForward, Mask, Statistic};

/// Each goes to its own tensor of the graph, and is there exactly when it is asked for.
#[test]
fn each_statistic_is_bound_where_it_is_asked_for() {
    if !is_newer("calls::statistics::each_statistic_is_bound_where_it_is_asked_for") {
        return;
    }
    for n in 0..8 {
        let mut asked = spec();
        [asked.stats, asked.row_max, asked.sum_exp] = [1, 2, 4].map(|bit| n & bit != 0);
        let Some(f) = forward(asked) else { return };
        let memory = [(); 3].map(|()| f.recorder.buffer(2 * 8 * 64 * 4));
        let there = Statistic::ALL.map(|s| f.planned.job.problem().computes(s).then(|| whole(&memory[s as usize])));
        let [stats, row_max, sum_exp] = there;
        let call = f.memory.call(false, None).stats(stats).row_max(row_max).sum_exp(sum_exp);
        let entries = f.run(&call);
        assert_eq!(what(&entries), [EXECUTION]);
        for statistic in Statistic::ALL {
            let bound = f.planned.lowered.statistic(statistic).map(|tensor| entries[0].address(tensor.uid()));
            assert_eq!(bound, there[statistic as usize].map(|slice| Some(slice.address)), "{n}: {statistic}");
        }
        let short = |slice: DeviceSlice| DeviceSlice { bytes: slice.bytes - 1, ..slice };
        let off = |slice: DeviceSlice| DeviceSlice { address: slice.address + 8, ..slice };
        for (how, wrong) in [("short", &short as &dyn Fn(DeviceSlice) -> DeviceSlice), ("misaligned", &off)] {
            for (statistic, wrong) in [
                (Statistic::Stats, call.stats(stats.map(wrong))),
                (Statistic::RowMax, call.row_max(row_max.map(wrong))),
                (Statistic::SumExp, call.sum_exp(sum_exp.map(wrong))),
            ] {
                if there[statistic as usize].is_some() {
                    f.refused(&format!("{n}: {statistic} {how}"), &wrong);
                }
            }
        }
        let other = |statistic: Statistic| match there[statistic as usize] {
            Some(_) => None,
            None => Some(whole(&memory[statistic as usize])),
        };
        f.refused("stats", &call.stats(other(Statistic::Stats)));
        f.refused("row_max", &call.row_max(other(Statistic::RowMax)));
        f.refused("sum_exp", &call.sum_exp(other(Statistic::SumExp)));
    }
}

#[test]
fn what_is_missing_or_too_many_is_told_by_name() {
    if !is_newer("calls::statistics::what_is_missing_or_too_many_is_told_by_name") {
        return;
    }
    let Some(f) = forward(spec().with_row_max()) else { return };
    let memory = f.recorder.buffer(2 * 8 * 64 * 4);
    let wrong = f.memory.call(false, None).sum_exp(whole(&memory));
    let told = f.recorder.record(|| f.recorder.forward(&f.planned, &f.handle(), &wrong)).0.unwrap_err().to_string();
    assert!(told.contains("row_max: got nothing") && told.contains("sum_exp: got a buffer"), "{told}");
}

#[test]
fn they_come_down_to_host_memory() {
    if !is_newer("calls::statistics::they_come_down_to_host_memory") {
        return;
    }
    let Some(recorder) = recorder() else { return };
    let spec = spec().with_row_max().with_sum_exp();
    let prepared = recorder.executor().prepare(&spec.validate().unwrap()).unwrap();
    let [q, k, v, mut o] = [&spec.q, &spec.k, &spec.v, &spec.o].map(|t| vec![bf16::ZERO; t.extent().unwrap() as usize]);
    let [mut row_max, mut sum_exp] = [(); 2].map(|()| vec![0f32; 2 * 8 * 64]);
    let call = HostForward::new(&q, &k, &v, &mut o).row_max(&mut row_max).sum_exp(&mut sum_exp);
    let (result, entries) = recorder.record(|| prepared.forward(call));
    result.unwrap();
    assert_eq!(what(&entries), [UPLOAD, UPLOAD, UPLOAD, FILL, FILL, FILL, FILL, EXECUTION, DOWNLOAD, DOWNLOAD, DOWNLOAD]);
    let to: Vec<u64> = entries[8..].iter().map(|e| e.to).collect();
    assert_eq!(to, [o.as_ptr().addr() as u64, row_max.as_ptr().addr() as u64, sum_exp.as_ptr().addr() as u64]);
}

/// Of whom engines say that the sum is −∞.
#[test]
fn sums_are_mended_where_entries_have_lengths() {
    if !is_newer("calls::statistics::sums_are_mended_where_entries_have_lengths") {
        return;
    }
    let padded = || spec().mask(Mask::padding());
    for (spec, mended) in [
        (padded().with_sum_exp(), true),
        (padded().with_row_max().with_stats(), false),
        (spec().with_sum_exp(), false),
        (padded().with_sum_exp().with_row_max(), true),
    ] {
        let Some(recorder) = recorder() else { return };
        let (planned, _) = recorder.executor().attention(&spec.validate().unwrap()).unwrap();
        let place = |step: &Step<_>| matches!(step, Step::Launch(launch) if launch.role == Role::RowSums);
        let last = planned.schedule.steps().last().is_some_and(place);
        assert_eq!((planned.schedule.steps().iter().filter(|step| place(step)).count(), last), (usize::from(mended), mended));
    }
}
