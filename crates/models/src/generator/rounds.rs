//! The same random requests round after round, with nothing alive in between: a query that a data engine runs again.
//!
//! A round asks for so many blocks. Sizes follow a power law, in whole units; before a block that would exceed the limit,
//! blocks that are alive go at random until it fits. At the end of a round all go, at random too. Whoever served the first
//! round can serve every other one, unless what it kept of the earlier ones is in the way.

use super::{Generator, GeneratorEntry, start};
use crate::{Dice, Parameter, dice::PowerLaw};
use oomph_base::{Bytes, GIB, StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "rounds",
    summary: "the same random requests again and again, everything freed in between",
    seeded: true,
    parameters: &[
        Parameter::count("rounds", 1..=10_000_000, "3", "how often the same happens"),
        Parameter::count("allocations", 1..=10_000_000, "1000", "blocks of a round"),
        Parameter::size("unit", 1..=GIB, "1MiB", "sizes are multiples of this"),
        Parameter::count("min_units", 1..=1 << 20, "1", "smallest block, in units"),
        Parameter::count("max_units", 1..=1 << 20, "256", "largest block, in units"),
        Parameter::number("size_exponent", 0.01..=8.0, "0.8", "tail exponent of sizes; smaller is heavier"),
        Parameter::size("live_limit", 1..=1024 * GIB, "16GiB", "no more than this is alive"),
        Parameter::number("churn", 0.0..=1.0, "0.3", "chance that a block goes before another one comes"),
        Parameter::count("streams", 1..=64, "1", "streams that blocks belong to, at random"),
    ],
    build: |parameters| {
        let (min_units, max_units) = (parameters.count("min_units")?, parameters.count("max_units")?);
        if min_units > max_units {
            return Err(parameters.refuse(format!("min_units ({min_units}) must not exceed max_units ({max_units})")));
        }
        let (unit, live_limit) = (parameters.size("unit")?, parameters.size("live_limit")?);
        let largest = unit * u64::from(max_units);
        if largest > live_limit {
            return Err(parameters.refuse(format!(
                "the largest block ({}) must not exceed live_limit ({})",
                Bytes(largest),
                Bytes(live_limit)
            )));
        }
        let sizes = PowerLaw::new(min_units.into(), max_units.into(), parameters.number("size_exponent")?);
        let (rounds, allocations) = (parameters.count("rounds")?, parameters.count("allocations")?);
        let (churn, stream_count) = (parameters.number("churn")?, parameters.count("streams")?);
        Ok(start(move |dice| Rounds {
            luck: dice.clone(),
            dice,
            rounds,
            allocations,
            unit,
            sizes,
            live_limit,
            churn,
            stream_count: stream_count as usize,
            streams: vec![StreamId::DEFAULT],
            round: 0,
            made: 0,
            live_bytes: 0,
            live: Vec::new(),
        }))
    },
};

/// Blocks asked for at a time.
const PART: u32 = 1024;

struct Rounds {
    /// How the dice lie at the beginning of every round.
    luck: Dice,
    dice: Dice,
    rounds: u32,
    allocations: u32,
    unit: u64,
    sizes: PowerLaw,
    live_limit: u64,
    churn: f64,
    stream_count: usize,
    streams: Vec<StreamId>,
    round: u32,
    /// Blocks of this round so far.
    made: u32,
    live_bytes: u64,
    live: Vec<(BlockSlot, u64)>,
}

impl Rounds {
    fn free_one(&mut self, story: &mut TraceBuilder) {
        let victim = self.dice.index(self.live.len());
        let (block, bytes) = self.live.swap_remove(victim);
        story.free(block);
        self.live_bytes -= bytes;
    }
}

impl Generator for Rounds {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        if self.round == self.rounds {
            return false;
        }
        // At most 64, of the 65,536 that a story can hold.
        while self.streams.len() < self.stream_count
            && let Ok(stream) = story.new_stream()
        {
            self.streams.push(stream);
        }
        if self.made == 0 {
            self.dice = self.luck.clone();
            story.mark(MarkKind::Step, "round", self.round);
            story.mark(MarkKind::Phase, "requests", self.round);
        }
        let stop = self.allocations.min(self.made + PART);
        while self.made < stop {
            if !self.live.is_empty() && self.dice.chance(self.churn) {
                self.free_one(story);
            }
            let bytes = self.unit * self.sizes.draw(&mut self.dice);
            while self.live_bytes + bytes > self.live_limit {
                self.free_one(story);
            }
            let stream = self.streams[self.dice.index(self.streams.len())];
            self.live.push((story.alloc(bytes, stream, TagId(0)), bytes));
            self.live_bytes += bytes;
            self.made += 1;
        }
        if self.made == self.allocations {
            story.mark(MarkKind::Phase, "clear", self.round);
            while !self.live.is_empty() {
                self.free_one(story);
            }
            (self.round, self.made) = (self.round + 1, 0);
        }
        true
    }

    fn left(&self) -> u64 {
        u64::from(self.rounds - self.round) * u64::from(self.allocations) - u64::from(self.made)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{MarkKind, Op, OpKind, Trace, check};

    #[test]
    fn every_round_asks_for_the_same() {
        let recipe = Recipe::named("museum-rmm-1969").unwrap().with("allocations", "1500").with("rounds", "3");
        let trace = Trace::read(&recipe.workload().unwrap()).unwrap();
        let mut rounds: Vec<Vec<u64>> = Vec::new();
        for event in &trace.events {
            match event.op {
                Op::Mark { kind: MarkKind::Step, .. } => rounds.push(Vec::new()),
                Op::Alloc { bytes, .. } => rounds.last_mut().unwrap().push(bytes),
                _ => {}
            }
        }
        assert_eq!(rounds.len(), 3);
        assert_eq!(rounds[0].len(), 1500);
        assert!(rounds.iter().all(|round| *round == rounds[0]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn rounds_of_any_kind_keep_their_limit_and_give_everything_back(
            (rounds, allocations, streams) in (1..4_u32, 1..300_u32, 1..5_u32),
            (min_units, more_units, limit_units) in (1..10_u32, 0..50_u32, 0..200_u32),
            (churn, seed) in (0.0..1.0_f64, any::<u64>()),
        ) {
            let max_units = min_units + more_units;
            let limit = u64::from(max_units + limit_units) * 4096;
            let settings = [
                ("rounds", rounds.to_string()), ("allocations", allocations.to_string()), ("unit", "4096".to_owned()),
                ("min_units", min_units.to_string()), ("max_units", max_units.to_string()),
                ("live_limit", limit.to_string()), ("churn", churn.to_string()), ("streams", streams.to_string()),
            ];
            let recipe = Recipe::named("museum-rmm-2039").unwrap().seed(seed);
            let recipe = settings.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value));
            let summary = check(&recipe.workload().unwrap()).unwrap();
            prop_assert_eq!(summary.live_blocks, 0);
            prop_assert!(summary.peak.bytes <= limit);
            prop_assert_eq!(summary.count(OpKind::Alloc), u64::from(rounds * allocations));
            prop_assert!(summary.largest_request <= u64::from(max_units) * 4096);
        }
    }
}
