//! Values and gradients of declared parameters: everything that is wrong with a call is told at once.

use half::{bf16, f16};
use sdpa::cpu::CpuExecutor;
use sdpa::expr::{Axis, F16, F32};
use sdpa::library::{alibi_with, bias, document, softcap};
use sdpa::params::bind;
use sdpa::{
    AttentionSpec, DType, Executor, HostBackward, HostForward, HostGradient, Layout, Mask, Paged, Param, ParamValue, ScoreMod, Shape,
    SpecErrors,
};

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 3, seq_kv: 5, dim_qk: 8, dim_v: 8 };

/// Parameters: cap, slopes[head] f32, bias[head, q, k] f16, doc_q[batch, q], doc_k[batch, k].
fn spec() -> AttentionSpec {
    let mods = softcap(30.0).then(alibi_with()).then(bias([Axis::Head, Axis::Q, Axis::K], F16));
    AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd).score_mod(mods).mask(document())
}

fn given<'a>(all: &[(&'a str, ParamValue<'a>)]) -> Vec<Param<'a>> {
    all.iter().map(|&(name, value)| Param::new(name, value)).collect()
}

fn fields(errors: &SpecErrors) -> Vec<String> {
    errors.0.iter().map(|e| e.field.clone()).collect()
}

struct Memory {
    q: Vec<f32>,
    kv: Vec<f32>,
    o: Vec<f32>,
    stats: Vec<f32>,
}

impl Memory {
    fn new() -> Memory {
        Memory { q: vec![0.5; 2 * 4 * 3 * 8], kv: vec![0.5; 2 * 2 * 5 * 8], o: vec![0.0; 2 * 4 * 3 * 8], stats: vec![0.0; 24] }
    }

    /// Fields of everything that is wrong with a forward call.
    fn forward(&mut self, params: &[Param<'_>]) -> Vec<String> {
        let call = HostForward::new(&self.q, &self.kv, &self.kv, &mut self.o).params(params);
        call.check(&spec().validate().unwrap()).err().map_or_else(Vec::new, |e| fields(&e))
    }
}

const SLOPES: [f32; 4] = [1.0; 4];
const DOC_Q: [i32; 6] = [0; 6];
const DOC_K: [i32; 10] = [0; 10];

fn half_bias() -> Vec<f16> {
    vec![f16::ONE; 4 * 3 * 5]
}

#[test]
fn a_call_that_is_right_passes() {
    let bias = half_bias();
    let mut all = vec![
        ("slopes", ParamValue::F32(&SLOPES)),
        ("bias", ParamValue::F16(&bias)),
        ("doc_q", ParamValue::I32(&DOC_Q)),
        ("doc_k", ParamValue::I32(&DOC_K)),
    ];
    assert_eq!(Memory::new().forward(&given(&all)), [""; 0]);
    all.push(("cap", ParamValue::Scalar(7.0)));
    all.reverse();
    assert_eq!(Memory::new().forward(&given(&all)), [""; 0], "in any order");
    let problem = spec().validate().unwrap();
    let names: Vec<&str> = problem.params().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["cap", "slopes", "bias", "doc_q", "doc_k"]);
    let values = problem.bind(&given(&all)).unwrap();
    let told: Vec<(usize, f64)> = values.iter().map(|v| (v.elements(), v.get(0))).collect();
    assert_eq!(told, [(1, 7.0), (4, 1.0), (60, 1.0), (6, 0.0), (10, 0.0)]);
    let without = problem.bind(&given(&all[2..])).unwrap_err();
    assert_eq!(fields(&without), ["parameter doc_k"]);
    let default = problem.bind(&given(&all[1..])).unwrap();
    assert_eq!(default[0].get(0), 30.0, "a scalar that is not given has its default");
}

#[test]
fn everything_that_is_wrong_is_told_at_once() {
    let mut memory = Memory::new();
    assert_eq!(memory.forward(&[]), ["parameter slopes", "parameter bias", "parameter doc_q", "parameter doc_k"]);
    let (whole, short) = (vec![1i32; 60], vec![1f32; 3]);
    let params = given(&[
        ("nobody", ParamValue::Scalar(1.0)),
        ("slopes", ParamValue::F32(&short)),
        ("slopes", ParamValue::F32(&SLOPES)),
        ("bias", ParamValue::I32(&whole)),
        ("doc_q", ParamValue::Scalar(1.0)),
        ("cap", ParamValue::F32(&SLOPES)),
    ]);
    let want = [
        // In the order of what is given, and then of what is declared.
        "parameter nobody",
        "parameter slopes",
        "parameter cap",
        "parameter slopes length",
        "parameter bias",
        "parameter doc_q",
        "parameter doc_k",
    ];
    assert_eq!(memory.forward(&params), want);
    // Next to what is wrong with operands.
    memory.q.truncate(3);
    assert_eq!(memory.forward(&params)[0], "q length");
    assert_eq!(memory.forward(&params).len(), 8);
}

