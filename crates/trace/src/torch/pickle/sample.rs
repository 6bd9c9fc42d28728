//! Pickles for tests: plain data, written in the ways of Python's protocol 4 and of PyTorch's C++ writer (protocol 2).

use super::opcode as op;

/// PlainValue data.
#[derive(Clone, Debug)]
pub(crate) enum PlainValue {
    Int(i128),
    Bool(bool),
    Float(f64),
    Text(&'static str),
    List(Vec<PlainValue>),
    Pair(i64, i64),
    Dict(Vec<(&'static str, PlainValue)>),
}

impl PlainValue {
    pub(crate) fn pickle(&self, protocol: u8) -> Vec<u8> {
        let mut bytes = vec![op::PROTO, protocol];
        self.write(protocol, &mut bytes);
        bytes.push(op::STOP);
        bytes
    }

    fn write(&self, protocol: u8, to: &mut Vec<u8>) {
        match self {
            PlainValue::Int(number) => {
                let length = if i64::try_from(*number).is_ok() { 8 } else { 9 };
                to.extend([op::LONG1, length]);
                to.extend(&number.to_le_bytes()[..length as usize]);
            }
            PlainValue::Bool(value) => to.push(if *value { op::NEWTRUE } else { op::NEWFALSE }),
            PlainValue::Float(number) => {
                to.push(op::BINFLOAT);
                to.extend(number.to_be_bytes());
            }
            PlainValue::Text(text) => write_text(text, protocol, to),
            PlainValue::List(items) => {
                to.extend([op::EMPTY_LIST, op::MARK]);
                items.iter().for_each(|item| item.write(protocol, to));
                to.push(op::APPENDS);
            }
            PlainValue::Pair(first, second) => {
                PlainValue::Int((*first).into()).write(protocol, to);
                PlainValue::Int((*second).into()).write(protocol, to);
                to.push(op::TUPLE2);
            }
            PlainValue::Dict(items) => {
                to.extend([op::EMPTY_DICT, op::MARK]);
                for (key, value) in items {
                    write_text(key, protocol, to);
                    value.write(protocol, to);
                }
                to.push(op::SETITEMS);
            }
        }
    }
}

fn write_text(text: &str, protocol: u8, to: &mut Vec<u8>) {
    if protocol >= 4 {
        to.extend([op::SHORT_BINUNICODE, text.len() as u8]);
    } else {
        to.push(op::BINUNICODE);
        to.extend((text.len() as u32).to_le_bytes());
    }
    to.extend(text.as_bytes());
    // The C++ writer memorises texts under numbers that it gives in order; one number will do here.
    to.extend(if protocol >= 4 { &[op::MEMOIZE][..] } else { &[op::BINPUT, 0][..] });
}
