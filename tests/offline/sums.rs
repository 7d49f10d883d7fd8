//! The kernel of sums of rows without keys, compiled for a CPU.

use crate::grid::{BEFORE, TOOLS};
use conformance::msl::{Check, Toolchain};
use conformance::random::Random;
use conformance::say::skip;

const SOURCE: &str = include_str!("../../sdpa/cudnn/src/kernels/sums.cu");

const AFTER: &str = "
int main() {
    while (next != jobs + sizeof(jobs) / sizeof(number)) {
        number count = *next++, blocks = *next++;
        char *sums = buffer(count, 4);
        for (number n = 0; n < count; n++) memcpy(sums + n * 4, next++, 4);
        launch(blocks, 8, [&] { row_sums(count, (float *)sums); });
        for (number n = -guard; n < count + guard; n++) {
            unsigned bits = 0;
            memcpy(&bits, sums + n * 4, 4);
            printf(\"%u \", bits);
        }
        printf(\"\\n\");
        free(sums - guard * 4);
    }
}
";

const GUARD: usize = 16;
const UNTOUCHED: u32 = 0x5a5a_5a5a;

/// Sums of rows, in more blocks than they need.
fn draw(random: &mut Random) -> Vec<f32> {
    let sum = |random: &mut Random| {
        let usual = 1.0 + random.normal().abs() as f32;
        random.pick(&[f32::NEG_INFINITY, 0.0, f32::NAN, f32::INFINITY, usual, usual])
    };
    (0..random.between(1, 40)).map(|_| sum(random)).collect()
}

fn check(toolchain: &Toolchain, source: &str, jobs: &[Vec<f32>]) -> Result<(), String> {
    let numbers = |sums: &Vec<f32>| {
        let counts = [sums.len() as i64, sums.len() as i64 / 8 + 4];
        counts.into_iter().chain(sums.iter().map(|x| x.to_bits().into())).map(|x: i64| x.to_string()).collect::<Vec<_>>()
    };
    let text: Vec<String> = jobs.iter().flat_map(numbers).collect();
    let printed = toolchain.print(&format!("{BEFORE}{source}\nstatic const number jobs[] = {{{}}};\n{TOOLS}{AFTER}", text.join(",\n")))?;
    let mut lines = printed.lines();
    for (n, sums) in jobs.iter().enumerate() {
        let got: Vec<u32> = lines.next().unwrap_or_default().split_whitespace().map(|word| word.parse().unwrap()).collect();
        let mended = sums.iter().map(|&x| if x == f32::NEG_INFINITY { 0 } else { x.to_bits() });
        let guard = || std::iter::repeat_n(UNTOUCHED, GUARD);
        let want: Vec<u32> = guard().chain(mended).chain(guard()).collect();
        if got != want {
            return Err(format!("job {n}, {sums:?}: {got:x?}"));
        }
    }
    Ok(())
}

/// Mistakes that the comparison has to find.
const FAULTS: [[&str; 2]; 4] =
    [["n < count && ", ""], ["n < count", "n < count - 1"], ["sums[n] < 0.0f", "true"], ["sums[n] = 0.0f", "sums[n] = 1.0f"]];

#[test]
fn sums_of_nothing_are_nothing() {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(why) => return skip("msl", &format!("kernel of sums, on the CPU: {why}")),
    };
    let mut random = Random::new(4);
    let jobs: Vec<Vec<f32>> = (0..60).map(|_| draw(&mut random)).collect();
    for sanitized in [Check::Plain, Check::Addresses] {
        check(&toolchain.with(sanitized), SOURCE, &jobs).unwrap_or_else(|e| panic!("{sanitized:?}: {e}"));
    }
    for [right, wrong] in FAULTS {
        let source = SOURCE.replace(right, wrong);
        assert_ne!(source, SOURCE, "{right} is not there");
        assert!(check(&toolchain.with(Check::Addresses), &source, &jobs).is_err(), "nobody finds {wrong:?} for {right:?}");
    }
}
