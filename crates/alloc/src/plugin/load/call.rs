//! Which of a plugin's functions is being called, in words: for whoever has to tell that it never came back.

use std::fmt;

use oomph_base::Address;

/// A call of foreign code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// Loading the file runs its initialisers.
    Load,
    /// A request.
    Alloc { bytes: u64 },
    /// A block given back.
    Free { address: Address, bytes: u64 },
    /// A block used on another stream.
    RecordStream { address: Address },
    /// Cached memory asked back.
    Reset,
    /// The question how much it holds.
    Reserved,
    /// The limit told.
    Limit { bytes: u64 },
}

impl Call {
    /// As three numbers, which can be written down without a lock.
    pub(super) fn numbers(self) -> [u64; 3] {
        match self {
            Call::Load => [1, 0, 0],
            Call::Alloc { bytes } => [2, bytes, 0],
            Call::Free { address, bytes } => [3, bytes, address.0],
            Call::RecordStream { address } => [4, 0, address.0],
            Call::Reset => [5, 0, 0],
            Call::Reserved => [6, 0, 0],
            Call::Limit { bytes } => [7, bytes, 0],
        }
    }

    /// What [`Call::numbers`] wrote down.
    pub(super) fn of_numbers([kind, bytes, address]: [u64; 3]) -> Option<Call> {
        let address = Address(address);
        Some(match kind {
            1 => Call::Load,
            2 => Call::Alloc { bytes },
            3 => Call::Free { address, bytes },
            4 => Call::RecordStream { address },
            5 => Call::Reset,
            6 => Call::Reserved,
            7 => Call::Limit { bytes },
            _ => return None,
        })
    }
}

/// Takes no memory, because a dying process says it: sizes are plain numbers, whose unit would have to be put together first.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Call::Load => f.write_str("loading it"),
            Call::Alloc { bytes } => write!(f, "alloc of {bytes} bytes"),
            Call::Free { address, bytes } => write!(f, "free of {bytes} bytes at {address}"),
            Call::RecordStream { address } => write!(f, "record_stream of {address}"),
            Call::Reset => f.write_str("reset"),
            Call::Reserved => f.write_str("reserved"),
            Call::Limit { bytes } => write!(f, "limit of {bytes} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_the_same_call_after_it_was_numbers() {
        let address = Address(0x7000);
        let calls = [
            Call::Load,
            Call::Alloc { bytes: 512 },
            Call::Free { address, bytes: 512 },
            Call::RecordStream { address },
            Call::Reset,
            Call::Reserved,
            Call::Limit { bytes: 1 << 30 },
        ];
        for call in calls {
            assert_eq!(Call::of_numbers(call.numbers()), Some(call));
        }
        assert_eq!(Call::of_numbers([0; 3]), None);
        let words = Call::Free { address, bytes: 512 }.to_string();
        assert!(words.starts_with("free of 512 bytes at 0x"), "{words}");
    }
}
