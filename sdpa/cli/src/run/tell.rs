//! The output of a run.

use super::{Order, Reports, choose::Chosen, plans::PlanTold};
use crate::exit::Outcome;
use crate::memory;
use crate::operands::Operands;
use crate::params::Planned;
use crate::request::Source;
use crate::table::{Table, list};
use sdpa::{ExecutorName, Reason, Report, Shape, Unsupported};
use sdpa_oracle::{Distance, GradientDistance, Norms, Tally, Verdict};
use serde::Serialize;

/// An executor that does not support the problem, with its reasons.
#[derive(Serialize)]
struct UnsupportedExecutor {
    executor: ExecutorName,
    reasons: Vec<Reason>,
    text: String,
}

impl UnsupportedExecutor {
    fn new(unsupported: &Unsupported) -> UnsupportedExecutor {
        let text = unsupported.reasons.iter().map(Reason::to_string).collect::<Vec<_>>().join("; ").replace('\n', "; ");
        UnsupportedExecutor { executor: unsupported.executor, reasons: unsupported.reasons.clone(), text }
    }
}

/// The element with the largest ratio of error and tolerance.
#[derive(Serialize)]
struct Worst {
    error: f64,
    tolerance: f64,
    /// `error` divided by `tolerance`; above 1 the element fails.
    ratio: f64,
    /// Number of elements whose tolerance accepts any result.
    undecided: u64,
}

impl From<sdpa_oracle::Worst> for Worst {
    fn from(worst: sdpa_oracle::Worst) -> Worst {
        let sdpa_oracle::Worst { got: _, want: _, error, tolerance, ratio, undecided } = worst;
        Worst { error, tolerance, ratio, undecided }
    }
}

/// The check of one gradient.
#[derive(Serialize)]
struct GradientCheck {
    name: String,
    relative: f64,
    #[serde(flatten)]
    norm: Norm,
    #[serde(flatten)]
    worst: Worst,
}

impl GradientCheck {
    fn text(&self) -> String {
        format!("{}; relative {:.1e}{}", worst(&self.name, &self.worst), self.relative, self.norm.text())
    }
}

/// The norm of the error of one result, compared with its limit.
#[derive(Clone, Copy, Serialize)]
struct Norm {
    /// The norm of the error of the worst tile, divided by its limit: above 1 the result fails.
    bound: f64,
    /// False if rounding may change a tile, or a parameter's complete gradient, by more than its norm.
    decided: bool,
}

impl Norm {
    fn new(norms: Norms) -> Norm {
        Norm { bound: norms.bound(), decided: norms.undecided() == 0 }
    }

    fn text(self) -> String {
        let undecided = if self.decided { "" } else { "; undecided" };
        format!(" ({:.0} % of its bound){undecided}", self.bound * 100.0)
    }
}

/// The check of the output or of a row statistic.
#[derive(Serialize)]
struct OutputCheck {
    #[serde(flatten)]
    worst: Worst,
    #[serde(flatten)]
    norm: Norm,
}

impl OutputCheck {
    fn new((worst, norms): (sdpa_oracle::Worst, Norms)) -> OutputCheck {
        OutputCheck { worst: worst.into(), norm: Norm::new(norms) }
    }
}

/// The comparison with the oracle.
#[derive(Serialize)]
pub(super) struct Checked {
    passed: bool,
    #[serde(skip)]
    verdicts: Vec<Verdict>,
    /// Number of elements whose tolerance accepts any result.
    undecided: u64,
    o_relative: Option<f64>,
    o: Option<OutputCheck>,
    stats: Option<OutputCheck>,
    #[serde(skip_serializing_if = "Option::is_none")]
    row_max: Option<OutputCheck>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sum_exp: Option<OutputCheck>,
    gradients: Option<Vec<GradientCheck>>,
    /// Largest magnitudes of tensors that a pass of 8-bit floats does not return.
    #[serde(skip_serializing_if = "Option::is_none")]
    amax_s: Option<Worst>,
    #[serde(skip_serializing_if = "Option::is_none")]
    amax_dp: Option<Worst>,
}

