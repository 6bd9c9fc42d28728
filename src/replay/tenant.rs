//! What lives in a slot of the trace. The loop settles and evicts a tenant for nearly every event, so this is where
//! replay's own cost is decided.

use super::Live;
use crate::{
    base::{Address, SiteId, StreamId, TagId, ThreadId},
    strategy::{Block, Request},
};

/// A block, a host buffer or nobody, taken apart.
///
/// The order of the fields is a matter of speed. A strategy has just written the block that it hands out, field by
/// field, into memory. Where the same fields are neighbours here too, the compiler moves two or more of them at once,
/// and a wide load from several narrower stores waits until the processor has written everything before it: in a
/// profile, waits of this kind were a third of what an event cost. So no two fields of a [`Block`] or of a [`Request`]
/// are neighbours. (Aligning tenants to cache lines was tried too: it was slower.)
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Tenant {
    address: Address,
    requested: u64,
    size: u64,
    born: u64,
    slot: u32,
    site: SiteId,
    generation: u32,
    tag: TagId,
    stream: StreamId,
    kind: Kind,
    thread: ThreadId,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nothing, or a block whose request failed.
    Nobody,
    Device,
    Host,
}

impl Tenant {
    pub(super) const NOBODY: Tenant = Tenant {
        address: Address::NULL,
        requested: 0,
        size: 0,
        born: 0,
        slot: 0,
        site: SiteId(0),
        generation: 0,
        tag: TagId(0),
        stream: StreamId::DEFAULT,
        kind: Kind::Nobody,
        thread: ThreadId(0),
    };

    #[inline]
    pub(super) fn block(live: &Live) -> Tenant {
        Tenant {
            address: live.block.address,
            requested: live.request.bytes,
            size: live.block.size,
            born: live.born,
            slot: live.block.slot,
            site: live.request.site,
            generation: live.block.generation,
            tag: live.tag,
            stream: live.request.stream,
            kind: Kind::Device,
            thread: live.request.thread,
        }
    }

    pub(super) fn host_buffer(address: Address, bytes: u64) -> Tenant {
        Tenant { address, size: bytes, kind: Kind::Host, ..Tenant::NOBODY }
    }

    /// The block, if it is one.
    #[inline]
    pub(super) fn as_block(&self) -> Option<Live> {
        if self.kind != Kind::Device {
            return None;
        }
        Some(Live {
            block: Block { address: self.address, size: self.size, slot: self.slot, generation: self.generation },
            request: Request { bytes: self.requested, stream: self.stream, thread: self.thread, site: self.site },
            born: self.born,
            tag: self.tag,
        })
    }

    /// The host buffer, if it is one.
    pub(super) fn as_host_buffer(&self) -> Option<Address> {
        (self.kind == Kind::Host).then_some(self.address)
    }

    /// Where its memory lies, device or host.
    pub(super) fn memory(&self) -> Option<(Address, u64)> {
        (self.kind != Kind::Nobody).then_some((self.address, self.size))
    }

    /// Takes the block out, if it is one; what else there is stays.
    #[inline]
    pub(super) fn take_block(&mut self) -> Option<Live> {
        let live = self.as_block()?;
        self.kind = Kind::Nobody;
        Some(live)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_comes_back_whole_and_once() {
        let block = Block { address: Address(512), size: 1024, slot: 3, generation: 4 };
        let request = Request { bytes: 1000, stream: StreamId(5), thread: ThreadId(6), site: SiteId(7) };
        let live = Live { block, request, born: 8, tag: TagId(9) };
        let mut tenant = Tenant::block(&live);
        assert_eq!((tenant.as_block(), tenant.as_host_buffer()), (Some(live), None));
        assert_eq!(tenant.memory(), Some((Address(512), 1024)));
        assert_eq!(tenant.take_block(), Some(live));
        assert_eq!((tenant.take_block(), tenant.memory()), (None, None));
    }

    #[test]
    fn a_host_buffer_is_no_block() {
        let mut tenant = Tenant::host_buffer(Address(64), 10);
        assert_eq!(tenant.take_block(), None);
        assert_eq!((tenant.as_host_buffer(), tenant.memory()), (Some(Address(64)), Some((Address(64), 10))));
    }

    /// Replay touches a tenant for nearly every event: its size is a promise.
    #[test]
    fn a_tenant_takes_56_bytes() {
        assert_eq!(size_of::<Tenant>(), 56);
    }
}
