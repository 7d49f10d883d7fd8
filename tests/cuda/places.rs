//! A score_mod that is no number past the extents. Tiles do not end there, and traces that read nothing along an axis are asked for places behind it: what they say is in no result.

use super::{NAME, backward_on, executor, forward_on, mma};
use conformance::case::Case;
use conformance::runner::Source;

const CASES: &str = r#"
[[case]]
name = "no number past the last query and key"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 150, seq_kv = 170, dim_qk = 64, dim_v = 40 }
dtype = "bf16"
score_mod = ["within"]
stats = true
backward = { wrt = ["within:f32"] }

[[case]]
name = "no number past the last query and key, beside a band"
shape = { batch = 1, heads_q = 4, heads_kv = 2, seq_q = 210, seq_kv = 130, dim_qk = 128, dim_v = 128 }
dtype = "f16"
score_mod = ["within"]
mask = ["causal-bottom-right"]
stats = true

[[case]]
name = "no number past the last query and key, beside lengths and a rule"
shape = { batch = 3, heads_q = 2, heads_kv = 2, seq_q = 70, seq_kv = 90, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
score_mod = ["within"]
mask = ["padding", "dilated:3"]
stats = true

[[case]]
name = "no number past the last of few queries"
shape = { batch = 2, heads_q = 6, heads_kv = 2, seq_q = 5, seq_kv = 330, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["within"]
stats = true

[[case]]
name = "no number past the last query, and a tensor along keys"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 140, seq_kv = 150, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
score_mod = ["within", "bias:k"]
mask = ["window:60,30"]
stats = true
backward = { wrt = ["bias:f32", "within:f32"] }
"#;

#[test]
fn what_score_mods_are_past_the_extents_is_in_no_result() {
    let cases = Case::parse(CASES).unwrap();
    for (name, executor) in [(NAME, executor()), (mma::NAME, mma::executor())] {
        let Some(executor) = executor else { return };
        forward_on(&executor, name, "no numbers", &cases);
        backward_on(&executor, name, "no numbers, backward", &cases, &[Source::Oracle]);
    }
}
