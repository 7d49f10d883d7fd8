//! The operands of one problem: created or read, passed to executors, and checked.

use crate::blocks::Blocks;
use crate::data::{Data, Element};
use crate::exit::{Failure, Line};
use crate::header::{Entry, Header};
use crate::memory;
use crate::oracle;
use crate::params::{Bound, Planned};
use crate::progress::{Progress, Step};
use crate::random;
use crate::request::{Backward, Request, Source, elements};
use crate::scales::{self, Scales};
use sdpa::paged::PAGE_TABLE;
use sdpa::{
    Amax, AttentionSpec, BackwardProblem, DType, Direction, Error, Fp8Scale, HostBackward, HostForward, HostGradient, Operand, Param,
    Prepared, PreparedBackward, Report, Side, TensorSpec,
};
use sdpa_oracle::{Distance, GradientDistance};

/// The operands of a request, and memory for its results.
#[derive(Debug)]
pub(crate) struct Operands {
    q: Data,
    k: Data,
    v: Data,
    pub(crate) o: Data,
    pub(crate) stats: Option<Vec<f32>>,
    pub(crate) row_max: Option<Vec<f32>>,
    pub(crate) sum_exp: Option<Vec<f32>>,
    pub(crate) params: Vec<Bound>,
    pub(crate) gradients: Option<Gradients>,
    /// Scales of 8-bit floats, and the largest magnitudes that passes reported.
    pub(crate) scales: Scales,
    /// Notes for the user about the input.
    pub(crate) notes: Vec<String>,
}

/// Additional operands and results of a backward pass.
#[derive(Debug)]
pub(crate) struct Gradients {
    d_o: Data,
    pub(crate) dq: Data,
    pub(crate) dk: Data,
    pub(crate) dv: Data,
    /// Name and gradient of each parameter.
    pub(crate) wrt: Vec<(String, Data)>,
}

/// Returns the number of rows in the output, over all heads and batch entries, including rows past the end of sequences.
pub(crate) fn rows(spec: &AttentionSpec) -> usize {
    spec.o.dims[..3].iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX)).fold(1, usize::saturating_mul)
}

/// Returns the element type of a tensor.
fn of(dtype: DType) -> Element {
    Element::of(dtype).unwrap_or(Element::F32)
}

/// Returns random numbers; those of 8 bits are scaled to use the full range of the type.
fn random_numbers(element: Element, len: usize, seed: u64, which: u64) -> Result<Data, String> {
    let narrows = element.dtype().is_fp8();
    let mut data = Data::zeros(if narrows { Element::F32 } else { element }, len)?;
    random::fill(&mut data, seed, which);
    if narrows { scales::narrow(element, &data, None) } else { Ok(data) }
}

/// Returns the number of elements in stats, or in any other row statistic.
fn stats(spec: &AttentionSpec) -> usize {
    let [_, heads, ..] = spec.o.dims;
    let one = TensorSpec { dims: [spec.o.dims[0], heads, spec.o.dims[2], 1], strides: [0, 1, heads, 1], ..spec.o };
    if spec.packed.is_some() { elements(spec, &one, Side::Queries) } else { rows(spec) }
}

/// Returns the number of elements in each gradient of a parameter.
fn wrt_elements(problem: &BackwardProblem) -> Vec<(String, Element, usize)> {
    let one = |g: &sdpa::GradientSpec| {
        let len = usize::try_from(problem.gradient_elements(&g.name)).unwrap_or(usize::MAX);
        (g.name.clone(), Element::of(g.dtype).unwrap_or(Element::F32), len)
    };
    problem.wrt().iter().map(one).collect()
}

/// Returns the number of bytes that the operands and results of a problem need in host memory; with `check`, those of the oracle too.
pub(crate) fn bytes(spec: &AttentionSpec, element: Element, params: &[Planned], backward: Option<&Backward>, check: bool) -> u128 {
    let of = |tensors: &[(TensorSpec, Side)]| {
        tensors.iter().map(|(t, side)| elements(spec, t, *side) as u128 * element.bytes() as u128).sum::<u128>()
    };
    let statistics = [spec.stats, spec.row_max, spec.sum_exp].into_iter().filter(|asked| *asked).count();
    let statistics = (statistics * stats(spec)) as u128 * size_of::<f32>() as u128;
    let gradients = backward.map_or(0, |b| {
        let wrt: u128 = wrt_elements(&b.problem).iter().map(|(_, element, len)| *len as u128 * element.bytes() as u128).sum();
        of(&[(b.spec.d_o, Side::Queries), (b.spec.dq, Side::Queries), (b.spec.dk, Side::Keys), (b.spec.dv, Side::Keys)])
            + wrt
            + if check { oracle::gradient_bytes(&b.problem, spec) } else { 0 }
    });
    let params: u128 = params.iter().map(Planned::bytes).sum();
    of(&[(spec.q, Side::Queries), (spec.k, Side::Keys), (spec.v, Side::Keys), (spec.o, Side::Queries)])
        + statistics
        + params
        + gradients
        + if check { oracle::bytes(spec) } else { 0 }
}

