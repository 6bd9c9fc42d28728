//! One way to print a result: [`Render`] gives text for people, JSON and CSV.
//!
//! Every result that a command prints implements it. The command line picks the format and writes
//! the text; nothing here knows about `--format`.

use std::collections::{HashMap, HashSet};

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
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
/// Narrower columns of numbers hold one amount and are never wrapped.
const WRAPPED_FROM: usize = 15;
/// The width that the first column keeps before other columns are left out: `caching:expandable_segments:` below its group.
const LEAST_NAME_WIDTH: usize = 30;
/// The same for other columns of words.
const LEAST_TEXT_WIDTH: usize = 16;
/// Blanks between two columns, and in a table that is too wide.
const GAPS: [usize; 2] = [3, 2];

/// A table of text with a legend and notes below it: names on the left, numbers on the right.
///
/// In a terminal it is never wider than that. What does not fit is first moved (a name of a group gets a line of its own),
/// then wrapped between words, and then left out, in the order of [`TextTable::fit`].
pub(super) struct TextTable {
    columns: Vec<TableColumn>,
    medium: Medium,
    /// Whether the first column names groups of rows: it is empty in rows that belong to the group above.
    grouped: bool,
    /// Whether a table that is too wide becomes several tables with the same first column.
    paneled: bool,
    /// Columns that are left out, by place.
    hidden: Vec<usize>,
}

#[derive(Clone)]
struct TableColumn {
    heading: String,
    cells: Vec<String>,
    is_number: bool,
}

impl TableColumn {
    fn texts(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.heading.as_str()).chain(self.cells.iter().map(String::as_str))
    }

    /// The width of the longest line.
    fn width(&self) -> usize {
        self.texts().flat_map(str::lines).map(width_of).max().unwrap_or(0)
    }

    /// The width of the longest part that cannot be divided.
    fn least_width(&self) -> usize {
        let whole = self.width();
        if self.is_number && whole < WRAPPED_FROM {
            return whole;
        }
        let part = |text: &str| indent_of(text) + pieces(text.trim_start()).map(width_of).max().unwrap_or(0);
        self.texts().flat_map(str::lines).map(part).max().unwrap_or(0)
    }

    /// The width below which columns are left out instead.
    fn wanted_width(&self, is_first: bool) -> usize {
        let wanted = if is_first { LEAST_NAME_WIDTH } else { LEAST_TEXT_WIDTH };
        self.least_width().max(self.width().min(wanted))
    }

    /// The column with all texts in lines of this width.
    fn wrapped(&self, width: usize) -> TableColumn {
        let fit = |text: &String| text.lines().map(|line| fitted(line, width)).collect::<Vec<_>>().join("\n");
        TableColumn { heading: fit(&self.heading), cells: self.cells.iter().map(fit).collect(), ..*self }
    }
}

impl TextTable {
    /// Headings may have two lines, which keeps columns as narrow as their numbers; Markdown gets
    /// one line.
    pub(super) fn new(headings: &[&str], medium: Medium) -> TextTable {
        let column = |heading: &&str| TableColumn {
            heading: match medium {
                Medium::Terminal(_) => (*heading).to_owned(),
                Medium::Markdown => in_one_line(heading),
            },
            cells: Vec::new(),
            is_number: false,
        };
        let columns = headings.iter().map(column).collect();
        TextTable { columns, medium, grouped: false, paneled: false, hidden: Vec::new() }.with_numbers(FIRST_NUMBER..)
    }

    /// The same table, with the numbers in these columns.
    pub(super) fn with_numbers(mut self, numbers: impl std::ops::RangeBounds<usize>) -> TextTable {
        for (place, column) in self.columns.iter_mut().enumerate() {
            column.is_number = numbers.contains(&place);
        }
        self
    }

    /// The same table, whose first column names groups of rows.
    pub(super) fn with_groups(self) -> TextTable {
        TextTable { grouped: true, ..self }
    }

