//! Codes of the backend API, from its public header (9.27.0), each with the version that introduced it.
//!
//! Integer newtypes instead of Rust enums: a code that a newer library returns must be representable.

use crate::version::Version;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A code in JSON.
#[derive(Deserialize)]
#[serde(untagged)]
enum Named {
    Number(i32),
    Text(String),
}

macro_rules! codes {
    ($(#[$doc:meta])* $t:ident: $repr:ty { $($name:ident = $value:literal $(since $major:literal . $minor:literal)?;)* }) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $t(pub $repr);

        #[allow(missing_docs, reason = "the names are those of NVIDIA's documentation")]
        impl $t {
            $(pub const $name: $t = $t($value);)*

            /// Every code that this crate knows.
            pub const ALL: &'static [$t] = &[$($t::$name,)*];
        }

        impl $t {
            /// Returns NVIDIA's name of the code without its prefix; `None` for an unknown code.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// Returns the cuDNN version that introduced the code; 9.0 if the header names none.
            pub fn since(self) -> Version {
                match self.0 {
                    $($value => since!($($major . $minor)?),)*
                    _ => Version::OLDEST,
                }
            }
        }

        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{} {}", stringify!($t), self.0),
                }
            }
        }

        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $t {
            /// Reads a name, or the number of a code that this crate does not know.
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<$t, D::Error> {
                let text = match Named::deserialize(from)? {
                    Named::Number(code) => return Ok($t(code)),
                    Named::Text(text) => text,
                };
                let unknown = || text.strip_prefix(stringify!($t))?.trim().parse().ok().map($t);
                let known = $t::ALL.iter().copied().find(|code| code.name() == Some(text.as_str()));
                known.or_else(unknown).ok_or_else(|| D::Error::custom(format!("{text:?} is no {}", stringify!($t))))
            }
        }
    };
}

macro_rules! since {
    () => {
        Version::OLDEST
    };
    ($major:literal . $minor:literal) => {
        Version::new($major, $minor, 0)
    };
}

codes! {
    /// The status of a call into cuDNN (`cudnnStatus_t`).
    Status: i32 {
        SUCCESS = 0;
        NOT_INITIALIZED = 1001;
        SUBLIBRARY_VERSION_MISMATCH = 1002;
        SERIALIZATION_VERSION_MISMATCH = 1003;
        DEPRECATED = 1004;
        LICENSE_ERROR = 1005;
        RUNTIME_IN_PROGRESS = 1006;
        RUNTIME_FP_OVERFLOW = 1007;
        SUBLIBRARY_LOADING_FAILED = 1008 since 9 . 2;
        BAD_PARAM = 2000;
        BAD_PARAM_NULL_POINTER = 2002;
        BAD_PARAM_MISALIGNED_POINTER = 2003;
        BAD_PARAM_NOT_FINALIZED = 2004;
        BAD_PARAM_OUT_OF_BOUND = 2005;
        BAD_PARAM_SIZE_INSUFFICIENT = 2006;
        BAD_PARAM_STREAM_MISMATCH = 2007;
        BAD_PARAM_SHAPE_MISMATCH = 2008;
        BAD_PARAM_DUPLICATED_ENTRIES = 2009;
        BAD_PARAM_ATTRIBUTE_TYPE = 2010;
        BAD_PARAM_CUDA_GRAPH_MISMATCH = 2011 since 9 . 5;
        BAD_PARAM_DESCRIPTOR_TYPE = 2012 since 9 . 6;
        NOT_SUPPORTED = 3000;
        NOT_SUPPORTED_GRAPH_PATTERN = 3001;
        NOT_SUPPORTED_SHAPE = 3002;
        NOT_SUPPORTED_DATA_TYPE = 3003;
        NOT_SUPPORTED_LAYOUT = 3004;
        NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER = 3005;
        NOT_SUPPORTED_INCOMPATIBLE_CUDART = 3006;
        NOT_SUPPORTED_ARCH_MISMATCH = 3007;
        NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING = 3008;
        NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE = 3009;
        NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT = 3010;
        NOT_SUPPORTED_PADDING = 3011;
        NOT_SUPPORTED_BAD_LAUNCH_PARAM = 3012;
        NOT_SUPPORTED_CUDA_GRAPH_NATIVE_API = 3013 since 9 . 5;
        NOT_SUPPORTED_INVALID_DYNAMIC_SHAPE = 3014 since 9 . 18;
        INTERNAL_ERROR = 4000;
        INTERNAL_ERROR_COMPILATION_FAILED = 4001;
        INTERNAL_ERROR_UNEXPECTED_VALUE = 4002;
        INTERNAL_ERROR_HOST_ALLOCATION_FAILED = 4003;
        INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004;
        INTERNAL_ERROR_BAD_LAUNCH_PARAM = 4005;
        INTERNAL_ERROR_TEXTURE_CREATION_FAILED = 4006;
        EXECUTION_FAILED = 5000;
        EXECUTION_FAILED_CUDA_DRIVER = 5001;
        EXECUTION_FAILED_CUBLAS = 5002;
        EXECUTION_FAILED_CUDART = 5003;
        EXECUTION_FAILED_CURAND = 5004;
    }
}

