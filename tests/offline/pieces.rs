//! Kernels of pieces, compiled for a CPU: softmaxes over different keys become one, gradients add up, statistics find their rows, and nothing else changes.

use crate::grid::{BEFORE, TOOLS, whole};
use crate::numbers::{FILLED, Type, Wanted, buffer, floats};
use conformance::msl::{Check, Toolchain};
use conformance::random::Random;
use conformance::say::skip;
use conformance::share::{DAYS, of_today};

const SOURCE: &str = include_str!("../../sdpa/cudnn/src/kernels/pieces.cu");

const AFTER: &str = "
int main() {
    while (next != jobs + sizeof(jobs) / sizeof(number)) {
        number kind = *next++, count = *next++, heads = *next++, rows = *next++, longest = *next++, from = *next++;
        const number *whole = next, *part = next + 3;
        next += 6;
        number width = *next++, type = *next++, lanes = *next++, back = *next++, all = *next++, own = *next++, blocks = *next++;
        char *stats = filled(count / rows * longest, 4), *mine = filled(count, 4), *to = filled(all, 2), *of = filled(own, 2);
        launch(blocks, 64, [&] {
            if (kind == 0)
                merge_rows(count, heads, rows, longest, from, (float *)stats, (float *)mine, to, whole[0], whole[1], whole[2], of, part[0], part[1],
                           part[2], width, type, lanes);
            else if (kind == 1)
                add_rows(count, heads, rows, to, whole[0], whole[1], whole[2], of, part[0], part[1], part[2], width, type, lanes);
            else stats_rows(count, rows, longest, from, (float *)stats, (float *)mine, back);
        });
        done(stats, count / rows * longest, 4, true);
        done(mine, count, 4, true);
        done(to, all, 2, true);
        done(of, own, 2, false);
    }
}
";

struct Job {
    numbers: Vec<i64>,
    want: Vec<(Type, Vec<Wanted>)>,
}

/// Dense strides of (batch, heads, rows) in one of two orders, with gaps between rows in multiples of eight elements, and how many elements there are.
fn strides(random: &mut Random, [batch, heads, rows]: [i64; 3], width: i64) -> ([i64; 3], i64) {
    let step = width + 8 * random.between(0, 2);
    let outer =
        if random.between(0, 1) == 1 { [heads * rows * step, rows * step, step] } else { [heads * rows * step, step, heads * step] };
    (outer, batch * heads * rows * step)
}

/// A statistic of a row that may have no key.
fn statistic(random: &mut Random) -> f64 {
    let usual = (4.0 * random.normal()) as f32;
    f64::from(random.pick(&[f32::NEG_INFINITY, usual, usual, usual, -70.0, 60.0]))
}

fn draw(random: &mut Random) -> Job {
    let kind = random.between(0, 2);
    let [batch, heads, rows] = [random.between(1, 3), random.between(1, 4), random.between(1, 5)];
    let from = random.between(0, 4);
    let longest = from + rows + random.between(0, 3);
    let (ty, number) = random.pick(&[(Type::F16, 1), (Type::BF16, 2)]);
    let width = 8 * random.between(1, 34);
    let lanes = (width as u64 / 8).next_power_of_two().min(32) as i64;
    let (whole, all) = strides(random, [batch, heads, rows], width);
    let (part, own) = strides(random, [batch, heads, rows], width);
    let (count, back) = (batch * heads * rows, random.between(0, 1));
    let stats: Vec<f64> = (0..batch * heads * longest).map(|_| statistic(random)).collect();
    let mine: Vec<f64> = (0..count).map(|_| statistic(random)).collect();
    let mut elements = |count: i64| (0..count).map(|_| ty.value(ty.bits(random.normal()))).collect::<Vec<f64>>();
    let (mut to, mut of) = (elements(all), elements(own));
    let exactly = |all: &[f64]| all.iter().map(|&x| Some((x, 0.0))).collect::<Vec<Wanted>>();
    let place = |n: i64, [entry, head, row]: [i64; 3]| n / rows / heads * entry + n / rows % heads * head + n % rows * row;
    let there = |n: i64| (n / rows * longest + from + n % rows) as usize;
    // What has no keys may hold anything.
    if kind == 0 {
        for n in 0..count {
            for i in 0..width {
                if mine[n as usize] == f64::NEG_INFINITY {
                    of[(place(n, part) + i) as usize] = f64::NAN;
                } else if stats[there(n)] == f64::NEG_INFINITY {
                    to[(place(n, whole) + i) as usize] = f64::NAN;
                }
            }
        }
    }
    let mut numbers = vec![kind, count, heads, rows, longest, from];
    numbers.extend(whole.iter().chain(&part));
    let per_row = if kind == 2 { 1 } else { lanes };
    numbers.extend([width, number, lanes, back, all, own, (count * per_row + 63) / 64 + random.between(0, 1)]);
    numbers.extend(floats(&stats).chain(floats(&mine)));
    numbers.extend(to.iter().chain(&of).map(|&x| ty.bits(x)));
    let (mut new_stats, mut new_mine, mut new_to) = (exactly(&stats), exactly(&mine), exactly(&to));
    // Not a number is not equal to itself.
    for (wanted, x) in new_to.iter_mut().zip(&to) {
        *wanted = wanted.filter(|_| !x.is_nan());
    }
    for n in 0..count {
        let (old, here) = (stats[there(n)], mine[n as usize]);
        let sum = old.max(here) + ((old - old.max(here)).exp() + (here - old.max(here)).exp()).ln();
        match (kind, back) {
            (0, _) if here == f64::NEG_INFINITY => continue,
            (0, _) => new_stats[there(n)] = Some((sum, 4e-6 * (1.0 + sum.abs()))),
            (1, _) => {}
            (_, 1) => new_mine[n as usize] = Some((old, 0.0)),
            (_, _) => new_stats[there(n)] = Some((here, 0.0)),
        }
        for i in (0..width).filter(|_| kind < 2) {
            let (at, from) = ((place(n, whole) + i) as usize, (place(n, part) + i) as usize);
            let weighed = |x: f64, s: f64| if s == f64::NEG_INFINITY { 0.0 } else { x * (s - sum).exp() };
            let [x, y] = if kind == 0 { [weighed(to[at], old), weighed(of[from], here)] } else { [to[at], of[from]] };
            new_to[at] = Some((x + y, 1e-5 * (x.abs() + y.abs()) + ty.roundoff(x + y)));
        }
    }
    Job { numbers, want: vec![(Type::F32, new_stats), (Type::F32, new_mine), (ty, new_to)] }
}

