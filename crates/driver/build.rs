//! Tells build scripts of dependent crates where the sources are (`DEP_OOMPH_DRIVER_SOURCE`).

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(folder) = std::env::var("CARGO_MANIFEST_DIR") {
        println!("cargo::metadata=source={folder}/src/lib.rs");
    }
}
