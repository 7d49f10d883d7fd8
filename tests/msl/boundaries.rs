//! Boundaries of documents that no call over host memory gets to the kernels with: whatever they hold, nothing outside of the call's tokens is touched.

use super::emulation;
use conformance::msl::Emulated;
use conformance::random::Random;
use metal_fallback::{Backward, Call, Contents, Forward, Kernels, Operand, Runner, Task, Tokens};
use sdpa::{AttentionSpec, DType, Error, Executor, HostForward, Mask, Packed, Param, SINK, ScoreMod, Shape};
use std::borrow::Cow;

/// Longest documents off every block.
const SHAPE: Shape = Shape { batch: 4, heads_q: 4, heads_kv: 2, seq_q: 20, seq_kv: 41, dim_qk: 20, dim_v: 12 };
/// More than a call has.
const MOST: Packed = Packed::new().with_cross(true).with_totals(Some(90), Some(110));
const TOKENS: Tokens = Tokens { queries: 50, keys: 61 };

/// Boundaries of queries and of keys.
type Both = [[i64; 5]; 2];

const LEAST: i64 = i32::MIN as i64;
const GREATEST: i64 = i32::MAX as i64;

/// What boundaries come to within the tokens and the longest documents, where sound ones can say so.
const SAME: [[Both; 2]; 4] = [
    [[[-7, 5, 12, 12, 999], [-1, 0, 20, 20, 70]], [[0, 5, 12, 12, 32], [0, 0, 20, 20, 61]]],
    [[[LEAST; 5], [LEAST, LEAST, 3, 9, GREATEST]], [[0; 5], [0, 0, 3, 9, 50]]],
    [[[3, 7, 7, 30, GREATEST], [GREATEST; 5]], [[3, 7, 7, 30, 50], [61; 5]]],
    [[[LEAST, 20, 31, 31, 51], [5, 9, 9, 21, 62]], [[0, 20, 31, 31, 50], [5, 9, 9, 21, 61]]],
];

/// Those that fall: documents are what is left of them, some of nothing.
const FALLING: [Both; 2] = [[[30, 10, 20, 5, 40], [0, 61, 0, 61, 0]], [[GREATEST, LEAST, GREATEST, LEAST, 50], [-1, -2, -3, GREATEST, -4]]];

fn spec(wide: bool) -> AttentionSpec {
    let bias: ScoreMod = "tensor bias[head, q, k]: f32; score + bias".parse().unwrap();
    AttentionSpec::packed(DType::F32, SHAPE, MOST.with_wide(wide)).mask(Mask::causal_ends()).score_mod(bias).with_sink().with_stats()
}

/// Everything that a pass writes, of random numbers and of declared tensors that are given by their names.
pub(super) fn written(
    emulated: &Emulated,
    task: &Task,
    tokens: Option<Tokens>,
    given: impl Fn(&str) -> Option<Vec<u8>>,
) -> Result<Vec<Vec<u8>>, String> {
    let mut random = Random::new(3);
    let users = |operand: &Operand| task.plans().iter().flat_map(|plan| &plan.buffers).any(|b| b.operand == *operand && b.written);
    let mut contents: Vec<(Operand, bool, Vec<u8>)> = Vec::new();
    for (operand, _) in task.operands().iter().filter(|(operand, _)| !operand.is_scratch()) {
        let bytes = task.reach(operand, tokens) as usize;
        let declared = if let Operand::Declared { name, .. } = operand { given(name) } else { None };
        let bytes = match declared {
            Some(bytes) => bytes,
            None if users(operand) => vec![0xff; bytes],
            None => (0..bytes / 4).flat_map(|_| (random.normal() as f32).to_le_bytes()).collect(),
        };
        contents.push((operand.clone(), users(operand), bytes));
    }
    let operands = contents.iter_mut().map(|(operand, written, bytes)| {
        let contents = if *written { Contents::Written(bytes) } else { Contents::Read(Cow::Borrowed(&*bytes)) };
        (operand.clone(), contents)
    });
    let call = Call { attn_scale: 0.3, tokens, operands: operands.collect() };
    let ready = emulated.prepare(task.clone()).map_err(|e| e.to_string())?;
    ready.run(call).map_err(|e| e.to_string())?;
    Ok(contents.into_iter().filter(|(_, written, _)| *written).map(|(.., bytes)| bytes).collect())
}

