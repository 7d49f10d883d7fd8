//! What is dropped, on every kernel.

use super::emulation;
use conformance::msl::Emulated;
use conformance::runner::{Drops, dropped};
use metal_fallback::Kernels;

#[test]
fn what_is_dropped_may_hold_anything() {
    let Some(toolchain) = emulation("operands that are dropped") else { return };
    for kernels in Kernels::ALL {
        let emulated = Emulated::new(toolchain.clone(), 1).forced(kernels).executor();
        for drops in Drops::ALL {
            dropped(drops, &emulated).unwrap_or_else(|e| panic!("{kernels:?}: {e}"));
        }
    }
}
