//! What a strategy decided, in a form in which two runs can be held against each other.

use std::fmt;

use crate::{
    base::{Address, StreamId},
    replay::LiveBlock,
    strategy::{Freed, Outcome, Refusal, Shortage, StrategyEvent},
};

/// One decision of a strategy. Everything in it follows from the calls and from what the driver answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// A request was served.
    Served {
        /// Where.
        address: Address,
        /// With how much.
        size: u64,
        /// How the block was found.
        outcome: Outcome,
    },
    /// A request failed.
    Failed(Shortage),
    /// A block was given back.
    Freed(Freed),
    /// What happened inside.
    Inside(StrategyEvent),
}

impl Decision {
    pub(super) fn served(live: &LiveBlock, outcome: Outcome) -> Decision {
        Decision::Served { address: live.block.address, size: live.block.size, outcome }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Decision::Served { address, size, outcome } => {
                let how = match outcome {
                    Outcome::Hit => "from the cache",
                    Outcome::Split => "cut from a larger block",
                    Outcome::NewSegment => "with new memory",
                    Outcome::ReleaseAndRetry => "with new memory after a release",
                };
                write!(f, "serves {size} bytes at {address} {how}")
            }
            Decision::Failed(Shortage { rounded, asked, refused_by, device_free }) => {
                let who = match refused_by {
                    Refusal::Device => "the device",
                    Refusal::Limit => "the limit",
                    Refusal::Size => "the size itself",
                };
                write!(f, "fails for {rounded} bytes, {asked} asked for, refused by {who}")?;
                device_free.iter().try_for_each(|free| write!(f, " with {free} free"))
            }
            Decision::Freed(Freed::Now) => f.write_str("frees the block at once"),
            Decision::Freed(Freed::Later) => f.write_str("frees the block later"),
            Decision::Inside(event) => inside(f, event),
        }
    }
}

fn inside(f: &mut fmt::Formatter<'_>, event: &StrategyEvent) -> fmt::Result {
    let mut at = |verb: &str, address: Address, bytes: u64, stream: StreamId| {
        write!(f, "{verb} {bytes} bytes at {address} for stream {stream}")
    };
    match *event {
        StrategyEvent::SegmentAlloc { address, bytes, stream } => at("takes a segment of", address, bytes, stream),
        StrategyEvent::SegmentFree { address, bytes, stream } => at("gives back a segment of", address, bytes, stream),
        StrategyEvent::SegmentMap { address, bytes, stream } => at("maps", address, bytes, stream),
        StrategyEvent::SegmentUnmap { address, bytes, stream } => at("unmaps", address, bytes, stream),
        StrategyEvent::FreeCompleted { address, requested, stream } => {
            at("completes a free of", address, requested, stream)
        }
        StrategyEvent::Retry { rounded } => write!(f, "tries again for {rounded} bytes"),
        StrategyEvent::OutOfMemory { rounded, stream, .. } => {
            write!(f, "runs out of memory for {rounded} bytes on stream {stream}")
        }
    }
}
