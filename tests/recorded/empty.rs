//! Problems without a batch entry, a query or a key over the recording library: results are set, nothing else is submitted.

use conformance::recorder::entry::{Entry, FILL};
use conformance::recorder::{Recorder, whole};
use conformance::say::skip;
use cudnn_graph::{Buffer, DeviceSlice};
use sdpa::cudnn::{DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue};
use sdpa::{AttentionSpec, BackwardSpec, DType, DeviceExecutor, Error, Executor, Layout, Mask, Reason, SINK, Shape};

/// Memory without elements, as an allocator may return it.
const NOWHERE: DeviceSlice = DeviceSlice { address: 0, bytes: 0 };
const MINUS_INFINITY: u64 = 0xff80_0000;

fn recorder() -> Option<Recorder> {
    Recorder::load().map_err(|why| skip("recording", &why)).ok()
}

fn spec([batch, seq_q, seq_kv]: [i64; 3]) -> AttentionSpec {
    let shape = Shape { batch, heads_q: 4, heads_kv: 2, seq_q, seq_kv, dim_qk: 64, dim_v: 32 };
    AttentionSpec::dense(DType::BF16, shape, Layout::Bshd)
}

/// Memory of so many elements of two bytes, or nowhere.
fn memory(recorder: &Recorder, elements: i64) -> (Option<Buffer>, DeviceSlice) {
    let buffer = (elements > 0).then(|| recorder.buffer(2 * elements.unsigned_abs()));
    let slice = buffer.as_ref().map_or(NOWHERE, whole);
    (buffer, slice)
}

/// Where to, the number that was written, and how many bytes.
fn fills(entries: &[Entry]) -> Vec<(u64, u64, u64)> {
    assert!(entries.iter().all(|entry| entry.what == FILL), "{entries:?}");
    entries.iter().map(|entry| (entry.to, entry.from, entry.bytes)).collect()
}

fn call([q, k, v, o]: [DeviceSlice; 4]) -> DeviceForward<'static> {
    DeviceForward::new(q, k, v, o)
}

#[test]
fn results_with_elements_are_set_and_the_others_need_no_memory() {
    let Some(recorder) = recorder() else { return };
    let stream = recorder.stream();
    for extents @ [batch, seq_q, seq_kv] in [[0, 5, 7], [2, 0, 7], [2, 5, 0], [0, 0, 0]] {
        let spec = spec(extents).with_stats().with_row_max().with_sum_exp().mask(Mask::causal());
        let (queries, keys) = (batch * seq_q * 4, batch * seq_kv * 2);
        let buffers = [queries * 64, keys * 64, keys * 32, queries * 32].map(|n| memory(&recorder, n));
        let rows = [(); 3].map(|()| memory(&recorder, 2 * queries));
        let [stats, row_max, sum_exp] = rows.each_ref().map(|(_, slice)| Some(*slice));
        let call = call(buffers.each_ref().map(|(_, slice)| *slice)).stats(stats).row_max(row_max).sum_exp(sum_exp);
        let ready = recorder.executor().prepare_device(&spec.validate().unwrap()).unwrap();
        let (done, entries) = recorder.record(|| recorder.submit(&*ready, &stream, &(&call).into()));
        done.unwrap_or_else(|e| panic!("{extents:?}: {e}"));
        let bytes = queries.unsigned_abs() * 4;
        let rows = [(stats, MINUS_INFINITY), (row_max, MINUS_INFINITY), (sum_exp, 0)].map(|(slice, n)| (slice.unwrap().address, n, bytes));
        let want = [&[(call.o.address, 0, bytes * 16)], &rows[..]].concat();
        assert_eq!(fills(&entries), if bytes > 0 { want } else { Vec::new() }, "{extents:?}");
    }
    assert_eq!(recorder.faults(), 0);
}

/// The gradients of a backward pass, in a scratch of their own for each extent that is 0.
#[test]
fn gradients_of_parameters_are_zeros_too() {
    let Some(recorder) = recorder() else { return };
    let stream = recorder.stream();
    for extents @ [batch, seq_q, seq_kv] in [[0, 5, 7], [2, 0, 7], [2, 5, 0]] {
        let spec: BackwardSpec =
            spec(extents).score_mod("bias:hk".parse().unwrap()).with_sink().backward().wrt("bias", DType::F16).wrt(SINK, DType::F32);
        let (queries, keys) = (batch * seq_q * 4, batch * seq_kv * 2);
        let [q, k, v, o] = [queries * 64, keys * 64, keys * 32, queries * 32].map(|n| memory(&recorder, n));
        let [dq, dk, dv, d_o] = [queries * 64, keys * 64, keys * 32, queries * 32].map(|n| memory(&recorder, n));
        let (stats, sink, d_sink) = (memory(&recorder, queries * 2), recorder.buffer(16), recorder.buffer(16));
        let (bias, d_bias) = (memory(&recorder, 2 * 4 * seq_kv), memory(&recorder, 4 * seq_kv));
        let params = [
            DeviceParam::new("bias", DeviceValue::Tensor(DType::F32, bias.1)),
            DeviceParam::new(SINK, DeviceValue::Tensor(DType::F32, whole(&sink))),
        ];
        let gradients = [DeviceGradient::new("bias", d_bias.1), DeviceGradient::new(SINK, whole(&d_sink))];
        let call = DeviceBackward::new((q.1, k.1, v.1), (o.1, stats.1), d_o.1, (dq.1, dk.1, dv.1)).params(&params).gradients(&gradients);
        let ready = recorder.executor().prepare_device_backward(&spec.validate().unwrap()).unwrap();
        let (done, entries) = recorder.record(|| recorder.submit(&*ready, &stream, &(&call).into()));
        done.unwrap_or_else(|e| panic!("{extents:?}: {e}"));
        let mut want = Vec::new();
        for (slice, bytes) in [(dq.1, queries * 128), (dk.1, keys * 128), (dv.1, keys * 64), (d_bias.1, 8 * seq_kv), (whole(&d_sink), 16)] {
            want.extend((bytes > 0).then_some((slice.address, 0, bytes.unsigned_abs())));
        }
        assert_eq!(fills(&entries), want, "{extents:?}");
    }
    assert_eq!(recorder.faults(), 0);
}

