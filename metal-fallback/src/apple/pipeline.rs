//! One compiled kernel.

use crate::error::Error;
use crate::kernel::{KernelKey, Math};
use crate::limits::Limits;
use objc2::rc::Retained;
use objc2::runtime::{NSObjectProtocol, ProtocolObject};
use objc2::sel;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLanguageVersion, MTLLibrary, MTLMathMode};

/// A compiled kernel.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) state: Retained<ProtocolObject<dyn MTLComputePipelineState>>,
    pub(super) limits: Limits,
}

fn options(math: Math) -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version3_1);
    // macOS 15 added `mathMode`.
    if options.respondsToSelector(sel!(setMathMode:)) {
        options.setMathMode(match math {
            Math::Safe => MTLMathMode::Safe,
            Math::Fast => MTLMathMode::Fast,
        });
    } else {
        #[allow(deprecated)]
        options.setFastMathEnabled(match math {
            Math::Safe => false,
            Math::Fast => true,
        });
    }
    options
}

impl Pipeline {
    pub(super) fn build(device: &ProtocolObject<dyn MTLDevice>, key: &KernelKey) -> Result<Pipeline, Error> {
        let entry = key.entry;
        let refused = |e: Retained<NSError>| Error::Compile { entry, text: e.localizedDescription().to_string() };
        let source = NSString::from_str(&key.source);
        let library = device.newLibraryWithSource_options_error(&source, Some(&options(key.math))).map_err(refused)?;
        let function = library.newFunctionWithName(&NSString::from_str(entry));
        let function = function.ok_or_else(|| Error::Compile { entry, text: "the library has no function of this name".to_owned() })?;
        let state = device.newComputePipelineStateWithFunction_error(&function).map_err(refused)?;
        let limits = Limits {
            threads: state.maxTotalThreadsPerThreadgroup() as u64,
            simd: state.threadExecutionWidth() as u64,
            static_bytes: state.staticThreadgroupMemoryLength() as u64,
            threadgroup_bytes: device.maxThreadgroupMemoryLength() as u64,
        };
        Ok(Pipeline { state, limits })
    }
}
