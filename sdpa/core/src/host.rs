//! Calls over host memory, and their checks.

use crate::backward::BackwardProblem;
use crate::dtype::DType;
use crate::error::{SpecError, SpecErrors};
use crate::expr::Declared;
use crate::fp8::{Amax, Fp8Scales};
use crate::operand::{Direction, Operand, Side};
use crate::problem::Problem;
use crate::spec::TensorSpec;
use crate::statistic::Statistic;
use crate::tensor::{Elements, ElementsMut, Param};
use crate::{Pages, packed, params};

/// One forward call over host memory. Start with [`HostForward::new`], then add what else the problem requires.
///
/// ```
/// use sdpa_core::{Elements, HostForward};
///
/// let (q, k, v) = (vec![0.5f32; 64], vec![0.25f32; 64], vec![2.0f32; 64]);
/// let (mut o, mut stats) = (vec![0f32; 64], vec![0f32; 8]);
/// let call = HostForward::new(&q, &k, &v, &mut o).stats(&mut stats).attn_scale(0.125);
/// assert!(matches!(call.q, Elements::F32(_)) && call.attn_scale == Some(0.125));
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct HostForward<'a> {
    /// Queries, strided as the problem says.
    pub q: Elements<'a>,
    /// Keys, strided as the problem says; for a paged problem, the page pool.
    pub k: Elements<'a>,
    /// Values, strided as the problem says; for a paged problem, the page pool.
    pub v: Elements<'a>,
    /// Output, strided as the problem says; only elements that belong to the tensor are written.
    pub o: ElementsMut<'a>,
    /// The log-sum-exp of each row: f32, (batch, heads_q, seq_q), or (total, heads_q) of a packed batch, dense. Required if the problem
    /// computes `stats`, and otherwise `None`.
    pub stats: Option<&'a mut [f32]>,
    /// The largest score of each row, in the layout of `stats`. Required if the problem computes
    /// [`row_max`](crate::AttentionSpec::row_max), and otherwise `None`.
    pub row_max: Option<&'a mut [f32]>,
    /// The sum of exponentials of each row, in the layout of `stats`. Required if the problem computes
    /// [`sum_exp`](crate::AttentionSpec::sum_exp), and otherwise `None`.
    pub sum_exp: Option<&'a mut [f32]>,
    /// Factor of the scores; must be finite. `None` means `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters. A scalar that is not named here has its default.
    pub params: &'a [Param<'a>],
    /// Destinations of amax values, one for each value that the pass computes; empty for a pass without 8-bit floats.
    pub amax: Vec<HostAmax<'a>>,
}

/// One backward call over host memory. Start with [`HostBackward::new`], then add what else the problem requires.
#[derive(Debug)]
#[non_exhaustive]
pub struct HostBackward<'a> {
    /// Queries, strided as the problem says.
    pub q: Elements<'a>,
    /// Keys, strided as the problem says.
    pub k: Elements<'a>,
    /// Values, strided as the problem says.
    pub v: Elements<'a>,
    /// Output of the forward pass, strided as the problem says.
    pub o: Elements<'a>,
    /// Gradient of the output, strided as the problem says.
    pub d_o: Elements<'a>,
    /// `stats` of the forward pass: f32, (batch, heads_q, seq_q), or (total, heads_q) of a packed batch, dense.
    pub stats: &'a [f32],
    /// Gradient of the queries, strided as the problem says; only elements that belong to the tensor are written.
    pub dq: ElementsMut<'a>,
    /// Gradient of the keys, strided as the problem says; only elements that belong to the tensor are written.
    pub dk: ElementsMut<'a>,
    /// Gradient of the values, strided as the problem says; only elements that belong to the tensor are written.
    pub dv: ElementsMut<'a>,
    /// Factor of the scores, as in the forward pass; must be finite. `None` means `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters, as in the forward pass. A scalar that is not named here has its default.
    pub params: &'a [Param<'a>],
    /// Destinations of gradients of declared parameters, one for each gradient that the problem computes.
    pub gradients: Vec<HostGradient<'a>>,
    /// Destinations of amax values, one for each value that the pass computes; empty for a pass without 8-bit floats.
    pub amax: Vec<HostAmax<'a>>,
}

