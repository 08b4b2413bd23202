//! The language of templates, as far as the chart needs it. The one thing to know: whatever it does not know is an error, so
//! that a chart which leaves the subset fails the tests.
//!
//! **Source**: Go `text/template`; sprig's `quote`, `nindent`, `int`; helm's `toYaml`.

use serde_json::{Number, Value};

use crate::yaml::to_yaml;

/// Why a template cannot be read or rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{{{{ {action} }}}}: {why}")]
pub struct TemplateError {
    /// The action at fault, as it is written.
    pub action: String,
    /// What is wrong with it.
    pub why: String,
}

/// A template that was understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Template(Vec<Node>);

#[derive(Debug, Clone, PartialEq)]
enum Node {
    Text(String),
    Print(Pipeline),
    Branch(Branch),
}

/// `if` or `with`, and what belongs to it.
#[derive(Debug, Clone, PartialEq)]
struct Branch {
    condition: Pipeline,
    /// `with`: the condition is `.` inside.
    rebinds: bool,
    then: Vec<Node>,
    otherwise: Vec<Node>,
}

/// Commands, each of which gets the result of the one before as its last argument.
#[derive(Debug, Clone, PartialEq)]
struct Pipeline {
    text: String,
    commands: Vec<Vec<Word>>,
}

#[derive(Debug, Clone, PartialEq)]
enum Word {
    /// `.`, `.a.b`
    Path(Vec<String>),
    Number(u64),
    Function(String),
}

/// A piece of a template's text.
#[derive(Debug)]
enum Piece<'a> {
    Text(&'a str),
    Action(&'a str),
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// [`TemplateError`]: it is none, or uses what is outside of the subset.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let mut pieces = pieces(text)?.into_iter();
        let (nodes, end) = nodes(&mut pieces)?;
        match end {
            None => Ok(Self(nodes)),
            Some(action) => Err(error(&action, "there is nothing that it belongs to")),
        }
    }

    /// Renders it with `root` as `.`.
    ///
    /// # Errors
    /// [`TemplateError`]: a value that is printed is not there, or of a kind that a function does not take.
    pub fn render(&self, root: &Value) -> Result<String, TemplateError> {
        let mut out = String::new();
        render(&self.0, root, &mut out)?;
        Ok(out)
    }
}

fn error(action: &str, why: &str) -> TemplateError {
    TemplateError { action: action.trim().to_owned(), why: why.to_owned() }
}

/// Texts and actions, without the white space that `-` takes away.
fn pieces(mut rest: &str) -> Result<Vec<Piece<'_>>, TemplateError> {
    let mut pieces = Vec::new();
    let mut trim = false;
    loop {
        let (text, action) = match rest.split_once("{{") {
            Some((text, action)) => (text, Some(action)),
            None => (rest, None),
        };
        let mut text = if trim { text.trim_start() } else { text };
        let Some(action) = action else {
            pieces.push(Piece::Text(text));
            return Ok(pieces);
        };
        let (inside, after) =
            action.split_once("}}").ok_or_else(|| error(action, "there is no }} for this"))?;
        let (left, inside) =
            inside.strip_prefix("- ").map_or((false, inside), |inside| (true, inside));
        let (right, inside) =
            inside.strip_suffix(" -").map_or((false, inside), |inside| (true, inside));
        if left {
            text = text.trim_end();
        }
        pieces.extend([Piece::Text(text), Piece::Action(inside.trim())]);
        (rest, trim) = (after, right);
    }
}

/// Everything up to an `else` or `end` that does not belong to anything in it; that too.
fn nodes<'a>(
    pieces: &mut impl Iterator<Item = Piece<'a>>,
) -> Result<(Vec<Node>, Option<String>), TemplateError> {
    let mut nodes = Vec::new();
    while let Some(piece) = pieces.next() {
        let action = match piece {
            Piece::Text(text) => {
                nodes.push(Node::Text(text.to_owned()));
                continue;
            }
            Piece::Action(action) => action,
        };
        let (word, rest) = action.split_once(' ').unwrap_or((action, ""));
        match word {
            "if" | "with" => nodes.push(Node::Branch(branch(word == "with", rest, pieces)?)),
            "else" | "end" => return Ok((nodes, Some(action.to_owned()))),
            "range" | "define" | "template" | "block" | "include" | "tpl" => {
                return Err(error(action, "outside of the subset of this renderer"));
            }
            _ => nodes.push(Node::Print(Pipeline::parse(action)?)),
        }
    }
    Ok((nodes, None))
}

