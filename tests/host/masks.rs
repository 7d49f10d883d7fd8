//! Masks: how they combine, what of them is recognised, and that nothing of them is lost on the way.

use conformance::random::Random;
use sdpa::expr::{At, Axis, Bool, Expr, I32, Params, Place, Precision, Trace};
use sdpa::library::MASKS;
use sdpa::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa::{Align, AttentionSpec, DType, Kept, Layout, Mask, Region, Shape};

fn mask<F>(f: F) -> Mask
where
    F: for<'t> FnOnce(At<'t>, Params<'t>) -> Expr<'t, Bool>,
{
    Mask::new("mask", f).unwrap()
}

fn len_q<'t>(p: Params<'t>) -> Expr<'t, I32> {
    p.tensor(SEQ_LEN_Q, [Axis::Batch], I32)
}

fn len_kv<'t>(p: Params<'t>) -> Expr<'t, I32> {
    p.tensor(SEQ_LEN_KV, [Axis::Batch], I32)
}

const EXTENTS: [i64; 4] = [2, 3, 7, 11];

fn kept(masks: &[Mask]) -> Kept {
    Kept::of(masks, EXTENTS).unwrap()
}

#[test]
fn a_rule_is_called_what_it_was_called_and_is_what_it_computes() {
    let odd = |name| {
        let mask = Mask::new(name, |at, _| (at.k % 2).eq(1)).unwrap();
        let Mask::Traced(rule) = mask else { panic!("{mask:?}") };
        rule
    };
    assert_eq!((odd("odd").name(), odd("uneven").name()), ("odd", "uneven"));
    assert_eq!(odd("odd"), odd("uneven"));
}

/// Each spelling is recognised as what is there already.
fn recognised(as_built_in: &[Mask], spellings: Vec<Mask>) {
    let want = kept(as_built_in);
    assert_eq!(want.rest, None, "{as_built_in:?}");
    for (n, spelling) in spellings.into_iter().enumerate() {
        assert_eq!(kept(std::slice::from_ref(&spelling)), want, "spelling {n}: {spelling}");
        let problem = |masks: &[Mask]| {
            let shape = Shape { batch: 2, heads_q: 3, heads_kv: 1, seq_q: 7, seq_kv: 11, dim_qk: 8, dim_v: 8 };
            let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd);
            spec.masks = masks.to_vec();
            spec.validate().unwrap()
        };
        let (own, built_in) = (problem(&[spelling]), problem(as_built_in));
        // Parameters are in the order in which they are met; where there is none or one, the plans are the same.
        assert!(own == built_in || (own.params().len() > 1 && own.kept() == built_in.kept()), "spelling {n}");
    }
}

#[test]
fn causal_in_many_spellings() {
    let spellings = vec![
        mask(|at, _| at.k.le(at.q)),
        mask(|at, _| at.q.ge(at.k)),
        mask(|at, _| !at.k.gt(at.q)),
        mask(|at, _| !at.q.lt(at.k)),
        mask(|at, _| at.k.lt(at.q + 1)),
        mask(|at, _| (at.k - at.q).le(0)),
        mask(|at, _| (at.q - at.k).ge(0)),
        mask(|at, _| (at.q - at.k).gt(-1)),
        mask(|at, _| (at.q - at.k + 5).ge(5)),
        mask(|at, _| (-at.k).ge(-at.q)),
        mask(|at, _| !(at.k.gt(at.q) | at.k.gt(at.q + 3))),
        mask(|at, _| at.k.le(at.q) & at.k.le(at.q + 2) & true),
        mask(|at, _| at.k.le(at.q) | false),
        mask(|at, _| at.k.le(at.q) & (at.q - at.q).eq(0)),
        !!Mask::causal(),
        !(!Mask::causal() | !Mask::window(None, Some(4), Align::TopLeft)),
        Mask::causal() & Mask::causal(),
        "k <= q".parse().unwrap(),
        Mask::window(Some(11), Some(0), Align::TopLeft),
        Mask::prefix_lm(0),
        Mask::prefix_lm(1),
    ];
    recognised(&[Mask::causal()], spellings);
    let spellings = vec![
        mask(|at, _| at.k.le(at.q + at.seq_kv - at.seq_q)),
        mask(|at, _| (at.seq_kv - at.k).ge(at.seq_q - at.q)),
        mask(|at, _| at.k.lt(at.q + 5)),
    ];
    recognised(&[Mask::causal_bottom_right()], spellings);
}

