//! Copies and fills, and the answers to reads.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{
    arguments::{In, Out, copy_host, host_bytes},
    card::{card, is_device_address},
    errors::{CAPTURE_UNSUPPORTED, SUCCESS, conclude},
    launch, served,
    served_call::ServedCall,
    state::{self, Shadow},
    streams, values,
};

/// How a read whose value is not known was answered; the numbers are part of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAnswer {
    /// With zeros.
    Zero = 0,
    /// A count, by the assumption about nonzero elements.
    Count = 1,
    /// With true: a check that all elements pass.
    True = 2,
}

type OnRead = extern "C" fn(u64, *const u8, i32);
static ON_READ: AtomicUsize = AtomicUsize::new(0);

/// Sets the function that is called, without a lock, for each copy to the host whose value is not known: bytes, name of the
/// kernel that ran last on the stream, how it was answered ([`ReadAnswer`]).
#[unsafe(no_mangle)]
pub extern "C" fn oomph_shadow_on_read(function: Option<OnRead>) {
    ON_READ.store(function.map_or(0, |function| function as usize), Ordering::Release);
}

fn tell_reader(bytes: u64, kernel: &str, answer: ReadAnswer) {
    let function = ON_READ.load(Ordering::Acquire);
    if function != 0 {
        // SAFETY: only `oomph_shadow_on_read` stores here, and it stores 0 or a function of this type.
        let function = unsafe { std::mem::transmute::<usize, OnRead>(function) };
        let name = format!("{kernel}\0");
        function(bytes, name.as_ptr(), answer as i32);
    }
}

/// Bytes per nanosecond of an H200's copies (the simulated device's profile); on the device 2 TB/s each way.
const HOST_COPY_BYTES_PER_NANO: u64 = 50;
const DEVICE_COPY_BYTES_PER_NANO: u64 = 2_000;

/// One copy of a row or of everything.
fn copy(target: u64, source: u64, bytes: u64, stream: u64, host_waits: bool) -> i32 {
    if bytes == 0 {
        return SUCCESS;
    }
    let (to_device, from_device) = (is_device_address(target), is_device_address(source));
    if to_device && let Some(code) = served::code(ServedCall::Overwrite, [target, bytes, stream]) {
        return code;
    }
    if from_device && bytes <= card().keep {
        values::settle(source, bytes);
    }
    let mut shadow = state::lock();
    let rate = if to_device && from_device { DEVICE_COPY_BYTES_PER_NANO } else { HOST_COPY_BYTES_PER_NANO };
    let nanos = streams::KERNEL_FLOOR_NANOS + bytes / rate;
    let captured = shadow.captures.add_node(stream, nanos);
    if captured && host_waits {
        return CAPTURE_UNSUPPORTED;
    }
    shadow.clocks.elapse(streams::LAUNCH_NANOS);
    if !captured {
        shadow.clocks.run(stream, nanos);
    }
    if captured && to_device {
        // The copy happens when the graph is launched.
        shadow.captures.note_write(stream, target, bytes);
        shadow.values.forget(target, bytes);
        return SUCCESS;
    }
    let keep = card().keep;
    match (to_device, from_device) {
        (true, true) => shadow.values.carry(target, source, bytes, keep),
        (true, false) => {
            // The host made these bytes before it copied them; nothing else shows that time. 1 ns per byte.
            shadow.clocks.elapse(bytes);
            if bytes <= keep {
                shadow.values.put(target, host_bytes(source as *const u8, bytes as usize).to_vec());
            } else {
                shadow.values.forget(target, bytes);
            }
        }
        (false, true) => return read(shadow, target, source, bytes, stream, host_waits),
        (false, false) => {
            drop(shadow);
            copy_host(target as *mut u8, source as *const u8, bytes as usize);
        }
    }
    SUCCESS
}

/// A copy to the host.
fn read(
    mut shadow: std::sync::MutexGuard<'static, Shadow>,
    target: u64,
    source: u64,
    bytes: u64,
    stream: u64,
    host_waits: bool,
) -> i32 {
    if host_waits {
        shadow.clocks.synchronize(stream);
    }
    // Larger reads are not looked up: they are tensors, not values that decide anything.
    let known = if bytes <= card().keep { shadow.values.get(source, bytes) } else { None };
    if let Some(known) = known {
        drop(shadow);
        copy_host(target as *mut u8, known.as_ptr(), known.len());
        return SUCCESS;
    }
    let count = if bytes == 4 || bytes == 8 { launch::take_count(&mut shadow, stream) } else { None };
    if let Some(count) = count {
        drop(shadow);
        copy_host(target as *mut u8, count.to_le_bytes().as_ptr(), bytes as usize);
        return SUCCESS;
    }
    let (kernel, items) = launch::last_kernel(&shadow, stream);
    let (answer, value) = answer_for(&kernel, items, bytes);
    shadow.counters.note_read(&kernel, bytes, answer);
    drop(shadow);
    let out = Out(target as *mut u8);
    out.zero(bytes as usize);
    for (index, byte) in value.to_le_bytes().into_iter().take(bytes as usize).enumerate().filter(|(_, byte)| *byte != 0)
    {
        out.set_at(index, byte);
    }
    tell_reader(bytes, &kernel, answer);
    SUCCESS
}

