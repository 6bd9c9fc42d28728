//! The memory map and the picture of addresses over time.

use std::{fs, path::Path};

use assert_cmd::Command;
use oomph::base::Bytes;
use serde_json::json;

use super::{draw_all, opened, page, place, webdriver::Browser};

const MAP: &str = "document.querySelector('figure[data-chart=map]')";
const ADDRESSES: &str = "document.querySelector('figure[data-chart=address]')";

/// A figure on the screen, drawn.
fn shown(figure: &str) -> Option<Browser> {
    let browser = opened(1280)?;
    draw_all(&browser);
    browser.run(&format!("{figure}.scrollIntoView()"));
    browser.wait_for(&format!("!!{figure}.querySelector('.facts').textContent"));
    Some(browser)
}

/// A column of the first case that ran out of memory, and its strategy.
fn failed_case(column: &str) -> (String, u64) {
    let mut reader = csv::Reader::from_path(page().0.join("runs.csv")).unwrap();
    let headers = reader.headers().unwrap().clone();
    let place = |name: &str| headers.iter().position(|header| header == name).unwrap();
    let rows: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    let failed = rows.iter().find(|row| &row[place("status")] == "oom").unwrap();
    (failed[place("strategy")].to_owned(), failed[place(column)].parse().unwrap())
}

#[test]
fn sums_of_the_map_equal_the_record() {
    let Some(browser) = shown(MAP) else { return };
    let (strategy, free) = failed_case("oom_cached_free_bytes");
    let (_, requested) = failed_case("oom_requested_bytes");
    let chosen = browser.run(&format!("return {MAP}.querySelector('select').selectedOptions[0].textContent"));
    assert!(chosen.as_str().unwrap().ends_with(&format!("· {strategy}")), "{chosen}: the case that failed is shown");
    let facts = browser.run(&format!("return {MAP}.querySelector('.facts').textContent"));
    let facts = facts.as_str().unwrap();
    assert!(facts.starts_with("out of memory, event "), "{facts}");
    assert!(facts.contains(&format!("{} free in ", Bytes(free))), "{facts}: {free} bytes are free in the record");
    assert!(facts.contains("1 row = "), "{facts}");
    // What is drawn sums to the record, too: no hole is lost in a block in use.
    let drawn = browser.run(&format!(
        "const blocks = new Set([...{MAP}.querySelectorAll('svg.map rect')].map(rect => rect.block).filter(Boolean)); \
         return [...blocks].reduce((sum, block) => sum + (block.status === 3 ? block.size : block.free), 0)"
    ));
    assert_eq!(drawn, free);
    let bars =
        browser.run(&format!("return [...{MAP}.querySelectorAll('.failure text')].map(text => text.textContent)"));
    assert!(bars.to_string().contains(&format!("requested in one piece: {}", Bytes(requested))), "{bars}");
    let heading = browser.run("return document.querySelector('#map h2').textContent");
    assert!(heading.as_str().unwrap().contains(&Bytes(requested).to_string()), "{heading}");
    let row = browser.run(
        "const rows = [...document.querySelectorAll('#map table tbody tr')].map(row => row.textContent); \
         return rows.find(text => text.includes('out of memory'))",
    );
    assert!(row.as_str().unwrap().contains(&Bytes(free).to_string()), "{row}: the table says the same");
    assert_eq!(browser.console(), Vec::<String>::new());
}

#[test]
fn two_strategies_are_shown_at_one_moment() {
    let Some(browser) = shown(MAP) else { return };
    browser.run(&format!(
        "const select = {MAP}.querySelectorAll('select')[1]; select.value = select.options[1].value; \
         select.dispatchEvent(new Event('change'))"
    ));
    let panels = format!("{MAP}.querySelectorAll('.panel')");
    assert_eq!(browser.run(&format!("return {panels}.length")), 2);
    browser.run(&format!("{MAP}.querySelector('input[type=range]').focus()"));
    // At the first moment one of them was pictured at this event, and the other at or before it.
    browser.press("\u{E011}");
    let events = browser.run(&format!(
        "const number = (text) => Number(text.match(/event ([\\d,]+)/)[1].replaceAll(',', '')); \
         return [{MAP}.querySelector('input[type=range]').getAttribute('aria-valuetext'), \
         ...[...{panels}].map(panel => panel.querySelector('.facts').textContent)].map(number)"
    ));
    let event = |place: usize| events[place].as_u64().unwrap();
    assert_eq!(event(1).max(event(2)), event(0), "{events}");
    let rows = browser.run(&format!(
        "return [...{panels}].map(panel => panel.querySelector('.facts').textContent.match(/1 row = .*/)[0])"
    ));
    assert_eq!(rows[0], rows[1], "one scale");
    let hash = browser.run("return location.hash");
    assert!(hash.as_str().unwrap().contains("map-beside="), "{hash}");
    browser.run("document.documentElement.dataset.ready = 'before'; location.reload()");
    browser.wait_for("document.documentElement.dataset.ready === 'true'");
    draw_all(&browser);
    assert_eq!(browser.run(&format!("return {panels}.length")), 2, "the address of the page restores both");
    assert_eq!(browser.console(), Vec::<String>::new());
}

/// The colours of the picture, each with its number of pixels.
const COLOURS: &str = "const drawn = figure.querySelector('canvas'); const canvas = document.createElement('canvas'); \
    [canvas.width, canvas.height] = [drawn.width, drawn.height]; \
    const copy = canvas.getContext('2d', { willReadFrequently: true }); copy.drawImage(drawn, 0, 0); \
    const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data; const seen = {}; \
    for (let i = 0; i < pixels.length; i += 4) { const name = [pixels[i], pixels[i + 1], pixels[i + 2]].join(); \
    seen[name] = (seen[name] || 0) + 1; } return seen;";

