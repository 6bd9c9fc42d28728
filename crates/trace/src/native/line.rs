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
use oomph_base::{did_you_mean, nearest};

/// No line of a trace is longer, so that a file without line ends cannot fill the memory.
pub(crate) const LONGEST_LINE: usize = 1 << 20;

/// The lines of a file, decompressed where needed.
pub(crate) struct Lines {
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
    pub(crate) fn open(path: &Path) -> Result<Lines, TraceError> {
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
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, TraceError> {
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
    pub(crate) fn share_read(&self) -> f64 {
        self.bytes_read.load(Ordering::Relaxed) as f64 / self.file_bytes.max(1) as f64
    }

    /// Something is wrong with the line read last.
    #[cold]
    pub(crate) fn complaint(&self, reason: String) -> TraceError {
        let reason = match std::str::from_utf8(&self.line) {
            Ok(_) => reason,
            Err(error) => format!("not text at byte {} of the line", error.valid_up_to() + 1),
        };
        TraceError::Syntax { path: self.path.clone(), line: self.number, reason }
    }

    /// Something is wrong with the file as a whole.
    pub(crate) fn refusal(&self, reason: String) -> TraceError {
        TraceError::Format { path: self.path.clone(), reason }
    }
}

// Takes one line of a native trace apart, as bytes: no text is copied unless something is wrong with it.

/// What is left of a line. Words are separated by blanks; `#` at the start of a word ends the line.
pub(crate) struct Words<'a> {
    rest: &'a [u8],
}

impl<'a> Words<'a> {
    /// The words of a line.
    #[inline]
    pub(crate) fn of(line: &'a [u8]) -> Words<'a> {
        let mut words = Words { rest: line };
        words.skip_blanks();
        words
    }

    /// The next word; none at the end of the line.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<&'a [u8]> {
        if self.rest.is_empty() {
            return None;
        }
        let end = self.rest.iter().position(|&byte| is_blank(byte)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        self.skip_blanks();
        Some(word)
    }

    /// Whether the line ends here.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Whether the next word begins like a number.
    #[inline]
    pub(crate) fn number_follows(&self) -> bool {
        self.rest.first().is_some_and(u8::is_ascii_digit)
    }

    /// The next word as a number; `what` says what it means, for the complaint.
    #[inline]
    pub(crate) fn number<N: TryFrom<u64>>(&mut self, what: &str) -> Result<N, String> {
        match self.next() {
            Some(word) => number_in(word, what),
            None => Err(format!("{what} is missing")),
        }
    }

    /// The next word as one of the known ones; `what` says what they are.
    pub(crate) fn choice<T: Copy>(&mut self, what: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T, String> {
        let Some(word) = self.next() else { return Err(format!("{what} is missing")) };
        all.iter()
            .copied()
            .find(|&candidate| name(candidate).as_bytes() == word)
            .ok_or_else(|| unknown(word, what, all.iter().map(|&candidate| name(candidate))))
    }

    /// The next thing as JSON, which may hold blanks.
    pub(crate) fn json<T: serde::de::DeserializeOwned>(&mut self, what: &str) -> Result<T, String> {
        let mut values = serde_json::Deserializer::from_slice(self.rest).into_iter::<T>();
        match values.next() {
            Some(Ok(value)) => {
                self.rest = &self.rest[values.byte_offset()..];
                self.skip_blanks();
                Ok(value)
            }
            Some(Err(error)) => Err(format!("{what} cannot be read as JSON: {error}")),
            None => Err(format!("{what} is missing")),
        }
    }

    /// Nothing may be left.
    #[inline]
    pub(crate) fn end(&mut self) -> Result<(), String> {
        match self.next() {
            None => Ok(()),
            Some(word) => Err(format!("{} is too much here", shown(word))),
        }
    }

    #[inline]
    fn skip_blanks(&mut self) {
        let start = self.rest.iter().position(|&byte| !is_blank(byte)).unwrap_or(self.rest.len());
        self.rest = &self.rest[start..];
        if self.rest.first() == Some(&b'#') {
            self.rest = &[];
        }
    }
}

#[inline]
fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// A decimal number, or a hexadecimal one after `0x`, that fits its type.
#[inline]
pub(crate) fn number_in<N: TryFrom<u64>>(word: &[u8], what: &str) -> Result<N, String> {
    let value = match word {
        [b'0', b'x', digits @ ..] => hexadecimal(digits),
        digits => decimal(digits),
    };
    match value.map(N::try_from) {
        Some(Ok(number)) => Ok(number),
        _ => Err(refusal(word, what)),
    }
}

#[cold]
fn refusal(word: &[u8], what: &str) -> String {
    if !word.is_empty() && word.iter().all(u8::is_ascii_digit) {
        format!("{} is too large for {what}", shown(word))
    } else {
        format!("{what} must be a number, not {}", shown(word))
    }
}

#[inline]
fn decimal(digits: &[u8]) -> Option<u64> {
    // Nineteen digits always fit, which spares the common case a check per digit.
    let checked = digits.len() > 19;
    let mut value = 0u64;
    for byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value =
            if checked { value.checked_mul(10)?.checked_add(u64::from(digit))? } else { value * 10 + u64::from(digit) };
    }
    (!digits.is_empty()).then_some(value)
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for &byte in digits {
        let digit = char::from(byte).to_digit(16)?;
        value = value.checked_mul(16)? | u64::from(digit);
    }
    (!digits.is_empty()).then_some(value)
}

/// A word that is none of the known ones, and the nearest that is.
#[cold]
pub(crate) fn unknown(word: &[u8], what: &str, known: impl IntoIterator<Item = &'static str>) -> String {
    let near = nearest(&String::from_utf8_lossy(word), known);
    format!("{} is not {what}{}", shown(word), did_you_mean(near.as_deref()))
}

/// A word as it may stand in a complaint: short, and without control characters.
pub(crate) fn shown(word: &[u8]) -> String {
    const LONGEST: usize = 40;
    let text = String::from_utf8_lossy(&word[..word.len().min(4 * LONGEST)]);
    let mut shown: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        shown.push_str("...");
    }
    format!("'{shown}'")
}

#[cfg(test)]
mod words_tests {
    use super::*;

