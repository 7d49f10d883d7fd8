//! Types that closures see: traced values with Rust's arithmetic.
//!
//! A traced value cannot be branched on, because it is no `bool`. Values of two traces cannot be mixed, because each trace has its own lifetime:
//!
//! ```compile_fail,E0277
//! use sdpa_core::expr::Trace;
//! Trace::of_score(|score, _, _| if score > 0.0 { score } else { -score });
//! ```
//! ```compile_fail
//! use sdpa_core::expr::Trace;
//! Trace::of_score(|outer, _, _| {
//!     let _ = Trace::of_score(|inner, _, _| inner + outer);
//!     outer
//! });
//! ```
//! ```compile_fail,E0277
//! use sdpa_core::expr::Trace;
//! Trace::of_score(|score, at, _| score + at.q);
//! ```
//!
//! The intended versions:
//!
//! ```
//! use sdpa_core::expr::Trace;
//! Trace::of_score(|score, _, _| score.gt(0.0).select(score, -score))?;
//! Trace::of_mask(|at, _| [at.q, at.batch].iter().map(|index| index.ge(2)).fold(at.k.le(at.q), |all, more| all & more))?;
//! Trace::of_score(|outer, _, _| {
//!     let _ = Trace::of_score(|inner, _, _| inner + inner);
//!     outer
//! })?;
//! Trace::of_score(|score, at, _| score + at.q.to_f32())?;
//! # Ok::<(), sdpa_core::expr::ExprErrors>(())
//! ```

use super::build::Builder;
use super::made::Made;
use super::node::{Axis, Binary, Const, NodeId, ParamId, Type, Unary};
use super::params::{Axes, Declared, ParamKind};
use super::trace::{ExprError, ExprErrors, Trace};
use crate::dtype::DType;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::ops;

/// binary32, in expressions and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F32;
/// 32-bit integers, in expressions and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct I32;
/// Booleans, in expressions and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bool;
/// binary16 in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F16;
/// bfloat16 in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BF16;

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::F32 {}
    impl Sealed for super::I32 {}
    impl Sealed for super::Bool {}
    impl Sealed for super::F16 {}
    impl Sealed for super::BF16 {}

    /// Produces the compiler message that comparison operators are not traced. No type that a program can name is an `O`.
    ///
    /// The self type is that of the value, not the traced value: rustc reports the operator's message for a bound on the operator's type. Two
    /// implementations keep the operand undetermined until rustc knows it. Without them rustc would only report a missing operator.
    #[diagnostic::on_unimplemented(
        message = "comparison operators cannot be traced: they return a `bool` of Rust",
        label = "this comparison is not traced",
        note = "compare with methods: `at.k.le(at.q)` for `at.k <= at.q`, likewise `.lt`, `.gt`, `.ge`, `.eq` and `.ne`",
        note = "the result is a traced bool: combine with `&`, `|` and `!`, choose with `.select(x, y)`"
    )]
    pub trait ComparedByOperator<O> {}
    pub enum Never {}
    impl<T> ComparedByOperator<Never> for T {}
    impl<T> ComparedByOperator<[Never; 1]> for T {}
}

/// The type of a traced value: [`F32`], [`I32`] or [`Bool`].
pub trait Traced: sealed::Sealed + Copy {
    /// The corresponding Rust number type.
    type Number: Copy;
    /// The type as a value.
    const TYPE: Type;
    /// Creates a constant of this type.
    fn constant(value: Self::Number) -> Const;
}

impl Traced for F32 {
    type Number = f32;
    const TYPE: Type = Type::F32;
    fn constant(value: f32) -> Const {
        Const::f32(value)
    }
}

impl Traced for I32 {
    type Number = i32;
    const TYPE: Type = Type::I32;
    fn constant(value: i32) -> Const {
        Const::I32(value)
    }
}

impl Traced for Bool {
    type Number = bool;
    const TYPE: Type = Type::Bool;
    fn constant(value: bool) -> Const {
        Const::Bool(value)
    }
}

/// An element type of declared tensors.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the element type of a tensor in an expression",
    label = "expected one of the marker types `F32`, `F16`, `BF16`, `I32`, `Bool`",
    note = "pass `sdpa::expr::F32` instead of `DType::F32`: the marker also says which type the elements have in the expression"
)]
pub trait Stored: sealed::Sealed + Copy {
    /// The type of its elements in an expression.
    type Value: Traced;
    /// The element type as a value.
    const DTYPE: DType;
}

