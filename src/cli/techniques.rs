//! `oomph techniques`, and the suite `techniques`.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::builder::PossibleValuesParser;

use super::{
    exit::{self, CommandError, CommandResult},
    options::{DeviceChoice, Format},
    output,
    run::shared::{self, RecordCollector, ResultFolder, RunShare},
    source::key_and_value,
};
use crate::{
    answer::{
        simulated_beside,
        techniques::{
            CARDS, LINK_BYTES_PER_SECOND, TECHNIQUES, Technique, TechniqueRecord, TechniqueRow, TechniquesQuestion,
            advise, base_settings, row_id, techniques,
        },
    },
    base::{Bytes, MemoryLimit},
    device::{Card, DeviceSpec},
    models::Recipe,
    report,
    suite::{self, CaseFingerprint, SuiteFile},
};

/// Compares memory-saving techniques on a model: how much memory each saves, what it costs in time,
/// and which batch fits on which card.
///
/// Memory and step times are measured on the device. What fits on a card is simulated. The base is the
/// model with everything that --set changes (such as `--set techniques=amp`); each row adds its
/// technique to the base.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph techniques --model reference-gpt-406m
  oomph techniques --model reference-gpt-406m --card 24GiB           the best combination for a card of 24 GiB
  oomph techniques --model reference-gpt-163m --set context=2048 --technique amp --technique ckpt
  oomph techniques --output results/local/techniques       all models, as CSV and Markdown
  oomph techniques --device cuda --output DIR              memory and times of the real GPU; --resume DIR continues
  oomph techniques --device cuda --model reference-gpt-406m --confirm 24GiB   run the batch for 24 GiB with 24 GiB

