//! Converts calls over host memory to bytes for the kernels.

use crate::{Call, Contents, Operand, Ready, Task, Tokens};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::error::Error;
use sdpa_core::executor::{Prepared, PreparedBackward, Report};
use sdpa_core::expr::Declared;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::packed::Documents;
use sdpa_core::params::bind;
use sdpa_core::problem::Problem;
use sdpa_core::{Elements, ElementsMut, HostBackward, HostForward, HostGradient, ParamValue};
use std::borrow::Cow;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// A prepared forward pass.
#[derive(Debug)]
pub(super) struct MetalForward {
    problem: Problem,
    device: String,
    ready: Arc<dyn Ready>,
}

/// A prepared backward pass.
#[derive(Debug)]
pub(super) struct MetalBackward {
    problem: BackwardProblem,
    device: String,
    ready: Arc<dyn Ready>,
}

impl MetalForward {
    pub(super) fn new(problem: Problem, device: String, ready: Arc<dyn Ready>) -> MetalForward {
        MetalForward { problem, device, ready }
    }
}

impl MetalBackward {
    pub(super) fn new(problem: BackwardProblem, device: String, ready: Arc<dyn Ready>) -> MetalBackward {
        MetalBackward { problem, device, ready }
    }
}

fn read(elements: Elements<'_>) -> Contents<'_> {
    Contents::Read(Cow::Borrowed(match elements {
        Elements::F32(x) => x.as_bytes(),
        Elements::F16(x) => x.as_bytes(),
        Elements::BF16(x) => x.as_bytes(),
        // Problems of these types are unsupported.
        Elements::F8E4M3(_) | Elements::F8E5M2(_) => &[],
    }))
}

fn written(elements: ElementsMut<'_>) -> Contents<'_> {
    Contents::Written(match elements {
        ElementsMut::F32(x) => x.as_mut_bytes(),
        ElementsMut::F16(x) => x.as_mut_bytes(),
        ElementsMut::BF16(x) => x.as_mut_bytes(),
        ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => &mut [],
    })
}

fn value<'a>(value: &ParamValue<'a>) -> Cow<'a, [u8]> {
    match value {
        ParamValue::Scalar(x) => Cow::Owned(x.as_bytes().to_vec()),
        ParamValue::F32(x) => Cow::Borrowed(x.as_bytes()),
        ParamValue::F16(x) => Cow::Borrowed(x.as_bytes()),
        ParamValue::BF16(x) => Cow::Borrowed(x.as_bytes()),
        ParamValue::I32(x) => Cow::Borrowed(x.as_bytes()),
        ParamValue::I64(x) => Cow::Borrowed(x.as_bytes()),
        ParamValue::Bool(x) => Cow::Borrowed(x.as_bytes()),
        ParamValue::F8E8M0(x) => Cow::Owned(x.iter().map(|x| x.to_bits()).collect()),
    }
}

/// Values of declared parameters.
struct Values<'v, 'a> {
    declared: &'v [Declared],
    values: &'v [ParamValue<'a>],
}

impl<'a> Values<'_, 'a> {
    fn named(&self, name: &str) -> Option<Cow<'a, [u8]>> {
        let at = self.declared.iter().position(|declared| declared.name == name)?;
        self.values.get(at).map(value)
    }

    /// Returns the bytes of an operand that consists of parameters; `None` for any other.
    fn of(&self, operand: &Operand) -> Option<Cow<'a, [u8]>> {
        match operand {
            Operand::SeqLenQ => self.named(SEQ_LEN_Q),
            Operand::SeqLenKv => self.named(SEQ_LEN_KV),
            Operand::Scalars(names) => {
                let all: Option<Vec<Cow<'a, [u8]>>> = names.iter().map(|name| self.named(name)).collect();
                all.map(|all| Cow::Owned(all.concat()))
            }
            Operand::Declared { name, dtype: _, elements: _ } => self.named(name),
            Operand::Q
            | Operand::K
            | Operand::V
            | Operand::O
            | Operand::DO
            | Operand::DQ
            | Operand::DK
            | Operand::DV
            | Operand::Scratch(_)
            | Operand::Gradient { .. }
            | Operand::Params
            | Operand::Stats
            | Operand::RowMax
            | Operand::SumExp => None,
        }
    }
}

