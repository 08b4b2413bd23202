//! The mistakes in a network config: values that daemons refuse, and fields that they ignore or
//! correct without a word. They do so because Go flannel does.

use std::net::IpAddr;
use std::sync::Arc;

use flannel_backends::{Backends, UnknownBackend};
use flannel_core::address::Family;
use flannel_core::json::{FieldError, Fields, Members, compact};
use flannel_core::text::shorten;
use flannel_core::{Backend, Config, Error as CoreError, Subnet};
use flannel_options::nearest;
use serde_json::Value;
use serde_json::value::RawValue;

use super::validate;

/// Networks whose addresses pods cannot use.
const UNUSABLE: [(&str, &str); 8] = [
    ("unspecified", "0.0.0.0/8"),
    ("loopback", "127.0.0.0/8"),
    ("link-local", "169.254.0.0/16"),
    ("multicast", "224.0.0.0/4"),
    ("reserved", "240.0.0.0/4"),
    ("loopback", "::1/128"),
    ("link-local", "fe80::/10"),
    ("multicast", "ff00::/8"),
];

/// How daemons read a config: [`Config::parse`], or [`Config::parse_undivided`] in Kubernetes.
pub(super) type Parse = fn(&str) -> Result<Config, FieldError>;

/// The names of an object's fields.
#[derive(Clone, Copy, Default)]
struct Names<'a> {
    /// What precedes the name of a field: `Backend.`, or nothing.
    path: &'static str,
    /// Empty if the names are not known.
    known: &'a [&'a str],
}

/// The members of a config, and the members of its `Backend`.
struct Objects {
    config: Members,
    options: Members,
}

/// A config whose backend exists.
struct KnownConfig<'a> {
    config: Config,
    backend: &'a Arc<dyn Backend>,
}

/// A value that daemons refuse.
#[derive(Debug)]
pub(super) struct Refusal {
    /// The field with its path, or `None` if only the text of a backend's error names it.
    field: Option<String>,
    pub(super) text: String,
}

impl From<FieldError> for Refusal {
    fn from(error: FieldError) -> Self {
        Self { text: error.to_string(), field: Some(error.field) }
    }
}

impl From<UnknownBackend> for Refusal {
    fn from(error: UnknownBackend) -> Self {
        Self { field: Some("Backend.Type".to_owned()), text: error.to_string() }
    }
}

impl From<CoreError> for Refusal {
    fn from(error: CoreError) -> Self {
        Self { field: None, text: error.to_string() }
    }
}

/// All mistakes in a config. Each names the field, its value and what would be right.
///
/// # Errors
/// The text is not a JSON object.
pub(super) fn find(text: &str, backends: &Backends, parse: Parse) -> Result<Vec<String>, String> {
    let fields = Fields::parse(text, "").map_err(|error| error.to_string())?;
    let objects = objects(text);
    let known = readable(text, &fields, backends, parse);
    let refused = refused(text, backends, parse, &objects, &known);
    let unsuitable = unsuitable(&fields, &refused);
    let mut found: Vec<String> = refused.into_iter().map(|refusal| refusal.text).collect();
    found.extend(unsuitable);
    let names = Config::fields();
    let listed = known.as_ref().ok().and_then(|known| known.backend.option_names());
    let listed = listed.map(|names| [&["Type"][..], names].concat()).unwrap_or_default();
    let of_config = Names { path: "", known: &names[..] };
    let of_backend = Names { path: "Backend.", known: &listed[..] };
    found.extend(without_effect(&objects.config, of_config, of_backend));
    found.extend(without_effect(&objects.options, of_backend, of_config));
    Ok(found)
}

/// The fields of a config that have no effect in Kubernetes, each as a note.
pub(super) fn undivided(text: &str) -> Vec<String> {
    let has_no_effect = |(name, value): &(String, Box<RawValue>)| {
        let is_it = |known: &str| known.eq_ignore_ascii_case(name);
        Config::division_fields().any(is_it).then(|| {
            format!(
                "field {name}: {} has no effect in Kubernetes, where the subnet of a node is its \
                 PodCIDR",
                shown(value)
            )
        })
    };
    objects(text).config.0.iter().filter_map(has_no_effect).collect()
}

