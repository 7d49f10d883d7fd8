//! `run`: computes, checks, writes and prints.

mod choose;
mod documents;
mod plans;
mod tell;

use crate::args::RunArgs;
use crate::cache::kernels;
use crate::exit::{Answer, Failure, Line, Mistakes, Outcome};
use crate::header::file_shape;
use crate::ledger;
use crate::names;
use crate::operands::{self, Operands};
use crate::progress::Progress;
use crate::request::{Request, Wanted};
use crate::save::{Destination, Saved, Tensor};
use choose::{Chosen, choose};
use plans::Plans;
use sdpa::cpu::CpuExecutor;
use sdpa::cuda::KernelCache;
use sdpa::cudnn::ledger::Ledger;
use sdpa::{Dispatcher, Preference};
use sdpa::{Error, ExecutorName, Report, Side};
use tell::{Checked, Told};

/// The parsed arguments.
struct Order {
    request: Request,
    preference: Preference,
    plans: Plans,
    kernel_cache: Option<KernelCache>,
    ledgers: Vec<Ledger>,
    destination: Option<Destination>,
    check: bool,
    seed: u64,
}

impl Order {
    fn read(args: &RunArgs) -> Result<Order, Failure> {
        let example = args.problem.input.is_none() && args.problem.shape.is_none();
        let check = args.check || example;
        let mut mistakes = Mistakes::default();
        let wanted = Wanted { gradient: Some(&args.backward), stats: args.output.is_some() || example, computes: true };
        let request = Request::read(&args.problem, &wanted, &mut mistakes);
        if let Some(request) = &request {
            mistakes.take("memory", operands::fits(request, check, 0));
        }
        let preference = mistakes.take("--executor", args.executor.as_deref().map_or(Ok(Preference::Auto), names::executor));
        let plans = mistakes.take("--plans", Plans::read(&args.plans, args.save_plans.as_ref(), preference));
        args.places.check(&mut mistakes);
        let kernel_cache = if args.no_kernel_cache { None } else { kernels::of_user(&mut mistakes) };
        let ledgers = ledger::of_user(&mut mistakes);
        let seed = mistakes.take("--seed", args.seed.as_deref().map_or(Ok(0), names::seed));
        if args.seed.is_some() && args.problem.input.is_some() {
            mistakes.add("--seed", "cannot be combined with --input, which contains the numbers");
        }
        let destination = args.output.as_deref().map(|path| {
            let input = args.problem.input.as_deref();
            mistakes.take(format!("--output {}", path.display()), Destination::new(path, input))
        });
        let order = request.zip(preference).zip(plans).zip(seed).map(|(((request, preference), plans), seed)| Order {
            request,
            preference,
            plans,
            kernel_cache,
            ledgers,
            destination: destination.flatten(),
            check,
            seed,
        });
        mistakes.finish(order)
    }
}

/// The reports of the passes that ran.
struct Reports {
    forward: Option<Report>,
    backward: Option<Report>,
}

/// Runs the command `run` and returns its output.
pub(crate) fn run(args: &RunArgs, json: bool) -> Result<Answer, Failure> {
    let order = Order::read(args)?;
    let progress = Progress::new(json);
    let Order { request, .. } = &order;
    let scale = request.attn_scale();

    let options = args.places.options().with_tune(args.tune).with_ledgers(order.ledgers.clone());
    let dispatcher = Dispatcher::new(options).with_kernel_cache(order.kernel_cache.clone());
    let chosen = {
        let _step = progress.spinner("preparing");
        order.plans.attach(&dispatcher, order.preference)?;
        choose(&dispatcher, request, order.preference)?
    };
    if chosen.executor == ExecutorName::CPU {
        let workspace = workspace(dispatcher.cpu(), request);
        operands::fits(request, order.check, workspace).map_err(|why| Failure::Mistakes(vec![Line::new("memory", why)]))?;
    }
    let mut operands = Operands::load(request, order.seed, progress)?;
    let reports = {
        let _step = progress.spinner("computing");
        compute(&mut operands, request, &chosen)?
    };
    if let Some(destination) = &order.destination {
        let _step = progress.spinner("writing");
        let written = destination.write(results(&operands, request));
        written.map_err(|e| Failure::environment(destination.path.display(), format!("cannot be written: {e}")))?;
    }
    let bad: Vec<String> = results(&operands, request).iter().filter_map(Tensor::not_numbers).collect();
    operands.notes.extend(bad);
    operands.notes.extend(documents::advice(&operands, request, chosen.executor));
    let checked = order.check.then(|| {
        // Use one progress bar for both passes, so that it ends at 100 %.
        let passes = u64::from(reports.forward.is_some()) + u64::from(request.backward.is_some());
        let step = progress.bar("checking", passes * operands::rows(&request.spec) as u64);
        let forward = reports.forward.is_some().then(|| operands.check(&request.spec, &request.problem, scale, &step));
        let backward = request.backward.as_ref().and_then(|b| operands.check_backward(b, scale, &step));
        Checked::new(forward.as_ref(), backward.as_ref(), &operands)
    });
    let outcome = checked.as_ref().map_or(Outcome::Good, Checked::outcome);
    order.plans.save(&dispatcher, chosen.executor)?;
    let plans = order.plans.told(&dispatcher, chosen.executor, request);
    let told = Told::new(&order, chosen, plans, reports, checked, operands);
    Answer::new(json, &told, || told.text(), outcome)
}

