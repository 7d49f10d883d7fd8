//! Binds addresses and scalars to the tensors of a plan, and checks them before anything runs.

use crate::encode::data_type;
use crate::error::Error;
use crate::ffi::codes::{Attribute, Kind};
use crate::ir::ty::{DType, Dims, Strides};
use crate::ir::{Scalar, Storage, Tensor, TensorId, Verified};
use crate::program::{Descriptor, Program, Values};
use sdpa_driver::DeviceSlice;
use smallvec::SmallVec;
use std::fmt;

/// The values that a caller binds to the tensors of a plan, by id.
#[derive(Clone, Debug, Default)]
pub struct Bindings {
    // Store the items inline: a call whose plan is cached must not allocate.
    slices: SmallVec<[(TensorId, DeviceSlice); 8]>,
    values: SmallVec<[(TensorId, Scalar); 4]>,
}

impl Bindings {
    /// Creates bindings that bind no tensor yet.
    pub fn new() -> Bindings {
        Bindings::default()
    }

    /// Binds a tensor to device memory, and returns the bindings.
    #[must_use]
    pub fn slice(mut self, tensor: TensorId, slice: DeviceSlice) -> Self {
        self.push_slice(tensor, slice);
        self
    }

    /// Binds a tensor to a scalar from host memory, and returns the bindings.
    #[must_use]
    pub fn value(mut self, tensor: TensorId, value: Scalar) -> Self {
        self.push_value(tensor, value);
        self
    }

    /// Binds a tensor to device memory, like [`Bindings::slice`], but in place.
    pub fn push_slice(&mut self, tensor: TensorId, slice: DeviceSlice) {
        self.slices.push((tensor, slice));
    }

    /// Binds a tensor to a scalar from host memory, like [`Bindings::value`], but in place.
    pub fn push_value(&mut self, tensor: TensorId, value: Scalar) {
        self.values.push((tensor, value));
    }
}

/// A mistake in the binding of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindingError {
    /// The tensor's contents determine the addresses that the plan accesses, and no caller vouched for them: see
    /// [`launch_addressed`](crate::launch_addressed).
    #[error(
        "{name}: its contents determine which addresses the plan accesses, and launch cannot check them; use the unsafe launch_addressed"
    )]
    Addressing {
        /// The tensor's name.
        name: String,
    },
    /// No value is bound to the tensor.
    #[error("{name}: got no buffer, expected one")]
    Missing {
        /// The name of the tensor.
        name: String,
    },
    /// A name that no input or output of the plan has.
    #[error("{name}: the plan has no tensor of this name, expected one of {known}")]
    UnknownName {
        /// The name that was given.
        name: String,
        /// The names of the inputs and outputs, separated by commas.
        known: String,
    },
    /// The slice has another element type than the tensor.
    #[error("{name}: got a slice of {given}, expected elements of type {wanted}")]
    WrongElement {
        /// The name of the tensor.
        name: String,
        /// The element type of the slice.
        given: &'static str,
        /// Element type of the tensor.
        wanted: DType,
    },
    /// The slice is on another device than the stream.
    #[error("{name}: got memory of device {got}, expected device {expected}, the device of the stream")]
    WrongDevice {
        /// The name of the tensor.
        name: String,
        /// The ordinal of the slice's device.
        got: usize,
        /// The ordinal of the stream's device.
        expected: usize,
    },
    /// A tensor that the plan writes is bound to memory for reading.
    #[error("{name}: got memory for reading, but the plan writes this tensor; bind it as an output")]
    Written {
        /// The name of the tensor.
        name: String,
    },
    /// A tensor that the plan only reads is bound to memory for writing.
    #[error("{name}: got memory for writing, but the plan only reads this tensor; bind it as an input")]
    OnlyRead {
        /// The name of the tensor.
        name: String,
    },
    /// A tensor that the plan writes shares memory with another tensor.
    #[error("{name}: the plan writes this tensor, and its memory overlaps that of {other}; expected memory of its own")]
    Overlap {
        /// The name of the tensor that is written.
        name: String,
        /// The name of the other tensor.
        other: String,
    },
    /// Two values are bound to the tensor.
    #[error("{name}: bound more than once")]
    Doubled {
        /// The name of the tensor.
        name: String,
    },
    /// A value is bound to a tensor that the caller cannot bind, or that needs the other kind of value (device memory or a scalar).
    #[error("{id}: got {what} this tensor, but the plan expects none")]
    Unknown {
        /// The id of the tensor.
        id: TensorId,
        /// The part of the message that names the kind of the given value: `device memory for` or `a scalar for`.
        what: &'static str,
    },
    /// The number of addresses or scalars that were passed differs from the number of ports, which are the inputs and outputs of the
    /// plan.
    #[error("got {given} {what}, expected {need}")]
    Count {
        /// The kind of the values that were passed: `addresses` or `scalars`.
        what: &'static str,
        /// The number of values that were given.
        given: usize,
        /// The number of values that the plan needs.
        need: usize,
    },
    /// The memory is smaller than the tensor.
    #[error("{name}: got {bytes} bytes, expected at least {need}")]
    Short {
        /// The name of the tensor.
        name: String,
        /// Size of the bound memory, in bytes.
        bytes: u64,
        /// Size that the tensor needs, in bytes.
        need: u64,
    },
    /// The address is not aligned as the plan requires. Kernels do not check the alignment and would compute garbage.
    #[error("{name}: address {address:#x} is not a multiple of {alignment} bytes")]
    Misaligned {
        /// The name of the tensor.
        name: String,
        /// The bound address.
        address: u64,
        /// Alignment that the plan requires, in bytes.
        alignment: u32,
    },
    /// The scalar has another element type than the tensor.
    #[error("{name}: got a scalar of type {given}, expected {wanted}")]
    WrongType {
        /// The name of the tensor.
        name: String,
        /// Element type of the scalar.
        given: DType,
        /// Element type of the tensor.
        wanted: DType,
    },
}

