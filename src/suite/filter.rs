//! Which cases of a suite to run.

/// Chooses cases by their id.
///
/// A pattern is a part of the id, or a glob over the whole id where it contains `*`. A case is taken if any `only`
/// pattern matches (or there is none) and no `skip` pattern does.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Take only these.
    pub only: Vec<String>,
    /// Leave these out.
    pub skip: Vec<String>,
    /// Patterns must equal the whole id.
    pub exact: bool,
}

impl Filter {
    /// Whether the case is taken.
    #[must_use]
    pub fn takes(&self, case_id: &str) -> bool {
        let matches = |pattern: &String| self.matches(pattern, case_id);
        (self.only.is_empty() || self.only.iter().any(matches)) && !self.skip.iter().any(matches)
    }

    fn matches(&self, pattern: &str, case_id: &str) -> bool {
        if self.exact {
            pattern == case_id
        } else if pattern.contains('*') {
            glob(pattern, case_id)
        } else {
            case_id.contains(pattern)
        }
    }
}

/// Whether `text` is what `pattern` says, `*` standing for any run of characters.
pub(super) fn glob(pattern: &str, text: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let pieces: Vec<&str> = pieces.collect();
    let Some((last, middle)) = pieces.split_last() else { return rest.is_empty() };
    for piece in middle {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn takes(only: &[&str], skip: &[&str], exact: bool, id: &str) -> bool {
        let own = |list: &[&str]| list.iter().map(|&s| s.to_owned()).collect();
        Filter { only: own(only), skip: own(skip), exact }.takes(id)
    }

    #[test]
    fn words_globs_and_exact_ids_choose_cases() {
        let id = "quick/random/caching@sim:h200#1";
        assert!(takes(&[], &[], false, id));
        assert!(takes(&["random"], &[], false, id));
        assert!(takes(&["quick/*/caching*"], &[], false, id));
        assert!(!takes(&["*/direct*"], &[], false, id));
        assert!(!takes(&["quick/*/caching"], &[], false, id), "a glob covers the whole id");
        assert!(!takes(&["random"], &["caching"], false, id));
        assert!(takes(&[id], &[], true, id));
        assert!(!takes(&["random"], &[], true, id));
    }

    #[test]
    fn a_glob_does_not_use_a_character_twice() {
        assert!(!glob("ab*ba", "aba"));
        assert!(glob("ab*ba", "abba"));
    }
}
