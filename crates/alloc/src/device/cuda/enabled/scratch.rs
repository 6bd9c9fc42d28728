//! Memory that work needs beside its operands, on the device and on the host. None of it goes through a strategy, and all of
//! it is made when it is first needed.

use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use super::{context::succeed, kernels};
use oomph_base::MIB;

/// What cuBLAS gets for each stream: as much as it asks for on the largest GPUs.
pub(super) const WORKSPACE_BYTES: u64 = 32 * MIB;
/// The longest operand that scratch memory replaces.
pub(super) const MOST_STAND_IN_BYTES: u64 = 256 * MIB;
/// One word, in which mismatches are counted.
const COUNTER_BYTES: u64 = 8;

/// A piece of device memory: where and how long.
pub(super) type ScratchPiece = (sys::CUdeviceptr, u64);

/// Device memory by purpose. The context must be current for every call.
#[derive(Debug, Default)]
pub(super) struct ScratchMemory {
    counter: Option<ScratchPiece>,
    /// By the number of the stream.
    workspaces: Vec<Option<ScratchPiece>>,
    source: Option<ScratchPiece>,
    result: Option<ScratchPiece>,
}

impl ScratchMemory {
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
    pub(super) fn workspace(&mut self, stream: usize) -> Result<ScratchPiece, CUresult> {
        if stream >= self.workspaces.len() {
            self.workspaces.resize(stream + 1, None);
        }
        at_least(&mut self.workspaces[stream], WORKSPACE_BYTES)
    }

    /// Memory for work to read, and whether it is new and must be filled first.
    pub(super) fn source(&mut self, bytes: u64) -> Result<(ScratchPiece, bool), CUresult> {
        let before = self.source;
        let piece = at_least(&mut self.source, bytes)?;
        Ok((piece, before != Some(piece)))
    }

    /// Memory for work to write.
    pub(super) fn result(&mut self, bytes: u64) -> Result<ScratchPiece, CUresult> {
        at_least(&mut self.result, bytes)
    }

    /// Gives everything back; failures are ignored.
    pub(super) fn free_all(&mut self) {
        let single = [self.counter.take(), self.source.take(), self.result.take()];
        for (address, _) in single.into_iter().chain(self.workspaces.drain(..)).flatten() {
            // SAFETY: the memory is live and of `cuMemAlloc`; the driver waits for the work that uses it.
            unsafe { sys::cuMemFree_v2(address) };
        }
    }
}

/// A piece of at least that length, in place of one that is too short.
fn at_least(place: &mut Option<ScratchPiece>, bytes: u64) -> Result<ScratchPiece, CUresult> {
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

/// Size of a staging buffer; longer copies use it again and again.
pub(super) const STAGING_BYTES: u64 = 64 * MIB;

/// Host memory that copies use where the program names none.
#[derive(Debug, Default)]
pub(super) struct StagingBuffers {
    pinned: Option<*mut u64>,
    pageable: Vec<u64>,
}

impl StagingBuffers {
    /// The start of a staging buffer. The context is current.
    pub(super) fn buffer(&mut self, pinned: bool) -> Result<*mut u8, CUresult> {
        let words = (STAGING_BYTES / 8) as usize;
        if !pinned {
            if self.pageable.is_empty() {
                self.pageable = (0..words as u64).map(kernels::plausible_numbers).collect();
            }
            return Ok(self.pageable.as_mut_ptr().cast());
        }
        if let Some(start) = self.pinned {
            return Ok(start.cast());
        }
        let mut start = ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        succeed(unsafe { sys::cuMemHostAlloc(&raw mut start, STAGING_BYTES as usize, 0) })?;
        let start: *mut u64 = start.cast();
        for word in 0..words {
            // SAFETY: the buffer is this many words long, on a boundary of pages, and not shared yet.
            unsafe { start.add(word).write(kernels::plausible_numbers(word as u64)) };
        }
        self.pinned = Some(start);
        Ok(start.cast())
    }

    /// Gives everything back. The context is current and idle; failures are ignored.
    pub(super) fn free_all(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            // SAFETY: the memory is live and of `cuMemHostAlloc`.
            unsafe { sys::cuMemFreeHost(pinned.cast()) };
        }
    }
}
