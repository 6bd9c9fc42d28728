//! Driver calls by kind: their names, how many were made, and why they fail.

use std::ops::Add;

use serde::{Deserialize, Serialize};

use super::MissingCapabilities;
use oomph_base::Nanos;

oomph_base::named_enum! {
    /// A kind of driver call. Its name is the driver's.
    #[expect(missing_docs, reason = "each value is the driver's own name, see `name`")]
    pub enum CallKind {
        MemAlloc = "cuMemAlloc",
        MemFree = "cuMemFree",
        MemGetInfo = "cuMemGetInfo",
        StreamCreate = "cuStreamCreate",
        StreamSynchronize = "cuStreamSynchronize",
        StreamWaitEvent = "cuStreamWaitEvent",
        CtxSynchronize = "cuCtxSynchronize",
        EventCreate = "cuEventCreate",
        EventRecord = "cuEventRecord",
        EventQuery = "cuEventQuery",
        EventSynchronize = "cuEventSynchronize",
        EventDestroy = "cuEventDestroy",
        AddressReserve = "cuMemAddressReserve",
        AddressFree = "cuMemAddressFree",
        MemCreate = "cuMemCreate",
        MemRelease = "cuMemRelease",
        MemMap = "cuMemMap",
        MemSetAccess = "cuMemSetAccess",
        MemUnmap = "cuMemUnmap",
        PoolCreate = "cuMemPoolCreate",
        PoolDestroy = "cuMemPoolDestroy",
        PoolSetAttribute = "cuMemPoolSetAttribute",
        PoolGetAttribute = "cuMemPoolGetAttribute",
        PoolTrim = "cuMemPoolTrimTo",
        MemAllocAsync = "cuMemAllocFromPoolAsync",
        MemFreeAsync = "cuMemFreeAsync",
        HostAlloc = "cuMemHostAlloc",
        HostFree = "cuMemFreeHost",
        Launch = "cuLaunchKernel",
    }
}

impl CallKind {
    /// The kind with this driver name.
    #[must_use]
    pub fn named(name: &str) -> Option<CallKind> {
        CallKind::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// The call that gives back what this one takes, if it takes something.
    #[must_use]
    pub const fn given_back_by(self) -> Option<CallKind> {
        match self {
            CallKind::MemAlloc => Some(CallKind::MemFree),
            CallKind::EventCreate => Some(CallKind::EventDestroy),
            CallKind::AddressReserve => Some(CallKind::AddressFree),
            CallKind::MemCreate => Some(CallKind::MemRelease),
            CallKind::PoolCreate => Some(CallKind::PoolDestroy),
            CallKind::MemAllocAsync => Some(CallKind::MemFreeAsync),
            CallKind::HostAlloc => Some(CallKind::HostFree),
            _ => None,
        }
    }
}

/// The number of calls and their cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallTally {
    /// Calls, failed ones included.
    pub count: u64,
    /// Calls that failed.
    pub failures: u64,
    /// Time inside the calls.
    pub time: Nanos,
}

impl Add for CallTally {
    type Output = CallTally;
    fn add(self, other: CallTally) -> CallTally {
        CallTally {
            count: self.count + other.count,
            failures: self.failures + other.failures,
            time: self.time + other.time,
        }
    }
}

/// Driver calls by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallLedger {
    tallies: [CallTally; CallKind::ALL.len()],
    total: CallTally,
}

impl CallLedger {
    /// Adds a call.
    pub fn note(&mut self, kind: CallKind, time: Nanos, failed: bool) {
        for tally in [&mut self.tallies[kind as usize], &mut self.total] {
            tally.count += 1;
            tally.failures += u64::from(failed);
            tally.time += time;
        }
    }

    /// Adds the calls of another ledger.
    pub fn absorb(&mut self, other: &CallLedger) {
        for (tally, more) in self.tallies.iter_mut().zip(other.tallies) {
            *tally = *tally + more;
        }
        self.total = self.total + other.total;
    }

    /// Calls of one kind.
    #[must_use]
    pub fn of(&self, kind: CallKind) -> CallTally {
        self.tallies[kind as usize]
    }

    /// All calls.
    #[must_use]
    pub fn total(&self) -> CallTally {
        self.total
    }

    /// The kinds with at least one call.
    pub fn iter(&self) -> impl Iterator<Item = (CallKind, CallTally)> + '_ {
        CallKind::ALL.iter().map(|&kind| (kind, self.of(kind))).filter(|(_, tally)| tally.count > 0)
    }
}

/// Why a driver call failed. Out of memory is a variant of its own because strategies act on it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device has not enough memory left.
    #[error("{call}: out of memory, {requested} bytes requested")]
    OutOfMemory {
        /// Which call.
        call: CallKind,
        /// How much it requested.
        requested: u64,
    },
    /// The call broke one of the driver's rules.
    #[error("{call}: invalid value: {reason}")]
    InvalidValue {
        /// Which call.
        call: CallKind,
        /// Which rule.
        reason: String,
    },
    /// The device lacks an ability.
    #[error(transparent)]
    Unsupported(#[from] MissingCapabilities),
    /// Any other driver error.
    #[error("{call}: {name}{}", if is_sticky(name) { ": the context is lost" } else { "" })]
    Driver {
        /// Which call.
        call: CallKind,
        /// The driver's name for the error.
        name: String,
    },
}

impl DeviceError {
    /// Whether a smaller request, or the same one after a release, could succeed.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, DeviceError::OutOfMemory { .. })
    }

    /// Whether the context is lost, with all memory, streams and events in it: every later call of
    /// this process on this device returns the same error, and only a new process can use the
    /// device again.
    ///
    /// ```
    /// use oomph_alloc::device::{CallKind, DeviceError};
    /// let error = |name: &str| DeviceError::Driver { call: CallKind::MemFree, name: name.to_owned() };
    /// let lost = error("CUDA_ERROR_ILLEGAL_ADDRESS");
    /// assert!(lost.loses_context() && !error("CUDA_ERROR_NOT_SUPPORTED").loses_context());
    /// assert_eq!(lost.to_string(), "cuMemFree: CUDA_ERROR_ILLEGAL_ADDRESS: the context is lost");
    /// ```
    #[must_use]
    pub fn loses_context(&self) -> bool {
        matches!(self, DeviceError::Driver { name, .. } if is_sticky(name))
    }
}

/// The errors after which, according to the driver's manual, the process must be restarted to use
/// CUDA, and those that report a lost context or driver. Kernels raise most of them, so they appear
/// at a later, unrelated call.
const STICKY: [&str; 17] = [
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_EXTERNAL_DEVICE",
];

fn is_sticky(name: &str) -> bool {
    STICKY.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_adds_up() {
        let mut ledger = CallLedger::default();
        ledger.note(CallKind::MemAlloc, Nanos(5), false);
        ledger.note(CallKind::MemAlloc, Nanos(7), true);
        ledger.note(CallKind::MemFree, Nanos(1), false);
        assert_eq!(ledger.of(CallKind::MemAlloc), CallTally { count: 2, failures: 1, time: Nanos(12) });
        assert_eq!(ledger.total().count, ledger.iter().map(|(_, tally)| tally.count).sum::<u64>());
        ledger.absorb(&ledger.clone());
        assert_eq!(ledger.of(CallKind::MemFree), CallTally { count: 2, failures: 0, time: Nanos(2) });
        assert_eq!(ledger.total(), CallTally { count: 6, failures: 2, time: Nanos(26) });
    }
}