#[test]
fn windows_in_many_spellings() {
    let spellings = vec![
        mask(|at, _| at.k.gt(at.q - 3) & at.k.le(at.q + 2)),
        mask(|at, _| (at.q - at.k).lt(3) & (at.k - at.q).lt(3)),
        mask(|at, _| !((at.q - at.k).ge(3) | (at.k - at.q).gt(2))),
        Mask::window(Some(3), None, Align::TopLeft) & Mask::window(None, Some(2), Align::TopLeft),
        "(q - k < 3) & (k - q <= 2)".parse().unwrap(),
    ];
    recognised(&[Mask::window(Some(3), Some(2), Align::TopLeft)], spellings);
    recognised(&["sliding-window:3".parse().unwrap()], vec![mask(|at, _| at.k.le(at.q) & (at.q - at.k).lt(3))]);
    recognised(&[Mask::window(Some(1), Some(0), Align::TopLeft)], vec![mask(|at, _| at.k.eq(at.q)), mask(|at, _| !at.q.ne(at.k))]);
    let bottom = Mask::window(Some(3), Some(2), Align::BottomRight);
    recognised(&[bottom], vec![mask(|at, _| at.k.gt(at.q + (at.seq_kv - at.seq_q) - 3) & (at.k - (at.seq_kv - at.seq_q)).le(at.q + 2))]);
}

#[test]
fn prefixes_in_many_spellings() {
    let spellings = vec![
        mask(|at, _| at.k.le(at.q) | at.k.lt(4)),
        mask(|at, _| at.k.lt(4) | at.q.ge(at.k)),
        mask(|at, _| at.k.le(3) | !at.k.gt(at.q)),
        mask(|at, _| !(at.k.gt(at.q) & at.k.ge(4))),
        mask(|at, _| !at.k.ge(4) | (at.q - at.k).ge(0)),
        Mask::causal() | mask(|at, _| at.k.lt(4)),
        Mask::prefix_lm(4) & Mask::prefix_lm(6),
    ];
    recognised(&[Mask::prefix_lm(4)], spellings);
}

#[test]
fn padding_in_many_spellings() {
    let spellings = vec![
        mask(|at, p| at.q.lt(len_q(p)) & at.k.lt(len_kv(p))),
        mask(|at, p| len_kv(p).gt(at.k) & len_q(p).gt(at.q)),
        mask(|at, p| !(at.q.ge(len_q(p)) | len_kv(p).le(at.k))),
        mask(|at, p| at.k.lt(len_kv(p))) & mask(|at, p| at.q.lt(len_q(p))),
    ];
    recognised(&[Mask::padding()], spellings);
    let keys = kept(&[mask(|at, p| at.k.lt(len_kv(p)))]);
    assert_eq!((keys.seq_len_q, keys.seq_len_kv, keys.rest), (false, true, None));
    // A tensor of that name over other axes, another comparison and another tensor are rules of one's own.
    for own in [
        mask(|at, p| at.k.le(len_kv(p))),
        mask(|at, p| at.q.lt(len_kv(p))),
        mask(|at, p| at.k.ge(len_kv(p))),
        mask(|at, p| at.k.lt(p.tensor(SEQ_LEN_KV, [Axis::Head], I32))),
        mask(|at, p| at.k.lt(p.tensor("lengths", [Axis::Batch], I32))),
        mask(|at, p| at.k.lt(len_kv(p)) | at.q.lt(len_q(p))),
    ] {
        let own = kept(&[own]);
        assert!(own.rest.is_some() && !own.seq_len_kv && !own.seq_len_q && own.region.is_full());
    }
}

/// A bound that no index reaches is none, however far away it is.
#[test]
fn bounds_past_every_index_are_none() {
    for far in [100, 1 << 29, 1 << 30, i64::from(i32::MAX), 1 << 31, 1 << 40, i64::MAX] {
        for align in [Align::TopLeft, Align::BottomRight] {
            assert!(kept(&[Mask::window(Some(far), Some(far), align)]).is_full(), "{far}");
            let causal = kept(&[Mask::window(Some(far), Some(0), Align::TopLeft)]);
            assert_eq!(causal, kept(&[Mask::causal()]), "{far}");
        }
        assert!(kept(&[Mask::prefix_lm(far)]).is_full(), "{far}");
    }
}

