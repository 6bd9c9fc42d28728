//! `oomph record` on the binary: what it prints is Python.

use std::process::Command;

use assert_cmd::cargo::cargo_bin_cmd;

#[test]
fn python_understands_every_script() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return;
    }
    for when in ["exit", "oom"] {
        for more in [&[][..], &["--last", "1000"], &["--no-stacks"], &["--torch", "2.0"], &["--name", "a b"]] {
            let printed = cargo_bin_cmd!("oomph").args(["record", "--when", when]).args(more).output().unwrap();
            assert!(printed.status.success());
            let script = String::from_utf8(printed.stdout).unwrap();
            let parsed =
                Command::new("python3").args(["-c", "import ast, sys; ast.parse(sys.argv[1])", &script]).output();
            let parsed = parsed.unwrap();
            assert!(parsed.status.success(), "{script}\n{}", String::from_utf8_lossy(&parsed.stderr));
        }
    }
}

#[test]
fn a_version_without_history_is_refused_with_the_reason() {
    let refused = cargo_bin_cmd!("oomph").args(["record", "--torch", "1.9"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("before PyTorch 2.0 there is no history"));
}
