//! The schedule of a forward pass: the kernel, before it the lists of tiles and KV blocks, and after it the combine kernel of split-KV.

use super::params::ForwardParams;
use crate::attention_params::Tiling;
use crate::entry_point::EntryPoint;
use crate::family::Family;
use crate::params::FAR;
use crate::problem::Forward;
use crate::schedule::arguments::Member;
use crate::schedule::{Address, Blocking, Builder, Gpu, OperandMap, Schedule};
use crate::source;
use crate::tile_config::Tile;
use crate::work::{heads_in_cache, steps};
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::{Operand, Problem, Side, Statistic};
use sdpa_nvidia::JobQuery;

/// Bytes of a tile list item.
const ITEM_BYTES: i64 = 16;
/// Warps per block of the kernel that lists tiles, one sequence per warp.
const LISTING_WARPS: u32 = 8;
/// Warps per block of the combine kernel, one row per warp.
const COMBINING_WARPS: u32 = 4;

/// The workspace of the tile scheduler and of split-KV, without block lists.
struct Workspace {
    /// The tile counter. It is used if there are more tiles than thread blocks, and always with a tile list.
    counter: Address,
    /// The tile list.
    items: Address,
    /// The first item of each tile of each batch entry.
    firsts: Address,
    /// Log-sum-exps of splits, two f32 each.
    split_lse: Address,
    /// Row maxima of splits, if row statistics need them.
    split_max: Address,
    /// Outputs of splits.
    split_o: Address,
    /// The most items of the list.
    most_items: i64,
}

impl Workspace {
    fn add(builder: &mut Builder<'_>, tile: &Tile, multiprocessors: u32) -> Workspace {
        let forward = builder.attention;
        let mut own = Workspace {
            counter: Address::Null,
            items: Address::Null,
            firsts: Address::Null,
            split_lse: Address::Null,
            split_max: Address::Null,
            split_o: Address::Null,
            most_items: 0,
        };
        if !forward.lists_tiles(tile) {
            if forward.most_tiles(tile) > i64::from(multiprocessors) {
                own.counter = builder.slot("tile counter", 4);
            }
            return own;
        }
        let [batch, _, seq_q, _] = forward.extents;
        let head_groups = forward.head_groups(tile);
        own.most_items = forward.most_items(tile, multiprocessors);
        own.counter = builder.slot("tile counter, number of tiles", 8);
        own.items = builder.slot("tile list", ITEM_BYTES * own.most_items);
        if tile.split {
            let results = own.most_items * head_groups * i64::from(tile.queries() * tile.heads());
            own.firsts = builder.slot("first split of each tile", 4 * batch * steps(seq_q, tile.queries()));
            own.split_lse = builder.slot("log-sum-exp of each split", 8 * results);
            own.split_max = builder.slot("row maxima of each split", if forward.leaves_largest() { 4 * results } else { 0 });
            own.split_o = builder.slot("output of each split", 4 * results * i64::from(tile.dim_v));
        }
        own
    }
}

/// Returns a description of the tile configuration.
fn label(tile: &Tile) -> String {
    let heads = if tile.heads() > 1 { format!(" of {} heads", tile.heads()) } else { String::new() };
    let split = if tile.split { ", split-KV" } else { "" };
    let fixed = if tile.fixed_split > 0 { format!(", splits of {} keys", tile.fixed_split * tile.keys) } else { String::new() };
    format!("forward {}{heads} x {} of {}, {}{split}{fixed}", tile.queries(), tile.keys, tile.dim_qk, tile.dim_v)
}

/// Returns the number of heads, or packed GQA groups of heads, that are processed together: whole GQA groups. A tile list contains the tiles of all
/// batch entries.
fn heads_in_l2(forward: &Forward, tile: &Tile) -> i64 {
    let Forward { tensors: [_, k, v, _], extents: [batch, _, _, seq_kv], .. } = forward;
    let head_groups = forward.head_groups(tile);
    let together = |keys: i64| heads_in_cache(2 * keys * (k.dims[3] + v.dims[3])) * forward.head_tiles(tile);
    match forward.packed {
        // Each key is read once, so keeping K and V of some heads in L2 gains nothing: all heads form one section.
        _ if tile.split || (tile.few.is_some() && forward.lists_tiles(tile)) => head_groups,
        Some(packs) => together(packs.totals[Side::Keys as usize].min(batch * seq_kv)).min(head_groups),
        None => together(*seq_kv).min(batch * head_groups),
    }
}

