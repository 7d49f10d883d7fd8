//! Builds traces. Equal values are shared, and functions of constants are folded.

use super::eval;
use super::node::{Axis, Binary, Const, Kind, Node, NodeId, ParamId, Type, Unary};
use super::params::{Axes, Declared, ParamKind};
use super::trace::{ExprError, Trace};
use crate::dtype::DType;
use std::collections::HashMap;

/// A trace under construction, for programs that make traces value by value. [`Trace::of_score`] and similar functions trace closures.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    nodes: Vec<Node>,
    types: Vec<Type>,
    places: HashMap<Node, NodeId>,
    params: Vec<Declared>,
    errors: Vec<ExprError>,
}

/// Replacements for the inputs of a trace while it is copied into another trace.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inputs {
    /// The value that replaces [`Node::Score`] in the copy; `None` keeps the node.
    pub score: Option<NodeId>,
    /// The value that replaces [`Node::Upstream`] in the copy; `None` keeps the node.
    pub upstream: Option<NodeId>,
    /// Constants that replace [`Node::Extent`], (batch, heads_q, seq_q, seq_kv). Indices along axes of extent 1 then become 0. `None`
    /// keeps extents and indices.
    pub extents: Option<[i64; 4]>,
    /// Constants that are added to the indices (batch, head, q, k) in the copy.
    pub origin: [i64; 4],
    /// Values that replace the indices (batch, head, q, k), for each axis that has one. `origin` and the extent do not apply to such an axis.
    pub indices: [Option<NodeId>; 4],
}

impl Builder {
    /// Creates an empty builder.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Returns the type of a value.
    pub fn ty(&self, id: NodeId) -> Type {
        self.types[id.index()]
    }

    /// Returns the node of a value.
    pub fn node(&self, id: NodeId) -> Node {
        self.nodes[id.index()]
    }

    /// Returns all values that the trace has so far.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the constant that a value is; `None` if it is not a constant.
    pub fn constant(&self, id: NodeId) -> Option<Const> {
        match self.node(id) {
            Node::Const(c) => Some(c),
            Node::Score
            | Node::Upstream
            | Node::Index(_)
            | Node::Extent(_)
            | Node::Param(_)
            | Node::Read(..)
            | Node::Unary(..)
            | Node::Binary(..)
            | Node::Select(..) => None,
        }
    }

    fn push(&mut self, node: Node, ty: Type) -> NodeId {
        if let Some(&id) = self.places.get(&node) {
            return id;
        }
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(node);
        self.types.push(ty);
        self.places.insert(node, id);
        id
    }

    /// Returns the input value for the score that the function modifies, f32.
    pub fn score(&mut self) -> NodeId {
        self.push(Node::Score, Type::F32)
    }

    /// Returns the upstream gradient, f32.
    pub fn upstream(&mut self) -> NodeId {
        self.push(Node::Upstream, Type::F32)
    }

    /// Returns the index along an axis, i32.
    pub fn index(&mut self, axis: Axis) -> NodeId {
        self.push(Node::Index(axis), Type::I32)
    }

    /// Returns the extent of an axis, i32.
    pub fn extent(&mut self, axis: Axis) -> NodeId {
        self.push(Node::Extent(axis), Type::I32)
    }

    /// Returns a constant.
    pub fn konst(&mut self, value: Const) -> NodeId {
        self.push(Node::Const(value), value.ty())
    }

    /// Returns an f32 constant.
    pub fn f32(&mut self, value: f32) -> NodeId {
        self.konst(Const::f32(value))
    }

    /// Declares a parameter and reads it. Reuses an equal declaration. [`Builder::finish`] reports a declaration that breaks a rule.
    pub fn param(&mut self, declared: Declared) -> NodeId {
        let ty = declared.kind.ty();
        let param = self.declare(declared);
        self.push(Node::Param(param), ty)
    }

    /// Declares a parameter without reading it. Otherwise it behaves like [`Builder::param`].
    pub fn declare(&mut self, declared: Declared) -> ParamId {
        if let Err(error) = declared.check() {
            self.errors.push(error);
        }
        let place = match self.params.iter().position(|p| p.name == declared.name) {
            Some(place) => {
                let before = &self.params[place];
                if before.kind != declared.kind || before.default.map(f32::to_bits) != declared.default.map(f32::to_bits) {
                    self.errors.push(ExprError::Redeclared { name: declared.name });
                }
                place
            }
            None => {
                self.params.push(declared);
                self.params.len() - 1
            }
        };
        ParamId(place as u32)
    }

