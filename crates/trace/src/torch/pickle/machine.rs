//! The stack machine that runs a pickle. It has no instructions that call code.

use std::{
    cmp::Ordering,
    collections::HashMap,
    io::{self, Read},
};

use super::{DictCollector, LONGEST_TEXT, PickleError, PickleFault, PickleHeap, PickleValue, opcode as op};
use crate::memory_budget::{MemoryBudget, OutOfBudget};

/// Reads a pickle: all values, and the outermost one. The texts in `known` get the first numbers, in order.
pub(crate) fn load<R: Read, C: DictCollector>(
    reader: R,
    known: &[&str],
    budget: MemoryBudget,
    collector: &mut C,
) -> Result<(PickleHeap, PickleValue), PickleError> {
    let heap = PickleHeap::new(known, budget).map_err(|spent| PickleError { offset: 0, fault: spent.into() })?;
    let mut machine = PickleMachine {
        input: PickleInput::new(reader),
        heap,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Memo::default(),
        spare: Vec::new(),
        collector,
    };
    let root = machine.run()?;
    Ok((machine.heap, root))
}

struct PickleMachine<'a, R, C> {
    input: PickleInput<R>,
    heap: PickleHeap,
    stack: Vec<PickleValue>,
    /// The stack heights of the open marks.
    marks: Vec<usize>,
    memo: Memo,
    spare: Vec<u8>,
    collector: &'a mut C,
}

