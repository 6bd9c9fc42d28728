//! What a worker left on its standard error: its last words, and the plugin's call that it died in.

use std::process::ExitStatus;

use super::fate::Fate;
use crate::plugin::{CALL_MARK, HANG_MARK};

/// What can be read from a worker's standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Complaints {
    /// The plugin and the call that did not return.
    hang: Option<String>,
    /// The plugin and the call in which the process died.
    plugin_call: Option<String>,
    /// The last line that says something else.
    pub(super) last_words: String,
}

impl Complaints {
    pub(super) fn read(bytes: &[u8]) -> Complaints {
        let text = String::from_utf8_lossy(bytes);
        let marked = |mark: &str| text.lines().rev().find_map(|line| line.strip_prefix(mark)).map(str::to_owned);
        let is_marked = |line: &&str| [CALL_MARK, HANG_MARK].iter().any(|mark| line.starts_with(mark));
        let others: Vec<&str> = text.lines().filter(|line| !is_marked(line)).collect();
        Complaints {
            hang: marked(HANG_MARK),
            plugin_call: marked(CALL_MARK),
            last_words: last_line(&others.join("\n")).to_owned(),
        }
    }

    /// How a worker ended that left these.
    pub(super) fn fate(self, status: ExitStatus) -> Fate {
        let Complaints { hang, plugin_call, last_words } = self;
        match hang {
            Some(call) => Fate::Hung(call),
            None => Fate::Ended { status, plugin_call, last_words },
        }
    }
}

/// The last line that says something.
pub(super) fn last_line(text: &str) -> &str {
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugins_call_is_told_from_its_own_words() {
        let text = format!("first\nmy pool is corrupt\n\n{CALL_MARK}./a.so: alloc of 512 bytes\n");
        let expected = Complaints {
            hang: None,
            plugin_call: Some("./a.so: alloc of 512 bytes".to_owned()),
            last_words: "my pool is corrupt".to_owned(),
        };
        assert_eq!(Complaints::read(text.as_bytes()), expected);
        let hung = Complaints::read(format!("{HANG_MARK}./a.so: reset did not return within 1s").as_bytes());
        assert_eq!(hung.fate(ExitStatus::default()).to_string(), "plugin ./a.so: reset did not return within 1s");
        assert_eq!(Complaints::read(b"\n \n"), Complaints::default());
    }
}
