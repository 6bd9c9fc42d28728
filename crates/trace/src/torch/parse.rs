//! Makes a [`Snapshot`] of the values of a pickle, and lists what is missing.

use std::{
    collections::{HashMap, HashSet},
    io::Read,
    ops::Range,
    sync::Arc,
};

use super::{
    Annotation, AnnotationEdge, EntryNote, HostSegment, RecordedSettings, RecordedValue, Segment, SegmentKind,
    SettingsOrigin, Snapshot, SnapshotBlock, SnapshotBlockState, StackFrame, StackId, Stacks,
    collect::{EntryCollector, pool_id},
    keys::SnapshotWord,
    pickle::{self, NodeId, PickleError, PickleFault, PickleHeap, PickleValue, TextId},
    release::{KeyPlace, KeysSeen, is_expected},
};
use crate::memory_budget::{MemoryBudget, OutOfBudget};
use oomph_base::{Address, FileText, StreamId, escaped};
use oomph_pytorch::{MIN_BLOCK_SIZE, SMALL_BUFFER};

/// A snapshot that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The pickle is damaged, or not plain data.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// Valid data, but not a memory snapshot.
    #[error("not a PyTorch memory snapshot: {0}")]
    Shape(String),
    /// The file needs too much memory.
    #[error(transparent)]
    OutOfBudget(#[from] OutOfBudget),
}

impl Snapshot {
    /// Reads a pickled snapshot, or a pickled list of segments as older tools write it. It executes nothing.
    ///
    /// ```
    /// use oomph_trace::torch::Snapshot;
    /// let complaint = Snapshot::read(&b"\x80\x04cos\nsystem\n."[..]).unwrap_err();
    /// assert_eq!(
    ///     complaint.to_string(),
    ///     "byte 2: opcode GLOBAL (0x63) is refused: it does not occur in plain data, and pickles are never run"
    /// );
    /// ```
    pub fn read(reader: impl Read) -> Result<Snapshot, SnapshotError> {
        Snapshot::read_within(reader, MemoryBudget::DEFAULT)
    }

    pub(crate) fn read_within(reader: impl Read, budget: MemoryBudget) -> Result<Snapshot, SnapshotError> {
        let mut entries = EntryCollector::new();
        let (heap, root) = pickle::load(reader, SnapshotWord::TEXTS, budget, &mut entries)?;
        let parser = SnapshotParser {
            budget: heap.budget,
            heap: &heap,
            entries,
            stacks: Stacks::default(),
            known_stacks: HashMap::new(),
            known_frames: HashMap::new(),
            block_lists: HashSet::new(),
            omissions: OmissionCounts::default(),
            keys: KeysSeen::default(),
            odd_sizes: false,
        };
        parser.snapshot(root)
    }
}

/// The entries of each device, and those of the host.
type TracesAndHost = (Vec<Vec<super::TraceEntry>>, Vec<super::TraceEntry>);

/// Counts keys that older versions did not write.
#[derive(Default)]
struct OmissionCounts {
    counts: Vec<(Option<SnapshotWord>, &'static str, u64)>,
}

impl OmissionCounts {
    fn count(&mut self, sentence: &'static str) {
        self.count_key(None, sentence);
    }

    /// Counts a key that is new in one of the known releases.
    fn count_key(&mut self, word: Option<SnapshotWord>, sentence: &'static str) {
        match self.counts.iter_mut().find(|(_, known, _)| *known == sentence) {
            Some((.., count)) => *count += 1,
            None => self.counts.push((word, sentence, 1)),
        }
    }
}

struct SnapshotParser<'a> {
    heap: &'a PickleHeap,
    budget: MemoryBudget,
    entries: EntryCollector,
    stacks: Stacks,
    /// By the contents of the list, see [`PickleHeap::contents`].
    known_stacks: HashMap<(u32, u32), StackId>,
    known_frames: HashMap<NodeId, u32>,
    /// The lists of blocks so far. A pickle can name one list in many segments, which a small file must not multiply.
    block_lists: HashSet<NodeId>,
    omissions: OmissionCounts,
    keys: KeysSeen,
    /// Whether a block has a size that is no multiple of 512.
    odd_sizes: bool,
}

