//! `oomph verify`.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::{
    exit,
    failure::{Failure, Outcome},
    options::{DeviceOptions, Format},
    progress::{self, OneOf, Stages},
    verify_on::{self, OnOptions},
};
use crate::{
    base::{Bytes, Progress, parallel_map},
    device::DeviceProps,
    replay::verify::{Beginning, Companion, Divergence, Verdict, Verification, verify},
    report::{Medium, Render, ReportError},
    strategy::Setup,
    suite,
    trace::torch::{OwnLimit, Recording, Snapshot},
};

/// Re-lives PyTorch memory snapshots: drives the model of PyTorch's allocator with the program's own actions, under the
/// settings of the recording and with the driver's answers taken from it, and compares every entry, the memory at the
/// end and PyTorch's counters.
///
/// A line a recording: EXACT; PARTIAL where the recording does not tell enough to say; DIVERGED with the first
/// difference in both views; FAILED where it cannot be read.
///
/// With --on it is the device that is compared: does this GPU agree with the simulated one, decision by decision?
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A snapshot does not say how much memory the program was allowed to use. If it was limited, give the share with
--fraction, or put a table snapshots.csv beside it with the columns snapshot (the file's name without .pickle) and
memory_fraction. The same table may hold PyTorch's counters: peak_allocated, peak_reserved, final_segments,
final_inactive_split, alloc_retries, ooms; they are compared too. Calls of empty_cache are not recorded, nor is a
driver that has no more memory: both are inferred, and counted.

A recording that began in the middle, because its history was switched on late or kept the last entries only, is
re-lived too: the memory at the end and the entries tell how memory was when it began. Of that only the ages of cached
blocks, which garbage collection goes by, cannot be known, and sometimes the size of blocks that were there already: if
the model then does something else, the recording is PARTIAL and says so. Peaks and counts over the whole run are not
compared.

With --on, each SOURCE runs under each --strategy on that device, and every answer of the driver is logged: where memory
lies, whether events are done, what fails. A second run is given these answers and must decide the same at every event:
block and size, how it was found, segments taken, mapped and given back, retries, failures, frees completed. A third runs
freely on the simulated device of --device; its peaks are compared in percent. A recording keeps its own memory limit, as
above; requests that fail are left out and the run goes on. Memory does not grow with the length of a trace.

Exit code 0 if every recording is exact or every decision the same, 100 if not, 2 if one cannot be read; with --on 104
if a case could not be run, 130 after Ctrl-C, which shows the cases that were done.

Examples:
  oomph verify snapshot.pickle
  oomph verify --fraction 0.5 capped.pickle
  oomph verify --format json runs/*.pickle.xz
  oomph verify --on cuda snapshot.pickle training
  oomph verify --on cuda --suite quick --strategy caching --format csv
  oomph verify --on cuda --strategy async runs/*.pickle.xz")]
pub struct Args {
    /// What torch.cuda.memory._dump_snapshot wrote; .gz, .xz and .zst are read as they are. With --on, any SOURCE: a
    /// workload, a workload TOML, or a trace file in any known format.
    #[arg(value_name = "SNAPSHOT", required_unless_present = "suite")]
    pub(super) sources: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) on: OnOptions,
    /// Share of the device's memory that the program was allowed to use, from 0 to 1; 1 is no limit.
    #[arg(long, value_name = "F", value_parser = share)]
    fraction: Option<f64>,
    /// Only this device of each snapshot; without it every device that something is known about.
    #[arg(long, value_name = "N")]
    pub(super) device_index: Option<u32>,
    #[command(flatten)]
    pub(super) device: DeviceOptions,
    /// How it is printed.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json, Format::Csv]))]
    pub(super) format: Format,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("'{text}' is not a number from 0 to 1"))
}

pub fn run(args: Args) -> Outcome {
    if args.on.device.is_some() {
        return verify_on::run(&args);
    }
    let props = args.device.spec()?.open().map_err(Failure::usage)?.props().clone();
    let rows = verify_all(&args, &props);
    args.format.print(&rows)?;
    let any = |result: Finding| rows.iter().any(|row| row.result == result);
    Ok(if any(Finding::Failed) {
        exit::USAGE
    } else if any(Finding::Diverged) || any(Finding::Partial) {
        exit::NOT_EXACT
    } else {
        exit::OK
    })
}

/// What became of one device of one snapshot.
#[derive(Debug, Serialize)]
struct Row {
    file: String,
    device: Option<u32>,
    result: Finding,
    /// Why it is not exact.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasons: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    divergence: Option<Divergence>,
    /// What was there before, if it began in the middle.
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
    /// The limit that the program had set itself and nobody told us, as far as its failures enclose it.
    own_limit: Option<OwnLimit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Finding {
    Exact,
    Partial,
    Diverged,
    Failed,
}

impl Finding {
    fn word(self) -> &'static str {
        match self {
            Finding::Exact => "EXACT",
            Finding::Partial => "PARTIAL",
            Finding::Diverged => "DIVERGED",
            Finding::Failed => "FAILED",
        }
    }
}

impl Row {
    fn failed(path: &Path, reason: String) -> Row {
        Row {
            file: path.display().to_string(),
            device: None,
            result: Finding::Failed,
            reasons: vec![reason],
            divergence: None,
            beginning: None,
            entries: 0,
            entries_agreed: 0,
            empty_caches: 0,
            driver_refusals: 0,
            retries: 0,
            ooms: 0,
            peak_allocated_bytes: 0,
            peak_reserved_bytes: 0,
            limit_bytes: None,
            own_limit: None,
        }
    }

    fn of(path: &Path, recording: &Recording, limit_bytes: Option<u64>, verification: Verification) -> Row {
        let (result, reasons, divergence) = match verification.verdict {
            Verdict::Exact => (Finding::Exact, Vec::new(), None),
            Verdict::Partial { reasons, divergence } => (Finding::Partial, reasons, divergence),
            Verdict::Diverged(divergence) => (Finding::Diverged, Vec::new(), Some(divergence)),
        };
        Row {
            file: path.display().to_string(),
            device: Some(recording.device),
            result,
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
            own_limit: recording.own_limit().filter(|_| limit_bytes.is_none()),
        }
    }
}

/// Verifies all snapshots on all cores; the rows are in the order of the arguments.
fn verify_all(args: &Args, props: &DeviceProps) -> Vec<Row> {
    let rows = |path: &PathBuf, progress: &dyn Progress| {
        verify_file(path, args, props, progress).unwrap_or_else(|reason| vec![Row::failed(path, reason)])
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

/// Every device of a snapshot, or the reason why there is none.
fn verify_file(path: &Path, args: &Args, props: &DeviceProps, progress: &dyn Progress) -> Result<Vec<Row>, String> {
    // Whatever the reason, the line it goes on begins with the path.
    let in_words = |error: String| error.trim_start_matches(&format!("{}: ", path.display())).to_owned();
    let snapshot = Snapshot::open(path, progress).map_err(|error| in_words(error.to_string()))?;
    let companion = Companion::beside(path).map_err(|error| error.to_string())?.unwrap_or_default();
    let limit = args.limit(&companion, props);
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
        // A snapshot of nothing has no device at all, but can still be told of.
        let device = Some(device).filter(|_| args.device_index.is_some() || !part.devices().is_empty());
        let recording = part.into_recording("", device, progress).map_err(|error| error.to_string())?;
        let verification = verify(&recording, &Setup { props, limit }, &companion.counters, progress);
        rows.push(Row::of(path, &recording, limit, verification));
    }
    Ok(rows)
}

impl Args {
    /// How much the program might reserve: as the arguments say, otherwise as the table beside the snapshot does.
    pub(super) fn limit(&self, companion: &Companion, props: &DeviceProps) -> Option<u64> {
        let fraction = self.fraction.or(if self.device.limit.is_some() { None } else { companion.memory_fraction });
        // As PyTorch computes it: the whole is no limit at all.
        let share = fraction.filter(|fraction| *fraction < 1.0).map(|share| (share * props.total_bytes as f64) as u64);
        [share, self.device.limit.map(|limit| limit.0)].into_iter().flatten().min()
    }
}

impl Render for [Row] {
    type Row = Row;

    fn rows(&self) -> &[Row] {
        self
    }

    fn text(&self, _: Medium) -> String {
        text(self)
    }

    /// Without lists: reasons and divergence are one text.
    fn csv(&self) -> Result<String, ReportError> {
        let mut table = csv::Writer::from_writer(Vec::new());
        table.write_record(COLUMNS)?;
        for row in self {
            let divergence = row.divergence.as_ref().map(Divergence::to_string);
            let reasons: Vec<String> = row.reasons.iter().cloned().chain(divergence).collect();
            table.serialize((
                (&row.file, row.device, row.result, reasons.join("; ")),
                (row.entries, row.entries_agreed, row.empty_caches, row.driver_refusals, row.retries, row.ooms),
                (row.peak_allocated_bytes, row.peak_reserved_bytes, row.limit_bytes),
                row.beginning
                    .map(|before| (before.blocks, before.segments, before.entries_passed_over))
                    .unwrap_or_default(),
            ))?;
        }
        let bytes = table.into_inner().map_err(|error| ReportError::Csv(error.into_error().into()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

const COLUMNS: [&str; 16] = [
    "file",
    "device",
    "result",
    "reasons",
    "entries",
    "entries_agreed",
    "empty_caches",
    "driver_refusals",
    "retries",
    "ooms",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "limit_bytes",
    "blocks_before",
    "segments_before",
    "entries_passed_over",
];

fn from_the_middle(before: Beginning) -> String {
    let Beginning { blocks, segments, entries_passed_over } = before;
    let mut text = format!("from the middle: {blocks} blocks in {segments} segments were there before it");
    if entries_passed_over > 0 {
        let _ = write!(text, " ({entries_passed_over} entries of a call under way are passed over)");
    }
    text
}

fn text(rows: &[Row]) -> String {
    let mut out = String::new();
    let several = |file: &str| rows.iter().filter(|row| row.file == file).count() > 1;
    let count = |result: Finding| rows.iter().filter(|row| row.result == result).count();
    for row in rows {
        let device = row.device.filter(|_| several(&row.file)).map(|device| format!(" (device {device})"));
        let _ = write!(out, "{:<9} {}{}: ", row.result.word(), row.file, device.unwrap_or_default());
        let mut says: Vec<String> = row.reasons.clone();
        if row.result == Finding::Exact {
            says.push(format!("{} entries", row.entries_agreed));
            says.extend(row.beginning.map(from_the_middle));
            let refusals = if row.own_limit.is_some() { 0 } else { row.driver_refusals as u64 };
            for (number, what) in [
                (row.empty_caches as u64, "empty_cache"),
                (refusals, "refusals by the driver"),
                (row.retries, "retries"),
                (row.ooms, "out of memory"),
            ] {
                says.extend((number > 0).then(|| format!("{number} {what}")));
            }
        } else if row.result != Finding::Failed {
            let passed_over = row.beginning.map_or(0, |before| before.entries_passed_over);
            says.push(format!("{} of {} entries agree", row.entries_agreed, row.entries - passed_over));
            says.extend(row.beginning.map(from_the_middle));
        }
        says.extend(row.own_limit.map(|limit| {
            let (at_least, below) = (Bytes(limit.at_least_bytes), Bytes(limit.below_bytes));
            format!("under a limit of its own of {at_least} or more, less than {below} (--limit tells which)")
        }));
        says.extend(row.divergence.as_ref().map(Divergence::to_string));
        let _ = writeln!(out, "{}", says.join(", "));
    }
    let total: usize = rows.iter().map(|row| row.entries_agreed).sum();
    let recordings = if rows.len() == 1 { "recording" } else { "recordings" };
    let _ = write!(out, "{} {recordings}, {total} entries agree: {} exact", rows.len(), count(Finding::Exact));
    for result in [Finding::Partial, Finding::Diverged, Finding::Failed] {
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
    fn entries_that_are_passed_over_are_not_among_those_that_could_agree() {
        let row = Row {
            result: Finding::Partial,
            entries: 5994,
            entries_agreed: 5993,
            beginning: Some(Beginning { blocks: 258, segments: 24, entries_passed_over: 1 }),
            ..Row::failed(Path::new("late.pickle"), "it uses private pools".to_owned())
        };
        let text = text(&[row]);
        assert!(
            text.contains("private pools, 5993 of 5993 entries agree, from the middle: 258 blocks in 24"),
            "{text}"
        );
    }
}
