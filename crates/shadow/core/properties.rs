//! What a program can ask about the device: properties, attributes, versions.

use std::sync::{
    LazyLock,
    atomic::{AtomicU32, Ordering},
};

use crate::{
    arguments::{Out, copy_text},
    card::{Card, card},
    errors::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, SUCCESS, conclude},
    state::current,
};

/// Limits that depend on the compute capability: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of shared memory that a multiprocessor has.
    pub shared_per_multiprocessor: i32,
    /// Bytes of shared memory that a block can opt in to.
    pub shared_per_block_opt_in: i32,
    pub threads_per_multiprocessor: i32,
    pub blocks_per_multiprocessor: i32,
}

pub const fn limits_of(major: i32, minor: i32) -> Limits {
    let (shared, opt_in, threads, blocks) = match (major, minor) {
        (7, 0..=4) => (98_304, 98_304, 2048, 32),
        (7, _) => (65_536, 65_536, 1024, 16),
        (8, 0) => (167_936, 166_912, 2048, 32),
        (8, 7) => (167_936, 166_912, 1536, 16),
        (8, 9) => (102_400, 101_376, 1536, 24),
        (8, _) => (102_400, 101_376, 1536, 16),
        (11, _) => (233_472, 232_448, 1536, 24),
        (12, _) => (102_400, 101_376, 1536, 24),
        _ => (233_472, 232_448, 2048, 32),
    };
    Limits {
        shared_per_multiprocessor: shared,
        shared_per_block_opt_in: opt_in,
        threads_per_multiprocessor: threads,
        blocks_per_multiprocessor: blocks,
    }
}

pub fn limits() -> Limits {
    limits_of(card().major, card().minor)
}

/// Shared memory that the system takes from each block.
pub const RESERVED_SHARED: i32 = 1024;
/// Clock rates and bus of an H200.
pub const CLOCK_KHZ: i32 = 1_980_000;
pub const MEMORY_CLOCK_KHZ: i32 = 3_201_000;
const BUS_BITS: i32 = 6144;

/// Values by `cudaDeviceAttr`, which are the numbers of `CUdevice_attribute`. What is not listed is 0: not supported.
fn attribute(card: &Card, number: i32) -> i32 {
    let limits = limits();
    match number {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        8 => 49_152,
        9 => 65_536,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65_536,
        13 => CLOCK_KHZ,
        14 => 512,
        51 => 32,
        16 => card.multiprocessors,
        36 => MEMORY_CLOCK_KHZ,
        37 => BUS_BITS,
        38 => card.l2,
        39 => limits.threads_per_multiprocessor,
        40 => 3,
        33 => 1 + current::device() as i32,
        75 => card.major,
        76 => card.minor,
        81 => limits.shared_per_multiprocessor,
        87 => 2,
        97 => limits.shared_per_block_opt_in,
        106 => limits.blocks_per_multiprocessor,
        // Persisting L2: five eighths of the cache; access policy window: 128 MiB.
        108 => card.l2 / 8 * 5,
        109 => 128 << 20,
        111 => RESERVED_SHARED,
        // Cluster launch.
        120 => i32::from(card.major >= 9),
        // Copy overlap, mapped host memory, concurrent kernels, ECC, unified addressing, priorities, caches, managed
        // memory, preemption, registered host memory, cooperative launch, virtual memory, POSIX handles, pools.
        15 | 19 | 31 | 32 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 99 | 102 | 103 | 113 | 115 => 1,
        _ => 0,
    }
}

/// Offsets of structures in each major version of CUDA.
const LAYOUTS: &str = include_str!("../src/functions/layouts.txt");

struct Layout {
    structure: &'static str,
    major: u32,
    bytes: usize,
    fields: Vec<(&'static str, usize)>,
}

static PARSED: LazyLock<Vec<Layout>> = LazyLock::new(|| {
    let mut layouts: Vec<Layout> = Vec::new();
    for line in LAYOUTS.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&'static str> = line.split_whitespace().collect();
        let number = |index: usize| words.get(index).and_then(|word| word.parse::<usize>().ok()).unwrap_or(0);
        if !line.starts_with(' ') {
            layouts.push(Layout { structure: words[0], major: number(1) as u32, bytes: number(2), fields: Vec::new() });
        } else if let Some(layout) = layouts.last_mut() {
            layout.fields.push((words[0], number(1)));
        }
    }
    layouts
});

