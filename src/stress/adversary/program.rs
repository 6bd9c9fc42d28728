//! Programs that a search can change a little: phases of allocs and frees rather than single ones.
//!
//! A change to one event of a trace hardly matters. A change to a phase ("fill up to half with blocks of 6 MiB and 2 MiB in
//! turn", "free all but every fourth") changes hundreds of events in a way that has a meaning, which is what makes climbing
//! possible. Whatever is changed, a program never has more alive than its [`Contest`] allows.

use super::Contest;
use crate::{
    base::{StreamId, TagId, round_up},
    models::Dice,
    trace::{BlockSlot, TableFull, Trace, TraceBuilder},
};

/// Sizes are multiples of this: finer differences no allocator sees.
const GRAIN: u64 = 512;
/// More blocks than this a program never has alive, however small they are.
const MOST_BLOCKS: usize = 4096;
/// More events than this a program never has: what needs them is not small enough to be looked at.
const MOST_EVENTS: usize = 50_000;
const MOST_PHASES: usize = 12;
const MOST_ROUNDS: u32 = 12;
/// Shares of the budget, and growth from round to round, are counted in these.
const PARTS: u64 = 16;

/// Phases, played in rounds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Program {
    phases: Vec<Phase>,
    rounds: u32,
    /// From round to round sizes grow to so many sixteenths of what they were.
    growth: u64,
}

/// A part of a round.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Allocates blocks of these sizes in turn until so many sixteenths of the budget are alive.
    Fill { sizes: Vec<u64>, up_to: u64, stream: usize },
    /// Of some blocks in the order of their birth, frees each `every`-th, or all but those.
    Free { among: Among, every: usize, from: usize, others: bool },
}

/// Which blocks a phase looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Among {
    All,
    /// Those that the last fill allocated.
    Newest,
    /// Those that the last fill did not allocate.
    Older,
    AtLeast(u64),
    Below(u64),
}

/// Within which limits programs are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Breeder {
    pub(super) contest: Contest,
    /// How many streams blocks are on.
    pub(super) streams: usize,
}

impl Breeder {
    /// A program out of nothing.
    pub(super) fn invent(&self, dice: &mut Dice) -> Program {
        let mut phases = vec![self.invent_fill(dice)];
        for _ in 0..dice.between(1, 5) {
            phases.push(self.invent_phase(dice));
        }
        let rounds = dice.between(1, u64::from(MOST_ROUNDS)) as u32;
        let growth = [PARTS, PARTS, PARTS * 5 / 4, PARTS * 3 / 2, PARTS * 2][dice.index(5)];
        Program { phases, rounds, growth }
    }

    /// A program that differs from another in one or two places.
    pub(super) fn vary(&self, program: &Program, dice: &mut Dice) -> Program {
        let mut program = program.clone();
        for _ in 0..dice.between(1, 2) {
            self.change(&mut program, dice);
        }
        program
    }

    /// The beginning of one program and the end of another.
    pub(super) fn cross(&self, first: &Program, second: &Program, dice: &mut Dice) -> Program {
        let mut phases = first.phases[..=dice.index(first.phases.len())].to_vec();
        phases.extend_from_slice(&second.phases[dice.index(second.phases.len())..]);
        phases.truncate(MOST_PHASES);
        let donor = if dice.chance(0.5) { first } else { second };
        Program { phases, rounds: donor.rounds, growth: donor.growth }
    }

    fn change(&self, program: &mut Program, dice: &mut Dice) {
        let place = dice.index(program.phases.len());
        match dice.index(8) {
            0 if program.phases.len() < MOST_PHASES => program.phases.insert(place, self.invent_phase(dice)),
            1 if program.phases.len() > 1 => {
                program.phases.remove(place);
            }
            2 => {
                let other = dice.index(program.phases.len());
                program.phases.swap(place, other);
            }
            3 => program.rounds = dice.between(1, u64::from(MOST_ROUNDS)) as u32,
            4 => program.growth = dice.between(PARTS / 2, PARTS * 2),
            _ => self.change_phase(&mut program.phases[place], dice),
        }
    }

