//! All books, behind one lock.

use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::{
    capture::Captures, card, cudnn, memory::DeviceMemory, pools::Pools, report::Counters, streams::Clocks,
    values::KeptValues, virtual_memory::VirtualSpace,
};

/// The books of the process.
pub struct Shadow {
    /// By device.
    pub devices: Vec<DeviceMemory>,
    pub virtual_space: VirtualSpace,
    pub pools: Pools,
    pub clocks: Clocks,
    pub captures: Captures,
    pub values: KeptValues,
    pub counters: Counters,
}

/// Locks a mutex. The library is compiled to abort on a panic, so no value is left half-changed.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Locks the books. Callers must not call back into the program while they hold them.
pub fn lock() -> MutexGuard<'static, Shadow> {
    static SHADOW: OnceLock<Mutex<Shadow>> = OnceLock::new();
    let shadow = SHADOW.get_or_init(|| {
        let count = card::card().devices as usize;
        Mutex::new(Shadow {
            devices: (0..count).map(DeviceMemory::new).collect(),
            virtual_space: VirtualSpace::new(),
            pools: Pools::new(count),
            clocks: Clocks::new(),
            captures: Captures::default(),
            values: KeptValues::default(),
            counters: Counters::default(),
        })
    });
    locked(shadow)
}

/// A forwarder was loaded.
pub fn note_library(soname: &str) {
    lock().counters.libraries.insert(soname.to_owned());
}

/// A function was called that no table has.
pub fn note_unserved(name: &str) {
    if cudnn::installed::is_inside() {
        return;
    }
    lock().counters.unserved.insert(name.to_owned());
}

/// The device that the thread has chosen.
pub mod current {
    use std::cell::Cell;

    thread_local! {
        static DEVICE: Cell<usize> = const { Cell::new(0) };
    }

    pub fn device() -> usize {
        DEVICE.get()
    }

    pub fn set_device(device: usize) {
        DEVICE.set(device);
    }
}
