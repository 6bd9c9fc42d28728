//! Reads a native trace. A file that is read to its end without an error holds together: [`check`](crate::check)
//! finds nothing more.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    path::Path,
};

use super::{
    FIRST_WORD, VERSION,
    line::{Lines, Words, number_in, shown, unknown},
};
use crate::{
    BlockSlot, CHUNK_EVENTS, Category, CollectiveKind, Event, EventReader, MarkKind, NO_OPERAND, Op, OpKind, Place,
    ShapeId, Tables, Tag, TraceError, TraceEventId,
};
use oomph_base::{SiteId, StreamId, TagId, ThreadId, Work};

/// A position in a native file.
pub(crate) struct Reader {
    lines: Lines,
    story: Story,
    name: String,
}

impl Reader {
    /// Reads the first line.
    pub(crate) fn open(path: &Path) -> Result<Reader, TraceError> {
        let mut lines = Lines::open(path)?;
        let Some(line) = lines.next()? else { return Err(lines.refusal("the file is empty".to_owned())) };
        let mut words = Words::of(line);
        if words.next() != Some(FIRST_WORD.as_bytes()) {
            return Err(lines.refusal(format!("not a native trace, which begins with `{}`", super::first_line())));
        }
        let header = words.number::<u64>("the version").and_then(|version| {
            let name = if words.is_empty() { String::new() } else { words.json("the name")? };
            words.end().map(|()| (version, name))
        });
        match header {
            Ok((VERSION, name)) => Ok(Reader { lines, story: Story::default(), name }),
            Ok((version, _)) => Err(lines.refusal(format!(
                "written in version {version} of the trace format; this program reads version {VERSION}"
            ))),
            Err(reason) => Err(lines.complaint(reason)),
        }
    }

    /// What the file calls itself; empty where it does not.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl EventReader for Reader {
    fn read(&mut self, chunk: &mut Vec<Event>) -> Result<(), TraceError> {
        chunk.clear();
        while chunk.len() < CHUNK_EVENTS {
            let Some(line) = self.lines.next()? else {
                return if self.story.has_ended() {
                    Ok(())
                } else {
                    Err(self.lines.refusal(
                        "the file stops without the line `end`: it was cut short, or `end` was forgotten".to_owned(),
                    ))
                };
            };
            match self.story.understand(line) {
                Ok(Some(event)) => chunk.push(event),
                Ok(None) => {}
                Err(reason) => return Err(self.lines.complaint(reason)),
            }
        }
        Ok(())
    }

    fn tables(&self) -> &Tables {
        self.story.tables()
    }

    fn share_read(&self) -> Option<f64> {
        Some(self.lines.share_read())
    }
}

// What the lines of a native trace say, one after the other.

/// The words that a line can begin with, besides the kinds of event.
const DEFINITIONS: [&str; 7] = ["stream", "thread", "tag", "site", "label", "shape", "end"];

const BLOCK: &str = "the block's id";
const EVENT: &str = "the event's number";

/// What the lines so far said.
#[derive(Default)]
pub(crate) struct Story {
    tables: Tables,
    blocks: LiveBlocks,
    recorded: RecordedEvents,
    thread: ThreadId,
    events: u64,
    ended: bool,
}

/// The named fields of an event line. What is not written is zero, except where the event says otherwise.
#[derive(Default)]
struct Fields {
    stream: Option<StreamId>,
    tag: Option<u32>,
    site: Option<u32>,
    label: Option<u32>,
    thread: Option<ThreadId>,
    delta_ns: Option<u32>,
}

impl Fields {
    fn stream(&self) -> StreamId {
        self.stream.unwrap_or(StreamId::DEFAULT)
    }
}

/// Which fields an event takes besides `thread` and `+`.
#[derive(Clone, Copy)]
enum Takes {
    Nothing,
    Stream,
    StreamTagSite,
    Label,
}

impl Takes {
    const fn names(self) -> &'static [&'static str] {
        match self {
            Takes::Nothing => &["thread"],
            Takes::Stream => &["thread", "stream"],
            Takes::StreamTagSite => &["thread", "stream", "tag", "site"],
            Takes::Label => &["thread", "label"],
        }
    }
}

