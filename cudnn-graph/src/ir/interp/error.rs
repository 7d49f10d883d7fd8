//! What can be wrong with inputs, and what has no definition.

use crate::ir::tensor::TensorId;

/// Why a graph could not be interpreted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InterpError {
    /// Everything that is wrong with the inputs.
    #[error("{}", lines(.0))]
    Bindings(Vec<BindingError>),
    /// The result of a view has an element where its input has none in memory.
    #[error("{at}: the view puts an element at memory offset {offset}, where its input has none")]
    View {
        /// The op.
        at: String,
        /// Elements from the base address.
        offset: i64,
    },
    /// A page table names a page that the container does not have.
    #[error("{at}: page {page} of batch entry {batch} is block {block}, of {blocks}")]
    Page {
        /// The op.
        at: String,
        /// Batch entry.
        batch: i64,
        /// Column of the page table.
        page: i64,
        /// The number of the block that stands there.
        block: i64,
        /// Number of blocks of the container.
        blocks: i64,
    },
    /// There is no definition of this here.
    #[error("{at}: {what} is not defined here")]
    NotDefined {
        /// The op.
        at: String,
        /// The operand without a definition.
        what: &'static str,
    },
    /// A tensor without a value is read. Verified graphs with complete inputs do not get here.
    #[error("{at}: {tensor} has no value")]
    NoValue {
        /// The op.
        at: String,
        /// The tensor.
        tensor: TensorId,
    },
}

/// One thing that is wrong with the inputs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BindingError {
    /// An input has no value.
    #[error("{tensor} {name:?} has no value")]
    Missing {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
    },
    /// The result of a random number generator has no value: its bits are the library's own.
    #[error("{tensor} {name:?} holds random numbers, which the caller gives: {at}")]
    RandomBits {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
        /// The op.
        at: String,
    },
    /// Dropout that does not dump its random numbers: there is no tensor to give them by.
    #[error("dropout needs an rng_dump, by which the caller gives its random numbers: {at}")]
    HiddenRandomBits {
        /// The op.
        at: String,
    },
    /// A value for a tensor that takes none: a result, or a number that the graph supplies.
    #[error("{tensor} {name:?} is no input")]
    NotAnInput {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
    },
    /// A value for a tensor of another graph.
    #[error("{tensor} is no tensor of this graph")]
    Unknown {
        /// The tensor.
        tensor: TensorId,
    },
    /// The extents differ.
    #[error("{tensor} {name:?} is {want:?}, its value {got:?}")]
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
    /// Not as many elements as the extents say.
    #[error("{tensor} {name:?} has {want} elements, its value {got}")]
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
    /// An element that an integer or a bool cannot be.
    #[error("element {index} of {tensor} {name:?} is {value}")]
    Element {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
        /// Place of the first such element.
        index: usize,
        /// The element.
        value: f64,
    },
    /// A result too large to be computed here.
    #[error("{tensor} {name:?} has more than {limit} elements")]
    TooLarge {
        /// The tensor.
        tensor: TensorId,
        /// Its name.
        name: String,
        /// The most elements that are computed here.
        limit: i64,
    },
    /// An attention with more scores than can be computed here.
    #[error("more than {limit} scores: {at}")]
    HiddenTooLarge {
        /// The op.
        at: String,
        /// The most scores that are computed here.
        limit: i64,
    },
}

fn lines(errors: &[BindingError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
