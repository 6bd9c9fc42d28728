//! `oomph inspect --summary` and `--by`: memory at one moment, under one strategy, and who asked for it.

use clap::ValueEnum;

use super::{failure::Failure, options::DeviceOptions, replay_place};
use crate::{
    answer::summary::{At, By, MemorySummary, Operation, SummaryError, operations, summarize},
    base::Progress,
    replay::ReplayOptions,
    report::{self, Medium},
    strategy::StrategySpec,
    trace::{ProgressSource, Source},
};

/// What to tell of one moment.
#[derive(Debug, clap::Args)]
pub struct SummaryOptions {
    /// Show the memory summary that PyTorch's users know, after a replay.
    #[arg(long)]
    summary: bool,
    /// Show who asked for memory, by what was asked.
    #[arg(long, value_enum, value_name = "WHAT")]
    by: Option<ByOption>,
    /// How many lines of that.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// At which moment: end, peak, step:N, phase:NAME[:N] (when it begins) or event:N.
    #[arg(long, value_name = "MOMENT", default_value = "end")]
    at: String,
    /// Under which allocator [default: PyTorch's, with the settings of the recording].
    #[arg(long, short, value_name = "STRATEGY")]
    strategy: Option<String>,
    #[command(flatten)]
    device: DeviceOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ByOption {
    /// Category and layer.
    Tag,
    /// Call site.
    Site,
    /// Bytes asked for.
    Size,
}

impl From<ByOption> for By {
    fn from(by: ByOption) -> By {
        match by {
            ByOption::Tag => By::Tag,
            ByOption::Site => By::Site,
            ByOption::Size => By::Size,
        }
    }
}

/// What was asked for.
pub struct Told {
    memory: Option<MemorySummary>,
    operations: Option<(By, Vec<Operation>)>,
    strategy: StrategySpec,
    top: usize,
}

impl SummaryOptions {
    /// Whether there is anything to tell.
    pub fn is_asked(&self) -> bool {
        self.summary || self.by.is_some()
    }

    /// Tells it; `recorded` are the settings of a recording.
    pub fn tell(&self, source: &dyn Source, recorded: &str, progress: &dyn Progress) -> Result<Told, Failure> {
        let at: At = self.at.parse().map_err(refused)?;
        let strategy = replay_place::strategy_or_recorded(self.strategy.as_deref(), recorded)?;
        // The peak is a matter of the allocator too: blocks are larger than what is asked for.
        let needs_replay = self.summary || at == At::Peak;
        let memory = if needs_replay { Some(self.memory(source, &strategy, &at, progress)?) } else { None };
        let until = match (&memory, &at) {
            (Some(memory), _) => Some(memory.event),
            (None, at) => {
                at.event(&ProgressSource::stage(source, progress, "looking for the moment", 1)).map_err(refused)?
            }
        };
        let told = |by: ByOption| {
            let source = ProgressSource::stage(source, progress, "seeing who asked", 1);
            Ok::<_, Failure>((by.into(), operations(&source, by.into(), until)?))
        };
        Ok(Told {
            memory: memory.filter(|_| self.summary),
            operations: self.by.map(told).transpose()?,
            strategy,
            top: self.top,
        })
    }

    fn memory(
        &self,
        source: &dyn Source,
        strategy: &StrategySpec,
        at: &At,
        progress: &dyn Progress,
    ) -> Result<MemorySummary, Failure> {
        // Where the moment has to be looked for, that is a reading of its own.
        let readings = 1 + u64::from(matches!(at, At::Step(_) | At::Phase(..)));
        let source = ProgressSource::stage(source, progress, "playing it", readings);
        let options = ReplayOptions { resumes: true, ..ReplayOptions::default() };
        let replay = replay_place::replay(&source, &self.device, strategy)?.options(options);
        summarize(&replay, at).map_err(refused)
    }
}

impl Told {
    /// For people.
    pub fn text(&self, medium: Medium) -> String {
        let mut out = String::new();
        if let Some(memory) = &self.memory {
            out.push_str(&format!("\nmemory under {}\n", self.strategy));
            out.push_str(&report::memory_summary(memory, medium));
        }
        if let Some((by, operations)) = &self.operations {
            out.push_str("\nwho asked for memory, as asked for\n");
            out.push_str(&report::operations(operations, *by, self.top, medium));
        }
        out
    }

    /// The fields that it adds to the row of a source.
    pub fn fields(&self) -> Vec<(String, serde_json::Value)> {
        let mut fields = Vec::new();
        if let Some(memory) = &self.memory {
            fields.push(("strategy".to_owned(), self.strategy.to_string().into()));
            fields.push(("memory_summary".to_owned(), serde_json::json!(memory)));
        }
        if let Some((_, operations)) = &self.operations {
            let top = &operations[..operations.len().min(self.top)];
            fields.push(("operations".to_owned(), serde_json::json!(top)));
        }
        fields
    }
}

fn refused(error: SummaryError) -> Failure {
    match error {
        SummaryError::Trace(_) | SummaryError::NoSuchMoment(_) | SummaryError::BadMoment(_) => Failure::usage(error),
        SummaryError::Replay(error) => Failure::replay(error),
        SummaryError::Strategy(_) => error.into(),
    }
}
