//! Owned backend descriptors, and the loop that replays a program.

use super::backend::{Handle, Library, Ptr};
use super::codes::{Attribute, AttributeType, Kind};
use crate::error::Error;
use crate::program::{DescriptorId, Program, Values};
use sdpa_driver::{Device, relaxed};
use std::ffi::c_void;

/// A backend descriptor, destroyed when dropped.
#[derive(Debug)]
pub struct Descriptor {
    library: &'static Library,
    raw: Ptr,
    kind: Kind,
    /// Descriptors to which its attributes refer.
    kept: Vec<Descriptor>,
    /// For a plan or a kernel cache, the device on which its kernels are loaded.
    device: Option<&'static Device>,
}

// SAFETY: descriptors are not tied to a thread.
unsafe impl Send for Descriptor {}
// SAFETY: shared references only read attributes of a finalized descriptor, or pass the descriptor to another one's setter. Experiments showed that
// several threads may execute a finalized plan at once, each with its own handle and variant pack (docs/threads.md).
unsafe impl Sync for Descriptor {}

impl Descriptor {
    /// Creates a descriptor without attributes.
    ///
    /// # Errors
    /// A cuDNN error, for example for an unknown kind.
    pub(crate) fn new(library: &'static Library, kind: Kind) -> Result<Descriptor, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one pointer, to the live variable `raw`.
        let status = unsafe { (library.table.descriptor_create)(kind.0, &mut raw) };
        library.check("cudnnBackendCreateDescriptor", &kind.to_string(), status)?;
        Ok(Descriptor { library, raw, kind, kept: Vec::new(), device: None })
    }