/// What a value must be, by the kernel that made it. `all` is answered with true: checks of indices and finiteness pass.
fn answer_for(kernel: &str, items: Option<u64>, bytes: u64) -> (ReadAnswer, u64) {
    match items {
        Some(items) if bytes == 4 || bytes == 8 => (ReadAnswer::Count, (items as f64 * card().nonzero) as u64),
        _ if bytes == 1 && kernel.contains("and_kernel_cuda") => (ReadAnswer::True, 1),
        _ => (ReadAnswer::Zero, 0),
    }
}

fn fill(target: u64, pattern: &[u8], count: u64, stream: u64) -> i32 {
    let bytes = count.saturating_mul(pattern.len() as u64);
    if !is_device_address(target) {
        for index in 0..bytes as usize {
            Out(target as *mut u8).set_at(index, pattern[index % pattern.len()]);
        }
        return SUCCESS;
    }
    if let Some(code) = served::code(ServedCall::Overwrite, [target, bytes, stream]) {
        return code;
    }
    let mut shadow = state::lock();
    let nanos = streams::KERNEL_FLOOR_NANOS + bytes / DEVICE_COPY_BYTES_PER_NANO;
    shadow.clocks.elapse(streams::LAUNCH_NANOS);
    let captured = shadow.captures.add_node(stream, nanos);
    if captured {
        shadow.captures.note_write(stream, target, bytes);
    } else {
        shadow.clocks.run(stream, nanos);
    }
    if bytes <= card().keep && !captured {
        shadow.values.put(target, pattern.repeat(count as usize));
    } else {
        shadow.values.forget(target, bytes);
    }
    SUCCESS
}

/// Rows that are `pitch` bytes apart.
fn copy_rows(
    target: u64,
    target_pitch: u64,
    source: u64,
    source_pitch: u64,
    width: u64,
    height: u64,
    stream: u64,
    waits: bool,
) -> i32 {
    let codes =
        (0..height).map(|row| copy(target + row * target_pitch, source + row * source_pitch, width, stream, waits));
    codes.max().unwrap_or(SUCCESS)
}

fn fill_rows(target: u64, pitch: u64, value: i32, width: u64, height: u64, stream: u64) -> i32 {
    (0..height).map(|row| fill(target + row * pitch, &[value as u8], width, stream)).max().unwrap_or(SUCCESS)
}

/// Whether a copy makes the host wait: copies to pageable memory do, because they are staged.
fn waits(target: u64) -> bool {
    !is_device_address(target) && crate::host_memory::kind_of(target).is_none()
}

