//! `report.html` in a real browser. Without one (Debian: `chromium`, `chromium-driver`) the tests
//! print why they are skipped and pass.

mod answers;
mod craft;
mod first;
mod large;
mod maps;
mod webdriver;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use assert_cmd::Command;
use oomph::base::Bytes;
use serde_json::Value;

use self::webdriver::Browser;

/// The run behind the page: a limit that some cases exceed, streams, a leak, and published tables.
const SUITE: &str = r#"
question = "What does a page show?"
base = "caching"

[[group]]
workloads = ["variable-length"]
strategies = ["direct", "caching", "caching:expandable_segments:True"]
limits = ["6GiB"]

[[group]]
workloads = ["streams", "leak-outputs"]
strategies = ["direct", "caching"]
"#;

/// A run and its page, created once.
fn page() -> &'static (PathBuf, PathBuf) {
    static PAGE: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();
    PAGE.get_or_init(|| {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report-browser");
        let _ = fs::remove_dir_all(&place);
        fs::create_dir_all(&place).unwrap();
        let (suite, run, page) = (place.join("page.toml"), place.join("run"), place.join("page.html"));
        fs::write(&suite, SUITE).unwrap();
        let oomph = || Command::cargo_bin("oomph").unwrap();
        oomph().args(["run", "--output"]).args([&run, &suite]).assert().success();
        assert!(run.join("report.html").is_file(), "every run writes its page");
        let published = Path::new("tests/data/schema-1");
        let folders = [run.clone(), published.join("techniques"), published.join("oom-thresholds")];
        oomph().arg("report").args(folders).arg("--output").arg(&page).assert().success();
        (run, page)
    })
}

/// A window that shows the page. Without a browser it prints why and returns `None`.
fn opened(width: u32) -> Option<Browser> {
    match Browser::open(width, 900) {
        Ok(browser) => {
            browser.visit(&page().1);
            browser.wait_for("document.documentElement.dataset.ready === 'true'");
            Some(browser)
        }
        Err(reason) => {
            eprintln!("skipped: no browser: {reason}");
            None
        }
    }
}

fn draw_all(browser: &Browser) {
    browser.run("document.documentElement.style.scrollBehavior = 'auto'");
    let count = browser.run("return document.querySelectorAll('figure.chart').length").as_u64().unwrap();
    for index in 0..count {
        browser.run(&format!("document.querySelectorAll('figure.chart')[{index}].scrollIntoView()"));
        browser.wait_for(&format!("!!document.querySelectorAll('figure.chart')[{index}].dataset.drawn"));
    }
}

#[test]
fn charts_are_drawn_offline() {
    let Some(browser) = opened(1280) else { return };
    let drawn = "document.querySelectorAll('figure[data-drawn]').length";
    let all = "document.querySelectorAll('figure.chart').length";
    assert_eq!(browser.run(&format!("return {drawn} < {all}")), true, "charts below the window are drawn later");
    draw_all(&browser);
    let kinds = browser
        .run("return [...new Set([...document.querySelectorAll('figure.chart')].map(f => f.dataset.chart))].sort()");
    assert_eq!(kinds, serde_json::json!(["address", "first", "leak", "map", "timeline"]));
    let empty = browser.run(
        "return [...document.querySelectorAll('figure.chart')].filter(f => \
         f.querySelectorAll('svg.plot path.line, svg.map rect, svg.sheet circle, canvas').length === 0).map(f => f.textContent)",
    );
    assert_eq!(empty, serde_json::json!([]), "charts without a line");
    let broken = browser.run("return [...document.querySelectorAll('path')].filter(p => /NaN|undefined|Infinity/.test(p.getAttribute('d'))).length");
    assert_eq!(broken, 0);
    assert_eq!(browser.console(), Vec::<String>::new());
    assert_eq!(browser.requests(), Vec::<String>::new());
    for section in [
        "overview",
        "memory",
        "loss",
        "shortage",
        "map",
        "addresses",
        "thresholds",
        "growth",
        "techniques",
        "speed",
        "origin",
    ] {
        assert_eq!(browser.run(&format!("return !!document.getElementById('{section}')")), true, "{section}");
    }
    let without_table = browser.run(
        "return [...document.querySelectorAll('main > section')].filter(s => s.querySelector('figure') && \
         !s.querySelector('table')).length",
    );
    assert_eq!(without_table, 0, "every chart has its numbers in a table beside it");
}

