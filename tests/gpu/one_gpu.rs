//! The GPU that all tests on real hardware share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use oomph::{
    base::{Address, StreamId},
    device::{PatternPlace, Patterned, Patterns, cuda::CudaDevice},
};

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

/// Writes the pattern of a key.
pub fn fill(device: &mut CudaDevice, stream: StreamId, address: Address, bytes: u64, key: u32) {
    device.fill_blocks(stream, &[Patterned { address, bytes, key }]).unwrap();
}

/// How many words of a block are not those of the key's pattern.
pub fn wrong_words(device: &mut CudaDevice, stream: StreamId, address: Address, bytes: u64, key: u32) -> u64 {
    let mut found = vec![0; bytes as usize];
    device.read(stream, address, &mut found).unwrap();
    let expected = (0..).step_by(8).map(|offset| PatternPlace { key, offset }.word().to_le_bytes());
    found.chunks_exact(8).zip(expected).filter(|(found, expected)| found != expected).count() as u64
}
