//! Programs of allocator calls in the oracle's language.

use std::{fmt, str::FromStr};

use oomph::pytorch::Release;

/// A device, the settings at start, and calls.
#[derive(Clone, Debug)]
pub struct Program {
    /// The release of the oracle that it is for.
    pub release: Release,
    pub total: u64,
    /// What `cudaMemGetInfo` calls the total.
    pub memory_total: u64,
    pub capacity: u64,
    pub downwards: bool,
    pub environment: String,
    pub calls: Vec<Call>,
}

/// Lines before the calls.
pub const HEADER_LINES: usize = 2;

/// One call. Streams are named by their handle.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    Configure(String),
    Fraction(f64),
    Alloc { id: u64, bytes: u64, stream: u64 },
    Free { id: u64 },
    UsedOn { id: u64, stream: u64 },
    Busy { stream: u64 },
    Idle { stream: u64 },
    EmptyCache,
    PoolRetain { pool: u64, use_on_oom: bool },
    PoolRelease { pool: u64 },
    PoolBegin { pool: u64, stream: Option<u64> },
    PoolEnd { pool: u64 },
    CaptureBegin,
    CaptureEnd,
}

impl Default for Program {
    fn default() -> Self {
        Program {
            release: Release::DEFAULT,
            total: 80 << 30,
            memory_total: 80 << 30,
            capacity: 80 << 30,
            downwards: false,
            environment: String::new(),
            calls: Vec::new(),
        }
    }
}

impl Program {
    /// The shortest program, found by removing calls, for which `differs` is still true.
    pub fn shrunk(&self, differs: impl Fn(&Program) -> bool) -> Program {
        let mut best = self.clone();
        let mut chunk = best.calls.len().div_ceil(2);
        while chunk > 0 {
            let mut start = 0;
            while start < best.calls.len() {
                let mut candidate = best.clone();
                candidate.calls.drain(start..(start + chunk).min(best.calls.len()));
                if differs(&candidate) {
                    best = candidate;
                } else {
                    start += chunk;
                }
            }
            chunk /= 2;
        }
        best
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.downwards { "down" } else { "up" };
        writeln!(f, "device {} {} {direction} {}", self.total, self.capacity, self.memory_total)?;
        writeln!(f, "environment {}", self.environment)?;
        self.calls.iter().try_for_each(|call| writeln!(f, "{call}"))
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Call::Configure(text) => write!(f, "conf {text}"),
            Call::Fraction(fraction) => write!(f, "frac {fraction}"),
            Call::Alloc { id, bytes, stream } => write!(f, "m {id} {bytes} {stream}"),
            Call::Free { id } => write!(f, "f {id}"),
            Call::UsedOn { id, stream } => write!(f, "rs {id} {stream}"),
            Call::Busy { stream } => write!(f, "busy {stream}"),
            Call::Idle { stream } => write!(f, "idle {stream}"),
            Call::EmptyCache => write!(f, "e"),
            Call::PoolRetain { pool, use_on_oom } => write!(f, "cp {pool} {}", u8::from(*use_on_oom)),
            Call::PoolRelease { pool } => write!(f, "rp {pool}"),
            Call::PoolBegin { pool, stream: Some(stream) } => write!(f, "bp {pool} {stream}"),
            Call::PoolBegin { pool, stream: None } => write!(f, "bp {pool} all"),
            Call::PoolEnd { pool } => write!(f, "ep {pool}"),
            Call::CaptureBegin => write!(f, "cb"),
            Call::CaptureEnd => write!(f, "ce"),
        }
    }
}

impl FromStr for Program {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut program = Program::default();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            if word == "device" {
                let parts: Vec<&str> = rest.split(' ').collect();
                program.total = parts[0].parse().map_err(|_| line.to_owned())?;
                program.capacity = parts[1].parse().map_err(|_| line.to_owned())?;
                program.downwards = parts[2] == "down";
                let memory_total = parts.get(3).map_or(Ok(program.total), |part| part.parse());
                program.memory_total = memory_total.map_err(|_| line.to_owned())?;
            } else if word == "environment" {
                program.environment = rest.to_owned();
            } else {
                program.calls.push(line.parse()?);
            }
        }
        Ok(program)
    }
}

impl FromStr for Call {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let parts: Vec<&str> = rest.split(' ').collect();
        let number = |place: usize| {
            parts.get(place).and_then(|part| part.parse::<u64>().ok()).ok_or_else(|| format!("cannot read '{line}'"))
        };
        Ok(match word {
            "conf" => Call::Configure(rest.to_owned()),
            "frac" => Call::Fraction(rest.parse().map_err(|_| line.to_owned())?),
            "m" => Call::Alloc { id: number(0)?, bytes: number(1)?, stream: number(2)? },
            "f" => Call::Free { id: number(0)? },
            "rs" => Call::UsedOn { id: number(0)?, stream: number(1)? },
            "busy" => Call::Busy { stream: number(0)? },
            "idle" => Call::Idle { stream: number(0)? },
            "e" => Call::EmptyCache,
            "cp" => Call::PoolRetain { pool: number(0)?, use_on_oom: number(1)? == 1 },
            "rp" => Call::PoolRelease { pool: number(0)? },
            "bp" => {
                Call::PoolBegin { pool: number(0)?, stream: if parts[1] == "all" { None } else { Some(number(1)?) } }
            }
            "ep" => Call::PoolEnd { pool: number(0)? },
            "cb" => Call::CaptureBegin,
            "ce" => Call::CaptureEnd,
            _ => return Err(format!("no such call: {line}")),
        })
    }
}

#[test]
fn programs_are_read_back_as_written() {
    let program = super::generate::random_program(Release::NEWEST, 7, 7);
    let again: Program = program.to_string().parse().unwrap();
    assert_eq!(again.to_string(), program.to_string());
}
