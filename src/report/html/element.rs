//! The few HTML elements that the page is made of, as text. Everything that comes from a run goes through [`escape`].

use std::{borrow::Cow, fmt::Write as _};

use crate::base::{Bytes, Nanos};

/// Text that ends no element, attribute or script.
pub(super) fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(['&', '<', '>', '"', '\'']) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    Cow::Owned(out)
}

/// A name made of words and settings, which may be broken after each of them.
pub(super) fn breakable(name: &str) -> String {
    let mut out = String::new();
    for part in name.split_inclusive([':', ',', '/']) {
        out.push_str(&escape(part));
        out.push_str("<wbr>");
    }
    out.trim_end_matches("<wbr>").to_owned()
}

/// A part of the page with a heading that says what was found.
pub(super) struct Section {
    /// Its anchor.
    pub(super) id: &'static str,
    /// What the section is about: the link in the navigation, and the line above the heading.
    pub(super) subject: &'static str,
    /// What was found, as HTML.
    pub(super) finding: String,
    /// Everything below, as HTML.
    pub(super) body: String,
}

impl Section {
    pub(super) fn html(&self) -> String {
        format!(
            "<section id=\"{id}\" aria-labelledby=\"{id}-heading\">\n<p class=\"subject\">{}</p>\n<h2 \
             id=\"{id}-heading\">{}</h2>\n{}</section>\n",
            self.subject,
            self.finding,
            self.body,
            id = self.id,
        )
    }
}

/// A cell of a table: what is shown, and what it is sorted by.
pub(super) struct Cell {
    html: String,
    /// The number or word in the CSV file.
    value: String,
    class: &'static str,
}

impl Cell {
    /// A word.
    pub(super) fn text(text: &str) -> Cell {
        Cell { html: escape(text).into_owned(), value: text.to_owned(), class: "" }
    }

    /// The name of a workload or a strategy.
    pub(super) fn name(name: &str) -> Cell {
        Cell { html: breakable(name), value: name.to_owned(), class: "name" }
    }

    /// Something drawn, or words with marks, sorted by `value`.
    pub(super) fn html(html: String, value: impl ToString) -> Cell {
        Cell { html, value: value.to_string(), class: "" }
    }

    /// A number as it is shown, and as it stands in the CSV file.
    pub(super) fn number(shown: String, value: impl ToString) -> Cell {
        Cell { html: shown, value: value.to_string(), class: "number" }
    }

    pub(super) fn bytes(bytes: u64) -> Cell {
        Cell::number(Bytes(bytes).to_string(), bytes)
    }

    pub(super) fn maybe_bytes(bytes: Option<u64>) -> Cell {
        bytes.map_or_else(Cell::empty, Cell::bytes)
    }

    pub(super) fn nanos(nanos: u64) -> Cell {
        Cell::number(Nanos(nanos).to_string(), nanos)
    }

    pub(super) fn maybe_nanos(nanos: Option<u64>) -> Cell {
        nanos.map_or_else(Cell::empty, Cell::nanos)
    }

    pub(super) fn count(count: u64) -> Cell {
        Cell::number(count.to_string(), count)
    }

    /// A share with a bar as long as it.
    pub(super) fn share(share: Option<f64>) -> Cell {
        let Some(share) = share else { return Cell::empty() };
        let width = (share * 100.0).clamp(0.0, 100.0);
        let html =
            format!("<span class=\"share\"><i style=\"width:{width:.1}%\"></i></span><b>{:.1} %</b>", share * 100.0);
        Cell { html, value: share.to_string(), class: "number" }
    }

    /// A share without a bar.
    pub(super) fn percent(share: Option<f64>) -> Cell {
        share.map_or_else(Cell::empty, |share| Cell::number(format!("{:.1} %", share * 100.0), share))
    }

    pub(super) fn empty() -> Cell {
        Cell { html: String::new(), value: String::new(), class: "number" }
    }

    pub(super) fn with_class(self, class: &'static str) -> Cell {
        Cell { class, ..self }
    }
}

/// A column: what people read, and what the CSV file calls it.
pub(super) struct Column {
    heading: &'static str,
    name: &'static str,
    is_number: bool,
}

impl Column {
    /// A column of words.
    pub(super) const fn words(heading: &'static str, name: &'static str) -> Column {
        Column { heading, name, is_number: false }
    }

    /// A column of numbers.
    pub(super) const fn numbers(heading: &'static str, name: &'static str) -> Column {
        Column { heading, name, is_number: true }
    }
}

/// A table that can be sorted where there is JavaScript, and read where there is none.
pub(super) struct Table {
    caption: String,
    columns: Vec<Column>,
    rows: String,
    count: usize,
    /// The first cell of the last row: rows about the same thing belong together.
    group: String,
}

/// A table of more rows than this has a field to filter it.
const FEW_ROWS: usize = 12;
/// A table of more rows than this scrolls by itself.
const MANY_ROWS: usize = 40;

impl Table {
    pub(super) fn new(caption: &str, columns: Vec<Column>) -> Table {
        Table { caption: escape(caption).into_owned(), columns, rows: String::new(), count: 0, group: String::new() }
    }