cuda_functions! {
    fn cudaMemcpy(target: u64, source: u64, bytes: u64, _kind: i32) -> i32 { conclude(copy(target, source, bytes, 0, true)) }
    fn cudaMemcpyAsync(target: u64, source: u64, bytes: u64, _kind: i32, stream: u64) -> i32 {
        let waiting = is_device_address(source) && waits(target);
        conclude(copy(target, source, bytes, stream, waiting))
    }
    fn cudaMemcpyPeer(target: u64, _to: i32, source: u64, _from: i32, bytes: u64) -> i32 { conclude(copy(target, source, bytes, 0, true)) }
    fn cudaMemcpyPeerAsync(target: u64, _to: i32, source: u64, _from: i32, bytes: u64, stream: u64) -> i32 { conclude(copy(target, source, bytes, stream, false)) }
    fn cudaMemcpy2D(target: u64, target_pitch: u64, source: u64, source_pitch: u64, width: u64, height: u64, _kind: i32) -> i32 {
        conclude(copy_rows(target, target_pitch, source, source_pitch, width, height, 0, true))
    }
    fn cudaMemcpy2DAsync(target: u64, target_pitch: u64, source: u64, source_pitch: u64, width: u64, height: u64, _kind: i32, stream: u64) -> i32 {
        conclude(copy_rows(target, target_pitch, source, source_pitch, width, height, stream, false))
    }
    fn cudaMemset(target: u64, value: i32, bytes: u64) -> i32 { fill(target, &[value as u8], bytes, 0) }
    fn cudaMemsetAsync(target: u64, value: i32, bytes: u64, stream: u64) -> i32 { fill(target, &[value as u8], bytes, stream) }
    fn cudaMemset2DAsync(target: u64, pitch: u64, value: i32, width: u64, height: u64, stream: u64) -> i32 { fill_rows(target, pitch, value, width, height, stream) }
    fn cudaMemcpyToSymbol(_symbol: u64, _source: u64, _bytes: u64, _offset: u64, _kind: i32) -> i32 { SUCCESS }
    fn cudaMemcpyToSymbolAsync(_symbol: u64, _source: u64, _bytes: u64, _offset: u64, _kind: i32, _stream: u64) -> i32 { SUCCESS }
    fn cudaMemcpyFromSymbol(target: u64, _symbol: u64, bytes: u64, _offset: u64, _kind: i32) -> i32 { Out(target as *mut u8).zero(bytes as usize); SUCCESS }
    fn cuMemcpy(target: u64, source: u64, bytes: u64) -> i32 { copy(target, source, bytes, 0, true) }
    fn cuMemcpyAsync(target: u64, source: u64, bytes: u64, stream: u64) -> i32 { copy(target, source, bytes, stream, false) }
    fn cuMemcpyHtoD_v2(target: u64, source: u64, bytes: u64) -> i32 { copy(target, source, bytes, 0, true) }
    fn cuMemcpyHtoDAsync_v2(target: u64, source: u64, bytes: u64, stream: u64) -> i32 { copy(target, source, bytes, stream, false) }
    fn cuMemcpyDtoH_v2(target: u64, source: u64, bytes: u64) -> i32 { copy(target, source, bytes, 0, true) }
    fn cuMemcpyDtoHAsync_v2(target: u64, source: u64, bytes: u64, stream: u64) -> i32 { copy(target, source, bytes, stream, false) }
    fn cuMemcpyDtoD_v2(target: u64, source: u64, bytes: u64) -> i32 { copy(target, source, bytes, 0, false) }
    fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, bytes: u64, stream: u64) -> i32 { copy(target, source, bytes, stream, false) }
    fn cuMemsetD8_v2(target: u64, value: u8, count: u64) -> i32 { fill(target, &[value], count, 0) }
    fn cuMemsetD8Async(target: u64, value: u8, count: u64, stream: u64) -> i32 { fill(target, &[value], count, stream) }
    fn cuMemsetD16_v2(target: u64, value: u16, count: u64) -> i32 { fill(target, &value.to_le_bytes(), count, 0) }
    fn cuMemsetD16Async(target: u64, value: u16, count: u64, stream: u64) -> i32 { fill(target, &value.to_le_bytes(), count, stream) }
    fn cuMemsetD32_v2(target: u64, value: u32, count: u64) -> i32 { fill(target, &value.to_le_bytes(), count, 0) }
    fn cuMemsetD32Async(target: u64, value: u32, count: u64, stream: u64) -> i32 { fill(target, &value.to_le_bytes(), count, stream) }
    fn cudaMemcpyBatchAsync(targets: In<u64>, sources: In<u64>, sizes: In<u64>, count: u64, _attributes: u64, _indices: u64, _number: u64, _stream: u64) -> i32 {
        for index in 0..count as usize {
            if let (Some(target), Some(source), Some(bytes)) = (targets.get_at(index), sources.get_at(index), sizes.get_at(index)) {
                copy(target, source, bytes, 0, false);
            }
        }
        SUCCESS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;

    #[test]
    fn values_come_back_and_unknown_ones_are_zero() {
        let device = memory::allocate(1 << 20).unwrap();
        let (source, mut target) = ([1u8, 2, 3, 4], [9u8; 4]);
        let host = |bytes: &mut [u8; 4]| bytes.as_mut_ptr() as u64;
        assert_eq!(cudaMemcpy(device, source.as_ptr() as u64, 4, 1), SUCCESS);
        assert_eq!(cudaMemcpyAsync(device + 512, device, 4, 3, 0), SUCCESS);
        cudaMemcpy(host(&mut target), device + 512, 4, 2);
        assert_eq!(target, [1, 2, 3, 4]);
        cudaMemset(device + 512, 7, 2);
        cudaMemcpy(host(&mut target), device + 512, 4, 2);
        assert_eq!(target, [7, 7, 3, 4]);
        cudaMemcpy(host(&mut target), device + 4096, 4, 2);
        assert_eq!(target, [0; 4]);
        memory::free(device);
        let again = memory::allocate(1 << 20).unwrap();
        assert_eq!(again, device);
        target = [9; 4];
        cudaMemcpy(host(&mut target), again, 4, 2);
        assert_eq!(target, [0; 4], "freed memory has no value");
        memory::free(again);
    }

    #[test]
    fn counts_follow_the_assumption() {
        assert_eq!(
            answer_for("DeviceReduceKernel", Some(100), 4),
            (ReadAnswer::Count, (100.0 * card().nonzero) as u64)
        );
        assert_eq!(answer_for("reduce_kernel and_kernel_cuda", None, 1), (ReadAnswer::True, 1));
        assert_eq!(answer_for("gemm", Some(100), 1), (ReadAnswer::Zero, 0));
    }
}
