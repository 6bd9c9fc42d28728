//! One way to print a result: [`Render`] gives text for people, JSON and CSV.
//!
//! Every result that a command prints implements it. The command line picks the format and writes
//! the text; nothing here knows about `--format`.

use std::collections::{HashMap, HashSet};

use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};
use serde::Serialize;
use serde_json::{Value, json};

use super::{ReportError, rows};
use crate::{
    base::{Bytes, escaped, escaped_markdown},
    measure::SCHEMA,
};

/// A result that can be printed in every format.
pub trait Render {
    /// One row of the JSON document.
    type Row: Serialize;

    /// The rows of the JSON document.
    fn rows(&self) -> &[Self::Row];

    /// For people: tables, and notes below them.
    fn text(&self, medium: Medium) -> String;

    /// All columns in bytes and nanoseconds, with a header. Unknown values are empty cells.
    fn csv(&self) -> Result<String, ReportError> {
        Err(ReportError::NoCsv)
    }

    /// `{"schema": 2, "rows": [...]}` in bytes and nanoseconds.
    fn json(&self) -> Value {
        json!({ "schema": SCHEMA, "rows": self.rows() })
    }
}

/// A row type whose rows are printed as one table, with all fields as CSV columns.
pub trait RenderRow: Serialize + Default {
    /// For people: the table, and notes below it.
    fn text(rows: &[Self], medium: Medium) -> String;
}

impl<T: RenderRow> Render for [T] {
    type Row = T;

    fn rows(&self) -> &[T] {
        self
    }

    fn text(&self, medium: Medium) -> String {
        T::text(self, medium)
    }

    fn csv(&self) -> Result<String, ReportError> {
        rows::to_csv(self)
    }
}

impl<T> Render for Vec<T>
where
    [T]: Render,
{
    type Row = <[T] as Render>::Row;

    fn rows(&self) -> &[Self::Row] {
        self.as_slice().rows()
    }

    fn text(&self, medium: Medium) -> String {
        self.as_slice().text(medium)
    }

    fn csv(&self) -> Result<String, ReportError> {
        self.as_slice().csv()
    }

    fn json(&self) -> Value {
        self.as_slice().json()
    }
}

/// Where a text will be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// On a terminal or from a pipe.
    Terminal(Terminal),
    /// In a document.
    Markdown,
}

/// What a terminal can show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminal {
    /// Columns; `None` for a pipe, which gets tables in full width.
    pub width: Option<u16>,
    /// The characters beyond ASCII that it can show.
    pub glyphs: Glyphs,
}

/// Characters beyond ASCII in tables and pictures. Files in Markdown, HTML, JSON and CSV are always UTF-8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Glyphs {
    /// None.
    Ascii,
    /// The lines of tables.
    #[default]
    Lines,
    /// Lines and blocks of different heights.
    Blocks,
}

impl Medium {
    /// A pipe of which nothing is known.
    pub const PIPE: Medium = Medium::Terminal(Terminal { width: None, glyphs: Glyphs::Lines });
}

/// Columns from here on hold numbers, unless a table says otherwise.
const FIRST_NUMBER: usize = 2;
/// Narrower columns hold numbers or short names and are never wrapped.
const WRAPPED_FROM: u16 = 15;
/// A wrapped column keeps at least this width.
const LEAST_NAME_WIDTH: u16 = 20;
/// Padding on both sides of a cell and the gap to the next column.
const CELL_GAP: u16 = 3;

/// A table of text with a legend and notes below it: names on the left, numbers on the right.
pub(super) struct TextTable {
    table: Table,
    medium: Medium,
}

