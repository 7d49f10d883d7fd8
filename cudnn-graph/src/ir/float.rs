//! Floating-point numbers in files. JSON has no infinities, which masks need, so non-finite numbers are strings.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number or its name.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(untagged)]
enum Float<T> {
    Finite(T),
    Named(Named),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum Named {
    #[serde(rename = "inf")]
    Infinity,
    #[serde(rename = "-inf")]
    MinusInfinity,
    #[serde(rename = "nan")]
    Nan,
}

macro_rules! module {
    ($t:ident) => {
        impl From<$t> for Float<$t> {
            fn from(x: $t) -> Self {
                if x.is_finite() {
                    Float::Finite(x)
                } else if x.is_nan() {
                    Float::Named(Named::Nan)
                } else if x > 0.0 {
                    Float::Named(Named::Infinity)
                } else {
                    Float::Named(Named::MinusInfinity)
                }
            }
        }

        impl From<Float<$t>> for $t {
            fn from(x: Float<$t>) -> $t {
                match x {
                    Float::Finite(x) => x,
                    Float::Named(Named::Infinity) => $t::INFINITY,
                    Float::Named(Named::MinusInfinity) => $t::NEG_INFINITY,
                    Float::Named(Named::Nan) => $t::NAN,
                }
            }
        }

        pub(crate) mod $t {
            use super::*;

            pub(crate) fn serialize<S: Serializer>(x: &$t, to: S) -> Result<S::Ok, S::Error> {
                Float::<$t>::from(*x).serialize(to)
            }

            pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<$t, D::Error> {
                Float::<$t>::deserialize(from).map($t::from)
            }

            pub(crate) mod list {
                use super::*;

                pub(crate) fn serialize<S: Serializer>(list: &[$t], to: S) -> Result<S::Ok, S::Error> {
                    to.collect_seq(list.iter().map(|&x| Float::<$t>::from(x)))
                }

                pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<$t>, D::Error> {
                    Ok(Vec::<Float<$t>>::deserialize(from)?.into_iter().map($t::from).collect())
                }
            }
        }
    };
}
module!(f32);
module!(f64);

pub(crate) mod optional {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(x: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
        x.map(Float::<f64>::from).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<Float<f64>>::deserialize(from)?.map(f64::from))
    }
}
