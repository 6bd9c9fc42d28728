//! Builds the shared library of the shadow GPU with one call of the compiler, and lets `src/lib.rs` embed it.
//!
//! Why not otherwise: a position-independent program cannot be loaded by `dlopen`, so the program itself cannot be the
//! library. Dependencies on a cdylib ("artifact dependencies") need a nightly Cargo. A nested `cargo build` would wait
//! for the lock of the build directory and compile everything twice. The library has no dependencies, so one `rustc`
//! is enough.

use std::{env, path::PathBuf, process::Command};

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
    let mut compiler = Command::new(variable("RUSTC"));
    compiler
        .args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "oomph_shadow"])
        .args(["--target", &variable("TARGET")])
        // Always optimised: it runs inside programs that launch kernels by the thousand.
        .args(["-C", "opt-level=2", "-C", "panic=abort", "-C", "strip=symbols", "-C", "codegen-units=1"])
        .args(["-C", "link-arg=-Wl,-soname,liboomph_shadow.so", "-C", "link-arg=-Wl,-Bsymbolic"])
        .arg("-o")
        .arg(&library)
        .arg("core/lib.rs");
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        compiler.args(["-C", &format!("linker={linker}")]);
    }
    let status = compiler.status().unwrap_or_else(|error| panic!("cannot start the compiler: {error}"));
    assert!(status.success(), "the shadow library does not compile: {status}");
}
