//! Where a recording and the model part, with both views.

use std::fmt;

use super::{Piece, Sighting};

/// The first thing that the two do not agree on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "in", rename_all = "snake_case")]
pub enum Divergence {
    /// What happened in one call of the program.
    Entries {
        /// The first entry that differs, from 0.
        entry: usize,
        /// What was recorded from there to the end of the call.
        recorded: Vec<Sighting>,
        /// What the model did instead.
        modelled: Vec<Sighting>,
        /// What else the model has to say.
        complaint: Option<String>,
    },
    /// The memory at the end.
    Memory {
        /// What was recorded; nothing where there was no more.
        recorded: Option<Piece>,
        /// What the model has instead.
        modelled: Option<Piece>,
    },
    /// A figure.
    Figure {
        /// Which.
        what: &'static str,
        /// PyTorch's.
        recorded: u64,
        /// The model's.
        modelled: u64,
    },
}

/// How many actions are spelt out.
const SHOWN: usize = 4;

impl Divergence {
    /// Two views of one call that starts at an entry, without what they have in common.
    pub(super) fn entries(
        start: usize,
        mut recorded: Vec<Sighting>,
        mut modelled: Vec<Sighting>,
        complaint: Option<String>,
    ) -> Divergence {
        let in_common = recorded.iter().zip(&modelled).take_while(|(a, b)| a == b).count();
        recorded.drain(..in_common);
        modelled.drain(..in_common);
        Divergence::Entries { entry: start + in_common, recorded, modelled, complaint }
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Divergence::Entries { entry, recorded, modelled, complaint } => {
                write!(f, "entry {entry}: recorded {}; model {}", Listed(recorded), Listed(modelled))?;
                complaint.iter().try_for_each(|complaint| write!(f, " ({complaint})"))
            }
            Divergence::Memory { recorded, modelled } => {
                write!(f, "memory at the end: recorded {}; model {}", OrNothing(recorded), OrNothing(modelled))
            }
            Divergence::Figure { what, recorded, modelled } => {
                write!(f, "{what}: recorded {recorded}; model {modelled}")
            }
        }
    }
}

struct Listed<'a>(&'a [Sighting]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (place, sighting) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{sighting}", if place > 0 { ", then " } else { "" })?;
        }
        match self.0.len().checked_sub(SHOWN) {
            Some(more) if more > 0 => write!(f, " and {more} more"),
            _ => Ok(()),
        }
    }
}

struct OrNothing<'a>(&'a Option<Piece>);

impl fmt::Display for OrNothing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(piece) => piece.fmt(f),
            None => f.write_str("nothing"),
        }
    }
}
