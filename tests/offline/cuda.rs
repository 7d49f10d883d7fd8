//! Kernels of our own, compiled for a GPU that is not here.

use conformance::nvrtc;
use conformance::runner::side_by_side;
use conformance::say::{say, skip};
use conformance::share::{DAYS, of_today};
use sdpa::cuda::kernel::{compile, compile_for, serialized};
use sdpa::cuda::mma::{self, Cut};
use sdpa::cuda::{Backward, Forward, source};
use sdpa::{AttentionSpec, DType, Layout, Mask, Packed, Paged, Shape};
use std::sync::Mutex;

/// Dims, type, score_mod (or none), masks.
type Row = ([i64; 2], DType, &'static str, &'static [&'static str]);

/// Every cut, both types, and each thing that makes another text.
const TABLE: [Row; 10] = [
    ([64, 64], DType::BF16, "", &[]),
    ([64, 64], DType::F16, "softcap:30", &["causal"]),
    ([128, 64], DType::BF16, "alibi", &["padding", "causal"]),
    ([128, 128], DType::BF16, "softcap:30", &["causal", "document"]),
    ([128, 128], DType::F16, "bias:hqk", &["prefix-lm:100"]),
    ([128, 128], DType::BF16, "", &["natten:17"]),
    ([192, 128], DType::BF16, "", &["padding", "window:300,0:ends"]),
    ([192, 192], DType::F16, "score * cos(f32(q - k)) / (1.0 + sqrt(f32(head)))", &["dilated:3", "causal"]),
    ([256, 256], DType::BF16, "softcap:50", &["window:400,0"]),
    ([72, 40], DType::BF16, "select(abs(score) > 3.0, erf(score), exp(-score) + pow(score, 2.0))", &["array:qk"]),
];

fn spec([dim_qk, dim_v]: [i64; 2], dtype: DType, score_mod: &str, masks: &[&str]) -> AttentionSpec {
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 700, dim_qk, dim_v };
    let mut spec = AttentionSpec::dense(dtype, shape, Layout::Bshd).with_stats();
    if !score_mod.is_empty() {
        spec = spec.score_mod(score_mod.parse().unwrap_or_else(|e| panic!("{score_mod}: {e}")));
    }
    for text in masks {
        spec = spec.mask(text.parse::<Mask>().unwrap_or_else(|e| panic!("{text}: {e}")));
    }
    spec
}

/// How keys, values and queries lie, where that makes another text.
#[derive(Clone, Copy, Debug)]
enum Lies {
    /// Documents one behind the other: whether queries and keys have the same, whether boundaries are i64.
    Packed(bool, bool),
    /// So many queries beside 9,000 keys, in two batch entries.
    Few(i64),
    /// The same, keys in pages of so many; packed queries where asked.
    Paged(i64, i64, bool),
}

/// Dims, type, score_mod (or none), masks, how tokens lie, and whether nothing may be spilled. Forward alone.
type Other = ([i64; 2], DType, &'static str, &'static [&'static str], Lies, bool);

const OTHERS: [Other; 15] = [
    ([64, 64], DType::F16, "", &["causal"], Lies::Packed(false, false), true),
    ([128, 128], DType::BF16, "", &["causal"], Lies::Packed(false, true), true),
    ([128, 128], DType::BF16, "softcap:30", &["window:300,0:ends"], Lies::Packed(true, false), false),
    ([256, 256], DType::BF16, "", &["document"], Lies::Packed(false, false), false),
    ([64, 64], DType::F16, "", &["padding"], Lies::Few(4), true),
    ([128, 128], DType::BF16, "", &["padding", "causal-ends"], Lies::Few(1), true),
    ([128, 128], DType::BF16, "softcap:30", &["array:hqk"], Lies::Few(3), false),
    ([192, 128], DType::BF16, "", &[], Lies::Few(30), true),
    ([256, 256], DType::BF16, "alibi", &["window:3000,0:bottom-right"], Lies::Few(60), false),
    ([128, 128], DType::BF16, "", &["causal-bottom-right"], Lies::Few(128), true),
    ([64, 64], DType::F16, "", &["padding"], Lies::Few(150), false),
    ([128, 128], DType::BF16, "", &["padding", "causal-ends"], Lies::Paged(1, 16, false), true),
    ([64, 64], DType::F16, "", &["causal-ends"], Lies::Paged(300, 64, true), false),
    ([128, 128], DType::BF16, "softcap:30", &["causal-ends"], Lies::Paged(400, 16, true), true),
    ([256, 256], DType::BF16, "", &["causal-ends"], Lies::Paged(4, 8, true), true),
];

fn lying((dims, dtype, score_mod, masks, lies, _): Other) -> AttentionSpec {
    let dense = spec(dims, dtype, score_mod, masks);
    let few = |seq_q| {
        let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q, seq_kv: 9000, dim_qk: dims[0], dim_v: dims[1] };
        AttentionSpec::dense(dtype, shape, Layout::Bshd)
    };
    match lies {
        Lies::Paged(seq_q, page_size, packed) => {
            let few = few(seq_q);
            let cache = Paged { page_size, pages: 900 };
            let [k, v] = [few.k, few.v].map(|tensor| cache.dense(tensor.dims, Layout::Bshd));
            let paged = AttentionSpec { score_mods: dense.score_mods, masks: dense.masks, k, v, paged: Some(cache), ..few }.with_stats();
            if packed { paged.with_packed_queries(700) } else { paged }
        }
        Lies::Few(seq_q) => AttentionSpec { score_mods: dense.score_mods, masks: dense.masks, ..few(seq_q) }.with_stats().with_sink(),
        Lies::Packed(cross, wide) => {
            let [batch, heads_q, seq, dim_qk] = dense.q.dims;
            let [_, heads_kv, seq_kv, dim_v] = dense.v.dims;
            let seq_q = if cross { seq } else { seq_kv };
            let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v };
            let packed = AttentionSpec::packed(dtype, shape, Packed { cross, wide, ..Packed::default() });
            AttentionSpec { score_mods: dense.score_mods, masks: dense.masks, ..packed }.with_stats()
        }
    }
}

/// Bytes that a thread may put into local memory, where a trace reads tensors or heads are wide: between tiles, and in blocks at the edge of a mask.
const SPILLED: u32 = 320;

/// Bytes that warps beside those that compute may backward, who bring operands, take sums out and round them with 24 registers each. That those that compute keep
/// what they have where products are asked for is held by the machine code (`sass.rs`).
const BRINGING: u32 = 360;

/// Spills of backward passes, which keep only the sums of a tile. With a score_mod the code for large scores, which is rare, spills a third of it.
const SPILLED_BACKWARD: u32 = 800;

/// The same beside dropout, whose numbers come while sums of gradients are in registers. A loop over them in place of one text would spill half of it, and have products
/// run one after the other.
const SPILLED_BACKWARD_DROPPED: u32 = 800;

/// Spills of plain forward passes of packed sequences, outside of their main loop.
const SPILLED_PACKED: u32 = 96;

/// What the compiler says of the kernel of a text that spills the most: bytes of spill stores.
fn spilled(log: &str) -> u32 {
    let told = log.split(" bytes spill stores").filter_map(|before| before.rsplit(' ').next()?.parse().ok());
    told.max().unwrap_or_else(|| panic!("{log}"))
}

/// Rows of today, of which each is a text to compile: types, with a score_mod and without, every day.
fn rows_of_today(what: &str) -> Vec<Row> {
    of_today(&format!("NVRTC: {what}"), DAYS, TABLE.to_vec(), |(_, dtype, score_mod, _)| vec![format!("{dtype} {}", score_mod.is_empty())])
}

/// The same of rows whose tokens lie otherwise: each of the ways every day.
fn others_of_today(what: &str, others: Vec<Other>) -> Vec<Other> {
    let way = |lies: Lies| format!("{lies:?}").split('(').next().unwrap_or_default().to_owned();
    of_today(&format!("NVRTC: {what}"), DAYS, others, |other| vec![way(other.4)])
}

/// Runs something for each of some rows of the table, a row on each core.
fn each_row(rows: &[Row], run: impl Fn(&AttentionSpec, bool) + Sync) {
    side_by_side(rows, |&(dims, dtype, score_mod, masks)| {
        let plain = score_mod.is_empty() && masks.len() < 2 && dims != [256, 256];
        let spec = spec(dims, dtype, score_mod, masks);
        run(&spec, plain);
        if dims == [128, 128] {
            run(&spec.clone().with_sink(), plain);
        }
        if matches!(dims, [64, 64] | [128, 128] | [256, 256]) {
            run(&spec.with_dropout(0.1), false);
        }
    });
}

/// Next to nothing is spilled, and no products are run one after the other for want of registers: both would be right, and slow.
#[test]
fn every_kernel_compiles_into_registers() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("kernels of our own: {why}")),
    };
    let told = Mutex::new(Vec::new());
    let run = |spec: &AttentionSpec, plain: bool| {
        let forward = Forward::of(&spec.validate().unwrap()).unwrap();
        let made = compile(&nvrtc, &source::forward(&forward, &forward.tile(132).unwrap())).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        assert_eq!(serialized(&made), None, "{spec:?}");
        let most = match (plain, spec.packed) {
            (true, None) => 0,
            (true, Some(_)) => SPILLED_PACKED,
            (false, _) => SPILLED,
        };
        assert!(spilled(&made.log) <= most, "{spec:?}: {}", made.log);
        told.lock().unwrap().push(made.code.len());
    };
    each_row(&rows_of_today("kernels of our own"), run);
    others_of_today("of few queries, pages and documents", OTHERS.to_vec()).into_iter().for_each(|other| run(&lying(other), other.5));
    let told = told.into_inner().unwrap();
    assert!(!told.is_empty());
    say(&format!("NVRTC: {} kernels of our own make {} bytes for SM 9.0", told.len(), told.iter().sum::<usize>()));
}

