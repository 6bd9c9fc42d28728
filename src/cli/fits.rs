//! `oomph fits`.

use anyhow::anyhow;

use super::{
    exit::{self, CommandError, CommandResult, StopPolicy},
    export::{self, JsonExport, PageExport},
    options::{DeviceChoice, Format},
    output,
    source::path_argument,
};
use crate::{
    answer::fits::{FitRow, FitsQuestion, ModelUse, fits},
    device::Card,
    models::{OPTIMIZER_WORDS, Recipe},
    report::html,
    suite::SourceSpec,
    trace::torch::GivenFacts,
};

/// Says whether a model can be trained on a card, from its configuration alone: with which techniques, how large a batch,
/// and where the memory goes; and whether it can answer prompts there.
///
/// The model's own code decides what is allocated: every operator of Hugging Face's transformers, its backward and the
/// optimizer run on a simulated GPU that keeps books and computes nothing. Attention is SDPA without a mask, as in training
/// on whole sequences. For a program of your own, or a model that is not known here, use `oomph rehearse`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph fits config.json --card 24GiB                    a model of the Hugging Face hub
  oomph fits config.json --card rtx4090,a100-40g,h100    several cards
  oomph fits config.json --card 80GiB --batch 8 --context 4096
  oomph fits config.json --card 24GiB --techniques bf16_model,ckpt,accum4
  oomph fits config.json --card 24GiB --export-html fits.html
  oomph fits llama-3.2-1b --card 12GiB                   a workload of `oomph list workloads`

Known model types: llama, mistral, mixtral, qwen2, qwen3, gemma, phi, gpt_neox, gpt2, bert, t5, vit.
Exit code 108: no way to train fits on any of the cards; 109: none is known to fit, and one is not modelled.")]
pub struct Args {
    /// The model's config.json, or a workload that trains.
    #[arg(value_name = "CONFIG", value_parser = path_argument())]
    model: String,
    /// The cards: sizes such as 24GiB, or names; several, separated by commas.
    #[arg(long, value_name = "SIZE|NAME", value_delimiter = ',', required = true)]
    card: Vec<Card>,
    /// Sequences per step.
    #[arg(long, value_name = "N")]
    batch: Option<u32>,
    /// Tokens per sequence [default: what the model takes, 2048 at most].
    #[arg(long, value_name = "N")]
    context: Option<u32>,
    /// The optimizer, instead of those of the usual ways: adamw, fused (AdamW), foreach_off (AdamW),
    /// sgd, adam8bit, paged_adam or paged_adam8bit.
    #[arg(long, value_name = "NAME")]
    optimizer: Option<String>,
    /// Only this way to train, instead of the usual ones: words of `--set techniques=`, separated by commas.
    #[arg(long, value_name = "WORDS", value_delimiter = ',')]
    techniques: Option<Vec<String>>,
    /// Output format.
    #[arg(long, default_value = "table", value_parser = Format::among(&[Format::Table, Format::Json, Format::Csv]))]
    format: Format,
    #[command(flatten)]
    export: JsonExport,
    #[command(flatten)]
    page: PageExport,
}

pub fn run(args: Args) -> CommandResult {
    args.export.check()?;
    args.page.check()?;
    let model = args.recipe()?;
    let uses = args.uses()?;
    let stop = exit::stop_flag(StopPolicy::AtOnce)?;
    let mut rows: Vec<FitRow> = Vec::new();
    for card in &args.card {
        let choice = DeviceChoice { card: Some(card.clone()), ..DeviceChoice::default() };
        let device = choice.spec()?;
        let question =
            FitsQuestion { model: &model, uses: &uses, card: &device, card_name: &card.to_string(), stop: &stop };
        rows.extend(fits(&question).map_err(CommandError::usage)?);
    }
    args.export.print(&rows, args.format)?;
    args.page.write(|| {
        let card = DeviceChoice { card: args.card.first().cloned(), ..DeviceChoice::default() };
        let run = export::page_run(&format!("fits {}", model.name), &card.spec()?, 1, Vec::new())?;
        let run = export::on_cards(run, &args.card);
        Ok(html::fits_page(&rows, &export::cards_for_programs(&args.card), run)?)
    })?;
    if stop.load(std::sync::atomic::Ordering::Relaxed) {
        return Ok(exit::INTERRUPTED);
    }
    let mut trained = rows.iter().filter(|row| row.trains);
    Ok(if trained.clone().any(|row| row.fits == Some(true)) {
        exit::OK
    } else if trained.any(|row| row.fits.is_none()) {
        exit::CANNOT_TELL
    } else {
        exit::DOES_NOT_FIT
    })
}

impl Args {
    /// The model with its batch and context.
    fn recipe(&self) -> Result<Recipe, CommandError> {
        let spec = SourceSpec {
            name: self.model.clone(),
            set: Vec::new(),
            seed: 1,
            device_index: None,
            given: GivenFacts::default(),
        };
        spec.notes().iter().for_each(|note| output::complain_once(note));
        let not_a_model = || anyhow!("'{}' is not a model in training: a config.json has a model_type", self.model);
        let recipe =
            spec.recipe().map_err(CommandError::usage)?.ok_or_else(not_a_model).map_err(CommandError::usage)?;
        let sizes = [("batch", self.batch), ("context", self.context)];
        let recipe = sizes.into_iter().fold(recipe, |recipe, (key, value)| match value {
            Some(value) => recipe.with(key, &value.to_string()),
            None => recipe,
        });
        if recipe.count("batch").is_none() {
            return Err(CommandError::usage(not_a_model()));
        }
        Ok(recipe)
    }

    fn uses(&self) -> Result<Vec<ModelUse>, CommandError> {
        let optimizer = match self.optimizer.as_deref() {
            Some(other) if other != "adamw" && !OPTIMIZER_WORDS.contains(&other) => {
                let known = OPTIMIZER_WORDS.join(", ");
                return Err(CommandError::usage(anyhow!("--optimizer {other}: known are adamw, {known}")));
            }
            known => known,
        };
        if let Some(words) = &self.techniques {
            let optimizer = optimizer.filter(|word| *word != "adamw").map(str::to_owned);
            let words = words.iter().filter(|word| !word.is_empty()).cloned().chain(optimizer).collect();
            return Ok(vec![ModelUse::training(words)]);
        }
        Ok(ModelUse::usual(optimizer).into_iter().chain([ModelUse::answering(), ModelUse::serving()]).collect())
    }
}
