//! Verifies the model against a recording: drives the model of PyTorch's allocator with the program's own actions and
//! compares its actions, entry by entry, with the recorded ones.
//!
//! The program's actions, the settings and the driver's answers (addresses of segments and ranges, when a stream had
//! passed a free) come from the recording; every decision is the model's. Two things are inferred because recordings do
//! not contain them: calls of `empty_cache`, where the next request does not explain what was released, and a limit of
//! the program, where requests fail although the GPU has room.

mod call;
mod companion;
mod divergence;
mod limit;
mod model;
mod pending_frees;
mod pools;
mod releases;
mod settings_change;
mod start;
mod walk;

pub use companion::{Companion, CompanionError};
pub use divergence::{Divergence, LayoutPiece, ObservedAction};
pub use limit::verify_with_limit;
pub use pools::{InferredPools, PoolEvidence};
pub use releases::{RecordedConditions, verify_recording};
pub use settings_change::SettingsPhase;
pub use start::Beginning;

use self::{
    model::AllocatorModel,
    pools::PoolGuess,
    start::{CreationOrder, StartState},
    walk::{RecordingWalk, WalkOutcome},
};
use crate::{
    base::{Address, FileText, Progress},
    strategy::{Layout, Setup, Stats, Strategy},
    trace::torch::{
        Action, InitialMemory, RecordedLimit, RecordedRelease, Recording, RequestPools, Segment, SettingsOrigin,
    },
};

/// PyTorch's own counters, as far as they are known. Snapshots do not contain them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct Counters {
    /// `allocated_bytes.all.peak`.
    pub peak_allocated: Option<u64>,
    /// `reserved_bytes.all.peak`.
    pub peak_reserved: Option<u64>,
    /// `segment.all.current`.
    pub final_segments: Option<u64>,
    /// `inactive_split_bytes.all.current`.
    pub final_inactive_split: Option<u64>,
    /// `num_alloc_retries`.
    pub alloc_retries: Option<u64>,
    /// `num_ooms`.
    pub ooms: Option<u64>,
}

/// The result of verifying a recording.
#[derive(Clone, Debug)]
pub struct Verification {
    /// How well the model agrees.
    pub verdict: Verdict,
    /// Entries that were compared and agree.
    pub agreed: usize,
    /// Before which entries `empty_cache` was called, ascending; see
    /// [`with_empty_caches`](Recording::with_empty_caches).
    pub empty_caches: Vec<usize>,
    /// How often memory must have been refused from outside, because no limit that is known explains what happened: by
    /// the driver, or by a limit of the program's own that [`own_limit`](Recording::own_limit) encloses.
    pub refusals: usize,
    /// The limit under which the program ran, if one is known; only [`verify_with_limit`] finds it.
    pub limit: Option<RecordedLimit>,
    /// The release of the recording; only [`verify_recording`] tries several.
    pub release: RecordedRelease,
    /// The model's books where it stopped.
    pub stats: Stats,
    /// What was there before, if the recording began in the middle.
    pub beginning: Option<Beginning>,
    /// Blocks from before whose size is larger than the recording's estimate, and that size; see
    /// [`with_sizes_before`](Recording::with_sizes_before).
    pub sizes_before: Vec<(Address, u64)>,
    /// The pools of its requests.
    pub pools: InferredPools,
    /// The settings at the start and where the program changed them, if it did.
    pub settings: Vec<SettingsPhase>,
}

impl Verification {
    /// Where the model and the recording parted, if they did.
    #[must_use]
    pub fn divergence(&self) -> Option<&Divergence> {
        match &self.verdict {
            Verdict::Exact => None,
            Verdict::Partial { divergence, .. } => divergence.as_ref(),
            Verdict::Diverged(divergence) => Some(divergence),
        }
    }
}

/// How well the model agrees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every entry, the memory at the end and every known counter agree.
    Exact,
    /// The recording does not tell enough to say.
    Partial {
        /// What it does not tell, a sentence each.
        reasons: Vec<String>,
        /// Where the model and the recording parted, if they were compared.
        divergence: Option<Divergence>,
    },
    /// The recording tells everything, and the model does something else.
    Diverged(Divergence),
}

