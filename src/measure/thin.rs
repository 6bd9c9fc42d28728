//! A series of any length in bounded memory.

/// A stretch of a series that can be joined with the one that follows it.
pub trait Join {
    /// Takes in what came right after.
    fn join(&mut self, next: &Self);
}

/// Keeps at most a fixed number of stretches. Whenever they would be too many, neighbours are joined in pairs, so that
/// every stretch but the last covers the same number of items: one at first, then two, four, and so on.
#[derive(Clone, Debug)]
pub struct Thinned<T> {
    stretches: Vec<T>,
    most: usize,
    /// Items that a full stretch covers.
    stride: u64,
    /// Items that the last stretch covers.
    filled: u64,
}

impl<T: Join> Thinned<T> {
    /// An empty series of at most `most` stretches (at least two).
    #[must_use]
    pub fn new(most: usize) -> Thinned<T> {
        Thinned { stretches: Vec::new(), most: (most.max(2)).next_multiple_of(2), stride: 1, filled: 0 }
    }

    /// Adds an item at the end.
    #[inline]
    pub fn push(&mut self, item: T) {
        if self.filled < self.stride
            && let Some(last) = self.stretches.last_mut()
        {
            last.join(&item);
            self.filled += 1;
            return;
        }
        if self.stretches.len() == self.most {
            self.halve();
        }
        self.stretches.push(item);
        self.filled = 1;
    }

    /// The last stretch, to be brought up to date while it is still open.
    pub fn last_mut(&mut self) -> Option<&mut T> {
        self.stretches.last_mut()
    }

    /// The stretches in order.
    #[must_use]
    pub fn into_stretches(self) -> Vec<T> {
        self.stretches
    }

    /// Happens once for every doubling of the series.
    #[cold]
    fn halve(&mut self) {
        let mut stretches = std::mem::take(&mut self.stretches).into_iter();
        while let Some(mut first) = stretches.next() {
            if let Some(second) = stretches.next() {
                first.join(&second);
            }
            self.stretches.push(first);
        }
        self.stride *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Run(u64, u64);

    impl Join for Run {
        fn join(&mut self, next: &Run) {
            assert_eq!(self.1 + 1, next.0, "only neighbours are joined");
            self.1 = next.1;
        }
    }

    #[test]
    fn stretches_cover_everything_once_in_equal_parts() {
        for count in [0, 1, 7, 8, 9, 1_000, 4_096] {
            let mut series = Thinned::new(8);
            (0..count).for_each(|item| series.push(Run(item, item)));
            let runs = series.into_stretches();
            assert!(runs.len() <= 8);
            assert_eq!(runs.iter().map(|run| run.1 - run.0 + 1).sum::<u64>(), count);
            let lengths: Vec<u64> = runs.iter().map(|run| run.1 - run.0 + 1).collect();
            if let Some((last, full)) = lengths.split_last() {
                assert!(full.iter().all(|length| length.is_power_of_two() && length >= last), "{lengths:?}");
                assert!(full.windows(2).all(|pair| pair[0] == pair[1]), "{lengths:?}");
            }
        }
    }
}
