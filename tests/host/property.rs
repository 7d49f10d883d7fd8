//! Random problems: the CPU agrees with the oracle, graphs mean what they should, nothing too new is ever sent, nothing panics.
//!
//! `SDPA_SEED` sets the first seed, `SDPA_CASES` how many there are; a failure prints the line that runs it again.

use conformance::oracle::{self, Dropout};
use conformance::random::Random;
use conformance::runner::{Draw, Outcome, Source, Tally, random_backward, random_padded, random_paged, random_spec, run, run_backward};
use conformance::say::say;
use cudnn_graph::encode::encode;
use cudnn_graph::ffi::codes::{AttributeType, DataType, PointwiseMode, ReductionOperator, Reordering, ReshapeMode, RngDistribution};
use cudnn_graph::ir::TensorId;
use cudnn_graph::ir::interp::{self, Precision, Value};
use cudnn_graph::ir::op::Op;
use cudnn_graph::program::Values;
use cudnn_graph::{Program, Version};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::lower::{self, Form, Lowered, Operand, Supply};
use sdpa::{
    Align, AttentionSpec, BackwardSpec, DROPOUT_OFFSET, DROPOUT_SEED, DType, Layout, Mask, Packed, Paged, Problem, SINK, Shape, StatsBase,
    TensorSpec,
};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Runs `each` on a number of seeds and fails with two lines per failure; a few failures are enough.
fn seeds(test: &str, n: u64, mut each: impl FnMut(u64) -> Result<(), String>) {
    let (first, n) = (number("SDPA_SEED", 1), number("SDPA_CASES", n));
    let failures: Vec<String> = (first..first.saturating_add(n))
        .filter_map(|seed| each(seed).err().map(|e| (seed, e)))
        .map(|(seed, e)| format!("{e}\n  SDPA_SEED={seed} SDPA_CASES=1 cargo test --package conformance --test host property::{test}"))
        .take(5)
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Strides of axes in any order, with gaps; what is only read may repeat along an axis.
fn odd_strides(random: &mut Random, tensor: &mut TensorSpec, repeats: bool) {
    let mut order = [0usize, 1, 2];
    for n in (1..3).rev() {
        order.swap(n, random.between(0, n as i64) as usize);
    }
    let mut next = tensor.dims[3] + random.between(0, 5);
    for axis in order {
        tensor.strides[axis] = if repeats && random.between(0, 9) == 0 { 0 } else { next };
        next = tensor.strides[axis].max(next) * tensor.dims[axis] + random.between(0, 7);
    }
    tensor.alignment = random.pick(&[4, 8, 16, 64]);
}

/// An f32 problem with extents and strides that no kernel was tuned for.
fn odd_spec(random: &mut Random) -> AttentionSpec {
    let mut spec = random_padded(random, &[DType::F32]);
    let heads_kv = random.between(1, 3);
    let shape = Shape {
        batch: random.between(1, 3),
        heads_q: heads_kv * random.between(1, 3),
        heads_kv,
        seq_q: random.between(1, 70),
        seq_kv: random.between(1, 140),
        dim_qk: random.between(1, 67),
        dim_v: random.between(1, 67),
    };
    let odd = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd);
    (spec.q, spec.k, spec.v, spec.o) = (odd.q, odd.k, odd.v, odd.o);
    for tensor in [&mut spec.q, &mut spec.k, &mut spec.v] {
        odd_strides(random, tensor, true);
    }
    odd_strides(random, &mut spec.o, false);
    spec
}

