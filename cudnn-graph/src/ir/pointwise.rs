//! Every pointwise mode of the backend, in one table.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The number and kind of the operands of a pointwise mode, and the kind of its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signature {
    /// `y = f(x)` on floating point numbers.
    Unary,
    /// `y = x`, converted to the type of `y`.
    Identity,
    /// `y = f(x, b)` on numbers.
    Binary,
    /// `y = (x ? b)` for a comparison `?`, a boolean or 0 / 1.
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

            /// Returns the name of the mode in printed graphs.
            pub fn name(self) -> &'static str {
                match self { $(Mode::$variant => $name,)* }
            }

            /// Returns the number and kind of the operands of the mode, and the kind of its result.
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
    /// The smaller of `x` and `b`.
    Min "min" Binary;
    /// The larger of `x` and `b`.
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
    /// Cosine of `x`.
    Cos "cos" Unary;
    /// `eˣ`.
    Exp "exp" Unary;
    /// The greatest integer not above `x`.
    Floor "floor" Unary;
    /// Natural logarithm of `x`.
    Log "log" Unary;
    /// `−x`.
    Neg "neg" Unary;
    /// `1 / √x`.
    Rsqrt "rsqrt" Unary;
    /// Sine of `x`.
    Sin "sin" Unary;
    /// Tangent of `x`.
    Tan "tan" Unary;
    /// The error function of `x`.
    Erf "erf" Unary;
    /// `x`, converted to the type of `y`.
    Identity "identity" Identity;
    /// `1 / x`.
    Reciprocal "reciprocal" Unary;
    /// The angle of the point (b, x), `atan2(x, b)`.
    Atan2 "atan2" Binary;
    /// The remainder of `x / b` with the sign of `b`.
    FloorMod "floor_mod" Binary;
    /// Relu, `max(x, 0)`, with optional clips and slope.
    ReluFwd "relu" Unary;
    /// Hyperbolic tangent of `x`.
    TanhFwd "tanh" Unary;
    /// `1 / (1 + e⁻ˣ)`.
    SigmoidFwd "sigmoid" Unary;
    /// Elu: `x` where it is above 0, `alpha · (eˣ − 1)` elsewhere.
    EluFwd "elu" Unary;
    /// GELU, `x · Φ(x)`.
    GeluFwd "gelu" Unary;
    /// Softplus, `log(1 + e^(beta·x)) / beta`.
    SoftplusFwd "softplus" Unary;
    /// Swish, `x · sigmoid(beta · x)`.
    SwishFwd "swish" Unary;
    /// GELU in its tanh approximation.
    GeluApproxTanhFwd "gelu_approx_tanh" Unary;
    /// `dy` times the derivative of relu at `x`.
    ReluBwd "relu_bwd" Backward;
    /// `dy` times the derivative of tanh at `x`.
    TanhBwd "tanh_bwd" Backward;
    /// `dy` times the derivative of sigmoid at `x`.
    SigmoidBwd "sigmoid_bwd" Backward;
    /// `dy` times the derivative of elu at `x`.
    EluBwd "elu_bwd" Backward;
    /// `dy` times the derivative of GELU at `x`.
    GeluBwd "gelu_bwd" Backward;
    /// `dy` times the derivative of softplus at `x`.
    SoftplusBwd "softplus_bwd" Backward;
    /// `dy` times the derivative of swish at `x`.
    SwishBwd "swish_bwd" Backward;
    /// `dy` times the derivative of GELU in its tanh approximation at `x`.
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
    /// `x and b`.
    LogicalAnd "and" LogicalBinary;
    /// `x or b`.
    LogicalOr "or" LogicalBinary;
    /// `not x`.
    LogicalNot "not" LogicalUnary;
    /// The index along [`Params::axis`].
    GenIndex "gen_index" Index;
    /// `x` where `t` is true, else `b`.
    BinarySelect "select" Select;
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Constants of pointwise modes. `None` means cuDNN's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// The axis of [`Mode::GenIndex`].
    pub axis: Option<i64>,
    /// Lower clip of relu; default 0. For smaller `x` it returns `lower_clip + slope · (x − lower_clip)`.
    #[serde(default, with = "super::float::optional")]
    pub relu_lower_clip: Option<f64>,
    /// Upper limit of the result of relu; default +∞.
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
