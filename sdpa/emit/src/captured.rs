//! Emits traced expressions as functions, with one statement per value.

use crate::dialect::Dialect;
use crate::known::Known;
use sdpa_core::DType;
use sdpa_core::expr::{Axes, Axis, Binary, Const, Declared, Node, NodeId, ParamKind, Trace, Type, Unary, tanh_slope};
use std::fmt::Write;

/// The declared parameters that the traces of score_mods and masks read, each name once. Its methods emit these traces as functions.
#[derive(Clone, Debug, Default)]
pub struct Captured {
    params: Vec<Declared>,
    extents: [i64; 4],
    dialect: Dialect,
    places_below: Option<i64>,
}

fn ty(ty: Type) -> &'static str {
    match ty {
        Type::F32 => "float",
        Type::I32 => "int",
        Type::Bool => "bool",
    }
}

fn index(axis: Axis) -> &'static str {
    match axis {
        Axis::Batch => "at.batch",
        Axis::Head => "at.head",
        Axis::Q => "at.query",
        Axis::K => "at.key",
    }
}

impl Captured {
    /// Collects the parameters of these traces in a problem of extents (batch, heads_q, seq_q, seq_kv). The output language is MSL unless
    /// [`Captured::in_dialect`] sets another.
    pub fn of<'t>(traces: impl IntoIterator<Item = &'t Trace>, extents: [i64; 4]) -> Captured {
        let mut params: Vec<Declared> = Vec::new();
        for declared in traces.into_iter().flat_map(|trace| trace.params()) {
            if !params.iter().any(|p| p.name == declared.name) {
                params.push(declared.clone());
            }
        }
        Captured { params, extents, dialect: Dialect::default(), places_below: None }
    }

    /// Sets the output language.
    #[must_use]
    pub fn in_dialect(self, dialect: Dialect) -> Captured {
        Captured { dialect, ..self }
    }

    /// Declares that kernels call the functions only with indices from 0 up to, but not including, `below`, on each axis. Emitted
    /// functions then depend on this range instead of the extents.
    #[must_use]
    pub fn with_places_below(self, below: i64) -> Captured {
        Captured { places_below: Some(below), ..self }
    }

    /// Returns whether a tensor spans this axis, so that its elements exist only within the problem's extents.
    pub fn reads_along(&self, axis: Axis) -> bool {
        self.params.iter().any(|param| matches!(param.kind, ParamKind::Tensor { axes, .. } if axes.has(axis)))
    }

    /// Adds an i64 parameter for each of these names. Kernels read these numbers but traces do not, such as the seed of dropout.
    #[must_use]
    pub fn with_numbers<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Captured {
        let kind = ParamKind::Tensor { axes: Axes::NONE, dtype: DType::I64 };
        self.params.extend(names.into_iter().map(|name| Declared { name: name.to_owned(), kind, default: None }));
        self
    }

    /// Returns the expression by which a kernel reads the number `name` of [`Captured::with_numbers`], or an empty text if there is no
    /// such number.
    pub fn number(&self, name: &str) -> String {
        self.params.iter().find(|param| param.name == name).map_or_else(String::new, |param| self.read(param))
    }

    /// Returns the names of the scalar parameters in the order of their values in the scalar buffer, which holds one f32 for each.
    pub fn scalars(&self) -> Vec<&str> {
        self.params.iter().filter(|p| p.kind == ParamKind::Scalar).map(|p| p.name.as_str()).collect()
    }

    /// Returns the tensors, each of which has its own buffer: name, element type and number of elements.
    pub fn tensors(&self) -> Vec<(&str, DType, i64)> {
        let of = |p: &Declared| match p.kind {
            ParamKind::Scalar => None,
            ParamKind::Tensor { axes, dtype } => Some((dtype, axes.dims(self.extents).iter().product())),
        };
        self.params.iter().filter_map(|p| of(p).map(|(dtype, n)| (p.name.as_str(), dtype, n))).collect()
    }

    /// Returns the expression that reads a parameter. It uses indices, because the caller's names may be keywords of the language.
    fn read(&self, param: &Declared) -> String {
        match param.kind {
            ParamKind::Scalar => {
                let place = self.scalars().iter().position(|name| *name == param.name).unwrap_or_default();
                format!("captured.scalars[{place}]")
            }
            ParamKind::Tensor { axes, dtype: _ } => {
                let place = self.tensors().iter().position(|(name, ..)| *name == param.name).unwrap_or_default();
                let mut at = "0L".to_owned();
                for axis in axes.iter() {
                    let extent = self.extents[axis.place()];
                    at = if at == "0L" { format!("long({})", index(axis)) } else { format!("({at} * {extent}L + {})", index(axis)) };
                }
                format!("captured.tensor_{place}[{at}]")
            }
        }
    }

    /// Emits a score_mod as a function: `float score_mod(float score, Place at, Captured captured)`.
    pub fn score_mod(&self, trace: &Trace) -> String {
        self.function("float score_mod(float score, Place at, Captured captured)", trace, 0)
    }

    /// Emits output number `root` of the trace of a score_mod's gradient as a function: `float score_mod_gradient(float score, float
    /// upstream, Place at, Captured captured)`.
    pub fn gradient(&self, trace: &Trace, root: usize) -> String {
        self.function("float score_mod_gradient(float score, float upstream, Place at, Captured captured)", trace, root)
    }

    /// Emits a mask as a function: `bool keep(Place at, Captured captured)`.
    pub fn keep(&self, trace: &Trace) -> String {
        self.function("bool keep(Place at, Captured captured)", trace, 0)
    }

    fn function(&self, signature: &str, trace: &Trace, root: usize) -> String {
        let mut text = format!("inline {signature} {{\n");
        let root = trace.roots().get(root).copied();
        // Mark the values on which this root depends.
        let mut needed = vec![false; trace.nodes().len()];
        root.into_iter().for_each(|root| needed[root.index()] = true);
        let ids: Vec<NodeId> = trace.ids().collect();
        for &id in ids.iter().rev() {
            if needed[id.index()] {
                match tanh_slope(trace, id) {
                    Some(slope) => [slope.upstream, slope.of].into_iter().for_each(|x| needed[x.index()] = true),
                    None => trace.node(id).operands().for_each(|x| needed[x.index()] = true),
                }
            }
        }
        let known = Known::of(trace, self.extents, self.places_below.filter(|_| self.dialect == Dialect::Cuda));
        let rounds = |id: NodeId| needed[id.index()] && known.decisive[id.index()] && contracts(trace.node(id));
        if self.dialect == Dialect::Msl && trace.ids().any(rounds) {
            // In every math mode the compiler contracts products and sums; only this pragma makes it round each of them.
            text.push_str("    #pragma METAL fp contract(off)\n");
        }
        for id in trace.ids().filter(|id| needed[id.index()]) {
            let value = match tanh_slope(trace, id) {
                Some(slope) => format!("v{} * tanh_slope(v{})", slope.upstream.index(), slope.of.index()),
                None => self.near(trace, id, &known).unwrap_or_else(|| self.value(trace, id, &known)),
            };
            let _ = writeln!(text, "    const {} v{} = {value};", ty(trace.ty(id)), id.index());
        }
        let root = root.map_or(0, |root| root.index());
        let _ = writeln!(text, "    return v{root};\n}}");
        text
    }

    /// In CUDA, returns cheaper functions that are accurate on part of their domain, for values whose last digits decide no discontinuity.
    fn near(&self, trace: &Trace, id: NodeId, known: &Known) -> Option<String> {
        if self.dialect != Dialect::Cuda || !known.varies_smoothly(id) || trace.ty(id) != Type::F32 {
            return None;
        }
        let wave = |name, x: NodeId| {
            // An argument that depends on the score and exceeds WAVES already has an error of more than one period, so an accurate range
            // reduction would gain nothing.
            let is_within = known.within(x, WAVES) || known.depends[x.index()].score;
            is_within.then(|| format!("precise::{name}_within(v{})", x.index()))
        };
        match trace.node(id) {
            Node::Unary(Unary::Sin, x) => wave("sin", x),
            Node::Unary(Unary::Cos, x) => wave("cos", x),
            Node::Binary(Binary::Pow, x, y) => match (trace.small_power(id), positive(trace, x)) {
                (Some((_, 0)), _) => Some("1.0f".to_owned()),
                (Some((x, times)), _) => Some(vec![format!("v{}", x.index()); times].join(" * ")),
                (None, Some(base)) => {
                    let log = (base.log2() as f32).to_bits();
                    Some(format!("precise::pow_of(v{}, v{}, as_type<float>({log:#010x}u))", x.index(), y.index()))
                }
                (None, None) => known.within(y, POWERS).then(|| format!("precise::pow_within(v{}, v{})", x.index(), y.index())),
            },
            Node::Binary(Binary::Div, x, y) if !known.depends[y.index()].is_uniform() => {
                Some(format!("precise::quotient(v{}, v{})", x.index(), y.index()))
            }
            Node::Unary(..) | Node::Binary(..) | Node::Select(..) | Node::Read(..) => None,
            Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => None,
        }
    }

    fn value(&self, trace: &Trace, id: NodeId, known: &Known) -> String {
        let decisive = known.decisive[id.index()];
        let is_exact = self.dialect == Dialect::Cuda && !known.varies_smoothly(id);
        let functions = if is_exact { "exact" } else { "precise" };
        match trace.node(id) {
            Node::Score => "score".to_owned(),
            Node::Upstream => "upstream".to_owned(),
            Node::Index(axis) => index(axis).to_owned(),
            Node::Extent(axis) => self.extents[axis.place()].to_string(),
            Node::Const(Const::F32(bits)) => format!("as_type<float>({bits:#010x}u)"),
            Node::Const(Const::I32(x)) => format!("as_type<int>({x:#010x}u)"),
            Node::Const(Const::Bool(x)) => x.to_string(),
            Node::Param(p) => {
                let param = &trace.params()[p.index()];
                let read = self.read(param);
                if param.kind.ty() == Type::F32 { format!("float({read})") } else { read }
            }
            Node::Read(p, x) => {
                let param = &trace.params()[p.index()];
                let place = self.tensors().iter().position(|(name, ..)| *name == param.name).unwrap_or_default();
                let last = param.kind.extents().product::<i64>() - 1;
                let read = format!("captured.tensor_{place}[min(max(v{}, 0), {last})]", x.index());
                if param.kind.ty() == Type::F32 { format!("float({read})") } else { read }
            }
            Node::Unary(f, x) => match known.small(x).filter(|_| f == Unary::ToF32) {
                Some(slopes) => small(x, slopes),
                None => unary(f, trace.ty(x), &format!("v{}", x.index()), functions),
            },
            // A divisor that is the same for every score is inverted once.
            Node::Binary(Binary::Div, x, y)
                if self.dialect == Dialect::Cuda && trace.ty(x) == Type::F32 && known.depends[y.index()].is_uniform() && !decisive =>
            {
                format!("v{} * (1.0f / v{})", x.index(), y.index())
            }
            Node::Binary(f, x, y) if self.dialect == Dialect::Cuda && decisive => {
                rounded(f, &format!("v{}", x.index()), &format!("v{}", y.index()))
            }
            Node::Binary(f, x, y) => binary(f, trace.ty(x), &format!("v{}", x.index()), &format!("v{}", y.index()), functions),
            Node::Select(c, x, y) => format!("v{} ? v{} : v{}", c.index(), x.index(), y.index()),
        }
    }
}

