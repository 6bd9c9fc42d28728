//! Out-of-memory failures of a recording: the final one ([`FinalOom`]), and the limit that all of them imply
//! ([`ProcessLimit`], [`RecordedLimit`]).
//!
//! `oomph record --when oom` makes recordings that end with a failure. They do not contain what the program would have
//! done next, and answers must say so.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::{Action, Recording, SnapshotBlockState, StackId, TraceEntry};
use oomph_base::{Address, Bytes, FileText, MIB};
use oomph_pytorch::AllocatorSettings;

/// The number of memory holders in a report.
const MOST_HOLDERS: usize = 3;

/// The out-of-memory failure that ended a program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FinalOom {
    /// The request, rounded as the allocator does.
    pub requested_bytes: u64,
    /// The call site of the request.
    pub site: Option<FileText>,
    /// Allocated bytes.
    pub allocated_bytes: u64,
    /// Reserved bytes.
    pub reserved_bytes: u64,
    /// Free bytes of the device.
    pub device_free_bytes: u64,
    /// All memory that the driver had for the allocator, if the driver refused the request.
    pub room_bytes: Option<u64>,
    /// The limit that the program set for itself, if that refused the request.
    pub own_limit: Option<ProcessLimit>,
    /// The call sites that hold most memory, in descending order; empty without call stacks.
    pub holders: Vec<MemoryHolder>,
}

/// A call site that holds memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryHolder {
    /// The call site.
    pub site: FileText,
    /// How many there are.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl FinalOom {
    /// Reserved bytes that were not allocated, and could not serve the request.
    #[must_use]
    pub const fn cached_bytes(&self) -> u64 {
        self.reserved_bytes.saturating_sub(self.allocated_bytes)
    }
}

impl Recording {
    /// The failure that ends this recording: nothing was allocated after it.
    #[must_use]
    pub fn dead_end(&self) -> Option<FinalOom> {
        let place = self.witnessed.iter().rposition(|entry| entry.action == Action::OutOfMemory)?;
        let (before, after) = self.witnessed.split_at(place);
        let (failed, after) = after.split_first()?;
        if after.iter().any(|entry| entry.action == Action::Alloc) {
            return None;
        }
        // The file has the memory at the end. What was released after the failure is added again.
        let mut reserved_bytes = self.reserved_at_end();
        for entry in after {
            if entry.action.is_release() {
                reserved_bytes = reserved_bytes.saturating_add(entry.size);
            }
        }
        let held = self.held_at_failure(before, after);
        let device_free_bytes = failed.device_free().unwrap_or(0);
        let driver_refused = failed.fills_the_device();
        Some(FinalOom {
            requested_bytes: failed.size,
            site: self.stacks.site(failed.stack).map(FileText::from),
            allocated_bytes: held.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes)),
            reserved_bytes,
            device_free_bytes,
            room_bytes: driver_refused.then(|| reserved_bytes.saturating_add(device_free_bytes)),
            own_limit: self.own_limit().filter(|_| !driver_refused),
            holders: self.holders(&held),
        })
    }

    /// Stack and bytes of all blocks at the failure: those at the end, and those freed after the failure.
    fn held_at_failure(&self, before: &[TraceEntry], after: &[TraceEntry]) -> Vec<(StackId, u64)> {
        let blocks = self.final_segments.iter().flat_map(|segment| &segment.blocks);
        let mut held: Vec<(StackId, u64)> = blocks
            .filter(|block| block.state == SnapshotBlockState::Allocated)
            .map(|block| (block.stack, block.size))
            .collect();
        let freed = after.iter().filter(|entry| entry.action == Action::FreeRequested);
        let mut freed: HashMap<Address, u64> = freed.map(|entry| (entry.address, entry.size)).collect();
        for entry in before.iter().rev() {
            if freed.is_empty() {
                break;
            }
            if entry.action == Action::Alloc
                && let Some(bytes) = freed.remove(&entry.address)
            {
                held.push((entry.stack, bytes));
            }
        }
        held.extend(freed.into_values().map(|bytes| (StackId::NONE, bytes)));
        held
    }

    fn holders(&self, held: &[(StackId, u64)]) -> Vec<MemoryHolder> {
        let mut by_site: BTreeMap<FileText, MemoryHolder> = BTreeMap::new();
        for &(stack, bytes) in held {
            let Some(site) = self.stacks.site(stack).map(FileText::from) else { continue };
            let holder = by_site.entry(site.clone()).or_insert(MemoryHolder { site, ..MemoryHolder::default() });
            holder.blocks += 1;
            holder.bytes = holder.bytes.saturating_add(bytes);
        }
        let mut holders: Vec<MemoryHolder> = by_site.into_values().collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        holders.truncate(MOST_HOLDERS);
        holders
    }
}