    /// The same table, which becomes several tables where it is too wide.
    pub(super) fn in_panels(self) -> TextTable {
        TextTable { paneled: true, ..self }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let medium = self.medium;
        let shown = |cell: String| match medium {
            Medium::Terminal(_) => escaped(&cell).into_owned(),
            Medium::Markdown => escaped_markdown(&cell),
        };
        let mut cells = cells.into_iter();
        for column in &mut self.columns {
            column.cells.push(cells.next().map_or_else(String::new, |cell| shown(cell.into())));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.columns.first().is_none_or(|column| column.cells.is_empty())
    }

    /// Chooses what is left out of a table that is too wide, once all rows are there: columns of `dispensable` in that
    /// order, until names need not be wrapped too often.
    pub(super) fn fit(&mut self, dispensable: &[usize]) {
        let Medium::Terminal(Terminal { width: Some(width), .. }) = self.medium else { return };
        for &place in dispensable {
            let columns = self.shown();
            if is_within(&columns, GAPS[0], width, TableColumn::width) {
                return;
            }
            let columns = self.merged(columns);
            let wanted: usize = columns.iter().enumerate().map(|(place, column)| column.wanted_width(place == 0)).sum();
            if wanted + gaps(&columns, GAPS[1]) <= usize::from(width) {
                return;
            }
            self.hidden.push(place);
        }
    }

    /// Whether a column is in the table, by place. What is said about it belongs below the table only then.
    pub(super) fn shows(&self, place: usize) -> bool {
        !self.hidden.contains(&place)
    }

    fn shown(&self) -> Vec<TableColumn> {
        let places = (0..self.columns.len()).filter(|place| self.shows(*place));
        places.map(|place| self.columns[place].clone()).collect()
    }

    /// The columns with names of groups above the names of their rows, where there are groups.
    fn merged(&self, mut columns: Vec<TableColumn>) -> Vec<TableColumn> {
        if !self.grouped || columns.len() < 2 || self.hidden.contains(&0) {
            return columns;
        }
        let groups = columns.remove(0);
        let begins: Vec<bool> = groups.cells.iter().map(|name| !name.is_empty()).collect();
        for column in &mut columns {
            let cells = std::mem::take(&mut column.cells).into_iter().zip(&begins);
            column.cells =
                cells.flat_map(|(cell, begins)| begins.then(String::new).into_iter().chain([cell])).collect();
        }
        let mut names = groups.cells.into_iter().filter(|name| !name.is_empty());
        let mut is_group = begins.iter().flat_map(|begins| begins.then_some(true).into_iter().chain([false]));
        for cell in &mut columns[0].cells {
            *cell = match is_group.next() {
                Some(true) => names.next().unwrap_or_default(),
                _ => format!("  {cell}"),
            };
        }
        columns[0].heading = format!("{}\n  {}", in_one_line(&groups.heading), in_one_line(&columns[0].heading));
        columns
    }

    /// The columns as they are printed, in one table or several, and the blanks between them.
    fn arranged(&self) -> (Vec<Vec<TableColumn>>, usize) {
        let columns = self.shown();
        let Medium::Terminal(Terminal { width: Some(width), .. }) = self.medium else {
            return (vec![columns], GAPS[0]);
        };
        if is_within(&columns, GAPS[0], width, TableColumn::width) {
            return (vec![columns], GAPS[0]);
        }
        let columns = self.merged(columns);
        if let Some(gap) = GAPS.into_iter().find(|gap| is_within(&columns, *gap, width, TableColumn::width)) {
            return (vec![columns], gap);
        }
        if self.paneled {
            return (panels(columns, usize::from(width)), GAPS[1]);
        }
        (vec![narrowed(columns, usize::from(width))], GAPS[1])
    }

    /// The table, the legend and the notes.
    pub(super) fn finish(self, legend: &str, notes: impl IntoIterator<Item = String>) -> String {
        let notes: Vec<String> = notes.into_iter().collect();
        let (gap, bullet) = if self.medium == Medium::Markdown { ("\n", "- ") } else { ("", "") };
        let (tables, blanks) = self.arranged();
        let drawn = |columns: &Vec<TableColumn>| format!("{}\n", drawn(columns, blanks, self.medium).trim_fmt());
        let mut text = tables.iter().map(drawn).collect::<Vec<_>>().join("\n");
        let legend: Vec<String> =
            [legend.to_owned()].into_iter().filter(|legend| !legend.is_empty()).chain(self.left_out()).collect();
        if !legend.is_empty() {
            text.push_str(&format!("{gap}{}\n", legend.join(" ")));
        }
        if !notes.is_empty() {
            text.push_str(&format!("\n{bullet}{}\n", notes.join(&format!("\n{bullet}"))));
        }
        text
    }

    /// A sentence that names the missing columns.
    fn left_out(&self) -> Option<String> {
        let mut places = self.hidden.clone();
        places.sort_unstable();
        let names: Vec<String> = places.iter().map(|&place| in_one_line(&self.columns[place].heading)).collect();
        (!names.is_empty()).then(|| format!("Columns hidden because the terminal is narrow: {}.", names.join(", ")))
    }
}

/// One table with its lines.
fn drawn(columns: &[TableColumn], gap: usize, medium: Medium) -> Table {
    let mut table = Table::new();
    table.force_no_tty();
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.iter().map(|column| column.heading.as_str()));
    match medium {
        Medium::Markdown => drop(table.load_style(presets::ASCII_MARKDOWN)),
        Medium::Terminal(Terminal { glyphs, .. }) => {
            table.load_style(match glyphs {
                Glyphs::Ascii => presets::ASCII_HORIZONTAL_ONLY,
                Glyphs::Lines | Glyphs::Blocks => presets::UTF8_HORIZONTAL_ONLY,
            });
            table.style_mut().row_separator = comfy_table::LineStyle::none();
        }
    }
    for row in 0..columns.first().map_or(0, |column| column.cells.len()) {
        table.add_row(columns.iter().map(|column| Cell::new(&column.cells[row])).collect::<Vec<_>>());
    }
    for (drawn, column) in table.column_iter_mut().zip(columns) {
        drawn.set_cell_alignment(if column.is_number { CellAlignment::Right } else { CellAlignment::Left });
        drawn.set_padding((u16::from(gap == GAPS[0]), 1));
    }
    table
}

