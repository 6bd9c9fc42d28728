//! Whether wall-clock times differ: of two run folders, or of two programs that took turns.
//!
//! Passes of one process are not independent, so the unit is the round: one process, one figure. All rows of a comparison
//! are one family of tests, and p-values are adjusted for their number (Holm): with a significance of 0.01, at most one
//! comparison in a hundred in which nothing changed reports a change.
//!
//! **Programs that took turns** ([`judge_turns`]): the figure of a round is the median ratio of passes that ran one directly
//! after the other. Other work on the machine hits both, so it cancels. Wilcoxon's signed-rank test over the rounds; the
//! interval is that of the Walsh averages.
//!
//! **Folders** ([`judge_rows`]): the runs were made at different times, and the machine may have been busier in one of them.
//! Other work makes passes slower, never faster, so the fastest rounds are compared: their geometric mean, and how far they
//! lie apart. A difference counts if the Mann-Whitney U test finds it and it is larger than what the fastest rounds of both
//! runs lie apart and what the machine itself became slower, as the reference says. Where that is much, a small change
//! cannot be told from noise, and the row says so.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use statrs::{
    distribution::{ContinuousCDF, StudentsT},
    stats_tests::{
        Alternative,
        mannwhitneyu::{MannWhitneyUMethod, mannwhitneyu},
    },
};

use crate::{
    measure::{TimingRecord, digits},
    suite::TurnTimes,
};

/// A row in which a change of this size would not be found is [`TimeVerdict::Unclear`].
pub const FINDABLE_GOAL: f64 = 0.05;
/// The fastest rounds of a folder are this part of them (one in four), and at least two.
const FAST_ROUNDS_ONE_IN: usize = 4;
/// The standard deviation of a normal distribution, as a multiple of its median absolute deviation.
const MAD_TO_DEVIATION: f64 = 1.4826;
/// The speed of a machine is this quantile of its references: most of the others ran beside other work.
const REFERENCE_QUANTILE: f64 = 0.1;
/// How much the times of the same program may change where the reference changes, as a share of its change. CPU time follows
/// it loosely: with this share, none of 1,190 comparisons among 35 runs beside compilers was a false alarm.
const CHANGE_PER_REFERENCE: f64 = 0.5;
/// The same for threads, which wait for each other and for the system: wall-clock times changed up to twice as much.
const THREADS_CHANGE_PER_REFERENCE: f64 = 2.0;

/// From when on a difference of times counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimeTolerance {
    /// The p-value, adjusted for the number of rows, must be below this.
    pub significance: f64,
    /// The times must differ by more than this share.
    pub noise_threshold: f64,
}

impl Default for TimeTolerance {
    fn default() -> TimeTolerance {
        TimeTolerance { significance: 0.01, noise_threshold: 0.02 }
    }
}

/// Rounds that cannot reach the significance, whatever they say.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "a significance of {significance} cannot be reached with {rounds} rounds and {tests} rows of times: at least {needed} \
     rounds are needed (`oomph run --rounds {needed}`), or a larger --significance"
)]
pub struct TooFewRounds {
    /// What was asked for.
    pub significance: f64,
    /// The fewest rounds of a row.
    pub rounds: usize,
    /// The number of rows.
    pub tests: usize,
    /// How many rounds suffice.
    pub needed: usize,
}

/// The times of a case in two runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimeChange {
    /// Which case, or which cases together.
    pub case_id: String,
    /// With how many threads.
    pub threads: Option<u16>,
    /// Median pass of the old run.
    pub old_median_ns: u64,
    /// Median pass of the new run.
    pub new_median_ns: u64,
    /// New as a ratio to old: of the fastest rounds, or the typical ratio of rounds that took turns.
    #[serde(serialize_with = "digits::required")]
    pub ratio: f64,
    /// How probable such rounds are if nothing changed; empty where there are too few.
    #[serde(serialize_with = "digits::optional")]
    pub p_value: Option<f64>,
    /// Effect size: how much more often a round of the new run is slower than one of the old than faster, from -1 to 1.
    #[serde(serialize_with = "digits::optional")]
    pub rank_biserial: Option<f64>,
    /// The judgement.
    pub verdict: TimeVerdict,
    /// The p-value, adjusted for the number of rows.
    #[serde(serialize_with = "digits::optional")]
    pub adjusted_p_value: Option<f64>,
    /// The ratio is probably at least this.
    #[serde(serialize_with = "digits::required")]
    pub low_ratio: f64,
    /// The ratio is probably at most this.
    #[serde(serialize_with = "digits::required")]
    pub high_ratio: f64,
    /// The smallest slowdown that would have been found.
    #[serde(serialize_with = "digits::required")]
    pub findable_share: f64,
    /// The fewer rounds of the two runs.
    pub rounds: u64,
}