/// The driver keeps a little of its memory, and segments are larger than requests.
const DRIVER_RESERVE: u64 = 64 * MIB;

/// The range of a limit on reserved memory that a recording implies. No snapshot contains the limit itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ProcessLimit {
    /// The most memory that was allowed.
    pub at_least_bytes: u64,
    /// The least memory that was refused.
    pub below_bytes: u64,
}

impl ProcessLimit {
    /// Whether the limit can be this much.
    #[must_use]
    pub fn contains(&self, bytes: u64) -> bool {
        (self.at_least_bytes..self.below_bytes).contains(&bytes)
    }
}

/// The limit on reserved memory under which a program was recorded, given by the user or inferred.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RecordedLimit {
    /// The limit; if it was inferred, one value of `range`.
    pub bytes: u64,
    /// All limits that reproduce the recording.
    #[serde(flatten)]
    pub range: ProcessLimit,
    /// The only fraction of the device in `range` with at most three decimals; `bytes` is that fraction then.
    pub fraction: Option<f64>,
    /// The roundest fractions in `range` where there are several.
    pub fractions: Vec<f64>,
    /// The name of the device that the fractions are of. There are no fractions if the recording shows another one.
    pub device: String,
    /// The memory of that device.
    pub device_bytes: u64,
    /// What refused requests.
    pub refused_by: MemoryRefuser,
    /// Whether the limit was inferred from the recording.
    pub inferred: bool,
}

/// What refused memory to a recorded program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryRefuser {
    /// The limit that the program set for itself: the device had free memory.
    OwnLimit,
    /// The driver: the device was full.
    Device,
    /// One of the two: no request failed, so the free memory of the device was not recorded.
    Unknown,
}

impl RecordedLimit {
    /// The limit that the user gives.
    #[must_use]
    pub fn given(bytes: u64) -> RecordedLimit {
        RecordedLimit {
            bytes,
            range: ProcessLimit { at_least_bytes: bytes, below_bytes: bytes.saturating_add(1) },
            fraction: None,
            fractions: Vec::new(),
            device: String::new(),
            device_bytes: 0,
            refused_by: MemoryRefuser::OwnLimit,
            inferred: false,
        }
    }

    /// Whether the limit is likely to be this much or more: whether a fraction with three decimals in the range is, or,
    /// without any, whether the range reaches so far.
    #[must_use]
    pub fn may_reach(&self, bytes: u64) -> bool {
        let last = self.range.below_bytes.saturating_sub(1);
        let thousandth = self.device_bytes as f64 / 1000.0;
        let roundest = ((last as f64 / thousandth).floor() * thousandth) as u64;
        let most = if self.device_bytes > 0 && self.range.contains(roundest) { roundest } else { last };
        most >= bytes
    }

    /// The limit for a reader: its size, or the range in which it is.
    #[must_use]
    pub fn in_words(&self) -> String {
        let RecordedLimit { bytes, range, fractions, device, .. } = self;
        if !self.inferred {
            return Bytes(*bytes).to_string();
        }
        let (from, below) = (range.at_least_bytes / MIB, range.below_bytes.div_ceil(MIB));
        let range = format!("between {from} and {below} MiB");
        if let Some(fraction) = self.fraction {
            return format!("probably {fraction} of the {device} ({}), the only round fraction {range}", Bytes(*bytes));
        }
        match &fractions[..] {
            [] => range,
            [fraction] => format!("{range} (the roundest fraction of the {device} in it is {fraction})"),
            [most @ .., last] => {
                let most: Vec<String> = most.iter().map(f64::to_string).collect();
                format!("{range} (such as {} or {last} of the {device})", most.join(", "))
            }
        }
    }
}

