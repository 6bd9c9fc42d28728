//! The native file format, `.oomph`: text, one event per line.
//!
//! ```text
//! oomph-trace 1 "two layers"                      # version, and the trace's name
//! stream 1 0x10                                   # definitions come before their first use,
//! tag 1 activation layer=3                        # numbered in order
//! site 1 "model.py:12"
//! label 1 "forward"
//! shape 0 {"kind":"elementwise","bytes":4096}
//! mark phase 0 label=1
//! alloc 1 1048576 stream=1 tag=1 site=1 +1200     # block 1, 1 MiB, 1.2 us after the previous event
//! work 0 1 stream=1                               # shape 0 on block 1
//! free 1 thread=0
//! use_pool 0 1                                    # requests use the private pool (0, 1); 0 0 is the default pool
//! release_pool 0 1 trims=1                        # the pool is given up, and its free memory goes back at once
//! end 6
//! ```
//!
//! - A line is the kind of event ([`OpKind::name`](crate::OpKind::name)), its numbers, and named fields in any order. `#`
//!   begins a comment. A line has at most 1 MiB.
//! - A missing field is 0, with two exceptions: a `free` is on the stream of its block, and `thread` is that of the
//!   previous event. `+` is the time since the previous event, in nanoseconds.
//! - Stream 0 is the default stream, thread 0 the main thread; tag, site and label 0 mean "none".
//! - Block ids ascend and are unique; the reader turns them into dense slots. Stream events are renumbered in the order
//!   of their first recording.
//! - The last line is `end`, so that a truncated file is noticed; the count after it is optional.
//! - Texts are JSON strings. Gzip is recognised by content.
//!
//! Memory use of reader and writer follows the live blocks, the tables and the distinct stream events, not the file.
//!
//! A trace of five million events with tags, sites and times took 32 bytes per line, 11 compressed.

mod line;
mod reader;
mod writer;

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

use reader::NativeReader;
pub(crate) use writer::{NativeWriter, TooLong};

use super::{EventReader, OpKind, Source, TraceError, TraceFormat};

/// The name of the format.
pub const NAME: &str = "oomph";

/// The native format.
pub(crate) const FORMAT: TraceFormat = TraceFormat {
    name: NAME,
    about: "the native format: text, one event per line",
    recognises: |head| {
        head.strip_prefix(FIRST_WORD.as_bytes())
            .is_some_and(|rest| rest.first().is_none_or(|byte| byte.is_ascii_whitespace()))
    },
    open: |path, _| Ok(Box::new(NativeFile::new(path)?)),
};

const FIRST_WORD: &str = "oomph-trace";
const VERSION: u64 = 1;

/// The beginning of every native trace.
pub(crate) fn first_line() -> String {
    format!("{FIRST_WORD} {VERSION}")
}

/// A native trace on disk.
struct NativeFile {
    path: PathBuf,
    name: String,
    /// Known after the file was read for it once.
    uses_pools: OnceLock<bool>,
}

impl NativeFile {
    /// Reads only the first line.
    fn new(path: &Path) -> Result<NativeFile, TraceError> {
        let name = match NativeReader::open(path)?.name {
            name if name.is_empty() => plain_name(path),
            name => name,
        };
        Ok(NativeFile { path: path.to_owned(), name, uses_pools: OnceLock::new() })
    }
}

impl Source for NativeFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn uses_pools(&self) -> Result<bool, TraceError> {
        if let Some(&known) = self.uses_pools.get() {
            return Ok(known);
        }
        let mut reader = self.open()?;
        let found = loop {
            match reader.next_chunk()?.0 {
                [] => break false,
                events if events.iter().any(|event| event.op.kind() == OpKind::UsePool) => break true,
                _ => {}
            }
        };
        Ok(*self.uses_pools.get_or_init(|| found))
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        Ok(Box::new(NativeReader::open(&self.path)?))
    }
}

/// The file name without its extensions.
fn plain_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.strip_suffix(".oomph").unwrap_or(name).to_owned()
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, fs, io::Write};

    use proptest::prelude::*;

    use super::*;
    use crate::{BlockSlot, CHUNK_EVENTS, Event, NO_OPERAND, Op, Trace, arbitrary::traces};
    use oomph_base::NoProgress;

    const EXAMPLE: &str = r#"oomph-trace 1 "two layers"      # version, and the trace's name
