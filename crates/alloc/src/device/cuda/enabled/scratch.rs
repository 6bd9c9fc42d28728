//! Device memory of the device's own: what work needs beside its operands. None of it goes through a strategy, and all
//! of it is made when it is first needed.

use cudarc::driver::sys::{self, CUresult};

use super::context::succeed;
use oomph_base::MIB;

/// What cuBLAS gets for each stream: as much as it asks for on the largest GPUs.
pub(super) const WORKSPACE_BYTES: u64 = 32 * MIB;
/// The longest operand that is stood in for.
pub(super) const MOST_STAND_IN_BYTES: u64 = 256 * MIB;
/// One word, in which mismatches are counted.
const COUNTER_BYTES: u64 = 8;

/// A piece of device memory: where and how long.
pub(super) type Piece = (sys::CUdeviceptr, u64);

/// Device memory by purpose. Every call wants the context to be current.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    counter: Option<Piece>,
    /// By the number of the stream.
    workspaces: Vec<Option<Piece>>,
    source: Option<Piece>,
    result: Option<Piece>,
}

impl Scratch {
    /// Bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        let single = [self.counter, self.source, self.result];
        single.iter().chain(&self.workspaces).flatten().map(|piece| piece.1).sum()
    }

    /// The word in which mismatches are counted.
    pub(super) fn counter(&mut self) -> Result<sys::CUdeviceptr, CUresult> {
        Ok(at_least(&mut self.counter, COUNTER_BYTES)?.0)
    }

    /// The memory that cuBLAS may use on one stream.
    pub(super) fn workspace(&mut self, stream: usize) -> Result<Piece, CUresult> {
        if stream >= self.workspaces.len() {
            self.workspaces.resize(stream + 1, None);
        }
        at_least(&mut self.workspaces[stream], WORKSPACE_BYTES)
    }

    /// Memory that stands in for what work reads. Whether it is new, and holds nothing sensible, is said too.
    pub(super) fn source(&mut self, bytes: u64) -> Result<(Piece, bool), CUresult> {
        let before = self.source;
        let piece = at_least(&mut self.source, bytes)?;
        Ok((piece, before != Some(piece)))
    }

    /// Memory that stands in for what work writes.
    pub(super) fn result(&mut self, bytes: u64) -> Result<Piece, CUresult> {
        at_least(&mut self.result, bytes)
    }

    /// Gives everything back. What fails cannot be helped.
    pub(super) fn free_all(&mut self) {
        let single = [self.counter.take(), self.source.take(), self.result.take()];
        for (address, _) in single.into_iter().chain(self.workspaces.drain(..)).flatten() {
            // SAFETY: the memory is live and of `cuMemAlloc`; the driver waits for the work that uses it.
            unsafe { sys::cuMemFree_v2(address) };
        }
    }
}

/// A piece of at least that length, in place of one that is too short.
fn at_least(place: &mut Option<Piece>, bytes: u64) -> Result<Piece, CUresult> {
    if let Some(piece) = *place {
        if piece.1 >= bytes {
            return Ok(piece);
        }
        // SAFETY: the memory is live and of `cuMemAlloc`; the driver waits for the work that uses it.
        succeed(unsafe { sys::cuMemFree_v2(piece.0) })?;
        *place = None;
    }
    let mut address = 0;
    // SAFETY: the pointer is to a live address.
    succeed(unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) })?;
    Ok(*place.insert((address, bytes)))
}