/// Returns the bytes that the passes need besides operands; they run one after the other.
fn workspace(cpu: &CpuExecutor, request: &Request) -> u64 {
    let forward = cpu.workspace_bytes(&request.problem);
    request.backward.as_ref().map_or(forward, |backward| forward.max(cpu.backward_workspace_bytes(&backward.problem)))
}

/// Runs the passes. The first execution on a device loads the kernel, which takes longer than most attention. Therefore the second execution is timed.
fn compute(operands: &mut Operands, request: &Request, chosen: &Chosen) -> Result<Reports, Failure> {
    let failed = |e: Error| Failure::Environment(lines(chosen.executor, &e));
    let scale = request.attn_scale();
    // With 8-bit floats, the first execution also reports the amax values for the scales of the second.
    let narrow = request.problem.dtype().is_fp8() && !request.problem.block_scaled();
    let times = if chosen.executor == ExecutorName::CPU && !narrow { 1 } else { 2 };
    let mut reports = Reports { forward: None, backward: None };
    for time in 0..times {
        if narrow && time > 0 {
            operands.learn(request);
        }
        if let Some(forward) = &chosen.forward {
            reports.forward = Some(operands.forward(forward.as_ref(), &request.problem, scale).map_err(failed)?);
        }
    }
    for time in 0..times {
        if narrow && time > 0 {
            operands.learn(request);
        }
        if let (Some(backward), Some(of)) = (&chosen.backward, &request.backward) {
            reports.backward = operands.backward(backward.as_ref(), &of.problem, scale).transpose().map_err(failed)?;
        }
    }
    Ok(reports)
}

/// Returns all results for the output file.
fn results<'a>(operands: &'a Operands, request: &'a Request) -> Vec<Tensor<'a>> {
    let spec = &request.spec;
    let mut tensors = Vec::new();
    let total = |side: Side| spec.packed.map(|packed| packed.total(side).unwrap_or(0));
    let strided = |name: &str, side: Side, dims: [i64; 4], data| match total(side) {
        Some(total) => Tensor::new(name, &file_shape([1, dims[1], total, dims[3]], request.layout)[1..], Saved::Data(data)),
        None => Tensor::new(name, &file_shape(dims, request.layout), Saved::Data(data)),
    };
    let rows = total(Side::Queries).map_or_else(|| spec.o.dims[..3].to_vec(), |total| vec![total, spec.o.dims[1]]);
    if !request.backward.as_ref().is_some_and(|b| b.given) {
        let statistics = [("stats", &operands.stats), ("row_max", &operands.row_max), ("sum_exp", &operands.sum_exp)];
        let there = statistics.into_iter().filter_map(|(name, numbers)| Some((name, numbers.as_deref()?)));
        tensors.extend(there.map(|(name, numbers)| Tensor::new(name, &rows, Saved::F32(numbers))));
        tensors.push(strided("o", Side::Queries, spec.o.dims, &operands.o));
    }
    tensors.extend(operands.scales.numbers().into_iter().map(|(name, number)| Tensor::new(&name, &[1], Saved::Number([number]))));
    if let Some(gradients) = &operands.gradients {
        tensors.push(strided("dq", Side::Queries, spec.q.dims, &gradients.dq));
        tensors.push(strided("dk", Side::Keys, spec.k.dims, &gradients.dk));
        tensors.push(strided("dv", Side::Keys, spec.v.dims, &gradients.dv));
        for (name, data) in &gradients.wrt {
            let shape = request.params.iter().find(|p| p.declared.name == *name).map_or(&[][..], |p| &p.shape);
            tensors.push(Tensor::new(&format!("d{name}"), shape, Saved::Data(data)));
        }
    }
    tensors
}

