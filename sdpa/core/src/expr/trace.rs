//! A finished trace: plain data. Equal traces compute the same from equal parameters.

use super::node::{Axis, Binary, Const, Node, NodeId, ParamId, Type};
use super::params::{Axes, Declared, ParamKind};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

/// A mistake in an expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExprError {
    /// A name is declared twice with different axes, element types or defaults.
    #[error("parameter {name} is declared twice, with different axes, element types or defaults")]
    Redeclared {
        /// The name of the parameter.
        name: String,
    },
    /// A name is not 1 to 64 letters, digits and `_`, begins with a digit, or is a reserved word.
    #[error(
        "parameter {name:?}: expected a name of 1 to 64 letters, digits and _ that does not begin with a digit and is not a reserved word"
    )]
    Name {
        /// The invalid name.
        name: String,
    },
    /// The default of a scalar is missing or NaN.
    #[error("parameter {name}: expected a default that is a number")]
    Default {
        /// The name of the parameter.
        name: String,
    },
    /// Extents of a table are invalid.
    #[error("table {name}: {rule}")]
    Extents {
        /// The name of the table.
        name: String,
        /// The rule that the extents break.
        rule: String,
    },
    /// A table is read at more or fewer indices than it has extents.
    #[error("table {name}: got {given} indices, expected one (a position in memory) or {extents} (one per extent)")]
    Indices {
        /// The name of the table.
        name: String,
        /// The number of indices of the read.
        given: usize,
        /// The number of extents of the table.
        extents: usize,
    },
    /// A text cannot be parsed.
    #[error("at {line}:{column}: {rule}")]
    Syntax {
        /// The line of the mistake, counted from 1.
        line: usize,
        /// The column of the mistake, counted from 1.
        column: usize,
        /// The token that was expected, and the token that was found.
        rule: String,
    },
    /// A value has no derivative along the score or a parameter.
    #[error("{function} has no derivative: {rule}")]
    NoDerivative {
        /// The function that has no derivative.
        function: String,
        /// The reason why the function has no derivative.
        rule: String,
    },
}

/// Every mistake in an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExprErrors(pub Vec<ExprError>);

impl fmt::Display for ExprErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, e) in self.0.iter().enumerate() {
            write!(f, "{}{e}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for ExprErrors {}

/// The operations of a closure as data: values in topological order, and the parameters that they read. The results are called *roots*.
///
/// Equality and hashing ignore only the defaults of scalars, which are values of a call. `Display` writes the text form, and `FromStr` parses it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Trace {
    /// Hash of everything that is compared. Computed once, because every call looks traces up.
    hash: u64,
    nodes: Vec<Node>,
    types: Vec<Type>,
    params: Vec<Declared>,
    roots: Vec<NodeId>,
}

/// The inputs on which a value of a trace depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depends {
    /// True if the value depends on the score or the upstream gradient.
    pub score: bool,
    /// The axes whose indices the value depends on, directly or as the position in a tensor.
    pub axes: Axes,
    /// True if the value depends on a declared scalar.
    pub scalar: bool,
    /// True if the value depends on a declared tensor.
    pub tensor: bool,
}

impl Depends {
    fn and(self, other: Depends) -> Depends {
        Depends {
            score: self.score || other.score,
            axes: self.axes.union(other.axes),
            scalar: self.scalar || other.scalar,
            tensor: self.tensor || other.tensor,
        }
    }

    /// Returns whether the value is one number for the whole call.
    pub fn is_uniform(self) -> bool {
        !self.score && !self.tensor && self.axes == Axes::NONE
    }

    /// Returns whether the value may differ between the scores of one head.
    pub fn varies(self) -> bool {
        self.score || self.axes.has(Axis::Q) || self.axes.has(Axis::K)
    }

    /// Returns whether the indices of the batch entry and the head determine the value.
    pub fn is_of_heads(self) -> bool {
        !self.tensor && !self.scalar && !self.varies()
    }
}

impl PartialEq for Trace {
    fn eq(&self, other: &Trace) -> bool {
        self.hash == other.hash
            && (&self.nodes, &self.types, &self.params, &self.roots) == (&other.nodes, &other.types, &other.params, &other.roots)
    }
}

impl Eq for Trace {}

impl Hash for Trace {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Trace {
    /// Returns the base and exponent of a power with constant exponent 0, 1, 2, 3 or 4. Executors compute it as a product, which also works for bases
    /// without a logarithm.
    ///
    /// ```
    /// use sdpa_core::expr::Trace;
    ///
    /// let trace: Trace = "pow(score, 3.0)".parse()?;
    /// assert_eq!(trace.ids().filter_map(|id| trace.small_power(id)).map(|(_, times)| times).collect::<Vec<_>>(), [3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn small_power(&self, id: NodeId) -> Option<(NodeId, usize)> {
        let Node::Binary(Binary::Pow, x, y) = self.node(id) else { return None };
        let Node::Const(Const::F32(bits)) = self.node(y) else { return None };
        let times = [0.0, 1.0, 2.0, 3.0, 4.0].into_iter().position(|times| times == f32::from_bits(bits))?;
        Some((x, times))
    }

