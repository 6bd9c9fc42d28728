//! The card that is stood in for, and where its memory lies in the address space of the process.

use std::sync::OnceLock;

use oomph_driver::FIRST_RESERVED;

use crate::served_call::{ADDRESS_BYTES, ADDRESS_END};

/// The device and the assumptions, from the environment.
#[derive(Clone, Debug)]
pub struct Card {
    /// As `nvidia-smi` names it.
    pub name: String,
    /// Memory of the device, in bytes.
    pub total: u64,
    /// Bytes in use before the program allocates anything: the CUDA context.
    pub context: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: i32,
    /// Compute capability.
    pub major: i32,
    /// Compute capability, second number.
    pub minor: i32,
    /// Bytes of the L2 cache.
    pub l2: i32,
    /// How many of these cards there are.
    pub devices: i32,
    /// Which part of the elements is assumed to be nonzero where a count is read back.
    pub nonzero: f64,
    /// Copies up to this many bytes keep their value.
    pub keep: u64,
    /// Versions as the libraries report them.
    pub cudnn: i64,
    /// NCCL's version number.
    pub nccl: i32,
    /// cuBLAS's version number.
    pub cublas: i32,
    /// Version of the CUDA runtime and driver: 13000.
    pub cuda: i32,
}

impl Default for Card {
    /// An H200, PyTorch 2.11's libraries.
    fn default() -> Card {
        Card {
            name: "NVIDIA H200".to_owned(),
            total: 150_109_880_320,
            context: 552_402_944,
            multiprocessors: 132,
            major: 9,
            minor: 0,
            l2: 62_914_560,
            devices: 1,
            nonzero: 0.5,
            keep: 64 << 10,
            cudnn: 91_900,
            nccl: 22_809,
            cublas: 130_100,
            cuda: 13_000,
        }
    }
}

impl Card {
    /// Reads `key=value` pairs separated by `;`. Unknown keys and values that are not numbers are ignored: the program
    /// that sets the variable checks them.
    fn parse(text: &str) -> Card {
        let mut card = Card::default();
        for (key, value) in text.split(';').filter_map(|pair| pair.split_once('=')) {
            let number = || value.parse::<i64>().ok();
            let small = |field: &mut i32| number().into_iter().for_each(|value| *field = value as i32);
            let large = |field: &mut u64| number().into_iter().for_each(|value| *field = value as u64);
            match key.trim() {
                "name" => card.name = value.to_owned(),
                "total" => large(&mut card.total),
                "context" => large(&mut card.context),
                "sm" => small(&mut card.multiprocessors),
                "major" => small(&mut card.major),
                "minor" => small(&mut card.minor),
                "l2" => small(&mut card.l2),
                "devices" => card.devices = number().map_or(1, |count| count.clamp(1, MAX_DEVICES as i64) as i32),
                "nonzero" => card.nonzero = value.parse().unwrap_or(card.nonzero).clamp(0.0, 1.0),
                "keep" => large(&mut card.keep),
                "cudnn" => card.cudnn = number().unwrap_or(card.cudnn),
                "nccl" => small(&mut card.nccl),
                "cublas" => small(&mut card.cublas),
                "cuda" => small(&mut card.cuda),
                _ => {}
            }
        }
        card
    }

    /// Bytes that programs can allocate.
    pub fn capacity(&self) -> u64 {
        self.total.saturating_sub(self.context)
    }
}

static CARD: OnceLock<Card> = OnceLock::new();

/// The card of this process.
pub fn card() -> &'static Card {
    CARD.get_or_init(|| open(&std::env::var("OOMPH_SHADOW_DEVICE").unwrap_or_default()))
}

/// Sets the card of this process. The first description counts.
pub fn describe(text: &str) {
    CARD.get_or_init(|| open(text));
}

fn open(text: &str) -> Card {
    reserve_windows();
    Card::parse(text)
}

const TIB: u64 = 1 << 40;
/// More devices than any machine has that PyTorch addresses from one process.
pub const MAX_DEVICES: u64 = 16;
const DEVICE_END: u64 = ADDRESS_END;
/// Addresses of one device.
const DEVICE_WINDOW: u64 = ADDRESS_BYTES / MAX_DEVICES;
/// Reserved ranges end here. PyTorch reserves 1.125 times the card's memory for each pool and stream.
pub const RESERVED_END: u64 = 16 * TIB;

/// The addresses of a device's `cuMemAlloc` memory.
pub fn window(device: usize) -> (u64, u64) {
    let end = DEVICE_END - device as u64 * DEVICE_WINDOW;
    (end - DEVICE_WINDOW, end)
}

/// The device whose `cuMemAlloc` memory could contain an address.
pub fn window_of(address: u64) -> Option<usize> {
    let first = DEVICE_END - MAX_DEVICES * DEVICE_WINDOW;
    (first..DEVICE_END).contains(&address).then(|| ((DEVICE_END - 1 - address) / DEVICE_WINDOW) as usize)
}

/// Whether an address can only be device memory.
pub fn is_device_address(address: u64) -> bool {
    (FIRST_RESERVED..RESERVED_END).contains(&address) || window_of(address).is_some()
}

/// Keeps the host from mapping anything at device addresses. Nothing is lost where that fails: the windows are places
/// that Linux does not use by itself.
fn reserve_windows() {
    unsafe extern "C" {
        fn mmap(address: *mut u8, length: usize, protection: i32, flags: i32, file: i32, offset: i64) -> *mut u8;
    }
    // PROT_NONE; MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE: no memory, no page tables.
    let flags = 0x02 | 0x20 | 0x4000 | 0x10_0000;
    let lowest = DEVICE_END - MAX_DEVICES * DEVICE_WINDOW;
    for (start, end) in [(lowest, DEVICE_END), (FIRST_RESERVED, RESERVED_END)] {
        // SAFETY: MAP_FIXED_NOREPLACE fails where anything is mapped, so no existing memory is touched.
        unsafe { mmap(start as *mut u8, (end - start) as usize, 0, flags, -1, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_replace_the_defaults() {
        let card = Card::parse("name=NVIDIA L4;total=100;context=10;nonzero=0.0625;devices=99;sm=x;unknown=1");
        assert_eq!((card.name.as_str(), card.capacity(), card.multiprocessors), ("NVIDIA L4", 90, 132));
        assert_eq!((card.nonzero, card.devices), (0.0625, MAX_DEVICES as i32));
    }

    #[test]
    fn windows_of_devices_do_not_overlap() {
        for device in 0..MAX_DEVICES as usize {
            let (start, end) = window(device);
            assert_eq!((window_of(start), window_of(end - 1)), (Some(device), Some(device)));
        }
        let on_stack = 0;
        assert!(!is_device_address(&raw const on_stack as u64));
    }
}
