//! The operands of one problem: made or read, computed with, checked.

use crate::data::{Data, Element};
use crate::exit::Failure;
use crate::memory;
use crate::oracle;
use crate::progress::Progress;
use crate::random;
use crate::request::{Request, Source};
use crate::tolerance::Distance;
use sdpa::{AttentionSpec, Error, HostForward, Prepared, Report, TensorSpec};

/// q, k, v and room for the results.
#[derive(Debug)]
pub(crate) struct Operands {
    q: Data,
    k: Data,
    v: Data,
    pub(crate) o: Data,
    pub(crate) stats: Option<Vec<f32>>,
    /// What the user should know of the input.
    pub(crate) notes: Vec<String>,
}

fn elements(tensor: &TensorSpec) -> usize {
    tensor.extent().and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX)
}

/// Rows of stats.
fn rows(spec: &AttentionSpec) -> usize {
    spec.o.dims[..3].iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX)).fold(1, usize::saturating_mul)
}

/// Bytes that a problem takes in host memory.
pub(crate) fn bytes(spec: &AttentionSpec, element: Element, check: bool) -> u128 {
    let operands: u128 = [spec.q, spec.k, spec.v, spec.o].iter().map(|t| elements(t) as u128 * element.bytes() as u128).sum();
    let stats = if spec.stats { rows(spec) as u128 * size_of::<f32>() as u128 } else { 0 };
    operands + stats + if check { oracle::bytes(spec) } else { 0 }
}

impl Operands {
    /// Random numbers, for problems that are known to be small.
    pub(crate) fn random(spec: &AttentionSpec, element: Element, seed: u64) -> Result<Operands, String> {
        let mut made = Vec::new();
        for (which, tensor) in (0u64..).zip([&spec.q, &spec.k, &spec.v]) {
            let mut data = Data::zeros(element, elements(tensor))?;
            random::fill(&mut data, seed, which);
            made.push(data);
        }
        Operands::with(made, spec, element, Vec::new())
    }

    fn with(inputs: Vec<Data>, spec: &AttentionSpec, element: Element, notes: Vec<String>) -> Result<Operands, String> {
        let [q, k, v] = <[Data; 3]>::try_from(inputs).map_err(|_| "three operands are needed".to_owned())?;
        let o = Data::zeros(element, elements(&spec.o))?;
        let stats = match spec.stats.then(|| Data::zeros(Element::F32, rows(spec))).transpose()? {
            Some(Data::F32(stats)) => Some(stats),
            Some(Data::F16(_) | Data::BF16(_)) | None => None,
        };
        Ok(Operands { q, k, v, o, stats, notes })
    }

    /// Reads or makes what a request names.
    pub(crate) fn load(request: &Request, seed: u64, progress: Progress) -> Result<Operands, Failure> {
        let Request { spec, element, .. } = request;
        let (header, entries) = match &request.source {
            Source::Random => {
                let _step = progress.spinner("making random numbers");
                return Operands::random(spec, *element, seed).map_err(|e| Failure::environment("memory", e));
            }
            Source::File(header, entries) => (header, entries),
        };
        let tensors = [("q", &spec.q), ("k", &spec.k), ("v", &spec.v)];
        let total = tensors.iter().zip(entries).map(|((_, tensor), entry)| (elements(tensor) * entry.ty.bytes()) as u64).sum();
        let step = progress.bar("reading", total);
        let (mut inputs, mut notes) = (Vec::new(), Vec::new());
        let failed = |e: String| Failure::environment(header.path.display(), e);
        for ((name, tensor), entry) in tensors.into_iter().zip(entries) {
            let (data, overflows) = header.load(entry, *element, elements(tensor), |n| step.advance(n)).map_err(failed)?;
            if overflows > 0 {
                notes.push(format!("{name}: {overflows} finite numbers are infinite in {}", element.dtype()));
            }
            inputs.push(data);
        }
        Operands::with(inputs, spec, *element, notes).map_err(|e| Failure::environment("memory", e))
    }

    /// Computes.
    pub(crate) fn forward(&mut self, prepared: &dyn Prepared, attn_scale: f32) -> Result<Report, Error> {
        prepared.forward(HostForward {
            q: self.q.elements(),
            k: self.k.elements(),
            v: self.v.elements(),
            o: self.o.elements_mut(),
            stats: self.stats.as_deref_mut(),
            attn_scale: Some(attn_scale),
            params: &[],
        })
    }

    /// Compares what was computed with the oracle.
    pub(crate) fn check(&self, spec: &AttentionSpec, attn_scale: f32, progress: Progress) -> Distance {
        let step = progress.bar("checking", rows(spec) as u64);
        let call = oracle::Call {
            spec,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            o: &self.o,
            stats: self.stats.as_deref(),
            scale: f64::from(attn_scale),
        };
        oracle::check(&call, &|rows| step.advance(rows))
    }
}

/// Whether a problem fits into memory, before any is taken.
pub(crate) fn fits(request: &Request, check: bool) -> Result<(), String> {
    memory::check(bytes(&request.spec, request.element, check), memory::available())
}
