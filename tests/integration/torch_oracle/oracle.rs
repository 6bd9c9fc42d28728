//! The process that runs programs on the real allocator.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use oomph::pytorch::Release;

use super::program::Program;

/// The path of the oracle.
pub struct Oracle {
    path: PathBuf,
    /// The release of its allocator.
    pub release: Release,
}

/// The output of one program, line by line.
#[derive(Debug, Default)]
pub struct Answer {
    pub lines: Vec<String>,
    /// Whether the program ran to its end.
    pub finished: bool,
}

impl Oracle {
    /// The oracle named by the environment, or the one in the default folder.
    pub fn find() -> Option<Oracle> {
        let usual = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/torch-oracle/oracle");
        let path = env::var_os("OOMPH_TORCH_ORACLE").map_or_else(usual, PathBuf::from);
        let version = fs::read_to_string(path.with_file_name("torch").join("version.py")).ok()?;
        let number = version.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
        let release = number.trim_matches('\'').parse().unwrap_or_else(|error| panic!("{error}"));
        path.is_file().then_some(Oracle { path, release })
    }

    /// The folder of the oracle.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// Runs programs, each on a new allocator.
    pub fn run(&self, programs: &[Program]) -> Vec<Answer> {
        let mut text = String::new();
        for program in programs {
            writeln!(text, "{program}run").unwrap();
        }
        let mut child = Command::new(&self.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        let writer = thread::spawn(move || input.write_all(text.as_bytes()));
        let mut answers = Vec::with_capacity(programs.len());
        let mut answer = Answer::default();
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            if let Some(status) = line.strip_prefix("end ") {
                answer.finished = status == "0";
                answers.push(std::mem::take(&mut answer));
            } else if !line.starts_with('#') {
                answer.lines.push(line);
            }
        }
        writer.join().unwrap().unwrap();
        child.wait().unwrap();
        answers
    }
}
