//! Options that several commands share.

use std::{env, sync::atomic::AtomicBool};

use anyhow::anyhow;
use clap::{
    Args, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};

use super::{exit::CommandError, output};
use crate::{
    base::MemoryLimit,
    device::{Card, DeviceFleet, DeviceSpec, DeviceSpecError},
    measure::CaseRecord,
    plan::PackingBudget,
    report::{self, Medium, Render, ReportError},
    suite::{Case, CaseTimeout, InProcess, IsolatingRunner, Isolation, WorkerProcess},
};

/// The device, and what it has.
#[derive(Clone, Debug, Args)]
pub struct DeviceChoice {
    /// Where to run: `sim` (a simulated GPU), `cuda[:N]` or `auto`. `run` also takes `cuda:all` and 4xsim, which share
    /// the cases among several devices.
    #[arg(long, value_name = "DEVICE", default_value = DeviceChoice::DEFAULT)]
    pub device: String,
    /// What the simulated GPU has: a size such as 24GiB (otherwise it is an H200), or a card by its name or profile
    /// file. [default: h200]
    #[arg(long, value_name = "SIZE|NAME")]
    pub card: Option<Card>,
}

/// The device, and what the process may take of it.
#[derive(Debug, Default, Args)]
pub struct DeviceOptions {
    #[command(flatten)]
    pub choice: DeviceChoice,
    /// What the process may take: a size such as 24GiB, or a fraction of the device such as 0.5 or 50%, as in PyTorch's
    /// set_per_process_memory_fraction; 1.0 is no limit. [default: all of a simulated device, 90 % of the free memory
    /// of a real one]
    #[arg(long, value_name = "SIZE|FRACTION")]
    pub limit: Option<MemoryLimit>,
}

impl DeviceChoice {
    /// The default device.
    pub const DEFAULT: &'static str = "sim";

    /// A device by its name.
    pub fn named(device: &str) -> DeviceChoice {
        DeviceChoice { device: device.to_owned(), card: None }
    }

    /// The device. An unavailable one is an error before anything runs.
    pub fn spec(&self) -> Result<DeviceSpec, CommandError> {
        let spec: DeviceSpec = self.text()?.parse().map_err(device_failure)?;
        spec.check().map_err(device_failure)?;
        Ok(spec)
    }

    /// The devices that share the cases.
    pub fn fleet(&self) -> Result<DeviceFleet, CommandError> {
        let fleet: DeviceFleet = self.text()?.parse().map_err(device_failure)?;
        fleet.check().map_err(device_failure)?;
        Ok(fleet)
    }

    /// The device with its card, as in the ids of cases: `sim:24GiB`.
    fn text(&self) -> Result<String, CommandError> {
        let Some(card) = &self.card else { return Ok(self.device.clone()) };
        let fleet: DeviceFleet = self.device.parse().map_err(device_failure)?;
        if fleet.members().iter().any(|device| !device.is_simulated()) {
            return Err(CommandError::usage(anyhow!(
                "--card {card} says what a simulated device has, and --device {} is a real one: leave out --card, or \
                 say with --limit what the process may take",
                self.device
            )));
        }
        // `auto` is one of the others.
        let device = if fleet.is_shared() { fleet.to_string() } else { DeviceChoice::DEFAULT.to_owned() };
        Ok(format!("{device}:{card}"))
    }
}

impl Default for DeviceChoice {
    fn default() -> Self {
        DeviceChoice::named(DeviceChoice::DEFAULT)
    }
}

impl DeviceOptions {
    /// The device. An unavailable one is an error before anything runs.
    pub fn spec(&self) -> Result<DeviceSpec, CommandError> {
        self.choice.spec()
    }

    /// The limit on this device in bytes; `None` without a limit.
    pub fn limit_bytes(&self) -> Result<Option<u64>, CommandError> {
        let Some(limit) = self.limit else { return Ok(None) };
        self.choice.fleet()?.any().limit_bytes(limit).map_err(device_failure)
    }
}

fn device_failure(error: DeviceSpecError) -> CommandError {
    match error {
        DeviceSpecError::Unavailable { .. } => CommandError::device(error),
        _ => CommandError::usage(error),
    }
}

/// Which cases run in processes of their own, and for how long.
#[derive(Debug, Default, Args)]
pub struct WorkerOptions {
    /// Run cases in processes of their own, so that a crash or a lost GPU context affects one case
    /// only. `auto`: on real devices, with plugins and with a time-out.
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub isolate: Isolation,
    /// Stop cases that take longer than this, such as 5m; they count as failed [default for
    /// plugins: 10m].
    #[arg(long, value_name = "TIME")]
    pub case_timeout: Option<CaseTimeout>,
}

impl WorkerOptions {
    /// Checks that the options can be combined. Call it before anything is written.
    pub fn check(&self) -> Result<(), CommandError> {
        if self.isolate == Isolation::Never && self.case_timeout.is_some() {
            let conflict = "--case-timeout needs a process per case: leave out --isolate never";
            return Err(CommandError::usage(anyhow!(conflict)));
        }
        Ok(())
    }

    /// Runs each case here or in a process of its own. `stop` also ends running cases.
    pub fn runner<'a>(
        &self,
        cases: &[Case],
        stop: Option<&'a AtomicBool>,
    ) -> Result<IsolatingRunner<'a>, CommandError> {
        self.check()?;
        if self.isolate == Isolation::Never && cases.iter().any(|case| case.timeout.is_some()) {
            output::complain("note: --isolate never: the time-outs of the suite do not apply");
        }
        // If the system does not know the path, the name is searched in PATH.
        let program = env::current_exe().unwrap_or_else(|_| env!("CARGO_PKG_NAME").into());
        let worker = WorkerProcess { program, arguments: vec![super::WORKER.into()], stop };
        Ok(IsolatingRunner { isolation: self.isolate, here: InProcess { stop }, worker })
    }
}

/// What the traces need, besides what strategies reserve.
#[derive(Debug, Default, Args)]
pub struct NeedsOptions {
    /// Also compute an offline layout of each trace, with full knowledge of lifetimes
    /// (`packed_bytes`). Takes up to half a second per trace; the result is the same on every
    /// machine.
    #[arg(long)]
    pub pack: bool,
    /// After the table, show the steps from requested to reserved memory.
    #[arg(long)]
    pub waterfall: bool,
}

impl NeedsOptions {
    /// The budget of each layout, if they are wanted.
    pub fn pack_within(&self) -> Option<PackingBudget> {
        self.pack.then_some(PackingBudget::QUICK)
    }

    /// The table of the steps, if it is wanted and the format allows a second table.
    pub fn waterfall(&self, records: &[CaseRecord], format: Format) -> Option<String> {
        let wanted = self.waterfall && format == Format::Table;
        wanted.then(|| report::waterfall(records, output::medium())).flatten()
    }
}

/// Output format. JSON and CSV are in bytes and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// `{"schema": 2, "rows": [...]}`.
    Json,
    /// Comma-separated values with a header.
    Csv,
    /// Markdown tables.
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
    pub fn print<R: Render + ?Sized>(self, result: &R) -> Result<(), CommandError> {
        let text = self.render(result)?;
        let printed = match self {
            Format::Table | Format::Markdown => output::say(&text),
            Format::Json | Format::Csv => output::say_data(&text),
        };
        Ok(printed?)
    }
}
