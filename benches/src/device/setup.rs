//! What the subcommands share: an executor, device tensors with random contents, a median.

use conformance::inputs;
use conformance::random::Random;
use cudnn_graph::ffi::pack::Pack;
use cudnn_graph::{Buffer, DeviceSlice, Stream};
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, DeviceForward, PlanOptions, Planned};
use sdpa::{AttentionSpec, DType, Elements, Layout, Mask, Shape};

/// Any error, for the last line of the output.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The executor, and a line about where it runs.
pub(crate) fn executor(plan: PlanOptions) -> Result<CudnnExecutor> {
    let executor = CudnnExecutor::new(CudnnOptions::default().with_plan(plan))?;
    println!("{}, cuDNN {} from {}", executor.device().name(), executor.library().version(), executor.library().path().display());
    Ok(executor)
}

/// The forward problems of the speed table.
pub(crate) fn problems() -> Vec<(String, AttentionSpec)> {
    let causal = [Mask::causal()];
    vec![
        row(1, 32, 8, 2048, 2048, 128, &causal),
        row(1, 32, 8, 2049, 2049, 128, &causal),
        row(1, 32, 8, 8, 8, 128, &causal),
        row(1, 32, 8, 2048, 4096, 128, &[Mask::causal_bottom_right()]),
        row(4, 32, 32, 4096, 4096, 128, &causal),
        row(4, 16, 16, 16384, 16384, 128, &causal),
        row(1, 32, 8, 2048, 2048, 128, &[]),
        row(1, 32, 8, 2048, 2048, 128, &[Mask::prefix_lm(512)]),
        row(16, 32, 8, 1, 8192, 128, &[]),
    ]
}

/// batch, heads_q, heads_kv, seq_q, seq_kv, dim.
fn row(batch: i64, heads_q: i64, heads_kv: i64, seq_q: i64, seq_kv: i64, dim: i64, masks: &[Mask]) -> (String, AttentionSpec) {
    let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: dim, dim_v: dim };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd);
    spec.masks = masks.to_vec();
    let mask = masks.iter().map(ToString::to_string).collect::<Vec<_>>().join("+");
    let mask = if mask.is_empty() { "none".to_owned() } else { mask };
    (format!("{mask} ({batch},{heads_q},{heads_kv},{seq_q},{seq_kv},{dim})"), spec)
}

/// 8-bit floats, and the same problems in bf16.
pub(crate) fn fp8_problems() -> Vec<(String, AttentionSpec)> {
    let mut all = Vec::new();
    for (batch, heads, seq) in [(4, 32, 4096), (4, 16, 16384), (1, 32, 32768)] {
        for masks in [&[][..], &[Mask::causal()]] {
            for dtype in [DType::BF16, DType::F8E4M3, DType::F8E5M2] {
                all.push(fp8_row(batch, heads, seq, masks, dtype));
            }
        }
    }
    all
}

/// One of them.
pub(crate) fn fp8_row(batch: i64, heads: i64, seq: i64, masks: &[Mask], dtype: DType) -> (String, AttentionSpec) {
    let (name, spec) = row(batch, heads, heads, seq, seq, 128, masks);
    (format!("{dtype} {name}"), spec.with_dtype(dtype))
}

/// Lengths from 8 to 512, with and without a mask, few and many heads.
pub(crate) fn short_problems() -> Vec<(String, AttentionSpec)> {
    let mut all = Vec::new();
    for seq in [8, 16, 32, 64, 65, 96, 128, 129, 192, 256, 384, 512] {
        for (batch, dim) in [(1, 128), (16, 128), (1, 64)] {
            all.push(row(batch, 32, 8, seq, seq, dim, &[Mask::causal()]));
            all.push(row(batch, 32, 8, seq, seq, dim, &[]));
        }
    }
    for (seq_q, seq_kv) in [(2, 4096), (8, 4096), (16, 4096), (64, 4096), (128, 4096), (2048, 64)] {
        all.push(row(1, 32, 8, seq_q, seq_kv, 128, &[Mask::causal_bottom_right()]));
        all.push(row(4, 32, 8, seq_q, seq_kv, 128, &[]));
    }
    all
}