/// What the times say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeVerdict {
    /// It takes longer.
    Slower,
    /// It takes less.
    Faster,
    /// Nothing that chance and machines do not explain.
    #[default]
    Noise,
    /// The same, but a change of [`FINDABLE_GOAL`] would not have been found either.
    Unclear,
}

/// The logarithm of new / old in each round: the median of its pairs.
fn ratios(times: &TurnTimes) -> Vec<f64> {
    let of_round = |pairs: &Vec<(u64, u64)>| {
        median(pairs.iter().map(|&(old, new)| (new.max(1) as f64 / old.max(1) as f64).ln()).collect())
    };
    times.rounds.iter().filter_map(of_round).collect()
}

fn median_ns(times: &TurnTimes, of: fn(&(u64, u64)) -> u64) -> u64 {
    let mut all: Vec<u64> = times.rounds.iter().flatten().map(of).collect();
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or(0)
}

/// Judges programs that took turns: every case, and where there are several, all of them together and those of each
/// strategy. The latter come second.
pub fn judge_turns(
    times: &[TurnTimes],
    tolerance: &TimeTolerance,
) -> Result<(Vec<TimeChange>, Vec<TimeChange>), TooFewRounds> {
    let by_case: Vec<Vec<f64>> = times.iter().map(ratios).collect();
    let groups = groups(times);
    let mut series = by_case.clone();
    series.extend(groups.iter().map(|(_, members)| mean_by_round(&by_case, members)));
    let (tests, rounds) = (series.len(), series.iter().map(Vec::len).min().unwrap_or(0));
    if tests > 0 {
        reachable(rounds, tests, tolerance, least_p_of_turns)?;
    }
    let adjusted = holm(&series.iter().map(|ratios| signed_rank(ratios).0).collect::<Vec<_>>());
    let mut rows: Vec<TimeChange> =
        series.iter().zip(adjusted).map(|(ratios, adjusted)| turn_change(ratios, adjusted, tests, tolerance)).collect();
    let mut together = rows.split_off(times.len());
    for (row, times) in rows.iter_mut().zip(times) {
        (row.case_id, row.threads) = (times.case_id.clone(), times.threads);
        (row.old_median_ns, row.new_median_ns) = (median_ns(times, |pair| pair.0), median_ns(times, |pair| pair.1));
    }
    for (row, (name, _)) in together.iter_mut().zip(groups) {
        row.case_id = name;
    }
    Ok((rows, together))
}

/// The least number of rounds with which `times` cases of `strategies` strategies that take turns can reach a significance.
#[must_use]
pub fn rounds_for_turns(times: usize, strategies: usize, significance: f64) -> usize {
    let tests = tests_of_turns(times, strategies);
    (1..=64).find(|&rounds| least_p_of_turns(rounds) * tests as f64 <= significance).unwrap_or(64)
}

/// Every case is a test, and where there are several, all together and those of each strategy.
fn tests_of_turns(times: usize, strategies: usize) -> usize {
    times + usize::from(times > 1) + if times > 1 && strategies > 1 { strategies } else { 0 }
}

/// The smallest slowdown that every case would show so far.
#[must_use]
pub fn largest_findable(times: &[TurnTimes], tolerance: &TimeTolerance) -> f64 {
    let strategies: BTreeSet<&str> = times.iter().map(|times| times.strategy.as_str()).collect();
    let tests = tests_of_turns(times.len(), strategies.len());
    let findable = |one: &TurnTimes| findable_of_turns(&ratios(one), tests, tolerance);
    finite(times.iter().map(findable).fold(0.0, f64::max))
}

