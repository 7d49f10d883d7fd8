//! Packed sequences on every instruction set: each one against a textbook problem of its own, and calls with invalid `cu_seqlens`.

use super::CpuExecutor;
use super::isa::Isa;
use crate::tests::{Random, Tensor, at_ends, masks, told};
use sdpa_core::executor::Executor;
use sdpa_core::packed::{CU_SEQLENS_KV, CU_SEQLENS_Q, memory};
use sdpa_core::{
    AttentionSpec, BackwardProblem, DType, Elements, ElementsMut, Error, HostBackward, HostForward, Layout, Packed, Param, Shape, Side,
    TensorSpec,
};
use std::ops::Range;

/// `cu_seqlens` of queries and of keys.
type Boundaries = [Vec<i32>; 2];

fn documents(boundaries: &[i32]) -> impl Iterator<Item = Range<usize>> {
    boundaries.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
}

/// Draws lengths of `batch` sequences with tokens before and after them. Returns `cu_seqlens` and the number of tokens.
fn drawn(random: &mut Random, batch: i64, longest: i64) -> (Vec<i32>, i64) {
    let mut boundaries = vec![random.below(4) as i32];
    for _ in 0..batch {
        let any = random.below(longest as usize + 1) as i64;
        let length = random.pick(&[0, longest, any, any]);
        boundaries.push(boundaries[boundaries.len() - 1] + length as i32);
    }
    let tokens = i64::from(boundaries[boundaries.len() - 1]) + random.below(4) as i64;
    (boundaries, tokens.max(1))
}

fn random_spec(random: &mut Random) -> (AttentionSpec, Boundaries, [i64; 2]) {
    let heads_kv = random.pick(&[1, 2]);
    let shape = Shape {
        batch: random.pick(&[1, 2, 3, 9]),
        heads_q: heads_kv * random.pick(&[1, 1, 3, 8]),
        heads_kv,
        seq_q: random.pick(&[1, 2, 17, 65, 130]),
        seq_kv: random.pick(&[1, 7, 64, 129, 300]),
        dim_qk: random.pick(&[5, 8, 40, 64]),
        dim_v: random.pick(&[1, 8, 24, 72]),
    };
    let (of_queries, queries) = drawn(random, shape.batch, shape.seq_q);
    let (of_keys, keys) = drawn(random, shape.batch, shape.seq_kv);
    let packed = Packed::new().with_cross(true).with_totals(Some(queries), Some(keys));
    let mut spec = AttentionSpec::packed(DType::F32, shape, packed).with_stats();
    spec.masks = masks(random, shape.seq_kv);
    at_ends(&mut spec.masks);
    for (tensor, tokens) in [(&mut spec.q, queries), (&mut spec.k, keys), (&mut spec.v, keys), (&mut spec.o, queries)] {
        let [_, heads, longest, dim] = tensor.dims;
        let row = dim + random.pick(&[0, 3]);
        tensor.strides = random.pick(&[Layout::Bhsd, Layout::Bshd]).strides([1, heads, tokens.max(longest).max(2), row]);
    }
    (spec, [of_queries, of_keys], [queries, keys])
}

/// Returns memory of all tokens, NaN outside of sequences.
fn filled(spec: &TensorSpec, tokens: i64, boundaries: &[i32], random: Option<&mut Random>) -> Tensor {
    let mut tensor = Tensor::new(&memory(spec, tokens));
    let Some(random) = random else { return tensor };
    let [_, heads, _, dim] = tensor.spec.dims.map(|n| n as usize);
    for (head, token) in (0..heads).flat_map(|head| documents(boundaries).flatten().map(move |token| (head, token))) {
        (0..dim).for_each(|d| tensor.set([0, head, token, d], random.element()));
    }
    tensor
}

/// Returns one sequence as a tensor of its own.
fn cut(tensor: &Tensor, tokens: &Range<usize>) -> Tensor {
    let first = tensor.at([0, 0, tokens.start, 0]);
    let mut spec = tensor.spec;
    spec.dims[2] = tokens.len() as i64;
    Tensor { spec, data: tensor.data.get(first..).unwrap_or_default().to_vec() }
}

/// Removes the sequences from a result, and returns true if nothing else was written.
fn untouched(tensor: &Tensor, boundaries: &[i32]) -> bool {
    let mut rest = Tensor { spec: tensor.spec, data: tensor.data.clone() };
    let [_, heads, _, dim] = rest.spec.dims.map(|n| n as usize);
    for (head, token) in (0..heads).flat_map(|head| documents(boundaries).flatten().map(move |token| (head, token))) {
        (0..dim).for_each(|d| rest.set([0, head, token, d], f32::NAN));
    }
    rest.data.iter().all(|x| x.is_nan())
}

