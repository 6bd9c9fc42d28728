//! Collects the trace entries of a pickle while it is read, so that they never exist as dicts.

use std::collections::HashMap;

use super::{
    keys::SnapshotWord,
    pickle::{DictCollector, NodeId, PickleFault, PickleHeap, PickleValue, TextId},
    release::{KeyPlace, KeysSeen},
    snapshot::{Action, StackId, TraceEntry},
};
use crate::interner::Interner;
use oomph_base::{Address, StreamId};

/// The entries in the order of the file. Until [`parse`](super::parse) has read the whole file, the stack of an entry is
/// the number of its list of frames plus one.
pub(crate) struct EntryCollector {
    pub(crate) entries: Vec<TraceEntry>,
    pub(crate) streams: Interner<u64>,
    pub(crate) pools: Interner<(u64, u64)>,
    pub(crate) notes: Interner<[TextId; 3]>,
    /// Counts of unknown actions, by the number of their name.
    pub(crate) unknown: HashMap<TextId, u64>,
    /// The number of entries without a time, and without a stream.
    pub(crate) timeless: u64,
    pub(crate) streamless: u64,
    /// The keys of entries.
    pub(crate) keys: KeysSeen,
}

/// Compile region, user's and internal metadata of an entry that has none.
const EMPTY_NOTE: [TextId; 3] =
    [SnapshotWord::NotApplicable.id(), SnapshotWord::Nothing.id(), SnapshotWord::Nothing.id()];

impl EntryCollector {
    pub(crate) fn new() -> EntryCollector {
        EntryCollector {
            entries: Vec::new(),
            streams: Interner::starting_with(0),
            pools: Interner::starting_with((0, 0)),
            notes: Interner::starting_with(EMPTY_NOTE),
            unknown: HashMap::new(),
            timeless: 0,
            streamless: 0,
            keys: KeysSeen::default(),
        }
    }
}

impl DictCollector for EntryCollector {
    fn collect(&mut self, items: &[PickleValue], heap: &mut PickleHeap) -> Result<Option<u32>, PickleFault> {
        let is_entry = items
            .chunks_exact(2)
            .any(|pair| SnapshotWord::Action.is(pair[0]) && matches!(pair[1], PickleValue::Text(_)));
        if !is_entry {
            return Ok(None);
        }
        let entry = self.entry(items, heap)?;
        let number = self.entries.len() as u32;
        heap.budget.push(&mut self.entries, entry)?;
        Ok(Some(number))
    }
}

impl EntryCollector {
    fn entry(&mut self, items: &[PickleValue], heap: &mut PickleHeap) -> Result<TraceEntry, PickleFault> {
        let mut entry = TraceEntry::default();
        let (mut address, mut device_free, mut size, mut stream, mut time_us) = (None, None, None, None, None);
        let mut name = SnapshotWord::Nothing.id();
        let [mut context, mut remark, mut internal] = EMPTY_NOTE;
        self.keys.look_at(KeyPlace::Entries);
        for pair in items.chunks_exact(2) {
            let PickleValue::Text(key) = pair[0] else { continue };
            let Some(word) = SnapshotWord::of(key) else { continue };
            let value = pair[1];
            self.keys.see(KeyPlace::Entries, word);
            let bits = || value.bits().ok_or_else(|| wrong_kind(key, value));
            match (word, value) {
                (SnapshotWord::Action, PickleValue::Text(text)) => {
                    entry.action = SnapshotWord::action(text);
                    name = text;
                    if let Some(action) = SnapshotWord::of(text) {
                        self.keys.see(KeyPlace::Entries, action);
                    }
                }
                (SnapshotWord::Addr, _) => address = Some(bits()?),
                (SnapshotWord::DeviceFree, _) => device_free = Some(bits()?),
                (SnapshotWord::Size, _) => size = Some(value.unsigned().ok_or_else(|| wrong_kind(key, value))?),
                (SnapshotWord::Stream, _) => stream = Some(bits()?),
                (SnapshotWord::TimeUs, _) => time_us = Some(bits()?),
                (SnapshotWord::Frames, PickleValue::List(frames)) => entry.stack = StackId(frames.0 + 1),
                (SnapshotWord::CompileContext, PickleValue::Text(text)) => context = text,
                (SnapshotWord::UserMetadata, PickleValue::Text(text)) => remark = text,
                (SnapshotWord::InternalMetadata, PickleValue::Text(text)) => internal = text,
                (SnapshotWord::PoolId, PickleValue::Tuple(pool) | PickleValue::List(pool)) => {
                    entry.pool = Some(self.number_pool(pool, heap)?)
                }
                _ => {}
            }
        }
        let place = if entry.action == Action::OutOfMemory { device_free } else { address };
        match place {
            Some(place) => entry.address = Address(place),
            // The free memory of the device is optional, and an unknown action may have no address.
            None if matches!(entry.action, Action::OutOfMemory | Action::Unknown) => {}
            None => return Err(PickleFault::Refused(format!("a trace entry ({}) has no `addr`", entry.action.name()))),
        }
        match size {
            Some(size) => entry.size = size,
            None if entry.action == Action::Unknown => {}
            None => return Err(PickleFault::Refused(format!("a trace entry ({}) has no `size`", entry.action.name()))),
        }
        if entry.action == Action::Unknown {
            heap.budget.charge(if self.unknown.contains_key(&name) { 0 } else { 32 })?;
            *self.unknown.entry(name).or_default() += 1;
        }
        self.timeless += u64::from(time_us.is_none());
        self.streamless += u64::from(stream.is_none());
        entry.time_us = time_us.unwrap_or(0);
        entry.stream = self.number_stream(stream.unwrap_or(0))?;
        let note = self.notes.intern(&[context, remark, internal]);
        if note as usize + 1 == self.notes.items().len() {
            heap.budget.charge(32)?;
        }
        entry.note = note;
        Ok(entry)
    }

    pub(crate) fn number_stream(&mut self, handle: u64) -> Result<StreamId, PickleFault> {
        let too_many = |_| PickleFault::Refused("more than 65,536 streams".to_owned());
        u16::try_from(self.streams.intern(&handle)).map(StreamId).map_err(too_many)
    }

    fn number_pool(&mut self, pool: NodeId, heap: &PickleHeap) -> Result<u16, PickleFault> {
        let pool =
            pool_id(heap, pool).ok_or_else(|| PickleFault::Refused("`pool_id` is not a pair of ints".to_owned()))?;
        u16::try_from(self.pools.intern(&pool)).map_err(|_| PickleFault::Refused("more than 65,536 pools".to_owned()))
    }
}

/// The id of a private pool, a pair.
pub(crate) fn pool_id(heap: &PickleHeap, pair: NodeId) -> Option<(u64, u64)> {
    let mut halves = heap.items(pair).map(PickleValue::bits);
    Some((halves.next()??, halves.next()??))
}

fn wrong_kind(key: TextId, value: PickleValue) -> PickleFault {
    let key = SnapshotWord::TEXTS.get(key.0 as usize).copied().unwrap_or("a key");
    PickleFault::Refused(format!("`{key}` of a trace entry is {}", value.kind()))
}