/// Reads tensors, and collects notes for the user.
struct Reader<'a> {
    header: &'a Header,
    scales: &'a Scales,
    notes: Vec<String>,
}

impl Reader<'_> {
    fn read(
        &mut self,
        (name, operand): (&str, Operand),
        element: Element,
        len: usize,
        entry: &Entry,
        done: impl Fn(u64),
    ) -> Result<Data, Failure> {
        let failed = |e: String| Failure::environment(self.header.path.display(), e);
        let narrows = element.dtype().is_fp8() && entry.ty.narrow().is_none();
        let read = if narrows { Element::F32 } else { element };
        let (mut data, overflows) = self.header.load(entry, read, len, done).map_err(failed)?;
        if overflows > 0 {
            self.notes.push(format!("{name}: {overflows} finite numbers are infinite in {}", read.dtype()));
        }
        if narrows {
            return scales::narrow(element, &data, self.scales.given(operand)).map_err(failed);
        }
        data.set_descale(self.scales.given(operand).unwrap_or(1.0));
        Ok(data)
    }
}

impl Gradients {
    fn new(backward: &Backward, d_o: Data) -> Result<Gradients, String> {
        let forward = &backward.spec.forward;
        let zeros = |t: &TensorSpec, side| Data::zeros(of(backward.problem.dtype_of(Operand::DQ)), elements(forward, t, side));
        let wrt = wrt_elements(&backward.problem).into_iter().map(|(name, element, len)| Ok((name, Data::zeros(element, len)?)));
        let wrt = wrt.collect::<Result<_, String>>()?;
        Ok(Gradients {
            d_o,
            dq: zeros(&backward.spec.dq, Side::Queries)?,
            dk: zeros(&backward.spec.dk, Side::Keys)?,
            dv: zeros(&backward.spec.dv, Side::Keys)?,
            wrt,
        })
    }
}

impl Operands {
    /// Returns random operands for a small problem without parameters and gradients.
    pub(crate) fn random(spec: &AttentionSpec, element: Element, seed: u64) -> Result<Operands, String> {
        let make = |which: u64, tensor: &TensorSpec, side| random_numbers(element, elements(spec, tensor, side), seed, which);
        Operands::with([make(0, &spec.q, Side::Queries)?, make(1, &spec.k, Side::Keys)?, make(2, &spec.v, Side::Keys)?], spec, Vec::new())
    }

    fn with([q, k, v]: [Data; 3], spec: &AttentionSpec, notes: Vec<String>) -> Result<Operands, String> {
        let o = Data::zeros(of(spec.o_dtype.unwrap_or(spec.dtype)), elements(spec, &spec.o, Side::Queries))?;
        let statistic = |asked: bool| match asked.then(|| Data::zeros(Element::F32, stats(spec))).transpose()? {
            Some(Data::F32(numbers)) => Ok::<_, String>(Some(numbers)),
            Some(Data::F16(_) | Data::BF16(_) | Data::F8E4M3(..) | Data::F8E5M2(..)) | None => Ok(None),
        };
        let (stats, row_max, sum_exp) = (statistic(spec.stats)?, statistic(spec.row_max)?, statistic(spec.sum_exp)?);
        Ok(Operands { q, k, v, o, stats, row_max, sum_exp, params: Vec::new(), gradients: None, scales: Scales::default(), notes })
    }