/// The destination of the gradient of a declared parameter.
#[derive(Debug)]
#[non_exhaustive]
pub struct HostGradient<'a> {
    /// The name of the declared parameter whose gradient is written.
    pub name: &'a str,
    /// Memory for the gradient: dense, over the axes of the parameter, in the element type that the problem requests; one element for a
    /// scalar.
    pub data: ElementsMut<'a>,
}

/// The destination of a tensor's amax, which a call of 8-bit floats writes.
#[derive(Debug)]
#[non_exhaustive]
pub struct HostAmax<'a> {
    /// The tensor whose amax is written.
    pub of: Amax,
    /// The f32 that receives the amax.
    pub value: &'a mut f32,
}

impl<'a> HostForward<'a> {
    /// Creates a call over these operands with the default scale and no parameters, which writes only `o`.
    pub fn new(
        q: impl Into<Elements<'a>>,
        k: impl Into<Elements<'a>>,
        v: impl Into<Elements<'a>>,
        o: impl Into<ElementsMut<'a>>,
    ) -> HostForward<'a> {
        HostForward {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            o: o.into(),
            stats: None,
            row_max: None,
            sum_exp: None,
            attn_scale: None,
            params: &[],
            amax: Vec::new(),
        }
    }

    /// Sets the destination of `stats`, for a problem that [computes them](crate::AttentionSpec::with_stats).
    #[must_use]
    pub fn stats(mut self, stats: &'a mut [f32]) -> Self {
        self.stats = Some(stats);
        self
    }

    /// Sets the destination of the largest score of each row, for a problem that [computes it](crate::AttentionSpec::with_row_max).
    #[must_use]
    pub fn row_max(mut self, row_max: &'a mut [f32]) -> Self {
        self.row_max = Some(row_max);
        self
    }

    /// Sets the destination of the sum of exponentials of each row, for a problem that [computes it](crate::AttentionSpec::with_sum_exp).
    #[must_use]
    pub fn sum_exp(mut self, sum_exp: &'a mut [f32]) -> Self {
        self.sum_exp = Some(sum_exp);
        self
    }

    /// Sets all row statistics, in the order of [`Statistic::ALL`]: `None` for each that the problem does not compute.
    #[must_use]
    pub fn statistics(mut self, [stats, row_max, sum_exp]: [Option<&'a mut [f32]>; 3]) -> Self {
        (self.stats, self.row_max, self.sum_exp) = (stats, row_max, sum_exp);
        self
    }

    /// Sets the factor of the scores; `None` for `1 / √dim_qk`.
    #[must_use]
    pub fn attn_scale(mut self, attn_scale: impl Into<Option<f32>>) -> Self {
        self.attn_scale = attn_scale.into();
        self
    }

    /// Sets the values of declared parameters.
    #[must_use]
    pub fn params(mut self, params: &'a [Param<'a>]) -> Self {
        self.params = params;
        self
    }

    /// Adds destinations of amax values, for a pass of 8-bit floats.
    #[must_use]
    pub fn amax(mut self, amax: impl IntoIterator<Item = HostAmax<'a>>) -> Self {
        self.amax.extend(amax);
        self
    }
}

impl<'a> HostBackward<'a> {
    /// Creates a call that reads the forward pass's operands, output and `stats`, and the output's gradient `d_o`. It writes the gradients of `q`,
    /// `k` and `v`, with the default scale and no parameters.
    ///
    /// ```
    /// use sdpa_core::HostBackward;
    ///
    /// let (q, k, v, o, d_o) = (vec![0.5f32; 64], vec![0.25f32; 64], vec![2.0f32; 64], vec![2.0f32; 64], vec![1.0f32; 64]);
    /// let stats = vec![0.0; 8];
    /// let (mut dq, mut dk, mut dv) = (vec![0f32; 64], vec![0f32; 64], vec![0f32; 64]);
    /// let call = HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv)).attn_scale(0.125);
    /// assert_eq!(call.dq.len(), 64);
    /// ```
    pub fn new(
        (q, k, v): (impl Into<Elements<'a>>, impl Into<Elements<'a>>, impl Into<Elements<'a>>),
        (o, stats): (impl Into<Elements<'a>>, &'a [f32]),
        d_o: impl Into<Elements<'a>>,
        (dq, dk, dv): (impl Into<ElementsMut<'a>>, impl Into<ElementsMut<'a>>, impl Into<ElementsMut<'a>>),
    ) -> HostBackward<'a> {
        HostBackward {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            o: o.into(),
            d_o: d_o.into(),
            stats,
            dq: dq.into(),
            dk: dk.into(),
            dv: dv.into(),
            attn_scale: None,
            params: &[],
            gradients: Vec::new(),
            amax: Vec::new(),
        }
    }

    /// Sets the factor of the scores, as in the forward pass; `None` for `1 / √dim_qk`.
    #[must_use]
    pub fn attn_scale(mut self, attn_scale: impl Into<Option<f32>>) -> Self {
        self.attn_scale = attn_scale.into();
        self
    }

    /// Sets the values of declared parameters, as in the forward pass.
    #[must_use]
    pub fn params(mut self, params: &'a [Param<'a>]) -> Self {
        self.params = params;
        self
    }

