//! Progress on standard error; it hides itself when nobody watches.
//!
//! The rooms that work tell a [`Progress`] how far they are. Here that is a bar ([`Stages`]), or a word beside one that
//! counts something larger ([`OneOf`]).

use std::{
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

use crate::base::Progress;

/// A bar that counts cases.
pub fn of_cases(total: usize, done: usize) -> ProgressBar {
    let bar = ProgressBar::new(total as u64)
        .with_style(style("{bar:24} {pos}/{len} cases  {elapsed} (left: {eta})  {wide_msg}"));
    bar.set_position(done as u64);
    bar
}

/// A bar that counts the ranks of a program.
pub fn of_ranks(total: usize) -> ProgressBar {
    ProgressBar::new(total as u64).with_style(style("{bar:24} {pos}/{len} ranks  {elapsed} (left: {eta})  {wide_msg}"))
}

/// The bar of one source, from the first byte of its file to the answer: what is done with it now, how far that is, and
/// how long that will take. It is gone when the last copy of it is.
#[derive(Clone)]
pub struct Stages {
    bar: ProgressBar,
    source: String,
}

impl Stages {
    /// Of a source by this name; nothing is shown before the first stage.
    pub fn of(source: &str) -> Stages {
        let bar = ProgressBar::new(1).with_finish(ProgressFinish::AndClear);
        Stages { bar, source: short(source) }
    }

    /// Says what the stage is about just now.
    pub fn note(&self, what: &str) {
        self.bar.set_message(format!("{}: {what}", self.source));
    }

    /// Takes the bar away, before something is printed.
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
        // Each may draw, and what is seen in between must not be the new stage at the end of the old one.
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

/// Time goes on to be seen while a stage has nothing to say.
const TICK: Duration = Duration::from_millis(200);

/// One of several sources that are worked on side by side: what is done with it stands beside the bar that counts them.
pub struct OneOf<'a> {
    bar: &'a ProgressBar,
    source: String,
    stage: Mutex<Stage>,
}

/// How far a stage is.
#[derive(Default)]
struct Stage {
    name: String,
    total: u64,
    done: u64,
}

impl<'a> OneOf<'a> {
    /// Of a source by this name.
    pub fn of(source: &str, bar: &'a ProgressBar) -> OneOf<'a> {
        OneOf { bar, source: short(source), stage: Mutex::default() }
    }

    /// Does something to the stage and shows it.
    fn show(&self, change: impl FnOnce(&mut Stage)) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut stage);
        let percent = (u128::from(stage.done) * 100).checked_div(stage.total.into()).unwrap_or(0).min(100);
        self.bar.set_message(format!("{}: {} {percent} %", self.source, stage.name));
    }
}

impl Progress for OneOf<'_> {
    fn begin_stage(&self, stage: &str, total: u64) {
        self.show(|now| *now = Stage { name: stage.to_owned(), total, done: 0 });
    }

    fn advance(&self, count: u64) {
        self.show(|now| now.done = now.done.saturating_add(count));
    }
}

/// The name of a file without its folder: there is little room beside a bar.
fn short(source: &str) -> String {
    Path::new(source).file_name().map_or_else(|| source.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The templates are constants of this file, so the fallback is never seen.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_begins_a_bar_of_its_own() {
        let stages = Stages::of("runs/big.pickle");
        stages.begin_stage("reading the file", 300);
        stages.advance(100);
        stages.clone().advance(50);
        assert_eq!((stages.bar.position(), stages.bar.length()), (150, Some(300)));
        assert_eq!(stages.bar.message(), "big.pickle: reading the file");
        stages.begin_stage("re-living it", 7);
        assert_eq!((stages.bar.position(), stages.bar.length()), (0, Some(7)));
        assert_eq!(stages.bar.message(), "big.pickle: re-living it");
    }

    #[test]
    fn one_of_several_says_how_far_it_is_and_leaves_the_count_alone() {
        let bar = of_ranks(8);
        let one = OneOf::of("runs/rank-3.pickle", &bar);
        one.begin_stage("reading the file", 400);
        one.advance(100);
        assert_eq!(bar.message(), "rank-3.pickle: reading the file 25 %");
        one.advance(1000);
        assert_eq!(bar.message(), "rank-3.pickle: reading the file 100 %", "a file that grew meanwhile");
        one.begin_stage("packing", 0);
        assert_eq!((bar.message().as_str(), bar.position()), ("rank-3.pickle: packing 0 %", 0));
    }
}
