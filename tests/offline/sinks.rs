//! Kernels of sinks, compiled for a CPU: what they make of rows and of sums, in every element type, and nothing beside it.

use crate::grid::{BEFORE, TOOLS, whole};
use crate::numbers::{FILLED, Type, Wanted, buffer, floats, read};
use conformance::msl::{Check, Toolchain};
use conformance::random::Random;
use conformance::say::skip;
use conformance::share::{DAYS, of_today};
use half::{bf16, f16};

const SOURCE: &str = include_str!("../../sdpa/cudnn/src/kernels/sinks.cu");

const AFTER: &str = "
static void rows() {
    number count = *next++, heads = *next++, rows = *next++, told = *next++, type = *next++, width = *next++;
    number entry = *next++, head = *next++, row = *next++, all = *next++, bytes = type ? 2 : 4;
    char *sink = filled(heads, 4), *stats = filled(count, 4), *o = filled(all, bytes);
    launch((count + 1) / 2, 64, [&] {
        sink_rows(count, heads, rows, (float *)sink, (float *)stats, told, o, type, width, entry, head, row);
    });
    done(stats, count, 4, true);
    done(o, all, bytes, true);
    done(sink, heads, 4, false);
}

static void gradient() {
    number batch = *next++, heads = *next++, longest = *next++, bounded = *next++, placed = *next++, entry = *next++, head = *next++, row = *next++;
    number alike = *next++, factor = *next++, type = *next++, n_stats = *next++, n_sums = *next++, bytes = type ? 2 : 4, threads = 8;
    char *lengths = filled(bounded ? batch : 0, 4), *begins = filled(placed ? batch : 0, 8);
    char *sink = filled(heads, 4), *stats = filled(n_stats, 4), *sums = filled(n_sums, 4);
    char *parts = buffer(heads * threads, 4), *to = buffer(heads, bytes);
    launch(heads, static_cast<unsigned>(threads), [&] {
        sink_parts(batch, heads, longest, bounded ? (int *)lengths : nullptr, placed ? (number *)begins : nullptr, (float *)sink, (float *)stats,
                   entry, head, row, (float *)sums, alike, (float *)parts);
    });
    launch(1, 64, [&] { sink_gradient(heads, (float *)parts, threads, to, type, factor); });
    done(to, heads, bytes, true);
    done(parts, heads * threads, 4, true);
    done(lengths, 0, 4, false);
    done(begins, 0, 8, false);
    done(sink, heads, 4, false);
    done(stats, n_stats, 4, false);
    done(sums, n_sums, 4, false);
}

