//! Bytes of a pickle with their offsets. Lengths that a file claims are believed only as far as bytes arrive.

use std::io::{self, Read};

use super::{Fault, PickleError};

const BUFFER_BYTES: usize = 256 << 10;

/// A reader that knows how far it is.
pub(super) struct Input<R> {
    reader: R,
    buffer: Box<[u8]>,
    /// The bytes of the buffer that were not yet handed out.
    at: usize,
    end: usize,
    /// How many bytes of the file lie before the buffer.
    before: u64,
}

impl<R: Read> Input<R> {
    pub(super) fn new(reader: R) -> Input<R> {
        Input { reader, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), at: 0, end: 0, before: 0 }
    }

    /// Where the next byte stands in the file.
    pub(super) fn offset(&self) -> u64 {
        self.before + self.at as u64
    }

    #[inline]
    pub(super) fn byte(&mut self) -> Result<u8, PickleError> {
        if self.at == self.end {
            self.refill()?;
        }
        let byte = self.buffer[self.at];
        self.at += 1;
        Ok(byte)
    }

    #[inline]
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut array = [0; N];
        if self.end - self.at >= N {
            array.copy_from_slice(&self.buffer[self.at..self.at + N]);
            self.at += N;
        } else {
            for byte in &mut array {
                *byte = self.byte()?;
            }
        }
        Ok(array)
    }

    /// Hands out `length` bytes, from the buffer where they lie in one piece.
    pub(super) fn bytes<'a>(&'a mut self, length: usize, spare: &'a mut Vec<u8>) -> Result<&'a [u8], PickleError> {
        if self.end - self.at >= length {
            let bytes = &self.buffer[self.at..self.at + length];
            self.at += length;
            return Ok(bytes);
        }
        spare.clear();
        while spare.len() < length {
            if self.at == self.end {
                self.refill()?;
            }
            let take = (length - spare.len()).min(self.end - self.at);
            spare.extend_from_slice(&self.buffer[self.at..self.at + take]);
            self.at += take;
        }
        Ok(spare)
    }

    #[cold]
    fn refill(&mut self) -> Result<(), PickleError> {
        self.before += self.end as u64;
        self.at = 0;
        self.end = 0;
        loop {
            match self.reader.read(&mut self.buffer) {
                Ok(0) => return Err(PickleError { offset: self.before, fault: Fault::Truncated }),
                Ok(count) => {
                    self.end = count;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(PickleError { offset: self.before, fault: Fault::Io(error) }),
            }
        }
    }
}
