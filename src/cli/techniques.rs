//! `oomph techniques`.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::anyhow;

use super::{
    environment, exit,
    failure::{Failure, Outcome},
    interrupt,
    options::{DeviceOptions, Format},
    output, progress,
    run::write_page,
};
use crate::{
    answer::techniques::{
        CARDS, LINK_BYTES_PER_SECOND, TECHNIQUES, Technique, TechniqueRecord, TechniqueRow, TechniquesQuestion, advise,
        row_id, techniques,
    },
    base::{Bytes, did_you_mean, nearest},
    device::DeviceSpec,
    models::Recipe,
    report::{self, RecordFolder, ReportError},
    suite::{self, Filter},
};

/// Compares memory-saving techniques on a model: how much memory each saves, what it costs in time, and which batch fits
/// in which card.
///
/// Memory and step times are measured on the device; what fits in a card is worked out on the simulated one.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph techniques --model gpt-355m
  oomph techniques --model gpt-355m --memory 24GiB         which combination to take on a 24 GiB card
  oomph techniques --model gpt-124m --set context=2048 --technique amp --technique ckpt
  oomph techniques --output results/local/techniques       all models, as CSV and markdown
  oomph techniques --device cuda --output DIR              memory and times of the real GPU; --resume DIR goes on
  oomph techniques --device cuda --model gpt-355m --confirm 24GiB   the batch for 24 GiB, run with 24 GiB

`oomph run techniques` is the same as `oomph techniques` with a folder for the results.")]
pub struct Args {
    /// A workload with a training step (see `oomph list workloads`) or its TOML; may be repeated.
    #[arg(long, short, value_name = "WORKLOAD", default_values = MODELS)]
    model: Vec<String>,
    /// Override a parameter of the models, such as `--set batch=4`; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Only this technique, by its name in the table; may be repeated. The base is always there.
    #[arg(long, short, value_name = "NAME")]
    technique: Vec<String>,
    /// The memory of your card, such as 24GiB: says what to take.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Where memory and times are measured: `sim` (an H200), `sim:PROFILE`, `cuda[:N]` or `auto`.
    #[arg(long, value_name = "DEVICE", default_value = "sim")]
    device: String,
    /// What a rank can send in a second, for techniques of several ranks.
    #[arg(long, value_name = "SIZE", default_value_t = Bytes(LINK_BYTES_PER_SECOND))]
    link: Bytes,
    /// Run the largest batch for a card of this memory on the device too, with no more memory than that card has.
    #[arg(long, value_name = "SIZE", conflicts_with = "no_cards")]
    confirm: Option<Bytes>,
    /// Do not work out what fits in which card.
    #[arg(long, conflicts_with = "memory")]
    no_cards: bool,
    /// How many techniques are tried side by side [default: all cores].
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    /// Write techniques.csv, techniques.md and env.json into this new folder.
    #[arg(long, short, value_name = "DIR", conflicts_with = "resume")]
    output: Option<PathBuf>,
    /// Go on with the folder of an interrupted comparison.
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// How the table is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// The models that are compared where nobody names others.
const MODELS: [&str; 5] = ["gpt-124m", "gpt-355m", "gpt-1.3b", "gpt-13b", "resnet-50"];

/// Models and where their results go: what the suite and the command have in common.
pub struct Comparison {
    pub models: Vec<Recipe>,
    pub techniques: Vec<&'static Technique>,
    pub device: DeviceSpec,
    pub cards: Vec<u64>,
    /// The card whose largest batch is run on the device too.
    pub confirm: Option<u64>,
    pub link: u64,
    pub jobs: usize,
    /// Which rows are wanted, by [`row_id`].
    pub filter: Filter,
    /// Which of those are dealt to this process, where several share them.
    pub own: Option<BTreeSet<String>>,
}

pub fn run(args: Args) -> Outcome {
    let device = DeviceOptions { device: args.device.clone(), limit: None }.spec()?;
    let comparison = Comparison {
        models: models(&args.model, &args.set)?,
        techniques: chosen(&args.technique)?,
        cards: match (args.memory, args.confirm) {
            (Some(memory), _) => vec![memory.0],
            (None, _) if args.no_cards => Vec::new(),
            (None, Some(card)) if !CARDS.contains(&card.0) => CARDS.into_iter().chain([card.0]).collect(),
            (None, _) => CARDS.to_vec(),
        },
        confirm: args.confirm.map(|card| card.0),
        link: args.link.0,
        jobs: args.jobs.unwrap_or_else(suite::all_cores),
        filter: Filter::default(),
        own: None,
        device,
    };
    let environment = environment::describe(&comparison.device, 0)?;
    let place = args.resume.as_ref().or(args.output.as_ref());
    let files = place.map(|place| RecordFolder::open(place, &environment, args.resume.is_some()));
    let files = files.transpose().map_err(Failure::usage)?;
    let again = place.map(|place| format!("oomph techniques --resume {}", place.display()));
    let rows = comparison.run(files, again.as_deref())?;
    let records: Vec<TechniqueRecord> = rows.rows.iter().map(|row| row.record.clone()).collect();
    args.format.print(&records)?;
    if let (Some(Bytes(memory)), Format::Table) = (args.memory, args.format) {
        for of_model in rows.rows.chunk_by(|a, b| a.record.model == b.record.model) {
            let model = &of_model[0].record.model;
            let words = match advise(of_model, memory) {
                Some(advice) => report::technique_advice(&advice, memory),
                None => format!("Nothing here makes it fit in {}.", Bytes(memory)),
            };
            output::say(&format!("\n{model}: {words}"))?;
        }
    }
    if let Some(place) = place {
        let page = write_page(place)?;
        if args.format == Format::Table {
            output::say(&format!("\nresults: {}\nreport:  {}", place.display(), page.display()))?;
        }
    }
    Ok(rows.code)
}

/// The rows of a comparison, and the exit code that follows from how it went.
pub struct Compared {
    pub rows: Vec<TechniqueRow>,
    pub code: u8,
}

impl Comparison {
    /// Tries everything that the files do not hold yet. `again` is the command that would go on.
    pub fn run(
        &self,
        mut files: Option<RecordFolder<TechniqueRecord>>,
        again: Option<&str>,
    ) -> Result<Compared, Failure> {
        let stop = interrupt::flag(interrupt::Running::Cases)?;
        let total = self.pairs().count();
        let simulated: DeviceSpec = if self.device.is_simulated() { self.device.clone() } else { "sim".parse()? };
        let question = TechniquesQuestion {
            models: &self.models,
            techniques: &self.techniques,
            device: &self.device,
            simulated: &simulated,
            cards: &self.cards,
            confirm: self.confirm,
            link_bytes_per_second: self.link,
            jobs: self.jobs,
            stop: &stop,
        };
        let known: Vec<(String, String)> = match &files {
            Some(files) => self.pairs().filter(|(model, technique)| files.has(&row_id(model, technique))).collect(),
            None => Vec::new(),
        };
        let bar = progress::of_cases(total, known.len());
        let mut rows: Vec<(usize, TechniqueRow)> = Vec::new();
        let mut trouble: Result<(), ReportError> = Ok(());
        let is_wanted = |model: &str, technique: &str| {
            self.wants(model, technique) && !known.iter().any(|(m, t)| m == model && t == technique)
        };
        techniques(&question, is_wanted, |place, row| {
            bar.set_message(format!("{} {}", row.record.model, row.record.technique));
            bar.inc(1);
            if let (Some(files), Ok(())) = (&mut files, &trouble) {
                trouble = files.append(&row.record);
                if trouble.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            rows.push((place, row));
        })?;
        bar.finish_and_clear();
        trouble?;
        rows.sort_by_key(|(place, _)| *place);
        let mut rows: Vec<TechniqueRow> = rows.into_iter().map(|(_, row)| row).collect();
        if let Some(files) = files {
            let order: Vec<String> = self.pairs().map(|(model, technique)| row_id(&model, &technique)).collect();
            // What an earlier part of the run found has no fits beyond its columns.
            let records = files.finish(&order)?;
            rows = records
                .into_iter()
                .map(|record| {
                    let found = rows.iter().find(|row| row.record == record);
                    found.cloned().unwrap_or(TechniqueRow { record, fits: Vec::new() })
                })
                .collect();
        }
        Ok(Compared { code: self.conclude(rows.len(), total, again, &stop), rows })
    }

    fn conclude(&self, ended: usize, total: usize, again: Option<&str>, stop: &AtomicBool) -> u8 {
        if ended >= total || !stop.load(Ordering::Relaxed) {
            return exit::OK;
        }
        let how = again.map_or_else(String::new, |command| format!("; go on with: {command}"));
        output::complain(&format!("interrupted after {ended} of {total} techniques{how}"));
        exit::INTERRUPTED
    }

    /// Model and technique of every row, in the order of the table.
    pub fn pairs(&self) -> impl Iterator<Item = (String, String)> + '_ {
        let all = self.models.iter().flat_map(|model| {
            self.techniques.iter().map(|technique| (model.name().to_owned(), technique.id.to_owned()))
        });
        all.filter(|(model, technique)| self.wants(model, technique))
    }

