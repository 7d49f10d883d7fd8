//! Simulated times, against closed forms.

use crate::case::{STRATEGIES, shardings};
use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
use sdpa_parallel::{Kernel, Machine, ParallelProblem, ParallelSpec, Pass, Schedule, Sharding, Simulation, Step, Strategy, simulate};

const SEQ: i64 = 64;
const GATHER: Strategy = Strategy::AllGather { head_groups: 1 };

/// A machine on which nothing takes time but attention.
fn free() -> Machine {
    let mut machine = Machine::default();
    (machine.forward, machine.backward) = (Kernel::new(1e6, 0.0), Kernel::new(4e5, 0.0));
    (machine.bandwidth, machine.link, machine.copies, machine.merges) = (f64::INFINITY, f64::INFINITY, f64::INFINITY, f64::INFINITY);
    machine
}

fn problem(ranks: usize, strategy: Strategy, sharding: Sharding, mask: Option<Mask>) -> ParallelProblem {
    let shape = Shape { batch: 2, heads_q: 8, heads_kv: 4, seq_q: SEQ, seq_kv: SEQ, dim_qk: 8, dim_v: 16 };
    let attention = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats();
    let attention = if let Some(mask) = mask { attention.mask(mask) } else { attention };
    ParallelSpec::new(attention, ranks).strategy(strategy).sharding(sharding).with_backward().validate().unwrap()
}

fn full(ranks: usize, strategy: Strategy) -> ParallelProblem {
    problem(ranks, strategy, Sharding::Contiguous, None)
}

fn forward(problem: &ParallelProblem, machine: &Machine) -> Simulation {
    simulate(problem, &schedules(problem, Pass::Forward), machine).unwrap()
}

