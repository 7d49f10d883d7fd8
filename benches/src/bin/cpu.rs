//! Times the CPU executor. Reads one case a line, as JSON, and answers with a line of times, so that another program
//! can take turns with it; see `benches/cpu/compare.py`.

use half::{bf16, f16};
use sdpa::cpu::CpuExecutor;
use sdpa::{AttentionSpec, DType, Elements, ElementsMut, Executor, HostForward, Layout, Prepared, Shape};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

#[derive(Deserialize)]
struct Case {
    name: String,
    dtype: String,
    /// batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v.
    shape: [i64; 7],
    layout: Layout,
    mask: Option<String>,
    repeats: usize,
}

#[derive(Serialize)]
struct Times<'a> {
    name: &'a str,
    /// Wall time of each repeat.
    ms: Vec<f64>,
    flops: f64,
    engine: String,
    workspace_bytes: u64,
}

enum Buffers {
    F32([Vec<f32>; 4]),
    F16([Vec<f16>; 4]),
    BF16([Vec<bf16>; 4]),
}

struct Ready {
    prepared: Arc<dyn Prepared>,
    buffers: Buffers,
    flops: f64,
}

impl Ready {
    fn new(case: &Case) -> Result<Ready, Box<dyn Error>> {
        let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = case.shape;
        let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
        let dtype = match case.dtype.as_str() {
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            other => return Err(format!("dtype {other}: one of f32, f16, bf16").into()),
        };
        let mut spec = AttentionSpec::dense(dtype, shape, case.layout);
        if let Some(mask) = &case.mask {
            spec = spec.mask(mask.parse()?);
        }
        let problem = spec.validate()?;
        let mut state = 1u64;
        let mut filled = |operand: usize| -> Vec<f32> {
            let len = problem.tensors()[operand].extent().unwrap_or(0) as usize;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 22) as f32 - 2.0
            };
            (0..len).map(|_| next()).collect()
        };
        let data = [filled(0), filled(1), filled(2), filled(3)];
        let buffers = match case.dtype.as_str() {
            "f16" => Buffers::F16(data.map(|x| x.into_iter().map(f16::from_f32).collect())),
            "bf16" => Buffers::BF16(data.map(|x| x.into_iter().map(bf16::from_f32).collect())),
            _ => Buffers::F32(data),
        };
        Ok(Ready { prepared: CpuExecutor::new().prepare(&problem)?, buffers, flops: problem.flops() })
    }

    fn forward(&mut self) -> Result<sdpa::Report, sdpa::Error> {
        macro_rules! call {
            ($variant:ident, $buffers:expr) => {{
                let [q, k, v, o] = $buffers;
                HostForward::new(Elements::$variant(q), Elements::$variant(k), Elements::$variant(v), ElementsMut::$variant(o))
            }};
        }
        self.prepared.forward(match &mut self.buffers {
            Buffers::F32(x) => call!(F32, x),
            Buffers::F16(x) => call!(F16, x),
            Buffers::BF16(x) => call!(BF16, x),
        })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut ready: HashMap<String, Ready> = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let case: Case = serde_json::from_str(&line?)?;
        if !ready.contains_key(&case.name) {
            let mut new = Ready::new(&case)?;
            new.forward()?;
            ready.insert(case.name.clone(), new);
        }
        let Some(this) = ready.get_mut(&case.name) else { continue };
        let mut report = sdpa::Report::default();
        let mut ms = Vec::with_capacity(case.repeats);
        for _ in 0..case.repeats {
            let start = Instant::now();
            report = this.forward()?;
            ms.push(start.elapsed().as_secs_f64() * 1e3);
        }
        let times = Times { name: &case.name, ms, flops: this.flops, engine: report.engine, workspace_bytes: report.workspace_bytes };
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &times)?;
        writeln!(out)?;
        out.flush()?;
    }
    Ok(())
}
