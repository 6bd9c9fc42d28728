//! Reads and writes MiniMalloc's CSV of buffers: `id,lower,upper,size`. A buffer is live from `lower` up to but not
//! including `upper`.
//!
//! As in MiniMalloc, `buffer` is accepted for `id`, `begin` and `start` for `lower`, and `end` (the last live moment) for
//! `upper`. Other columns are ignored. In the trace, the frees of a moment come before its allocations, and the call site
//! is the id. When writing, every allocation and free of device memory is one moment; blocks that are never freed live to
//! the end.

use std::{collections::HashMap, io::Write, path::Path};

use super::{
    Op, Source, Trace, TraceBuilder, TraceError, TraceFormat, WriteError,
    file::{self, Input, LineReader},
    for_each_event,
    memory_budget::{MemoryBudget, OutOfBudget},
    pointer_log::name_of,
};
use oomph_base::{Nanos, StreamId, TagId};

/// The MiniMalloc format.
pub(crate) const FORMAT: TraceFormat = TraceFormat {
    name: "minimalloc",
    about: "MiniMalloc's CSV of buffers: id, lower, upper, size",
    recognises,
    open: |path, progress| Ok(Box::new(read(file::open(path, progress)?, path)?)),
};

fn recognises(head: &[u8]) -> bool {
    let line = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    std::str::from_utf8(line).is_ok_and(|line| BufferColumns::of(line).is_ok())
}

/// The positions of the columns.
struct BufferColumns {
    id: usize,
    lower: usize,
    upper: usize,
    /// Whether `upper` is the last live moment, not the first one after it.
    inclusive: bool,
    size: usize,
}

impl BufferColumns {
    fn of(header: &str) -> Result<BufferColumns, &'static str> {
        let names: Vec<&str> = header.split(',').map(str::trim).collect();
        let find = |wanted: &[&str]| names.iter().position(|name| wanted.contains(name));
        let inclusive = find(&["upper"]).is_none();
        Ok(BufferColumns {
            id: find(&["id", "buffer", "buffer_id"]).ok_or("id")?,
            lower: find(&["lower", "begin", "start"]).ok_or("lower")?,
            upper: find(&["upper"]).or_else(|| find(&["end"])).ok_or("upper")?,
            inclusive,
            size: find(&["size"]).ok_or("size")?,
        })
    }
}

struct BufferRow {
    id: Box<str>,
    bytes: u64,
}

/// Reads a list of buffers. `path` names it in errors and in the trace.
pub(crate) fn read(input: Input<'_>, path: &Path) -> Result<Trace, TraceError> {
    let mut lines = LineReader::new(input, path);
    let header = lines.next_text()?.unwrap_or_default().to_owned();
    let missing = |column| lines.syntax_error(format!("no column `{column}`; id, lower, upper and size are needed"));
    let columns = BufferColumns::of(&header).map_err(missing)?;
    let mut budget = MemoryBudget::for_log(path);
    let mut buffers: Vec<BufferRow> = Vec::new();
    // Moment, whether the buffer begins, its index. Sorted, the frees of a moment come first.
    let mut moments: Vec<(u64, bool, u32)> = Vec::new();
    while let Some(line) = lines.next_text()? {
        let fields: Vec<&str> = line.split(',').map(str::trim).take(64).collect();
        let number = |column: usize| fields.get(column).and_then(|field| field.parse::<u64>().ok());
        let numbers = (number(columns.lower), number(columns.upper), number(columns.size));
        let id: Box<str> = fields.get(columns.id).copied().unwrap_or_default().into();
        let (Some(lower), Some(upper), Some(bytes)) = numbers else {
            return Err(lines.syntax_error("lower, upper and size must be whole numbers"));
        };
        let upper = if columns.inclusive { upper.saturating_add(1) } else { upper };
        if lower >= upper {
            return Err(lines.syntax_error(format!("buffer `{id}` ends before it begins")));
        }
        if bytes == 0 {
            return Err(lines.syntax_error(format!("buffer `{id}` has no size")));
        }
        let spent = |spent: OutOfBudget| lines.syntax_error(spent);
        let place = buffers.len() as u32;
        budget.charge(2 * id.len() + 128).map_err(spent)?;
        budget.push(&mut buffers, BufferRow { id, bytes }).map_err(spent)?;
        budget.push(&mut moments, (lower, true, place)).map_err(spent)?;
        budget.push(&mut moments, (upper, false, place)).map_err(spent)?;
    }
    moments.sort_unstable();
    let mut builder = TraceBuilder::new();
    let mut slots = vec![0; buffers.len()];
    let mut now = moments.first().map_or(0, |(moment, ..)| *moment);
    for (moment, is_born, place) in moments {
        let buffer = &buffers[place as usize];
        builder.elapse(Nanos(moment - now));
        now = moment;
        if is_born {
            let site = builder.site(&buffer.id);
            slots[place as usize] = builder.alloc_at(buffer.bytes, StreamId::DEFAULT, TagId(0), site);
        } else {
            builder.free(slots[place as usize]);
        }
    }
    Ok(builder.finish(&name_of(path)))
}

