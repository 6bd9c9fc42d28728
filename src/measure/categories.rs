//! What live memory is for: bytes by tag with a copy of them at the allocated peak, and bytes by category over time.

use serde::{Deserialize, Deserializer, Serialize};

use super::timeline::{Join, ThinnedSeries};
use crate::{
    replay::{LiveBlock, ReplayMoment},
    trace::{Category, Tag},
};

/// Bytes in blocks of one tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagBytes {
    /// What the blocks are for.
    pub category: Category,
    /// Which layer they belong to, if any.
    pub layer: Option<u16>,
    /// How much they are.
    pub bytes: u64,
}

/// What blocks in callers' hands were for, at the fullest moment of a stretch of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Composition {
    /// Number of the stretch's first event, from 0.
    pub event: u64,
    /// Bytes in blocks, in the order of [`Category::ALL`].
    #[serde(deserialize_with = "known_categories")]
    pub bytes: [u64; Category::ALL.len()],
    /// Their sum.
    pub total: u64,
}

impl Join for Composition {
    const MOST: usize = 512;

    fn join(&mut self, next: &Composition) {
        if next.total > self.total {
            *self = Composition { event: self.event, ..*next };
        }
    }
}

/// Counts what live memory is for.
///
/// The copy is taken lazily, when memory first falls after a new peak: a ramp-up of a million allocations then costs
/// one copy and not a million.
#[derive(Clone, Debug, Default)]
pub(super) struct CategoryRecorder {
    tags: Vec<Tag>,
    /// The place of each tag's category in [`Category::ALL`].
    places: Vec<usize>,
    by_category: [u64; Category::ALL.len()],
    over_time: ThinnedSeries<Composition>,
    /// Bytes in live blocks by tag.
    live: Vec<u64>,
    total: u64,
    peak: u64,
    at_peak: Vec<u64>,
    /// The present state is the peak and not yet copied.
    uncopied: bool,
}

impl CategoryRecorder {
    /// Bytes by category over time; and bytes by tag at the allocated peak, without the tags that had none, in the order
    /// in which reports show categories, then by layer.
    pub(super) fn finish(mut self) -> (Vec<Composition>, Vec<TagBytes>) {
        self.copy_peak();
        let mut parts: Vec<TagBytes> = self
            .tags
            .iter()
            .zip(&self.at_peak)
            .filter(|(_, bytes)| **bytes > 0)
            .map(|(tag, &bytes)| TagBytes { category: tag.category, layer: tag.layer, bytes })
            .collect();
        parts.sort_by_key(|part| (place(part.category), part.layer));
        (self.over_time.into_stretches(), parts)
    }

    #[inline]
    fn copy_peak(&mut self) {
        if self.uncopied {
            self.uncopied = false;
            self.at_peak.clone_from(&self.live);
        }
    }

    #[inline]
    fn add(&mut self, tag: usize, bytes: u64) {
        self.live[tag] += bytes;
        self.by_category[self.places[tag]] += bytes;
        self.total += bytes;
        if self.total > self.peak {
            self.peak = self.total;
            self.uncopied = true;
        }
    }

    #[inline]
    fn remove(&mut self, tag: usize, bytes: u64) {
        self.copy_peak();
        self.live[tag] -= bytes;
        self.by_category[self.places[tag]] -= bytes;
        self.total -= bytes;
    }

    /// A request was served.
    pub(super) fn served(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock) {
        if live.tag.index() >= self.live.len() {
            self.learn(now.tables.tags());
        }
        self.add(live.tag.index(), live.block.size);
    }

    /// A block was freed.
    pub(super) fn freed(&mut self, live: &LiveBlock) {
        self.remove(live.tag.index(), live.block.size);
    }

    /// An event is over.
    pub(super) fn after(&mut self, event: u64) {
        self.over_time.push(Composition { event, bytes: self.by_category, total: self.total });
    }

    /// All blocks are about to be freed.
    pub(super) fn round_ends(&mut self) {
        self.copy_peak();
        self.live.fill(0);
        self.by_category = [0; Category::ALL.len()];
        self.total = 0;
    }

    /// Makes room for tags that the reader has met since.
    #[cold]
    fn learn(&mut self, tags: &[Tag]) {
        self.tags = tags.to_vec();
        self.places = tags.iter().map(|tag| place(tag.category)).collect();
        self.live.resize(tags.len(), 0);
    }
}

/// Where reports show the category.
fn place(category: Category) -> usize {
    category as usize
}

/// Files of older versions have fewer categories: there are no bytes of the others.
fn known_categories<'de, D: Deserializer<'de>>(from: D) -> Result<[u64; Category::ALL.len()], D::Error> {
    let known = Vec::<u64>::deserialize(from)?;
    let mut bytes = [0; Category::ALL.len()];
    bytes.iter_mut().zip(known).for_each(|(place, known)| *place = known);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn details_with_fewer_categories_can_be_read() {
        let read: Composition = serde_json::from_str(r#"{"event":3,"bytes":[1,2,3,4,5,6,7,8],"total":36}"#).unwrap();
        assert_eq!((read.bytes[Category::Unknown as usize], read.bytes[Category::Cache as usize]), (8, 0));
        assert_eq!(serde_json::from_str::<Composition>(&serde_json::to_string(&read).unwrap()).unwrap(), read);
    }

    proptest! {
        #[test]
        fn the_lazy_copy_equals_a_copy_taken_at_every_new_peak(
            moves in prop::collection::vec((any::<bool>(), 0usize..5, 1u64..100), 0..200),
        ) {
            let mut lazy = CategoryRecorder::default();
            lazy.learn(&[Tag::default(); 5]);
            let mut blocks: Vec<(usize, u64)> = Vec::new();
            let mut naive = vec![0; 5];
            let mut naive_peak = 0;
            for (is_alloc, tag, bytes) in moves {
                if is_alloc || blocks.is_empty() {
                    blocks.push((tag, bytes));
                    lazy.add(tag, bytes);
                } else {
                    let (tag, bytes) = blocks.swap_remove(bytes as usize % blocks.len());
                    lazy.remove(tag, bytes);
                }
                let total: u64 = blocks.iter().map(|block| block.1).sum();
                if total > naive_peak {
                    naive_peak = total;
                    naive = (0..5)
                        .map(|tag| blocks.iter().filter(|block| block.0 == tag).map(|block| block.1).sum())
                        .collect();
                }
            }
            lazy.copy_peak();
            lazy.at_peak.resize(5, 0);
            prop_assert_eq!(lazy.at_peak, naive);
            prop_assert_eq!(lazy.peak, naive_peak);
        }
    }

    #[test]
    fn parts_are_sorted_and_not_empty() {
        let mut seen = CategoryRecorder::default();
        let tag = |category, layer| Tag { category, layer };
        seen.learn(&[
            Tag::default(),
            tag(Category::Activation, Some(1)),
            tag(Category::Activation, Some(0)),
            tag(Category::Parameter, None),
        ]);
        seen.add(1, 10);
        seen.add(2, 20);
        seen.add(3, 30);
        let parts: Vec<_> = seen.finish().1.iter().map(|part| (part.category, part.layer, part.bytes)).collect();
        assert_eq!(
            parts,
            [(Category::Parameter, None, 30), (Category::Activation, Some(0), 20), (Category::Activation, Some(1), 10)]
        );
    }
}
