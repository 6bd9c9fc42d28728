//! Facts of PyTorch's CUDA caching allocator, as of release 2.11: constants, size rounding, the
//! settings with their syntax and defaults, and the settings that a memory snapshot names.
//!
//! Each fact names the C++ function that it follows. The crate knows no trace, device or strategy.
//!
//! ```
//! use oomph_pytorch::{AllocatorSettings, MIN_BLOCK_SIZE};
//! let settings = AllocatorSettings::default().updated("expandable_segments:True")?;
//! assert_eq!(settings.round_size(100), MIN_BLOCK_SIZE);
//! assert_eq!(settings.allocation_size(3 << 20), 20 << 20);
//! # Ok::<(), oomph_pytorch::AllocatorSettingsError>(())
//! ```

mod recorded;
mod settings;
mod sizes;

pub use recorded::{InitialLayout, RecordedSettings, RecordedValue};
pub use settings::{AllocatorSettings, AllocatorSettingsError, CONF_VARIABLE, UNLIMITED};
pub use sizes::{
    LARGE_BUFFER, MIN_BLOCK_SIZE, MIN_LARGE_ALLOC, REQUEST_LIMIT, ROUND_LARGE, ROUNDUP_INTERVALS, SMALL_BUFFER,
    SMALL_SIZE,
};
