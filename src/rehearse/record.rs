//! The result of a rehearsal on one card.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde::Serialize;

use super::{
    compile_cache::CompileCacheState,
    facts::{CompileFacts, DeviceFacts, OomFacts, ProcessFacts, ReadFacts},
    program::{ProgramEnd, ProgramOutcome},
};
use crate::{
    base::{FileText, path_text},
    device::Card,
};

/// How a rehearsal ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RehearsalVerdict {
    /// The program came to its end, or to the last step asked for.
    Fits,
    /// A request failed.
    DoesNotFit,
    /// The program failed for another reason.
    #[default]
    Failed,
    /// It took too long.
    TimedOut,
    /// The user interrupted it.
    Interrupted,
}

/// What one run of the program on one card showed. Figures are those of the rank and device that reserved most.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RehearsalRecord {
    /// The card, as it was typed.
    pub card: String,
    /// Its memory.
    pub total_bytes: u64,
    /// What its context takes.
    pub context_bytes: u64,
    /// Whether memory and context were measured by this project.
    pub card_is_measured: bool,
    /// What the process may take of it.
    pub limit_bytes: Option<u64>,
    /// The words of `--try`; empty for the command itself.
    pub variant: Option<String>,
    /// The value of `--largest`: the largest that fits, or the smallest if none does.
    pub value: Option<u64>,
    /// How it ended.
    pub verdict: RehearsalVerdict,
    /// Most bytes in blocks.
    pub peak_allocated_bytes: Option<u64>,
    /// Most bytes that PyTorch took from the driver.
    pub peak_reserved_bytes: Option<u64>,
    /// Most bytes in use on the card, with context and libraries.
    pub peak_card_bytes: Option<u64>,
    /// How often PyTorch released its cache to serve a request.
    pub retries: u64,
    /// Steps of the optimizer.
    pub steps: u64,
    /// Whether the program was ended after the steps asked for.
    pub stopped: bool,
    /// The last step in which the peaks rose.
    pub settled_after: u64,
    /// From start to end.
    pub wall_seconds: f64,
    /// Processes that used a GPU.
    pub processes: usize,
    /// The peaks of each rank, where there are several.
    pub ranks: Vec<RankPeaks>,
    /// The first request that failed.
    pub oom: Option<OomFacts>,
    /// How the program failed, if it did.
    pub failure: Option<String>,
    /// The recordings, one for each rank and device.
    pub recordings: Vec<String>,
    /// The recording of the rank and device that ran out, otherwise of those that reserved most.
    pub largest_recording: Option<String>,
    /// Values that were computed on the GPU and read back, those that were read most often first.
    pub reads: Vec<ReadFacts>,
    /// Functions that the shadow GPU does not know.
    pub unserved: Vec<FileText>,
    /// Assumptions that were used.
    pub assumptions: Vec<FileText>,
    /// Plans of convolutions whose workspace the installed cuDNN gave.
    pub convolutions_by_cudnn: u64,
    /// Plans of convolutions whose workspace follows a rule.
    pub convolutions_by_rule: u64,
    /// Why the installed cuDNN does not answer for convolutions.
    pub cudnn_reason: Option<FileText>,
    /// What torch.compile did in all ranks, where it was used.
    pub compile: Option<CompileFacts>,
    /// What it found in its cache.
    pub compile_cache: CompileCacheState,
    /// What could not be recorded.
    pub problems: Vec<FileText>,
    /// PyTorch's version.
    pub torch: FileText,
}

/// The peaks of one rank, on the device on which it reserved most.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RankPeaks {
    /// The rank.
    pub rank: u32,
    /// Most bytes in blocks.
    pub allocated_bytes: u64,
    /// Most bytes taken from the driver.
    pub reserved_bytes: u64,
    /// Whether a request failed.
    pub ran_out: bool,
}

impl RankPeaks {
    fn of(process: &ProcessFacts) -> RankPeaks {
        let most = process.devices.iter().max_by_key(|device| (device.peak_reserved, device.peak_allocated));
        RankPeaks {
            rank: process.rank,
            allocated_bytes: most.map_or(0, |device| device.peak_allocated),
            reserved_bytes: most.map_or(0, |device| device.peak_reserved),
            ran_out: process.oom.is_some(),
        }
    }
}

