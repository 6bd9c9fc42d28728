//! Small pictures made of characters: lines of levels, a plot of a few rows, bars.
//!
//! They have no colours and no control characters, so a pipe gets the same picture as a terminal.

use super::{Glyphs, Terminal};
use crate::base::Bytes;

const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const LETTERS: [char; 8] = ['_', '.', ':', '-', '=', '+', '*', '#'];
/// Wider pictures show nothing more.
const WIDEST: usize = 100;
/// Rows of a plot.
const ROWS: usize = 6;
/// Columns for an amount beside a plot.
const AMOUNT: usize = 9;
/// The width of pictures in a pipe.
const PIPE_WIDTH: u16 = 100;

/// Columns left for a picture beside texts of `taken` columns.
fn room(terminal: Terminal, taken: usize) -> usize {
    usize::from(terminal.width.unwrap_or(PIPE_WIDTH)).saturating_sub(taken).clamp(8, WIDEST)
}

/// The lowest and the highest level of a section.
pub type Extremes = (u64, u64);

/// A line of levels.
#[derive(Clone, Debug)]
pub struct LevelLine {
    /// What it shows.
    pub name: String,
    /// Its levels in order, each the extremes of a section of the same length.
    pub levels: Vec<Extremes>,
    /// The part of the axis that it covers: a run that ended early has a shorter line.
    pub share: f64,
}

/// Lines of levels on one scale and one axis, each with its name and its highest level.
pub fn lines(series: &[LevelLine], terminal: Terminal) -> String {
    let name_width = series.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
    let room = room(terminal, name_width + AMOUNT + 4);
    let highest = series.iter().map(highest).max().unwrap_or(0);
    let mut text = String::new();
    for one in series {
        let name = &one.name;
        let own = Bytes(self::highest(one)).to_string();
        let length = ((room as f64 * one.share).round() as usize).clamp(1, room);
        let line = line(&one.levels, highest, length, terminal.glyphs);
        text.push_str(&format!("{name:<name_width$}  {line:<room$}  {own:>AMOUNT$}\n"));
    }
    text
}

fn highest(line: &LevelLine) -> u64 {
    line.levels.iter().map(|(_, high)| *high).max().unwrap_or(0)
}

/// One character per section; a space for zero. Of the two extremes of a section it shows the one that is further from
/// what the section before shows, so that a saw-tooth stays one. The first peak is always shown.
fn line(levels: &[Extremes], highest: u64, width: usize, glyphs: Glyphs) -> String {
    let palette = if glyphs == Glyphs::Blocks { BLOCKS } else { LETTERS };
    let peak = levels.iter().map(|(_, high)| *high).max().unwrap_or(0);
    let (mut before, mut has_peak) = (0, false);
    let mut shown = |(low, high): Extremes| {
        let is_first_peak = high == peak && !has_peak;
        has_peak |= is_first_peak;
        before = if is_first_peak || high.abs_diff(before) >= low.abs_diff(before) { high } else { low };
        before
    };
    sections(levels, width)
        .into_iter()
        .map(|extremes| match shown(extremes) {
            0 => ' ',
            level => palette[(scaled(level, highest, palette.len() * 16) / 16).min(palette.len() - 1)],
        })
        .collect()
}

/// A plot of one series under its `title`, with the lowest and the highest level beside it. The area below the lowest
/// level of a column is solid, the area up to its highest level is light.
pub fn plot(title: &str, levels: &[Extremes], terminal: Terminal) -> String {
    let room = room(terminal, AMOUNT + 3);
    let low = levels.iter().map(|(low, _)| *low).min().unwrap_or(0);
    let high = levels.iter().map(|(_, high)| *high).max().unwrap_or(0);
    // From zero, unless all changes would fall into one row.
    let floor = if high - low < high / 8 { low } else { 0 };
    let height = |level: u64| scaled(level - floor.min(level), (high - floor).max(1), ROWS * PARTS);
    let heights: Vec<(usize, usize)> =
        sections(levels, room).into_iter().map(|(low, high)| (height(low), height(high))).collect();
    let mut text = format!("{title}\n");
    for row in (0..ROWS).rev() {
        let drawn: String = heights.iter().map(|&heights| filling(heights, row, terminal.glyphs)).collect();
        let label = match row {
            0 => Bytes(floor).to_string(),
            _ if row == ROWS - 1 => Bytes(high).to_string(),
            _ => String::new(),
        };
        text.push_str(format!("{label:>AMOUNT$} |{drawn}").trim_end());
        text.push('\n');
    }
    text
}

