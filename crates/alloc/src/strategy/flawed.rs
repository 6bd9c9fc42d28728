//! A small first-fit allocator, and variants of it with one flaw each.
//!
//! The conformance suite and `stress` must find these flaws. Compiled into tests only and not
//! registered: [`Flawed::named`] builds one.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use super::{
    Attempt, Block, BlockState, BlockView, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome, Refusal,
    Request, SegmentView, Shortage, Stats, Strategy, StrategyError, StrategyEvent,
};
use crate::device::Capabilities;
use oomph_base::{Address, MIB, StreamId, round_up};

/// What is wrong with an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Nothing.
    None,
    /// The remainder of a split block overlaps the part that was handed out.
    OverlappingSplit,
    /// Blocks are not aligned.
    Misaligned,
    /// Some frees are not counted.
    LostAccounting,
    /// The other streams of a freed block are forgotten.
    EarlyReuse,
    /// Free memory of one stream is given to another.
    StreamsMixed,
    /// One segment survives a close.
    LeakOnClose,
    /// Trim does nothing.
    KeepsCache,
    /// A handle is found by slot alone, and slots are reused.
    TrustsHandles,
    /// Memory is counted before the driver has allocated it.
    BooksTooEarly,
    /// The block is forgotten before the wait for its streams has succeeded.
    ForgetsOnFailure,
    /// Two copies share a counter.
    SharedFork,
    /// A new segment causes no event.
    SilentSegments,
    /// Zero bytes are served like one.
    ServesNothing,
    /// Out of memory is an error.
    FailsOnExhaustion,
    /// Reports a larger free block than there is.
    BoastsOfLargestFree,
    /// Panics when memory has run out.
    Panics,
    /// When two free neighbours merge, the second is lost.
    LostCoalesce,
    /// A retry after releasing memory leaks a block.
    LeakOnRetry,
    /// After a trim the oldest block counts as free.
    DoubleHandOutAfterTrim,
    /// Sizes are rounded down.
    RoundsDown,
    /// A segment is forgotten before the driver has taken it back.
    LosesSegmentOnFailure,
    /// Polls an event instead of waiting for it.
    Spins,
    /// Rounding of sizes near the maximum wraps around.
    WrapsAround,
    /// After a close, segments are larger.
    RemembersClose,
}

impl Flaw {
    /// Every flaw that the conformance suite finds.
    pub const ALL: [Flaw; 21] = [
        Flaw::OverlappingSplit,
        Flaw::Misaligned,
        Flaw::LostAccounting,
        Flaw::EarlyReuse,
        Flaw::StreamsMixed,
        Flaw::LeakOnClose,
        Flaw::KeepsCache,
        Flaw::TrustsHandles,
        Flaw::BooksTooEarly,
        Flaw::ForgetsOnFailure,
        Flaw::SharedFork,
        Flaw::SilentSegments,
        Flaw::ServesNothing,
        Flaw::FailsOnExhaustion,
        Flaw::BoastsOfLargestFree,
        Flaw::Panics,
        Flaw::LostCoalesce,
        Flaw::LeakOnRetry,
        Flaw::DoubleHandOutAfterTrim,
        Flaw::RoundsDown,
        Flaw::LosesSegmentOnFailure,
    ];

    /// Flaws that show only where events never complete, requests are impossible, or a closed strategy is used again.
    pub const UNDER_STRESS: [Flaw; 3] = [Flaw::Spins, Flaw::WrapsAround, Flaw::RemembersClose];
}

/// The allocator.
#[derive(Debug)]
pub struct Flawed {
    flaw: Flaw,
    segments: Vec<Segment>,
    stats: Stats,
    next_slot: Arc<AtomicU32>,
    was_closed: bool,
}

#[derive(Clone, Debug)]
struct Segment {
    address: Address,
    bytes: u64,
    stream: StreamId,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
struct Piece {
    offset: u64,
    size: u64,
    tenant: Option<Tenant>,
}

#[derive(Clone, Debug)]
struct Tenant {
    slot: u32,
    requested: u64,
    used_on: Vec<StreamId>,
}

impl Flawed {
    /// The allocator with the flaw of this name, as `{:?}` writes it.
    pub fn named(name: &str) -> Option<Flawed> {
        let mut flaws = Flaw::ALL.into_iter().chain(Flaw::UNDER_STRESS).chain([Flaw::None]);
        let flaw = flaws.find(|flaw| format!("{flaw:?}") == name)?;
        Some(Flawed::new(flaw))
    }