    /// Reads or creates the operands of a request.
    pub(crate) fn load(request: &Request, seed: u64, progress: Progress) -> Result<Operands, Failure> {
        let Request { spec, element, backward, .. } = request;
        let scales = Scales::read(request, seed)?;
        let memory = |e: String| Failure::environment("memory", e);
        let mut operands = match &request.source {
            Source::Random => {
                let _step = progress.spinner("making random numbers");
                let drawn = if spec.block_scaled { Element::F32 } else { *element };
                let mut operands = Operands::random(spec, drawn, seed).map_err(memory)?;
                if let Some(backward) = backward {
                    let len = elements(spec, &backward.spec.d_o, Side::Queries);
                    let d_o = random_numbers(of(backward.problem.dtype_of(Operand::DO)), len, seed, 3).map_err(memory)?;
                    operands.gradients = Some(Gradients::new(backward, d_o).map_err(memory)?);
                }
                operands
            }
            Source::File(header, entries, gradient) => {
                let len = |tensor: &TensorSpec, side| elements(spec, tensor, side);
                let tensors = [("q", len(&spec.q, Side::Queries)), ("k", len(&spec.k, Side::Keys)), ("v", len(&spec.v, Side::Keys))];
                let total = tensors.iter().zip(entries.iter()).map(|((_, len), entry)| (len * entry.ty.bytes()) as u64).sum();
                let step = progress.bar("reading", total);
                let mut reader = Reader { header, scales: &scales, notes: Vec::new() };
                let named = [Operand::Q, Operand::K, Operand::V];
                // If operands are block-scaled and not stored in 8 bits, read them as f32: they are rounded to 8 bits later, with their
                // block scales.
                let wide = |entry: &Entry| spec.block_scaled && entry.ty.narrow().is_none();
                let read_as = |n: usize| if wide(&entries[n]) { Element::F32 } else { *element };
                let mut read = |n: usize| reader.read((tensors[n].0, named[n]), read_as(n), tensors[n].1, &entries[n], |n| step.advance(n));
                let qkv = [read(0)?, read(1)?, read(2)?];
                let mut operands = Operands::with(qkv, spec, Vec::new()).map_err(memory)?;
                if let Some((backward, from)) = backward.as_ref().zip(gradient.as_ref()) {
                    let upstream = of(backward.problem.dtype_of(Operand::DO));
                    let d_o = reader.read(("do", Operand::DO), upstream, len(&backward.spec.d_o, Side::Queries), &from.d_o, |_| ())?;
                    operands.gradients = Some(Gradients::new(backward, d_o).map_err(memory)?);
                    if let Some((o, ty, stats)) = &from.forward {
                        let element = of(request.problem.dtype_of(Operand::O));
                        operands.o = reader.read(("o", Operand::O), element, len(&spec.o, Side::Queries), o, |_| ())?;
                        let read = header.load_at(*stats, *ty, Element::F32, self::stats(spec), |_| ());
                        if let (Data::F32(read), overflows) = read.map_err(|e| Failure::environment(header.path.display(), e))? {
                            if overflows > 0 {
                                reader.notes.push(format!("stats: {overflows} finite numbers are infinite in f32"));
                            }
                            operands.stats = Some(read);
                        }
                    }
                }
                operands.notes = reader.notes;
                operands
            }
        };
        operands.load_params(request, seed)?;
        operands.begin(request, scales);
        operands.narrow_blocks(request, seed)?;
        operands.judge_pages(request)?;
        Ok(operands)
    }

    /// Rounds block-scaled operands to 8 bits.
    fn narrow_blocks(&mut self, request: &Request, seed: u64) -> Result<(), Failure> {
        if !request.problem.block_scaled() {
            return Ok(());
        }
        let mut blocks = Blocks::read(request, seed)?;
        for (operand, data) in [(Operand::Q, &mut self.q), (Operand::K, &mut self.k), (Operand::V, &mut self.v)] {
            let wide = std::mem::replace(data, Data::F32(Vec::new()));
            *data = blocks.narrow(request, operand, request.element, wide).map_err(|e| Failure::environment("memory", e))?;
        }
        blocks.bind(&mut self.params);
        Ok(())
    }

    /// Sets the scales of the first run.
    fn begin(&mut self, request: &Request, scales: Scales) {
        if !request.problem.dtype().is_fp8() || request.problem.block_scaled() {
            return;
        }
        self.scales = scales;
        let given = request.backward.as_ref().is_some_and(|b| b.given).then_some(&self.o);
        self.scales.begin(request, [&self.q, &self.k, &self.v], self.gradients.as_ref().map(|gradients| (&gradients.d_o, given)));
        self.rescale(request);
    }

    /// Computes new scales of 8-bit floats from the amax values (largest magnitudes) that a run reported.
    pub(crate) fn learn(&mut self, request: &Request) {
        self.scales.learn(request);
        self.rescale(request);
    }

