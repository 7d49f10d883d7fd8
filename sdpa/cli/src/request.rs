//! What was asked for: every option and the header of the input, read in one place, so that all mistakes are told at once.

use crate::args::{PlaceArgs, ProblemArgs};
use crate::convert::FileType;
use crate::data::Element;
use crate::exit::Mistakes;
use crate::header::{Entry, Header};
use crate::names;
use cudnn_graph::Search;
use sdpa::exec::cudnn::CudnnOptions;
use sdpa::{AttentionSpec, DType, Layout, Mask, Problem, Shape, SpecError, TensorSpec};

/// The problem of `run` and `inspect`.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) source: Source,
    pub(crate) element: Element,
    pub(crate) layout: Layout,
    pub(crate) scale: Option<f32>,
    pub(crate) spec: AttentionSpec,
    pub(crate) problem: Problem,
}

/// Where the operands come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A file, and its q, k and v.
    File(Box<Header>, [Entry; 3]),
    /// Random numbers.
    Random,
}

/// What is computed when nothing is said.
const EXAMPLE: Shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 256, seq_kv: 256, dim_qk: 64, dim_v: 64 };

/// A shape that breaks no rule, to judge masks by.
const ANY: Shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 8, seq_kv: 8, dim_qk: 8, dim_v: 8 };

impl PlaceArgs {
    /// How cuDNN is set up.
    pub(crate) fn options(&self) -> CudnnOptions {
        let search = Search { library: self.cudnn.clone(), driver: self.driver.clone() };
        CudnnOptions { search, ..CudnnOptions::default() }
    }
}

impl Request {
    /// Reads the options of a problem. `stats`: whether they are computed without being asked for.
    pub(crate) fn read(args: &ProblemArgs, stats: bool, mistakes: &mut Mistakes) -> Option<Request> {
        let layout = mistakes.take("--layout", args.layout.as_deref().map_or(Ok(Layout::Bhsd), names::layout));
        let wanted = args.dtype.as_deref().map(|text| mistakes.take("--dtype", names::element(text)));
        let masks = masks(&args.mask, mistakes);
        let scale = args.scale.as_deref().map(|text| mistakes.take("--scale", names::scale(text)));
        let shape =
            args.shape.as_deref().map(|text| names::shape(text).map_err(|e| e.into_iter().for_each(|e| mistakes.add("--shape", e))));
        if args.input.is_some() && args.shape.is_some() {
            mistakes.add("--shape", "the shape is that of the --input: give one of the two");
        }
        let header = args.input.as_deref().and_then(|path| mistakes.take(path.display(), Header::read(path)));
        let entries = header.as_ref().map(|header| header.entries(layout, mistakes));
        let element = match (wanted, &header) {
            (Some(wanted), _) => wanted,
            (None, Some(header)) => mistakes.take(header.path.display(), common(&header.types())).flatten(),
            (None, None) => Some(Element::BF16),
        };

        let (about, dims) = match (&header, &entries, shape) {
            // Extents of axes in an order that is not known say nothing.
            (Some(header), Some(entries), _) => {
                let dims = |entry: &Option<Entry>| entry.as_ref().zip(layout).map(|(entry, layout)| entry.dims(layout));
                (header.path.display().to_string(), [dims(&entries[0]), dims(&entries[1]), dims(&entries[2])])
            }
            (_, _, Some(Err(()))) => return None,
            (_, _, Some(Ok(shape))) => ("--shape".to_owned(), extents(shape).map(Some)),
            (_, _, None) if args.input.is_some() => return None,
            (_, _, None) => ("the example".to_owned(), extents(EXAMPLE).map(Some)),
        };
        let stats = stats || args.stats;
        let dtype = element.unwrap_or(Element::F32).dtype();
        let spec = specification(dims, dtype, layout.unwrap_or(Layout::Bhsd), masks.clone().unwrap_or_default(), stats)?;
        let problem = match spec.validate() {
            Ok(problem) => Some(problem),
            Err(errors) => {
                relevant(errors.0, dims).iter().for_each(|e| mistakes.add(&about, e));
                None
            }
        };
        let source = match (header, entries) {
            (Some(header), Some([q, k, v])) => Source::File(Box::new(header), [q?, k?, v?]),
            (Some(_), None) | (None, _) => Source::Random,
        };
        // What is `None` here has been told.
        masks?;
        Some(Request {
            source,
            element: element?,
            layout: layout?,
            scale: scale.map_or(Some(None), |s| s.map(Some))?,
            spec,
            problem: problem?,
        })
    }

    /// The extents.
    pub(crate) fn shape(&self) -> Shape {
        let p = &self.problem;
        Shape {
            batch: p.batch(),
            heads_q: p.heads_q(),
            heads_kv: p.heads_kv(),
            seq_q: p.seq_q(),
            seq_kv: p.seq_kv(),
            dim_qk: p.dim_qk(),
            dim_v: p.dim_v(),
        }
    }

    /// The scale that is used.
    pub(crate) fn attn_scale(&self) -> f32 {
        self.scale.unwrap_or(self.problem.default_scale())
    }

    /// Masks, as they are written.
    pub(crate) fn masks(&self) -> Vec<String> {
        self.spec.masks.iter().map(Mask::to_string).collect()
    }
}

