//! The libraries of the CUDA toolkit: cuBLAS for matrix products, and NVRTC, which is only reported. Looked for at run
//! time, of whatever version there is; nothing but matrix products needs one.
//!
//! The loader is asked first, which knows `LD_LIBRARY_PATH` and the system's folders; then come the folders that the
//! program around this room names, because only it may look at the environment.

use std::{error::Error, ffi::OsStr, fs, path::PathBuf, sync::OnceLock};

use libloading::Library;

/// Versions that may be met, newest first. From 11 on the calls that are used here have the shape they have today.
const MAJOR_VERSIONS: [u32; 3] = [13, 12, 11];

/// Names the folders in which the toolkit may lie.
type Folders = fn() -> Vec<PathBuf>;

static FOLDERS: OnceLock<Folders> = OnceLock::new();

/// Says where the toolkit's libraries may lie beside the places that the loader knows. Asked only when one is needed and
/// the loader has not got it; the first to be named stays.
pub fn look_for_toolkit_in(folders: Folders) {
    FOLDERS.get_or_init(|| folders);
}

/// A library that was loaded.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) library: Library,
    /// The file it came from, where the system tells.
    pub(super) place: String,
}

/// Loads the newest library of that name that the driver can carry; why there is none, in a sentence.
///
/// A library of a newer major version than the driver loads and then fails at its first call, so it is left out.
pub(super) fn load(name: &str, newest_major: Option<u32>) -> Result<Found, String> {
    let fits = |major: &&u32| newest_major.is_none_or(|newest| **major <= newest);
    let files: Vec<String> = MAJOR_VERSIONS.iter().filter(fits).map(|major| format!("lib{name}.so.{major}")).collect();
    for file in &files {
        if let Ok(library) = open(file.as_ref()) {
            let place = mapped_from(file).unwrap_or_else(|| file.clone());
            return Ok(Found { library, place });
        }
    }
    let folders = FOLDERS.get().map_or_else(Vec::new, |folders| folders());
    let mut refused = None;
    for path in files.iter().flat_map(|file| folders.iter().map(move |folder| folder.join(file))) {
        if !path.is_file() {
            continue;
        }
        match open(path.as_os_str()) {
            Ok(library) => return Ok(Found { library, place: path.display().to_string() }),
            Err(error) => {
                // What the loader says is the reason behind the error.
                let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                refused = refused.or_else(|| Some(format!("{} cannot be loaded: {reason}", path.display())));
            }
        }
    }
    Err(refused.unwrap_or_else(|| {
        format!("no {} where the loader looks, nor in {} folders of toolkits", files.join(" or "), folders.len())
    }))
}

fn open(file: &OsStr) -> Result<Library, libloading::Error> {
    // SAFETY: loading a library of the toolkit runs its own initialisers and nothing else.
    unsafe { Library::new(file) }
}

/// The file that is mapped into this process under a name that ends like this.
fn mapped_from(file: &str) -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let path = |line: &str| line.find('/').map(|start| line[start..].to_owned());
    // The name that was asked for may be a link to a longer one.
    maps.lines().filter_map(path).find(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_told_by_all_its_names() {
        let reason = load("surely-no-such-library", Some(12)).unwrap_err();
        assert!(
            reason.starts_with("no libsurely-no-such-library.so.12 or libsurely-no-such-library.so.11 where"),
            "{reason}"
        );
    }
}
