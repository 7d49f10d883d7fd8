//! The strided operands of a pass: names, readers and writers.

use serde::Serialize;
use std::fmt;

/// The direction of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From `q`, `k` and `v` to `o` and `stats`.
    Forward,
    /// From `q`, `k`, `v`, `o`, `stats` and `d_o` to gradients.
    Backward,
}

impl Direction {
    /// Returns the name used in reports and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
        }
    }

    /// Returns the operands of a pass, in the order of [`Operand::ALL`].
    pub const fn operands(self) -> &'static [Operand] {
        match self {
            Direction::Forward => &Operand::FORWARD,
            Direction::Backward => &Operand::ALL,
        }
    }
}

/// A strided operand of a pass.
///
/// Exhaustive: tables of operands must have an entry for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operand {
    /// Queries, (batch, heads_q, seq_q, dim_qk).
    Q,
    /// Keys, (batch, heads_kv, seq_kv, dim_qk).
    K,
    /// Values, (batch, heads_kv, seq_kv, dim_v).
    V,
    /// Output, (batch, heads_q, seq_q, dim_v): written by the forward pass, read by the backward pass.
    O,
    /// Gradient of the output, (batch, heads_q, seq_q, dim_v).
    DO,
    /// Gradient of the queries, (batch, heads_q, seq_q, dim_qk).
    DQ,
    /// Gradient of the keys, (batch, heads_kv, seq_kv, dim_qk).
    DK,
    /// Gradient of the values, (batch, heads_kv, seq_kv, dim_v).
    DV,
}

impl Operand {
    /// Every operand, those of the forward pass first.
    pub const ALL: [Operand; 8] = [Operand::Q, Operand::K, Operand::V, Operand::O, Operand::DO, Operand::DQ, Operand::DK, Operand::DV];

    /// The operands of the forward pass.
    pub(crate) const FORWARD: [Operand; 4] = [Operand::Q, Operand::K, Operand::V, Operand::O];

    /// Returns the name used in reports and errors.
    pub fn name(self) -> &'static str {
        match self {
            Operand::Q => "q",
            Operand::K => "k",
            Operand::V => "v",
            Operand::O => "o",
            Operand::DO => "d_o",
            Operand::DQ => "dq",
            Operand::DK => "dk",
            Operand::DV => "dv",
        }
    }

    /// Returns whether a pass writes the operand (true) or reads it (false); `None` if the pass does not have it.
    pub const fn written(self, direction: Direction) -> Option<bool> {
        match (direction, self) {
            (_, Operand::Q | Operand::K | Operand::V) | (Direction::Backward, Operand::O | Operand::DO) => Some(false),
            (Direction::Forward, Operand::O) | (Direction::Backward, Operand::DQ | Operand::DK | Operand::DV) => Some(true),
            (Direction::Forward, Operand::DO | Operand::DQ | Operand::DK | Operand::DV) => None,
        }
    }

    /// Returns the names of two fields of a cache key: that of the operand's layout and that of its alignment.
    pub fn fields(self) -> [&'static str; 2] {
        match self {
            Operand::Q => ["layout of q", "alignment of q"],
            Operand::K => ["layout of k", "alignment of k"],
            Operand::V => ["layout of v", "alignment of v"],
            Operand::O => ["layout of o", "alignment of o"],
            Operand::DO => ["layout of d_o", "alignment of d_o"],
            Operand::DQ => ["layout of dq", "alignment of dq"],
            Operand::DK => ["layout of dk", "alignment of dk"],
            Operand::DV => ["layout of dv", "alignment of dv"],
        }
    }
}

/// The query side or the key side: the sequence to which an operand, a length or `cu_seqlens` belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The sequence of queries, outputs and their gradients.
    Queries,
    /// The sequence of keys, values and their gradients.
    Keys,
}

impl Side {
    /// Both sides of the attention: queries and keys.
    pub const ALL: [Side; 2] = [Side::Queries, Side::Keys];

    /// Returns the name of the field of [`Packed`](crate::Packed) that bounds the number of tokens on this side, queries or keys.
    pub const fn total(self) -> &'static str {
        match self {
            Side::Queries => "total_q",
            Side::Keys => "total_kv",
        }
    }
}

impl Operand {
    /// Returns the side, queries or keys, to which the operand's rows belong.
    pub const fn side(self) -> Side {
        match self {
            Operand::Q | Operand::O | Operand::DO | Operand::DQ => Side::Queries,
            Operand::K | Operand::V | Operand::DK | Operand::DV => Side::Keys,
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_fields_are_made_of_the_operands() {
        for operand in Operand::ALL {
            assert_eq!(operand.fields(), [format!("layout of {operand}"), format!("alignment of {operand}")]);
            assert_eq!(operand.to_string(), operand.name());
        }
    }

    #[test]
    fn operands_of_a_pass_are_those_that_it_reads_or_writes() {
        for direction in [Direction::Forward, Direction::Backward] {
            let reached = Operand::ALL.into_iter().filter(|operand| operand.written(direction).is_some());
            assert!(reached.eq(direction.operands().iter().copied()), "{}", direction.name());
        }
        let written = |direction: Direction| direction.operands().iter().filter(move |o| o.written(direction) == Some(true));
        assert!(written(Direction::Forward).eq(&[Operand::O]));
        assert!(written(Direction::Backward).eq(&[Operand::DQ, Operand::DK, Operand::DV]));
    }
}
