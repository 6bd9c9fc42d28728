//! What users write after `plugin:`: the file, the symbols of its functions, and the time-out of a
//! call.

use std::time::Duration;

use super::ENTRY;
use crate::strategy::{SpecError, parameters};

/// The default time-out of a call: longer than any driver call, and shorter than stress waits for a
/// trial, so that the report names the call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The parameters of a plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PluginOptions<'a> {
    pub(super) file: &'a str,
    /// The symbols that were given, by parameter: `alloc`, `free`, `record_stream`, `reset`,
    /// `reserved`, `limit`.
    symbols: Vec<(&'a str, &'a str)>,
    pub(super) timeout: Duration,
}

impl<'a> PluginOptions<'a> {
    /// Reads `FILE[,key:value]..`.
    pub(super) fn parse(text: &'a str) -> Result<PluginOptions<'a>, SpecError> {
        let (file, settings) = text.split_once(',').unwrap_or((text, ""));
        let refuse = |reason: &str| SpecError::BadParameters { strategy: ENTRY.name, reason: reason.to_owned() };
        let mut options = PluginOptions { file: file.trim(), symbols: Vec::new(), timeout: TIMEOUT };
        if options.file.is_empty() {
            return Err(refuse("which file? Write plugin:FILE"));
        }
        parameters::read(&ENTRY, settings, |setting| {
            if setting.key == "timeout" {
                options.timeout = parse_timeout(setting.value)?;
            } else {
                options.symbols.push((setting.key, setting.value));
            }
            Ok(())
        })?;
        if options.symbol("alloc").is_some() != options.symbol("free").is_some() {
            return Err(refuse("'alloc' and 'free' belong together: name both or neither"));
        }
        Ok(options)
    }

    /// The symbol given for a parameter; the last one counts.
    pub(super) fn symbol(&self, parameter: &str) -> Option<&'a str> {
        self.symbols.iter().rev().find(|(key, _)| *key == parameter).map(|&(_, symbol)| symbol)
    }
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("'timeout': the time-out must be greater than zero".to_owned()),
        Ok(time) => Ok(time),
        Err(error) => Err(format!("'timeout': '{text}' is not a time such as 30s or 2m: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_comes_first_and_symbols_by_name() {
        let options = PluginOptions::parse("./a.so,alloc:take, free:give ,reserved:held,timeout:2m").unwrap();
        assert_eq!((options.file, options.timeout), ("./a.so", Duration::from_secs(120)));
        let symbols = ["alloc", "free", "reserved", "reset"].map(|parameter| options.symbol(parameter));
        assert_eq!(symbols, [Some("take"), Some("give"), Some("held"), None]);
    }

    #[test]
    fn missing_and_misspelt_parameters_are_reported() {
        for (text, words) in [
            ("", "which file?"),
            (",alloc:a,free:b", "which file?"),
            ("a.so,alloc:a", "'alloc' and 'free' belong together"),
            ("a.so,aloc:a", "unknown parameter 'aloc'; did you mean 'alloc'?"),
            ("a.so,take", "'take' is not of the form key:value"),
            ("a.so,timeout:0s", "'timeout': the time-out must be greater than zero"),
            ("a.so,timeout:soon", "'timeout': 'soon' is not a time such as 30s or 2m"),
        ] {
            let message = PluginOptions::parse(text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
    }
}
