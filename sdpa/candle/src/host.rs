//! Tensors in host memory, on the CPU executor.

use crate::error::{bug, wrap};
use crate::operand::theirs;
use crate::param::{Bound, Ready};
use crate::pass::{Gradients, Outputs, Pass, Upstream, elements, gradient_elements, span};
use candle_core::{CpuStorage, Result, Storage, Tensor};
use half::{bf16, f16};
use sdpa::cpu::CpuExecutor;
use sdpa::{BackwardProblem, DType, Elements, ElementsMut, Executor, HostBackward, HostForward, HostGradient, Param, ParamValue};
use std::sync::OnceLock;

/// Returns the executor, which detects the instruction set once.
pub(crate) fn executor() -> &'static CpuExecutor {
    static CPU: OnceLock<CpuExecutor> = OnceLock::new();
    CPU.get_or_init(CpuExecutor::default)
}

/// Returns the host storage of a tensor.
fn storage(guard: &Storage) -> Result<&CpuStorage> {
    match guard {
        Storage::Cpu(storage) => Ok(storage),
        Storage::Cuda(_) | Storage::Metal(_) => Err(bug("a tensor on the CPU is somewhere else")),
    }
}

fn read<'a>(storage: &'a CpuStorage, tensor: &Tensor, dtype: DType) -> Result<Elements<'a>> {
    let span = span(tensor);
    Ok(match dtype {
        DType::F32 => Elements::F32(&storage.as_slice::<f32>()?[span]),
        DType::F16 => Elements::F16(&storage.as_slice::<f16>()?[span]),
        DType::BF16 => Elements::BF16(&storage.as_slice::<bf16>()?[span]),
        DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => {
            return Err(bug("an operand that is no floating point number"));
        }
    })
}

/// Memory for a result.
enum Fresh {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Fresh {
    fn new(dtype: DType, elements: usize) -> Result<Fresh> {
        Ok(match dtype {
            DType::F32 => Fresh::F32(vec![0.0; elements]),
            DType::F16 => Fresh::F16(vec![f16::ZERO; elements]),
            DType::BF16 => Fresh::BF16(vec![bf16::ZERO; elements]),
            DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => {
                return Err(bug("a result that is no floating point number"));
            }
        })
    }

    fn write(&mut self) -> ElementsMut<'_> {
        match self {
            Fresh::F32(x) => ElementsMut::F32(x),
            Fresh::F16(x) => ElementsMut::F16(x),
            Fresh::BF16(x) => ElementsMut::BF16(x),
        }
    }

    fn done(self) -> Storage {
        Storage::Cpu(match self {
            Fresh::F32(x) => CpuStorage::F32(x),
            Fresh::F16(x) => CpuStorage::F16(x),
            Fresh::BF16(x) => CpuStorage::BF16(x),
        })
    }
}

fn value<'a>(ready: &'a Ready, storage: Option<&'a CpuStorage>) -> Result<ParamValue<'a>> {
    Ok(match ready {
        Ready::Scalar(x) | Ready::Number(x, _) => ParamValue::Scalar(*x),
        Ready::Bools(x) => ParamValue::Bool(x),
        Ready::I32(x) => ParamValue::I32(x),
        Ready::I64(x) => ParamValue::I64(x),
        Ready::Tensor(dtype, tensor) => {
            let storage = storage.ok_or_else(|| bug("a parameter without its storage"))?;
            let span = span(tensor);
            match dtype {
                DType::F32 => ParamValue::F32(&storage.as_slice::<f32>()?[span]),
                DType::F16 => ParamValue::F16(&storage.as_slice::<f16>()?[span]),
                DType::BF16 => ParamValue::BF16(&storage.as_slice::<bf16>()?[span]),
                DType::I32 => ParamValue::I32(&storage.as_slice::<i32>()?[span]),
                DType::I64 => ParamValue::I64(&storage.as_slice::<i64>()?[span]),
                DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => return Err(bug("a parameter of 8 bits")),
                DType::Bool => return Err(bug(&format!("truth values of {} in host memory", theirs(*dtype).as_str()))),
            }
        }
    })
}

