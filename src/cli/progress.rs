//! Progress on standard error; it hides itself when nobody watches.

use indicatif::{ProgressBar, ProgressStyle};

use crate::trace::{Event, EventReader, Source, SourceInfo, Tables, TraceError, torch::Recording};

/// A bar that counts cases.
pub fn of_cases(total: usize, done: usize) -> ProgressBar {
    let bar = ProgressBar::new(total as u64)
        .with_style(style("{bar:24} {pos}/{len} cases  {elapsed} (left: {eta})  {wide_msg}"));
    bar.set_position(done as u64);
    bar
}

/// A bar that counts the ranks of a program.
pub fn of_ranks(total: usize) -> ProgressBar {
    ProgressBar::new(total as u64).with_style(style("{bar:24} {pos}/{len} ranks  {elapsed} (left: {eta})"))
}

/// A bar that counts the settings that were tried on a source; how many there are is known when the first is done.
pub fn of_settings(source: &str) -> ProgressBar {
    let bar = ProgressBar::new(0)
        .with_style(style("{bar:24} {pos}/{len} settings  {elapsed} (left: {eta})  {wide_msg}"))
        .with_message(source.to_owned());
    bar.tick();
    bar
}

/// A bar that counts the tries of a search.
pub fn of_tries(total: u32) -> ProgressBar {
    ProgressBar::new(total.into())
        .with_style(style("{bar:24} {human_pos}/{human_len} tries  {elapsed} (left: {eta})  {wide_msg}"))
}

/// A source that moves a bar while it is read: once a chunk, so that the loop over events knows nothing of it.
pub struct Watched {
    source: Box<dyn Source>,
    bar: ProgressBar,
}

impl Watched {
    /// Watches `source`, which will be read `times` times.
    pub fn new(source: Box<dyn Source>, times: u64) -> (Watched, ProgressBar) {
        let bar = match source.info().events {
            Some(events) => ProgressBar::new(events * times)
                .with_style(style("{bar:24} {human_pos}/{human_len} events  {per_sec}  (left: {eta})  {wide_msg}")),
            None => ProgressBar::new_spinner()
                .with_style(style("{spinner} {human_pos} events  {per_sec}  {elapsed}  {wide_msg}")),
        };
        (Watched { source, bar: bar.clone() }, bar)
    }
}

impl Source for Watched {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn info(&self) -> SourceInfo {
        self.source.info()
    }

    fn begun_late(&self) -> Option<&Recording> {
        self.source.begun_late()
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        Ok(Box::new(WatchedReader { reader: self.source.open()?, bar: &self.bar }))
    }
}

struct WatchedReader<'a> {
    reader: Box<dyn EventReader + 'a>,
    bar: &'a ProgressBar,
}

impl EventReader for WatchedReader<'_> {
    fn read(&mut self, chunk: &mut Vec<Event>) -> Result<(), TraceError> {
        self.reader.read(chunk)?;
        self.bar.inc(chunk.len() as u64);
        Ok(())
    }

    fn tables(&self) -> &Tables {
        self.reader.tables()
    }
}

/// The templates are constants of this file, so the fallback is never seen.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
