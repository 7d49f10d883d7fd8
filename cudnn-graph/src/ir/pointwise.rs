//! Every pointwise mode of the backend, in one table.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The inputs and the result of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signature {
    /// `y = f(x)` on floating point numbers.
    Unary,
    /// `y = x`, converted to the type of `y`.
    Identity,
    /// `y = f(x, b)` on numbers.
    Binary,
    /// `y = x ? b`, a boolean or 0 / 1.
    Compare,
    /// `y = x and / or b` on booleans.
    LogicalBinary,
    /// `y = not x`.
    LogicalUnary,
    /// `y` = the index along an axis; only the extents of `x` are read.
    Index,
    /// `y = t ? x : b`.
    Select,
    /// `dx = dy · f'(x)`.
    Backward,
}

macro_rules! modes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $signature:ident;)*) => {
        /// A pointwise function. Definitions are in [`crate::ir::interp`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Mode { $($(#[$doc])* $variant,)* }

        impl Mode {
            /// Every mode, in declaration order.
            pub const ALL: &'static [Mode] = &[$(Mode::$variant,)*];

            /// Returns the name in printed graphs.
            pub fn name(self) -> &'static str {
                match self { $(Mode::$variant => $name,)* }
            }

            /// Returns its inputs and its result.
            pub fn signature(self) -> Signature {
                match self { $(Mode::$variant => Signature::$signature,)* }
            }
        }
    };
}

modes! {
    /// `x + b`.
    Add "add" Binary;
    /// `x · b`.
    Mul "mul" Binary;
    /// The smaller.
    Min "min" Binary;
    /// The larger.
    Max "max" Binary;
    /// `√x`.
    Sqrt "sqrt" Unary;
    /// `x + b²`.
    AddSquare "add_square" Binary;
    /// `x / b`.
    Div "div" Binary;
    /// The remainder of `x / b` with the sign of `x`.
    Mod "mod" Binary;
    /// `x` to the power of `b`.
    Pow "pow" Binary;
    /// `x − b`.
    Sub "sub" Binary;
    /// `|x|`.
    Abs "abs" Unary;
    /// The least integer not below `x`.
    Ceil "ceil" Unary;
    /// Cosine.
    Cos "cos" Unary;
    /// `eˣ`.
    Exp "exp" Unary;
    /// The greatest integer not above `x`.
    Floor "floor" Unary;
    /// Natural logarithm.
    Log "log" Unary;
    /// `−x`.
    Neg "neg" Unary;
    /// `1 / √x`.
    Rsqrt "rsqrt" Unary;
    /// Sine.
    Sin "sin" Unary;
    /// Tangent.
    Tan "tan" Unary;
    /// The error function.
    Erf "erf" Unary;
    /// `x`, converted to the type of `y`.
    Identity "identity" Identity;
    /// `1 / x`.
    Reciprocal "reciprocal" Unary;
    /// The angle of the point (b, x).
    Atan2 "atan2" Binary;
    /// The remainder of `x / b` with the sign of `b`.
    FloorMod "floor_mod" Binary;
    /// `max(x, 0)`, with optional clips and slope.
    ReluFwd "relu" Unary;
    /// Hyperbolic tangent.
    TanhFwd "tanh" Unary;
    /// `1 / (1 + e⁻ˣ)`.
    SigmoidFwd "sigmoid" Unary;
    /// `x` above 0, `alpha · (eˣ − 1)` below.
    EluFwd "elu" Unary;
    /// `x · Φ(x)`.
    GeluFwd "gelu" Unary;
    /// `log(1 + e^(beta·x)) / beta`.
    SoftplusFwd "softplus" Unary;
    /// `x · sigmoid(beta · x)`.
    SwishFwd "swish" Unary;
    /// GELU through a tanh.
    GeluApproxTanhFwd "gelu_approx_tanh" Unary;
    /// Derivative of relu.
    ReluBwd "relu_bwd" Backward;
    /// Derivative of tanh.
    TanhBwd "tanh_bwd" Backward;
    /// Derivative of sigmoid.
    SigmoidBwd "sigmoid_bwd" Backward;
    /// Derivative of elu.
    EluBwd "elu_bwd" Backward;
    /// Derivative of gelu.
    GeluBwd "gelu_bwd" Backward;
    /// Derivative of softplus.
    SoftplusBwd "softplus_bwd" Backward;
    /// Derivative of swish.
    SwishBwd "swish_bwd" Backward;
    /// Derivative of gelu_approx_tanh.
    GeluApproxTanhBwd "gelu_approx_tanh_bwd" Backward;
    /// `x = b`.
    CmpEq "cmp_eq" Compare;
    /// `x ≠ b`.
    CmpNeq "cmp_neq" Compare;
    /// `x > b`.
    CmpGt "cmp_gt" Compare;
    /// `x ≥ b`.
    CmpGe "cmp_ge" Compare;
    /// `x < b`.
    CmpLt "cmp_lt" Compare;
    /// `x ≤ b`.
    CmpLe "cmp_le" Compare;
    /// Both.
    LogicalAnd "and" LogicalBinary;
    /// Either.
    LogicalOr "or" LogicalBinary;
    /// Not.
    LogicalNot "not" LogicalUnary;
    /// The index along [`Params::axis`].
    GenIndex "gen_index" Index;
    /// `t ? x : b`.
    BinarySelect "select" Select;
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Constants of modes. An absent one has cuDNN's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// Axis of [`Mode::GenIndex`].
    pub axis: Option<i64>,
    /// Below it relu returns `lower_clip + slope · (x − lower_clip)`; default 0.
    #[serde(default, with = "super::float::optional")]
    pub relu_lower_clip: Option<f64>,
    /// Upper limit of relu; default +∞.
    #[serde(default, with = "super::float::optional")]
    pub relu_upper_clip: Option<f64>,
    /// Slope of relu below the lower clip; default 0.
    #[serde(default, with = "super::float::optional")]
    pub relu_lower_slope: Option<f64>,
    /// `alpha` of elu; default 1.
    #[serde(default, with = "super::float::optional")]
    pub elu_alpha: Option<f64>,
    /// `beta` of softplus; default 1.
    #[serde(default, with = "super::float::optional")]
    pub softplus_beta: Option<f64>,
    /// `beta` of swish; default 1.
    #[serde(default, with = "super::float::optional")]
    pub swish_beta: Option<f64>,
}