/// The same of backward passes.
#[test]
fn every_backward_kernel_compiles_into_registers() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("kernels of our own, backward: {why}")),
    };
    let told = Mutex::new(Vec::new());
    let run = |spec: &AttentionSpec, plain: bool| {
        let backward = Backward::of(&spec.backward().validate().unwrap()).unwrap();
        let made = compile(&nvrtc, &source::backward(&backward, &backward.tile(132).unwrap())).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        assert_eq!(serialized(&made), None, "{spec:?}");
        let most = match (plain, spec.dropout) {
            (_, Some(_)) => SPILLED_BACKWARD_DROPPED,
            (true, None) => BRINGING,
            (false, None) => SPILLED_BACKWARD,
        };
        assert!(spilled(&made.log) <= most, "{spec:?}: {}", made.log);
        told.lock().unwrap().push(made.code.len());
    };
    each_row(&rows_of_today("backward kernels of our own"), run);
    let packed = OTHERS.into_iter().filter(|other| matches!(other.4, Lies::Packed(..))).collect();
    for other in others_of_today("backward, of documents", packed) {
        run(&lying(other), other.5);
    }
    let told = told.into_inner().unwrap();
    assert!(!told.is_empty());
    say(&format!("NVRTC: {} backward kernels of our own make {} bytes for SM 9.0", told.len(), told.iter().sum::<usize>()));
}