impl RehearsalRecord {
    /// What a run showed. Its files lie in the folder.
    #[must_use]
    pub fn of(card: &Card, limit_bytes: Option<u64>, outcome: &ProgramOutcome, folder: &Path) -> RehearsalRecord {
        let processes = &outcome.processes;
        let devices = || processes.iter().flat_map(|process| &process.devices);
        let most = devices().max_by_key(|device| (device.peak_reserved, device.peak_allocated));
        let longest = processes.iter().max_by_key(|process| process.steps);
        let path = |device: &DeviceFacts| Some(path_text(&folder.join(device.recording.as_ref()?)));
        let shadows = || processes.iter().filter_map(|process| process.shadow.as_ref());
        let count = |name: &str| shadows().filter_map(|shadow| shadow.assumptions.get(&FileText::from(name))).sum();
        RehearsalRecord {
            card: card.to_string(),
            total_bytes: card.total_bytes(),
            context_bytes: card.context_bytes(),
            card_is_measured: card.facts().is_none_or(|facts| facts.measured),
            limit_bytes,
            verdict: verdict(outcome),
            peak_allocated_bytes: most.map(|device| device.peak_allocated),
            peak_reserved_bytes: most.map(|device| device.peak_reserved),
            peak_card_bytes: shadows().flat_map(|shadow| &shadow.devices).map(|device| device.peak).max(),
            retries: devices().map(|device| device.retries).max().unwrap_or(0),
            steps: longest.map_or(0, |process| process.steps),
            stopped: processes.iter().any(|process| process.stopped),
            settled_after: processes.iter().map(|process| process.settled_after).max().unwrap_or(0),
            wall_seconds: outcome.wall.as_secs_f64(),
            processes: processes.len(),
            ranks: if processes.len() > 1 { processes.iter().map(RankPeaks::of).collect() } else { Vec::new() },
            oom: processes.iter().find_map(|process| process.oom.clone()),
            failure: failure(outcome),
            recordings: devices().filter_map(path).collect(),
            largest_recording: ran_out_device(processes).or(most).and_then(path),
            reads: reads(outcome),
            unserved: distinct(shadows().flat_map(|shadow| &shadow.unserved)),
            assumptions: distinct(shadows().flat_map(|shadow| shadow.assumptions.keys())),
            convolutions_by_cudnn: count("cudnn_convolution_workspace_by_cudnn"),
            convolutions_by_rule: count("cudnn_convolution_workspace_by_rule"),
            cudnn_reason: processes.iter().find_map(|process| process.cudnn_reason.clone()),
            compile: compiled(outcome),
            compile_cache: outcome.compile_cache.clone(),
            problems: distinct(processes.iter().flat_map(|process| &process.problems)),
            torch: longest.map(|process| process.torch.clone()).unwrap_or_default(),
            variant: None,
            value: None,
        }
    }

    /// What the card has beyond what was in use at the peak: context included, or the limit of the process.
    #[must_use]
    pub fn left_bytes(&self) -> Option<u64> {
        let reserved = self.peak_reserved_bytes?;
        let of_card = self.total_bytes.saturating_sub(self.peak_card_bytes.unwrap_or(self.context_bytes + reserved));
        Some(self.limit_bytes.map_or(of_card, |limit| of_card.min(limit.saturating_sub(reserved))))
    }
}

/// The device of the first request that failed.
fn ran_out_device(processes: &[ProcessFacts]) -> Option<&DeviceFacts> {
    processes.iter().find_map(|process| {
        let oom = process.oom.as_ref()?;
        process.devices.iter().find(|device| device.device == oom.device)
    })
}

fn distinct<'a>(names: impl Iterator<Item = &'a FileText>) -> Vec<FileText> {
    names.collect::<BTreeSet<_>>().into_iter().cloned().collect()
}

fn verdict(outcome: &ProgramOutcome) -> RehearsalVerdict {
    match &outcome.ended_by {
        _ if outcome.ran_out() => RehearsalVerdict::DoesNotFit,
        Some(ProgramEnd::Timeout(_)) => RehearsalVerdict::TimedOut,
        Some(ProgramEnd::Interrupt) => RehearsalVerdict::Interrupted,
        None if outcome.status.success() && !outcome.processes.is_empty() => RehearsalVerdict::Fits,
        None => RehearsalVerdict::Failed,
    }
}

fn failure(outcome: &ProgramOutcome) -> Option<String> {
    match &outcome.ended_by {
        Some(ProgramEnd::Timeout(Some(line))) => Some(format!("did not end in time; it was at {line}")),
        Some(ProgramEnd::Timeout(None)) => Some("did not end in time".to_owned()),
        Some(ProgramEnd::Interrupt) => Some("was interrupted".to_owned()),
        None => outcome.failure(),
    }
}

