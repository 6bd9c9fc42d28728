//! Answers to users' questions, from replays, recordings or the rows of a run.
//!
//! [`threshold`]: how much memory suffices, and how much of a workload fits. [`advise`]: which allocator settings to use.
//! [`techniques`]: what saves memory, and at what cost. [`claims`]: which published statements about memory are true.
//! [`leaks`]: whether memory grows from step to step. [`holders`]: who requested memory and who holds it. [`compare`]:
//! what changed from one run to another. [`times`]: whether wall-clock times differ. [`summary`]: memory at one moment. [`ranks`]: one answer for all ranks of a
//! program. [`releases`]: a program under several releases of PyTorch. This module reads no arguments, prints nothing and formats nothing.

pub mod advise;
pub mod claims;
pub mod compare;
pub mod fits;
pub mod holders;
pub mod leaks;
pub mod ranks;
pub mod releases;
pub mod summary;
pub mod techniques;
pub mod threshold;
pub mod times;
mod trial;

pub use trial::{TrialError, simulated_beside};

use std::ops::ControlFlow;

use crate::trace::{Op, Source, Tables, TraceError};

/// Calls `visit` with the number and the operation of every event, until it breaks with a value or the trace ends.
/// Returns that value and the tables as far as they were read.
fn scan<B>(
    source: &dyn Source,
    mut visit: impl FnMut(u64, &Op, &Tables) -> ControlFlow<B>,
) -> Result<(Option<B>, Tables), TraceError> {
    let mut reader = source.open()?;
    let mut index = 0;
    while let (events @ [_, ..], tables) = reader.next_chunk()? {
        for event in events {
            if let ControlFlow::Break(value) = visit(index, &event.op, tables) {
                return Ok((Some(value), tables.clone()));
            }
            index += 1;
        }
    }
    Ok((None, reader.tables().clone()))
}