    /// Adds a row, one cell a column.
    pub(super) fn row(&mut self, cells: Vec<Cell>) {
        self.row_of("", cells);
    }

    /// Adds a row about the case with this id.
    pub(super) fn row_of(&mut self, case_id: &str, cells: Vec<Cell>) {
        self.count += 1;
        self.rows.push_str("<tr");
        if let Some(first) = cells.first() {
            if first.value == self.group {
                self.rows.push_str(" class=\"again\"");
            }
            self.group.clone_from(&first.value);
        }
        if !case_id.is_empty() {
            let _ = write!(self.rows, " data-case=\"{}\"", escape(case_id));
        }
        self.rows.push('>');
        for (place, cell) in cells.iter().enumerate() {
            let (tag, scope) = if place == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
            let class = if cell.class.is_empty() { String::new() } else { format!(" class=\"{}\"", cell.class) };
            let value = escape(&cell.value);
            let _ = write!(self.rows, "<{tag}{scope}{class} data-value=\"{value}\">{}</{tag}>", cell.html);
        }
        self.rows.push_str("</tr>\n");
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn html(&self) -> String {
        let mut head = String::new();
        for column in &self.columns {
            let class = if column.is_number { " class=\"number\"" } else { "" };
            let _ = write!(head, "<th scope=\"col\"{class} data-column=\"{}\">{}</th>", column.name, column.heading);
        }
        let filter = if self.count > FEW_ROWS { " data-filter" } else { "" };
        let long = if self.count > MANY_ROWS { " long" } else { "" };
        format!(
            "<div class=\"table{long}\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table \
             class=\"sortable\"{filter}>\n<caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{}</tbody>\n\
             </table></div>\n",
            self.rows,
            caption = self.caption,
        )
    }

    /// The table behind a line that opens it: the same numbers as the chart above.
    pub(super) fn folded(&self) -> String {
        format!("<details class=\"as-table\"><summary>The same as a table</summary>\n{}</details>\n", self.html())
    }
}

/// A place that the script draws into, from the entry `index` of the list `kind` of the data.
pub(super) fn chart(kind: &str, index: usize, title: &str, sentence: &str, label: &str) -> String {
    format!(
        "<figure class=\"chart\" data-chart=\"{kind}\" data-index=\"{index}\">\n<figcaption><h3>{title}</h3>\
         <p>{sentence}</p></figcaption>\n<div class=\"canvas\" role=\"group\" aria-label=\"{}\"></div>\n</figure>\n",
        escape(label)
    )
}

/// One part of a bar: its class, its size and what it is.
pub(super) struct Part {
    pub(super) class: &'static str,
    pub(super) bytes: u64,
    pub(super) meaning: &'static str,
}

/// Parts after each other, as wide as they are of `whole`.
pub(super) fn stacked(parts: &[Part], whole: u64) -> String {
    let mut out = "<span class=\"stack\">".to_owned();
    for part in parts.iter().filter(|part| part.bytes > 0) {
        let _ = write!(
            out,
            "<i class=\"{}\" style=\"width:{:.3}%\" title=\"{}: {}\"></i>",
            part.class,
            percent(part.bytes, whole),
            part.meaning,
            Bytes(part.bytes)
        );
    }
    out + "</span>"
}

/// How many percent of `whole` this is.
pub(super) fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// `1 case`, `2 cases`.
pub(super) fn counted(count: usize, one: &str, many: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {many}") }
}

/// Names in a row: `a`, `a and b`, `a, b and c`.
pub(super) fn listed(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [one] => one.clone(),
        [others @ .., last] => format!("{} and {last}", others.join(", ")),
    }
}

/// A strategy's or a workload's name among words.
pub(super) fn code(name: &str) -> String {
    format!("<code>{}</code>", breakable(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_run_says_becomes_an_element() {
        let mut table = Table::new("<b>", vec![Column::words("a", "a")]);
        table.row_of("\"><script>", vec![Cell::name("<img src=x>:'y'")]);
        let html = table.html();
        assert!(!html.contains("<script") && !html.contains("<img") && !html.contains("<b>"), "{html}");
        assert!(html.contains("&lt;img src=x&gt;:<wbr>&#39;y&#39;"), "{html}");
    }

    #[test]
    fn a_row_keeps_the_number_of_the_csv_beside_what_is_shown() {
        let mut table =
            Table::new("t", vec![Column::words("w", "workload"), Column::numbers("r", "peak_reserved_bytes")]);
        table.row(vec![Cell::text("w"), Cell::bytes(3 << 20)]);
        let html = table.html();
        assert!(html.contains("data-value=\"3145728\">3.00 MiB</td>"), "{html}");
        assert!(html.contains("data-column=\"peak_reserved_bytes\""), "{html}");
    }

    #[test]
    fn parts_of_a_bar_fill_it() {
        let part = |bytes| Part { class: "live", bytes, meaning: "live" };
        let bar = stacked(&[part(1), part(0), part(3)], 4);
        assert!(bar.contains("width:25.000%") && bar.contains("width:75.000%") && !bar.contains("width:0"), "{bar}");
        assert_eq!(listed(&["a".to_owned(), "b".to_owned(), "c".to_owned()]), "a, b and c");
    }
}
