//! The kernels in `kernels.ptx`, loaded once per context.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use cudarc::driver::sys::{self, CUresult};

use super::context::succeed;

/// The text, closed by a zero as the driver requires.
const PTX: &str = concat!(include_str!("kernels.ptx"), "\0");

/// The oldest drivers and GPUs that accept [`PTX`], which has version 6.0 for sm_50.
pub(super) const OLDEST: &str = "drivers from CUDA 9.0 (R384) on, GPUs from Maxwell (sm_50) on";

/// Work processes memory in aligned units of this many bytes.
pub(super) const UNIT_BYTES: u64 = 16;

/// Threads that work on one tile.
const WARP: u64 = 32;
/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks for each multiprocessor: as many as can run at a time with this many threads.
const BLOCKS_EACH: u32 = 8;
/// The same for the kernel with more registers.
const BLOCKS_EACH_OF_COMBINE: u32 = 6;

/// Every parameter of every kernel is 64 bits wide, and no kernel has more of them.
const MOST_ARGUMENTS: usize = 12;

/// The functions of the loaded module.
#[derive(Debug)]
pub(super) struct Kernels {
    spin: sys::CUfunction,
    fill_tiles: sys::CUfunction,
    verify_tiles: sys::CUfunction,
    touch: sys::CUfunction,
    combine: sys::CUfunction,
    multiprocessors: u32,
}

/// A kernel with its arguments. The caller ensures that the addresses are valid.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernel {
    Spin { nanos: u64 },
    FillTiles { list: u64, tiles: u64 },
    VerifyTiles { list: u64, tiles: u64, findings: u64, room: u64 },
    Touch { block: Units, total: u64 },
    Combine { inputs: [MemoryPass; 3], result: MemoryPass },
}

/// A block in units of sixteen bytes, of which there is at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Units {
    pub(super) address: u64,
    pub(super) count: u64,
}

impl Units {
    /// The whole units inside a piece of memory, if there are any.
    pub(super) fn inside(address: u64, bytes: u64) -> Option<Units> {
        let start = address.checked_next_multiple_of(UNIT_BYTES)?;
        let count = bytes.checked_sub(start - address)? / UNIT_BYTES;
        (count > 0).then_some(Units { address: start, count })
    }

    /// A pass over that many units of the block, starting over at its end.
    pub(super) fn pass(self, total: u64) -> MemoryPass {
        MemoryPass { block: self, total }
    }
}

/// How many units of a block are read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryPass {
    pub(super) block: Units,
    pub(super) total: u64,
}

impl MemoryPass {
    /// No block.
    pub(super) const NOTHING: MemoryPass = MemoryPass { block: Units { address: 0, count: 1 }, total: 0 };
}

impl Kernel {
    /// Fills a piece of device memory with [`plausible_numbers`].
    pub(super) fn numbers(address: u64, bytes: u64) -> Kernel {
        let result = Units::inside(address, bytes).map_or(MemoryPass::NOTHING, |block| block.pass(block.count));
        Kernel::Combine { inputs: [MemoryPass::NOTHING; 3], result }
    }
}

/// Eight bytes that are numbers between 0.5 and 2 in every format, of either sign. Operands of
/// products are filled with them, because products of zeros take less power and time than real
/// ones.
pub(super) fn plausible_numbers(index: u64) -> u64 {
    let mixed = index.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)) & 0x80FF_80FF_80FF_80FF | 0x3F00_3F00_3F00_3F00
}

