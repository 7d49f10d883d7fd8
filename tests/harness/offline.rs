//! The real cuDNN on a machine without a GPU.
