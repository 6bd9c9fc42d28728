//! Calls of a plugin from several threads at once, in the plugin's own process.
//!
//! PyTorch calls an allocator from the threads of the program, of autograd and of data loaders. Each thread here requests
//! and frees blocks, some of them blocks that another thread requested. Live blocks are compared by address: two that
//! overlap show a race. A crash or a call that never returns shows one too.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

/// The most blocks that a thread holds.
const MOST_LIVE: usize = 24;
/// One block in this many goes to another thread.
const ONE_HANDED_OVER_IN: u64 = 4;
/// Few sizes, so that blocks are reused, split and merged.
const SIZES: [u64; 8] = [512, 700, 4 << 10, 60 << 10, 300 << 10, 1 << 20, (1 << 20) + 1, 3 << 20];

/// What was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThreadsOutcome {
    /// This many requests were served, and no two live blocks overlapped.
    Served(u64),
    /// A block at this address overlapped another live one.
    Overlap(u64),
}

/// The bit of a result that marks an overlap. Addresses are below 2^47.
const OVERLAPS: u64 = 1 << 63;

impl ThreadsOutcome {
    /// As the result of a call.
    pub(super) fn number(self) -> u64 {
        match self {
            ThreadsOutcome::Served(count) => count & !OVERLAPS,
            ThreadsOutcome::Overlap(address) => address | OVERLAPS,
        }
    }

    /// The inverse of [`ThreadsOutcome::number`].
    pub(super) fn of_number(number: u64) -> ThreadsOutcome {
        match number & OVERLAPS {
            0 => ThreadsOutcome::Served(number),
            _ => ThreadsOutcome::Overlap(number & !OVERLAPS),
        }
    }
}

/// The functions under test.
#[derive(Clone, Copy)]
pub(super) struct ThreadFunctions<A, F> {
    /// Bytes; the address, 0 where memory has run out.
    pub(super) alloc: A,
    /// Address, bytes.
    pub(super) free: F,
}

/// What the threads share.
#[derive(Default)]
struct SharedState {
    /// End by start.
    live: Mutex<BTreeMap<u64, u64>>,
    /// Address and bytes of blocks that wait for another thread.
    handed_over: Mutex<Vec<(u64, u64)>>,
    overlap: Mutex<Option<u64>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedState {
    /// Notes a block; false if it overlaps another.
    fn enter(&self, address: u64, bytes: u64) -> bool {
        let mut live = locked(&self.live);
        let end = address.saturating_add(bytes);
        let overlaps = live.range(..end).next_back().is_some_and(|(_, &other)| other > address);
        if overlaps {
            locked(&self.overlap).get_or_insert(address);
        } else {
            live.insert(address, end);
        }
        !overlaps
    }

    fn leave(&self, address: u64) {
        locked(&self.live).remove(&address);
    }
}

/// Makes `calls` calls from each of `threads` threads, and frees everything.
pub(super) fn run_threads<A, F>(functions: ThreadFunctions<A, F>, threads: u64, calls: u64) -> ThreadsOutcome
where
    A: Fn(u64) -> u64 + Copy + Send + Sync,
    F: Fn(u64, u64) + Copy + Send + Sync,
{
    let shared = SharedState::default();
    let served = thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|number| {
                let shared = &shared;
                scope.spawn(move || run_thread(functions, shared, number, calls))
            })
            .collect();
        running.into_iter().map(|thread| thread.join().unwrap_or(0)).sum()
    });
    let overlap = *locked(&shared.overlap);
    if overlap.is_none() {
        let left = std::mem::take(&mut *locked(&shared.handed_over));
        left.into_iter().for_each(|(address, bytes)| (functions.free)(address, bytes));
    }
    overlap.map_or(ThreadsOutcome::Served(served), ThreadsOutcome::Overlap)
}

/// One thread; the number of requests that were served. It ends early once blocks overlap: after that nothing is sure.
fn run_thread<A, F>(functions: ThreadFunctions<A, F>, shared: &SharedState, number: u64, calls: u64) -> u64
where
    A: Fn(u64) -> u64,
    F: Fn(u64, u64),
{
    let mut random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = |below: u64| {
        // Xorshift (Marsaglia 2003): the host's threads need no better numbers.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let mut live: Vec<(u64, u64)> = Vec::new();
    let mut served = 0;
    for _ in 0..calls {
        if locked(&shared.overlap).is_some() {
            return served;
        }
        let wants_more = live.len() < MOST_LIVE && draw(5) < 3;
        if live.is_empty() || wants_more {
            let bytes = SIZES[draw(SIZES.len() as u64) as usize];
            let address = (functions.alloc)(bytes);
            if address != 0 {
                served += 1;
                if !shared.enter(address, bytes) {
                    return served;
                }
                live.push((address, bytes));
            }
        } else {
            let (address, bytes) = live.swap_remove(draw(live.len() as u64) as usize);
            let block = if draw(ONE_HANDED_OVER_IN) == 0 {
                let mut handed_over = locked(&shared.handed_over);
                handed_over.push((address, bytes));
                let place = draw(handed_over.len() as u64) as usize;
                handed_over.swap_remove(place)
            } else {
                (address, bytes)
            };
            shared.leave(block.0);
            (functions.free)(block.0, block.1);
        }
    }
    for (address, bytes) in live {
        shared.leave(address);
        (functions.free)(address, bytes);
    }
    served
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn threads_free_all_they_got() {
        let (next, live) = (AtomicU64::new(1 << 20), AtomicU64::new(0));
        let alloc = |bytes: u64| {
            live.fetch_add(bytes, Ordering::Relaxed);
            next.fetch_add(bytes, Ordering::Relaxed)
        };
        let free = |_: u64, bytes: u64| {
            live.fetch_sub(bytes, Ordering::Relaxed);
        };
        let outcome = run_threads(ThreadFunctions { alloc, free }, 4, 500);
        assert!(matches!(outcome, ThreadsOutcome::Served(count) if count > 500), "{outcome:?}");
        assert_eq!(live.load(Ordering::Relaxed), 0);
        assert_eq!(ThreadsOutcome::of_number(outcome.number()), outcome);
    }

    #[test]
    fn blocks_that_overlap_are_seen() {
        let same = |_: u64| 4096;
        let outcome = run_threads(ThreadFunctions { alloc: same, free: |_, _| {} }, 2, 100);
        assert_eq!(outcome, ThreadsOutcome::Overlap(4096));
        assert_eq!(ThreadsOutcome::of_number(outcome.number()), outcome);
    }
}
