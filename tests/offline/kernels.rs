//! Kernels of this project that run beside cuDNN's: the PTX is what the compiler makes of the source, and the source, compiled for a CPU,
//! computes what it should of any boundaries.

use crate::grid::{BEFORE, TOOLS, whole};
use conformance::golden;
use conformance::msl::{Check, Toolchain};
use conformance::nvrtc;
use conformance::random::Random;
use conformance::say::{say, skip};
use conformance::share::{DAYS, of_today};
use std::fmt::Write;

const SOURCE: &str = include_str!("../../sdpa/cudnn/src/kernels/documents.cu");

/// The sources, and the PTX of each.
const TEXTS: [(&str, &str); 6] = [
    (SOURCE, "sdpa/cudnn/src/kernels/documents.ptx"),
    (include_str!("../../sdpa/cudnn/src/kernels/entries.cu"), "sdpa/cudnn/src/kernels/entries.ptx"),
    (include_str!("../../sdpa/cudnn/src/kernels/pieces.cu"), "sdpa/cudnn/src/kernels/pieces.ptx"),
    (include_str!("../../sdpa/cudnn/src/kernels/sinks.cu"), "sdpa/cudnn/src/kernels/sinks.ptx"),
    (include_str!("../../sdpa/cudnn/src/kernels/sums.cu"), "sdpa/cudnn/src/kernels/sums.ptx"),
    (include_str!("../../sdpa/parallel/src/device/kernels/ranks.cu"), "sdpa/parallel/src/device/kernels/ranks.ptx"),
];

/// The version that drivers are asked for is the first that knows the architecture: what the compiler writes is the newest.
const VERSION: &str = ".version 7.1";

/// Without comments, which name the compiler's build, and without blank lines one behind the other.
fn plain(ptx: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    for line in ptx.lines().map(str::trim_end).filter(|line| !line.trim_start().starts_with("//")) {
        let line = if line.starts_with(".version ") { VERSION } else { line };
        if !line.is_empty() || lines.last().is_some_and(|last| !last.is_empty()) {
            lines.push(line);
        }
    }
    while lines.last().is_some_and(|last| last.is_empty()) {
        lines.pop();
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_ptx_is_what_the_compiler_makes_of_the_source() {
    let nvrtc = match nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &format!("PTX of kernels: {why}")),
    };
    let made = |source: &str| plain(&nvrtc.ptx(&whole(source), "compute_80", &[]).unwrap());
    for (source, ptx) in TEXTS {
        golden::check(ptx, &made(source)).unwrap_or_else(|e| panic!("{e}"));
    }
    // Another source is another text.
    let other = SOURCE.replace("return x < 0 ? 0 : ", "return ");
    assert!(other != SOURCE && made(&other) != made(SOURCE));
}

const AFTER: &str = "
static void *boundaries(number wide, number count) {
    void *made = malloc(static_cast<size_t>(count + 1) * (wide ? 8 : 4));
    for (number n = 0; n <= count; n++) {
        if (wide) static_cast<number *>(made)[n] = *next++;
        else static_cast<int *>(made)[n] = static_cast<int>(*next++);
    }
    return made;
}