/// Every mistake in a set of bindings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingErrors(pub Vec<BindingError>);

impl fmt::Display for BindingErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, e) in self.0.iter().enumerate() {
            write!(f, "{}{e}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for BindingErrors {}

/// A tensor in device memory that an execution of a plan reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePort {
    /// The tensor in the graph that the memory belongs to.
    pub id: TensorId,
    /// The tensor's name, for errors.
    pub name: String,
    /// Element type of the tensor.
    pub dtype: DType,
    /// True if the plan writes the tensor.
    pub written: bool,
    /// Size that the memory must have at least, in bytes. It is 0 for a tensor with ragged offsets, which determine its size.
    pub bytes: u64,
    /// Alignment that the address must have, in bytes.
    pub alignment: u32,
    /// True if the tensor's contents determine the addresses that the plan accesses (lengths, offsets, pages).
    pub addressing: bool,
}

/// A scalar that a plan reads from host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct ValuePort {
    /// The tensor in the graph to which the scalar belongs.
    pub id: TensorId,
    /// The tensor's name, for errors.
    pub name: String,
    /// Element type of the scalar.
    pub dtype: DType,
    /// The value that the graph supplies; `None` if the caller must bind one.
    pub value: Option<Scalar>,
}

/// The inputs and outputs of an execution of a plan, in the plan's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ports {
    /// Tensors in device memory, in the plan's order.
    pub device: Vec<DevicePort>,
    /// Scalars that each execution reads from host memory, in the plan's order.
    pub values: Vec<ValuePort>,
}

/// The addresses and scalars of valid bindings, in the order of the plan's ports.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bound {
    pub(crate) addresses: SmallVec<[u64; 8]>,
    pub(crate) values: SmallVec<[Scalar; 8]>,
}

/// A tensor descriptor of a program.
struct PlainTensor<'a> {
    descriptor: &'a Descriptor,
}

