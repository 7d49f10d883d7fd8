//! Every case of the project over the recording library, on device memory that is exactly as large as a call needs: what is submitted
//! lies within it, and a byte less of any of it submits nothing. What the engines make of it is for the tests on a GPU.

use crate::is_newer;
use conformance::case::Case;
use conformance::random::Random;
use conformance::recorder::entry::{EXECUTION, Entry};
use conformance::recorder::{Recorder, whole};
use conformance::runner::{random_paged, random_spec};
use conformance::say::{say, skip};
use cudnn_graph::ffi::codes::Kind;
use cudnn_graph::{Buffer, DeviceSlice, Handle};
use sdpa::cudnn::Error;
use sdpa::cudnn::{DeviceBackward, DeviceForward, DeviceGradient, DeviceParam, DeviceValue, Planned, with_defaults};
use sdpa::expr::ParamKind;
use sdpa::{AttentionSpec, BackwardSpec, DType, Side, Statistic, TensorSpec, params};
use std::sync::Arc;

/// Memory for so many bytes, and one more, for whoever shifts it.
fn room(recorder: &Recorder, bytes: u64) -> Buffer {
    recorder.buffer(bytes + 1)
}

/// As many bytes as were asked for.
fn exact(buffer: &Buffer) -> DeviceSlice {
    let all = whole(buffer);
    DeviceSlice { bytes: all.bytes - 1, ..all }
}

/// Device memory of a call by name, in the order of the call.
struct Memory {
    tensors: Vec<(&'static str, Buffer)>,
    params: Vec<(String, Option<(DType, Buffer)>)>,
    gradients: Vec<(String, Buffer)>,
    /// In the order of `Statistic::ALL`.
    statistics: [Buffer; 3],
    workspace: Buffer,
}

/// One thing of a call that is made wrong: its place in the order of `Memory`, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    Short(usize),
    Misaligned(usize),
}

impl Wrong {
    fn bend(self, place: usize, slice: DeviceSlice) -> DeviceSlice {
        match self {
            Wrong::Short(at) if at == place => DeviceSlice { bytes: slice.bytes - 1, ..slice },
            Wrong::Misaligned(at) if at == place => DeviceSlice { address: slice.address + 1, ..slice },
            Wrong::Nothing | Wrong::Short(_) | Wrong::Misaligned(_) => slice,
        }
    }
}

