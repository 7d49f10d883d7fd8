//! Encodes a verified graph for a runtime version as a [`Program`]. Uses no library.
//!
//! Every descriptor kind, attribute, element type and mode has the version that introduced it ([`crate::ffi::codes`]). A graph that needs anything
//! newer than the runtime is refused here, with a list of everything that is too new, so nothing newer is ever set.

mod experts;
mod network;
mod op;
mod sdpa;

use crate::ffi::codes::{Attribute, AttributeType, DataType, Kind, Reordering as ReorderingCode};
use crate::ir::ty::DType;
use crate::ir::{Op, Reordering, Scalar, Storage, Tensor, TensorId, Verified};
use crate::program::{Descriptor, DescriptorId, Program, Setting, Values};
use crate::version::Version;
use std::collections::BTreeSet;
use std::fmt;

/// The error for a graph with features that the runtime is too old for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooNew {
    /// The version of the cuDNN runtime.
    pub runtime: Version,
    /// Name of each missing feature, and the first cuDNN version that has it.
    pub needs: Vec<(String, Version)>,
}

impl fmt::Display for TooNew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuDNN {} lacks", self.runtime)?;
        for (i, (name, since)) in self.needs.iter().enumerate() {
            write!(f, "{} {name} (since {since})", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl std::error::Error for TooNew {}

/// Lowers a graph to backend descriptors for a version of the cuDNN runtime.
///
/// # Errors
/// Returns every feature of the graph that the runtime is too old for.
pub fn encode(graph: &Verified, runtime: Version) -> Result<Program, TooNew> {
    encoded(graph, runtime, false)
}

/// Lowers a graph as [`encode`] does, and marks its shapes as dynamic: cuDNN then offers engines whose kernels do not depend on the extents, so that plans of
/// graphs with other extents can share them ([`Policy::dynamic_shapes`](crate::Policy::dynamic_shapes)).
///
/// # Errors
/// Returns every feature of the graph, and of such sharing, that the runtime is too old for.
pub fn encode_dynamic(graph: &Verified, runtime: Version) -> Result<Program, TooNew> {
    encoded(graph, runtime, true)
}

fn encoded(graph: &Verified, runtime: Version, dynamic: bool) -> Result<Program, TooNew> {
    let mut encoder = Encoder {
        runtime,
        descriptors: Vec::new(),
        tensors: vec![None; graph.tensors().len()],
        graph,
        needs: BTreeSet::new(),
        next_uid: graph.tensors().len() as i64 + 1,
    };
    let ops = encoder.ops(graph.ops());
    encoder.push(Kind::OPERATIONGRAPH, "graph", |d| {
        d.descriptors(Attribute::OPERATIONGRAPH_OPS, &ops);
        if dynamic {
            d.bool(Attribute::OPERATIONGRAPH_IS_DYNAMIC_SHAPE_ENABLED, true);
        }
    });
    if dynamic {
        // No descriptor of the program, but plans set them.
        encoder.need(Kind::KERNEL_CACHE.since(), Kind::KERNEL_CACHE);
        for attribute in KERNEL_CACHE {
            encoder.need(attribute.since(), attribute);
        }
    }
    if encoder.needs.is_empty() {
        Ok(Program { descriptors: encoder.descriptors })
    } else {
        Err(TooNew { runtime, needs: encoder.needs.into_iter().map(|(since, name)| (name, since)).collect() })
    }
}

/// The attributes of a kernel cache and of a plan that uses it.
const KERNEL_CACHE: [Attribute; 3] =
    [Attribute::EXECUTION_PLAN_KERNEL_CACHE, Attribute::KERNEL_CACHE_OPERATION_GRAPH, Attribute::KERNEL_CACHE_IS_ENGINECFG_KERNEL_CACHED];

struct Encoder<'a> {
    runtime: Version,
    graph: &'a Verified,
    descriptors: Vec<Descriptor>,
    /// The descriptor of each tensor, once created.
    tensors: Vec<Option<DescriptorId>>,
    needs: BTreeSet<(Version, String)>,
    /// Ids for tensors that the backend needs but the graph does not have.
    next_uid: i64,
}

impl Encoder<'_> {
    fn ops(&mut self, ops: &[Op]) -> Vec<DescriptorId> {
        ops.iter().map(|op| self.op(op)).collect()
    }

    fn need(&mut self, since: Version, name: impl fmt::Display) {
        if since > self.runtime {
            self.needs.insert((since, name.to_string()));
        }
    }

    fn push(&mut self, kind: Kind, label: &str, fill: impl FnOnce(&mut Settings)) -> DescriptorId {
        self.need(kind.since(), kind);
        let mut settings = Settings { list: Vec::new(), code_since: Vec::new() };
        fill(&mut settings);
        for s in &settings.list {
            self.need(s.attribute.since(), s.attribute);
        }
        for (since, name) in settings.code_since {
            self.need(since, name);
        }
        self.descriptors.push(Descriptor { kind, label: label.to_owned(), settings: settings.list });
        DescriptorId(self.descriptors.len() - 1)
    }

    fn tensor(&mut self, id: TensorId) -> DescriptorId {
        if let Some(done) = self.tensors[id.index()] {
            return done;
        }
        let graph = self.graph;
        let tensor = &graph.tensors()[id.index()];
        let offsets = tensor.ragged.map(|r| (self.tensor(r.offsets), r.multiplier));
        let made = self.tensor_as(tensor, id.uid(), offsets);
        self.tensors[id.index()] = Some(made);
        made
    }

    fn tensor_as(&mut self, tensor: &Tensor, uid: i64, ragged: Option<(DescriptorId, Option<i64>)>) -> DescriptorId {
        self.push(Kind::TENSOR, &tensor.name, |d| {
            d.dtype(Attribute::TENSOR_DATA_TYPE, tensor.dtype);
            d.i64(Attribute::TENSOR_DIMENSIONS, &tensor.dims.0);
            d.i64(Attribute::TENSOR_STRIDES, &tensor.strides.0);
            d.i64(Attribute::TENSOR_UNIQUE_ID, &[uid]);
            d.i64(Attribute::TENSOR_BYTE_ALIGNMENT, &[i64::from(tensor.alignment)]);
            match tensor.storage {
                Storage::Device => {}
                Storage::Virtual => d.bool(Attribute::TENSOR_IS_VIRTUAL, true),
                Storage::ByValue(_) => d.bool(Attribute::TENSOR_IS_BY_VALUE, true),
                Storage::Constant(value) => {
                    d.bool(Attribute::TENSOR_IS_BY_VALUE, true);
                    let bytes = match value {
                        Scalar::F32(x) => x.to_ne_bytes().to_vec(),
                        Scalar::I32(x) => x.to_ne_bytes().to_vec(),
                        Scalar::I64(x) => x.to_ne_bytes().to_vec(),
                    };
                    d.set(Attribute::TENSOR_CONSTANT_VALUE, AttributeType::VOID_PTR, Values::Bytes(bytes));
                }
            }
            match tensor.reordering {
                Reordering::None => {}
                Reordering::F8x128x4 => {
                    let code = ReorderingCode::F8_128X4;
                    d.code(Attribute::TENSOR_REORDERING_MODE, AttributeType::TENSOR_REORDERING_MODE, code.0, code.since(), code);
                }
            }
            if let Some((offsets, multiplier)) = ragged {
                d.descriptors(Attribute::TENSOR_RAGGED_OFFSET_DESC, &[offsets]);
                if let Some(m) = multiplier {
                    d.i64(Attribute::TENSOR_RAGGED_OFFSET_MULTIPLIER, &[m]);
                }
            }
        })
    }
}