fn layout(structure: &str, major: u32) -> Option<&'static Layout> {
    let known = PARSED.iter().filter(|layout| layout.structure == structure);
    known.min_by_key(|layout| layout.major.abs_diff(major))
}

/// Bytes of a structure.
pub fn size_of(structure: &str, major: u32) -> usize {
    layout(structure, major).map_or(0, |layout| layout.bytes)
}

/// Writes a field of a structure, where that version has it.
pub fn set_field(target: Out<u8>, structure: &str, major: u32, field: &str, value: u64, bytes: usize) {
    let found = layout(structure, major).and_then(|layout| layout.fields.iter().find(|(name, _)| *name == field));
    if let Some(&(_, offset)) = found {
        for (index, byte) in value.to_le_bytes().into_iter().take(bytes).enumerate() {
            target.set_at(offset + index, byte);
        }
    }
}

static RUNTIME_MAJOR: AtomicU32 = AtomicU32::new(0);

/// A library was loaded; the runtime's soname says which CUDA the program was built for.
pub fn note_runtime(major: u32) {
    RUNTIME_MAJOR.store(major, Ordering::Relaxed);
}

/// The major version of the program's CUDA runtime.
pub fn runtime_major() -> u32 {
    match RUNTIME_MAJOR.load(Ordering::Relaxed) {
        0 => (card().cuda / 1000) as u32,
        major => major,
    }
}

/// Fields of `cudaDeviceProp` that are attributes under another name.
const PROPERTY_ATTRIBUTES: &[(&str, i32)] = &[
    ("regsPerBlock", 12),
    ("warpSize", 10),
    ("maxThreadsPerBlock", 1),
    ("clockRate", 13),
    ("major", 75),
    ("minor", 76),
    ("deviceOverlap", 15),
    ("multiProcessorCount", 16),
    ("canMapHostMemory", 19),
    ("concurrentKernels", 31),
    ("ECCEnabled", 32),
    ("pciBusID", 33),
    ("asyncEngineCount", 40),
    ("unifiedAddressing", 41),
    ("memoryClockRate", 36),
    ("memoryBusWidth", 37),
    ("l2CacheSize", 38),
    ("persistingL2CacheMaxSize", 108),
    ("maxThreadsPerMultiProcessor", 39),
    ("streamPrioritiesSupported", 78),
    ("globalL1CacheSupported", 79),
    ("localL1CacheSupported", 80),
    ("regsPerMultiprocessor", 82),
    ("managedMemory", 83),
    ("concurrentManagedAccess", 89),
    ("computePreemptionSupported", 90),
    ("canUseHostPointerForRegisteredMem", 91),
    ("cooperativeLaunch", 95),
    ("maxBlocksPerMultiProcessor", 106),
    ("accessPolicyMaxWindowSize", 109),
    ("hostRegisterSupported", 99),
    ("memoryPoolsSupported", 115),
    ("clusterLaunch", 120),
];

/// Fields of 8 bytes.
const LARGE_PROPERTIES: &[(&str, i32)] = &[
    ("sharedMemPerBlock", 8),
    ("memPitch", 11),
    ("totalConstMem", 9),
    ("textureAlignment", 14),
    ("texturePitchAlignment", 51),
    ("surfaceAlignment", 14),
    ("sharedMemPerMultiprocessor", 81),
    ("sharedMemPerBlockOptin", 97),
    ("reservedSharedMemPerBlock", 111),
];

fn device_properties(target: Out<u8>, device: i32, major: u32) -> i32 {
    const STRUCTURE: &str = "cudaDeviceProp";
    let card = card();
    target.zero(size_of(STRUCTURE, major));
    if device < 0 || device >= card.devices {
        return INVALID_DEVICE;
    }
    copy_text(&card.name, target, 256);
    let set = |field: &str, value: u64, bytes: usize| set_field(target, STRUCTURE, major, field, value, bytes);
    for &(field, number) in PROPERTY_ATTRIBUTES {
        set(field, attribute(card, number) as u64, 4);
    }
    for &(field, number) in LARGE_PROPERTIES {
        set(field, attribute(card, number) as u64, 8);
    }
    set("totalGlobalMem", card.total, 8);
    set("pciBusID", 1 + device as u64, 4);
    set("uuid", 0x6f6f_6d70_6800_0000 + device as u64, 8);
    set("maxThreadsDim", 1024 | 1024 << 32, 8);
    set("maxGridSize", i32::MAX as u64 | 65_535 << 32, 8);
    set_third(target, major, "maxThreadsDim", 64);
    set_third(target, major, "maxGridSize", 65_535);
    SUCCESS
}

