//! Problems on which faults of kernels are looked for, as cases.

/// Several tiles for a block of threads, each of several blocks of keys; heads that share keys.
pub(super) const LONG: &str = r#"
[[case]]
name = "windows"
shape = { batch = 2, heads_q = 2, heads_kv = 1, seq_q = 420, seq_kv = 500, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["window:90,100"]
stats = true

[[case]]
name = "every key"
shape = { batch = 1, heads_q = 4, heads_kv = 1, seq_q = 260, seq_kv = 700, dim_qk = 128, dim_v = 128 }
dtype = "f16"
stats = true
"#;

/// Tiles of one block of keys, and of none.
pub(super) const SHORT: &str = r#"
[[case]]
name = "few keys"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 900, seq_kv = 40, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["window:300,0"]
stats = true
"#;

/// Query heads that share keys, walked by several blocks of threads, not as many by each.
pub(super) const SHARED: &str = r#"
[[case]]
name = "one head of keys"
shape = { batch = 1, heads_q = 8, heads_kv = 1, seq_q = 300, seq_kv = 230, dim_qk = 128, dim_v = 104 }
dtype = "bf16"
stats = true

[[case]]
name = "one head of keys, parts of the columns"
shape = { batch = 1, heads_q = 6, heads_kv = 1, seq_q = 260, seq_kv = 110, dim_qk = 200, dim_v = 256 }
dtype = "f16"
stats = true
"#;

/// Keys that no query keeps.
pub(super) const FEWER: &str = r#"
[[case]]
name = "fewer queries"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 100, seq_kv = 400, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["causal"]
stats = true
"#;

/// One stage of operands, parts of the columns, which dropout leaves no pairs for; results where queries were.
pub(super) const WIDE: &str = r#"
[[case]]
name = "wide"
shape = { batch = 1, heads_q = 4, heads_kv = 2, seq_q = 300, seq_kv = 300, dim_qk = 256, dim_v = 200 }
dtype = "bf16"
mask = ["causal"]
dropout = 0.1
stats = true
"#;

/// A rule that no band is: tiles and blocks by a map.
pub(super) const MAPPED: &str = r#"
[[case]]
name = "a neighbourhood"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 400, seq_kv = 400, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["natten:51"]
stats = true
"#;

/// A rule that reads tensors: more blocks than are judged at once.
pub(super) const LISTED: &str = r#"
[[case]]
name = "any keys of few queries"
shape = { batch = 1, heads_q = 2, heads_kv = 1, seq_q = 70, seq_kv = 4500, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["array:qk"]
stats = true

[[case]]
name = "documents"
shape = { batch = 2, heads_q = 2, heads_kv = 1, seq_q = 400, seq_kv = 400, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["document"]
stats = true

[[case]]
name = "some queries"
shape = { batch = 1, heads_q = 1, heads_kv = 1, seq_q = 900, seq_kv = 130, dim_qk = 64, dim_v = 64 }
dtype = "f16"
mask = ["array:q"]
stats = true
"#;

/// Lengths of entries, a number of its own beside the keys.
pub(super) const LENGTHS: &str = r#"
[[case]]
name = "lengths and a sink"
shape = { batch = 3, heads_q = 2, heads_kv = 1, seq_q = 200, seq_kv = 270, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["padding", "causal"]
sink = true
stats = true
backward = { wrt = ["sink:f32"] }
"#;

/// Documents of several tiles, of one, and of as many as others.
pub(super) const PACKED: &str = r#"
[[case]]
name = "documents one behind the other"
shape = { batch = 5, heads_q = 4, heads_kv = 2, seq_q = 300, seq_kv = 300, dim_qk = 128, dim_v = 128 }
dtype = "bf16"
layout = "bshd"
mask = ["causal"]
stats = true
packed = { lengths_q = [70, 300, 61, 0, 140], before = 2, slack = 3 }
"#;

/// Few queries of heads that share a tile, keys in parts.
pub(super) const FEW: &str = r#"
[[case]]
name = "few queries and a sink"
shape = { batch = 3, heads_q = 6, heads_kv = 2, seq_q = 3, seq_kv = 900, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["padding", "window:700,0:ends"]
sink = true
stats = true

[[case]]
name = "few queries of many entries"
shape = { batch = 8, heads_q = 2, heads_kv = 1, seq_q = 4, seq_kv = 800, dim_qk = 64, dim_v = 64 }
dtype = "f16"
mask = ["padding"]
stats = true
"#;

/// Keys in pages, whose table ends with anything.
pub(super) const PAGED: &str = r#"
[[case]]
name = "pages"
shape = { batch = 3, heads_q = 4, heads_kv = 2, seq_q = 5, seq_kv = 700, dim_qk = 64, dim_v = 128 }
dtype = "bf16"
layout = "bshd"
mask = ["padding"]
stats = true
paged = { page_size = 48, lengths_q = [5, 4, 5], lengths_kv = [700, 65, 0], spare = 2 }
"#;

/// Numbers of rows: of whole tiles, and of parts of their keys.
pub(super) const STATISTICS: &str = r#"
[[case]]
name = "statistics beside lengths and a sink"
shape = { batch = 3, heads_q = 2, heads_kv = 1, seq_q = 100, seq_kv = 150, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["padding"]
sink = true
stats = true
stats_base = "two"
row_max = true
sum_exp = true

[[case]]
name = "statistics of few queries beside lengths"
shape = { batch = 3, heads_q = 6, heads_kv = 2, seq_q = 3, seq_kv = 900, dim_qk = 64, dim_v = 64 }
dtype = "f16"
mask = ["padding", "window:700,0:ends"]
row_max = true
sum_exp = true

[[case]]
name = "statistics of one query and a sink above its scores"
shape = { batch = 1, heads_q = 4, heads_kv = 2, seq_q = 1, seq_kv = 1700, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
attn_scale = 0.01
sink = true
stats = true
stats_base = "two"
sum_exp = true
"#;

/// Weights that are dropped: of tiles of one head, of heads that share tiles of 8 queries and of more.
pub(super) const DROPPED: &str = r#"
[[case]]
name = "dropout beside lengths and a sink"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 150, seq_kv = 170, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
mask = ["padding", "causal"]
dropout = 0.4
sink = true
stats = true
backward = { wrt = ["sink:f32"] }

[[case]]
name = "dropout of few queries, keys in parts"
shape = { batch = 2, heads_q = 12, heads_kv = 2, seq_q = 7, seq_kv = 900, dim_qk = 64, dim_v = 64 }
dtype = "f16"
dropout = 0.3
stats = true

[[case]]
name = "dropout of some queries"
shape = { batch = 1, heads_q = 6, heads_kv = 2, seq_q = 20, seq_kv = 130, dim_qk = 64, dim_v = 64 }
dtype = "bf16"
score_mod = ["softcap:5"]
dropout = 0.6
stats = true
"#;

/// Heads that fill no tile.
pub(super) const UNFILLED: &str = r#"
[[case]]
name = "heads that fill no tile"
shape = { batch = 1, heads_q = 17, heads_kv = 1, seq_q = 4, seq_kv = 100, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["alibi"]
stats = true
"#;

/// Traces.
pub(super) const TRACED: &str = r#"
[[case]]
name = "alibi and softcap"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 150, seq_kv = 170, dim_qk = 64, dim_v = 40 }
dtype = "bf16"
score_mod = ["alibi", "softcap:5"]
mask = ["causal"]
stats = true
"#;

/// Gradients of what traces read.
pub(super) const ALONG: &str = r#"
[[case]]
name = "a bias"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 150, seq_kv = 170, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["bias:hqk"]
stats = true
backward = { wrt = ["bias:f32"] }
"#;

/// A tensor that ends where memory does, at the end of no tile.
pub(super) const ENDING: &str = r#"
[[case]]
name = "a bias of whole pages of memory"
shape = { batch = 1, heads_q = 4, heads_kv = 2, seq_q = 320, seq_kv = 200, dim_qk = 64, dim_v = 64 }
dtype = "f16"
score_mod = ["bias:hqk"]
stats = true
"#;
