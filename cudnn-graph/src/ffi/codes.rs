//! Codes of the backend API, from its public header (9.27.0), each with the version that introduced it.
//!
//! Integer newtypes instead of Rust enums: a code that a newer library returns must be representable.

use crate::version::Version;
use serde::{Serialize, Serializer};
use std::fmt;

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
        ENGINE = 2;
        ENGINECFG = 3;
        ENGINEHEUR = 4;
        EXECUTION_PLAN = 5;
        KNOB_CHOICE = 7;
        OPERATION_POINTWISE = 13;
        OPERATIONGRAPH = 15;
        VARIANT_PACK = 16;
        TENSOR = 17;
        MATMUL = 18;
        OPERATION_MATMUL = 19;
        REDUCTION = 21;
        OPERATION_REDUCTION = 22;
        OPERATION_RESHAPE = 31;
        RNG = 32;
        OPERATION_RNG = 33;
        OPERATION_PAGED_CACHE_LOAD = 35 since 9 . 4;
        OPERATION_BLOCK_SCALE_QUANTIZE = 36 since 9 . 7;
        OPERATION_BLOCK_SCALE_DEQUANTIZE = 37 since 9 . 7;
        DEVICEPROP = 38 since 9 . 8;
        OPERATION_SDPA_FWD = 41 since 9 . 13;
        OPERATION_SDPA_BWD = 43 since 9 . 17;
        OPERATION_DIAGONAL_BAND_MASK = 44 since 9 . 20;
        OPERATION_SOFTMAX = 45 since 9 . 20;
        OPERATION_TRANSPOSE = 46 since 9 . 22;
        OPERATION_SLICE = 47 since 9 . 22;
    }
}

