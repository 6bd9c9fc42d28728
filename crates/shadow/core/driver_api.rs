//! The driver API as Triton, Inductor and PyTorch's NVRTC path use it: contexts, entry points by name.

use crate::{
    arguments::{Out, Text, new_handle},
    binding,
    card::{MAX_DEVICES, RESERVED_END, card},
    errors::{INVALID_DEVICE, NOT_FOUND, SUCCESS},
    state,
    state::current,
};

/// Contexts are made up: this and the number of the device.
const FIRST_CONTEXT: u64 = 0x4354_5800_0000;

/// The primary context of a device.
pub fn context_of(device: usize) -> u64 {
    FIRST_CONTEXT + device as u64 * 0x100
}

fn device_of(context: u64) -> usize {
    (context.saturating_sub(FIRST_CONTEXT) / 0x100).min(MAX_DEVICES - 1) as usize
}

fn make_current(context: u64) -> i32 {
    if context != 0 && device_of(context) < card().devices as usize {
        current::set_device(device_of(context));
    }
    SUCCESS
}

fn retain(context: Out<u64>, device: i32) -> i32 {
    let known = (0..card().devices).contains(&device);
    context.set(if known { context_of(device as usize) } else { 0 });
    if known { SUCCESS } else { INVALID_DEVICE }
}

/// A variable of a module: an address on the device, at the end of the reserved ranges, which nothing else uses.
fn variable(pointer: Out<u64>, bytes: Out<u64>) -> i32 {
    pointer.set(RESERVED_END - (1 << 20));
    bytes.set(8);
    SUCCESS
}

/// The name of the symbol for a plain name: the newest variant, `_v2` and so on. Some functions changed later than the
/// program's CUDA version: (name, first version of the variant, variant).
fn newest_symbol(name: &str, version: i32) -> Option<String> {
    const CHANGED: &[(&str, i32, &str)] = &[
        ("cuStreamGetCaptureInfo", 12_030, "_v3"),
        ("cuEventElapsedTime", 12_080, "_v2"),
        ("cuCtxCreate", 12_050, "_v4"),
        ("cuMemPrefetchAsync", 12_020, "_v2"),
        ("cuMemAdvise", 12_020, "_v2"),
        ("cuGraphInstantiate", 12_000, "WithFlags"),
    ];
    let too_new =
        |suffix: &str| CHANGED.iter().any(|&(stem, first, of)| stem == name && of == suffix && version < first);
    ["_v4", "_v3", "_v2", ""]
        .into_iter()
        .filter(|suffix| !too_new(suffix))
        .map(|suffix| format!("{name}{suffix}"))
        .find(|symbol| binding::is_known(symbol))
}

/// The entry point for a name; 0 where there is none.
fn entry_point(name: &str, version: i32) -> u64 {
    newest_symbol(name, version).map_or(0, |symbol| binding::entry_point("libcuda.so.1", &symbol) as u64)
}

fn query(name: Text, pointer: Out<u64>, version: i32, status: Out<i32>) -> i32 {
    let found = entry_point(name.get(), version);
    if found == 0 {
        state::note_unserved(name.get());
    }
    pointer.set(found);
    // CU_GET_PROC_ADDRESS_SUCCESS or CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    status.set(i32::from(found == 0));
    if found == 0 { NOT_FOUND } else { SUCCESS }
}

/// The runtime reports a missing name in the status and returns success.
fn query_runtime(name: Text, pointer: Out<u64>, version: i32, status: Out<i32>) -> i32 {
    let found = query(name, pointer, version, status);
    if status.is_wanted() { SUCCESS } else { found }
}

const NO_STATUS: Out<i32> = Out(std::ptr::null_mut());

