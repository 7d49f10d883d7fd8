//! Nodes of expressions, and the table of functions.

use crate::dtype::DType;
use std::fmt;

/// An axis of the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Batch entries.
    Batch,
    /// Query heads.
    Head,
    /// Queries.
    Q,
    /// Keys.
    K,
}

impl Axis {
    /// Every axis, outermost first.
    pub const ALL: [Axis; 4] = [Axis::Batch, Axis::Head, Axis::Q, Axis::K];

    /// Returns the name of the index along the axis in the text form of expressions.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Batch => "batch",
            Axis::Head => "head",
            Axis::Q => "q",
            Axis::K => "k",
        }
    }

    /// Returns the name of the axis's extent in the text form of expressions.
    pub fn extent_name(self) -> &'static str {
        match self {
            Axis::Batch => "batches",
            Axis::Head => "heads_q",
            Axis::Q => "seq_q",
            Axis::K => "seq_kv",
        }
    }

    /// Returns the position of the axis among (batch, head, q, k): 0 to 3.
    pub fn place(self) -> usize {
        match self {
            Axis::Batch => 0,
            Axis::Head => 1,
            Axis::Q => 2,
            Axis::K => 3,
        }
    }
}

/// The type of a value in an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// binary32.
    F32,
    /// 32-bit integer; arithmetic wraps.
    I32,
    /// A boolean.
    Bool,
}

impl Type {
    /// Returns the element type of values of this type in memory.
    pub fn dtype(self) -> DType {
        match self {
            Type::F32 => DType::F32,
            Type::I32 => DType::I32,
            Type::Bool => DType::Bool,
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dtype().name())
    }
}

