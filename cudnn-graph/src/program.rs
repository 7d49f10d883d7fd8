//! Backend descriptors as plain data: the output of encoding, which `ffi` replays and golden files store.
//!
//! A caller can also write a program, or change one and read it from JSON, for operations and attributes that are newer than this crate:
//! [`Planner::for_program`](crate::Planner::for_program) plans it. In JSON, kinds, attributes and types are names without NVIDIA's prefixes, or
//! numbers.
//!
//! ```
//! use cudnn_graph::ir::Mode;
//! use cudnn_graph::{DType, Graph, Program, Version, encode};
//!
//! let mut g = Graph::new();
//! let x = g.input("x", DType::F32, [1, 8, 8]);
//! let y = g.pointwise(Mode::Exp, &[x]);
//! g.output(y, "y", DType::F32);
//! let json = serde_json::to_string(&encode(&g.verify()?, Version::new(9, 19, 0))?)?;
//! assert!(json.contains(r#"{"attribute":"TENSOR_DIMENSIONS","ty":"INT64","values":{"i64":[1,8,8]}}"#));
//! let program: Program = serde_json::from_str(&json)?;
//! program.check()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::error::Error;
use crate::ffi::Library;
use crate::ffi::codes::{Attribute, AttributeType, Kind};
use crate::ffi::descriptor::replay;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The id of a descriptor in one program: its index in [`Program::descriptors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DescriptorId(pub(crate) usize);

/// The elements to which an attribute is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Values {
    /// The elements are 64-bit integers.
    I64(Vec<i64>),
    /// The elements are 32-bit integers.
    I32(Vec<i32>),
    /// The elements are 32-bit floats.
    F32(#[serde(with = "crate::ir::float::f32::list")] Vec<f32>),
    /// The elements are 64-bit floats.
    F64(#[serde(with = "crate::ir::float::f64::list")] Vec<f64>),
    /// The elements are fractions, each a numerator and a denominator.
    Fractions(Vec<[i64; 2]>),
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
        const PLAIN: [AttributeType; 9] = [
            AttributeType::INT64,
            AttributeType::INT32,
            AttributeType::FLOAT,
            AttributeType::DOUBLE,
            AttributeType::FRACTION,
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
            Values::Fractions(_) => ty == AttributeType::FRACTION,
            Values::Bool(_) => ty == AttributeType::BOOLEAN,
            Values::Code(..) => !PLAIN.contains(&ty) && ty != AttributeType::HANDLE,
            Values::Descriptors(_) => ty == AttributeType::BACKEND_DESCRIPTOR,
            Values::Bytes(_) => ty == AttributeType::VOID_PTR,
        }
    }
}

/// One attribute of a backend descriptor: the arguments of a `cudnnBackendSetAttribute` call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// The attribute that is set.
    pub attribute: Attribute,
    /// The type of the attribute's elements.
    pub ty: AttributeType,
    /// The elements to which the attribute is set.
    pub values: Values,
}

/// One backend descriptor as plain data: it is created, its attributes are set in this order, and it is finalized.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Descriptors in order of creation.
    pub descriptors: Vec<Descriptor>,
}

impl Program {
    /// Iterates over the ids of all descriptors, in order.
    pub fn ids(&self) -> impl Iterator<Item = DescriptorId> + use<> {
        (0..self.descriptors.len()).map(DescriptorId)
    }

    /// Checks what a replay relies on: values have the stated types, descriptors refer to earlier ones only, and the last is an operation
    /// graph. cuDNN checks everything else.
    ///
    /// # Errors
    /// Returns [`Error::Program`] with every mistake, one per line.
    pub fn check(&self) -> Result<(), Error> {
        let mut wrong = Vec::new();
        for (n, descriptor) in self.descriptors.iter().enumerate() {
            let at = |s: &Setting| format!("d{n} {} {}: {}", descriptor.kind, descriptor.label, s.attribute);
            for s in &descriptor.settings {
                if !s.values.are(s.ty) {
                    wrong.push(format!("{}: got {:?}, expected elements of type {}", at(s), s.values, s.ty));
                }
                match &s.values {
                    Values::Descriptors(ids) => {
                        let later = ids.iter().filter(|id| id.0 >= n);
                        wrong.extend(later.map(|id| format!("{}: got d{}, expected an earlier descriptor", at(s), id.0)));
                    }
                    Values::I64(_)
                    | Values::I32(_)
                    | Values::F32(_)
                    | Values::F64(_)
                    | Values::Fractions(_)
                    | Values::Bool(_)
                    | Values::Code(..)
                    | Values::Bytes(_) => {}
                }
            }
        }
        if self.descriptors.last().is_none_or(|last| last.kind != Kind::OPERATIONGRAPH) {
            wrong.push(format!("the last descriptor is not of kind {}", Kind::OPERATIONGRAPH));
        }
        if wrong.is_empty() { Ok(()) } else { Err(Error::Program(wrong.join("\n"))) }
    }

    /// Lets cuDNN check the program: creates and finalizes every descriptor, and drops them. This queries no engines, so it needs no device, and
    /// takes microseconds.
    ///
    /// # Errors
    /// Returns [`Error::Program`] for an invalid program, or cuDNN's error, which names the descriptor that it refuses.
    pub fn finalize(&self, library: &'static Library) -> Result<(), Error> {
        replay(library, self, None).map(|_| ())
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Values::I64(v) => write!(f, "{v:?}"),
            Values::I32(v) => write!(f, "{v:?}"),
            Values::F32(v) => write!(f, "{v:?}"),
            Values::F64(v) => write!(f, "{v:?}"),
            Values::Fractions(v) => {
                let texts: Vec<String> = v.iter().map(|[above, below]| format!("{above}/{below}")).collect();
                write!(f, "[{}]", texts.join(", "))
            }
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
