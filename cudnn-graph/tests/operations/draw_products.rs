//! Matrix products, element-wise operations, reductions and the operations of attention's neighbours.

use super::*;

impl Draw {
    /// Batch, rows, inner extent and columns.
    fn product_dims(&mut self) -> [i64; 4] {
        let step = 16 / i64::from(self.t.bits() / 8);
        let any = self.dice.roll(10) == 0;
        let mut extent = |most| if any { self.dice.from(1, step * most) } else { step * self.dice.from(1, most) };
        let [m, k, n] = [extent(8), extent(12), extent(8)];
        [self.dice.from(1, 3), m, k, n]
    }

    /// Batch, rows, inner extent and columns, none of which is likely to be a multiple of a vector.
    fn any_product_dims(&mut self) -> [i64; 4] {
        [self.dice.from(1, 3), self.dice.from(1, 64), self.dice.from(1, 48), self.dice.from(1, 48)]
    }

    /// The second factor, whose columns may be contiguous.
    fn columns(&mut self, name: &str, t: DType, [b, k, n]: [i64; 3], contiguous: bool) -> TensorId {
        let tensor = Tensor::device(name, t, [b, k, n]);
        self.g.tensor(if contiguous { tensor.strides([k * n, 1, k]) } else { tensor })
    }

    pub(super) fn matmul(&mut self, then: fn(&mut Draw, TensorId) -> TensorId) {
        let dims = self.product_dims();
        let y = self.product(dims);
        let y = then(self, y);
        self.output(y);
    }

    pub(super) fn matmul_any(&mut self) {
        let dims = self.any_product_dims();
        let y = self.product(dims);
        self.output(y);
    }

    fn product(&mut self, [batch, m, k, n]: [i64; 4]) -> TensorId {
        let contiguous = self.dice.coin();
        let a = self.g.input("a", self.t, [batch, m, k]);
        let b = self.columns("b", self.t, [batch, k, n], contiguous);
        self.g.matmul(a, b)
    }

    pub(super) fn bias_activation(&mut self, y: TensorId, mode: Mode) -> TensorId {
        let dims = self.extents(y);
        let bias = self.g.input("bias", self.t, [1, 1, dims[2]]);
        let y = self.g.pointwise(Mode::Add, &[y, bias]);
        self.g.pointwise(mode, &[y])
    }

    fn descaled(&mut self) -> TensorId {
        let [batch, m, k, n] = self.product_dims();
        let a = self.g.input("a", self.t, [batch, m, k]);
        let b = self.columns("b", self.t, [batch, k, n], true);
        let mut y = self.g.matmul(a, b);
        for name in ["descale_a", "descale_b"] {
            let scale = self.g.input(name, F32, [1, 1, 1]);
            y = self.g.pointwise(Mode::Mul, &[y, scale]);
        }
        y
    }

    pub(super) fn matmul_eight(&mut self) {
        let (y, t) = (self.descaled(), self.dice.pick(&[BF16, F16, F32]));
        self.g.output(y, "y", t);
    }

    pub(super) fn matmul_quantized(&mut self) {
        let y = self.descaled();
        let scale = self.g.input("scale_y", F32, [1, 1, 1]);
        let y = self.g.pointwise(Mode::Mul, &[y, scale]);
        self.g.output(y, "y", self.t);
    }

    pub(super) fn matmul_reduced(&mut self) {
        let [batch, m, k, n] = self.product_dims();
        let (a, b) = (self.g.input("a", self.t, [batch, m, k]), self.g.input("b", self.t, [batch, k, n]));
        let y = self.g.matmul(a, b);
        let y = self.g.reduce(ReductionMode::Add, y, [batch, m, 1]);
        self.g.output(y, "y", F32);
    }

    pub(super) fn gate(&mut self) {
        let [batch, m, k, n] = self.product_dims();
        let a = self.g.input("a", self.t, [batch, m, k]);
        let [gate, up] = ["gate", "up"].map(|name| self.g.input(name, self.t, [batch, k, n]));
        let (gate, up) = (self.g.matmul(a, gate), self.g.matmul(a, up));
        let gate = self.g.pointwise(Mode::SwishFwd, &[gate]);
        let y = self.g.pointwise(Mode::Mul, &[gate, up]);
        self.output(y);
    }

