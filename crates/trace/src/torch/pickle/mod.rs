//! Reads pickles of plain data without running code. All other opcodes are refused by name.
//!
//! It knows nothing of memory snapshots. A [`DictCollector`] sees every dict when it is filled and may keep it in its own
//! form, so that millions of trace entries never exist as dicts. A memory budget bounds all lengths, depths and references
//! of a file, and nothing here recurses.

use std::io;

use crate::memory_budget::OutOfBudget;

mod machine;
#[cfg(test)]
pub(crate) mod sample;
mod value;

pub(crate) use machine::load;
pub(crate) use value::{NodeId, PickleHeap, PickleValue, TextId};

/// The longest accepted text. A stack frame with a template name has a few kilobytes.
const LONGEST_TEXT: u64 = 1 << 20;

/// A pickle that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("byte {offset}: {fault}")]
pub struct PickleError {
    /// The offset in the decompressed file.
    pub offset: u64,
    /// The fault.
    #[source]
    pub fault: PickleFault,
}

/// A fault of a pickle.
#[derive(Debug, thiserror::Error)]
pub enum PickleFault {
    /// An error of the file system or the decompressor.
    #[error("{0}")]
    Io(io::Error),
    /// The file ends before the pickle does.
    #[error("the file ends in the middle of the pickle")]
    Truncated,
    /// The file goes on after the pickle.
    #[error("the pickle ends here, but the file does not: it is damaged or several files in one")]
    TrailingBytes,
    /// Not a binary pickle.
    #[error("a pickle begins with byte 0x80, this file with {0:#04x}")]
    NoPickle(u8),
    /// An unknown protocol, or a text protocol.
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
    /// An opcode found the wrong values on the stack.
    #[error("{opcode} needs {what} on the stack")]
    Stack {
        /// The opcode.
        opcode: &'static str,
        /// What it needs.
        what: &'static str,
    },
    /// A reference to a value that was not memoized.
    #[error("reference to memo {0}, which was never set")]
    Memo(u64),
    /// An integer of more than 64 bits.
    #[error("an integer of {0} bytes; at most 64 bits are expected")]
    Integer(u64),
    /// A text that is too long.
    #[error("a text of {0} bytes; at most {LONGEST_TEXT} are expected")]
    Text(u64),
    /// The file needs too much memory.
    #[error(transparent)]
    OutOfBudget(#[from] OutOfBudget),
    /// The collector refused a dict.
    #[error("{0}")]
    Refused(String),
}

/// Sees dicts when they are filled.
pub(crate) trait DictCollector {
    /// `items` is key, value, key, value. If this returns a record number, the dict keeps only that number.
    fn collect(&mut self, items: &[PickleValue], heap: &mut PickleHeap) -> Result<Option<u32>, PickleFault>;
}

/// The opcodes of pickle: those that plain data needs, and the names of those that are refused.
pub(crate) mod opcode {

    pub(crate) const PROTO: u8 = 0x80;
    pub(crate) const STOP: u8 = 0x2e;
    pub(crate) const MARK: u8 = 0x28;
    pub(crate) const POP: u8 = 0x30;
    pub(crate) const POP_MARK: u8 = 0x31;
    pub(crate) const BINGET: u8 = 0x68;
    pub(crate) const LONG_BINGET: u8 = 0x6a;
    pub(crate) const MEMOIZE: u8 = 0x94;
    pub(crate) const BINPUT: u8 = 0x71;
    pub(crate) const LONG_BINPUT: u8 = 0x72;
    pub(crate) const EMPTY_DICT: u8 = 0x7d;
    pub(crate) const EMPTY_LIST: u8 = 0x5d;
    pub(crate) const EMPTY_TUPLE: u8 = 0x29;
    pub(crate) const TUPLE: u8 = 0x74;
    pub(crate) const TUPLE1: u8 = 0x85;
    pub(crate) const TUPLE2: u8 = 0x86;
    pub(crate) const TUPLE3: u8 = 0x87;
    pub(crate) const SETITEM: u8 = 0x73;
    pub(crate) const SETITEMS: u8 = 0x75;
    pub(crate) const APPEND: u8 = 0x61;
    pub(crate) const APPENDS: u8 = 0x65;
    pub(crate) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(crate) const BINUNICODE: u8 = 0x58;
    pub(crate) const BINUNICODE8: u8 = 0x8d;
    pub(crate) const BININT1: u8 = 0x4b;
    pub(crate) const BININT2: u8 = 0x4d;
    pub(crate) const BININT: u8 = 0x4a;
    pub(crate) const LONG1: u8 = 0x8a;
    pub(crate) const LONG4: u8 = 0x8b;
    pub(crate) const BINFLOAT: u8 = 0x47;
    pub(crate) const NONE: u8 = 0x4e;
    pub(crate) const NEWTRUE: u8 = 0x88;
    pub(crate) const NEWFALSE: u8 = 0x89;
    pub(crate) const FRAME: u8 = 0x95;

    /// The name of an unsupported opcode in Python's documentation.
    pub(crate) const fn name(code: u8) -> &'static str {
        match code {
            0x32 => "DUP",
            0x42 => "BINBYTES",
            0x43 => "SHORT_BINBYTES",
            0x46 => "FLOAT",
            0x49 => "INT",
            0x4c => "LONG",
            0x50 => "PERSID",
            0x51 => "BINPERSID",
            0x52 => "REDUCE",
            0x53 => "STRING",
            0x54 => "BINSTRING",
            0x55 => "SHORT_BINSTRING",
            0x56 => "UNICODE",
            0x62 => "BUILD",
            0x63 => "GLOBAL",
            0x64 => "DICT",
            0x67 => "GET",
            0x69 => "INST",
            0x6c => "LIST",
            0x6f => "OBJ",
            0x70 => "PUT",
            0x81 => "NEWOBJ",
            0x82 => "EXT1",
            0x83 => "EXT2",
            0x84 => "EXT4",
            0x8e => "BINBYTES8",
            0x8f => "EMPTY_SET",
            0x90 => "ADDITEMS",
            0x91 => "FROZENSET",
            0x92 => "NEWOBJ_EX",
            0x93 => "STACK_GLOBAL",
            0x96 => "BYTEARRAY8",
            0x97 => "NEXT_BUFFER",
            0x98 => "READONLY_BUFFER",
            _ => "unknown",
        }
    }
}