/// Parts of a row that blocks can show.
const PARTS: usize = 8;

/// What a row of a plot shows in a column with these heights, in parts of rows.
fn filling((low, high): (usize, usize), row: usize, glyphs: Glyphs) -> char {
    let blocks = glyphs == Glyphs::Blocks;
    let (full, light) = if blocks { ('█', '░') } else { ('#', ':') };
    let of_row = |height: usize| height.saturating_sub(row * PARTS).min(PARTS);
    // A small difference is not worth a colour of its own.
    let solid = if high - low < PARTS { of_row(high) } else { of_row(low) };
    match (solid, of_row(high)) {
        (PARTS, _) => full,
        (0, 0) => ' ',
        (0, _) => light,
        (part, _) if blocks => BLOCKS[part - 1],
        (part, _) if part >= PARTS / 2 => full,
        _ => '.',
    }
}

/// A bar for each amount on one scale; the useful part of it is solid.
pub fn bars(amounts: &[(String, u64, Option<u64>)], terminal: Terminal) -> String {
    let name_width = amounts.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
    let room = room(terminal, name_width + AMOUNT + 4);
    let highest = amounts.iter().map(|(_, amount, _)| *amount).max().unwrap_or(0);
    let (useful, lost) = if terminal.glyphs == Glyphs::Blocks { ('█', '░') } else { ('#', '.') };
    let mut text = String::new();
    for (name, amount, useful_part) in amounts {
        let length = scaled(*amount, highest, room);
        let solid = useful_part.map_or(length, |part| scaled(part, highest, room).min(length));
        let bar: String = std::iter::repeat_n(useful, solid).chain(std::iter::repeat_n(lost, length - solid)).collect();
        text.push_str(&format!("{name:<name_width$}  {bar:<room$}  {:>AMOUNT$}\n", Bytes(*amount).to_string()));
    }
    text
}

/// The extremes of `count` equal sections; fewer levels are repeated.
fn sections(levels: &[Extremes], count: usize) -> Vec<Extremes> {
    let bounds = |place: usize| place * levels.len() / count;
    (0..if levels.is_empty() { 0 } else { count })
        .map(|place| {
            let (from, to) = (bounds(place), bounds(place + 1).max(bounds(place) + 1));
            let section = &levels[from.min(levels.len() - 1)..to.min(levels.len())];
            let low = section.iter().map(|(low, _)| *low).min().unwrap_or(0);
            (low, section.iter().map(|(_, high)| *high).max().unwrap_or(0))
        })
        .collect()
}

