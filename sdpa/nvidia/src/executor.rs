//! The interface of executors on NVIDIA GPUs to callers with device memory of their own.

use sdpa_core::device::{DeviceExecutor, DevicePrepared};
use sdpa_driver::{Device, DeviceSlice, Stream};

/// A pass made ready, whichever executor made it: calls are addresses of device memory, submitted to streams.
pub type DevicePass = dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>;

/// An executor on one NVIDIA GPU.
pub trait NvidiaExecutor: DeviceExecutor<Memory = DeviceSlice, Stream = Stream> {
    /// The device that everything runs on.
    fn device(&self) -> &'static Device;
}
