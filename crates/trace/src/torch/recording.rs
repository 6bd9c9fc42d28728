//! A recording of one device: the trace of the program, the recorded actions of its allocator, and what is unknown.
//!
//! `replay` runs the trace under any strategy. `verify` runs the model of PyTorch's allocator and compares its actions
//! with [`witnessed`](Recording::witnessed), entry by entry, from [`initial`](Recording::initial) to
//! [`final_segments`](Recording::final_segments). [`GivenFacts`] are what a user says about a recording because its file does
//! not contain it.

use super::{
    Action, Annotation, DEFAULT_POOL, EntryNote, HostMemory, InitialMemory, MemoryLives, MemoryRefuser, PoolKey,
    RecordedLimit, RecordedRelease, RecordedSettings, ReleaseContradiction, RequestPools, Segment, SettingsOrigin,
    Snapshot, SnapshotBlockState, Stacks, TraceEntry,
    rewind::{RecordingEnd, rewind},
    to_trace::to_trace,
};
use std::sync::Arc;

use crate::{EventReader, InitialLayout, Source, TableFull, Trace, TraceError};
use oomph_base::{Address, NoProgress, PlacementCall, Progress};
use oomph_pytorch::{AllocatorSettings, AllocatorSettingsError, Release};

/// The recording of one device.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The actions of the program. Blocks that existed before come first, in their own phase.
    pub trace: Trace,
    /// The device.
    pub device: u32,
    /// All devices of the snapshot, ascending.
    pub devices: Vec<u32>,
    /// The recorded actions of the allocator, oldest first. Stream numbers are those of the trace.
    pub witnessed: Vec<TraceEntry>,
    /// The allocator's settings.
    pub settings: RecordedSettings,
    /// The memory before the first entry.
    pub initial: InitialMemory,
    /// The memory at the end, in the order of the file.
    pub final_segments: Vec<Segment>,
    /// Annotations of the program on this device.
    pub annotations: Vec<Annotation>,
    /// The call stacks of entries, segments and blocks.
    pub stacks: Stacks,
    /// Stream handles, by number.
    pub streams: Vec<u64>,
    /// Private pools of entries, by number.
    pub pools: Vec<(u64, u64)>,
    /// The entries before which the program called `empty_cache`, ascending; the number of entries stands for the end.
    /// Without a model of the allocator, only the calls that nothing else explains are found.
    pub empty_caches: Vec<usize>,
    /// The pools that requests use. Without a model of the allocator, memory that was released before the end counts as
    /// memory of the default pool, unless entries have the pool.
    pub request_pools: RequestPools,
    /// The limit on reserved memory under which the program ran, as far as a model of the allocator knows it.
    pub limit: Option<RecordedLimit>,
    /// The release of PyTorch.
    pub release: RecordedRelease,
    /// Where the settings come from.
    pub settings_from: SettingsOrigin,
    /// Page-locked memory of the host.
    pub host: HostMemory,
    /// Notes of entries, by number.
    pub notes: Vec<EntryNote>,
    /// What is unknown.
    pub gaps: RecordingGaps,
}

/// What is unknown in a recording. [`sentences`](RecordingGaps::sentences) describes it for users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordingGaps {
    /// Blocks that were live before the recording began.
    pub alive_before: u64,
    /// Their known bytes.
    pub alive_before_bytes: u64,
    /// The number of them with an estimated size.
    pub sizes_estimated: u64,
    /// Entries that contradict the final segments or each other.
    pub contradictions: u64,
    /// Frees that waited for another stream. The stream is not recorded.
    pub held_back_frees: u64,
    /// The number of them for which several streams are possible, or one that allocates nothing.
    pub streams_guessed: u64,
    /// Releases of memory just before a request got new memory: by the request, or by `empty_cache` before it.
    pub unclear_releases: u64,
    /// Entries with an earlier time than the previous entry.
    pub clock_steps_back: u64,
    /// Call sites that were left out because there are too many.
    pub sites_left_out: u64,
    /// What the file does not contain, one sentence each.
    pub missing: Vec<String>,
    /// What its release does not write yet, one sentence each.
    pub not_yet: Vec<String>,
}

