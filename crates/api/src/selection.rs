//! The annotations by which pods request networks: those of the multi-network de-facto standard and of Multus.
//!
//! Users write these annotations, and their consumers differ in strictness. [`NetworkSelection::references`] accepts
//! everything that any of them accepts: counting a reference that Multus rejects does no harm, but overlooking one would let
//! a network be deleted while a pod uses it. [`NetworkSelection::elements`] has only the elements whose every key is valid;
//! one invalid element does not affect the others.

mod editor;
mod element;

use std::fmt;

pub use editor::SelectionEditor;
pub use element::{Bandwidth, NetworkSelectionElement, PortMapping};

use crate::raw_json::{RawObject, error_text, list_items, span_of};

/// The annotation that lists the secondary networks of a pod.
pub const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";
/// The annotation that names the network which replaces the pod's primary network.
pub const DEFAULT_NETWORK_ANNOTATION: &str = "v1.multus-cni.io/default-network";
/// The maximum number of networks that are parsed from one annotation.
pub const MAX_ELEMENTS: usize = 4096;
/// The maximum length of an annotation in bytes. The API server accepts at most this many in all annotations of an object.
pub const MAX_LENGTH: usize = 256 * 1024;
/// The maximum length of user text in an error.
const MAX_QUOTE: usize = 64;

/// The namespace and name of a NetworkAttachmentDefinition.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NadRef {
    /// The namespace of the NAD.
    pub namespace: String,
    /// The name of the NAD.
    pub name: String,
}

/// How an annotation is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum SelectionForm {
    /// The object does not have the annotation.
    #[default]
    Absent,
    /// The annotation is empty or blank. It requests no network, like an absent one or `[]`.
    Empty,
    /// Names separated by commas, each `[NAMESPACE/]NAME[@INTERFACE]`.
    Names,
    /// A JSON list.
    Json,
}

/// The result of parsing an annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkSelection {
    /// How the annotation is written.
    pub form: SelectionForm,
    /// The elements, in the order of the annotation. Empty names between commas are left out.
    pub entries: Vec<SelectionEntry>,
    /// Why the annotation as a whole is invalid. Consumers such as Multus then attach none of its networks.
    pub error: Option<Error>,
}

/// One element of an annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectionEntry {
    /// The namespace, if it is given, and the name of the NAD. Known even if other keys are invalid.
    nad: Option<(Option<String>, String)>,
    /// The element, or why it is invalid.
    pub element: Result<NetworkSelectionElement, ElementError>,
}

/// A position in an annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The line, from 1.
    pub line: usize,
    /// The column in bytes, from 1.
    pub column: usize,
}

/// Why an annotation is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Invalid JSON.
    #[error("invalid JSON at {position}: {cause}")]
    Json {
        /// Where the parser stopped.
        position: Position,
        /// What it expected.
        cause: String,
    },
    /// JSON that is not a list.
    #[error("expected a JSON list of objects, each with a name")]
    NotAList,
    /// Too many networks.
    #[error("the annotation lists more than {MAX_ELEMENTS} networks; the rest is ignored")]
    TooMany,
    /// Too long for an annotation.
    #[error("the annotation has {0} bytes, an object can have {MAX_LENGTH} bytes of annotations")]
    TooLong(usize),
    /// An invalid element.
    #[error(transparent)]
    Element(#[from] ElementError),
}

/// Why one element of an annotation is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("element [{index}] at {position}: {message}")]
pub struct ElementError {
    /// The index of the element, from 0.
    pub index: usize,
    /// Where the invalid value starts; the element itself if it is invalid as a whole.
    pub position: Position,
    /// The invalid key.
    pub key: Option<&'static str>,
    /// What is invalid.
    pub message: String,
}

/// A problem in the text of an element, at an offset in that text.
struct Problem {
    offset: usize,
    key: Option<&'static str>,
    message: String,
}

impl NadRef {
    /// A reference to the NAD of this name in this namespace.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Parses `name` or `namespace/name`, the form in which virtual machines refer to a NAD.
    pub fn parse(text: &str, namespace: &str) -> Option<Self> {
        let item = split_item(text)?;
        Some(Self::new(item.namespace.unwrap_or(namespace), item.name))
    }
}

impl fmt::Display for NadRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} column {}", self.line, self.column)
    }
}

/// Finds the positions of bytes in one pass over a text.
struct PositionCursor<'a> {
    text: &'a str,
    offset: usize,
    position: Position,
}

impl<'a> PositionCursor<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, offset: 0, position: Position { line: 1, column: 1 } }
    }

    /// The position of a byte, which is not before the byte of the last call.
    fn at(&mut self, offset: usize) -> Position {
        for byte in self.text.bytes().take(offset).skip(self.offset) {
            self.position.column += 1;
            if byte == b'\n' {
                self.position = Position { line: self.position.line + 1, column: 1 };
            }
        }
        self.offset = offset;
        self.position
    }
}

impl SelectionForm {
    fn of(text: Option<&str>) -> Self {
        match text {
            None => Self::Absent,
            Some(text) if text.trim().is_empty() => Self::Empty,
            Some(text) if text.contains(['[', '{', '"']) => Self::Json,
            Some(_) => Self::Names,
        }
    }
}