#[test]
fn what_keeps_nothing_and_what_keeps_all() {
    assert!(kept(&[]).is_full() && kept(&[mask(|at, _| at.q.eq(at.q) | true)]).is_full());
    assert!(kept(&[!(!Mask::causal() & Mask::causal()) | mask(|_, p| p.constant(1.0).gt(0.0))]).is_full());
    let nothing = kept(&[mask(|_, p| p.constant(1.0).lt(0.0))]);
    assert_eq!(nothing.rest, None);
    assert!((0..7).all(|q| (0..11).all(|k| !nothing.region.keeps(q, k))));
    assert_eq!(nothing, kept(&[!Mask::window(None, None, Align::TopLeft)]));
}

#[test]
fn bands_and_rests_come_apart() {
    let both = kept(&[mask(|at, p| at.k.le(at.q) & (at.q % 3).eq(0) & at.k.lt(len_kv(p)) & !(at.head.eq(1) & at.k.gt(2)))]);
    assert_eq!(both.region, Region { upper: Some(0), ..Region::default() });
    assert!(both.seq_len_kv && !both.seq_len_q);
    assert_eq!(both.rest.unwrap().to_string(), "q % 3 == 0 & !(head == 1 & k > 2)");
    // Arithmetic that might wrap stays what it is.
    for text in ["k + 2147483647 <= q", "k * 1 <= q", "k + k <= q + k", "abs(k - q) < 3", "k <= 5", "q >= 2", "f32(k) <= f32(q)"] {
        let own = kept(&[text.parse().unwrap()]);
        assert!(own.region.is_full() && own.rest.is_some(), "{text}");
    }
}

/// Sums of indices, lengths and constants.
#[derive(Clone, Debug)]
enum Sum {
    Q,
    K,
    Head,
    Constant(i32),
    SeqQ,
    SeqKv,
    LenQ,
    LenKv,
    Neg(Box<Sum>),
    Two(usize, Box<[Sum; 2]>),
}

#[derive(Clone, Debug)]
enum Rule {
    Compare(usize, Sum, Sum),
    Constant(bool),
    Not(Box<Rule>),
    And(Box<[Rule; 2]>),
    Or(Box<[Rule; 2]>),
}

/// Where a rule is asked: (batch, head, q, k), lengths of this batch entry.
#[derive(Clone, Copy)]
struct Here {
    index: [i64; 4],
    extents: [i64; 4],
    lengths: [i64; 2],
}

impl Sum {
    fn draw(random: &mut Random, depth: i64) -> Sum {
        match random.between(0, if depth > 0 { 11 } else { 8 }) {
            0 | 1 => Sum::Q,
            2 | 3 => Sum::K,
            4 => Sum::Constant(random.pick(&[-3, -1, 0, 1, 2, 3, 5, 9, i32::MAX, i32::MIN])),
            5 => Sum::Head,
            6 if random.between(0, 1) == 0 => Sum::SeqQ,
            6 => Sum::SeqKv,
            7 => Sum::LenQ,
            8 => Sum::LenKv,
            9 => Sum::Neg(Box::new(Sum::draw(random, depth - 1))),
            _ => Sum::Two(random.pick(&[0, 0, 1, 1, 2, 3]), Box::new([Sum::draw(random, depth - 1), Sum::draw(random, depth - 1)])),
        }
    }

    fn value(&self, here: Here) -> i32 {
        match self {
            Sum::Q => here.index[2] as i32,
            Sum::K => here.index[3] as i32,
            Sum::Head => here.index[1] as i32,
            Sum::Constant(n) => *n,
            Sum::SeqQ => here.extents[2] as i32,
            Sum::SeqKv => here.extents[3] as i32,
            Sum::LenQ => here.lengths[0] as i32,
            Sum::LenKv => here.lengths[1] as i32,
            Sum::Neg(x) => x.value(here).wrapping_neg(),
            Sum::Two(f, both) => {
                let [x, y] = [both[0].value(here), both[1].value(here)];
                match f {
                    0 => x.wrapping_add(y),
                    1 => x.wrapping_sub(y),
                    2 => x.min(y),
                    _ => x.max(y),
                }
            }
        }
    }

