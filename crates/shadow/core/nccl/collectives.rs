//! Collectives and messages: their time on the device, and the values that they carry.
//!
//! A call never waits. Where the other ranks are processes of this rehearsal, its result is pending until the program
//! reads it: waiting in the call would block programs whose ranks call functions of different communicators in different
//! orders, as pipelines do.

use std::sync::Arc;

use super::{
    communicators::{self, Communicator},
    exchange::{Channel, NotReceived},
    reductions::{DataType, Operation, reduced},
};
use crate::{
    card::card,
    errors::SUCCESS,
    launch, state,
    values::{self, PendingValue},
};

/// What the ranks get from the contributions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Collective {
    /// One after the other.
    AllGather,
    Gather {
        root: i32,
    },
    /// Combined; every rank gets all of it.
    AllReduce {
        operation: Option<Operation>,
    },
    Reduce {
        operation: Option<Operation>,
        root: i32,
    },
    /// Combined; every rank gets its part.
    ReduceScatter {
        operation: Option<Operation>,
    },
    Broadcast {
        root: i32,
    },
    /// Every rank gets its part of the root's.
    Scatter {
        root: i32,
    },
    /// Every rank gets its part of each.
    AllToAll,
}

impl Collective {
    /// The only rank that contributes.
    fn source(self) -> Option<i32> {
        match self {
            Collective::Broadcast { root } | Collective::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// The only rank that gets a result.
    fn target(self) -> Option<i32> {
        match self {
            Collective::Gather { root } | Collective::Reduce { root, .. } => Some(root),
            _ => None,
        }
    }

    /// How many times `count` elements a rank contributes and gets.
    fn parts(self, size: u64) -> (u64, u64) {
        match self {
            Collective::AllGather | Collective::Gather { .. } => (1, size),
            Collective::AllReduce { .. } | Collective::Reduce { .. } | Collective::Broadcast { .. } => (1, 1),
            Collective::ReduceScatter { .. } | Collective::Scatter { .. } => (size, 1),
            Collective::AllToAll => (size, size),
        }
    }

    /// What this rank gets from known contributions, in the order of ranks; of the only source where there is one.
    fn result(self, contributions: &[Vec<u8>], kind: DataType, rank: i32, size: i32) -> Option<Vec<u8>> {
        let part = |bytes: &[u8]| {
            let length = bytes.len() / size.max(1) as usize;
            Some(bytes.get(rank.max(0) as usize * length..)?.get(..length)?.to_vec())
        };
        match self {
            Collective::AllGather | Collective::Gather { .. } => Some(contributions.concat()),
            Collective::AllReduce { operation } | Collective::Reduce { operation, .. } => {
                reduced(contributions, kind, operation?)
            }
            Collective::ReduceScatter { operation } => part(&reduced(contributions, kind, operation?)?),
            Collective::Broadcast { .. } => contributions.first().cloned(),
            Collective::Scatter { .. } => part(contributions.first()?),
            Collective::AllToAll => {
                Some(contributions.iter().map(|bytes| part(bytes)).collect::<Option<Vec<_>>>()?.concat())
            }
        }
    }
}

/// Bytes per nanosecond of NVLink, and what a collective takes at least.
const LINK_BYTES_PER_NANO: u64 = 200;
const FLOOR_NANOS: u64 = 10_000;

/// Whether it is part of a capture. Each launch of the graph then makes the result unknown.
fn work(bytes: u64, target: u64, stream: u64) -> bool {
    let captured = launch::library_work(stream, "nccl collective", FLOOR_NANOS + bytes / LINK_BYTES_PER_NANO, 0);
    if captured && target != 0 {
        let mut shadow = state::lock();
        shadow.captures.note_write(stream, target, bytes);
        shadow.values.forget(target, bytes);
    }
    captured
}

/// The bytes at an address on the device, if they are known. Waits for a value that is itself pending.
fn known(address: u64, bytes: u64) -> Option<Vec<u8>> {
    values::settle(address, bytes);
    state::lock().values.get(address, bytes)
}

/// Sets or erases what is known at an address.
fn set(target: u64, bytes: u64, value: Option<Vec<u8>>) {
    let mut shadow = state::lock();
    match value {
        Some(value) if value.len() as u64 == bytes => shadow.values.put(target, value),
        _ => shadow.values.forget(target, bytes),
    }
}

/// `count` is that of NCCL's function: elements of one part.
pub fn collective(
    what: Collective,
    source: u64,
    target: u64,
    count: u64,
    kind: DataType,
    communicator: u64,
    stream: u64,
) -> i32 {
    let communicator = communicators::get(communicator);
    let (given, got) = what.parts(communicator.size as u64);
    let (given, got) = (kind.bytes(count.saturating_mul(given)), kind.bytes(count.saturating_mul(got)));
    // All ranks capture alike, so none of them exchanges anything.
    if work(given.max(got), target, stream) {
        return SUCCESS;
    }
    let gives = what.source().is_none_or(|root| root == communicator.rank);
    let gets = what.target().is_none_or(|root| root == communicator.rank);
    // All ranks pass the same count, so none of them exchanges anything.
    if given > card().keep || got > card().keep * communicator.size as u64 {
        if gets {
            set(target, got, None);
        }
        return SUCCESS;
    }
    if communicator.exchange.is_some() {
        exchange(what, communicator, source, target, (given, got), kind);
    } else if gives && gets {
        // Every rank had this rank's data.
        let ranks = if what.source().is_some() { 1 } else { communicator.size as usize };
        let own = known(source, given);
        let result = own.and_then(|own| what.result(&vec![own; ranks], kind, communicator.rank, communicator.size));
        set(target, got, result);
    } else if !gives && !matches!(what, Collective::Broadcast { .. }) {
        // A broadcast by an absent rank leaves what this rank has.
        set(target, got, None);
    }
    SUCCESS
}

fn exchange(
    what: Collective,
    communicator: Arc<Communicator>,
    source: u64,
    target: u64,
    (given, got): (u64, u64),
    kind: DataType,
) {
    let Some(exchange) = &communicator.exchange else { return };
    let own_channel = Channel::Collectives { from: communicator.rank };
    let number = communicator.next_number(own_channel);
    let gives = what.source().is_none_or(|root| root == communicator.rank);
    let own = if gives { known(source, given) } else { None };
    if gives {
        exchange.post(own_channel, number, own.as_deref());
    }
    if what.target().is_some_and(|root| root != communicator.rank) {
        return;
    }
    // Without this rank's own contribution the result is not known, whatever the others give.
    if gives && own.is_none() {
        set(target, got, None);
    } else {
        let from = what.source().map_or_else(|| (0..communicator.size).collect(), |root| vec![root]);
        let channels = from.into_iter().map(|from| Channel::Collectives { from }).collect();
        put_pending(target, got, PendingResult { communicator, channels, number, what: Some(what), kind });
    }
}

pub fn send(source: u64, count: u64, kind: DataType, peer: i32, communicator: u64, stream: u64) -> i32 {
    let communicator = communicators::get(communicator);
    let bytes = kind.bytes(count);
    if work(bytes, 0, stream) {
        return SUCCESS;
    }
    if let Some(exchange) = communicator.exchange.as_ref().filter(|_| bytes <= card().keep) {
        let channel = Channel::Messages { from: communicator.rank, to: peer };
        let number = communicator.next_number(channel);
        exchange.post(channel, number, known(source, bytes).as_deref());
    }
    SUCCESS
}

pub fn receive(target: u64, count: u64, kind: DataType, peer: i32, communicator: u64, stream: u64) -> i32 {
    let communicator = communicators::get(communicator);
    let bytes = kind.bytes(count);
    if work(bytes, target, stream) {
        return SUCCESS;
    }
    if communicator.exchange.is_none() || bytes > card().keep {
        set(target, bytes, None);
        return SUCCESS;
    }
    // Both ranks count the messages from one to the other; a message to itself has one counter for each end.
    let channel = Channel::Messages { from: peer, to: communicator.rank };
    let received = Channel::Messages { from: peer, to: -1 };
    let number = communicator.next_number(received);
    put_pending(target, bytes, PendingResult { communicator, channels: vec![channel], number, what: None, kind });
    SUCCESS
}

fn put_pending(target: u64, bytes: u64, pending: PendingResult) {
    state::lock().values.put_pending(target, bytes, Arc::new(pending));
}

/// A result that other processes have a part in.
struct PendingResult {
    communicator: Arc<Communicator>,
    channels: Vec<Channel>,
    number: u64,
    /// None for a message.
    what: Option<Collective>,
    kind: DataType,
}

impl PendingValue for PendingResult {
    fn wait(&self) -> Option<Vec<u8>> {
        let exchange = self.communicator.exchange.as_ref()?;
        let mut contributions = Vec::with_capacity(self.channels.len());
        for &channel in &self.channels {
            match exchange.wait(channel, self.number) {
                Ok(contribution) => contributions.push(contribution?),
                Err(NotReceived::TimedOut) => {
                    state::lock().counters.assume("rank_did_not_contribute");
                    return None;
                }
                Err(NotReceived::Interrupted) => return None,
            }
        }
        match self.what {
            Some(what) => what.result(&contributions, self.kind, self.communicator.rank, self.communicator.size),
            None => contributions.pop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_follow_the_rank() {
        let two = [vec![1u8, 2], vec![3u8, 4]];
        let of = |what: Collective, rank| what.result(&two, DataType(1), rank, 2).unwrap();
        let operation = Some(Operation::Sum);
        assert_eq!(of(Collective::AllGather, 1), [1, 2, 3, 4]);
        assert_eq!(of(Collective::AllReduce { operation }, 0), [4, 6]);
        assert_eq!(
            (of(Collective::ReduceScatter { operation }, 0), of(Collective::ReduceScatter { operation }, 1)),
            (vec![4], vec![6])
        );
        assert_eq!((of(Collective::AllToAll, 0), of(Collective::AllToAll, 1)), (vec![1, 3], vec![2, 4]));
        assert_eq!(of(Collective::Scatter { root: 0 }, 1), [2]);
        assert_eq!(Collective::AllReduce { operation: None }.result(&two, DataType(1), 0, 2), None);
    }
}
