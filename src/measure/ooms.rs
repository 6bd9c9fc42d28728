//! Requests that failed, with names in place of numbers and the memory as it lay at the first of them.

use serde::{Deserialize, Serialize};

use super::obstacles::{self, KeptBack};
use crate::{
    base::{Bytes, round_up},
    replay::{FailedRequest, Observer, OomCause, ReplayMoment},
    strategy::{EventSink, Layout, Refusal},
};

/// Reports beyond this are only counted.
const MOST_REPORTS: usize = 100;

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomReport {
    /// Number of the event, from 0.
    pub event: u64,
    /// Its step.
    pub step: Option<u32>,
    /// Its phase.
    pub phase: Option<String>,
    /// Its call site, if known.
    pub site: Option<String>,
    /// The stream it was for.
    pub stream: u16,
    /// What was asked for.
    pub requested_bytes: u64,
    /// The same as the strategy rounds it.
    pub rounded_bytes: u64,
    /// What the strategy last asked of the device for it.
    pub asked_bytes: u64,
    /// Who refused.
    pub refused_by: Refusal,
    /// Free on the device, or up to the limit.
    pub device_free_bytes: u64,
    /// Held on the device in whole pages.
    #[serde(default)]
    pub device_held_bytes: u64,
    /// Free in the strategy's cache.
    pub cached_free_bytes: u64,
    /// The largest piece of that, where the strategy knows.
    pub largest_free_bytes: Option<u64>,
    /// True exhaustion or fragmentation.
    pub cause: OomCause,
    /// Where the free memory lay and why it did not serve, most first. Only known of the first failure.
    #[serde(default)]
    pub kept_back: Vec<KeptBack>,
}

impl OomReport {
    fn new(now: &ReplayMoment<'_>, report: &FailedRequest, kept_back: Vec<KeptBack>) -> OomReport {
        let name = |names: &[String], number: usize| names.get(number).filter(|name| !name.is_empty()).cloned();
        OomReport {
            event: report.event,
            step: report.step,
            phase: report.phase.and_then(|phase| name(now.tables.labels(), phase as usize)),
            site: name(now.tables.sites(), report.request.site.index()),
            stream: report.request.stream.0,
            requested_bytes: report.request.bytes,
            rounded_bytes: report.shortage.rounded,
            asked_bytes: report.shortage.asked,
            refused_by: report.shortage.refused_by,
            device_free_bytes: report.device_free,
            device_held_bytes: report.device_held,
            cached_free_bytes: report.cached_free,
            largest_free_bytes: report.largest_free,
            cause: report.cause,
            kept_back,
        }
    }

    /// In words: what was asked, what was free and where, and why that did not help.
    #[must_use]
    pub fn in_words(&self) -> String {
        let rounded = match self.asked_bytes.max(self.rounded_bytes) {
            asked if asked > self.requested_bytes => format!(" ({} of the device)", Bytes(asked)),
            _ => String::new(),
        };
        let largest = match self.largest_free_bytes {
            Some(largest) => format!(", largest cached block {}", Bytes(largest)),
            None => String::new(),
        };
        let free = self.device_free_bytes.saturating_add(self.cached_free_bytes);
        format!(
            "{} asked for{rounded}, {} free{largest}: {}; {}",
            Bytes(self.requested_bytes),
            Bytes(free),
            self.cause.name(),
            obstacles::in_words(&self.kept_back),
        )
    }

    /// In words, that the device had less to give than the limit on it allows, because it is smaller or because others
    /// use it; `None` where the limit itself refused, or the strategy.
    #[must_use]
    pub fn short_of_limit(&self, limit: u64, page_bytes: u64) -> Option<String> {
        let wanted = self.device_held_bytes.saturating_add(round_up(self.asked_bytes, page_bytes));
        (self.refused_by == Refusal::Device && wanted <= limit).then(|| {
            format!(
                "the device refused {} with {} held and {} free: it has less than the limit of {}",
                Bytes(self.asked_bytes),
                Bytes(self.device_held_bytes),
                Bytes(self.device_free_bytes),
                Bytes(limit)
            )
        })
    }
}

/// Watches requests fail.
#[derive(Clone, Debug, Default)]
pub struct Ooms {
    /// The first failed requests, in order.
    pub reports: Vec<OomReport>,
    /// How many more there were.
    pub left_out: u64,
    /// The memory at the first of them, where the strategy can show it.
    pub layout: Option<Layout>,
}

impl EventSink for Ooms {}

impl Observer for Ooms {
    fn out_of_memory(&mut self, now: &ReplayMoment<'_>, report: &FailedRequest) {
        let mut kept_back = Vec::new();
        if self.reports.is_empty() {
            self.layout = now.strategy.layout();
            kept_back = obstacles::obstacles(report, self.layout.as_ref());
        }
        if self.reports.len() == MOST_REPORTS {
            self.left_out += 1;
        } else {
            self.reports.push(OomReport::new(now, report, kept_back));
        }
    }
}
