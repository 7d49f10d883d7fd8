//! Sources of the `mma.sync` kernels: constants, the pieces of `kernels/`, and generated functions.

use super::params::{MmaParams, Strided};
use super::tile_config::TileConfig;
use crate::backward::Backward;
use crate::problem::{Forward, Lists};
use crate::source::{
    BACKWARD_SOFTMAX, BLOCK_SPARSITY, EXACT_LSE, GRADIENT_SUMS, HEAVY, KV_BLOCKS, MASK, PARAMETER_GRADIENTS, Q_BLOCKS, SOFTMAX, STATISTICS,
    TILE_ORDER, add, along_functions, along_parameters, begin, boundary, gradients_structure, keep_function, piece, score_functions,
    statistics,
};
use sdpa_core::spec::TensorSpec;
use sdpa_core::{DType, Operand, Side, packed};

const WARP_PIECES: [(&str, &str); 3] = [piece!("mma.cuh"), piece!("warp_gemm.cuh"), piece!("strided.cuh")];
const FORWARD: (&str, &str) = piece!("mma_forward.cu");
const BACKWARD: (&str, &str) = piece!("mma_backward.cuh");
const BACKWARD_DKV: (&str, &str) = piece!("mma_backward_dkv.cu");
const BACKWARD_DQ: [(&str, &str); 3] = [piece!("mma_backward_dq.cu"), piece!("mma_backward_preprocess.cuh"), GRADIENT_SUMS];

/// Returns 1 if rows are 16-byte aligned, so that threads can copy 16 bytes at once.
fn wide(tensor: &TensorSpec, bytes: i64) -> u32 {
    let dense = tensor.strides[3] == 1 || tensor.dims[3] == 1;
    let steps = (0..3).all(|axis| tensor.dims[axis] <= 1 || tensor.strides[axis] * bytes % 16 == 0);
    u32::from(dense && tensor.alignment.is_multiple_of(16) && steps)
}

/// Returns 1 if a row consists of aligned pairs of elements.
fn pairs(tensor: &TensorSpec, bytes: u32) -> u32 {
    let steps = (0..3).all(|axis| tensor.dims[axis] <= 1 || tensor.strides[axis] % 2 == 0);
    u32::from(tensor.dims[3] % 2 == 0 && tensor.strides[3] == 1 && tensor.alignment.is_multiple_of(2 * bytes) && steps)
}

/// Returns a tensor as it is in memory: paged, or packed with at least two tokens.
fn laid(forward: &Forward, operand: Operand, tensor: &TensorSpec) -> TensorSpec {
    match forward.paged.filter(|_| operand.side() == Side::Keys) {
        Some(paged) => paged.container(tensor),
        None if forward.packs(operand.side()) => packed::memory(tensor, 2),
        None => *tensor,
    }
}

/// Returns the constants of every source.
fn constants(forward: &Forward, config: &TileConfig) -> Vec<(&'static str, u32)> {
    let bytes = config.element_bytes;
    let [q, k, v] = [Operand::Q, Operand::K, Operand::V].map(|operand| laid(forward, operand, &forward.tensors[operand as usize]));
    let mut constants = vec![
        ("DIM_QK", config.dim_qk),
        ("DIM_V", config.dim_v),
        ("WARPS", config.warps()),
        ("STAGES", config.stages),
        ("SINGLE", u32::from(bytes == 4)),
        ("Q_WIDE", wide(&q, bytes.into())),
        ("K_WIDE", wide(&k, bytes.into())),
        ("V_WIDE", wide(&v, bytes.into())),
        ("ALWAYS_MASKED", u32::from(forward.weight() > HEAVY)),
        ("WITH_PACKED_Q", forward.packed.is_some().into()),
        ("WITH_PACKED_KV", forward.packs(Side::Keys).into()),
    ];
    if forward.dtype == DType::F32 {
        constants.push(("EXACT", 1));
    }
    constants
}

/// Returns the parameter structure.
fn params(forward: &Forward) -> String {
    format!("{}{}{}typedef MmaParams Params;\n", boundary(forward), Strided::CUDA, MmaParams::cuda())
}