const NO_SETTINGS: &str = "PyTorch up to 2.2 does not record its settings, and with its defaults the model does something \
                           else: pass them with --settings";

/// How many entries are read in total, over all repetitions that correct estimates.
const MOST_ENTRIES: usize = 50_000_000;

/// How many times verification is repeated with corrected estimates. Each repetition reads all entries, even if the
/// divergence comes early: pending frees are found first.
fn repetitions(entries: usize) -> usize {
    MOST_ENTRIES / entries.max(1)
}

/// Verifies a recording on the device and under the limit of `setup`.
///
/// ```
/// use oomph::base::NoProgress;
/// use oomph::device::{Device, sim::{SimConfig, SimDevice}};
/// use oomph::replay::verify::{Counters, Verdict, verify};
/// use oomph::strategy::Setup;
/// use oomph::trace::torch::Snapshot;
/// let nothing = Snapshot::default().into_recording("nothing", None, &NoProgress)?;
/// let device = SimDevice::new(SimConfig::default())?;
/// let setup = Setup { props: device.props(), limit: None };
/// let verification = verify(&nothing, &setup, &Counters::default(), &NoProgress);
/// assert!(matches!(verification.verdict, Verdict::Partial { .. }), "it has no entries");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn verify(recording: &Recording, setup: &Setup<'_>, counters: &Counters, progress: &dyn Progress) -> Verification {
    verify_assuming(recording, setup, counters, &Assumptions::of(recording), progress)
}

/// What verification takes for granted about a program.
#[derive(Clone, Debug)]
struct Assumptions {
    /// The settings at the start, and where the program changed them. Without them, they are those of the recording.
    settings: Vec<SettingsPhase>,
    /// Memory that was released before the end may have been in a private pool.
    private_pools: bool,
}

impl Assumptions {
    /// What the recording contains.
    fn of(recording: &Recording) -> Assumptions {
        Assumptions { settings: Vec::new(), private_pools: recording.has_private_pools() }
    }
}

/// The model was not compared, for these reasons.
fn not_compared(recording: &Recording, reasons: Vec<String>) -> Verification {
    Verification {
        verdict: Verdict::Partial { reasons, divergence: None },
        agreed: 0,
        empty_caches: recording.empty_caches.clone(),
        refusals: 0,
        limit: None,
        release: recording.release.clone(),
        stats: Stats::default(),
        beginning: None,
        sizes_before: Vec::new(),
        pools: InferredPools::default(),
        settings: Vec::new(),
    }
}

/// A recording of another allocator than PyTorch's. Its entries can agree with each other, but not with the model.
fn of_another_allocator(recording: &Recording, allocator: &str) -> Verification {
    let allocator = FileText::from(allocator);
    let mut reasons = vec![format!("recorded under {allocator}, not PyTorch's allocator: the model is not compared")];
    reasons.extend(reasons_for_doubt(recording));
    not_compared(recording, reasons)
}

