//! A driver call that fails on purpose, as users type it: `cuMemAlloc:3` or `cuMemAlloc:3:oom`.

use std::{fmt, str::FromStr};

use crate::{
    base::{did_you_mean, nearest},
    device::{
        CallKind,
        wrap::{CallFailure, FaultPlan},
    },
};

/// The n-th call of a kind fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlannedFault {
    /// Which kind.
    pub call: CallKind,
    /// Which call of that kind, from 1.
    pub turn: u64,
    /// Whether the driver says that memory has run out; otherwise it says that it does not know what is wrong.
    pub out_of_memory: bool,
}

/// A text that is no planned fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlannedFaultError {
    /// No such call.
    #[error("unknown driver call '{name}'{}", did_you_mean(suggestion.as_deref()))]
    UnknownCall {
        /// What was typed.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
    },
    /// Not of the form.
    #[error("'{0}' is not CALL:N or CALL:N:oom; write it like cuMemAlloc:3")]
    Form(String),
}

impl PlannedFault {
    /// What the device makes of several of them.
    #[must_use]
    pub fn plan(faults: &[PlannedFault]) -> FaultPlan {
        faults.iter().fold(FaultPlan::none(), |plan, fault| {
            let how = if fault.out_of_memory { CallFailure::OutOfMemory } else { CallFailure::UNKNOWN };
            plan.fail_nth(Some(fault.call), fault.turn, how)
        })
    }

    /// What must be said on the command line for the same faults.
    #[must_use]
    pub fn options(faults: &[PlannedFault]) -> Vec<String> {
        faults.iter().map(|fault| format!("--fail {fault}")).collect()
    }
}

impl fmt::Display for PlannedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}{}", self.call, self.turn, if self.out_of_memory { ":oom" } else { "" })
    }
}

impl FromStr for PlannedFault {
    type Err = PlannedFaultError;

    fn from_str(text: &str) -> Result<PlannedFault, PlannedFaultError> {
        let malformed = || PlannedFaultError::Form(text.to_owned());
        let (name, rest) = text.split_once(':').ok_or_else(malformed)?;
        let (turn, out_of_memory) = rest.strip_suffix(":oom").map_or((rest, false), |turn| (turn, true));
        let turn = turn.parse().ok().filter(|&turn| turn > 0).ok_or_else(malformed)?;
        let names = || CallKind::ALL.iter().map(|call| call.name());
        let call = CallKind::ALL.iter().copied().find(|call| call.name() == name);
        let call = call.ok_or_else(|| PlannedFaultError::UnknownCall {
            name: name.to_owned(),
            suggestion: nearest(name, names()),
        })?;
        Ok(PlannedFault { call, turn, out_of_memory })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_read_as_it_is_written() {
        for text in ["cuMemAlloc:3", "cuMemMap:1:oom"] {
            assert_eq!(text.parse::<PlannedFault>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn slips_are_explained() {
        let complaint = |text: &str| text.parse::<PlannedFault>().unwrap_err().to_string();
        assert_eq!(complaint("cuMemAloc:3"), "unknown driver call 'cuMemAloc'; did you mean 'cuMemAlloc'?");
        for text in ["cuMemAlloc", "cuMemAlloc:0", "cuMemAlloc:x", "cuMemAlloc:1:boom"] {
            assert!(complaint(text).contains("is not CALL:N"), "{text}");
        }
    }
}