    /// A strategy with this one flaw.
    pub fn new(flaw: Flaw) -> Flawed {
        Flawed {
            flaw,
            segments: Vec::new(),
            stats: Stats::default(),
            next_slot: Arc::new(AtomicU32::new(0)),
            was_closed: false,
        }
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    fn find_free(&self, size: u64, stream: StreamId) -> Option<(usize, usize)> {
        self.segments.iter().enumerate().filter(|(_, s)| s.stream == stream || self.has(Flaw::StreamsMixed)).find_map(
            |(number, segment)| {
                let place = segment.pieces.iter().position(|piece| piece.tenant.is_none() && piece.size >= size)?;
                Some((number, place))
            },
        )
    }

    fn find_live(&self, block: &Block) -> Result<(usize, usize), StrategyError> {
        let trusting = self.has(Flaw::TrustsHandles);
        let unknown = StrategyError::UnknownBlock { address: block.address, slot: block.slot };
        let is_it = |segment: &Segment, piece: &Piece| {
            let same_place = segment.address.offset(piece.offset) == block.address;
            piece
                .tenant
                .as_ref()
                .is_some_and(|tenant| same_place && (trusting || (tenant.slot == block.slot && block.generation == 0)))
        };
        self.segments
            .iter()
            .enumerate()
            .find_map(|(number, segment)| {
                Some((number, segment.pieces.iter().position(|piece| is_it(segment, piece))?))
            })
            .ok_or(unknown)
    }

    fn grow(&mut self, cx: &mut Context<'_>, size: u64, stream: StreamId) -> Result<usize, StrategyError> {
        let step = if self.has(Flaw::RemembersClose) && self.was_closed { 4 * MIB } else { 2 * MIB };
        let bytes = round_up(size, step);
        if self.has(Flaw::BooksTooEarly) {
            self.stats.on_reserve(bytes, 1);
        }
        let address = cx.device.alloc(bytes)?;
        if !self.has(Flaw::BooksTooEarly) {
            self.stats.on_reserve(bytes, 1);
        }
        if !self.has(Flaw::SilentSegments) {
            cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream });
        }
        let pieces = vec![Piece { offset: 0, size: bytes, tenant: None }];
        self.segments.push(Segment { address, bytes, stream, pieces });
        Ok(self.segments.len() - 1)
    }

    fn release(&mut self, cx: &mut Context<'_>, number: usize) -> Result<(), StrategyError> {
        let Segment { address, bytes, stream, .. } = self.segments[number];
        cx.sink.event(StrategyEvent::SegmentFree { address, bytes, stream });
        if self.has(Flaw::LosesSegmentOnFailure) {
            self.stats.on_release(bytes, 1);
            self.segments.remove(number);
            return Ok(cx.device.free(address)?);
        }
        cx.device.free(address)?;
        self.stats.on_release(bytes, 1);
        self.segments.remove(number);
        Ok(())
    }

    fn take(&mut self, (number, place): (usize, usize), size: u64, request: &Request) -> Block {
        let slot = self.next_slot.fetch_add(1, Ordering::Relaxed);
        let segment = &mut self.segments[number];
        let rest = segment.pieces[place].size - size;
        let offset = segment.pieces[place].offset;
        segment.pieces[place].tenant = Some(Tenant { slot, requested: request.bytes, used_on: Vec::new() });
        segment.pieces[place].size = size;
        if rest > 0 {
            let early = if self.flaw == Flaw::OverlappingSplit { 256 } else { 0 };
            let rest = Piece { offset: offset + size - early, size: rest + early, tenant: None };
            segment.pieces.insert(place + 1, rest);
        }
        let askew = if self.flaw == Flaw::Misaligned { 8 } else { 0 };
        self.stats.on_alloc(request.bytes, size);
        Block { address: self.segments[number].address.offset(offset + askew), size, slot, generation: 0 }
    }
}

