//! Work on streams, run over the blocks of the step.
//!
//! A spin keeps the stream busy. Elementwise work reads its operands and writes the last one; a
//! single operand is read and written back unchanged. Reductions read. Copies go to and from the
//! pinned memory that the program names, or a staging buffer. Matrix products and attention are in
//! `products`.
//!
//! Some strategies return made-up addresses. An operand that is not memory of this device is not
//! touched: scratch memory replaces it, so that the work takes its time. Scratch and staging memory
//! are made when they are first needed; none of it goes through a strategy.

use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use super::{
    CudaDevice,
    context::{device_error, succeed},
    kernels::{Kernel, MemoryPass, UNIT_BYTES, Units, plausible_numbers},
    products::Operand,
};
use crate::device::{CallKind, Compute, DeviceError};
use oomph_base::{Address, MIB, StreamId, Work};

/// How much scratch memory replaces a streamed operand: more than any cache holds.
const STREAMED_BYTES: u64 = 128 * MIB;
const _: () = assert!(STREAMED_BYTES <= MOST_STAND_IN_BYTES);

/// An event has at most four operands: three that are read and one that is written.
const MOST_INPUTS: usize = 3;

/// The direction of a copy.
#[derive(Clone, Copy)]
enum CopyDirection {
    In,
    Out,
}

/// Divides the traffic of elementwise work among its operands: at most half of it writes the
/// result, once, and the inputs are read in proportion to their lengths.
fn divide_traffic(bytes: u64, inputs: &[Units], result: Option<Units>) -> Kernel {
    let total = bytes / UNIT_BYTES;
    let written = result.map_or(0, |block| block.count.min(total / 2));
    let length: u64 = inputs.iter().map(|block| block.count).sum();
    let mut passes = [MemoryPass::NOTHING; MOST_INPUTS];
    for (pass, block) in passes.iter_mut().zip(inputs) {
        let share = u128::from(total - written) * u128::from(block.count) / u128::from(length.max(1));
        *pass = block.pass(share as u64);
    }
    Kernel::Combine { inputs: passes, result: result.map_or(MemoryPass::NOTHING, |block| block.pass(written)) }
}

impl CudaDevice {
    /// Queues a kernel whose operands are live.
    pub(super) fn queue(&mut self, stream: StreamId, kernel: Kernel) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        let context = self.context;
        self.drive(call, 0, || context.kernels.launch(on_stream, kernel))
    }

    /// Streams through the operands, or through scratch memory where there are none.
    fn stream_through(&mut self, stream: StreamId, work: &Work, operands: &[Operand]) -> Result<(), DeviceError> {
        let usable = operands.iter().filter_map(|&(Address(address), bytes)| Units::inside(address, bytes));
        let mut blocks: Vec<Units> = usable.collect();
        if blocks.is_empty() {
            let address = self.sink(STREAMED_BYTES)?;
            blocks.push(Units { address, count: STREAMED_BYTES / UNIT_BYTES });
        }
        let kernel = match (*work, &*blocks) {
            (Work::Elementwise { bytes }, &[block]) => Kernel::Touch { block, total: bytes / (2 * UNIT_BYTES) },
            (Work::Elementwise { bytes }, [inputs @ .., result]) => divide_traffic(bytes, inputs, Some(*result)),
            (Work::Reduction { bytes }, [block]) => divide_traffic(bytes, &[*block], None),
            (Work::Reduction { bytes }, [inputs @ .., _]) => divide_traffic(bytes, inputs, None),
            _ => return Ok(()),
        };
        self.queue(stream, kernel)
    }

    /// Copies between host memory and an operand; the shorter of the two is used repeatedly.
    fn copy(
        &mut self,
        stream: StreamId,
        direction: CopyDirection,
        bytes: u64,
        pinned: bool,
        operands: &[Operand],
    ) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        self.enter(call)?;
        let mut owned = operands.iter().filter(|operand| self.owns(operand.0, operand.1));
        let operand = match direction {
            CopyDirection::In => owned.next_back(),
            CopyDirection::Out => owned.next(),
        };
        let (Address(on_device), device_bytes) = match operand {
            Some(&operand) => operand,
            None => (Address(self.sink(STREAMED_BYTES)?), STREAMED_BYTES),
        };
        let named = operands.iter().find(|operand| self.pinned.covers(operand.0, operand.1));
        let (host, host_bytes) = match named {
            Some(&(Address(address), bytes)) => (ptr::with_exposed_provenance_mut::<u8>(address as usize), bytes),
            None => {
                let host = self.staging.buffer(pinned).map_err(|code| device_error(call, STAGING_BYTES, code))?;
                (host, STAGING_BYTES)
            }
        };
        self.drive(call, 0, || {
            let mut left = bytes;
            while left > 0 {
                let piece = left.min(device_bytes).min(host_bytes);
                // SAFETY: both sides are live and at least this long; staging memory is freed only
                // after the context was waited for, and pinned memory waits for the work that uses
                // it.
                let code = unsafe {
                    match direction {
                        CopyDirection::In => {
                            sys::cuMemcpyHtoDAsync_v2(on_device, host.cast_const().cast(), piece as usize, on_stream)
                        }
                        CopyDirection::Out => {
                            sys::cuMemcpyDtoHAsync_v2(host.cast(), on_device, piece as usize, on_stream)
                        }
                    }
                };
                if code != CUresult::CUDA_SUCCESS {
                    return code;
                }
                left -= piece;
            }
            CUresult::CUDA_SUCCESS
        })
    }

    /// Whether all of a range is memory of this device.
    pub(super) fn owns(&self, address: Address, bytes: u64) -> bool {
        bytes > 0
            && (self.memory.covers(address, bytes)
                || self.pools.covers(address, bytes)
                || self.virtual_space.is_accessible(address, bytes))
    }
}

