//! Programs that a caller reads from JSON: the round trip, the ports, and what is refused before cuDNN sees it.

use cudnn_graph::DType::*;
use cudnn_graph::bind::Ports;
use cudnn_graph::ffi::codes::Attribute;
use cudnn_graph::ir::op::ConvGeometry;
use cudnn_graph::ir::{Graph, Mode, Scalar, Tensor, Verified};
use cudnn_graph::{Error, Program, Version, encode};
use serde_json::Value;

fn graph() -> Verified {
    let mut g = Graph::new();
    let (x, w) = (g.input_channels_last("x", F16, [2, 4, 6, 5]), g.input("w", F16, [6, 4, 3, 3]));
    let y = g.convolution(x, w, ConvGeometry::new(2).padding([1, 1]));
    let (two, slope) = (g.scalar(Scalar::F32(f32::NEG_INFINITY)), g.parameter("slope", F32));
    let y = g.pointwise(Mode::Max, &[y, two]);
    let y = g.pointwise(Mode::Mul, &[y, slope]);
    g.output(y, "y", F32);
    g.verify().unwrap()
}

fn program() -> Program {
    encode(&graph(), Version::new(9, 19, 0)).unwrap()
}

#[test]
fn json_gives_the_same_program_back() {
    let json = serde_json::to_string(&program()).unwrap();
    let back: Program = serde_json::from_str(&json).unwrap();
    assert_eq!(back, program());
    back.check().unwrap();
    // An infinity survives: a matmul may pad with it.
    let mut g = Graph::new();
    let [a, b] = ["a", "b"].map(|name| g.input(name, F16, [1, 8, 8]));
    let c = g.tensor(Tensor::device("c", F32, [1, 8, 8]));
    let padding = Some(f64::NEG_INFINITY);
    let op = cudnn_graph::ir::op::Matmul { a, b, c, m_override: None, n_override: None, k_override: None, padding, compute: F32 };
    g.push(cudnn_graph::ir::Op::Matmul(op));
    let padded = encode(&g.verify().unwrap(), Version::new(9, 19, 0)).unwrap();
    let back: Program = serde_json::from_str(&serde_json::to_string(&padded).unwrap()).unwrap();
    assert_eq!(back, padded);
}

#[test]
fn a_program_has_the_ports_of_its_graph() {
    let (graph, plain) = (Ports::of(&graph()), Ports::of_program(&program()).unwrap());
    let mut device = graph.device.clone();
    // A program does not say which tensors determine addresses, nor which it writes.
    device.iter_mut().for_each(|port| (port.addressing, port.written) = (true, true));
    assert_eq!(plain.device, device);
    assert_eq!(plain.values.len(), 2);
    for (port, want) in plain.values.iter().zip(&graph.values) {
        assert_eq!((port.id, port.dtype, &port.name, port.value), (want.id, want.dtype, &want.name, None));
    }
}

/// Changes the first setting of an attribute in JSON.
fn changed(attribute: &str, change: impl FnOnce(&mut Value)) -> Result<Program, serde_json::Error> {
    let mut json = serde_json::to_value(program()).unwrap();
    let descriptors = json["descriptors"].as_array_mut().unwrap();
    let mut settings = descriptors.iter_mut().flat_map(|d| d["settings"].as_array_mut().unwrap());
    change(settings.find(|s| s["attribute"] == attribute).unwrap());
    serde_json::from_value(json)
}

#[test]
fn codes_that_this_crate_does_not_know_are_numbers() {
    let newer = changed("CONVOLUTION_DILATIONS", |s| s["attribute"] = 9999.into()).unwrap();
    let text = serde_json::to_string(&newer).unwrap();
    assert!(text.contains("\"Attribute 9999\""), "{text}");
    let back: Program = serde_json::from_str(&text).unwrap();
    assert_eq!(back, newer);
    assert!(back.descriptors.iter().any(|d| d.settings.iter().any(|s| s.attribute == Attribute(9999))));
    let error = changed("CONVOLUTION_DILATIONS", |s| s["attribute"] = "CONVOLUTION_DILATION".into()).unwrap_err().to_string();
    assert!(error.contains("\"CONVOLUTION_DILATION\" is no Attribute"), "{error}");
}

#[test]
fn fractions_are_pairs_of_numbers() {
    let with = |fractions: Value| {
        changed("CONVOLUTION_DILATIONS", |s| {
            s["ty"] = "FRACTION".into();
            s["values"] = serde_json::json!({ "fractions": fractions });
        })
    };
    let program = with(serde_json::json!([[1, 2], [3, 1]])).unwrap();
    program.check().unwrap();
    assert!(program.to_string().contains("CONVOLUTION_DILATIONS FRACTION [1/2, 3/1]"), "{program}");
    let back: Program = serde_json::from_str(&serde_json::to_string(&program).unwrap()).unwrap();
    assert_eq!(back, program);
    assert!(with(serde_json::json!([[1, 2, 3]])).is_err());
    // A fraction is no integer, and an integer is no fraction.
    for (ty, values) in
        [("INT64", serde_json::json!({ "fractions": [[1, 2], [3, 1]] })), ("FRACTION", serde_json::json!({ "i64": [1, 2] }))]
    {
        let wrong = changed("CONVOLUTION_DILATIONS", |s| (s["ty"], s["values"]) = (ty.into(), values)).unwrap();
        assert!(wrong.check().unwrap_err().to_string().contains(&format!("expected elements of type {ty}")), "{ty}");
    }
}

#[test]
fn invalid_programs_are_refused() {
    let refused = |program: &Program, words: &[&str]| {
        let Err(Error::Program(text)) = program.check().and_then(|()| Ports::of_program(program).map(|_| ())) else {
            panic!("accepted, expected {words:?}")
        };
        for word in words {
            assert!(text.contains(word), "{text:?} does not say {word:?}");
        }
    };
    refused(&Program { descriptors: Vec::new() }, &["the last descriptor is not of kind OPERATIONGRAPH"]);
    let wrong_type = changed("TENSOR_STRIDES", |s| s["ty"] = "FLOAT".into()).unwrap();
    refused(&wrong_type, &["d1 TENSOR x: TENSOR_STRIDES: got I64(", "expected elements of type FLOAT"]);
    let later = changed("OPERATION_CONVOLUTION_FORWARD_W", |s| s["values"]["descriptors"] = vec![99].into()).unwrap();
    refused(&later, &["OPERATION_CONVOLUTION_FORWARD_W: got d99, expected an earlier descriptor"]);
    for (attribute, values, words) in [
        ("TENSOR_UNIQUE_ID", vec![0i64], "TENSOR_UNIQUE_ID is [0], expected a number from 1"),
        ("TENSOR_UNIQUE_ID", vec![i64::MAX], "expected a number from 1"),
        ("TENSOR_DIMENSIONS", vec![2, -4, 6, 5], "have no size"),
        ("TENSOR_DIMENSIONS", vec![2, 4, 6], "have no size"),
        ("TENSOR_STRIDES", vec![i64::MAX, 1, 1, 1], "have no size"),
        ("TENSOR_BYTE_ALIGNMENT", vec![3], "alignment is not a power of two"),
        ("TENSOR_BYTE_ALIGNMENT", vec![], "TENSOR_BYTE_ALIGNMENT is not one number"),
    ] {
        let program = changed(attribute, |s| s["values"]["i64"] = values.into()).unwrap();
        refused(&program, &["tensor x: ", words]);
    }
}
