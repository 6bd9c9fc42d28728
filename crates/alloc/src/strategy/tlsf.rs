//! `tlsf`: two-level segregated fit, the constant-time allocator of real-time systems.
//!
//! Free pieces hang in lists by size class: a power of two, divided linearly into [`STEPS`] steps. Two levels of bitmaps
//! find the first list that is sure to fit in a few instructions, because a request is looked up at the next class
//! boundary: what is found there always serves, and what lies in the request's own class is passed over. That costs at
//! most one step in [`STEPS`], three percent. A piece is cut to size and joined with its free neighbours at once. The
//! headers that the original keeps in front of each block are kept on the host, out of band.
//!
//! Each stream has lists and regions of its own.

use super::{
    Built, Outcome, Parameter, Setup, Stats, StrategyEntry, parameters,
    pooled::{ABSURD, Ground, Growth, NONE, Need, Policy, Pooled, Region},
};
use crate::device::{Device, DeviceError};
use oomph_base::{MIB, StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "tlsf",
    summary: "two-level segregated fit: good fit in constant time, headers on the host",
    origin: "Masmano, Ripoll, Crespo, Real: TLSF (2004); used by game engines and real-time systems",
    parameters: &[Parameter {
        name: REGION,
        values: "an amount of memory",
        default: "20MiB",
        help: "what is taken from the device at least",
    }],
    variants: &["region:2MiB"],
    build,
};

const REGION: &str = "region";

/// Sizes are multiples of this.
const QUANTUM: u64 = 512;
/// Every power of two is divided into this many steps.
const STEPS: usize = 1 << STEP_BITS;
const STEP_BITS: u32 = 5;
/// Sizes below this are classes of their own, one a [`QUANTUM`].
const LINEAR: u64 = QUANTUM << STEP_BITS;
/// The linear classes, and every power of two up to [`ABSURD`].
const LEVELS: usize = (ABSURD.ilog2() - LINEAR.ilog2()) as usize + 1;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let mut region = 20 * MIB;
    parameters::read(&ENTRY, parameters, |setting| {
        region = setting.bytes()?;
        Ok(())
    })?;
    Ok(Box::new(Pooled::new(TwoLevels { region, homes: Vec::new() })))
}

/// Free pieces by class, one set a stream.
#[derive(Clone, Debug)]
struct TwoLevels {
    region: u64,
    homes: Vec<Home>,
}

/// The free pieces of one stream.
#[derive(Clone, Debug)]
struct Home {
    /// Which levels have free pieces.
    levels: u64,
    /// Which steps of each level have.
    steps: [u32; LEVELS],
    /// The first piece of each list.
    heads: Box<[[u32; STEPS]; LEVELS]>,
}

/// A list of free pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Class {
    level: usize,
    step: usize,
}

impl Class {
    /// Where a free piece of this size belongs.
    #[inline]
    fn of(size: u64) -> Class {
        if size < LINEAR {
            return Class { level: 0, step: (size / QUANTUM) as usize };
        }
        let power = size.ilog2();
        let step = (size >> (power - STEP_BITS)) as usize & (STEPS - 1);
        Class { level: (power - LINEAR.ilog2()) as usize + 1, step }
    }

    /// The smallest size that belongs here.
    fn floor(self) -> u64 {
        if self.level == 0 {
            return self.step as u64 * QUANTUM;
        }
        ((STEPS + self.step) as u64 * QUANTUM) << (self.level - 1)
    }
}

/// The size from which on every class fits the request.
#[inline]
fn lookup_size(size: u64) -> u64 {
    if size < LINEAR { size } else { round_up(size, 1 << (size.ilog2() - STEP_BITS)) }
}

impl Home {
    fn new() -> Home {
        Home { levels: 0, steps: [0; LEVELS], heads: Box::new([[NONE; STEPS]; LEVELS]) }
    }

    /// The first list with a piece, from a class upwards.
    #[inline]
    fn first_from(&self, class: Class) -> Option<Class> {
        let here = self.steps[class.level] & (!0 << class.step);
        if here != 0 {
            return Some(Class { level: class.level, step: here.trailing_zeros() as usize });
        }
        // Levels are fewer than bits, so that a shift by one more than the last is still one.
        let above = self.levels & (!0 << (class.level + 1));
        if above == 0 {
            return None;
        }
        let level = above.trailing_zeros() as usize;
        Some(Class { level, step: self.steps[level].trailing_zeros() as usize })
    }

    #[inline]
    fn insert(&mut self, ground: &mut Ground, slot: u32) {
        let Class { level, step } = Class::of(ground[slot].size);
        let head = std::mem::replace(&mut self.heads[level][step], slot);
        ground[slot].links = [NONE, head];
        if head != NONE {
            ground[head].links[0] = slot;
        }
        self.steps[level] |= 1 << step;
        self.levels |= 1 << level;
    }