#[test]
fn page_numbers_equal_the_csv() {
    let Some(browser) = opened(1280) else { return };
    let shown = browser.run(
        "return [...document.querySelectorAll('tr[data-case]')].map(row => { \
         const names = [...row.closest('table').tHead.rows[0].cells].map(cell => cell.dataset.column); \
         return [row.dataset.case, [...row.cells].map((cell, i) => [names[i], cell.dataset.value, cell.textContent])]; })",
    );
    let mut reader = csv::Reader::from_path(page().0.join("runs.csv")).unwrap();
    let headers: Vec<String> = reader.headers().unwrap().iter().map(str::to_owned).collect();
    let rows: BTreeMap<String, BTreeMap<String, String>> = reader
        .records()
        .map(|row| {
            let cells = headers.iter().cloned().zip(row.unwrap().iter().map(str::to_owned)).collect::<BTreeMap<_, _>>();
            (cells["case_id"].clone(), cells)
        })
        .collect();
    assert_eq!(rows.len(), 7);
    let mut compared = 0;
    for row in shown.as_array().unwrap() {
        let Some(expected) = rows.get(row[0].as_str().unwrap()) else { continue };
        for cell in row[1].as_array().unwrap() {
            let (name, value) = (cell[0].as_str().unwrap(), cell[1].as_str().unwrap());
            let Some(in_file) = expected.get(name) else { continue };
            // Text columns, such as a workload's title, may show more than the file.
            let (Ok(value), Ok(in_file)) = (value.parse::<f64>(), in_file.parse::<f64>()) else { continue };
            assert_eq!(value, in_file, "{name} of {}", row[0]);
            if name.ends_with("_bytes") {
                assert_eq!(cell[2].as_str().unwrap().trim(), Bytes(value as u64).to_string(), "{name} of {}", row[0]);
            }
            compared += 1;
        }
    }
    assert!(compared > 150, "only {compared} cells were compared");
}

#[test]
fn tables_sort_and_filter() {
    let Some(browser) = opened(1280) else { return };
    let table = "[...document.querySelectorAll('#memory table')].at(-1)";
    let heading = format!("{table}.querySelector('th[data-column=peak_reserved_bytes]')");
    let values = |browser: &Browser| -> Vec<f64> {
        let values = browser.run(&format!(
            "const place = {heading}.cellIndex; return [...{table}.tBodies[0].rows].map(row => row.cells[place].dataset.value)"
        ));
        values.as_array().unwrap().iter().map(|value| value.as_str().unwrap().parse().unwrap()).collect()
    };
    browser.run(&format!("{heading}.querySelector('button').focus()"));
    browser.press("\u{E007}");
    assert_eq!(browser.run(&format!("return {heading}.getAttribute('aria-sort')")), "descending");
    assert!(values(&browser).is_sorted_by(|a, b| a >= b), "{:?}", values(&browser));
    browser.press("\u{E007}");
    assert_eq!(browser.run(&format!("return {heading}.getAttribute('aria-sort')")), "ascending");
    assert!(values(&browser).is_sorted());
    let rows = "[...document.querySelector('#techniques table[data-filter]').tBodies[0].rows]";
    let all = browser.run(&format!("return {rows}.length")).as_u64().unwrap();
    browser.run("document.getElementById('filter').focus()");
    for letter in ["b", "a", "s", "e"] {
        browser.press(letter);
    }
    browser.wait_for(&format!("{rows}.length > 0 && {rows}.length < {all}"));
    assert_eq!(browser.run(&format!("return {rows}.every(row => /base/i.test(row.textContent))")), true);
}

/// The position of an element in the window: left, top, width and height.
fn place(browser: &Browser, element: &str) -> [i64; 4] {
    let place = browser.run(&format!(
        "const box = {element}.getBoundingClientRect(); return [box.left, box.top, box.width, box.height].map(Math.round)"
    ));
    let numbers: Vec<i64> = place.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect();
    numbers.try_into().unwrap()
}