/// The blanks of a table. The last column needs none after it, the first may have one before it.
fn gaps(columns: &[TableColumn], gap: usize) -> usize {
    columns.len() * gap
}

fn is_within(columns: &[TableColumn], gap: usize, width: u16, of: fn(&TableColumn) -> usize) -> bool {
    columns.iter().map(of).sum::<usize>() + gaps(columns, gap) <= usize::from(width)
}

/// The columns in lines that fit: the widest are wrapped first. Words are divided only where they are wider than all else
/// leaves.
fn narrowed(columns: Vec<TableColumn>, width: usize) -> Vec<TableColumn> {
    let mut widths: Vec<usize> = columns.iter().map(TableColumn::width).collect();
    let room = width.saturating_sub(gaps(&columns, GAPS[1])).max(columns.len());
    for least in [columns.iter().map(TableColumn::least_width).collect(), vec![1; columns.len()]] {
        while widths.iter().sum::<usize>() > room {
            let widest =
                (0..widths.len()).filter(|&place| widths[place] > least[place]).max_by_key(|&place| widths[place]);
            let Some(widest) = widest else { break };
            widths[widest] -= 1;
        }
    }
    columns.iter().zip(widths).map(|(column, width)| column.wrapped(width)).collect()
}

/// Several tables, each with the first column and as many of the others as fit.
fn panels(mut columns: Vec<TableColumn>, width: usize) -> Vec<Vec<TableColumn>> {
    let others = columns.split_off(1);
    let mut panels = vec![columns.clone()];
    for column in others {
        let taken = |panel: &[TableColumn]| panel.iter().map(TableColumn::width).sum::<usize>() + gaps(panel, GAPS[1]);
        let is_full =
            panels.last().is_some_and(|panel| taken(panel) + column.width() + GAPS[1] > width && panel.len() > 1);
        if is_full {
            panels.push(columns.clone());
        }
        if let Some(panel) = panels.last_mut() {
            panel.push(column);
        }
    }
    panels.into_iter().map(|panel| narrowed(panel, width)).collect()
}

fn width_of(text: &str) -> usize {
    text.chars().count()
}

fn indent_of(text: &str) -> usize {
    text.len() - text.trim_start_matches(' ').len()
}

/// Units that stay beside their number.
const UNITS: [&str; 11] = ["%", "B", "KiB", "MiB", "GiB", "TiB", "ns", "us", "µs", "ms", "s"];

