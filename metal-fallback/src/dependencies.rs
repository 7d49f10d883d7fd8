//! Dependencies between dispatches.

use crate::plan::{Operand, Plan};

/// Returns, for each plan, whether it must wait until the dispatches of earlier plans have ended. It must if it reads memory that an
/// earlier plan writes, or writes memory that an earlier plan accesses. Dispatches between two waits may run concurrently.
pub fn waits(plans: &[Plan]) -> Vec<bool> {
    let mut running: Vec<(&Operand, bool)> = Vec::new();
    let mut wait = Vec::with_capacity(plans.len());
    for plan in plans {
        let meets = |operand: &Operand, written: bool| running.iter().any(|(o, w)| *o == operand && (written || *w));
        let waits = plan.buffers.iter().any(|b| meets(&b.operand, b.written));
        if waits {
            running.clear();
        }
        running.extend(plan.buffers.iter().map(|b| (&b.operand, b.written)));
        wait.push(waits);
    }
    wait
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Forward;
    use crate::plan::Binding;
    use sdpa_core::DType;
    use sdpa_core::{Ends, Region, TensorSpec};

    fn plans(buffers: &[&[(Operand, bool)]]) -> Vec<Plan> {
        let tensor = TensorSpec { dims: [1, 1, 8, 8], strides: [64, 64, 8, 1], alignment: 16 };
        let forward = Forward {
            dtype: DType::F32,
            q: tensor,
            k: tensor,
            v: tensor,
            o: tensor,
            band: Region::default(),
            ends: Ends::default(),
            seq_len_q: false,
            seq_len_kv: false,
            packed: None,
            paged: None,
            score_mod: None,
            keep: None,
            sink: false,
            dropout: None,
            stats: false,
            row_max: false,
            sum_exp: false,
        };
        let plan = forward.plan().unwrap().plans.remove(0);
        let binding = |(operand, written): &(Operand, bool)| {
            let of = if *written { Binding::written } else { Binding::read };
            of(0, "float", operand.clone())
        };
        buffers.iter().map(|list| Plan { buffers: list.iter().map(binding).collect(), ..plan.clone() }).collect()
    }

    #[test]
    fn only_hazards_wait() {
        use Operand::{DK, DO, DQ, K, O, Q};
        let delta = || Operand::Scratch(crate::Scratch { name: "delta".to_owned(), elements: 8 });
        let (read, written) = (false, true);
        let backward: [&[(Operand, bool)]; 3] = [
            &[(DO, read), (O, read), (delta(), written)],
            &[(Q, read), (delta(), read), (DQ, written)],
            &[(Q, read), (delta(), read), (DK, written)],
        ];
        assert_eq!(waits(&plans(&backward)), [false, true, false]);
        for (first, second, wait) in [((K, read), (K, read), false), ((K, read), (K, written), true), ((K, written), (K, written), true)] {
            assert_eq!(waits(&plans(&[&[first], &[second]])), [false, wait]);
        }
        // After a wait, earlier dispatches have ended.
        let three: [&[(Operand, bool)]; 3] = [&[(K, written)], &[(K, read), (Q, written)], &[(K, read)]];
        assert_eq!(waits(&plans(&three)), [false, true, false]);
    }

    #[test]
    fn a_parameter_is_nobodys_hazard() {
        let both: [&[(Operand, bool)]; 2] = [&[(Operand::Params, false)], &[(Operand::Params, false)]];
        assert_eq!(waits(&plans(&both)), [false, false]);
    }
}