/// Returns the number of thread blocks: one per SM, each processing many tiles, or one per tile if there are fewer.
fn blocks(forward: &Forward, tile: &Tile, multiprocessors: u32) -> i64 {
    (forward.most_items(tile, multiprocessors) * forward.head_groups(tile)).min(multiprocessors.into())
}

/// Returns the schedule (memory and launches) of a forward pass with this tile configuration.
pub(crate) fn schedule(problem: &Problem, forward: &Forward, tile: &Tile, gpu: Gpu) -> Schedule {
    let multiprocessors = gpu.multiprocessors;
    let mut builder = Builder::new(JobQuery::Forward(problem), forward, (Family::Wgmma, gpu), label(tile));
    let lists_tiles = forward.lists_tiles(tile);
    let mut entries = vec![(EntryPoint::Forward, tile.shared_bytes())];
    entries.extend(lists_tiles.then_some((EntryPoint::TileList, 0)));
    entries.extend(tile.split.then_some((EntryPoint::Combine, 0)));
    let kernel = builder.kernel(source::forward(forward, tile), entries);

    let operands = [Operand::Q, Operand::K, Operand::V, Operand::O];
    builder.tokens_of(operands.into_iter().zip(forward.tensors));
    // TMA boxes: a whole tile of Q, a KV block of K and V (or a piece of one), and a warp's 16 rows of O.
    let piece = [forward.piece(tile), 1];
    let boxes = [[tile.queries(), tile.heads()], piece, piece, [16, 1]];
    let maps = std::array::from_fn::<_, 4, _>(|n| {
        let (operand, side) = (operands[n], operands[n].side());
        let address = Address::Operand(operand);
        builder.map(if forward.packs(side) {
            OperandMap::packed(address, side, &forward.tensors[n], boxes[n])
        } else {
            OperandMap::new(address, &builder.in_memory(operand).unwrap_or(forward.tensors[n]), boxes[n])
        })
    });

    let own = Workspace::add(&mut builder, tile, multiprocessors);
    let lists = builder.block_lists("block lists", Blocking { queries: tile.queries(), keys: tile.keys, by_keys: false });
    let Forward { tensors: [.., o], paged, extents: [batch, _, seq_q, seq_kv], .. } = forward;
    let head_groups = forward.head_groups(tile);
    let params = ForwardParams {
        attention: builder.attention_params(Tiling { queries: tile.queries(), heads_in_l2: heads_in_l2(forward, tile) }, &lists),
        stats: Address::Statistic(Statistic::Stats),
        row_max: Address::Statistic(Statistic::RowMax),
        sum_exp: Address::Statistic(Statistic::SumExp),
        tile_counter: own.counter,
        tile_items: own.items,
        first_items: own.firsts,
        split_o: own.split_o,
        split_lse: own.split_lse,
        split_row_max: own.split_max,
        o: Address::Operand(Operand::O),
        o_batch: o.strides[0],
        o_head: o.strides[1],
        o_row: o.strides[2],
        page_table: builder.param(PAGE_TABLE),
        head_groups: head_groups as i32,
        head_tiles: forward.head_tiles(tile) as i32,
        max_splits: forward.most_parts(tile, multiprocessors) as i32,
        page_size: paged.map_or(1, |paged| paged.page_size.min(FAR.into())) as i32,
        pages: paged.map_or(1, |paged| paged.pages) as i32,
        table_row: paged.map_or(0, |paged| paged.pages_of(*seq_kv)) as i32,
        max_items: own.most_items as i32,
    };
    let params = builder.structure(|to| params.push(to));
    let captured = builder.captured();

    if !lists_tiles {
        builder.zero(own.counter);
    }
    if lists_tiles {
        builder.launch(kernel, EntryPoint::TileList, [steps(*batch, LISTING_WARPS), (32 * LISTING_WARPS).into()], [params]);
    }
    builder.make_block_lists(&lists, kernel, [params, captured]);
    let main = ([blocks(forward, tile, multiprocessors), tile.threads().into()], tile.shared_bytes());
    builder.launch_with(kernel, EntryPoint::Forward, main, maps.into_iter().chain([params, captured]));
    if tile.split {
        let rows = batch * head_groups * steps(*seq_q, tile.queries()) * steps((tile.queries() * tile.heads()).into(), COMBINING_WARPS);
        builder.launch(kernel, EntryPoint::Combine, [rows, (32 * COMBINING_WARPS).into()], [params]);
    }
    builder.finish()
}