fn verify_assuming(
    recording: &Recording,
    setup: &Setup<'_>,
    counters: &Counters,
    assumptions: &Assumptions,
    progress: &dyn Progress,
) -> Verification {
    let unknowable = |reason: String| not_compared(recording, vec![reason]);
    let (settings, changes) = match (&assumptions.settings[..], recording.settings_in_force()) {
        ([first, changes @ ..], _) => (first.settings.clone(), changes),
        ([], Ok(settings)) => (settings, &[][..]),
        ([], Err(error)) => return unknowable(format!("its settings are beyond the model: {error}")),
    };
    if recording.witnessed.is_empty() {
        return unknowable("it has no entries: the history was off".to_owned());
    }
    let mut guess = PoolGuess::of(recording);
    let mut start = StartState::of(recording, &guess);
    if !start.memory.astray.is_empty() {
        let count = start.memory.astray.len();
        return unknowable(format!("it began in the middle: {count} blocks were there before it in no known segment"));
    }
    if start.entry == recording.witnessed.len() {
        let nothing_compared = unknowable("it began in the middle: no whole call is in it".to_owned());
        return Verification { beginning: start.beginning(), ..nothing_compared };
    }
    let own_limit = recording.own_limit().filter(|_| setup.limit.is_none());
    let doubts = start.doubts(&settings, setup.limit);
    let mut order = CreationOrder::of(&start, settings.release.rules().ties);
    let mut rounds_left = repetitions(recording.witnessed.len());
    let (walk, result) = loop {
        let model = AllocatorModel::new(settings.clone(), setup, &recording.streams);
        let streams = recording.streams.len();
        let walk = model
            .and_then(|model| {
                RecordingWalk::new(&recording.witnessed, model, streams, &start, &guess, own_limit.is_some())
            })
            .map(|walk| walk.with_changes(changes));
        let mut walk = match walk {
            Ok(walk) => walk,
            Err(error) if start.beginning().is_some() => return unknowable(format!("it began in the middle: {error}")),
            Err(error) => return unknowable(error.to_string()),
        };
        let result = walk.finish(progress);
        let outcome = WalkOutcome::of(walk);
        match &result {
            Err(divergence) if rounds_left > 0 && start.mend(divergence, &outcome.caching) => {}
            Err(divergence) if rounds_left > 0 && order.learn(divergence, &mut start) => {}
            Err(divergence) if rounds_left > 0 && assumptions.private_pools && guess.mend(divergence) => {
                start.take_pools(&guess);
            }
            _ => break (outcome, result),
        }
        rounds_left -= 1;
    };
    let result = result.and_then(|()| compare_ends(&walk.caching, recording, &start, counters));
    let mut reasons = reasons_for_doubt(recording);
    if result.is_err() {
        reasons.extend(doubts);
        reasons.extend(order.doubt(&start));
        reasons.extend(unrecorded_facts(recording, setup, &guess));
    }
    let collects = walk.caching.settings().garbage_collection_threshold > 0.0;
    if collects && setup.limit.is_none() && (own_limit.is_some() || result.is_err()) {
        reasons.push(
            "garbage_collection_threshold works under a memory fraction, which the file does not contain: pass it with \
             --limit"
                .to_owned(),
        );
    }
    let verdict = match result {
        Ok(()) if reasons.is_empty() => Verdict::Exact,
        Err(divergence) if reasons.is_empty() => Verdict::Diverged(divergence),
        result => Verdict::Partial { reasons, divergence: result.err() },
    };
    let stats = walk.caching.stats();
    let pools = guess.settled(&walk.request_pools);
    let passed_over = recording.empty_caches.iter().copied().filter(|&entry| entry < start.entry);
    Verification {
        verdict,
        agreed: walk.at - start.entry,
        empty_caches: passed_over.chain(walk.empty_caches).collect(),
        refusals: walk.refusals,
        limit: None,
        release: recording.release.clone(),
        stats,
        beginning: start.beginning(),
        sizes_before: start.mended().collect(),
        settings: assumptions.settings.clone(),
        pools: InferredPools { requests: RequestPools { releases: walk.pool_releases, ..pools.requests }, ..pools },
    }
}

/// What the file does not contain and what may explain a divergence, one sentence each.
fn unrecorded_facts(recording: &Recording, setup: &Setup<'_>, pools: &PoolGuess<'_>) -> Vec<String> {
    let runs_out = recording.witnessed.iter().any(|entry| entry.action == Action::OutOfMemory);
    let facts = [
        (
            pools.is_open(),
            "it uses private pools, and does not say which of its memory was in those released before the end",
        ),
        (
            !pools.is_open() && pools.began_with_unknown(),
            "it began in the middle, and does not say whether segments from before, released in it, were in private pools",
        ),
        (
            runs_out && setup.limit.is_none(),
            "it ran out of memory under a limit that the file does not contain: pass it with --limit, or the card with --card",
        ),
        (recording.settings_from == SettingsOrigin::Unknown, NO_SETTINGS),
    ];
    facts.into_iter().filter(|(applies, _)| *applies).map(|(_, fact)| fact.to_owned()).collect()
}