impl NetworkSelection {
    /// Parses the value of an annotation.
    pub fn parse(text: Option<&str>) -> Self {
        let form = SelectionForm::of(text);
        let mut selection = Self { form, ..Self::default() };
        let text = text.unwrap_or_default();
        let mut cursor = PositionCursor::new(text);
        match form {
            SelectionForm::Absent | SelectionForm::Empty => {}
            SelectionForm::Names => {
                items(text).for_each(|item| selection.push(&mut cursor, item, parse_item));
            }
            SelectionForm::Json => selection.parse_json(&mut cursor),
        }
        selection
    }

    fn parse_json(&mut self, cursor: &mut PositionCursor<'_>) {
        let text = cursor.text;
        match list_items(text) {
            Ok(list) => list.into_iter().for_each(|value| self.push(cursor, value, parse_value)),
            Err(error) if error.is_data() => {
                self.fail(Error::NotAList);
                self.push(cursor, text.trim(), parse_value);
            }
            Err(error) => {
                let position = Position { line: error.line(), column: error.column() };
                self.fail(Error::Json { position, cause: truncate(&error_text(&error)) });
            }
        }
    }

    fn push(&mut self, cursor: &mut PositionCursor<'_>, part: &str, parse: fn(&str) -> Parsed) {
        let index = self.entries.len();
        if index >= MAX_ELEMENTS {
            return self.fail(Error::TooMany);
        }
        let start = span_of(cursor.text, part).start;
        self.entries.push(parse(part).into_entry(index, |offset| cursor.at(start + offset)));
    }

    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }

    /// The valid elements, each with its index.
    pub fn elements(&self) -> impl Iterator<Item = (usize, &NetworkSelectionElement)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(index, entry)| Some((index, entry.element.as_ref().ok()?)))
    }

    /// The problems with the annotation and its elements, in their order.
    pub fn errors(&self) -> impl Iterator<Item = Error> {
        let of_elements = self.entries.iter().filter_map(|entry| entry.element.as_ref().err().cloned());
        self.error.iter().cloned().chain(of_elements.map(Error::Element))
    }

    /// The NADs that the annotation names in an object of this namespace, those of invalid elements included.
    pub fn references(&self, namespace: &str) -> impl Iterator<Item = NadRef> {
        self.entries.iter().filter_map(move |entry| entry.reference(namespace))
    }
}

impl SelectionEntry {
    /// The NAD that the element names in an object of this namespace. An invalid element may name one too.
    pub fn reference(&self, namespace: &str) -> Option<NadRef> {
        let (own, name) = self.nad.as_ref()?;
        Some(NadRef::new(own.as_deref().unwrap_or(namespace), name.as_str()))
    }
}

/// What the text of one element says.
struct Parsed {
    nad: Option<(Option<String>, String)>,
    element: Result<NetworkSelectionElement, Problem>,
}

impl Parsed {
    fn invalid(message: impl Into<String>) -> Self {
        Self { nad: None, element: Err(Problem { offset: 0, key: None, message: message.into() }) }
    }

    fn into_entry(self, index: usize, position: impl FnOnce(usize) -> Position) -> SelectionEntry {
        let element = self.element.map_err(|Problem { offset, key, message }| ElementError {
            index,
            position: position(offset),
            key,
            message,
        });
        SelectionEntry { nad: self.nad, element }
    }
}

/// The parts of `[namespace/]name[@interface]`.
struct Item<'a> {
    namespace: Option<&'a str>,
    name: &'a str,
    interface: Option<&'a str>,
}

/// The names in a list with commas, without the white space around them and without empty ones.
fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

fn parse_item(text: &str) -> Parsed {
    let Some(item) = split_item(text) else {
        return Parsed::invalid(format!("{:?} is not [NAMESPACE/]NAME[@INTERFACE]", truncate(text)));
    };
    let nad = Some((item.namespace.map(str::to_owned), item.name.to_owned()));
    let element = item.interface.map(str::parse).transpose().map_err(|error: crate::ifname::Error| Problem {
        offset: text.find('@').map_or(0, |at| at + 1),
        key: Some("interface"),
        message: error.to_string(),
    });
    let element = element.map(|interface| NetworkSelectionElement {
        namespace: item.namespace.map(str::to_owned),
        name: item.name.to_owned(),
        interface,
        ..NetworkSelectionElement::default()
    });
    Parsed { nad, element }
}

/// Parses one value of a JSON list.
fn parse_value(text: &str) -> Parsed {
    if let Ok(object) = RawObject::parse(text) {
        return element::parse(&object);
    }
    let mut parsed = Parsed::invalid("expected an object with a name");
    if let Ok(name) = serde_json::from_str::<String>(text) {
        parsed.nad = parse_item(&name).nad;
    }
    parsed
}

/// Splits `[namespace/]name[@interface]`, with optional blanks around the parts.
fn split_item(text: &str) -> Option<Item<'_>> {
    let (namespace, rest) = match text.split_once('/') {
        Some((namespace, rest)) => (Some(namespace.trim()), rest),
        None => (None, text),
    };
    let (name, interface) = match rest.split_once('@') {
        Some((name, interface)) => (name.trim(), Some(interface.trim())),
        None => (rest.trim(), None),
    };
    let namespace = namespace.filter(|namespace| !namespace.is_empty());
    let valid = namespace.is_none_or(is_name)
        && is_name(name)
        && !interface.is_some_and(|interface| interface.contains(['@', '/']));
    valid.then_some(Item { namespace, name, interface: interface.filter(|it| !it.is_empty()) })
}

/// Whether this is a valid object name.
fn is_name(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    (1..=253).contains(&text.len()) && text.chars().all(inner) && !text.starts_with(['-', '.'])
}

fn truncate(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTE) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests;
