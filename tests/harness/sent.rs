//! What cuDNN says that it was sent: the operation graph inside a plan's JSON against the graph that the plan was made of.
//!
//! The library's record differs from what was sent in these ways, and no others:
//!
//! - ops come in an order of the library's own, so they are compared as a multiset; tensors are named by their unique ids;
//! - a pointwise op has `alpha1` and `alpha2`, a reduction `isDeterministic`, a dequantisation `is_neg_scale`, a reshape `mode` from 9.22 on, a tensor `vectCount`,
//!   `vectDim` and `reordering`: defaults of attributes that are not set;
//! - values of by-value tensors are not in it: they are given at execution;
//! - offsets of packed documents are inside of each tensor that has them, and are not listed;
//! - tensors that only an inner graph uses are listed with it; two virtual ones that carry an inner softmax are the encoder's.

mod meant;

use cudnn_graph::Verified;
use meant::Meant;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

type Counts = BTreeMap<String, i64>;

/// Everything in which a plan's own record differs from the graph, one line each; empty when nothing does.
pub fn differences(graph: &Verified, plan_json: &str) -> Vec<String> {
    let plan: Value = match serde_json::from_str(plan_json) {
        Ok(plan) => plan,
        Err(e) => return vec![format!("the plan's JSON cannot be read: {e}")],
    };
    let mut recorded = Record::default();
    recorded.graph(&plan["operationGraph"]);
    let meant = Meant::of(graph);
    let mut lines = recorded.problems;
    compare("tensor", &meant.tensors, &recorded.tensors, &mut lines);
    compare("op", &meant.ops, &recorded.ops, &mut lines);
    lines
}

fn compare(what: &str, meant: &Counts, recorded: &Counts, lines: &mut Vec<String>) {
    for (line, n) in meant {
        let found = recorded.get(line).copied().unwrap_or(0);
        if found != *n {
            lines.push(format!("{what} sent {n} times, recorded {found} times: {line}"));
        }
    }
    lines.extend(recorded.keys().filter(|line| !meant.contains_key(*line)).map(|line| format!("{what} recorded and not sent: {line}")));
}

/// One line for an op: its kind and every field in alphabetical order.
fn op_line(operation: &str, mut fields: Vec<(&str, String)>) -> String {
    fields.sort();
    let fields: Vec<String> = fields.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    format!("{operation} {}", fields.join(" "))
}

#[derive(Default)]
struct Record {
    tensors: Counts,
    ops: Counts,
    problems: Vec<String>,
}

/// Fields of ops that hold defaults of what is never set, and the default.
fn is_default(field: &str, value: &Value) -> bool {
    match field {
        "alpha1" | "alpha2" => value.as_f64() == Some(1.0),
        "isDeterministic" | "is_neg_scale" => value == &Value::Bool(false),
        "mode" => value == "CUDNN_RESHAPE_VIEW_ONLY",
        _ => false,
    }
}

impl Record {
    fn graph(&mut self, graph: &Value) {
        for tensor in list(graph, "tensors", &mut self.problems) {
            let line = self.tensor(&tensor);
            // A tensor of both an outer and an inner graph is listed with both.
            self.tensors.insert(line, 1);
        }
        for node in list(graph, "nodes", &mut self.problems) {
            let line = self.op(&node);
            *self.ops.entry(line).or_default() += 1;
        }
    }

    fn tensor(&mut self, tensor: &Map<String, Value>) -> String {
        let mut fields = Vec::new();
        for (name, value) in tensor {
            match name.as_str() {
                "vectCount" if value == 1 => {}
                "vectDim" if value == -1 => {}
                "reordering" if value == "CUDNN_TENSOR_REORDERING_NONE" => {}
                "isRagged" => match value.as_array().map(Vec::as_slice) {
                    Some([Value::Object(offsets)]) => fields.push(("isRagged", self.tensor(offsets))),
                    Some(_) | None => self.problems.push(format!("offsets are no list of one tensor: {value}")),
                },
                _ => fields.push((name.as_str(), text(value))),
            }
        }
        op_line("tensor", fields)
    }

    fn op(&mut self, node: &Map<String, Value>) -> String {
        let mut fields = Vec::new();
        for (name, value) in node {
            match name.as_str() {
                "operation" => {}
                "subgraph" => self.graph(value),
                "softmax" => match value.as_object() {
                    Some(inner) => fields.push(("softmax", self.op(inner))),
                    None => self.problems.push("an inner softmax is not an object".to_owned()),
                },
                _ if is_default(name, value) => {}
                _ => fields.push((name.as_str(), text(value))),
            }
        }
        let operation = node.get("operation").map(text).unwrap_or_default();
        op_line(operation.trim_start_matches("CUDNN_BACKEND_OPERATION_").trim_end_matches("_DESCRIPTOR"), fields)
    }
}

fn list(graph: &Value, name: &str, problems: &mut Vec<String>) -> Vec<Map<String, Value>> {
    match graph[name].as_array() {
        Some(items) => items.iter().filter_map(|item| item.as_object().cloned()).collect(),
        None => {
            problems.push(format!("the record has no list of {name}"));
            Vec::new()
        }
    }
}