    /// Creates the descriptor of a plan. Dropping it unloads its kernels in the context in which they were loaded.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn plan(library: &'static Library, device: Option<&'static Device>) -> Result<Descriptor, Error> {
        let mut plan = Descriptor::new(library, Kind::EXECUTION_PLAN)?;
        plan.device = device;
        Ok(plan)
    }

    /// Creates the descriptor of a kernel cache. Dropping it unloads its kernels as for a plan.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn kernel_cache(library: &'static Library, device: Option<&'static Device>) -> Result<Descriptor, Error> {
        let mut cache = Descriptor::new(library, Kind::KERNEL_CACHE)?;
        cache.device = device;
        Ok(cache)
    }

    pub(super) fn raw(&self) -> Ptr {
        self.raw
    }

    /// Returns the kind of the descriptor.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// # Safety
    /// `elements` points to `count` elements of the type that `ty` names.
    unsafe fn set_raw(&mut self, attribute: Attribute, ty: AttributeType, count: usize, elements: *const c_void) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract.
        let status = unsafe { (self.library.table.descriptor_set)(self.raw, attribute.0, ty.0, count as i64, elements) };
        if status == 0 { Ok(()) } else { Err(self.library.error("cudnnBackendSetAttribute", &attribute.to_string(), status)) }
    }

    /// Sets an attribute of the descriptor to 64-bit integers.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn set_i64(&mut self, attribute: Attribute, values: &[i64]) -> Result<(), Error> {
        // SAFETY: type and count are those of the slice.
        unsafe { self.set_raw(attribute, AttributeType::INT64, values.len(), values.as_ptr().cast()) }
    }

    /// Sets an attribute of the descriptor to a 32-bit integer.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn set_i32(&mut self, attribute: Attribute, value: i32) -> Result<(), Error> {
        // SAFETY: the pointer is to one element of the stated type.
        unsafe { self.set_raw(attribute, AttributeType::INT32, 1, (&raw const value).cast()) }
    }

    /// Sets an attribute of the descriptor to one code of an enumeration.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn set_code(&mut self, attribute: Attribute, ty: AttributeType, code: i32) -> Result<(), Error> {
        // SAFETY: every enumeration of the API is an int.
        unsafe { self.set_raw(attribute, ty, 1, (&raw const code).cast()) }
    }

    /// Sets an attribute of the descriptor to another descriptor, which must outlive every use of this one.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn set_descriptor(&mut self, attribute: Attribute, other: &Descriptor) -> Result<(), Error> {
        // SAFETY: the pointer is to one element of the stated type.
        unsafe { self.set_raw(attribute, AttributeType::BACKEND_DESCRIPTOR, 1, (&raw const other.raw).cast()) }
    }

    /// Sets an attribute to several descriptors, and keeps them alive as long as this one.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn set_and_keep(&mut self, attribute: Attribute, others: Vec<Descriptor>) -> Result<(), Error> {
        let raw: Vec<Ptr> = others.iter().map(|d| d.raw).collect();
        // SAFETY: type and count are those of the slice.
        unsafe { self.set_raw(attribute, AttributeType::BACKEND_DESCRIPTOR, raw.len(), raw.as_ptr().cast()) }?;
        self.kept.extend(others);
        Ok(())
    }

    /// Sets an attribute of the descriptor to a cuDNN handle.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn set_handle(&mut self, attribute: Attribute, handle: &Handle<'_>) -> Result<(), Error> {
        let raw = handle.raw();
        // SAFETY: the pointer is to one element of the stated type.
        unsafe { self.set_raw(attribute, AttributeType::HANDLE, 1, (&raw const raw).cast()) }
    }

    /// Sets an attribute of the descriptor to a text.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn set_text(&mut self, attribute: Attribute, text: &str) -> Result<(), Error> {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        // SAFETY: `bytes` holds `text.len()` characters, followed by a zero.
        unsafe { self.set_raw(attribute, AttributeType::CHAR, text.len(), bytes.as_ptr().cast()) }
    }

    /// Sets addresses of device memory, or of host memory that outlives every use of the descriptor.
    pub(super) fn set_addresses(&mut self, attribute: Attribute, addresses: &[u64]) -> Result<(), Error> {
        // SAFETY: an address is as wide as a pointer here, and cuDNN does not dereference them before execution.
        unsafe { self.set_raw(attribute, AttributeType::VOID_PTR, addresses.len(), addresses.as_ptr().cast()) }
    }

    /// Finalizes the descriptor: no attribute can be set afterwards, and cuDNN checks all of them.
    ///
    /// # Errors
    /// A cuDNN error about `subject`.
    pub(crate) fn finalize(&mut self, subject: &str) -> Result<(), Error> {
        self.library.forget_messages();
        // SAFETY: the descriptor is live.
        let status = unsafe { (self.library.table.descriptor_finalize)(self.raw) };
        if status != 0 {
            return Err(self.library.error("cudnnBackendFinalize", &format!("{} {subject}", self.kind), status));
        }
        self.library.forget_messages();
        Ok(())
    }

    /// # Safety
    /// `elements` has space for `requested` elements of the type that `ty` names.
    unsafe fn get_raw(&self, attribute: Attribute, ty: AttributeType, requested: usize, elements: *mut c_void) -> Result<usize, Error> {
        let mut count = 0i64;
        // SAFETY: the caller upholds the contract.
        let status = unsafe { (self.library.table.descriptor_get)(self.raw, attribute.0, ty.0, requested as i64, &mut count, elements) };
        if status != 0 {
            return Err(self.library.error("cudnnBackendGetAttribute", &attribute.to_string(), status));
        }
        self.library.forget_messages();
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn count(&self, attribute: Attribute, ty: AttributeType) -> Result<usize, Error> {
        // SAFETY: no element is requested.
        unsafe { self.get_raw(attribute, ty, 0, std::ptr::null_mut()) }
    }

    /// Reads an attribute that is one 64-bit integer.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn get_i64(&self, attribute: Attribute) -> Result<i64, Error> {
        let mut value = 0i64;
        // SAFETY: there is space for one element.
        unsafe { self.get_raw(attribute, AttributeType::INT64, 1, (&raw mut value).cast()) }?;
        Ok(value)
    }

    /// Reads an attribute that is one 32-bit integer.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn get_i32(&self, attribute: Attribute) -> Result<i32, Error> {
        let mut value = 0i32;
        // SAFETY: there is space for one element.
        unsafe { self.get_raw(attribute, AttributeType::INT32, 1, (&raw mut value).cast()) }?;
        Ok(value)
    }

    /// Reads an attribute that is a list of codes of an enumeration.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn get_codes(&self, attribute: Attribute, ty: AttributeType) -> Result<Vec<i32>, Error> {
        let mut values = vec![0i32; self.count(attribute, ty)?];
        if values.is_empty() {
            return Ok(values);
        }
        // SAFETY: there is space for the requested elements.
        let count = unsafe { self.get_raw(attribute, ty, values.len(), values.as_mut_ptr().cast()) }?;
        values.truncate(count);
        Ok(values)
    }

    /// Reads an attribute that is a text.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn get_text(&self, attribute: Attribute) -> Result<String, Error> {
        let mut bytes = vec![0u8; self.count(attribute, AttributeType::CHAR)?];
        // SAFETY: there is space for the requested elements.
        let count = unsafe { self.get_raw(attribute, AttributeType::CHAR, bytes.len(), bytes.as_mut_ptr().cast()) }?;
        bytes.truncate(count);
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    /// Reads an attribute that says whether another descriptor is in this one.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn has(&self, attribute: Attribute, other: &Descriptor) -> Result<bool, Error> {
        let mut raw = other.raw;
        // SAFETY: cuDNN reads the element, a live descriptor, and there is space for one.
        let count = unsafe { self.get_raw(attribute, AttributeType::BACKEND_DESCRIPTOR, 1, (&raw mut raw).cast()) }?;
        Ok(count > 0)
    }

    /// Reads an attribute that is a list of descriptors of one kind: at most `limit`, or as many as cuDNN reports.
    ///
    /// # Errors
    /// A cuDNN error.
    pub(crate) fn get_descriptors(&self, attribute: Attribute, kind: Kind, limit: Option<usize>) -> Result<Vec<Descriptor>, Error> {
        let wanted = match limit {
            Some(limit) => limit,
            None => self.count(attribute, AttributeType::BACKEND_DESCRIPTOR)?,
        };
        let mut found: Vec<Descriptor> = (0..wanted).map(|_| Descriptor::new(self.library, kind)).collect::<Result<_, _>>()?;
        if found.is_empty() {
            return Ok(found);
        }
        let mut raw: Vec<Ptr> = found.iter().map(Descriptor::raw).collect();
        // SAFETY: cuDNN fills the descriptors to which the elements point; there are as many as requested.
        let count = unsafe { self.get_raw(attribute, AttributeType::BACKEND_DESCRIPTOR, raw.len(), raw.as_mut_ptr().cast()) }?;
        found.truncate(count);
        Ok(found)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let _entered = self.device.and_then(|device| device.enter().ok());
        // SAFETY: the descriptor is owned here and is not used again.
        let destroy = || unsafe { (self.library.table.descriptor_destroy)(self.raw) };
        // Destroying a plan unloads its kernels, which must also be possible while a stream is being captured.
        let has_kernels = [Kind::EXECUTION_PLAN, Kind::KERNEL_CACHE].contains(&self.kind);
        let status = if has_kernels { relaxed(destroy) } else { destroy() };
        if status != 0 {
            tracing::warn!(status, kind = %self.kind, "cudnnBackendDestroyDescriptor");
        }
    }
}

