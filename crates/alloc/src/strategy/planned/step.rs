//! The regions that a plan uses, and what happens between two steps: whether a plan is made, kept
//! or given up, and the memory that it needs.

use std::collections::BTreeMap;

use super::{
    PlannedStrategy,
    plan::{ProfiledRequest, StepPlan, StepProfile},
};
use crate::strategy::{
    BlockState, BlockView, Context, SegmentView, Strategy as _, StrategyError, StrategyEvent,
    pooled::{MemoryPiece, PieceTable},
    slots::insert_first_free,
    unless_out_of_memory,
};
use oomph_base::{Address, MIB, StreamId, round_up};

/// One device allocation of a plan, for one stream.
#[derive(Clone, Debug)]
pub(super) struct PlannedRegion {
    pub(super) address: Address,
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    /// Slots of blocks by offset, pending ones included.
    pub(super) blocks: BTreeMap<u64, u32>,
}

impl PlannedRegion {
    /// Whether a range of the region is free. It may be taken by a block that lives longer than it
    /// did in the profiled step.
    pub(super) fn is_free(&self, pieces: &PieceTable, offset: u64, size: u64) -> bool {
        let end = offset + size;
        let before = self.blocks.range(..end).next_back();
        end <= self.bytes && before.is_none_or(|(&start, &slot)| start + pieces[slot].size <= offset)
    }

    /// The first free range of this size.
    pub(super) fn first_free(&self, pieces: &PieceTable, size: u64) -> Option<u64> {
        let mut end = 0;
        for (&offset, &slot) in &self.blocks {
            if offset - end >= size {
                return Some(end);
            }
            end = offset + pieces[slot].size;
        }
        (self.bytes - end >= size).then_some(end)
    }

    pub(super) fn view(&self, pieces: &PieceTable) -> SegmentView {
        let mut blocks = Vec::new();
        let mut end = 0;
        let gap = |from: u64, to: u64| BlockView {
            address: self.address.offset(from),
            size: to - from,
            requested: 0,
            state: BlockState::Free,
        };
        for (&offset, &slot) in &self.blocks {
            if offset > end {
                blocks.push(gap(end, offset));
            }
            blocks.push(pieces[slot].view());
            end = offset + pieces[slot].size;
        }
        if end < self.bytes {
            blocks.push(gap(end, self.bytes));
        }
        SegmentView::new(self.address, self.bytes, self.stream, "planned", blocks)
    }
}

/// Regions are multiples of the device's page.
const REGION_STEP: u64 = 2 * MIB;
/// Once a plan is followed, the fallback's cache is given back at the beginning of this many steps:
/// at the first the blocks of the last unplanned step are free, at the second those that outlived
/// it.
const RELEASES: u32 = 2;
/// The most steps between two plans, for programs that follow none.
const LONGEST_PATIENCE: u32 = 64;

/// The progress of the program, and how well it follows the plan.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PlanProgress {
    /// Steps that have ended.
    finished: u32,
    /// The step whose beginning is not yet handled.
    unsettled: Option<u32>,
    /// How often the cache of the fallback must still be given back.
    releases: u32,
    /// Whether the last step followed the plan: only then does the plan get memory, and do requests
    /// get its offsets.
    pub(super) trusts_plan: bool,
    /// Requests of this step that deviated from the plan.
    deviations: u64,
    /// The plan is given up above this many deviations.
    allowed: u64,
    /// Consecutive steps that deviated too much.
    strikes: u32,
    /// How many plans were made after the first: each doubles the wait for the next.
    plans_remade: u32,
}

impl PlanProgress {
    /// Counts a deviation. With too many, the plan is given up within the step, because its memory
    /// is needed elsewhere.
    pub(super) fn deviate(&mut self) {
        self.deviations += 1;
        self.trusts_plan &= self.deviations <= self.allowed;
    }

    /// Whether requests get the offsets of the plan, and all memory from before the plan has gone back.
    pub(super) fn follows_plan(&self) -> bool {
        self.trusts_plan && self.releases == 0 && self.unsettled.is_none()
    }
}

impl PlannedStrategy {
    /// Ends the present step and begins the next. A repeated call after a failure is not another
    /// step.
    pub(super) fn begin_step(&mut self, number: u32) {
        if self.progress.unsettled.replace(number) == Some(number) {
            return;
        }
        let Some(profile) = &mut self.profile else {
            self.profile = Some(StepProfile::default());
            return;
        };
        let (lifetimes, period) = profile.finish();
        self.progress.finished += 1;
        let deviations = std::mem::take(&mut self.progress.deviations);
        let wanted = match &mut self.plan {
            None => self.progress.finished > self.settings.profile_step,
            Some(plan) => {
                let deviations = deviations + plan.begin_step();
                self.judge_plan(deviations <= self.progress.allowed)
            }
        };
        if wanted {
            self.make_plan(&lifetimes, period);
        }
    }

