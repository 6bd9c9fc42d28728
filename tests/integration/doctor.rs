//! `oomph doctor`: its report on libraries, and measured profiles.

use std::{path::Path, process::Output};

use assert_cmd::Command;
use tempfile::TempDir;

fn oomph(folder: &Path, arguments: &[&str], variables: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oomph"));
    command.current_dir(folder).args(arguments).envs(variables.iter().copied()).output().unwrap()
}

#[test]
fn a_measured_profile_can_be_simulated() {
    let folder = TempDir::new().unwrap();
    let measured = oomph(folder.path(), &["doctor", "--calibrate", "mine.toml", "--device", "sim"], &[]);
    let said = String::from_utf8(measured.stdout).unwrap();
    assert!(measured.status.success(), "{said}");
    for word in ["fp32 at up to", "bf16 at up to", "GB/s", "pinned", "--card mine.toml"] {
        assert!(said.contains(word), "{word} is missing in {said}");
    }
    let peaks = |card: &str| {
        let arguments = ["replay", "training", "-s", "caching", "--card", card, "--format", "csv"];
        let output = oomph(folder.path(), &arguments, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let mut rows = csv::Reader::from_reader(text.as_bytes());
        let place = rows.headers().unwrap().iter().position(|name| name == "peak_reserved_bytes").unwrap();
        rows.records().next().unwrap().unwrap()[place].to_owned()
    };
    assert_eq!(peaks("mine.toml"), peaks("h200"));
}

#[test]
fn missing_device_cannot_be_measured() {
    let folder = TempDir::new().unwrap();
    let refused = oomph(folder.path(), &["doctor", "--calibrate", "mine.toml", "--device", "cuda:4000"], &[]);
    assert_eq!(refused.status.code(), Some(103));
    assert!(!folder.path().join("mine.toml").exists());
}

#[test]
fn unknown_profile_suggests_the_nearest() {
    let folder = TempDir::new().unwrap();
    let refused = oomph(folder.path(), &["replay", "checkerboard", "--card", "h20"], &[]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(said.contains("unknown card 'h20'") && said.contains("did you mean 'h200'?"), "{said}");
}

#[cfg(feature = "cuda")]
mod libraries {
    use std::fs;

    use super::*;

    /// The line of `doctor` about one subject.
    fn line(folder: &Path, subject: &str, variables: &[(&str, &Path)]) -> String {
        let said = String::from_utf8(oomph(folder, &["doctor"], variables).stdout).unwrap();
        said.lines().find(|line| line.starts_with(subject)).unwrap().to_owned()
    }

    #[test]
    fn doctor_reports_libraries() {
        let folder = TempDir::new().unwrap();
        let said = line(folder.path(), "cublas", &[]);
        assert!(said.contains("libcublas"), "{said}");
        assert!(said.contains(" ok ") || said.contains(" missing "), "{said}");
    }

    #[test]
    fn invalid_library_is_named() {
        let folder = TempDir::new().unwrap();
        let libraries = folder.path().join("toolkit/lib64");
        fs::create_dir_all(&libraries).unwrap();
        fs::write(libraries.join("libcublas.so.12"), "no library").unwrap();
        let said = line(folder.path(), "cublas", &[("CUDA_HOME", &folder.path().join("toolkit"))]);
        // A machine with a real cuBLAS finds that one first.
        assert!(said.contains(" ok ") || said.contains("toolkit/lib64/libcublas.so.12 cannot be loaded"), "{said}");
    }
}