impl<'a> PlainTensor<'a> {
    fn of(descriptor: &'a Descriptor) -> Self {
        PlainTensor { descriptor }
    }

    fn get(&self, attribute: Attribute) -> Option<&'a Values> {
        self.descriptor.settings.iter().find(|s| s.attribute == attribute).map(|s| &s.values)
    }

    fn flag(&self, attribute: Attribute) -> bool {
        self.get(attribute) == Some(&Values::Bool(true))
    }

    fn numbers(&self, attribute: Attribute) -> Result<Vec<i64>, String> {
        match self.get(attribute) {
            Some(Values::I64(numbers)) => Ok(numbers.clone()),
            other => Err(format!("{attribute} is {other:?}, expected 64-bit integers")),
        }
    }

    /// Adds the port of the tensor.
    fn port(&self, ports: &mut Ports) -> Result<(), String> {
        let dtype = match self.get(Attribute::TENSOR_DATA_TYPE) {
            Some(Values::Code(code, _)) => DType::ALL.into_iter().find(|&dtype| data_type(dtype).0 == *code),
            Some(_) | None => None,
        };
        let dtype = dtype.ok_or("its element type is unknown")?;
        let uid = self.numbers(Attribute::TENSOR_UNIQUE_ID)?;
        let id = match uid[..] {
            [uid] if uid >= 1 => u32::try_from(uid - 1).map(TensorId).ok(),
            _ => None,
        };
        let id = id.ok_or_else(|| format!("{} is {uid:?}, expected a number from 1 to {}", Attribute::TENSOR_UNIQUE_ID, u32::MAX))?;
        let name = self.descriptor.label.clone();
        if self.flag(Attribute::TENSOR_IS_BY_VALUE) {
            ports.values.push(ValuePort { id, name, dtype, value: None });
            return Ok(());
        }
        let (dims, strides) = (Dims(self.numbers(Attribute::TENSOR_DIMENSIONS)?), Strides(self.numbers(Attribute::TENSOR_STRIDES)?));
        let alignment = self.numbers(Attribute::TENSOR_BYTE_ALIGNMENT)?;
        let &[alignment] = &alignment[..] else { return Err(format!("{} is not one number", Attribute::TENSOR_BYTE_ALIGNMENT)) };
        let alignment = u32::try_from(alignment).ok().filter(|n| n.is_power_of_two()).ok_or("its alignment is not a power of two")?;
        let tensor = Tensor::device(name.clone(), dtype, dims).strides(strides);
        let bytes = tensor.bytes().filter(|_| tensor.strides.0.len() == tensor.dims.rank());
        let bytes = bytes.ok_or_else(|| format!("extents {} and strides {} have no size", tensor.dims, tensor.strides))?;
        let ragged = self.get(Attribute::TENSOR_RAGGED_OFFSET_DESC).is_some();
        let bytes = if ragged { 0 } else { bytes };
        ports.device.push(DevicePort { id, name, dtype, written: true, bytes, alignment, addressing: true });
        Ok(())
    }
}

impl Ports {
    /// Returns the ports of a graph: its tensors in device memory, and its scalars in host memory.
    pub fn of(graph: &Verified) -> Ports {
        let mut ports = Ports::default();
        let (addressing, written) = (graph.graph().addressing(), graph.graph().written());
        for (id, tensor) in graph.ids().zip(graph.tensors()) {
            match tensor.storage {
                Storage::Device => ports.device.push(DevicePort {
                    id,
                    name: tensor.name.clone(),
                    dtype: tensor.dtype,
                    written: written.contains(&id),
                    bytes: if tensor.ragged.is_some() { 0 } else { tensor.bytes().unwrap_or(u64::MAX) },
                    alignment: tensor.alignment,
                    addressing: addressing.contains(&id),
                }),
                Storage::ByValue(value) => {
                    ports.values.push(ValuePort { id, name: tensor.name.clone(), dtype: tensor.dtype, value });
                }
                Storage::Virtual | Storage::Constant(_) => {}
            }
        }
        ports
    }

