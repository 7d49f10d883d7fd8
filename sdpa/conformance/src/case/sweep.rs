//! Generated cases that vary one extent step by step, so that a mask's edge is at every position of a block. For executors that run a problem in little time.

use super::Case;

/// The extents that the sweeps vary.
struct Extents {
    batch: i64,
    seq_q: i64,
    seq_kv: i64,
}

fn text(name: &str, Extents { batch, seq_q, seq_kv }: Extents, mask: &str, more: &str) -> String {
    format!(
        "[[case]]\nname = \"{name}\"\nshape = {{ batch = {batch}, heads_q = 2, heads_kv = 1, seq_q = {seq_q}, seq_kv = {seq_kv}, \
         dim_qk = 8, dim_v = 8 }}\ndtype = \"f32\"\nstats = true\nmask = [{mask}]\n{more}\n"
    )
}

/// Returns the entries of a TOML array of strings.
fn quoted(all: &[&str]) -> String {
    all.iter().map(|one| format!("{one:?}")).collect::<Vec<_>>().join(", ")
}

impl Case {
    /// Returns cases with bands, prefixes and lengths that end at every position of a block of `block` keys or queries. Some leave rows
    /// that attend to no key.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn edges(block: i64) -> Result<Vec<Case>, String> {
        let mut all = String::new();
        let mut add = |name: String, seq_q, seq_kv, mask: String| {
            all.push_str(&text(&name, Extents { batch: 1, seq_q, seq_kv }, &format!("{mask:?}"), ""));
        };
        for n in 0..=block + 1 {
            add(format!("causal, {n} queries more"), 2 * block + n, 2 * block, "causal-bottom-right".to_owned());
            add(format!("causal, {n} keys more"), 2 * block, 2 * block + n, "causal-bottom-right".to_owned());
            add(format!("the last {n} keys"), 2 * block + 2, 2 * block + 6, format!("window:{},inf", n + 1));
            add(format!("the next {n} keys"), 2 * block + 2, 2 * block + 6, format!("window:inf,{n}"));
            add(format!("the first {n} keys"), 2 * block + 2, block + 6, format!("prefix-lm:{n}"));
        }
        // Use 40 batch entries, so that each length that may be drawn occurs.
        let lengths =
            |n: i64| text(&format!("lengths {n}"), Extents { batch: 40, seq_q: block + 3 + n, seq_kv: 2 * block - n }, "\"padding\"", "");
        all.extend((0..4).map(lengths));
        Case::parse(&all)
    }

    /// Returns cases for the gradient of a declared tensor, one for every set of axes that the tensor can span.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn axes() -> Result<Vec<Case>, String> {
        let one = |set: usize| {
            let axes: String = "bhqk".chars().enumerate().filter(|(n, _)| set >> n & 1 == 1).map(|(_, axis)| axis).collect();
            let more = format!("score_mod = [\"bias:{axes}\"]\nbackward = {{ wrt = [\"bias:f32\"] }}");
            text(
                &format!("bias over {axes:?}").replace('"', ""),
                Extents { batch: 3, seq_q: 41, seq_kv: 39 },
                "\"causal-bottom-right\"",
                &more,
            )
        };
        Case::parse(&(0..16).map(one).collect::<String>())
    }

    /// Returns cases with the gradient of every kind of declared parameter for head dims above 128, where several thread blocks compute the same scores. They
    /// are dense and packed, f16 and bf16, with several tiles of queries and keys.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn wide_parameters() -> Result<Vec<Case>, String> {
        // The gradients of a row's scores sum to 0, so a bias without a key axis has a gradient only under a score_mod that is not linear.
        const KINDS: [(&[&str], &str); 8] = [
            (&["bias:hqk"], "bias"),
            (&["bias:bk"], "bias"),
            (&["bias:q", "softcap:2"], "bias"),
            (&["bias:bh", "softcap:2"], "bias"),
            (&["alibi-slopes"], "slopes"),
            (&["softcap:5"], "cap"),
            (&["temperature"], "temperature"),
            (&["relative-bias:4,30"], "rel"),
        ];
        const DIMS: [[i64; 2]; 4] = [[192, 128], [256, 256], [256, 64], [72, 200]];
        let mut all = String::new();
        for (n, (score_mods, param)) in KINDS.into_iter().enumerate() {
            for (m, [dim_qk, dim_v]) in DIMS.into_iter().enumerate() {
                let dtype = ["bf16", "f16"][(n + m) % 2];
                let packed = n % 4 == m;
                let (seq_q, seq_kv) = if packed { (140, 140) } else { (70, 140) };
                let packed = if packed { "layout = \"bshd\"\npacked = { lengths_q = [140, 33], before = 2, slack = 3 }\n" } else { "" };
                all.push_str(&format!(
                    "[[case]]\nname = \"{}, dims {dim_qk} and {dim_v}\"\n\
                     shape = {{ batch = 2, heads_q = 4, heads_kv = 2, seq_q = {seq_q}, seq_kv = {seq_kv}, dim_qk = {dim_qk}, dim_v = {dim_v} }}\n\
                     dtype = \"{dtype}\"\nstats = true\nmask = [\"causal-bottom-right\"]\n{packed}score_mod = [{}]\n\
                     backward = {{ wrt = [\"{param}:f32\"] }}\n",
                    score_mods.join(" and "),
                    quoted(score_mods),
                ));
            }
        }
        Case::parse(&all)
    }

    /// Returns deterministic cases with gradients of parameters over every kind of axes, of tables, and of two at once, for head dims of every WGMMA kernel
    /// and for thread blocks that share KV heads. They are dense and packed, f16 and bf16.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn ordered_parameters() -> Result<Vec<Case>, String> {
        // The gradients of a row's scores sum to 0, so a bias without a key axis has a gradient only under a score_mod that is not linear.
        const KINDS: [(&[&str], &[&str]); 10] = [
            (&["bias:hqk"], &["bias:f32"]),
            (&["bias:bhqk"], &["bias:bf16"]),
            (&["bias:qk"], &["bias:f16"]),
            (&["bias:q", "softcap:2"], &["bias:f32"]),
            (&["bias:bhq", "softcap:2"], &["bias:f32"]),
            (&["bias:bk"], &["bias:f32"]),
            (&["bias:h", "softcap:2"], &["bias:f32", "cap:f32"]),
            (&["alibi-slopes", "bias:k"], &["slopes:f32", "bias:bf16"]),
            (&["relative-bias:4,30"], &["rel:f32"]),
            (&["relative-bias:4,30", "bias:q", "softcap:2"], &["rel:bf16", "bias:f32"]),
        ];
        // Query heads, KV heads and head dims.
        const HEADS: [[i64; 4]; 6] =
            [[4, 2, 64, 64], [4, 4, 128, 72], [4, 1, 40, 64], [4, 2, 192, 128], [4, 2, 256, 256], [8, 1, 128, 128]];
        const MASKS: [&str; 4] = ["causal-bottom-right", "window:90,20", "dilated:3", "causal"];
        let mut all = String::new();
        for (n, (score_mods, wrt)) in KINDS.into_iter().enumerate() {
            for (m, [heads_q, heads_kv, dim_qk, dim_v]) in HEADS.into_iter().enumerate() {
                let (dtype, mask) = (["bf16", "f16"][(n + m) % 2], MASKS[(n / 2 + m) % 4]);
                let packed = (n + m) % 4 == 3;
                let (seq_q, seq_kv) = if packed { (140, 140) } else { (150, 210) };
                let packed = if packed { "layout = \"bshd\"\npacked = { lengths_q = [140, 33], before = 2, slack = 3 }\n" } else { "" };
                all.push_str(&format!(
                    "[[case]]\nname = \"{}, heads {heads_q}/{heads_kv}, dims {dim_qk} and {dim_v}, {mask}\"\n\
                     shape = {{ batch = 2, heads_q = {heads_q}, heads_kv = {heads_kv}, seq_q = {seq_q}, seq_kv = {seq_kv}, dim_qk = {dim_qk}, dim_v = {dim_v} }}\n\
                     dtype = \"{dtype}\"\nstats = true\nmask = [\"{mask}\"]\n{packed}score_mod = [{}]\n\
                     backward = {{ wrt = [{}], deterministic = true }}\n",
                    score_mods.join(" and "),
                    quoted(score_mods),
                    quoted(wrt),
                ));
            }
        }
        Case::parse(&all)
    }

    /// Returns cases with scales other than the default, for every number of queries that kernels treat differently.
    ///
    /// # Errors
    /// Fails as [`Case::parse`] does.
    pub fn scales() -> Result<Vec<Case>, String> {
        let mut all = String::new();
        for seq_q in [1, 4, 9, 40] {
            for scale in ["-0.1", "0.0", "1.7"] {
                let extents = Extents { batch: 2, seq_q, seq_kv: 70 };
                all.push_str(&text(&format!("{seq_q} queries, scale {scale}"), extents, "", &format!("attn_scale = {scale}")));
            }
        }
        Case::parse(&all)
    }
}
