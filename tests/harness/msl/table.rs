//! The table that Metal kernels are tested over: types, dims, masks, score_mods, kernels, shapes and layouts.

use super::cover::pairwise;
use crate::case::Case;
use metal_fallback::Kernels;

/// `dim_qk` and `dim_v`.
const DIMS: [[i64; 2]; 10] = [[32, 32], [64, 64], [72, 72], [80, 80], [96, 96], [128, 128], [192, 192], [256, 256], [192, 128], [20, 44]];
const DTYPES: [&str; 3] = ["f32", "f16", "bf16"];
const MASKS: [&[&str]; 14] = [
    &[],
    &["causal"],
    &["causal-bottom-right"],
    &["window:9,0"],
    &["window:20,7:bottom-right"],
    &["prefix-lm:23"],
    &["padding"],
    &["padding", "causal"],
    &["array:bhqk"],
    &["array:k"],
    &["array:hqk", "causal-bottom-right"],
    &["document", "sliding-window:30"],
    &["dilated:3"],
    &["natten:11", "padding"],
];
/// Score_mods, and the parameters whose gradients are asked for in some rows.
const SCORE_MODS: [(&[&str], &[&str]); 7] = [
    (&[], &[]),
    (&["softcap:5"], &["cap:f32"]),
    (&["bias:hqk"], &["bias:f32"]),
    (&["bias16:bhqk"], &["bias:f16"]),
    (&["alibi-slopes"], &["slopes:bf16"]),
    (&["bias:k", "softcap:10"], &["bias:bf16", "cap:f32"]),
    (&["sandwich:8"], &[]),
];
/// batch, heads_q, heads_kv, seq_q, seq_kv: off every tile, some with rows that a causal mask leaves without a key; few queries, with
/// keys for several simdgroups and more than one batch of each.
const SHAPES: [[i64; 5]; 8] = [
    [2, 4, 2, 37, 70],
    [1, 3, 3, 65, 33],
    [1, 6, 2, 70, 41],
    [2, 2, 1, 9, 45],
    [3, 2, 2, 33, 31],
    [1, 4, 2, 1, 67],
    [2, 6, 2, 3, 300],
    [1, 5, 1, 8, 130],
];
const LAYOUTS: [&str; 3] = ["bhsd", "bshd", "sbhd"];

fn list(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    format!("[{}]", quoted.join(", "))
}

fn text(row: &[usize]) -> String {
    let ([dim_qk, dim_v], [batch, heads_q, heads_kv, seq_q, seq_kv]) = (DIMS[row[0]], SHAPES[row[5]]);
    let (dtype, mask, (score_mod, along), layout) = (DTYPES[row[1]], MASKS[row[2]], SCORE_MODS[row[3]], LAYOUTS[row[6]]);
    let wrt = if row[6] == 0 { along } else { &[] };
    let name = row.iter().map(ToString::to_string).collect::<Vec<_>>().join("_");
    let gap = row[6] * 3;
    format!(
        "[[case]]\nname = \"{name}\"\nshape = {{ batch = {batch}, heads_q = {heads_q}, heads_kv = {heads_kv}, seq_q = {seq_q}, \
         seq_kv = {seq_kv}, dim_qk = {dim_qk}, dim_v = {dim_v} }}\ndtype = \"{dtype}\"\nlayout = \"{layout}\"\nmask = {}\n\
         score_mod = {}\nstats = {}\nkv_gap = {gap}\no_gap = {gap}\nbackward = {{ wrt = {} }}\n",
        list(mask),
        list(score_mod),
        row[6] != 1,
        list(wrt),
    )
}

/// A row of the table.
#[derive(Clone, Debug)]
pub struct Row {
    /// The problem.
    pub case: Case,
    /// The kernels that it is given to, whatever the planner would take.
    pub kernels: Kernels,
}

/// How many of the columns are multiplied where all of them are wanted: types, dims, masks, score_mods and kernels.
const MULTIPLIED: usize = 5;

/// Rows in which any two entries of different columns meet; with `all`, every type with all dims, masks, score_mods and kernels.
///
/// # Errors
/// What does not parse.
pub fn rows(all: bool) -> Result<Vec<Row>, String> {
    let columns = [DIMS.len(), DTYPES.len(), MASKS.len(), SCORE_MODS.len(), Kernels::ALL.len(), SHAPES.len(), LAYOUTS.len()];
    let rows = if all {
        let product = columns[..MULTIPLIED].iter().product::<usize>();
        let row = |n: usize| {
            let mut rest = n;
            let mut row: Vec<usize> = columns[..MULTIPLIED].iter().map(|&choices| (rest % choices, rest /= choices).0).collect();
            // Neither divides the others, so that shapes and layouts meet all of them in turn.
            row.extend([n * 5 / 7 % columns[MULTIPLIED], n * 7 / 11 % columns[MULTIPLIED + 1]]);
            row
        };
        (0..product).map(row).collect()
    } else {
        pairwise(&columns, 5)
    };
    let cases = Case::parse(&rows.iter().map(|row| text(row)).collect::<String>())?;
    Ok(cases.into_iter().zip(&rows).map(|(case, row)| Row { case, kernels: Kernels::ALL[row[4]] }).collect())
}