/// Returns the end of the last packed sequence.
fn tokens(problem: &Problem, declared: &[Declared], values: &[ParamValue<'_>]) -> Result<Option<Tokens>, Error> {
    Ok(Documents::new(problem, declared, values)?.as_ref().map(Tokens::from))
}

/// Builds the call: its tensors, and the parameters that the pass reads.
fn call<'a>(
    task: &Task,
    (attn_scale, tokens): (f32, Option<Tokens>),
    mut operands: Vec<(Operand, Contents<'a>)>,
    values: &Values<'_, 'a>,
) -> Call<'a> {
    let captured = task.operands().iter().filter_map(|(operand, _)| Some((operand.clone(), Contents::Read(values.of(operand)?))));
    operands.extend(captured);
    Call { attn_scale, tokens, operands }
}

fn run(device: &str, ready: &dyn Ready, call: Call<'_>) -> Result<Report, Error> {
    let ran = ready.run(call)?;
    let kernels = ready.task().plans().iter().map(|plan| format!("{} of {} threads", plan.entry, plan.threads));
    let engine = format!("{device}: {}", kernels.collect::<Vec<_>>().join(", "));
    let copied = ran.copied.iter().map(Operand::name).collect();
    Ok(Report::new(engine, ran.kernels).with_copied(copied).with_workspace_bytes(ready.task().scratch_bytes()))
}

impl Prepared for MetalForward {
    fn forward(&self, host: HostForward<'_>) -> Result<Report, Error> {
        let attn_scale = host.check(&self.problem)?;
        let values = self.problem.bind(host.params)?;
        let tokens = tokens(&self.problem, self.problem.params(), &values)?;
        let HostForward { q, k, v, o, stats, row_max, sum_exp, .. } = host;
        let mut operands = vec![(Operand::Q, read(q)), (Operand::K, read(k)), (Operand::V, read(v)), (Operand::O, written(o))];
        let of_rows = [(Operand::Stats, stats), (Operand::RowMax, row_max), (Operand::SumExp, sum_exp)];
        operands.extend(of_rows.into_iter().filter_map(|(operand, told)| Some((operand, written(ElementsMut::F32(told?))))));
        let values = Values { declared: self.problem.params(), values: &values };
        run(&self.device, &*self.ready, call(self.ready.task(), (attn_scale, tokens), operands, &values))
    }
}

impl PreparedBackward for MetalBackward {
    fn backward(&self, host: HostBackward<'_>) -> Result<Report, Error> {
        let attn_scale = host.check(&self.problem)?;
        let values = bind(self.problem.params(), self.problem.forward().extents(), host.params)?;
        let tokens = tokens(self.problem.forward(), self.problem.params(), &values)?;
        let HostBackward { q, k, v, o, d_o, stats, dq, dk, dv, gradients, .. } = host;
        let mut operands = vec![
            (Operand::Q, read(q)),
            (Operand::K, read(k)),
            (Operand::V, read(v)),
            (Operand::O, read(o)),
            (Operand::DO, read(d_o)),
            (Operand::Stats, read(Elements::F32(stats))),
            (Operand::DQ, written(dq)),
            (Operand::DK, written(dk)),
            (Operand::DV, written(dv)),
        ];
        operands.extend(gradients.into_iter().map(|HostGradient { name, data, .. }| {
            let operand = Operand::Gradient { name: name.to_owned(), dtype: data.dtype(), elements: data.len() as i64 };
            (operand, written(data))
        }));
        let values = Values { declared: self.problem.params(), values: &values };
        run(&self.device, &*self.ready, call(self.ready.task(), (attn_scale, tokens), operands, &values))
    }
}
