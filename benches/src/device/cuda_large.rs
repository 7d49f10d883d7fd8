//! Gradients of problems that are too large for the oracle beside cuDNN's, which share no code: with so many heads the places of sums come around.
#![allow(unsafe_code)]

use crate::cuda::executor;
use crate::cuda_speed::{Pass, ready};
use crate::memory::Memory;
use crate::setup::{Result, executor as cudnn};
use cudnn_graph::{DeviceSlice, Stream};
use half::bf16;
use sdpa::cudnn::PlanOptions;
use sdpa::cudnn::lower::Job;
use sdpa::device::OnDevice;
use sdpa::{AttentionSpec, DType, Layout, Packed, Shape};

/// Of an element's magnitude, and of the root mean square of its row: two roundings to bf16, and weights of which each of both was rounded before it was
/// summed. A block of keys that is missing from a sum of 32 is five times as much.
const ROUNDING: [f32; 2] = [0.016, 0.035];
/// What the root mean square of all rows adds to that of a row whose terms cancel.
const CANCELS: f32 = 0.1;

/// batch, heads_q, heads_kv, seq, dim; score_mod; mask; whether batch entries are packed documents.
const PROBLEMS: [([i64; 5], &str, &str, bool); 18] = [
    ([4, 32, 32, 4096, 128], "", "", false),
    ([4, 32, 32, 4096, 128], "", "causal", false),
    ([4, 32, 8, 3000, 128], "softcap:30", "causal", false),
    ([4, 32, 32, 4096, 128], "", "sliding-window:512", false),
    ([4, 32, 32, 4096, 128], "", "prefix-lm:512", false),
    ([4, 32, 32, 4096, 128], "", "natten:257", false),
    ([4, 32, 32, 4096, 128], "", "global-local:256,64", false),
    ([4, 32, 32, 4096, 128], "", "shared-prefix:512 & causal", false),
    ([4, 32, 32, 4096, 128], "", "document & causal", false),
    ([2, 64, 8, 1999, 64], "alibi", "causal", false),
    ([16, 32, 8, 1024, 64], "", "sliding-window:200", false),
    ([1, 32, 8, 16384, 64], "", "causal", false),
    ([3, 24, 24, 2100, 96], "", "dilated:4 & causal", false),
    ([32, 32, 32, 512, 128], "", "causal", true),
    ([8, 32, 8, 2048, 128], "", "causal", true),
    ([1, 16, 16, 8192, 256], "", "causal", false),
    ([2, 24, 8, 3001, 256], "softcap:50", "sliding-window:700", false),
    ([3, 16, 16, 1400, 192], "", "prefix-lm:300", false),
];

/// How far one tensor is from the other, in units of what is allowed, and where that is.
fn off(bytes: &[u8], others: &[u8], row: usize) -> (f32, usize) {
    let numbers = |bytes: &[u8]| -> Vec<f32> { bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect() };
    let (ours, theirs) = (numbers(bytes), numbers(others));
    let typical = |x: &[f32]| (x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len().max(1) as f64).sqrt() as f32;
    let all = CANCELS * typical(&theirs);
    let mut most = (0f32, 0);
    for (n, (ours, theirs)) in ours.chunks(row).zip(theirs.chunks(row)).enumerate() {
        let here = ROUNDING[1] * (typical(theirs) + all);
        for (at, (x, y)) in ours.iter().zip(theirs).enumerate() {
            let off = if x == y { 0.0 } else { (x - y).abs() / (ROUNDING[0] * y.abs() + here) };
            if off.is_nan() || off > most.0 {
                most = (if off.is_nan() { f32::INFINITY } else { off }, n * row + at);
            }
        }
    }
    most
}

/// What a pass leaves in memory that was not-a-number before.
fn results(stream: &Stream, memory: &mut Memory, pass: &Pass) -> Result<Vec<Vec<u8>>> {
    memory.poison(stream)?;
    let (params, gradients) = (memory.params(), memory.gradients());
    // SAFETY: the memory is whole buffers of this device that outlive the call; reading them waits for the stream.
    unsafe { pass.submit(stream, &(&memory.backward_call(&params, &gradients, None)?).into()) }?;
    // The first is the forward pass's.
    Ok(memory.results(stream)?.split_off(1))
}

/// Every problem `times` times.
pub(crate) fn run(times: u64) -> Result<()> {
    let (ours, theirs) = (executor(None)?, cudnn(PlanOptions::default())?);
    let stream = ours.device().stream()?;
    let (mut failed, mut unsupported) = (0, 0);
    for ([batch, heads_q, heads_kv, seq, dim], score_mod, mask, packed) in PROBLEMS {
        let shape = Shape { batch, heads_q, heads_kv, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim };
        let mut spec = if packed {
            AttentionSpec::packed(DType::BF16, shape, Packed::of(batch * seq))
        } else {
            AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd)
        };
        if !score_mod.is_empty() {
            spec = spec.score_mod(score_mod.parse()?);
        }
        if !mask.is_empty() {
            spec = spec.mask(mask.parse()?);
        }
        let told = format!("{}({batch},{heads_q},{heads_kv},{seq},{dim}) {score_mod} {mask}", if packed { "packed " } else { "" });
        let problem = spec.with_stats().backward().validate()?;
        let first = ours.attention(problem.forward())?.0;
        let mine = ours.gradient(&problem)?.0;
        let other = match theirs.attention_backward(&problem) {
            Ok((planned, _)) => planned as OnDevice<DeviceSlice, Stream>,
            Err(why) => {
                unsupported += 1;
                println!("SKIP {told}: {why}");
                continue;
            }
        };
        let job = Job::from(problem);
        let mut memory = ready(&stream, &job, &[&*mine, &*other], Some(&*first), None)?;
        let right = results(&stream, &mut memory, &*other)?;
        let mut most = [(0f32, 0); 3];
        for _ in 0..times {
            let found = results(&stream, &mut memory, &*mine)?;
            let each = found.iter().zip(&right).map(|(ours, theirs)| off(ours, theirs, dim as usize));
            for (most, each) in most.iter_mut().zip(each) {
                if each.0 > most.0 {
                    *most = each;
                }
            }
        }
        let wrong = most.iter().any(|(off, _)| *off > 1.0);
        failed += u64::from(wrong);
        let [dq, dk, dv] = most.map(|(off, at)| format!("{off:.3} at {at}"));
        println!("{} {told}: {times} launches, of what is allowed: dq {dq}, dk {dk}, dv {dv}", if wrong { "FAIL" } else { "pass" });
    }
    println!(
        "gradients of large problems beside cuDNN's: {} passed, {unsupported} unsupported, {failed} failed",
        PROBLEMS.len() as u64 - unsupported - failed
    );
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}
