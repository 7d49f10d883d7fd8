//! Errors of inputs, and ops without a definition.

use crate::ir::tensor::TensorId;

/// Why a graph could not be interpreted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InterpError {
    /// Every mistake in the inputs.
    #[error("{}", lines(.0))]
    Bindings(Vec<BindingError>),
    /// The result of a view has an element where its input has none in memory.
    #[error("{at}: the view puts an element at memory offset {offset}, where its input has none")]
    View {
        /// The op.
        at: String,
        /// Offset in elements from the base address.
        offset: i64,
    },
    /// A page table refers to a page outside the pool.
    #[error("{at}: page {page} of batch entry {batch}: got block {block}, expected a block below {blocks}")]
    Page {
        /// The op.
        at: String,
        /// Batch entry.
        batch: i64,
        /// Column of the page table.
        page: i64,
        /// The page number in the table.
        block: i64,
        /// Number of pages in the pool.
        blocks: i64,
    },
    /// The interpreter does not define this.
    #[error("{at}: the interpreter does not support {what}")]
    NotDefined {
        /// The op.
        at: String,
        /// The operand without a definition.
        what: &'static str,
    },
    /// A tensor without a value is read. Verified graphs with complete inputs do not get here.
    #[error("{at}: {tensor} is read but has no value; pass it as an input")]
    NoValue {
        /// The op.
        at: String,
        /// The tensor.
        tensor: TensorId,
    },
}

/// A mistake in an input.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BindingError {
    /// An input has no value.
    #[error("{tensor} {name:?} has no value; pass it as an input")]
    Missing {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
    },
    /// The result of a random number generator has no value. Its bits are specific to the library, so the caller must pass them.
    #[error("{at}: {tensor} {name:?} holds random numbers, which the interpreter cannot generate; pass its value as an input")]
    RandomBits {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
        /// The op.
        at: String,
    },
    /// Dropout does not output its random numbers, so the caller cannot pass them.
    #[error(
        "{at}: dropout has no rng_dump, and the interpreter cannot generate its random numbers; add an rng_dump and pass its value as an input"
    )]
    HiddenRandomBits {
        /// The op.
        at: String,
    },
    /// A value for a tensor that takes none: a result, or a scalar that the graph supplies.
    #[error("{tensor} {name:?} is not an input of the graph")]
    NotAnInput {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
    },
    /// A value for a tensor of another graph.
    #[error("{tensor} is not a tensor of this graph")]
    Unknown {
        /// The tensor.
        tensor: TensorId,
    },
    /// The extents differ.
    #[error("{tensor} {name:?}: got a value with extents {got:?}, expected {want:?}")]
    Extents {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
        /// Extents of the tensor.
        want: Vec<i64>,
        /// Extents of the value.
        got: Vec<i64>,
    },
    /// The number of elements differs from the extents.
    #[error("{tensor} {name:?}: got a value of {got} elements, expected {want}")]
    Elements {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
        /// Elements of the tensor.
        want: i64,
        /// Elements of the value.
        got: usize,
    },
    /// An element is not a valid integer or boolean.
    #[error("element {index} of {tensor} {name:?}: got {value}, expected an element of the tensor's type")]
    Element {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
        /// Position of the first such element.
        index: usize,
        /// The element.
        value: f64,
    },
    /// A result is too large to be computed here.
    #[error("{tensor} {name:?} has more than {limit} elements, the limit of the interpreter")]
    TooLarge {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
        /// The largest number of elements that is computed here.
        limit: i64,
    },
    /// An attention has more scores than can be computed here.
    #[error("{at}: more than {limit} scores, the limit of the interpreter")]
    HiddenTooLarge {
        /// The op.
        at: String,
        /// The largest number of scores that is computed here.
        limit: i64,
    },
}

fn lines(errors: &[BindingError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