    /// Declares a table, a tensor with its own extents. [`Builder::finish`] reports extents that break a rule.
    pub fn table(&mut self, name: &str, extents: &[i64], dtype: DType) -> ParamId {
        let axes = Axes::table(extents).unwrap_or_else(|rule| {
            self.errors.push(ExprError::Extents { name: name.to_owned(), rule: rule.to_owned() });
            Axes::NONE
        });
        self.declare(Declared { name: name.to_owned(), kind: ParamKind::Tensor { axes, dtype }, default: None })
    }

    /// Returns the element of a table at `place`, an i32 position in memory order. Positions outside the table are clamped to it.
    pub fn read(&mut self, table: ParamId, place: NodeId) -> NodeId {
        let ty = self.params[table.index()].kind.ty();
        self.push(Node::Read(table, place), ty)
    }

    /// Iterates over the reads of tables so far. Yields for each the index of its parameter, the position and the value that was read.
    pub(crate) fn reads(&self) -> impl Iterator<Item = (usize, NodeId, NodeId)> {
        self.nodes
            .iter()
            .enumerate()
            .filter_map(|(n, node)| if let Node::Read(p, place) = *node { Some((p.index(), place, NodeId(n as u32))) } else { None })
    }

    /// Returns the element of a table at one i32 index per extent. Each index is clamped to its extent. A single index is a position in
    /// memory order, as for [`Builder::read`]. [`Builder::finish`] reports a wrong number of indices.
    pub fn read_at(&mut self, table: ParamId, indices: &[NodeId]) -> NodeId {
        let Declared { name, kind, .. } = &self.params[table.index()];
        let extents: Vec<i64> = kind.extents().collect();
        if let [place] = *indices {
            return self.read(table, place);
        }
        if indices.len() != extents.len() {
            self.errors.push(ExprError::Indices { name: name.clone(), given: indices.len(), extents: extents.len() });
        }
        let zero = self.konst(Const::I32(0));
        let mut place = None;
        for (&index, extent) in indices.iter().zip(extents) {
            let last = self.konst(Const::I32(extent as i32 - 1));
            let index = self.binary(Binary::Max, index, zero);
            let index = self.binary(Binary::Min, index, last);
            place = Some(place.map_or(index, |outer| {
                let extent = self.konst(Const::I32(extent as i32));
                let outer = self.binary(Binary::Mul, outer, extent);
                self.binary(Binary::Add, outer, index)
            }));
        }
        self.read(table, place.unwrap_or(zero))
    }

    /// Applies a function to one value, and returns the result.
    pub fn unary(&mut self, f: Unary, x: NodeId) -> NodeId {
        let ty = match f.kind() {
            Kind::Number | Kind::Real | Kind::Compare | Kind::Logic => self.ty(x),
            Kind::Cast(_, to) => to,
        };
        if let Some(c) = self.constant(x) {
            let value = eval::unary(f, self.ty(x), ty, c.to_f64(), eval::Precision::F32);
            return self.konst(Const::from_f64(ty, value));
        }
        self.push(Node::Unary(f, x), ty)
    }

    /// Applies a function to two values of one type, and returns the result.
    pub fn binary(&mut self, f: Binary, x: NodeId, y: NodeId) -> NodeId {
        let operands = self.ty(x);
        let ty = match f.kind() {
            Kind::Number | Kind::Real => operands,
            Kind::Compare | Kind::Logic => Type::Bool,
            Kind::Cast(_, to) => to,
        };
        if let (Some(a), Some(b)) = (self.constant(x), self.constant(y)) {
            let value = eval::binary(f, operands, a.to_f64(), b.to_f64(), eval::Precision::F32);
            return self.konst(Const::from_f64(ty, value));
        }
        match (f, self.constant(x), self.constant(y)) {
            (Binary::And, Some(Const::Bool(true)), _) | (Binary::Or, Some(Const::Bool(false)), _) => y,
            (Binary::And, _, Some(Const::Bool(true))) | (Binary::Or, _, Some(Const::Bool(false))) => x,
            (Binary::And, Some(_), _) | (Binary::Or, Some(_), _) => x,
            (Binary::And, _, Some(_)) | (Binary::Or, _, Some(_)) => y,
            _ => self.push(Node::Binary(f, x, y), ty),
        }
    }

