//! Reads STAlloc's text traces: `1 pointer size stream` is an allocation, `0 pointer size stream` a free; other lines are
//! markers.
//!
//! `Iteration Index : 3` begins a step, `micro-batch : F` a micro-batch (forward, backward, weights), and any other line
//! with ` : ` a phase, such as `12->mlp Layer : F-start`.

use std::path::Path;

use super::{
    MarkKind, Trace, TraceError, TraceFormat,
    file::{self, Input, LineReader},
    pointer_log::{LogStep, PointerLog, name_of, parse_handle},
};
use oomph_base::{Nanos, SiteId, ThreadId};

const ITERATION: &str = "Iteration Index :";
const MICRO_BATCH: &str = "micro-batch :";

/// The STAlloc trace format.
pub(crate) const FORMAT: TraceFormat = TraceFormat {
    name: "stalloc",
    about: "STAlloc's text trace",
    recognises,
    open: |path, progress| Ok(Box::new(read(file::open(path, progress)?, path)?)),
};

/// The first line is a marker or four numbers, of which the first is 0 or 1.
fn recognises(head: &[u8]) -> bool {
    let line = head.trim_ascii_start().split(|&byte| byte == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return false };
    line.starts_with(ITERATION) || line.starts_with(MICRO_BATCH) || parse_call(line).is_some()
}

/// Whether a line is an allocation, and its pointer, size and stream.
fn parse_call(line: &str) -> Option<(bool, u64, u64, u64)> {
    let mut words = line.split_whitespace();
    let is_alloc = match words.next()? {
        "1" => true,
        "0" => false,
        _ => return None,
    };
    let numbers = (parse_handle(words.next()?)?, words.next()?.parse().ok()?, parse_handle(words.next()?)?);
    words.next().is_none().then_some((is_alloc, numbers.0, numbers.1, numbers.2))
}

/// Reads an STAlloc trace. `path` names it in errors and in the trace.
pub(crate) fn read(input: Input<'_>, path: &Path) -> Result<Trace, TraceError> {
    let mut lines = LineReader::new(input, path);
    let mut log = PointerLog::new(path);
    let mut micro_batches = 0;
    while let Some(line) = lines.next_text()? {
        let step = if let Some((is_alloc, pointer, bytes, stream)) = parse_call(line) {
            let stream = log.builder.stream_known_as(stream).map_err(|full| lines.syntax_error(full))?;
            match is_alloc {
                true => LogStep::Alloc { pointer, bytes, stream, site: SiteId(0) },
                false => LogStep::Free { pointer, bytes, stream },
            }
        } else if let Some(index) = line.strip_prefix(ITERATION) {
            let index = index.trim().parse();
            let index = index.map_err(|_| lines.syntax_error("the iteration number cannot be read"))?;
            LogStep::Mark { kind: MarkKind::Step, label: log.label("", &lines)?, index }
        } else if let Some(kind) = line.strip_prefix(MICRO_BATCH) {
            let kind = kind.trim().to_owned();
            micro_batches += 1;
            LogStep::Mark { kind: MarkKind::MicroBatch, label: log.label(&kind, &lines)?, index: micro_batches - 1 }
        } else if line.contains(" : ") {
            let label = line.to_owned();
            LogStep::Mark { kind: MarkKind::Phase, label: log.label(&label, &lines)?, index: 0 }
        } else {
            return Err(lines.syntax_error("neither `1|0 pointer size stream` nor a marker"));
        };
        log.push(Nanos::ZERO, ThreadId(0), step, &lines)?;
    }
    Ok(log.into_trace(&name_of(path)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Op, check};

    fn imported(text: &str) -> Result<Trace, TraceError> {
        read(Box::new(text.as_bytes()), Path::new("a.txt"))
    }

    #[test]
    fn calls_and_markers_are_read() {
        let text = "Iteration Index : 2\nmicro-batch : F\n3->mlp Layer : F-start\n1 0x100 512 0\n0 0x100 512 16\n";
        assert!(recognises(text.as_bytes()));
        let trace = imported(text).unwrap();
        check(&trace).unwrap();
        let marks: Vec<_> = trace
            .events
            .iter()
            .filter_map(|event| match event.op {
                Op::Mark { kind, label, index } => Some((kind, trace.tables.labels()[label as usize].raw(), index)),
                _ => None,
            })
            .collect();
        let phase = (MarkKind::Phase, "3->mlp Layer : F-start", 0);
        assert_eq!(marks, [(MarkKind::Step, "", 2), (MarkKind::MicroBatch, "F", 0), phase]);
        assert_eq!(trace.tables.streams(), [0, 16]);
    }

    #[test]
    fn other_lines_are_rejected() {
        let complaint = imported("1 0x100 512 0\nhello\n").unwrap_err().to_string();
        assert_eq!(complaint, "a.txt:2: neither `1|0 pointer size stream` nor a marker");
        assert!(!recognises(b"hello\n") && !recognises(b"1 2\n") && !recognises(b"\xff\xfe"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "([01] (0x)?[0-9a-f]{1,3} [0-9]{1,20} [0-9]\n|.{0,30} : .{0,5}\n|.{0,20}){0,9}") {
            if let Ok(log) = imported(&text) {
                check(&log).unwrap();
            }
        }
    }
}