impl Story {
    /// The side tables so far.
    pub(crate) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Whether the last line of the story was read.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// What a line says: an event, or something to remember.
    pub(crate) fn understand(&mut self, line: &[u8]) -> Result<Option<Event>, String> {
        let mut words = Words::of(line);
        let Some(first) = words.next() else { return Ok(None) };
        if self.ended {
            return Err("nothing may follow the line `end`".to_owned());
        }
        let Some(kind) = OpKind::ALL.into_iter().find(|kind| kind.name().as_bytes() == first) else {
            return self.define(first, &mut words).map(|()| None);
        };
        let (op, fields) = match kind {
            OpKind::Alloc => self.alloc(&mut words)?,
            OpKind::Free => self.free(&mut words)?,
            OpKind::Use => self.use_on(&mut words)?,
            OpKind::Work => self.work(&mut words)?,
            OpKind::HostAlloc => self.host_alloc(&mut words)?,
            OpKind::HostFree => {
                let slot = self.blocks.evict(words.number(BLOCK)?, Place::Host)?.slot;
                (Op::HostFree { slot }, self.fields(&mut words, Takes::Nothing)?)
            }
            OpKind::EventRecord => {
                let event = self.recorded.record(words.number(EVENT)?)?;
                let fields = self.fields(&mut words, Takes::Stream)?;
                (Op::EventRecord { event, stream: fields.stream() }, fields)
            }
            OpKind::EventWait => {
                let event = self.recorded.find(words.number(EVENT)?)?;
                let fields = self.fields(&mut words, Takes::Stream)?;
                (Op::EventWait { event, stream: fields.stream() }, fields)
            }
            OpKind::StreamSync => {
                let fields = self.fields(&mut words, Takes::Stream)?;
                (Op::StreamSync { stream: fields.stream() }, fields)
            }
            OpKind::DeviceSync => (Op::DeviceSync, self.fields(&mut words, Takes::Nothing)?),
            OpKind::EmptyCache => (Op::EmptyCache, self.fields(&mut words, Takes::Nothing)?),
            OpKind::Idle => {
                (Op::Idle { nanos: words.number("the time in ns")? }, self.fields(&mut words, Takes::Nothing)?)
            }
            OpKind::Mark => self.mark(&mut words)?,
            OpKind::Collective => self.collective(&mut words)?,
        };
        self.events += 1;
        self.thread = fields.thread.unwrap_or(self.thread);
        Ok(Some(Event { op, delta_ns: fields.delta_ns.unwrap_or(0), thread: self.thread }))
    }

    fn alloc(&mut self, words: &mut Words<'_>) -> Result<(Op, Fields), String> {
        let id = words.number(BLOCK)?;
        let bytes = size(words)?;
        let fields = self.fields(words, Takes::StreamTagSite)?;
        let stream = fields.stream();
        let slot = self.blocks.admit(id, stream, Place::Device)?;
        let (tag, site) = (TagId(fields.tag.unwrap_or(0)), SiteId(fields.site.unwrap_or(0)));
        Ok((Op::Alloc { slot, bytes, stream, tag, site }, fields))
    }

    fn free(&mut self, words: &mut Words<'_>) -> Result<(Op, Fields), String> {
        let block = self.blocks.evict(words.number(BLOCK)?, Place::Device)?;
        let fields = self.fields(words, Takes::Stream)?;
        Ok((Op::Free { slot: block.slot, stream: fields.stream.unwrap_or(block.stream) }, fields))
    }

    fn work(&mut self, words: &mut Words<'_>) -> Result<(Op, Fields), String> {
        let shape: ShapeId = words.number("the shape's number")?;
        known("shape", shape.into(), self.tables.shapes().len())?;
        let mut operands = [NO_OPERAND; 4];
        for place in &mut operands {
            if !words.number_follows() {
                break;
            }
            *place = self.blocks.find(words.number(BLOCK)?)?.slot;
        }
        if words.number_follows() {
            return Err("work has four operands at most".to_owned());
        }
        let fields = self.fields(words, Takes::Stream)?;
        Ok((Op::Work { shape, stream: fields.stream(), operands }, fields))
    }

    fn use_on(&mut self, words: &mut Words<'_>) -> Result<(Op, Fields), String> {
        let block = self.blocks.find(words.number(BLOCK)?)?;
        if block.place == Place::Host {
            return Err("`use` is for device memory, and this block is pinned host memory".to_owned());
        }
        let fields = self.fields(words, Takes::Stream)?;
        Ok((Op::Use { slot: block.slot, stream: fields.stream() }, fields))
    }