impl<R: Read, C: DictCollector> PickleMachine<'_, R, C> {
    fn run(&mut self) -> Result<PickleValue, PickleError> {
        let mut offset = 0;
        self.run_from(&mut offset).map_err(|fault| match fault {
            // The input failed behind the opcode.
            PickleFault::Io(_) | PickleFault::Truncated => PickleError { offset: self.input.offset(), fault },
            _ => PickleError { offset, fault },
        })
    }

    /// Runs to the end. `offset` is that of the current opcode.
    fn run_from(&mut self, offset: &mut u64) -> Result<PickleValue, PickleFault> {
        match self.input.byte()? {
            op::PROTO => {}
            other => return Err(PickleFault::NoPickle(other)),
        }
        *offset = 1;
        let protocol = self.input.byte()?;
        if !(2..=5).contains(&protocol) {
            return Err(PickleFault::Protocol(protocol));
        }
        loop {
            *offset = self.input.offset();
            let code = self.input.byte()?;
            if code == op::STOP {
                let root = self.stack.pop().ok_or(PickleFault::Stack { opcode: "STOP", what: "a value" })?;
                *offset = self.input.offset();
                return self.input.expect_end().map(|()| root);
            }
            self.step(code)?;
        }
    }

    #[inline]
    fn step(&mut self, code: u8) -> Result<(), PickleFault> {
        match code {
            op::BINGET => {
                let index = self.input.byte()?;
                self.recall(u32::from(index))?;
            }
            op::LONG_BINGET => {
                let index = u32::from_le_bytes(self.input.array()?);
                self.recall(index)?;
            }
            op::MEMOIZE => self.memoize(self.memo.len())?,
            op::BINPUT => {
                let index = self.input.byte()?;
                self.memoize(u32::from(index))?;
            }
            op::LONG_BINPUT => {
                let index = u32::from_le_bytes(self.input.array()?);
                self.memoize(index)?;
            }
            op::MARK => self.heap.budget.push(&mut self.marks, self.stack.len())?,
            op::EMPTY_DICT => {
                let node = self.heap.new_node()?;
                self.push(PickleValue::Dict(node))?;
            }
            op::EMPTY_LIST => {
                let node = self.heap.new_node()?;
                self.push(PickleValue::List(node))?;
            }
            op::EMPTY_TUPLE => self.make_tuple(self.stack.len())?,
            op::TUPLE1 => self.make_tuple(self.place_of("TUPLE1", 1)?)?,
            op::TUPLE2 => self.make_tuple(self.place_of("TUPLE2", 2)?)?,
            op::TUPLE3 => self.make_tuple(self.place_of("TUPLE3", 3)?)?,
            op::TUPLE => {
                let start = self.pop_mark("TUPLE")?;
                self.make_tuple(start)?;
            }
            op::SETITEMS => {
                let start = self.pop_mark("SETITEMS")?;
                self.set_items("SETITEMS", start)?;
            }
            op::SETITEM => self.set_items("SETITEM", self.place_of("SETITEM", 2)?)?,
            op::APPENDS => {
                let start = self.pop_mark("APPENDS")?;
                self.append("APPENDS", start)?;
            }
            op::APPEND => self.append("APPEND", self.place_of("APPEND", 1)?)?,
            op::SHORT_BINUNICODE => {
                let length = self.input.byte()?;
                self.text(u64::from(length))?;
            }
            op::BINUNICODE => {
                let length = u32::from_le_bytes(self.input.array()?);
                self.text(u64::from(length))?;
            }
            op::BINUNICODE8 => {
                let length = u64::from_le_bytes(self.input.array()?);
                self.text(length)?;
            }
            op::BININT1 => {
                let number = self.input.byte()?;
                self.push(PickleValue::Int(i64::from(number)))?;
            }
            op::BININT2 => {
                let number = u16::from_le_bytes(self.input.array()?);
                self.push(PickleValue::Int(i64::from(number)))?;
            }
            op::BININT => {
                let number = i32::from_le_bytes(self.input.array()?);
                self.push(PickleValue::Int(i64::from(number)))?;
            }
            op::LONG1 => {
                let length = self.input.byte()?;
                self.integer(u64::from(length))?;
            }
            op::LONG4 => {
                let length = u32::from_le_bytes(self.input.array()?);
                self.integer(u64::from(length))?;
            }
            op::BINFLOAT => {
                let number = f64::from_be_bytes(self.input.array()?);
                self.push(PickleValue::Float(number))?;
            }
            op::NONE => self.push(PickleValue::None)?,
            op::NEWTRUE => self.push(PickleValue::Bool(true))?,
            op::NEWFALSE => self.push(PickleValue::Bool(false))?,
            // The length of a frame is a hint for prefetching.
            op::FRAME => drop(self.input.array::<8>()?),
            op::POP => {
                let start = self.place_of("POP", 1)?;
                self.stack.truncate(start);
            }
            op::POP_MARK => {
                let start = self.pop_mark("POP_MARK")?;
                self.stack.truncate(start);
            }
            op::PROTO => drop(self.input.byte()?),
            code => return Err(PickleFault::Opcode { code, name: op::name(code) }),
        }
        Ok(())
    }

    #[inline]
    fn push(&mut self, value: PickleValue) -> Result<(), PickleFault> {
        Ok(self.heap.budget.push(&mut self.stack, value)?)
    }

    #[inline]
    fn recall(&mut self, index: u32) -> Result<(), PickleFault> {
        let value = self.memo.get(index).ok_or_else(|| PickleFault::Memo(u64::from(index)))?;
        self.push(value)
    }

    fn memoize(&mut self, index: u32) -> Result<(), PickleFault> {
        let Some(&value) = self.stack.last() else {
            return Err(PickleFault::Stack { opcode: "a memo opcode", what: "a value" });
        };
        Ok(self.memo.set(index, value, &mut self.heap.budget)?)
    }

    /// The start of the topmost `count` values, which must be above the last mark.
    fn place_of(&self, opcode: &'static str, count: usize) -> Result<usize, PickleFault> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count) {
            Some(start) if start >= floor => Ok(start),
            _ => Err(PickleFault::Stack { opcode, what: "more values" }),
        }
    }

    fn pop_mark(&mut self, opcode: &'static str) -> Result<usize, PickleFault> {
        match self.marks.pop() {
            Some(start) => Ok(start),
            None => Err(PickleFault::Stack { opcode, what: "a mark" }),
        }
    }

    fn make_tuple(&mut self, start: usize) -> Result<(), PickleFault> {
        let node = self.heap.new_node()?;
        self.heap.append(node, &self.stack[start..])?;
        self.stack.truncate(start);
        self.push(PickleValue::Tuple(node))
    }

    fn append(&mut self, opcode: &'static str, start: usize) -> Result<(), PickleFault> {
        match self.below(start) {
            Some(PickleValue::List(node)) => {
                self.heap.append(node, &self.stack[start..])?;
                self.stack.truncate(start);
                Ok(())
            }
            _ => Err(PickleFault::Stack { opcode, what: "a list" }),
        }
    }

    fn set_items(&mut self, opcode: &'static str, start: usize) -> Result<(), PickleFault> {
        let Some(PickleValue::Dict(node)) = self.below(start) else {
            return Err(PickleFault::Stack { opcode, what: "a dict" });
        };
        let items = &self.stack[start..];
        if !items.len().is_multiple_of(2) {
            return Err(PickleFault::Stack { opcode, what: "as many keys as values" });
        }
        if self.heap.record(node).is_some() {
            return Err(PickleFault::Refused("a trace entry is filled twice".to_owned()));
        }
        let taken = match self.heap.is_empty(node) {
            true => self.collector.collect(items, &mut self.heap)?,
            false => None,
        };
        match taken {
            Some(record) => self.heap.set_record(node, record),
            None => self.heap.append(node, items)?,
        }
        self.stack.truncate(start);
        Ok(())
    }

    /// The container below the values from `start` on, unless a mark is between them.
    fn below(&self, start: usize) -> Option<PickleValue> {
        let floor = self.marks.last().copied().unwrap_or(0);
        (start > floor).then(|| self.stack[start - 1])
    }

    fn text(&mut self, length: u64) -> Result<(), PickleFault> {
        if length > LONGEST_TEXT {
            return Err(PickleFault::Text(length));
        }
        let bytes = self.input.bytes(length as usize, &mut self.spare)?;
        // Python writes file names that are not Unicode as invalid UTF-8. They stay readable.
        let text = String::from_utf8_lossy(bytes);
        let text = self.heap.intern(&text)?;
        self.push(PickleValue::Text(text))
    }

    /// Little-endian, in two's complement.
    fn integer(&mut self, length: u64) -> Result<(), PickleFault> {
        let (low, high) = match length {
            0..=8 => (self.input.bytes(length as usize, &mut self.spare)?, None),
            9 => match self.input.bytes(9, &mut self.spare)?.split_last() {
                Some((high, low)) => (low, Some(*high)),
                None => (&[][..], None),
            },
            _ => return Err(PickleFault::Integer(length)),
        };
        let mut word = [0; 8];
        word[..low.len()].copy_from_slice(low);
        let value = match (high, i64::from_le_bytes(word)) {
            (None, _) if low.is_empty() => PickleValue::Int(0),
            (None, number) => {
                let unused = 64 - 8 * low.len();
                PickleValue::Int(number << unused >> unused)
            }
            (Some(0), number) if number < 0 => PickleValue::Unsigned(number as u64),
            (Some(0), number) => PickleValue::Int(number),
            (Some(0xff), number) if number < 0 => PickleValue::Int(number),
            _ => return Err(PickleFault::Integer(length)),
        };
        self.push(value)
    }
}