/// All cases, and those of each strategy where there are several; nothing with one case.
fn groups(times: &[TurnTimes]) -> Vec<(String, Vec<usize>)> {
    if times.len() < 2 {
        return Vec::new();
    }
    let mut groups = vec![("all cases".to_owned(), (0..times.len()).collect())];
    let strategies: BTreeSet<&str> = times.iter().map(|times| times.strategy.as_str()).collect();
    if strategies.len() > 1 {
        groups.extend(strategies.iter().map(|strategy| {
            let members = (0..times.len()).filter(|&place| times[place].strategy == *strategy).collect();
            (format!("all cases of {strategy}"), members)
        }));
    }
    groups
}

fn mean_by_round(ratios: &[Vec<f64>], members: &[usize]) -> Vec<f64> {
    let rounds = members.iter().map(|&member| ratios[member].len()).min().unwrap_or(0);
    let mean = |round: usize| members.iter().map(|&member| ratios[member][round]).sum::<f64>() / members.len() as f64;
    (0..rounds).map(mean).collect()
}

fn turn_change(ratios: &[f64], adjusted: f64, tests: usize, tolerance: &TimeTolerance) -> TimeChange {
    let (p_value, rank_biserial) = signed_rank(ratios);
    let mut averages = walsh_averages(ratios);
    averages.sort_by(f64::total_cmp);
    let estimate = median(averages.clone()).unwrap_or(0.0);
    let (low, high) = walsh_interval(&averages, ratios.len(), tolerance.significance / tests.max(1) as f64);
    let findable = findable_of_turns(ratios, tests, tolerance);
    let is_change = adjusted < tolerance.significance && estimate.abs() > tolerance.noise_threshold.ln_1p();
    TimeChange {
        ratio: estimate.exp(),
        p_value: Some(p_value),
        rank_biserial: Some(rank_biserial),
        verdict: verdict(is_change, estimate, findable),
        adjusted_p_value: Some(adjusted),
        low_ratio: low.exp(),
        high_ratio: high.exp(),
        findable_share: findable,
        rounds: ratios.len() as u64,
        ..TimeChange::default()
    }
}

fn verdict(is_change: bool, change: f64, findable: f64) -> TimeVerdict {
    match () {
        () if is_change && change > 0.0 => TimeVerdict::Slower,
        () if is_change => TimeVerdict::Faster,
        () if findable > FINDABLE_GOAL => TimeVerdict::Unclear,
        () => TimeVerdict::Noise,
    }
}

/// The slowdown that is found nine times in ten, by Student's t. The gate asks for more than the noise threshold too.
fn findable_of_turns(ratios: &[f64], tests: usize, tolerance: &TimeTolerance) -> f64 {
    let count = ratios.len() as f64;
    let Ok(student) = StudentsT::new(0.0, 1.0, count - 1.0) else { return f64::MAX };
    // The deviation of the middle half: single rounds beside other work hardly move the test either.
    let Some(middle) = median(ratios.to_vec()) else { return f64::MAX };
    let deviation =
        median(ratios.iter().map(|ratio| (ratio - middle).abs()).collect()).unwrap_or(0.0) * MAD_TO_DEVIATION;
    let error = deviation / count.sqrt();
    let nine_in_ten = student.inverse_cdf(0.9) * error;
    let sure = student.inverse_cdf(1.0 - tolerance.significance / (2.0 * tests.max(1) as f64)) * error;
    finite((sure.max(tolerance.noise_threshold.ln_1p()) + nine_in_ten).exp_m1())
}

fn finite(number: f64) -> f64 {
    if number.is_finite() { number } else { f64::MAX }
}

/// Judges the rows that both folders have, in the order of the new one.
pub fn judge_rows(
    old: &[TimingRecord],
    new: &[TimingRecord],
    tolerance: &TimeTolerance,
) -> Result<Vec<TimeChange>, TooFewRounds> {
    let earlier: BTreeMap<(&str, Option<u16>), &TimingRecord> =
        old.iter().map(|row| ((row.case_id.as_str(), row.threads), row)).collect();
    let pairs: Vec<(&TimingRecord, &TimingRecord)> =
        new.iter().filter_map(|row| Some((*earlier.get(&(row.case_id.as_str(), row.threads))?, row))).collect();
    let samples: Vec<(Vec<u64>, Vec<u64>)> =
        pairs.iter().map(|(old, new)| (old.rounds_ns(), new.rounds_ns())).collect();
    let rounds = samples.iter().map(|(old, new)| old.len().min(new.len())).min().unwrap_or(0);
    if !pairs.is_empty() {
        reachable(rounds, pairs.len(), tolerance, least_p_of_rows)?;
    }
    let machine = machine_shift(old, new);
    let tested: Vec<(f64, f64)> = samples.iter().map(|(old, new)| rank_sum(old, new)).collect();
    let adjusted = holm(&tested.iter().map(|(p_value, _)| *p_value).collect::<Vec<_>>());
    let mut rows = Vec::new();
    for (place, (old, new)) in pairs.into_iter().enumerate() {
        let own = machine_shift(std::slice::from_ref(old), std::slice::from_ref(new));
        let machine = machine.max(own);
        rows.push(row_change((old, new), &samples[place], tested[place], adjusted[place], machine, tolerance));
    }
    Ok(rows)
}

