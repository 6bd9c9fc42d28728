//! Progress bars on standard error, hidden where that is not a terminal.
//!
//! Long-running code reports to a [`Progress`]: the bar of one source ([`Stages`]), or a message
//! beside a bar that counts sources ([`OneOf`]).

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

use super::output;
use crate::{
    base::{Progress, text_path},
    report::Glyphs,
};

/// A bar that counts cases.
pub fn of_cases(total: usize, done: usize) -> ProgressBar {
    counting("cases", total, done)
}

/// A bar that counts things with this name.
pub fn counting(what: &str, total: usize, done: usize) -> ProgressBar {
    let template = format!("{{bar:24}} {{pos}}/{{len}} {what}  {{elapsed}} (left: {{eta}})  {{wide_msg}}");
    let bar = ProgressBar::new(total as u64).with_style(style(&template));
    bar.set_position(done as u64);
    bar
}

/// The bar of one source: its current stage, how far it is, and the time left. It disappears with
/// its last clone.
#[derive(Clone)]
pub struct Stages {
    bar: ProgressBar,
    source: String,
}

impl Stages {
    /// For a source of this name; hidden until the first stage.
    pub fn of(source: &str) -> Stages {
        let bar = ProgressBar::new(1).with_finish(ProgressFinish::AndClear);
        Stages { bar, source: short(source) }
    }

    /// Changes the message of the current stage.
    pub fn note(&self, what: &str) {
        self.bar.set_message(format!("{}: {what}", self.source));
    }

    /// Removes the bar, before something is printed.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Stages {
    fn begin_stage(&self, stage: &str, total: u64) {
        self.bar.set_style(style(if total > 0 {
            "{bar:24} {percent:>3} %  {elapsed} (left: {eta})  {wide_msg}"
        } else {
            "{spinner}  {elapsed}  {wide_msg}"
        }));
        // Each call may draw: reset first, so that the new stage is never shown at the old
        // position.
        self.bar.reset();
        self.note(stage);
        self.bar.set_length(total);
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(TICK);
        }
    }

    fn advance(&self, count: u64) {
        self.bar.inc(count);
    }
}

/// The elapsed time is drawn this often while a stage reports nothing.
const TICK: Duration = Duration::from_millis(200);

/// One of several sources processed in parallel: its stage is the message of the bar that counts
/// them.
pub struct OneOf<'a> {
    bar: &'a ProgressBar,
    source: String,
    stage: Mutex<StageProgress>,
}

/// How far a stage is.
#[derive(Default)]
struct StageProgress {
    name: String,
    total: u64,
    done: u64,
}

impl<'a> OneOf<'a> {
    /// For a source of this name.
    pub fn of(source: &str, bar: &'a ProgressBar) -> OneOf<'a> {
        OneOf { bar, source: short(source), stage: Mutex::default() }
    }

    /// Changes the stage and shows it.
    fn show(&self, change: impl FnOnce(&mut StageProgress)) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut stage);
        let percent = (u128::from(stage.done) * 100).checked_div(stage.total.into()).unwrap_or(0).min(100);
        self.bar.set_message(format!("{}: {} {percent} %", self.source, stage.name));
    }
}

impl Progress for OneOf<'_> {
    fn begin_stage(&self, stage: &str, total: u64) {
        self.show(|now| *now = StageProgress { name: stage.to_owned(), total, done: 0 });
    }

    fn advance(&self, count: u64) {
        self.show(|now| now.done = now.done.saturating_add(count));
    }
}

/// The name of a file without its folder: there is little space beside a bar.
fn short(source: &str) -> String {
    let path = text_path(source);
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// The templates are constants of this file, so the fallback is never used.
fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    match output::glyphs() {
        Glyphs::Ascii => style.progress_chars("#>.").tick_chars("|/-\\ "),
        Glyphs::Lines | Glyphs::Blocks => style,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_restarts_the_bar() {
        let stages = Stages::of("runs/big.pickle");
        stages.begin_stage("reading the file", 300);
        stages.advance(100);
        stages.clone().advance(50);
        assert_eq!((stages.bar.position(), stages.bar.length()), (150, Some(300)));
        assert_eq!(stages.bar.message(), "big.pickle: reading the file");
        stages.begin_stage("verifying it", 7);
        assert_eq!((stages.bar.position(), stages.bar.length()), (0, Some(7)));
        assert_eq!(stages.bar.message(), "big.pickle: verifying it");
    }

    #[test]
    fn one_of_several_changes_the_message_only() {
        let bar = counting("ranks", 8, 0);
        let one = OneOf::of("runs/rank-3.pickle", &bar);
        one.begin_stage("reading the file", 400);
        one.advance(100);
        assert_eq!(bar.message(), "rank-3.pickle: reading the file 25 %");
        one.advance(1000);
        assert_eq!(bar.message(), "rank-3.pickle: reading the file 100 %", "a file that grew");
        one.begin_stage("packing", 0);
        assert_eq!((bar.message().as_str(), bar.position()), ("rank-3.pickle: packing 0 %", 0));
    }
}