/// Extents of q, k and v.
fn extents(s: Shape) -> [[i64; 4]; 3] {
    [[s.batch, s.heads_q, s.seq_q, s.dim_qk], [s.batch, s.heads_kv, s.seq_kv, s.dim_qk], [s.batch, s.heads_kv, s.seq_kv, s.dim_v]]
}

/// Every mask, or `None` once one of them is wrong.
fn masks(texts: &[String], mistakes: &mut Mistakes) -> Option<Vec<Mask>> {
    let read: Vec<Option<Vec<Mask>>> = texts
        .iter()
        .map(|text| {
            let Some(mask) = mistakes.take("--mask", names::mask(text))? else { return Some(Vec::new()) };
            let alone = AttentionSpec::dense(DType::F32, ANY, Layout::Bhsd).mask(mask.clone()).validate();
            let Err(errors) = alone else { return Some(vec![mask]) };
            for error in errors.0 {
                let field = error.field.trim_start_matches("masks[0].");
                mistakes.add("--mask", format!("{text:?}: {field} is {}: {}", error.value, error.rule));
            }
            None
        })
        .collect();
    Some(read.into_iter().collect::<Option<Vec<_>>>()?.concat())
}

/// The element type that q, k and v have in common; `None` where that is not known because of another mistake.
fn common(types: &[(&str, FileType)]) -> Result<Option<Element>, String> {
    let said = || types.iter().map(|(name, ty)| format!("{name} is {}", ty.name())).collect::<Vec<_>>().join(", ");
    let Some(&(_, first)) = types.first() else { return Ok(None) };
    if types.iter().any(|&(_, ty)| ty != first) {
        return Err(format!("{}: say with --dtype what to convert them to", said()));
    }
    match first {
        FileType::F16 => Ok(Some(Element::F16)),
        FileType::BF16 => Ok(Some(Element::BF16)),
        FileType::F32 => Ok(Some(Element::F32)),
        FileType::F64 => Err(format!("{}: say with --dtype what to convert them to, f32, f16 or bf16", said())),
    }
}

/// The specification; extents that are not known are such that they contradict nothing. `None` where none is known.
fn specification(dims: [Option<[i64; 4]>; 3], dtype: DType, layout: Layout, masks: Vec<Mask>, stats: bool) -> Option<AttentionSpec> {
    let [q, k, v] = dims;
    let any = q.or(k).or(v)?;
    let v_or = |fallback: [i64; 4]| v.unwrap_or(fallback);
    let dim_qk = q.or(k).map_or(1, |t| t[3]);
    let k = k.unwrap_or_else(|| {
        let like = v_or([any[0], any[1], 1, 1]);
        [like[0], like[1], like[2], dim_qk]
    });
    let q = q.unwrap_or([k[0], k[1], 1, dim_qk]);
    let v = v.unwrap_or(k);
    let o = [q[0], q[1], q[2], v[3]];
    let [q, k, v, o] = [q, k, v, o].map(|dims| TensorSpec::dense(dims, layout));
    Some(AttentionSpec { dtype, q, k, v, o, score_mods: Vec::new(), masks, stats })
}

/// Errors without those about tensors that were filled in, and about `o` where they only repeat others.
fn relevant(errors: Vec<SpecError>, dims: [Option<[i64; 4]>; 3]) -> Vec<SpecError> {
    let about = |error: &SpecError, name: &str| error.field.starts_with(&format!("{name}."));
    let given = |error: &SpecError| !["q", "k", "v"].into_iter().zip(dims).any(|(name, dims)| dims.is_none() && about(error, name));
    let (of_o, others): (Vec<_>, Vec<_>) = errors.into_iter().filter(given).partition(|error| about(error, "o"));
    if others.is_empty() && dims.iter().all(Option::is_some) { of_o } else { others }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(dims: [Option<[i64; 4]>; 3]) -> Vec<String> {
        let spec = specification(dims, DType::F32, Layout::Bhsd, Vec::new(), false).unwrap();
        let errors = spec.validate().err().map_or(Vec::new(), |e| e.0);
        relevant(errors, dims).into_iter().map(|e| e.field).collect()
    }

    #[test]
    fn what_is_missing_hides_no_mistake_and_makes_none() {
        let (q, k, v) = ([2, 4, 9, 8], [2, 2, 11, 8], [2, 2, 11, 16]);
        for missing in 0..8u8 {
            let dims = [(q, 1), (k, 2), (v, 4)].map(|(t, bit)| (missing & bit == 0).then_some(t));
            if missing < 7 {
                assert_eq!(fields(dims), Vec::<String>::new(), "{missing}");
            }
        }
        assert_eq!(fields([Some([3, 4, 9, 8]), None, Some(v)]), ["v.dims[0] (batch)"]);
        assert_eq!(fields([None, Some(k), Some([2, 3, 11, 16])]), ["v.dims[1] (heads_kv)"]);
        assert_eq!(fields([Some([2, 3, 9, 8]), Some(k), None]), ["q.dims[1] (heads_q)"]);
        assert_eq!(fields([Some([2, 4, 0, 8]), Some(k), Some(v)]), ["q.dims[2] (seq)"]);
    }
}
