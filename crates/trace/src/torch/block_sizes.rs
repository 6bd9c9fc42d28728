//! How large blocks were that were there before a recording and freed in it: of these only the request is recorded.
//!
//! PyTorch cuts a free block down to the rounded request. In ordinary large segments it leaves no rest of up to 1 MiB,
//! and cuts no block that is too large to be split; a block then has all of what it was given. Which of the two it was
//! follows from the free memory behind the block: there is never less than 1 MiB of it, and the first block that is
//! allocated there begins where it does. Only where nothing is allocated there while the block lives is its size an
//! estimate.

use super::{Action, Entry, Segment, SegmentKind, Setting, Settings};
use oomph_base::{MIB, round_up};

/// The largest rest that is not cut off a block of an ordinary large segment.
const LARGEST_REST: u64 = MIB;

/// The settings that decide about sizes.
pub(super) struct Cutting {
    /// For 1 MiB, 2 MiB ... 32 GiB: into how many parts the sizes up to the next power of two are divided.
    divisions: [u64; 16],
    /// Blocks from this size on are not split.
    max_split_size: u64,
}

impl Cutting {
    pub(super) fn of(settings: &Settings) -> Cutting {
        let max_split_size = match settings.get("max_split_size") {
            // PyTorch writes -1 for no limit.
            Some(&Setting::Int(bytes)) => u64::try_from(bytes).unwrap_or(u64::MAX),
            _ => u64::MAX,
        };
        Cutting { divisions: settings.roundup_divisions(), max_split_size }
    }

    /// PyTorch's rounding of requests.
    fn round(&self, bytes: u64) -> u64 {
        const STEP: u64 = 512;
        let Some(power) = bytes.checked_ilog2() else { return STEP };
        let parts = self.divisions[power.saturating_sub(20).min(15) as usize];
        if parts > 1 && bytes > STEP.saturating_mul(parts) && !bytes.is_power_of_two() {
            let step = (1 << power) >> parts.ilog2();
            return round_up(bytes, step);
        }
        round_up(bytes.max(1), STEP)
    }
}

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
    cutting: &Cutting,
) -> Vec<Measured> {
    let mut measured = Vec::new();
    let mut rests: Vec<Rest> = Vec::new();
    for block in blocks {
        let address = block.address;
        let neighbour = block.neighbour.unwrap_or(u64::MAX);
        let space_end = block.segment.map_or(neighbour, |segment| segment.end().min(neighbour));
        let space = space_end.saturating_sub(address);
        let rounded = cutting.round(block.requested);
        let is_ordinary = |segment: &Segment| segment.kind == SegmentKind::Large && !segment.expandable;
        let may_have_more = block.segment.is_some_and(is_ordinary);
        let fills_segment = may_have_more && rounded >= cutting.max_split_size;
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
            _ if rest.end - rest.start <= LARGEST_REST => block.size = rest.end - rest.block,
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
    use oomph_base::{Address, StreamId};

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
        let cutting = Cutting { divisions: [0; 16], max_split_size };
        let [found] = measure([block].into_iter(), entries, &cutting)[..] else { panic!("one block") };
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

    #[test]
    fn requests_are_rounded_as_pytorch_does() {
        let plain = Cutting { divisions: [0; 16], max_split_size: u64::MAX };
        for (bytes, rounded) in [(1, 512), (512, 512), (513, 1024), (0, 512)] {
            assert_eq!(plain.round(bytes), rounded, "{bytes}");
        }
        let quarters = Cutting { divisions: [4; 16], max_split_size: u64::MAX };
        let (mib, half) = (MIB, MIB / 2);
        for (bytes, rounded) in [
            (2049, 2560),
            (5000, 5120),
            (3 * mib, 3 * mib),
            (3 * mib + 1, 3 * mib + half),
            (21 * mib, 24 * mib),
            (1200, 1536),
        ] {
            assert_eq!(quarters.round(bytes), rounded, "{bytes}");
        }
    }
}
