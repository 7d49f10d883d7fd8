//! Builder methods for concatenation, random numbers, pages, block scales, grouped matrix products and rotary embeddings.

use crate::ir::Graph;
use crate::ir::op::{
    BlockScaleDequantize, BlockScaleQuantize, Concat, Distribution, MoeMatmul, MoeMatmulBackward, Op, PagedLoad, Rng, Rope, RopeBackward,
    Routing, Seed,
};
use crate::ir::tensor::{Reordering, TensorId};
use crate::ir::ty::{DType, Dims};

impl Graph {
    /// Adds a concatenation along `axis`, whose result has the type of the first input.
    pub fn concat(&mut self, inputs: &[TensorId], axis: i64) -> TensorId {
        let first = inputs.first().copied();
        let mut dims = first.map_or_else(|| Dims(vec![1]), |id| self.dims(id));
        let last = first.is_some_and(|id| self.is_channels_last(id));
        let at = usize::try_from(axis).unwrap_or(usize::MAX);
        if let Some(joined) = dims.0.get_mut(at) {
            let extents = inputs.iter().map(|&id| self.dims(id).0.get(at).copied().unwrap_or(1));
            *joined = extents.fold(0i64, i64::saturating_add);
        }
        let dtype = first.and_then(|id| self.get(id)).map_or(DType::F32, |t| t.dtype);
        let y = self.result("concat", dtype, dims);
        self.like_channels_last(y, last);
        self.push(Op::Concat(Concat { inputs: inputs.to_vec(), y, axis }));
        y
    }

    /// Adds random numbers, a virtual f32 tensor. `offset` is the position of the first number in the generator's sequence.
    pub fn rng(&mut self, distribution: Distribution, seed: Seed, offset: Option<TensorId>, dims: impl Into<Dims>) -> TensorId {
        let y = self.result("rng", DType::F32, dims.into());
        self.push(Op::Rng(Rng { y, distribution, seed, offset }));
        y
    }

    /// Adds the gathered pages of keys or values (cuDNN 9.4), a virtual tensor (b, h, s, d) of the container's type. [`PagedLoad`] describes
    /// the operands; `tokens` is `s`, the largest number of tokens of a batch entry.
    pub fn paged_load(&mut self, container: TensorId, seq_len: TensorId, page_table: TensorId, tokens: i64) -> TensorId {
        let (pool, table) = (self.dims(container).0, self.dims(page_table).0);
        let at = |dims: &[i64], axis: usize| dims.get(axis).copied().unwrap_or(1);
        let dtype = self.get(container).map_or(DType::F32, |t| t.dtype);
        let y = self.result("paged_load", dtype, Dims(vec![at(&table, 0), at(&pool, 1), tokens, at(&pool, 3)]));
        self.push(Op::PagedLoad(PagedLoad { container, seq_len, page_table, y }));
        y
    }

    /// Adds a quantization of `x` to the type `dtype` with one scale of type `scale_dtype` per `block` elements of the last axis (cuDNN
    /// 9.7). Returns the quantized elements and the scales, both virtual. The scales of a tensor with three axes are interleaved
    /// ([`Reordering::F8x128x4`]) and padded to multiples of 128 rows and 4 blocks.
    pub fn block_scale_quantize(&mut self, x: TensorId, block: i32, dtype: DType, scale_dtype: DType) -> (TensorId, TensorId) {
        let dims = self.dims(x);
        let mut scales = dims.clone();
        if let Some(last) = scales.0.last_mut() {
            *last = last.saturating_sub(1) / i64::from(block.max(1)) + 1;
        }
        // cuDNN requires this order of the scales for tensors of three axes, and refuses it for others.
        let reordered = dims.rank() == 3;
        if let (true, [_, rows, blocks]) = (reordered, &mut scales.0[..]) {
            *rows = rows.saturating_add(127) / 128 * 128;
            *blocks = blocks.saturating_add(3) / 4 * 4;
        }
        let y = self.result("quantized", dtype, dims);
        let scale = self.result("scale", scale_dtype, scales);
        if let (true, Some(tensor)) = (reordered, self.tensors.get_mut(scale.index())) {
            tensor.reordering = Reordering::F8x128x4;
        }
        self.push(Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale, block: vec![block], compute: DType::F32 }));
        (y, scale)
    }

    /// Adds a dequantization of `x` by the scale of each block (cuDNN 9.7), a virtual f32 tensor. `block` has the elements per block along
    /// each blocked axis.
    pub fn block_scale_dequantize(&mut self, x: TensorId, scale: TensorId, block: &[i32]) -> TensorId {
        let y = self.result("dequantized", DType::F32, self.dims(x));
        self.push(Op::BlockScaleDequantize(BlockScaleDequantize { x, scale, y, block: block.to_vec(), compute: DType::F32 }));
        y
    }

    /// Adds a matrix product of rows with the weights of their experts (cuDNN 9.15), a virtual f32 tensor (1, rows, n). [`MoeMatmul`]
    /// describes the operands.
    pub fn moe_matmul(&mut self, tokens: TensorId, weights: TensorId, first_token: TensorId, routing: Routing) -> TensorId {
        let at = |id: TensorId, axis: usize| self.dims(id).0.get(axis).copied().unwrap_or(1);
        let rows = match routing {
            Routing::None | Routing::Scatter { .. } => at(tokens, 1),
            Routing::Gather(index) => at(index, 1),
        };
        let dims = Dims(vec![1, rows, at(weights, 2)]);
        let y = self.result("moe_matmul", DType::F32, dims);
        self.push(Op::MoeMatmul(MoeMatmul { tokens, weights, first_token, routing, y, compute: DType::F32 }));
        y
    }

    /// Adds the gradient of a grouped matrix product with respect to its weights (cuDNN 9.22), a virtual f32 tensor (experts, k, n).
    pub fn moe_matmul_backward(&mut self, tokens: TensorId, dy: TensorId, first_token: TensorId) -> TensorId {
        let at = |id: TensorId, axis: usize| self.dims(id).0.get(axis).copied().unwrap_or(1);
        let dims = Dims(vec![at(first_token, 0), at(tokens, 2), at(dy, 2)]);
        let dweights = self.result("moe_dweights", DType::F32, dims);
        self.push(Op::MoeMatmulBackward(MoeMatmulBackward { tokens, dy, first_token, dweights, compute: DType::F32 }));
        dweights
    }

    /// Adds a rotary position embedding (cuDNN 9.24), a virtual tensor of the type of `x`. [`Rope`] describes the operands.
    pub fn rope(&mut self, x: TensorId, angles: TensorId, scale: f32, width: Option<i64>) -> TensorId {
        let dtype = self.get(x).map_or(DType::F32, |t| t.dtype);
        let y = self.result("rope", dtype, self.dims(x));
        self.push(Op::Rope(Rope { x, angles, y, scale, width }));
        y
    }

    /// Adds the gradient of a rotary position embedding (cuDNN 9.25), a virtual tensor of the type of `dy`.
    pub fn rope_backward(&mut self, dy: TensorId, angles: TensorId, scale: f32, width: Option<i64>) -> TensorId {
        let dtype = self.get(dy).map_or(DType::F32, |t| t.dtype);
        let dx = self.result("rope_dx", dtype, self.dims(dy));
        self.push(Op::RopeBackward(RopeBackward { dy, angles, dx, scale, width }));
        dx
    }
}