cuda_functions! {
    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) -> i32 { retain(context, device) }
    fn cuDevicePrimaryCtxGetState(_device: i32, flags: Out<u32>, active: Out<i32>) -> i32 { flags.set(0); active.set(1); SUCCESS }
    fn cuCtxCreate_v2(context: Out<u64>, _flags: u32, device: i32) -> i32 { retain(context, device) }
    fn cuCtxCreate_v3(context: Out<u64>, _params: u64, _count: i32, _flags: u32, device: i32) -> i32 { retain(context, device) }
    fn cuCtxCreate_v4(context: Out<u64>, _params: u64, _flags: u32, device: i32) -> i32 { retain(context, device) }
    fn cuCtxGetCurrent(context: Out<u64>) -> i32 { context.set(context_of(current::device())); SUCCESS }
    fn cuCtxSetCurrent(context: u64) -> i32 { make_current(context) }
    fn cuCtxPushCurrent_v2(context: u64) -> i32 { make_current(context) }
    fn cuCtxPopCurrent_v2(context: Out<u64>) -> i32 { context.set(context_of(current::device())); SUCCESS }
    fn cuCtxGetDevice(device: Out<i32>) -> i32 { device.set(current::device() as i32); SUCCESS }
    fn cuCtxGetApiVersion(_context: u64, version: Out<u32>) -> i32 { version.set(card().cuda as u32); SUCCESS }
    fn cuStreamGetCtx(_stream: u64, context: Out<u64>) -> i32 { context.set(context_of(current::device())); SUCCESS }
    fn cuModuleGetGlobal_v2(pointer: Out<u64>, bytes: Out<u64>, _module: u64, _name: Text) -> i32 { variable(pointer, bytes) }
    fn cuLibraryGetGlobal(pointer: Out<u64>, bytes: Out<u64>, _library: u64, _name: Text) -> i32 { variable(pointer, bytes) }
    fn cudaGetSymbolAddress(pointer: Out<u64>, _symbol: u64) -> i32 { variable(pointer, Out(std::ptr::null_mut())) }
    fn cudaGetSymbolSize(bytes: Out<u64>, _symbol: u64) -> i32 { bytes.set(8); SUCCESS }
    fn cuLinkComplete(_state: u64, code: Out<u64>, bytes: Out<u64>) -> i32 { code.set(new_handle(0)); bytes.set(16); SUCCESS }
    fn cuGetProcAddress(name: Text, pointer: Out<u64>, version: i32, _flags: u64) -> i32 { query(name, pointer, version, NO_STATUS) }
    fn cuGetProcAddress_v2(name: Text, pointer: Out<u64>, version: i32, _flags: u64, status: Out<i32>) -> i32 { query(name, pointer, version, status) }
    fn cudaGetDriverEntryPoint(name: Text, pointer: Out<u64>, _flags: u64, status: Out<i32>) -> i32 { query_runtime(name, pointer, card().cuda, status) }
    fn cudaGetDriverEntryPointByVersion(name: Text, pointer: Out<u64>, version: u32, _flags: u64, status: Out<i32>) -> i32 {
        query_runtime(name, pointer, version as i32, status)
    }
    // Private tables, which libraries with a static runtime want. There is no description of them.
    fn cuGetExportTable(table: Out<u64>, _id: u64) -> i32 { state::note_unserved("cuGetExportTable"); table.set(0); NOT_FOUND }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_their_newest_variant() {
        assert_eq!(newest_symbol("cuMemAlloc", 12_000).as_deref(), Some("cuMemAlloc_v2"));
        assert_eq!(newest_symbol("cuStreamGetCaptureInfo", 12_000).as_deref(), Some("cuStreamGetCaptureInfo_v2"));
        assert_eq!(newest_symbol("cuStreamGetCaptureInfo", 13_000).as_deref(), Some("cuStreamGetCaptureInfo_v3"));
        assert_eq!(newest_symbol("cuNoSuchFunction", 13_000), None);
        assert_ne!(entry_point("cuTensorMapEncodeTiled", 13_000), 0);
    }

    #[test]
    fn a_function_without_behaviour_can_be_called_by_name() {
        let entry = entry_point("cuCtxGetCacheConfig", 13_000);
        // SAFETY: the function takes one pointer to an enumeration of 4 bytes and returns a status.
        let call = unsafe { std::mem::transmute::<u64, extern "C" fn(*mut i32) -> i32>(entry) };
        let mut value = -1;
        assert_eq!((call(&raw mut value), value), (SUCCESS, 0));
    }
}
