//! Runs the binary as a user does, for all tests that drive it from outside.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Output},
    thread,
    time::{Duration, Instant},
};

/// Variables that change what the binary does. The machine that runs the tests may belong to a
/// PyTorch user, or run them in a Slurm job array.
const TELLING: [&str; 7] = [
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_COUNT",
    "SLURM_ARRAY_TASK_MIN",
    "SLURM_ARRAY_TASK_MAX",
    "SLURM_ARRAY_TASK_STEP",
];

/// The binary in a folder, without any environment variable that changes its output.
pub fn oomph(folder: &(impl AsRef<Path> + ?Sized)) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oomph"));
    command.current_dir(folder).env("NO_COLOR", "1");
    for name in TELLING {
        command.env_remove(name);
    }
    command
}

/// The same command with the default action for SIGHUP and SIGINT. Under nohup, in a background
/// shell and in cron these signals are ignored, and child processes inherit that.
#[cfg(unix)]
pub fn with_default_signals(command: &Command) -> Command {
    let mut wrapped = Command::new("env");
    wrapped.arg("--default-signal=HUP,INT").arg(command.get_program()).args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        wrapped.current_dir(folder);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    wrapped
}

/// Longer than any test waits.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Looks again and again until it sees something; fails after [`TIME_LIMIT`].
#[track_caller]
pub fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(began.elapsed() < TIME_LIMIT, "timed out waiting until {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Sends a signal to a process, or to a group if the number is negative.
#[track_caller]
pub fn signal(name: &str, target: i64) {
    let sent = Command::new("kill").args([&format!("-{name}"), "--", &target.to_string()]).status().unwrap();
    assert!(sent.success(), "kill -{name} {target}");
}

/// Waits until a process has ended. One that still runs after `limit` is killed, and the test fails.
#[track_caller]
pub fn end_within(limit: Duration, mut child: Child) -> Output {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > limit {
            child.kill().unwrap();
            panic!("still running after {limit:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Rewrites a run folder as a release without checksums and plans would have written it, so that a test can change it.
pub fn remove_checksums(folder: &Path) {
    let environment = folder.join("env.json");
    let mut document: serde_json::Value = serde_json::from_slice(&fs::read(&environment).unwrap()).unwrap();
    document.as_object_mut().unwrap().remove("crc32");
    fs::write(&environment, format!("{document:#}\n")).unwrap();
    fs::remove_file(folder.join("plan.csv")).unwrap();
    for name in ["runs.csv", "timings.csv"] {
        let path = folder.join(name);
        if path.is_file() {
            fs::write(&path, table_without_checksums(&path)).unwrap();
        }
    }
}

/// A table of a run folder without its column of checksums.
pub fn table_without_checksums(path: &Path) -> String {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).from_path(path).unwrap();
    let mut writer = csv::Writer::from_writer(Vec::new());
    for (place, row) in reader.records().map(Result::unwrap).enumerate() {
        assert!(place > 0 || &row[row.len() - 1] == "row_crc32", "{row:?}");
        writer.write_record(row.iter().take(row.len() - 1)).unwrap();
    }
    String::from_utf8(writer.into_inner().unwrap()).unwrap()
}

/// Runs it, checks the exit code, and returns standard output and standard error.
#[track_caller]
pub fn run(folder: impl AsRef<Path>, arguments: &[&str], code: i32) -> (String, String) {
    let output = oomph(&folder).args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}\n{out}\n{err}");
    (out, err)
}
