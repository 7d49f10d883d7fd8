//! Faults that are put into kernels: something has to find each.

use super::fault_cases::{ALONG, ENDING, FEW, FEWER, LENGTHS, LISTED, MAPPED, PACKED, PAGED, SHARED, SHORT, TRACED, UNFILLED};
pub(super) use super::fault_cases::{DROPPED, LONG, STATISTICS, WIDE};
use super::{NAME, executor};
use conformance::case::Case;
use conformance::emulated::faulty;
use conformance::runner::{Outcome, Source, run_backward_case, run_case, side_by_side};
use conformance::say::say;
use conformance::share::{DAYS, of_today};
use sdpa::cuda::CudaExecutor;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

#[derive(Clone, Copy, Debug)]
pub(super) enum Pass {
    Forward,
    Backward,
}

use Pass::{Backward, Forward};

/// What is wrong, in which pass, the text and what takes its place, and what finds it.
pub(super) type Fault = (&'static str, Pass, [&'static str; 2], &'static str);

const FAULTS: [Fault; 103] = [
    (
        "keys come before those of a block are done with",
        Forward,
        ["mbarrier_wait_parity(smem.k_empty + 8 * kv_pipeline.stage, kv_pipeline.phase ^ 1);", ""],
        LONG,
    ),
    (
        "values come before those of a block are done with",
        Forward,
        ["mbarrier_wait_parity(smem.v_empty + 8 * kv_pipeline.stage, kv_pipeline.phase ^ 1);", ""],
        LONG,
    ),
    ("queries come before those of a tile are done with", Forward, ["mbarrier_wait_parity(smem.q_empty, q_pipeline.phase ^ 1);", ""], LONG),
    ("values are not waited for", Forward, ["mbarrier_wait_parity(smem.v_full + 8 * before.stage, before.phase);", ""], LONG),
    ("scores are read while they are computed", Forward, ["wgmma_wait_group<1>();", "wgmma_wait_group<2>();"], LONG),
    (
        "one warp frees keys for all",
        Forward,
        ["mbarrier_init(smem.k_empty + 8 * stage, WARPS)", "mbarrier_init(smem.k_empty + 8 * stage, 1)"],
        LONG,
    ),
    (
        "fewer bytes are waited for",
        Forward,
        ["mbarrier_arrive_expect_tx(smem.q_full, Q_BOX_BYTES * QK_PANELS)", "mbarrier_arrive_expect_tx(smem.q_full, Q_BOX_BYTES)"],
        LONG,
    ),
    (
        "the copy engine is not told of what was written",
        Forward,
        [
            "fence_proxy_async();\n    __syncwarp();\n    if (lane == 0) {\n        const int first",
            "__syncwarp();\n    if (lane == 0) {\n        const int first",
        ],
        LONG,
    ),
    (
        "results are written over before they have left",
        Forward,
        ["if (lane == 0) cp_async_bulk_wait_group_read();\n    __syncwarp();", "__syncwarp();"],
        SHORT,
    ),
    ("queries come where results still are", Forward, ["if (!O_HAS_SMEM) cp_async_bulk_wait_group_read();", ""], WIDE),
    (
        "half of the lanes have another largest score",
        Forward,
        ["fmaxf(x, __shfl_xor_sync(~0u, x, 2))", "fmaxf(x, __shfl_xor_sync(~0u, x, 1))"],
        LONG,
    ),
    ("stats in base two", Forward, ["total.origin + total.log * LN_2", "total.log"], LONG),
    ("stats in base two are natural", Forward, ["WITH_BASE_TWO ? total.origin * LOG2_E + total.log :", "false ? total.log :"], STATISTICS),
    ("the largest score is not scaled", Forward, ["p.natural ? x : x * p.scale", "p.natural ? x : x"], STATISTICS),
    ("the sink is no score", Forward, ["row.natural_max = fmaxf(row.natural_max, sink);", ""], STATISTICS),
    ("rows behind lengths have a sum", Forward, ["there ? sum : 0.0f", "sum"], STATISTICS),
    ("the largest score of parts is one lane's", Forward, ["natural_max = warp_max(natural_max);", ""], STATISTICS),
    (
        "sums of parts are next to another largest score",
        Forward,
        ["sum * ex2_approx(row_max.log - log2_from(row_max, natural_max))", "sum"],
        STATISTICS,
    ),
    ("the sink is no score of parts", Forward, ["natural_max = fmaxf(natural_max, p.sink[head]);", ""], STATISTICS),
    ("the last block is dropped", Forward, ["(last.end + TILE_N - 1) / TILE_N", "last.end / TILE_N"], LONG),
    ("the lower edge of a window is not masked", Forward, ["(last.begin + TILE_N - 1) / TILE_N", "first.begin / TILE_N"], LONG),
    ("a window is a key short", Forward, ["q + s.upper + 1 : UNBOUNDED", "q + s.upper : UNBOUNDED"], LONG),
    ("blocks that a rule drops in part are whole", Forward, ["(item & PARTIAL_BLOCK) != 0 || block <", "block <"], MAPPED),
    ("rows of the map of another head's", Forward, ["* p.tiles + tile;", "* p.tiles;"], MAPPED),
    (
        "blocks that are dropped in part are listed as whole",
        Forward,
        ["lane_state == 2 ? PARTIAL_BLOCK", "lane_state == 3 ? PARTIAL_BLOCK"],
        LISTED,
    ),
    ("the first row that keeps anything decides", Forward, ["if (any && !all) break;", "if (any) break;"], LISTED),
    ("items of a list have one place", Forward, ["items[count + __popc(listed & ((1u << lane) - 1))]", "items[count]"], LISTED),
    ("the second 32 take the places of the first", Forward, ["count += __popc(listed);", "count = __popc(listed);"], LISTED),
    ("lists of one batch entry for all", Backward, ["batch = row / OUTER_BLOCKS(p) / heads", "batch = 0 * heads"], LISTED),
    ("the sink weighs the wrong way", Forward, ["ex2_approx(sink - row_max.log)", "ex2_approx(row_max.log - sink)"], LENGTHS),
    ("score_mods of another row", Forward, ["PACK_GQA ? 0 : 8 * half", "0"], TRACED),
    ("a tensor is read behind its last key", Forward, ["CLAMPS_KEYS && !key_inside", "false"], ENDING),
    ("all places are the first of their thread", Backward, ["float_of_small(x - more) + float(more)", "float_of_small(x - more)"], TRACED),
    ("boxes reach into the next document", Forward, ["min(rows, length - first);", "rows;"], PACKED),
    ("keys of every document are the first's", Forward, ["s.begin_kv = keys.begin;", "s.begin_kv = 0;"], PACKED),
    ("stats of documents as those of batch entries", Forward, ["(s.begin_q + q) * p.heads_q + head", "(s.begin_q + q) + head"], PACKED),
    ("queries of every document are the first's", Backward, ["s.begin_q = queries.begin;", "s.begin_q = 0;"], PACKED),
    ("sums of documents lie over one another", Backward, ["s.begin_q / TILE_M + batch + tile", "batch + tile"], PACKED),
    (
        "keys of other documents have gradients",
        Backward,
        ["seq_info.begin_kv, seq_info.len_kv, tile.head", "seq_info.begin_kv, seq_info.len_kv + 16, tile.head"],
        PACKED,
    ),
    ("stats are read as those of batch entries", Backward, ["(s.begin_q + q) * p.heads_q + head", "(s.begin_q + q) + head"], PACKED),
    ("gradients of documents' queries go to the first", Backward, ["WITH_PACKED_Q ? s.begin_q * row_stride", "WITH_PACKED_Q ? 0"], PACKED),
    ("tiles of documents take one another's places", Forward, ["p.tile_items[before + n]", "p.tile_items[n]"], PACKED),
    ("documents of as many tiles come before one another", Forward, ["length > own_key || (", "length >= own_key || ("], PACKED),
    ("a tile is told of where another is read", Forward, ["TILE_SLOTS = WITH_TILE_LIST ? 4 : 2", "TILE_SLOTS = 2"], PACKED),
    ("heads of a tile are one", Forward, ["tile.head + row / TILE_M :", "tile.head + 0 * row :"], FEW),
    ("rows of other heads are written", Forward, ["head_of_row(tile, row) / p.group == tile.head / p.group", "true"], UNFILLED),
    ("every part meets keys from the first on", Forward, ["begin = r.begin + tile.split * each", "begin = r.begin"], FEW),
    ("parts leave what they come to in one place", Forward, ["at * p.head_groups + head_index", "head_index"], FEW),
    ("every part has the sink", Forward, ["if (tile.splits == 1) add_sink", "if (true) add_sink"], FEW),
    ("parts are merged by the largest of one lane", Forward, ["row_max.log = warp_max(row_max.log);", ""], FEW),
    ("queries that are not there have stats", Forward, ["if (q < seq_info.len_q) {", "if (true) {"], FEW),
    (
        "tiles begin with one item",
        Forward,
        ["p.first_items[mine * p.tiles + tile] = before;", "p.first_items[mine * p.tiles + tile] = 0;"],
        FEW,
    ),
    (
        "a part weighs as much as another",
        Forward,
        [
            "split_log2(lse_of_split(split), row_max) - row_max.log) * inverse",
            "split_log2(lse_of_split(0), row_max) - row_max.log) * inverse",
        ],
        FEW,
    ),
    ("pages of the first entry for all", Forward, ["p.page_table[long(batch) * p.table_row", "p.page_table[0 * p.table_row"], PAGED),
    ("every piece of a page is its first", Forward, ["p.pages - 1), key % p.page_size}", "p.pages - 1), 0}"], PAGED),
    ("pieces have one place", Forward, ["there + int(threadIdx.x) * PAGE_SLICE * ROW_BYTES", "there"], PAGED),
    (
        "pieces come before they are waited for",
        Forward,
        ["if (PRODUCER_THREADS > 1) __syncwarp();", "if (threadIdx.x > 0) mbarrier_arrive(barrier);"],
        PAGED,
    ),
    ("threads that bring take tiles of their own", Forward, ["PRODUCER_THREADS > 1 ? warp_uniform(next) : next", "next"], PAGED),
    (
        "queries come before those of a tile are done with",
        Backward,
        ["mbarrier_wait_parity(smem.q_empty + 8 * pipeline.stage, pipeline.phase ^ 1);", ""],
        WIDE,
    ),
    (
        "upstream gradients come too early",
        Backward,
        ["mbarrier_wait_parity(smem.d_o_empty + 8 * pipeline.stage, pipeline.phase ^ 1);", ""],
        WIDE,
    ),
    (
        "upstream gradients are not waited for",
        Backward,
        ["if (sub == 0) mbarrier_wait_parity(smem.d_o_full + 8 * step_state.operand_stage(), step_state.operand_phase());", ""],
        LONG,
    ),
    (
        "results are written over gradients of scores that are read",
        Backward,
        ["are done with K, V and dS.\n        named_barrier_sync(BARRIER_CONSUMERS, 256);", "are done with K, V and dS."],
        WIDE,
    ),
    (
        "every share has all heads",
        Backward,
        ["p.group * tile.head_split / p.head_splits, p.group * (tile.head_split + 1) / p.head_splits", "0, p.group"],
        SHARED,
    ),
    ("the first share is taken for the whole", Backward, ["+ 1 == p.head_splits)", "== 0)"], SHARED),
    ("groups add to one share", Backward, ["split_sum_of(p, done, warpgroup * 128 * (DK + DV),", "split_sum_of(p, done, 0,"], SHARED),
    (
        "shares of values lie over those of keys",
        Backward,
        ["add_split(split_sum.beyond(128 * DK), dv)", "add_split(split_sum, dv)"],
        SHARED,
    ),
    ("blocks of keys are counted together", Backward, ["p.splits_done + tile.tile_index", "p.splits_done"], SHARED),
    ("who is last is read before it is told", Backward, ["warpgroups_sync(1);\n    const bool last", "const bool last"], SHARED),
    (
        "scores are read while they are computed",
        Backward,
        ["wgmma_wait_group<1>();\n                    wgmma_fence_operand(s);", "wgmma_fence_operand(s);"],
        LONG,
    ),
    ("the second query of two has the first's sum", Backward, ["d_p[n + 1], pair.y", "d_p[n + 1], pair.x"], LONG),
    ("groups add to one slice", Backward, ["(index * SLICES + slice) * DQ_SLICE", "(index * SLICES) * DQ_SLICE"], LONG),
    (
        "sums are written over before they have left",
        Backward,
        [
            "named_barrier_sync(BARRIER_DQ_EMPTY + warpgroup, 160);\n    at +=",
            "named_barrier_arrive(BARRIER_DQ_EMPTY + warpgroup, 160);\n    at +=",
        ],
        LONG,
    ),
    (
        "a group's place is told free before its sums have left",
        Backward,
        [
            "if (first) cp_async_bulk_wait_group_read<1>();\n        __syncwarp();\n        named_barrier_arrive(",
            "__syncwarp();\n        named_barrier_arrive(",
        ],
        LONG,
    ),
    (
        "sums leave before they are there",
        Backward,
        [
            "named_barrier_sync(BARRIER_DQ_FULL + warpgroup, 160);\n            if (first)",
            "named_barrier_arrive(BARRIER_DQ_FULL + warpgroup, 160);\n            if (first)",
        ],
        LONG,
    ),
    (
        "sums of dQ are copied without a fence of the async proxy",
        Backward,
        ["return sums[n]; });\n    fence_proxy_async();\n", "return sums[n]; });\n"],
        LONG,
    ),
    (
        "matrices are stored over one another",
        Backward,
        [
            "swizzled_matrix_row(d_s + sub * KV_PANEL_BYTES + own_rows, warp * 16 + (lane & 15), lane)",
            "d_s + sub * KV_PANEL_BYTES + own_rows + (warp * 16 + (lane & 15)) * ROW_BYTES + ((lane & 7) << 4)",
        ],
        LONG,
    ),
    (
        "the next scores are those of this step's queries",
        Backward,
        [
            "k_registers, smem.q + step_state.operand_stage() * Q_BYTES);\n                }\n                step",
            "k_registers, q);\n                }\n                step",
        ],
        LONG,
    ),
    (
        "the next queries are not waited for",
        Backward,
        [
            "if (PREFETCH_S && has_next) {\n                    mbarrier_wait_parity(smem.q_full + 8 * step_state.operand_stage(), step_state.operand_phase());",
            "if (PREFETCH_S && has_next) {",
        ],
        LONG,
    ),
    (
        "the last head's steps are another's too",
        Backward,
        ["if (++steps.head_in_group >= steps.end) return false;", "if (++steps.head_in_group > steps.end) return false;"],
        LONG,
    ),
    (
        "groups have more registers than the block was given",
        Backward,
        ["setmaxnreg_dec<PRODUCER_REGISTERS>", "setmaxnreg_dec<PRODUCER_REGISTERS + 8>"],
        LONG,
    ),
    ("a half of the rows of wide heads is not scaled", Backward, ["sum.z * scales[1]", "sum.z"], WIDE),
    (
        "a tile behind the last is walked over",
        Backward,
        ["(last.end + TILE_M - 1) / TILE_M", "(last.end + TILE_M - 1) / TILE_M + 1"],
        FEWER,
    ),
    (
        "rows of the sums are those of the next tile",
        Backward,
        ["tile.batch, head, queries) * TILE_M;", "tile.batch, head, queries + 1) * TILE_M;"],
        SHORT,
    ),
    ("a key keeps a query less", Backward, ["max(0, k - s.upper)", "max(0, k - s.upper + 1)"], LONG),
    ("the last tile is dropped", Backward, ["(last.end + TILE_M - 1) / TILE_M", "last.end / TILE_M"], LONG),
    ("dropped keys have weights", Backward, ["origin.q, n) + other)) x = -INFINITE;", "origin.q, n) + other)) x = x;"], LENGTHS),
    ("the sink's gradient has the other sign", Backward, ["of_sink = -sink_probability(", "of_sink = sink_probability("], LENGTHS),
    ("the sink's gradient is that of some rows", Backward, ["(threadIdx.x & 31) == 0) atomicAdd", "threadIdx.x == 0) atomicAdd"], LENGTHS),
    ("half of a row is not added up", Backward, ["int apart = ROW_LANES / 2", "int apart = ROW_LANES / 4"], LONG),
    ("every second element is left out", Backward, [" + low(x >> 16) * low(y >> 16)", ""], LONG),
    ("numbers have six rounds", Forward, ["round < 7", "round < 6"], DROPPED),
    ("two queries have one number", Forward, ["odd ? word >> 16 : word & 0xffffu", "word & 0xffffu"], DROPPED),
    ("16 keys have the numbers of 8", Forward, ["words.word[m / 4 + (m & 2)]", "words.word[m & 2]"], DROPPED),
    (
        "16 keys of few queries have the numbers of 8",
        Forward,
        ["survives(p, words.word[m], q & 1)", "survives(p, words.word[0], q & 1)"],
        DROPPED,
    ),
    ("heads have the same numbers", Forward, ["* p.heads_q + head, n = *p.dropout_offset", "* p.heads_q, n = *p.dropout_offset"], DROPPED),
    (
        "the second head of two drops as the first",
        Forward,
        ["head_of_row(tile, row + 8 * half), query_of_row(tile, row + 8 * half), k", "head_of_row(tile, row), query_of_row(tile, row), k"],
        DROPPED,
    ),
    ("weights that stay are as they were", Forward, ["inverse_sum[half] *= p.dropout_scale;", ""], DROPPED),
    (
        "dropped weights have gradients",
        Backward,
        ["return dropout_mask >> n & 1 ? d_p * p.dropout_scale : 0.0f;", "return d_p * p.dropout_scale;"],
        DROPPED,
    ),
    ("values have gradients of dropped weights", Backward, ["!WITH_DROPOUT || (dropout_mask >> n & 1) ? prob", "true ? prob"], DROPPED),
    ("gradients of values are not scaled", Backward, ["WITH_DROPOUT ? p.dropout_scale : 1.0f", "1.0f"], DROPPED),
    ("16 queries have the numbers of 8", Backward, ["(m >> 1 & 1) + m / 4 * 2", "(m >> 1 & 1)"], DROPPED),
    ("the slope is taken elsewhere", Backward, ["score_mod_gradient(before[other],", "score_mod_gradient(s[n + other],"], TRACED),
    (
        "gradients of a bias at another key",
        Backward,
        ["atomicAdd(to(place_of_score(p, origin, n)), x[n])", "atomicAdd(to(place_of_score(p, origin, n ^ 2)), x[n])"],
        ALONG,
    ),
];

