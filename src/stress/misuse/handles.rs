//! Handles and pointers that name no block, or no longer.

use super::stage::{Stage, Unplayable};
use crate::{
    base::{Address, KIB, MIB, Nanos, StreamId},
    strategy::{Block, Caller, Freed},
};

const HOME: StreamId = StreamId::DEFAULT;
const ELSEWHERE: StreamId = StreamId(1);
/// A size that every strategy serves.
pub(super) const SMALL: u64 = 4 * KIB;
/// Longer than all driver calls of a scenario together.
const LONG: Nanos = Nanos(20_000_000);

pub(super) fn double_free(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    stage.free(block)?;
    stage.wrongly_free(block, Caller::default());
    Ok(())
}

pub(super) fn double_free_reused(stage: &mut Stage) -> Result<(), Unplayable> {
    let (stale, _) = reused(stage)?;
    stage.wrongly_free(stale, Caller::default());
    Ok(())
}

pub(super) fn double_free_waiting(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    if !stage.keep_busy(ELSEWHERE, LONG)? {
        return Err(Unplayable::NotApplicable("the device has no work to wait for"));
    }
    stage.used_on(&block, ELSEWHERE)?;
    match stage.free(block)? {
        Freed::Later => stage.wrongly_free(block, Caller::default()),
        Freed::Now => return Err(Unplayable::NotApplicable("its frees do not wait")),
    }
    Ok(())
}

pub(super) fn foreign_pointer(stage: &mut Stage) -> Result<(), Unplayable> {
    // First, for there are strategies that take all memory at once.
    let address = stage.device.alloc(2 * MIB)?;
    stage.foreign = Some(address);
    let [block, _, _] = three(stage)?;
    stage.wrongly_free(Block { address, ..block }, Caller::default());
    stage.wrongly_use(&Block { address, ..block }, ELSEWHERE);
    Ok(())
}

pub(super) fn interior_pointer(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    for offset in [1, 256, block.size / 2, block.size - 1] {
        let inside = Block { address: block.address.offset(offset), ..block };
        stage.wrongly_use(&inside, ELSEWHERE);
        stage.wrongly_free(inside, Caller::default());
    }
    Ok(())
}

pub(super) fn null_pointer(stage: &mut Stage) -> Result<(), Unplayable> {
    let [block, freed, _] = three(stage)?;
    // A vacant slot is often marked by a null address.
    stage.free(freed)?;
    for block in [block, freed, Block { generation: freed.generation.wrapping_add(1), ..freed }] {
        let nowhere = Block { address: Address::NULL, ..block };
        stage.wrongly_use(&nowhere, ELSEWHERE);
        stage.wrongly_free(nowhere, Caller::default());
    }
    Ok(())
}

pub(super) fn forged_handle(stage: &mut Stage) -> Result<(), Unplayable> {
    let [block, other, _] = three(stage)?;
    let forged = [
        Block { generation: block.generation.wrapping_add(1), ..block },
        Block { generation: u32::MAX, ..block },
        Block { slot: u32::MAX, ..block },
        Block { slot: u32::MAX - 1, ..block },
        Block { address: Address(u64::MAX - 255), ..block },
        Block { slot: other.slot, generation: other.generation, ..block },
    ];
    for forged in forged {
        stage.wrongly_use(&forged, ELSEWHERE);
        stage.wrongly_free(forged, Caller::default());
    }
    Ok(())
}

pub(super) fn wrong_size(stage: &mut Stage) -> Result<(), Unplayable> {
    for wrong in [0, 1, SMALL / 2, 64 * MIB, u64::MAX] {
        let [_, block, _] = three(stage)?;
        stage.wrongly_use(&Block { size: wrong, ..block }, ELSEWHERE);
        stage.wrongly_free(Block { size: wrong, ..block }, Caller::default());
    }
    Ok(())
}

pub(super) fn use_after_free(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    stage.free(block)?;
    stage.wrongly_use(&block, ELSEWHERE);
    Ok(())
}

pub(super) fn use_after_reuse(stage: &mut Stage) -> Result<(), Unplayable> {
    let (stale, _) = reused(stage)?;
    stage.wrongly_use(&stale, ELSEWHERE);
    Ok(())
}

pub(super) fn free_after_trim(stage: &mut Stage) -> Result<(), Unplayable> {
    let block = trimmed(stage)?;
    stage.wrongly_free(block, Caller::default());
    Ok(())
}

pub(super) fn use_after_trim(stage: &mut Stage) -> Result<(), Unplayable> {
    let block = trimmed(stage)?;
    stage.wrongly_use(&block, ELSEWHERE);
    Ok(())
}

pub(super) fn free_after_close(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    stage.close()?;
    stage.wrongly_free(block, Caller::default());
    Ok(())
}

pub(super) fn use_after_close(stage: &mut Stage) -> Result<(), Unplayable> {
    let [_, block, _] = three(stage)?;
    stage.close()?;
    stage.wrongly_use(&block, ELSEWHERE);
    Ok(())
}

/// Three neighbours, so that the one in the middle has something to damage.
pub(super) fn three(stage: &mut Stage) -> Result<[Block; 3], Unplayable> {
    Ok([stage.alloc(SMALL, HOME)?, stage.alloc(SMALL, HOME)?, stage.alloc(SMALL, HOME)?])
}

/// A handle whose block is gone, and the block that came after it; most strategies put it in the same place.
fn reused(stage: &mut Stage) -> Result<(Block, Block), Unplayable> {
    let [_, stale, _] = three(stage)?;
    stage.free(stale)?;
    let fresh = stage.alloc(SMALL, HOME)?;
    if stage.knows_only_addresses() && stale.address == fresh.address {
        return Err(Unplayable::NotApplicable("the address is the next block's own: nobody could tell"));
    }
    if stale == fresh {
        stage.findings.push("a block has the very handle of the one before it".to_owned());
    }
    Ok((stale, fresh))
}

/// A block whose memory went back to the device.
fn trimmed(stage: &mut Stage) -> Result<Block, Unplayable> {
    let block = stage.alloc(SMALL, HOME)?;
    stage.free(block)?;
    stage.trim()?;
    Ok(block)
}
