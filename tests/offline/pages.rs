//! The kernel of page tables, compiled for a CPU: of any table and any lengths, a page of the containers for every entry, and that of the keys
//! where there are some.

use crate::grid::{BEFORE, TOOLS};
use conformance::msl::{Check, Toolchain};
use conformance::random::Random;
use conformance::say::{say, skip};

const SOURCE: &str = include_str!("../../sdpa/cudnn/src/kernels/pages.cu");

/// What is read ends where its memory does.
const AFTER: &str = "
static int *given_numbers(number count) {
    int *made = static_cast<int *>(malloc(static_cast<size_t>(count) * 4));
    for (number n = 0; n < count; n++) made[n] = static_cast<int>(*next++);
    return made;
}

int main() {
    while (next != jobs + sizeof(jobs) / sizeof(number)) {
        number batch = *next++, each = *next++, parts = *next++, tokens = *next++, count = *next++, longest = *next++, given = *next++;
        int *lengths = *next++ ? given_numbers(batch) : nullptr, *table = given_numbers(batch * given);
        int *to = reinterpret_cast<int *>(buffer(batch * each, 4));
        launch((batch * each + 127) / 128, 128, [&] { pages(batch, each, parts, tokens, count, longest, lengths, table, given, to); });
        for (number n = -guard; n < batch * each + guard; n++) printf(\"%d \", to[n]);
        printf(\"\\n\");
        free(to - guard);
        free(table);
        free(lengths);
    }
}
";

const GUARD: usize = 9;
const UNTOUCHED: i64 = 0x5a5a_5a5a;

/// One launch.
struct Job {
    tokens: i64,
    parts: i64,
    pages: i64,
    longest: i64,
    lengths: Option<Vec<i64>>,
    /// A row for each batch entry.
    table: Vec<Vec<i64>>,
}

impl Job {
    fn draw(random: &mut Random) -> Job {
        let (tokens, parts) = (random.pick(&[1, 1, 2, 16, 64]), random.pick(&[1, 1, 3, 5, 7]));
        let longest = [random.between(1, 12), random.between(1, 200), 2 * parts * tokens, 64 * parts][random.between(0, 3) as usize];
        let pages = [1, random.between(1, 9), random.between(1, 9), i64::from(i32::MAX) / parts][random.between(0, 3) as usize];
        let batch = random.pick(&[1, 2, 3, 5, 64]);
        let [low, high] = [i32::MIN, i32::MAX].map(i64::from);
        let length = |random: &mut Random| {
            let (whole, any) = (random.between(0, longest / tokens) * tokens, random.between(0, longest));
            random.pick(&[low, -1, 0, 1, longest, longest + 1, high, whole, whole, any])
        };
        let lengths = (random.between(0, 3) > 0).then(|| (0..batch).map(|_| length(random)).collect());
        let inside = |random: &mut Random| random.between(0, pages - 1);
        let page = |random: &mut Random| match random.between(0, 3) {
            0 => random.pick(&[low, -1, pages, pages + 1, high]).min(high),
            1 | 2 => inside(random),
            _ => pages - 1,
        };
        let given = (longest + tokens * parts - 1) / (tokens * parts);
        let table = (0..batch).map(|_| (0..given).map(|_| page(random)).collect()).collect();
        Job { tokens, parts, pages, longest, lengths, table }
    }

    /// Entries of a row that engines read.
    fn each(&self) -> i64 {
        (self.longest + self.tokens - 1) / self.tokens
    }

    fn numbers(&self) -> Vec<i64> {
        let (batch, given) = (self.table.len() as i64, self.table[0].len() as i64);
        let mut all = vec![batch, self.each(), self.parts, self.tokens, self.pages, self.longest, given, i64::from(self.lengths.is_some())];
        all.extend(self.lengths.iter().flatten());
        all.extend(self.table.iter().flatten());
        all
    }

    /// Key by key: where the first of each part is.
    fn want(&self) -> Vec<i64> {
        let page_size = self.tokens * self.parts;
        let mut want = vec![UNTOUCHED; GUARD];
        for (b, row) in self.table.iter().enumerate() {
            let keys = self.lengths.as_ref().map_or(self.longest, |lengths| lengths[b].clamp(0, self.longest));
            for key in (0..self.longest).step_by(self.tokens as usize) {
                let page = if key < keys { row[(key / page_size) as usize].clamp(0, self.pages - 1) } else { 0 };
                want.push((page * page_size + key % page_size) / self.tokens);
            }
        }
        want.extend([UNTOUCHED; GUARD]);
        want
    }
}

/// Runs every job; the first that gives something else than it should.
fn check(toolchain: &Toolchain, source: &str, jobs: &[Job]) -> Result<(), String> {
    let text: Vec<String> = jobs.iter().flat_map(Job::numbers).map(|n| n.to_string()).collect();
    let printed = toolchain.print(&format!("{BEFORE}{source}\nstatic const number jobs[] = {{{}}};\n{TOOLS}{AFTER}", text.join(",\n")))?;
    let mut lines = printed.lines();
    for (n, job) in jobs.iter().enumerate() {
        let got: Vec<i64> = lines.next().unwrap_or_default().split_whitespace().map(|word| word.parse().unwrap()).collect();
        let want = job.want();
        if got != want {
            return Err(format!("job {n} {:?}\n  got:  {got:?}\n  want: {want:?}", job.numbers()));
        }
    }
    Ok(())
}

/// Mistakes that the comparison has to find.
const FAULTS: [[&str; 2]; 15] = [
    ["if (n >= batch * each) return", "if (n > batch * each) return"],
    ["if (n >= batch * each) return", "if (n >= batch * each - 1) return"],
    ["number b = n / each", "number b = n / given"],
    ["lengths && lengths[b] < longest", "lengths[b] < longest"],
    ["lengths && lengths[b] < longest ? lengths[b] : longest", "longest"],
    ["at * tokens < keys", "at * tokens <= keys"],
    ["at * tokens < keys", "at < keys"],
    ["at / parts] : 0", "at / parts] : table[b * given]"],
    ["table[b * given + at / parts]", "table[b * each + at / parts]"],
    ["table[b * given + at / parts]", "table[b * given + at]"],
    ["page < 0 ? 0 : ", ""],
    ["page < pages ? page : pages - 1", "page"],
    ["page < pages ?", "page <= pages ?"],
    ["page * parts + at % parts", "page * parts"],
    ["page * parts + at % parts", "page + at % parts"],
];

#[test]
fn any_table_is_one_of_pages_that_are_there() {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(why) => return skip("msl", &format!("the kernel of page tables, on the CPU: {why}")),
    };
    let mut random = Random::new(22);
    let jobs: Vec<Job> = (0..500).map(|_| Job::draw(&mut random)).collect();
    for sanitized in [Check::Plain, Check::Addresses] {
        check(&toolchain.with(sanitized), SOURCE, &jobs).unwrap_or_else(|e| panic!("{sanitized:?}: {e}"));
    }
    for [right, wrong] in FAULTS {
        let source = SOURCE.replace(right, wrong);
        assert_ne!(source, SOURCE, "{right} is not in the source");
        assert!(check(&toolchain.of_faults(), &source, &jobs).is_err(), "{wrong} instead of {right} is not found");
    }
    let inside = |job: &&Job| job.table.iter().flatten().all(|page| (0..job.pages).contains(page));
    let right = jobs.iter().filter(inside).count();
    assert!(right > 20 && jobs.len() - right > 200, "{right}");
    say(&format!(
        "the kernel of page tables: {} launches, {right} of them over tables without a fault, {} faults found",
        jobs.len(),
        FAULTS.len()
    ));
}