/// Calls `f` with the values of these parameters, with their storages locked.
fn with_params<R>(params: &[&Bound], f: impl FnOnce(&[Param<'_>]) -> Result<R>) -> Result<R> {
    let guards: Vec<_> = params
        .iter()
        .map(|bound| match &bound.value {
            Ready::Tensor(_, tensor) => Some(tensor.storage_and_layout().0),
            Ready::Scalar(_) | Ready::Number(..) | Ready::Bools(_) | Ready::I32(_) | Ready::I64(_) => None,
        })
        .collect();
    let values: Vec<Param<'_>> = params
        .iter()
        .zip(&guards)
        .map(|(bound, guard)| {
            let storage = guard.as_ref().map(|guard| storage(guard)).transpose()?;
            Ok(Param::new(&bound.name, value(&bound.value, storage)?))
        })
        .collect::<Result<_>>()?;
    f(&values)
}

pub(crate) fn forward(pass: &Pass) -> Result<Outputs> {
    let problem = &pass.problem;
    let prepared = if pass.plan.is_none() { Some(executor().prepare(problem).map_err(wrap)?) } else { None };
    let mut o = Fresh::new(problem.dtype(), elements(&pass.out_shape()))?;
    // The pass does not write rows outside of all sequences, so set them to −∞ first.
    let mut stats = problem.stats().then(|| vec![f32::NEG_INFINITY; elements(&pass.stats_shape())]);
    let [q, k, v] = &pass.operands;
    let guards = [q, k, v].map(|x| x.storage_and_layout().0);
    let at = |n: usize| read(storage(&guards[n])?, &pass.operands[n], problem.dtype());
    let params: Vec<&Bound> = pass.params.iter().zip(&pass.only_backward).filter(|(_, only)| !**only).map(|(p, _)| p).collect();
    with_params(&params, |params| {
        let call = HostForward::new(at(0)?, at(1)?, at(2)?, o.write())
            .statistics([stats.as_deref_mut(), None, None])
            .attn_scale(pass.attn_scale)
            .params(params);
        match (&pass.plan, &prepared) {
            (Some(plan), _) => plan.forward(call),
            (None, Some(prepared)) => prepared.forward(call).map(drop).map_err(wrap),
            (None, None) => Err(bug("a pass without a plan")),
        }
    })?;
    Ok(Outputs { o: o.done(), stats: stats.map(|stats| Storage::Cpu(CpuStorage::F32(stats))) })
}

pub(crate) fn backward(pass: &Pass, problem: &BackwardProblem, upstream: &Upstream<'_>) -> Result<Gradients> {
    let prepared = if pass.plan.is_none() { Some(executor().prepare_backward(problem).map_err(wrap)?) } else { None };
    let dtype = problem.forward().dtype();
    let fresh = |n: usize| Fresh::new(dtype, gradient_elements(pass, n));
    let (mut dq, mut dk, mut dv) = (fresh(0)?, fresh(1)?, fresh(2)?);
    let asked = pass.backward.as_ref().map_or(&[][..], |spec| &spec.wrt);
    let mut wrt: Vec<Fresh> =
        asked.iter().map(|g| Fresh::new(g.dtype, problem.gradient_elements(&g.name) as usize)).collect::<Result<_>>()?;
    let [q, k, v] = &pass.operands;
    let tensors = [q, k, v, upstream.o, upstream.d_o];
    let guards = tensors.map(|x| x.storage_and_layout().0);
    let at = |n: usize| read(storage(&guards[n])?, tensors[n], dtype);
    let stats = upstream.stats.storage_and_layout().0;
    let stats = &storage(&stats)?.as_slice::<f32>()?[span(upstream.stats)];
    with_params(&pass.params.iter().collect::<Vec<_>>(), |params| {
        let gradients = asked.iter().zip(&mut wrt).map(|(g, fresh)| HostGradient::new(&g.name, fresh.write()));
        let call = HostBackward::new((at(0)?, at(1)?, at(2)?), (at(3)?, stats), at(4)?, (dq.write(), dk.write(), dv.write()))
            .attn_scale(pass.attn_scale)
            .params(params)
            .gradients(gradients);
        match (&pass.plan, &prepared) {
            (Some(plan), _) => plan.backward(call),
            (None, Some(prepared)) => prepared.backward(call).map(drop).map_err(wrap),
            (None, None) => Err(bug("a pass without a plan")),
        }
    })?;
    Ok(Gradients { operands: [dq.done(), dk.done(), dv.done()], params: wrt.into_iter().map(Fresh::done).collect() })
}
