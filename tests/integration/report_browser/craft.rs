//! What every page has to do: open fast, find every row, work with the keyboard, on a phone and on paper, and remember what the
//! reader chose.

use std::{fs, path::PathBuf, sync::OnceLock};

use assert_cmd::Command;
use serde_json::json;

use super::{Browser, Path, draw_all, opened, page, place};

/// The page of the largest published run: 2,205 cases.
fn published() -> &'static PathBuf {
    static PAGE: OnceLock<PathBuf> = OnceLock::new();
    PAGE.get_or_init(|| {
        let page = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report-strategies.html");
        let _ = fs::remove_file(&page);
        let mut oomph = Command::cargo_bin("oomph").unwrap();
        oomph.args(["report", "tests/data/schema-1/strategies", "--output"]).arg(&page).assert().success();
        page
    })
}

fn open_published(width: u32) -> Option<Browser> {
    let browser = opened(width)?;
    browser.visit(published());
    browser.wait_for(READY);
    Some(browser)
}

const READY: &str = "document.documentElement.dataset.ready === 'true'";
const ALL_CASES: &str = "[...document.querySelectorAll('#memory table')].at(-1)";

fn reload(browser: &Browser) {
    browser.run("delete document.documentElement.dataset.ready; location.reload()");
    browser.wait_for(READY);
}

#[test]
fn page_of_a_large_run_is_small() {
    let size = fs::metadata(published()).unwrap().len();
    assert!(size < 3_000_000, "{size} bytes");
    let text = fs::read_to_string(published()).unwrap();
    assert!(text.contains("The first 50 of 2205 rows."), "without JavaScript the page says what is missing");
    let Some(browser) = open_published(1280) else { return };
    let elements = browser.run("return document.querySelectorAll('*').length").as_u64().unwrap();
    let interactive = browser.run("return performance.getEntriesByType('navigation')[0].domInteractive");
    eprintln!("{size} bytes, {elements} elements, interactive after {interactive} ms");
    // The number of elements decides how long a page takes to open; time itself depends on the machine.
    assert!(elements < 12_000, "{elements} elements");
    assert_eq!(browser.console(), Vec::<String>::new());
    assert_eq!(browser.requests(), Vec::<String>::new());
}

#[test]
fn all_rows_are_sorted_and_filtered() {
    let Some(browser) = open_published(1280) else { return };
    let heading = format!("{ALL_CASES}.querySelector('th[data-column=peak_reserved_bytes]')");
    let first = format!("Number({ALL_CASES}.tBodies[0].rows[0].cells[{heading}.cellIndex].dataset.value)");
    let mut reader = csv::Reader::from_path("tests/data/schema-1/strategies/runs.csv").unwrap();
    let column = reader.headers().unwrap().iter().position(|name| name == "peak_reserved_bytes").unwrap();
    let most = reader.records().filter_map(|row| row.unwrap()[column].parse::<u64>().ok()).max().unwrap();
    browser.run(&format!("{heading}.querySelector('button').click()"));
    browser.wait_for(&format!("{heading}.getAttribute('aria-sort') === 'descending'"));
    assert_eq!(browser.run(&format!("return {first}")).as_u64(), Some(most), "the most of all rows, not of the first");

    browser.run(
        "const field = document.getElementById('filter'); field.value = 'slab random-large'; \
         field.dispatchEvent(new Event('input'))",
    );
    let rows = format!("[...{ALL_CASES}.tBodies[0].rows]");
    browser.wait_for(&format!("{rows}.length > 0 && {rows}.length < 50"));
    assert_eq!(
        browser.run(&format!(
            "return {rows}.every(row => /slab/.test(row.textContent) && /random-large/.test(row.textContent))"
        )),
        true
    );
    let note = browser.run(&format!("return {ALL_CASES}.closest('.table').querySelector('.more').textContent"));
    assert!(note.as_str().unwrap().contains("of 2,205 rows have these words"), "{note}");
    let found = browser.run(&format!("return {rows}.length"));

    reload(&browser);
    browser.wait_for(&format!("{rows}.length === {found}"));
    assert_eq!(
        browser.run("return document.getElementById('filter').value"),
        "slab random-large",
        "the filter is restored"
    );
    browser.wait_for(&format!("{heading}.getAttribute('aria-sort') === 'descending'"));
    browser.run("document.querySelector('nav a[href=\"#loss\"]').click()");
    let address = browser.run("return location.hash");
    assert!(address.as_str().unwrap().starts_with("#loss?"), "{address}");
    assert!(address.as_str().unwrap().contains("filter=slab"), "a link keeps what was chosen: {address}");
    assert_eq!(browser.console(), Vec::<String>::new());
}

