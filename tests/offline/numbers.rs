//! Numbers that kernels beside cuDNN's read and write, in every element type, and how far they may be off.

use half::{bf16, f16};

/// Buffers of the next numbers of a job, and what is in them afterwards.
pub(crate) const FILLED: &str = "
static char *filled(number count, number bytes) {
    char *made = buffer(count, bytes);
    for (number n = 0; n < count; n++) memcpy(made + n * bytes, next++, static_cast<size_t>(bytes));
    return made;
}

static void done(char *made, number count, number bytes, bool print) {
    for (number n = -guard; print && n < count + guard; n++) {
        number value = 0;
        memcpy(&value, made + n * bytes, static_cast<size_t>(bytes));
        printf(\"%llx \", static_cast<unsigned long long>(value));
    }
    if (print) printf(\"\\n\");
    free(made - guard * bytes);
}

";

pub(crate) const GUARD: usize = 16;

/// Element types as the kernels know them.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Type {
    F32,
    F16,
    BF16,
}

impl Type {
    pub(crate) fn bits(self, x: f64) -> i64 {
        match self {
            Type::F32 => (x as f32).to_bits().into(),
            Type::F16 => f16::from_f64(x).to_bits().into(),
            Type::BF16 => bf16::from_f64(x).to_bits().into(),
        }
    }

    pub(crate) fn value(self, bits: i64) -> f64 {
        match self {
            Type::F32 => f32::from_bits(bits as u32).into(),
            Type::F16 => f16::from_bits(bits as u16).to_f64(),
            Type::BF16 => bf16::from_bits(bits as u16).to_f64(),
        }
    }

    /// Half a unit of the last place, relative and at least.
    pub(crate) fn roundoff(self, x: f64) -> f64 {
        match self {
            Type::F32 => 1e-6 * x.abs() + 1e-37,
            Type::F16 => x.abs() / 2000.0 + 6e-8,
            Type::BF16 => x.abs() / 250.0 + 1e-37,
        }
    }

    pub(crate) fn untouched(self) -> i64 {
        if self == Type::F32 { 0x5a5a_5a5a } else { 0x5a5a }
    }
}

pub(crate) fn floats(values: &[f64]) -> impl Iterator<Item = i64> {
    values.iter().map(|&x| Type::F32.bits(x))
}

/// An element, and how far it may be off; none where anything may stand.
pub(crate) type Wanted = Option<(f64, f64)>;

pub(crate) fn read(line: &str) -> Vec<i64> {
    line.split_whitespace().map(|word| i64::from_str_radix(word, 16).unwrap()).collect()
}

pub(crate) fn buffer(line: &str, ty: Type, want: &[Wanted]) -> Result<(), String> {
    let got = read(line);
    if got.len() != want.len() + 2 * GUARD {
        return Err(format!("{} elements", got.len()));
    }
    for (n, &bits) in got.iter().enumerate() {
        let Some(&wanted) = n.checked_sub(GUARD).and_then(|n| want.get(n)) else {
            if bits != ty.untouched() {
                return Err(format!("element {n} is outside, and written"));
            }
            continue;
        };
        let Some((want, tolerance)) = wanted else { continue };
        let value = ty.value(bits);
        let off = (value - want).abs();
        if value != want && (off.is_nan() || off > tolerance) {
            return Err(format!("element {} is {value}, not {want} to {tolerance:e}", n - GUARD));
        }
    }
    Ok(())
}
