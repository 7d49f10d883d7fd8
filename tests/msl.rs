//! Metal kernels, emulated, against the oracle.

use conformance::case::Case;
use conformance::golden::repository;
use conformance::msl::mutations::{BACKWARD, FORWARD, Mutation};
use conformance::msl::{Check, Emulated, Job, Toolchain, table};
use conformance::random::Random;
use conformance::runner::{Draw, Outcome, Source, Tally, random_backward, random_spec, run, run_backward, run_backward_case, run_case};
use conformance::say::{say, skip};
use half::{bf16, f16};
use metal_fallback::{Captured, Kernels, Plan, THREADGROUP_BYTES};
use sdpa::exec::metal::{backward, forward};
use sdpa::expr::{Axis, Binary, Builder, Kind, NodeId, Place, Precision, Trace, Type, Unary};
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

/// A case, and the kernels that it is given to where those are not the planner's choice.
type Forced = (Case, Option<Kernels>);

fn all_wanted() -> bool {
    std::env::var("SDPA_MSL").is_ok_and(|what| what == "all")
}

/// Cases on the kernels that the planner takes; with few queries, which all kernels are for, on all of them, and so every case where
/// everything is wanted.
fn planned_and_forced(cases: Vec<Case>, kernels: &[Kernels]) -> Vec<Forced> {
    let few = |case: &Case| all_wanted() || case.shape.seq_q <= 8;
    let forced = |case: &Case| kernels.iter().filter(|_| few(case)).map(|k| (case.clone(), Some(*k))).collect::<Vec<_>>();
    cases.iter().flat_map(|case| if few(case) { forced(case) } else { vec![(case.clone(), None)] }).collect()
}

fn emulated(toolchain: &Toolchain, (case, kernels): &Forced) -> Emulated {
    let emulated = Emulated::new(toolchain.clone(), case.seed());
    kernels.map_or(emulated.clone(), |kernels| emulated.forced(kernels))
}

fn name((case, kernels): &Forced) -> String {
    kernels.map_or(case.name.clone(), |kernels| format!("{}, {kernels:?}", case.name))
}

/// Every case but those whose limits the kernels document.
fn run_all(what: &str, cases: &[Forced]) {
    let Some(toolchain) = emulation(&format!("all {} {what} cases", cases.len())) else { return };
    run_all_with(what, cases, &toolchain);
}

fn run_all_with(what: &str, cases: &[Forced], toolchain: &Toolchain) {
    let tally = Mutex::new(Tally::default());
    side_by_side(cases, |forced| {
        let (case, emulated) = (&forced.0, emulated(toolchain, forced));
        let declined = || case.spec().unwrap().validate().is_ok_and(|problem| emulated.supports(&problem).is_err());
        let outcome: Outcome = run_case(case, &emulated).skip_only_if(declined, || case.repro(emulated.name()));
        tally.lock().unwrap().add(NAME, &name(forced), &outcome);
    });
    judge(what, tally);
}

/// The same of backward passes, alone and chained to the kernels' own forward pass.
fn run_all_backward(what: &str, cases: &[Forced], sources: &[Source]) {
    let Some(toolchain) = emulation(&format!("all {} {what} cases", cases.len())) else { return };
    run_all_backward_with(what, cases, sources, &toolchain);
}

fn run_all_backward_with(what: &str, cases: &[Forced], sources: &[Source], toolchain: &Toolchain) {
    let tally = Mutex::new(Tally::default());
    let runs: Vec<(&Forced, Source)> = cases.iter().flat_map(|case| sources.iter().map(move |source| (case, *source))).collect();
    side_by_side(&runs, |&(forced, source)| {
        let (case, emulated) = (&forced.0, emulated(toolchain, forced));
        let declined = || {
            let problem = case.backward_spec().unwrap().validate();
            problem.is_ok_and(|problem| emulated.supports_backward(&problem).is_err())
        };
        let outcome = run_backward_case(case, source, &emulated).skip_only_if(declined, || case.backward_repro(emulated.name()));
        tally.lock().unwrap().add(NAME, &format!("{}{}", name(forced), source.suffix()), &outcome);
    });
    judge(what, tally);
}

fn judge(what: &str, tally: Mutex<Tally>) {
    let tally = tally.into_inner().unwrap();
    say(&format!("{what} {}", tally.summary(NAME)));
    assert_eq!(tally.failed, 0, "cases failed");
    assert!(tally.passed > 0, "no case ran");
}

