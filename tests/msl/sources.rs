//! What plans say of their sources, and what sources are checked for without running them.

use super::{NAME, emulation, option_rows, side_by_side, table_rows};
use conformance::case::Case;
use conformance::msl::{Emulated, Job, Row, Toolchain, registers};
use conformance::say::say;
use conformance::share::{DAYS, of_today};
use metal_fallback::{Backward, Forward};
use metal_fallback::{Kernels, Plan, REGISTER_LIMIT, THREADGROUP_BYTES};
use sdpa::Executor;
use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;

/// The plans of every kernel of a row, forward and backward.
pub(super) fn plans(row: &Row) -> Vec<Plan> {
    let problem = row.case.spec().unwrap().validate().unwrap();
    let mut plans = Forward::from(&problem).plan_with(row.kernels).unwrap().plans;
    // A cache is read, not trained.
    if row.case.paged.is_none() {
        let gradient = row.case.backward_spec().unwrap().validate().unwrap();
        plans.extend(Backward::from(&gradient).plan_with(row.kernels).unwrap().plans);
    }
    plans
}

/// The registers of arrays that each kernel takes at most, by type and the wider of its dims, as the sources have them.
type Registers = BTreeMap<&'static str, BTreeMap<String, BTreeMap<i64, u32>>>;

fn print(registers: &Registers) {
    println!("registers of a lane that arrays take at most, by the wider dim; {REGISTER_LIMIT} is the limit");
    for (entry, types) in registers {
        for (dtype, dims) in types {
            let line: Vec<String> = dims.iter().map(|(dim, n)| format!("{dim}: {n}")).collect();
            println!("{entry:<22} {dtype:<5} {}", line.join(", "));
        }
    }
}

#[test]
fn sources_bind_what_plans_say_and_pointers_stay_in_their_address_spaces() {
    let first = table_rows(false).remove(0);
    let rows: Vec<Row> = table_rows(false).into_iter().chain(option_rows().into_iter().step_by(2)).collect();
    let has = |row: &Row| vec![format!("{:?}", row.kernels), row.case.dtype.to_string()];
    let rows = of_today(&format!("sources {NAME}"), DAYS / 2, rows, has);
    let Some(toolchain) = emulation(&format!("address spaces of {} cases", rows.len())) else { return };
    let checked = Mutex::new(HashSet::new());
    let registers = Mutex::new(Registers::new());
    side_by_side(&rows, |row| {
        let name = &row.case.name;
        for plan in plans(row) {
            // Kernels without scores are the same for many rows.
            if !checked.lock().unwrap().insert(plan.source.clone()) {
                continue;
            }
            let [arguments, body] = toolchain.kernel(&plan).unwrap();
            let counted = registers::peak(&body).unwrap();
            assert_eq!(counted, plan.registers, "{} of {name}", plan.entry);
            assert!(counted <= REGISTER_LIMIT, "{counted} registers: {} of {name}", plan.entry);
            let dim = row.case.shape.dim_qk.max(row.case.shape.dim_v);
            let mut all = registers.lock().unwrap();
            let most = all.entry(plan.entry).or_default().entry(row.case.dtype.to_string()).or_default().entry(dim).or_default();
            *most = counted.max(*most);
            drop(all);
            let [buffers, tiles] = Toolchain::slots(&arguments);
            assert_eq!(buffers, plan.buffers.iter().map(|b| b.slot).collect::<Vec<_>>(), "{} of {name}", plan.entry);
            assert_eq!(tiles, (0..plan.threadgroup.len() as u32).collect::<Vec<_>>(), "{} of {name}", plan.entry);
            toolchain.check_spaces(&plan).unwrap_or_else(|e| panic!("{} of {name}: {e}", plan.entry));
        }
    });
    print(&registers.into_inner().unwrap());
    let tiled = Row { kernels: Kernels::Tiled, ..first };
    for (from, to) in [
        ("const threadgroup Element* own_q = q_tile", "const device Element* own_q = q_tile"),
        ("threadgroup Element* tile, const device Element* from", "threadgroup Element* tile, const threadgroup Element* from"),
        ("    device Element* out = o", "    Element* out = o"),
    ] {
        let mut plan = plans(&tiled).remove(0);
        plan.source = plan.source.replace("    threadgroup Element* tile, const", "(threadgroup Element* tile, const");
        plan.source = plan.source.replace("(\n(threadgroup", "(threadgroup");
        assert!(plan.source.contains(from), "{from}");
        plan.source = plan.source.replacen(from, to, 1);
        let said = toolchain.check_spaces(&plan).unwrap_err();
        assert!(said.replace('_', " ").contains("address space"), "{said}");
    }
    say(&format!("address spaces {NAME}: {} sources hold", checked.into_inner().unwrap().len()));
}

#[test]
fn threadgroup_memory_has_its_limit() {
    let Some(toolchain) = emulation("the limit of threadgroup memory") else { return };
    let rows = table_rows(false);
    let mut plan = plans(&rows[0]).remove(0);
    let program = toolchain.program(&plan).unwrap();
    let others: usize = plan.threadgroup[1..].iter().map(|(_, bytes)| bytes).sum();
    plan.threadgroup[0].1 = THREADGROUP_BYTES - others + 16;
    let buffers = vec![vec![0; 1 << 16]; plan.buffers.len()];
    let said = program.run(&Job { plan: &plan, buffers: &buffers, seed: 1 }).unwrap_err();
    assert!(said.contains("threadgroup memory: 32768 is the limit"), "{said}");
}

/// Offsets need 64 bits, and no test has tensors so large that it shows.
#[test]
fn strides_that_are_too_narrow_do_not_compile() {
    let Some(toolchain) = emulation("strides") else { return };
    let forward = &Case::all().unwrap()[0];
    let narrow = [
        ("a stride", "const device Element* from, long stride", "const device Element* from, int stride"),
        ("a row of stats", "const long place = stats_place(", "const int place = stats_place("),
    ];
    for (name, from, to) in narrow {
        let mutated = |from, to| Emulated::new(toolchain.clone(), 1).forced(Kernels::Tiled).mutated(from, to).executor();
        let problem = forward.spec().unwrap().with_stats().validate().unwrap();
        mutated(from, from).prepare(&problem).unwrap();
        let said = mutated(from, to).prepare(&problem).err().map(|e| e.to_string());
        assert!(said.as_ref().is_some_and(|said| said.contains("shorten-64-to-32")), "{name}: {said:?}");
    }
}