/// `value` of `whole`, in `parts`.
fn scaled(value: u64, whole: u64, parts: usize) -> usize {
    if whole == 0 { 0 } else { (value as f64 / whole as f64 * parts as f64).round() as usize }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::MIB;

    const UNICODE: Terminal = Terminal { width: Some(40), glyphs: Glyphs::Blocks };
    const PLAIN: Terminal = Terminal { glyphs: Glyphs::Lines, ..UNICODE };

    fn of_points(name: &str, levels: &[u64], share: f64) -> LevelLine {
        LevelLine { name: name.to_owned(), levels: levels.iter().map(|&level| (level, level)).collect(), share }
    }

    #[test]
    fn lines_share_a_scale() {
        let series =
            [of_points("caching", &[0, 4 * MIB, 8 * MIB, 8 * MIB], 1.0), of_points("direct", &[MIB, MIB], 0.5)];
        insta::assert_snapshot!(lines(&series, UNICODE), @"
        caching       ▅▅▅▅▅██████████   8.00 MiB
        direct   ▂▂▂▂▂▂▂▂▂▂             1.00 MiB
        ");
        assert!(lines(&series, PLAIN).is_ascii());
    }

    #[test]
    fn saw_tooth_shorter_than_a_section_is_visible() {
        let teeth = LevelLine { name: "direct".to_owned(), levels: vec![(MIB, 8 * MIB); 100], share: 1.0 };
        insta::assert_snapshot!(lines(std::slice::from_ref(&teeth), UNICODE), @"direct  █▂█▂█▂█▂█▂█▂█▂█▂█▂█▂█   8.00 MiB");
        insta::assert_snapshot!(plot("live", &teeth.levels, UNICODE), @"
        live
         8.00 MiB |░░░░░░░░░░░░░░░░░░░░░░░░░░░░
                  |░░░░░░░░░░░░░░░░░░░░░░░░░░░░
                  |░░░░░░░░░░░░░░░░░░░░░░░░░░░░
                  |░░░░░░░░░░░░░░░░░░░░░░░░░░░░
                  |░░░░░░░░░░░░░░░░░░░░░░░░░░░░
              0 B |▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆
        ");
    }

    #[test]
    fn plot_shows_a_ramp() {
        let ramp: Vec<Extremes> = (1..=54).map(|step| (step * MIB, step * MIB)).collect();
        insta::assert_snapshot!(plot("kept by step", &ramp, PLAIN), @"
        kept by step
         54.0 MiB |                       ..###
                  |                   .########
                  |              ..############
                  |         ..#################
                  |     .######################
              0 B |..##########################
        ");
        assert!(plot("kept by step", &ramp, UNICODE).lines().all(|line| line.chars().count() <= 40));
    }

    #[test]
    fn bar_is_solid_where_memory_is_used() {
        let amounts = [("caching".to_owned(), 8 * MIB, Some(4 * MIB)), ("direct".to_owned(), 4 * MIB, None)];
        insta::assert_snapshot!(bars(&amounts, PLAIN), @"
        caching  ##########..........   8.00 MiB
        direct   ##########             4.00 MiB
        ");
    }

    proptest! {
        #[test]
        fn pictures_fit_their_terminal(
            levels in prop::collection::vec(any::<u64>(), 0..300),
            width in 30u16..200,
            unicode in any::<bool>(),
        ) {
            let terminal = Terminal { width: Some(width), glyphs: if unicode { Glyphs::Blocks } else { Glyphs::Ascii } };
            let series = [of_points("name", &levels, 0.7)];
            let extremes = &series[0].levels;
            let bar: Vec<_> = levels.iter().take(3).map(|&level| ("n".to_owned(), level, Some(level / 2))).collect();
            for text in [lines(&series, terminal), plot("title", extremes, terminal), bars(&bar, terminal)] {
                // Amounts beyond any memory are wider than their column.
                let room = usize::from(width) + 12;
                prop_assert!(text.lines().all(|line| line.chars().count() <= room), "{}", text);
                prop_assert!(text.lines().all(|line| !line.contains(char::is_control)), "{}", text);
            }
        }

        #[test]
        fn sections_keep_their_extremes(levels in prop::collection::vec(0u64..1000, 1..300), count in 1usize..100) {
            let joined = sections(&of_points("", &levels, 1.0).levels, count);
            prop_assert_eq!(joined.len(), count);
            if levels.len() >= count {
                prop_assert_eq!(joined.iter().map(|(_, high)| high).max(), levels.iter().max());
                prop_assert_eq!(joined.iter().map(|(low, _)| low).min(), levels.iter().min());
            }
        }
    }
}