/// A trace of 16 or 64 cosines for each of 64 scores is more than caches of instructions hold; it stands in a text for a few. Bytes with what tells of lines, four times
/// the instructions.
#[test]
fn long_traces_stand_in_texts_for_a_few_scores() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("long traces: {why}")),
    };
    for (score_mod, most) in [("sandwich:64", 640 << 10), ("sandwich:16", 600 << 10)] {
        let spec = spec([64, 64], DType::BF16, score_mod, &["causal"]);
        let forward = Forward::of(&spec.validate().unwrap()).unwrap();
        let backward = Backward::of(&spec.backward().validate().unwrap()).unwrap();
        let texts = [source::forward(&forward, &forward.tile(132).unwrap()), source::backward(&backward, &backward.tile(132).unwrap())];
        for text in texts {
            let code = compile(&nvrtc, &text).unwrap_or_else(|e| panic!("{score_mod}: {e}")).code.len();
            assert!(code < most, "{score_mod}: {code} bytes of machine code");
        }
    }
}

/// Products that would run one after the other are seen in what the compiler says.
#[test]
fn products_that_wait_for_one_another_are_seen() {
    let Ok(nvrtc) = nvrtc::find() else { return skip("offline", "kernels of our own: no NVRTC") };
    let forward = Forward::of(&spec([128, 128], DType::BF16, "", &[]).validate().unwrap()).unwrap();
    let right = source::forward(&forward, &forward.tile(132).unwrap());
    // Results are read while products are under way.
    let early = right.replacen("products_wait<1>();", "products_wait<7>();", 1);
    assert!(early != right);
    let [right, early] = [right, early].map(|text| compile(&nvrtc, &text).unwrap());
    assert!(serialized(&right).is_none() && serialized(&early).is_some(), "{}", early.log);
}

