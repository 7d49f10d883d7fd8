//! Backward passes: alone, over the oracle's `o` and `stats`, and chained to the executor's own forward pass.

use super::narrow::{Narrowed, reported, room};
use super::{
    Outcome, Own, drawn_entries, entries, laid, place_packed, random_padded, random_spec, read_by_oracle, ready, spoil_padding, tanh_error,
    with,
};
use crate::case::Case;
use crate::compare::{GotAlong, GotGradients, GradientDistance, Measured, Slopes, compare_gradients};
use crate::inputs::{self, Operand};
use crate::library::Library;
use crate::oracle::{self, Closures, Given as Whose};
use crate::packing::Laid;
use crate::random::Random;
use sdpa::{
    Amax, AttentionSpec, BackwardProblem, BackwardSpec, DType, Direction, Executor, ExecutorName, HostBackward, HostForward, HostGradient,
    Layout, Operand as Name, Param, PreparedBackward, Report, SINK, Side, TensorSpec,
};

/// The forward pass that provides `o` and `stats` for a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The oracle's forward pass, rounded. This tests the backward pass alone.
    Oracle,
    /// The executor's own forward pass, as in training.
    Executor,
}

impl Source {
    /// Both forward passes from which a backward pass can get `o` and `stats`.
    pub const ALL: [Source; 2] = [Source::Oracle, Source::Executor];

    /// Returns the suffix that marks cases with this source in their names.
    pub fn suffix(self) -> &'static str {
        match self {
            Source::Oracle => "",
            Source::Executor => ", chained",
        }
    }
}

/// Parameters of the random inputs of a call.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// The attention scale; `None` for `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Standard deviation of `q`, `k` and `v`. That of `d_o` is 1.
    pub spread: f64,
    /// The mean of `q`; the mean of `k` is its negative.
    pub shift: f64,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Runs one backward case on one executor.
pub fn run_backward_case(case: &Case, source: Source, executor: &dyn Executor) -> Outcome<GradientDistance> {
    if let Some(reason) = case.skip.get(executor.name().name()) {
        return Outcome::Skip(reason.clone());
    }
    let spec = match case.backward_spec() {
        Ok(spec) => spec,
        Err(e) => return Outcome::Fail(e),
    };
    let library = match case.library() {
        Ok(library) => library,
        Err(e) => return Outcome::Fail(e),
    };
    let shift = case.backward.as_ref().map_or(0.0, |backward| backward.shift);
    let draw = Draw { attn_scale: case.attn_scale, spread: case.spread, shift, seed: case.seed() };
    run_backward_with(&spec, &draw, library.as_ref(), source, executor).with_repro(|| case.backward_repro(executor.name()))
}

/// Runs a backward specification over random inputs on one executor and compares it with the oracle.
pub fn run_backward(spec: &BackwardSpec, draw: &Draw, source: Source, executor: &dyn Executor) -> Outcome<GradientDistance> {
    run_backward_with(spec, draw, None, source, executor)
}

/// Runs a backward specification on one executor and compares it with the oracle. The oracle evaluates the closures of `library` in place
/// of score_mods and of masks that it cannot evaluate itself.
pub fn run_backward_with(
    spec: &BackwardSpec,
    draw: &Draw,
    library: Option<&Library>,
    source: Source,
    executor: &dyn Executor,
) -> Outcome<GradientDistance> {
    let (compared, report) = match computed(spec, draw, library, source, executor, compare_gradients) {
        Ok(done) => done,
        Err(outcome) => return outcome,
    };
    match compared {
        Ok(distance) if distance.holds() => Outcome::Pass(distance, report),
        Ok(distance) => Outcome::Fail(format!("{}, {}", distance.told(), report.engine)),
        Err(how) => Outcome::Fail(format!("{how}, {}", report.engine)),
    }
}

/// The inputs of a backward call.
struct Read {
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand,
    d_o: Operand,
    stats: Operand,
}

/// The scale and the parameters of a call.
#[derive(Clone, Copy)]
struct Given<'a> {
    attn_scale: Option<f32>,
    params: &'a [Param<'a>],
    narrowed: &'a Narrowed,
}

fn bits(got: &GotGradients) -> Vec<u64> {
    let along = got.along.iter().flat_map(|a| &a.value);
    got.operands.iter().flatten().chain(along).map(|x| x.to_bits()).collect()
}

