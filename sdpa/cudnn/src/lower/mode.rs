//! Pointwise modes for the functions of traces.

use cudnn_graph::ir::Mode;
use sdpa_core::expr::{Binary, Unary};

/// Returns the mode of a function of one value.
pub(super) fn unary(f: Unary) -> Mode {
    match f {
        Unary::Neg => Mode::Neg,
        Unary::Abs => Mode::Abs,
        Unary::Sqrt => Mode::Sqrt,
        Unary::Rsqrt => Mode::Rsqrt,
        Unary::Exp => Mode::Exp,
        Unary::Log => Mode::Log,
        Unary::Sin => Mode::Sin,
        Unary::Cos => Mode::Cos,
        Unary::Tanh => Mode::TanhFwd,
        Unary::Erf => Mode::Erf,
        Unary::Floor => Mode::Floor,
        Unary::Ceil => Mode::Ceil,
        Unary::Not => Mode::LogicalNot,
        Unary::ToF32 | Unary::ToI32 => Mode::Identity,
    }
}

/// Returns the mode of a function of two values.
pub(super) fn binary(f: Binary) -> Mode {
    match f {
        Binary::Add => Mode::Add,
        Binary::Sub => Mode::Sub,
        Binary::Mul => Mode::Mul,
        Binary::Div => Mode::Div,
        Binary::Mod => Mode::Mod,
        Binary::Pow => Mode::Pow,
        Binary::Min => Mode::Min,
        Binary::Max => Mode::Max,
        Binary::Eq => Mode::CmpEq,
        Binary::Ne => Mode::CmpNeq,
        Binary::Lt => Mode::CmpLt,
        Binary::Le => Mode::CmpLe,
        Binary::Gt => Mode::CmpGt,
        Binary::Ge => Mode::CmpGe,
        Binary::And => Mode::LogicalAnd,
        Binary::Or => Mode::LogicalOr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudnn_graph::DType;
    use cudnn_graph::ir::interp::{self, Operand};
    use cudnn_graph::ir::pointwise::Params;
    use sdpa_core::expr::{self, Kind, Precision, Type};

    const NUMBERS: [f64; 17] = [
        f64::NAN,
        f64::NEG_INFINITY,
        -3e38,
        -2147483648.0,
        -7.0,
        -2.5,
        -1.0,
        -1e-40,
        -0.0,
        0.0,
        0.1,
        1.0,
        2.0,
        3.75,
        16_777_217.0,
        2147483647.0,
        f64::INFINITY,
    ];

    fn dtype(ty: Type) -> DType {
        crate::lower::dtype(ty.dtype())
    }

    /// Numbers of a type, each rounded to it.
    fn of(ty: Type) -> Vec<f64> {
        NUMBERS.into_iter().map(|x| interp::Precision::F32.convert(x, dtype(ty))).collect()
    }

    fn operands(kind: Kind) -> Vec<(Type, Type)> {
        match kind {
            Kind::Number => vec![(Type::F32, Type::F32), (Type::I32, Type::I32)],
            Kind::Real => vec![(Type::F32, Type::F32)],
            Kind::Compare => vec![(Type::F32, Type::Bool), (Type::I32, Type::Bool)],
            Kind::Logic => vec![(Type::Bool, Type::Bool)],
            Kind::Cast(from, to) => vec![(from, to)],
        }
    }

    #[track_caller]
    fn same(what: &str, have: f64, want: f64) {
        assert!(have.to_bits() == want.to_bits() || (have.is_nan() && want.is_nan()), "{what}: {have:e}, not {want:e}");
    }

    #[test]
    fn what_a_mode_computes_is_what_the_function_means() {
        let both = [(Precision::F32, interp::Precision::F32), (Precision::F64, interp::Precision::F64)];
        for (precision, of_mode) in both {
            for &f in Unary::ALL {
                for (from, to) in operands(f.kind()) {
                    let compute = if matches!(f.kind(), Kind::Cast(..)) { to } else { from };
                    for x in of(from) {
                        let operand = Operand { x, ..Operand::default() };
                        let want = interp::pointwise(unary(f), &Params::default(), dtype(compute), of_mode, operand);
                        same(&format!("{f:?} {x:e} {precision:?}"), expr::unary(f, from, to, x, precision), want);
                    }
                }
            }
            for &f in Binary::ALL {
                for (from, _) in operands(f.kind()) {
                    for x in of(from) {
                        for b in of(from) {
                            let operand = Operand { x, b, ..Operand::default() };
                            let want = interp::pointwise(binary(f), &Params::default(), dtype(from), of_mode, operand);
                            same(&format!("{f:?} {x:e} {b:e} {precision:?}"), expr::binary(f, from, x, b, precision), want);
                        }
                    }
                }
            }
        }
    }
}