`oomph run techniques` is the same as `oomph techniques` with a folder for the results.")]
pub struct Args {
    /// A workload with a training step (see `oomph list workloads`) or its TOML; may be repeated.
    #[arg(long, short, value_name = "WORKLOAD", default_values = MODELS)]
    model: Vec<String>,
    /// Override a parameter of the models, such as `--set batch=4`; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Only this technique and the base, by the name in the table; may be repeated.
    #[arg(long, short, value_name = "NAME", value_parser = technique_names(), hide_possible_values = true)]
    technique: Vec<String>,
    /// Your card: a size such as 24GiB (otherwise it is an H200), or a card by its name or profile file. Recommends a
    /// technique for it.
    #[arg(long, value_name = "SIZE|NAME")]
    card: Option<Card>,
    /// What the process may take of the card: a size such as 20GiB, or a fraction such as 0.5 or 50%. Recommends a
    /// technique for it.
    #[arg(long, value_name = "SIZE|FRACTION")]
    limit: Option<MemoryLimit>,
    /// Where memory and times are measured: `sim` (a simulated GPU), `cuda[:N]` or `auto`. What fits on --card is
    /// always simulated.
    #[arg(long, value_name = "DEVICE", default_value = DeviceChoice::DEFAULT)]
    device: String,
    /// Bytes that a rank can send per second, for techniques with several ranks.
    #[arg(long, value_name = "SIZE", default_value_t = Bytes(LINK_BYTES_PER_SECOND))]
    link: Bytes,
    /// Also run the largest batch for a card of this memory on the device, with no more memory than
    /// that.
    #[arg(long, value_name = "SIZE", conflicts_with = "no_cards", value_parser = Bytes::typed)]
    confirm: Option<Bytes>,
    /// Do not search the largest batch for each card.
    #[arg(long, conflicts_with_all = ["card", "limit"])]
    no_cards: bool,
    /// How many techniques are tried in parallel [default: all cores].
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    /// Write techniques.csv, techniques.md and env.json into this new folder.
    #[arg(long, short, value_name = "DIR", conflicts_with = "resume")]
    output: Option<PathBuf>,
    /// Continue the folder of an interrupted comparison.
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// The models that are compared by default.
const MODELS: [&str; 5] =
    ["reference-gpt-163m", "reference-gpt-406m", "reference-gpt-1.4b", "reference-gpt-13b", "resnet-50"];

pub fn run(args: Args) -> CommandResult {
    let device = DeviceChoice::named(&args.device).spec()?;
    // A profile has its own times; a size only its memory.
    let simulated =
        args.card.as_ref().map_or_else(|| simulated_beside(&device), |card| Ok(card.device_for_search()))?;
    let device = if device.is_simulated() { simulated.clone() } else { device };
    let memory_bytes = memory_bytes(&args, &device, &simulated)?;
    let question = TechniquesQuestion {
        techniques: chosen(&args.technique),
        cards: match (memory_bytes, args.confirm) {
            (Some(memory), _) => vec![memory],
            (None, _) if args.no_cards => Vec::new(),
            (None, Some(card)) if !CARDS.contains(&card.0) => CARDS.into_iter().chain([card.0]).collect(),
            (None, _) => CARDS.to_vec(),
        },
        confirm: args.confirm.map(|card| card.0),
        link_bytes_per_second: args.link.0,
        jobs: args.jobs.unwrap_or_else(suite::all_cores),
        simulated,
        ..TechniquesQuestion::new(models(&args.model, &args.set)?, device)?
    };
    let place = args.resume.as_ref().or(args.output.as_ref());
    let resumes = args.resume.is_some();
    let test = TechniqueTest { question, advise_for: memory_bytes, format: args.format };
    let mut share = RunShare::whole(&test.ids());
    share.note_contents(|id| test.fingerprint(id));
    let folder = |place: &PathBuf| ResultFolder::of_command(place, &test.question.device, share.plan(), resumes);
    let folder = place.map(folder).transpose()?;
    test.run(test.ids(), folder)
}

/// The memory of the card that a technique is recommended for. Under a limit, it is the card that has just that much for
/// the process.
fn memory_bytes(args: &Args, device: &DeviceSpec, simulated: &DeviceSpec) -> Result<Option<u64>, CommandError> {
    let card = args.card.as_ref().map(Card::total_bytes);
    let total_bytes = card.map_or_else(|| device.total_bytes(), Ok)?;
    let Some(limit) = args.limit.and_then(|limit| limit.resolve(total_bytes)) else {
        return Ok(card.or(args.limit.map(|_| total_bytes)));
    };
    let overhead_bytes = simulated.overhead_bytes()?;
    let memory_bytes = limit.saturating_add(overhead_bytes).min(total_bytes);
    output::complain(&format!(
        "note: a limit of {} is what a card of {} has for the process: context and libraries take {}",
        Bytes(memory_bytes.saturating_sub(overhead_bytes)),
        Bytes(memory_bytes),
        Bytes(overhead_bytes)
    ));
    Ok(Some(memory_bytes))
}

/// Tries the techniques on the workloads of a suite, where they pass the filters of a run.
pub fn run_suite(args: &shared::Args, suite: &SuiteFile) -> CommandResult {
    let models = suite.models().map_err(CommandError::usage)?;
    models.iter().flat_map(Recipe::notes).for_each(|note| output::complain_once(&note));
    let question =
        TechniquesQuestion { jobs: args.jobs(), ..TechniquesQuestion::new(models, args.one_device(suite)?)? };
    let test = TechniqueTest { question, advise_for: None, format: args.format };
    let filter = args.filter();
    let ids: Vec<String> = test.ids().into_iter().filter(|id| filter.takes(id)).collect();
    if ids.is_empty() {
        return Err(CommandError::nothing_selected(anyhow!(
            "none of the rows passes the filters; `oomph run {} --list` shows their ids",
            suite.name
        )));
    }
    let mut share = RunShare::new(args, &ids);
    let ids = share.of(ids);
    if args.list {
        output::say(&ids.join("\n"))?;
        return Ok(exit::OK);
    }
    share.note_contents(|id| test.fingerprint(id));
    let settings = args.settings(std::slice::from_ref(suite))?;
    let folder = share.result_folder(args, &test.question.device, settings)?;
    test.run(ids, Some(folder))
}

/// Models and techniques to compare, for the command and for the suite.
struct TechniqueTest {
    question: TechniquesQuestion,
    /// The card that a technique is recommended for.
    advise_for: Option<u64>,
    format: Format,
}

impl TechniqueTest {
    /// The ids of all rows, in the order of the table.
    fn ids(&self) -> Vec<String> {
        let of_model = |model: &Recipe| {
            let name = model.name.clone();
            self.question.techniques.iter().map(move |technique| row_id(&name, technique.id))
        };
        self.question.models.iter().flat_map(of_model).collect()
    }

