//! Communicators: their members, and which of them other processes rehearse.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use super::exchange::{Channel, Exchange};
use crate::{
    arguments::{In, Out, new_handle},
    errors::SUCCESS,
    state::{self, current, locked},
};

/// `ncclUniqueId`: passed by value, on the stack.
#[repr(C)]
#[derive(Clone, Copy, Hash)]
pub struct UniqueId(pub [u8; 128]);

impl UniqueId {
    /// Different in every call and process.
    pub fn new() -> UniqueId {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let number = hashed(&(std::process::id(), CALLS.fetch_add(1, Ordering::Relaxed), now)).to_le_bytes();
        UniqueId(std::array::from_fn(|index| number[index % 8]))
    }
}

/// The same in all processes: the hasher has fixed keys.
fn hashed(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

pub struct Communicator {
    /// The same for all of its ranks, in all processes.
    identity: u64,
    pub rank: i32,
    pub size: i32,
    pub device: i32,
    /// Where the other ranks are processes of this rehearsal. Otherwise this rank's data stands for theirs.
    pub exchange: Option<Exchange>,
    /// Exchanges so far, by file. Ranks call the functions of a communicator in the same order.
    numbers: Mutex<HashMap<Channel, u64>>,
}

impl Communicator {
    pub fn new(identity: u64, size: i32, rank: i32, with_exchange: bool) -> Communicator {
        let folder = std::env::var_os("OOMPH_SHADOW_EXCHANGE").filter(|_| with_exchange && size > 1).map(PathBuf::from);
        Communicator {
            identity,
            rank,
            size: size.max(1),
            device: current::device() as i32,
            exchange: folder.map(|folder| Exchange::new(&folder, identity)),
            numbers: Mutex::default(),
        }
    }

    /// The number of the next record in a file. Contributions to one collective have one number in all files.
    pub fn next_number(&self, channel: Channel) -> u64 {
        let mut numbers = locked(&self.numbers);
        let next = numbers.entry(channel).or_default();
        *next += 1;
        *next - 1
    }
}

static COMMUNICATORS: Mutex<Option<HashMap<u64, Arc<Communicator>>>> = Mutex::new(None);
/// Sizes of groups by colour, told by the injected module: `ncclCommSplit` does not get them.
static SIZES: Mutex<Option<HashMap<i32, i32>>> = Mutex::new(None);
/// The key in [`SIZES`] of a group whose colour the injected module does not know: the next split makes it.
const NEXT_SPLIT: i32 = -1;

fn with_all<T>(use_them: impl FnOnce(&mut HashMap<u64, Arc<Communicator>>) -> T) -> T {
    use_them(locked(&COMMUNICATORS).get_or_insert_default())
}

/// Adds a communicator and gives its handle to the caller.
pub fn add(communicator: Communicator, handle: Out<u64>) -> i32 {
    let mut shadow = state::lock();
    // What NCCL allocates for its channels is not modelled.
    shadow.counters.assume("nccl_buffers_not_counted");
    if communicator.size > 1 && communicator.exchange.is_none() {
        shadow.counters.assume("absent_ranks");
    }
    drop(shadow);
    let number = new_handle(4);
    with_all(|all| all.insert(number, Arc::new(communicator)));
    handle.set(number);
    SUCCESS
}

/// The communicator of a handle. One that is not known has one rank.
pub fn get(handle: u64) -> Arc<Communicator> {
    with_all(|all| all.get(&handle).cloned()).unwrap_or_else(|| Arc::new(Communicator::new(0, 1, 0, false)))
}

/// Whether there was one.
pub fn remove(handle: u64) -> bool {
    with_all(|all| all.remove(&handle)).is_some()
}

/// By `ncclCommInitRank` and its relatives.
pub fn initialise(handle: Out<u64>, size: i32, id: &UniqueId, rank: i32) -> i32 {
    add(Communicator::new(hashed(id), size, rank, true), handle)
}

/// `ncclCommSplit`: ranks of one colour form a communicator, in the order of their keys.
pub fn split(parent: u64, color: i32, key: i32, handle: Out<u64>) -> i32 {
    let parent = get(parent);
    let channel = |from| Channel::Collectives { from };
    let number = parent.next_number(channel(parent.rank));
    let mut members = None;
    if let Some(exchange) = &parent.exchange {
        let own = [color.to_le_bytes(), key.to_le_bytes()].concat();
        exchange.post(channel(parent.rank), number, Some(&own));
        let all = (0..parent.size).map(|rank| exchange.wait(channel(rank), number).ok().flatten());
        members = all.collect::<Option<Vec<_>>>();
    }
    if color < 0 {
        handle.set(0);
        return SUCCESS;
    }
    let identity = hashed(&(parent.identity, number, color));
    let Some(members) = members else {
        return add(Communicator::new(identity, told_size(color, parent.size), key, false), handle);
    };
    let word = |bytes: &[u8], at: usize| bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
    let word = |bytes: &[u8], at: usize| word(bytes, at).map_or(-1, i32::from_le_bytes);
    let same = members.iter().enumerate().filter(|(_, bytes)| word(bytes, 0) == color);
    let mut same: Vec<(i32, i32)> = same.map(|(rank, bytes)| (word(bytes, 4), rank as i32)).collect();
    same.sort_unstable();
    let rank = same.iter().position(|member| member.1 == parent.rank).unwrap_or(0) as i32;
    add(Communicator::new(identity, same.len() as i32, rank, true), handle)
}

/// The size of a group whose other ranks are not there.
fn told_size(color: i32, largest: i32) -> i32 {
    let mut sizes = locked(&SIZES);
    let sizes = sizes.get_or_insert_default();
    if let Some(size) = sizes.remove(&NEXT_SPLIT).or(sizes.get(&color).copied()) {
        return size;
    }
    if largest > 1 {
        state::lock().counters.assume("nccl_split_size");
    }
    largest
}

/// `ncclCommShrink`: the same ranks without some.
pub fn shrink(parent: u64, excluded: In<i32>, count: i32, handle: Out<u64>) -> i32 {
    let parent = get(parent);
    let number = parent.next_number(Channel::Collectives { from: parent.rank });
    let excluded = (0..count.max(0) as usize).filter_map(|index| excluded.get_at(index));
    let before = excluded.filter(|&rank| rank < parent.rank).count() as i32;
    let identity = hashed(&(parent.identity, number, "shrink"));
    let with_exchange = parent.exchange.is_some();
    add(Communicator::new(identity, parent.size - count, parent.rank - before, with_exchange), handle)
}

/// The injected module tells the size of a group before it is split off; a negative colour stands for the next split.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_shadow_group_size(color: i32, size: i32) {
    locked(&SIZES).get_or_insert_default().insert(color.max(NEXT_SPLIT), size);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_group_has_the_size_that_was_told() {
        let (mut parent, mut child) = (0, 0);
        initialise(Out(&raw mut parent), 8, &UniqueId([0; 128]), 5);
        let mut of = |color| {
            split(parent, color, 1, Out(&raw mut child));
            (get(child).rank, get(child).size)
        };
        assert_eq!(of(3), (1, 8), "nothing was told: as large as its parent");
        oomph_shadow_group_size(3, 4);
        assert_eq!((of(3), of(3)), ((1, 4), (1, 4)));
        oomph_shadow_group_size(-1, 2);
        assert_eq!((of(9), of(9)), ((1, 2), (1, 8)), "the next split only");
    }

    #[test]
    fn ids_differ() {
        assert_ne!(UniqueId::new().0, UniqueId::new().0);
    }
}
