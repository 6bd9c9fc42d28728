//! The HTML elements of the page, as text. Everything that comes from a run goes through
//! [`escape`].

use std::{
    borrow::Cow,
    fmt::Write as _,
    io::{self, Write as _},
};

use flate2::{Compression, write::ZlibEncoder};
use serde_json::{Value, json};

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

/// How a strategy is drawn, by number: its colour (`page.css`), the dash of its line and its marker (`script/svg.js`).
/// It depends on the name only, so a strategy looks the same on every page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct StrategyLook(u8, u8, u8);

/// The looks of strategies that are often compared. Those with solid lines have a colour each. Two with the same colour
/// differ in dash and marker.
const LOOKS: &[(&str, StrategyLook)] = &[
    ("caching", StrategyLook(0, 0, 0)),
    ("caching:expandable_segments:True", StrategyLook(1, 0, 1)),
    ("oomph", StrategyLook(2, 0, 2)),
    ("planned", StrategyLook(3, 0, 3)),
    ("stitch", StrategyLook(4, 0, 4)),
    ("async", StrategyLook(5, 0, 5)),
    ("direct", StrategyLook(6, 0, 6)),
    ("tlsf", StrategyLook(7, 0, 7)),
    ("pool", StrategyLook(0, 1, 3)),
    ("binning", StrategyLook(1, 1, 2)),
    ("bfc:allow_growth:True", StrategyLook(2, 1, 0)),
    ("buddy", StrategyLook(3, 1, 5)),
    ("cub", StrategyLook(4, 1, 0)),
    ("slab", StrategyLook(5, 1, 2)),
    ("arena", StrategyLook(6, 1, 1)),
    ("fixed", StrategyLook(7, 1, 4)),
    ("bfc", StrategyLook(2, 2, 1)),
    ("null", StrategyLook(6, 2, 4)),
    ("address", StrategyLook(7, 2, 0)),
];
/// The looks of settings by their role in an answer: colours that differ most.
const ROLES: &[(&str, StrategyLook)] =
    &[("now: ", StrategyLook(0, 0, 0)), ("fix: ", StrategyLook(1, 0, 1)), ("closest: ", StrategyLook(1, 0, 1))];
const COLOURS: u64 = 8;
/// Besides the solid line.
const DASHES: u64 = 3;
const MARKERS: u64 = 8;

impl StrategyLook {
    /// A strategy with other parameters has the colour of its name. What is not in the list, such as a plugin, gets a look
    /// by a hash of its name.
    pub(super) fn of(strategy: &str) -> StrategyLook {
        if let Some((_, look)) = ROLES.iter().find(|(role, _)| strategy.starts_with(role)) {
            return *look;
        }
        let known = |name: &str| LOOKS.iter().find(|(known, _)| *known == name).map(|(_, look)| *look);
        known(strategy).unwrap_or_else(|| {
            // FNV-1a: the same on every machine and in every release.
            let hash = strategy
                .bytes()
                .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
            let part = |shift: u32, many: u64| ((hash >> shift) % many) as u8;
            let base = strategy.split_once(':').and_then(|(name, _)| known(name));
            StrategyLook(base.map_or(part(8, COLOURS), |base| base.0), 1 + part(11, DASHES), part(20, MARKERS))
        })
    }

    /// The class of its colour.
    pub(super) fn colour(self) -> String {
        format!("c{}", self.0)
    }

    /// The classes of the marker before its name.
    pub(super) fn swatch(self) -> String {
        format!("swatch c{} m{}", self.0, self.2)
    }
}

/// Text as zlib data in base64, for a script element; `unpacked` of `script/state.js` reads it.
pub(super) fn packed(text: &str) -> io::Result<String> {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text.as_bytes())?;
    let data = encoder.finish()?;
    let mut out = String::with_capacity(data.len().div_ceil(3) * 4);
    for group in data.chunks(3) {
        let number = group.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let letter = char::from(LETTERS[number >> (18 - 6 * place) & 63]);
            out.push(if place <= group.len() { letter } else { '=' });
        }
    }
    Ok(out)
}