    /// Adds destinations of gradients of declared parameters.
    #[must_use]
    pub fn gradients(mut self, gradients: impl IntoIterator<Item = HostGradient<'a>>) -> Self {
        self.gradients.extend(gradients);
        self
    }

    /// Adds destinations of amax values, for a pass of 8-bit floats.
    #[must_use]
    pub fn amax(mut self, amax: impl IntoIterator<Item = HostAmax<'a>>) -> Self {
        self.amax.extend(amax);
        self
    }
}

impl<'a> HostGradient<'a> {
    /// Creates the request to write the gradient of the declared parameter `name` to `data`.
    pub fn new(name: &'a str, data: impl Into<ElementsMut<'a>>) -> HostGradient<'a> {
        HostGradient { name, data: data.into() }
    }

    /// Returns the mistakes in destinations of gradients for a problem: names that are missing, unknown or repeated, and other types and lengths.
    pub fn mistakes(problem: &BackwardProblem, all: &[HostGradient<'_>]) -> Vec<SpecError> {
        let given: Vec<&str> = all.iter().map(|g| g.name).collect();
        let mut errors = params::check_gradients(problem.wrt().iter().map(|g| g.name.as_str()), &given);
        for given in all {
            let Some(wanted) = problem.wrt().iter().find(|wanted| wanted.name == given.name) else { continue };
            let field = format!("gradient of {}", wanted.name);
            if given.data.dtype() != wanted.dtype {
                errors.push(SpecError::new(&field, given.data.dtype(), format!("{}, the type of the problem", wanted.dtype)));
            }
            let need = problem.gradient_elements(&wanted.name);
            if given.data.len() as i64 != need {
                let rule = format!("{need} elements: gradients are stored densely");
                errors.push(SpecError::new(format!("{field} length"), given.data.len(), rule));
            }
        }
        errors
    }
}

