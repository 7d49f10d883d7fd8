//! Packed sequences: their kernel arguments, and the memory that kernels access.

use crate::forward::Forward;
use crate::plan::{Binding, Operand};
use crate::source::{BOUNDARIES_KV_SLOT, BOUNDARIES_Q_SLOT};
use crate::unsupported::Check;
use sdpa_core::packed::{self, Documents};
use sdpa_core::{DType, Packed, Side, TensorSpec};
use sdpa_emit::Dialect;

/// The numbers of query and key tokens of a packed call. Kernels access no token after these, whatever the offsets contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Number of tokens of queries, outputs and their gradients.
    pub queries: i64,
    /// Number of tokens of keys, values and their gradients.
    pub keys: i64,
}

impl Tokens {
    /// Returns the number of tokens of one side: queries or keys.
    pub fn of(&self, side: Side) -> i64 {
        match side {
            Side::Queries => self.queries,
            Side::Keys => self.keys,
        }
    }

    /// Returns the token counts of a call, `said`, limited to these maximums; the maximums themselves for `None`.
    pub(crate) fn up_to(self, said: Option<Tokens>) -> Tokens {
        let least = |most: i64, said: i64| said.clamp(0, most);
        said.map_or(self, |said| Tokens { queries: least(self.queries, said.queries), keys: least(self.keys, said.keys) })
    }
}

impl From<&Documents> for Tokens {
    fn from(documents: &Documents) -> Tokens {
        let [queries, keys] = Side::ALL.map(|side| documents.end(side) as i64);
        Tokens { queries, keys }
    }
}

/// Returns the MSL element type of `cu_seqlens`.
pub(crate) fn boundary(packed: &Packed) -> &'static str {
    Dialect::Msl.element(if packed.wide { DType::I64 } else { DType::I32 })
}

impl Forward {
    /// Returns the largest token counts of a packed call; `None` if batch entries are not packed.
    pub(crate) fn tokens(&self) -> Option<Tokens> {
        let packed = self.packed?;
        let [batch, _, seq_q, seq_kv] = self.extents();
        let total = |side: Side, longest: i64| packed.total(side).unwrap_or_else(|| batch.saturating_mul(longest));
        Some(Tokens { queries: total(Side::Queries, seq_q), keys: total(Side::Keys, seq_kv) })
    }

    /// Checks the rules for packed sequences.
    pub(crate) fn check_packed(&self, check: &mut Check) {
        let Some(tokens) = self.tokens() else { return };
        let lengths = self.seq_len_q || self.seq_len_kv && self.paged.is_none();
        check.that(!lengths, "masks", "per-sequence lengths", "none with packed sequences: cu_seqlens already give the lengths");
        for (field, total) in [("packed.total_q", tokens.queries), ("packed.total_kv", tokens.keys)] {
            check.that(total >= 0, field, total, "at least 0");
        }
    }

    /// Returns extents and strides of an operand as it is stored. `side` tells whether its tokens are those of queries or of keys.
    pub(crate) fn memory(&self, tensor: &TensorSpec, side: Side) -> TensorSpec {
        let paged = self.paged.filter(|_| side == Side::Keys);
        let documents = self.tokens().map(|tokens| packed::memory(tensor, tokens.of(side)));
        documents.unwrap_or_else(|| paged.map_or(*tensor, |paged| paged.container(tensor)))
    }

    /// Returns the strides between batch entries, heads and rows of an operand. Offsets of packed sequences count tokens, so their first
    /// stride is that of tokens.
    pub(crate) fn outer(&self, tensor: &TensorSpec) -> [i64; 3] {
        let [entry, head, row] = tensor.outer();
        [if self.packed.is_some() { row } else { entry }, head, row]
    }

    /// Returns extents and strides of row statistics, dense: (batch, heads_q, seq_q), or (tokens, heads_q) for packed sequences.
    pub(crate) fn row_memory(&self) -> (Vec<i64>, [i64; 3]) {
        let [batch, heads_q, seq_q, _] = self.extents();
        match self.tokens() {
            None => (vec![batch, heads_q, seq_q], [heads_q.saturating_mul(seq_q), seq_q, 1]),
            Some(tokens) => (vec![tokens.queries, heads_q], [heads_q, 1, heads_q]),
        }
    }

    /// Returns the bindings of the `cu_seqlens` of these sides (queries, keys).
    pub(crate) fn boundaries(&self, sides: &[Side]) -> Vec<Binding> {
        let Some(packed) = self.packed else { return Vec::new() };
        let elements = self.q.dims[0].saturating_add(1);
        let dtype = if packed.wide { DType::I64 } else { DType::I32 };
        let binding = |side: &Side| {
            let slot = match side {
                Side::Queries => BOUNDARIES_Q_SLOT,
                Side::Keys => BOUNDARIES_KV_SLOT,
            };
            let operand = Operand::Declared { name: packed.boundaries(*side).to_owned(), dtype, elements };
            Binding::read(slot, boundary(&packed), operand)
        };
        sides.iter().map(binding).collect()
    }
}
