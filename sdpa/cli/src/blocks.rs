//! Block scales of 8-bit floats on the command line: read from the input if it has them, and otherwise computed from the operands.

use crate::data::{Data, Element};
use crate::exit::Failure;
use crate::params::{Bound, Values};
use crate::request::Request;
use sdpa::{BlockScale, F8E8M0, Operand};

/// The block scales of `q`, `k` and `v`; `None` for an operand without them.
#[derive(Debug, Default)]
pub(crate) struct Blocks([Option<Vec<F8E8M0>>; 3]);

/// Returns the block scale (of `q`, `k` or `v`) whose declared parameter has this name.
pub(crate) fn named(name: &str) -> Option<BlockScale> {
    BlockScale::ALL.into_iter().find(|scale| scale.name() == name)
}

/// Returns the scale of each element of a dense operand, in the order of the elements. It walks the tiles itself, without code of the executor under test.
fn each(request: &Request, which: BlockScale, of_blocks: &[F8E8M0], len: usize) -> Vec<F8E8M0> {
    let spec = match which {
        BlockScale::Q => &request.spec.q,
        BlockScale::K => &request.spec.k,
        BlockScale::V => &request.spec.v,
    };
    let ([batch, heads, seq, dim], strides) = (spec.dims.map(|n| n as usize), spec.strides.map(|n| n as usize));
    let [lines, along] = if which == BlockScale::V { [dim, seq] } else { [seq, dim] };
    let (tiles, per_line) = (lines.div_ceil(128), along.div_ceil(128));
    let mut each = vec![F8E8M0::default(); len];
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for (s, d) in (0..seq).flat_map(|s| (0..dim).map(move |d| (s, d))) {
            let (line, block) = if which == BlockScale::V { (d, s / 32) } else { (s, d / 32) };
            let tile = ((b * heads + h) * tiles + line / 128) * per_line + block / 4;
            let within = (line % 32 * 4 + line % 128 / 32) * 4 + block % 4;
            each[b * strides[0] + h * strides[1] + s * strides[2] + d * strides[3]] = of_blocks[tile * 512 + within];
        }
    }
    each
}

impl Blocks {
    /// Reads the block scales from the input file, for the operands for which it has them.
    ///
    /// # Errors
    /// Fails if a scale cannot be read.
    pub(crate) fn read(request: &Request, seed: u64) -> Result<Blocks, Failure> {
        let mut given = Blocks::default();
        for planned in request.params.iter().filter(|planned| planned.is_read()) {
            let Some(which) = named(&planned.declared.name) else { continue };
            let (bound, _) = planned.load(request.header(), seed).map_err(|e| Failure::environment("memory", e))?;
            if let Values::F8E8M0(scales) = bound.values {
                given.0[which as usize] = Some(scales);
            }
        }
        Ok(given)
    }

    /// Rounds an operand to 8 bits block by block, with a scale for each block. An operand of 8-bit floats is kept, with the input's
    /// scales or scales of 1.
    pub(crate) fn narrow(&mut self, request: &Request, operand: Operand, element: Element, wide: Data) -> Result<Data, String> {
        let Some((which, scales)) = BlockScale::of(operand).zip(request.problem.block_scales(operand)) else { return Ok(wide) };
        let slot = &mut self.0[which as usize];
        let mut data = match wide {
            Data::F32(numbers) => {
                let made = || scales.of_numbers(&numbers, element.dtype()).map_err(|e| e.to_string());
                let of_blocks = slot.take().map_or_else(made, Ok)?;
                let mut data = Data::zeros(element, numbers.len())?;
                let by = each(request, which, &of_blocks, numbers.len());
                for (at, (x, scale)) in numbers.iter().zip(&by).enumerate() {
                    data.set(at, x / scale.to_f32());
                }
                *slot = Some(of_blocks);
                data
            }
            narrow @ (Data::F16(_) | Data::BF16(_) | Data::F8E4M3(..) | Data::F8E5M2(..)) => narrow,
        };
        let of_blocks = slot.get_or_insert_with(|| vec![F8E8M0::of_block(element.dtype().largest(), element.dtype()); scales.elements()]);
        data.set_descales(each(request, which, of_blocks, data.len()));
        Ok(data)
    }

    /// Stores the block scales in the declared parameters that a call receives.
    pub(crate) fn bind(&self, params: &mut [Bound]) {
        for bound in params {
            if let Some(scales) = named(&bound.name).and_then(|which| self.0[which as usize].clone()) {
                bound.values = Values::F8E8M0(scales);
            }
        }
    }
}
