//! Sinks: their buffer, and the plan of their gradient.

use crate::backward::{ALONG_SCORE, Backward};
use crate::forward::Forward;
use crate::params::BackwardParams;
use crate::plan::{Binding, Cut, Operand, Plan};
use crate::rows::THREADS;
use crate::source::{self, SINK_SLOT};
use crate::tile_config::SIMD;
use sdpa_core::{DType, SINK, Side};
use sdpa_emit::Dialect;

/// Returns the binding of the attention sinks, one f32 per query head.
pub(crate) fn binding(problem: &Forward) -> Binding {
    Binding::read(SINK_SLOT, "float", Operand::Declared { name: SINK.to_owned(), dtype: DType::F32, elements: problem.q.dims[1] })
}

/// Returns the plan of the kernel for the gradient of the attention sinks. It runs after the kernel that sums `o · d_o`.
pub(crate) fn plan(problem: &Backward, dtype: DType) -> Plan {
    let forward = &problem.forward;
    let heads = forward.q.dims[1];
    let (name, ty) = (forward.element(), Dialect::Msl.element(dtype));
    let mut buffers = vec![
        Binding::params(BackwardParams::NAME),
        problem.lse_read(),
        problem.delta_read(),
        Binding::written(10, ty, Operand::Gradient { name: SINK.to_owned(), dtype, elements: heads }),
        binding(forward),
        Binding::read(12, name, Operand::O),
    ];
    buffers.extend(forward.lengths());
    buffers.extend(forward.boundaries(&Side::ALL));
    let constants = [
        ("DIM_V", forward.dims()[1]),
        ("THREADS", THREADS),
        ("WITH_SEQ_LEN_Q", forward.seq_len_q.into()),
        ("WITH_SEQ_LEN_KV", forward.seq_len_kv.into()),
        ("WITH_ENDS", (!forward.ends.is_full()).into()),
    ];
    let cut = Cut {
        grid: [heads as u32, 1, 1],
        threads: THREADS,
        registers: 0,
        buffers,
        threadgroup: vec![("float", (THREADS / SIMD * 4) as usize)],
    };
    problem.kernel(&source::SINK, &constants, cut, (ALONG_SCORE, Some(ty)))
}
