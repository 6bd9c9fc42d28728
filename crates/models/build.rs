//! Embeds the recipes of `workloads/`, so that they are known wherever the program is installed.

use std::{env, error::Error, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("workloads");
    fs::write(Path::new(&env::var("OUT_DIR")?).join("workloads.rs"), embedded(&folder)?)?;
    // The folder is a link: of a link only the link itself is watched.
    println!("cargo::rerun-if-changed={}", folder.canonicalize()?.display());
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}

/// A Rust slice of `(name, text)`, one entry per TOML file of the folder, in name order.
fn embedded(folder: &Path) -> Result<String, Box<dyn Error>> {
    let mut files = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let entries: String = files
        .iter()
        .filter_map(|path| Some(format!("({:?}, include_str!({:?})),\n", path.file_stem()?.to_str()?, path.to_str()?)))
        .collect();
    Ok(format!("&[\n{entries}]\n"))
}
