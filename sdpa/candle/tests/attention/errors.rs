//! Invalid arguments are reported by the call that has them.

use crate::textbook::{CPU, Random};
use candle_core::{DType, Result, Tensor, Var};
use sdpa_candle::expr::{Axis, F32};
use sdpa_candle::{Attention, Documents, ExecutorName, Mask, flash_attn_alibi, flash_attn_alibi_windowed_softcap, library};

pub(crate) fn told<T>(result: Result<T>, parts: &[&str]) {
    let told = match result {
        Ok(_) => panic!("nothing was told of {parts:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(told.contains(part), "{part} is not in: {told}");
    }
}

fn operand() -> Tensor {
    Random::new(17).tensor(&[2, 4, 6, 8])
}

#[test]
fn every_operand_that_is_wrong_is_named_at_once() {
    let q = operand();
    let (flat, wide) = (q.flatten_from(2).unwrap(), q.to_dtype(DType::F64).unwrap());
    told(
        Attention::new().forward(&q, &flat, &wide),
        &["k shape: got [2, 4, 48], expected (batch, head, seq, dim)", "v dtype: got f64, expected one of f32, f16, bf16"],
    );
    let half = q.to_dtype(DType::F16).unwrap();
    told(Attention::new().forward(&q, &half, &q), &["k dtype: got f16, expected f32, the type of q"]);
    let three = q.narrow(1, 0, 3).unwrap();
    told(Attention::new().forward(&q, &three, &three), &["heads_kv"]);
    told(Attention::new().attn_scale(f32::NAN).forward(&q, &q, &q), &["attn_scale: got NaN, expected a finite number"]);
}

#[test]
fn parameters_that_do_not_fit_are_told() {
    let q = operand();
    let bias = Attention::new().score_mod(library::bias([Axis::Q, Axis::K], F32));
    told(bias.forward(&q, &q, &q), &["parameter bias: got nothing"]);
    let of = |x: &Tensor| bias.clone().param("bias", x).forward(&q, &q, &q);
    let right = Random::new(18).tensor(&[6, 6]);
    assert!(of(&right).is_ok());
    told(of(&right.narrow(0, 0, 5).unwrap()), &["parameter bias: got shape [5, 6], expected [6, 6] (q, k) or [1, 1, 6, 6]"]);
    told(of(&right.to_dtype(DType::BF16).unwrap()), &["parameter bias: got bf16, expected f32"]);
    told(
        bias.clone().param("bias", &right).scalar("cap", 1.).forward(&q, &q, &q),
        &["parameter cap: got a value, expected one of the declared parameters: bias"],
    );
    told(bias.clone().scalar("bias", 1.).forward(&q, &q, &q), &["parameter bias: got a scalar"]);
    let capped = Attention::new().score_mod(library::softcap(2.));
    told(capped.param("cap", &right).forward(&q, &q, &q), &["parameter cap: got a tensor of f32 [6, 6], expected one f32"]);
    let padded = Attention::new().mask(Mask::padding()).param("seq_len_q", &Tensor::new(&[6i64, 1 << 40], &CPU).unwrap());
    let padded = padded.param("seq_len_kv", &Tensor::new(&[6i64, 6], &CPU).unwrap());
    told(padded.forward(&q, &q, &q), &["parameter seq_len_q", "a number that does not fit an i32"]);
}

#[test]
fn what_is_tracked_and_cannot_have_a_gradient_is_told_at_the_call() {
    let q = operand();
    let mask = Var::from_tensor(&Tensor::ones((6, 6), DType::U8, &CPU).unwrap()).unwrap();
    let array = Attention::new().mask(library::array_mask([Axis::Q, Axis::K]));
    told(array.clone().param("mask", &mask).forward(&q, &q, &q), &["wrt[0]", "mask"]);
    assert!(array.param("mask", &mask.detach()).forward(&q, &q, &q).is_ok());
    let of = Var::new(&[0u32, 6], &CPU).unwrap();
    let packed = q.transpose(1, 2).unwrap().contiguous().unwrap().narrow(0, 0, 1).unwrap().squeeze(0).unwrap();
    told(Attention::new().forward_packed(&Documents::new(&of, 6), &packed, &packed, &packed), &["wrt[0]", "cu_seqlens"]);
    // A custom gradient gives only the gradient of the scores, so a parameter that needs a gradient is refused.
    let by_hand = sdpa_candle::ScoreMod::new("scaled", |score, _, p| score * p.tensor("by", [Axis::Head], F32)).unwrap();
    let by_hand = by_hand.with_bprop(|grad, _, _, p| grad * p.tensor("by", [Axis::Head], F32)).unwrap();
    let by = Var::new(&[1f32, 2., 3., 4.], &CPU).unwrap();
    let attention = Attention::new().score_mod(by_hand);
    told(attention.clone().param("by", &by).forward(&q, &q, &q), &["forward.score_mods"]);
    assert!(attention.param("by", &by.detach()).forward(&q, &q, &q).is_ok());
}

#[test]
fn executors_and_documents_that_are_none_are_told() {
    let q = operand();
    told(
        Attention::new().executor(ExecutorName::CUDNN).forward(&q, &q, &q),
        &["executor: got cudnn, expected cpu, which can read tensors on Cpu"],
    );
    assert!(Attention::new().executor(ExecutorName::CPU).forward(&q, &q, &q).is_ok());
    let packed = Random::new(19).tensor(&[6, 2, 8]);
    let forward = |of: &Tensor| Attention::new().forward_packed(&Documents::new(of, 6), &packed, &packed, &packed);
    told(forward(&Tensor::new(&[0f32, 6.], &CPU).unwrap()), &["cu_seqlens dtype: got f32, expected one of u32, i32, i64"]);
    told(forward(&Tensor::new(&[0u32], &CPU).unwrap()), &["cu_seqlens shape: got [1]"]);
    told(forward(&Tensor::new(&[0u32, 4, 3], &CPU).unwrap()), &["cu_seqlens[2]: got 3, expected at least 4, the offset before it"]);
    told(forward(&Tensor::new(&[0u32, u32::MAX], &CPU).unwrap()), &["a number that does not fit an i32"]);
}

#[test]
fn the_functions_of_flash_attention_tell_their_arguments() {
    let q = operand();
    let slopes = Tensor::zeros(6, DType::F32, &CPU).unwrap();
    told(flash_attn_alibi(&q, &q, &q, &slopes.to_dtype(DType::F16).unwrap(), 1., true), &["alibi_slopes dtype: got f16, expected f32"]);
    told(flash_attn_alibi(&q, &q, &q, &slopes.narrow(0, 0, 4).unwrap(), 1., true), &["slopes", "[6]"]);
    let capped = |cap| flash_attn_alibi_windowed_softcap(&q, &q, &q, Some(&slopes), 1., None, None, cap);
    told(capped(-1.), &["softcap: got -1"]);
    told(capped(f32::NAN), &["softcap: got NaN"]);
    assert!(capped(0.).is_ok());
}
