//! The books of [`Checked`](super::Checked), kept from requests, results and events alone.

use std::collections::BTreeMap;

use super::checked::{Rule, Violations};
use crate::strategy::{ALIGNMENT, Block, Freed, Refusal, Stats, StrategyError, StrategyEvent, Usage};
use oomph_base::Address;

/// What a strategy's books should say.
#[derive(Clone, Debug, Default)]
pub(super) struct Shadow {
    /// Blocks that nobody else may have, by address.
    held: BTreeMap<Address, Held>,
    usage: Usage,
    live_blocks: u64,
    allocs: u64,
    frees: u64,
    ooms: u64,
    /// Failures that events announced.
    ooms_heard: u64,
    /// Whether the strategy ever said that it took memory.
    takes_memory: bool,
    /// A close failed half-way.
    unknown: bool,
}

/// A block that is live, or freed and waiting for a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) block: Block,
    pub(super) requested: u64,
    pub(super) pending: bool,
}

impl Shadow {
    /// Whether the books mean anything.
    pub(super) fn is_known(&self) -> bool {
        !self.unknown
    }

    /// Live and waiting blocks, in address order.
    pub(super) fn held(&self) -> impl Iterator<Item = &Held> {
        self.held.values()
    }

    /// A block was handed out.
    pub(super) fn served(&mut self, block: Block, requested: u64, violations: &mut Violations) {
        let Block { address, size, .. } = block;
        violations.expect(requested > 0, Rule::Size, || "a request for nothing was served".to_owned());
        violations.expect(size >= requested, Rule::Size, || {
            format!("{size} bytes at {address} for a request of {requested}")
        });
        violations.expect(address != Address::NULL && address.0 % ALIGNMENT == 0, Rule::Alignment, || {
            format!("a block at {address}")
        });
        if let Some(other) = self.overlapping(address, size) {
            let state = if other.pending { "waits for a stream" } else { "is live" };
            violations.add(
                Rule::Overlap,
                format!(
                    "{size} bytes at {address} overlap {} bytes at {}, which {state}",
                    other.block.size, other.block.address
                ),
            );
        }
        self.held.insert(address, Held { block, requested, pending: false });
        self.allocs += 1;
        self.live_blocks += 1;
        self.usage.requested = self.usage.requested.saturating_add(requested);
        self.usage.allocated = self.usage.allocated.saturating_add(size);
        self.usage.active = self.usage.active.saturating_add(size);
    }

    /// A request failed.
    pub(super) fn ran_out(&mut self, refused_by: Refusal) {
        self.ooms += u64::from(refused_by != Refusal::Size);
    }

    /// A live block was given back.
    pub(super) fn freed(&mut self, block: &Block, freed: Freed) {
        self.frees += 1;
        self.live_blocks -= 1;
        if let Some(held) = self.held.get_mut(&block.address) {
            self.usage.allocated = self.usage.allocated.saturating_sub(held.block.size);
            held.pending = true;
        }
        if freed == Freed::Now {
            self.reusable(block.address);
        }
    }

    /// A call with a handle was answered; `was_live` is how things stood before it.
    pub(super) fn answered(
        &self,
        block: &Block,
        was_live: bool,
        error: Option<&StrategyError>,
        violations: &mut Violations,
    ) {
        if self.unknown {
            return;
        }
        let refused = matches!(error, Some(StrategyError::UnknownBlock { .. }));
        let address = block.address;
        violations.expect(!(was_live && refused), Rule::Handle, || format!("the live block at {address} was refused"));
        violations.expect(was_live || refused, Rule::Handle, || {
            format!("a stale or foreign handle for {address} was not refused")
        });
    }

    /// Everything is about to go back.
    pub(super) fn begin_close(&mut self) {
        self.unknown = true;
    }