/// Whether a word is a unit, perhaps with punctuation behind it.
fn is_unit(word: &str) -> bool {
    UNITS.contains(&word.trim_end_matches([',', ';', '.', ':', ')']))
}

/// The parts of a text between which a line may end: words with the blank after them, and parts of names that end with a
/// sign.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split_at(end_of_piece(rest)?);
        rest = after.trim_start_matches(' ');
        Some(piece)
    })
}

fn end_of_piece(text: &str) -> Option<usize> {
    let mut signs = text.char_indices().peekable();
    let mut before = ' ';
    signs.peek()?;
    while let Some((place, sign)) = signs.next() {
        let next = signs.peek().map(|(_, next)| *next);
        match sign {
            ' ' => {
                let word = text[place + 1..].split(' ').next().unwrap_or_default();
                if !(before.is_ascii_digit() && is_unit(word)) {
                    return Some(place);
                }
            }
            ':' | ',' | '/' | '=' | '@' if next.is_some_and(char::is_alphanumeric) => return Some(place + 1),
            '-' if before.is_alphabetic() && next.is_some_and(char::is_alphanumeric) => return Some(place + 1),
            _ => {}
        }
        before = sign;
    }
    Some(text.len())
}

/// A line of a cell in lines of this width. Those after the first begin two blanks further in where there is room.
fn fitted(line: &str, width: usize) -> String {
    if width_of(line) <= width {
        return line.to_owned();
    }
    let indent = indent_of(line);
    let (mut lines, mut column) = (" ".repeat(indent), indent);
    let further = if indent > 0 && indent + 2 + LEAST_TEXT_WIDTH < width { indent + 2 } else { indent };
    let text = line.trim_start_matches(' ');
    let mut end = 0;
    for piece in pieces(text) {
        let blanks = indent_of(&text[end..]);
        let blank = blanks.min(1);
        end += blanks + piece.len();
        if column > indent && column + blank + width_of(piece) > width {
            lines.push_str(&format!("\n{:further$}", ""));
            column = further;
        } else {
            lines.push_str(&" ".repeat(blank));
            column += blank;
        }
        for sign in piece.chars() {
            if column >= width {
                lines.push('\n');
                column = 0;
            }
            lines.push(sign);
            column += 1;
        }
    }
    lines
}

/// A text in lines of this width that begin at column `indent`.
#[must_use]
pub fn wrapped(text: &str, indent: usize, width: usize) -> String {
    let (mut lines, mut column) = (String::new(), indent);
    let mut words = text.split_whitespace().peekable();
    while let Some(word) = words.next() {
        // A number stays beside its unit.
        let unit = words.next_if(|next| word.ends_with(|sign: char| sign.is_ascii_digit()) && is_unit(next));
        let word = unit.map_or_else(|| word.to_owned(), |unit| format!("{word} {unit}"));
        let length = width_of(&word);
        if column == indent {
            column += length;
        } else if column + 1 + length <= width {
            lines.push(' ');
            column += 1 + length;
        } else {
            lines.push_str(&format!("\n{:indent$}", ""));
            column = indent + length;
        }
        lines.push_str(&word);
    }
    lines
}

/// A text for people, with lines that are too long for the terminal wrapped between words. A line that goes on begins below
/// the value of the first, which two blanks separate from its label. Commands to copy stay in one line.
#[must_use]
pub fn flowing(text: &str, width: Option<u16>) -> String {
    let Some(width) = width.map(usize::from) else { return text.to_owned() };
    let mut above = 0;
    let flow = |line: &str| {
        above = value_of(line, width, above);
        let (lead, value) = line.split_at(above);
        match width_of(line) <= width || is_command(value) {
            true => line.to_owned(),
            false => format!("{lead}{}", wrapped(value, width_of(lead), width)),
        }
    };
    text.split('\n').map(flow).collect::<Vec<_>>().join("\n")
}

/// Where the value of a line begins: after the last two blanks in its first half, below that of the indented line above (its
/// label may need all columns but one), or after its indentation.
fn value_of(line: &str, width: usize, above: usize) -> usize {
    let indent = indent_of(line);
    let half = line.char_indices().nth(width / 2).map_or(line.len(), |(place, _)| place).max(indent);
    let separated = line[indent..half].rfind("  ").map(|place| indent + place + 2);
    let aligned = (indent > 0 && above > indent && line.get(above - 1..=above).is_some_and(|at| at.starts_with(' ')))
        .then_some(above);
    separated.or(aligned).unwrap_or(indent)
}