    fn trace<'t>(&self, at: At<'t>, p: Params<'t>) -> Expr<'t, I32> {
        match self {
            Sum::Q => at.q,
            Sum::K => at.k,
            Sum::Head => at.head,
            // Saturates, so that the largest number stays what it is.
            Sum::Constant(n) => p.constant(*n as f32).to_i32(),
            Sum::SeqQ => at.seq_q,
            Sum::SeqKv => at.seq_kv,
            Sum::LenQ => len_q(p),
            Sum::LenKv => len_kv(p),
            Sum::Neg(x) => -x.trace(at, p),
            Sum::Two(f, both) => {
                let [x, y] = [both[0].trace(at, p), both[1].trace(at, p)];
                match f {
                    0 => x + y,
                    1 => x - y,
                    2 => x.min(y),
                    _ => x.max(y),
                }
            }
        }
    }
}

impl Rule {
    fn draw(random: &mut Random, depth: i64) -> Rule {
        let two = |random: &mut Random| Box::new([Rule::draw(random, depth - 1), Rule::draw(random, depth - 1)]);
        match random.between(0, if depth > 0 { 9 } else { 3 }) {
            0..=2 => Rule::Compare(random.between(0, 5) as usize, Sum::draw(random, 2), Sum::draw(random, 2)),
            3 if random.between(0, 4) == 0 => Rule::Constant(random.between(0, 1) == 0),
            // What bands and lengths are made of.
            3 => match random.between(0, 3) {
                0 => Rule::Compare(random.between(0, 5) as usize, Sum::K, Sum::Q),
                1 => Rule::Compare(0, Sum::K, Sum::LenKv),
                2 => Rule::Compare(2, Sum::LenQ, Sum::Q),
                _ => Rule::Compare(random.between(0, 3) as usize, Sum::K, Sum::Constant(4)),
            },
            4 | 5 => Rule::Not(Box::new(Rule::draw(random, depth - 1))),
            6 | 7 => Rule::And(two(random)),
            _ => Rule::Or(two(random)),
        }
    }

    fn holds(&self, here: Here) -> bool {
        match self {
            Rule::Compare(f, x, y) => {
                let (x, y) = (x.value(here), y.value(here));
                [x < y, x <= y, x > y, x >= y, x == y, x != y][*f]
            }
            Rule::Constant(c) => *c,
            Rule::Not(x) => !x.holds(here),
            Rule::And(both) => both[0].holds(here) && both[1].holds(here),
            Rule::Or(both) => both[0].holds(here) || both[1].holds(here),
        }
    }

    fn trace<'t>(&self, at: At<'t>, p: Params<'t>) -> Expr<'t, Bool> {
        match self {
            Rule::Compare(f, x, y) => {
                let (x, y) = (x.trace(at, p), y.trace(at, p));
                match f {
                    0 => x.lt(y),
                    1 => x.le(y),
                    2 => x.gt(y),
                    3 => x.ge(y),
                    4 => x.eq(y),
                    _ => x.ne(y),
                }
            }
            Rule::Constant(c) => p.constant(0.0).eq(0.0) & *c,
            Rule::Not(x) => !x.trace(at, p),
            Rule::And(both) => both[0].trace(at, p) & both[1].trace(at, p),
            Rule::Or(both) => both[0].trace(at, p) | both[1].trace(at, p),
        }
    }

    /// The same, with what joins rules outside of the closures.
    fn mask(&self) -> Mask {
        match self {
            Rule::Compare(..) | Rule::Constant(_) => mask(|at, p| self.trace(at, p)),
            Rule::Not(x) => !x.mask(),
            Rule::And(both) => both[0].mask() & both[1].mask(),
            Rule::Or(both) => both[0].mask() | both[1].mask(),
        }
    }
}

fn truth(trace: &Trace, here: Here) -> bool {
    let length = |name: &str| here.lengths[usize::from(name == SEQ_LEN_KV)] as f64;
    let params: Vec<f64> = trace.params().iter().map(|p| length(&p.name)).collect();
    let place = Place { score: f64::NAN, upstream: f64::NAN, index: here.index, extents: here.extents, params: &params };
    trace.eval(&place, Precision::F32)[0] != 0.0
}

impl Here {
    fn kept(self, kept: &Kept) -> bool {
        let [.., q, k] = self.index;
        kept.region.keeps(q, k)
            && (!kept.seq_len_q || q < self.lengths[0])
            && (!kept.seq_len_kv || k < self.lengths[1])
            && kept.rest.as_ref().is_none_or(|rest| truth(rest, self))
    }
}