fn check(toolchain: &Toolchain, source: &str, jobs: &[Job]) -> Result<(), String> {
    let text: Vec<String> = jobs.iter().flat_map(|job| &job.numbers).map(i64::to_string).collect();
    let printed =
        toolchain.print(&format!("{BEFORE}{source}\nstatic const number jobs[] = {{{}}};\n{TOOLS}{FILLED}{AFTER}", text.join(",\n")))?;
    let mut lines = printed.lines();
    for (n, job) in jobs.iter().enumerate() {
        for (at, (ty, want)) in job.want.iter().enumerate() {
            buffer(lines.next().unwrap_or_default(), *ty, want)
                .map_err(|e| format!("job {n} {:?}, buffer {at}: {e}", &job.numbers[..19]))?;
        }
    }
    Ok(())
}

/// Mistakes that the comparison has to find.
const FAULTS: [[&str; 2]; 18] = [
    ["if (factor == 0.0f) return 0.0f;", ""],
    ["q & 0xffffu, y", "p & 0xffffu, y"],
    ["low | high << 16", "high | low << 16"],
    ["i < width / 8", "i < width / 8 - 1"],
    ["i += lanes", "i += 2 * lanes"],
    ["n / rows / heads * entry", "n / heads * entry"],
    ["n / rows % heads * head", "n % heads * head"],
    ["n % rows * row) * 2", "n % heads * row) * 2"],
    ["if (n >= count) return;\n    float *before", "float *before"],
    ["longest + from + n % rows;\n    float old", "longest + n % rows;\n    float old"],
    ["if (here == none()) return;", ""],
    ["old > here ? old : here", "here"],
    ["x / all, part", "x, part"],
    ["lane == lanes - 1) *before", "true) *before"],
    ["top + logf(all)", "top"],
    ["1.0f, width", "0.5f, width"],
    ["if (back) own[n]", "if (!back) own[n]"],
    ["n / rows * longest + from + n % rows;\n    if (back)", "n / rows * rows + from + n % rows;\n    if (back)"],
];

#[test]
fn pieces_come_together() {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(why) => return skip("msl", &format!("kernels of pieces, on the CPU: {why}")),
    };
    let mut random = Random::new(23);
    let jobs: Vec<Job> = (0..150).map(|_| draw(&mut random)).collect();
    let right_source = whole(SOURCE);
    for sanitized in [Check::Plain, Check::Addresses] {
        check(&toolchain.with(sanitized), &right_source, &jobs).unwrap_or_else(|e| panic!("{sanitized:?}: {e}"));
    }
    let faults = of_today("faults of kernels of pieces", DAYS, FAULTS.to_vec(), |_| Vec::new());
    for [right, wrong] in &faults {
        let source = right_source.replace(right, wrong);
        assert!(source != right_source, "{right} is not there");
        assert!(check(&toolchain.with(Check::Addresses), &source, &jobs).is_err(), "nobody finds {wrong:?} for {right:?}");
    }
}
