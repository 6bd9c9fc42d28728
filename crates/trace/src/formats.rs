//! Trace files: recognises and opens every format, and writes the native one.

use std::{
    io::{self, Read, Write},
    path::Path,
};

use super::{
    Source, TraceError, TraceFormat, WriteError,
    file::{self, TraceOutput},
    minimalloc, native, rmm, stalloc, torch, umpire,
};
use oomph_base::{NoProgress, Progress};

/// Every format that can be read. A new format is one file and one entry here.
pub const FORMATS: &[TraceFormat] =
    &[native::FORMAT, torch::FORMAT, rmm::FORMAT, minimalloc::FORMAT, umpire::FORMAT, stalloc::FORMAT];

/// The number of bytes that formats are recognised by.
const HEAD_BYTES: u64 = 4096;

/// Opens a trace file. Format and compression are recognised by content.
///
/// Formats that are read as a whole report progress. A native trace is read later, event by event.
pub fn open(path: impl AsRef<Path>, progress: &dyn Progress) -> Result<Box<dyn Source>, TraceError> {
    let path = path.as_ref();
    (recognise(path)?.open)(path, progress)
}

/// The format of a file, by its first bytes after decompression.
pub fn recognise(path: impl AsRef<Path>) -> Result<&'static TraceFormat, TraceError> {
    let path = path.as_ref();
    let mut head = Vec::new();
    file::open(path, &NoProgress)?
        .take(HEAD_BYTES)
        .read_to_end(&mut head)
        .map_err(|error| file::read_failed(path, error))?;
    FORMATS
        .iter()
        .find(|format| (format.recognises)(&head))
        .ok_or_else(|| TraceError::Format { path: path.to_owned(), reason: unknown_format(&head) })
}

/// Writes a trace in the native format and returns the number of events. The file is compressed if its name ends in `.gz`.
/// It appears when it is complete: after an error, an earlier file of that name is unchanged.
///
/// ```
/// use oomph_trace::{self as trace, Trace, TraceBuilder};
/// use oomph_base::{NoProgress, StreamId, TagId};
/// let mut builder = TraceBuilder::new();
/// builder.alloc(1 << 20, StreamId::DEFAULT, TagId(0));
/// let path = std::env::temp_dir().join(format!("doc-{}.oomph.gz", std::process::id()));
/// assert_eq!(trace::write(&builder.finish("tiny"), &path)?, 1);
/// assert_eq!(Trace::read(&*trace::open(&path, &NoProgress)?)?.name, "tiny");
/// # std::fs::remove_file(path).unwrap();
/// # Ok::<(), trace::TraceError>(())
/// ```
pub fn write(source: &dyn Source, path: impl AsRef<Path>) -> Result<u64, TraceError> {
    save(path, |to| write_to(source, to))
}

/// Writes a trace in the native format, uncompressed, and returns the number of events.
pub fn write_to(source: &dyn Source, to: &mut dyn Write) -> Result<u64, WriteError> {
    let too_long = |text: native::TooLong| io::Error::new(io::ErrorKind::InvalidInput, text.to_string());
    let mut writer = native::NativeWriter::new(source.name()).map_err(too_long)?;
    let mut reader = source.open()?;
    while let (events @ [_, ..], tables) = reader.next_chunk()? {
        writer.define(tables).map_err(too_long)?;
        for event in events {
            writer.event(event, tables)?;
        }
        to.write_all(&writer.lines)?;
        writer.lines.clear();
    }
    // Table entries that no event refers to are part of the trace too.
    writer.define(reader.tables()).map_err(too_long)?;
    let events = writer.finish();
    to.write_all(&writer.lines)?;
    to.flush()?;
    Ok(events)
}

/// Writes a file with `write`, compressed if its name ends in `.gz`. It appears when it is complete: after an error, an
/// earlier file of that name is unchanged.
pub fn save<T>(
    path: impl AsRef<Path>,
    write: impl FnOnce(&mut dyn Write) -> Result<T, WriteError>,
) -> Result<T, TraceError> {
    let path = path.as_ref();
    let write_failed = |source| TraceError::Io { path: path.to_owned(), source };
    let mut output = TraceOutput::create(path).map_err(write_failed)?;
    let written = write(&mut output).map_err(|error| match error {
        WriteError::Trace(error) => error,
        WriteError::Io(source) => write_failed(source),
    })?;
    output.finish().map_err(write_failed)?;
    Ok(written)
}

/// Why no format recognised a file.
fn unknown_format(head: &[u8]) -> String {
    let known = FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
    match head {
        [] => "the file is empty".to_owned(),
        _ if head.contains(&0) => format!("binary data in an unknown format (known: {known})"),
        _ => format!(
            "not a trace in a known format (known: {known}); a native one begins with `{}`",
            native::first_line()
        ),
    }
}
