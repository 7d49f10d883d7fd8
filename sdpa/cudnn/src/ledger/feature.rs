//! Features of a pass, by which a ledger counts right and wrong results.

use ahash::AHashMap;
use sdpa_core::DType;
use sdpa_core::expr::{Axes, Axis, Binary, Unary};
use std::fmt;
use std::sync::LazyLock;

/// A range of one extent of a problem: of a head dim, or of the number of queries or keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// One query, or one key.
    One,
    /// Head dims of at most 64, or lengths from 2 to 63.
    To64,
    /// Head dims from 65 to 128.
    To128,
    /// Head dims from 129 to 192.
    To192,
    /// Head dims from 193 to 256.
    To256,
    /// Lengths of 64 or more.
    From64,
    /// Lengths from 64 to 1,024.
    To1024,
    /// Head dims above 256, or more than 1,024 keys.
    Above,
}

/// The order of an operand's dimensions in memory, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Order {
    /// (batch, heads, tokens, dim).
    Bhsd,
    /// (batch, tokens, heads, dim).
    Bshd,
    /// (tokens, batch, heads, dim).
    Sbhd,
    /// Any other order.
    Other,
}

/// The kind of expression that contains a [`Part`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Use {
    /// The expression is that of the score_mods.
    ScoreMod,
    /// The expression is the part of the mask that is evaluated element by element.
    Mask,
}

/// A part of an expression, such as a function or a declared tensor, that counts as a feature of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The expression reads a declared scalar.
    Scalar,
    /// The expression reads a declared tensor of this element type.
    TensorOf(DType),
    /// The expression reads a declared tensor that spans these axes.
    TensorOver(Spans),
    /// The expression reads more than one declared tensor.
    Tensors,
    /// The index along the axis with this position in [`Axis::ALL`].
    Index(u8),
    /// A function of one value.
    Unary(Unary),
    /// A function of two values.
    Binary(Binary),
    /// A selection between two values.
    Select,
}

/// A set of axes, one bit per axis in the order of [`Axis::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Spans(u8);

impl From<Axes> for Spans {
    fn from(axes: Axes) -> Spans {
        Spans(axes.iter().map(|axis| 1 << axis.place()).sum())
    }
}

impl fmt::Display for Spans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = Axis::ALL.into_iter().filter(|axis| self.0 & 1 << axis.place() != 0).map(Axis::name).collect();
        f.write_str(&names.join(", "))
    }
}

macro_rules! features {
    ($($(#[doc = $doc:literal])+ $variant:ident $name:literal;)*) => {
        /// A feature of a pass, for which a ledger counts right and wrong results. [`features`](super::features) derives those of a pass
        /// from its facts.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Feature {
            $($(#[doc = $doc])+ $variant,)*
            /// Element type of `q`, `k` and `v`.
            Dtype(DType),
            /// The range of `dim_qk`, the number of elements of a query and of a key.
            DimQk(Class),
            /// The range of `dim_v`, the number of elements of a value.
            DimV(Class),
            /// The range of `seq_q`, the number of queries per head.
            SeqQ(Class),
            /// The range of `seq_kv`, the number of keys per head.
            SeqKv(Class),
            /// The order of an operand's dimensions in memory.
            Layout(Order),
            /// The score_mods or the mask contain this part.
            Has(Use, Part),
            /// The gradient of a declared parameter over these axes is computed; a scalar has no axes.
            GradientOver(Spans),
            /// The gradient of a declared parameter is computed in this element type.
            GradientIn(DType),
        }

        const PLAIN: &[Feature] = &[$(Feature::$variant),*];

        impl fmt::Display for Feature {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Feature::$variant => f.write_str($name),)*
                    Feature::Dtype(dtype) => write!(f, "{dtype}"),
                    Feature::DimQk(class) => write!(f, "dim_qk {class}"),
                    Feature::DimV(class) => write!(f, "dim_v {class}"),
                    Feature::SeqQ(class) => write!(f, "seq_q {class}"),
                    Feature::SeqKv(class) => write!(f, "seq_kv {class}"),
                    Feature::Layout(order) => write!(f, "operands in order {order}"),
                    Feature::Has(used, part) => write!(f, "{part} in a {used}"),
                    Feature::GradientOver(Spans(0)) => f.write_str("gradient of a scalar"),
                    Feature::GradientOver(spans) => write!(f, "gradient of a tensor over {spans}"),
                    Feature::GradientIn(dtype) => write!(f, "gradient of a parameter in {dtype}"),
                }
            }
        }
    };
}

