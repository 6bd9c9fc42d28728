//! Writes a [`Snapshot`] as PyTorch of its release would: a pickle of protocol 4 with the same keys and types, so that
//! Python's `pickle.load` and the viewer at pytorch.org/memory_viz open it.
//!
//! It uses only opcodes that real files contain. Stacks, frames and texts are written once and then referenced, as in
//! PyTorch.

use std::{
    collections::HashMap,
    io::{self, Write},
    sync::Arc,
};

use super::{
    Action, Annotation, AnnotationEdge, EntryNote, HostSegment, RecordedSettings, RecordedValue, Segment, SegmentKind,
    Snapshot, SnapshotBlock, SnapshotBlockState, StackId, TraceEntry, keys::SnapshotWord, pickle::opcode as op,
    release::writes,
};
use oomph_base::Progress;
use oomph_pytorch::Release;

/// Python appends this many items to a list at a time.
const BATCH: usize = 1000;

impl Snapshot {
    /// Writes the snapshot; `to` should be buffered.
    ///
    /// ```
    /// use oomph_base::NoProgress;
    /// use oomph_trace::torch::Snapshot;
    /// let mut file = Vec::new();
    /// Snapshot::default().write(&mut file, &NoProgress)?;
    /// assert!(Snapshot::read(&file[..]).is_ok());
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn write(&self, to: impl Write, progress: &dyn Progress) -> io::Result<()> {
        progress.begin_stage("writing the file", self.traces.iter().map(|trace| trace.len() as u64).sum());
        let mut writer = SnapshotWriter {
            snapshot: self,
            release: self.release.assumed(),
            to,
            progress,
            memorised: 0,
            words: [None; SnapshotWord::TEXTS.len()],
            texts: HashMap::new(),
            frames: vec![None; self.stacks.all_frames().len()],
            stacks: vec![None; self.stacks.count()],
        };
        writer.write()
    }
}

struct SnapshotWriter<'a, W> {
    snapshot: &'a Snapshot,
    release: Release,
    to: W,
    progress: &'a dyn Progress,
    /// The number of memoized values.
    memorised: u32,
    words: [Option<u32>; SnapshotWord::TEXTS.len()],
    texts: HashMap<&'a str, u32>,
    frames: Vec<Option<u32>>,
    stacks: Vec<Option<u32>>,
}

impl<'a, W: Write> SnapshotWriter<'a, W> {
    fn write(&mut self) -> io::Result<()> {
        let snapshot = self.snapshot;
        self.to.write_all(&[op::PROTO, 4])?;
        self.open_dict()?;
        self.word(SnapshotWord::Segments)?;
        self.list(&snapshot.segments, Self::segment)?;
        self.word(SnapshotWord::DeviceTraces)?;
        self.list(&snapshot.traces, |writer, trace| writer.trace(trace))?;
        if self.has(SnapshotWord::AllocatorSettings) {
            self.word(SnapshotWord::AllocatorSettings)?;
            self.settings(&snapshot.settings)?;
        }
        if self.has(SnapshotWord::ExternalAnnotations) {
            self.word(SnapshotWord::ExternalAnnotations)?;
            self.list(&snapshot.annotations, Self::annotation)?;
        }
        if self.has(SnapshotWord::HostSegments) {
            self.word(SnapshotWord::HostSegments)?;
            self.list(&snapshot.host.segments, Self::host_segment)?;
            self.word(SnapshotWord::HostTraces)?;
            self.trace(&snapshot.host.entries)?;
        }
        self.close_dict()?;
        self.code(op::STOP)?;
        self.to.flush()
    }

    /// Whether the release of the snapshot writes a key.
    fn has(&self, word: SnapshotWord) -> bool {
        writes(self.release, word)
    }

    /// A buffer of page-locked memory, which PyTorch writes like a segment with one block.
    fn host_segment(&mut self, segment: &'a HostSegment) -> io::Result<()> {
        let HostSegment { address, size, state } = *segment;
        let allocated = if state == SnapshotBlockState::Allocated { size } else { 0 };
        let active = if state == SnapshotBlockState::Inactive { 0 } else { size };
        self.open_dict()?;
        self.number(SnapshotWord::Address, address.0)?;
        self.number(SnapshotWord::TotalSize, size)?;
        self.number(SnapshotWord::AllocatedSize, allocated)?;
        self.number(SnapshotWord::ActiveSize, active)?;
        self.close_dict()
    }