/// Returns the CUDA source of the forward kernel with this tile configuration.
pub fn forward_text(forward: &Forward, config: &TileConfig) -> String {
    let [.., o] = &forward.tensors;
    let mut own = constants(forward, config);
    own.extend([("TILE_M", config.own), ("TILE_N", config.step), ("O_PAIRS", pairs(&laid(forward, Operand::O, o), config.element_bytes))]);
    own.extend(statistics(forward));
    own.push(("WITH_PAGES", forward.paged.is_some().into()));
    own.push(("APPROXIMATE", (forward.dtype == DType::BF16).into()));
    own.extend([("LAZY_RESCALE", 0), ("FIXED_SPLIT", 0)]);
    let score_mod = forward.score_mod.as_deref().map(|trace| forward.captured.score_mod(trace));
    let traced: Vec<String> = score_mod.into_iter().chain(keep_function(forward)).collect();
    let mut text = begin(forward, forward.weight(), &own, &params(forward), &traced, &WARP_PIECES);
    [MASK, KV_BLOCKS, TILE_ORDER, STATISTICS, SOFTMAX]
        .into_iter()
        .chain(map(forward))
        .chain([FORWARD])
        .for_each(|piece| add(&mut text, piece));
    text
}

/// Returns the kernel that makes block lists, if each call makes its own.
fn map(forward: &Forward) -> Option<(&'static str, &'static str)> {
    (forward.lists() == Lists::AtCall).then_some(BLOCK_SPARSITY)
}

/// Returns the constants of either source of a backward pass.
fn constants_of_gradients(backward: &Backward, config: &TileConfig, by_keys: bool) -> Vec<(&'static str, u32)> {
    let bytes = config.element_bytes;
    let (tile_m, tile_n) = if by_keys { (config.step, config.own) } else { (config.own, config.step) };
    let in_memory = |operand: Operand, tensor: &TensorSpec| laid(&backward.forward, operand, tensor);
    let [dq, dk, dv] = &backward.gradients;
    let [dq, dk, dv] =
        [(Operand::DQ, dq), (Operand::DK, dk), (Operand::DV, dv)].map(|(operand, tensor)| pairs(&in_memory(operand, tensor), bytes));
    let mut own = constants(&backward.forward, config);
    own.extend([
        ("APPROXIMATE", 0),
        ("OWN", config.own),
        ("STEP", config.step),
        ("SCORES", config.step / 2),
        ("COLUMN_PARTS", config.parts),
        ("TILE_M", tile_m),
        ("TILE_N", tile_n),
        ("BY_KEYS", by_keys.into()),
        ("D_O_WIDE", wide(&in_memory(Operand::DO, &backward.d_o), bytes.into())),
        ("DQ_PAIRS", dq),
        ("DK_PAIRS", dk),
        ("DV_PAIRS", dv),
        ("WITH_PARAMETER_GRADIENTS", (by_keys && !backward.along.is_empty()).into()),
    ]);
    own
}

/// Returns the CUDA source of the dQ kernel, and of the kernels that run before and after it.
pub fn queries_text(backward: &Backward, config: &TileConfig) -> String {
    let forward = &backward.forward;
    let own = constants_of_gradients(backward, config, false);
    let traced: Vec<String> = score_functions(backward).into_iter().chain(keep_function(forward)).collect();
    let mut text = begin(forward, backward.weight(), &own, &params(forward), &traced, &WARP_PIECES);
    [MASK, EXACT_LSE, KV_BLOCKS]
        .into_iter()
        .chain(map(forward))
        .chain([BACKWARD_SOFTMAX, BACKWARD])
        .chain(BACKWARD_DQ)
        .for_each(|piece| add(&mut text, piece));
    text
}

/// Returns the CUDA source of the kernel that computes dK, dV and gradients of parameters.
pub fn keys_text(backward: &Backward, config: &TileConfig) -> String {
    let forward = &backward.forward;
    let own = constants_of_gradients(backward, config, true);
    let traced: Vec<String> =
        score_functions(backward).into_iter().chain(along_functions(backward)).chain(keep_function(forward)).collect();
    let params = format!("{}{}", params(forward), gradients_structure(&backward.along));
    let mut text = begin(forward, backward.weight(), &own, &params, &traced, &WARP_PIECES);
    [MASK, EXACT_LSE, Q_BLOCKS].into_iter().chain(map(forward)).chain([BACKWARD_SOFTMAX, BACKWARD]).for_each(|piece| add(&mut text, piece));
    if !backward.along.is_empty() {
        add(&mut text, PARAMETER_GRADIENTS);
        text.push_str("\n#line 1 \"parameters\"\n");
        text.push_str(&along_parameters(backward, config.own));
    }
    add(&mut text, BACKWARD_DKV);
    text
}