#[test]
fn cpu_agrees_with_the_oracle() {
    let cpu = CpuExecutor::default();
    let mut tally = Tally::default();
    seeds("cpu_agrees", 150, |seed| {
        let mut random = Random::new(seed);
        let dtypes = [DType::F16, DType::BF16, DType::F32];
        let mut spec = match seed % 6 {
            0 | 3 => odd_spec(&mut random),
            1 => random_paged(&mut random, &dtypes),
            _ => random_spec(&mut random, &dtypes),
        };
        spec.batch_invariant = seed % 4 == 0 && spec.dropout.is_none();
        let scale = random.pick(&[None, None, Some(0.3), Some(-0.1)]);
        let outcome = run(&spec, scale, random.pick(&[1.0, 1.0, 4.0]), seed, &cpu);
        tally.add("cpu", &format!("seed {seed}"), &outcome);
        match outcome {
            Outcome::Pass(..) => Ok(()),
            Outcome::Skip(why) => Err(format!("seed {seed} was skipped: {why}")),
            Outcome::Fail(how) => Err(format!("seed {seed} failed: {how}; {spec:?}")),
        }
    });
    say(&format!("property {}", tally.summary("cpu")));
}

/// An f32 problem with extents and strides that no kernel was tuned for, and its gradients in as odd places.
fn odd_backward(random: &mut Random) -> BackwardSpec {
    let mut spec = odd_spec(random).backward();
    odd_strides(random, &mut spec.d_o, true);
    for tensor in [&mut spec.dq, &mut spec.dk, &mut spec.dv] {
        odd_strides(random, tensor, false);
    }
    if random.between(0, 9) == 0 {
        spec.d_o.strides[3] = 0;
    }
    spec.deterministic = random.between(0, 4) == 0;
    spec.forward.batch_invariant = spec.forward.dropout.is_none() && random.between(0, 4) == 0;
    spec
}

#[test]
fn cpu_gradients_agree_with_the_oracle() {
    let cpu = CpuExecutor::default();
    let mut tally = Tally::default();
    seeds("cpu_gradients", 80, |seed| {
        let mut random = Random::new(seed);
        let spec =
            if seed % 3 == 0 { odd_backward(&mut random) } else { random_backward(&mut random, &[DType::F16, DType::BF16, DType::F32]) };
        let draw = Draw {
            attn_scale: random.pick(&[None, None, Some(0.3), Some(-0.1)]),
            spread: random.pick(&[1.0, 1.0, 4.0]),
            shift: random.pick(&[0.0, 0.0, 0.0, 1.5, 5.0]),
            seed,
        };
        let source = random.pick(&Source::ALL);
        let outcome = run_backward(&spec, &draw, source, &cpu);
        tally.add("cpu", &format!("backward seed {seed}{}", source.suffix()), &outcome);
        match outcome {
            Outcome::Pass(..) => Ok(()),
            Outcome::Skip(why) => Err(format!("seed {seed} was skipped: {why}")),
            Outcome::Fail(how) => Err(format!("seed {seed} failed: {how}; {source:?}, {draw:?}, {spec:?}")),
        }
    });
    say(&format!("property backward {}", tally.summary("cpu")));
}

/// A problem that is small enough to be interpreted.
fn small_spec(random: &mut Random) -> AttentionSpec {
    let mut spec = random_padded(random, &[DType::F16, DType::BF16]);
    let heads_kv = random.between(1, 2);
    let dim_qk = 8 * random.between(1, 3);
    let shape = Shape {
        batch: random.between(1, 2),
        heads_q: heads_kv * random.between(1, 3),
        heads_kv,
        seq_q: random.between(1, 40),
        seq_kv: random.between(1, 40),
        dim_qk,
        dim_v: random.pick(&[dim_qk, 8, 16]),
    };
    let layout = random.pick(&[Layout::Bhsd, Layout::Bshd, Layout::Sbhd]);
    let small = AttentionSpec::dense(spec.dtype, shape, layout);
    (spec.q, spec.k, spec.v, spec.o) = (small.q, small.k, small.v, small.o);
    // Weights that stay are multiplied by an f32, which is exact of these.
    spec.dropout = spec.dropout.map(|_| sdpa::Dropout::new(random.pick(&[0.5, 0.75])));
    // Masks as long as the lengths, or most would keep everything.
    for mask in &mut spec.masks {
        match mask {
            Mask::Window { left, right, .. } => {
                *left = left.map(|l| 1 + l % shape.seq_kv);
                *right = right.map(|r| r % shape.seq_kv);
            }
            Mask::PrefixLm { len } => *len %= shape.seq_kv + 1,
            Mask::Traced(_) | Mask::All(_) | Mask::Any(_) | Mask::Not(_) => {}
        }
    }
    spec
}

