//! All ranks of a distributed program in one result: the worst rank in full, then one line per
//! rank.

use serde_json::{Value, json};

use super::{
    Medium, Render, ReportError,
    render::{TextTable, capitalised, signed_bytes},
    rows,
};
use crate::{
    answer::ranks::{RankComparison, RankRow},
    base::Bytes,
    measure::SCHEMA,
};

/// The ranks, and what the command answers for each of them; `None` for a rank without an answer.
pub struct RankReport<'a, T> {
    /// The comparison of the ranks.
    pub ranks: &'a RankComparison,
    /// One answer per rank.
    pub answers: Vec<Option<&'a T>>,
}

impl<T: Render> Render for RankReport<'_, T> {
    type Row = RankRow;

    fn rows(&self) -> &[RankRow] {
        &self.ranks.rows
    }

    fn csv(&self) -> Result<String, ReportError> {
        rows::to_csv_with(&["figure"], self.ranks.rows.iter().map(|row| ((self.ranks.figure,), row)))
    }

    /// `{"schema": 2, "figure": .., "worst": .., "spread": .., "outliers": [..], "rows": [..]}`. Each
    /// row has `answers`: the rows that the command gives for a single source.
    fn json(&self) -> Value {
        let with_answers = |(row, answer): (&RankRow, &Option<&T>)| {
            let mut row = json!(row);
            row["answers"] = answer.map_or_else(|| json!([]), |answer| answer.json()["rows"].take());
            row
        };
        let rows: Vec<Value> = self.ranks.rows.iter().zip(&self.answers).map(with_answers).collect();
        let worst = self.ranks.worst.map(|place| &self.ranks.rows[place].rank);
        let outliers: Vec<&str> = self.ranks.outliers().map(|row| row.rank.as_str()).collect();
        json!({
            "schema": SCHEMA, "figure": self.ranks.figure, "worst": worst, "spread": self.ranks.spread,
            "outliers": outliers, "rows": rows,
        })
    }

    fn text(&self, medium: Medium) -> String {
        let ranks = self.ranks;
        let headings = ["rank", "peak of\nlive bytes", ranks.figure, "verdict"];
        let mut table = TextTable::new(&headings, medium).with_numbers(..3);
        let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string());
        for row in &ranks.rows {
            let away = row.outlier_by_bytes.map(|by| format!(" (outlier by {})", plus_or_minus(by)));
            let verdict = row.verdict.clone() + &away.unwrap_or_default();
            table.row([
                row.rank.clone(),
                bytes(row.live_peak_bytes.or(row.peak_allocated_bytes)),
                bytes(row.figure_bytes),
                verdict,
            ]);
        }
        let worst = ranks.worst.and_then(|place| Some((&ranks.rows[place].rank, (*self.answers.get(place)?)?)));
        let in_full = worst.map_or_else(String::new, |(rank, answer)| {
            format!("The worst of {} ranks is {rank}:\n\n{}\n", ranks.rows.len(), answer.text(medium))
        });
        format!("{in_full}{}{}", table.finish("", []), summary(ranks))
    }
}

fn summary(ranks: &RankComparison) -> String {
    let Some(spread) = ranks.spread else { return "No rank has an answer.\n".to_owned() };
    let mut text = format!(
        "{}: {} to {}, median {}, over {} ranks.\n",
        capitalised(ranks.figure),
        Bytes(spread.min_bytes),
        Bytes(spread.max_bytes),
        Bytes(spread.median_bytes),
        match ranks.unanswered().count() {
            0 => ranks.rows.len().to_string(),
            missing => format!("{} of {}", ranks.rows.len() - missing, ranks.rows.len()),
        }
    );
    let away = |row: &RankRow| plus_or_minus(row.outlier_by_bytes.unwrap_or_default());
    let named: Vec<String> = ranks.outliers().map(|row| format!("{} by {}", row.rank, away(row))).collect();
    text.push_str(&match named.len() {
        0 => "No rank is an outlier.\n".to_owned(),
        1 => format!("One rank is an outlier: {}.\n", named[0]),
        more => format!("{more} ranks are outliers: {}.\n", named.join(", ")),
    });
    let unanswered: Vec<&str> = ranks.unanswered().map(|row| row.rank.as_str()).collect();
    if !unanswered.is_empty() {
        text.push_str(&format!("No answer for {}.\n", unanswered.join(", ")));
    }
    text
}

fn plus_or_minus(bytes: i64) -> String {
    format!("{}{}", if bytes < 0 { "" } else { "+" }, signed_bytes(bytes as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::GIB;

    fn four(last: u64) -> RankComparison {
        let mut rows: Vec<RankRow> = [10 * GIB, 10 * GIB, 10 * GIB, last]
            .iter()
            .enumerate()
            .map(|(rank, &bytes)| RankRow {
                rank: rank.to_string(),
                live_peak_bytes: Some(bytes / 2),
                figure_bytes: Some(bytes),
                verdict: "fits".to_owned(),
                ..RankRow::default()
            })
            .collect();
        rows.push(RankRow { rank: "4".to_owned(), ..RankRow::unanswered("the file is empty") });
        RankComparison::gather("memory needed", rows)
    }

    #[derive(serde::Serialize)]
    struct RankAnswer {
        of: usize,
    }

    impl Render for [RankAnswer] {
        type Row = RankAnswer;

        fn rows(&self) -> &[RankAnswer] {
            self
        }

        fn text(&self, _: Medium) -> String {
            "in full".to_owned()
        }
    }

    fn without_answers(ranks: &RankComparison) -> RankReport<'_, Vec<RankAnswer>> {
        RankReport { ranks, answers: vec![None; ranks.rows.len()] }
    }

    #[test]
    fn table_names_outliers_and_missing_ranks() {
        let text = without_answers(&four(14 * GIB)).text(Medium::PIPE);
        for words in [
            "Memory needed: 10.0 GiB to 14.0 GiB, median 10.0 GiB, over 4 of 5 ranks.",
            "One rank is an outlier: 3 by +4.00 GiB.",
            "No answer for 4.",
            "no answer: the file is empty",
        ] {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
        assert!(without_answers(&four(10 * GIB)).text(Medium::Markdown).contains("No rank is an outlier."));
    }

    #[test]
    fn json_has_a_row_per_rank_with_its_answers() {
        let found = four(14 * GIB);
        let answers: Vec<Vec<RankAnswer>> = (0..5).map(|of| vec![RankAnswer { of }]).collect();
        let report = RankReport { answers: answers.iter().map(Some).collect(), ..without_answers(&found) };
        let document = report.json();
        assert_eq!((&document["worst"], &document["outliers"][0]), (&"3".into(), &"3".into()));
        assert_eq!(document["rows"][2]["answers"][0]["of"], 2);
        assert_eq!(document["spread"]["median_bytes"], 10 * GIB);
        assert!(report.text(Medium::PIPE).starts_with("The worst of 5 ranks is 3:\n\nin full\n"));
        let csv = report.csv().unwrap();
        assert_eq!(csv.lines().count(), 6);
        assert_eq!(
            csv.lines().next().unwrap(),
            "figure,rank,live_peak_bytes,peak_allocated_bytes,figure_bytes,verdict,outlier_by_bytes"
        );
    }
}
