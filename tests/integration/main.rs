//! All tests that need no GPU, in one binary, because each binary links the whole crate.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a panic is how a test reports a failure, and a skipped test prints why"
)]

mod advise;
mod allocator_actions;
mod arrows;
mod big_recordings;
mod claims;
mod cli;
mod command;
mod compare;
mod convert;
mod doctor;
mod fits;
mod forged_output;
mod inspect_summary;
mod install;
mod leaks;
mod memory_options;
mod models_truth;
mod museum;
mod odd_inputs;
mod output_files;
mod own_allocator;
mod own_limit;
mod packing;
mod partition;
mod plugin;
mod private_pools;
mod progress;
mod ranks;
mod record;
mod recorded;
mod recordings;
mod rehearse;
mod releases;
mod replay_releases;
mod report;
mod report_browser;
mod resnet_truth;
mod run_folders;
mod schema;
mod strategies;
mod stress;
mod stress_adversary;
mod stress_integrity;
mod techniques_truth;
mod terminal;
mod threshold;
mod threshold_truth;
mod throughput;
mod torch_oracle;
mod transformer_cli;
mod transformer_truth;
mod verdicts;
mod verify;
mod verify_middle;
mod verify_on;
mod what_if;
mod worker;
