//! NCCL without a network: communicators know their ranks, collectives carry small values between the processes of a
//! rehearsal, or as if every rank had this rank's data.

mod collectives;
mod communicators;
mod exchange;
mod reductions;

use self::{
    collectives::{Collective, collective, receive, send},
    communicators::{Communicator, UniqueId, add, get, initialise, remove, shrink, split},
    reductions::{DataType, Operation},
};
use crate::{
    arguments::{In, Out},
    card::card,
    errors::SUCCESS,
    memory,
};

const INVALID_ARGUMENT: i32 = 4;

cuda_functions! {
    fn ncclGetVersion(version: Out<i32>) -> i32 { version.set(card().nccl); SUCCESS }
    fn ncclGetUniqueId(id: Out<UniqueId>) -> i32 { id.set(UniqueId::new()); SUCCESS }
    fn ncclCommInitRank(communicator: Out<u64>, size: i32, id: UniqueId, rank: i32) -> i32 { initialise(communicator, size, &id, rank) }
    fn ncclCommInitRankConfig(communicator: Out<u64>, size: i32, id: UniqueId, rank: i32, _configuration: u64) -> i32 { initialise(communicator, size, &id, rank) }
    fn ncclCommInitRankScalable(communicator: Out<u64>, size: i32, rank: i32, _ids: i32, id: In<UniqueId>, _configuration: u64) -> i32 {
        initialise(communicator, size, &id.get().unwrap_or(UniqueId([0; 128])), rank)
    }
    fn ncclCommInitAll(list: Out<u64>, size: i32, _devices: u64) -> i32 {
        for rank in 0..size.max(0) {
            let mut handle = 0;
            add(Communicator::new(0, size, rank, false), Out(&raw mut handle));
            list.set_at(rank as usize, handle);
        }
        SUCCESS
    }
    fn ncclCommSplit(parent: u64, color: i32, key: i32, communicator: Out<u64>, _configuration: u64) -> i32 { split(parent, color, key, communicator) }
    fn ncclCommShrink(parent: u64, excluded: In<i32>, count: i32, communicator: Out<u64>, _configuration: u64, _flags: i32) -> i32 {
        shrink(parent, excluded, count, communicator)
    }
    fn ncclCommDestroy(communicator: u64) -> i32 { if remove(communicator) { SUCCESS } else { INVALID_ARGUMENT } }
    fn ncclCommAbort(communicator: u64) -> i32 { remove(communicator); SUCCESS }
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
    fn ncclAllReduce(source: u64, target: u64, count: u64, kind: i32, operation: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::AllReduce { operation: Operation::of(operation) }, source, target, count, DataType(kind), communicator, stream)
    }
    fn ncclReduce(source: u64, target: u64, count: u64, kind: i32, operation: i32, root: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::Reduce { operation: Operation::of(operation), root }, source, target, count, DataType(kind), communicator, stream)
    }
    fn ncclBroadcast(source: u64, target: u64, count: u64, kind: i32, root: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::Broadcast { root }, source, target, count, DataType(kind), communicator, stream)
    }
    fn ncclBcast(buffer: u64, count: u64, kind: i32, root: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::Broadcast { root }, buffer, buffer, count, DataType(kind), communicator, stream)
    }
    fn ncclAllGather(source: u64, target: u64, count: u64, kind: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::AllGather, source, target, count, DataType(kind), communicator, stream)
    }
    fn ncclReduceScatter(source: u64, target: u64, count: u64, kind: i32, operation: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::ReduceScatter { operation: Operation::of(operation) }, source, target, count, DataType(kind), communicator, stream)
    }
    fn ncclAlltoAll(source: u64, target: u64, count: u64, kind: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::AllToAll, source, target, count, DataType(kind), communicator, stream)
    }
    fn ncclGather(source: u64, target: u64, count: u64, kind: i32, root: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::Gather { root }, source, target, count, DataType(kind), communicator, stream)
    }
    fn ncclScatter(source: u64, target: u64, count: u64, kind: i32, root: i32, communicator: u64, stream: u64) -> i32 {
        collective(Collective::Scatter { root }, source, target, count, DataType(kind), communicator, stream)
    }
    fn ncclSend(source: u64, count: u64, kind: i32, peer: i32, communicator: u64, stream: u64) -> i32 { send(source, count, DataType(kind), peer, communicator, stream) }
    fn ncclRecv(target: u64, count: u64, kind: i32, peer: i32, communicator: u64, stream: u64) -> i32 { receive(target, count, DataType(kind), peer, communicator, stream) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state;

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
    fn the_data_of_this_rank_stands_for_that_of_absent_ones() {
        let (mut handle, device) = (0, memory::allocate(1 << 20).unwrap());
        ncclCommInitRank(Out(&raw mut handle), 3, UniqueId([0; 128]), 0);
        state::lock().values.put(device, vec![1, 2, 3, 4]);
        ncclAllGather(device, device + 512, 1, 2, handle, 0);
        assert_eq!(state::lock().values.get(device + 512, 12), Some([1, 2, 3, 4].repeat(3)));
        ncclAllReduce(device, device + 512, 4, 1, 0, handle, 0);
        assert_eq!(state::lock().values.get(device + 512, 4), Some(vec![3, 6, 9, 12]));
        ncclAllReduce(device + 4096, device + 512, 4, 1, 0, handle, 0);
        assert_eq!(state::lock().values.get(device + 512, 4), None, "what is not known stays so");
        memory::free(device);
    }
}
