//! Expressions with every function: their graphs compute what a trace is at each place.

use super::*;

/// Expressions with every function, comparison and way to choose; scores stay finite.
const EXPRESSIONS: [&str; 37] = [
    "-score",
    "abs(score - 0.5) + abs(f32(q - k))",
    "sqrt(abs(score) + 0.5)",
    "rsqrt(score * score + 1.0)",
    "exp(score * 0.25)",
    "log(score * score + 1.0)",
    "sin(score) + cos(score * 2.0)",
    "tanh(score) * 2.0",
    "erf(score)",
    "score + floor(score) + ceil(score * 0.5)",
    "score + f32(i32(score * 3.0))",
    "score + f32(-k) + f32(abs(q - k))",
    "1.0 - score",
    "score / (score * score + 2.0)",
    "3.0 / (2.0 + abs(score))",
    "score % 0.75",
    "pow(abs(score) + 0.5, 1.5) + pow(2.0, score)",
    "pow(score, 3.0) - pow(score, 2.0) * pow(f32(q - k), 0.0) + pow(f32(k) - score, 4.0) + pow(score, 1.0)",
    "min(score, 0.3) + max(0.1, score * 2.0)",
    "score + f32(min(q, 3) * max(k, 2) + (q - k) / 2 + k % 3 + 7 / (k + 1) + 7 % (q + 1))",
    "select(score == 0.0, 1.0, score)",
    "select(score != 0.0, score, 1.0)",
    "select(score < 0.1, score * 2.0, -score)",
    "select(score <= 0.1, score * 2.0, -score)",
    "select(0.1 > score, score * 2.0, 7.0)",
    "select(score >= 0.1 & !(k < q | q == 2), score, score * score)",
    "select(select(q < k, score > 0.0, score < 0.5), score, 1.0)",
    "select(q != k & heads_q > 2, score, 0.5 * score)",
    "select(head % 2 == 0, score, score * 0.5) + f32(batch)",
    "score * f32(head * 2 + 1) + f32(select(q < k, head, k))",
    "scalar a = 1.5; scalar b = 0.5; select(a > b, score * (a - b), 0.0) + select(b < 0.25, 1.0, score)",
    "tensor t[batch, k]: i32; score + f32(t * q + head) * select(t > 2, 0.1, 0.2)",
    "tensor m[q, k]: bool; tensor n[head]: bool; select(m | !n, score * 2.0, score)",
    "tensor t[head, q]: f16; scalar a = 0.5; score * t + a * t",
    "tensor t[]: f32; score + t",
    "scalar a = 2.0; tanh(a) * f32(seq_kv - k)",
    "0.25",
];

/// What a trace is at a place, with the derivative along the score, by the definition of each function.
struct ScheduleReport<'t> {
    value: &'t Trace,
    gradient: &'t Trace,
    tensors: Vec<(String, [i64; 4], Vec<f64>)>,
    extents: [i64; 4],
}

impl ScheduleReport<'_> {
    fn at(&self, trace: &Trace, score: f64, index: Here) -> Vec<f64> {
        let params: Vec<f64> = trace
            .params()
            .iter()
            .map(|p| {
                let (_, dims, data) = self.tensors.iter().find(|(name, ..)| *name == p.name).unwrap();
                let place = dims.iter().zip(index).fold(0, |n, (&extent, at)| n * extent + if extent == 1 { 0 } else { at });
                data[place as usize]
            })
            .collect();
        trace.eval(&Place { score, upstream: 1.0, index, extents: self.extents, params: &params }, expr::Precision::F64)
    }
}

/// Ops in place of functions: comparisons that engines do not have, truth values that no tensor holds, tables, numbers.
#[test]
fn graphs_of_expressions_mean_the_expressions() {
    let mut failures = Vec::new();
    for (n, text) in EXPRESSIONS.iter().enumerate() {
        for (m, shape) in SHAPES.into_iter().enumerate() {
            let score_mod: ScoreMod = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            let spec = AttentionSpec::dense(DType::F16, shape, Layout::Bshd).with_stats().score_mod(score_mod);
            let problem = spec.validate().unwrap();
            let asked = spec.backward().validate().unwrap();
            let mut random = Random::new((n * 10 + m) as u64);
            let extents = problem.extents();
            let mut tensors = Vec::new();
            for p in problem.params() {
                let (dims, ty) = match p.kind {
                    sdpa::expr::ParamKind::Scalar => ([1; 4], None),
                    sdpa::expr::ParamKind::Tensor { axes, dtype } => (axes.dims(extents), Some(dtype)),
                };
                let mut draw = || match ty {
                    None => f64::from(p.default.unwrap_or(0.0)),
                    Some(DType::Bool) => random.between(0, 1) as f64,
                    Some(DType::I32) => random.between(-5, 5) as f64,
                    Some(_) => random.normal(),
                };
                let data: Vec<f64> = (0..dims.iter().product::<i64>()).map(|_| draw()).collect();
                tensors.push((p.name.clone(), dims, data));
            }
            let params: Vec<(String, Vec<f64>)> = tensors.iter().map(|(name, _, data)| (name.clone(), data.clone())).collect();
            let (value, gradient) = (problem.score_mod().unwrap(), asked.gradient().unwrap());
            let told = ScheduleReport { value, gradient: &gradient.trace, tensors, extents };
            let modify = |score: f64, here: Here| told.at(told.value, score, here)[0];
            let slope = |score: f64, here: Here| told.at(told.gradient, score, here)[1];
            let closures = Closures { modify: Some(&modify), slope: Some(&slope), ..Closures::default() };
            let numbers = Numbers::draw(&spec, &mut random);
            let case = Case { spec: &spec, numbers: &numbers, params: &params, packing: None, cache: None, tolerance: EXACT };
            let results = [(Form::Composite, OLD), (Form::Composite, NEW), (Form::Unified, NEW)]
                .map(|(form, runtime)| (format!("{form} {runtime}"), case.forward(&closures, form, runtime)))
                .into_iter()
                .chain([OLD, NEW].map(|runtime| (format!("backward {runtime}"), case.backward(&closures, &asked, runtime))));
            failures.extend(results.filter_map(|(what, result)| Some(format!("{what} of {text:?} in {shape:?}: {}", result.err()?))));
        }
    }
    assert!(failures.is_empty(), "{}\n{}", failures.len(), failures[..failures.len().min(12)].join("\n"));
}