/// The text of [`packed`].
#[cfg(test)]
pub(super) fn unpacked(text: &str) -> String {
    let digit = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let letters: Vec<u8> = text.bytes().filter(|letter| *letter != b'=').collect();
    let mut data = Vec::new();
    for group in letters.chunks(4) {
        let number = group.iter().fold(0_u32, |sum, letter| sum << 6 | u32::from(digit(*letter)));
        data.extend(&(number << (6 * (4 - group.len()))).to_be_bytes()[1..group.len()]);
    }
    std::io::read_to_string(flate2::read::ZlibDecoder::new(data.as_slice())).unwrap()
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

    /// As data: what is shown, the value if it differs, and the class if it is not the usual one of the column.
    fn data(self, usual: &str) -> Value {
        let value = escaped_lines(&self.value);
        match (self.html == value, self.class == usual) {
            (true, true) => json!(self.html),
            (_, true) => json!([self.html, value]),
            (_, false) => json!([self.html, value, self.class]),
        }
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
/// The rows of a table that are HTML. A page of ten thousand rows opens slowly.
const FIRST_ROWS: usize = 50;

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
        for row in self.rows.iter().take(FIRST_ROWS) {
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
            "<div class=\"table{long}\" role=\"region\" aria-label=\"{caption}\"><table \
             class=\"sortable\"{filter}>\n<caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\
             </tbody>\n</table>{}</div>\n",
            self.further_rows(case_id)
        )
    }

    /// The rows after the first, as data: the script makes them when the reader scrolls, sorts or filters.
    fn further_rows(&self, case_id: impl Fn(&R) -> Option<&str>) -> String {
        if self.rows.len() <= FIRST_ROWS {
            return String::new();
        }
        let usual: Vec<&str> = self.columns.iter().map(|column| (column.cell)(&self.rows[0]).class).collect();
        let further = self.rows[FIRST_ROWS..].iter().map(|row| {
            let cells = self.columns.iter().zip(&usual).map(|(column, usual)| (column.cell)(row).data(usual));
            std::iter::once(json!(case_id(row).map(escaped_lines))).chain(cells).collect::<Vec<Value>>()
        });
        let data = json!({ "classes": usual, "rows": further.collect::<Vec<_>>() });
        let Ok(packed) = packed(&data.to_string()) else { return String::new() };
        format!(
            "<p class=\"note more\">The first {FIRST_ROWS} of {} rows. The others are shown with JavaScript.</p><script \
             type=\"text/plain\" class=\"rows\">{packed}</script>",
            self.rows.len()
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

/// The same with a line across it, at an amount with a meaning.
pub(super) fn against(parts: &[BarPart], whole: u64, mark: Option<(u64, &str)>) -> String {
    let bar = stacked(parts, whole);
    let Some((bytes, meaning)) = mark else { return bar };
    let place = percent(bytes, whole);
    let line = format!("<u style=\"left:{place:.3}%\" title=\"{meaning}: {}\"></u></span>", Bytes(bytes));
    bar.replacen("</span>", &line, 1)
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
    use crate::strategy::STRATEGIES;

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
    fn further_rows_are_data() {
        let rows: Vec<u64> = (0..120).map(|row| row << 30).collect();
        let table =
            HtmlTable::of(&rows).words("w", "w", |_| Cell::name("<w>")).numbers("b", "b", |row| Cell::bytes(*row));
        let html = table.html("t", |_| Some("id"));
        assert_eq!(html.matches("<tr").count() - 1, FIRST_ROWS);
        assert!(html.contains("The first 50 of 120 rows."), "{html}");
        let data = html.split("class=\"rows\">").nth(1).unwrap().split('<').next().unwrap();
        let data: Value = serde_json::from_str(&unpacked(data)).unwrap();
        assert_eq!(data["classes"], json!(["name", "number"]));
        assert_eq!(data["rows"].as_array().unwrap().len(), 70);
        assert_eq!(data["rows"][0], json!(["id", ["&lt;w&gt;", "<w>"], ["50.0 GiB", (50_u64 << 30).to_string()]]));
        let short = HtmlTable::of(&rows[..FIRST_ROWS]).words("w", "w", |_| Cell::name("w")).html("t", no_case);
        assert!(!short.contains("<script"));
    }

    #[test]
    fn packed_text_is_read_back() {
        for text in ["", "a", "ab", "</script>", "memory memory memory"] {
            assert_eq!(unpacked(&packed(text).unwrap()), text);
        }
    }

    #[test]
    fn registered_strategies_have_different_looks() {
        let specs: Vec<String> =
            STRATEGIES.iter().flat_map(|entry| entry.specs()).map(|spec| spec.to_string()).collect();
        assert!(LOOKS.iter().all(|(name, _)| specs.iter().any(|spec| spec == name)), "a look without a strategy");
        for (place, one) in specs.iter().enumerate() {
            for other in &specs[..place] {
                assert_ne!(StrategyLook::of(one), StrategyLook::of(other), "{one} and {other}");
            }
        }
        for (place, (one, look)) in LOOKS.iter().enumerate() {
            for (other, of_other) in LOOKS[..place].iter().filter(|(_, of_other)| of_other.0 == look.0) {
                assert!(look.1 != of_other.1 && look.2 != of_other.2, "{one} and {other} have one colour");
            }
        }
        assert_eq!(StrategyLook::of("plugin:./a.so"), StrategyLook::of("plugin:./a.so"));
        assert_eq!(StrategyLook::of("now: (defaults)"), StrategyLook::of("now: max_split_size_mb:64"));
        assert_ne!(StrategyLook::of("now: (defaults)"), StrategyLook::of("fix: (defaults)"));
        assert_eq!(StrategyLook::of("caching:max_split_size_mb:20").0, StrategyLook::of("caching").0);
    }

    /// The two colours of each strategy colour: on white and on black.
    fn palette() -> [Vec<[f64; 3]>; 2] {
        let linear = |text: &str| {
            let part = |at: usize| f64::from(u8::from_str_radix(&text[at..at + 2], 16).unwrap()) / 255.0;
            [1, 3, 5].map(part).map(|c| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) })
        };
        let style = include_str!("page.css");
        let pair = |name: String| {
            let (_, rest) = style.split_once(&format!("--{name}: light-dark(")).unwrap();
            let (light, dark) = rest.split_once(')').unwrap().0.split_once(", ").unwrap();
            (linear(light), linear(dark))
        };
        let mut names = vec!["paper".to_owned()];
        names.extend((0..COLOURS).map(|place| format!("c{place}")));
        let (light, dark) = names.into_iter().map(pair).unzip();
        [light, dark]
    }

    /// The difference of two colours in Oklab, times 100.
    fn difference(one: [f64; 3], other: [f64; 3]) -> f64 {
        let times = |rows: [[f64; 3]; 3], v: [f64; 3]| rows.map(|row| row[0] * v[0] + row[1] * v[1] + row[2] * v[2]);
        let oklab = |rgb| {
            let cones = times(
                [[0.412_221, 0.536_333, 0.051_446], [0.211_903, 0.680_7, 0.107_397], [0.088_302, 0.281_719, 0.629_979]],
                rgb,
            );
            times(
                [
                    [0.210_454, 0.793_618, -0.004_072],
                    [1.977_998, -2.428_592, 0.450_594],
                    [0.025_904, 0.782_772, -0.808_676],
                ],
                cones.map(f64::cbrt),
            )
        };
        let (one, other) = (oklab(one), oklab(other));
        100.0 * (0..3).map(|place| (one[place] - other[place]).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn colours_have_contrast_and_differ_under_deuteranopia() {
        // The matrix of Machado, Oliveira and Fernandes (2009) for full deuteranopia, on linear RGB.
        let deuteranopia = |[r, g, b]: [f64; 3]| {
            [
                0.367_322 * r + 0.860_646 * g - 0.227_968 * b,
                0.280_085 * r + 0.672_501 * g + 0.047_413 * b,
                -0.011_82 * r + 0.042_94 * g + 0.968_881 * b,
            ]
            .map(|part| part.clamp(0.0, 1.0))
        };
        for theme in palette() {
            let light = |[r, g, b]: [f64; 3]| 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
            for (place, &one) in theme.iter().enumerate().skip(1) {
                let (one_light, paper) = (light(one), light(theme[0]));
                let contrast = one_light.max(paper) / one_light.min(paper);
                assert!(contrast >= 3.0, "c{}: {contrast}", place - 1);
                for (before, &other) in theme.iter().enumerate().take(place).skip(1) {
                    let seen = difference(one, other).min(difference(deuteranopia(one), deuteranopia(other)));
                    assert!(seen >= 12.0, "c{} and c{}: {seen}", place - 1, before - 1);
                }
            }
        }
    }

    #[test]
    fn parts_of_a_bar_fill_it() {
        let part = |bytes| BarPart { class: "live", bytes, meaning: "live" };
        let bar = stacked(&[part(1), part(0), part(3)], 4);
        assert!(bar.contains("width:25.000%") && bar.contains("width:75.000%") && !bar.contains("width:0"), "{bar}");
        let limited = against(&[part(1)], 4, Some((2, "limit")));
        assert!(limited.contains("<u style=\"left:50.000%\" title=\"limit: 2 B\"></u></span>"), "{limited}");
        assert_eq!(listed(&["a".to_owned(), "b".to_owned(), "c".to_owned()]), "a, b and c");
    }
}