    fn change_phase(&self, phase: &mut Phase, dice: &mut Dice) {
        match phase {
            Phase::Fill { sizes, up_to, stream } => match dice.index(5) {
                0 => *up_to = dice.between(1, PARTS),
                1 if sizes.len() < 4 => sizes.push(self.draw_size(dice)),
                2 if sizes.len() > 1 => {
                    sizes.remove(dice.index(sizes.len()));
                }
                3 if self.streams > 1 => *stream = dice.index(self.streams),
                _ => {
                    let place = dice.index(sizes.len());
                    sizes[place] = self.near(sizes[place], dice);
                }
            },
            Phase::Free { among, every, from, others } => match dice.index(4) {
                0 => *among = self.draw_among(dice),
                1 => *every = draw_stride(dice),
                2 => *from = dice.index(*every),
                _ => *others = !*others,
            },
        }
    }

    fn invent_phase(&self, dice: &mut Dice) -> Phase {
        if dice.chance(0.5) {
            return self.invent_fill(dice);
        }
        let every = draw_stride(dice);
        Phase::Free { among: self.draw_among(dice), every, from: dice.index(every), others: dice.chance(0.5) }
    }

    fn invent_fill(&self, dice: &mut Dice) -> Phase {
        let sizes = (0..dice.between(1, 3)).map(|_| self.draw_size(dice)).collect();
        Phase::Fill { sizes, up_to: dice.between(1, PARTS), stream: dice.index(self.streams) }
    }

    fn draw_among(&self, dice: &mut Dice) -> Among {
        match dice.index(5) {
            0 => Among::Newest,
            1 => Among::Older,
            2 => Among::AtLeast(self.draw_size(dice)),
            3 => Among::Below(self.draw_size(dice)),
            _ => Among::All,
        }
    }

    /// All powers of two alike, and often just there: that is where allocators change their mind.
    fn draw_size(&self, dice: &mut Dice) -> u64 {
        let power = self.contest.unit_bytes << dice.between(0, u64::from(self.contest.doublings()));
        self.fitting(match dice.index(4) {
            0 => power,
            1 => power + GRAIN,
            2 => power / 2 * 3,
            _ => dice.between(power, power * 2),
        })
    }

    fn near(&self, size: u64, dice: &mut Dice) -> u64 {
        self.fitting(match dice.index(6) {
            0 => size * 2,
            1 => size / 2,
            2 => size + GRAIN,
            3 => size.next_power_of_two(),
            4 => dice.between(size / 8 * 7, size / 8 * 9),
            _ => self.draw_size(dice),
        })
    }

    fn fitting(&self, size: u64) -> u64 {
        round_up(size, GRAIN).clamp(self.contest.unit_bytes, self.contest.largest_bytes)
    }

    /// The program as a trace. What is alive at the end is freed.
    pub(super) fn write_out(&self, program: &Program) -> Result<Trace, TableFull> {
        let mut story = TraceBuilder::new();
        let mut streams = vec![StreamId::DEFAULT];
        while streams.len() < self.streams {
            streams.push(story.new_stream()?);
        }
        let mut stage = Stage { contest: &self.contest, story, streams, alive: Vec::new(), bytes: 0, fills: 0 };
        let mut scale = PARTS;
        for _ in 0..program.rounds {
            for phase in &program.phases {
                stage.perform(phase, |size| self.fitting(size / PARTS * scale));
            }
            scale = (scale * program.growth / PARTS).clamp(1, PARTS * self.contest.largest_units());
        }
        for block in std::mem::take(&mut stage.alive) {
            stage.story.free(block.slot);
        }
        Ok(stage.story.finish("adversary"))
    }
}

/// Small strides, and now and then a large one.
fn draw_stride(dice: &mut Dice) -> usize {
    if dice.chance(0.8) { dice.between(1, 4) as usize } else { dice.between(5, 32) as usize }
}

/// A program while it is played.
struct Stage<'a> {
    contest: &'a Contest,
    story: TraceBuilder,
    streams: Vec<StreamId>,
    /// In the order of their birth.
    alive: Vec<Alive>,
    bytes: u64,
    fills: u32,
}

#[derive(Clone, Copy)]
struct Alive {
    slot: BlockSlot,
    bytes: u64,
    /// The number of the fill that allocated it.
    fill: u32,
}

