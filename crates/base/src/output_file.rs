//! Files that are complete or absent after writing. Every file that oomph writes is written here.

use std::{
    collections::BTreeSet,
    env,
    ffi::{OsStr, OsString},
    fs::{self, DirBuilder, File, Metadata, OpenOptions},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    process,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

const BUFFER_BYTES: usize = 256 << 10;
/// As many links as Linux follows.
const MOST_LINKS: u32 = 40;
/// The longest file name of common file systems, in bytes.
const LONGEST_NAME: usize = 255;
/// How many temporary names are tried: a killed process with the same number may have left some.
const MOST_NAMES: u32 = 100;

/// A file that appears under its name when [`finish`](OutputFile::finish) is called. Without it, nothing remains.
///
/// - A plain file is replaced in one step and keeps its mode. Its data are on the disk before it gets its name.
/// - The target of a symbolic link is replaced, not the link. A link to nothing gets its target.
/// - Pipes, devices and open descriptors (`/dev/stdout`, `/dev/fd/3`) are written into.
/// - A folder is an error.
#[derive(Debug)]
pub struct OutputFile {
    output: BufWriter<File>,
    /// The file under its temporary name. `None` where the target is written into.
    unfinished: Option<UnfinishedFile>,
}

impl OutputFile {
    /// Begins a file.
    pub fn create(path: &Path) -> io::Result<OutputFile> {
        let (file, unfinished) = match OutputTarget::of(path)? {
            OutputTarget::Descriptor { place, number } => (open_descriptor(&place, number)?, None),
            OutputTarget::Special(place) => (OpenOptions::new().write(true).open(place)?, None),
            OutputTarget::Named { place, replaced } => {
                let (file, unfinished) = UnfinishedFile::beside(place, replaced.as_ref())?;
                (file, Some(unfinished))
            }
        };
        Ok(OutputFile { output: BufWriter::with_capacity(BUFFER_BYTES, file), unfinished })
    }

    /// Completes the file: it appears under its name and replaces the file that was there.
    pub fn finish(self) -> io::Result<()> {
        let file = self.output.into_inner().map_err(io::IntoInnerError::into_error)?;
        let Some(unfinished) = self.unfinished else { return Ok(()) };
        file.sync_all()?;
        unfinished.rename()
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.output.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

/// Writes a file, whole or not at all: readers see the old file or the new one. See [`OutputFile`].
///
/// ```
/// let path = std::env::temp_dir().join(format!("oomph-{}.txt", std::process::id()));
/// oomph_base::write_file(&path, b"whole")?;
/// assert_eq!(std::fs::read(&path)?, b"whole");
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut output = OutputFile::create(path)?;
    output.write_all(content)?;
    output.finish()
}

/// The plain file that [`OutputFile`] would replace under this name; links are followed. `None` if there is none: nothing is
/// lost then.
#[must_use]
pub fn replaced_file(path: &Path) -> Option<PathBuf> {
    match OutputTarget::of(path) {
        Ok(OutputTarget::Named { place, replaced: Some(_) }) => Some(place),
        _ => None,
    }
}

/// Where the bytes of a path go.
enum OutputTarget {
    /// Into an open descriptor of this process.
    Descriptor { place: PathBuf, number: u32 },
    /// Into a pipe or a device.
    Special(PathBuf),
    /// Into a new file of this name, without links in its last part.
    Named { place: PathBuf, replaced: Option<Metadata> },
}

impl OutputTarget {
    fn of(path: &Path) -> io::Result<OutputTarget> {
        match fs::metadata(path) {
            Ok(there) if there.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // The system also refuses links that it does not follow: another user's in a shared folder.
            Err(error) => return Err(error),
        }
        let mut place = path.to_owned();
        for _ in 0..MOST_LINKS {
            if let Some(number) = descriptor_number(&place) {
                return Ok(OutputTarget::Descriptor { place, number });
            }
            match fs::symlink_metadata(&place) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(OutputTarget::Named { place, replaced: None });
                }
                Err(error) => return Err(error),
                Ok(there) if there.is_symlink() => {
                    let target = fs::read_link(&place)?;
                    place.pop();
                    place.push(target);
                }
                Ok(there) if there.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
                Ok(there) if there.is_file() => return Ok(OutputTarget::Named { place, replaced: Some(there) }),
                Ok(_) => return Ok(OutputTarget::Special(place)),
            }
        }
        Err(io::Error::other("too many levels of symbolic links"))
    }
}

