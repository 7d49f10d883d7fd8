//! Simulates causal attention in bf16, of head dim 128, over several H200s.
//!
//!     cargo run -p sdpa-parallel --example simulate [-- RESULTS]
//!
//! It prints times of 2, 4 and 8 ranks, for each strategy with its usual sharding. With RESULTS, the output of `benches/several_gpus.py times`, it prints each
//! measured time with the simulated one instead. Rows whose partial results were f32 and rows of `auto` are counted as not simulated: the machine has no rates
//! for f32 operands, and the choice need not be that of the measured version.

use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
use sdpa_parallel::{Machine, ParallelProblem, ParallelSpec, Pass, Sharding, Simulation, Strategy};
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn problem(heads: [i64; 2], tokens: i64, ranks: usize, strategy: Strategy, sharding: Sharding, both: bool) -> Result<ParallelProblem> {
    let shape = Shape { batch: 1, heads_q: heads[0], heads_kv: heads[1], seq_q: tokens, seq_kv: tokens, dim_qk: 128, dim_v: 128 };
    let attention = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal()).with_stats();
    let spec = ParallelSpec::new(attention, ranks).strategy(strategy).sharding(sharding);
    Ok(if both { spec.with_backward() } else { spec }.validate()?)
}

fn simulated(problem: &ParallelProblem) -> Result<Simulation> {
    Ok(problem.simulate(&Machine::h200())?)
}

fn predictions() -> Result<()> {
    println!("Simulated by Machine::h200(): causal, 32 query and 8 KV heads, head dim 128, bf16. Times of the slowest rank.");
    for ranks in [2, 4, 8] {
        println!(
            "\n| {ranks} ranks: tokens of each | strategy, sharding | forward ms | of ideal | exposed ms | both passes ms | of ideal | exposed ms |"
        );
        println!("|---:|---|---:|---:|---:|---:|---:|---:|");
        for thousands in [8, 16, 32, 64] {
            let gather = Strategy::AllGather { head_groups: 1 };
            let mut strategies = vec![(gather, Sharding::Zigzag), (Strategy::HeadExchange, Sharding::Contiguous)];
            strategies.extend((ranks > 2).then_some((Strategy::Grid { heads: 2 }, Sharding::Zigzag)));
            strategies.push((Strategy::Ring, Sharding::Zigzag));
            for (strategy, sharding) in strategies {
                let mut row = format!("| {thousands}k | {strategy}, {} |", format!("{sharding:?}").to_lowercase());
                for both in [false, true] {
                    let problem = problem([32, 8], thousands * 1024 * ranks, ranks as usize, strategy, sharding.clone(), both)?;
                    let found = simulated(&problem)?;
                    let exposed = found.ranks.iter().map(|rank| rank.exposed).fold(0.0, f64::max);
                    row += &format!(" {:.1} | {:.2} | {:.1} |", found.time() * 1e3, found.of_ideal(), exposed * 1e3);
                }
                println!("{row}");
            }
        }
    }
    Ok(())
}

/// The problem of a table: the heads, tokens and ranks in its first cell, such as `GQA, 32/8 heads, 16384 tokens on 2 ranks`.
fn header(cell: &str) -> Option<([i64; 2], i64, usize)> {
    let (_, rest) = cell.split_once(", ")?;
    let (heads, rest) = rest.split_once(" heads, ")?;
    let (tokens, rest) = rest.split_once(" tokens on ")?;
    let (q, kv) = heads.split_once('/')?;
    Some(([q.parse().ok()?, kv.parse().ok()?], tokens.parse().ok()?, rest.split_once(' ')?.0.parse().ok()?))
}

fn strategy(name: &str) -> Option<Strategy> {
    match name {
        "all_gather" => Some(Strategy::AllGather { head_groups: 1 }),
        "head_exchange" => Some(Strategy::HeadExchange),
        "ring" => Some(Strategy::Ring),
        _ => None,
    }
}

fn comparison(results: &str) -> Result<()> {
    println!("| run | heads | tokens of both | strategy, sharding | forward ms | simulated | error | both passes ms | simulated | error |");
    println!("|---:|---|---:|---|---:|---:|---:|---:|---:|---:|");
    let (mut run, mut in_f32, mut of, mut left) = (0, false, None, 0);
    for line in results.lines() {
        if line.starts_with("## ") && line.contains(" times ") {
            (run, in_f32) = (run + 1, line.contains("partial results in f32"));
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let Some(name) = cells.get(1) else { continue };
        of = header(name).or(of);
        let Some((heads, tokens, ranks)) = of else { continue };
        let words: Vec<&str> = name.split(' ').collect();
        let (alone, named) = match words[..] {
            ["one", "GPU,", "sdpa"] => (true, Some((Strategy::AllGather { head_groups: 1 }, "contiguous"))),
            ["sdpa", name, sharding] => (false, strategy(name).map(|strategy| (strategy, sharding))),
            _ => continue,
        };
        let Some((strategy, sharding)) = named else {
            left += 2;
            continue;
        };
        let told = if alone { "one GPU".to_owned() } else { format!("{strategy}, {sharding}") };
        let mut row = format!("| {run} | {}/{} | {tokens} | {told} |", heads[0], heads[1]);
        for (cell, both) in [(2, false), (4, true)] {
            let measured: f64 = cells.get(cell).ok_or("a row without times")?.parse()?;
            let sharding = if sharding == "zigzag" { Sharding::Zigzag } else { Sharding::Contiguous };
            let problem = problem(heads, tokens, ranks, strategy, sharding, both)?;
            let is_partial = |pass| (0..ranks).any(|rank| problem.schedule(rank, pass).attends().any(|attend| attend.partial));
            if !alone && in_f32 && (is_partial(Pass::Forward) || (both && is_partial(Pass::Backward))) {
                (left, row) = (left + 1, row + " | | |");
                continue;
            }
            let found = simulated(&problem)?;
            let time = if alone { found.alone } else { found.time() } * 1e3;
            row += &format!(" {measured:.1} | {time:.1} | {:+.0} % |", (time / measured - 1.0) * 100.0);
        }
        // A row of empty cells says nothing.
        if row.contains('%') {
            println!("{row}");
        }
    }
    println!("\nnot simulated: {left} times");
    Ok(())
}

fn main() -> Result<()> {
    match std::env::args().nth(1) {
        Some(path) => comparison(&std::fs::read_to_string(path)?),
        None => predictions(),
    }
}
