//! The right name for a misspelt one.

/// The least likeness of two names, from 0 to 1. With it, one letter of three may be wrong, or two
/// of five.
const ALIKE: f64 = 0.6;

/// The name that is most like `wrong`, without regard to case. Returns `None` if no name is like
/// it.
pub fn nearest<'a>(wrong: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wrong = wrong.to_ascii_lowercase();
    let (likeness, name) = names
        .into_iter()
        .map(|name| {
            let lower = name.to_ascii_lowercase();
            (strsim::normalized_damerau_levenshtein(&wrong, &lower), name)
        })
        .max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    (likeness >= ALIKE).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_name_with_few_wrong_letters_has_a_right_one() {
        let names = ["Network", "SubnetLen", "EnableIPv6", "MTU", "VNI", "DirectRouting"];
        for (wrong, right) in [
            ("Netwrok", Some("Network")),
            ("networks", Some("Network")),
            ("SUBNET_LEN", Some("SubnetLen")),
            ("EnableIpv6", Some("EnableIPv6")),
            ("MUT", Some("MTU")),
            ("VNID", Some("VNI")),
            ("DirectRoute", Some("DirectRouting")),
            ("Comment", None),
            ("PSK", None),
            ("", None),
        ] {
            assert_eq!(nearest(wrong, names), right, "{wrong}");
        }
        assert_eq!(nearest("MTU", []), None);
    }
}
