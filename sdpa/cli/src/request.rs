//! The request: all options and the header of the input, parsed together, so that all mistakes are reported at once.

mod dropping;
mod extents;
mod packing;
mod paging;
mod rules;

use crate::args::{BackwardArgs, PlaceArgs, ProblemArgs};
use crate::blocks;
use crate::convert::FileType;
use crate::data::Element;
use crate::exit::Mistakes;
use crate::expression;
use crate::file;
use crate::header::{Entry, Header};
use crate::names;
use crate::params::{Planned, Sources};
use cudnn_graph::Search;
pub(crate) use dropping::Dropping;
use extents::{extents, relevant, specification};
pub(crate) use packing::{Packing, elements};
pub(crate) use paging::{Paging, Source as TableSource};
use rules::{Rules, judge, valid};
use sdpa::cuda::{Exception, Family, cudnn_first, cudnn_first_backward};
use sdpa::cudnn::CudnnOptions;
use sdpa::cudnn::lower::Job;
use sdpa::expr::Declared;
use sdpa::library::T5;
use sdpa::{AttentionSpec, BackwardProblem, BackwardSpec, DType, Layout, Mask, Problem, ScoreMod, Shape, Side, StatsBase};

/// The problem of `run`, `inspect` or `show`, parsed from the options and the header of the input.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) source: Source,
    pub(crate) element: Element,
    pub(crate) layout: Layout,
    pub(crate) scale: Option<f32>,
    pub(crate) spec: AttentionSpec,
    pub(crate) problem: Problem,
    /// The packed sequences; `None` if batch entries are not packed.
    pub(crate) packing: Option<Packing>,
    /// The paged KV cache; `None` if keys are not paged.
    pub(crate) paging: Option<Paging>,
    /// Values of declared parameters: first those of the forward problem, then those that only gradients declare.
    pub(crate) params: Vec<Planned>,
    pub(crate) backward: Option<Backward>,
}

/// The backward pass of a request.
#[derive(Debug)]
pub(crate) struct Backward {
    pub(crate) spec: BackwardSpec,
    pub(crate) problem: BackwardProblem,
    /// Whether the input file has `o` and stats, so that the forward pass need not run.
    pub(crate) given: bool,
}

/// The source of the operands.
#[derive(Debug)]
pub(crate) enum Source {
    /// A file, its q, k and v, and its tensors for a backward pass.
    File(Box<Header>, Box<[Entry; 3]>, Option<Box<BackwardEntries>>),
    /// Random numbers from a seed.
    Random,
}

/// The tensors of an input file that only a backward pass reads.
#[derive(Debug)]
pub(crate) struct BackwardEntries {
    pub(crate) d_o: Entry,
    /// The tensor `o`, and the type and file offset of stats; `None` if the file does not have them.
    pub(crate) forward: Option<(Entry, FileType, u64)>,
}

/// The problem of a call without shape and input.
const EXAMPLE: Shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 256, seq_kv: 256, dim_qk: 64, dim_v: 64 };

/// A shape without errors, to validate options that do not depend on extents.
const ANY: Shape = Shape { batch: 2, heads_q: 2, heads_kv: 2, seq_q: 8, seq_kv: 8, dim_qk: 8, dim_v: 8 };

impl PlaceArgs {
    /// Checks that the paths of NVIDIA's libraries are files or folders, and adds a mistake for each that is not.
    pub(crate) fn check(&self, mistakes: &mut Mistakes) {
        for (option, path) in [("--cudnn", &self.cudnn), ("--driver", &self.driver)] {
            if let Some(path) = path {
                mistakes.take(format!("{option} {}", path.display()), file::is_library(path));
            }
        }
    }

    /// Returns the options of the cuDNN executor, with these library paths.
    pub(crate) fn options(&self) -> CudnnOptions {
        let search = Search::default().with_library(self.cudnn.clone()).with_driver(self.driver.clone());
        CudnnOptions::default().with_search(search)
    }
}

/// The requirements of a command that reads a request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted<'a> {
    /// The options of the backward pass, if the command has them.
    pub(crate) gradient: Option<&'a BackwardArgs>,
    /// Whether the command computes stats without `--stats`.
    pub(crate) stats: bool,
    /// Whether the command runs the pass, so that the inputs of a backward pass must be present.
    pub(crate) computes: bool,
}

