//! Metal kernels, emulated, against the oracle.

use conformance::case::Case;
use conformance::msl::mutations::{BACKWARD, FORWARD, Mutation};
use conformance::msl::{Check, Emulated, Job, Toolchain, table};
use conformance::random::Random;
use conformance::runner::{Draw, Outcome, Source, Tally, random_backward, random_spec, run, run_backward, run_backward_case, run_case};
use conformance::say::{say, skip};
use half::{bf16, f16};
use metal_fallback::{Plan, THREADGROUP_BYTES};
use sdpa::exec::metal::{backward, forward};
use sdpa::{DType, Executor};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const NAME: &str = "metal-emulated";

fn emulation(what: &str) -> Option<Toolchain> {
    Toolchain::find().map_err(|why| skip("msl", &format!("{what}: {why}"))).ok()
}

/// Runs a list on a thread for each core.
fn side_by_side<T: Sync>(list: &[T], run: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(item) = list.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run(item);
                }
            });
        }
    });
}

/// Every case but those whose limits the kernels document.
fn run_all(what: &str, cases: &[Case]) {
    let Some(toolchain) = emulation(&format!("all {} {what} cases", cases.len())) else { return };
    run_all_with(what, cases, &toolchain);
}

fn run_all_with(what: &str, cases: &[Case], toolchain: &Toolchain) {
    let tally = Mutex::new(Tally::default());
    side_by_side(cases, |case| {
        let emulated = Emulated::new(toolchain.clone(), case.seed());
        let declined = || case.spec().unwrap().validate().is_ok_and(|problem| emulated.supports(&problem).is_err());
        let outcome: Outcome = run_case(case, &emulated).skip_only_if(declined, || case.repro(emulated.name()));
        tally.lock().unwrap().add(NAME, &case.name, &outcome);
    });
    judge(what, tally);
}

/// The same of backward passes, alone and chained to the kernels' own forward pass.
fn run_all_backward(what: &str, cases: &[Case]) {
    let Some(toolchain) = emulation(&format!("all {} {what} cases", cases.len())) else { return };
    run_all_backward_with(what, cases, &Source::ALL, &toolchain);
}

fn run_all_backward_with(what: &str, cases: &[Case], sources: &[Source], toolchain: &Toolchain) {
    let tally = Mutex::new(Tally::default());
    let runs: Vec<(&Case, Source)> = cases.iter().flat_map(|case| sources.iter().map(move |source| (case, *source))).collect();
    side_by_side(&runs, |&(case, source)| {
        let emulated = Emulated::new(toolchain.clone(), case.seed());
        let declined = || {
            let problem = case.backward_spec().unwrap().validate();
            problem.is_ok_and(|problem| emulated.supports_backward(&problem).is_err())
        };
        let outcome = run_backward_case(case, source, &emulated).skip_only_if(declined, || case.backward_repro(emulated.name()));
        tally.lock().unwrap().add(NAME, &format!("{}{}", case.name, source.suffix()), &outcome);
    });
    judge(what, tally);
}

fn judge(what: &str, tally: Mutex<Tally>) {
    let tally = tally.into_inner().unwrap();
    say(&format!("{what} {}", tally.summary(NAME)));
    assert_eq!(tally.failed, 0, "cases failed");
    assert!(tally.passed > 0, "no case ran");
}

#[test]
fn forward_cases() {
    run_all("forward", &Case::all().unwrap());
}

#[test]
fn score_mod_cases() {
    run_all("score_mod", &Case::all_library().unwrap());
}

#[test]
fn backward_cases() {
    run_all_backward("backward", &Case::all_backward().unwrap());
}

#[test]
fn backward_score_mod_cases() {
    run_all_backward("backward score_mod", &Case::all_library().unwrap());
}

/// Every type, dim, mask and score_mod; any two meet, or with `SDPA_MSL=all` all of them.
#[test]
fn table_of_types_dims_masks_and_score_mods() {
    let all = std::env::var("SDPA_MSL").is_ok_and(|what| what == "all");
    let cases = table::cases(all).unwrap();
    run_all("table", &cases);
}

#[test]
fn backward_table_of_types_dims_masks_and_score_mods() {
    let all = std::env::var("SDPA_MSL").is_ok_and(|what| what == "all");
    let cases = table::cases(all).unwrap();
    let Some(toolchain) = emulation(&format!("all {} backward table cases", cases.len())) else { return };
    run_all_backward_with("backward table", &cases, &[Source::Oracle], &toolchain);
}

/// Cases for the checks that are slow: every mask, type and size of tiles, and a key head that several query heads read.
const FEW: usize = 12;

