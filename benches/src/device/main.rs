//! Everything that needs a GPU, in one binary that travels: it needs a driver and a cuDNN, nothing else.

mod arena;
mod buckets;
mod communicators;
mod cuda;
mod cuda_large;
mod cuda_matrix;
mod cuda_portable;
mod cuda_repeat;
mod cuda_speed;
#[cfg(not(target_vendor = "apple"))]
mod cudarc;
mod decode;
mod edges;
mod files;
mod first;
mod fixed;
mod fp8;
mod gpus;
mod graphs;
mod growth;
mod host;
mod lengths;
mod limits;
mod memory;
mod msl;
mod operations;
mod packed;
mod plans;
mod prove;
mod ranks;
mod resample;
mod scaling;
mod setup;
#[cfg(not(target_vendor = "apple"))]
mod slices;
mod soak;
mod speed;
mod stack;
mod startup;
mod suite;
mod threads;
mod time;
mod tuned;
mod turns;
mod weight;

use cudnn_graph::Policy;
use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "device, and one of
  right:  suite [RANDOM [random|trees|packed|paged|sinks|ends|dropout|pieces|fp8 [FIRST [composite|unified]]]] | cudarc | plans | files [PLANS] | graphs [alone] | gpus | communicators [ROUNDS] | ranks [PROBLEMS [FIRST [captured]]] | tuned | buckets [CALLS] | soak [CALLS [SHAPES]]
          | limits [strides | large | all [cuda]] | lengths [right] | edges [RULES [FIRST]]
          | packed [PROBLEMS] | decode [STEPS] | cuda [RANDOM [cases|packed|few|paged|library|random|ends|trees|gradients|gradients-library|gradients-random|portable [FIRST]]] | cuda-repeat [LAUNCHES [NAME]] | cuda-large [LAUNCHES] | fixed [RANDOM [FIRST]] | fixed invariant [NAME]
          | prove cpu|cuda|cuda-mma|cudnn|auto [two|three|ledger [FOLDER [PROBLEM]]] | rows two|three|ledger FOLDER PROFILE DEVICE (without a GPU) | threads [SECONDS] | operations [PROBLEMS [FIRST [PROFILE [faulty] [dynamic]]]] (with a profile such as h200: plans only, without a GPU; - for none; faulty: with engines that have known faults; dynamic: with dynamic shapes, each problem at two extents) | resample [PROFILE] | msl [long | few | all | 3/40]
  fast:   fixed backward|forward [TEXT OF A ROW'S NAME]... | ranks times [TOKENS [ROW [captured]]] | cuda-speed [families | backward] [ROWS] | cuda-few | cuda-cuts | cuda-matrix [PROBLEMS [FIRST]] | speed | speed-backward | speed-fp8 [turns] | short | host | loads | scaling | weight | growth | startup [PLANS]
          | first [PROBLEMS [small]]
          | stack BATCH SEQ
          | time (JSON lines in and out)
  said:   version (of cuDNN)";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |n: usize, default: u64| args.get(n).and_then(|a| a.parse().ok()).unwrap_or(default);
    let result = match args.first().map(String::as_str) {
        Some("suite") if let Some(name) = args.get(2) => match (suite::Part::named(name), args.get(3)) {
            (Some(part), Some(_)) => suite::drawn(part, number(3, 0)..number(3, 0) + number(1, 200), args.get(4).map(String::as_str)),
            (Some(part), None) => suite::part(part, number(1, 200)),
            (None, _) => Err(USAGE.into()),
        },
        Some("suite") => suite::run(number(1, 200)),
        Some("speed") => speed::run(),
        Some("speed-backward") => speed::backward(),
        Some("speed-fp8") if args.get(1).map(String::as_str) == Some("turns") => fp8::turns(),
        Some("speed-fp8") => speed::fp8().and_then(|()| fp8::turns()),
        Some("short") => speed::short(),
        Some("host") => host::run(),
        #[cfg(not(target_vendor = "apple"))]
        Some("cudarc") => cudarc::run(),
        Some("cuda") => cuda::run(number(1, 200), args.get(2).map(String::as_str), number(3, 0)),
        Some("cuda-speed") if args.get(1).map(String::as_str) == Some("families") => cuda_speed::families(),
        Some("cuda-speed") if args.get(1).map(String::as_str) == Some("backward") => cuda_speed::speed(true, number(2, u64::MAX)),
        Some("cuda-speed") => cuda_speed::speed(false, number(1, u64::MAX)),
        Some("cuda-repeat") => cuda_repeat::run(number(1, 10_000), args.get(2).map_or("", String::as_str)),
        Some("cuda-large") => cuda_large::run(number(1, 3)),
        Some("fixed") => match args.get(1).map(String::as_str) {
            Some("invariant") => fixed::invariant(args.get(2).map_or("", String::as_str)),
            Some("backward") => fixed::backward_speed(args.get(2..).unwrap_or_default()),
            Some("forward") => fixed::forward_speed(args.get(2..).unwrap_or_default()),
            Some(_) | None => fixed::right(number(1, 20), number(2, 0)),
        },
        Some("cuda-few") => cuda_speed::few(),
        Some("cuda-matrix") => cuda_matrix::run(number(1, 400), number(2, 0)),
        Some("cuda-cuts") => cuda_speed::cuts(),
        Some("plans") => plans::run(),
        Some("prove") => {
            let text = |n: usize, default| args.get(n).map_or(default, String::as_str);
            prove::run(text(1, ""), text(2, "two"), Path::new(text(3, "proof")), args.get(4).map(String::as_str))
        }
        Some("rows") => match &args[1..] {
            [strength, folder, profile, device] => prove::rows(strength, Path::new(folder), Path::new(profile), device),
            _ => Err(USAGE.into()),
        },
        Some("prove-worker") => prove::worker(args.get(1).map_or("", String::as_str)),
        Some("version") => files::version(),
        Some("first") => first::run(number(1, u64::MAX) as usize, args.get(2).map(String::as_str) == Some("small")),
        Some("first-worker") => {
            let text = |n: usize| args.get(n).map_or("", String::as_str);
            first::worker(text(1), text(2), text(3))
        }
        Some("files") => files::run(args.get(1).map(String::as_str)),
        Some("loads") => files::loads(),
        Some("msl") => msl::run(args.get(1).map(String::as_str)),
        Some("scaling") => scaling::run(),
        Some("weight") => weight::run(),
        Some("tuned") => tuned::run(),
        Some("gpus") => gpus::run(),
        Some("ranks") if args.get(1).map(String::as_str) == Some("times") => {
            let has = |word: &str| args.iter().any(|arg| arg == word);
            ranks::times::run(number(2, 32_768).cast_signed(), args.get(3).map_or("", String::as_str), has("captured"))
        }
        Some("ranks") => ranks::right(number(1, 100), number(2, 0), args.get(3).map(String::as_str) == Some("captured")),
        Some("communicators") => communicators::run(number(1, 100)),
        Some("graphs") => graphs::run(args.get(1).map(String::as_str) == Some("alone")),
        Some("buckets") => buckets::run(number(1, 60)),
        Some("lengths") => lengths::run(args.get(1).map(String::as_str) != Some("right")),
        Some("limits") => limits::run(args.get(1).map_or("", String::as_str), args.get(2).is_some_and(|of| of == "cuda")),
        Some("edges") => edges::run(&(number(2, 1)..number(2, 1) + number(1, 100))),
        Some("operations") => {
            let said = |word: &str| args.iter().skip(4).any(|arg| arg == word);
            let policy = Policy::default().with_known_faults(said("faulty")).with_dynamic_shapes(said("dynamic"));
            operations::run(number(1, 600), number(2, 0), args.get(3).map(String::as_str).filter(|name| *name != "-"), &policy)
        }
        Some("resample") => resample::run(args.get(1).map(String::as_str)),
        Some("packed") => packed::run(number(1, 40)),
        Some("decode") => decode::run(number(1, 100)),
        Some("growth") => growth::run(),
        Some("startup") => startup::run(args.get(1).map(String::as_str)),
        Some("soak") => soak::run(number(1, 10_000), number(2, 1_000)),
        Some("stack") => stack::run(number(1, 4), number(2, 2048)),
        Some("time") => time::run(),
        Some("threads") => threads::run(number(1, 60)),
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            println!("FAILED: {e}");
            ExitCode::FAILURE
        }
    }
}
