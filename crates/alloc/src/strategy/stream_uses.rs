//! Which other streams use a block: what `record_stream` leaves behind until the block is freed. For strategies whose
//! blocks have room for one 32-bit entry.

use oomph_base::StreamId;

/// The streams that use one block beside its own.
#[derive(Clone, Debug, Default)]
pub(super) struct Uses {
    /// In ascending order.
    pub(super) streams: Vec<StreamId>,
    /// Those recorded while a stream was captured: a block freed inside the capture does not wait for them. PyTorch
    /// forgets to drop this note when the block is freed outside, so that a later block at the same place in host
    /// memory inherits it; that is not modelled.
    captured: Vec<StreamId>,
}

/// The uses of all blocks that have any.
#[derive(Clone, Debug, Default)]
pub(super) struct StreamUses {
    entries: Vec<Uses>,
    vacant: Vec<u32>,
}

impl StreamUses {
    /// An empty entry.
    pub(super) fn add(&mut self) -> u32 {
        self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(Uses::default());
            (self.entries.len() - 1) as u32
        })
    }

    /// Vacates an entry.
    pub(super) fn remove(&mut self, entry: u32) {
        self.entries[entry as usize].streams.clear();
        self.entries[entry as usize].captured.clear();
        self.vacant.push(entry);
    }

    /// Notes a use.
    pub(super) fn note(&mut self, entry: u32, stream: StreamId, capturing: bool) {
        let uses = &mut self.entries[entry as usize];
        insert_sorted(&mut uses.streams, stream);
        if capturing {
            insert_sorted(&mut uses.captured, stream);
        }
    }

    /// The streams in an entry.
    pub(super) fn streams(&self, entry: u32) -> &[StreamId] {
        self.entries.get(entry as usize).map_or(&[], |uses| &uses.streams)
    }

    /// Drops the streams that were recorded inside a capture, which is over.
    pub(super) fn end_capture(&mut self, entry: u32) {
        let uses = &mut self.entries[entry as usize];
        let captured = std::mem::take(&mut uses.captured);
        uses.streams.retain(|stream| !captured.contains(stream));
    }
}

/// Adds a stream to a sorted list, once.
pub(super) fn insert_sorted(streams: &mut Vec<StreamId>, stream: StreamId) {
    if let Err(place) = streams.binary_search(&stream) {
        streams.insert(place, stream);
    }
}