features! {
    /// A forward pass.
    Forward "forward pass";
    /// A backward pass.
    Backward "backward pass";
    /// `o` has another element type than `q`.
    OutputDtype "o in another element type than q";
    /// `d_o` has another element type than `q`.
    UpstreamDtype "d_o in another element type than q";
    /// `dq`, `dk` and `dv` have another element type than `q`.
    GradientDtype "dq, dk and dv in another element type than q";
    /// Blocks of 32 elements of `q`, `k` and `v` have block scales.
    BlockScales "block scales";
    /// `dim_qk` or `dim_v` is 8 more than a multiple of 16.
    OddDim "a head dim that is no multiple of 16";
    /// Each KV head has one query head.
    GroupOfOne "1 query head per KV head";
    /// The number of query heads per KV head is a power of two above 1.
    GroupOfPowerOfTwo "2, 4, 8 or another power of two query heads per KV head";
    /// The number of query heads per KV head is not a power of two.
    GroupOfOther "3, 5, 6 or another number of query heads per KV head";
    /// All query heads share one KV head.
    OneKvHead "one KV head for several query heads";
    /// There are more batch entries or heads than one dimension of a CUDA grid allows (65,535).
    BeyondGrid "more than 65,535 batch entries or heads";
    /// `seq_q` is a multiple of 64.
    WholeSeqQ "seq_q a multiple of 64";
    /// `seq_q` is no multiple of 64.
    RaggedSeqQ "seq_q no multiple of 64";
    /// `seq_kv` is a multiple of 64.
    WholeSeqKv "seq_kv a multiple of 64";
    /// `seq_kv` is no multiple of 64.
    RaggedSeqKv "seq_kv no multiple of 64";
    /// Operands have different orders of dimensions in memory.
    MixedLayouts "operands in different orders";
    /// An operand has gaps between its elements.
    Gaps "an operand with gaps";
    /// An operand repeats elements: it has a stride of 0 along an extent above 1.
    Repeats "an operand with a stride of 0";
    /// The elements of an operand's rows are not next to one another.
    StridedRows "an operand with strided rows";
    /// The base address of an operand is a multiple of less than 16 bytes.
    Misaligned "an operand aligned to less than 16 bytes";
    /// Every batch entry has all queries and keys.
    Dense "dense";
    /// Batch entries are packed sequences.
    Packed "packed sequences";
    /// Queries and keys have different `cu_seqlens`.
    CrossPacked "cu_seqlens of queries and of keys";
    /// `cu_seqlens` are i64.
    WideBoundaries "cu_seqlens in i64";
    /// The problem states an upper bound for the tokens of packed sequences.
    TokenBound "a bound on the tokens of packed sequences";
    /// Keys and values are in pages of fewer than 64 tokens.
    SmallPages "pages of fewer than 64 tokens";
    /// Keys and values are in pages of 64 tokens or more.
    LargePages "pages of 64 tokens or more";
    /// There is no mask.
    NoMask "no mask";
    /// Keys after the query are masked out.
    Causal "a causal mask";
    /// The mask's band has an upper bound other than the diagonal.
    UpperBound "a band with an upper bound off the diagonal";
    /// The mask's band has a lower bound.
    LowerBound "a band with a lower bound";
    /// Every query attends to a prefix of the keys.
    Prefix "a prefix";
    /// The mask has a band that is aligned to the end of each sequence, with an upper bound.
    UpperBoundOfEnds "a bottom-right aligned upper bound";
    /// The mask has a band that is aligned to the end of each sequence, with a lower bound.
    LowerBoundOfEnds "a bottom-right aligned lower bound";
    /// The problem has a query length for each batch entry.
    SeqLenQ "per-sequence lengths of queries";
    /// The problem has a key length for each batch entry.
    SeqLenKv "per-sequence lengths of keys";
    /// Part of the mask is evaluated element by element.
    Rule "a mask that is evaluated element by element";
    /// Score_mods modify the scores.
    ScoreMod "a score_mod";
    /// Each query head has an attention sink.
    Sink "sink";
    /// The gradient of the sink is computed.
    SinkGradient "gradient of the sink";
    /// Probabilities are dropped at random.
    Dropout "dropout";
    /// `stats` is computed, in natural logarithms.
    Stats "stats";
    /// `stats` is computed, in logarithms to base 2.
    StatsBaseTwo "stats in base 2";
    /// `row_max` is computed.
    RowMax "row_max";
    /// `sum_exp` is computed.
    SumExp "sum_exp";
    /// Results are bitwise equal on every run.
    Deterministic "deterministic";
    /// Any feature that is not in [`Feature::all`]. Ledgers prove nothing about it.
    Unlisted "a feature that ledgers do not list";
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Class::One => "1",
            Class::To64 => "up to 64",
            Class::To128 => "65 to 128",
            Class::To192 => "129 to 192",
            Class::To256 => "193 to 256",
            Class::From64 => "64 or more",
            Class::To1024 => "64 to 1,024",
            Class::Above => "above that",
        })
    }
}