fn branch<'a>(
    rebinds: bool,
    condition: &str,
    pieces: &mut impl Iterator<Item = Piece<'a>>,
) -> Result<Branch, TemplateError> {
    let condition = Pipeline::parse(condition)?;
    let (then, end) = nodes(pieces)?;
    let otherwise = match end.as_deref() {
        Some("end") => Vec::new(),
        Some("else") if !rebinds => match nodes(pieces)? {
            (otherwise, Some(end)) if end == "end" => otherwise,
            (_, end) => return Err(error(&end.unwrap_or_default(), "expected the end of an else")),
        },
        Some(other) => return Err(error(other, "outside of the subset of this renderer")),
        None => return Err(error(&condition.text, "there is no end for this")),
    };
    Ok(Branch { condition, rebinds, then, otherwise })
}

impl Pipeline {
    fn parse(text: &str) -> Result<Self, TemplateError> {
        let mut commands = vec![Vec::new()];
        let mut rest = text.trim();
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('|') {
                commands.push(Vec::new());
                rest = after.trim_start();
                continue;
            }
            let (word, after) = word(rest).map_err(|why| error(text, &why))?;
            commands.last_mut().expect("there is one from the start").push(word);
            rest = after.trim_start();
        }
        if commands.iter().any(Vec::is_empty) {
            return Err(error(text, "a command is empty"));
        }
        Ok(Self { text: text.to_owned(), commands })
    }

    fn value(&self, dot: &Value) -> Result<Value, TemplateError> {
        let mut piped = None;
        for command in &self.commands {
            let mut words = command.iter();
            let first = words.next().expect("parse refuses empty commands");
            let mut arguments: Vec<Value> = words.map(|word| word.value(dot)).collect();
            arguments.extend(piped.take());
            piped = Some(match first {
                Word::Function(name) => {
                    call(name, &arguments).map_err(|why| error(&self.text, &why))?
                }
                operand if arguments.is_empty() => operand.value(dot),
                _ => return Err(error(&self.text, "arguments belong behind a function")),
            });
        }
        Ok(piped.unwrap_or_default())
    }
}

impl Word {
    /// `null` if it is not there.
    fn value(&self, dot: &Value) -> Value {
        match self {
            Self::Path(names) => {
                let found = names.iter().try_fold(dot, |value, name| value.get(name));
                found.cloned().unwrap_or_default()
            }
            Self::Number(number) => (*number).into(),
            Self::Function(name) => Value::from(name.as_str()),
        }
    }
}

/// The word at the beginning, and what follows it.
fn word(text: &str) -> Result<(Word, &str), String> {
    let end = text.find(|c: char| c.is_whitespace() || c == '|').unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let word = match word.strip_prefix('.') {
        Some("") => Word::Path(Vec::new()),
        Some(path) if path.split('.').all(is_name) => {
            Word::Path(path.split('.').map(str::to_owned).collect())
        }
        None if FUNCTIONS.contains(&word) => Word::Function(word.to_owned()),
        _ => match word.parse() {
            Ok(number) => Word::Number(number),
            Err(_) => return Err(format!("{word:?} is outside of the subset of this renderer")),
        },
    };
    Ok((word, rest))
}

const FUNCTIONS: [&str; 4] = ["quote", "toYaml", "nindent", "int"];

fn call(name: &str, arguments: &[Value]) -> Result<Value, String> {
    Ok(match (name, arguments) {
        ("quote", [value]) => go_quoted(&printed(value)?).into(),
        ("toYaml", [Value::Null]) => return Err("the value is not there".into()),
        ("toYaml", [Value::Number(number)]) if !is_exact(number) => {
            return Err(format!(
                "{number} is more than helm knows exactly: right would be a text in quotes"
            ));
        }
        ("toYaml", [value]) => to_yaml(value).into(),
        ("int", [Value::Number(number)]) => (number.as_f64().unwrap_or_default() as i64).into(),
        ("int", [Value::String(text)]) => text.parse::<i64>().unwrap_or_default().into(),
        ("nindent", [spaces, text]) => {
            let (Some(spaces), Some(text)) = (spaces.as_u64(), text.as_str()) else {
                return Err("nindent wants a number and a text".into());
            };
            let indent = format!("\n{}", " ".repeat(spaces as usize));
            format!("{indent}{}", text.replace('\n', &indent)).into()
        }
        _ => return Err(format!("{name} with {} arguments is unknown", arguments.len())),
    })
}

