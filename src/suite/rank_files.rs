//! The recordings of one distributed program: one file per rank, in a folder or by a pattern. Does
//! not read the files.

use std::{
    cmp::Ordering,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
};

use super::{SourceError, case::glob};
use crate::base::{GIB, text_path};

/// Extensions of recordings in a folder; a pattern may match any file.
const ENDINGS: [&str; 3] = ["pickle", "pkl", "oomph"];
/// Extensions of compressed files.
const COMPRESSED: [&str; 3] = ["gz", "xz", "zst"];

/// The most memory for files that are read at the same time, unless a single one takes more.
const MOST_MEMORY_BYTES: u64 = 4 * GIB;
/// Memory per byte of a recording while it is read (measured with 10 million events: 797 MiB for
/// 390 MiB), and its length per byte of a compressed file (measured: 20 to 57).
const MEMORY_OF_LENGTH: u64 = 2;
const LENGTH_OF_COMPRESSED: u64 = 60;

/// The file of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFile {
    /// The number of the rank if the file names contain one, otherwise the file name.
    pub rank: String,
    /// The recording.
    pub path: PathBuf,
}

/// The files of all ranks, `2` before `10`; `None` if `name` is neither a folder nor a pattern. `*`
/// may stand for parts of file and folder names. `name` is a [`path_text`](crate::base::path_text). Subfolders of a folder are not searched.
///
/// ```no_run
/// let ranks = oomph::suite::rank_files("snapshots/")?.unwrap_or_default();
/// println!("{} ranks, the first is {:?}", ranks.len(), ranks.first());
/// # Ok::<(), oomph::suite::SourceError>(())
/// ```
pub fn rank_files(name: &str) -> Result<Option<Vec<RankFile>>, SourceError> {
    let path = &*text_path(name);
    let mut found = if path.is_dir() {
        let named = entries(path).into_iter().map(|file| (file.to_string_lossy().into_owned(), path.join(file)));
        named.filter(|(name, _)| is_recording(name)).collect()
    } else if name.contains('*') && !path.exists() {
        matching(path)
    } else {
        return Ok(None);
    };
    // A broken link is a rank whose recording is missing, so it is kept.
    found.retain(|(_, path)| !path.is_dir() && (path.is_file() || path.is_symlink()));
    if found.is_empty() {
        return Err(SourceError::NoRankFiles(path.display().to_string()));
    }
    found.sort_by(|(one, _), (other, _)| natural_order(one, other));
    let ranks = rank_names(&found.iter().map(|(file, _)| file.as_str()).collect::<Vec<_>>());
    Ok(Some(ranks.into_iter().zip(found).map(|(rank, (_, path))| RankFile { rank, path }).collect()))
}

/// The files of a folder without hidden ones.
fn entries(folder: &Path) -> Vec<OsString> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let names = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.file_name()));
    names.filter(|name| !name.as_encoded_bytes().starts_with(b".")).collect()
}

/// The paths that match a pattern with `*` in any of its parts, and their names from the first such
/// part on.
pub(super) fn matching(pattern: &Path) -> Vec<(String, PathBuf)> {
    let has_star = |part: &OsStr| part.as_encoded_bytes().contains(&b'*');
    let fixed = pattern.iter().take_while(|part| !has_star(part)).count();
    let mut found = vec![PathBuf::new()];
    for part in pattern {
        let inside = |folder: &PathBuf| match has_star(part) {
            true => entries(folder),
            false => vec![part.to_owned()],
        };
        let fits = |entry: &OsString| glob(&part.to_string_lossy(), &entry.to_string_lossy());
        let longer = |folder| inside(folder).into_iter().filter(fits).map(|entry| folder.join(entry));
        found = found.iter().flat_map(longer).collect();
    }
    let name = |path: &PathBuf| path.iter().skip(fixed).collect::<PathBuf>().to_string_lossy().into_owned();
    found.into_iter().map(|path| (name(&path), path)).collect()
}