    /// Judges the plan by the last step. Returns whether to make another plan.
    fn judge_plan(&mut self, fits: bool) -> bool {
        let progress = &mut self.progress;
        if fits {
            if !progress.trusts_plan {
                progress.releases = RELEASES;
                self.counts.peak_reserved_since_plan = 0;
            }
            progress.trusts_plan = true;
            progress.strikes = 0;
            return false;
        }
        progress.trusts_plan = false;
        progress.strikes += 1;
        let patience = 1u32.checked_shl(progress.plans_remade).unwrap_or(LONGEST_PATIENCE).min(LONGEST_PATIENCE);
        let lost = progress.strikes >= patience;
        progress.plans_remade += u32::from(lost);
        lost
    }

    /// Makes a plan from a step, if anything in it can be planned.
    fn make_plan(&mut self, lifetimes: &[ProfiledRequest], period: u32) {
        let plan = StepPlan::new(lifetimes, period);
        if plan.places() == 0 {
            return;
        }
        let share = |share: f64| (share * plan.places() as f64) as u64;
        self.progress.allowed = self.settings.replan_above.map_or(u64::MAX, share);
        self.plan = Some(plan);
        self.counts.plans += 1;
        self.progress.strikes = 0;
    }

    /// The device calls at the beginning of a step. After a failure the next call continues.
    pub(super) fn settle(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        if self.progress.unsettled.is_none() {
            return Ok(());
        }
        if self.progress.releases > 0 {
            self.fallback.trim(cx)?;
            self.progress.releases -= 1;
        }
        self.retire_regions(cx)?;
        if self.progress.trusts_plan {
            self.take_regions(cx)?;
        }
        self.progress.unsettled = None;
        Ok(())
    }

    /// Gives back the empty regions of plans that were given up.
    pub(super) fn retire_regions(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        if self.own.segments > 0 {
            if !self.progress.trusts_plan {
                self.serving.clear();
            }
            self.give_back_regions(cx, true)?;
        }
        Ok(())
    }

    /// Takes the regions that the plan lacks.
    fn take_regions(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let Some(plan) = &self.plan else { return Ok(()) };
        for &(stream, needed) in &plan.needs {
            if self.serving.iter().any(|(served, _)| *served == stream) {
                continue;
            }
            let bytes = round_up(needed, REGION_STEP);
            let Some(address) = unless_out_of_memory(cx.device.alloc(bytes))? else {
                self.counts.regions_refused += 1;
                continue;
            };
            cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream });
            self.own.on_reserve(bytes, 1);
            let region = PlannedRegion { address, bytes, stream, blocks: BTreeMap::new() };
            self.serving.push((stream, insert_first_free(&mut self.regions, region)));
        }
        Ok(())
    }

    /// Gives back the empty regions: all, or only those that the plan no longer uses. Returns
    /// whether there were any.
    pub(super) fn give_back_regions(
        &mut self,
        cx: &mut Context<'_>,
        only_retired: bool,
    ) -> Result<bool, StrategyError> {
        let mut any = false;
        for (number, place) in (0..).zip(&mut self.regions) {
            let Some(region) = place else { continue };
            let retired = self.serving.iter().all(|&(_, serving)| serving != number);
            if !region.blocks.is_empty() || (only_retired && !retired) {
                continue;
            }
            cx.device.free(region.address)?;
            let &mut PlannedRegion { address, bytes, stream, .. } = region;
            cx.sink.event(StrategyEvent::SegmentFree { address, bytes, stream });
            self.own.on_release(bytes, 1);
            self.serving.retain(|&(_, serving)| serving != number);
            *place = None;
            any = true;
        }
        Ok(any)
    }

    /// Removes a planned block: its range of the region is free.
    pub(super) fn remove_planned(&mut self, slot: u32) {
        let MemoryPiece { address, region, .. } = self.blocks[slot];
        self.blocks.remove(slot);
        if let Some(Some(region)) = self.regions.get_mut(region as usize) {
            region.blocks.remove(&(address - region.address.0));
        }
    }

    /// Forgets all planned blocks, so that a failing call leaves only empty regions.
    pub(super) fn vacate_regions(&mut self) {
        let held: Vec<u32> = self.blocks.iter().map(|(slot, _)| slot).collect();
        for slot in held {
            let MemoryPiece { size, requested, .. } = self.blocks[slot];
            self.own.on_free(size);
            self.own.on_reusable(requested, size);
            self.blocks.forget_uses(slot);
            self.remove_planned(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_free_if_no_block_overlaps_it() {
        let mut pieces = PieceTable::default();
        let blocks = BTreeMap::new();
        let mut region = PlannedRegion { address: Address(4096), bytes: 100, stream: StreamId(0), blocks };
        let slot = pieces.insert(MemoryPiece::new(4096 + 20, 30, StreamId(0)));
        region.blocks.insert(20, slot);
        let ranges = [(0, 20), (0, 21), (49, 5), (50, 50), (50, 51), (0, 100), (10, 5)];
        let answers = ranges.map(|(offset, size)| region.is_free(&pieces, offset, size));
        assert_eq!(answers, [true, false, false, true, false, false, true]);
        let sizes: Vec<u64> = region.view(&pieces).blocks.iter().map(|block| block.size).collect();
        assert_eq!(sizes, [20, 30, 50]);
        let found = [20, 21, 50, 51].map(|size| region.first_free(&pieces, size));
        assert_eq!(found, [Some(0), Some(50), Some(50), None]);
        region.blocks.clear();
        assert!(region.blocks.is_empty() && region.is_free(&pieces, 0, 100));
    }
}
