//! Splits one line of a native trace into words, as bytes: no text is copied unless there is an error.

use oomph_base::{did_you_mean, nearest};

/// The rest of a line. LineWords are separated by blanks; `#` at the start of a word begins a comment.
pub(crate) struct LineWords<'a> {
    rest: &'a [u8],
}

impl<'a> LineWords<'a> {
    /// The words of a line.
    #[inline]
    pub(crate) fn of(line: &'a [u8]) -> LineWords<'a> {
        let mut words = LineWords { rest: line };
        words.skip_blanks();
        words
    }

    /// The next word; `None` at the end of the line.
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

    /// The next word as a number; `what` names it in errors.
    #[inline]
    pub(crate) fn number<N: TryFrom<u64>>(&mut self, what: &str) -> Result<N, String> {
        match self.next() {
            Some(word) => number_in(word, what),
            None => Err(format!("{what} is missing")),
        }
    }

    /// The next word as one of `all`; `what` names it in errors.
    pub(crate) fn choice<T: Copy>(&mut self, what: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T, String> {
        let Some(word) = self.next() else { return Err(format!("{what} is missing")) };
        all.iter()
            .copied()
            .find(|&candidate| name(candidate).as_bytes() == word)
            .ok_or_else(|| unknown(word, what, all.iter().map(|&candidate| name(candidate))))
    }

    /// The next JSON value, which may contain blanks.
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

    /// An error if a word is left.
    #[inline]
    pub(crate) fn end(&mut self) -> Result<(), String> {
        match self.next() {
            None => Ok(()),
            Some(word) => Err(format!("{} is unexpected here", shown(word))),
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
    let (digits, radix) = match word {
        [b'0', b'x', digits @ ..] => (digits, 16),
        digits => (digits, 10),
    };
    // `from_str_radix` would accept a sign.
    let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'));
    match digits.and_then(|digits| u64::from_str_radix(digits, radix).ok()).map(N::try_from) {
        Some(Ok(number)) => Ok(number),
        _ => Err(not_a_number(word, what)),
    }
}

#[cold]
fn not_a_number(word: &[u8], what: &str) -> String {
    if !word.is_empty() && word.iter().all(u8::is_ascii_digit) {
        format!("{} is too large for {what}", shown(word))
    } else {
        format!("{what} must be a number, not {}", shown(word))
    }
}

/// The error for an unknown word, with the nearest known one.
#[cold]
pub(crate) fn unknown(word: &[u8], what: &str, known: impl IntoIterator<Item = &'static str>) -> String {
    let near = nearest(&String::from_utf8_lossy(word), known);
    format!("{} is not {what}{}", shown(word), did_you_mean(near.as_deref()))
}

/// A word for an error message: short, and without control characters.
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
mod tests {
    use super::*;

    #[test]
    fn words_end_at_blanks_and_comments() {
        let mut words = LineWords::of(b" \talloc  1\t2  # the weights");
        let taken: Vec<_> = std::iter::from_fn(|| words.next()).collect();
        assert_eq!(taken, [&b"alloc"[..], b"1", b"2"]);
        assert_eq!(LineWords::of(b"   # nothing").next(), None);
    }

    #[test]
    fn numbers_fit_their_type() {
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
    fn words_in_errors_are_short_and_printable() {
        assert_eq!(shown(b"a\x1b[31m\xff"), "'a\\u{1b}[31m\u{fffd}'");
        assert_eq!(shown(&[b'x'; 100_000]), format!("'{}...'", "x".repeat(40)));
    }
}