    fn segment(&mut self, segment: &'a Segment) -> io::Result<()> {
        self.open_dict()?;
        self.number(SnapshotWord::Device, segment.device.into())?;
        self.number(SnapshotWord::Address, segment.address.0)?;
        self.number(SnapshotWord::TotalSize, segment.total_size)?;
        self.number(SnapshotWord::AllocatedSize, segment.allocated_size())?;
        self.number(SnapshotWord::ActiveSize, segment.active_size())?;
        self.number(SnapshotWord::RequestedSize, segment.requested_size())?;
        self.number(SnapshotWord::Stream, self.stream_handle(segment.stream.index()))?;
        self.word(SnapshotWord::SegmentType)?;
        self.word(match segment.kind {
            SegmentKind::Small => SnapshotWord::Small,
            SegmentKind::Large => SnapshotWord::Large,
        })?;
        if self.has(SnapshotWord::SegmentPoolId) {
            self.word(SnapshotWord::SegmentPoolId)?;
            self.pool(segment.pool)?;
            self.word(SnapshotWord::IsExpandable)?;
            self.bool(segment.expandable)?;
            self.word(SnapshotWord::Frames)?;
            self.stack(segment.stack)?;
        }
        self.word(SnapshotWord::Blocks)?;
        self.list(&segment.blocks, Self::block)?;
        self.close_dict()
    }

    fn block(&mut self, block: &'a SnapshotBlock) -> io::Result<()> {
        self.open_dict()?;
        // 2.0 has the size, and what it calls the history.
        let is_numbered = self.has(SnapshotWord::IsExpandable);
        if is_numbered {
            self.number(SnapshotWord::Address, block.address.0)?;
        }
        self.number(SnapshotWord::Size, block.size)?;
        self.number(SnapshotWord::RequestedSize, block.requested_size)?;
        self.word(SnapshotWord::State)?;
        self.word(match block.state {
            SnapshotBlockState::Allocated => SnapshotWord::ActiveAllocated,
            SnapshotBlockState::PendingFree => SnapshotWord::ActivePendingFree,
            SnapshotBlockState::Inactive => SnapshotWord::Inactive,
        })?;
        if is_numbered {
            self.word(SnapshotWord::Frames)?;
            self.stack(block.stack)?;
        } else {
            self.word(SnapshotWord::History)?;
            self.list(std::slice::from_ref(block), Self::history)?;
        }
        self.close_dict()
    }

    fn history(&mut self, block: &'a SnapshotBlock) -> io::Result<()> {
        self.open_dict()?;
        self.number(SnapshotWord::Addr, block.address.0)?;
        self.number(SnapshotWord::RealSize, block.requested_size)?;
        self.word(SnapshotWord::Frames)?;
        self.stack(block.stack)?;
        self.close_dict()
    }

    fn entry(&mut self, entry: &'a TraceEntry) -> io::Result<()> {
        self.open_dict()?;
        self.word(SnapshotWord::Action)?;
        match entry.action.word() {
            Some(word) => self.word(word)?,
            None => self.text(Action::Unknown.name())?,
        }
        let place = if entry.action == Action::OutOfMemory { SnapshotWord::DeviceFree } else { SnapshotWord::Addr };
        self.number(place, entry.address.0)?;
        self.number(SnapshotWord::Size, entry.size)?;
        self.number(SnapshotWord::Stream, self.stream_handle(entry.stream.index()))?;
        if self.has(SnapshotWord::TimeUs) {
            self.number(SnapshotWord::TimeUs, entry.time_us)?;
        }
        self.entry_note(self.snapshot.notes.get(entry.note as usize))?;
        if self.has(SnapshotWord::PoolId) {
            let pool = entry.pool.and_then(|pool| self.snapshot.pools.get(pool as usize));
            self.word(SnapshotWord::PoolId)?;
            self.pool(pool.copied().unwrap_or_default())?;
        }
        // PyTorch omits the key if it recorded no stacks.
        if self.stacks.len() > 1 {
            self.word(SnapshotWord::Frames)?;
            self.stack(entry.stack)?;
        }
        self.close_dict()
    }