/// By how much the speed of the machine differed between these rows, as a logarithm of at least 0.
fn machine_shift(old: &[TimingRecord], new: &[TimingRecord]) -> f64 {
    let speed = |rows: &[TimingRecord]| {
        let mut references: Vec<u64> = rows.iter().flat_map(TimingRecord::references_ns).collect();
        references.sort_unstable();
        references.get((references.len() as f64 * REFERENCE_QUANTILE) as usize).map(|&time| (time.max(1) as f64).ln())
    };
    speed(old).zip(speed(new)).map_or(0.0, |(old, new)| (new - old).abs())
}

fn row_change(
    (old, new): (&TimingRecord, &TimingRecord),
    samples: &(Vec<u64>, Vec<u64>),
    (p_value, rank_biserial): (f64, f64),
    adjusted: f64,
    machine: f64,
    tolerance: &TimeTolerance,
) -> TimeChange {
    let (before, after) = (FastRounds::of(&samples.0), FastRounds::of(&samples.1));
    let change = after.level - before.level;
    let machine = machine * if new.threads.is_some() { THREADS_CHANGE_PER_REFERENCE } else { CHANGE_PER_REFERENCE };
    let apart = before.apart + after.apart + machine;
    let least = tolerance.noise_threshold.ln_1p() + apart;
    let findable = finite(least.exp_m1());
    let is_change = adjusted < tolerance.significance && change.abs() > least;
    TimeChange {
        case_id: new.case_id.clone(),
        threads: new.threads,
        old_median_ns: old.pass_median_ns,
        new_median_ns: new.pass_median_ns,
        ratio: change.exp(),
        p_value: Some(p_value),
        rank_biserial: Some(rank_biserial),
        verdict: verdict(is_change, change, findable),
        adjusted_p_value: Some(adjusted),
        low_ratio: (change - apart).exp(),
        high_ratio: (change + apart).exp(),
        findable_share: findable,
        rounds: samples.0.len().min(samples.1.len()) as u64,
    }
}

/// The rounds that other work disturbed least. Logarithms.
struct FastRounds {
    /// Their geometric mean.
    level: f64,
    /// How far they lie apart, the next one included.
    apart: f64,
}

impl FastRounds {
    fn of(rounds: &[u64]) -> FastRounds {
        let mut logs: Vec<f64> = rounds.iter().map(|&round| (round.max(1) as f64).ln()).collect();
        logs.sort_by(f64::total_cmp);
        let fast = (logs.len() / FAST_ROUNDS_ONE_IN).max(2).min(logs.len());
        let next = logs.get(fast).or(logs.last()).copied().unwrap_or(0.0);
        let first = logs.first().copied().unwrap_or(0.0);
        FastRounds { level: logs[..fast].iter().sum::<f64>() / fast.max(1) as f64, apart: next - first }
    }
}

/// An error if even the clearest result would not be significant.
fn reachable(
    rounds: usize,
    tests: usize,
    tolerance: &TimeTolerance,
    least_p: fn(usize) -> f64,
) -> Result<(), TooFewRounds> {
    let reaches = |rounds: usize| least_p(rounds) * tests as f64 <= tolerance.significance;
    if reaches(rounds) {
        return Ok(());
    }
    let needed = (rounds..=1000).find(|&rounds| reaches(rounds)).unwrap_or(1000);
    Err(TooFewRounds { significance: tolerance.significance, rounds, tests, needed })
}

/// The p-value of rounds that all have the same direction.
fn least_p_of_turns(rounds: usize) -> f64 {
    if rounds == 0 { 1.0 } else { 0.5_f64.powi(rounds as i32 - 1) }
}

