//! Options that several subcommands share.

use std::{env, sync::atomic::AtomicBool};

use anyhow::anyhow;
use clap::{
    Args, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};

use super::{failure::Failure, output};
use crate::{
    base::Bytes,
    device::{DeviceSpec, DeviceSpecError, Fleet},
    measure::CaseRecord,
    plan::PackingBudget,
    report::{self, Medium, Render, ReportError},
    suite::{Case, CaseTimeout, InProcess, Isolating, Isolation, WorkerProcess},
};

/// Which device, and how much of it.
#[derive(Debug, Args)]
pub struct DeviceOptions {
    /// Where to run: `sim` (an H200), `sim:SIZE` such as sim:80GiB, `sim:PROFILE` by name or file, `cuda[:N]` or `auto`.
    /// `run` shares its cases among all GPUs with `cuda:all`, and among simulated ones with 4xsim.
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
        let spec: DeviceSpec = self.device.parse().map_err(refused)?;
        spec.check().map_err(refused)?;
        Ok(spec)
    }

    /// What `--device` names, where several devices may share the cases.
    pub fn fleet(&self) -> Result<Fleet, Failure> {
        let fleet: Fleet = self.device.parse().map_err(refused)?;
        fleet.check().map_err(refused)?;
        Ok(fleet)
    }
}

fn refused(error: DeviceSpecError) -> Failure {
    match error {
        DeviceSpecError::Unavailable { .. } => Failure::device(error),
        _ => Failure::usage(error),
    }
}

impl Default for DeviceOptions {
    fn default() -> Self {
        DeviceOptions { device: "sim".to_owned(), limit: None }
    }
}

/// Which cases run in processes of their own, and for how long.
#[derive(Debug, Default, Args)]
pub struct WorkerOptions {
    /// Which cases run in a process of their own, so that a crash or a lost GPU context costs one case: on real devices,
    /// with a plugin and with a time-out (auto), all or none.
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub isolate: Isolate,
    /// End cases that take longer, such as 5m; they count as failed. Cases with a plugin get 10m where nothing is said.
    #[arg(long, value_name = "TIME")]
    pub case_timeout: Option<CaseTimeout>,
}

/// See [`Isolation`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Isolate {
    /// Cases on a real device, with a plugin, and those with a time-out.
    #[default]
    Auto,
    /// All cases.
    Always,
    /// No case.
    Never,
}

impl WorkerOptions {
    /// Runs every case where it belongs. `stop` ends cases that run, where they are not worth waiting for.
    pub fn runner<'a>(&self, cases: &[Case], stop: Option<&'a AtomicBool>) -> Result<Isolating<'a>, Failure> {
        if self.isolate == Isolate::Never && self.case_timeout.is_some() {
            let conflict = "--case-timeout ends a process, and --isolate never leaves none to end";
            return Err(Failure::usage(anyhow!(conflict)));
        }
        if self.isolate == Isolate::Never && cases.iter().any(|case| case.timeout.is_some()) {
            output::complain("note: --isolate never: the suite's time-outs are not kept");
        }
        let isolation = match self.isolate {
            Isolate::Auto => Isolation::Auto,
            Isolate::Always => Isolation::Always,
            Isolate::Never => Isolation::Never,
        };
        // Where the system does not tell, the name must do.
        let program = env::current_exe().unwrap_or_else(|_| env!("CARGO_PKG_NAME").into());
        let worker = WorkerProcess { program, arguments: vec![super::WORKER.into()], stop };
        Ok(Isolating { isolation, here: InProcess { stop }, worker })
    }
}

/// What the traces need, beside what strategies take.
#[derive(Debug, Default, Args)]
pub struct NeedsOptions {
    /// Also lay each trace out with foresight and write the height of that layout beside the cases (`packed_bytes`).
    /// The bound is always there; packing takes up to half a second a trace, and is the same on every machine.
    #[arg(long)]
    pub pack: bool,
    /// Show how requested becomes reserved, step by step, after the table.
    #[arg(long)]
    pub waterfall: bool,
}

impl NeedsOptions {
    /// The budget of each packing, if there are any.
    pub fn pack_within(&self) -> Option<PackingBudget> {
        self.pack.then_some(PackingBudget::QUICK)
    }

    /// The table of the steps, where it was asked for and may be printed after the first one.
    pub fn waterfall(&self, records: &[CaseRecord], format: Format) -> Option<String> {
        let wanted = self.waterfall && format == Format::Table;
        wanted.then(|| report::waterfall(records, output::medium())).flatten()
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
    /// For commands that have only some of the formats.
    pub fn among(formats: &'static [Format]) -> impl TypedValueParser<Value = Format> {
        PossibleValuesParser::new(formats.iter().filter_map(Format::to_possible_value))
            .map(|name| Format::from_str(&name, false).unwrap_or_default())
    }

    /// A result in this format.
    pub fn render<R: Render + ?Sized>(self, result: &R) -> Result<String, ReportError> {
        Ok(match self {
            Format::Table => result.text(output::medium()),
            Format::Markdown => result.text(Medium::Markdown),
            Format::Json => format!("{:#}\n", result.json()),
            Format::Csv => result.csv()?,
        })
    }

    /// Prints a result in this format.
    pub fn print<R: Render + ?Sized>(self, result: &R) -> Result<(), Failure> {
        Ok(output::say(&self.render(result)?)?)
    }
}
