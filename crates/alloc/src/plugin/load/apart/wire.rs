//! What goes over the socket: calls and answers, a few numbers each.

use std::{
    ffi::c_int,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
};

use crate::plugin::load::call::Call;

/// A call with the device and the stream that it is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) call: Call,
    pub(super) device: c_int,
    pub(super) stream: u64,
}

/// What came of it, if there was anybody to ask.
pub(super) type Answer = Option<u64>;

/// Words longer than this are nobody's.
const MOST_WORDS: u64 = 1 << 16;

pub(super) fn ask(connection: &mut UnixStream, question: &Question) -> io::Result<()> {
    let [kind, bytes, address] = question.call.numbers();
    send(connection, [kind, bytes, address, u64::from(question.device.cast_unsigned()), question.stream])
}

/// The next question; an error of kind `UnexpectedEof` where nobody will ask any more.
pub(super) fn question(connection: &mut UnixStream) -> io::Result<Question> {
    let [kind, bytes, address, device, stream] = receive(connection)?;
    let call = Call::of_numbers([kind, bytes, address]).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Question { call, device: (device as u32).cast_signed(), stream })
}

pub(super) fn answer(connection: &mut UnixStream, answer: Answer) -> io::Result<()> {
    send(connection, [u64::from(answer.is_some()), answer.unwrap_or(0)])
}

pub(super) fn answered(connection: &mut UnixStream) -> io::Result<Answer> {
    let [is_some, value] = receive(connection)?;
    Ok((is_some != 0).then_some(value))
}

/// Says in words why there is no plugin, or that there is one.
pub(super) fn answer_load(connection: &mut UnixStream, refusal: Option<&str>) -> io::Result<()> {
    let words = refusal.unwrap_or_default();
    send(connection, [words.len() as u64])?;
    connection.write_all(words.as_bytes())
}

pub(super) fn answered_load(connection: &mut UnixStream) -> io::Result<Option<String>> {
    let [length] = receive(connection)?;
    let mut words = String::new();
    connection.take(length.min(MOST_WORDS)).read_to_string(&mut words)?;
    Ok((!words.is_empty()).then_some(words))
}

fn send<const N: usize>(connection: &mut UnixStream, numbers: [u64; N]) -> io::Result<()> {
    let bytes: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
    connection.write_all(&bytes)
}

fn receive<const N: usize>(connection: &mut UnixStream) -> io::Result<[u64; N]> {
    let mut numbers = [[0; 8]; N];
    connection.read_exact(numbers.as_flattened_mut())?;
    Ok(numbers.map(u64::from_le_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::Address;

    #[test]
    fn what_is_said_is_what_is_heard() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let said = Question { call: Call::Free { address: Address(1 << 40), bytes: 7 }, device: -1, stream: 3 };
        ask(&mut one, &said).unwrap();
        assert_eq!(question(&mut other).unwrap(), said);
        for said in [None, Some(0), Some(u64::MAX)] {
            answer(&mut other, said).unwrap();
            assert_eq!(answered(&mut one).unwrap(), said);
        }
        for words in [None, Some("no such symbol")] {
            answer_load(&mut other, words).unwrap();
            assert_eq!(answered_load(&mut one).unwrap().as_deref(), words);
        }
        send(&mut one, [99, 0, 0, 0, 0]).unwrap();
        assert_eq!(question(&mut other).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(one);
        assert_eq!(question(&mut other).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
