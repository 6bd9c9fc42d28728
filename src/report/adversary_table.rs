//! What adversaries did to strategies: tables, and the same rows as CSV and JSON.

use comfy_table::Cell;

use super::{
    Medium, ReportError, rows,
    threshold_table::{table, with_notes},
};
use crate::{
    base::Bytes,
    measure::SCHEMA,
    stress::adversary::{Assessment, Standing},
};

const HEADINGS: [&str; 7] = [
    "strategy",
    "stands",
    "reserved\nwith plenty",
    "up to its\nlast block",
    "memory\nneeded",
    "needed /\nalive",
    "fragmented by\nblocks up to",
];

/// One line a strategy, with the bound that all of them are held against below.
#[must_use]
pub fn adversary(rows: &[Assessment], medium: Medium) -> String {
    let mut table = table(&HEADINGS, medium);
    for row in rows {
        let bytes = |bytes: Option<u64>| bytes.map_or(String::new(), |bytes| Bytes(bytes).to_string());
        let cells = [
            row.strategy.clone(),
            row.standing.words().to_owned(),
            bytes(row.peak_reserved_bytes),
            bytes(row.extent_bytes),
            bytes(row.needed_bytes),
            row.needed_ratio.map_or(String::new(), |ratio| format!("{ratio:.3}")),
            bytes(row.fragmenting_bytes),
        ];
        table.add_row(cells.into_iter().map(Cell::new_owned).collect::<Vec<_>>());
    }
    with_notes(&table, &rows.first().map_or(String::new(), legend), rows.iter().filter_map(note), medium)
}

fn legend(row: &Assessment) -> String {
    let ratio = row.bound_bytes as f64 / row.live_bytes as f64;
    format!(
        "At most {} alive, in blocks of {} to {}: who never moves a block needs {}, {ratio:.3} times what is alive \
         (Robson 1971).\nMemory needed: the least in which the strategy outlives the same adversary.",
        Bytes(row.live_bytes),
        Bytes(row.unit_bytes),
        Bytes(row.largest_bytes),
        Bytes(row.bound_bytes),
    )
}

fn note(row: &Assessment) -> Option<String> {
    let without_figures = matches!(row.standing, Standing::RunsOut | Standing::Refuses | Standing::Skipped);
    without_figures.then(|| format!("{}: {}: {}", row.strategy, row.standing.words(), row.reason))
}

/// `{"schema": 1, "rows": [...]}` in bytes.
#[must_use]
pub fn adversary_json(rows: &[Assessment]) -> String {
    format!("{:#}\n", serde_json::json!({ "schema": SCHEMA, "rows": rows }))
}

/// The same rows, comma-separated.
pub fn adversary_csv(assessments: &[Assessment]) -> Result<String, ReportError> {
    Ok(String::from_utf8_lossy(&rows::to_csv(assessments)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{GIB, MIB};

    fn sample() -> Vec<Assessment> {
        let pool = Assessment {
            strategy: "pool:initial:{memory}".to_owned(),
            device: "sim".to_owned(),
            live_bytes: 4 * GIB,
            largest_bytes: 512 * MIB,
            unit_bytes: 2 * MIB,
            bound_bytes: 20_940_062_720,
            peak_reserved_bytes: Some(30 * GIB),
            extent_bytes: Some(20_940_062_720),
            needed_bytes: Some(20_940_062_720),
            needed_ratio: Some(4.875),
            standing: Standing::AtTheBound,
            bouts: 16,
            ..Assessment::default()
        };
        let fixed = Assessment {
            strategy: "fixed".to_owned(),
            needed_bytes: None,
            standing: Standing::Refuses,
            reason: "serves no requests of 2.00 MiB".to_owned(),
            ..pool.clone()
        };
        vec![pool, fixed]
    }

    #[test]
    fn the_bound_stands_below_the_table_and_every_format_has_all_rows() {
        let text = adversary(&sample(), Medium::Terminal(None));
        assert!(text.contains("needs 19.5 GiB, 4.875 times what is alive"), "{text}");
        assert!(text.contains("at the bound") && text.contains("fixed: refuses: serves no requests"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&adversary_json(&sample())).unwrap();
        assert_eq!(json["rows"][0]["needed_bytes"], 20_940_062_720_u64);
        assert_eq!(json["rows"][1]["standing"], "refuses");
        let csv = adversary_csv(&sample()).unwrap();
        assert!(csv.starts_with("strategy,device,live_bytes,") && csv.lines().count() == 3, "{csv}");
    }
}
