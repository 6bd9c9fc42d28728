//! Tests on a real GPU. Without one, each prints why it is skipped.
//!
//!     cargo test --release --test gpu

#![cfg(feature = "cuda")]
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a panic is how a test reports a failure, and a skipped test prints why"
)]

mod compute;
mod device;
mod one_gpu;
#[cfg(target_os = "linux")]
mod safety;
