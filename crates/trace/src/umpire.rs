//! Reads Umpire's replay log (`UMPIRE_REPLAY=On`): one JSON object per line.
//!
//! Allocations and frees are kept, with the name of the allocator as the call site. Umpire logs an allocation before and
//! after the call; only the second line has the pointer. Operations on data and allocators are left out.

use std::{collections::HashMap, path::Path};

use serde::Deserialize;

use super::{
    Trace, TraceError, TraceFormat,
    file::{self, Input, LineReader},
    pointer_log::{LogStep, PointerLog, name_of, parse_handle},
};
use oomph_base::{Nanos, SiteId, StreamId, ThreadId};

/// The Umpire log format.
pub(crate) const FORMAT: TraceFormat = TraceFormat {
    name: "umpire",
    about: "Umpire's replay log: one JSON object per line",
    recognises,
    open: |path, progress| Ok(Box::new(read(file::open(path, progress)?, path)?)),
};

fn recognises(head: &[u8]) -> bool {
    let line = head.trim_ascii_start().split(|&byte| byte == b'\n').next().unwrap_or_default();
    line.starts_with(b"{") && [&b"\"event\""[..], b"\"kind\""].iter().all(|key| contains(line, key))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[derive(Deserialize)]
struct LogLine {
    event: Option<String>,
    timestamp: Option<u64>,
    #[serde(default)]
    payload: LogPayload,
    #[serde(default)]
    result: LogResult,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct LogPayload {
    allocator_ref: Option<String>,
    allocator_name: Option<String>,
    name: Option<String>,
    memory_ptr: Option<String>,
    size: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct LogResult {
    allocator_ref: Option<String>,
    memory_ptr: Option<String>,
}

/// Reads an Umpire log. `path` names it in errors and in the trace.
pub(crate) fn read(input: Input<'_>, path: &Path) -> Result<Trace, TraceError> {
    let mut lines = LineReader::new(input, path);
    let mut log = PointerLog::new(path);
    let mut allocators: HashMap<String, SiteId> = HashMap::new();
    let mut last: Option<u64> = None;
    while let Some(text) = lines.next_text()? {
        let parsed = serde_json::from_str(text).map_err(|error| error.to_string());
        let LogLine { event, timestamp, payload, result } = parsed.map_err(|reason| lines.syntax_error(reason))?;
        let pointer_in =
            |text: &str| parse_handle(text).ok_or_else(|| lines.syntax_error("`memory_ptr` is not a pointer"));
        let elapsed = Nanos(timestamp.map_or(0, |now| now.saturating_sub(last.unwrap_or(now))));
        last = timestamp.max(last);
        let step = match event.as_deref() {
            Some("makeAllocator" | "makeMemoryResource") => {
                let name = payload.allocator_name.or(payload.name);
                if let (Some(name), Some(reference)) = (name, result.allocator_ref) {
                    log.charge(&name, &lines)?;
                    log.charge(&reference, &lines)?;
                    let site = log.builder.site(&name);
                    allocators.insert(reference, site);
                }
                continue;
            }
            Some("allocate") => {
                let Some(pointer) = result.memory_ptr else { continue };
                let pointer = pointer_in(&pointer)?;
                let bytes = payload.size.ok_or_else(|| lines.syntax_error("an alloc without `size`"))?;
                let site = payload.allocator_ref.and_then(|reference| allocators.get(&reference).copied());
                LogStep::Alloc { pointer, bytes, stream: StreamId::DEFAULT, site: site.unwrap_or_default() }
            }
            Some("deallocate") => {
                let pointer = payload.memory_ptr.ok_or_else(|| lines.syntax_error("a free without `memory_ptr`"))?;
                LogStep::Free { pointer: pointer_in(&pointer)?, bytes: 0, stream: StreamId::DEFAULT }
            }
            _ => continue,
        };
        log.push(elapsed, ThreadId(0), step, &lines)?;
    }
    Ok(log.into_trace(&name_of(path)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Op, check};

    fn imported(text: &str) -> Result<Trace, TraceError> {
        read(Box::new(text.as_bytes()), Path::new("a.replay"))
    }

    const LOG: &str = r#"{ "kind":"replay", "uid":1, "timestamp":100, "event": "version", "payload": { "major":6 } }
{ "kind":"replay", "uid":1, "timestamp":110, "event": "makeAllocator", "payload": { "allocator_name":"pool" }, "result": { "allocator_ref":"0xa" } }
{ "kind":"replay", "uid":1, "timestamp":120, "event": "allocate", "payload": { "allocator_ref":"0xa", "size":64 } }
{ "kind":"replay", "uid":1, "timestamp":125, "event": "allocate", "payload": { "allocator_ref":"0xa", "size":64 }, "result": { "memory_ptr":"0x100" } }
{ "kind":"replay", "uid":1, "timestamp":140, "event": "deallocate", "payload": { "allocator_ref":"0xa", "memory_ptr":"0x100" } }
{ "kind":"replay", "uid":1, "timestamp":150, "event": "deallocate", "payload": { "allocator_ref":"0xa", "memory_ptr":"0x200" } }
"#;

    #[test]
    fn allocations_with_a_result_and_frees_are_read() {
        assert!(recognises(LOG.as_bytes()));
        let trace = imported(LOG).unwrap();
        check(&trace).unwrap();
        let told: Vec<_> = trace.events.iter().filter(|event| !matches!(event.op, Op::Mark { .. })).collect();
        assert_eq!(told.len(), 2);
        let Op::Alloc { bytes: 64, site, .. } = told[0].op else { panic!("{told:?}") };
        assert_eq!(trace.tables.sites()[site.index()].raw(), "pool");
        assert_eq!(told[1].delta_ns, 15);
    }

    #[test]
    fn errors_name_the_line() {
        let complaint = |text: &str| imported(text).unwrap_err().to_string();
        assert!(complaint("{\n").starts_with("a.replay:1: EOF"));
        assert_eq!(complaint(r#"{"event":"deallocate"}"#), "a.replay:1: a free without `memory_ptr`");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(cut in 0..900_usize, byte in any::<u8>(), garbage in ".{0,40}") {
            let mut log = LOG.as_bytes().to_vec();
            let length = log.len();
            log[cut % length] = byte;
            if let Ok(log) = read(Box::new(&log[..]), Path::new("a")) {
                check(&log).unwrap();
            }
            let _ = imported(&garbage);
        }
    }
}
