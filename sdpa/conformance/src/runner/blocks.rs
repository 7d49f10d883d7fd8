//! Block scales of 8-bit floats: drawn at random, stored tile by tile for a call, and passed to the oracle element by element.

use crate::random::Random;
use sdpa::{AttentionSpec, F8E8M0, Operand, Param};

/// The scales of `q`, `k` and `v`.
#[derive(Debug)]
pub(super) struct Blocks([Operands; 3]);

/// The scales of one operand.
#[derive(Debug)]
struct Operands {
    name: &'static str,
    /// The memory that a call reads. Its padding is the largest power of two, so that reading it shows in the result.
    memory: Vec<F8E8M0>,
    /// The scale of each element, in row-major order.
    each: Vec<f64>,
}

impl Operands {
    /// Draws the scales of `lines` of `along` elements in each of `heads`. If `turned`, the elements of a line are not contiguous in row-major order.
    fn draw(name: &'static str, [heads, lines, along]: [usize; 3], turned: bool, random: &mut Random) -> Operands {
        let blocks = along.div_ceil(32);
        let drawn: Vec<i32> = (0..heads * lines * blocks).map(|_| random.pick(&[-3, -2, -1, 0, 1])).collect();
        let of = |head: usize, line: usize, block: usize| drawn[(head * lines + line) * blocks + block];
        let mut memory = Vec::new();
        for head in 0..heads {
            for (of_lines, of_blocks) in (0..lines.div_ceil(128)).flat_map(|l| (0..blocks.div_ceil(4)).map(move |b| (l, b))) {
                for n in 0..512 {
                    let (row, quarter, within) = (n / 16, n / 4 % 4, n % 4);
                    let (line, block) = (of_lines * 128 + quarter * 32 + row, of_blocks * 4 + within);
                    let there = line < lines && block < blocks;
                    memory.push(F8E8M0::from_bits(if there { (127 + of(head, line, block)) as u8 } else { 254 }));
                }
            }
        }
        let places = (0..heads * lines * along).map(|n| (n / (lines * along), n % (lines * along)));
        let each = places.map(|(head, n)| {
            let (line, at) = if turned { (n % lines, n / lines) } else { (n / along, n % along) };
            2f64.powi(of(head, line, at / 32))
        });
        Operands { name, memory, each: each.collect() }
    }
}

impl Blocks {
    /// Draws the scales of a block-scaled specification; `None` for others.
    pub(super) fn draw(spec: &AttentionSpec, seed: u64) -> Option<Blocks> {
        let mut random = Random::new(seed ^ 0x3270);
        let mut draw = |name, dims: [i64; 4], turned: bool| {
            let [batch, heads, seq, dim] = dims.map(|n| n as usize);
            Operands::draw(name, if turned { [batch * heads, dim, seq] } else { [batch * heads, seq, dim] }, turned, &mut random)
        };
        spec.block_scaled.then(|| {
            Blocks([
                draw("block_scale_q", spec.q.dims, false),
                draw("block_scale_k", spec.k.dims, false),
                draw("block_scale_v", spec.v.dims, true),
            ])
        })
    }

    /// Returns the scale of each element of an operand, in row-major order.
    pub(super) fn of(&self, operand: Operand) -> Option<&[f64]> {
        self.0.get(operand as usize).map(|of| &of.each[..])
    }

    /// Returns the scales as parameters of a call.
    pub(super) fn params(&self) -> impl Iterator<Item = Param<'_>> {
        self.0.iter().map(|of| Param::new(of.name, &of.memory))
    }
}
