//! Score_mods and masks of a request, their declared parameters, and the requested gradients.

use crate::args::{BackwardArgs, ProblemArgs};
use crate::convert::FileType;
use crate::data::Element;
use crate::exit::Mistakes;
use crate::expression;
use crate::header::Header;
use sdpa::expr::{Axes, Axis, Declared, ParamKind};
use sdpa::{AttentionSpec, DType, GradientSpec, Mask, SINK, ScoreMod, SpecErrors};

/// Returns the axes that a tensor of the input spans; all of them without an input. Returns `None` if they are unknown or a mistake was added.
fn spanned(name: &str, header: Option<&Header>, input: bool, extents: Option<[i64; 4]>, mistakes: &mut Mistakes) -> Option<Axes> {
    let Some(header) = header else { return (!input).then(|| Axis::ALL.into_iter().collect()) };
    let Some(found) = header.find(name) else {
        mistakes.add(
            header.path.display(),
            header.lacks(name, &format!(", which {} reads", if name == "bias" { "--bias" } else { "--mask array" })),
        );
        return None;
    };
    let axes = expression::broadcast(&found.shape, extents?);
    axes.map_err(|rule| mistakes.add(header.path.display(), format!("{name}: {rule}"))).ok()
}

/// The valid score_mods and masks of a request.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    pub(super) score_mods: Vec<ScoreMod>,
    pub(super) masks: Vec<Mask>,
    /// True if all score_mods and masks could be parsed. One that could not may declare further parameters.
    pub(super) complete: bool,
}

impl Rules {
    pub(super) fn read(
        args: &ProblemArgs,
        header: Option<&Header>,
        element: Option<Element>,
        extents: Option<[i64; 4]>,
        mistakes: &mut Mistakes,
    ) -> Rules {
        let input = args.input.is_some();
        let bias = args.bias.then(|| {
            let axes = spanned("bias", header, input, extents, mistakes)?;
            let dtype = match header.and_then(|h| h.find("bias")) {
                // An 8-bit bias would need a scale of its own, so a bias for 8-bit operands is f32.
                None if element?.dtype().is_fp8() => DType::F32,
                None => element?.dtype(),
                Some(found) => match FileType::of(found.dtype) {
                    Some(FileType::F16) => DType::F16,
                    Some(FileType::BF16) => DType::BF16,
                    // A tensor of another type is reported with the other parameters.
                    Some(FileType::F32 | FileType::F64 | FileType::F8E4M3 | FileType::F8E5M2) | None => DType::F32,
                },
            };
            expression::bias(axes, dtype)
        });
        let (score_mods, score_mods_right) = expression::score_mods(&args.score_mod, mistakes);
        let axes =
            if args.mask.iter().any(|m| expression::uses_array(m)) { spanned("mask", header, input, extents, mistakes) } else { None };
        let (masks, masks_right) = expression::masks(&args.mask, axes, mistakes);
        let complete = score_mods_right && masks_right && bias != Some(None);
        Rules { score_mods: bias.flatten().into_iter().chain(score_mods).collect(), masks, complete }
    }
}

/// Returns the value, or passes its errors to `told` and returns `None`.
pub(super) fn valid<T>(result: Result<T, SpecErrors>, told: impl FnOnce(SpecErrors)) -> Option<T> {
    result.map_err(told).ok()
}

/// The parameters that score_mods and masks declare, and the requested gradients.
pub(super) struct Judged {
    pub(super) params: Vec<Declared>,
    pub(super) wrt: Vec<GradientSpec>,
    /// True if the gradients have no mistakes.
    pub(super) right: bool,
}

/// Validates everything that does not depend on extents.
pub(super) fn judge(
    any: &AttentionSpec,
    args: &ProblemArgs,
    gradient: Option<&BackwardArgs>,
    complete: bool,
    mistakes: &mut Mistakes,
) -> Option<Judged> {
    let option = |field: &str| if field.contains("mask") { "--mask" } else { "--score-mod" };
    let problem = valid(any.validate(), |errors| {
        for e in &errors.0 {
            let twice = e.rule.contains("declared twice") || e.value.contains("declared twice");
            let hint = if twice { "; write NAME[OLD=NEW] to rename the parameter OLD of the function NAME" } else { "" };
            mistakes.add(option(&e.field), format!("{e}{hint}"));
        }
    })?;
    let none = Judged { params: problem.params().to_vec(), wrt: Vec::new(), right: true };
    let Some(gradient) = gradient else { return Some(none) };
    if !gradient.backward {
        for (option, given) in [("--wrt", !gradient.wrt.is_empty()), ("--deterministic", gradient.deterministic)] {
            if given {
                mistakes.add(option, "requires --backward");
            }
        }
        return Some(none);
    }
    if !complete {
        return Some(Judged { right: false, ..none });
    }
    let mut backward = any.backward();
    let by_options = [args.bias.then_some("bias"), args.sink.then_some(SINK)].into_iter().flatten();
    let by_options = by_options.filter(|name| !gradient.wrt.iter().any(|w| w == name));
    for name in by_options.chain(gradient.wrt.iter().map(String::as_str)) {
        let scalar = problem.params().iter().any(|p| p.name == name && p.kind == ParamKind::Scalar);
        let wide = scalar || args.sink && name == SINK || any.dtype.is_fp8();
        backward = backward.wrt(name, if wide { DType::F32 } else { any.dtype });
    }
    let validated = valid(backward.validate(), |errors| {
        for e in errors.0 {
            if e.field.starts_with("wrt[") {
                let declared = crate::table::list(&problem.params().iter().map(|p| p.name.as_str()).collect::<Vec<_>>());
                let declared = if e.rule == "a declared parameter" { format!("; declared: {declared}") } else { String::new() };
                mistakes.add("--wrt", format!("got {}, expected {}{declared}", e.value, e.rule));
            } else {
                let field = e.field.strip_prefix("forward.").unwrap_or(&e.field);
                mistakes.add("--backward", format!("{field}: got {}, expected {}", e.value, e.rule));
            }
        }
    });
    let right = validated.is_some();
    let mut params = validated.map_or_else(Vec::new, |v| v.params().to_vec());
    // Parameters that only the forward pass reads come last.
    params.extend(none.params.into_iter().filter(|p| !params.iter().any(|own| own.name == p.name)).collect::<Vec<_>>());
    Some(Judged { params, wrt: backward.wrt, right })
}