codes! {
    /// Attributes of descriptors (`cudnnBackendAttributeName_t`).
    Attribute: i32 {
        POINTWISE_MODE = 0;
        POINTWISE_MATH_PREC = 1;
        POINTWISE_RELU_LOWER_CLIP = 3;
        POINTWISE_RELU_UPPER_CLIP = 4;
        POINTWISE_RELU_LOWER_CLIP_SLOPE = 5;
        POINTWISE_ELU_ALPHA = 6;
        POINTWISE_SOFTPLUS_BETA = 7;
        POINTWISE_SWISH_BETA = 8;
        POINTWISE_AXIS = 9;
        ENGINEHEUR_MODE = 200;
        ENGINEHEUR_OPERATION_GRAPH = 201;
        ENGINEHEUR_RESULTS = 202;
        ENGINEHEUR_DEVICEPROP = 204 since 9 . 8;
        ENGINECFG_ENGINE = 300;
        ENGINECFG_KNOB_CHOICES = 302;
        ENGINECFG_WORKSPACE_SIZE = 303 since 9 . 2;
        ENGINECFG_SHARED_MEMORY_USED = 304 since 9 . 2;
        EXECUTION_PLAN_HANDLE = 400;
        EXECUTION_PLAN_ENGINE_CONFIG = 401;
        EXECUTION_PLAN_WORKSPACE_SIZE = 402;
        EXECUTION_PLAN_JSON_REPRESENTATION = 405;
        EXECUTION_PLAN_DEVICEPROP = 407 since 9 . 8;
        KNOB_CHOICE_KNOB_TYPE = 600;
        KNOB_CHOICE_KNOB_VALUE = 601;
        OPERATION_POINTWISE_PW_DESCRIPTOR = 750;
        OPERATION_POINTWISE_XDESC = 751;
        OPERATION_POINTWISE_BDESC = 752;
        OPERATION_POINTWISE_YDESC = 753;
        OPERATION_POINTWISE_ALPHA1 = 754;
        OPERATION_POINTWISE_ALPHA2 = 755;
        OPERATION_POINTWISE_DXDESC = 756;
        OPERATION_POINTWISE_DYDESC = 757;
        OPERATION_POINTWISE_TDESC = 758;
        OPERATIONGRAPH_HANDLE = 800;
        OPERATIONGRAPH_OPS = 801;
        OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802;
        TENSOR_BYTE_ALIGNMENT = 900;
        TENSOR_DATA_TYPE = 901;
        TENSOR_DIMENSIONS = 902;
        TENSOR_STRIDES = 903;
        TENSOR_UNIQUE_ID = 906;
        TENSOR_IS_VIRTUAL = 907;
        TENSOR_IS_BY_VALUE = 908;
        TENSOR_REORDERING_MODE = 909;
        TENSOR_CONSTANT_VALUE = 910 since 9 . 22;
        TENSOR_RAGGED_OFFSET_DESC = 913;
        TENSOR_RAGGED_OFFSET_MULTIPLIER = 914 since 9 . 24;
        VARIANT_PACK_UNIQUE_IDS = 1000;
        VARIANT_PACK_DATA_POINTERS = 1001;
        VARIANT_PACK_WORKSPACE = 1003;
        ENGINE_OPERATION_GRAPH = 1300;
        ENGINE_GLOBAL_INDEX = 1301;
        ENGINE_NUMERICAL_NOTE = 1303;
        ENGINE_BEHAVIOR_NOTE = 1305;
        ENGINE_DEVICEPROP = 1307 since 9 . 8;
        MATMUL_COMP_TYPE = 1500;
        MATMUL_PADDING_VALUE = 1503;
        OPERATION_MATMUL_ADESC = 1520;
        OPERATION_MATMUL_BDESC = 1521;
        OPERATION_MATMUL_CDESC = 1522;
        OPERATION_MATMUL_DESC = 1523;
        OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC = 1525;
        OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC = 1526;
        OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC = 1527;
        REDUCTION_OPERATOR = 1600;
        REDUCTION_COMP_TYPE = 1601;
        REDUCTION_IS_DETERMINISTIC = 1602 since 9 . 11;
        OPERATION_REDUCTION_XDESC = 1610;
        OPERATION_REDUCTION_YDESC = 1611;
        OPERATION_REDUCTION_DESC = 1612;
        OPERATION_PAGED_CACHE_LOAD_CONTAINER_DESC = 1950 since 9 . 4;
        OPERATION_PAGED_CACHE_LOAD_YDESC = 1951 since 9 . 4;
        OPERATION_PAGED_CACHE_LOAD_SEQUENCE_DESC = 1952 since 9 . 4;
        OPERATION_PAGED_CACHE_LOAD_PAGE_TABLE_DESC = 1953 since 9 . 4;
        OPERATION_RESHAPE_XDESC = 2200;
        OPERATION_RESHAPE_YDESC = 2201;
        OPERATION_RESHAPE_MODE = 2202 since 9 . 22;
        RNG_DISTRIBUTION = 2300;
        RNG_NORMAL_DIST_MEAN = 2301;
        RNG_NORMAL_DIST_STANDARD_DEVIATION = 2302;
        RNG_UNIFORM_DIST_MAXIMUM = 2303;
        RNG_UNIFORM_DIST_MINIMUM = 2304;
        RNG_BERNOULLI_DIST_PROBABILITY = 2305;
        OPERATION_RNG_YDESC = 2310;
        OPERATION_RNG_SEED = 2311;
        OPERATION_RNG_DESC = 2312;
        OPERATION_RNG_OFFSET_DESC = 2313;
        OPERATION_BLOCK_SCALE_QUANTIZE_XDESC = 2500 since 9 . 7;
        OPERATION_BLOCK_SCALE_QUANTIZE_YDESC = 2501 since 9 . 7;
        OPERATION_BLOCK_SCALE_QUANTIZE_SCALE_DESC = 2502 since 9 . 7;
        OPERATION_BLOCK_SCALE_QUANTIZE_MATH_PREC = 2503 since 9 . 7;
        OPERATION_BLOCK_SCALE_QUANTIZE_BLOCK_SIZE = 2504 since 9 . 7;
        OPERATION_BLOCK_SCALE_DEQUANTIZE_XDESC = 2600 since 9 . 7;
        OPERATION_BLOCK_SCALE_DEQUANTIZE_SCALE_DESC = 2601 since 9 . 7;
        OPERATION_BLOCK_SCALE_DEQUANTIZE_YDESC = 2602 since 9 . 7;
        OPERATION_BLOCK_SCALE_DEQUANTIZE_MATH_PREC = 2603 since 9 . 7;
        OPERATION_BLOCK_SCALE_DEQUANTIZE_BLOCK_SIZE = 2604 since 9 . 7;
        DEVICEPROP_DEVICE_ID = 2700 since 9 . 8;
        DEVICEPROP_HANDLE = 2701 since 9 . 8;
        DEVICEPROP_JSON_REPRESENTATION = 2702 since 9 . 8;
        OPERATION_SDPA_FWD_QDESC = 2800 since 9 . 13;
        OPERATION_SDPA_FWD_KDESC = 2801 since 9 . 13;
        OPERATION_SDPA_FWD_VDESC = 2802 since 9 . 13;
        OPERATION_SDPA_FWD_ODESC = 2803 since 9 . 13;
        OPERATION_SDPA_FWD_STATSDESC = 2804 since 9 . 13;
        OPERATION_SDPA_FWD_SCALEDESC = 2805 since 9 . 13;
        OPERATION_SDPA_FWD_BLOCK_MASK_DESC = 2806 since 9 . 14;
        OPERATION_SDPA_FWD_PAGE_TABLE_KDESC = 2807 since 9 . 15;
        OPERATION_SDPA_FWD_PAGE_TABLE_VDESC = 2808 since 9 . 15;
        OPERATION_SDPA_FWD_SEQ_LEN_QDESC = 2809 since 9 . 15;
        OPERATION_SDPA_FWD_SEQ_LEN_KVDESC = 2810 since 9 . 15;
        OPERATION_SDPA_FWD_SUBGRAPH = 2811 since 9 . 21;
        OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID = 2812 since 9 . 21;
        OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID = 2813 since 9 . 21;
        OPERATION_SDPA_FWD_SOFTMAX_DESC = 2814 since 9 . 21;
        OPERATION_SDPA_FWD_DROPOUT_SEED_DESC = 2815 since 9 . 21;
        OPERATION_SDPA_FWD_DROPOUT_OFFSET_DESC = 2816 since 9 . 21;
        OPERATION_SDPA_FWD_DROPOUT_RNG_DUMP_DESC = 2817 since 9 . 21;
        OPERATION_SDPA_FWD_DROPOUT_PROBABILITY = 2818 since 9 . 21;
        OPERATION_SDPA_FWD_CU_SEQ_LEN_QDESC = 2820 since 9 . 24;
        OPERATION_SDPA_FWD_CU_SEQ_LEN_KVDESC = 2821 since 9 . 24;
        OPERATION_SDPA_FWD_DESCALE_QDESC = 2822 since 9 . 25;
        OPERATION_SDPA_FWD_DESCALE_KDESC = 2823 since 9 . 25;
        OPERATION_SDPA_FWD_DESCALE_VDESC = 2824 since 9 . 25;
        OPERATION_SDPA_FWD_DESCALE_SDESC = 2825 since 9 . 25;
        OPERATION_SDPA_FWD_SCALE_SDESC = 2826 since 9 . 25;
        OPERATION_SDPA_FWD_SCALE_ODESC = 2827 since 9 . 25;
        OPERATION_SDPA_FWD_AMAX_SDESC = 2828 since 9 . 25;
        OPERATION_SDPA_FWD_AMAX_ODESC = 2829 since 9 . 25;
        OPERATION_SDPA_BWD_QDESC = 2851 since 9 . 17;
        OPERATION_SDPA_BWD_KDESC = 2852 since 9 . 17;
        OPERATION_SDPA_BWD_VDESC = 2853 since 9 . 17;
        OPERATION_SDPA_BWD_ODESC = 2854 since 9 . 17;
        OPERATION_SDPA_BWD_STATSDESC = 2855 since 9 . 17;
        OPERATION_SDPA_BWD_SCALEDESC = 2856 since 9 . 17;
        OPERATION_SDPA_BWD_SEQ_LEN_QDESC = 2857 since 9 . 17;
        OPERATION_SDPA_BWD_SEQ_LEN_KVDESC = 2858 since 9 . 17;
        OPERATION_SDPA_BWD_DQDESC = 2859 since 9 . 17;
        OPERATION_SDPA_BWD_DKDESC = 2860 since 9 . 17;
        OPERATION_SDPA_BWD_DVDESC = 2861 since 9 . 17;
        OPERATION_SDPA_BWD_DODDESC = 2862 since 9 . 17;
        OPERATION_SDPA_BWD_SUBGRAPH = 2867 since 9 . 28;
        OPERATION_SDPA_BWD_SUBGRAPH_INPUT_UID = 2868 since 9 . 28;
        OPERATION_SDPA_BWD_SUBGRAPH_OUTPUT_UID = 2869 since 9 . 28;
        OPERATION_DIAGONAL_BAND_MASK_XDESC = 3000 since 9 . 20;
        OPERATION_DIAGONAL_BAND_MASK_SEQ_LEN_KVDESC = 3001 since 9 . 20;
        OPERATION_DIAGONAL_BAND_MASK_SEQ_LEN_QDESC = 3002 since 9 . 20;
        OPERATION_DIAGONAL_BAND_MASK_LEFT_BOUND_DESC = 3003 since 9 . 20;
        OPERATION_DIAGONAL_BAND_MASK_SHIFT_RIGHT_BOUND_DESC = 3004 since 9 . 20;
        OPERATION_DIAGONAL_BAND_MASK_BDESC = 3005 since 9 . 20;
        OPERATION_DIAGONAL_BAND_MASK_YDESC = 3006 since 9 . 20;
        OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE = 3007 since 9 . 20;
        OPERATION_SOFTMAX_XDESC = 3100 since 9 . 20;
        OPERATION_SOFTMAX_YDESC = 3101 since 9 . 20;
        OPERATION_SOFTMAX_STATS_DESC = 3102 since 9 . 20;
        OPERATION_SOFTMAX_MAX_DESC = 3103 since 9 . 20;
        OPERATION_SOFTMAX_SUM_EXP_DESC = 3104 since 9 . 20;
        OPERATION_SOFTMAX_SINK_DESC = 3105 since 9 . 20;
        OPERATION_SOFTMAX_STATS_LOG2 = 3106 since 9 . 27;
        OPERATION_TRANSPOSE_XDESC = 3200 since 9 . 22;
        OPERATION_TRANSPOSE_YDESC = 3201 since 9 . 22;
        OPERATION_TRANSPOSE_PERMUTATION = 3202 since 9 . 22;
        OPERATION_SLICE_XDESC = 3300 since 9 . 22;
        OPERATION_SLICE_YDESC = 3301 since 9 . 22;
        OPERATION_SLICE_START_INDICES = 3302 since 9 . 22;
        OPERATION_SLICE_LIMIT_INDICES = 3303 since 9 . 22;
        OPERATION_SLICE_STRIDES = 3304 since 9 . 22;
    }
}

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
        HEUR_MODE = 8;
        KNOB_TYPE = 9;
        NUMERICAL_NOTE = 11;
        POINTWISE_MODE = 14;
        BACKEND_DESCRIPTOR = 15;
        REDUCTION_OPERATOR_TYPE = 18;
        BEHAVIOR_NOTE = 19;
        TENSOR_REORDERING_MODE = 20;
        INT32 = 23;
        CHAR = 24;
        RNG_DISTRIBUTION = 29;
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