    fn entry_note(&mut self, note: Option<&'a EntryNote>) -> io::Result<()> {
        if self.has(SnapshotWord::CompileContext) {
            self.word(SnapshotWord::CompileContext)?;
            self.text(note.map_or(SnapshotWord::NotApplicable.text(), |note| &note.compile_context))?;
        }
        if self.has(SnapshotWord::UserMetadata) {
            self.word(SnapshotWord::UserMetadata)?;
            self.text(note.map_or("", |note| &note.user_metadata))?;
        }
        match note.filter(|note| !note.internal_metadata.is_empty() && self.has(SnapshotWord::InternalMetadata)) {
            Some(note) => {
                self.word(SnapshotWord::InternalMetadata)?;
                self.text(&note.internal_metadata)
            }
            None => Ok(()),
        }
    }

    fn annotation(&mut self, annotation: &'a Annotation) -> io::Result<()> {
        self.open_dict()?;
        self.word(SnapshotWord::Stage)?;
        self.word(match annotation.stage {
            AnnotationEdge::Start => SnapshotWord::Start,
            AnnotationEdge::End => SnapshotWord::End,
        })?;
        self.word(SnapshotWord::Name)?;
        self.text(annotation.name.raw())?;
        if let Some(device) = annotation.device {
            self.number(SnapshotWord::Device, device.into())?;
        }
        self.number(SnapshotWord::TimeUs, annotation.time_us)?;
        self.close_dict()
    }

    fn settings(&mut self, settings: &'a RecordedSettings) -> io::Result<()> {
        self.open_dict()?;
        for (name, setting) in &settings.values {
            self.text(name)?;
            match setting {
                RecordedValue::Bool(value) => self.bool(*value)?,
                RecordedValue::Int(value) => self.integer((*value).into())?,
                RecordedValue::Float(value) => {
                    self.code(op::BINFLOAT)?;
                    self.to.write_all(&value.to_be_bytes())?;
                }
                RecordedValue::Text(text) => self.text(text)?,
                RecordedValue::Table(rows) => self.table(rows)?,
            }
        }
        self.close_dict()
    }

    fn table(&mut self, rows: &'a [(Arc<str>, i64)]) -> io::Result<()> {
        self.open_dict()?;
        for (name, value) in rows {
            self.text(name)?;
            self.integer((*value).into())?;
        }
        self.close_dict()
    }

    fn stack(&mut self, stack: StackId) -> io::Result<()> {
        let snapshot = self.snapshot;
        let frames = snapshot.stacks.members(stack);
        if frames.is_empty() {
            return self.code(op::EMPTY_LIST);
        }
        if let Some(number) = self.stacks[stack.0 as usize] {
            return self.recall(number);
        }
        self.list(frames, Self::frame)?;
        self.stacks[stack.0 as usize] = Some(self.memorise()?);
        Ok(())
    }

    fn frame(&mut self, frame: &'a u32) -> io::Result<()> {
        let place = *frame as usize;
        if let Some(number) = self.frames[place] {
            return self.recall(number);
        }
        let frame = &self.snapshot.stacks.all_frames()[place];
        self.open_dict()?;
        self.word(SnapshotWord::Name)?;
        self.text(&frame.name)?;
        self.word(SnapshotWord::Filename)?;
        self.text(&frame.filename)?;
        self.number(SnapshotWord::Line, frame.line.into())?;
        self.close_dict()?;
        self.frames[place] = Some(self.memorise()?);
        Ok(())
    }

    fn stream_handle(&self, stream: usize) -> u64 {
        self.snapshot.streams.get(stream).copied().unwrap_or(stream as u64)
    }