/// The fields of a config or a patch that a later field of the same name replaces.
pub(super) fn repeated(text: &str) -> Vec<String> {
    let objects = objects(text);
    let no_names = Names::default();
    let mut found = without_effect(&objects.config, no_names, no_names);
    let of_backend = Names { path: "Backend.", known: &[] };
    found.extend(without_effect(&objects.options, of_backend, no_names));
    found
}

fn objects(text: &str) -> Objects {
    let read = |text: &str| serde_json::from_str::<Members>(text).unwrap_or_default();
    let config = read(text);
    let backend = config.0.iter().rfind(|(name, _)| name.eq_ignore_ascii_case("Backend"));
    let options = backend.map(|(_, value)| read(value.get())).unwrap_or_default();
    Objects { config, options }
}

/// The config and its backend. If the config is wrong outside of `Backend`, it is its `Backend`
/// with a placeholder network.
fn readable<'a>(
    text: &str,
    fields: &Fields,
    backends: &'a Backends,
    parse: Parse,
) -> Result<KnownConfig<'a>, Refusal> {
    let config = parse(text).or_else(|_| {
        let backend = fields.raw("Backend").map(|raw| format!(r#","Backend":{}"#, raw.get()));
        parse(&format!(r#"{{"Network":"10.0.0.0/8"{}}}"#, backend.unwrap_or_default()))
    })?;
    let backend = backends.find(&config.backend.kind)?;
    Ok(KnownConfig { config, backend })
}

/// The values that daemons refuse, the first one as a daemon names it. A daemon names only that
/// one, so each field is checked alone.
fn refused(
    text: &str,
    backends: &Backends,
    parse: Parse,
    objects: &Objects,
    known: &Result<KnownConfig<'_>, Refusal>,
) -> Vec<Refusal> {
    let Err(first) = validate(text, backends, parse) else { return Vec::new() };
    let mut found = vec![first];
    let mut add = |refusal: Refusal| {
        if !found.iter().any(|known| known.text == refusal.text) {
            found.push(refusal);
        }
    };
    let members = objects.config.0.iter();
    members.filter_map(|(name, value)| wrong_alone(name, value, parse)).for_each(&mut add);
    match known {
        Err(Refusal { field, text }) => add(Refusal { field: field.clone(), text: text.clone() }),
        Ok(known) => known.wrong_options(&objects.options).into_iter().for_each(add),
    }
    found
}

impl KnownConfig<'_> {
    /// The errors of the backend about single options, and about all of them.
    fn wrong_options(&self, options: &Members) -> Vec<Refusal> {
        // A backend's error has no field, so it is compared with the error without any option. An
        // error that is there too, such as a missing option, is about another option.
        let without = self.check("{}".to_owned());
        let mut found = Vec::new();
        for (name, value) in &options.0 {
            let alone = self.check(format!("{{{}}}", member(name, value)));
            let is_own = alone.as_ref().map(|refusal| &refusal.text)
                != without.as_ref().map(|refusal| &refusal.text);
            found.extend(alone.filter(|_| is_own));
        }
        found.extend(self.check(self.config.backend.options.clone()));
        found
    }

    /// The error of the backend about these options.
    fn check(&self, options: String) -> Option<Refusal> {
        let mut config = self.config.clone();
        config.backend.options = options;
        self.backend.validate(&config, None).err().map(Refusal::from)
    }
}

/// The error of a value that is wrong whatever the other fields are.
fn wrong_alone(name: &str, value: &RawValue, parse: Parse) -> Option<Refusal> {
    // No family is enabled, so nothing else is needed.
    let parse = |more: &str| parse(&format!(r#"{{"EnableIPv4":false{more}}}"#)).err();
    let error = parse(&format!(",{}", member(name, value)))?;
    let is_own = error.field.eq_ignore_ascii_case(name) && Some(&error) != parse("").as_ref();
    is_own.then(|| error.into())
}

/// A member of an object as JSON.
fn member(name: &str, value: &RawValue) -> String {
    format!("{}:{}", Value::from(name), value.get())
}

/// Networks with host bits, and those that pods cannot use, without those that are `refused`.
fn unsuitable(fields: &Fields, refused: &[Refusal]) -> Vec<String> {
    let mut found = Vec::new();
    let [[v4, ..], [v6, ..]] = Config::FAMILY_FIELDS;
    for name in [v4, v6] {
        let Ok(Some(text)) = fields.take::<String>(name, "a network") else { continue };
        let Ok(network) = text.parse::<Subnet>() else { continue };
        let field = format!("field {name}: ");
        let is_refused = refused.iter().any(|refusal| refusal.field.as_deref() == Some(name));
        // Go's text for no network is 0.0.0.0/0 or ::/0.
        if network.is_everything() || is_refused {
            continue;
        }
        let overlaps =
            |text: &str| text.parse::<Subnet>().is_ok_and(|other| other.overlaps(&network));
        if let Some((kind, unusable)) = UNUSABLE.iter().find(|(_, text)| overlaps(text)) {
            let example = match network.family() {
                Family::V4 => "10.244.0.0/16",
                Family::V6 => "fd00:10:244::/48",
            };
            found.push(format!(
                "{field}{text:?} has {kind} addresses ({unusable}), which pods cannot use; \
                 expected a network such as {example:?}"
            ));
        }
        let address = text.split_once('/').and_then(|(address, _)| address.parse::<IpAddr>().ok());
        if address != Some(network.base()) {
            let right = network.to_string();
            found.push(format!(
                "{field}{text:?} has host bits, which daemons ignore; expected {right:?}"
            ));
        }
    }
    found
}

/// The fields that no daemon knows, and those that a later one replaces. `elsewhere` are the names
/// in the other object.
fn without_effect(members: &Members, names: Names<'_>, elsewhere: Names<'_>) -> Vec<String> {
    let Names { path, known: names } = names;
    let mut found = Vec::new();
    let members: Vec<_> = members.0.iter().filter(|(name, _)| !is_comment(name)).collect();
    for (n, (name, value)) in members.iter().enumerate() {
        let same = |other: &str| other.eq_ignore_ascii_case(name);
        let field = format!("field {path}{name}: {}", shown(value));
        if let Some((last, used)) = members[n + 1..].iter().rfind(|(later, _)| same(later)) {
            let used = shown(used);
            found.push(format!(
                "{field} has no effect, because {path}{last} is the same field and comes later, \
                 with {used}; remove one of the two"
            ));
        } else if !names.is_empty() && !names.iter().any(|known| same(known)) {
            let moved = elsewhere.known.iter().find(|other| same(other));
            let right = moved.map(|name| format!("{}{name}", elsewhere.path)).or_else(|| {
                nearest(name, names.iter().copied()).map(|name| format!("{path}{name}"))
            });
            let right = right.unwrap_or_else(|| format!("one of {}", names.join(", ")));
            // It may be a secret, such as the PSK of another backend.
            let is_secret = value.get().starts_with(['"', '{', '[']);
            let field = if is_secret { format!("field {path}{name}") } else { field };
            found.push(format!(
                "{field} has no effect, because there is no such field; expected {right}"
            ));
        }
    }
    found
}

/// Whether a field is a comment. JSON has none, so people write `_comment` and `//` as fields,
/// which Go flannel ignores.
fn is_comment(name: &str) -> bool {
    name.starts_with('_') || name.starts_with("//")
}

/// A value for a message, in one line and at most 60 characters of it.
fn shown(value: &RawValue) -> String {
    shorten(&compact(value.get()), 60).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<String> {
        find(text, &flannel_backends::all(), Config::parse).unwrap()
    }

    /// A config with these options of vxlan.
    fn vxlan(options: &str) -> String {
        format!(r#"{{"Network":"10.1.0.0/16","Backend":{{"Type":"vxlan",{options}}}}}"#)
    }

    /// A config with this network and these other fields.
    fn network(network: &str, more: &str) -> String {
        format!(r#"{{"Network":"{network}"{more}}}"#)
    }

    #[test]
    fn a_config_that_daemons_accept_has_each_of_these_mistakes() {
        for (text, expected) in [
            (
                vxlan(r#""MUT":1400"#),
                "field Backend.MUT: 1400 has no effect, because there is no such field; expected \
                 Backend.MTU",
            ),
            (vxlan(r#""directRoute":true"#), "expected Backend.DirectRouting"),
            (vxlan(r#""PSK":"x""#), "expected one of Type, VNI, Port, MTU"),
            (vxlan(r#""EnableIPv6":true"#), "field Backend.EnableIPv6: true has no effect"),
            (vxlan(r#""SubnetLen":25"#), "expected SubnetLen"),
            (network("10.1.0.0/16", r#","mtu":1400"#), "field mtu: 1400 has no effect"),
            (network("10.1.0.0/16", r#","mtu":1400"#), "expected Backend.MTU"),
            (network("10.1.0.0/16", r#","EnableNFTable":true"#), "expected EnableNFTables"),
            (
                network("10.1.0.0/16", r#","Backend":{"Type":"alloc","x":1}"#),
                "expected one of Type",
            ),
            (
                vxlan(r#""MTU":1400,"MTU":1450"#),
                "field Backend.MTU: 1400 has no effect, because Backend.MTU is the same field and \
                 comes later, with 1450; remove one of the two",
            ),
            (vxlan(r#""MTU":1400,"Mtu":1450"#), "because Backend.Mtu is the same field"),
            (
                network("10.1.0.0/16", r#","network":"10.1.0.0/16""#),
                "field Network: \"10.1.0.0/16\"",
            ),
            (
                network("10.1.2.3/16", ""),
                "field Network: \"10.1.2.3/16\" has host bits, which daemons ignore; expected \
                 \"10.1.0.0/16\"",
            ),
            (
                network("10.1.0.0/16", r#","EnableIPv6":true,"IPv6Network":"fd00::1/48""#),
                "field IPv6Network: \"fd00::1/48\" has host bits, which daemons ignore; expected \
                 \"fd00::/48\"",
            ),
            (network("169.254.0.0/16", ""), "has link-local addresses (169.254.0.0/16)"),
            (network("0.4.0.0/16", ""), "has unspecified addresses (0.0.0.0/8)"),
            (network("250.1.0.0/16", ""), "has reserved addresses (240.0.0.0/4)"),
            (network("126.0.0.0/7", ""), "has loopback addresses (127.0.0.0/8)"),
            (network("192.0.0.0/2", ""), "has multicast addresses (224.0.0.0/4)"),
            (
                network("10.1.0.0/16", r#","EnableIPv6":true,"IPv6Network":"fe80::/64""#),
                "field IPv6Network: \"fe80::/64\" has link-local addresses (fe80::/10), which pods \
                 cannot use; expected a network such as \"fd00:10:244::/48\"",
            ),
            (
                network("10.1.0.0/16", r#","IPv6Network":"ff00::/16""#),
                "has multicast addresses (ff00::/8)",
            ),
        ] {
            assert!(validate(&text, &flannel_backends::all(), Config::parse).is_ok(), "{text}");
            let all = of(&text);
            let [mistake] = &all[..] else { panic!("{text}: {all:?}") };
            assert!(mistake.contains(expected), "{mistake}");
        }
    }

    #[test]
    fn values_that_daemons_refuse_are_mistakes() {
        for (text, expected) in [
            (vxlan(r#""MTU":"1400""#), "field Backend.MTU: \"1400\" is not valid"),
            (vxlan(r#""MTU":65536"#), "field Backend.MTU: 65536 is not valid"),
            (vxlan(r#""MTU":100"#), "Backend.MTU 100 is too small for IPv4: at least 118"),
            (vxlan(r#""Port":65536"#), "field Backend.Port: 65536 is not valid"),
            (vxlan(r#""VNI":16777216"#), "expected a number from 1 to 16777215"),
            (network("10.1.0.0/16", r#","SubnetLen":"24""#), "field SubnetLen: \"24\""),
            (network("127.0.0.0/8", ""), "field Network: 127.0.0.0/8 is not valid"),
            (network("224.1.2.3/8", ""), "field Network: 224.0.0.0/8 is not valid"),
        ] {
            let all = of(&text);
            let [mistake] = &all[..] else { panic!("{text}: {all:?}") };
            assert!(mistake.contains(expected), "{mistake}");
        }
        assert!(
            find("[]", &flannel_backends::all(), Config::parse).unwrap_err().contains("(document)")
        );
    }

    /// In Kubernetes daemons ignore them, as Go flannel does.
    #[test]
    fn fields_of_the_division_are_no_mistakes_in_kubernetes() {
        let backends = flannel_backends::all();
        let text = network("10.1.0.0/24", r#","subnetLen":24,"SubnetMin":"10.1.0.0""#);
        assert_eq!(find(&text, &backends, Config::parse).unwrap().len(), 1);
        assert_eq!(find(&text, &backends, Config::parse_undivided).unwrap(), [""; 0]);
        let notes = undivided(&text);
        let [len, min] = &notes[..] else { panic!("{notes:?}") };
        assert!(len.starts_with("field subnetLen: 24 has no effect in Kubernetes"), "{len}");
        assert!(min.starts_with("field SubnetMin: \"10.1.0.0\" has no effect"), "{min}");
        let small = network("10.1.0.0/30", "");
        assert_eq!(find(&small, &backends, Config::parse_undivided).unwrap(), [""; 0]);
        assert_eq!(undivided(&small), [""; 0]);
        let wrong = network("10.1.0.0/24", r#","SubnetLen":"24""#);
        let found = find(&wrong, &backends, Config::parse_undivided).unwrap();
        assert!(found[0].contains("field SubnetLen: \"24\""), "{found:?}");
    }

    #[test]
    fn all_mistakes_are_found_at_once() {
        let all =
            of(r#"{"Netwrok":"10.1.0.0/16","SubnetLen":"24","EnableNFTables":"yes","EnableIPv6":1,
                "Backend":{"Type":"vxlan","VNI":"1","port":70000,"mtu":50,"GPB":true}}"#);
        let fields = [
            "field EnableNFTables: \"yes\"",
            "field SubnetLen: \"24\"",
            "field EnableIPv6: 1",
            "field Backend.VNI: \"1\"",
            "field Backend.Port: 70000",
            "Backend.MTU 50 is too small",
            "expected Network",
            "expected Backend.GBP",
        ];
        for field in fields {
            assert_eq!(all.iter().filter(|text| text.contains(field)).count(), 1, "{all:#?}");
        }
        assert_eq!(all.len(), fields.len(), "{all:#?}");
        let all = of(r#"{"Network":"10.1.0.0/33","Backend":{"Type":"vlxan"}}"#);
        assert!(all.len() == 2 && all[1].contains("\"vlxan\" is not a backend"), "{all:?}");
    }

    #[test]
    fn a_config_as_go_flannel_reads_it_has_no_mistake() {
        for text in [
            r#"{"network":"10.1.0.0/16","subnetlen":24,"backend":{"type":"VXLAN","mtu":1400}}"#,
            r#"{"Network":"10.1.0.0/16","IPv6Network":"::/0"}"#,
            r#"{"_comment":"a","//":"b","//":"c","Network":"10.1.0.0/16",
                "Backend":{"Type":"vxlan","//MTU":1400,"_was":{"VNI":2}}}"#,
            // Windows nodes of the same cluster use these.
            r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan","MacPrefix":"0E-2A"}}"#,
            r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw","Name":"cbr0"}}"#,
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"FD00::/48","SubnetLen":0}"#,
        ] {
            assert_eq!(of(text), [""; 0], "{text}");
        }
    }

    #[test]
    fn options_of_an_unknown_backend_are_not_judged() {
        let all = find(&vxlan(r#""MUT":1400"#), &Backends::default(), Config::parse).unwrap();
        assert!(all.len() == 1 && all[0].contains("is not a backend"), "{all:?}");
    }

    #[test]
    fn values_are_shown_in_one_short_line() {
        for (json, expected) in [
            (format!("\"{}\"", "ä".repeat(100)), format!("\"{}…", "ä".repeat(59))),
            ("{\n  \"a\": 1\n}".to_owned(), r#"{"a":1}"#.to_owned()),
        ] {
            assert_eq!(shown(&RawValue::from_string(json).unwrap()), expected);
        }
    }

    #[test]
    fn a_secret_of_another_backend_is_not_shown() {
        for secret in [r#""sesame""#, r#"["sesame"]"#, r#"{"a":"sesame"}"#] {
            let all = of(&vxlan(&format!(r#""PSK":{secret}"#)));
            assert!(all[0].contains("Backend.PSK") && !all[0].contains("sesame"), "{all:?}");
        }
    }
}
