//! Tables in the style of kubectl.

/// A table; the last column is not padded.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let header = header.map(str::to_owned);
    let width = |column: usize| {
        rows.iter().chain([&header]).map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("   ").trim_end().to_owned() + "\n"
    };
    [&header].into_iter().chain(rows).map(line).collect()
}
