//! Reads a native trace. A file that is read to its end without an error is valid: [`check`](crate::check) finds nothing
//! more.

use std::{
    collections::HashMap,
    fs,
    hash::{BuildHasherDefault, Hasher},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    FIRST_WORD, VERSION,
    line::{LineWords, number_in, shown, unknown},
};
use crate::{
    BlockSlot, CHUNK_EVENTS, Category, CollectiveKind, Event, EventReader, MarkKind, MemoryKind, NO_OPERAND, Op,
    OpKind, ShapeId, Tables, Tag, TraceError, TraceEventId,
    file::{self, LineReader},
    interner::Interner,
};
use oomph_base::{SiteId, StreamId, TagId, ThreadId, Work, escaped};

/// A position in a native file.
pub(crate) struct NativeReader {
    lines: LineReader<'static>,
    parser: LineParser,
    chunk: Vec<Event>,
    pub(crate) name: String,
    /// Bytes read from disk, and the length of the file.
    bytes_read: Arc<AtomicU64>,
    file_bytes: u64,
}

impl NativeReader {
    /// Opens a file and reads its first line.
    pub(crate) fn open(path: &Path) -> Result<NativeReader, TraceError> {
        let bytes_read = Arc::<AtomicU64>::default();
        let count = Arc::clone(&bytes_read);
        let input = file::open_counted(path, move |bytes| {
            count.fetch_add(bytes, Ordering::Relaxed);
        })?;
        // A file of unknown length can be read, without progress.
        let file_bytes = fs::metadata(path).map_or(0, |file| file.len());
        let mut lines = LineReader::new(input, path);
        let Some(line) = lines.next()? else { return Err(lines.format_error("the file is empty")) };
        let mut words = LineWords::of(line);
        if words.next() != Some(FIRST_WORD.as_bytes()) {
            return Err(lines.format_error(format!("not a native trace, which begins with `{}`", super::first_line())));
        }
        let header = words.number::<u64>("the version").and_then(|version| {
            let name = if words.is_empty() { String::new() } else { words.json("the name")? };
            words.end().map(|()| (version, name))
        });
        match header {
            // The name is for tables and ids, which have one line.
            Ok((VERSION, name)) => {
                let name = escaped(&name).into_owned();
                let (parser, chunk) = (LineParser::default(), Vec::new());
                Ok(NativeReader { lines, parser, chunk, name, bytes_read, file_bytes })
            }
            Ok((version, _)) => Err(lines.format_error(format!(
                "written in version {version} of the trace format; this program reads version {VERSION}"
            ))),
            Err(reason) => Err(lines.syntax_error(reason)),
        }
    }
}

impl EventReader for NativeReader {
    fn next_chunk(&mut self) -> Result<(&[Event], &Tables), TraceError> {
        self.chunk.clear();
        while self.chunk.len() < CHUNK_EVENTS {
            let Some(line) = self.lines.next()? else {
                if !self.parser.ended {
                    return Err(self.lines.format_error("the line `end` is missing: the file is truncated"));
                }
                break;
            };
            match self.parser.parse(line) {
                Ok(event) => self.chunk.extend(event),
                Err(reason) => return Err(self.lines.syntax_error(reason)),
            }
        }
        Ok((&self.chunk, &self.parser.tables))
    }

    fn tables(&self) -> &Tables {
        &self.parser.tables
    }

    fn share_read(&self) -> Option<f64> {
        Some(self.bytes_read.load(Ordering::Relaxed) as f64 / self.file_bytes.max(1) as f64)
    }
}

/// The words that can begin a line, besides the kinds of event.
const DEFINITIONS: [&str; 7] = ["stream", "thread", "tag", "site", "label", "shape", "end"];

const BLOCK: &str = "the block's id";
const EVENT: &str = "the event's number";

/// Parses lines, with the state of all lines so far.
#[derive(Default)]
struct LineParser {
    tables: Tables,
    blocks: OpenBlocks,
    /// Ids of the stream events that were recorded.
    recorded: Interner<u64>,
    thread: ThreadId,
    events: u64,
    ended: bool,
}

