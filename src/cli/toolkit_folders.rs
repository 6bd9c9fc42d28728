//! Where a CUDA toolkit may lie, as far as the environment and habit tell. The loader's own places are not among them: it
//! is asked first.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Variables that name a toolkit.
const TOOLKITS: [&str; 2] = ["CUDA_HOME", "CUDA_PATH"];
/// Variables that name a Python environment.
const PYTHONS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];
/// Where a toolkit keeps its libraries.
const INSIDE_TOOLKIT: [&str; 4] = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];

/// All folders in which a toolkit's library may lie: named toolkits first, then those of Python environments, as
/// `pip install nvidia-cublas` makes them, then installed ones.
pub fn toolkit_folders() -> Vec<PathBuf> {
    let named = TOOLKITS.iter().filter_map(env::var_os).map(PathBuf::from);
    let prefixes = PYTHONS.iter().filter_map(env::var_os).map(PathBuf::from);
    let on_path = env::var_os("PATH").unwrap_or_default();
    let beside_programs = env::split_paths(&on_path).filter_map(|folder| folder.parent().map(Path::to_owned));
    let own = env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
    let python_path = env::var_os("PYTHONPATH").unwrap_or_default();
    let packages = env::split_paths(&python_path)
        .chain(prefixes.chain(beside_programs).chain(own).flat_map(|prefix| python_packages(&prefix)));
    let installed = matching(Path::new("/usr/local"), "cuda").chain([PathBuf::from("/opt/cuda")]);
    let mut folders: Vec<PathBuf> = Vec::new();
    let candidates = named
        .flat_map(|root| inside_toolkit(&root))
        .chain(packages.flat_map(|packages| inside_packages(&packages)))
        .chain(installed.flat_map(|root| inside_toolkit(&root)));
    for folder in candidates {
        if folder.is_dir() && !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    folders
}

fn inside_toolkit(root: &Path) -> Vec<PathBuf> {
    INSIDE_TOOLKIT.iter().map(|inside| root.join(inside)).collect()
}

/// The folders of packages of every Python under a prefix.
fn python_packages(prefix: &Path) -> Vec<PathBuf> {
    matching(&prefix.join("lib"), "python3")
        .flat_map(|python| [python.join("site-packages"), python.join("dist-packages")])
        .collect()
}

/// Where packages of NVIDIA keep their libraries: `nvidia/cublas/lib` with CUDA 12, `nvidia/cu13/lib` with CUDA 13.
fn inside_packages(packages: &Path) -> Vec<PathBuf> {
    matching(&packages.join("nvidia"), "").map(|package| package.join("lib")).collect()
}

/// What lies in a folder under a name that begins like this, newest version first.
fn matching(folder: &Path, beginning: &str) -> impl Iterator<Item = PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(beginning))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found.reverse();
    found.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_every_python_under_a_prefix_are_found() {
        let prefix = tempfile::tempdir().unwrap();
        let package = prefix.path().join("lib/python3.12/site-packages/nvidia/cublas/lib");
        fs::create_dir_all(&package).unwrap();
        let found: Vec<PathBuf> =
            python_packages(prefix.path()).iter().flat_map(|packages| inside_packages(packages)).collect();
        assert_eq!(found, [package]);
    }

    #[test]
    fn newer_versions_come_first() {
        let root = tempfile::tempdir().unwrap();
        for name in ["cuda-12.9", "cuda-13.0", "other"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        let found: Vec<PathBuf> = matching(root.path(), "cuda").collect();
        assert_eq!(found, ["cuda-13.0", "cuda-12.9"].map(|name| root.path().join(name)));
    }

    #[test]
    fn folders_are_told_once_and_exist() {
        let folders = toolkit_folders();
        assert!(folders.iter().all(|folder| folder.is_dir()));
        let mut unique = folders.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), folders.len());
    }
}