/// What torch.compile did in all ranks.
fn compiled(outcome: &ProgramOutcome) -> Option<CompileFacts> {
    let mut ranks = outcome.processes.iter().filter_map(|process| process.compile.as_ref());
    let mut sum = ranks.next()?.clone();
    ranks.for_each(|rank| sum.add(rank));
    Some(sum)
}

/// Reads of all ranks, by line and kernel.
fn reads(outcome: &ProgramOutcome) -> Vec<ReadFacts> {
    let mut by_line: BTreeMap<(FileText, FileText), ReadFacts> = BTreeMap::new();
    for read in outcome.processes.iter().flat_map(|process| &process.reads) {
        let sum = by_line.entry((read.r#where.clone(), read.kernel.clone())).or_insert_with(|| ReadFacts {
            count: 0,
            bytes: 0,
            ..read.clone()
        });
        sum.count += read.count;
        sum.bytes += read.bytes;
    }
    let mut reads: Vec<ReadFacts> = by_line.into_values().collect();
    reads.sort_by_key(|read| std::cmp::Reverse(read.count));
    reads
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::ExitStatusExt, process::ExitStatus, time::Duration};

    use super::*;

    fn process(rank: u32, reserved: u64) -> ProcessFacts {
        let device = DeviceFacts {
            peak_allocated: reserved / 2,
            peak_reserved: reserved,
            recording: Some(format!("rank-{rank}.pickle")),
            ..DeviceFacts::default()
        };
        let read = ReadFacts { r#where: "train.py:3 f".into(), count: 2, bytes: 8, ..ReadFacts::default() };
        ProcessFacts { rank, steps: 4, devices: vec![device], reads: vec![read], ..ProcessFacts::default() }
    }

    fn outcome(code: i32, processes: Vec<ProcessFacts>) -> ProgramOutcome {
        ProgramOutcome {
            status: ExitStatus::from_raw(code << 8),
            failure: None,
            ended_by: None,
            wall: Duration::ZERO,
            processes,
            compile_cache: CompileCacheState::Empty,
        }
    }

    fn record(outcome: &ProgramOutcome) -> RehearsalRecord {
        RehearsalRecord::of(&"24GiB".parse().unwrap(), None, outcome, Path::new("out"))
    }

    #[test]
    fn the_rank_that_reserved_most_counts() {
        let record = record(&outcome(0, vec![process(0, 1000), process(1, 3000)]));
        assert_eq!(record.verdict, RehearsalVerdict::Fits);
        assert_eq!((record.peak_allocated_bytes, record.peak_reserved_bytes), (Some(1500), Some(3000)));
        assert_eq!(record.recordings, ["out/rank-0.pickle", "out/rank-1.pickle"]);
        assert_eq!(record.largest_recording.as_deref(), Some("out/rank-1.pickle"));
        let ranks = record.ranks.iter().map(|one| (one.rank, one.allocated_bytes, one.reserved_bytes));
        assert_eq!(ranks.collect::<Vec<_>>(), [(0, 500, 1000), (1, 1500, 3000)]);
        assert_eq!(record.reads.iter().map(|read| read.count).collect::<Vec<_>>(), [4]);
        assert_eq!(record.left_bytes(), Some(record.total_bytes - record.context_bytes - 3000));
    }

    #[test]
    fn a_failed_request_does_not_fit_whatever_the_program_does_then() {
        let mut ran_out = process(0, 1000);
        ran_out.oom = Some(OomFacts::default());
        assert_eq!(record(&outcome(0, vec![ran_out.clone()])).verdict, RehearsalVerdict::DoesNotFit);
        assert_eq!(record(&outcome(1, vec![ran_out])).verdict, RehearsalVerdict::DoesNotFit);
        let failed = record(&outcome(3, vec![process(0, 1000)]));
        assert_eq!(
            (failed.verdict, failed.failure.as_deref()),
            (RehearsalVerdict::Failed, Some("ended with exit code 3"))
        );
    }

    #[test]
    fn the_recording_of_the_rank_that_ran_out_is_explained() {
        let mut ran_out = process(1, 1000);
        ran_out.oom = Some(OomFacts::default());
        let record = record(&outcome(1, vec![process(0, 3000), ran_out]));
        assert_eq!(record.largest_recording.as_deref(), Some("out/rank-1.pickle"));
        assert_eq!(record.peak_reserved_bytes, Some(3000));
    }

    #[test]
    fn a_limit_leaves_less() {
        let outcome = outcome(0, vec![process(0, 1000)]);
        let record = RehearsalRecord::of(&"24GiB".parse().unwrap(), Some(1500), &outcome, Path::new("out"));
        assert_eq!(record.left_bytes(), Some(500));
    }
}
