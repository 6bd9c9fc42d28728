//! The kernels in `kernels.ptx`: loaded once a context, launched by name.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use cudarc::driver::sys::{self, CUresult};

use super::context::succeed;

/// The text as the driver wants it, closed by a zero.
const PTX: &str = concat!(include_str!("kernels.ptx"), "\0");

/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks for each multiprocessor: as many as can run at a time with this many threads.
const BLOCKS_EACH: u32 = 8;

/// The functions of the loaded module.
#[derive(Debug)]
pub(super) struct Kernels {
    spin: sys::CUfunction,
    fill: sys::CUfunction,
    verify: sys::CUfunction,
    touch: sys::CUfunction,
    read: sys::CUfunction,
    most_blocks: u32,
}

/// A kernel with its arguments. Addresses are the caller's to answer for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernel {
    Spin { nanos: u64 },
    Fill { address: u64, words: u64, key: u64 },
    Verify { address: u64, words: u64, key: u64, mismatches: u64 },
    Touch { address: u64, words: u64, total: u64 },
    Read { address: u64, words: u64, total: u64 },
}

impl Kernels {
    /// Loads the module into the current context, where it stays. The call that failed, otherwise, and how.
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
            fill: function(c"oomph_fill")?,
            verify: function(c"oomph_verify")?,
            touch: function(c"oomph_touch")?,
            read: function(c"oomph_read")?,
            most_blocks: multiprocessors.max(1).saturating_mul(BLOCKS_EACH),
        })
    }

    /// Queues a kernel on a stream of the current context.
    pub(super) fn launch(&self, stream: sys::CUstream, kernel: Kernel) -> CUresult {
        // (function, threads that have something to do, arguments)
        let (function, width, mut arguments) = match kernel {
            Kernel::Spin { nanos } => (self.spin, 1, [nanos, 0, 0, 0]),
            Kernel::Fill { address, words, key } => (self.fill, words, [address, words, key, 0]),
            Kernel::Verify { address, words, key, mismatches } => {
                (self.verify, words, [address, words, key, mismatches])
            }
            Kernel::Touch { address, words, total } => (self.touch, total, [address, words, total, 0]),
            Kernel::Read { address, words, total } => (self.read, total, [address, words, total, 0]),
        };
        let threads = if width == 1 { 1 } else { THREADS };
        let blocks = width.div_ceil(u64::from(threads)).clamp(1, u64::from(self.most_blocks)) as u32;
        // Every parameter of every kernel is 64 bits wide; the driver reads as many as the kernel has.
        let mut parameters = arguments.each_mut().map(|argument| ptr::from_mut(argument).cast::<c_void>());
        // SAFETY: the function is of a module that stays loaded, its parameters are as above, and the memory that it
        // touches is live: the caller has looked.
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