/// Creates every descriptor of a program, in order. The last is the finalized operation graph; with a handle, it is bound to the handle's device.
///
/// # Errors
/// [`Error::Program`], or a cuDNN error that names the descriptor.
pub(crate) fn replay(library: &'static Library, program: &Program, handle: Option<&Handle<'_>>) -> Result<Vec<Descriptor>, Error> {
    program.check()?;
    let mut made: Vec<Descriptor> = Vec::with_capacity(program.descriptors.len());
    for (n, plain) in program.descriptors.iter().enumerate() {
        let mut descriptor = Descriptor::new(library, plain.kind)?;
        // Attributes point to these constants, so they must live until the descriptor is finalized.
        let mut constants: Vec<Vec<u8>> = Vec::new();
        for s in &plain.settings {
            // `check` compared the type of each value, and the order of the descriptors.
            let raw_of = |id: &DescriptorId| made[id.0].raw;
            // SAFETY: in each arm, type and count are those of the data.
            unsafe {
                match &s.values {
                    Values::I64(v) => descriptor.set_raw(s.attribute, s.ty, v.len(), v.as_ptr().cast()),
                    Values::I32(v) => descriptor.set_raw(s.attribute, s.ty, v.len(), v.as_ptr().cast()),
                    Values::F32(v) => descriptor.set_raw(s.attribute, s.ty, v.len(), v.as_ptr().cast()),
                    Values::F64(v) => descriptor.set_raw(s.attribute, s.ty, v.len(), v.as_ptr().cast()),
                    // A fraction of cuDNN is a structure of two 64-bit integers.
                    Values::Fractions(v) => descriptor.set_raw(s.attribute, s.ty, v.len(), v.as_ptr().cast()),
                    Values::Bool(v) => descriptor.set_raw(s.attribute, s.ty, 1, (&raw const *v).cast()),
                    Values::Code(v, _) => descriptor.set_raw(s.attribute, s.ty, 1, (&raw const *v).cast()),
                    Values::Descriptors(ids) => {
                        let raw: Vec<Ptr> = ids.iter().map(raw_of).collect();
                        descriptor.set_raw(s.attribute, s.ty, raw.len(), raw.as_ptr().cast())
                    }
                    Values::Bytes(bytes) => {
                        constants.push(bytes.clone());
                        let pointer = constants.last().map_or(std::ptr::null(), |b| b.as_ptr());
                        descriptor.set_raw(s.attribute, s.ty, 1, (&raw const pointer).cast())
                    }
                }
            }?;
        }
        if let (Some(handle), true) = (handle, n + 1 == program.descriptors.len()) {
            descriptor.set_handle(Attribute::OPERATIONGRAPH_HANDLE, handle)?;
        }
        descriptor.finalize(&plain.label)?;
        made.push(descriptor);
    }
    Ok(made)
}
