//! Variant packs: cuDNN's term for the addresses and scalars of an execution.

use super::backend::{Handle, Library};
use super::codes::{Attribute, Kind};
use super::descriptor::Descriptor;
use crate::error::Error;

/// A finalized variant pack: the addresses and scalars of one plan, for any number of executions.
///
/// Scalars from host memory are stored in the pack. cuDNN reads them at each execution, so they can change without a new pack.
#[derive(Debug)]
pub struct Pack {
    descriptor: Descriptor,
    /// One 8-byte slot per by-value tensor. Boxed, because cuDNN keeps their addresses.
    slots: Box<[u64]>,
}

impl Pack {
    /// Creates a pack over device addresses, with one slot for the scalar of each tensor that is passed by value. The `uids` identify the
    /// tensors of the plan.
    ///
    /// # Errors
    /// Returns cuDNN's error.
    pub fn new(
        library: &'static Library,
        device_uids: &[i64],
        addresses: &[u64],
        value_uids: &[i64],
        workspace: u64,
    ) -> Result<Pack, Error> {
        let slots = vec![0u64; value_uids.len()].into_boxed_slice();
        let mut descriptor = Descriptor::new(library, Kind::VARIANT_PACK)?;
        let uids: Vec<i64> = device_uids.iter().chain(value_uids).copied().collect();
        let pointers: Vec<u64> =
            addresses.iter().copied().chain(slots.iter().map(|s| (&raw const *s).expose_provenance() as u64)).collect();
        descriptor.set_addresses(Attribute::VARIANT_PACK_DATA_POINTERS, &pointers)?;
        descriptor.set_i64(Attribute::VARIANT_PACK_UNIQUE_IDS, &uids)?;
        descriptor.set_addresses(Attribute::VARIANT_PACK_WORKSPACE, &[workspace])?;
        descriptor.finalize("of a plan")?;
        Ok(Pack { descriptor, slots })
    }

    /// Sets the scalar of the `n`th tensor that is passed by value; `bytes` are its bytes in memory order.
    pub fn set_value(&mut self, n: usize, bytes: &[u8]) {
        if let Some(slot) = self.slots.get_mut(n) {
            let mut wide = [0u8; 8];
            for (to, from) in wide.iter_mut().zip(bytes) {
                *to = *from;
            }
            *slot = u64::from_ne_bytes(wide);
        }
    }

    /// Submits one execution of a plan with this pack to the handle's stream.
    ///
    /// # Safety
    /// Every address of the pack is device memory of the handle's device, as large as the plan's tensor or workspace. No other work conflicts with
    /// its use until the stream has passed this call.
    ///
    /// # Errors
    /// Returns cuDNN's error.
    pub unsafe fn execute(&mut self, handle: &Handle<'_>, plan: &Descriptor) -> Result<(), Error> {
        let library = handle.library();
        // SAFETY: handle, plan and pack are live; the caller vouches for the memory.
        let status = unsafe { (library.table.execute)(handle.raw(), plan.raw(), self.descriptor.raw()) };
        library.check("cudnnBackendExecute", "a plan", status)
    }
}