/// A float64 holds every integer up to here.
fn is_exact(number: &Number) -> bool {
    number.as_f64().is_some_and(|float| float.abs() <= (1_u64 << f64::MANTISSA_DIGITS) as f64)
}

/// What `if` and `with` take for true.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

/// A scalar as it is printed.
fn printed(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Bool(value) => Ok(value.to_string()),
        Value::Number(number) => number_printed(number),
        Value::Null => Err("the value is not there".into()),
        other => Err(format!("{other} is printed, which only scalars can be")),
    }
}

/// A number that helm prints the same wherever it comes from: what files give it is a float64, which Go prints with an exponent
/// from a million on; what `--set` gives it is an integer.
fn number_printed(number: &Number) -> Result<String, String> {
    match number.as_f64() {
        Some(0.0) => Ok("0".to_owned()),
        Some(float) if (1e-4..1e6).contains(&float.abs()) => Ok(float.to_string()),
        _ => Err(format!(
            "{number} is a number that helm prints with an exponent, unless --set gave it: right would be a text, {:?}, or toYaml",
            number.to_string()
        )),
    }
}

/// Go's `%q`.
fn go_quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\x07' => out += "\\a",
            '\x08' => out += "\\b",
            '\x0c' => out += "\\f",
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            '\x0b' => out += "\\v",
            ' '..='~' => out.push(c),
            '\0'..='\x7f' => out += &format!("\\x{:02x}", u32::from(c)),
            // That a character is one to be printed is seen behind another, since some are only marks of it.
            c if format!("x{c}").escape_debug().count() == 2 => out.push(c),
            '\u{80}'..='\u{ffff}' => out += &format!("\\u{:04x}", u32::from(c)),
            _ => out += &format!("\\U{:08x}", u32::from(c)),
        }
    }
    out + "\""
}

