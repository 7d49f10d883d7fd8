//! Native CUDA kernels, compiled for a GPU that is not here.

use conformance::kernel_table::{ARCHITECTURES, Lies, MMA_TABLE, MmaRow, OTHERS, Other, Row, TABLE, lying, mma_texts, spec, specs_of_row};
use conformance::nvrtc;
use conformance::runner::side_by_side;
use conformance::say::{say, skip};
use conformance::share::{DAYS, of_today};
use sdpa::cuda::kernel::{compile, compile_for, serialized};
use sdpa::cuda::{Backward, Forward, source};
use sdpa::{AttentionSpec, DType};
use std::sync::Mutex;

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

/// The most bytes that a backward pass without a score_mod may spill if it sums dQ in fixed point.
const SPILLED_FIXED_POINT: u32 = 416;

/// The most bytes that a backward pass with dropout may spill if it sums dQ in fixed point.
const SPILLED_FIXED_POINT_DROPPED: u32 = 1024;

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
    side_by_side(rows, |row| specs_of_row(row).into_iter().for_each(|(_, spec, plain)| run(&spec, plain)));
}

/// Next to nothing is spilled, and no products are run one after the other for want of registers: both would be right, and slow.
#[test]
fn every_kernel_compiles_into_registers() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("native CUDA kernels: {why}")),
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
    each_row(&rows_of_today("native CUDA kernels"), run);
    others_of_today("of few queries, pages and documents", OTHERS.to_vec()).into_iter().for_each(|other| run(&lying(other), other.5));
    let told = told.into_inner().unwrap();
    assert!(!told.is_empty());
    say(&format!("NVRTC: {} native CUDA kernels make {} bytes for SM 9.0", told.len(), told.iter().sum::<usize>()));
}

/// The same of backward passes.
#[test]
fn every_backward_kernel_compiles_into_registers() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("native CUDA kernels, backward: {why}")),
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
    each_row(&rows_of_today("backward native CUDA kernels"), run);
    let packed = OTHERS.into_iter().filter(|other| matches!(other.4, Lies::Packed(..))).collect();
    for other in others_of_today("backward, of documents", packed) {
        run(&lying(other), other.5);
    }
    let told = told.into_inner().unwrap();
    assert!(!told.is_empty());
    say(&format!("NVRTC: {} backward native CUDA kernels make {} bytes for SM 9.0", told.len(), told.iter().sum::<usize>()));
}

/// Backward kernels that sum dQ in fixed point spill little, and the compiler serialises none of their WGMMAs.
#[test]
fn every_deterministic_backward_kernel_compiles_into_registers() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("native CUDA kernels, deterministic: {why}")),
    };
    let told = Mutex::new(Vec::new());
    let run = |spec: &AttentionSpec, plain: bool| {
        let Ok(backward) = Backward::of(&spec.clone().backward().deterministic().validate().unwrap()) else { return };
        let tile = backward.tile(132).unwrap();
        assert!(tile.fixed_point, "{spec:?}");
        let made = compile(&nvrtc, &source::backward(&backward, &tile)).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        assert_eq!(serialized(&made), None, "{spec:?}");
        let most = match (plain, spec.dropout) {
            (_, Some(_)) => SPILLED_FIXED_POINT_DROPPED,
            (true, None) => SPILLED_FIXED_POINT,
            (false, None) => SPILLED_BACKWARD,
        };
        assert!(spilled(&made.log) <= most, "{spec:?}: {}", made.log);
        told.lock().unwrap().push(made.code.len());
    };
    each_row(&rows_of_today("deterministic native CUDA kernels"), run);
    let told = told.into_inner().unwrap();
    assert!(!told.is_empty());
    say(&format!("NVRTC: {} deterministic native CUDA kernels make {} bytes for SM 9.0", told.len(), told.iter().sum::<usize>()));
}

/// Forward kernels with splits of fixed size spill nothing without traces, and the compiler serialises none of their WGMMAs.
#[test]
fn every_batch_invariant_kernel_compiles_into_registers() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("native CUDA kernels, batch-invariant: {why}")),
    };
    let told = Mutex::new(Vec::new());
    let run = |spec: &AttentionSpec, plain: bool| {
        let mut spec = spec.clone();
        (spec.batch_invariant, spec.dropout) = (true, None);
        let Ok(forward) = Forward::of(&spec.validate().unwrap()) else { return };
        // Thread blocks that share the splits of a tile, and those that merge them.
        for multiprocessors in [132, 1] {
            let tile = forward.tile(multiprocessors).unwrap();
            let made = compile(&nvrtc, &source::forward(&forward, &tile)).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
            assert_eq!(serialized(&made), None, "{spec:?}");
            let most = if plain && spec.packed.is_none() { 0 } else { SPILLED };
            assert!(spilled(&made.log) <= most, "{spec:?}, {tile:?}: {}", made.log);
            told.lock().unwrap().push((made.code.len(), tile.split, tile.merges_splits()));
        }
    };
    each_row(&rows_of_today("batch-invariant native CUDA kernels"), run);
    others_of_today("batch-invariant, of few queries, pages and documents", OTHERS.to_vec())
        .into_iter()
        .for_each(|other| run(&lying(other), other.5));
    let told = told.into_inner().unwrap();
    let of = |which: fn(&(usize, bool, bool)) -> bool| told.iter().filter(|made| which(made)).count();
    say(&format!(
        "NVRTC: {} batch-invariant native CUDA kernels make {} bytes for SM 9.0; {} share splits, {} merge them",
        told.len(),
        told.iter().map(|made| made.0).sum::<usize>(),
        of(|made| made.1),
        of(|made| made.2)
    ));
    assert!(of(|made| made.2) > 0);
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
    let Ok(nvrtc) = nvrtc::find() else { return skip("offline", "native CUDA kernels: no NVRTC") };
    let forward = Forward::of(&spec([128, 128], DType::BF16, "", &[]).validate().unwrap()).unwrap();
    let right = source::forward(&forward, &forward.tile(132).unwrap());
    // Results are read while products are under way.
    let early = right.replacen("wgmma_wait_group<1>();", "wgmma_wait_group<7>();", 1);
    assert!(early != right);
    let [right, early] = [right, early].map(|text| compile(&nvrtc, &text).unwrap());
    assert!(serialized(&right).is_none() && serialized(&early).is_some(), "{}", early.log);
}

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
    let row = |row: &MmaRow| {
        let (dims, dtype, _, score_mod, _) = *row;
        let most = MMA_SPILLED[usize::from(dtype == DType::F32)][usize::from(dims[0] > 128)];
        for (what, text) in &mma_texts(row) {
            for architecture in ARCHITECTURES {
                let made = compile_for(&nvrtc, text, architecture).unwrap_or_else(|e| panic!("{what} of {row:?}: {e}"));
                let (spilled, registers) = (spilled(&made.log), registers(&made.log));
                println!("{what} {dims:?} {dtype} {score_mod}, {architecture}: {registers} registers, {spilled} bytes spilled");
                assert!(spilled <= most, "{what} of {row:?}: {}", made.log);
                told.lock().unwrap().push(made.code.len());
            }
        }
    };
    side_by_side(&rows, row);
    let told = told.into_inner().unwrap();
    assert!(told.len() >= 3 * ARCHITECTURES.len() * rows.len());
    say(&format!("NVRTC: {} kernels with mma.sync make {} bytes for SM 8.0, 8.9 and 9.0", told.len(), told.iter().sum::<usize>()));
}