/// The named fields of an event line. A missing field is zero, unless the event has another default.
#[derive(Default)]
struct EventFields {
    stream: Option<StreamId>,
    tag: Option<u32>,
    site: Option<u32>,
    label: Option<u32>,
    trims: Option<bool>,
    thread: Option<ThreadId>,
    delta_ns: Option<u32>,
}

impl EventFields {
    fn stream(&self) -> StreamId {
        self.stream.unwrap_or(StreamId::DEFAULT)
    }
}

/// PyTorch's number of a pool, a pair.
fn pool(words: &mut LineWords<'_>) -> Result<(u64, u64), String> {
    Ok((words.number("the pool's first number")?, words.number("the pool's second number")?))
}

/// The fields that an event can have besides `+`.
type FieldNames = &'static [&'static str];
const NO_FIELDS: FieldNames = &["thread"];
const STREAM_FIELDS: FieldNames = &["thread", "stream"];
const ALLOC_FIELDS: FieldNames = &["thread", "stream", "tag", "site"];
const MARK_FIELDS: FieldNames = &["thread", "label"];
const RELEASE_FIELDS: FieldNames = &["thread", "trims"];

impl LineParser {
    /// Parses a line: an event, or `None` for a definition, a comment or a blank line.
    fn parse(&mut self, line: &[u8]) -> Result<Option<Event>, String> {
        let mut words = LineWords::of(line);
        let Some(first) = words.next() else { return Ok(None) };
        if self.ended {
            return Err("no line may follow `end`".to_owned());
        }
        let Some(kind) = OpKind::ALL.into_iter().find(|kind| kind.name().as_bytes() == first) else {
            return self.define(first, &mut words).map(|()| None);
        };
        let (op, fields) = match kind {
            OpKind::Alloc => self.alloc(&mut words)?,
            OpKind::Free => {
                let block = self.blocks.remove(words.number(BLOCK)?, MemoryKind::Device)?;
                let fields = self.parse_fields(&mut words, STREAM_FIELDS)?;
                (Op::Free { slot: block.slot, stream: fields.stream.unwrap_or(block.stream) }, fields)
            }
            OpKind::Use => {
                let block = self.blocks.find(words.number(BLOCK)?)?;
                if block.memory == MemoryKind::Host {
                    return Err("`use` is for device memory, and this block is pinned host memory".to_owned());
                }
                let fields = self.parse_fields(&mut words, STREAM_FIELDS)?;
                (Op::Use { slot: block.slot, stream: fields.stream() }, fields)
            }
            OpKind::Work => self.work(&mut words)?,
            OpKind::HostAlloc => {
                let id = words.number(BLOCK)?;
                let bytes = size(&mut words)?;
                let slot = self.blocks.add(id, StreamId::DEFAULT, MemoryKind::Host)?;
                (Op::HostAlloc { slot, bytes }, self.parse_fields(&mut words, NO_FIELDS)?)
            }
            OpKind::HostFree => {
                let slot = self.blocks.remove(words.number(BLOCK)?, MemoryKind::Host)?.slot;
                (Op::HostFree { slot }, self.parse_fields(&mut words, NO_FIELDS)?)
            }
            OpKind::EventRecord => {
                let event = self.recorded.intern(&words.number(EVENT)?);
                let fields = self.parse_fields(&mut words, STREAM_FIELDS)?;
                (Op::EventRecord { event, stream: fields.stream() }, fields)
            }
            OpKind::EventWait => {
                let event = self.find_recorded(words.number(EVENT)?)?;
                let fields = self.parse_fields(&mut words, STREAM_FIELDS)?;
                (Op::EventWait { event, stream: fields.stream() }, fields)
            }
            OpKind::StreamSync => {
                let fields = self.parse_fields(&mut words, STREAM_FIELDS)?;
                (Op::StreamSync { stream: fields.stream() }, fields)
            }
            OpKind::DeviceSync => (Op::DeviceSync, self.parse_fields(&mut words, NO_FIELDS)?),
            OpKind::EmptyCache => (Op::EmptyCache, self.parse_fields(&mut words, NO_FIELDS)?),
            OpKind::UsePool => (Op::UsePool { pool: pool(&mut words)? }, self.parse_fields(&mut words, NO_FIELDS)?),
            OpKind::ReleasePool => {
                let pool = pool(&mut words)?;
                let fields = self.parse_fields(&mut words, RELEASE_FIELDS)?;
                (Op::ReleasePool { pool, trims: fields.trims.unwrap_or(false) }, fields)
            }
            OpKind::Idle => {
                (Op::Idle { nanos: words.number("the time in ns")? }, self.parse_fields(&mut words, NO_FIELDS)?)
            }
            OpKind::Mark => {
                let kind = words.choice("a kind of mark", &MarkKind::ALL, MarkKind::name)?;
                let index = words.number("the mark's number")?;
                let fields = self.parse_fields(&mut words, MARK_FIELDS)?;
                (Op::Mark { kind, label: fields.label.unwrap_or(0), index }, fields)
            }
            OpKind::Collective => {
                let kind = words.choice("a kind of collective", &CollectiveKind::ALL, CollectiveKind::name)?;
                let bytes = words.number("the size in bytes")?;
                let ranks = words.number("the count of ranks")?;
                let fields = self.parse_fields(&mut words, STREAM_FIELDS)?;
                (Op::Collective { kind, bytes, ranks, stream: fields.stream() }, fields)
            }
        };
        self.events += 1;
        self.thread = fields.thread.unwrap_or(self.thread);
        Ok(Some(Event { op, delta_ns: fields.delta_ns.unwrap_or(0), thread: self.thread }))
    }

