//! Allocators in shared libraries: small ones in C, correct and faulty; PyTorch's own if the oracle
//! is built; and our own library loaded as a plugin.
//!
//! Without a C compiler these tests print why they are skipped and pass.

#![cfg(target_os = "linux")]
mod failing;
mod host;
#[path = "../../../crates/torch-allocator/tests/served/library.rs"]
mod library;
mod loaded;
mod museum;
mod torch;

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;

fn say(text: &str) {
    eprintln!("{text}");
}

/// A temporary folder in which one test builds plugins and runs the binary.
struct PluginFixture(TempDir);

impl PluginFixture {
    /// `None` without a C compiler.
    fn open() -> Option<PluginFixture> {
        if Command::new("cc").arg("--version").output().is_err() {
            say("skipped: there is no C compiler (cc)");
            return None;
        }
        Some(PluginFixture(tempfile::tempdir().unwrap()))
    }

    /// Builds one of the allocators in allocators.c.
    fn allocator(&self, which: &str) -> PathBuf {
        let library = self.0.path().join(format!("{}.so", which.to_lowercase()));
        self.compile(&["-shared", "-fPIC", &format!("-D{which}")], "allocators.c", &library);
        library
    }

    /// Builds a plugin that runs the C statement `way` in `load` or in one of its functions.
    fn failing(&self, place: &str, way: &str) -> PathBuf {
        let file: String =
            format!("{place}_{way}.so").chars().filter(|c| c.is_alphanumeric() || "._".contains(*c)).collect();
        let library = self.0.path().join(file);
        let (place, way) = (format!("-DIN={}", place.to_uppercase()), format!("-DHOW={way}"));
        self.compile(&["-shared", "-fPIC", "-DFAILING", &place, &way], "allocators.c", &library);
        library
    }

    fn compile(&self, flags: &[&str], source: &str, output: &Path) {
        let source = Path::new("tests/integration/plugin").join(source);
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-w", "-pthread"]).arg(&source).args(flags).arg("-o").arg(output);
        let said = compiler.output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oomph"));
        command.args(arguments).current_dir(self.0.path()).env("NO_COLOR", "1");
        command
    }

    fn oomph(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// The row of a replay. `null` runs too, because there is no table if every case fails.
    fn replay(&self, workload: &str, strategy: &str, options: &[&str]) -> Value {
        let arguments =
            [&["replay", workload, "--strategy", "null", "--strategy", strategy, "--format", "json"], options].concat();
        let output = self.oomph(&arguments);
        let document: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        document["rows"][1].clone()
    }
}

fn plugin(library: &Path) -> String {
    format!("plugin:{}", library.display())
}