    /// Returns the ports of a program that a caller wrote: its tensors that are neither virtual nor constant. Which of them determine
    /// addresses and which it writes is unknown, so all do and all are ([`DevicePort::addressing`], [`DevicePort::written`]).
    ///
    /// # Errors
    /// Returns [`Error::Program`] with every tensor whose type, extents, strides or id cannot be bound.
    pub fn of_program(program: &Program) -> Result<Ports, Error> {
        let (mut ports, mut wrong) = (Ports::default(), Vec::new());
        for descriptor in program.descriptors.iter().filter(|d| d.kind == Kind::TENSOR) {
            let tensor = PlainTensor::of(descriptor);
            if tensor.flag(Attribute::TENSOR_IS_VIRTUAL) || tensor.get(Attribute::TENSOR_CONSTANT_VALUE).is_some() {
                continue;
            }
            if let Err(what) = tensor.port(&mut ports) {
                wrong.push(format!("tensor {}: {what}", descriptor.label));
            }
        }
        if wrong.is_empty() { Ok(ports) } else { Err(Error::Program(wrong.join("\n"))) }
    }

    /// Refuses a plan with tensors whose contents determine the addresses that the plan accesses.
    pub(crate) fn refuse_addressing(&self) -> Result<(), BindingErrors> {
        let addressing = self.device.iter().filter(|p| p.addressing).map(|p| BindingError::Addressing { name: p.name.clone() });
        let addressing: Vec<BindingError> = addressing.collect();
        if addressing.is_empty() { Ok(()) } else { Err(BindingErrors(addressing)) }
    }

    /// Returns an error for each pair of tensors that share memory and of which the plan writes at least one.
    #[cfg(any(test, all(feature = "cudarc", not(target_vendor = "apple"))))]
    pub(crate) fn overlaps(&self, bindings: &Bindings) -> Vec<BindingError> {
        let bound: SmallVec<[(&DevicePort, u64, u64); 8]> =
            bindings.slices.iter().filter_map(|(id, slice)| self.range(*id, *slice)).collect();
        let mut errors = Vec::new();
        for (n, (port, from, to)) in bound.iter().enumerate() {
            for (other, other_from, other_to) in &bound[n + 1..] {
                if port.id == other.id || from >= other_to || other_from >= to || !(port.written || other.written) {
                    continue;
                }
                let (name, other) = if port.written { (port, other) } else { (other, port) };
                errors.push(BindingError::Overlap { name: name.name.clone(), other: other.name.clone() });
            }
        }
        errors
    }

    /// Returns the addresses that a tensor occupies in its memory: the first, and the one after the last.
    #[cfg(any(test, all(feature = "cudarc", not(target_vendor = "apple"))))]
    fn range(&self, id: TensorId, slice: DeviceSlice) -> Option<(&DevicePort, u64, u64)> {
        let port = self.device.iter().find(|p| p.id == id)?;
        let bytes = if port.bytes == 0 { slice.bytes } else { port.bytes };
        Some((port, slice.address, slice.address.saturating_add(bytes)))
    }

    /// Checks bindings against the ports, and returns their addresses and scalars in the order of the ports.
    pub(crate) fn bind(&self, bindings: &Bindings) -> Result<Bound, BindingErrors> {
        self.bind_right(bindings).map_or_else(|| self.bind_or_say(bindings), Ok)
    }

