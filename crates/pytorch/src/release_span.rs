//! Several releases among which that of a program is.

use std::fmt;

use crate::Release;

/// The releases from one to another, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseSpan {
    /// The oldest.
    pub first: Release,
    /// The newest.
    pub last: Release,
}

impl ReleaseSpan {
    /// Every known release.
    pub const ALL: ReleaseSpan = ReleaseSpan { first: Release::OLDEST, last: Release::NEWEST };

    /// One release.
    #[must_use]
    pub const fn only(release: Release) -> ReleaseSpan {
        ReleaseSpan { first: release, last: release }
    }

    /// Whether it has this release.
    #[must_use]
    pub fn contains(self, release: Release) -> bool {
        self.first <= release && release <= self.last
    }

    /// Its releases, the oldest first.
    pub fn releases(self) -> impl DoubleEndedIterator<Item = Release> {
        Release::all().filter(move |&release| self.contains(release))
    }
}

impl fmt::Display for ReleaseSpan {
    /// `2.13`, `2.3 or 2.4`, `2.5 to 2.7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReleaseSpan { first, last } = self;
        match self.releases().count() {
            1 => write!(f, "{first}"),
            2 => write!(f, "{first} or {last}"),
            _ => write!(f, "{first} to {last}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_is_shown_in_words() {
        let span = |first, last| ReleaseSpan { first: Release::new(first), last: Release::new(last) }.to_string();
        assert_eq!([span(13, 13), span(3, 4), span(5, 7)], ["2.13", "2.3 or 2.4", "2.5 to 2.7"]);
        assert_eq!(ReleaseSpan::ALL.releases().count(), Release::all().count());
    }
}