impl TextTable {
    /// Headings may have two lines, which keeps columns as narrow as their numbers; Markdown gets
    /// one line.
    pub(super) fn new(headings: &[&str], medium: Medium) -> TextTable {
        let mut table = Table::new();
        table.force_no_tty();
        match medium {
            Medium::Terminal(Terminal { width, glyphs }) => {
                table.set_header(headings);
                table.load_style(match glyphs {
                    Glyphs::Ascii => presets::ASCII_HORIZONTAL_ONLY,
                    Glyphs::Lines | Glyphs::Blocks => presets::UTF8_HORIZONTAL_ONLY,
                });
                table.style_mut().row_separator = comfy_table::LineStyle::none();
                match width {
                    Some(width) => table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width),
                    None => table.set_content_arrangement(ContentArrangement::Disabled),
                };
            }
            Medium::Markdown => {
                table.set_header(headings.iter().map(|heading| in_one_line(heading)));
                table.load_style(presets::ASCII_MARKDOWN);
                table.set_content_arrangement(ContentArrangement::Disabled);
            }
        }
        TextTable { table, medium }.with_numbers(FIRST_NUMBER..)
    }

    /// The same table, with the numbers in these columns.
    pub(super) fn with_numbers(mut self, numbers: impl std::ops::RangeBounds<usize>) -> TextTable {
        for (place, column) in self.table.column_iter_mut().enumerate() {
            let is_number = numbers.contains(&place);
            column.set_cell_alignment(if is_number { CellAlignment::Right } else { CellAlignment::Left });
        }
        self
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let shown = |cell: String| match self.medium {
            Medium::Terminal(_) => escaped(&cell).into_owned(),
            Medium::Markdown => escaped_markdown(&cell),
        };
        let cells: Vec<Cell> = cells.into_iter().map(|cell| Cell::new_owned(shown(cell.into()))).collect();
        self.table.add_row(cells);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.table.row_count() == 0
    }

    /// Fits the table into its terminal once all rows are there: names are wrapped, numbers are
    /// not, and `dispensable` columns are left out in that order where that is not enough. Returns
    /// a sentence that names the missing columns.
    pub(super) fn fit(&mut self, dispensable: &[usize]) -> Option<String> {
        let Medium::Terminal(Terminal { width: Some(width), .. }) = self.medium else { return None };
        let widths = self.table.column_max_content_widths();
        let least =
            |column: &u16| if *column < WRAPPED_FROM { *column } else { LEAST_NAME_WIDTH.min(*column) } + CELL_GAP;
        let whole: u16 = widths.iter().map(|column| column + CELL_GAP).sum();
        if whole <= width {
            return None;
        }
        let mut taken: u16 = widths.iter().map(least).sum();
        let mut left_out = Vec::new();
        for &column in dispensable {
            if taken > width {
                taken -= least(&widths[column]);
                left_out.push(column);
            }
        }
        let header = self.table.header().into_iter().flat_map(|header| header.cell_iter());
        let headings: Vec<String> = header.map(|cell| in_one_line(&cell.content())).collect();
        for (number, column) in self.table.column_iter_mut().enumerate() {
            if left_out.contains(&number) {
                column.set_constraint(ColumnConstraint::Hidden);
            } else if taken <= width && widths[number] < WRAPPED_FROM {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        left_out.sort_unstable();
        let names: Vec<&str> = left_out.iter().filter_map(|&column| headings.get(column)).map(String::as_str).collect();
        (!names.is_empty()).then(|| format!("Columns hidden because the terminal is narrow: {}.", names.join(", ")))
    }

    /// The table, the legend and the notes.
    pub(super) fn finish(self, legend: &str, notes: impl IntoIterator<Item = String>) -> String {
        let notes: Vec<String> = notes.into_iter().collect();
        let (gap, bullet) = if self.medium == Medium::Markdown { ("\n", "- ") } else { ("", "") };
        let mut text = format!("{}\n", self.table.trim_fmt());
        if !legend.is_empty() {
            text.push_str(&format!("{gap}{legend}\n"));
        }
        if !notes.is_empty() {
            text.push_str(&format!("\n{bullet}{}\n", notes.join(&format!("\n{bullet}"))));
        }
        text
    }
}

/// A heading without its line break or hyphen.
fn in_one_line(heading: &str) -> String {
    heading.replace("-\n", "").replace('\n', " ")
}

/// An amount of bytes; an unknown one is an empty cell.
pub(super) fn maybe_bytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string())
}

