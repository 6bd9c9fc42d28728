//! Stress-tests and benchmarks CUDA memory allocators, on a real GPU or on a simulated one.
//!
//! Data flows one way, and the rooms of this crate are named after the stations:
//!
//! ```text
//! workload -> trace -> replay(strategy over device) -> measure -> report
//! ```
//!
//! - [`unit`](mod@unit): bytes, nanoseconds, identities; used everywhere.
//! - [`trace`]: a story of allocation events, in memory and on disk.
//! - [`plan`]: what a trace needs at least, and how well it can be laid out beforehand.
//! - [`workload`]: what produces a trace: generators and their recipes.
//! - [`device`]: the raw memory of one GPU, simulated or real, and wrappers over any device.
//! - [`strategy`]: allocation policies over a device, their registry and wrappers.
//! - [`plugin`]: the pluggable-allocator interface of PyTorch, both ways.
//! - [`replay`]: drives a trace through a strategy on a device.
//! - [`measure`]: observers of a replay and the record that a case leaves behind.
//! - [`answer`]: answers to what people ask: how much memory suffices, does it leak, what saves memory, what changed.
//! - [`report`]: records as tables and files.
//! - [`suite`]: which cases to run, and running them.
//! - [`stress`]: programs that try to break a strategy.
//! - [`cli`]: the command line; the only room that prints.

pub mod answer;
pub mod cli;
pub mod device;
pub mod measure;
pub mod plan;
pub mod plugin;
pub mod replay;
pub mod report;
pub mod strategy;
pub mod stress;
pub mod suite;
pub mod trace;
pub mod unit;
pub mod workload;
