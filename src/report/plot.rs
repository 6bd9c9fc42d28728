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

/// Lines of levels on one scale, each with its name and its highest level.
pub fn lines(series: &[(String, Vec<u64>)], terminal: Terminal) -> String {
    let name_width = series.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let room = room(terminal, name_width + AMOUNT + 4);
    let highest = series.iter().flat_map(|(_, levels)| levels).copied().max().unwrap_or(0);
    let mut text = String::new();
    for (name, levels) in series {
        let own = Bytes(levels.iter().copied().max().unwrap_or(0)).to_string();
        let line = line(levels, highest, room, terminal.glyphs);
        text.push_str(&format!("{name:<name_width$}  {line}  {own:>AMOUNT$}\n"));
    }
    text
}

/// One character per section, as high as the highest level in it; a space for zero.
fn line(levels: &[u64], highest: u64, width: usize, glyphs: Glyphs) -> String {
    let palette = if glyphs == Glyphs::Blocks { BLOCKS } else { LETTERS };
    sections(levels, width)
        .iter()
        .map(|&level| match level {
            0 => ' ',
            level => palette[(scaled(level, highest, palette.len() * 16) / 16).min(palette.len() - 1)],
        })
        .collect()
}

/// A plot of one series under its `title`, with the lowest and the highest level beside it.
pub fn plot(title: &str, levels: &[u64], terminal: Terminal) -> String {
    let room = room(terminal, AMOUNT + 3);
    let (low, high) = (levels.iter().copied().min().unwrap_or(0), levels.iter().copied().max().unwrap_or(0));
    // From zero, unless all changes would fall into one row.
    let floor = if high - low < high / 8 { low } else { 0 };
    let heights: Vec<usize> = sections(levels, room)
        .iter()
        .map(|&level| scaled(level - floor.min(level), (high - floor).max(1), ROWS).min(ROWS - 1))
        .collect();
    let mut text = format!("{title}\n");
    for row in (0..ROWS).rev() {
        let drawn: String = heights.iter().map(|&height| if height == row { '*' } else { ' ' }).collect();
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

/// The highest levels of `count` equal sections; fewer levels are repeated.
fn sections(levels: &[u64], count: usize) -> Vec<u64> {
    let bounds = |place: usize| place * levels.len() / count;
    (0..if levels.is_empty() { 0 } else { count })
        .map(|place| {
            let (from, to) = (bounds(place), bounds(place + 1).max(bounds(place) + 1));
            levels[from.min(levels.len() - 1)..to.min(levels.len())].iter().copied().max().unwrap_or(0)
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

    #[test]
    fn lines_share_a_scale() {
        let series =
            [("caching".to_owned(), vec![0, 4 * MIB, 8 * MIB, 8 * MIB]), ("direct".to_owned(), vec![MIB, MIB])];
        insta::assert_snapshot!(lines(&series, UNICODE), @"
        caching       ▅▅▅▅▅██████████   8.00 MiB
        direct   ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂   1.00 MiB
        ");
        assert!(lines(&series, PLAIN).is_ascii());
    }

    #[test]
    fn plot_shows_a_ramp() {
        let ramp: Vec<u64> = (1..=54).map(|step| step * MIB).collect();
        insta::assert_snapshot!(plot("kept by step", &ramp, PLAIN), @"
        kept by step
         54.0 MiB |                     *******
                  |                *****
                  |           *****
                  |       ****
                  |  *****
              0 B |**
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
            let series = [("name".to_owned(), levels.clone())];
            let bar: Vec<_> = levels.iter().take(3).map(|&level| ("n".to_owned(), level, Some(level / 2))).collect();
            for text in [lines(&series, terminal), plot("title", &levels, terminal), bars(&bar, terminal)] {
                // Amounts beyond any memory are wider than their column.
                let room = usize::from(width) + 12;
                prop_assert!(text.lines().all(|line| line.chars().count() <= room), "{}", text);
                prop_assert!(text.lines().all(|line| !line.contains(char::is_control)), "{}", text);
            }
        }

        #[test]
        fn sections_keep_the_highest(levels in prop::collection::vec(0u64..1000, 1..300), count in 1usize..100) {
            let joined = sections(&levels, count);
            prop_assert_eq!(joined.len(), count);
            if levels.len() >= count {
                prop_assert_eq!(joined.iter().max(), levels.iter().max());
            }
        }
    }
}
