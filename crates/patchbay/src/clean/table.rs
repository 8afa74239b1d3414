//! Tables in the style of kubectl.

use crate::terminal;

/// A table; the last column is not padded.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let header = header.map(str::to_owned);
    let rows: Vec<[String; N]> =
        rows.iter().map(|row| row.each_ref().map(|cell| terminal::line(cell).into_owned())).collect();
    let width = |column: usize| {
        rows.iter().chain([&header]).map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("   ").trim_end().to_owned() + "\n"
    };
    [&header].into_iter().chain(&rows).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_cannot_add_a_row_or_control_the_terminal() {
        let rows = [["vm\n\u{1b}[31mdefault/a".to_owned(), "x".to_owned()]];
        assert_eq!(
            table(["CLAIM", "STATE"], &rows),
            "CLAIM                     STATE\nvm\\n\\u{1b}[31mdefault/a   x\n"
        );
    }
}