    fn find_recorded(&self, id: u64) -> Result<TraceEventId, String> {
        self.recorded.number(&id).ok_or_else(|| format!("event {id} was never recorded before this line"))
    }

    fn alloc(&mut self, words: &mut LineWords<'_>) -> Result<(Op, EventFields), String> {
        let id = words.number(BLOCK)?;
        let bytes = size(words)?;
        let fields = self.parse_fields(words, ALLOC_FIELDS)?;
        let stream = fields.stream();
        let slot = self.blocks.add(id, stream, MemoryKind::Device)?;
        let (tag, site) = (TagId(fields.tag.unwrap_or(0)), SiteId(fields.site.unwrap_or(0)));
        Ok((Op::Alloc { slot, bytes, stream, tag, site }, fields))
    }

    fn work(&mut self, words: &mut LineWords<'_>) -> Result<(Op, EventFields), String> {
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
            return Err("work has at most four operands".to_owned());
        }
        let fields = self.parse_fields(words, STREAM_FIELDS)?;
        Ok((Op::Work { shape, stream: fields.stream(), operands }, fields))
    }

    /// The rest of an event line: `name=number` and `+nanoseconds`, in any order.
    #[inline]
    fn parse_fields(&self, words: &mut LineWords<'_>, names: FieldNames) -> Result<EventFields, String> {
        let mut fields = EventFields::default();
        while let Some(word) = words.next() {
            if let [b'+', nanos @ ..] = word {
                set(&mut fields.delta_ns, number_in(nanos, "the time since the previous event, in ns")?, "the time")?;
                continue;
            }
            let Some(equals) = word.iter().position(|&byte| byte == b'=') else {
                return Err(format!("{} is unexpected here", shown(word)));
            };
            let (name, value) = (&word[..equals], &word[equals + 1..]);
            if !names.iter().any(|known| known.as_bytes() == name) {
                return Err(unknown(name, "a field of this event", names.iter().copied()));
            }
            match name {
                b"stream" => {
                    let number = entry("stream", value, self.tables.streams().len())?;
                    set(&mut fields.stream, StreamId(number), "stream")?;
                }
                b"tag" => set(&mut fields.tag, entry("tag", value, self.tables.tags().len())?, "tag")?,
                b"site" => set(&mut fields.site, entry("site", value, self.tables.sites().len())?, "site")?,
                b"trims" => {
                    let number: u8 = number_in(value, "trims")?;
                    if number > 1 {
                        return Err(format!("trims must be 0 or 1, not {}", shown(value)));
                    }
                    set(&mut fields.trims, number == 1, "trims")?;
                }
                b"label" => set(&mut fields.label, entry("label", value, self.tables.labels().len())?, "label")?,
                _ => {
                    let number = entry("thread", value, self.tables.threads().len())?;
                    set(&mut fields.thread, ThreadId(number), "thread")?;
                }
            }
        }
        Ok(fields)
    }

    /// A line that defines a table entry, or the last line.
    #[cold]
    fn define(&mut self, first: &[u8], words: &mut LineWords<'_>) -> Result<(), String> {
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

    fn end(&mut self, words: &mut LineWords<'_>) -> Result<(), String> {
        if words.number_follows() {
            let counted: u64 = words.number("the count of events")?;
            if counted != self.events {
                return Err(format!("the file should have {counted} events, and has {}", self.events));
            }
        }
        self.ended = true;
        words.end()
    }
}

