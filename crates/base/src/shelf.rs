//! What is known by name: TOML files that travel with the binary, and those of a folder beside the user.
//!
//! Workloads and suites are both kept this way, so that the binary works wherever it is installed and anybody can add to
//! what it knows, or put something else in its place.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::nearest;

/// One kind of such files. Under a name that is in both places, the folder's file is taken.
#[derive(Clone, Copy, Debug)]
pub struct Shelf {
    /// The folder, seen from the current one.
    pub folder: &'static str,
    /// Name and text of each file that travels with the binary.
    pub built_in: &'static [(&'static str, &'static str)],
}

/// A name, and where what it stands for comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shelved {
    /// The file's name without the ending.
    pub name: String,
    /// The folder's file; none where it is the built-in one, or a copy of that.
    pub file: Option<PathBuf>,
    /// Whether the binary has something under this name.
    pub is_built_in: bool,
}

impl Shelved {
    /// Whether the folder's file is taken in place of a built-in one that says something else.
    #[must_use]
    pub const fn replaces_built_in(&self) -> bool {
        self.file.is_some() && self.is_built_in
    }
}

impl Shelf {
    /// What travels with the binary.
    pub fn built_in_names(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.built_in.iter().map(|(name, _)| *name)
    }

    /// The text of what travels with the binary under this name.
    #[must_use]
    pub fn built_in_text(&self, name: &str) -> Option<&'static str> {
        self.built_in.iter().find(|(built_in, _)| *built_in == name).map(|(_, text)| *text)
    }

    /// The folder's file of this name, if there is one. What has a separator is a path and no name.
    #[must_use]
    pub fn own_file(&self, name: &str) -> Option<PathBuf> {
        let path = Path::new(self.folder).join(format!("{name}.toml"));
        (!name.contains('/') && path.is_file()).then_some(path)
    }

    /// Everything that has a name, in name order.
    #[must_use]
    pub fn all(&self) -> Vec<Shelved> {
        self.all_beside(Path::new(""))
    }

    /// The name nearest to what was typed, and all there are: what an error about an unknown name tells.
    #[must_use]
    pub fn nearest_and_all(&self, typed: &str) -> (Option<String>, Vec<String>) {
        let names: Vec<String> = self.all().into_iter().map(|shelved| shelved.name).collect();
        (nearest(typed, names.iter().map(String::as_str)), names)
    }

    fn all_beside(&self, current: &Path) -> Vec<Shelved> {
        let mut all: Vec<Shelved> = self.own_names(current);
        for name in self.built_in_names() {
            match all.iter_mut().find(|own| own.name == name) {
                Some(own) => {
                    own.is_built_in = true;
                    let is_copy = |path: &PathBuf| fs::read_to_string(path).ok().as_deref() == self.built_in_text(name);
                    own.file = own.file.take().filter(|path| !is_copy(path));
                }
                None => all.push(Shelved { name: name.to_owned(), file: None, is_built_in: true }),
            }
        }
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Those of the folder, which need not exist.
    fn own_names(&self, current: &Path) -> Vec<Shelved> {
        let entries = fs::read_dir(current.join(self.folder)).into_iter().flatten();
        let named = entries.filter_map(|entry| {
            let path = entry.ok()?.path();
            let is_toml = path.extension().is_some_and(|extension| extension == "toml") && path.is_file();
            let name = is_toml.then(|| path.file_stem()?.to_str().map(str::to_owned)).flatten()?;
            Some(Shelved { name, file: Some(path), is_built_in: false })
        });
        named.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHELF: Shelf = Shelf { folder: "pots", built_in: &[("tea", "green"), ("soup", "hot"), ("jam", "sweet")] };

    #[test]
    fn names_are_in_order_and_say_where_they_come_from() {
        let current = tempfile::tempdir().unwrap();
        let pots = current.path().join("pots");
        assert!(SHELF.all_beside(current.path()).iter().all(|shelved| shelved.file.is_none() && shelved.is_built_in));
        fs::create_dir_all(pots.join("folder.toml")).unwrap();
        for (file, text) in [("tea.toml", "black"), ("soup.toml", "hot"), ("rice.toml", "white"), ("notes.md", "")] {
            fs::write(pots.join(file), text).unwrap();
        }
        let all = SHELF.all_beside(current.path());
        let found: Vec<_> = all
            .iter()
            .map(|shelved| (shelved.name.as_str(), shelved.file.is_some(), shelved.replaces_built_in()))
            .collect();
        assert_eq!(
            found,
            [("jam", false, false), ("rice", true, false), ("soup", false, false), ("tea", true, true)],
            "a copy of the built-in soup replaces nothing"
        );
        assert_eq!(all[1].file, Some(pots.join("rice.toml")));
    }

    #[test]
    fn a_path_is_no_name() {
        assert_eq!(SHELF.own_file("../Cargo"), None);
        assert_eq!(SHELF.built_in_text("soup"), Some("hot"));
        assert_eq!(SHELF.built_in_text("soap"), None);
        assert_eq!(SHELF.nearest_and_all("soap").0.as_deref(), Some("soup"));
    }
}
