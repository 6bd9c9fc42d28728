//! `oomph list`.

use std::{fmt::Write as _, path::PathBuf};

use clap::ValueEnum;
use serde::Serialize;

use super::{exit, failure::Outcome, output};
use crate::{
    base::CatalogEntry,
    models::{GENERATORS, Recipe, all_recipes},
    plugin,
    strategy::STRATEGIES,
    suite::SuiteFile,
};

/// Lists what there is, with a line on each.
///
/// Workloads and suites are those that are built in and those of the current folder (`workloads/NAME.toml`,
/// `suites/NAME.toml`), which are marked with their file.
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
    /// The file of the current folder that it is from.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    /// Whether that file is taken in place of something built in.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    replaces_built_in: bool,
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
        items.extend(items_of(*kind));
    }
    if args.json {
        let document = serde_json::json!({ "schema": 1, "rows": items });
        output::say(&serde_json::to_string_pretty(&document)?)?;
    } else {
        output::say(&text(&kinds, &items, args.long))?;
    }
    Ok(exit::OK)
}

impl Item {
    fn new(kind: What, name: &str, summary: &str) -> Item {
        Item {
            kind,
            name: name.to_owned(),
            summary: summary.to_owned(),
            file: None,
            replaces_built_in: false,
            origin: String::new(),
            parameters: Vec::new(),
        }
    }

    /// What has a file: its summary and origin, or what is wrong with it. A broken file of the current folder must not
    /// hide everything else.
    fn shelved(kind: What, from: CatalogEntry, told: Result<(String, String), String>) -> Item {
        let replaces_built_in = from.replaces_built_in();
        let (summary, origin) = told.unwrap_or_else(|problem| {
            let first_line = problem.lines().next().unwrap_or_default();
            (format!("cannot be used: {first_line}"), String::new())
        });
        Item { file: from.file, replaces_built_in, origin, ..Item::new(kind, &from.name, &summary) }
    }
}

fn items_of(kind: What) -> Vec<Item> {
    match kind {
        What::Strategies => STRATEGIES
            .iter()
            .chain([&plugin::ENTRY])
            .map(|entry| Item {
                origin: entry.origin.to_owned(),
                parameters: entry
                    .parameters
                    .iter()
                    .map(|p| parameter(p.name, p.values.to_string(), p.default, p.help))
                    .collect(),
                ..Item::new(kind, entry.name, entry.summary)
            })
            .collect(),
        What::Generators => GENERATORS
            .iter()
            .map(|entry| Item {
                parameters: entry
                    .parameters
                    .iter()
                    .map(|p| parameter(p.name, p.values.to_string(), p.default, p.help))
                    .collect(),
                ..Item::new(kind, entry.name, entry.summary)
            })
            .collect(),
        What::Workloads => all_recipes()
            .into_iter()
            .map(|from| {
                let told = Recipe::named(&from.name)
                    .map(|recipe| (recipe.purpose().to_owned(), recipe.origin().to_owned()))
                    .map_err(|error| error.to_string());
                Item::shelved(kind, from, told)
            })
            .collect(),
        What::Suites => SuiteFile::all_named()
            .into_iter()
            .map(|from| {
                let told = SuiteFile::load(&from.name)
                    .map(|suite| (suite.question, String::new()))
                    .map_err(|error| error.to_string());
                Item::shelved(kind, from, told)
            })
            .collect(),
    }
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
            let _ = writeln!(out, "  {:width$}  {}{}", item.name, item.summary, mark(item));
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

/// Where it comes from, if not from the binary.
fn mark(item: &Item) -> String {
    let instead = if item.replaces_built_in { ", instead of the built-in one" } else { "" };
    item.file.as_ref().map(|file| format!(" [{}{instead}]", file.display())).unwrap_or_default()
}
