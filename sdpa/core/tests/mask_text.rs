//! The text of normalised masks parses to an equal mask, and two masks have the same text only if they are equal.

use sdpa_core::{AttentionSpec, DType, Kept, Layout, Mask, Packed, Shape};
use std::collections::HashMap;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % n as u64) as usize
    }

    fn mask(&mut self, depth: usize, leaves: &[&str]) -> Mask {
        let parts = |random: &mut Random| (0..1 + random.below(3)).map(|_| random.mask(depth - 1, leaves)).collect();
        match self.below(if depth == 0 { 1 } else { 5 }) {
            0 | 1 => leaves[self.below(leaves.len())].parse().unwrap_or_else(|e| panic!("{e}")),
            2 => Mask::All(parts(self)),
            3 => Mask::Any(parts(self)),
            _ => !self.mask(depth - 1, leaves),
        }
    }
}

/// Windows of every alignment, prefixes and lengths; disjunctions, shared values, tables, and parameters with the names of masks and of shared
/// values.
const LEAVES: &[&str] = &[
    "causal",
    "causal-bottom-right",
    "causal-ends",
    "window:3,0",
    "window:inf,2",
    "window:2,inf:bottom-right",
    "window:4,1:ends",
    "window:inf,12",
    "prefix-lm:3",
    "prefix-lm:0",
    "k > q",
    "k - q < -1",
    "k != q + 1",
    "padding",
    "tensor seq_len_kv[batch]: i32; k < seq_len_kv",
    "tensor seq_len_q[batch]: i32; q + 1 < seq_len_q",
    "document",
    "dilated:2",
    "natten:3",
    "global-local:2,1",
    "q % 2 == 0 | k % 3 == 0",
    "(k - q) % 3 == 0 & (k - q) % 2 == 0",
    "tensor causal[k]: bool; causal",
    "tensor causal[k]: bool; causal | q == 2",
    "tensor padding[batch, q]: bool; padding",
    "tensor t1[head]: i32; (t1 + k) % 2 == 0 | (t1 + k) % 3 == 0",
    "scalar reach = 3.0; f32(k) < reach",
    "scalar slope = 0.5; f32(q) * slope < f32(k) | k < 2",
    "table near[2, 7]: bool; near[head % 2, k]",
    "seq_q == 5 | k < 3",
    "q < q",
    "true",
];

/// Checks that each text has one normal form and each normal form one text.
#[derive(Default)]
struct Texts(HashMap<String, Kept>, HashMap<Kept, String>);

impl Texts {
    fn check(&mut self, kept: &Kept, again: impl Fn(Mask) -> Kept) {
        let text = kept.to_string();
        if text == "everything" {
            assert!(kept.is_full(), "{kept:?}");
        } else {
            let parsed = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(again(parsed), *kept, "{text}");
        }
        let without = kept.without_defaults();
        assert_eq!(without, *kept);
        let text = without.to_string();
        assert_eq!(self.0.entry(text.clone()).or_insert_with(|| kept.clone()), kept, "{text}");
        assert_eq!(*self.1.entry(kept.clone()).or_insert_with(|| text.clone()), text);
    }
}

const EXTENTS: [[i64; 4]; 6] = [[2, 3, 5, 7], [2, 1, 7, 5], [1, 1, 1, 9], [2, 2, 9, 1], [1, 1, 1, 1], [2, 2, 33, 65]];

#[test]
fn a_normalised_mask_is_read_as_it_is_printed_and_no_other_mask_has_its_text() {
    let mut random = Random(1);
    for extents in EXTENTS {
        let mut texts = Texts::default();
        let of = |mask: Mask| Kept::of(&[mask], extents).unwrap_or_else(|e| panic!("{e}"));
        for _ in 0..1500 {
            texts.check(&of(random.mask(3, LEAVES)), of);
        }
        assert!(extents[2] == 1 || texts.0.len() > 300, "{}", texts.0.len());
    }
}

#[test]
fn masks_of_packed_documents_are_read_as_they_are_printed() {
    let mut random = Random(2);
    let shape = Shape { batch: 3, heads_q: 2, heads_kv: 2, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
    let of = |masks: Vec<Mask>| {
        let mut spec = AttentionSpec::dense(DType::F32, shape, Layout::Bshd);
        spec.packed = Some(Packed::new().with_cross(true));
        spec.masks = masks;
        spec.validate().map(|problem| problem.kept().clone())
    };
    let leaves: Vec<&str> = LEAVES
        .iter()
        .copied()
        .filter(|leaf| !["bottom-right", "ends", "padding", "seq_len"].iter().any(|word| leaf.contains(word)))
        .collect();
    let mut texts = Texts::default();
    for _ in 0..1000 {
        let mut masks = vec![random.mask(3, &leaves)];
        if random.below(2) == 0 {
            masks.push(["causal-ends", "window:3,inf:ends", "window:2,1:ends"][random.below(3)].parse().unwrap());
        }
        texts.check(&of(masks).unwrap_or_else(|e| panic!("{e}")), |mask| of(vec![mask]).unwrap_or_else(|e| panic!("{e}")));
    }
    assert!(texts.0.len() > 300, "{}", texts.0.len());
}

#[test]
fn a_disjunction_among_other_terms_keeps_its_parentheses() {
    let of = |text: &str| Kept::of(&[text.parse().unwrap()], [1, 1, 40, 40]).unwrap();
    let (conjunction, disjunction) = (of("window:inf,12 & (q % 2 == 0 | k % 3 == 0)"), of("(k - q <= 12 & q % 2 == 0) | k % 3 == 0"));
    assert_eq!(conjunction.to_string(), "k - q <= 12 & (q % 2 == 0 | k % 3 == 0)");
    assert_eq!(disjunction.to_string(), "k - q <= 12 & q % 2 == 0 | k % 3 == 0");
    assert_eq!(
        of("padding & causal").to_string(),
        "tensor seq_len_q[batch]: i32; tensor seq_len_kv[batch]: i32; causal & q < seq_len_q & k < seq_len_kv"
    );
}
