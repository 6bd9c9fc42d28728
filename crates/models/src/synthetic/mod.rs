//! Synthetic allocation patterns: traces that come from a rule and not from a model.

pub(crate) mod mix;
pub(crate) mod script;
pub(crate) mod single_stream;
pub(crate) mod streams;

use std::ops::Range;

use oomph_base::{StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

/// Allocates a block on the default stream, without a tag.
fn alloc(trace: &mut TraceBuilder, bytes: u64) -> BlockSlot {
    trace.alloc(bytes, StreamId::DEFAULT, TagId(0))
}

/// Opens streams until there are `count`, the default stream first.
///
/// No generator takes more than 257 streams, and a trace can hold 65,536: `new_stream` does not fail here.
fn open_streams(streams: &mut Vec<StreamId>, count: usize, trace: &mut TraceBuilder) {
    if streams.is_empty() {
        streams.push(StreamId::DEFAULT);
    }
    while streams.len() < count
        && let Ok(stream) = trace.new_stream()
    {
        streams.push(stream);
    }
}

/// Marks the phase before the first part, and every part as a step.
fn mark_part(trace: &mut TraceBuilder, part: u32, phase: &str, step: &str) {
    if part == 0 {
        trace.mark(MarkKind::Phase, phase, 0);
    }
    trace.mark(MarkKind::Step, step, part);
}

/// The items in a part, where `items` are written `per_part` at a time.
fn items_of_part(part: u32, per_part: u64, items: u64) -> Range<u64> {
    let first = u64::from(part) * per_part;
    first..items.min(first + per_part)
}