#[test]
fn rows_are_made_when_they_are_scrolled_to() {
    let Some(browser) = open_published(1280) else { return };
    let rows = format!("{ALL_CASES}.tBodies[0].rows.length");
    assert_eq!(browser.run(&format!("return {rows}")), 50);
    browser.run(&format!("{ALL_CASES}.closest('.table').scrollIntoView()"));
    browser.run(&format!("const box = {ALL_CASES}.closest('.table'); box.scrollTop = box.scrollHeight"));
    browser.wait_for(&format!("{rows} >= 150"));
    let empty = browser.run(&format!(
        "return [...{ALL_CASES}.tBodies[0].rows].filter(row => !row.dataset.case || !row.cells[0].textContent).length"
    ));
    assert_eq!(empty, 0);
}

#[test]
fn old_browser_is_told_what_it_lacks() {
    let Some(browser) = opened(1280) else { return };
    let source = json!({ "source": "delete window.DecompressionStream" });
    browser.devtools("Page.addScriptToEvaluateOnNewDocument", &source);
    browser.visit(published());
    browser.wait_for(READY);
    let words = browser.run("return document.querySelector('main > p').textContent");
    assert!(words.as_str().unwrap().contains("DecompressionStream"), "{words}");
    browser.run(&format!("{ALL_CASES}.querySelector('th[data-column=peak_reserved_bytes] button').click()"));
    browser.wait_for(&format!("{ALL_CASES}.classList.contains('sorted')"));
    let note = browser.run(&format!("return {ALL_CASES}.closest('.table').querySelector('.more').textContent"));
    assert!(note.as_str().unwrap().contains("The first 50 of 2205 rows"), "{note}");
    assert_eq!(browser.console(), Vec::<String>::new());
}

/// What the tab key reaches.
const TAB_STOPS: &str = "return [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex]')]\
    .filter(one => one.tabIndex >= 0 && !one.disabled && one.checkVisibility({ visibilityProperty: true })).map(one => one.outerHTML.slice(0, 80))";

#[test]
fn few_tab_stops_and_arrow_keys_inside_groups() {
    let Some(browser) = opened(1280) else { return };
    draw_all(&browser);
    let stops = browser.run(TAB_STOPS);
    assert!(stops.as_array().unwrap().len() <= 40, "{}: {stops:#}", stops.as_array().unwrap().len());
    let focused = "document.activeElement.closest('th')?.dataset.column";
    browser.run(&format!("{ALL_CASES}.querySelector('th button').focus()"));
    browser.press("\u{E014}");
    browser.press("\u{E014}");
    assert_eq!(browser.run(&format!("return {focused}")), "status", "the arrow keys move between headings");
    browser.press("\u{E004}");
    assert_eq!(
        browser.run(&format!("return {ALL_CASES}.contains(document.activeElement)")),
        false,
        "tab leaves the table"
    );
    browser.visit(published());
    browser.wait_for(READY);
    let stops = browser.run(TAB_STOPS);
    assert!(stops.as_array().unwrap().len() <= 40, "{stops:#}");
}

#[test]
fn chart_headline_and_address_follow_the_choice() {
    let Some(browser) = opened(1280) else { return };
    draw_all(&browser);
    let figure = "document.querySelector('figure[data-chart=timeline]')";
    let heading = "document.querySelector('#memory h2').textContent";
    let first = browser.run(&format!("return {heading}"));
    assert!(first.as_str().unwrap().contains("ran out of memory"), "failures come first: {first}");
    let choose = format!(
        "const picker = {figure}.querySelector('select[aria-label=Workload]'); \
        picker.value = [...picker.options].find(option => option.textContent.includes('streams')).value; picker.dispatchEvent(new Event('change'))"
    );
    browser.run(&choose);
    let second = browser.run(&format!("return {heading}"));
    assert!(second.as_str().unwrap().contains("streams"), "{second}");
    browser.run(&format!("{figure}.querySelector('svg.plot[tabindex]').focus()"));
    browser.press("+");
    browser.run(&format!("{figure}.querySelector('.keys button').click()"));
    let texts = format!("[...{figure}.querySelectorAll('svg.plot[tabindex] text')].map(one => one.textContent).join()");
    let before = browser.run(&format!("return [{texts}, {figure}.querySelectorAll('path.line').length]"));
    assert_eq!(before[1], 1, "one line is hidden");
    reload(&browser);
    draw_all(&browser);
    assert_eq!(
        browser.run(&format!("return [{texts}, {figure}.querySelectorAll('path.line').length]")),
        before,
        "zoom and choice are restored"
    );
    assert_eq!(browser.run(&format!("return {heading}")), second);
    assert_eq!(browser.console(), Vec::<String>::new());
}

