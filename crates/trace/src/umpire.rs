//! Umpire's replay log (`UMPIRE_REPLAY=On`), read: one JSON object a line.
//!
//! Allocs and frees are kept, with the name of the allocator as the call site. An alloc is logged before and after the
//! call; only the line with the result tells the pointer. Operations on data and allocators are left out.

use std::{collections::HashMap, io::BufRead, path::Path};

use serde::Deserialize;

use super::{
    Format, Imported, TraceError, file,
    pointer_log::{Lines, PointerLog, Step, handle, name_of},
};
use oomph_base::{Nanos, SiteId, StreamId, ThreadId};

/// How an Umpire log is recognised and opened.
pub(crate) const FORMAT: Format = Format {
    name: "umpire",
    about: "Umpire's replay log: one JSON object a line",
    recognises,
    open: |path, progress| Ok(Box::new(read(&mut file::open(path, progress)?, path)?.trace)),
};

fn recognises(head: &[u8]) -> bool {
    let line = head.trim_ascii_start().split(|&byte| byte == b'\n').next().unwrap_or_default();
    line.starts_with(b"{") && [&b"\"event\""[..], b"\"kind\""].iter().all(|key| contains(line, key))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    event: Option<std::borrow::Cow<'a, str>>,
    timestamp: Option<u64>,
    #[serde(default)]
    payload: Payload,
    #[serde(default)]
    result: Outcome,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Payload {
    allocator_ref: Option<String>,
    allocator_name: Option<String>,
    name: Option<String>,
    memory_ptr: Option<String>,
    size: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Outcome {
    allocator_ref: Option<String>,
    memory_ptr: Option<String>,
}

/// Reads an Umpire log. `path` names it in errors and in the trace.
pub fn read(input: &mut dyn BufRead, path: &Path) -> Result<Imported, TraceError> {
    let mut lines = Lines::new(input, path);
    let mut log = PointerLog::new();
    let mut allocators: HashMap<String, SiteId> = HashMap::new();
    let mut last: Option<u64> = None;
    while let Some(text) = lines.next()? {
        let parsed = serde_json::from_str::<Line<'_>>(text).map_err(|error| error.to_string());
        let line = match parsed {
            Ok(Line { event, timestamp, payload, result }) => {
                (event.map(|event| event.into_owned()), timestamp, payload, result)
            }
            Err(reason) => return Err(lines.wrong(reason)),
        };
        let (event, timestamp, payload, result) = line;
        let elapsed = Nanos(timestamp.map_or(0, |now| now.saturating_sub(last.unwrap_or(now))));
        last = timestamp.max(last);
        let step = match event.as_deref() {
            Some("makeAllocator" | "makeMemoryResource") => {
                let name = payload.allocator_name.or(payload.name);
                if let (Some(name), Some(reference)) = (name, result.allocator_ref) {
                    log.charge(&name, &lines)?;
                    log.charge(&reference, &lines)?;
                    let site = log.story.site(&name);
                    allocators.insert(reference, site);
                }
                continue;
            }
            Some("allocate") => {
                let Some(pointer) = result.memory_ptr else { continue };
                let pointer = handle(&pointer).ok_or_else(|| lines.wrong("`memory_ptr` is no pointer"))?;
                let bytes = payload.size.ok_or_else(|| lines.wrong("an alloc without `size`"))?;
                let site = payload.allocator_ref.and_then(|reference| allocators.get(&reference).copied());
                Step::Alloc { pointer, bytes, stream: StreamId::DEFAULT, site: site.unwrap_or_default() }
            }
            Some("deallocate") => {
                let pointer = payload.memory_ptr.ok_or_else(|| lines.wrong("a free without `memory_ptr`"))?;
                let pointer = handle(&pointer).ok_or_else(|| lines.wrong("`memory_ptr` is no pointer"))?;
                Step::Free { pointer, bytes: 0, stream: StreamId::DEFAULT }
            }
            _ => continue,
        };
        log.push(elapsed, ThreadId(0), step, &lines)?;
    }
    Ok(log.tell(&name_of(path)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Op, check};

    fn imported(text: &str) -> Result<Imported, TraceError> {
        read(&mut text.as_bytes(), Path::new("a.replay"))
    }

    const LOG: &str = r#"{ "kind":"replay", "uid":1, "timestamp":100, "event": "version", "payload": { "major":6 } }
{ "kind":"replay", "uid":1, "timestamp":110, "event": "makeAllocator", "payload": { "allocator_name":"pool" }, "result": { "allocator_ref":"0xa" } }
{ "kind":"replay", "uid":1, "timestamp":120, "event": "allocate", "payload": { "allocator_ref":"0xa", "size":64 } }
{ "kind":"replay", "uid":1, "timestamp":125, "event": "allocate", "payload": { "allocator_ref":"0xa", "size":64 }, "result": { "memory_ptr":"0x100" } }
{ "kind":"replay", "uid":1, "timestamp":140, "event": "deallocate", "payload": { "allocator_ref":"0xa", "memory_ptr":"0x100" } }
{ "kind":"replay", "uid":1, "timestamp":150, "event": "deallocate", "payload": { "allocator_ref":"0xa", "memory_ptr":"0x200" } }
"#;

    #[test]
    fn allocs_with_a_result_and_frees_are_told() {
        assert!(recognises(LOG.as_bytes()));
        let Imported { trace, gaps } = imported(LOG).unwrap();
        check(&trace).unwrap();
        let told: Vec<_> = trace.events.iter().filter(|event| !matches!(event.op, Op::Mark { .. })).collect();
        assert_eq!(told.len(), 2);
        let Op::Alloc { bytes: 64, site, .. } = told[0].op else { panic!("{told:?}") };
        assert_eq!(trace.tables.sites()[site.index()], "pool");
        assert_eq!(told[1].delta_ns, 15);
        assert_eq!(
            gaps,
            [
                "1 blocks are freed that were there before the log began",
                "1 of them have no known size and are left out"
            ]
        );
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
            if let Ok(log) = read(&mut &log[..], Path::new("a")) {
                check(&log.trace).unwrap();
            }
            let _ = imported(&garbage);
        }
    }
}
