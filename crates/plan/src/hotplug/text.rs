//! Text of users and plugins in events and annotations.

/// One line of at most this many bytes. Control characters and those that change the direction of text become spaces.
pub(super) fn one_line(text: &str, max: usize) -> String {
    let mut line = String::new();
    for c in text.trim().chars().map(|c| if is_invisible(c) { ' ' } else { c }) {
        if line.len() + c.len_utf8() > max {
            break;
        }
        line.push(c);
    }
    line
}

fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}
