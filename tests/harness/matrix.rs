//! The problems that support is asked for: every case; for each pass a product of masks and lengths with everything else in turn;
//! packed documents; sinks; dropout; 8-bit floats; paged caches; every score_mod and mask of the library at one size.

mod dropout;
mod features;
mod fp8;
mod library;
mod packed;
mod paged;
mod products;
mod sample;
mod sinks;

pub use features::AXES;
pub use sample::{FP8_SAMPLE, SAMPLE, UNIFIED_SAMPLE, is_compiled_today};

use crate::case::Case;
use crate::share::{DAYS, pick};
use sdpa::cudnn::lower::Job;
use sdpa::{AttentionSpec, BackwardSpec, DType, SpecErrors};

/// A pass, as a caller asks for it.
#[derive(Clone, Debug)]
pub enum Spec {
    /// Of this attention.
    Forward(Box<AttentionSpec>),
    /// Its gradient.
    Backward(Box<BackwardSpec>),
}

impl From<AttentionSpec> for Spec {
    fn from(spec: AttentionSpec) -> Spec {
        Spec::Forward(Box::new(spec))
    }
}

impl From<BackwardSpec> for Spec {
    fn from(spec: BackwardSpec) -> Spec {
        Spec::Backward(Box::new(spec))
    }
}

impl Spec {
    /// The attention.
    pub fn forward(&self) -> &AttentionSpec {
        match self {
            Spec::Forward(spec) => spec,
            Spec::Backward(spec) => &spec.forward,
        }
    }

    /// Whether it is the gradient that is asked for.
    pub fn is_backward(&self) -> bool {
        match self {
            Spec::Forward(_) => false,
            Spec::Backward(_) => true,
        }
    }

    /// What is planned.
    ///
    /// # Errors
    /// As [`AttentionSpec::validate`] and [`BackwardSpec::validate`].
    pub fn job(&self) -> Result<Job, SpecErrors> {
        match self {
            Spec::Forward(spec) => spec.validate().map(Job::from),
            Spec::Backward(spec) => spec.validate().map(Job::from),
        }
    }

    /// Nothing but attention: what the unified backward op takes.
    pub fn is_plain(&self) -> bool {
        let forward = self.forward();
        let asked = match self {
            Spec::Forward(_) => false,
            Spec::Backward(spec) => spec.deterministic || !spec.wrt.is_empty(),
        };
        forward.masks.is_empty() && forward.score_mods.is_empty() && !asked
    }
}

/// Where a row comes from, and so which table it is in.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A case of one pass, or of its product.
    General,
    /// Packed documents.
    Packed,
    /// Numbers in the softmax's denominator.
    Sink,
    /// Weights that are dropped at random.
    Dropout,
    /// 8-bit floats.
    Fp8,
    /// Keys and values in pages.
    Paged,
    /// Score_mods and masks of the library at one size, each as it was asked for.
    Library {
        /// With commas.
        score_mods: String,
        /// With commas.
        masks: String,
    },
    /// A case with score_mods and masks of the library.
    LibraryCase,
}

/// One problem and what is special about it.
#[derive(Clone, Debug)]
pub struct Row {
    /// Unique; of a case its name, else its features.
    pub name: String,
    /// Where it comes from.
    pub kind: Kind,
    /// The pass over the problem.
    pub spec: Spec,
    /// One value for each of [`AXES`].
    pub features: [String; AXES.len()],
}

impl Row {
    fn new(name: String, kind: Kind, spec: Spec) -> Row {
        let features = features::features(&spec);
        Row { name, kind, spec, features }
    }

    /// Whether the engines take every operand where it is.
    pub fn in_place(&self) -> bool {
        features::takes_in_place(&self.spec)
    }
}