/// Tables are filled in order, so that a file cannot request a table larger than itself.
fn next_number(table: &str, words: &mut LineWords<'_>, next: usize) -> Result<usize, String> {
    match words.number::<u64>(&format!("the {table}'s number"))? {
        number if number == next as u64 => Ok(next),
        number => Err(format!("{table} {number} is out of order: the next one is {table} {next}")),
    }
}

fn tag(words: &mut LineWords<'_>) -> Result<Tag, String> {
    let category = words.choice("a category", &Category::ALL, Category::name)?;
    let layer = match words.next() {
        None => None,
        Some([b'l', b'a', b'y', b'e', b'r', b'=', layer @ ..]) => Some(number_in(layer, "the layer")?),
        Some(word) => return Err(unknown(word, "`layer=NUMBER`", ["layer"])),
    };
    Ok(Tag { category, layer })
}

#[inline]
fn size(words: &mut LineWords<'_>) -> Result<u64, String> {
    match words.number("the size in bytes")? {
        0 => Err("a request for zero bytes".to_owned()),
        bytes => Ok(bytes),
    }
}

/// The number of an entry that was defined above.
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

/// A block that is live at this line.
#[derive(Clone, Copy)]
struct OpenBlock {
    slot: BlockSlot,
    stream: StreamId,
    memory: MemoryKind,
}

/// The live blocks: from the unique ids of a file to reused slots. Ids ascend, so that the last one tells which were used.
#[derive(Default)]
struct OpenBlocks {
    live: HashMap<u64, OpenBlock, BuildHasherDefault<IdHasher>>,
    /// Free slots. The slot freed last is reused first, as in `TraceBuilder`.
    vacant: Vec<BlockSlot>,
    slots: BlockSlot,
    last_id: Option<u64>,
}

impl OpenBlocks {
    /// Gives a new block a slot.
    fn add(&mut self, id: u64, stream: StreamId, memory: MemoryKind) -> Result<BlockSlot, String> {
        match self.last_id {
            Some(last) if id == last => {
                return Err(format!("block {id} exists already; ids must be unique"));
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
        self.live.insert(id, OpenBlock { slot, stream, memory });
        Ok(slot)
    }

    /// Finds a live block.
    fn find(&self, id: u64) -> Result<OpenBlock, String> {
        self.live.get(&id).copied().ok_or_else(|| self.missing(id))
    }

    /// Removes a live block and frees its slot.
    fn remove(&mut self, id: u64, memory: MemoryKind) -> Result<OpenBlock, String> {
        let Some(block) = self.live.remove(&id) else { return Err(self.missing(id)) };
        self.vacant.push(block.slot);
        match (block.memory == memory, memory) {
            (true, _) => Ok(block),
            (false, MemoryKind::Device) => Err(format!("block {id} is pinned host memory: free it with host_free")),
            (false, MemoryKind::Host) => Err(format!("block {id} is device memory: free it with free")),
        }
    }

    #[cold]
    fn missing(&self, id: u64) -> String {
        match self.last_id {
            Some(last) if id <= last => format!("block {id} is not live: it was freed already or never allocated"),
            _ => format!("block {id} was never allocated before this line"),
        }
    }
}

/// A hash of one multiplication: ids are looked up for every event, and they are almost consecutive.
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