impl Class {
    /// Returns the class of a head dim.
    pub(super) fn of_dim(dim: i64) -> Class {
        match dim {
            ..=64 => Class::To64,
            65..=128 => Class::To128,
            129..=192 => Class::To192,
            193..=256 => Class::To256,
            257.. => Class::Above,
        }
    }

    /// Returns the class of a number of queries. More queries mean more tiles, which are independent.
    pub(super) fn of_queries(seq_q: i64) -> Class {
        match seq_q {
            ..=1 => Class::One,
            2..=63 => Class::To64,
            64.. => Class::From64,
        }
    }

    /// Returns the class of a number of keys. Engines loop over keys, and a version of cuDNN was wrong past 1,024.
    pub(super) fn of_keys(seq_kv: i64) -> Class {
        match seq_kv {
            ..=1 => Class::One,
            2..=63 => Class::To64,
            64..=1024 => Class::To1024,
            1025.. => Class::Above,
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Order::Bhsd => "bhsd",
            Order::Bshd => "bshd",
            Order::Sbhd => "sbhd",
            Order::Other => "that has no name",
        })
    }
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Use::ScoreMod => "score_mod",
            Use::Mask => "mask",
        })
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use sdpa_core::expr::Spelling;
        let spelled = |spelling: Spelling| match spelling {
            Spelling::Call(name) | Spelling::Infix(name, _) | Spelling::Prefix(name) => name,
        };
        match self {
            Part::Scalar => f.write_str("scalar"),
            Part::TensorOf(dtype) => write!(f, "{dtype} tensor"),
            Part::TensorOver(spans) => write!(f, "tensor over {spans}"),
            Part::Tensors => f.write_str("more than one tensor"),
            Part::Index(place) => write!(f, "index `{}`", Axis::ALL[usize::from(*place)].name()),
            Part::Unary(Unary::Neg) => f.write_str("negation"),
            Part::Unary(function) => write!(f, "`{}`", spelled(function.spelling())),
            Part::Binary(function) => write!(f, "`{}`", spelled(function.spelling())),
            Part::Select => f.write_str("`select`"),
        }
    }
}

