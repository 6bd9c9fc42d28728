//! Writes a native trace.

use serde::Serialize;

use crate::{Event, NO_OPERAND, Op, Tables, TraceChecker, TraceError, TracedBlock, file::LONGEST_LINE};
use oomph_base::{StreamId, ThreadId};

/// Turns events into lines. The caller writes [`lines`](NativeWriter::lines) to the file from time to time.
pub(crate) struct NativeWriter {
    /// Rejects invalid events, and has the number of every live block: its id in the file.
    checker: TraceChecker,
    /// What was written and not yet taken.
    pub(crate) lines: Vec<u8>,
    thread: ThreadId,
    events: u64,
    /// How many streams, threads, tags, sites, labels and shapes were written.
    defined: [usize; 6],
}

impl NativeWriter {
    /// Begins a file.
    pub(crate) fn new(name: &str) -> Result<NativeWriter, TooLong> {
        let mut writer = NativeWriter {
            checker: TraceChecker::default(),
            lines: Vec::new(),
            thread: ThreadId(0),
            events: 0,
            // Entry 0 is the same in every trace, except for shapes.
            defined: [1, 1, 1, 1, 1, 0],
        };
        writer.word("oomph-trace");
        writer.number(super::VERSION);
        if !name.is_empty() {
            writer.json("the name", &name)?;
        }
        writer.end_line();
        Ok(writer)
    }

    /// Writes the new table entries. Must be called before the events that refer to them.
    pub(crate) fn define(&mut self, tables: &Tables) -> Result<(), TooLong> {
        let [streams, threads, tags] = [tables.streams().len(), tables.threads().len(), tables.tags().len()];
        let [sites, labels, shapes] = [tables.sites().len(), tables.labels().len(), tables.shapes().len()];
        let counts = [streams, threads, tags, sites, labels, shapes];
        let [streams, threads, tags, sites, labels, shapes] = std::mem::replace(&mut self.defined, counts);
        for (number, &handle) in tables.streams().iter().enumerate().skip(streams) {
            self.define_handle("stream", number, handle);
        }
        for (number, &handle) in tables.threads().iter().enumerate().skip(threads) {
            self.define_handle("thread", number, handle);
        }
        for (number, tag) in tables.tags().iter().enumerate().skip(tags) {
            self.word("tag");
            self.number(number as u64);
            self.word(" ");
            self.word(tag.category.name());
            if let Some(layer) = tag.layer {
                self.field(" layer=", layer.into());
            }
            self.end_line();
        }
        for (number, site) in tables.sites().iter().enumerate().skip(sites) {
            self.define_json("site", number, site)?;
        }
        for (number, label) in tables.labels().iter().enumerate().skip(labels) {
            self.define_json("label", number, label)?;
        }
        for (number, shape) in tables.shapes().iter().enumerate().skip(shapes) {
            self.define_json("shape", number, shape)?;
        }
        Ok(())
    }

    /// Writes an event, or rejects one that contradicts earlier events.
    pub(crate) fn event(&mut self, event: &Event, tables: &Tables) -> Result<(), TraceError> {
        let block = self.checker.check(event, tables)?;
        self.word(event.op.kind().name());
        if let Some(block) = block {
            self.number(block.number);
        }
        self.operands(event.op, block);
        if event.thread != self.thread {
            self.thread = event.thread;
            self.field(" thread=", event.thread.0.into());
        }
        self.field_unless_zero(" +", event.delta_ns.into());
        self.end_line();
        self.events += 1;
        Ok(())
    }

    /// Writes the last line and returns the number of events.
    pub(crate) fn finish(&mut self) -> u64 {
        self.word("end");
        self.number(self.events);
        self.end_line();
        self.events
    }

    fn operands(&mut self, op: Op, block: Option<TracedBlock>) {
        match op {
            Op::Alloc { bytes, stream, tag, site, .. } => {
                self.number(bytes);
                self.stream(stream);
                self.field_unless_zero(" tag=", tag.0.into());
                self.field_unless_zero(" site=", site.0.into());
            }
            Op::Free { stream, .. } => {
                if block.is_none_or(|block| block.stream != stream) {
                    self.field(" stream=", stream.0.into());
                }
            }
            Op::HostAlloc { bytes, .. } => self.number(bytes),
            Op::Use { stream, .. } | Op::StreamSync { stream } => self.stream(stream),
            Op::EventRecord { event, stream } | Op::EventWait { event, stream } => {
                self.number(event.into());
                self.stream(stream);
            }
            Op::Mark { kind, label, index } => {
                self.word(" ");
                self.word(kind.name());
                self.number(index.into());
                self.field_unless_zero(" label=", label.into());
            }
            Op::Work { shape, stream, operands } => {
                self.number(shape.into());
                for slot in operands.into_iter().take_while(|&slot| slot != NO_OPERAND) {
                    if let Some(block) = self.checker.block(slot) {
                        self.number(block.number);
                    }
                }
                self.stream(stream);
            }
            Op::UsePool { pool } => self.pool(pool),
            Op::ReleasePool { pool, trims } => {
                self.pool(pool);
                self.field_unless_zero(" trims=", trims.into());
            }
            Op::Idle { nanos } => self.number(nanos),
            Op::Collective { kind, bytes, ranks, stream } => {
                self.word(" ");
                self.word(kind.name());
                self.number(bytes);
                self.number(ranks.into());
                self.stream(stream);
            }
            Op::HostFree { .. } | Op::DeviceSync | Op::EmptyCache => {}
        }
    }

    fn define_handle(&mut self, table: &str, number: usize, handle: u64) {
        self.word(table);
        self.number(number as u64);
        self.word(&format!(" {handle:#x}"));
        self.end_line();
    }

    fn define_json(&mut self, table: &'static str, number: usize, value: &impl Serialize) -> Result<(), TooLong> {
        self.word(table);
        self.number(number as u64);
        self.json(table, value)?;
        self.end_line();
        Ok(())
    }

    fn json(&mut self, what: &'static str, value: &impl Serialize) -> Result<(), TooLong> {
        let json = serde_json::to_string(value).map_err(|_| TooLong(what))?;
        // Leaves space for the rest of the line.
        if json.len() + 64 > LONGEST_LINE {
            return Err(TooLong(what));
        }
        self.word(" ");
        self.word(&json);
        Ok(())
    }

    fn pool(&mut self, (first, second): (u64, u64)) {
        self.number(first);
        self.number(second);
    }

    fn stream(&mut self, stream: StreamId) {
        self.field_unless_zero(" stream=", stream.0.into());
    }

    fn field(&mut self, name: &str, value: u64) {
        self.word(name);
        self.digits(value);
    }

    /// A field that is zero if it is missing.
    fn field_unless_zero(&mut self, name: &str, value: u64) {
        if value != 0 {
            self.field(name, value);
        }
    }

    fn number(&mut self, value: u64) {
        self.lines.push(b' ');
        self.digits(value);
    }

    fn digits(&mut self, value: u64) {
        self.word(&value.to_string());
    }

    fn word(&mut self, word: &str) {
        self.lines.extend_from_slice(word.as_bytes());
    }

    fn end_line(&mut self) {
        self.lines.push(b'\n');
    }
}

/// A text that is too long for a line.
#[derive(Debug, thiserror::Error)]
#[error("{0} is longer than a line can be")]
pub(crate) struct TooLong(&'static str);