impl TraceEntry {
    /// Whether the device had too little free memory for this failed request, or did not report it.
    #[must_use]
    pub fn fills_the_device(&self) -> bool {
        self.device_free().unwrap_or(0) < self.size.saturating_add(DRIVER_RESERVE)
    }
}

impl Recording {
    /// The limit that the program set for itself, if a request failed while the device had free memory and one limit
    /// explains all failures. A limit below the memory of the device also refuses what the device would refuse.
    #[must_use]
    pub fn own_limit(&self) -> Option<ProcessLimit> {
        let mut failures = self.witnessed.iter().filter(|entry| entry.action == Action::OutOfMemory);
        if failures.all(TraceEntry::fills_the_device) {
            return None;
        }
        self.range_of_limit().filter(|limit| limit.below_bytes < u64::MAX)
    }

    /// The limit that the full device was, if requests failed because of it: all memory that the driver had for the
    /// allocator.
    #[must_use]
    pub fn device_limit(&self) -> Option<RecordedLimit> {
        if self.own_limit().is_some() {
            return None;
        }
        let mut reserved = self.reserved_at_end();
        let failure = self.witnessed.iter().rev().find(|entry| {
            reserved = entry.reserved_before(reserved);
            entry.action == Action::OutOfMemory && entry.fills_the_device()
        });
        let bytes = reserved.saturating_add(failure?.device_free()?);
        let range = self.range_of_limit().filter(|range| range.contains(bytes))?;
        let refused_by = MemoryRefuser::Device;
        Some(RecordedLimit { range, refused_by, inferred: true, ..RecordedLimit::given(bytes) })
    }

    /// The range of one limit that allows all reservations of the recording and refuses all failed requests. Without
    /// failed requests it has no upper end.
    ///
    /// PyTorch compares the limit with the reserved memory and the size of a new segment (`alloc_block`), also for
    /// expandable segments, which then map more or less than that size.
    #[must_use]
    pub fn range_of_limit(&self) -> Option<ProcessLimit> {
        let settings = self.settings_in_force().unwrap_or_default();
        let mut reserved =
            self.witnessed.iter().rev().fold(self.reserved_at_end(), |reserved, entry| entry.reserved_before(reserved));
        // An expandable segment of that time may exceed the limit by a part of its last granule.
        let excess = if settings.expandable_segments { settings.large_segment_size } else { 0 };
        let mut range = ProcessLimit { at_least_bytes: reserved.saturating_sub(excess), below_bytes: u64::MAX };
        let mut before_mapping = None;
        for entry in &self.witnessed {
            let before = reserved;
            reserved = entry.reserved_after(before);
            match entry.action {
                Action::SegmentAlloc => range.at_least_bytes = range.at_least_bytes.max(reserved),
                Action::SegmentMap => drop(before_mapping.get_or_insert(before)),
                Action::Alloc => {
                    let allowed =
                        before_mapping.take().map(|before| before.saturating_add(segment_of(entry, &settings)));
                    range.at_least_bytes = range.at_least_bytes.max(allowed.unwrap_or(0));
                }
                Action::OutOfMemory => {
                    let refused = reserved.saturating_add(segment_of(entry, &settings));
                    range.below_bytes = range.below_bytes.min(refused);
                    before_mapping = None;
                }
                Action::SegmentFree | Action::SegmentUnmap | Action::FreeRequested => before_mapping = None,
                Action::FreeCompleted | Action::Snapshot | Action::Annotate | Action::Unknown => {}
            }
        }
        (range.at_least_bytes < range.below_bytes).then_some(range)
    }

    /// The range of one limit that allows all reservations, and that the requests after these entries would have exceeded
    /// with the memory that was reserved before them.
    #[must_use]
    pub fn range_of_limit_before(&self, entries: &[usize]) -> Option<ProcessLimit> {
        let settings = self.settings_in_force().unwrap_or_default();
        let mut range = self.range_of_limit()?;
        let mut reserved = self.reserved_at_end();
        let mut request = None;
        for (index, entry) in self.witnessed.iter().enumerate().rev() {
            reserved = entry.reserved_before(reserved);
            if matches!(entry.action, Action::Alloc | Action::OutOfMemory) {
                request = Some(entry);
            }
            if entries.binary_search(&index).is_ok() {
                let exceeded = reserved.saturating_add(segment_of(request?, &settings));
                range.below_bytes = range.below_bytes.min(exceeded);
            }
        }
        (range.at_least_bytes < range.below_bytes).then_some(range)
    }

