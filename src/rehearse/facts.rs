//! What a rehearsed program left behind: events while it ran, and one file of facts for each process.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::base::{FileText, read_within};

/// The largest file of facts: reads are grouped by line, so it is small.
const LARGEST_FACTS: u64 = 64 << 20;

/// A line that a process of the program wrote while it ran.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ProgramEvent {
    /// What happened.
    pub event: EventKind,
    /// The process.
    pub pid: u32,
    /// Its rank.
    #[serde(default)]
    pub rank: u32,
    /// Steps so far.
    #[serde(default)]
    pub step: u64,
    /// Most allocated bytes so far.
    #[serde(default)]
    pub allocated: u64,
    /// Most reserved bytes so far.
    #[serde(default)]
    pub reserved: u64,
    /// Why the program cannot be rehearsed.
    #[serde(default)]
    pub reason: String,
    /// The Python that runs it.
    #[serde(default)]
    pub executable: String,
    /// The line of the program.
    #[serde(default)]
    pub r#where: Option<String>,
}

/// What happened in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// Python loaded the injected module.
    Python,
    /// PyTorch is not installed.
    Missing,
    /// PyTorch is being imported.
    Torch,
    /// It cannot be rehearsed.
    Refused,
    /// CUDA was initialised.
    Cuda,
    /// A step of an optimizer.
    Step,
    /// SIGTERM.
    Terminated,
    /// The recording is written.
    End,
}

/// Reads the events as they are written.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
    /// A line that is not complete.
    rest: Vec<u8>,
}

impl EventLog {
    /// Creates the file.
    pub fn create(path: &Path) -> io::Result<EventLog> {
        fs::write(path, "")?;
        Ok(EventLog { path: path.to_owned(), file: File::open(path)?, rest: Vec::new() })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The events since the last call. Lines that are not events are skipped: the program can write there too.
    pub fn new_events(&mut self) -> Vec<ProgramEvent> {
        let mut added = Vec::new();
        // The position stays after what was read; an error leaves the rest to the next call.
        let _ = self.file.read_to_end(&mut added);
        self.rest.extend(added);
        let Some(end) = self.rest.iter().rposition(|&byte| byte == b'\n') else { return Vec::new() };
        let lines: Vec<u8> = self.rest.drain(..=end).collect();
        lines.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }
}

/// The facts of one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessFacts {
    /// Its rank.
    pub rank: u32,
    /// PyTorch's version.
    pub torch: FileText,
    /// Seconds since CUDA was initialised.
    pub seconds: f64,
    /// Steps of the optimizer.
    pub steps: u64,
    /// Whether it was ended after the steps that were asked for.
    pub stopped: bool,
    /// The last step in which the peaks rose.
    pub settled_after: u64,
    /// The memory of each device.
    pub devices: Vec<DeviceFacts>,
    /// The first request that failed.
    pub oom: Option<OomFacts>,
    /// Values that were read back.
    pub reads: Vec<ReadFacts>,
    /// What could not be recorded.
    pub problems: Vec<FileText>,
    /// What torch.compile did, where it was used.
    #[serde(default)]
    pub compile: Option<CompileFacts>,
    /// What the shadow GPU counted.
    pub shadow: Option<ShadowFacts>,
    /// Why the installed cuDNN does not answer for convolutions, if the program runs any.
    #[serde(default)]
    pub cudnn_reason: Option<FileText>,
}

/// What Inductor counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompileFacts {
    /// The folder of its cache at the end.
    pub cache: Option<String>,
    /// Graphs that it found in its cache.
    pub graphs_from_cache: u64,
    /// Graphs that it compiled.
    pub graphs_compiled: u64,
    /// Candidates for kernels whose time it measured.
    pub candidates_measured: u64,
    /// Kernels that it chose by such times, where that is known.
    pub kernels_chosen: Option<u64>,
}

impl CompileFacts {
    /// Adds another process.
    pub fn add(&mut self, other: &CompileFacts) {
        self.graphs_from_cache += other.graphs_from_cache;
        self.graphs_compiled += other.graphs_compiled;
        self.candidates_measured += other.candidates_measured;
        self.kernels_chosen = self.kernels_chosen.zip(other.kernels_chosen).map(|(one, two)| one + two);
    }
}

