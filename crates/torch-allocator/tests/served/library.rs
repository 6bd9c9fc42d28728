//! `liboomph.so` for tests. The integration tests of the root package include this file too.

use std::{env, path::PathBuf, process::Command, sync::OnceLock};

/// `liboomph.so` in the profile of the running test. Cargo does not build a cdylib for tests, so it is built here once.
pub fn liboomph() -> PathBuf {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        // target/PROFILE/deps/TEST-HASH
        let test = env::current_exe().unwrap();
        let folder = test.ancestors().nth(2).unwrap();
        let profile = folder.file_name().unwrap().to_str().unwrap();
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--package", "oomph-torch-allocator", "--profile"]);
        let built = cargo.arg(if profile == "debug" { "dev" } else { profile }).status().unwrap();
        assert!(built.success());
        folder.join("liboomph.so")
    };
    LIBRARY.get_or_init(build).clone()
}