/// Every row, always in the same order.
///
/// # Errors
/// What [`Case::all`] says.
pub fn rows() -> Result<Vec<Row>, String> {
    let narrow = |case: &Case| matches!(case.dtype, DType::F16 | DType::BF16);
    let mut rows = products::forward()?;
    for case in Case::all()?.into_iter().filter(narrow) {
        rows.push(Row::new(format!("case {}", case.name), Kind::General, case.spec()?.into()));
    }
    rows.extend(products::backward()?);
    for case in Case::all_backward()?.into_iter().filter(narrow) {
        rows.push(Row::new(format!("backward case {}", case.name), Kind::General, case.backward_spec()?.into()));
    }
    rows.extend(packed::rows()?);
    rows.extend(sinks::rows()?);
    rows.extend(dropout::rows()?);
    rows.extend(fp8::rows()?);
    rows.extend(paged::rows()?);
    rows.extend(library::rows()?);
    for case in Case::combined()?.into_iter().filter(narrow) {
        rows.push(Row::new(format!("library case {}", case.name), Kind::LibraryCase, case.spec()?.into()));
        rows.push(Row::new(format!("backward library case {}", case.name), Kind::LibraryCase, case.backward_spec()?.into()));
    }
    Ok(rows)
}

/// Those of some rows that are asked about today, each kind and feature every day, and how many these are.
pub fn of_today(rows: Vec<Row>) -> (Vec<Row>, String) {
    pick(DAYS, rows, |row| {
        // Of the library without the names.
        let kind = format!("{:?}", row.kind);
        let kind = kind.split(' ').next().unwrap_or_default();
        let features = AXES.iter().zip(&row.features).map(|(axis, value)| format!("{axis} {value}"));
        features.chain([format!("{kind} {}", row.spec.is_backward())]).collect()
    })
}

/// Cases of row statistics, which the page of support has no rows of.
///
/// # Errors
/// What [`Case::all_statistics`] says.
pub fn statistics() -> Result<Vec<Row>, String> {
    let narrow = Case::all_statistics()?.into_iter().filter(|case| matches!(case.dtype, DType::F16 | DType::BF16));
    narrow.map(|case| Ok(Row::new(case.name.clone(), Kind::General, case.spec()?.into()))).collect()
}

/// Cases of 8-bit floats whose blocks have scales, which the page of support has no rows of.
///
/// # Errors
/// What [`Case::all_block_scaled`] says.
pub fn block_scales() -> Result<Vec<Row>, String> {
    let cases = Case::all_block_scaled()?.into_iter();
    cases.map(|case| Ok(Row::new(case.name.clone(), Kind::Fp8, case.spec()?.into()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_all_problems_are_valid() {
        let rows = rows().unwrap();
        assert_eq!(rows.iter().map(|r| &r.name).collect::<BTreeSet<_>>().len(), rows.len());
        for name in SAMPLE.iter().chain(&UNIFIED_SAMPLE).chain(&FP8_SAMPLE) {
            assert!(rows.iter().any(|r| r.name == *name), "{name}");
        }
        for row in &rows {
            assert!(!row.name.contains('\n'), "{}", row.name);
            row.spec.job().unwrap_or_else(|e| panic!("{}: {e}", row.name));
        }
    }

    /// Whatever two values of different axes are picked, some problem of the product has both.
    fn every_pair_meets(rows: &[Row]) {
        for (a, first) in AXES.iter().enumerate() {
            for (b, second) in AXES.iter().enumerate().take(a) {
                let values = |axis: usize| rows.iter().map(|r| &r.features[axis]).collect::<BTreeSet<_>>();
                let pairs: BTreeSet<_> = rows.iter().map(|r| (&r.features[a], &r.features[b])).collect();
                let missing: Vec<_> =
                    values(a).into_iter().flat_map(|x| values(b).into_iter().map(move |y| (x, y))).filter(|p| !pairs.contains(p)).collect();
                assert!(missing.is_empty(), "{first} and {second}: {missing:?}");
            }
        }
    }

    #[test]
    fn every_pair_of_features_meets_in_each_pass() {
        every_pair_meets(&products::forward().unwrap());
        every_pair_meets(&products::backward().unwrap());
    }
}