struct Run {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    o: Tensor,
    stats: Tensor,
    gradients: [Tensor; 3],
}

fn run(isa: Isa, threads: usize, problem: &BackwardProblem, [of_q, of_k]: &Boundaries, [queries, keys]: [i64; 2]) -> Run {
    let (executor, forward) = (CpuExecutor::with_isa(isa), problem.forward());
    let mut random = Random(7);
    let random = &mut random;
    let (q, d_o) = (filled(forward.q(), queries, of_q, Some(random)), filled(problem.d_o(), queries, of_q, Some(random)));
    let (k, v) = (filled(forward.k(), keys, of_k, Some(random)), filled(forward.v(), keys, of_k, Some(random)));
    let (mut o, mut stats) = (filled(forward.o(), queries, of_q, None), filled(&forward.stats_tensor(), queries, of_q, None));
    let mut gradients = [(problem.dq(), queries, of_q), (problem.dk(), keys, of_k), (problem.dv(), keys, of_k)]
        .map(|(spec, tokens, boundaries)| filled(spec, tokens, boundaries, None));
    let params = &[(CU_SEQLENS_Q, of_q), (CU_SEQLENS_KV, of_k)].map(|(name, cu)| Param::new(name, cu));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let (q, k, v) = (Elements::F32(&q.data), Elements::F32(&k.data), Elements::F32(&v.data));
        let o = ElementsMut::F32(&mut o.data);
        let call = HostForward::new(q, k, v, o).stats(&mut stats.data).params(params);
        let report = executor.prepare(forward).unwrap().forward(call).unwrap();
        assert!(report.workspace_bytes <= executor.workspace_bytes(forward), "{forward:?}");
    });
    let [dq, dk, dv] = &mut gradients;
    pool.install(|| {
        let call =
            HostBackward::new((&q.data, &k.data, &v.data), (&o.data, &stats.data), &d_o.data, (&mut dq.data, &mut dk.data, &mut dv.data))
                .params(params);
        let report = executor.prepare_backward(problem).unwrap().backward(call).unwrap();
        // With several threads, any number of partial sums may wait for the sum of a suspended thread, so the workspace has no bound.
        assert!(threads > 1 || report.workspace_bytes <= executor.backward_workspace_bytes(problem), "{problem:?}");
    });
    Run { q, k, v, d_o, o, stats, gradients }
}

/// Compares each sequence with a problem of its own.
fn verify(problem: &BackwardProblem, boundaries: &Boundaries, run: &Run) {
    let [of_q, of_k] = boundaries;
    let Run { q, k, v, d_o, o, stats, gradients: [dq, dk, dv] } = run;
    for (result, boundaries) in [(o, of_q), (stats, of_q), (dq, of_q), (dk, of_k), (dv, of_k)] {
        assert!(untouched(result, boundaries), "{problem:?}: something was written outside of documents {boundaries:?}");
    }
    let forward = problem.forward();
    let scale = f64::from(forward.default_scale());
    for (queries, keys) in documents(of_q).zip(documents(of_k)) {
        let zero = |tensor: &Tensor| crate::tests::indices(&tensor.spec).all(|at| tensor.get(at) == 0.0);
        let [q, d_o, o, stats, dq] = [q, d_o, o, stats, dq].map(|tensor| cut(tensor, &queries));
        let [k, v, dk, dv] = [k, v, dk, dv].map(|tensor| cut(tensor, &keys));
        if queries.is_empty() || keys.is_empty() {
            assert!([&o, &dq, &dk, &dv].into_iter().all(zero), "{problem:?}");
            assert!(crate::tests::indices(&stats.spec).all(|at| stats.get(at) == f64::NEG_INFINITY));
            continue;
        }
        let of_rows: Vec<f32> = crate::tests::indices(&stats.spec).map(|at| stats.get(at) as f32).collect();
        let shape = Shape {
            batch: 1,
            heads_q: forward.heads_q(),
            heads_kv: forward.heads_kv(),
            seq_q: queries.len() as i64,
            seq_kv: keys.len() as i64,
            dim_qk: forward.dim_qk(),
            dim_v: forward.dim_v(),
        };
        let own = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).validate().unwrap();
        let lengths = [shape.seq_q, shape.seq_kv];
        let keeps = |[.., q, k]: [i64; 4]| forward.region().keeps(q, k) && forward.kept().ends.keeps(q, k, lengths);
        let keeps = sdpa_oracle::Mask::Rule(Box::new(keeps));
        let (forward_distance, backward_distance) = told(&own, [&q, &k, &v], scale, &[keeps], |p| {
            let forward = sdpa_oracle::check(p, o.told(), sdpa_oracle::Statistics::of(Some(&of_rows)), &|_| ());
            let given = sdpa_oracle::Given::Own;
            let got = [dq.told(), dk.told(), dv.told()];
            (forward, sdpa_oracle::check_gradients(p, d_o.told(), given, &got, &[], &|_| ()))
        });
        assert!(
            forward_distance.passes() && backward_distance.passes(),
            "{problem:?}, {boundaries:?}: {forward_distance:?} {backward_distance:?}"
        );
    }
}