#[test]
fn wrong_calls_submit_nothing() {
    let Some(recorder) = recorder() else { return };
    let stream = recorder.stream();
    let ready = recorder.executor().prepare_device(&spec([2, 5, 0]).with_stats().validate().unwrap()).unwrap();
    let (q, o, stats) = (recorder.buffer(2 * 5 * 4 * 64 * 2), recorder.buffer(2 * 5 * 4 * 32 * 2 - 1), recorder.buffer(160));
    let wrong = [
        call([whole(&q), NOWHERE, NOWHERE, whole(&o)]).stats(whole(&stats)),
        call([NOWHERE, NOWHERE, NOWHERE, whole(&q)]).stats(whole(&stats)),
        call([whole(&q), NOWHERE, NOWHERE, whole(&q)]).stats(NOWHERE),
        call([whole(&q), NOWHERE, NOWHERE, whole(&q)]),
    ];
    for (call, field) in wrong.iter().zip(["o length", "q length", "stats length", "stats"]) {
        let (done, entries) = recorder.record(|| recorder.submit(&*ready, &stream, &call.into()));
        let Err(Error::Spec(errors)) = done else { panic!("{field}: {done:?}") };
        assert_eq!(errors.0[0].field, field);
        assert!(entries.is_empty(), "{field}");
    }
}

/// The fields that a pass over device memory is unsupported for.
fn unsupported<T>(made: Result<T, Error>) -> Vec<String> {
    let Err(Error::Unsupported(why)) = made else { panic!("it was not unsupported") };
    let field = |reason: Reason| match reason {
        Reason::Limit { field, .. } => field,
        other @ (Reason::KnownBad { .. } | Reason::Refused { .. } | Reason::Absent(_) | Reason::Failed(_) | _) => other.to_string(),
    };
    why.reasons.into_iter().map(field).collect()
}

#[test]
fn what_cannot_be_set_as_a_whole_is_unsupported_and_host_memory_takes_it() {
    let Some(recorder) = recorder() else { return };
    let executor = recorder.executor();
    let mut gaps = spec([2, 5, 0]);
    gaps.o.strides[2] += 8;
    gaps.o.strides[0] += 40;
    let beside_sink = spec([2, 5, 0]).with_sink().with_stats().with_sum_exp();
    for (spec, fields) in [(gaps, vec!["o.strides"]), (beside_sink, vec!["stats", "sum_exp"])] {
        let problem = spec.validate().unwrap();
        assert_eq!(unsupported(executor.prepare_device(&problem)), fields);
        executor.supports(&problem).unwrap();
        executor.prepare(&problem).unwrap();
    }
    // Without rows there is nothing to set.
    executor.prepare_device(&spec([2, 0, 5]).with_sink().with_stats().validate().unwrap()).unwrap();
    let mut gradient = spec([2, 5, 0]).backward();
    gradient.dq.strides[1] += 8;
    gradient.dq.strides[2] += 32;
    gradient.dq.strides[0] += 160;
    let problem = gradient.validate().unwrap();
    assert_eq!(unsupported(executor.prepare_device_backward(&problem)), ["dq.strides"]);
    executor.supports_backward(&problem).unwrap();
    executor.prepare_backward(&problem).unwrap();
}

/// Asking for a plan without preparing a pass gives the reason.
#[test]
fn there_are_no_plans() {
    let Some(recorder) = recorder() else { return };
    let spec = spec([2, 5, 0]);
    let refused = recorder.executor().attention(&spec.validate().unwrap()).map(|_| ()).map_err(Error::from);
    assert_eq!(unsupported(refused), ["(batch, seq_q, seq_kv)"]);
    let gradient = spec.mask("dilated:2".parse().unwrap()).backward().validate().unwrap();
    assert_eq!(unsupported(recorder.executor().attention_backward(&gradient).map(|_| ()).map_err(Error::from)), ["(batch, seq_q, seq_kv)"]);
    assert!(recorder.executor().explain(&gradient.into()).notes.is_empty());
}
