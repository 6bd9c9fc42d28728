//! Between two steps: whether a plan is made, and the memory that it needs.

use super::{
    Planned,
    plan::Plan,
    profile::{Lifetime, Profile},
    region::Region,
};
use crate::strategy::{Block, Context, Strategy as _, StrategyError, StrategyEvent};
use oomph_base::{MIB, round_up};

/// What the device hands out at once anyway.
const REGION_STEP: u64 = 2 * MIB;
/// Steps at whose beginning the fallback's cache is given back, once a plan is followed: at the first the blocks of the
/// last step without regions are free, at the second those that had outlived it.
const RELEASES: u32 = 2;
/// How rarely plans are made at last where none ever holds.
const MOST_PATIENT: u32 = 64;

/// How far the program has got, and how well the plan does.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// Steps that are over.
    finished: u32,
    /// The step whose beginning is not yet dealt with.
    unsettled: Option<u32>,
    /// How often the cache of the fallback is still to be given back.
    releases: u32,
    /// The last step went by the plan: only then is it worth memory.
    trusts_plan: bool,
    /// Requests of this step that did not go as planned.
    deviations: u64,
    /// How many may be before the plan is given up.
    allowed: u64,
    /// Steps in a row that deviated too much.
    strikes: u32,
    /// How many more plans were made than the first: each makes the next one rarer.
    plans_remade: u32,
}

impl Progress {
    /// A request did not go as planned. Where there are too many, the plan is given up in the middle of the step: its
    /// memory is wanted elsewhere.
    pub(super) fn deviate(&mut self) {
        self.deviations += 1;
        self.trusts_plan &= self.deviations <= self.allowed;
    }

    /// Whether requests get the places of the plan.
    pub(super) fn trusts_plan(&self) -> bool {
        self.trusts_plan
    }

    /// Whether all memory of the time before has gone back, too.
    pub(super) fn follows_plan(&self) -> bool {
        self.trusts_plan && self.releases == 0 && self.unsettled.is_none()
    }
}

impl Planned {
    /// A step is over and the next one begins. A call that is made again because it failed is not another step.
    pub(super) fn begin_step(&mut self, number: u32) {
        if self.progress.unsettled.replace(number) == Some(number) {
            return;
        }
        let Some(profile) = &mut self.profile else {
            self.profile = Some(Profile::default());
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
            self.adopt(&lifetimes, period);
        }
    }

    /// The last step went by the plan, or not. Says whether it is time for another.
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
        let patience = 1u32.checked_shl(progress.plans_remade).unwrap_or(MOST_PATIENT).min(MOST_PATIENT);
        let lost = progress.strikes >= patience;
        progress.plans_remade += u32::from(lost);
        lost
    }

    /// Makes a plan from a step, if anything in it can be planned.
    fn adopt(&mut self, lifetimes: &[Lifetime], period: u32) {
        let plan = Plan::new(lifetimes, period);
        if plan.places() == 0 {
            return;
        }
        let share = |share: f64| (share * plan.places() as f64) as u64;
        self.progress.allowed = self.settings.replan_above.map_or(u64::MAX, share);
        self.plan = Some(plan);
        self.counts.plans += 1;
        self.progress.strikes = 0;
    }

    /// What the beginning of a step asks of the device. Where a call fails, the next one goes on from there.
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

    /// Gives back the regions of plans that were given up, as soon as nothing lies in them.
    pub(super) fn retire_regions(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        if self.own.segments > 0 {
            if !self.progress.trusts_plan {
                self.serving.clear();
            }
            self.give_back_regions(cx, true)?;
        }
        Ok(())
    }

    /// Takes the regions that the plan needs and does not have.
    fn take_regions(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let Some(plan) = &self.plan else { return Ok(()) };
        for &(stream, needed) in &plan.needs {
            if self.serving.iter().any(|(served, _)| *served == stream) {
                continue;
            }
            let bytes = round_up(needed, REGION_STEP);
            let address = match cx.device.alloc(bytes) {
                Ok(address) => address,
                Err(error) if error.is_out_of_memory() => {
                    self.counts.regions_refused += 1;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream });
            self.own.on_reserve(bytes, 1);
            let number = self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len());
            let region = Some(Region::new(address, bytes, stream));
            match self.regions.get_mut(number) {
                Some(place) => *place = region,
                None => self.regions.push(region),
            }
            self.serving.push((stream, number as u32));
        }
        Ok(())
    }

    /// Gives back the regions in which nothing lies: all, or only those that the plan no longer uses. Says whether there
    /// were any.
    pub(super) fn give_back_regions(
        &mut self,
        cx: &mut Context<'_>,
        only_retired: bool,
    ) -> Result<bool, StrategyError> {
        let mut any = false;
        for (number, place) in (0..).zip(&mut self.regions) {
            let Some(region) = place else { continue };
            let retired = self.serving.iter().all(|&(_, serving)| serving != number);
            if !region.is_empty() || (only_retired && !retired) {
                continue;
            }
            cx.device.free(region.address)?;
            let &mut Region { address, bytes, stream, .. } = region;
            cx.sink.event(StrategyEvent::SegmentFree { address, bytes, stream });
            self.own.on_release(bytes, 1);
            self.serving.retain(|&(_, serving)| serving != number);
            *place = None;
            any = true;
        }
        Ok(any)
    }

    /// Forgets all planned blocks, so that what a failing call leaves behind is an empty region.
    pub(super) fn vacate_regions(&mut self) -> Result<(), StrategyError> {
        let held: Vec<Block> = self.blocks.iter().map(|(block, _)| block).collect();
        for block in held {
            let (size, tenant) = self.blocks.remove(&block)?;
            self.own.on_free(size);
            self.own.on_reusable(tenant.requested, size);
            if let Some(region) = self.region(tenant.region) {
                region.vacate(tenant.offset);
            }
        }
        self.uses.clear();
        Ok(())
    }
}