/// The number of an open descriptor of this process, if the path names one. A plain file there must not be replaced: the
/// shell and this process write into it too.
fn descriptor_number(place: &Path) -> Option<u32> {
    let number = place.file_name()?.to_str()?.parse().ok()?;
    let folder = fs::canonicalize(place.parent()?).ok()?;
    // On Linux, /dev/fd is a link to /proc/self/fd.
    let own = Path::new("/proc").join(process::id().to_string());
    (folder == Path::new("/dev/fd") || (folder.starts_with(own) && folder.ends_with("fd"))).then_some(number)
}

/// A copy of standard output or error writes where the original does; opening a plain file again would begin at its start.
#[cfg(unix)]
fn open_descriptor(place: &Path, number: u32) -> io::Result<File> {
    use std::os::fd::AsFd;

    match number {
        1 => io::stdout().as_fd().try_clone_to_owned().map(File::from),
        2 => io::stderr().as_fd().try_clone_to_owned().map(File::from),
        _ => OpenOptions::new().append(true).open(place),
    }
}

#[cfg(not(unix))]
fn open_descriptor(place: &Path, _number: u32) -> io::Result<File> {
    OpenOptions::new().append(true).open(place)
}

/// The temporary names of all unfinished files, for a signal that ends the process.
static UNFINISHED: Mutex<UnfinishedFiles> =
    Mutex::new(UnfinishedFiles { paths: BTreeSet::new(), folders: BTreeSet::new(), abandoned: false });

struct UnfinishedFiles {
    paths: BTreeSet<PathBuf>,
    /// Folders of [`copy_until_exit`] and of [`TemporaryFolder`].
    folders: BTreeSet<PathBuf>,
    abandoned: bool,
}

impl UnfinishedFiles {
    fn locked() -> MutexGuard<'static, UnfinishedFiles> {
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Deletes all unfinished files of this process and the copies of pipes. From now on no file can be begun or finished: call
/// it right before the process exits.
pub fn abandon_unfinished_files() {
    let mut files = UnfinishedFiles::locked();
    files.abandoned = true;
    // A failure cannot be handled here. The name of the file tells what it is.
    for path in &files.paths {
        let _ = fs::remove_file(path);
    }
    for folder in &files.folders {
        let _ = fs::remove_dir_all(folder);
    }
}

/// Copies what a pipe gives into a temporary file of the same name, so that it can be read several times. The copy is
/// deleted by [`abandon_unfinished_files`].
pub fn copy_until_exit(pipe: &Path) -> io::Result<PathBuf> {
    let mut input = File::open(pipe)?;
    let folder = temporary_folder()?;
    let copy = folder.join(pipe.file_name().unwrap_or(OsStr::new("pipe")));
    io::copy(&mut input, &mut File::create_new(&copy)?)?;
    Ok(copy)
}

/// A new folder that only this user can read. [`abandon_unfinished_files`] deletes it.
fn temporary_folder() -> io::Result<PathBuf> {
    let mut files = UnfinishedFiles::locked();
    if files.abandoned {
        return Err(io::ErrorKind::Interrupted.into());
    }
    let folder = with_unused_name(|| {
        let folder = env::temp_dir().join(temporary_name(Path::new("oomph")));
        private_folder().create(&folder).map(|()| folder)
    })?;
    files.folders.insert(folder.clone());
    Ok(folder)
}

/// Creates something under new names until one is not taken.
fn with_unused_name<T>(mut create: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut names_left = MOST_NAMES;
    loop {
        names_left -= 1;
        match create() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && names_left > 0 => {}
            result => return result,
        }
    }
}

/// A folder for files that a command needs while it runs. It is deleted on drop, and by a signal that ends the process.
#[derive(Debug)]
pub struct TemporaryFolder {
    path: PathBuf,
}