/// Returns a constant base that is positive and not 1, so that a power depends on the exponent.
fn positive(trace: &Trace, id: NodeId) -> Option<f64> {
    let Node::Const(Const::F32(bits)) = trace.node(id) else { return None };
    let x = f64::from(f32::from_bits(bits));
    (x > 0.0 && x.is_finite() && x != 1.0).then_some(x)
}

/// The largest argument of `sin` and `cos`, and the largest exponent of `pow`, for the cheaper functions.
const WAVES: f64 = 16_777_216.0;
const POWERS: f64 = 64.0;

/// Emits the conversion of a small integer to float. If it grows with query or key, a thread converts the part of its first query and key once.
fn small(x: NodeId, slopes: [i64; 2]) -> String {
    let on = [(slopes[0], "at.query_on"), (slopes[1], "at.key_on")];
    let on: Vec<String> = on.into_iter().filter(|(by, _)| *by != 0).map(|(by, on)| format!("{by} * {on}")).collect();
    if on.is_empty() { format!("float_of_small(v{})", x.index()) } else { format!("float_from(v{}, {})", x.index(), on.join(" + ")) }
}

/// Returns whether compilers may contract such a function with others, so that its result is not rounded.
fn contracts(node: Node) -> bool {
    matches!(node, Node::Binary(Binary::Add | Binary::Sub | Binary::Mul, ..))
}