    /// Stores scales in the parameters of calls, and sets the descales of results.
    fn rescale(&mut self, request: &Request) {
        self.scales.bind(&mut self.params);
        let one = |scale: Fp8Scale| self.scales.get(scale).recip();
        if !request.backward.as_ref().is_some_and(|b| b.given) {
            self.o.set_descale(one(Fp8Scale::ScaleO));
        }
        if let Some(gradients) = &mut self.gradients {
            gradients.dq.set_descale(one(Fp8Scale::ScaleDQ));
            gradients.dk.set_descale(one(Fp8Scale::ScaleDK));
            gradients.dv.set_descale(one(Fp8Scale::ScaleDV));
        }
    }

    /// Checks that existing keys have pages within the page pools, now that lengths are known.
    fn judge_pages(&self, request: &Request) -> Result<(), Failure> {
        let Some(paging) = &request.paging else { return Ok(()) };
        let params: Vec<Param<'_>> = self.params.iter().map(Bound::param).collect();
        let wrong = |errors: sdpa::SpecErrors| errors.0.iter().map(|e| Line::new(paging.about(), e)).collect();
        request.problem.pages(&params).map(|_| ()).map_err(|errors| Failure::Mistakes(wrong(errors)))
    }

    fn load_params(&mut self, request: &Request, seed: u64) -> Result<(), Failure> {
        let about = || request.header().map_or_else(|| "memory".to_owned(), |h| h.path.display().to_string());
        let (mut params, mut wrong) = (Vec::new(), Vec::new());
        for planned in &request.params {
            match planned.load(request.header(), seed) {
                Ok((bound, overflows)) => {
                    let element = if let crate::params::Values::Float(data) = &bound.values { data.element() } else { Element::F32 };
                    if overflows > 0 {
                        self.notes.push(format!("{}: {overflows} finite numbers are infinite in {}", bound.name, element.dtype()));
                    }
                    params.push(bound);
                }
                Err(e) => wrong.push(Line::new(about(), e)),
            }
        }
        self.params = params;
        match (wrong.is_empty(), request.header()) {
            (true, _) => Ok(()),
            (false, Some(_)) => Err(Failure::Mistakes(wrong)),
            (false, None) => Err(Failure::Environment(wrong)),
        }
    }

    /// Returns the offset of a row of a batch entry and head; `None` for a key without a page.
    fn place(&self, request: &Request, tensor: &TensorSpec, side: Side, [b, h, s]: [i64; 3]) -> Option<i64> {
        let boundaries = request.packing.as_ref().and_then(|packing| packing.of(side));
        let entry = match (boundaries, request.spec.paged.filter(|_| side == Side::Keys)) {
            (Some(all), _) => i64::from(all[b as usize]) * tensor.strides[2] + s * tensor.strides[2],
            (None, Some(paged)) => {
                let table = self.params.iter().find(|bound| bound.name == PAGE_TABLE)?;
                let page = table.at([b, 0, 0, s / paged.page_size]) as i64;
                (0..paged.pages).contains(&page).then(|| page * tensor.strides[0] + s % paged.page_size * tensor.strides[2])?
            }
            (None, None) => b * tensor.strides[0] + s * tensor.strides[2],
        };
        Some(entry + h * tensor.strides[1])
    }

    /// Returns the scaled score of one query and key of a batch entry and head.
    pub(crate) fn score(&self, request: &Request, [b, h]: [i64; 2], [q, k]: [usize; 2]) -> f64 {
        let p = &request.problem;
        let dim = usize::try_from(p.dim_qk()).unwrap_or(0);
        let row = |data: &Data, tensor: &TensorSpec, side: Side, h: i64, s: usize| {
            let mut row = vec![0f64; dim];
            if let Some(at) = self.place(request, tensor, side, [b, h, s as i64]) {
                data.row(usize::try_from(at).unwrap_or(0), &mut row);
            }
            row
        };
        let (query, key) =
            (row(&self.q, &request.spec.q, Side::Queries, h, q), row(&self.k, &request.spec.k, Side::Keys, h / p.group(), k));
        query.iter().zip(&key).map(|(x, y)| x * y).sum::<f64>() * f64::from(request.attn_scale())
    }

