//! `buddy`: halves of halves, and back.
//!
//! Every block is a power of two. A region is one too, and so is every piece of it: a piece that is too large is halved
//! until it is not, and a freed piece is joined with its buddy, the other half of what it was cut from, as long as that
//! one is free and whole. Where the buddy lies follows from the offset in the region, exclusive-or the size; it is
//! therefore always a neighbour. Cutting and joining take at most one step a power of two; the price is that a block is
//! up to twice what was asked for.
//!
//! Each stream has lists and regions of its own. A request beyond the usual region gets a region of its size, which is cut
//! like any other later.

use super::{
    Built, Outcome, Parameter, Setup, SpecError, Stats, StrategyEntry, parameters,
    pooled::{ABSURD, Ground, Growth, NONE, Need, Policy, Pooled, Region},
};
use crate::device::{Device, DeviceError};
use oomph_base::{MIB, StreamId};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "buddy",
    summary: "binary buddies: blocks are powers of two, halved and joined again",
    origin: "Knowlton: A fast storage allocator (1965); kernels, and GPU pools of many engines",
    parameters: &[Parameter {
        name: REGION,
        values: "a power of two in bytes",
        default: "64MiB",
        help: "what is taken from the device at least: the highest order",
    }],
    variants: &["region:2MiB"],
    build,
};

const REGION: &str = "region";

/// The smallest block.
const QUANTUM: u64 = 512;
/// Powers of two from [`QUANTUM`] to [`ABSURD`].
const ORDERS: usize = (ABSURD.ilog2() - QUANTUM.ilog2()) as usize + 1;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let mut region = 64 * MIB;
    parameters::read(&ENTRY, parameters, |setting| {
        region = setting.bytes()?;
        Ok(())
    })?;
    if !region.is_power_of_two() || !(QUANTUM..ABSURD).contains(&region) {
        let reason = format!("'{REGION}': {region} bytes are no power of two from {QUANTUM} on");
        return Err(SpecError::BadParameters { strategy: ENTRY.name, reason });
    }
    Ok(Box::new(Pooled::new(Buddies { region, homes: Vec::new() })))
}

/// Free pieces by order, one set a stream.
#[derive(Clone, Debug)]
struct Buddies {
    region: u64,
    homes: Vec<Home>,
}

/// The free pieces of one stream.
#[derive(Clone, Debug)]
struct Home {
    /// Which orders have free pieces.
    occupied: u64,
    /// The first piece of each list.
    heads: [u32; ORDERS],
}

/// The list of pieces of this size, which is a power of two.
#[inline]
fn order_of(size: u64) -> usize {
    (size.trailing_zeros() - QUANTUM.trailing_zeros()) as usize
}

impl Home {
    #[inline]
    fn insert(&mut self, ground: &mut Ground, slot: u32) {
        let order = order_of(ground[slot].size);
        let head = std::mem::replace(&mut self.heads[order], slot);
        ground[slot].links = [NONE, head];
        if head != NONE {
            ground[head].links[0] = slot;
        }
        self.occupied |= 1 << order;
    }

    #[inline]
    fn remove(&mut self, ground: &mut Ground, slot: u32) {
        let piece = &ground[slot];
        let (order, [before, after]) = (order_of(piece.size), piece.links);
        if after != NONE {
            ground[after].links[0] = before;
        }
        if before != NONE {
            ground[before].links[1] = after;
            return;
        }
        self.heads[order] = after;
        if after == NONE {
            self.occupied &= !(1 << order);
        }
    }
}

/// The other half of what a piece was cut from, if it is free and whole, and whether it is the upper one.
#[inline]
fn free_buddy(ground: &Ground, slot: u32) -> Option<(u32, bool)> {
    let piece = &ground[slot];
    let region = ground.region(piece.region);
    if piece.size == region.bytes {
        return None;
    }
    let offset = piece.address - region.address;
    let upper = offset ^ piece.size > offset;
    let buddy = if upper { piece.next } else { piece.previous };
    ground.free_piece(buddy).filter(|other| other.size == piece.size).map(|_| (buddy, upper))
}

