//! Splits a list into its items while it arrives, so that only one item is in memory.
//!
//! It only parses brackets and strings. The receiver of an item checks that it is valid JSON.

/// Splits the text of `{"kind": …, "metadata": {…}, "items": [{…}, …]}`.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    /// The bytes of the current value: an item, the name of a field, or its value.
    value: Vec<u8>,
    place: Place,
    /// The number of open brackets in the current value.
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// The field `metadata` of the list, as JSON text.
    metadata: Vec<u8>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Place {
    #[default]
    Before,
    /// Between two fields of the list.
    Fields,
    Name,
    /// After the name of a field.
    Colon(Field),
    Value(Field),
    /// Between two items.
    Items,
    Item,
    After,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Items,
    Metadata,
    Other,
}

/// The text is not a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotAList;

impl Splitter {
    /// Reads the next bytes. Calls `item` for each complete item. The inner error is the error of
    /// `item`.
    pub(crate) fn feed<E>(
        &mut self,
        mut bytes: &[u8],
        mut item: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Result<(), E>, NotAList> {
        while let Some(&byte) = bytes.first() {
            if matches!(self.place, Place::Item | Place::Value(_) | Place::Name) {
                let end = self.end_of_value(bytes);
                let (value, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
                self.value.extend_from_slice(value);
                bytes = rest;
                if end.is_some()
                    && let Err(error) = self.finish(&mut item)
                {
                    return Ok(Err(error));
                }
                continue;
            }
            self.between(byte)?;
            // The first byte of a value belongs to it.
            if !matches!(self.place, Place::Item | Place::Value(_) | Place::Name) {
                bytes = &bytes[1..];
            }
        }
        Ok(Ok(()))
    }

    /// The metadata of the complete list.
    pub(crate) fn end(self) -> Result<Vec<u8>, NotAList> {
        if self.place == Place::After { Ok(self.metadata) } else { Err(NotAList) }
    }

    /// Reads a byte between two values.
    fn between(&mut self, byte: u8) -> Result<(), NotAList> {
        self.place = match (self.place, byte) {
            (place, b' ' | b'\t' | b'\r' | b'\n') => place,
            (Place::Before, b'{') => Place::Fields,
            (Place::Fields, b'"') => Place::Name,
            (Place::Fields, b',') => Place::Fields,
            (Place::Fields, b'}') => Place::After,
            (Place::Colon(field), b':') => Place::Colon(field),
            (Place::Colon(Field::Items), b'[') => Place::Items,
            (Place::Colon(field), _) => Place::Value(field),
            (Place::Items, b'{') => Place::Item,
            (Place::Items, b',') => Place::Items,
            (Place::Items, b']') => Place::Fields,
            _ => return Err(NotAList),
        };
        Ok(())
    }

    /// The end of the current value, if it is in these bytes.
    fn end_of_value(&mut self, bytes: &[u8]) -> Option<usize> {
        for (place, &byte) in bytes.iter().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                if self.in_string || self.depth > 0 {
                    continue;
                }
                return Some(place + 1);
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                // A number or a word ends before the next delimiter.
                b',' | b'}' if self.depth == 0 => return Some(place),
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(place + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }

    /// Ends the current value.
    fn finish<E>(&mut self, item: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut outcome = Ok(());
        self.place = match self.place {
            Place::Name => Place::Colon(match &*self.value {
                b"\"items\"" => Field::Items,
                b"\"metadata\"" => Field::Metadata,
                _ => Field::Other,
            }),
            Place::Item => {
                outcome = item(&self.value);
                Place::Items
            }
            Place::Value(field) => {
                if field == Field::Metadata {
                    self.metadata.clone_from(&self.value);
                }
                Place::Fields
            }
            place => place,
        };
        self.value.clear();
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The items and the metadata of a list that arrives in chunks.
    fn split(text: &str, chunk: usize) -> Result<(Vec<String>, String), NotAList> {
        let mut splitter = Splitter::default();
        let mut items = Vec::new();
        for bytes in text.as_bytes().chunks(chunk) {
            let fed = splitter.feed(bytes, |item| {
                items.push(String::from_utf8(item.to_vec()).unwrap());
                Ok::<_, ()>(())
            });
            fed?.unwrap();
        }
        Ok((items, String::from_utf8(splitter.end()?).unwrap()))
    }

    #[test]
    fn items_are_complete_for_any_split_of_the_bytes() {
        let text = r#" {"kind":"NodeList", "n":12.5,
            "metadata":{"continue":"a]}\"","resourceVersion":"7"},
            "items":[{"a":"}\"]\\"}, {"b":[{}, [1]]},{}], "more":[{"x":"{"}],"last":true}"#;
        for chunk in 1..text.len() {
            let (items, metadata) = split(text, chunk).unwrap();
            assert_eq!(items, [r#"{"a":"}\"]\\"}"#, r#"{"b":[{}, [1]]}"#, "{}"], "{chunk}");
            assert_eq!(metadata, r#"{"continue":"a]}\"","resourceVersion":"7"}"#);
        }
        assert_eq!(
            split(r#"{"items":null,"metadata":{}}"#, 3).unwrap(),
            (Vec::new(), "{}".to_owned())
        );
        assert_eq!(split(r#"{"items":[]}"#, 3).unwrap(), (Vec::new(), String::new()));
    }

    #[test]
    fn an_incomplete_list_is_reported() {
        for text in [
            "",
            "[]",
            "{",
            "x",
            r#"{"items":[{}"#,
            r#"{"items":[7]}"#,
            r#"{"items":[{}]} x"#,
            "Internal error",
        ] {
            assert_eq!(split(text, 2), Err(NotAList), "{text}");
        }
    }

    #[test]
    fn the_receiver_of_an_item_can_stop_the_list() {
        let outcome = Splitter::default().feed(br#"{"items":[{},{}]}"#, |_| Err("enough"));
        assert_eq!(outcome, Ok(Err("enough")));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_cause_no_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            chunk in 1..20usize,
        ) {
            let mut splitter = Splitter::default();
            for bytes in bytes.chunks(chunk) {
                if splitter.feed(bytes, |_| Ok::<_, ()>(())).is_err() {
                    break;
                }
            }
        }
    }
}
