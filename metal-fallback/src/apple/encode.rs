//! Encodes dispatches into a command buffer.

use super::Buffer;
use super::buffer::{copy, private};
use super::built::Built;
use super::pipeline::Pipeline;
use crate::dependencies::waits;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::packed::Tokens;
use crate::plan::{Operand, Plan};
use crate::run::Ready;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandEncoder, MTLComputeCommandEncoder, MTLDispatchType, MTLSize};
use std::borrow::Cow;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// The most bytes that Metal accepts without a buffer.
const INLINE: usize = 4096;
/// Alignment of buffer offsets.
const ALIGNMENT: usize = 4;

/// The memory of an operand on the GPU.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// A range of a buffer.
    Buffer {
        /// The buffer.
        buffer: &'a ProtocolObject<dyn MTLBuffer>,
        /// Byte offset of the operand in the buffer; a multiple of 4.
        offset: usize,
    },
    /// Bytes that are copied while encoding. This is for scalars.
    Bytes(&'a [u8]),
}

/// Resources that a command buffer needs until it has completed: kernels and scratch memory. Command buffers without retained references
/// do not keep them alive.
#[derive(Debug)]
#[must_use = "hold this until the command buffer has completed"]
pub struct Kept {
    _pipelines: Vec<Arc<Kernel<Pipeline>>>,
    _buffers: Vec<Buffer>,
}

/// A plan's argument, resolved.
#[derive(Debug)]
enum Bound<'a> {
    Given(&'a ProtocolObject<dyn MTLBuffer>, usize),
    Own(Buffer),
    Inline(Cow<'a, [u8]>),
}

fn size([width, height, depth]: [u32; 3]) -> MTLSize {
    MTLSize { width: width as usize, height: height as usize, depth: depth as usize }
}

impl Built {
    /// Adds the dispatches of the pass to a command buffer, in a new encoder. `argument` returns the memory of each operand of the call;
    /// this function adds scratch memory and parameters. With packed sequences, kernels access at most `tokens` tokens of an operand
    /// (with `None`, the problem's maximum), whatever the offsets contain. It neither commits nor waits.
    ///
    /// # Errors
    /// Fails if an operand is missing, too short or misaligned, before anything is encoded, or if there is not enough memory for scratch.
    ///
    /// # Safety
    /// The command buffer belongs to this GPU and has no open encoder. Until it has completed:
    /// - The result is not dropped, and each buffer stays alive.
    /// - Nothing else writes the memory that the pass reads, or accesses the memory that it writes.
    /// - Written operands overlap no other operand.
    pub unsafe fn encode<'a>(
        &self,
        commands: &ProtocolObject<dyn MTLCommandBuffer>,
        attn_scale: f32,
        tokens: Option<Tokens>,
        argument: &dyn Fn(&Operand) -> Option<Argument<'a>>,
    ) -> Result<Kept, Error> {
        let task = self.task();
        let scratch = task.operands().iter().filter(|(operand, _)| operand.is_scratch());
        let scratch = scratch.map(|(operand, bytes)| Ok((operand, private(self.device(), *bytes)?)));
        let scratch = scratch.collect::<Result<Vec<_>, Error>>()?;
        let resolved = task.plans().iter().map(|plan| {
            let bound = plan.buffers.iter().map(|binding| {
                let operand = &binding.operand;
                if *operand == Operand::Params {
                    return Ok(Bound::Inline(plan.params(attn_scale, tokens).bytes().into()));
                }
                match scratch.iter().find(|(own, _)| *own == operand) {
                    Some((_, buffer)) => Ok(Bound::Own(buffer.clone())),
                    None => self.checked(plan, (operand, tokens), argument(operand)),
                }
            });
            bound.collect::<Result<Vec<_>, Error>>()
        });
        let resolved = resolved.collect::<Result<Vec<_>, Error>>()?;

        let encoder = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent);
        let encoder = encoder.ok_or_else(|| Error::Exhausted { what: "a compute command encoder".to_owned() })?;
        for (((plan, pipeline), bound), wait) in task.plans().iter().zip(self.pipelines()).zip(&resolved).zip(waits(task.plans())) {
            if wait {
                encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            }
            encoder.setComputePipelineState(&pipeline.state);
            for (binding, bound) in plan.buffers.iter().zip(bound) {
                set(&encoder, binding.slot as usize, bound);
            }
            for (slot, (_, bytes)) in plan.threadgroup.iter().enumerate() {
                // SAFETY: slot and length of the plan; `Limits::check` compared their sum with the device.
                unsafe { encoder.setThreadgroupMemoryLength_atIndex(*bytes, slot) };
            }
            encoder.dispatchThreadgroups_threadsPerThreadgroup(size(plan.grid), size([plan.threads, 1, 1]));
        }
        encoder.endEncoding();
        let own = resolved.into_iter().flatten().filter_map(|bound| match bound {
            Bound::Own(buffer) => Some(buffer),
            Bound::Given(..) | Bound::Inline(_) => None,
        });
        Ok(Kept { _buffers: own.collect(), _pipelines: self.pipelines().to_vec() })
    }

    fn checked<'a>(
        &self,
        plan: &Plan,
        (operand, tokens): (&Operand, Option<Tokens>),
        given: Option<Argument<'a>>,
    ) -> Result<Bound<'a>, Error> {
        let need = self.task().reach(operand, tokens);
        let wrong = |given: String, rule: String| Error::Operand { entry: plan.entry, operand: operand.name().to_owned(), given, rule };
        let argument = given.ok_or_else(|| wrong("nothing".to_owned(), "memory".to_owned()))?;
        let room = match argument {
            Argument::Buffer { buffer: _, offset } if !offset.is_multiple_of(ALIGNMENT) => {
                return Err(wrong(format!("offset {offset}"), format!("an offset that is a multiple of {ALIGNMENT}")));
            }
            Argument::Buffer { buffer, offset } => buffer.length().saturating_sub(offset),
            Argument::Bytes(bytes) => bytes.len(),
        };
        if (room as u64) < need {
            return Err(wrong(format!("{room} bytes"), format!("at least {need}")));
        }
        match argument {
            Argument::Buffer { buffer, offset } => Ok(Bound::Given(buffer, offset)),
            Argument::Bytes(bytes) if bytes.len() > INLINE => copy(self.device(), bytes).map(Bound::Own),
            Argument::Bytes(bytes) => Ok(Bound::Inline(bytes.into())),
        }
    }
}

fn set(encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, slot: usize, bound: &Bound<'_>) {
    let (buffer, offset): (&ProtocolObject<dyn MTLBuffer>, usize) = match bound {
        Bound::Given(buffer, offset) => (buffer, *offset),
        Bound::Own(buffer) => (buffer, 0),
        Bound::Inline(bytes) => {
            // SAFETY: a slice that Metal copies during the call, and a slot of the plan.
            unsafe { encoder.setBytes_length_atIndex(NonNull::from(&**bytes).cast::<c_void>(), bytes.len(), slot) };
            return;
        }
    };
    // SAFETY: a slot of the plan. `Built::checked` compared the buffer with the bytes that the kernel accesses, or it was allocated with that size.
    unsafe { encoder.setBuffer_offset_atIndex(Some(buffer), offset, slot) };
}