impl Checked {
    pub(super) fn new(forward: Option<&Distance>, backward: Option<&GradientDistance>, operands: &Operands) -> Checked {
        let wrt = operands.gradients.iter().flat_map(|gradients| &gradients.wrt).map(|(name, _)| format!("d{name}"));
        let names = ["dq", "dk", "dv"].into_iter().map(str::to_owned).chain(wrt);
        let one = |(name, tally): (String, &Tally)| GradientCheck {
            name,
            relative: tally.relative(),
            norm: Norm { bound: tally.bound(), decided: tally.is_decided() },
            worst: tally.worst.into(),
        };
        let verdicts: Vec<Verdict> = forward.map(Distance::verdict).into_iter().chain(backward.map(GradientDistance::verdict)).collect();
        let of_rows = |n: usize| forward.and_then(|f| f.statistics()[n].zip(Some(f.norms()[n + 1]))).map(OutputCheck::new);
        Checked {
            passed: !verdicts.contains(&Verdict::Failed),
            verdicts,
            undecided: forward.map_or(0, Distance::undecided) + backward.map_or(0, GradientDistance::undecided),
            o_relative: forward.map(Distance::o_relative),
            o: forward.map(|f| OutputCheck::new((f.o, f.norms()[0]))),
            stats: of_rows(0),
            row_max: of_rows(1),
            sum_exp: of_rows(2),
            gradients: backward.map(|backward| names.zip(backward.all()).map(one).collect()),
            amax_s: forward.and_then(|f| f.amax_s).map(Worst::from),
            amax_dp: backward.and_then(|b| b.amax_dp.as_deref()).map(|amax| Worst::from(*amax)),
        }
    }

    /// Iterates over the compared output and row statistics.
    fn outputs(&self) -> impl Iterator<Item = (&'static str, &OutputCheck)> {
        let named = [("o", &self.o), ("stats", &self.stats), ("row_max", &self.row_max), ("sum_exp", &self.sum_exp)];
        named.into_iter().filter_map(|(name, check)| Some((name, check.as_ref()?)))
    }

    /// Iterates over the compared largest magnitudes.
    fn magnitudes(&self) -> impl Iterator<Item = (&'static str, &Worst)> {
        let named = [("amax_s", &self.amax_s), ("amax_dp", &self.amax_dp)];
        named.into_iter().filter_map(|(name, check)| Some((name, check.as_ref()?)))
    }

    /// Returns the names of results that rounding may change by more than their norm.
    fn undecided_norms(&self) -> Vec<&str> {
        let gradients = self.gradients.iter().flatten().map(|gradient| (gradient.name.as_str(), gradient.norm));
        let all = self.outputs().map(|(name, check)| (name, check.norm)).chain(gradients);
        all.filter(|(_, norm)| !norm.decided).map(|(name, _)| name).collect()
    }

    pub(super) fn outcome(&self) -> Outcome {
        if self.verdicts.contains(&Verdict::Failed) {
            Outcome::PastTolerance
        } else if self.verdicts.contains(&Verdict::Undecided) {
            Outcome::Undecided
        } else {
            Outcome::Good
        }
    }

    /// Describes the verdict in a word or a sentence.
    fn verdict(&self) -> String {
        match self.outcome() {
            Outcome::PastTolerance => "FAILED".to_owned(),
            Outcome::Undecided => {
                let elements = (self.undecided > 0)
                    .then(|| format!("the rounding of scores may change {} elements by more than their size", self.undecided));
                let norms = self.undecided_norms();
                let norms = (!norms.is_empty()).then(|| format!("rounding may change {} by more than the norm", norms.join(", ")));
                let magnitudes = self.magnitudes().filter(|(_, check)| check.undecided > 0);
                let magnitudes = magnitudes.map(|(name, _)| format!("rounding may change {name} by more than itself"));
                format!("UNDECIDED: {}", elements.into_iter().chain(norms).chain(magnitudes).collect::<Vec<_>>().join("; "))
            }
            Outcome::Good | Outcome::NoExecutor => "passed".to_owned(),
        }
    }
}

/// A declared parameter.
#[derive(Serialize)]
struct ParamTold {
    name: String,
    kind: String,
    /// The value of a scalar.
    value: Option<f32>,
    /// The shape of a tensor, as in the file.
    shape: Option<Vec<i64>>,
}

impl ParamTold {
    fn new(planned: &Planned) -> ParamTold {
        let value = planned.scalar();
        let shape = value.is_none().then(|| planned.shape.clone());
        ParamTold { name: planned.declared.name.clone(), kind: planned.kind(), value, shape }
    }