/// Writes the device blocks of a trace as buffers and returns their number.
pub fn write(source: &dyn Source, to: &mut dyn Write) -> Result<u64, WriteError> {
    let mut buffers: Vec<(u64, u64, u64)> = Vec::new();
    let mut live: HashMap<u32, usize> = HashMap::new();
    let mut moment = 0;
    for_each_event(source, |event, _| {
        match event.op {
            Op::Alloc { slot, bytes, .. } => {
                live.insert(slot, buffers.len());
                buffers.push((moment, u64::MAX, bytes));
                moment += 1;
            }
            Op::Free { slot, .. } => {
                if let Some(place) = live.remove(&slot) {
                    buffers[place].1 = moment;
                    moment += 1;
                }
            }
            _ => {}
        }
        Ok::<(), WriteError>(())
    })?;
    writeln!(to, "id,lower,upper,size")?;
    for (id, &(lower, upper, bytes)) in buffers.iter().enumerate() {
        writeln!(to, "{id},{lower},{},{bytes}", upper.min(moment))?;
    }
    to.flush()?;
    Ok(buffers.len() as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{arbitrary::traces, check};

    fn imported(text: &str) -> Result<Trace, TraceError> {
        read(Box::new(text.as_bytes()), Path::new("a.csv"))
    }

    fn told(trace: &Trace) -> Vec<String> {
        let tell = |event: &crate::Event| match event.op {
            Op::Alloc { bytes, site, .. } => format!("alloc {} {bytes}", trace.tables.sites()[site.index()]),
            Op::Free { .. } => "free".to_owned(),
            other => format!("{other:?}"),
        };
        trace.events.iter().map(tell).collect()
    }

    #[test]
    fn frees_come_before_allocations_of_the_same_moment() {
        let trace = imported("id,lower,upper,size\nb,1,2,20\na,0,1,10\n").unwrap();
        assert_eq!(told(&trace), ["alloc a 10", "free", "alloc b 20", "free"]);
    }

    #[test]
    fn other_column_names_are_accepted() {
        let trace = imported("size, buffer,start,end,alignment\n10,a,0,0,8\n20,b,1,4,8\n").unwrap();
        assert_eq!(told(&trace), ["alloc a 10", "free", "alloc b 20", "free"]);
        assert_eq!(trace.events[3].delta_ns, 4);
    }

    #[test]
    fn errors_name_the_line() {
        let complaint = |text: &str| imported(text).unwrap_err().to_string();
        assert_eq!(complaint("id,lower,size\n"), "a.csv:1: no column `upper`; id, lower, upper and size are needed");
        assert_eq!(complaint("id,lower,upper,size\nx,3,3,1\n"), "a.csv:2: buffer `x` ends before it begins");
        assert_eq!(complaint("id,lower,upper,size\nx,3,4,0\n"), "a.csv:2: buffer `x` has no size");
        assert_eq!(complaint("id,lower,upper,size\nx,3\n"), "a.csv:2: lower, upper and size must be whole numbers");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn written_buffers_read_the_same(trace in traces(60)) {
            let mut text = Vec::new();
            write(&trace, &mut text).unwrap();
            let again = read(Box::new(&text[..]), Path::new("a.csv")).unwrap();
            check(&again).unwrap();
            let steps = |trace: &Trace| -> Vec<Option<u64>> {
                let step = |event: &crate::Event| match event.op {
                    Op::Alloc { bytes, .. } => Some(Some(bytes)),
                    Op::Free { .. } => Some(None),
                    _ => None,
                };
                trace.events.iter().filter_map(step).collect()
            };
            let (before, after) = (steps(&trace), steps(&again));
            // Survivors are freed at the end.
            prop_assert_eq!(&after[..before.len()], &before[..]);
            prop_assert!(after[before.len()..].iter().all(Option::is_none));
        }

        #[test]
        fn no_text_makes_the_reader_panic(rows in "(.{0,20}\n|[0-9]{1,3},[0-9]{1,20},[0-9]{1,20},[0-9]{1,20}\n){0,8}") {
            if let Ok(buffers) = imported(&format!("id,lower,upper,size\n{rows}")) {
                check(&buffers).unwrap();
            }
        }
    }
}
