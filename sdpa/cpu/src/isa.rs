//! The instruction set, detected at run time.

use pulp::{Simd, WithSimd};

/// Number of key rows, or value columns, that one pass of a micro-kernel processes.
pub(super) const PANEL: usize = 6;

/// An instruction set that this machine supports.
#[derive(Clone, Copy, Debug)]
pub(super) enum Isa {
    /// AVX-512 (F, CD, VL, DQ, BW): 16 lanes, 32 registers.
    #[cfg(target_arch = "x86_64")]
    V4(pulp::x86::V4),
    /// AVX2 and FMA: 8 lanes, 16 registers.
    #[cfg(target_arch = "x86_64")]
    V3(pulp::x86::V3),
    /// NEON: 4 lanes, 32 registers.
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
    /// Four lanes in plain Rust, which the compiler vectorises as far as the target allows.
    Portable,
}

impl Isa {
    /// Returns the best instruction set of this machine.
    pub(super) fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(simd) = pulp::x86::V4::try_new() {
                return Isa::V4(simd);
            }
            if let Some(simd) = pulp::x86::V3::try_new() {
                return Isa::V3(simd);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(simd) = pulp::aarch64::Neon::try_new() {
            return Isa::Neon(simd);
        }
        Isa::Portable
    }

    /// Returns every instruction set that this machine supports.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Isa> {
        let mut all = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(pulp::x86::V3::try_new().map(Isa::V3));
            all.extend(pulp::x86::V4::try_new().map(Isa::V4));
        }
        #[cfg(target_arch = "aarch64")]
        all.extend(pulp::aarch64::Neon::try_new().map(Isa::Neon));
        all
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::V4(_) => "x86-v4",
            #[cfg(target_arch = "x86_64")]
            Isa::V3(_) => "x86-v3",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) => "neon",
            Isa::Portable => "portable",
        }
    }

    /// Returns the number of f32 lanes in a register.
    pub(super) fn lanes(self) -> usize {
        self.run(Facts).0
    }

    /// Returns the number of registers per tile. With [`PANEL`] accumulators for each of them, they fill the register file.
    pub(super) fn tile_vectors(self) -> usize {
        self.run(Facts).1
    }

    /// Runs `op` in a function compiled for this instruction set.
    pub(super) fn run<Op: WithSimd>(self, op: Op) -> Op::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::V4(simd) => Simd::vectorize(simd, op),
            #[cfg(target_arch = "x86_64")]
            Isa::V3(simd) => Simd::vectorize(simd, op),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(simd) => Simd::vectorize(simd, op),
            Isa::Portable => Simd::vectorize(pulp::Scalar128b, op),
        }
    }
}

/// Returns `a * b + c`, fused where an instruction exists. [`Isa::Portable`], the only set with 4 lanes and 16 registers, would call a function per lane.
#[inline(always)]
pub(super) fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
    if const { S::F32_LANES == 4 && S::REGISTER_COUNT == 16 } { simd.add_f32s(simd.mul_f32s(a, b), c) } else { simd.mul_add_f32s(a, b, c) }
}

struct Facts;

impl WithSimd for Facts {
    type Output = (usize, usize);

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) -> (usize, usize) {
        (S::F32_LANES, if S::REGISTER_COUNT >= 32 { 4 } else { 2 })
    }
}