macro_rules! stored {
    ($($t:ident $value:ident;)*) => {
        $(impl Stored for $t {
            type Value = $value;
            const DTYPE: DType = DType::$t;
        })*
    };
}
stored! { F32 F32; F16 F32; BF16 F32; I32 I32; Bool Bool; }

/// The lifetime of one trace, which equals only itself.
type Brand<'t> = PhantomData<Cell<&'t ()>>;

/// A value of a trace under construction. Closures receive these, and arithmetic on them returns these.
///
/// It cannot be branched on. Use [`Expr::select`]: `score.gt(0.0).select(score, -score)`.
pub struct Expr<'t, T> {
    trace: &'t RefCell<Builder>,
    id: NodeId,
    brand: Brand<'t>,
    ty: PhantomData<T>,
}

impl<T> Clone for Expr<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Expr<'_, T> {}

impl<T> fmt::Debug for Expr<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Expr({})", self.id.index())
    }
}

/// An operand: a traced value of the type, or a number.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an operand of traced `{T}` arithmetic",
    label = "expected an `Expr` of `{T}`, or a number of that type",
    note = "indices and extents (`at.q`, `at.k`, `at.seq_kv`, …) are `Expr<I32>`: `score + at.q.to_f32()` adds one to a score",
    note = "`.to_i32()` rounds an `Expr<F32>` toward zero; numbers are written `1.0` beside `F32` and `1` beside `I32`"
)]
pub trait Operand<'t, T> {
    /// Returns the operand as a traced value, in the trace to which `like` belongs.
    fn expr<U>(self, like: Expr<'t, U>) -> Expr<'t, T>;
}

impl<'t, T> Operand<'t, T> for Expr<'t, T> {
    fn expr<U>(self, _like: Expr<'t, U>) -> Expr<'t, T> {
        self
    }
}

macro_rules! number_operand {
    ($($number:ident $t:ident;)*) => {
        $(impl<'t> Operand<'t, $t> for $number {
            fn expr<U>(self, like: Expr<'t, U>) -> Expr<'t, $t> {
                like.make(|b| b.konst($t::constant(self)))
            }
        })*
    };
}
number_operand! { f32 F32; i32 I32; bool Bool; }

impl<'t, T> Expr<'t, T> {
    fn make<U>(self, make: impl FnOnce(&mut Builder) -> NodeId) -> Expr<'t, U> {
        let id = make(&mut self.trace.borrow_mut());
        Expr { trace: self.trace, id, brand: PhantomData, ty: PhantomData }
    }

    fn unary<U>(self, f: Unary) -> Expr<'t, U> {
        self.make(|b| b.unary(f, self.id))
    }

    /// Applies a composed function to values of this one's type.
    fn made(self, f: Made, of: &[NodeId]) -> Expr<'t, T> {
        self.make(|b| f.make(b, of).unwrap_or(self.id))
    }

    fn binary<U>(self, f: Binary, other: impl Operand<'t, T>) -> Expr<'t, U> {
        let other = other.expr(self);
        self.make(|b| b.binary(f, self.id, other.id))
    }
}

