//! NVML: the device as `nvidia-smi` and `pynvml` see it.

use crate::{
    arguments::{Out, Text, copy_text},
    card::card,
    state,
};

const SUCCESS: i32 = 0;
const INVALID_ARGUMENT: i32 = 2;
/// Handles are made up: this and the number of the device.
const FIRST_DEVICE: u64 = 0x4e56_0000;

fn index_of(device: u64) -> Option<usize> {
    let index = device.checked_sub(FIRST_DEVICE)?;
    (index < card().devices as u64).then_some(index as usize)
}

fn handle(device: Out<u64>, index: u32) -> i32 {
    let known = index < card().devices as u32;
    device.set(FIRST_DEVICE + u64::from(index));
    if known { SUCCESS } else { INVALID_ARGUMENT }
}

/// Total, free and used bytes.
fn memory(device: u64) -> [u64; 3] {
    let total = card().total;
    let free = index_of(device).map_or(total, |index| state::lock().devices[index].free_bytes());
    [total, free, total - free]
}

fn uuid(index: usize) -> String {
    format!("GPU-6f6f6d70-6800-0000-0000-{index:012x}")
}

cuda_functions! {
    fn nvmlDeviceGetCount_v2(count: Out<u32>) -> i32 { count.set(card().devices as u32); SUCCESS }
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: Out<u64>) -> i32 { handle(device, index) }
    fn nvmlDeviceGetHandleByUUID(text: Text, device: Out<u64>) -> i32 {
        let found = (0..card().devices as usize).find(|&index| uuid(index) == text.get());
        handle(device, found.unwrap_or(0) as u32)
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(_text: Text, device: Out<u64>) -> i32 { handle(device, 0) }
    fn nvmlDeviceGetIndex(device: u64, index: Out<u32>) -> i32 { index.set(index_of(device).unwrap_or(0) as u32); SUCCESS }
    fn nvmlDeviceGetName(_device: u64, name: Out<u8>, length: u32) -> i32 { copy_text(&card().name, name, length as usize); SUCCESS }
    fn nvmlDeviceGetUUID(device: u64, text: Out<u8>, length: u32) -> i32 { copy_text(&uuid(index_of(device).unwrap_or(0)), text, length as usize); SUCCESS }
    fn nvmlDeviceGetMemoryInfo(device: u64, info: Out<[u64; 3]>) -> i32 { info.set(memory(device)); SUCCESS }
    // nvmlMemory_v2_t: version, total, reserved, free, used.
    fn nvmlDeviceGetMemoryInfo_v2(device: u64, info: Out<[u64; 5]>) -> i32 {
        // The version of the structure: its size, and 2 in the highest byte.
        let [total, free, used] = memory(device);
        info.set([0x0200_0028, total, 0, free, used]);
        SUCCESS
    }
    fn nvmlDeviceGetCudaComputeCapability(_device: u64, major: Out<i32>, minor: Out<i32>) -> i32 { major.set(card().major); minor.set(card().minor); SUCCESS }
    fn nvmlSystemGetCudaDriverVersion(version: Out<i32>) -> i32 { version.set(card().cuda); SUCCESS }
    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<i32>) -> i32 { version.set(card().cuda); SUCCESS }
    fn nvmlSystemGetDriverVersion(text: Out<u8>, length: u32) -> i32 { copy_text("580.0", text, length as usize); SUCCESS }
    fn nvmlErrorString(code: i32) -> *const u8 { if code == SUCCESS { c"Success" } else { c"Invalid Argument" }.as_ptr().cast() }
}