#[test]
fn cursor_is_shared_by_charts_of_a_workload() {
    let Some(browser) = opened(1280) else { return };
    browser.run("history.replaceState(null, '', '#memory?workload=' + encodeURIComponent([...document.querySelectorAll('#growth h3')].map(one => one.textContent)[0]))");
    reload(&browser);
    draw_all(&browser);
    browser.run("document.querySelector('figure[data-chart=leak] svg.plot[tabindex]').focus()");
    browser.press("\u{E014}");
    let shown = browser.run("return [...document.querySelectorAll('figure[data-chart=timeline] .readout, figure[data-chart=leak] .readout')].map(one => [one.hidden, (one.textContent.match(/step (\\d+)/) || [])[1]])");
    assert_eq!(shown[0][0], false, "{shown}");
    assert_eq!(shown[0], shown[1], "both show the same step");
}

#[test]
fn axes_have_titles_and_binary_ticks() {
    let Some(browser) = opened(1280) else { return };
    draw_all(&browser);
    let plots = browser.run(
        "return [...document.querySelectorAll('figure[data-chart=timeline], figure[data-chart=leak]')].map(figure => ({ \
         titles: figure.querySelectorAll('svg.plot text.title').length, \
         ticks: [...figure.querySelectorAll('svg.plot[tabindex] text')].map(one => one.textContent).filter(text => /^[\\d.]+ [KMG]iB$/.test(text)) }))",
    );
    for plot in plots.as_array().unwrap() {
        assert_eq!(plot["titles"], 2, "{plot}");
        let ticks: Vec<f64> = plot["ticks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tick| {
                let (number, unit) = tick.as_str().unwrap().split_once(' ').unwrap();
                number.parse::<f64>().unwrap()
                    * match unit {
                        "GiB" => 1024.0 * 1024.0,
                        "MiB" => 1024.0,
                        _ => 1.0,
                    }
            })
            .collect();
        assert!(ticks.len() >= 2, "{plot}");
        let step = ticks[1] - ticks[0];
        assert_eq!(step.log2().fract(), 0.0, "{plot}");
    }
}

#[test]
fn phone_shows_whole_readouts() {
    let Some(browser) = opened(390) else { return };
    let screen = json!({ "width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": false });
    browser.devtools("Emulation.setDeviceMetricsOverride", &screen);
    draw_all(&browser);
    let figure = "document.querySelector('figure[data-chart=timeline]')";
    let plot = format!("{figure}.querySelector('svg.plot[tabindex]')");
    browser.run(&format!("{plot}.scrollIntoView({{ block: 'center' }}); {plot}.focus()"));
    for key in ["\u{E014}", "\u{E011}", "\u{E010}"] {
        browser.press(key);
        let [left, top, width, height] = place(&browser, &format!("{figure}.querySelector('.readout')"));
        let [plot_left, plot_top, plot_width, plot_height] = place(&browser, &plot);
        assert!(
            left >= plot_left && left + width <= plot_left + plot_width + 1,
            "{left} {width} in {plot_left} {plot_width}"
        );
        assert!(
            top >= plot_top && top + height <= plot_top + plot_height + 1,
            "{top} {height} in {plot_top} {plot_height}"
        );
    }
    browser.visit(published());
    browser.wait_for(READY);
    assert_eq!(browser.run("return document.documentElement.scrollWidth <= innerWidth"), true);
}

#[test]
fn print_keeps_words_whole() {
    for file in [&page().1, published()] {
        let Some(browser) = opened(1280) else { return };
        browser.visit(file);
        browser.wait_for(READY);
        browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })");
        draw_all(&browser);
        // The width of A4 in landscape inside its margins.
        let screen = json!({ "width": 1032, "height": 700, "deviceScaleFactor": 1, "mobile": false });
        browser.devtools("Emulation.setDeviceMetricsOverride", &screen);
        browser.devtools("Emulation.setEmulatedMedia", &json!({ "media": "print" }));
        let broken = browser.run(
            "const broken = []; \
             const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT); \
             while (walker.nextNode()) { \
               const text = walker.currentNode; \
               if (!text.parentElement.checkVisibility() || text.parentElement.closest('svg, caption, script')) continue; \
               for (const word of text.textContent.matchAll(/[^\\s\\u00ad-]+/g)) { \
                 const range = document.createRange(); range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length); \
                 const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top))); \
                 if (lines.size > 1) broken.push(word[0]); \
               } } \
             return broken.slice(0, 20)",
        );
        assert_eq!(broken, json!([]), "{}", file.display());
    }
}