/// Numbers in row-major order of the extents.
fn numbers(random: &mut Random, dims: [i64; 4]) -> Vec<f64> {
    (0..dims.iter().product::<i64>()).map(|_| random.normal()).collect()
}

/// (batch, head, seq, dim) as (batch, head, dim, seq).
fn transposed(data: &[f64], [b, h, s, d]: [i64; 4]) -> Value {
    let at = |n: i64, i: i64, j: i64| data[((n * s + j) * d + i) as usize];
    let swapped: Vec<f64> =
        (0..b * h).flat_map(|n| (0..d).flat_map(move |i| (0..s).map(move |j| (n, i, j)))).map(|(n, i, j)| at(n, i, j)).collect();
    Value::new([b, h, d, s], swapped)
}

fn near(got: f64, want: f64, magnitude: f64) -> bool {
    got == want || (got - want).abs() <= 1e-11 * (magnitude + want.abs())
}

/// The numbers of dropout, and where weights stay.
fn of_dropout(forward: &Lowered, extents: [i64; 4], dropout: Dropout) -> Vec<(TensorId, Value)> {
    let named =
        |name: &str| forward.supplies.iter().find(|(_, supply)| *supply == Supply::Param(name.to_owned())).map(|(tensor, _)| *tensor);
    let numbers = [(DROPOUT_SEED, dropout.seed), (DROPOUT_OFFSET, dropout.offset)];
    let numbers = numbers.map(|(name, number)| (named(name).unwrap(), Value::new([1; 4], [number as f64])));
    let written = forward.graph.graph().ops().iter().find_map(|op| if let Op::Rng(rng) = op { Some(rng.y) } else { None });
    numbers.into_iter().chain([(written.unwrap(), Value::new(extents, oracle::stays(&dropout, extents)))]).collect()
}

