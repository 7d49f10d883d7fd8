//! Checks a specification, and reports every mistake at once.

use crate::dropout::Dropout;
use crate::dtype::DType;
use crate::error::SpecError;
use crate::expr::{Declared, ExprErrors, ParamKind};
use crate::mask::{Align, Mask, ends};
use crate::operand::Side;
use crate::packed::Packed;
use crate::problem::tokens_apart;
use crate::spec::{AttentionSpec, TensorSpec};

/// Names that parameters may not have.
const OPERAND_NAMES: [&str; 17] = [
    "v",
    "o",
    "d_o",
    "do",
    "dq",
    "dk",
    "dv",
    "stats",
    "row_max",
    "sum_exp",
    "attn_scale",
    "amax_s",
    "amax_o",
    "amax_dp",
    "amax_dq",
    "amax_dk",
    "amax_dv",
];

/// Returns a description of a parameter's kind.
pub(crate) fn kind(kind: ParamKind) -> String {
    match kind {
        ParamKind::Scalar => "a scalar".to_owned(),
        ParamKind::Tensor { axes, dtype } if axes.is_table() => format!("a table [{axes}] of {dtype}"),
        ParamKind::Tensor { axes, dtype } => {
            format!("a tensor [{axes}] of {dtype}")
        }
    }
}

/// Collects the mistakes in a specification.
#[derive(Debug, Default)]
pub(crate) struct Check {
    pub(crate) errors: Vec<SpecError>,
}

impl Check {
    pub(crate) fn fail(&mut self, field: impl Into<String>, value: impl std::fmt::Display, rule: impl Into<String>) {
        self.errors.push(SpecError::new(field, value, rule));
    }

    pub(crate) fn equal(&mut self, field: &str, value: i64, other: &str, want: i64) {
        if value != want {
            self.fail(field, value, format!("{want}, the value of {other}"));
        }
    }

    /// Checks the extents of a tensor. `whole` is the reason why its batch and sequence extents must be at least 1; with `None`, they
    /// may be 0.
    pub(crate) fn extents(&mut self, name: &str, t: &TensorSpec, whole: Option<&str>) {
        let axes = ["batch", "head", "seq", "dim"];
        let limit = i64::from(i32::MAX);
        for ((axis, what), &extent) in axes.into_iter().enumerate().zip(&t.dims) {
            let may_be_empty = what == "batch" || what == "seq";
            let least = i64::from(!may_be_empty || whole.is_some());
            let why = whole.filter(|_| may_be_empty && extent == 0).map_or_else(String::new, |why| format!(", as {why}"));
            if extent < least || extent > limit {
                self.fail(format!("{name}.dims[{axis}] ({what})"), extent, format!("between {least} and {limit}{why}"));
            }
        }
        let elements = t.dims.iter().try_fold(1i64, |n, &d| n.checked_mul(d)).and_then(|n| n.checked_mul(8));
        if elements.is_none() {
            self.fail(format!("{name}.dims"), format!("{:?}", t.dims), "fewer than 2^60 elements");
        }
    }

    /// Checks the strides and the alignment of a tensor. If `spread` is true, the last axis may have stride 0 instead of 1.
    pub(crate) fn memory(&mut self, name: &str, t: &TensorSpec, dtype: DType, spread: bool) {
        for (axis, (&stride, &extent)) in t.strides.iter().zip(&t.dims).enumerate() {
            if stride < 0 {
                self.fail(format!("{name}.strides[{axis}]"), stride, "at least 0");
            } else if axis == 3 && stride != 1 && extent > 1 && !(spread && stride == 0) && !t.is_empty() {
                self.fail(format!("{name}.strides[3]"), stride, "1 (a dense last axis)");
            }
        }
        let bytes = t.extent().and_then(|n| n.checked_mul(i64::from(dtype.bits() / 8)));
        if t.dims.iter().all(|&d| d >= 0) && t.strides.iter().all(|&s| s >= 0) && bytes.is_none() {
            self.fail(format!("{name}.strides"), format!("{:?}", t.strides), "strides that span less than 2^63 bytes");
        }
        if !t.alignment.is_power_of_two() {
            self.fail(format!("{name}.alignment"), t.alignment, "a power of two, in bytes");
        } else if t.alignment < dtype.bits() / 8 {
            self.fail(format!("{name}.alignment"), t.alignment, format!("at least one element ({} bytes)", dtype.bits() / 8));
        }
    }

