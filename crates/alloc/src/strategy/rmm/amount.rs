//! Amounts of memory as RMM's users give them: in bytes, or as a share of what is free.

use super::QUANTUM;
use crate::device::{Device, DeviceError};
use crate::strategy::parameters::Setting;

/// How much memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Amount {
    Bytes(u64),
    /// Of what the device says is free when the amount is needed.
    PercentOfFree(u64),
}

impl Amount {
    /// How users write it.
    pub(super) const VALUES: &str = "an amount of memory, or a share of what is free (50%)";

    /// Reads a parameter.
    pub(super) fn read(setting: &Setting<'_>) -> Result<Amount, String> {
        let Some(percent) = setting.value.strip_suffix('%') else {
            return multiple_of_quantum(setting).map(Amount::Bytes);
        };
        match percent.trim().parse() {
            Ok(percent @ 1..=100) => Ok(Amount::PercentOfFree(percent)),
            _ => Err(setting.refused(&format!("'{}' is not between 1% and 100%", setting.value))),
        }
    }

    /// In bytes, a multiple of [`QUANTUM`].
    pub(super) fn resolve(self, device: &mut dyn Device) -> Result<u64, DeviceError> {
        match self {
            Amount::Bytes(bytes) => Ok(bytes),
            Amount::PercentOfFree(percent) => {
                let free = u128::from(device.memory_info()?.free);
                Ok((free * u128::from(percent) / 100) as u64 / QUANTUM * QUANTUM)
            }
        }
    }
}

/// A parameter in bytes, as RMM wants it.
pub(super) fn multiple_of_quantum(setting: &Setting<'_>) -> Result<u64, String> {
    match setting.bytes()? {
        bytes if bytes % QUANTUM == 0 => Ok(bytes),
        _ => Err(setting.refused(&format!("'{}' is not a multiple of {QUANTUM} bytes", setting.value))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::test_device::simulated;
    use oomph_base::MIB;

    fn read(value: &str) -> Result<Amount, String> {
        Amount::read(&Setting { key: "initial", value })
    }

    #[test]
    fn amounts_are_bytes_or_shares() {
        assert_eq!(read("2MiB"), Ok(Amount::Bytes(2 * MIB)));
        assert_eq!(read("50%"), Ok(Amount::PercentOfFree(50)));
        for wrong in ["0%", "101%", "-1%", "%", "100", "1e3", ""] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_share_is_of_what_is_free_and_rounded_down() {
        let mut device = simulated(96 * MIB);
        assert_eq!(Amount::PercentOfFree(50).resolve(&mut *device), Ok(48 * MIB));
        let third = Amount::PercentOfFree(33).resolve(&mut *device).unwrap();
        assert!(third.is_multiple_of(QUANTUM) && third <= 96 * MIB / 3, "{third}");
        assert_eq!(Amount::Bytes(512).resolve(&mut *device), Ok(512));
    }
}
