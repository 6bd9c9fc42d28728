//! Where the search for the largest batch of a card begins: memory grows almost evenly with the batch.

/// Batches whose memory is known. A guess from two of them is near enough to save most of a search.
#[derive(Debug, Default)]
pub(super) struct MemoryByBatch {
    /// Batch and bytes, the latest last.
    points: Vec<(u64, u64)>,
}

impl MemoryByBatch {
    /// Adds what a batch takes.
    pub(super) fn note(&mut self, batch: u64, bytes: u64) {
        self.points.retain(|(known, _)| *known != batch);
        self.points.push((batch, bytes));
    }

    /// The batch that takes about `bytes`, on the line through the two latest points; `None` where there is no such line.
    pub(super) fn guess(&self, bytes: u64) -> Option<u64> {
        let &[.., (first, first_bytes), (second, second_bytes)] = self.points.as_slice() else { return None };
        let per_sequence = (second_bytes as f64 - first_bytes as f64) / (second as f64 - first as f64);
        let batch = second as f64 + (bytes as f64 - second_bytes as f64) / per_sequence;
        (per_sequence > 0.0).then_some(batch.max(1.0) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guess_lies_on_the_line_through_what_is_known() {
        let mut memory = MemoryByBatch::default();
        memory.note(8, 900);
        assert_eq!(memory.guess(1000), None, "one point is no line");
        memory.note(1, 200);
        assert_eq!((memory.guess(1000), memory.guess(350), memory.guess(0)), (Some(9), Some(2), Some(1)));
        memory.note(1, 1100);
        assert_eq!(memory.guess(2000), None, "more that takes less is none to go by");
    }
}