#[test]
fn sanitizers_find_nothing() {
    let cases = table::cases(false).unwrap();
    let few: Vec<Case> = cases.into_iter().step_by(140 / FEW).collect();
    let Some(toolchain) = emulation(&format!("{} cases with sanitizers", few.len())) else { return };
    for check in [Check::Races, Check::Addresses, Check::Memory] {
        run_all_with(&format!("{check:?}"), &few, &toolchain.with(check));
        run_all_backward_with(&format!("{check:?} backward"), &few, &[Source::Oracle], &toolchain.with(check));
    }
}

/// Two key heads with two query heads each; rows without keys, lengths, a tensor, dims off the fragments.
const SMALL: &str = r#"
[[case]]
name = "rows without keys"
shape = { batch = 2, heads_q = 4, heads_kv = 2, seq_q = 70, seq_kv = 41, dim_qk = 20, dim_v = 44 }
dtype = "f32"
mask = ["causal-bottom-right"]
score_mod = ["bias:hqk", "softcap:5"]
stats = true

[[case]]
name = "lengths"
shape = { batch = 6, heads_q = 4, heads_kv = 2, seq_q = 97, seq_kv = 70, dim_qk = 32, dim_v = 32 }
dtype = "f16"
mask = ["padding"]
stats = true
"#;

/// Which check finds a fault, and how.
fn caught(toolchain: &Toolchain, mutation: Mutation, backward: bool) -> Option<String> {
    for check in Check::ALL {
        for case in Case::parse(SMALL).unwrap() {
            let mutated = Emulated::new(toolchain.with(check), case.seed()).mutated(mutation);
            let how = if backward {
                match run_backward_case(&case, Source::Oracle, &mutated) {
                    Outcome::Fail(how) => how,
                    Outcome::Pass(..) | Outcome::Skip(_) => continue,
                }
            } else {
                match run_case(&case, &mutated) {
                    Outcome::Fail(how) => how,
                    Outcome::Pass(..) | Outcome::Skip(_) => continue,
                }
            };
            return Some(format!("{check:?}: {how}"));
        }
    }
    None
}

