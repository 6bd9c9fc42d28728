//! Embeds what the binary must know wherever it is installed: the suites in `suites/`, and the
//! commit it was built from.

use std::{env, error::Error, fs, path::Path, process::Command};

fn main() -> Result<(), Box<dyn Error>> {
    let root = env::var("CARGO_MANIFEST_DIR")?;
    let out = env::var("OUT_DIR")?;
    fs::write(Path::new(&out).join("suites.rs"), embedded(&Path::new(&root).join("suites")))?;
    println!("cargo::rerun-if-changed=suites");
    println!("cargo::rerun-if-changed=build.rs");
    let commit = packaged_commit(&root).or_else(|| checked_out_commit(&root));
    println!("cargo::rustc-env=OOMPH_COMMIT={}", commit.unwrap_or_else(|| "unknown".to_owned()));
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

/// The commit that a package was made from, which `cargo package` writes down: there is no git in it.
fn packaged_commit(root: &str) -> Option<String> {
    let note = fs::read_to_string(Path::new(root).join(".cargo_vcs_info.json")).ok()?;
    let (_, after) = note.split_once("\"sha1\"")?;
    let commit: String =
        after.chars().skip_while(|c| !c.is_ascii_hexdigit()).take_while(char::is_ascii_hexdigit).take(12).collect();
    (commit.len() == 12).then_some(commit)
}

/// The commit that is checked out in this very folder. One around it, such as that of a home folder under git, says
/// nothing about these files.
fn checked_out_commit(root: &str) -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(["-C", root]).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != Path::new(root).canonicalize().ok()? {
        return None;
    }
    // Where these are is git's to say: in a linked worktree `.git` is a file. One that is not there would be a reason to
    // build anew every time.
    for file in ["HEAD", "logs/HEAD"] {
        let path = Path::new(root).join(git(&["rev-parse", "--git-path", file])?);
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    git(&["describe", "--always", "--dirty", "--abbrev=12"])
}
