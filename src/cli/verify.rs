//! `oomph verify`.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::{
    exit::{self, CommandError, CommandResult},
    options::{DeviceOptions, Format},
    progress::{self, OneOf, Stages},
    source::GivenOptions,
    verify_on::{self, OnOptions},
};
use crate::{
    base::{Bytes, MemoryLimit, Progress, parallel_map},
    device::DeviceProps,
    pytorch::Release,
    replay::verify::{
        Beginning, Companion, Divergence, PoolEvidence, RecordedConditions, SettingsPhase, Verdict, Verification,
        verify_recording,
    },
    report::{self, Medium, Render, ReportError},
    suite,
    trace::torch::{MemoryRefuser, ProcessLimit, RecordedLimit, Recording, SettingsOrigin, Snapshot},
};

/// Checks that the model reproduces PyTorch memory snapshots exactly. The model of PyTorch's
/// allocator runs the actions of the program, with the settings and the driver's answers of the
/// recording; every entry, the memory at the end and PyTorch's counters are compared.
///
/// One line per recording: EXACT; PARTIAL if the recording does not contain enough to decide;
/// DIVERGED with the first difference; FAILED if it cannot be read; CONSISTENT if another allocator
/// replaced PyTorch's: then its entries are compared with each other and with the memory at the end.
///
/// With --on, a device is compared instead: does this GPU agree with the simulated one, decision by
/// decision?
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A snapshot does not contain the memory limit of the program. Where memory was refused or collected, the limit is inferred
and shown: the range of limits that reproduce the recording, and the only round fraction in it. To give it, pass it with
--limit, as a size or as the fraction of the device (--card names another one than the H200), or put a table snapshots.csv beside the file with the columns snapshot (the file
name without .pickle) and memory_fraction. A recording of the Python package has the limit in a file beside it
(rank0.json). The same table may have PyTorch's counters, which are then compared:
peak_allocated, peak_reserved, final_segments, final_inactive_split, alloc_retries, ooms. Calls of empty_cache and driver
OOMs are not recorded; they are inferred and counted.

A recording that begins in the middle, because its history was enabled late or kept the last entries only, is verified
too: the memory at the end and the entries determine the memory at the beginning. Unknown are only the ages of cached
blocks, which matter for garbage collection, and sometimes the sizes of blocks that existed before. If the model then
differs, the recording is PARTIAL. Peaks and counts over the whole run are not compared.

With --on, each SOURCE runs under each --strategy on that device, and every answer of the driver is logged: addresses,
finished events, failures. A second run is given these answers and must decide the same at every event: block and size,
how it was found, segments reserved, mapped and released, retries, failures, frees. A third run is simulated without the
answers, on --device; its peaks are compared in percent. A recording keeps its own memory limit, as above; requests that
fail are skipped. Memory use does not grow with the length of a trace.

Exit code 0 if every recording is exact or every decision the same, 100 if not, 2 if one cannot be read; with --on 104
if a case could not be run, 130 after Ctrl-C, which shows the finished cases.