    /// Runs the forward pass of a request over these operands.
    pub(crate) fn forward(&mut self, prepared: &dyn Prepared, problem: &sdpa::Problem, attn_scale: f32) -> Result<Report, Error> {
        let names: Vec<&str> = problem.params().iter().map(|d| d.name.as_str()).collect();
        let params: Vec<Param<'_>> = self.params.iter().filter(|p| names.contains(&p.name.as_str())).map(Bound::param).collect();
        prepared.forward(
            HostForward::new(self.q.elements(), self.k.elements(), self.v.elements(), self.o.elements_mut())
                .statistics([self.stats.as_deref_mut(), self.row_max.as_deref_mut(), self.sum_exp.as_deref_mut()])
                .attn_scale(attn_scale)
                .params(&params)
                .amax(self.scales.room(problem, Direction::Forward)),
        )
    }

    /// Runs the backward pass of a request over these operands; returns `None` without memory for gradients.
    pub(crate) fn backward(
        &mut self,
        prepared: &dyn PreparedBackward,
        problem: &BackwardProblem,
        attn_scale: f32,
    ) -> Option<Result<Report, Error>> {
        let declared = |bound: &&Bound| problem.params().iter().any(|p| p.name == bound.name);
        let params: Vec<Param<'_>> = self.params.iter().filter(declared).map(Bound::param).collect();
        let Gradients { d_o, dq, dk, dv, wrt } = self.gradients.as_mut()?;
        Some(
            prepared.backward(
                HostBackward::new(
                    (self.q.elements(), self.k.elements(), self.v.elements()),
                    (self.o.elements(), self.stats.as_deref()?),
                    d_o.elements(),
                    (dq.elements_mut(), dk.elements_mut(), dv.elements_mut()),
                )
                .attn_scale(attn_scale)
                .params(&params)
                .gradients(wrt.iter_mut().map(|(name, data)| HostGradient::new(name, data.elements_mut())))
                .amax(self.scales.room(problem.forward(), Direction::Backward)),
            ),
        )
    }

    /// Returns the scales and types of 8-bit floats for the oracle.
    fn narrow(&self) -> Option<sdpa_oracle::Narrow> {
        let of = |data: Option<&Data>| data.unwrap_or(&self.q).element();
        let gradients = self.gradients.as_ref();
        let narrow = || self.scales.told_to_oracle(of(gradients.map(|g| &g.d_o)), of(gradients.map(|g| &g.dq)));
        self.q.element().dtype().is_fp8().then(narrow)
    }

    /// Returns the inputs of the oracle.
    fn call<'a>(&'a self, spec: &'a AttentionSpec, problem: &'a sdpa::Problem, attn_scale: f32) -> oracle::Call<'a> {
        oracle::Call {
            spec,
            problem,
            params: &self.params,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            o: &self.o,
            stats: self.stats.as_deref(),
            row_max: self.row_max.as_deref(),
            sum_exp: self.sum_exp.as_deref(),
            scale: f64::from(attn_scale),
            narrow: self.narrow(),
            amax_s: self.scales.reported(Amax::S),
        }
    }

    /// Compares the results of the forward pass with the oracle's.
    pub(crate) fn check(&self, spec: &AttentionSpec, problem: &sdpa::Problem, attn_scale: f32, step: &Step) -> Distance {
        oracle::check(&self.call(spec, problem, attn_scale), &|rows| step.advance(rows))
    }

    /// Compares the gradients with the oracle's. It takes into account whether the executor computed `o` and stats in this run.
    pub(crate) fn check_backward(&self, backward: &Backward, attn_scale: f32, step: &Step) -> Option<GradientDistance> {
        let spec = &backward.spec.forward;
        let Gradients { d_o, dq, dk, dv, wrt } = self.gradients.as_ref()?;
        let call = oracle::BackwardCall {
            forward: self.call(spec, backward.problem.forward(), attn_scale),
            problem: &backward.problem,
            spec: &backward.spec,
            d_o,
            got: [dq, dk, dv],
            wrt,
            amax_dp: self.scales.reported(Amax::DP),
            chained: !backward.given,
        };
        Some(oracle::check_gradients(&call, &|rows| step.advance(rows)))
    }
}

/// Checks that a problem fits into memory, before anything is allocated. `workspace` is the executor's scratch memory in bytes.
pub(crate) fn fits(request: &Request, check: bool, workspace: u64) -> Result<(), String> {
    let need = bytes(&request.spec, request.element, &request.params, request.backward.as_ref(), check) + u128::from(workspace);
    memory::check(need, memory::available())
}
