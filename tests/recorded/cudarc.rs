//! Calls over cudarc's slices, on either executor: in a process whose driver is the recording library for cudarc too, which asks the system's loader for it.

use conformance::nvrtc;
use conformance::recorder::entry::{EXECUTION, LAUNCH};
use conformance::recorder::{self, Recorder};
use conformance::say::skip;
use cudarc::driver::{CudaContext, CudaSlice};
use half::bf16;
use sdpa::cuda::{CudaExecutor, CudaOptions};
use sdpa::cudarc::{Attention, Backward, CudarcError, Forward, Param, Value, ValueMut};
use sdpa::nvidia::NvidiaExecutor;
use sdpa::{AttentionSpec, DType, Error, Layout, Mask, Shape};

/// The folder that the loader looks into first.
const FOLDER: &str = "LD_LIBRARY_PATH";

/// Whether cudarc's driver is the recording library in this process; else the test has been run where it is.
pub(crate) fn loads(test: &str) -> bool {
    if std::env::var(crate::ALONE).is_ok() {
        return true;
    }
    let file = match recorder::find() {
        Ok(file) => file,
        Err(why) => {
            skip("recording", &why);
            return false;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        // One file, so that it is one library to the loader.
        std::os::unix::fs::symlink(&file, folder.path().join(name)).unwrap();
    }
    let folder = folder.path().to_str().unwrap();
    crate::elsewhere(test, &[(crate::ALONE, "1"), (FOLDER, folder)])
}

fn spec() -> AttentionSpec {
    let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 512, seq_kv: 512, dim_qk: 64, dim_v: 64 };
    AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal()).score_mod("bias:hqk".parse().unwrap()).with_stats()
}

/// Both passes over an executor: what is submitted, and that nothing is where slices are wrong.
fn passes(recorder: &Recorder, executor: &impl NvidiaExecutor, what: u32) {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let of = |heads: usize| -> CudaSlice<bf16> { stream.alloc_zeros(heads * 512 * 64).unwrap() };
    let (q, k, mut o, mut stats) = (of(4), of(2), of(4), stream.alloc_zeros::<f32>(4 * 512).unwrap());
    let bias = stream.alloc_zeros::<f32>(4 * 512 * 512).unwrap();
    let params = [Param::new("bias", Value::F32(&bias))];
    let (spec, backward) = (spec(), spec().backward().wrt("bias", DType::BF16));
    let [there, back] = [Attention::new(executor, &spec).unwrap(), Attention::backward_of(executor, &backward).unwrap()];
    assert!(!there.prepared().engine().is_empty() && there.prepared().copied().is_empty());
    let submitted = |done: Result<(), CudarcError>| done.unwrap_or_else(|e| panic!("{e}"));
    let ((), entries) = recorder.record(|| {
        let call = Forward::new(&q, &k, &k, &mut o).stats(&mut stats).params(&params);
        submitted(there.forward(&stream, call));
    });
    assert!(entries.iter().any(|entry| entry.what == what), "{entries:?}");
    let (mut dq, mut dk, mut dv, mut d_bias) = (of(4), of(2), of(2), stream.alloc_zeros::<bf16>(4 * 512 * 512).unwrap());
    let ((), entries) = recorder.record(|| {
        let gradients = vec![("bias", ValueMut::BF16(&mut d_bias))];
        let (dq, dk, dv) = (&mut dq as _, &mut dk as _, &mut dv as _);
        let (q, k, o, stats, attn_scale, params) = (&q, &k, &o, &stats, None, &params[..]);
        submitted(back.backward(
            &stream,
            Backward::new((q, k, k), (o, stats), o, (dq, dk, dv)).attn_scale(attn_scale).params(params).gradients(gradients),
        ));
    });
    assert!(entries.iter().any(|entry| entry.what == what), "{entries:?}");
    // Too short a key, no stats, an unknown parameter; slices of another type; another pass's gradient.
    let short = stream.alloc_zeros::<bf16>(16).unwrap();
    let unknown = [Param::new("slope", Value::Scalar(1.0))];
    let call = Forward::new(&q, &short, &k, &mut o).params(&unknown);
    let (done, entries) = recorder.record(|| there.forward(&stream, call));
    let Err(CudarcError::Sdpa(Error::Spec(errors))) = done else { panic!("{done:?}") };
    for field in ["k length", "stats", "parameter slope", "parameter bias"] {
        assert!(errors.0.iter().any(|e| e.field == field), "{field} in {errors}");
    }
    assert!(entries.iter().all(|entry| entry.what != what));
    // A slice of another device is refused, and cudarc has no error left for its next call.
    let other = CudaContext::new(1).unwrap().new_stream().unwrap().alloc_zeros::<bf16>(2 * 512 * 64).unwrap();
    let done = there.forward(&stream, Forward::new(&q, &other, &k, &mut o).stats(&mut stats).params(&params));
    assert!(done.is_err_and(|e| e.to_string().contains("k device: got 1, expected 0, the device of the stream")));
    context.check_err().unwrap();
    let (x, mut y) = (stream.alloc_zeros::<f32>(4 * 512 * 64).unwrap(), stream.alloc_zeros::<f32>(4 * 512 * 64).unwrap());
    let call = Forward::new(&x, &x, &x, &mut y);
    let (done, entries) = recorder.record(|| there.forward(&stream, call));
    assert!(done.is_err_and(|e| e.to_string().contains("slice dtype: got f32")) && entries.is_empty());
}

#[test]
fn either_executor_takes_cudarcs_slices() {
    if !loads("cudarc::either_executor_takes_cudarcs_slices") {
        return;
    }
    let Some(recorder) = Recorder::load().map_err(|why| skip("recording", &why)).ok() else { return };
    passes(&recorder, recorder.executor(), EXECUTION);
    let Some(nvrtc) = nvrtc::find().map_err(|why| skip("recording", &why)).ok() else { return };
    let options = CudaOptions::default().with_nvrtc(nvrtc.path());
    passes(&recorder, &CudaExecutor::new(options).unwrap(), LAUNCH);
    assert_eq!(recorder.faults(), 0);
}
