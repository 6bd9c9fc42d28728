//! How a trace carries a request that failed when it was recorded: as an alloc that is freed at once, at a call site
//! that says so.
//!
//! Whoever has room serves it for a moment, which is what the request tells about the program; whoever has not fails as
//! the recorded allocator did. The call site keeps the fact in every format. Readers of recordings write such requests,
//! writers of other formats recognise them.

use super::TraceBuilder;
use oomph_base::{StreamId, TagId};

const FAILED: &str = "(failed when recorded)";

/// Adds a request that failed.
pub(super) fn tell(story: &mut TraceBuilder, bytes: u64, stream: StreamId, site: Option<&str>) {
    let site = match site {
        Some(site) => story.site(&format!("{FAILED} {site}")),
        None => story.site(FAILED),
    };
    let block = story.alloc_at(bytes, stream, TagId(0), site);
    story.free(block);
}

/// Whether the requests of a call site failed when they were recorded.
///
/// ```
/// assert!(oomph_trace::failed_when_recorded("(failed when recorded) train.py:12 forward"));
/// assert!(!oomph_trace::failed_when_recorded("train.py:12 forward"));
/// ```
#[must_use]
pub fn failed_when_recorded(site: &str) -> bool {
    site.starts_with(FAILED)
}