/// Emits a function of two floats whose result is always rounded.
fn rounded(f: Binary, x: &str, y: &str) -> String {
    match f {
        Binary::Add => format!("__fadd_rn({x}, {y})"),
        Binary::Sub => format!("__fsub_rn({x}, {y})"),
        Binary::Mul => format!("__fmul_rn({x}, {y})"),
        // These are never contracted: they round anyway, or select an operand.
        Binary::Div | Binary::Mod | Binary::Pow | Binary::Min | Binary::Max => binary(f, Type::F32, x, y, "exact"),
        Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::And | Binary::Or => {
            binary(f, Type::F32, x, y, "exact")
        }
    }
}

/// Emits a unary function of a namespace.
fn unary(f: Unary, of: Type, x: &str, functions: &str) -> String {
    let whole = of == Type::I32;
    match f {
        Unary::Neg if whole => format!("whole_neg({x})"),
        Unary::Neg => format!("-{x}"),
        Unary::Abs if whole => format!("whole_abs({x})"),
        Unary::Abs => format!("abs({x})"),
        Unary::Sqrt => format!("{functions}::sqrt({x})"),
        Unary::Rsqrt => format!("{functions}::rsqrt({x})"),
        Unary::Exp => format!("{functions}::exp({x})"),
        Unary::Log => format!("{functions}::log({x})"),
        Unary::Sin => format!("{functions}::sin({x})"),
        Unary::Cos => format!("{functions}::cos({x})"),
        Unary::Tanh => format!("{functions}::tanh({x})"),
        Unary::Erf => format!("error_function({x})"),
        Unary::Floor => format!("floor({x})"),
        Unary::Ceil => format!("ceil({x})"),
        Unary::Not => format!("!{x}"),
        Unary::ToF32 => format!("float({x})"),
        Unary::ToI32 => format!("to_whole({x})"),
    }
}

