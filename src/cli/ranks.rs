//! A folder or a pattern as SOURCE: one recording per rank, one answer for all of them.
//!
//! Used by `advise`, `leaks`, `inspect` and `threshold`, which answer for one rank and say what to
//! compare.

use super::{
    exit::{self, CommandError, CommandResult},
    export::JsonExport,
    options::Format,
    output,
    progress::{self, OneOf},
};
use crate::{
    answer::ranks::{RankComparison, RankRow},
    base::{Progress, parallel_map, path_text},
    report::{RankReport, Render},
    suite::{self, RankFile},
};

/// The files of all ranks, if the source is a folder or a pattern.
pub fn files(sources: &[String]) -> Result<Option<Vec<RankFile>>, CommandError> {
    match sources {
        [source] => suite::rank_files(source).map_err(CommandError::usage),
        _ => Ok(None),
    }
}

/// The number of threads per rank.
pub fn jobs_of_each(files: &[RankFile]) -> usize {
    (suite::all_cores() / suite::read_at_once(files, suite::all_cores())).max(1)
}

/// Answers for every rank in parallel, with a progress bar.
pub fn ask<T: Send>(
    files: &[RankFile],
    answer: impl Fn(&str, &dyn Progress) -> Result<T, CommandError> + Sync,
) -> Vec<(RankFile, Result<T, String>)> {
    let bar = progress::counting("ranks", files.len(), 0);
    let answers = parallel_map(files, suite::read_at_once(files, suite::all_cores()), |file| {
        let path = path_text(&file.path);
        let answer = answer(&path, &OneOf::of(&path, &bar)).map_err(|failure| failure.to_string());
        bar.inc(1);
        (file.clone(), answer)
    });
    bar.finish_and_clear();
    answers
}

/// Prints one answer for all ranks, and writes it to a file; `row` says what is compared.
pub fn tell<T: Render>(
    figure: &'static str,
    answers: &[(RankFile, Result<T, String>)],
    (format, export): (Format, &JsonExport),
    row: impl Fn(&T) -> RankRow,
) -> CommandResult {
    let of_rank = |(file, answer): &(RankFile, Result<T, String>)| RankRow {
        rank: file.rank.clone(),
        ..answer.as_ref().map_or_else(|reason| RankRow::unanswered(reason), &row)
    };
    let ranks = RankComparison::gather(figure, answers.iter().map(of_rank).collect());
    let answered = answers.iter().map(|(_, answer)| answer.as_ref().ok()).collect();
    export.print(&RankReport { ranks: &ranks, answers: answered }, format)?;
    for (file, answer) in answers {
        if let Err(reason) = answer {
            // Most reasons already name the file.
            let path = file.path.display().to_string();
            let named = if reason.starts_with(&path) { reason.clone() } else { format!("{path}: {reason}") };
            output::complain(&format!("failed: {named}"));
        }
    }
    Ok(if answers.iter().all(|(_, answer)| answer.is_ok()) { exit::OK } else { exit::CASES_FAILED })
}