int main() {
    for (unsigned bits = 0; bits < 0x10000u; bits++) printf(\"%x \", to_bits(from_f16(static_cast<unsigned short>(bits))));
    printf(\"\\n\");
    while (next != jobs + sizeof(jobs) / sizeof(number)) {
        number kind = *next++;
        if (kind == 0) rows();
        else if (kind == 1) gradient();
        else {
            float value = of_bits(static_cast<unsigned>(*next++));
            printf(\"%x %x\\n\", to_f16(value), to_bf16(value));
        }
    }
}
";

/// A launch as numbers, and the buffers that come out: their types, and each element with how far it may be off; none for what is not written.
struct Job {
    numbers: Vec<i64>,
    want: Vec<(Type, Vec<Wanted>)>,
}

/// A sink, or none at all.
fn sink(random: &mut Random) -> f64 {
    let usual = (3.0 * random.normal()) as f32;
    f64::from(random.pick(&[f32::NEG_INFINITY, -40.0, usual, usual, 90.0]))
}

fn statistic(random: &mut Random) -> f64 {
    let usual = (4.0 * random.normal()) as f32;
    f64::from(random.pick(&[f32::NEG_INFINITY, usual, usual, -70.0]))
}

fn rows(random: &mut Random) -> Job {
    let [batch, heads, rows] = [random.between(1, 3), random.between(1, 4), random.between(1, 3)];
    let ty = random.pick(&[Type::F32, Type::F16, Type::BF16]);
    let (width, gap, told) = (random.pick(&[1, 8, 31, 40, 64]), random.between(0, 3), random.between(0, 1));
    let step = width + gap;
    let [entry, head, row] =
        if random.between(0, 1) == 1 { [heads * rows * step, rows * step, step] } else { [heads * rows * step, step, heads * step] };
    let (count, all) = (batch * heads * rows, batch * heads * rows * step - gap);
    let sinks: Vec<f64> = (0..heads).map(|_| sink(random)).collect();
    let stats: Vec<f64> = (0..count).map(|_| statistic(random)).collect();
    let o: Vec<f64> = (0..all).map(|_| ty.value(ty.bits(random.normal()))).collect();
    let mut numbers = vec![0, count, heads, rows, told, [Type::F32, Type::F16, Type::BF16].iter().position(|t| *t == ty).unwrap() as i64];
    numbers.extend([width, entry, head, row, all]);
    numbers.extend(floats(&sinks).chain(floats(&stats)).chain(o.iter().map(|&x| ty.bits(x))));
    let exactly = |x: f64| Some((x, 0.0));
    let (mut new_stats, mut new_o): (Vec<_>, Vec<_>) =
        (stats.iter().map(|&x| exactly(x)).collect(), o.iter().map(|&x| exactly(x)).collect());
    for n in 0..count {
        let (b, h, r) = (n / rows / heads, n / rows % heads, n % rows);
        let (sink, before) = (sinks[h as usize], stats[n as usize]);
        if sink == f64::NEG_INFINITY {
            continue;
        }
        let largest = sink.max(before);
        let after = largest + ((sink - largest).exp() + (before - largest).exp()).ln();
        if told == 1 {
            new_stats[n as usize] = Some((after, 4e-6 * (1.0 + after.abs())));
        }
        for i in 0..width {
            let at = (b * entry + h * head + r * row + i) as usize;
            let x = o[at] * (before - after).exp();
            new_o[at] = Some((x, 2e-5 * x.abs() + 2.0 * ty.roundoff(x)));
        }
    }
    Job { numbers, want: vec![(Type::F32, new_stats), (ty, new_o)] }
}

fn gradient(random: &mut Random) -> Job {
    let [batch, heads, longest] = [random.between(1, 4), random.between(1, 4), random.between(1, 30)];
    let packed = random.between(0, 1) == 1;
    let bounded = packed || random.between(0, 1) == 1;
    let lengths: Vec<i64> = (0..batch).map(|_| if bounded { random.between(0, longest) } else { longest }).collect();
    let first = random.between(0, 3);
    let tokens: Vec<i64> = lengths.iter().scan(first, |at, n| Some(std::mem::replace(at, *at + n))).collect();
    let [entry, head, row] = if packed { [1 << 40, 1, heads] } else { [heads * longest, longest, 1] };
    let alike = packed && random.between(0, 1) == 1;
    let n_stats = if packed { (first + lengths.iter().sum::<i64>()) * heads } else { batch * heads * longest };
    let n_sums = if alike { n_stats } else { batch * heads * longest };
    let ty = random.pick(&[Type::F32, Type::F16, Type::BF16]);
    let factor = random.pick(&[1.0, 1.0, 1.25, 10.0]);
    let sinks: Vec<f64> = (0..heads).map(|_| sink(random).min(3.0)).collect();
    // What no row has must not be read: it is not a number.
    let (mut stats, mut sums) = (vec![f64::NAN; n_stats as usize], vec![f64::NAN; n_sums as usize]);
    let (mut want, mut size) = (vec![0.0; heads as usize], vec![0.0; heads as usize]);
    for (b, &length) in lengths.iter().enumerate() {
        for (h, q) in (0..heads).flat_map(|h| (0..length).map(move |q| (h, q))) {
            let at = if packed { (tokens[b] + q) * heads + h } else { b as i64 * entry + h * head + q };
            let (place, sum) = (if alike { at } else { (b as i64 * heads + h) * longest + q }, f64::from(random.normal() as f32));
            let statistic = if random.between(0, 4) == 0 { f64::NEG_INFINITY } else { statistic(random).max(sinks[h as usize]) };
            (stats[at as usize], sums[place as usize]) = (statistic, sum);
            if statistic != f64::NEG_INFINITY && sinks[h as usize] != f64::NEG_INFINITY {
                let term = (sinks[h as usize] - statistic).exp() * sum;
                want[h as usize] -= term;
                size[h as usize] += term.abs();
            } else {
                // Nothing times what is no number is none.
                sums[place as usize] = f64::NAN;
            }
        }
    }
    let mut numbers =
        vec![1, batch, heads, longest, i64::from(bounded), i64::from(packed), entry, head, row, i64::from(alike), Type::F32.bits(factor)];
    numbers.extend([[Type::F32, Type::F16, Type::BF16].iter().position(|t| *t == ty).unwrap() as i64, n_stats, n_sums]);
    // Longer than the longest, where lengths may be.
    numbers.extend(lengths.iter().filter(|_| bounded).map(|&n| if n == longest { n + 1000 } else { n }));
    numbers.extend(tokens.iter().filter(|_| packed).map(|token| token * heads));
    numbers.extend(floats(&sinks).chain(floats(&stats)).chain(floats(&sums)));
    let scaled = want.iter().zip(&size).map(|(&x, &size)| (factor * x, factor * size));
    let wanted = scaled.map(|(x, size)| Some((x, 1e-5 * size + 2.0 * ty.roundoff(x)))).collect();
    Job { numbers, want: vec![(ty, wanted), (Type::F32, vec![None; heads as usize * 8])] }
}

/// A number that is narrowed, of every size.
fn narrowed(random: &mut Random) -> Job {
    let bits = random.between(0, i64::from(u32::MAX));
    let near = |by: i64| i64::from(f32::from(f16::from_bits(bits as u16)).to_bits()).wrapping_add(by) & 0xffff_ffff;
    // In the middle between two of 16 bits, and nearly.
    let all = [bits, near(random.between(-4097, 4097)), near(4096), (bits & 0xffff_0000) | 0x8000];
    Job { numbers: vec![2, random.pick(&all)], want: Vec::new() }
}

fn check(toolchain: &Toolchain, source: &str, jobs: &[Job]) -> Result<(), String> {
    let text: Vec<String> = jobs.iter().flat_map(|job| &job.numbers).map(i64::to_string).collect();
    let printed =
        toolchain.print(&format!("{BEFORE}{source}\nstatic const number jobs[] = {{{}}};\n{TOOLS}{FILLED}{AFTER}", text.join(",\n")))?;
    let mut lines = printed.lines();
    let widened = read(lines.next().unwrap_or_default());
    for (bits, got) in widened.iter().enumerate() {
        let (got, want) = (f32::from_bits(*got as u32), f32::from(f16::from_bits(bits as u16)));
        if got.to_bits() != want.to_bits() && !(got.is_nan() && want.is_nan()) {
            return Err(format!("f16 {bits:x} is {got}, not {want}"));
        }
    }
    if widened.len() != 1 << 16 {
        return Err(format!("{} numbers of 16 bits", widened.len()));
    }
    for (n, job) in jobs.iter().enumerate() {
        if let [2, bits] = job.numbers[..] {
            let x = f32::from_bits(bits as u32);
            let want = [f16::from_f32(x).to_bits(), bf16::from_f32(x).to_bits()].map(i64::from);
            let got = read(lines.next().unwrap_or_default());
            let none = x.is_nan() && f16::from_bits(got[0] as u16).is_nan() && bf16::from_bits(got[1] as u16).is_nan();
            if got != want && !none {
                return Err(format!("{x:e} is {got:x?}, not {want:x?}"));
            }
        }
        for (at, (ty, want)) in job.want.iter().enumerate() {
            buffer(lines.next().unwrap_or_default(), *ty, want).map_err(|e| format!("job {n} {:?}, buffer {at}: {e}", job.numbers))?;
        }
    }
    Ok(())
}

/// Mistakes that the comparison has to find.
const FAULTS: [[&str; 2]; 20] = [
    ["n / rows % heads;", "n % heads;"],
    ["if (own == none()) return;", ""],
    ["expf(own - before)", "expf(before - own)"],
    ["n % rows * row", "n % heads * row"],
    ["i += 32", "i += 64"],
    ["told && lane == 31", "lane == 31"],
    ["own > before ? own : before", "before"],
    ["log1pf(expf(-fabsf(own - before)))", "expf(-fabsf(own - before))"],
    ["lengths[b] < longest ? lengths[b] : longest", "lengths[b] ? lengths[b] : longest"],
    ["begins ? begins[b] : b * entry", "b * entry"],
    ["&& own != none()", ""],
    ["statistic != none()", "true"],
    ["part -=", "part +="],
    ["alike ? first + q * row : ", ""],
    ["n < each", "n < each - 1"],
    ["h >= heads", "false"],
    ["sum * (double)of_bits((unsigned)factor)", "sum"],
    ["sum * (double)of_bits((unsigned)factor)", "sum * (double)factor"],
    ["0xfffu + (size >> 13 & 1u)", "0x1000u"],
    ["0x7fffu + (bits >> 16 & 1u)", "0x8000u"],
];

#[test]
fn rows_get_their_sinks_and_heads_the_gradients() {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(why) => return skip("msl", &format!("kernels of sinks, on the CPU: {why}")),
    };
    let mut random = Random::new(21);
    let mut jobs: Vec<Job> = (0..120).flat_map(|_| [rows(&mut random), gradient(&mut random)]).collect();
    jobs.extend((0..4000).map(|_| narrowed(&mut random)));
    let right_source = whole(SOURCE);
    for sanitized in [Check::Plain, Check::Addresses] {
        check(&toolchain.with(sanitized), &right_source, &jobs).unwrap_or_else(|e| panic!("{sanitized:?}: {e}"));
    }
    let faults = of_today("faults of kernels of sinks", DAYS, FAULTS.to_vec(), |_| Vec::new());
    for [right, wrong] in &faults {
        let source = right_source.replace(right, wrong);
        assert!(source != right_source, "{right} is not there");
        assert!(check(&toolchain.with(Check::Addresses), &source, &jobs).is_err(), "nobody finds {wrong:?} for {right:?}");
    }
}
