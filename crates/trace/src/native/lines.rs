//! Reads a file line by line in bounded memory, whatever is in it.

use std::{
    fs,
    io::{BufRead, Read},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    TraceError,
    file::{self, Input},
};

/// No line of a trace is longer, so that a file without line ends cannot fill the memory.
pub(super) const LONGEST_LINE: usize = 1 << 20;

/// The lines of a file, decompressed where needed.
pub(super) struct Lines {
    path: PathBuf,
    input: Input<'static>,
    line: Vec<u8>,
    number: u64,
    /// Bytes taken from the disk, of so many.
    bytes_read: Arc<AtomicU64>,
    file_bytes: u64,
}

impl Lines {
    /// Starts at the first line.
    pub(super) fn open(path: &Path) -> Result<Lines, TraceError> {
        let bytes_read = Arc::<AtomicU64>::default();
        let count = Arc::clone(&bytes_read);
        let input = file::open_counted(path, move |bytes| {
            count.fetch_add(bytes, Ordering::Relaxed);
        })?;
        // A file whose length is not known is read all the same.
        let file_bytes = fs::metadata(path).map_or(0, |file| file.len());
        Ok(Lines { path: path.to_owned(), input, line: Vec::new(), number: 0, bytes_read, file_bytes })
    }

    /// The next line without its end; none at the end of the file.
    #[inline]
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, TraceError> {
        self.line.clear();
        (&mut self.input)
            .take(LONGEST_LINE as u64 + 1)
            .read_until(b'\n', &mut self.line)
            .map_err(|error| file::read_failed(&self.path, error))?;
        if self.line.is_empty() {
            return Ok(None);
        }
        self.number += 1;
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
            if self.line.last() == Some(&b'\r') {
                self.line.pop();
            }
        } else if self.line.len() > LONGEST_LINE {
            return Err(self.complaint(format!("the line is longer than {LONGEST_LINE} bytes")));
        }
        Ok(Some(&self.line))
    }

    /// How much of the file was taken from the disk, from 0 to 1.
    pub(super) fn share_read(&self) -> f64 {
        self.bytes_read.load(Ordering::Relaxed) as f64 / self.file_bytes.max(1) as f64
    }

    /// Something is wrong with the line read last.
    #[cold]
    pub(super) fn complaint(&self, reason: String) -> TraceError {
        let reason = match std::str::from_utf8(&self.line) {
            Ok(_) => reason,
            Err(error) => format!("not text at byte {} of the line", error.valid_up_to() + 1),
        };
        TraceError::Syntax { path: self.path.clone(), line: self.number, reason }
    }

    /// Something is wrong with the file as a whole.
    pub(super) fn refusal(&self, reason: String) -> TraceError {
        TraceError::Format { path: self.path.clone(), reason }
    }
}
