//! `oomph list`.

use std::{fmt::Write as _, path::PathBuf};

use clap::ValueEnum;
use serde::Serialize;

use super::{
    exit::{self, CommandResult},
    output,
};
use crate::{
    base::{CatalogEntry, Parameter},
    models::{GENERATORS, Recipe, all_recipes},
    plugin,
    strategy::STRATEGIES,
    suite::SuiteFile,
};

/// Lists strategies, workloads, generators and suites, one per line.
///
/// Workloads and suites are those built in and those of the current folder (`workloads/NAME.toml`,
/// `suites/NAME.toml`), which are marked with their file.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to list [default: everything].
    #[arg(value_enum)]
    what: Option<ListedKind>,
    /// Also show parameters, origins, and how a strategy differs from its origin.
    #[arg(long, short)]
    long: bool,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum ListedKind {
    /// Allocators.
    #[default]
    Strategies,
    /// Allocation patterns with fixed parameters.
    Workloads,
    /// Programs that generate workloads.
    Generators,
    /// Sets of cases.
    Suites,
}

/// One line of the list.
#[derive(Debug, Default, Serialize)]
struct ListedItem {
    kind: ListedKind,
    name: String,
    summary: String,
    /// Its file in the current folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    /// Whether that file replaces a built-in one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    replaces_built_in: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    origin: String,
    /// In what a strategy differs from its origin.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    differs: &'static [&'static str],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parameters: Vec<ListedParameter>,
}

/// One parameter of a strategy or generator.
#[derive(Debug, Serialize)]
struct ListedParameter {
    name: &'static str,
    values: String,
    default: &'static str,
    help: &'static str,
}

pub fn run(args: Args) -> CommandResult {
    let kinds = match args.what {
        Some(what) => vec![what],
        None => ListedKind::value_variants().to_vec(),
    };
    let mut items = Vec::new();
    for kind in &kinds {
        items.extend(items_of(*kind));
    }
    if args.json {
        let document = serde_json::json!({ "schema": crate::measure::SCHEMA, "rows": items });
        output::say_data(&serde_json::to_string_pretty(&document)?)?;
    } else {
        output::say(&text(&kinds, &items, args.long))?;
    }
    Ok(exit::OK)
}

impl ListedItem {
    fn new(kind: ListedKind, name: &str, summary: &str) -> ListedItem {
        ListedItem { kind, name: name.to_owned(), summary: summary.to_owned(), ..ListedItem::default() }
    }

    /// Items with files: their summary and origin, or what is wrong with the file. A broken file must
    /// not hide the rest of the list.
    fn from_catalog<E: ToString>(
        kind: ListedKind,
        entries: Vec<CatalogEntry>,
        describe: impl Fn(&str) -> Result<(String, String), E>,
    ) -> Vec<ListedItem> {
        let item = |from: CatalogEntry| {
            let (summary, origin) = describe(&from.name).unwrap_or_else(|problem| {
                let problem = problem.to_string();
                (format!("invalid: {}", problem.lines().next().unwrap_or_default()), String::new())
            });
            let replaces_built_in = from.replaces_built_in();
            ListedItem { file: from.file, replaces_built_in, origin, ..ListedItem::new(kind, &from.name, &summary) }
        };
        entries.into_iter().map(item).collect()
    }
}

fn items_of(kind: ListedKind) -> Vec<ListedItem> {
    match kind {
        ListedKind::Strategies => STRATEGIES
            .iter()
            .chain([&plugin::ENTRY])
            .map(|entry| ListedItem {
                origin: entry.origin.to_owned(),
                differs: entry.differs,
                parameters: entry.parameters.iter().map(listed).collect(),
                ..ListedItem::new(kind, entry.name, entry.summary)
            })
            .collect(),
        ListedKind::Generators => GENERATORS
            .iter()
            .map(|entry| ListedItem {
                parameters: entry.parameters.iter().filter(|parameter| !parameter.is_alias()).map(listed).collect(),
                ..ListedItem::new(kind, entry.name, entry.summary)
            })
            .collect(),
        ListedKind::Workloads => ListedItem::from_catalog(kind, all_recipes(), |name| {
            Recipe::named(name).map(|recipe| (recipe.purpose, recipe.origin))
        }),
        ListedKind::Suites => ListedItem::from_catalog(kind, SuiteFile::all_named(), |name| {
            SuiteFile::load(name).map(|suite| (suite.question, String::new()))
        }),
    }
}

fn listed(&Parameter { name, values, default, help }: &Parameter) -> ListedParameter {
    ListedParameter { name, values: values.to_string(), default, help }
}

fn text(kinds: &[ListedKind], items: &[ListedItem], long: bool) -> String {
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
                for difference in item.differs {
                    let _ = writeln!(out, "  {:width$}    differs: {difference}", "");
                }
                for ListedParameter { name, values, default, help } in &item.parameters {
                    let default = if default.is_empty() { "none" } else { default };
                    let _ = writeln!(out, "  {:width$}    {name}: {help} ({values}; default {default})", "");
                }
            }
        }
    }
    out
}

/// The file of an item that is not built in.
fn mark(item: &ListedItem) -> String {
    let instead = if item.replaces_built_in { ", replaces the built-in one" } else { "" };
    item.file.as_ref().map(|file| format!(" [{}{instead}]", file.display())).unwrap_or_default()
}
