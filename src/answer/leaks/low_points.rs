//! The low points of memory in a trace without marks: where it has fallen far and rises again, a step ends.

use super::steps::FEWEST_STEPS;

/// A fall and a rise count if they are at least one part in so many of what memory spans. The largest of these that
/// gives enough low points is taken. Smaller falls happen within the layers of one step.
const PARTS: [u64; 3] = [2, 4, 8];

/// The turning points of live memory.
#[derive(Default)]
pub(super) struct LowPoints {
    /// The event of each turn and the level there; rises and falls alternate.
    turns: Vec<(u64, u64)>,
    rises: bool,
    /// The number of turns up to the last request. What is freed after it is not a step.
    until: usize,
}

impl LowPoints {
    /// Adds the level after an event.
    pub(super) fn push(&mut self, event: u64, level: u64, is_request: bool) {
        let is_first = self.turns.len() == 1;
        match self.turns.last_mut() {
            Some(last) if last.1 == level => {}
            Some(last) if !is_first && self.rises == (level > last.1) => *last = (event, level),
            Some(last) => {
                self.rises = level > last.1;
                self.turns.push((event, level));
            }
            None => self.turns.push((event, level)),
        }
        if is_request {
            self.until = self.turns.len();
        }
    }

    /// From the lowest level to the highest in the second half, up to the last request.
    pub(super) fn late_span(&self) -> u64 {
        span(&self.turns[(self.until / 2).saturating_sub(1)..self.until])
    }

    /// The events with which steps begin: the first one, and the one after each low point.
    pub(super) fn starts(&self) -> Option<Vec<u64>> {
        let turns = &self.turns[..self.until];
        let span = span(turns);
        PARTS.iter().map(|part| starts(turns, (span / part).max(1))).find(|starts| starts.len() > FEWEST_STEPS)
    }
}

fn span(turns: &[(u64, u64)]) -> u64 {
    let levels = || turns.iter().map(|turn| turn.1);
    levels().max().unwrap_or(0) - levels().min().unwrap_or(0)
}

/// Cuts where memory has fallen by `least` and then rises by it.
fn starts(turns: &[(u64, u64)], least: u64) -> Vec<u64> {
    let Some(&(event, level)) = turns.first() else { return Vec::new() };
    let mut starts = vec![event];
    let (mut high, mut low, mut falls) = (level, (event, level), false);
    for &(event, level) in turns {
        if falls {
            if level < low.1 {
                low = (event, level);
            } else if level - low.1 >= least {
                starts.push(low.0 + 1);
                (high, falls) = (level, false);
            }
        } else {
            high = high.max(level);
            if high - level >= least {
                (low, falls) = ((event, level), true);
            }
        }
    }
    starts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(levels: &[u64]) -> Option<Vec<u64>> {
        let mut points = LowPoints::default();
        let mut before = 0;
        for (event, &level) in (0..).zip(levels) {
            points.push(event, level, level > before);
            before = level;
        }
        points.starts()
    }

    #[test]
    fn a_step_begins_after_each_low_point() {
        let step = [10, 40, 90, 70, 30, 10];
        assert_eq!(of(&step.repeat(6)), Some(vec![0, 6, 12, 18, 24, 30]));
    }

    #[test]
    fn small_falls_within_one_rise_are_no_low_points() {
        let rise: Vec<u64> = (0..60).flat_map(|layer| [layer * 100 + 90, layer * 100 + 60]).collect();
        assert_eq!(of(&rise), None);
    }

    #[test]
    fn the_last_fall_begins_no_step() {
        let mut levels = [10, 40, 90, 70, 30, 10].repeat(6);
        levels.extend([8, 4, 2, 0]);
        assert_eq!(of(&levels).map(|starts| starts.len()), Some(6));
    }
}