    /// The largest segment that the recorded requests can need.
    #[must_use]
    pub fn largest_segment(&self) -> u64 {
        let settings = self.settings_in_force().unwrap_or_default();
        let requests =
            self.witnessed.iter().filter(|entry| matches!(entry.action, Action::Alloc | Action::OutOfMemory));
        requests.map(|entry| segment_of(entry, &settings)).max().unwrap_or(0)
    }
}

impl TraceEntry {
    /// Reserved bytes after this entry.
    fn reserved_after(&self, before: u64) -> u64 {
        match self.action {
            Action::SegmentAlloc | Action::SegmentMap => before.saturating_add(self.size),
            Action::SegmentFree | Action::SegmentUnmap => before.saturating_sub(self.size),
            _ => before,
        }
    }

    /// Reserved bytes before this entry.
    fn reserved_before(&self, after: u64) -> u64 {
        match self.action {
            Action::SegmentAlloc | Action::SegmentMap => after.saturating_sub(self.size),
            Action::SegmentFree | Action::SegmentUnmap => after.saturating_add(self.size),
            _ => after,
        }
    }
}

/// The size of the segment that a request needs if it finds no block. Failed requests are recorded rounded.
fn segment_of(request: &TraceEntry, settings: &AllocatorSettings) -> u64 {
    // Sizes in a file can be anything; the rounding is made for sizes of memory.
    if request.size > 1 << 60 {
        return u64::MAX;
    }
    let rounded = match request.action {
        Action::OutOfMemory => request.size,
        _ => settings.round_size(request.size),
    };
    settings.allocation_size(rounded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::{Segment, SegmentKind, Snapshot, SnapshotBlock, StackFrame};
    use oomph_base::NoProgress;
    use oomph_base::{MIB, StreamId};

    fn entry(action: Action, address: u64, size: u64) -> TraceEntry {
        TraceEntry { action, address: Address(address), size, ..TraceEntry::default() }
    }

    /// Two segments of 20 MiB, of which one was given back, a block of 12 MiB in the other; then `more`.
    fn recorded(free_bytes: u64, more: &[TraceEntry]) -> Recording {
        let block = |address, size, state| SnapshotBlock {
            address: Address(address),
            size,
            requested_size: size,
            state,
            stack: StackId::default(),
        };
        let freed = more.iter().any(|entry| entry.action == Action::FreeRequested);
        let state = if freed { SnapshotBlockState::Inactive } else { SnapshotBlockState::Allocated };
        let segment = Segment {
            device: 0,
            address: Address(MIB),
            total_size: 20 * MIB,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Large,
            pool: (0, 0),
            expandable: false,
            stack: StackId::default(),
            blocks: vec![block(MIB, 12 * MIB, state), block(13 * MIB, 8 * MIB, SnapshotBlockState::Inactive)],
        };
        let mut entries = vec![
            entry(Action::SegmentAlloc, MIB, 20 * MIB),
            entry(Action::Alloc, MIB, 12 * MIB),
            entry(Action::SegmentAlloc, 64 * MIB, 20 * MIB),
            entry(Action::SegmentFree, 64 * MIB, 20 * MIB),
            entry(Action::OutOfMemory, free_bytes, 30 * MIB),
        ];
        entries.extend_from_slice(more);
        let snapshot = Snapshot { segments: vec![segment], traces: vec![entries], ..Snapshot::default() };
        snapshot.into_recording("died", None, &NoProgress).unwrap()
    }

    #[test]
    fn free_driver_memory_and_cache_are_available() {
        let end = recorded(10 * MIB, &[]).dead_end().unwrap();
        assert_eq!((end.requested_bytes, end.allocated_bytes, end.reserved_bytes), (30 * MIB, 12 * MIB, 20 * MIB));
        assert_eq!((end.room_bytes, end.own_limit, end.cached_bytes()), (Some(30 * MIB), None, 8 * MIB));
    }

    #[test]
    fn a_driver_that_had_enough_did_not_refuse() {
        let end = recorded(300 * MIB, &[]).dead_end().unwrap();
        let own_limit = ProcessLimit { at_least_bytes: 40 * MIB, below_bytes: 50 * MIB };
        assert!(own_limit.contains(40 * MIB) && !own_limit.contains(50 * MIB));
        assert_eq!((end.room_bytes, end.own_limit), (None, Some(own_limit)));
    }

    #[test]
    fn frees_after_the_failure_are_undone() {
        let freed = [entry(Action::FreeRequested, MIB, 12 * MIB), entry(Action::FreeCompleted, MIB, 12 * MIB)];
        let end = recorded(10 * MIB, &freed).dead_end().unwrap();
        assert_eq!((end.allocated_bytes, end.reserved_bytes), (12 * MIB, 20 * MIB));
    }

    #[test]
    fn holders_are_named_by_call_site() {
        let mut died = recorded(10 * MIB, &[entry(Action::FreeRequested, MIB, 12 * MIB)]);
        let mut stack = |line| {
            let frame = died.stacks.intern_frame(StackFrame { filename: "train.py".into(), line, name: "f".into() });
            let again = died.stacks.intern_frame(StackFrame { filename: "main.py".into(), line: 1, name: "m".into() });
            [died.stacks.intern(&[frame]), died.stacks.intern(&[frame, again])]
        };
        let (layer, [optimizer, _]) = (stack(3), stack(9));
        died.witnessed[1].stack = optimizer;
        for (block, stack) in died.final_segments[0].blocks.iter_mut().zip(layer) {
            (block.state, block.stack) = (SnapshotBlockState::Allocated, stack);
        }
        let end = died.dead_end().unwrap();
        let holder = |site: &str, blocks, mib| MemoryHolder { site: site.into(), blocks, bytes: mib * MIB };
        assert_eq!(end.holders, [holder("train.py:3 f", 2, 20), holder("train.py:9 f", 1, 12)]);
        assert_eq!(recorded(10 * MIB, &[]).dead_end().unwrap().holders, []);
    }

    #[test]
    fn a_program_that_went_on_did_not_end_there() {
        assert_eq!(recorded(10 * MIB, &[entry(Action::Alloc, 13 * MIB, MIB)]).dead_end(), None);
        let mut fine = recorded(10 * MIB, &[]);
        fine.witnessed.pop();
        assert_eq!(fine.dead_end(), None);
    }
}

#[cfg(test)]
mod own_limit_tests {
    use super::*;
    use crate::torch::{RecordedSettings, RecordedValue, Snapshot};
    use oomph_base::Address;
    use oomph_base::NoProgress;

    fn entry(action: Action, place: u64, size: u64) -> TraceEntry {
        TraceEntry { action, address: Address(place), size, ..TraceEntry::default() }
    }

    /// 40 of 100 MiB are released before a request of 201 MiB fails, the rest after it.
    fn recording(device_free: u64) -> Recording {
        let entries = vec![
            entry(Action::SegmentAlloc, 1 << 30, 40 * MIB),
            entry(Action::SegmentAlloc, 2 << 30, 60 * MIB),
            entry(Action::SegmentFree, 1 << 30, 40 * MIB),
            entry(Action::OutOfMemory, device_free, 201 * MIB),
            entry(Action::SegmentFree, 2 << 30, 60 * MIB),
        ];
        Snapshot { traces: vec![entries], ..Snapshot::default() }.into_recording("out", None, &NoProgress).unwrap()
    }

    #[test]
    fn a_failure_with_free_memory_implies_a_limit() {
        let limit = ProcessLimit { at_least_bytes: 100 * MIB, below_bytes: (60 + 202) * MIB };
        assert_eq!(recording(100 << 30).own_limit(), Some(limit));
    }

    #[test]
    fn a_full_device_implies_no_limit() {
        assert_eq!(recording(150 * MIB).own_limit(), None);
        let mut served = recording(100 << 30);
        served.witnessed.remove(3);
        assert_eq!(served.own_limit(), None);
    }

    #[test]
    fn mapping_is_allowed_by_segment_size() {
        // 21 MiB need a segment of 22 MiB, and map two granules of 20 MiB: the limit can be below 40 MiB.
        let conf = RecordedValue::Text("expandable_segments:True".into());
        let entries = vec![
            entry(Action::SegmentMap, 1 << 30, 40 * MIB),
            entry(Action::Alloc, 1 << 30, 21 * MIB),
            entry(Action::OutOfMemory, 100 << 30, MIB),
        ];
        let settings = RecordedSettings { values: vec![("PYTORCH_CUDA_ALLOC_CONF".into(), conf)] };
        let snapshot = Snapshot { traces: vec![entries], settings, ..Snapshot::default() };
        let recording = snapshot.into_recording("out", None, &NoProgress).unwrap();
        let limit = recording.own_limit().unwrap();
        assert_eq!((limit.at_least_bytes, limit.below_bytes), (22 * MIB, 42 * MIB));
    }

    #[test]
    fn inferred_limit_in_words() {
        let range = ProcessLimit { at_least_bytes: 7 << 30, below_bytes: 9 << 30 };
        let told = RecordedLimit::given(8 << 30);
        let words = |fraction: Option<f64>, fractions: &[f64]| {
            let (device, fractions) = ("H200".to_owned(), fractions.to_vec());
            RecordedLimit { range, inferred: true, fraction, fractions, device, ..told.clone() }.in_words()
        };
        assert_eq!(told.in_words(), "8.00 GiB");
        assert_eq!(words(None, &[]), "between 7168 and 9216 MiB");
        let one = "probably 0.06 of the H200 (8.00 GiB), the only round fraction between 7168 and 9216 MiB";
        assert_eq!(words(Some(0.06), &[]), one);
        let roundest = "between 7168 and 9216 MiB (the roundest fraction of the H200 in it is 0.06)";
        assert_eq!(words(None, &[0.06]), roundest);
        // 0.014 of the device is 9175 MiB, and 0.015 is beyond the range.
        let some = RecordedLimit { range, inferred: true, device_bytes: 640 << 30, ..told.clone() };
        assert!(some.may_reach(8 << 30) && !some.may_reach(9200 * MIB));
        let unknown = RecordedLimit { range, inferred: true, ..told.clone() };
        assert!(unknown.may_reach((9 << 30) - 1) && !unknown.may_reach(9 << 30));
        assert_eq!(words(None, &[0.05, 0.06]), "between 7168 and 9216 MiB (such as 0.05 or 0.06 of the H200)");
    }

    #[test]
    fn full_device_is_a_limit() {
        let limit = recording(150 * MIB).device_limit().unwrap();
        assert_eq!((limit.bytes, limit.refused_by), (210 * MIB, MemoryRefuser::Device));
        assert_eq!(recording(100 << 30).device_limit(), None);
    }

    #[test]
    fn releases_within_requests_enclose_a_limit() {
        let entries = vec![
            entry(Action::SegmentAlloc, 1 << 30, 40 * MIB),
            entry(Action::SegmentAlloc, 2 << 30, 60 * MIB),
            entry(Action::SegmentFree, 1 << 30, 40 * MIB),
            entry(Action::SegmentAlloc, 3 << 30, 30 * MIB),
            entry(Action::Alloc, 3 << 30, 30 * MIB),
            entry(Action::SegmentFree, 2 << 30, 60 * MIB),
            entry(Action::SegmentFree, 3 << 30, 30 * MIB),
        ];
        let snapshot = Snapshot { traces: vec![entries], ..Snapshot::default() };
        let recording = snapshot.into_recording("retry", None, &NoProgress).unwrap();
        let limit = ProcessLimit { at_least_bytes: 100 * MIB, below_bytes: 130 * MIB };
        assert_eq!(recording.range_of_limit_before(&[2]), Some(limit));
        // Before the second segment there was room for 60 MiB more.
        assert_eq!(recording.range_of_limit_before(&[1, 2]), None);
        assert_eq!(recording.range_of_limit_before(&[4]).map(|range| range.below_bytes), Some(120 * MIB));
    }

    #[test]
    fn contradictory_amounts_imply_no_limit() {
        let mut contradictory = recording(100 << 30);
        contradictory.witnessed[0].size = 400 * MIB;
        contradictory.witnessed[2].size = 400 * MIB;
        assert_eq!(contradictory.own_limit(), None);
    }
}
