//! How far long work has come. Whoever does it tells a [`Watch`] now and then, never at every event; who listens, and
//! whether anything is shown of it, is no business of the rooms that work.

use std::fmt;

/// Somebody who is told how far work has come: a progress bar, or a test.
pub trait Watcher: Sync {
    /// A stage of the work begins, and the one before has ended. It has so many parts: bytes of a file, entries, whatever
    /// it counts in.
    fn begins(&self, stage: &str, parts: u64);

    /// So many more parts of the stage are done, on whichever thread.
    fn advances(&self, parts: u64);
}

/// Who is told; by default nobody.
#[derive(Clone, Copy, Default)]
pub struct Watch<'a> {
    watcher: Option<&'a dyn Watcher>,
}

impl<'a> Watch<'a> {
    /// Nobody is told.
    pub const NOBODY: Watch<'static> = Watch { watcher: None };

    /// How many items are worth a word: some milliseconds of work.
    pub const STRIDE: usize = 1 << 16;

    /// Tells `watcher`.
    #[must_use]
    pub const fn by(watcher: &'a dyn Watcher) -> Watch<'a> {
        Watch { watcher: Some(watcher) }
    }

    /// Goes through `items` as one stage, from either end; every [`STRIDE`](Watch::STRIDE) of them is told when it is
    /// begun.
    ///
    /// ```
    /// use oomph_base::Watch;
    /// let doubled: Vec<u32> = Watch::NOBODY.each("doubling", &[1, 2, 3]).rev().map(|number| number * 2).collect();
    /// assert_eq!(doubled, [6, 4, 2]);
    /// ```
    pub fn each<'i, T>(self, stage: &str, items: &'i [T]) -> impl DoubleEndedIterator<Item = &'i T>
    where
        'a: 'i,
    {
        self.begins(stage, items.len() as u64);
        items.chunks(Watch::STRIDE).inspect(move |stride| self.advances(stride.len() as u64)).flatten()
    }
}

impl Watcher for Watch<'_> {
    fn begins(&self, stage: &str, parts: u64) {
        if let Some(watcher) = self.watcher {
            watcher.begins(stage, parts);
        }
    }

    fn advances(&self, parts: u64) {
        if let Some(watcher) = self.watcher {
            watcher.advances(parts);
        }
    }
}

impl fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.watcher.is_some() { "Watch(somebody)" } else { "Watch(nobody)" })
    }
}

/// Records every stage that was reported, its parts, and how many of them were done. For tests.
#[cfg(any(test, feature = "testing"))]
#[derive(Default)]
pub struct Minutes(std::sync::Mutex<Vec<(String, u64, u64)>>);

#[cfg(any(test, feature = "testing"))]
impl Minutes {
    /// What was told so far: stage, parts, parts done.
    pub fn stages(&self) -> Vec<(String, u64, u64)> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

#[cfg(any(test, feature = "testing"))]
impl Watcher for Minutes {
    fn begins(&self, stage: &str, parts: u64) {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((stage.to_owned(), parts, 0));
    }

    fn advances(&self, parts: u64) {
        if let Some(stage) = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).last_mut() {
            stage.2 += parts;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_seen_and_counted_once_from_either_end() {
        let items: Vec<usize> = (0..2 * Watch::STRIDE + 3).collect();
        let minutes = Minutes::default();
        let mut seen = 0;
        for (place, item) in Watch::by(&minutes).each("forwards", &items).enumerate() {
            assert_eq!(*item, place);
            seen += 1;
        }
        assert_eq!(seen, items.len());
        assert!(Watch::by(&minutes).each("backwards", &items).rev().eq(items.iter().rev()));
        let all = items.len() as u64;
        assert_eq!(minutes.stages(), [("forwards".to_owned(), all, all), ("backwards".to_owned(), all, all)]);
    }

    #[test]
    fn what_is_not_done_is_not_counted() {
        let items = vec![0; 3 * Watch::STRIDE];
        let minutes = Minutes::default();
        assert!(Watch::by(&minutes).each("begun", &items).next().is_some());
        assert_eq!(minutes.stages(), [("begun".to_owned(), 3 * Watch::STRIDE as u64, Watch::STRIDE as u64)]);
    }
}
