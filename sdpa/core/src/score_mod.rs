//! Score_mods: functions that modify a score before the softmax.
//!
//! A closure runs once, when the [`ScoreMod`] is made, and is recorded as a trace. Executors differentiate the trace and run it. A score_mod combines
//! with every mask and with other score_mods:
//!
//! ```
//! use sdpa_core::{AttentionSpec, DType, Layout, Mask, ScoreMod, Shape};
//! use sdpa_core::expr::{Axis, F32};
//!
//! // tanh(score / cap) · cap, with a bound that can be changed at every call.
//! let softcap = ScoreMod::new("softcap", |score, _, p| {
//!     let cap = p.scalar("cap", 30.0);
//!     (score / cap).tanh() * cap
//! })?;
//! let decay = ScoreMod::new("decay", |score, at, p| score - p.tensor("rate", [Axis::Head], F32) * (at.q - at.k).abs().to_f32())?;
//!
//! let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
//! let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).score_mod(softcap.then(decay)).mask(Mask::causal());
//! let names: Vec<String> = spec.validate()?.params().iter().map(|p| p.name.clone()).collect();
//! assert_eq!(names, ["cap", "rate"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The order
//!
//! `q·kᵀ` → `attn_scale` → score_mods in the given order → masks → softmax. Masks are applied last, as −∞, so no score_mod can undo one.

use crate::expr::{At, Builder, Expr, ExprError, ExprErrors, F32, Inputs, NodeId, Params, Trace, Type};
use crate::library::{self, ParseError};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A function that modifies a score before the softmax, or several applied in order.
///
/// Two score_mods are equal if their traces are equal. Names and default values of scalars do not count.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScoreMod {
    name: String,
    /// Each stage has one root, the score, or two, with the gradient written by hand.
    stages: Vec<Arc<Trace>>,
}

impl PartialEq for ScoreMod {
    fn eq(&self, other: &ScoreMod) -> bool {
        self.stages == other.stages
    }
}

impl Eq for ScoreMod {}

impl std::hash::Hash for ScoreMod {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.stages.hash(state);
    }
}

impl ScoreMod {
    /// Traces a closure into a score_mod. The closure receives the scaled score and its position, and declares parameters.
    ///
    /// # Errors
    /// Returns every invalid declaration of a parameter.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa_core::ScoreMod;
    /// use sdpa_core::expr::{Axis, F32};
    /// // A slope for each head, bound at each call.
    /// let biased = ScoreMod::new("biased", |score, at, p| {
    ///     let slope = p.tensor("slope", [Axis::Head], F32);
    ///     score + slope * (at.k - at.q).to_f32()
    /// })?;
    /// assert_eq!(biased.name(), "biased");
    /// # Ok::<(), sdpa_core::ExprErrors>(())
    /// ```
    pub fn new<F>(name: &str, f: F) -> Result<ScoreMod, ExprErrors>
    where
        F: for<'t> FnOnce(Expr<'t, F32>, At<'t>, Params<'t>) -> Expr<'t, F32>,
    {
        Ok(ScoreMod::of(name, Trace::of_score(f)?))
    }

    pub(crate) fn of(name: &str, trace: Trace) -> ScoreMod {
        ScoreMod { name: name.to_owned(), stages: vec![Arc::new(trace)] }
    }

    /// Sets a gradient written by hand, which replaces the derived one. It is a function of the upstream gradient (of the loss by the modified score)
    /// and of the unmodified score, and may declare parameters. The CPU executor compares it with the derived gradient in debug builds.
    ///
    /// ```
    /// use sdpa_core::ScoreMod;
    /// let double = ScoreMod::new("double", |score, _, _| score * 2.0)?.with_bprop(|grad, _score, _, _| grad * 2.0)?;
    /// # Ok::<(), sdpa_core::ExprErrors>(())
    /// ```
    ///
    /// # Errors
    /// Returns every declaration of a parameter that is invalid or differs from the function's declaration of the same name.
    pub fn with_bprop<F>(self, f: F) -> Result<ScoreMod, ExprErrors>
    where
        F: for<'t> FnOnce(Expr<'t, F32>, Expr<'t, F32>, At<'t>, Params<'t>) -> Expr<'t, F32>,
    {
        let mut b = Builder::new();
        let mut value = b.score();
        for stage in &self.stages {
            value = b.inline(stage, Inputs { score: Some(value), ..Inputs::default() })[0];
        }
        let gradient = b.inline(&Trace::of_gradient(f)?, Inputs::default())[0];
        Ok(ScoreMod { name: self.name, stages: vec![Arc::new(b.finish(&[value, gradient]).map_err(ExprErrors)?)] })
    }

    /// Returns the score_mod that applies this one, and then `other` to the result.
    ///
    /// ```
    /// use sdpa_core::library::{alibi, softcap};
    /// let both = softcap(30.0).then(alibi());
    /// assert_eq!(both.stages().len(), 2);
    /// ```
    #[must_use]
    pub fn then(mut self, other: ScoreMod) -> ScoreMod {
        self.name = format!("{}, {}", self.name, other.name);
        self.stages.extend(other.stages);
        self
    }

    /// Renames a parameter, so that one function can be used twice with different values.
    ///
    /// # Errors
    /// Fails if the name `to` is invalid, or if another parameter has it.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa_core::library::softcap;
    /// let twice = softcap(50.0).rename("cap", "outer")?.then(softcap(30.0));
    /// assert!(twice.stages()[0].find("outer").is_some());
    /// # Ok::<(), sdpa_core::ExprErrors>(())
    /// ```
    pub fn rename(mut self, from: &str, to: &str) -> Result<ScoreMod, ExprErrors> {
        let declares = |name: &str| self.stages.iter().any(|stage| stage.find(name).is_some());
        if from != to && declares(from) && declares(to) {
            return Err(ExprErrors(vec![ExprError::Redeclared { name: to.to_owned() }]));
        }
        self.stages = self.stages.iter().map(|stage| stage.rename(from, to).map(Arc::new)).collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// Replaces the trace of each stage by what `to` makes of it.
    pub(crate) fn map_stages(&self, mut to: impl FnMut(&Trace) -> Result<Trace, ExprErrors>) -> Result<ScoreMod, ExprErrors> {
        let stages = self.stages.iter().map(|stage| to(stage).map(Arc::new)).collect::<Result<_, _>>()?;
        Ok(ScoreMod { name: self.name.clone(), stages })
    }

    pub(crate) fn named(mut self, name: &str) -> ScoreMod {
        name.clone_into(&mut self.name);
        self
    }

    /// Returns the name that the caller gave.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the traces, in order of application. A trace has one root (output), the modified score. If the gradient was written by
    /// hand, it is the trace's second root.
    pub fn stages(&self) -> &[Arc<Trace>] {
        &self.stages
    }
}

