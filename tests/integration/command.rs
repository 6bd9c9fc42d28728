//! Runs the binary as a user does, for all tests that drive it from outside.

use std::{path::Path, process::Command};

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

/// Runs it, checks the exit code, and returns standard output and standard error.
#[track_caller]
pub fn run(folder: impl AsRef<Path>, arguments: &[&str], code: i32) -> (String, String) {
    let output = oomph(&folder).args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}\n{out}\n{err}");
    (out, err)
}