/// The attributes of one descriptor under construction.
struct Settings {
    list: Vec<Setting>,
    code_since: Vec<(Version, String)>,
}

impl Settings {
    fn set(&mut self, attribute: Attribute, ty: AttributeType, values: Values) {
        self.list.push(Setting { attribute, ty, values });
    }

    fn i64(&mut self, attribute: Attribute, values: &[i64]) {
        self.set(attribute, AttributeType::INT64, Values::I64(values.to_vec()));
    }

    /// Sets one fraction for each of two spatial axes.
    fn fractions(&mut self, attribute: Attribute, fraction: [i64; 2]) {
        self.set(attribute, AttributeType::FRACTION, Values::Fractions(vec![fraction; 2]));
    }

    fn i32(&mut self, attribute: Attribute, values: &[i32]) {
        self.set(attribute, AttributeType::INT32, Values::I32(values.to_vec()));
    }

    fn f32(&mut self, attribute: Attribute, value: f32) {
        self.set(attribute, AttributeType::FLOAT, Values::F32(vec![value]));
    }

    fn f64(&mut self, attribute: Attribute, value: Option<f64>) {
        if let Some(value) = value {
            self.set(attribute, AttributeType::DOUBLE, Values::F64(vec![value]));
        }
    }

    /// Sets a factor of a result, which has the width of the arithmetic.
    fn blend(&mut self, attribute: Attribute, compute: DType, value: f32) {
        if compute == DType::F64 {
            self.f64(attribute, Some(f64::from(value)));
        } else {
            self.f32(attribute, value);
        }
    }

    fn bool(&mut self, attribute: Attribute, value: bool) {
        self.set(attribute, AttributeType::BOOLEAN, Values::Bool(value));
    }

    fn descriptors(&mut self, attribute: Attribute, ids: &[DescriptorId]) {
        self.set(attribute, AttributeType::BACKEND_DESCRIPTOR, Values::Descriptors(ids.to_vec()));
    }

    fn descriptor(&mut self, attribute: Attribute, id: impl Into<Option<DescriptorId>>) {
        if let Some(id) = id.into() {
            self.descriptors(attribute, &[id]);
        }
    }

    fn code(&mut self, attribute: Attribute, ty: AttributeType, code: i32, since: Version, name: impl fmt::Display) {
        self.code_since.push((since, name.to_string()));
        self.set(attribute, ty, Values::Code(code, name.to_string()));
    }

    fn dtype(&mut self, attribute: Attribute, dtype: DType) {
        let code = data_type(dtype);
        self.code(attribute, AttributeType::DATA_TYPE, code.0, code.since(), code);
    }
}

pub(crate) fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::F32 => DataType::FLOAT,
        DType::F64 => DataType::DOUBLE,
        DType::F16 => DataType::HALF,
        DType::BF16 => DataType::BFLOAT16,
        DType::I8 => DataType::INT8,
        DType::U8 => DataType::UINT8,
        DType::I32 => DataType::INT32,
        DType::I64 => DataType::INT64,
        DType::Bool => DataType::BOOLEAN,
        DType::F8E4M3 => DataType::FP8_E4M3,
        DType::F8E5M2 => DataType::FP8_E5M2,
        DType::F8E8M0 => DataType::FP8_E8M0,
        DType::F4E2M1 => DataType::FP4_E2M1,
        DType::I4 => DataType::INT4,
        DType::U4 => DataType::UINT4,
    }
}