#[test]
fn charts_respond_to_mouse_keys_and_legend() {
    let Some(browser) = opened(1280) else { return };
    draw_all(&browser);
    let figure = "document.querySelector('figure[data-chart=timeline]')";
    browser.run(&format!("{figure}.scrollIntoView()"));
    let plot = format!("{figure}.querySelector('svg.plot')");
    let lines = format!("{plot}.querySelectorAll('path.line').length");
    let before = browser.run(&format!("return {lines}")).as_u64().unwrap();
    assert_eq!(before, 3);

    let key = format!("{figure}.querySelector('.keys button')");
    browser.run(&format!("{key}.focus()"));
    browser.press(" ");
    assert_eq!(
        browser.run(&format!("return [{key}.getAttribute('aria-pressed'), {lines}]")),
        serde_json::json!(["false", 2])
    );
    browser.press(" ");

    let [left, top, width, height] = place(&browser, &plot);
    browser.hover((left + width / 2, top + height / 2));
    let readout = format!("{figure}.querySelector('.readout')");
    assert_eq!(browser.run(&format!("return {readout}.hidden")), false);
    let text = browser.run(&format!("return {readout}.textContent"));
    assert!(text.as_str().unwrap().contains("event") && text.as_str().unwrap().contains("GiB"), "{text}");

    let ticks = |browser: &Browser| {
        browser.run(&format!("return [...{plot}.querySelectorAll('text')].map(t => t.textContent)"))
    };
    let whole = ticks(&browser);
    browser.drag((left + width / 2, top + height / 2), (left + width * 3 / 4, top + height / 2));
    assert_ne!(ticks(&browser), whole, "a drag zooms");
    assert_eq!(browser.run(&format!("return {figure}.querySelector('.reset').hidden")), false);
    browser.run(&format!("{figure}.querySelector('.reset').click()"));
    assert_eq!(ticks(&browser), whole, "a button resets the zoom");

    browser.run(&format!("{plot}.focus()"));
    browser.press("\u{E014}");
    assert_eq!(browser.run(&format!("return {readout}.hidden")), false, "arrow keys read values");
    browser.press("+");
    assert_ne!(ticks(&browser), whole, "plus zooms");
    browser.press("0");
    assert_eq!(ticks(&browser), whole);

    for view in ["allocated", "device", "category", "reserved"] {
        browser.run(&format!("{figure}.querySelector('[data-choice={view}]').click()"));
        let shapes = browser.run(&format!("return {plot}.querySelectorAll('g path').length"));
        assert!(shapes.as_u64().unwrap() >= 2, "{view}: {shapes}");
    }
    browser.run(&format!("{figure}.querySelector('[data-choice=time]').click()"));
    assert!(ticks(&browser).to_string().contains(" s"), "{}", ticks(&browser));

    let map = "document.querySelector('figure[data-chart=map]')";
    let facts = format!("{map}.querySelector('.facts').textContent");
    assert!(browser.run(&format!("return {facts}")).as_str().unwrap().starts_with("out of memory"));
    browser.run(&format!("{map}.querySelector('input[type=range]').focus()"));
    browser.press("\u{E012}");
    assert!(
        !browser.run(&format!("return {facts}")).as_str().unwrap().starts_with("out of memory"),
        "an earlier moment"
    );
    assert_eq!(browser.console(), Vec::<String>::new());
}

#[test]
fn contrast_and_phone_width() {
    let Some(browser) = opened(1280) else { return };
    draw_all(&browser);
    for theme in ["light", "dark"] {
        browser.set_theme(theme);
        let worst = browser.run(CONTRAST);
        assert!(worst[0].as_f64().unwrap() >= 4.5, "{theme}: {worst}");
        browser.run("window.scrollTo(0, 0)");
        browser.picture(1280, 1600, &screenshot(theme));
    }
    browser.set_theme("light");
    browser.picture(390, 2400, &screenshot("narrow"));
    let wide = browser.run("return document.documentElement.scrollWidth");
    assert!(wide.as_u64().unwrap() <= 390, "the page is {wide} pixels wide on a phone");
    browser.devtools("Emulation.setEmulatedMedia", &serde_json::json!({ "media": "print" }));
    browser.picture(794, 2400, &screenshot("print"));
    assert_eq!(browser.run("return getComputedStyle(document.querySelector('nav')).display"), "none");
}

