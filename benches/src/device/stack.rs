//! Forward and backward of a stack of attention layers, the output of one the query of the next: time and memory.
#![allow(unsafe_code)]

use crate::memory::{random, slice};
use crate::setup::{Result, executor};
use cudnn_graph::{Buffer, Stream};
use sdpa::cudnn::{DeviceBackward, DeviceForward, PlanOptions};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};

const LAYERS: usize = 4;
const HEADS: i64 = 32;
const DIM: i64 = 128;
const RUNS: usize = 5;

/// What a layer keeps from the forward pass to the backward pass.
struct Layer {
    k: Buffer,
    v: Buffer,
    o: Buffer,
    stats: Buffer,
    dk: Buffer,
    dv: Buffer,
}

pub(crate) fn run(batch: u64, seq: u64) -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let stream: Stream = executor.device().stream()?;
    let handle = executor.library().handle(&stream)?;
    let shape =
        Shape { batch: batch as i64, heads_q: HEADS, heads_kv: HEADS, seq_q: seq as i64, seq_kv: seq as i64, dim_qk: DIM, dim_v: DIM };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal()).with_stats();
    let forward = executor.attention(&spec.validate()?)?.0;
    let backward = executor.attention_backward(&spec.backward().validate()?)?.0;
    let elements = shape.batch * HEADS * shape.seq_q * DIM;
    let bytes = elements as usize * 2;
    let buffer = |bytes: usize| Buffer::new(executor.device(), bytes);
    let before = executor.device().memory_free()?;
    let x = random(&stream, DType::BF16, elements, 1)?;
    let grad = random(&stream, DType::BF16, elements, 2)?;
    let mut layers = Vec::new();
    for n in 0..LAYERS as u64 {
        layers.push(Layer {
            k: random(&stream, DType::BF16, elements, 3 + n)?,
            v: random(&stream, DType::BF16, elements, 103 + n)?,
            o: buffer(bytes)?,
            stats: buffer(elements as usize / DIM as usize * 4)?,
            dk: buffer(bytes)?,
            dv: buffer(bytes)?,
        });
    }
    // The gradient of a layer's query is that of the output of the layer before: two take turns.
    let flow = [buffer(bytes)?, buffer(bytes)?];
    let workspace = buffer(forward.workspace_bytes().max(backward.workspace_bytes()) as usize)?;
    let peak = before - executor.device().memory_free()?;
    let step = || -> Result<()> {
        let mut q = slice(&x);
        for layer in &layers {
            let call = DeviceForward::new(q, slice(&layer.k), slice(&layer.v), slice(&layer.o))
                .stats(slice(&layer.stats))
                .workspace(slice(&workspace));
            // SAFETY: the memory is whole buffers of this device; the stream is waited for before they go.
            unsafe { forward.forward(&handle, &call) }?;
            q = slice(&layer.o);
        }
        let mut d_o = slice(&grad);
        for (n, layer) in layers.iter().enumerate().rev() {
            let dq = slice(&flow[n % 2]);
            let call = DeviceBackward::new(
                (if n == 0 { slice(&x) } else { slice(&layers[n - 1].o) }, slice(&layer.k), slice(&layer.v)),
                (slice(&layer.o), slice(&layer.stats)),
                d_o,
                (dq, slice(&layer.dk), slice(&layer.dv)),
            )
            .workspace(slice(&workspace));
            // SAFETY: as above.
            unsafe { backward.backward(&handle, &call) }?;
            d_o = dq;
        }
        Ok(())
    };
    step()?;
    let start = stream.record(true)?;
    for _ in 0..RUNS {
        step()?;
    }
    let end = stream.record(true)?;
    stream.synchronize()?;
    let ms = f64::from(end.since(&start)?) / RUNS as f64;
    let tokens = (batch * seq) as f64 / ms * 1e3;
    println!("{}", serde_json::json!({ "ms": ms, "tokens_per_s": tokens, "peak_mib": peak as f64 / f64::from(1 << 20) }));
    Ok(())
}
