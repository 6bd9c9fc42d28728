//! The calls about memory, streams and events that the library can pass on to the program that loaded it.
//!
//! A program is rehearsed on the library's own books. A plugin runs on the simulated device of the case that uses it: its
//! host sets a function ([`Serve`]) that answers these calls. Compiled into the library and into its host, so that both
//! number them alike.

/// `cuMemAlloc` memory of all devices lies below this address, in the process that loads the library. Linux puts programs and
/// their heaps at 85 TiB to 101 TiB and maps files and stacks from 128 TiB downwards, by up to 16 TiB less with 32 random
/// bits (`vm.mmap_rnd_bits`); between them nothing is placed. The driver takes addresses just below 127 TiB, but only
/// differences of addresses matter to allocators.
pub const ADDRESS_END: u64 = 111 << 40;
/// Addresses of all devices together.
pub const ADDRESS_BYTES: u64 = 8 << 40;

/// What is asked. Arguments and results are numbers; those that are not named are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ServedCall {
    /// Bytes; the address.
    MemAlloc = 1,
    /// Address.
    MemFree,
    /// Nothing; free bytes, total bytes.
    MemGetInfo,
    /// Nothing; the stream.
    StreamCreate,
    /// Stream.
    StreamSynchronize,
    /// Stream; 1 if its work is done.
    StreamQuery,
    /// Stream, event.
    StreamWaitEvent,
    /// Nothing.
    CtxSynchronize,
    /// Nothing; the event.
    EventCreate,
    /// Event.
    EventDestroy,
    /// Event, stream.
    EventRecord,
    /// Event; 1 if the work in front of it is done.
    EventQuery,
    /// Event.
    EventSynchronize,
    /// Bytes; the address.
    AddressReserve,
    /// Address, bytes.
    AddressFree,
    /// Bytes; the handle.
    MemCreate,
    /// Handle.
    MemRelease,
    /// Address, bytes, handle.
    MemMap,
    /// Address, bytes.
    MemSetAccess,
    /// Address, bytes.
    MemUnmap,
    /// The most bytes, 0 for no maximum; the pool.
    PoolCreate,
    /// Pool.
    PoolDestroy,
    /// Pool, release threshold, rules as bits: event dependencies, opportunistic, internal dependencies.
    PoolConfigure,
    /// Pool, bytes to keep.
    PoolTrim,
    /// Pool; bytes reserved, most reserved, used, most used.
    PoolUsage,
    /// Pool, bytes, stream; the address.
    AllocAsync,
    /// Address, stream.
    FreeAsync,
    /// Address, bytes, stream: contents are overwritten.
    Overwrite,
}

impl ServedCall {
    /// All calls.
    pub const ALL: [ServedCall; 28] = {
        use ServedCall::*;
        [
            MemAlloc,
            MemFree,
            MemGetInfo,
            StreamCreate,
            StreamSynchronize,
            StreamQuery,
            StreamWaitEvent,
            CtxSynchronize,
            EventCreate,
            EventDestroy,
            EventRecord,
            EventQuery,
            EventSynchronize,
            AddressReserve,
            AddressFree,
            MemCreate,
            MemRelease,
            MemMap,
            MemSetAccess,
            MemUnmap,
            PoolCreate,
            PoolDestroy,
            PoolConfigure,
            PoolTrim,
            PoolUsage,
            AllocAsync,
            FreeAsync,
            Overwrite,
        ]
    };

    /// The call with this number.
    #[must_use]
    pub fn numbered(number: u32) -> Option<ServedCall> {
        ServedCall::ALL.into_iter().find(|&call| call as u32 == number)
    }
}

/// The arguments of a call.
pub type ServedArguments = [u64; 3];
/// The results of a call.
pub type ServedResults = [u64; 4];

/// Answers a call: writes the results and returns a code of `CUresult`.
pub type Serve = extern "C" fn(call: u32, arguments: *const ServedArguments, results: *mut ServedResults) -> i32;
