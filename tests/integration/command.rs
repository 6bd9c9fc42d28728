//! The binary as a person runs it, for all tests that drive it from outside.

use std::{path::Path, process::Command};

/// Variables that would change what the binary does: a machine that runs tests may well be a PyTorch user's, or a task of
/// a Slurm job array.
const TELLING: [&str; 7] = [
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_COUNT",
    "SLURM_ARRAY_TASK_MIN",
    "SLURM_ARRAY_TASK_MAX",
    "SLURM_ARRAY_TASK_STEP",
];

/// The binary in a folder, with nothing from the environment that could change what it prints.
pub fn oomph(folder: &(impl AsRef<Path> + ?Sized)) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oomph"));
    command.current_dir(folder).env("NO_COLOR", "1");
    for name in TELLING {
        command.env_remove(name);
    }
    command
}

/// Runs it, checks the exit code, and returns standard output and standard error.
#[track_caller]
pub fn run(folder: impl AsRef<Path>, arguments: &[&str], code: i32) -> (String, String) {
    let output = oomph(&folder).args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}\n{out}\n{err}");
    (out, err)
}
