//! Writing to standard output and standard error.

use std::{
    collections::BTreeSet,
    env,
    io::{self, Write},
    sync::{Mutex, PoisonError},
};

use super::exit;
use crate::{
    base::{escaped, escaped_lines},
    measure::{CaseRecord, Status},
    report::{self, Glyphs, Medium, Terminal},
};

/// Writes text for people to standard output. Names from files are escaped where they are printed ([`FileText`]); here every
/// other control character is, too, so that no output can move the cursor. Lines are as long as the terminal is wide.
///
/// [`FileText`]: crate::base::FileText
pub fn say(text: &str) -> io::Result<()> {
    say_data(&report::flowing(&escaped_lines(text), terminal().width))
}

/// Writes text for programs, such as JSON and CSV, to standard output as it is.
pub fn say_data(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// What standard output can show: pipes get tables in full width, unless the variable COLUMNS says how wide they are read.
pub fn terminal() -> Terminal {
    let size = terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| width.0);
    let variable = || env::var("COLUMNS").ok()?.parse().ok().filter(|width| *width > 0);
    Terminal { width: size.or_else(variable), glyphs: glyphs() }
}

/// The characters of the locale. Without one, as in containers, little is assumed: lines of tables are UTF-8, pictures ASCII.
pub fn glyphs() -> Glyphs {
    let is_dumb = env::var("TERM").is_ok_and(|terminal| terminal == "dumb");
    let most = if is_dumb { Glyphs::Lines } else { Glyphs::Blocks };
    // The first that is set decides, as in the C library.
    let set = |name: &&str| env::var(name).ok().filter(|text| !text.is_empty());
    match ["LC_ALL", "LC_CTYPE", "LANG"].iter().find_map(set).map(|locale| locale.to_ascii_lowercase()) {
        None => Glyphs::Lines,
        Some(locale) if locale.contains("utf-8") || locale.contains("utf8") => most,
        Some(_) => Glyphs::Ascii,
    }
}

/// Standard output as the medium of a text.
pub fn medium() -> Medium {
    Medium::Terminal(terminal())
}

/// Names the cases that could not be run, and returns the exit code.
pub fn complain_of_failures(records: &[CaseRecord]) -> u8 {
    let failed = records.iter().filter(|record| record.status == Status::Error);
    complain_of(failed.map(|record| (record.case_id.clone(), record.reason.clone())))
}

/// Names what could not be run, with the reasons, and returns the exit code.
pub fn complain_of(failures: impl IntoIterator<Item = (String, String)>) -> u8 {
    let mut code = exit::OK;
    for (case_id, reason) in failures {
        complain(&format!("failed: {}: {}", escaped(&case_id), escaped(&reason)));
        code = exit::CASES_FAILED;
    }
    code
}

/// Writes a line to standard error, as long as the terminal is wide. A failure of that cannot be reported and is ignored.
pub fn complain(line: &str) {
    let width = terminal_size::terminal_size_of(io::stderr()).map(|(width, _)| width.0);
    let _ = writeln!(io::stderr().lock(), "{}", report::flowing(&escaped_lines(line), width));
}

/// Like [`complain`], once per line: commands may open a source several times.
pub fn complain_once(line: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(line.to_owned()) {
        complain(line);
    }
}