/// How many of the files may be read in parallel, so that long recordings do not exceed the memory.
pub fn read_at_once(files: &[RankFile], cores: usize) -> usize {
    let memory = |file: &RankFile| {
        let bytes = fs::metadata(&file.path).map_or(0, |file| file.len()).saturating_mul(MEMORY_OF_LENGTH);
        let is_compressed = file.path.extension().is_some_and(|ending| COMPRESSED.iter().any(|known| ending == *known));
        if is_compressed { bytes.saturating_mul(LENGTH_OF_COMPRESSED) } else { bytes }
    };
    let most = files.iter().map(memory).max().unwrap_or(0).max(1);
    usize::try_from(MOST_MEMORY_BYTES / most).unwrap_or(usize::MAX).clamp(1, cores.min(files.len()).max(1))
}

fn is_recording(file: &str) -> bool {
    let mut endings = file.rsplit('.');
    let last = endings.next().unwrap_or_default();
    let ending = if COMPRESSED.contains(&last) { endings.next().unwrap_or_default() } else { last };
    ENDINGS.contains(&ending)
}

/// Splits a text into numbers and the texts between them.
fn pieces(text: &str) -> Vec<&str> {
    text.as_bytes()
        .chunk_by(|one, next| one.is_ascii_digit() == next.is_ascii_digit())
        .scan(0, |end, piece| {
            *end += piece.len();
            text.get(*end - piece.len()..*end)
        })
        .collect()
}

fn is_number(piece: &str) -> bool {
    piece.starts_with(|c: char| c.is_ascii_digit())
}

/// Compares numbers by value and texts by letters; `1` and `01` are ordered last.
fn natural_order(one: &str, other: &str) -> Ordering {
    let (left, right) = (pieces(one), pieces(other));
    let by_piece = left.iter().zip(&right).map(|(a, b)| match (is_number(a), is_number(b)) {
        (true, true) => {
            let (a, b) = (a.trim_start_matches('0'), b.trim_start_matches('0'));
            a.len().cmp(&b.len()).then_with(|| a.cmp(b))
        }
        _ => a.cmp(b),
    });
    let by_pieces = by_piece.fold(Ordering::Equal, Ordering::then).then(left.len().cmp(&right.len()));
    by_pieces.then_with(|| one.cmp(other))
}

