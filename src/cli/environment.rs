//! What the program reads from its surroundings: machine, time, variables, installed CUDA toolkits.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    thread,
    time::SystemTime,
};

use anyhow::anyhow;

use super::exit::CommandError;
use crate::{
    base::text_path,
    device::{DeviceSpec, DeviceSpecError},
    measure::SCHEMA,
    pytorch::{CONF_VARIABLE, NEW_CONF_VARIABLE},
    report::Environment,
    strategy::StrategySpec,
};

/// The variables that PyTorch 2.11 reads its allocator settings from; the first that is set wins.
const PYTORCH_SETTINGS: [&str; 2] = [CONF_VARIABLE, NEW_CONF_VARIABLE];

/// Creates a folder for a run, named by time, suites and shard. Two runs in one second get two folders.
pub fn new_run_folder(suites: &[String], part: Option<&str>) -> Result<PathBuf, CommandError> {
    let stamp = humantime::format_rfc3339_seconds(SystemTime::now()).to_string().replace(':', "").replace('T', "-");
    let names: Vec<String> = suites
        .iter()
        .map(|suite| text_path(suite).file_stem().unwrap_or_default().to_string_lossy().into_owned())
        .chain(part.map(str::to_owned))
        .collect();
    let name = format!("{}-{}", stamp.trim_end_matches('Z'), names.join("-"));
    let place = Path::new("results/local");
    new_folder(place, &name).map_err(|error| CommandError::usage(anyhow!("{}: {error}", place.display())))
}

/// Creates the first of `name`, `name-2`, `name-3` ... that does not exist in the folder. Creating it is the test, so two
/// processes never get the same one.
fn new_folder(place: &Path, name: &str) -> io::Result<PathBuf> {
    fs::create_dir_all(place)?;
    let mut names = std::iter::once(name.to_owned()).chain((2_u32..).map(|number| format!("{name}-{number}")));
    loop {
        let path = place.join(names.next().unwrap_or_default());
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|()| path),
        }
    }
}

/// The first of `name`, `name-2`, `name-3` ... with this ending that does not exist in the folder.
pub fn unused_path(folder: &Path, name: &str, ending: &str) -> PathBuf {
    let first = folder.join(format!("{name}{ending}"));
    let mut numbered = (2_u32..).map(|number| folder.join(format!("{name}-{number}{ending}")));
    if first.exists() { numbered.find(|path| !path.exists()).unwrap_or(first) } else { first }
}

/// The user's folder for files that can be made again: `XDG_CACHE_HOME`, or `.cache` in the home folder.
pub fn cache_folder() -> Option<PathBuf> {
    let named = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")))
}

/// The words after the program's name. Names that are not UTF-8 are shown with replacements.
pub fn arguments() -> impl Iterator<Item = String> {
    env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// The environment of a run.
pub fn describe(device: &DeviceSpec, seed: u64) -> Result<Environment, DeviceSpecError> {
    Ok(Environment {
        schema: SCHEMA,
        started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        // Without the path of the program: published runs must not name local folders.
        command: std::iter::once("oomph".to_owned()).chain(arguments()).collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: env!("OOMPH_COMMIT").to_owned(),
        seed,
        machine: processor_name().unwrap_or_else(|| env::consts::ARCH.to_owned()),
        os: env::consts::OS.to_owned(),
        cpus: thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
        device: device.to_string(),
        device_name: device.device_name()?,
        driver: device.driver(),
        settings: None,
        shard: None,
        merged_shards: None,
    })
}

/// The name of the processor on Linux.
fn processor_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// For `caching:env`, the settings that PyTorch would read here and a note on them; other
/// strategies stay as they are.
pub fn resolve_settings(spec: StrategySpec) -> (StrategySpec, Option<String>) {
    if spec.name != "caching" || spec.parameters != "env" {
        return (spec, None);
    }
    let found = PYTORCH_SETTINGS.iter().find_map(|name| Some((name, env::var(name).ok()?)));
    match found {
        Some((name, value)) => {
            let note = format!("caching:env: {name}={value}");
            (StrategySpec { parameters: value, ..spec }, Some(note))
        }
        None => {
            let note = format!("caching:env: neither {} nor {} is set", PYTORCH_SETTINGS[0], PYTORCH_SETTINGS[1]);
            (StrategySpec { parameters: String::new(), ..spec }, Some(note))
        }
    }
}

/// Variables that name a toolkit.
const TOOLKITS: [&str; 2] = ["CUDA_HOME", "CUDA_PATH"];
/// Variables that name a Python environment.
const PYTHONS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];
/// The library folders of a toolkit.
const INSIDE_TOOLKIT: [&str; 4] = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];

/// All folders that may hold a library of the CUDA toolkit, besides those that the loader searches:
/// named toolkits first, then Python environments (`pip install nvidia-cublas`), then installed
/// ones.
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

/// The package folders of every Python under a prefix.
fn python_packages(prefix: &Path) -> Vec<PathBuf> {
    matching(&prefix.join("lib"), "python3")
        .flat_map(|python| [python.join("site-packages"), python.join("dist-packages")])
        .collect()
}

/// The library folders of NVIDIA packages: `nvidia/cublas/lib` with CUDA 12, `nvidia/cu13/lib` with
/// CUDA 13.
fn inside_packages(packages: &Path) -> Vec<PathBuf> {
    matching(&packages.join("nvidia"), "").map(|package| package.join("lib")).collect()
}

/// Entries of a folder whose names begin like this, newest version first.
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
    fn second_run_in_one_second_gets_its_own_folder() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("12-quick");
        let created = || new_folder(folder.path(), "12-quick").unwrap();
        assert_eq!(
            [created(), created(), created()],
            [run, folder.path().join("12-quick-2"), folder.path().join("12-quick-3")]
        );
        assert_eq!(unused_path(folder.path(), "12-quick", ""), folder.path().join("12-quick-4"));
    }

    #[test]
    fn packages_of_every_python_are_found() {
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
    fn toolkit_folders_exist_and_are_unique() {
        let folders = toolkit_folders();
        assert!(folders.iter().all(|folder| folder.is_dir()));
        let mut unique = folders.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), folders.len());
    }
}