#[test]
fn addresses_are_drawn_zoomed_and_restored() {
    let Some(browser) = shown(ADDRESSES) else { return };
    let painted = format!("!!{ADDRESSES}.querySelector('canvas').dataset.frame");
    browser.wait_for(&painted);
    let colours = |browser: &Browser| browser.run(&format!("const figure = {ADDRESSES}; {COLOURS}"));
    let whole = colours(&browser);
    assert!(whole.as_object().unwrap().len() > 3, "{whole}");
    assert!(whole["224,90,0"].as_u64().unwrap() > 100, "holes are orange: {whole}");
    assert!(whole["213,221,228"].as_u64().unwrap() > 100, "blocks are pale: {whole}");
    let facts = browser.run(&format!("return {ADDRESSES}.querySelector('.facts').textContent"));
    assert!(facts.as_str().unwrap().contains("Out of memory at event "), "{facts}");
    let plot = format!("{ADDRESSES}.querySelector('svg.address')");
    let ticks = |browser: &Browser| {
        browser.run(&format!("return [...{plot}.querySelectorAll('text')].map(text => text.textContent)"))
    };
    let all = ticks(&browser);
    let [left, top, width, height] = place(&browser, &plot);
    browser.hover((left + width / 2, top + height / 2));
    let readout = browser.run(&format!("return {ADDRESSES}.querySelector('.readout').textContent"));
    assert!(readout.as_str().unwrap().contains("iB"), "{readout}");

    browser.drag((left + width / 3, top + height / 3), (left + width / 2, top + height / 2));
    browser.wait_for(&format!("location.hash.includes('addr-view=') && {painted}"));
    browser.wait_for(&format!("{plot}.querySelectorAll('text').length > 0"));
    std::thread::sleep(std::time::Duration::from_millis(200));
    let part = ticks(&browser);
    assert_ne!(part, all, "a drag zooms");
    assert_ne!(colours(&browser), whole);
    browser.run("document.documentElement.dataset.ready = 'before'; location.reload()");
    browser.wait_for("document.documentElement.dataset.ready === 'true'");
    draw_all(&browser);
    browser.wait_for(&painted);
    assert_eq!(ticks(&browser), part, "the address of the page restores the view");
    browser.run(&format!("{plot}.focus()"));
    browser.press("0");
    browser.wait_for("!location.hash.includes('addr-view=')");
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(ticks(&browser), all, "0 shows all");
    browser.press("+");
    browser.wait_for("location.hash.includes('addr-view=')");
    for (place, value) in [(2, "time"), (1, "life")] {
        browser.run(&format!(
            "const select = {ADDRESSES}.querySelectorAll('select')[{place}]; select.value = '{value}'; \
             select.dispatchEvent(new Event('change'))"
        ));
    }
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(ticks(&browser).to_string().contains("clock"), "{}", ticks(&browser));
    assert_eq!(browser.console(), Vec::<String>::new());
}

#[test]
fn picture_is_saved_as_png_and_svg() {
    let Some(browser) = shown(ADDRESSES) else { return };
    browser.wait_for(&format!("!!{ADDRESSES}.querySelector('canvas').dataset.frame"));
    browser.run("window.saved = []; URL.createObjectURL = blob => { blob.arrayBuffer().then(bytes => window.saved.push([blob.type, new Uint8Array(bytes)])); return 'data:,'; }");
    for label in ["PNG", "SVG"] {
        browser.run(&format!(
            "[...{ADDRESSES}.querySelectorAll('button')].find(button => button.textContent === '{label}').click()"
        ));
    }
    browser.wait_for("window.saved.length === 2");
    let found = browser.run(
        "const of = type => window.saved.find(([kind]) => kind === type)[1]; const png = of('image/png'); \
         const text = new TextDecoder().decode(of('image/svg+xml')); \
         const tree = new DOMParser().parseFromString(text, 'image/svg+xml'); \
         return [[...png.slice(1, 4)].map(byte => String.fromCharCode(byte)).join(''), png.length, tree.documentElement.nodeName, \
         [...tree.querySelectorAll('path')].map(path => path.getAttribute('d').split('M').length).reduce((a, b) => a + b, 0), \
         tree.querySelector('title').textContent, /NaN|undefined/.test(text)]",
    );
    assert_eq!((&found[0], &found[2], &found[5]), (&json!("PNG"), &json!("svg"), &json!(false)), "{found}");
    assert!(found[1].as_u64().unwrap() > 5000, "{found}");
    assert!(found[3].as_u64().unwrap() > 100, "{found}: rectangles in the SVG");
    assert!(found[4].as_str().unwrap().starts_with("Addresses over time: "), "{found}");
}

#[test]
fn page_of_a_replay_draws_every_block() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("replay-addresses.html");
    let _ = fs::remove_file(&file);
    let arguments =
        ["replay", "workloads/recorded/train_base.exp.pickle.xz", "--strategy", "caching:recorded", "--force"];
    Command::cargo_bin("oomph").unwrap().args(arguments).arg("--export-html").arg(&file).assert().success();
    let Some(browser) = opened(1280) else { return };
    browser.visit(&file);
    browser.wait_for("document.documentElement.dataset.ready === 'true'");
    draw_all(&browser);
    browser.wait_for(&format!("!!{ADDRESSES}.querySelector('canvas').dataset.frame"));
    let facts = browser.run(&format!("return {ADDRESSES}.querySelector('.facts').textContent"));
    assert!(facts.as_str().unwrap().contains("(all of them)"), "{facts}");
    assert_eq!(browser.console(), Vec::<String>::new());
}
