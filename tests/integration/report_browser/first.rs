//! The first screen of every suite: its question, one sentence, one chart and one line about it, on 1280 x 900.

use std::{
    fs,
    path::{Path, PathBuf},
};

use assert_cmd::Command;

use super::webdriver::Browser;

/// The published run of a suite as a page.
fn published(suite: &str) -> PathBuf {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report-first");
    fs::create_dir_all(&place).unwrap();
    let page = place.join(format!("{suite}.html"));
    let run = Path::new("tests/data/schema-1").join(suite);
    Command::cargo_bin("oomph").unwrap().arg("report").arg(run).arg("--output").arg(&page).assert().success();
    page
}

/// The question as the suite's file asks it.
fn asked(suite: &str) -> String {
    let text = fs::read_to_string(format!("suites/{suite}.toml")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("question = \"")).unwrap();
    line.trim_end_matches('"').to_owned()
}

fn opened(page: &Path) -> Option<Browser> {
    match Browser::open(1280, 900) {
        Ok(browser) => {
            browser.visit(page);
            browser.wait_for("document.documentElement.dataset.ready === 'true'");
            browser.run("document.documentElement.style.scrollBehavior = 'auto'");
            Some(browser)
        }
        Err(reason) => {
            eprintln!("skipped: no browser: {reason}");
            None
        }
    }
}

const DRAWN: &str = "[...document.querySelectorAll('#overview figure')].every(figure => figure.dataset.drawn)";

/// Pairs of texts of one picture that overlap by more than a line's halo.
const OVERLAPS: &str = "
const found = [];
for (const picture of document.querySelectorAll('#overview svg.sheet')) {
  const texts = [...picture.querySelectorAll('text.small')].map(text => [text.textContent, text.getBoundingClientRect()]);
  texts.forEach(([one, a], place) => texts.slice(place + 1).forEach(([other, b]) => {
    const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (width > 2 && height > 4) found.push([one, other]);
  }));
}
return found;";

#[test]
fn every_suite_asks_and_answers_on_one_screen() {
    for suite in
        ["quick", "strategies", "oom-thresholds", "fragmentation", "leaks", "throughput", "techniques", "claims"]
    {
        let page = published(suite);
        let Some(browser) = opened(&page) else { return };
        browser.wait_for(DRAWN);
        let heading = browser.run("return document.querySelector('#overview h2').textContent");
        assert_eq!(heading, asked(suite).as_str());
        let answer = browser.run("return document.querySelector('#overview .answer').textContent");
        assert!(answer.as_str().unwrap().chars().any(|letter| letter.is_ascii_digit()), "{suite}: {answer}");
        let ends = browser.run("return document.querySelector('#overview .reading').getBoundingClientRect().bottom");
        assert!(ends.as_f64().unwrap() <= 900.0, "{suite}: the caption ends at {ends}");
        let marks = "#overview svg.sheet :is(circle, path.sign), #overview .heat td, #overview .verdicts li";
        let shapes = browser.run(&format!("return document.querySelectorAll('{marks}').length"));
        assert!(shapes.as_u64().unwrap() > 3, "{suite}: {shapes} marks");
        let unnamed = browser.run("return document.querySelectorAll('#overview svg.sheet:not([aria-label])').length");
        assert_eq!(unnamed, 0);
        let broken = "return [...document.querySelectorAll('#overview svg *')].filter(shape => \
                      [...shape.attributes].some(a => /NaN|undefined|Infinity/.test(a.value))).length";
        assert_eq!(browser.run(broken), 0, "{suite}");
        assert_eq!(browser.run(OVERLAPS), serde_json::json!([]), "{suite}: labels overlap");
        let picture = page.with_extension("png");
        browser.run("window.scrollTo(0, 0)");
        browser.picture(390, 1600, &picture);
        let wide = browser.run("return document.documentElement.scrollWidth").as_u64().unwrap();
        assert!(wide <= 390, "{suite}: {wide} pixels wide on a phone");
        assert_eq!(browser.console(), Vec::<String>::new(), "{suite}");
        assert_eq!(browser.requests(), Vec::<String>::new(), "{suite}");
    }
}

#[test]
fn dots_are_read_with_keys_and_lead_to_their_case() {
    let Some(browser) = opened(&published("fragmentation")) else { return };
    browser.wait_for(DRAWN);
    browser.run("document.querySelector('#overview svg.sheet').focus()");
    let readout = "document.querySelector('#overview .readout')";
    assert_eq!(browser.run(&format!("return {readout}.hidden")), true);
    browser.press("\u{E014}");
    let first = browser.run(&format!("return {readout}.textContent"));
    assert!(first.as_str().unwrap().contains("live"), "{first}");
    browser.press("\u{E015}");
    let below = browser.run(&format!("return {readout}.textContent"));
    assert_ne!(first, below, "arrow down reads the next row");
    browser.press("\u{E007}");
    let sought = browser.run("return document.querySelector('tr.sought').dataset.case");
    let name = browser.run(&format!("return {readout}.querySelector('strong').textContent"));
    let strategy = name.as_str().unwrap().split(", ").next().unwrap().to_owned();
    assert!(sought.as_str().unwrap().contains(&format!("/{strategy}@")), "{sought} is not of {name}");
    let top = browser.run("return document.querySelector('tr.sought').getBoundingClientRect().top").as_f64().unwrap();
    assert!((0.0..900.0).contains(&top), "the row is in the window: {top}");
    assert!(browser.run("return location.hash").as_str().unwrap().contains("case="), "the address keeps the case");
    assert_eq!(browser.console(), Vec::<String>::new());
}

#[test]
fn fixed_part_is_named_but_not_drawn() {
    let Some(browser) = opened(&published("strategies")) else { return };
    browser.wait_for(DRAWN);
    let rows = browser.run("return [...document.querySelectorAll('#overview svg.sheet text')].map(t => t.textContent)");
    let rows: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row.as_str().unwrap()).collect();
    assert!(rows.contains(&"oomph") && !rows.contains(&"arena"), "{rows:?}");
    let caption = browser.run("return document.querySelector('#overview .reading').textContent");
    assert!(caption.as_str().unwrap().contains("Left out: arena"), "{caption}");
    let answer = browser.run("return document.querySelector('#overview .answer').textContent");
    assert!(!answer.as_str().unwrap().contains("arena"), "{answer}");
}

#[test]
fn sentence_changes_with_the_model() {
    let page = published("techniques");
    let Some(browser) = opened(&page) else { return };
    browser.wait_for(DRAWN);
    let answer = "return document.querySelector('#overview .answer').textContent";
    let first = browser.run(answer);
    browser.run("document.querySelector('#overview [data-choice=\"resnet-50\"]').click()");
    let second = browser.run(answer);
    assert!(first != second && second.as_str().unwrap().contains("resnet-50"), "{second}");
    assert!(browser.run("return location.hash").as_str().unwrap().contains("model=resnet-50"));
    browser.run("document.documentElement.dataset.ready = 'before'; location.reload()");
    browser.wait_for("document.documentElement.dataset.ready === 'true'");
    browser.wait_for(DRAWN);
    assert_eq!(browser.run(answer), second, "the model is restored from the address");
}
