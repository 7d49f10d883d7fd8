//! CUDA graphs and retirement: captured calls against the same calls made at once, bit by bit; plans and workspace that go while the
//! device or a graph still needs them.
#![allow(unsafe_code)]

use crate::memory::Memory;
use crate::setup::{Result, executor};
use cudnn_graph::Stream;
use sdpa::cache::Limits;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, PlanOptions, Replay};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::num::NonZeroUsize;
use std::sync::Arc;

/// A problem with heads in groups, more keys than queries, and stats.
pub(crate) fn spec(seq: i64, mods: &[&str], masks: &[&str]) -> Result<AttentionSpec> {
    let shape = Shape { batch: 2, heads_q: 6, heads_kv: 2, seq_q: seq, seq_kv: seq + 30, dim_qk: 64, dim_v: 64 };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats();
    for text in mods {
        spec = spec.score_mod(text.parse()?);
    }
    for text in masks {
        spec = spec.mask(text.parse::<Mask>()?);
    }
    Ok(spec)
}

/// Under compute-sanitizer, where captures of several threads are invalidated that are not without it, one thread runs `alone`.
pub(crate) fn run(alone: bool) -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let stream = Arc::new(executor.device().stream()?);
    let mut checks = 0;
    for (mods, masks) in [
        (&[][..], &["causal"][..]),
        (&["softcap:30"], &["causal"]),
        (&["alibi"], &["sliding-window:50"]),
        (&["bias16:hqk"], &[]),
        (&[], &["padding", "causal"]),
        (&["softcap:20"], &["document"]),
    ] {
        let spec = spec(129, mods, masks)?;
        checks += replayed(&executor, &stream, &spec, false)? + replayed(&executor, &stream, &spec, true)?;
    }
    let kept = captured_outlives_the_cache(&executor, &stream)?;
    let evicted = evicted_while_in_flight()?;
    retired_behind_its_work()?;
    a_miss_inside_a_capture()?;
    if !alone {
        let replayed = replays_on_threads(&executor)?;
        println!("graphs: {replayed} calls of replays on four threads, each captured anew: the same bits");
    }
    println!(
        "graphs: {checks} replayed calls, {kept} launches after their plans had left the cache, {evicted} calls over an evicting cache: the same bits as calls made at once"
    );
    Ok(())
}

/// A call made at once, replayed, replayed with other memory, with another scale, and with the first of all again.
fn replayed(executor: &CudnnExecutor, stream: &Arc<Stream>, spec: &AttentionSpec, backward: bool) -> Result<usize> {
    // Else the sums of dq depend on the order in which blocks end.
    let planned = if backward {
        executor.attention_backward(&spec.backward().deterministic().validate()?)?.0
    } else {
        executor.attention(&spec.validate()?)?.0
    };
    let handle = executor.library().handle(stream)?;
    let mut memories = Vec::new();
    for seed in [1, 2] {
        let mut memory = Memory::seeded(stream, &planned.job, planned.workspace_bytes(), seed)?;
        if backward {
            memory.forward_first(executor, stream, spec)?;
        }
        memories.push(memory);
    }
    let mut replay = Replay::new(planned.clone(), stream.clone())?;
    let mut checks = 0;
    for (n, (memory, scale)) in [(0, None), (0, None), (1, None), (1, Some(0.3)), (0, None)].into_iter().enumerate() {
        let memory = &mut memories[memory];
        memory.poison(stream)?;
        // SAFETY: whole buffers of this device, which outlive the synchronisations behind every call.
        unsafe { memory.submit_scaled(&planned, &handle, scale) }?;
        let want = memory.results(stream)?;
        memory.poison(stream)?;
        // SAFETY: as above.
        unsafe { memory.replay(&mut replay, scale) }?;
        if want != memory.results(stream)? {
            return Err(format!("call {n} of {spec:?}, backward {backward}: the replayed call gave something else").into());
        }
        checks += 1;
    }
    if replay.captures() != 4 {
        return Err(format!("{} captures, not 4", replay.captures()).into());
    }
    Ok(checks)
}

