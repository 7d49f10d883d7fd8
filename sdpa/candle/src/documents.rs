//! Packed sequences (varlen).

use crate::param::Value;
use candle_core::{DType, Device, Result, Tensor};
use sdpa::packed::{CU_SEQLENS, CU_SEQLENS_KV, CU_SEQLENS_Q};
use sdpa::{Packed, SpecError};

/// The `cu_seqlens` offsets of a packed batch, and the length of the longest sequence.
///
/// Offsets are u32, i32 or i64 numbers of tokens that never decrease. There is one more than there are sequences: sequence `n` has the
/// tokens from offset `n` to offset `n + 1`. Offsets are validated on the CPU, but not on a GPU. With invalid offsets, all reads and
/// writes still stay within the tensors.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use sdpa_candle::{Attention, Documents, Mask};
///
/// // Three documents, of 4, 0 and 3 tokens.
/// let documents = Documents::new(&Tensor::new(&[0u32, 4, 4, 7], &Device::Cpu)?, 4);
/// let (q, k) = (Tensor::randn(0f32, 1., (7, 4, 8), &Device::Cpu)?, Tensor::randn(0f32, 1., (7, 2, 8), &Device::Cpu)?);
/// let o = Attention::new().mask(Mask::causal()).forward_packed(&documents, &q, &k, &k)?;
/// assert_eq!(o.dims(), [7, 4, 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Documents {
    queries: (Tensor, usize),
    keys: Option<(Tensor, usize)>,
    most: Option<usize>,
}

impl Documents {
    /// Creates packed sequences whose queries and keys share the `cu_seqlens` offsets `boundaries`. No sequence has more than `longest`
    /// tokens.
    pub fn new(boundaries: &Tensor, longest: usize) -> Documents {
        Documents { queries: (boundaries.clone(), longest), keys: None, most: None }
    }

    /// Sets the `cu_seqlens` offsets of the keys, if they differ from those of the queries. No sequence has more than `longest` keys.
    #[must_use]
    pub fn keys(mut self, boundaries: &Tensor, longest: usize) -> Documents {
        self.keys = Some((boundaries.clone(), longest));
        self
    }

    /// Sets the largest number of query or key tokens in a call. The default is the number of sequences times the longest length. The
    /// memory of backward passes on cuDNN grows with this number, and each number needs a plan of its own.
    #[must_use]
    pub fn at_most(mut self, tokens: usize) -> Documents {
        self.most = Some(tokens);
        self
    }

    pub(crate) fn boundaries(&self) -> [&Tensor; 2] {
        [&self.queries.0, self.keys.as_ref().map_or(&self.queries.0, |(boundaries, _)| boundaries)]
    }

    /// Returns the number of sequences, and the lengths of the longest sequence of queries and of keys.
    pub(crate) fn extents(&self) -> (usize, [usize; 2]) {
        let longest = self.keys.as_ref().map_or(self.queries.1, |(_, longest)| *longest);
        (self.queries.0.elem_count().saturating_sub(1), [self.queries.1, longest])
    }

    pub(crate) fn packed(&self) -> Packed {
        let total = self.most.map(|most| i64::try_from(most).unwrap_or(i64::MAX));
        Packed::new().with_cross(self.keys.is_some()).with_wide(self.wide()).with_totals(total, total)
    }

    /// Returns true if offsets are read as i64: one call has offsets of one type.
    fn wide(&self) -> bool {
        self.boundaries().iter().any(|boundaries| boundaries.dtype() == DType::I64)
    }

    pub(crate) fn mistakes(&self) -> Vec<SpecError> {
        let mut errors = Vec::new();
        for (name, boundaries) in self.names().into_iter().zip(self.boundaries()) {
            let field = |what: &str| format!("{name} {what}");
            if boundaries.rank() != 1 || boundaries.elem_count() < 2 {
                errors.push(SpecError::new(
                    field("shape"),
                    format!("{:?}", boundaries.dims()),
                    "one axis with batch + 1 offsets, at least 2",
                ));
            }
            if ![DType::U32, DType::I32, DType::I64].contains(&boundaries.dtype()) {
                errors.push(SpecError::new(field("dtype"), boundaries.dtype().as_str(), "one of u32, i32, i64"));
            }
        }
        errors
    }

    fn names(&self) -> Vec<&'static str> {
        if self.keys.is_some() { vec![CU_SEQLENS_Q, CU_SEQLENS_KV] } else { vec![CU_SEQLENS] }
    }

    pub(crate) fn values(&self) -> Vec<(String, Value)> {
        let named = self.names().into_iter().zip(self.boundaries());
        named.map(|(name, boundaries)| (name.to_owned(), Value::Tensor(boundaries.clone()))).collect()
    }

    pub(crate) fn to_device(&self, device: &Device) -> Result<Documents> {
        let keys = match &self.keys {
            Some((boundaries, longest)) => Some((boundaries.to_device(device)?, *longest)),
            None => None,
        };
        Ok(Documents { queries: (self.queries.0.to_device(device)?, self.queries.1), keys, most: self.most })
    }
}