/// Whether a value is or ends with a command.
fn is_command(value: &str) -> bool {
    let words = value.rsplit_once(": ").map_or(value, |(_, command)| command);
    ["oomph ", "export ", "python "].iter().any(|program| value.starts_with(program) || words.starts_with(program))
}

/// The sentences that apply, as one text.
pub(super) fn said(sentences: &[(bool, &str)]) -> String {
    sentences.iter().filter(|(applies, _)| *applies).map(|(_, sentence)| *sentence).collect::<Vec<_>>().join(" ")
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

/// A text whose first letter is a capital.
pub(super) fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
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
        table.fit(dispensable);
        let hidden = table.left_out();
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
        assert!(narrow[4].contains("10.1 GiB  123456"), "{narrow:#?}");
        let (narrower, hidden) = lines(48, &[3]);
        assert_eq!(hidden.as_deref(), Some("Columns hidden because the terminal is narrow: driver calls."));
        assert!(narrower[4].contains("training") && narrower[4].contains("10.1 GiB"), "{narrower:#?}");
        assert!(narrower[..7].iter().all(|line| line.chars().count() <= 48), "{narrower:#?}");
    }

    #[test]
    fn names_of_groups_get_lines_of_their_own() {
        let medium = Medium::Terminal(Terminal { width: Some(42), glyphs: Glyphs::Blocks });
        let mut table = TextTable::new(&["workload", "strategy", "peak\nreserved"], medium).with_groups();
        table.row(["variable-length", "caching", "12.0 GiB"]);
        table.row(["", "caching:expandable_segments:True", "5.84 GiB"]);
        insta::assert_snapshot!(table.finish("", []), @"
        ─────────────────────────────────────────
        workload                            peak
          strategy                      reserved
        ═════════════════════════════════════════
        variable-length
          caching                       12.0 GiB
          caching:expandable_segments:  5.84 GiB
            True
        ─────────────────────────────────────────
        ");
    }

    #[test]
    fn wide_matrix_becomes_several_tables() {
        let medium = Medium::Terminal(Terminal { width: Some(22), glyphs: Glyphs::Blocks });
        let mut table = TextTable::new(&["misuse", "direct", "caching"], medium).with_numbers(1..).in_panels();
        table.row(["double-free", "d", "h"]);
        insta::assert_snapshot!(table.finish("", []), @"
        ────────────────────
        misuse       direct
        ════════════════════
        double-free       d
        ────────────────────

        ─────────────────────
        misuse       caching
        ═════════════════════
        double-free        h
        ─────────────────────
        ");
    }

    #[test]
    fn parts_of_names_and_amounts_stay_whole() {
        let parts = |text| pieces(text).collect::<Vec<_>>();
        assert_eq!(parts("caching:expandable_segments:True"), ["caching:", "expandable_segments:", "True"]);
        assert_eq!(parts("saves 10-40 % of 24 GiB, or"), ["saves", "10-40 %", "of", "24 GiB,", "or"]);
        assert_eq!(parts("double-free 8/12"), ["double-", "free", "8/", "12"]);
        assert_eq!(fitted("  caching:expandable_segments:True", 30), "  caching:expandable_segments:\n    True");
        assert_eq!(fitted("unbreakable", 6), "unbrea\nkable");
    }

    #[test]
    fn prose_flows_below_its_value() {
        let text =
            "  slope        1.24 GiB of kept memory per step\n  will run out in step 12, with 24.0 GiB available\n";
        insta::assert_snapshot!(flowing(text, Some(36)), @"
          slope        1.24 GiB of kept
                       memory per step
          will run out in step 12, with
                       24.0 GiB available
        ");
        assert_eq!(flowing(text, None), text);
        let command = "repeat: oomph stress properties --strategy caching --cases 1";
        assert_eq!(flowing(command, Some(20)), command);
    }

    #[test]
    fn amounts_are_exact_to_the_mebibyte() {
        assert_eq!(in_mebibytes(Some(1_234_567 * MIB)), "1,234,567 MiB");
        assert_eq!(in_mebibytes(Some(2 * MIB)), "2 MiB");
    }
}
