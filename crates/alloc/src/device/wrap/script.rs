//! The list that a scripted device reads its answers from.

use std::{fmt, sync::Arc};

use super::exchange::{Answer, Call, Exchange};
use crate::device::CallKind;

/// One answer, and the call that it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Which call it answers.
    pub expected: Expected,
    /// The answer.
    pub answer: Answer,
}

/// Which call a line is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// This one, with these arguments.
    Exactly(Call),
    /// Any call of a kind.
    Any(CallKind),
}

impl Expected {
    fn kind(&self) -> CallKind {
        match self {
            Expected::Exactly(call) => call.kind(),
            Expected::Any(kind) => *kind,
        }
    }

    fn fits(&self, call: &Call) -> bool {
        match self {
            Expected::Exactly(expected) => expected == call,
            Expected::Any(kind) => *kind == call.kind(),
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expected::Exactly(call) => write!(f, "{call:?}"),
            Expected::Any(kind) => write!(f, "some {kind}"),
        }
    }
}

impl From<Exchange> for Line {
    fn from(exchange: Exchange) -> Self {
        Line { expected: Expected::Exactly(exchange.call), answer: exchange.answer }
    }
}

/// How far the calls may stray from the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Every call is in the script, and in that order.
    Strict,
    /// The lines of one kind of call are in order; kinds may interleave in any way. A call of a kind that the script
    /// has no (more) lines for is accepted, unless its answer cannot be made up: where memory lies.
    Loose,
}

/// A call that is not what the script says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("call {number} is {made:?}, but the script says {}", Says(.expected.as_ref()))]
pub struct Mismatch {
    /// Which call it is, the first is number 1.
    pub number: u64,
    /// The call that was made.
    pub made: Call,
    /// What the script says, or nothing where it has ended.
    pub expected: Option<Expected>,
}

struct Says<'a>(Option<&'a Expected>);

impl fmt::Display for Says<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(expected) => expected.fmt(f),
            None => f.write_str("nothing more"),
        }
    }
}

/// Lines to be read in order.
///
/// A copy shares the lines, which nobody changes, and has its own place in them.
#[derive(Clone, Debug, Default)]
struct Lines {
    lines: Arc<Vec<Line>>,
    next: usize,
}

/// The lines of a script and the place where reading has got to.
#[derive(Clone, Debug)]
pub(super) struct Script {
    manner: Manner,
    /// One list where order counts throughout, otherwise one for each kind of call.
    lists: Vec<Lines>,
}

impl Script {
    pub(super) fn new(manner: Manner) -> Script {
        let lists = match manner {
            Manner::Strict => 1,
            Manner::Loose => CallKind::ALL.len(),
        };
        Script { manner, lists: vec![Lines::default(); lists] }
    }

    /// Adds a line at the end.
    pub(super) fn push(&mut self, line: Line) {
        let list = self.list_of(line.expected.kind());
        Arc::make_mut(&mut self.lists[list].lines).push(line);
    }

    /// The answer to a call; `Ok(None)` where the script leaves it open; otherwise what it says instead.
    pub(super) fn answer(&mut self, call: &Call) -> Result<Option<Answer>, Option<Expected>> {
        let list = self.list_of(call.kind());
        let Lines { lines, next } = &mut self.lists[list];
        match lines.get(*next) {
            Some(line) if line.expected.fits(call) => {
                *next += 1;
                Ok(Some(line.answer.clone()))
            }
            Some(line) => Err(Some(line.expected.clone())),
            None => match self.manner {
                Manner::Strict => Err(None),
                Manner::Loose => Ok(None),
            },
        }
    }

    /// Drops every line, read or not.
    pub(super) fn clear(&mut self) {
        self.lists.fill(Lines::default());
    }

    /// The call that the next line is for, where order counts throughout and the line says which.
    pub(super) fn next_expected(&self) -> Option<&Call> {
        let [Lines { lines, next }] = &self.lists[..] else { return None };
        match &lines.get(*next)?.expected {
            Expected::Exactly(call) => Some(call),
            Expected::Any(_) => None,
        }
    }

    /// Lines that were not read yet.
    pub(super) fn unread(&self) -> usize {
        self.lists.iter().map(|list| list.lines.len() - list.next).sum()
    }

    fn list_of(&self, kind: CallKind) -> usize {
        match self.manner {
            Manner::Strict => 0,
            Manner::Loose => kind as usize,
        }
    }
}