impl Status {
    /// Returns whether the status means "not supported": another engine, graph pattern or executor may work.
    pub fn is_unsupported(self) -> bool {
        (3000..4000).contains(&self.0)
    }

    /// Returns whether the status means that the device or its driver failed irrecoverably.
    pub fn is_execution(self) -> bool {
        (5000..6000).contains(&self.0)
    }

    /// Returns whether the status means that memory ran out, so that no other engine would help.
    pub fn is_out_of_memory(self) -> bool {
        self == Status::INTERNAL_ERROR_HOST_ALLOCATION_FAILED || self == Status::INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    }
}

codes! {
    /// Kinds of backend descriptors (`cudnnBackendDescriptorType_t`).
    Kind: i32 {
        POINTWISE = 0;
        CONVOLUTION = 1;
        ENGINE = 2;
        ENGINECFG = 3;
        ENGINEHEUR = 4;
        EXECUTION_PLAN = 5;
        KNOB_CHOICE = 7;
        OPERATION_CONVOLUTION_FORWARD = 10;
        OPERATION_CONVOLUTION_BACKWARD_FILTER = 11;
        OPERATION_CONVOLUTION_BACKWARD_DATA = 12;
        OPERATION_POINTWISE = 13;
        OPERATION_GEN_STATS = 14;
        OPERATIONGRAPH = 15;
        VARIANT_PACK = 16;
        TENSOR = 17;
        MATMUL = 18;
        OPERATION_MATMUL = 19;
        OPERATION_BN_FINALIZE_STATISTICS = 20;
        REDUCTION = 21;
        OPERATION_REDUCTION = 22;
        OPERATION_BN_BWD_WEIGHTS = 23;
        RESAMPLE = 24;
        OPERATION_RESAMPLE_FWD = 25;
        OPERATION_RESAMPLE_BWD = 26;
        OPERATION_CONCAT = 27;
        OPERATION_NORM_FORWARD = 29;
        OPERATION_NORM_BACKWARD = 30;
        OPERATION_RESHAPE = 31;
        RNG = 32;
        OPERATION_RNG = 33;
        KERNEL_CACHE = 34 since 9 . 4;
        OPERATION_PAGED_CACHE_LOAD = 35 since 9 . 4;
        OPERATION_BLOCK_SCALE_QUANTIZE = 36 since 9 . 7;
        OPERATION_BLOCK_SCALE_DEQUANTIZE = 37 since 9 . 7;
        DEVICEPROP = 38 since 9 . 8;
        OPERATION_SDPA_FWD = 41 since 9 . 13;
        OPERATION_MOE_GROUPED_MATMUL = 42 since 9 . 15;
        OPERATION_SDPA_BWD = 43 since 9 . 17;
        OPERATION_DIAGONAL_BAND_MASK = 44 since 9 . 20;
        OPERATION_SOFTMAX = 45 since 9 . 20;
        OPERATION_TRANSPOSE = 46 since 9 . 22;
        OPERATION_SLICE = 47 since 9 . 22;
        OPERATION_MOE_GROUPED_MATMUL_BWD = 48 since 9 . 22;
        OPERATION_ROPE_FWD = 49 since 9 . 24;
        OPERATION_ROPE_BWD = 50 since 9 . 25;
    }
}

mod attribute;
pub use attribute::Attribute;