/// Converts an executor's error to messages, one line each.
pub(crate) fn lines(executor: ExecutorName, error: &Error) -> Vec<Line> {
    if let Error::Unsupported(unsupported) = error {
        return unsupported.reasons.iter().map(|reason| Line::new(unsupported.executor, reason)).collect();
    }
    vec![Line::new(executor, error)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::data::{Data, Element};
    use crate::operands::Gradients;
    use crate::progress::Step;
    use clap::Parser;
    use sdpa::{AttentionSpec, Layout, Shape};

    /// The exit code of a run depends on this alone.
    #[test]
    fn one_wrong_element_is_past_the_tolerance() {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 33, seq_kv: 40, dim_qk: 16, dim_v: 8 };
        for (element, layout) in [Element::F32, Element::F16, Element::BF16].into_iter().zip([Layout::Bhsd, Layout::Bshd, Layout::Sbhd]) {
            let spec = AttentionSpec::dense(element.dtype(), shape, layout).mask(sdpa::Mask::causal()).with_stats();
            let problem = spec.validate().unwrap();
            let choice = Dispatcher::default().prepare(&problem, Preference::Named(ExecutorName::CPU)).unwrap();
            let mut operands = Operands::random(&spec, element, 1).unwrap();
            operands.forward(choice.prepared.as_ref(), &problem, 0.25).unwrap();
            let passes = |operands: &Operands| operands.check(&spec, &problem, 0.25, &Step::hidden()).passes();
            assert!(passes(&operands));
            assert!(!operands.check(&spec, &problem, 0.26, &Step::hidden()).passes());
            let stats = operands.stats.as_mut().unwrap();
            stats[77] += 0.01;
            assert!(!passes(&operands));
            operands.stats.as_mut().unwrap()[77] -= 0.01;
            match &mut operands.o {
                Data::F32(o) => o[1000] += 1e-3,
                Data::F16(o) => o[1000] = half::f16::from_f32(o[1000].to_f32() + 0.05),
                Data::BF16(o) => o[1000] = half::bf16::from_f32(o[1000].to_f32() + 0.2),
                Data::F8E4M3(..) | Data::F8E5M2(..) => {}
            }
            assert!(!passes(&operands));
        }
    }

    /// Sets an element of one of dq, dk, dv, dbias and dcap, and returns its previous value.
    fn set(gradients: &mut Gradients, which: usize, at: usize, to: f32) -> f32 {
        let Gradients { dq, dk, dv, wrt, .. } = gradients;
        let mut all = vec![dq, dk, dv];
        all.extend(wrt.iter_mut().map(|(_, data)| data));
        match &mut all[which] {
            Data::F32(x) => std::mem::replace(&mut x[at], to),
            Data::F16(x) => std::mem::replace(&mut x[at], half::f16::from_f32(to)).to_f32(),
            Data::BF16(x) => std::mem::replace(&mut x[at], half::bf16::from_f32(to)).to_f32(),
            Data::F8E4M3(x, _) => std::mem::replace(&mut x[at], sdpa::F8E4M3::from_f32(to)).to_f32(),
            Data::F8E5M2(x, _) => std::mem::replace(&mut x[at], sdpa::F8E5M2::from_f32(to)).to_f32(),
        }
    }

    #[test]
    fn one_wrong_gradient_is_past_the_tolerance() {
        for (dtype, by) in [("f32", 0.001), ("f16", 0.2), ("bf16", 1.0)] {
            let line = "sdpa run --shape 2,4,2,33,40,16,8 --bias --score-mod softcap:5 --mask causal --wrt cap --backward --executor cpu";
            let words = line.split(' ').chain(["--dtype", dtype]);
            let Ok(Cli { command: Command::Run(args), json: _ }) = Cli::try_parse_from(words) else { panic!("{line}") };
            let Ok(order) = Order::read(&args) else { panic!("{line}") };
            let request = &order.request;
            let Ok(chosen) = choose(&Dispatcher::default(), request, order.preference) else { panic!("{line}") };
            let mut operands = Operands::load(request, 1, Progress::new(true)).unwrap();
            compute(&mut operands, request, &chosen).unwrap();
            let backward = request.backward.as_ref().unwrap();
            let passes = |operands: &Operands| operands.check_backward(backward, request.attn_scale(), &Step::hidden()).unwrap().passes();
            assert!(passes(&operands), "{dtype}");
            // Spoil one element each of dq (query 7, first head), dk and dv (key 3, last head), dbias (query 9, key 2) and the gradient
            // of the scalar cap.
            let elements = [7 * 16 + 3, (3 * 40 + 3) * 16, (3 * 40 + 3) * 8, 9 * 40 + 2, 0];
            for (which, at) in elements.into_iter().enumerate() {
                let before = set(operands.gradients.as_mut().unwrap(), which, at, f32::NAN);
                assert!(!passes(&operands), "{dtype} {which}");
                set(operands.gradients.as_mut().unwrap(), which, at, before + by * if which == 4 { 100.0 } else { 1.0 });
                assert!(!passes(&operands), "{dtype} {which}: {before}");
                set(operands.gradients.as_mut().unwrap(), which, at, before);
            }
        }
    }
}