/// The valid operands of a file.
struct Operands {
    qkv: [Option<Entry>; 3],
    d_o: Option<Entry>,
    forward: Option<(Entry, FileType, u64)>,
}

impl Operands {
    /// `packed` is true for packed queries, `keys` for packed keys.
    fn find(header: &Header, layout: Option<Layout>, [packed, keys]: [bool; 2], backward: bool, mistakes: &mut Mistakes) -> Operands {
        let place = (layout, packed);
        let qkv = [("q", packed), ("k", keys), ("v", keys)].map(|(name, packed)| header.operand(name, "", (layout, packed), mistakes));
        let d_o = if backward { header.operand("do", ", which --backward reads", place, mistakes) } else { None };
        let stats = header.find("stats").and_then(|found| Some((FileType::of(found.dtype)?, found)));
        let forward = match (backward && header.find("o").is_some(), stats) {
            (true, Some((ty, stats))) => {
                let o = header.operand("o", "", place, mistakes);
                if let (Some(layout), Some(o), true) = (layout, &o, packed) {
                    let [_, heads, total, _] = o.dims(layout);
                    if stats.shape != [total, heads] {
                        let rule = format!("{:?} (total, query heads), as o has", [total, heads]);
                        mistakes.add(header.path.display(), format!("stats: got shape {:?}, expected {rule}", stats.shape));
                    }
                } else if let (Some(layout), Some(o)) = (layout, &o) {
                    let rows = &o.dims(layout)[..3];
                    if stats.shape != rows && (stats.shape.len() != 4 || stats.shape[..3] != *rows || stats.shape[3] != 1) {
                        let rule = format!("{rows:?} (batch, query heads, queries), as o has");
                        mistakes.add(header.path.display(), format!("stats: got shape {:?}, expected {rule}", stats.shape));
                    }
                }
                o.map(|o| (o, ty, stats.offset))
            }
            (true | false, _) => None,
        };
        Operands { qkv, d_o, forward }
    }

    fn dims(&self, layout: Option<Layout>) -> [Option<[i64; 4]>; 3] {
        let dims = |entry: &Option<Entry>| entry.as_ref().zip(layout).map(|(entry, layout)| entry.dims(layout));
        [dims(&self.qkv[0]), dims(&self.qkv[1]), dims(&self.qkv[2])]
    }
}