/// The graph of one form, computed op by op in f64, against the oracle.
fn means_attention(spec: &AttentionSpec, problem: &Problem, form: Form, runtime: Version, seed: u64) -> Result<(), String> {
    let forward = lower::lower(&problem.clone().into(), form, runtime).map_err(|e| e.to_string())?;
    let again = lower::lower(&problem.clone().into(), form, runtime).map_err(|e| e.to_string())?;
    if forward.graph.to_string() != again.graph.to_string() {
        return Err(format!("{form} {runtime}: lowered twice, the graph prints differently"));
    }
    let mut random = Random::new(seed);
    let [q, k, v] = [spec.q.dims, spec.k.dims, spec.v.dims].map(|dims| numbers(&mut random, dims));
    let key = match form {
        Form::Composite => transposed(&k, spec.k.dims),
        Form::Unified => Value::new(spec.k.dims, k.clone()),
    };
    let scale = f64::from(problem.default_scale());
    let at = |operand| forward.operand(operand).unwrap();
    let inputs = [
        (at(Operand::Q), Value::new(spec.q.dims, q.clone())),
        (at(Operand::K), key),
        (at(Operand::V), Value::new(spec.v.dims, v.clone())),
        (forward.attn_scale, Value::scalar(scale)),
    ];
    let in_graph = forward.supplies.iter().find(|(_, supply)| *supply == Supply::Param(SINK.to_owned())).map(|(tensor, _)| *tensor);
    if in_graph.is_some() != (spec.sink && form == Form::Composite && problem.seq_q() > 1) {
        return Err(format!("{form} {runtime}: the sink is not where it belongs"));
    }
    let sink = numbers(&mut random, [1, problem.heads_q(), 1, 1]);
    let given = in_graph.map(|tensor| (tensor, Value::new([1, problem.heads_q(), 1, 1], sink.clone())));
    let dropout = spec.dropout.map(|dropout| Dropout { p: dropout.p().into(), seed: seed as i64, offset: 3 });
    let dropped = dropout.map_or_else(Vec::new, |dropout| of_dropout(&forward, problem.extents(), dropout));
    let inputs = inputs.into_iter().chain(given).chain(dropped).collect();
    let results = interp::run(&forward.graph, &inputs, Precision::F64).map_err(|e| format!("{form} {runtime}: {e}"))?;
    let [batch, heads_q, seq_q, dim_qk] = spec.q.dims.map(|d| d as usize);
    let [_, heads_kv, seq_kv, dim_v] = spec.v.dims.map(|d| d as usize);
    let textbook = oracle::Problem {
        shape: [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v],
        q: &q,
        k: &k,
        v: &v,
        dtype: spec.dtype,
        scale,
        masks: &spec.masks,
        lengths: &[],
        sink: in_graph.map(|_| &sink[..]),
        dropout,
        narrow: None,
        fixed_point: None,
    };
    let want = oracle::attention(&textbook, &oracle::Closures::default());
    // In the mathematics of the primitive ops a row without a key is not a number; engines give zeros, which only they can show.
    let undefined = |row: usize| want.stats[row] == f64::NEG_INFINITY && form == Form::Composite && runtime < lower::UNIFIED_SINCE;
    for (n, (&got, &expected)) in results[&at(Operand::O)].data.iter().zip(&want.o).enumerate() {
        if !near(got, expected, want.o_magnitude[n]) && !undefined(n / dim_v) {
            return Err(format!("{form} {runtime}: element {n} of o is {got}, not {expected}"));
        }
    }
    if let Some(stats) = forward.stats {
        for (row, (&got, &expected)) in results[&stats].data.iter().zip(&want.stats).enumerate() {
            if !near(got, expected, want.score_magnitude[row]) && !undefined(row) {
                return Err(format!("{form} {runtime}: stats of row {row} is {got}, not {expected}"));
            }
        }
    }
    Ok(())
}

const OLD: Version = Version::new(9, 19, 0);
const NEW: Version = Version::new(9, 27, 0);

#[test]
fn graphs_of_both_forms_mean_attention() {
    seeds("graphs_of_both", 120, |seed| {
        let spec = small_spec(&mut Random::new(seed));
        let problem = spec.validate().map_err(|e| format!("{e}; {spec:?}"))?;
        let forms = [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)];
        for (form, runtime) in forms.into_iter().filter(|(form, _)| *form == Form::Composite || spec.dropout.is_none()) {
            means_attention(&spec, &problem, form, runtime, seed).map_err(|e| format!("{e}; {spec:?}"))?;
        }
        Ok(())
    });
}

/// What in a program is newer than a runtime.
fn too_new(program: &Program, runtime: Version) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |since: Version, what: String| {
        if since > runtime {
            found.push(format!("{what} since {since}"));
        }
    };
    for descriptor in &program.descriptors {
        check(descriptor.kind.since(), descriptor.kind.to_string());
        for setting in &descriptor.settings {
            check(setting.attribute.since(), setting.attribute.to_string());
            check(setting.ty.since(), setting.ty.to_string());
            if let Values::Code(code, name) = &setting.values {
                let code = *code;
                let since = match setting.ty {
                    AttributeType::DATA_TYPE => DataType(code).since(),
                    AttributeType::POINTWISE_MODE => PointwiseMode(code).since(),
                    AttributeType::REDUCTION_OPERATOR_TYPE => ReductionOperator(code).since(),
                    AttributeType::TENSOR_REORDERING_MODE => Reordering(code).since(),
                    AttributeType::RESHAPE_MODE => ReshapeMode(code).since(),
                    AttributeType::RNG_DISTRIBUTION => RngDistribution(code).since(),
                    _ => Version::new(u32::MAX, 0, 0),
                };
                check(since, name.clone());
            }
        }
    }
    found
}