    fn host_alloc(&mut self, words: &mut Words<'_>) -> Result<(Op, Fields), String> {
        let id = words.number(BLOCK)?;
        let bytes = size(words)?;
        let slot = self.blocks.admit(id, StreamId::DEFAULT, Place::Host)?;
        Ok((Op::HostAlloc { slot, bytes }, self.fields(words, Takes::Nothing)?))
    }

    fn mark(&mut self, words: &mut Words<'_>) -> Result<(Op, Fields), String> {
        let kind = words.choice("a kind of mark", &MarkKind::ALL, MarkKind::name)?;
        let index = words.number("the mark's number")?;
        let fields = self.fields(words, Takes::Label)?;
        Ok((Op::Mark { kind, label: fields.label.unwrap_or(0), index }, fields))
    }

    fn collective(&mut self, words: &mut Words<'_>) -> Result<(Op, Fields), String> {
        let kind = words.choice("a kind of collective", &CollectiveKind::ALL, CollectiveKind::name)?;
        let bytes = words.number("the size in bytes")?;
        let ranks = words.number("the count of ranks")?;
        let fields = self.fields(words, Takes::Stream)?;
        Ok((Op::Collective { kind, bytes, ranks, stream: fields.stream() }, fields))
    }

    /// The rest of an event line: `name=number` and `+nanoseconds`, in any order.
    #[inline]
    fn fields(&self, words: &mut Words<'_>, takes: Takes) -> Result<Fields, String> {
        let mut fields = Fields::default();
        while let Some(word) = words.next() {
            if let [b'+', nanos @ ..] = word {
                set(&mut fields.delta_ns, number_in(nanos, "the time since the event before, in ns")?, "the time")?;
                continue;
            }
            let Some(equals) = word.iter().position(|&byte| byte == b'=') else {
                return Err(format!("{} is too much here", shown(word)));
            };
            let (name, value) = (&word[..equals], &word[equals + 1..]);
            match (name, takes) {
                (b"stream", Takes::Stream | Takes::StreamTagSite) => {
                    let number = entry("stream", value, self.tables.streams().len())?;
                    set(&mut fields.stream, StreamId(number), "stream")?;
                }
                (b"tag", Takes::StreamTagSite) => {
                    set(&mut fields.tag, entry("tag", value, self.tables.tags().len())?, "tag")?;
                }
                (b"site", Takes::StreamTagSite) => {
                    set(&mut fields.site, entry("site", value, self.tables.sites().len())?, "site")?;
                }
                (b"label", Takes::Label) => {
                    set(&mut fields.label, entry("label", value, self.tables.labels().len())?, "label")?;
                }
                (b"thread", _) => {
                    let number = entry("thread", value, self.tables.threads().len())?;
                    set(&mut fields.thread, ThreadId(number), "thread")?;
                }
                _ => return Err(unknown(name, "a field of this event", takes.names().iter().copied())),
            }
        }
        Ok(fields)
    }

    /// A line that defines an entry of a table, or ends the story.
    #[cold]
    fn define(&mut self, first: &[u8], words: &mut Words<'_>) -> Result<(), String> {
        let tables = &mut self.tables;
        let (table, number, given) = match first {
            b"stream" => {
                let number = next_number("stream", words, tables.streams().len())?;
                let handle = words.number("the stream's handle")?;
                ("stream", number, tables.intern_stream(handle).map_err(|full| full.to_string())?.index())
            }
            b"thread" => {
                let number = next_number("thread", words, tables.threads().len())?;
                let handle = words.number("the thread's handle")?;
                ("thread", number, tables.intern_thread(handle).map_err(|full| full.to_string())?.index())
            }
            b"tag" => {
                let number = next_number("tag", words, tables.tags().len())?;
                ("tag", number, tables.intern_tag(tag(words)?).index())
            }
            b"site" => {
                let number = next_number("site", words, tables.sites().len())?;
                ("site", number, tables.intern_site(&words.json::<String>("the call site")?).index())
            }
            b"label" => {
                let number = next_number("label", words, tables.labels().len())?;
                ("label", number, tables.intern_label(&words.json::<String>("the label")?) as usize)
            }
            b"shape" => {
                let number = next_number("shape", words, tables.shapes().len())?;
                ("shape", number, tables.intern_shape(words.json::<Work>("the shape of work")?) as usize)
            }
            b"end" => return self.end(words),
            _ => {
                let known = OpKind::ALL.map(OpKind::name).into_iter().chain(DEFINITIONS);
                return Err(unknown(first, "a word that a line can begin with", known));
            }
        };
        if given != number {
            return Err(format!("{table} {number} is the same as {table} {given}"));
        }
        words.end()
    }

