//! What a result must say about where it came from; and what strategies may be told from the environment.

use std::{
    env, fs,
    path::{Path, PathBuf},
    thread,
    time::SystemTime,
};

use crate::{
    device::{DeviceSpec, DeviceSpecError},
    measure::SCHEMA,
    report::Environment,
    strategy::StrategySpec,
};

/// The variables that PyTorch 2.11 reads its allocator settings from; the first that is set wins.
const PYTORCH_SETTINGS: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// A folder of its own for a run: time first, so that folders sort by it, then the suites and which part of them it is.
/// Two runs in one second get two folders.
pub fn new_run_folder(suites: &[String], part: Option<&str>) -> PathBuf {
    let stamp = humantime::format_rfc3339_seconds(SystemTime::now()).to_string().replace(':', "").replace('T', "-");
    let names: Vec<String> = suites
        .iter()
        .map(|suite| PathBuf::from(suite).file_stem().unwrap_or_default().to_string_lossy().into_owned())
        .chain(part.map(str::to_owned))
        .collect();
    let name = format!("{}-{}", stamp.trim_end_matches('Z'), names.join("-"));
    vacant(&PathBuf::from("results/local").join(name))
}

/// The path, or the first of its numbered siblings where nothing is yet.
fn vacant(path: &Path) -> PathBuf {
    let numbered = |number: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!("-{number}"));
        PathBuf::from(name)
    };
    std::iter::once(path.to_owned())
        .chain((2..).map(numbered))
        .find(|path| !path.exists())
        .unwrap_or_else(|| path.to_owned())
}

/// The words after the program's name. A file's name may be anything; what is no text is shown as well as it can be.
pub fn arguments() -> impl Iterator<Item = String> {
    env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// Where and how a run is made.
pub fn describe(device: &DeviceSpec, seed: u64) -> Result<Environment, DeviceSpecError> {
    Ok(Environment {
        schema: SCHEMA,
        started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        // Where the binary lies is the machine's business: a published run must not name its folders.
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

/// What Linux calls the processor.
fn processor_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// `caching:env` with the settings that PyTorch would read here; everything else as it is. The second part is a note
/// on what was read.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_in_the_same_second_gets_a_folder_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("12-quick");
        assert_eq!(vacant(&run), run);
        fs::create_dir(&run).unwrap();
        assert_eq!(vacant(&run), folder.path().join("12-quick-2"));
        fs::create_dir(folder.path().join("12-quick-2")).unwrap();
        assert_eq!(vacant(&run), folder.path().join("12-quick-3"));
    }
}
