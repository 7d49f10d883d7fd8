//! The functions of the expression language, over registers. A register holds the bits of f32 or i32, or 0 and 1 for booleans.

use super::compile::Op;
use super::math;
use pulp::{Simd, WithSimd};
use sdpa_core::expr::{self, Binary, Precision, Type, Unary};

/// Computes one step; operands have at least the length of the result.
#[derive(Debug)]
pub(super) struct Apply<'a> {
    pub(super) op: Op,
    pub(super) from: &'a [Vec<u32>],
    pub(super) to: &'a mut [u32],
}

impl WithSimd for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        // Four lanes and 16 registers identify the portable instruction set. It has no fused multiply-add instruction, so `mul_add` would
        // call a function for each number.
        if const { S::F32_LANES == 4 && S::REGISTER_COUNT == 16 } { self.apply::<false>() } else { self.apply::<true>() }
    }
}

#[inline(always)]
fn map1(x: &[u32], to: &mut [u32], f: impl Fn(u32) -> u32) {
    for (to, x) in to.iter_mut().zip(x) {
        *to = f(*x);
    }
}

#[inline(always)]
fn map2(x: &[u32], y: &[u32], to: &mut [u32], f: impl Fn(u32, u32) -> u32) {
    for ((to, x), y) in to.iter_mut().zip(x).zip(y) {
        *to = f(*x, *y);
    }
}

#[inline(always)]
fn real(x: &[u32], to: &mut [u32], f: impl Fn(f32) -> f32) {
    map1(x, to, |x| f(f32::from_bits(x)).to_bits());
}

#[inline(always)]
fn reals(x: &[u32], y: &[u32], to: &mut [u32], f: impl Fn(f32, f32) -> f32) {
    map2(x, y, to, |x, y| f(f32::from_bits(x), f32::from_bits(y)).to_bits());
}

#[inline(always)]
fn wholes(x: &[u32], y: &[u32], to: &mut [u32], f: impl Fn(i32, i32) -> i32) {
    map2(x, y, to, |x, y| f(x as i32, y as i32) as u32);
}

/// Compares as f32 or as i32.
#[inline(always)]
fn compare(ty: Type, x: &[u32], y: &[u32], to: &mut [u32], reals: impl Fn(f32, f32) -> bool, wholes: impl Fn(i32, i32) -> bool) {
    match ty {
        Type::F32 => map2(x, y, to, |x, y| u32::from(reals(f32::from_bits(x), f32::from_bits(y)))),
        Type::I32 | Type::Bool => map2(x, y, to, |x, y| u32::from(wholes(x as i32, y as i32))),
    }
}

/// Evaluates a function that is accurate up to [`math::FAR`]; larger numbers take a slow path.
#[inline(always)]
fn wave(f: Unary, x: &[u32], to: &mut [u32], near: impl Fn(f32) -> f32) {
    real(x, to, near);
    let is_far = |x: u32| f32::from_bits(x).abs() > math::FAR;
    if x[..to.len()].iter().fold(false, |any, x| any | is_far(*x)) {
        for (to, x) in to.iter_mut().zip(x).filter(|(_, x)| is_far(**x)) {
            let y = expr::unary(f, Type::F32, Type::F32, f32::from_bits(*x).into(), Precision::F32);
            *to = (y as f32).to_bits();
        }
    }
}

impl Apply<'_> {
    #[inline(always)]
    fn apply<const FMA: bool>(self) {
        let Apply { op, from, to } = self;
        match op {
            Op::Unary(f, ty, x) => unary::<FMA>(f, ty, &from[x], to),
            Op::Binary(f, ty, x, y) => binary(f, ty, &from[x], &from[y], to),
            Op::Select(c, x, y) => {
                for (((to, c), x), y) in to.iter_mut().zip(&from[c]).zip(&from[x]).zip(&from[y]) {
                    *to = if *c != 0 { *x } else { *y };
                }
            }
            Op::TanhSlope(g, x) => reals(&from[g], &from[x], to, |g, x| g * math::sech_squared::<FMA>(x)),
            // The machine fills the registers of these inputs.
            Op::Import(_) | Op::Score | Op::Upstream | Op::Index(_) | Op::Load(_) | Op::Read(..) => {}
        }
    }
}

#[inline(always)]
fn unary<const FMA: bool>(f: Unary, ty: Type, x: &[u32], to: &mut [u32]) {
    match f {
        Unary::Neg if ty == Type::F32 => real(x, to, |x| -x),
        Unary::Neg => map1(x, to, u32::wrapping_neg),
        Unary::Abs if ty == Type::F32 => real(x, to, f32::abs),
        Unary::Abs => map1(x, to, |x| (x as i32).wrapping_abs() as u32),
        Unary::Sqrt => real(x, to, f32::sqrt),
        Unary::Rsqrt => real(x, to, math::rsqrt),
        Unary::Exp => real(x, to, math::exp::<FMA>),
        Unary::Tanh => real(x, to, math::tanh::<FMA>),
        Unary::Log => real(x, to, math::log),
        Unary::Sin => wave(f, x, to, math::sin),
        Unary::Cos => wave(f, x, to, math::cos),
        Unary::Erf => real(x, to, math::erf::<FMA>),
        Unary::Floor => real(x, to, f32::floor),
        Unary::Ceil => real(x, to, f32::ceil),
        Unary::Not => map1(x, to, |x| x ^ 1),
        Unary::ToF32 => map1(x, to, |x| (x as i32 as f32).to_bits()),
        Unary::ToI32 => map1(x, to, |x| f32::from_bits(x) as i32 as u32),
    }
}

#[inline(always)]
fn binary(f: Binary, ty: Type, x: &[u32], y: &[u32], to: &mut [u32]) {
    let float = ty == Type::F32;
    match f {
        Binary::Add if float => reals(x, y, to, |x, y| x + y),
        Binary::Add => map2(x, y, to, u32::wrapping_add),
        Binary::Sub if float => reals(x, y, to, |x, y| x - y),
        Binary::Sub => map2(x, y, to, u32::wrapping_sub),
        Binary::Mul if float => reals(x, y, to, |x, y| x * y),
        Binary::Mul => map2(x, y, to, u32::wrapping_mul),
        Binary::Div if float => reals(x, y, to, |x, y| x / y),
        Binary::Div => wholes(x, y, to, math::divide),
        Binary::Mod if float => reals(x, y, to, |x, y| x % y),
        Binary::Mod => wholes(x, y, to, math::remainder),
        Binary::Pow => reals(x, y, to, |x, y| expr::binary(Binary::Pow, Type::F32, x.into(), y.into(), Precision::F32) as f32),
        Binary::Min if float => reals(x, y, to, math::min),
        Binary::Min => wholes(x, y, to, Ord::min),
        Binary::Max if float => reals(x, y, to, math::max),
        Binary::Max => wholes(x, y, to, Ord::max),
        Binary::Eq => compare(ty, x, y, to, |x, y| x == y, |x, y| x == y),
        Binary::Ne => compare(ty, x, y, to, |x, y| x != y, |x, y| x != y),
        Binary::Lt => compare(ty, x, y, to, |x, y| x < y, |x, y| x < y),
        Binary::Le => compare(ty, x, y, to, |x, y| x <= y, |x, y| x <= y),
        Binary::Gt => compare(ty, x, y, to, |x, y| x > y, |x, y| x > y),
        Binary::Ge => compare(ty, x, y, to, |x, y| x >= y, |x, y| x >= y),
        Binary::And => map2(x, y, to, |x, y| x & y),
        Binary::Or => map2(x, y, to, |x, y| x | y),
    }
}
