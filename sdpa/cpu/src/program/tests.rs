//! Each function of the expression language on every instruction set, against its definition.

use super::Program;
use super::machine::{Bound, Machine, Row};
use crate::isa::Isa;
use sdpa_core::expr::{Binary, Builder, Kind, NodeId, Place, Precision, Trace, Type, Unary};

const WIDTH: usize = 16;

/// Numbers at which implementations switch algorithms, and many others.
fn numbers() -> Vec<f32> {
    let mut all = vec![0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 88.7, 89.5, 103.9, 104.1, 9.01, 1e-3, 1e-7, 1e-20, 1e-40, 1e10, 3e38];
    all.extend([f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN, 2_147_483_520.0, 2_147_483_648.0, 1e-45, 0.34657, 0.34658]);
    all.extend((1..200).map(|i| (i as f32 * 0.37).sin().abs() * (i as f32 * 0.9 - 70.0).exp2()));
    all.extend((1..400).map(|i| i as f32 * 0.0513));
    all.extend((1..100).map(|i| i as f32 * std::f32::consts::FRAC_PI_2));
    all.extend((1..100).map(|i| 1.0 + (i as f32 - 50.0) * 1e-6));
    all.extend((1..100).map(|i| (i * i * 101) as f32 * 1.1));
    let minus: Vec<f32> = all.iter().map(|x| -x).collect();
    all.extend(minus);
    all
}

/// Evaluates a trace with `x` as the score and `y` as its upstream gradient.
fn evaluate(trace: &Trace, isa: Isa, places: &[(f32, f32)]) -> Vec<u32> {
    let program = Program::new(trace);
    let bound = Bound::new(&program, isa, [1, 1, 1, 1], &[], &[]);
    let mut machine = Machine::new(&bound);
    machine.entry(0);
    machine.keys(&(0..places.len().div_ceil(WIDTH)));
    machine.rows(0, (0..WIDTH).map(|_| Row { head: 0, query: 0 }));
    machine.tile(0);
    let mut results = Vec::new();
    let step = Machine::keys_at_a_time(WIDTH);
    let padded: Vec<(f32, f32)> =
        places.iter().copied().chain(std::iter::repeat((0.0, 0.0))).take(places.len().next_multiple_of(WIDTH)).collect();
    for chunk in padded.chunks(step * WIDTH) {
        let keys = 0..chunk.len() / WIDTH;
        let (x, y): (Vec<f32>, Vec<f32>) = chunk.iter().copied().unzip();
        machine.first(0, &keys, &x);
        machine.others(0, &keys, &x, &y);
        results.extend_from_slice(machine.root(1, chunk.len()));
    }
    results.truncate(places.len());
    results
}

/// Returns the distance in units in the last place; NaN and infinity are infinitely far from other numbers.
fn ulps(got: f32, want: f32) -> f64 {
    if got.is_nan() || want.is_nan() {
        return if got.is_nan() && want.is_nan() { 0.0 } else { f64::INFINITY };
    }
    let ordered = |x: f32| if x.is_sign_negative() { -i64::from(x.to_bits() & 0x7fff_ffff) } else { i64::from(x.to_bits()) };
    (ordered(got) - ordered(want)).abs() as f64
}

fn compare(name: &str, trace: &Trace, ty: Type, places: &[(f32, f32)], most: f64) {
    for isa in Isa::all() {
        let mut worst = 0f64;
        for (&(x, y), got) in places.iter().zip(evaluate(trace, isa, places)) {
            let place = Place { score: x.into(), upstream: y.into(), index: [0; 4], extents: [1; 4], params: &[] };
            let want = trace.eval(&place, Precision::F32)[1];
            match ty {
                Type::F32 => {
                    let off = ulps(f32::from_bits(got), want as f32);
                    assert!(off <= most, "{isa:?}: {name} of {x:e}, {y:e} is {:e}, want {want:e}: {off} ulp", f32::from_bits(got));
                    // The distance in ulp is 0 between zeros of different signs, so compare the signs too.
                    assert!(want != 0.0 || f32::from_bits(got).is_sign_negative() == want.is_sign_negative(), "{isa:?} {name} {x:e} {y:e}");
                    worst = worst.max(off);
                }
                Type::I32 | Type::Bool => assert_eq!(f64::from(got as i32), want, "{isa:?}: {name} of {x:e}, {y:e}"),
            }
        }
        println!("{isa:?} {name}: {worst}");
    }
}

