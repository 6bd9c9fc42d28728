//! Allocators in shared libraries, from the outside: small ones in C that behave, and some that do not; PyTorch's own
//! where the oracle is built; and our own library in the place of such a one.
//!
//! Without a C compiler these tests say so and pass.

#![cfg(target_os = "linux")]
mod failing;
mod host;
#[path = "../../../crates/torch-allocator/tests/served/library.rs"]
mod library;
mod loaded;
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

/// A folder for the libraries of one test.
struct Workshop(TempDir);

impl Workshop {
    /// None where there is no C compiler.
    fn open() -> Option<Workshop> {
        if Command::new("cc").arg("--version").output().is_err() {
            say("skipped: there is no C compiler (cc)");
            return None;
        }
        Some(Workshop(tempfile::tempdir().unwrap()))
    }

    /// Builds one of the allocators in allocators.c.
    fn allocator(&self, which: &str) -> PathBuf {
        let library = self.0.path().join(format!("{}.so", which.to_lowercase()));
        self.compile(&["-shared", "-fPIC", &format!("-D{which}")], "allocators.c", &library);
        library
    }

    /// Builds the one that goes wrong in some way (a statement in C), in `load` or in one of its functions.
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

    /// What becomes of a replay. `null` runs beside it: where everything fails there is no table.
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
