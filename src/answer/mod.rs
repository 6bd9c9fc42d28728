//! Answers to the questions that people come with, each from replays, recordings or the files of a run.
//!
//! [`threshold`] says how much memory suffices, and how much of a workload fits; [`techniques`] what saves memory and
//! what it costs; [`leaks`] whether memory grows from step to step, and who holds it; [`compare`] what changed from one
//! run to another; [`summary`] how memory stood at one moment. Commands and reports ask; this room reads no arguments,
//! prints nothing and formats nothing.

pub mod compare;
pub mod leaks;
pub mod summary;
pub mod techniques;
pub mod threshold;
