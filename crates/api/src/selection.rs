//! The annotations by which pods request networks: those of the multi-network de-facto standard and of Multus.
//!
//! Users write these annotations, and their consumers differ in strictness. This parser accepts everything that any of
//! them accepts: counting a reference that Multus rejects does no harm, but overlooking one would let a network be
//! deleted while a pod uses it.

use std::fmt;

use serde_json::{Map, Value};

/// The annotation that lists the secondary networks of a pod.
pub const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";
/// The annotation that names the network which replaces the pod's primary network.
pub const DEFAULT_NETWORK_ANNOTATION: &str = "v1.multus-cni.io/default-network";
/// The maximum number of networks that are parsed from one annotation.
pub const MAX_ELEMENTS: usize = 4096;
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

/// One network that a pod requests.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NetworkSelectionElement {
    /// The namespace of the NAD, if it is given.
    pub namespace: Option<String>,
    /// The name of the NAD.
    pub name: String,
    /// The requested name of the interface in the pod.
    pub interface: Option<String>,
    /// The requested MAC address.
    pub mac: Option<String>,
    /// The requested IP addresses.
    pub ips: Vec<String>,
    /// Additional arguments for the plugin.
    pub cni_args: Option<Map<String, Value>>,
    /// The name of the IPAMClaim with its addresses.
    pub ipam_claim: Option<String>,
    /// The gateways of the pod's default route, if it uses this network.
    pub default_route: Vec<String>,
}

/// The result of parsing an annotation: all valid elements, and the first error.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NetworkSelection {
    /// The valid elements, in the order of the annotation.
    pub elements: Vec<NetworkSelectionElement>,
    /// The first error.
    pub error: Option<Error>,
}

/// Why a part of an annotation is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Invalid JSON.
    #[error("invalid JSON: {0}")]
    Json(String),
    /// JSON that is not a list of objects with names.
    #[error("expected a JSON list of objects, each with a name")]
    Shape,
    /// An invalid name.
    #[error("{0:?} is not [NAMESPACE/]NAME[@INTERFACE]")]
    Name(String),
    /// Too many networks.
    #[error("the annotation lists more than {MAX_ELEMENTS} networks; the rest is ignored")]
    TooMany,
}

impl NadRef {
    /// A reference to the NAD of this name in this namespace.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Parses `name` or `namespace/name`, the form in which virtual machines refer to a NAD.
    pub fn parse(text: &str, namespace: &str) -> Option<Self> {
        let element = parse_item(text)?;
        Some(element.reference(namespace))
    }
}

impl fmt::Display for NadRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl NetworkSelectionElement {
    /// The NAD that the element refers to in an object of this namespace.
    pub fn reference(&self, namespace: &str) -> NadRef {
        NadRef::new(self.namespace.as_deref().unwrap_or(namespace), self.name.as_str())
    }
}

impl NetworkSelection {
    /// Parses the value of an annotation.
    pub fn parse(text: &str) -> Self {
        let mut selection = Self::default();
        if text.contains(['[', '{', '"']) {
            selection.parse_json(text);
        } else {
            selection.parse_text(text);
        }
        selection
    }

    fn parse_text(&mut self, text: &str) {
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            match parse_item(item) {
                Some(element) => self.push(element),
                None => self.fail(Error::Name(truncate(item))),
            }
        }
    }

    fn parse_json(&mut self, text: &str) {
        match serde_json::from_str(text) {
            Ok(Value::Array(list)) => list.iter().for_each(|value| self.parse_value(value)),
            Ok(value @ (Value::Object(_) | Value::String(_))) => {
                self.fail(Error::Shape);
                self.parse_value(&value);
            }
            Ok(Value::Null | Value::Bool(_) | Value::Number(_)) => self.fail(Error::Shape),
            Err(error) => self.fail(Error::Json(truncate(&error.to_string()))),
        }
    }

    fn parse_value(&mut self, value: &Value) {
        match value {
            Value::Object(fields) => match parse_object(fields) {
                Some(element) => self.push(element),
                None => self.fail(Error::Shape),
            },
            Value::String(text) => {
                self.fail(Error::Shape);
                if let Some(element) = parse_item(text) {
                    self.push(element);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => self.fail(Error::Shape),
        }
    }

    fn push(&mut self, element: NetworkSelectionElement) {
        if self.elements.len() < MAX_ELEMENTS {
            self.elements.push(element);
        } else {
            self.fail(Error::TooMany);
        }
    }

    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }
}

/// Parses `[namespace/]name[@interface]`, with optional blanks around the parts.
fn parse_item(text: &str) -> Option<NetworkSelectionElement> {
    let (namespace, rest) = match text.split_once('/') {
        Some((namespace, rest)) => (Some(namespace.trim()), rest),
        None => (None, text),
    };
    let (name, interface) = match rest.split_once('@') {
        Some((name, interface)) => (name.trim(), Some(interface.trim())),
        None => (rest.trim(), None),
    };
    let namespace = namespace.filter(|namespace| !namespace.is_empty());
    if !namespace.is_none_or(is_name) || !is_name(name) || interface.is_some_and(|it| it.contains(['@', '/']))
    {
        return None;
    }
    Some(NetworkSelectionElement {
        namespace: namespace.map(str::to_owned),
        name: name.to_owned(),
        interface: interface.filter(|it| !it.is_empty()).map(str::to_owned),
        ..NetworkSelectionElement::default()
    })
}