    /// Binds without collecting errors; `None` unless there is exactly one valid value per port.
    fn bind_right(&self, bindings: &Bindings) -> Option<Bound> {
        let mut bound = Bound { addresses: SmallVec::new(), values: SmallVec::new() };
        if bindings.slices.len() != self.device.len() {
            return None;
        }
        for (n, port) in self.device.iter().enumerate() {
            // Callers usually bind in the order of ports, so look at the same position first.
            let here = bindings.slices.get(n).filter(|(id, _)| *id == port.id);
            let (_, slice) = here.or_else(|| bindings.slices.iter().find(|(id, _)| *id == port.id))?;
            let aligned = slice.address & (u64::from(port.alignment) - 1) == 0;
            if slice.bytes < port.bytes || slice.address == 0 || !aligned {
                return None;
            }
            bound.addresses.push(slice.address);
        }
        let mut used = 0;
        for port in &self.values {
            let given = bindings.values.iter().find(|(id, _)| *id == port.id).map(|(_, value)| *value);
            used += usize::from(given.is_some());
            bound.values.push(given.or(port.value).filter(|value| value.dtype() == port.dtype)?);
        }
        (used == bindings.values.len()).then_some(bound)
    }

    /// Checks that there is one address or scalar per port, in order, that no address is null or misaligned, and that each scalar has the
    /// right type. The size of the memory is not known here.
    pub(crate) fn fit(&self, addresses: &[u64], values: &[Scalar]) -> Result<(), BindingErrors> {
        let aligned = |(port, address): (&DevicePort, &u64)| *address != 0 && address & (u64::from(port.alignment) - 1) == 0;
        let typed = |(port, value): (&ValuePort, &Scalar)| port.dtype == value.dtype();
        let counted = addresses.len() == self.device.len() && values.len() == self.values.len();
        let fits = counted && self.device.iter().zip(addresses).all(aligned) && self.values.iter().zip(values).all(typed);
        if fits { Ok(()) } else { Err(self.misfits(addresses, values)) }
    }

    #[cold]
    fn misfits(&self, addresses: &[u64], values: &[Scalar]) -> BindingErrors {
        let counts = [("addresses", addresses.len(), self.device.len()), ("scalars", values.len(), self.values.len())];
        let wrong = counts.into_iter().filter(|(_, given, need)| given != need);
        let wrong: Vec<BindingError> = wrong.map(|(what, given, need)| BindingError::Count { what, given, need }).collect();
        if !wrong.is_empty() {
            return BindingErrors(wrong);
        }
        let mut bindings = Bindings::new();
        for (port, &address) in self.device.iter().zip(addresses) {
            bindings.push_slice(port.id, DeviceSlice { address, bytes: port.bytes });
        }
        for (port, &value) in self.values.iter().zip(values) {
            bindings.push_value(port.id, value);
        }
        self.bind_or_say(&bindings).err().unwrap_or_else(|| BindingErrors(Vec::new()))
    }

