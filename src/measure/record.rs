//! The identity of a case, its row in `runs.csv`, and which number goes into which column.
//!
//! A row is one flat struct: the order of its fields is the order of the columns. On a virtual clock every column is
//! deterministic. The terms are defined in [`measure`](super).

use serde::{Deserialize, Serialize};

use super::{
    Levels, Obstacle, TagBytes, digits,
    latency::{Durations, EVENT, Latency, MAPPING, Operation, POOL, SYNCHRONIZE},
    lost_share,
    ooms::OomRecorder,
    peaks::{AllocatedPeak, PeakRecorder},
};
use crate::{
    base::{FileText, GIB, KIB, MIB, fnv1a, round_up},
    device::{CallKind, CallLedger, Device, DeviceClock},
    plan::MemoryNeeds,
    pytorch::Release,
    replay::OomCause,
    strategy::{OffBooks, Refusal, Strategy, StrategySpec},
    trace::Category,
};

/// The page of the device memory of NVIDIA's GPUs, in which needs are counted.
const NEED_PAGE: u64 = 2 * MIB;

/// Goes up whenever a column changes its name or meaning.
pub const SCHEMA: u32 = 2;

oomph_base::named_enum! {
    /// How a case ended.
    #[derive(Default)]
    pub enum Status {
        /// Every request was served.
        Completed = "completed",
        /// At least one request failed for want of memory.
        Oom = "oom",
        /// It was never run, and the reason says why.
        #[default]
        Skipped = "skipped",
        /// It was stopped from outside; the figures are those of the part that ran.
        Interrupted = "interrupted",
        /// Something is broken: the trace, the strategy or the device.
        Error = "error",
    }
}

oomph_base::named_enum! {
    /// Whether a source had a part in choosing settings of strategies.
    pub enum Split {
        /// Settings were chosen with it in view.
        Train = "train",
        /// No setting was chosen on it.
        Test = "test",
    }
}

impl Status {
    /// Whether `--resume` may leave the case alone.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Status::Completed | Status::Oom | Status::Skipped)
    }
}

