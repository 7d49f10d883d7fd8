//! Text that a small model can learn: sums, comparisons and sentences of a small grammar, in sequences of different lengths, generated from a seed.

/// Random numbers that are identical in every run.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        // The generator is SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn of<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.below(words.len() as u64) as usize]
    }

    /// Returns a normally distributed number.
    pub(crate) fn normal(&mut self) -> f32 {
        let unit = |x: u64| ((x >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let (a, b) = (unit(self.next()), unit(self.next()));
        ((-2. * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }
}

/// Returns a sequence of one to six related lines.
fn document(random: &mut Random) -> String {
    let mut text = String::new();
    let animal = random.of(&["cat", "dog", "hen", "fox", "owl", "crow", "mouse", "horse"]);
    for _ in 0..=random.below(6) {
        text += &match random.below(4) {
            0 => {
                let (a, b) = (random.below(50), random.below(50));
                format!("{a}+{b}={}\n", a + b)
            }
            1 => {
                let (a, b) = (random.below(100), random.below(100));
                let word = if a < b { "less" } else { "not less" };
                format!("{a} is {word} than {b}\n")
            }
            2 => {
                let place = random.of(&["barn", "wood", "yard", "field", "house"]);
                format!("the {animal} sits in the {place}. where? in the {place}.\n")
            }
            _ => {
                let verb = random.of(&["sees", "hears", "follows", "fears"]);
                let other = random.of(&["wind", "rain", "moon", "man", "child"]);
                format!("the {animal} {verb} the {other}, and the {other} {verb} the {animal}.\n")
            }
        };
    }
    text
}

/// The characters in use; the first one ends a sequence.
pub(crate) const ALPHABET: &str = "\u{3}\n abcdefghijklmnopqrstuvwxyz0123456789+=.,?";

/// Returns packed sequences of `tokens` characters and one more, the last one truncated, and their `cu_seqlens` in tokens of the input.
pub(crate) fn batch(seed: u64, step: u64, tokens: usize) -> (Vec<u32>, Vec<u32>) {
    let mut random = Random(seed ^ step.wrapping_mul(0xD134_2543_DE82_EF95));
    let (mut text, mut boundaries) = (Vec::new(), vec![0u32]);
    while text.len() <= tokens {
        let characters = document(&mut random).chars().chain(['\u{3}']).collect::<Vec<_>>();
        text.extend(characters.into_iter().filter_map(|c| ALPHABET.chars().position(|a| a == c)).map(|n| n as u32));
        boundaries.push(text.len().min(tokens) as u32);
    }
    boundaries.dedup();
    text.truncate(tokens + 1);
    (text, boundaries)
}