/// The same of packed documents.
fn of_documents(emulated: &Emulated, task: &Task, [of_q, of_k]: Both, wide: bool) -> Result<Vec<Vec<u8>>, String> {
    let bytes = |of: [i64; 5]| match wide {
        true => of.into_iter().flat_map(i64::to_le_bytes).collect::<Vec<u8>>(),
        false => of.into_iter().flat_map(|n| (n as i32).to_le_bytes()).collect(),
    };
    let boundaries = |name: &str| match name {
        "cu_seqlens_q" => Some(bytes(of_q)),
        "cu_seqlens_kv" => Some(bytes(of_k)),
        _ => None,
    };
    written(emulated, task, Some(TOKENS), boundaries)
}

/// Whether kernels stay within the tokens, and take boundaries for what is left of them.
///
/// # Errors
/// Which do not.
pub(super) fn hold(emulated: &Emulated, kernels: Kernels) -> Result<(), String> {
    for wide in [false, true] {
        let gradient = spec(wide).backward().wrt(SINK, DType::F32).wrt("bias", DType::F32);
        let (problem, gradient) = (spec(wide).validate().unwrap(), gradient.validate().unwrap());
        let tasks = [Forward::from(&problem).task(Some(kernels)).unwrap(), Backward::from(&gradient).task(Some(kernels)).unwrap()];
        for task in &tasks {
            for [wrong, sound] in SAME {
                // In 64 bits there is room for what no 32 can say.
                let far = |n: i64| if wide && n.abs() >= GREATEST { n.saturating_mul(1 << 40) } else { n };
                let got = of_documents(emulated, task, wrong.map(|of| of.map(far)), wide)?;
                if got != of_documents(emulated, task, sound, wide)? {
                    return Err(format!("{}: {wrong:?} are not {sound:?}", task.plans()[0].entry));
                }
            }
            for falling in FALLING {
                of_documents(emulated, task, falling, wide)?;
            }
        }
    }
    Ok(())
}

#[test]
fn kernels_stay_within_the_tokens_whatever_boundaries_hold() {
    let Some(toolchain) = emulation("wrong boundaries") else { return };
    for kernels in Kernels::ALL {
        hold(&Emulated::new(toolchain.clone(), 1), kernels).unwrap_or_else(|e| panic!("{kernels:?}: {e}"));
    }
}

#[test]
fn calls_with_wrong_boundaries_are_refused_before_anything_runs() {
    let Some(toolchain) = emulation("calls with wrong boundaries") else { return };
    let spec = AttentionSpec::packed(DType::F32, SHAPE, MOST);
    let prepared = Emulated::new(toolchain, 1).executor().prepare(&spec.validate().unwrap()).unwrap();
    let of = |rows: i64, heads: i64, dim: i64| vec![0.5f32; (rows * heads * dim) as usize];
    let q = of(50, SHAPE.heads_q, SHAPE.dim_qk);
    let (k, v) = (of(61, SHAPE.heads_kv, SHAPE.dim_qk), of(61, SHAPE.heads_kv, SHAPE.dim_v));
    let call = |of_q: &[i32], of_k: &[i32]| {
        let mut o = of(50, SHAPE.heads_q, SHAPE.dim_v);
        let params = [("cu_seqlens_q", of_q), ("cu_seqlens_kv", of_k)].map(|(name, of)| Param::new(name, of));
        let call = HostForward::new(&q, &k, &v, &mut o).params(&params);
        let told = match prepared.forward(call) {
            Ok(_) => return Ok(()),
            Err(Error::Spec(e)) => e.to_string(),
            Err(e) => panic!("{e}"),
        };
        assert!(o.iter().all(|x| *x == 0.5), "{told}");
        Err(told)
    };
    call(&[0, 20, 20, 33, 50], &[0, 20, 20, 33, 61]).unwrap();
    for (of_q, of_k, told) in [
        ([-1, 20, 20, 33, 50], [0, 20, 20, 33, 61], "parameter cu_seqlens_q[0]: got -1, expected at least 0"),
        ([0, 20, 20, 33, 50], [0, 20, 19, 33, 61], "parameter cu_seqlens_kv[2]: got 19, expected at least 20, the offset before it"),
        ([0, 20, 20, 41, 50], [0, 20, 20, 33, 61], "at most 20, the longest sequence of the problem (this is sequence 2)"),
        ([0, 20, 20, 33, 51], [0, 20, 20, 33, 61], "memory for 51 tokens"),
        ([0, 20, 20, 33, 50], [0, 20, 20, 33, 62], "memory for 62 tokens"),
    ] {
        let said = call(&of_q, &of_k).unwrap_err();
        assert!(said.contains(told), "{said}");
    }
}
