//! The textbook formula in f64, from ops that candle differentiates, and comparisons with it.

use candle_core::{DType, Device, Result, Tensor, Var};

pub(crate) const CPU: Device = Device::Cpu;

/// Random numbers that are identical in every run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn number(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn tensor(&mut self, dims: &[usize]) -> Tensor {
        let numbers: Vec<f32> = (0..dims.iter().product()).map(|_| self.number()).collect();
        Tensor::from_vec(numbers, dims, &CPU).unwrap()
    }

    pub(crate) fn var(&mut self, dims: &[usize]) -> Var {
        Var::from_tensor(&self.tensor(dims)).unwrap()
    }
}

/// Returns a variable of these numbers in f64.
pub(crate) fn wide(tensor: &Tensor) -> Var {
    Var::from_tensor(&tensor.detach().to_dtype(DType::F64).unwrap()).unwrap()
}

/// An attention: a score_mod as a function of tensors, `keep` with 1 where a query attends to a key, and an optional sink.
pub(crate) struct Textbook<'a> {
    pub(crate) scale: f64,
    pub(crate) scores: &'a dyn Fn(&Tensor) -> Result<Tensor>,
    /// `[q, k]` or four axes.
    pub(crate) keep: &'a Tensor,
    pub(crate) sink: Option<&'a Tensor>,
    /// Dropout factors of P.
    pub(crate) dropped: Option<&'a Tensor>,
}

impl Textbook<'_> {
    /// Returns the output and the log-sum-exp for (batch, heads, seq, dim) in f64.
    pub(crate) fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let group = q.dim(1)? / k.dim(1)?;
        let (q, k, v) = (q.contiguous()?, repeat(k, group)?, repeat(v, group)?.contiguous()?);
        let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? * self.scale)?;
        let scores = (self.scores)(&scores)?;
        let keep = self.keep.to_dtype(DType::F64)?;
        // Lower masked-out scores far below all others, so that the maximum is an unmasked score.
        let low = ((keep.affine(-1., 1.)?) * -1e30)?;
        let greatest = scores.broadcast_add(&low)?.max_keepdim(3)?.detach();
        let kept = scores.broadcast_sub(&greatest)?.broadcast_mul(&keep)?.exp()?.broadcast_mul(&keep)?;
        let mut sum = kept.sum_keepdim(3)?;
        if let Some(sink) = self.sink {
            sum = sum.broadcast_add(&sink.reshape((1, (), 1, 1))?.broadcast_sub(&greatest)?.exp()?)?;
        }
        // Divide by 1 instead of 0 in a row that attends to no key, so that it becomes 0.
        let empty = sum.eq(0.)?.to_dtype(DType::F64)?;
        let mut weights = kept.broadcast_div(&(&sum + empty)?)?;
        if let Some(dropped) = self.dropped {
            weights = weights.broadcast_mul(dropped)?;
        }
        let lse = (sum.log()? + greatest)?.squeeze(3)?;
        Ok((weights.matmul(&v)?, lse))
    }
}

fn repeat(x: &Tensor, group: usize) -> Result<Tensor> {
    let (batch, heads, seq, dim) = x.dims4()?;
    x.unsqueeze(2)?.broadcast_as((batch, heads, group, seq, dim))?.reshape((batch, heads * group, seq, dim))
}

/// Returns `keep[q, k]` of a rule.
pub(crate) fn keep(seq_q: usize, seq_kv: usize, rule: impl Fn(i64, i64) -> bool) -> Tensor {
    let cells = (0..seq_q * seq_kv).map(|n| u8::from(rule((n / seq_kv) as i64, (n % seq_kv) as i64)));
    Tensor::from_vec(cells.collect(), (seq_q, seq_kv), &CPU).unwrap()
}

/// Compares one tensor with another, relative to the largest number of the second.
pub(crate) fn close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let flat = |x: &Tensor| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (got, want) = (flat(got), flat(want));
    let greatest = want.iter().filter(|x| x.is_finite()).fold(1e-3f64, |most, x| most.max(x.abs()));
    for (n, (a, b)) in got.iter().zip(&want).enumerate() {
        let same = a == b || (a - b).abs() <= tolerance * greatest;
        assert!(same, "{what}[{n}] is {a}, not {b}");
    }
    assert!(want.iter().any(|x| *x != 0.), "{what} is 0 altogether, and shows nothing");
}

/// Compares an output, and the gradients of a weighted sum of it, with the textbook's, pair by pair.
pub(crate) fn compare(what: &str, (got, want): (&Tensor, &Tensor), weights: &Tensor, pairs: &[(&str, &Tensor, &Tensor)]) {
    compare_within(what, (got, want), weights, pairs, 1e-5);
}

pub(crate) fn compare_within(
    what: &str,
    (got, want): (&Tensor, &Tensor),
    weights: &Tensor,
    pairs: &[(&str, &Tensor, &Tensor)],
    tolerance: f64,
) {
    close(&format!("{what}: o"), got, want, tolerance);
    let gradients = |o: &Tensor| {
        let weights = weights.to_dtype(o.dtype()).unwrap();
        o.broadcast_mul(&weights).unwrap().sum_all().unwrap().backward().unwrap()
    };
    let (mine, theirs) = (gradients(got), gradients(want));
    for (name, a, b) in pairs {
        let a = mine.get(a).unwrap_or_else(|| panic!("{what}: {name} has no gradient"));
        close(&format!("{what}: d{name}"), a, theirs.get(b).unwrap(), tolerance);
    }
}