/// Kernels of a backward pass.
const BACKWARD_KERNELS: [Kernels; 2] = [Kernels::Tiled, Kernels::Vector];

#[test]
fn forward_cases() {
    run_all("forward", &planned_and_forced(Case::all().unwrap(), &Kernels::ALL));
}

#[test]
fn score_mod_cases() {
    run_all("score_mod", &planned_and_forced(Case::all_library().unwrap(), &Kernels::ALL));
}

#[test]
fn backward_cases() {
    run_all_backward("backward", &planned_and_forced(Case::all_backward().unwrap(), &BACKWARD_KERNELS), &Source::ALL);
}

#[test]
fn backward_score_mod_cases() {
    run_all_backward("backward score_mod", &planned_and_forced(Case::all_library().unwrap(), &BACKWARD_KERNELS), &Source::ALL);
}

fn table_rows(all: bool) -> Vec<Forced> {
    table::rows(all).unwrap().into_iter().map(|row| (row.case, Some(row.kernels))).collect()
}

/// A backward pass has no parts: in a product those rows are those of the vector kernels.
fn backward_table_rows(all: bool) -> Vec<Forced> {
    table_rows(all).into_iter().filter(|(_, kernels)| !all || *kernels != Some(Kernels::Parts)).collect()
}

/// Every type, dim, mask, score_mod and kernel; any two meet, or with `SDPA_MSL=all` all of them.
#[test]
fn table_of_types_dims_masks_and_score_mods() {
    run_all("table", &table_rows(all_wanted()));
}

#[test]
fn backward_table_of_types_dims_masks_and_score_mods() {
    run_all_backward("backward table", &backward_table_rows(all_wanted()), &[Source::Oracle]);
}

/// Cases for the checks that are slow: every mask, type, kernel and size of tiles, and a key head that several query heads read.
const FEW: usize = 12;

#[test]
fn sanitizers_find_nothing() {
    let rows = table_rows(false);
    let every = rows.len() / FEW;
    let few: Vec<Forced> = rows.into_iter().step_by(every).collect();
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
    let mut plans = Vec::new();
    for kernels in Kernels::ALL {
        plans.extend(forward(&problem).plan_with(kernels).unwrap().plans);
    }
    for kernels in [Kernels::Tiled, Kernels::Vector] {
        plans.extend(backward(&gradient).plan_with(kernels).unwrap().plans);
    }
    plans
}

#[test]
fn sources_bind_what_plans_say_and_pointers_stay_in_their_address_spaces() {
    let cases: Vec<Case> = table_rows(false).into_iter().map(|(case, _)| case).collect();
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

/// Makes a value of two floats and two whole numbers.
type Make<'a> = dyn Fn(&mut Builder, [NodeId; 2], [NodeId; 2]) -> NodeId + 'a;

/// Each function of an expression, of each type of operands: the second root of a trace, as a float.
fn functions() -> Vec<(String, Trace)> {
    let mut all = Vec::new();
    let mut add = |name: String, make: &Make<'_>| {
        let mut b = Builder::new();
        let floats = [b.score(), b.upstream()];
        let wholes = [b.index(Axis::Q), b.index(Axis::K)];
        let value = make(&mut b, floats, wholes);
        let value = match b.ty(value) {
            Type::F32 => value,
            Type::I32 => b.unary(Unary::ToF32, value),
            Type::Bool => {
                let [one, zero] = [1.0, 0.0].map(|x| b.f32(x));
                b.select(value, one, zero)
            }
        };
        all.push((name, b.finish(&[floats[0], value]).unwrap()));
    };
    let truths = |b: &mut Builder, [x, y]: [NodeId; 2]| {
        let zero = b.f32(0.0);
        [x, y].map(|x| b.binary(Binary::Gt, x, zero))
    };
    for &f in Unary::ALL {
        match f.kind() {
            Kind::Number | Kind::Compare => {
                add(format!("{f:?} of f32"), &|b, [x, _], _| b.unary(f, x));
                add(format!("{f:?} of i32"), &|b, _, [x, _]| b.unary(f, x));
            }
            Kind::Real | Kind::Cast(Type::F32, _) => add(format!("{f:?}"), &|b, [x, _], _| b.unary(f, x)),
            Kind::Cast(..) => add(format!("{f:?}"), &|b, _, [x, _]| b.unary(f, x)),
            Kind::Logic => add(format!("{f:?}"), &|b, xs, _| {
                let [x, _] = truths(b, xs);
                b.unary(f, x)
            }),
        }
    }
    for &f in Binary::ALL {
        match f.kind() {
            Kind::Number | Kind::Compare => {
                add(format!("{f:?} of f32"), &|b, [x, y], _| b.binary(f, x, y));
                add(format!("{f:?} of i32"), &|b, _, [x, y]| b.binary(f, x, y));
            }
            Kind::Real | Kind::Cast(..) => add(format!("{f:?}"), &|b, [x, y], _| b.binary(f, x, y)),
            Kind::Logic => add(format!("{f:?}"), &|b, xs, _| {
                let [x, y] = truths(b, xs);
                b.binary(f, x, y)
            }),
        }
    }
    all
}

