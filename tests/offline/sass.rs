//! Which instructions the kernels become: as many products as a step of the walk has, on the units that they were written for, and no more functions than there
//! are scores. What is expected is counted from the tile configuration.

use conformance::nvrtc;
use conformance::runner::side_by_side;
use conformance::sass::{self, Instructions};
use conformance::say::{say, skip};
use conformance::share::{DAYS, of_today};
use sdpa::cuda::kernel::MachineCode;
use sdpa::cuda::mma::{self, TileConfig};
use sdpa::cuda::tile_config::BackwardTile;
use sdpa::cuda::{Backward, Family, Forward, Target};
use sdpa::cudnn::lower::Job;
use sdpa::{AttentionSpec, DType, Direction, Layout, Mask, Shape};
use std::sync::Mutex;

/// Dims, type, score_mod (or none), mask (or none), and the family.
type Row = ([i64; 2], DType, &'static str, &'static str, Family);

const TABLE: [Row; 13] = [
    ([128, 128], DType::BF16, "", "causal", Family::Wgmma),
    ([64, 64], DType::F16, "softcap:30", "causal", Family::Wgmma),
    ([96, 72], DType::BF16, "", "causal", Family::Wgmma),
    ([192, 128], DType::BF16, "", "", Family::Wgmma),
    ([256, 256], DType::BF16, "softcap:50", "window:400,0", Family::Wgmma),
    ([256, 256], DType::BF16, "", "causal-bottom-right", Family::Wgmma),
    ([64, 64], DType::BF16, "alibi", "causal", Family::Wgmma),
    ([128, 128], DType::F16, "score * 0.5 + f32(k - q) * 0.001", "", Family::Wgmma),
    ([128, 128], DType::BF16, "softcap:30", "causal", Family::Mma),
    ([64, 64], DType::BF16, "alibi", "causal", Family::Mma),
    ([64, 64], DType::F32, "", "causal", Family::Mma),
    ([192, 128], DType::F16, "", "", Family::Mma),
    ([256, 256], DType::BF16, "", "causal", Family::Mma),
];