static void print(char *made, number count, number bytes) {
    for (number n = -guard; n < count + guard; n++) {
        number value = 0;
        memcpy(&value, made + n * bytes, static_cast<size_t>(bytes));
        printf(\"%llx \", static_cast<unsigned long long>(value));
    }
    printf(\"\\n\");
    free(made - guard * bytes);
}

int main() {
    while (next != jobs + sizeof(jobs) / sizeof(number)) {
        number unpairs = *next++, wide = *next++, kind = *next++, count = *next++;
        number total = *next++, longest = *next++, other_total = *next++, other_longest = *next++;
        const number *more = next;
        next += unpairs ? 7 : 9;
        number counted = kind == 2;
        void *own = boundaries(wide, count);
        void *others = kind == 0 ? own : counted ? boundaries(0, count - 1) : boundaries(wide, count);
        if (unpairs) {
            char *to = buffer(more[6], more[0]);
            launch(count, 32, [&] {
                unpaired(wide, own, total, longest, others, other_total, other_longest, counted, to, more[0], more[1], more[2], more[3], more[4],
                         more[5]);
            });
            print(to, more[6], more[0]);
        } else {
            char *lengths = buffer(count, 4), *offsets[9];
            number *to[9];
            for (int n = 0; n < 9; n++) {
                offsets[n] = buffer(count + 1, 8);
                to[n] = more[n] < 0 ? nullptr : reinterpret_cast<number *>(offsets[n]);
            }
            launch((count + 128) / 128, 128, [&] {
                documents(wide, own, total, longest, others, other_total, other_longest, counted, count, reinterpret_cast<int *>(lengths),
                          to[0], more[0], to[1], more[1], to[2], more[2], to[3], more[3], to[4], more[4], to[5], more[5], to[6], more[6], to[7],
                          more[7], to[8], more[8]);
            });
            print(lengths, count, 4);
            for (int n = 0; n < 9; n++) print(offsets[n], count + 1, 8);
        }
        if (kind != 0) free(others);
        free(own);
    }
}
";

/// Boundaries of one side, how many tokens there is memory for, and the most of a document.
#[derive(Clone)]
struct Boundaries {
    at: Vec<i64>,
    total: i64,
    longest: i64,
}

impl Boundaries {
    /// Documents as they should be, or anything at all.
    fn draw(random: &mut Random, wide: bool, documents: usize, most: i64) -> Boundaries {
        let total = random.between(0, most);
        let longest = random.between(1, (total + 2).min(i64::from(i32::MAX)));
        let hostile = random.between(0, 1) == 1;
        let mut end = random.between(-1, 3);
        let at = (0..=documents).map(|_| {
            let [low, high] = if wide { [i64::MIN, i64::MAX] } else { [i32::MIN, i32::MAX].map(i64::from) };
            let step = [0, random.between(0, longest), random.between(0, 2)][random.between(0, 2) as usize];
            let strange =
                [low, high, -1, total, total + 1, random.between(-5, total + 5), end.saturating_sub(3), 0, end.saturating_add(longest + 1)];
            end = if hostile { random.pick(&strange) } else { end.max(0).saturating_add(step) }.clamp(low, high);
            end
        });
        Boundaries { at: at.collect(), total, longest }
    }

    /// The first token of each document, and how many it has, where none is outside the memory or longer than the longest.
    fn documents(&self) -> Vec<(i64, i64)> {
        let inside: Vec<i64> = self.at.iter().map(|at| *at.max(&0).min(&self.total)).collect();
        inside.windows(2).map(|pair| (pair[0], (pair[1] - pair[0]).max(0).min(self.longest))).collect()
    }
}

/// One launch.
struct Job {
    wide: bool,
    own: Boundaries,
    others: Others,
    kernel: Kernel,
}

/// What is known of the other side.
enum Others {
    /// It has the same boundaries.
    Same,
    /// It has its own.
    Packed(Boundaries),
    /// It is not packed: lengths, and the most of a batch entry.
    Counted(Vec<i64>, i64),
}

enum Kernel {
    /// Elements of a token in each tensor; none where there is no such tensor.
    Documents([Option<i64>; 9]),
    Unpaired {
        bytes: i64,
        bits: i64,
        heads: i64,
        head: i64,
        token: i64,
        width: i64,
    },
}

const GUARD: usize = 16;

fn untouched(bytes: i64) -> u64 {
    0x5a5a_5a5a_5a5a_5a5a >> (64 - 8 * bytes)
}

/// A buffer with what lies around it, as it is printed.
fn line(bytes: i64, buffer: &[u64]) -> String {
    let around = [untouched(bytes); GUARD];
    around.iter().chain(buffer).chain(&around).fold(String::new(), |mut line, value| {
        let _ = write!(line, "{value:x} ");
        line
    })
}

impl Job {
    fn draw(random: &mut Random) -> Job {
        let wide = random.between(0, 1) == 1;
        let unpairs = random.between(0, 2) == 0;
        let documents =
            [1, 2, 127, 128, 129, random.between(3, 9), random.between(3, 9), random.between(3, 9)][random.between(0, 7) as usize];
        let documents = if unpairs { documents.min(9) } else { documents } as usize;
        // No memory is of so many tokens where only offsets are computed.
        let most = if unpairs || random.between(0, 3) > 0 { 60 } else { 1 << 40 };
        let own = Boundaries::draw(random, wide, documents, most);
        let others = match random.between(0, 5) {
            0 => Others::Same,
            1 | 2 => {
                let longest = random.between(1, 70);
                let strange = [i64::from(i32::MIN), -1, 0, 0, 1, longest, longest + 1, i64::from(i32::MAX)];
                Others::Counted((0..documents).map(|_| random.pick(&strange)).collect(), longest)
            }
            _ => Others::Packed(Boundaries::draw(random, wide, documents, most)),
        };
        let kernel = if unpairs {
            let [heads, width, gap] = [random.between(1, 4), random.between(1, 5), random.between(0, 2)];
            let token_major = random.between(0, 1) == 1;
            let [head, token] = if token_major { [width + gap, heads * (width + gap)] } else { [own.total * (width + gap), width + gap] };
            let [bytes, bits] = random.pick(&[[2, 0], [2, 0xff80], [4, 0], [4, 0xff80_0000]]);
            Kernel::Unpaired { bytes, bits, heads, head, token, width }
        } else {
            let used = random.between(1, 9) as usize;
            Kernel::Documents(std::array::from_fn(|n| (n < used).then(|| random.between(1, 1 << 16))))
        };
        Job { wide, own, others, kernel }
    }

    /// Tokens that each document has on the other side.
    fn other_lengths(&self) -> Vec<i64> {
        let lengths = |of: &Boundaries| of.documents().into_iter().map(|(_, length)| length).collect();
        match &self.others {
            Others::Same => lengths(&self.own),
            Others::Packed(others) => lengths(others),
            Others::Counted(of, longest) => of.iter().map(|length| *length.max(&0).min(longest)).collect(),
        }
    }

    /// Elements of the buffer that is filled.
    fn elements(&self, heads: i64, head: i64, token: i64, width: i64) -> i64 {
        if self.own.total == 0 { 0 } else { (heads - 1) * head + (self.own.total - 1) * token + width }
    }

    fn numbers(&self) -> Vec<i64> {
        let own = &self.own;
        let unpairs = matches!(self.kernel, Kernel::Unpaired { .. });
        let (kind, total, longest, more): (i64, i64, i64, &[i64]) = match &self.others {
            Others::Same => (0, own.total, own.longest, &[]),
            Others::Packed(others) => (1, others.total, others.longest, &others.at),
            Others::Counted(of, longest) => (2, 0, *longest, of),
        };
        let mut all = vec![i64::from(unpairs), i64::from(self.wide), kind, own.at.len() as i64 - 1];
        all.extend([own.total, own.longest, total, longest]);
        match self.kernel {
            Kernel::Documents(units) => all.extend(units.map(|unit| unit.unwrap_or(-1))),
            Kernel::Unpaired { bytes, bits, heads, head, token, width } => {
                all.extend([bytes, bits, heads, head, token, width, self.elements(heads, head, token, width)]);
            }
        }
        all.extend(&own.at);
        all.extend(more);
        all
    }

    /// What the buffers hold afterwards.
    fn want(&self) -> Vec<String> {
        let (own, others) = (self.own.documents(), self.other_lengths());
        match self.kernel {
            Kernel::Documents(units) => {
                let lengths: Vec<u64> =
                    own.iter().zip(&others).map(|((_, own), other)| if *other == 0 { 0 } else { *own as u64 }).collect();
                let last = self.own.at.last().map_or(0, |at| *at.max(&0).min(&self.own.total));
                let first: Vec<i64> = own.iter().map(|(first, _)| *first).chain([last]).collect();
                let offsets = units.iter().map(|unit| match unit {
                    Some(unit) => line(8, &first.iter().map(|first| (first * unit) as u64).collect::<Vec<_>>()),
                    None => line(8, &vec![untouched(8); first.len()]),
                });
                [line(4, &lengths)].into_iter().chain(offsets).collect()
            }
            Kernel::Unpaired { bytes, bits, heads, head, token, width } => {
                let mut buffer = vec![untouched(bytes); self.elements(heads, head, token, width) as usize];
                for ((first, length), _) in own.iter().zip(&others).filter(|(_, other)| **other == 0) {
                    for (t, h) in (*first..first + length).flat_map(|t| (0..heads).map(move |h| (t, h))) {
                        let row = (t * token + h * head) as usize;
                        buffer[row..row + width as usize].fill(bits as u64);
                    }
                }
                vec![line(bytes, &buffer)]
            }
        }
    }
}

/// Runs every job; the first that gives something else than it should.
fn check(toolchain: &Toolchain, source: &str, jobs: &[Job]) -> Result<(), String> {
    let numbers = jobs.iter().flat_map(Job::numbers);
    // The smallest number has no literal.
    let text = numbers.map(|n| if n == i64::MIN { "-9223372036854775807 - 1".to_owned() } else { n.to_string() });
    let text = text.collect::<Vec<_>>().join(",\n");
    let printed = toolchain.print(&format!("{BEFORE}{source}\nstatic const number jobs[] = {{{text}}};\n{TOOLS}{AFTER}"))?;
    let mut lines = printed.lines();
    for (n, job) in jobs.iter().enumerate() {
        for (buffer, want) in job.want().iter().enumerate() {
            let got = lines.next().unwrap_or_default();
            if got.trim_end() != want.trim_end() {
                return Err(format!("job {n} {:?}, buffer {buffer}\n  got:  {got}\n  want: {want}", job.numbers()));
            }
        }
    }
    Ok(())
}

/// Mistakes that the comparison has to find.
const FAULTS: [[&str; 2]; 18] = [
    ["x > most ? most : x", "x"],
    ["x < 0 ? 0 : ", ""],
    ["side.wide ?", "!side.wide ?"],
    ["begin(side, n), side.longest", "begin(side, n), side.total"],
    ["begin(side, n + 1) - begin(side, n)", "begin(side, n + 1)"],
    ["if (side.counted)", "if (!side.counted)"],
    ["[n], side.longest);", "[n], side.total);"],
    ["(const int *)side.boundaries)[n], side", "(const int *)side.boundaries)[n + 1], side"],
    ["if (n > count) return", "if (n >= count) return"],
    ["if (n < count) lengths", "if (n <= count) lengths"],
    ["length(other, n) == 0 ? 0 : ", ""],
    ["number first = begin(side, n);\n    if (to_0)", "number first = begin(side, n + 1);\n    if (to_0)"],
    ["if (to_8) ", ""],
    ["first * per_8", "first * per_7"],
    ["if (length(other, n) != 0) return;", ""],
    ["i / width / heads) * token", "i / width % heads) * token"],
    ["% heads * head", "* head"],
    ["if (bytes == 2)", "if (bytes == 4)"],
];

#[test]
fn kernels_do_what_they_should_of_any_boundaries() {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(why) => return skip("msl", &format!("kernels beside cuDNN's, on the CPU: {why}")),
    };
    let mut random = Random::new(20);
    let jobs: Vec<Job> = (0..600).map(|_| Job::draw(&mut random)).collect();
    for sanitized in [Check::Plain, Check::Addresses] {
        check(&toolchain.with(sanitized), SOURCE, &jobs).unwrap_or_else(|e| panic!("{sanitized:?}: {e}"));
    }
    let few = &jobs[..200];
    let faults = of_today("faults of kernels of documents", DAYS, FAULTS.to_vec(), |_| Vec::new());
    for [right, wrong] in &faults {
        let source = SOURCE.replace(right, wrong);
        assert_ne!(source, SOURCE, "{right} is not in the source");
        assert!(check(&toolchain.of_faults(), &source, few).is_err(), "{wrong} instead of {right} is not found");
    }
    let launches = |unpairs: bool| jobs.iter().filter(|job| matches!(job.kernel, Kernel::Unpaired { .. }) == unpairs).count();
    say(&format!("kernels beside cuDNN's: {} and {} launches, {} faults found", launches(false), launches(true), faults.len()));
}