impl Stage<'_> {
    fn perform(&mut self, phase: &Phase, scaled: impl Fn(u64) -> u64) {
        match phase {
            Phase::Fill { sizes, up_to, stream } => {
                self.fills += 1;
                let budget = self.contest.live_bytes / PARTS * up_to;
                for size in sizes.iter().map(|&size| scaled(size)).cycle() {
                    let full = self.alive.len() >= MOST_BLOCKS || self.story.pending() >= MOST_EVENTS;
                    if full || self.bytes + size > budget {
                        break;
                    }
                    let slot = self.story.alloc(size, self.streams[*stream], TagId(0));
                    self.alive.push(Alive { slot, bytes: size, fill: self.fills });
                    self.bytes += size;
                }
            }
            &Phase::Free { among, every, from, others } => {
                let newest = self.fills;
                let concerns = |block: &Alive| match among {
                    Among::All => true,
                    Among::Newest => block.fill == newest,
                    Among::Older => block.fill != newest,
                    Among::AtLeast(size) => block.bytes >= scaled(size),
                    Among::Below(size) => block.bytes < scaled(size),
                };
                let mut position = 0;
                let mut kept = Vec::with_capacity(self.alive.len());
                for block in std::mem::take(&mut self.alive) {
                    let goes = concerns(&block) && {
                        position += 1;
                        ((position - 1) % every == from % every) != others
                    };
                    if goes {
                        self.story.free(block.slot);
                        self.bytes -= block.bytes;
                    } else {
                        kept.push(block);
                    }
                }
                self.alive = kept;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        base::MIB,
        trace::{Op, Summary, check},
    };

    fn breeder() -> Breeder {
        Breeder { contest: Contest::new(256 * MIB, 64 * MIB, 2 * MIB).unwrap(), streams: 2 }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// However they were bred.
        #[test]
        fn programs_hold_together_and_stay_within_the_budget(seed: u64) {
            let (breeder, mut dice) = (breeder(), Dice::new(seed, "programs"));
            let (first, second) = (breeder.invent(&mut dice), breeder.invent(&mut dice));
            let varied = breeder.vary(&first, &mut dice);
            let crossed = breeder.cross(&varied, &second, &mut dice);
            for program in [first, second, varied, crossed] {
                let trace = breeder.write_out(&program).unwrap();
                let summary: Summary = check(&trace).unwrap();
                prop_assert!(summary.peak.bytes <= breeder.contest.live_bytes);
                prop_assert!(trace.events.len() <= 2 * MOST_EVENTS);
                for event in &trace.events {
                    if let Op::Alloc { bytes, .. } = event.op {
                        prop_assert!((2 * MIB..=64 * MIB).contains(&bytes) && bytes % GRAIN == 0);
                    }
                }
            }
        }
    }

    #[test]
    fn phases_do_what_their_names_say() {
        let mebibytes = |sizes: &[u64]| sizes.iter().map(|size| size * MIB).collect::<Vec<_>>();
        let phases = vec![
            Phase::Fill { sizes: mebibytes(&[6, 2]), up_to: 1, stream: 0 },
            Phase::Free { among: Among::AtLeast(4 * MIB), every: 2, from: 0, others: true },
            Phase::Fill { sizes: mebibytes(&[4]), up_to: 1, stream: 1 },
            Phase::Free { among: Among::Newest, every: 1, from: 0, others: false },
        ];
        let program = Program { phases, rounds: 1, growth: PARTS };
        let trace = breeder().write_out(&program).unwrap();
        let told: Vec<(bool, u64)> = trace
            .events
            .iter()
            .map(|event| match event.op {
                Op::Alloc { bytes, .. } => (true, bytes / MIB),
                Op::Free { slot, .. } => (false, u64::from(slot)),
                _ => panic!("{event:?}"),
            })
            .collect();
        // 16 MiB are a sixteenth: two pairs. Of the blocks of 6 MiB the second goes, and a block of 4 MiB comes and goes.
        let (alloc, free) = (|size| (true, size), |slot| (false, slot));
        let expected = [alloc(6), alloc(2), alloc(6), alloc(2), free(2), alloc(4), free(2), free(0), free(1), free(3)];
        assert_eq!(told, expected);
    }
}