/// Why agreement or disagreement would prove nothing.
fn reasons_for_doubt(recording: &Recording) -> Vec<String> {
    let mut reasons = recording.gaps.missing.clone();
    if recording.gaps.contradictions > 0 {
        let count = recording.gaps.contradictions;
        reasons.push(format!("{count} entries contradict others or the final state"));
    }
    reasons
}

/// The segments of a layout, each followed by its blocks.
fn pieces(layout: &Layout) -> Vec<LayoutPiece> {
    let mut pieces = Vec::new();
    for segment in &layout.segments {
        pieces.push(LayoutPiece::Segment {
            address: segment.address,
            bytes: segment.bytes,
            stream: segment.stream,
            large: segment.pool == "large",
            pool: segment.pool_id,
            expandable: segment.mapped,
        });
        pieces.extend(segment.blocks.iter().map(|block| LayoutPiece::Block {
            address: block.address,
            bytes: block.size,
            requested: block.requested,
            state: block.state,
        }));
    }
    pieces
}

/// Compares what there is at the end, and PyTorch's counters where they are known. Of a recording that began in the middle
/// the counters over its whole time are not: peaks, retries and failures may lie before it.
fn compare_ends(
    model: &dyn Strategy,
    recording: &Recording,
    start: &StartState,
    counters: &Counters,
) -> Result<(), Divergence> {
    let segments = &recording.final_segments;
    let began_late = start.beginning().is_some();
    let mut at_end = InitialMemory { segments: segments.clone(), ..InitialMemory::default() };
    at_end.segments.sort_by_key(|segment| segment.address);
    let recorded = pieces(&at_end.layout());
    let modelled = pieces(&model.layout().unwrap_or_default());
    let same = |(recorded, modelled): &(&LayoutPiece, &LayoutPiece)| {
        recorded == modelled || began_late && recorded.is_free_since_before(modelled)
    };
    let place = recorded.iter().zip(&modelled).take_while(same).count();
    if place < recorded.len().max(modelled.len()) {
        let (recorded, modelled) = (recorded.get(place).cloned(), modelled.get(place).cloned());
        return Err(Divergence::Memory { recorded, modelled });
    }
    let entries = recording.witnessed[start.entry..].iter();
    let recorded_ooms = entries.filter(|entry| entry.action == Action::OutOfMemory).count() as u64;
    let over_time = |counter: Option<u64>| counter.filter(|_| !began_late);
    let stats = model.stats();
    let details = model.details();
    let detail = |name: &str| details.iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value);
    let sum = |of: fn(&Segment) -> u64| Some(segments.iter().map(of).sum());
    let figures = [
        ("allocated at the end", sum(Segment::allocated_size), stats.current.allocated),
        ("reserved at the end", sum(|segment| segment.total_size), stats.current.reserved),
        ("out of memory", Some(recorded_ooms), stats.ooms),
        ("peak allocated", over_time(counters.peak_allocated), stats.peak.allocated),
        ("peak reserved", over_time(counters.peak_reserved), stats.peak.reserved),
        ("num_alloc_retries", over_time(counters.alloc_retries), stats.retries),
        ("num_ooms", over_time(counters.ooms), stats.ooms),
        ("segments at the end", counters.final_segments, detail("segment.all.current")),
        ("inactive split bytes at the end", counters.final_inactive_split, detail("inactive_split_bytes.all.current")),
    ];
    for (what, recorded, modelled) in figures {
        if let Some(recorded) = recorded.filter(|&recorded| recorded != modelled) {
            return Err(Divergence::Figure { what, recorded, modelled });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_share_one_entry_budget() {
        for entries in [0, 1, 100, 600_000, MOST_ENTRIES, 2 * MOST_ENTRIES] {
            assert!(repetitions(entries) * entries <= MOST_ENTRIES, "{entries}");
        }
        assert!(repetitions(600_000) > 50, "even a long recording is mended");
    }
}
