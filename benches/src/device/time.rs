//! Device time of problems that are read from standard input, one JSON object a line, answered by one a line: a script can take
//! turns between this and others in one run.
#![allow(unsafe_code)]

use crate::memory::Memory;
use crate::setup::{Result, executor, median};
use crate::turns::Turns;
use cudnn_graph::{Event, Stream};
use sdpa::cudnn::lower::Form;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, Pieces, PlanOptions};
use sdpa::{AttentionSpec, BackwardSpec, DType, Layout, Packed, Paged, SINK, Shape};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::BufRead;

const WARM: usize = 5;
const RUNS: usize = 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Question {
    shape: Shape,
    dtype: DType,
    layout: Layout,
    #[serde(default)]
    score_mod: Vec<String>,
    #[serde(default)]
    mask: Vec<String>,
    #[serde(default)]
    pub(crate) backward: bool,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    wrt: Vec<String>,
    /// Tokens of packed documents; `shape` has their number and the longest.
    #[serde(default)]
    pub(crate) documents: Option<Vec<i32>>,
    /// Tokens of a page: keys lie in a cache of as many pages as they take, in no order.
    #[serde(default)]
    paged: Option<i64>,
    /// Query heads have numbers in the denominator.
    #[serde(default)]
    sink: bool,
    /// Part of the weights that is dropped.
    #[serde(default)]
    dropout: Option<f32>,
    /// `always` or `never`, each band of a mask by itself; else where that is faster.
    #[serde(default)]
    pieces: Pieces,
    /// Of 8-bit floats: the types of the output, of its gradient, and of theirs.
    #[serde(default)]
    o_dtype: Option<DType>,
    #[serde(default)]
    d_o_dtype: Option<DType>,
    #[serde(default)]
    gradient_dtype: Option<DType>,
    /// `composite` or `unified`; else the better one.
    #[serde(default)]
    form: Option<Form>,
    /// Both executors stay ready for this problem until another one comes: one of them is called, once, so many times between two marks.
    #[serde(default)]
    turn: Option<Turn>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Turn {
    /// Native CUDA kernels, not cuDNN.
    pub(crate) own: bool,
    pub(crate) calls: i32,
}

#[derive(Serialize)]
pub(crate) struct Answer {
    pub(crate) ms: f64,
    pub(crate) tflops: f64,
    pub(crate) engine: String,
    pub(crate) workspace: u64,
}

pub(crate) fn run() -> Result<()> {
    let mut executors: HashMap<PlanOptions, CudnnExecutor> = HashMap::new();
    let stream = executor(PlanOptions::default())?.device().stream()?;
    let mut turns = Turns::default();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = serde_json::from_str(&line).map_err(Into::into).and_then(|question: Question| {
            if let Some(turn) = question.turn {
                return turns.take(&stream, &question, turn);
            }
            let plan = PlanOptions::default().with_form(question.form).with_pieces(question.pieces);
            if !executors.contains_key(&plan) {
                executors.insert(plan.clone(), CudnnExecutor::new(CudnnOptions::default().with_plan(plan.clone()))?);
            }
            answer(&executors[&plan], &stream, &question)
        });
        match answer {
            Ok(answer) => println!("{}", serde_json::to_string(&answer)?),
            Err(e) => println!("{}", serde_json::json!({ "refused": e.to_string() })),
        }
    }
    Ok(())
}

/// Of the pass; of documents, those of each by itself.
pub(crate) fn flops(backward: &BackwardSpec, question: &Question) -> Result<f64> {
    let one = |spec: &BackwardSpec| -> Result<f64> {
        Ok(if question.backward { spec.validate()?.flops() } else { spec.forward.validate()?.flops() })
    };
    let Some(documents) = &question.documents else { return one(backward) };
    let mut all = 0.0;
    for &length in documents.iter().filter(|&&length| length > 0) {
        let shape = Shape { batch: 1, seq_q: length.into(), seq_kv: length.into(), ..question.shape };
        let alone = AttentionSpec::dense(question.dtype, shape, question.layout);
        all += one(&alone.with_masks(backward.forward.masks.clone()).backward())?;
    }
    Ok(all)
}

/// What is asked, both passes of it.
pub(crate) fn asked(question: &Question) -> Result<BackwardSpec> {
    let mut spec = AttentionSpec::dense(question.dtype, question.shape, question.layout);
    if let Some(documents) = &question.documents {
        let total = documents.iter().map(|&n| i64::from(n)).sum();
        spec = AttentionSpec::packed(question.dtype, question.shape, Packed::of(total));
    }
    if let Some(page_size) = question.paged {
        let per_entry = Paged::new(page_size, 1).pages_of(question.shape.seq_kv);
        spec = AttentionSpec::paged(question.dtype, question.shape, Paged::new(page_size, per_entry * question.shape.batch));
    }
    spec.sink = question.sink;
    spec.o_dtype = question.o_dtype;
    if let Some(p) = question.dropout {
        spec = spec.with_dropout(p);
    }
    for text in &question.score_mod {
        spec = spec.score_mod(text.parse()?);
    }
    for text in &question.mask {
        spec = spec.mask(text.parse()?);
    }
    spec.stats = question.backward;
    let mut backward = spec.backward();
    backward.deterministic = question.deterministic;
    (backward.d_o_dtype, backward.gradient_dtype) = (question.d_o_dtype, question.gradient_dtype);
    for name in &question.wrt {
        backward = backward.wrt(name, if name == SINK { DType::F32 } else { question.dtype });
    }
    Ok(backward)
}

fn answer(executor: &CudnnExecutor, stream: &Stream, question: &Question) -> Result<Answer> {
    let backward = asked(question)?;
    let spec = &backward.forward;
    let forward = spec.validate()?;
    let planned = if question.backward { executor.attention_backward(&backward.validate()?)?.0 } else { executor.attention(&forward)?.0 };
    let flops = flops(&backward, question)?;
    let mut call = Memory::new(stream, &planned, planned.workspace_bytes())?;
    if let Some(documents) = &question.documents {
        call.set_documents(stream, documents)?;
    }
    let handle = executor.library().handle(stream)?;
    if question.backward {
        call.forward_first(executor, stream, spec)?;
    }
    let mut times = Vec::new();
    for round in 0..WARM + RUNS {
        let start: Event = stream.record(true)?;
        // SAFETY: the memory is whole buffers of this device that outlive the loop; the stream is waited for below.
        unsafe { call.submit(&planned, &handle) }?;
        let end = stream.record(true)?;
        end.synchronize()?;
        if round >= WARM {
            times.push(f64::from(end.since(&start)?));
        }
    }
    let ms = median(times);
    let engine = &planned.engine;
    Ok(Answer { ms, tflops: flops / ms / 1e9, engine: format!("{} {engine}", planned.lowered.form), workspace: planned.workspace_bytes() })
}