impl fmt::Display for ScoreMod {
    /// Writes a notation that parses: a library name, or the text of each stage, with a line `then` between them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if library::score_mod(&self.name).is_some_and(|known| known.is_ok_and(|known| known.same_defaults(self))) {
            return f.write_str(&self.name);
        }
        for (n, stage) in self.stages.iter().enumerate() {
            write!(f, "{}{stage}", if n == 0 { "" } else { "\nthen\n" })?;
        }
        Ok(())
    }
}

impl ScoreMod {
    /// Compares including the defaults of scalars.
    fn same_defaults(&self, other: &ScoreMod) -> bool {
        let defaults = |m: &ScoreMod| m.stages.iter().flat_map(|s| s.params()).map(|p| p.default.map(f32::to_bits)).collect::<Vec<_>>();
        self == other && defaults(self) == defaults(other)
    }
}

impl FromStr for ScoreMod {
    type Err = ParseError;

    /// Parses a library name ([`crate::library`]), or the text of a trace: one root, or two for a gradient by hand. A line `then` separates stages.
    fn from_str(text: &str) -> Result<ScoreMod, ParseError> {
        let mut stages: Vec<String> = vec![String::new()];
        for line in text.split_inclusive('\n') {
            match stages.last_mut() {
                Some(stage) if line.trim() != "then" => stage.push_str(line),
                Some(_) | None => stages.push(String::new()),
            }
        }
        let one = |text: &String| match library::score_mod(text.trim()) {
            Some(known) => known,
            None => Ok(ScoreMod::of("text", library::trace(text, "score_mod", Type::F32, 2)?)),
        };
        let mut read = stages.iter().map(one);
        let first = read.next().unwrap_or_else(|| one(&String::new()))?;
        read.try_fold(first, |mods, next| Ok(mods.then(next?)))
    }
}

/// Composes the score_mods of a problem into one function of the scaled score.
///
/// # Errors
/// Fails if two score_mods declare a parameter of the same name differently.
pub(crate) fn compose(mods: &[ScoreMod], extents: [i64; 4]) -> Result<Trace, ExprErrors> {
    let mut b = Builder::new();
    let values = forward(&mut b, mods, extents);
    let last = values.last().copied().unwrap_or_else(|| b.score());
    b.finish(&[last]).map_err(ExprErrors)
}

/// Returns the input of each stage, and the output of the last.
fn forward(b: &mut Builder, mods: &[ScoreMod], extents: [i64; 4]) -> Vec<NodeId> {
    let mut values = vec![b.score()];
    for stage in mods.iter().flat_map(|m| &m.stages) {
        let score = values.last().copied();
        values.push(b.inline(stage, Inputs { score, extents: Some(extents), ..Inputs::default() })[0]);
    }
    values
}

/// The gradients of all score_mods of a problem, as one trace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Gradient {
    /// A trace of functions of the scaled score and the upstream gradient. Its first roots are the modified score, the gradient along the
    /// scaled score, and one gradient for each parameter of `wrt`.
    pub trace: Trace,
    /// Names of the parameters whose gradients are computed.
    pub wrt: Vec<String>,
    /// The reads of those parameters of `wrt` that are tables (tensors read at computed positions). The root of such a parameter in
    /// `trace` is the constant 0: its gradient is the sum over these reads.
    pub reads: Vec<TableRead>,
}