    /// Checks that no two elements of an output share an address. For a packed operand, `most` is the largest number of tokens in a call,
    /// and no two tokens may share an address either, in one sequence or in two. For a dense operand, `most` is `None`.
    pub(crate) fn output(&mut self, name: &str, o: &TensorSpec, most: Option<i64>) {
        if o.is_empty() {
            return;
        }
        let mut o = TensorSpec { dims: tokens_apart(o.dims, most), ..*o };
        if most.is_some() {
            o.dims[0] = 1;
        }
        let mut axes: Vec<usize> = (0..4).filter(|&a| o.dims[a] > 1).collect();
        axes.sort_by_key(|&a| (o.strides[a], std::cmp::Reverse(a)));
        let mut reach = 1i64;
        for a in axes {
            if o.strides[a] < reach {
                self.fail(format!("{name}.strides[{a}]"), o.strides[a], format!("at least {reach}: output elements must not overlap"));
                return;
            }
            reach = o.strides[a].saturating_mul(o.dims[a] - 1).saturating_add(reach);
        }
    }

    pub(crate) fn packed(&mut self, packed: &Packed, spec: &AttentionSpec) {
        let field = format!("packed.{}", Side::Keys.total());
        if spec.paged.is_some() {
            if !packed.cross {
                self.fail("packed.cross", "false", "true with a paged KV cache, whose key lengths are independent of the query lengths");
            }
            if let Some(total) = packed.total_kv {
                self.fail(field, total, "none with a paged KV cache, whose size is paged.pages");
            }
        } else if !packed.cross {
            self.equal("k.dims[2] (seq_kv)", spec.k.dims[2], "q.dims[2] (one cu_seqlens for both sides)", spec.q.dims[2]);
            if packed.total_kv != packed.total_q {
                let total = |n: Option<i64>| n.map_or_else(|| "none".to_owned(), |n| n.to_string());
                let rule = format!("{}, the value of total_q: both sides share cu_seqlens", total(packed.total_q));
                self.fail(field, total(packed.total_kv), rule);
            }
        }
        for side in Side::ALL {
            if let Some(total) = packed.total(side).filter(|total| !(1..=i64::from(i32::MAX)).contains(total)) {
                self.fail(format!("packed.{}", side.total()), total, format!("between 1 and {}", i32::MAX));
            }
        }
    }

    /// Checks the optional element type `asked` of a tensor, in a problem whose operands have the type `dtype`. Only operands of 8-bit
    /// floats allow another type, which must be an 8-bit float or one of `others`. Returns `asked` if it differs from `dtype`.
    pub(crate) fn narrow(&mut self, field: &str, asked: Option<DType>, dtype: DType, others: &[DType]) -> Option<DType> {
        let asked = asked.filter(|asked| *asked != dtype)?;
        if !dtype.is_fp8() {
            self.fail(field, asked, format!("{dtype}, the type of q, k and v: only FP8 inputs allow another"));
        } else if !asked.is_fp8() && !others.contains(&asked) {
            let others: String = others.iter().map(|other| format!(", {other}")).collect();
            self.fail(field, asked, format!("one of f8e4m3, f8e5m2{others}"));
        }
        Some(asked)
    }

    /// Checks the dropout probability.
    pub(crate) fn dropout(&mut self, dropout: Option<Dropout>) {
        if let Some(p) = dropout.map(Dropout::p).filter(|&p| !(p > 0.0 && p < 1.0)) {
            self.fail("dropout", p, "a probability above 0 and below 1; leave it out for no dropout");
        }
    }