/// The p-value if every round of one run is slower than every round of the other.
fn least_p_of_rows(rounds: usize) -> f64 {
    if rounds == 0 { 1.0 } else { exact_p_value(rounds * rounds, rounds, rounds) }
}

/// Holm's step-down adjustment: the smallest of m p-values is multiplied by m, the next by m - 1, and so on.
fn holm(p_values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|&one, &other| p_values[one].total_cmp(&p_values[other]));
    let (mut adjusted, mut largest) = (vec![1.0; p_values.len()], 0.0_f64);
    for (rank, place) in order.into_iter().enumerate() {
        largest = largest.max((p_values[place] * (p_values.len() - rank) as f64).min(1.0));
        adjusted[place] = largest;
    }
    adjusted
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    Some(if values.len().is_multiple_of(2) { (values[values.len() / 2 - 1] + upper) / 2.0 } else { upper })
}

/// p-value and effect size of Wilcoxon's signed-rank test. Zeros count half to each side; equal sizes share their rank.
fn signed_rank(differences: &[f64]) -> (f64, f64) {
    let mut by_size: Vec<f64> = differences.to_vec();
    by_size.sort_by(|one, other| one.abs().total_cmp(&other.abs()));
    let (mut positive, mut place) = (0.0, 0);
    while place < by_size.len() {
        let size = by_size[place].abs();
        let equal = by_size[place..].iter().take_while(|other| other.abs() == size).count();
        let rank = place as f64 + (equal as f64 + 1.0) / 2.0;
        for difference in &by_size[place..place + equal] {
            positive += rank
                * if *difference > 0.0 {
                    1.0
                } else if *difference < 0.0 {
                    0.0
                } else {
                    0.5
                };
        }
        place += equal;
    }
    let whole = (by_size.len() * (by_size.len() + 1)) as f64 / 2.0;
    if whole == 0.0 {
        return (1.0, 0.0);
    }
    let extreme = positive.max(whole - positive);
    // The largest value that is certainly reached: a half rank must not make the result look rarer.
    let tail: f64 = signed_rank_distribution(by_size.len())[extreme.floor() as usize..].iter().sum();
    ((2.0 * tail).min(1.0), 2.0 * positive / whole - 1.0)
}

/// The probability of every sum of positive ranks if either sign is equally probable.
fn signed_rank_distribution(count: usize) -> Vec<f64> {
    let mut shares = vec![0.0; count * (count + 1) / 2 + 1];
    shares[0] = 1.0;
    for rank in 1..=count {
        for sum in (0..shares.len()).rev() {
            shares[sum] = 0.5 * (shares[sum] + if sum >= rank { shares[sum - rank] } else { 0.0 });
        }
    }
    shares
}

/// The averages of all pairs, each value with itself included. Their median is the estimate that belongs to the test.
fn walsh_averages(values: &[f64]) -> Vec<f64> {
    let pairs =
        values.iter().enumerate().flat_map(|(place, one)| values[place..].iter().map(move |other| (one + other) / 2.0));
    pairs.collect()
}

/// The interval of all values that the test would not refuse, from the sorted averages.
fn walsh_interval(averages: &[f64], count: usize, significance: f64) -> (f64, f64) {
    let mut tail = 0.0;
    let fewest = signed_rank_distribution(count)
        .iter()
        .take_while(|share| {
            tail += *share;
            2.0 * tail <= significance
        })
        .count();
    match (averages.get(fewest), averages.len().checked_sub(fewest + 1).and_then(|place| averages.get(place))) {
        (Some(low), Some(high)) if low <= high => (*low, *high),
        _ => (0.0, 0.0),
    }
}

