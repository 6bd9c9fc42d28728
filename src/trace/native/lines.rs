//! Reads a file line by line in bounded memory, whatever is in it.

use std::{
    io::{BufRead, Read},
    path::{Path, PathBuf},
};

use crate::trace::{
    TraceError,
    file::{self, Input},
};

/// No line of a trace is longer, so that a file without line ends cannot fill the memory.
pub(super) const LONGEST_LINE: usize = 1 << 20;

/// The lines of a file, decompressed where needed.
pub(super) struct Lines {
    path: PathBuf,
    input: Input,
    line: Vec<u8>,
    number: u64,
}

impl Lines {
    /// Starts at the first line.
    pub(super) fn open(path: &Path) -> Result<Lines, TraceError> {
        Ok(Lines { path: path.to_owned(), input: file::open(path)?, line: Vec::new(), number: 0 })
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