    fn end(&mut self, words: &mut Words<'_>) -> Result<(), String> {
        if words.number_follows() {
            let counted: u64 = words.number("the count of events")?;
            if counted != self.events {
                return Err(format!("the file had {counted} events when it was written, and has {} now", self.events));
            }
        }
        self.ended = true;
        words.end()
    }
}

/// Tables are filled in order, so that no file can ask for a table larger than itself.
fn next_number(table: &str, words: &mut Words<'_>, next: usize) -> Result<usize, String> {
    match words.number::<u64>(&format!("the {table}'s number"))? {
        number if number == next as u64 => Ok(next),
        number => Err(format!("{table} {number} is out of order: the next one is {table} {next}")),
    }
}

fn tag(words: &mut Words<'_>) -> Result<Tag, String> {
    let category = words.choice("a category", &Category::ALL, Category::name)?;
    let layer = match words.next() {
        None => None,
        Some([b'l', b'a', b'y', b'e', b'r', b'=', layer @ ..]) => Some(number_in(layer, "the layer")?),
        Some(word) => return Err(unknown(word, "`layer=NUMBER`", ["layer"])),
    };
    Ok(Tag { category, layer })
}

#[inline]
fn size(words: &mut Words<'_>) -> Result<u64, String> {
    match words.number("the size in bytes")? {
        0 => Err("a request for zero bytes".to_owned()),
        bytes => Ok(bytes),
    }
}

/// The number of an entry that was defined further up.
#[inline]
fn entry<N: TryFrom<u64> + Copy + Into<u64>>(table: &str, word: &[u8], count: usize) -> Result<N, String> {
    let number: N = number_in(word, table)?;
    known(table, number.into(), count)?;
    Ok(number)
}

#[inline]
fn known(table: &str, number: u64, count: usize) -> Result<(), String> {
    if number < count as u64 { Ok(()) } else { Err(format!("{table} {number} is not defined above this line")) }
}

#[inline]
fn set<T>(field: &mut Option<T>, value: T, name: &str) -> Result<(), String> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("{name} is given twice")),
    }
}

// From the ids of a file, which are never given twice, to dense slots that are recycled.

/// A block that is alive at this line of the file.
#[derive(Clone, Copy)]
pub(crate) struct LiveBlock {
    pub(crate) slot: BlockSlot,
    pub(crate) stream: StreamId,
    pub(crate) place: Place,
}

/// The blocks that are alive. Ids ascend in a file, so that one number is enough to know which were given before.
#[derive(Default)]
pub(crate) struct LiveBlocks {
    live: HashMap<u64, LiveBlock, BuildHasherDefault<IdHasher>>,
    /// Slots to give again, the latest freed first: a warm table entry, and what the builder does too.
    vacant: Vec<BlockSlot>,
    slots: BlockSlot,
    last_id: Option<u64>,
}

impl LiveBlocks {
    /// A new block takes a slot.
    pub(crate) fn admit(&mut self, id: u64, stream: StreamId, place: Place) -> Result<BlockSlot, String> {
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
    pub(crate) fn find(&self, id: u64) -> Result<LiveBlock, String> {
        self.live.get(&id).copied().ok_or_else(|| self.missing(id))
    }

    /// A block gives its slot back.
    pub(crate) fn evict(&mut self, id: u64, place: Place) -> Result<LiveBlock, String> {
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
pub(crate) struct RecordedEvents {
    numbers: HashMap<u64, TraceEventId, BuildHasherDefault<IdHasher>>,
}

impl RecordedEvents {
    pub(crate) fn record(&mut self, id: u64) -> Result<TraceEventId, String> {
        let next = TraceEventId::try_from(self.numbers.len()).map_err(|_| "too many events recorded".to_owned())?;
        Ok(*self.numbers.entry(id).or_insert(next))
    }

    pub(crate) fn find(&self, id: u64) -> Result<TraceEventId, String> {
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
