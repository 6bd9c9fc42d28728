//! Names that tell the cases of a suite apart. Rows and files of a run are found by the id of their case, so two cases
//! with one id would overwrite each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{Case, SuiteError};
use crate::replay::OnOutOfMemory;

/// The names of files: of each the last parts of its path, as many as tell it from the others.
pub(super) fn names_of_files(paths: &BTreeSet<PathBuf>) -> BTreeMap<&Path, String> {
    let last_parts = |path: &Path, count: usize| -> String {
        let parts: Vec<_> = path.iter().rev().take(count).collect();
        parts.into_iter().rev().collect::<PathBuf>().to_string_lossy().into_owned()
    };
    let mut names: BTreeMap<&Path, String> = paths.iter().map(|path| (&**path, last_parts(path, 1))).collect();
    let longest = paths.iter().map(|path| path.iter().count()).max().unwrap_or_default();
    for count in 2..=longest {
        let mut known: BTreeMap<String, usize> = BTreeMap::new();
        for name in names.values() {
            *known.entry(name.clone()).or_default() += 1;
        }
        for (path, name) in names.iter_mut().filter(|(_, name)| known[*name] > 1) {
            *name = last_parts(path, count);
        }
    }
    names
}

/// Gives cases that differ only in settings of their groups different workload names: `random` and
/// `random[on_oom=skip]`. Other cases with one id are an error, or the same case if `--limit`, `--seed` or `--strategy`
/// replaced what told them apart (`replaced`): then the first one is kept.
pub(super) fn tell_apart(suite: &str, cases: &mut Vec<Case>, replaced: bool) -> Result<(), SuiteError> {
    let mut same: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (place, case) in cases.iter().enumerate() {
        same.entry(case.label.case_id()).or_default().push(place);
    }
    for places in same.values().filter(|places| places.len() > 1) {
        let settings: Vec<Vec<String>> = places.iter().map(|&place| group_settings(&cases[place])).collect();
        if settings.windows(2).any(|pair| pair[0] != pair[1]) {
            for (&place, settings) in places.iter().zip(&settings) {
                add_settings(&mut cases[place].label.workload, settings);
            }
        }
    }
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    let mut duplicate = None;
    cases.retain(|case| {
        let (id, content) = (case.label.case_id(), case_content(case));
        match known.get(&id) {
            None => known.insert(id, content).is_none(),
            Some(first) if replaced && *first == content => false,
            Some(_) => {
                duplicate.get_or_insert(id);
                false
            }
        }
    });
    match duplicate {
        None => Ok(()),
        Some(case_id) => Err(SuiteError::DuplicateCase { suite: suite.to_owned(), case_id }),
    }
}

/// Everything that decides what a case does, besides the content of its source.
pub(super) fn case_content(case: &Case) -> String {
    let timeout = case.timeout.map(|timeout| timeout.to_string()).unwrap_or_default();
    format!("{}{timeout}", json!(case))
}

/// The settings of a group that are not the default ones and not part of an id, as the suite file writes them.
fn group_settings(case: &Case) -> Vec<String> {
    let threads = case.threads.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
    let settings = [
        (case.on_out_of_memory == OnOutOfMemory::Skip).then(|| "on_oom=skip".to_owned()),
        case.without_work.then(|| "work=false".to_owned()),
        case.timed.then(|| "timed=true".to_owned()),
        (!threads.is_empty()).then(|| format!("threads={threads}")),
        (!case.sharing.is_default()).then(|| format!("sharing={}", case.sharing.name())),
        case.timeout.map(|timeout| format!("timeout={timeout}")),
    ];
    settings.into_iter().flatten().collect()
}

/// Adds settings to a name, in the form of parameters: `name[key=value;key=value]`.
fn add_settings(name: &mut String, settings: &[String]) {
    if settings.is_empty() {
        return;
    }
    let settings = settings.join(";");
    match name.strip_suffix(']').filter(|_| name.contains('[')) {
        Some(with_parameters) => *name = format!("{with_parameters};{settings}]"),
        None => *name = format!("{name}[{settings}]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::{CaseSettings, SuiteFile};

    fn cases(text: &str, limit: Option<&str>) -> Result<Vec<String>, String> {
        let suite = SuiteFile::parse("mine", "mine.toml", &format!("question = 'what?'\n{text}")).unwrap();
        let limit = limit.map(|limit| limit.parse().unwrap());
        let settings = CaseSettings { device: "sim".parse().unwrap(), limit, seed: None, timeout: None };
        let cases = suite.cases(&settings).map_err(|error| error.to_string())?;
        Ok(cases.iter().map(|case| case.label.case_id()).collect())
    }

    #[test]
    fn files_are_named_by_what_tells_them_apart() {
        let paths =
            ["runs/a/rank0/x.pickle", "runs/a/rank1/x.pickle", "runs/b/rank1/x.pickle", "runs/y.pickle", "x.pkl"];
        let paths: BTreeSet<PathBuf> = paths.iter().map(PathBuf::from).collect();
        let names: Vec<String> = names_of_files(&paths).into_values().collect();
        assert_eq!(names, ["rank0/x.pickle", "a/rank1/x.pickle", "b/rank1/x.pickle", "y.pickle", "x.pkl"]);
        let nested: BTreeSet<PathBuf> = ["x.pickle", "a/x.pickle", "/x.pickle"].iter().map(PathBuf::from).collect();
        assert_eq!(names_of_files(&nested).into_values().collect::<BTreeSet<_>>().len(), 3);
    }

    #[test]
    fn files_of_one_name_are_several_cases() {
        let folder = tempfile::tempdir().unwrap();
        for rank in ["rank0", "rank1"] {
            std::fs::create_dir(folder.path().join(rank)).unwrap();
            std::fs::write(folder.path().join(rank).join("x.oomph"), "").unwrap();
        }
        let pattern = folder.path().join("*/x.oomph");
        let ids = cases(&format!("[[group]]\nworkloads = ['{}']\nstrategies = ['direct']", pattern.display()), None);
        assert_eq!(ids.unwrap(), ["mine/rank0/x.oomph/direct@sim#1", "mine/rank1/x.oomph/direct@sim#1"]);
    }

    #[test]
    fn groups_that_differ_in_settings_have_several_cases() {
        let group = "[[group]]\nstrategies = ['direct']\nset = { rounds = 5 }\n";
        let ids = cases(
            &format!(
                "{group}workloads = ['checkerboard']\n{group}workloads = ['checkerboard']\non_oom = 'skip'\nwork = false\n"
            ),
            None,
        );
        assert_eq!(
            ids.unwrap(),
            [
                "mine/checkerboard[rounds=5]/direct@sim#1",
                "mine/checkerboard[rounds=5;on_oom=skip;work=false]/direct@sim#1",
            ]
        );
    }

    #[test]
    fn repeated_case_is_an_error() {
        let group = |more: &str| format!("[[group]]\nworkloads = ['random']\nstrategies = ['direct']\n{more}\n");
        for text in [
            group("limits = ['1GiB', '1024MiB']"),
            group("seeds = [1, 1]"),
            group("").replace("['direct']", "['direct', 'direct']"),
            group("").repeat(2),
        ] {
            let message = cases(&text, None).unwrap_err();
            assert!(message.contains("two cases") && message.contains("mine/random/direct@sim"), "{message}");
        }
        let two = group("limits = ['1GiB']") + &group("limits = ['2GiB']");
        assert_eq!(cases(&two, None).unwrap().len(), 2);
        assert_eq!(cases(&two, Some("4GiB")).unwrap(), ["mine/random/direct@sim<=4GiB#1"]);
    }
}
