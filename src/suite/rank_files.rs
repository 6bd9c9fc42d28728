//! The recordings of one distributed program: a file for every rank, in a folder or behind a pattern.
//!
//! The commands that answer for all ranks ask; what is in the files is read elsewhere.

use std::{
    cmp::Ordering,
    fs,
    path::{Path, PathBuf},
};

use super::{SourceError, filter::glob};

/// Endings of the files that are taken from a folder; a pattern says itself what it means.
const ENDINGS: [&str; 3] = ["pickle", "pkl", "oomph"];
/// What may come after an ending.
const COMPRESSED: [&str; 3] = ["gz", "xz", "zst"];

/// One rank's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFile {
    /// What to call the rank: its number where the files tell it, and the file's name where not.
    pub rank: String,
    /// Where its recording is.
    pub path: PathBuf,
}

/// The files of all ranks, `2` before `10`; `None` if `name` is neither a folder nor a pattern with `*`. In a folder all
/// recordings count, those of folders in it do not.
///
/// ```no_run
/// let ranks = oomph::suite::rank_files("snapshots/")?.unwrap_or_default();
/// println!("{} ranks, the first is {:?}", ranks.len(), ranks.first());
/// # Ok::<(), oomph::suite::SourceError>(())
/// ```
pub fn rank_files(name: &str) -> Result<Option<Vec<RankFile>>, SourceError> {
    let path = Path::new(name);
    let (folder, pattern) = if path.is_dir() {
        (path, None)
    } else if name.contains('*') && !path.exists() {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        (folder, Some(path.file_name().unwrap_or_default().to_string_lossy().into_owned()))
    } else {
        return Ok(None);
    };
    let nothing = || SourceError::NoRankFiles(name.to_owned());
    let is_meant = |file: &str| match &pattern {
        Some(pattern) => glob(pattern, file),
        None => is_recording(file),
    };
    let mut found: Vec<(String, PathBuf)> = fs::read_dir(folder)
        .map_err(|_| nothing())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file())
        .filter_map(|path| Some((path.file_name()?.to_string_lossy().into_owned(), path)))
        .filter(|(file, _)| is_meant(file))
        .collect();
    if found.is_empty() {
        return Err(nothing());
    }
    found.sort_by(|(one, _), (other, _)| natural_order(one, other));
    let ranks = rank_names(&found.iter().map(|(file, _)| file.as_str()).collect::<Vec<_>>());
    Ok(Some(ranks.into_iter().zip(found).map(|(rank, (_, path))| RankFile { rank, path }).collect()))
}

fn is_recording(file: &str) -> bool {
    let mut endings = file.rsplit('.');
    let last = endings.next().unwrap_or_default();
    let ending = if COMPRESSED.contains(&last) { endings.next().unwrap_or_default() } else { last };
    ENDINGS.contains(&ending)
}

/// Runs of digits and what is between them.
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

/// Numbers by their value, everything else by its letters. What is the same to people (`1`, `01`) is told apart at last.
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

/// The one number in which files of the same pattern differ, or their names.
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
    fn ranks_of_a_folder_are_in_the_order_of_their_numbers() {
        let folder = folder_with(&["run-10.pickle", "run-9.pickle", "run-2.pickle", "run-2.json", "notes.md"]);
        assert_eq!(ranks(&folder.path().display().to_string()), ["2", "9", "10"]);
        let compressed = folder_with(&["a1b1.pickle.xz", "a1b0.pickle.xz", "a1b0.csv.xz"]);
        assert_eq!(ranks(&compressed.path().display().to_string()), ["0", "1"], "the number that differs");
    }

    #[test]
    fn a_pattern_takes_what_it_names() {
        let folder = folder_with(&["x-1.log", "x-11.log", "y-1.log", "x-3.pickle"]);
        assert_eq!(ranks(&folder.path().join("x-*.log").display().to_string()), ["1", "11"]);
    }

    #[test]
    fn files_that_do_not_tell_a_number_keep_their_names() {
        let folder = folder_with(&["left.pickle", "right.pickle", "node1-gpu2.oomph"]);
        let found = ranks(&folder.path().display().to_string());
        assert_eq!(found, ["left.pickle", "node1-gpu2.oomph", "right.pickle"]);
        let two_numbers = folder_with(&["node1-gpu0.pickle", "node0-gpu1.pickle"]);
        assert_eq!(ranks(&two_numbers.path().display().to_string()), ["node0-gpu1.pickle", "node1-gpu0.pickle"]);
    }

    #[test]
    fn a_name_is_no_folder_and_an_empty_folder_is_an_error() {
        assert_eq!(rank_files("training").unwrap(), None);
        let folder = folder_with(&["notes.md"]);
        let message = rank_files(&folder.path().display().to_string()).unwrap_err().to_string();
        assert!(message.contains("no recording"), "{message}");
        assert!(rank_files("nowhere/*.pickle").is_err());
    }

    proptest::proptest! {
        #[test]
        fn the_order_is_one(mut names in proptest::collection::vec("[a-c0-2]{0,6}", 0..8)) {
            names.sort_by(|a, b| natural_order(a, b));
            for (place, one) in names.iter().enumerate() {
                for other in &names[place..] {
                    proptest::prop_assert_ne!(natural_order(one, other), Ordering::Greater);
                }
            }
        }
    }
}