/// One row of `runs.csv`. A cell is empty where there is nothing to say: no limit, no OOM, nothing free. Everything from
/// [`events`](CaseRecord::events) on is empty for a case that did not run.
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
    /// The release of PyTorch whose allocator the strategy is; empty for other strategies.
    pub release: Option<Release>,
    /// See [`CaseLabel::device`].
    pub device: String,
    /// See [`CaseLabel::limit`].
    pub limit_bytes: Option<u64>,
    /// See [`CaseLabel::seed`].
    pub seed: u64,
    /// Rounds back to back.
    pub repeat: u32,
    /// Which clock all `_ns` columns were read from; empty where nothing ran.
    pub clock: Option<DeviceClock>,
    /// How it ended.
    pub status: Status,
    /// Why, where that is not plain: the missing ability, the error.
    pub reason: String,

    /// Events carried out or left out.
    pub events: Option<u64>,
    /// Requests served.
    pub allocs: Option<u64>,
    /// Blocks given back.
    pub frees: Option<u64>,
    /// Requests that failed.
    pub ooms: Option<u64>,

    /// The first failed request: number of the event, from 0.
    pub oom_event: Option<u64>,
    /// Its step.
    pub oom_step: Option<u32>,
    /// Its phase.
    pub oom_phase: Option<FileText>,
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

    /// The program that the workload or recording is a variant of. Figures over a suite count a family once.
    pub family: Option<String>,
    /// Whether settings of strategies were chosen on the family.
    pub split: Option<Split>,
    /// A hash of the requests of the trace, in hexadecimal: sources with one hash are the same pattern.
    pub requests_hash: Option<String>,

    /// What no allocator can do without: most requested bytes alive at one time in the whole trace.
    #[serde(alias = "bound_requested_bytes")]
    pub live_peak_bytes: Option<u64>,
    /// The same with every request rounded up to [`GRAIN`](crate::plan::GRAIN).
    #[serde(alias = "bound_rounded_bytes")]
    pub live_peak_rounded_bytes: Option<u64>,
    /// The height of an offline layout of these rounded requests, where one was asked for.
    pub packed_bytes: Option<u64>,
    /// The least device memory in which the case completes, where that was searched.
    pub needed_bytes: Option<u64>,
    /// Most bytes asked for at one time.
    pub peak_requested_bytes: Option<u64>,
    /// Most bytes in blocks at one time.
    pub peak_allocated_bytes: Option<u64>,
    /// Most bytes in blocks and in blocks waiting for a stream.
    pub peak_active_bytes: Option<u64>,
    /// Most bytes taken from the device at one time.
    pub peak_reserved_bytes: Option<u64>,
    /// Most bytes that `nvidia-smi` would have shown, where that is known: see [`Levels`](super::Levels).
    pub peak_device_used_bytes: Option<u64>,
    /// Number of the event that brought `allocated` to its peak.
    pub peak_allocated_event: Option<u64>,
    /// Number of the event that brought `reserved` to its peak.
    pub peak_reserved_event: Option<u64>,
    /// At the end, before the strategy was closed.
    pub final_requested_bytes: Option<u64>,
    /// At the end, before the strategy was closed.
    pub final_allocated_bytes: Option<u64>,
    /// At the end, before the strategy was closed.
    pub final_active_bytes: Option<u64>,
    /// At the end, before the strategy was closed.
    pub final_reserved_bytes: Option<u64>,
    /// At the end, before the strategy was closed, where that is known.
    pub final_device_used_bytes: Option<u64>,

    /// Internal fragmentation at the allocated peak.
    #[serde(alias = "internal_fragmentation", serialize_with = "digits::optional")]
    pub internal_fragmentation_share: Option<f64>,
    /// External fragmentation at the allocated peak.
    #[serde(alias = "external_fragmentation", serialize_with = "digits::optional")]
    pub external_fragmentation_share: Option<f64>,
    /// External fragmentation at the first failed request.
    #[serde(alias = "oom_external_fragmentation", serialize_with = "digits::optional")]
    pub oom_external_fragmentation_share: Option<f64>,
    /// Share of `reserved` that was in no block at the allocated peak.
    #[serde(alias = "idle_share_at_allocated_peak", serialize_with = "digits::optional")]
    pub idle_at_allocated_peak_share: Option<f64>,
    /// Share of `reserved` that was in no block at the reserved peak.
    #[serde(alias = "idle_share_at_reserved_peak", serialize_with = "digits::optional")]
    pub idle_at_reserved_peak_share: Option<f64>,
    /// 1 - peak allocated / peak reserved, each at its own time.
    #[serde(alias = "peak_gap_share", serialize_with = "digits::optional")]
    pub fragmentation_share: Option<f64>,

    /// Segments at the end.
    pub segments: Option<u64>,
    /// Most segments at one time.
    pub peak_segments: Option<u64>,
    /// Requests that needed cached memory to be given back first.
    pub retries: Option<u64>,
    /// Requests served by a whole cached block.
    pub hits: Option<u64>,
    /// Requests cut from a larger cached block.
    pub splits: Option<u64>,
    /// Requests served by new memory from the device.
    pub new_segments: Option<u64>,
    /// Requests served by new memory after a release.
    pub releases_and_retries: Option<u64>,

    /// From the first event to the last.
    pub elapsed_ns: Option<u64>,
    /// Driver calls of all kinds, before the strategy was closed.
    pub driver_calls: Option<u64>,
    /// Of which failed.
    pub driver_failures: Option<u64>,
    /// Time inside them.
    pub driver_ns: Option<u64>,
    /// `cuMemAlloc`.
    pub driver_alloc_calls: Option<u64>,
    /// `cuMemAlloc`.
    pub driver_alloc_ns: Option<u64>,
    /// `cuMemFree`.
    pub driver_free_calls: Option<u64>,
    /// `cuMemFree`.
    pub driver_free_ns: Option<u64>,
    /// Waiting for streams, events or the device.
    pub driver_synchronize_calls: Option<u64>,
    /// Waiting for streams, events or the device.
    pub driver_synchronize_ns: Option<u64>,
    /// Making, recording, querying and destroying events.
    pub driver_event_calls: Option<u64>,
    /// Making, recording, querying and destroying events.
    pub driver_event_ns: Option<u64>,
    /// Reserving, creating, mapping and their opposites.
    pub driver_mapping_calls: Option<u64>,
    /// Reserving, creating, mapping and their opposites.
    pub driver_mapping_ns: Option<u64>,
    /// The driver's own stream-ordered pools.
    pub driver_pool_calls: Option<u64>,
    /// The driver's own stream-ordered pools.
    pub driver_pool_ns: Option<u64>,

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
    pub at_peak_parameter_bytes: Option<u64>,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_gradient_bytes: Option<u64>,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_optimizer_bytes: Option<u64>,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_activation_bytes: Option<u64>,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_temporary_bytes: Option<u64>,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_workspace_bytes: Option<u64>,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_input_bytes: Option<u64>,
    /// Bytes in blocks of no known category at the allocated peak.
    pub at_peak_unknown_bytes: Option<u64>,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_cache_bytes: Option<u64>,
    /// Bytes in blocks of this category at the allocated peak.
    pub at_peak_logits_bytes: Option<u64>,

    /// The commit of the program that measured the row; set by run folders.
    pub commit: String,
    /// The device on which the row was measured, as it calls itself; set by run folders.
    pub device_name: String,
    /// When the process that measured the row began; set by run folders, and not on a simulated device.
    pub run_started: String,
}

