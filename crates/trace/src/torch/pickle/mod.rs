//! Reads pickles without running them: the opcodes that plain data needs, every other refused by name.
//!
//! Knows nothing of memory snapshots. A [`Collector`] sees every dict when it is filled and may keep it in a form of its
//! own, so that millions of trace entries never exist as dicts. Memory is bounded by a [`Budget`], whatever lengths,
//! depths or references a file claims; nothing here recurses.

mod budget;
mod input;
mod machine;
mod memo;
pub(in crate::torch) mod opcode;
#[cfg(test)]
pub(in crate::torch) mod sample;
mod value;

use std::io;

pub(crate) use budget::Budget;
pub use budget::Spent;
pub(in crate::torch) use machine::load;
pub(in crate::torch) use value::{Heap, NodeId, TextId, Value};

/// The longest text that is believed. A stack frame with a template name has a few kilobytes.
const LONGEST_TEXT: u64 = 64 << 20;

/// A pickle that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("byte {offset}: {fault}")]
pub struct PickleError {
    /// Where in the (decompressed) file.
    pub offset: u64,
    /// What is wrong there.
    #[source]
    pub fault: Fault,
}

/// What can be wrong with a pickle.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The file system or the decompressor gave up.
    #[error("{0}")]
    Io(io::Error),
    /// The file ends before the pickle does.
    #[error("the file ends in the middle of the pickle")]
    Truncated,
    /// Not a binary pickle at all.
    #[error("a pickle begins with byte 0x80, this file with {0:#04x}")]
    NoPickle(u8),
    /// A protocol that did not exist when this was written, or one of the text ones.
    #[error("pickle protocol {0}; 2 to 5 can be read")]
    Protocol(u8),
    /// An opcode that plain data does not need.
    #[error("opcode {name} ({code:#04x}) is refused: it does not occur in plain data, and pickles are never run")]
    Opcode {
        /// Its byte.
        code: u8,
        /// Its name in Python's documentation.
        name: &'static str,
    },
    /// An opcode found too little, or something else, on the stack.
    #[error("{opcode} needs {what} on the stack")]
    Stack {
        /// Which.
        opcode: &'static str,
        /// What it needs.
        what: &'static str,
    },
    /// A reference to something that was not memorised.
    #[error("reference to memo {0}, which was never set")]
    Memo(u64),
    /// An integer that fits no 64 bits.
    #[error("an integer of {0} bytes; at most 64 bits are expected")]
    Integer(u64),
    /// A text of absurd length.
    #[error("a text of {0} bytes; at most {LONGEST_TEXT} are expected")]
    Text(u64),
    /// The file is small but what it describes is not.
    #[error(transparent)]
    Spent(#[from] Spent),
    /// The collector did not like a dict.
    #[error("{0}")]
    Refused(String),
}

/// Looks at dicts as they are filled.
pub(in crate::torch) trait Collector {
    /// `items` holds key, value, key, value. With a record number the dict is done with: it keeps only that number.
    fn collect(&mut self, items: &[Value], heap: &mut Heap) -> Result<Option<u32>, Fault>;
}
