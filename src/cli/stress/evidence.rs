//! What is left of a failure: a file with its trace, and the command that shows it again.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::Common;
use crate::{
    base::{Bytes, MIB},
    report::command_line::quoted,
    stress::{Evidence, Failure},
    trace::{self, Trace, TraceError},
};

/// Saves the failure's trace and works out the command.
pub fn of(failure: &Failure, common: &Common) -> Result<Evidence, TraceError> {
    let Some(found) = &failure.trace else {
        return Ok(Evidence { repeat: command(failure, common, None), ..Evidence::default() });
    };
    let path = save(found, &common.save, failure.found_by, &failure.strategy)?;
    let repeat = command(failure, common, Some(&path));
    Ok(Evidence { trace: path.display().to_string(), trace_events: found.events.len() as u64, repeat })
}

/// Writes a trace to the folder, under the name of who found it and for whom, beside what is there already.
pub fn save(found: &Trace, folder: &Path, found_by: &str, strategy: &str) -> Result<PathBuf, TraceError> {
    fs::create_dir_all(folder).map_err(|source| TraceError::Io { path: folder.to_owned(), source })?;
    let path = vacant(folder, &format!("{found_by}-{}", plain(strategy)));
    trace::write(found, &path)?;
    Ok(path)
}

fn command(failure: &Failure, common: &Common, trace: Option<&Path>) -> String {
    let mut words = vec!["oomph".to_owned(), "stress".to_owned(), failure.found_by.to_owned()];
    let mut add = |option: &str, value: &str| words.extend([option.to_owned(), quoted(value)]);
    match trace {
        Some(path) => add("--trace", &path.to_string_lossy()),
        None => add("--seed", &common.seed.to_string()),
    }
    add("--strategy", &failure.strategy);
    if common.device != Common::DEVICE {
        add("--device", &common.device);
    }
    if common.memory != Common::MEMORY {
        // Exactly: a rounded size would be another memory.
        let Bytes(bytes) = common.memory;
        add("--memory", &if bytes.is_multiple_of(MIB) { format!("{}MiB", bytes / MIB) } else { bytes.to_string() });
    }
    words.extend(failure.conditions.iter().cloned());
    words.join(" ")
}

/// The first of the numbered names that nothing has yet: an earlier find must not be lost.
fn vacant(folder: &Path, stem: &str) -> PathBuf {
    let named = |number: u32| match number {
        1 => folder.join(format!("{stem}.oomph")),
        _ => folder.join(format!("{stem}-{number}.oomph")),
    };
    (1..).map(named).find(|path| !path.exists()).unwrap_or_else(|| named(1))
}

/// A strategy's name as part of a file's.
fn plain(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{GIB, NoProgress, StreamId, TagId},
        trace::TraceBuilder,
    };

    fn failure(strategy: &str) -> Failure {
        let mut story = TraceBuilder::new();
        story.alloc(512, StreamId::DEFAULT, TagId(0));
        Failure {
            found_by: "properties",
            strategy: strategy.to_owned(),
            detail: "overlap".to_owned(),
            trace: Some(story.finish("found")),
            conditions: vec!["--fail cuMemAlloc:2".to_owned()],
        }
    }

    #[test]
    fn what_broke_is_saved_beside_earlier_finds_and_the_command_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let save = folder.path().join("new folder");
        let common = Common { save: save.clone(), memory: Bytes(GIB), ..Common::default() };
        let failure = failure("caching:roundup_power2_divisions:[256:1,>:4]");
        let evidence = of(&failure, &common).unwrap();
        let file = save.join("properties-caching_roundup_power2_divisions__256_1___4_.oomph");
        assert_eq!((evidence.trace.as_str(), evidence.trace_events), (&*file.to_string_lossy(), 1));
        assert_eq!(Trace::read(&*trace::open(&file, &NoProgress).unwrap()).unwrap().events.len(), 1);
        assert_eq!(
            evidence.repeat,
            format!(
                "oomph stress properties --trace '{}' --strategy 'caching:roundup_power2_divisions:[256:1,>:4]' \
                 --memory 1024MiB --fail cuMemAlloc:2",
                file.display()
            )
        );
        assert_ne!(of(&failure, &common).unwrap().trace, evidence.trace);
    }
}