impl Request {
    /// Reads a request from the options of a problem and its input file, and adds mistakes. Returns `None` if they prevent a request.
    pub(crate) fn read(args: &ProblemArgs, wanted: &Wanted<'_>, mistakes: &mut Mistakes) -> Option<Request> {
        let gradient = wanted.gradient;
        let packed = args.cu_seqlens.is_some() || args.cu_seqlens_q.is_some() || args.cu_seqlens_kv.is_some() || args.packed.is_some();
        let packed_keys = packed && args.paged.is_none();
        let usual = if packed || args.paged.is_some() { Layout::Bshd } else { Layout::Bhsd };
        let layout = mistakes.take("--layout", args.layout.as_deref().map_or(Ok(usual), names::layout));
        if packed && layout == Some(Layout::Sbhd) {
            mistakes.add("--layout", "got sbhd, expected bshd (total, heads, dim) or bhsd (heads, total, dim) for packed sequences");
        }
        let dtype = args.dtype.as_deref().map(|text| mistakes.take("--dtype", names::element(text)));
        let mut other = |option: &str, text: Option<&str>| text.and_then(|text| mistakes.take(option, names::element(text)));
        let o_dtype = other("--o-dtype", args.o_dtype.as_deref());
        let d_o_dtype = other("--d-o-dtype", gradient.and_then(|g| g.d_o_dtype.as_deref()));
        let gradient_dtype = other("--gradient-dtype", gradient.and_then(|g| g.gradient_dtype.as_deref()));
        let scale = args.scale.as_deref().map(|text| mistakes.take("--scale", names::scale(text)));
        let dropping = Dropping::read(args, mistakes);
        let given: Vec<Option<(String, f32)>> = args
            .param
            .iter()
            .map(|text| mistakes.take("--param", names::param(text)).map(|(name, value)| (name.to_owned(), value)))
            .collect();
        let shape =
            args.shape.as_deref().map(|text| names::shape(text).map_err(|e| e.into_iter().for_each(|e| mistakes.add("--shape", e))));
        let input = args.input.is_some();
        if input && args.shape.is_some() {
            mistakes.add("--shape", "got --shape and --input, expected one of them: --input has a shape");
        }
        let header = args.input.as_deref().and_then(|path| mistakes.take(path.display(), Header::read(path)));
        let operands = header.as_ref().map(|header| {
            Operands::find(header, layout, [packed, packed_keys], wanted.computes && gradient.is_some_and(|g| g.backward), mistakes)
        });
        let packing = Packing::read(args, header.as_ref(), mistakes);
        let paging = Paging::read(args, header.as_ref(), mistakes);
        let element = match (dtype, &header) {
            (Some(dtype), _) => dtype,
            (None, Some(header)) => {
                let backward: &[&str] = match &operands {
                    Some(Operands { d_o: Some(_), forward: Some(_), .. }) => &["do", "o"],
                    Some(Operands { d_o: Some(_), .. }) => &["do"],
                    Some(_) | None => &[],
                };
                let names = [&["q", "k", "v"], backward].concat();
                mistakes.take(header.path.display(), common(&header.types(&names))).flatten()
            }
            (None, None) => Some(Element::BF16),
        };
        // If the file stores `do` as 8-bit floats, use that type.
        let d_o_dtype = d_o_dtype.or_else(|| operands.as_ref()?.d_o.as_ref()?.ty.narrow());
        if let (Some(header), Some(operands), Some(element)) = (&header, &operands, element) {
            let own = operands.forward.as_ref().map(|(o, ..)| o);
            let of = [Some(element), Some(element), Some(element), d_o_dtype.or(Some(element)), o_dtype.or(Some(element))];
            let entries = operands.qkv.iter().map(Option::as_ref).chain([operands.d_o.as_ref(), own]);
            for ((name, entry), wanted) in ["q", "k", "v", "do", "o"].into_iter().zip(entries).zip(of) {
                if let Some(entry) = entry.filter(|entry| entry.ty.narrow().is_some_and(|narrow| Some(narrow) != wanted)) {
                    mistakes.add(
                        header.path.display(),
                        format!("{name}: got type {}, expected the type of --dtype: FP8 tensors are not converted", entry.ty.name()),
                    );
                }
            }
        }
        let (about, dims) = match (&header, &operands, shape) {
            // Without a known order of axes, extents are unknown too.
            (Some(header), Some(operands), _) => (header.path.display().to_string(), operands.dims(layout)),
            (_, _, Some(Ok(shape))) if !input => ("--shape".to_owned(), extents(shape).map(Some)),
            (_, _, None) if !input => ("the example".to_owned(), extents(EXAMPLE).map(Some)),
            (_, _, _) => (String::new(), [None; 3]),
        };
        // In an input of packed sequences, the third extent is the number of tokens in memory.
        let of_keys = dims[1].or(dims[2]).filter(|_| packed_keys);
        let tokens = if packed && input { [dims[0], of_keys].map(|dims| dims.map(|dims| dims[2])) } else { [None; 2] };
        if let ([_, Some(k), Some(v)], Some(_), true) = (dims, tokens[1], packed)
            && k[2] != v[2]
        {
            mistakes.add(&about, format!("v: got {} tokens, expected {}, as k has", v[2], k[2]));
        }
        // In a paged input, the extents of k and v are those of the page pools.
        let container = if paging.is_some() && input { dims[1].or(dims[2]) } else { None };
        let dims = match (&packing, &paging) {
            (packing, Some(paging)) if input => {
                paging.judge([dims[1], dims[2]], &about, mistakes);
                let queries = |q: [i64; 4]| packing.as_ref().map_or(Some(q), |packing| packing.dims(q, Side::Queries));
                let q = dims[0].and_then(queries);
                let of_entries = |container: Option<[i64; 4]>| paging.dims(container?, q.map(|q| q[0]));
                [q, of_entries(dims[1]), of_entries(dims[2])]
            }
            (Some(packing), None) if input => {
                let sides = [Side::Queries, Side::Keys, Side::Keys];
                std::array::from_fn(|n| dims[n].and_then(|dims| packing.dims(dims, sides[n])))
            }
            (Some(_) | None, _) => dims,
        };
        let scores = dims[0].zip(dims[1].or(dims[2])).map(|(q, k)| [q[0], q[1], q[2], k[2]]);
        let rules = Rules::read(args, header.as_ref(), element, scores, mistakes);
        let dtype = element.unwrap_or(Element::F32).dtype();

        let base = if args.stats_base_2 { StatsBase::Two } else { StatsBase::Natural };
        // Check the rules that do not depend on extents with the extents `ANY`, which have no errors.
        let mut any = AttentionSpec::dense(dtype, ANY, Layout::Bhsd);
        (any.score_mods, any.masks) = (rules.score_mods.clone(), rules.masks.clone());
        (any.sink, any.dropout, any.stats_base) = (args.sink, dropping.dropout, base);
        (any.o_dtype, any.batch_invariant) = (o_dtype.map(Element::dtype), args.batch_invariant);
        if args.block_scaled {
            // The shape `ANY` has no block scales, so check the rules with f32 instead of 8-bit floats.
            (any.dtype, any.o_dtype) = (DType::F32, None);
        }
        any.paged = paging.as_ref().map(Paging::any);
        any.packed = packing.as_ref().map(|packing| packing.packed.with_totals(None, None));
        let right =
            packing.as_ref().is_none_or(|packing| packing.judge(scores.filter(|_| input || args.shape.is_some()), tokens, mistakes));
        if let (Some(paging), Some(scores)) = (&paging, scores) {
            paging.judge_rows(scores, mistakes);
        }
        let judged = judge(&any, args, gradient, rules.complete, mistakes);
        // Drop the values that could not be read, which were reported already.
        let given: Vec<(String, f32)> = given.into_iter().flatten().collect();
        let t5: Vec<T5> = args.score_mod.iter().filter_map(|text| expression::t5(text)?.ok()).collect();
        if t5.iter().any(|other| *other != t5[0]) {
            mistakes.add("--score-mod", "got two t5 score_mods with different buckets, expected one: the input has one table");
        }
        let t5 = t5.first().copied();
        let sources = Sources {
            extents: scores,
            header: header.as_ref(),
            input,
            given: &given,
            complete: rules.complete,
            t5,
            packing: packing.as_ref(),
            paging: paging.as_ref(),
            dropping,
        };
        let params = judged.as_ref().and_then(|judged| sources.plan(&judged.params, mistakes));

        let stats = wanted.stats || args.stats || args.stats_base_2 || gradient.is_some_and(|g| g.backward);
        let mut spec = specification(dims, dtype, layout.unwrap_or(Layout::Bhsd), stats)?;
        (spec.score_mods, spec.masks, spec.sink) = (rules.score_mods, rules.masks, args.sink);
        (spec.dropout, spec.o_dtype) = (dropping.dropout, o_dtype.map(Element::dtype));
        (spec.block_scaled, spec.batch_invariant) = (args.block_scaled, args.batch_invariant);
        (spec.row_max, spec.sum_exp, spec.stats_base) = (args.row_max, args.sum_exp, base);
        if let Some(packing) = &packing {
            packing.place(&mut spec, layout.unwrap_or(Layout::Bshd), tokens);
        }
        if let Some(paging) = &paging {
            paging.place(&mut spec, layout.unwrap_or(Layout::Bshd), container);
        }
        let problem = valid(spec.validate(), |errors| {
            relevant(errors.0, dims).iter().for_each(|e| mistakes.add(&about, e));
        });
        let of_blocks = problem.as_ref().map_or(&[][..], |problem| problem.params()).iter().filter(|p| blocks::named(&p.name).is_some());
        let of_blocks: Vec<Declared> = of_blocks.filter(|_| args.block_scaled).cloned().collect();
        let of_blocks = sources.found(&of_blocks, mistakes);
        let params = params.zip(of_blocks).map(|(params, more)| [params, more].concat());
        let judged = judged?;
        let backward = match (gradient.filter(|g| g.backward), &problem) {
            (Some(_), Some(_)) => {
                if let Some((header, operands)) = header.as_ref().zip(operands.as_ref()) {
                    let forward = operands.forward.as_ref().map(|(o, ..)| o);
                    let [batch, heads, seq, dim] = spec.o.dims;
                    let want = tokens[0].map_or([batch, heads, seq, dim], |tokens| [1, heads, tokens, dim]);
                    for (name, entry) in [("do", operands.d_o.as_ref()), ("o", forward)] {
                        entry.into_iter().for_each(|entry| fits(header, name, entry, want, layout, mistakes));
                    }
                }
                let mut backward = spec.backward();
                backward.wrt = judged.wrt;
                backward.deterministic = gradient.is_some_and(|g| g.deterministic);
                (backward.d_o_dtype, backward.gradient_dtype) = (d_o_dtype.map(Element::dtype), gradient_dtype.map(Element::dtype));
                let problem = valid(backward.validate(), |errors| {
                    errors.0.iter().filter(|_| judged.right).for_each(|e| mistakes.add("--backward", e));
                })?;
                Some(Backward { spec: backward, problem, given: operands.as_ref().is_some_and(|o| o.forward.is_some()) })
            }
            (Some(_) | None, _) => None,
        };
        let source = match (header, operands) {
            (Some(header), Some(Operands { qkv: [q, k, v], d_o, forward })) => {
                Source::File(Box::new(header), Box::new([q?, k?, v?]), d_o.map(|d_o| Box::new(BackwardEntries { d_o, forward })))
            }
            (Some(_), None) | (None, _) => Source::Random,
        };
        // The cause of a `None` below was reported already, so only return `None`.
        Some(Request {
            source,
            element: element?,
            layout: layout?,
            scale: scale.map_or(Some(None), |s| s.map(Some))?,
            spec,
            problem: problem.filter(|_| right)?,
            packing,
            paging,
            params: params?,
            backward,
        })
    }

