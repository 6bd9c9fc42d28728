//! Our strategies behind PyTorch's pluggable-allocator interface: what `liboomph.so` is to the program that loads it.
//!
//! ```python
//! allocator = torch.cuda.memory.CUDAPluggableAllocator("liboomph.so", "oomph_alloc", "oomph_free")
//! torch.cuda.memory.change_current_allocator(allocator)
//! ```
//!
//! `entry` has the exported functions, over one [`Service`] for the process; that has a `Desk` for each GPU, where calls
//! from any thread and on any stream are served one at a time. The environment says which strategy ([`Settings`]); this is
//! the one place beside the command line that reads it, because nobody else can speak to a library that PyTorch loads.

mod desk;
mod entry;
mod exception;
mod settings;
mod statistics;

pub use entry::{oomph_alloc, oomph_free, oomph_memory_fraction, oomph_record_stream, oomph_reserved, oomph_reset};
pub use settings::{OutOfMemory, Settings, SettingsError};
pub use statistics::{DeskStatistics, Statistics};

use std::sync::{Arc, Mutex, PoisonError};

use self::desk::Desk;
use oomph_alloc::device::{DeviceSpecError, MissingCapabilities};
use oomph_alloc::strategy::{SpecError, StrategyError};
use oomph_base::Address;

/// Why a call from the program could not be served. Running out of memory is not among the reasons.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A variable of the environment makes no sense.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// There is no such GPU.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// The strategy does not take its parameters on this GPU.
    #[error(transparent)]
    Strategy(#[from] SpecError),
    /// The strategy needs what this GPU has not got.
    #[error("{0}, which the strategy needs")]
    Unable(#[from] MissingCapabilities),
    /// The strategy failed.
    #[error(transparent)]
    Call(#[from] StrategyError),
    /// The program gave back, or used on another stream, what it was never given.
    #[error("{0} was never handed out, or was given back already")]
    Unknown(Address),
    /// The program counts its GPUs differently.
    #[error("there is no device {0}")]
    NoDevice(i32),
}

/// The allocator of a whole program: every thread, stream and GPU.
#[derive(Debug)]
pub struct Service {
    settings: Settings,
    /// By device number. A desk stays once it was opened.
    desks: Mutex<Vec<Option<Arc<Mutex<Desk>>>>>,
}

/// More GPUs than a machine has.
const MOST_DEVICES: usize = 1024;

impl Service {
    /// Opens nothing yet: a GPU is opened by the first request for its memory.
    #[must_use]
    pub fn new(settings: Settings) -> Service {
        Service { settings, desks: Mutex::default() }
    }

    /// What the environment said.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// A block of at least so many bytes, ordered on the stream with this handle; none where memory has run out.
    pub fn alloc(&self, bytes: u64, device: i32, stream: u64) -> Result<Option<Address>, ServeError> {
        let desk = self.desk(device)?;
        attend(&desk).alloc(bytes, stream)
    }

    /// Takes a block back.
    pub fn free(&self, address: Address, device: i32, stream: u64) -> Result<(), ServeError> {
        let desk = self.opened(device).ok_or(ServeError::Unknown(address))?;
        attend(&desk).free(address, stream)
    }

    /// A block is also used on the stream with this handle. Which GPU it is on nobody says.
    pub fn record_stream(&self, address: Address, stream: u64) -> Result<(), ServeError> {
        for desk in self.all() {
            if attend(&desk).record_stream(address, stream)? {
                return Ok(());
            }
        }
        Err(ServeError::Unknown(address))
    }

    /// Gives cached memory back, on every GPU.
    pub fn reset(&self) -> Result<(), ServeError> {
        self.all().iter().try_for_each(|desk| attend(desk).trim())
    }

    /// PyTorch's `set_per_process_memory_fraction`.
    pub fn memory_fraction(&self, fraction: f64, device: i32) -> Result<(), ServeError> {
        let desk = self.desk(device)?;
        attend(&desk).memory_fraction(fraction)
    }

    /// Bytes held of a GPU now; nothing of one that nobody asked for memory.
    #[must_use]
    pub fn reserved(&self, device: i32) -> u64 {
        self.opened(device).map_or(0, |desk| attend(&desk).reserved())
    }

    /// The books of every GPU. A desk where a call hangs is left out: this is asked when the program ends.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let devices = self.all().iter().filter_map(|desk| Some(desk.try_lock().ok()?.statistics())).collect();
        Statistics::of(&self.settings, devices)
    }

    fn desk(&self, device: i32) -> Result<Arc<Mutex<Desk>>, ServeError> {
        let place = usize::try_from(device).ok().filter(|&n| n < MOST_DEVICES).ok_or(ServeError::NoDevice(device))?;
        let mut desks = self.desks.lock().unwrap_or_else(PoisonError::into_inner);
        if desks.len() <= place {
            desks.resize(place + 1, None);
        }
        if let Some(desk) = &desks[place] {
            return Ok(Arc::clone(desk));
        }
        let desk = Arc::new(Mutex::new(Desk::open(device, &self.settings)?));
        desks[place] = Some(Arc::clone(&desk));
        Ok(desk)
    }

    fn opened(&self, device: i32) -> Option<Arc<Mutex<Desk>>> {
        let desks = self.desks.lock().unwrap_or_else(PoisonError::into_inner);
        desks.get(usize::try_from(device).ok()?)?.clone()
    }

    fn all(&self) -> Vec<Arc<Mutex<Desk>>> {
        self.desks.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten().cloned().collect()
    }
}

/// A panic under the lock leaves it usable: a strategy keeps its state sound through every error.
fn attend(desk: &Mutex<Desk>) -> std::sync::MutexGuard<'_, Desk> {
    desk.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_opened_by_its_first_request() {
        let variables = |name: &str| match name {
            "OOMPH_STRATEGY" => Some("caching".to_owned()),
            "OOMPH_DEVICE" => Some("sim".to_owned()),
            _ => None,
        };
        let service = Service::new(Settings::read(variables).unwrap());
        let block = service.alloc(1 << 20, 0, 0).unwrap().unwrap();
        assert_eq!(service.reserved(0), 2 << 20);
        service.free(block, 0, 0).unwrap();
    }
}
