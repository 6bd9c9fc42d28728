//! The optional abilities of a device.

use std::fmt;

use super::{DeviceError, DeviceProps, Patterned, Verified};
use oomph_base::{Address, StreamId, Work};

/// A set of optional abilities: those that a device has, or that a strategy needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(u8);

/// The abilities that a strategy needs and a device lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this device has no {0}")]
pub struct MissingCapabilities(pub Capabilities);

impl Capabilities {
    /// No optional ability.
    pub const NONE: Capabilities = Capabilities(0);
    /// [`VirtualMemory`].
    pub const VIRTUAL_MEMORY: Capabilities = Capabilities(1);
    /// [`StreamOrderedPools`].
    pub const STREAM_ORDERED_POOLS: Capabilities = Capabilities(1 << 1);
    /// [`PinnedHost`].
    pub const PINNED_HOST: Capabilities = Capabilities(1 << 2);
    /// [`Compute`].
    pub const COMPUTE: Capabilities = Capabilities(1 << 3);
    /// [`Patterns`].
    pub const PATTERNS: Capabilities = Capabilities(1 << 4);
    /// All optional abilities.
    pub const ALL: Capabilities = Capabilities((1 << Self::NAMES.len()) - 1);

    /// The names of the abilities in messages, by bit.
    const NAMES: [&str; 5] =
        ["virtual memory", "stream-ordered pools", "pinned host memory", "compute", "known contents"];

    /// These abilities if the condition holds, otherwise none.
    #[must_use]
    pub const fn when(self, condition: bool) -> Capabilities {
        if condition { self } else { Capabilities::NONE }
    }

    /// These abilities and some more.
    #[must_use]
    pub const fn and(self, more: Capabilities) -> Capabilities {
        Capabilities(self.0 | more.0)
    }

    /// Whether all of these abilities are among them.
    #[must_use]
    pub const fn contains(self, others: Capabilities) -> bool {
        self.0 & others.0 == others.0
    }

    /// Checks that a device has all abilities that are needed here.
    pub const fn check(self, props: &DeviceProps) -> Result<(), MissingCapabilities> {
        match self.0 & !props.capabilities.0 {
            0 => Ok(()),
            missing => Err(MissingCapabilities(Capabilities(missing))),
        }
    }
}

impl fmt::Display for Capabilities {
    /// The names of the abilities, `nothing` where there are none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Self::NAMES.into_iter().enumerate().filter(|(bit, _)| self.0 >> bit & 1 == 1);
        let names: Vec<&str> = names.map(|(_, name)| name).collect();
        f.write_str(if names.is_empty() { "nothing" } else { "" })?;
        f.write_str(&names.join(", "))
    }
}

/// Physical memory from [`VirtualMemory::create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PhysicalId(pub u64);

/// Address space and physical memory handled separately (`cuMemAddressReserve`, `cuMemCreate`,
/// `cuMemMap` ...).
///
/// The driver's rules hold: addresses, sizes and offsets are multiples of
/// [`granularity_bytes`](super::DeviceProps::granularity_bytes); a range is mapped only where it is
/// reserved and not yet mapped; it is unmapped whole, as it was mapped; a range is freed only when
/// nothing is mapped in it; physical memory lives until it is released *and* unmapped everywhere.
pub trait VirtualMemory {
    /// Reserves a range of addresses.
    fn reserve(&mut self, bytes: u64) -> Result<Address, DeviceError>;
    /// Gives a whole reserved range back.
    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError>;
    /// Takes physical memory.
    fn create(&mut self, bytes: u64) -> Result<PhysicalId, DeviceError>;
    /// Releases the handle.
    fn release(&mut self, physical: PhysicalId) -> Result<(), DeviceError>;
    /// Maps the whole of `physical` at `address`.
    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), DeviceError>;
    /// Makes a mapped range readable and writable.
    fn set_access(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError>;
    /// Lets another GPU of this process read and write everything that is mapped now or later. Does nothing if that GPU
    /// cannot reach this one.
    fn allow_peer(&mut self, ordinal: u32) -> Result<(), DeviceError>;
    /// Removes the mappings in a range; each must lie in it whole.
    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError>;
}

/// One of the driver's stream-ordered pools; 0 is the device's default pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u32);

/// The attributes of a stream-ordered pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSettings {
    /// Free memory above this is given back to the device at the next synchronisation.
    pub release_threshold: u64,
    /// Reuse what another stream freed if an event orders the two.
    pub follow_event_dependencies: bool,
    /// Reuse what another stream freed if that free has already happened on the device.
    pub allow_opportunistic: bool,
    /// Let the driver insert a wait to make a reuse legal.
    pub allow_internal_dependencies: bool,
}

impl PoolSettings {
    /// The settings of a new pool: the driver gives all free memory back and allows all reuse.
    pub const DRIVER_DEFAULT: PoolSettings = PoolSettings {
        release_threshold: 0,
        follow_event_dependencies: true,
        allow_opportunistic: true,
        allow_internal_dependencies: true,
    };
}

/// What a stream-ordered pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Physical bytes now.
    pub reserved: u64,
    /// Physical bytes at most so far.
    pub reserved_high: u64,
    /// Bytes allocated now.
    pub used: u64,
    /// Bytes allocated at most so far.
    pub used_high: u64,
}

/// The driver's own allocator (`cuMemAllocAsync`, `cuMemPool*`).
pub trait StreamOrderedPools {
    /// Makes a pool that holds at most `max_bytes`.
    fn pool_create(&mut self, max_bytes: Option<u64>) -> Result<PoolId, DeviceError>;
    /// Destroys a pool that `pool_create` made.
    fn pool_destroy(&mut self, pool: PoolId) -> Result<(), DeviceError>;
    /// Sets all attributes of a pool.
    fn pool_configure(&mut self, pool: PoolId, settings: PoolSettings) -> Result<(), DeviceError>;
    /// Gives unused memory above `keep_bytes` back to the device.
    fn pool_trim(&mut self, pool: PoolId, keep_bytes: u64) -> Result<(), DeviceError>;
    /// What the pool holds.
    fn pool_usage(&mut self, pool: PoolId) -> Result<PoolUsage, DeviceError>;
    /// `cuMemAllocFromPoolAsync`.
    fn alloc_async(&mut self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<Address, DeviceError>;
    /// `cuMemFreeAsync`.
    fn free_async(&mut self, address: Address, stream: StreamId) -> Result<(), DeviceError>;
}

/// Page-locked host memory.
pub trait PinnedHost {
    /// `cuMemHostAlloc`.
    fn host_alloc(&mut self, bytes: u64) -> Result<Address, DeviceError>;
    /// `cuMemFreeHost`. Waits for the work of all streams.
    fn host_free(&mut self, address: Address) -> Result<(), DeviceError>;
}

/// Work on streams.
pub trait Compute {
    /// Queues `work` on `stream`. Operands are the blocks it reads and writes; the last is the
    /// result.
    fn launch(&mut self, stream: StreamId, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError>;
}

/// Known contents. One launch fills or compares many blocks, behind the work that is queued on a
/// stream. Nothing waits: the results are fetched later.
pub trait Patterns {
    /// Queues the writing of every block's pattern.
    fn fill_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError>;
    /// Queues the comparison of every block with its pattern.
    fn verify_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError>;
    /// The results of the comparisons that were completed since the last call.
    fn verified(&mut self) -> Result<Verified, DeviceError>;
}
