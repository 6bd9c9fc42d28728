//! The table of all ranks of a program, under the answer for the worst of them; and the same as JSON and CSV.

use comfy_table::{Cell, CellAlignment, ContentArrangement, presets};
use serde_json::{Value, json};

use super::{
    Medium, ReportError, rows,
    table::{dress_for_terminal, headed},
};
use crate::{
    answer::ranks::{RankRow, Ranks},
    base::Bytes,
    measure::SCHEMA,
};

/// The table, the spread under it, and who stands out.
#[must_use]
pub fn ranks(ranks: &Ranks, medium: Medium) -> String {
    let mut table = headed(&["rank", "peak of\nlive bytes", ranks.figure, "verdict"]);
    match medium {
        Medium::Terminal(width) => dress_for_terminal(&mut table, width),
        Medium::Markdown => {
            table.set_header(["rank", "peak of live bytes", ranks.figure, "verdict"]);
            table.load_style(presets::ASCII_MARKDOWN);
            table.set_content_arrangement(ContentArrangement::Disabled);
        }
    }
    for (place, column) in table.column_iter_mut().enumerate() {
        let alignment = if place < 3 { CellAlignment::Right } else { CellAlignment::Left };
        column.set_cell_alignment(alignment);
    }
    let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string());
    for row in &ranks.rows {
        let away = row.outlier_by_bytes.map_or_else(String::new, |by| format!(" (stands out by {})", signed(by)));
        let cells = [row.rank.clone(), bytes(row.peak_bytes), bytes(row.figure_bytes), row.verdict.clone() + &away];
        table.add_row(cells.map(Cell::new_owned));
    }
    format!("{}\n{}", table.trim_fmt(), below(ranks))
}

/// What is to be said of all together.
fn below(ranks: &Ranks) -> String {
    let Some(spread) = ranks.spread else { return "No rank has an answer.\n".to_owned() };
    let mut text = format!(
        "{}: {} to {}, median {}, over {} ranks.\n",
        capitalised(ranks.figure),
        Bytes(spread.min_bytes),
        Bytes(spread.max_bytes),
        Bytes(spread.median_bytes),
        match ranks.unanswered().count() {
            0 => ranks.rows.len().to_string(),
            silent => format!("{} of {}", ranks.rows.len() - silent, ranks.rows.len()),
        }
    );
    let named: Vec<String> = ranks.outliers().map(outlier).collect();
    text.push_str(&match named.len() {
        0 => "No rank stands out.\n".to_owned(),
        1 => format!("One rank stands out: {}.\n", named[0]),
        more => format!("{more} ranks stand out: {}.\n", named.join(", ")),
    });
    let unanswered: Vec<&str> = ranks.unanswered().map(|row| row.rank.as_str()).collect();
    if !unanswered.is_empty() {
        text.push_str(&format!("There is no answer for {}.\n", unanswered.join(", ")));
    }
    text
}

fn outlier(row: &RankRow) -> String {
    format!("{} by {}", row.rank, signed(row.outlier_by_bytes.unwrap_or_default()))
}

fn signed(bytes: i64) -> String {
    format!("{}{}", if bytes < 0 { "-" } else { "+" }, Bytes(bytes.unsigned_abs()))
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// `{"schema": 1, "figure": .., "worst": .., "spread": .., "rows": [..]}`: one row a rank, each with its `answers`, which
/// are the rows that the command gives for a single source.
#[must_use]
pub fn ranks_json(ranks: &Ranks, answers: Vec<Vec<Value>>) -> String {
    let rows: Vec<Value> = ranks
        .rows
        .iter()
        .zip(answers)
        .map(|(row, answers)| {
            let mut row = json!(row);
            row["answers"] = answers.into();
            row
        })
        .collect();
    let worst = ranks.worst.map(|place| &ranks.rows[place].rank);
    let outliers: Vec<&str> = ranks.outliers().map(|row| row.rank.as_str()).collect();
    let document = json!({
        "schema": SCHEMA, "figure": ranks.figure, "worst": worst, "spread": ranks.spread, "outliers": outliers, "rows": rows,
    });
    format!("{document:#}\n")
}

/// One line a rank.
pub fn ranks_csv(ranks: &Ranks) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(&ranks.rows)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::GIB;

    fn four(last: u64) -> Ranks {
        let mut rows: Vec<RankRow> = [10 * GIB, 10 * GIB, 10 * GIB, last]
            .iter()
            .enumerate()
            .map(|(rank, &bytes)| RankRow {
                rank: rank.to_string(),
                peak_bytes: Some(bytes / 2),
                figure_bytes: Some(bytes),
                verdict: "fits".to_owned(),
                ..RankRow::default()
            })
            .collect();
        rows.push(RankRow { rank: "4".to_owned(), ..RankRow::unanswered("the file is empty") });
        Ranks::gather("memory needed", rows)
    }

    #[test]
    fn the_table_names_who_stands_out_and_who_is_missing() {
        let text = ranks(&four(14 * GIB), Medium::Terminal(None));
        for words in [
            "Memory needed: 10.0 GiB to 14.0 GiB, median 10.0 GiB, over 4 of 5 ranks.",
            "One rank stands out: 3 by +4.00 GiB.",
            "There is no answer for 4.",
            "no answer: the file is empty",
        ] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
        assert!(ranks(&four(10 * GIB), Medium::Markdown).contains("No rank stands out."));
    }

    #[test]
    fn json_has_a_row_a_rank_with_its_answers_and_csv_a_line() {
        let found = four(14 * GIB);
        let answers = (0..5).map(|rank| vec![json!({ "of": rank })]).collect();
        let document: Value = serde_json::from_str(&ranks_json(&found, answers)).unwrap();
        assert_eq!((&document["worst"], &document["outliers"][0]), (&"3".into(), &"3".into()));
        assert_eq!(document["rows"][2]["answers"][0]["of"], 2);
        assert_eq!(document["spread"]["median_bytes"], 10 * GIB);
        let csv = ranks_csv(&found).unwrap();
        assert_eq!(csv.lines().count(), 6);
        assert_eq!(csv.lines().next().unwrap(), "rank,peak_bytes,figure_bytes,verdict,outlier_by_bytes");
    }
}