impl Strategy for Flawed {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 && !self.has(Flaw::ServesNothing) {
            return Err(StrategyError::ZeroBytes);
        }
        let &Request { bytes, stream, .. } = request;
        let size = match self.flaw {
            Flaw::RoundsDown => (bytes / 512 * 512).max(512),
            Flaw::WrapsAround => bytes.wrapping_add(511) / 512 * 512,
            _ => round_up(bytes.max(1), 512),
        };
        if let Some(found) = self.find_free(size, stream) {
            return Ok(Attempt::Served(self.take(found, size, request), Outcome::Split));
        }
        let grown = match self.grow(cx, size, stream) {
            Err(StrategyError::Device(error)) if error.is_out_of_memory() => {
                self.trim(cx)?;
                if self.has(Flaw::LeakOnRetry) {
                    // Where even that fails there is nothing to leak.
                    let _ = cx.device.alloc(512);
                }
                self.grow(cx, size, stream)
            }
            other => other,
        };
        match grown {
            Ok(number) => Ok(Attempt::Served(self.take((number, 0), size, request), Outcome::NewSegment)),
            Err(StrategyError::Device(error)) if error.is_out_of_memory() && !self.has(Flaw::FailsOnExhaustion) => {
                assert!(!self.has(Flaw::Panics), "out of memory");
                self.stats.ooms += 1;
                cx.sink.event(StrategyEvent::OutOfMemory { rounded: size, stream, device_free: None });
                let refused_by = Refusal::Device;
                Ok(Attempt::OutOfMemory(Shortage { rounded: size, asked: size, refused_by, device_free: None }))
            }
            Err(error) => Err(error),
        }
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let (number, place) = self.find_live(&block)?;
        let piece = &mut self.segments[number].pieces[place];
        let Some(tenant) = piece.tenant.clone() else { return Ok(Freed::Now) };
        if self.flaw == Flaw::ForgetsOnFailure {
            piece.tenant = None;
        }
        if self.flaw != Flaw::EarlyReuse {
            for stream in tenant.used_on {
                if self.flaw == Flaw::Spins {
                    spin(cx, stream)?;
                }
                cx.device.stream_synchronize(stream)?;
            }
        }
        piece.tenant = None;
        let size = piece.size;
        self.stats.on_free(size);
        if !(self.has(Flaw::LostAccounting) && self.stats.frees.is_multiple_of(7)) {
            self.stats.on_reusable(tenant.requested, size);
        }
        let lossy = self.has(Flaw::LostCoalesce);
        let pieces = &mut self.segments[number].pieces;
        pieces.dedup_by(|next, piece| {
            let both_free = piece.tenant.is_none() && next.tenant.is_none();
            if both_free && !lossy {
                piece.size += next.size;
            }
            both_free
        });
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let (number, place) = self.find_live(block)?;
        if let Some(tenant) = &mut self.segments[number].pieces[place].tenant {
            tenant.used_on.push(stream);
        }
        Ok(())
    }

    fn serves_pools(&self) -> bool {
        false
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        for number in (0..self.segments.len()).rev() {
            let is_free = self.segments[number].pieces.iter().all(|piece| piece.tenant.is_none());
            if is_free && !self.has(Flaw::KeepsCache) {
                self.release(cx, number)?;
            }
        }
        if self.has(Flaw::DoubleHandOutAfterTrim)
            && let Some(piece) = self.segments.first_mut().and_then(|segment| segment.pieces.first_mut())
        {
            piece.tenant = None;
        }
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let kept = usize::from(self.has(Flaw::LeakOnClose));
        while self.segments.len() > kept {
            self.release(cx, self.segments.len() - 1)?;
        }
        self.segments.clear();
        self.stats = Stats::default();
        self.was_closed = true;
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        let own = self.segments.iter().filter(|segment| segment.stream == stream);
        let free = own.flat_map(|segment| &segment.pieces).filter(|piece| piece.tenant.is_none());
        let largest = free.map(|piece| piece.size).max().unwrap_or(0);
        Some(if self.has(Flaw::BoastsOfLargestFree) { largest + 512 } else { largest })
    }

    fn layout(&self) -> Option<Layout> {
        let view = |segment: &Segment| SegmentView {
            address: segment.address,
            bytes: segment.bytes,
            stream: segment.stream,
            pool: "first fit".into(),
            pool_id: (0, 0),
            mapped: false,
            alias: false,
            blocks: segment
                .pieces
                .iter()
                .map(|piece| BlockView {
                    address: segment.address.offset(piece.offset),
                    size: piece.size,
                    requested: piece.tenant.as_ref().map_or(0, |tenant| tenant.requested),
                    state: if piece.tenant.is_some() { BlockState::Allocated } else { BlockState::Free },
                })
                .collect(),
        };
        let mut segments: Vec<SegmentView> = self.segments.iter().map(view).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        Some(Layout { segments })
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn requires(&self) -> Capabilities {
        Capabilities::NONE
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        let next_slot = match self.flaw {
            Flaw::SharedFork => self.next_slot.clone(),
            _ => Arc::new(AtomicU32::new(self.next_slot.load(Ordering::Relaxed))),
        };
        let (segments, stats) = (self.segments.clone(), self.stats);
        Some(Box::new(Flawed { flaw: self.flaw, segments, stats, next_slot, was_closed: self.was_closed }))
    }
}

/// Waits for a stream without ever letting go of the processor.
fn spin(cx: &mut Context<'_>, stream: StreamId) -> Result<(), StrategyError> {
    let event = cx.device.event_create()?;
    let passed = cx.device.event_record(event, stream).and_then(|()| {
        while !cx.device.event_query(event)? {}
        Ok(())
    });
    cx.device.event_destroy(event)?;
    Ok(passed?)
}
