//! Counters and the report.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write,
};

use crate::{
    arguments::Out,
    card::card,
    copies::ReadAnswer,
    launch::LastKernel,
    state::{self, Shadow},
};

/// What is counted.
#[derive(Default)]
pub struct Counters {
    pub launches: u64,
    pub graph_launches: u64,
    pub libraries: BTreeSet<String>,
    pub unserved: BTreeSet<String>,
    pub last_kernels: HashMap<u64, LastKernel>,
    /// Reads of unknown values by kernel and answer: how many, and how many bytes.
    pub reads: BTreeMap<(String, i32), (u64, u64)>,
    /// Assumptions that were used: what, and how often.
    pub assumptions: BTreeMap<&'static str, u64>,
}

impl Counters {
    pub fn note_read(&mut self, kernel: &str, bytes: u64, answer: ReadAnswer) {
        let entry = self.reads.entry((kernel.to_owned(), answer as i32)).or_default();
        entry.0 += 1;
        entry.1 += bytes;
        match answer {
            ReadAnswer::Count => self.assume("nonzero"),
            ReadAnswer::True => self.assume("all_true"),
            // A condition, such as that of early stopping.
            ReadAnswer::Zero if bytes == 1 => self.assume("false"),
            ReadAnswer::Zero => {}
        }
    }

    /// An answer was not known and followed an assumption.
    pub fn assume(&mut self, what: &'static str) {
        *self.assumptions.entry(what).or_default() += 1;
    }
}

/// A JSON text.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => out.extend(['\\', character]),
            control if (control as u32) < 0x20 => drop(write!(out, "\\u{:04x}", control as u32)),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(","))
}

fn report(shadow: &Shadow) -> String {
    let context = card().context;
    let devices = shadow.devices.iter().map(|device| {
        let (used, peak) = device.usage();
        format!("{{\"used\":{},\"peak\":{}}}", used + context, peak + context)
    });
    let reads = shadow.counters.reads.iter().map(|((kernel, answer), (count, bytes))| {
        format!("{{\"kernel\":{},\"answer\":{answer},\"count\":{count},\"bytes\":{bytes}}}", quoted(kernel))
    });
    let assumptions =
        shadow.counters.assumptions.iter().map(|(what, count)| format!("{}:{count}", quoted(what))).collect::<Vec<_>>();
    format!(
        "{{\"devices\":{},\"total\":{},\"context\":{context},\"launches\":{},\"graph_launches\":{},\"reads\":{},\"unserved\":{},\"libraries\":{},\"assumptions\":{{{}}}}}",
        list(devices),
        card().total,
        shadow.counters.launches,
        shadow.counters.graph_launches,
        list(reads),
        list(shadow.counters.unserved.iter().map(|name| quoted(name))),
        list(shadow.counters.libraries.iter().map(|name| quoted(name))),
        assumptions.join(","),
    )
}

/// Writes the report as JSON with a zero byte at the end, cut to the buffer. Returns the length that is needed, zero byte
/// included; call it with a length of 0 first.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_shadow_report(buffer: *mut u8, length: u64) -> u64 {
    let text = report(&state::lock());
    crate::arguments::copy_text(&text, Out(buffer), length as usize);
    text.len() as u64 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_json_text() {
        assert_eq!(quoted("a\"b\\\n"), "\"a\\\"b\\\\\\u000a\"");
        let needed = oomph_shadow_report(std::ptr::null_mut(), 0);
        let mut buffer = vec![1u8; needed as usize + 64];
        let again = oomph_shadow_report(buffer.as_mut_ptr(), buffer.len() as u64) as usize;
        assert!(buffer.starts_with(b"{\"devices\":[{\"used\":"));
        assert_eq!((buffer[again - 2], buffer[again - 1]), (b'}', 0));
    }
}