    fn with_hash(mut self) -> Trace {
        let mut hasher = DefaultHasher::new();
        (&self.nodes, &self.types, &self.params, &self.roots).hash(&mut hasher);
        self.hash = hasher.finish();
        self
    }

    /// Drops values that no root needs. Numbers the rest in depth-first order from the roots, operands first.
    pub(super) fn canonical(nodes: &[Node], types: &[Type], params: &[Declared], roots: &[NodeId]) -> Trace {
        let mut trace = Trace { hash: 0, nodes: Vec::new(), types: Vec::new(), params: Vec::new(), roots: Vec::new() };
        let mut new: Vec<Option<NodeId>> = vec![None; nodes.len()];
        let mut param: Vec<Option<ParamId>> = vec![None; params.len()];
        for &root in roots {
            let mut stack = vec![root];
            while let Some(&id) = stack.last() {
                if new[id.index()].is_some() {
                    stack.pop();
                    continue;
                }
                let node = nodes[id.index()];
                let missing: Vec<NodeId> = node.operands().filter(|x| new[x.index()].is_none()).collect();
                if !missing.is_empty() {
                    stack.extend(missing.into_iter().rev());
                    continue;
                }
                stack.pop();
                let mut declared = |p: ParamId| {
                    *param[p.index()].get_or_insert_with(|| {
                        trace.params.push(params[p.index()].clone());
                        ParamId(trace.params.len() as u32 - 1)
                    })
                };
                let renumbered = match node.map(|x| new[x.index()].unwrap_or(x)) {
                    Node::Param(p) => Node::Param(declared(p)),
                    Node::Read(p, x) => Node::Read(declared(p), x),
                    other @ (Node::Score
                    | Node::Upstream
                    | Node::Index(_)
                    | Node::Extent(_)
                    | Node::Const(_)
                    | Node::Unary(..)
                    | Node::Binary(..)
                    | Node::Select(..)) => other,
                };
                new[id.index()] = Some(NodeId(trace.nodes.len() as u32));
                trace.nodes.push(renumbered);
                trace.types.push(types[id.index()]);
            }
            trace.roots.extend(new[root.index()]);
        }
        trace.with_hash()
    }

    /// Returns every value; operands precede the values that use them.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the node of the value `id`.
    pub fn node(&self, id: NodeId) -> Node {
        self.nodes[id.index()]
    }

    /// Returns the type of a value.
    pub fn ty(&self, id: NodeId) -> Type {
        self.types[id.index()]
    }

    /// Returns every declared parameter, in the order of first use.
    pub fn params(&self) -> &[Declared] {
        &self.params
    }

    /// Returns the parameter of this name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.params.iter().position(|p| p.name == name).map(|n| ParamId(n as u32))
    }

    /// Returns the roots (outputs): the modified score of a score_mod, or a mask's boolean that is true if the query attends to the key.
    pub fn roots(&self) -> &[NodeId] {
        &self.roots
    }

    /// Iterates over the ids of all values, in topological order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// Returns the inputs on which each value depends.
    pub fn depends(&self) -> Vec<Depends> {
        let mut all: Vec<Depends> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let own = match *node {
                Node::Score | Node::Upstream => Depends { score: true, ..Depends::default() },
                Node::Index(axis) => Depends { axes: Axes::from([axis]), ..Depends::default() },
                Node::Param(p) => match self.params[p.index()].kind {
                    ParamKind::Scalar => Depends { scalar: true, ..Depends::default() },
                    ParamKind::Tensor { axes, dtype: _ } => Depends { axes, tensor: true, ..Depends::default() },
                },
                Node::Read(..) => Depends { tensor: true, ..Depends::default() },
                Node::Extent(_) | Node::Const(_) | Node::Unary(..) | Node::Binary(..) | Node::Select(..) => Depends::default(),
            };
            all.push(node.operands().fold(own, |d, x| d.and(all[x.index()])));
        }
        all
    }

    /// Returns the trace with all defaults of scalars set to 0. Equal traces then have equal texts.
    #[must_use]
    pub fn without_defaults(&self) -> Trace {
        let mut trace = self.clone();
        trace.params.iter_mut().for_each(|p| p.default = p.default.map(|_| 0.0));
        trace
    }

    /// Renames a parameter.
    ///
    /// # Errors
    /// Fails if the name `to` is invalid, or if another parameter has it.
    pub fn rename(&self, from: &str, to: &str) -> Result<Trace, ExprErrors> {
        let mut renamed = self.clone();
        let clash = self.find(to).is_some() && self.find(from).is_some() && from != to;
        for p in renamed.params.iter_mut().filter(|p| p.name == from) {
            to.clone_into(&mut p.name);
            p.check().map_err(|e| ExprErrors(vec![e]))?;
        }
        if clash { Err(ExprErrors(vec![ExprError::Redeclared { name: to.to_owned() }])) } else { Ok(renamed.with_hash()) }
    }

    /// Returns whether some value is the index along an axis.
    pub fn uses_index(&self, axis: Axis) -> bool {
        self.nodes.contains(&Node::Index(axis))
    }

    /// Returns whether some value is the extent of an axis.
    pub fn uses_extent(&self, axis: Axis) -> bool {
        self.nodes.contains(&Node::Extent(axis))
    }
}