fn schedules(problem: &ParallelProblem, pass: Pass) -> Vec<Schedule> {
    (0..problem.ranks()).map(|rank| problem.schedule(rank, pass)).collect()
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

/// Floating-point operations of all pairs of a mask that attends to everything: q·kᵀ and p·v, and five products in the backward pass.
fn whole(pass: Pass) -> f64 {
    let pairs = (2 * 8 * SEQ * SEQ) as f64;
    match pass {
        Pass::Forward => pairs * 2.0 * (8.0 + 16.0),
        Pass::Backward => pairs * 2.0 * (3.0 * 8.0 + 2.0 * 16.0),
    }
}

#[test]
fn one_rank_takes_the_time_of_the_kernels() {
    let problem = full(1, GATHER);
    let mut machine = free();
    let kernels = whole(Pass::Forward) / 1e6 + whole(Pass::Backward) / 4e5;
    let found = problem.simulate(&machine).unwrap();
    let rank = found.ranks[0];
    assert!(near(found.time(), kernels) && near(rank.attention, kernels) && near(found.alone, kernels), "{found}");
    assert!(near(rank.of_ideal, 1.0) && (rank.exchanges, rank.exposed, rank.bytes) == (0.0, 0.0, 0), "{found}");
    // The host submits each pass in turn. A launch of the backward pass is hidden behind the forward kernel.
    (machine.forward.launch, machine.backward.launch, machine.call) = (0.25, 0.5, 0.125);
    let later = problem.simulate(&machine).unwrap();
    let forward = 0.125 + 0.25 + whole(Pass::Forward) / 1e6;
    assert!(forward > 0.125 + 0.25 + 0.125 + 0.5 && near(later.time(), forward + whole(Pass::Backward) / 4e5), "{later}");
    assert!(near(later.alone, kernels + 0.75), "{later}");
}

/// A causal mask leaves a triangle with its diagonal, and zigzag shards divide it evenly.
#[test]
fn bands_count_and_balanced_shards_are_ideal_if_exchanges_are_free() {
    let triangle = (SEQ * (SEQ + 1) / 2) as f64 / (SEQ * SEQ) as f64;
    let causal = problem(4, GATHER, Sharding::Zigzag, Some(Mask::causal()));
    let found = forward(&causal, &free());
    assert!(near(found.alone, triangle * whole(Pass::Forward) / 1e6), "{found}");
    assert!(near(found.of_ideal(), 1.0) && found.ranks.iter().all(|rank| near(rank.attention, found.alone / 4.0)), "{found}");
    // The last contiguous shard has 7/16 of the square, with its diagonal, instead of a quarter of the triangle.
    let contiguous = forward(&problem(4, GATHER, Sharding::Contiguous, Some(Mask::causal())), &free());
    let last = (16 * 48 + 16 * 17 / 2) as f64 / (SEQ * (SEQ + 1) / 2) as f64;
    assert!(near(contiguous.time(), last * contiguous.alone) && near(contiguous.of_ideal(), 0.25 / last), "{contiguous}");
    assert!(contiguous.ranks[0].of_ideal > 3.0, "{contiguous}");
}

/// All-gather attends after its only exchange.
#[test]
fn an_exchange_before_attention_is_fully_exposed() {
    let problem = full(4, GATHER);
    let mut machine = free();
    (machine.bandwidth, machine.link, machine.latency) = (1e4, 5e3, 0.5);
    let block = (2 * 16 * 4 * (8 + 16) * 2) as f64;
    let found = forward(&problem, &machine);
    // Three blocks over all links together take longer than one over each.
    let exchange = 0.5 + 3.0 * block / 1e4;
    let attention = whole(Pass::Forward) / 4e6;
    for rank in &found.ranks {
        assert!(near(rank.exchanges, exchange) && near(rank.exposed, exchange) && near(rank.time, exchange + attention), "{found}");
        assert!(rank.bytes == 3 * block as u64 && near(rank.of_ideal, attention / rank.time), "{found}");
    }
    // A slower link counts instead.
    machine.link = 2e3;
    assert!(near(forward(&problem, &machine).time(), 0.5 + block / 2e3 + attention));
}

/// The next block of a ring travels while the present one is attended to.
#[test]
fn exchanges_of_a_ring_are_hidden_if_they_are_shorter_than_attention() {
    let problem = full(4, Strategy::Ring);
    let mut machine = free();
    let block = (2 * 16 * 4 * (8 + 16) * 2) as f64;
    let attention = whole(Pass::Forward) / 4e6;
    machine.bandwidth = block / (0.9 * attention / 4.0);
    let hidden = forward(&problem, &machine);
    assert!(hidden.ranks.iter().all(|rank| rank.exposed == 0.0 && near(rank.time, attention)), "{hidden}");
    assert!(hidden.ranks.iter().all(|rank| near(rank.exchanges, 3.0 * 0.9 * attention / 4.0)), "{hidden}");
    // Three of the four parts overlap an exchange that is three times as long.
    machine.bandwidth = block / (3.0 * attention / 4.0);
    let exposed = forward(&problem, &machine);
    for rank in &exposed.ranks {
        assert!(near(rank.exposed, 3.0 * 2.0 * attention / 4.0) && near(rank.time, attention + rank.exposed), "{exposed}");
    }
}

/// A rank that comes late to an exchange delays its peers.
#[test]
fn transfers_wait_for_both_ranks() {
    let problem = full(2, GATHER);
    let mut machine = free();
    machine.bandwidth = 1e4;
    let bytes = (2 * 32 * 4 * (8 + 16) * 2) as f64;
    let mut late = schedules(&problem, Pass::Forward);
    // Rank 1 attends before the exchange too, to its own keys.
    let own = late[1].attends().next().unwrap().clone();
    late[1].steps.insert(0, Step::Attend(own));
    let found = simulate(&problem, &late, &machine).unwrap();
    let attention = whole(Pass::Forward) / 2e6;
    let [first, second] = [found.ranks[0], found.ranks[1]];
    assert!(near(first.exposed, attention + bytes / 1e4) && near(second.exposed, bytes / 1e4), "{found}");
    assert!(near(first.time, 2.0 * attention + bytes / 1e4) && near(second.time, first.time), "{found}");
}

/// A rank receives no faster than its bandwidth, though each of its peers sends less.
#[test]
fn receivers_share_their_bandwidth() {
    let problem = full(4, GATHER);
    let mut machine = free();
    machine.bandwidth = 1e4;
    let mut to_last = schedules(&problem, Pass::Forward);
    for schedule in &mut to_last {
        if let Some(Step::Exchange { sends, receives }) = schedule.steps.first_mut() {
            sends.retain(|transfer| transfer.peer == 3);
            if schedule.rank != 3 {
                receives.clear();
            }
        }
    }
    let found = simulate(&problem, &to_last, &machine).unwrap();
    let block = (2 * 16 * 4 * (8 + 16) * 2) as f64;
    assert!(near(found.ranks[3].exposed, 3.0 * block / 1e4) && found.ranks[3].bytes == 0, "{found}");
    assert!(found.ranks[0].bytes == block as u64, "{found}");
}

/// A step waits for an exchange that writes to its slots, and for one that reads what the step writes.
#[test]
fn steps_wait_for_exchanges_of_their_slots() {
    let problem = full(4, Strategy::Ring);
    let mut machine = free();
    machine.bandwidth = (2 * 16 * 4 * (8 + 16) * 2) as f64 / (0.5 * whole(Pass::Forward) / 16e6);
    let free_of = schedules(&problem, Pass::Forward);
    assert!(simulate(&problem, &free_of, &machine).unwrap().ranks.iter().all(|rank| rank.exposed == 0.0));
    let exchange = free_of[0].steps.iter().position(|step| matches!(step, Step::Exchange { .. })).unwrap();
    let Step::Exchange { sends, receives } = free_of[0].steps[exchange].clone() else { unreachable!() };
    let (q, heads) = (0, 0..1);
    for (from, to, waits) in [(q, sends[0].slot, true), (sends[0].slot, q, false), (receives[0].slot, q, true), (q, receives[0].slot, true)]
    {
        let mut changed = free_of.clone();
        let chunk = sends[0].chunk;
        changed[0].steps.insert(exchange + 1, Step::Copy { from, to, heads: heads.clone(), chunk });
        let found = simulate(&problem, &changed, &machine).unwrap();
        assert_eq!(found.ranks[0].exposed > 0.0, waits, "{from} {to}: {found}");
    }
}

/// Copies, sums and merges take the time of what they move, and the host the time of what it submits.
#[test]
fn copies_and_merges_take_time() {
    let mut machine = free();
    let tokens = (2 * SEQ * 8) as f64;
    (machine.forward, machine.copies) = (Kernel::new(f64::INFINITY, 0.0), 1e3);
    // One rank copies the output of its kernel, 16 elements in bf16, and the statistic.
    let alone = forward(&full(1, GATHER), &machine);
    assert!(near(alone.time(), tokens * (2.0 * 16.0 * 2.0 + 2.0 * 4.0) / 1e3), "{alone}");
    // Each of two ranks merges two partial outputs in bf16 into f32, with two statistics, and then writes the output and its statistic.
    let ring = full(2, Strategy::Ring);
    (machine.copies, machine.merges) = (f64::INFINITY, 1e3);
    let merge = 16.0 * (2.0 + 8.0) + 2.0 * 12.0;
    let finish = 16.0 * (4.0 + 2.0) + 3.0 * 4.0;
    let merged = forward(&ring, &machine);
    assert!(near(merged.time(), tokens / 2.0 * (2.0 * merge + finish) / 1e3), "{merged}");
    // Before that, it fills the three accumulators.
    (machine.copies, machine.merges) = (1e3, f64::INFINITY);
    let filled = forward(&ring, &machine);
    assert!(near(filled.time(), tokens / 2.0 * 4.0 * (16.0 + 2.0) / 1e3), "{filled}");
    // The host submits three fills, four transfers, three results for each of two parts, and two results at the end.
    (machine.copies, machine.submit) = (f64::INFINITY, 1.0);
    assert!(near(forward(&ring, &machine).time(), 3.0 + 4.0 + 6.0 + 2.0));
}

#[test]
fn times_fall_with_bandwidth_and_bytes_are_those_of_the_schedules() {
    let mut seen = 0;
    for ranks in [1, 2, 4, 6, 8] {
        for (n, strategy) in STRATEGIES.into_iter().enumerate() {
            for sharding in shardings(ranks, SEQ) {
                let shape = Shape { batch: 1, heads_q: 8, heads_kv: 4, seq_q: SEQ, seq_kv: SEQ, dim_qk: 8, dim_v: 16 };
                let mask: Mask = if n % 2 == 0 { "window:9,0" } else { "causal" }.parse().unwrap();
                let attention = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask);
                let spec = ParallelSpec::new(attention, ranks).strategy(strategy).sharding(sharding).with_backward();
                let Ok(problem) = spec.validate() else { continue };
                let mut machine = Machine::default();
                (machine.forward, machine.backward, machine.latency) = (Kernel::new(1e9, 1e-6), Kernel::new(1e9, 1e-6), 1e-6);
                let mut before = f64::INFINITY;
                for bandwidth in [1e6, 1e7, 1e8, 1e9] {
                    (machine.bandwidth, machine.link) = (bandwidth, bandwidth / 2.0);
                    let found = problem.simulate(&machine).unwrap();
                    assert!(found.time() < before || (ranks == 1 && found.time() <= before), "{strategy} {bandwidth}: {found}");
                    before = found.time();
                    for (rank, times) in found.ranks.iter().enumerate() {
                        let sent: u64 = [Pass::Forward, Pass::Backward].iter().map(|&pass| problem.schedule(rank, pass).bytes_sent()).sum();
                        assert_eq!(times.bytes, sent);
                        assert!(times.exposed <= times.exchanges * (1.0 + 1e-9), "{strategy}: {found}");
                        assert!(times.attention + times.exposed <= times.time * (1.0 + 1e-9), "{strategy}: {found}");
                    }
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 300, "{seen}");
}

#[test]
fn exchanges_that_do_not_match_are_errors() {
    let problem = full(4, GATHER);
    let told = |schedules: &[Schedule]| simulate(&problem, schedules, &free()).unwrap_err().to_string();
    let mut bad = schedules(&problem, Pass::Forward);
    if let Some(Step::Exchange { sends, .. }) = bad[2].steps.iter_mut().find(|step| matches!(step, Step::Exchange { .. })) {
        sends.retain(|transfer| transfer.peer != 1);
    }
    assert!(told(&bad).contains("rank 2, step 0: it sends [] bytes to rank 1, which receives [2048, 4096]"), "{}", told(&bad));
    let mut short = schedules(&problem, Pass::Forward);
    short[3].steps.clear();
    assert!(told(&short).contains("rank 3") && told(&short).contains("it ends while other ranks exchange"), "{}", told(&short));
    let mut other = schedules(&problem, Pass::Forward);
    other[0].rank = 4;
    assert!(told(&other).contains("rank 4") && told(&other).contains("no such rank among 4"), "{}", told(&other));
}

#[test]
fn a_table_has_a_row_for_each_rank() {
    let mut machine = free();
    (machine.bandwidth, machine.latency) = (1e6, 1e-3);
    let told = forward(&full(2, GATHER), &machine).to_string();
    let expected = "simulated; one device for the whole problem: 3145.728 ms
rank    time ms  attention ms  exchanges ms  exposed ms      MB sent  of ideal
   0   1586.152      1572.864        13.288      13.288        0.012      0.99
   1   1586.152      1572.864        13.288      13.288        0.012      0.99";
    assert_eq!(told, expected, "{told}");
}

/// Some of the times of `benches/results/2026-11-29-h200-several-gpus.txt`, in ms: forward, and both passes, of one H200 and of two.
/// The rates are fitted to some of them.
#[test]
fn measured_times_are_simulated_within_an_eighth() {
    let head = Strategy::HeadExchange;
    let rows = [
        (1, [32, 8], 32768, GATHER, Sharding::Contiguous, [12.590, 47.360]),
        (1, [16, 16], 16384, GATHER, Sharding::Contiguous, [1.694, 5.812]),
        (2, [32, 8], 16384, GATHER, Sharding::Zigzag, [3.450, 9.202]),
        (2, [32, 8], 16384, Strategy::Ring, Sharding::Zigzag, [4.616, 11.111]),
        (2, [32, 8], 65536, Strategy::Ring, Sharding::Zigzag, [32.547, 110.092]),
        (2, [32, 8], 65536, head, Sharding::Contiguous, [30.491, 108.680]),
        (2, [16, 16], 16384, head, Sharding::Zigzag, [2.825, 8.716]),
        (2, [16, 16], 32768, head, Sharding::Contiguous, [5.479, 16.449]),
    ];
    for (ranks, [heads_q, heads_kv], seq, strategy, sharding, measured) in rows {
        let shape = Shape { batch: 1, heads_q, heads_kv, seq_q: seq, seq_kv: seq, dim_qk: 128, dim_v: 128 };
        let attention = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal()).with_stats();
        let spec = ParallelSpec::new(attention, ranks).strategy(strategy).sharding(sharding);
        for (problem, measured) in [spec.clone(), spec.with_backward()].iter().zip(measured) {
            let found = problem.validate().unwrap().simulate(&Machine::h200()).unwrap();
            let time = if ranks == 1 { found.alone } else { found.time() } * 1e3;
            assert!((time / measured - 1.0).abs() < 0.125, "{heads_q}/{heads_kv} {seq} {strategy}: measured {measured} ms\n{found}");
        }
    }
}