/// A score and its upstream gradient as operands of a type.
fn operands(b: &mut Builder, ty: Type) -> [NodeId; 2] {
    [b.score(), b.upstream()].map(|x| match ty {
        Type::F32 => x,
        Type::I32 => b.unary(Unary::ToI32, x),
        Type::Bool => {
            let zero = b.f32(1.0);
            b.binary(Binary::Gt, x, zero)
        }
    })
}

fn types(kind: Kind) -> Vec<Type> {
    match kind {
        Kind::Number | Kind::Compare => vec![Type::F32, Type::I32],
        Kind::Real => vec![Type::F32],
        Kind::Logic => vec![Type::Bool],
        Kind::Cast(from, _) => vec![from],
    }
}

#[test]
fn functions_of_one_value_are_as_defined() {
    let places: Vec<(f32, f32)> = numbers().into_iter().map(|x| (x, x)).collect();
    for &f in Unary::ALL {
        for ty in types(f.kind()) {
            let mut b = Builder::new();
            let [x, _] = operands(&mut b, ty);
            let root = b.unary(f, x);
            let result = b.ty(root);
            let trace = b.finish(&[x, root]).unwrap();
            let near = if matches!(f, Unary::Log | Unary::Sin | Unary::Cos) { 1.0 } else { 0.0 };
            let most = if matches!(f, Unary::Exp | Unary::Tanh | Unary::Erf) { 2.0 } else { near };
            compare(&format!("{f:?} {ty}"), &trace, result, &places, most);
        }
    }
}

#[test]
fn functions_of_two_values_are_as_defined() {
    let numbers: Vec<f32> =
        numbers().into_iter().step_by(3).chain([0.0, -0.0, 1.0, -1.0, 2.0, f32::NAN, f32::INFINITY, -2_147_483_648.0]).collect();
    let mut places = Vec::new();
    for &x in &numbers {
        places.extend(numbers.iter().map(|&y| (x, y)));
    }
    for &f in Binary::ALL {
        for ty in types(f.kind()) {
            let mut b = Builder::new();
            let [x, y] = operands(&mut b, ty);
            let root = b.binary(f, x, y);
            let result = b.ty(root);
            let trace = b.finish(&[x, root]).unwrap();
            compare(&format!("{f:?} {ty}"), &trace, result, &places, 0.0);
        }
    }
}

#[test]
fn functions_are_near_their_values_over_their_ranges() {
    type Exact = fn(f64) -> f64;
    let erf: Exact = |x| sdpa_core::expr::unary(Unary::Erf, Type::F32, Type::F32, x, Precision::F64);
    let cases: [(Unary, f32, Exact, f64); 6] = [
        (Unary::Exp, 104.0, f64::exp, 2.0),
        (Unary::Tanh, 12.0, f64::tanh, 2.0),
        (Unary::Log, 40.0, f64::ln, 1.0),
        (Unary::Sin, 1000.0, f64::sin, 1.0),
        (Unary::Cos, 1000.0, f64::cos, 1.0),
        (Unary::Erf, 5.0, erf, 2.0),
    ];
    for (f, range, exact, most) in cases {
        let mut b = Builder::new();
        let x = b.score();
        let root = b.unary(f, x);
        let trace = b.finish(&[x, root]).unwrap();
        // Spread half of the points evenly and concentrate the others near 0.
        let mut places: Vec<(f32, f32)> = Vec::new();
        for i in -100_000..100_000 {
            let t = i as f32 / 100_000.0;
            places.extend([(t * range, 0.0), (t.powi(9) * range, 0.0)]);
        }
        for isa in Isa::all() {
            let mut worst = 0f64;
            for (&(x, _), got) in places.iter().zip(evaluate(&trace, isa, &places)) {
                worst = worst.max(ulps(f32::from_bits(got), exact(x.into()) as f32));
            }
            println!("{isa:?} {f:?}: {worst}");
            assert!(worst <= most, "{isa:?}: {f:?} is off by {worst} ulp");
        }
    }
}
