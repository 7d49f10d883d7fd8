//! Files with tensors, and attention written out over them.

use conformance::random::Random;
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};

/// Element types that the tool reads, and one that it does not.
pub(crate) fn to_bytes(x: f64, dtype: Dtype) -> Vec<u8> {
    if dtype == Dtype::F16 {
        f16::from_f64(x).to_le_bytes().to_vec()
    } else if dtype == Dtype::BF16 {
        bf16::from_f64(x).to_le_bytes().to_vec()
    } else if dtype == Dtype::F32 {
        (x as f32).to_le_bytes().to_vec()
    } else if dtype == Dtype::F64 {
        x.to_le_bytes().to_vec()
    } else {
        vec![0; dtype.bitsize() / 8]
    }
}

pub(crate) fn from_bytes(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
    let number = |b: &[u8]| match *b {
        [a, b] if dtype == Dtype::F16 => f16::from_le_bytes([a, b]).to_f64(),
        [a, b] if dtype == Dtype::BF16 => bf16::from_le_bytes([a, b]).to_f64(),
        [a, b, c, d] if dtype == Dtype::F32 => f64::from(f32::from_le_bytes([a, b, c, d])),
        _ => f64::from_le_bytes(b.try_into().unwrap()),
    };
    bytes.chunks_exact(dtype.bitsize() / 8).map(number).collect()
}

/// A file with tensors of given bytes.
pub(crate) fn file_of(tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> Vec<u8> {
    let views = tensors.iter().map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    serialize(views, None).unwrap()
}

/// Random numbers that are exact in bf16, and their bytes.
pub(crate) fn numbers(len: usize, dtype: Dtype, seed: u64) -> (Vec<f64>, Vec<u8>) {
    let mut random = Random::new(seed);
    let all: Vec<f64> = (0..len).map(|_| random.between(-32, 32) as f64 / 16.0).collect();
    let bytes = all.iter().flat_map(|&x| to_bytes(x, dtype)).collect();
    (all, bytes)
}

/// A file with tensors of random numbers; every number is exact in bf16, so that no conversion changes it.
pub(crate) fn file(tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
    let mut random = Random::new(5);
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, shape)| {
            (0..shape.iter().product::<usize>()).flat_map(|_| to_bytes(random.between(-32, 32) as f64 / 16.0, *dtype)).collect()
        })
        .collect();
    let views =
        tensors.iter().zip(&data).map(|((name, dtype, shape), data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    serialize(views, None).unwrap()
}

pub(crate) const LAYOUTS: [(&str, [usize; 4]); 3] = [("bhsd", [0, 1, 2, 3]), ("bshd", [0, 2, 1, 3]), ("sbhd", [2, 0, 1, 3])];

/// A tensor by its indices (batch, head, seq, dim), whatever the order in the file.
pub(crate) struct Tensor {
    data: Vec<f64>,
    dims: [usize; 4],
    order: [usize; 4],
}

impl Tensor {
    pub(crate) fn read(file: &SafeTensors<'_>, name: &str, order: [usize; 4]) -> Tensor {
        let view = file.tensor(name).unwrap();
        let mut dims = [0; 4];
        order.iter().zip(view.shape()).for_each(|(&axis, &n)| dims[axis] = n);
        Tensor { data: from_bytes(view.data(), view.dtype()), dims, order }
    }

    pub(crate) fn at(&self, index: [usize; 4]) -> f64 {
        self.data[self.order.iter().fold(0, |at, &axis| at * self.dims[axis] + index[axis])]
    }
}

/// Compares an output file with attention written out; `keep` says which keys a query attends to.
pub(crate) fn compare(input: &[u8], output: &[u8], order: [usize; 4], scale: f64, tolerance: f64, keep: impl Fn(usize, usize) -> bool) {
    let (input, output) = (SafeTensors::deserialize(input).unwrap(), SafeTensors::deserialize(output).unwrap());
    let [q, k, v] = ["q", "k", "v"].map(|name| Tensor::read(&input, name, order));
    let o = Tensor::read(&output, "o", order);
    let stats = output.tensor("stats").unwrap();
    let [batch, heads, seq_q, dim_qk] = q.dims;
    let [_, heads_kv, seq_kv, dim_v] = v.dims;
    assert_eq!((o.dims, stats.shape(), stats.dtype()), ([batch, heads, seq_q, dim_v], &[batch, heads, seq_q][..], Dtype::F32));
    let stats = from_bytes(stats.data(), Dtype::F32);
    for (n, &got) in stats.iter().enumerate() {
        let (b, h, i) = (n / (heads * seq_q), n / seq_q % heads, n % seq_q);
        let g = h * heads_kv / heads;
        let score = |j: usize| scale * (0..dim_qk).map(|d| q.at([b, h, i, d]) * k.at([b, g, j, d])).sum::<f64>();
        let kept: Vec<usize> = (0..seq_kv).filter(|&j| keep(i, j)).collect();
        let sum: f64 = kept.iter().map(|&j| score(j).exp()).sum();
        let want = sum.ln();
        assert!(want == got || (want - got).abs() < 1e-4, "stats {b} {h} {i}: {got}, not {want}");
        for d in 0..dim_v {
            let want: f64 = kept.iter().map(|&j| score(j).exp() / sum * v.at([b, g, j, d])).sum();
            let got = o.at([b, h, i, d]);
            assert!((want - got).abs() < tolerance, "o {b} {h} {i} {d}: {got}, not {want}");
        }
    }
}

/// Shapes of q, k and v in a file of an order.
pub(crate) fn shapes(order: [usize; 4], q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> [Vec<usize>; 3] {
    [q, k, v].map(|dims| order.iter().map(|&axis| dims[axis]).collect())
}

pub(crate) const Q: [usize; 4] = [2, 4, 5, 8];
pub(crate) const K: [usize; 4] = [2, 2, 9, 8];
pub(crate) const V: [usize; 4] = [2, 2, 9, 16];

pub(crate) fn input(dtype: Dtype, order: [usize; 4]) -> Vec<u8> {
    let [q, k, v] = shapes(order, Q, K, V);
    file(&[("q", dtype, &q), ("k", dtype, &k), ("v", dtype, &v)])
}