/// Each kind of value for each kind of parameter.
#[test]
fn a_value_is_of_the_type_and_length_that_is_declared() {
    let (f, h, b, i, t) = (vec![1f32; 4], vec![f16::ONE; 4], vec![bf16::ONE; 4], vec![1i32; 4], vec![true; 4]);
    let values = [
        (None, ParamValue::Scalar(2.0)),
        (Some(DType::F32), ParamValue::F32(&f)),
        (Some(DType::F16), ParamValue::F16(&h)),
        (Some(DType::BF16), ParamValue::BF16(&b)),
        (Some(DType::I32), ParamValue::I32(&i)),
        (Some(DType::Bool), ParamValue::Bool(&t)),
    ];
    let kinds = [
        "scalar x = 1",
        "tensor x[head]: f32",
        "tensor x[head]: f16",
        "tensor x[head]: bf16",
        "tensor x[head]: i32",
        "tensor x[head]: bool",
    ];
    for (n, kind) in kinds.iter().enumerate() {
        let root = match n {
            0..4 => "score + x",
            4 => "score + f32(x)",
            _ => "select(x, score, 0.0)",
        };
        let score_mod: ScoreMod = format!("{kind}; {root}").parse().unwrap();
        let problem = AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd).score_mod(score_mod).validate().unwrap();
        for (m, (dtype, value)) in values.iter().enumerate() {
            assert_eq!(value.dtype(), *dtype);
            let bound = problem.bind(&[Param::new("x", *value)]);
            assert_eq!(bound.is_ok(), n == m, "{kind} and {dtype:?}");
            if let Err(errors) = bound {
                assert_eq!(fields(&errors), ["parameter x"]);
                assert!(errors.to_string().contains("as declared"), "{errors}");
            }
        }
    }
    let declared = spec().score_mod(ScoreMod::new("x", |s, _, p| s + p.tensor("x", [Axis::Head], F32)).unwrap());
    let declared = declared.validate().unwrap().params().iter().find(|p| p.name == "x").cloned().unwrap();
    for (n, right) in [(0, false), (3, false), (4, true), (5, false)] {
        let value = vec![0f32; n];
        let bound = bind(std::slice::from_ref(&declared), [2, 4, 3, 5], &[Param::new("x", &value)]);
        assert_eq!(bound.map_err(|e| fields(&e)).err(), if right { None } else { Some(vec!["parameter x length".to_owned()]) });
    }
    let problem = spec().validate().unwrap();
    let bound = problem.bind(&[Param::new("cap", f32::NAN)]);
    assert!(bound.is_err_and(|e| e.to_string().contains("a number")));
}

#[test]
fn gradients_are_checked_in_the_same_way() {
    let bias = half_bias();
    let params = given(&[
        ("slopes", ParamValue::F32(&SLOPES)),
        ("bias", ParamValue::F16(&bias)),
        ("doc_q", ParamValue::I32(&DOC_Q)),
        ("doc_k", ParamValue::I32(&DOC_K)),
    ]);
    let backward = spec().backward().wrt("bias", DType::BF16).wrt("cap", DType::F32).validate().unwrap();
    assert_eq!([backward.gradient_elements("bias"), backward.gradient_elements("cap"), backward.gradient_elements("x")], [60, 1, 0]);
    let check = |gradients: Vec<HostGradient<'_>>, params: &[Param<'_>]| {
        let Memory { q, kv, o, stats } = Memory::new();
        let (mut dq, mut dk, mut dv) = (q.clone(), kv.clone(), kv.clone());
        let call = HostBackward::new((&q, &kv, &kv), (&o, &stats), &o, (&mut dq, &mut dk, &mut dv)).params(params).gradients(gradients);
        call.check(&backward).err().map_or_else(Vec::new, |e| fields(&e))
    };
    let (mut d_bias, mut d_cap, mut long, mut wide) = (vec![bf16::ZERO; 60], vec![0f32; 1], vec![0f32; 2], vec![f16::ZERO; 60]);
    let right = vec![HostGradient::new("cap", &mut d_cap), HostGradient::new("bias", &mut d_bias)];
    assert_eq!(check(right, &params), [""; 0]);
    assert_eq!(check(Vec::new(), &params), ["gradient of bias", "gradient of cap"]);
    let mut again = vec![0f32; 1];
    let wrong = vec![
        HostGradient::new("slopes", &mut again),
        HostGradient::new("cap", &mut long),
        HostGradient::new("cap", &mut d_cap),
        HostGradient::new("bias", &mut wide),
    ];
    let want = ["parameter slopes", "gradient of slopes", "gradient of cap", "gradient of cap length", "gradient of bias"];
    assert_eq!(check(wrong, &params[1..]), want);
}