#[test]
fn nothing_newer_than_the_runtime_is_sent() {
    seeds("nothing_newer", 60, |seed| {
        let spec = random_padded(&mut Random::new(seed), &[DType::F16, DType::BF16]);
        let problem = spec.validate().map_err(|e| e.to_string())?;
        for minor in 0..=30 {
            let runtime = Version::new(9, minor, 0);
            let offered = lower::forms(&problem.clone().into(), runtime);
            for form in [Form::Composite, Form::Unified] {
                if form == Form::Unified && spec.dropout.is_some() {
                    continue;
                }
                let graph = lower::lower(&problem.clone().into(), form, runtime).map_err(|e| e.to_string())?.graph;
                match encode(&graph, runtime) {
                    Ok(program) => {
                        let newer = too_new(&program, runtime);
                        if !newer.is_empty() {
                            return Err(format!("{form} on {runtime}: {}", newer.join(", ")));
                        }
                    }
                    Err(e) if offered.contains(&form) => return Err(format!("the {form} form is offered on {runtime}: {e}")),
                    Err(e) if e.needs.iter().any(|(_, since)| *since <= runtime) => return Err(format!("{form} on {runtime}: {e}")),
                    Err(_) => {}
                }
            }
        }
        Ok(())
    });
}

fn garbage() -> impl Strategy<Value = i64> {
    prop_oneof![Just(i64::MIN), Just(i64::MAX), Just(i64::from(i32::MAX)), Just(1 << 31), Just(1 << 62), -2..3i64, 1..300i64, any::<i64>(),]
}

/// Boxed: eight of them do not fit the stack of a test.
fn garbage_tensor() -> BoxedStrategy<TensorSpec> {
    let four = || [garbage(), garbage(), garbage(), garbage()];
    let alignment = prop_oneof![Just(0), Just(2), Just(16), any::<u32>()];
    (four(), four(), alignment).prop_map(|(dims, strides, alignment)| TensorSpec { dims, strides, alignment }).boxed()
}

fn garbage_mask() -> impl Strategy<Value = Mask> {
    let side = || proptest::option::of(garbage());
    let align = prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight), Just(Align::Ends)];
    prop_oneof![
        garbage().prop_map(Mask::prefix_lm),
        (side(), side(), align).prop_map(|(left, right, align)| Mask::window(left, right, align)),
    ]
}

