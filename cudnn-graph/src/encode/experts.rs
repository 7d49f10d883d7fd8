//! Concatenations, grouped matrix products and rotary embeddings: rows of attribute and value.

use super::Encoder;
use crate::ffi::codes::{Attribute, AttributeType, Kind, MoeMode};
use crate::ir::op::{Concat, MoeMatmul, MoeMatmulBackward, Rope, RopeBackward, Routing};
use crate::program::DescriptorId;

impl Encoder<'_> {
    pub(super) fn concat(&mut self, c: &Concat) -> DescriptorId {
        let inputs: Vec<DescriptorId> = c.inputs.iter().map(|&id| self.tensor(id)).collect();
        let y = self.tensor(c.y);
        self.push(Kind::OPERATION_CONCAT, "concat", |d| {
            d.i64(Attribute::OPERATION_CONCAT_AXIS, &[c.axis]);
            d.descriptors(Attribute::OPERATION_CONCAT_INPUT_DESCS, &inputs);
            d.descriptor(Attribute::OPERATION_CONCAT_OUTPUT_DESC, y);
        })
    }

    pub(super) fn moe_matmul(&mut self, m: &MoeMatmul) -> DescriptorId {
        let (tokens, weights, first) = (self.tensor(m.tokens), self.tensor(m.weights), self.tensor(m.first_token));
        let (index, slot) = m.routing.operands();
        let (index, slot, y) = (self.optional(index), self.optional(slot), self.tensor(m.y));
        let (mode, top_k) = match m.routing {
            Routing::None => (MoeMode::NONE, None),
            Routing::Gather(_) => (MoeMode::GATHER, None),
            Routing::Scatter { top_k, .. } => (MoeMode::SCATTER, Some(top_k)),
        };
        self.push(Kind::OPERATION_MOE_GROUPED_MATMUL, "moe_matmul", |d| {
            d.code(Attribute::OPERATION_MOE_GROUPED_MATMUL_MODE, AttributeType::MOE_GROUPED_MATMUL_MODE, mode.0, mode.since(), mode);
            d.dtype(Attribute::OPERATION_MOE_GROUPED_MATMUL_MATH_PREC, m.compute);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_TOKEN_DESC, tokens);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_WEIGHT_DESC, weights);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_FIRST_TOKEN_OFFSET_DESC, first);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_OUTPUT_DESC, y);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_TOKEN_INDEX_DESC, index);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_TOKEN_KS_DESC, slot);
            if let Some(top_k) = top_k {
                d.i32(Attribute::OPERATION_MOE_GROUPED_MATMUL_TOP_K, &[top_k]);
            }
        })
    }

    pub(super) fn moe_matmul_backward(&mut self, m: &MoeMatmulBackward) -> DescriptorId {
        let (tokens, dy) = (self.tensor(m.tokens), self.tensor(m.dy));
        let (first, dweights) = (self.tensor(m.first_token), self.tensor(m.dweights));
        self.push(Kind::OPERATION_MOE_GROUPED_MATMUL_BWD, "moe_matmul_backward", |d| {
            d.dtype(Attribute::OPERATION_MOE_GROUPED_MATMUL_BWD_MATH_PREC, m.compute);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_BWD_TOKEN_DESC, tokens);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_BWD_DWEIGHT_DESC, dweights);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_BWD_FIRST_TOKEN_OFFSET_DESC, first);
            d.descriptor(Attribute::OPERATION_MOE_GROUPED_MATMUL_BWD_DOUTPUT_DESC, dy);
        })
    }

    pub(super) fn rope(&mut self, r: &Rope) -> DescriptorId {
        let (x, angles, y) = (self.tensor(r.x), self.tensor(r.angles), self.tensor(r.y));
        self.push(Kind::OPERATION_ROPE_FWD, "rope", |d| {
            d.descriptor(Attribute::OPERATION_ROPE_FWD_XDESC, x);
            d.descriptor(Attribute::OPERATION_ROPE_FWD_FREQSDESC, angles);
            d.descriptor(Attribute::OPERATION_ROPE_FWD_YDESC, y);
            d.f32(Attribute::OPERATION_ROPE_FWD_OUTPUT_SCALE, r.scale);
            if let Some(width) = r.width {
                d.i64(Attribute::OPERATION_ROPE_FWD_ROPE_DIM, &[width]);
            }
        })
    }

    pub(super) fn rope_backward(&mut self, r: &RopeBackward) -> DescriptorId {
        let (dy, angles, dx) = (self.tensor(r.dy), self.tensor(r.angles), self.tensor(r.dx));
        self.push(Kind::OPERATION_ROPE_BWD, "rope_backward", |d| {
            d.descriptor(Attribute::OPERATION_ROPE_BWD_DYDESC, dy);
            d.descriptor(Attribute::OPERATION_ROPE_BWD_FREQSDESC, angles);
            d.descriptor(Attribute::OPERATION_ROPE_BWD_DXDESC, dx);
            d.f32(Attribute::OPERATION_ROPE_BWD_OUTPUT_SCALE, r.scale);
            if let Some(width) = r.width {
                d.i64(Attribute::OPERATION_ROPE_BWD_ROPE_DIM, &[width]);
            }
        })
    }
}