impl<'a> HostAmax<'a> {
    /// Creates the request to write the amax of the tensor `of` to `value`.
    pub fn new(of: Amax, value: &'a mut f32) -> HostAmax<'a> {
        HostAmax { of, value }
    }
}

/// Memory of an operand, read or written according to [`Operand::written`].
#[derive(Debug)]
pub enum HostMemory<'a> {
    /// An operand that the pass reads.
    Read(Elements<'a>),
    /// A result that the pass writes.
    Write(ElementsMut<'a>),
}

/// The `stats` of a call, read or written according to the pass.
#[derive(Debug)]
pub enum HostStats<'a> {
    /// No stats: a forward pass that does not compute them.
    None,
    /// Stats that a backward pass reads.
    Read(&'a [f32]),
    /// Stats that a forward pass writes.
    Write(&'a mut [f32]),
}

/// A call of a forward or backward pass with its operands in a list, for executors that treat both passes alike. [`HostForward`] and
/// [`HostBackward`] convert into it. Exhaustive, so that executors can list the fields.
#[derive(Debug)]
pub struct HostCall<'a> {
    /// The operands of the pass, in the order of [`Direction::operands`](crate::operand::Direction::operands).
    pub operands: Vec<(Operand, HostMemory<'a>)>,
    /// The log-sum-exp of each row: f32, (batch, heads_q, seq_q), or (total, heads_q) of a packed batch, dense.
    pub stats: HostStats<'a>,
    /// Destination of the largest score of each row, for a forward pass.
    pub row_max: Option<&'a mut [f32]>,
    /// Destination of the sum of exponentials of each row, for a forward pass.
    pub sum_exp: Option<&'a mut [f32]>,
    /// Factor of the scores. `None` means `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters. A scalar that is not named here has its default.
    pub params: &'a [Param<'a>],
    /// Destinations of gradients of declared parameters, one for each gradient that the problem computes; empty for a forward pass.
    pub gradients: Vec<HostGradient<'a>>,
    /// Destinations of amax values, one for each value that the pass computes; empty for a pass without 8-bit floats.
    pub amax: Vec<HostAmax<'a>>,
}

impl<'a> From<HostForward<'a>> for HostCall<'a> {
    fn from(call: HostForward<'a>) -> HostCall<'a> {
        let read = [(Operand::Q, call.q), (Operand::K, call.k), (Operand::V, call.v)].map(|(operand, x)| (operand, HostMemory::Read(x)));
        HostCall {
            operands: read.into_iter().chain([(Operand::O, HostMemory::Write(call.o))]).collect(),
            stats: call.stats.map_or(HostStats::None, HostStats::Write),
            row_max: call.row_max,
            sum_exp: call.sum_exp,
            attn_scale: call.attn_scale,
            params: call.params,
            gradients: Vec::new(),
            amax: call.amax,
        }
    }
}

impl<'a> From<HostBackward<'a>> for HostCall<'a> {
    fn from(call: HostBackward<'a>) -> HostCall<'a> {
        let read = [(Operand::Q, call.q), (Operand::K, call.k), (Operand::V, call.v), (Operand::O, call.o), (Operand::DO, call.d_o)];
        let written = [(Operand::DQ, call.dq), (Operand::DK, call.dk), (Operand::DV, call.dv)];
        let read = read.into_iter().map(|(operand, x)| (operand, HostMemory::Read(x)));
        let written = written.into_iter().map(|(operand, x)| (operand, HostMemory::Write(x)));
        HostCall {
            operands: read.chain(written).collect(),
            stats: HostStats::Read(call.stats),
            row_max: None,
            sum_exp: None,
            attn_scale: call.attn_scale,
            params: call.params,
            gradients: call.gradients,
            amax: call.amax,
        }
    }
}

/// Collects the mistakes of a call.
struct Check<'p> {
    problem: &'p Problem,
    errors: Vec<SpecError>,
    lengths: Vec<(Operand, TensorSpec, usize)>,
    statistics: Vec<(Statistic, usize)>,
}

impl Check<'_> {
    /// Checks an operand. For packed sequences `cu_seqlens` determine the length, which [`Check::memory`] checks.
    fn operand(&mut self, operand: Operand, (tensor, own): (&TensorSpec, DType), (dtype, len): (DType, usize)) {
        if dtype != own {
            self.errors.push(SpecError::new(format!("{operand} dtype"), dtype, format!("{own}, the type of the problem")));
        }
        self.lengths.push((operand, *tensor, len));
        let need = tensor.extent().unwrap_or(i64::MAX);
        if !self.problem.packs(operand.side()) && i64::try_from(len).is_ok_and(|len| len < need) {
            let pages = self.problem.paged().filter(|_| operand.side() == Side::Keys).map(|paged| format!(" for {} pages", paged.pages));
            let rule = format!("at least {need} elements{}, as the extents and strides require", pages.unwrap_or_default());
            self.errors.push(SpecError::new(format!("{operand} length"), len, rule));
        }
    }

    fn statistic(&mut self, statistic: Statistic, len: usize) {
        self.statistics.push((statistic, len));
        let need = self.problem.stats_elements();
        if self.problem.packed().is_none() && len as i64 != need {
            self.errors.push(SpecError::new(format!("{statistic} length"), len, format!("batch x heads_q x seq_q = {need}")));
        }
    }

