//! WGMMA kernels whose results do not depend on an order: sums of dQ in fixed point, and splits of fixed size.

use crate::cuda::executor_of;
use crate::cuda_speed::{EACH, FEW, Few, Lies, Pass, ROWS, Row, few_spec, spec as dense, times};
use crate::setup::{Result, executor as cudnn};
use conformance::Case;
use conformance::invariance::{Features, compare};
use conformance::random::Random;
use conformance::runner::{self, Draw, Outcome, Source, Tally};
use cudnn_graph::Stream;
use sdpa::cuda::{CudaOptions, Family};
use sdpa::cudnn::PlanOptions;
use sdpa::cudnn::lower::Job;
use sdpa::device::OnDevice;
use sdpa::{AttentionSpec, DType, Packed, Shape};
use sdpa_driver::DeviceSlice;

const NARROW: [DType; 2] = [DType::BF16, DType::F16];

/// Cases and random problems against the oracle; `first` is where random ones begin. Deterministic and nondeterministic passes have the same operands, so that
/// their errors can be compared.
pub(crate) fn right(random: u64, first: u64) -> Result<()> {
    let wgmma = CudaOptions::default().with_family(Family::Wgmma);
    let executor = executor_of(wgmma)?;
    let [mut integers, mut floats, mut splits, mut cases] = [(); 4].map(|()| Tally::default());
    // Norms of the errors of dq, integers to floats.
    let mut errors = Vec::new();
    if first == 0 {
        for case in Case::all_invariant()?.into_iter().filter(|case| NARROW.contains(&case.dtype)) {
            cases.add("fixed", &case.name, &runner::run_case(&case, &executor));
        }
        for case in Case::ordered_parameters()? {
            cases.add("fixed", &case.name, &runner::run_backward_case(&case, Source::Oracle, &executor));
        }
        println!("{}", cases.summary("fixed splits and gradients of parameters, cases"));
    }
    for seed in first..first + random {
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        for (what, spec) in runner::fixed_point_problems(&mut Random::new(seed * 7919 + 43)) {
            let source = Source::ALL[(seed % 2) as usize];
            let outcome = runner::run_backward(&spec, &draw, source, &executor);
            if matches!(outcome, Outcome::Fail(_)) {
                println!("{spec:?}");
            }
            integers.add("fixed", &format!("gradient {seed}, {what}"), &outcome);
            let mut any = spec;
            any.deterministic = false;
            let other = runner::run_backward(&any, &draw, source, &executor);
            floats.count(&other);
            if let (Outcome::Pass(integers, _), Outcome::Pass(floats, _)) = (&outcome, &other) {
                let [integers, floats] = [integers, floats].map(|distance| distance.operands[0].relative());
                if floats > 0.0 {
                    errors.push(integers / floats);
                }
            }
        }
        for (what, spec) in runner::fixed_split_problems(&mut Random::new(seed * 7919 + 47)) {
            let outcome = runner::run(&spec, None, 1.0, seed, &executor);
            if matches!(outcome, Outcome::Fail(_)) {
                println!("{spec:?}");
            }
            splits.add("fixed", &format!("splits {seed}, {what}"), &outcome);
        }
    }
    println!("{}", integers.summary("dQ in fixed point"));
    println!("{}", floats.summary("the same problems with f32 atomics"));
    println!("{}", splits.summary("fixed splits"));
    errors.sort_by(f64::total_cmp);
    if let [least, .., most] = errors[..] {
        let median = errors[errors.len() / 2];
        println!("error of dq in fixed point / in f32, {} problems: {least:.3} to {most:.3}, median {median:.4}", errors.len());
    }
    let failed = integers.failed + floats.failed + splits.failed + cases.failed;
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// The bits of each sequence's results alone and in other calls, with the kernels whose name has this text.
pub(crate) fn invariant(named: &str) -> Result<()> {
    let forward = executor_of(CudaOptions::default().with_family(Family::Wgmma))?;
    let both = executor_of(CudaOptions::default())?;
    let mma = executor_of(CudaOptions::default().with_family(Family::Mma))?;
    let causal = Features {
        dtype: DType::BF16,
        heads: [8, 2],
        dims: [128, 128],
        score_mods: &[],
        masks: &["causal-ends"],
        sink: false,
        lengths: &[[20, 20], [1, 1150], [30, 2300], [140, 1100], [2, 9000], [700, 5000]],
        from_the_end: true,
        gradients: false,
        batch_invariant: true,
    };
    let splits = [
        causal,
        Features { dtype: DType::F16, heads: [8, 8], sink: true, masks: &["window:2600,0:ends"], ..causal },
        Features { heads: [2, 2], dims: [96, 64], masks: &["causal-ends", "(q + k) % 3 != 1"], from_the_end: false, ..causal },
        Features { heads: [40, 8], dims: [64, 64], score_mods: &["softcap:5"], masks: &[], from_the_end: false, ..causal },
        Features { heads: [64, 8], lengths: &[[1, 30_000], [1, 1025], [4, 3000], [1000, 2500]], ..causal },
    ];
    let short: &[[i64; 2]] = &[[20, 20], [1, 150], [30, 300], [140, 140], [900, 1100]];
    let gradients = Features { gradients: true, lengths: short, from_the_end: false, ..causal };
    let sums = [
        gradients,
        Features { dtype: DType::F16, sink: true, masks: &["window:50,0:ends"], ..gradients },
        Features {
            heads: [2, 2],
            dims: [64, 40],
            score_mods: &["softcap:5", "alibi"],
            masks: &["causal-ends", "(q + k) % 3 != 1"],
            ..gradients
        },
        Features { dims: [192, 128], ..gradients },
        Features { heads: [4, 2], dims: [256, 256], masks: &["window:50,0:ends"], ..gradients },
    ];
    let mut failed = 0;
    let wgmma = splits.iter().map(|f| ("splits", &forward, f)).chain(sums.iter().map(|f| ("fixed point", &both, f)));
    let mma_features = [Features { lengths: short, gradients: true, ..causal }];
    let all = wgmma.chain(mma_features.iter().map(|f| ("mma.sync", &mma, f)));
    for (what, executor, features) in all.filter(|(what, ..)| what.contains(named)) {
        match compare(executor, features) {
            Ok(n) => println!("passed: {what}: {n} equal results of {features:?}"),
            Err(why) => {
                failed += 1;
                println!("FAILED: {what}: {features:?}: {why}");
            }
        }
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// Returns whether a row's name has one of these texts, or there are none.
fn is_named(name: &str, texts: &[String]) -> bool {
    texts.is_empty() || texts.iter().any(|text| name.contains(text))
}

/// Rows with the gradient of a parameter: a bias of heads, of heads and queries, a table, and a bias of all scores.
const LEARNED: [(Row, &str); 4] = [
    (([4, 32, 32, 4096, 128], "bias:h", "causal"), "bias"),
    (([4, 32, 32, 4096, 128], "bias:hq", "causal"), "bias"),
    (([1, 16, 16, 4096, 64], "relative-bias:16,128", "causal"), "rel"),
    (([1, 16, 16, 4096, 64], "bias:hqk", "causal"), "bias"),
];

/// Backward passes of the rows of the speed table, in turns: with f32 atomics, deterministic, and cuDNN's deterministic engine. With gradients of
/// parameters, also deterministic with `mma.sync`.
pub(crate) fn backward_speed(named: &[String]) -> Result<()> {
    let fixed = executor_of(CudaOptions::default())?;
    let theirs = cudnn(PlanOptions::default())?;
    let stream = fixed.device().stream()?;
    let packed = |batch: i64, seq: i64| {
        let shape = Shape { batch, heads_q: 32, heads_kv: 8, seq_q: seq, seq_kv: seq, dim_qk: 128, dim_v: 128 };
        let spec = AttentionSpec::packed(DType::BF16, shape, Packed::of(batch * seq)).mask("causal".parse()?);
        Ok::<_, Box<dyn std::error::Error>>((format!("packed {batch} x {seq}, 32/8 heads, causal"), spec))
    };
    let mut all = ROWS.into_iter().map(|row| Ok((format!("{row:?}"), dense(row)?))).collect::<Result<Vec<_>>>()?;
    for row in [([4, 32, 8, 2048, 128], "", ""), ([4, 32, 8, 2048, 128], "", "causal")] {
        all.push((format!("{row:?}"), dense(row)?));
    }
    all.extend([packed(32, 512)?, packed(8, 2048)?, packed(1, 16384)?]);
    let mut all: Vec<_> = all.into_iter().map(|(name, spec)| (name, spec.with_stats().backward())).collect();
    for (row, param) in LEARNED {
        all.push((format!("gradients of parameters, {row:?}"), dense(row)?.with_stats().backward().wrt(param, DType::F32)));
    }
    all.retain(|(name, _)| is_named(name, named));
    let (mut ratios, mma) = (Vec::new(), executor_of(CudaOptions::default().with_family(Family::Mma))?);
    for (name, any) in all {
        let ordered = any.clone().deterministic().validate()?;
        let any = any.validate()?;
        let first = fixed.attention(any.forward())?.0;
        let mut plans = vec![fixed.gradient(&any)?.0, fixed.gradient(&ordered)?.0];
        if ordered.wrt_scores().next().is_some() {
            plans.push(mma.gradient(&ordered)?.0);
        }
        let others: Vec<_> =
            [&any, &ordered].into_iter().map(|problem| theirs.attention_backward(problem).map(|(planned, _)| planned)).collect();
        let found: Vec<OnDevice<DeviceSlice, Stream>> =
            others.iter().flatten().map(|planned| planned.clone() as OnDevice<DeviceSlice, Stream>).collect();
        let passes: Vec<&Pass> = plans.iter().map(|plan| &**plan as &Pass).chain(found.iter().map(|pass| &**pass)).collect();
        let mut ms = times(&stream, &Job::from(any.clone()), &passes, Some(&*first as &Pass), EACH)?.into_iter();
        let [f32_ms, fixed_ms] = [(); 2].map(|()| ms.next().unwrap_or(f64::NAN));
        let mma_ms = plans.get(2).and_then(|_| ms.next()).map_or_else(String::new, |ms| format!(", with mma.sync {ms:.4}"));
        let mut cudnn_ms = others.iter().map(|other| if other.is_ok() { ms.next() } else { None });
        let told = |ms: Option<f64>| ms.map_or_else(|| "unsupported".to_owned(), |ms| format!("{ms:.4}"));
        let [free, bound] = [(); 2].map(|()| told(cudnn_ms.next().flatten()));
        let ratio = f32_ms / fixed_ms;
        ratios.push(ratio);
        println!(
            "{name}: f32 {f32_ms:.4} ms ({}), deterministic {fixed_ms:.4} ms ({}), ratio {ratio:.3}{mma_ms}; cudnn {free}, deterministic {bound}",
            plans[0].engine(),
            plans[1].engine()
        );
    }
    println!("geometric mean of the ratios: {:.4}", mean(&ratios));
    Ok(())
}

/// Forward passes of the rows of the speed table and of a serving mix, in turns: with the usual splits, with splits of fixed size, and with `mma.sync`.
pub(crate) fn forward_speed(named: &[String]) -> Result<()> {
    let fixed = executor_of(CudaOptions::default())?;
    let stream = fixed.device().stream()?;
    let mut all = ROWS.into_iter().map(|row| Ok((format!("{row:?}"), dense(row)?))).collect::<Result<Vec<_>>>()?;
    for row in FEW {
        all.push((format!("{row:?}"), few_spec(row)?));
    }
    for row in SERVING {
        all.push((format!("serving {row:?}"), few_spec(row)?));
    }
    all.retain(|(name, _)| is_named(name, named));
    let (mut ratios, mut serving) = (Vec::new(), [0.0; 2]);
    for (name, spec) in all {
        let [usual, invariant] = [spec.clone(), spec.batch_invariant()].map(|spec| spec.validate());
        let (usual, invariant) = (usual?, invariant?);
        let plans = [fixed.attention(&usual)?.0, fixed.attention(&invariant)?.0];
        let passes: Vec<&Pass> = plans.iter().map(|plan| &**plan as &Pass).collect();
        let ms = times(&stream, &usual.into(), &passes, None, EACH)?;
        let ratio = ms[0] / ms[1];
        ratios.push(ratio);
        if name.starts_with("serving") {
            serving.iter_mut().zip(&ms).for_each(|(all, ms)| *all += ms);
        }
        println!(
            "{name}: usual {:.4} ms ({}), batch-invariant {:.4} ms ({}), ratio {ratio:.3}",
            ms[0],
            plans[0].engine(),
            ms[1],
            plans[1].engine()
        );
    }
    println!(
        "geometric mean of the ratios: {:.4}; serving mix: {:.4} ms and {:.4} ms, ratio {:.4}",
        mean(&ratios),
        serving[0],
        serving[1],
        serving[0] / serving[1]
    );
    Ok(())
}

fn mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|x| x.ln()).sum::<f64>() / ratios.len().max(1) as f64).exp()
}

/// Calls of a server with 32 query and 8 KV heads: prefills, chunks of prefills behind a prefix, and decode steps of several batch sizes.
const SERVING: [Few; 8] = [
    (Lies::Packed, [4, 32, 8, 2048, 2048], "causal"),
    (Lies::Packed, [1, 32, 8, 8192, 8192], "causal"),
    (Lies::Paged(16), [1, 32, 8, 512, 4096], "causal-bottom-right"),
    (Lies::Paged(16), [1, 32, 8, 2048, 16384], "causal-bottom-right"),
    (Lies::Paged(16), [8, 32, 8, 1, 4096], "padding"),
    (Lies::Paged(16), [32, 32, 8, 1, 2048], "padding"),
    (Lies::Paged(16), [64, 32, 8, 1, 4096], "padding"),
    (Lies::Paged(16), [128, 32, 8, 1, 2048], "padding"),
];
