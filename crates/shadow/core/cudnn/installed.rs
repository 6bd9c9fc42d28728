//! The user's own cuDNN, which answers for convolutions without a GPU.
//!
//! From 9.8 on, cuDNN's heuristics and plans take the properties of a device as JSON
//! (`CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR`) in place of a handle. `_oomph_cudnn.py` finds and loads the library and passes
//! the addresses of its functions. cuDNN itself loads cuBLASLt, NVRTC and the driver by name and gets the forwarders.

use std::{
    cell::Cell,
    ffi::c_char,
    mem::transmute,
    ptr::null_mut,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{SUCCESS, twins};
use crate::{
    arguments::{In, Out, copy_text},
    card::{Card, card},
    properties,
};

/// `CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR` and its attribute with the JSON.
const DEVICE_PROPERTIES: i32 = 38;
const DEVICE_PROPERTIES_JSON: i32 = 2702;
/// `CUDNN_TYPE_CHAR`.
const CHARACTER: i32 = 24;
/// The first release whose heuristics and plans take properties of a device.
const FIRST_VERSION: usize = 90_800;

type Create = extern "C" fn(i32, *mut u64) -> i32;
type WithDescriptor = extern "C" fn(u64) -> i32;
type Set = extern "C" fn(u64, i32, i32, i64, *const u8) -> i32;
type Get = extern "C" fn(u64, i32, i32, i64, *mut i64, *mut u8) -> i32;
type Number = extern "C" fn() -> usize;
type LastError = extern "C" fn(*mut c_char, usize);

/// Functions of the library, in the order in which `_oomph_cudnn.py` passes their addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Functions {
    pub create: Create,
    pub destroy: WithDescriptor,
    pub set: Set,
    pub get: Get,
    pub finalize: WithDescriptor,
    pub version: Number,
    pub cuda_version: Number,
    pub last_error: LastError,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in a call of the library, so that what the library asks of the driver is not the program's.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Calls a function of the library.
fn inside<T>(call: impl FnOnce() -> T) -> T {
    let before = INSIDE.replace(true);
    let answer = call();
    INSIDE.set(before);
    answer
}

/// The library with the descriptor of the card.
pub struct Installed {
    functions: Functions,
    device: OnceLock<u64>,
}

impl Installed {
    /// Creates a descriptor.
    pub fn create(&self, kind: i32) -> Result<u64, i32> {
        let mut handle = 0;
        concluded(inside(|| (self.functions.create)(kind, &raw mut handle))).map(|()| handle)
    }

    pub fn destroy(&self, handle: u64) {
        inside(|| (self.functions.destroy)(handle));
    }

    pub fn finalize(&self, handle: u64) -> Result<(), i32> {
        concluded(inside(|| (self.functions.finalize)(handle)))
    }

    /// Sets an attribute of `count` elements of a type to these bytes.
    pub fn set(&self, handle: u64, attribute: i32, kind: i32, count: i64, bytes: &[u8]) -> Result<(), i32> {
        concluded(inside(|| (self.functions.set)(handle, attribute, kind, count, bytes.as_ptr())))
    }

    /// Asks for an attribute; gives how many elements there are. `elements` has room for `wanted` elements of that type.
    pub fn get(&self, handle: u64, attribute: i32, kind: i32, wanted: i64, elements: *mut u8) -> Result<i64, i32> {
        let mut found = 0;
        let elements = if wanted > 0 { elements } else { null_mut() };
        concluded(inside(|| (self.functions.get)(handle, attribute, kind, wanted, &raw mut found, elements)))?;
        Ok(found)
    }

    /// The descriptor with the properties of the card.
    pub fn device(&self) -> u64 {
        self.device.get().copied().unwrap_or(0)
    }

    fn describe_device(&self) -> Result<(), i32> {
        let handle = self.create(DEVICE_PROPERTIES)?;
        let json = device_json(card());
        self.set(handle, DEVICE_PROPERTIES_JSON, CHARACTER, json.len() as i64, json.as_bytes())?;
        self.finalize(handle)?;
        self.device.get_or_init(|| handle);
        Ok(())
    }

    /// Why the last call failed, in the library's words.
    fn last_error(&self) -> String {
        let mut buffer = [0u8; 512];
        inside(|| (self.functions.last_error)(buffer.as_mut_ptr().cast(), buffer.len()));
        String::from_utf8_lossy(buffer.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned()
    }
}

fn concluded(status: i32) -> Result<(), i32> {
    if status == SUCCESS { Ok(()) } else { Err(status) }
}

/// The properties of the card, with the names that cuDNN reads. Clock rates are those of the H200.
pub fn device_json(card: &Card) -> String {
    let limits = properties::limits_of(card.major, card.minor);
    let quoted = card.name.replace(['"', '\\'], "");
    format!(
        "{{\"maxGridSize\":[{grid},65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\
         \"multiProcessorCount\":{multiprocessors},\"warpSize\":32,\"maxSharedMemoryPerBlock\":49152,\
         \"maxSharedMemoryPerBlockOptin\":{opt_in},\"reservedSharedMemoryPerBlock\":{reserved},\
         \"maxRegistersPerSM\":65536,\"maxCtasPerSM\":{blocks},\"maxThreadsPerBlock\":1024,\
         \"maxThreadsPerSM\":{threads},\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,\
         \"smClockRateKHz\":{clock},\"memClockRateKHz\":{memory_clock},\"l2CacheSize\":{l2},\
         \"deviceName\":\"{quoted}\",\"deviceVer\":{version},\"driverVer\":{driver},\"cudaDeviceId\":0,\
         \"totalGlobalMem\":{total}}}",
        grid = i32::MAX,
        multiprocessors = card.multiprocessors,
        opt_in = limits.shared_per_block_opt_in,
        reserved = properties::RESERVED_SHARED,
        blocks = limits.blocks_per_multiprocessor,
        threads = limits.threads_per_multiprocessor,
        clock = properties::CLOCK_KHZ,
        memory_clock = properties::MEMORY_CLOCK_KHZ,
        l2 = card.l2,
        version = card.major * 100 + card.minor * 10,
        driver = card.cuda,
        total = card.total,
    )
}

/// Whether a library of this version, built for this CUDA, can answer for a program with that CUDA.
pub fn check_versions(version: usize, cuda: usize, program_cuda: usize) -> Result<(), String> {
    if version < FIRST_VERSION {
        return Err(format!("cuDNN {}.{} is installed", version / 10_000, version / 100 % 100));
    }
    if cuda / 1000 != program_cuda / 1000 {
        return Err(format!("cuDNN is installed for CUDA {}, PyTorch for CUDA {}", cuda / 1000, program_cuda / 1000));
    }
    Ok(())
}

static INSTALLED: OnceLock<Installed> = OnceLock::new();
/// Called before the first convolution: it may pass the library.
static SEARCH: AtomicUsize = AtomicUsize::new(0);

/// The library, if there is one that can answer.
pub fn installed() -> Option<&'static Installed> {
    static SEARCHED: OnceLock<()> = OnceLock::new();
    SEARCHED.get_or_init(|| {
        let search = SEARCH.load(Ordering::Acquire);
        if search != 0 {
            // SAFETY: `oomph_shadow_on_convolution` stored the address of a function of this type, or 0.
            unsafe { transmute::<usize, extern "C" fn()>(search)() };
        }
    });
    INSTALLED.get()
}

/// The function that is called once, before the first convolution.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_shadow_on_convolution(search: usize) {
    SEARCH.store(search, Ordering::Release);
}