    fn text(&self) -> String {
        match (self.value, &self.shape) {
            (Some(value), _) => format!("{} = {value}", self.name),
            (None, Some(shape)) => format!("{}: {}, {shape:?}", self.name, self.kind),
            (None, None) => self.name.clone(),
        }
    }
}

/// One pass.
#[derive(Serialize)]
struct Pass {
    engine: String,
    copied: Vec<&'static str>,
    workspace_bytes: u64,
    compute_ms: f64,
    tflops: f64,
}

impl Pass {
    fn new(report: Report, flops: f64) -> Pass {
        let Report { engine, copied, workspace_bytes, compute, .. } = report;
        let compute_ms = compute.as_secs_f64() * 1e3;
        let tflops = flops / (compute_ms.max(1e-6) * 1e9);
        Pass { engine, copied, workspace_bytes, compute_ms, tflops }
    }
}

/// The backward pass.
#[derive(Serialize)]
struct BackwardTold {
    deterministic: bool,
    wrt: Vec<String>,
    #[serde(flatten)]
    pass: Option<Pass>,
}

/// The JSON of a run.
#[derive(Serialize)]
pub(super) struct Told {
    executor: ExecutorName,
    /// The reason why cuDNN was tried first, on an NVIDIA GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    order: Option<String>,
    /// The timed executors that replaced that order.
    #[serde(skip_serializing_if = "Option::is_none")]
    timed: Option<String>,
    unsupported: Vec<UnsupportedExecutor>,
    /// Features that no ledger of the executor covers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unproven: Vec<String>,
    shape: Shape,
    layout: &'static str,
    score_mods: Vec<String>,
    masks: Vec<String>,
    params: Vec<ParamTold>,
    dtype: &'static str,
    scale: f32,
    stats: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    row_max: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    sum_exp: bool,
    /// Scales and largest magnitudes of 8-bit floats.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    scales: Vec<(String, f32)>,
    input: Option<String>,
    seed: Option<u64>,
    /// The plans of cuDNN, or the kernels of the native CUDA executor.
    plans: Vec<PlanTold>,
    engine: Option<String>,
    copied: Option<Vec<&'static str>>,
    workspace_bytes: Option<u64>,
    compute_ms: Option<f64>,
    tflops: Option<f64>,
    backward: Option<BackwardTold>,
    check: Option<Checked>,
    output: Option<String>,
    notes: Vec<String>,
}

impl Told {
    pub(super) fn new(
        order: &Order,
        chosen: Chosen,
        plans: Vec<PlanTold>,
        reports: Reports,
        check: Option<Checked>,
        operands: Operands,
    ) -> Told {
        let request = &order.request;
        let (input, seed) = match &request.source {
            Source::File(header, ..) => (Some(header.path.display().to_string()), None),
            Source::Random => (None, Some(order.seed)),
        };
        let forward = reports.forward.map(|report| Pass::new(report, request.problem.flops()));
        let backward = request.backward.as_ref().map(|b| BackwardTold {
            deterministic: b.problem.deterministic(),
            wrt: b.problem.wrt().iter().map(|g| g.name.clone()).collect(),
            pass: reports.backward.map(|report| Pass::new(report, b.problem.flops())),
        });
        let on_nvidia = [ExecutorName::CUDNN, ExecutorName::CUDA].contains(&chosen.executor);
        Told {
            executor: chosen.executor,
            order: request.cudnn_first().filter(|_| on_nvidia && chosen.timed.is_none()).map(ToString::to_string),
            timed: chosen.timed.as_ref().map(ToString::to_string),
            unsupported: chosen.unsupported.iter().map(UnsupportedExecutor::new).collect(),
            unproven: chosen.unproven.iter().map(ToString::to_string).collect(),
            shape: request.shape(),
            layout: request.layout.name(),
            score_mods: request.score_mods(),
            masks: request.masks(),
            // FP8 scales are listed in `scales`, with their values.
            params: request.params.iter().filter(|p| !p.is_scale()).map(ParamTold::new).collect(),
            dtype: request.element.dtype().name(),
            scale: request.attn_scale(),
            stats: request.spec.stats,
            row_max: request.spec.row_max,
            sum_exp: request.spec.sum_exp,
            scales: if request.problem.dtype().is_fp8() { operands.scales.numbers() } else { Vec::new() },
            input,
            seed,
            plans,
            engine: forward.as_ref().map(|f| f.engine.clone()),
            copied: forward.as_ref().map(|f| f.copied.clone()),
            workspace_bytes: forward.as_ref().map(|f| f.workspace_bytes),
            compute_ms: forward.as_ref().map(|f| f.compute_ms),
            tflops: forward.as_ref().map(|f| f.tflops),
            backward,
            check,
            output: order.destination.as_ref().map(|d| d.path.display().to_string()),
            notes: operands.notes,
        }
    }

