//! From the ids of a file, which are never given twice, to dense slots that are recycled.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use crate::{BlockSlot, NO_OPERAND, Place, TraceEventId};
use oomph_base::StreamId;

/// A block that is alive at this line of the file.
#[derive(Clone, Copy)]
pub(super) struct LiveBlock {
    pub(super) slot: BlockSlot,
    pub(super) stream: StreamId,
    pub(super) place: Place,
}

/// The blocks that are alive. Ids ascend in a file, so that one number is enough to know which were given before.
#[derive(Default)]
pub(super) struct LiveBlocks {
    live: HashMap<u64, LiveBlock, BuildHasherDefault<IdHasher>>,
    /// Slots to give again, the latest freed first: a warm table entry, and what the builder does too.
    vacant: Vec<BlockSlot>,
    slots: BlockSlot,
    last_id: Option<u64>,
}

impl LiveBlocks {
    /// A new block takes a slot.
    pub(super) fn admit(&mut self, id: u64, stream: StreamId, place: Place) -> Result<BlockSlot, String> {
        match self.last_id {
            Some(last) if id == last => {
                return Err(format!("block {id} was given already; every block has its own id"));
            }
            Some(last) if id < last => {
                return Err(format!("block {id} after block {last}: ids must ascend"));
            }
            _ => self.last_id = Some(id),
        }
        let slot = match self.vacant.pop() {
            Some(slot) => slot,
            None if self.slots == NO_OPERAND => return Err("too many live blocks".to_owned()),
            None => {
                self.slots += 1;
                self.slots - 1
            }
        };
        self.live.insert(id, LiveBlock { slot, stream, place });
        Ok(slot)
    }

    /// A live block.
    pub(super) fn find(&self, id: u64) -> Result<LiveBlock, String> {
        self.live.get(&id).copied().ok_or_else(|| self.missing(id))
    }

    /// A block gives its slot back.
    pub(super) fn evict(&mut self, id: u64, place: Place) -> Result<LiveBlock, String> {
        let Some(block) = self.live.remove(&id) else { return Err(self.missing(id)) };
        self.vacant.push(block.slot);
        match (block.place == place, place) {
            (true, _) => Ok(block),
            (false, Place::Device) => Err(format!("block {id} is pinned host memory: free it with host_free")),
            (false, Place::Host) => Err(format!("block {id} is device memory: free it with free")),
        }
    }

    #[cold]
    fn missing(&self, id: u64) -> String {
        match self.last_id {
            Some(last) if id <= last => format!("block {id} is not alive: it was freed already or never allocated"),
            _ => format!("block {id} was never allocated before this line"),
        }
    }
}

/// The events that were recorded, numbered densely in the order of their first recording.
#[derive(Default)]
pub(super) struct RecordedEvents {
    numbers: HashMap<u64, TraceEventId, BuildHasherDefault<IdHasher>>,
}

impl RecordedEvents {
    pub(super) fn record(&mut self, id: u64) -> Result<TraceEventId, String> {
        let next = TraceEventId::try_from(self.numbers.len()).map_err(|_| "too many events recorded".to_owned())?;
        Ok(*self.numbers.entry(id).or_insert(next))
    }

    pub(super) fn find(&self, id: u64) -> Result<TraceEventId, String> {
        self.numbers.get(&id).copied().ok_or_else(|| format!("event {id} was never recorded before this line"))
    }
}

/// One multiplication: ids are looked up for every event, and they come nearly in sequence.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        let mixed = id.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
