//! The GPU that the tests on real hardware take turns at.

use std::sync::{Mutex, MutexGuard, PoisonError};

use oomph::device::cuda::CudaDevice;

/// A GPU for one test at a time: free memory and times are everybody's. Without one it is said why, and the test is over.
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