    #[test]
    fn words_are_split_at_blanks_and_end_at_a_comment() {
        let mut words = Words::of(b" \talloc  1\t2  # the weights");
        let taken: Vec<_> = std::iter::from_fn(|| words.next()).collect();
        assert_eq!(taken, [&b"alloc"[..], b"1", b"2"]);
        assert_eq!(Words::of(b"   # nothing").next(), None);
    }

    #[test]
    fn numbers_reach_to_the_end_of_their_type_and_no_further() {
        let largest = u64::MAX.to_string();
        assert_eq!(number_in::<u64>(largest.as_bytes(), "it"), Ok(u64::MAX));
        assert_eq!(number_in::<u64>(b"0xffffffffffffffff", "it"), Ok(u64::MAX));
        assert_eq!(number_in::<u16>(b"00000000000000000000007", "it"), Ok(7));
        for word in ["18446744073709551616", "0x10000000000000000", "99999999999999999999"] {
            assert!(number_in::<u64>(word.as_bytes(), "it").is_err(), "{word}");
        }
        assert_eq!(number_in::<u16>(b"65536", "a stream").unwrap_err(), "'65536' is too large for a stream");
        for word in ["", "0x", "-1", "1e3", "1 ", "0xg", "+1"] {
            assert!(number_in::<u64>(word.as_bytes(), "it").is_err(), "{word}");
        }
    }

    #[test]
    fn a_word_in_a_complaint_is_short_and_printable() {
        assert_eq!(shown(b"a\x1b[31m\xff"), "'a\\u{1b}[31m\u{fffd}'");
        assert_eq!(shown(&[b'x'; 100_000]), format!("'{}...'", "x".repeat(40)));
    }
}
