//! What the cases of a run come down to, as one number.
//!
//! Ids name cases but do not say everything about them: the same id may stand for another recipe or recording on a machine
//! with other files. Whoever runs a shard writes the number down, and shards that differ in it are not parts of one run.

use std::{collections::BTreeMap, fs};

use super::{Case, worker::Order};
use crate::{measure::fnv1a, models::Recipe};

/// A number for all that the cases are told to do: their settings, the words of their recipes, and the length of their
/// trace files. The files' own bytes are not looked at, because a recording may have gigabytes.
#[must_use]
pub fn contents(cases: &[Case]) -> String {
    let mut sources: BTreeMap<&str, String> = BTreeMap::new();
    let mut text = String::new();
    for case in cases {
        sources.entry(&case.origin.name).or_insert_with(|| what_is_there(case));
        text.push_str(&format!("{:?}", Order::of(case)));
        text.push_str(&case.timeout.map(|timeout| timeout.to_string()).unwrap_or_default());
        text.push('\n');
    }
    for (name, what) in sources {
        text.push_str(&format!("{name}: {what}\n"));
    }
    format!("{:016x}", fnv1a(text.as_bytes()))
}

/// The same for a suite whose cases are its models: a number for what their recipes say.
#[must_use]
pub fn contents_of_models(models: &[Recipe]) -> String {
    let text: String = models.iter().map(|model| model.words() + "\n").collect();
    format!("{:016x}", fnv1a(text.as_bytes()))
}

/// What the case's source is, apart from its name. One that cannot be opened has a case of its own that says so.
fn what_is_there(case: &Case) -> String {
    match case.origin.recipe() {
        Ok(Some(recipe)) => recipe.words(),
        _ => fs::metadata(&case.origin.name).map(|file| format!("{} bytes", file.len())).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        replay::OnOutOfMemory,
        suite::{SourceSpec, test_case},
    };

    #[test]
    fn the_same_cases_have_the_same_number_and_others_another() {
        let case = || test_case("checkerboard", "caching");
        let known = contents(&[case()]);
        assert_eq!(contents(&[case()]), known);
        let skipping = Case { on_out_of_memory: OnOutOfMemory::Skip, ..case() };
        let hurried = Case { timeout: Some("1s".parse().unwrap()), ..case() };
        for others in
            [vec![], vec![skipping], vec![hurried], vec![case(), case()], vec![test_case("random", "caching")]]
        {
            assert_ne!(contents(&others), known);
        }
    }

    #[test]
    fn another_recipe_or_recording_under_the_same_name_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let with = |file: &str, text: &str| {
            let path = folder.path().join(file);
            fs::write(&path, text).unwrap();
            let origin = SourceSpec { name: path.display().to_string(), ..SourceSpec::default() };
            contents(&[Case { origin, ..test_case("random", "caching") }])
        };
        let recipe = |rest: &str| format!("generator = 'checkerboard'\npurpose = 'Mine.'\norigin = 'here'\n{rest}");
        let plain = with("mine.toml", &recipe(""));
        assert_ne!(with("mine.toml", &recipe("set = { rounds = 2 }\n")), plain);
        assert_eq!(with("mine.toml", &recipe("# a note\n")), plain);
        assert_ne!(with("mine.oomph", "oomph-trace 1\n"), with("mine.oomph", "oomph-trace 1\n\n"));
    }
}
