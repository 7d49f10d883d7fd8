//! The interface of executors on NVIDIA GPUs for callers with device memory.

use sdpa_core::device::{DeviceExecutor, DevicePrepared};
use sdpa_driver::{Device, DeviceSlice, Stream};

/// A prepared pass of any executor on NVIDIA GPUs. Its calls have addresses of device memory and are submitted to CUDA streams.
pub type DevicePass = dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>;

/// An executor on one NVIDIA GPU.
pub trait NvidiaExecutor: DeviceExecutor<Memory = DeviceSlice, Stream = Stream> {
    /// Returns the device of the executor.
    fn device(&self) -> &'static Device;
}
