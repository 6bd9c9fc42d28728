//! The row that a case leaves in `runs.csv`.
//!
//! One flat struct, because a row is flat: the order of its fields is the order of the columns. On a virtual clock
//! every column is deterministic. What the numbers mean is said in [`measure`](super).

use serde::{Deserialize, Serialize};

use super::{CaseLabel, Obstacle};
use crate::{device::Clock, plan::Needs, replay::OomCause, strategy::Refusal};

/// Goes up whenever a column changes its name or meaning.
pub const SCHEMA: u32 = 1;

/// How a case ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Every request was served.
    Completed,
    /// At least one request failed for want of memory.
    Oom,
    /// It was never run, and the reason says why.
    #[default]
    Skipped,
    /// It was stopped from outside; the figures are those of the part that ran.
    Interrupted,
    /// Something is broken: the trace, the strategy or the device.
    Error,
}

impl Status {
    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Status::Completed => "completed",
            Status::Oom => "oom",
            Status::Skipped => "skipped",
            Status::Interrupted => "interrupted",
            Status::Error => "error",
        }
    }

    /// Whether `--resume` may leave the case alone.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Status::Completed | Status::Oom | Status::Skipped)
    }
}

/// One row of `runs.csv`. A cell is empty where there is nothing to say: no limit, no OOM, nothing free.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CaseRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`CaseLabel::case_id`].
    pub case_id: String,
    /// See [`CaseLabel::suite`].
    pub suite: String,
    /// See [`CaseLabel::workload`].
    pub workload: String,
    /// See [`CaseLabel::strategy`].
    pub strategy: String,
    /// See [`CaseLabel::device`].
    pub device: String,
    /// See [`CaseLabel::limit`].
    pub limit_bytes: Option<u64>,
    /// See [`CaseLabel::seed`].
    pub seed: u64,
    /// Rounds back to back.
    pub repeat: u32,
    /// Which clock all `_ns` columns were read from; empty where nothing ran.
    pub clock: Option<Clock>,
    /// How it ended.
    pub status: Status,
    /// Why, where that is not plain: the missing ability, the error.
    pub reason: String,

    /// Events carried out or left out.
    pub events: u64,
    /// Requests served.
    pub allocs: u64,
    /// Blocks given back.
    pub frees: u64,
    /// Requests that failed.
    pub ooms: u64,

    /// The first failed request: number of the event, from 0.
    pub oom_event: Option<u64>,
    /// Its step.
    pub oom_step: Option<u32>,
    /// Its phase.
    pub oom_phase: Option<String>,
    /// What it asked for.
    pub oom_requested_bytes: Option<u64>,
    /// Free then, on the device and in the strategy's cache together.
    pub oom_free_bytes: Option<u64>,
    /// Of which in the cache.
    pub oom_cached_free_bytes: Option<u64>,
    /// The largest piece of the cache.
    pub oom_largest_free_bytes: Option<u64>,
    /// True exhaustion or fragmentation.
    pub oom_cause: Option<OomCause>,
    /// Who refused.
    pub oom_refused_by: Option<Refusal>,
    /// What kept the request from most of what was free.
    pub oom_obstacle: Option<Obstacle>,
    /// How much that is.
    pub oom_obstacle_bytes: Option<u64>,

    /// What no allocator can do without: most requested bytes alive at one time in the whole trace.
    pub bound_requested_bytes: Option<u64>,
    /// The same with every request rounded up to [`GRAIN`](crate::plan::GRAIN).
    pub bound_rounded_bytes: Option<u64>,
    /// The height of an offline layout of these rounded requests, where one was asked for.
    pub packed_bytes: Option<u64>,
    /// Most bytes asked for at one time.
    pub peak_requested_bytes: u64,
    /// Most bytes in blocks at one time.
    pub peak_allocated_bytes: u64,
    /// Most bytes in blocks and in blocks waiting for a stream.
    pub peak_active_bytes: u64,
    /// Most bytes taken from the device at one time.
    pub peak_reserved_bytes: u64,
    /// Most bytes that `nvidia-smi` would have shown. 0, and empty in files, where nobody can know: see [`Levels`](super::Levels).
    #[serde(with = "unknown_is_zero")]
    pub peak_device_used_bytes: u64,
    /// Number of the event that brought `allocated` to its peak.
    pub peak_allocated_event: Option<u64>,
    /// Number of the event that brought `reserved` to its peak.
    pub peak_reserved_event: Option<u64>,
    /// At the end, before the strategy was closed.
    pub final_requested_bytes: u64,
    /// At the end, before the strategy was closed.
    pub final_allocated_bytes: u64,
    /// At the end, before the strategy was closed.
    pub final_active_bytes: u64,
    /// At the end, before the strategy was closed.
    pub final_reserved_bytes: u64,
    /// At the end, before the strategy was closed; 0, and empty in files, where nobody can know.
    #[serde(with = "unknown_is_zero")]
    pub final_device_used_bytes: u64,

    /// Internal fragmentation at the allocated peak.
    pub internal_fragmentation: Option<f64>,
    /// External fragmentation at the allocated peak.
    pub external_fragmentation: Option<f64>,
    /// External fragmentation at the first failed request.
    pub oom_external_fragmentation: Option<f64>,
    /// Share of `reserved` that was in no block at the allocated peak.
    pub idle_share_at_allocated_peak: Option<f64>,
    /// Share of `reserved` that was in no block at the reserved peak.
    pub idle_share_at_reserved_peak: Option<f64>,
    /// 1 - peak allocated / peak reserved, each at its own time.
    pub peak_gap_share: Option<f64>,

    /// Segments at the end.
    pub segments: u64,
    /// Most segments at one time.
    pub peak_segments: u64,
    /// Requests that needed cached memory to be given back first.
    pub retries: u64,
    /// Requests served by a whole cached block.
    pub hits: u64,
    /// Requests cut from a larger cached block.
    pub splits: u64,
    /// Requests served by new memory from the device.
    pub new_segments: u64,
    /// Requests served by new memory after a release.
    pub releases_and_retries: u64,

    /// From the first event to the last.
    pub elapsed_ns: u64,
    /// Driver calls of all kinds, before the strategy was closed.
    pub driver_calls: u64,
    /// Of which failed.
    pub driver_failures: u64,
    /// Time inside them.
    pub driver_ns: u64,
    /// `cuMemAlloc`.
    pub driver_alloc_calls: u64,
    /// `cuMemAlloc`.
    pub driver_alloc_ns: u64,
    /// `cuMemFree`.
    pub driver_free_calls: u64,
    /// `cuMemFree`.
    pub driver_free_ns: u64,
    /// Waiting for streams, events or the device.
    pub driver_synchronize_calls: u64,
    /// Waiting for streams, events or the device.
    pub driver_synchronize_ns: u64,
    /// Making, recording, querying and destroying events.
    pub driver_event_calls: u64,
    /// Making, recording, querying and destroying events.
    pub driver_event_ns: u64,
    /// Reserving, creating, mapping and their opposites.
    pub driver_mapping_calls: u64,
    /// Reserving, creating, mapping and their opposites.
    pub driver_mapping_ns: u64,
    /// The driver's own stream-ordered pools.
    pub driver_pool_calls: u64,
    /// The driver's own stream-ordered pools.
    pub driver_pool_ns: u64,

    /// Driver time of a request served by a cached block: median.
    pub hit_p50_ns: Option<u64>,
    /// The same: 99th percentile.
    pub hit_p99_ns: Option<u64>,
    /// The same: longest.
    pub hit_max_ns: Option<u64>,
    /// Driver time of a request cut from a cached block: median.
    pub split_p50_ns: Option<u64>,
    /// The same: 99th percentile.
    pub split_p99_ns: Option<u64>,
    /// The same: longest.
    pub split_max_ns: Option<u64>,
    /// Driver time of a request served by new memory: median.
    pub new_segment_p50_ns: Option<u64>,
    /// The same: 99th percentile.
    pub new_segment_p99_ns: Option<u64>,
    /// The same: longest.
    pub new_segment_max_ns: Option<u64>,
    /// Driver time of a request served after a release: median.
    pub release_and_retry_p50_ns: Option<u64>,
    /// The same: 99th percentile.
    pub release_and_retry_p99_ns: Option<u64>,
    /// The same: longest.
    pub release_and_retry_max_ns: Option<u64>,
    /// Driver time of a request that failed: median.
    pub oom_p50_ns: Option<u64>,
    /// The same: 99th percentile.
    pub oom_p99_ns: Option<u64>,
    /// The same: longest.
    pub oom_max_ns: Option<u64>,
    /// Driver time of giving a block back: median.
    pub free_p50_ns: Option<u64>,
    /// The same: 99th percentile.
    pub free_p99_ns: Option<u64>,
    /// The same: longest.
    pub free_max_ns: Option<u64>,

    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_parameter_bytes: u64,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_gradient_bytes: u64,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_optimizer_bytes: u64,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_activation_bytes: u64,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_temporary_bytes: u64,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_workspace_bytes: u64,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_input_bytes: u64,
    /// Bytes in blocks of no known category at the allocated peak.
    pub at_peak_unknown_bytes: u64,
}