#[test]
fn what_gradients_may_be_asked_for() {
    let asked = |name: &str, dtype| spec().backward().wrt(name, dtype).validate().map(|_| ()).map_err(|e| e.to_string());
    for (name, dtype) in [("cap", DType::F32), ("slopes", DType::F16), ("bias", DType::BF16)] {
        assert_eq!(asked(name, dtype), Ok(()));
    }
    for (name, dtype, said) in [
        ("nobody", DType::F32, "a declared parameter"),
        ("doc_q", DType::F32, "a floating-point parameter"),
        ("bias", DType::I32, "one of f32, f16, bf16"),
        ("bias", DType::I32, "one of f32, f16, bf16"),
    ] {
        assert!(asked(name, dtype).is_err_and(|e| e.contains(said)), "{name} in {dtype}");
    }
    let twice = spec().backward().wrt("bias", DType::F32).wrt("bias", DType::F32).validate();
    assert!(twice.is_err_and(|e| e.to_string().contains("each name once")));
    let all = spec().backward().wrt("nobody", DType::I32).wrt("doc_q", DType::F32).wrt("doc_q", DType::F32);
    assert_eq!(fields(&all.validate().unwrap_err()), ["wrt[0].dtype", "wrt[0]", "wrt[1]", "wrt[2]", "wrt[2]"]);
}

/// Lengths are 32-bit numbers, one of each batch entry, and tables have a row for each.
#[test]
fn lengths_are_32_bits_wide_and_tables_have_whole_rows() {
    let paged = AttentionSpec::paged(DType::F32, SHAPE, Paged::new(4, 9)).mask(Mask::padding()).validate().unwrap();
    let (lengths, table, wide) = ([3, 5], [0, 1, 2, 3], [3i64, 5]);
    let bind = |seq_len_kv: ParamValue<'_>, page_table: ParamValue<'_>| {
        let all = [("seq_len_q", ParamValue::I32(&lengths)), ("seq_len_kv", seq_len_kv), ("page_table", page_table)];
        paged.bind(&given(&all)).map(|_| ()).map_err(|errors| errors.to_string())
    };
    assert_eq!(bind(ParamValue::I32(&lengths), ParamValue::I32(&table)), Ok(()));
    let told = bind(ParamValue::I64(&wide), ParamValue::I32(&table)).unwrap_err();
    assert_eq!(told, "parameter seq_len_kv: got a tensor of i64, expected a tensor [batch] of i32, as declared");
    // Two entries of two and one pages, one behind the other.
    let told = bind(ParamValue::I32(&lengths), ParamValue::I32(&table[..3])).unwrap_err();
    assert!(told.starts_with("parameter page_table length: got 3, expected 4 elements"), "{told}");
}

/// The scale of a call is a number of the host; one in device memory is a tensor over no axes, which a score_mod multiplies by.
#[test]
fn a_scale_in_memory_is_a_score_mod() {
    let plain = AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd);
    let scaled = plain.clone().score_mod("tensor scale[]: f32; score * scale".parse().unwrap());
    let numbers = |count: usize, seed: f32| (0..count).map(|n| (n as f32 * seed).sin()).collect::<Vec<f32>>();
    let (q, k, v) = (numbers(192, 0.7), numbers(160, 0.3), numbers(160, 1.1));
    let run = |spec: &AttentionSpec, attn_scale: f32, params: &[Param<'_>]| {
        let mut o = vec![0.0; 192];
        let call = HostForward::new(&q, &k, &v, &mut o).attn_scale(attn_scale).params(params);
        CpuExecutor::default().prepare(&spec.validate().unwrap()).unwrap().forward(call).unwrap();
        o
    };
    let [first, second] = [0.25f32, 2.0].map(|scale| {
        let (of_call, of_memory) = (run(&plain, scale, &[]), run(&scaled, 1.0, &given(&[("scale", ParamValue::F32(&[scale]))])));
        assert!(of_call.iter().zip(&of_memory).all(|(x, y)| (x - y).abs() < 1e-5), "{scale}");
        of_memory
    });
    assert!(first.iter().zip(&second).any(|(x, y)| (x - y).abs() > 1e-2));
}