codes! {
    /// The type of an attribute's elements (`cudnnBackendAttributeType_t`).
    AttributeType: i32 {
        HANDLE = 0;
        DATA_TYPE = 1;
        BOOLEAN = 2;
        INT64 = 3;
        FLOAT = 4;
        DOUBLE = 5;
        VOID_PTR = 6;
        CONVOLUTION_MODE = 7;
        HEUR_MODE = 8;
        KNOB_TYPE = 9;
        NUMERICAL_NOTE = 11;
        POINTWISE_MODE = 14;
        BACKEND_DESCRIPTOR = 15;
        GENSTATS_MODE = 16;
        BN_FINALIZE_STATS_MODE = 17;
        REDUCTION_OPERATOR_TYPE = 18;
        BEHAVIOR_NOTE = 19;
        TENSOR_REORDERING_MODE = 20;
        RESAMPLE_MODE = 21;
        PADDING_MODE = 22;
        INT32 = 23;
        CHAR = 24;
        FRACTION = 26;
        NORM_MODE = 27;
        NORM_FWD_PHASE = 28;
        RNG_DISTRIBUTION = 29;
        MOE_GROUPED_MATMUL_MODE = 30 since 9 . 15;
        RESHAPE_MODE = 31 since 9 . 22;
    }
}

codes! {
    /// Element types (`cudnnDataType_t`).
    DataType: i32 {
        FLOAT = 0;
        DOUBLE = 1;
        HALF = 2;
        INT8 = 3;
        INT32 = 4;
        UINT8 = 6;
        BFLOAT16 = 9;
        INT64 = 10;
        BOOLEAN = 11;
        FP8_E4M3 = 12;
        FP8_E5M2 = 13;
        FP8_E8M0 = 15 since 9 . 7;
        FP4_E2M1 = 16 since 9 . 7;
        INT4 = 17 since 9 . 11;
        UINT4 = 18 since 9 . 11;
    }
}

codes! {
    /// Pointwise functions (`cudnnPointwiseMode_t`).
    PointwiseMode: i32 {
        ADD = 0; MUL = 1; MIN = 2; MAX = 3; SQRT = 4; ADD_SQUARE = 5; DIV = 6; MOD = 7; POW = 8; SUB = 9; ABS = 10;
        CEIL = 11; COS = 12; EXP = 13; FLOOR = 14; LOG = 15; NEG = 16; RSQRT = 17; SIN = 18; TAN = 19; ERF = 20;
        IDENTITY = 21; RECIPROCAL = 22;
        ATAN2 = 23 since 9 . 1;
        FLOOR_MOD = 24 since 9 . 27;
        RELU_FWD = 100; TANH_FWD = 101; SIGMOID_FWD = 102; ELU_FWD = 103; GELU_FWD = 104; SOFTPLUS_FWD = 105;
        SWISH_FWD = 106; GELU_APPROX_TANH_FWD = 107;
        RELU_BWD = 200; TANH_BWD = 201; SIGMOID_BWD = 202; ELU_BWD = 203; GELU_BWD = 204; SOFTPLUS_BWD = 205;
        SWISH_BWD = 206; GELU_APPROX_TANH_BWD = 207;
        CMP_EQ = 300; CMP_NEQ = 301; CMP_GT = 302; CMP_GE = 303; CMP_LT = 304; CMP_LE = 305;
        LOGICAL_AND = 400; LOGICAL_OR = 401; LOGICAL_NOT = 402;
        GEN_INDEX = 501;
        BINARY_SELECT = 601;
    }
}

codes! {
    /// Reductions (`cudnnReduceTensorOp_t`).
    ReductionOperator: i32 {
        ADD = 0; MUL = 1; MIN = 2; MAX = 3; AMAX = 4; AVG = 5; NORM1 = 6; NORM2 = 7; MUL_NO_ZEROS = 8;
    }
}

codes! {
    /// Orientations of a filter (`cudnnConvolutionMode_t`).
    ConvolutionMode: i32 { CONVOLUTION = 0; CROSS_CORRELATION = 1; }
}

codes! {
    /// Axes of a norm (`cudnnBackendNormMode_t`).
    NormMode: i32 { LAYER_NORM = 0; INSTANCE_NORM = 1; BATCH_NORM = 2; GROUP_NORM = 3; RMS_NORM = 4; ADA_LAYER_NORM = 5 since 9 . 7; }
}

codes! {
    /// Phases of a norm (`cudnnBackendNormFwdPhase_t`).
    NormPhase: i32 { INFERENCE = 0; TRAINING = 1; }
}

codes! {
    /// Statistics per channel (`cudnnGenStatsMode_t`).
    GenStatsMode: i32 { SUM_SQSUM = 0; }
}

