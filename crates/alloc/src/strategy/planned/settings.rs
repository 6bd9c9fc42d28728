//! When to plan, and what.

use super::ENTRY;
use crate::strategy::{Parameter, SpecError, parameters};
use oomph_base::MIB;

pub(super) const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "profile_step",
        values: "a count",
        default: "1",
        help: "the step that the plan is made from, counted from 0: the first one is seldom like the others",
    },
    Parameter {
        name: "minimum_size",
        values: "an amount of memory",
        default: "1MiB",
        help: "smaller requests are left to the fallback",
    },
    Parameter {
        name: "replan",
        values: "between 0 and 1, or off",
        default: "0.1",
        help: "a plan is given up when more than this share of it was not followed in a step",
    },
    Parameter {
        name: "expandable_segments",
        values: "True, False",
        default: "True",
        help: "whether the fallback maps its memory piece by piece, so that it can give back more of it",
    },
];

/// The parameters as read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Settings {
    pub(super) profile_step: u32,
    pub(super) minimum_size: u64,
    /// `None` where the first plan is the last.
    pub(super) replan_above: Option<f64>,
    pub(super) expandable_segments: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { profile_step: 1, minimum_size: MIB, replan_above: Some(0.1), expandable_segments: true }
    }
}

impl Settings {
    pub(super) fn read(text: &str) -> Result<Settings, SpecError> {
        let mut settings = Settings::default();
        parameters::read(&ENTRY, text, |setting| {
            match setting.key {
                "profile_step" => settings.profile_step = setting.number()?,
                "minimum_size" => settings.minimum_size = setting.bytes()?,
                "replan" if setting.value == "off" => settings.replan_above = None,
                "replan" => match setting.number()? {
                    share @ 0.0..=1.0 => settings.replan_above = Some(share),
                    other => return Err(setting.refused(&format!("{other} is not between 0 and 1"))),
                },
                _ => settings.expandable_segments = setting.truth()?,
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
    fn settings_are_read_and_slips_explained() {
        let read = Settings::read("profile_step:3,minimum_size:64KiB,replan:off,expandable_segments:False").unwrap();
        let expected =
            Settings { profile_step: 3, minimum_size: 64 << 10, replan_above: None, expandable_segments: false };
        assert_eq!(read, expected);
        assert!(Settings::read("replan:2").unwrap_err().to_string().contains("not between 0 and 1"));
        assert!(Settings::read("profile:1").unwrap_err().to_string().contains("did you mean 'profile_step'?"));
    }
}