impl RecordingGaps {
    /// What is unknown, one sentence each.
    #[must_use]
    pub fn sentences(&self) -> Vec<String> {
        let bytes = oomph_base::Bytes(self.alive_before_bytes);
        let guesses = format!(
            "of {} frees that waited for another stream do not tell which: the most recently active is taken",
            self.held_back_frees
        );
        let counted = [
            (self.alive_before, &*format!("blocks ({bytes}) were there before the recording")),
            (self.sizes_estimated, "of them were freed in it, and their size is an estimate"),
            (self.contradictions, "entries contradict others or the final state"),
            (self.streams_guessed, &guesses),
            (self.unclear_releases, "releases are the allocator's own or an empty_cache just before"),
            (self.clock_steps_back, "entries have a time before their predecessor"),
            (self.sites_left_out, "call sites are left out, there are too many"),
        ];
        let counted = counted.into_iter().filter(|(count, _)| *count > 0);
        let mut sentences: Vec<String> = counted.map(|(count, what)| format!("{count} {what}")).collect();
        sentences.extend(self.missing.iter().chain(&self.not_yet).cloned());
        sentences
    }
}

/// The least number of requests from which a recording that begins in the middle can be judged. A step of a training
/// program makes more.
const LEAST_REQUESTS: u64 = 100;

/// Why a recording contains too little of its program to judge it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum HistoryGap {
    /// It has no request, only the memory at the end.
    #[error(
        "it has no history of requests, only the memory at the end. Enable the history before the first step; \
         `oomph record` prints the lines"
    )]
    NoRequests,
    /// It has a few requests of a program that had run before.
    #[error(
        "its history has {requests} requests, less than one step, and begins in the middle. Enable it earlier or keep \
         more entries; `oomph record` prints the lines"
    )]
    FewRequests {
        /// How many.
        requests: u64,
    },
}

impl Recording {
    /// Why the recording contains too little to judge the program, if it does. A short recording that begins before the
    /// first allocation contains everything.
    #[must_use]
    pub fn history_gap(&self) -> Option<HistoryGap> {
        let is_request = |entry: &&TraceEntry| matches!(entry.action, Action::Alloc | Action::OutOfMemory);
        let requests = self.witnessed.iter().filter(is_request).count() as u64;
        let began_late = !self.initial.segments.is_empty() || self.gaps.alive_before > 0;
        match requests {
            0 => Some(HistoryGap::NoRequests),
            1..LEAST_REQUESTS if began_late => Some(HistoryGap::FewRequests { requests }),
            _ => None,
        }
    }
}

