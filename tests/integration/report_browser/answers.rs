//! The pages of answers: `--export-html` of commands that answer one question.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use assert_cmd::Command;

use super::{CONTRAST, draw_all, webdriver::Browser};

/// The commands and their exit codes; each writes a page of its name.
const COMMANDS: [(&str, &[&str], i32); 5] = [
    ("advise", &["advise", "tools/recording/run-0.pickle.xz"], 0),
    ("leaks", &["leaks", "workloads/recorded/leak_outputs.pickle.xz", "--card", "h200"], 105),
    ("inspect", &["inspect", "workloads/recorded/varlen_stack.pickle.xz"], 0),
    ("threshold", &["threshold", "checkerboard", "-s", "caching", "-s", "direct"], 0),
    ("fits", &["fits", "llama-3.2-1b", "--card", "24GiB"], 0),
];

/// The folder with the pages, created once.
fn pages() -> &'static PathBuf {
    static PAGES: OnceLock<PathBuf> = OnceLock::new();
    PAGES.get_or_init(|| {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("answer-pages");
        let _ = fs::remove_dir_all(&place);
        fs::create_dir_all(&place).unwrap();
        for (name, command, code) in COMMANDS {
            let page = place.join(format!("{name}.html"));
            let asked = Command::cargo_bin("oomph").unwrap().args(command).arg("--export-html").arg(&page).assert();
            let stderr = String::from_utf8(asked.code(code).get_output().stderr.clone()).unwrap();
            assert!(stderr.contains("wrote "), "{name}: {stderr}");
        }
        place
    })
}

/// A window that shows a page. Without a browser it prints why and returns `None`.
fn opened(name: &str) -> Option<Browser> {
    match Browser::open(1280, 900) {
        Ok(browser) => {
            browser.visit(&pages().join(format!("{name}.html")));
            browser.wait_for("document.documentElement.dataset.ready === 'true'");
            Some(browser)
        }
        Err(reason) => {
            eprintln!("skipped: no browser: {reason}");
            None
        }
    }
}

/// The text of the elements that lie in a first screen of 900 pixels.
const FIRST_SCREEN: &str = "return [...document.querySelectorAll('h2, .answer-cards p, .answer-cards code, table td')]
  .filter(e => e.getBoundingClientRect().bottom <= 900).map(e => e.textContent).join('\\n')";

fn first_screen(browser: &Browser) -> String {
    browser.run(FIRST_SCREEN).as_str().unwrap().to_owned()
}

#[test]
fn pages_of_answers_are_drawn_offline() {
    for (name, ..) in COMMANDS {
        let Some(browser) = opened(name) else { return };
        draw_all(&browser);
        let empty = browser.run(
            "return [...document.querySelectorAll('figure.chart')].filter(f => f.querySelectorAll('.canvas svg path, .canvas svg \
             rect, .canvas canvas').length === 0).map(f => f.dataset.chart)",
        );
        assert_eq!(empty, serde_json::json!([]), "{name}: charts without a shape");
        assert_eq!(browser.console(), Vec::<String>::new(), "{name}");
        assert_eq!(browser.requests(), Vec::<String>::new(), "{name}");
        for theme in ["light", "dark"] {
            browser.set_theme(theme);
            let worst = browser.run(CONTRAST);
            assert!(worst[0].as_f64().unwrap() >= 4.5, "{name}, {theme}: {worst}");
        }
        browser.picture(390, 1600, &Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("answer-{name}.png")));
        let wide = browser.run("return document.documentElement.scrollWidth");
        assert!(wide.as_u64().unwrap() <= 390, "{name} is {wide} pixels wide on a phone");
    }
}

