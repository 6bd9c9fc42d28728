//! Small values travel between the processes of a rehearsal through files in one folder (`OOMPH_SHADOW_EXCHANGE`).
//!
//! Each rank of a communicator appends what it contributes to a file of its own, and never waits. Readers look for a
//! record by its number and wait until it is there.

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::state::locked;

/// PyTorch's own limit for a collective of NCCL (`kProcessGroupNCCLDefaultTimeout`).
const LONGEST_WAIT: Duration = Duration::from_secs(600);
const HEADER: u64 = 16;
/// The length of a contribution that is not known.
const UNKNOWN: u64 = u64::MAX;

/// Why a contribution did not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotReceived {
    /// Nothing was written in time.
    TimedOut,
    /// A signal arrived: the program must be able to handle it.
    Interrupted,
}

/// The files of one communicator.
pub struct Exchange {
    folder: PathBuf,
    identity: u64,
    writers: Mutex<HashMap<Channel, File>>,
    readers: Mutex<HashMap<Channel, ChannelReader>>,
}

/// Which file: contributions of a rank to collectives, or messages between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    Collectives { from: i32 },
    Messages { from: i32, to: i32 },
}

/// How long a wait goes on after a signal, which Python handles only when the call returns.
const AFTER_SIGNAL: Duration = Duration::from_secs(2);

impl Exchange {
    pub fn new(folder: &Path, identity: u64) -> Exchange {
        Exchange { folder: folder.to_owned(), identity, writers: Mutex::default(), readers: Mutex::default() }
    }

    fn path(&self, channel: Channel) -> PathBuf {
        let name = match channel {
            Channel::Collectives { from } => format!("{:016x}-{from}", self.identity),
            Channel::Messages { from, to } => format!("{:016x}-{from}-{to}", self.identity),
        };
        self.folder.join(name)
    }

    /// Writes a contribution; `None` where it is not known. One that cannot be written is missed by the others.
    pub fn post(&self, channel: Channel, number: u64, contribution: Option<&[u8]>) {
        let mut writers = locked(&self.writers);
        let file = match writers.entry(channel) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let opened = OpenOptions::new().create(true).append(true).open(self.path(channel));
                let Ok(file) = opened else { return };
                entry.insert(file)
            }
        };
        let length = contribution.map_or(UNKNOWN, |bytes| bytes.len() as u64);
        let mut record = [number.to_le_bytes(), length.to_le_bytes()].concat();
        record.extend_from_slice(contribution.unwrap_or_default());
        let _ = file.write_all(&record);
    }

    /// Waits for a contribution: `Ok(None)` where its rank does not know it.
    pub fn wait(&self, channel: Channel, number: u64) -> Result<Option<Vec<u8>>, NotReceived> {
        let began = Instant::now();
        let mut pause = Duration::from_micros(100);
        let mut interrupted: Option<Instant> = None;
        loop {
            let found = {
                let mut readers = locked(&self.readers);
                let path = || self.path(channel);
                readers.entry(channel).or_insert_with(|| ChannelReader::new(path())).find(number)
            };
            match found {
                Some(contribution) => return Ok(contribution),
                None if began.elapsed() > LONGEST_WAIT => return Err(NotReceived::TimedOut),
                None if interrupted.is_some_and(|since| since.elapsed() > AFTER_SIGNAL) => {
                    return Err(NotReceived::Interrupted);
                }
                None if sleep(pause) => pause = (pause * 2).min(Duration::from_millis(10)),
                // A signal that only ends a child process must not end the wait: other ranks would read another value.
                None => interrupted = interrupted.or(Some(Instant::now())),
            }
        }
    }
}

/// Where the records of a file are, as far as it was read.
struct ChannelReader {
    path: PathBuf,
    file: Option<File>,
    read: u64,
    records: HashMap<u64, (u64, u64)>,
}

impl ChannelReader {
    fn new(path: PathBuf) -> ChannelReader {
        ChannelReader { path, file: None, read: 0, records: HashMap::new() }
    }

    /// A record, if it is there in full.
    fn find(&mut self, number: u64) -> Option<Option<Vec<u8>>> {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        let file = self.file.as_ref()?;
        let written = file.metadata().map_or(0, |metadata| metadata.len());
        let mut header = [0u8; HEADER as usize];
        while !self.records.contains_key(&number) && self.read + HEADER <= written {
            file.read_exact_at(&mut header, self.read).ok()?;
            let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or_default());
            let length = if word(8) == UNKNOWN { 0 } else { word(8) };
            if self.read + HEADER + length > written {
                return None;
            }
            self.records.insert(word(0), (self.read + HEADER, word(8)));
            self.read += HEADER + length;
        }
        let &(start, length) = self.records.get(&number)?;
        if length == UNKNOWN {
            return Some(None);
        }
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, start).ok()?;
        Some(Some(bytes))
    }
}

/// Whether the time passed without a signal. Rust's own `sleep` would go on sleeping.
fn sleep(time: Duration) -> bool {
    unsafe extern "C" {
        fn nanosleep(time: *const [i64; 2], rest: *mut [i64; 2]) -> i32;
    }
    let time = [time.as_secs() as i64, i64::from(time.subsec_nanos())];
    // SAFETY: `timespec` is two 64-bit words on x86-64 Linux; the second pointer may be null.
    unsafe { nanosleep(&raw const time, std::ptr::null_mut()) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_by_number_in_any_order() {
        let folder = std::env::temp_dir().join(format!("oomph-exchange-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (one, other) = (Exchange::new(&folder, 7), Exchange::new(&folder, 7));
        let channel = Channel::Collectives { from: 3 };
        one.post(channel, 0, Some(&[1, 2, 3]));
        one.post(channel, 1, None);
        one.post(channel, 4, Some(&[]));
        assert_eq!(other.wait(channel, 4), Ok(Some(vec![])));
        assert_eq!((other.wait(channel, 0), other.wait(channel, 1)), (Ok(Some(vec![1, 2, 3])), Ok(None)));
        let late = std::thread::spawn(move || other.wait(Channel::Messages { from: 3, to: 0 }, 0));
        one.post(Channel::Messages { from: 3, to: 0 }, 0, Some(&[9]));
        assert_eq!(late.join().unwrap(), Ok(Some(vec![9])));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