impl CaseRecord {
    /// Bytes that were reserved and in no block, at one moment: at the first failed request, otherwise at the reserved
    /// peak. The second is exact to six digits, as shares in files are.
    #[must_use]
    pub fn idle_bytes(&self) -> Option<u64> {
        let at_peak = || Some(self.idle_at_reserved_peak_share? * self.peak_reserved_bytes? as f64);
        self.oom_cached_free_bytes.or_else(|| at_peak().map(|bytes| bytes.round() as u64))
    }

    /// A row with its identity and nothing measured yet.
    #[must_use]
    pub fn unmeasured(label: &CaseLabel, status: Status, reason: &str) -> CaseRecord {
        let mut record = CaseRecord {
            schema: SCHEMA,
            case_id: label.case_id(),
            suite: label.suite.clone(),
            workload: label.workload.clone(),
            strategy: label.strategy.clone(),
            release: label.release(),
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

    /// Sets what the source needs, independent of the strategy.
    pub fn set_needs(&mut self, needs: &MemoryNeeds) {
        self.live_peak_bytes = Some(needs.bound.requested_bytes);
        self.live_peak_rounded_bytes = Some(needs.bound.rounded_bytes);
        self.packed_bytes = needs.packed_bytes;
        self.requests_hash = Some(format!("{:016x}", needs.requests_hash));
    }

    /// What the case needs as a multiple of the bound, in whole pages: [`needed_bytes`](Self::needed_bytes) over
    /// [`live_peak_rounded_bytes`](Self::live_peak_rounded_bytes). No allocator can hold less than a page.
    #[must_use]
    pub fn need_ratio(&self) -> Option<f64> {
        let bound = round_up(self.live_peak_rounded_bytes.filter(|bound| *bound > 0)?, NEED_PAGE);
        Some(self.needed_bytes? as f64 / bound as f64)
    }

    /// What the case takes as a multiple of the bound where nothing limits it; `None` unless it completed without a limit.
    #[must_use]
    pub fn appetite_ratio(&self) -> Option<f64> {
        let is_free = self.status == Status::Completed && self.limit_bytes.is_none();
        let bound = self.live_peak_rounded_bytes.filter(|bound| *bound > 0 && is_free)?;
        Some(self.peak_reserved_bytes? as f64 / bound as f64)
    }

    /// The row of schema 1 as one of [`SCHEMA`]: a case that did not run had 0 where nothing was measured.
    #[must_use]
    pub fn upgraded(self) -> CaseRecord {
        let measured = CaseRecord { schema: SCHEMA, ..self };
        if measured.clock.is_some() {
            return measured;
        }
        let CaseRecord {
            case_id, suite, workload, strategy, release, device, limit_bytes, seed, repeat, status, ..
        } = measured;
        CaseRecord {
            schema: SCHEMA,
            case_id,
            suite,
            workload,
            strategy,
            release,
            device,
            limit_bytes,
            seed,
            repeat,
            status,
            reason: measured.reason,
            live_peak_bytes: measured.live_peak_bytes,
            live_peak_rounded_bytes: measured.live_peak_rounded_bytes,
            packed_bytes: measured.packed_bytes,
            commit: measured.commit,
            device_name: measured.device_name,
            run_started: measured.run_started,
            ..CaseRecord::default()
        }
    }

    pub(super) fn set_reason(&mut self, reason: &str) {
        self.reason = on_one_line(reason);
    }
}

/// A reason on one line: a row is a line, and a line cut short by a crash must be recognisable.
pub(crate) fn on_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What was run, where, and from which seed. Two cases with the same label give the same deterministic columns.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CaseLabel {
    /// The suite that asked for it, or the command where there was none.
    pub suite: String,
    /// The workload with the parameters that were set, or the name of a recording.
    pub workload: String,
    /// The strategy as users type it.
    pub strategy: String,
    /// The device as users type it.
    pub device: String,
    /// `--limit`: cap on physical bytes.
    pub limit: Option<u64>,
    /// What the workload's random choices start from.
    pub seed: u64,
    /// How often the whole trace runs back to back; 0 counts as 1.
    pub repeat: u32,
}

/// File systems take names of 255 bytes; the hash and the ending need room too.
const LONGEST_READABLE_PART: usize = 160;

impl CaseLabel {
    /// The case in one line: `suite/workload/strategy@device<=limit#seed`, followed by `x` and the number of rounds
    /// where there is more than one.
    ///
    /// ```
    /// use oomph::measure::CaseLabel;
    /// let label = CaseLabel {
    ///     suite: "quick".into(),
    ///     workload: "checkerboard".into(),
    ///     strategy: "caching".into(),
    ///     device: "sim".into(),
    ///     limit: Some(8 << 30),
    ///     seed: 7,
    ///     repeat: 1,
    /// };
    /// assert_eq!(label.case_id(), "quick/checkerboard/caching@sim<=8GiB#7");
    /// ```
    #[must_use]
    pub fn case_id(&self) -> String {
        let mut id = format!("{}/{}/{}@{}", self.suite, self.workload, self.strategy, self.device);
        if let Some(limit) = self.limit {
            id.push_str("<=");
            id.push_str(&exact_bytes(limit));
        }
        id.push_str(&format!("#{}", self.seed));
        if self.repeat > 1 {
            id.push_str(&format!("x{}", self.repeat));
        }
        id
    }

    /// The release of PyTorch whose allocator the strategy is, if it is one.
    #[must_use]
    pub fn release(&self) -> Option<Release> {
        StrategySpec::from(self.strategy.as_str()).release()
    }
}

/// A case as the stem of a file name: letters, digits and a few signs that every file system and shell leaves alone, and
/// a hash that keeps apart what the replacement would throw together.
#[must_use]
pub fn file_stem(case_id: &str) -> String {
    let readable: String = case_id
        .chars()
        .take(LONGEST_READABLE_PART)
        .map(|c| if c.is_ascii_alphanumeric() || "._-=+".contains(c) { c } else { '_' })
        .collect();
    format!("{readable}-{:016x}", fnv1a(case_id.as_bytes()))
}

/// The amount in the largest unit that divides it, so that nothing is rounded away.
fn exact_bytes(bytes: u64) -> String {
    [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")]
        .into_iter()
        .find(|(unit, _)| bytes != 0 && bytes.is_multiple_of(*unit))
        .map_or_else(|| format!("{bytes}B"), |(unit, name)| format!("{}{name}", bytes / unit))
}

/// Which number goes into which column.
impl CaseRecord {
    pub(super) fn note_books(&mut self, strategy: &dyn Strategy, device: &dyn Device) {
        let stats = strategy.stats();
        let last = Levels::new(&stats, device);
        self.final_requested_bytes = Some(last.requested_bytes);
        self.final_allocated_bytes = Some(last.allocated_bytes);
        self.final_active_bytes = Some(last.active_bytes);
        self.final_reserved_bytes = Some(last.reserved_bytes);
        self.final_device_used_bytes = last.device_used_bytes;
        self.peak_device_used_bytes = last.device_used_bytes;
        self.peak_requested_bytes = Some(stats.peak.requested);
        self.peak_allocated_bytes = Some(stats.peak.allocated);
        self.peak_active_bytes = Some(stats.peak.active);
        self.peak_reserved_bytes = Some(stats.peak.reserved);
        self.fragmentation_share = lost_share(stats.peak.allocated, stats.peak.reserved);
        self.allocs = Some(stats.allocs);
        self.frees = Some(stats.frees);
        self.segments = Some(stats.segments);
        self.peak_segments = Some(stats.peak_segments);
        self.retries = Some(stats.retries);
    }

    /// Removes what is not known of a plugin that makes addresses up: it takes its memory from no device.
    pub(super) fn forget_what_is_unknown(&mut self, off_books: OffBooks) {
        if off_books != OffBooks::Unknown {
            return;
        }
        (self.final_reserved_bytes, self.peak_reserved_bytes, self.peak_reserved_event) = (None, None, None);
        (self.segments, self.peak_segments) = (None, None);
        (self.fragmentation_share, self.external_fragmentation_share) = (None, None);
        (self.idle_at_allocated_peak_share, self.idle_at_reserved_peak_share) = (None, None);
        (self.driver_calls, self.driver_failures, self.driver_ns) = (None, None, None);
        for (calls, ns) in [
            (&mut self.driver_alloc_calls, &mut self.driver_alloc_ns),
            (&mut self.driver_free_calls, &mut self.driver_free_ns),
            (&mut self.driver_mapping_calls, &mut self.driver_mapping_ns),
            (&mut self.driver_pool_calls, &mut self.driver_pool_ns),
        ] {
            (*calls, *ns) = (None, None);
        }
    }

    pub(super) fn note_ledger(&mut self, ledger: &CallLedger) {
        let total = ledger.total();
        self.driver_calls = Some(total.count);
        self.driver_failures = Some(total.failures);
        self.driver_ns = Some(total.time.0);
        for (part, calls, ns) in [
            (&[CallKind::MemAlloc][..], &mut self.driver_alloc_calls, &mut self.driver_alloc_ns),
            (&[CallKind::MemFree], &mut self.driver_free_calls, &mut self.driver_free_ns),
            (SYNCHRONIZE, &mut self.driver_synchronize_calls, &mut self.driver_synchronize_ns),
            (EVENT, &mut self.driver_event_calls, &mut self.driver_event_ns),
            (MAPPING, &mut self.driver_mapping_calls, &mut self.driver_mapping_ns),
            (POOL, &mut self.driver_pool_calls, &mut self.driver_pool_ns),
        ] {
            *calls = Some(part.iter().map(|&call| ledger.of(call).count).sum());
            *ns = Some(part.iter().map(|&call| ledger.of(call).time.0).sum());
        }
    }

    pub(super) fn note_peaks(&mut self, peaks: &PeakRecorder) {
        self.peak_device_used_bytes = self.peak_device_used_bytes.max(peaks.device_used);
        if let Some(AllocatedPeak { event, requested, usage, largest_free, .. }) = peaks.allocated {
            let free = usage.reserved.saturating_sub(usage.active);
            self.peak_allocated_event = Some(event);
            self.internal_fragmentation_share = lost_share(requested, usage.allocated);
            self.external_fragmentation_share = largest_free.and_then(|largest| lost_share(largest, free));
            self.idle_at_allocated_peak_share = lost_share(usage.allocated, usage.reserved);
        }
        if let Some((event, usage)) = peaks.reserved {
            self.peak_reserved_event = Some(event);
            self.idle_at_reserved_peak_share = lost_share(usage.allocated, usage.reserved);
        }
    }

    pub(super) fn note_latency(&mut self, latency: &Latency) {
        self.hits = Some(latency.of(Operation::Hit).count());
        self.splits = Some(latency.of(Operation::Split).count());
        self.new_segments = Some(latency.of(Operation::NewSegment).count());
        self.releases_and_retries = Some(latency.of(Operation::ReleaseAndRetry).count());
        for (operation, p50, p99, max) in [
            (Operation::Hit, &mut self.hit_p50_ns, &mut self.hit_p99_ns, &mut self.hit_max_ns),
            (Operation::Split, &mut self.split_p50_ns, &mut self.split_p99_ns, &mut self.split_max_ns),
            (
                Operation::NewSegment,
                &mut self.new_segment_p50_ns,
                &mut self.new_segment_p99_ns,
                &mut self.new_segment_max_ns,
            ),
            (
                Operation::ReleaseAndRetry,
                &mut self.release_and_retry_p50_ns,
                &mut self.release_and_retry_p99_ns,
                &mut self.release_and_retry_max_ns,
            ),
            (Operation::Oom, &mut self.oom_p50_ns, &mut self.oom_p99_ns, &mut self.oom_max_ns),
            (Operation::Free, &mut self.free_p50_ns, &mut self.free_p99_ns, &mut self.free_max_ns),
        ] {
            let durations: &Durations = latency.of(operation);
            *p50 = durations.quantile(0.50).map(|time| time.0);
            *p99 = durations.quantile(0.99).map(|time| time.0);
            *max = durations.max().map(|time| time.0);
        }
    }

    pub(super) fn note_ooms(&mut self, ooms: &OomRecorder) {
        self.ooms = Some(ooms.reports.len() as u64 + ooms.left_out);
        let Some(first) = ooms.reports.first() else { return };
        self.oom_event = Some(first.event);
        self.oom_step = first.step;
        self.oom_phase.clone_from(&first.phase);
        self.oom_requested_bytes = Some(first.requested_bytes);
        self.oom_free_bytes = Some(first.device_free_bytes.saturating_add(first.cached_free_bytes));
        self.oom_cached_free_bytes = Some(first.cached_free_bytes);
        self.oom_largest_free_bytes = first.largest_free_bytes;
        self.oom_cause = Some(first.cause);
        self.oom_refused_by = Some(first.refused_by);
        self.oom_obstacle = first.kept_back.first().map(|most| most.obstacle);
        self.oom_obstacle_bytes = first.kept_back.first().map(|most| most.bytes);
        self.oom_external_fragmentation_share =
            first.largest_free_bytes.and_then(|largest| lost_share(largest, first.cached_free_bytes));
    }

    pub(super) fn note_categories(&mut self, parts: &[TagBytes]) {
        for (category, column) in [
            (Category::Parameter, &mut self.at_peak_parameter_bytes),
            (Category::Gradient, &mut self.at_peak_gradient_bytes),
            (Category::Optimizer, &mut self.at_peak_optimizer_bytes),
            (Category::Activation, &mut self.at_peak_activation_bytes),
            (Category::Temporary, &mut self.at_peak_temporary_bytes),
            (Category::Workspace, &mut self.at_peak_workspace_bytes),
            (Category::Input, &mut self.at_peak_input_bytes),
            (Category::Unknown, &mut self.at_peak_unknown_bytes),
            (Category::Cache, &mut self.at_peak_cache_bytes),
            (Category::Logits, &mut self.at_peak_logits_bytes),
        ] {
            *column = Some(parts.iter().filter(|part| part.category == category).map(|part| part.bytes).sum());
        }
    }
}

#[cfg(test)]
mod record_tests {
    use super::*;

    #[test]
    fn a_row_survives_the_way_through_csv() {
        let label = CaseLabel { suite: "s, with comma".to_owned(), limit: Some(5), repeat: 2, ..CaseLabel::default() };
        let mut record = CaseRecord::unmeasured(&label, Status::Error, "two\nlines");
        record.oom_phase = Some("forward \"quoted\"".into());
        record.clock = Some(DeviceClock::Virtual);
        record.oom_cause = Some(OomCause::Fragmentation);
        record.internal_fragmentation_share = Some(0.333333);
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(&record).unwrap();
        let text = writer.into_inner().unwrap();
        assert_eq!(text.iter().filter(|&&byte| byte == b'\n').count(), 2, "a header and one line");
        let read: CaseRecord = csv::Reader::from_reader(text.as_slice()).deserialize().next().unwrap().unwrap();
        assert_eq!(read, record);
        assert_eq!(read.reason, "two lines");
        assert_eq!((read.suite, read.limit_bytes, read.repeat), (label.suite, label.limit, label.repeat));
    }

    #[test]
    fn row_of_schema_1_has_no_figures_for_a_case_that_did_not_run() {
        let text = "schema,case_id,clock,status,events,bound_requested_bytes,peak_reserved_bytes,peak_gap_share,driver_ns\n\
                    1,a,,skipped,0,7,0,,0\n\
                    1,b,virtual,completed,3,7,0,0.25,0\n";
        let rows = csv::Reader::from_reader(text.as_bytes()).into_deserialize().map(|row| {
            let row: CaseRecord = row.unwrap();
            row.upgraded()
        });
        let [skipped, completed] = rows.collect::<Vec<_>>().try_into().unwrap();
        assert_eq!((skipped.schema, skipped.case_id.as_str(), skipped.status), (SCHEMA, "a", Status::Skipped));
        assert_eq!((skipped.events, skipped.peak_reserved_bytes, skipped.driver_ns), (None, None, None));
        assert_eq!((skipped.live_peak_bytes, completed.live_peak_bytes), (Some(7), Some(7)));
        assert_eq!((completed.events, completed.peak_reserved_bytes, completed.driver_ns), (Some(3), Some(0), Some(0)));
        assert_eq!(completed.fragmentation_share, Some(0.25));
    }

    #[test]
    fn cells_of_a_case_that_did_not_run_are_empty_and_read_back_as_unknown() {
        let record = CaseRecord::unmeasured(&CaseLabel::default(), Status::Skipped, "no such ability");
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(&record).unwrap();
        let text = writer.into_inner().unwrap();
        let mut reader = csv::Reader::from_reader(text.as_slice());
        let header = reader.headers().unwrap().clone();
        let cells = reader.records().next().unwrap().unwrap();
        let figures = header.iter().zip(&cells).skip_while(|(name, _)| *name != "events");
        assert_eq!(figures.filter(|(_, cell)| !cell.is_empty()).collect::<Vec<_>>(), []);
        assert_eq!(cells.deserialize::<CaseRecord>(Some(&header)).unwrap(), record);
    }

    #[test]
    fn need_is_in_pages_and_appetite_without_a_limit() {
        let record = CaseRecord {
            status: Status::Completed,
            live_peak_rounded_bytes: Some(MIB),
            needed_bytes: Some(2 * MIB),
            peak_reserved_bytes: Some(20 * MIB),
            ..CaseRecord::default()
        };
        assert_eq!((record.need_ratio(), record.appetite_ratio()), (Some(1.0), Some(20.0)));
        let limited = CaseRecord { limit_bytes: Some(GIB), needed_bytes: None, ..record.clone() };
        assert_eq!((limited.need_ratio(), limited.appetite_ratio()), (None, None));
        let failed = CaseRecord { status: Status::Oom, ..record };
        assert_eq!(failed.appetite_ratio(), None);
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

#[cfg(test)]
mod label_tests {
    use super::*;

    fn label() -> CaseLabel {
        CaseLabel {
            suite: "quick".to_owned(),
            workload: "varlen".to_owned(),
            strategy: "caching:max_split_size_mb:128".to_owned(),
            device: "sim:80GiB".to_owned(),
            limit: None,
            seed: 0,
            repeat: 0,
        }
    }

    #[test]
    fn case_id_omits_defaults() {
        assert_eq!(label().case_id(), "quick/varlen/caching:max_split_size_mb:128@sim:80GiB#0");
        let limited = CaseLabel { limit: Some(3 * MIB), repeat: 3, ..label() };
        assert_eq!(limited.case_id(), "quick/varlen/caching:max_split_size_mb:128@sim:80GiB<=3MiB#0x3");
    }

    #[test]
    fn limits_are_never_rounded_in_an_id() {
        assert_eq!(exact_bytes(GIB + 1), "1073741825B");
        assert_eq!(exact_bytes(1536 * MIB), "1536MiB");
        assert_eq!(exact_bytes(0), "0B");
    }

    #[test]
    fn file_names_are_safe_short_and_unique() {
        let stem = file_stem(&label().case_id());
        assert!(stem.chars().all(|c| c.is_ascii_alphanumeric() || "._-=+".contains(c)), "{stem}");
        let long = CaseLabel { workload: "w/".repeat(400), ..label() };
        assert!(file_stem(&long.case_id()).len() < 200);
        assert_ne!(file_stem("a/b"), file_stem("a:b"));
    }
}