/// Every feature; its index is that of its bit in a [`Features`].
static ALL: LazyLock<Vec<Feature>> = LazyLock::new(|| {
    let dims = [Class::To64, Class::To128, Class::To192, Class::To256, Class::Above];
    let queries = [Class::One, Class::To64, Class::From64];
    let keys = [Class::One, Class::To64, Class::To1024, Class::Above];
    let spans = || (1..16).map(Spans);
    let parts = || {
        let functions = Unary::ALL.iter().copied().map(Part::Unary).chain(Binary::ALL.iter().copied().map(Part::Binary));
        let tensors = DType::ALL.into_iter().map(Part::TensorOf).chain(spans().map(Part::TensorOver));
        let others = [Part::Scalar, Part::Tensors, Part::Select];
        tensors.chain(others).chain((0..4).map(Part::Index)).chain(functions)
    };
    let uses = [Use::ScoreMod, Use::Mask];
    let mut all = PLAIN.to_vec();
    all.extend(DType::ALL.into_iter().flat_map(|dtype| [Feature::Dtype(dtype), Feature::GradientIn(dtype)]));
    all.extend(dims.into_iter().flat_map(|class| [Feature::DimQk(class), Feature::DimV(class)]));
    all.extend(queries.map(Feature::SeqQ));
    all.extend(keys.map(Feature::SeqKv));
    all.extend([Order::Bhsd, Order::Bshd, Order::Sbhd, Order::Other].map(Feature::Layout));
    all.extend(uses.into_iter().flat_map(|used| parts().map(move |part| Feature::Has(used, part))));
    all.extend((0..16).map(Spans).map(Feature::GradientOver));
    all
});

impl Feature {
    /// Returns every feature that a ledger can list.
    pub fn all() -> &'static [Feature] {
        &ALL
    }

    /// Returns the feature with this name; `None` if there is none.
    pub fn named(name: &str) -> Option<Feature> {
        Feature::all().iter().copied().find(|feature| feature.to_string() == name)
    }

    fn index(self) -> usize {
        static INDICES: LazyLock<AHashMap<Feature, usize>> =
            LazyLock::new(|| ALL.iter().enumerate().map(|(at, feature)| (*feature, at)).collect());
        let at = |feature| INDICES.get(&feature).copied();
        at(self).or_else(|| at(Feature::Unlisted)).unwrap_or(BITS - 1)
    }
}

/// Bits of a set of features.
const BITS: usize = 256;

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features([u64; BITS / 64]);

impl Features {
    /// Returns whether a feature is in the set.
    pub fn has(&self, feature: Feature) -> bool {
        let at = feature.index();
        self.0[at / 64] & 1 << (at % 64) != 0
    }

    /// Adds a feature to the set.
    pub fn insert(&mut self, feature: Feature) {
        let at = feature.index();
        self.0[at / 64] |= 1 << (at % 64);
    }

    /// Returns whether every feature of this set is in the set `other`.
    pub fn is_within(&self, other: &Features) -> bool {
        self.0.iter().zip(other.0).all(|(own, other)| own & !other == 0)
    }

    /// Returns the features of this set that are not in the set `other`.
    pub fn without(&self, other: &Features) -> Features {
        let mut left = *self;
        left.0.iter_mut().zip(other.0).for_each(|(own, other)| *own &= !other);
        left
    }

    /// Iterates over the features of the set, in the order of [`Feature::all`].
    pub fn iter(&self) -> impl Iterator<Item = Feature> {
        let words = self.0;
        let listed = Feature::all().iter().enumerate();
        listed.filter(move |(at, _)| words[at / 64] & 1 << (at % 64) != 0).map(|(_, feature)| *feature)
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Features {
        let mut set = Features::default();
        features.into_iter().for_each(|feature| set.insert(feature));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_feature_has_a_bit_and_a_name_of_its_own() {
        let all = Feature::all();
        assert!(all.len() < BITS, "{} features", all.len());
        let mut names: Vec<String> = all.iter().map(ToString::to_string).collect();
        for (at, feature) in all.iter().enumerate() {
            assert_eq!((feature.index(), Feature::named(&names[at])), (at, Some(*feature)), "{feature}");
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all.len());
        let set: Features = all.iter().copied().collect();
        assert!(set.iter().eq(all.iter().copied()));
    }
}
