//! Command lines as Go's `flag` package reads them.
//!
//! A flag has one dash or two. Its value follows `=` or is the next word, even if that looks like a
//! flag. The value of a switch must follow `=`.
//!
//! **Source**: Go `flag`, `strconv.ParseBool`, `strconv.ParseInt` with base 0.

use std::ffi::OsString;
use std::ops::RangeInclusive;

/// Converts a command line for clap: `-iface eth0` becomes `--iface=eth0`. `flags` are all flags,
/// `with_value` those that take a value. Single letters that are not flags stay unchanged.
pub(crate) fn go_style(
    args: impl IntoIterator<Item = OsString>,
    flags: &[String],
    with_value: &[String],
) -> Vec<OsString> {
    let mut args = args.into_iter();
    let mut all: Vec<OsString> = args.next().into_iter().collect();
    while let Some(arg) = args.next() {
        if arg == "--" {
            all.push(arg);
            break;
        }
        let mut arg = match arg.to_str() {
            Some(text) if has_one_dash(text, flags) => OsString::from(format!("-{text}")),
            _ => arg,
        };
        let name = arg.to_str().and_then(|text| text.strip_prefix("--"));
        if name.is_some_and(|name| with_value.iter().any(|flag| flag == name))
            && let Some(value) = args.next()
        {
            arg.push("=");
            arg.push(value);
        }
        all.push(arg);
    }
    all.extend(args);
    all
}

/// Whether an argument is a flag with one dash, which is a word or one of `flags`.
fn has_one_dash(arg: &str, flags: &[String]) -> bool {
    let Some(name) = arg.strip_prefix('-') else { return false };
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && (name.len() > 1 || flags.iter().any(|flag| flag == name))
}

/// Whether the flag is among the arguments.
pub(crate) fn is_given(args: &[OsString], flag: &str) -> bool {
    args.iter().any(|arg| {
        let name = arg.to_str().and_then(|text| text.strip_prefix("--"));
        name.and_then(|name| name.split('=').next()) == Some(flag)
    })
}

/// Parses the value of a switch.
///
/// # Errors
/// The text is neither true nor false.
pub fn go_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}

/// Parses a whole number in a range: decimal, or with the prefix `0x`, `0o`, `0` or `0b`, and
/// underscores after a prefix.
pub fn go_int(
    range: RangeInclusive<i64>,
) -> impl Fn(&str) -> Result<i64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let expected = || match (range.start(), range.end()) {
            (&i64::MIN, most) => format!("expected a number up to {most}"),
            (least, most) => format!("expected a number from {least} to {most}"),
        };
        parse_int(text).filter(|number| range.contains(number)).ok_or_else(expected)
    }
}

fn parse_int(text: &str) -> Option<i64> {
    let (sign, digits) = match text.as_bytes().first()? {
        b'-' => ("-", &text[1..]),
        b'+' => ("", &text[1..]),
        _ => ("", text),
    };
    let lower = digits.to_ascii_lowercase();
    let prefixes = [("0x", 16), ("0b", 2), ("0o", 8), ("0", 8)];
    let based =
        prefixes.iter().find_map(|(prefix, base)| Some((lower.strip_prefix(prefix)?, *base)));
    let (digits, base) = match based {
        Some((rest, base)) if !rest.is_empty() => {
            // Underscores between digits, and between a prefix and a digit.
            let misplaced = rest.ends_with('_') || rest.contains("__");
            (rest.replace('_', ""), if misplaced { return None } else { base })
        }
        _ => (lower.clone(), 10),
    };
    // from_str_radix accepts a further sign.
    let unsigned = digits.starts_with(|c: char| c.is_ascii_alphanumeric());
    i64::from_str_radix(&format!("{sign}{digits}"), base).ok().filter(|_| unsigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_parsed_as_in_go() {
        for (text, number) in [
            ("0", Some(0)),
            ("5", Some(5)),
            ("+5", Some(5)),
            ("-5", Some(-5)),
            ("0x10", Some(16)),
            ("0X1f", Some(31)),
            ("-0x10", Some(-16)),
            ("010", Some(8)),
            ("0o17", Some(15)),
            ("0b101", Some(5)),
            ("0x_1_0", Some(16)),
            ("0_10", Some(8)),
            ("00", Some(0)),
            ("1_0", None),
            ("0x1__0", None),
            ("0x10_", None),
            ("", None),
            ("-", None),
            ("--5", None),
            ("0x", None),
            ("0x-5", None),
            ("09", None),
            ("5 ", None),
            ("five", None),
            ("9223372036854775808", None),
        ] {
            assert_eq!(parse_int(text), number, "{text:?}");
        }
        let minutes = go_int(1..=1439);
        assert_eq!(minutes("1439"), Ok(1439));
        assert_eq!(minutes("0x10"), Ok(16));
        assert!(minutes("0").unwrap_err().contains("from 1 to 1439"));
        assert!(go_int(i64::MIN..=65535)("65536").unwrap_err().contains("up to 65535"));
    }

    #[test]
    fn one_dash_becomes_two_and_the_next_word_becomes_the_value() {
        let all = |args: &[&str]| -> Vec<String> {
            let flags = ["iface", "v", "ip-masq"].map(str::to_owned);
            let args = std::iter::once("flanneld").chain(args.iter().copied()).map(OsString::from);
            let args = go_style(args, &flags, &flags[..2]);
            args.iter().skip(1).map(|arg| arg.to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(all(&["-iface", "eth0", "-v", "4", "-v=4"]), ["--iface=eth0", "--v=4", "--v=4"]);
        assert_eq!(
            all(&["-ip-masq", "-iface=-x", "-h", "-V"]),
            ["--ip-masq", "--iface=-x", "-h", "-V"]
        );
        assert_eq!(
            all(&["--iface", "--ip-masq", "--", "-iface"]),
            ["--iface=--ip-masq", "--", "-iface"]
        );
    }
}
