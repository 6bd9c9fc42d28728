//! Traces on disk, whatever their format: what a SOURCE on the command line ends up in, and where `convert` writes.

use std::{
    io::{self, Read, Write},
    path::Path,
};

use super::{
    CHUNK_EVENTS, Source, TraceError, WriteError,
    file::{self, Output},
    minimalloc, native, rmm, stalloc, torch, umpire,
};
use oomph_base::{NoProgress, Progress};

/// A kind of trace file.
pub struct Format {
    /// What people call it.
    pub name: &'static str,
    /// One line for lists.
    pub about: &'static str,
    /// Whether a file is of this kind, from its first bytes after decompression.
    pub(crate) recognises: fn(head: &[u8]) -> bool,
    /// Opens it, and reports progress where the whole file is read.
    pub(crate) open: fn(path: &Path, progress: &dyn Progress) -> Opened,
}

/// A file that is ready to be read, or why it is not.
type Opened = Result<Box<dyn Source>, TraceError>;

/// Every format that can be read. To add one, write its file and add its line.
pub const FORMATS: &[Format] =
    &[native::FORMAT, torch::FORMAT, rmm::FORMAT, minimalloc::FORMAT, umpire::FORMAT, stalloc::FORMAT];

/// How much of a file the formats get to see.
const HEAD_BYTES: u64 = 4096;

/// Opens a trace file. Its format is recognised by content, and so is compression.
///
/// Formats that must be read as a whole report their progress here. A native trace is read later, event by event.
pub fn open(path: impl AsRef<Path>, progress: &dyn Progress) -> Result<Box<dyn Source>, TraceError> {
    let path = path.as_ref();
    (recognise(path)?.open)(path, progress)
}

/// What kind of trace a file is, from its first bytes after decompression.
pub fn recognise(path: impl AsRef<Path>) -> Result<&'static Format, TraceError> {
    let path = path.as_ref();
    let mut head = Vec::new();
    file::open(path, &NoProgress)?
        .take(HEAD_BYTES)
        .read_to_end(&mut head)
        .map_err(|error| file::read_failed(path, error))?;
    FORMATS
        .iter()
        .find(|format| (format.recognises)(&head))
        .ok_or_else(|| TraceError::Format { path: path.to_owned(), reason: strangeness(&head) })
}

/// Writes a trace in the native format and tells how many events there were. It is compressed where the name ends in
/// `.gz`. The file appears when it is complete: after an error nothing is there, or what was there before.
///
/// ```
/// use oomph_trace::{self as trace, Trace, TraceBuilder};
/// use oomph_base::{NoProgress, StreamId, TagId};
/// let mut story = TraceBuilder::new();
/// story.alloc(1 << 20, StreamId::DEFAULT, TagId(0));
/// let path = std::env::temp_dir().join(format!("doc-{}.oomph.gz", std::process::id()));
/// assert_eq!(trace::write(&story.finish("tiny"), &path)?, 1);
/// assert_eq!(Trace::read(&*trace::open(&path, &NoProgress)?)?.name, "tiny");
/// # std::fs::remove_file(path).unwrap();
/// # Ok::<(), trace::TraceError>(())
/// ```
pub fn write(source: &dyn Source, path: impl AsRef<Path>) -> Result<u64, TraceError> {
    save(path, |to| write_to(source, to))
}

/// Writes a trace in the native format, uncompressed, and tells how many events there were.
pub fn write_to(source: &dyn Source, to: &mut dyn Write) -> Result<u64, WriteError> {
    let too_long = |text: native::TooLong| io::Error::new(io::ErrorKind::InvalidInput, text.to_string());
    let mut reader = source.open()?;
    let mut writer = native::Writer::new(source.name()).map_err(too_long)?;
    let mut chunk = Vec::with_capacity(CHUNK_EVENTS);
    loop {
        reader.read(&mut chunk)?;
        if chunk.is_empty() {
            break;
        }
        writer.define(reader.tables()).map_err(too_long)?;
        for event in &chunk {
            writer.event(event, reader.tables())?;
        }
        to.write_all(writer.lines())?;
        writer.clear();
    }
    // What no event refers to belongs to the trace all the same.
    writer.define(reader.tables()).map_err(too_long)?;
    let events = writer.finish();
    to.write_all(writer.lines())?;
    to.flush()?;
    Ok(events)
}

/// Makes a file of what `write` writes, compressed where the name ends in `.gz`. It appears when it is complete: after
/// an error nothing is there, or what was there before.
pub fn save<T>(
    path: impl AsRef<Path>,
    write: impl FnOnce(&mut dyn Write) -> Result<T, WriteError>,
) -> Result<T, TraceError> {
    let path = path.as_ref();
    let write_failed = |source| TraceError::Io { path: path.to_owned(), source };
    let mut output = Output::create(path).map_err(write_failed)?;
    let written = write(&mut output).map_err(|error| match error {
        WriteError::Trace(error) => error,
        WriteError::Io(source) => write_failed(source),
    })?;
    output.finish().map_err(write_failed)?;
    Ok(written)
}

/// Why no format recognised a file.
fn strangeness(head: &[u8]) -> String {
    let known = FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
    match head {
        [] => "the file is empty".to_owned(),
        _ if head.contains(&0) => format!("binary data in no known trace format (known: {known})"),
        _ => format!(
            "not a trace in a known format (known: {known}); a native one begins with `{}`",
            native::first_line()
        ),
    }
}