/// The third element of an array of three.
fn set_third(target: Out<u8>, major: u32, field: &str, value: u32) {
    let found =
        layout("cudaDeviceProp", major).and_then(|layout| layout.fields.iter().find(|(name, _)| *name == field));
    if let Some(&(_, offset)) = found {
        for (index, byte) in value.to_le_bytes().into_iter().enumerate() {
            target.set_at(offset + 8 + index, byte);
        }
    }
}

fn device_attribute(value: Out<i32>, number: i32, device: i32) -> i32 {
    let known = device >= 0 && device < card().devices;
    value.set(if known { attribute(card(), number) } else { 0 });
    if known { SUCCESS } else { INVALID_DEVICE }
}

fn pci_bus_id(buffer: Out<u8>, length: i32, device: i32) -> i32 {
    copy_text(&format!("0000:{:02x}:00.0", 1 + device), buffer, length.max(0) as usize);
    SUCCESS
}

/// `PCI bus id` back to a device.
fn device_of_bus(text: &str) -> i32 {
    let bus = text.split(':').rev().nth(1).and_then(|bus| i32::from_str_radix(bus, 16).ok());
    bus.map_or(0, |bus| (bus - 1).clamp(0, card().devices - 1))
}

fn choose(device: i32) -> i32 {
    if device < 0 || device >= card().devices {
        return INVALID_DEVICE;
    }
    current::set_device(device as usize);
    SUCCESS
}

/// `cudaIpcMemHandle_t`: passed by value, on the stack.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle([u64; 8]);

fn count(value: Out<i32>) -> i32 {
    value.set(card().devices);
    SUCCESS
}