/// Takes a library; says why not.
pub fn take(functions: Functions) -> Result<&'static Installed, String> {
    check_versions(inside(|| (functions.version)()), inside(|| (functions.cuda_version)()), card().cuda as usize)?;
    let library = Installed { functions, device: OnceLock::new() };
    library.describe_device().map_err(|status| {
        format!("cuDNN refuses the description of the card with status {status}: {}", library.last_error())
    })?;
    Ok(INSTALLED.get_or_init(|| library))
}

/// Takes a library for convolutions. Returns 0, or 1 with the reason in the buffer. With `trial`, plans of a convolution
/// are made too: a process that can be lost does that first, because cuDNN may end it.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_shadow_use_cudnn(addresses: *const usize, trial: i32, reason: *mut u8, length: u64) -> i32 {
    let addresses: [usize; 8] = std::array::from_fn(|index| In(addresses).get_at(index).unwrap_or(0));
    let answer = if addresses.contains(&0) {
        Err("cuDNN has no backend functions".to_owned())
    } else {
        // SAFETY: `_oomph_cudnn.py` passes the addresses of these eight functions in this order; none is null.
        let functions = unsafe { transmute::<[usize; 8], Functions>(addresses) };
        take(functions).and_then(|library| {
            if trial == 0 {
                return Ok(());
            }
            twins::try_convolution().map_err(|status| {
                format!("cuDNN makes no plan for a convolution, with status {status}: {}", library.last_error())
            })
        })
    };
    match answer {
        Ok(()) => 0,
        Err(text) => {
            copy_text(&text, Out(reason), length as usize);
            1
        }
    }
}