    pub(super) fn scaled_matmul(&mut self) {
        let [batch, m, k, n] = self.product_dims();
        let (a, b) = (self.g.input("a", self.t, [batch, m, k]), self.g.input("b", self.t, [batch, k, n]));
        let scale = self.g.input("scale", self.t, [batch, m, 1]);
        let a = self.g.pointwise(Mode::Mul, &[a, scale]);
        self.g.set_dtype(a, self.t);
        let y = self.g.matmul(a, b);
        self.output(y);
    }

    pub(super) fn integer_weights(&mut self) {
        let [batch, m, k, n] = if self.dice.coin() { self.product_dims() } else { self.any_product_dims() };
        let contiguous = self.dice.roll(3) == 0;
        let a = self.g.input("a", self.t, [batch, m, k]);
        let b = self.columns("b", I8, [batch, k, n], contiguous);
        let b = self.g.pointwise(Mode::Identity, &[b]);
        self.g.set_dtype(b, self.t);
        let y = self.g.matmul(a, b);
        self.output(y);
    }

    pub(super) fn block_weights(&mut self) {
        let (m, blocks, n) = (8 * self.dice.from(1, 8), self.dice.from(1, 4), 16 * self.dice.from(1, 8));
        let (a, b) = (self.g.input("a", self.t, [1, m, 32 * blocks]), self.g.input("b", F8E4M3, [1, 32 * blocks, n]));
        let scale = self.g.input("scale", self.t, [1, blocks, n]);
        let b = self.g.block_scale_dequantize(b, scale, &[32, 1]);
        self.g.set_dtype(b, self.t);
        let y = self.g.matmul(a, b);
        self.output(y);
    }

    pub(super) fn block_quantize(&mut self) {
        let x = self.g.input("x", self.t, [1, 128, 128]);
        let (y, scale) = self.g.block_scale_quantize(x, 32, F8E4M3, F8E8M0);
        self.g.output(y, "y", F8E4M3);
        self.g.output(scale, "scale", F8E8M0);
    }

    fn any_dims(&mut self) -> [i64; 3] {
        [self.dice.from(1, 4), self.dice.from(2, 48), 8 * self.dice.from(1, 24)]
    }

    pub(super) fn elementwise(&mut self) {
        let dims = if self.dice.coin() { self.any_dims().to_vec() } else { self.image_dims() };
        // Any set of axes of the addend is broadcast.
        let added: Vec<i64> = dims.iter().map(|&n| if self.dice.coin() { 1 } else { n }).collect();
        self.channels_last = self.dice.coin();
        let (x, z) = (self.images("x", &dims), self.images("z", &added));
        let factor = self.g.scalar(Scalar::F32(1.5));
        let y = self.g.pointwise(Mode::Mul, &[x, factor]);
        let y = self.g.pointwise(Mode::Add, &[y, z]);
        let mode = self.dice.pick(&[Mode::ReluFwd, Mode::GeluFwd, Mode::SwishFwd]);
        let y = self.g.pointwise(mode, &[y]);
        self.output(y);
    }

    pub(super) fn quantize(&mut self) {
        let dims = self.any_dims();
        let (x, t) = (self.dice.pick(&[F32, F16, BF16]), self.t);
        let (x, scale) = (self.g.input("x", x, dims), self.g.input("scale", F32, [1, 1, 1]));
        let y = self.g.pointwise(Mode::Mul, &[x, scale]);
        self.g.output(y, "y", t);
    }

    pub(super) fn dequantize(&mut self) {
        let (dims, t) = (self.any_dims(), self.dice.pick(&[F32, F16, BF16]));
        let (x, scale) = (self.g.input("x", self.t, dims), self.g.input("descale", F32, [1, 1, 1]));
        let y = self.g.pointwise(Mode::Mul, &[x, scale]);
        self.g.output(y, "y", t);
    }

    pub(super) fn reduction(&mut self, mode: ReductionMode) {
        let dims = self.image_dims();
        self.channels_last = true;
        let x = self.images("x", &dims);
        let c = dims[1];
        let y = self.g.reduce(mode, x, [1, c, 1, 1]);
        self.g.set_strides(y, [c, 1, c, c]);
        self.g.output(y, "y", F32);
    }

