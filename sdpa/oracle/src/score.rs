//! What becomes of a score, and how far f32 may be from it.

use crate::tolerance::{F32_ROUNDOFF, sum_of};
use crate::{Place, Problem};

/// A number and how far f32 may be from it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rough {
    /// The number.
    pub value: f64,
    /// How far f32 may be from it, to first order.
    pub error: f64,
}

impl Rough {
    /// A number that is known.
    #[must_use]
    pub fn exact(value: f64) -> Rough {
        Rough { value, error: 0.0 }
    }

    /// A sum of f32 that is so large that its rounding may exceed 1, such as a score with −1e9 added, as the nearest f32. Every executor rounds
    /// it there, so it may only be off by what the nearest f32 is of a sum that is off. `None` of smaller numbers.
    #[must_use]
    pub fn nearest(self) -> Option<Rough> {
        let nearest = |x: f64| f64::from(x as f32);
        let value = nearest(self.value);
        let error = [self.error, -self.error].map(|off| (nearest(self.value + off) - value).abs());
        (F32_ROUNDOFF * self.value.abs() > 1.0).then_some(Rough { value, error: error[0].max(error[1]) })
    }
}

/// A function of scores.
pub trait Modify: Sync {
    /// The modified score, of one that may be off: by what that makes of it, and by the function's own roundings. `scratch` is memory.
    fn value(&self, score: Rough, at: Place, scratch: &mut Vec<Rough>) -> Rough;

    /// Its derivatives, in the same way: by the score, and by each parameter whose gradient is wanted.
    fn slopes(&self, score: Rough, at: Place, scratch: &mut Vec<Rough>) -> Vec<Rough>;

    /// Those derivatives times what comes in from behind, where a product is no finite number: what a function does not look at passes
    /// nothing on.
    fn passed_on(&self, score: f64, upstream: f64, at: Place) -> Vec<f64> {
        self.slopes(Rough::exact(score), at, &mut Vec::new()).iter().map(|slope| slope.value * upstream).collect()
    }

    /// The extents (batch, heads_q, seq_q, seq_kv) of each parameter whose gradient is wanted, 1 along axes that it does not span.
    fn along(&self) -> Vec<[usize; 4]> {
        Vec::new()
    }

    /// Whether that parameter is a table, of these extents alone, which is read at computed places.
    fn is_table(&self, _which: usize) -> bool {
        false
    }

    /// The places at which tables are read: which parameter, and its element. The derivatives by what is read there stand behind those of parameters, in
    /// this order; those of tables themselves are 0.
    fn reads(&self, _score: f64, _at: Place) -> Vec<(usize, usize)> {
        Vec::new()
    }
}

/// A function of a score and its place.
pub type Real<'a> = &'a (dyn Fn(f64, Place) -> f64 + Sync);

/// What a caller's own functions do with a score. Absent: nothing.
#[derive(Clone, Copy, Default)]
pub struct Closures<'a> {
    /// The modified score.
    pub modify: Option<Real<'a>>,
    /// Its derivative by the score.
    pub slope: Option<Real<'a>>,
    /// What an executor's own roundings may move the modified score by, besides those of its size, in units of a roundoff.
    pub rounding: Option<Real<'a>>,
    /// Whether the key is kept, besides what the masks say.
    pub keep: Option<&'a (dyn Fn(Place) -> bool + Sync)>,
    /// Parameters of the modification whose gradients are wanted.
    pub along: &'a [Along<'a>],
}

/// A parameter of a modification.
#[derive(Clone, Copy)]
pub struct Along<'a> {
    /// The derivative of the modified score by the element that it is made with.
    pub slope: Real<'a>,
    /// Its extents (batch, heads_q, seq_q, seq_kv), 1 along axes that it does not span; those of a table are its own.
    pub dims: [usize; 4],
    /// Of a table, the element that a score reads.
    pub read: Option<&'a (dyn Fn(Place) -> usize + Sync)>,
}

impl Closures<'_> {
    /// Calls with a problem whose scores these functions modify and whose keys they drop, besides what it says.
    pub fn with<T>(&self, problem: &Problem<'_>, call: impl FnOnce(&Problem<'_>) -> T) -> T {
        let modified = Modified { closures: self, relative: sum_of(problem.shape[5]) };
        let modify = self.modify.is_some().then_some(&modified as &dyn Modify).or(problem.modify);
        let Some(keep) = self.keep else { return call(&Problem { modify, ..*problem }) };
        let masks = [crate::Mask::Rule(Box::new(|at| keep(at) && problem.keeps(at)))];
        call(&Problem { modify, masks: &masks, ..*problem })
    }
}

/// Closures, for scores that are sums of so many products that they are off by a part of their size.
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