codes! {
    /// Phases of the last step of batch norm (`cudnnBnFinalizeStatsMode_t`).
    BnFinalizeMode: i32 { TRAINING = 0; INFERENCE = 1; }
}

codes! {
    /// Values that are computed from a window (`cudnnResampleMode_t`).
    ResampleMode: i32 { NEAREST = 0; BILINEAR = 1; AVGPOOL_INCLUDE_PADDING = 2; MAXPOOL = 3; AVGPOOL_EXCLUDE_PADDING = 4; }
}

codes! {
    /// Values of padded elements (`cudnnPaddingMode_t`).
    PaddingMode: i32 { ZERO_PAD = 0; NEG_INF_PAD = 1; EDGE_VAL_PAD = 2; }
}

codes! {
    /// Orders of rows in a grouped matrix product (`cudnnMoeGroupedMatmulMode_t`).
    MoeMode: i32 { NONE = 0 since 9 . 15; GATHER = 1 since 9 . 15; SCATTER = 2 since 9 . 15; }
}

codes! {
    /// Random distributions (`cudnnRngDistribution_t`).
    RngDistribution: i32 { BERNOULLI = 0; UNIFORM = 1; NORMAL = 2; }
}

codes! {
    /// Orders of a tensor's elements in memory beyond its strides (`cudnnBackendTensorReordering_t`).
    Reordering: i32 { NONE = 0; F8_128X4 = 3 since 9 . 7; }
}

codes! {
    /// Reshape modes (`cudnnBackendReshapeMode_t`).
    ReshapeMode: i32 { VIEW_ONLY = 0 since 9 . 22; LOGICAL = 1 since 9 . 22; }
}

codes! {
    /// Sources of engine configurations (`cudnnBackendHeurMode_t`).
    HeurMode: i32 { INSTANT = 0; B = 1; FALLBACK = 2; A = 3; }
}

codes! {
    /// A behavior of an engine besides its result (`cudnnBackendBehaviorNote_t`).
    BehaviorNote: i32 {
        RUNTIME_COMPILATION = 0;
        REQUIRES_FILTER_INT8X32_REORDER = 1;
        REQUIRES_BIAS_INT8X32_REORDER = 2;
        SUPPORTS_CUDA_GRAPH_NATIVE_API = 3 since 9 . 5;
        CUBLASLT_DEPENDENCY = 4 since 9 . 15;
    }
}

codes! {
    /// A numerical property of an engine (`cudnnBackendNumericalNote_t`).
    NumericalNote: i32 {
        TENSOR_CORE = 0; DOWN_CONVERT_INPUTS = 1; REDUCED_PRECISION_REDUCTION = 2; FFT = 3; NONDETERMINISTIC = 4;
        WINOGRAD = 5; WINOGRAD_TILE_4X4 = 6; WINOGRAD_TILE_6X6 = 7; WINOGRAD_TILE_13X13 = 8;
        STRICT_NAN_PROP = 9 since 9 . 1;
    }
}

codes! {
    /// Tuning knobs of engines (`cudnnBackendKnobType_t`).
    KnobType: i32 {
        SPLIT_K = 0; SWIZZLE = 1; TILE_SIZE = 2; USE_TEX = 3; EDGE = 4; KBLOCK = 5; LDGA = 6; LDGB = 7; CHUNK_K = 8;
        SPLIT_H = 9; WINO_TILE = 10; MULTIPLY = 11; SPLIT_K_BUF = 12; TILEK = 13; STAGES = 14; REDUCTION_MODE = 15;
        SPLIT_K_SLC = 17;
        IDX_MODE = 18 since 9 . 7;
        SPECFILT = 23; KERNEL_CFG = 24; WORKSPACE = 25; TILE_CGA = 26; TILE_CGA_M = 27; TILE_CGA_N = 28; BLOCK_SIZE = 29;
        OCCUPANCY = 30; ARRAY_SIZE_PER_THREAD = 31; SPLIT_COLS = 33; TILE_ROWS = 34;
        CTA_COUNT = 37 since 9 . 7;
        STREAM_K = 38 since 9 . 7;
        SPLIT_P_SLC = 39 since 9 . 7;
        TILE_M = 40 since 9 . 7;
        TILE_N = 41 since 9 . 7;
        WARP_SPEC_CFG = 42 since 9 . 7;
        SWAP_AB = 43 since 9 . 18;
        INPUT_TMA_ENABLE = 44 since 9 . 22;
        OUTPUT_TMA_ENABLE = 45 since 9 . 22;
    }
}
