//! A folder or a pattern as SOURCE: one recording a rank, one answer for all.
//!
//! `advise`, `leaks`, `inspect` and `threshold` ask; each says how to answer for one rank and what to compare.

use serde_json::Value;

use super::{
    exit,
    failure::{Failure, Outcome},
    options::Format,
    output,
    progress::{self, OneOf},
};
use crate::{
    answer::ranks::{RankRow, Ranks},
    base::{Progress, side_by_side},
    report::{self, Medium},
    suite::{self, RankFile},
};

/// The files of all ranks, if the only source is a folder or a pattern.
pub fn files(sources: &[String]) -> Result<Option<Vec<RankFile>>, Failure> {
    match sources {
        [source] => suite::rank_files(source).map_err(Failure::usage),
        _ => Ok(None),
    }
}

/// How many threads each rank has for itself.
pub fn jobs_of_each(files: &[RankFile]) -> usize {
    (suite::all_cores() / suite::read_at_once(files, suite::all_cores())).max(1)
}

/// Answers for every rank, and shows how many are done.
pub fn ask<T: Send>(
    files: &[RankFile],
    answer: impl Fn(&str, &dyn Progress) -> Result<T, Failure> + Sync,
) -> Vec<(RankFile, Result<T, String>)> {
    let bar = progress::of_ranks(files.len());
    let answers = side_by_side(files, suite::read_at_once(files, suite::all_cores()), |file| {
        let path = file.path.to_string_lossy();
        let answer = answer(&path, &OneOf::of(&path, &bar)).map_err(|failure| failure.to_string());
        bar.inc(1);
        (file.clone(), answer)
    });
    bar.finish_and_clear();
    answers
}

/// Gathers the answers by what `row` makes of each.
pub fn gather<T>(
    figure: &'static str,
    answers: &[(RankFile, Result<T, String>)],
    row: impl Fn(&T) -> RankRow,
) -> Ranks {
    let of_rank = |(file, answer): &(RankFile, Result<T, String>)| RankRow {
        rank: file.rank.clone(),
        ..answer.as_ref().map_or_else(|reason| RankRow::unanswered(reason), &row)
    };
    Ranks::gather(figure, answers.iter().map(of_rank).collect())
}

/// Prints the answer for all ranks: `in_full` is that of the worst in the given format, `json` the same of any.
pub fn tell<T>(
    ranks: &Ranks,
    answers: &[(RankFile, Result<T, String>)],
    format: Format,
    in_full: impl Fn(&T) -> Result<String, Failure>,
    json: impl Fn(&T) -> Result<String, Failure>,
) -> Outcome {
    let of_worst = || -> Result<String, Failure> {
        let worst = ranks.worst.and_then(|place| answers.get(place));
        let Some((RankFile { rank, .. }, Ok(answer))) = worst else { return Ok(String::new()) };
        Ok(format!("The worst of {} ranks is {rank}:\n\n{}\n", answers.len(), in_full(answer)?))
    };
    output::say(&match format {
        Format::Table => of_worst()? + &report::ranks(ranks, Medium::Terminal(output::terminal_width())),
        Format::Markdown => of_worst()? + &report::ranks(ranks, Medium::Markdown),
        Format::Csv => report::ranks_csv(ranks)?,
        Format::Json => {
            let of_each = answers.iter().map(|(_, answer)| match answer {
                Ok(answer) => rows_of(&json(answer)?),
                Err(_) => Ok(Vec::new()),
            });
            report::ranks_json(ranks, of_each.collect::<Result<_, Failure>>()?)
        }
    })?;
    for (file, answer) in answers {
        if let Err(reason) = answer {
            // Most reasons name the file themselves.
            let path = file.path.display().to_string();
            let named = if reason.starts_with(&path) { reason.clone() } else { format!("{path}: {reason}") };
            output::complain(&format!("failed: {named}"));
        }
    }
    Ok(if answers.iter().all(|(_, answer)| answer.is_ok()) { exit::OK } else { exit::CASES_FAILED })
}

/// The rows of a document of ours.
fn rows_of(document: &str) -> Result<Vec<Value>, Failure> {
    let mut document: Value = serde_json::from_str(document)?;
    Ok(document["rows"].as_array_mut().map(std::mem::take).unwrap_or_default())
}
