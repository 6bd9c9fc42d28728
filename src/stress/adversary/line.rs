//! Addresses on one line, whatever pieces of the address space they come from.

use std::collections::BTreeMap;

use crate::{
    base::Address,
    strategy::{Block, EventSink, StrategyEvent},
};

/// Gives every allocation from the device its place on one line, in the order in which they come, and every block the
/// place of its allocation plus its offset there. Blocks in memory that is mapped page by page, or that only the driver
/// knows, keep their addresses.
///
/// Listens to a strategy's events. Where the driver puts allocations so does not matter, and a contest goes the same way
/// on every device.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// By address: size, and place on the line.
    segments: BTreeMap<u64, (u64, u64)>,
    end: u64,
    extent: u64,
    has_strangers: bool,
}

impl Line {
    /// Where a block lies.
    #[must_use]
    pub fn place(&self, address: Address) -> u64 {
        self.place_in_segment(address).unwrap_or(address.0)
    }

    /// Notes that a block was handed out, and says where it lies.
    pub fn settle(&mut self, block: &Block) -> u64 {
        match self.place_in_segment(block.address) {
            Some(place) => {
                self.extent = self.extent.max(place + block.size);
                place
            }
            None => {
                self.has_strangers = true;
                block.address.0
            }
        }
    }

    /// From the start of the line to the end of the highest block there ever was; `None` where blocks lay elsewhere. An
    /// allocation that went back keeps its place, so this counts what was ever touched.
    #[must_use]
    pub fn extent(&self) -> Option<u64> {
        (!self.has_strangers).then_some(self.extent)
    }

    fn place_in_segment(&self, address: Address) -> Option<u64> {
        let (&start, &(bytes, place)) = self.segments.range(..=address.0).next_back()?;
        (address.0 - start < bytes).then(|| place + (address.0 - start))
    }
}

impl EventSink for Line {
    fn event(&mut self, event: StrategyEvent) {
        match event {
            StrategyEvent::SegmentAlloc { address, bytes, .. } => {
                self.segments.insert(address.0, (bytes, self.end));
                self.end += bytes;
            }
            StrategyEvent::SegmentFree { address, .. } => {
                self.segments.remove(&address.0);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::StreamId;

    fn block(address: u64, size: u64) -> Block {
        Block { address: Address(address), size, slot: 0, generation: 0 }
    }

    fn came(address: u64, bytes: u64) -> StrategyEvent {
        StrategyEvent::SegmentAlloc { address: Address(address), bytes, stream: StreamId::DEFAULT }
    }

    #[test]
    fn segments_lie_behind_one_another_in_the_order_in_which_they_came() {
        let mut line = Line::default();
        line.event(came(9000, 1000));
        line.event(came(2000, 500));
        assert_eq!(line.settle(&block(9000, 10)), 0);
        assert_eq!(line.settle(&block(2400, 100)), 1400);
        assert_eq!(line.settle(&block(9990, 10)), 990);
        assert_eq!((line.place(Address(2000)), line.extent()), (1000, Some(1500)));
    }

    #[test]
    fn a_place_is_not_given_twice_and_strangers_keep_their_addresses() {
        let mut line = Line::default();
        line.event(came(1000, 100));
        line.event(StrategyEvent::SegmentFree { address: Address(1000), bytes: 100, stream: StreamId::DEFAULT });
        line.event(came(1000, 50));
        assert_eq!((line.settle(&block(1000, 50)), line.extent()), (100, Some(150)));
        assert_eq!((line.settle(&block(1050, 50)), line.extent()), (1050, None));
    }
}
