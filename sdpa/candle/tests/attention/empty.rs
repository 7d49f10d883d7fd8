//! Operands without a batch entry, a query or a key: the shapes and values of PyTorch's `scaled_dot_product_attention`.

use crate::textbook::{CPU, Random};
use candle_core::{DType, Tensor, Var};
use sdpa_candle::expr::{Axis, F32};
use sdpa_candle::{Attention, Mask, library};

/// (batch, seq_q, seq_kv).
const EXTENTS: [[usize; 3]; 4] = [[0, 3, 5], [2, 0, 5], [2, 3, 0], [0, 0, 0]];

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Asserts that a tensor has this shape and that all of its elements are `value`.
fn all(what: &str, tensor: &Tensor, dims: &[usize], value: f32) {
    assert_eq!(tensor.dims(), dims, "{what}");
    assert_eq!(numbers(tensor), vec![value; dims.iter().product()], "{what}");
}

#[test]
fn outputs_and_gradients_are_those_of_pytorch() {
    for [batch, seq_q, seq_kv] in EXTENTS {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let what = format!("{batch} {seq_q} {seq_kv} {dtype:?}");
            let var = |dims: &[usize]| Var::from_tensor(&Tensor::ones(dims, dtype, &CPU).unwrap()).unwrap();
            let (q, k, v) = (var(&[batch, 4, seq_q, 8]), var(&[batch, 2, seq_kv, 8]), var(&[batch, 2, seq_kv, 6]));
            let bias = Var::from_tensor(&Tensor::ones((4, seq_kv), DType::F32, &CPU).unwrap()).unwrap();
            let slope = Var::from_tensor(&Tensor::ones(4, DType::F32, &CPU).unwrap()).unwrap();
            let attention = Attention::new()
                .score_mod(library::bias([Axis::Head, Axis::K], F32))
                .score_mod(library::alibi_with())
                .mask(Mask::causal_bottom_right())
                .param("bias", &bias)
                .param("slopes", &slope);
            let (o, stats) = attention.forward_with_stats(&q, &k, &v).unwrap();
            assert_eq!((o.dtype(), stats.dtype()), (dtype, DType::F32), "{what}");
            all(&what, &o, &[batch, 4, seq_q, 6], 0.0);
            all(&what, &stats, &[batch, 4, seq_q], f32::NEG_INFINITY);
            let gradients = o.sum_all().unwrap().backward().unwrap();
            for x in [&q, &k, &v, &bias, &slope] {
                let gradient = gradients.get(x).unwrap_or_else(|| panic!("{what}: a gradient is missing"));
                all(&what, gradient, x.dims(), 0.0);
            }
        }
    }
}

#[test]
fn a_sink_is_the_only_term_without_keys() {
    let mut random = Random::new(1);
    let (q, sink) = (random.var(&[2, 2, 3, 8]), Var::new(&[0.5f32, -2.0], &CPU).unwrap());
    let k = Var::zeros((2, 2, 0, 8), DType::F32, &CPU).unwrap();
    let (o, stats) = Attention::new().with_sink(&sink).forward_with_stats(&q, &k, &k).unwrap();
    all("o", &o, &[2, 2, 3, 8], 0.0);
    assert_eq!(numbers(&stats), [[0.5; 3], [-2.0; 3], [0.5; 3], [-2.0; 3]].concat());
    let gradients = o.sum_all().unwrap().backward().unwrap();
    all("dq", gradients.get(&q).unwrap(), &[2, 2, 3, 8], 0.0);
    all("d_sink", gradients.get(&sink).unwrap(), &[2], 0.0);
}

/// Views without elements, of storage that has some.
#[test]
fn views_may_have_no_elements() {
    let mut random = Random::new(2);
    let x = random.var(&[2, 5, 2, 8]);
    let turned = x.transpose(1, 2).unwrap();
    let none = turned.narrow(2, 3, 0).unwrap();
    let o = Attention::new().forward(&turned, &none, &none).unwrap();
    all("o", &o, &[2, 2, 5, 8], 0.0);
    all("dx", o.sum_all().unwrap().backward().unwrap().get(&x).unwrap(), &[2, 5, 2, 8], 0.0);
    let o = Attention::new().forward(&none, &turned, &turned).unwrap();
    all("o", &o, &[2, 2, 0, 8], 0.0);
}
