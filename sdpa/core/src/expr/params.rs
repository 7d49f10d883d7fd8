//! Declared parameters, whose values each call passes by name.

use super::node::{Axis, Type};
use crate::dtype::DType;
use std::fmt;

/// The set of axes that a declared tensor spans. All positions along any other axis share one element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Axes {
    /// One bit per axis, and one for the extra element of `cu_seqlens`.
    set: u8,
    /// Keys that share an element: those of a page. 0 if each key has its own.
    page: u32,
    /// Extents of a table, which spans no axis; unused ones are 0.
    table: [u32; 4],
}

impl Axes {
    /// No axis: the tensor has one element.
    pub const NONE: Axes = Axes { set: 0, page: 0, table: [0; 4] };

    /// One element per batch entry plus one more: the offset of each entry and the end of the last one (`cu_seqlens`). An expression
    /// reads the offset of the current entry.
    pub const BOUNDARIES: Axes = Axes { set: 1 << 4 | 1, ..Axes::NONE };

    /// Returns the axes of a page table: one element for each page of `page_size` keys of a batch entry. Expressions cannot read it.
    pub(crate) fn pages(page_size: i64) -> Axes {
        Axes { page: page_size.clamp(1, i64::from(i32::MAX)) as u32, ..Axes::from([Axis::Batch, Axis::K]) }
    }

    /// Creates the shape of a table: a tensor that spans no axis and has its own extents, at most four, the last one innermost.
    /// Expressions read it at computed positions.
    ///
    /// # Errors
    /// Returns the rule that the extents break.
    pub fn table(extents: &[i64]) -> Result<Axes, &'static str> {
        if extents.is_empty() || extents.len() > 4 {
            return Err("expected one to four extents");
        }
        let mut table = [0; 4];
        let mut elements: i64 = 1;
        for (to, &extent) in table.iter_mut().zip(extents) {
            elements = elements.checked_mul(extent).filter(|_| extent > 0).ok_or("expected extents of at least 1")?;
            if elements > i64::from(i32::MAX) {
                return Err("expected fewer than 2^31 elements");
            }
            *to = extent as u32;
        }
        Ok(Axes { table, ..Axes::NONE })
    }

    /// Returns the extents of a table, or an empty iterator for a tensor that spans axes.
    pub fn extents(self) -> impl DoubleEndedIterator<Item = i64> + ExactSizeIterator {
        let rank = self.table.iter().filter(|extent| **extent > 0).count();
        (0..rank).map(move |n| i64::from(self.table[n]))
    }

    /// Returns whether this describes a table.
    pub fn is_table(self) -> bool {
        self.table[0] > 0
    }

    /// Returns the number of keys per page; `None` unless the tensor has one element per page, as a page table does.
    pub fn page_size(self) -> Option<i64> {
        (self.page > 0).then_some(i64::from(self.page))
    }

    /// Returns whether the tensor has one element more than there are batch entries, as `cu_seqlens` does.
    pub fn has_end(self) -> bool {
        self.set & 1 << 4 != 0
    }

    /// Returns whether an axis is in the set.
    pub fn has(self, axis: Axis) -> bool {
        self.set & (1 << axis.place()) != 0
    }

    /// Iterates over the axes, outermost first.
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |&a| self.has(a))
    }

    /// Returns the set with one more axis.
    #[must_use]
    pub fn with(self, axis: Axis) -> Axes {
        Axes { set: self.set | (1 << axis.place()), ..self }
    }

    /// Returns the union of both sets.
    #[must_use]
    pub fn union(self, other: Axes) -> Axes {
        Axes { set: self.set | other.set, page: self.page.max(other.page), table: self.table }
    }

    /// Returns the number of elements of a dense tensor over these axes, in a problem of extents (batch, heads_q, seq_q, seq_kv).
    pub fn elements(self, extents: [i64; 4]) -> i64 {
        self.dims(extents).iter().product::<i64>() + i64::from(self.has_end())
    }

    /// Returns the extents of a tensor over these axes, as expressions index it, in a problem of extents (batch, heads_q, seq_q, seq_kv).
    /// With one element per page, the extent along keys is the number of pages.
    pub fn dims(self, extents: [i64; 4]) -> [i64; 4] {
        let mut dims = [1; 4];
        // A table's extents fill the innermost axes of `dims`; the outer axes stay 1.
        dims.iter_mut().rev().zip(self.extents().rev()).for_each(|(dim, extent)| *dim = extent);
        for axis in self.iter() {
            dims[axis.place()] = match (axis, self.page_size()) {
                (Axis::K, Some(page)) => extents[axis.place()].max(0).unsigned_abs().div_ceil(page.unsigned_abs()) as i64,
                (Axis::Batch | Axis::Head | Axis::Q | Axis::K, _) => extents[axis.place()],
            };
        }
        dims
    }
}

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, extent) in self.extents().enumerate() {
            write!(f, "{}{extent}", if n == 0 { "" } else { ", " })?;
        }
        for (n, axis) in self.iter().enumerate() {
            f.write_str(if n == 0 { "" } else { ", " })?;
            match (axis, self.page_size()) {
                (Axis::Batch, _) if self.has_end() => write!(f, "{} + 1", axis.name())?,
                (Axis::K, Some(page)) => write!(f, "ceil({} / {page})", axis.name())?,
                (Axis::Batch | Axis::Head | Axis::Q | Axis::K, _) => f.write_str(axis.name())?,
            }
        }
        Ok(())
    }
}