/// Emits a binary function of a namespace.
fn binary(f: Binary, of: Type, x: &str, y: &str, functions: &str) -> String {
    let whole = of == Type::I32;
    let call = |name: &str| format!("{name}({x}, {y})");
    let function = |name: &str| format!("{functions}::{name}({x}, {y})");
    let infix = |sign: &str| format!("{x} {sign} {y}");
    match f {
        Binary::Add if whole => call("whole_add"),
        Binary::Add => infix("+"),
        Binary::Sub if whole => call("whole_sub"),
        Binary::Sub => infix("-"),
        Binary::Mul if whole => call("whole_mul"),
        Binary::Mul => infix("*"),
        Binary::Div if whole => call("whole_div"),
        Binary::Div => infix("/"),
        Binary::Mod if whole => call("whole_mod"),
        Binary::Mod => call("fmod"),
        Binary::Pow => function("pow"),
        Binary::Min if whole => call("min"),
        Binary::Min => function("min"),
        Binary::Max if whole => call("max"),
        Binary::Max => function("max"),
        Binary::Eq => infix("=="),
        Binary::Ne => infix("!="),
        Binary::Lt => infix("<"),
        Binary::Le => infix("<="),
        Binary::Gt => infix(">"),
        Binary::Ge => infix(">="),
        Binary::And => infix("&&"),
        Binary::Or => infix("||"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(trace: &str, dialect: Dialect) -> String {
        let trace: Trace = trace.parse().unwrap_or_else(|e| panic!("{trace}: {e}"));
        let captured = Captured::of([&trace], [1, 2, 30, 40]).in_dialect(dialect);
        if trace.roots().iter().all(|root| trace.ty(*root) == Type::Bool) { captured.keep(&trace) } else { captured.score_mod(&trace) }
    }

    #[test]
    fn values_that_decide_are_rounded_as_they_are_written() {
        let rule = "f32(q) * 0.3 + f32(k) / 49.0 < 5.0";
        let cuda = text(rule, Dialect::Cuda);
        assert!(cuda.contains("__fmul_rn(") && cuda.contains("__fadd_rn(") && !cuda.contains("1.0f /"), "{cuda}");
        let msl = text(rule, Dialect::Msl);
        assert!(msl.lines().nth(1).is_some_and(|line| line.trim() == "#pragma METAL fp contract(off)"), "{msl}");
        assert!(text("tanh(f32(k)) < 0.5", Dialect::Cuda).contains("= exact::tanh(v"));
        // No discontinuity depends on floats, and integers are not rounded.
        for smooth in ["score * 0.3 + f32(k) / 49.0", "select(k - q < 3, score * 2.0 + 1.0, score)"] {
            let cuda = text(smooth, Dialect::Cuda);
            assert!(!cuda.contains("_rn("), "{cuda}");
            assert!(!text(smooth, Dialect::Msl).contains("contract"), "{smooth}");
        }
        assert!(text("score * 0.3 + f32(k) / 49.0", Dialect::Cuda).contains("* (1.0f / "));
    }

    #[test]
    fn functions_are_asked_for_what_they_are_needed_for() {
        let of = |trace: &str| {
            let trace: Trace = trace.parse().unwrap_or_else(|e| panic!("{trace}: {e}"));
            Captured::of([&trace], [1, 2, 30, 40]).in_dialect(Dialect::Cuda).with_places_below(1 << 21).score_mod(&trace)
        };
        for (trace, call) in [
            ("score + cos(0.5 * f32(k - q))", "precise::cos_within(v"),
            ("score + sin(score * f32(k * q))", "precise::sin_within(v"),
            ("score + cos(f32(k * q))", "precise::cos(v"),
            ("tensor t[k]: f32; score + sin(t)", "precise::sin(v"),
            ("select(cos(f32(k)) > 0.5, score, 1.0)", "exact::cos(v"),
            ("pow(score, 0.5)", "precise::pow_within(v"),
            ("pow(score, f32(k))", "precise::pow(v"),
            ("score * pow(0.25, f32(k))", "precise::pow_of(v"),
            ("pow(score, 3.0)", "= v0 * v0 * v0;"),
            ("score + 0.0 * pow(f32(k), 0.0)", "= 1.0f;"),
            ("select(pow(f32(k), 2.0) > 9.0, score, 1.0)", "exact::pow(v"),
            ("score / f32(k)", "precise::quotient(v"),
            ("select(f32(q) / f32(k) > 0.5, score, 1.0)", " / v"),
        ] {
            let text = of(trace);
            assert!(text.contains(call), "{trace}: {text}");
            assert!(text.contains("exact::") == call.contains("exact::"), "{trace}: {text}");
        }
        // The base-2 logarithm of 0.25 is -2, whose bits as an f32 are 0xc0000000.
        assert!(of("score * pow(0.25, f32(k))").contains("as_type<float>(0xc0000000u))"));
    }

    #[test]
    fn whole_numbers_of_places_are_floats_without_a_conversion() {
        let places = |trace: &str, dialect, below: Option<i64>| {
            let trace: Trace = trace.parse().unwrap_or_else(|e| panic!("{trace}: {e}"));
            let captured = Captured::of([&trace], [1, 2, 30, 40]).in_dialect(dialect);
            below.map_or(captured.clone(), |below| captured.with_places_below(below)).score_mod(&trace)
        };
        let [alibi, far] = ["score + 0.1 * f32(k - q)", "score + 0.1 * f32(max(k * q, 0))"];
        let near = "score + 0.1 * f32(abs(k - q))";
        assert!(places(alibi, Dialect::Cuda, Some(1 << 21)).contains(", -1 * at.query_on + 1 * at.key_on);"));
        assert!(places("score + 0.1 * f32(2 * q - 1)", Dialect::Cuda, Some(1 << 20)).contains(", 2 * at.query_on);"));
        assert!(places(near, Dialect::Cuda, Some(1 << 21)).contains("= float_of_small(v"));
        for (text, dialect, below) in [
            (far, Dialect::Cuda, Some(1 << 21)),
            (alibi, Dialect::Cuda, Some(1 << 23)),
            (alibi, Dialect::Cuda, None),
            (alibi, Dialect::Msl, Some(1 << 21)),
        ] {
            let text = places(text, dialect, below);
            assert!(text.contains("= float(v") && !text.contains("float_"), "{text}");
        }
    }

    #[test]
    fn tensors_lie_along_the_axes_that_are_declared() {
        let trace: Trace = "tensor bias[head, k]: f32; score + bias * f32(q)".parse().unwrap();
        let captured = Captured::of([&trace], [1, 2, 30, 40]);
        assert_eq!(Axis::ALL.map(|axis| captured.reads_along(axis)), [false, true, false, true]);
    }
}
