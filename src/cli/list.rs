//! `oomph list`.

use std::fmt::Write as _;

use clap::ValueEnum;
use serde::Serialize;

use super::{
    exit,
    failure::{Failure, Outcome},
    output,
};
use crate::{
    plugin,
    strategy::STRATEGIES,
    suite::SuiteFile,
    workload::{GENERATORS, Recipe, recipe_names},
};

/// Lists what there is, with a line on each.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to list; without it, everything.
    #[arg(value_enum)]
    what: Option<What>,
    /// Parameters and origins too.
    #[arg(long, short)]
    long: bool,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum What {
    /// Allocation policies.
    Strategies,
    /// Patterns with their parameters set.
    Workloads,
    /// What workloads are made from.
    Generators,
    /// Sets of cases.
    Suites,
}

/// One thing in the list.
#[derive(Debug, Serialize)]
struct Item {
    kind: What,
    name: String,
    summary: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    origin: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parameters: Vec<Parameter>,
}

/// One parameter of a strategy or generator.
#[derive(Debug, Serialize)]
struct Parameter {
    name: &'static str,
    values: String,
    default: &'static str,
    help: &'static str,
}

pub fn run(args: Args) -> Outcome {
    let kinds = match args.what {
        Some(what) => vec![what],
        None => What::value_variants().to_vec(),
    };
    let mut items = Vec::new();
    for kind in &kinds {
        items.extend(items_of(*kind)?);
    }
    if args.json {
        let document = serde_json::json!({ "schema": 1, "rows": items });
        output::say(&serde_json::to_string_pretty(&document)?)?;
    } else {
        output::say(&text(&kinds, &items, args.long))?;
    }
    Ok(exit::OK)
}

fn items_of(kind: What) -> Result<Vec<Item>, Failure> {
    Ok(match kind {
        What::Strategies => STRATEGIES
            .iter()
            .chain([&plugin::ENTRY])
            .map(|entry| Item {
                kind,
                name: entry.name.to_owned(),
                summary: entry.summary.to_owned(),
                origin: entry.origin.to_owned(),
                parameters: entry
                    .parameters
                    .iter()
                    .map(|p| parameter(p.name, p.values.to_string(), p.default, p.help))
                    .collect(),
            })
            .collect(),
        What::Generators => GENERATORS
            .iter()
            .map(|entry| Item {
                kind,
                name: entry.name.to_owned(),
                summary: entry.summary.to_owned(),
                origin: String::new(),
                parameters: entry
                    .parameters
                    .iter()
                    .map(|p| parameter(p.name, p.values.to_string(), p.default, p.help))
                    .collect(),
            })
            .collect(),
        What::Workloads => recipe_names()
            .map(|name| {
                let recipe = Recipe::named(name).map_err(Failure::usage)?;
                Ok(Item {
                    kind,
                    name: name.to_owned(),
                    summary: recipe.purpose().to_owned(),
                    origin: recipe.origin().to_owned(),
                    parameters: Vec::new(),
                })
            })
            .collect::<Result<_, Failure>>()?,
        What::Suites => SuiteFile::embedded()
            .map(|name| {
                let suite = SuiteFile::load(name).map_err(Failure::usage)?;
                Ok(Item {
                    kind,
                    name: suite.name,
                    summary: suite.question,
                    origin: String::new(),
                    parameters: Vec::new(),
                })
            })
            .collect::<Result<_, Failure>>()?,
    })
}

fn parameter(name: &'static str, values: String, default: &'static str, help: &'static str) -> Parameter {
    Parameter { name, values, default, help }
}

fn text(kinds: &[What], items: &[Item], long: bool) -> String {
    let mut out = String::new();
    let width = items.iter().map(|item| item.name.len()).max().unwrap_or(0);
    for kind in kinds {
        if kinds.len() > 1 {
            let title = format!("{kind:?}").to_lowercase();
            let gap = if out.is_empty() { "" } else { "\n" };
            let _ = writeln!(out, "{gap}{title}:");
        }
        for item in items.iter().filter(|item| item.kind == *kind) {
            let _ = writeln!(out, "  {:width$}  {}", item.name, item.summary);
            if long {
                if !item.origin.is_empty() {
                    let _ = writeln!(out, "  {:width$}    origin: {}", "", item.origin);
                }
                for Parameter { name, values, default, help } in &item.parameters {
                    let default = if default.is_empty() { "none" } else { default };
                    let _ = writeln!(out, "  {:width$}    {name}: {help} ({values}; default {default})", "");
                }
            }
        }
    }
    out
}
