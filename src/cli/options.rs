//! Options that several subcommands share.

use clap::{Args, ValueEnum};

use super::{failure::Failure, output};
use crate::{
    device::{DeviceSpec, DeviceSpecError},
    measure::CaseRecord,
    report::{self, ReportError},
    unit::Bytes,
};

/// Which device, and how much of it.
#[derive(Debug, Args)]
pub struct DeviceOptions {
    /// Where to run: `sim` (an H200), `sim:SIZE` such as sim:80GiB, `sim:PROFILE` by name or file, `cuda[:N]` or `auto`.
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    pub device: String,
    /// Cap on the physical memory that may be held, such as 24GiB. PyTorch's allocator sees it as its memory fraction.
    /// Without it a simulated device is used whole, and nine tenths of what is free on a real one.
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<Bytes>,
}

impl DeviceOptions {
    /// What `--device` names; a device that is not there is an error before anything runs.
    pub fn spec(&self) -> Result<DeviceSpec, Failure> {
        let spec: DeviceSpec = self.device.parse().map_err(Failure::usage)?;
        match spec.open() {
            Ok(_) => Ok(spec),
            Err(error @ DeviceSpecError::Unavailable { .. }) => Err(Failure::device(error)),
            Err(error) => Err(Failure::usage(error)),
        }
    }
}

impl Default for DeviceOptions {
    fn default() -> Self {
        DeviceOptions { device: "sim".to_owned(), limit: None }
    }
}

/// How tables are printed. JSON and CSV use base units: bytes and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// `{"schema": 1, "rows": [...]}`.
    Json,
    /// Comma-separated values with a header.
    Csv,
    /// A table for a document.
    Markdown,
}

impl Format {
    /// The records in this format, a terminal's table no wider than the terminal.
    pub fn records(self, records: &[CaseRecord]) -> Result<String, ReportError> {
        Ok(match self {
            Format::Table => report::terminal(records, output::terminal_width()),
            Format::Json => report::json(records),
            Format::Csv => report::csv(records)?,
            Format::Markdown => report::markdown(records),
        })
    }
}
