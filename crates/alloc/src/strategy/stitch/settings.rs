//! What GMLake reads from its environment, under the same names.

use super::ENTRY;
use crate::strategy::{Parameter, SpecError, parameters};
use oomph_base::{GIB, MIB};

pub(super) const PARAMETERS: &[Parameter] = &[
    Parameter { name: "vmmDefragment", values: "0, 1", default: "1", help: "stitch at all" },
    Parameter {
        name: "fragLimit",
        values: "an amount of memory",
        default: "512MiB",
        help: "smaller requests are never stitched for",
    },
    Parameter {
        name: "reuseLimit",
        values: "a count",
        default: "10",
        help: "how many times larger than the request a stitched range may be that serves it",
    },
    Parameter {
        name: "defragLevel",
        values: "0, 1, 2",
        default: "0",
        help: "stitch before new memory is taken (0), when the device has no more (1), or as the very last resort (2)",
    },
    Parameter {
        name: "autoGC",
        values: "GiB",
        default: "1000",
        help: "addresses of stitched ranges above which all that are unused are given back",
    },
    Parameter {
        name: "reAlloc",
        values: "0, 1",
        default: "0",
        help: "take only what is missing beside the free memory, and stitch the two",
    },
];

/// The thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) defragments: bool,
    pub(super) fragment_limit: u64,
    pub(super) reuse_limit: u64,
    pub(super) level: u32,
    /// In bytes.
    pub(super) collect_above: u64,
    pub(super) takes_shortfall: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            defragments: true,
            fragment_limit: 512 * MIB,
            reuse_limit: 10,
            level: 0,
            collect_above: 1000 * GIB,
            takes_shortfall: false,
        }
    }
}

impl Settings {
    pub(super) fn read(text: &str) -> Result<Settings, SpecError> {
        let mut settings = Settings::default();
        parameters::read(&ENTRY, text, |setting| {
            let switch = || match setting.number()? {
                0 => Ok(false),
                1 => Ok(true),
                other => Err(setting.refused(&format!("{other} is not 0 or 1"))),
            };
            match setting.key {
                "vmmDefragment" => settings.defragments = switch()?,
                "fragLimit" => settings.fragment_limit = setting.bytes()?,
                "reuseLimit" => settings.reuse_limit = setting.number()?,
                "defragLevel" => settings.level = setting.number()?,
                "autoGC" => settings.collect_above = setting.number::<u64>()?.saturating_mul(GIB),
                _ => settings.takes_shortfall = switch()?,
            }
            Ok(())
        })?;
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_gmlake() {
        let read = Settings::read("fragLimit:268435456,reuseLimit:2, defragLevel:1,autoGC:80,reAlloc:1").unwrap();
        let expected = Settings {
            fragment_limit: 256 * MIB,
            reuse_limit: 2,
            level: 1,
            collect_above: 80 * GIB,
            takes_shortfall: true,
            ..Settings::default()
        };
        assert_eq!(read, expected);
        assert!(!Settings::read("vmmDefragment:0").unwrap().defragments);
    }

    #[test]
    fn slips_are_explained() {
        let refused = |text: &str| Settings::read(text).unwrap_err().to_string();
        assert!(refused("fragLimits:1").contains("did you mean 'fragLimit'?"));
        assert!(refused("reAlloc:2").contains("'reAlloc': 2 is not 0 or 1"));
    }
}
