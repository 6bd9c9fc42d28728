//! Stands between a strategy and its device, and lets an affliction happen.

use std::{
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::affliction::{Affliction, Manner};
use crate::{
    base::Address,
    device::{
        CallKind, Device, DeviceError,
        wrap::{DriverAnswer, DriverCall, DriverReply, Interceptor},
    },
};

/// How often a strategy may ask in one call of its own whether events are done, before it counts as spinning. No story here
/// has a hundredth as many events.
const MOST_QUERIES: u64 = 10_000;

/// An affliction at work, and what the strategy has asked of the device so far.
#[derive(Debug, Default)]
pub(super) struct Hindrance {
    affliction: Option<Affliction>,
    /// Calls of the strategy's own: alloc, free, trim ...
    moment: u64,
    asked: Tallies,
    /// Driver calls that were made to fail.
    injected: u64,
    /// Queries during this call of the strategy's.
    queries: u64,
    spins: bool,
    /// What another process has taken.
    taken: Vec<Address>,
    /// How much that is.
    taken_bytes: Arc<AtomicU64>,
}

/// Driver calls by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tallies {
    by_kind: [u64; CallKind::ALL.len()],
}

impl Tallies {
    /// Calls of one kind.
    #[must_use]
    pub fn of(&self, kind: CallKind) -> u64 {
        self.by_kind[kind as usize]
    }

    /// Calls of all kinds.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_kind.iter().sum()
    }

    /// The kinds that were called at all.
    pub fn iter(&self) -> impl Iterator<Item = (CallKind, u64)> + '_ {
        CallKind::ALL.iter().map(|&kind| (kind, self.of(kind))).filter(|&(_, count)| count > 0)
    }

    /// Adds the calls of another run.
    pub fn absorb(&mut self, other: &Tallies) {
        for (count, more) in self.by_kind.iter_mut().zip(other.by_kind) {
            *count += more;
        }
    }

    fn note(&mut self, kind: CallKind) {
        self.by_kind[kind as usize] += 1;
    }
}

impl Hindrance {
    pub(super) fn new(affliction: Option<Affliction>) -> Hindrance {
        Hindrance { affliction, ..Hindrance::default() }
    }

    /// From now on all is well.
    pub(super) fn lift(&mut self, device: &mut dyn Device) {
        self.affliction = None;
        self.return_memory(device);
    }

    /// The strategy is about to be called, on a device that other processes see as well.
    pub(super) fn next_moment(&mut self, device: &mut dyn Device) {
        self.moment += 1;
        self.queries = 0;
        if let Some(Affliction::MemoryTaken { first, count }) = self.affliction {
            if self.moment == first {
                self.take_memory(device);
            } else if self.moment == first.saturating_add(count.get()) {
                self.return_memory(device);
            }
        }
    }

    /// Calls of the strategy's own so far.
    pub(super) fn moments(&self) -> u64 {
        self.moment
    }

    /// What was asked of the device, refused calls included.
    pub(super) fn asked(&self) -> &Tallies {
        &self.asked
    }

    /// Driver calls that were made to fail so far.
    pub(super) fn injected(&self) -> u64 {
        self.injected
    }

    /// How much another process has taken by now.
    pub(super) fn taken_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.taken_bytes)
    }

    /// Whether the strategy asked for an event again and again in one call.
    pub(super) fn spins(&self) -> bool {
        self.spins
    }

    /// All that is free, in as few pieces as the device allows.
    fn take_memory(&mut self, device: &mut dyn Device) {
        let page = device.props().page_bytes.max(1);
        let held = device.held_bytes();
        let mut bytes = device.free_bytes() / page * page;
        while bytes > 0 {
            match device.alloc(bytes) {
                Ok(address) => self.taken.push(address),
                Err(_) => bytes = bytes / 2 / page * page,
            }
            bytes = bytes.min(device.free_bytes() / page * page);
        }
        self.taken_bytes.store(device.held_bytes().saturating_sub(held), Ordering::Relaxed);
    }

    fn return_memory(&mut self, device: &mut dyn Device) {
        for address in std::mem::take(&mut self.taken) {
            // What this handle allocated it can free; if not, the books of the device will show it.
            let _ = device.free(address);
        }
        self.taken_bytes.store(0, Ordering::Relaxed);
    }

    fn is_stuck(&self) -> bool {
        matches!(self.affliction, Some(Affliction::Stuck { first }) if self.moment >= first)
    }
}

impl Interceptor for Hindrance {
    fn before<D: Device + ?Sized>(&mut self, call: &DriverCall, _: &D) -> Result<(), DeviceError> {
        let kind = call.kind();
        self.asked.note(kind);
        let failed = |name: &str| Err(DeviceError::Driver { call: kind, name: name.to_owned() });
        if kind == CallKind::EventQuery {
            self.queries += 1;
            if self.queries > MOST_QUERIES {
                self.spins = true;
                self.injected += 1;
                return failed("CUDA_ERROR_TIMEOUT");
            }
        }
        let waits = [CallKind::EventSynchronize, CallKind::StreamSynchronize, CallKind::CtxSynchronize];
        if self.is_stuck() && waits.contains(&kind) {
            self.injected += 1;
            return failed("CUDA_ERROR_TIMEOUT");
        }
        let Some(Affliction::Calls { kind: of, first, count, manner }) = self.affliction else { return Ok(()) };
        let turn = match of {
            Some(of) if of == kind => self.asked.of(kind),
            Some(_) => return Ok(()),
            None => self.asked.total(),
        };
        let failing: RangeInclusive<u64> = first..=first.saturating_add(count.get() - 1);
        if !failing.contains(&turn) {
            return Ok(());
        }
        self.injected += 1;
        match manner {
            Manner::Error => failed("CUDA_ERROR_UNKNOWN"),
            Manner::OutOfMemory => Err(DeviceError::OutOfMemory { call: kind, requested: call.requested_bytes() }),
        }
    }

    fn after<D: Device + ?Sized>(&mut self, _: &DriverCall, answer: &mut DriverAnswer, _: &D) {
        if let Ok(DriverReply::Ready(ready)) = answer
            && self.is_stuck()
        {
            *ready = false;
        }
    }
}