    pub(super) fn text(&self) -> String {
        let mut table = Table::default();
        let s = &self.shape;
        table.row("executor", self.executor.name());
        table.rows("order", self.order.clone());
        table.rows("timed", self.timed.clone());
        table.rows("unsupported", self.unsupported.iter().map(|d| format!("{}: {}", d.executor, d.text)));
        table.rows("unproven", self.unproven.iter().map(|why| why.trim_start_matches("unproven on ").to_owned()));
        table.row(
            "shape",
            format!(
                "batch {}, heads {} on {}, queries {}, keys {}, dims {} and {}, {}",
                s.batch, s.heads_q, s.heads_kv, s.seq_q, s.seq_kv, s.dim_qk, s.dim_v, self.layout
            ),
        );
        table.rows("score_mod", self.score_mods.iter().cloned());
        table.row("masks", list(&self.masks));
        table.rows("params", self.params.iter().map(ParamTold::text));
        table.row("dtype", self.dtype);
        table.row("scale", self.scale.to_string());
        let scales: Vec<String> = self.scales.iter().map(|(name, value)| format!("{name} {value:.4e}")).collect();
        table.rows("scales", scales.chunks(4).map(|some| some.join(", ")));
        table.rows("input", self.input.iter().cloned());
        table.rows("seed", self.seed.iter().map(u64::to_string));
        table.rows("plans", self.plans.iter().map(PlanTold::text));
        table.rows("note", self.notes.iter().cloned());
        if let (Some(engine), Some(copied), Some(bytes), Some(ms), Some(tflops)) =
            (&self.engine, &self.copied, self.workspace_bytes, self.compute_ms, self.tflops)
        {
            pass(&mut table, engine, copied, bytes, (ms, tflops));
        }
        if let Some(backward) = &self.backward {
            let wrt = backward.wrt.iter().map(|name| format!("d{name}"));
            let gradients: Vec<String> = ["dq", "dk", "dv"].into_iter().map(str::to_owned).chain(wrt).collect();
            table.row("backward", format!("{}{}", list(&gradients), if backward.deterministic { "; deterministic" } else { "" }));
            if let Some(p) = &backward.pass {
                pass(&mut table, &p.engine, &p.copied, p.workspace_bytes, (p.compute_ms, p.tflops));
            }
        }
        table.rows("output", self.output.iter().cloned());
        if let Some(check) = &self.check {
            table.row("check", check.verdict());
            let relative =
                |name: &str| check.o_relative.filter(|_| name == "o").map_or_else(String::new, |x| format!("; relative {x:.1e}"));
            table.rows("", check.outputs().map(|(name, of)| format!("{}{}{}", worst(name, &of.worst), relative(name), of.norm.text())));
            table.rows("", check.magnitudes().map(|(name, check)| worst(name, check)));
            let gradients = check.gradients.iter().flatten();
            table.rows("", gradients.map(GradientCheck::text));
        }
        table.render()
    }
}

fn pass(table: &mut Table, engine: &str, copied: &[&'static str], workspace: u64, (ms, tflops): (f64, f64)) {
    table.row("engine", engine);
    table.row("copied", list(copied));
    table.row("workspace", memory::human(u128::from(workspace)));
    table.row("compute", format!("{ms:.3} ms, {tflops:.3} TFLOP/s"));
}

fn worst(name: &str, worst: &Worst) -> String {
    let undecided = if worst.undecided > 0 { format!("; {} elements undecided", worst.undecided) } else { String::new() };
    format!("{name}: error {:.1e}, tolerance {:.1e} ({:.0} % of it){undecided}", worst.error, worst.tolerance, worst.ratio * 100.0)
}
