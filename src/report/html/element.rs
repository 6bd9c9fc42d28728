//! The HTML elements of the page, as text. Everything that comes from a run goes through
//! [`escape`].

use std::{borrow::Cow, fmt::Write as _};

use crate::base::{Bytes, Nanos, escaped_lines};

/// Text that cannot end an element, attribute or script, and has no invisible characters.
pub(super) fn escape(text: &str) -> Cow<'_, str> {
    let text = escaped_lines(text);
    if !text.contains(['&', '<', '>', '"', '\'']) {
        return text;
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

/// A name with places where a browser may wrap it.
pub(super) fn breakable(name: &str) -> String {
    let mut out = String::new();
    for part in name.split_inclusive([':', ',', '/']) {
        out.push_str(&escape(part));
        out.push_str("<wbr>");
    }
    out.trim_end_matches("<wbr>").to_owned()
}

/// A part of the page; its heading is what was found.
pub(super) struct PageSection {
    /// Its anchor.
    pub(super) id: &'static str,
    /// The link in the navigation and the line above the heading.
    pub(super) subject: &'static str,
    /// The finding, as HTML.
    pub(super) finding: String,
    /// The content, as HTML.
    pub(super) body: String,
}

impl PageSection {
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

/// A cell of a table: what it shows, and the value it is sorted by.
pub(super) struct Cell {
    html: String,
    /// The number or word in the CSV file.
    value: String,
    class: &'static str,
}

impl Cell {
    /// Text.
    pub(super) fn text(text: &str) -> Cell {
        Cell { html: escape(text).into_owned(), value: text.to_owned(), class: "" }
    }

    /// The name of a workload or a strategy.
    pub(super) fn name(name: &str) -> Cell {
        Cell { html: breakable(name), value: name.to_owned(), class: "name" }
    }

    /// HTML, sorted by `value`.
    pub(super) fn html(html: String, value: impl ToString) -> Cell {
        Cell { html, value: value.to_string(), class: "" }
    }

    /// A number as shown, and as in the CSV file.
    pub(super) fn number(shown: String, value: impl ToString) -> Cell {
        Cell { html: shown, value: value.to_string(), class: "number" }
    }

    pub(super) fn bytes(bytes: impl Into<Option<u64>>) -> Cell {
        bytes.into().map_or_else(Cell::empty, |bytes| Cell::number(Bytes(bytes).to_string(), bytes))
    }

    pub(super) fn nanos(nanos: impl Into<Option<u64>>) -> Cell {
        nanos.into().map_or_else(Cell::empty, |nanos| Cell::number(Nanos(nanos).to_string(), nanos))
    }

    pub(super) fn count(count: impl Into<Option<u64>>) -> Cell {
        count.into().map_or_else(Cell::empty, |count| Cell::number(count.to_string(), count))
    }

    /// A number with this many decimals.
    pub(super) fn decimal(number: Option<f64>, decimals: usize) -> Cell {
        number.map_or_else(Cell::empty, |number| Cell::number(format!("{number:.decimals$}"), number))
    }

    /// A share with a bar.
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

/// A column: its heading, its name in the CSV file, and its cell for a row.
struct Column<'a, R> {
    heading: &'static str,
    name: &'static str,
    is_number: bool,
    cell: Box<dyn Fn(&R) -> Cell + 'a>,
}

/// A table, built column by column. It can be sorted with JavaScript and read without it.
pub(super) struct HtmlTable<'a, R> {
    rows: &'a [R],
    columns: Vec<Column<'a, R>>,
}

/// A table of more rows has a filter.
const FEW_ROWS: usize = 12;
/// A table of more rows scrolls.
const MANY_ROWS: usize = 40;

impl<'a, R> HtmlTable<'a, R> {
    pub(super) fn of(rows: &'a [R]) -> HtmlTable<'a, R> {
        HtmlTable { rows, columns: Vec::new() }
    }

    /// Adds a column of words.
    pub(super) fn words(mut self, heading: &'static str, name: &'static str, cell: impl Fn(&R) -> Cell + 'a) -> Self {
        self.columns.push(Column { heading, name, is_number: false, cell: Box::new(cell) });
        self
    }

    /// Adds a column of numbers.
    pub(super) fn numbers(mut self, heading: &'static str, name: &'static str, cell: impl Fn(&R) -> Cell + 'a) -> Self {
        self.columns.push(Column { heading, name, is_number: true, cell: Box::new(cell) });
        self
    }

    /// The table. `case_id` names the case of a row, if it is about one.
    pub(super) fn html(&self, caption: &str, case_id: impl Fn(&R) -> Option<&str>) -> String {
        let caption = escape(caption);
        let mut head = String::new();
        for column in &self.columns {
            let class = if column.is_number { " class=\"number\"" } else { "" };
            let _ = write!(head, "<th scope=\"col\"{class} data-column=\"{}\">{}</th>", column.name, column.heading);
        }
        let mut body = String::new();
        // Rows with the same first cell belong together.
        let mut group = String::new();
        for row in self.rows {
            let cells: Vec<Cell> = self.columns.iter().map(|column| (column.cell)(row)).collect();
            let first = cells.first().map_or("", |cell| cell.value.as_str());
            body.push_str(if first == group { "<tr class=\"again\"" } else { "<tr" });
            first.clone_into(&mut group);
            if let Some(id) = case_id(row) {
                let _ = write!(body, " data-case=\"{}\"", escape(id));
            }
            body.push('>');
            for (place, cell) in cells.iter().enumerate() {
                let (tag, scope) = if place == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
                let class = if cell.class.is_empty() { String::new() } else { format!(" class=\"{}\"", cell.class) };
                let value = escape(&cell.value);
                let _ = write!(body, "<{tag}{scope}{class} data-value=\"{value}\">{}</{tag}>", cell.html);
            }
            body.push_str("</tr>\n");
        }
        let filter = if self.rows.len() > FEW_ROWS { " data-filter" } else { "" };
        let long = if self.rows.len() > MANY_ROWS { " long" } else { "" };
        format!(
            "<div class=\"table{long}\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table \
             class=\"sortable\"{filter}>\n<caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\
             </tbody>\n</table></div>\n"
        )
    }
}

/// For tables whose rows are not about cases.
pub(super) fn no_case<R>(_: &R) -> Option<&str> {
    None
}

/// A table behind a line that opens it: the numbers of the chart above.
pub(super) fn folded(table: &str) -> String {
    format!("<details class=\"as-table\"><summary>Show as a table</summary>\n{table}</details>\n")
}

/// A place for a chart, drawn by the script from entry `index` of the list `kind` of the data.
pub(super) fn chart(kind: &str, index: usize, title: &str, sentence: &str, label: &str) -> String {
    format!(
        "<figure class=\"chart\" data-chart=\"{kind}\" data-index=\"{index}\">\n<figcaption><h3>{title}</h3>\
         <p>{sentence}</p></figcaption>\n<div class=\"canvas\" role=\"group\" aria-label=\"{}\"></div>\n</figure>\n",
        escape(label)
    )
}

/// One part of a bar.
pub(super) struct BarPart {
    pub(super) class: &'static str,
    pub(super) bytes: u64,
    pub(super) meaning: &'static str,
}

/// Parts side by side, as wide as their share of `whole`.
pub(super) fn stacked(parts: &[BarPart], whole: u64) -> String {
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

/// The percentage of `whole`.
pub(super) fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// Names as text: `a`, `a and b`, `a, b and c`.
pub(super) fn listed(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [one] => one.clone(),
        [others @ .., last] => format!("{} and {last}", others.join(", ")),
    }
}

/// The name of a strategy or a workload in a sentence.
pub(super) fn code(name: &str) -> String {
    format!("<code>{}</code>", breakable(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_run_never_becomes_an_element() {
        let table = HtmlTable::of(&["<img src=x>:'y'"]).words("a", "a", |name| Cell::name(name));
        let html = table.html("<b>", |_| Some("\"><script>"));
        assert!(!html.contains("<script") && !html.contains("<img") && !html.contains("<b>"), "{html}");
        assert!(html.contains("&lt;img src=x&gt;:<wbr>&#39;y&#39;"), "{html}");
    }

    #[test]
    fn row_keeps_the_number_of_the_csv() {
        let table = HtmlTable::of(&[3_u64 << 20]).words("w", "workload", |_| Cell::text("w")).numbers(
            "r",
            "peak_reserved_bytes",
            |bytes| Cell::bytes(*bytes),
        );
        let html = table.html("t", no_case);
        assert!(html.contains("data-value=\"3145728\">3.00 MiB</td>"), "{html}");
        assert!(html.contains("data-column=\"peak_reserved_bytes\""), "{html}");
    }

    #[test]
    fn parts_of_a_bar_fill_it() {
        let part = |bytes| BarPart { class: "live", bytes, meaning: "live" };
        let bar = stacked(&[part(1), part(0), part(3)], 4);
        assert!(bar.contains("width:25.000%") && bar.contains("width:75.000%") && !bar.contains("width:0"), "{bar}");
        assert_eq!(listed(&["a".to_owned(), "b".to_owned(), "c".to_owned()]), "a, b and c");
    }
}
