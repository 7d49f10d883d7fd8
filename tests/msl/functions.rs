//! Numbers and functions of the emulation and of traced expressions, against their definitions.

use super::emulation;
use conformance::golden::repository;
use conformance::msl::Toolchain;
use half::{bf16, f16};
use metal_fallback::Captured;
use sdpa::expr::{Axis, Binary, Builder, Kind, NodeId, Place, Precision, Trace, Type, Unary};

/// half and bfloat of the emulation against those of the crate `half`: every number widened, and narrowed what lies on it, between it
/// and the next, and next to that.
#[test]
fn numbers_round_as_they_should() {
    let Some(toolchain) = emulation("half and bfloat") else { return };
    let text = r#"
#include "numbers.h"
#include <stdio.h>
template <typename T>
static void all() {
    for (unsigned n = 0; n < 0x10000; n++) {
        T x, next;
        x.bits = uint16_t(n);
        next.bits = uint16_t(n + 1);
        const float middle = float(double(float(x)) / 2 + double(float(next)) / 2);
        const uint32_t bits = metal::bits_of(middle);
        const float tries[4] = {float(x), middle, metal::float_of(bits + 1), metal::float_of(bits - 1)};
        for (float f : tries) {
            printf("%08x %04x\n", metal::bits_of(f), T(f).bits);
        }
    }
}
int main() {
    all<half>();
    all<bfloat>();
}
"#;
    let said = toolchain.print(text).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 8 * 0x10000);
    for (n, line) in lines.iter().enumerate() {
        let (wide, narrow) = line.split_once(' ').unwrap();
        let wide = f32::from_bits(u32::from_str_radix(wide, 16).unwrap());
        let narrow = u16::from_str_radix(narrow, 16).unwrap();
        let number = (n / 4 % 0x10000) as u16;
        let (exact, rounded, is_nan) = if n < 4 * 0x10000 {
            (f16::from_bits(number).to_f32(), f16::from_f32(wide).to_bits(), f16::from_bits(narrow).is_nan())
        } else {
            (bf16::from_bits(number).to_f32(), bf16::from_f32(wide).to_bits(), bf16::from_bits(narrow).is_nan())
        };
        assert!(!n.is_multiple_of(4) || exact.to_bits() == wide.to_bits() || (exact.is_nan() && wide.is_nan()), "{line}: {exact}");
        assert!(rounded == narrow || (wide.is_nan() && is_nan), "{line}: {rounded:04x}");
    }
}

/// Makes a value of two floats and two whole numbers.
type Make<'a> = dyn Fn(&mut Builder, [NodeId; 2], [NodeId; 2]) -> NodeId + 'a;

/// Each function of an expression, of each type of operands: the second root of a trace, as a float.
fn functions() -> Vec<(String, Trace)> {
    let mut all = Vec::new();
    let mut add = |name: String, make: &Make<'_>| {
        let mut b = Builder::new();
        let floats = [b.score(), b.upstream()];
        let wholes = [b.index(Axis::Q), b.index(Axis::K)];
        let value = make(&mut b, floats, wholes);
        let value = match b.ty(value) {
            Type::F32 => value,
            Type::I32 => b.unary(Unary::ToF32, value),
            Type::Bool => {
                let [one, zero] = [1.0, 0.0].map(|x| b.f32(x));
                b.select(value, one, zero)
            }
        };
        all.push((name, b.finish(&[floats[0], value]).unwrap()));
    };
    let truths = |b: &mut Builder, [x, y]: [NodeId; 2]| {
        let zero = b.f32(0.0);
        [x, y].map(|x| b.binary(Binary::Gt, x, zero))
    };
    for &f in Unary::ALL {
        match f.kind() {
            Kind::Number | Kind::Compare => {
                add(format!("{f:?} of f32"), &|b, [x, _], _| b.unary(f, x));
                add(format!("{f:?} of i32"), &|b, _, [x, _]| b.unary(f, x));
            }
            Kind::Real | Kind::Cast(Type::F32, _) => add(format!("{f:?}"), &|b, [x, _], _| b.unary(f, x)),
            Kind::Cast(..) => add(format!("{f:?}"), &|b, _, [x, _]| b.unary(f, x)),
            Kind::Logic => add(format!("{f:?}"), &|b, xs, _| {
                let [x, _] = truths(b, xs);
                b.unary(f, x)
            }),
        }
    }
    for &f in Binary::ALL {
        match f.kind() {
            Kind::Number | Kind::Compare => {
                add(format!("{f:?} of f32"), &|b, [x, y], _| b.binary(f, x, y));
                add(format!("{f:?} of i32"), &|b, _, [x, y]| b.binary(f, x, y));
            }
            Kind::Real | Kind::Cast(..) => add(format!("{f:?}"), &|b, [x, y], _| b.binary(f, x, y)),
            Kind::Logic => add(format!("{f:?}"), &|b, xs, _| {
                let [x, y] = truths(b, xs);
                b.binary(f, x, y)
            }),
        }
    }
    all
}

const TWO_31: f32 = 2147483648.0;
const FLOATS: [f32; 19] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -2.5,
    3.75,
    1e-3,
    -0.3,
    2.9,
    5.5,
    20.0,
    1e10,
    -3e9,
    TWO_31,
    -TWO_31,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];
const WHOLES: [i32; 9] = [0, 1, -1, 2, -7, 5, 1 << 20, i32::MAX, i32::MIN];