/// Returns a bound of the score_mod's derivative if the executor may sum `dq` in fixed point.
fn fixed_point(problem: &BackwardProblem, executor: ExecutorName) -> Option<f64> {
    let forward = problem.forward();
    let is_ordered = problem.deterministic() || forward.batch_invariant();
    // The derivative is the second root of a gradient's trace.
    let gain = || problem.gradient().map_or(Some(1.0), |gradient| gradient.trace.gain(1, forward.extents()));
    (is_ordered && executor == ExecutorName::CUDA).then(gain).flatten()
}

/// Computes a specification on an executor. Then calls `judge` with the problem of the oracle, the upstream gradient, and the source of `o` and `stats`.
pub(super) fn computed<T>(
    spec: &BackwardSpec,
    draw: &Draw,
    library: Option<&Library>,
    source: Source,
    executor: &dyn Executor,
    judge: impl FnOnce(&oracle::Problem<'_>, &Closures<'_>, &Vec<f64>, Whose<'_>, &GotGradients) -> T,
) -> Result<(T, Report), Outcome<GradientDistance>> {
    let problem = spec.validate().map_err(|e| Outcome::Fail(format!("does not validate: {e}")))?;
    let prepared = ready(executor.supports_backward(&problem), executor.prepare_backward(&problem))?;
    let forward = &spec.forward;
    let dtype = forward.dtype;
    let drawn = drawn_entries(forward, draw.seed);
    let library = library.or(drawn.as_ref());
    let of = |operand: Name| laid(tensor(spec, operand), operand.side(), library);
    let of_stats = laid(&problem.forward().stats_tensor(), Side::Queries, library);
    let mut random = Random::new(draw.seed);
    let mut narrowed = Narrowed::draw(dtype, draw.seed);
    let real = |name: Name| narrowed.descale(name);
    let q = inputs::random_about(draw.shift / real(Name::Q), of(Name::Q), dtype, draw.spread / real(Name::Q), &mut random);
    let mut k = inputs::random_about(-draw.shift / real(Name::K), of(Name::K), dtype, draw.spread / real(Name::K), &mut random);
    let mut v = inputs::random(of(Name::V), dtype, draw.spread / real(Name::V), &mut random);
    let values = inputs::gather(of(Name::V), &v);
    spoil_padding(executor.name(), library, Side::Keys, &mut [(&forward.k, &mut k), (&forward.v, &mut v)]);
    let d_o = inputs::random(of(Name::DO), problem.dtype_of(Name::DO), 1.0 / real(Name::DO), &mut random);
    narrowed.forward(problem.forward(), &values);

    let own = Own::draw(forward, draw.seed);
    let [batch, heads_q, seq_q, dim_qk] = forward.q.dims.map(|d| d as usize);
    let [_, heads_kv, seq_kv, dim_v] = forward.v.dims.map(|d| d as usize);
    let shape = [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v];
    let masks = read_by_oracle(&forward.masks, library);
    let textbook = oracle::Problem {
        shape,
        q: &narrowed.real(Name::Q, inputs::gather(of(Name::Q), &q)),
        k: &narrowed.real(Name::K, inputs::gather(of(Name::K), &k)),
        v: &narrowed.real(Name::V, inputs::gather(of(Name::V), &v)),
        scale: f64::from(draw.attn_scale.unwrap_or(problem.forward().default_scale())),
        dtype,
        masks: &masks,
        lengths: &entries(library, forward),
        sink: own.sink(),
        dropout: own.dropout(),
        narrow: narrowed.told(problem.forward()),
        fixed_point: fixed_point(&problem, executor.name()),
    };
    let upstream = narrowed.real(Name::DO, inputs::gather(of(Name::DO), &d_o));
    if dtype.is_fp8() {
        let exact = with(library, &[], 0.0, |closures| oracle::gradients(&textbook, closures, &upstream));
        narrowed.backward(&problem, (&values, &upstream), textbook.scale, [&exact.dq, &exact.dk, &exact.dv].map(|g| &g.value[..]));
    }
    let textbook = oracle::Problem { narrow: narrowed.told_backward(&problem), ..textbook };
    let of_library = || library.map_or_else(Vec::new, Library::params);
    let (params, of_forward) =
        (narrowed.params(Direction::Backward, own.params(of_library())), narrowed.params(Direction::Forward, own.params(of_library())));
    let given = Given { attn_scale: draw.attn_scale, params: &params, narrowed: &narrowed };
    let (o, stats) = match source {
        Source::Oracle => {
            let answer = with(library, &[], 0.0, |closures| oracle::attention(&textbook, closures));
            let o = narrowed.rounds_to(Name::O, answer.o);
            (inputs::scatter(of(Name::O), problem.dtype_of(Name::O), &o), inputs::scatter(of_stats.clone(), DType::F32, &answer.stats))
        }
        Source::Executor => {
            own_forward(&problem, [&q, &k, &v], [&of(Name::O), &of_stats], Given { params: &of_forward, ..given }, executor)?
        }
    };
    let mut read = Read { q, k, v, o, d_o, stats };
    let of_rows = problem.forward().stats_tensor();
    let mut of_queries = [(&forward.q, &mut read.q), (&forward.o, &mut read.o), (&spec.d_o, &mut read.d_o), (&of_rows, &mut read.stats)];
    spoil_padding(executor.name(), library, Side::Queries, &mut of_queries);

    let (got, report) = backward(&problem, (&of, &of_stats), &*prepared, &read, given)?;
    if spec.deterministic {
        let (again, _) = backward(&problem, (&of, &of_stats), &*prepared, &read, given)?;
        if bits(&got) != bits(&again) {
            return Err(Outcome::Fail(format!("a second run gave other bits, {}", report.engine)));
        }
    }
    let along: Vec<&str> = problem.wrt_scores().map(|g| g.name.as_str()).collect();
    let d_o = upstream;
    let whose = if source == Source::Executor { Whose::Own } else { Whose::Rounded };
    let tanh = tanh_error(executor.name(), dtype);
    Ok((with(library, &along, tanh, |closures| judge(&textbook, closures, &d_o, whose, &got)), report))
}

/// Computes `o` and `stats` with the executor's own forward pass.
fn own_forward(
    problem: &BackwardProblem,
    [q, k, v]: [&Operand; 3],
    [of_o, of_stats]: [&Laid; 2],
    Given { attn_scale, params, narrowed }: Given<'_>,
    executor: &dyn Executor,
) -> Result<(Operand, Operand), Outcome<GradientDistance>> {
    let forward = problem.forward();
    let prepared = ready(executor.supports(forward), executor.prepare(forward))?;
    // Fill o with NaN, gaps included: the backward pass must not read the gaps.
    let mut o = Operand::filled(forward.dtype_of(Name::O), of_o.elements(), f32::NAN);
    let mut amax = narrowed.amax(Direction::Forward);
    let mut stats = Operand::filled(DType::F32, of_stats.elements(), f32::NAN);
    let (q, k, v) = (q.elements(), k.elements(), v.elements());
    let call = HostForward::new(q, k, v, o.elements_mut())
        .statistics([stats.numbers_mut(), None, None])
        .attn_scale(attn_scale)
        .params(params)
        .amax(room(&mut amax));
    prepared.forward(call).map_err(|e| Outcome::Fail(format!("forward: {e}")))?;
    Ok((o, stats))
}

/// Returns the gradients of one call, in row-major order.
fn backward(
    problem: &BackwardProblem,
    (of, of_stats): (&dyn Fn(Name) -> Laid, &Laid),
    prepared: &dyn PreparedBackward,
    read: &Read,
    Given { attn_scale, params, narrowed }: Given<'_>,
) -> Result<(GotGradients, Report), Outcome<GradientDistance>> {
    let results = [Name::DQ, Name::DK, Name::DV];
    let mut written = results.map(|operand| inputs::poisoned(of(operand), problem.dtype_of(operand)));
    let mut amax = narrowed.amax(Direction::Backward);
    let elements = |name: &str| problem.gradient_elements(name) as usize;
    let mut along: Vec<Operand> = problem.wrt().iter().map(|g| Operand::filled(g.dtype, elements(&g.name), f32::NAN)).collect();
    let [dq, dk, dv] = &mut written;
    let call = HostBackward::new(
        (read.q.elements(), read.k.elements(), read.v.elements()),
        (read.o.elements(), read.stats.numbers()),
        read.d_o.elements(),
        (dq.elements_mut(), dk.elements_mut(), dv.elements_mut()),
    )
    .attn_scale(attn_scale)
    .params(params)
    .gradients(problem.wrt().iter().zip(&mut along).map(|(g, to)| HostGradient::new(&g.name, to.elements_mut())))
    .amax(room(&mut amax));
    let report = prepared.backward(call).map_err(|e| Outcome::Fail(format!("backward: {e}")))?;
    for (name, operand) in results.iter().zip(&written) {
        if let Some(at) = inputs::written_gap(of(*name), operand) {
            return Err(Outcome::Fail(format!("element {at} between the rows of {name} was written")));
        }
    }
    let operands: [Vec<f64>; 3] = std::array::from_fn(|n| inputs::gather(of(results[n]), &written[n]));
    let [dq, dk, dv] = &operands;
    let judged = narrowed.judge(&amax, problem.dtype_of(Name::DQ), [(Amax::DQ, dq), (Amax::DK, dk), (Amax::DV, dv)]);
    judged.map_err(|how| Outcome::Fail(format!("{how}, {}", report.engine)))?;
    let mut named = results.into_iter();
    let operands = operands.map(|all| named.next().map_or(Vec::new(), |name| narrowed.stands_for(name, all)));
    let all = |operand: &Operand| (0..operand.elements().len()).map(|at| operand.get(at)).collect();
    let along = problem.wrt().iter().zip(&along).map(|(g, operand)| GotAlong { dtype: g.dtype, value: all(operand) }).collect();
    let slopes = reported(&amax, Amax::DP).map(|amax_dp| {
        let o = narrowed.stands_for(Name::O, inputs::gather(of(Name::O), &read.o));
        Slopes { amax_dp, given: [o, inputs::gather(of_stats.clone(), &read.stats)] }
    });
    Ok((GotGradients { operands, along, slopes }, report))
}

fn tensor(spec: &BackwardSpec, operand: Name) -> &TensorSpec {
    match operand {
        Name::Q => &spec.forward.q,
        Name::K => &spec.forward.k,
        Name::V => &spec.forward.v,
        Name::O => &spec.forward.o,
        Name::DO => &spec.d_o,
        Name::DQ => &spec.dq,
        Name::DK => &spec.dk,
        Name::DV => &spec.dv,
    }
}

/// Draws a random backward specification, small enough for the oracle: a forward specification of [`random_spec`], other strides for
/// gradients, and strides of 0 in `d_o`.
pub fn random_backward(random: &mut Random, dtypes: &[DType]) -> BackwardSpec {
    let forward = random_spec(random, dtypes);
    gradients_elsewhere(forward, random)
}

/// Draws a random backward specification without packed sequences.
pub fn random_padded_backward(random: &mut Random, dtypes: &[DType]) -> BackwardSpec {
    let forward = random_padded(random, dtypes);
    gradients_elsewhere(forward, random)
}

/// Returns a backward specification of this forward specification, in which `d_o` and gradients may have other strides, and all KV heads
/// may share memory.
pub fn gradients_elsewhere(mut forward: AttentionSpec, random: &mut Random) -> BackwardSpec {
    let packed = forward.packed;
    if random.between(0, 9) == 0 {
        (forward.k.strides[1], forward.v.strides[1]) = (0, 0);
    }
    let mut spec = forward.backward();
    let tensors = [(&mut spec.d_o, Side::Queries), (&mut spec.dq, Side::Queries), (&mut spec.dk, Side::Keys), (&mut spec.dv, Side::Keys)];
    for (tensor, side) in tensors {
        if random.between(0, 3) > 0 {
            continue;
        }
        if let Some(packed) = packed {
            place_packed(tensor, packed.total(side).unwrap_or(tensor.dims[0] * tensor.dims[2]), random);
        } else {
            let [b, h, s, d] = tensor.dims;
            let gap = random.pick(&[0, 8, 64, 1, 3]);
            *tensor = TensorSpec::dense([b, h, s, d + gap], random.pick(&[Layout::Bhsd, Layout::Bshd, Layout::Sbhd]));
            tensor.dims[3] = d;
        }
    }
    if random.between(0, 4) == 0 {
        for &axis in random.pick(&[&[0, 1, 2, 3][..], &[0, 1, 2], &[2], &[1], &[3]]) {
            spec.d_o.strides[axis] = 0;
        }
    }
    spec.deterministic = random.between(0, 4) == 0;
    if spec.forward.sink && random.between(0, 3) > 0 {
        spec = spec.wrt(SINK, random.pick(&[DType::F32, DType::F32, DType::F16, DType::BF16]));
    }
    spec
}
