//! Reads a native trace. A file that is read to its end without an error holds together: [`check`](crate::check)
//! finds nothing more.

use std::path::Path;

use super::{FIRST_WORD, VERSION, lines::Lines, story::Story, words::Words};
use crate::{CHUNK_EVENTS, Event, EventReader, Tables, TraceError};

/// A position in a native file.
pub(super) struct Reader {
    lines: Lines,
    story: Story,
    name: String,
}

impl Reader {
    /// Reads the first line.
    pub(super) fn open(path: &Path) -> Result<Reader, TraceError> {
        let mut lines = Lines::open(path)?;
        let Some(line) = lines.next()? else { return Err(lines.refusal("the file is empty".to_owned())) };
        let mut words = Words::of(line);
        if words.next() != Some(FIRST_WORD.as_bytes()) {
            return Err(lines.refusal(format!("not a native trace, which begins with `{}`", super::first_line())));
        }
        let header = words.number::<u64>("the version").and_then(|version| {
            let name = if words.is_empty() { String::new() } else { words.json("the name")? };
            words.end().map(|()| (version, name))
        });
        match header {
            Ok((VERSION, name)) => Ok(Reader { lines, story: Story::default(), name }),
            Ok((version, _)) => Err(lines.refusal(format!(
                "written in version {version} of the trace format; this program reads version {VERSION}"
            ))),
            Err(reason) => Err(lines.complaint(reason)),
        }
    }

    /// What the file calls itself; empty where it does not.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl EventReader for Reader {
    fn read(&mut self, chunk: &mut Vec<Event>) -> Result<(), TraceError> {
        chunk.clear();
        while chunk.len() < CHUNK_EVENTS {
            let Some(line) = self.lines.next()? else {
                return if self.story.has_ended() {
                    Ok(())
                } else {
                    Err(self.lines.refusal(
                        "the file stops without the line `end`: it was cut short, or `end` was forgotten".to_owned(),
                    ))
                };
            };
            match self.story.understand(line) {
                Ok(Some(event)) => chunk.push(event),
                Ok(None) => {}
                Err(reason) => return Err(self.lines.complaint(reason)),
            }
        }
        Ok(())
    }

    fn tables(&self) -> &Tables {
        self.story.tables()
    }

    fn share_read(&self) -> Option<f64> {
        Some(self.lines.share_read())
    }
}
