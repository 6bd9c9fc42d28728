//! What the shadow GPU is: its core, the functions it knows, and the device that it stands in for.

use std::fmt;

use oomph_shadow::{LIBRARY, functions::family_of};

use crate::device::Card;

/// The core library.
pub fn core() -> &'static [u8] {
    LIBRARY
}

/// The functions of a library of NVIDIA that the core knows.
pub fn known_functions(soname: &str) -> impl Iterator<Item = &'static str> {
    family_of(soname).into_iter().flat_map(|family| family.functions().map(|line| line.name))
}

/// A device, as the core reads it from `OOMPH_SHADOW_DEVICE`. Versions of libraries are added by the injected module, which
/// knows the wheel.
#[derive(Clone, Debug, PartialEq)]
pub struct ShadowDevice {
    pairs: Vec<(&'static str, String)>,
}

impl ShadowDevice {
    /// A number of cards of this kind. A card that is a size has the properties of the core's own default, the H200.
    #[must_use]
    pub fn of(card: &Card, gpus: u32, nonzero: Option<f64>) -> ShadowDevice {
        let mut pairs = vec![
            ("total", card.total_bytes().to_string()),
            ("context", card.context_bytes().to_string()),
            ("devices", gpus.to_string()),
        ];
        if let Some(facts) = card.facts() {
            pairs.extend([
                ("name", facts.vendor_name.clone()),
                ("sm", facts.multiprocessors.to_string()),
                ("major", facts.capability[0].to_string()),
                ("minor", facts.capability[1].to_string()),
                ("l2", facts.l2_bytes.to_string()),
            ]);
        }
        pairs.extend(nonzero.map(|share| ("nonzero", share.to_string())));
        ShadowDevice { pairs }
    }
}

impl fmt::Display for ShadowDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
        f.write_str(&pairs.join(";"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_keeps_the_properties_of_the_default() {
        let text = ShadowDevice::of(&"24GiB".parse().unwrap(), 1, None).to_string();
        assert_eq!(text, "total=25769803776;context=552402944;devices=1");
    }

    #[test]
    fn a_name_brings_its_own() {
        let text = ShadowDevice::of(&"rtx4090".parse().unwrap(), 2, Some(0.25)).to_string();
        assert!(text.contains(";devices=2;name=NVIDIA GeForce RTX 4090;sm=128;major=8;minor=9;l2=75497472"), "{text}");
        assert!(text.ends_with(";nonzero=0.25"), "{text}");
    }
}