macro_rules! methods {
    ($t:ty: $($(#[$doc:meta])* $name:ident $shape:ident $f:ident;)*) => {
        impl<'t> Expr<'t, $t> {
            $(methods!(@ $t, $(#[$doc])* $name $shape $f);)*
        }
    };
    (@ $t:ty, $(#[$doc:meta])* $name:ident unary $f:ident) => {
        $(#[$doc])*
        #[must_use]
        pub fn $name(self) -> Expr<'t, $t> {
            self.unary(Unary::$f)
        }
    };
    (@ $t:ty, $(#[$doc:meta])* $name:ident binary $f:ident) => {
        $(#[$doc])*
        #[must_use]
        pub fn $name(self, other: impl Operand<'t, $t>) -> Expr<'t, $t> {
            self.binary(Binary::$f, other)
        }
    };
    (@ $t:ty, $(#[$doc:meta])* $name:ident compare $f:ident) => {
        // These methods take `&self`: with `self` by value, method lookup on a `&Expr` would find the method of `PartialOrd` first.
        $(#[$doc])*
        #[must_use]
        pub fn $name(&self, other: impl Operand<'t, $t>) -> Expr<'t, Bool> {
            self.binary(Binary::$f, other)
        }
    };
}

methods! { F32:
    /// Returns the absolute value, `|x|`.
    abs unary Abs;
    /// Returns the square root, `√x`.
    sqrt unary Sqrt;
    /// Returns the reciprocal square root, `1 / √x`.
    rsqrt unary Rsqrt;
    /// Returns the exponential, `eˣ`.
    exp unary Exp;
    /// Returns the natural logarithm.
    log unary Log;
    /// Returns the sine of the value, in radians.
    sin unary Sin;
    /// Returns the cosine of the value, in radians.
    cos unary Cos;
    /// Returns the hyperbolic tangent.
    tanh unary Tanh;
    /// Returns the error function of the value.
    erf unary Erf;
    /// Returns the greatest integer that is not above the value.
    floor unary Floor;
    /// Returns the least integer that is not below the value.
    ceil unary Ceil;
    /// Returns the value to the power of `other`.
    pow binary Pow;
    /// Returns the smaller of the value and `other`; if one of them is NaN, the other one.
    min binary Min;
    /// Returns the larger of the value and `other`; if one of them is NaN, the other one.
    max binary Max;
    /// Returns a boolean that is true if the value is equal to `other`.
    eq compare Eq;
    /// Returns a boolean that is true if the value is not equal to `other`.
    ne compare Ne;
    /// Returns a boolean that is true if the value is less than `other`.
    lt compare Lt;
    /// Returns a boolean that is true if the value is less than or equal to `other`.
    le compare Le;
    /// Returns a boolean that is true if the value is greater than `other`.
    gt compare Gt;
    /// Returns a boolean that is true if the value is greater than or equal to `other`.
    ge compare Ge;
}

methods! { I32:
    /// Returns the absolute value, `|x|`.
    abs unary Abs;
    /// Returns the smaller of the value and `other`.
    min binary Min;
    /// Returns the larger of the value and `other`.
    max binary Max;
    /// Returns a boolean that is true if the value is equal to `other`.
    eq compare Eq;
    /// Returns a boolean that is true if the value is not equal to `other`.
    ne compare Ne;
    /// Returns a boolean that is true if the value is less than `other`.
    lt compare Lt;
    /// Returns a boolean that is true if the value is less than or equal to `other`.
    le compare Le;
    /// Returns a boolean that is true if the value is greater than `other`.
    gt compare Gt;
    /// Returns a boolean that is true if the value is greater than or equal to `other`.
    ge compare Ge;
}

impl<'t> Expr<'t, F32> {
    /// Rounds toward zero. A value outside the range of i32 becomes the nearest i32, and NaN becomes 0.
    #[must_use]
    pub fn to_i32(self) -> Expr<'t, I32> {
        self.unary(Unary::ToI32)
    }

    /// Limits the value to `low` and `high`.
    #[must_use]
    pub fn clamp(self, low: impl Operand<'t, F32>, high: impl Operand<'t, F32>) -> Expr<'t, F32> {
        let (low, high) = (low.expr(self), high.expr(self));
        self.made(Made::Clamp, &[self.id, low.id, high.id])
    }

    /// Returns the square, `x²`.
    #[must_use]
    pub fn square(self) -> Expr<'t, F32> {
        self.made(Made::Square, &[self.id])
    }

    /// Returns `1 / (1 + e⁻ˣ)`.
    #[must_use]
    pub fn sigmoid(self) -> Expr<'t, F32> {
        self.made(Made::Sigmoid, &[self.id])
    }
}

impl<'t> Expr<'t, I32> {
    /// Limits the value to `low` and `high`.
    #[must_use]
    pub fn clamp(self, low: impl Operand<'t, I32>, high: impl Operand<'t, I32>) -> Expr<'t, I32> {
        let (low, high) = (low.expr(self), high.expr(self));
        self.made(Made::Clamp, &[self.id, low.id, high.id])
    }

    /// Returns the square, `x²`.
    #[must_use]
    pub fn square(self) -> Expr<'t, I32> {
        self.made(Made::Square, &[self.id])
    }

    /// Converts to f32. The conversion is exact for magnitudes up to 2²⁴.
    #[must_use]
    pub fn to_f32(self) -> Expr<'t, F32> {
        self.unary(Unary::ToF32)
    }
}

impl<'t> Expr<'t, Bool> {
    /// Returns `x` where this boolean is true, and `y` elsewhere. One of them must be a traced value, or [`Params::constant`].
    #[must_use]
    pub fn select<T: Traced>(self, x: impl Operand<'t, T>, y: impl Operand<'t, T>) -> Expr<'t, T> {
        let (x, y) = (x.expr(self), y.expr(self));
        self.make(|b| b.select(self.id, x.id, y.id))
    }
}

macro_rules! operators {
    ($($t:ident $number:ident: $($op:ident $method:ident $f:ident),*;)*) => {
        $($(
            impl<'t, O: Operand<'t, $t>> ops::$op<O> for Expr<'t, $t> {
                type Output = Expr<'t, $t>;
                fn $method(self, other: O) -> Expr<'t, $t> {
                    self.binary(Binary::$f, other)
                }
            }

            impl<'t> ops::$op<Expr<'t, $t>> for $number {
                type Output = Expr<'t, $t>;
                fn $method(self, other: Expr<'t, $t>) -> Expr<'t, $t> {
                    self.expr(other).binary(Binary::$f, other)
                }
            }
        )*)*
    };
}
operators! {
    F32 f32: Add add Add, Sub sub Sub, Mul mul Mul, Div div Div, Rem rem Mod;
    I32 i32: Add add Add, Sub sub Sub, Mul mul Mul, Div div Div, Rem rem Mod;
    Bool bool: BitAnd bitand And, BitOr bitor Or;
}

// These impls do not make comparison operators usable: no type satisfies their bounds, so the compiler prints the bounds' explanation.
impl<T: sealed::ComparedByOperator<O>, O> PartialEq<O> for Expr<'_, T> {
    fn eq(&self, _: &O) -> bool {
        false
    }
}

impl<T: sealed::ComparedByOperator<O>, O> PartialOrd<O> for Expr<'_, T> {
    fn partial_cmp(&self, _: &O) -> Option<std::cmp::Ordering> {
        None
    }
}

impl<'t> ops::Neg for Expr<'t, F32> {
    type Output = Expr<'t, F32>;
    fn neg(self) -> Expr<'t, F32> {
        self.unary(Unary::Neg)
    }
}

