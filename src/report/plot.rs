//! Small pictures of characters: a line of levels, a plot of a few rows, a bar.
//!
//! They hold no colours and no control characters, so that a pipe and `NO_COLOR` get the same picture as a terminal.
//! Where characters beyond ASCII cannot be shown the [`Pen`] says so, and they are drawn with letters.

use crate::base::Bytes;

/// What can be drawn with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pen {
    /// Columns of the terminal.
    pub width: u16,
    /// Whether characters beyond ASCII can be shown.
    pub unicode: bool,
}

const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const LETTERS: [char; 8] = ['_', '.', ':', '-', '=', '+', '*', '#'];
/// A picture wider than this is no clearer.
const WIDEST: usize = 100;
/// Rows of a plot.
const ROWS: usize = 6;
/// Room for an amount beside a plot.
const AMOUNT: usize = 9;

/// Lines of levels below each other, all on one scale, with their names before and their highest level behind.
#[must_use]
pub fn lines(series: &[(String, Vec<u64>)], pen: Pen) -> String {
    let name_width = series.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let room = usize::from(pen.width).saturating_sub(name_width + AMOUNT + 4).clamp(8, WIDEST);
    let highest = series.iter().flat_map(|(_, levels)| levels).copied().max().unwrap_or(0);
    let mut text = String::new();
    for (name, levels) in series {
        let own = Bytes(levels.iter().copied().max().unwrap_or(0)).to_string();
        let line = line(levels, highest, room, pen.unicode);
        text.push_str(&format!("{name:<name_width$}  {line}  {own:>AMOUNT$}\n"));
    }
    text
}

/// One character a stretch, as high as the highest level in it; a space where there is nothing.
fn line(levels: &[u64], highest: u64, width: usize, unicode: bool) -> String {
    let palette = if unicode { BLOCKS } else { LETTERS };
    stretches(levels, width)
        .iter()
        .map(|&level| match level {
            0 => ' ',
            level => palette[(scaled(level, highest, palette.len() * 16) / 16).min(palette.len() - 1)],
        })
        .collect()
}

/// A plot of one series over its `title`, a few rows high, with the lowest and the highest level beside it.
#[must_use]
pub fn plot(title: &str, levels: &[u64], pen: Pen) -> String {
    let room = usize::from(pen.width).saturating_sub(AMOUNT + 3).clamp(8, WIDEST);
    let across = if pen.unicode { room * 2 } else { room };
    let up = if pen.unicode { ROWS * 4 } else { ROWS };
    let (low, high) = (levels.iter().copied().min().unwrap_or(0), levels.iter().copied().max().unwrap_or(0));
    // From zero, unless that would press a course that matters into one row.
    let floor = if high - low < high / 8 { low } else { 0 };
    let heights: Vec<usize> = stretches(levels, across)
        .iter()
        .map(|&level| scaled(level - floor.min(level), (high - floor).max(1), up).min(up - 1))
        .collect();
    let mut text = format!("{title}\n");
    for row in (0..ROWS).rev() {
        let drawn: String = match pen.unicode {
            true => heights.chunks(2).map(|pair| braille(pair, row)).collect(),
            false => heights.iter().map(|&height| if height == row { '*' } else { ' ' }).collect(),
        };
        let label = match row {
            0 => Bytes(floor).to_string(),
            _ if row == ROWS - 1 => Bytes(high).to_string(),
            _ => String::new(),
        };
        let wall = if pen.unicode { '┤' } else { '|' };
        text.push_str(format!("{label:>AMOUNT$} {wall}{drawn}").trim_end());
        text.push('\n');
    }
    text
}

/// A braille character with the dots of two columns that lie in a row of four heights.
fn braille(pair: &[usize], row: usize) -> char {
    /// From the bottom up, of the left and of the right column.
    const DOTS: [[u32; 4]; 2] = [[0x40, 0x04, 0x02, 0x01], [0x80, 0x20, 0x10, 0x08]];
    let dots = pair
        .iter()
        .zip(DOTS)
        .filter(|(height, _)| **height / 4 == row)
        .fold(0, |dots, (height, column)| dots | column[height % 4]);
    char::from_u32(0x2800 + dots).filter(|_| dots > 0).unwrap_or(' ')
}

