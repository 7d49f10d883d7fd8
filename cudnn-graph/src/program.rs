//! Backend descriptors as plain data: the output of encoding, which `ffi` replays and golden files store.

use crate::ffi::codes::{Attribute, AttributeType, Kind};
use serde::Serialize;
use std::fmt;

/// The id of a descriptor in one program: its index in [`Program::descriptors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct DescriptorId(pub(crate) usize);

/// The elements to which an attribute is set.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Values {
    /// The elements are 64-bit integers.
    I64(Vec<i64>),
    /// The elements are 32-bit integers.
    I32(Vec<i32>),
    /// The elements are 32-bit floats.
    F32(Vec<f32>),
    /// The elements are 64-bit floats.
    F64(Vec<f64>),
    /// One boolean.
    Bool(bool),
    /// One code of an enumeration, and its name for messages.
    Code(i32, String),
    /// Other descriptors of the same program.
    Descriptors(Vec<DescriptorId>),
    /// The bytes of one scalar, which cuDNN receives as a pointer.
    Bytes(Vec<u8>),
}

impl Values {
    /// Returns whether the elements can be set as attribute type `ty`.
    pub fn are(&self, ty: AttributeType) -> bool {
        const PLAIN: [AttributeType; 8] = [
            AttributeType::INT64,
            AttributeType::INT32,
            AttributeType::FLOAT,
            AttributeType::DOUBLE,
            AttributeType::BOOLEAN,
            AttributeType::BACKEND_DESCRIPTOR,
            AttributeType::VOID_PTR,
            AttributeType::CHAR,
        ];
        match self {
            Values::I64(_) => ty == AttributeType::INT64,
            Values::I32(_) => ty == AttributeType::INT32,
            Values::F32(_) => ty == AttributeType::FLOAT,
            Values::F64(_) => ty == AttributeType::DOUBLE,
            Values::Bool(_) => ty == AttributeType::BOOLEAN,
            Values::Code(..) => !PLAIN.contains(&ty) && ty != AttributeType::HANDLE,
            Values::Descriptors(_) => ty == AttributeType::BACKEND_DESCRIPTOR,
            Values::Bytes(_) => ty == AttributeType::VOID_PTR,
        }
    }
}

/// One attribute of a backend descriptor: the arguments of a `cudnnBackendSetAttribute` call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// The attribute that is set.
    pub attribute: Attribute,
    /// The type of the attribute's elements.
    pub ty: AttributeType,
    /// The elements to which the attribute is set.
    pub values: Values,
}

/// One backend descriptor as plain data: it is created, its attributes are set in this order, and it is finalized.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Descriptor {
    /// The kind of the backend descriptor.
    pub kind: Kind,
    /// The name of a tensor or an operation, for messages.
    pub label: String,
    /// The attributes that are set, in order.
    pub settings: Vec<Setting>,
}

/// The backend descriptors of a graph in order of creation; each refers only to earlier ones. The last is the operation graph, to which
/// the replay adds a handle if there is one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Program {
    /// Descriptors in order of creation.
    pub descriptors: Vec<Descriptor>,
}

impl Program {
    /// Iterates over the ids of all descriptors, in order.
    pub fn ids(&self) -> impl Iterator<Item = DescriptorId> + use<> {
        (0..self.descriptors.len()).map(DescriptorId)
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Values::I64(v) => write!(f, "{v:?}"),
            Values::I32(v) => write!(f, "{v:?}"),
            Values::F32(v) => write!(f, "{v:?}"),
            Values::F64(v) => write!(f, "{v:?}"),
            Values::Bool(v) => write!(f, "{v}"),
            Values::Code(_, name) => f.write_str(name),
            Values::Descriptors(ids) => {
                let names: Vec<String> = ids.iter().map(|id| format!("d{}", id.0)).collect();
                write!(f, "{}", names.join(" "))
            }
            Values::Bytes(bytes) => write!(f, "{bytes:?}"),
        }
    }
}

impl fmt::Display for Program {
    /// One line per descriptor and one per attribute.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, d) in self.descriptors.iter().enumerate() {
            writeln!(f, "d{n} {} {}", d.kind, d.label)?;
            for s in &d.settings {
                writeln!(f, "  {} {} {}", s.attribute, s.ty, s.values)?;
            }
        }
        Ok(())
    }
}
