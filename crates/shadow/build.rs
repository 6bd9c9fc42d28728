//! Builds the shared library of the shadow GPU with two calls of the compiler (the rules of the driver, then the library),
//! and lets `src/lib.rs` embed it.
//!
//! Why not otherwise: a position-independent program cannot be loaded by `dlopen`, so the program itself cannot be the
//! library. Dependencies on a cdylib ("artifact dependencies") need a nightly Cargo. A nested `cargo build` would wait
//! for the lock of the build directory and compile everything twice. The library depends on `oomph-driver` alone, which
//! depends on nothing and says by Cargo's `links` where its sources are, in a checkout as in a registry.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    println!("cargo::rerun-if-changed=core");
    println!("cargo::rerun-if-changed=src/functions");
    println!("cargo::rerun-if-changed=build.rs");
    let variable = |name: &str| env::var(name).unwrap_or_else(|_| panic!("Cargo sets {name}"));
    let library = PathBuf::from(variable("OUT_DIR")).join("liboomph_shadow.so");
    // The forwarders are x86-64 ELF files for Linux. Elsewhere the library is empty and `rehearse` says so.
    if variable("CARGO_CFG_TARGET_ARCH") != "x86_64" || variable("CARGO_CFG_TARGET_OS") != "linux" {
        std::fs::write(&library, []).unwrap_or_else(|error| panic!("cannot write {}: {error}", library.display()));
        return;
    }
    let sources = variable("DEP_OOMPH_DRIVER_SOURCE");
    println!("cargo::rerun-if-changed={}", sources.trim_end_matches("lib.rs"));
    let rules = library.with_file_name("liboomph_driver.rlib");
    compile(&["--crate-type", "rlib", "--crate-name", "oomph_driver"], &sources, &rules);
    let extern_rules = format!("oomph_driver={}", rules.display());
    let link = ["-C", "strip=symbols", "-C", "link-arg=-Wl,-soname,liboomph_shadow.so"];
    let linker = env::var("RUSTC_LINKER").map(|linker| format!("linker={linker}"));
    let mut options = vec!["--crate-type", "cdylib", "--crate-name", "oomph_shadow", "--extern", &extern_rules];
    options.extend(link);
    if let Ok(linker) = &linker {
        options.extend(["-C", linker]);
    }
    compile(&options, "core/lib.rs", &library);
}

/// One call of the compiler. Always optimised: the library runs inside programs that launch kernels by the thousand.
fn compile(options: &[&str], source: &str, output: &Path) {
    let variable = |name: &str| env::var(name).unwrap_or_else(|_| panic!("Cargo sets {name}"));
    let status = Command::new(variable("RUSTC"))
        .args(["--edition", "2024", "--target", &variable("TARGET"), "-C", "opt-level=2", "-C", "panic=abort"])
        .args(options)
        .arg("-o")
        .arg(output)
        .arg(source)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{source} does not compile: {status}"),
        Err(error) => panic!("cannot start the compiler: {error}"),
    }
}