cuda_functions! {
    fn cudaGetDeviceCount(value: Out<i32>) -> i32 { count(value) }
    fn cudaGetDevice(device: Out<i32>) -> i32 { device.set(current::device() as i32); SUCCESS }
    fn cudaSetDevice(device: i32) -> i32 { conclude(choose(device)) }
    fn cudaInitDevice(device: i32, _flags: u32, _set: u32) -> i32 { conclude(choose(device)) }
    fn cudaChooseDevice(device: Out<i32>, _properties: u64) -> i32 { device.set(0); SUCCESS }
    // CUDA 11 and 13 have the plain name with their own layouts; CUDA 12 renamed it and kept the old layout under the old name.
    fn cudaGetDeviceProperties(target: Out<u8>, device: i32) -> i32 {
        let major = runtime_major();
        conclude(device_properties(target, device, if major == 12 { 11 } else { major }))
    }
    fn cudaGetDeviceProperties_v2(target: Out<u8>, device: i32) -> i32 { conclude(device_properties(target, device, 12)) }
    fn cudaDeviceGetAttribute(value: Out<i32>, number: i32, device: i32) -> i32 { conclude(device_attribute(value, number, device)) }
    fn cudaDeviceGetPCIBusId(buffer: Out<u8>, length: i32, device: i32) -> i32 { pci_bus_id(buffer, length, device) }
    fn cudaDeviceGetByPCIBusId(device: Out<i32>, text: crate::arguments::Text) -> i32 { device.set(device_of_bus(text.get())); SUCCESS }
    fn cudaDriverGetVersion(version: Out<i32>) -> i32 { version.set(card().cuda); SUCCESS }
    fn cudaRuntimeGetVersion(version: Out<i32>) -> i32 { version.set(card().cuda); SUCCESS }
    fn cudaDeviceGetLimit(value: Out<u64>, _limit: i32) -> i32 { value.set(1 << 20); SUCCESS }
    // Devices of one machine can reach each other; a device cannot reach itself as a peer.
    fn cudaDeviceCanAccessPeer(answer: Out<i32>, device: i32, peer: i32) -> i32 {
        let known = |number: i32| (0..card().devices).contains(&number);
        answer.set(i32::from(device != peer && known(device) && known(peer)));
        SUCCESS
    }
    fn cudaDeviceGetP2PAttribute(value: Out<i32>, number: i32, _source: i32, _target: i32) -> i32 { value.set(i32::from(number == 2)); SUCCESS }
    fn cuInit(_flags: u32) -> i32 { SUCCESS }
    fn cuDriverGetVersion(version: Out<i32>) -> i32 { version.set(card().cuda); SUCCESS }
    fn cuDeviceGetCount(value: Out<i32>) -> i32 { count(value) }
    fn cuDeviceGet(device: Out<i32>, ordinal: i32) -> i32 {
        device.set(ordinal);
        if (0..card().devices).contains(&ordinal) { SUCCESS } else { INVALID_DEVICE }
    }
    fn cuDeviceGetName(buffer: Out<u8>, length: i32, _device: i32) -> i32 { copy_text(&card().name, buffer, length.max(0) as usize); SUCCESS }
    fn cuDeviceGetAttribute(value: Out<i32>, number: i32, device: i32) -> i32 { device_attribute(value, number, device) }
    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, _device: i32) -> i32 { major.set(card().major); minor.set(card().minor); SUCCESS }
    fn cuDeviceGetUuid(uuid: Out<[u64; 2]>, device: i32) -> i32 { uuid.set([0x6f6f_6d70_6800_0000 + device as u64, 0]); SUCCESS }
    fn cuDeviceGetUuid_v2(uuid: Out<[u64; 2]>, device: i32) -> i32 { uuid.set([0x6f6f_6d70_6800_0000 + device as u64, 0]); SUCCESS }
    fn cuDeviceGetPCIBusId(buffer: Out<u8>, length: i32, device: i32) -> i32 { pci_bus_id(buffer, length, device) }
    fn cuDeviceGetByPCIBusId(device: Out<i32>, text: crate::arguments::Text) -> i32 { device.set(device_of_bus(text.get())); SUCCESS }
    fn cuDeviceCanAccessPeer(answer: Out<i32>, device: i32, peer: i32) -> i32 { cudaDeviceCanAccessPeer(answer, device, peer) }
    fn cuCtxGetLimit(value: Out<u64>, _limit: i32) -> i32 { value.set(1 << 20); SUCCESS }
    // Memory of another process cannot be opened: there is no device that both would share.
    fn cudaIpcOpenMemHandle(pointer: Out<u64>, _handle: IpcHandle, _flags: u32) -> i32 { pointer.set(0); NOT_SUPPORTED }
    fn cudaDeviceGetGraphMemAttribute(_device: i32, _number: i32, value: Out<u64>) -> i32 { value.set(0); SUCCESS }
    fn cudaDeviceGetNvSciSyncAttributes(_list: u64, _device: i32, _flags: i32) -> i32 { INVALID_VALUE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_of_all_versions_are_known() {
        for (major, bytes) in [(11, 728), (12, 1032), (13, 1008)] {
            assert_eq!(size_of("cudaDeviceProp", major), bytes);
            let mut target = vec![0xaau8; bytes + 8];
            assert_eq!(device_properties(Out(target.as_mut_ptr()), 0, major), SUCCESS);
            assert!(target.starts_with(b"NVIDIA H200\0"));
            assert_eq!(target[bytes..], [0xaa; 8], "nothing behind the structure is written");
            let offset = |name: &str| {
                layout("cudaDeviceProp", major).unwrap().fields.iter().find(|(field, _)| *field == name).unwrap().1
            };
            let word = |at: usize| i32::from_le_bytes(target[at..at + 4].try_into().unwrap());
            assert_eq!((word(offset("multiProcessorCount")), word(offset("maxThreadsDim") + 8)), (132, 64));
        }
    }

    #[test]
    fn unknown_devices_are_refused() {
        let mut value = 7;
        assert_eq!((device_attribute(Out(&raw mut value), 16, 5), value), (INVALID_DEVICE, 0));
        assert_eq!(choose(-1), INVALID_DEVICE);
        assert_eq!(device_of_bus("0000:01:00.0"), 0);
    }
}