/// Why a snapshot has no recording of a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordingError {
    /// The snapshot has nothing of the device.
    #[error("nothing of device {asked} in this snapshot; it has {}", listed(.there))]
    NoSuchDevice {
        /// The requested device.
        asked: u32,
        /// The devices of the snapshot.
        there: Vec<u32>,
    },
    /// Too many streams.
    #[error(transparent)]
    TableFull(#[from] TableFull),
    /// The file is of another release.
    #[error(transparent)]
    Release(#[from] ReleaseContradiction),
    /// The given settings cannot be read.
    #[error("the given settings: {0}")]
    Settings(String),
    /// The file has other settings.
    #[error("its settings are '{recorded}', not '{given}' as given; leave out --settings")]
    OtherSettings {
        /// Those of the file.
        recorded: String,
        /// Those of the user.
        given: String,
    },
}

fn listed(devices: &[u32]) -> String {
    match devices {
        [] => "no device".to_owned(),
        devices => format!("device {}", devices.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

impl Snapshot {
    /// The devices with entries or segments.
    #[must_use]
    pub fn devices(&self) -> Vec<u32> {
        let traced = (0..).zip(&self.traces).filter(|(_, trace)| !trace.is_empty()).map(|(device, _)| device);
        let mut devices: Vec<u32> = traced.chain(self.segments.iter().map(|segment| segment.device)).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// The recording of one device; without a number, of the first one with data.
    pub fn into_recording(
        mut self,
        name: &str,
        device: Option<u32>,
        progress: &dyn Progress,
    ) -> Result<Recording, RecordingError> {
        let there = self.devices();
        let device = match device {
            Some(asked) if !there.contains(&asked) => return Err(RecordingError::NoSuchDevice { asked, there }),
            Some(device) => device,
            None => there.first().copied().unwrap_or(0),
        };
        let witnessed = self.traces.get_mut(device as usize).map(std::mem::take).unwrap_or_default();
        self.segments.retain(|segment| segment.device == device);
        self.annotations.retain(|annotation| annotation.device.is_none_or(|on| on == device));
        let settings = settings_in_force(&self.settings, &self.release);
        let end = RecordingEnd { device, segments: &self.segments, settings: &settings, pools: &self.pools };
        let (initial, contradictions) = rewind(&end, &witnessed, progress);
        let (empty_caches, unclear_releases) = certain_empty_caches(&witnessed);
        let gaps = RecordingGaps {
            alive_before: initial.live().count() as u64,
            alive_before_bytes: initial.live().fold(0, |sum: u64, (block, _)| sum.saturating_add(block.size)),
            sizes_estimated: initial.estimated.len() as u64,
            contradictions,
            unclear_releases,
            missing: self.missing,
            not_yet: self.not_yet,
            ..RecordingGaps::default()
        };
        let mut recording = Recording {
            trace: Trace::default(),
            device,
            devices: there,
            witnessed,
            settings: self.settings,
            initial,
            final_segments: self.segments,
            annotations: self.annotations,
            stacks: self.stacks,
            streams: self.streams,
            pools: self.pools,
            release: self.release,
            settings_from: self.settings_from,
            host: self.host,
            notes: self.notes,
            empty_caches,
            request_pools: RequestPools::default(),
            limit: None,
            gaps,
        };
        if recording.has_private_pools() {
            let lives = recording.memory_lives();
            let of_life = |life: usize| lives.lives[life].pool.unwrap_or(DEFAULT_POOL);
            let pool = |entry| recording.pool_of(entry, &lives, of_life);
            recording.request_pools = RequestPools::of(&recording.witnessed, pool);
        }
        let (trace, found) = to_trace(&recording, name, progress)?;
        recording.trace = trace;
        let gaps = &mut recording.gaps;
        gaps.contradictions += found.contradictions;
        gaps.held_back_frees = found.held_back_frees;
        gaps.streams_guessed = found.streams_guessed;
        gaps.clock_steps_back = found.clock_steps_back;
        gaps.sites_left_out = found.sites_left_out;
        Ok(recording)
    }
}

/// The settings that are in force, or those of the values that can be read.
fn settings_in_force(settings: &RecordedSettings, release: &RecordedRelease) -> AllocatorSettings {
    let release = release.assumed();
    settings.in_force(release).unwrap_or_else(|_| settings.applied_to(AllocatorSettings::of_release(release)))
}

impl Source for Recording {
    fn name(&self) -> &str {
        &self.trace.name
    }

    fn events(&self) -> Option<u64> {
        self.trace.events()
    }

    fn initial_layout(&self) -> Option<InitialLayout> {
        let memory = &self.initial;
        // The trace first requests the live blocks. Where a block or a request size is unknown,
        // these requests and the layout do not correspond.
        let is_known = memory.astray.is_empty() && memory.live().all(|(block, _)| block.requested_size > 0);
        if memory.segments.is_empty() || !is_known {
            return None;
        }
        let own_limit = self.limit.as_ref().filter(|limit| limit.refused_by != MemoryRefuser::Device);
        Some(InitialLayout {
            layout: memory.layout(),
            settings: self.settings_in_force().ok()?,
            limit: own_limit.map(|limit| limit.bytes),
        })
    }

    fn uses_pools(&self) -> Result<bool, TraceError> {
        self.trace.uses_pools()
    }

    fn placements(&self) -> Arc<[PlacementCall]> {
        Arc::clone(&self.trace.placements)
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        self.trace.open()
    }
}

impl Recording {
    /// The recording as a source. If it began before the first allocation, only its trace is kept.
    #[must_use]
    pub fn into_source(self) -> Box<dyn Source> {
        if self.initial_layout().is_some() { Box::new(self) } else { Box::new(self.trace) }
    }

    /// The settings at the end of the recording, with its release.
    pub fn settings_in_force(&self) -> Result<AllocatorSettings, AllocatorSettingsError> {
        self.settings.in_force(self.release.assumed())
    }

    /// The recording as one of these releases. Sizes of blocks from before it may depend on the release.
    #[must_use]
    pub fn with_release(mut self, release: RecordedRelease) -> Recording {
        let changes = release.assumed() != self.release.assumed();
        self.release = release;
        if changes && !self.initial.segments.is_empty() {
            self.initial = self.memory_before(0);
        }
        self
    }

    /// Reserved bytes at the end.
    pub(crate) fn reserved_at_end(&self) -> u64 {
        self.final_segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.total_size))
    }

    /// The memory before an entry.
    #[must_use]
    pub fn memory_before(&self, entry: usize) -> InitialMemory {
        let settings = settings_in_force(&self.settings, &self.release);
        let end = RecordingEnd {
            device: self.device,
            segments: &self.final_segments,
            settings: &settings,
            pools: &self.pools,
        };
        rewind(&end, self.witnessed.get(entry..).unwrap_or_default(), &NoProgress).0
    }

    /// Corrects the estimated sizes of blocks before the recording by those that a model inferred. A size that does not
    /// fit into the free memory behind its block is ignored.
    #[must_use]
    pub fn with_sizes_before(mut self, sizes: &[(Address, u64)]) -> Recording {
        for &(address, size) in sizes {
            let owners = self.initial.segments.iter_mut().find_map(|segment| {
                let place = segment.blocks.iter().position(|block| block.address == address)?;
                segment.blocks.get_mut(place..)
            });
            let Some([block, behind, ..]) = owners else { continue };
            let more = size.saturating_sub(block.size);
            if behind.state == SnapshotBlockState::Inactive && more < behind.size {
                block.size += more;
                behind.address.0 += more;
                behind.size -= more;
                self.gaps.alive_before_bytes = self.gaps.alive_before_bytes.saturating_add(more);
            }
        }
        self
    }

    /// Whether a segment at the end, or an entry, belongs to a private pool.
    #[must_use]
    pub fn has_private_pools(&self) -> bool {
        let in_segments = self.final_segments.iter().any(|segment| segment.pool != DEFAULT_POOL);
        in_segments || self.pools.iter().any(|&pool| pool != DEFAULT_POOL)
    }

    /// The lives of its memory, from which pools of requests are known.
    #[must_use]
    pub fn memory_lives(&self) -> MemoryLives {
        MemoryLives::of(&self.initial.segments, &self.witnessed, &self.final_segments, &self.pools)
    }

    /// The pool that an entry has, or that of the life of its memory, given the pools of lives.
    #[must_use]
    pub fn pool_of(&self, entry: usize, lives: &MemoryLives, pool: impl Fn(usize) -> PoolKey) -> Option<PoolKey> {
        let recorded = self.witnessed.get(entry).and_then(|entry| entry.pool_in(&self.pools));
        recorded.or_else(|| lives.of_entry(entry).map(pool))
    }

    /// Takes over the pools that a model inferred: those of requests, and those of segments that existed before the
    /// recording, by address. The trace changes with [`with_empty_caches`](Recording::with_empty_caches).
    #[must_use]
    pub fn with_pools(mut self, requests: RequestPools, segments: &[(Address, PoolKey)]) -> Recording {
        self.request_pools = requests;
        for &(address, pool) in segments {
            let found = self.initial.segments.iter_mut().find(|segment| segment.address == address);
            found.into_iter().for_each(|segment| segment.pool = pool);
        }
        self
    }

    /// Makes the trace again with the calls of `empty_cache` and the pools that a model inferred.
    pub fn with_empty_caches(
        mut self,
        before_entries: Vec<usize>,
        progress: &dyn Progress,
    ) -> Result<Recording, TableFull> {
        self.empty_caches = before_entries;
        (self.trace, _) = to_trace(&self, &self.trace.name, progress)?;
        self.gaps.unclear_releases = 0;
        Ok(self)
    }
}

/// The entries before which only a call of `empty_cache` explains a release of memory, and the number of releases that a
/// request explains as well. A request that finds a cached block releases nothing, and neither does a free.
fn certain_empty_caches(entries: &[TraceEntry]) -> (Vec<usize>, u64) {
    let mut certain = Vec::new();
    let mut unclear = 0;
    let mut released = None;
    let mut grown = false;
    for (index, entry) in entries.iter().enumerate() {
        match entry.action {
            Action::SegmentFree | Action::SegmentUnmap => drop(released.get_or_insert(index)),
            Action::SegmentAlloc | Action::SegmentMap => grown = true,
            Action::Alloc | Action::FreeRequested | Action::OutOfMemory => {
                match released.take() {
                    Some(_) if entry.action == Action::OutOfMemory || (entry.action == Action::Alloc && grown) => {
                        unclear += 1;
                    }
                    Some(start) => certain.push(start),
                    None => {}
                }
                grown = false;
            }
            Action::FreeCompleted | Action::Snapshot | Action::Annotate | Action::Unknown => {}
        }
    }
    certain.extend(released);
    (certain, unclear)
}

/// The release and the settings of a recorded program.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GivenFacts {
    /// The release of PyTorch.
    pub release: Option<Release>,
    /// The settings, as in `PYTORCH_CUDA_ALLOC_CONF`.
    pub settings: Option<String>,
}

impl Snapshot {
    /// The snapshot with what the user says. An error if the file says something else.
    pub fn with_given(mut self, given: &GivenFacts) -> Result<Snapshot, RecordingError> {
        if let Some(release) = given.release {
            self.release = self.release.told(release)?;
        }
        if let Some(settings) = &given.settings {
            self.take_settings(settings)?;
        }
        Ok(self)
    }

    fn take_settings(&mut self, text: &str) -> Result<(), RecordingError> {
        // The newest possible release that knows them.
        let parsed = |release: Release| AllocatorSettings::of_release(release).updated(text);
        let accepting = self.release.span().releases().rev().find_map(|release| Some((release, parsed(release).ok()?)));
        let Some((release, given)) = accepting else {
            let error = parsed(self.release.assumed()).err().map(|error| error.to_string()).unwrap_or_default();
            return Err(RecordingError::Settings(error));
        };
        if self.settings_from == SettingsOrigin::File {
            return match self.settings.in_force(release) {
                Ok(recorded) if AllocatorSettings { ignored: given.ignored.clone(), ..recorded.clone() } == given => {
                    Ok(())
                }
                _ => {
                    let recorded = self.settings.compact_conf();
                    let recorded = if recorded.is_empty() { "PyTorch's defaults".to_owned() } else { recorded };
                    Err(RecordingError::OtherSettings { recorded, given: text.to_owned() })
                }
            };
        }
        self.settings = RecordedSettings::of_text(text);
        self.settings_from = SettingsOrigin::Given;
        Ok(())
    }

    /// What segments and entries tell about settings that the file does not contain.
    pub(crate) fn inferred_settings(&self) -> RecordedSettings {
        let is_mapped = self.segments.iter().any(|segment| segment.expandable)
            || self.traces.iter().flatten().any(|entry| entry.action == Action::SegmentMap);
        if is_mapped { RecordedSettings::of_text("expandable_segments:True") } else { RecordedSettings::default() }
    }
}