impl CaseRecord {
    /// A row with its identity and nothing measured yet.
    #[must_use]
    pub fn unmeasured(label: &CaseLabel, status: Status, reason: &str) -> CaseRecord {
        let mut record = CaseRecord {
            schema: SCHEMA,
            case_id: label.case_id(),
            suite: label.suite.clone(),
            workload: label.workload.clone(),
            strategy: label.strategy.clone(),
            device: label.device.clone(),
            limit_bytes: label.limit,
            seed: label.seed,
            repeat: label.repeat.max(1),
            status,
            ..CaseRecord::default()
        };
        record.set_reason(reason);
        record
    }

    /// The row of a case that was not run.
    #[must_use]
    pub fn skipped(label: &CaseLabel, reason: &str) -> CaseRecord {
        CaseRecord::unmeasured(label, Status::Skipped, reason)
    }

    /// The row of a case that broke before anything could be measured.
    #[must_use]
    pub fn failed(label: &CaseLabel, reason: &str) -> CaseRecord {
        CaseRecord::unmeasured(label, Status::Error, reason)
    }

    /// Most bytes that `nvidia-smi` would have shown, where anybody can know.
    #[must_use]
    pub fn known_device_used_bytes(&self) -> Option<u64> {
        Some(self.peak_device_used_bytes).filter(|&bytes| bytes != 0)
    }

