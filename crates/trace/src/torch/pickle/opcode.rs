//! The opcodes of pickle: those that plain data needs, and the names of those that are refused.

pub(in crate::torch) const PROTO: u8 = 0x80;
pub(in crate::torch) const STOP: u8 = 0x2e;
pub(in crate::torch) const MARK: u8 = 0x28;
pub(in crate::torch) const POP: u8 = 0x30;
pub(in crate::torch) const POP_MARK: u8 = 0x31;
pub(in crate::torch) const BINGET: u8 = 0x68;
pub(in crate::torch) const LONG_BINGET: u8 = 0x6a;
pub(in crate::torch) const MEMOIZE: u8 = 0x94;
pub(in crate::torch) const BINPUT: u8 = 0x71;
pub(in crate::torch) const LONG_BINPUT: u8 = 0x72;
pub(in crate::torch) const EMPTY_DICT: u8 = 0x7d;
pub(in crate::torch) const EMPTY_LIST: u8 = 0x5d;
pub(in crate::torch) const EMPTY_TUPLE: u8 = 0x29;
pub(in crate::torch) const TUPLE: u8 = 0x74;
pub(in crate::torch) const TUPLE1: u8 = 0x85;
pub(in crate::torch) const TUPLE2: u8 = 0x86;
pub(in crate::torch) const TUPLE3: u8 = 0x87;
pub(in crate::torch) const SETITEM: u8 = 0x73;
pub(in crate::torch) const SETITEMS: u8 = 0x75;
pub(in crate::torch) const APPEND: u8 = 0x61;
pub(in crate::torch) const APPENDS: u8 = 0x65;
pub(in crate::torch) const SHORT_BINUNICODE: u8 = 0x8c;
pub(in crate::torch) const BINUNICODE: u8 = 0x58;
pub(in crate::torch) const BINUNICODE8: u8 = 0x8d;
pub(in crate::torch) const BININT1: u8 = 0x4b;
pub(in crate::torch) const BININT2: u8 = 0x4d;
pub(in crate::torch) const BININT: u8 = 0x4a;
pub(in crate::torch) const LONG1: u8 = 0x8a;
pub(in crate::torch) const LONG4: u8 = 0x8b;
pub(in crate::torch) const BINFLOAT: u8 = 0x47;
pub(in crate::torch) const NONE: u8 = 0x4e;
pub(in crate::torch) const NEWTRUE: u8 = 0x88;
pub(in crate::torch) const NEWFALSE: u8 = 0x89;
pub(in crate::torch) const FRAME: u8 = 0x95;

/// What Python's documentation calls an opcode that is not read here.
pub(super) const fn name(code: u8) -> &'static str {
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
