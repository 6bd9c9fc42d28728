//! NCCL without a network: communicators know their rank and size, collectives carry values as if every rank had this
//! rank's data.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::{
    arguments::{Out, new_handle},
    card::card,
    copies,
    errors::SUCCESS,
    launch, memory, state,
    state::current,
};

const INVALID_ARGUMENT: i32 = 4;

/// `ncclUniqueId`: passed by value, on the stack.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

#[derive(Clone, Copy)]
struct Communicator {
    rank: i32,
    size: i32,
    device: i32,
}

static COMMUNICATORS: Mutex<Option<HashMap<u64, Communicator>>> = Mutex::new(None);

fn with_all<T>(use_them: impl FnOnce(&mut HashMap<u64, Communicator>) -> T) -> T {
    use_them(state::locked(&COMMUNICATORS).get_or_insert_default())
}

fn create(communicator: Out<u64>, size: i32, rank: i32) -> i32 {
    let handle = new_handle(4);
    with_all(|all| all.insert(handle, Communicator { rank, size: size.max(1), device: current::device() as i32 }));
    // What NCCL allocates for its channels is not modelled.
    state::lock().counters.assume("nccl_buffers_not_counted");
    communicator.set(handle);
    SUCCESS
}

fn get(communicator: u64) -> Communicator {
    with_all(|all| all.get(&communicator).copied()).unwrap_or(Communicator { rank: 0, size: 1, device: 0 })
}

/// `ncclDataType_t`: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, two of 8 bits.
fn bytes(count: u64, data_type: i32) -> u64 {
    let width = match data_type {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        4 | 5 | 8 => 8,
        _ => 4,
    };
    count.saturating_mul(width)
}

/// Time on the device (NVLink, 200 bytes per nanosecond), and the values.
fn collective(pieces: &[(u64, u64, u64)], stream: u64) -> i32 {
    let total: u64 = pieces.iter().map(|piece| piece.2).sum();
    launch::library_work(stream, "nccl collective", 10_000 + total / 200, 0);
    for &(target, source, bytes) in pieces.iter().filter(|piece| piece.0 != piece.1 && piece.0 != 0 && piece.1 != 0) {
        copies::carry(target, source, bytes, stream);
    }
    SUCCESS
}

fn split(parent: u64, color: i32, key: i32, communicator: Out<u64>) -> i32 {
    if color < 0 {
        communicator.set(0);
        return SUCCESS;
    }
    // The size of the new group is not among the arguments; it is at most that of the parent.
    state::lock().counters.assume("nccl_split_size");
    create(communicator, get(parent).size, key)
}