    /// The first row of each expert; some experts have none.
    fn first_rows(&mut self, experts: i64, rows: i64) -> TensorId {
        let first = self.g.input("first_token", I32, [experts, 1, 1]);
        let mut starts = self.dice.list(experts as usize, 0, rows);
        starts[0] = 0;
        starts.sort_unstable();
        self.given.insert(first, starts.into_iter().map(|n| n as f64).collect());
        first
    }

    pub(super) fn experts(&mut self, route: Route) {
        let (experts, tokens) = (self.dice.from(2, 8), self.dice.from(8, 64));
        let (k, n) = (16 * self.dice.from(1, 6), 16 * self.dice.from(1, 6));
        let (read, rows) = match route {
            Route::None => (tokens, tokens),
            Route::Gather => (tokens, 2 * tokens),
            Route::Scatter => (2 * tokens, 2 * tokens),
        };
        let x = self.g.input("tokens", self.t, [1, read, k]);
        let weights = self.columns("weights", self.t, [experts, k, n], true);
        let first = self.first_rows(experts, rows);
        let routing = match route {
            Route::None => Routing::None,
            Route::Gather => {
                let numbers = self.dice.list(rows as usize, 0, tokens - 1);
                Routing::Gather(self.numbers("index", numbers))
            }
            Route::Scatter => {
                // Each row of the result is written once.
                let mut order: Vec<i64> = (0..rows).collect();
                for n in (1..order.len()).rev() {
                    order.swap(n, self.dice.from(0, n as i64) as usize);
                }
                let index = self.numbers("index", order.iter().map(|row| row / 2).collect());
                let slot = self.numbers("slot", order.iter().map(|row| row % 2).collect());
                Routing::Scatter { index, slot, top_k: 2 }
            }
        };
        let y = self.g.moe_matmul(x, weights, first, routing);
        self.output(y);
    }

    /// A number for each row.
    fn numbers(&mut self, name: &str, numbers: Vec<i64>) -> TensorId {
        let id = self.g.input(name, I32, [1, numbers.len() as i64, 1]);
        self.given.insert(id, numbers.into_iter().map(|n| n as f64).collect());
        id
    }

    pub(super) fn experts_backward(&mut self) {
        let (experts, rows) = (self.dice.from(2, 8), self.dice.from(8, 64));
        let (k, n) = (16 * self.dice.from(1, 6), 16 * self.dice.from(1, 6));
        let (tokens, dy) = (self.g.input("tokens", self.t, [1, rows, k]), self.g.input("dy", self.t, [1, rows, n]));
        let first = self.first_rows(experts, rows);
        let dw = self.g.moe_matmul_backward(tokens, dy, first);
        self.output(dw);
    }

    pub(super) fn softmax(&mut self) {
        let [b, s, n] = self.any_dims();
        let x = self.g.input("x", self.t, [b, 2, s, n]);
        let y = self.g.softmax(x, None, None);
        self.output(y);
    }

    pub(super) fn concat(&mut self) {
        let (dims, axis) = (self.image_dims(), self.dice.from(0, 1));
        let (a, b) = (self.images("a", &dims), self.images("b", &dims));
        let y = self.g.concat(&[a, b], axis);
        self.output(y);
    }

    pub(super) fn transpose(&mut self) {
        let dims = self.any_dims();
        let x = self.g.input("x", self.t, dims);
        let y = self.g.transpose(x, &[0, 2, 1]);
        self.output(y);
    }

    pub(super) fn slice(&mut self) {
        let dims = self.any_dims();
        let x = self.g.input("x", self.t, dims);
        let y = self.g.slice(x, &[0, 1, 0], &dims);
        self.output(y);
    }

    pub(super) fn rotary(&mut self, backward: bool) {
        let (s, d) = (self.dice.from(2, 32), self.dice.pick(&[32, 64, 128]));
        let (x, angles) = (self.g.input("x", self.t, [2, 4, s, d]), self.g.input("angles", F32, [s, 1, 1, d]));
        let y = if backward { self.g.rope_backward(x, angles, 1.0, None) } else { self.g.rope(x, angles, 1.0, None) };
        self.output(y);
    }
}
