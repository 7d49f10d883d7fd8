//! What cuDNN says that it was sent: the operation graph inside a plan's JSON against the graph that the plan was made of.
//!
//! The library's record differs from what was sent in these ways, and no others:
//!
//! - ops come in an order of the library's own, so they are compared as a multiset; tensors are named by their unique ids;
//! - a pointwise op has `alpha1` and `alpha2`, a reduction `isDeterministic`, a tensor `vectCount`, `vectDim` and `reordering`:
//!   defaults of attributes that are not set;
//! - values of by-value tensors are not in it: they are given at execution;
//! - tensors that only an inner graph uses are listed with it; two virtual ones that carry an inner softmax are the encoder's.

use cudnn_graph::ir::op::{BandMask, BandSide, Matmul, Op, Pointwise, Reduction, ReductionMode, ScoreGraph, SdpaForward, Softmax};
use cudnn_graph::ir::{Mode, Storage, Tensor, TensorId};
use cudnn_graph::{DType, Verified};
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
    let mut meant = Meant { graph, tensors: Counts::new(), ops: Counts::new(), next_uid: graph.tensors().len() as i64 + 1 };
    for op in graph.ops() {
        let line = meant.op(op);
        *meant.ops.entry(line).or_default() += 1;
    }
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
        "isDeterministic" => value == &Value::Bool(false),
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

struct Meant<'g> {
    graph: &'g Verified,
    tensors: Counts,
    ops: Counts,
    /// For tensors that the graph does not have.
    next_uid: i64,
}

