//! Parses durations in flags: `90d`, `12h`, `1h30m`, `30s`, `500ms`.

use std::time::Duration;

/// Why a duration cannot be parsed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No number, or a number without a unit.
    #[error("a duration needs a number and a unit, such as 90d, 12h, 1h30m, 30s or 500ms")]
    Syntax,
    /// A unit other than d, h, m, s and ms.
    #[error("unknown unit {0:?}: use d, h, m, s or ms")]
    Unit(String),
    /// The sum overflows.
    #[error("the duration is too long to be represented")]
    TooLong,
}

/// Parses a sum of numbers, each with its unit.
pub fn parse(text: &str) -> Result<Duration, Error> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(Error::Syntax);
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or(Error::Syntax)?;
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| !c.is_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        if number.is_empty() || unit.is_empty() {
            return Err(Error::Syntax);
        }
        let number: u64 = number.parse().map_err(|_| Error::TooLong)?;
        let millis = number.checked_mul(millis(unit)?).ok_or(Error::TooLong)?;
        total = total.checked_add(Duration::from_millis(millis)).ok_or(Error::TooLong)?;
        rest = tail;
    }
    Ok(total)
}

fn millis(unit: &str) -> Result<u64, Error> {
    match unit {
        "ms" => Ok(1),
        "s" => Ok(1000),
        "m" => Ok(60 * 1000),
        "h" => Ok(3600 * 1000),
        "d" => Ok(24 * 3600 * 1000),
        other => Err(Error::Unit(other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_numbers_with_units() {
        let cases = [
            ("0s", 0),
            ("500ms", 500),
            ("30s", 30_000),
            ("5m", 300_000),
            ("12h", 43_200_000),
            ("90d", 7_776_000_000),
            ("365d", 31_536_000_000),
            ("1h30m", 5_400_000),
            ("1d2h3m4s5ms", 93_784_005),
            (" 7s ", 7_000),
        ];
        for (text, millis) in cases {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn rejects_text_that_is_not_a_duration() {
        for text in ["", " ", "s", "30", "30 s", "-5s", "1.5h", "1h30", "h1", "5s,", "٣s"] {
            assert_eq!(parse(text), Err(Error::Syntax), "{text}");
        }
        assert_eq!(parse("3y"), Err(Error::Unit("y".to_owned())));
        assert_eq!(parse("3µs"), Err(Error::Unit("µs".to_owned())));
        for text in ["99999999999999999999s", "18446744073709551615d"] {
            assert_eq!(parse(text), Err(Error::TooLong), "{text}");
        }
    }
}
