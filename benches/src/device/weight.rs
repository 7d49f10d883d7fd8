//! What plans take of the device's memory: the cache's estimate beside what the driver reports.
#![allow(unsafe_code)]

use crate::memory::Memory;
use crate::setup::{Result, executor};
use sdpa::cache::CacheValue;
use sdpa::cudnn::PlanOptions;
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};

const PLANS: i64 = 40;

pub(crate) fn run() -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let stream = executor.device().stream()?;
    let handle = executor.library().handle(&stream)?;
    for (name, mods, backward) in
        [("causal", None, false), ("softcap, causal", Some("softcap:30"), false), ("softcap, causal, backward", Some("softcap:30"), true)]
    {
        let (mut before, mut estimate, mut workspace) = (0, 0, 0);
        let mut kept = Vec::new();
        for n in 0..=PLANS {
            let seq = 64 + 8 * n;
            let shape = Shape { batch: 1, heads_q: 4, heads_kv: 4, seq_q: seq, seq_kv: seq, dim_qk: 128, dim_v: 128 };
            let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
            if let Some(text) = mods {
                spec = spec.score_mod(text.parse()?);
            }
            spec.stats = backward;
            let planned = if backward {
                executor.attention_backward(&spec.backward().validate()?)?.0
            } else {
                executor.attention(&spec.validate()?)?.0
            };
            let memory = Memory::new(&stream, &planned, planned.workspace_bytes())?;
            // SAFETY: whole buffers of this device, waited for before they go. A module is loaded when it first runs.
            unsafe { memory.submit(&planned, &handle) }?;
            stream.synchronize()?;
            drop(memory);
            let weight = planned.weight();
            kept.push(planned);
            if n == 0 {
                // The first has the driver set up what all share.
                before = executor.device().memory_free()?;
            } else {
                estimate += weight.device;
                workspace = workspace.max(weight.workspace);
            }
        }
        let taken = before.saturating_sub(executor.device().memory_free()?);
        let each = |bytes: u64| bytes as f64 / PLANS as f64 / 1024.0;
        println!(
            "{name}: {PLANS} plans, estimated {:.1} KiB of device memory each, {:.1} KiB each taken (the driver takes 2 MiB at a time); largest workspace {workspace} bytes",
            each(estimate),
            each(taken)
        );
    }
    Ok(())
}