    /// Returns the extents of the problem.
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

    /// Returns the factor of the scores: that of `--scale`, or the default of the problem.
    pub(crate) fn attn_scale(&self) -> f32 {
        self.scale.unwrap_or(self.problem.default_scale())
    }

    /// Returns the texts of the score_mods, as the library prints them.
    pub(crate) fn score_mods(&self) -> Vec<String> {
        self.spec.score_mods.iter().map(ScoreMod::to_string).collect()
    }

    /// Returns the texts of the masks, as the library prints them.
    pub(crate) fn masks(&self) -> Vec<String> {
        self.spec.masks.iter().map(Mask::to_string).collect()
    }

    /// Returns the requested pass, with its problem.
    pub(crate) fn job(&self) -> Job {
        self.backward.as_ref().map_or_else(|| self.problem.clone().into(), |b| b.problem.clone().into())
    }

    /// Returns the exception for which cuDNN is tried before the native Hopper kernels, if one applies to this pass.
    pub(crate) fn cudnn_first(&self) -> Option<&'static Exception> {
        let family = Family::Wgmma;
        self.backward.as_ref().map_or_else(|| cudnn_first(family, &self.problem), |b| cudnn_first_backward(family, &b.problem))
    }

    /// Returns the header of the input file, if there is one.
    pub(crate) fn header(&self) -> Option<&Header> {
        match &self.source {
            Source::File(header, ..) => Some(header),
            Source::Random => None,
        }
    }
}