impl SnapshotParser<'_> {
    fn snapshot(mut self, root: PickleValue) -> Result<Snapshot, SnapshotError> {
        let mut snapshot = Snapshot::default();
        match root {
            PickleValue::List(segments) => {
                snapshot.segments = self.segments(segments)?;
                snapshot.missing.push("a bare list of segments: no history and no settings".to_owned());
                snapshot.settings_from = SettingsOrigin::Unknown;
            }
            PickleValue::Dict(top) => self.top_level(top, &mut snapshot)?,
            other => {
                return Err(SnapshotError::Shape(format!(
                    "the outermost value is {}, not a dict or a list of segments",
                    other.kind()
                )));
            }
        }
        if snapshot.settings_from == SettingsOrigin::Unknown {
            snapshot.settings = snapshot.inferred_settings();
        }
        let release = self.keys.with(&self.entries.keys).release();
        snapshot.release = release.narrowed_by(&snapshot.settings, self.odd_sizes);
        self.say_what_is_missing(&mut snapshot);
        snapshot.stacks = self.stacks;
        snapshot.streams = self.entries.streams.into_items();
        snapshot.pools = self.entries.pools.into_items();
        // Pools of host memory come last, and no entry of a device has them.
        let used = snapshot.traces.iter().flatten().filter_map(|entry| entry.pool).max().unwrap_or(0);
        snapshot.pools.truncate(usize::from(used) + 1);
        let text = |text: TextId| Arc::clone(self.heap.text(text));
        let note = |&[context, remark, internal]: &[TextId; 3]| EntryNote {
            compile_context: text(context),
            user_metadata: text(remark),
            internal_metadata: text(internal),
        };
        snapshot.notes = self.entries.notes.items().iter().map(note).collect();
        Ok(snapshot)
    }

    fn top_level(&mut self, top: NodeId, snapshot: &mut Snapshot) -> Result<(), SnapshotError> {
        let segments = self.heap.get(top, SnapshotWord::Segments.id());
        let traces = self.heap.get(top, SnapshotWord::DeviceTraces.id());
        match segments {
            Some(segments) => snapshot.segments = self.segments(self.list(segments, "segments")?)?,
            None if traces.is_none() => {
                return Err(SnapshotError::Shape("a dict with neither `segments` nor `device_traces`".to_owned()));
            }
            None => snapshot.missing.push("no `segments`: the final state is unknown".to_owned()),
        }
        self.look_at_dict(top, KeyPlace::TopLevel);
        let host_traces = match self.heap.get(top, SnapshotWord::HostTraces.id()) {
            Some(traces) => Some(self.list(traces, "host_traces")?),
            None => None,
        };
        match traces {
            Some(traces) => {
                let traces = self.list(traces, "device_traces")?;
                (snapshot.traces, snapshot.host.entries) = self.traces(traces, host_traces)?;
            }
            None => snapshot.missing.push("no `device_traces`: what happened is unknown".to_owned()),
        }
        if let Some(segments) = self.heap.get(top, SnapshotWord::HostSegments.id()) {
            snapshot.host.segments = self.host_segments(self.list(segments, "host_segments")?)?;
        }
        snapshot.settings_from = SettingsOrigin::Unknown;
        if let Some(PickleValue::Dict(settings)) = self.heap.get(top, SnapshotWord::AllocatorSettings.id()) {
            snapshot.settings = self.settings(settings)?;
            snapshot.settings_from = SettingsOrigin::File;
        }
        if let Some(annotations) = self.heap.get(top, SnapshotWord::ExternalAnnotations.id()) {
            snapshot.annotations = self.annotations(self.list(annotations, "external_annotations")?)?;
        }
        Ok(())
    }

    /// Notes which keys of a dict tell the release.
    fn look_at_dict(&mut self, dict: NodeId, place: KeyPlace) {
        self.keys.look_at(place);
        for word in KeysSeen::telling(place) {
            if self.heap.get(dict, word.id()).is_some() {
                self.keys.see(place, word);
            }
        }
    }

    /// Keys that the release does not write yet are no reason for doubt.
    fn say_what_is_missing(&self, snapshot: &mut Snapshot) {
        let entries = &self.entries;
        let Snapshot { release, missing, not_yet, .. } = snapshot;
        let mut omit = |word: SnapshotWord, sentence: String| match is_expected(word, release) {
            true => missing.push(sentence),
            false => not_yet.push(sentence),
        };
        let is_whole = self.keys.looked_at(KeyPlace::TopLevel);
        if is_whole && snapshot.settings_from == SettingsOrigin::Unknown {
            let sentence = "no `allocator_settings`: taken as PyTorch's defaults";
            omit(SnapshotWord::AllocatorSettings, sentence.to_owned());
        }
        if is_whole && !self.keys.has(KeyPlace::TopLevel, SnapshotWord::ExternalAnnotations) {
            omit(SnapshotWord::ExternalAnnotations, "no `external_annotations`: steps are not marked".to_owned());
        }
        if entries.timeless > 0 {
            omit(SnapshotWord::TimeUs, format!("{} entries without `time_us`: no times", entries.timeless));
        }
        if entries.streamless > 0 {
            let sentence = format!("{} entries without `stream`: taken as the default stream", entries.streamless);
            snapshot.missing.push(sentence);
        }
        let mut unknown: Vec<_> = entries.unknown.iter().collect();
        unknown.sort();
        for (name, count) in unknown {
            let sentence =
                format!("{count} entries with the unknown action `{}`: left out", escaped(self.heap.text(*name)));
            snapshot.missing.push(sentence);
        }
        for (word, sentence, count) in &self.omissions.counts {
            let is_doubt = word.is_none_or(|word| is_expected(word, &snapshot.release));
            let list = if is_doubt { &mut snapshot.missing } else { &mut snapshot.not_yet };
            list.push(format!("{count} {sentence}"));
        }
    }

    /// One list of entries per device, and that of the host. Entries were collected in the order of the file, so each list
    /// is a range of them. An entry in two lists is refused: no allocator writes it.
    fn traces(&mut self, devices: NodeId, host: Option<NodeId>) -> Result<TracesAndHost, SnapshotError> {
        let mut ranges = Vec::new();
        let mut next = 0;
        for (device, trace) in self.heap.items(devices).enumerate() {
            let place = format!("device_traces[{device}]");
            let range = self.range_of(self.list(trace, &place)?, next, &place)?;
            next = range.end.max(next);
            self.budget.push(&mut ranges, range)?;
        }
        let of_devices = ranges.len();
        if let Some(host) = host {
            let range = self.range_of(host, next, "host_traces")?;
            self.budget.push(&mut ranges, range)?;
        }
        let mut all = std::mem::take(&mut self.entries.entries);
        for entry in &mut all {
            entry.stack = match entry.stack.0.checked_sub(1) {
                Some(list) => self.stack(NodeId(list))?,
                None => StackId::NONE,
            };
        }
        // From the back, so that the one long trace of a usual file is not copied.
        let mut traces = Vec::new();
        for range in ranges.into_iter().rev() {
            all.truncate(range.end);
            let trace = if range.start == 0 { std::mem::take(&mut all) } else { all.split_off(range.start) };
            traces.push(trace);
        }
        traces.reverse();
        let host = traces.split_off(of_devices).pop().unwrap_or_default();
        Ok((traces, host))
    }

    /// The numbers of the entries of a list, which begin at `next` or later.
    fn range_of(&self, trace: NodeId, next: usize, place: &str) -> Result<Range<usize>, SnapshotError> {
        let mut range = next..next;
        for (index, entry) in self.heap.items(trace).enumerate() {
            let number = match entry {
                PickleValue::Dict(dict) => self.heap.record(dict),
                _ => None,
            };
            let number = number.ok_or_else(|| shape(place, index, "is not a trace entry"))? as usize;
            if index == 0 && number >= next {
                range = number..number;
            }
            if number != range.end {
                return Err(shape(place, index, "stands in two places"));
            }
            range.end += 1;
        }
        Ok(range)
    }

    /// Buffers of page-locked memory. They are written like segments of a device with one block.
    fn host_segments(&mut self, list: NodeId) -> Result<Vec<HostSegment>, SnapshotError> {
        let mut segments = Vec::new();
        for (index, value) in self.heap.items(list).enumerate() {
            let place = format!("host_segments[{index}]");
            let PickleValue::Dict(dict) = value else { return Err(shape("host_segments", index, "is not a dict")) };
            let address = self.address(dict, SnapshotWord::Address, &place)?;
            let size = self.size(dict, SnapshotWord::TotalSize, &place)?;
            let bytes =
                |word: SnapshotWord| self.heap.get(dict, word.id()).and_then(PickleValue::unsigned).unwrap_or(0);
            let state = if bytes(SnapshotWord::AllocatedSize) > 0 {
                SnapshotBlockState::Allocated
            } else if bytes(SnapshotWord::ActiveSize) > 0 {
                SnapshotBlockState::PendingFree
            } else {
                SnapshotBlockState::Inactive
            };
            self.budget.push(&mut segments, HostSegment { address, size, state })?;
        }
        Ok(segments)
    }

    fn segments(&mut self, list: NodeId) -> Result<Vec<Segment>, SnapshotError> {
        let mut segments = Vec::new();
        for (index, value) in self.heap.items(list).enumerate() {
            let place = format!("segments[{index}]");
            let PickleValue::Dict(dict) = value else { return Err(shape("segments", index, "is not a dict")) };
            let segment = self.segment(dict, &place)?;
            self.budget.push(&mut segments, segment)?;
        }
        Ok(segments)
    }

    fn segment(&mut self, dict: NodeId, place: &str) -> Result<Segment, SnapshotError> {
        let address = self.address(dict, SnapshotWord::Address, place)?;
        let total_size = self.size(dict, SnapshotWord::TotalSize, place)?;
        self.look_at_dict(dict, KeyPlace::Segments);
        let device = match self.heap.get(dict, SnapshotWord::Device.id()) {
            Some(device) => small(device).ok_or_else(|| wrong(place, SnapshotWord::Device, device))?,
            None => {
                self.omissions.count("segments without `device`: taken as device 0");
                0
            }
        };
        let kind = match self.heap.get(dict, SnapshotWord::SegmentType.id()) {
            Some(kind) if SnapshotWord::Small.is(kind) => SegmentKind::Small,
            Some(kind) if SnapshotWord::Large.is(kind) => SegmentKind::Large,
            _ => {
                self.omissions.count("segments without `segment_type`: told by their size");
                kind_by_size(total_size)
            }
        };
        let pool = match self.heap.get(dict, SnapshotWord::SegmentPoolId.id()) {
            Some(PickleValue::Tuple(pair) | PickleValue::List(pair)) => {
                pool_id(self.heap, pair).ok_or_else(|| SnapshotError::Shape(format!("{place}: odd segment_pool_id")))?
            }
            _ => (0, 0),
        };
        let expandable = self.heap.get(dict, SnapshotWord::IsExpandable.id()) == Some(PickleValue::Bool(true));
        let stream = self.stream(dict, place)?;
        let stack = self.frames_of(dict)?;
        let blocks = match self.heap.get(dict, SnapshotWord::Blocks.id()) {
            Some(blocks) => {
                let list = self.list(blocks, place)?;
                if !self.block_lists.insert(list) {
                    return Err(SnapshotError::Shape(format!("{place}: its `blocks` are those of another segment")));
                }
                self.blocks(list, address, place)?
            }
            None => return Err(SnapshotError::Shape(format!("{place}: `blocks` is missing"))),
        };
        Ok(Segment { device, address, total_size, stream, kind, pool, expandable, stack, blocks })
    }

    fn blocks(&mut self, list: NodeId, segment: Address, place: &str) -> Result<Vec<SnapshotBlock>, SnapshotError> {
        let mut blocks = Vec::new();
        let mut end = segment;
        for (index, value) in self.heap.items(list).enumerate() {
            let PickleValue::Dict(dict) = value else { return Err(shape(place, index, "of the blocks is not a dict")) };
            let size = self.size(dict, SnapshotWord::Size, place)?;
            self.look_at_dict(dict, KeyPlace::Blocks);
            self.odd_sizes |= !size.is_multiple_of(MIN_BLOCK_SIZE);
            let address = match self.heap.get(dict, SnapshotWord::Address.id()) {
                Some(address) => Address(address.bits().ok_or_else(|| wrong(place, SnapshotWord::Address, address))?),
                None => {
                    let sentence = "blocks without `address`: taken as lying one behind the other";
                    self.omissions.count_key(Some(SnapshotWord::Address), sentence);
                    end
                }
            };
            end = Address(address.0.saturating_add(size));
            let state = match self.heap.get(dict, SnapshotWord::State.id()) {
                Some(state) if SnapshotWord::ActiveAllocated.is(state) => SnapshotBlockState::Allocated,
                Some(state)
                    if SnapshotWord::ActivePendingFree.is(state) || SnapshotWord::ActiveAwaitingFree.is(state) =>
                {
                    SnapshotBlockState::PendingFree
                }
                Some(state) if SnapshotWord::Inactive.is(state) => SnapshotBlockState::Inactive,
                Some(PickleValue::Text(text)) => {
                    let state = escaped(self.heap.text(text));
                    return Err(shape(place, index, &format!("of the blocks has the unknown state `{state}`")));
                }
                _ => return Err(shape(place, index, "of the blocks has no `state`")),
            };
            let history = self.latest_history(dict);
            let requested = self.heap.get(dict, SnapshotWord::RequestedSize.id());
            let requested = requested
                .or_else(|| self.heap.get(history?, SnapshotWord::RealSize.id()))
                .and_then(PickleValue::unsigned);
            if requested.is_none() && state != SnapshotBlockState::Inactive {
                self.omissions.count("live blocks without `requested_size`: taken as their size");
            }
            let stack = match self.frames_of(dict)? {
                StackId::NONE => history.map_or(Ok(StackId::NONE), |history| self.frames_of(history))?,
                stack => stack,
            };
            let requested_size = requested.unwrap_or(if state == SnapshotBlockState::Inactive { 0 } else { size });
            self.budget.push(&mut blocks, SnapshotBlock { address, size, requested_size, state, stack })?;
        }
        Ok(blocks)
    }

    /// Very old files have this instead of `frames` and `requested_size`.
    fn latest_history(&self, block: NodeId) -> Option<NodeId> {
        match self.heap.get(block, SnapshotWord::History.id())? {
            PickleValue::List(history) => match self.heap.items(history).next()? {
                PickleValue::Dict(latest) => Some(latest),
                _ => None,
            },
            _ => None,
        }
    }

    fn settings(&mut self, dict: NodeId) -> Result<RecordedSettings, SnapshotError> {
        let mut values = Vec::new();
        self.look_at_dict(dict, KeyPlace::Settings);
        for (key, value) in self.heap.pairs(dict) {
            let PickleValue::Text(key) = key else { continue };
            let setting = match value {
                PickleValue::Bool(value) => RecordedValue::Bool(value),
                PickleValue::Int(value) => RecordedValue::Int(value),
                PickleValue::Float(value) => RecordedValue::Float(value),
                PickleValue::Text(text) => RecordedValue::Text(Arc::clone(self.heap.text(text))),
                PickleValue::Dict(table) => RecordedValue::Table(self.table(table)?),
                // A setting of a new kind must not make a recording unreadable.
                PickleValue::None | PickleValue::Unsigned(_) | PickleValue::List(_) | PickleValue::Tuple(_) => continue,
            };
            self.budget.push(&mut values, (Arc::clone(self.heap.text(key)), setting))?;
        }
        Ok(RecordedSettings { values })
    }

    fn table(&mut self, dict: NodeId) -> Result<Vec<(Arc<str>, i64)>, SnapshotError> {
        let mut rows = Vec::new();
        for (key, value) in self.heap.pairs(dict) {
            if let (PickleValue::Text(key), PickleValue::Int(value)) = (key, value) {
                self.budget.push(&mut rows, (Arc::clone(self.heap.text(key)), value))?;
            }
        }
        Ok(rows)
    }

    fn annotations(&mut self, list: NodeId) -> Result<Vec<Annotation>, SnapshotError> {
        let mut annotations = Vec::new();
        for value in self.heap.items(list) {
            let PickleValue::Dict(dict) = value else { continue };
            let get = |word: SnapshotWord| self.heap.get(dict, word.id());
            let stage = match get(SnapshotWord::Stage) {
                Some(stage) if SnapshotWord::Start.is(stage) => AnnotationEdge::Start,
                Some(stage) if SnapshotWord::End.is(stage) => AnnotationEdge::End,
                _ => {
                    self.omissions.count("annotations without a known `stage`: left out");
                    continue;
                }
            };
            let (Some(PickleValue::Text(name)), Some(time_us)) =
                (get(SnapshotWord::Name), get(SnapshotWord::TimeUs).and_then(PickleValue::bits))
            else {
                self.omissions.count("annotations without `name` or `time_us`: left out");
                continue;
            };
            let device = get(SnapshotWord::Device).and_then(small);
            let name = FileText::from(Arc::clone(self.heap.text(name)));
            self.budget.push(&mut annotations, Annotation { name, stage, device, time_us })?;
        }
        Ok(annotations)
    }

    fn frames_of(&mut self, dict: NodeId) -> Result<StackId, SnapshotError> {
        match self.heap.get(dict, SnapshotWord::Frames.id()) {
            Some(PickleValue::List(frames)) => self.stack(frames),
            _ => Ok(StackId::NONE),
        }
    }

    /// Many entries share a list of frames, so each list is parsed once.
    fn stack(&mut self, list: NodeId) -> Result<StackId, SnapshotError> {
        let contents = self.heap.contents(list);
        if let Some(&stack) = self.known_stacks.get(&contents) {
            return Ok(stack);
        }
        let mut frames = Vec::new();
        for frame in self.heap.items(list) {
            if let PickleValue::Dict(dict) = frame {
                let frame = self.frame(dict)?;
                self.budget.push(&mut frames, frame)?;
            }
        }
        // Two maps refer to it.
        self.budget.charge(96)?;
        let stack = self.stacks.intern(&frames);
        self.known_stacks.insert(contents, stack);
        Ok(stack)
    }

    fn frame(&mut self, dict: NodeId) -> Result<u32, SnapshotError> {
        if let Some(&frame) = self.known_frames.get(&dict) {
            return Ok(frame);
        }
        let text = |word: SnapshotWord| match self.heap.get(dict, word.id()) {
            Some(PickleValue::Text(text)) => Arc::clone(self.heap.text(text)),
            _ => "??".into(),
        };
        let line = self.heap.get(dict, SnapshotWord::Line.id()).and_then(small).unwrap_or(0);
        let frame = StackFrame { filename: text(SnapshotWord::Filename), line, name: text(SnapshotWord::Name) };
        // Frames share their names by memo, but each name is compared as a whole: a small file must not repeat a long one.
        self.budget.charge(160 + frame.filename.len() + frame.name.len())?;
        let number = self.stacks.intern_frame(frame);
        self.known_frames.insert(dict, number);
        Ok(number)
    }

    fn list(&self, value: PickleValue, place: &str) -> Result<NodeId, SnapshotError> {
        match value {
            PickleValue::List(node) | PickleValue::Tuple(node) => Ok(node),
            other => Err(SnapshotError::Shape(format!("{place}: a list is expected, this is {}", other.kind()))),
        }
    }

    fn stream(&mut self, dict: NodeId, place: &str) -> Result<StreamId, SnapshotError> {
        let handle = match self.heap.get(dict, SnapshotWord::Stream.id()) {
            Some(stream) => stream.bits().ok_or_else(|| wrong(place, SnapshotWord::Stream, stream))?,
            None => {
                self.omissions.count("segments without `stream`: taken as the default stream");
                0
            }
        };
        self.entries.number_stream(handle).map_err(|fault: PickleFault| SnapshotError::Shape(fault.to_string()))
    }

    fn address(&self, dict: NodeId, word: SnapshotWord, place: &str) -> Result<Address, SnapshotError> {
        let value = self.required(dict, word, place)?;
        value.bits().map(Address).ok_or_else(|| wrong(place, word, value))
    }

    fn size(&self, dict: NodeId, word: SnapshotWord, place: &str) -> Result<u64, SnapshotError> {
        let value = self.required(dict, word, place)?;
        value.unsigned().ok_or_else(|| wrong(place, word, value))
    }

    fn required(&self, dict: NodeId, word: SnapshotWord, place: &str) -> Result<PickleValue, SnapshotError> {
        let missing = || SnapshotError::Shape(format!("{place}: `{}` is missing", word.text()));
        self.heap.get(dict, word.id()).ok_or_else(missing)
    }
}

pub(crate) const fn kind_by_size(bytes: u64) -> SegmentKind {
    if bytes <= SMALL_BUFFER { SegmentKind::Small } else { SegmentKind::Large }
}

fn small(value: PickleValue) -> Option<u32> {
    value.unsigned().and_then(|number| u32::try_from(number).ok())
}

fn shape(place: &str, index: usize, what: &str) -> SnapshotError {
    SnapshotError::Shape(format!("{place}: number {index} {what}"))
}

fn wrong(place: &str, word: SnapshotWord, value: PickleValue) -> SnapshotError {
    SnapshotError::Shape(format!("{place}: `{}` is {}, out of range or of the wrong type", word.text(), value.kind()))
}
