//! What follows `plugin:`, taken apart.

use std::time::Duration;

use crate::strategy::{SpecError, StrategyEntry, parameters};

/// How long a call may take if nobody says: longer than any driver call, and shorter than a trial under stress is waited
/// for, so that the call is what is blamed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A file, the symbols that were asked for by name, and how long a call may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wish<'a> {
    pub(super) file: &'a str,
    pub(super) alloc: Option<&'a str>,
    pub(super) free: Option<&'a str>,
    pub(super) record_stream: Option<&'a str>,
    pub(super) reset: Option<&'a str>,
    pub(super) reserved: Option<&'a str>,
    pub(super) limit: Option<&'a str>,
    pub(super) timeout: Duration,
}

impl Default for Wish<'_> {
    fn default() -> Self {
        Wish {
            file: "",
            alloc: None,
            free: None,
            record_stream: None,
            reset: None,
            reserved: None,
            limit: None,
            timeout: TIMEOUT,
        }
    }
}

impl<'a> Wish<'a> {
    /// Reads `FILE[,key:value]..`. The file comes first, as what people know best.
    pub(super) fn read(entry: &StrategyEntry, text: &'a str) -> Result<Wish<'a>, SpecError> {
        let (file, settings) = text.split_once(',').unwrap_or((text, ""));
        let refuse = |reason: &str| SpecError::BadParameters { strategy: entry.name, reason: reason.to_owned() };
        let mut wish = Wish { file: file.trim(), ..Wish::default() };
        if wish.file.is_empty() {
            return Err(refuse("which file? Write plugin:FILE"));
        }
        parameters::read(entry, settings, |setting| {
            let place = match setting.key {
                "alloc" => &mut wish.alloc,
                "free" => &mut wish.free,
                "record_stream" => &mut wish.record_stream,
                "reset" => &mut wish.reset,
                "reserved" => &mut wish.reserved,
                "limit" => &mut wish.limit,
                _ => {
                    wish.timeout = time(setting.value)?;
                    return Ok(());
                }
            };
            *place = Some(setting.value);
            Ok(())
        })?;
        if wish.alloc.is_some() != wish.free.is_some() {
            return Err(refuse("'alloc' and 'free' belong together: name both or neither"));
        }
        Ok(wish)
    }
}

fn time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("'timeout': nothing is done in no time".to_owned()),
        Ok(time) => Ok(time),
        Err(error) => Err(format!("'timeout': '{text}' is no time such as 30s or 2m: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ENTRY;

    #[test]
    fn the_file_comes_first_and_symbols_by_name() {
        let wish = Wish::read(&ENTRY, "./a.so,alloc:take, free:give ,reserved:held,timeout:2m").unwrap();
        let expected = Wish {
            file: "./a.so",
            alloc: Some("take"),
            free: Some("give"),
            reserved: Some("held"),
            timeout: Duration::from_secs(120),
            ..Wish::default()
        };
        assert_eq!(wish, expected);
    }

    #[test]
    fn what_is_missing_or_misspelt_is_said() {
        for (text, words) in [
            ("", "which file?"),
            (",alloc:a,free:b", "which file?"),
            ("a.so,alloc:a", "'alloc' and 'free' belong together"),
            ("a.so,aloc:a", "unknown parameter 'aloc'; did you mean 'alloc'?"),
            ("a.so,take", "'take' is not of the form key:value"),
            ("a.so,timeout:0s", "'timeout': nothing is done in no time"),
            ("a.so,timeout:soon", "'timeout': 'soon' is no time such as 30s or 2m"),
        ] {
            let message = Wish::read(&ENTRY, text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
    }
}