impl Compute for CudaDevice {
    fn launch(&mut self, stream: StreamId, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError> {
        match *work {
            Work::Spin { nanos } => return self.queue(stream, Kernel::Spin { nanos: nanos.0 }),
            Work::CopyIn { bytes, pinned } => return self.copy(stream, CopyDirection::In, bytes, pinned, operands),
            Work::CopyOut { bytes, pinned } => return self.copy(stream, CopyDirection::Out, bytes, pinned, operands),
            _ => {}
        }
        let owned = operands.iter().copied().filter(|&(address, bytes)| self.owns(address, bytes));
        let usable: Vec<Operand> = owned.take(MOST_INPUTS + 1).collect();
        match work {
            Work::Gemm { .. } | Work::Attention { .. } => self.multiply(stream, work, &usable),
            _ => self.stream_through(stream, work, &usable),
        }
    }
}

/// The workspace of cuBLAS per stream: as much as it requests on the largest GPUs.
pub(super) const WORKSPACE_BYTES: u64 = 32 * MIB;
/// The longest operand that scratch memory replaces.
pub(super) const MOST_STAND_IN_BYTES: u64 = 256 * MIB;

/// A piece of device memory: where and how long.
pub(super) type ScratchPiece = (sys::CUdeviceptr, u64);

/// Device memory by purpose. The context must be current for every call.
#[derive(Debug, Default)]
pub(super) struct ScratchMemory {
    /// By the number of the stream.
    workspaces: Vec<Option<ScratchPiece>>,
    source: Option<ScratchPiece>,
    result: Option<ScratchPiece>,
}

impl ScratchMemory {
    /// Bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        let single = [self.source, self.result];
        single.iter().chain(&self.workspaces).flatten().map(|piece| piece.1).sum()
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
        let single = [self.source.take(), self.result.take()];
        for (address, _) in single.into_iter().chain(self.workspaces.drain(..)).flatten() {
            // SAFETY: the memory is live and of `cuMemAlloc`; the driver waits for the work that
            // uses it.
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
        // SAFETY: the memory is live and of `cuMemAlloc`; the driver waits for the work that uses
        // it.
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
                self.pageable = (0..words as u64).map(plausible_numbers).collect();
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
            // SAFETY: the buffer is this many words long, on a boundary of pages, and not shared
            // yet.
            unsafe { start.add(word).write(plausible_numbers(word as u64)) };
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

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: Units = Units { address: 0x1000, count: 100 };

    #[test]
    fn traffic_is_divided_among_the_operands() {
        // An addition: two blocks are read, and a third is written.
        let other = Units { address: 0x9000, ..BLOCK };
        let Kernel::Combine { inputs, result } = divide_traffic(300 * UNIT_BYTES, &[BLOCK, other], Some(BLOCK)) else {
            panic!("not a combination");
        };
        assert_eq!(inputs, [BLOCK.pass(100), other.pass(100), MemoryPass::NOTHING]);
        assert_eq!(result, BLOCK.pass(100));
    }

    #[test]
    fn a_short_result_is_written_once() {
        let short = Units { address: 0x9000, count: 1 };
        let Kernel::Combine { inputs, result } = divide_traffic(100 * UNIT_BYTES, &[BLOCK], Some(short)) else {
            panic!("not a combination");
        };
        assert_eq!((inputs[0], result), (BLOCK.pass(99), short.pass(1)));
    }

    #[test]
    fn more_traffic_than_bytes_starts_over() {
        let Kernel::Combine { inputs, result } = divide_traffic(u64::MAX, &[BLOCK], None) else {
            panic!("not a combination");
        };
        assert_eq!((inputs[0].total, result), (u64::MAX / UNIT_BYTES, MemoryPass::NOTHING));
    }
}