/// The memoized values. Writers number densely; other numbers are kept apart, so that a huge one costs no memory.
#[derive(Default)]
struct Memo {
    dense: Vec<PickleValue>,
    sparse: HashMap<u32, PickleValue>,
}

impl Memo {
    fn set(&mut self, index: u32, value: PickleValue, budget: &mut MemoryBudget) -> Result<(), OutOfBudget> {
        match (index as usize).cmp(&self.dense.len()) {
            Ordering::Less => self.dense[index as usize] = value,
            Ordering::Equal => budget.push(&mut self.dense, value)?,
            Ordering::Greater => {
                budget.charge(64)?;
                self.sparse.insert(index, value);
            }
        }
        Ok(())
    }

    fn get(&self, index: u32) -> Option<PickleValue> {
        self.dense.get(index as usize).or_else(|| self.sparse.get(&index)).copied()
    }

    fn len(&self) -> u32 {
        (self.dense.len() + self.sparse.len()) as u32
    }
}

const BUFFER_BYTES: usize = 256 << 10;

/// A buffered reader that knows its offset. Memory for a length in the file is taken only as its bytes arrive.
struct PickleInput<R> {
    reader: R,
    buffer: Box<[u8]>,
    /// The range of unread bytes in the buffer.
    at: usize,
    end: usize,
    /// The offset of the buffer in the file.
    before: u64,
}