/// p-value and effect size of the Mann-Whitney U test; 1 and 0 where a sample is empty.
fn rank_sum(old: &[u64], new: &[u64]) -> (f64, f64) {
    let pairs = (old.len() * new.len()) as f64;
    if pairs == 0.0 {
        return (1.0, 0.0);
    }
    let slower = new.iter().flat_map(|new| old.iter().map(move |old| new.cmp(old) as i64)).sum::<i64>() as f64;
    let mut all = [old, new].concat();
    all.sort_unstable();
    let has_ties = all.windows(2).any(|pair| pair[0] == pair[1]);
    let p_value = if has_ties || all.len() > MOST_COUNTED {
        let method = MannWhitneyUMethod::AsymptoticInclContinuityCorrection;
        let p_value = mannwhitneyu(old, new, method, Alternative::TwoSided).map_or(1.0, |(_, p_value)| p_value);
        // Samples that are all one value have no spread for the test to work with.
        if p_value.is_nan() { 1.0 } else { p_value }
    } else {
        // U counts the pairs of one order; both tails of its distribution are equal.
        exact_p_value(((pairs + slower.abs()) / 2.0) as usize, old.len(), new.len())
    };
    (p_value, slower / pairs)
}

/// Samples that together have more members are compared by the normal approximation.
const MOST_COUNTED: usize = 50;

/// How probable it is that U, of two samples of these sizes without ties, is at least `u` away to either side. Counted
/// out, because samples are small, and because statrs 0.19 gives different exact values for the same samples in the other
/// order: the coefficients of the Gaussian binomial are the numbers of arrangements for each U.
fn exact_p_value(u: usize, one: usize, other: usize) -> f64 {
    let mut arrangements = vec![0.0; one * other + 1];
    arrangements[0] = 1.0;
    for member in 1..=one {
        for place in (other + member..arrangements.len()).rev() {
            arrangements[place] -= arrangements[place - other - member];
        }
        for place in member..arrangements.len() {
            arrangements[place] += arrangements[place - member];
        }
    }
    // Both tails are equal: the lower one has no rounding errors of large numbers.
    let tail: f64 = arrangements[..=one * other - u].iter().sum();
    (2.0 * tail / binomial(one + other, one)).min(1.0)
}

