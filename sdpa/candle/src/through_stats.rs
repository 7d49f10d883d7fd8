//! The backward pass of `stats`, the log-sum-exp of each row.
//!
//! Executors compute `dS = P · (dO · Vᵀ - D)` with `D = Σ o · d_o`. The derivative of the log-sum-exp by a score is `P`, so `D = -d_stats` and
//! `V = 0` make `dS` the gradient through `stats`. This pass has its own `v`, `o` and `d_o` with the fewest columns that every executor supports.

use crate::operand::Order;
use crate::param::Ready;
use crate::pass::{Gradients, Pass, Upstream};
use candle_core::{DType, Result, Storage, Tensor};
use sdpa::{Layout, TensorSpec};

/// The number of columns of `v`, `o` and `d_o`: the smallest that every executor supports.
const COLUMNS: usize = 8;

/// The first elements of each row of `o` if it is f16 or bf16. One element would round `d_stats`, and f16 ends at 65,504; three hold an f32.
const CARRIERS: [f64; 3] = [32768.0, 1.0, 1.0 / 4096.0];

/// Returns the pass that computes the gradients of `q`, `k` and parameters through the stats of `pass`, a pass with a backward pass.
pub(crate) fn pass(pass: &Pass) -> Result<Pass> {
    let mut derived = pass.clone();
    let v = &pass.operands[2];
    let mut dims = v.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = COLUMNS;
    }
    derived.operands[2] = Tensor::zeros(dims, v.dtype(), v.device())?;
    derived.out = if pass.packed { Order::Packed } else { Order::Bhsd };
    if let Some(backward) = &mut derived.backward {
        let forward = &mut backward.forward;
        let columns = COLUMNS as i64;
        let of = |order: Order| if order == Order::Bhsd { Layout::Bhsd } else { Layout::Bshd };
        let narrow = |[batch, heads, seq, _]: [i64; 4], order| TensorSpec::dense([batch, heads, seq, columns], of(order));
        (forward.v, backward.dv) = (narrow(forward.v.dims, pass.order), narrow(forward.v.dims, pass.order));
        (forward.o, backward.d_o) = (narrow(forward.o.dims, derived.out), narrow(forward.o.dims, derived.out));
    }
    Ok(derived)
}

/// Computes the gradients through `stats` with such a pass.
pub(crate) fn backward(derived: &Pass, stats: &Tensor, d_stats: &Tensor) -> Result<Gradients> {
    let dtype = derived.operands[2].dtype();
    // A row without keys and sink has the constant stats of −∞.
    let constant = stats.eq(f32::NEG_INFINITY)?;
    let d_stats = constant.where_cond(&d_stats.zeros_like()?, &d_stats.contiguous()?)?;
    let [o, d_o] = columns(&d_stats.neg()?, dtype)?;
    let mut gradients = derived.backward(&Upstream { o: &o, stats, d_o: &d_o })?;
    let wrt = derived.backward.as_ref().map_or(&[][..], |spec| &spec.wrt);
    let sink = derived.params.iter().find(|param| param.name == sdpa::SINK).map(|param| &param.value);
    if let (Some(place), Some(Ready::Tensor(_, sink))) = (wrt.iter().position(|g| g.name == sdpa::SINK), sink) {
        gradients.params[place] = gradient_of_sink(sink, stats, &constant, &d_stats, derived.packed)?;
    }
    Ok(gradients)
}

/// Returns the gradient of the sink. Executors leave out rows that attend to no key: there `o` is 0, but the stats are the sink.
fn gradient_of_sink(sink: &Tensor, stats: &Tensor, constant: &Tensor, d_stats: &Tensor, packed: bool) -> Result<Storage> {
    let by_head = if packed { sink.reshape((1, ()))? } else { sink.reshape((1, (), 1))? };
    let share = by_head.broadcast_sub(stats)?.exp()?;
    let share = constant.where_cond(&share.zeros_like()?, &share)?;
    let rows = (share * d_stats)?;
    let sum = if packed { rows.sum(0)? } else { rows.sum((0, 2))? };
    let (storage, layout) = sum.storage_and_layout();
    storage.try_clone(layout)
}

/// Returns `o` and `d_o` of this type, whose product summed over the columns is `sums`.
fn columns(sums: &Tensor, dtype: DType) -> Result<[Tensor; 2]> {
    let column = sums.unsqueeze(sums.rank())?;
    let of = |value: f64| column.zeros_like()?.affine(1., value)?.to_dtype(dtype);
    let (mut o, mut d_o) = (Vec::new(), Vec::new());
    if dtype == DType::F32 {
        o.push(of(1.)?);
        d_o.push(column.clone());
    } else {
        let largest = if dtype == DType::F16 { 65504.0 } else { f64::from(f32::MAX) / 2.0 };
        // `clamp` makes a number of infinity; infinity and NaN times 0 are NaN.
        let invalid = column.affine(0., 0.)?;
        let mut rest = column.clone();
        for carrier in CARRIERS {
            let part = (((&rest / carrier)?.clamp(-largest, largest)? + &invalid)?).to_dtype(dtype)?;
            rest = (rest - (part.to_dtype(DType::F32)? * carrier)?)?;
            o.push(of(carrier)?);
            d_o.push(part);
        }
    }
    let zeros = of(0.)?;
    o.resize(COLUMNS, zeros.clone());
    d_o.resize(COLUMNS, zeros);
    let last = column.rank() - 1;
    Ok([Tensor::cat(&o, last)?, Tensor::cat(&d_o, last)?])
}
