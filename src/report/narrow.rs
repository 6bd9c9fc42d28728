//! Tables on terminals that are narrower than they are: numbers stay in one piece, names are broken, and the columns that
//! can best be missed are left out and named.
//!
//! Called by the tables that are wider than a common terminal, when all their rows are there.

use comfy_table::{ColumnConstraint, Table};

/// Columns up to this width are numbers or short names, and are not broken.
const BROKEN_FROM: u16 = 15;
/// What is broken keeps this width at least.
const LEAST_OF_A_NAME: u16 = 20;
/// Padding on both sides, and the gap to the next column.
const BETWEEN: u16 = 3;

/// Makes a table fit into `width`, leaving out `dispensable` columns, in that order, as far as needed. Says which, for the
/// line below the table.
pub(super) fn fit(table: &mut Table, width: Option<u16>, dispensable: &[usize]) -> Option<String> {
    let (Some(width), widths) = (width, table.column_max_content_widths()) else { return None };
    let least = |column: &u16| if *column < BROKEN_FROM { *column } else { LEAST_OF_A_NAME.min(*column) } + BETWEEN;
    let whole: u16 = widths.iter().map(|column| column + BETWEEN).sum();
    if whole <= width {
        return None;
    }
    let mut taken: u16 = widths.iter().map(least).sum();
    let mut left_out = Vec::new();
    for &column in dispensable {
        if taken > width {
            taken -= least(&widths[column]);
            left_out.push(column);
        }
    }
    let headings: Vec<String> = table.header().into_iter().flat_map(|header| header.cell_iter()).map(heading).collect();
    for (number, column) in table.column_iter_mut().enumerate() {
        if left_out.contains(&number) {
            column.set_constraint(ColumnConstraint::Hidden);
        } else if taken <= width && widths[number] < BROKEN_FROM {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
    }
    left_out.sort_unstable();
    let names: Vec<&str> = left_out.iter().filter_map(|&column| headings.get(column)).map(String::as_str).collect();
    (!names.is_empty()).then(|| format!("Left out of a narrow table: {}.", names.join(", ")))
}

fn heading(cell: &comfy_table::Cell) -> String {
    cell.content().replace("-\n", "").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::table::{dress_for_terminal, headed};

    fn lines(width: u16, dispensable: &[usize]) -> (Vec<String>, Option<String>) {
        let mut table = headed(&["workload", "strategy", "peak\nreserved", "driver\ncalls"]);
        table.add_row(["training", "caching:expandable_segments:True", "10.1 GiB", "123456"]);
        dress_for_terminal(&mut table, Some(width));
        let said = fit(&mut table, Some(width), dispensable);
        (table.trim_fmt().lines().map(str::to_owned).collect(), said)
    }

    #[test]
    fn a_table_that_fits_is_left_alone() {
        let (lines, said) = lines(80, &[3]);
        assert_eq!(said, None);
        assert!(lines[4].contains("caching:expandable_segments:True   10.1 GiB   123456"), "{lines:#?}");
    }

    #[test]
    fn names_are_broken_before_numbers_and_columns_go_before_either_is_unreadable() {
        let (narrow, said) = lines(60, &[3]);
        assert_eq!(said, None);
        assert!(narrow[4].contains("10.1 GiB   123456"), "{narrow:#?}");
        let (narrower, said) = lines(48, &[3]);
        assert_eq!(said.as_deref(), Some("Left out of a narrow table: driver calls."));
        assert!(narrower[4].contains("training") && narrower[4].contains("10.1 GiB"), "{narrower:#?}");
        assert!(narrower.iter().all(|line| line.chars().count() <= 48), "{narrower:#?}");
    }
}