impl<'t> ops::Neg for Expr<'t, I32> {
    type Output = Expr<'t, I32>;
    fn neg(self) -> Expr<'t, I32> {
        self.unary(Unary::Neg)
    }
}

impl<'t> ops::Not for Expr<'t, Bool> {
    type Output = Expr<'t, Bool>;
    fn not(self) -> Expr<'t, Bool> {
        self.unary(Unary::Not)
    }
}

/// The position of a score: the indices of its batch entry, head, query and key, and the extents of these axes. All are i32.
#[derive(Clone, Copy, Debug)]
pub struct At<'t> {
    /// Index of the batch entry.
    pub batch: Expr<'t, I32>,
    /// Index of the query head, also with GQA.
    pub head: Expr<'t, I32>,
    /// Index of the query.
    pub q: Expr<'t, I32>,
    /// Index of the key.
    pub k: Expr<'t, I32>,
    /// Number of batch entries.
    pub batches: Expr<'t, I32>,
    /// Number of query heads. Extents are constants of a problem, so a closure that reads one needs a new kernel for each value.
    pub heads_q: Expr<'t, I32>,
    /// Number of queries.
    pub seq_q: Expr<'t, I32>,
    /// Number of keys.
    pub seq_kv: Expr<'t, I32>,
}

/// Declares parameters, whose values each call passes by name.
#[derive(Clone, Copy, Debug)]
pub struct Params<'t> {
    trace: &'t RefCell<Builder>,
    brand: Brand<'t>,
}

impl<'t> Params<'t> {
    fn make<T>(self, make: impl FnOnce(&mut Builder) -> NodeId) -> Expr<'t, T> {
        let id = make(&mut self.trace.borrow_mut());
        Expr { trace: self.trace, id, brand: PhantomData, ty: PhantomData }
    }

    /// Declares a scalar: one f32, with a `default` for calls that do not name it. A new value at a later call needs no new kernel.
    #[must_use]
    pub fn scalar(self, name: &str, default: f32) -> Expr<'t, F32> {
        self.make(|b| b.param(Declared::scalar(name, default)))
    }

    /// Declares a dense tensor over `axes`, and returns its element at the position of the score. Its shape is (batch, heads_q, seq_q,
    /// seq_kv), with extent 1 for every axis that is not in `axes`.
    #[must_use]
    pub fn tensor<S: Stored>(self, name: &str, axes: impl Into<Axes>, _dtype: S) -> Expr<'t, S::Value> {
        let kind = ParamKind::Tensor { axes: axes.into(), dtype: S::DTYPE };
        self.make(|b| b.param(Declared { name: name.to_owned(), kind, default: None }))
    }

    /// Declares a dense table, a tensor with its own extents, which [`Table::at`] reads at computed positions. It has one to four
    /// extents, the last one innermost, and fewer than 2³¹ elements.
    ///
    /// ```
    /// use sdpa_core::expr::{F32, Trace};
    ///
    /// // A bias for each head and each distance up to 128; farther away the last one of that side.
    /// let relative = Trace::of_score(|score, at, p| {
    ///     let bias = p.table("rel", [8, 257], F32);
    ///     score + bias.at([at.head, (at.k - at.q + 128).clamp(0, 256)])
    /// })?;
    /// assert_eq!(relative.to_string().parse::<Trace>()?, relative);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn table<S: Stored, const N: usize>(self, name: &str, extents: [i64; N], _dtype: S) -> Table<'t, S::Value> {
        let mut builder = self.trace.borrow_mut();
        let table = builder.table(name, &extents, S::DTYPE);
        Table { trace: self.trace, table, brand: PhantomData, ty: PhantomData }
    }

    /// Returns an f32 number as a traced value.
    #[must_use]
    pub fn constant(self, value: f32) -> Expr<'t, F32> {
        self.make(|b| b.f32(value))
    }
}

