//! Progress reporting: long-running code reports stages and increments. Only the command line draws them.

/// How many items are worth one report: some milliseconds of work.
pub const PROGRESS_STRIDE: usize = 1 << 16;

/// Receives reports from long-running code: a progress bar, or a log in a test.
pub trait Progress: Sync {
    /// A stage begins, and the stage before it has ended. `total` counts bytes, entries or whatever the stage counts;
    /// 0 is unknown.
    fn begin_stage(&self, stage: &str, total: u64);

    /// The current stage has advanced by `count`. May be called from several threads.
    fn advance(&self, count: u64);
}

/// Ignores every report.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn begin_stage(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
}

impl<P: Progress + ?Sized> Progress for &P {
    fn begin_stage(&self, stage: &str, total: u64) {
        (**self).begin_stage(stage, total);
    }

    fn advance(&self, count: u64) {
        (**self).advance(count);
    }
}

impl<'a> dyn Progress + 'a {
    /// Iterates over `items` as one stage, from either end. Each [`PROGRESS_STRIDE`] of them is reported when its first
    /// item is reached.
    ///
    /// ```
    /// use oomph_base::{NoProgress, Progress};
    /// let progress: &dyn Progress = &NoProgress;
    /// let doubled: Vec<u32> = progress.each("doubling", &[1, 2, 3]).rev().map(|number| number * 2).collect();
    /// assert_eq!(doubled, [6, 4, 2]);
    /// ```
    pub fn each<'i, T>(&'i self, stage: &str, items: &'i [T]) -> impl DoubleEndedIterator<Item = &'i T>
    where
        'a: 'i,
    {
        self.begin_stage(stage, items.len() as u64);
        items.chunks(PROGRESS_STRIDE).inspect(move |stride| self.advance(stride.len() as u64)).flatten()
    }
}

impl std::fmt::Debug for dyn Progress + '_ {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

/// Records every stage with its total and its count so far. For tests.
#[cfg(any(test, feature = "testing"))]
#[derive(Default)]
pub struct ProgressLog(std::sync::Mutex<Vec<(String, u64, u64)>>);

#[cfg(any(test, feature = "testing"))]
impl ProgressLog {
    /// The stages so far: name, total, count.
    pub fn stages(&self) -> Vec<(String, u64, u64)> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

#[cfg(any(test, feature = "testing"))]
impl Progress for ProgressLog {
    fn begin_stage(&self, stage: &str, total: u64) {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((stage.to_owned(), total, 0));
    }

    fn advance(&self, count: u64) {
        if let Some(stage) = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).last_mut() {
            stage.2 += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_counted_once_from_either_end() {
        let items: Vec<usize> = (0..2 * PROGRESS_STRIDE + 3).collect();
        let log = ProgressLog::default();
        let progress: &dyn Progress = &log;
        let mut seen = 0;
        for (place, item) in progress.each("forwards", &items).enumerate() {
            assert_eq!(*item, place);
            seen += 1;
        }
        assert_eq!(seen, items.len());
        assert!(progress.each("backwards", &items).rev().eq(items.iter().rev()));
        let all = items.len() as u64;
        assert_eq!(log.stages(), [("forwards".to_owned(), all, all), ("backwards".to_owned(), all, all)]);
    }

    #[test]
    fn items_not_reached_are_not_counted() {
        let items = vec![0; 3 * PROGRESS_STRIDE];
        let log = ProgressLog::default();
        let progress: &dyn Progress = &log;
        assert!(progress.each("begun", &items).next().is_some());
        assert_eq!(log.stages(), [("begun".to_owned(), 3 * PROGRESS_STRIDE as u64, PROGRESS_STRIDE as u64)]);
    }
}
