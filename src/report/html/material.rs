//! What the sections share: the cases in groups that may be compared, their titles, and a colour for every strategy.

use super::{
    super::scenario::{CaseGroup, groups, is_contender, strategies, title},
    element::{Cell, breakable},
    gather::Gathered,
};
use crate::measure::{CaseRecord, Status};

/// There are so many colours; beyond them they repeat, with another dash.
const COLOURS: usize = 8;

/// The cases of a page, ready to be told about.
pub(super) struct Material<'a> {
    pub(super) gathered: &'a Gathered<'a>,
    pub(super) groups: Vec<CaseGroup<'a>>,
    /// A title for every group.
    pub(super) titles: Vec<String>,
    /// In the order of their colours.
    pub(super) strategies: Vec<&'a str>,
}

impl<'a> Material<'a> {
    pub(super) fn new(gathered: &'a Gathered<'a>) -> Material<'a> {
        let groups = groups(&gathered.records);
        let titles = groups.iter().map(|group| title(&group.scenario, &groups)).collect();
        let mut names = strategies(&gathered.records);
        for threshold in gathered.thresholds() {
            if !names.contains(&threshold.strategy.as_str()) {
                names.push(&threshold.strategy);
            }
        }
        Material { gathered, groups, titles, strategies: names }
    }

    /// Groups with their titles.
    pub(super) fn titled(&self) -> impl Iterator<Item = (&CaseGroup<'a>, &str)> {
        self.groups.iter().zip(self.titles.iter().map(String::as_str))
    }

    /// The place of a strategy in the list.
    pub(super) fn place(&self, strategy: &str) -> usize {
        self.strategies.iter().position(|&known| known == strategy).unwrap_or(0)
    }

    /// The name of a strategy with its colour before it.
    pub(super) fn marked(&self, strategy: &str) -> String {
        format!("<span class=\"swatch c{}\"></span>{}", self.place(strategy) % COLOURS, breakable(strategy))
    }

    /// The same as a cell.
    pub(super) fn strategy(&self, strategy: &str) -> Cell {
        Cell::html(self.marked(strategy), strategy).with_class("strategy")
    }
}

/// The case of a group that took least of the device, where there was a choice.
pub(super) fn least<'a>(group: &CaseGroup<'a>) -> Option<&'a CaseRecord> {
    group.least_used()?;
    known_use(group).min_by_key(|record| record.peak_device_used_bytes)
}

/// The case of a group that took most of the device.
pub(super) fn most<'a>(group: &CaseGroup<'a>) -> Option<&'a CaseRecord> {
    known_use(group).max_by_key(|record| record.peak_device_used_bytes)
}

/// The contenders of a group whose device memory use is known.
fn known_use<'a>(group: &CaseGroup<'a>) -> impl Iterator<Item = &'a CaseRecord> {
    contenders(group).filter(|record| record.peak_device_used_bytes.is_some())
}

/// The case of a group that spent least time in the driver, where there was a choice.
pub(super) fn fastest<'a>(group: &CaseGroup<'a>) -> Option<&'a CaseRecord> {
    if contenders(group).count() < 2 { None } else { contenders(group).min_by_key(|record| record.driver_ns) }
}

fn contenders<'a>(group: &CaseGroup<'a>) -> impl Iterator<Item = &'a CaseRecord> {
    group.records.iter().copied().filter(|record| is_contender(record))
}

/// Cases in which memory ran out.
pub(super) fn out_of_memory<'a>(group: &CaseGroup<'a>) -> impl Iterator<Item = &'a CaseRecord> {
    group.records.iter().copied().filter(|record| record.status == Status::Oom)
}

/// When memory ran out: the step, with its phase, or the event.
pub(super) fn moment(record: &CaseRecord) -> String {
    match (record.oom_step, &record.oom_phase, record.oom_event) {
        (Some(step), Some(phase), _) => format!("step {step}, {phase}"),
        (Some(step), None, _) => format!("step {step}"),
        (None, Some(phase), Some(event)) => format!("{phase}, event {event}"),
        (None, _, Some(event)) => format!("event {event}"),
        (None, _, None) => String::new(),
    }
}
