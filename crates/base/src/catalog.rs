//! Things that are found by name: TOML files in the binary and in a folder of the user, enums whose values have names, and
//! suggestions for wrong names.
//!
//! Workloads and suites are kept this way: the binary works wherever it is installed, and a user can add or replace a file.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::read_text_file;

/// All files of one kind. Where a name exists in both places, the file in the folder wins.
#[derive(Clone, Copy, Debug)]
pub struct Catalog {
    /// The folder, relative to the current one.
    pub folder: &'static str,
    /// Name and text of each file in the binary.
    pub built_in: &'static [(&'static str, &'static str)],
}

/// A name, and where its file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogEntry {
    /// The file name without its extension.
    pub name: String,
    /// The file in the folder. `None` for a built-in file, and for an unchanged copy of one.
    pub file: Option<PathBuf>,
    /// Whether the binary has a file of this name.
    pub is_built_in: bool,
}

impl CatalogEntry {
    /// Whether the file in the folder replaces a different built-in one.
    #[must_use]
    pub const fn replaces_built_in(&self) -> bool {
        self.file.is_some() && self.is_built_in
    }
}

impl Catalog {
    /// The names of the built-in files.
    pub fn built_in_names(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.built_in.iter().map(|(name, _)| *name)
    }

    /// The text of a built-in file.
    #[must_use]
    pub fn built_in_text(&self, name: &str) -> Option<&'static str> {
        self.built_in.iter().find(|(built_in, _)| *built_in == name).map(|(_, text)| *text)
    }

    /// The file of this name in the folder, if there is one. A text with a separator is a path, not a name.
    #[must_use]
    pub fn own_file(&self, name: &str) -> Option<PathBuf> {
        let path = Path::new(self.folder).join(format!("{name}.toml"));
        (!name.contains('/') && path.is_file()).then_some(path)
    }

    /// Every entry, in name order.
    #[must_use]
    pub fn all(&self) -> Vec<CatalogEntry> {
        self.all_beside(Path::new(""))
    }

    /// The name nearest to `typed`, and all names: for the error about an unknown name.
    #[must_use]
    pub fn nearest_and_all(&self, typed: &str) -> (Option<String>, Vec<String>) {
        let names: Vec<String> = self.all().into_iter().map(|entry| entry.name).collect();
        (nearest(typed, names.iter().map(String::as_str)), names)
    }

    fn all_beside(&self, current: &Path) -> Vec<CatalogEntry> {
        let mut all: Vec<CatalogEntry> = self.own_names(current);
        for name in self.built_in_names() {
            match all.iter_mut().find(|own| own.name == name) {
                Some(own) => {
                    own.is_built_in = true;
                    let is_copy = |path: &PathBuf| read_text_file(path).ok().as_deref() == self.built_in_text(name);
                    own.file = own.file.take().filter(|path| !is_copy(path));
                }
                None => all.push(CatalogEntry { name: name.to_owned(), file: None, is_built_in: true }),
            }
        }
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The files in the folder, which need not exist.
    fn own_names(&self, current: &Path) -> Vec<CatalogEntry> {
        let entries = fs::read_dir(current.join(self.folder)).into_iter().flatten();
        let named = entries.filter_map(|entry| {
            let path = entry.ok()?.path();
            let is_toml = path.extension().is_some_and(|extension| extension == "toml") && path.is_file();
            let name = is_toml.then(|| path.file_stem()?.to_str().map(str::to_owned)).flatten()?;
            Some(CatalogEntry { name, file: Some(path), is_built_in: false })
        });
        named.collect()
    }
}

/// The candidate nearest to `typed`, if it is near enough to be a typing error.
///
/// ```
/// assert_eq!(oomph_base::nearest("cachign", ["null", "caching"]), Some("caching".to_owned()));
/// assert_eq!(oomph_base::nearest("xyz", ["null", "caching"]), None);
/// ```
pub fn nearest<'a>(typed: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(typed, candidate), candidate))
        .filter(|(similarity, _)| *similarity > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate.to_owned())
}

/// The end of a sentence about a wrong name: `; did you mean 'caching'?`. Empty without a suggestion.
#[must_use]
pub fn did_you_mean(suggestion: Option<&str>) -> String {
    suggestion.map(|name| format!("; did you mean '{name}'?")).unwrap_or_default()
}

/// An error message lists at most this many names.
const MOST_NAMES: usize = 40;

/// Like [`did_you_mean`], but lists the known names where there is no suggestion, or their number where they are many.
///
/// ```
/// use oomph_base::did_you_mean_among;
/// assert_eq!(did_you_mean_among(None, ["null", "caching"]), "; there are: null, caching");
/// ```
#[must_use]
pub fn did_you_mean_among<'a>(suggestion: Option<&str>, known: impl IntoIterator<Item = &'a str>) -> String {
    match suggestion {
        Some(_) => did_you_mean(suggestion),
        None => match known.into_iter().collect::<Vec<_>>() {
            names if names.len() > MOST_NAMES => format!("; `oomph list` names all {}", names.len()),
            names => format!("; there are: {}", names.join(", ")),
        },
    }
}

/// Defines an enum whose values have one name each: in files, in tables and in messages.
///
/// ```
/// oomph_base::named_enum! {
///     /// The parts of a day.
///     pub enum DayPart {
///         /// From sunrise to noon.
///         Morning = "morning",
///         /// From noon to sunset.
///         Afternoon = "afternoon",
///     }
/// }
/// assert_eq!(DayPart::ALL.map(DayPart::name), ["morning", "afternoon"]);
/// assert_eq!(serde_json::to_string(&DayPart::Morning).unwrap(), "\"morning\"");
/// ```
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $type:ident { $($(#[$value_meta:meta])* $value:ident = $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ::serde::Serialize, ::serde::Deserialize)]
        pub enum $type { $($(#[$value_meta])* #[serde(rename = $name)] $value,)* }

        impl $type {
            /// Every value, in the order of declaration.
            pub const ALL: [$type; [$($name),*].len()] = [$($type::$value),*];

            /// The name in files, tables and messages.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $($type::$value => $name,)* }
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const CATALOG: Catalog =
        Catalog { folder: "pots", built_in: &[("tea", "green"), ("soup", "hot"), ("jam", "sweet")] };

    #[test]
    fn entries_are_sorted_and_know_their_file() {
        let current = tempfile::tempdir().unwrap();
        let pots = current.path().join("pots");
        assert!(CATALOG.all_beside(current.path()).iter().all(|entry| entry.file.is_none() && entry.is_built_in));
        fs::create_dir_all(pots.join("folder.toml")).unwrap();
        for (file, text) in [("tea.toml", "black"), ("soup.toml", "hot"), ("rice.toml", "white"), ("notes.md", "")] {
            fs::write(pots.join(file), text).unwrap();
        }
        let all = CATALOG.all_beside(current.path());
        let found: Vec<_> =
            all.iter().map(|entry| (entry.name.as_str(), entry.file.is_some(), entry.replaces_built_in())).collect();
        assert_eq!(
            found,
            [("jam", false, false), ("rice", true, false), ("soup", false, false), ("tea", true, true)],
            "a copy of the built-in soup replaces nothing"
        );
        assert_eq!(all[1].file, Some(pots.join("rice.toml")));
    }

    #[test]
    fn a_path_is_not_a_name() {
        assert_eq!(CATALOG.own_file("../Cargo"), None);
        assert_eq!(CATALOG.built_in_text("soup"), Some("hot"));
        assert_eq!(CATALOG.built_in_text("soap"), None);
        assert_eq!(CATALOG.nearest_and_all("soap").0.as_deref(), Some("soup"));
    }
}