/// Random rules, joined inside of closures and outside: what is taken apart keeps the same keys as the rule itself.
#[test]
fn nothing_is_lost_when_masks_are_taken_apart() {
    let (mut bands, mut rests, mut lengths) = (0, 0, 0);
    for seed in 0..1500 {
        let mut random = Random::new(seed);
        let depth = random.between(0, 4);
        let rules: Vec<Rule> = (0..random.between(1, 3)).map(|_| Rule::draw(&mut random, depth)).collect();
        let extents = random.pick(&[[1, 2, 4, 6], [2, 1, 6, 4], [1, 1, 1, 5], [1, 1, 5, 1], [1, 3, 5, 5]]);
        let spellings: [Vec<Mask>; 3] = [
            rules.iter().map(|rule| mask(|at, p| rule.trace(at, p))).collect(),
            rules.iter().map(Rule::mask).collect(),
            rules.iter().map(|rule| rule.mask().to_string().parse().unwrap()).collect(),
        ];
        for masks in &spellings {
            let kept = Kept::of(masks, extents).unwrap();
            bands += usize::from(!kept.region.is_full());
            rests += usize::from(kept.rest.is_some());
            lengths += usize::from(kept.seq_len_q || kept.seq_len_kv);
            let whole = Mask::All(masks.clone()).trace().unwrap();
            for batch in 0..extents[0] {
                let own = [random.between(0, extents[2]), random.between(0, extents[3])];
                for n in 0..extents[1] * extents[2] * extents[3] {
                    let index = [batch, n / (extents[2] * extents[3]), n / extents[3] % extents[2], n % extents[3]];
                    let here = Here { index, extents, lengths: own };
                    let want = rules.iter().all(|rule| rule.holds(here));
                    assert_eq!(truth(&whole, here), want, "seed {seed} at {index:?}: {whole}");
                    assert_eq!(here.kept(&kept), want, "seed {seed} at {index:?} of {extents:?}, lengths {own:?}: {whole}\n{kept:?}");
                }
            }
        }
    }
    assert!(bands > 500 && rests > 500 && lengths > 200, "{bands} {rests} {lengths}");
}

#[test]
fn texts_are_read_back() {
    let library = MASKS.iter().flat_map(|named| named.cases).copied().filter(|text| !text.starts_with("sliding-window"));
    for text in library.chain(["window:inf,2:bottom-right", "shared-prefix:0"]) {
        let read: Mask = text.parse().unwrap();
        assert_eq!(read.to_string(), text);
    }
    assert_eq!("sliding-window:3".parse::<Mask>().unwrap().to_string(), "window:3,0");
    // A name that is only borrowed is not printed.
    let borrowed = Mask::new("document", |at, _| at.q.eq(at.k)).unwrap();
    assert_eq!(borrowed.to_string(), "q == k");
    assert_ne!(borrowed, Mask::document());
    // What is joined is printed as one rule.
    for joined in [Mask::causal() & Mask::document(), Mask::padding() | Mask::prefix_lm(3), !Mask::causal_bottom_right()] {
        let back: Mask = joined.to_string().parse().unwrap();
        assert_eq!(back.trace().unwrap(), joined.trace().unwrap(), "{joined}");
        assert_eq!(Kept::of(&[back], EXTENTS), Kept::of(&[joined], EXTENTS));
    }
    for (text, said) in [
        ("score > 0.0", "cannot read the score"),
        ("upstream > 0.0", "upstream"),
        ("q + k", "it yields i32"),
        ("q < k, k < q", "at most 1"),
        ("dilated", "one of causal"),
        ("natten:4", "an odd number"),
        ("global-local:3", "WINDOW,GLOBALS"),
        ("global-local:0,1", "an integer from 1"),
        ("array:z", "of b, h, q, k"),
        ("padding:3", "one of causal"),
    ] {
        let error = text.parse::<Mask>().unwrap_err();
        assert!(error.to_string().contains(said) && error.what == "mask", "{text:?}: {error}");
    }
}

#[test]
fn files_hold_masks() {
    for mask in [Mask::document() & !Mask::causal(), Mask::padding(), Mask::window(Some(3), None, Align::BottomRight)] {
        let json = serde_json::to_string(&mask).unwrap();
        assert_eq!(serde_json::from_str::<Mask>(&json).unwrap(), mask);
    }
}