    /// What a row contains: the model with its parameters, and what is asked of it.
    fn fingerprint(&self, id: &str) -> CaseFingerprint {
        let TechniquesQuestion { cards, confirm, link_bytes_per_second, .. } = &self.question;
        let is_of = |model: &&Recipe| id.strip_prefix(&*model.name).is_some_and(|rest| rest.starts_with('/'));
        let model = self.question.models.iter().find(is_of).map(Recipe::words).unwrap_or_default();
        CaseFingerprint {
            settings: suite::fingerprint(format!("{cards:?} {confirm:?} {link_bytes_per_second}").as_bytes()),
            source: suite::fingerprint(model.as_bytes()),
        }
    }

    /// Tries the rows `ids` that the folder does not hold yet.
    fn run(&self, ids: Vec<String>, folder: Option<ResultFolder<TechniqueRecord>>) -> CommandResult {
        let mut collector = RecordCollector::new(ids, folder)?;
        self.check_base(collector.earlier())?;
        let wanted = collector.wanted();
        let question = TechniquesQuestion { stop: collector.stop(), ..self.question.clone() };
        let mut rows: Vec<TechniqueRow> = Vec::new();
        techniques(
            &question,
            |model, technique| wanted.contains(&row_id(model, technique)),
            |row| {
                collector.add(&row.record);
                rows.push(row);
            },
        )?;
        let records = rows.iter().map(|row| row.record.clone()).collect();
        let print = |records: &[TechniqueRecord]| {
            self.format.print(records)?;
            self.print_advice(records, &rows)
        };
        collector.finish(records, self.format, print)
    }

    /// Refuses rows of an earlier part of the test with another base: the two parts cannot be compared.
    fn check_base(&self, earlier: &[TechniqueRecord]) -> Result<(), CommandError> {
        for model in &self.question.models {
            let base = base_settings(model);
            if let Some(other) = earlier.iter().find(|row| row.model == model.name && row.base_settings != base) {
                let named = |base: &str| if base.is_empty() { "no setting".to_owned() } else { format!("'{base}'") };
                return Err(CommandError::usage(anyhow!(
                    "the folder has rows of {} with {}, and this command sets {}; pass the same --set, or another folder with \
                     --output",
                    model.name,
                    named(&other.base_settings),
                    named(&base)
                )));
            }
        }
        Ok(())
    }

    /// One recommendation per model.
    fn print_advice(&self, records: &[TechniqueRecord], rows: &[TechniqueRow]) -> Result<(), CommandError> {
        let (Some(memory), Format::Table) = (self.advise_for, self.format) else { return Ok(()) };
        for of_model in records.chunk_by(|a, b| a.model == b.model) {
            // Rows of an earlier part of the test only have the fits in their columns.
            let with_fits = |record: &TechniqueRecord| {
                let found = rows.iter().find(|row| row.record == *record);
                found.cloned().unwrap_or_else(|| record.clone().into())
            };
            let of_model: Vec<TechniqueRow> = of_model.iter().map(with_fits).collect();
            let words = match advise(&of_model, memory) {
                Ok(advice) => report::technique_advice(&advice, memory),
                Err(reason) => report::no_technique_advice(reason, memory),
            };
            output::say(&format!("\n{}: {words}", of_model[0].record.model))?;
        }
        Ok(())
    }
}

fn models(names: &[String], set: &[String]) -> Result<Vec<Recipe>, CommandError> {
    let set = set.iter().map(|text| key_and_value(text)).collect::<Result<Vec<_>, _>>()?;
    let model = |name: &String| {
        let is_file = name.ends_with(".toml") || name.contains('/');
        let found = if is_file { Recipe::from_file(name.as_ref()) } else { Recipe::named(name) };
        let recipe = found.map_err(CommandError::usage)?;
        let recipe = set.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value));
        // A wrong parameter is one error, not one failed row per technique.
        recipe.workload().map_err(CommandError::usage)?;
        recipe.notes().iter().for_each(|note| output::complain_once(note));
        Ok(recipe)
    };
    names.iter().map(model).collect()
}

fn technique_names() -> PossibleValuesParser {
    PossibleValuesParser::new(TECHNIQUES.iter().map(|technique| technique.id))
}

fn chosen(names: &[String]) -> Vec<&'static Technique> {
    let is_chosen = |technique: &&Technique| {
        names.is_empty() || technique.is_base() || names.iter().any(|name| name == technique.id)
    };
    TECHNIQUES.iter().filter(is_chosen).collect()
}