/// Without quotes and without the prefixes that the library's names have.
fn text(value: &Value) -> String {
    match value {
        Value::String(s) => ["CUDNN_DATA_", "CUDNN_POINTWISE_", "CUDNN_REDUCE_TENSOR_"]
            .iter()
            .find_map(|prefix| s.strip_prefix(prefix))
            .unwrap_or(s)
            .to_owned(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudnn_graph::ir::{Mode, Ragged, Tensor};
    use cudnn_graph::{DType, Graph};

    const RECORD: &str = r#"{"operationGraph": {"tensors": [
        {"name": "1", "dataType": "CUDNN_DATA_HALF", "dim": [2, 8], "stride": [8, 1], "isVirtual": false, "isByValue": false,
         "vectCount": 1, "vectDim": -1, "ptrAlignment": 16, "reordering": "CUDNN_TENSOR_REORDERING_NONE"},
        {"name": "2", "dataType": "CUDNN_DATA_HALF", "dim": [2, 8], "stride": [8, 1], "isVirtual": false, "isByValue": false,
         "vectCount": 1, "vectDim": -1, "ptrAlignment": 16, "reordering": "CUDNN_TENSOR_REORDERING_NONE"}],
      "nodes": [{"operation": "CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR", "pointwiseMode": "CUDNN_POINTWISE_EXP",
        "mathPrec": "CUDNN_DATA_FLOAT", "alpha1": 1.0, "alpha2": 1.0, "X": "1", "Y": "2"}]}}"#;

    #[test]
    fn a_record_that_differs_anywhere_is_found() {
        let mut g = Graph::new();
        let x = g.input("x", DType::F16, [2, 8]);
        let y = g.pointwise(Mode::Exp, &[x]);
        g.output(y, "y", DType::F16);
        let g = g.verify().unwrap();
        assert_eq!(differences(&g, RECORD), Vec::<String>::new());
        for (from, to) in [
            ("\"stride\": [8, 1]", "\"stride\": [9, 1]"),
            ("\"dim\": [2, 8]", "\"dim\": [2, 4]"),
            ("DATA_HALF", "DATA_FLOAT"),
            ("\"isVirtual\": false", "\"isVirtual\": true"),
            ("\"isByValue\": false", "\"isByValue\": true"),
            ("\"ptrAlignment\": 16", "\"ptrAlignment\": 8"),
            ("\"vectCount\": 1", "\"vectCount\": 2"),
            ("POINTWISE_EXP", "POINTWISE_LOG"),
            ("\"mathPrec\": \"CUDNN_DATA_FLOAT\"", "\"mathPrec\": \"CUDNN_DATA_HALF\""),
            ("\"alpha1\": 1.0", "\"alpha1\": 2.0"),
            ("\"X\": \"1\"", "\"X\": \"2\""),
            ("\"Y\": \"2\"", "\"Y\": \"2\", \"B\": \"1\""),
            ("\"nodes\"", "\"other\""),
            ("{\"operationGraph\"", "{\"graph\""),
        ] {
            let changed = RECORD.replacen(from, to, 1);
            assert_ne!(changed, RECORD, "{from}");
            assert!(!differences(&g, &changed).is_empty(), "{to}");
        }
    }
    #[test]
    fn offsets_are_part_of_the_tensors_that_have_them() {
        let mut g = Graph::new();
        let offsets = g.tensor(Tensor::device("offsets", DType::I64, [3, 1, 1, 1]));
        let x = g.tensor(Tensor::device("x", DType::F16, [2, 4, 8, 16]).ragged(Ragged { offsets, multiplier: None }));
        let y = g.pointwise(Mode::Exp, &[x]);
        g.output(y, "y", DType::F16);
        let g = g.verify().unwrap();
        let tensor = |name: &str, ty: &str, dims: &str, strides: &str, more: &str| {
            format!(
                r#"{{"name": "{name}", "dataType": "CUDNN_DATA_{ty}", "dim": [{dims}], "stride": [{strides}], "isVirtual": false,
                "isByValue": false, "vectCount": 1, "vectDim": -1, "ptrAlignment": 16{more}}}"#
            )
        };
        let record = |offsets: &str| {
            let [x, y] = [("2", offsets), ("3", "")].map(|(name, more)| tensor(name, "HALF", "2,4,8,16", "512,128,16,1", more));
            let node = r#"{"operation": "CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR", "pointwiseMode": "CUDNN_POINTWISE_EXP",
                "mathPrec": "CUDNN_DATA_FLOAT", "X": "2", "Y": "3"}"#;
            format!(r#"{{"operationGraph": {{"tensors": [{x}, {y}], "nodes": [{node}]}}}}"#)
        };
        let ragged = |ty: &str, dims: &str| format!(r#", "isRagged": [{}]"#, tensor("1", ty, dims, "1,1,1,1", ""));
        assert_eq!(differences(&g, &record(&ragged("INT64", "3,1,1,1"))), Vec::<String>::new());
        for other in ["", r#", "isRagged": []"#, &ragged("INT32", "3,1,1,1"), &ragged("INT64", "2,1,1,1")] {
            assert!(!differences(&g, &record(other)).is_empty(), "{other}");
        }
    }
}