impl Policy for Buddies {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < ABSURD).then(|| bytes.next_power_of_two().max(QUANTUM))
    }

    #[inline]
    fn take(
        &mut self,
        ground: &mut Ground,
        _: &mut dyn Device,
        need: &Need,
    ) -> Result<Option<(u32, Outcome)>, DeviceError> {
        let Some(home) = self.homes.get_mut(need.stream.index()) else { return Ok(None) };
        let suitable = home.occupied & (!0 << order_of(need.size));
        if suitable == 0 {
            return Ok(None);
        }
        let slot = home.heads[suitable.trailing_zeros() as usize];
        home.remove(ground, slot);
        let mut size = ground[slot].size;
        if size == need.size {
            return Ok(Some((slot, Outcome::Hit)));
        }
        while size > need.size {
            size /= 2;
            let upper_half = ground.cut(slot, size);
            home.insert(ground, upper_half);
        }
        Ok(Some((slot, Outcome::Split)))
    }

    #[inline]
    fn keep(&mut self, ground: &mut Ground, slot: u32) {
        let owner = ground.region(ground[slot].region).stream.index();
        let home = &mut self.homes[owner];
        let mut slot = slot;
        while let Some((buddy, upper)) = free_buddy(ground, slot) {
            home.remove(ground, buddy);
            slot = if upper { slot } else { buddy };
            ground.join_next(slot);
        }
        home.insert(ground, slot);
    }

    fn welcome(&mut self, ground: &mut Ground, slot: u32, need: &Need) {
        if self.homes.len() <= need.stream.index() {
            self.homes.resize_with(need.stream.index() + 1, || Home { occupied: 0, heads: [NONE; ORDERS] });
        }
        self.keep(ground, slot);
    }

    fn forget(&mut self, ground: &mut Ground, slot: u32) {
        let owner = ground.region(ground[slot].region).stream.index();
        self.homes[owner].remove(ground, slot);
    }

    fn growth(&mut self, need: &Need, _: &Stats, attempt: u32) -> Growth {
        match attempt {
            0 => Growth::Ask(need.size.max(self.region)),
            1 if need.size < self.region => Growth::Ask(need.size),
            _ => Growth::End,
        }
    }

    fn largest_free(&self, _: &Ground, stream: StreamId) -> u64 {
        let occupied = self.homes.get(stream.index()).map_or(0, |home| home.occupied);
        occupied.checked_ilog2().map_or(0, |order| QUANTUM << order)
    }

    fn pool_name(&self, _: &Region) -> &'static str {
        "buddy"
    }

    fn renewed(&self) -> Buddies {
        Buddies { region: self.region, homes: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{StrategySpec, pooled::Trial};
    use oomph_base::{GIB, KIB};

    #[test]
    fn a_region_is_halved_until_the_piece_fits() {
        let mut trial = Trial::new("buddy:region:1MiB", GIB);
        let places = [1, 100 * KIB, 513, 512, 512].map(|bytes| Trial::place(trial.alloc(bytes)));
        // Halves of 1 MiB, 512 KiB ... 1 KiB are left by the first; the others take the smallest that serve.
        assert_eq!(places, [(0, 512), (128 * KIB, 128 * KIB), (KIB, KIB), (512, 512), (2 * KIB, 512)]);
        assert_eq!(trial.regions(), [MIB as i64]);
    }

    #[test]
    fn only_buddies_are_joined() {
        let mut trial = Trial::new("buddy:region:4KiB", GIB);
        let blocks = [0, 1, 2, 3].map(|_| trial.alloc(KIB));
        let largest = |trial: &Trial| trial.strategy.largest_free(StreamId::DEFAULT);
        // Second and third are neighbours, but halves of different halves.
        trial.free(blocks[1]);
        trial.free(blocks[2]);
        assert_eq!(largest(&trial), Some(KIB));
        trial.free(blocks[0]);
        assert_eq!(largest(&trial), Some(2 * KIB));
        trial.free(blocks[3]);
        assert_eq!(largest(&trial), Some(4 * KIB));
    }

    #[test]
    fn a_large_request_has_a_region_of_its_size_and_a_poor_device_gives_a_small_one() {
        let mut trial = Trial::new("buddy:region:2MiB", 12 * MIB);
        assert_eq!(trial.alloc(5 * MIB).size, 8 * MIB);
        trial.alloc(MIB);
        trial.alloc(2 * MIB);
        assert_eq!(trial.regions(), [8, 2, 2].map(|mib| mib * MIB as i64));
        let mut poor = Trial::new("buddy", 12 * MIB);
        poor.alloc(MIB);
        assert_eq!(poor.regions(), [MIB as i64]);
    }

    #[test]
    fn a_region_that_is_no_power_of_two_is_refused() {
        assert!(StrategySpec::from("buddy:region:3MiB").check().is_err());
        assert!(StrategySpec::from("buddy:region:256").check().is_err());
    }
}