fn binomial(all: usize, chosen: usize) -> f64 {
    (1..=chosen).fold(1.0, |product, member| product * (all - chosen + member) as f64 / member as f64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use std::slice::from_ref;

    use super::*;

    /// A row whose rounds took so long, and the reference as long as `reference`.
    fn timing(rounds: &[u64], reference: u64) -> TimingRecord {
        let shown = |numbers: Vec<u64>| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        TimingRecord {
            rounds: Some(rounds.len() as u32),
            round_ns: shown(rounds.to_vec()),
            reference_ns: shown(vec![reference; rounds.len()]),
            ..TimingRecord::default()
        }
    }

    fn judged(old: &[u64], new: &[u64]) -> TimeChange {
        let tolerance = TimeTolerance { significance: 1.0, ..TimeTolerance::default() };
        judge_rows(&[timing(old, 100)], &[timing(new, 100)], &tolerance).unwrap().remove(0)
    }

    const CALM: [u64; 8] = [1000, 1004, 1002, 1001, 1003, 1030, 1005, 1006];

    #[test]
    fn a_difference_of_folders_counts_only_beyond_the_noise() {
        let default = TimeTolerance::default();
        let verdict = |new: &[u64], reference| {
            judge_rows(&[timing(&CALM, 100)], &[timing(new, reference)], &default).unwrap()[0].verdict
        };
        let by = |share: f64| CALM.map(|round| (round as f64 * (1.0 + share)) as u64);
        assert_eq!(verdict(&by(0.05), 100), TimeVerdict::Slower);
        assert_eq!(verdict(&by(-0.05), 100), TimeVerdict::Faster);
        assert_eq!(verdict(&by(0.01), 100), TimeVerdict::Noise, "below the threshold");
        assert_eq!(verdict(&by(0.05), 110), TimeVerdict::Unclear, "the machine itself was 10 % slower");
        let noisy = [1050, 1300, 1180, 1110, 1400, 1350, 1500, 1240];
        let found = judge_rows(&[timing(&CALM, 100)], &[timing(&noisy, 100)], &default).unwrap().remove(0);
        assert_eq!(found.verdict, TimeVerdict::Unclear);
        assert!(found.findable_share > 0.1, "{found:?}");
    }

    #[test]
    fn gate_that_cannot_be_reached_is_an_error() {
        let demanding = TimeTolerance { significance: 0.005, ..TimeTolerance::default() };
        let five = timing(&[1, 2, 3, 4, 5], 1);
        let error = judge_rows(from_ref(&five), from_ref(&five), &demanding).unwrap_err();
        assert_eq!((error.rounds, error.tests, error.needed), (5, 1, 6));
        assert!(error.to_string().contains("--rounds 6"), "{error}");
        let older = TimingRecord { pass_ns: "5 4 3 2 1".to_owned(), ..TimingRecord::default() };
        let error = judge_rows(from_ref(&older), from_ref(&older), &TimeTolerance::default()).unwrap_err();
        assert_eq!((error.rounds, error.needed), (1, 5), "passes of one process are one round");
        let rounds = |rounds: usize| TurnTimes { rounds: vec![vec![(1, 1)]; rounds], ..TurnTimes::default() };
        assert_eq!(judge_turns(&[rounds(7)], &TimeTolerance::default()).unwrap_err().needed, 8);
        assert!(judge_turns(&[rounds(8)], &TimeTolerance::default()).is_ok());
        assert_eq!([1, 20, 200].map(|rows| rounds_for_turns(rows, 1, 0.01)), [8, 13, 16]);
    }

    #[test]
    fn p_values_are_adjusted_for_their_number() {
        assert_eq!(holm(&[0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02]);
        assert_eq!(holm(&[0.5, 0.9]), [1.0, 1.0]);
    }

    /// By hand: of the 10 arrangements of two and three, U is 6, 5 and 4 in one, one and two. Of the 8 signs of three
    /// ranks, the sum is 6 and 5 in one each.
    #[test]
    fn small_samples_are_counted_out() {
        let found: Vec<f64> = [6, 5, 4, 3].iter().map(|&u| exact_p_value(u, 2, 3)).collect();
        for (found, expected) in found.iter().zip([0.2, 0.4, 0.8, 1.0]) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
        assert_eq!(signed_rank(&[0.1, 0.2, 0.3]), (0.25, 1.0));
        assert_eq!(signed_rank(&[-0.1, 0.2, 0.3]).0, 0.5);
        assert_eq!(signed_rank(&[0.0, 0.0, 0.0]), (1.0, 0.0), "nothing changed");
        assert_eq!(signed_rank(&[]), (1.0, 0.0));
    }

    #[test]
    fn interval_holds_what_the_test_does_not_refuse() {
        let values: Vec<f64> = (0..12).map(|value: i32| f64::from((value * 7) % 12) - 5.0).collect();
        let mut averages = walsh_averages(&values);
        averages.sort_by(f64::total_cmp);
        let (low, high) = walsh_interval(&averages, values.len(), 0.05);
        let p_at = |place: f64| signed_rank(&values.iter().map(|value| value - place).collect::<Vec<_>>()).0;
        assert!(p_at(low - 0.3) <= 0.05 && p_at(high + 0.3) <= 0.05, "{low} {high}");
        assert!(p_at(low + 0.3) > 0.05 && p_at(high - 0.3) > 0.05, "{low} {high}");
    }

    /// A machine with other work, as it was recorded beside compilers: its speed changes by up to 60 % every few passes and
    /// stays for a while, passes differ by 3 %, and one in ten is interrupted.
    struct BusyMachine {
        dice: ChaCha8Rng,
        speed: f64,
    }

    impl BusyMachine {
        fn new(seed: u64) -> BusyMachine {
            BusyMachine { dice: ChaCha8Rng::seed_from_u64(seed), speed: 1.0 }
        }

        fn pass(&mut self, work: f64) -> u64 {
            if self.dice.random::<f64>() < 0.1 {
                self.speed = 1.0 + 0.6 * self.dice.random::<f64>();
            }
            let jitter = (0..4).map(|_| self.dice.random::<f64>() - 0.5).sum::<f64>() * 0.05;
            let interrupted = if self.dice.random::<f64>() < 0.1 { 1.0 + self.dice.random::<f64>() } else { 1.0 };
            (work * self.speed * (1.0 + jitter) * interrupted) as u64
        }

        /// Three cases of two programs that take turns; processes differ by 1 %.
        fn turns(&mut self, rounds: usize, slowdown: f64) -> Vec<TurnTimes> {
            let mut round = || {
                let layouts = [(); 2].map(|()| 1.0 + 0.02 * (self.dice.random::<f64>() - 0.5));
                let mut pair = |_| (self.pass(1e7 * layouts[0]), self.pass(1e7 * layouts[1] * (1.0 + slowdown)));
                (0..8).map(&mut pair).collect::<Vec<_>>()
            };
            let mut times = |name: &str| TurnTimes {
                case_id: name.to_owned(),
                strategy: name.to_owned(),
                rounds: (0..rounds).map(|_| round()).collect(),
                ..TurnTimes::default()
            };
            ["a", "b", "c"].map(&mut times).to_vec()
        }

        /// The same three cases in a folder, in wall-clock time.
        fn rows(&mut self, rounds: usize, slowdown: f64) -> Vec<TimingRecord> {
            let mut row = |name: &str| {
                let fastest: Vec<u64> =
                    (0..rounds).map(|_| (0..5).map(|_| self.pass(1e7 * (1.0 + slowdown))).min().unwrap_or(0)).collect();
                let references: Vec<String> = (0..5 * rounds).map(|_| self.pass(2e5).to_string()).collect();
                TimingRecord {
                    case_id: name.to_owned(),
                    threads: Some(2),
                    reference_ns: references.join(" "),
                    ..timing(&fastest, 0)
                }
            };
            ["a", "b", "c"].map(&mut row).to_vec()
        }
    }

    fn alarms(comparisons: u64, mut has_alarm: impl FnMut(u64) -> bool) -> usize {
        (0..comparisons).filter(|&seed| has_alarm(seed)).count()
    }

    #[test]
    fn on_a_busy_machine_turns_raise_no_false_alarm_and_find_five_percent() {
        let slower = |slowdown: f64| {
            move |seed: u64| {
                let times = BusyMachine::new(seed).turns(12, slowdown);
                let (cases, together) = judge_turns(&times, &TimeTolerance::default()).unwrap();
                cases.iter().chain(&together).any(|row| row.verdict == TimeVerdict::Slower)
            }
        };
        let (false_alarms, found) = (alarms(200, slower(0.0)), alarms(200, slower(0.05)));
        assert!(false_alarms <= 4 && found >= 190, "{false_alarms} false alarms and {found} found, of 200 each");
    }

    #[test]
    fn on_a_busy_machine_folders_raise_no_false_alarm() {
        let slower = |slowdown: f64| {
            move |seed: u64| {
                let mut machine = BusyMachine::new(seed);
                let (old, new) = (machine.rows(16, 0.0), machine.rows(16, slowdown));
                judge_rows(&old, &new, &TimeTolerance::default())
                    .unwrap()
                    .iter()
                    .any(|row| row.verdict == TimeVerdict::Slower)
            }
        };
        let (false_alarms, found) = (alarms(200, slower(0.0)), alarms(200, slower(0.5)));
        assert!(false_alarms <= 10 && found >= 150, "{false_alarms} false alarms and {found} of 50 %, of 200 each");
    }

    #[test]
    fn on_a_calm_machine_folders_find_five_percent() {
        let slower = |slowdown: f64| {
            move |seed: u64| {
                let mut dice = ChaCha8Rng::seed_from_u64(seed);
                let mut run = |factor: f64| {
                    let rounds: Vec<u64> =
                        (0..16).map(|_| (1e6 * factor * (1.0 + 0.02 * dice.random::<f64>())) as u64).collect();
                    [timing(&rounds, 1000 + dice.random_range(0..3))]
                };
                let (old, new) = (run(1.0), run(1.0 + slowdown));
                judge_rows(&old, &new, &TimeTolerance::default()).unwrap()[0].verdict == TimeVerdict::Slower
            }
        };
        let (false_alarms, found) = (alarms(200, slower(0.0)), alarms(200, slower(0.05)));
        assert!(false_alarms <= 2 && found >= 190, "{false_alarms} false alarms and {found} found, of 200 each");
    }

    proptest! {
        #[test]
        fn comparison_is_antisymmetric(
            old in proptest::collection::vec(1_u64..1_000_000, 2..12),
            new in proptest::collection::vec(1_u64..1_000_000, 2..12),
        ) {
            let (one, other) = (judged(&old, &new), judged(&new, &old));
            prop_assert!((one.p_value.unwrap() - other.p_value.unwrap()).abs() < 1e-9);
            prop_assert_eq!(one.rank_biserial.unwrap(), -other.rank_biserial.unwrap());
            prop_assert!((one.ratio * other.ratio - 1.0).abs() < 1e-9);
            prop_assert_eq!(one.verdict == TimeVerdict::Slower, other.verdict == TimeVerdict::Faster);
        }
    }
}