    #[cold]
    fn bind_or_say(&self, bindings: &Bindings) -> Result<Bound, BindingErrors> {
        let mut errors = Vec::new();
        let mut bound = Bound { addresses: SmallVec::new(), values: SmallVec::new() };
        for port in &self.device {
            let mut given = bindings.slices.iter().filter(|(id, _)| *id == port.id).map(|(_, s)| *s);
            match (given.next(), given.next()) {
                (None, _) => errors.push(BindingError::Missing { name: port.name.clone() }),
                (Some(_), Some(_)) => errors.push(BindingError::Doubled { name: port.name.clone() }),
                (Some(slice), None) => {
                    if slice.bytes < port.bytes {
                        errors.push(BindingError::Short { name: port.name.clone(), bytes: slice.bytes, need: port.bytes });
                    }
                    if slice.address == 0 || slice.address % u64::from(port.alignment) != 0 {
                        let (name, address, alignment) = (port.name.clone(), slice.address, port.alignment);
                        errors.push(BindingError::Misaligned { name, address, alignment });
                    }
                    bound.addresses.push(slice.address);
                }
            }
        }
        for port in &self.values {
            let mut given = bindings.values.iter().filter(|(id, _)| *id == port.id).map(|(_, v)| *v);
            match (given.next(), given.next()) {
                (Some(_), Some(_)) => errors.push(BindingError::Doubled { name: port.name.clone() }),
                (given, _) => match given.or(port.value) {
                    None => errors.push(BindingError::Missing { name: port.name.clone() }),
                    Some(value) if value.dtype() != port.dtype => {
                        errors.push(BindingError::WrongType { name: port.name.clone(), given: value.dtype(), wanted: port.dtype });
                    }
                    Some(value) => bound.values.push(value),
                },
            }
        }
        let unknown = |id: &TensorId, what| BindingError::Unknown { id: *id, what };
        errors.extend(
            bindings
                .slices
                .iter()
                .filter(|(id, _)| !self.device.iter().any(|p| p.id == *id))
                .map(|(id, _)| unknown(id, "device memory for")),
        );
        errors.extend(
            bindings.values.iter().filter(|(id, _)| !self.values.iter().any(|p| p.id == *id)).map(|(id, _)| unknown(id, "a scalar for")),
        );
        if errors.is_empty() { Ok(bound) } else { Err(BindingErrors(errors)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Graph, Mode};

    #[test]
    fn a_written_tensor_shares_memory_with_none() {
        let mut g = Graph::new();
        let (a, b) = (g.input("a", DType::F32, [4, 4]), g.input("b", DType::F32, [4, 4]));
        let (sum, product) = (g.pointwise(Mode::Add, &[a, b]), g.pointwise(Mode::Mul, &[a, b]));
        g.output(sum, "sum", DType::F32);
        g.output(product, "product", DType::F32);
        let ports = Ports::of(&g.verify().unwrap());
        let written: Vec<&str> = ports.device.iter().filter(|p| p.written).map(|p| p.name.as_str()).collect();
        assert_eq!(written, ["sum", "product"]);
        let told = |addresses: [u64; 4], bytes| {
            let slices = [a, b, sum, product].into_iter().zip(addresses).map(|(id, address)| (id, DeviceSlice { address, bytes }));
            let bindings = Bindings { slices: slices.collect(), values: SmallVec::new() };
            ports.overlaps(&bindings).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        // Inputs may share memory, and the end of a slice that is longer than its tensor may be used otherwise.
        assert!(told([4096, 4096, 4160, 4224], 64).is_empty());
        assert!(told([4096, 4096, 4160, 4224], 128).is_empty());
        let overlap = |name, other| {
            format!("{name}: the plan writes this tensor, and its memory overlaps that of {other}; expected memory of its own")
        };
        assert_eq!(told([4096, 8192, 8240, 16384], 64), [overlap("sum", "b")]);
        assert_eq!(told([4096, 8192, 4096, 4144], 64), [overlap("sum", "a"), overlap("product", "a"), overlap("sum", "product")]);
    }

    #[test]
    fn every_wrong_binding_is_reported_at_once() {
        let mut g = Graph::new();
        let x = g.input("x", DType::F32, [4, 4]);
        let k = g.parameter("k", DType::F32);
        let z = g.parameter("z", DType::F32);
        let y = g.pointwise(Mode::Mul, &[x, k]);
        let y = g.pointwise(Mode::Mul, &[y, z]);
        g.output(y, "y", DType::F32);
        let ports = Ports::of(&g.verify().unwrap());
        let good = DeviceSlice { address: 4096, bytes: 64 };
        let ok = Bindings::new().slice(x, good).slice(y, good).value(k, Scalar::F32(2.0)).value(z, Scalar::F32(2.0));
        assert_eq!(ports.bind(&ok).unwrap().addresses.as_slice(), [4096, 4096]);

        let bad = Bindings::new()
            .slice(x, DeviceSlice { address: 4100, bytes: 60 })
            .slice(k, good)
            .value(k, Scalar::I32(2))
            .value(z, Scalar::F32(1.0))
            .value(z, Scalar::F32(1.0));
        let text = ports.bind(&bad).unwrap_err().to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "x: got 60 bytes, expected at least 64",
                "x: address 0x1004 is not a multiple of 16 bytes",
                "y: got no buffer, expected one",
                "k: got a scalar of type i32, expected f32",
                "z: bound more than once",
                "t1: got device memory for this tensor, but the plan expects none",
            ]
        );
    }
}
