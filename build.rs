//! Embeds what the binary must know wherever it is installed: the recipes in `workloads/`, the suites in `suites/`,
//! and the commit it was built from.

use std::{env, error::Error, fs, path::Path, process::Command};

fn main() -> Result<(), Box<dyn Error>> {
    let root = env::var("CARGO_MANIFEST_DIR")?;
    let out = env::var("OUT_DIR")?;
    for folder in ["workloads", "suites"] {
        let listing = embedded(&Path::new(&root).join(folder));
        fs::write(Path::new(&out).join(format!("{folder}.rs")), listing)?;
        println!("cargo::rerun-if-changed={folder}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=.git/HEAD");
    println!("cargo::rerun-if-changed=.git/logs/HEAD");
    println!("cargo::rustc-env=OOMPH_COMMIT={}", commit(&root).unwrap_or_else(|| "unknown".to_owned()));
    Ok(())
}

/// A Rust slice of `(name, text)`, one entry per TOML file of the folder, in name order.
fn embedded(folder: &Path) -> String {
    let mut files: Vec<_> = fs::read_dir(folder)
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
        .unwrap_or_default();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let entries: String = files
        .iter()
        .filter_map(|path| Some(format!("({:?}, include_str!({:?})),\n", path.file_stem()?.to_str()?, path.to_str()?)))
        .collect();
    format!("&[\n{entries}]\n")
}

fn commit(root: &str) -> Option<String> {
    let output =
        Command::new("git").args(["-C", root, "describe", "--always", "--dirty", "--abbrev=12"]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