    fn wants(&self, model: &str, technique: &str) -> bool {
        let id = row_id(model, technique);
        self.filter.takes(&id) && self.own.as_ref().is_none_or(|own| own.contains(&id))
    }
}

fn models(names: &[String], set: &[String]) -> Result<Vec<Recipe>, Failure> {
    names
        .iter()
        .map(|name| {
            let is_file = name.ends_with(".toml") || name.contains('/');
            let found = if is_file { Recipe::from_file(name.as_ref()) } else { Recipe::named(name) };
            let mut recipe = found.map_err(Failure::usage)?;
            for assignment in set {
                let (key, value) = assignment
                    .split_once('=')
                    .ok_or_else(|| Failure::usage(anyhow!("--set {assignment}: write KEY=VALUE")))?;
                recipe = recipe.with(key, value);
            }
            // A slip is told at once, and not as a row for every technique.
            recipe.workload().map_err(Failure::usage)?;
            Ok(recipe)
        })
        .collect()
}

fn chosen(names: &[String]) -> Result<Vec<&'static Technique>, Failure> {
    for name in names {
        if TECHNIQUES.iter().all(|technique| technique.id != name) {
            let near = nearest(name, TECHNIQUES.iter().map(|technique| technique.id));
            let known: Vec<&str> = TECHNIQUES.iter().map(|technique| technique.id).collect();
            return Err(Failure::usage(anyhow!(
                "unknown technique '{name}'{}; there are {}",
                did_you_mean(near.as_deref()),
                known.join(", ")
            )));
        }
    }
    let is_chosen = |technique: &Technique| {
        names.is_empty() || technique.is_base() || names.iter().any(|name| name == technique.id)
    };
    Ok(TECHNIQUES.iter().filter(|technique| is_chosen(technique)).collect())
}