/// A functional call captured by the caller's own hand, launched after the plan has left the cache and its last owner.
fn captured_outlives_the_cache(executor: &CudnnExecutor, stream: &Arc<Stream>) -> Result<usize> {
    let spec = spec(200, &["softcap:25"], &["causal"])?;
    let planned = executor.attention(&spec.validate()?)?.0;
    let mut memory = Memory::seeded(stream, &planned.job, planned.workspace_bytes(), 3)?;
    let plan = Arc::downgrade(&planned.plan);
    drop(planned);
    memory.poison(stream)?;
    // SAFETY: whole buffers of this device, which outlive the synchronisations behind every call.
    unsafe { memory.functional(executor, stream, &spec) }?;
    let want = memory.results(stream)?;
    let aside = executor.device().stream()?;
    // SAFETY: as above.
    let graph =
        aside.capture(|| unsafe { memory.functional(executor, &aside, &spec) }.map_err(|e| cudnn_graph::Error::PlanJson(e.to_string())))?;
    executor.forward_cache().clear();
    executor.device().release_retired();
    let mut launches = 0;
    for _ in 0..3 {
        memory.poison(stream)?;
        // SAFETY: as above.
        unsafe { graph.launch(stream) }?;
        if want != memory.results(stream)? {
            return Err("a graph gave something else after its plan had left the cache".into());
        }
        launches += 1;
        if plan.strong_count() == 0 {
            return Err("the plan is gone before its graph".into());
        }
    }
    drop(graph);
    stream.synchronize()?;
    if executor.device().release_retired() > 0 || plan.strong_count() > 0 {
        return Err("the plan has outlived its graph".into());
    }
    Ok(launches)
}

/// Plans that leave the cache while their work is queued are there until it is done, and not for longer.
fn retired_behind_its_work() -> Result<()> {
    let executor = CudnnExecutor::new(CudnnOptions::default())?;
    let stream = executor.device().stream()?;
    let spec = spec(3000, &["softcap:30"], &["causal"])?;
    let planned = executor.attention(&spec.validate()?)?.0;
    let plan = Arc::downgrade(&planned.plan);
    let memory = Memory::seeded(&stream, &planned.job, planned.workspace_bytes(), 9)?;
    drop(planned);
    executor.device().release_retired();
    for _ in 0..2000 {
        // SAFETY: whole buffers of this device, which outlive the synchronisation below.
        unsafe { memory.functional(&executor, &stream, &spec) }?;
    }
    executor.forward_cache().clear();
    let end = stream.record(false)?;
    let (waiting, running, there) = (executor.device().release_retired(), !end.passed()?, plan.strong_count() > 0);
    if !running {
        return Err("the work was done too soon to show anything".into());
    }
    if waiting == 0 || !there {
        return Err("a plan is gone while its work is queued".into());
    }
    stream.synchronize()?;
    if executor.device().release_retired() > 0 || plan.strong_count() > 0 {
        return Err("a plan has outlived its work".into());
    }
    println!("graphs: a plan that left the cache over 2000 queued calls was there until they were done, and no longer");
    Ok(())
}

/// One entry: a call that misses and evicts, inside its own capture.
fn a_miss_inside_a_capture() -> Result<()> {
    let executor = CudnnExecutor::new(CudnnOptions::default().with_forward(Limits::entries(NonZeroUsize::MIN)))?;
    let (stream, aside) = (executor.device().stream()?, executor.device().stream()?);
    for seq in [500, 600, 700] {
        let spec = spec(seq, &[], &["causal"])?;
        let planned = executor.attention(&spec.validate()?)?.0;
        let mut memory = Memory::seeded(&stream, &planned.job, planned.workspace_bytes(), 4)?;
        drop(planned);
        memory.poison(&stream)?;
        // SAFETY: whole buffers of this device, which outlive the synchronisations behind every call.
        unsafe { memory.functional(&executor, &stream, &spec) }?;
        let want = memory.results(&stream)?;
        // Another plan takes its place.
        executor.attention(&self::spec(seq + 64, &[], &["causal"])?.validate()?)?;
        let captured = || -> std::result::Result<(), cudnn_graph::Error> {
            // SAFETY: as above.
            unsafe { memory.functional(&executor, &aside, &spec) }.map_err(|e| cudnn_graph::Error::PlanJson(e.to_string()))
        };
        let graph = aside.capture(captured)?;
        memory.poison(&stream)?;
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }?;
        if memory.results(&stream)? != want {
            return Err("a call that was captured as it missed gave something else".into());
        }
    }
    println!("graphs: three calls that missed and evicted inside their own capture: the same bits");
    Ok(())
}