/// Functions as MSL against their definition, at the edges too.
#[test]
fn functions_mean_what_the_interpreter_says() {
    let Some(toolchain) = emulation(&format!("{} functions", functions().len())) else { return };
    let pieces = std::fs::read_to_string(repository("sdpa/emit/expression.inc")).unwrap();
    functions_with(&toolchain, &pieces).unwrap();
}

/// Whether functions made of these pieces mean what they should.
pub(super) fn functions_with(toolchain: &Toolchain, pieces: &str) -> Result<(), String> {
    let functions = functions();
    let mut text = "#include <stdio.h>\n#include <metal_stdlib>\nusing namespace metal;\nstruct Captured {};\n\
                    struct Place { int batch; int head; int query; int key; };\n\
                    void machine::fail(const char*, ...) { __builtin_trap(); }\n"
        .to_owned();
    text.push_str(pieces);
    let mut calls = String::new();
    for (n, (_, trace)) in functions.iter().enumerate() {
        let emitted = Captured::of([trace], [1; 4]).gradient(trace, 1);
        text.push_str(&emitted.replace("score_mod_gradient", &format!("function_{n}")));
        calls.push_str(&format!("    show(function_{n});\n"));
    }
    let list = |bits: &[u32]| bits.iter().map(|x| format!("{x:#x}u")).collect::<Vec<_>>().join(", ");
    let (floats, wholes) = (FLOATS.map(f32::to_bits), WHOLES.map(i32::cast_unsigned));
    text.push_str(&format!(
        "static const uint floats[] = {{{}}};\nstatic const uint wholes[] = {{{}}};\n\
         template <typename F> static void show(F f) {{\n    for (uint x : floats) for (uint y : floats) for (uint n : wholes) for (uint m : wholes)\n\
         \x20       if ((x == floats[0] && y == floats[0]) || (n == wholes[0] && m == wholes[0]))\n\
         \x20           printf(\"%x\\n\", as_type<uint>(f(as_type<float>(x), as_type<float>(y), Place{{0, 0, as_type<int>(n), as_type<int>(m)}}, Captured{{}})));\n}}\n\
         int main() {{\n{calls}}}\n",
        list(&floats),
        list(&wholes)
    ));
    let said = toolchain.print(&text)?;
    let mut said = said.lines().map(|line| f32::from_bits(u32::from_str_radix(line, 16).unwrap()));
    let mut wrong = Vec::new();
    for (name, trace) in &functions {
        for (x, y, n, m) in FLOATS.into_iter().flat_map(|x| {
            FLOATS.into_iter().flat_map(move |y| WHOLES.into_iter().flat_map(move |n| WHOLES.into_iter().map(move |m| (x, y, n, m))))
        }) {
            let zero = x.to_bits() == 0 && y.to_bits() == 0;
            if !zero && (n, m) != (0, 0) {
                continue;
            }
            let index = [0, 0, i64::from(n), i64::from(m)];
            let at = Place { score: x.into(), upstream: y.into(), index, extents: [1; 4], params: &[] };
            let want = trace.eval(&at, Precision::F32)[1] as f32;
            let got = said.next().ok_or_else(|| format!("nothing is said of {name}"))?;
            let near = (got - want).abs() <= 1e-6 * want.abs();
            if !(got == want || near || (got.is_nan() && want.is_nan())) {
                wrong.push(format!("{name} at {x:?} {y:?} {n} {m}: {got:?}, not {want:?}"));
            }
        }
    }
    assert!(said.next().is_none());
    if wrong.is_empty() { Ok(()) } else { Err(format!("{} wrong\n{}", wrong.len(), wrong[..wrong.len().min(30)].join("\n"))) }
}

/// The slope of tanh, which a trace spells as a difference that has no digit left for large numbers.
#[test]
fn the_slope_of_tanh_keeps_its_digits() {
    let Some(toolchain) = emulation("the slope of tanh") else { return };
    let mut b = Builder::new();
    let (x, upstream) = (b.score(), b.upstream());
    let t = b.unary(Unary::Tanh, x);
    let slope = b.gradient(t, upstream, &[x])[0].unwrap();
    let trace = b.finish(&[t, slope]).unwrap();
    let pieces = std::fs::read_to_string(repository("sdpa/emit/expression.inc")).unwrap();
    let emitted = Captured::of([&trace], [1; 4]).gradient(&trace, 1);
    let numbers: Vec<f32> = (-160..=160).map(|n| n as f32 * 0.25).collect();
    let list = numbers.iter().map(|x| format!("{:#x}u", x.to_bits())).collect::<Vec<_>>().join(", ");
    let text = format!(
        "#include <stdio.h>\n#include <metal_stdlib>\nusing namespace metal;\nstruct Captured {{}};\n\
         struct Place {{ int batch; int head; int query; int key; }};\nvoid machine::fail(const char*, ...) {{ __builtin_trap(); }}\n\
         {pieces}\n{emitted}\nstatic const uint numbers[] = {{{list}}};\nint main() {{\n    for (uint x : numbers)\n\
         \x20       printf(\"%x\\n\", as_type<uint>(score_mod_gradient(as_type<float>(x), 3.0f, Place{{0, 0, 0, 0}}, Captured{{}})));\n}}\n"
    );
    let said = toolchain.print(&text).unwrap();
    assert_eq!(said.lines().count(), numbers.len());
    for (x, line) in numbers.iter().zip(said.lines()) {
        let got = f64::from(f32::from_bits(u32::from_str_radix(line, 16).unwrap()));
        let want = 3.0 / f64::from(*x).cosh().powi(2);
        assert!((got - want).abs() <= 2e-6 * want, "{x}: {got:e}, not {want:e}");
    }
}
