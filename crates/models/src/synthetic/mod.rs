//! Synthetic allocation patterns: traces that come from a rule and not from a model.

pub(crate) mod mix;
pub(crate) mod script;
pub(crate) mod single_stream;
pub(crate) mod streams;

use oomph_base::{StreamId, TagId};
use oomph_trace::{BlockSlot, TraceBuilder};

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
