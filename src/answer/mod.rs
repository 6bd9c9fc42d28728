//! Answers to the questions that people come with, found by replaying one source many times.
//!
//! [`threshold`] says how much memory suffices, and how much of a workload fits; [`techniques`] what saves memory and what
//! it costs. The command line and suites ask; this
//! room decides what to replay and what follows from it. It prints nothing and writes no files.

pub mod techniques;
pub mod threshold;
