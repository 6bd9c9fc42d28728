//! One bout: Robson's adversary against a strategy on a device.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{AdversaryError, Contest, Line, robson};
use crate::{
    base::{SiteId, StreamId, TagId, ThreadId},
    device::Device,
    strategy::{Attempt, Block, Caller, Context, Refusal, Request, Strategy},
    stress::Subject,
    trace::{BlockSlot, Trace, TraceBuilder},
};

/// What a bout came to.
#[derive(Clone, Debug)]
pub struct Bout {
    /// How it ended.
    pub ending: Ending,
    /// What the strategy took from the device at most, by its own books.
    pub peak_reserved_bytes: u64,
    /// What the device held at most, in whole pages.
    pub peak_held_bytes: u64,
    /// The [extent](Line::extent) of its blocks.
    pub extent_bytes: Option<u64>,
    /// What the adversary did, as a trace: against the same strategy on a simulated device it does the same again.
    pub trace: Trace,
}

/// How a bout ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The adversary was through, and the strategy still there.
    Survived,
    /// Memory ran out.
    RanOut {
        /// What was alive then.
        live_bytes: u64,
        /// What was asked for.
        asked_bytes: u64,
    },
    /// The strategy serves no requests of this size at all.
    Refused {
        /// What was asked for.
        asked_bytes: u64,
    },
}

/// Plays the adversary against a subject, and closes it.
pub fn play(contest: &Contest, subject: &Subject, stop: &AtomicBool) -> Result<Bout, AdversaryError> {
    let mut device = subject.open_device()?;
    let mut strategy = subject.build(device.props()).map_err(crate::stress::SubjectError::from)?;
    strategy.requires().check(device.props())?;
    let mut opponent = Opponent {
        strategy: &mut *strategy,
        device: &mut *device,
        stop,
        line: Line::default(),
        story: TraceBuilder::new(),
        live_bytes: 0,
        peak_held_bytes: 0,
        ending: Ending::Survived,
    };
    robson::attack(contest, &mut opponent)?;
    let Opponent { line, story, peak_held_bytes, ending, .. } = opponent;
    let peak_reserved_bytes = strategy.stats().peak.reserved;
    strategy.close(&mut Context { device: &mut *device, sink: &mut Line::default() })?;
    Ok(Bout {
        ending,
        peak_reserved_bytes,
        peak_held_bytes,
        extent_bytes: line.extent(),
        trace: story.finish("robson"),
    })
}

/// A strategy as the adversary sees it.
struct Opponent<'a> {
    strategy: &'a mut dyn Strategy,
    device: &'a mut dyn Device,
    stop: &'a AtomicBool,
    line: Line,
    story: TraceBuilder,
    live_bytes: u64,
    peak_held_bytes: u64,
    ending: Ending,
}

/// A block of a strategy.
struct Taken {
    block: Block,
    requested: u64,
    place: u64,
    slot: BlockSlot,
}

impl robson::Heap for Opponent<'_> {
    type Block = Taken;
    type Error = AdversaryError;

    fn take(&mut self, bytes: u64) -> Result<Option<Taken>, AdversaryError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(AdversaryError::Interrupted);
        }
        let request = Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) };
        let mut cx = Context { device: self.device, sink: &mut self.line };
        let slot = self.story.alloc(bytes, StreamId::DEFAULT, TagId(0));
        match self.strategy.alloc(&mut cx, &request)? {
            Attempt::Served(block, _) => {
                self.live_bytes += bytes;
                self.peak_held_bytes = self.peak_held_bytes.max(self.device.held_bytes());
                Ok(Some(Taken { block, requested: bytes, place: self.line.settle(&block), slot }))
            }
            Attempt::OutOfMemory(shortage) => {
                self.ending = match shortage.refused_by {
                    Refusal::Size => Ending::Refused { asked_bytes: bytes },
                    Refusal::Device | Refusal::Limit => {
                        Ending::RanOut { live_bytes: self.live_bytes, asked_bytes: bytes }
                    }
                };
                Ok(None)
            }
        }
    }

    fn place(&self, taken: &Taken) -> u64 {
        taken.place
    }

    fn give_back(&mut self, taken: Taken) -> Result<(), AdversaryError> {
        let mut cx = Context { device: self.device, sink: &mut self.line };
        self.strategy.free(&mut cx, taken.block, Caller::default())?;
        self.live_bytes -= taken.requested;
        self.story.free(taken.slot);
        Ok(())
    }
}
