//! What all oomph crates share: quantities and identities, kinds of work, files that are found by name or written, work on
//! several threads, progress reports, and the packing of blocks.
//!
//! Newtypes keep bytes, nanoseconds, addresses and indices apart. This crate knows no devices, strategies or traces.

mod catalog;
mod file_text;
mod layout;
mod memory_limit;
mod output_file;
pub mod packing;
mod parallel;
mod parameter;
mod process;
mod progress;
mod units;
mod work;

pub use catalog::{Catalog, CatalogEntry, did_you_mean, did_you_mean_among, nearest};
pub use file_text::{
    FileText, LARGEST_TEXT_FILE, TomlRefusal, escaped, escaped_lines, escaped_markdown, parse_toml, path_text,
    read_text_file, read_within, text_path,
};
pub use layout::{BlockState, BlockView, Layout, PlacementCall, SegmentView};
pub use memory_limit::{MemoryLimit, MemoryLimitError, TypedSizeError};
pub use output_file::{
    OutputFile, TemporaryFolder, abandon_unfinished_files, copy_until_exit, remove_left_files, replaced_file,
    write_file,
};
pub use parallel::{parallel_for_each, parallel_map};
pub use parameter::{Parameter, ParameterValues};
pub use process::{exit_description, exit_signal, last_bytes};
#[cfg(any(test, feature = "testing"))]
pub use progress::ProgressLog;
pub use progress::{NoProgress, PROGRESS_STRIDE, Progress};
pub use units::{Address, Bytes, EventId, GIB, KIB, MIB, Nanos, ParseBytesError, SiteId, StreamId, TagId, ThreadId};
pub use work::{Dtype, ProductRole, Work};

/// The 64-bit FNV-1a hash: file names, shards and seeds must stay the same from release to release, which the standard
/// library's hasher does not promise.
#[must_use]
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Rounds `value` up to a multiple of `step`, which must not be zero.
///
/// Saturates at the largest multiple that fits, so that a huge request fails later as too large. It does not wrap around
/// to a small one.
///
/// ```
/// assert_eq!(oomph_base::round_up(513, 512), 1024);
/// assert_eq!(oomph_base::round_up(u64::MAX, 512), u64::MAX - 511);
/// ```
#[must_use]
pub const fn round_up(value: u64, step: u64) -> u64 {
    let down = value - value % step;
    if down == value {
        value
    } else {
        match down.checked_add(step) {
            Some(up) => up,
            None => down,
        }
    }
}
