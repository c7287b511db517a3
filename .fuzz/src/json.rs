//! A twin of the scan made of serde_json: members of an object as raw values, in order, repeated ones too.
//!
//! Where the scan is wider by intent (`NaN`, `Infinity`, `-Infinity`), [`mask`] puts arrays of the same length there, which
//! [`Value::of`] knows again: `[7]`, `[777777]`, `[7777777]`.

use std::fmt;
use std::ops::Range;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// A member's name without escapes (a lone surrogate as three bytes), and where its value stands.
pub type Member = (Vec<u8>, Range<usize>);

/// Bytes like `body`, of the same length, in which what only Python takes for a number is an array.
pub fn mask(body: &[u8]) -> Vec<u8> {
    let mut out = body.to_vec();
    let (mut at, mut is_quoted) = (0, false);
    while at < out.len() {
        match out[at] {
            b'"' => is_quoted = !is_quoted,
            b'\\' if is_quoted => at += 1,
            _ if is_quoted => {}
            _ => {
                for word in [&b"-Infinity"[..], b"Infinity", b"NaN"] {
                    if out[at..].starts_with(word) {
                        out[at..at + word.len()].fill(b'7');
                        out[at] = b'[';
                        out[at + word.len() - 1] = b']';
                        at += word.len() - 1;
                        break;
                    }
                }
            }
        }
        at += 1;
    }
    out
}

struct Name;

impl Visitor<'_> for Name {
    type Value = Vec<u8>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }
    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
        Ok(bytes.to_vec())
    }
    fn visit_str<E>(self, text: &str) -> Result<Vec<u8>, E> {
        Ok(text.as_bytes().to_vec())
    }
}

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Vec<u8>;
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Vec<u8>, D::Error> {
        from.deserialize_bytes(self)
    }
}

struct Parts<'b>(&'b [u8]);

impl Parts<'_> {
    fn place(&self, raw: &RawValue) -> Range<usize> {
        let start = raw.get().as_ptr() as usize - self.0.as_ptr() as usize;
        start..start + raw.get().len()
    }
}

impl<'de> Visitor<'de> for Parts<'de> {
    type Value = Vec<Member>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<Member>, A::Error> {
        let mut members = Vec::new();
        while let Some(name) = map.next_key_seed(Name)? {
            members.push((name, self.place(map.next_value::<&RawValue>()?)));
        }
        Ok(members)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<Member>, A::Error> {
        let mut elements = Vec::new();
        while let Some(raw) = seq.next_element::<&RawValue>()? {
            elements.push((Vec::new(), self.place(raw)));
        }
        Ok(elements)
    }
}

/// Whether it is one JSON text of any kind.
pub fn is_json(masked: &[u8]) -> bool {
    serde_json::from_slice::<&RawValue>(masked).is_ok()
}

/// The members of an object; `None`: it is none.
pub fn members(masked: &[u8]) -> Option<Vec<Member>> {
    let mut from = serde_json::Deserializer::from_slice(masked);
    let members = from.deserialize_map(Parts(masked)).ok()?;
    from.end().ok()?;
    Some(members)
}

/// The elements of an array; `None`: it is none.
pub fn elements(masked: &[u8]) -> Option<Vec<Range<usize>>> {
    let mut from = serde_json::Deserializer::from_slice(masked);
    let elements = from.deserialize_seq(Parts(masked)).ok()?;
    from.end().ok()?;
    Some(elements.into_iter().map(|(_, place)| place).collect())
}

/// Levels of nesting, the outermost one included.
pub fn depth(masked: &[u8]) -> usize {
    let (mut depth, mut most, mut is_quoted, mut is_escaped) = (0usize, 0, false, false);
    for byte in masked {
        match (is_quoted, byte) {
            (true, _) if is_escaped => is_escaped = false,
            (true, b'\\') => is_escaped = true,
            (_, b'"') => is_quoted = !is_quoted,
            (false, b'{' | b'[') => depth += 1,
            (false, b'}' | b']') => depth = depth.saturating_sub(1),
            _ => {}
        }
        most = most.max(depth);
    }
    most
}

/// A value, for comparisons: members in order, numbers as they are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number, or `true`, `false`, `null`.
    Word(Vec<u8>),
    /// A string without its escapes.
    Text(Vec<u8>),
    Array(Vec<Value>),
    Object(Vec<(Vec<u8>, Value)>),
}

impl Value {
    /// `masked` is one JSON text.
    pub fn of(masked: &[u8]) -> Option<Value> {
        let text = masked.trim_ascii();
        match text.first()? {
            b'{' => {
                let of_member = |(name, at): Member| Some((name, Value::of(&text[at])?));
                members(text)?
                    .into_iter()
                    .map(of_member)
                    .collect::<Option<_>>()
                    .map(Value::Object)
            }
            b'[' if matches!(text, b"[7]" | b"[777777]" | b"[7777777]") => {
                Some(Value::Word(text.to_vec()))
            }
            b'[' => {
                let of_element = |at: Range<usize>| Value::of(&text[at]);
                elements(text)?
                    .into_iter()
                    .map(of_element)
                    .collect::<Option<_>>()
                    .map(Value::Array)
            }
            b'"' => {
                let mut from = serde_json::Deserializer::from_slice(text);
                let inside = Name.deserialize(&mut from).ok()?;
                from.end().ok().map(|()| Value::Text(inside))
            }
            _ => is_json(text).then(|| Value::Word(text.to_vec())),
        }
    }

    pub fn word(word: &str) -> Value {
        Value::Word(word.as_bytes().to_vec())
    }

    pub fn is(&self, word: &str) -> bool {
        matches!(self, Value::Word(own) if own == word.as_bytes())
    }

    /// The value as a number, if it is one of RFC 8259 that an f64 can hold.
    pub fn number(&self) -> Option<f64> {
        let Value::Word(word) = self else { return None };
        let text = std::str::from_utf8(word).ok()?;
        serde_json::from_str::<f64>(text).ok()
    }

    /// The value as a count.
    pub fn count(&self) -> Option<u64> {
        let Value::Word(word) = self else { return None };
        serde_json::from_slice::<u64>(word).ok()
    }
}
