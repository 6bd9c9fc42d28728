//! GPU memory, simulated or real, and allocation strategies over it.
//!
//! - [`device`]: the raw memory of one GPU: a small trait, the simulated and the CUDA device, wrappers over any device.
//! - [`strategy`]: allocation policies over a device: the trait, the registry, one file or folder each, conformance.
//! - [`plugin`]: any pluggable allocator of PyTorch (a `.so`) as a strategy.

pub mod device;
pub mod plugin;
pub mod strategy;
