//! `oomph stress` as users call it.

mod faults;
mod properties;

use std::{path::Path, process::Output};

use assert_cmd::Command;
use serde_json::Value;

fn oomph(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::cargo_bin("oomph").unwrap();
    command.current_dir(folder).args(arguments.split_whitespace()).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn rows(output: &Output) -> Vec<Value> {
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["schema"], 2);
    value["rows"].as_array().unwrap().clone()
}