    /// The identity that the row was made from.
    #[must_use]
    pub fn label(&self) -> CaseLabel {
        CaseLabel {
            suite: self.suite.clone(),
            workload: self.workload.clone(),
            strategy: self.strategy.clone(),
            device: self.device.clone(),
            limit: self.limit_bytes,
            seed: self.seed,
            repeat: self.repeat,
        }
    }

    /// Writes down what the source needs, whoever serves it.
    pub fn set_needs(&mut self, needs: &Needs) {
        self.bound_requested_bytes = Some(needs.bound.requested_bytes);
        self.bound_rounded_bytes = Some(needs.bound.rounded_bytes);
        self.packed_bytes = needs.packed_bytes;
    }

    /// The reason on one line: a row is a line, and a line cut short by a crash must be recognisable.
    pub(super) fn set_reason(&mut self, reason: &str) {
        self.reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    }
}

/// A figure of which 0 says that nobody knows it, and which is left out of files then.
mod unknown_is_zero {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands out references")]
    pub(super) fn serialize<S: Serializer>(figure: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        (*figure != 0).then_some(*figure).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        Option::deserialize(deserializer).map(Option::unwrap_or_default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_survives_the_way_through_csv() {
        let label = CaseLabel { suite: "s, with comma".to_owned(), limit: Some(5), repeat: 2, ..CaseLabel::default() };
        let mut record = CaseRecord::failed(&label, "two\nlines");
        record.oom_phase = Some("forward \"quoted\"".to_owned());
        record.clock = Some(Clock::Virtual);
        record.oom_cause = Some(OomCause::Fragmentation);
        record.internal_fragmentation = Some(1.0 / 3.0);
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(&record).unwrap();
        let text = writer.into_inner().unwrap();
        assert_eq!(text.iter().filter(|&&byte| byte == b'\n').count(), 2, "a header and one line");
        let read: CaseRecord = csv::Reader::from_reader(text.as_slice()).deserialize().next().unwrap().unwrap();
        assert_eq!(read, record);
        assert_eq!(read.reason, "two lines");
        assert_eq!(read.label(), label);
    }

    #[test]
    fn every_column_with_a_quantity_names_its_unit() {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(CaseRecord::default()).unwrap();
        let text = String::from_utf8(writer.into_inner().unwrap()).unwrap();
        for column in text.lines().next().unwrap().split(',') {
            assert!(column.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'), "{column}");
            let is_time = ["p50", "p99", "max", "elapsed"].iter().any(|word| column.contains(word));
            assert!(!is_time || column.ends_with("_ns"), "{column}");
        }
    }

    #[test]
    fn only_cases_that_would_end_the_same_way_again_are_final() {
        let statuses = [Status::Completed, Status::Oom, Status::Skipped, Status::Interrupted, Status::Error];
        assert_eq!(statuses.map(Status::is_final), [true, true, true, false, false]);
    }
}