    /// Checks values of parameters, memory of packed sequences, and page tables.
    fn values(&mut self, declared: &[Declared], given: &[Param<'_>]) {
        match params::bind(declared, self.problem.extents(), given) {
            Ok(values) => {
                self.errors.extend(packed::check_memory(self.problem, (declared, &values), &self.lengths, &self.statistics));
                self.errors.extend(Fp8Scales::mistakes(self.problem, declared, &values));
                self.errors.extend(Pages::new(self.problem, declared, &values).err().into_iter().flat_map(|errors| errors.0));
            }
            Err(errors) => self.errors.extend(errors.0),
        }
    }

    fn scale(mut self, scale: Option<f32>) -> Result<f32, SpecErrors> {
        let scale = scale.unwrap_or(self.problem.default_scale());
        if !scale.is_finite() {
            self.errors.push(SpecError::new("attn_scale", scale, "a finite number"));
        }
        if self.errors.is_empty() { Ok(scale) } else { Err(SpecErrors(self.errors)) }
    }
}

fn read((operand, x): (Operand, &Elements<'_>)) -> (Operand, (DType, usize)) {
    (operand, (x.dtype(), x.len()))
}

fn written((operand, x): (Operand, &ElementsMut<'_>)) -> (Operand, (DType, usize)) {
    (operand, (x.dtype(), x.len()))
}

impl HostForward<'_> {
    /// Checks the call against the problem, and returns the scale to use: `attn_scale`, or `1 / √dim_qk`.
    ///
    /// # Errors
    /// Returns every mistake in the call:
    /// - wrong dtypes, and buffers that are too short
    /// - row statistics or amax destinations that are missing or superfluous
    /// - parameters that are missing, unknown, repeated or of another type or length
    /// - invalid `cu_seqlens` or pages
    /// - scales of 8-bit floats that are not finite and above 0, or a scale that is not finite
    pub fn check(&self, problem: &Problem) -> Result<f32, SpecErrors> {
        let mut check = Check { problem, errors: Vec::new(), lengths: Vec::new(), statistics: Vec::new() };
        let given = [(Operand::Q, &self.q), (Operand::K, &self.k), (Operand::V, &self.v)].map(read);
        for (operand, given) in given.into_iter().chain([written((Operand::O, &self.o))]) {
            if let Some(tensor) = problem.in_memory(operand) {
                check.operand(operand, (&tensor, problem.dtype_of(operand)), given);
            }
        }
        for statistic in Statistic::ALL {
            let given = match statistic {
                Statistic::Stats => &self.stats,
                Statistic::RowMax => &self.row_max,
                Statistic::SumExp => &self.sum_exp,
            };
            match given {
                Some(given) if problem.computes(statistic) => check.statistic(statistic, given.len()),
                given => check.errors.extend(statistic.unlike(given.is_some(), problem.computes(statistic))),
            }
        }
        check.values(problem.params(), self.params);
        check.errors.extend(Amax::check(problem, Direction::Forward, self.amax.iter().map(|amax| amax.of)));
        check.scale(self.attn_scale)
    }
}

impl HostBackward<'_> {
    /// Checks the call against the problem, and returns the scale to use: `attn_scale`, or `1 / √dim_qk`.
    ///
    /// # Errors
    /// Returns every mistake in the call:
    /// - wrong dtypes, and buffers that are too short
    /// - parameters and gradients that are missing, unknown, repeated or of another type or length
    /// - scales of 8-bit floats that are not finite and above 0, or a scale that is not finite
    pub fn check(&self, problem: &BackwardProblem) -> Result<f32, SpecErrors> {
        let mut check = Check { problem: problem.forward(), errors: Vec::new(), lengths: Vec::new(), statistics: Vec::new() };
        let given = [(Operand::Q, &self.q), (Operand::K, &self.k), (Operand::V, &self.v), (Operand::O, &self.o), (Operand::DO, &self.d_o)];
        let results = [(Operand::DQ, &self.dq), (Operand::DK, &self.dk), (Operand::DV, &self.dv)];
        for (operand, given) in given.into_iter().map(read).chain(results.map(written)) {
            check.operand(operand, (problem.tensor(operand), problem.dtype_of(operand)), given);
        }
        check.statistic(Statistic::Stats, self.stats.len());
        check.values(problem.params(), self.params);
        check.errors.extend(HostGradient::mistakes(problem, &self.gradients));
        check.errors.extend(Amax::check(problem.forward(), Direction::Backward, self.amax.iter().map(|amax| amax.of)));
        check.scale(self.attn_scale)
    }
}
