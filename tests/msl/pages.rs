//! Page tables that no call over host memory gets to the kernels with: whatever they hold, nothing outside of the containers is read.

use super::boundaries::written;
use super::emulation;
use conformance::msl::Emulated;
use metal_fallback::{Forward, Kernels};
use sdpa::paged::PAGE_TABLE;
use sdpa::{AttentionSpec, DType, Mask, Paged, Shape};

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 41, dim_qk: 20, dim_v: 12 };
const CACHE: Paged = Paged::new(7, 5);

/// Tables, and what they come to.
const SAME: [[[i32; 12]; 2]; 2] = [
    [[0, 1, 2, 3, 4, 5, -1, i32::MAX, i32::MIN, 5, 0, 6], [0, 1, 2, 3, 4, 4, 0, 4, 0, 4, 0, 4]],
    [[i32::MIN, 4, 4, 4, 2, 1, 3, 3, 99, -99, 0, 0], [0, 4, 4, 4, 2, 1, 3, 3, 4, 0, 0, 0]],
];

/// Whether kernels stay within the containers.
///
/// # Errors
/// Which do not.
pub(super) fn hold(emulated: &Emulated, kernels: Kernels) -> Result<(), String> {
    let spec = AttentionSpec::paged(DType::F32, SHAPE, CACHE).mask(Mask::causal_bottom_right());
    let task = Forward::from(&spec.validate().unwrap()).task(Some(kernels)).unwrap();
    let with = |table: [i32; 12]| {
        let table = |name: &str| (name == PAGE_TABLE).then(|| table.into_iter().flat_map(i32::to_le_bytes).collect());
        written(emulated, &task, None, table)
    };
    for [wrong, sound] in SAME {
        if with(wrong)? != with(sound)? {
            return Err(format!("{}: {wrong:?} is not {sound:?}", task.plans()[0].entry));
        }
    }
    Ok(())
}

#[test]
fn kernels_stay_within_the_containers_whatever_a_table_holds() {
    let Some(toolchain) = emulation("wrong page tables") else { return };
    for kernels in Kernels::ALL {
        hold(&Emulated::new(toolchain.clone(), 1), kernels).unwrap_or_else(|e| panic!("{kernels:?}: {e}"));
    }
}