    /// An event arrived.
    pub(super) fn heard(&mut self, event: StrategyEvent, violations: &mut Violations) {
        match event {
            StrategyEvent::SegmentAlloc { bytes, .. } | StrategyEvent::SegmentMap { bytes, .. } => {
                self.takes_memory = true;
                self.usage.reserved = self.usage.reserved.saturating_add(bytes);
            }
            StrategyEvent::SegmentFree { bytes, .. } | StrategyEvent::SegmentUnmap { bytes, .. } => {
                self.usage.reserved = self.usage.reserved.saturating_sub(bytes);
            }
            StrategyEvent::FreeCompleted { address, requested, .. } => {
                let known = self.held.get(&address).is_some_and(|held| held.pending && held.requested == requested);
                violations.expect(known || self.unknown, Rule::Events, || {
                    format!("a free of {requested} bytes at {address} completed that nobody waited for")
                });
                if known {
                    self.reusable(address);
                }
            }
            StrategyEvent::OutOfMemory { .. } => self.ooms_heard += 1,
            StrategyEvent::Retry { .. } => {}
        }
    }

    /// A driver call failed: an announced release may not have happened, so what the strategy says is taken over.
    pub(super) fn accept_reserved(&mut self, stats: &Stats) {
        self.usage.reserved = stats.current.reserved;
    }

    /// Compares with the strategy's own books.
    pub(super) fn compare(&self, stats: &Stats, device_held: u64, violations: &mut Violations) {
        if self.unknown {
            return;
        }
        let Usage { requested, allocated, active, reserved } = stats.current;
        let mut agree = |name: &str, theirs: u64, ours: u64| {
            violations.expect(theirs == ours, Rule::Books, || format!("{name} is {theirs}, should be {ours}"));
        };
        agree("requested", requested, self.usage.requested);
        agree("allocated", allocated, self.usage.allocated);
        agree("active", active, self.usage.active);
        agree("live_blocks", stats.live_blocks, self.live_blocks);
        agree("allocs", stats.allocs, self.allocs);
        agree("frees", stats.frees, self.frees);
        agree("ooms", stats.ooms, self.ooms);
        violations.expect(self.ooms_heard == self.ooms, Rule::Events, || {
            format!("{} failures were announced, {} happened", self.ooms_heard, self.ooms)
        });
        violations.expect(allocated <= active && active <= reserved, Rule::Books, || {
            format!("allocated {allocated} <= active {active} <= reserved {reserved} does not hold")
        });
        let peaks = [
            (stats.peak.requested, requested),
            (stats.peak.allocated, allocated),
            (stats.peak.active, active),
            (stats.peak.reserved, reserved),
            (stats.peak_segments, stats.segments),
        ];
        violations.expect(peaks.iter().all(|(peak, now)| peak >= now), Rule::Books, || {
            format!("a peak is below the present: {stats:?}")
        });
        // A strategy that neither announces nor counts a segment says that it takes no memory (`null`).
        if self.takes_memory || stats.segments > 0 {
            violations.expect(reserved == self.usage.reserved, Rule::Events, || {
                format!("reserved is {reserved}, events sum to {}", self.usage.reserved)
            });
            violations.expect(reserved <= device_held, Rule::Books, || {
                format!("reserved is {reserved}, the device holds {device_held}")
            });
        }
    }

    /// Whether the handle is that of a live block.
    pub(super) fn is_live(&self, block: &Block) -> bool {
        self.held.get(&block.address).is_some_and(|held| {
            !held.pending && held.block.slot == block.slot && held.block.generation == block.generation
        })
    }

    fn reusable(&mut self, address: Address) {
        if let Some(held) = self.held.remove(&address) {
            self.usage.active = self.usage.active.saturating_sub(held.block.size);
            self.usage.requested = self.usage.requested.saturating_sub(held.requested);
        }
    }

    fn overlapping(&self, address: Address, size: u64) -> Option<Held> {
        let end = address.0.saturating_add(size);
        let (_, last) = self.held.range(..Address(end)).next_back()?;
        let last_end = last.block.address.0.saturating_add(last.block.size);
        (last_end > address.0).then_some(*last)
    }
}
