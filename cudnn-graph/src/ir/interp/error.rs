//! Errors of inputs, and ops without a definition.

use crate::ir::tensor::TensorId;

/// Why a graph could not be interpreted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InterpError {
    /// The inputs have mistakes, all of which are listed.
    #[error("{}", lines(.0))]
    Bindings(Vec<BindingError>),
    /// A view maps an element of the result to an offset at which its input has no element.
    #[error("{at}: the view reads memory offset {offset}, where the input has no element")]
    View {
        /// The op that cannot be interpreted, in the form of printed graphs.
        at: String,
        /// The offset without an element, in elements from the base address.
        offset: i64,
    },
    /// A page table refers to a page outside the pool.
    #[error(
        "{at}: page table, batch entry {batch}, entry {page}: got page {block}, expected at least 0 and below {blocks}, the number of pages"
    )]
    Page {
        /// The op that cannot be interpreted, in the form of printed graphs.
        at: String,
        /// The batch entry whose page is outside the pool.
        batch: i64,
        /// The column of the page table.
        page: i64,
        /// The page number in the page table.
        block: i64,
        /// Number of pages in the pool.
        blocks: i64,
    },
    /// The interpreter has no definition of this op or of one of its options.
    #[error("{at}: the interpreter does not support {what}")]
    NotDefined {
        /// The op that cannot be interpreted, in the form of printed graphs.
        at: String,
        /// The operand or option of the op that the interpreter does not define.
        what: &'static str,
    },
    /// An op reads a tensor that has no value. This cannot happen for verified graphs with complete inputs.
    #[error("{at}: {tensor} is read but has no value; pass it as an input")]
    NoValue {
        /// The op that cannot be interpreted, in the form of printed graphs.
        at: String,
        /// The tensor without a value.
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
        /// The input without a value.
        tensor: TensorId,
        /// The name of the tensor.
        name: String,
    },
    /// The result of a random number generator has no value. Random bits depend on the library, so the caller must pass them.
    #[error("{at}: {tensor} {name:?} holds random numbers, which the interpreter cannot generate; pass its value as an input")]
    RandomBits {
        /// The tensor that the random number generator writes.
        tensor: TensorId,
        /// The name of the tensor.
        name: String,
        /// The op that generates the random numbers, as printed.
        at: String,
    },
    /// The dropout op does not output its random numbers, so the caller cannot pass them.
    #[error(
        "{at}: dropout has no rng_dump, and the interpreter cannot generate its random numbers; add an rng_dump and pass its value as an input"
    )]
    HiddenRandomBits {
        /// The op that cannot be interpreted, in the form of printed graphs.
        at: String,
    },
    /// A value was passed for a tensor that needs none: a result, or a scalar that the graph supplies.
    #[error("{tensor} {name:?} is not an input of the graph")]
    NotAnInput {
        /// The tensor for which the value was passed.
        tensor: TensorId,
        /// The name of the tensor.
        name: String,
    },
    /// A value was passed for a tensor that is not in this graph.
    #[error("{tensor} is not a tensor of this graph")]
    Unknown {
        /// The id that is not in this graph.
        tensor: TensorId,
    },
    /// The extents of the value differ from those of the tensor.
    #[error("{tensor} {name:?}: got a value with extents {got:?}, expected {want:?}")]
    Extents {
        /// The tensor for which the value was passed.
        tensor: TensorId,
        /// The name of the tensor.
        name: String,
        /// Extents of the tensor.
        want: Vec<i64>,
        /// Extents of the value.
        got: Vec<i64>,
    },
    /// The number of elements of the value differs from the product of its extents.
    #[error("{tensor} {name:?}: got a value of {got} elements, expected {want}")]
    Elements {
        /// The tensor for which the value was passed.
        tensor: TensorId,
        /// The name of the tensor.
        name: String,
        /// The number of elements of the tensor.
        want: i64,
        /// The number of elements of the value.
        got: usize,
    },
    /// An element of the value is not a valid integer or boolean.
    #[error("element {index} of {tensor} {name:?}: got {value}, expected an element of the tensor's type")]
    Element {
        /// The tensor for which the value was passed.
        tensor: TensorId,
        /// The name of the tensor.
        name: String,
        /// The row-major index of the first invalid element.
        index: usize,
        /// The value of that element.
        value: f64,
    },
    /// A result has more elements than the interpreter computes.
    #[error("{tensor} {name:?} has more than {limit} elements, the limit of the interpreter")]
    TooLarge {
        /// The tensor with too many elements.
        tensor: TensorId,
        /// The name of the tensor.
        name: String,
        /// The largest number of elements that the interpreter computes.
        limit: i64,
    },
    /// An attention op has more scores than the interpreter computes.
    #[error("{at}: the attention has more than {limit} scores, the limit of the interpreter")]
    HiddenTooLarge {
        /// The op that cannot be interpreted, in the form of printed graphs.
        at: String,
        /// The largest number of scores that the interpreter computes.
        limit: i64,
    },
}

fn lines(errors: &[BindingError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