/// Instructions by their names, and how many there must be.
type Counts = Vec<(&'static str, usize)>;

/// Logarithms that a thread tells, of two rows: their exponents are the only whole numbers that are converted to floats. Those of places become floats by additions.
const LOGARITHMS: usize = 2;

/// Threads of a group, whose product has 64 rows.
const GROUP: u32 = 128;

fn number(n: u32) -> usize {
    n as usize
}

/// What a product of scores sums over at once: columns that only the tile has are left out.
fn sixteens(dim: i64) -> u32 {
    u32::try_from(dim).unwrap().div_ceil(16)
}

/// Whether a score_mod asks for a `tanh` of each score.
fn caps(spec: &AttentionSpec) -> bool {
    spec.score_mods.iter().any(|score_mod| score_mod.name().starts_with("softcap"))
}

/// The first block of a tile, and every other: at an edge of the mask or within it.
const SOFTENED: u32 = 3;

/// Texts of weights backward beside a score_mod: within the mask, at its edge, and there with scores that are very large.
const WEIGHED: u32 = 3;

fn forward_of_groups(spec: &AttentionSpec) -> Counts {
    let forward = Forward::of(&spec.validate().unwrap()).unwrap();
    let tile = forward.tile(132).unwrap();
    // The first block's scores are asked for by themselves, the last one's weights too.
    let products = 2 * (sixteens(spec.q.dims[3]) + tile.keys / 16);
    let boxes = (2 * tile.dim_qk + tile.dim_v).div_ceil(64);
    let scores = SOFTENED * tile.keys * 64 / GROUP;
    // The unit's own function beside bf16, and else one by exponents.
    let (near, exponents) = match (caps(spec), spec.dtype) {
        (false, _) => (0, scores),
        (true, DType::BF16) => (scores, scores),
        (true, _) => (0, 2 * scores),
    };
    // The slope of a head is one of two powers.
    let of_head = if spec.score_mods.iter().any(|score_mod| score_mod.name() == "alibi") { SOFTENED * 2 } else { 0 };
    let exponents = exponents + of_head;
    // Of each of two rows, also: how much less its earlier sums weigh.
    let exponents = exponents + SOFTENED * 2;
    // Where keys are in parts the compiler copies what ends a tile, with an exponent for the sum of each of two rows, twice more.
    let exponents = if tile.split { exponents + 2 * 2 } else { exponents };
    vec![
        ("HGMMA", number(products)),
        ("HMMA", 0),
        ("UTMALDG.4D", number(boxes)),
        ("MUFU.TANH", number(near)),
        ("MUFU.EX2", number(exponents)),
        // A part of the keys has its own.
        ("I2FP", LOGARITHMS * if tile.split { 2 } else { 1 }),
    ]
}

fn backward_of_groups(spec: &AttentionSpec) -> Counts {
    let backward = Backward::of(&spec.backward().validate().unwrap()).unwrap();
    let tile = backward.tile(132).unwrap();
    if tile.two_cta {
        return backward_in_pairs(spec, &tile);
    }
    let halves = tile.queries / 64;
    // Scores and their gradients, in halves of 64 queries, the first ones of a walk by themselves where steps ask for those of the next; gradients of keys and
    // values, the last half once more for the first step of a walk; a slice of those of queries, over 128 keys, in the next step and behind the last.
    let asked = halves + u32::from(tile.stages > 1);
    let products = asked * sixteens(spec.q.dims[3]) + halves * sixteens(spec.v.dims[3]) + 2 * (tile.queries + 64) / 16 + 2 * 128 / 16;
    // Gradients of scores go to shared memory, 64 x 64 of a group, four matrices of 8 x 8 a warp at once.
    let stored = halves * 64 * 64 / (GROUP / 32) / (4 * 64);
    // So do rounded sums of 16 rows by 64 columns, where warps beside the groups have these.
    let stored = stored + if tile.sums_bytes() > 0 { 16 * 64 / (4 * 64) } else { 0 };
    // A slice has 64 x 64 numbers, which the copy engine adds, one of each group, or threads, four to an instruction, in a step and behind the last.
    let (by_copy, by_threads) = if tile.sums_bytes() > 0 { (2, 0) } else { (0, 2 * 64 * 64 / GROUP / 4) };
    // And of gradients of keys and values, where blocks of threads share the heads of a group.
    let by_threads = by_threads + if tile.shares > 1 { tile.key_sums() / (2 * GROUP) / 4 } else { 0 };
    // The unit's own function beside bf16: of each score once in each text.
    let near = if caps(spec) && spec.dtype == DType::BF16 { WEIGHED * halves * 64 * 64 / GROUP } else { 0 };
    vec![
        ("HGMMA", number(products)),
        ("HMMA", 0),
        ("STSM.16.M88.4", number(stored)),
        ("UBLKRED", number(by_copy)),
        ("REDG.E.ADD.F32x4", number(by_threads)),
        ("MUFU.TANH", number(near)),
        ("I2FP", 0),
    ]
}

/// Of blocks of threads that run as pairs, each of whose groups has a text of its own.
fn backward_in_pairs(spec: &AttentionSpec, tile: &BackwardTile) -> Counts {
    // Scores for the first step and for every next one; gradients of weights; gradients of values, and of keys, for the first step and for any other; of both groups a slice of those
    // of queries, over 128 keys, for a step and behind the last.
    let products = 2 * sixteens(spec.q.dims[3]) + sixteens(spec.v.dims[3]) + 2 * 2 * 64 / 16 + 2 * 2 * 128 / 16;
    // Each group adds its slice, 64 x 64 numbers, four to an instruction, and what shares come to.
    let added = 2 * 2 * 64 * 64 / GROUP / 4 + if tile.shares > 1 { tile.key_sums() / GROUP / 4 } else { 0 };
    let near = if !spec.score_mods.is_empty() && spec.dtype == DType::BF16 { WEIGHED * 64 * 64 / GROUP } else { 0 };
    vec![
        ("HGMMA", number(products)),
        ("HMMA", 0),
        // Gradients of scores, and what of them goes to the other block, for the first step and for any other.
        ("STSM.16.M88.4", number(64 * 64 / (GROUP / 32) / (4 * 64))),
        ("UBLKCP.S.S", 2),
        ("REDG.E.ADD.F32x4", number(added)),
        ("MUFU.TANH", number(near)),
    ]
}

/// Products of a warp with 16 rows of its own: each has 8 columns, and is over 16 numbers, or of f32 over 8, each of which is two and asks for three.
fn of_warps(config: &TileConfig, columns: [u32; 2], over: [u32; 2]) -> usize {
    let (depth, times) = if config.element_bytes == 4 { (8, 3) } else { (16, 1) };
    // Scores, over columns of operands, which of f32 is a loop of two steps each; results, over rows of the step.
    let terms = |columns: u32| if config.element_bytes == 4 { (columns / depth).min(2) } else { columns / depth };
    let [scores, results] =
        [config.step / 8 * columns.map(terms).iter().sum::<u32>(), over.iter().sum::<u32>() / 8 * (config.step / depth)];
    number(times * (scores + results))
}

/// Of each text.
fn with_warps(spec: &AttentionSpec, direction: Direction) -> Vec<Counts> {
    let converted = if direction == Direction::Forward { LOGARITHMS } else { 0 };
    let counts = |products| vec![("HMMA", products), ("HGMMA", 0), ("UTMALDG", 0), ("I2F", converted)];
    match direction {
        Direction::Forward => {
            let config = TileConfig::of_forward(&mma::forward(&spec.validate().unwrap()).unwrap()).unwrap();
            let mut counts = counts(of_warps(&config, [config.dim_qk, 0], [config.dim_v, 0]));
            let near = if caps(spec) { config.step * 16 / 32 } else { 0 };
            counts.push(("MUFU.TANH", number(near)));
            vec![counts]
        }
        Direction::Backward => {
            let config = TileConfig::of_backward(&mma::backward(&spec.backward().validate().unwrap()).unwrap()).unwrap();
            let both = [config.dim_qk, config.dim_v];
            let queries = of_warps(&config, both, [config.dim_qk, 0]);
            // Blocks of threads share the columns of gradients.
            let keys = of_warps(&config, both, both.map(|dim| dim / config.parts));
            vec![counts(queries), counts(keys)]
        }
    }
}

fn spec(([dim_qk, dim_v], dtype, score_mod, mask, _): Row) -> AttentionSpec {
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 1000, seq_kv: 1700, dim_qk, dim_v };
    let mut spec = AttentionSpec::dense(dtype, shape, Layout::Bshd).with_stats();
    if !score_mod.is_empty() {
        spec = spec.score_mod(score_mod.parse().unwrap_or_else(|e| panic!("{score_mod}: {e}")));
    }
    if mask.is_empty() { spec } else { spec.mask(mask.parse::<Mask>().unwrap_or_else(|e| panic!("{mask}: {e}"))) }
}

