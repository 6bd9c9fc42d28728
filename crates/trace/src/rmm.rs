//! The CSV log of RAPIDS RMM's logging resource adaptor, read and written.
//!
//! ```text
//! Thread,Time,Action,Pointer,Size,Stream
//! 4242,10:15:33:000120,allocate,0x7f0000000000,1024,0x0
//! 4242,10:15:33:000180,allocate failure,(nil),999999999999,0x0
//! 4243,10:15:33:000200,free,0x7f0000000000,1024,0x2
//! ```
//!
//! Threads, streams and times are kept. A failed request becomes a request that is freed at once, with a call site that
//! marks the failure ([`failed_when_recorded`]). Writing turns it into an `allocate failure` row again. Times have no
//! date: a step back of more than twelve hours is midnight.

use std::{
    collections::HashMap,
    io::{self, Write},
    path::Path,
};

use super::{
    Event, Op, Source, Tables, Trace, TraceError, TraceFormat, WriteError, failed_when_recorded,
    file::{self, Input, LineReader},
    for_each_event,
    pointer_log::{LogStep, PointerLog, name_of, parse_handle},
};
use oomph_base::{Nanos, SiteId};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";
const ALLOCATE: &str = "allocate";
const FAILURE: &str = "allocate failure";
const FREE: &str = "free";
const MICROS_PER_DAY: u64 = 24 * 3600 * 1_000_000;

/// The RMM log format.
pub(crate) const FORMAT: TraceFormat = TraceFormat {
    name: "rmm",
    about: "CSV log of RMM's logging resource adaptor",
    recognises: |head| head.starts_with(HEADER.as_bytes()),
    open: |path, progress| Ok(Box::new(read(file::open(path, progress)?, path)?)),
};

/// Reads an RMM log. `path` names it in errors and in the trace.
pub(crate) fn read(input: Input<'_>, path: &Path) -> Result<Trace, TraceError> {
    let mut lines = LineReader::new(input, path);
    if lines.next_text()? != Some(HEADER) {
        return Err(lines.syntax_error(format!("an RMM log begins with `{HEADER}`")));
    }
    let mut log = PointerLog::new(path);
    let mut clock = LogClock::default();
    while let Some(line) = lines.next_text()? {
        let mut fields = line.split(',').map(str::trim);
        let mut field = || fields.next().unwrap_or("");
        let (thread, time, action, pointer, size, stream) = (field(), field(), field(), field(), field(), field());
        let action = action.to_owned();
        let thread = parse_handle(thread).ok_or("Thread");
        let micros = time_of_day(time).ok_or("Time");
        let pointer = parse_hexadecimal(pointer).ok_or("Pointer");
        let bytes = size.parse::<u64>().map_err(|_| "Size");
        let stream = parse_handle(stream).ok_or("Stream");
        let not_a = |column: &str| lines.syntax_error(format!("`{column}` cannot be read; the columns are {HEADER}"));
        let (pointer, bytes) = (pointer.map_err(not_a), bytes.map_err(not_a)?);
        let thread = log.builder.thread_known_as(thread.map_err(not_a)?).map_err(|full| lines.syntax_error(full))?;
        let stream = log.builder.stream_known_as(stream.map_err(not_a)?).map_err(|full| lines.syntax_error(full))?;
        let elapsed = clock.advance(micros.map_err(not_a)?);
        let step = match action.as_str() {
            ALLOCATE => LogStep::Alloc { pointer: pointer?, bytes, stream, site: SiteId(0) },
            FREE => LogStep::Free { pointer: pointer?, bytes, stream },
            FAILURE => LogStep::Failed { bytes, stream },
            other => return Err(lines.syntax_error(format!("unknown action `{other}`"))),
        };
        log.push(elapsed, thread, step, &lines)?;
    }
    Ok(log.into_trace(&name_of(path)))
}

/// Pointers are hexadecimal with or without `0x`.
fn parse_hexadecimal(text: &str) -> Option<u64> {
    parse_handle(text)
        .filter(|_| text.starts_with('0') || text.starts_with('('))
        .or_else(|| u64::from_str_radix(text, 16).ok())
}