    #[inline]
    fn remove(&mut self, ground: &mut Ground, slot: u32) {
        let [before, after] = ground[slot].links;
        if after != NONE {
            ground[after].links[0] = before;
        }
        if before != NONE {
            ground[before].links[1] = after;
            return;
        }
        let Class { level, step } = Class::of(ground[slot].size);
        self.heads[level][step] = after;
        if after == NONE {
            self.steps[level] &= !(1 << step);
            if self.steps[level] == 0 {
                self.levels &= !(1 << level);
            }
        }
    }
}

impl Policy for TwoLevels {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < ABSURD).then(|| round_up(bytes, QUANTUM))
    }

    #[inline]
    fn take(
        &mut self,
        ground: &mut Ground,
        _: &mut dyn Device,
        need: &Need,
    ) -> Result<Option<(u32, Outcome)>, DeviceError> {
        let Some(home) = self.homes.get_mut(need.stream.index()) else { return Ok(None) };
        let Some(Class { level, step }) = home.first_from(Class::of(lookup_size(need.size))) else { return Ok(None) };
        let slot = home.heads[level][step];
        home.remove(ground, slot);
        if ground[slot].size == need.size {
            return Ok(Some((slot, Outcome::Hit)));
        }
        let rest = ground.cut(slot, need.size);
        home.insert(ground, rest);
        Ok(Some((slot, Outcome::Split)))
    }

    #[inline]
    fn keep(&mut self, ground: &mut Ground, slot: u32) {
        let piece = &ground[slot];
        let (mut slot, previous, next) = (slot, piece.previous, piece.next);
        let owner = ground.region(piece.region).stream.index();
        let home = &mut self.homes[owner];
        if ground.free_piece(next).is_some() {
            home.remove(ground, next);
            ground.join_next(slot);
        }
        if ground.free_piece(previous).is_some() {
            home.remove(ground, previous);
            ground.join_next(previous);
            slot = previous;
        }
        home.insert(ground, slot);
    }

    fn welcome(&mut self, ground: &mut Ground, slot: u32, need: &Need) {
        if self.homes.len() <= need.stream.index() {
            self.homes.resize_with(need.stream.index() + 1, Home::new);
        }
        self.keep(ground, slot);
    }

    fn forget(&mut self, ground: &mut Ground, slot: u32) {
        let owner = ground.region(ground[slot].region).stream.index();
        self.homes[owner].remove(ground, slot);
    }

    fn growth(&mut self, need: &Need, _: &Stats, attempt: u32) -> Growth {
        // At a class boundary, so that the new piece is found by the same lookup.
        let least = lookup_size(need.size);
        match attempt {
            0 => Growth::Ask(least.max(self.region)),
            1 if least < self.region => Growth::Ask(least),
            _ => Growth::End,
        }
    }

    fn largest_free(&self, _: &Ground, stream: StreamId) -> u64 {
        let Some(home) = self.homes.get(stream.index()) else { return 0 };
        let Some(level) = home.levels.checked_ilog2() else { return 0 };
        let step = home.steps[level as usize].ilog2();
        Class { level: level as usize, step: step as usize }.floor()
    }

    fn pool_name(&self, _: &Region) -> &'static str {
        "tlsf"
    }

    fn renewed(&self) -> TwoLevels {
        TwoLevels { region: self.region, homes: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::KIB;

    #[test]
    fn classes_are_exact_below_and_of_one_step_above() {
        assert_eq!(Class::of(512), Class { level: 0, step: 1 });
        assert_eq!(Class::of(LINEAR - 512), Class { level: 0, step: 31 });
        assert_eq!(Class::of(LINEAR), Class { level: 1, step: 0 });
        assert_eq!(Class::of(LINEAR + 511), Class { level: 1, step: 0 });
        assert_eq!(Class::of(2 * LINEAR - 512), Class { level: 1, step: 31 });
        assert_eq!(Class::of(2 * LINEAR), Class { level: 2, step: 0 });
        assert_eq!(Class::of(ABSURD - 1).level, LEVELS - 1);
    }

    #[test]
    fn what_is_found_at_the_lookup_size_always_fits() {
        for size in (1..4000).map(|n| n * QUANTUM).chain([MIB + 512, 100 * MIB + 512, ABSURD - 512]) {
            let class = Class::of(lookup_size(size));
            assert!(class.floor() >= size, "{size}: {class:?} begins at {}", class.floor());
            assert!(class.floor() - size <= size / STEPS as u64, "{size}: {class:?} begins at {}", class.floor());
        }
        assert_eq!(lookup_size(16 * KIB + 512), 16 * KIB + 512);
        assert_eq!(lookup_size(32 * KIB + 512), 33 * KIB);
    }
}
