//! Finds the values that decide a discontinuity, so that their rounding matters.

use super::node::{Binary, Node, Type, Unary};
use super::trace::Trace;

/// Returns whether the result is discontinuous in a float operand.
fn jumps(node: Node) -> bool {
    match node {
        Node::Unary(f, _) => match f {
            Unary::Floor | Unary::Ceil | Unary::ToI32 => true,
            Unary::Neg | Unary::Abs | Unary::Not | Unary::ToF32 => false,
            Unary::Sqrt | Unary::Rsqrt | Unary::Exp | Unary::Log | Unary::Sin | Unary::Cos | Unary::Tanh | Unary::Erf => false,
        },
        Node::Binary(f, ..) => match f {
            Binary::Mod | Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => true,
            Binary::Add | Binary::Sub | Binary::Mul | Binary::Div | Binary::Pow | Binary::Min | Binary::Max => false,
            Binary::And | Binary::Or => false,
        },
        Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => false,
        // A read or a select does not count itself: a jump comes from the comparison or rounding that computes its condition or position.
        Node::Read(..) | Node::Select(..) => false,
    }
}

impl Trace {
    /// Returns, for each value, whether it is a float that decides a discontinuity. Such a float is compared, rounded to an integer or
    /// the operand of a remainder, or it is an input of another such float. Executors compute these exactly as written, each function
    /// rounded once. A contracted product, or an inverse in place of a division, would move the end of a mask or select another element
    /// of a table.
    ///
    /// ```
    /// use sdpa_core::expr::{Binary, Node, Trace};
    ///
    /// let trace: Trace = "f32(k) / 41.0 < 1.0".parse()?;
    /// let division = trace.ids().find(|id| matches!(trace.node(*id), Node::Binary(Binary::Div, ..))).unwrap();
    /// assert!(trace.decisive()[division.index()]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn decisive(&self) -> Vec<bool> {
        let mut decisive = vec![false; self.nodes().len()];
        let ids: Vec<_> = self.ids().collect();
        for &id in ids.iter().rev() {
            let node = self.node(id);
            if decisive[id.index()] || jumps(node) {
                node.operands().filter(|x| self.ty(*x) == Type::F32).for_each(|x| decisive[x.index()] = true);
            }
        }
        decisive
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns, for each computed float of a text in order, whether it decides a discontinuity.
    fn of(text: &str) -> Vec<bool> {
        let trace: Trace = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        let decisive = trace.decisive();
        let computed = |node| matches!(node, Node::Binary(..) | Node::Unary(..));
        trace.ids().filter(|id| computed(trace.node(*id)) && trace.ty(*id) == Type::F32).map(|id| decisive[id.index()]).collect()
    }

    #[test]
    fn a_jump_hangs_on_what_its_operands_are_made_of() {
        let text = "score + f32(k) * 0.1";
        assert_eq!(of(text), [false; 3], "{text}");
        for text in ["f32(k) * 0.1 + f32(q) < 3.0", "i32(sqrt(f32(k)) / 3.0) == q", "(f32(k) * 0.3) % 2.0 > 1.0"] {
            assert!(of(text).into_iter().all(|decisive| decisive), "{text}");
        }
        // The operands of the condition decide a discontinuity, the selected values do not.
        assert_eq!(of("select(f32(k) * 0.1 < 2.0, score * 3.0, score)"), [true, true, false]);
        assert_eq!(of("score * floor(f32(k) / 3.0)"), [true, true, false, false]);
    }

    #[test]
    fn whole_numbers_are_never_rounded() {
        let trace: Trace = "(k - q) / 3 < 2".parse().unwrap();
        assert!(trace.decisive().into_iter().all(|decisive| !decisive));
    }
}