#[test]
fn every_document_is_a_problem_of_its_own() {
    let bits = |tensors: &[&Tensor]| tensors.iter().flat_map(|t| t.data.iter().map(|x| x.to_bits())).collect::<Vec<u32>>();
    let gradients = |run: &Run| bits(&run.gradients.each_ref());
    let forward = |run: &Run| bits(&[&run.o, &run.stats]);
    for isa in Isa::all() {
        for seed in 0..60 {
            let random = &mut Random(seed * 7_919 + 3);
            let (spec, boundaries, tokens) = random_spec(random);
            let problem = spec.backward().validate().unwrap();
            let first = run(isa, 1, &problem, &boundaries, tokens);
            verify(&problem, &boundaries, &first);
            let second = run(isa, 3, &problem, &boundaries, tokens);
            assert!(gradients(&first) == gradients(&second), "{isa:?}, {problem:?}: threads change gradients");
            // The oracle takes most of the time, so check the second run only if its bits differ.
            if forward(&first) != forward(&second) {
                verify(&problem, &boundaries, &second);
            }
        }
    }
}

#[test]
fn wrong_boundaries_are_told_and_nothing_is_written() {
    let shape = Shape { batch: 3, heads_q: 2, heads_kv: 1, seq_q: 9, seq_kv: 9, dim_qk: 8, dim_v: 8 };
    let problem = AttentionSpec::packed(DType::F32, shape, Packed::of(20)).with_stats().validate().unwrap();
    let backward = AttentionSpec::packed(DType::F32, shape, Packed::of(20)).backward().validate().unwrap();
    let executor = CpuExecutor::new();
    let cases: [(&[i32], usize, &str); 8] = [
        (&[0, 5, 4, 9], 20, "at least 5, the offset before it"),
        (&[-1, 3, 4, 9], 20, "at least 0"),
        (&[i32::MIN, i32::MAX, 4, 9], 20, "at least 0"),
        (&[0, 3, 13, 14], 20, "at most 9, the longest sequence of the problem (this is sequence 1)"),
        (&[0, 3, 4, i32::MAX], 20, "at most 9, the longest sequence of the problem (this is sequence 2)"),
        (&[0, 9, 18, 21], 30, "at most 20"),
        (&[4, 9, 13, 19], 18, "memory for 19 tokens"),
        (&[0, 3, 4], 20, "4 elements"),
    ];
    for (cu, tokens, rule) in cases {
        let params = &[Param::new("cu_seqlens", cu)];
        let memory = |side: Side| vec![1.0f32; tokens * if side == Side::Queries { 16 } else { 8 }];
        let poison = |side: Side| memory(side).into_iter().map(|_| f32::NAN).collect::<Vec<f32>>();
        let (q, k, mut o, mut stats) = (memory(Side::Queries), memory(Side::Keys), poison(Side::Queries), vec![f32::NAN; 2 * tokens]);
        let (of_q, of_k) = (Elements::F32(&q), Elements::F32(&k));
        let call = HostForward::new(of_q, of_k, of_k, &mut o).stats(&mut stats).params(params);
        let told = executor.prepare(&problem).unwrap().forward(call).unwrap_err();
        assert!(matches!(&told, Error::Spec(errors) if errors.to_string().contains(rule)), "{cu:?}: {told}");
        assert!(o.iter().chain(&stats).all(|x| x.is_nan()), "{cu:?}");

        let [mut dq, mut dk, mut dv] = [poison(Side::Queries), poison(Side::Keys), poison(Side::Keys)];
        let stats = vec![0.0; 2 * tokens];
        let call = HostBackward::new((of_q, of_k, of_k), (of_q, &stats), of_q, (&mut dq, &mut dk, &mut dv)).params(params);
        let told = executor.prepare_backward(&backward).unwrap().backward(call).unwrap_err();
        assert!(matches!(&told, Error::Spec(errors) if errors.to_string().contains(rule)), "{cu:?}: {told}");
        assert!([&dq, &dk, &dv].into_iter().flatten().all(|x| x.is_nan()), "{cu:?}");
    }
}