    /// Returns `x` where `condition` holds, else `y`.
    pub fn select(&mut self, condition: NodeId, x: NodeId, y: NodeId) -> NodeId {
        match self.constant(condition) {
            Some(c) if c.to_f64() != 0.0 => x,
            Some(_) => y,
            None if x == y => x,
            None => self.push(Node::Select(condition, x, y), self.ty(x)),
        }
    }

    /// Copies a trace into this builder, with `inputs` in place of its inputs. Returns the copies of its roots (outputs). Parameters of
    /// one name must have equal declarations.
    pub fn inline(&mut self, trace: &Trace, inputs: Inputs) -> Vec<NodeId> {
        let here = self.values(trace, inputs);
        trace.roots().iter().map(|root| here[root.index()]).collect()
    }

    /// Copies a trace into this builder, and returns the copy of each of its values.
    pub fn copy(&mut self, trace: &Trace) -> Vec<NodeId> {
        self.values(trace, Inputs::default())
    }

    fn values(&mut self, trace: &Trace, inputs: Inputs) -> Vec<NodeId> {
        let mut here: Vec<NodeId> = Vec::with_capacity(trace.nodes().len());
        for &node in trace.nodes() {
            let id = match node {
                Node::Score => inputs.score.unwrap_or_else(|| self.score()),
                Node::Upstream => inputs.upstream.unwrap_or_else(|| self.upstream()),
                Node::Index(axis) => {
                    let origin = inputs.origin[axis.place()] as i32;
                    if let Some(value) = inputs.indices[axis.place()] {
                        value
                    // An axis of extent 1 has only the index 0.
                    } else if inputs.extents.is_some_and(|extents| extents[axis.place()] == 1) {
                        self.konst(Const::I32(origin))
                    } else {
                        let index = self.index(axis);
                        if origin == 0 {
                            index
                        } else {
                            let origin = self.konst(Const::I32(origin));
                            self.binary(Binary::Add, index, origin)
                        }
                    }
                }
                Node::Extent(axis) => match inputs.extents {
                    Some(extents) => self.konst(Const::I32(extents[axis.place()] as i32)),
                    None => self.extent(axis),
                },
                Node::Const(c) => self.konst(c),
                Node::Param(p) => self.param(trace.params()[p.index()].clone()),
                Node::Read(p, x) => {
                    let table = self.declare(trace.params()[p.index()].clone());
                    self.read(table, here[x.index()])
                }
                Node::Unary(f, x) => self.unary(f, here[x.index()]),
                Node::Binary(f, x, y) => self.binary(f, here[x.index()], here[y.index()]),
                Node::Select(c, x, y) => self.select(here[c.index()], here[x.index()], here[y.index()]),
            };
            here.push(id);
        }
        here
    }

    /// Returns the value of the `n`th declared parameter.
    pub fn param_at(&mut self, n: usize) -> NodeId {
        let ty = self.params[n].kind.ty();
        self.push(Node::Param(ParamId(n as u32)), ty)
    }

    /// Returns the parameters declared so far.
    pub fn params(&self) -> &[Declared] {
        &self.params
    }

    /// Returns the finished trace with these roots (outputs). It drops values that no root needs, and puts the others in canonical order.
    ///
    /// # Errors
    /// Returns every declaration that broke a rule.
    pub fn finish(self, roots: &[NodeId]) -> Result<Trace, Vec<ExprError>> {
        if self.errors.is_empty() { Ok(Trace::canonical(&self.nodes, &self.types, &self.params, roots)) } else { Err(self.errors) }
    }
}

impl Declared {
    /// Creates the declaration of a scalar with its default value.
    pub fn scalar(name: &str, default: f32) -> Declared {
        Declared { name: name.to_owned(), kind: ParamKind::Scalar, default: Some(default) }
    }

    pub(super) fn check(&self) -> Result<(), ExprError> {
        let mut letters = self.name.chars();
        let word = letters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
            && letters.all(|c| c.is_ascii_alphanumeric() || c == '_')
            && self.name.len() <= 64;
        if !word || super::text::reserved(&self.name) {
            return Err(ExprError::Name { name: self.name.clone() });
        }
        match self.kind {
            ParamKind::Scalar if self.default.is_none_or(f32::is_nan) => Err(ExprError::Default { name: self.name.clone() }),
            ParamKind::Tensor { .. } | ParamKind::Scalar => Ok(()),
        }
    }
}