impl Memory {
    fn new(recorder: &Recorder, planned: &Planned, tensors: &[(&'static str, TensorSpec)], wrt: &[(String, DType)]) -> Memory {
        let problem = planned.job.problem();
        let element = u64::from(problem.dtype().bits() / 8);
        let declared = planned.job.params();
        let elements = |name: &str| {
            let p = declared.iter().find(|p| p.name == name).unwrap();
            params::elements(p, problem.extents()).unsigned_abs()
        };
        Memory {
            tensors: tensors.iter().map(|(name, t)| (*name, room(recorder, t.extent().unwrap().unsigned_abs() * element))).collect(),
            params: declared
                .iter()
                .map(|p| match p.kind {
                    ParamKind::Scalar => (p.name.clone(), None),
                    ParamKind::Tensor { dtype, axes: _ } => (p.name.clone(), Some((dtype, room(recorder, dtype.bytes(elements(&p.name)))))),
                })
                .collect(),
            gradients: wrt.iter().map(|(name, dtype)| (name.clone(), room(recorder, dtype.bytes(elements(name))))).collect(),
            statistics: Statistic::ALL.map(|_| room(recorder, problem.stats_elements().unsigned_abs() * 4)),
            workspace: room(recorder, planned.workspace_bytes()),
        }
    }

    /// How many things there are to be wrong.
    fn places(&self) -> usize {
        self.tensors.len() + self.params.len() + self.gradients.len() + self.statistics.len() + 1
    }

    /// What is at a place, and whether it is memory.
    fn name(&self, place: usize) -> (String, bool) {
        let tensors = self.tensors.iter().map(|(name, _)| ((*name).to_owned(), true));
        let params = self.params.iter().map(|(name, tensor)| (name.clone(), tensor.is_some()));
        let gradients = self.gradients.iter().map(|(name, _)| (format!("the gradient of {name}"), true));
        let statistics = Statistic::ALL.map(|statistic| (statistic.name().to_owned(), true));
        let rest = statistics.into_iter().chain([("the workspace".to_owned(), true)]);
        tensors.chain(params).chain(gradients).chain(rest).nth(place).unwrap()
    }

    fn tensor(&self, wrong: Wrong, name: &str) -> DeviceSlice {
        let place = self.tensors.iter().position(|(n, _)| *n == name).unwrap();
        wrong.bend(place, exact(&self.tensors[place].1))
    }

    /// Makes a call, with one thing wrong in it, and gives what was submitted.
    fn call(&self, recorder: &Recorder, planned: &Planned, handle: &Handle, wrong: Wrong) -> (Result<(), Error>, Vec<Entry>) {
        let declared = planned.job.params();
        let first = self.tensors.len();
        let tensors = self.params.iter().enumerate().filter_map(|(n, (name, tensor))| {
            let (dtype, buffer) = tensor.as_ref()?;
            Some(DeviceParam::new(name, DeviceValue::Tensor(*dtype, wrong.bend(first + n, exact(buffer)))))
        });
        let mut params = with_defaults(declared, tensors.collect());
        let scalars = self.params.iter().filter(|(name, tensor)| tensor.is_none() && params.iter().all(|p| p.name != name));
        let scalars: Vec<_> = scalars.map(|(name, _)| DeviceParam::new(name, DeviceValue::Scalar(1.5))).collect();
        params.extend(scalars);
        let first = first + self.params.len();
        let gradients = self.gradients.iter().enumerate();
        let gradients: Vec<_> =
            gradients.map(|(n, (name, buffer))| DeviceGradient::new(name, wrong.bend(first + n, exact(buffer)))).collect();
        let last = first + self.gradients.len();
        let of_rows: [DeviceSlice; 3] = std::array::from_fn(|n| wrong.bend(last + n, exact(&self.statistics[n])));
        let workspace = Some(wrong.bend(last + of_rows.len(), exact(&self.workspace)));
        let [q, k, v, o] = ["q", "k", "v", "o"].map(|name| self.tensor(wrong, name));
        let params = &params[..];
        if self.tensors.len() == 4 {
            let asked = |statistic: Statistic| planned.job.problem().computes(statistic).then_some(of_rows[statistic as usize]);
            let [stats, row_max, sum_exp] = Statistic::ALL.map(asked);
            let call = DeviceForward::new(q, k, v, o).stats(stats).row_max(row_max).sum_exp(sum_exp).params(params).workspace(workspace);
            return recorder.record(|| recorder.forward(planned, handle, &call));
        }
        let [d_o, dq, dk, dv] = ["d_o", "dq", "dk", "dv"].map(|name| self.tensor(wrong, name));
        let gradients = &gradients[..];
        let call =
            DeviceBackward::new((q, k, v), (o, of_rows[0]), d_o, (dq, dk, dv)).params(params).gradients(gradients).workspace(workspace);
        recorder.record(|| recorder.backward(planned, handle, &call))
    }
}

/// What became of the passes.
#[derive(Default)]
struct Tally {
    taken: usize,
    unsupported: usize,
    refused: usize,
    wrong: Vec<String>,
}

impl Tally {
    fn forward(&mut self, recorder: &Recorder, name: &str, spec: &AttentionSpec) {
        let made = recorder.executor().attention(&spec.validate().unwrap_or_else(|e| panic!("{name}: {e}")));
        // Keys of a paged cache are in containers.
        let [k, v] = [spec.k, spec.v].map(|tensor| spec.paged.map_or(tensor, |paged| paged.container(&tensor)));
        self.pass(recorder, name, made, &[("q", spec.q), ("k", k), ("v", v), ("o", spec.o)], &[]);
    }

    fn backward(&mut self, recorder: &Recorder, name: &str, spec: &BackwardSpec) {
        let made = recorder.executor().attention_backward(&spec.validate().unwrap_or_else(|e| panic!("{name}: {e}")));
        let f = &spec.forward;
        let tensors = [("q", f.q), ("k", f.k), ("v", f.v), ("o", f.o)];
        let gradients = [("d_o", spec.d_o), ("dq", spec.dq), ("dk", spec.dk), ("dv", spec.dv)];
        let all: Vec<_> = tensors.into_iter().chain(gradients).collect();
        let wrt: Vec<_> = spec.wrt.iter().map(|g| (g.name.clone(), g.dtype)).collect();
        self.pass(recorder, &format!("{name}, backward"), made, &all, &wrt);
    }

    fn pass(
        &mut self,
        recorder: &Recorder,
        name: &str,
        made: Result<(Arc<Planned>, bool), Error>,
        tensors: &[(&'static str, TensorSpec)],
        wrt: &[(String, DType)],
    ) {
        let planned = match made {
            Ok((planned, _)) => planned,
            Err(Error::Unsupported(_)) => {
                self.unsupported += 1;
                return;
            }
            Err(e) => {
                self.wrong.push(format!("{name}: {e}"));
                return;
            }
        };
        let stream = recorder.stream();
        let handle = recorder.executor().library().handle(&stream).unwrap();
        let memory = Memory::new(recorder, &planned, tensors, wrt);
        let (result, entries) = memory.call(recorder, &planned, &handle, Wrong::Nothing);
        if let Err(e) = result {
            self.wrong.push(format!("{name}: {e}"));
            return;
        }
        self.taken += 1;
        // The attention itself once, whatever is copied around it.
        let attention = planned.lowered.attn_scale.uid();
        let operations = planned.lowered.graph.ops().len();
        let is_attention = |e: &&Entry| e.what == EXECUTION && e.operations as usize == operations && e.number(attention).is_some();
        let executed = entries.iter().filter(is_attention).count();
        if executed != 1 {
            self.wrong.push(format!("{name}: the attention was submitted {executed} times"));
        }
        // The same addresses again need no new pack, but where copies run more often than a plan keeps packs.
        if planned.schedule.runs().all(|run| run.repeats <= 8) {
            let packs = recorder.created(Kind::VARIANT_PACK);
            let again = memory.call(recorder, &planned, &handle, Wrong::Nothing).1;
            if again.len() != entries.len() || recorder.created(Kind::VARIANT_PACK) != packs {
                self.wrong.push(format!("{name}: the second call is not as the first"));
            }
        }
        for place in 0..memory.places() {
            let (what, is_memory) = memory.name(place);
            let statistic = Statistic::ALL.into_iter().find(|statistic| statistic.name() == what);
            if !is_memory || statistic.is_some_and(|statistic| !planned.job.problem().computes(statistic)) {
                continue;
            }
            // Of packed documents memory is as long as it is: fewer tokens fit.
            let side = planned.job.tensors().find(|(operand, _)| operand.name() == what).map(|(operand, _)| operand.side());
            let packed = side.or(statistic.map(|_| Side::Queries)).is_some_and(|side| planned.job.problem().packs(side));
            for wrong in [Wrong::Short(place), Wrong::Misaligned(place)] {
                if packed && wrong == Wrong::Short(place) {
                    continue;
                }
                match memory.call(recorder, &planned, &handle, wrong) {
                    (Err(Error::Backend(e @ cudnn_graph::Error::Cudnn { .. })), _) => {
                        self.wrong.push(format!("{name}: {what}, {wrong:?}: reached cuDNN: {e}"));
                    }
                    (Err(e @ (Error::Unsupported(_) | Error::Bug(_))), _) => self.wrong.push(format!("{name}: {what}, {wrong:?}: {e}")),
                    (Err(_), entries) if entries.is_empty() => self.refused += 1,
                    // Bytes are read, and sums are copied to, at any address; what a graph is stricter about, the library sees.
                    (Ok(()), _) if wrong == Wrong::Misaligned(place) => {}
                    (result, entries) => {
                        self.wrong.push(format!("{name}: {what}, {wrong:?}: {} submissions, {result:?}", entries.len()));
                    }
                }
            }
        }
    }

    fn done(self, what: &str) {
        say(&format!("{what}: {} passes submitted, {} unsupported, {} wrong calls refused", self.taken, self.unsupported, self.refused));
        assert!(self.wrong.is_empty(), "{} findings\n{}", self.wrong.len(), self.wrong.join("\n"));
        assert!(self.taken > 0 && self.refused > 0);
    }
}

fn recorder() -> Option<Recorder> {
    Recorder::load().map_err(|why| skip("recording", &why)).ok()
}

#[test]
fn every_forward_case_stays_within_its_memory() {
    let Some(recorder) = recorder() else { return };
    let mut tally = Tally::default();
    for case in Case::all()
        .unwrap()
        .iter()
        .chain(&Case::all_library().unwrap())
        .chain(&Case::all_packed().unwrap())
        .chain(&Case::all_dropout().unwrap())
    {
        tally.forward(&recorder, &case.name, &case.spec().unwrap());
    }
    tally.done("submissions of forward cases");
}

#[test]
fn row_statistics_stay_within_their_memory() {
    if !is_newer("submissions::row_statistics_stay_within_their_memory") {
        return;
    }
    let Some(recorder) = recorder() else { return };
    let mut tally = Tally::default();
    for case in Case::all_statistics().unwrap() {
        tally.forward(&recorder, &case.name, &case.spec().unwrap());
    }
    tally.done("submissions of row statistics");
}

#[test]
fn every_paged_case_stays_within_its_containers() {
    let Some(recorder) = recorder() else { return };
    let mut tally = Tally::default();
    for case in Case::all_paged().unwrap() {
        tally.forward(&recorder, &case.name, &case.spec().unwrap());
    }
    for seed in 0..150 {
        let spec = random_paged(&mut Random::new(seed * 7919 + 11), &[DType::BF16, DType::F16]);
        tally.forward(&recorder, &format!("seed {seed}"), &spec);
    }
    tally.done("submissions of paged passes");
}

#[test]
fn every_backward_case_stays_within_its_memory() {
    let Some(recorder) = recorder() else { return };
    let mut tally = Tally::default();
    for case in Case::all_backward()
        .unwrap()
        .iter()
        .chain(&Case::all_library().unwrap())
        .chain(&Case::all_packed().unwrap())
        .chain(&Case::all_dropout().unwrap())
    {
        tally.backward(&recorder, &case.name, &case.backward_spec().unwrap());
    }
    tally.done("submissions of backward cases");
}

#[test]
fn random_passes_stay_within_their_memory() {
    let Some(recorder) = recorder() else { return };
    let mut tally = Tally::default();
    for seed in 0..300 {
        let random = &mut Random::new(seed * 7919 + 5);
        let spec = random_spec(random, &[DType::BF16, DType::F16]);
        if seed % 2 == 0 {
            tally.forward(&recorder, &format!("seed {seed}"), &spec);
        } else {
            tally.backward(&recorder, &format!("seed {seed}"), &spec.backward());
        }
    }
    tally.done("submissions of random passes");
}