/// The notation of a function in the text form of expressions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// `name(x)` or `name(x, y)`.
    Call(&'static str),
    /// `x name y`, with its binding strength: a larger number binds tighter.
    Infix(&'static str, u8),
    /// `name x`.
    Prefix(&'static str),
}

/// The argument and result types of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Takes numbers of one type and returns one of that type.
    Number,
    /// Takes f32 and returns f32.
    Real,
    /// Takes numbers of one type and returns a boolean.
    Compare,
    /// Takes booleans and returns one.
    Logic,
    /// Takes a value of the first type and returns one of the second.
    Cast(Type, Type),
}

macro_rules! functions {
    ($(#[$top:meta])* $name:ident { $(#[doc = $doc:literal] $variant:ident $spelling:expr, $kind:expr;)* }) => {
        $(#[$top])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $(#[doc = $doc] $variant,)* }

        impl $name {
            /// Every function, in declaration order.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// Returns a description of the function's result.
            pub fn about(self) -> &'static str {
                match self { $($name::$variant => $doc.trim_ascii(),)* }
            }

            /// Returns the notation of the function in the text form of expressions.
            pub fn spelling(self) -> Spelling {
                match self { $($name::$variant => $spelling,)* }
            }

            /// Returns the argument and result types of the function.
            pub fn kind(self) -> Kind {
                match self { $($name::$variant => $kind,)* }
            }
        }
    };
}

functions! {
    /// A function of one value.
    Unary {
        /// The negative of `x`.
        Neg Spelling::Prefix("-"), Kind::Number;
        /// The absolute value of `x`.
        Abs Spelling::Call("abs"), Kind::Number;
        /// The square root of `x`.
        Sqrt Spelling::Call("sqrt"), Kind::Real;
        /// 1 divided by the square root of `x`.
        Rsqrt Spelling::Call("rsqrt"), Kind::Real;
        /// e to the power of `x`.
        Exp Spelling::Call("exp"), Kind::Real;
        /// The natural logarithm of `x`.
        Log Spelling::Call("log"), Kind::Real;
        /// The sine of `x` in radians.
        Sin Spelling::Call("sin"), Kind::Real;
        /// The cosine of `x` in radians.
        Cos Spelling::Call("cos"), Kind::Real;
        /// The hyperbolic tangent of `x`.
        Tanh Spelling::Call("tanh"), Kind::Real;
        /// The error function of `x`.
        Erf Spelling::Call("erf"), Kind::Real;
        /// `x` rounded down to an integer.
        Floor Spelling::Call("floor"), Kind::Real;
        /// `x` rounded up to an integer.
        Ceil Spelling::Call("ceil"), Kind::Real;
        /// True if `x` is false.
        Not Spelling::Prefix("!"), Kind::Logic;
        /// The integer `x` converted to f32.
        ToF32 Spelling::Call("f32"), Kind::Cast(Type::I32, Type::F32);
        /// `x` truncated toward zero. Values outside of the range of i32 saturate, and NaN becomes 0.
        ToI32 Spelling::Call("i32"), Kind::Cast(Type::F32, Type::I32);
    }
}

functions! {
    /// A function of two values.
    Binary {
        /// `x` plus `y`.
        Add Spelling::Infix("+", 4), Kind::Number;
        /// `x` minus `y`.
        Sub Spelling::Infix("-", 4), Kind::Number;
        /// `x` times `y`.
        Mul Spelling::Infix("*", 5), Kind::Number;
        /// `x` divided by `y`. Integer division truncates toward zero, and by 0 it gives 0.
        Div Spelling::Infix("/", 5), Kind::Number;
        /// The remainder of `x` divided by `y`, with the sign of `x`. An integer divided by 0 has remainder 0.
        Mod Spelling::Infix("%", 5), Kind::Number;
        /// `x` to the power of `y`.
        Pow Spelling::Call("pow"), Kind::Real;
        /// The smaller of `x` and `y`. If one of them is NaN, it is the other.
        Min Spelling::Call("min"), Kind::Number;
        /// The larger of `x` and `y`. If one of them is NaN, it is the other.
        Max Spelling::Call("max"), Kind::Number;
        /// True if `x` equals `y`.
        Eq Spelling::Infix("==", 3), Kind::Compare;
        /// True if `x` differs from `y`.
        Ne Spelling::Infix("!=", 3), Kind::Compare;
        /// True if `x` is less than `y`.
        Lt Spelling::Infix("<", 3), Kind::Compare;
        /// True if `x` is at most `y`.
        Le Spelling::Infix("<=", 3), Kind::Compare;
        /// True if `x` is greater than `y`.
        Gt Spelling::Infix(">", 3), Kind::Compare;
        /// True if `x` is at least `y`.
        Ge Spelling::Infix(">=", 3), Kind::Compare;
        /// True if both `x` and `y` are true.
        And Spelling::Infix("&", 2), Kind::Logic;
        /// True if `x` or `y` or both are true.
        Or Spelling::Infix("|", 1), Kind::Logic;
    }
}

/// A value of a trace, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(super) u32);

impl NodeId {
    /// Returns the index in [`super::Trace::nodes`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A declared parameter of a trace, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub(super) u32);

impl ParamId {
    /// Returns the index in [`super::Trace::params`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A constant. Floats are compared by their bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Const {
    /// The bits of a binary32. All NaNs have the same bits.
    F32(u32),
    /// An integer.
    I32(i32),
    /// A boolean.
    Bool(bool),
}

impl Const {
    /// Creates a float.
    pub fn f32(x: f32) -> Const {
        Const::F32(if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() })
    }

    /// Returns the type of the constant.
    pub fn ty(self) -> Type {
        match self {
            Const::F32(_) => Type::F32,
            Const::I32(_) => Type::I32,
            Const::Bool(_) => Type::Bool,
        }
    }

    /// Returns the number as f64; a boolean is 0 or 1.
    pub fn to_f64(self) -> f64 {
        match self {
            Const::F32(bits) => f64::from(f32::from_bits(bits)),
            Const::I32(x) => f64::from(x),
            Const::Bool(x) => f64::from(u8::from(x)),
        }
    }

    pub(super) fn from_f64(ty: Type, x: f64) -> Const {
        match ty {
            Type::F32 => Const::f32(x as f32),
            Type::I32 => Const::I32(x as i32),
            Type::Bool => Const::Bool(x != 0.0),
        }
    }
}

/// One value: an input, a constant, or a function of earlier values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// The score that is modified, f32.
    Score,
    /// The upstream gradient, f32: the derivative of the loss with respect to the modified score. It occurs only in gradients.
    Upstream,
    /// The index along an axis, i32.
    Index(Axis),
    /// The extent of an axis, i32; replaced by a constant in a trace of a validated problem.
    Extent(Axis),
    /// A constant, in the node itself.
    Const(Const),
    /// A declared parameter: a scalar, or the element of a tensor at the current position.
    Param(ParamId),
    /// The element of a declared table at a computed position, i32, in memory order. Positions outside the table are clamped to it.
    Read(ParamId, NodeId),
    /// A function of one value.
    Unary(Unary, NodeId),
    /// A function of two values.
    Binary(Binary, NodeId, NodeId),
    /// `Select(c, x, y)`: `x` where `c` holds, else `y`.
    Select(NodeId, NodeId, NodeId),
}

impl Node {
    /// Iterates over the operands of this node, in order.
    pub fn operands(self) -> impl Iterator<Item = NodeId> {
        let of = match self {
            Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => [None; 3],
            Node::Unary(_, x) | Node::Read(_, x) => [Some(x), None, None],
            Node::Binary(_, x, y) => [Some(x), Some(y), None],
            Node::Select(c, x, y) => [Some(c), Some(x), Some(y)],
        };
        of.into_iter().flatten()
    }

    /// Returns this node with `to` applied to its operands.
    pub fn map(self, mut to: impl FnMut(NodeId) -> NodeId) -> Node {
        match self {
            Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => self,
            Node::Unary(f, x) => Node::Unary(f, to(x)),
            Node::Read(p, x) => Node::Read(p, to(x)),
            Node::Binary(f, x, y) => Node::Binary(f, to(x), to(y)),
            Node::Select(c, x, y) => Node::Select(to(c), to(x), to(y)),
        }
    }
}