/// The only number in which the file names differ, or the names.
fn rank_names(files: &[&str]) -> Vec<String> {
    let names = || files.iter().map(|&file| file.to_owned()).collect();
    let pieces: Vec<Vec<&str>> = files.iter().map(|file| pieces(file)).collect();
    let Some(first) = pieces.first().filter(|_| pieces.len() > 1) else { return names() };
    let differs = |place: usize| pieces.iter().any(|other| other.get(place) != first.get(place));
    let places: Vec<usize> = (0..first.len()).filter(|&place| differs(place)).collect();
    let same_length = pieces.iter().all(|other| other.len() == first.len());
    match places[..] {
        [place] if same_length && pieces.iter().all(|pieces| is_number(pieces[place])) => {
            pieces.iter().map(|pieces| pieces[place].to_owned()).collect()
        }
        _ => names(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            fs::write(folder.path().join(file), "").unwrap();
        }
        folder
    }

    fn ranks(name: &str) -> Vec<String> {
        rank_files(name).unwrap().unwrap().into_iter().map(|file| file.rank).collect()
    }

    #[test]
    fn ranks_are_ordered_by_number() {
        let folder = folder_with(&["run-10.pickle", "run-9.pickle", "run-2.pickle", "run-2.json", "notes.md"]);
        assert_eq!(ranks(&folder.path().display().to_string()), ["2", "9", "10"]);
        let compressed = folder_with(&["a1b1.pickle.xz", "a1b0.pickle.xz", "a1b0.csv.xz"]);
        assert_eq!(ranks(&compressed.path().display().to_string()), ["0", "1"], "the number that differs");
    }

    #[cfg(unix)]
    #[test]
    fn non_utf8_name_is_a_rank() {
        use std::os::unix::ffi::OsStringExt;
        let folder = folder_with(&["run-1.pickle"]);
        fs::write(folder.path().join(OsString::from_vec(b"run-2\xfe.pickle".to_vec())), "").unwrap();
        for name in [folder.path().to_owned(), folder.path().join("run-*")] {
            let found = rank_files(&name.display().to_string()).unwrap().unwrap();
            assert_eq!(found.iter().filter(|file| file.path.is_file()).count(), 2, "{found:?}");
        }
    }

    #[test]
    fn pattern_selects_files() {
        let folder = folder_with(&["x-1.log", "x-11.log", "y-1.log", "x-3.pickle"]);
        assert_eq!(ranks(&folder.path().join("x-*.log").display().to_string()), ["1", "11"]);
    }

    #[test]
    fn files_without_numbers_keep_their_names() {
        let folder = folder_with(&["left.pickle", "right.pickle", "node1-gpu2.oomph"]);
        let found = ranks(&folder.path().display().to_string());
        assert_eq!(found, ["left.pickle", "node1-gpu2.oomph", "right.pickle"]);
        let two_numbers = folder_with(&["node1-gpu0.pickle", "node0-gpu1.pickle"]);
        assert_eq!(ranks(&two_numbers.path().display().to_string()), ["node0-gpu1.pickle", "node1-gpu0.pickle"]);
    }

    #[test]
    fn empty_folder_is_an_error() {
        assert_eq!(rank_files("training").unwrap(), None);
        let folder = folder_with(&["notes.md"]);
        let message = rank_files(&folder.path().display().to_string()).unwrap_err().to_string();
        assert!(message.contains("no recording"), "{message}");
        assert!(rank_files("nowhere/*.pickle").is_err());
    }

    #[test]
    fn pattern_matches_folders() {
        let folder = folder_with(&["rank.pickle"]);
        for rank in [2, 10, 9] {
            let own = folder.path().join(format!("rank{rank}"));
            fs::create_dir(&own).unwrap();
            fs::write(own.join("snapshot.pickle"), "").unwrap();
        }
        fs::create_dir(folder.path().join("rank11")).unwrap();
        let found = rank_files(&folder.path().join("rank*/snapshot.pickle").display().to_string()).unwrap().unwrap();
        let names: Vec<&str> = found.iter().map(|file| file.rank.as_str()).collect();
        assert_eq!(names, ["2", "9", "10"]);
        assert_eq!(found[2].path, folder.path().join("rank10/snapshot.pickle"));
    }

    #[cfg(unix)]
    #[test]
    fn broken_links_are_ranks() {
        let folder = folder_with(&["run-0.pickle", "._run-0.pickle", ".run-1.pickle"]);
        std::os::unix::fs::symlink("nowhere", folder.path().join("run-1.pickle")).unwrap();
        std::os::unix::fs::symlink("run-0.pickle", folder.path().join("run-2.pickle")).unwrap();
        fs::create_dir(folder.path().join("run-3.pickle")).unwrap();
        for name in [folder.path().to_owned(), folder.path().join("*.pickle")] {
            assert_eq!(ranks(&name.display().to_string()), ["0", "1", "2"]);
        }
    }

    #[test]
    fn long_recordings_are_read_in_sequence() {
        let folder = tempfile::tempdir().unwrap();
        let at_once = |name: &str, bytes: u64, count: usize| {
            let path = folder.path().join(name);
            fs::File::create(&path).unwrap().set_len(bytes).unwrap();
            read_at_once(&vec![RankFile { rank: String::new(), path }; count], 64)
        };
        assert_eq!(at_once("short.pickle", 1000, 100), 64);
        assert_eq!(at_once("short.pickle", 1000, 3), 3);
        assert_eq!(at_once("long.pickle", GIB / 2, 100), 4);
        assert_eq!(at_once("longer.pickle", 8 * GIB, 100), 1);
        assert_eq!(at_once("short.pickle.xz", GIB / 120, 100), 4);
        assert_eq!(read_at_once(&[], 64), 1);
    }

    proptest::proptest! {
        #[test]
        fn order_is_total(mut names in proptest::collection::vec("[a-c0-2]{0,6}", 0..8)) {
            names.sort_by(|a, b| natural_order(a, b));
            for (place, one) in names.iter().enumerate() {
                for other in &names[place..] {
                    proptest::prop_assert_ne!(natural_order(one, other), Ordering::Greater);
                }
            }
        }
    }
}
