//! The functions of a plugin, wherever it is loaded.

use std::{ffi::c_int, fmt};

use crate::strategy::StrategyError;
use oomph_base::Address;

/// The functions of a plugin.
pub(super) trait Allocator: fmt::Debug + Send {
    /// Asks for a block; null where there is none.
    fn alloc(&mut self, bytes: usize, device: c_int, stream: u64) -> Result<Address, Gone>;

    /// Gives a block back, with what was said when it was asked for.
    fn free(&mut self, address: Address, bytes: usize, device: c_int, stream: u64) -> Result<(), Gone>;

    /// Tells that a live block is used on another stream, if the plugin wants to know; otherwise the caller must see to
    /// it that the block is not given back too early.
    fn record_stream(&mut self, address: Address, stream: u64) -> Result<bool, Gone>;

    /// Asks for cached memory to be given back to the device, where the plugin can.
    fn reset(&mut self) -> Result<(), Gone>;

    /// How much it holds now, where it tells.
    fn reserved(&mut self, device: c_int) -> Result<Option<u64>, Gone>;

    /// Tells how much it may hold, if the plugin can be told.
    fn limit(&mut self, device: c_int, bytes: u64) -> Result<bool, Gone>;
}

/// The plugin is no longer there, for the reason given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Gone {
    /// Its process died.
    Died(String),
    /// It did not return from a call in time.
    Hung(String),
}

impl From<Gone> for StrategyError {
    fn from(gone: Gone) -> StrategyError {
        match gone {
            Gone::Died(reason) => StrategyError::Died(reason),
            Gone::Hung(reason) => StrategyError::Hung(reason),
        }
    }
}