fn dtype() -> impl Strategy<Value = DType> {
    proptest::sample::select(vec![DType::F16, DType::BF16, DType::F32, DType::F8E4M3, DType::F8E5M2, DType::I32, DType::Bool])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, rng_seed: RngSeed::Fixed(number("SDPA_SEED", 1)), ..ProptestConfig::default() })]

    #[test]
    fn validate_never_panics(
        dtype in dtype(),
        tensors in [garbage_tensor(), garbage_tensor(), garbage_tensor(), garbage_tensor()],
        masks in proptest::collection::vec(garbage_mask(), 0..3),
        [stats, row_max, sum_exp, block_scaled, batch_invariant]: [bool; 5],
        sink: bool,
        dropout in proptest::option::weighted(0.3, proptest::num::f32::ANY),
        packed: Option<([bool; 2], Option<i64>, Option<i64>)>,
        paged in proptest::option::weighted(0.3, [garbage(), garbage()]),
        o_dtype in proptest::option::weighted(0.3, dtype()),
    ) {
        let [q, k, v, o] = tensors;
        let packed = packed.map(|([cross, wide], total_q, total_kv)| Packed::new().with_cross(cross).with_wide(wide).with_totals(total_q, total_kv));
        let paged = paged.map(|[page_size, pages]| Paged::new(page_size, pages));
        let stats_base = if row_max { StatsBase::Two } else { StatsBase::Natural };
        let dropout = dropout.map(sdpa::Dropout::new);
        let mut spec = AttentionSpec::strided(dtype, [q, k, v], o).with_masks(masks).with_packed(packed).with_paged(paged);
        (spec.o_dtype, spec.block_scaled, spec.sink, spec.dropout) = (o_dtype, block_scaled, sink, dropout);
        spec.batch_invariant = batch_invariant;
        (spec.stats, spec.stats_base, spec.row_max, spec.sum_exp) = (stats, stats_base, row_max, sum_exp);
        if let Err(e) = spec.validate() {
            prop_assert!(!e.0.is_empty() && !e.to_string().is_empty());
        }
    }

    /// Gradients of anything, of a forward pass that is right and of one that need not be.
    #[test]
    fn validating_a_backward_pass_never_panics(
        dtype in dtype(),
        operands in [garbage_tensor(), garbage_tensor(), garbage_tensor(), garbage_tensor()],
        gradients in [garbage_tensor(), garbage_tensor(), garbage_tensor(), garbage_tensor()],
        right: bool,
        fits: bool,
        deterministic: bool,
        others in [proptest::option::weighted(0.3, dtype()), proptest::option::weighted(0.3, dtype())],
    ) {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 3, seq_kv: 5, dim_qk: 8, dim_v: 6 };
        let mut forward = AttentionSpec::dense(dtype, shape, Layout::Bshd);
        if !right {
            [forward.q, forward.k, forward.v, forward.o] = operands;
        }
        let mut spec = forward.backward();
        spec.deterministic = deterministic;
        [spec.d_o_dtype, spec.gradient_dtype] = others;
        for (tensor, garbage) in [&mut spec.d_o, &mut spec.dq, &mut spec.dk, &mut spec.dv].into_iter().zip(gradients) {
            *tensor = TensorSpec { dims: if fits { tensor.dims } else { garbage.dims }, ..garbage };
        }
        if let Err(e) = spec.validate() {
            prop_assert!(!e.0.is_empty() && !e.to_string().is_empty());
        }
    }

    /// Extents that fit one another, so that many pass: what passes is lowered, or refused by name.
    #[test]
    fn what_validates_lowers(
        dtype in dtype(),
        extents in [garbage(), garbage(), garbage(), garbage(), garbage(), garbage(), garbage()],
        small in 0..3usize,
        masks in proptest::collection::vec(garbage_mask(), 0..3),
        [stats, block_scaled]: [bool; 2],
    ) {
        // Most draws are tamed, or none would pass.
        let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] =
            extents.map(|e| if small == 0 { e } else { e.checked_abs().unwrap_or(1) % 500 + 1 });
        let heads_q = if small == 2 { heads_kv } else { heads_q };
        let block_scaled = block_scaled && dtype.is_fp8();
        let dim_qk = if block_scaled && small > 0 { (dim_qk + 31) / 32 * 32 } else { dim_qk };
        let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
        let mut spec = AttentionSpec::dense(dtype, shape, Layout::Sbhd);
        spec.masks = masks;
        (spec.stats, spec.block_scaled) = (stats, block_scaled);
        if let Ok(problem) = spec.validate() {
            // Of 8-bit floats the composite form alone.
            let forms = [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)];
            for (form, runtime) in forms.into_iter().filter(|(form, _)| *form == Form::Composite || !dtype.is_fp8()) {
                let forward = lower::lower(&problem.clone().into(), form, runtime);
                // Of so few keys an axis of blocks is none.
                let refused = block_scaled && seq_kv <= 4 && matches!(forward, Err(lower::LowerError::Unsupported(_)));
                prop_assert!(refused || forward.is_ok(), "{spec:?}: {}", forward.unwrap_err());
            }
        }
    }
}
