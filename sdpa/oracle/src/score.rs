//! Score_mods, and bounds on their error in f32.

use crate::tolerance::{F32_ROUNDOFF, sum_of};
use crate::{Place, Problem};

/// The value of an expression, with a bound on the error of evaluating it in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rough {
    /// The exact value of the expression.
    pub value: f64,
    /// The bound on the error of the f32 evaluation, to first order.
    pub error: f64,
}

impl Rough {
    /// Creates a number without error.
    #[must_use]
    pub fn exact(value: f64) -> Rough {
        Rough { value, error: 0.0 }
    }

    /// Rounds to the nearest f32 if the number is so large that its rounding may exceed 1, such as a score with −1e9 added. Every
    /// executor rounds there, so the error is the distance between two f32 numbers: the nearest to the number, and the nearest to the
    /// number with its error. Returns `None` for smaller numbers.
    #[must_use]
    pub fn nearest(self) -> Option<Rough> {
        let nearest = |x: f64| f64::from(x as f32);
        let value = nearest(self.value);
        let error = [self.error, -self.error].map(|off| (nearest(self.value + off) - value).abs());
        (F32_ROUNDOFF * self.value.abs() > 1.0).then_some(Rough { value, error: error[0].max(error[1]) })
    }
}

/// A score_mod as the oracle evaluates it.
pub trait Modify: Sync {
    /// Returns the modified score at a position. Its error includes the effect of the error of `score`, and the function's own roundings.
    /// `scratch` is reusable memory.
    fn value(&self, score: Rough, at: Place, scratch: &mut Vec<Rough>) -> Rough;

    /// Returns the derivatives with their errors: with respect to the score, and then to each parameter whose gradient is requested.
    fn slopes(&self, score: Rough, at: Place, scratch: &mut Vec<Rough>) -> Vec<Rough>;

    /// Returns the derivatives of [`Modify::slopes`] multiplied by `upstream`. It is called if one of these products is not finite. The
    /// product is 0, not NaN, for a parameter on which the function does not depend.
    fn passed_on(&self, score: f64, upstream: f64, at: Place) -> Vec<f64> {
        self.slopes(Rough::exact(score), at, &mut Vec::new()).iter().map(|slope| slope.value * upstream).collect()
    }

    /// Returns the extents (batch, heads_q, seq_q, seq_kv) of each parameter whose gradient is requested. They are 1 along axes that the
    /// parameter does not span.
    fn along(&self) -> Vec<[usize; 4]> {
        Vec::new()
    }

    /// Returns whether parameter `which` is a table, which has its own extents and is read at computed indices.
    fn is_table(&self, _which: usize) -> bool {
        false
    }

    /// Returns the table elements that this position reads: the index of the parameter and the offset of the element. Their derivatives follow those of the
    /// parameters in this order. The derivatives of the tables themselves are 0.
    fn reads(&self, _score: f64, _at: Place) -> Vec<(usize, usize)> {
        Vec::new()
    }
}

/// A function of a score and of its position, in f64.
pub type Real<'a> = &'a (dyn Fn(f64, Place) -> f64 + Sync);

/// A caller's score_mod and mask as closures. A field that is `None` has no effect.
#[derive(Clone, Copy, Default)]
pub struct Closures<'a> {
    /// Returns the modified score.
    pub modify: Option<Real<'a>>,
    /// Returns the derivative of the modified score with respect to the score.
    pub slope: Option<Real<'a>>,
    /// Returns a bound on the executor's own roundings of the modified score, in units of the f32 roundoff. It excludes roundings that
    /// are relative to the size of the modified score.
    pub rounding: Option<Real<'a>>,
    /// Returns whether the query of a position attends to its key. The masks of the problem apply in addition.
    pub keep: Option<&'a (dyn Fn(Place) -> bool + Sync)>,
    /// The parameters of the score_mod whose gradients are requested.
    pub along: &'a [Along<'a>],
}

/// A parameter of a score_mod whose gradient is requested.
#[derive(Clone, Copy)]
pub struct Along<'a> {
    /// Returns the derivative of the modified score with respect to the element that the position reads.
    pub slope: Real<'a>,
    /// The extents (batch, heads_q, seq_q, seq_kv) of the parameter, 1 along axes that it does not span. A table has its own extents.
    pub dims: [usize; 4],
    /// For a table, returns the offset of the element that a position reads.
    pub read: Option<&'a (dyn Fn(Place) -> usize + Sync)>,
}

impl Closures<'_> {
    /// Adds the score_mod and the mask of these closures to `problem`, and passes the result to `call`.
    pub fn with<T>(&self, problem: &Problem<'_>, call: impl FnOnce(&Problem<'_>) -> T) -> T {
        let modified = Modified { closures: self, relative: sum_of(problem.shape[5]) };
        let modify = self.modify.is_some().then_some(&modified as &dyn Modify).or(problem.modify);
        let Some(keep) = self.keep else { return call(&Problem { modify, ..*problem }) };
        let masks = [crate::Mask::Rule(Box::new(|at| keep(at) && problem.keeps(at)))];
        call(&Problem { modify, masks: &masks, ..*problem })
    }
}

/// Closures, with the relative error of a score that is a sum of many products.
struct Modified<'a> {
    closures: &'a Closures<'a>,
    relative: f64,
}

impl Modified<'_> {
    fn rounding(&self, score: f64, at: Place) -> f64 {
        self.closures.rounding.map_or(0.0, |rounding| F32_ROUNDOFF * rounding(score, at))
    }
}

impl Modify for Modified<'_> {
    fn value(&self, score: Rough, at: Place, _: &mut Vec<Rough>) -> Rough {
        let value = self.closures.modify.map_or(score.value, |modify| modify(score.value, at));
        let slope = self.closures.slope.map_or(1.0, |slope| slope(score.value, at));
        let off = score.error * slope.abs() + self.rounding(score.value, at);
        let rough = Rough { value, error: off + self.relative * value.abs() };
        Rough { value, error: off }.nearest().unwrap_or(rough)
    }

    fn slopes(&self, score: Rough, at: Place, _: &mut Vec<Rough>) -> Vec<Rough> {
        let off = score.error + self.rounding(score.value, at);
        let one = |slope: Real<'_>| {
            let value = slope(score.value, at);
            let bend = [score.value - off, score.value + off].map(|score| (slope(score, at) - value).abs());
            Rough { value, error: bend[0].max(bend[1]) }
        };
        let own = self.closures.slope.map_or(Rough::exact(1.0), one);
        let (all, is_read) = (self.closures.along, |along: &&Along<'_>| along.read.is_some());
        let of_axes = |along: &Along<'_>| if along.read.is_some() { Rough::exact(0.0) } else { one(along.slope) };
        let read = all.iter().filter(is_read).map(|along| one(along.slope));
        std::iter::once(own).chain(all.iter().map(of_axes)).chain(read).collect()
    }

    fn along(&self) -> Vec<[usize; 4]> {
        self.closures.along.iter().map(|along| along.dims).collect()
    }

    fn is_table(&self, which: usize) -> bool {
        self.closures.along[which].read.is_some()
    }

    fn reads(&self, _: f64, at: Place) -> Vec<(usize, usize)> {
        self.closures.along.iter().enumerate().filter_map(|(n, along)| along.read.map(|read| (n, read(at)))).collect()
    }
}