    fn list<T>(&mut self, items: &'a [T], mut write: impl FnMut(&mut Self, &'a T) -> io::Result<()>) -> io::Result<()> {
        self.code(op::EMPTY_LIST)?;
        items.chunks(BATCH).try_for_each(|batch| self.batch(batch, &mut write))
    }

    /// Like [`list`](SnapshotWriter::list) for entries, with progress.
    fn trace(&mut self, entries: &'a [TraceEntry]) -> io::Result<()> {
        self.code(op::EMPTY_LIST)?;
        for batch in entries.chunks(BATCH) {
            self.batch(batch, &mut Self::entry)?;
            self.progress.advance(batch.len() as u64);
        }
        Ok(())
    }

    fn batch<T>(
        &mut self,
        items: &'a [T],
        write: &mut impl FnMut(&mut Self, &'a T) -> io::Result<()>,
    ) -> io::Result<()> {
        self.code(op::MARK)?;
        for item in items {
            write(self, item)?;
        }
        self.code(op::APPENDS)
    }

    fn open_dict(&mut self) -> io::Result<()> {
        self.to.write_all(&[op::EMPTY_DICT, op::MARK])
    }

    fn close_dict(&mut self) -> io::Result<()> {
        self.code(op::SETITEMS)
    }

    fn number(&mut self, key: SnapshotWord, number: u64) -> io::Result<()> {
        self.word(key)?;
        self.integer(number.into())
    }

    fn pool(&mut self, pool: (u64, u64)) -> io::Result<()> {
        self.integer(pool.0.into())?;
        self.integer(pool.1.into())?;
        self.code(op::TUPLE2)
    }

    fn bool(&mut self, value: bool) -> io::Result<()> {
        self.code(if value { op::NEWTRUE } else { op::NEWFALSE })
    }

    /// In the shortest form, as Python does.
    fn integer(&mut self, number: i128) -> io::Result<()> {
        if let Ok(byte) = u8::try_from(number) {
            return self.to.write_all(&[op::BININT1, byte]);
        }
        if let Ok(short) = u16::try_from(number) {
            self.code(op::BININT2)?;
            return self.to.write_all(&short.to_le_bytes());
        }
        if let Ok(int) = i32::try_from(number) {
            self.code(op::BININT)?;
            return self.to.write_all(&int.to_le_bytes());
        }
        // One more bit for the sign.
        let bits = i128::BITS - if number < 0 { number.leading_ones() } else { number.leading_zeros() } + 1;
        let length = bits.div_ceil(8) as usize;
        self.to.write_all(&[op::LONG1, length as u8])?;
        self.to.write_all(&number.to_le_bytes()[..length])
    }

    fn word(&mut self, word: SnapshotWord) -> io::Result<()> {
        if let Some(number) = self.words[word as usize] {
            return self.recall(number);
        }
        self.plain_text(word.text())?;
        self.words[word as usize] = Some(self.memorise()?);
        Ok(())
    }

    fn text(&mut self, text: &'a str) -> io::Result<()> {
        if let Some(&number) = self.texts.get(text) {
            return self.recall(number);
        }
        self.plain_text(text)?;
        let number = self.memorise()?;
        self.texts.insert(text, number);
        Ok(())
    }

    fn plain_text(&mut self, text: &str) -> io::Result<()> {
        if let Ok(length) = u8::try_from(text.len()) {
            self.to.write_all(&[op::SHORT_BINUNICODE, length])?;
        } else {
            let too_long = |_| io::Error::new(io::ErrorKind::InvalidInput, "a text of more than 4 GiB");
            self.code(op::BINUNICODE)?;
            self.to.write_all(&u32::try_from(text.len()).map_err(too_long)?.to_le_bytes())?;
        }
        self.to.write_all(text.as_bytes())
    }

    fn memorise(&mut self) -> io::Result<u32> {
        self.code(op::MEMOIZE)?;
        let number = self.memorised;
        self.memorised += 1;
        Ok(number)
    }

    fn recall(&mut self, number: u32) -> io::Result<()> {
        match u8::try_from(number) {
            Ok(short) => self.to.write_all(&[op::BINGET, short]),
            Err(_) => {
                self.code(op::LONG_BINGET)?;
                self.to.write_all(&number.to_le_bytes())
            }
        }
    }

    fn code(&mut self, code: u8) -> io::Result<()> {
        self.to.write_all(&[code])
    }
}
