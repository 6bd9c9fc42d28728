//! How large blocks were that were there before a recording and freed in it: of these only the request is recorded.
//!
//! PyTorch cuts a free block down to the rounded request. In ordinary large segments it leaves no rest of up to 1 MiB,
//! and cuts no block that is too large to be split; a block then has all of what it was given. Which of the two it was
//! follows from the free memory behind the block: there is never less than 1 MiB of it, and the first block that is
//! allocated there begins where it does. Only where nothing is allocated there while the block lives is its size an
//! estimate.

use super::{Action, Entry, Segment, SegmentKind};
use oomph_pytorch::{AllocatorSettings, SMALL_SIZE};

/// A block of unknown size.
pub(super) struct Unmeasured<'a> {
    pub(super) address: u64,
    pub(super) requested: u64,
    /// Where the next block that is not free begins, if any does.
    pub(super) neighbour: Option<u64>,
    /// What it lies in, if that is known.
    pub(super) segment: Option<&'a Segment>,
}

/// The size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Measured {
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) certain: bool,
}

/// Measures blocks, which come in address order.
pub(super) fn measure<'a>(
    blocks: impl Iterator<Item = Unmeasured<'a>>,
    entries: &[Entry],
    settings: &AllocatorSettings,
) -> Vec<Measured> {
    let mut measured = Vec::new();
    let mut rests: Vec<Rest> = Vec::new();
    for block in blocks {
        let address = block.address;
        let neighbour = block.neighbour.unwrap_or(u64::MAX);
        let space_end = block.segment.map_or(neighbour, |segment| segment.end().min(neighbour));
        let space = space_end.saturating_sub(address);
        let rounded = settings.round_size(block.requested);
        let is_ordinary = |segment: &Segment| segment.kind == SegmentKind::Large && !segment.expandable;
        let may_have_more = block.segment.is_some_and(is_ordinary);
        let fills_segment = may_have_more && rounded >= settings.max_split_size;
        let size = if fills_segment { space } else { rounded.min(space) };
        if may_have_more && size < space {
            rests.push(Rest { place: measured.len(), block: address, start: address + size, end: space_end });
        }
        measured.push(Measured { address, size, certain: true });
    }
    look_behind(&rests, entries, &mut measured);
    measured
}

/// What may or may not belong to the block before it.
struct Rest {
    /// Which block that is.
    place: usize,
    block: u64,
    start: u64,
    end: u64,
}

/// Finds out by what is allocated in the rests while their blocks live.
fn look_behind(rests: &[Rest], entries: &[Entry], measured: &mut [Measured]) {
    let mut starts: Vec<Found> = vec![Found::Nothing; rests.len()];
    for entry in entries {
        let address = entry.address.0;
        let place = rests.partition_point(|rest| rest.block <= address);
        let Some(place) = place.checked_sub(1).filter(|&place| starts[place] == Found::Nothing) else { continue };
        let rest = &rests[place];
        match entry.action {
            Action::FreeCompleted if rest.block == address => starts[place] = Found::BlockIsGone,
            Action::Alloc if (rest.start..rest.end).contains(&address) => starts[place] = Found::Start(address),
            _ => {}
        }
    }
    for (rest, found) in rests.iter().zip(starts) {
        let block = &mut measured[rest.place];
        match found {
            Found::Start(address) => block.size = address - rest.block,
            _ if rest.end - rest.start <= SMALL_SIZE => block.size = rest.end - rest.block,
            _ => block.certain = false,
        }
    }
}

/// What is found out about the memory behind a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// Nothing yet.
    Nothing,
    /// Where it begins.
    Start(u64),
    /// The block was freed before.
    BlockIsGone,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::StackId;
    use oomph_base::{Address, MIB, StreamId};

    fn entry(action: Action, address: u64) -> Entry {
        Entry { action, address: Address(address), size: 2 * MIB, ..Entry::default() }
    }

    /// What is found out about a block of 30 MiB and a bit at the start of a segment of 40 MiB.
    fn measured(entries: &[Entry], neighbour: Option<u64>, max_split_size: u64) -> (u64, bool) {
        let segment = Segment {
            device: 0,
            address: Address(MIB),
            total_size: 40 * MIB,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Large,
            pool: (0, 0),
            expandable: false,
            stack: StackId::NONE,
            blocks: Vec::new(),
        };
        let block = Unmeasured { address: MIB, requested: 30 * MIB + 1, neighbour, segment: Some(&segment) };
        let settings = AllocatorSettings { max_split_size, ..AllocatorSettings::default() };
        let [found] = measure([block].into_iter(), entries, &settings)[..] else { panic!("one block") };
        (found.size, found.certain)
    }

    const ROUNDED: u64 = 30 * MIB + 512;

    #[test]
    fn the_first_block_behind_tells_where_a_block_ends() {
        use Action::{Alloc, FreeCompleted};
        let (far, unlimited) = (Some(39 * MIB), u64::MAX);
        assert_eq!(measured(&[], far, unlimited), (ROUNDED, false));
        let half = MIB + ROUNDED + MIB / 2;
        let entries = [entry(Alloc, half), entry(Alloc, half - 512), entry(FreeCompleted, MIB)];
        assert_eq!(measured(&entries, far, unlimited), (ROUNDED + MIB / 2, true));
        let too_late = [entry(FreeCompleted, MIB), entry(Alloc, half)];
        assert_eq!(measured(&too_late, far, unlimited), (ROUNDED, false));
    }

    #[test]
    fn what_is_too_little_to_be_cut_off_or_too_large_for_it_belongs_to_the_block() {
        let near = Some(MIB + ROUNDED + MIB);
        assert_eq!(measured(&[], near, u64::MAX), (ROUNDED + MIB, true));
        assert_eq!(measured(&[], Some(MIB + ROUNDED), u64::MAX), (ROUNDED, true));
        assert_eq!(measured(&[], None, 30 * MIB), (40 * MIB, true));
    }
}