impl Meant<'_> {
    fn tensor(&mut self, id: TensorId) -> String {
        let tensor = &self.graph.tensors()[id.index()];
        self.describe(id.uid(), tensor)
    }

    fn describe(&mut self, uid: i64, tensor: &Tensor) -> String {
        let list = |v: &[i64]| format!("[{}]", v.iter().map(i64::to_string).collect::<Vec<_>>().join(","));
        let by_value = match tensor.storage {
            Storage::ByValue(_) | Storage::Constant(_) => true,
            Storage::Device | Storage::Virtual => false,
        };
        let line = op_line(
            "tensor",
            vec![
                ("name", uid.to_string()),
                ("dataType", data_type(tensor.dtype).to_owned()),
                ("dim", list(&tensor.dims.0)),
                ("stride", list(&tensor.strides.0)),
                ("isVirtual", tensor.is_virtual().to_string()),
                ("isByValue", by_value.to_string()),
                ("ptrAlignment", tensor.alignment.to_string()),
            ],
        );
        self.tensors.insert(line, 1);
        uid.to_string()
    }

    fn fields<'n>(&mut self, operands: &[(&'n str, Option<TensorId>)]) -> Vec<(&'n str, String)> {
        operands.iter().filter_map(|&(name, id)| id.map(|id| (name, self.tensor(id)))).collect()
    }

    fn op(&mut self, op: &Op) -> String {
        match op {
            Op::Pointwise(p) => self.pointwise(p),
            Op::Matmul(m) => self.matmul(m),
            Op::Reduction(r) => self.reduction(r),
            Op::Softmax(s) => self.softmax(s),
            Op::BandMask(m) => self.band_mask(m),
            Op::SdpaForward(s) => self.sdpa_forward(s),
            Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Slice(_)
            | Op::Rng(_)
            | Op::PagedLoad(_)
            | Op::BlockScaleQuantize(_)
            | Op::BlockScaleDequantize(_)
            | Op::SdpaBackward(_) => format!("{}: no lowering made one when this comparison was written", op.name()),
        }
    }

    fn pointwise(&mut self, p: &Pointwise) -> String {
        let mut fields = self.fields(&[("X", Some(p.x)), ("B", p.b), ("T", p.t), ("DY", p.dy), ("Y", Some(p.y))]);
        let name = p.mode.name().to_uppercase();
        fields.push(("pointwiseMode", if p.mode == Mode::BinarySelect { "BINARY_SELECT".to_owned() } else { name }));
        fields.push(("mathPrec", data_type(p.compute).to_owned()));
        fields.extend(p.params.axis.map(|axis| ("axis", axis.to_string())));
        op_line("POINTWISE", fields)
    }

    fn matmul(&mut self, m: &Matmul) -> String {
        let mut fields = self.fields(&[("matA", Some(m.a)), ("matB", Some(m.b)), ("matC", Some(m.c))]);
        fields.push(("mathPrec", data_type(m.compute).to_owned()));
        op_line("MATMUL", fields)
    }

    fn reduction(&mut self, r: &Reduction) -> String {
        let mut fields = self.fields(&[("X", Some(r.x)), ("Y", Some(r.y))]);
        let name = match r.mode {
            ReductionMode::MulNoZeros => "MUL_NO_ZEROS".to_owned(),
            ReductionMode::Add
            | ReductionMode::Mul
            | ReductionMode::Min
            | ReductionMode::Max
            | ReductionMode::Amax
            | ReductionMode::Avg
            | ReductionMode::Norm1
            | ReductionMode::Norm2 => r.mode.name().to_uppercase(),
        };
        fields.push(("reductionOp", name));
        fields.push(("mathPrec", data_type(r.compute).to_owned()));
        op_line("REDUCTION", fields)
    }

    fn softmax(&mut self, s: &Softmax) -> String {
        let fields = self.fields(&[
            ("X", Some(s.x)),
            ("Y", Some(s.y)),
            ("statsDesc", s.stats),
            ("maxDesc", s.max),
            ("sumExpDesc", s.sum_exp),
            ("sinkDesc", s.sink),
        ]);
        op_line("SOFTMAX", fields)
    }

    fn band_mask(&mut self, m: &BandMask) -> String {
        let mut fields = self.fields(&[
            ("X", Some(m.x)),
            ("B", Some(m.fill)),
            ("Y", Some(m.y)),
            ("shiftRightBoundDesc", m.shift_right),
            ("leftBoundDesc", m.left),
            ("seqLenQDesc", m.seq_q),
            ("seqLenKVDesc", m.seq_kv),
        ]);
        let comparison = match m.side {
            BandSide::Right => "CMP_GE",
            BandSide::Left => "CMP_GT",
        };
        fields.push(("comparisonMode", comparison.to_owned()));
        op_line("DIAGONAL_BAND_MASK", fields)
    }

    fn sdpa_forward(&mut self, s: &SdpaForward) -> String {
        let mut fields = self.fields(&[("Q", Some(s.q)), ("K", Some(s.k)), ("V", Some(s.v)), ("O", Some(s.o)), ("scale", s.attn_scale)]);
        if let Some(stats) = s.stats {
            let dims = |id: TensorId| self.graph.tensors()[id.index()].dims.0.clone();
            let (q, k) = (dims(s.q), dims(s.k));
            let stand_in = Tensor::virtual_("", DType::F32, vec![q[0], q[1], q[2], k[2]]);
            let (x, y) = (self.describe(self.next_uid, &stand_in), self.describe(self.next_uid + 1, &stand_in));
            self.next_uid += 2;
            let inner = vec![("X", x), ("Y", y), ("statsDesc", self.tensor(stats))];
            fields.push(("softmax", op_line("SOFTMAX", inner)));
        }
        if let Some(ScoreGraph { input, output, ops }) = &s.score {
            for op in ops {
                let line = self.op(op);
                *self.ops.entry(line).or_default() += 1;
            }
            fields.push(("subgraphInputUid", input.uid().to_string()));
            fields.push(("subgraphOutputUid", output.uid().to_string()));
        }
        op_line("SDPA_FWD", fields)
    }
}

fn data_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "FLOAT",
        DType::F64 => "DOUBLE",
        DType::F16 => "HALF",
        DType::BF16 => "BFLOAT16",
        DType::I8 => "INT8",
        DType::U8 => "UINT8",
        DType::I32 => "INT32",
        DType::I64 => "INT64",
        DType::Bool => "BOOLEAN",
        DType::F8E4M3 => "FP8_E4M3",
        DType::F8E5M2 => "FP8_E5M2",
        DType::F8E8M0 => "FP8_E8M0",
        DType::F4E2M1 => "FP4_E2M1",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudnn_graph::Graph;

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
}