fn render(nodes: &[Node], dot: &Value, out: &mut String) -> Result<(), TemplateError> {
    for node in nodes {
        match node {
            Node::Text(text) => *out += text,
            Node::Print(pipeline) => {
                let value = pipeline.value(dot)?;
                *out += &printed(&value).map_err(|why| error(&pipeline.text, &why))?;
            }
            Node::Branch(branch) => {
                let condition = branch.condition.value(dot)?;
                match (is_true(&condition), branch.rebinds) {
                    (true, true) => render(&branch.then, &condition, out)?,
                    (true, false) => render(&branch.then, dot, out)?,
                    (false, _) => render(&branch.otherwise, dot, out)?,
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rendered(text: &str, values: &Value) -> Result<String, TemplateError> {
        Template::parse(text)?.render(&json!({ "Values": values }))
    }

    /// helm makes the same of the same templates and values (it leaves quotes out where YAML needs none).
    #[test]
    fn templates_are_rendered_as_helm_does() {
        let values = json!({ "a": "x\n\"y\" é", "num": 51820, "t": true, "l": [1, "b"], "m": { "k": "v" }, "e": "", "z": 0,
            "big": -999_999, "small": 0.0001, "whole": 1.0, "bigger": 9_007_199_254_740_992_u64, "date": 20_261_121,
            "zero": "0", "port": "9000" });
        for (template, expected) in [
            ("a {{ .Values.num }} b", "a 51820 b"),
            ("a {{- .Values.num -}} b", "a51820b"),
            ("{{ .Values.big }} {{ .Values.small }} {{ .Values.whole }}", "-999999 0.0001 1"),
            ("{{ quote .Values.big }} {{ .Values.z | quote }}", "\"-999999\" \"0\""),
            ("{{ toYaml .Values.bigger }} {{ toYaml .Values.date }}", "9007199254740992 20261121"),
            ("{{ .Values.a | quote }}", r#""x\n\"y\" é""#),
            ("{{ quote .Values.t }}", "\"true\""),
            ("{{ toYaml .Values.num }} {{ toYaml .Values.t }}", "51820 true"),
            (
                "{{ if .Values.e }}1{{ else }}2{{ end }}{{ if .Values.z }}3{{ end }}{{ if .Values.t }}4{{ else }}5{{ end }}",
                "24",
            ),
            (
                "{{ if int .Values.z }}1{{ end }}{{ if int .Values.zero }}2{{ end }}{{ if int .Values.port }}3{{ end }}",
                "3",
            ),
            ("{{ int .Values.num }} {{ .Values.port | int }} {{ int .Values.a }}", "51820 9000 0"),
            ("{{ if .Values.absent }}1{{ end }}{{ if .Values.l }}2{{ end }}", "2"),
            ("{{ with .Values.m }}{{ .k }}{{ end }}{{ with .Values.e }}x{{ end }}", "v"),
            ("l:\n  {{- toYaml .Values.m | nindent 2 }}\nx", "l:\n  \"k\": \"v\"\nx"),
        ] {
            assert_eq!(rendered(template, &values).as_deref(), Ok(expected), "{template}");
        }
    }

    #[test]
    fn what_is_outside_of_the_subset_is_refused() {
        for (template, says) in [
            ("{{ range .Values.l }}{{ end }}", "outside of the subset"),
            ("{{ include \"x\" . }}", "outside of the subset"),
            ("{{ .Values.a | upper }}", "\"upper\" is outside of the subset"),
            ("{{ if not .Values.a }}{{ end }}", "\"not\" is outside of the subset"),
            ("{{ if eq .Values.a .Values.b }}{{ end }}", "\"eq\" is outside of the subset"),
            ("{{ print .Values.a }}", "\"print\" is outside of the subset"),
            ("{{ toJson .Values.a }}", "\"toJson\" is outside of the subset"),
            ("{{ if .a }}{{ else if .b }}{{ end }}", "outside of the subset"),
            ("{{ with .a }}{{ else }}{{ end }}", "outside of the subset"),
            ("{{- /* a comment */ -}}", "is outside of the subset"),
            ("{{ quote \"x\" }}", "is outside of the subset"),
            ("{{ $x }}", "\"$x\" is outside"),
            ("{{ (.Values.a) }}", "is outside"),
            ("{{ .Values.a", "there is no }}"),
            ("{{ if .Values.a }}", "there is no end"),
            ("{{ end }}", "nothing that it belongs to"),
            ("{{ if .a }}{{ else }}{{ else }}{{ end }}", "expected the end of an else"),
            ("{{ .a | }}", "a command is empty"),
        ] {
            let error = Template::parse(template).unwrap_err();
            assert!(error.why.contains(says), "{template}: {error}");
        }
    }

    #[test]
    fn what_is_not_there_or_of_the_wrong_kind_is_an_error() {
        let values = json!({ "l": [1], "n": 1 });
        for template in [
            "{{ .Values.absent }}",
            "{{ .Values.absent | quote }}",
            "{{ toYaml .Values.absent }}",
            "{{ .Values.absent.more }}",
            "{{ .Values.l }}",
            "{{ .Values.l | nindent 2 }}",
            "{{ quote .Values.n .Values.n }}",
            "{{ int .Values.l }}",
            "{{ .Values.n 1 }}",
        ] {
            rendered(template, &values).unwrap_err();
        }
    }

    /// helm's own print of them is `2.0261121e+07`, and another where `--set` gave them.
    #[test]
    fn numbers_that_helm_prints_now_so_now_so_are_refused() {
        let values = json!({ "tag": 20_261_121, "least": 1_000_000, "less": -1_000_000, "tiny": 0.000_09,
            "huge": 9_007_199_254_740_994_u64 });
        for template in [
            "{{ .Values.tag }}",
            "{{ .Values.tag | quote }}",
            "{{ .Values.least }}",
            "{{ .Values.less }}",
            "{{ .Values.tiny }}",
        ] {
            let error = rendered(template, &values).unwrap_err();
            assert!(error.why.contains("with an exponent"), "{template}: {error}");
        }
        assert!(
            rendered("{{ .Values.tag }}", &values)
                .unwrap_err()
                .why
                .contains("a text, \"20261121\"")
        );
        assert!(
            rendered("{{ toYaml .Values.huge }}", &values).unwrap_err().why.contains("exactly")
        );
    }

    #[test]
    fn texts_are_quoted_as_go_does() {
        assert_eq!(
            go_quoted("\u{7}\u{8}\u{b}\u{c}\0\u{7f}\u{2028}é😀\u{301}\u{e0001}"),
            "\"\\a\\b\\v\\f\\x00\\x7f\\u2028é😀\u{301}\\U000e0001\""
        );
    }
}