/// An amount of bytes with its sign.
pub(super) fn signed_bytes(bytes: f64) -> String {
    format!("{}{}", if bytes < -0.5 { "-" } else { "" }, Bytes(bytes.abs().round() as u64))
}

/// An amount in whole MiB: rounding to three digits would hide what a search found.
pub(super) fn in_mebibytes(bytes: Option<u64>) -> String {
    let Some(bytes) = bytes else { return String::new() };
    format!("{} MiB", grouped(bytes.div_ceil(1 << 20)))
}

/// A number with a comma before every third digit from its end.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 case`, `2 cases`.
pub(super) fn counted(count: usize, one: &str, many: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {many}") }
}

/// Every name once, in order of first appearance.
pub(super) fn distinct<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = HashSet::new();
    names.into_iter().filter(|name| seen.insert(*name)).collect()
}

/// Where names are in a list, without a search of the list per name.
#[derive(Debug, Default)]
pub struct Places<'a>(HashMap<&'a str, usize>);

impl<'a> Places<'a> {
    /// The places of these names; the first one of a name that is there twice.
    pub fn of(names: impl IntoIterator<Item = &'a str>) -> Places<'a> {
        let mut places = HashMap::new();
        for (place, name) in names.into_iter().enumerate() {
            places.entry(name).or_insert(place);
        }
        Places(places)
    }

    /// The place of a name. Names that are not in the list come after all others.
    pub fn get(&self, name: &str) -> usize {
        self.0.get(name).copied().unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::MIB;

    fn lines(width: u16, dispensable: &[usize]) -> (Vec<String>, Option<String>) {
        let medium = Medium::Terminal(Terminal { width: Some(width), glyphs: Glyphs::Blocks });
        let mut table = TextTable::new(&["workload", "strategy", "peak\nreserved", "driver\ncalls"], medium);
        table.row(["training", "caching:expandable_segments:True", "10.1 GiB", "123456"]);
        let hidden = table.fit(dispensable);
        (table.finish("", []).lines().map(str::to_owned).collect(), hidden)
    }

    #[test]
    fn wide_terminal_keeps_all_columns() {
        let (lines, hidden) = lines(80, &[3]);
        assert_eq!(hidden, None);
        assert!(lines[4].contains("caching:expandable_segments:True   10.1 GiB   123456"), "{lines:#?}");
    }

    #[test]
    fn ascii_terminal_gets_ascii_lines() {
        let medium = Medium::Terminal(Terminal { width: None, glyphs: Glyphs::Ascii });
        let mut table = TextTable::new(&["workload", "strategy"], medium);
        table.row(["training", "caching"]);
        let text = table.finish("", []);
        assert!(text.is_ascii() && text.lines().any(|line| line.contains("=====")), "{text}");
    }

    #[test]
    fn names_wrap_before_columns_are_hidden() {
        let (narrow, hidden) = lines(60, &[3]);
        assert_eq!(hidden, None);
        assert!(narrow[4].contains("10.1 GiB   123456"), "{narrow:#?}");
        let (narrower, hidden) = lines(48, &[3]);
        assert_eq!(hidden.as_deref(), Some("Columns hidden because the terminal is narrow: driver calls."));
        assert!(narrower[4].contains("training") && narrower[4].contains("10.1 GiB"), "{narrower:#?}");
        assert!(narrower.iter().all(|line| line.chars().count() <= 48), "{narrower:#?}");
    }

    #[test]
    fn amounts_are_exact_to_the_mebibyte() {
        assert_eq!(in_mebibytes(Some(1_234_567 * MIB)), "1,234,567 MiB");
        assert_eq!(in_mebibytes(Some(2 * MIB)), "2 MiB");
    }
}
