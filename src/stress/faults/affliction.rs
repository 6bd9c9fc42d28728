//! What can befall a strategy, and how it is written.

use std::{fmt, num::NonZeroU64, str::FromStr};

use crate::{
    base::{did_you_mean, nearest},
    device::CallKind,
};

/// What befalls a strategy during one run. Driver calls are those that the strategy itself makes; moments are its own calls
/// (alloc, free, trim ...). Both are counted from 1.
///
/// ```
/// use oomph::stress::faults::Affliction;
/// for text in ["cuMemCreate:3", "cuMemCreate:3:oom", "cuMemMap:3+4", "any:17+6", "taken:12+20", "stuck:5"] {
///     assert_eq!(text.parse::<Affliction>()?.to_string(), text);
/// }
/// # Ok::<(), oomph::stress::faults::AfflictionError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Affliction {
    /// Driver calls fail: `KIND:N`, `KIND:N+COUNT`, `any:N+COUNT`, each with `:oom` where the driver says that memory has
    /// run out.
    Calls {
        /// Calls of which kind; any where there is none.
        kind: Option<CallKind>,
        /// The first that fails.
        first: u64,
        /// How many fail.
        count: NonZeroU64,
        /// How they fail.
        manner: Manner,
    },
    /// Another process has all memory that was free, for a while: `taken:MOMENT+COUNT`.
    MemoryTaken {
        /// When it takes it.
        first: u64,
        /// For how many calls.
        count: NonZeroU64,
    },
    /// From a moment on no event completes, and waiting times out: `stuck:MOMENT`.
    Stuck {
        /// When it begins.
        first: u64,
    },
}

/// How a driver call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// With an error that says nothing.
    Error,
    /// Memory has run out.
    OutOfMemory,
}

/// An affliction that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AfflictionError {
    /// There is no such thing.
    #[error("unknown fault '{name}', write a driver call, any, taken or stuck{}", did_you_mean(suggestion.as_deref()))]
    Unknown {
        /// What was typed.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
    },
    /// The rest cannot be read.
    #[error("fault '{0}': write NAME:N, NAME:N+COUNT or NAME:N:oom, counted from 1, such as cuMemCreate:3")]
    Syntax(String),
}

impl Affliction {
    /// The `n`-th call of a kind fails.
    #[must_use]
    pub const fn once(kind: CallKind, n: u64, manner: Manner) -> Affliction {
        Affliction::Calls { kind: Some(kind), first: n, count: NonZeroU64::MIN, manner }
    }

    /// The same at another place.
    #[must_use]
    pub const fn moved_to(self, place: u64) -> Affliction {
        match self {
            Affliction::Calls { kind, count, manner, .. } => Affliction::Calls { kind, first: place, count, manner },
            Affliction::MemoryTaken { count, .. } => Affliction::MemoryTaken { first: place, count },
            Affliction::Stuck { .. } => Affliction::Stuck { first: place },
        }
    }

    /// Where it begins.
    #[must_use]
    pub const fn first(self) -> u64 {
        match self {
            Affliction::Calls { first, .. } | Affliction::MemoryTaken { first, .. } | Affliction::Stuck { first } => {
                first
            }
        }
    }
}

impl fmt::Display for Affliction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Affliction::Calls { kind, first, count, manner } => {
                write!(f, "{}:{first}", kind.map_or("any", CallKind::name))?;
                if count.get() > 1 {
                    write!(f, "+{count}")?;
                }
                f.write_str(if manner == Manner::OutOfMemory { ":oom" } else { "" })
            }
            Affliction::MemoryTaken { first, count } => write!(f, "taken:{first}+{count}"),
            Affliction::Stuck { first } => write!(f, "stuck:{first}"),
        }
    }
}

impl FromStr for Affliction {
    type Err = AfflictionError;

    fn from_str(text: &str) -> Result<Affliction, AfflictionError> {
        let syntax = || AfflictionError::Syntax(text.to_owned());
        let (name, rest) = text.split_once(':').ok_or_else(syntax)?;
        let (place, manner) = match rest.split_once(':') {
            None => (rest, Manner::Error),
            Some((place, "oom")) => (place, Manner::OutOfMemory),
            Some(_) => return Err(syntax()),
        };
        let number = |text: &str| text.parse::<NonZeroU64>().map_err(|_| syntax());
        let (first, count) = match place.split_once('+') {
            None => (number(place)?.get(), NonZeroU64::MIN),
            Some((first, count)) => (number(first)?.get(), number(count)?),
        };
        let plain = manner == Manner::Error;
        match name {
            "any" => Ok(Affliction::Calls { kind: None, first, count, manner }),
            "taken" if plain => Ok(Affliction::MemoryTaken { first, count }),
            "stuck" if plain && count == NonZeroU64::MIN => Ok(Affliction::Stuck { first }),
            "taken" | "stuck" => Err(syntax()),
            _ => match CallKind::ALL.iter().find(|kind| kind.name() == name) {
                Some(&kind) => Ok(Affliction::Calls { kind: Some(kind), first, count, manner }),
                None => {
                    let names = CallKind::ALL.iter().map(|kind| kind.name()).chain(["any", "taken", "stuck"]);
                    Err(AfflictionError::Unknown { name: name.to_owned(), suggestion: nearest(name, names) })
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_of_the_finger_are_explained() {
        let message = "cuMemCreat:3".parse::<Affliction>().unwrap_err().to_string();
        assert!(message.contains("did you mean 'cuMemCreate'?"), "{message}");
        for wrong in
            ["cuMemMap", "cuMemMap:0", "cuMemMap:x", "cuMemMap:1+0", "cuMemMap:1:why", "stuck:1+2", "taken:1:oom"]
        {
            let message = wrong.parse::<Affliction>().unwrap_err().to_string();
            assert!(message.contains("counted from 1"), "{wrong}: {message}");
        }
    }
}
