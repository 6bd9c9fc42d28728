//! How memory stood at one moment of a story, as `torch.cuda.memory_summary()` tells it, and who asked for it.
//!
//! [`summarize`] replays a source under any strategy and keeps the books of the moment that is asked for; [`operations`]
//! tells from the story alone how much each tag, call site or size has asked for. `inspect` asks; `report` shows.

mod books;
mod operations;

use std::str::FromStr;

pub use books::{Account, MemorySummary};
pub use operations::{By, Operation, operations};

use crate::{
    replay::{OpenedAllocator, Replay, ReplayError, replay as run},
    strategy::{Context, Silent, StrategyError},
    trace::{MarkKind, Op, Source, TraceError},
};

/// A moment of a story.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum At {
    /// When all is done.
    #[default]
    End,
    /// When `allocated` is highest for the first time.
    Peak,
    /// When this step begins.
    Step(u32),
    /// When the phase of this name begins for the n-th time, from 0.
    Phase(String, usize),
    /// Before this event, from 0.
    Event(u64),
}

/// Why there is no summary.
#[derive(Debug, thiserror::Error)]
pub enum SummaryError {
    /// The source cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The replay broke.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The strategy could not be closed.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// The moment never comes.
    #[error("it has no {0}; `oomph inspect` without --at shows how many steps, phases and events there are")]
    NoSuchMoment(String),
    /// The text names no moment.
    #[error("'{0}' is no moment; write end, peak, step:3, phase:NAME, phase:NAME:2 or event:1000")]
    BadMoment(String),
}

impl FromStr for At {
    type Err = SummaryError;

    /// ```
    /// use oomph::answer::summary::At;
    /// assert_eq!("step:3".parse::<At>().unwrap(), At::Step(3));
    /// assert_eq!("phase:forward:2".parse::<At>().unwrap(), At::Phase("forward".to_owned(), 2));
    /// assert!("noon".parse::<At>().is_err());
    /// ```
    fn from_str(text: &str) -> Result<At, SummaryError> {
        let refused = || SummaryError::BadMoment(text.to_owned());
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        match (kind, rest) {
            ("end", "") => Ok(At::End),
            ("peak", "") => Ok(At::Peak),
            ("step", number) => number.parse().map(At::Step).map_err(|_| refused()),
            ("event", number) => number.parse().map(At::Event).map_err(|_| refused()),
            ("phase", "") => Err(refused()),
            // A name may have a colon of its own: only a number behind the last one counts.
            ("phase", name) => Ok(match name.rsplit_once(':').map(|(name, nth)| (name, nth.parse())) {
                Some((name, Ok(nth))) => At::Phase(name.to_owned(), nth),
                _ => At::Phase(name.to_owned(), 0),
            }),
            _ => Err(refused()),
        }
    }
}

impl At {
    /// Before which event the moment is; `None` stands for the end, and for the peak, which only a replay finds.
    pub fn event(&self, source: &dyn Source) -> Result<Option<u64>, SummaryError> {
        let missing = match self {
            At::End | At::Peak => return Ok(None),
            At::Event(event) => return Ok(Some(*event)),
            At::Step(step) => format!("step {step}"),
            At::Phase(name, nth) => format!("phase '{name}' number {nth}"),
        };
        let mut reader = source.open()?;
        let (mut chunk, mut index, mut seen) = (Vec::new(), 0, 0);
        while let (events @ [_, ..], tables) = reader.lend(&mut chunk)? {
            for event in events {
                let begins = match (self, event.op) {
                    (At::Step(step), Op::Mark { kind: MarkKind::Step, index, .. }) => index == *step,
                    (At::Phase(name, nth), Op::Mark { kind: MarkKind::Phase, label, .. }) => {
                        let is_it = tables.labels().get(label as usize) == Some(name);
                        seen += usize::from(is_it);
                        is_it && seen == nth + 1
                    }
                    _ => false,
                };
                if begins {
                    return Ok(Some(index));
                }
                index += 1;
            }
        }
        Err(SummaryError::NoSuchMoment(missing))
    }
}

/// Runs a replay and returns the state of memory at the moment `at`. If memory runs out before that moment, the state at
/// the end.
pub fn summarize(replay: &Replay<'_>, at: &At) -> Result<MemorySummary, SummaryError> {
    let OpenedAllocator { mut strategy, mut device, .. } = replay.open()?;
    let mut books = books::Books::until(at.event(replay.source)?, *at == At::Peak);
    let replayed = run(replay.source, &mut *strategy, &mut *device, &replay.options, &mut books)?;
    let summary = books.finish(&*strategy, replayed.events);
    strategy.close(&mut Context { device: &mut *device, sink: &mut Silent })?;
    match at {
        At::Event(event) if *event > replayed.events && replayed.ooms == 0 => {
            Err(SummaryError::NoSuchMoment(format!("event {event}")))
        }
        _ => Ok(summary),
    }
}
