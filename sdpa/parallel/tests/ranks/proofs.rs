//! Schedules, before anything runs.

use crate::case::{STRATEGIES, scattered, shardings};
use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
use sdpa_parallel::{Chunk, Machine, ParallelProblem, ParallelSpec, Pass, Schedule, Sharding, Step, Strategy, Tensor, prove};

fn all(problem: &ParallelProblem, pass: Pass) -> Vec<Schedule> {
    (0..problem.ranks()).map(|rank| problem.schedule(rank, pass)).collect()
}

fn spec(heads: [i64; 2], [seq_q, seq_kv]: [i64; 2], mask: &str) -> AttentionSpec {
    let shape = Shape { batch: 2, heads_q: heads[0], heads_kv: heads[1], seq_q, seq_kv, dim_qk: 8, dim_v: 16 };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats();
    if mask.is_empty() { spec } else { spec.mask(mask.parse().unwrap_or_else(|e| panic!("{mask}: {e}"))) }
}

#[test]
fn schedules_attend_to_every_pair_once_and_use_every_byte() {
    let masks = ["", "causal", "window:5,0", "window:3,2:bottom-right", "prefix-lm:9", "k >= q + 14"];
    let mut proven = [0; STRATEGIES.len()];
    for ranks in 1..=8 {
        for (n, strategy) in STRATEGIES.into_iter().enumerate() {
            for seq in [[17, 17], [16, 21]] {
                for (m, sharding) in shardings(ranks, 17).into_iter().enumerate() {
                    for (heads, mask) in [[8, 8], [8, 4], [8, 1], [9, 3]].into_iter().flat_map(|heads| masks.map(|mask| (heads, mask))) {
                        // Each number of ranks meets a third of the heads and masks with each strategy and sharding.
                        if !(ranks + m + mask.len() + heads[1] as usize).is_multiple_of(3) {
                            continue;
                        }
                        let spec =
                            ParallelSpec::new(spec(heads, seq, mask), ranks).sharding(sharding.clone()).strategy(strategy).with_backward();
                        let Ok(problem) = spec.validate() else { continue };
                        for pass in [Pass::Forward, Pass::Backward] {
                            prove(&problem, &all(&problem, pass))
                                .unwrap_or_else(|e| panic!("{ranks} {strategy} {sharding:?} {heads:?} {mask:?} {pass:?}: {e}"));
                            proven[n] += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(proven.iter().all(|n| *n > 40), "{proven:?}");
}

/// Lengths by which PyTorch divides tokens, which leave ranks with fewer or none.
#[test]
fn blocks_are_those_of_pytorch_and_their_schedules_are_proven() {
    for (seq, ranks, lengths) in
        [(10, 4, vec![3, 3, 3, 1]), (5, 4, vec![2, 2, 1, 0]), (8, 4, vec![2; 4]), (3, 1, vec![3]), (9, 6, vec![2, 2, 2, 2, 1, 0])]
    {
        let chunks = Sharding::Blocks.chunks(ranks, seq);
        let mut at = 0;
        for (chunks, len) in chunks.iter().zip(&lengths) {
            assert_eq!(*chunks, if *len == 0 { vec![] } else { vec![Chunk::new(at, 1, *len)] }, "{seq} {ranks}");
            at += len;
        }
        assert_eq!((chunks.len(), at), (ranks, seq));
        // Queries and keys of other lengths are divided by their own.
        for (strategy, seq_kv) in STRATEGIES.into_iter().flat_map(|strategy| [(strategy, seq), (strategy, seq + 3)]) {
            let spec = spec([8, 4], [seq, seq_kv], "window:3,2").with_stats();
            let Ok(problem) = ParallelSpec::new(spec, ranks).sharding(Sharding::Blocks).strategy(strategy).with_backward().validate()
            else {
                continue;
            };
            for pass in [Pass::Forward, Pass::Backward] {
                prove(&problem, &all(&problem, pass)).unwrap_or_else(|e| panic!("{ranks} {strategy} {seq} {seq_kv} {pass:?}: {e}"));
            }
        }
    }
}

/// Bytes sent per rank, by the formulas of each strategy for a mask that attends to everything: `k` bytes of one rank's keys and values, `q` of its queries.
#[test]
fn bytes_are_those_of_the_formulas() {
    let shape = Shape { batch: 1, heads_q: 8, heads_kv: 4, seq_q: 64, seq_kv: 64, dim_qk: 16, dim_v: 16 };
    let attention = AttentionSpec::dense(DType::BF16, shape, Layout::Sbhd);
    for ranks in [1, 2, 4] {
        let (p, n) = (ranks as u64, 64 / ranks as u64);
        let (q, k, stats) = (n * 8 * 16 * 2, 2 * n * 4 * 16 * 2, n * 8 * 4);
        let sent = |strategy: Strategy, pass: Pass| {
            let problem = ParallelSpec::new(attention.clone(), ranks).strategy(strategy).with_backward().validate().unwrap();
            let bytes: Vec<u64> = all(&problem, pass).iter().map(Schedule::bytes_sent).collect();
            assert!(bytes.iter().all(|n| *n == bytes[0]) && all(&problem, pass).iter().all(|s| s.bytes_received() == bytes[0]));
            bytes[0]
        };
        for strategy in [Strategy::AllGather { head_groups: 1 }, Strategy::AllGather { head_groups: 4 }, Strategy::Ring] {
            assert_eq!(
                [sent(strategy, Pass::Forward), sent(strategy, Pass::Backward)],
                [(p - 1) * k, 2 * (p - 1) * k],
                "{strategy} {ranks}"
            );
        }
        let exchanged = (p - 1) * (2 * q + k) / p;
        assert_eq!(sent(Strategy::HeadExchange, Pass::Forward), exchanged);
        assert_eq!(sent(Strategy::HeadExchange, Pass::Backward), 2 * exchanged + (p - 1) * stats / p);
        if ranks == 4 {
            assert_eq!(sent(Strategy::Grid { heads: 2 }, Pass::Forward), (2 * q + k) / 2 + k);
        }
    }
    // A halo sends the tokens of the window, and nothing else.
    let window = attention.mask("window:5,0".parse().unwrap());
    let problem = ParallelSpec::new(window, 4).strategy(Strategy::Halo).with_backward().validate().unwrap();
    let sent = |pass| all(&problem, pass).iter().map(Schedule::bytes_sent).collect::<Vec<_>>();
    let halo = 2 * 4 * 4 * 16 * 2;
    assert_eq!((sent(Pass::Forward), sent(Pass::Backward)), (vec![halo, halo, halo, 0], vec![halo, 2 * halo, 2 * halo, halo]));
}

#[test]
fn a_ring_needs_memory_for_two_blocks_and_a_gather_for_all() {
    let problem = |strategy| ParallelSpec::new(spec([8, 4], [64, 64], ""), 8).strategy(strategy).validate().unwrap();
    let block = 8 * 2 * 4 * (8 + 16) * 2;
    let merged = 8 * 2 * 8 * (16 + 2) * 4;
    assert_eq!(problem(Strategy::Ring).schedule(3, Pass::Forward).peak_bytes(), 2 * block + merged);
    assert_eq!(problem(Strategy::AllGather { head_groups: 1 }).schedule(3, Pass::Forward).peak_bytes(), 8 * block);
}

/// Causal masks: pruned blocks are not sent, and zigzag shards have equal work.
#[test]
fn causal_masks_are_balanced_by_zigzag_and_need_fewer_bytes() {
    let made = |sharding| {
        let spec =
            ParallelSpec::new(spec([8, 4], [64, 64], "causal"), 4).sharding(sharding).strategy(Strategy::AllGather { head_groups: 1 });
        all(&spec.validate().unwrap(), Pass::Forward)
    };
    let work = |schedule: &Schedule| {
        let pairs =
            |a: &sdpa_parallel::Attend| (0..a.q.len).map(|i| (0..a.k.len).filter(|j| a.k.at(*j) <= a.q.at(i)).count()).sum::<usize>();
        schedule.attends().map(pairs).sum::<usize>()
    };
    let contiguous = made(Sharding::Contiguous);
    assert_eq!(contiguous[0].bytes_received(), 0);
    assert!(contiguous[3].bytes_received() > 0 && work(&contiguous[3]) > 6 * work(&contiguous[0]));
    let zigzag: Vec<usize> = made(Sharding::Zigzag).iter().map(work).collect();
    assert!(zigzag.iter().all(|n| *n == zigzag[0]), "{zigzag:?}");
}

/// Each change makes schedules wrong in one way that a proof must notice.
#[test]
fn wrong_schedules_are_found() {
    let problem = |strategy| ParallelSpec::new(spec([8, 4], [16, 16], "causal"), 4).strategy(strategy).with_backward().validate().unwrap();
    let mut found = Vec::new();
    for strategy in [Strategy::AllGather { head_groups: 2 }, Strategy::HeadExchange, Strategy::Ring, Strategy::Grid { heads: 2 }] {
        for pass in [Pass::Forward, Pass::Backward] {
            let problem = problem(strategy);
            let good = all(&problem, pass);
            for n in 0..good[2].steps.len() {
                // Any step of a rank that is left out is missed, unless it is an exchange without transfers.
                let mut bad = good.clone();
                bad[2].steps.remove(n);
                found.push(prove(&problem, &bad).unwrap_err().what);
                let mut bad = good.clone();
                let changed = match &mut bad[2].steps[n] {
                    Step::Copy { chunk, .. } | Step::Add { chunk, .. } => {
                        chunk.start += 1;
                        true
                    }
                    Step::Attend(attend) => {
                        attend.heads_q = attend.heads_q.start + 1..attend.heads_q.end + 1;
                        true
                    }
                    Step::Exchange { sends, receives: _ } => sends.pop().is_some(),
                    Step::Finish { q, .. } => {
                        q.len -= 1;
                        true
                    }
                };
                if changed {
                    found.push(prove(&problem, &bad).unwrap_err().what);
                }
                let mut bad = good.clone();
                if let Step::Attend(attend) = &mut bad[2].steps[n] {
                    attend.reads.swap(1, 2);
                    found.push(prove(&problem, &bad).unwrap_err().what);
                }
                let mut bad = good.clone();
                let again = bad[2].steps[n].clone();
                if !matches!(again, Step::Finish { .. }) {
                    bad[2].steps.insert(n, again);
                    found.push(prove(&problem, &bad).unwrap_err().what);
                }
            }
        }
    }
    assert!(found.len() > 100);
    for what in [
        "does not hold",
        "is written twice",
        "lacks contributions",
        "twice",
        "transfers of rank",
        "before it is written",
        "while other ranks exchange",
    ] {
        assert!(found.iter().any(|found| found.contains(what)), "{what}");
    }
}

#[test]
fn schedules_are_data() {
    let problem = ParallelSpec::new(spec([8, 4], [16, 16], "causal"), 2).strategy(Strategy::Ring).validate().unwrap();
    let schedule = problem.schedule(1, Pass::Forward);
    let text = serde_json::to_string(&schedule).unwrap();
    assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule);
    let told = schedule.to_string();
    for what in
        ["rank 1 of 2, forward", "exchange", "receive from 0: ", "attend q 8..16 k 8..16 heads 0..8 with 0..4", "partial", "finish q 8..16"]
    {
        assert!(told.contains(what), "{what} in\n{told}");
    }
}

#[test]
fn auto_chooses_by_simulated_time_and_memory_and_says_why() {
    let shape = Shape { batch: 1, heads_q: 32, heads_kv: 8, seq_q: 4096, seq_kv: 4096, dim_qk: 128, dim_v: 128 };
    let spec = |shape| ParallelSpec::new(AttentionSpec::dense(DType::BF16, shape, Layout::Bshd), 4);
    // Up to g + 1 ranks, all-gather sends the fewest bytes; without GQA, head exchange does.
    let gqa = spec(shape).validate().unwrap();
    assert_eq!(gqa.strategy(), Strategy::AllGather { head_groups: 1 });
    let mha = spec(Shape { heads_kv: 32, ..shape }).validate().unwrap();
    assert_eq!(mha.strategy(), Strategy::HeadExchange);
    let told = mha.choice().unwrap().to_string();
    assert!(
        told.starts_with("head exchange: the least simulated time") && told.contains("ring: ") && told.contains("imbalance 1.00"),
        "{told}"
    );
    assert!(told.contains("halo: strategy: got halo, expected another one, or masks with a window"), "{told}");
    // If merges cost nothing, a ring hides exchanges of long sequences, though it sends twice the bytes.
    let mut machine = Machine::default();
    let long = Shape { heads_kv: 32, seq_q: 16384, seq_kv: 16384, ..shape };
    assert_eq!(spec(long).machine(machine).validate().unwrap().strategy(), Strategy::HeadExchange);
    machine.merges = f64::INFINITY;
    assert_eq!(spec(long).machine(machine).validate().unwrap().strategy(), Strategy::Ring);
    // Heads that do not suffice and memory that does not leave the ring.
    machine = Machine::default();
    machine.memory = Some(26 << 20);
    let small = Shape { heads_q: 2, heads_kv: 2, seq_q: 1 << 15, seq_kv: 1 << 15, ..shape };
    let ring = spec(small).machine(machine).validate().unwrap();
    assert_eq!(ring.strategy(), Strategy::Ring, "{}", ring.choice().unwrap());
    assert!(ring.choice().unwrap().to_string().contains("exceed"));
    machine.memory = Some(1);
    let told = spec(small).machine(machine).validate().unwrap_err().to_string();
    assert!(told.contains("ring: buffers of") && told.contains("all-gather: buffers of"), "{told}");
    // Windows need the keys of the neighbours only.
    let windowed = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask("window:256,0".parse().unwrap());
    assert_eq!(ParallelSpec::new(windowed, 4).validate().unwrap().strategy(), Strategy::Halo);
    // Contiguous causal shards of all-gather are unbalanced, those of head exchange are not.
    let causal = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal());
    assert_eq!(ParallelSpec::new(causal, 4).validate().unwrap().strategy(), Strategy::HeadExchange);
}

#[test]
fn arbitrary_masks_are_balanced_by_area() {
    let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 512, seq_kv: 512, dim_qk: 8, dim_v: 8 };
    // Queries of the first quarter attend to everything, the others to a window.
    let mask: Mask = "q < 128 | (k <= q & k > q - 16)".parse().unwrap();
    let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(mask).validate().unwrap();
    let sharding = Sharding::balanced(&problem, 4, 16);
    let chunks = sharding.chunks(4, 512);
    assert!(chunks.iter().all(|rank| rank.iter().map(|c| c.len).sum::<i64>() == 128), "{chunks:?}");
    let heavy = |rank: &Vec<Chunk>| rank.iter().map(|c| (128 - c.start).clamp(0, c.len)).sum::<i64>();
    assert_eq!(chunks.iter().map(heavy).collect::<Vec<_>>(), [32; 4]);
    let spec = ParallelSpec::new(problem_spec(&problem), 4).sharding(sharding).strategy(Strategy::Ring);
    assert!(spec.validate().is_ok());
}

fn problem_spec(problem: &sdpa_core::Problem) -> AttentionSpec {
    AttentionSpec::strided(problem.dtype(), [*problem.q(), *problem.k(), *problem.v()], *problem.o())
}

#[test]
fn mistakes_are_reported_at_once() {
    let attention = spec([8, 4], [16, 16], "causal");
    let told = |spec: ParallelSpec| spec.validate().unwrap_err().to_string();
    let halo =
        told(ParallelSpec::new(attention.clone(), 3).strategy(Strategy::Halo).sharding(Sharding::Chunks(vec![vec![Chunk::new(0, 1, 9)]])));
    assert!(halo.contains("a window") && halo.contains("1 lists") && halo.contains("token 9 in no rank"), "{halo}");
    assert!(told(ParallelSpec::new(attention.clone(), 0)).contains("ranks: got 0"));
    assert!(told(ParallelSpec::new(attention.clone(), 9).strategy(Strategy::HeadExchange)).contains("at least 9"));
    assert!(told(ParallelSpec::new(attention.clone(), 4).strategy(Strategy::Grid { heads: 3 })).contains("a divisor of 4"));
    assert!(told(ParallelSpec::new(attention.clone(), 4).strategy(Strategy::AllGather { head_groups: 5 })).contains("between 1 and 4"));
    let out = Sharding::Chunks(vec![vec![Chunk::new(0, 2, 9)], vec![Chunk::new(1, 2, 8)]]);
    assert!(told(ParallelSpec::new(attention.clone(), 2).sharding(out)).contains("positions from 0 to 15"));
    let twice = Sharding::Chunks(vec![vec![Chunk::new(0, 1, 9)], vec![Chunk::new(8, 1, 8)]]);
    assert!(told(ParallelSpec::new(attention.clone(), 2).sharding(twice)).contains("token 8 in more than one chunk"));
    let dropped = attention.with_dropout(0.25);
    for strategy in [Strategy::Ring, Strategy::AllGather { head_groups: 1 }, Strategy::HeadExchange] {
        let error = ParallelSpec::new(dropped.clone(), 2).strategy(strategy).validate().unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("count random numbers"), "{error}");
    }
    let shape = Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q: 0, seq_kv: 4, dim_qk: 8, dim_v: 8 };
    assert!(ParallelSpec::new(AttentionSpec::dense(DType::F32, shape, Layout::Bhsd), 2).validate().unwrap_err().is_unsupported());
    // Every tensor of a rank splits and joins.
    let problem = ParallelSpec::new(spec([8, 4], [16, 16], ""), 3).sharding(scattered(3, 16)).validate().unwrap();
    let whole: Vec<u32> = (0..2 * 8 * 16 * 8).collect();
    let mut joined = vec![0; whole.len()];
    (0..3).for_each(|rank| problem.join(rank, Tensor::Q, &problem.split(rank, Tensor::Q, &whole), &mut joined));
    assert_eq!(joined, whole);
}