impl<R: Read> PickleInput<R> {
    fn new(reader: R) -> PickleInput<R> {
        PickleInput { reader, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), at: 0, end: 0, before: 0 }
    }

    /// The offset of the next byte.
    fn offset(&self) -> u64 {
        self.before + self.at as u64
    }

    #[inline]
    fn byte(&mut self) -> Result<u8, PickleFault> {
        if self.at == self.end {
            self.refill()?;
        }
        let byte = self.buffer[self.at];
        self.at += 1;
        Ok(byte)
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleFault> {
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

    /// The next `length` bytes, without a copy if all are in the buffer.
    fn bytes<'a>(&'a mut self, length: usize, spare: &'a mut Vec<u8>) -> Result<&'a [u8], PickleFault> {
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

    /// Reads to the end of the file. A decompressor compares its checksum there.
    fn expect_end(&mut self) -> Result<(), PickleFault> {
        match self.byte() {
            Ok(_) => Err(PickleFault::TrailingBytes),
            Err(PickleFault::Truncated) => Ok(()),
            Err(fault) => Err(fault),
        }
    }

    #[cold]
    fn refill(&mut self) -> Result<(), PickleFault> {
        self.before += self.end as u64;
        self.at = 0;
        self.end = 0;
        loop {
            match self.reader.read(&mut self.buffer) {
                Ok(0) => return Err(PickleFault::Truncated),
                Ok(count) => {
                    self.end = count;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(PickleFault::Io(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use proptest::prelude::*;

    use super::*;

    struct CollectNothing;

    impl DictCollector for CollectNothing {
        fn collect(&mut self, _: &[PickleValue], _: &mut PickleHeap) -> Result<Option<u32>, PickleFault> {
            Ok(None)
        }
    }

    fn loaded(bytes: &[u8]) -> Result<(PickleHeap, PickleValue), PickleError> {
        load(bytes, &[], MemoryBudget::of(1 << 20), &mut CollectNothing)
    }

    fn body(code: &[u8]) -> Result<(PickleHeap, PickleValue), PickleError> {
        loaded(&[&[op::PROTO, 4], code].concat())
    }

    fn complaint(code: &[u8]) -> String {
        body(code).map(|(_, value)| value).unwrap_err().to_string()
    }

    #[test]
    fn integers_have_64_bits_and_a_sign() {
        let number = |code: &[u8]| body(&[code, &[op::STOP]].concat()).unwrap().1;
        assert_eq!(number(&[op::BININT1, 255]), PickleValue::Int(255));
        assert_eq!(number(&[op::BININT2, 0, 1]), PickleValue::Int(256));
        assert_eq!(number(&[op::BININT, 255, 255, 255, 255]), PickleValue::Int(-1));
        assert_eq!(number(&[op::LONG1, 0]), PickleValue::Int(0));
        assert_eq!(number(&[op::LONG1, 1, 0x80]), PickleValue::Int(-128));
        let high = [&[op::LONG1, 9][..], &u64::MAX.to_le_bytes(), &[0]].concat();
        assert_eq!(number(&high), PickleValue::Unsigned(u64::MAX));
        assert_eq!(
            complaint(&[op::LONG1, 9, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
            "byte 2: an integer of 9 bytes; at most 64 bits are expected"
        );
        assert_eq!(
            complaint(&[op::LONG4, 255, 255, 255, 127]),
            "byte 2: an integer of 2147483647 bytes; at most 64 bits are expected"
        );
    }

    #[test]
    fn shared_containers_are_one() {
        // [a, a] with a = ["x"]
        let code = [op::EMPTY_LIST, op::MARK, op::EMPTY_LIST, op::MEMOIZE, op::SHORT_BINUNICODE, 1, b'x', op::APPEND];
        let rest = [op::BINGET, 0, op::APPENDS, op::STOP];
        let (heap, root) = body(&[&code[..], &rest].concat()).unwrap();
        let PickleValue::List(root) = root else { panic!("{root:?}") };
        let items: Vec<PickleValue> = heap.items(root).collect();
        assert_eq!(items.len(), 2);
        assert_eq!(items[0], items[1]);
    }

    #[test]
    fn a_list_that_contains_itself_is_read() {
        let code = [op::EMPTY_LIST, op::MEMOIZE, op::BINGET, 0, op::APPEND, op::STOP];
        let (heap, root) = body(&code).unwrap();
        let PickleValue::List(node) = root else { panic!("{root:?}") };
        assert_eq!(heap.items(node).collect::<Vec<_>>(), [root]);
    }

    #[test]
    fn opcodes_that_run_code_are_refused() {
        for (code, name) in [
            (b'c', "GLOBAL"),
            (b'R', "REDUCE"),
            (b'b', "BUILD"),
            (b'i', "INST"),
            (b'o', "OBJ"),
            (b'P', "PERSID"),
            (b'Q', "BINPERSID"),
            (0x81, "NEWOBJ"),
            (0x82, "EXT1"),
            (0x92, "NEWOBJ_EX"),
            (0x93, "STACK_GLOBAL"),
            (0x97, "NEXT_BUFFER"),
            (0xff, "unknown"),
        ] {
            let refusal = complaint(&[op::NONE, code]);
            assert!(refusal.starts_with(&format!("byte 3: opcode {name} ({code:#04x}) is refused")), "{refusal}");
        }
    }

    #[test]
    fn other_files_are_refused() {
        let refusal = |bytes: &[u8]| loaded(bytes).map(|(_, value)| value).unwrap_err().to_string();
        assert_eq!(refusal(b"PK\x03\x04"), "byte 0: a pickle begins with byte 0x80, this file with 0x50");
        assert_eq!(refusal(&[op::PROTO, 6, op::NONE, op::STOP]), "byte 1: pickle protocol 6; 2 to 5 can be read");
        assert_eq!(refusal(b""), "byte 0: the file ends in the middle of the pickle");
        assert_eq!(complaint(&[op::STOP]), "byte 2: STOP needs a value on the stack");
        assert_eq!(complaint(&[op::APPENDS]), "byte 2: APPENDS needs a mark on the stack");
        assert_eq!(complaint(&[op::NONE, op::MARK, op::APPENDS]), "byte 4: APPENDS needs a list on the stack");
        assert_eq!(complaint(&[op::BINGET, 7]), "byte 2: reference to memo 7, which was never set");
    }

    #[test]
    fn a_huge_length_takes_no_memory() {
        let claim = [&[op::BINUNICODE8][..], &u64::MAX.to_le_bytes()].concat();
        assert!(complaint(&claim).contains("a text of 18446744073709551615 bytes"));
        let claim = [&[op::BINUNICODE][..], &1_000_000_u32.to_le_bytes(), b"short"].concat();
        assert_eq!(complaint(&claim), "byte 12: the file ends in the middle of the pickle");
    }

    #[test]
    fn a_bomb_exceeds_the_budget() {
        for code in [op::EMPTY_LIST, op::MARK, op::EMPTY_DICT, op::NONE, op::EMPTY_TUPLE] {
            let refusal = complaint(&vec![code; 1 << 20]);
            assert!(refusal.ends_with("what it describes needs more than 1.00 MiB of memory"), "{refusal}");
        }
        let memos: Vec<u8> =
            (0..1 << 17).flat_map(|index: u32| [&[op::LONG_BINPUT][..], &(index * 7).to_le_bytes()].concat()).collect();
        let refusal = complaint(&[&[op::NONE][..], &memos].concat());
        assert!(refusal.ends_with("of memory"), "{refusal}");
    }

    #[test]
    fn a_huge_memo_number_costs_nothing() {
        let far =
            [&[op::NONE, op::LONG_BINPUT][..], &u32::MAX.to_le_bytes(), &[op::LONG_BINGET], &u32::MAX.to_le_bytes()];
        assert_eq!(body(&[&far.concat()[..], &[op::STOP]].concat()).unwrap().1, PickleValue::None);
    }

    /// Random opcodes reach further than random bytes.
    fn opcodes() -> impl proptest::strategy::Strategy<Value = Vec<u8>> {
        let known = prop::sample::select(vec![
            op::MARK,
            op::POP,
            op::POP_MARK,
            op::BINGET,
            op::MEMOIZE,
            op::BINPUT,
            op::EMPTY_DICT,
            op::EMPTY_LIST,
            op::EMPTY_TUPLE,
            op::TUPLE,
            op::TUPLE1,
            op::TUPLE2,
            op::TUPLE3,
            op::SETITEM,
            op::SETITEMS,
            op::APPEND,
            op::APPENDS,
            op::SHORT_BINUNICODE,
            op::BININT1,
            op::LONG1,
            op::NONE,
            op::NEWTRUE,
            op::STOP,
            0,
            1,
            2,
        ]);
        prop::collection::vec(prop_oneof![9 => known, 1 => any::<u8>()], 0..300)
    }

    proptest! {
        #[test]
        fn no_input_panics(code in opcodes(), garbage in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = body(&code);
            let _ = loaded(&garbage);
        }

        #[test]
        fn input_may_arrive_byte_by_byte(code in opcodes()) {
            struct Dribble<'a>(&'a [u8]);
            impl Read for Dribble<'_> {
                fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
                    let count = to.len().min(self.0.len()).min(1);
                    to[..count].copy_from_slice(&self.0[..count]);
                    self.0 = &self.0[count..];
                    Ok(count)
                }
            }
            let bytes = [&[op::PROTO, 4], &code[..]].concat();
            let shown = |result: Result<(PickleHeap, PickleValue), PickleError>| match result {
                Ok((_, value)) => format!("{value:?}"),
                Err(error) => error.to_string(),
            };
            let in_pieces = load(Dribble(&bytes), &[], MemoryBudget::of(1 << 20), &mut CollectNothing);
            prop_assert_eq!(shown(in_pieces), shown(loaded(&bytes)));
        }
    }
}
