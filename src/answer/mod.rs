//! Answers to the questions that people come with, each from replays, recordings or the files of a run.
//!
//! [`threshold`] says how much memory suffices, and how much of a workload fits; [`advise`] which allocator settings to
//! use; [`techniques`] what saves memory and what it costs; [`claims`] which of the things that are published about that
//! are true; [`leaks`] whether memory grows from step to step, and who holds it; [`compare`] what changed from one run to
//! another; [`summary`] how memory stood at one moment; [`ranks`] makes one answer of those for every rank of a program. Commands and reports ask; this room reads no arguments, prints
//! nothing and formats nothing.

pub mod advise;
pub mod claims;
pub mod compare;
pub mod leaks;
pub mod ranks;
pub mod summary;
pub mod techniques;
pub mod threshold;
