//! `--export-csv` and its siblings: the results of a `run` or a `replay` once more, in files of the user's choice.

use std::path::PathBuf;

use super::{failure::Failure, output};
use crate::{
    measure::CaseRecord,
    report::{
        self, Medium, Render,
        html::{self, Run},
    },
};

/// Of these options alone: a heading for what comes next would be over everything after them.
const HEADING: &str = "Exports";

/// Where else the results go.
#[derive(Debug, Default, clap::Args)]
pub struct ExportOptions {
    /// Write all columns as CSV to this file as well.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    export_csv: Option<PathBuf>,
    /// Write all columns as JSON to this file as well.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    export_json: Option<PathBuf>,
    /// Write the table as markdown to this file as well.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    export_markdown: Option<PathBuf>,
    /// Write the page with charts and tables to this file as well.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    export_html: Option<PathBuf>,
}

impl ExportOptions {
    /// Whether anything was asked for.
    pub fn is_asked(&self) -> bool {
        [&self.export_csv, &self.export_json, &self.export_markdown, &self.export_html]
            .iter()
            .any(|path| path.is_some())
    }

    /// Writes what was asked for; the page is made from `run`.
    pub fn write(&self, records: &[CaseRecord], run: impl FnOnce() -> Result<Run, Failure>) -> Result<(), Failure> {
        let save = |path: &PathBuf, text: &str| -> Result<(), Failure> {
            report::save(path, text).map_err(Failure::usage)?;
            output::complain(&format!("written: {}", path.display()));
            Ok(())
        };
        if let Some(path) = &self.export_csv {
            save(path, &records.csv()?)?;
        }
        if let Some(path) = &self.export_json {
            save(path, &format!("{:#}\n", records.json()))?;
        }
        if let Some(path) = &self.export_markdown {
            save(path, &records.text(Medium::Markdown))?;
        }
        if let Some(path) = &self.export_html {
            save(path, &html::page(&[run()?], &[])?)?;
        }
        Ok(())
    }
}