fn wrong<T>(outcome: Outcome<T>) -> Option<String> {
    match outcome {
        Outcome::Fail(how) => Some(how),
        // What is not run finds nothing, and is not to be taken for it.
        Outcome::Skip(why) => Some(format!("error: skipped: {why}")),
        Outcome::Pass(..) => None,
    }
}

/// Each launch runs threads in another order, and some orders hide a race: how many are tried.
pub(super) const ORDERS: usize = 8;

/// How a fault is found, if it is.
fn caught((_, pass, fault, cases): Fault, executor: &CudaExecutor) -> Option<String> {
    let cases = Case::parse(cases).unwrap();
    let find = || {
        cases.iter().find_map(|case| match pass {
            Forward => wrong(run_case(case, executor)),
            Backward => wrong(run_backward_case(case, Source::Oracle, executor)),
        })
    };
    faulty(fault, || (0..ORDERS).find_map(|_| find()))
}

/// The cases find nothing where nothing is wrong, and something in every fault of today; a fault must not be one for the compiler.
///
/// # Panics
/// Where that is not so.
pub(super) fn all_are_found(name: &str, faults: &[Fault], cases: &[&str], executor: impl Fn() -> CudaExecutor + Sync) {
    let missed = Mutex::new(Vec::new());
    let right = executor();
    let cases: Vec<Case> = cases.iter().flat_map(|cases| Case::parse(cases).unwrap()).collect();
    side_by_side(&cases, |case| {
        assert_eq!(wrong(run_case(case, &right)), None, "{}", case.name);
        let forward_alone = case.paged.is_some() || case.row_max || case.sum_exp;
        if !forward_alone {
            assert_eq!(wrong(run_backward_case(case, Source::Oracle, &right)), None, "{}", case.name);
        }
    });
    let faults = of_today(&format!("faults {name}"), 2 * DAYS, faults.to_vec(), |(_, pass, _, cases)| vec![format!("{pass:?} {cases}")]);
    side_by_side(&faults, |&fault| {
        // One for all cases of a fault: each compiles its kernels anew.
        let how = caught(fault, &executor());
        let short = how.as_deref().map(|how| how.chars().take(300).collect::<String>().replace('\n', " "));
        println!("fault: {}; {}", fault.0, short.as_deref().unwrap_or("nothing finds it"));
        if how.is_none_or(|how| how.contains("error: ")) {
            missed.lock().unwrap().push(fault.0);
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found, or not compiled: {missed:?}");
    say(&format!("faults {name}: all of {} found", faults.len()));
}

/// Checks on every run that the kernel files have the text of each fault, because a run tries some of the faults only. `generated`: texts of generated source.
pub(super) fn all_have_places(faults: &[Fault], generated: &[&str]) {
    all_have_places_of(faults.iter().filter(|fault| !generated.contains(&fault.2[0])).map(|fault| (fault.0, fault.2[0])));
}

/// Checks that a kernel file has the text of each fault, given what is wrong and the text.
pub(super) fn all_have_places_of<'a>(faults: impl Iterator<Item = (&'a str, &'a str)>) {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sdpa/cuda/kernels");
    let texts: Vec<String> = fs::read_dir(kernels).unwrap().map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    let is_there = |text: &str| texts.iter().any(|kernel| kernel.contains(text));
    let without: Vec<&str> = faults.filter(|(_, text)| !is_there(text)).map(|(what, _)| what).collect();
    assert!(without.is_empty(), "no kernel has what is to be broken: {without:?}");
}

/// Every case of these faults.
pub(super) const CASES: [&str; 17] =
    [LONG, SHORT, SHARED, FEWER, WIDE, MAPPED, LISTED, LENGTHS, TRACED, ALONG, ENDING, PACKED, FEW, PAGED, UNFILLED, STATISTICS, DROPPED];

#[test]
fn every_fault_is_found() {
    all_have_places(&FAULTS, &[]);
    if executor().is_none() {
        return;
    }
    all_are_found(NAME, &FAULTS, &CASES, || conformance::emulated::executor().unwrap());
}