/// A fault must not be one for the compiler: that would show nothing of the checks.
#[test]
fn every_fault_is_found() {
    let faults: Vec<(Mutation, bool)> = FORWARD.iter().map(|m| (*m, false)).chain(BACKWARD.iter().map(|m| (*m, true))).collect();
    let Some(toolchain) = emulation(&format!("{} faults in kernels", faults.len())) else { return };
    let missed = Mutex::new(Vec::new());
    side_by_side(&faults, |&(mutation, backward)| {
        let how = caught(&toolchain, mutation, backward);
        let short = how.as_deref().map(|how| how.chars().take(300).collect::<String>().replace('\n', " "));
        println!("fault: {}; {}", mutation.name, short.as_deref().unwrap_or("nothing finds it"));
        if how.is_none_or(|how| how.contains("error: ")) {
            missed.lock().unwrap().push(mutation.name);
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found, or not compiled: {missed:?}");
    say(&format!("faults {NAME}: all of {} found", faults.len()));
}

/// The plans of every kernel of a case, forward and backward.
fn plans(case: &Case) -> Vec<Plan> {
    let problem = case.spec().unwrap().validate().unwrap();
    let gradient = case.backward_spec().unwrap().validate().unwrap();
    let mut plans = vec![forward(&problem).plan().unwrap()];
    plans.extend(backward(&gradient).unwrap().plan().unwrap());
    plans
}

#[test]
fn sources_bind_what_plans_say_and_pointers_stay_in_their_address_spaces() {
    let cases = table::cases(false).unwrap();
    let Some(toolchain) = emulation(&format!("address spaces of {} cases", cases.len())) else { return };
    let checked = AtomicUsize::new(0);
    side_by_side(&cases, |case| {
        for plan in plans(case) {
            let [buffers, tiles] = toolchain.slots(&plan).unwrap();
            assert_eq!(buffers, plan.buffers.iter().map(|b| b.slot).collect::<Vec<_>>(), "{} of {}", plan.entry, case.name);
            assert_eq!(tiles, (0..plan.threadgroup.len() as u32).collect::<Vec<_>>(), "{} of {}", plan.entry, case.name);
            toolchain.check_spaces(&plan).unwrap_or_else(|e| panic!("{} of {}: {e}", plan.entry, case.name));
            checked.fetch_add(1, Ordering::Relaxed);
        }
    });
    for (from, to) in [
        ("const threadgroup Element* own_q = q_tile", "const device Element* own_q = q_tile"),
        ("threadgroup Element* tile, const device Element* from", "threadgroup Element* tile, const threadgroup Element* from"),
        ("const device Element* k_rows = k", "const Element* k_rows = k"),
    ] {
        let mut plan = plans(&cases[0]).remove(0);
        plan.source = plan.source.replace("    threadgroup Element* tile, const", "(threadgroup Element* tile, const");
        plan.source = plan.source.replace("(\n(threadgroup", "(threadgroup");
        assert!(plan.source.contains(from), "{from}");
        plan.source = plan.source.replacen(from, to, 1);
        let said = toolchain.check_spaces(&plan).unwrap_err();
        assert!(said.contains("address space"), "{said}");
    }
    say(&format!("address spaces {NAME}: {} sources hold", checked.into_inner()));
}

/// Random strides, lengths, heads and masks.
#[test]
fn random_problems() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, n) = (number("SDPA_SEED").unwrap_or(1), number("SDPA_CASES").unwrap_or(30));
    let Some(toolchain) = emulation(&format!("{n} random problems")) else { return };
    let tally = Mutex::new(Tally::default());
    let seeds: Vec<u64> = (first..first + n).collect();
    side_by_side(&seeds, |&seed| {
        let mut random = Random::new(seed);
        let emulated = Emulated::new(toolchain.clone(), seed);
        let dtypes = [DType::F32, DType::F16, DType::BF16];
        let name = format!("SDPA_SEED={seed}");
        let outcome = run(&random_spec(&mut random, &dtypes), None, 1.0, seed, &emulated);
        tally.lock().unwrap().add(NAME, &name, &outcome);
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        let outcome = run_backward(&random_backward(&mut random, &dtypes), &draw, Source::Oracle, &emulated);
        tally.lock().unwrap().add(NAME, &format!("{name}, backward"), &outcome);
    });
    judge("random", tally);
}

/// half and bfloat of the emulation against those of the crate `half`: every number widened, and narrowed what lies on it, between it
/// and the next, and next to that.
#[test]
fn numbers_round_as_they_should() {
    let Some(toolchain) = emulation("half and bfloat") else { return };
    let text = r#"
#include "numbers.h"
#include <stdio.h>
template <typename T>
static void all() {
    for (unsigned n = 0; n < 0x10000; n++) {
        T x, next;
        x.bits = uint16_t(n);
        next.bits = uint16_t(n + 1);
        const float middle = float(double(float(x)) / 2 + double(float(next)) / 2);
        const uint32_t bits = metal::bits_of(middle);
        const float tries[4] = {float(x), middle, metal::float_of(bits + 1), metal::float_of(bits - 1)};
        for (float f : tries) {
            printf("%08x %04x\n", metal::bits_of(f), T(f).bits);
        }
    }
}
int main() {
    all<half>();
    all<bfloat>();
}
"#;
    let said = toolchain.print(text).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 8 * 0x10000);
    for (n, line) in lines.iter().enumerate() {
        let (wide, narrow) = line.split_once(' ').unwrap();
        let wide = f32::from_bits(u32::from_str_radix(wide, 16).unwrap());
        let narrow = u16::from_str_radix(narrow, 16).unwrap();
        let number = (n / 4 % 0x10000) as u16;
        let (exact, rounded, is_nan) = if n < 4 * 0x10000 {
            (f16::from_bits(number).to_f32(), f16::from_f32(wide).to_bits(), f16::from_bits(narrow).is_nan())
        } else {
            (bf16::from_bits(number).to_f32(), bf16::from_f32(wide).to_bits(), bf16::from_bits(narrow).is_nan())
        };
        assert!(!n.is_multiple_of(4) || exact.to_bits() == wide.to_bits() || (exact.is_nan() && wide.is_nan()), "{line}: {exact}");
        assert!(rounded == narrow || (wide.is_nan() && is_nan), "{line}: {rounded:04x}");
    }
}

#[test]
fn threadgroup_memory_has_its_limit() {
    let Some(toolchain) = emulation("the limit of threadgroup memory") else { return };
    let mut plan = plans(&Case::parse(SMALL).unwrap()[0]).remove(0);
    let program = toolchain.program(&plan).unwrap();
    plan.threadgroup[0].1 = THREADGROUP_BYTES - plan.threadgroup[1].1 + 16;
    let buffers = vec![vec![0; 1 << 16]; plan.buffers.len()];
    let said = program.run(&Job { plan: &plan, buffers: &buffers, seed: 1 }).unwrap_err();
    assert!(said.contains("threadgroup memory: 32768 is the limit"), "{said}");
}
