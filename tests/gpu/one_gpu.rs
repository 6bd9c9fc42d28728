//! The GPU that all tests on real hardware share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use oomph::device::cuda::CudaDevice;

/// Opens the GPU for one test at a time, because free memory and times depend on all users. Without
/// a GPU it prints why and returns `None`, and the test ends.
pub fn gpu() -> Option<(CudaDevice, MutexGuard<'static, ()>)> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    match CudaDevice::open(0) {
        Ok(device) => Some((device, guard)),
        Err(reason) => {
            println!("skipped: {reason}");
            None
        }
    }
}
