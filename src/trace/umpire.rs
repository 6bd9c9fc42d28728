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
use crate::unit::{Nanos, SiteId, StreamId, ThreadId};

/// How an Umpire log is recognised and opened.
pub(super) const FORMAT: Format = Format {
    name: "umpire",
    about: "Umpire's replay log: one JSON object a line",
    recognises,
    open: |path| Ok(Box::new(read(&mut file::open(path)?, path)?.trace)),
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