impl TemporaryFolder {
    /// Makes an empty folder.
    pub fn create() -> io::Result<TemporaryFolder> {
        Ok(TemporaryFolder { path: temporary_folder()? })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // Processes that the command started may still write there for a moment.
        for _ in 0..REMOVAL_ATTEMPTS {
            if fs::remove_dir_all(&self.path).is_ok() || !self.path.exists() {
                break;
            }
            thread::sleep(BETWEEN_REMOVALS);
        }
        UnfinishedFiles::locked().folders.remove(&self.path);
    }
}

const REMOVAL_ATTEMPTS: usize = 20;
const BETWEEN_REMOVALS: Duration = Duration::from_millis(100);

fn private_folder() -> DirBuilder {
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

/// A file under a temporary name, deleted on drop unless it was renamed.
#[derive(Debug)]
struct UnfinishedFile {
    path: PathBuf,
    target: PathBuf,
}

impl UnfinishedFile {
    fn beside(target: PathBuf, replaced: Option<&Metadata>) -> io::Result<(File, UnfinishedFile)> {
        let mut files = UnfinishedFiles::locked();
        if files.abandoned {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let (file, path) = with_unused_name(|| {
            let path = target.with_file_name(temporary_name(&target));
            // A new file: a link of that name, which another user may have put there, is not followed.
            creation_options(replaced).open(&path).map(|file| (file, path))
        })?;
        files.paths.insert(path.clone());
        drop(files);
        let unfinished = UnfinishedFile { path, target };
        if let Some(replaced) = replaced {
            keep_mode(&file, replaced)?;
        }
        Ok((file, unfinished))
    }

    fn rename(self) -> io::Result<()> {
        {
            let mut files = UnfinishedFiles::locked();
            if files.abandoned {
                return Err(io::ErrorKind::Interrupted.into());
            }
            fs::rename(&self.path, &self.target)?;
            files.paths.remove(&self.path);
        }
        // The new name is safe once its folder is on the disk too. Not all file systems can do that.
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if UnfinishedFiles::locked().paths.remove(&self.path) {
            // A failure cannot be handled here. The name of the file tells what it is.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Deletes the temporary files that killed processes left in a folder. No other process may be writing into it.
pub fn remove_left_files(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if is_temporary_name(&entry.file_name()) && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Whether a name is one of [`temporary_name`]: `NAME.PROCESS-COUNT.partial`.
fn is_temporary_name(name: &OsStr) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let name = name.to_string_lossy();
    let numbers = name.strip_suffix(".partial").and_then(|name| name.rsplit_once('.'));
    numbers
        .and_then(|(_, numbers)| numbers.split_once('-'))
        .is_some_and(|(process, count)| is_number(process) && is_number(count))
}

fn temporary_name(target: &Path) -> OsString {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let ending = format!(".{}-{}.partial", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let name = target.file_name().filter(|name| name.len() + ending.len() <= LONGEST_NAME);
    let mut name = name.map_or_else(|| OsString::from("oomph"), OsString::from);
    name.push(ending);
    name
}

#[cfg(unix)]
fn creation_options(replaced: Option<&Metadata>) -> OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;

    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    if replaced.is_some() {
        // Private until it has the mode of the file that it replaces.
        options.mode(0o600);
    }
    options
}

#[cfg(not(unix))]
fn creation_options(_replaced: Option<&Metadata>) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    options
}

/// Gives a file the mode of another one, and its owner where that is allowed.
fn keep_mode(file: &File, replaced: &Metadata) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, fchown};

        let own = file.metadata()?;
        if (own.uid(), own.gid()) != (replaced.uid(), replaced.gid()) {
            // Only root may give files away; others keep theirs.
            let _ = fchown(file, Some(replaced.uid()), Some(replaced.gid()));
        }
    }
    file.set_permissions(replaced.permissions())
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_temporary_folder_is_private_and_deleted_with_its_files() {
        let folder = TemporaryFolder::create().unwrap();
        let path = folder.path().to_owned();
        assert_eq!(mode(&path), 0o700);
        fs::create_dir(path.join("inside")).unwrap();
        fs::write(path.join("inside/file"), "x").unwrap();
        drop(folder);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_appears_when_it_is_finished() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let mut output = OutputFile::create(&path).unwrap();
        output.write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(output);
        assert_eq!(names(folder.path()), [""; 0]);
        write_file(&path, b"whole").unwrap();
        assert_eq!((names(folder.path()), fs::read(&path).unwrap()), (vec!["a.txt".to_owned()], b"whole".to_vec()));
    }

    #[test]
    fn left_files_are_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let left = temporary_name(Path::new("runs.csv")).into_string().unwrap();
        for name in [left.as_str(), "runs.csv", "a.partial", "a.1.partial", "a.1-x.partial", "notes.12-3.partial.txt"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_left_files(folder.path()).unwrap();
        let kept = ["a.1-x.partial", "a.1.partial", "a.partial", "notes.12-3.partial.txt", "runs.csv"];
        assert_eq!(names(folder.path()), kept);
        assert!(remove_left_files(&folder.path().join("none")).is_err());
    }

    #[test]
    fn a_replaced_file_keeps_its_mode_and_a_new_one_gets_the_usual() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("usual"), "").unwrap();
        write_file(&at("new"), b"1").unwrap();
        assert_eq!(mode(&at("new")), mode(&at("usual")));
        for bits in [0o600, 0o640, 0o664, 0o755, 0o444] {
            fs::set_permissions(at("new"), PermissionsExt::from_mode(bits)).unwrap();
            write_file(&at("new"), bits.to_string().as_bytes()).unwrap();
            assert_eq!((mode(&at("new")), fs::read_to_string(at("new")).unwrap()), (bits, bits.to_string()));
        }
    }

    #[test]
    fn the_target_of_a_link_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("deep")).unwrap();
        fs::write(at("deep/real"), "old").unwrap();
        symlink("real", at("deep/second")).unwrap();
        symlink("deep/second", at("first")).unwrap();
        symlink(at("deep/nothing"), at("dangling")).unwrap();
        write_file(&at("first"), b"new").unwrap();
        write_file(&at("dangling"), b"created").unwrap();
        assert_eq!(fs::read(at("deep/real")).unwrap(), b"new");
        assert_eq!(fs::read(at("deep/nothing")).unwrap(), b"created");
        for link in ["first", "deep/second", "dangling"] {
            assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink(), "{link}");
        }
        symlink("loop", at("loop")).unwrap();
        assert!(write_file(&at("loop"), b"").is_err());
    }

    #[test]
    fn a_temporary_file_follows_no_link() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("victim"), "precious").unwrap();
        // All names that the next files could get, and the one of older releases.
        let next: u64 = temporary_name(Path::new("a")).into_string().unwrap()["a.".len()..]
            .strip_suffix(".partial")
            .and_then(|numbers| numbers.split_once('-'))
            .map(|(_, count)| count.parse().unwrap())
            .unwrap();
        for count in next..next + 50 {
            symlink("victim", at(&format!("a.{}-{count}.partial", process::id()))).unwrap();
        }
        symlink("victim", at("a.new")).unwrap();
        write_file(&at("a"), b"new").unwrap();
        assert_eq!(
            (fs::read(at("victim")).unwrap(), fs::read(at("a")).unwrap()),
            (b"precious".to_vec(), b"new".to_vec())
        );
        assert!(fs::symlink_metadata(at("a")).unwrap().is_file());
    }

    #[test]
    fn pipes_and_devices_are_written_into() {
        let null = Path::new("/dev/null");
        write_file(null, b"gone").unwrap();
        assert!(fs::metadata(null).unwrap().file_type().is_char_device());

        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        match process::Command::new("mkfifo").arg(&pipe).status() {
            Ok(status) if status.success() => {}
            _ => return eprintln!("note: this machine has no mkfifo"),
        }
        let read = thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        write_file(&pipe, b"through").unwrap();
        assert_eq!(read.join().unwrap(), b"through");
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(names(folder.path()), ["pipe"]);
    }

    #[test]
    fn a_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let error = write_file(folder.path(), b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[test]
    fn long_names_can_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let name = "n".repeat(LONGEST_NAME);
        write_file(&folder.path().join(&name), b"x").unwrap();
        assert_eq!(names(folder.path()), [name]);
    }
}