cuda_functions! {
    fn ncclGetVersion(version: Out<i32>) -> i32 { version.set(card().nccl); SUCCESS }
    fn ncclGetUniqueId(id: Out<UniqueId>) -> i32 { id.set(UniqueId([7; 128])); SUCCESS }
    fn ncclCommInitRank(communicator: Out<u64>, size: i32, _id: UniqueId, rank: i32) -> i32 { create(communicator, size, rank) }
    fn ncclCommInitRankConfig(communicator: Out<u64>, size: i32, _id: UniqueId, rank: i32, _configuration: u64) -> i32 { create(communicator, size, rank) }
    fn ncclCommInitRankScalable(communicator: Out<u64>, size: i32, rank: i32, _ids: i32, _id: u64, _configuration: u64) -> i32 { create(communicator, size, rank) }
    fn ncclCommInitAll(list: Out<u64>, size: i32, _devices: u64) -> i32 {
        for rank in 0..size.max(0) {
            let mut handle = 0;
            create(Out(&raw mut handle), size, rank);
            list.set_at(rank as usize, handle);
        }
        SUCCESS
    }
    fn ncclCommSplit(parent: u64, color: i32, key: i32, communicator: Out<u64>, _configuration: u64) -> i32 { split(parent, color, key, communicator) }
    fn ncclCommShrink(parent: u64, _excluded: u64, count: i32, communicator: Out<u64>, _configuration: u64, _flags: i32) -> i32 {
        create(communicator, get(parent).size - count, get(parent).rank)
    }
    fn ncclCommDestroy(communicator: u64) -> i32 { with_all(|all| all.remove(&communicator)).map_or(INVALID_ARGUMENT, |_| SUCCESS) }
    fn ncclCommAbort(communicator: u64) -> i32 { with_all(|all| all.remove(&communicator)); SUCCESS }
    fn ncclCommCount(communicator: u64, count: Out<i32>) -> i32 { count.set(get(communicator).size); SUCCESS }
    fn ncclCommUserRank(communicator: u64, rank: Out<i32>) -> i32 { rank.set(get(communicator).rank); SUCCESS }
    fn ncclCommCuDevice(communicator: u64, device: Out<i32>) -> i32 { device.set(get(communicator).device); SUCCESS }
    fn ncclGetErrorString(code: i32) -> *const u8 { if code == SUCCESS { c"no error" } else { c"invalid argument" }.as_ptr().cast() }
    fn ncclGetLastError(_communicator: u64) -> *const u8 { c"".as_ptr().cast() }
    fn ncclMemAlloc(pointer: Out<u64>, size: u64) -> i32 {
        match memory::allocate(size) {
            Ok(address) => { pointer.set(address); SUCCESS }
            Err(_) => { pointer.set(0); 1 }
        }
    }
    fn ncclMemFree(pointer: u64) -> i32 { memory::free(pointer) }
    fn ncclAllReduce(source: u64, target: u64, count: u64, kind: i32, _operation: i32, _communicator: u64, stream: u64) -> i32 {
        collective(&[(target, source, bytes(count, kind))], stream)
    }
    fn ncclReduce(source: u64, target: u64, count: u64, kind: i32, _operation: i32, _root: i32, _communicator: u64, stream: u64) -> i32 {
        collective(&[(target, source, bytes(count, kind))], stream)
    }
    fn ncclBroadcast(source: u64, target: u64, count: u64, kind: i32, _root: i32, _communicator: u64, stream: u64) -> i32 {
        collective(&[(target, source, bytes(count, kind))], stream)
    }
    fn ncclBcast(_buffer: u64, _count: u64, _kind: i32, _root: i32, _communicator: u64, stream: u64) -> i32 { collective(&[], stream) }
    fn ncclAllGather(source: u64, target: u64, count: u64, kind: i32, communicator: u64, stream: u64) -> i32 {
        let size = bytes(count, kind);
        let pieces: Vec<(u64, u64, u64)> = (0..get(communicator).size as u64).map(|rank| (target + rank * size, source, size)).collect();
        collective(&pieces, stream)
    }
    fn ncclReduceScatter(source: u64, target: u64, count: u64, kind: i32, _operation: i32, communicator: u64, stream: u64) -> i32 {
        let size = bytes(count, kind);
        collective(&[(target, source + get(communicator).rank.max(0) as u64 * size, size)], stream)
    }
    fn ncclAlltoAll(source: u64, target: u64, count: u64, kind: i32, communicator: u64, stream: u64) -> i32 {
        collective(&[(target, source, bytes(count, kind) * get(communicator).size as u64)], stream)
    }
    fn ncclSend(_source: u64, _count: u64, _kind: i32, _peer: i32, _communicator: u64, stream: u64) -> i32 { collective(&[], stream) }
    fn ncclRecv(_target: u64, _count: u64, _kind: i32, _peer: i32, _communicator: u64, stream: u64) -> i32 { collective(&[], stream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_communicator_knows_its_rank_and_size() {
        let (mut handle, mut rank, mut size) = (0, -1, -1);
        ncclCommInitRank(Out(&raw mut handle), 8, UniqueId([0; 128]), 5);
        ncclCommUserRank(handle, Out(&raw mut rank));
        ncclCommCount(handle, Out(&raw mut size));
        assert_eq!((rank, size), (5, 8));
        assert_eq!((ncclCommDestroy(handle), ncclCommDestroy(handle)), (SUCCESS, INVALID_ARGUMENT));
    }

    #[test]
    fn a_gather_repeats_the_values_of_this_rank() {
        let (mut handle, device) = (0, memory::allocate(1 << 20).unwrap());
        ncclCommInitRank(Out(&raw mut handle), 3, UniqueId([0; 128]), 0);
        state::lock().values.put(device, vec![1, 2, 3, 4]);
        ncclAllGather(device, device + 512, 1, 2, handle, 0);
        assert_eq!(state::lock().values.get(device + 512, 12), Some([1, 2, 3, 4].repeat(3)));
        memory::free(device);
    }
}