/// A declared table, read at computed positions.
#[derive(Clone, Copy, Debug)]
pub struct Table<'t, T> {
    trace: &'t RefCell<Builder>,
    table: ParamId,
    brand: Brand<'t>,
    ty: PhantomData<T>,
}

impl<'t, T> Table<'t, T> {
    /// Returns the element at one index per extent. Every executor clamps each index to its extent. A single index is a position in
    /// memory order, for a table of any rank. The derivative along an index is 0; the gradient of the element is added to the gradient of
    /// the table.
    #[must_use]
    pub fn at<const N: usize>(self, indices: [Expr<'t, I32>; N]) -> Expr<'t, T> {
        let id = self.trace.borrow_mut().read_at(self.table, &indices.map(|index| index.id));
        Expr { trace: self.trace, id, brand: PhantomData, ty: PhantomData }
    }
}

/// Runs a closure over a new trace.
fn trace<T, F>(f: F) -> Result<Trace, Vec<ExprError>>
where
    F: for<'t> FnOnce([Expr<'t, F32>; 2], At<'t>, Params<'t>) -> Expr<'t, T>,
{
    let builder = RefCell::new(Builder::new());
    let root = {
        let p = Params { trace: &builder, brand: PhantomData };
        let index = |axis| p.make(|b| b.index(axis));
        let extent = |axis| p.make(|b| b.extent(axis));
        let at = At {
            batch: index(Axis::Batch),
            head: index(Axis::Head),
            q: index(Axis::Q),
            k: index(Axis::K),
            batches: extent(Axis::Batch),
            heads_q: extent(Axis::Head),
            seq_q: extent(Axis::Q),
            seq_kv: extent(Axis::K),
        };
        f([p.make(Builder::score), p.make(Builder::upstream)], at, p).id
    };
    builder.into_inner().finish(&[root])
}

impl Trace {
    /// Traces a function of a score.
    ///
    /// # Errors
    /// Returns every invalid declaration of a parameter.
    pub fn of_score<F>(f: F) -> Result<Trace, ExprErrors>
    where
        F: for<'t> FnOnce(Expr<'t, F32>, At<'t>, Params<'t>) -> Expr<'t, F32>,
    {
        trace::<F32, _>(|[score, _], at, p| f(score, at, p)).map_err(ExprErrors)
    }

    /// Traces a gradient written by hand: a function of the upstream gradient and of the unmodified score, in this order.
    ///
    /// # Errors
    /// Fails as [`Trace::of_score`] does.
    pub fn of_gradient<F>(f: F) -> Result<Trace, ExprErrors>
    where
        F: for<'t> FnOnce(Expr<'t, F32>, Expr<'t, F32>, At<'t>, Params<'t>) -> Expr<'t, F32>,
    {
        trace::<F32, _>(|[score, upstream], at, p| f(upstream, score, at, p)).map_err(ExprErrors)
    }

    /// Traces a mask: `true` where the query attends to the key.
    ///
    /// # Errors
    /// Fails as [`Trace::of_score`] does.
    pub fn of_mask<F>(f: F) -> Result<Trace, ExprErrors>
    where
        F: for<'t> FnOnce(At<'t>, Params<'t>) -> Expr<'t, Bool>,
    {
        trace::<Bool, _>(|_, at, p| f(at, p)).map_err(ExprErrors)
    }
}