Examples:
  oomph verify snapshot.pickle
  oomph verify --limit 0.5 capped.pickle
  oomph verify --limit 0.5 --card 24GiB capped.pickle    half of a card with 24 GiB
  oomph verify --format json runs/*.pickle.xz
  oomph verify --on cuda snapshot.pickle training
  oomph verify --on cuda --suite quick --strategy caching --format csv
  oomph verify --on cuda --strategy async runs/*.pickle.xz")]
pub struct Args {
    /// Files of torch.cuda.memory._dump_snapshot, also as .gz, .xz or .zst. With --on, any SOURCE:
    /// a workload, a workload TOML, or a trace file in any known format.
    #[arg(value_name = "SNAPSHOT", required_unless_present = "suite")]
    pub(super) sources: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) on: OnOptions,
    /// Only this device of each snapshot [default: every device with data].
    #[arg(long, value_name = "N")]
    pub(super) device_index: Option<u32>,
    #[command(flatten)]
    pub(super) given: GivenOptions,
    #[command(flatten)]
    pub(super) device: DeviceOptions,
    /// Output format.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json, Format::Csv]))]
    pub(super) format: Format,
}

pub fn run(args: Args) -> CommandResult {
    if args.on.device.is_some() {
        return verify_on::run(&args);
    }
    let props = args.device.spec()?.open().map_err(CommandError::usage)?.props().clone();
    let rows = verify_all(&args, &props);
    args.format.print(&rows)?;
    let any = |result: VerifyResult| rows.iter().any(|row| row.result == result);
    Ok(if any(VerifyResult::Failed) {
        exit::USAGE
    } else if any(VerifyResult::Diverged) || any(VerifyResult::Partial) {
        exit::NOT_EXACT
    } else {
        exit::OK
    })
}

/// The result for one device of one snapshot.
#[derive(Debug, Default, Serialize)]
pub(super) struct VerifyRow {
    source: String,
    /// The device of the snapshot; `None` if it cannot be read.
    device_index: Option<u32>,
    result: VerifyResult,
    /// The release of PyTorch whose rules were used, and how it is known.
    release: Option<Release>,
    #[serde(skip_serializing_if = "Option::is_none")]
    release_known_by: Option<String>,
    /// Whether the settings are in the file, given, or unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    settings_from: Option<SettingsOrigin>,
    /// Why it is not exact.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasons: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    divergence: Option<Divergence>,
    /// The memory at the beginning, if the recording begins in the middle.
    #[serde(skip_serializing_if = "Option::is_none")]
    beginning: Option<Beginning>,
    entries: usize,
    entries_agreed: usize,
    empty_caches: usize,
    driver_refusals: usize,
    retries: u64,
    ooms: u64,
    peak_allocated_bytes: u64,
    peak_reserved_bytes: u64,
    limit_bytes: Option<u64>,
    /// How the pools of requests are known.
    pools: PoolEvidence,
    /// Where the program changed settings, as far as that was inferred.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    settings_changes: Vec<SettingsChange>,
    /// The limit under which the program ran, if the recording implies one.
    own_limit: Option<RecordedLimit>,
}

/// The program changed its settings.
#[derive(Clone, Debug, Serialize)]
struct SettingsChange {
    /// The first entry under the new ones.
    entry: usize,
    change: String,
}

impl SettingsChange {
    fn all(phases: &[SettingsPhase]) -> Vec<SettingsChange> {
        let changes = phases
            .windows(2)
            .map(|pair| SettingsChange { entry: pair[1].entry, change: pair[1].change_from(&pair[0].settings) });
        changes.collect()
    }
}

fn pools_in_words(pools: &PoolEvidence) -> Vec<String> {
    let PoolEvidence { private, inferred, either, .. } = *pools;
    let mut words = Vec::new();
    if private > 0 {
        let how = if inferred > 0 { format!(" ({inferred} inferred)") } else { String::new() };
        words.push(format!("{private} requests in private pools{how}"));
    }
    if either > 0 {
        words.push(format!("{either} requests in the default pool or a private one: their memory was released"));
    }
    words
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum VerifyResult {
    Exact,
    Partial,
    Diverged,
    #[default]
    Failed,
    /// Another allocator replaced PyTorch's, and its entries agree with each other.
    Consistent,
}

impl VerifyResult {
    fn word(self) -> &'static str {
        match self {
            VerifyResult::Exact => "EXACT",
            VerifyResult::Partial => "PARTIAL",
            VerifyResult::Diverged => "DIVERGED",
            VerifyResult::Failed => "FAILED",
            VerifyResult::Consistent => "CONSISTENT",
        }
    }
}

impl VerifyRow {
    /// What else may explain a divergence.
    fn doubt(&self) -> Option<&'static str> {
        let diverged = self.result == VerifyResult::Diverged;
        diverged.then_some("or the program changed its settings on the way, which the file does not contain")
    }

    fn failed(path: &Path, reason: String) -> VerifyRow {
        VerifyRow { source: path.display().to_string(), reasons: vec![reason], ..VerifyRow::default() }
    }

    fn of(path: &Path, recording: &Recording, limit_bytes: Option<u64>, verification: Verification) -> VerifyRow {
        let (result, mut reasons, divergence) = match verification.verdict {
            Verdict::Exact => (VerifyResult::Exact, Vec::new(), None),
            // The only reason is that it is of another allocator.
            Verdict::Partial { reasons, .. }
                if recording.settings.other_allocator().is_some() && reasons.len() == 1 =>
            {
                (VerifyResult::Consistent, reasons, None)
            }
            Verdict::Partial { reasons, divergence } => (VerifyResult::Partial, reasons, divergence),
            Verdict::Diverged(divergence) => (VerifyResult::Diverged, Vec::new(), Some(divergence)),
        };
        if let (Some(limit), Some(range)) = (limit_bytes, recording.own_limit())
            && !range.contains(limit)
        {
            let ProcessLimit { at_least_bytes, below_bytes } = range;
            let range = format!("{} and {}", Bytes(at_least_bytes), Bytes(below_bytes));
            reasons.push(format!("a limit of {} was given, but the recording shows one between {range}", Bytes(limit)));
        }
        VerifyRow {
            source: path.display().to_string(),
            device_index: Some(recording.device),
            result,
            release: Some(verification.release.assumed()),
            release_known_by: Some(verification.release.to_string()),
            settings_from: Some(recording.settings_from),
            reasons,
            divergence,
            beginning: verification.beginning,
            entries: recording.witnessed.len(),
            entries_agreed: verification.agreed,
            empty_caches: verification.empty_caches.len(),
            driver_refusals: verification.refusals,
            retries: verification.stats.retries,
            ooms: verification.stats.ooms,
            peak_allocated_bytes: verification.stats.peak.allocated,
            peak_reserved_bytes: verification.stats.peak.reserved,
            limit_bytes,
            pools: verification.pools.evidence,
            settings_changes: SettingsChange::all(&verification.settings),
            own_limit: verification.limit.filter(|limit| limit.inferred),
        }
    }
}

/// Verifies all snapshots on all cores; the rows are in the order of the arguments.
fn verify_all(args: &Args, props: &DeviceProps) -> Vec<VerifyRow> {
    let rows = |path: &PathBuf, progress: &dyn Progress| {
        verify_file(path, args, props, progress).unwrap_or_else(|reason| vec![VerifyRow::failed(path, reason)])
    };
    if let [path] = &args.sources[..] {
        return rows(path, &Stages::of(&path.to_string_lossy()));
    }
    let bar = progress::of_cases(args.sources.len(), 0);
    let done = parallel_map(&args.sources, suite::all_cores(), |path| {
        let rows = rows(path, &OneOf::of(&path.to_string_lossy(), &bar));
        bar.inc(1);
        rows
    });
    bar.finish_and_clear();
    done.into_iter().flatten().collect()
}

/// The results for every device of a snapshot, or why it cannot be read.
fn verify_file(
    path: &Path,
    args: &Args,
    props: &DeviceProps,
    progress: &dyn Progress,
) -> Result<Vec<VerifyRow>, String> {
    // The line of output already begins with the path.
    let in_words = |error: String| error.trim_start_matches(&format!("{}: ", path.display())).to_owned();
    let snapshot = Snapshot::open(path, progress).map_err(|error| in_words(error.to_string()))?;
    let given = args.given.facts().map_err(|error| error.to_string())?;
    let companion = Companion::beside(path).map_err(|error| error.to_string())?.unwrap_or_default();
    let snapshot = snapshot.with_given(&companion.complete(&given)).map_err(|error| error.to_string())?;
    let devices = match args.device_index {
        Some(device) => vec![device],
        None if snapshot.devices().is_empty() => vec![0],
        None => snapshot.devices(),
    };
    let mut rows = Vec::new();
    let mut snapshot = Some(snapshot);
    for (place, &device) in devices.iter().enumerate() {
        let last = place + 1 == devices.len();
        let Some(part) = (if last { snapshot.take() } else { snapshot.clone() }) else { break };
        // An empty snapshot has no device, but still gets a row.
        let device = Some(device).filter(|_| args.device_index.is_some() || !part.devices().is_empty());
        let recording = part.into_recording("", device, progress).map_err(|error| error.to_string())?;
        let limit = args.limit(&companion, device);
        let conditions = RecordedConditions { props, limit, counters: &companion.counters };
        let verification = verify_recording(&recording, &conditions, progress);
        let limit = conditions.limit_bytes(verification.release.assumed());
        rows.push(VerifyRow::of(path, &recording, limit, verification));
    }
    Ok(rows)
}

impl Args {
    /// The memory limit of the program: from the arguments, otherwise from the files beside the
    /// snapshot.
    pub(super) fn limit(&self, companion: &Companion, device: Option<u32>) -> Option<MemoryLimit> {
        self.device.limit.or(companion.limit(device))
    }
}

impl Render for [VerifyRow] {
    type Row = VerifyRow;

    fn rows(&self) -> &[VerifyRow] {
        self
    }

    fn text(&self, _: Medium) -> String {
        text(self)
    }

    fn csv(&self) -> Result<String, ReportError> {
        report::to_csv(&self.iter().map(VerifyColumns::new).collect::<Vec<_>>())
    }
}

/// A row without lists and nested parts: the reasons and the divergence are one text. Nothing is known of a snapshot that
/// cannot be read.
#[derive(Debug, Default, Serialize)]
struct VerifyColumns {
    source: String,
    device_index: Option<u32>,
    result: VerifyResult,
    reason: String,
    release: Option<Release>,
    release_known_by: Option<String>,
    entries: Option<usize>,
    entries_agreed: Option<usize>,
    empty_caches: Option<usize>,
    driver_refusals: Option<usize>,
    retries: Option<u64>,
    ooms: Option<u64>,
    peak_allocated_bytes: Option<u64>,
    peak_reserved_bytes: Option<u64>,
    limit_bytes: Option<u64>,
    blocks_before: Option<usize>,
    segments_before: Option<usize>,
    entries_passed_over: Option<usize>,
    private_pool_requests: Option<usize>,
    either_pool_requests: Option<usize>,
    settings_changes: Option<usize>,
}

impl VerifyColumns {
    fn new(row: &VerifyRow) -> VerifyColumns {
        let divergence = row.divergence.as_ref().map(Divergence::to_string);
        let doubt = row.doubt().map(str::to_owned);
        let reasons: Vec<String> = row.reasons.iter().cloned().chain(divergence).chain(doubt).collect();
        let columns = VerifyColumns {
            source: row.source.clone(),
            device_index: row.device_index,
            result: row.result,
            reason: reasons.join("; "),
            release: row.release,
            release_known_by: row.release_known_by.clone(),
            ..VerifyColumns::default()
        };
        if row.result == VerifyResult::Failed {
            return columns;
        }
        VerifyColumns {
            entries: Some(row.entries),
            entries_agreed: Some(row.entries_agreed),
            empty_caches: Some(row.empty_caches),
            driver_refusals: Some(row.driver_refusals),
            retries: Some(row.retries),
            ooms: Some(row.ooms),
            peak_allocated_bytes: Some(row.peak_allocated_bytes),
            peak_reserved_bytes: Some(row.peak_reserved_bytes),
            limit_bytes: row.limit_bytes,
            blocks_before: row.beginning.map(|before| before.blocks),
            segments_before: row.beginning.map(|before| before.segments),
            entries_passed_over: row.beginning.map(|before| before.entries_passed_over),
            private_pool_requests: Some(row.pools.private),
            either_pool_requests: Some(row.pools.either),
            settings_changes: Some(row.settings_changes.len()),
            ..columns
        }
    }
}

fn from_the_middle(before: Beginning) -> String {
    let Beginning { blocks, segments, entries_passed_over } = before;
    let mut text = format!("from the middle: {blocks} blocks in {segments} segments existed before");
    if entries_passed_over > 0 {
        let _ = write!(text, " ({entries_passed_over} entries of an unfinished call are skipped)");
    }
    text
}

/// Where the settings come from, if not from the file.
fn settings_in_words(row: &VerifyRow) -> Option<&'static str> {
    match row.settings_from? {
        SettingsOrigin::Given => Some("with the given settings"),
        SettingsOrigin::Unknown if row.result == VerifyResult::Exact => {
            Some("with PyTorch's default settings, as none are recorded")
        }
        SettingsOrigin::Unknown | SettingsOrigin::File => None,
    }
}

fn limit_in_words(limit: &RecordedLimit) -> String {
    let whose = match limit.refused_by {
        MemoryRefuser::OwnLimit => "under a memory limit of its own",
        MemoryRefuser::Device => return format!("{} on the device for the allocator", Bytes(limit.bytes)),
        MemoryRefuser::Unknown => "under a memory limit of its own or on a full device",
    };
    format!("{whose}, {}", limit.in_words())
}

fn text(rows: &[VerifyRow]) -> String {
    let mut out = String::new();
    let several = |source: &str| rows.iter().filter(|row| row.source == source).count() > 1;
    let count = |result: VerifyResult| rows.iter().filter(|row| row.result == result).count();
    for row in rows {
        let device = row.device_index.filter(|_| several(&row.source)).map(|device| format!(" (device {device})"));
        let _ = write!(out, "{:<9} {}{}: ", row.result.word(), row.source, device.unwrap_or_default());
        let mut parts: Vec<String> = row.reasons.clone();
        if row.result == VerifyResult::Exact {
            parts.push(format!("{} entries", row.entries_agreed));
            parts.extend(row.beginning.map(from_the_middle));
            for (number, one, many) in [
                (row.empty_caches as u64, "empty_cache", "empty_cache"),
                (row.driver_refusals as u64, "refusal by the driver", "refusals by the driver"),
                (row.retries, "retry", "retries"),
                (row.ooms, "out of memory", "out of memory"),
            ] {
                parts.extend((number > 0).then(|| format!("{number} {}", if number == 1 { one } else { many })));
            }
            parts.extend(pools_in_words(&row.pools));
            let changes = row.settings_changes.iter();
            parts.extend(changes.map(|change| {
                format!("explained by settings changed before entry {}: {}", change.entry, change.change)
            }));
        } else if row.result == VerifyResult::Consistent {
            parts.push(format!("{} entries agree with each other and with the memory at the end", row.entries));
        } else if row.result != VerifyResult::Failed {
            let passed_over = row.beginning.map_or(0, |before| before.entries_passed_over);
            parts.push(format!("{} of {} entries agree", row.entries_agreed, row.entries - passed_over));
            parts.extend(row.beginning.map(from_the_middle));
        }
        parts.extend(row.own_limit.as_ref().map(limit_in_words));
        parts.extend(row.release_known_by.as_ref().map(|release| format!("PyTorch {release}")));
        parts.extend(settings_in_words(row).map(str::to_owned));
        parts.extend(row.divergence.as_ref().map(Divergence::to_string));
        parts.extend(row.doubt().map(str::to_owned));
        let _ = writeln!(out, "{}", parts.join(", "));
    }
    let total: usize = rows.iter().map(|row| row.entries_agreed).sum();
    let recordings = if rows.len() == 1 { "recording" } else { "recordings" };
    let _ = write!(out, "{} {recordings}, {total} entries agree: {} exact", rows.len(), count(VerifyResult::Exact));
    for result in [VerifyResult::Consistent, VerifyResult::Partial, VerifyResult::Diverged, VerifyResult::Failed] {
        if count(result) > 0 {
            let _ = write!(out, ", {} {}", count(result), result.word().to_lowercase());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_entries_are_not_counted() {
        let row = VerifyRow {
            result: VerifyResult::Partial,
            entries: 5994,
            entries_agreed: 5993,
            beginning: Some(Beginning { blocks: 258, segments: 24, entries_passed_over: 1 }),
            ..VerifyRow::failed(Path::new("late.pickle"), "it uses private pools".to_owned())
        };
        let text = text(&[row]);
        assert!(
            text.contains("private pools, 5993 of 5993 entries agree, from the middle: 258 blocks in 24"),
            "{text}"
        );
    }
}