/// Microseconds since midnight, from `HH:MM:SS:ffffff` or `HH:MM:SS.ffffff`.
fn time_of_day(text: &str) -> Option<u64> {
    let mut parts = text.splitn(4, [':', '.']);
    let mut part = |most: u64| parts.next()?.parse().ok().filter(|&value: &u64| value < most);
    let (hours, minutes, seconds) = (part(24)?, part(60)?, part(61)?);
    let micros = match parts.next() {
        None => 0,
        Some(digits) if digits.len() <= 6 && digits.bytes().all(|digit| digit.is_ascii_digit()) => {
            digits.parse::<u64>().ok()? * 10_u64.pow(6 - digits.len() as u32)
        }
        Some(_) => return None,
    };
    Some(((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros)
}

#[derive(Default)]
struct LogClock {
    last: Option<u64>,
}

impl LogClock {
    /// Time since the previous row. Rows of different threads may be slightly out of order.
    fn advance(&mut self, micros: u64) -> Nanos {
        let last = self.last.unwrap_or(micros);
        let passed = match micros.checked_sub(last) {
            Some(passed) => passed,
            None if last - micros > MICROS_PER_DAY / 2 => (micros + MICROS_PER_DAY).saturating_sub(last),
            None => return Nanos::ZERO,
        };
        self.last = Some(micros);
        Nanos(passed * 1000)
    }
}

/// Writes a trace as an RMM log and returns the number of rows. Pointers are invented. Marks, work and host memory are left
/// out, because RMM logs do not have them.
pub fn write(source: &dyn Source, to: &mut dyn Write) -> Result<u64, WriteError> {
    writeln!(to, "{HEADER}")?;
    let mut writer = LogWriter { to, pointers: HashMap::new(), next: FIRST_POINTER, nanos: 0, rows: 0, failed: None };
    for_each_event(source, |event, tables| Ok::<(), WriteError>(writer.event(event, tables)?))?;
    writer.to.flush()?;
    Ok(writer.rows)
}

const FIRST_POINTER: u64 = 0x7f00_0000_0000;

struct LogWriter<'a> {
    to: &'a mut dyn Write,
    /// Pointer and size of the block in each slot.
    pointers: HashMap<u32, (u64, u64)>,
    next: u64,
    nanos: u64,
    rows: u64,
    /// The slot of a request that failed when it was recorded. Its free is not written.
    failed: Option<u32>,
}

impl LogWriter<'_> {
    fn event(&mut self, event: &Event, tables: &Tables) -> io::Result<()> {
        self.nanos = self.nanos.saturating_add(event.delta_ns.into());
        let thread = tables.threads().get(event.thread.index()).copied().unwrap_or(0);
        let handle = |stream: oomph_base::StreamId| tables.streams().get(stream.index()).copied().unwrap_or(0);
        match event.op {
            Op::Alloc { slot, bytes, stream, site, .. } => {
                if tables.sites().get(site.index()).is_some_and(failed_when_recorded) {
                    self.failed = Some(slot);
                    return self.row(thread, FAILURE, 0, bytes, handle(stream));
                }
                let pointer = self.next;
                self.next = self.next.wrapping_add(oomph_base::round_up(bytes, 256));
                self.pointers.insert(slot, (pointer, bytes));
                self.row(thread, ALLOCATE, pointer, bytes, handle(stream))
            }
            Op::Free { slot, .. } if self.failed == Some(slot) => {
                self.failed = None;
                Ok(())
            }
            Op::Free { slot, stream } => match self.pointers.remove(&slot) {
                Some((pointer, bytes)) => self.row(thread, FREE, pointer, bytes, handle(stream)),
                None => Ok(()),
            },
            Op::Idle { nanos } => {
                self.nanos = self.nanos.saturating_add(nanos);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn row(&mut self, thread: u64, action: &str, pointer: u64, bytes: u64, stream: u64) -> io::Result<()> {
        let micros = self.nanos / 1000 % MICROS_PER_DAY;
        let (seconds, fraction) = (micros / 1_000_000, micros % 1_000_000);
        let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        self.rows += 1;
        write!(self.to, "{thread},{hours:02}:{minutes:02}:{seconds:02}:{fraction:06},{action},")?;
        match pointer {
            0 => write!(self.to, "(nil)")?,
            pointer => write!(self.to, "{pointer:#x}")?,
        }
        writeln!(self.to, ",{bytes},{stream:#x}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{arbitrary::traces, check};

    fn imported(log: &str) -> Result<Trace, TraceError> {
        read(Box::new(log.as_bytes()), Path::new("log.csv"))
    }

    fn log(rows: &str) -> Trace {
        imported(&format!("{HEADER}\n{rows}")).unwrap()
    }

    #[test]
    fn threads_streams_times_and_failures_are_kept() {
        let trace = log("7,10:00:00:000001,allocate,0x100,1024,0x0\n\
             8,10:00:00:000003,allocate failure,(nil),4096,0x2\n\
             8,10:00:00.5,free,0x100,1024,0x2\n");
        check(&trace).unwrap();
        let kinds: Vec<_> = trace.events.iter().map(|event| event.op.kind().name()).collect();
        assert_eq!(kinds, ["alloc", "alloc", "free", "free"]);
        assert_eq!(trace.tables.threads(), [0, 7, 8]);
        assert_eq!(trace.tables.streams(), [0, 2]);
        assert_eq!(trace.events[1].delta_ns, 2_000);
        assert_eq!(trace.events[3].delta_ns, 499_997_000);
        let Op::Alloc { site, .. } = trace.events[1].op else { panic!("{:?}", trace.events[1]) };
        assert!(failed_when_recorded(&trace.tables.sites()[site.index()]));
    }

    #[test]
    fn midnight_passes() {
        let trace = log("1,23:59:59:999999,allocate,0x1,8,0x0\n1,00:00:00:000001,free,0x1,8,0x0\n");
        assert_eq!(trace.events[1].delta_ns, 2_000);
    }

    #[test]
    fn calls_without_effect_are_left_out() {
        let rows = "1,00:00:00,free,0x100,64,0x0\n1,00:00:00,free,0x100,64,0x0\n\
             1,00:00:00,allocate,0x200,0,0x0\n1,00:00:00,allocate,0x300,8,0x0\n1,00:00:00,allocate,0x300,8,0x0\n";
        let trace = log(rows);
        check(&trace).unwrap();
        let kinds: Vec<_> = trace.events.iter().map(|event| event.op.kind().name()).collect();
        assert_eq!(kinds, ["mark", "alloc", "mark", "free", "alloc", "alloc"]);
    }

    #[test]
    fn errors_name_line_and_column() {
        let complaint = |row: &str| imported(&format!("{HEADER}\n{row}")).unwrap_err().to_string();
        assert_eq!(
            complaint("1,00:00:00,allocate,0x1,many,0x0"),
            format!("log.csv:2: `Size` cannot be read; the columns are {HEADER}")
        );
        assert!(complaint("1,25:00:00,allocate,0x1,1,0x0").contains("`Time`"));
        assert!(complaint("1,00:00:00,allocate,pointer,1,0x0").contains("`Pointer`"));
        assert!(complaint("1,00:00:00,borrow,0x1,1,0x0").contains("unknown action `borrow`"));
        assert!(imported("a,b\n").unwrap_err().to_string().starts_with("log.csv:1: an RMM log begins with"));
    }

    /// What an RMM log can carry of a trace.
    fn essence(trace: &Trace) -> Vec<(u64, bool, u64, u64)> {
        let tables = &trace.tables;
        let mut sizes = HashMap::new();
        let mut essence = Vec::new();
        for event in &trace.events {
            let thread = tables.threads()[event.thread.index()];
            match event.op {
                Op::Alloc { slot, bytes, stream, .. } => {
                    sizes.insert(slot, bytes);
                    essence.push((thread, true, bytes, tables.streams()[stream.index()]));
                }
                Op::Free { slot, stream } => {
                    essence.push((thread, false, sizes[&slot], tables.streams()[stream.index()]));
                }
                _ => {}
            }
        }
        essence
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_written_log_reads_the_same(trace in traces(60)) {
            let mut log = Vec::new();
            write(&trace, &mut log).unwrap();
            let again = read(Box::new(&log[..]), Path::new("log.csv")).unwrap();
            prop_assert_eq!(essence(&again), essence(&trace));
        }

        #[test]
        fn no_text_makes_the_reader_panic(rows in "([0-9]{1,3},[0-9:.]{0,16},(allocate|free|allocate failure|x),(0x)?[0-9a-f]{0,17},[0-9]{0,21},[0-9a-fx]{0,4}\n|.{0,40}\n){0,8}") {
            if let Ok(log) = imported(&format!("{HEADER}\n{rows}")) {
                check(&log).unwrap();
            }
        }
    }

    #[test]
    fn failures_survive_being_written() {
        let rows =
            "1,00:00:00:000000,allocate failure,(nil),4096,0x2\n1,00:00:01:000000,allocate,0x7f0000000000,8,0x0\n";
        let mut written = Vec::new();
        assert_eq!(write(&log(rows), &mut written).unwrap(), 2);
        assert_eq!(String::from_utf8(written).unwrap(), format!("{HEADER}\n{rows}"));
    }
}