#[test]
fn theme_and_print() {
    let Some(browser) = opened(1280) else { return };
    let paper = |medium: &str, system: &str| {
        let features = serde_json::json!([{ "name": "prefers-color-scheme", "value": system }]);
        let emulated = serde_json::json!({ "media": medium, "features": features });
        browser.devtools("Emulation.setEmulatedMedia", &emulated);
        browser.run("return getComputedStyle(document.body).backgroundColor")
    };
    const WHITE: &str = "rgb(255, 255, 255)";
    assert_eq!((paper("screen", "light"), paper("print", "dark")), (WHITE.into(), WHITE.into()));
    assert_ne!(paper("screen", "dark"), WHITE);
    browser.run("document.getElementById('theme').click()");
    assert_eq!(paper("screen", "dark"), WHITE, "the light theme was selected");
    browser.run("document.getElementById('theme').click()");
    assert_ne!(paper("screen", "light"), WHITE, "the dark theme was selected again");
    assert_eq!(paper("print", "light"), WHITE);
}

fn screenshot(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("report-{name}.png"))
}

/// The lowest contrast between any text and its background, by the WCAG formula, and that text.
const CONTRAST: &str = "
const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
let worst = [99, ''];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.closest('script, button:disabled')) continue;
  const svgText = element.closest('svg');
  const colour = parse(getComputedStyle(element)[svgText ? 'fill' : 'color']);
  const [a, b] = [light(colour), light(behind(element))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < worst[0]) worst = [ratio, element.outerHTML.slice(0, 200)];
}
return worst;";

/// The data of the charts of a page.
fn chart_data(text: &str) -> Value {
    let packed = text.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data = webdriver::from_base64(packed);
    serde_json::from_reader(flate2::read::ZlibDecoder::new(data.as_slice())).unwrap()
}

#[test]
fn large_page_opens() {
    let text = oomph::report::html::page(&[large::run()], &["workload-24/strategy:parameter_3".to_owned()]).unwrap();
    assert!(text.len() < 3_000_000, "{} bytes", text.len());
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report-large.html");
    fs::write(&place, &text).unwrap();
    let chart_data = chart_data(&text);
    let cases =
        || chart_data["timelines"].as_array().unwrap().iter().flat_map(|chart| chart["cases"].as_array().unwrap());
    assert_eq!(cases().count(), 40, "drawn in full");
    assert!(cases().all(|case| case["events"]["differences"].as_array().unwrap().len() <= 1000));
    assert_eq!(text.matches("<svg class=\"spark ").count(), 50, "the first rows are HTML");
    let Some(browser) = opened(1280) else { return };
    browser.visit(&place);
    browser.wait_for("document.documentElement.dataset.ready === 'true'");
    let elements = browser.run("return document.querySelectorAll('*').length").as_u64().unwrap();
    let interactive = browser.run("return performance.getEntriesByType('navigation')[0].domInteractive");
    eprintln!("{} bytes, {elements} elements, interactive after {interactive} ms", text.len());
    // The number of elements decides how long a page takes to open; time itself depends on the machine.
    assert!(elements < 12_000, "{elements} elements");
}

#[test]
fn without_javascript_every_number_is_there() {
    let text = fs::read_to_string(&page().1).unwrap();
    let mut rows: BTreeMap<&str, usize> = BTreeMap::new();
    for row in text.split(" data-case=\"").skip(1) {
        *rows.entry(row.split('"').next().unwrap()).or_default() += 1;
    }
    rows.retain(|case, _| case.starts_with("page/"));
    assert_eq!(rows.len(), 7, "{rows:?}");
    assert!(rows.values().all(|&count| count >= 2), "every case has a row in at least two tables: {rows:?}");
    let body = text.split("<script").next().unwrap();
    assert!(body.contains("<noscript>") || text.contains("<noscript>"));
    for address in ["http://", "https://"] {
        let elsewhere: Vec<&str> =
            text.match_indices(address).map(|(at, _)| &text[at..(at + 40).min(text.len())]).collect();
        let namespaces = elsewhere.iter().filter(|link| link.starts_with("http://www.w3.org/2000/svg")).count();
        assert_eq!(elsewhere.len(), namespaces, "{elsewhere:?}");
    }
    let chart_data = chart_data(&text);
    assert_eq!(chart_data["timelines"].as_array().unwrap().len(), 3);
}
