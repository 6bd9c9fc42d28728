//! Wrappers over any device.