#[test]
fn first_screen_of_advice_has_cause_and_fix() {
    let Some(browser) = opened("advise") else { return };
    let shown = first_screen(&browser);
    for words in [
        "It ran out of memory",
        "A request for 8.57 GiB of GPU memory failed.",
        "Fragmentation. 18.2 GiB were free, more than the 8.57 GiB requested",
        "export PYTORCH_ALLOC_CONF=expandable_segments:True",
        "EXACT for the recorded run",
        "9,664 MiB (6.8 %) are left for it",
    ] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    let copied = browser.run("return document.querySelector('.paste button').textContent");
    assert_eq!(copied, "Copy");
    draw_all(&browser);
    let lines = browser.run("return document.querySelectorAll('figure[data-chart=timeline] path.line').length");
    assert_eq!(lines, 2, "before and after");
    let marks = browser.run("return document.querySelectorAll('.stack u').length").as_u64().unwrap();
    assert!(marks > 30, "{marks} bars against what there is");
}

#[test]
fn first_screens_of_other_answers() {
    for (name, expected) in [
        ("leaks", ["Leak: blocks pile up", "1.24 GiB of kept memory per step", "in step 109"]),
        ("inspect", ["3.84 GiB are live at the peak", "no allocator needs less", "train_gpt.py"]),
        (
            "threshold",
            ["is the least memory in which it completes", "no allocator needs less", "context and libraries"],
        ),
        ("fits", ["trains on 24GiB", "for PyTorch", "batches up to"]),
    ] {
        let Some(browser) = opened(name) else { return };
        let shown = first_screen(&browser);
        for words in expected {
            assert!(shown.contains(words), "{name}: {words}: {shown}");
        }
    }
}

#[test]
fn flame_graph_zooms() {
    let Some(browser) = opened("inspect") else { return };
    draw_all(&browser);
    let figure = "document.querySelector('figure[data-chart=flame]')";
    browser.run(&format!("{figure}.scrollIntoView()"));
    let widths = |browser: &Browser| {
        browser.run(&format!(
            "return [...{figure}.querySelectorAll('g.frame')].map(g => [g.textContent, Math.round(g.getBoundingClientRect().width)])"
        ))
    };
    let whole = widths(&browser);
    let frames = whole.as_array().unwrap();
    assert!(frames.len() > 5 && frames[0][0].as_str().unwrap().starts_with("all: 3.84 GiB"), "{whole}");

    // A click makes a bar as wide as the picture, and the address keeps it.
    let inner = format!("[...{figure}.querySelectorAll('g.frame')].find(g => g.textContent.includes('fwd'))");
    let click = format!("{inner}.dispatchEvent(new MouseEvent('click', {{ bubbles: true }}))");
    browser.run(&click);
    let zoomed = widths(&browser);
    let of = |all: &serde_json::Value| {
        let found = all.as_array().unwrap().iter().find(|frame| frame[0].as_str().unwrap().contains("fwd"));
        found.unwrap()[1].as_u64().unwrap()
    };
    assert!(of(&zoomed) > 2 * of(&whole), "{whole} {zoomed}");
    assert_eq!(browser.run("return location.hash.includes('flame=own.')"), true);
    browser.run("document.documentElement.dataset.ready = 'before'; location.reload()");
    browser.wait_for("document.documentElement.dataset.ready === 'true'");
    draw_all(&browser);
    assert_eq!(of(&widths(&browser)), of(&zoomed), "the address restores the zoom");

    browser.run(&format!("{figure}.querySelector('.reset').click()"));
    assert_eq!(widths(&browser), whole, "a button shows all");
    browser.run(&format!("{figure}.querySelector('svg.flame').focus()"));
    for key in ["\u{E015}", "\u{E015}"] {
        browser.press(key);
    }
    let told = browser.run(&format!("return {figure}.querySelector('.readout').textContent"));
    assert!(told.as_str().unwrap().contains("train_gpt.py") && told.as_str().unwrap().contains("% of all"), "{told}");
    browser.press("\u{E007}");
    assert_ne!(widths(&browser), whole, "Enter zooms");
    browser.press("\u{E00C}");
    assert_eq!(widths(&browser), whole, "Escape shows all");

    browser.run(&format!("{figure}.querySelector('[data-choice=all]').click()"));
    let deeper = widths(&browser).as_array().unwrap().len();
    assert!(deeper > frames.len(), "all frames are more than {}", frames.len());
    assert_eq!(browser.console(), Vec::<String>::new());
}