/// Operands of one problem in device memory.
pub(crate) struct Tensors {
    buffers: Vec<Buffer>,
    workspace: Buffer,
    stats: bool,
    /// Bytes of the output.
    pub(crate) o_bytes: usize,
}

impl Tensors {
    /// Random inputs, a poisoned output.
    pub(crate) fn new(stream: &Stream, spec: &AttentionSpec, workspace: u64, seed: u64) -> Result<Tensors> {
        let mut random = Random::new(seed);
        let mut buffers = Vec::new();
        for tensor in [&spec.q, &spec.k, &spec.v] {
            // A pattern of 64 Ki numbers, repeated: random enough for rates, and cheap for gigabytes.
            let elements = tensor.extent().unwrap_or(0) as usize;
            let short = sdpa::TensorSpec::dense([1, 1, 1, elements.min(65_521) as i64], Layout::Bhsd);
            let piece = inputs::random(&short, spec.dtype, 1.0, &mut random);
            let mut buffer = Buffer::new(stream.device(), elements * 2)?;
            match piece.elements() {
                Elements::BF16(x) => {
                    let all: Vec<_> = x.iter().copied().cycle().take(elements).collect();
                    buffer.upload(stream, 0, &all)?;
                }
                Elements::F16(x) => {
                    let all: Vec<_> = x.iter().copied().cycle().take(elements).collect();
                    buffer.upload(stream, 0, &all)?;
                }
                Elements::F32(_) | Elements::F8E4M3(_) | Elements::F8E5M2(_) => return Err("these calls are of 16-bit floats".into()),
            }
            buffers.push(buffer);
        }
        let o_bytes = spec.o.extent().unwrap_or(0) as usize * 2;
        buffers.push(Buffer::new(stream.device(), o_bytes)?);
        if spec.stats {
            buffers.push(Buffer::new(stream.device(), (spec.q.dims[0] * spec.q.dims[1] * spec.q.dims[2]) as usize * 4)?);
        }
        let workspace = Buffer::new(stream.device(), workspace as usize)?;
        Ok(Tensors { buffers, workspace, stats: spec.stats, o_bytes })
    }

    /// The output.
    pub(crate) fn o(&mut self) -> &mut Buffer {
        &mut self.buffers[3]
    }

    /// A call over them.
    pub(crate) fn call(&self, attn_scale: Option<f32>) -> DeviceForward<'static> {
        let slice = |b: &Buffer| DeviceSlice { address: b.address(), bytes: b.bytes() as u64 };
        let [q, k, v, o] = [0, 1, 2, 3].map(|n| slice(&self.buffers[n]));
        let stats = self.stats.then(|| slice(&self.buffers[4]));
        DeviceForward::new(q, k, v, o).stats(stats).attn_scale(attn_scale).workspace(slice(&self.workspace))
    }
}

/// A pack for `cudnnBackendExecute` itself, of plain attention: what a call is compared with.
pub(crate) fn bare_pack(planned: &Planned, tensors: &Tensors) -> Result<Pack> {
    let (call, ports) = (tensors.call(None), planned.plan.ports());
    let address = |name: &str| match name {
        "q" => call.q.address,
        "k" => call.k.address,
        "v" => call.v.address,
        _ => call.o.address,
    };
    let addresses: Vec<u64> = ports.device.iter().map(|p| address(&p.name)).collect();
    let device: Vec<i64> = ports.device.iter().map(|p| p.id.uid()).collect();
    let values: Vec<i64> = ports.values.iter().map(|p| p.id.uid()).collect();
    let workspace = call.workspace.map_or(0, |w| w.address);
    let mut pack = Pack::new(planned.plan.library(), &device, &addresses, &values, workspace)?;
    for (n, port) in ports.values.iter().enumerate() {
        let value = port.value.map_or(planned.job.problem().default_scale(), |v| v.to_f64() as f32);
        pack.set_value(n, &value.to_ne_bytes());
    }
    Ok(pack)
}

/// The middle one.
pub(crate) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