const FLOATS: [f32; 17] =
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.75, 1e-3, -0.3, 2.9, 5.5, 20.0, 1e10, -3e9, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
const WHOLES: [i32; 9] = [0, 1, -1, 2, -7, 5, 1 << 20, i32::MAX, i32::MIN];

/// Functions as MSL against their definition, at the edges too.
#[test]
fn functions_mean_what_the_interpreter_says() {
    let functions = functions();
    let Some(toolchain) = emulation(&format!("{} functions", functions.len())) else { return };
    let pieces = std::fs::read_to_string(repository("metal-fallback/kernels/expression.metal")).unwrap();
    let mut text = "#include <stdio.h>\n#include <metal_stdlib>\nusing namespace metal;\nstruct Captured {};\n\
                    struct Place { int batch; int head; int query; int key; };\n\
                    void machine::fail(const char*, ...) { __builtin_trap(); }\n"
        .to_owned();
    text.push_str(&pieces);
    let mut calls = String::new();
    for (n, (_, trace)) in functions.iter().enumerate() {
        let emitted = Captured::of([trace], [1; 4]).gradient(trace, 1);
        text.push_str(&emitted.replace("score_mod_gradient", &format!("function_{n}")));
        calls.push_str(&format!("    show(function_{n});\n"));
    }
    let list = |bits: &[u32]| bits.iter().map(|x| format!("{x:#x}u")).collect::<Vec<_>>().join(", ");
    let (floats, wholes) = (FLOATS.map(f32::to_bits), WHOLES.map(i32::cast_unsigned));
    text.push_str(&format!(
        "static const uint floats[] = {{{}}};\nstatic const uint wholes[] = {{{}}};\n\
         template <typename F> static void show(F f) {{\n    for (uint x : floats) for (uint y : floats) for (uint n : wholes) for (uint m : wholes)\n\
         \x20       if ((x == floats[0] && y == floats[0]) || (n == wholes[0] && m == wholes[0]))\n\
         \x20           printf(\"%x\\n\", as_type<uint>(f(as_type<float>(x), as_type<float>(y), Place{{0, 0, as_type<int>(n), as_type<int>(m)}}, Captured{{}})));\n}}\n\
         int main() {{\n{calls}}}\n",
        list(&floats),
        list(&wholes)
    ));
    let said = toolchain.print(&text).unwrap();
    let mut said = said.lines().map(|line| f32::from_bits(u32::from_str_radix(line, 16).unwrap()));
    let mut wrong = Vec::new();
    for (name, trace) in &functions {
        for (x, y, n, m) in FLOATS.into_iter().flat_map(|x| {
            FLOATS.into_iter().flat_map(move |y| WHOLES.into_iter().flat_map(move |n| WHOLES.into_iter().map(move |m| (x, y, n, m))))
        }) {
            let zero = x.to_bits() == 0 && y.to_bits() == 0;
            if !zero && (n, m) != (0, 0) {
                continue;
            }
            let index = [0, 0, i64::from(n), i64::from(m)];
            let at = Place { score: x.into(), upstream: y.into(), index, extents: [1; 4], params: &[] };
            let want = trace.eval(&at, Precision::F32)[1] as f32;
            let got = said.next().unwrap();
            let near = (got - want).abs() <= 1e-6 * want.abs();
            if !(got == want || near || (got.is_nan() && want.is_nan())) {
                wrong.push(format!("{name} at {x:?} {y:?} {n} {m}: {got:?}, not {want:?}"));
            }
        }
    }
    assert!(said.next().is_none());
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong[..wrong.len().min(30)].join("\n"));
}