/// Four threads with a replay each, between two sets of addresses, while a fifth builds and evicts; how many calls.
fn replays_on_threads(executor: &CudnnExecutor) -> Result<usize> {
    const CALLS: usize = 200;
    let spec = spec(129, &["softcap:30"], &["causal"])?;
    let planned = executor.attention(&spec.validate()?)?.0;
    let own = || -> std::result::Result<usize, String> {
        let text = |e: Box<dyn std::error::Error>| e.to_string();
        let stream = Arc::new(executor.device().stream().map_err(|e| e.to_string())?);
        let mut memories = Vec::new();
        let mut want = Vec::new();
        for seed in [1, 2] {
            let mut memory = Memory::seeded(&stream, &planned.job, planned.workspace_bytes(), seed).map_err(text)?;
            memory.poison(&stream).map_err(text)?;
            let handle = executor.library().handle(&stream).map_err(|e| e.to_string())?;
            // SAFETY: whole buffers of this device, which outlive the synchronisations behind every call.
            unsafe { memory.submit(&planned, &handle) }.map_err(text)?;
            want.push(memory.results(&stream).map_err(text)?);
            memories.push(memory);
        }
        let mut replay = Replay::new(planned.clone(), stream.clone()).map_err(|e| e.to_string())?;
        for n in 0..CALLS {
            memories[n % 2].poison(&stream).map_err(text)?;
            // SAFETY: as above.
            unsafe { memories[n % 2].replay(&mut replay, None) }.map_err(|e| format!("call {n}: {e}"))?;
            if memories[n % 2].results(&stream).map_err(text)? != want[n % 2] {
                return Err(format!("call {n} gave something else"));
            }
        }
        Ok(CALLS)
    };
    let others = || -> std::result::Result<(), String> {
        let narrow = CudnnOptions::default().with_forward(Limits::entries(NonZeroUsize::MIN));
        let executor = CudnnExecutor::new(narrow).map_err(|e| e.to_string())?;
        let stream = executor.device().stream().map_err(|e| e.to_string())?;
        for seq in [140, 150, 160, 140, 150] {
            let spec = self::spec(seq, &[], &["causal"]).map_err(|e| e.to_string())?;
            let planned = executor.attention(&spec.validate().map_err(|e| e.to_string())?).map_err(|e| e.to_string())?.0;
            let memory = Memory::seeded(&stream, &planned.job, planned.workspace_bytes(), 3).map_err(|e| e.to_string())?;
            // SAFETY: as above.
            unsafe { memory.functional(&executor, &stream, &spec) }.map_err(|e| e.to_string())?;
            stream.synchronize().map_err(|e| e.to_string())?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let replays: Vec<_> = (0..4).map(|_| scope.spawn(own)).collect();
        let other = scope.spawn(others);
        let mut calls = 0;
        for thread in replays {
            calls += thread.join().map_err(|_| "a thread panicked")??;
        }
        other.join().map_err(|_| "a thread panicked")??;
        Ok(calls)
    })
}

/// One entry for four specifications: every call evicts the plan of the one before, which may still run.
fn evicted_while_in_flight() -> Result<usize> {
    let limits = Limits::entries(NonZeroUsize::MIN);
    let executor = CudnnExecutor::new(CudnnOptions::default().with_forward(limits))?;
    let stream = executor.device().stream()?;
    let mut all = Vec::new();
    for seq in [700, 900, 1100, 1300] {
        let spec = spec(seq, &["softcap:30"], &["causal"])?;
        let planned = executor.attention(&spec.validate()?)?.0;
        let mut memory = Memory::seeded(&stream, &planned.job, planned.workspace_bytes(), seq as u64)?;
        memory.poison(&stream)?;
        // SAFETY: whole buffers of this device, which outlive the synchronisations behind every call.
        unsafe { memory.functional(&executor, &stream, &spec) }?;
        let want = memory.results(&stream)?;
        all.push((spec, memory, want));
    }
    let mut calls = 0;
    for _ in 0..5 {
        for (_, memory, _) in &mut all {
            memory.poison(&stream)?;
        }
        for (spec, memory, _) in &all {
            for _ in 0..20 {
                // SAFETY: as above.
                unsafe { memory.functional(&executor, &stream, spec) }?;
                calls += 1;
            }
        }
        for (spec, memory, want) in &all {
            if memory.results(&stream)? != *want {
                return Err(format!("{spec:?} gave something else while plans were evicted").into());
            }
        }
    }
    let waiting = executor.device().release_retired();
    let stats = executor.cache_stats()[0];
    if stats.evictions < 10 || waiting > 0 {
        return Err(format!("{} evictions, {waiting} plans still wait after everything has passed", stats.evictions).into());
    }
    Ok(calls)
}