impl Kernels {
    /// Loads the module into the current context, where it stays. The error is the call that failed
    /// and its code.
    pub(super) fn load(multiprocessors: u32) -> Result<Kernels, (&'static str, CUresult)> {
        let mut module = ptr::null_mut();
        // SAFETY: the text is closed by a zero and outlives the call.
        let code = unsafe { sys::cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()) };
        succeed(code).map_err(|code| ("cuModuleLoadData (the kernels)", code))?;
        let function = |name: &CStr| {
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded, the name is closed by a zero.
            let code = unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
            succeed(code).map(|()| function).map_err(|code| ("cuModuleGetFunction", code))
        };
        Ok(Kernels {
            spin: function(c"oomph_spin")?,
            fill_tiles: function(c"oomph_fill_tiles")?,
            verify_tiles: function(c"oomph_verify_tiles")?,
            touch: function(c"oomph_touch")?,
            combine: function(c"oomph_combine")?,
            multiprocessors: multiprocessors.max(1),
        })
    }

    /// Queues a kernel on a stream of the current context.
    pub(super) fn launch(&self, stream: sys::CUstream, kernel: Kernel) -> CUresult {
        // (function, threads that have something to do, arguments)
        let (function, width, mut arguments) = match kernel {
            Kernel::Spin { nanos } => (self.spin, 1, arguments([nanos])),
            Kernel::FillTiles { list, tiles } => (self.fill_tiles, tiles * WARP, arguments([list, tiles])),
            Kernel::VerifyTiles { list, tiles, findings, room } => {
                (self.verify_tiles, tiles * WARP, arguments([list, tiles, findings, room]))
            }
            Kernel::Touch { block, total } => (self.touch, total, arguments([block.address, block.count, total])),
            Kernel::Combine { inputs: [first, second, third], result } => {
                let passes = [first, second, third, result];
                let longest = passes.iter().map(|pass| pass.total).max().unwrap_or(0);
                let mut flat = [0; MOST_ARGUMENTS];
                for (three, pass) in flat.chunks_exact_mut(3).zip(passes) {
                    three.copy_from_slice(&[pass.block.address, pass.block.count, pass.total]);
                }
                (self.combine, longest, flat)
            }
        };
        let threads = if width == 1 { 1 } else { THREADS };
        let blocks_each = if matches!(kernel, Kernel::Combine { .. }) { BLOCKS_EACH_OF_COMBINE } else { BLOCKS_EACH };
        let most_blocks = self.multiprocessors.saturating_mul(blocks_each);
        let blocks = width.div_ceil(u64::from(threads)).clamp(1, u64::from(most_blocks)) as u32;
        // The driver reads as many as the kernel has.
        let mut parameters = arguments.each_mut().map(|argument| ptr::from_mut(argument).cast::<c_void>());
        // SAFETY: the function is of a module that stays loaded, its parameters are as above, and
        // the memory that it touches is live: the caller ensures that.
        unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }
}

/// Room for the arguments of the kernel that has the most.
fn arguments<const N: usize>(given: [u64; N]) -> [u64; MOST_ARGUMENTS] {
    let mut all = [0; MOST_ARGUMENTS];
    all[..N].copy_from_slice(&given);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_lie_inside_the_memory_on_their_own_boundaries() {
        assert_eq!(Units::inside(0x1000, 512), Some(Units { address: 0x1000, count: 32 }));
        assert_eq!(Units::inside(0x1008, 40), Some(Units { address: 0x1010, count: 2 }));
        assert_eq!(Units::inside(0x1008, 20), None);
        assert_eq!(Units::inside(0x1008, 4), None);
        assert_eq!(Units::inside(u64::MAX, 16), None);
    }

    #[test]
    fn plausible_numbers_are_of_moderate_size_in_every_format() {
        for index in 0..1000 {
            let word = plausible_numbers(index);
            for single in [word as u32, (word >> 32) as u32] {
                assert!((0.5..2.0).contains(&f32::from_bits(single).abs()), "{single:#x}");
                for half in [single as u16, (single >> 16) as u16] {
                    assert!((0.5..2.0).contains(&f32::from_bits(u32::from(half) << 16).abs()), "{half:#x}");
                    assert_eq!((half >> 10) & 0x1f, 15, "an exponent of zero in half precision: {half:#x}");
                }
            }
        }
    }

    #[test]
    fn kernels_target_the_oldest_driver() {
        assert!(PTX.contains(".version 6.0\n.target sm_50\n"), "{OLDEST}");
    }
}
