//! The kernel of batch entries, compiled for a CPU: of any lengths, those that are within extents; of any page table, a page of the containers for
//! every entry, and that of the keys where there are some.

use crate::grid::{BEFORE, TOOLS};
use conformance::msl::{Check, Toolchain};
use conformance::random::Random;
use conformance::say::{say, skip};
use conformance::share::{DAYS, of_today};

const SOURCE: &str = include_str!("../../sdpa/cudnn/src/kernels/entries.cu");

/// What is read ends where its memory does.
const AFTER: &str = "
static int *given_numbers(number count) {
    int *made = static_cast<int *>(malloc(static_cast<size_t>(count) * 4));
    for (number n = 0; n < count; n++) made[n] = static_cast<int>(*next++);
    return made;
}

static int *written(number count) { return reinterpret_cast<int *>(buffer(count, 4)); }

static void print(const int *of, number count) {
    for (number n = -guard; n < count + guard; n++) printf(\"%d \", of[n]);
    free(const_cast<int *>(of) - guard);
}

int main() {
    while (next != jobs + sizeof(jobs) / sizeof(number)) {
        number batch = *next++, each = *next++, parts = *next++, tokens = *next++, count = *next++, given = *next++, least = *next++;
        int *from[2], *to[2];
        number most[2], promised[2];
        for (int side = 0; side < 2; side++) {
            number there = *next++;
            promised[side] = *next++;
            most[side] = *next++;
            from[side] = there ? given_numbers(batch) : nullptr;
            to[side] = !there ? nullptr : promised[side] ? from[side] : written(batch);
        }
        int *table = given_numbers(batch * given), *pages = each ? written(batch * each) : nullptr;
        number threads = each ? batch * each : batch;
        launch((threads + 127) / 128, 128, [&] {
            entries(batch, from[0], most[0], to[0], from[1], most[1], to[1], least, each, parts, tokens, count, table, given, pages);
        });
        for (int side = 0; side < 2; side++) {
            for (number n = 0; n < batch && promised[side] && from[side]; n++) printf(\"%d \", from[side][n]);
            if (to[side] && !promised[side]) print(to[side], batch);
            free(from[side]);
        }
        if (each) print(pages, batch * each);
        printf(\"\\n\");
        free(table);
    }
}
";

const GUARD: usize = 16;
const UNTOUCHED: i64 = 0x5a5a_5a5a;

/// Lengths of one side, each one's bound, and whether they are promised to be within it.
struct Lengths {
    of: Vec<i64>,
    most: i64,
    promised: bool,
}

/// One launch.
struct Job {
    batch: usize,
    tokens: i64,
    parts: i64,
    pages: i64,
    longest: i64,
    /// Of queries, and of keys.
    lengths: [Option<Lengths>; 2],
    keyless: bool,
    /// A row for each batch entry, where there are pages.
    table: Option<Vec<Vec<i64>>>,
}

impl Job {
    fn draw(random: &mut Random) -> Job {
        let (tokens, parts) = (random.pick(&[1, 1, 2, 16, 64]), random.pick(&[1, 1, 3, 5, 7]));
        let longest = [random.between(1, 12), random.between(1, 200), 2 * parts * tokens, 64 * parts][random.between(0, 3) as usize];
        let pages = [1, random.between(1, 9), random.between(1, 9), i64::from(i32::MAX) / parts][random.between(0, 3) as usize];
        let batch = random.pick(&[1, 2, 3, 5, 64, 300]);
        let [low, high] = [i32::MIN, i32::MAX].map(i64::from);
        let length = |random: &mut Random, most: i64| {
            let (whole, any) = (random.between(0, most / tokens) * tokens, random.between(0, most));
            random.pick(&[low, -1, 0, 1, most, most + 1, high, whole, whole, any])
        };
        let padded = random.between(0, 3) > 0;
        let keyless = padded && random.between(0, 1) == 0;
        let most_queries = random.between(1, 40);
        let lengths = [most_queries, longest].map(|most| {
            // Where engines are told of one key at least, nothing can be promised.
            let promised = !keyless && random.between(0, 3) == 0;
            // Promises need not be kept: what is promised is the caller's memory.
            let of = (0..batch).map(|_| length(random, most)).collect();
            padded.then_some(Lengths { of, most, promised })
        });
        let inside = |random: &mut Random| random.between(0, pages - 1);
        let page = |random: &mut Random| match random.between(0, 3) {
            0 => random.pick(&[low, -1, pages, pages + 1, high]).min(high),
            1 | 2 => inside(random),
            _ => pages - 1,
        };
        let given = (longest + tokens * parts - 1) / (tokens * parts);
        let table = (0..batch).map(|_| (0..given).map(|_| page(random)).collect()).collect();
        let table = (!padded || random.between(0, 1) == 0).then_some(table);
        Job { batch: batch as usize, tokens, parts, pages, longest, lengths, keyless, table }
    }

    /// Entries of a row that engines read.
    fn each(&self) -> i64 {
        self.table.as_ref().map_or(0, |_| (self.longest + self.tokens - 1) / self.tokens)
    }

    fn numbers(&self) -> Vec<i64> {
        let given = self.table.as_ref().map_or(0, |table| table[0].len() as i64);
        let mut all = vec![self.batch as i64, self.each(), self.parts, self.tokens, self.pages, given, i64::from(self.keyless)];
        for lengths in &self.lengths {
            let (promised, most) = lengths.as_ref().map_or((false, self.longest), |lengths| (lengths.promised, lengths.most));
            all.extend([i64::from(lengths.is_some()), i64::from(promised), most]);
            all.extend(lengths.iter().flat_map(|lengths| &lengths.of));
        }
        all.extend(self.table.iter().flatten().flatten());
        all
    }

    /// Keys of an entry.
    fn keys(&self, b: usize) -> i64 {
        self.lengths[1].as_ref().map_or(self.longest, |lengths| lengths.of[b].clamp(0, lengths.most))
    }

    /// What a length becomes.
    fn told(&self, side: usize, lengths: &Lengths, b: usize) -> i64 {
        let within = lengths.of[b].clamp(0, lengths.most);
        match (self.keyless && self.keys(b) == 0, side) {
            (true, 0) => 0,
            (true, _) => 1,
            (false, _) => within,
        }
    }

    /// Key by key: where the first of each part is.
    fn want(&self) -> Vec<i64> {
        let page_size = self.tokens * self.parts;
        let guarded = |numbers: Vec<i64>| [vec![UNTOUCHED; GUARD], numbers, vec![UNTOUCHED; GUARD]].concat();
        let mut want = Vec::new();
        for (side, lengths) in self.lengths.iter().enumerate() {
            match lengths {
                Some(lengths) if lengths.promised => want.extend(&lengths.of),
                Some(lengths) => want.extend(guarded((0..self.batch).map(|b| self.told(side, lengths, b)).collect())),
                None => {}
            }
        }
        let entry = |row: &Vec<i64>, b: usize, key: i64| {
            let page = if key < self.keys(b) { row[(key / page_size) as usize].clamp(0, self.pages - 1) } else { 0 };
            (page * page_size + key % page_size) / self.tokens
        };
        if let Some(table) = &self.table {
            let keys = || (0..self.longest).step_by(self.tokens as usize);
            want.extend(guarded(table.iter().enumerate().flat_map(|(b, row)| keys().map(move |key| entry(row, b, key))).collect()));
        }
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
const FAULTS: [[&str; 2]; 27] = [
    ["if (n >= batch * each) return", "if (n > batch * each) return"],
    ["if (n >= batch * each) return", "if (n >= batch * each - 1) return"],
    ["number b = n / each", "number b = n / given"],
    ["!keys || at * tokens < keys[b]", "at * tokens < keys[b]"],
    ["!keys || at * tokens < keys[b]", "!keys || at * tokens <= keys[b]"],
    ["!keys || at * tokens < keys[b]", "!keys || at < keys[b]"],
    ["!keys || at * tokens < keys[b]", "true"],
    ["!keys || at * tokens < keys[b]", "!keys || at * tokens < keys[0]"],
    ["0, pages - 1) : 0", "0, pages - 1) : table[b * given]"],
    ["table[b * given + at / parts]", "table[b * each + at / parts]"],
    ["table[b * given + at / parts]", "table[b * given + at]"],
    ["0, pages - 1)", "0, pages)"],
    ["0, pages - 1)", "-1, pages - 1)"],
    ["page * parts + at % parts", "page * parts"],
    ["page * parts + at % parts", "page + at % parts"],
    ["x < least ? least : ", ""],
    ["x < most ? x : most", "x"],
    ["to_queries != queries && n < batch", "to_queries && n < batch"],
    ["to_keys != keys && n < batch", "to_keys && n < batch"],
    ["to_queries != queries && n < batch", "to_queries != queries"],
    ["to_keys != keys && n < batch", "to_keys != keys && n < batch - 1"],
    ["least && keys[n] < least ? 0 : ", ""],
    ["least && keys[n] < least ? 0 : ", "least && keys[n] == 0 ? 0 : "],
    ["least && keys[n] < least ? 0 : ", "keys && keys[n] < 1 ? 0 : "],
    ["within(keys[n], least, most_keys)", "within(keys[n], 0, most_keys)"],
    ["within(keys[n], least, most_keys)", "within(keys[n], least, most_queries)"],
    ["within(queries[n], 0, most_queries)", "within(queries[n], least, most_queries)"],
];

#[test]
fn engines_are_told_of_lengths_within_extents_and_of_pages_that_are_there() {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(why) => return skip("msl", &format!("the kernel of batch entries, on the CPU: {why}")),
    };
    let mut random = Random::new(22);
    let jobs: Vec<Job> = (0..700).map(|_| Job::draw(&mut random)).collect();
    for sanitized in [Check::Plain, Check::Addresses] {
        check(&toolchain.with(sanitized), SOURCE, &jobs).unwrap_or_else(|e| panic!("{sanitized:?}: {e}"));
    }
    let faults = of_today("faults of the kernel of batch entries", DAYS, FAULTS.to_vec(), |_| Vec::new());
    for [right, wrong] in &faults {
        let source = SOURCE.replace(right, wrong);
        assert_ne!(source, SOURCE, "{right} is not in the source");
        assert!(check(&toolchain.of_faults(), &source, &jobs).is_err(), "{wrong} instead of {right} is not found");
    }
    let count = |of: &dyn Fn(&&Job) -> bool| jobs.iter().filter(of).count();
    let tables = count(&|job| job.table.is_some());
    let right = count(&|job| job.table.iter().flatten().flatten().all(|page| (0..job.pages).contains(page)));
    assert!(right > 20 && tables > 300 && jobs.len() - right > 200 && count(&|job| job.keyless) > 150, "{right} of {tables}");
    say(&format!("the kernel of batch entries: {} launches, {tables} of them over tables, {} faults found", jobs.len(), faults.len()));
}