/// A row for the family with `mma.sync`: dims, type, whether rows lie at multiples of 16 bytes, score_mod (or none), masks.
type MmaRow = ([i64; 2], DType, bool, &'static str, &'static [&'static str]);

/// Every cut, every type, copies and plain loads, and each thing that makes another text.
const MMA_TABLE: [MmaRow; 13] = [
    ([64, 64], DType::BF16, true, "", &[]),
    ([64, 64], DType::F16, true, "softcap:30", &["causal"]),
    ([128, 128], DType::BF16, true, "", &["causal"]),
    ([128, 128], DType::F16, true, "bias:hqk", &["prefix-lm:100"]),
    ([128, 128], DType::BF16, false, "softcap:30", &["causal", "document"]),
    ([128, 64], DType::BF16, true, "alibi", &["padding", "causal"]),
    ([192, 128], DType::BF16, true, "", &["padding", "window:300,0:ends"]),
    ([256, 256], DType::BF16, true, "softcap:50", &["window:400,0"]),
    ([77, 33], DType::F16, false, "score * cos(f32(q - k)) / (1.0 + sqrt(f32(head)))", &["dilated:3", "causal"]),
    ([64, 64], DType::F16, true, "relative-bias:4,20", &["causal"]),
    ([64, 64], DType::F32, true, "", &["causal"]),
    ([128, 128], DType::F32, true, "softcap:30", &["causal"]),
    ([256, 256], DType::F32, false, "select(abs(score) > 3.0, erf(score), exp(-score) + pow(score, 2.0))", &["array:qk"]),
];

/// Devices that texts are compiled for.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_89", "sm_90"];

/// Bytes that a thread may put into local memory up to 128 columns, and past them: of two-byte types, where a gradient of a parameter is summed, and of f32, where
/// operands are two numbers each.
const MMA_SPILLED: [[u32; 2]; 2] = [[32, 64], [320, 900]];

/// Registers that the compiler says a text's kernels have at most.
fn registers(log: &str) -> u32 {
    log.split("Used ").skip(1).filter_map(|rest| rest.split(' ').next()?.parse().ok()).max().unwrap_or_else(|| panic!("{log}"))
}

/// Every text of the family makes machine code of every architecture, and keeps its numbers in registers.
#[test]
fn every_kernel_with_mma_sync_compiles_into_registers() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("kernels with mma.sync: {why}")),
    };
    let has = |row: &MmaRow| vec![row.1.to_string(), format!("wide {}", row.2), format!("plain {}", row.3.is_empty())];
    let rows = of_today("NVRTC: kernels with mma.sync", DAYS, MMA_TABLE.to_vec(), has);
    let told = Mutex::new(Vec::new());
    let row = |&(dims, dtype, wide, score_mod, masks): &MmaRow| {
        let mut spec = spec(dims, dtype, score_mod, masks);
        if !wide {
            [spec.q.alignment, spec.k.alignment, spec.v.alignment, spec.o.alignment] = [4; 4];
        }
        let most = MMA_SPILLED[usize::from(dtype == DType::F32)][usize::from(dims[0] > 128)];
        let forward = mma::forward(&spec.validate().unwrap()).unwrap();
        let along = [("bias:hqk", "bias"), ("relative-bias:4,20", "rel")].into_iter().find(|(of, _)| *of == score_mod);
        let gradient = along.map_or_else(|| spec.backward(), |(_, name)| spec.backward().wrt(name, DType::F32));
        let backward = mma::backward(&gradient.validate().unwrap()).unwrap();
        let ordered = along.map(|_| mma::backward(&gradient.deterministic().validate().unwrap()).unwrap());
        let (cut, back) = (Cut::of_forward(&forward).unwrap(), Cut::of_backward(&backward).unwrap());
        let texts = [
            ("forward", mma::forward_text(&forward, &cut)),
            ("queries", mma::queries_text(&backward, &back)),
            ("keys", mma::keys_text(&backward, &back)),
        ];
        let texts = texts.into_iter().chain(ordered.map(|ordered| ("keys in one order", mma::keys_text(&ordered, &back))));
        let dropped = (masks == ["causal"]).then(|| mma::backward(&spec.clone().with_dropout(0.1).backward().validate().unwrap()).unwrap());
        let texts = texts.chain(dropped.into_iter().flat_map(|dropped| {
            let forward = mma::forward_text(&dropped.forward, &cut);
            let [queries, keys] = [mma::queries_text, mma::keys_text].map(|text| text(&dropped, &back));
            [("forward, dropout,", forward), ("queries, dropout,", queries), ("keys, dropout,", keys)]
        }));
        let paged = (masks == ["causal"]).then(|| {
            let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 700, dim_qk: dims[0], dim_v: dims[1] };
            let paged = AttentionSpec::paged(dtype, shape, Paged { page_size: 7, pages: 300 }).mask(Mask::padding());
            mma::forward_text(&mma::forward(&paged.validate().unwrap()).unwrap(), &cut)
        });
        let texts = texts.chain(paged.map(|paged| ("forward, pages,", paged)));
        let packed = (masks == ["causal"]).then(|| {
            let shape = Shape { batch: 3, heads_q: 4, heads_kv: 2, seq_q: 300, seq_kv: 300, dim_qk: dims[0], dim_v: dims[1] };
            let packed = AttentionSpec::packed(dtype, shape, Packed::of(700)).mask(Mask::causal()).backward();
            mma::backward(&packed.validate().unwrap()).unwrap()
        });
        let texts = texts.chain(packed.into_iter().flat_map(|packed| {
            let forward = mma::forward_text(&packed.forward, &cut);
            let [queries, keys] = [mma::queries_text, mma::keys_text].map(|text| text(&packed, &back));
            [("forward, documents,", forward), ("queries, documents,", queries), ("keys, documents,", keys)]
        }));
        for (what, text) in &texts.collect::<Vec<_>>() {
            for architecture in ARCHITECTURES {
                let made = compile_for(&nvrtc, text, architecture).unwrap_or_else(|e| panic!("{what} of {spec:?}: {e}"));
                let (spilled, registers) = (spilled(&made.log), registers(&made.log));
                println!("{what} {dims:?} {dtype} {score_mod}, {architecture}: {registers} registers, {spilled} bytes spilled");
                assert!(spilled <= most, "{what} of {spec:?}: {}", made.log);
                told.lock().unwrap().push(made.code.len());
            }
        }
    };
    side_by_side(&rows, row);
    let told = told.into_inner().unwrap();
    assert!(told.len() >= 3 * ARCHITECTURES.len() * rows.len());
    say(&format!("NVRTC: {} kernels with mma.sync make {} bytes for SM 8.0, 8.9 and 9.0", told.len(), told.iter().sum::<usize>()));
}
