//! Free memory side by side, and which of it to move.
//!
//! Pure reckoning with addresses and sizes: `room` and `release` say what for, and do it.

use std::ops::Range;

use oomph_base::StreamId;

/// A stretch of neighbouring free blocks and gaps, in address order.
pub(super) type Run = Vec<Span>;

/// A free block or a gap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) slot: u32,
    pub(super) start: u64,
    pub(super) end: u64,
    /// Whose free memory it is, or `None` for a gap.
    pub(super) owner: Option<StreamId>,
}

impl Span {
    pub(super) fn bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// Free chunks side by side: they can be unmapped in one call.
#[derive(Clone, Debug)]
pub(super) struct Stretch {
    pub(super) start: u64,
    /// Their sizes, in address order.
    pub(super) chunks: Vec<u64>,
    /// The free blocks that they are part of.
    pub(super) spans: Vec<Span>,
}

impl Stretch {
    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }

    /// The part with the fewest bytes that covers `missing`, if it is not more than `room`; the last among equals.
    fn closest_part(&self, missing: u64, room: u64) -> Option<Stretch> {
        let mut best: Option<(u64, Range<usize>)> = None;
        let (mut first, mut bytes) = (0, 0);
        for last in 0..self.chunks.len() {
            bytes += self.chunks[last];
            while bytes - self.chunks[first] >= missing {
                bytes -= self.chunks[first];
                first += 1;
            }
            if bytes >= missing && best.as_ref().is_none_or(|&(fewest, _)| bytes <= fewest) {
                best = Some((bytes, first..last + 1));
            }
        }
        let (bytes, part) = best?;
        let start = self.start + self.chunks[..part.start].iter().sum::<u64>();
        (bytes <= room).then(|| Stretch { start, chunks: self.chunks[part].to_vec(), spans: self.spans.clone() })
    }
}

/// The parts of runs that have memory behind them.
pub(super) fn mapped_parts(runs: &[Run]) -> impl Iterator<Item = &[Span]> {
    runs.iter().flat_map(|run| run.split(|span| span.owner.is_none())).filter(|spans| !spans.is_empty())
}

/// Which free chunks to move so that they cover `missing` bytes, or as much of it as they can, and no more than `room`:
/// from few places, and hardly more than needed.
pub(super) fn choose(mut stretches: Vec<Stretch>, mut missing: u64, mut room: u64) -> Vec<Stretch> {
    let mut chosen = Vec::new();
    while missing > 0 {
        let covers = stretches.iter().filter_map(|stretch| stretch.closest_part(missing, room));
        if let Some(part) = covers.min_by_key(Stretch::bytes) {
            chosen.push(part);
            break;
        }
        let fits = (0..stretches.len()).filter(|&place| stretches[place].bytes() <= room);
        let Some(largest) = fits.max_by_key(|&place| stretches[place].bytes()) else { break };
        let stretch = stretches.swap_remove(largest);
        missing = missing.saturating_sub(stretch.bytes());
        room -= stretch.bytes();
        chosen.push(stretch);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stretch(start: u64, chunks: &[u64]) -> Stretch {
        Stretch { start, chunks: chunks.to_vec(), spans: Vec::new() }
    }

    fn starts(chosen: &[Stretch]) -> Vec<(u64, u64)> {
        chosen.iter().map(|stretch| (stretch.start, stretch.bytes())).collect()
    }

    #[test]
    fn the_closest_part_of_one_place_is_taken_where_one_place_suffices() {
        let stretches = vec![stretch(100, &[8, 2, 4, 8]), stretch(200, &[8, 8])];
        assert_eq!(starts(&choose(stretches.clone(), 6, 100)), [(108, 6)]);
        assert_eq!(starts(&choose(stretches, 12, 100)), [(110, 12)]);
    }

    #[test]
    fn many_places_are_emptied_the_largest_first() {
        let stretches = vec![stretch(100, &[4]), stretch(200, &[8, 8]), stretch(300, &[2, 4])];
        assert_eq!(starts(&choose(stretches.clone(), 19, 100)), [(200, 16), (100, 4)]);
        assert_eq!(starts(&choose(stretches, 1000, 1000)), [(200, 16), (300, 6), (100, 4)]);
    }

    proptest! {
        #[test]
        fn what_is_chosen_fits_and_suffices_where_it_can(
            sizes in prop::collection::vec(prop::collection::vec(1u64..20, 1..6), 0..6),
            missing in 1u64..150,
            spare in 0u64..40,
        ) {
            let stretches: Vec<Stretch> =
                (0..).zip(&sizes).map(|(place, chunks)| stretch(place * 1000, chunks)).collect();
            let all: u64 = stretches.iter().map(Stretch::bytes).sum();
            let chosen: u64 = choose(stretches, missing, missing + spare).iter().map(Stretch::bytes).sum();
            prop_assert!(chosen <= missing + spare);
            // With room for any one chunk more than needed, only lack of chunks is an excuse.
            if spare >= 20 && all >= missing {
                prop_assert!(chosen >= missing);
            }
        }
    }
}