impl<const N: usize> From<[Axis; N]> for Axes {
    fn from(axes: [Axis; N]) -> Axes {
        axes.into_iter().collect()
    }
}

impl FromIterator<Axis> for Axes {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> Axes {
        axes.into_iter().fold(Axes::NONE, Axes::with)
    }
}

/// The kind of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParamKind {
    /// One f32 in host memory, read at each execution.
    Scalar,
    /// A dense tensor over some of the axes.
    Tensor {
        /// The axes that the tensor spans.
        axes: Axes,
        /// The element type. Tensors that expressions read are f32, f16, bf16, i32 or bool. Others may be i64 (`cu_seqlens`, the seed and
        /// offset of dropout) or f8e8m0 (block scales).
        dtype: DType,
    },
}

impl ParamKind {
    /// Returns the extents of a table, or an empty iterator for any other parameter.
    pub fn extents(self) -> impl DoubleEndedIterator<Item = i64> + ExactSizeIterator {
        let axes = match self {
            ParamKind::Scalar => Axes::NONE,
            ParamKind::Tensor { axes, dtype: _ } => axes,
        };
        axes.extents()
    }

    /// Clamps `place`, a position in memory order, to the elements of the table.
    pub fn within(self, place: i64) -> usize {
        let last = self.extents().product::<i64>() - 1;
        place.clamp(0, last.max(0)).unsigned_abs() as usize
    }

    /// Returns the type of the parameter's value in an expression.
    pub fn ty(self) -> Type {
        match self {
            ParamKind::Scalar => Type::F32,
            ParamKind::Tensor { dtype, axes: _ } => match dtype {
                DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => Type::F32,
                DType::I32 | DType::I64 => Type::I32,
                DType::Bool => Type::Bool,
            },
        }
    }
}

/// A declared parameter. Its default value does not count when traces are compared.
#[derive(Clone, Debug)]
pub struct Declared {
    /// The name by which calls pass its value.
    pub name: String,
    /// The kind of parameter: a scalar or a tensor.
    pub kind: ParamKind,
    /// The value of a scalar in calls that do not name it; `None` for a tensor.
    pub default: Option<f32>,
}

impl PartialEq for Declared {
    fn eq(&self, other: &Declared) -> bool {
        (&self.name, self.kind) == (&other.name, other.kind)
    }
}

impl Eq for Declared {}

impl std::hash::Hash for Declared {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (&self.name, self.kind).hash(state);
    }
}