fn parse_object(fields: &Map<String, Value>) -> Option<NetworkSelectionElement> {
    // Like Go's JSON decoder, which Multus uses, accept keys in any case.
    let field = |key: &str| {
        let exact = fields.get(key);
        exact.or_else(|| {
            fields.iter().find(|(name, _)| name.eq_ignore_ascii_case(key)).map(|(_, value)| value)
        })
    };
    let text = |key: &str| field(key)?.as_str().map(str::trim).filter(|text| !text.is_empty());
    let list = |key: &str| match field(key) {
        Some(Value::Array(list)) => list.iter().filter_map(|one| one.as_str().map(str::to_owned)).collect(),
        Some(Value::String(one)) => vec![one.clone()],
        _ => Vec::new(),
    };
    // The standard does not allow `namespace/name` here, but it is in use.
    let named = parse_item(text("name")?)?;
    let namespace = match text("namespace") {
        Some(namespace) if !is_name(namespace) => return None,
        Some(namespace) => Some(namespace.to_owned()),
        None => named.namespace,
    };
    Some(NetworkSelectionElement {
        namespace,
        name: named.name,
        interface: text("interface").or(text("interfaceRequest")).map(str::to_owned).or(named.interface),
        mac: text("mac").map(str::to_owned),
        ips: list("ips"),
        cni_args: field("cni-args").and_then(Value::as_object).cloned(),
        ipam_claim: text("ipam-claim-reference").map(str::to_owned),
        default_route: list("default-route"),
    })
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn references_in(networks: &str) -> Vec<String> {
        let mut found: Vec<NadRef> =
            NetworkSelection::parse(networks).elements.iter().map(|one| one.reference("home")).collect();
        found.sort();
        found.dedup();
        found.iter().map(NadRef::to_string).collect()
    }

    #[test]
    fn parses_every_form_of_a_reference() {
        for (text, expected) in [
            ("", &[][..]),
            (" , ,", &[]),
            ("a", &["home/a"]),
            ("other/a", &["other/a"]),
            ("a@eth1", &["home/a"]),
            ("other/a@eth1", &["other/a"]),
            (" other / a @ eth1 ", &["other/a"]),
            ("/a", &["home/a"]),
            ("a,b , other/c@x", &["home/a", "home/b", "other/c"]),
            ("a,a@eth2", &["home/a"]),
            (r#"[{"name": "a"}]"#, &["home/a"]),
            (r#"[{"name": "a", "namespace": "other"}]"#, &["other/a"]),
            (r#"[{"name": "a", "namespace": ""}]"#, &["home/a"]),
            (r#"[{"Name": "a", "Namespace": "other"}]"#, &["other/a"]),
            (r#"[{"name": "other/a"}]"#, &["other/a"]),
            (r#" [ {"name": "a", "interface": "x"}, {"name": "b"} ] "#, &["home/a", "home/b"]),
            (r#"{"name": "a"}"#, &["home/a"]),
            (r#"["a", "other/b"]"#, &["home/a", "other/b"]),
            ("a.b-c", &["home/a.b-c"]),
        ] {
            assert_eq!(references_in(text), expected, "{text}");
        }
    }

    #[test]
    fn valid_elements_are_kept_and_the_first_error_is_reported() {
        for (text, expected, error) in [
            ("a,B!,c", &["home/a", "home/c"][..], Error::Name("B!".into())),
            ("x/y/z", &[], Error::Name("x/y/z".into())),
            ("a@b@c", &[], Error::Name("a@b@c".into())),
            (r#"[{"name": "a"}, 7, {"mac": "x"}, {"name": "b"}]"#, &["home/a", "home/b"], Error::Shape),
            (r#"[{"name": 7}]"#, &[], Error::Shape),
        ] {
            assert_eq!(
                (references_in(text), NetworkSelection::parse(text).error),
                (expected.iter().map(|it| (*it).to_owned()).collect(), Some(error))
            );
        }
        assert!(matches!(NetworkSelection::parse("[{").error, Some(Error::Json(_))));
        assert!(matches!(NetworkSelection::parse(&"[".repeat(100_000)).error, Some(Error::Json(_))));
        let many = NetworkSelection::parse(&"a,".repeat(MAX_ELEMENTS + 1));
        assert_eq!((many.elements.len(), many.error), (MAX_ELEMENTS, Some(Error::TooMany)));
    }

    #[test]
    fn all_fields_of_an_element_are_parsed() {
        let text = r#"[{"name": "a", "interface": "net7", "mac": "02:00:00:00:00:01", "ips": ["10.0.0.1/24"],
            "cni-args": {"x": 1}, "ipam-claim-reference": "c", "default-route": ["10.0.0.254"]}]"#;
        let expected = NetworkSelectionElement {
            namespace: None,
            name: "a".to_owned(),
            interface: Some("net7".to_owned()),
            mac: Some("02:00:00:00:00:01".to_owned()),
            ips: vec!["10.0.0.1/24".to_owned()],
            cni_args: serde_json::json!({"x": 1}).as_object().cloned(),
            ipam_claim: Some("c".to_owned()),
            default_route: vec!["10.0.0.254".to_owned()],
        };
        assert_eq!(NetworkSelection::parse(text), NetworkSelection { elements: vec![expected], error: None });
        assert_eq!(NetworkSelection::parse("a@net7").elements[0].interface.as_deref(), Some("net7"));
    }

    proptest! {
        #[test]
        fn never_panics(text in any::<String>(), json in r#"\[[\[\]{}",:a-z/@0-9]*\]?"#) {
            NetworkSelection::parse(&text);
            NetworkSelection::parse(&json);
        }
    }
}
