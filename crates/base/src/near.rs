//! "Did you mean": the nearest right name.

/// The candidate nearest to what was typed, if it is near enough to be a slip of the finger.
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

/// The end of a sentence about a wrong name: `; did you mean 'caching'?`, or nothing where no name is near.
#[must_use]
pub fn did_you_mean(suggestion: Option<&str>) -> String {
    suggestion.map(|name| format!("; did you mean '{name}'?")).unwrap_or_default()
}

/// More names than this are no help in a sentence.
const MOST_NAMES: usize = 40;

/// The same, naming all there is where no name is near; only their number where they would fill the screen.
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