#[test]
fn kernels_have_the_instructions_that_they_were_written_for() {
    let found = nvrtc::find().and_then(|nvrtc| Ok((nvrtc, sass::find()?)));
    let (nvrtc, disassembler) = match found {
        Ok(found) => found,
        Err(why) => return skip("offline", &format!("instructions of native CUDA kernels: {why}")),
    };
    let has = |row: &Row| vec![row.1.to_string(), row.4.to_string()];
    let rows = of_today("instructions of kernels", DAYS, TABLE.to_vec(), has);
    let (told, wrong) = (Mutex::new(0), Mutex::new(Vec::new()));
    let row = |row: &Row| {
        let (spec, family) = (spec(*row), row.4);
        let (sm, plain) = (if family == Family::Wgmma { 90 } else { 80 }, row.2.is_empty() && row.1 != DType::F32 && row.0[0] <= 128);
        let target = Target { family: Some(family), ..Target::new(sm, 132) };
        let jobs = [Job::from(spec.validate().unwrap()), spec.backward().validate().unwrap().into()];
        for job in jobs {
            let counts = match (family, job.direction()) {
                (Family::Wgmma, Direction::Forward) => vec![forward_of_groups(&spec)],
                (Family::Wgmma, Direction::Backward) => vec![backward_of_groups(&spec)],
                (Family::Mma, direction) => with_warps(&spec, direction),
            };
            let forward = job.direction() == Direction::Forward;
            let kernels = target.kernels(&job).unwrap();
            assert_eq!(kernels.len(), counts.len());
            for (key, counts) in kernels.into_iter().zip(counts) {
                let what = format!("{}, {} {} {}", key.tile, row.1, row.2, key.architecture);
                let kernel = &*key.entries[0].0.name().to_string_lossy();
                let made = MachineCode::compile(&nvrtc, key).unwrap_or_else(|e| panic!("{what}: {e}"));
                let all = Instructions::of(&disassembler, made.code(), kernel).unwrap_or_else(|e| panic!("{what}: {e}"));
                for (name, count) in counts {
                    // Divisions of whole numbers have conversions of their own, with modifiers.
                    let found = if name == "I2F" { all.bare(name) } else { all.count(name) };
                    if found != count {
                        wrong.lock().unwrap().push(format!("{found} {name}, not {count}, of {what}"));
                    }
                }
                // What waits until all that a thread has added is in memory is no part of a step.
                assert_eq!(all.between("HGMMA").count("MEMBAR.ALL.GPU"), 0, "{what}");
                // Registers that did not suffice go to local memory: of who brings operands backward some do, behind the groups that compute.
                if plain {
                    let computes = if forward || family == Family::Mma { all } else { all.between("HGMMA") };
                    let [loads, stores] = ["LDL", "STL"].map(|name| computes.count(name));
                    // One that only the code for large scores reads may be stored.
                    assert!(loads == 0 && stores <= usize::from(!forward), "{loads} LDL and {stores} STL of {what}");
                }
                *told.lock().unwrap() += 1;
            }
        }
    };
    side_by_side(&rows, row);
    let (told, wrong) = (told.into_inner().unwrap(), wrong.into_inner().unwrap());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(told >= 2 * rows.len());
    say(&format!("machine code: {told} texts have the matrix instructions that their tile configurations say"));
}
