//! Functions that are composed of others. Closures and texts can call them; traces contain the functions that they are composed of.

use super::build::Builder;
use super::node::{Binary, Kind, NodeId, Type, Unary};

/// A function that is composed of others and that closures and texts may call. A trace contains the functions that it is composed of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Made {
    /// `clamp(x, low, high)`: the value, limited to `low` and `high`.
    Clamp,
    /// `square(x)`: `x²`.
    Square,
    /// `sigmoid(x)`: `1 / (1 + e⁻ˣ)`.
    Sigmoid,
}

impl Made {
    /// Every composed function, in declaration order.
    pub const ALL: &'static [Made] = &[Made::Clamp, Made::Square, Made::Sigmoid];

    /// Returns the name of the function in the text form of expressions.
    pub fn name(self) -> &'static str {
        match self {
            Made::Clamp => "clamp",
            Made::Square => "square",
            Made::Sigmoid => "sigmoid",
        }
    }

    /// Returns a description of the function's result.
    pub fn about(self) -> &'static str {
        match self {
            Made::Clamp => "`min(max(x, low), high)`.",
            Made::Square => "`x * x`.",
            Made::Sigmoid => "`1 / (1 + exp(-x))`.",
        }
    }

    /// Returns the number of arguments of the function.
    pub fn arguments(self) -> usize {
        match self {
            Made::Clamp => 3,
            Made::Square | Made::Sigmoid => 1,
        }
    }

    /// Returns the argument and result types of the function.
    pub fn kind(self) -> Kind {
        match self {
            Made::Clamp | Made::Square => Kind::Number,
            Made::Sigmoid => Kind::Real,
        }
    }

    /// Applies the function to these values; `None` unless they have one type and the number that [`Made::arguments`] returns.
    pub fn make(self, b: &mut Builder, of: &[NodeId]) -> Option<NodeId> {
        let ty = b.ty(*of.first()?);
        let fits = match self.kind() {
            Kind::Number => ty != Type::Bool,
            Kind::Real => ty == Type::F32,
            Kind::Compare | Kind::Logic | Kind::Cast(..) => false,
        };
        if !fits || of.iter().any(|&x| b.ty(x) != ty) {
            return None;
        }
        match (self, of) {
            (Made::Clamp, &[x, low, high]) => {
                let above = b.binary(Binary::Max, x, low);
                Some(b.binary(Binary::Min, above, high))
            }
            (Made::Square, &[x]) => Some(b.binary(Binary::Mul, x, x)),
            (Made::Sigmoid, &[x]) => {
                let half = b.f32(0.5);
                let x = b.binary(Binary::Mul, x, half);
                let t = b.unary(Unary::Tanh, x);
                let t = b.binary(Binary::Mul, t, half);
                Some(b.binary(Binary::Add, t, half))
            }
            (Made::Clamp | Made::Square | Made::Sigmoid, _) => None,
        }
    }
}
