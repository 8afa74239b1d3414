//! Text for a terminal. Tenants write much of it (annotations, owner references, errors of CNI plugins), so none of it may
//! control the terminal or hide text.

use std::borrow::Cow;

/// Escapes every character that is not shown as itself, except line feeds and tabs.
pub fn text(text: &str) -> Cow<'_, str> {
    escape(text, |c| is_hidden(c) && !matches!(c, '\n' | '\t'))
}

/// Escapes every character that is not shown as itself: the result is one line.
pub fn line(text: &str) -> Cow<'_, str> {
    escape(text, is_hidden)
}

fn escape(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_escaped(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// Control characters, and those that are invisible or change the direction of text.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_tenants_cannot_control_the_terminal() {
        assert_eq!(text("a\tb\nc\u{1b}[2J\u{9b}31m\r"), "a\tb\nc\\u{1b}[2J\\u{9b}31m\\r");
        assert_eq!(line("a\nerror: none\u{202e}"), "a\\nerror: none\\u{202e}");
        assert_eq!(line("tag\u{e0041}\u{feff}"), "tag\\u{e0041}\\u{feff}");
        assert!(matches!(text("ein Wort: größer 日本\n"), Cow::Borrowed(_)));
    }
}