/// Adds a mistake if an operand does not have the extents of the output.
fn fits(header: &Header, name: &str, entry: &Entry, want: [i64; 4], layout: Option<Layout>, mistakes: &mut Mistakes) {
    if let Some(dims) = layout.map(|layout| entry.dims(layout)).filter(|dims| *dims != want) {
        mistakes
            .add(header.path.display(), format!("{name}: got shape {dims:?}, expected {want:?} (batch, head, seq, dim), as the output"));
    }
}

/// Returns the common element type of q, k and v; `None` if another mistake prevents knowing it.
fn common(types: &[(&str, FileType)]) -> Result<Option<Element>, String> {
    let said = || types.iter().map(|(name, ty)| format!("{name} is {}", ty.name())).collect::<Vec<_>>().join(", ");
    let Some(&(_, first)) = types.first() else { return Ok(None) };
    // If q, k and v are 8-bit floats, only these three must agree: gradients and results may have other types.
    let own = |name: &str| first.narrow().is_none() || ["q", "k", "v"].contains(&name);
    if types.iter().any(|&(name, ty)| ty != first && own(name)) {
        return Err(format!("{}: say with --dtype what to convert them to", said()));
    }
    match first {
        FileType::F16 => Ok(Some(Element::F16)),
        FileType::BF16 => Ok(Some(Element::BF16)),
        FileType::F32 => Ok(Some(Element::F32)),
        FileType::F8E4M3 => Ok(Some(Element::F8E4M3)),
        FileType::F8E5M2 => Ok(Some(Element::F8E5M2)),
        FileType::F64 => Err(format!("{}: say with --dtype what to convert them to, f32, f16 or bf16", said())),
    }
}
