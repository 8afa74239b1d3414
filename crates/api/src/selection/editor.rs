//! Changes single elements of an annotation and keeps all other bytes.

use serde_json::Value;

use super::{
    Error, MAX_LENGTH, NetworkSelection, NetworkSelectionElement, PositionCursor, SelectionEntry,
    SelectionForm, items, parse_value,
};
use crate::{
    RawJson, RawObject,
    raw_json::{list_items, span_of},
};

/// An annotation that is being edited.
///
/// Elements that no edit names keep their bytes, and so does the text between them. An annotation that lists names becomes a
/// JSON list only if an edit cannot be expressed in names; the elements then get the keys `name`, `namespace` and
/// `interface`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectionEditor {
    form: SelectionForm,
    /// The text before the first element.
    head: String,
    elements: Vec<EditedElement>,
    /// The text after the last element.
    tail: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct EditedElement {
    /// The text between the element before and this one.
    separator: String,
    text: String,
    entry: SelectionEntry,
}

impl SelectionEditor {
    /// Parses the value of an annotation. Invalid elements are kept; an annotation that is invalid as a whole is an error.
    pub fn parse(text: Option<&str>) -> Result<Self, Error> {
        let value = text.unwrap_or_default();
        if value.len() > MAX_LENGTH {
            return Err(Error::TooLong(value.len()));
        }
        let selection = NetworkSelection::parse(text);
        if let Some(error) = selection.error {
            return Err(error);
        }
        let parts = match selection.form {
            SelectionForm::Absent | SelectionForm::Empty => Vec::new(),
            SelectionForm::Names => items(value).collect(),
            // It was parsed before.
            SelectionForm::Json => list_items(value).unwrap_or_default(),
        };
        let (mut elements, mut end) = (Vec::new(), 0);
        let mut head = String::new();
        for (part, entry) in parts.into_iter().zip(selection.entries) {
            let span = span_of(value, part);
            let before = value[end..span.start].to_owned();
            let separator = if elements.is_empty() {
                head = before;
                String::new()
            } else {
                before
            };
            elements.push(EditedElement { separator, text: part.to_owned(), entry });
            end = span.end;
        }
        let mut tail = value[end..].to_owned();
        if elements.is_empty() && selection.form == SelectionForm::Json {
            let open = tail.find('[').map_or(0, |at| at + 1);
            head = tail.drain(..open).collect();
        }
        Ok(Self { form: selection.form, head, elements, tail })
    }

    /// How the annotation is written.
    pub fn form(&self) -> SelectionForm {
        self.form
    }

    /// The elements, in the order of the annotation.
    pub fn entries(&self) -> impl Iterator<Item = &SelectionEntry> {
        self.elements.iter().map(|element| &element.entry)
    }

    /// Adds an element at the end. Fails if the annotation must become JSON and has an invalid name.
    pub fn append(&mut self, element: &NetworkSelectionElement) -> Result<(), Error> {
        let item = element.to_item().filter(|_| self.form == SelectionForm::Names);
        if item.is_none() {
            self.convert_to_json()?;
        }
        let text = item.unwrap_or_else(|| element.to_json());
        let separator = match (self.elements.as_slice(), self.form) {
            ([], _) => String::new(),
            // Continue the layout of the list.
            ([.., last], _) if !last.separator.is_empty() => last.separator.clone(),
            (_, SelectionForm::Json) => {
                let blank = self.head.rfind('[').map_or("", |open| &self.head[open + 1..]);
                format!(",{blank}")
            }
            _ => ",".to_owned(),
        };
        if self.form == SelectionForm::Names && self.tail.trim_end().ends_with(',') {
            self.tail.clear();
        }
        let entry = SelectionEntry {
            nad: Some((element.namespace.clone(), element.name.clone())),
            element: Ok(element.clone()),
        };
        self.elements.push(EditedElement { separator, text, entry });
        Ok(())
    }

    /// Removes the valid elements that the predicate selects by index and content, and returns how many.
    pub fn remove(&mut self, mut selected: impl FnMut(usize, &NetworkSelectionElement) -> bool) -> usize {
        let before = self.elements.len();
        let mut index = 0;
        self.elements.retain(|element| {
            let remove = element.entry.element.as_ref().is_ok_and(|it| selected(index, it));
            index += 1;
            !remove
        });
        let removed = before - self.elements.len();
        match self.elements.first_mut() {
            Some(first) => first.separator.clear(),
            None if removed > 0 && self.form == SelectionForm::Json => {
                self.head.truncate(self.head.rfind('[').map_or(0, |open| open + 1));
                self.tail.drain(..self.tail.find(']').unwrap_or_default());
            }
            None if removed > 0 => {
                self.head.clear();
                self.tail.clear();
            }
            None => {}
        }
        removed
    }

    /// Sets one key of an element and keeps the others as they are. An index without an element changes nothing.
    ///
    /// The position in an error of the changed element counts from the start of the element.
    pub fn set(&mut self, index: usize, key: &str, value: &Value) -> Result<(), Error> {
        if index >= self.elements.len() {
            return Ok(());
        }
        self.convert_to_json()?;
        let element = &mut self.elements[index];
        let Ok(mut object) = RawObject::parse(&element.text) else { return Err(Error::NotAList) };
        object.set(key, &RawJson::from(value));
        element.text = object.to_string();
        let mut cursor = PositionCursor::new(&element.text);
        element.entry = parse_value(&element.text).into_entry(index, |offset| cursor.at(offset));
        Ok(())
    }

    /// The edited annotation; `None` if it was absent and nothing was added.
    pub fn finish(self) -> Result<Option<String>, Error> {
        if self.form == SelectionForm::Absent {
            return Ok(None);
        }
        let mut text = self.head;
        for element in self.elements {
            text.push_str(&element.separator);
            text.push_str(&element.text);
        }
        text.push_str(&self.tail);
        if text.len() > MAX_LENGTH { Err(Error::TooLong(text.len())) } else { Ok(Some(text)) }
    }

    /// Makes the annotation a JSON list.
    fn convert_to_json(&mut self) -> Result<(), Error> {
        if self.form == SelectionForm::Json {
            return Ok(());
        }
        let texts = self.entries().map(|entry| match &entry.element {
            Ok(element) => Ok(element.to_json()),
            Err(error) => Err(Error::from(error.clone())),
        });
        let texts: Vec<String> = texts.collect::<Result<_, _>>()?;
        for (index, (element, text)) in self.elements.iter_mut().zip(texts).enumerate() {
            let separator = if index == 0 { "" } else { "," };
            (element.separator, element.text) = (separator.to_owned(), text);
        }
        (self.head, self.tail) = ("[".to_owned(), "]".to_owned());
        self.form = SelectionForm::Json;
        Ok(())
    }
}
