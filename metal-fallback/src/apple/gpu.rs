//! A device, a queue, and the built kernels.

use super::built::Built;
use super::pipeline::Pipeline;
use crate::error::Error;
use crate::kernel::{Kernel, KernelCache, KernelKey, Math};
use crate::run::{Facts, Ready, Runner};
use crate::task::Task;
use crate::tile_config::THREADGROUP_BYTES;
use crate::unsupported::Unavailable;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSOperatingSystemVersion, NSProcessInfo};
use objc2_metal::{MTLCommandQueue, MTLCreateSystemDefaultDevice, MTLDevice, MTLGPUFamily};
use sdpa_cache::{CacheSnapshot, CacheStats, Limits};
use std::num::NonZeroUsize;
use std::sync::Arc;

/// The default limit for the number of kernels that a GPU keeps.
pub const PIPELINES: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// Apple GPU families by number, newest first.
const FAMILIES: [(u32, MTLGPUFamily); 10] = [
    (10, MTLGPUFamily::Apple10),
    (9, MTLGPUFamily::Apple9),
    (8, MTLGPUFamily::Apple8),
    (7, MTLGPUFamily::Apple7),
    (6, MTLGPUFamily::Apple6),
    (5, MTLGPUFamily::Apple5),
    (4, MTLGPUFamily::Apple4),
    (3, MTLGPUFamily::Apple3),
    (2, MTLGPUFamily::Apple2),
    (1, MTLGPUFamily::Apple1),
];

/// The first family with simdgroup matrices: A14 and M1.
const FIRST_FAMILY: u32 = 7;

/// The first systems with MSL 3.1, which has bfloat.
const SYSTEMS: [(&str, isize); 4] = [("macos", 14), ("ios", 17), ("tvos", 17), ("visionos", 1)];

/// An Apple GPU: a Metal device, a command queue and the cache of built kernels.
#[derive(Debug)]
pub struct Gpu {
    pub(super) device: Retained<ProtocolObject<dyn MTLDevice>>,
    pub(super) queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    pipelines: KernelCache<Pipeline>,
    facts: Arc<Facts>,
    math: Math,
}

fn system(info: &NSProcessInfo) -> Result<(), Unavailable> {
    let os = std::env::consts::OS;
    let unsupported = |needs: String| Unavailable::System { system: format!("{os}, {}", info.operatingSystemVersionString()), needs };
    let Some((_, major)) = SYSTEMS.into_iter().find(|(name, _)| *name == os) else {
        return Err(unsupported(SYSTEMS.map(|(name, major)| format!("{name} {major}")).join(", ")));
    };
    let version = NSOperatingSystemVersion { majorVersion: major, minorVersion: 0, patchVersion: 0 };
    if info.isOperatingSystemAtLeastVersion(version) { Ok(()) } else { Err(unsupported(format!("{os} {major}"))) }
}

fn facts(device: &ProtocolObject<dyn MTLDevice>, info: &NSProcessInfo) -> Facts {
    Facts {
        name: device.name().to_string(),
        family: FAMILIES.into_iter().find(|(_, family)| device.supportsFamily(*family)).map(|(number, _)| number),
        system: format!("{}, {}", std::env::consts::OS, info.operatingSystemVersionString()),
        threads: device.maxThreadsPerThreadgroup().width as u64,
        threadgroup_bytes: device.maxThreadgroupMemoryLength() as u64,
        working_set_bytes: device.recommendedMaxWorkingSetSize(),
        unified_memory: device.hasUnifiedMemory(),
    }
}

fn suits(facts: &Facts) -> Result<(), Unavailable> {
    let unsupported =
        |field: &str, value: String, limit: String| Unavailable::Gpu { gpu: facts.name.clone(), field: field.to_owned(), value, limit };
    if facts.family.is_none_or(|family| family < FIRST_FAMILY) {
        let value = facts.family.map_or("no Apple GPU family".to_owned(), |family| format!("Apple{family}"));
        return Err(unsupported("the family", value, format!("Apple{FIRST_FAMILY} or newer, for simdgroup matrices")));
    }
    if facts.threadgroup_bytes < THREADGROUP_BYTES as u64 {
        return Err(unsupported(
            "threadgroup memory",
            format!("{} bytes", facts.threadgroup_bytes),
            format!("at least {THREADGROUP_BYTES} bytes"),
        ));
    }
    Ok(())
}

impl Gpu {
    /// Returns the system's preferred GPU.
    ///
    /// # Errors
    /// Fails if there is no GPU, or if the kernels do not run on it.
    pub fn system() -> Result<Gpu, Unavailable> {
        autoreleasepool(|_| Gpu::new(MTLCreateSystemDefaultDevice().ok_or(Unavailable::NoGpu)?, PIPELINES, Math::Safe))
    }

    /// Creates a GPU from the caller's Metal device. It keeps at most `pipelines` kernels.
    ///
    /// # Errors
    /// Fails if the kernels do not run on the device.
    pub fn new(device: Retained<ProtocolObject<dyn MTLDevice>>, pipelines: NonZeroUsize, math: Math) -> Result<Gpu, Unavailable> {
        let info = NSProcessInfo::processInfo();
        system(&info)?;
        let facts = facts(&device, &info);
        suits(&facts)?;
        let queue = device.newCommandQueue().ok_or(Unavailable::NoGpu)?;
        Ok(Gpu { device, queue, pipelines: KernelCache::new("metal", Limits::entries(pipelines)), facts: Arc::new(facts), math })
    }

    /// Returns the Metal device.
    pub fn device(&self) -> &ProtocolObject<dyn MTLDevice> {
        &self.device
    }

    /// Returns the counters of the kernel cache.
    pub fn cache_stats(&self) -> CacheStats {
        self.pipelines.stats()
    }

    /// Returns a full record of the kernel cache, for `cargo sdpa cache`.
    pub fn cache_snapshot(&self) -> CacheSnapshot {
        self.pipelines.snapshot()
    }

    /// Prepares a pass to run: its kernels come from the cache or are built.
    ///
    /// # Errors
    /// Fails as [`Runner::prepare`] does.
    pub fn build(&self, task: Task) -> Result<Built, Error> {
        let mut pipelines = Vec::with_capacity(task.plans().len());
        for plan in task.plans() {
            let key = KernelKey::new(plan, self.math);
            let pipeline = Kernel::of(&self.pipelines, &key, || autoreleasepool(|_| Pipeline::build(&self.device, &key)))?;
            pipeline.limits.check(plan).map_err(Error::Unsupported)?;
            pipelines.push(pipeline);
        }
        Ok(Built::new(self, task, pipelines))
    }
}

impl Runner for Gpu {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&self, task: Task) -> Result<Arc<dyn Ready>, Error> {
        Ok(Arc::new(self.build(task)?))
    }
}