/// A bar for each amount on one scale, with a mark for the part of it that could not be done without.
#[must_use]
pub fn bars(amounts: &[(String, u64, Option<u64>)], pen: Pen) -> String {
    let name_width = amounts.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
    let room = usize::from(pen.width).saturating_sub(name_width + AMOUNT + 4).clamp(8, WIDEST);
    let highest = amounts.iter().map(|(_, amount, _)| *amount).max().unwrap_or(0);
    let (useful, lost) = if pen.unicode { ('█', '░') } else { ('#', '.') };
    let mut text = String::new();
    for (name, amount, of_use) in amounts {
        let length = scaled(*amount, highest, room);
        let solid = of_use.map_or(length, |part| scaled(part, highest, room).min(length));
        let bar: String = std::iter::repeat_n(useful, solid).chain(std::iter::repeat_n(lost, length - solid)).collect();
        text.push_str(&format!("{name:<name_width$}  {bar:<room$}  {:>AMOUNT$}\n", Bytes(*amount).to_string()));
    }
    text
}

/// The highest levels of `count` equal stretches; fewer levels are repeated.
fn stretches(levels: &[u64], count: usize) -> Vec<u64> {
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

    const PEN: Pen = Pen { width: 40, unicode: true };
    const PLAIN: Pen = Pen { unicode: false, ..PEN };

    #[test]
    fn lines_share_a_scale_and_name_their_highest() {
        let series =
            [("caching".to_owned(), vec![0, 4 * MIB, 8 * MIB, 8 * MIB]), ("direct".to_owned(), vec![MIB, MIB])];
        insta::assert_snapshot!(lines(&series, PEN), @"
        caching       ▅▅▅▅▅██████████   8.00 MiB
        direct   ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂   1.00 MiB
        ");
        assert!(lines(&series, PLAIN).is_ascii());
    }

    #[test]
    fn a_plot_shows_a_ramp_as_a_ramp() {
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
        assert!(plot("kept by step", &ramp, PEN).lines().all(|line| line.chars().count() <= 40));
    }

    #[test]
    fn a_bar_is_solid_as_far_as_memory_is_of_use() {
        let amounts = [("caching".to_owned(), 8 * MIB, Some(4 * MIB)), ("direct".to_owned(), 4 * MIB, None)];
        insta::assert_snapshot!(bars(&amounts, PLAIN), @"
        caching  ##########..........   8.00 MiB
        direct   ##########             4.00 MiB
        ");
    }

    proptest! {
        #[test]
        fn no_picture_is_wider_than_its_terminal_or_panics(
            levels in prop::collection::vec(any::<u64>(), 0..300),
            width in 30u16..200,
            unicode in any::<bool>(),
        ) {
            let pen = Pen { width, unicode };
            let series = [("name".to_owned(), levels.clone())];
            let bar: Vec<_> = levels.iter().take(3).map(|&level| ("n".to_owned(), level, Some(level / 2))).collect();
            for text in [lines(&series, pen), plot("title", &levels, pen), bars(&bar, pen)] {
                // Amounts beyond any memory are wider than their column.
                let room = usize::from(width) + 12;
                prop_assert!(text.lines().all(|line| line.chars().count() <= room), "{}", text);
                prop_assert!(text.lines().all(|line| !line.contains(char::is_control)), "{}", text);
            }
        }

        #[test]
        fn no_stretch_loses_its_highest(levels in prop::collection::vec(0u64..1000, 1..300), count in 1usize..100) {
            let joined = stretches(&levels, count);
            prop_assert_eq!(joined.len(), count);
            if levels.len() >= count {
                prop_assert_eq!(joined.iter().max(), levels.iter().max());
            }
        }
    }
}
