//! Faults of functions that traced expressions call.

use super::NAME;
use super::faults::{Fault, Pass::Forward, all_are_found, all_have_places};

const WAVES: &str = r#"
[[case]]
name = "waves"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 200, seq_kv = 300, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["waves"]
row_max = true
"#;

const POWERS: &str = r#"
[[case]]
name = "powers"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 130, seq_kv = 200, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["powers"]
row_max = true
"#;

const SMOOTH: &str = r#"
[[case]]
name = "smooth"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 130, seq_kv = 200, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["smooth"]
row_max = true
"#;

const FAULTS: [Fault; 15] = [
    ("a turn is a float", Forward, ["fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, x))", "fmaf(turns, -6.28318548f, x)"], WAVES),
    ("what is far is near", Forward, ["fabsf(x) <= 16777216.0f ?", "true ?"], WAVES),
    ("digits of turns end too soon", Forward, ["digits * first + __umulhi(digits, second)", "digits * first"], WAVES),
    ("digits of turns begin too far on", Forward, ["by = power & 31;", "by = power & 15;"], WAVES),
    ("what is far has no sign", Forward, ["(int(bits) < 0 ? -remainder : remainder)", "remainder"], WAVES),
    ("a sine near 0 is 0", Forward, ["fabsf(angle) < 0.0144f ? angle :", "fabsf(angle) < 0.0144f ? 0.0f :"], WAVES),
    ("a sine is a cosine", Forward, ["angle : sin_approx(angle);", "angle : cos_approx(angle);"], WAVES),
    ("odd powers of negative numbers are positive", Forward, ["negative & odd ? -size : size", "size"], POWERS),
    ("every whole power is odd", Forward, ["integer & floorf(0.5f * y) != 0.5f * y", "integer"], POWERS),
    ("0 to the power 0 is no number", Forward, ["(y == 0.0f) | (log == 0.0f) ? 0.0f : y * log", "y * log"], POWERS),
    ("great powers have another logarithm", Forward, ["fmaf(y, sum, 1.44269507f)", "fmaf(y, sum, 1.44f)"], POWERS),
    ("an exponential is one of 2", Forward, ["ex2_approx(1.44269504f * x)", "ex2_approx(x)"], SMOOTH),
    ("a logarithm is one to base 2", Forward, ["0.693147181f * lg2_approx(x)", "lg2_approx(x)"], SMOOTH),
    ("a root is none", Forward, ["return sqrt_approx(x);", "return x;"], SMOOTH),
    ("a quotient is turned over", Forward, ["div_full(x, y)", "div_full(y, x)"], SMOOTH),
];

/// Every case of these faults.
pub(super) const CASES: [&str; 3] = [WAVES, POWERS, SMOOTH];

#[test]
fn every_fault_of_functions_is_found() {
    all_have_places(&FAULTS, &[]);
    if super::executor().is_none() {
        return;
    }
    all_are_found(&format!("{NAME}, functions"), &FAULTS, &CASES, || conformance::emulated::executor().unwrap());
}