/// The memory of one device in one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Its index.
    pub device: u32,
    /// Most bytes in blocks.
    pub peak_allocated: u64,
    /// Most bytes taken from the driver.
    pub peak_reserved: u64,
    /// How often the cache was released to serve a request.
    pub retries: u64,
    /// Failed requests.
    pub ooms: u64,
    /// The file of the recording.
    pub recording: Option<String>,
    /// Recorded entries.
    pub entries: u64,
}

/// A request that failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomFacts {
    /// On which device.
    pub device: u32,
    /// In which step, counted from 1.
    pub step: u64,
    /// Requested bytes, as rounded by PyTorch.
    pub request: u64,
    /// What the driver had.
    pub free: u64,
    /// Bytes in blocks.
    pub allocated: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// The line of the program.
    pub r#where: Option<FileText>,
}

/// Values of one kernel that one line of the program read back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFacts {
    /// The line; empty where it is unknown.
    pub r#where: FileText,
    /// The kernel that made the value; empty where it is unknown.
    pub kernel: FileText,
    /// How often.
    pub count: u64,
    /// Bytes.
    pub bytes: u64,
    /// How the core answered.
    #[serde(default)]
    pub kind: i64,
}

/// What the core counted. Fields that it does not write are empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ShadowFacts {
    /// Memory in use on each device, the context included.
    pub devices: Vec<ShadowUsage>,
    /// Functions that the core does not know.
    pub unserved: Vec<FileText>,
    /// Assumptions that were used, and how often.
    pub assumptions: BTreeMap<FileText, u64>,
}

/// Memory in use on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowUsage {
    /// Most bytes.
    pub peak: u64,
}

impl ProcessFacts {
    /// All that the processes of a program wrote into a folder, in the order of their ranks.
    pub fn all_in(folder: &Path) -> io::Result<Vec<ProcessFacts>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with("rank-") && name.ends_with(".json") {
                let text = read_within(&path, LARGEST_FACTS)?;
                // A process that was killed leaves an empty file: its name was taken, and nothing was written.
                if let Ok(facts) = serde_json::from_slice::<ProcessFacts>(&text) {
                    found.push((name, facts));
                } else if text.is_empty() {
                    fs::remove_file(&path)?;
                }
            }
        }
        found.sort_by(|one, other| (one.1.rank, &one.0).cmp(&(other.1.rank, &other.0)));
        Ok(found.into_iter().map(|(_, facts)| facts).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn events_are_read_line_by_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let mut log = EventLog::create(&path).unwrap();
        let mut writer = fs::OpenOptions::new().append(true).open(&path).unwrap();
        assert_eq!(log.new_events(), []);
        write!(writer, "{{\"event\": \"python\", \"pid\": 7, \"rank\": 0}}\nnonsense\n{{\"event\": \"st").unwrap();
        let kinds = |log: &mut EventLog| log.new_events().iter().map(|event| event.event).collect::<Vec<_>>();
        assert_eq!(kinds(&mut log), [EventKind::Python]);
        writeln!(writer, "ep\", \"pid\": 7, \"step\": 3, \"allocated\": 5, \"reserved\": 9}}").unwrap();
        let events = log.new_events();
        assert_eq!((events[0].step, events[0].allocated, events[0].reserved), (3, 5, 9));
    }

    #[test]
    fn killed_processes_leave_no_facts() {
        let folder = tempfile::tempdir().unwrap();
        let facts = r#"{"rank": 1, "torch": "2.11", "seconds": 1.5, "steps": 2, "stopped": false, "settled_after": 2,
            "devices": [], "oom": null, "reads": [], "problems": [], "shadow": {"unserved": ["cuFoo"]}}"#;
        fs::write(folder.path().join("rank-1.json"), facts).unwrap();
        fs::write(folder.path().join("rank-0.json"), "").unwrap();
        fs::write(folder.path().join("other.json"), "[]").unwrap();
        let found = ProcessFacts::all_in(folder.path()).unwrap();
        assert_eq!(found.iter().map(|one| (one.rank, one.steps)).collect::<Vec<_>>(), [(1, 2)]);
        assert_eq!(found[0].shadow.as_ref().unwrap().unserved[0].raw(), "cuFoo");
        assert!(!folder.path().join("rank-0.json").exists());
    }
}