/// A read of a table whose gradient is computed: the gradient `value` is added to the gradient of the element at `place`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct TableRead {
    /// Index into [`Gradient::wrt`] of the table's name.
    pub wrt: usize,
    /// Index of the root of [`Gradient::trace`] that is the gradient of the value that was read.
    pub value: usize,
    /// Index of the root of [`Gradient::trace`] that is the position of the element: i32, in memory order, to be clamped to the table
    /// with [`ParamKind::within`](crate::expr::ParamKind::within).
    pub place: usize,
}

/// Why a gradient cannot be derived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoGradient {
    #[error(transparent)]
    Expr(#[from] ExprErrors),
    #[error("the custom gradient of {0} does not cover parameters; request no gradient of its parameters")]
    ByHand(String),
}

/// Derives the gradients of the composed score_mods with respect to the score and to `wrt`, which are declared floating-point parameters.
pub(crate) fn gradient(mods: &[ScoreMod], extents: [i64; 4], wrt: &[String]) -> Result<Gradient, NoGradient> {
    let mut b = Builder::new();
    let values = forward(&mut b, mods, extents);
    let names: Vec<String> = b.params().iter().map(|p| p.name.clone()).collect();
    let params: Vec<Option<NodeId>> = {
        let of_axes = |b: &Builder, n: &usize| b.params()[*n].kind.extents().len() == 0;
        let place = |b: &Builder, name: &String| names.iter().position(|n| n == name).filter(|n| of_axes(b, n));
        wrt.iter().map(|name| place(&b, name).map(|n| b.param_at(n))).collect()
    };
    let mut sums: Vec<Option<NodeId>> = vec![None; wrt.len()];
    // For each value that is read from a table: the index of the table in `wrt`, the position that is read, and the value.
    let tables: Vec<(usize, NodeId, NodeId)> =
        b.reads().filter_map(|(p, place, value)| Some((wrt.iter().position(|n| *n == names[p])?, place, value))).collect();
    let mut of_reads: Vec<Option<NodeId>> = vec![None; tables.len()];
    let mut upstream = b.upstream();
    let stages: Vec<(&str, &Arc<Trace>)> = mods.iter().flat_map(|m| m.stages.iter().map(move |s| (m.name(), s))).collect();
    for (n, (name, stage)) in stages.into_iter().enumerate().rev() {
        let (before, after) = (values[n], values[n + 1]);
        let by_hand = stage.roots().len() > 1;
        let declares = |name: &String| stage.find(name).is_some();
        if by_hand && wrt.iter().any(declares) {
            return Err(NoGradient::ByHand(name.to_owned()));
        }
        if by_hand {
            let inputs = Inputs { score: Some(before), upstream: Some(upstream), extents: Some(extents), ..Inputs::default() };
            upstream = b.inline(stage, inputs)[1];
            continue;
        }
        let along: Vec<NodeId> =
            std::iter::once(before).chain(params.iter().flatten().copied()).chain(tables.iter().map(|(.., value)| *value)).collect();
        let mut found = b.gradient(after, upstream, &along).into_iter();
        let along_score = found.next().flatten();
        for (sum, param) in sums.iter_mut().zip(&params) {
            let Some(param) = param else { continue };
            // If this stage's input is the parameter itself, add nothing here: the earlier stages contribute this part of the gradient.
            let own = found.next().flatten().filter(|_| *param != before);
            *sum = both(&mut b, *sum, own);
        }
        for (sum, (.., value)) in of_reads.iter_mut().zip(&tables) {
            let own = found.next().flatten().filter(|_| *value != before);
            *sum = both(&mut b, *sum, own);
        }
        upstream = along_score.unwrap_or_else(|| b.f32(0.0));
    }
    let value = values.last().copied().unwrap_or_else(|| b.score());
    let mut roots = vec![value, upstream];
    roots.extend(sums.into_iter().map(|sum| sum.unwrap_or_else(|| b.f32(0.0))).collect::<Vec<_>>());
    let mut reads = Vec::new();
    for ((wrt, place, _), sum) in tables.into_iter().zip(of_reads) {
        if let Some(sum) = sum {
            reads.push(TableRead { wrt, value: roots.len(), place: roots.len() + 1 });
            roots.extend([sum, place]);
        }
    }
    Ok(Gradient { trace: b.finish(&roots).map_err(ExprErrors)?, wrt: wrt.to_vec(), reads })
}

/// Returns the sum of the present terms.
fn both(b: &mut Builder, sum: Option<NodeId>, more: Option<NodeId>) -> Option<NodeId> {
    match (sum, more) {
        (Some(sum), Some(more)) => Some(b.binary(crate::expr::Binary::Add, sum, more)),
        (sum, more) => sum.or(more),
    }
}