stream 1 0x10
tag 1 activation layer=3
site 1 "model.py:12 # \"forward\"\n"
label 1 "forward"
shape 0 {"kind":"elementwise","bytes":4096} # as JSON

thread 1 77
mark phase 0 label=1
alloc 10 1048576 stream=1 tag=1 site=1 +1200
	host_alloc 12 64 thread=1   # ids ascend, with gaps as one likes
work 0 10 12 stream=1
free 10
end 5"#;

    /// What reading `text` gives: the trace, or the complaint without the file's name.
    fn read(text: impl AsRef<[u8]>) -> Result<Trace, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.oomph");
        fs::write(&path, text).unwrap();
        let outcome = crate::open(&path, &NoProgress).and_then(|source| Trace::read(&*source));
        outcome.map_err(|error| error.to_string().replace(&path.display().to_string(), "a"))
    }

    /// The complaint about a line after a few sound ones.
    fn complaint(line: impl AsRef<[u8]>) -> String {
        let sound =
            "oomph-trace 1\nstream 1 16\nalloc 3 8 stream=1\nhost_alloc 4 8\nshape 0 {\"kind\":\"spin\",\"nanos\":1}\n";
        let complaint = read([sound.as_bytes(), line.as_ref(), b"\nend"].concat()).unwrap_err();
        complaint.strip_prefix("a:6: ").map(str::to_owned).unwrap_or(complaint)
    }

    /// Slots and events numbered as a reader numbers them.
    fn renumbered(events: &[Event]) -> Vec<Event> {
        let (mut slots, mut recorded) = (HashMap::new(), HashMap::new());
        let mut vacant: Vec<BlockSlot> = Vec::new();
        let mut canonical = events.to_vec();
        for event in &mut canonical {
            match &mut event.op {
                Op::Alloc { slot, .. } | Op::HostAlloc { slot, .. } => {
                    let given = vacant.pop().unwrap_or(slots.len() as BlockSlot);
                    slots.insert(*slot, given);
                    *slot = given;
                }
                Op::Free { slot, .. } | Op::HostFree { slot } => {
                    let given = slots.remove(slot).unwrap();
                    vacant.push(given);
                    *slot = given;
                }
                Op::Use { slot, .. } => *slot = slots[slot],
                Op::Work { operands, .. } => {
                    operands.iter_mut().filter(|slot| **slot != NO_OPERAND).for_each(|slot| *slot = slots[slot]);
                }
                Op::EventRecord { event, .. } | Op::EventWait { event, .. } => {
                    let next = recorded.len() as u32;
                    *event = *recorded.entry(*event).or_insert(next);
                }
                _ => {}
            }
        }
        canonical
    }

    fn same_tables(a: &crate::Tables, b: &crate::Tables) {
        assert_eq!(a.tags(), b.tags());
        assert_eq!(a.sites(), b.sites());
        assert_eq!(a.labels(), b.labels());
        assert_eq!(a.shapes(), b.shapes());
        assert_eq!(a.streams(), b.streams());
        assert_eq!(a.threads(), b.threads());
    }

    #[test]
    fn an_example_is_read() {
        let trace = read(EXAMPLE).unwrap();
        assert_eq!(trace.name, "two layers");
        assert_eq!(trace.events.len(), 5);
        assert_eq!(trace.tables.sites()[1].raw(), "model.py:12 # \"forward\"\n");
        assert_eq!((trace.events[1].delta_ns, trace.events[1].thread.0), (1200, 0));
        assert_eq!(trace.events[4].thread.0, 1, "the thread stays until another is named");
        let Op::Free { slot: 0, stream } = trace.events[4].op else { panic!("{:?}", trace.events[4]) };
        assert_eq!(stream.0, 1, "a free is on the block's own stream");
        assert_eq!(read(EXAMPLE.replace('\n', "\r\n")).unwrap().events, trace.events);
    }

    #[test]
    fn an_example_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("b.oomph");
        crate::write(&read(EXAMPLE).unwrap(), &path).unwrap();
        insta::assert_snapshot!(fs::read_to_string(&path).unwrap(), @r#"
        oomph-trace 1 "two layers"
        stream 1 0x10
        thread 1 0x4d
        tag 1 activation layer=3
        site 1 "model.py:12 # \"forward\"\n"
        label 1 "forward"
        shape 0 {"kind":"elementwise","bytes":4096}
        mark phase 0 label=1
        alloc 1 1048576 stream=1 tag=1 site=1 +1200
        host_alloc 2 64 thread=1
        work 0 1 2 stream=1
        free 1
        end 5
        "#);
    }

    #[test]
    fn a_trace_without_a_name_is_named_after_its_file() {
        assert_eq!(read("oomph-trace 1\nend").unwrap().name, "a");
        assert_eq!(plain_name(Path::new("runs/gpt2.oomph.gz")), "gpt2");
    }

    #[test]
    fn slots_are_reused() {
        let mut text = "oomph-trace 1\n".to_owned();
        for id in 0..3 * CHUNK_EVENTS {
            text += &format!("alloc {id} 8\nfree {id}\n");
        }
        let trace = read(text + "end\n").unwrap();
        assert_eq!(trace.events.len(), 6 * CHUNK_EVENTS);
        assert!(
            trace.events.iter().all(|event| matches!(event.op, Op::Alloc { slot: 0, .. } | Op::Free { slot: 0, .. }))
        );
    }

    #[test]
    fn errors_suggest_the_nearest_word() {
        assert_eq!(complaint("aloc 5 8"), "'aloc' is not a word that a line can begin with; did you mean 'alloc'?");
        assert_eq!(complaint("alloc 5 8 steam=1"), "'steam' is not a field of this event; did you mean 'stream'?");
        assert_eq!(complaint("mark stepp 1"), "'stepp' is not a kind of mark; did you mean 'step'?");
        assert_eq!(complaint("tag 1 optimiser"), "'optimiser' is not a category; did you mean 'optimizer'?");
        assert_eq!(complaint("free 3 tag=0"), "'tag' is not a field of this event");
    }

    #[test]
    fn contradictory_lines_are_rejected() {
        for (line, reason) in [
            ("alloc 5 0", "a request for zero bytes"),
            ("alloc 4 8", "block 4 exists already; ids must be unique"),
            ("alloc 2 8", "block 2 after block 4: ids must ascend"),
            ("free 9", "block 9 was never allocated before this line"),
            ("free 2", "block 2 is not live: it was freed already or never allocated"),
            ("free 4", "block 4 is pinned host memory: free it with host_free"),
            ("host_free 3", "block 3 is device memory: free it with free"),
            ("use 4", "`use` is for device memory, and this block is pinned host memory"),
            ("use 3 stream=2", "stream 2 is not defined above this line"),
            ("alloc 5 8 site=1", "site 1 is not defined above this line"),
            ("alloc 5 8 tag=1", "tag 1 is not defined above this line"),
            ("free 3 thread=1", "thread 1 is not defined above this line"),
            ("mark step 1 label=1", "label 1 is not defined above this line"),
            ("work 1", "shape 1 is not defined above this line"),
            ("work 0 3 3 3 3 3", "work has at most four operands"),
            ("event_wait 1", "event 1 was never recorded before this line"),
            ("site 2 \"x\"", "site 2 is out of order: the next one is site 1"),
            ("stream 2 16", "stream 2 is the same as stream 1"),
            ("end 3", "the file should have 3 events, and has 2"),
            ("end\nidle 1", "a:7: no line may follow `end`"),
        ] {
            assert_eq!(complaint(line), reason, "{line}");
        }
    }

    #[test]
    fn malformed_lines_are_rejected() {
        for (line, reason) in [
            ("alloc", "the block's id is missing"),
            ("alloc five 8", "the block's id must be a number, not 'five'"),
            ("alloc 5 8 8", "'8' is unexpected here"),
            ("alloc 5 8 stream=1 stream=1", "stream is given twice"),
            ("alloc 5 8 stream=70000", "'70000' is too large for stream"),
            ("idle 1 +5000000000", "'5000000000' is too large for the time since the previous event, in ns"),
            ("end 2 2", "'2' is unexpected here"),
            ("tag 1 input layer=x", "the layer must be a number, not 'x'"),
        ] {
            assert_eq!(complaint(line), reason, "{line}");
        }
        assert!(complaint("site 1 \"open").starts_with("the call site cannot be read as JSON: EOF"));
        assert!(complaint("shape 1 {\"kind\":\"dance\"}").contains("unknown variant `dance`"));
        assert_eq!(complaint(b"site 1 \"\xff\""), "not text at byte 9 of the line");
        assert_eq!(complaint(vec![b'x'; 3 << 20]), "the line is longer than 1048576 bytes");
    }

    #[test]
    fn other_files_are_rejected() {
        let known = crate::FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
        let unknown =
            format!("a: not a trace in a known format (known: {known}); a native one begins with `oomph-trace 1`");
        assert_eq!(read("").unwrap_err(), "a: the file is empty");
        assert_eq!(read("hello").unwrap_err(), unknown);
        assert_eq!(read("oomph-tracer 1").unwrap_err(), unknown);
        let binary = format!("a: binary data in an unknown format (known: {known})");
        assert_eq!(read(b"\x7fELF\x00\xff").unwrap_err(), binary);
        assert_eq!(
            read("oomph-trace 7").unwrap_err(),
            "a: written in version 7 of the trace format; this program reads version 1"
        );
        assert_eq!(read("oomph-trace").unwrap_err(), "a:1: the version is missing");
        assert_eq!(read("oomph-trace 1\nidle 3\n").unwrap_err(), "a: the line `end` is missing: the file is truncated");
    }

    #[test]
    fn folders_and_missing_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path| crate::open(path, &NoProgress).err().unwrap().to_string();
        assert!(refused(folder.path()).ends_with(": this is a folder, not a trace"));
        assert!(refused(&folder.path().join("none.oomph")).contains("none.oomph: No such file"));
        let into_folder = crate::write(&Trace::default(), folder.path()).unwrap_err();
        assert!(into_folder.to_string().contains("directory"), "{into_folder}");
    }

    #[test]
    fn truncated_and_damaged_files_are_rejected() {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(EXAMPLE.as_bytes()).unwrap();
        let whole = encoder.finish().unwrap();
        assert_eq!(read(&whole).unwrap().events.len(), 5);
        for length in [3, 12, whole.len() / 2, whole.len() - 1] {
            assert!(read(&whole[..length]).unwrap_err().ends_with("the file is truncated"), "{length}");
        }
        let mut damaged = whole;
        let checksum = damaged.len() - 6;
        damaged[checksum] ^= 1;
        assert!(read(&damaged).unwrap_err().starts_with("a: the compressed data are damaged"));
    }

    #[test]
    fn an_invalid_trace_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bad.oomph");
        let events = vec![Event::of(Op::HostFree { slot: 0 })];
        let error = crate::write(&Trace { events, ..Trace::default() }, &path).unwrap_err();
        assert_eq!(error.to_string(), "event 0: free of slot 0 before any block was allocated there");
        let mut wordy = crate::TraceBuilder::new();
        wordy.mark(crate::MarkKind::Phase, &"x".repeat(2 << 20), 0);
        let error = crate::write(&wordy.finish("wordy"), &path).unwrap_err();
        assert!(error.to_string().ends_with("label is longer than a line can be"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    proptest! {
        #[test]
        fn a_written_trace_reads_the_same(trace in traces(120), compressed in any::<bool>()) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(if compressed { "a.oomph.gz" } else { "a.oomph" });
            prop_assert_eq!(crate::write(&trace, &path).unwrap(), trace.events.len() as u64);
            let again = Trace::read(&*crate::open(&path, &NoProgress).unwrap()).unwrap();
            prop_assert_eq!(&again.events, &renumbered(&trace.events));
            prop_assert_eq!(&*again.name, if trace.name.is_empty() { "a".into() } else { oomph_base::escaped(&trace.name) });
            same_tables(&again.tables, &trace.tables);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in any::<Vec<u8>>()) {
            read(&bytes).unwrap_err();
            // Whether this one is a trace is up to chance; it must not panic.
            let _ = read([b"oomph-trace 1\n", &bytes[..], b"\nend"].concat());
            let _ = read([&[0x1f, 0x8b], &bytes[..]].concat());
        }

        #[test]
        fn a_changed_file_is_rejected_or_valid(
            trace in traces(30), place in any::<prop::sample::Index>(), slip in any::<u8>()
        ) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.oomph");
            crate::write(&trace, &path).unwrap();
            let mut bytes = fs::read(&path).unwrap();
            *place.get_mut(&mut bytes) = slip;
            if let Ok(trace) = read(&bytes) {
                crate::check(&trace).unwrap();
            }
        }
    }
}