    /// Adds `own`, a parameter that the specification itself declares, to the known parameters. It is a mistake if a score_mod or mask
    /// has declared the name already.
    pub(crate) fn own(&mut self, own: Declared, known: &mut Vec<Declared>) {
        match known.iter().any(|p| p.name == own.name) {
            true => self.fail(
                format!("score_mods, parameter {}", own.name),
                "a reserved name",
                "another name: the problem itself declares a parameter of this name",
            ),
            false => known.push(own),
        }
    }

    pub(crate) fn masks(&mut self, masks: &[Mask], cross: bool) {
        for (i, mask) in masks.iter().enumerate() {
            let field = format!("masks[{i}]");
            self.mask(&field, mask, cross);
            if cross && ends::are_mixed(mask) {
                self.fail(field, mask, ends::UNMIXED);
            }
        }
    }

    fn mask(&mut self, field: &str, mask: &Mask, cross: bool) {
        match mask {
            Mask::Window { left, right, align } => {
                if cross && *align == Align::BottomRight {
                    let rule = "top-left or ends: with separate cu_seqlens for keys, only ends follows the corner of each sequence";
                    self.fail(format!("{field}.align"), "bottom-right", rule);
                }
                if let Some(left) = left.filter(|&l| l < 1) {
                    self.fail(format!("{field}.left"), left, "at least 1 (the key on the diagonal), or inf");
                }
                if let Some(right) = right.filter(|&r| r < 0) {
                    self.fail(format!("{field}.right"), right, "at least 0, or inf");
                }
            }
            Mask::PrefixLm { len } => {
                if *len < 0 {
                    self.fail(format!("{field}.len"), len, "at least 0");
                }
            }
            Mask::All(masks) | Mask::Any(masks) => {
                for (i, mask) in masks.iter().enumerate() {
                    self.mask(&format!("{field}[{i}]"), mask, cross);
                }
            }
            Mask::Not(mask) => self.mask(field, mask, cross),
            Mask::Traced(_) => {}
        }
    }

    pub(crate) fn expression<T>(&mut self, field: &str, made: Result<T, ExprErrors>) -> Option<T> {
        match made {
            Ok(made) => Some(made),
            Err(errors) => {
                for error in errors.0 {
                    self.fail(field, "an expression", format!("a valid one: {error}"));
                }
                None
            }
        }
    }

    /// Adds the parameters that the expression `field` declares to the known ones, and reports every invalid or contradictory
    /// declaration.
    pub(crate) fn params(&mut self, field: &str, declared: &[Declared], known: &mut Vec<Declared>) {
        for p in declared {
            if OPERAND_NAMES.contains(&p.name.as_str()) {
                self.fail(format!("{field}, parameter {}", p.name), "the name of an operand", "another name");
            }
            if let ParamKind::Tensor { axes, dtype: _ } = p.kind
                && axes.page_size().is_some()
            {
                self.fail(
                    format!("{field}, parameter {}", p.name),
                    kind(p.kind),
                    "a tensor over axes: expressions cannot read page tables",
                );
            }
            match known.iter().find(|k| k.name == p.name) {
                Some(k) if k != p => {
                    self.fail(format!("{field}, parameter {}", p.name), kind(p.kind), format!("{}, as declared before", kind(k.kind)));
                }
                // Declarations that differ only in their defaults compare equal, so compare the defaults too: a parameter can have only
                // one.
                Some(k) if k.default.map(f32::to_bits) != p.default.map(f32::to_bits) => {
                    let number = |default: Option<f32>| default.map_or("no default".to_owned(), |x| format!("{x:?} by default"));
                    self.fail(
                        format!("{field}, parameter {}", p.name),
                        number(p.default),
                        format!("{}, as declared before", number(k.default)),
                    );
                }
                Some(_) => {}
                None => known.push(p.clone()),
            }
        }
    }
}
